"""ATen calls without a product in them -> operators: functions of elements, reductions, moves of data."""

from __future__ import annotations

from collections.abc import Sequence

from wattcast.workload.elementwise import function_of
from wattcast.workload.functional import joined
from wattcast.workload.graph import Elementwise, Layout, Operator
from wattcast.workload.pointwise import elementwise
from wattcast.workload.strides import layout_of
from wattcast.workload.symbolic import Tensor
from wattcast.workload.torch_call import Call


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


def power(call: Call) -> list[Operator]:
    """A power, the common exponents under their own names."""
    exponent = call.args[1] if len(call.args) > 1 else None
    plain = exponent if isinstance(exponent, (int, float)) else 0.0
    function = {1.0: "copy", 2.0: "square", 3.0: "cube", 0.5: "sqrt", -0.5: "rsqrt"}.get(float(plain), "pow")
    return [pointwise(call, function)]


def gelu(call: Call) -> list[Operator]:
    """Either form of it, and its gradient."""
    tanh = "tanh" in call.args
    back = call.name == "gelu_backward"
    return [pointwise(call, ("gelu_tanh" if tanh else "gelu") + ("_grad" if back else ""))]


def cast(call: Call) -> list[Operator]:
    """A change of format, or of nothing but place."""
    function = "copy" if call.inputs[0].dtype is call.out.dtype else "cast"
    return [pointwise(call, function)]


def copy_into(call: Call) -> list[Operator]:
    """Into a tensor that is there."""
    source, out = call.inputs[-1], call.inputs[0]
    function = "copy" if source.dtype is out.dtype else "cast"
    whole = Call("copy", (source,), (out,))
    return [pointwise(whole, function)]


def cat(call: Call) -> list[Operator]:
    """Tensors joined along a dimension, or along a new one."""
    parts = [t for t in call.inputs if t.numel]
    plain = all(t.is_contiguous for t in parts)
    layout = Layout.CONTIGUOUS if plain else Layout.STRIDED
    axis = next((v for v in call.args if isinstance(v, int) and not isinstance(v, bool)), 0)
    extents = joined(parts, axis % max(len(parts[0].shape), 1)) if parts else (None, None)
    return [elementwise("cat", parts, call.out, call.out.dtype, layout, extents)]


def reduction(call: Call, function: str) -> Operator:
    """Over some dimensions or all."""
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


def gathered(call: Call) -> Operator:
    """Rows by index."""
    out = call.out
    index = sum(t.byte for t in call.inputs[1:])
    return Elementwise("gather", max(out.numel, 1), dtype=out.dtype, read=out.numel * out.dtype.byte + index)


def embedding_backward(call: Call) -> list[Operator]:
    """Rows added up where they came from."""
    grad, index = call.inputs[0], call.inputs[1]
    fill = Elementwise("fill", call.out.numel, dtype=call.out.dtype)
    rows = grad.byte
    add = Elementwise("scatter_add", grad.numel, dtype=grad.dtype, read=2 * rows + index.byte, write=rows)
    return [fill, add]


def scatter(call: Call) -> list[Operator]:
    """Elements by index into a tensor, or into its copy."""
    source = max(call.inputs[1:], key=lambda t: t.byte)
    index = sum(t.byte for t in call.inputs[1:]) - source.byte
    n = max(source.numel, 1)
    op = Elementwise("scatter_add", n, dtype=call.out.dtype, read=2 * source.byte + index, write=source.byte)
    return (
        [op] if call.name.endswith("_") else [pointwise(Call("clone", tuple(call.inputs[:1]), call.outs), "copy"), op]
    )


def slice_backward(call: Call) -> list[Operator]:
    """Zeros, and the part that was taken out."""
    grad = call.inputs[0]
    fill = Elementwise("fill", call.out.numel, dtype=call.out.dtype)
    return [fill, elementwise("copy", (grad,), _like(grad), grad.dtype, Layout.STRIDED)]


def _like(tensor: Tensor) -> Tensor:
    return Tensor(tensor.tape, tensor.shape, tensor.strides, tensor.dtype, tensor.storage)


def dropout(call: Call) -> list[Operator]:
    """With the mask it keeps."""
    x = call.inputs[0]
    return [Elementwise("dropout", x.numel, dtype=x.dtype, write=sum(t.byte for t in call.outs))]


def nll_loss(call: Call) -> list[Operator]:
    """One element a row, or the gradient: zeros and one element a row."""
    if "backward" in call.name:
        x, target = call.inputs[1:3]
        fill = Elementwise("fill", x.numel, dtype=x.dtype)
        return [fill, Elementwise("copy", target.numel, dtype=x.dtype, read=target.byte)]
    x, target = call.inputs[:2]
    read = target.numel * (x.dtype.byte + target.dtype.byte)
    return [Elementwise("gather", target.numel, dtype=x.dtype, read=read, write=call.out.byte)]
