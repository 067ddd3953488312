"""Layers that several model templates share, as Hugging Face runs them and as inference engines run
them.

Templates import this module as ``layers``. ``run`` holds the settings of the pass; a layer creates
its own weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any

from wattcast.core import Dtype
from wattcast.workload import engine_operators as engine
from wattcast.workload import engine_row_operators as row_kernels
from wattcast.workload import tensor_functions as functional
from wattcast.workload.adapter_operators import AdapterProduct
from wattcast.workload.model_options import OutputHead, TokenSampling, WeightRecipe
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Attention,
    Elementwise,
    LayerNorm,
    Layout,
    Linear,
    RmsNorm,
)
from wattcast.workload.program import PassSettings
from wattcast.workload.symbolic_tensor import Tape, Tensor, cat, fill, pointwise, reduce


@dataclass(frozen=True)
class StateDims:
    """Dimensions of a layer whose heads carry a state of ``key_dim`` by ``value_dim``."""

    heads: int  # of Mamba: channels
    value_dim: int
    key_dim: int  # of Mamba: the state
    key_heads: int = 1  # heads that share keys and queries; of Mamba-2: groups
    step_rank: int = 0  # of the product that gives Mamba its steps
    kernel: int = 4  # taps of the short convolution; 0: none
    chunk: int = 256  # tokens that a prompt's scan takes at a time
    # a gated norm before the last product; of Mamba: norms of steps, keys and queries (Jamba)
    norm: bool = True
    conv_bias: bool = True
    bias: bool = False  # of the products
    wide_state: bool = False  # an engine keeps the state in fp32 (vLLM: of Nemotron-H)


# Positions and masks, which Hugging Face builds once a pass.


def build_positions(tape: Tape, run: PassSettings) -> None:
    """Number the new tokens; without a cache Hugging Face also looks for packed sequences in the
    numbers.
    """
    if run.engine:
        return
    place = pointwise("shift", fill(tape, (run.length,), Dtype.INT64)).unsqueeze(0)
    if run.cached:
        return
    with tape.scope("packing"):
        place = place.expand(run.batch, run.length)
        before = pointwise("shift", place.slice(1, 0, 1))
        joined = cat([before, place], 1)
        step = pointwise("sub", joined.slice(1, 1, run.length + 1), joined.slice(1, 0, run.length))
        jump = pointwise("compare", step, out_dtype=Dtype.BOOL)
        found = pointwise("cumsum", jump, out_dtype=Dtype.INT64)
        reduce(
            "sum", pointwise("compare", found.slice(1, 0, 1).select(1), out_dtype=Dtype.BOOL), (1,)
        )


def needs_mask(run: PassSettings, window: int = 0) -> bool:
    """Tell whether a mask is built: always for eager attention, for fused only where a window cuts
    the context.
    """
    return not run.engine and (not run.flash or bool(window and run.context >= window))


def build_mask(tape: Tape, run: PassSettings, window: int = 0) -> list[Tensor]:
    """Compare positions to a causal mask: yes or no for fused attention, numbers to add for eager
    attention.

    The list is empty where attention needs no mask.
    """
    if not needs_mask(run, window):
        return []
    q_len = run.length
    kv_len = run.context
    with tape.scope("mask"):
        for size in (run.batch, 1):
            fill(tape, (size,), Dtype.INT64)
        query, key = (
            pointwise("shift", fill(tape, (size,), Dtype.INT64)) for size in (q_len, kv_len)
        )
        query = query.view(1, 1, q_len, 1)
        key = key.view(1, 1, 1, kv_len)
        keep = pointwise("compare", key, query, out_dtype=Dtype.BOOL)
        if window:
            near = pointwise("compare", key, pointwise("shift", query), out_dtype=Dtype.BOOL)
            keep = pointwise("compare", near, keep, out_dtype=Dtype.BOOL)
            keep = pointwise("compare", fill(tape, (), Dtype.BOOL), keep, out_dtype=Dtype.BOOL)
        keep = keep.expand(run.batch, 1, q_len, kv_len)
        return [keep if run.flash else mask_to_numbers(keep, run.dtype)]


def mask_to_numbers(keep: Tensor, dtype: Dtype) -> Tensor:
    """Return 0 where a key may be seen, the lowest number where not."""
    zero = fill(keep.tape, (), dtype)
    low = fill(keep.tape, (), dtype)
    return pointwise("where", keep, zero, low, out_dtype=dtype)


# Linear layers, norms, activations and lookups.


def project(
    run: PassSettings,
    x: Tensor,
    features: int,
    bias: bool = False,
    *,
    wide: bool = False,
    in_major: bool = False,
    slices: int = 1,
) -> Tensor:
    """Apply a linear layer; ``wide`` keeps it out of fp8 and int8, and without adapters.

    ``in_major`` weights are stored as ``[in, out]`` (GPT-2's Conv1D), so their gradient is as well.
    ``slices`` layers stand side by side in its outputs, each with adapters of its own.
    """
    out = _project_alone(run, x, features, bias, wide=wide, in_major=in_major)
    if run.served and run.served_rank and not wide:
        _add_served_adapters(run, x, out, slices)
    return out


def _add_served_adapters(run: PassSettings, x: Tensor, out: Tensor, slices: int) -> None:
    """Add to the results of a linear layer what each sequence's LoRA adapter says."""
    tape = x.tape
    inputs = x.shape[-1]
    outputs = out.shape[-1]
    rank = run.served_rank
    shrinks = tape.parameter(run.served_adapters * slices * rank, inputs, dtype=run.dtype)
    expands = tape.parameter(run.served_adapters * rank, outputs, dtype=run.dtype)
    op = AdapterProduct(
        x.numel // inputs,
        outputs,
        inputs,
        rank,
        slices,
        min(run.served_adapters, run.batch),  # sequences take adapters in turn
        dtype=run.dtype,
    )
    tape.emit(op, (x, shrinks, expands, out), (out,))


def _project_alone(
    run: PassSettings, x: Tensor, features: int, bias: bool, *, wide: bool, in_major: bool
) -> Tensor:
    """Apply a linear layer without the adapters that an engine serves."""
    tape = x.tape
    if run.recipe is not None and not (wide or run.experts_alone):
        return project_narrow(run, x, features, run.recipe, bias)
    weight = tape.parameter(features, x.shape[-1], dtype=run.dtype if wide else run.weight_dtype)
    offset = tape.parameter(features, dtype=run.dtype) if bias else None
    if weight.dtype is not Dtype.FP8:
        out = functional.linear(
            x, weight, offset, in_major=in_major, fp8=run.fp8_products and not wide
        )
        if not run.adapter_rank or wide:
            return out
        # LoRA's low-rank correction, (x·Aᵀ)·Bᵀ, with a trained A and B
        down = tape.parameter(run.adapter_rank, x.shape[-1], dtype=run.dtype, trainable=True)
        up = tape.parameter(features, run.adapter_rank, dtype=run.dtype, trainable=True)
        return out + functional.linear(functional.linear(x, down), up) * 2.0
    # activations are cast to fp8 by static scales, multiplied, and come out wide
    flat = pointwise("cast", x.reshape(-1, x.shape[-1]), out_dtype=Dtype.FP8)
    (m, k), n = flat.shape, weight.shape[0]
    op = Linear(m, n, k, bias=bias, dtype=Dtype.FP8, out_dtype=run.dtype)
    return tape.launch(op, (flat, weight), (m, n), run.dtype).view(*x.shape[:-1], n)


def layer_norm(run: PassSettings, x: Tensor, *, bias: bool = True) -> Tensor:
    """Apply a layer norm with weight and mostly bias."""
    weight = x.tape.parameter(x.shape[-1], dtype=run.dtype)
    return functional.layer_norm(
        x, weight, x.tape.parameter(x.shape[-1], dtype=run.dtype) if bias else None
    )


def rms_norm(
    run: PassSettings,
    x: Tensor,
    *,
    gemma: bool = False,
    scales_input: bool = False,
    fused: bool = False,
) -> Tensor:
    """Apply an RMS norm as Hugging Face writes it, in fp32: cast, square, mean, rsqrt, scale, cast
    back, weight.

    Gemma multiplies by (1 + weight), in fp32, before it casts back. Engines run one fused kernel,
    and so does PyTorch's own norm (``fused``). ``scales_input``: what is scaled is the input, not
    its cast (T5)."""
    weight = x.tape.parameter(x.shape[-1], dtype=run.dtype)
    if run.served:
        return _compiled_rows(x, "rms_norm", x.shape[-1])
    if run.engine or fused:
        return functional.rms_norm(x, weight)
    with x.tape.scope("norm"):
        wide = x.to(Dtype.FP32)
        factor = functional.rsqrt(functional.reduce_last("mean", functional.power(wide, 2)) + 1e-6)
        scaled = (x if scales_input else wide) * factor
        if gemma:
            return (scaled * (weight.to(Dtype.FP32) + 1.0)).to(x.dtype)
        return weight * scaled.to(x.dtype)


def activate(function: str, x: Tensor) -> Tensor:
    """Apply an activation by name; Hugging Face computes two of them operator by operator.

    ``gelu_new`` is ½x(1 + tanh(√(2/π)(x + 0.0447x³))), ``quick_gelu`` is x·sigmoid(1.702x).
    """
    if function == "gelu_new":
        half = x * 0.5
        inner = (x + functional.power(x, 3) * 0.044715) * 0.7979
        return half * (functional.activation("tanh", inner) + 1.0)
    if function == "relu2":
        return functional.power(functional.activation("relu", x), 2)
    if function == "quick_gelu":
        return x * functional.activation("sigmoid", x * 1.702)
    return functional.activation(function, x)


def feed_forward(
    run: PassSettings,
    x: Tensor,
    width: int,
    function: str,
    *,
    bias: bool = True,
    in_major: bool = False,
) -> Tensor:
    """Compute down(act(up(x))), its width shared out over tensor-parallel GPUs."""
    hidden = x.shape[-1]
    inner = project(
        run, functional.enter_parallel(x, run.tp), width // run.tp, bias, in_major=in_major
    )
    out = project(run, activate(function, inner), hidden, bias, in_major=in_major)
    return functional.leave_parallel(out, run.tp)


def gated_feed_forward(
    run: PassSettings,
    x: Tensor,
    width: int,
    function: str,
    *,
    merged: bool = False,
    bias: bool = False,
) -> Tensor:
    """Compute down(act(gate(x)) * up(x)); ``merged``: gate and up are one product (Phi-3), as
    always in engines.
    """
    hidden = x.shape[-1]
    width = width // run.tp
    x = functional.enter_parallel(x, run.tp)
    if run.engine:
        both = project(run, x, 2 * width, bias, slices=2)
        inner = gate_in_one_kernel(run, both, function)
    elif merged:
        gate, up = project(run, x, 2 * width, bias).split(width, width)
        inner = up * activate(function, gate)
    else:
        gate = activate(function, project(run, x, width, bias))
        inner = gate * project(run, x, width, bias)
    return functional.leave_parallel(project(run, inner, hidden, bias), run.tp)


def gate_in_one_kernel(run: PassSettings, x: Tensor, function: str) -> Tensor:
    """Compute act(first half) * second half of the last dimension in one kernel, as engines run it."""
    if run.served:
        return _compiled_rows(x, "silu_and_mul", x.shape[-1] // 2, _quantizes_inside(run))
    out = x.tape.empty((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    x.tape.emit_pointwise(
        "silu_mul" if function == "silu" else "gelu_mul", (x,), out, Layout.CONTIGUOUS
    )
    return out


def embed_tokens(run: PassSettings, tape: Tape, vocab: int, dim: int) -> Tensor:
    """Look up token rows; tensor-parallel GPUs hold a part of the table each and add up."""
    return functional.leave_parallel(embed(run, tape, -(-vocab // run.tp), dim), run.tp)


def embed(
    run: PassSettings,
    tape: Tape,
    rows: int,
    dim: int,
    *,
    batch: int | None = None,
    same: bool = False,
) -> Tensor:
    """Look up rows of a table; ``same``: one row of indices serves every sequence."""
    weight = tape.parameter(rows, dim, dtype=run.dtype)
    return functional.embedding(
        weight, (batch or run.batch, run.length), run.length if same else None
    )


def cut_patches(
    run: PassSettings, tape: Tape, channels: int, width: int, patch: int, *, bias: bool = True
) -> Tensor:
    """Cut pictures into patches by a convolution, ``[batch, width, rows, columns]``."""
    picture = tape.empty((run.batch, channels, run.image, run.image), run.dtype)
    return functional.convolve(picture, width, patch, stride=patch, padding=0, bias=bias)


# Attention.


def rotary_tables(tape: Tape, run: PassSettings, dim: int) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position, in fp32 once a pass, and cast them to the model's
    format.
    """
    if run.engine or not dim:  # engines keep one table for all passes
        table = tape.empty((1, run.length, dim), run.dtype)
        return table, table
    with tape.scope("rotary"):
        place = pointwise("cast", tape.empty((1, run.length, 1), Dtype.INT64), out_dtype=Dtype.FP32)
        rate = tape.empty((dim // 2,), run.dtype).to(Dtype.FP32)
        angle = pointwise("mul", place, rate)
        both = cat([angle, angle], -1)
        cos, sin = (pointwise("scale", pointwise(name, both)) for name in ("cos", "sin"))
        return cos.to(run.dtype), sin.to(run.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, again: Tensor | None = None) -> Tensor:
    """Compute x·cos + rotate_half(x)·sin over the last dimension; ``again`` is widened once more
    for its half.
    """
    half = x.shape[-1] // 2
    straight = x * cos  # first, as in the original: gradients are gathered in reverse order
    x = x if again is None else again.to(x.dtype)
    lower = x.slice(-1, 0, half)
    upper = x.slice(-1, half, 2 * half)
    return straight + cat([-upper, lower], -1) * sin


def append_cache(run: PassSettings, new: Tensor) -> Tensor:
    """Put new keys or values behind the cache, into one fresh tensor (Hugging Face's
    ``DynamicCache``).
    """
    if not run.cached:
        return new
    batch, heads, _, dim = new.shape
    with new.tape.scope("cache"):
        old = [new.tape.empty((batch, heads, run.past, dim), new.dtype)] if run.past else []
        whole = cat([*old, new], 2)
    new.tape.cache_byte += whole.byte
    whole.storage.resident = True
    return whole


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """View ``[batch, length, heads·dim]`` as ``[batch, heads, length, dim]``."""
    batch, length, width = x.shape
    return x.view(batch, length, width // head_dim, head_dim).transpose(1, 2)


def attend(
    run: PassSettings, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None,
    bias: Tensor | None = None, wide_softmax: bool = False, p: float = 0.0, softcap: bool = False, sink: bool = False,
) -> Tensor:  # fmt: skip
    """Attend, ``[batch, heads, length, dim]`` -> ``[batch, length, heads·dim]``, fused or operator
    by operator.

    ``bias`` is added to the scores, which keeps fused attention from skipping what ``mask`` hides.
    """
    with q.tape.scope("attention"):
        if run.flash and mask is None and bias is None:
            out = functional.attention(q, k, v, causal=causal, dropped=run.training and p > 0.0)
        else:
            if (
                times := q.shape[1] // k.shape[1]
            ) > 1:  # these kernels want as many key and value heads as queries
                k, v = (
                    t.unsqueeze(2)
                    .expand(*t.shape[:2], times, *t.shape[2:])
                    .reshape(t.shape[0], -1, *t.shape[2:])
                    for t in (k, v)
                )
            if run.flash:  # the yes-or-no mask becomes numbers to add; nothing is skipped
                if mask is not None:
                    mask_to_numbers(mask, q.dtype)
                out = functional.attention(q, k, v, causal=False, masked=True)
            else:
                scores = functional.matmul(q, k.transpose(2, 3)) * 0.125
                if softcap:
                    scores = functional.activation("tanh", scores * 1.0) * 1.0
                for more in (bias, mask):
                    scores = scores if more is None else scores + more
                if (
                    sink
                ):  # one more score a row, taken off its maximum, and dropped after the softmax
                    scores = cat([scores, q.tape.empty((*scores.shape[:-1], 1), q.dtype)], -1)
                    scores = scores + -reduce("max", scores, (*scores.shape[:-1], 1))
                hidden = q.shape[2] / (2.0 * k.shape[2]) if causal and mask is not None else 0.0
                weights = functional.softmax(scores, wide=wide_softmax, masked=hidden).to(q.dtype)
                if sink:
                    weights = weights.slice(-1, 0, weights.shape[-1] - 1)
                out = functional.matmul(functional.dropout(weights, p), v)
        merged = out.transpose(1, 2).contiguous()
        return merged.view(*merged.shape[:2], -1)


def self_attention(
    run: PassSettings, x: Tensor, heads: int, *, causal: bool = False, mask: Tensor | None = None,
    bias: Tensor | None = None, p: float = 0.0, wide_softmax: bool = False,
) -> Tensor:  # fmt: skip
    """Attend with three projections over the whole sequence, or over earlier tokens where
    ``causal``.
    """
    hidden = x.shape[-1]
    x = functional.enter_parallel(x, run.tp)
    q, k, v = (
        split_heads(project(run, x, hidden // run.tp, True), hidden // heads) for _ in range(3)
    )
    out = attend(run, q, k, v, causal=causal, mask=mask, bias=bias, p=p, wide_softmax=wide_softmax)
    return functional.leave_parallel(project(run, out, hidden, True), run.tp)


def prenorm_layer(
    run: PassSettings, x: Tensor, heads: int, width: int, function: str, *, causal: bool = False,
    mask: Tensor | None = None, wide_softmax: bool = False, scaled: bool = False, input_first: bool = False,
) -> Tensor:  # fmt: skip
    """Compute x + attention(norm(x)), then x + feed_forward(norm(x)), with layer norms.

    ``scaled``: what is added is multiplied by a learned factor a column.
    ``input_first``: sums keep the layout of ``x``.
    """

    def scale(out: Tensor) -> Tensor:
        return out * x.tape.parameter(out.shape[-1], dtype=run.dtype) if scaled else out

    attend_all = partial(
        self_attention, run, heads=heads, causal=causal, mask=mask, wide_softmax=wide_softmax
    )
    return add_parts(
        run,
        x,
        input_first=input_first,
        attention=lambda y: scale(attend_all(y)),
        mlp=lambda y: scale(feed_forward(run, y, width, function)),
    )


def add_parts(
    run: PassSettings, x: Tensor, norm: Callable[[Tensor], Tensor] | None = None, *, p: float = 0.0,
    input_first: bool = True, **parts: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Compute x + dropout(part(norm(x))) for each part in turn, under its name; by default with
    layer norms.

    ``input_first``: sums keep the layout of ``x``.
    """
    for name, part in parts.items():
        with x.tape.scope(name):
            out = functional.dropout(part(layer_norm(run, x) if norm is None else norm(x)), p)
            x = x + out if input_first else out + x
    return x


# Heads and losses.


def language_head(
    run: PassSettings,
    x: Tensor,
    vocab: int,
    *,
    tied: bool,
    bias: bool = False,
    scales: Sequence[str] = (),
) -> Tensor:
    """Compute the logits of the tokens asked for, and in training the loss; nothing where no head
    is asked for.

    ``scales``: logits are multiplied ("logits") or bent into a range ("cap": divide, tanh,
    multiply)."""
    if run.head is OutputHead.NONE:
        return x
    with x.tape.scope("logits"):
        if run.head is OutputHead.LAST and x.shape[1] > 1:
            x = x.slice(1, x.shape[1] - 1, x.shape[1])
        logits = project_to_vocabulary(run, x, vocab, tied=tied, bias=bias)
        if "cap" in scales:
            logits = functional.activation("tanh", logits * 1.0) * 1.0
        if "logits" in scales:
            logits = logits * 1.0
        if run.served and run.head is OutputHead.LAST:
            rows = logits.numel // logits.shape[-1]
            mode = _SAMPLING_KERNELS[run.sampling or TokenSampling.GREEDY]
            op = row_kernels.Sampling(rows, logits.shape[-1], mode, dtype=run.dtype)
            x.tape.emit(op, (logits,), (logits,))
        if not run.training:
            return logits
        with x.tape.scope("loss"):
            wide = logits.to(Dtype.FP32)
            labels = x.tape.empty(logits.shape[:-1], Dtype.INT64)  # shifted by a padded copy
            batch, length = labels.shape
            labels.pad_back((batch, length + 1)).slice(1, 1, length + 1).clone()
            return functional.cross_entropy(wide.view(batch * length, -1))


# What vLLM runs without FlashInfer's sampler. One kernel finds the k likeliest words and applies
# top-p to them; top-p alone sorts the whole vocabulary.
_SAMPLING_KERNELS = {
    TokenSampling.GREEDY: "greedy",
    TokenSampling.RANDOM: "random",
    TokenSampling.TOP_K: "top_p",
    TokenSampling.TOP_K_TOP_P: "top_p",
    TokenSampling.TOP_P: "sorted",
    TokenSampling.PENALTIES: "penalised",
}
_PADDED_VOCABULARY = (
    64  # tokens that an engine rounds a vocabulary to: DEFAULT_VOCAB_PADDING_SIZE of vLLM 0.25.1
)


def project_to_vocabulary(
    run: PassSettings, x: Tensor, vocab: int, *, tied: bool, bias: bool
) -> Tensor:
    """Compute logits, of which each tensor-parallel GPU computes a part; an engine pads their
    number.
    """
    padded = -(-vocab // _PADDED_VOCABULARY) * _PADDED_VOCABULARY if run.engine else vocab
    share = -(-padded // run.tp)
    x = functional.enter_parallel(x, run.tp)
    weight = x.tape.parameter(share, x.shape[-1], dtype=run.dtype, tied=tied)
    logits = functional.linear(
        x, weight, x.tape.parameter(share, dtype=run.dtype) if bias else None
    )
    functional.gather_parts(logits, run.tp)
    return logits


def masked_token_logits(run: PassSettings, x: Tensor, vocab: int) -> Tensor:
    """Compute the logits of an encoder's tokens by the table they were looked up in and, in
    training, the loss.
    """
    logits = project_to_vocabulary(run, x, vocab, tied=True, bias=True)
    return functional.cross_entropy(logits.view(-1, logits.shape[-1])) if run.training else logits


def classify(run: PassSettings, x: Tensor, classes: int) -> Tensor:
    """Compute the scores of the classes and, in training, the loss."""
    scores = project(run, x, classes, bias=True)
    return functional.cross_entropy(scores) if run.training else scores


# Kernels of inference engines.


def narrow_parameter(tape: Tape, shape: Sequence[int], dtype: Dtype, bit: float) -> Tensor:
    """Return a weight whose elements take ``bit`` bits each, scales included."""
    weight = tape.parameter(*shape, dtype=dtype)
    weight.storage.byte = ceil(weight.numel * bit / 8.0)
    return weight


def project_narrow(
    run: PassSettings, x: Tensor, features: int, recipe: WeightRecipe, bias: bool = False
) -> Tensor:
    """Apply a linear layer whose weights are kept by a recipe; tokens are quantized first unless
    they are already.
    """
    tape = x.tape
    k = x.shape[-1]
    m = x.numel // k
    weight = narrow_parameter(tape, (features, k), run.dtype, recipe.bit)
    if bias:
        tape.parameter(features, dtype=run.dtype)
    kind: type[engine.NarrowProduct] = engine.WeightOnlyProduct
    how: tuple[Any, ...] = recipe.weights, recipe.group, recipe.zero_points
    if recipe.activations is not None:
        if x.dtype is run.dtype:
            x = tape.launch(
                row_kernels.Quantize(m, k, recipe.mode, dtype=run.dtype),
                (x,),
                x.shape,
                recipe.activations,
            )
        by_token = recipe.mode == "token"
        kind, how = (
            (engine.ScaledProduct, ("token",))
            if by_token
            else (engine.BlockProduct, ("block", recipe.bit))
        )
    op = kind(m, features, k, *how, kernel=recipe.kernel, dtype=recipe.activations or run.dtype)
    return tape.launch(op, (x, weight), (*x.shape[:-1], features), run.dtype)


def _quantizes_inside(run: PassSettings) -> bool:
    """Tell whether norms and gates hand on fp8: the compiler puts a scale a token into their
    kernels.
    """
    return (
        run.recipe is not None and run.recipe.activations is not None and run.recipe.mode == "token"
    )


def _compiled_rows(x: Tensor, function: str, dim: int, quantized: bool = False) -> Tensor:
    """Emit a norm or gate over the last dimension as torch.compile writes it; ``quantized`` results
    are in fp8.
    """
    shape = (*x.shape[:-1], dim)
    op = row_kernels.CompiledRows(
        prod(shape[:-1]), dim, function + "_quant" * quantized, dtype=x.dtype
    )
    return x.tape.launch(op, (x,), shape, Dtype.FP8 if quantized else x.dtype)


def add_norm(
    run: PassSettings,
    x: Tensor,
    kind: type[LayerNorm | RmsNorm],
    *,
    to_products: bool = True,
    bias: bool = True,
) -> Tensor:
    """Add the residual and norm in one kernel: two tensors read, two written.

    ``to_products``: only linear layers read the result, so that it may come out quantized.
    """
    tape = x.tape
    dim = x.shape[-1]
    byte = x.numel * x.dtype.byte
    weights = [
        tape.parameter(dim, dtype=run.dtype) for _ in range(1 + (bias and kind is LayerNorm))
    ]
    if run.served and kind is RmsNorm:
        return _compiled_rows(x, "add_rms_norm", dim, to_products and _quantizes_inside(run))
    out = tape.empty(x.shape, x.dtype)
    op = kind(x.numel // dim, dim, dtype=x.dtype, read=2 * byte, write=2 * byte)
    tape.emit(op, (x, *weights), (out, x))
    return out


def split_projection(fused: Tensor, heads: Sequence[int], dim: int) -> list[Tensor]:
    """View the columns of one product as queries, keys and values, ``[batch, length, heads, dim]``."""
    parts = fused.split(*(count * dim for count in heads))
    return [
        part.view(*part.shape[:2], count, dim) for part, count in zip(parts, heads, strict=True)
    ]


def rotate_in_place(run: PassSettings, q: Tensor, k: Tensor, cos: Tensor, head_dim: int) -> None:
    """Apply the rotary embedding to ``head_dim`` values of each head of queries and keys, in place,
    in one kernel.
    """
    tokens = run.batch * run.length
    width = q.shape[-1] if len(q.shape) == 4 else head_dim
    heads = q.numel // tokens // width
    kv_heads = k.numel // tokens // width
    if run.served:
        op: Operator = row_kernels.EngineRotary(
            tokens, kv_heads * head_dim, heads, kv_heads, head_dim, dtype=q.dtype
        )
    else:
        n = tokens * (heads + kv_heads) * head_dim
        op = Elementwise(
            "rotary", n, dtype=q.dtype, layout=Layout.STRIDED, read=n * q.dtype.byte + 2 * cos.byte
        )
    q.tape.emit(op, (q, k, cos), (q, k))


def write_paged_cache(run: PassSettings, parts: Sequence[Tensor], elements: int) -> None:
    """Copy ``elements`` new keys and values of each token into the paged cache."""
    if run.cached:
        tape = parts[0].tape
        dtype = parts[0].dtype
        tokens = run.batch * run.length
        if run.served:
            half = elements // 2
            op: Operator = row_kernels.CacheWrite(
                tokens, half, 1, 1, half, run.cache_dtype, dtype=dtype
            )
        else:
            op = Elementwise("copy", tokens * elements, dtype=dtype, layout=Layout.STRIDED)
        tape.emit(op, parts, ())
        tape.cache_byte += run.batch * -(-run.context // run.cp) * elements * run.cache_dtype.byte


def paged_attention(
    run: PassSettings, q: Tensor, k: Tensor, v: Tensor, window: int = 0, *, chunk: int = 0, softcap: float = 0.0,
    sink: bool = False,
) -> Tensor:  # fmt: skip
    """Write new keys and values into the cache, then attend over the part of it inside the window
    or chunk.
    """
    tape = q.tape
    batch, length, heads, dim = q.shape
    write_paged_cache(run, (k, v), k.shape[2] * k.shape[3] + v.shape[2] * v.shape[3])
    seen = min(run.context, window) if window and length == 1 else run.context
    causal = length > 1
    if (
        run.cp > 1 and causal
    ):  # all get all keys; early and late tokens are dealt out, so that each sees half of them
        for part in (k, v):
            functional.gather_parts(part, run.cp, run.tp)
        seen = run.past + max((run.context - run.past) // 2, 1)
        causal = False
    elif run.cp > 1:  # each attends over its part of the cache
        seen = -(-seen // run.cp)
    if run.served:
        if run.cache_dtype is Dtype.FP8:
            tape.emit(
                row_kernels.Quantize(batch * length, heads * dim, "static", dtype=q.dtype),
                (q,),
                (q,),
            )
        last = seen + (0 if causal else (length - 1) // 2)  # keys of the last token
        splits = engine.GRAPH_SPLITS if batch * length <= engine.GRAPH_TOKENS else 0
        groups = ((batch, length, last),)
        if chunk and length > chunk and not run.past:  # each chunk is a sequence of its own
            whole, rest = divmod(length, chunk)
            groups = ((batch * whole, chunk, chunk), *(((batch, rest, rest),) if rest else ()))
        op: Operator = engine.PagedAttention(
            heads,
            k.shape[2],
            dim,
            groups,
            run.cache_dtype,
            window,
            splits=splits,
            bound=last,
            softcap=softcap,
            sink=sink,
            dtype=q.dtype,
        )
    else:
        op = Attention(
            batch,
            heads,
            k.shape[2],
            length,
            seen,
            dim,
            causal=causal,
            dtype=tape.math_dtype(q.dtype),
        )
    out = tape.launch(op, (q, k, v), (batch, length, heads * dim))
    if run.cp > 1 and length == 1:  # results and sums of exponentials of all parts
        functional.gather_parts(tape.empty((batch, heads, dim + 1), Dtype.FP32), run.cp, run.tp)
    return out
