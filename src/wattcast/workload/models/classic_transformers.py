"""Transformers of the first years: GPT-2 and OPT, T5 and Whisper, BERT and ModernBERT, and the
vision transformer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.model_options import OutputHead
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.operator_types import Elementwise, LayerNorm
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import Tape, Tensor, cat, fill, pointwise


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


def trace_gpt(dims: GptDims, run: PassSettings, program: Program) -> None:
    """Trace one pass over ``run.length`` new tokens a sequence; GPT-2 stores weights as ``[in,
    out]``.

    An engine merges the products of queries, keys and values, and runs one kernel for each of the
    rest."""
    heads = dims.heads // run.tp
    dim = dims.hidden // dims.heads
    p = dims.dropout
    gpt2 = dims.style == "gpt2"

    def embed(tape: Tape) -> list[Tensor]:
        x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
        if gpt2:
            layers.build_positions(tape, run)
            places = layers.embed(run, tape, dims.max_positions, dims.hidden, batch=1)
        else:
            # OPT counts its positions from an attention mask of ones, and keeps two rows more than
            # positions
            ones = fill(tape, (run.batch, run.context), Dtype.FP32)
            count = pointwise("mul", pointwise("cumsum", ones), ones)
            place = pointwise("cast", pointwise("shift", count), out_dtype=Dtype.INT64)
            pointwise("shift", place.slice(1, run.past, run.context))
            places = layers.embed(run, tape, dims.max_positions + 2, dims.hidden)
        mask = layers.build_mask(tape, run)
        x = x + places
        return [functional.dropout(x, p) if gpt2 else x, *mask]

    def attention(x: Tensor, mask: Tensor | None) -> Tensor:
        x = functional.enter_parallel(x, run.tp)
        width = heads * dim
        if gpt2:  # one product, and strided views of it
            parts = list(
                layers.project(run, x, 3 * width, bias=True, in_major=True).split(
                    width, width, width
                )
            )
        else:  # OPT scales its queries first
            parts = [layers.project(run, x, width, bias=True) for _ in range(3)]
            parts[0] = parts[0] * 0.125
        q, k, v = (layers.split_heads(part, dim) for part in parts)
        k = layers.append_cache(run, k)
        v = layers.append_cache(run, v)
        out = layers.attend(
            run, q, k, v, causal=True, mask=mask, wide_softmax=not gpt2, p=p if gpt2 else 0.0
        )
        out = layers.project(run, out, dims.hidden, bias=True, in_major=gpt2)
        return functional.leave_parallel(out, run.tp)

    def layer(tape: Tape, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mlp = partial(
            layers.feed_forward,
            run,
            width=dims.intermediate,
            function=dims.activation,
            in_major=gpt2,
        )
        return layers.add_parts(run, x, p=p, attention=lambda x: attention(x, mask), mlp=mlp)

    def engine_layer(tape: Tape, x: Tensor) -> Tensor:
        with tape.scope("attention"):
            fused = layers.project(
                run, layers.add_norm(run, x, LayerNorm), 3 * heads * dim, bias=True
            )
            q, k, v = layers.split_projection(fused, (heads, heads, heads), dim)
            out = layers.paged_attention(run, q, k, v)
            x = functional.leave_parallel(layers.project(run, out, dims.hidden, bias=True), run.tp)
        with tape.scope("mlp"):
            function = "relu" if dims.activation == "relu" else "gelu_tanh"
            return layers.feed_forward(
                run, layers.add_norm(run, x, LayerNorm), dims.intermediate, function
            )

    def head(tape: Tape, x: Tensor) -> Tensor:
        return layers.language_head(run, layers.layer_norm(run, x), dims.vocab, tied=dims.tied)

    program.stack(embed, engine_layer if run.engine else layer, head, dims.layers)


@dataclass(frozen=True)
class T5Dims:
    """Published dimensions of T5: an encoder and a decoder whose scores get a learned bias of the
    distance.
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


def trace_t5(dims: T5Dims, run: PassSettings, program: Program) -> None:
    """Trace the encoder over ``run.source`` tokens (not in decode) and the decoder over its new
    ones.
    """
    source: list[Tensor] = []

    def norm(x: Tensor) -> Tensor:
        return layers.rms_norm(run, x, scales_input=True)

    def mlp(x: Tensor) -> Tensor:
        feed_forward = layers.gated_feed_forward if dims.gated else layers.feed_forward
        return feed_forward(run, x, dims.intermediate, dims.activation, bias=False)

    def read_layer(tape: Tape, x: Tensor, bias: Tensor) -> Tensor:
        attention = partial(_t5_attention, dims, read, bias=bias)
        return layers.add_parts(
            run, x, norm, p=dims.dropout, attention=lambda x: attention(x, x), mlp=mlp
        )

    def layer(tape: Tape, x: Tensor, bias: Tensor, none: Tensor, *given: Tensor) -> Tensor:
        mask = given[0] if len(rest) > 1 else None
        heard = given[-1] if source else None
        own = partial(_t5_attention, dims, run, bias=bias, mask=mask, causal=True)
        cross = partial(_t5_attention, dims, run, source=heard, bias=none)
        return layers.add_parts(
            run, x, norm, p=dims.dropout, attention=lambda x: own(x, x), cross=cross, mlp=mlp
        )

    def head(tape: Tape, x: Tensor) -> Tensor:
        x = functional.dropout(norm(x), dims.dropout)
        return layers.language_head(run, x * 0.0442 if dims.tied else x, dims.vocab, tied=dims.tied)

    if not run.past or not dims.decoder_layers:
        read = replace(run, length=run.source or run.length, past=0, cached=False)
        x, bias = program.section(
            "encoder.embedding", lambda tape: _embed_t5(dims, read, tape, decoder=False)
        )
        (x,) = program.section("encoder.layers", read_layer, x, bias, repeat=dims.layers)
        source = program.section(
            "encoder.norm", lambda _, x: functional.dropout(norm(x), dims.dropout), x
        )
    if dims.decoder_layers:
        x, bias, *rest = program.section(
            "decoder.embedding", lambda tape: _embed_t5(dims, run, tape, decoder=True)
        )
        (x,) = program.section(
            "decoder.layers", layer, x, bias, *rest, *source, repeat=dims.decoder_layers
        )
        program.section("head", head, x)


def _embed_t5(dims: T5Dims, run: PassSettings, tape: Tape, *, decoder: bool) -> list[Tensor]:
    """Look up the tokens; the bias of each distance and, for a decoder, a mask and no bias over the
    source.
    """
    known = decoder and not run.past  # the encoder looked up the same table
    table = tape.parameter(-(-dims.vocab // run.tp), dims.hidden, dtype=run.dtype, tied=known)
    x = functional.leave_parallel(functional.embedding(table, (run.batch, run.length)), run.tp)
    x = functional.dropout(x, dims.dropout)
    mask = layers.build_mask(tape, run) if decoder else []
    heads = dims.heads // run.tp
    shape = (run.length, run.context)
    query = pointwise("shift", fill(tape, shape[:1], Dtype.INT64)).unsqueeze(1)
    far = pointwise("sub", fill(tape, shape[1:], Dtype.INT64), query)
    side = far
    if decoder:
        far = pointwise("neg", pointwise("maximum", far, fill(tape, shape, Dtype.INT64)))
    else:  # either side has half of the buckets
        side = pointwise(
            "cast", pointwise("compare", far, out_dtype=Dtype.BOOL), out_dtype=Dtype.INT64
        )
        side = pointwise("shift", pointwise("scale", side))
        far = pointwise("abs", far)
    near = pointwise("compare", far, out_dtype=Dtype.BOOL)
    place = pointwise("cast", far, out_dtype=Dtype.FP32)
    for name in ("scale", "log", "scale", "scale"):
        place = pointwise(name, place)
    place = pointwise("shift", pointwise("cast", place, out_dtype=Dtype.INT64))
    place = pointwise(
        "where", far, pointwise("maximum", place, fill(tape, shape, Dtype.INT64)), near
    )
    pointwise("shift", place) if decoder else pointwise("add", place, side)
    values = functional.embedding(tape.parameter(dims.buckets, heads, dtype=run.dtype), shape)
    bias = values.permute(2, 0, 1).unsqueeze(0)
    return (
        [x, bias, fill(tape, (1, heads, run.length, run.source), run.dtype), *mask]
        if decoder
        else [x, bias]
    )


def _t5_attention(
    dims: T5Dims, run: PassSettings, x: Tensor, source: Tensor | None, bias: Tensor, mask: Tensor | None = None,
    *, causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attend with a bias; keys and values come from ``source``, or from the cache where it is None."""
    width = dims.heads * dims.head_dim // run.tp
    tape = x.tape
    x = functional.enter_parallel(x, run.tp)
    q = layers.split_heads(layers.project(run, x, width), dims.head_dim)
    if source is None:
        shape = run.batch, width // dims.head_dim, run.source, dims.head_dim
        k, v = (tape.empty(shape, run.dtype) for _ in range(2))
        tape.cache_byte += 2 * k.byte
    else:
        k, v = (
            layers.split_heads(layers.project(run, source, width), dims.head_dim) for _ in range(2)
        )
        here = run if causal else replace(run, past=0, cached=run.cached and source is not x)
        k = layers.append_cache(here, k)
        v = layers.append_cache(here, v)
    if run.flash and causal and run.length > 1:  # what the mask hides is written into the bias
        places = (fill(tape, (size,), Dtype.INT64) for size in (run.length, run.context))
        query, key = (place.unsqueeze(axis) for place, axis in zip(places, (1, 0), strict=True))
        keep = pointwise("compare", query, key, out_dtype=Dtype.BOOL)
        bias = pointwise("where", bias, keep, fill(tape, (), run.dtype))
    bias = bias.contiguous() if run.flash else bias
    out = layers.attend(run, q, k, v, causal=False, mask=mask, bias=bias, p=dims.dropout)
    return functional.leave_parallel(layers.project(run, out, dims.hidden), run.tp)


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


def trace_whisper(dims: WhisperDims, run: PassSettings, program: Program) -> None:
    """Trace the encoder once (not in decode, where its keys and values are cached) and the
    decoder's new tokens.
    """
    sound: list[Tensor] = []

    def hear(tape: Tape) -> Tensor:
        """Convolve twice over time, halving it the second time; add positions."""
        x = tape.empty((run.batch, dims.mel_bins, 2 * dims.frames), run.dtype)
        for stride in (1, 2):
            x = functional.activation(
                "gelu", functional.convolve(x, dims.hidden, 3, stride=stride, bias=True)
            )
        fill(tape, (dims.frames,), Dtype.INT64)
        places = functional.embedding(
            tape.parameter(dims.frames, dims.hidden, dtype=run.dtype), (dims.frames,)
        )
        return functional.dropout(x.permute(0, 2, 1) + places, dims.dropout)

    def embed(tape: Tape) -> list[Tensor]:
        x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
        layers.build_positions(tape, run)
        tape.empty((1, run.length), Dtype.INT64).expand(run.batch, run.length).clone()
        x = x + layers.embed(run, tape, dims.max_positions, dims.hidden)
        return [functional.dropout(x, dims.dropout), *layers.build_mask(tape, run)]

    def mlp(x: Tensor) -> Tensor:
        return layers.feed_forward(run, x, dims.intermediate, dims.activation)

    def encoder_layer(tape: Tape, x: Tensor) -> Tensor:
        attention = partial(_whisper_attention, dims, run, causal=False)
        return layers.add_parts(
            run, x, p=dims.dropout, attention=lambda x: attention(x, x), mlp=mlp
        )

    def decoder_layer(tape: Tape, x: Tensor, *given: Tensor) -> Tensor:
        shown = given[0] if mask else None
        heard = given[-1] if sound else None
        own = partial(_whisper_attention, dims, run, causal=True, mask=shown, cached=True)
        cross = partial(_whisper_attention, dims, run, source=heard, causal=False, cached=True)
        return layers.add_parts(
            run, x, p=dims.dropout, attention=lambda x: own(x, x), cross=cross, mlp=mlp
        )

    if not run.past:
        sound = program.section("encoder.embedding", hear)
        sound = program.section("encoder.layers", encoder_layer, *sound, repeat=dims.encoder_layers)
        sound = program.section("encoder.norm", lambda tape, x: layers.layer_norm(run, x), *sound)
    x, *mask = program.section("decoder.embedding", embed)
    (x,) = program.section(
        "decoder.layers", decoder_layer, x, *mask, *sound, repeat=dims.decoder_layers
    )
    program.section(
        "head",
        lambda _, x: layers.language_head(run, layers.layer_norm(run, x), dims.vocab, tied=True),
        x,
    )


def _whisper_attention(
    dims: WhisperDims, run: PassSettings, x: Tensor, source: Tensor | None, *, causal: bool,
    mask: Tensor | None = None, cached: bool = False,
) -> Tensor:  # fmt: skip
    """Attend with queries from ``x``; keys (without bias) and values come from ``source``, or the
    cache if None.
    """
    width = dims.hidden // run.tp
    dim = dims.hidden // dims.heads
    x = functional.enter_parallel(x, run.tp)
    q = layers.split_heads(layers.project(run, x, width, bias=True) * 0.125, dim).contiguous()
    if source is None:
        k, v = (
            x.tape.empty((run.batch, width // dim, dims.frames, dim), run.dtype) for _ in range(2)
        )
        x.tape.cache_byte += 2 * k.byte
    else:
        source = functional.enter_parallel(source, run.tp) if source is not x else x
        k, v = (
            layers.split_heads(layers.project(run, source, width, bias=bias), dim).contiguous()
            for bias in (False, True)
        )
        if cached:
            here = run if causal else replace(run, past=0)
            k = layers.append_cache(here, k)
            v = layers.append_cache(here, v)
    out = layers.attend(run, q, k, v, causal=causal, mask=mask)
    return functional.leave_parallel(layers.project(run, out, dims.hidden, bias=True), run.tp)


@dataclass(frozen=True)
class BertDims:
    """Published dimensions of BERT, or of RoBERTa, which counts positions from the tokens that are
    no padding.
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


def trace_bert(dims: BertDims, run: PassSettings, program: Program) -> None:
    """Trace one pass over whole sequences, and the pooler or the masked-token head."""
    counted = dims.counted_positions

    def embed(tape: Tape) -> Tensor:
        """Add token, type and position rows, and norm them."""
        if counted:
            tokens = tape.empty((run.batch, run.length), Dtype.INT64)
            mask = pointwise(
                "cast", pointwise("compare", tokens, out_dtype=Dtype.BOOL), out_dtype=Dtype.INT32
            )
            place = pointwise(
                "cast", pointwise("cumsum", mask, out_dtype=Dtype.INT64), out_dtype=Dtype.INT32
            )
            place = pointwise("mul", pointwise("shift", place), mask)
            pointwise("shift", pointwise("cast", place, out_dtype=Dtype.INT64))
        picked = tape.empty((run.batch if counted else 1, run.length), Dtype.INT64)
        tape.emit(
            Elementwise("gather", picked.numel, dtype=Dtype.INT64, read=2 * picked.byte),
            (),
            (picked,),
        )
        x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
        x = x + layers.embed(run, tape, dims.types, dims.hidden, same=not counted)
        x = x + layers.embed(
            run, tape, dims.max_positions, dims.hidden, batch=None if counted else 1
        )
        return functional.dropout(layers.layer_norm(run, x), dims.dropout)

    def layer(tape: Tape, x: Tensor) -> Tensor:
        with tape.scope("attention"):
            attended = layers.self_attention(run, x, dims.heads, p=dims.dropout)
            x = layers.layer_norm(run, functional.dropout(attended, dims.dropout) + x)
        with tape.scope("mlp"):
            out = layers.feed_forward(run, x, dims.intermediate, dims.activation)
            return layers.layer_norm(run, functional.dropout(out, dims.dropout) + x)

    def head(tape: Tape, x: Tensor) -> Tensor:
        if run.head is OutputHead.NONE:
            with tape.scope("pooler"):
                return functional.activation(
                    "tanh", layers.project(run, x.select(1), dims.hidden, bias=True)
                )
        with tape.scope("transform"):
            x = functional.activation(
                dims.activation, layers.project(run, x, dims.hidden, bias=True)
            )
            x = layers.layer_norm(run, x)
        with tape.scope("logits"):
            return layers.masked_token_logits(run, x, dims.vocab)

    program.stack(embed, layer, head, dims.layers)


@dataclass(frozen=True)
class ModernBertDims:
    """Published dimensions of ModernBERT: rotary positions, gated layers, and windows in most of
    them.
    """

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


def trace_modernbert(dims: ModernBertDims, run: PassSettings, program: Program) -> None:
    """Trace one pass over whole sequences; only the first layer has no norm before its attention."""
    dim = dims.hidden // dims.heads
    width = dims.hidden // run.tp
    stages = program.stages

    def norm(x: Tensor) -> Tensor:
        return layers.layer_norm(run, x, bias=False)

    def embed(tape: Tape) -> list[Tensor]:
        """Look up and norm the tokens; compute a rotary table of either kind of layer, and the mask
        of windows.
        """
        fill(tape, (run.length,), Dtype.INT64)
        x = norm(layers.embed_tokens(run, tape, dims.vocab, dims.hidden))
        for size in (run.batch, 1):
            fill(tape, (size,), Dtype.INT64)
        shapes = (run.length, 1), (run.length,)
        query, key = (pointwise("shift", fill(tape, shape, Dtype.INT64)) for shape in shapes)
        keep = pointwise(
            "compare", pointwise("abs", pointwise("sub", query, key)), out_dtype=Dtype.BOOL
        )
        keep = pointwise("compare", fill(tape, (), Dtype.BOOL), keep, out_dtype=Dtype.BOOL)
        keep = pointwise(
            "compare", keep, pointwise("compare", key, out_dtype=Dtype.BOOL), out_dtype=Dtype.BOOL
        )
        keep = keep.view(1, 1, run.length, run.length).expand(run.batch, 1, run.length, run.length)
        mask = keep if run.flash else layers.mask_to_numbers(keep, run.dtype)
        full, near = (layers.rotary_tables(tape, run, dim) for _ in range(2))
        return [x, *full, *near, mask]

    def attention(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        x = functional.enter_parallel(x, run.tp)
        parts = layers.project(run, x, 3 * width, dims.bias).split(width, width, width)
        q, k, v = (layers.split_heads(part, dim) for part in parts)
        q, k = (layers.rotate(part.to(Dtype.FP32), cos, sin, again=part) for part in (q, k))
        q = q.to(v.dtype)
        k = k.to(v.dtype)
        out = layers.attend(run, q, k, v, causal=False, mask=mask, wide_softmax=True)
        return functional.leave_parallel(layers.project(run, out, dims.hidden, dims.bias), run.tp)

    def mlp(x: Tensor) -> Tensor:
        sizes = dims.intermediate, dims.activation
        return layers.gated_feed_forward(run, x, *sizes, merged=True, bias=dims.mlp_bias)

    def layer(tape: Tape, x: Tensor, *tables: Tensor, first: bool = False) -> Tensor:
        x = layers.add_parts(
            run, x, (lambda y: y) if first else norm, attention=lambda y: attention(y, *tables)
        )
        return layers.add_parts(run, x, norm, mlp=mlp)

    def head(tape: Tape, x: Tensor) -> Tensor:
        x = norm(x)
        if run.head is OutputHead.NONE:
            return x
        x = functional.activation(dims.activation, layers.project(run, x, dims.hidden))
        return layers.masked_token_logits(run, norm(x), dims.vocab)

    x, *tables = program.section("embedding", embed)
    (x,) = program.section("first layer", partial(layer, first=True), x, *tables[:2])
    if more := -(-dims.full_layers // stages) - 1:  # of this stage
        (x,) = program.section("layers", layer, x, *tables[:2], repeat=more * stages)
    if near := dims.layers - dims.full_layers:
        (x,) = program.section("window layers", layer, x, *tables[2:], repeat=near)
    program.section("head", head, x)


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


def trace_vit(dims: VitDims, run: PassSettings, program: Program) -> None:
    """Trace one pass over ``run.batch`` pictures."""
    looked_up = not dims.class_token

    def embed(tape: Tape) -> Tensor:
        sizes = dims.channels, dims.hidden, dims.patch
        return embed_patches(
            run, tape, *sizes, bias=True, class_token=dims.class_token, looked_up=looked_up
        )

    def layer(tape: Tape, x: Tensor) -> Tensor:
        sizes = (dims.heads, dims.intermediate, dims.activation)
        scaled = dims.scaled
        return layers.prenorm_layer(
            run, x, *sizes, wide_softmax=not scaled, scaled=scaled, input_first=looked_up
        )

    def head(tape: Tape, x: Tensor) -> Tensor:
        """Apply the final norm, then the pooler over the class token or a classifier."""
        x = layers.layer_norm(run, x)
        if dims.classes:
            return layers.classify(run, x.select(1), dims.classes)
        if not dims.pooler:
            return x
        return functional.activation(
            "tanh", layers.project(run, x.select(1), dims.hidden, bias=True)
        )

    program.stack(embed, layer, head, dims.layers)


def embed_patches(
    run: PassSettings, tape: Tape, channels: int, hidden: int, patch: int, *, bias: bool, class_token: bool = True,
    looked_up: bool = False,
) -> Tensor:  # fmt: skip
    """Cut the picture into patches by a convolution, put a class token before them, and add
    positions.

    ViT has a bias and adds positions as they are; CLIP has none and looks its positions up.
    SigLIP has no class token.
    """
    x = layers.cut_patches(run, tape, channels, hidden, patch, bias=bias)
    x = x.view(run.batch, hidden, -1).transpose(1, 2)
    if class_token:
        x = cat([tape.parameter(1, 1, hidden, dtype=run.dtype).expand(run.batch, 1, hidden), x], 1)
    tokens = x.shape[1]
    if not looked_up:
        return x + tape.parameter(1, tokens, hidden, dtype=run.dtype)
    return x + functional.embedding(tape.parameter(tokens, hidden, dtype=run.dtype), (1, tokens))
