"""ATen calls -> operators: what each launches on a GPU, by name and by the tensors it was given.

Tensors arrive as ``symbolic.Tensor`` (shape, strides, format), so captures and templates share one
rule for bytes and layouts.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any

from wattcast.dtypes import Dtype
from wattcast.workload.elementwise import function_of
from wattcast.workload.functional import elementwise, joined
from wattcast.workload.graph import (
    Attention,
    Bmm,
    Conv2d,
    Elementwise,
    LayerNorm,
    Layout,
    Linear,
    Operator,
    RmsNorm,
    Softmax,
)
from wattcast.workload.strides import contiguous, layout_of
from wattcast.workload.symbolic import Tensor


@dataclass(frozen=True)
class Call:
    """One ATen call: name without namespace and overload, arguments and results with tensors replaced."""

    name: str
    args: tuple[Any, ...]
    outs: tuple[Tensor, ...]
    tf32: bool = False
    placed: int | None = None  # arguments given by place, before those given by name; None: all

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors given, those inside lists too."""
        return list(_tensors(self.args))

    @property
    def out(self) -> Tensor:
        return self.outs[0]

    def math(self, tensor: Tensor) -> Dtype:
        """The format a product is computed in."""
        return Dtype.TF32 if self.tf32 and tensor.dtype is Dtype.FP32 else tensor.dtype

    @property
    def wide(self) -> Dtype | None:
        return Dtype.FP32 if self.tf32 and self.out.dtype is Dtype.FP32 else None


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


@dataclass(frozen=True)
class Rule:
    """A row of ``aten.csv``: free, fill, reduction, gather or pointwise, and the function each becomes."""

    kind: str
    one: str  # with one tensor given
    several: str  # with more


@cache
def rules() -> dict[str, Rule]:
    """ATen name -> rule, for all that need no arithmetic on their arguments."""
    text = files("wattcast.workload").joinpath("aten.csv").read_text(encoding="utf-8")
    return {row["aten"]: Rule(row["kind"], row["one"], row["several"]) for row in csv.DictReader(text.splitlines())}


def known(name: str) -> bool:
    """Whether an ATen name has a rule that does work."""
    return name in SPECIAL or (name not in _CALLERS and _kind(name) not in ("", "free"))


def free(name: str) -> bool:
    """Whether an ATen name is known to launch nothing itself."""
    return _kind(name) == "free"


def _kind(name: str) -> str:
    rule = rules().get(name) or rules().get(name.removesuffix("_"))
    return rule.kind if rule else ""


_CALLERS = frozenset(["zeros", "ones", "full", "rand", "randn", "zeros_like", "ones_like", "full_like", "new_zeros"])


def operators(call: Call) -> list[Operator] | None:
    """What ``call`` launches, or None where nobody knows."""
    if call.name in SPECIAL:
        return SPECIAL[call.name](call)
    rule = rules().get(call.name) or rules().get(call.name.removesuffix("_"))
    if rule is None:
        return None
    if rule.kind == "free":
        return []
    if rule.kind == "fill":
        return [Elementwise("fill", max(call.out.numel, 1), dtype=call.out.dtype)]
    if rule.kind == "reduction":
        return [_reduction(call, rule.one)]
    if rule.kind == "gather":
        return [_gathered(call)]
    return [pointwise(call, rule.one if len(call.inputs) == 1 else rule.several)]


def pointwise(call: Call, function: str) -> Operator:
    """One elementwise kernel over all tensors given."""
    inputs, out = call.inputs, call.out
    main = max(inputs, key=lambda t: (t.numel, t.dtype.byte)) if inputs else out
    given = [(t.shape, t.strides) for t in inputs if t.shape]
    same = len({t.shape for t in inputs} | {out.shape}) == 1
    layout = layout_of(out.shape, out.strides, given) if same or _fits(given, out) else Layout.STRIDED
    return elementwise(function, inputs, out, main.dtype, layout)


def _fits(given: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], out: Tensor) -> bool:
    """Whether the inputs broadcast to the output (a pad or a repeat does not)."""
    return all(
        len(shape) <= len(out.shape) and all(a in (1, b) for a, b in zip(shape[::-1], out.shape[::-1], strict=False))
        for shape, _ in given
    )


def _pow(call: Call) -> list[Operator]:
    exponent = call.args[1] if len(call.args) > 1 else None
    plain = exponent if isinstance(exponent, (int, float)) else 0.0
    function = {1.0: "copy", 2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt"}.get(float(plain), "pow")
    return [pointwise(call, function)]


def _gelu(call: Call) -> list[Operator]:
    tanh = "tanh" in call.args
    back = call.name == "gelu_backward"
    return [pointwise(call, ("gelu_tanh" if tanh else "gelu") + ("_grad" if back else ""))]


def _cast(call: Call) -> list[Operator]:
    function = "copy" if call.inputs[0].dtype is call.out.dtype else "cast"
    return [pointwise(call, function)]


def _copy_into(call: Call) -> list[Operator]:
    source, out = call.inputs[-1], call.inputs[0]
    function = "copy" if source.dtype is out.dtype else "cast"
    whole = Call("copy", (source,), (out,))
    return [pointwise(whole, function)]


def _cat(call: Call) -> list[Operator]:
    parts = [t for t in call.inputs if t.numel]
    plain = all(t.is_contiguous for t in parts)
    layout = Layout.CONTIGUOUS if plain else Layout.STRIDED
    axis = next((v for v in call.args if isinstance(v, int) and not isinstance(v, bool)), 0)
    extents = joined(parts, axis % max(len(parts[0].shape), 1)) if parts else (None, None)
    return [elementwise("cat", parts, call.out, call.out.dtype, layout, extents)]


def _reduction(call: Call, function: str) -> Operator:
    x = call.inputs[0]
    layout = Layout.CONTIGUOUS if x.is_contiguous else Layout.STRIDED
    if _keeps_last(call, x):
        layout = Layout.TRANSPOSED
    read = None if x.byte == function_of(function).inputs * x.numel * x.dtype.byte else x.byte
    write = sum(t.byte for t in call.outs)
    return Elementwise(function, max(x.numel, 1), dtype=x.dtype, layout=layout, read=read, write=write)


def _keeps_last(call: Call, x: Tensor) -> bool:
    """Whether a reduction over named dimensions leaves the innermost alone, so that neighbours are not added up."""
    axes = next((v for v in call.args if isinstance(v, (list, tuple)) and v), None)
    whole = axes is not None and all(isinstance(axis, int) for axis in axes)
    if axes is None or not whole or not x.shape or x.strides[-1] != 1:
        return False
    return len(x.shape) - 1 not in {axis % len(x.shape) for axis in axes}


def _gathered(call: Call) -> Operator:
    out = call.out
    index = sum(t.byte for t in call.inputs[1:])
    return Elementwise("gather", max(out.numel, 1), dtype=out.dtype, read=out.numel * out.dtype.byte + index)


def _embedding_backward(call: Call) -> list[Operator]:
    grad, index = call.inputs[0], call.inputs[1]
    fill = Elementwise("fill", call.out.numel, dtype=call.out.dtype)
    rows = grad.byte
    add = Elementwise("scatter_add", grad.numel, dtype=grad.dtype, read=2 * rows + index.byte, write=rows)
    return [fill, add]


def _scatter(call: Call) -> list[Operator]:
    source = max(call.inputs[1:], key=lambda t: t.byte)
    index = sum(t.byte for t in call.inputs[1:]) - source.byte
    n = max(source.numel, 1)
    op = Elementwise("scatter_add", n, dtype=call.out.dtype, read=2 * source.byte + index, write=source.byte)
    return (
        [op] if call.name.endswith("_") else [pointwise(Call("clone", tuple(call.inputs[:1]), call.outs), "copy"), op]
    )


def _slice_backward(call: Call) -> list[Operator]:
    grad = call.inputs[0]
    fill = Elementwise("fill", call.out.numel, dtype=call.out.dtype)
    return [fill, elementwise("copy", (grad,), _like(grad), grad.dtype, Layout.STRIDED)]


def _like(tensor: Tensor) -> Tensor:
    return Tensor(tensor.tape, tensor.shape, tensor.strides, tensor.dtype, tensor.storage)


def _mm(call: Call) -> list[Operator]:
    a, b = call.inputs[-2:]
    (m, k), n = a.shape, b.shape[-1]
    if not (m and n and k):
        return []
    bias = len(call.inputs) == 3
    vector = bias and prod(call.inputs[0].shape) == n
    turned = m > 1 and k > 1 and a.strides[0] == 1 != a.strides[1] and b.strides[-1] == 1
    op = Linear(m, n, k, bias=vector, dtype=call.math(a), out_dtype=call.wide, turned=turned)
    if bias and not vector:
        return [pointwise(Call("copy", tuple(call.inputs[:1]), call.outs), "copy"), op]
    return [op]


def _bmm(call: Call) -> list[Operator]:
    a, b = call.inputs[-2:]
    (size, m, k), n = a.shape, b.shape[-1]
    op = Bmm(size, m, n, k, dtype=call.math(a), out_dtype=call.wide)
    if len(call.inputs) == 3:
        return [pointwise(Call("copy", tuple(call.inputs[:1]), call.outs), "copy"), op]
    return [op]


def _grouped_mm(call: Call) -> list[Operator]:
    """Experts' products in one launch: groups share the rows evenly, as far as shapes can tell."""
    a, b = call.inputs[:2]
    if len(a.shape) == 2 and len(b.shape) == 3:
        groups, k, n = b.shape
        rows = max(a.shape[0] // groups, 1)
        return [Bmm(groups, rows, n, k, dtype=call.math(a))]
    k, n = a.shape[-1], b.shape[-1]
    groups = call.out.shape[0]
    return [Bmm(groups, a.shape[0], n, max(k // groups, 1), dtype=call.math(a))]


def _softmax(call: Call) -> list[Operator]:
    back = "backward" in call.name
    x = call.inputs[0]
    axis = next(v for v in call.args if isinstance(v, int) and not isinstance(v, bool))
    dim = x.shape[axis] if x.shape else 1
    out = None if call.out.dtype is x.dtype else call.out.dtype
    return [*_row_major(x), Softmax(max(x.numel // dim, 1), dim, dtype=x.dtype, out_dtype=out, backward=back)]


def _layer_norm(call: Call) -> list[Operator]:
    back = "backward" in call.name
    x = call.inputs[1] if back else call.inputs[0]
    shape = next(v for v in call.args if isinstance(v, (list, tuple)) and v and isinstance(v[0], int))
    dim = prod(shape)
    kind = RmsNorm if "rms" in call.name else LayerNorm
    return [*_row_major(x), kind(x.numel // dim, dim, dtype=x.dtype, backward=back)]


def _row_major(x: Tensor) -> list[Operator]:
    """Kernels over rows copy an input that does not lie in rows; PyTorch does so inside the call."""
    if x.is_contiguous:
        return []
    rows = Tensor(x.tape, x.shape, contiguous(x.shape), x.dtype, x.storage)
    return [elementwise("copy", (x,), rows, x.dtype, layout_of(x.shape, rows.strides, [(x.shape, x.strides)]))]


def _group_norm(call: Call) -> list[Operator]:
    """Each group of channels of each picture is a row."""
    back = "backward" in call.name
    x = call.inputs[1] if back else call.inputs[0]
    numbers = [v for v in call.args if isinstance(v, int) and not isinstance(v, bool)]
    batch, groups = numbers[0], numbers[3]
    rows = batch * groups
    return [*_row_major(x), LayerNorm(rows, x.numel // rows, dtype=x.dtype, backward=back)]


def _attention(call: Call) -> list[Operator]:
    back = "backward" in call.name
    q, k, v = call.inputs[1:4] if back else call.inputs[:3]
    batch, heads, q_len, dim = q.shape
    flags = [value for value in call.args if isinstance(value, bool)]
    causal = bool(flags and (flags[-1] if "efficient" in call.name else flags[0]))
    v_dim = None if v.shape[-1] == dim else v.shape[-1]
    place = next((places[back] for name, places in _DROPOUT.items() if name in call.name), 4)
    chance = call.args[place] if place < len(call.args[: call.placed]) else 0.0
    dropped = isinstance(chance, float) and chance > 0.0
    op = Attention(
        batch, heads, k.shape[1], q_len, k.shape[2], dim, causal=causal, v_head_dim=v_dim, backward=back,
        dropout=dropped, dtype=call.math(q),
    )  # fmt: skip
    return [op]


_DROPOUT = {"flash": (3, 10), "efficient": (5, 9), "cudnn": (5, 13)}  # place of the argument, forward and backward


def _convolution(call: Call) -> list[Operator]:
    x, weight, _, stride, padding, dilation, transposed, _, groups = call.args[:9]
    out = call.out
    op = _conv_operator(call, x, weight, out, stride, padding, dilation, transposed, groups, "forward")
    bias = call.args[2]
    if bias is None:
        return [op]
    return [op, elementwise("add", (out, bias), out, out.dtype, Layout.BROADCAST, (prod(out.shape[:2]), None))]


def _convolution_backward(call: Call) -> list[Operator]:
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args[:11]
    args = (x, weight, grad, stride, padding, dilation, transposed, groups)
    ops: list[Operator] = []
    if mask[0]:
        ops.append(_conv_operator(call, *args, "dgrad"))
    if mask[1]:
        ops.append(_conv_operator(call, *args, "wgrad"))
    if mask[2]:
        ops.append(_reduction(Call("sum", (grad,), (call.outs[-1],)), "sum"))
    return ops


def _conv_operator(
    call: Call, x: Tensor, weight: Tensor, out: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, groups: int, direction: str,
) -> Conv2d:  # fmt: skip
    """A picture or a signal (one row high); a transposed convolution is the gradient of a plain one.

    Over three dimensions, each output slice is a picture whose channels are the slices it sees: the
    arithmetic is exact, the image is read once a slice.
    """
    if transposed:
        x, out = out, x
        direction = {"forward": "dgrad", "dgrad": "forward", "wgrad": "wgrad"}[direction]
    n, c = x.shape[:2]
    if len(x.shape) == 5:
        n, c = n * out.shape[2], c * weight.shape[2]
    k, (r, s) = weight.shape[0], _two(weight.shape[2:], 1)
    h, w = _two(x.shape[2:], 1)
    (step, step_w), (pad, pad_w) = _two(stride, 1), _two(padding, 0)
    return Conv2d(
        n, c, k, h, w, r, s, step, pad, groups, dilation[-1], dtype=call.math(x), direction=direction,
        stride_w=None if step_w == step else step_w, padding_w=None if pad_w == pad else pad_w,
    )  # fmt: skip


def _two(sizes: Sequence[int], first: int) -> tuple[int, int]:
    """Rows and columns; a signal has ``first`` row."""
    if len(sizes) == 1:
        return first, sizes[0]
    return sizes[-2], sizes[-1]


def _batch_norm(call: Call) -> list[Operator]:
    back = "backward" in call.name
    x = call.inputs[1] if back else call.inputs[0]
    last = len(x.shape) > 2 and x.strides[1] == 1 != x.shape[1]
    layout = Layout.TRANSPOSED if last else Layout.CONTIGUOUS
    training = "no_training" not in call.name and True in call.args
    function = "batchnorm_grad" if back else "batchnorm_train" if training else "batchnorm"
    read = 4 * call.inputs[0].byte if back else None
    pixels = prod(x.shape[2:])
    return [Elementwise(function, x.numel, dtype=x.dtype, layout=layout, read=read, rows=x.shape[1], run=pixels)]


def _pool(call: Call) -> list[Operator]:
    if "backward" in call.name:
        grad = call.inputs[0]
        read = grad.byte + sum(t.byte for t in call.inputs[2:])
        planes = prod(call.out.shape[:-2])
        return [Elementwise("pool_grad", call.out.numel, dtype=grad.dtype, read=read, rows=planes)]
    x = call.inputs[0]
    write = sum(t.byte for t in call.outs)
    return [Elementwise("pool", x.numel, dtype=x.dtype, write=write, rows=prod(x.shape[:-2]))]


def _dropout(call: Call) -> list[Operator]:
    x = call.inputs[0]
    return [Elementwise("dropout", x.numel, dtype=x.dtype, write=sum(t.byte for t in call.outs))]


def _nll_loss(call: Call) -> list[Operator]:
    if "backward" in call.name:
        x, target = call.inputs[1:3]
        fill = Elementwise("fill", x.numel, dtype=x.dtype)
        return [fill, Elementwise("copy", target.numel, dtype=x.dtype, read=target.byte)]
    x, target = call.inputs[:2]
    read = target.numel * (x.dtype.byte + target.dtype.byte)
    return [Elementwise("gather", target.numel, dtype=x.dtype, read=read, write=call.out.byte)]


SPECIAL: dict[str, Callable[[Call], list[Operator]]] = {
    "mm": _mm,
    "addmm": _mm,
    "bmm": _bmm,
    "baddbmm": _bmm,
    "_grouped_mm": _grouped_mm,
    "grouped_mm": _grouped_mm,
    "pow": _pow,
    "gelu": _gelu,
    "gelu_backward": _gelu,
    "_to_copy": _cast,
    "copy_": _copy_into,
    "copy": _copy_into,
    "cat": _cat,
    "stack": _cat,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax,
    "_log_softmax_backward_data": _softmax,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "_fused_rms_norm_backward": _layer_norm,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm,
    "scaled_dot_product_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_cudnn_attention_backward": _attention,
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm,
    "max_pool2d_with_indices": _pool,
    "max_pool2d_with_indices_backward": _pool,
    "avg_pool2d": _pool,
    "avg_pool2d_backward": _pool,
    "_adaptive_avg_pool2d": _pool,
    "_adaptive_avg_pool2d_backward": _pool,
    "native_dropout": _dropout,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss,
    "embedding_dense_backward": _embedding_backward,
    "constant_pad_nd": _slice_backward,
    "slice_backward": _slice_backward,
    "select_backward": _slice_backward,
    "index_add": _scatter,
    "index_add_": _scatter,
    "scatter_add": _scatter,
    "scatter_add_": _scatter,
    "scatter": _scatter,
    "scatter_": _scatter,
    "index_put": _scatter,
    "index_put_": _scatter,
    "_index_put_impl_": _scatter,
}
