"""Operations that are more than pointwise: products, attention, norms, lookups, losses, exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from wattcast.dtypes import Dtype
from wattcast.workload.functional import fill, reduce
from wattcast.workload.graph import (
    Attention,
    Bmm,
    Collective,
    Elementwise,
    LayerNorm,
    Layout,
    Linear,
    RmsNorm,
    Softmax,
)
from wattcast.workload.pointwise import elementwise, pointwise
from wattcast.workload.strides import dense, output_strides
from wattcast.workload.symbolic import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, in_major: bool = False) -> Tensor:
    """x @ weightᵀ + bias over the last dimension; one kernel forward, two or three backward."""
    flat = x.reshape(-1, x.shape[-1])
    (m, k), n = flat.shape, weight.shape[0]
    tape = x.tape
    out = tape.empty((m, n), x.dtype)
    narrow = None if weight.dtype is x.dtype else weight.dtype
    reads = (flat, weight) if bias is None else (flat, weight, bias)
    fused = bias is not None and (len(x.shape) == 2 or x.is_contiguous)
    op = Linear(m, n, k, bias=fused, dtype=tape.math(x.dtype), weight_dtype=narrow, out_dtype=_wide(x))
    tape.emit(op, reads, (out,))
    if bias is not None and not fused:  # PyTorch folds the bias in only where the input needs no reshaping
        tape.emit(elementwise("add", (out, bias), out, out.dtype, Layout.BROADCAST), (out, bias), (out,))

    def back(g: Tensor) -> Sequence[Tensor | None]:
        g = _mm_ready(g)
        d_bias = None if bias is None else reduce("sum", g, bias.shape, across=True)
        d_x = _mm(g, weight, m, k, n, flat.shape) if flat.needs_grad else None
        rows, columns = (k, n) if in_major else (n, k)
        d_w = _mm(g, flat, rows, columns, m, weight.shape, turned=True) if weight.needs_grad else None
        return d_x, d_w, d_bias

    tape.record((out,), (flat, weight, bias), back, (flat, weight))
    return out.view(*x.shape[:-1], n)


def _wide(x: Tensor) -> Dtype | None:
    return Dtype.FP32 if x.tape.math(x.dtype) is Dtype.TF32 else None


def _mm_ready(g: Tensor) -> Tensor:
    """cuBLAS takes a matrix either way round, but not with holes in both directions."""
    return g if dense(g.shape, g.strides) or 1 in g.strides else g.clone()


def _mm(a: Tensor, b: Tensor, m: int, n: int, k: int, shape: tuple[int, ...], *, turned: bool = False) -> Tensor:
    out = a.tape.empty(shape, a.dtype)
    op = Linear(m, n, k, dtype=a.tape.math(a.dtype), out_dtype=_wide(a), turned=turned)
    a.tape.emit(op, (a, b), (out,))
    return out


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched product of ``[..., m, k]`` and ``[..., k, n]``: leading dimensions are folded into one.

    Folding a strided tensor copies it, which is where eager attention's q/k/v copies come from.
    """
    lead, (m, k), n = a.shape[:-2], a.shape[-2:], b.shape[-1]
    left, right = a.reshape(-1, m, k), b.reshape(-1, k, n)
    out = bmm(left, right)
    return out.view(*lead, m, n)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """``[b, m, k] @ [b, k, n]``."""
    (size, m, k), n, tape = a.shape, b.shape[-1], a.tape
    out = _bmm(a, b, size, m, n, k)

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_a = _bmm(g, b.transpose(1, 2), size, m, k, n) if a.needs_grad else None
        d_b = _bmm(a.transpose(1, 2), g, size, k, n, m) if b.needs_grad else None
        return d_a, d_b

    tape.record((out,), (a, b), back, (a, b))
    return out


def _bmm(a: Tensor, b: Tensor, size: int, m: int, n: int, k: int) -> Tensor:
    out = a.tape.empty((size, m, n), a.dtype)
    a.tape.emit(Bmm(size, m, n, k, dtype=a.tape.math(a.dtype), out_dtype=_wide(a)), (a, b), (out,))
    return out


def softmax(x: Tensor, *, wide: bool = False) -> Tensor:
    """Softmax over the last dimension; ``wide``: computed and given back in fp32.

    PyTorch's kernel widens fp16 by itself; bf16 is cast first by a kernel of its own.
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


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Layer norm over the last dimension: one kernel; its backward also yields both weight gradients."""
    return _row_norm(LayerNorm, x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """RMS norm as one fused kernel (engines and compilers; eager models spell it out)."""
    return _row_norm(RmsNorm, x, weight, None)


def _row_norm(kind: type[LayerNorm] | type[RmsNorm], x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x.contiguous()
    out = x.tape.empty(x.shape, x.dtype)
    rows, dim = x.numel // x.shape[-1], x.shape[-1]
    x.tape.emit(kind(rows, dim, dtype=x.dtype), [t for t in (x, weight, bias) if t is not None], (out,))

    def back(g: Tensor) -> Sequence[Tensor | None]:
        d_x = g.tape.empty(x.shape, x.dtype)
        g.tape.emit(kind(rows, dim, dtype=x.dtype, backward=True), (g, x), (d_x,))
        shape = (dim,)
        d_w = None if weight is None else g.tape.empty(shape, x.dtype)
        d_b = None if bias is None else g.tape.empty(shape, x.dtype)
        return d_x, d_w, d_b

    x.tape.record((out,), (x, weight, bias), back, (x,))
    return out


def embedding(weight: Tensor, tokens: tuple[int, ...], indices: int | None = None) -> Tensor:
    """Rows of ``weight`` for int64 tokens (``indices`` distinct ones in memory); gradients add into zeros."""
    tape, dim = weight.tape, weight.shape[-1]
    out = tape.empty((*tokens, dim), weight.dtype)
    index = (indices or out.numel // dim) * Dtype.INT64.byte
    tape.emit(Elementwise("gather", out.numel, dtype=weight.dtype, read=out.byte + index), (weight,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_w = fill(tape, weight.shape, weight.dtype)
        op = Elementwise("scatter_add", g.numel, dtype=g.dtype, read=2 * g.byte + index, write=g.byte)
        tape.emit(op, (g,), (d_w,))
        return (d_w,)

    tape.record((out,), (weight,), back)
    return out


def pick_rows(x: Tensor, rows: int) -> Tensor:
    """``x[index]`` for ``rows`` int64 indices; the gradient adds rows into zeros."""
    tape = x.tape
    out = tape.empty((rows, *x.shape[1:]), x.dtype)
    index = rows * Dtype.INT64.byte
    tape.emit(Elementwise("gather", out.numel, dtype=x.dtype, read=out.byte + index), (x,), (out,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_x = fill(tape, x.shape, x.dtype)
        op = Elementwise("scatter_add", g.numel, dtype=g.dtype, read=2 * g.byte + index, write=g.byte)
        tape.emit(op, (g,), (d_x,))
        return (d_x,)

    tape.record((out,), (x,), back)
    return out


def sum_rows(x: Tensor, rows: int) -> Tensor:
    """``[rows·k, dim]`` -> ``[rows, dim]``, neighbours added up."""
    out = reduce("sum", x, (rows, x.shape[-1]), across=True)

    def back(g: Tensor) -> tuple[Tensor]:
        times = x.shape[0] // rows
        return (g.unsqueeze(1).expand(rows, times, x.shape[-1]).reshape(*x.shape),)

    x.tape.record((out,), (x,), back)
    return out


def grouped(x: Tensor, weight: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """Rows of ``x`` times the weight of their group, ``[group, out, in]``; ``groups`` is (how many, rows each)."""
    n, k = weight.shape[1:]
    tape = x.tape
    out = tape.empty((x.shape[0], n), x.dtype)
    if weight.dtype is Dtype.FP8:
        narrow = pointwise("cast", x, out_dtype=Dtype.FP8)
        for size, rows in groups:
            tape.emit(Bmm(size, rows, n, k, dtype=Dtype.FP8, out_dtype=x.dtype), (narrow, weight), (out,))
        return out
    thin = None if weight.dtype is x.dtype else weight.dtype
    for size, rows in groups:
        op = Bmm(size, rows, n, k, dtype=tape.math(x.dtype), out_dtype=_wide(x), weight_dtype=thin)
        tape.emit(op, (x, weight), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        d_x, d_w = tape.empty(x.shape, x.dtype), tape.empty(weight.shape, x.dtype)
        for size, rows in groups:
            math = tape.math(x.dtype)
            tape.emit(Bmm(size, rows, k, n, dtype=math, out_dtype=_wide(x)), (g, weight), (d_x,))
            tape.emit(Bmm(size, n, k, rows, dtype=math, out_dtype=_wide(x)), (g, x), (d_w,))
        return d_x, d_w

    tape.record((out,), (x, weight), back, (x, weight))
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, masked: bool = False, dropped: bool = False
) -> Tensor:
    """Fused attention of ``[batch, heads, length, dim]``; the result lies in memory as the queries do."""
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
            dtype=tape.math(q.dtype),
        )  # fmt: skip

    tape.emit(operator(False), (q, k, v), (out,))

    def back(g: Tensor) -> Sequence[Tensor]:
        grads = [tape.empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3]), t.dtype) for t in (q, k, v)]
        views = [t.transpose(1, 2) for t in grads]
        tape.emit(operator(True), (g, q, k, v, out), views)
        return views

    tape.record((out,), (q, k, v), back, (q, k, v, out))
    return out


def exchange(x: Tensor, collective: str, gpus: int) -> Tensor:
    """``x`` combined among ``gpus``; nothing on one."""
    if gpus > 1:
        x.tape.emit(Collective(collective, x.numel * x.dtype.byte, gpus, dtype=x.dtype), (x,), (x,))
    return x


def gather_parts(x: Tensor, gpus: int) -> None:
    """All GPUs get all parts of ``x``, side by side."""
    if gpus > 1:
        whole = gpus * x.numel * x.dtype.byte
        x.tape.emit(Collective("all_gather", whole, gpus, dtype=x.dtype), (x,), (x,))


def enter_parallel(x: Tensor, gpus: int) -> Tensor:
    """Where tensor-parallel halves begin: free forward, gradients are added up backward."""
    if gpus == 1:
        return x
    out = Tensor(x.tape, x.shape, x.strides, x.dtype, x.storage)
    x.tape.record((out,), (x,), lambda g: (exchange(g, "all_reduce", gpus),))
    return out


def leave_parallel(x: Tensor, gpus: int) -> Tensor:
    """Where tensor-parallel halves meet: results are added up forward, gradients pass."""
    return exchange(x, "all_reduce", gpus)


def cross_entropy(logits: Tensor) -> Tensor:
    """Mean negative log likelihood of one label a row, in the logits' format (fp32 in practice)."""
    rows, dim = logits.numel // logits.shape[-1], logits.shape[-1]
    tape = logits.tape
    logp = tape.empty(logits.shape, logits.dtype)
    tape.emit(Softmax(rows, dim, dtype=logits.dtype), (logits,), (logp,))
    loss = tape.empty((1,), logits.dtype)
    picked = rows * (logits.dtype.byte + Dtype.INT64.byte)
    tape.emit(Elementwise("gather", rows, dtype=logits.dtype, read=picked, write=loss.byte), (logp,), (loss,))

    def back(g: Tensor) -> tuple[Tensor]:
        d_logp = fill(tape, logits.shape, logits.dtype)
        tape.emit(Elementwise("copy", rows, dtype=logits.dtype, read=rows * Dtype.INT64.byte), (g,), (d_logp,))
        d_x = tape.empty(logits.shape, logits.dtype)
        tape.emit(Softmax(rows, dim, dtype=logits.dtype, backward=True), (d_logp, logp), (d_x,))
        return (d_x,)

    tape.record((loss,), (logits,), back, (logp,))
    return loss
