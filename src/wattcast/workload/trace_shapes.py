"""What a trace does not write down: the arguments as values, and the shape of each result."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from wattcast.dtypes import Dtype
from wattcast.workload.pointwise import broadcast, promoted
from wattcast.workload.strides import contiguous, output_strides
from wattcast.workload.symbolic import Storage, Tape, Tensor

_TYPES = {
    "c10::BFloat16": Dtype.BF16,
    "c10::Half": Dtype.FP16,
    "float": Dtype.FP32,
    "double": Dtype.FP64,
    "long int": Dtype.INT64,
    "long": Dtype.INT64,
    "int": Dtype.INT32,
    "bool": Dtype.BOOL,
    "signed char": Dtype.INT8,
    "unsigned char": Dtype.INT8,
    "c10::Float8_e4m3fn": Dtype.FP8,
    "c10::Float8_e5m2": Dtype.FP8,
}
_COMPARISONS = frozenset(["lt", "le", "gt", "ge", "eq", "ne", "logical_not", "logical_and", "logical_or", "isin"])


def main_dtype(calls: Sequence[Mapping[str, Any]]) -> Dtype:
    """The commonest floating format of a trace, for lists of tensors, whose format is not recorded."""
    count: Counter[Dtype] = Counter()
    for args in calls:
        count.update(_TYPES[name] for name in args.get("Input type", []) if name in _TYPES)
    floating = [d for d, _ in count.most_common() if d in (Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.FP64)]
    return floating[0] if floating else Dtype.FP32


def arguments(args: Mapping[str, Any], usual: Dtype) -> tuple[Any, ...]:
    """Recorded dims, strides, types and values -> tensors, lists and plain numbers, in order."""
    dims, types = args.get("Input Dims", []), args.get("Input type", [])
    strides, values = args.get("Input Strides", []), args.get("Concrete Inputs", [])
    found: list[Any] = []
    for index, kind in enumerate(types):
        shape = dims[index] if index < len(dims) else []
        step = strides[index] if index < len(strides) else None
        value = values[index] if index < len(values) else ""
        if kind in _TYPES:
            found.append(_tensor(shape, step, _TYPES[kind]))
        elif kind == "TensorList":
            steps = step if step and len(step) == len(shape) else [None] * len(shape)
            found.append(tuple(_tensor(s, t, usual) for s, t in zip(shape, steps, strict=True)))
        else:
            found.append(_value(value))
    return tuple(found)


def _tensor(shape: Sequence[Any], strides: Sequence[Any] | None, dtype: Dtype) -> Tensor:
    sizes = tuple(int(size) for size in shape)
    steps = tuple(int(step) for step in strides) if strides and len(strides) == len(sizes) else contiguous(sizes)
    return Tensor(Tape(), sizes, steps, dtype, Storage(0))


def _value(text: object) -> Any:
    if not isinstance(text, str) or not text or len(text) > 10_000:
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, (int, float, bool, list)) else text


def results(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """The tensors a call gives back, by the rules of its operator; None where they cannot be told."""
    tensors = [t for arg in args for t in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(t, Tensor)]
    if not tensors:
        return None
    first = tensors[0]
    if name.endswith("_") and not name.startswith("__"):
        return (first,)
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        a, b = tensors[-2:]
        return (_new((*a.shape[:-1], b.shape[-1]), a.dtype),)
    if name == "cat":
        return (_concatenated(args, tensors),)
    if name in ("embedding", "gather", "index_select", "index"):
        return (_picked(name, args, tensors),)
    if name == "embedding_dense_backward":
        return (_new((args[2], first.shape[-1]), first.dtype),)
    if name in ("sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "prod"):
        return (_reduced(args, first),)
    if name == "convolution":
        return (_convolved(args),)
    if name == "convolution_backward":
        return tuple(tensors[1:3])
    return _same(name, args, tensors)


def _same(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Shaped like an input, or like all inputs broadcast."""
    if name in ("native_layer_norm_backward", "native_group_norm_backward", "nll_loss_backward"):
        return (_new(tensors[1].shape, tensors[1].dtype),)
    if "softmax" in name or "norm" in name or "attention" in name or name in ("native_dropout", "nll_loss_forward"):
        return (_new(tensors[0].shape, tensors[0].dtype),)
    if name in ("slice_backward", "select_backward", "constant_pad_nd") and isinstance(args[1], list):
        grown = args[1]
        if name == "constant_pad_nd":
            sizes = list(tensors[0].shape)
            for axis in range(len(grown) // 2):
                sizes[-1 - axis] += grown[2 * axis] + grown[2 * axis + 1]
            grown = sizes
        return (_new(tuple(grown), tensors[0].dtype),)
    shape = broadcast(*(t.shape for t in tensors))
    dtype = Dtype.BOOL if name in _COMPARISONS else promoted(tensors)
    strides = output_strides(shape, [(t.shape, t.strides) for t in tensors])
    return (Tensor(Tape(), shape, strides, dtype, Storage(0)),)


def _new(shape: tuple[int, ...], dtype: Dtype) -> Tensor:
    return Tensor(Tape(), tuple(shape), contiguous(tuple(shape)), dtype, Storage(0))


def _concatenated(args: tuple[Any, ...], parts: list[Tensor]) -> Tensor:
    full = [t for t in parts if prod(t.shape)]
    axis = int(args[1]) if len(args) > 1 and isinstance(args[1], int) else 0
    axis %= len(full[0].shape)
    total = sum(t.shape[axis] for t in full)
    return _new((*full[0].shape[:axis], total, *full[0].shape[axis + 1 :]), full[0].dtype)


def _picked(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> Tensor:
    table, index = tensors[0], tensors[-1]
    if name == "embedding":
        return _new((*index.shape, table.shape[-1]), table.dtype)
    if name == "gather":
        return _new(index.shape, table.dtype)
    if name == "index_select":
        axis = int(args[1]) % len(table.shape)
        return _new((*table.shape[:axis], index.numel, *table.shape[axis + 1 :]), table.dtype)
    picks = broadcast(*(t.shape for t in tensors[1:]))
    return _new((*picks, *table.shape[len(tensors) - 1 :]), table.dtype)


def _reduced(args: tuple[Any, ...], x: Tensor) -> Tensor:
    axes = args[1] if len(args) > 1 else None
    axes = [axes] if isinstance(axes, int) and not isinstance(axes, bool) else axes
    if not isinstance(axes, list) or not axes:
        return _new((), x.dtype)
    gone = {int(axis) % len(x.shape) for axis in axes}
    return _new(tuple(size for axis, size in enumerate(x.shape) if axis not in gone), x.dtype)


def _convolved(args: tuple[Any, ...]) -> Tensor:
    x, weight, _, stride, padding, dilation = args[:6]
    if len(args) > 6 and args[6] is True:
        raise ValueError("transposed convolution")
    sizes = [
        (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, gap in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    return _new((x.shape[0], weight.shape[0], *sizes), x.dtype)
