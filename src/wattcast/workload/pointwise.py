"""One pointwise kernel: where its result lies, how it walks through memory, and the operator that says so.

Most operands of most kernels are row-major, and those go straight through: the result is row-major as well, and a
smaller operand either serves whole rows or holds one element a row. What is left (slices, transposes, tensors that
are expanded) follows the rules of :mod:`wattcast.workload.strides` dimension by dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from wattcast.dtypes import Dtype
from wattcast.workload.elementwise import function_of
from wattcast.workload.graph import Elementwise, Layout
from wattcast.workload.strides import Shape, contiguous, extent, walk
from wattcast.workload.symbolic import Entry, Storage, Tensor, held_byte


def pointwise(function: str, *inputs: Tensor, out_dtype: Dtype | None = None) -> Tensor:
    """One elementwise kernel over broadcast inputs; the gradient is the caller's."""
    first = inputs[0]
    tape, shape, strides = first.tape, first.shape, first.strides
    regular, same = strides == contiguous(shape), True
    for other in inputs[1:]:
        if other.shape == shape:
            regular = regular and other.strides == strides
        else:
            same = False
            regular = regular and other.strides == contiguous(other.shape)
    if not regular:
        return _irregular(function, inputs, out_dtype)
    if same:
        n = prod(shape) or 1
        dtype, read, plain = _alike(function, tuple([tensor.dtype for tensor in inputs]), out_dtype)
        op = plain.sized(tape.label, n, read and read * n)
    else:
        shape, dtype, op = _spread(function, inputs, out_dtype)
        n, strides = op.n, contiguous(shape)
    out = Tensor(tape, shape, strides, dtype, Storage(n * dtype.byte))
    tape.entries.append(Entry(op, inputs, (out,)))
    return out


@lru_cache(maxsize=1024)
def _alike(function: str, given: tuple[Dtype, ...], out_dtype: Dtype | None) -> tuple[Dtype, int | None, Elementwise]:
    """Of operands of one shape: the result's format, bytes read an element where they need saying, the operator."""
    dtype = max(given, key=lambda d: d.byte)
    result = out_dtype or widest(given)
    read = sum([d.byte for d in given])
    plain = read == function_of(function).inputs * dtype.byte
    return result, None if plain else read, blank(function, dtype, result, Layout.CONTIGUOUS)


@lru_cache(maxsize=1024)
def blank(function: str, dtype: Dtype, result: Dtype, layout: Layout = Layout.CONTIGUOUS) -> Elementwise:
    """An operator that has all but its sizes, which ``sized`` gives it."""
    return Elementwise(function, 1, dtype=dtype, out_dtype=None if result is dtype else result, layout=layout)


def _spread(function: str, inputs: Sequence[Tensor], out_dtype: Dtype | None) -> tuple[Shape, Dtype, Elementwise]:
    """Of row-major operands of several shapes: shape and format of the result, and the operator."""
    shape = broadcast(*[tensor.shape for tensor in inputs])
    dtype = result = inputs[0].dtype
    n, rows, read, mixed = prod(shape) or 1, None, 0, False
    for tensor in inputs:
        elements = prod(tensor.shape)
        read += elements * tensor.dtype.byte
        mixed = mixed or tensor.dtype is not dtype
        if elements != n and elements > 1:
            rows = n // _inner(shape, tensor.shape)
    if mixed:
        dtype, result = _main(inputs).dtype, promoted(inputs)
    result = out_dtype or result
    plain = read == function_of(function).inputs * n * dtype.byte
    layout = Layout.CONTIGUOUS if rows is None else Layout.BROADCAST
    op = blank(function, dtype, result, layout)
    return shape, result, op.sized(inputs[0].tape.label, n, None if plain else read, rows)


def _main(inputs: Sequence[Tensor]) -> Tensor:
    """The input with the most elements, of those the widest, of those the first."""
    return max(inputs, key=lambda tensor: (tensor.numel, tensor.dtype.byte))


def _inner(shape: Shape, have: Shape) -> int:
    """Elements of the innermost dimensions over which an operand is repeated, or of those over which it is not."""
    count, repeated = 1, None
    lead = len(shape) - len(have)
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            continue
        here = axis < lead or have[axis - lead] == 1
        if here is not repeated and repeated is not None:
            break
        repeated = here
        count *= shape[axis]
    return count


_Operand = tuple[Shape, Shape, Dtype]


def _irregular(function: str, inputs: tuple[Tensor, ...], out_dtype: Dtype | None) -> Tensor:
    """The kernel where some operand is not row-major."""
    tape = inputs[0].tape
    given = tuple([(t.shape, t.strides, t.dtype) for t in inputs])
    shape, strides, dtype, op = _planned(function, given, out_dtype)
    out = Tensor(tape, shape, strides, dtype, Storage(prod(shape) * dtype.byte))
    tape.entries.append(Entry(op.again(tape.label), inputs, (out,)))
    return out


@lru_cache(maxsize=4096)
def _planned(
    function: str, given: tuple[_Operand, ...], out_dtype: Dtype | None
) -> tuple[Shape, Shape, Dtype, Elementwise]:
    """Shape, strides and format of the result; the operator."""
    shape = broadcast(*[have for have, _, _ in given])
    sizes = [(prod(have), dtype.byte) for have, _, dtype in given]
    dtype = given[sizes.index(max(sizes))][2]
    result = out_dtype or _promoted(given)
    strides, layout, rows, run = walk(shape, [(have, step) for have, step, _ in given])
    return shape, strides, result, _made(function, given, prod(shape), dtype, result, layout, (rows, run))


def elementwise(
    function: str, inputs: Sequence[Tensor], out: Tensor, dtype: Dtype, layout: Layout,
    extents: tuple[int | None, int | None] | None = None,
) -> Elementwise:  # fmt: skip
    """The operator, with bytes stated only where they do not follow from the number of elements."""
    given = [(t.shape, t.strides, t.dtype) for t in inputs]
    if extents is None:
        extents = extent(layout, out.shape, out.strides, [(shape, strides) for shape, strides, _ in given])
    return _made(function, given, prod(out.shape), dtype, out.dtype, layout, extents)


def _made(
    function: str, given: Sequence[_Operand], n: int, dtype: Dtype, result: Dtype, layout: Layout,
    extents: tuple[int | None, int | None],
) -> Elementwise:  # fmt: skip
    n = n or 1
    read = sum([held_byte(*operand) for operand in given])
    plain = read == function_of(function).inputs * n * dtype.byte
    return blank(function, dtype, result, layout).sized("", n, None if plain else read, *extents)


def promoted(inputs: Sequence[Tensor]) -> Dtype:
    """PyTorch's result type: the widest floating format among tensors that have dimensions."""
    return _promoted([(t.shape, t.strides, t.dtype) for t in inputs])


def _promoted(given: Sequence[_Operand]) -> Dtype:
    return widest([dtype for shape, _, dtype in given if shape] or [dtype for _, _, dtype in given])


def widest(given: Sequence[Dtype]) -> Dtype:
    """The widest floating format, or the widest whole one where there is no other; the first of equals."""
    if given.count(given[0]) == len(given):
        return given[0]
    floating = [d for d in given if d not in _WHOLE]
    return max(floating or given, key=lambda d: d.byte)


_WHOLE = (Dtype.INT64, Dtype.INT32, Dtype.INT8, Dtype.BOOL)


def broadcast(*shapes: Shape) -> Shape:
    """The common shape of operands, as NumPy and PyTorch broadcast."""
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    rank = max([len(shape) for shape in shapes])
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(map(max, *padded))
