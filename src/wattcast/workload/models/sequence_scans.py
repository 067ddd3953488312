"""Layers that carry a state along the sequence, which some decoders have in place of attention.

They are Mamba, Mamba-2, the gated delta rule and lightning attention. A scan is one call of a
library (mamba-ssm, flash-linear-attention) on all stacks, which nobody measured here. Its operator
has the work; everything around it is products, a short convolution and a gated norm."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.core import bad_value
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.operator_types import RmsNorm
from wattcast.workload.program import PassSettings
from wattcast.workload.scan_operators import CausalConv, StateScan
from wattcast.workload.symbolic_tensor import Tensor, pointwise


@dataclass(frozen=True)
class _ScanShare:
    """What one tensor-parallel GPU has of a layer that scans."""

    heads: int
    key_heads: int
    inner: int  # width of the values of all heads
    keys: int  # width of the keys of all key heads

    @classmethod
    def from_dims(
        cls,
        dims: layers.StateDims,
        gpus: int,
    ) -> _ScanShare:
        heads = dims.heads // gpus
        key_heads = max(dims.key_heads // gpus, 1)
        return cls(heads, key_heads, heads * dims.value_dim, key_heads * dims.key_dim)


def scan_sequence(
    dims: layers.StateDims,
    rule: str,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    """Project, convolve, scan, norm by a gate, and project back.

    ``rule`` is mamba, mamba2, delta, lightning, or conv: a short convolution between two gates and
    no scan (LFM2)."""
    if run.training:
        raise bad_value(
            "phase",
            "prefill, decode or generate: gradients of sequence scans are not known",
            "train",
        )
    hidden = x.shape[-1]
    share = _ScanShare.from_dims(dims, run.tp)
    x = functional.enter_parallel(x, run.tp)
    if rule == "conv":
        out = _gate_convolution(dims, run, share, x)
    else:
        mixed, gate = _PROJECTIONS[rule](dims, run, share, x)
        out = _launch_scan(
            dims,
            rule,
            run,
            share,
            mixed,
        )
        if rule != "mamba":  # whose kernel multiplies by the gate itself
            norm_dim = dims.value_dim if rule == "delta" else share.inner
            out = _apply_gate(
                dims,
                run,
                out,
                gate,
                norm_dim,
            )
    return functional.leave_parallel(layers.project(run, out, hidden, dims.bias), run.tp)


def _gate_convolution(
    dims: layers.StateDims,
    run: PassSettings,
    share: _ScanShare,
    x: Tensor,
) -> Tensor:
    """Gate the values, convolve them, and gate them again."""
    inner = share.inner
    fused = layers.project(run, x, 3 * inner, dims.bias)
    first_gate, last_gate, values = fused.split(inner, inner, inner)
    mixed = _convolve_tokens(dims, run, pointwise("mul", first_gate, values))
    return pointwise("mul", last_gate, mixed)


def _project_lightning(
    dims: layers.StateDims,
    run: PassSettings,
    share: _ScanShare,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return values, keys and queries, as many of each and activated, and the gate."""
    fused = layers.project(run, x, 3 * share.inner, dims.bias)
    mixed = pointwise("silu", fused)
    gate = layers.project(run, x, share.inner, dims.bias)
    return mixed, gate


def _project_mamba(
    dims: layers.StateDims,
    run: PassSettings,
    share: _ScanShare,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return convolved values and the gate; steps, keys and queries follow from the values."""
    inner = share.inner
    fused = layers.project(run, x, 2 * inner, dims.bias)
    mixed = _convolve_tokens(dims, run, fused.slice(-1, 0, inner))
    gate = fused.slice(-1, inner, 2 * inner)
    low = layers.project(run, mixed, dims.step_rank + 2 * dims.key_dim)
    low = functional.leave_parallel(low, run.tp)
    step, *keys_and_queries = low.split(dims.step_rank, dims.key_dim, dims.key_dim)
    if dims.norm:
        step = layers.rms_norm(run, step)
        for part in keys_and_queries:
            layers.rms_norm(run, part)
    layers.project(run, step, inner)
    # Decay, skip, and the offset of the step
    x.tape.parameter(inner, dims.key_dim + 2, dtype=run.dtype)
    return mixed, gate


def _project_mamba2(
    dims: layers.StateDims,
    run: PassSettings,
    share: _ScanShare,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return convolved values, keys and queries, and the gate; each head has a step."""
    wide = 2 * share.inner + 2 * share.keys
    fused = layers.project(run, x, wide + share.heads, dims.bias)
    return _split_gate(
        dims,
        run,
        share,
        fused,
        head_numbers=3,
    )


def _project_delta(
    dims: layers.StateDims,
    run: PassSettings,
    share: _ScanShare,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return convolved values, keys and queries, and the gate.

    Decay and strength of each head come from a product of their own.
    """
    fused = layers.project(run, x, 2 * share.inner + 2 * share.keys, dims.bias)
    layers.project(run, x, 2 * share.heads, dims.bias)
    return _split_gate(
        dims,
        run,
        share,
        fused,
        head_numbers=2,
    )


def _split_gate(
    dims: layers.StateDims,
    run: PassSettings,
    share: _ScanShare,
    fused: Tensor,
    head_numbers: int,
) -> tuple[Tensor, Tensor]:
    """Return what is scanned and the gate.

    ``head_numbers`` counts the learned numbers of a head: decay, the offset of its step, and
    Mamba-2's skip.
    """
    inner = share.inner
    gate = fused.slice(-1, 0, inner)
    mixed = fused.slice(-1, inner, 2 * inner + 2 * share.keys)
    for _ in range(head_numbers):
        fused.tape.parameter(share.heads, dtype=run.dtype)
    if dims.kernel:
        mixed = _convolve_tokens(dims, run, mixed)
    return mixed, gate


_PROJECTIONS = {
    "lightning": _project_lightning,
    "mamba": _project_mamba,
    "mamba2": _project_mamba2,
    "delta": _project_delta,
}


def _launch_scan(
    dims: layers.StateDims,
    rule: str,
    run: PassSettings,
    share: _ScanShare,
    mixed: Tensor,
) -> Tensor:
    """Scan; the state of each head is carried along the tokens and stays in the cache.

    ``mixed`` and the state are activations: only what enters a product is ever quantized.
    """
    tape = mixed.tape
    batch, length, _ = mixed.shape
    wide_state = dims.wide_state and run.engine
    if run.cached:
        byte = 4 if wide_state else mixed.dtype.byte
        tape.cache_byte += batch * share.heads * dims.key_dim * dims.value_dim * byte
    scan = StateScan(
        batch=batch,
        length=length,
        heads=share.heads,
        key_heads=share.key_heads,
        key_dim=dims.key_dim,
        value_dim=dims.value_dim,
        chunk=min(dims.chunk, length),
        rule=rule,
        resumed=run.past > 0,
        wide_state=wide_state,
        dtype=mixed.dtype,
    )
    return tape.launch(scan, (mixed,), (batch, length, share.inner))


def _apply_gate(
    dims: layers.StateDims,
    run: PassSettings,
    out: Tensor,
    gate: Tensor,
    norm_dim: int,
) -> Tensor:
    """Norm the result by a gate, ``norm_dim`` values at a time, or multiply it by the gate.

    The norm belongs to the library of the scan, which reads and writes activations. An engine
    quantizes its result by a kernel of its own before the product that follows.
    """
    if not dims.norm:
        return pointwise("mul", out, pointwise("silu", gate))
    out.tape.parameter(norm_dim, dtype=run.dtype)
    read = 2 * out.byte
    op = RmsNorm(out.numel // norm_dim, norm_dim, dtype=out.dtype, read=read)
    return out.tape.launch(op, (out, gate), out.shape, out.dtype)


def _convolve_tokens(
    dims: layers.StateDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    """Convolve each channel over its last tokens, which stay in the cache."""
    tape = x.tape
    batch, length, channels = x.shape
    weights = [tape.parameter(channels, dims.kernel, dtype=run.dtype)]
    if dims.conv_bias:
        weights.append(tape.parameter(channels, dtype=run.dtype))
    if run.cached:
        tape.cache_byte += batch * channels * dims.kernel * x.dtype.byte
    op = CausalConv(
        batch,
        length,
        channels,
        dims.kernel,
        dtype=x.dtype,
    )
    return tape.launch(op, (x, *weights), x.shape)
