"""Layers that carry a state along the sequence instead of attending: Mamba-2, gated delta rule, lightning attention.

The scan is one call of a library (mamba-ssm, flash-linear-attention) on all stacks, which nobody measured here.
Its operator has the work; everything around it is products, a short convolution and a gated norm.
"""

from __future__ import annotations

from wattcast.core.errors import bad_value
from wattcast.workload.engine_operators import CausalConv, StateScan
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.operator_types import RmsNorm
from wattcast.workload.tracing import tensor_functions as functional
from wattcast.workload.tracing.program import PassSettings
from wattcast.workload.tracing.symbolic_tensor import Tensor, pointwise


def scan_sequence(dims: layers.StateDims, rule: str, run: PassSettings, x: Tensor) -> Tensor:
    """Project, convolve, scan, norm by a gate, and project back; ``rule`` is mamba2, delta or lightning."""
    if run.training:
        raise bad_value("phase", "prefill, decode or generate: gradients of sequence scans are not known", "train")
    tape, hidden = x.tape, x.shape[-1]
    x = functional.enter_parallel(x, run.tp)
    heads, groups = dims.heads // run.tp, max(dims.key_heads // run.tp, 1)
    inner, keys = heads * dims.value_dim, groups * dims.key_dim
    if rule == "lightning":  # keys and queries are as many as values, through an activation; the gate comes apart
        mixed = pointwise("silu", layers.project(run, x, 3 * inner, dims.bias))
        gate = layers.project(run, x, inner, dims.bias)
    else:
        numbers = heads if rule == "mamba2" else 2 * heads  # a step of each head; the delta rule's decay and strength
        if rule == "mamba2":
            wide = layers.project(run, x, 2 * inner + 2 * keys + numbers, dims.bias)
        else:
            wide = layers.project(run, x, 2 * inner + 2 * keys, dims.bias)
            layers.project(run, x, numbers, dims.bias)
        gate, mixed = wide.slice(-1, 0, inner), wide.slice(-1, inner, 2 * inner + 2 * keys)
        for _ in range(3 if rule == "mamba2" else 2):  # decay, its step's offset, and Mamba-2's skip
            tape.parameter(heads, dtype=run.dtype)
    batch, length = x.shape[:2]
    if dims.kernel and rule != "lightning":
        channels = inner + 2 * keys
        weights = [tape.parameter(channels, dims.kernel, dtype=run.dtype)]
        weights += [tape.parameter(channels, dtype=run.dtype)] if dims.conv_bias else []
        out = tape.empty((batch, length, channels), x.dtype)
        tape.emit(CausalConv(batch, length, channels, dims.kernel, dtype=x.dtype), (mixed, *weights), (out,))
        mixed = out
        tape.cache_byte += batch * channels * dims.kernel * x.dtype.byte if run.cached else 0
    state = tape.empty((batch, heads, dims.key_dim, dims.value_dim), x.dtype)
    tape.cache_byte += state.byte if run.cached else 0
    out = tape.empty((batch, length, inner), x.dtype)
    chunk = min(dims.chunk, length)
    op = StateScan(
        batch, length, heads, groups, dims.key_dim, dims.value_dim, chunk, rule, resumed=run.past > 0, dtype=x.dtype
    )
    tape.emit(op, (mixed,), (out,))
    if dims.norm:
        tape.parameter(dims.value_dim if rule == "delta" else inner, dtype=run.dtype)
        dim = dims.value_dim if rule == "delta" else inner
        byte = out.numel * x.dtype.byte
        normed = tape.empty(out.shape, x.dtype)
        tape.emit(RmsNorm(out.numel // dim, dim, dtype=x.dtype, read=2 * byte), (out, gate), (normed,))
        out = normed
    else:
        out = pointwise("mul", out, pointwise("silu", gate))
    return functional.leave_parallel(layers.project(run, out, hidden, dims.bias), run.tp)
