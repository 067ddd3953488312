"""The shapes of what ATen calls return, inferred from their arguments.

A profiler trace records the shapes of arguments but not those of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from wattcast.core import Dtype
from wattcast.workload.memory_layout import (
    Shape,
    broadcast_shapes,
    output_strides,
    promote_dtypes,
)
from wattcast.workload.readers.aten_operators import find_tensors
from wattcast.workload.symbolic_tensor import Tensor, make_tensor

_COMPARISONS = frozenset("lt le gt ge eq ne logical_not logical_and logical_or isin".split())
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "prod")
# These return one tensor like their second.
_GRADIENTS_OF_SECOND = (
    "native_layer_norm_backward",
    "native_group_norm_backward",
    "nll_loss_backward",
)
# Calls whose result has the shape of their first tensor: by a word in the name, or by the name.
_WORDS_OF_ALIKE = ("softmax", "norm", "attention")
_ALIKE = ("native_dropout", "nll_loss_forward")

_Arguments: TypeAlias = Sequence[Any]  # tensors, lists and numbers, in order
_Tensors: TypeAlias = Sequence[Tensor]  # those among the arguments
_ShapeRule: TypeAlias = Callable[[_Arguments, _Tensors], Shape | None]


def infer_results(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the results of a call by the rules of its operator.

    There are none where they do not follow from its arguments.
    """
    tensors = find_tensors(args)
    if not tensors:
        return ()
    first = tensors[0]

    works_in_place = name.endswith("_") and not name.startswith("__")
    if works_in_place:
        return (first,)
    if name == "convolution_backward":
        return tuple(tensors[1:3])
    if name in _GRADIENTS_OF_SECOND:
        return (make_tensor(tensors[1].shape, tensors[1].dtype),)

    shape = _infer_shape(name, args, tensors)
    if shape is not None:
        return (make_tensor(shape, first.dtype),)
    return (_broadcast_result(name, tensors),)


def _broadcast_result(name: str, tensors: _Tensors) -> Tensor:
    """Return the result of a pointwise call."""
    shape = broadcast_shapes(*[tensor.shape for tensor in tensors])
    strides = output_strides(shape, [(tensor.shape, tensor.strides) for tensor in tensors])
    if name in _COMPARISONS:
        dtype = Dtype.BOOL
    else:
        dtype = promote_dtypes([tensor.operand for tensor in tensors])
    return make_tensor(shape, dtype, strides)


def _infer_shape(
    name: str,
    args: _Arguments,
    tensors: _Tensors,
) -> Shape | None:
    """Return the shape of a row-major result, or None where all inputs are broadcast."""
    rule = _SHAPE_RULES.get(name)
    if rule is not None:
        return rule(args, tensors)
    if name in _ALIKE or any(word in name for word in _WORDS_OF_ALIKE):
        return tensors[0].shape
    return None


def _product_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    left_shape = tensors[-2]
    right = tensors[-1]
    return (*left_shape.shape[:-1], right.shape[-1])


def _concatenation_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    parts = [tensor for tensor in tensors if tensor.numel]
    shape = parts[0].shape
    axis = 0
    if len(args) > 1 and isinstance(args[1], int):
        axis = args[1] % len(shape)
    length = sum(part.shape[axis] for part in parts)
    return (*shape[:axis], length, *shape[axis + 1 :])


def _lookup_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    table = tensors[0]
    indices = tensors[-1]
    return (*indices.shape, table.shape[-1])


def _lookup_gradient_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    rows = args[2]
    return (rows, tensors[0].shape[-1])


def _gather_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    return tensors[-1].shape


def _index_select_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    shape = tensors[0].shape
    axis = int(args[1]) % len(shape)
    return (*shape[:axis], tensors[-1].numel, *shape[axis + 1 :])


def _index_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    table, *indices = tensors
    picked = broadcast_shapes(*[index.shape for index in indices])
    return (*picked, *table.shape[len(indices) :])


def _reduction_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    shape = tensors[0].shape
    axes = args[1] if len(args) > 1 else None
    if isinstance(axes, int) and not isinstance(axes, bool):
        axes = [axes]
    if not isinstance(axes, list) or not axes:
        return ()
    reduced = {int(axis) % len(shape) for axis in axes}
    return tuple(size for axis, size in enumerate(shape) if axis not in reduced)


def _convolution_shape(args: _Arguments, tensors: _Tensors) -> Shape:
    if len(args) > 6 and args[6] is True:
        raise ValueError("transposed convolution")
    x, weight, _, strides, paddings, dilations = args[:6]
    sizes = x.shape[2:]
    kernels = weight.shape[2:]
    sides = []
    for size, kernel, stride, padding, dilation in zip(
        sizes,
        kernels,
        strides,
        paddings,
        dilations,
        strict=True,
    ):
        covered = dilation * (kernel - 1) + 1
        sides.append((size + 2 * padding - covered) // stride + 1)
    return (x.shape[0], weight.shape[0], *sides)


def _slice_gradient_shape(args: _Arguments, tensors: _Tensors) -> Shape | None:
    return tuple(args[1]) if isinstance(args[1], list) else None


def _padding_shape(args: _Arguments, tensors: _Tensors) -> Shape | None:
    """Add the paddings, which are listed from the last dimension outwards, two for each."""
    paddings = args[1]
    if not isinstance(paddings, list):
        return None
    padded = list(tensors[0].shape)
    for axis in range(len(paddings) // 2):
        padded[-1 - axis] += paddings[2 * axis] + paddings[2 * axis + 1]
    return tuple(padded)


_SHAPE_RULES: dict[str, _ShapeRule] = {
    **dict.fromkeys(_PRODUCTS, _product_shape),
    **dict.fromkeys(_REDUCTIONS, _reduction_shape),
    "cat": _concatenation_shape,
    "embedding": _lookup_shape,
    "embedding_dense_backward": _lookup_gradient_shape,
    "gather": _gather_shape,
    "index_select": _index_select_shape,
    "index": _index_shape,
    "convolution": _convolution_shape,
    "slice_backward": _slice_gradient_shape,
    "select_backward": _slice_gradient_shape,
    "constant_pad_nd": _padding_shape,
}
