"""Layers that several model templates share, as Hugging Face runs them.

Templates import this module as ``layers``. ``run`` holds the settings of the pass; a layer creates
its weights. Where an inference engine has other kernels, they are those of ``engine_layers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wattcast.core import Dtype
from wattcast.workload import tensor_functions as functional
from wattcast.workload.model_options import OutputHead
from wattcast.workload.models import engine_layers
from wattcast.workload.operator_types import Linear
from wattcast.workload.program import PassSettings
from wattcast.workload.symbolic_tensor import (
    Tape,
    Tensor,
    cat,
    fill,
    pointwise,
    reduce,
)


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
    """Number the new tokens.

    Without a cache Hugging Face also looks for packed sequences in the numbers.
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
        later = joined.slice(1, 1, run.length + 1)
        earlier = joined.slice(1, 0, run.length)
        jump = pointwise("compare", pointwise("sub", later, earlier), out_dtype=Dtype.BOOL)
        sequence = pointwise("cumsum", jump, out_dtype=Dtype.INT64)
        first = sequence.slice(1, 0, 1).select(1)
        reduce("sum", pointwise("compare", first, out_dtype=Dtype.BOOL), (1,))


def needs_mask(run: PassSettings, window: int = 0) -> bool:
    """Tell whether a mask is built.

    Eager attention always needs one, fused attention only where a window cuts the context.
    """
    if run.engine:
        return False
    cuts_context = bool(window) and run.context >= window
    return not run.flash or cuts_context


def build_mask(
    tape: Tape,
    run: PassSettings,
    window: int = 0,
) -> list[Tensor]:
    """Compare positions to a causal mask: yes or no for fused attention, numbers to add for eager
    attention.

    The list is empty where attention needs no mask.
    """
    if not needs_mask(run, window):
        return []
    q_len = run.length
    kv_len = run.context
    with tape.scope("mask"):
        fill(tape, (run.batch,), Dtype.INT64)
        fill(tape, (1,), Dtype.INT64)
        query = pointwise("shift", fill(tape, (q_len,), Dtype.INT64)).view(1, 1, q_len, 1)
        key = pointwise("shift", fill(tape, (kv_len,), Dtype.INT64)).view(1, 1, 1, kv_len)
        visible = pointwise("compare", key, query, out_dtype=Dtype.BOOL)
        if window:
            first = pointwise("shift", query)
            is_near = pointwise("compare", key, first, out_dtype=Dtype.BOOL)
            visible = pointwise("compare", is_near, visible, out_dtype=Dtype.BOOL)
            always = fill(tape, (), Dtype.BOOL)
            visible = pointwise("compare", always, visible, out_dtype=Dtype.BOOL)
        visible = visible.expand(run.batch, 1, q_len, kv_len)
        return [visible if run.flash else mask_to_numbers(visible, run.dtype)]


def mask_to_numbers(keep: Tensor, dtype: Dtype) -> Tensor:
    """Return 0 where a key may be seen, the lowest number where not."""
    zero = fill(keep.tape, (), dtype)
    low = fill(keep.tape, (), dtype)
    return pointwise(
        "where",
        keep,
        zero,
        low,
        out_dtype=dtype,
    )


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
    out = _project_alone(
        run,
        x,
        features,
        bias,
        wide=wide,
        in_major=in_major,
    )
    if run.served and run.served_rank and not wide:
        engine_layers.add_served_adapters(run, x, out, slices)
    return out


def _project_alone(
    run: PassSettings,
    x: Tensor,
    features: int,
    bias: bool,
    *,
    wide: bool,
    in_major: bool,
) -> Tensor:
    """Apply a linear layer without the adapters that an engine serves."""
    tape = x.tape
    if run.recipe is not None and not (wide or run.experts_alone):
        return engine_layers.project_narrow(
            run,
            x,
            features,
            run.recipe,
            bias,
        )
    weight_dtype = run.dtype if wide else run.weight_dtype
    weight = tape.parameter(features, x.shape[-1], dtype=weight_dtype)
    offset = tape.parameter(features, dtype=run.dtype) if bias else None
    if weight_dtype is Dtype.FP8:
        return _project_fp8(run, x, weight, bias)
    fp8 = run.fp8_products and not wide
    out = functional.linear(
        x,
        weight,
        offset,
        in_major=in_major,
        fp8=fp8,
    )
    is_adapted = not run.adapted_scope or run.adapted_scope in tape.label.split(".")
    if run.adapter_rank and is_adapted and not wide:
        return out + _adapt(run, x, features)
    return out


def _adapt(
    run: PassSettings,
    x: Tensor,
    features: int,
) -> Tensor:
    """Return LoRA's low-rank correction, 2·(x·Aᵀ)·Bᵀ, with a trained A and B."""
    tape = x.tape
    down = tape.parameter(run.adapter_rank, x.shape[-1], dtype=run.dtype, trainable=True)
    up = tape.parameter(features, run.adapter_rank, dtype=run.dtype, trainable=True)
    return functional.linear(functional.linear(x, down), up) * 2.0


def _project_fp8(
    run: PassSettings,
    x: Tensor,
    weight: Tensor,
    bias: bool,
) -> Tensor:
    """Cast activations to fp8 by static scales and multiply; results come out wide."""
    flat = pointwise("cast", x.reshape(-1, x.shape[-1]), out_dtype=Dtype.FP8)
    m, k = flat.shape
    n = weight.shape[0]
    op = Linear(
        m=m,
        n=n,
        k=k,
        bias=bias,
        dtype=Dtype.FP8,
        out_dtype=run.dtype,
    )
    out = x.tape.launch(op, (flat, weight), (m, n), run.dtype)
    return out.view(*x.shape[:-1], n)


def layer_norm(
    run: PassSettings,
    x: Tensor,
    *,
    bias: bool = True,
) -> Tensor:
    """Apply a layer norm with weight and mostly bias."""
    dim = x.shape[-1]
    weight = x.tape.parameter(dim, dtype=run.dtype)
    offset = x.tape.parameter(dim, dtype=run.dtype) if bias else None
    return functional.layer_norm(x, weight, offset)


def rms_norm(
    run: PassSettings,
    x: Tensor,
    *,
    gemma: bool = False,
    scales_input: bool = False,
    fused: bool = False,
) -> Tensor:
    """Apply an RMS norm as Hugging Face writes it, in fp32.

    It is a cast, square, mean, rsqrt, scale, cast back and the weight. Gemma multiplies by (1 +
    weight), in fp32, before it casts back. Engines run one fused kernel, and so does PyTorch's own
    norm (``fused``). ``scales_input``: what is scaled is the input, not its cast (T5)."""
    weight = x.tape.parameter(x.shape[-1], dtype=run.dtype)
    if run.served:
        return engine_layers.compile_rows(x, "rms_norm", x.shape[-1])
    if run.engine or fused:
        return functional.rms_norm(x, weight)
    with x.tape.scope("norm"):
        wide = x.to(Dtype.FP32)
        mean_square = functional.reduce_last("mean", functional.power(wide, 2))
        factor = functional.rsqrt(mean_square + 1e-6)
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
        bent = x + functional.power(x, 3) * 0.044715
        inner = bent * 0.7979
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
    x = functional.enter_parallel(x, run.tp)
    inner = project(
        run,
        x,
        width // run.tp,
        bias,
        in_major=in_major,
    )
    out = project(
        run,
        activate(function, inner),
        hidden,
        bias,
        in_major=in_major,
    )
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
    """Compute down(act(gate(x)) * up(x)).

    ``merged``: gate and up are one product (Phi-3), as always in engines.
    """
    hidden = x.shape[-1]
    width = width // run.tp
    x = functional.enter_parallel(x, run.tp)
    if run.engine:
        gate_and_value = project(
            run,
            x,
            2 * width,
            bias,
            slices=2,
        )
        inner = engine_layers.gate_in_one_kernel(run, gate_and_value, function)
    elif merged:
        gate, up = project(run, x, 2 * width, bias).split(width, width)
        inner = up * activate(function, gate)
    else:
        gate = activate(function, project(run, x, width, bias))
        inner = gate * project(run, x, width, bias)
    out = project(run, inner, hidden, bias)
    return functional.leave_parallel(out, run.tp)


def embed_tokens(
    run: PassSettings,
    tape: Tape,
    vocab: int,
    dim: int,
) -> Tensor:
    """Look up token rows; each tensor-parallel GPU holds a part of the table, and they add up."""
    rows = -(-vocab // run.tp)
    return functional.leave_parallel(embed(run, tape, rows, dim), run.tp)


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
    tokens = (batch or run.batch, run.length)
    return functional.embedding(weight, tokens, run.length if same else None)


def cut_patches(
    run: PassSettings,
    tape: Tape,
    channels: int,
    width: int,
    patch: int,
    *,
    bias: bool = True,
) -> Tensor:
    """Cut pictures into patches by a convolution, ``[batch, width, rows, columns]``."""
    picture = tape.picture((run.batch, channels, run.image, run.image), run.dtype)
    return functional.convolve(
        picture,
        width,
        patch,
        stride=patch,
        padding=0,
        bias=bias,
    )


# Attention.


def rotary_tables(
    tape: Tape,
    run: PassSettings,
    dim: int,
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position, in fp32 once a pass.

    They are cast to the model's format.
    """
    if run.engine or not dim:  # engines keep one table for all passes
        table = tape.empty((1, run.length, dim), run.dtype)
        return table, table
    with tape.scope("rotary"):
        place = pointwise("cast", tape.empty((1, run.length, 1), Dtype.INT64), out_dtype=Dtype.FP32)
        rate = tape.empty((dim // 2,), run.dtype).to(Dtype.FP32)
        angle = pointwise("mul", place, rate)
        angles = cat([angle, angle], -1)
        cos = pointwise("scale", pointwise("cos", angles))
        sin = pointwise("scale", pointwise("sin", angles))
        return cos.to(run.dtype), sin.to(run.dtype)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    again: Tensor | None = None,
) -> Tensor:
    """Compute x·cos + rotate_half(x)·sin over the last dimension.

    ``again`` is widened once more for its half.
    """
    half = x.shape[-1] // 2
    straight = x * cos  # first, as in the original: gradients are gathered in reverse order
    if again is not None:
        x = again.to(x.dtype)
    lower = x.slice(-1, 0, half)
    upper = x.slice(-1, half, 2 * half)
    return straight + cat([-upper, lower], -1) * sin


def append_cache(run: PassSettings, new: Tensor) -> Tensor:
    """Put new keys or values behind the cache, into one fresh tensor.

    That is how Hugging Face's ``DynamicCache`` works.
    """
    if not run.cached:
        return new
    batch, heads, _, dim = new.shape
    with new.tape.scope("cache"):
        parts = [new]
        if run.past:
            old = new.tape.empty((batch, heads, run.past, dim), new.dtype)
            parts = [old, new]
        whole = cat(parts, 2)
    new.tape.cache_byte += whole.byte
    whole.storage.resident = True
    return whole


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """View ``[batch, length, heads·dim]`` as ``[batch, heads, length, dim]``."""
    batch, length, width = x.shape
    return x.view(batch, length, width // head_dim, head_dim).transpose(1, 2)


@dataclass(frozen=True)
class ScoreTerms:
    """What is done to the scores of attention, in the order of the fields."""

    softcap: bool = False  # bent into a range by a tanh
    bias: Tensor | None = None  # added, which keeps fused attention from skipping masked scores
    mask: Tensor | None = None
    sink: bool = False  # a learned score more in each row, which no value belongs to
    wide_softmax: bool = False  # in fp32
    dropout: float = 0.0  # chance that a weight is dropped in training


NO_TERMS = ScoreTerms()


def attend(
    run: PassSettings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    terms: ScoreTerms = NO_TERMS,
) -> Tensor:
    """Attend, ``[batch, heads, length, dim]`` -> ``[batch, length, heads·dim]``.

    Attention is fused, or runs operator by operator.
    """
    with q.tape.scope("attention"):
        if run.flash and terms.mask is None and terms.bias is None:
            drops = run.training and terms.dropout > 0.0
            out = functional.attention(
                q,
                k,
                v,
                causal=causal,
                dropped=drops,
            )
        elif run.flash:  # the yes-or-no mask becomes numbers to add; nothing is skipped
            k, v = _repeat_heads(q, k, v)
            if terms.mask is not None:
                mask_to_numbers(terms.mask, q.dtype)
            out = functional.attention(
                q,
                k,
                v,
                causal=False,
                masked=True,
            )
        else:
            k, v = _repeat_heads(q, k, v)
            weights = _weigh_scores(q, k, causal, terms)
            out = functional.matmul(functional.dropout(weights, terms.dropout), v)
        merged = out.transpose(1, 2).contiguous()
        return merged.view(*merged.shape[:2], -1)


def _repeat_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> list[Tensor]:
    """Return as many key and value heads as queries, where kernels need them."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return [k, v]
    repeated = []
    for tensor in (k, v):
        batch, heads, length, dim = tensor.shape
        spread = tensor.unsqueeze(2).expand(
            batch,
            heads,
            times,
            length,
            dim,
        )
        repeated.append(spread.reshape(batch, -1, length, dim))
    return repeated


def _weigh_scores(
    q: Tensor,
    k: Tensor,
    causal: bool,
    terms: ScoreTerms,
) -> Tensor:
    """Return the weights of all values, operator by operator."""
    scores = functional.matmul(q, k.transpose(2, 3)) * 0.125
    if terms.softcap:
        scores = functional.activation("tanh", scores * 1.0) * 1.0
    if terms.bias is not None:
        scores = scores + terms.bias
    if terms.mask is not None:
        scores = scores + terms.mask
    lead = scores.shape[:-1]
    if terms.sink:  # taken off its row's maximum, and dropped after the softmax
        scores = cat([scores, q.tape.empty((*lead, 1), q.dtype)], -1)
        scores = scores + -reduce("max", scores, (*lead, 1))
    hidden_share = 0.0
    if causal and terms.mask is not None:
        hidden_share = q.shape[2] / (2.0 * k.shape[2])
    weights = functional.softmax(scores, wide=terms.wide_softmax, masked=hidden_share)
    weights = weights.to(q.dtype)
    if terms.sink:
        return weights.slice(-1, 0, weights.shape[-1] - 1)
    return weights


def self_attention(
    run: PassSettings,
    x: Tensor,
    heads: int,
    *,
    causal: bool = False,
    terms: ScoreTerms = NO_TERMS,
) -> Tensor:
    """Attend with three projections over the whole sequence.

    ``causal``: over earlier tokens alone.
    """
    hidden = x.shape[-1]
    head_dim = hidden // heads
    width = hidden // run.tp
    x = functional.enter_parallel(x, run.tp)
    q, k, v = [split_heads(project(run, x, width, True), head_dim) for _ in range(3)]
    attended = attend(
        run,
        q,
        k,
        v,
        causal=causal,
        terms=terms,
    )
    out = project(run, attended, hidden, True)
    return functional.leave_parallel(out, run.tp)


@dataclass(frozen=True)
class PrenormStyle:
    """How the layers of a transformer with norms before its parts differ from one another."""

    heads: int
    width: int  # of the feed-forward layer
    activation: str
    causal: bool = False
    wide_softmax: bool = False
    scaled: bool = False  # what is added is multiplied by a learned factor a column
    input_first: bool = False  # sums keep the layout of the input


def prenorm_layer(
    run: PassSettings,
    style: PrenormStyle,
    x: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute x + attention(norm(x)), then x + feed_forward(norm(x)), with layer norms."""
    terms = ScoreTerms(mask=mask, wide_softmax=style.wide_softmax)

    def scale(out: Tensor) -> Tensor:
        if not style.scaled:
            return out
        return out * x.tape.parameter(out.shape[-1], dtype=run.dtype)

    def attention(y: Tensor) -> Tensor:
        return scale(
            self_attention(
                run,
                y,
                style.heads,
                causal=style.causal,
                terms=terms,
            )
        )

    def mlp(y: Tensor) -> Tensor:
        return scale(feed_forward(run, y, style.width, style.activation))

    return add_parts(
        run,
        x,
        input_first=style.input_first,
        attention=attention,
        mlp=mlp,
    )


def add_parts(
    run: PassSettings,
    x: Tensor,
    norm: Callable[[Tensor], Tensor] | None = None,
    *,
    p: float = 0.0,
    input_first: bool = True,
    **parts: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute x + dropout(part(norm(x))) for each part in turn, under its name.

    The norm is a layer norm by default. ``input_first``: sums keep the layout of ``x``.
    """
    for name, part in parts.items():
        with x.tape.scope(name):
            normed = layer_norm(run, x) if norm is None else norm(x)
            out = functional.dropout(part(normed), p)
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
    """Compute the logits of the tokens asked for, and in training the loss.

    Nothing is computed where no head is asked for. ``scales``: logits are multiplied ("logits") or
    bent into a range ("cap": divide, tanh, multiply)."""
    if run.head is OutputHead.NONE:
        return x
    with x.tape.scope("logits"):
        if run.head is OutputHead.LAST and x.shape[1] > 1:
            x = x.slice(1, x.shape[1] - 1, x.shape[1])
        logits = project_to_vocabulary(
            run,
            x,
            vocab,
            tied=tied,
            bias=bias,
        )
        if "cap" in scales:
            logits = functional.activation("tanh", logits * 1.0) * 1.0
        if "logits" in scales:
            logits = logits * 1.0
        if run.served and run.head is OutputHead.LAST:
            engine_layers.sample_tokens(run, logits)
        if run.training:
            return _next_token_loss(logits)
        return logits


def _next_token_loss(logits: Tensor) -> Tensor:
    """Return the loss in fp32; labels are shifted by a padded copy."""
    tape = logits.tape
    with tape.scope("loss"):
        wide = logits.to(Dtype.FP32)
        batch, length, vocab = logits.shape
        labels = tape.empty((batch, length), Dtype.INT64)
        labels.pad_back((batch, length + 1)).slice(1, 1, length + 1).clone()
        return functional.cross_entropy(wide.view(batch * length, vocab))


# Tokens that an engine rounds a vocabulary to: DEFAULT_VOCAB_PADDING_SIZE of vLLM 0.25.1.
_PADDED_VOCABULARY = 64


def project_to_vocabulary(
    run: PassSettings,
    x: Tensor,
    vocab: int,
    *,
    tied: bool,
    bias: bool,
) -> Tensor:
    """Compute logits, of which each tensor-parallel GPU computes a part.

    An engine pads their number.
    """
    if run.engine:
        vocab = -(-vocab // _PADDED_VOCABULARY) * _PADDED_VOCABULARY
    share = -(-vocab // run.tp)
    x = functional.enter_parallel(x, run.tp)
    weight = x.tape.parameter(share, x.shape[-1], dtype=run.dtype, tied=tied)
    offset = x.tape.parameter(share, dtype=run.dtype) if bias else None
    logits = functional.linear(x, weight, offset)
    functional.gather_parts(logits, run.tp)
    return logits


def masked_token_logits(
    run: PassSettings,
    x: Tensor,
    vocab: int,
) -> Tensor:
    """Compute the logits of an encoder's tokens and, in training, the loss.

    The weights are the table that tokens were looked up in.
    """
    logits = project_to_vocabulary(
        run,
        x,
        vocab,
        tied=True,
        bias=True,
    )
    if run.training:
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]))
    return logits


def classify(
    run: PassSettings,
    x: Tensor,
    classes: int,
) -> Tensor:
    """Compute the scores of the classes and, in training, the loss."""
    scores = project(run, x, classes, bias=True)
    return functional.cross_entropy(scores) if run.training else scores
