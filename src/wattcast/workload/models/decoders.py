"""Decoders that generate text: the Llama kind with its many switches, and mixtures of experts.

Layers that differ are groups, each with its own repeat. Mixtures of experts are in
``sparse_layers.py`` and sequence scans in ``sequence_scans.py``, which a decoder imports when it
has some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wattcast.core import Dtype, bad_value
from wattcast.workload import tensor_functions as functional
from wattcast.workload.model_options import AttentionMode
from wattcast.workload.models import engine_layers
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.shared_layers import StateDims
from wattcast.workload.operator_types import LayerNorm, RmsNorm
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    pointwise,
)


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
    # what is scaled by a number: "embedding", "residual", "logits", "cap", or "rotary" (YaRN's
    # factor on sines and cosines)
    multipliers: tuple[str, ...] = ()
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
            layers_by_group = " + ".join(str(group.layers) for group in self.groups)
            expected = f"as many layers as the model's {self.layers}"
            raise bad_value("groups", expected, layers_by_group)
        mixers = [group.mixer for group in self.layer_groups]
        scans = [mixer for mixer in mixers if mixer not in ("attention", "none")]
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


def trace_decoder(
    dims: DecoderDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over ``run.length`` new tokens a sequence."""
    windows = sorted({group.window or group.chunk for group in dims.layer_groups})
    masked_windows = [
        window for window in windows if layers.needs_mask(_keep_window(run, window), window)
    ]

    def embed(tape: Tape) -> list[Tensor]:
        return _embed_tokens(dims, run, windows, tape)

    def head(tape: Tape, x: Tensor) -> Tensor:
        return layers.language_head(
            run,
            _normalise_rows(dims, run, x),
            dims.vocab,
            tied=dims.tied,
            bias=dims.head_bias,
            scales=dims.multipliers,
        )

    hidden, cos, sin, *masks = program.section("embedding", embed)
    for group in dims.layer_groups:
        window = group.window or group.chunk
        inputs = [hidden, cos, sin]
        if window in masked_windows and "attention" in group.mixer:
            inputs.append(masks[masked_windows.index(window)])
        body = _layer_body(_group_dims(dims, group), group, _keep_window(run, window))
        label = _name_group(dims, group)
        (hidden,) = program.section(label, body, *inputs, repeat=group.layers)
    program.section("head", head, hidden)


def _group_dims(dims: DecoderDims, group: LayerGroup) -> DecoderDims:
    """Return the dimensions of a decoder that has the layers of a group alone."""
    alone = replace(
        dims,
        layers=group.layers,
        groups=(group,),
        window=group.window,
        experts=0 if group.feed_forward == "dense" else dims.experts,
    )
    return alone if group.rotary else replace(alone, rotary_share=0.0)


def _keep_window(run: PassSettings, window: int) -> PassSettings:
    """Return the settings of layers whose cache drops what the window has passed."""
    if window and run.past:
        return replace(run, past=min(run.past, window - 1))
    return run


def _name_group(dims: DecoderDims, group: LayerGroup) -> str:
    """Return a label that says how layers differ from the others."""
    if len(dims.layer_groups) == 1:
        return "layers"
    words = [f"{group.mixer} layers"]
    if group.window:
        words.append(f"window {group.window}")
    elif group.chunk:
        words.append(f"chunks of {group.chunk}")
    if "attention" in group.mixer and not group.rotary and dims.rotary_share:
        words.append("without rotary")
    if group.feed_forward != "same":
        words.append(f"{group.feed_forward} feed-forward")
    return ", ".join(words)


def _embed_tokens(
    dims: DecoderDims,
    run: PassSettings,
    windows: list[int],
    tape: Tape,
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
    masks: list[Tensor] = []
    for window in windows:
        masks += layers.build_mask(tape, _keep_window(run, window), window)
    tables = [layers.rotary_tables(tape, run, dims.rotated) for _ in range(dims.rotary_tables)]
    return [x, *tables[-1], *masks]


def _layer_body(
    dims: DecoderDims,
    group: LayerGroup,
    run: PassSettings,
) -> Callable[..., Tensor]:
    """Return the function of one layer of a group."""

    def mix(x: Tensor, *tables: Tensor) -> Tensor:
        return _mix_tokens(
            dims,
            group,
            run,
            x,
            *tables,
        )

    def parallel_layer(
        tape: Tape,
        x: Tensor,
        *tables: Tensor,
    ) -> Tensor:
        normed = _enter_block(dims, run, x)
        with tape.scope("attention"):
            attended = mix(normed, *tables)
        with tape.scope("mlp"):
            if dims.parallel_norms > 1:
                normed = _normalise_rows(dims, run, x)
            out = _feed_forward(dims, run, normed)
            if run.engine:  # an engine's next norm adds all three
                return out
            return attended + out + x

    def layer(
        tape: Tape,
        x: Tensor,
        *tables: Tensor,
    ) -> Tensor:
        if group.mixer != "none":
            with tape.scope("attention"):
                normed = _enter_block(dims, run, x)
                x = _leave_block(dims, run, x, mix(normed, *tables))
        if group.feed_forward != "none":
            with tape.scope("mlp"):
                normed = _enter_block(dims, run, x, to_products=not dims.experts)
                x = _leave_block(dims, run, x, _feed_forward(dims, run, normed))
        return x

    return parallel_layer if dims.parallel else layer


def _mix_tokens(
    dims: DecoderDims,
    group: LayerGroup,
    run: PassSettings,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend, scan, or add the results of both."""
    attended = None
    if "attention" in group.mixer:
        attend = _engine_attention if run.engine else _self_attention
        attended = attend(
            dims,
            run,
            x,
            cos,
            sin,
            mask,
        )
        if group.mixer == "attention":
            return attended
    from wattcast.workload.models.sequence_scans import scan_sequence  # most decoders have none

    assert dims.state is not None
    rule = group.mixer.split()[-1]
    scanned = scan_sequence(dims.state, rule, run, x)
    return scanned if attended is None else attended + scanned


def _enter_block(
    dims: DecoderDims,
    run: PassSettings,
    x: Tensor,
    to_products: bool = True,
) -> Tensor:
    """Return the input of attention or feed-forward.

    An engine adds the residual inside the norm's kernel.
    """
    if dims.norm_place == "after":
        return x
    if not run.engine:
        return _normalise_rows(dims, run, x)
    kind = RmsNorm if dims.norm in ("rms", "gemma") else LayerNorm
    return engine_layers.add_norm(
        run,
        x,
        kind,
        to_products=to_products,
        bias=dims.norm == "layer",
    )


def _leave_block(
    dims: DecoderDims,
    run: PassSettings,
    x: Tensor,
    out: Tensor,
) -> Tensor:
    """Add the result of attention or feed-forward to the residual.

    An engine's next norm adds, and multiplies, it.
    """
    if dims.norm_place != "before":
        out = _normalise_rows(dims, run, out)
    if "residual" in dims.multipliers and not run.engine:
        out = out * 1.0
    if run.engine and dims.norm_place != "after":
        return out
    return x + out


def _normalise_rows(
    dims: DecoderDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    if dims.norm in ("rms", "gemma"):
        return layers.rms_norm(run, x, gemma=dims.norm == "gemma")
    if dims.norm == "cohere" and not run.engine:
        return _normalise_wide(run, x)
    return layers.layer_norm(run, x, bias=dims.norm == "layer")


def _normalise_wide(run: PassSettings, x: Tensor) -> Tensor:
    """Apply a layer norm without bias as Hugging Face writes it for Cohere, in fp32."""
    weight = x.tape.parameter(x.shape[-1], dtype=run.dtype)
    with x.tape.scope("norm"):
        wide = x.to(Dtype.FP32)
        mean = functional.reduce_last("mean", wide)
        centred = wide + -mean
        square = functional.power(wide + -mean, 2)
        variance = functional.reduce_last("mean", square)
        wide_weight = weight.to(Dtype.FP32)
        scaled = wide_weight * (centred * functional.rsqrt(variance + 1e-5))
        return scaled.to(x.dtype)


def _self_attention(
    dims: DecoderDims,
    run: PassSettings,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None,
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
        if dims.window and 2 * dims.window < k.shape[2]:
            # Blocks of queries see the keys of their own block and of the one before
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
    out = layers.attend(
        run,
        q,
        k,
        v,
        causal=causal,
        terms=terms,
    )
    if gate:
        out = out * functional.activation("sigmoid", gate[0])
    return functional.leave_parallel(layers.project(run, out, dims.hidden, dims.out_bias), run.tp)


def _query_key_value(
    dims: DecoderDims,
    run: PassSettings,
    x: Tensor,
) -> list[Tensor]:
    """Return queries, keys and values, and the gate of a gated model.

    The first three are ``[batch, heads, length, dim]``, the gate is ``[batch, length, width]``.
    """
    width = dims.heads // run.tp * dims.dim
    kv_width = max(dims.kv_heads // run.tp, 1) * dims.dim
    if dims.fused_qkv:
        fused = layers.project(run, x, width + 2 * kv_width, dims.qkv_bias)
        q = fused.slice(-1, 0, width)
        k = fused.slice(-1, width, width + kv_width)
        v = fused.slice(-1, width + kv_width, width + 2 * kv_width)
        return [layers.split_heads(part, dims.dim) for part in (q, k, v)]

    gate: list[Tensor] = []
    if dims.attention_gate:
        keys_and_values = layers.project(run, x, 2 * width, dims.qkv_bias)
        batch, length, _ = keys_and_values.shape
        q, gate_heads = keys_and_values.view(batch, length, -1, 2 * dims.dim).split(
            dims.dim, dims.dim
        )
        gate.append(gate_heads.reshape(batch, length, width))
    else:
        q = layers.project(run, x, width, dims.qkv_bias)
    q = _norm_heads(dims, run, q)
    k = _norm_heads(dims, run, layers.project(run, x, kv_width, dims.qkv_bias))
    v = _view_heads(dims, layers.project(run, x, kv_width, dims.qkv_bias))
    return [q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *gate]


def _norm_heads(
    dims: DecoderDims,
    run: PassSettings,
    flat: Tensor,
) -> Tensor:
    """Norm queries or keys, all heads together or each by itself, and view them by head."""
    if dims.qk_norm_wide:
        flat = layers.rms_norm(run, flat)
    heads = _view_heads(dims, flat)
    if dims.qk_norm:
        return layers.rms_norm(run, heads, gemma=dims.norm == "gemma")
    return heads


def _view_heads(dims: DecoderDims, flat: Tensor) -> Tensor:
    return flat.view(*flat.shape[:2], -1, dims.dim)


def _rotate_heads(
    dims: DecoderDims,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotate all of each head, its first part and concatenate the rest (Phi), or nothing (MPT)."""
    if not dims.rotated:
        return x
    if dims.rotated == dims.dim and not (dims.fused_qkv and dims.fused_gate):
        return layers.rotate(x, cos, sin)
    turned = layers.rotate(x.slice(-1, 0, dims.rotated), cos, sin)
    return cat([turned, x.slice(-1, dims.rotated, dims.dim)], -1)


def _feed_forward(
    dims: DecoderDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    if dims.experts:
        from wattcast.workload.models.sparse_layers import mix_experts  # most decoders have none

        return mix_experts(dims, run, x, (dims.router_groups, dims.router_groups_chosen))
    width = dims.intermediate
    function = dims.activation
    bias = dims.mlp_bias
    if dims.gated:
        return layers.gated_feed_forward(
            run,
            x,
            width,
            function,
            merged=dims.fused_gate,
            bias=bias,
        )
    if run.engine and function not in ("relu", "relu2"):
        function = "gelu_tanh"
    return layers.feed_forward(
        run,
        x,
        width,
        function,
        bias=bias,
    )


def _engine_attention(
    dims: DecoderDims,
    run: PassSettings,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Attend as an inference engine does: one product, and one kernel for each of the rest.

    The rotary embedding turns queries and keys in place in one kernel; new keys and values are
    written into a paged cache that attention reads where it lies."""
    (group,) = dims.layer_groups
    heads = dims.heads // run.tp
    kv_heads = max(dims.kv_heads // run.tp, 1)
    counts = [heads, kv_heads, kv_heads]
    if dims.attention_gate:
        counts.insert(0, heads)
    fused = layers.project(
        run,
        x,
        sum(counts) * dims.dim,
        dims.qkv_bias,
        slices=3,
    )
    q, *gate, k, v = engine_layers.split_projection(fused, counts, dims.dim)
    for part in (q, k):
        if dims.qk_norm_wide:
            layers.rms_norm(run, part.reshape(*part.shape[:2], -1))
        elif dims.qk_norm:
            layers.rms_norm(run, part)
    if dims.rotated:
        engine_layers.rotate_in_place(
            run,
            q,
            k,
            cos,
            dims.rotated,
        )
    if dims.sink:
        x.tape.parameter(heads, dtype=run.dtype)
    out = engine_layers.paged_attention(
        run,
        q,
        k,
        v,
        dims.window,
        chunk=group.chunk,
        softcap=dims.softcap,
        sink=dims.sink,
    )
    if gate:
        out = pointwise("mul", out, pointwise("sigmoid", gate[0].reshape(*out.shape)))
    return functional.leave_parallel(layers.project(run, out, dims.hidden, dims.out_bias), run.tp)
