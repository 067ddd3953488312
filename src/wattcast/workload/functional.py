"""Operations on symbolic tensors: each emits what eager PyTorch launches, and knows its gradient.

The gradient rules are those of PyTorch's derivative formulas, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from wattcast.dtypes import Dtype
from wattcast.workload.graph import Elementwise, Layout
from wattcast.workload.pointwise import blank, elementwise, pointwise
from wattcast.workload.strides import Shape, layout_of
from wattcast.workload.symbolic import Tape, Tensor


def add_into(total: Tensor, more: Tensor) -> Tensor:
    """``total += more``: how autograd gathers the gradients of a tensor that was used twice."""
    given = [(total.shape, total.strides), (more.shape, more.strides)]
    layout = layout_of(total.shape, total.strides, given)
    total.tape.emit(elementwise("add", (total, more), total, total.dtype, layout), (total, more), (total,))
    return total


def unary(function: str, x: Tensor, back: Callable[[Tensor], Tensor], save: Sequence[Tensor] = ()) -> Tensor:
    """A pointwise function of one tensor with its gradient."""
    out = pointwise(function, x)
    x.tape.record((out,), (x,), lambda g: (back(g),), save)
    return out


def add(a: Tensor, b: Tensor | float) -> Tensor:
    """a + b; a number is added as it is."""
    if not isinstance(b, Tensor):
        return unary("shift", a, lambda g: g)
    out = pointwise("add", a, b)

    def back(g: Tensor) -> list[Tensor | None]:
        return [sum_to(g, t.shape) if t.needs_grad else None for t in (a, b)]

    a.tape.record((out,), (a, b), back)
    return out


def mul(a: Tensor, b: Tensor | float) -> Tensor:
    """a * b; the gradient multiplies by the other factor and sums what was broadcast."""
    if not isinstance(b, Tensor):
        return unary("scale", a, lambda g: g * b)
    out = pointwise("mul", a, b)

    def back(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        first = sum_to(pointwise("mul", g, b), a.shape).to(a.dtype) if a.needs_grad else None
        second = sum_to(pointwise("mul", g, a), b.shape).to(b.dtype) if b.needs_grad else None
        return first, second

    a.tape.record((out,), (a, b), back, (a, b))
    return out


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b; the gradients are g / b and -g·(a / b) / b."""
    out = pointwise("div", a, b)

    def back(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        first = sum_to(pointwise("div", g, b), a.shape) if a.needs_grad else None
        ratio = pointwise("div", pointwise("div", a, b), b)
        second = sum_to(pointwise("mul", pointwise("neg", g), ratio), b.shape) if b.needs_grad else None
        return first, second

    a.tape.record((out,), (a, b), back, (a, b))
    return out


def total_last(x: Tensor) -> Tensor:
    """Sum over the last dimension, which stays with size 1."""
    out = reduce("sum", x, (*x.shape[:-1], 1))
    x.tape.record((out,), (x,), lambda g: (g.expand(*x.shape),))
    return out


def power(x: Tensor, exponent: float) -> Tensor:
    """x ** exponent; PyTorch multiplies out the powers 2 and 3."""
    function = {2.0: "square", 3.0: "cube"}.get(float(exponent), "pow")

    def back(g: Tensor) -> Tensor:
        less = {2.0: "copy", 3.0: "square"}.get(float(exponent), "pow")
        return pointwise("mul", g, pointwise("scale", pointwise(less, x)))

    return unary(function, x, back, (x,))


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    out = pointwise("rsqrt", x)

    def back(g: Tensor) -> tuple[Tensor]:
        return (pointwise("mul", pointwise("scale", g), pointwise("cube", out)),)

    x.tape.record((out,), (x,), back, (out,))
    return out


def activation(function: str, x: Tensor) -> Tensor:
    """gelu, silu, relu, tanh ...: one kernel forward, one kernel backward that reads one tensor more."""
    out = pointwise(function, x)
    kept = out if function in ("relu", "tanh", "sigmoid") else x
    x.tape.record((out,), (x,), lambda g: (pointwise(f"{function}_grad", g, kept),), (kept,))
    return out


def clone(x: Tensor) -> Tensor:
    """A row-major copy."""
    out = x.tape.empty(x.shape, x.dtype)
    layout = layout_of(x.shape, out.strides, [(x.shape, x.strides)])
    x.tape.emit(elementwise("copy", (x,), out, x.dtype, layout), (x,), (out,))
    x.tape.record((out,), (x,), lambda g: (g,))
    return out


def cast(x: Tensor, dtype: Dtype) -> Tensor:
    """Another number format; nothing where it is the same."""
    if dtype is x.dtype:
        return x
    out = pointwise("cast", x, out_dtype=dtype)
    x.tape.record((out,), (x,), lambda g: (g.to(x.dtype),))
    return out


def fill(tape: Tape, shape: Shape, dtype: Dtype) -> Tensor:
    """A constant, a range: written, nothing read."""
    out = tape.empty(shape, dtype)
    tape.emit(blank("fill", dtype, dtype).sized("", out.numel or 1), (), (out,))
    return out


def cat(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Parts laid side by side along ``axis``; the gradient is views of the whole."""
    parts = [part for part in parts if part.numel]
    first = parts[0]
    axis %= len(first.shape)
    total = sum(t.shape[axis] for t in parts)
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    out = first.tape.empty(shape, first.dtype)
    dense = all(t.is_contiguous for t in parts)
    layout = Layout.CONTIGUOUS if dense else Layout.STRIDED
    op = elementwise("cat", parts, out, first.dtype, layout, joined(parts, axis))
    first.tape.emit(op, parts, (out,))

    def back(g: Tensor) -> list[Tensor]:
        return [Tensor(g.tape, t.shape, g.strides, g.dtype, g.storage) for t in parts]

    first.tape.record((out,), parts, back)
    return out


def joined(parts: Sequence[Tensor], axis: int) -> tuple[int, int]:
    """How often the parts of a concatenation follow one another, and elements of the last of them."""
    rows = prod(parts[0].shape[:axis])
    return max(rows, 1), max(parts[-1].numel // max(rows, 1), 1)


def reduce(function: str, x: Tensor, shape: Shape, *, across: bool = False) -> Tensor:
    """Fewer elements out of many; ``n`` counts those read. ``across``: the innermost dimension stays."""
    out = x.tape.empty(shape, x.dtype)
    dense = Layout.CONTIGUOUS if x.is_contiguous else Layout.STRIDED
    layout = Layout.TRANSPOSED if across and x.strides[-1] == 1 else dense
    n, byte = x.numel, x.byte
    read = None if byte == n * x.dtype.byte else byte
    op = blank(function, x.dtype, x.dtype, layout).sized("", n, read, write=out.byte)
    x.tape.emit(op, (x,), (out,))
    return out


def mean_last(x: Tensor) -> Tensor:
    """Mean over the last dimension, which stays with size 1."""
    out = reduce("mean", x, (*x.shape[:-1], 1))
    x.tape.record((out,), (x,), lambda g: (pointwise("scale", g.expand(*x.shape)),))
    return out


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Sum what was broadcast, so that ``shape`` is left; nothing where it is the shape already."""
    if x.shape == shape:
        return x
    across = bool(shape) and shape[-1] == x.shape[-1] > 1
    return reduce("sum", x, shape, across=across)


def pad_back(g: Tensor, shape: Shape) -> Tensor:
    """Zeros of ``shape`` with ``g`` copied into a part of them: the gradient of a slice."""
    out = fill(g.tape, shape, g.dtype)
    g.tape.emit(elementwise("copy", (g,), replace(g), g.dtype, Layout.STRIDED), (g,), (out,))
    return out


def dropout(x: Tensor, p: float) -> Tensor:
    """Random zeros in training; PyTorch's fused kernel writes the mask beside the result."""
    if not (x.tape.training and p > 0.0):
        return x
    out = x.tape.empty(x.shape, x.dtype, x.strides)
    mask = x.tape.empty(x.shape, Dtype.BOOL, x.strides)
    op = Elementwise("dropout", x.numel, dtype=x.dtype, write=x.numel * (x.dtype.byte + Dtype.BOOL.byte))
    x.tape.emit(op, (x,), (out, mask))
    x.tape.record((out,), (x,), lambda g: (pointwise("dropout_grad", g, mask),), (mask,))
    return out
