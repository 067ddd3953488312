"""How tensors lie in memory: PyTorch's rules for views, for a kernel's output, and for its walk
over the inputs.

A shape and its strides (in elements) describe a tensor; a stride of 0 repeats one element along its
dimension. Dimensions of size 1 never matter for the order in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TypeAlias

from wattcast.core import Dtype
from wattcast.workload.operator_base import find_function
from wattcast.workload.operator_types import Elementwise, Layout

Shape: TypeAlias = tuple[int, ...]
Placed: TypeAlias = tuple[Shape, Shape]  # shape and strides of a tensor
Operand: TypeAlias = tuple[Shape, Shape, Dtype]  # shape, strides and number format
# ``rows`` and ``run`` of an elementwise operator
Extents: TypeAlias = tuple[int | None, int | None]

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
def is_dense(
    shape: Shape,
    strides: Shape,
    exact: bool = False,
) -> bool:
    """Tell whether the elements fill their memory without holes or repeats.

    ``exact``: in row-major order.
    """
    pairs = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1]
    if exact:
        pairs.reverse()
    else:
        pairs.sort()
    step = 1
    for stride, size in pairs:
        if stride != step:
            return False
        step *= size
    return True


@lru_cache(maxsize=4096)
def view_strides(
    shape: Shape,
    strides: Shape,
    target: Shape,
) -> Shape | None:
    """Return the strides of a view as ``target``, or None where only a copy can have that shape.

    >>> view_strides((2, 8, 4), (32, 4, 1), (2, 32)), view_strides((8, 2, 4), (4, 32, 1), (8, 8))
    ((32, 1), None)
    """
    if prod(shape) and shape and strides == contiguous_strides(shape):
        return contiguous_strides(target)

    # Each stretch of evenly spaced elements, from the innermost outwards, has to be covered by
    # whole dimensions of the target.
    result: list[int] = []
    axis = len(target) - 1
    for length, step in _even_stretches(shape, strides):
        covered = 1
        while axis >= 0 and (covered < length or target[axis] == 1):
            result.append(covered * step)
            covered *= target[axis]
            axis -= 1
        if covered != length:
            return None
    return tuple(reversed(result)) if axis == -1 else None


def _even_stretches(shape: Shape, strides: Shape) -> list[tuple[int, int]]:
    """Return the stretches of evenly spaced elements, innermost first: length and spacing."""
    stretches = []
    length = 1
    step = strides[-1] if strides else 1
    for axis in range(len(shape) - 1, -1, -1):
        length *= shape[axis]
        if axis == 0:
            stretches.append((length, step))
            continue
        outer = axis - 1
        continues = shape[outer] == 1 or strides[outer] == length * step
        if not continues:
            stretches.append((length, step))
            length = 1
            step = strides[outer]
    return stretches


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Return the common shape of operands, as NumPy and PyTorch broadcast.

    >>> broadcast_shapes((8, 1, 16), (4, 1))
    (8, 4, 16)
    """
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    rank = max([len(shape) for shape in shapes])
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(map(max, *padded))


def promote_dtypes(operands: Sequence[Operand]) -> Dtype:
    """Return PyTorch's result type: the widest floating format among operands that have dimensions.

    Where none is floating, it is the widest whole-number format; of equally wide ones the first.
    """
    dtypes = [dtype for shape, _, dtype in operands if shape]
    if not dtypes:
        dtypes = [dtype for _, _, dtype in operands]
    if dtypes.count(dtypes[0]) == len(dtypes):
        return dtypes[0]
    floating = [dtype for dtype in dtypes if dtype not in _INTEGERS]
    return max(floating or dtypes, key=lambda dtype: dtype.byte)


def count_byte(
    shape: Shape,
    strides: Shape,
    dtype: Dtype,
) -> int:
    """Return the bytes of a tensor, where dimensions of stride 0 count once."""
    if 0 not in strides:
        return prod(shape) * dtype.byte
    distinct = prod(size for size, stride in zip(shape, strides, strict=True) if stride)
    return distinct * dtype.byte


@lru_cache(maxsize=4096)
def plan_pointwise(
    function: str,
    operands: tuple[Operand, ...],
    out_dtype: Dtype | None,
) -> tuple[Shape, Shape, Dtype, Elementwise]:
    """Return shape, strides and number format of a pointwise kernel's result, and the operator that
    computes it.

    The operator is of the format of its largest operand, which decides how many elements a thread
    loads at once."""
    walks = [operand[:2] for operand in operands]
    shape = broadcast_shapes(*[operand[0] for operand in operands])
    strides = output_strides(shape, walks)
    result = out_dtype or promote_dtypes(operands)
    main = max(operands, key=lambda operand: (prod(operand[0]), operand[2].byte))
    layout = classify_layout(shape, strides, walks)
    out = (shape, strides, result)
    op = describe_pointwise(
        function,
        operands,
        out,
        main[2],
        layout,
    )
    return shape, strides, result, op


def describe_pointwise(
    function: str,
    operands: Sequence[Operand],
    out: Operand,
    dtype: Dtype,
    layout: Layout,
    extents: Extents | None = None,
) -> Elementwise:
    """Return the operator of a pointwise kernel.

    Bytes are stated only where they do not follow from its size.
    """
    shape, strides, result = out
    n = prod(shape) or 1
    if extents is None:
        extents = measure_extent(layout, shape, strides, [operand[:2] for operand in operands])
    rows, run = extents
    read = sum([count_byte(*operand) for operand in operands])
    usual_read = find_function(function).inputs * n * dtype.byte
    return Elementwise(
        function,
        n,
        out_dtype=None if result is dtype else result,
        layout=layout,
        rows=rows,
        run=run,
        read=None if read == usual_read else read,
        dtype=dtype,
    )


def output_strides(shape: Shape, inputs: Sequence[Placed]) -> Shape:
    """Return the strides a pointwise kernel uses for its output.

    The output is dense, with dimensions ordered as in the inputs. This is the rule of PyTorch's
    TensorIterator: dimensions are sorted by the first input that tells two of them apart; ties keep
    row-major order."""
    if all(strides == contiguous_strides(sizes) for sizes, strides in inputs):
        return contiguous_strides(shape)
    operands = [_broadcast_strides(shape, sizes, strides) for sizes, strides in inputs]
    result = [0] * len(shape)
    step = 1
    for axis in _innermost_first(shape, operands):
        result[axis] = step
        step *= shape[axis]
    return tuple(result)


def _innermost_first(shape: Shape, operands: Sequence[Shape]) -> list[int]:
    """Return the dimensions in the order of the inputs' memory, by an insertion sort."""
    first = operands[0]
    if 0 not in first and len(set(first)) == len(first):  # it tells all dimensions apart
        return sorted(range(len(shape)), key=first.__getitem__)

    order = list(range(len(shape) - 1, -1, -1))
    for index in range(1, len(order)):
        place = index
        for inner in range(index - 1, -1, -1):
            verdict = _compare_dimensions(shape, operands, order[inner], order[place])
            if verdict > 0:
                order[inner], order[place] = order[place], order[inner]
                place = inner
            elif verdict < 0:
                break
    return order


def _compare_dimensions(
    shape: Shape,
    operands: Sequence[Shape],
    inner: int,
    outer: int,
) -> int:
    """Compare a dimension that is now further inside with one that is further outside.

    1: it belongs outside the other; -1: it does not; 0: no operand tells.
    """
    for strides in operands:
        inner_step = strides[inner]
        outer_step = strides[outer]
        if not (inner_step and outer_step):
            continue
        if inner_step != outer_step:
            return 1 if inner_step > outer_step else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _broadcast_strides(
    shape: Shape,
    sizes: Shape,
    strides: Shape,
) -> Shape:
    """Return the strides of an operand in all dimensions of the result: 0 where it is repeated."""
    if sizes == shape:
        return strides
    new_dims = len(shape) - len(sizes)
    inner = list(strides)
    for axis, size in enumerate(sizes):
        if size == 1 and shape[new_dims + axis] != 1:
            inner[axis] = 0
    return (*([0] * new_dims), *inner)


def classify_layout(
    shape: Shape,
    strides: Shape,
    inputs: Sequence[Placed],
) -> Layout:
    """Tell how a pointwise kernel with this output walks over its inputs."""
    layout = Layout.CONTIGUOUS
    if all(sizes == shape and steps == strides for sizes, steps in inputs):
        return layout
    for sizes, steps in inputs:
        if sizes.count(1) == len(sizes):  # a scalar does not matter
            continue
        operand = _broadcast_strides(shape, sizes, steps)
        if _repeats_elements(shape, operand):
            return Layout.BROADCAST
        if not is_dense(sizes, steps):
            layout = Layout.STRIDED
        elif layout is Layout.CONTIGUOUS and _differ_in_order(shape, operand, strides):
            layout = Layout.TRANSPOSED
    return layout


def _differ_in_order(
    shape: Shape,
    operand: Shape,
    strides: Shape,
) -> bool:
    """Tell whether dimensions follow one another otherwise in an operand than in the output."""
    return _outermost_first(shape, operand) != _outermost_first(shape, strides)


def _repeats_elements(shape: Shape, operand: Shape) -> bool:
    """Tell whether an operand serves several elements of the output with one of its elements."""
    if 0 not in operand:
        return False
    return any(not step and size != 1 for step, size in zip(operand, shape, strict=True))


def measure_extent(
    layout: Layout,
    shape: Shape,
    strides: Shape,
    inputs: Sequence[Placed],
) -> Extents:
    """Return ``rows`` and ``run`` of a pointwise kernel (see ``Elementwise``).

    They follow from the input that makes the layout what it is, dimensions taken in the order of
    the output's memory.

    >>> whole, small = ((8, 4, 16), (64, 16, 1)), ((16,), (1,))
    >>> measure_extent(Layout.BROADCAST, (8, 4, 16), (64, 16, 1), [whole, small])
    (32, None)
    >>> swapped = ((2, 8, 4, 16), (512, 16, 128, 1))
    >>> measure_extent(Layout.TRANSPOSED, (2, 8, 4, 16), (512, 64, 16, 1), [swapped])
    (256, 16)
    """
    n = prod(shape)
    if layout is Layout.CONTIGUOUS or not n:
        return None, None
    order = _outermost_first(shape, strides)
    sizes = [shape[axis] for axis in order]
    walks = []
    for input_shape, steps in inputs:
        if input_shape.count(1) < len(input_shape) and broadcasts_to(input_shape, shape):
            operand = _broadcast_strides(shape, input_shape, steps)
            walks.append([operand[axis] for axis in order])

    if layout is Layout.BROADCAST:
        repeated = [walk for walk in walks if 0 in walk]
        if not repeated:
            return None, None
        return n // _count_alike(sizes, repeated[-1]), None
    if not walks:
        return None, None
    run = min([_inner_neighbours(sizes, walk) for walk in walks])
    if layout is Layout.STRIDED:
        return n // run, None
    return n // _next_size(sizes, run), run


def _count_alike(sizes: Sequence[int], walk: Sequence[int]) -> int:
    """Count the elements of the innermost dimensions that are all repeated, or all not."""
    is_repeated = walk[-1] == 0
    count = 1
    for size, step in zip(reversed(sizes), reversed(walk), strict=True):
        if (step == 0) is not is_repeated:
            break
        count *= size
    return count


def _next_size(sizes: Sequence[int], run: int) -> int:
    """Return the size of the dimension just outside a run of neighbours; 1 where there is none."""
    covered = 1
    for size in reversed(sizes):
        if covered >= run:
            return size
        covered *= size
    return 1


def broadcasts_to(sizes: Shape, shape: Shape) -> bool:
    """Tell whether a tensor of shape ``sizes`` can be broadcast to ``shape``."""
    new_dims = len(shape) - len(sizes)
    if new_dims < 0:
        return False
    return all(size in (1, out) for size, out in zip(sizes, shape[new_dims:], strict=True))


def _inner_neighbours(sizes: Sequence[int], walk: Sequence[int]) -> int:
    """Count neighbours in the output that are neighbours in the input."""
    count = 1
    for size, step in zip(reversed(sizes), reversed(walk), strict=True):
        if step != count:
            break
        count *= size
    return count


def _outermost_first(shape: Shape, strides: Shape) -> list[int]:
    """Return the dimensions larger than 1, outermost in memory first."""
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    return sorted(axes, key=strides.__getitem__, reverse=True)
