"""Convolutional networks that read pictures: ResNet, ConvNeXt and MobileViT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wattcast.workload.models import shared_layers as layers
from wattcast.workload.tracing import tensor_functions as functional
from wattcast.workload.tracing.program import PassSettings, Program
from wattcast.workload.tracing.symbolic_tensor import Tape, Tensor, cat


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
