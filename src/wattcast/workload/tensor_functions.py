"""Functions of symbolic tensors, with the operators and gradients PyTorch would run; named as in
PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from wattcast.core import Dtype
from wattcast.workload.memory_layout import is_dense, output_strides
from wattcast.workload.operator_types import (
    Attention,
    Bmm,
    Collective,
    Conv2d,
    Elementwise,
    LayerNorm,
    Layout,
    Linear,
    RmsNorm,
    Softmax,
)
from wattcast.workload.symbolic_tensor import Tensor, fill, is_turned, pointwise, reduce, unary


def activation(function: str, x: Tensor) -> Tensor:
    """Apply gelu, silu, relu, tanh ...: one kernel forward, one backward that reads one tensor
    more.
    """
    out = pointwise(function, x)
    kept = out if function in ("relu", "tanh", "sigmoid") else x
    return out.with_gradient(lambda g: pointwise(f"{function}_grad", g, kept), x, save=(kept,))


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b; the gradients are g / b and -g·(a / b) / b."""

    def back(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        first = pointwise("div", g, b).sum_to(a.shape) if a.needs_grad else None
        ratio = pointwise("div", pointwise("div", a, b), b)
        second = (
            pointwise("mul", pointwise("neg", g), ratio).sum_to(b.shape) if b.needs_grad else None
        )
        return first, second

    return pointwise("div", a, b).with_gradient(back, a, b, save=(a, b))


def power(x: Tensor, exponent: float) -> Tensor:
    """Return x ** exponent; PyTorch multiplies out the powers 2 and 3."""
    function, derivative = {2.0: ("square", "copy"), 3.0: ("cube", "square")}.get(
        float(exponent), ("pow", "pow")
    )
    return unary(
        function,
        x,
        lambda g: pointwise("mul", g, pointwise("scale", pointwise(derivative, x))),
        (x,),
    )


def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x)."""
    out = pointwise("rsqrt", x)
    return out.with_gradient(
        lambda g: pointwise("mul", pointwise("scale", g), pointwise("cube", out)), x, save=(out,)
    )


def reduce_last(function: str, x: Tensor) -> Tensor:
    """Take the sum or the mean over the last dimension, which stays with size 1."""

    def back(g: Tensor) -> Tensor:
        spread = g.expand(*x.shape)
        return pointwise("scale", spread) if function == "mean" else spread

    return reduce(function, x, (*x.shape[:-1], 1)).with_gradient(back, x)


def dropout(x: Tensor, p: float) -> Tensor:
    """Set random elements to zero in training; PyTorch's fused kernel also writes the mask."""
    if not (x.tape.training and p > 0.0):
        return x
    out = x.tape.empty(x.shape, x.dtype, x.strides)
    mask = x.tape.empty(x.shape, Dtype.BOOL, x.strides)
    op = Elementwise(
        "dropout", x.numel, dtype=x.dtype, write=x.numel * (x.dtype.byte + Dtype.BOOL.byte)
    )
    x.tape.emit(op, (x,), (out, mask))
    return out.with_gradient(lambda g: pointwise("dropout_grad", g, mask), x, save=(mask,))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    in_major: bool = False,
    fp8: bool = False,
) -> Tensor:
    """Return x @ weightᵀ + bias over the last dimension; one kernel forward, two or three backward.

    ``in_major`` weights are stored as ``[in, out]``, which turns their gradient round. ``fp8``:
    input and gradient are cast to fp8, in both orders since fp8 products take one order alone, and
    all products run in fp8; results come out wide. Weights are cast once a step, by the optimiser,
    so no operator is emitted for that."""
    flat = x.reshape(-1, x.shape[-1])
    tape = x.tape
    (m, k), n = flat.shape, weight.shape[0]
    narrow = None if weight.dtype is x.dtype else weight.dtype
    fused = bias is not None and (len(x.shape) == 2 or x.is_contiguous)
    math, result = _product_formats(x, fp8)
    factor = _cast_both_orders(flat) if fp8 else flat
    op = Linear(m, n, k, bias=fused, dtype=math, weight_dtype=narrow, out_dtype=result)
    out = tape.launch(
        op, (factor, weight) if bias is None else (factor, weight, bias), (m, n), x.dtype
    )
    if (
        bias is not None and not fused
    ):  # PyTorch folds the bias in only where the input needs no reshaping
        tape.emit_pointwise("add", (out, bias), out, Layout.BROADCAST)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        # cuBLAS takes a matrix either way round, but not with holes in both directions
        g = g if is_dense(g.shape, g.strides) or 1 in g.strides else g.clone()
        d_bias = (
            None
            if bias is None or not bias.needs_grad
            else reduce("sum", g, bias.shape, across=True)
        )
        g = _cast_both_orders(g) if fp8 else g

        def multiply(
            other: Tensor, like: Tensor, m: int, n: int, k: int, turned: bool
        ) -> Tensor | None:
            op = Linear(m, n, k, dtype=math, out_dtype=result, turned=turned)
            return tape.launch(op, (g, other), like.shape, x.dtype) if like.needs_grad else None

        rows, columns = (k, n) if in_major else (n, k)
        return (
            multiply(weight, flat, m, k, n, False),
            multiply(factor, weight, rows, columns, m, True),
            d_bias,
        )

    kept = (factor, weight) if weight.needs_grad else (weight,)
    return out.with_gradient(back, flat, weight, bias, save=kept).view(*x.shape[:-1], n)


def _product_formats(x: Tensor, fp8: bool = False) -> tuple[Dtype, Dtype | None]:
    """Return the format a product is computed in, and that of its result where it is another."""
    if fp8:
        return Dtype.FP8, x.dtype
    math = x.tape.math_dtype(x.dtype)
    return math, Dtype.FP32 if math is Dtype.TF32 else None


def _cast_both_orders(x: Tensor) -> Tensor:
    """Cast a matrix to fp8 and write it and its transpose in one kernel, as fast as memory, unlike
    PyTorch's cast.
    """
    out = x.tape.empty(x.shape, Dtype.FP8)
    turned = x.tape.empty(x.shape, Dtype.FP8)
    op = Elementwise("scale", x.numel, dtype=x.dtype, write=2 * x.numel)
    x.tape.emit(op, (x,), (out, turned))
    return out


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``[..., m, k]`` by ``[..., k, n]``; leading dimensions are folded into one.

    Folding a strided tensor copies it, which is where the copies of q, k and v in eager attention
    come from."""
    (m, k), n, tape = a.shape[-2:], b.shape[-1], a.tape
    left = a.reshape(-1, m, k)
    right = b.reshape(-1, k, n)
    size, (math, result) = left.shape[0], _product_formats(a)

    def multiply(a: Tensor, b: Tensor, m: int, n: int, k: int) -> Tensor:
        op = Bmm(size, m, n, k, dtype=math, out_dtype=result, turned=is_turned(a, b))
        return tape.launch(op, (a, b), (size, m, n), a.dtype)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_left = multiply(g, right.transpose(1, 2), m, k, n) if left.needs_grad else None
        d_right = multiply(left.transpose(1, 2), g, k, n, m) if right.needs_grad else None
        return d_left, d_right

    out = multiply(left, right, m, n, k).with_gradient(back, left, right, save=(left, right))
    return out.view(*a.shape[:-2], m, n)


def grouped_matmul(
    x: Tensor, weight: Tensor, groups: Sequence[tuple[int, int]], *, fp8: bool = False
) -> Tensor:
    """Multiply rows of ``x`` by the weight of their group, ``[group, out, in]``.

    ``groups`` lists (how many groups, rows of each). ``fp8``: as in ``linear``.
    """
    (n, k), tape = weight.shape[1:], x.tape
    held_narrow = weight.dtype is Dtype.FP8
    math, result = _product_formats(x, fp8 or held_narrow)
    out = tape.empty((x.shape[0], n), x.dtype)
    weight_dtype = None if weight.dtype in (x.dtype, Dtype.FP8) else weight.dtype
    factor = (
        pointwise("cast", x, out_dtype=Dtype.FP8)
        if held_narrow
        else _cast_both_orders(x)
        if fp8
        else x
    )
    for size, rows in groups:
        op = Bmm(size, rows, n, k, dtype=math, out_dtype=result, weight_dtype=weight_dtype)
        tape.emit(op, (factor, weight), (out,))

    def back(g: Tensor) -> Sequence[Tensor | None]:
        g = _cast_both_orders(g) if fp8 else g
        d_x = tape.empty(x.shape, x.dtype)
        d_w = tape.empty(weight.shape, x.dtype)
        for size, rows in groups:
            tape.emit(Bmm(size, rows, k, n, dtype=math, out_dtype=result), (g, weight), (d_x,))
            if weight.needs_grad:
                tape.emit(
                    Bmm(size, n, k, rows, dtype=math, out_dtype=result, turned=True),
                    (g, factor),
                    (d_w,),
                )
        return d_x, d_w if weight.needs_grad else None

    return out.with_gradient(back, x, weight, save=(factor, weight))


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, masked: bool = False, dropped: bool = False
) -> Tensor:
    """Run fused attention of ``[batch, heads, length, dim]``; the result lies in memory as the
    queries do.
    """
    batch, heads, q_len, dim = q.shape
    kv_heads = k.shape[1]
    kv_len = k.shape[2]
    v_dim = v.shape[-1]
    tape = q.tape
    shape = (batch, heads, q_len, v_dim)
    if v_dim == dim and not masked:
        out = tape.empty(shape, q.dtype, output_strides(shape, [(q.shape, q.strides)]))
    else:
        out = tape.empty((batch, q_len, heads, v_dim), q.dtype).transpose(1, 2)

    def operator(backward: bool) -> Attention:
        return Attention(
            batch, heads, kv_heads, q_len, kv_len, dim, causal=causal and q_len > 1,
            v_head_dim=None if v_dim == dim else v_dim, backward=backward, dropout=dropped,
            dtype=tape.math_dtype(q.dtype),
        )  # fmt: skip

    tape.emit(operator(False), (q, k, v), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        grads = [
            tape.empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3]), t.dtype) for t in (q, k, v)
        ]
        views = [t.transpose(1, 2) for t in grads]
        tape.emit(operator(True), (g, q, k, v, out), views)
        return views

    return out.with_gradient(back, q, k, v, save=(q, k, v, out))


def softmax(x: Tensor, *, wide: bool = False, masked: float = 0.0) -> Tensor:
    """Take the softmax over the last dimension; ``wide``: computed and returned in fp32.

    ``masked`` is the share of ``x`` that a mask hides.
    PyTorch's kernel widens fp16 on the fly; bf16 is cast first, by another kernel.
    """
    if wide and x.dtype is not Dtype.FP16:
        x = x.to(Dtype.FP32)
    x = x.contiguous()
    kind = Dtype.FP32 if wide else x.dtype
    rows = x.numel // x.shape[-1]
    dim = x.shape[-1]
    op = Softmax(
        rows, dim, dtype=x.dtype, out_dtype=None if kind is x.dtype else kind, masked=masked
    )
    out = x.tape.launch(op, (x,), x.shape, kind)

    def back(g: Tensor) -> Tensor:
        op = Softmax(
            rows, dim, dtype=kind, out_dtype=None if kind is x.dtype else x.dtype, backward=True
        )
        return g.tape.launch(op, (g, out), x.shape, x.dtype)

    return out.with_gradient(back, x, save=(out,))


def cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean negative log likelihood of one label per row, in the logits' format (fp32 in
    practice).
    """
    rows = logits.numel // logits.shape[-1]
    dim = logits.shape[-1]
    dtype = logits.dtype
    tape = logits.tape
    logp = tape.launch(Softmax(rows, dim, dtype=dtype, log=True), (logits,), logits.shape)
    picked = rows * (dtype.byte + Dtype.INT64.byte)
    loss = tape.launch(
        Elementwise("gather", rows, dtype=dtype, read=picked, write=dtype.byte), (logp,), (1,)
    )

    def back(g: Tensor) -> Tensor:
        d_logp = fill(tape, logits.shape, dtype)
        tape.emit(
            Elementwise("copy", rows, dtype=dtype, read=rows * Dtype.INT64.byte), (g,), (d_logp,)
        )
        op = Softmax(rows, dim, dtype=dtype, backward=True, log=True)
        return tape.launch(op, (d_logp, logp), logits.shape)

    return loss.with_gradient(back, logits, save=(logp,))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Norm over the last dimension in one kernel; its backward pass also yields both weight
    gradients.
    """
    return _normalise_rows(LayerNorm, x, x.numel // x.shape[-1], weight, bias)


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """Run an RMS norm as one fused kernel (engines and compilers; eager models use several
    operators).
    """
    return _normalise_rows(RmsNorm, x, x.numel // x.shape[-1], weight, None)


def group_norm(x: Tensor, groups: int = 32) -> Tensor:
    """Norm each group of channels of each picture as one row, with weights of its own."""
    weight, bias = (x.tape.parameter(x.shape[1], dtype=x.dtype) for _ in range(2))
    return _normalise_rows(LayerNorm, x, x.shape[0] * groups, weight, bias)


def _normalise_rows(
    kind: type[LayerNorm] | type[RmsNorm],
    x: Tensor,
    rows: int,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    x = x.contiguous()
    weights = (weight, bias)
    dim = x.numel // rows
    out = x.tape.launch(
        kind(rows, dim, dtype=x.dtype), [t for t in (x, *weights) if t is not None], x.shape
    )

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_x = g.tape.launch(kind(rows, dim, dtype=x.dtype, backward=True), (g, x), x.shape, x.dtype)
        return d_x, *[None if t is None else g.tape.empty(t.shape, x.dtype) for t in weights]

    return out.with_gradient(back, x, *weights, save=(x,))


def batch_norm(x: Tensor) -> Tensor:
    """Norm by running statistics when serving; by the batch's own in training, where the input is
    read twice.
    """
    tape = x.tape
    channels = x.shape[1]
    weight, bias = (tape.parameter(channels, dtype=x.dtype) for _ in range(2))

    def operator(function: str, read: int | None = None) -> Elementwise:
        return Elementwise(
            function, x.numel, dtype=x.dtype, read=read, rows=channels, run=prod(x.shape[2:])
        )

    def back(g: Tensor) -> Sequence[Tensor]:
        d_x = tape.launch(operator("batchnorm_grad", 4 * x.byte), (g, x), x.shape, x.dtype)
        return d_x, tape.empty((channels,), x.dtype), tape.empty((channels,), x.dtype)

    if tape.training:  # a counter of the batches seen
        tape.emit(Elementwise("shift", 1, dtype=Dtype.INT64), (), (tape.empty((1,), Dtype.INT64),))
    out = tape.launch(
        operator("batchnorm_train" if tape.training else "batchnorm"), (x, weight, bias), x.shape
    )
    return out.with_gradient(back, x, weight, bias, save=(x,))


def embedding(weight: Tensor, tokens: tuple[int, ...], indices: int | None = None) -> Tensor:
    """Look up rows of ``weight`` for int64 tokens (``indices`` distinct ones in memory)."""
    return _gather_rows(weight, (*tokens, weight.shape[-1]), indices or prod(tokens))


def pick_rows(x: Tensor, rows: int) -> Tensor:
    """Return ``x[index]`` for ``rows`` int64 indices."""
    return _gather_rows(x, (rows, *x.shape[1:]), rows)


def _gather_rows(table: Tensor, shape: tuple[int, ...], indices: int) -> Tensor:
    """Gather rows; their gradients are added into zeros."""
    byte = prod(shape) * table.dtype.byte + indices * Dtype.INT64.byte
    out = table.tape.launch(
        Elementwise("gather", prod(shape), dtype=table.dtype, read=byte), (table,), shape
    )
    return out.with_gradient(lambda g: scatter_gradient(g, table, indices), table)


def scatter_gradient(g: Tensor, table: Tensor, indices: int) -> Tensor:
    """Return the gradient of picking elements: zeros, with values added in their places."""
    out = fill(g.tape, table.shape, table.dtype)
    read = 2 * g.byte + indices * Dtype.INT64.byte
    g.tape.emit(
        Elementwise("scatter_add", g.numel, dtype=g.dtype, read=read, write=g.byte), (g,), (out,)
    )
    return out


def sum_rows(x: Tensor, rows: int) -> Tensor:
    """Sum neighbouring rows, ``[rows·k, dim]`` -> ``[rows, dim]``."""

    def back(g: Tensor) -> Tensor:
        return g.unsqueeze(1).expand(rows, x.shape[0] // rows, x.shape[-1]).reshape(*x.shape)

    return reduce("sum", x, (rows, x.shape[-1]), across=True).with_gradient(back, x)


def sum_picked_rows(x: Tensor, rows: int) -> Tensor:
    """Pick rows in another order and sum those of each result in one kernel, ``[rows·k, dim]`` ->
    ``[rows, dim]``.
    """
    tape = x.tape
    index_byte = x.shape[0] * Dtype.INT64.byte

    def back(g: Tensor) -> Tensor:
        op = Elementwise("gather", x.numel, dtype=g.dtype, read=g.byte + index_byte)
        return tape.launch(op, (g,), x.shape, x.dtype)

    op = Elementwise("add", rows * x.shape[-1], dtype=x.dtype, read=x.byte + index_byte)
    return tape.launch(op, (x,), (rows, x.shape[-1])).with_gradient(back, x)


def gather_parts(x: Tensor, gpus: int, stride: int = 1) -> None:
    """Give all GPUs all parts of ``x``."""
    if gpus > 1:
        op = Collective(
            "all_gather", gpus * x.numel * x.dtype.byte, gpus, dtype=x.dtype, stride=stride
        )
        x.tape.emit(op, (x,), (x,))


def send_rows(
    x: Tensor, rows: int, byte: int, gpus: int, stride: int = 1, overlaps: int = 0
) -> Tensor:
    """Send rows of ``x`` to the GPUs that need them and return the ``rows`` received; gradients go
    the way back.
    """
    op = Collective("all_to_all", byte, gpus, dtype=x.dtype, stride=stride, overlaps=overlaps)
    out = x.tape.launch(op, (x,), (rows, x.shape[-1]))
    return out.with_gradient(lambda g: send_rows(g, x.shape[0], byte, gpus, stride), x)


def enter_parallel(x: Tensor, gpus: int) -> Tensor:
    """Begin a tensor-parallel part of the model: free forward, gradients are added up backward."""
    if gpus == 1:
        return x
    out = Tensor(x.tape, x.shape, x.strides, x.dtype, x.storage)
    return out.with_gradient(lambda g: leave_parallel(g, gpus), x)


def leave_parallel(x: Tensor, gpus: int) -> Tensor:
    """End a tensor-parallel part of the model: results are added up forward, gradients pass."""
    if gpus > 1:
        x.tape.emit(
            Collective("all_reduce", x.numel * x.dtype.byte, gpus, dtype=x.dtype), (x,), (x,)
        )
    return x


def convolve(
    x: Tensor, filters: int, size: int, *, stride: int = 1, padding: int | None = None, groups: int = 1,
    bias: bool = False,
) -> Tensor:  # fmt: skip
    """Convolve pictures ``[n, c, h, w]`` with square filters, or signals ``[n, c, length]`` over
    time.

    Weights are its own; by default it is padded to keep the size at stride 1.
    """
    (n, c), sides, tape = x.shape[:2], x.shape[2:], x.tape
    padding = size // 2 if padding is None else padding
    weight = tape.parameter(filters, c // groups, *(size for _ in sides), dtype=x.dtype)
    offset = tape.parameter(filters, dtype=x.dtype) if bias else None
    picture = len(sides) == 2
    math = tape.convolution_dtype(x.dtype, depthwise=groups > 1 and groups == c)
    h, w = sides if picture else (1, *sides)  # a signal is a picture one row high
    if picture:
        forward = Conv2d(n, c, filters, h, w, size, size, stride, padding, groups, dtype=math)
    else:
        step = None if stride == 1 else stride
        forward = Conv2d(
            n,
            c,
            filters,
            h,
            w,
            1,
            size,
            groups=groups,
            padding_w=padding,
            stride_w=step,
            dtype=math,
        )
    shape = (n, filters, *((forward.p, forward.q) if picture else (forward.q,)))

    def launch(direction: str, reads: Sequence[Tensor], like: Tensor) -> Tensor:
        return tape.launch(replace(forward, direction=direction), reads, like.shape, x.dtype)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_x = launch("dgrad", (g, weight), x) if x.needs_grad else None
        return (
            d_x,
            launch("wgrad", (g, x), weight),
            None if offset is None else reduce("sum", g, offset.shape),
        )

    out = tape.launch(forward, (x, weight), shape, x.dtype)
    if offset is not None:  # cuDNN adds it in place, by another kernel
        tape.emit_pointwise("add", (out, offset), out, Layout.BROADCAST, (prod(shape[:2]), None))
    return out.with_gradient(back, x, weight, offset, save=(x, weight))


def max_pool(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """Take the largest of each window; the kernel also writes its place as an int64."""
    (n, c), tape = x.shape[:2], x.tape
    shape = (n, c, *((side + 2 * padding - size) // stride + 1 for side in x.shape[2:]))
    index_byte = prod(shape) * Dtype.INT64.byte
    write = prod(shape) * x.dtype.byte + index_byte
    out = tape.launch(
        Elementwise("pool", x.numel, dtype=x.dtype, write=write, rows=n * c), (x,), shape
    )

    def back(g: Tensor) -> Tensor:
        op = Elementwise("pool_grad", x.numel, dtype=x.dtype, read=g.byte + index_byte, rows=n * c)
        return tape.launch(op, (g,), x.shape, x.dtype)

    return out.with_gradient(back, x)


def mean_pool(x: Tensor) -> Tensor:
    """Take the mean over the whole picture: ``[n, c, h, w]`` -> ``[n, c]``."""
    n, c, h, w = x.shape
    out = reduce("mean", x, (n, c))
    return out.with_gradient(lambda g: pointwise("scale", g.view(n, c, 1, 1).expand(n, c, h, w)), x)


def upsample(x: Tensor) -> Tensor:
    """Double height and width by nearest neighbours."""
    n, c, h, w = x.shape
    out = x.tape.empty((n, c, 2 * h, 2 * w), x.dtype)
    x.tape.emit_pointwise("copy", (x,), out, Layout.BROADCAST)
    return out.with_gradient(lambda g: reduce("sum", g, x.shape), x)
