"""Build the PyTorch call of an operator over views of large pools of operands.

Values are drawn once, because drawing and allocating for each row would cost more than measuring
it. Each number format has one pool; views are handed out in order, aligned to 512 bytes, and the
pool starts over with the next row.

Operands rotate: weights of linear layers and convolutions, and the key-value cache of decode
attention, differ from layer to layer in a model and come from DRAM. Copies of a call therefore walk
through several sets of them until these exceed three times the L2. Activations stay, because a
model's next operator finds them in L2 when they fit. Some rows do otherwise on purpose; ``rotated``
says which.

Gradients call ATen's own functions, because autograd would launch on another stream than the
captured one. What a gradient needs from its forward pass is computed once, when the call is built.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from wattcast.core import (
    BadInput,
    check_names,
    unknown_name,
)
from wattcast.core.measured_calls import find_measured_call
from wattcast.core.measured_rows import Plain
from wattcast.lab.campaigns.kernel_plan import (
    BINARY,
    GRADIENTS,
    OperatorSpec,
)

PATTERNS = ("random", "zeros", "ones", "relu", "tiny", "uniform")
Dimensions = tuple[int, int, int, int]  # batch, channels, height, width
_ALIGN_BYTE = 512
_CHUNK = 2**28


class OperandPools:
    """Pools of one pattern of values on one device."""

    def __init__(
        self,
        torch: Any,
        device: str,
        pool_byte: dict[str, int],
    ) -> None:
        self._torch = torch
        self.device = device
        self.pattern = ""
        self._next: dict[str, int] = {}
        self._pools: dict[str, Any] = {}
        for name, byte in pool_byte.items():
            form = torch_dtype(torch, name)
            self._pools[name] = torch.empty(byte // form.itemsize, dtype=form, device=device)

    def fill(self, pattern: str) -> None:
        """Fill all pools with new values of ``pattern``.

        ``random`` is standard normal, ``relu`` the same with its negatives at zero. ``tiny`` is
        uniform between -0.001 and 0.001, as an engine's dummy weights are; ``uniform`` lies between
        -1 and 1, as these weights do once they have been quantized with a scale."""
        check_names("data pattern", pattern, PATTERNS, "")
        if pattern == self.pattern:
            return
        torch = self._torch
        wide = {"dtype": self._torch.float32, "device": self.device}
        torch.manual_seed(1)
        draw: Callable[[int], Any] = {
            "zeros": lambda count: torch.zeros(count, dtype=torch.bfloat16, device=self.device),
            "ones": lambda count: torch.ones(count, dtype=torch.bfloat16, device=self.device),
            "tiny": lambda count: torch.empty(count, **wide).uniform_(-1e-3, 1e-3),
            "uniform": lambda count: torch.empty(count, **wide).uniform_(-1.0, 1.0),
            "random": lambda count: torch.randn(count, **wide),
            "relu": lambda count: torch.randn(count, **wide).clamp_(min=0.0),
        }[pattern]
        for pool in self._pools.values():
            for part in pool.split(_CHUNK):
                part.copy_(draw(len(part)))
        self.pattern = pattern

    def reset(self) -> None:
        """Start over; views handed out before may share memory with later ones."""
        self._next = dict.fromkeys(self._pools, 0)

    def take(
        self,
        dtype: str,
        *shape: int,
    ) -> Any:
        """Return a contiguous view of ``shape``."""
        name = "fp32" if dtype == "tf32" else dtype
        pool = self._pools[name]
        start = self._next[name]
        size = math.prod(shape)
        step = _ALIGN_BYTE // pool.element_size()
        end = start + size
        if end > len(pool):
            raise BadInput(
                f"operands of {end * pool.element_size()} bytes do not fit the {dtype} pool."
            )
        self._next[name] = -(-end // step) * step
        return pool[start : start + size].view(shape)


def torch_dtype(torch: Any, name: str) -> Any:
    """Return PyTorch's number format of a Wattcast one."""
    names = {
        "bf16": "bfloat16",
        "fp16": "float16",
        "fp32": "float32",
        "tf32": "float32",
        "fp8": "float8_e4m3fn",
    }
    return getattr(torch, names[name])


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


class ConvolutionPlaces(NamedTuple):
    """Stride, padding and dilation of a convolution's rows and columns, and the sides of its
    output.
    """

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output: list[int]


@dataclass(frozen=True)
class CallBuilder:
    """What building a call needs: PyTorch, the pools and the size of the L2."""

    torch: Any
    operands: OperandPools
    l2_byte: float

    def sets(
        self,
        byte: float,
        rotate: bool,
    ) -> int:
        """Return how many operand sets of ``byte`` each exceed three times the L2; one when not
        rotating.
        """
        return (
            max(1, min(math.ceil(L2_TIMES * self.l2_byte / max(byte, 1.0)), MOST_SETS))
            if rotate
            else 1
        )

    def image(
        self,
        dtype: str,
        n: int,
        c: int,
        h: int,
        w: int,
        channels_last: bool,
    ) -> Any:
        """Return (pictures, channels, rows, columns) with channels outermost or innermost in
        memory.
        """
        if channels_last:
            return self.operands.take(
                dtype,
                n,
                h,
                w,
                c,
            ).permute(0, 3, 1, 2)
        return self.operands.take(
            dtype,
            n,
            c,
            h,
            w,
        )

    def places(self, o: dict[str, Any]) -> ConvolutionPlaces:
        """Return where the filters of a convolution are laid, and the sides of its output."""
        stride = [o["stride"], o.get("stride_w") or o["stride"]]
        wide_padding = o.get("padding_w")
        padding = [o["padding"], o["padding"] if wide_padding is None else wide_padding]
        dilation = 2 * [o.get("dilation", 1)]
        sides = zip(
            (o["h"], o["w"]),
            (o["r"], o["s"]),
            stride,
            padding,
            dilation,
            strict=True,
        )
        output = [
            (side + 2 * pad - reach * (taps - 1) - 1) // step + 1
            for side, taps, step, pad, reach in sides
        ]
        return ConvolutionPlaces(stride, padding, dilation, output)

    def heads(
        self,
        spec: OperatorSpec,
        batch: int,
        heads: int,
        length: int,
        dim: int,
    ) -> Any:
        """Return (batch, heads, length, dim) as it comes from a projection (bshd in memory) or a
        cache (bhsd).
        """
        if spec.layout == "bhsd":
            return self.operands.take(
                spec.operator["dtype"],
                batch,
                heads,
                length,
                dim,
            )
        return self.operands.take(
            spec.operator["dtype"],
            batch,
            length,
            heads,
            dim,
        ).transpose(1, 2)


Run = Callable[[], Any]
_MOST_HEADS = 64
_HEAD = 128
_TENSORS = 16  # of a list of parameters


def build_elementwise(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Build the call of an elementwise operator; ``detail["form"]`` names the method that lays its
    operands out.
    """
    o = spec.operator
    n = spec.operator["n"]
    width = torch_dtype(builder.torch, o["dtype"]).itemsize
    out_width = torch_dtype(builder.torch, o.get("out_dtype", o["dtype"])).itemsize
    read_byte = o.get("read", _count_inputs(o["function"]) * n * width)
    byte = read_byte + o.get("write", n * out_width)
    sets = builder.sets(byte, spec.rotated == "all")
    runs: list[Run] = []
    for _ in range(sets):
        operands = ElementwiseOperands(builder, spec)
        runs.append(getattr(operands, spec.detail["form"])())
    return OperatorCall(lambda i: runs[i % sets](), sets, 0, int(byte))


def _count_inputs(function: str) -> int:
    return 2 if function in (*BINARY, *GRADIENTS) else 1


class ElementwiseOperands:
    """Lay out one set of operands of an elementwise operator; each form of them is a method that
    returns the call.
    """

    def __init__(
        self,
        builder: CallBuilder,
        spec: OperatorSpec,
    ) -> None:
        self.torch = builder.torch
        self.aten = builder.torch.ops.aten
        self.layout = spec.layout
        self.operator = spec.operator
        self.detail = spec.detail
        self.function = spec.operator["function"]
        self.rows = spec.detail.get("rows", 0)
        self.cols = spec.detail.get("cols", 0)
        self.inputs = _count_inputs(self.function)
        self.take = partial(builder.operands.take, spec.operator["dtype"])
        self.image = partial(builder.image, spec.operator["dtype"])

    def find_function(self) -> Callable[..., Any]:
        """Return PyTorch's function; most have our name, and gradients that of ATen's backward
        functions.
        """
        torch = self.torch
        functional = self.torch.nn.functional
        aten = self.aten
        name = self.function
        functions: dict[str, Callable[..., Any]] = {
            "scale": lambda x: x * 0.125,
            "shift": lambda x: x + 0.5,
            "pow": lambda x: x.pow(3),
            "cube": lambda x: x**3,
            "fill": lambda x: torch.full_like(x, 0.5),
            "cast": lambda x: x.to(self.find_cast()),
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
        if name.endswith("_grad") and name not in functions:
            functions[name] = getattr(aten, name.removesuffix("_grad") + "_backward")
        return functions.get(name) or getattr(torch, name, None) or getattr(functional, name)

    def find_cast(self) -> Any:
        """Return the number format of the result."""
        return torch_dtype(self.torch, self.operator.get("out_dtype", self.operator["dtype"]))

    def contiguous(self) -> Run:
        views = [self.take(self.rows, self.cols) for _ in range(self.inputs)]
        apply = self.find_function()
        return lambda: apply(*views)

    reduce = contiguous

    def strided(self) -> Run:
        """Take operands that are column slices of tensors twice as wide, as q, k and v in one
        projection are.
        """
        rows = self.rows
        cols = self.cols
        if self.function == "cat":
            first_width = max(cols // 2, 1)
            if "last" in self.detail:
                first_width = cols - self.detail["last"]
            last_width = cols - first_width
            first = self.take(rows, 2 * first_width)[:, :first_width]
            last = self.take(rows, 2 * last_width)[:, :last_width]
            return lambda: self.torch.cat([first, last], dim=1)
        views = [self.take(rows, 2 * cols)[:, cols:] for _ in range(self.inputs)]
        apply = self.find_function()
        return lambda: apply(*views)

    def broadcast(self) -> Run:
        """Take one operand that is a row (a bias), rows that serve many each, or a column (a scale
        per row).
        """
        rows = self.rows
        cols = self.cols
        groups = self.detail.get("groups", 1)
        whole = (groups, rows // groups, cols) if groups > 1 else (rows, cols)
        by_row = (rows, 1) if groups == 1 else (1, rows // groups, 1)
        by_column = (1, cols) if groups == 1 else (groups, 1, cols)
        small = self.take(*(by_row if self.detail["over"] == "cols" else by_column))
        apply = self.find_function()
        masked = self.function in ("masked_fill", "where")
        if self.inputs == 1 and not masked:  # a small tensor spread out
            spread = small.expand(whole)
            return lambda: apply(spread)
        operands = [self.take(*whole)]
        if self.function == "where":
            operands.append(self.take(*whole))
        operands.append(small > 0 if masked else small)
        return lambda: apply(*operands)

    def transposed(self) -> Run:
        """Walk over the first operand across its rows; runs of ``inner`` elements stay together."""
        rows = self.rows
        cols = self.cols
        inner = self.detail["inner"]
        first = self.take(cols, rows // inner, inner).transpose(0, 1)
        apply = self.find_function()
        if self.function in BINARY:
            second = self.take(rows // inner, cols, inner)
            return lambda: apply(first, second)
        if self.function == "cast":
            contiguous = self.torch.contiguous_format
            out = self.find_cast()
            return lambda: first.to(out, memory_format=contiguous)
        return lambda: apply(first)

    def gather(self) -> Run:
        """Pick rows by a random index from a table that is as tall as the pick."""
        table = self.take(self.rows, self.cols)
        index = self.torch.randint(0, self.rows, (self.rows,), device=table.device)
        return lambda: self.torch.nn.functional.embedding(index, table)

    def columns(self) -> Run:
        """Sum over rows, so that neighbours in memory belong to different results, as in the
        gradient of a bias.
        """
        view = self.take(self.cols, self.rows)
        reduce = {
            "sum": view.sum,
            "mean": view.mean,
            "max": view.amax,
        }[self.function]
        return lambda: reduce(0)

    def append(self) -> Run:
        """Put new keys behind a cache (batch, heads, length, dim); strided ones are a slice of a
        projection.
        """
        heads = self.count_heads()
        last = self.detail["last"]
        batch = self.rows // heads
        width = heads * last
        old = self.take(batch, heads, (self.cols - last) // last, last)
        if self.layout == "strided":
            whole = self.take(batch, 1, 3 * width)[..., width : 2 * width]
            new = whole.view(batch, 1, heads, last).transpose(1, 2)
        else:
            new = self.take(batch, heads, 1, last)
        return lambda: self.torch.cat([old, new], dim=2)

    def join(self) -> Run:
        """Join parts of like size; one part alone is what a cache begins with, keys as a projection
        leaves them.
        """
        torch = self.torch
        rows = self.rows
        cols = self.cols
        last = self.detail["last"]
        if last < cols:
            parts = [self.take(rows, size) for size in (cols - last, last)]
            return lambda: torch.cat(parts, dim=1)
        heads = self.count_heads()
        dim = min(cols & -cols, _HEAD)
        new = self.take(rows // heads, cols // dim, heads, dim).transpose(1, 2)
        nothing = new.new_empty(0)  # as a cache begins: with it PyTorch joins, alone it would copy
        return lambda: torch.cat([nothing, new], dim=2)

    def count_heads(self) -> int:
        """Return the most heads, up to 64, that divide the rows."""
        heads: int = min(_MOST_HEADS, self.rows)
        while self.rows % heads:
            heads -= 1
        return heads

    def scatter(self) -> Run:
        """Compute the gradient of a table of embeddings that is as tall as the pick."""
        grad = self.take(self.rows, self.cols)
        rows = self.rows
        index = self.torch.randint(0, rows, (rows,), device=grad.device)
        back = self.aten.embedding_dense_backward
        return lambda: back(
            grad,
            index,
            rows,
            -1,
            False,
        )

    def batchnorm(self) -> Run:
        """Run batch norm by running statistics, by the batch's own, or its gradient, as PyTorch
        chooses.
        """
        d = self.detail
        aten = self.aten
        shape = d["pictures"], d["channels"], d["high"], d["wide"], self.layout == "nhwc"
        x = self.image(*shape)
        weight = self.take(d["channels"])
        bias = self.take(d["channels"])
        running_mean = self.torch.zeros_like(weight)
        running_variance = self.torch.ones_like(weight)
        epsilon = 1e-5

        def forward() -> Any:
            return aten._batch_norm_impl_index(
                x,
                weight,
                bias,
                running_mean,
                running_variance,
                self.function != "batchnorm",
                0.1,
                epsilon,
                self.torch.backends.cudnn.enabled,
            )

        if self.function != "batchnorm_grad":
            return lambda: forward()[0]
        _, batch_mean, batch_scale, reserve, implementation = forward()
        grad = self.image(*shape)
        return lambda: aten._batch_norm_impl_index_backward(
            implementation,
            x,
            grad,
            weight,
            running_mean,
            running_variance,
            batch_mean,
            batch_scale,
            True,
            epsilon,
            [True, True, True],
            reserve,
        )[0]

    def pool(self) -> Run:
        """Take the largest of each window with its place, or compute the gradient."""
        d = self.detail
        forward = self.aten.max_pool2d_with_indices
        x = self.image(
            1,
            d["planes"],
            d["side"],
            d["side"],
            False,
        )
        size = [d["size"]] * 2
        stride = [d["stride"]] * 2
        padding = [d["padding"]] * 2
        if self.function == "pool":
            return lambda: forward(x, size, stride, padding)[0]
        out, places = forward(x, size, stride, padding)
        grad = self.take(*out.shape)
        back = self.aten.max_pool2d_with_indices_backward
        return lambda: back(
            grad,
            x,
            size,
            stride,
            padding,
            [1, 1],
            False,
            places,
        )

    def dropout(self) -> Run:
        """Set random elements to zero and write the mask too, or compute the gradient through that
        mask.
        """
        x = self.take(self.rows, self.cols)
        aten = self.aten
        if self.function == "dropout":
            return lambda: aten.native_dropout(x, DROPPED, True)
        mask = x > -1.28  # nine in ten of a normal distribution
        return lambda: aten.native_dropout_backward(x, mask, 1.0 / (1.0 - DROPPED))

    def adamw(self) -> Run:
        """Run one fused AdamW step over a list of tensors, which are copies, since it writes to
        what it reads.
        """
        torch = self.torch
        n = self.operator["n"]
        sizes = [n // _TENSORS + (1 if i < n % _TENSORS else 0) for i in range(min(_TENSORS, n))]
        values = [self.take(size).clone() for size in sizes]
        gradients = [self.take(size).clone() for size in sizes]
        first = [self.take(size).clone() for size in sizes]
        second = [self.take(size).clone().abs() for size in sizes]
        steps = [torch.ones((), dtype=torch.float32, device=value.device) for value in values]
        options = {
            "lr": 1e-6,
            "beta1": 0.9,
            "beta2": 0.999,
            "weight_decay": 0.01,
            "eps": 1e-8,
        }
        step = self.aten._fused_adamw_

        def run() -> Any:
            step(
                values,
                gradients,
                first,
                second,
                [],
                steps,
                **options,
                amsgrad=False,
                maximize=False,
            )
            return values

        return run


def build_call(
    builder: CallBuilder,
    spec: OperatorSpec,
    *,
    fresh: bool = True,
) -> OperatorCall:
    """Build the call of ``spec``; without ``fresh`` its operands lie behind those handed out
    before.
    """
    if fresh:
        builder.operands.reset()
    wide = spec.operator["dtype"] == "tf32"  # only where the row says so; plain fp32 otherwise
    builder.torch.backends.cuda.matmul.allow_tf32 = wide
    builder.torch.backends.cudnn.allow_tf32 = wide
    kind = spec.operator["op"]
    if kind in MAKERS:
        return MAKERS[kind](builder, spec)
    # by the operator's own file; all copies share its operands
    registered = find_measured_call(kind)
    if registered is None:
        raise unknown_name("operator", kind, MAKERS)
    tensors: list[Any] = []

    def take(dtype: str, *shape: int) -> Any:
        tensors.append(builder.operands.take(dtype, *shape))
        return tensors[-1]

    run = registered(builder.torch, take, spec.operator)
    return OperatorCall(
        lambda i: run(), 1, sum(tensor.numel() * tensor.element_size() for tensor in tensors), 0
    )


def _call_linear(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    torch = builder.torch
    o = spec.operator
    dtype = o["dtype"]
    m = o["m"]
    n = o["n"]
    k = o["k"]
    take = partial(builder.operands.take, dtype)
    width = torch_dtype(torch, dtype).itemsize
    if o.get("turned"):  # the gradient of a weight: both operands have k outermost
        columns = take(k, m)
        right = take(k, n)
        byte = (m * k + n * k + m * n) * width
        return OperatorCall(lambda i: torch.mm(columns.t(), right), 1, byte, 0)
    sets = builder.sets(n * k * width, spec.rotated != "none")
    out_width = 2 if dtype == "fp8" else width
    x = take(m, k)
    bias = None
    if o["bias"]:
        bias = builder.operands.take("bf16" if dtype == "fp8" else dtype, n)
    weight_shape = (k, n) if spec.layout == "nn" else (n, k)
    weights = [take(*weight_shape) for _ in range(sets)]

    def multiply(i: int) -> Any:
        if spec.layout == "nn":
            return torch.addmm(bias, x, weights[i % sets])
        return torch.nn.functional.linear(x, weights[i % sets], bias)

    run = _multiply_fp8(torch, x, weights, bias) if dtype == "fp8" else multiply
    return OperatorCall(run, sets, m * k * width + m * n * out_width, n * k * width)


def _multiply_fp8(
    torch: Any,
    x: Any,
    weights: list[Any],
    bias: Any,
) -> Callable[[int], Any]:
    """Return the product of fp8 operands with scales of one and a bf16 result."""
    one = torch.ones((), dtype=torch.float32, device=x.device)

    def multiply(i: int) -> Any:
        return torch._scaled_mm(
            x,
            weights[i % len(weights)].t(),
            scale_a=one,
            scale_b=one,
            bias=bias,
            out_dtype=torch.bfloat16,
        )

    return multiply


def _call_bmm(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    torch = builder.torch
    o = spec.operator
    take = partial(builder.operands.take, spec.operator["dtype"])
    b = o["b"]
    m = o["m"]
    n = o["n"]
    k = o["k"]
    first = take(b, k, m).transpose(1, 2) if spec.layout == "tn" else take(b, m, k)
    right = take(b, n, k).transpose(1, 2) if spec.layout == "nt" else take(b, k, n)
    footprint = (first.numel() + right.numel() + b * m * n) * first.element_size()
    return OperatorCall(lambda i: torch.bmm(first, right), 1, footprint, 0)


def _call_conv2d(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Convolve, or compute the gradient of the image (``dgrad``) or of the weight (``wgrad``)."""
    torch = builder.torch
    o = spec.operator
    direction = o.get("direction", "forward")
    places = builder.places(o)
    shape = _ConvolutionShapes.read(o, places)
    width = torch_dtype(torch, o["dtype"]).itemsize
    filter_byte = math.prod(shape.filter) * width
    image_byte = (math.prod(shape.image) + math.prod(shape.result)) * width
    sets = builder.sets(filter_byte, direction != "wgrad" and spec.rotated != "none")

    def take(dimensions: Dimensions) -> Any:
        return builder.image(o["dtype"], *dimensions, o["channels_last"])

    image = take(shape.image)
    grad = take(shape.result) if direction != "forward" else None
    filters = [take(shape.filter) for _ in range(sets)]

    def convolve(i: int) -> Any:
        return torch.nn.functional.conv2d(
            image,
            filters[i % sets],
            None,
            places.stride,
            places.padding,
            places.dilation,
            o["groups"],
        )

    is_dgrad = direction == "dgrad"

    def turn_back(i: int) -> Any:
        of_image, of_filter, _ = torch.ops.aten.convolution_backward(
            grad,
            image,
            filters[i % sets],
            None,
            places.stride,
            places.padding,
            places.dilation,
            False,
            [0, 0],
            o["groups"],
            [is_dgrad, not is_dgrad, False],
        )
        return of_image if is_dgrad else of_filter

    run = convolve if grad is None else turn_back
    return OperatorCall(run, sets, image_byte, filter_byte)


@dataclass(frozen=True)
class _ConvolutionShapes:
    """Batch, channels, height and width of what a convolution reads and writes."""

    image: Dimensions
    filter: Dimensions
    result: Dimensions

    @classmethod
    def read(
        cls,
        operator: Plain,
        places: ConvolutionPlaces,
    ) -> _ConvolutionShapes:
        """Take the shapes from an operator and the sides of its output."""
        o = operator
        height, width = places.output
        return cls(
            image=(o["n"], o["c"], o["h"], o["w"]),
            filter=(o["k"], o["c"] // o["groups"], o["r"], o["s"]),
            result=(o["n"], o["k"], height, width),
        )


def _over_rows(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Run softmax, layer norm or RMS norm over the last dimension, or its gradient, a norm's with
    its weights'.
    """
    o = spec.operator
    torch = builder.torch
    take = partial(builder.operands.take, o["dtype"])
    rows = o["rows"]
    dim = o["dim"]
    is_backward = bool(o.get("backward"))
    dtype = torch_dtype(torch, o["dtype"])
    out = torch_dtype(torch, o.get("out_dtype", o["dtype"]))
    element_byte = 3 * dtype.itemsize if is_backward else dtype.itemsize + out.itemsize
    byte = rows * dim * element_byte
    sets = builder.sets(byte, spec.rotated == "all")
    functional = torch.nn.functional
    weight = None if is_backward else take(dim)
    bias = None if is_backward else take(dim)

    def apply() -> Callable[[], Any]:
        x = take(rows, dim)
        if o["op"] == "softmax":
            if o.get("masked"):
                x[:, dim - round(o["masked"] * dim) :] = float("-inf")
            return lambda: functional.softmax(x, dim=-1, dtype=None if out is dtype else out)
        if o["op"] == "rmsnorm":
            return lambda: functional.rms_norm(x, (dim,), weight, 1e-6)
        return lambda: functional.layer_norm(
            x,
            (dim,),
            weight,
            bias,
            1e-5,
        )

    make_run = (
        partial(
            _turn_rows_back,
            torch,
            o,
            take,
            out,
        )
        if is_backward
        else apply
    )
    runs = [make_run() for _ in range(sets)]
    return OperatorCall(lambda i: runs[i % sets](), sets, 0, byte)


def _turn_rows_back(
    torch: Any,
    operator: Plain,
    take: Callable[..., Any],
    out: Any,
) -> Callable[[], Any]:
    """Return the gradient of softmax, or of a norm with its weights'."""
    aten = torch.ops.aten
    dim = operator["dim"]
    grad = take(operator["rows"], dim)
    x = take(operator["rows"], dim)
    if operator["op"] == "softmax":
        return lambda: aten._softmax_backward_data(grad, x, -1, out)
    weight = take(dim)
    if operator["op"] == "rmsnorm":
        _, rstd = aten._fused_rms_norm(x, [dim], weight, 1e-6)
        return lambda: aten._fused_rms_norm_backward(
            grad,
            x,
            [dim],
            rstd,
            weight,
            [True, True],
        )
    bias = take(dim)
    all_three = [True, True, True]
    _, mean, rstd = aten.native_layer_norm(
        x,
        [dim],
        weight,
        bias,
        1e-5,
    )
    return lambda: aten.native_layer_norm_backward(
        grad,
        x,
        [dim],
        mean,
        rstd,
        weight,
        bias,
        all_three,
    )


def _call_attention(builder: CallBuilder, spec: OperatorSpec) -> OperatorCall:
    """Attend, or compute the gradients of queries, keys and values."""
    o = spec.operator
    torch = builder.torch
    query_shape = (o["batch"], o["heads"], o["q_len"], o["head_dim"])
    cache_shape = (o["batch"], o["kv_heads"], o["kv_len"], o["head_dim"])
    width = torch_dtype(torch, o["dtype"]).itemsize
    query_byte = 2 * math.prod(query_shape) * width  # queries and results
    cache_byte = 2 * math.prod(cache_shape) * width  # keys and values
    chance = DROPPED if o.get("dropout") else 0.0
    backend = spec.detail.get("backend", "default")
    take_query = partial(builder.heads, spec, *query_shape)
    take_cache = partial(builder.heads, spec, *cache_shape)
    q = take_query()
    if o.get("backward"):
        grad = take_query()
        qkv = (q, take_cache(), take_cache())
        run = _make_attention_gradient(
            torch,
            grad,
            qkv,
            chance,
            bool(o["causal"]),
            backend,
        )
        return OperatorCall(lambda i: run(), 1, 2 * (query_byte + cache_byte), 0)
    sets = builder.sets(cache_byte, spec.rotated == "all")
    caches = [(take_cache(), take_cache()) for _ in range(sets)]
    choose_backend = _choose_attention_backend(backend)

    def attend(i: int) -> Any:
        k, v = caches[i % sets]
        with choose_backend():
            return torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=o["causal"],
                enable_gqa=o["heads"] != o["kv_heads"],
                dropout_p=chance,
            )

    return OperatorCall(attend, sets, query_byte, cache_byte)


def _choose_attention_backend(backend: str) -> Callable[[], Any]:
    """Return the context in which PyTorch takes one backend; the default leaves it the choice."""
    if backend == "default":
        return contextlib.nullcontext
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel_backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return partial(sdpa_kernel, kernel_backends[backend])


def _make_attention_gradient(
    torch: Any,
    grad: Any,
    qkv: tuple[Any, ...],
    chance: float,
    causal: bool,
    backend: str,
) -> Callable[[], Any]:
    """Return the gradient, by cuDNN unless the row says otherwise, as on Hopper."""
    aten = torch.ops.aten
    if grad.device.type == "cpu":
        forward_results = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, chance, causal)
        back = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return lambda: back(
            grad,
            *qkv,
            *forward_results,
            chance,
            causal,
        )
    if backend == "flash":
        out, lse, *places, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            *qkv, chance, causal, False
        )
        back = aten._scaled_dot_product_flash_attention_backward
        settings = *places, chance, causal, seed, offset
    else:
        cudnn = aten._scaled_dot_product_cudnn_attention
        out, lse, *places, seed, offset, _ = cudnn(
            *qkv,
            None,
            True,
            chance,
            causal,
            False,
        )
        back = aten._scaled_dot_product_cudnn_attention_backward
        settings = seed, offset, None, *places, chance, causal
    return lambda: back(
        grad,
        *qkv,
        out,
        lse,
        *settings,
    )


MAKERS: dict[
    str, Callable[[CallBuilder, OperatorSpec], OperatorCall]
] = {  # of an operator; callers may add their own
    "linear": _call_linear,
    "bmm": _call_bmm,
    "conv2d": _call_conv2d,
    **dict.fromkeys(("softmax", "layernorm", "rmsnorm"), _over_rows),
    "attention": _call_attention,
    "elementwise": build_elementwise,
}
