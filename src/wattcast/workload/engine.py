"""Decoder layers as inference engines run them: fewer products, one kernel for each of the rest.

Queries, keys and values come from one product, gate and up from another; the residual is added
inside the norm; the rotary embedding turns queries and keys in place in one kernel; new keys and
values are written into a paged cache that attention reads where it lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wattcast.workload import layers, products
from wattcast.workload.experts import mixture
from wattcast.workload.graph import Attention, Bmm, Elementwise, LayerNorm, Layout, RmsNorm
from wattcast.workload.pointwise import pointwise
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tensor

if TYPE_CHECKING:
    from wattcast.workload.decoder import DecoderDims
    from wattcast.workload.gpt import GptDims
    from wattcast.workload.latent import LatentDims


def decoder_layer(dims: DecoderDims, run: Run, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One layer of a Llama-like model: two add-and-norms around attention and feed-forward."""
    with x.tape.at("attention"):
        normed = add_norm(run, x, dims.norm == "layer")
        heads, kv_heads = dims.heads // run.tp, max(dims.kv_heads // run.tp, 1)
        fused = layers.project(run, normed, (heads + 2 * kv_heads) * dims.dim, dims.qkv_bias)
        q, k, v = _split(fused, (heads, kv_heads, kv_heads), dims.dim)
        if dims.qk_norm:
            for part in (q, k):
                layers.rms_norm(run, part)
        turn(q, k, cos, dims.rotary_share)
        out = cached_attention(run, q, k, v, reach=dims.window)
        x = products.leave_parallel(layers.project(run, out, dims.hidden, dims.out_bias), run.tp)
    with x.tape.at("mlp"):
        normed = normed if dims.parallel else add_norm(run, x, dims.norm == "layer")
        if dims.experts:
            return mixture(dims.expert_dims, run, normed)
        width = dims.intermediate // run.tp
        if dims.gated:
            inner = layers.gate_fused(layers.project(run, normed, 2 * width), dims.activation)
        else:
            inner = pointwise("gelu_tanh", layers.project(run, normed, width, dims.out_bias))
        return products.leave_parallel(layers.project(run, inner, dims.hidden, dims.out_bias), run.tp)


def gpt_layer(dims: GptDims, run: Run, x: Tensor) -> Tensor:
    """One layer of GPT-2 or OPT."""
    width = dims.hidden // run.tp
    with x.tape.at("attention"):
        fused = layers.project(run, add_norm(run, x, True), 3 * width, bias=True)
        heads = width // dims.dim
        out = cached_attention(run, *_split(fused, (heads, heads, heads), dims.dim))
        x = products.leave_parallel(layers.project(run, out, dims.hidden, bias=True), run.tp)
    with x.tape.at("mlp"):
        inner = layers.project(run, add_norm(run, x, True), dims.intermediate // run.tp, bias=True)
        inner = pointwise("relu" if dims.activation == "relu" else "gelu_tanh", inner)
        return products.leave_parallel(layers.project(run, inner, dims.hidden, bias=True), run.tp)


def add_norm(run: Run, x: Tensor, layer: bool) -> Tensor:
    """Residual added and normed in one kernel: two tensors read, two written."""
    tape, dim = x.tape, x.shape[-1]
    rows, byte = x.numel // dim, x.numel * x.dtype.byte
    weights = [tape.parameter(dim, dtype=run.dtype) for _ in range(2 if layer else 1)]
    out = tape.empty(x.shape, x.dtype)
    kind = LayerNorm if layer else RmsNorm
    tape.emit(kind(rows, dim, dtype=x.dtype, read=2 * byte, write=2 * byte), (x, *weights), (out, x))
    return out


def _split(fused: Tensor, heads: tuple[int, int, int], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one product's columns, ``[batch, length, heads, dim]``."""
    parts = fused.split(*(count * dim for count in heads))
    views = (part.view(*part.shape[:2], count, dim) for part, count in zip(parts, heads, strict=True))
    return tuple(views)  # type: ignore[return-value]


def turn(q: Tensor, k: Tensor, cos: Tensor, share: float) -> None:
    """Rotary embedding of queries and keys, in place, in one kernel."""
    whole = q.numel + k.numel
    n = whole if share == 1.0 else int(whole * share)
    op = Elementwise("rotary", n, dtype=q.dtype, layout=Layout.STRIDED, read=n * q.dtype.byte + 2 * cos.byte)
    q.tape.emit(op, (q, k, cos), (q, k))


def cached_attention(run: Run, q: Tensor, k: Tensor, v: Tensor, reach: int = 0) -> Tensor:
    """New keys and values into the cache, then attention over what a window leaves of it."""
    tape = q.tape
    batch, length, heads, dim = q.shape
    if run.cached:
        n = k.numel + v.numel
        tape.emit(Elementwise("copy", n, dtype=k.dtype, layout=Layout.STRIDED), (k, v), ())
        tape.cache_byte += (
            run.batch * run.context * (k.shape[2] * k.shape[3] + v.shape[2] * v.shape[3]) * k.dtype.byte
        )
    out = tape.empty((batch, length, heads * dim), q.dtype)
    seen = min(run.context, reach) if reach and length == 1 else run.context
    op = Attention(batch, heads, k.shape[2], length, seen, dim, causal=length > 1, dtype=tape.math(q.dtype))
    tape.emit(op, (q, k, v), (out,))
    return out


def latent_attention(
    dims: LatentDims, run: Run, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Latent attention. In decode the up-projections are absorbed into queries and outputs, so that attention
    runs over the short vectors themselves with one key head; in prefill keys and values are expanded."""
    heads, tape = dims.heads // run.tp, x.tape
    low = layers.project(run, x, dims.q_rank + dims.kv_rank + dims.rotary_dim)
    q_low, latent, k_turn = low.split(dims.q_rank, dims.kv_rank, dims.rotary_dim)
    q = layers.project(run, layers.rms_norm(run, q_low), heads * dims.dim)
    latent = layers.rms_norm(run, latent)
    turn(q.slice(-1, 0, heads * dims.rotary_dim), k_turn, cos, 1.0)
    short = dims.kv_rank + dims.rotary_dim
    if run.cached:
        n = x.shape[0] * run.length * short
        tape.emit(Elementwise("copy", n, dtype=x.dtype, layout=Layout.STRIDED), (latent, k_turn), ())
        tape.cache_byte += run.batch * run.context * short * x.dtype.byte
    absorb = run.length == 1
    out = (_absorbed if absorb else _expanded)(dims, run, q, latent, heads)
    return products.leave_parallel(layers.project(run, out, dims.hidden), run.tp)


def _absorbed(dims: LatentDims, run: Run, q: Tensor, latent: Tensor, heads: int) -> Tensor:
    tape, tokens = q.tape, run.batch * run.length
    weight = tape.parameter(heads * (dims.plain_dim + dims.value_dim), dims.kv_rank, dtype=run.weight_dtype)
    wide = tape.empty((run.batch, run.length, heads, dims.kv_rank + dims.rotary_dim), q.dtype)
    tape.emit(Bmm(heads, tokens, dims.kv_rank, dims.plain_dim, dtype=q.dtype), (q, weight), (wide,))
    mixed = tape.empty((run.batch, run.length, heads, dims.kv_rank), q.dtype)
    op = Attention(
        run.batch, heads, 1, run.length, run.context, dims.kv_rank + dims.rotary_dim, v_head_dim=dims.kv_rank,
        dtype=q.dtype,
    )  # fmt: skip
    tape.emit(op, (wide, latent), (mixed,))
    out = tape.empty((run.batch, run.length, heads * dims.value_dim), q.dtype)
    tape.emit(Bmm(heads, tokens, dims.value_dim, dims.kv_rank, dtype=q.dtype), (mixed, weight), (out,))
    return out


def _expanded(dims: LatentDims, run: Run, q: Tensor, latent: Tensor, heads: int) -> Tensor:
    tape = q.tape
    whole = tape.empty((run.batch, run.context, dims.kv_rank), q.dtype) if run.past else latent
    wide = layers.project(run, whole, heads * (dims.plain_dim + dims.value_dim))
    n = run.batch * run.context * heads * dims.dim
    k = tape.empty((n,), q.dtype)
    tape.emit(Elementwise("cat", n, dtype=q.dtype, layout=Layout.STRIDED), (wide,), (k,))
    out = tape.empty((run.batch, run.length, heads * dims.value_dim), q.dtype)
    op = Attention(
        run.batch, heads, heads, run.length, run.context, dims.dim, causal=True, v_head_dim=dims.value_dim,
        dtype=q.dtype,
    )  # fmt: skip
    tape.emit(op, (q, k, wide), (out,))
    return out
