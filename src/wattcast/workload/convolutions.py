"""Convolution, pooling and batch norm on symbolic tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from wattcast.dtypes import Dtype
from wattcast.workload.functional import reduce
from wattcast.workload.graph import Conv2d, Elementwise, LayerNorm, Layout
from wattcast.workload.pointwise import blank, elementwise, pointwise
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tensor


def conv(
    run: Run, x: Tensor, filters: int, size: int, *, stride: int = 1, padding: int | None = None, groups: int = 1,
    bias: bool = False,
) -> Tensor:  # fmt: skip
    """A square convolution with its own weight; by default padded to keep the size at stride 1."""
    n, c, h, w = x.shape
    tape = x.tape
    padding = size // 2 if padding is None else padding
    weight = tape.parameter(filters, c // groups, size, size, dtype=run.dtype)
    offset = tape.parameter(filters, dtype=run.dtype) if bias else None

    def operator(direction: str) -> Conv2d:
        return Conv2d(
            n, c, filters, h, w, size, size, stride=stride, padding=padding, groups=groups,
            direction=direction, dtype=tape.math(x.dtype),
        )  # fmt: skip

    op = operator("forward")
    out = tape.empty((n, filters, op.p, op.q), x.dtype)
    tape.emit(op, (x, weight), (out,))
    if offset is not None:
        _add_bias(out, offset)
    _record(x, weight, offset, out, operator)
    return out


def _add_bias(out: Tensor, bias: Tensor) -> None:
    """cuDNN's bias is a kernel of its own, in place."""
    planes = prod(out.shape[:2]), None
    out.tape.emit(elementwise("add", (out, bias), out, out.dtype, Layout.BROADCAST, planes), (out, bias), (out,))


def _record(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, operator: Callable[[str], Conv2d]) -> None:
    tape = x.tape

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_x = tape.empty(x.shape, x.dtype) if x.needs_grad else None
        if d_x is not None:
            tape.emit(operator("dgrad"), (g, weight), (d_x,))
        d_w = tape.empty(weight.shape, x.dtype)
        tape.emit(operator("wgrad"), (g, x), (d_w,))
        d_b = None if bias is None else reduce("sum", g, bias.shape)
        return d_x, d_w, d_b

    tape.record((out,), (x, weight, bias), back, (x, weight))


def conv1d(run: Run, x: Tensor, filters: int, size: int, *, stride: int = 1) -> Tensor:
    """A convolution over time with bias, ``[n, c, length]``, padded to keep the length at stride 1."""
    n, c, length = x.shape
    tape, padding = x.tape, size // 2
    weight, bias = tape.parameter(filters, c, size, dtype=run.dtype), tape.parameter(filters, dtype=run.dtype)
    step = None if stride == 1 else stride

    def operator(direction: str) -> Conv2d:
        return Conv2d(
            n, c, filters, 1, length, 1, size, padding_w=padding, stride_w=step, direction=direction,
            dtype=tape.math(x.dtype),
        )  # fmt: skip

    op = operator("forward")
    out = tape.empty((n, filters, op.q), x.dtype)
    tape.emit(op, (x, weight), (out,))
    _add_bias(out, bias)
    _record(x, weight, bias, out, operator)
    return out


def batch_norm(run: Run, x: Tensor) -> Tensor:
    """Running statistics when serving; the batch's own in training, where the input is read twice."""
    tape, channels = x.tape, x.shape[1]
    weight, bias = (tape.parameter(channels, dtype=run.dtype) for _ in range(2))
    out = tape.empty(x.shape, x.dtype)
    function = "batchnorm_train" if run.training else "batchnorm"
    if run.training:  # how many batches were seen
        tape.emit(blank("shift", Dtype.INT64, Dtype.INT64).sized("", 1), (), (tape.empty((1,), Dtype.INT64),))
    n, pixels = x.numel, prod(x.shape[2:])
    tape.emit(blank(function, x.dtype, x.dtype).sized("", n, None, channels, pixels), (x, weight, bias), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        d_x = tape.empty(x.shape, x.dtype)
        op = blank("batchnorm_grad", x.dtype, x.dtype).sized("", n, 4 * x.byte, channels, pixels)
        tape.emit(op, (g, x), (d_x,))
        return d_x, tape.empty((channels,), x.dtype), tape.empty((channels,), x.dtype)

    tape.record((out,), (x, weight, bias), back, (x,))
    return out


def max_pool(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """Largest of each window (int64 places kept beside it)."""
    n, c, h, w = x.shape
    p, q = ((side + 2 * padding - size) // stride + 1 for side in (h, w))
    tape = x.tape
    out = tape.empty((n, c, p, q), x.dtype)
    index = out.numel * 8
    tape.emit(Elementwise("pool", x.numel, dtype=x.dtype, write=out.byte + index, rows=n * c), (x,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_x = tape.empty(x.shape, x.dtype)
        op = Elementwise("pool_grad", x.numel, dtype=x.dtype, read=g.byte + index, rows=n * c)
        tape.emit(op, (g,), (d_x,))
        return (d_x,)

    tape.record((out,), (x,), back)
    return out


def mean_pool(x: Tensor) -> Tensor:
    """Mean over the whole picture: ``[n, c, h, w]`` -> ``[n, c]``."""
    n, c, h, w = x.shape
    out = reduce("mean", x, (n, c))
    x.tape.record((out,), (x,), lambda g: (pointwise("scale", g.view(n, c, 1, 1).expand(n, c, h, w)),))
    return out


def group_norm(run: Run, x: Tensor, groups: int = 32) -> Tensor:
    """Each group of channels of each picture normed as one row."""
    tape, channels = x.tape, x.shape[1]
    weight, bias = (tape.parameter(channels, dtype=run.dtype) for _ in range(2))
    x = x.contiguous()
    rows = x.shape[0] * groups
    out = tape.empty(x.shape, x.dtype)
    tape.emit(LayerNorm(rows, x.numel // rows, dtype=x.dtype), (x, weight, bias), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        d_x = tape.empty(x.shape, x.dtype)
        tape.emit(LayerNorm(rows, x.numel // rows, dtype=x.dtype, backward=True), (g, x), (d_x,))
        return d_x, tape.empty((channels,), x.dtype), tape.empty((channels,), x.dtype)

    tape.record((out,), (x, weight, bias), back, (x,))
    return out


def upsample(x: Tensor) -> Tensor:
    """Twice the height and width, nearest neighbour."""
    n, c, h, w = x.shape
    tape = x.tape
    out = tape.empty((n, c, 2 * h, 2 * w), x.dtype)
    tape.emit(elementwise("copy", (x,), out, x.dtype, Layout.BROADCAST), (x,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        return (reduce("sum", g, x.shape),)

    tape.record((out,), (x,), back)
    return out
