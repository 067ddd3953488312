"""Elementwise specs -> PyTorch calls: one function per form, one table of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wattcast.measure.kernels.operands import torch_dtype
from wattcast.measure.kernels.operators import Builder, Call
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.kernels.training_calls import FORMS

Apply = Callable[..., Any]


def build(builder: Builder, spec: Spec) -> Call:
    """The call for an elementwise spec; ``detail["form"]`` picks the shape of its operands."""
    form = spec.detail["form"]
    makers: dict[str, Callable[[Builder, Spec], Callable[[], Any]]] = {
        **FORMS,
        "contiguous": _contiguous,
        "strided": _strided,
        "broadcast": _broadcast,
        "transposed": _transposed,
        "reduce": _reduce,
        "gather": _gather,
    }
    width = torch_dtype(builder.torch, spec.operator["dtype"]).itemsize
    out = torch_dtype(builder.torch, spec.operator.get("out_dtype", spec.operator["dtype"])).itemsize
    n, inputs = spec.operator["n"], _inputs(spec)
    byte = spec.operator.get("read", inputs * n * width) + spec.operator.get("write", n * out)
    sets = builder.sets(spec, byte, spec.rotated == "all")
    runs = [makers[form](builder, spec) for _ in range(sets)]
    return Call(lambda i: runs[i % sets](), sets, 0, int(byte))


def _function(torch: Any, spec: Spec) -> Apply:
    functional = torch.nn.functional
    out = torch_dtype(torch, spec.operator.get("out_dtype", spec.operator["dtype"]))
    table: dict[str, Apply] = {
        "scale": lambda x: x * 0.125,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "relu": functional.relu,
        "tanh": torch.tanh,
        "exp": torch.exp,
        "sigmoid": torch.sigmoid,
        "neg": torch.neg,
        "square": torch.square,
        "rsqrt": torch.rsqrt,
        "pow": lambda x: x.pow(3),
        "add": torch.add,
        "mul": torch.mul,
        "sub": torch.sub,
        "div": torch.div,
        "maximum": torch.maximum,
        "cast": lambda x: x.to(out),
        "copy": lambda x: x.clone(memory_format=torch.contiguous_format),
        "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.mean(-1),
        "max": lambda x: x.amax(-1),
        "masked_fill": lambda x, mask: x.masked_fill(mask, 0.0),
        "where": lambda x, y, mask: torch.where(mask, x, y),
        "shift": lambda x: x + 0.5,
        "cube": lambda x: x**3,
        "sqrt": torch.sqrt,
        "log": torch.log,
        "abs": torch.abs,
        "sin": torch.sin,
        "cos": torch.cos,
        "hardswish": functional.hardswish,
        "fill": lambda x: torch.full_like(x, 0.5),
        "relu_grad": lambda g, y: torch.ops.aten.threshold_backward(g, y, 0),
        "tanh_grad": torch.ops.aten.tanh_backward,
        "sigmoid_grad": torch.ops.aten.sigmoid_backward,
        "gelu_grad": torch.ops.aten.gelu_backward,
        "gelu_tanh_grad": lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
        "silu_grad": torch.ops.aten.silu_backward,
        "hardswish_grad": torch.ops.aten.hardswish_backward,
    }
    return table[spec.operator["function"]]


_BINARY = ("add", "mul", "sub", "div", "maximum")
GRADIENTS = ("relu_grad", "tanh_grad", "sigmoid_grad", "gelu_grad", "gelu_tanh_grad", "silu_grad", "hardswish_grad")
MORE_UNARY = ("shift", "cube", "sqrt", "log", "abs", "sin", "cos", "hardswish", "fill")


def _inputs(spec: Spec) -> int:
    return 2 if spec.operator["function"] in (*_BINARY, *GRADIENTS) else 1


def _sizes(spec: Spec) -> tuple[str, int, int]:
    return spec.operator["dtype"], spec.detail["rows"], spec.detail["cols"]


def _contiguous(builder: Builder, spec: Spec) -> Callable[[], Any]:
    dtype, rows, cols = _sizes(spec)
    views = [builder.operands.take(dtype, rows, cols) for _ in range(_inputs(spec))]
    apply = _function(builder.torch, spec)
    return lambda: apply(*views)


def _strided(builder: Builder, spec: Spec) -> Callable[[], Any]:
    """Operands are column slices of tensors twice as wide, as q, k, v in one projection."""
    torch, (dtype, rows, cols) = builder.torch, _sizes(spec)
    function = spec.operator["function"]
    if function == "cat":
        left = cols - spec.detail["last"] if "last" in spec.detail else max(cols // 2, 1)
        parts = [builder.operands.take(dtype, rows, 2 * side)[:, :side] for side in (left, cols - left)]
        return lambda: torch.cat(parts, dim=1)
    views = [builder.operands.take(dtype, rows, 2 * cols)[:, cols:] for _ in range(_inputs(spec))]
    apply = _function(torch, spec)
    return lambda: apply(*views)


def _broadcast(builder: Builder, spec: Spec) -> Callable[[], Any]:
    """One operand is a row (a bias), several rows that each serve many, or a column (a scale per row)."""
    dtype, rows, cols = _sizes(spec)
    groups = spec.detail.get("groups", 1)
    whole = (groups, rows // groups, cols) if groups > 1 else (rows, cols)
    by_row = (rows, 1) if groups == 1 else (1, rows // groups, 1)
    by_column = (1, cols) if groups == 1 else (groups, 1, cols)
    shape = by_row if spec.detail["over"] == "cols" else by_column
    small = builder.operands.take(dtype, *shape)
    apply, function = _function(builder.torch, spec), spec.operator["function"]
    if _inputs(spec) == 1 and function not in ("masked_fill", "where"):  # a small tensor spread out
        spread = small.expand(whole)
        return lambda: apply(spread)
    full = builder.operands.take(dtype, *whole)
    if function == "masked_fill":
        mask = small > 0
        return lambda: apply(full, mask)
    if function == "where":
        mask, other = small > 0, builder.operands.take(dtype, *whole)
        return lambda: apply(full, other, mask)
    return lambda: apply(full, small)


def _transposed(builder: Builder, spec: Spec) -> Callable[[], Any]:
    """The first operand walks memory across its rows; with ``inner`` > 1 runs of that many stay together."""
    dtype, rows, cols = _sizes(spec)
    inner = spec.detail["inner"]
    first = builder.operands.take(dtype, cols, rows // inner, inner).transpose(0, 1)
    apply = _function(builder.torch, spec)
    if spec.operator["function"] in _BINARY:
        second = builder.operands.take(dtype, rows // inner, cols, inner)
        return lambda: apply(first, second)
    if spec.operator["function"] == "cast":
        contiguous = builder.torch.contiguous_format
        out = torch_dtype(builder.torch, spec.operator["out_dtype"])
        return lambda: first.to(out, memory_format=contiguous)
    return lambda: apply(first)


def _reduce(builder: Builder, spec: Spec) -> Callable[[], Any]:
    dtype, rows, cols = _sizes(spec)
    view = builder.operands.take(dtype, rows, cols)
    apply = _function(builder.torch, spec)
    return lambda: apply(view)


def _gather(builder: Builder, spec: Spec) -> Callable[[], Any]:
    """Rows picked by a random index from a table at least as tall as the pick."""
    torch, (dtype, rows, cols) = builder.torch, _sizes(spec)
    table = builder.operands.take(dtype, rows, cols)
    index = torch.randint(0, rows, (rows,), device=table.device)
    return lambda: torch.nn.functional.embedding(index, table)
