"""Functions of symbolic tensors, with the operators and gradients PyTorch would run; named as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from wattcast.core.units import Dtype
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
from wattcast.workload.symbolic_tensor import Tensor, fill, pointwise, reduce, unary


def activation(function: str, x: Tensor) -> Tensor:
    """Apply gelu, silu, relu, tanh ...: one kernel forward, one backward that reads one tensor more."""
    out = pointwise(function, x)
    kept = out if function in ("relu", "tanh", "sigmoid") else x
    x.tape.record((out,), (x,), lambda g: (pointwise(f"{function}_grad", g, kept),), (kept,))
    return out


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b; the gradients are g / b and -g·(a / b) / b."""
    out = pointwise("div", a, b)

    def back(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        first = pointwise("div", g, b).sum_to(a.shape) if a.needs_grad else None
        ratio = pointwise("div", pointwise("div", a, b), b)
        second = pointwise("mul", pointwise("neg", g), ratio).sum_to(b.shape) if b.needs_grad else None
        return first, second

    a.tape.record((out,), (a, b), back, (a, b))
    return out


def power(x: Tensor, exponent: float) -> Tensor:
    """Return x ** exponent; PyTorch multiplies out the powers 2 and 3."""
    function, derivative = {2.0: ("square", "copy"), 3.0: ("cube", "square")}.get(float(exponent), ("pow", "pow"))
    return unary(function, x, lambda g: pointwise("mul", g, pointwise("scale", pointwise(derivative, x))), (x,))


def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x)."""
    out = pointwise("rsqrt", x)

    def back(g: Tensor) -> tuple[Tensor]:
        return (pointwise("mul", pointwise("scale", g), pointwise("cube", out)),)

    x.tape.record((out,), (x,), back, (out,))
    return out


def sum_last(x: Tensor) -> Tensor:
    """Sum over the last dimension, which stays with size 1."""
    out = reduce("sum", x, (*x.shape[:-1], 1))
    x.tape.record((out,), (x,), lambda g: (g.expand(*x.shape),))
    return out


def mean_last(x: Tensor) -> Tensor:
    """Take the mean over the last dimension, which stays with size 1."""
    out = reduce("mean", x, (*x.shape[:-1], 1))
    x.tape.record((out,), (x,), lambda g: (pointwise("scale", g.expand(*x.shape)),))
    return out


def dropout(x: Tensor, p: float) -> Tensor:
    """Set random elements to zero in training; PyTorch's fused kernel also writes the mask."""
    if not (x.tape.training and p > 0.0):
        return x
    out = x.tape.empty(x.shape, x.dtype, x.strides)
    mask = x.tape.empty(x.shape, Dtype.BOOL, x.strides)
    op = Elementwise("dropout", x.numel, dtype=x.dtype, write=x.numel * (x.dtype.byte + Dtype.BOOL.byte))
    x.tape.emit(op, (x,), (out, mask))
    x.tape.record((out,), (x,), lambda g: (pointwise("dropout_grad", g, mask),), (mask,))
    return out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, in_major: bool = False, fp8: bool = False
) -> Tensor:
    """Return x @ weightᵀ + bias over the last dimension; one kernel forward, two or three backward.

    ``in_major`` weights are stored as ``[in, out]``, which turns their gradient round. ``fp8``: input and gradient
    are cast to fp8, in both orders since fp8 products take one order alone, and all products run in fp8; results
    come out wide. Weights are cast once a step, by the optimiser, so no operator is emitted for that.
    """
    flat = x.reshape(-1, x.shape[-1])
    (m, k), n = flat.shape, weight.shape[0]
    tape = x.tape
    out = tape.empty((m, n), x.dtype)
    narrow = None if weight.dtype is x.dtype else weight.dtype
    fused = bias is not None and (len(x.shape) == 2 or x.is_contiguous)
    math, result = (Dtype.FP8, x.dtype) if fp8 else (tape.math_dtype(x.dtype), _product_dtype(x))
    factors = (_cast_both_orders(flat) if fp8 else flat, weight)
    op = Linear(m, n, k, bias=fused, dtype=math, weight_dtype=narrow, out_dtype=result)
    tape.emit(op, factors if bias is None else (*factors, bias), (out,))
    if bias is not None and not fused:  # PyTorch folds the bias in only where the input needs no reshaping
        tape.emit_pointwise("add", (out, bias), out, Layout.BROADCAST)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        # cuBLAS takes a matrix either way round, but not with holes in both directions
        g = g if is_dense(g.shape, g.strides) or 1 in g.strides else g.clone()
        d_bias = None if bias is None or not bias.needs_grad else reduce("sum", g, bias.shape, across=True)
        g = _cast_both_orders(g) if fp8 else g
        narrow = x.dtype if fp8 else None
        d_x = _multiply_matrices(g, factors[1], m, k, n, flat.shape, out_dtype=narrow) if flat.needs_grad else None
        rows, columns = (k, n) if in_major else (n, k)
        d_w = None
        if weight.needs_grad:
            d_w = _multiply_matrices(g, factors[0], rows, columns, m, weight.shape, turned=True, out_dtype=narrow)
        return d_x, d_w, d_bias

    saved = (factors[0], weight) if weight.needs_grad else (weight,)
    tape.record((out,), (flat, weight, bias), back, saved)
    return out.view(*x.shape[:-1], n)


def _cast_both_orders(x: Tensor) -> Tensor:
    """Cast a matrix to fp8 and write it and its transpose in one kernel, as fast as memory, unlike PyTorch's cast."""
    out, turned = x.tape.empty(x.shape, Dtype.FP8), x.tape.empty(x.shape, Dtype.FP8)
    op = Elementwise("scale", x.numel, dtype=x.dtype, write=2 * x.numel)
    x.tape.emit(op, (x,), (out, turned))
    return out


def _multiply_matrices(
    a: Tensor, b: Tensor, m: int, n: int, k: int, shape: tuple[int, ...], *, turned: bool = False,
    out_dtype: Dtype | None = None,
) -> Tensor:  # fmt: skip
    out = a.tape.empty(shape, out_dtype or a.dtype)
    result = out_dtype or _product_dtype(a)
    op = Linear(m, n, k, dtype=a.tape.math_dtype(a.dtype), out_dtype=result, turned=turned)
    a.tape.emit(op, (a, b), (out,))
    return out


def _product_dtype(x: Tensor) -> Dtype | None:
    """Return the format of a product's result where it is not the one the product is computed in."""
    return Dtype.FP32 if x.tape.math_dtype(x.dtype) is Dtype.TF32 else None


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``[..., m, k]`` by ``[..., k, n]``; leading dimensions are folded into one.

    Folding a strided tensor copies it, which is where the copies of q, k and v in eager attention come from.
    """
    (m, k), n, tape = a.shape[-2:], b.shape[-1], a.tape
    left, right = a.reshape(-1, m, k), b.reshape(-1, k, n)
    size = left.shape[0]
    out = _multiply_batch(left, right, size, m, n, k)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_left = _multiply_batch(g, right.transpose(1, 2), size, m, k, n) if left.needs_grad else None
        d_right = _multiply_batch(left.transpose(1, 2), g, size, k, n, m) if right.needs_grad else None
        return d_left, d_right

    tape.record((out,), (left, right), back, (left, right))
    return out.view(*a.shape[:-2], m, n)


def _multiply_batch(a: Tensor, b: Tensor, size: int, m: int, n: int, k: int) -> Tensor:
    out = a.tape.empty((size, m, n), a.dtype)
    op = Bmm(size, m, n, k, dtype=a.tape.math_dtype(a.dtype), out_dtype=_product_dtype(a))
    a.tape.emit(op, (a, b), (out,))
    return out


def grouped_matmul(x: Tensor, weight: Tensor, groups: Sequence[tuple[int, int]], *, fp8: bool = False) -> Tensor:
    """Multiply rows of ``x`` by the weight of their group, ``[group, out, in]``.

    ``groups`` lists (how many groups, rows of each). ``fp8``: as in ``linear``.
    """
    n, k = weight.shape[1:]
    tape = x.tape
    math, result = (Dtype.FP8, x.dtype) if fp8 else (tape.math_dtype(x.dtype), _product_dtype(x))
    out = tape.empty((x.shape[0], n), x.dtype)
    if weight.dtype is Dtype.FP8:
        narrow = pointwise("cast", x, out_dtype=Dtype.FP8)
        for size, rows in groups:
            tape.emit(Bmm(size, rows, n, k, dtype=Dtype.FP8, out_dtype=x.dtype), (narrow, weight), (out,))
        return out
    weight_dtype = None if weight.dtype is x.dtype else weight.dtype
    factor = _cast_both_orders(x) if fp8 else x
    for size, rows in groups:
        op = Bmm(size, rows, n, k, dtype=math, out_dtype=result, weight_dtype=weight_dtype)
        tape.emit(op, (factor, weight), (out,))

    def back(g: Tensor) -> Sequence[Tensor | None]:
        g = _cast_both_orders(g) if fp8 else g
        d_x, d_w = tape.empty(x.shape, x.dtype), tape.empty(weight.shape, x.dtype)
        for size, rows in groups:
            tape.emit(Bmm(size, rows, k, n, dtype=math, out_dtype=result), (g, weight), (d_x,))
            if weight.needs_grad:
                tape.emit(Bmm(size, n, k, rows, dtype=math, out_dtype=result), (g, factor), (d_w,))
        return d_x, d_w if weight.needs_grad else None

    tape.record((out,), (x, weight), back, (factor, weight))
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, masked: bool = False, dropped: bool = False
) -> Tensor:
    """Run fused attention of ``[batch, heads, length, dim]``; the result lies in memory as the queries do."""
    batch, heads, q_len, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[-1]
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
        grads = [tape.empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3]), t.dtype) for t in (q, k, v)]
        views = [t.transpose(1, 2) for t in grads]
        tape.emit(operator(True), (g, q, k, v, out), views)
        return views

    tape.record((out,), (q, k, v), back, (q, k, v, out))
    return out


def softmax(x: Tensor, *, wide: bool = False) -> Tensor:
    """Take the softmax over the last dimension; ``wide``: computed and returned in fp32.

    PyTorch's kernel widens fp16 on the fly; bf16 is cast first, by another kernel.
    """
    if wide and x.dtype is not Dtype.FP16:
        x = x.to(Dtype.FP32)
    x = x.contiguous()
    kind = Dtype.FP32 if wide else x.dtype
    out = x.tape.empty(x.shape, kind)
    rows, dim = x.numel // x.shape[-1], x.shape[-1]
    x.tape.emit(Softmax(rows, dim, dtype=x.dtype, out_dtype=None if kind is x.dtype else kind), (x,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_x = g.tape.empty(x.shape, x.dtype)
        narrow = None if kind is x.dtype else x.dtype
        g.tape.emit(Softmax(rows, dim, dtype=kind, out_dtype=narrow, backward=True), (g, out), (d_x,))
        return (d_x,)

    x.tape.record((out,), (x,), back, (out,))
    return out


def cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean negative log likelihood of one label per row, in the logits' format (fp32 in practice)."""
    rows, dim = logits.numel // logits.shape[-1], logits.shape[-1]
    tape = logits.tape
    logp = tape.empty(logits.shape, logits.dtype)
    tape.emit(Softmax(rows, dim, dtype=logits.dtype, log=True), (logits,), (logp,))
    loss = tape.empty((1,), logits.dtype)
    picked = rows * (logits.dtype.byte + Dtype.INT64.byte)
    tape.emit(Elementwise("gather", rows, dtype=logits.dtype, read=picked, write=loss.byte), (logp,), (loss,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_logp = fill(tape, logits.shape, logits.dtype)
        tape.emit(Elementwise("copy", rows, dtype=logits.dtype, read=rows * Dtype.INT64.byte), (g,), (d_logp,))
        d_x = tape.empty(logits.shape, logits.dtype)
        tape.emit(Softmax(rows, dim, dtype=logits.dtype, backward=True, log=True), (d_logp, logp), (d_x,))
        return (d_x,)

    tape.record((loss,), (logits,), back, (logp,))
    return loss


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Norm over the last dimension in one kernel; its backward pass also yields both weight gradients."""
    return _normalise_rows(LayerNorm, x, x.numel // x.shape[-1], weight, bias)


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """Run an RMS norm as one fused kernel (engines and compilers; eager models use several operators)."""
    return _normalise_rows(RmsNorm, x, x.numel // x.shape[-1], weight, None)


def group_norm(x: Tensor, groups: int = 32) -> Tensor:
    """Norm each group of channels of each picture as one row, with weights of its own."""
    weight, bias = (x.tape.parameter(x.shape[1], dtype=x.dtype) for _ in range(2))
    return _normalise_rows(LayerNorm, x, x.shape[0] * groups, weight, bias)


def _normalise_rows(
    kind: type[LayerNorm] | type[RmsNorm], x: Tensor, rows: int, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    x = x.contiguous()
    dim, weights = x.numel // rows, (weight, bias)
    out = x.tape.empty(x.shape, x.dtype)
    x.tape.emit(kind(rows, dim, dtype=x.dtype), [t for t in (x, *weights) if t is not None], (out,))

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_x = g.tape.empty(x.shape, x.dtype)
        g.tape.emit(kind(rows, dim, dtype=x.dtype, backward=True), (g, x), (d_x,))
        return d_x, *[None if t is None else g.tape.empty(t.shape, x.dtype) for t in weights]

    x.tape.record((out,), (x, *weights), back, (x,))
    return out


def batch_norm(x: Tensor) -> Tensor:
    """Norm by running statistics when serving; by the batch's own in training, where the input is read twice."""
    tape, channels = x.tape, x.shape[1]
    weight, bias = (tape.parameter(channels, dtype=x.dtype) for _ in range(2))
    out = tape.empty(x.shape, x.dtype)
    if tape.training:  # a counter of the batches seen
        tape.emit(Elementwise("shift", 1, dtype=Dtype.INT64), (), (tape.empty((1,), Dtype.INT64),))
    function = "batchnorm_train" if tape.training else "batchnorm"

    def operator(function: str, read: int | None = None) -> Elementwise:
        return Elementwise(function, x.numel, dtype=x.dtype, read=read, rows=channels, run=prod(x.shape[2:]))

    tape.emit(operator(function), (x, weight, bias), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        d_x = tape.empty(x.shape, x.dtype)
        tape.emit(operator("batchnorm_grad", 4 * x.byte), (g, x), (d_x,))
        return d_x, tape.empty((channels,), x.dtype), tape.empty((channels,), x.dtype)

    tape.record((out,), (x, weight, bias), back, (x,))
    return out


def embedding(weight: Tensor, tokens: tuple[int, ...], indices: int | None = None) -> Tensor:
    """Look up rows of ``weight`` for int64 tokens (``indices`` distinct ones in memory)."""
    return _gather_rows(weight, (*tokens, weight.shape[-1]), indices or prod(tokens))


def pick_rows(x: Tensor, rows: int) -> Tensor:
    """Return ``x[index]`` for ``rows`` int64 indices."""
    return _gather_rows(x, (rows, *x.shape[1:]), rows)


def _gather_rows(table: Tensor, shape: tuple[int, ...], indices: int) -> Tensor:
    """Gather rows; their gradients are added into zeros."""
    tape, index_byte = table.tape, indices * Dtype.INT64.byte
    out = tape.empty(shape, table.dtype)
    op = Elementwise("gather", out.numel, dtype=table.dtype, read=out.byte + index_byte)
    tape.emit(op, (table,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_table = fill(tape, table.shape, table.dtype)
        op = Elementwise("scatter_add", g.numel, dtype=g.dtype, read=2 * g.byte + index_byte, write=g.byte)
        tape.emit(op, (g,), (d_table,))
        return (d_table,)

    tape.record((out,), (table,), back)
    return out


def sum_rows(x: Tensor, rows: int) -> Tensor:
    """Sum neighbouring rows, ``[rows·k, dim]`` -> ``[rows, dim]``."""
    out = reduce("sum", x, (rows, x.shape[-1]), across=True)

    def back(g: Tensor) -> tuple[Tensor]:
        return (g.unsqueeze(1).expand(rows, x.shape[0] // rows, x.shape[-1]).reshape(*x.shape),)

    x.tape.record((out,), (x,), back)
    return out


def sum_picked_rows(x: Tensor, rows: int) -> Tensor:
    """Pick rows in another order and sum those of each result in one kernel, ``[rows·k, dim]`` -> ``[rows, dim]``."""
    tape, index_byte = x.tape, x.shape[0] * Dtype.INT64.byte
    out = tape.empty((rows, x.shape[-1]), x.dtype)
    tape.emit(Elementwise("add", out.numel, dtype=x.dtype, read=x.byte + index_byte), (x,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_x = tape.empty(x.shape, x.dtype)
        tape.emit(Elementwise("gather", d_x.numel, dtype=g.dtype, read=g.byte + index_byte), (g,), (d_x,))
        return (d_x,)

    tape.record((out,), (x,), back)
    return out


def exchange(x: Tensor, collective: str, gpus: int) -> Tensor:
    """Combine ``x`` among ``gpus``; nothing happens on one."""
    if gpus > 1:
        x.tape.emit(Collective(collective, x.numel * x.dtype.byte, gpus, dtype=x.dtype), (x,), (x,))
    return x


def gather_parts(x: Tensor, gpus: int, stride: int = 1) -> None:
    """Give all GPUs all parts of ``x``."""
    if gpus > 1:
        op = Collective("all_gather", gpus * x.numel * x.dtype.byte, gpus, dtype=x.dtype, stride=stride)
        x.tape.emit(op, (x,), (x,))


def send_rows(x: Tensor, rows: int, byte: int, gpus: int, stride: int = 1, overlaps: int = 0) -> Tensor:
    """Send rows of ``x`` to the GPUs that need them and return the ``rows`` received; gradients go the way back."""
    out = x.tape.empty((rows, x.shape[-1]), x.dtype)
    op = Collective("all_to_all", byte, gpus, dtype=x.dtype, stride=stride, overlaps=overlaps)
    x.tape.emit(op, (x,), (out,))
    x.tape.record((out,), (x,), lambda g: (send_rows(g, x.shape[0], byte, gpus, stride),))
    return out


def enter_parallel(x: Tensor, gpus: int) -> Tensor:
    """Begin a tensor-parallel part of the model: free forward, gradients are added up backward."""
    if gpus == 1:
        return x
    out = Tensor(x.tape, x.shape, x.strides, x.dtype, x.storage)
    x.tape.record((out,), (x,), lambda g: (exchange(g, "all_reduce", gpus),))
    return out


def leave_parallel(x: Tensor, gpus: int) -> Tensor:
    """End a tensor-parallel part of the model: results are added up forward, gradients pass."""
    return exchange(x, "all_reduce", gpus)


def conv2d(
    x: Tensor, filters: int, size: int, *, stride: int = 1, padding: int | None = None, groups: int = 1,
    bias: bool = False,
) -> Tensor:  # fmt: skip
    """Run a square convolution with weights of its own; by default padded to keep the size at stride 1."""
    n, c, h, w = x.shape
    tape = x.tape
    padding = size // 2 if padding is None else padding
    weight = tape.parameter(filters, c // groups, size, size, dtype=x.dtype)
    offset = tape.parameter(filters, dtype=x.dtype) if bias else None

    def operator(direction: str) -> Conv2d:
        return Conv2d(
            n, c, filters, h, w, size, size, stride=stride, padding=padding, groups=groups,
            direction=direction, dtype=tape.math_dtype(x.dtype),
        )  # fmt: skip

    forward = operator("forward")
    return _convolve_images(x, weight, offset, (n, filters, forward.p, forward.q), operator)


def conv1d(x: Tensor, filters: int, size: int, *, stride: int = 1) -> Tensor:
    """Convolve ``[n, c, length]`` over time, with bias, padded to keep the length at stride 1."""
    n, c, length = x.shape
    tape = x.tape
    weight, bias = tape.parameter(filters, c, size, dtype=x.dtype), tape.parameter(filters, dtype=x.dtype)

    def operator(direction: str) -> Conv2d:
        return Conv2d(
            n, c, filters, 1, length, 1, size, padding_w=size // 2, stride_w=None if stride == 1 else stride,
            direction=direction, dtype=tape.math_dtype(x.dtype),
        )  # fmt: skip

    return _convolve_images(x, weight, bias, (n, filters, operator("forward").q), operator)


def _convolve_images(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...], operator: Callable[[str], Conv2d]
) -> Tensor:
    tape = x.tape
    out = tape.empty(shape, x.dtype)
    tape.emit(operator("forward"), (x, weight), (out,))
    if bias is not None:  # cuDNN adds it in place, by another kernel
        tape.emit_pointwise("add", (out, bias), out, Layout.BROADCAST, (prod(shape[:2]), None))

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_x = tape.empty(x.shape, x.dtype) if x.needs_grad else None
        if d_x is not None:
            tape.emit(operator("dgrad"), (g, weight), (d_x,))
        d_w = tape.empty(weight.shape, x.dtype)
        tape.emit(operator("wgrad"), (g, x), (d_w,))
        return d_x, d_w, None if bias is None else reduce("sum", g, bias.shape)

    tape.record((out,), (x, weight, bias), back, (x, weight))
    return out


def max_pool(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """Take the largest of each window; the kernel also writes its place as an int64."""
    n, c, h, w = x.shape
    p, q = ((side + 2 * padding - size) // stride + 1 for side in (h, w))
    tape = x.tape
    out = tape.empty((n, c, p, q), x.dtype)
    index_byte = out.numel * Dtype.INT64.byte
    op = Elementwise("pool", x.numel, dtype=x.dtype, write=out.byte + index_byte, rows=n * c)
    tape.emit(op, (x,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_x = tape.empty(x.shape, x.dtype)
        op = Elementwise("pool_grad", x.numel, dtype=x.dtype, read=g.byte + index_byte, rows=n * c)
        tape.emit(op, (g,), (d_x,))
        return (d_x,)

    tape.record((out,), (x,), back)
    return out


def mean_pool(x: Tensor) -> Tensor:
    """Take the mean over the whole picture: ``[n, c, h, w]`` -> ``[n, c]``."""
    n, c, h, w = x.shape
    out = reduce("mean", x, (n, c))
    x.tape.record((out,), (x,), lambda g: (pointwise("scale", g.view(n, c, 1, 1).expand(n, c, h, w)),))
    return out


def upsample(x: Tensor) -> Tensor:
    """Double height and width by nearest neighbours."""
    n, c, h, w = x.shape
    out = x.tape.empty((n, c, 2 * h, 2 * w), x.dtype)
    x.tape.emit_pointwise("copy", (x,), out, Layout.BROADCAST)
    x.tape.record((out,), (x,), lambda g: (reduce("sum", g, x.shape),))
    return out
