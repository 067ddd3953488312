"""Calls into ATen, PyTorch's library of operators -> the operators they launch.

``aten.csv`` says for every name which function below maps its calls. A name ending in ``_`` works
in place and follows the rule of the name without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from wattcast.core import Dtype
from wattcast.core.strict_files import read_shipped_table
from wattcast.workload import operator_types
from wattcast.workload.memory_layout import (
    broadcasts_to,
    classify_layout,
    contiguous_strides,
    describe_pointwise,
)
from wattcast.workload.operator_base import Operator, find_function
from wattcast.workload.operator_types import Bmm, Conv2d, Elementwise, Layout, Linear
from wattcast.workload.symbolic_tensor import Tensor, describe_concatenation, is_turned

# functions that only call a fill or a random generator, which is counted instead
_CALLERS = frozenset(
    ["zeros", "ones", "full", "rand", "randn", "zeros_like", "ones_like", "full_like", "new_zeros"]
)
_DROPOUT_PLACE = {
    "flash": (3, 10),
    "efficient": (5, 9),
    "cudnn": (5, 13),
}  # of the argument, forward and backward


@dataclass(frozen=True)
class AtenCall:
    """One ATen call: name without namespace and overload, arguments and results with tensors
    replaced.
    """

    name: str
    args: tuple[Any, ...]
    outs: tuple[Tensor, ...]
    tf32: bool | None = (
        None  # whether fp32 products run in TF32; None: convolutions alone, PyTorch's default
    )
    placed: int | None = None  # arguments given by place, before those given by name; None: all

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors given, those inside lists too."""
        return find_tensors(self.args)

    @property
    def out(self) -> Tensor:
        """The first result."""
        return self.outs[0]

    @property
    def out_byte(self) -> int:
        """Bytes of all results."""
        return sum(t.byte for t in self.outs)

    @property
    def backward(self) -> bool:
        """Whether this is the gradient of an operator."""
        return "backward" in self.name

    @property
    def numbers(self) -> list[int]:
        """The whole numbers among the arguments."""
        return [
            value for value in self.args if isinstance(value, int) and not isinstance(value, bool)
        ]

    def math_dtype(self, tensor: Tensor) -> Dtype:
        """Return the format a product is computed in."""
        return Dtype.TF32 if self.tf32 and tensor.dtype is Dtype.FP32 else tensor.dtype

    def convolution_dtype(self, tensor: Tensor, groups: int) -> Dtype:
        """Return the format a convolution is computed in; depthwise ones run on CUDA cores."""
        depthwise = groups > 1 and groups == tensor.shape[1]
        allowed = self.tf32 is not False and not depthwise
        return Dtype.TF32 if allowed and tensor.dtype is Dtype.FP32 else tensor.dtype

    @property
    def product_dtype(self) -> Dtype | None:
        """The format of a product's result where it is not the one the product is computed in."""
        return Dtype.FP32 if self.tf32 and self.out.dtype is Dtype.FP32 else None


def describe_rounding(ops: Iterable[Operator]) -> list[str]:
    """Return what is assumed of fp32 convolutions, if there are any."""
    if not any(isinstance(op, Conv2d) and op.dtype is Dtype.TF32 for op in ops):
        return []
    return [
        "fp32 convolutions run in TF32 on cards that have it (PyTorch's default, torch.backends.cudnn.allow_tf32)"
    ]


def find_tensors(values: Any, kind: type[Any] = Tensor) -> list[Any]:
    """Return all tensors, ours or those of another ``kind``, in nested lists and mappings, in
    order.
    """
    if isinstance(values, kind):
        return [values]
    inside = (
        values.values()
        if isinstance(values, Mapping)
        else values
        if isinstance(values, (list, tuple))
        else ()
    )
    return [tensor for value in inside for tensor in find_tensors(value, kind)]


@cache
def load_rules() -> dict[str, dict[str, str]]:
    """Read the rules of all calls, by ATen name.

    A rule has a ``kind``, one of ``_KINDS``, or the pointwise function that a call becomes, with
    ``one`` tensor given or with ``several``."""
    return {row["aten"]: row for row in read_shipped_table("wattcast.workload.readers", "aten.csv")}


def _find_rule(name: str) -> dict[str, str] | None:
    return load_rules().get(name) or load_rules().get(name.removesuffix("_"))


def map_call(call: AtenCall) -> list[Operator] | None:
    """Return the operators ``call`` launches, or None where there is no rule."""
    rule = _find_rule(call.name)
    if rule is None or rule["kind"] in _KINDS:
        return None if rule is None else _KINDS[rule["kind"]](call)
    function = rule["one"] if len(call.inputs) == 1 else rule["several"]
    return [
        _reduce_rows(call, function)
        if rule["kind"] == "reduction"
        else map_pointwise(call, function)
    ]


def launches_kernel(name: str) -> bool | None:
    """Tell whether an ATen name launches a kernel; None where it has no rule, or where what it
    calls is counted.
    """
    rule = _find_rule(name)
    if rule is None or rule["kind"] == "free":
        return None if rule is None else False
    return None if name in _CALLERS else True


def map_pointwise(call: AtenCall, function: str) -> Operator:
    """Return one elementwise kernel over all tensors given."""
    inputs = call.inputs
    out = call.out
    main = max(inputs, key=lambda t: (t.numel, t.dtype.byte)) if inputs else out
    placed = [(t.shape, t.strides) for t in inputs if t.shape]
    fits = all(broadcasts_to(shape, out.shape) for shape, _ in placed)  # a pad or a repeat does not
    layout = classify_layout(out.shape, out.strides, placed) if fits else Layout.STRIDED
    return describe_pointwise(
        function, [t.operand for t in inputs], out.operand, main.dtype, layout
    )


def _copy_source(call: AtenCall, source: Tensor) -> Operator:
    """Return a copy of ``source`` into the result, which a product is then added to."""
    return map_pointwise(AtenCall("copy", (source,), call.outs), "copy")


def _make_zeros(tensor: Tensor) -> Operator:
    return Elementwise("fill", max(tensor.numel, 1), dtype=tensor.dtype)


def _map_gather(call: AtenCall) -> list[Operator]:
    read = call.out.numel * call.out.dtype.byte + sum(t.byte for t in call.inputs[1:])
    return [Elementwise("gather", max(call.out.numel, 1), dtype=call.out.dtype, read=read)]


def _map_power(call: AtenCall) -> list[Operator]:
    exponent = (
        call.args[1] if len(call.args) > 1 and isinstance(call.args[1], (int, float)) else 0.0
    )
    function = {1.0: "copy", 2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt"}.get(
        float(exponent), "pow"
    )
    return [map_pointwise(call, function)]


def _map_cast(call: AtenCall) -> list[Operator]:
    """Map a copy in another format, or one of the last tensor into the first."""
    if call.name.startswith("copy"):
        call = AtenCall("copy", (call.inputs[-1],), (call.inputs[0],))
    return [map_pointwise(call, "copy" if call.inputs[0].dtype is call.out.dtype else "cast")]


def _map_concatenation(call: AtenCall) -> list[Operator]:
    parts = [t for t in call.inputs if t.numel]
    out = call.out
    axis = next(iter(call.numbers), 0) % max(len(parts[0].shape), 1) if parts else 0
    told = describe_concatenation(parts, axis) if parts else (Layout.CONTIGUOUS, (None, None))
    return [describe_pointwise("cat", [t.operand for t in parts], out.operand, out.dtype, *told)]


def _reduce_rows(call: AtenCall, function: str) -> Operator:
    x = call.inputs[0]
    layout = Layout.CONTIGUOUS if x.is_contiguous else Layout.STRIDED
    axes = next((v for v in call.args if isinstance(v, (list, tuple)) and v), ())
    if axes and all(isinstance(axis, int) for axis in axes) and x.shape and x.strides[-1] == 1:
        rank = len(x.shape)
        if rank - 1 not in {axis % rank for axis in axes}:  # the innermost dimension stays
            layout = Layout.TRANSPOSED
    read = None if x.byte == find_function(function).inputs * x.numel * x.dtype.byte else x.byte
    n = max(x.numel, 1)
    return Elementwise(function, n, dtype=x.dtype, layout=layout, read=read, write=call.out_byte)


def _map_rows(call: AtenCall) -> list[Operator]:
    """Map a softmax or a norm over rows; a row of a group norm is a group of channels of a picture.

    Kernels over rows copy an input that does not lie in rows.
    """
    softmax = "softmax" in call.name
    x = call.inputs[0 if softmax else call.backward]
    ops: list[Operator] = []
    if not x.is_contiguous:
        strides = contiguous_strides(x.shape)
        layout = classify_layout(x.shape, strides, [(x.shape, x.strides)])
        ops.append(
            describe_pointwise("copy", (x.operand,), (x.shape, strides, x.dtype), x.dtype, layout)
        )
    if softmax:
        dim = x.shape[call.numbers[0]] if x.shape else 1
        out = None if call.out.dtype is x.dtype else call.out.dtype
        log = call.name.startswith("_log")
        sizes = max(x.numel // dim, 1), dim, out, call.backward
        return [*ops, operator_types.Softmax(*sizes, log=log, dtype=x.dtype)]
    if "group" in call.name:
        dim = x.numel // (call.numbers[0] * call.numbers[3])  # pictures times groups
    else:
        dim = prod(
            next(
                v for v in call.args if isinstance(v, (list, tuple)) and v and isinstance(v[0], int)
            )
        )
    kind = operator_types.RmsNorm if "rms" in call.name else operator_types.LayerNorm
    return [*ops, kind(x.numel // dim, dim, dtype=x.dtype, backward=call.backward)]


def _map_batch_norm(call: AtenCall) -> list[Operator]:
    x = call.inputs[call.backward]
    channels_last = len(x.shape) > 2 and x.strides[1] == 1 != x.shape[1]
    layout = Layout.TRANSPOSED if channels_last else Layout.CONTIGUOUS
    training = "no_training" not in call.name and True in call.args
    function = "batchnorm_grad" if call.backward else "batchnorm_train" if training else "batchnorm"
    read = 4 * call.inputs[0].byte if call.backward else None
    rows = x.shape[1]
    run = prod(x.shape[2:])
    return [
        Elementwise(function, x.numel, dtype=x.dtype, layout=layout, read=read, rows=rows, run=run)
    ]


def _map_pool(call: AtenCall) -> list[Operator]:
    x = call.inputs[0]
    out = call.out
    if call.backward:
        read = x.byte + sum(t.byte for t in call.inputs[2:])
        return [
            Elementwise("pool_grad", out.numel, dtype=x.dtype, read=read, rows=prod(out.shape[:-2]))
        ]
    return [
        Elementwise("pool", x.numel, dtype=x.dtype, write=call.out_byte, rows=prod(x.shape[:-2]))
    ]


def _map_scatter(call: AtenCall) -> list[Operator]:
    """Map a scatter: elements go by index into a tensor, or into its copy; gradients of a lookup
    into zeros.
    """
    lookup = call.name == "embedding_dense_backward"
    given = call.inputs[:2] if lookup else call.inputs[1:]
    source = given[0] if lookup else max(given, key=lambda t: t.byte)
    read = source.byte + sum(t.byte for t in given)
    op = Elementwise(
        "scatter_add", max(source.numel, 1), dtype=call.out.dtype, read=read, write=source.byte
    )
    if call.name.endswith("_"):
        return [op]
    return [_make_zeros(call.out) if lookup else _copy_source(call, call.inputs[0]), op]


def _map_padding(call: AtenCall) -> list[Operator]:
    """Map a padding: zeros are written, then the part that was taken out is copied in."""
    part = call.inputs[0]
    copy = describe_pointwise("copy", (part.operand,), part.operand, part.dtype, Layout.STRIDED)
    return [_make_zeros(call.out), copy]


def _map_loss(call: AtenCall) -> list[Operator]:
    """Map a loss: one element of each row is gathered; the gradient is zeros and one element a row."""
    x, target = call.inputs[call.backward : call.backward + 2]
    if call.backward:
        return [_make_zeros(x), Elementwise("copy", target.numel, dtype=x.dtype, read=target.byte)]
    read = target.numel * (x.dtype.byte + target.dtype.byte)
    return [Elementwise("gather", target.numel, dtype=x.dtype, read=read, write=call.out.byte)]


def _map_product(call: AtenCall) -> list[Operator]:
    """Map a matrix, or a batch of them, times another, with a bias or added to another matrix."""
    a, b = call.inputs[-2:]
    (m, k), n = a.shape[-2:], b.shape[-1]
    if not (m and n and k):
        return []
    added = call.inputs[0] if len(call.inputs) == 3 else None
    bias = added is not None and len(a.shape) == 2 and added.numel == n
    math = call.math_dtype(a)
    result = call.product_dtype
    turned = is_turned(a, b)
    if len(a.shape) == 3:
        op: Operator = Bmm(a.shape[0], m, n, k, dtype=math, out_dtype=result, turned=turned)
    else:
        op = Linear(m, n, k, bias=bias, turned=turned, dtype=math, out_dtype=result)
    return [op] if added is None or bias else [_copy_source(call, added), op]


def _map_grouped_product(call: AtenCall) -> list[Operator]:
    """Map experts' products in one launch: groups share the rows evenly, as far as shapes can tell."""
    a, b = call.inputs[:2]
    n = b.shape[-1]
    dtype = call.math_dtype(a)
    if len(a.shape) == 2 and len(b.shape) == 3:
        groups, k, _ = b.shape
        return [Bmm(groups, max(a.shape[0] // groups, 1), n, k, dtype=dtype)]
    groups = call.out.shape[0]
    return [
        Bmm(
            groups,
            a.shape[0],
            n,
            max(a.shape[-1] // groups, 1),
            dtype=dtype,
            turned=is_turned(a, b),
        )
    ]


def _map_attention(call: AtenCall) -> list[Operator]:
    q, k, v = call.inputs[1:4] if call.backward else call.inputs[:3]
    batch, heads, q_len, dim = q.shape
    flags = [value for value in call.args if isinstance(value, bool)]
    causal = bool(flags and (flags[-1] if "efficient" in call.name else flags[0]))
    place = next(
        (places[call.backward] for name, places in _DROPOUT_PLACE.items() if name in call.name), 4
    )
    chance = call.args[place] if place < len(call.args[: call.placed]) else 0.0
    op = operator_types.Attention(
        batch, heads, k.shape[1], q_len, k.shape[2], dim, causal=causal,
        v_head_dim=None if v.shape[-1] == dim else v.shape[-1], backward=call.backward,
        dropout=isinstance(chance, float) and chance > 0.0, dtype=call.math_dtype(q),
    )  # fmt: skip
    return [op]


def _map_convolution(call: AtenCall) -> list[Operator]:
    """Return a convolution and, where it has a bias, the kernel that adds it to the channels in
    place.
    """
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args[:9]
    out = call.out
    where = call.out.operand
    op = _describe_convolution(
        call, x, weight, out, stride, padding, dilation, transposed, groups, "forward"
    )
    if bias is None:
        return [op]
    planes = prod(out.shape[:2]), None
    add = describe_pointwise(
        "add", (where, bias.operand), where, out.dtype, Layout.BROADCAST, planes
    )
    return [op, add]


def _map_convolution_gradient(call: AtenCall) -> list[Operator]:
    """Return the gradients that are asked for: of the image, the weight, the bias."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args[:11]
    args = (x, weight, grad, stride, padding, dilation, transposed, groups)
    wanted = [
        direction for direction, asked in zip(("dgrad", "wgrad"), mask, strict=False) if asked
    ]
    ops: list[Operator] = [_describe_convolution(call, *args, direction) for direction in wanted]
    return (
        [*ops, _reduce_rows(AtenCall("sum", (grad,), (call.outs[-1],)), "sum")] if mask[2] else ops
    )


def _describe_convolution(
    call: AtenCall, x: Tensor, weight: Tensor, out: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, groups: int, direction: str,
) -> Conv2d:  # fmt: skip
    """Return the convolution of a picture or of a signal (one row high).

    A transposed convolution is the gradient of a plain one. Over three dimensions, each output
    slice is a picture whose channels are the slices it sees: the arithmetic is exact, the image is
    read once a slice."""
    if transposed:
        x, out = out, x
        direction = {"forward": "dgrad", "dgrad": "forward", "wgrad": "wgrad"}[direction]
    n, c = x.shape[:2]
    if len(x.shape) == 5:
        n = n * out.shape[2]
        c = c * weight.shape[2]
    (h, w), (r, s) = _rows_and_columns(x.shape[2:], 1), _rows_and_columns(weight.shape[2:], 1)
    (step, step_w), (pad, pad_w) = _rows_and_columns(stride, 1), _rows_and_columns(padding, 0)
    return Conv2d(
        n, c, weight.shape[0], h, w, r, s, step, pad, groups, dilation[-1], dtype=call.convolution_dtype(x, groups),
        direction=direction, stride_w=None if step_w == step else step_w, padding_w=None if pad_w == pad else pad_w,
    )  # fmt: skip


def _rows_and_columns(sizes: Sequence[int], rows: int) -> tuple[int, int]:
    """Return the last two sizes; a signal has columns only."""
    return (rows, sizes[0]) if len(sizes) == 1 else (sizes[-2], sizes[-1])


_KINDS: dict[str, Callable[[AtenCall], list[Operator]]] = {
    "free": lambda call: [],
    "fill": lambda call: [_make_zeros(call.out)],
    "gather": _map_gather,
    "power": _map_power,
    "gelu": lambda call: [
        map_pointwise(call, "gelu" + "_tanh" * ("tanh" in call.args) + "_grad" * call.backward)
    ],
    "cast": _map_cast,
    "concatenation": _map_concatenation,
    "rows": _map_rows,
    "batch_norm": _map_batch_norm,
    "pool": _map_pool,
    "dropout": lambda call: [
        Elementwise(
            "dropout", call.inputs[0].numel, dtype=call.inputs[0].dtype, write=call.out_byte
        )
    ],
    "scatter": _map_scatter,
    "padding": _map_padding,
    "loss": _map_loss,
    "product": _map_product,
    "grouped_product": _map_grouped_product,
    "attention": _map_attention,
    "convolution": _map_convolution,
    "convolution_gradient": _map_convolution_gradient,
}
