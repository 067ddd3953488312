"""Convolutional networks: ResNet, and MobileViT, which mixes in transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wattcast.workload import convolutions, layers
from wattcast.workload.convolutions import batch_norm, conv
from wattcast.workload.encoder import prenorm_layer
from wattcast.workload.functional import activation, cat
from wattcast.workload.program import Program
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


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


def trace_resnet(dims: ResnetDims, run: Run, stages: int = 1) -> Program:
    """One pass over ``run.batch`` pictures."""
    program = Program(run.training, run.tf32)
    (x,) = program.section("stem", lambda tape: stem(dims, run, tape))
    for number, (count, width) in enumerate(zip(dims.blocks, dims.widths, strict=True)):
        stride = 1 if number == 0 else 2
        (x,) = program.section(f"stage{number}.first", _block(dims, run, width, stride, True), x)
        (x,) = program.section(f"stage{number}", _block(dims, run, width, 1, False), x, repeat=count - 1)
    program.section("head", lambda tape, x: head(dims, run, x), x)
    return program


def stem(dims: ResnetDims, run: Run, tape: Tape) -> Tensor:
    """A 7 by 7 convolution and a pool, each halving the picture."""
    picture = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
    x = activation("relu", batch_norm(run, conv(run, picture, dims.stem, 7, stride=2)))
    return convolutions.max_pool(x, 3, 2, 1)


def _block(dims: ResnetDims, run: Run, width: int, stride: int, first: bool) -> Callable[[Tape, Tensor], Tensor]:
    return lambda tape, x: bottleneck(dims, run, x, width, stride, first)


def bottleneck(dims: ResnetDims, run: Run, x: Tensor, width: int, stride: int, first: bool) -> Tensor:
    """1x1 down, 3x3, 1x1 up, added to the input (projected where the shape changes)."""
    inner = width // dims.reduction
    shortcut = batch_norm(run, conv(run, x, width, 1, stride=stride)) if first else x
    y = activation("relu", batch_norm(run, conv(run, x, inner, 1)))
    y = activation("relu", batch_norm(run, conv(run, y, inner, 3, stride=stride)))
    y = batch_norm(run, conv(run, y, width, 1))
    return activation("relu", y + shortcut)


def head(dims: ResnetDims, run: Run, x: Tensor) -> Tensor:
    """Mean over the picture and the classifier."""
    pooled = convolutions.mean_pool(x)
    return layers.classify(run, pooled, dims.classes)


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


def trace_mobilevit(dims: MobileVitDims, run: Run, stages: int = 1) -> Program:
    """One pass over ``run.batch`` pictures."""
    program = Program(run.training, run.tf32)

    def whole(tape: Tape) -> Tensor:
        x = tape.empty((run.batch, dims.channels, run.image, run.image), run.dtype)
        x = _conv_norm_act(run, x, dims.stem, 3, stride=2)
        x = inverted_residual(dims, run, x, dims.widths[0], 1)
        for step in range(3):
            x = inverted_residual(dims, run, x, dims.widths[1], 2 if step == 0 else 1)
        for number, (hidden, depth) in enumerate(zip(dims.hidden, dims.depths, strict=True)):
            with tape.at(f"stage{number + 2}"):
                x = inverted_residual(dims, run, x, dims.widths[number + 2], 2)
                x = transformer_block(dims, run, x, hidden, depth)
        x = _conv_norm_act(run, x, dims.last, 1)
        return layers.classify(run, convolutions.mean_pool(x), dims.classes)

    program.section("model", whole)
    return program


def _conv_norm_act(run: Run, x: Tensor, filters: int, size: int, *, stride: int = 1, groups: int = 1) -> Tensor:
    return activation("silu", batch_norm(run, conv(run, x, filters, size, stride=stride, groups=groups)))


def inverted_residual(dims: MobileVitDims, run: Run, x: Tensor, width: int, stride: int) -> Tensor:
    """1x1 wider, 3x3 depthwise, 1x1 narrower; added to the input where the shape stays."""
    inner = _divisible(round(x.shape[1] * dims.expand))
    y = _conv_norm_act(run, x, inner, 1)
    y = _conv_norm_act(run, y, inner, 3, stride=stride, groups=inner)
    y = batch_norm(run, conv(run, y, width, 1))
    return x + y if stride == 1 and x.shape[1] == width else y


def _divisible(width: int, by: int = 8) -> int:
    """The nearest multiple of ``by``, never a tenth below (as in MobileNet)."""
    near = max(by, int(width + by / 2) // by * by)
    return near + by if near < 0.9 * width else near


def transformer_block(dims: MobileVitDims, run: Run, x: Tensor, hidden: int, depth: int) -> Tensor:
    """Pixels at the same place of every patch attend to one another; the result is folded back and mixed in."""
    width = x.shape[1]
    y = conv(run, _conv_norm_act(run, x, width, 3), hidden, 1)
    y = unfold(y, dims.patch)
    for _ in range(depth):
        y = prenorm_layer(run, y, dims.heads, int(hidden * dims.mlp_ratio), "silu")
    y = layers.layer_norm(run, y)
    y = fold(y, dims.patch, run.batch, x.shape[2], x.shape[3])
    y = _conv_norm_act(run, y, width, 1)
    return _conv_norm_act(run, cat([x, y], 1), width, 3)


def unfold(x: Tensor, patch: int) -> Tensor:
    """``[n, c, h, w]`` -> ``[n·patch², patches, c]`` by two transposing copies, as Hugging Face does it."""
    n, c, h, w = x.shape
    rows, columns = h // patch, w // patch
    y = x.reshape(n * c * rows, patch, columns, patch).transpose(1, 2)
    y = y.reshape(n, c, rows * columns, patch * patch).transpose(1, 3)
    return y.reshape(n * patch * patch, rows * columns, c)


def fold(x: Tensor, patch: int, n: int, h: int, w: int) -> Tensor:
    """The inverse of :func:`unfold`."""
    c, rows, columns = x.shape[-1], h // patch, w // patch
    y = x.contiguous().view(n, patch * patch, rows * columns, c).transpose(1, 3)
    y = y.reshape(n * c * rows, columns, patch, patch).transpose(1, 2)
    return y.reshape(n, c, h, w)
