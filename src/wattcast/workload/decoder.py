"""Decoders of the Llama kind: RMS norm, rotary embedding, grouped queries, gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.workload import layers, products
from wattcast.workload.functional import activation
from wattcast.workload.layers import Run
from wattcast.workload.options import Head
from wattcast.workload.program import Program
from wattcast.workload.symbolic import Tape, Tensor


@dataclass(frozen=True)
class DecoderDims:
    """Published dimensions; names follow no one's configuration file but our own."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 0  # 0: hidden / heads
    activation: str = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    gemma: bool = False  # (1 + weight) norms, scaled embedding
    window: int = 0  # 0: attention reaches everywhere
    max_positions: int = 0

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads


def trace(dims: DecoderDims, run: Run, stages: int = 1) -> Program:
    """One pass (forward only) over ``run.length`` new tokens a sequence."""
    program = Program(run.training, run.tf32)
    hidden, *tables = program.section("embedding", lambda tape: embedding(dims, run, tape))
    (hidden,) = program.section(
        "layers",
        lambda tape, x, *shared: layer(dims, run, x, *shared),
        hidden,
        *tables,
        repeat=-(-dims.layers // stages),
    )[:1]
    program.section("head", lambda tape, x: head(dims, run, x), hidden)
    return program


def embedding(dims: DecoderDims, run: Run, tape: Tape) -> list[Tensor]:
    """Token rows, rotary tables, and the mask that eager attention adds."""
    x = layers.embed(run, tape, dims.vocab, dims.hidden)
    layers.positions(tape, run)
    mask = [] if run.flash else [products.causal_mask(tape, run.batch, run.length, run.context, run.dtype)]
    cos, sin = layers.rotary_tables(tape, run, dims.dim)
    if dims.gemma:
        x = x * 1.0
    return [x, cos, sin, *mask]


def layer(dims: DecoderDims, run: Run, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""
    with x.tape.at("attention"):
        x = x + self_attention(dims, run, layers.rms_norm(run, x, gemma=dims.gemma), cos, sin, mask)
    with x.tape.at("mlp"):
        return x + feed_forward(dims, run, layers.rms_norm(run, x, gemma=dims.gemma))


def self_attention(dims: DecoderDims, run: Run, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """Query, key, value; rotate; cache; attend; project back."""
    x = products.enter_parallel(x, run.tp)
    heads, kv_heads = dims.heads // run.tp, max(dims.kv_heads // run.tp, 1)
    q = _heads(dims, run, x, heads)
    k = _heads(dims, run, x, kv_heads)
    v = layers.split_heads(layers.project(run, x, kv_heads * dims.dim, dims.qkv_bias), dims.dim)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = layers.rotate(q, cos, sin), layers.rotate(k, cos, sin)
    k, v = layers.append_cache(run, k), layers.append_cache(run, v)
    out = layers.attend(run, q, k, v, causal=True, mask=mask, wide_softmax=True, window=dims.window or None)
    return products.leave_parallel(layers.project(run, out, dims.hidden), run.tp)


def _heads(dims: DecoderDims, run: Run, x: Tensor, heads: int) -> Tensor:
    flat = layers.project(run, x, heads * dims.dim, dims.qkv_bias)
    if not dims.qk_norm:
        return layers.split_heads(flat, dims.dim)
    batch, length, _ = flat.shape
    return layers.rms_norm(run, flat.view(batch, length, heads, dims.dim)).transpose(1, 2)


def feed_forward(dims: DecoderDims, run: Run, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x))."""
    x = products.enter_parallel(x, run.tp)
    width = dims.intermediate // run.tp
    gate = activation(dims.activation, layers.project(run, x, width))
    inner = gate * layers.project(run, x, width)
    return products.leave_parallel(layers.project(run, inner, dims.hidden), run.tp)


def head(dims: DecoderDims, run: Run, x: Tensor) -> Tensor:
    """Final norm and, where asked, the logits."""
    x = layers.rms_norm(run, x, gemma=dims.gemma)
    return layers.language_head(run, x, dims.vocab, dims.tied) if run.head is not Head.NONE else x
