"""Transformers of the first years: GPT-2 and OPT, T5 and Whisper, BERT and ModernBERT, and the
vision transformer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.model_options import OutputHead
from wattcast.workload.models import engine_layers
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.operator_types import Elementwise, LayerNorm
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    fill,
    pointwise,
)


@dataclass(frozen=True)
class GptDims:
    """Published dimensions of GPT-2 or OPT."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    max_positions: int
    style: str = "gpt2"  # or "opt"
    activation: str = "gelu_new"
    tied: bool = True
    dropout: float = 0.1


def trace_gpt(
    dims: GptDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over ``run.length`` new tokens a sequence."""
    is_gpt2 = dims.style == "gpt2"

    def embed(tape: Tape) -> list[Tensor]:
        x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
        places = _embed_gpt_places(dims, run, tape)
        mask = layers.build_mask(tape, run)
        x = x + places
        if is_gpt2:
            x = functional.dropout(x, dims.dropout)
        return [x, *mask]

    def layer(
        tape: Tape,
        x: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        def attention(y: Tensor) -> Tensor:
            return _gpt_attention(dims, run, y, mask)

        def mlp(y: Tensor) -> Tensor:
            return layers.feed_forward(
                run,
                y,
                dims.intermediate,
                dims.activation,
                in_major=is_gpt2,
            )

        return layers.add_parts(
            run,
            x,
            p=dims.dropout,
            attention=attention,
            mlp=mlp,
        )

    def engine_layer(tape: Tape, x: Tensor) -> Tensor:
        return _engine_gpt_layer(dims, run, x)

    def head(tape: Tape, x: Tensor) -> Tensor:
        return layers.language_head(run, layers.layer_norm(run, x), dims.vocab, tied=dims.tied)

    program.stack(embed, engine_layer if run.engine else layer, head, dims.layers)


def _embed_gpt_places(
    dims: GptDims,
    run: PassSettings,
    tape: Tape,
) -> Tensor:
    """Look up the positions of the tokens.

    OPT counts its positions from an attention mask of ones, and keeps two rows more than positions.
    """
    if dims.style == "gpt2":
        layers.build_positions(tape, run)
        return layers.embed(
            run,
            tape,
            dims.max_positions,
            dims.hidden,
            batch=1,
        )
    ones = fill(tape, (run.batch, run.context), Dtype.FP32)
    count = pointwise("mul", pointwise("cumsum", ones), ones)
    place = pointwise("cast", pointwise("shift", count), out_dtype=Dtype.INT64)
    pointwise("shift", place.slice(1, run.past, run.context))
    return layers.embed(run, tape, dims.max_positions + 2, dims.hidden)


def _gpt_attention(
    dims: GptDims,
    run: PassSettings,
    x: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Attend over earlier tokens; GPT-2 stores weights as ``[in, out]``."""
    is_gpt2 = dims.style == "gpt2"
    head_dim = dims.hidden // dims.heads
    width = dims.heads // run.tp * head_dim
    x = functional.enter_parallel(x, run.tp)
    if is_gpt2:  # one product, and strided views of it
        fused = layers.project(
            run,
            x,
            3 * width,
            bias=True,
            in_major=True,
        )
        parts = list(fused.split(width, width, width))
    else:  # OPT scales its queries first
        parts = [layers.project(run, x, width, bias=True) for _ in range(3)]
        parts[0] = parts[0] * 0.125
    q, k, v = [layers.split_heads(part, head_dim) for part in parts]
    k = layers.append_cache(run, k)
    v = layers.append_cache(run, v)
    terms = layers.ScoreTerms(
        mask=mask,
        wide_softmax=not is_gpt2,
        dropout=dims.dropout if is_gpt2 else 0.0,
    )
    out = layers.attend(
        run,
        q,
        k,
        v,
        causal=True,
        terms=terms,
    )
    out = layers.project(
        run,
        out,
        dims.hidden,
        bias=True,
        in_major=is_gpt2,
    )
    return functional.leave_parallel(out, run.tp)


def _engine_gpt_layer(
    dims: GptDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    """Run a layer as an engine does.

    It merges the products of queries, keys and values, and runs one kernel for each of the rest.
    """
    tape = x.tape
    heads = dims.heads // run.tp
    head_dim = dims.hidden // dims.heads
    with tape.scope("attention"):
        normed = engine_layers.add_norm(run, x, LayerNorm)
        fused = layers.project(run, normed, 3 * heads * head_dim, bias=True)
        q, k, v = engine_layers.split_projection(fused, (heads, heads, heads), head_dim)
        out = engine_layers.paged_attention(run, q, k, v)
        out = layers.project(run, out, dims.hidden, bias=True)
        x = functional.leave_parallel(out, run.tp)
    with tape.scope("mlp"):
        function = "relu" if dims.activation == "relu" else "gelu_tanh"
        normed = engine_layers.add_norm(run, x, LayerNorm)
        return layers.feed_forward(run, normed, dims.intermediate, function)


@dataclass(frozen=True)
class T5Dims:
    """Published dimensions of T5: an encoder and a decoder.

    Their scores get a learned bias of the distance.
    """

    layers: int  # of the encoder
    decoder_layers: int  # 0: the encoder alone
    hidden: int
    heads: int
    head_dim: int
    intermediate: int
    vocab: int
    activation: str = "relu"
    gated: bool = False
    buckets: int = 32  # of distances
    tied: bool = True  # one table for tokens and logits, whose inputs are scaled
    dropout: float = 0.1
    # of an encoder alone: each layer has a bias of its own, not the one of the first (UMT5)
    bias_each_layer: bool = False


def trace_t5(
    dims: T5Dims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace the encoder over ``run.source`` tokens and the decoder over its new ones.

    In decode the encoder does not run.
    """
    source: list[Tensor] = []
    if not run.past or not dims.decoder_layers:
        source = _trace_t5_encoder(dims, run, program)
    if dims.decoder_layers:
        _trace_t5_decoder(dims, run, program, source)


def _trace_t5_encoder(
    dims: T5Dims,
    run: PassSettings,
    program: Program,
) -> list[Tensor]:
    """Trace the encoder and return what it made of the source."""
    read = replace(
        run,
        length=run.source or run.length,
        past=0,
        cached=False,
    )

    def embed(tape: Tape) -> list[Tensor]:
        x = _embed_t5_tokens(dims, read, tape, tied=False)
        if dims.bias_each_layer:
            return [x]
        return [x, _bias_distances(dims, read, tape, decoder=False)]

    def layer(
        tape: Tape,
        x: Tensor,
        shared_bias: Tensor | None = None,
    ) -> Tensor:
        def attention(y: Tensor) -> Tensor:
            bias = shared_bias
            if bias is None:
                bias = _bias_distances(dims, read, tape, decoder=False)
            return _t5_attention(
                dims,
                read,
                y,
                y,
                bias,
            )

        return _add_t5_parts(dims, run, x, attention=attention)

    def norm(tape: Tape, x: Tensor) -> Tensor:
        return functional.dropout(_t5_norm(run, x), dims.dropout)

    x, *bias = program.section("encoder.embedding", embed)
    (x,) = program.section(
        "encoder.layers",
        layer,
        x,
        *bias,
        repeat=dims.layers,
    )
    return program.section("encoder.norm", norm, x)


def _trace_t5_decoder(
    dims: T5Dims,
    run: PassSettings,
    program: Program,
    source: list[Tensor],
) -> None:
    """Trace the decoder over its new tokens; without a source, its keys and values are cached."""

    def embed(tape: Tape) -> list[Tensor]:
        """Return token rows, the bias, a bias of zeros over the source, and the mask."""
        has_encoder = not run.past  # which looked up the same table
        x = _embed_t5_tokens(dims, run, tape, tied=has_encoder)
        mask = layers.build_mask(tape, run)
        bias = _bias_distances(dims, run, tape, decoder=True)
        zeros = fill(tape, (1, dims.heads // run.tp, run.length, run.source), run.dtype)
        return [x, bias, zeros, *mask]

    x, bias, zeros, *masks = program.section("decoder.embedding", embed)

    def layer(
        tape: Tape,
        x: Tensor,
        bias: Tensor,
        zeros: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        mask = inputs[0] if masks else None
        encoded = inputs[-1] if source else None

        def attention(y: Tensor) -> Tensor:
            return _t5_attention(
                dims,
                run,
                y,
                y,
                bias,
                mask,
                causal=True,
            )

        def cross(y: Tensor) -> Tensor:
            return _t5_attention(
                dims,
                run,
                y,
                encoded,
                zeros,
            )

        return _add_t5_parts(
            dims,
            run,
            x,
            attention=attention,
            cross=cross,
        )

    def head(tape: Tape, x: Tensor) -> Tensor:
        x = functional.dropout(_t5_norm(run, x), dims.dropout)
        if dims.tied:
            x = x * 0.0442
        return layers.language_head(run, x, dims.vocab, tied=dims.tied)

    inputs = [bias, zeros, *masks, *source]
    (x,) = program.section(
        "decoder.layers",
        layer,
        x,
        *inputs,
        repeat=dims.decoder_layers,
    )
    program.section("head", head, x)


def _t5_norm(run: PassSettings, x: Tensor) -> Tensor:
    return layers.rms_norm(run, x, scales_input=True)


def _add_t5_parts(
    dims: T5Dims,
    run: PassSettings,
    x: Tensor,
    attention: Callable[[Tensor], Tensor],
    cross: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Add the attention over own tokens, that over the source, and a feed-forward layer."""
    feed_forward = layers.gated_feed_forward if dims.gated else layers.feed_forward

    def norm(y: Tensor) -> Tensor:
        return _t5_norm(run, y)

    def mlp(y: Tensor) -> Tensor:
        return feed_forward(
            run,
            y,
            dims.intermediate,
            dims.activation,
            bias=False,
        )

    if cross is None:
        return layers.add_parts(
            run,
            x,
            norm,
            p=dims.dropout,
            attention=attention,
            mlp=mlp,
        )
    return layers.add_parts(
        run,
        x,
        norm,
        p=dims.dropout,
        attention=attention,
        cross=cross,
        mlp=mlp,
    )


def _embed_t5_tokens(
    dims: T5Dims,
    run: PassSettings,
    tape: Tape,
    *,
    tied: bool,
) -> Tensor:
    """Look up the tokens; a ``tied`` table is one that was looked up before."""
    rows = -(-dims.vocab // run.tp)
    table = tape.parameter(rows, dims.hidden, dtype=run.dtype, tied=tied)
    x = functional.embedding(table, (run.batch, run.length))
    x = functional.leave_parallel(x, run.tp)
    return functional.dropout(x, dims.dropout)


def _bias_distances(
    dims: T5Dims,
    run: PassSettings,
    tape: Tape,
    *,
    decoder: bool,
) -> Tensor:
    """Return the learned bias of each pair of a query and a key, by the bucket of their distance.

    Buckets are logarithmic beyond some distance. In an encoder either side has half of them."""
    heads = dims.heads // run.tp
    shape = (run.length, run.context)
    query = pointwise("shift", fill(tape, (run.length,), Dtype.INT64)).unsqueeze(1)
    distance = pointwise("sub", fill(tape, (run.context,), Dtype.INT64), query)
    side = distance
    if decoder:
        zeros = fill(tape, shape, Dtype.INT64)
        distance = pointwise("neg", pointwise("maximum", distance, zeros))
    else:
        is_later = pointwise("compare", distance, out_dtype=Dtype.BOOL)
        side = pointwise("cast", is_later, out_dtype=Dtype.INT64)
        side = pointwise("shift", pointwise("scale", side))
        distance = pointwise("abs", distance)

    is_near = pointwise("compare", distance, out_dtype=Dtype.BOOL)
    bucket = pointwise("cast", distance, out_dtype=Dtype.FP32)
    for name in ("scale", "log", "scale", "scale"):
        bucket = pointwise(name, bucket)
    bucket = pointwise("shift", pointwise("cast", bucket, out_dtype=Dtype.INT64))
    last = fill(tape, shape, Dtype.INT64)
    bucket = pointwise("where", distance, pointwise("maximum", bucket, last), is_near)
    if decoder:
        pointwise("shift", bucket)
    else:
        pointwise("add", bucket, side)
    table = tape.parameter(dims.buckets, heads, dtype=run.dtype)
    return functional.embedding(table, shape).permute(2, 0, 1).unsqueeze(0)


def _t5_attention(
    dims: T5Dims,
    run: PassSettings,
    x: Tensor,
    source: Tensor | None,
    bias: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> Tensor:
    """Attend with a bias; keys and values come from ``source``, or from the cache without one."""
    tape = x.tape
    heads = dims.heads // run.tp
    width = heads * dims.head_dim
    x_in = functional.enter_parallel(x, run.tp)
    q = layers.split_heads(layers.project(run, x_in, width), dims.head_dim)
    if source is None:
        shape = (run.batch, heads, run.source, dims.head_dim)
        k = tape.empty(shape, run.dtype)
        v = tape.empty(shape, run.dtype)
        tape.cache_byte += 2 * k.byte
    else:
        source_in = x_in if source is x else functional.enter_parallel(source, run.tp)
        k = layers.split_heads(layers.project(run, source_in, width), dims.head_dim)
        v = layers.split_heads(layers.project(run, source_in, width), dims.head_dim)
        cache = run
        if not causal:
            cache = replace(run, past=0, cached=run.cached and source is not x)
        k = layers.append_cache(cache, k)
        v = layers.append_cache(cache, v)

    if run.flash and causal and run.length > 1:
        bias = _hide_later_keys(run, bias)
    if run.flash:
        bias = bias.contiguous()
    terms = layers.ScoreTerms(
        mask=mask,
        bias=bias,
        dropout=dims.dropout,
    )
    out = layers.attend(
        run,
        q,
        k,
        v,
        causal=False,
        terms=terms,
    )
    return functional.leave_parallel(layers.project(run, out, dims.hidden), run.tp)


def _hide_later_keys(run: PassSettings, bias: Tensor) -> Tensor:
    """Write into the bias what the causal mask hides."""
    tape = bias.tape
    query_place = fill(tape, (run.length,), Dtype.INT64)
    key_place = fill(tape, (run.context,), Dtype.INT64)
    query = query_place.unsqueeze(1)
    key = key_place.unsqueeze(0)
    is_visible = pointwise("compare", query, key, out_dtype=Dtype.BOOL)
    return pointwise("where", bias, is_visible, fill(tape, (), run.dtype))


@dataclass(frozen=True)
class WhisperDims:
    """Published dimensions of Whisper."""

    encoder_layers: int
    decoder_layers: int
    hidden: int
    heads: int
    intermediate: int
    mel_bins: int
    vocab: int
    frames: int = 1500  # thirty seconds after the stride-2 convolution
    max_positions: int = 448
    activation: str = "gelu"
    dropout: float = 0.0


def trace_whisper(
    dims: WhisperDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace the encoder once and the decoder's new tokens.

    In decode the encoder does not run: its keys and values are cached.
    """
    sound: list[Tensor] = []

    def embed_sound(tape: Tape) -> Tensor:
        return _embed_sound(dims, run, tape)

    def embed(tape: Tape) -> list[Tensor]:
        x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
        layers.build_positions(tape, run)
        tape.empty((1, run.length), Dtype.INT64).expand(run.batch, run.length).clone()
        x = x + layers.embed(run, tape, dims.max_positions, dims.hidden)
        return [functional.dropout(x, dims.dropout), *layers.build_mask(tape, run)]

    def encoder_layer(tape: Tape, x: Tensor) -> Tensor:
        def attention(y: Tensor) -> Tensor:
            return _whisper_attention(
                dims,
                run,
                y,
                y,
                causal=False,
            )

        return layers.add_parts(
            run,
            x,
            p=dims.dropout,
            attention=attention,
            mlp=partial(_whisper_mlp, dims, run),
        )

    def encoder_norm(tape: Tape, x: Tensor) -> Tensor:
        return layers.layer_norm(run, x)

    def decoder_layer(
        tape: Tape,
        x: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        mask = inputs[0] if masks else None
        encoded = inputs[-1] if sound else None
        return _decode_whisper(
            dims,
            run,
            x,
            mask,
            encoded,
        )

    def head(tape: Tape, x: Tensor) -> Tensor:
        return layers.language_head(run, layers.layer_norm(run, x), dims.vocab, tied=True)

    if not run.past:
        sound = program.section("encoder.embedding", embed_sound)
        sound = program.section("encoder.layers", encoder_layer, *sound, repeat=dims.encoder_layers)
        sound = program.section("encoder.norm", encoder_norm, *sound)
    x, *masks = program.section("decoder.embedding", embed)
    inputs = [*masks, *sound]
    (x,) = program.section(
        "decoder.layers",
        decoder_layer,
        x,
        *inputs,
        repeat=dims.decoder_layers,
    )
    program.section("head", head, x)


def _embed_sound(
    dims: WhisperDims,
    run: PassSettings,
    tape: Tape,
) -> Tensor:
    """Convolve twice over time, halving it the second time; add positions."""
    x = tape.empty((run.batch, dims.mel_bins, 2 * dims.frames), run.dtype)
    for stride in (1, 2):
        convolved = functional.convolve(
            x,
            dims.hidden,
            3,
            stride=stride,
            bias=True,
        )
        x = functional.activation("gelu", convolved)
    fill(tape, (dims.frames,), Dtype.INT64)
    table = tape.parameter(dims.frames, dims.hidden, dtype=run.dtype)
    places = functional.embedding(table, (dims.frames,))
    return functional.dropout(x.permute(0, 2, 1) + places, dims.dropout)


def _decode_whisper(
    dims: WhisperDims,
    run: PassSettings,
    x: Tensor,
    mask: Tensor | None,
    encoded: Tensor | None,
) -> Tensor:
    """Return the tokens behind one layer of the decoder.

    It attends to the tokens before, then to the ``encoded`` sound, or to its cached keys without.
    """

    def attention(y: Tensor) -> Tensor:
        return _whisper_attention(
            dims,
            run,
            y,
            y,
            causal=True,
            mask=mask,
            cached=True,
        )

    def cross(y: Tensor) -> Tensor:
        return _whisper_attention(
            dims,
            run,
            y,
            encoded,
            causal=False,
            cached=True,
        )

    return layers.add_parts(
        run,
        x,
        p=dims.dropout,
        attention=attention,
        cross=cross,
        mlp=partial(_whisper_mlp, dims, run),
    )


def _whisper_mlp(
    dims: WhisperDims,
    run: PassSettings,
    x: Tensor,
) -> Tensor:
    return layers.feed_forward(run, x, dims.intermediate, dims.activation)


def _whisper_attention(
    dims: WhisperDims,
    run: PassSettings,
    x: Tensor,
    source: Tensor | None,
    *,
    causal: bool,
    mask: Tensor | None = None,
    cached: bool = False,
) -> Tensor:
    """Attend with queries from ``x``.

    Keys (without bias) and values come from ``source``, or from the cache without one.
    """
    tape = x.tape
    head_dim = dims.hidden // dims.heads
    width = dims.hidden // run.tp
    x_in = functional.enter_parallel(x, run.tp)
    scaled = layers.project(run, x_in, width, bias=True) * 0.125
    q = layers.split_heads(scaled, head_dim).contiguous()
    if source is None:
        shape = (run.batch, width // head_dim, dims.frames, head_dim)
        k = tape.empty(shape, run.dtype)
        v = tape.empty(shape, run.dtype)
        tape.cache_byte += 2 * k.byte
    else:
        source_in = x_in if source is x else functional.enter_parallel(source, run.tp)
        k = layers.project(run, source_in, width)
        k = layers.split_heads(k, head_dim).contiguous()
        v = layers.project(run, source_in, width, bias=True)
        v = layers.split_heads(v, head_dim).contiguous()
        if cached:
            cache = run if causal else replace(run, past=0)
            k = layers.append_cache(cache, k)
            v = layers.append_cache(cache, v)
    out = layers.attend(
        run,
        q,
        k,
        v,
        causal=causal,
        terms=layers.ScoreTerms(mask=mask),
    )
    out = layers.project(run, out, dims.hidden, bias=True)
    return functional.leave_parallel(out, run.tp)


@dataclass(frozen=True)
class BertDims:
    """Published dimensions of BERT, or of RoBERTa.

    RoBERTa counts positions from the tokens that are no padding.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    max_positions: int
    types: int = 2
    activation: str = "gelu"
    dropout: float = 0.1
    counted_positions: bool = False  # RoBERTa


def trace_bert(
    dims: BertDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over whole sequences, and the pooler or the masked-token head."""

    def embed(tape: Tape) -> Tensor:
        return _embed_bert(dims, run, tape)

    def layer(tape: Tape, x: Tensor) -> Tensor:
        with tape.scope("attention"):
            terms = layers.ScoreTerms(dropout=dims.dropout)
            attended = layers.self_attention(run, x, dims.heads, terms=terms)
            x = layers.layer_norm(run, functional.dropout(attended, dims.dropout) + x)
        with tape.scope("mlp"):
            out = layers.feed_forward(run, x, dims.intermediate, dims.activation)
            return layers.layer_norm(run, functional.dropout(out, dims.dropout) + x)

    def head(tape: Tape, x: Tensor) -> Tensor:
        if run.head is OutputHead.NONE:
            with tape.scope("pooler"):
                pooled = layers.project(run, x.select(1), dims.hidden, bias=True)
                return functional.activation("tanh", pooled)
        with tape.scope("transform"):
            x = layers.project(run, x, dims.hidden, bias=True)
            x = layers.layer_norm(run, functional.activation(dims.activation, x))
        with tape.scope("logits"):
            return layers.masked_token_logits(run, x, dims.vocab)

    program.stack(embed, layer, head, dims.layers)


def _embed_bert(
    dims: BertDims,
    run: PassSettings,
    tape: Tape,
) -> Tensor:
    """Add token, type and position rows, and norm them."""
    counted = dims.counted_positions
    if counted:
        _count_positions(run, tape)
    picked = tape.empty((run.batch if counted else 1, run.length), Dtype.INT64)
    gather = Elementwise("gather", picked.numel, dtype=Dtype.INT64, read=2 * picked.byte)
    tape.emit(gather, (), (picked,))
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    x = x + layers.embed(
        run,
        tape,
        dims.types,
        dims.hidden,
        same=not counted,
    )
    sequences = run.batch if counted else 1
    x = x + layers.embed(
        run,
        tape,
        dims.max_positions,
        dims.hidden,
        batch=sequences,
    )
    return functional.dropout(layers.layer_norm(run, x), dims.dropout)


def _count_positions(run: PassSettings, tape: Tape) -> None:
    """Count the tokens that are no padding, as RoBERTa does."""
    tokens = tape.empty((run.batch, run.length), Dtype.INT64)
    is_token = pointwise("compare", tokens, out_dtype=Dtype.BOOL)
    mask = pointwise("cast", is_token, out_dtype=Dtype.INT32)
    count = pointwise("cumsum", mask, out_dtype=Dtype.INT64)
    place = pointwise("cast", count, out_dtype=Dtype.INT32)
    place = pointwise("mul", pointwise("shift", place), mask)
    pointwise("shift", pointwise("cast", place, out_dtype=Dtype.INT64))


@dataclass(frozen=True)
class ModernBertDims:
    """Published dimensions of ModernBERT: rotary positions, and gated layers, most with windows."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    max_positions: int
    full_layers: int  # that see the whole sequence, the first among them
    window: int = 128  # tokens that the others see, half of them on either side
    activation: str = "gelu"
    bias: bool = False  # of attention's products
    mlp_bias: bool = False


def trace_modernbert(
    dims: ModernBertDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over whole sequences; only the first layer has no norm before its
    attention.
    """

    def norm(x: Tensor) -> Tensor:
        return layers.layer_norm(run, x, bias=False)

    def embed(tape: Tape) -> list[Tensor]:
        """Return token rows, a rotary table of either kind of layer, and the mask of windows."""
        fill(tape, (run.length,), Dtype.INT64)
        x = norm(layers.embed_tokens(run, tape, dims.vocab, dims.hidden))
        mask = _mask_windows(run, tape)
        head_dim = dims.hidden // dims.heads
        full_tables = layers.rotary_tables(tape, run, head_dim)
        window_tables = layers.rotary_tables(tape, run, head_dim)
        return [x, *full_tables, *window_tables, mask]

    def mlp(x: Tensor) -> Tensor:
        return layers.gated_feed_forward(
            run,
            x,
            dims.intermediate,
            dims.activation,
            merged=True,
            bias=dims.mlp_bias,
        )

    def layer(
        tape: Tape,
        x: Tensor,
        *tables: Tensor,
        first: bool = False,
    ) -> Tensor:
        def attention(y: Tensor) -> Tensor:
            return _modernbert_attention(dims, run, y, *tables)

        x = layers.add_parts(run, x, _keep_input if first else norm, attention=attention)
        return layers.add_parts(run, x, norm, mlp=mlp)

    def head(tape: Tape, x: Tensor) -> Tensor:
        x = norm(x)
        if run.head is OutputHead.NONE:
            return x
        x = functional.activation(dims.activation, layers.project(run, x, dims.hidden))
        return layers.masked_token_logits(run, norm(x), dims.vocab)

    x, *tables = program.section("embedding", embed)
    full_tables = tables[:2]
    window_tables = tables[2:]
    (x,) = program.section("first layer", partial(layer, first=True), x, *full_tables)
    stages = program.stages
    further_full = -(-dims.full_layers // stages) - 1  # of this stage
    if further_full:
        (x,) = program.section(
            "layers",
            layer,
            x,
            *full_tables,
            repeat=further_full * stages,
        )
    windowed = dims.layers - dims.full_layers
    if windowed:
        (x,) = program.section(
            "window layers",
            layer,
            x,
            *window_tables,
            repeat=windowed,
        )
    program.section("head", head, x)


def _keep_input(x: Tensor) -> Tensor:
    return x


def _mask_windows(run: PassSettings, tape: Tape) -> Tensor:
    """Return the mask of tokens that lie inside the window of each token."""
    length = run.length
    fill(tape, (run.batch,), Dtype.INT64)
    fill(tape, (1,), Dtype.INT64)
    query = pointwise("shift", fill(tape, (length, 1), Dtype.INT64))
    key = pointwise("shift", fill(tape, (length,), Dtype.INT64))
    distance = pointwise("abs", pointwise("sub", query, key))
    visible = pointwise("compare", distance, out_dtype=Dtype.BOOL)
    visible = pointwise("compare", fill(tape, (), Dtype.BOOL), visible, out_dtype=Dtype.BOOL)
    is_token = pointwise("compare", key, out_dtype=Dtype.BOOL)
    visible = pointwise("compare", visible, is_token, out_dtype=Dtype.BOOL)
    visible = visible.view(1, 1, length, length).expand(run.batch, 1, length, length)
    return visible if run.flash else layers.mask_to_numbers(visible, run.dtype)


def _modernbert_attention(
    dims: ModernBertDims,
    run: PassSettings,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend with one product for queries, keys and values, which are rotated in fp32."""
    head_dim = dims.hidden // dims.heads
    width = dims.hidden // run.tp
    x = functional.enter_parallel(x, run.tp)
    parts = layers.project(run, x, 3 * width, dims.bias).split(width, width, width)
    q, k, v = [layers.split_heads(part, head_dim) for part in parts]
    wide_q = layers.rotate(q.to(Dtype.FP32), cos, sin, again=q)
    wide_k = layers.rotate(k.to(Dtype.FP32), cos, sin, again=k)
    q = wide_q.to(v.dtype)
    k = wide_k.to(v.dtype)
    terms = layers.ScoreTerms(mask=mask, wide_softmax=True)
    out = layers.attend(
        run,
        q,
        k,
        v,
        causal=False,
        terms=terms,
    )
    return functional.leave_parallel(layers.project(run, out, dims.hidden, dims.bias), run.tp)


@dataclass(frozen=True)
class VitDims:
    """Published dimensions of a vision transformer."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    image: int = 224
    channels: int = 3
    activation: str = "gelu"
    pooler: bool = True
    classes: int = 0
    class_token: bool = True  # without one, positions are looked up (SigLIP)
    scaled: bool = False  # what a layer adds is multiplied by learned factors first (DINOv2)


@dataclass(frozen=True)
class PatchStyle:
    """How a picture becomes tokens.

    ViT has a bias and adds positions as they are; CLIP has none and looks its positions up. SigLIP
    has no class token.
    """

    channels: int
    hidden: int
    patch: int
    bias: bool
    class_token: bool = True
    looked_up: bool = False  # positions are looked up


def trace_vit(
    dims: VitDims,
    run: PassSettings,
    program: Program,
) -> None:
    """Trace one pass over ``run.batch`` pictures."""
    looked_up = not dims.class_token
    patch_style = PatchStyle(
        channels=dims.channels,
        hidden=dims.hidden,
        patch=dims.patch,
        bias=True,
        class_token=dims.class_token,
        looked_up=looked_up,
    )
    layer_style = layers.PrenormStyle(
        heads=dims.heads,
        width=dims.intermediate,
        activation=dims.activation,
        wide_softmax=not dims.scaled,
        scaled=dims.scaled,
        input_first=looked_up,
    )

    def embed(tape: Tape) -> Tensor:
        return embed_patches(run, tape, patch_style)

    def layer(tape: Tape, x: Tensor) -> Tensor:
        return layers.prenorm_layer(run, layer_style, x)

    def head(tape: Tape, x: Tensor) -> Tensor:
        """Apply the final norm, then the pooler over the class token or a classifier."""
        x = layers.layer_norm(run, x)
        if dims.classes:
            return layers.classify(run, x.select(1), dims.classes)
        if not dims.pooler:
            return x
        pooled = layers.project(run, x.select(1), dims.hidden, bias=True)
        return functional.activation("tanh", pooled)

    program.stack(embed, layer, head, dims.layers)


def embed_patches(
    run: PassSettings,
    tape: Tape,
    style: PatchStyle,
) -> Tensor:
    """Cut the picture into patches by a convolution and add positions."""
    hidden = style.hidden
    x = layers.cut_patches(
        run,
        tape,
        style.channels,
        hidden,
        style.patch,
        bias=style.bias,
    )
    x = x.view(run.batch, hidden, -1).transpose(1, 2)
    if style.class_token:
        token = tape.parameter(1, 1, hidden, dtype=run.dtype).expand(run.batch, 1, hidden)
        x = cat([token, x], 1)
    tokens = x.shape[1]
    if style.looked_up:
        table = tape.parameter(tokens, hidden, dtype=run.dtype)
        return x + functional.embedding(table, (1, tokens))
    return x + tape.parameter(1, tokens, hidden, dtype=run.dtype)
