"""Convolution, pooling and batch norm on symbolic tensors."""

from __future__ import annotations

from collections.abc import Sequence

from wattcast.workload.functional import pointwise, reduce
from wattcast.workload.graph import Conv2d, Elementwise
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
        out = pointwise("add", out, tape.empty((filters, 1, 1), x.dtype))

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_b = None if offset is None else reduce("sum", g, (filters,))
        d_x = tape.empty(x.shape, x.dtype) if x.needs_grad else None
        if d_x is not None:
            tape.emit(operator("dgrad"), (g, weight), (d_x,))
        d_w = tape.empty(weight.shape, x.dtype)
        tape.emit(operator("wgrad"), (g, x), (d_w,))
        return d_x, d_w, d_b

    tape.record((out,), (x, weight, offset), back, (x, weight))
    return out


def batch_norm(run: Run, x: Tensor) -> Tensor:
    """Running statistics when serving; the batch's own in training, where the input is read twice."""
    tape, channels = x.tape, x.shape[1]
    weight, bias = (tape.parameter(channels, dtype=run.dtype) for _ in range(2))
    out = tape.empty(x.shape, x.dtype)
    function = "batchnorm_train" if run.training else "batchnorm"
    tape.emit(Elementwise(function, x.numel, dtype=x.dtype), (x, weight, bias), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        d_x = tape.empty(x.shape, x.dtype)
        tape.emit(Elementwise("batchnorm_grad", x.numel, dtype=x.dtype, read=4 * x.byte), (g, x), (d_x,))
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
    tape.emit(Elementwise("pool", x.numel, dtype=x.dtype, write=out.byte + index), (x,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_x = tape.empty(x.shape, x.dtype)
        tape.emit(Elementwise("pool_grad", x.numel, dtype=x.dtype, read=g.byte + index), (g,), (d_x,))
        return (d_x,)

    tape.record((out,), (x,), back)
    return out


def mean_pool(x: Tensor) -> Tensor:
    """Mean over the whole picture: ``[n, c, h, w]`` -> ``[n, c]``."""
    n, c, h, w = x.shape
    out = reduce("mean", x, (n, c))
    x.tape.record((out,), (x,), lambda g: (pointwise("scale", g.view(n, c, 1, 1).expand(n, c, h, w)),))
    return out
