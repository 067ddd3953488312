"""Elementwise specs -> PyTorch calls: one function per form, one table of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wattcast.measure.kernels.operands import torch_dtype
from wattcast.measure.kernels.operators import Builder, Call
from wattcast.measure.kernels.spec import Spec

Apply = Callable[..., Any]


def build(builder: Builder, spec: Spec) -> Call:
    """The call for an elementwise spec; ``detail["form"]`` picks the shape of its operands."""
    form = spec.detail["form"]
    makers = {
        "contiguous": _contiguous,
        "strided": _strided,
        "broadcast": _broadcast,
        "transposed": _transposed,
        "reduce": _reduce,
        "gather": _gather,
    }
    width = torch_dtype(builder.torch, spec.operator["dtype"]).itemsize
    out = torch_dtype(builder.torch, spec.operator.get("out_dtype", spec.operator["dtype"])).itemsize
    n, inputs = spec.operator["n"], 2 if spec.operator["function"] in _BINARY else 1
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
    }
    return table[spec.operator["function"]]


_BINARY = ("add", "mul", "sub", "div", "maximum")


def _sizes(spec: Spec) -> tuple[str, int, int]:
    return spec.operator["dtype"], spec.detail["rows"], spec.detail["cols"]


def _contiguous(builder: Builder, spec: Spec) -> Callable[[], Any]:
    dtype, rows, cols = _sizes(spec)
    inputs = 2 if spec.operator["function"] in _BINARY else 1
    views = [builder.operands.take(dtype, rows, cols) for _ in range(inputs)]
    apply = _function(builder.torch, spec)
    return lambda: apply(*views)


def _strided(builder: Builder, spec: Spec) -> Callable[[], Any]:
    """Operands are column slices of tensors twice as wide, as q, k, v in one projection."""
    torch, (dtype, rows, cols) = builder.torch, _sizes(spec)
    function = spec.operator["function"]
    if function == "cat":
        left = max(cols // 2, 1)
        parts = [builder.operands.take(dtype, rows, 2 * side)[:, :side] for side in (left, cols - left)]
        return lambda: torch.cat(parts, dim=1)
    inputs = 2 if function in _BINARY else 1
    views = [builder.operands.take(dtype, rows, 2 * cols)[:, cols:] for _ in range(inputs)]
    apply = _function(torch, spec)
    return lambda: apply(*views)


def _broadcast(builder: Builder, spec: Spec) -> Callable[[], Any]:
    """One operand is a row (a bias) or a column (a scale per row)."""
    dtype, rows, cols = _sizes(spec)
    shape = (1, cols) if spec.detail["over"] == "rows" else (rows, 1)
    full = builder.operands.take(dtype, rows, cols)
    small = builder.operands.take(dtype, *shape)
    apply, function = _function(builder.torch, spec), spec.operator["function"]
    if function == "masked_fill":
        mask = small > 0
        return lambda: apply(full, mask)
    if function == "where":
        mask, other = small > 0, builder.operands.take(dtype, rows, cols)
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
