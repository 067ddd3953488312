"""How tensors lie in memory: PyTorch's rules for views, for a kernel's output, and for its walk
over the inputs.

A shape and its strides (in elements) describe a tensor; a stride of 0 repeats one element along its
dimension. Dimensions of size 1 never matter for the order in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, takewhile
from math import prod
from typing import TypeAlias

from wattcast.core import Dtype
from wattcast.workload.operator_base import find_function
from wattcast.workload.operator_types import Elementwise, Layout

Shape: TypeAlias = tuple[int, ...]
Placed: TypeAlias = tuple[Shape, Shape]  # shape and strides of a tensor
Operand: TypeAlias = tuple[Shape, Shape, Dtype]  # shape, strides and number format
Extents: TypeAlias = tuple[
    int | None, int | None
]  # ``rows`` and ``run`` of an elementwise operator

_INTEGERS = (Dtype.INT64, Dtype.INT32, Dtype.INT8, Dtype.BOOL)


@lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Return the strides of a row-major tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1]
    step = 1
    for size in shape[:0:-1]:
        step *= size or 1
        strides.append(step)
    return tuple(strides[::-1][: len(shape)])


@lru_cache(maxsize=4096)
def is_dense(shape: Shape, strides: Shape, exact: bool = False) -> bool:
    """Tell whether the elements fill their memory without holes or repeats; ``exact``: in row-major
    order.
    """
    pairs = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1]
    step = 1
    for stride, size in reversed(pairs) if exact else sorted(pairs):
        if stride != step:
            return False
        step *= size
    return True


@lru_cache(maxsize=4096)
def view_strides(shape: Shape, strides: Shape, wanted: Shape) -> Shape | None:
    """Return the strides of a view as ``wanted``, or None where only a copy can have that shape.

    >>> view_strides((2, 8, 4), (32, 4, 1), (2, 32)), view_strides((8, 2, 4), (4, 32, 1), (8, 8))
    ((32, 1), None)
    """
    if prod(shape) and shape and strides == contiguous_strides(shape):
        return contiguous_strides(wanted)
    result: list[int] = []
    axis = len(wanted) - 1
    run = 1
    base = strides[-1] if strides else 1
    for d in range(len(shape) - 1, -1, -1):
        run *= shape[d]
        if d and (shape[d - 1] == 1 or strides[d - 1] == run * base):
            continue  # the next dimension outwards continues this stretch of evenly spaced elements
        covered = 1
        while axis >= 0 and (covered < run or wanted[axis] == 1):
            result.append(covered * base)
            covered *= wanted[axis]
            axis -= 1
        if covered != run:
            return None
        if d > 0:
            run = 1
            base = strides[d - 1]
    return tuple(reversed(result)) if axis == -1 else None


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Return the common shape of operands, as NumPy and PyTorch broadcast.

    >>> broadcast_shapes((8, 1, 16), (4, 1))
    (8, 4, 16)
    """
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    rank = max([len(shape) for shape in shapes])
    return tuple(map(max, *[(1,) * (rank - len(shape)) + shape for shape in shapes]))


def promote_dtypes(operands: Sequence[Operand]) -> Dtype:
    """Return PyTorch's result type: the widest floating format among operands that have dimensions.

    Where none is floating, it is the widest whole-number format; of equally wide ones the first.
    """
    given = [dtype for shape, _, dtype in operands if shape] or [dtype for _, _, dtype in operands]
    if given.count(given[0]) == len(given):
        return given[0]
    return max([d for d in given if d not in _INTEGERS] or given, key=lambda d: d.byte)


def held_byte(shape: Shape, strides: Shape, dtype: Dtype) -> int:
    """Return the bytes of a tensor, where dimensions of stride 0 count once."""
    if 0 not in strides:
        return prod(shape) * dtype.byte
    return prod(size for size, stride in zip(shape, strides, strict=True) if stride) * dtype.byte


@lru_cache(maxsize=4096)
def plan_pointwise(
    function: str, operands: tuple[Operand, ...], out_dtype: Dtype | None
) -> tuple[Shape, Shape, Dtype, Elementwise]:
    """Return shape, strides and number format of a pointwise kernel's result, and the operator that
    computes it.

    The operator is of the format of its largest operand, which decides how many elements a thread
    loads at once."""
    shape = broadcast_shapes(*[operand[0] for operand in operands])
    strides = output_strides(shape, [operand[:2] for operand in operands])
    result = out_dtype or promote_dtypes(operands)
    main = max(operands, key=lambda operand: (prod(operand[0]), operand[2].byte))
    layout = classify_layout(shape, strides, [operand[:2] for operand in operands])
    return (
        shape,
        strides,
        result,
        describe_pointwise(function, operands, (shape, strides, result), main[2], layout),
    )


def describe_pointwise(
    function: str, operands: Sequence[Operand], out: Operand, dtype: Dtype, layout: Layout,
    extents: Extents | None = None,
) -> Elementwise:  # fmt: skip
    """Return the operator of a pointwise kernel; bytes are stated only where they do not follow
    from its size.
    """
    shape, strides, result = out
    n = prod(shape) or 1
    rows, run = extents or measure_extent(
        layout, shape, strides, [operand[:2] for operand in operands]
    )
    read = sum([held_byte(*operand) for operand in operands])
    return Elementwise(
        function, n, None if result is dtype else result, layout, rows=rows, run=run, dtype=dtype,
        read=None if read == find_function(function).inputs * n * dtype.byte else read,
    )  # fmt: skip


def output_strides(shape: Shape, inputs: Sequence[Placed]) -> Shape:
    """Return the strides a pointwise kernel gives its output: dense, with dimensions ordered as in
    the inputs.

    This is the rule of PyTorch's TensorIterator: dimensions are sorted by the first input that
    tells two of them apart; ties keep row-major order."""
    if all(strides == contiguous_strides(have) for have, strides in inputs):
        return contiguous_strides(shape)
    operands = [_broadcast_strides(shape, have, strides) for have, strides in inputs]
    result = [0] * len(shape)
    step = 1
    for d in _innermost_first(shape, operands):
        result[d] = step
        step *= shape[d]
    return tuple(result)


def _innermost_first(shape: Shape, operands: Sequence[Shape]) -> list[int]:
    """Return the dimensions in the order of the inputs' memory."""
    first = operands[0]
    if 0 not in first:
        by_stride = sorted(range(len(shape)), key=first.__getitem__)
        if all(
            first[a] != first[b] for a, b in pairwise(by_stride)
        ):  # the first input tells all of them apart
            return by_stride

    def compare(a: int, b: int) -> int:
        """Return 1 when dimension ``a``, now further inside, belongs outside ``b``, -1 when not, 0
        if unknown.
        """
        for strides in operands:
            inner = strides[a]
            outer = strides[b]
            if inner and outer and inner != outer:
                return 1 if inner > outer else -1
            if inner and outer and shape[a] > shape[b]:
                return 1
        return 0

    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        at = i
        for j in range(i - 1, -1, -1):
            verdict = compare(order[j], order[at])
            if verdict > 0:
                order[j], order[at] = order[at], order[j]
                at = j
            elif verdict < 0:
                break
    return order


def _broadcast_strides(shape: Shape, have: Shape, strides: Shape) -> Shape:
    """Return the strides of an operand in all dimensions of the result: 0 where it is repeated."""
    if have == shape:
        return strides
    lead = len(shape) - len(have)
    inner = [
        0 if h == 1 and w != 1 else s for h, s, w in zip(have, strides, shape[lead:], strict=True)
    ]
    return (*([0] * lead), *inner)


def classify_layout(shape: Shape, strides: Shape, inputs: Sequence[Placed]) -> Layout:
    """Tell how a pointwise kernel with this output walks over its inputs."""
    layout = Layout.CONTIGUOUS
    if all(have == shape and step == strides for have, step in inputs):
        return layout
    for have, step in inputs:
        if have.count(1) == len(have):  # a scalar does not matter
            continue
        operand = _broadcast_strides(shape, have, step)
        if 0 in operand and any(
            not s and size != 1 for s, size in zip(operand, shape, strict=True)
        ):
            return Layout.BROADCAST
        if not is_dense(have, step):
            layout = Layout.STRIDED
        elif layout is Layout.CONTIGUOUS and _outermost_first(shape, operand) != _outermost_first(
            shape, strides
        ):
            layout = Layout.TRANSPOSED
    return layout


def measure_extent(
    layout: Layout, shape: Shape, strides: Shape, inputs: Sequence[Placed]
) -> Extents:
    """Return ``rows`` and ``run`` of a pointwise kernel (see ``Elementwise``).

    They follow from the input that makes the layout what it is, dimensions taken in the order of
    the output's memory.

    >>> measure_extent(Layout.BROADCAST, (8, 4, 16), (64, 16, 1), [((8, 4, 16), (64, 16, 1)), ((16,), (1,))])
    (32, None)
    >>> measure_extent(Layout.TRANSPOSED, (2, 8, 4, 16), (512, 64, 16, 1), [((2, 8, 4, 16), (512, 16, 128, 1))])
    (256, 16)
    """
    if layout is Layout.CONTIGUOUS or not prod(shape):
        return None, None
    order = _outermost_first(shape, strides)
    sizes = [shape[d] for d in order]
    walks = []
    for have, step in inputs:
        if have.count(1) < len(have) and broadcasts_to(have, shape):
            operand = _broadcast_strides(shape, have, step)
            walks.append([operand[d] for d in order])
    if layout is Layout.BROADCAST:
        small = [walk for walk in walks if 0 in walk]
        if not small:
            return None, None
        inner = zip(
            sizes[::-1], small[-1][::-1], strict=True
        )  # dimensions that are all repeated, or all not
        alike = takewhile(lambda pair: bool(pair[1]) is bool(small[-1][-1]), inner)
        return prod(shape) // prod(size for size, _ in alike), None
    if not walks:
        return None, None
    run = min([_inner_neighbours(sizes, walk) for walk in walks])
    if layout is Layout.STRIDED:
        return prod(shape) // run, None
    next_size = 1
    covered = 1
    for size in reversed(sizes):
        if covered >= run:
            next_size = size
            break
        covered *= size
    return prod(shape) // next_size, run


def broadcasts_to(have: Shape, shape: Shape) -> bool:
    """Tell whether a tensor of shape ``have`` can be broadcast to ``shape``."""
    lead = len(shape) - len(have)
    return lead >= 0 and all(h in (1, w) for h, w in zip(have, shape[lead:], strict=True))


def _inner_neighbours(sizes: Sequence[int], walk: Sequence[int]) -> int:
    """Count neighbours in the output that are neighbours in the input."""
    count = 1
    for size, step in zip(sizes[::-1], walk[::-1], strict=True):
        if step != count:
            break
        count *= size
    return count


def _outermost_first(shape: Shape, strides: Shape) -> list[int]:
    """Return the dimensions larger than 1, outermost in memory first."""
    return sorted(
        [d for d, size in enumerate(shape) if size != 1], key=strides.__getitem__, reverse=True
    )
