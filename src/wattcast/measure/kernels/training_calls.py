"""Elementwise forms with shapes of their own: caches, sums over rows, batch norm, pooling, dropout, the optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wattcast.measure.kernels.backward_calls import DROPPED
from wattcast.measure.kernels.operands import torch_dtype
from wattcast.measure.kernels.spec import Spec

if TYPE_CHECKING:
    from wattcast.measure.kernels.operators import Builder

Run = Callable[[], Any]
_MOST_HEADS, _HEAD = 64, 128
_TENSORS = 16  # of a list of parameters


def columns(builder: Builder, spec: Spec) -> Run:
    """A sum over rows, so that neighbours in memory belong to different results: the gradient of a bias."""
    d = spec.detail
    view = builder.operands.take(spec.operator["dtype"], d["cols"], d["rows"])
    reduce = {"sum": view.sum, "mean": view.mean, "max": view.amax}[spec.operator["function"]]
    return lambda: reduce(0)


def append(builder: Builder, spec: Spec) -> Run:
    """A cache and what is new behind it, (batch, heads, length, dim); strided: new is a slice of one projection."""
    torch, d, dtype = builder.torch, spec.detail, spec.operator["dtype"]
    rows, last = d["rows"], d["last"]
    heads = next(h for h in range(min(_MOST_HEADS, rows), 0, -1) if rows % h == 0)
    batch = rows // heads
    past = (d["cols"] - last) // last
    old = builder.operands.take(dtype, batch, heads, past, last)
    if spec.layout == "strided":
        whole = builder.operands.take(dtype, batch, 1, 3 * heads * last)[..., heads * last : 2 * heads * last]
        new = whole.view(batch, 1, heads, last).transpose(1, 2)
    else:
        new = builder.operands.take(dtype, batch, heads, 1, last)
    return lambda: torch.cat([old, new], dim=2)


def join(builder: Builder, spec: Spec) -> Run:
    """Parts of like size side by side; one part alone is a cache's first, keys as a projection leaves them."""
    torch, d, dtype = builder.torch, spec.detail, spec.operator["dtype"]
    rows, cols, last = d["rows"], d["cols"], d["last"]
    if last < cols:
        parts = [builder.operands.take(dtype, rows, size) for size in (cols - last, last)]
        return lambda: torch.cat(parts, dim=1)
    heads = next(h for h in range(min(_MOST_HEADS, rows), 0, -1) if rows % h == 0)
    dim = min(cols & -cols, _HEAD)
    new = builder.operands.take(dtype, rows // heads, cols // dim, heads, dim).transpose(1, 2)
    nothing = new.new_empty(0)  # as a cache begins; with it PyTorch takes the kernel that joins, alone it would copy
    return lambda: torch.cat([nothing, new], dim=2)


def scatter(builder: Builder, spec: Spec) -> Run:
    """Gradient of a table of embeddings as tall as the pick."""
    torch, d = builder.torch, spec.detail
    grad = builder.operands.take(spec.operator["dtype"], d["rows"], d["cols"])
    index = torch.randint(0, d["rows"], (d["rows"],), device=grad.device)
    back = torch.ops.aten.embedding_dense_backward
    return lambda: back(grad, index, d["rows"], -1, False)


def batch_norm(builder: Builder, spec: Spec) -> Run:
    """Batch norm by running statistics, by the batch's own, or its gradient; as PyTorch chooses the library."""
    torch, d, dtype = builder.torch, spec.detail, spec.operator["dtype"]
    aten, function = torch.ops.aten, spec.operator["function"]
    side, across = d["high"], d["wide"]
    shape = d["pictures"], d["channels"], side, across
    x = builder.image(dtype, *shape, spec.layout == "nhwc")
    weight, bias = (builder.operands.take(dtype, d["channels"]) for _ in range(2))
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    training = function != "batchnorm"
    given = x, weight, bias, mean, variance, training, 0.1, 1e-5, torch.backends.cudnn.enabled
    if function != "batchnorm_grad":
        return lambda: aten._batch_norm_impl_index(*given)[0]
    _, kept_mean, kept_scale, reserve, impl = aten._batch_norm_impl_index(*given)
    grad = builder.image(dtype, *shape, spec.layout == "nhwc")
    back = aten._batch_norm_impl_index_backward
    every = [True, True, True]
    return lambda: back(
        impl, x, grad, weight, mean, variance, kept_mean, kept_scale, True, 1e-5, every, reserve
    )[0]  # fmt: skip


def pool(builder: Builder, spec: Spec) -> Run:
    """The largest of each window with its place, or its gradient."""
    d, dtype = spec.detail, spec.operator["dtype"]
    aten = builder.torch.ops.aten
    x = builder.image(dtype, 1, d["planes"], d["side"], d["side"], False)
    size, stride, padding = ([d[name]] * 2 for name in ("size", "stride", "padding"))
    forward = aten.max_pool2d_with_indices
    if spec.operator["function"] == "pool":
        return lambda: forward(x, size, stride, padding)[0]
    out, places = forward(x, size, stride, padding)
    grad = builder.operands.take(dtype, *out.shape)
    back = aten.max_pool2d_with_indices_backward
    return lambda: back(grad, x, size, stride, padding, [1, 1], False, places)


def dropout(builder: Builder, spec: Spec) -> Run:
    """Random zeros with the mask beside the result, or the gradient through that mask."""
    torch, d = builder.torch, spec.detail
    x = builder.operands.take(spec.operator["dtype"], d["rows"], d["cols"])
    aten = torch.ops.aten
    if spec.operator["function"] == "dropout":
        return lambda: aten.native_dropout(x, DROPPED, True)
    mask = x > -1.28  # nine in ten of a normal distribution
    return lambda: aten.native_dropout_backward(x, mask, 1.0 / (1.0 - DROPPED))


def adamw(builder: Builder, spec: Spec) -> Run:
    """One fused AdamW step over a list of tensors; copies, since it writes to what it reads."""
    torch, n = builder.torch, spec.operator["n"]
    dtype = torch_dtype(torch, spec.operator["dtype"])
    sizes = [n // _TENSORS + (1 if i < n % _TENSORS else 0) for i in range(min(_TENSORS, n))]
    drawn = [[builder.operands.take(spec.operator["dtype"], size).clone() for size in sizes] for _ in range(4)]
    values, gradients, first, second = drawn
    second = [moment.abs() for moment in second]
    steps = [torch.ones((), dtype=torch.float32, device=value.device) for value in values]
    lists: tuple[list[Any], ...] = (values, gradients, first, second, [], steps)
    options = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    step = torch.ops.aten._fused_adamw_
    assert all(value.dtype is dtype for value in values)

    def run() -> Any:
        step(*lists, **options, amsgrad=False, maximize=False)
        return values

    return run


FORMS: dict[str, Callable[[Builder, Spec], Run]] = {
    "columns": columns,
    "append": append,
    "join": join,
    "scatter": scatter,
    "batchnorm": batch_norm,
    "pool": pool,
    "dropout": dropout,
    "adamw": adamw,
}
