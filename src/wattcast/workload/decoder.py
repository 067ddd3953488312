"""Decoders of the Llama kind: RMS norm, rotary embedding, grouped queries, gated feed-forward or experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from wattcast.workload import engine, layers, masks, products
from wattcast.workload.experts import ExpertDims, mixture
from wattcast.workload.functional import activation, cat
from wattcast.workload.options import Head
from wattcast.workload.program import Program
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


@dataclass(frozen=True)
class DecoderDims:
    """Published dimensions; names are our own."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 0  # 0: hidden / heads
    activation: str = "silu"
    norm: str = "rms"  # "rms", "gemma" (1 + weight, in fp32) or "layer"
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    fused_projections: bool = False  # q, k, v as one product, gate and up as one (Phi-3)
    gated: bool = True  # act(gate) * up; False: act(up)
    parallel: bool = False  # attention and feed-forward share their input (Phi-2)
    rotary_share: float = 1.0  # part of a head that is rotated
    head_bias: bool = False
    tied: bool = False
    window: int = 0  # 0: attention reaches everywhere
    max_positions: int = 0
    dropout: float = 0.0
    experts: int = 0
    experts_chosen: int = 0
    expert_intermediate: int = 0
    router_wide: bool = True  # routing weights stay fp32 until tokens are added up
    router_renormalise: bool = True

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def rotated(self) -> int:
        return int(self.dim * self.rotary_share)

    @property
    def expert_dims(self) -> ExpertDims:
        return ExpertDims(
            self.hidden,
            self.experts,
            self.experts_chosen,
            self.expert_intermediate,
            renormalise=self.router_renormalise,
            wide_weights=self.router_wide,
            activation=self.activation,
        )


def trace(dims: DecoderDims, run: Run, stages: int = 1) -> Program:
    """One pass over ``run.length`` new tokens a sequence."""
    if dims.window and run.past:  # the cache drops what the window has passed
        run = replace(run, past=min(run.past, dims.window - 1))
    program = Program(run.training, run.tf32)
    hidden, *tables = program.section("embedding", lambda tape: embedding(dims, run, tape))
    repeat = -(-dims.layers // stages)

    def body(tape: Tape, x: Tensor, *shared: Tensor) -> Tensor:
        return layer(dims, run, x, *shared)

    (hidden,) = program.section("layers", body, hidden, *tables, repeat=repeat)
    program.section("head", lambda tape, x: head(dims, run, x), hidden)
    return program


def embedding(dims: DecoderDims, run: Run, tape: Tape) -> list[Tensor]:
    """Token rows, rotary tables, and the mask that attention adds where it needs one."""
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    if dims.norm == "gemma":
        x = layers.scale_by_tensor(x)
    masks.positions(tape, run)
    mask = [masks.causal(tape, run, dims.window)] if masks.needs_mask(run, dims.window) else []
    cos, sin = layers.rotary_tables(tape, run, dims.rotated)
    return [x, cos, sin, *mask]


def layer(dims: DecoderDims, run: Run, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
    """x + attention(norm(x)), then x + feed_forward(norm(x)); side by side in the parallel form."""
    if run.engine:
        return engine.decoder_layer(dims, run, x, cos, sin)
    if dims.parallel:
        normed = norm(dims, run, x)
        with x.tape.at("attention"):
            attended = self_attention(dims, run, normed, cos, sin, mask)
        with x.tape.at("mlp"):
            return attended + feed_forward(dims, run, normed) + x
    with x.tape.at("attention"):
        x = x + self_attention(dims, run, norm(dims, run, x), cos, sin, mask)
    with x.tape.at("mlp"):
        normed = norm(dims, run, x)
        if dims.experts:
            return x + mixture(dims.expert_dims, run, normed)
        return x + feed_forward(dims, run, normed)


def norm(dims: DecoderDims, run: Run, x: Tensor) -> Tensor:
    """The model's own kind of norm."""
    if dims.norm == "layer":
        return layers.layer_norm(run, x)
    return layers.rms_norm(run, x, gemma=dims.norm == "gemma")


def self_attention(dims: DecoderDims, run: Run, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """Query, key, value; rotate; cache; attend; project back."""
    x = products.enter_parallel(x, run.tp)
    q, k, v = query_key_value(dims, run, x)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = rotate(dims, q, cos, sin), rotate(dims, k, cos, sin)
    k, v = layers.append_cache(run, k), layers.append_cache(run, v)
    out = layers.attend(run, q, k, v, causal=True, mask=mask, wide_softmax=True, p=dims.dropout)
    return products.leave_parallel(layers.project(run, out, dims.hidden, dims.out_bias), run.tp)


def query_key_value(dims: DecoderDims, run: Run, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three views of ``[batch, heads, length, dim]``."""
    heads, kv_heads = dims.heads // run.tp, max(dims.kv_heads // run.tp, 1)
    widths = [count * dims.dim for count in (heads, kv_heads, kv_heads)]
    if dims.fused_projections:
        fused = layers.project(run, x, sum(widths), dims.qkv_bias)
        ends = (0, widths[0], widths[0] + widths[1], sum(widths))
        parts = [fused.slice(-1, start, stop) for start, stop in pairwise(ends)]
        return tuple(layers.split_heads(part, dims.dim) for part in parts)  # type: ignore[return-value]
    q, k = (_normed_heads(dims, run, layers.project(run, x, width, dims.qkv_bias)) for width in widths[:2])
    return q, k, layers.split_heads(layers.project(run, x, widths[2], dims.qkv_bias), dims.dim)


def _normed_heads(dims: DecoderDims, run: Run, flat: Tensor) -> Tensor:
    if not dims.qk_norm:
        return layers.split_heads(flat, dims.dim)
    batch, length, _ = flat.shape
    return layers.rms_norm(run, flat.view(batch, length, -1, dims.dim)).transpose(1, 2)


def rotate(dims: DecoderDims, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All of each head, or (Phi) its first part, with the rest laid beside it again."""
    if dims.rotated == dims.dim and not dims.fused_projections:
        return layers.rotate(x, cos, sin)
    turned = layers.rotate(x.slice(-1, 0, dims.rotated), cos, sin)
    return cat([turned, x.slice(-1, dims.rotated, dims.dim)], -1)


def feed_forward(dims: DecoderDims, run: Run, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)), or down(act(up(x)))."""
    x = products.enter_parallel(x, run.tp)
    width = dims.intermediate // run.tp
    if dims.fused_projections:
        gate, up = layers.project(run, x, 2 * width).split(width, width)
        inner = up * activation(dims.activation, gate)
    elif dims.gated:
        gate = activation(dims.activation, layers.project(run, x, width))
        inner = gate * layers.project(run, x, width)
    else:
        inner = layers.activate(dims.activation, layers.project(run, x, width, dims.out_bias))
    return products.leave_parallel(layers.project(run, inner, dims.hidden, dims.out_bias), run.tp)


def head(dims: DecoderDims, run: Run, x: Tensor) -> Tensor:
    """Final norm and, where asked, the logits."""
    x = norm(dims, run, x)
    if run.head is Head.NONE:
        return x
    return layers.language_head(run, x, dims.vocab, tied=dims.tied, bias=dims.head_bias)
