"""Decoders with latent attention (DeepSeek): keys and values are one short vector a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.engine_operators import LatentAttention
from wattcast.workload.models import engine_layers
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Attention,
    Bmm,
    Elementwise,
    Layout,
    RmsNorm,
)
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    pointwise,
)


@dataclass(frozen=True)
class LatentDims:
    """Published dimensions of a decoder with latent attention.

    Keys and values are one short vector a token.
    """

    router_wide: ClassVar[bool] = True  # as in ``DecoderDims``, as are the next two
    shared_gate: ClassVar[bool] = False
    expert_bias: ClassVar[bool] = False
    layers: int
    dense_layers: int  # the first ones, with a plain feed-forward layer
    hidden: int
    heads: int
    q_rank: int  # 0: queries come from one product
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
    router: str = "grouped"  # or "softmax" (DeepSeek-V2)
    router_renormalise: bool = True

    @property
    def dim(self) -> int:
        """Elements of a query or key head."""
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Elements of a token in the cache."""
        return self.kv_rank + self.rotary_dim


def trace_latent(
    dims: LatentDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over ``run.length`` new tokens a sequence."""

    def embed(tape: Tape) -> list[Tensor]:
        x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
        layers.build_positions(tape, run)
        mask = layers.build_mask(tape, run)
        return [x, *layers.rotary_tables(tape, run, dims.rotary_dim), *mask]

    def add(
        x: Tensor,
        part: Callable[[Tensor], Tensor],
        to_products: bool = True,
    ) -> Tensor:
        """Add a part; an engine's next norm adds the residual."""
        if run.served:
            return part(engine_layers.add_norm(run, x, RmsNorm, to_products=to_products))
        return x + part(layers.rms_norm(run, x))

    def layer(
        tape: Tape,
        x: Tensor,
        *tables: Tensor,
        dense: bool,
    ) -> Tensor:
        """Compute x + attention(norm(x)), then x + experts(norm(x)).

        ``dense`` layers have no experts.
        """

        def attention(y: Tensor) -> Tensor:
            if run.engine:
                return _engine_latent_attention(dims, run, y, *tables)
            return _latent_self_attention(dims, run, y, *tables)

        def mlp(y: Tensor) -> Tensor:
            return layers.gated_feed_forward(run, y, dims.intermediate, dims.activation)

        def experts(y: Tensor) -> Tensor:
            from wattcast.workload.models.sparse_layers import mix_experts

            return mix_experts(dims, run, y, (dims.groups, dims.groups_chosen))

        with tape.scope("attention"):
            x = add(x, attention)
        with tape.scope("mlp"):
            if dense:
                return add(x, mlp)
            return add(x, experts, to_products=False)

    def head(tape: Tape, x: Tensor) -> Tensor:
        return layers.language_head(run, layers.rms_norm(run, x), dims.vocab, tied=False)

    hidden, *tables = program.section("embedding", embed)
    dense_layer = partial(layer, dense=True)
    expert_layer = partial(layer, dense=False)
    expert_layers = dims.layers - dims.dense_layers
    if dims.dense_layers:
        (hidden,) = program.section(
            "dense layers",
            dense_layer,
            hidden,
            *tables,
            repeat=dims.dense_layers,
        )
    if expert_layers:
        (hidden,) = program.section(
            "layers",
            expert_layer,
            hidden,
            *tables,
            repeat=expert_layers,
        )
    program.section("head", head, hidden)


def _latent_self_attention(
    dims: LatentDims,
    run: PassSettings,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend with queries and keys from low-rank products.

    The cached short vectors are expanded at each use.
    """
    x = functional.enter_parallel(x, run.tp)
    heads = dims.heads // run.tp

    # Queries; a part of each head is rotated
    low = layers.rms_norm(run, layers.project(run, x, dims.q_rank)) if dims.q_rank else x
    q = layers.split_heads(layers.project(run, low, heads * dims.dim), dims.dim)
    q_plain, q_rotary = q.split(dims.plain_dim, dims.rotary_dim)

    # The short vector of each token, and a rotated key that all heads share
    cached = layers.project(run, x, dims.cached_dim)
    latent, k_rotary = cached.split(dims.kv_rank, dims.rotary_dim)
    latent = layers.rms_norm(run, latent)
    half = dims.rotary_dim // 2
    cos = cos.slice(-1, 0, half).unsqueeze(1)
    sin = sin.slice(-1, 0, half).unsqueeze(1)
    q_rotary = _rotate_pairs(q_rotary, cos, sin)
    k_rotary = _rotate_pairs(k_rotary.unsqueeze(1), cos, sin)
    latent = layers.append_cache(run, latent.unsqueeze(1))
    k_rotary = layers.append_cache(run, k_rotary)
    q = cat([q_plain, q_rotary], -1)

    k, v = _expand_latent(
        dims,
        run,
        latent,
        k_rotary,
        heads,
    )
    terms = layers.ScoreTerms(mask=mask, wide_softmax=True)
    out = layers.attend(
        run,
        q,
        k,
        v,
        causal=True,
        terms=terms,
    )
    return functional.leave_parallel(layers.project(run, out, dims.hidden), run.tp)


def _expand_latent(
    dims: LatentDims,
    run: PassSettings,
    latent: Tensor,
    k_rotary: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Return keys and values of all heads.

    Keys are the plain part of what short vectors expand to and the shared rotated part, both copied
    in."""
    tape = latent.tape
    batch, _, length, rank = latent.shape
    width = dims.plain_dim + dims.value_dim
    wide = layers.project(run, latent.view(batch, length, rank), heads * width)
    plain, v = layers.split_heads(wide, width).split(dims.plain_dim, dims.value_dim)
    k = tape.empty((batch, heads, length, dims.dim), latent.dtype)
    shared = k_rotary.expand(batch, heads, length, dims.rotary_dim)
    for part in (plain, shared):
        is_whole = part.byte == part.numel * part.dtype.byte
        layout = Layout.STRIDED if is_whole else Layout.BROADCAST
        tape.emit_pointwise("copy", (part,), replace(part), layout)

    def back(g: Tensor) -> tuple[Tensor, Tensor]:
        d_plain = g.slice(-1, 0, dims.plain_dim)
        d_shared = g.slice(-1, dims.plain_dim, dims.dim)
        shared_shape = (g.shape[0], 1, g.shape[2], dims.rotary_dim)
        return d_plain.clone(), d_shared.sum_to(shared_shape)

    return k.with_gradient(back, plain, k_rotary), v


def _rotate_pairs(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotate neighbouring pairs, which are read as strided halves and concatenated."""
    pairs = x.view(*x.shape[:-1], x.shape[-1] // 2, 2)
    even = pairs.select(-1)
    odd = pairs.select(-1)
    rotated_left = even * cos
    right = odd * sin
    first = pointwise("sub", rotated_left, right)
    first = first.with_gradient(lambda g: (g, pointwise("neg", g)), rotated_left, right)
    second = odd * cos + even * sin
    return cat([first, second], -1)


def _engine_latent_attention(
    dims: LatentDims,
    run: PassSettings,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Run latent attention as an inference engine does."""
    heads = dims.heads // run.tp
    own = _settle_projections(run)
    low = layers.project(own, x, dims.q_rank + dims.cached_dim)
    q_low, latent, k_rotary = low.split(dims.q_rank, dims.kv_rank, dims.rotary_dim)
    if dims.q_rank:
        x = layers.rms_norm(run, q_low)
    q = layers.project(own, x, heads * dims.dim)
    latent = layers.rms_norm(run, latent)
    q_rotary = q.slice(-1, 0, heads * dims.rotary_dim)
    engine_layers.rotate_in_place(
        run,
        q_rotary,
        k_rotary,
        cos,
        dims.rotary_dim,
    )
    engine_layers.write_paged_cache(run, (latent, k_rotary), dims.cached_dim)
    attend = _decode_latent if run.length == 1 else _prefill_latent
    out = attend(
        dims,
        run,
        q,
        latent,
        heads,
    )
    return functional.leave_parallel(layers.project(run, out, dims.hidden), run.tp)


def _settle_projections(run: PassSettings) -> PassSettings:
    """Return the settings of the projections before latent attention.

    Checkpoints in nvfp4 keep them in bf16 (nvidia/DeepSeek-R1-0528-FP4-v2, ``exclude_modules``);
    attention's output, dense layers and experts are narrow.
    """
    if run.recipe is not None and run.recipe.activations is Dtype.FP4:
        return replace(run, recipe=None)
    return run


def _decode_latent(
    dims: LatentDims,
    run: PassSettings,
    q: Tensor,
    latent: Tensor,
    heads: int,
) -> Tensor:
    """Attend over the short vectors themselves, with one key head.

    The up-projections are absorbed into queries and outputs."""
    tape = q.tape
    batch = run.batch
    width = heads * (dims.plain_dim + dims.value_dim)
    weight = tape.parameter(width, dims.kv_rank, dtype=run.dtype)
    up = Bmm(
        b=heads,
        m=batch,
        n=dims.kv_rank,
        k=dims.plain_dim,
        dtype=q.dtype,
    )
    wide_q = tape.launch(up, (q, weight), (batch, 1, heads, dims.cached_dim))
    op: Operator
    if run.served:
        is_narrow = run.cache_dtype is Dtype.FP8
        op = LatentAttention(
            batch=batch,
            heads=heads,
            q_len=1,
            kv_len=run.context,
            latent=dims.kv_rank,
            rope=dims.rotary_dim,
            kernel="flashmla" if is_narrow else "fa3",
            kv_dtype=run.cache_dtype,
            page=64 if is_narrow else 16,
            dtype=q.dtype,
        )
    else:
        op = Attention(
            batch=batch,
            heads=heads,
            kv_heads=1,
            q_len=1,
            kv_len=run.context,
            head_dim=dims.cached_dim,
            v_head_dim=dims.kv_rank,
            dtype=q.dtype,
        )
    mixed = tape.launch(op, (wide_q, latent), (batch, 1, heads, dims.kv_rank))
    down = Bmm(
        b=heads,
        m=batch,
        n=dims.value_dim,
        k=dims.kv_rank,
        dtype=q.dtype,
    )
    return tape.launch(down, (mixed, weight), (batch, 1, heads * dims.value_dim))


def _prefill_latent(
    dims: LatentDims,
    run: PassSettings,
    q: Tensor,
    latent: Tensor,
    heads: int,
) -> Tensor:
    """Expand the short vectors to keys and values, and attend over those."""
    tape = q.tape
    batch = run.batch
    if run.past:
        latent = tape.empty((batch, run.context, dims.kv_rank), q.dtype)
    own = _settle_projections(run)
    wide = layers.project(own, latent, heads * (dims.plain_dim + dims.value_dim))
    elements = batch * run.context * heads * dims.dim
    copy = Elementwise("cat", elements, dtype=q.dtype, layout=Layout.STRIDED)
    k = tape.launch(copy, (wide,), (elements,))
    op: Operator
    if run.served and (dims.dim, dims.value_dim) == (192, 128):
        op = LatentAttention(
            batch=batch,
            heads=heads,
            q_len=run.length,
            kv_len=run.context,
            latent=dims.kv_rank,
            rope=dims.rotary_dim,
            phase="prefill",
            dtype=q.dtype,
        )
    else:
        op = Attention(
            batch=batch,
            heads=heads,
            kv_heads=heads,
            q_len=run.length,
            kv_len=run.context,
            head_dim=dims.dim,
            causal=True,
            v_head_dim=dims.value_dim,
            dtype=q.dtype,
        )
    return tape.launch(op, (q, k, wide), (batch, run.length, heads * dims.value_dim))
