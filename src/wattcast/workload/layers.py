"""Pieces that several architectures share: projections, norms, rotary embedding, attention, caches."""

from __future__ import annotations

from dataclasses import replace

from wattcast.dtypes import Dtype
from wattcast.workload import products
from wattcast.workload.functional import activation, cat, dropout, mean_last, power, rsqrt
from wattcast.workload.graph import Layout, Linear
from wattcast.workload.masks import additive
from wattcast.workload.options import Head
from wattcast.workload.pointwise import elementwise, pointwise
from wattcast.workload.run import Run
from wattcast.workload.symbolic import Tape, Tensor


def project(
    run: Run, x: Tensor, features: int, bias: bool = False, *, wide: bool = False, in_major: bool = False
) -> Tensor:
    """A linear layer with its own weight; ``wide`` keeps it out of fp8 and int8.

    ``in_major`` weights are stored as ``[in, out]`` (GPT-2's Conv1D), so their gradient is as well.
    """
    tape, inner = x.tape, x.shape[-1]
    narrow = run.dtype if wide else run.weight_dtype
    weight = tape.parameter(features, inner, dtype=narrow)
    offset = tape.parameter(features, dtype=run.dtype) if bias else None
    if narrow is Dtype.FP8:
        return _project_fp8(run, x, weight, offset)
    return products.linear(x, weight, offset, in_major=in_major)


def _project_fp8(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Activations are cast to fp8 by static scales, multiplied, and come out wide."""
    flat = pointwise("cast", x.reshape(-1, x.shape[-1]), out_dtype=Dtype.FP8)
    (m, k), n = flat.shape, weight.shape[0]
    out = x.tape.empty((m, n), run.dtype)
    op = Linear(m, n, k, bias=bias is not None, dtype=Dtype.FP8, out_dtype=run.dtype)
    x.tape.emit(op, (flat, weight), (out,))
    return out.view(*x.shape[:-1], n)


def layer_norm(run: Run, x: Tensor) -> Tensor:
    """Layer norm with weight and bias."""
    dim = x.shape[-1]
    weight, bias = x.tape.parameter(dim, dtype=run.dtype), x.tape.parameter(dim, dtype=run.dtype)
    return products.layer_norm(x, weight, bias)


def rms_norm(run: Run, x: Tensor, *, gemma: bool = False) -> Tensor:
    """RMS norm as Hugging Face spells it out, in fp32: cast, square, mean, rsqrt, scale, cast back, weight.

    Gemma multiplies by (1 + weight), in fp32, before it casts back.
    """
    weight = x.tape.parameter(x.shape[-1], dtype=run.dtype)
    if run.engine:
        return products.rms_norm(x, weight)
    with x.tape.at("norm"):
        wide = x.to(Dtype.FP32)
        scaled = wide * rsqrt(mean_last(power(wide, 2)) + 1e-6)
        if gemma:
            return (scaled * (weight.to(Dtype.FP32) + 1.0)).to(x.dtype)
        return weight * scaled.to(x.dtype)


def rotary_tables(tape: Tape, run: Run, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, computed in fp32 once a pass and cast to the model's format."""
    if run.engine:  # a table made once
        table = tape.empty((1, run.length, dim), run.dtype)
        return table, table
    with tape.at("rotary"):
        place = pointwise("cast", tape.empty((1, run.length, 1), Dtype.INT64), out_dtype=Dtype.FP32)
        rate = tape.empty((dim // 2,), run.dtype).to(Dtype.FP32)
        angle = pointwise("mul", place, rate)
        both = cat([angle, angle], -1)
        cos, sin = (pointwise("scale", pointwise(name, both)) for name in ("cos", "sin"))
        return cos.to(run.dtype), sin.to(run.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x·cos + rotate_half(x)·sin over the last dimension."""
    half = x.shape[-1] // 2
    straight = x * cos  # first, as in the original: gradients are gathered in reverse order
    lower, upper = x.slice(-1, 0, half), x.slice(-1, half, 2 * half)
    return straight + cat([-upper, lower], -1) * sin


def append_cache(run: Run, new: Tensor) -> Tensor:
    """The cache with the new keys or values behind it, as one fresh tensor (``DynamicCache``)."""
    if not run.cached:
        return new
    batch, heads, _, dim = new.shape
    with new.tape.at("cache"):
        old = [new.tape.empty((batch, heads, run.past, dim), new.dtype)] if run.past else []
        whole = cat([*old, new], 2)
    new.tape.cache_byte += whole.byte
    whole.storage.resident = True
    return whole


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Every key or value head copied ``times`` times, for kernels that want as many as query heads."""
    if times == 1:
        return x
    batch, heads, length, dim = x.shape
    wide = x.unsqueeze(2).expand(batch, heads, times, length, dim)
    return wide.reshape(batch, heads * times, length, dim)


def attend(
    run: Run, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None,
    wide_softmax: bool = False, p: float = 0.0,
) -> Tensor:  # fmt: skip
    """Attention of ``[batch, heads, length, dim]`` -> ``[batch, length, heads·dim]``, fused or spelled out."""
    with q.tape.at("attention"):
        groups = q.shape[1] // k.shape[1]
        if not run.flash:
            out = _attend_eager(q, repeat_kv(k, groups), repeat_kv(v, groups), mask, wide_softmax, p)
        elif mask is not None:
            out = masked_attention(q, repeat_kv(k, groups), repeat_kv(v, groups), mask)
        else:
            out = products.attention(q, k, v, causal=causal, dropped=run.training and p > 0.0)
        merged = out.transpose(1, 2).contiguous()
        return merged.view(*merged.shape[:2], -1)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Fused attention under a yes-or-no mask, which is turned into numbers to add; nothing is skipped."""
    additive(mask, q.dtype)
    return products.attention(q, k, v, causal=False, masked=True)


def _attend_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, wide_softmax: bool, p: float) -> Tensor:
    scores = products.matmul(q, k.transpose(2, 3)) * 0.125
    if mask is not None:
        scores = scores + mask
    weights = products.softmax(scores, wide=wide_softmax).to(q.dtype)
    return products.matmul(dropout(weights, p), v)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """``[batch, length, heads·dim]`` -> ``[batch, heads, length, dim]``, a view."""
    batch, length, width = x.shape
    return x.view(batch, length, width // head_dim, head_dim).transpose(1, 2)


def activate(function: str, x: Tensor) -> Tensor:
    """An activation by name; two of them Hugging Face spells out operator by operator."""
    if function == "gelu_new":
        return gelu_new(x)
    if function == "quick_gelu":
        return x * activation("sigmoid", x * 1.702)
    return activation(function, x)


def gelu_new(x: Tensor) -> Tensor:
    """GPT-2's gelu, which Hugging Face computes operator by operator: ½x(1 + tanh(√(2/π)(x + 0.0447x³)))."""
    half = x * 0.5
    inner = (x + power(x, 3) * 0.044715) * 0.7979
    return half * (activation("tanh", inner) + 1.0)


def embed_tokens(run: Run, tape: Tape, vocab: int, dim: int) -> Tensor:
    """Rows of the token table, which tensor-parallel GPUs hold a part of each and add up."""
    return products.leave_parallel(embed(run, tape, -(-vocab // run.tp), dim), run.tp)


def embed(run: Run, tape: Tape, rows: int, dim: int, *, batch: int | None = None, same: bool = False) -> Tensor:
    """A lookup table and the rows picked from it; ``same``: one row of indices serves every sequence."""
    weight = tape.parameter(rows, dim, dtype=run.dtype)
    return products.embedding(weight, (batch or run.batch, run.length), run.length if same else None)


def pick_last(run: Run, x: Tensor) -> Tensor:
    """The tokens the head looks at: all, or the last of each sequence (a view)."""
    if run.head is Head.LAST and x.shape[1] > 1:
        return x.slice(1, x.shape[1] - 1, x.shape[1])
    return x


def language_head(run: Run, x: Tensor, vocab: int, *, tied: bool, bias: bool = False) -> Tensor:
    """Logits of the tokens asked for, and in training the loss."""
    with x.tape.at("logits"):
        x = products.enter_parallel(pick_last(run, x), run.tp)
        share = -(-vocab // run.tp)
        weight = x.tape.parameter(share, x.shape[-1], dtype=run.dtype, tied=tied)
        offset = x.tape.parameter(share, dtype=run.dtype) if bias else None
        logits = products.linear(x, weight, offset)
        products.gather_parts(logits, run.tp)
        return language_loss(logits) if run.training else logits


def classify(run: Run, x: Tensor, classes: int) -> Tensor:
    """Scores of the classes and, in training, the loss."""
    scores = project(run, x, classes, bias=True)
    return products.cross_entropy(scores) if run.training else scores


def language_loss(logits: Tensor) -> Tensor:
    """Next-token cross entropy in fp32 (labels are shifted by a padded copy, int64)."""
    rows = logits.numel // logits.shape[-1]
    with logits.tape.at("loss"):
        wide = logits.to(Dtype.FP32)
        labels = logits.tape.empty(logits.shape[:-1], Dtype.INT64)
        batch, length = labels.shape
        labels.pad_back((batch, length + 1)).slice(1, 1, length + 1).clone()
        return products.cross_entropy(wide.view(rows, -1))


def gate_fused(x: Tensor, function: str) -> Tensor:
    """act(first half) * second half of the last dimension in one kernel, as engines run it."""
    width = x.shape[-1] // 2
    out = x.tape.empty((*x.shape[:-1], width), x.dtype)
    fused = "silu_mul" if function == "silu" else "gelu_mul"
    x.tape.emit(elementwise(fused, (x,), out, x.dtype, Layout.CONTIGUOUS), (x,), (out,))
    return out


def copy_into(x: Tensor) -> Tensor:
    """A strided write of ``x`` into a larger tensor."""
    out = replace(x)
    layout = Layout.STRIDED if x.byte == x.numel * x.dtype.byte else Layout.BROADCAST
    x.tape.emit(elementwise("copy", (x,), out, x.dtype, layout), (x,), (out,))
    return out


def scale_by_tensor(x: Tensor) -> Tensor:
    """x times a number that lies in device memory (Gemma's embedding scale)."""
    return x * x.tape.empty((), x.dtype)
