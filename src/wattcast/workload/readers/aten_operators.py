"""Calls into ATen, PyTorch's library of operators -> the operators they launch.

``aten.csv`` says for every name which function below maps its calls. A name ending in ``_`` works
in place and follows the rule of the name without it."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from wattcast.core import Dtype
from wattcast.core.strict_files import read_shipped_table
from wattcast.workload import operator_types
from wattcast.workload.memory_layout import (
    Extents,
    broadcasts_to,
    classify_layout,
    contiguous_strides,
    describe_pointwise,
)
from wattcast.workload.operator_base import Operator, find_function
from wattcast.workload.operator_types import (
    Bmm,
    Conv2d,
    Elementwise,
    Layout,
    Linear,
)
from wattcast.workload.symbolic_tensor import (
    Tensor,
    describe_concatenation,
    is_turned,
)

# Functions that only call a fill or a random generator, which is counted instead.
_CALLERS = frozenset(
    ["zeros", "ones", "full", "rand", "randn", "zeros_like", "ones_like", "full_like", "new_zeros"]
)
# Where the chance of dropout stands among the arguments of attention: forward and backward.
_DROPOUT_PLACES = {
    "flash": (3, 10),
    "efficient": (5, 9),
    "cudnn": (5, 13),
}
_USUAL_DROPOUT_PLACES = (4, 4)
# The functions of common powers.
_POWERS = {
    1.0: "copy",
    2.0: "square",
    3.0: "cube",
    0.5: "sqrt",
    -0.5: "rsqrt",
}


@dataclass(frozen=True)
class AtenCall:
    """One ATen call: name without namespace and overload, arguments and results with tensors
    replaced.
    """

    name: str
    args: tuple[Any, ...]
    outs: tuple[Tensor, ...]
    # whether fp32 products run in TF32; None: convolutions alone, PyTorch's default
    tf32: bool | None = None
    # arguments passed by place, before those passed by name; None: all
    placed: int | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors among the arguments, those inside lists too."""
        return find_tensors(self.args)

    @property
    def out(self) -> Tensor:
        """The first result."""
        return self.outs[0]

    @property
    def out_byte(self) -> int:
        """Bytes of all results."""
        return sum(tensor.byte for tensor in self.outs)

    @property
    def backward(self) -> bool:
        """Whether this is the gradient of an operator."""
        return "backward" in self.name

    @property
    def numbers(self) -> list[int]:
        """The whole numbers among the arguments."""
        return [value for value in self.args if is_whole_number(value)]

    def math_dtype(self, tensor: Tensor) -> Dtype:
        """Return the format a product is computed in."""
        if self.tf32 and tensor.dtype is Dtype.FP32:
            return Dtype.TF32
        return tensor.dtype

    def convolution_dtype(
        self,
        tensor: Tensor,
        groups: int,
    ) -> Dtype:
        """Return the format a convolution is computed in; depthwise ones run on CUDA cores."""
        is_depthwise = groups > 1 and groups == tensor.shape[1]
        if tensor.dtype is Dtype.FP32 and self.tf32 is not False and not is_depthwise:
            return Dtype.TF32
        return tensor.dtype

    @property
    def product_dtype(self) -> Dtype | None:
        """The format of a product's result where it is not the one the product is computed in."""
        return Dtype.FP32 if self.tf32 and self.out.dtype is Dtype.FP32 else None


def is_whole_number(value: object) -> bool:
    """Tell whether an argument is a whole number, which a yes or no is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def describe_rounding(ops: Iterable[Operator]) -> list[str]:
    """Return what is assumed of fp32 convolutions, if there are any."""
    if not any(isinstance(op, Conv2d) and op.dtype is Dtype.TF32 for op in ops):
        return []
    return [
        "fp32 convolutions run in TF32 on cards that have it (PyTorch's default, "
        "torch.backends.cudnn.allow_tf32)"
    ]


def find_tensors(values: Any, kind: type[Any] = Tensor) -> list[Any]:
    """Return all tensors in nested lists and mappings, in order.

    They are ours, or those of another ``kind``.
    """
    if isinstance(values, kind):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    tensors = []
    for value in values:
        tensors += find_tensors(value, kind)
    return tensors


@cache
def load_rules() -> dict[str, dict[str, str]]:
    """Read the rules of all calls, by ATen name.

    A rule has a ``kind``, one of ``_KINDS``, or the pointwise function that a call becomes, with
    ``one`` tensor or with ``several``."""
    rows = read_shipped_table("wattcast.workload.readers", "aten.csv")
    return {row["aten"]: row for row in rows}


def _find_rule(name: str) -> dict[str, str] | None:
    return load_rules().get(name) or load_rules().get(name.removesuffix("_"))


def map_call(call: AtenCall) -> list[Operator] | None:
    """Return the operators ``call`` launches, or None where there is no rule."""
    rule = _find_rule(call.name)
    if rule is None:
        return None
    kind = rule["kind"]
    if kind in _KINDS:
        return _KINDS[kind](call)
    function = rule["one"] if len(call.inputs) == 1 else rule["several"]
    if kind == "reduction":
        return [_reduce_rows(call, function)]
    return [map_pointwise(call, function)]


def launches_kernel(name: str) -> bool | None:
    """Tell whether an ATen name launches a kernel.

    None stands for a name without a rule, or one that calls others, which are counted.
    """
    rule = _find_rule(name)
    if rule is None:
        return None
    if rule["kind"] == "free":
        return False
    return None if name in _CALLERS else True


def map_pointwise(call: AtenCall, function: str) -> Operator:
    """Return one elementwise kernel over all tensors of a call."""
    inputs = call.inputs
    out = call.out
    main = max(inputs, key=lambda t: (t.numel, t.dtype.byte)) if inputs else out
    walks = [(tensor.shape, tensor.strides) for tensor in inputs if tensor.shape]
    layout = Layout.STRIDED
    if all(broadcasts_to(shape, out.shape) for shape, _ in walks):  # a pad or a repeat does not
        layout = classify_layout(out.shape, out.strides, walks)
    operands = [tensor.operand for tensor in inputs]
    return describe_pointwise(
        function,
        operands,
        out.operand,
        main.dtype,
        layout,
    )


def _copy_source(call: AtenCall, source: Tensor) -> Operator:
    """Return a copy of ``source`` into the result, which a product is then added to."""
    return map_pointwise(AtenCall("copy", (source,), call.outs), "copy")


def _make_zeros(tensor: Tensor) -> Operator:
    return Elementwise("fill", max(tensor.numel, 1), dtype=tensor.dtype)


def _map_free(call: AtenCall) -> list[Operator]:
    return []


def _map_fill(call: AtenCall) -> list[Operator]:
    return [_make_zeros(call.out)]


def _map_gather(call: AtenCall) -> list[Operator]:
    out = call.out
    index_byte = sum(tensor.byte for tensor in call.inputs[1:])
    read = out.numel * out.dtype.byte + index_byte
    return [Elementwise("gather", max(out.numel, 1), dtype=out.dtype, read=read)]


def _map_power(call: AtenCall) -> list[Operator]:
    exponent: Any = call.args[1] if len(call.args) > 1 else 0.0
    if not isinstance(exponent, (int, float)):
        exponent = 0.0
    return [map_pointwise(call, _POWERS.get(float(exponent), "pow"))]


def _map_gelu(call: AtenCall) -> list[Operator]:
    function = "gelu_tanh" if "tanh" in call.args else "gelu"
    if call.backward:
        function += "_grad"
    return [map_pointwise(call, function)]


def _map_dropout(call: AtenCall) -> list[Operator]:
    x = call.inputs[0]
    return [Elementwise("dropout", x.numel, dtype=x.dtype, write=call.out_byte)]


def _map_cast(call: AtenCall) -> list[Operator]:
    """Map a copy in another format, or one of the last tensor into the first."""
    if call.name.startswith("copy"):
        target = call.inputs[0]
        source = call.inputs[-1]
        call = AtenCall("copy", (source,), (target,))
    is_copy = call.inputs[0].dtype is call.out.dtype
    return [map_pointwise(call, "copy" if is_copy else "cast")]


def _map_concatenation(call: AtenCall) -> list[Operator]:
    parts = [tensor for tensor in call.inputs if tensor.numel]
    out = call.out
    layout = Layout.CONTIGUOUS
    extents: Extents = (None, None)
    if parts:
        axis = next(iter(call.numbers), 0)
        rank = max(len(parts[0].shape), 1)
        layout, extents = describe_concatenation(parts, axis % rank)
    operands = [part.operand for part in parts]
    return [
        describe_pointwise(
            "cat",
            operands,
            out.operand,
            out.dtype,
            layout,
            extents,
        )
    ]


def _reduce_rows(call: AtenCall, function: str) -> Operator:
    """Return one reduction of the first tensor."""
    x = call.inputs[0]
    layout = Layout.CONTIGUOUS if x.is_contiguous else Layout.STRIDED
    if _keeps_innermost(call, x):
        layout = Layout.TRANSPOSED
    usual_byte = find_function(function).inputs * x.numel * x.dtype.byte
    return Elementwise(
        function,
        max(x.numel, 1),
        dtype=x.dtype,
        layout=layout,
        read=None if x.byte == usual_byte else x.byte,
        write=call.out_byte,
    )


def _keeps_innermost(call: AtenCall, x: Tensor) -> bool:
    """Tell whether a reduction leaves the dimension that is innermost in memory."""
    lists = (value for value in call.args if isinstance(value, (list, tuple)) and value)
    axes = next(lists, ())
    if not axes or not all(isinstance(axis, int) for axis in axes):
        return False
    if not x.shape or x.strides[-1] != 1:
        return False
    rank = len(x.shape)
    return rank - 1 not in [axis % rank for axis in axes]


def _map_rows(call: AtenCall) -> list[Operator]:
    """Map a softmax or a norm over rows; a row of a group norm is a group of channels of a picture.

    Kernels over rows copy an input that does not lie in rows.
    """
    is_softmax = "softmax" in call.name
    has_gradient_first = call.backward and not is_softmax
    x = call.inputs[1] if has_gradient_first else call.inputs[0]
    ops: list[Operator] = []
    if not x.is_contiguous:
        ops.append(_copy_to_rows(x))
    ops.append(_describe_softmax(call, x) if is_softmax else _describe_norm(call, x))
    return ops


def _copy_to_rows(x: Tensor) -> Operator:
    """Return a copy of ``x`` that lies in memory row by row."""
    strides = contiguous_strides(x.shape)
    layout = classify_layout(x.shape, strides, [(x.shape, x.strides)])
    out = (x.shape, strides, x.dtype)
    return describe_pointwise(
        "copy",
        (x.operand,),
        out,
        x.dtype,
        layout,
    )


def _describe_softmax(call: AtenCall, x: Tensor) -> Operator:
    dim = x.shape[call.numbers[0]] if x.shape else 1
    return operator_types.Softmax(
        rows=max(x.numel // dim, 1),
        dim=dim,
        out_dtype=None if call.out.dtype is x.dtype else call.out.dtype,
        backward=call.backward,
        log=call.name.startswith("_log"),
        dtype=x.dtype,
    )


def _describe_norm(call: AtenCall, x: Tensor) -> Operator:
    if "group" in call.name:
        pictures = call.numbers[0]
        groups = call.numbers[3]
        dim = x.numel // (pictures * groups)
    else:
        lists = (value for value in call.args if isinstance(value, (list, tuple)) and value)
        shapes = (value for value in lists if isinstance(value[0], int))
        dim = prod(next(shapes))
    kind = operator_types.RmsNorm if "rms" in call.name else operator_types.LayerNorm
    return kind(
        rows=x.numel // dim,
        dim=dim,
        dtype=x.dtype,
        backward=call.backward,
    )


def _map_batch_norm(call: AtenCall) -> list[Operator]:
    x = call.inputs[1] if call.backward else call.inputs[0]
    is_training = "no_training" not in call.name and True in call.args
    function = "batchnorm_train" if is_training else "batchnorm"
    read = None
    if call.backward:
        function = "batchnorm_grad"
        read = 4 * call.inputs[0].byte
    has_channels_last = len(x.shape) > 2 and x.strides[1] == 1 != x.shape[1]
    op = Elementwise(
        function,
        x.numel,
        dtype=x.dtype,
        layout=Layout.TRANSPOSED if has_channels_last else Layout.CONTIGUOUS,
        read=read,
        rows=x.shape[1],
        run=prod(x.shape[2:]),
    )
    return [op]


def _map_pool(call: AtenCall) -> list[Operator]:
    x = call.inputs[0]
    out = call.out
    if call.backward:
        read = x.byte + sum(tensor.byte for tensor in call.inputs[2:])
        planes = prod(out.shape[:-2])
        return [
            Elementwise(
                "pool_grad",
                out.numel,
                dtype=x.dtype,
                read=read,
                rows=planes,
            )
        ]
    planes = prod(x.shape[:-2])
    return [
        Elementwise(
            "pool",
            x.numel,
            dtype=x.dtype,
            write=call.out_byte,
            rows=planes,
        )
    ]


def _map_scatter(call: AtenCall) -> list[Operator]:
    """Map a scatter: elements go by index into a tensor, or into its copy.

    Gradients of a lookup go into zeros.
    """
    is_lookup = call.name == "embedding_dense_backward"
    if is_lookup:
        tensors = call.inputs[:2]
        source = tensors[0]
    else:
        tensors = call.inputs[1:]
        source = max(tensors, key=lambda tensor: tensor.byte)
    scatter = Elementwise(
        "scatter_add",
        max(source.numel, 1),
        dtype=call.out.dtype,
        read=source.byte + sum(tensor.byte for tensor in tensors),
        write=source.byte,
    )
    if call.name.endswith("_"):
        return [scatter]
    if is_lookup:
        return [_make_zeros(call.out), scatter]
    return [_copy_source(call, call.inputs[0]), scatter]


def _map_padding(call: AtenCall) -> list[Operator]:
    """Map a padding: zeros are written, then the part that was taken out is copied in."""
    part = call.inputs[0]
    copy = describe_pointwise(
        "copy",
        (part.operand,),
        part.operand,
        part.dtype,
        Layout.STRIDED,
    )
    return [_make_zeros(call.out), copy]


def _map_loss(call: AtenCall) -> list[Operator]:
    """Map a loss: one element of each row is gathered.

    The gradient is zeros and one element a row.
    """
    first = 1 if call.backward else 0
    x, target = call.inputs[first : first + 2]
    if call.backward:
        labels = Elementwise("copy", target.numel, dtype=x.dtype, read=target.byte)
        return [_make_zeros(x), labels]
    read = target.numel * (x.dtype.byte + target.dtype.byte)
    return [
        Elementwise(
            "gather",
            target.numel,
            dtype=x.dtype,
            read=read,
            write=call.out.byte,
        )
    ]


def _map_product(call: AtenCall) -> list[Operator]:
    """Map a matrix, or a batch of them, times another, with a bias or added to another matrix."""
    a, b = call.inputs[-2:]
    m, k = a.shape[-2:]
    n = b.shape[-1]
    if not (m and n and k):
        return []
    summand = call.inputs[0] if len(call.inputs) == 3 else None
    has_bias = summand is not None and len(a.shape) == 2 and summand.numel == n
    math = call.math_dtype(a)
    result = call.product_dtype
    turned = is_turned(a, b)
    op: Operator
    if len(a.shape) == 3:
        op = Bmm(
            b=a.shape[0],
            m=m,
            n=n,
            k=k,
            dtype=math,
            out_dtype=result,
            turned=turned,
        )
    else:
        op = Linear(
            m=m,
            n=n,
            k=k,
            bias=has_bias,
            turned=turned,
            dtype=math,
            out_dtype=result,
        )
    if summand is None or has_bias:
        return [op]
    return [_copy_source(call, summand), op]


def _map_grouped_product(call: AtenCall) -> list[Operator]:
    """Map experts' products in one launch.

    Groups share the rows evenly, as far as shapes can tell.
    """
    a, b = call.inputs[:2]
    n = b.shape[-1]
    dtype = call.math_dtype(a)
    if len(a.shape) == 2 and len(b.shape) == 3:
        groups, k, _ = b.shape
        return [
            Bmm(
                b=groups,
                m=max(a.shape[0] // groups, 1),
                n=n,
                k=k,
                dtype=dtype,
            )
        ]
    groups = call.out.shape[0]
    k = max(a.shape[-1] // groups, 1)
    return [
        Bmm(
            b=groups,
            m=a.shape[0],
            n=n,
            k=k,
            dtype=dtype,
            turned=is_turned(a, b),
        )
    ]


def _map_attention(call: AtenCall) -> list[Operator]:
    q, k, v = call.inputs[1:4] if call.backward else call.inputs[:3]
    batch, heads, q_len, dim = q.shape
    v_dim = v.shape[-1]

    # Memory-efficient attention takes whether to return the log-sum-exp before ``is_causal``
    flags = [value for value in call.args if isinstance(value, bool)]
    causal_flag = -1 if "efficient" in call.name else 0
    is_causal = bool(flags) and flags[causal_flag]

    op = operator_types.Attention(
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        q_len=q_len,
        kv_len=k.shape[2],
        head_dim=dim,
        causal=is_causal,
        v_head_dim=None if v_dim == dim else v_dim,
        backward=call.backward,
        dropout=_drops_weights(call),
        dtype=call.math_dtype(q),
    )
    return [op]


def _drops_weights(call: AtenCall) -> bool:
    """Tell whether attention is called with a chance of dropout."""
    matching = (places for name, places in _DROPOUT_PLACES.items() if name in call.name)
    forward, backward = next(matching, _USUAL_DROPOUT_PLACES)
    place = backward if call.backward else forward
    if place >= len(call.args[: call.placed]):
        return False
    chance = call.args[place]
    return isinstance(chance, float) and chance > 0.0


@dataclass(frozen=True)
class _ConvolutionSettings:
    """The sizes of a convolution beside those of its tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int


def _map_convolution(call: AtenCall) -> list[Operator]:
    """Return a convolution and the kernel that adds its bias to the channels in place."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args[:9]
    out = call.out
    settings = _ConvolutionSettings(
        stride,
        padding,
        dilation,
        transposed,
        groups,
    )
    op = _describe_convolution(
        call,
        settings,
        x,
        weight,
        out,
        "forward",
    )
    if bias is None:
        return [op]
    planes = prod(out.shape[:2])
    operands = (out.operand, bias.operand)
    extents = (planes, None)
    add = describe_pointwise(
        "add",
        operands,
        out.operand,
        out.dtype,
        Layout.BROADCAST,
        extents,
    )
    return [op, add]


def _map_convolution_gradient(call: AtenCall) -> list[Operator]:
    """Return the gradients that are asked for: of the image, the weight, the bias."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args[:11]
    settings = _ConvolutionSettings(
        stride,
        padding,
        dilation,
        transposed,
        groups,
    )
    ops: list[Operator] = []
    for direction, is_needed in zip(("dgrad", "wgrad"), mask, strict=False):
        if is_needed:
            ops.append(
                _describe_convolution(
                    call,
                    settings,
                    x,
                    weight,
                    grad,
                    direction,
                )
            )
    if mask[2]:
        bias_gradient = call.outs[-1]
        ops.append(_reduce_rows(AtenCall("sum", (grad,), (bias_gradient,)), "sum"))
    return ops


# A transposed convolution is the gradient of a plain one.
_TRANSPOSED_DIRECTIONS = {
    "forward": "dgrad",
    "dgrad": "forward",
    "wgrad": "wgrad",
}


def _describe_convolution(
    call: AtenCall,
    settings: _ConvolutionSettings,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    direction: str,
) -> Conv2d:
    """Return the convolution of a picture or of a signal (one row high).

    Over three dimensions, each output slice is a picture whose channels are the slices it sees: the
    arithmetic is exact, the image is read once a slice."""
    if settings.transposed:
        x, out = out, x
        direction = _TRANSPOSED_DIRECTIONS[direction]
    n, c = x.shape[:2]
    if len(x.shape) == 5:
        n *= out.shape[2]
        c *= weight.shape[2]
    h, w = _rows_and_columns(x.shape[2:], 1)
    r, s = _rows_and_columns(weight.shape[2:], 1)
    stride, stride_w = _rows_and_columns(settings.stride, 1)
    padding, padding_w = _rows_and_columns(settings.padding, 0)
    return Conv2d(
        n=n,
        c=c,
        k=weight.shape[0],
        h=h,
        w=w,
        r=r,
        s=s,
        stride=stride,
        padding=padding,
        groups=settings.groups,
        dilation=settings.dilation[-1],
        direction=direction,
        stride_w=None if stride_w == stride else stride_w,
        padding_w=None if padding_w == padding else padding_w,
        dtype=call.convolution_dtype(x, settings.groups),
    )


def _rows_and_columns(sizes: Sequence[int], rows: int) -> tuple[int, int]:
    """Return the last two sizes; a signal has columns only."""
    return (rows, sizes[0]) if len(sizes) == 1 else (sizes[-2], sizes[-1])


_KINDS: dict[str, Callable[[AtenCall], list[Operator]]] = {
    "free": _map_free,
    "fill": _map_fill,
    "gather": _map_gather,
    "power": _map_power,
    "gelu": _map_gelu,
    "cast": _map_cast,
    "concatenation": _map_concatenation,
    "rows": _map_rows,
    "batch_norm": _map_batch_norm,
    "pool": _map_pool,
    "dropout": _map_dropout,
    "scatter": _map_scatter,
    "padding": _map_padding,
    "loss": _map_loss,
    "product": _map_product,
    "grouped_product": _map_grouped_product,
    "attention": _map_attention,
    "convolution": _map_convolution,
    "convolution_gradient": _map_convolution_gradient,
}
