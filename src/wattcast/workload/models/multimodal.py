"""Models that read pictures or sound: ResNet, ConvNeXt, MobileViT, CLIP (pictures and texts) and Whisper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wattcast.core.units import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.models import shared_layers as layers
from wattcast.workload.models.classic_transformers import embed_patches
from wattcast.workload.operator_types import Elementwise
from wattcast.workload.program import PassSettings, Program
from wattcast.workload.symbolic_tensor import Tape, Tensor, cat, fill, pointwise, unary


@dataclass(frozen=True)
class ClipDims:
    """Published dimensions of CLIP: a picture tower and a text tower."""

    vision_layers: int
    vision_hidden: int
    vision_heads: int
    patch: int
    text_layers: int
    text_hidden: int
    text_heads: int
    shared: int
    vocab: int
    text_length: int = 77
    image: int = 224
    channels: int = 3
    activation: str = "quick_gelu"


def trace_clip(dims: ClipDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace as many texts as pictures, each through its tower, and the similarities of all pairs."""
    program = run.new_program()
    text = replace(run, length=dims.text_length, past=0)

    def embed_picture(tape: Tape) -> Tensor:
        patches = embed_patches(run, tape, dims.channels, dims.vision_hidden, dims.patch, bias=False, looked_up=True)
        return layers.layer_norm(run, patches)

    def vision_layer(tape: Tape, x: Tensor) -> Tensor:
        width = 4 * dims.vision_hidden
        return layers.prenorm_layer(run, x, dims.vision_heads, width, dims.activation, wide_softmax=True)

    def vision_head(tape: Tape, x: Tensor) -> Tensor:
        return layers.project(run, layers.layer_norm(run, x.select(1)), dims.shared)

    def embed_text(tape: Tape) -> list[Tensor]:
        y = layers.embed(text, tape, dims.vocab, dims.text_hidden)
        y = y + layers.embed(text, tape, dims.text_length, dims.text_hidden, batch=1)
        return [y, *layers.build_mask(tape, text)]

    def text_layer(tape: Tape, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return layers.prenorm_layer(
            text, y, dims.text_heads, 4 * dims.text_hidden, dims.activation, causal=True, mask=mask,
            wide_softmax=True,
        )  # fmt: skip

    (x,) = program.section("vision.embedding", embed_picture)
    (x,) = program.section("vision.layers", vision_layer, x, repeat=-(-dims.vision_layers // stages))
    (seen,) = program.section("vision.head", vision_head, x)
    y, *mask = program.section("text.embedding", embed_text)
    (y,) = program.section("text.layers", text_layer, y, *mask, repeat=-(-dims.text_layers // stages))
    program.section("head", lambda tape, y, seen: _compare_towers(dims, text, y, seen), y, seen)
    return program


def _compare_towers(dims: ClipDims, run: PassSettings, y: Tensor, seen: Tensor) -> Tensor:
    """Scale the vectors of texts and pictures to length one and compute all dot products."""
    tape = y.tape
    y = layers.layer_norm(run, y)
    # the end-of-text token is found by comparing all token numbers
    fill(tape, (run.batch,), Dtype.INT64)
    ids = pointwise("cast", tape.empty(y.shape[:2], Dtype.INT64), out_dtype=Dtype.INT32)
    found = pointwise("cast", pointwise("compare", ids, out_dtype=Dtype.BOOL), out_dtype=Dtype.INT32)
    places = tape.empty((run.batch,), Dtype.INT64)
    tape.emit(Elementwise("max", found.numel, dtype=Dtype.INT32, write=places.byte), (found,), (places,))
    last = functional.pick_rows(y.view(-1, dims.text_hidden), run.batch)
    logits = functional.linear(_to_unit_length(layers.project(run, last, dims.shared)), _to_unit_length(seen))
    logits = logits * unary("exp", tape.parameter(1, dtype=run.dtype), lambda g: g * 1.0)
    if not run.training:
        return logits
    return functional.cross_entropy(logits) + functional.cross_entropy(logits.transpose(0, 1).contiguous())


def _to_unit_length(x: Tensor) -> Tensor:
    square = functional.sum_last(functional.power(x, 2))
    return functional.divide(x, unary("sqrt", square, lambda g: pointwise("div", g, square * 2.0)))


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

    @property
    def dim(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


def trace_whisper(dims: WhisperDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace the encoder once (not in decode, where its keys and values are cached) and the decoder's new tokens."""
    program = run.new_program()
    sound: list[Tensor] = []

    def encoder_layer(tape: Tape, x: Tensor) -> Tensor:
        with tape.scope("attention"):
            normed = layers.layer_norm(run, x)
            x = x + _attention(dims, run, normed, normed, causal=False)
        return _feed_forward(dims, run, x)

    if not run.past:
        sound = program.section("encoder.embedding", lambda tape: _embed_sound(dims, run, tape))
        repeat = -(-dims.encoder_layers // stages)
        sound = program.section("encoder.layers", encoder_layer, *sound, repeat=repeat)
        sound = program.section("encoder.norm", lambda tape, x: layers.layer_norm(run, x), *sound)
    x, *mask = program.section("decoder.embedding", lambda tape: _embed_text(dims, run, tape))

    def decoder_layer(tape: Tape, x: Tensor, *given: Tensor) -> Tensor:
        with tape.scope("attention"):
            normed = layers.layer_norm(run, x)
            shown = given[0] if mask else None
            x = x + _attention(dims, run, normed, normed, causal=True, mask=shown, cached=True)
        with tape.scope("cross"):
            heard = given[-1] if sound else None
            x = x + _attention(dims, run, layers.layer_norm(run, x), heard, causal=False, cached=True)
        return _feed_forward(dims, run, x)

    def head(tape: Tape, x: Tensor) -> Tensor:
        return layers.language_head(run, layers.layer_norm(run, x), dims.vocab, tied=True)

    repeat = -(-dims.decoder_layers // stages)
    (x,) = program.section("decoder.layers", decoder_layer, x, *mask, *sound, repeat=repeat)
    program.section("head", head, x)
    return program


def _embed_sound(dims: WhisperDims, run: PassSettings, tape: Tape) -> Tensor:
    """Convolve twice over time, halving it the second time; add positions."""
    x = tape.empty((run.batch, dims.mel_bins, 2 * dims.frames), run.dtype)
    x = functional.activation("gelu", functional.conv1d(x, dims.hidden, 3))
    x = functional.activation("gelu", functional.conv1d(x, dims.hidden, 3, stride=2)).permute(0, 2, 1)
    fill(tape, (dims.frames,), Dtype.INT64)
    places = tape.parameter(dims.frames, dims.hidden, dtype=run.dtype)
    return functional.dropout(x + functional.embedding(places, (dims.frames,)), dims.dropout)


def _embed_text(dims: WhisperDims, run: PassSettings, tape: Tape) -> list[Tensor]:
    """Add token and position rows; build the mask where one is needed."""
    x = layers.embed_tokens(run, tape, dims.vocab, dims.hidden)
    layers.build_positions(tape, run)
    tape.empty((1, run.length), Dtype.INT64).expand(run.batch, run.length).clone()
    x = x + layers.embed(run, tape, dims.max_positions, dims.hidden)
    return [functional.dropout(x, dims.dropout), *layers.build_mask(tape, run)]


def _feed_forward(dims: WhisperDims, run: PassSettings, x: Tensor) -> Tensor:
    with x.tape.scope("mlp"):
        out = layers.feed_forward(run, layers.layer_norm(run, x), dims.intermediate, dims.activation)
        return x + functional.dropout(out, dims.dropout)


def _attention(
    dims: WhisperDims, run: PassSettings, x: Tensor, source: Tensor | None, *, causal: bool,
    mask: Tensor | None = None, cached: bool = False,
) -> Tensor:  # fmt: skip
    """Attend with queries from ``x``; keys (without bias) and values come from ``source``, or the cache if None."""
    width = dims.hidden // run.tp
    x = functional.enter_parallel(x, run.tp)
    q = layers.split_heads(layers.project(run, x, width, bias=True) * 0.125, dims.dim).contiguous()
    if source is None:
        k, v = (x.tape.empty((run.batch, width // dims.dim, dims.frames, dims.dim), run.dtype) for _ in range(2))
        x.tape.cache_byte += 2 * k.byte
    else:
        source = functional.enter_parallel(source, run.tp) if source is not x else x
        k, v = (
            layers.split_heads(layers.project(run, source, width, bias=bias), dims.dim).contiguous()
            for bias in (False, True)
        )
        if cached:
            here = run if causal else replace(run, past=0)
            k, v = layers.append_cache(here, k), layers.append_cache(here, v)
    out = layers.attend(run, q, k, v, causal=causal, mask=mask)
    out = functional.leave_parallel(layers.project(run, out, dims.hidden, bias=True), run.tp)
    return functional.dropout(out, dims.dropout)


@dataclass(frozen=True)
class ResnetDims:
    """Published dimensions of a ResNet of bottleneck blocks."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...] = (256, 512, 1024, 2048)
    stem: int = 64
    channels: int = 3
    classes: int = 1000
    image: int = 224
    reduction: int = 4


def trace_resnet(dims: ResnetDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace one pass over ``run.batch`` pictures."""
    program = run.new_program()

    def stem(tape: Tape) -> Tensor:
        picture = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
        return functional.max_pool(_conv_norm(picture, dims.stem, 7, "relu", stride=2), 3, 2, 1)

    (x,) = program.section("stem", stem)
    for number, (count, width) in enumerate(zip(dims.blocks, dims.widths, strict=True)):
        first = _bottleneck(dims, width, stride=1 if number == 0 else 2, projected=True)
        (x,) = program.section(f"stage{number}.first", first, x)
        (x,) = program.section(f"stage{number}", _bottleneck(dims, width), x, repeat=count - 1)
    program.section("head", lambda tape, x: layers.classify(run, functional.mean_pool(x), dims.classes), x)
    return program


def _bottleneck(
    dims: ResnetDims, width: int, stride: int = 1, projected: bool = False
) -> Callable[[Tape, Tensor], Tensor]:
    """Return a block: 1x1 down, 3x3, 1x1 up, added to the input (projected where the shape changes)."""
    inner = width // dims.reduction

    def block(tape: Tape, x: Tensor) -> Tensor:
        shortcut = _conv_norm(x, width, 1, stride=stride) if projected else x
        y = _conv_norm(x, inner, 1, "relu")
        y = _conv_norm(y, inner, 3, "relu", stride=stride)
        return functional.activation("relu", _conv_norm(y, width, 1) + shortcut)

    return block


def _conv_norm(x: Tensor, filters: int, size: int, function: str = "", *, stride: int = 1, groups: int = 1) -> Tensor:
    """Convolve, norm over the batch, and activate where a function is given."""
    out = functional.batch_norm(functional.conv2d(x, filters, size, stride=stride, groups=groups))
    return functional.activation(function, out) if function else out


@dataclass(frozen=True)
class ConvNextDims:
    """Published dimensions of ConvNeXt: depthwise convolutions, each with a feed-forward layer of its own."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    patch: int = 4
    channels: int = 3
    classes: int = 1000
    image: int = 224


def trace_convnext(dims: ConvNextDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace one pass over ``run.batch`` pictures."""
    program = run.new_program()

    def stem(tape: Tape) -> Tensor:
        picture = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
        x = functional.conv2d(picture, dims.widths[0], dims.patch, stride=dims.patch, padding=0, bias=True)
        return _norm_channels(run, x)

    def halve(width: int) -> Callable[[Tape, Tensor], Tensor]:
        return lambda tape, x: functional.conv2d(_norm_channels(run, x), width, 2, stride=2, padding=0, bias=True)

    (x,) = program.section("stem", stem)
    for number, (depth, width) in enumerate(zip(dims.depths, dims.widths, strict=True)):
        if number:
            (x,) = program.section(f"stage{number}.first", halve(width), x)
        (x,) = program.section(f"stage{number}", lambda tape, x: _convnext_block(run, x), x, repeat=depth)

    def head(tape: Tape, x: Tensor) -> Tensor:
        return layers.classify(run, layers.layer_norm(run, functional.mean_pool(x)), dims.classes)

    program.section("head", head, x)
    return program


def _norm_channels(run: PassSettings, x: Tensor) -> Tensor:
    """Norm every pixel over its channels, which come last for it and first again after it."""
    return layers.layer_norm(run, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _convnext_block(run: PassSettings, x: Tensor) -> Tensor:
    """Convolve each channel 7x7, norm, feed forward pixel by pixel, scale by learned factors, and add."""
    width = x.shape[1]
    y = functional.conv2d(x, width, 7, groups=width, bias=True).permute(0, 2, 3, 1)
    y = layers.feed_forward(run, layers.layer_norm(run, y), 4 * width, "gelu")
    y = y * x.tape.parameter(width, dtype=run.dtype)
    return x + y.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class MobileVitDims:
    """Published dimensions of MobileViT: inverted residuals, then convolution and transformer in turn."""

    stem: int
    widths: tuple[int, ...]  # of the five stages
    hidden: tuple[int, ...]  # of the transformers in the last three
    depths: tuple[int, ...]  # transformer layers in each of them
    last: int  # width before the classifier
    heads: int = 4
    mlp_ratio: float = 2.0
    expand: float = 4.0
    patch: int = 2
    classes: int = 1000
    image: int = 256
    channels: int = 3


def trace_mobilevit(dims: MobileVitDims, run: PassSettings, stages: int = 1) -> Program:
    """Trace one pass over ``run.batch`` pictures."""
    program = run.new_program()

    def whole(tape: Tape) -> Tensor:
        x = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
        x = _conv_norm(x, dims.stem, 3, "silu", stride=2)
        x = _inverted_residual(dims, x, dims.widths[0], 1)
        for step in range(3):
            x = _inverted_residual(dims, x, dims.widths[1], 2 if step == 0 else 1)
        for number, (hidden, depth) in enumerate(zip(dims.hidden, dims.depths, strict=True)):
            with tape.scope(f"stage{number + 2}"):
                x = _inverted_residual(dims, x, dims.widths[number + 2], 2)
                x = _attend_patches(dims, run, x, hidden, depth)
        x = _conv_norm(x, dims.last, 1, "silu")
        return layers.classify(run, functional.mean_pool(x), dims.classes)

    program.section("model", whole)
    return program


def _inverted_residual(dims: MobileVitDims, x: Tensor, width: int, stride: int) -> Tensor:
    """Convolve 1x1 to wider, 3x3 depthwise, 1x1 to narrower; add to the input where the shape stays."""
    wanted = round(x.shape[1] * dims.expand)
    inner = max(8, int(wanted + 4) // 8 * 8)  # the nearest multiple of 8, never a tenth below (as in MobileNet)
    inner = inner + 8 if inner < 0.9 * wanted else inner
    y = _conv_norm(x, inner, 1, "silu")
    y = _conv_norm(y, inner, 3, "silu", stride=stride, groups=inner)
    y = _conv_norm(y, width, 1)
    return x + y if stride == 1 and x.shape[1] == width else y


def _attend_patches(dims: MobileVitDims, run: PassSettings, x: Tensor, hidden: int, depth: int) -> Tensor:
    """Let pixels at the same place of every patch attend to one another; fold the result back and mix it in.

    Unfolding, ``[n, c, h, w]`` -> ``[n·patch², patches, c]``, takes two transposing copies, as Hugging Face does it.
    """
    n, width, h, w = x.shape
    patch, rows, columns = dims.patch, h // dims.patch, w // dims.patch
    y = functional.conv2d(_conv_norm(x, width, 3, "silu"), hidden, 1)
    y = y.reshape(n * hidden * rows, patch, columns, patch).transpose(1, 2)
    y = y.reshape(n, hidden, rows * columns, patch * patch).transpose(1, 3)
    y = y.reshape(n * patch * patch, rows * columns, hidden)
    for _ in range(depth):
        y = layers.prenorm_layer(run, y, dims.heads, int(hidden * dims.mlp_ratio), "silu")
    y = layers.layer_norm(run, y)
    y = y.contiguous().view(n, patch * patch, rows * columns, hidden).transpose(1, 3)
    y = y.reshape(n * hidden * rows, columns, patch, patch).transpose(1, 2)
    y = _conv_norm(y.reshape(n, hidden, h, w), width, 1, "silu")
    return _conv_norm(cat([x, y], 1), width, 3, "silu")
