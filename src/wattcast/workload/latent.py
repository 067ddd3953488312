"""Decoders with multi-head latent attention: keys and values kept as one short vector a token (DeepSeek-V3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wattcast.workload import engine, layers, masks, products
from wattcast.workload.experts import ExpertDims, mixture
from wattcast.workload.functional import activation, cat
from wattcast.workload.options import Head
from wattcast.workload.pointwise import pointwise
from wattcast.workload.program import Program
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


@dataclass(frozen=True)
class LatentDims:
    """Published dimensions."""

    layers: int
    dense_layers: int  # the first ones, with a plain feed-forward layer
    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    plain_dim: int  # of each head, not rotated
    rotary_dim: int  # of each head, rotated; keys share one
    value_dim: int
    intermediate: int
    vocab: int
    experts: int
    experts_chosen: int
    expert_intermediate: int
    shared_intermediate: int
    groups: int = 1
    groups_chosen: int = 1
    activation: str = "silu"
    max_positions: int = 0

    @property
    def dim(self) -> int:
        return self.plain_dim + self.rotary_dim

    @property
    def expert_dims(self) -> ExpertDims:
        return ExpertDims(
            self.hidden, self.experts, self.experts_chosen, self.expert_intermediate, self.shared_intermediate,
            "grouped", self.groups, self.groups_chosen, activation=self.activation,
        )  # fmt: skip


def trace(dims: LatentDims, run: Run, stages: int = 1) -> Program:
    """One pass over ``run.length`` new tokens a sequence."""
    program = Program(run.training, run.tf32)
    hidden, *tables = program.section("embedding", lambda tape: embedding(dims, run, tape))
    mixed = dims.layers - dims.dense_layers
    for label, repeat, dense in (("dense layers", dims.dense_layers, True), ("layers", mixed, False)):
        if repeat:
            body = _layer_body(dims, run, dense)
            (hidden,) = program.section(label, body, hidden, *tables, repeat=-(-repeat // stages))
    program.section("head", lambda tape, x: head(dims, run, x), hidden)
    return program


def _layer_body(dims: LatentDims, run: Run, dense: bool) -> Callable[..., Tensor]:
    return lambda tape, x, *shared: layer(dims, run, dense, x, *shared)


def embedding(dims: LatentDims, run: Run, tape: Tape) -> list[Tensor]:
    """Token rows, rotary tables, the mask where one is needed."""
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    masks.positions(tape, run)
    mask = [masks.causal(tape, run)] if masks.needs_mask(run) else []
    return [x, *layers.rotary_tables(tape, run, dims.rotary_dim), *mask]


def layer(
    dims: LatentDims, run: Run, dense: bool, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
) -> Tensor:
    """x + attention(norm(x)), then x + experts(norm(x)); the first layers have no experts."""
    with x.tape.at("attention"):
        normed = layers.rms_norm(run, x)
        attend = engine.latent_attention if run.engine else self_attention
        x = x + attend(dims, run, normed, cos, sin, mask)
    with x.tape.at("mlp"):
        normed = layers.rms_norm(run, x)
        return x + (feed_forward(dims, run, normed) if dense else mixture(dims.expert_dims, run, normed))


def self_attention(dims: LatentDims, run: Run, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """Queries and keys from low-rank products; the cache holds the short vectors, expanded anew at each use."""
    x = products.enter_parallel(x, run.tp)
    heads = dims.heads // run.tp
    low = layers.rms_norm(run, layers.project(run, x, dims.q_rank))
    q = layers.split_heads(layers.project(run, low, heads * dims.dim), dims.dim)
    q_plain, q_turn = q.split(dims.plain_dim, dims.rotary_dim)
    latent, k_turn = layers.project(run, x, dims.kv_rank + dims.rotary_dim).split(dims.kv_rank, dims.rotary_dim)
    latent = layers.rms_norm(run, latent)
    half = dims.rotary_dim // 2
    cos, sin = cos.slice(-1, 0, half).unsqueeze(1), sin.slice(-1, 0, half).unsqueeze(1)
    q_turn = rotate_pairs(q_turn, cos, sin)
    k_turn = rotate_pairs(k_turn.unsqueeze(1), cos, sin)
    latent, k_turn = layers.append_cache(run, latent.unsqueeze(1)), layers.append_cache(run, k_turn)
    q = cat([q_plain, q_turn], -1)
    k, v = expand(dims, run, latent, k_turn, heads)
    out = layers.attend(run, q, k, v, causal=True, mask=mask, wide_softmax=True)
    return products.leave_parallel(layers.project(run, out, dims.hidden), run.tp)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over neighbouring pairs, read as strided halves and laid side by side."""
    pairs = x.pairs()
    even, odd = pairs.select(-1), pairs.select(-1)
    left, right = even * cos, odd * sin
    first = pointwise("sub", left, right)
    x.tape.record((first,), (left, right), lambda g: (g, pointwise("neg", g)))
    return cat([first, odd * cos + even * sin], -1)


def expand(dims: LatentDims, run: Run, latent: Tensor, k_turn: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Short vectors -> keys (their plain part and the shared rotated part, both copied in) and values (a view)."""
    batch, _, length, rank = latent.shape
    wide = layers.project(run, latent.view(batch, length, rank), heads * (dims.plain_dim + dims.value_dim))
    plain, v = layers.split_heads(wide, dims.plain_dim + dims.value_dim).split(dims.plain_dim, dims.value_dim)
    k = latent.tape.empty((batch, heads, length, dims.dim), latent.dtype)
    layers.copy_into(plain)
    layers.copy_into(k_turn.expand(batch, heads, length, dims.rotary_dim))
    latent.tape.record((k,), (plain, k_turn), lambda g: _split_key(dims, g))
    return k, v


def _split_key(dims: LatentDims, g: Tensor) -> tuple[Tensor, Tensor]:
    plain, turned = g.slice(-1, 0, dims.plain_dim), g.slice(-1, dims.plain_dim, dims.dim)
    return plain.clone(), turned.sum_to((g.shape[0], 1, g.shape[2], dims.rotary_dim))


def feed_forward(dims: LatentDims, run: Run, x: Tensor) -> Tensor:
    """down(act(gate(x)) * up(x)) of the first layers."""
    x = products.enter_parallel(x, run.tp)
    width = dims.intermediate // run.tp
    if run.engine:
        inner = layers.gate_fused(layers.project(run, x, 2 * width), dims.activation)
    else:
        gate = activation(dims.activation, layers.project(run, x, width))
        inner = gate * layers.project(run, x, width)
    return products.leave_parallel(layers.project(run, inner, dims.hidden), run.tp)


def head(dims: LatentDims, run: Run, x: Tensor) -> Tensor:
    """Final norm and, where asked, the logits."""
    x = layers.rms_norm(run, x)
    return x if run.head is Head.NONE else layers.language_head(run, x, dims.vocab, tied=False)
