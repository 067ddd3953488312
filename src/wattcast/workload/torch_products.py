"""ATen calls with products in them -> operators: matrices, attention, convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from wattcast.workload.graph import Attention, Bmm, Conv2d, Layout, Linear, Operator
from wattcast.workload.pointwise import elementwise
from wattcast.workload.symbolic import Tensor
from wattcast.workload.torch_call import Call
from wattcast.workload.torch_pointwise import pointwise, reduction


def mm(call: Call) -> list[Operator]:
    """A matrix times a matrix, with a bias or onto another matrix."""
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


def bmm(call: Call) -> list[Operator]:
    """As many products as the batch has."""
    a, b = call.inputs[-2:]
    (size, m, k), n = a.shape, b.shape[-1]
    op = Bmm(size, m, n, k, dtype=call.math(a), out_dtype=call.wide)
    if len(call.inputs) == 3:
        return [pointwise(Call("copy", tuple(call.inputs[:1]), call.outs), "copy"), op]
    return [op]


def grouped_mm(call: Call) -> list[Operator]:
    """Experts' products in one launch: groups share the rows evenly, as far as shapes can tell."""
    a, b = call.inputs[:2]
    if len(a.shape) == 2 and len(b.shape) == 3:
        groups, k, n = b.shape
        rows = max(a.shape[0] // groups, 1)
        return [Bmm(groups, rows, n, k, dtype=call.math(a))]
    k, n = a.shape[-1], b.shape[-1]
    groups = call.out.shape[0]
    return [Bmm(groups, a.shape[0], n, max(k // groups, 1), dtype=call.math(a))]


def attention(call: Call) -> list[Operator]:
    """Fused attention, whichever kernel was asked for."""
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


def convolution(call: Call) -> list[Operator]:
    """A convolution, and its bias."""
    x, weight, _, stride, padding, dilation, transposed, _, groups = call.args[:9]
    out = call.out
    op = _conv_operator(call, x, weight, out, stride, padding, dilation, transposed, groups, "forward")
    bias = call.args[2]
    if bias is None:
        return [op]
    return [op, elementwise("add", (out, bias), out, out.dtype, Layout.BROADCAST, (prod(out.shape[:2]), None))]


def convolution_backward(call: Call) -> list[Operator]:
    """The gradients that are asked for: of the image, the weight, the bias."""
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args[:11]
    args = (x, weight, grad, stride, padding, dilation, transposed, groups)
    ops: list[Operator] = []
    if mask[0]:
        ops.append(_conv_operator(call, *args, "dgrad"))
    if mask[1]:
        ops.append(_conv_operator(call, *args, "wgrad"))
    if mask[2]:
        ops.append(reduction(Call("sum", (grad,), (call.outs[-1],)), "sum"))
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
