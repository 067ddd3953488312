"""Build the PyTorch calls of elementwise operators: one function per form of operands, one table of functions.

Operands are views of large pools of values that are drawn once, because drawing and allocating for each row would
cost more than measuring it. Each number format has one pool; views are handed out in order, aligned to 512 bytes, and
the pool starts over with the next row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wattcast.core.errors import BadInput, check_names
from wattcast.measure.campaigns.kernel_plan import BINARY, GRADIENTS, OperatorSpec

PATTERNS = ("random", "zeros", "ones", "relu", "tiny", "uniform")
_ALIGN_BYTE = 512
_CHUNK = 2**28


class OperandPools:
    """Pools of one pattern of values on one device."""

    def __init__(self, torch: Any, device: str, pool_byte: dict[str, int]) -> None:
        self._torch, self.device = torch, device
        self.pattern = ""
        self._next: dict[str, int] = {}
        formats = {name: torch_dtype(torch, name) for name in pool_byte}
        self._pools = {
            name: torch.empty(byte // formats[name].itemsize, dtype=formats[name], device=device)
            for name, byte in pool_byte.items()
        }

    def fill(self, pattern: str) -> None:
        """Fill all pools with new values of ``pattern``.

        ``random`` is standard normal, ``relu`` the same with its negatives at zero. ``tiny`` is uniform between
        -0.001 and 0.001, as an engine's dummy weights are; ``uniform`` lies between -1 and 1, as these weights do
        once they have been quantized with a scale.
        """
        check_names("data pattern", pattern, PATTERNS, "")
        if pattern == self.pattern:
            return
        self._torch.manual_seed(1)
        for pool in self._pools.values():
            for start in range(0, len(pool), _CHUNK):
                part = pool[start : start + _CHUNK]
                part.copy_(self._draw(pattern, len(part)))
        self.pattern = pattern

    def reset(self) -> None:
        """Start over; views handed out before may share memory with later ones."""
        self._next = dict.fromkeys(self._pools, 0)

    def take(self, dtype: str, *shape: int) -> Any:
        """Return a contiguous view of ``shape``."""
        name = "fp32" if dtype == "tf32" else dtype
        pool, start, size = self._pools[name], self._next[name], math.prod(shape)
        step = _ALIGN_BYTE // pool.element_size()
        end = start + size
        if end > len(pool):
            raise BadInput(f"operands of {end * pool.element_size()} bytes do not fit the {dtype} pool.")
        self._next[name] = -(-end // step) * step
        return pool[start : start + size].view(shape)

    def _draw(self, pattern: str, count: int) -> Any:
        torch = self._torch
        if pattern == "zeros":
            return torch.zeros(count, dtype=torch.bfloat16, device=self.device)
        if pattern == "ones":
            return torch.ones(count, dtype=torch.bfloat16, device=self.device)
        if pattern in ("tiny", "uniform"):
            side = 1e-3 if pattern == "tiny" else 1.0
            return torch.empty(count, dtype=torch.float32, device=self.device).uniform_(-side, side)
        values = torch.randn(count, dtype=torch.float32, device=self.device)
        return values.clamp_(min=0.0) if pattern == "relu" else values


def torch_dtype(torch: Any, name: str) -> Any:
    """Return PyTorch's number format of a Wattcast one."""
    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp8": torch.float8_e4m3fn,
    }[name]


DROPPED = 0.1  # share of weights or activations, as models train
L2_TIMES = 3.0
MOST_SETS = 256


@dataclass(frozen=True)
class OperatorCall:
    """One operator, ready to run; outputs are returned and may be dropped."""

    run: Callable[[int], Any]
    sets: int  # operand sets that ``run`` cycles through
    fixed_byte: int  # operands and outputs all copies share
    set_byte: int  # what each set adds

    def footprint_byte(self, copies: int) -> int:
        """Return the bytes that ``copies`` copies touch."""
        return self.fixed_byte + self.set_byte * min(self.sets, copies)


@dataclass(frozen=True)
class CallBuilder:
    """What building a call needs: PyTorch, the pools and the size of the L2."""

    torch: Any
    operands: OperandPools
    l2_byte: float

    def sets(self, spec: OperatorSpec, byte: float, rotate: bool) -> int:
        """Return how many operand sets of ``byte`` each exceed three times the L2; one when not rotating."""
        if not rotate:
            return 1
        return max(1, min(math.ceil(L2_TIMES * self.l2_byte / max(byte, 1.0)), MOST_SETS))

    def image(self, dtype: str, n: int, c: int, h: int, w: int, channels_last: bool) -> Any:
        """Return (pictures, channels, rows, columns) with channels outermost or innermost in memory."""
        if channels_last:
            return self.operands.take(dtype, n, h, w, c).permute(0, 3, 1, 2)
        return self.operands.take(dtype, n, c, h, w)

    def places(self, o: dict[str, Any]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return stride, padding and dilation of a convolution's rows and columns, and the sides of its output."""
        stride, wide = [o["stride"], o.get("stride_w") or o["stride"]], o.get("padding_w")
        padding, dilation = [o["padding"], o["padding"] if wide is None else wide], 2 * [o.get("dilation", 1)]
        sides = zip((o["h"], o["w"]), (o["r"], o["s"]), stride, padding, dilation, strict=True)
        out = [(side + 2 * pad - reach * (taps - 1) - 1) // step + 1 for side, taps, step, pad, reach in sides]
        return stride, padding, dilation, out

    def heads(self, spec: OperatorSpec, batch: int, heads: int, length: int, dim: int) -> Any:
        """Return (batch, heads, length, dim) as it comes from a projection (bshd in memory) or a cache (bhsd)."""
        if spec.layout == "bhsd":
            return self.operands.take(spec.operator["dtype"], batch, heads, length, dim)
        return self.operands.take(spec.operator["dtype"], batch, length, heads, dim).transpose(1, 2)


Run = Callable[[], Any]
_MOST_HEADS, _HEAD = 64, 128
_TENSORS = 16  # of a list of parameters


def _sum_columns(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Sum over rows, so that neighbours in memory belong to different results, as in the gradient of a bias."""
    d = spec.detail
    view = builder.operands.take(spec.operator["dtype"], d["cols"], d["rows"])
    reduce = {"sum": view.sum, "mean": view.mean, "max": view.amax}[spec.operator["function"]]
    return lambda: reduce(0)


def _append_cache(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Put new keys behind a cache, (batch, heads, length, dim); strided: the new ones are a slice of a projection."""
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


def _join_parts(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Join parts of like size; one part alone is what a cache begins with, keys as a projection leaves them."""
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


def _scatter_gradient(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Compute the gradient of a table of embeddings that is as tall as the pick."""
    torch, d = builder.torch, spec.detail
    grad = builder.operands.take(spec.operator["dtype"], d["rows"], d["cols"])
    index = torch.randint(0, d["rows"], (d["rows"],), device=grad.device)
    back = torch.ops.aten.embedding_dense_backward
    return lambda: back(grad, index, d["rows"], -1, False)


def _batch_norm(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Run batch norm by running statistics, by the batch's own, or its gradient, by the library PyTorch chooses."""
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


def _pool_windows(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Take the largest of each window with its place, or compute the gradient."""
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


def _drop_elements(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Set random elements to zero and write the mask too, or compute the gradient through that mask."""
    torch, d = builder.torch, spec.detail
    x = builder.operands.take(spec.operator["dtype"], d["rows"], d["cols"])
    aten = torch.ops.aten
    if spec.operator["function"] == "dropout":
        return lambda: aten.native_dropout(x, DROPPED, True)
    mask = x > -1.28  # nine in ten of a normal distribution
    return lambda: aten.native_dropout_backward(x, mask, 1.0 / (1.0 - DROPPED))


def _step_adamw(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Run one fused AdamW step over a list of tensors, which are copies, since it writes to what it reads."""
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


Apply = Callable[..., Any]


def build_elementwise(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Build the call of an elementwise operator; ``detail["form"]`` chooses the shape of its operands."""
    width = torch_dtype(builder.torch, spec.operator["dtype"]).itemsize
    out = torch_dtype(builder.torch, spec.operator.get("out_dtype", spec.operator["dtype"])).itemsize
    n, inputs = spec.operator["n"], _count_inputs(spec)
    byte = spec.operator.get("read", inputs * n * width) + spec.operator.get("write", n * out)
    sets = builder.sets(spec, byte, spec.rotated == "all")
    runs = [FORMS[spec.detail["form"]](builder, spec) for _ in range(sets)]
    return OperatorCall(lambda i: runs[i % sets](), sets, 0, int(byte))


def _find_function(torch: Any, spec: OperatorSpec) -> Apply:
    """Return PyTorch's function; most have our name, and gradients that of ATen's backward functions."""
    functional, aten, name = torch.nn.functional, torch.ops.aten, spec.operator["function"]
    out = torch_dtype(torch, spec.operator.get("out_dtype", spec.operator["dtype"]))
    others: dict[str, Apply] = {
        "scale": lambda x: x * 0.125,
        "shift": lambda x: x + 0.5,
        "pow": lambda x: x.pow(3),
        "cube": lambda x: x**3,
        "fill": lambda x: torch.full_like(x, 0.5),
        "cast": lambda x: x.to(out),
        "copy": lambda x: x.clone(memory_format=torch.contiguous_format),
        "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.mean(-1),
        "max": lambda x: x.amax(-1),
        "masked_fill": lambda x, mask: x.masked_fill(mask, 0.0),
        "where": lambda x, y, mask: torch.where(mask, x, y),
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "gelu_tanh_grad": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
        "relu_grad": lambda g, y: aten.threshold_backward(g, y, 0),
    }
    if name in others:
        return others[name]
    found: Apply = (
        getattr(aten, name.removesuffix("_grad") + "_backward")
        if name.endswith("_grad")
        else getattr(torch, name, None) or getattr(functional, name)
    )
    return found


def _count_inputs(spec: OperatorSpec) -> int:
    return 2 if spec.operator["function"] in (*BINARY, *GRADIENTS) else 1


def _read_sizes(spec: OperatorSpec) -> tuple[str, int, int]:
    return spec.operator["dtype"], spec.detail["rows"], spec.detail["cols"]


def _call_contiguous(builder: CallBuilder, spec: OperatorSpec) -> Run:
    dtype, rows, cols = _read_sizes(spec)
    views = [builder.operands.take(dtype, rows, cols) for _ in range(_count_inputs(spec))]
    apply = _find_function(builder.torch, spec)
    return lambda: apply(*views)


def _call_strided(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Take operands that are column slices of tensors twice as wide, as q, k and v in one projection are."""
    torch, (dtype, rows, cols) = builder.torch, _read_sizes(spec)
    function = spec.operator["function"]
    if function == "cat":
        left = cols - spec.detail["last"] if "last" in spec.detail else max(cols // 2, 1)
        parts = [builder.operands.take(dtype, rows, 2 * side)[:, :side] for side in (left, cols - left)]
        return lambda: torch.cat(parts, dim=1)
    views = [builder.operands.take(dtype, rows, 2 * cols)[:, cols:] for _ in range(_count_inputs(spec))]
    apply = _find_function(torch, spec)
    return lambda: apply(*views)


def _call_broadcast(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Take one operand that is a row (a bias), several rows that each serve many, or a column (a scale per row)."""
    dtype, rows, cols = _read_sizes(spec)
    groups = spec.detail.get("groups", 1)
    whole = (groups, rows // groups, cols) if groups > 1 else (rows, cols)
    by_row = (rows, 1) if groups == 1 else (1, rows // groups, 1)
    by_column = (1, cols) if groups == 1 else (groups, 1, cols)
    shape = by_row if spec.detail["over"] == "cols" else by_column
    small = builder.operands.take(dtype, *shape)
    apply, function = _find_function(builder.torch, spec), spec.operator["function"]
    if _count_inputs(spec) == 1 and function not in ("masked_fill", "where"):  # a small tensor spread out
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


def _call_transposed(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Walk over the first operand across its rows; with ``inner`` > 1 runs of that many elements stay together."""
    dtype, rows, cols = _read_sizes(spec)
    inner = spec.detail["inner"]
    first = builder.operands.take(dtype, cols, rows // inner, inner).transpose(0, 1)
    apply = _find_function(builder.torch, spec)
    if spec.operator["function"] in BINARY:
        second = builder.operands.take(dtype, rows // inner, cols, inner)
        return lambda: apply(first, second)
    if spec.operator["function"] == "cast":
        contiguous = builder.torch.contiguous_format
        out = torch_dtype(builder.torch, spec.operator["out_dtype"])
        return lambda: first.to(out, memory_format=contiguous)
    return lambda: apply(first)


def _gather_rows(builder: CallBuilder, spec: OperatorSpec) -> Run:
    """Pick rows by a random index from a table that is as tall as the pick."""
    torch, (dtype, rows, cols) = builder.torch, _read_sizes(spec)
    table = builder.operands.take(dtype, rows, cols)
    index = torch.randint(0, rows, (rows,), device=table.device)
    return lambda: torch.nn.functional.embedding(index, table)


FORMS: dict[str, Callable[[CallBuilder, OperatorSpec], Run]] = {
    "contiguous": _call_contiguous,
    "strided": _call_strided,
    "broadcast": _call_broadcast,
    "transposed": _call_transposed,
    "reduce": _call_contiguous,
    "gather": _gather_rows,
    "columns": _sum_columns,
    "append": _append_cache,
    "join": _join_parts,
    "scatter": _scatter_gradient,
    "batchnorm": _batch_norm,
    "pool": _pool_windows,
    "dropout": _drop_elements,
    "adamw": _step_adamw,
}
