"""Decoders that generate text: the Llama kind with its many switches, mixtures of experts, and
latent attention.

Layers that differ are groups, each with its own repeat. Mixtures of experts and sequence scans are
in ``sparse_layers.py``, which a decoder imports when it has some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from wattcast.core import Dtype, bad_value
from wattcast.workload import tensor_functions as functional
from wattcast.workload.engine_operators import LatentAttention
from wattcast.workload.model_options import AttentionMode
from wattcast.workload.models import engine_layers
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.shared_layers import StateDims
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Attention, Bmm, Elementwise, LayerNorm, Layout, RmsNorm
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import Tape, Tensor, cat, pointwise


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a decoder that are alike where others are not."""

    layers: int
    # or a rule of ``scan_sequence``, "attention and mamba2" side by side, or "none"
    mixer: str = "attention"
    feed_forward: str = "same"  # as the model's; "dense" in a mixture, or "none"
    window: int = 0  # keys that a token sees; 0: all
    chunk: int = 0  # attention stays inside pieces of so many tokens
    rotary: bool = True


@dataclass(frozen=True)
class DecoderDims:
    """Published dimensions of a Llama-like decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 0  # 0: hidden / heads
    activation: str = "silu"
    # "rms", "gemma" (1 + weight, in fp32), "layer", "layer without bias" or "cohere" (in fp32)
    norm: str = "rms"
    norm_place: str = "before"  # attention and feed-forward; "after" (OLMo 2) or "around" (Gemma 2)
    qkv_bias: bool = False
    out_bias: bool = False  # of the product after attention
    mlp_bias: bool = False
    qk_norm: bool = False  # of each head
    qk_norm_wide: bool = False  # of all heads together (OLMo 2)
    fused_qkv: bool = False  # queries, keys and values as one product (Phi-3)
    fused_gate: bool = False  # gate and up as one product
    gated: bool = True  # act(gate) * up; False: act(up)
    parallel: bool = False  # attention and feed-forward share their input (Phi-2)
    parallel_norms: int = 1  # 2: each has a norm of its own (GPT-NeoX)
    attention_gate: bool = False  # queries bring a gate for the result (Qwen3-Next)
    sink: bool = False  # a learned score of each head that no key owns (gpt-oss)
    # scores get a slope over the distance, so Hugging Face runs attention operator by operator
    alibi: bool = False
    softcap: float = 0.0  # of attention scores
    multipliers: tuple[
        str, ...
    ] = ()  # what is scaled by a number: "embedding", "residual", "logits" or "cap"
    embedding_norm: bool = False
    rotary_tables: int = 1  # 2: layers with a window have a table of their own (Gemma 3)
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
    router: str = "softmax"
    router_groups: int = 1
    router_groups_chosen: int = 1
    expert_bias: bool = False
    expert_clamp: bool = False  # gate and value are clamped between limits (gpt-oss)
    shared_intermediate: int = 0  # width of the expert every token visits
    shared_gate: bool = False
    groups: tuple[LayerGroup, ...] = ()  # none: all layers are alike
    state: StateDims | None = None  # of layers that scan instead of attending

    def __post_init__(self) -> None:
        if self.groups and sum(group.layers for group in self.groups) != self.layers:
            found = " + ".join(str(group.layers) for group in self.groups)
            raise bad_value("groups", f"as many layers as the model's {self.layers}", found)
        scans = [
            group.mixer for group in self.layer_groups if group.mixer not in ("attention", "none")
        ]
        if scans and self.state is None:
            raise bad_value("state", f"the dimensions of {scans[0]}", "none")

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Groups of equal layers, in the order in which they first appear."""
        return self.groups or (LayerGroup(self.layers, window=self.window),)

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return int(self.dim * self.rotary_share)


def trace_decoder(dims: DecoderDims, run: PassSettings, program: Program) -> None:
    """Trace one pass over ``run.length`` new tokens a sequence."""
    windows = sorted({group.window or group.chunk for group in dims.layer_groups})
    hidden, cos, sin, *masks = program.section(
        "embedding", lambda tape: _embed_tokens(dims, run, windows, tape)
    )
    shown = [window for window in windows if layers.needs_mask(_keep_window(run, window), window)]
    for group in dims.layer_groups:
        window = group.window or group.chunk
        experts = 0 if group.feed_forward == "dense" else dims.experts
        turned = dims.rotary_share * group.rotary
        here = replace(
            dims, layers=group.layers, groups=(group,), window=group.window, experts=experts
        )
        here = replace(here, rotary_share=turned)
        mask = (
            [masks[shown.index(window)]] if window in shown and "attention" in group.mixer else []
        )
        body = _layer_body(here, group, _keep_window(run, window))
        label = _name_group(dims, group)
        repeat = group.layers
        (hidden,) = program.section(label, body, hidden, cos, sin, *mask, repeat=repeat)

    def head(tape: Tape, x: Tensor) -> Tensor:
        x = _normalise_rows(dims, run, x)
        how = {"tied": dims.tied, "bias": dims.head_bias}
        return layers.language_head(run, x, dims.vocab, **how, scales=dims.multipliers)

    program.section("head", head, hidden)


def _keep_window(run: PassSettings, window: int) -> PassSettings:
    """Return the settings of layers whose cache drops what the window has passed."""
    return replace(run, past=min(run.past, window - 1)) if window and run.past else run


def _name_group(dims: DecoderDims, group: LayerGroup) -> str:
    if len(dims.layer_groups) == 1:
        return "layers"
    reach = (
        f"window {group.window}"
        if group.window
        else f"chunks of {group.chunk}"
        if group.chunk
        else ""
    )
    dense = f"{group.feed_forward} feed-forward" if group.feed_forward != "same" else ""
    plain = (
        "without rotary"
        if "attention" in group.mixer and not group.rotary and dims.rotary_share
        else ""
    )
    return ", ".join(word for word in (f"{group.mixer} layers", reach, plain, dense) if word)


def _embed_tokens(
    dims: DecoderDims, run: PassSettings, windows: list[int], tape: Tape
) -> list[Tensor]:
    """Return token rows, rotary tables, and the masks that layers need."""
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    if dims.norm == "gemma" and not dims.attention_gate:  # Qwen3-Next has Gemma's norms alone
        x = x * tape.empty((), x.dtype)  # Gemma's embedding scale, which lies in device memory
    if "embedding" in dims.multipliers and not run.engine:
        x = x * 1.0
    if dims.embedding_norm:
        x = _normalise_rows(dims, run, x)
    layers.build_positions(tape, run)
    masks = [
        mask
        for window in windows
        for mask in layers.build_mask(tape, _keep_window(run, window), window)
    ]
    tables = [layers.rotary_tables(tape, run, dims.rotated) for _ in range(dims.rotary_tables)]
    return [x, *tables[-1], *masks]


def _layer_body(dims: DecoderDims, group: LayerGroup, run: PassSettings) -> Callable[..., Tensor]:
    """Return the function of one layer of a group."""
    attend = _engine_attention if run.engine else _self_attention

    def mix(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        out = attend(dims, run, x, cos, sin, mask) if "attention" in group.mixer else None
        if group.mixer == "attention":
            assert out is not None
            return out
        from wattcast.workload.models.sequence_scans import scan_sequence  # most have none

        assert dims.state is not None
        scanned = scan_sequence(dims.state, group.mixer.split()[-1], run, x)
        return scanned if out is None else out + scanned

    def layer(
        tape: Tape, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        if dims.parallel:
            normed = _enter_block(dims, run, x)
            with tape.scope("attention"):
                attended = mix(normed, cos, sin, mask)
            with tape.scope("mlp"):
                own = normed if dims.parallel_norms == 1 else _normalise_rows(dims, run, x)
                out = _feed_forward(dims, run, own)
                return (
                    out if run.engine else attended + out + x
                )  # an engine's next norm adds all three
        if group.mixer != "none":
            with tape.scope("attention"):
                x = _leave_block(dims, run, x, mix(_enter_block(dims, run, x), cos, sin, mask))
        if group.feed_forward != "none":
            with tape.scope("mlp"):
                x = _leave_block(
                    dims,
                    run,
                    x,
                    _feed_forward(dims, run, _enter_block(dims, run, x, not dims.experts)),
                )
        return x

    return layer


def _enter_block(
    dims: DecoderDims, run: PassSettings, x: Tensor, to_products: bool = True
) -> Tensor:
    """Return the input of attention or feed-forward; an engine adds the residual inside the norm's
    kernel.
    """
    if dims.norm_place == "after":
        return x
    if not run.engine:
        return _normalise_rows(dims, run, x)
    kind = RmsNorm if dims.norm in ("rms", "gemma") else LayerNorm
    return engine_layers.add_norm(run, x, kind, to_products=to_products, bias=dims.norm == "layer")


def _leave_block(dims: DecoderDims, run: PassSettings, x: Tensor, out: Tensor) -> Tensor:
    """Add the result of attention or feed-forward to the residual; an engine's next norm also
    multiplies it.
    """
    if dims.norm_place != "before":
        out = _normalise_rows(dims, run, out)
    if "residual" in dims.multipliers and not run.engine:
        out = out * 1.0
    return out if run.engine and dims.norm_place != "after" else x + out


def _normalise_rows(dims: DecoderDims, run: PassSettings, x: Tensor) -> Tensor:
    if dims.norm in ("rms", "gemma"):
        return layers.rms_norm(run, x, gemma=dims.norm == "gemma")
    if (
        dims.norm == "cohere" and not run.engine
    ):  # without bias, operator by operator in fp32, by Hugging Face
        weight = x.tape.parameter(x.shape[-1], dtype=run.dtype)
        with x.tape.scope("norm"):
            wide = x.to(Dtype.FP32)
            mean = functional.reduce_last("mean", wide)
            centred = wide + -mean
            variance = functional.reduce_last("mean", functional.power(wide + -mean, 2))
            return (weight.to(Dtype.FP32) * (centred * functional.rsqrt(variance + 1e-5))).to(
                x.dtype
            )
    return layers.layer_norm(run, x, bias=dims.norm == "layer")


def _self_attention(
    dims: DecoderDims, run: PassSettings, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
) -> Tensor:
    """Project to queries, keys and values; rotate; cache; attend; project back."""
    x = functional.enter_parallel(x, run.tp)
    q, k, v, *gate = _query_key_value(dims, run, x)
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    q = _rotate_heads(dims, q, cos, sin)
    k = _rotate_heads(dims, k, cos, sin)
    k = layers.append_cache(run, k)
    v = layers.append_cache(run, v)
    causal = True
    if run.fused_training:
        mask = None
        if (
            dims.window and 2 * dims.window < k.shape[2]
        ):  # blocks of queries see their own keys and those before
            k = k.slice(2, 0, 2 * dims.window)
            v = v.slice(2, 0, 2 * dims.window)
            causal = False
    elif dims.alibi or dims.sink:
        run = replace(run, attention=AttentionMode.EAGER)
    if dims.sink:
        x.tape.parameter(q.shape[1], dtype=run.dtype)
    terms = layers.ScoreTerms(
        softcap=dims.softcap > 0,
        mask=mask,
        sink=dims.sink,
        wide_softmax=not dims.sink,
        dropout=dims.dropout,
    )
    out = layers.attend(run, q, k, v, causal=causal, terms=terms)
    if gate:
        out = out * functional.activation("sigmoid", gate[0])
    return functional.leave_parallel(layers.project(run, out, dims.hidden, dims.out_bias), run.tp)


def _query_key_value(dims: DecoderDims, run: PassSettings, x: Tensor) -> list[Tensor]:
    """Return three views of ``[batch, heads, length, dim]``, and a gated model's ``[batch, length,
    width]``.
    """
    heads = dims.heads // run.tp
    kv_heads = max(dims.kv_heads // run.tp, 1)
    widths = [count * dims.dim for count in (heads, kv_heads, kv_heads)]
    if dims.fused_qkv:
        fused = layers.project(run, x, sum(widths), dims.qkv_bias)
        starts = (0, widths[0], widths[0] + widths[1])
        parts = [
            fused.slice(-1, start, start + width)
            for start, width in zip(starts, widths, strict=True)
        ]
        return [layers.split_heads(part, dims.dim) for part in parts]
    found = []
    gate = []
    for width, query, keyed in zip(widths, (True, False, False), (True, True, False), strict=True):
        if query and dims.attention_gate:
            both = layers.project(run, x, 2 * width, dims.qkv_bias)
            flat, extra = both.view(*both.shape[:2], -1, 2 * dims.dim).split(dims.dim, dims.dim)
            gate.append(extra.reshape(*both.shape[:2], width))
        else:
            flat = layers.project(run, x, width, dims.qkv_bias)
        if dims.qk_norm_wide and keyed:
            flat = layers.rms_norm(run, flat)
        flat = flat.view(*flat.shape[:2], -1, dims.dim)
        if dims.qk_norm and keyed:
            flat = layers.rms_norm(run, flat, gemma=dims.norm == "gemma")
        found.append(flat.transpose(1, 2))
    return found + gate


def _rotate_heads(dims: DecoderDims, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate all of each head, its first part and concatenate the rest (Phi), or nothing (MPT)."""
    if not dims.rotated:
        return x
    if dims.rotated == dims.dim and not (dims.fused_qkv and dims.fused_gate):
        return layers.rotate(x, cos, sin)
    turned = layers.rotate(x.slice(-1, 0, dims.rotated), cos, sin)
    return cat([turned, x.slice(-1, dims.rotated, dims.dim)], -1)


def _feed_forward(dims: DecoderDims, run: PassSettings, x: Tensor) -> Tensor:
    if dims.experts:
        from wattcast.workload.models.sparse_layers import mix_experts  # most decoders have none

        return mix_experts(dims, run, x, (dims.router_groups, dims.router_groups_chosen))
    width = dims.intermediate
    function = dims.activation
    bias = dims.mlp_bias
    if dims.gated:
        return layers.gated_feed_forward(run, x, width, function, merged=dims.fused_gate, bias=bias)
    if run.engine and function not in ("relu", "relu2"):
        function = "gelu_tanh"
    return layers.feed_forward(run, x, width, function, bias=bias)


def _engine_attention(
    dims: DecoderDims, run: PassSettings, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
) -> Tensor:
    """Attend as an inference engine does: one product, and one kernel for each of the rest.

    The rotary embedding turns queries and keys in place in one kernel; new keys and values are
    written into a paged cache that attention reads where it lies."""
    (group,) = dims.layer_groups
    heads = dims.heads // run.tp
    kv_heads = max(dims.kv_heads // run.tp, 1)
    counts = (*((heads,) * (1 + dims.attention_gate)), kv_heads, kv_heads)
    fused = layers.project(run, x, sum(counts) * dims.dim, dims.qkv_bias, slices=3)
    q, *gate, k, v = engine_layers.split_projection(fused, counts, dims.dim)
    for part in (q, k) if dims.qk_norm or dims.qk_norm_wide else ():
        layers.rms_norm(run, part.reshape(*part.shape[:2], -1) if dims.qk_norm_wide else part)
    if dims.rotated:
        engine_layers.rotate_in_place(run, q, k, cos, dims.rotated)
    if dims.sink:
        x.tape.parameter(heads, dtype=run.dtype)
    out = engine_layers.paged_attention(
        run, q, k, v, dims.window, chunk=group.chunk, softcap=dims.softcap, sink=dims.sink
    )
    if gate:
        out = pointwise("mul", out, pointwise("sigmoid", gate[0].reshape(*out.shape)))
    return functional.leave_parallel(layers.project(run, out, dims.hidden, dims.out_bias), run.tp)


@dataclass(frozen=True)
class LatentDims:
    """Published dimensions of a decoder with latent attention: keys and values are one short vector
    a token.
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


def trace_latent(dims: LatentDims, run: PassSettings, program: Program) -> None:
    """Trace one pass over ``run.length`` new tokens a sequence."""

    def embed(tape: Tape) -> list[Tensor]:
        x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
        layers.build_positions(tape, run)
        mask = layers.build_mask(tape, run)
        return [x, *layers.rotary_tables(tape, run, dims.rotary_dim), *mask]

    def add(x: Tensor, part: Callable[[Tensor], Tensor], to_products: bool = True) -> Tensor:
        """Add a part; an engine's next norm adds the residual."""
        if run.served:
            return part(engine_layers.add_norm(run, x, RmsNorm, to_products=to_products))
        return x + part(layers.rms_norm(run, x))

    def layer(tape: Tape, x: Tensor, *tables: Tensor, dense: bool) -> Tensor:
        """Compute x + attention(norm(x)), then x + experts(norm(x)); ``dense`` layers have no
        experts.
        """
        attend = _engine_latent_attention if run.engine else _latent_self_attention
        with tape.scope("attention"):
            x = add(x, lambda y: attend(dims, run, y, *tables))
        with tape.scope("mlp"):
            if dense:
                return add(
                    x,
                    lambda y: layers.gated_feed_forward(run, y, dims.intermediate, dims.activation),
                )
            from wattcast.workload.models.sparse_layers import mix_experts

            groups = dims.groups, dims.groups_chosen
            return add(x, lambda y: mix_experts(dims, run, y, groups), to_products=False)

    hidden, *tables = program.section("embedding", embed)
    mixed = dims.layers - dims.dense_layers
    for label, repeat, dense in (
        ("dense layers", dims.dense_layers, True),
        ("layers", mixed, False),
    ):
        if repeat:
            (hidden,) = program.section(
                label, partial(layer, dense=dense), hidden, *tables, repeat=repeat
            )
    program.section(
        "head",
        lambda _, x: layers.language_head(run, layers.rms_norm(run, x), dims.vocab, tied=False),
        hidden,
    )


def _latent_self_attention(
    dims: LatentDims,
    run: PassSettings,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend with queries and keys from low-rank products; the cached short vectors are expanded at
    each use.
    """
    x = functional.enter_parallel(x, run.tp)
    heads = dims.heads // run.tp
    low = layers.rms_norm(run, layers.project(run, x, dims.q_rank)) if dims.q_rank else x
    q = layers.split_heads(layers.project(run, low, heads * dims.dim), dims.dim)
    q_plain, q_turn = q.split(dims.plain_dim, dims.rotary_dim)
    latent, k_turn = layers.project(run, x, dims.cached_dim).split(dims.kv_rank, dims.rotary_dim)
    latent = layers.rms_norm(run, latent)
    half = dims.rotary_dim // 2
    cos = cos.slice(-1, 0, half).unsqueeze(1)
    sin = sin.slice(-1, 0, half).unsqueeze(1)
    q_turn = _rotate_pairs(q_turn, cos, sin)
    k_turn = _rotate_pairs(k_turn.unsqueeze(1), cos, sin)
    latent = layers.append_cache(run, latent.unsqueeze(1))
    k_turn = layers.append_cache(run, k_turn)
    q = cat([q_plain, q_turn], -1)
    # keys are the plain part of what short vectors expand to and the shared rotated part, both
    # copied in
    batch, _, length, rank = latent.shape
    wide = layers.project(
        run, latent.view(batch, length, rank), heads * (dims.plain_dim + dims.value_dim)
    )
    plain, v = layers.split_heads(wide, dims.plain_dim + dims.value_dim).split(
        dims.plain_dim, dims.value_dim
    )
    k = x.tape.empty((batch, heads, length, dims.dim), latent.dtype)
    for part in (plain, k_turn.expand(batch, heads, length, dims.rotary_dim)):
        layout = Layout.STRIDED if part.byte == part.numel * part.dtype.byte else Layout.BROADCAST
        x.tape.emit_pointwise("copy", (part,), replace(part), layout)

    def back(g: Tensor) -> tuple[Tensor, Tensor]:
        plain = g.slice(-1, 0, dims.plain_dim)
        turned = g.slice(-1, dims.plain_dim, dims.dim)
        return plain.clone(), turned.sum_to((g.shape[0], 1, g.shape[2], dims.rotary_dim))

    k = k.with_gradient(back, plain, k_turn)
    terms = layers.ScoreTerms(mask=mask, wide_softmax=True)
    out = layers.attend(run, q, k, v, causal=True, terms=terms)
    return functional.leave_parallel(layers.project(run, out, dims.hidden), run.tp)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs, which are read as strided halves and concatenated."""
    pairs = x.view(*x.shape[:-1], x.shape[-1] // 2, 2)
    even = pairs.select(-1)
    odd = pairs.select(-1)
    left = even * cos
    right = odd * sin
    first = pointwise("sub", left, right).with_gradient(
        lambda g: (g, pointwise("neg", g)), left, right
    )
    return cat([first, odd * cos + even * sin], -1)


def _engine_latent_attention(
    dims: LatentDims,
    run: PassSettings,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Run latent attention as an inference engine does.

    In decode the up-projections are absorbed into queries and outputs, so that attention runs over
    the short vectors themselves with one key head; in prefill keys and values are expanded."""
    heads = dims.heads // run.tp
    low = layers.project(run, x, dims.q_rank + dims.cached_dim)
    q_low, latent, k_turn = low.split(dims.q_rank, dims.kv_rank, dims.rotary_dim)
    q = layers.project(run, layers.rms_norm(run, q_low) if dims.q_rank else x, heads * dims.dim)
    latent = layers.rms_norm(run, latent)
    engine_layers.rotate_in_place(
        run, q.slice(-1, 0, heads * dims.rotary_dim), k_turn, cos, dims.rotary_dim
    )
    engine_layers.write_paged_cache(run, (latent, k_turn), dims.cached_dim)
    tape = q.tape
    sizes = (run.batch, heads, run.length, run.context)
    width = heads * (dims.plain_dim + dims.value_dim)
    shape = (run.batch, run.length, heads * dims.value_dim)
    op: Operator
    if run.length == 1:
        weight = tape.parameter(width, dims.kv_rank, dtype=run.dtype)
        up = Bmm(heads, run.batch, dims.kv_rank, dims.plain_dim, dtype=q.dtype)
        wide = tape.launch(up, (q, weight), (run.batch, 1, heads, dims.cached_dim))
        if run.served:
            how = (
                ("flashmla", run.cache_dtype, 64)
                if run.cache_dtype is Dtype.FP8
                else ("fa3", run.cache_dtype, 16)
            )
            op = LatentAttention(*sizes, dims.kv_rank, dims.rotary_dim, *how, dtype=q.dtype)
        else:
            op = Attention(
                run.batch,
                heads,
                1,
                1,
                run.context,
                dims.cached_dim,
                v_head_dim=dims.kv_rank,
                dtype=q.dtype,
            )
        mixed = tape.launch(op, (wide, latent), (run.batch, 1, heads, dims.kv_rank))
        down = Bmm(heads, run.batch, dims.value_dim, dims.kv_rank, dtype=q.dtype)
        out = tape.launch(down, (mixed, weight), shape)
    else:
        whole = tape.empty((run.batch, run.context, dims.kv_rank), q.dtype) if run.past else latent
        wide = layers.project(run, whole, width)
        n = run.batch * run.context * heads * dims.dim
        k = tape.launch(Elementwise("cat", n, dtype=q.dtype, layout=Layout.STRIDED), (wide,), (n,))
        if run.served and (dims.dim, dims.value_dim) == (192, 128):
            op = LatentAttention(
                *sizes, dims.kv_rank, dims.rotary_dim, phase="prefill", dtype=q.dtype
            )
        else:
            own: dict[str, Any] = {"causal": True, "v_head_dim": dims.value_dim, "dtype": q.dtype}
            op = Attention(run.batch, heads, *sizes[1:], dims.dim, **own)
        out = tape.launch(op, (q, k, wide), shape)
    return functional.leave_parallel(layers.project(run, out, dims.hidden), run.tp)
