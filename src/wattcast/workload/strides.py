"""How tensors lie in memory: PyTorch's rules for views, and for the layout of a kernel's output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TypeAlias

from wattcast.workload.graph import Layout

Shape: TypeAlias = tuple[int, ...]


@lru_cache(maxsize=4096)
def contiguous(shape: Shape) -> Shape:
    """Strides of a row-major tensor.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [1], 1
    for size in shape[:0:-1]:
        step *= size or 1
        strides.append(step)
    strides.reverse()
    return tuple(strides[: len(shape)])


@lru_cache(maxsize=4096)
def dense(shape: Shape, strides: Shape, exact: bool = False) -> bool:
    """Whether the elements fill their memory without holes or repeats; ``exact``: in row-major order.

    Dimensions of size 1 have no say.
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
    """Strides of a view as ``wanted``, or None where only a copy can have that shape.

    >>> view_strides((2, 8, 4), (32, 4, 1), (2, 32)), view_strides((8, 2, 4), (4, 32, 1), (8, 8))
    ((32, 1), None)
    """
    result: list[int] = []
    axis = len(wanted) - 1
    run, base = 1, strides[-1] if strides else 1
    for d in range(len(shape) - 1, -1, -1):
        run *= shape[d]
        broken = d == 0 or (shape[d - 1] != 1 and strides[d - 1] != run * base)
        if not broken:
            continue
        covered = 1
        while axis >= 0 and (covered < run or wanted[axis] == 1):
            result.append(covered * base)
            covered *= wanted[axis]
            axis -= 1
        if covered != run:
            return None
        if d > 0:
            run, base = 1, strides[d - 1]
    return tuple(reversed(result)) if axis == -1 else None


Operands = Sequence[tuple[Shape, Shape]]  # shape and strides of each


def walk(shape: Shape, inputs: Operands) -> tuple[Shape, Layout, int | None, int | None]:
    """Of a pointwise kernel: the strides of its output, its layout, and ``rows`` and ``run`` of that."""
    lie = [_padded(shape, have, step) for have, step in inputs]
    strides = _packed(shape, lie)
    others = [(operand, padded) for operand, padded in zip(inputs, lie, strict=True) if padded != strides]
    layout = _layout(shape, strides, others)
    return strides, layout, *_extent(layout, shape, strides, inputs, lie)


def output_strides(shape: Shape, inputs: Operands) -> Shape:
    """Strides a pointwise kernel gives its output: dense, dimensions ordered as in the inputs.

    The rule of PyTorch's TensorIterator: dimensions are sorted by the first input that tells two of
    them apart; ties keep row-major order.
    """
    usual = contiguous(shape)
    if all(have == shape and strides == usual for have, strides in inputs):
        return usual
    return _packed(shape, [_padded(shape, have, strides) for have, strides in inputs])


def _packed(shape: Shape, lie: Sequence[Shape]) -> Shape:
    """Strides without holes, in the order of the inputs' memory."""
    result = [0] * len(shape)
    step = 1
    for d in _innermost_first(shape, lie):
        result[d] = step
        step *= shape[d]
    return tuple(result)


def _innermost_first(shape: Shape, operands: Sequence[Shape]) -> list[int]:
    """Dimensions in the order of the inputs' memory."""
    first = operands[0]
    if 0 not in first:
        told = sorted(range(len(shape)), key=first.__getitem__)
        if all(first[a] != first[b] for a, b in pairwise(told)):  # which tells all of them apart
            return told
    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        at = i
        for j in range(i - 1, -1, -1):
            verdict = _compare(order[j], order[at], shape, operands)
            if verdict > 0:
                order[j], order[at] = order[at], order[j]
                at = j
            elif verdict < 0:
                break
    return order


def _padded(shape: Shape, have: Shape, strides: Shape) -> Shape:
    """Strides of an operand in all dimensions of the result: 0 where it is repeated."""
    if have == shape:
        return strides
    lead = len(shape) - len(have)
    wanted = shape[lead:] if lead else shape
    inner = [0 if h == 1 and w != 1 else s for h, s, w in zip(have, strides, wanted, strict=True)]
    return (*([0] * lead), *inner)


def _compare(a: int, b: int, shape: Shape, operands: Sequence[Shape]) -> int:
    """1 when dimension ``a`` (now more inner) belongs outside ``b``; -1 when it stays; 0 unknown."""
    for strides in operands:
        inner, outer = strides[a], strides[b]
        if not inner or not outer:
            continue
        if inner != outer:
            return 1 if inner > outer else -1
        if shape[a] > shape[b]:
            return 1
    return 0


def layout_of(shape: Shape, strides: Shape, inputs: Operands) -> Layout:
    """How a pointwise kernel with this output walks over its inputs."""
    if all(have == shape and step == strides for have, step in inputs):
        return Layout.CONTIGUOUS
    told = [(have, step) for have, step in inputs if have.count(1) < len(have)]  # a scalar rides along
    return _layout(shape, strides, [((have, step), _padded(shape, have, step)) for have, step in told])


def _layout(shape: Shape, strides: Shape, operands: Sequence[tuple[tuple[Shape, Shape], Shape]]) -> Layout:
    layout = Layout.CONTIGUOUS
    for (have, step), padded in operands:
        if have.count(1) == len(have):
            continue
        if 0 in padded and any(not s and size != 1 for s, size in zip(padded, shape, strict=True)):
            return Layout.BROADCAST
        if not dense(have, step):
            layout = Layout.STRIDED
        elif layout is Layout.CONTIGUOUS and _order(shape, padded) != _order(shape, strides):
            layout = Layout.TRANSPOSED
    return layout


def extent(layout: Layout, shape: Shape, strides: Shape, inputs: Operands) -> tuple[int | None, int | None]:
    """``rows`` and ``run`` of a pointwise kernel (see :class:`~wattcast.workload.graph.Elementwise`).

    Read off the input that makes the layout what it is, dimensions taken in the order of the output's memory.

    >>> extent(Layout.BROADCAST, (8, 4, 16), (64, 16, 1), [((8, 4, 16), (64, 16, 1)), ((16,), (1,))])
    (32, None)
    >>> extent(Layout.TRANSPOSED, (2, 8, 4, 16), (512, 64, 16, 1), [((2, 8, 4, 16), (512, 16, 128, 1))])
    (256, 16)
    """
    if layout is Layout.CONTIGUOUS or not shape:
        return None, None
    fitting = [(have, step) for have, step in inputs if len(have) <= len(shape) and _spreads(shape, have)]
    return _extent(layout, shape, strides, fitting, [_padded(shape, have, step) for have, step in fitting])


def _extent(
    layout: Layout, shape: Shape, strides: Shape, inputs: Operands, lie: Sequence[Shape]
) -> tuple[int | None, int | None]:
    if layout is Layout.CONTIGUOUS or not shape:
        return None, None
    order = _order(shape, strides)
    sizes = [shape[d] for d in order]
    total = prod(sizes)
    walks = [
        [padded[d] for d in order] for (have, _), padded in zip(inputs, lie, strict=True) if have.count(1) < len(have)
    ]
    if layout is Layout.BROADCAST:
        small = [walk for walk in walks if 0 in walk]
        return (total // _inner(sizes, small[-1]), None) if small else (None, None)
    runs = [_together(sizes, walk) for walk in walks]
    if not runs:
        return None, None
    run = min(runs)
    if layout is Layout.STRIDED:
        return total // run, None
    beside, covered = 1, 1
    for size in reversed(sizes):  # the dimension next to the run
        if covered >= run:
            beside = size
            break
        covered *= size
    return total // beside, run


def _spreads(shape: Shape, have: Shape) -> bool:
    lead = len(shape) - len(have)
    return have == shape or all(h in (1, w) for h, w in zip(have, shape[lead:], strict=True))


def _inner(sizes: Sequence[int], walk: Sequence[int]) -> int:
    """Elements of the innermost dimensions that are all repeated, or all not."""
    repeated, count = not walk[-1], 1
    for size, step in zip(sizes[::-1], walk[::-1], strict=True):
        if (not step) is not repeated:
            break
        count *= size
    return count


def _together(sizes: Sequence[int], walk: Sequence[int]) -> int:
    """Neighbours in the output that are neighbours in the input."""
    count = 1
    for size, step in zip(sizes[::-1], walk[::-1], strict=True):
        if step != count:
            break
        count *= size
    return count


def _order(shape: Shape, strides: Shape) -> list[int]:
    """Dimensions that have a say, outermost first."""
    return sorted([d for d, size in enumerate(shape) if size != 1], key=strides.__getitem__, reverse=True)
