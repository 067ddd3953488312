"""Convolutional networks: ResNet."""

from __future__ import annotations

from dataclasses import dataclass

from wattcast.workload import convolutions, layers
from wattcast.workload.convolutions import batch_norm, conv
from wattcast.workload.functional import activation
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


def _block(dims: ResnetDims, run: Run, width: int, stride: int, first: bool):  # type: ignore[no-untyped-def]
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
    return layers.project(run, pooled, dims.classes, bias=True)
