"""Functions of symbolic tensors, with the operators and gradients PyTorch would run.

They are named as in PyTorch.
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
from wattcast.workload.symbolic_tensor import (
    Tensor,
    fill,
    is_turned,
    pointwise,
    reduce,
    unary,
)

# Activations whose gradient follows from their result.
_RESULT_DECIDES_GRADIENT = ("relu", "tanh", "sigmoid")
# Powers that PyTorch multiplies out, and their derivatives.
_POWERS = {2.0: ("square", "copy"), 3.0: ("cube", "square")}


def activation(function: str, x: Tensor) -> Tensor:
    """Apply gelu, silu, relu, tanh ...: one kernel forward, one backward.

    The one backward also reads the result or the input.
    """
    out = pointwise(function, x)
    saved = out if function in _RESULT_DECIDES_GRADIENT else x

    def back(g: Tensor) -> Tensor:
        return pointwise(f"{function}_grad", g, saved)

    return out.with_gradient(back, x, save=(saved,))


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b; the gradients are g / b and -g·(a / b) / b."""

    def back(g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        d_a = None
        d_b = None
        if a.needs_grad:
            d_a = pointwise("div", g, b).sum_to(a.shape)
        ratio = pointwise("div", pointwise("div", a, b), b)
        if b.needs_grad:
            d_b = pointwise("mul", pointwise("neg", g), ratio).sum_to(b.shape)
        return d_a, d_b

    return pointwise("div", a, b).with_gradient(back, a, b, save=(a, b))


def power(x: Tensor, exponent: float) -> Tensor:
    """Return x ** exponent; PyTorch multiplies out the powers 2 and 3."""
    function, derivative = _POWERS.get(float(exponent), ("pow", "pow"))

    def back(g: Tensor) -> Tensor:
        slope = pointwise("scale", pointwise(derivative, x))
        return pointwise("mul", g, slope)

    return unary(function, x, back, (x,))


def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x)."""
    out = pointwise("rsqrt", x)

    def back(g: Tensor) -> Tensor:
        return pointwise("mul", pointwise("scale", g), pointwise("cube", out))

    return out.with_gradient(back, x, save=(out,))


def reduce_last(function: str, x: Tensor) -> Tensor:
    """Take the sum or the mean over the last dimension, which stays with size 1."""

    def back(g: Tensor) -> Tensor:
        spread = g.expand(*x.shape)
        return pointwise("scale", spread) if function == "mean" else spread

    return reduce(function, x, (*x.shape[:-1], 1)).with_gradient(back, x)


def dropout(x: Tensor, p: float) -> Tensor:
    """Set random elements to zero in training; PyTorch's fused kernel also writes the mask."""
    if not x.tape.training or p <= 0.0:
        return x
    out = x.tape.empty(x.shape, x.dtype, x.strides)
    mask = x.tape.empty(x.shape, Dtype.BOOL, x.strides)
    write = x.numel * (x.dtype.byte + Dtype.BOOL.byte)
    op = Elementwise("dropout", x.numel, dtype=x.dtype, write=write)
    x.tape.emit(op, (x,), (out, mask))

    def back(g: Tensor) -> Tensor:
        return pointwise("dropout_grad", g, mask)

    return out.with_gradient(back, x, save=(mask,))


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
    tape = x.tape
    flat = x.reshape(-1, x.shape[-1])
    m, k = flat.shape
    n = weight.shape[0]
    math, result = _product_formats(x, fp8)
    factor = _cast_both_orders(flat) if fp8 else flat

    # PyTorch folds the bias in only where the input needs no reshaping
    fuses_bias = bias is not None and (len(x.shape) == 2 or x.is_contiguous)
    op = Linear(
        m=m,
        n=n,
        k=k,
        bias=fuses_bias,
        weight_dtype=None if weight.dtype is x.dtype else weight.dtype,
        out_dtype=result,
        dtype=math,
    )
    reads = (factor, weight) if bias is None else (factor, weight, bias)
    out = tape.launch(op, reads, (m, n), x.dtype)
    if bias is not None and not fuses_bias:
        tape.emit_pointwise("add", (out, bias), out, Layout.BROADCAST)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        # cuBLAS takes a matrix either way round, but not with holes in both directions
        if not is_dense(g.shape, g.strides) and 1 not in g.strides:
            g = g.clone()
        d_bias = None
        if bias is not None and bias.needs_grad:
            d_bias = reduce("sum", g, bias.shape, across=True)
        if fp8:
            g = _cast_both_orders(g)

        d_flat = None
        if flat.needs_grad:
            op = Linear(
                m=m,
                n=k,
                k=n,
                dtype=math,
                out_dtype=result,
            )
            d_flat = tape.launch(op, (g, weight), flat.shape, x.dtype)
        d_weight = None
        if weight.needs_grad:
            rows, columns = (k, n) if in_major else (n, k)
            op = Linear(
                m=rows,
                n=columns,
                k=m,
                dtype=math,
                out_dtype=result,
                turned=True,
            )
            d_weight = tape.launch(op, (g, factor), weight.shape, x.dtype)
        return d_flat, d_weight, d_bias

    save = (factor, weight) if weight.needs_grad else (weight,)
    out = out.with_gradient(
        back,
        flat,
        weight,
        bias,
        save=save,
    )
    return out.view(*x.shape[:-1], n)


def _product_formats(x: Tensor, fp8: bool = False) -> tuple[Dtype, Dtype | None]:
    """Return the format a product is computed in, and that of its result where it is another."""
    if fp8:
        return Dtype.FP8, x.dtype
    math = x.tape.math_dtype(x.dtype)
    return math, Dtype.FP32 if math is Dtype.TF32 else None


def _cast_both_orders(x: Tensor) -> Tensor:
    """Cast a matrix to fp8 and write it and its transpose in one kernel.

    The kernel is as fast as memory, unlike PyTorch's cast.
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
    tape = a.tape
    m, k = a.shape[-2:]
    n = b.shape[-1]
    rows = a.reshape(-1, m, k)
    right = b.reshape(-1, k, n)
    products = rows.shape[0]
    math, result = _product_formats(a)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        m, k = a.shape[1:]
        n = b.shape[2]
        op = Bmm(
            b=products,
            m=m,
            n=n,
            k=k,
            dtype=math,
            out_dtype=result,
            turned=is_turned(a, b),
        )
        return tape.launch(op, (a, b), (products, m, n), a.dtype)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_left = multiply(g, right.transpose(1, 2)) if rows.needs_grad else None
        d_right = multiply(rows.transpose(1, 2), g) if right.needs_grad else None
        return d_left, d_right

    out = multiply(rows, right).with_gradient(back, rows, right, save=(rows, right))
    return out.view(*a.shape[:-2], m, n)


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    groups: Sequence[tuple[int, int]],
    *,
    fp8: bool = False,
) -> Tensor:
    """Multiply rows of ``x`` by the weight of their group, ``[group, out, in]``.

    ``groups`` lists (how many groups, rows of each). ``fp8``: as in ``linear``.
    """
    tape = x.tape
    n, k = weight.shape[1:]
    has_fp8_weight = weight.dtype is Dtype.FP8
    math, result = _product_formats(x, fp8 or has_fp8_weight)
    out = tape.empty((x.shape[0], n), x.dtype)
    weight_dtype = None if weight.dtype in (x.dtype, Dtype.FP8) else weight.dtype
    factor = x
    if has_fp8_weight:
        factor = pointwise("cast", x, out_dtype=Dtype.FP8)
    elif fp8:
        factor = _cast_both_orders(x)
    for count, rows in groups:
        op = Bmm(
            b=count,
            m=rows,
            n=n,
            k=k,
            dtype=math,
            out_dtype=result,
            weight_dtype=weight_dtype,
        )
        tape.emit(op, (factor, weight), (out,))

    def back(g: Tensor) -> Sequence[Tensor | None]:
        if fp8:
            g = _cast_both_orders(g)
        d_x = tape.empty(x.shape, x.dtype)
        d_weight = tape.empty(weight.shape, x.dtype)
        for count, rows in groups:
            op = Bmm(
                b=count,
                m=rows,
                n=k,
                k=n,
                dtype=math,
                out_dtype=result,
            )
            tape.emit(op, (g, weight), (d_x,))
            if weight.needs_grad:
                op = Bmm(
                    b=count,
                    m=n,
                    n=k,
                    k=rows,
                    dtype=math,
                    out_dtype=result,
                    turned=True,
                )
                tape.emit(op, (g, factor), (d_weight,))
        return d_x, d_weight if weight.needs_grad else None

    return out.with_gradient(back, x, weight, save=(factor, weight))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    masked: bool = False,
    dropped: bool = False,
) -> Tensor:
    """Run fused attention of ``[batch, heads, length, dim]``.

    The result lies in memory as the queries do.
    """
    tape = q.tape
    batch, heads, q_len, dim = q.shape
    v_dim = v.shape[-1]
    if v_dim == dim and not masked:
        shape = (batch, heads, q_len, v_dim)
        out = tape.empty(shape, q.dtype, output_strides(shape, [(q.shape, q.strides)]))
    else:
        out = tape.empty((batch, q_len, heads, v_dim), q.dtype).transpose(1, 2)

    op = Attention(
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        q_len=q_len,
        kv_len=k.shape[2],
        head_dim=dim,
        causal=causal and q_len > 1,
        v_head_dim=None if v_dim == dim else v_dim,
        dropout=dropped,
        dtype=tape.math_dtype(q.dtype),
    )
    tape.emit(op, (q, k, v), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        grads = []
        for tensor in (q, k, v):
            sequences, heads, length, dim = tensor.shape
            grad = tape.empty((sequences, length, heads, dim), tensor.dtype)
            grads.append(grad.transpose(1, 2))
        tape.emit(replace(op, backward=True), (g, q, k, v, out), grads)
        return grads

    return out.with_gradient(
        back,
        q,
        k,
        v,
        save=(q, k, v, out),
    )


def softmax(
    x: Tensor,
    *,
    wide: bool = False,
    masked: float = 0.0,
) -> Tensor:
    """Take the softmax over the last dimension; ``wide``: computed and returned in fp32.

    ``masked`` is the share of ``x`` that a mask hides.
    PyTorch's kernel widens fp16 on the fly; bf16 is cast first, by another kernel.
    """
    if wide and x.dtype is not Dtype.FP16:
        x = x.to(Dtype.FP32)
    x = x.contiguous()
    dim = x.shape[-1]
    rows = x.numel // dim
    result = Dtype.FP32 if wide else x.dtype
    widens = result is not x.dtype
    op = Softmax(
        rows,
        dim,
        out_dtype=result if widens else None,
        masked=masked,
        dtype=x.dtype,
    )
    out = x.tape.launch(op, (x,), x.shape, result)

    def back(g: Tensor) -> Tensor:
        narrowed = x.dtype if widens else None
        op = Softmax(
            rows,
            dim,
            out_dtype=narrowed,
            backward=True,
            dtype=result,
        )
        return g.tape.launch(op, (g, out), x.shape, x.dtype)

    return out.with_gradient(back, x, save=(out,))


def cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean negative log likelihood of one label per row.

    It is computed in the logits' format (fp32 in practice).
    """
    tape = logits.tape
    dtype = logits.dtype
    dim = logits.shape[-1]
    rows = logits.numel // dim
    softmax = Softmax(rows, dim, dtype=dtype, log=True)
    log_probability = tape.launch(softmax, (logits,), logits.shape)
    picked_byte = rows * (dtype.byte + Dtype.INT64.byte)
    pick = Elementwise(
        "gather",
        rows,
        dtype=dtype,
        read=picked_byte,
        write=dtype.byte,
    )
    loss = tape.launch(pick, (log_probability,), (1,))

    def back(g: Tensor) -> Tensor:
        d_log_probability = fill(tape, logits.shape, dtype)
        copy = Elementwise("copy", rows, dtype=dtype, read=rows * Dtype.INT64.byte)
        tape.emit(copy, (g,), (d_log_probability,))
        op = Softmax(
            rows,
            dim,
            dtype=dtype,
            backward=True,
            log=True,
        )
        return tape.launch(op, (d_log_probability, log_probability), logits.shape)

    return loss.with_gradient(back, logits, save=(log_probability,))


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Norm over the last dimension in one kernel.

    Its backward pass also yields both weight gradients.
    """
    return _normalise_rows(
        LayerNorm,
        x,
        x.numel // x.shape[-1],
        weight,
        bias,
    )


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """Run an RMS norm as one fused kernel, as engines and compilers do.

    Eager models use several operators.
    """
    return _normalise_rows(
        RmsNorm,
        x,
        x.numel // x.shape[-1],
        weight,
        None,
    )


def group_norm(x: Tensor, groups: int = 32) -> Tensor:
    """Norm each group of channels of each picture as one row, with weights of its own."""
    channels = x.shape[1]
    weight = x.tape.parameter(channels, dtype=x.dtype)
    bias = x.tape.parameter(channels, dtype=x.dtype)
    return _normalise_rows(
        LayerNorm,
        x,
        x.shape[0] * groups,
        weight,
        bias,
    )


def _normalise_rows(
    kind: type[LayerNorm] | type[RmsNorm],
    x: Tensor,
    rows: int,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    x = x.contiguous()
    dim = x.numel // rows
    reads = [tensor for tensor in (x, weight, bias) if tensor is not None]
    out = x.tape.launch(kind(rows, dim, dtype=x.dtype), reads, x.shape)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        op = kind(rows, dim, dtype=x.dtype, backward=True)
        d_x = g.tape.launch(op, (g, x), x.shape, x.dtype)
        d_weight = None if weight is None else g.tape.empty(weight.shape, x.dtype)
        d_bias = None if bias is None else g.tape.empty(bias.shape, x.dtype)
        return d_x, d_weight, d_bias

    return out.with_gradient(
        back,
        x,
        weight,
        bias,
        save=(x,),
    )


def batch_norm(x: Tensor) -> Tensor:
    """Norm by running statistics when serving; by those of the batch in training.

    Training reads the input twice.
    """
    tape = x.tape
    channels = x.shape[1]
    weight = tape.parameter(channels, dtype=x.dtype)
    bias = tape.parameter(channels, dtype=x.dtype)
    wide = "_wide" if tape.wide_norms else ""
    function = f"batchnorm_train{wide}" if tape.training else "batchnorm"
    pixels = prod(x.shape[2:])
    layout = Layout.CONTIGUOUS
    if _has_channels_last(x):
        layout = Layout.TRANSPOSED
    op = Elementwise(
        function,
        x.numel,
        dtype=x.dtype,
        layout=layout,
        rows=channels,
        run=pixels,
    )

    if tape.training:
        batch_counter = Elementwise("shift", 1, dtype=Dtype.INT64)
        tape.emit(batch_counter, (), (tape.empty((1,), Dtype.INT64),))
    out = tape.empty(x.shape, x.dtype, x.strides)
    tape.emit(op, (x, weight, bias), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        name = f"batchnorm_grad{wide}"
        read = 4 * x.byte
        op = Elementwise(
            name,
            x.numel,
            dtype=x.dtype,
            layout=layout,
            read=read,
            rows=channels,
            run=pixels,
        )
        d_x = tape.empty(x.shape, x.dtype, x.strides)
        tape.emit(op, (g, x), (d_x,))
        d_weight = tape.empty((channels,), x.dtype)
        d_bias = tape.empty((channels,), x.dtype)
        return d_x, d_weight, d_bias

    return out.with_gradient(
        back,
        x,
        weight,
        bias,
        save=(x,),
    )


def _has_channels_last(x: Tensor) -> bool:
    return len(x.shape) == 4 and x.strides[1] == 1 and x.shape[1] > 1


def embedding(
    weight: Tensor,
    tokens: tuple[int, ...],
    indices: int | None = None,
) -> Tensor:
    """Look up rows of ``weight`` for int64 tokens (``indices`` distinct ones in memory)."""
    return _gather_rows(weight, (*tokens, weight.shape[-1]), indices or prod(tokens))


def pick_rows(x: Tensor, rows: int) -> Tensor:
    """Return ``x[index]`` for ``rows`` int64 indices."""
    return _gather_rows(x, (rows, *x.shape[1:]), rows)


def _gather_rows(
    table: Tensor,
    shape: tuple[int, ...],
    indices: int,
) -> Tensor:
    """Gather rows; their gradients are added into zeros."""
    elements = prod(shape)
    read = elements * table.dtype.byte + indices * Dtype.INT64.byte
    op = Elementwise("gather", elements, dtype=table.dtype, read=read)
    out = table.tape.launch(op, (table,), shape)
    return out.with_gradient(lambda g: scatter_gradient(g, table, indices), table)


def scatter_gradient(
    g: Tensor,
    table: Tensor,
    indices: int,
) -> Tensor:
    """Return the gradient of picking elements: zeros, with values added in their places."""
    out = fill(g.tape, table.shape, table.dtype)
    read = 2 * g.byte + indices * Dtype.INT64.byte
    op = Elementwise(
        "scatter_add",
        g.numel,
        dtype=g.dtype,
        read=read,
        write=g.byte,
    )
    g.tape.emit(op, (g,), (out,))
    return out


def sum_rows(x: Tensor, rows: int) -> Tensor:
    """Sum neighbouring rows, ``[rows·k, dim]`` -> ``[rows, dim]``."""
    many, dim = x.shape

    def back(g: Tensor) -> Tensor:
        repeated = g.unsqueeze(1).expand(rows, many // rows, dim)
        return repeated.reshape(many, dim)

    return reduce("sum", x, (rows, dim), across=True).with_gradient(back, x)


def sum_picked_rows(x: Tensor, rows: int) -> Tensor:
    """Pick rows in another order and sum those of each result in one kernel.

    ``[rows·k, dim]`` becomes ``[rows, dim]``.
    """
    tape = x.tape
    index_byte = x.shape[0] * Dtype.INT64.byte

    def back(g: Tensor) -> Tensor:
        op = Elementwise("gather", x.numel, dtype=g.dtype, read=g.byte + index_byte)
        return tape.launch(op, (g,), x.shape, x.dtype)

    dim = x.shape[-1]
    op = Elementwise("add", rows * dim, dtype=x.dtype, read=x.byte + index_byte)
    return tape.launch(op, (x,), (rows, dim)).with_gradient(back, x)


def gather_parts(
    x: Tensor,
    gpus: int,
    stride: int = 1,
) -> None:
    """Pass all parts of ``x`` to all GPUs."""
    if gpus > 1:
        byte = gpus * x.numel * x.dtype.byte
        op = Collective(
            "all_gather",
            byte,
            gpus,
            stride=stride,
            dtype=x.dtype,
        )
        x.tape.emit(op, (x,), (x,))


def send_rows(
    x: Tensor,
    rows: int,
    byte: int,
    gpus: int,
    stride: int = 1,
    overlaps: int = 0,
) -> Tensor:
    """Send rows of ``x`` to the GPUs that need them and return the ``rows`` received.

    Gradients go the way back.
    """
    op = Collective(
        "all_to_all",
        byte,
        gpus,
        dtype=x.dtype,
        stride=stride,
        overlaps=overlaps,
    )
    out = x.tape.launch(op, (x,), (rows, x.shape[-1]))
    return out.with_gradient(
        lambda g: send_rows(
            g,
            x.shape[0],
            byte,
            gpus,
            stride,
        ),
        x,
    )


def enter_parallel(x: Tensor, gpus: int) -> Tensor:
    """Begin a tensor-parallel part of the model: free forward, gradients are added up backward."""
    if gpus == 1:
        return x
    return x.on_tape(x.tape).with_gradient(lambda g: leave_parallel(g, gpus), x)


def leave_parallel(x: Tensor, gpus: int) -> Tensor:
    """End a tensor-parallel part of the model: results are added up forward, gradients pass."""
    if gpus > 1:
        op = Collective("all_reduce", x.numel * x.dtype.byte, gpus, dtype=x.dtype)
        x.tape.emit(op, (x,), (x,))
    return x


def convolve(
    x: Tensor,
    filters: int,
    size: int,
    *,
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
    bias: bool = False,
) -> Tensor:
    """Convolve pictures ``[n, c, h, w]`` with square filters, or signals ``[n, c, length]`` over
    time.

    It creates its weights; by default the input is padded to keep the size at stride 1.
    """
    tape = x.tape
    n, c = x.shape[:2]
    weight_shape = (filters, c // groups, *[size for _ in x.shape[2:]])
    weight = tape.parameter(*weight_shape, dtype=x.dtype)
    offset = tape.parameter(filters, dtype=x.dtype) if bias else None
    if padding is None:
        padding = size // 2
    dtype = tape.convolution_dtype(x.dtype, depthwise=groups > 1 and groups == c)
    op = _describe_convolution(
        x,
        filters,
        size,
        stride,
        padding,
        groups,
        dtype,
    )
    is_picture = len(x.shape) == 4
    shape = (n, filters, op.p, op.q) if is_picture else (n, filters, op.q)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_x = None
        if x.needs_grad:
            image_gradient = replace(op, direction="dgrad")
            d_x = tape.picture(x.shape, x.dtype)
            tape.emit(image_gradient, (g, weight), (d_x,))
        weight_gradient = replace(op, direction="wgrad")
        d_weight = tape.launch(weight_gradient, (g, x), weight.shape, x.dtype)
        d_offset = None
        if offset is not None:
            last = tape.channels_last and _has_channels_last(g)
            summed = g.permute(0, 2, 3, 1) if last else g
            d_offset = reduce("sum", summed, offset.shape, across=last)
        return d_x, d_weight, d_offset

    out = tape.picture(shape, x.dtype)
    tape.emit(op, (x, weight), (out,))
    if offset is not None:  # cuDNN adds it in place, by another kernel
        planes = n * filters
        tape.emit_pointwise(
            "add",
            (out, offset),
            out,
            Layout.BROADCAST,
            (planes, None),
        )
    return out.with_gradient(
        back,
        x,
        weight,
        offset,
        save=(x, weight),
    )


def _describe_convolution(
    x: Tensor,
    filters: int,
    size: int,
    stride: int,
    padding: int,
    groups: int,
    dtype: Dtype,
) -> Conv2d:
    """Return the convolution of pictures, or of signals, which are pictures one row high."""
    n, c, *sides = x.shape
    if len(sides) == 2:
        return Conv2d(
            n=n,
            c=c,
            k=filters,
            h=sides[0],
            w=sides[1],
            r=size,
            s=size,
            stride=stride,
            padding=padding,
            groups=groups,
            channels_last=x.tape.channels_last,
            dtype=dtype,
        )
    return Conv2d(
        n=n,
        c=c,
        k=filters,
        h=1,
        w=sides[0],
        r=1,
        s=size,
        groups=groups,
        padding_w=padding,
        stride_w=None if stride == 1 else stride,
        dtype=dtype,
    )


def max_pool(
    x: Tensor,
    size: int,
    stride: int,
    padding: int,
) -> Tensor:
    """Take the largest of each window; the kernel also writes its place as an int64."""
    tape = x.tape
    n, c, *sides = x.shape
    shape = (n, c, *[(side + 2 * padding - size) // stride + 1 for side in sides])
    elements = prod(shape)
    index_byte = elements * Dtype.INT64.byte
    write = elements * x.dtype.byte + index_byte
    op = Elementwise(
        "pool",
        x.numel,
        dtype=x.dtype,
        write=write,
        rows=n * c,
    )
    out = tape.picture(shape, x.dtype)
    tape.emit(op, (x,), (out,))

    def back(g: Tensor) -> Tensor:
        op = Elementwise(
            "pool_grad",
            x.numel,
            dtype=x.dtype,
            read=g.byte + index_byte,
            rows=n * c,
        )
        d_x = tape.picture(x.shape, x.dtype)
        tape.emit(op, (g,), (d_x,))
        return d_x

    return out.with_gradient(back, x)


def mean_pool(x: Tensor) -> Tensor:
    """Take the mean over the whole picture: ``[n, c, h, w]`` -> ``[n, c]``."""
    n, c, h, w = x.shape
    out = reduce("mean", x, (n, c))

    def back(g: Tensor) -> Tensor:
        if not x.tape.channels_last:
            return pointwise("scale", g.view(n, c, 1, 1).expand(n, c, h, w))
        d_x = x.tape.picture(x.shape, x.dtype)
        x.tape.emit_pointwise("scale", (g,), d_x, Layout.BROADCAST)
        return d_x

    return out.with_gradient(back, x)


def upsample(x: Tensor) -> Tensor:
    """Double height and width by nearest neighbours."""
    n, c, h, w = x.shape
    out = x.tape.empty((n, c, 2 * h, 2 * w), x.dtype)
    x.tape.emit_pointwise("copy", (x,), out, Layout.BROADCAST)
    return out.with_gradient(lambda g: reduce("sum", g, x.shape), x)
