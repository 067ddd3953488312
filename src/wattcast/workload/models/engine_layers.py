"""Layers of language models in the kernels of an inference engine (vLLM).

Linear layers with narrow weights, norms and gates that a compiler fused, and attention over a paged
cache. ``run`` holds the settings of the pass; a layer creates its weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from wattcast.core import Dtype
from wattcast.workload import engine_operators as engine
from wattcast.workload import engine_row_operators as row_kernels
from wattcast.workload import tensor_functions as functional
from wattcast.workload.adapter_operators import AdapterProduct
from wattcast.workload.model_options import TokenSampling, WeightRecipe
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Attention,
    Elementwise,
    LayerNorm,
    Layout,
    RmsNorm,
)
from wattcast.workload.program import PassSettings
from wattcast.workload.symbolic_tensor import Tape, Tensor


def narrow_parameter(
    tape: Tape,
    shape: Sequence[int],
    dtype: Dtype,
    bit: float,
) -> Tensor:
    """Return a weight whose elements take ``bit`` bits each, scales included."""
    weight = tape.parameter(*shape, dtype=dtype)
    weight.storage.byte = ceil(weight.numel * bit / 8.0)
    return weight


def project_narrow(
    run: PassSettings,
    x: Tensor,
    features: int,
    recipe: WeightRecipe,
    bias: bool = False,
) -> Tensor:
    """Apply a linear layer whose weights are kept by a recipe.

    Tokens are quantized first unless they are already.
    """
    tape = x.tape
    k = x.shape[-1]
    m = x.numel // k
    weight = narrow_parameter(tape, (features, k), run.dtype, recipe.bit)
    if bias:
        tape.parameter(features, dtype=run.dtype)
    if recipe.activations is not None and x.dtype is run.dtype:
        mode = "fp4" if recipe.activations is Dtype.FP4 else recipe.mode
        quantize = row_kernels.Quantize(m, k, mode, dtype=run.dtype)
        x = tape.launch(quantize, (x,), x.shape, recipe.activations)
    op = _describe_product(
        m,
        features,
        k,
        recipe,
        run.dtype,
    )
    return tape.launch(op, (x, weight), (*x.shape[:-1], features), run.dtype)


def _describe_product(
    m: int,
    n: int,
    k: int,
    recipe: WeightRecipe,
    dtype: Dtype,
) -> Operator:
    """Return the product of tokens and narrow weights by the library of a recipe."""
    if recipe.activations is None:
        return engine.WeightOnlyProduct(
            m,
            n,
            k,
            weights=recipe.weights,
            group=recipe.group,
            zero_points=recipe.zero_points,
            kernel=recipe.kernel,
            dtype=dtype,
        )
    if recipe.mode == "token":
        return engine.ScaledProduct(
            m,
            n,
            k,
            scales="token",
            kernel=recipe.kernel,
            dtype=recipe.activations,
        )
    return engine.BlockProduct(
        m,
        n,
        k,
        scales="block",
        bit=recipe.bit,
        kernel=recipe.kernel,
        dtype=recipe.activations,
    )


def add_served_adapters(
    run: PassSettings,
    x: Tensor,
    out: Tensor,
    slices: int,
) -> None:
    """Add to the results of a linear layer what each sequence's LoRA adapter says."""
    tape = x.tape
    inputs = x.shape[-1]
    outputs = out.shape[-1]
    rank = run.served_rank
    shrinks = tape.parameter(run.served_adapters * slices * rank, inputs, dtype=run.dtype)
    expands = tape.parameter(run.served_adapters * rank, outputs, dtype=run.dtype)
    op = AdapterProduct(
        m=x.numel // inputs,
        n=outputs,
        k=inputs,
        rank=rank,
        slices=slices,
        adapters=min(run.served_adapters, run.batch),  # sequences take adapters in turn
        dtype=run.dtype,
    )
    tape.emit(op, (x, shrinks, expands, out), (out,))


def _quantizes_inside(run: PassSettings) -> bool:
    """Tell whether norms and gates return fp8.

    The compiler puts the scale of each token into their kernels.
    """
    recipe = run.recipe
    if recipe is None or recipe.activations is None:
        return False
    return recipe.mode == "token"


def compile_rows(
    x: Tensor,
    function: str,
    dim: int,
    quantized: bool = False,
) -> Tensor:
    """Emit a norm or gate over the last dimension as torch.compile writes it.

    ``quantized`` results are in fp8.
    """
    if quantized:
        function += "_quant"
    shape = (*x.shape[:-1], dim)
    op = row_kernels.CompiledRows(prod(shape[:-1]), dim, function, dtype=x.dtype)
    return x.tape.launch(op, (x,), shape, Dtype.FP8 if quantized else x.dtype)


def gate_in_one_kernel(
    run: PassSettings,
    x: Tensor,
    function: str,
) -> Tensor:
    """Compute act(first half) * second half of the last dimension in one kernel."""
    width = x.shape[-1] // 2
    if run.served:
        return compile_rows(x, "silu_and_mul", width, _quantizes_inside(run))
    out = x.tape.empty((*x.shape[:-1], width), x.dtype)
    fused = "silu_mul" if function == "silu" else "gelu_mul"
    x.tape.emit_pointwise(fused, (x,), out, Layout.CONTIGUOUS)
    return out


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
    weights = [tape.parameter(dim, dtype=run.dtype)]
    if bias and kind is LayerNorm:
        weights.append(tape.parameter(dim, dtype=run.dtype))
    if run.served and kind is RmsNorm:
        quantized = to_products and _quantizes_inside(run)
        return compile_rows(x, "add_rms_norm", dim, quantized)
    out = tape.empty(x.shape, x.dtype)
    byte = 2 * x.numel * x.dtype.byte
    op = kind(
        x.numel // dim,
        dim,
        dtype=x.dtype,
        read=byte,
        write=byte,
    )
    tape.emit(op, (x, *weights), (out, x))
    return out


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


def sample_tokens(run: PassSettings, logits: Tensor) -> None:
    """Draw the next token of each row of logits."""
    vocab = logits.shape[-1]
    mode = _SAMPLING_KERNELS[run.sampling or TokenSampling.GREEDY]
    op = row_kernels.Sampling(logits.numel // vocab, vocab, mode, dtype=run.dtype)
    logits.tape.emit(op, (logits,), (logits,))


def split_projection(
    fused: Tensor,
    heads: Sequence[int],
    dim: int,
) -> list[Tensor]:
    """View the columns of one product as queries, keys and values.

    Each is ``[batch, length, heads, dim]``.
    """
    batch, length, _ = fused.shape
    parts = fused.split(*[count * dim for count in heads])
    return [part.view(batch, length, -1, dim) for part in parts]


def rotate_in_place(
    run: PassSettings,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    head_dim: int,
) -> None:
    """Apply the rotary embedding to queries and keys, in place and in one kernel.

    It turns ``head_dim`` values of each head.
    """
    tokens = run.batch * run.length
    width = q.shape[-1] if len(q.shape) == 4 else head_dim
    heads = q.numel // tokens // width
    kv_heads = k.numel // tokens // width
    op: Operator
    if run.served:
        op = row_kernels.EngineRotary(
            rows=tokens,
            dim=kv_heads * head_dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=q.dtype,
        )
    else:
        n = tokens * (heads + kv_heads) * head_dim
        read = n * q.dtype.byte + 2 * cos.byte
        op = Elementwise(
            "rotary",
            n,
            dtype=q.dtype,
            layout=Layout.STRIDED,
            read=read,
        )
    q.tape.emit(op, (q, k, cos), (q, k))


def write_paged_cache(
    run: PassSettings,
    parts: Sequence[Tensor],
    elements: int,
) -> None:
    """Copy ``elements`` new keys and values of each token into the paged cache."""
    if not run.cached:
        return
    tape = parts[0].tape
    dtype = parts[0].dtype
    tokens = run.batch * run.length
    op: Operator
    if run.served:
        half = elements // 2
        op = row_kernels.CacheWrite(
            rows=tokens,
            dim=half,
            heads=1,
            kv_heads=1,
            head_dim=half,
            kv_dtype=run.cache_dtype,
            dtype=dtype,
        )
    else:
        op = Elementwise("copy", tokens * elements, dtype=dtype, layout=Layout.STRIDED)
    tape.emit(op, parts, ())
    cached_tokens = run.batch * -(-run.context // run.cp)
    tape.cache_byte += cached_tokens * elements * run.cache_dtype.byte


def paged_attention(
    run: PassSettings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int = 0,
    *,
    chunk: int = 0,
    softcap: float = 0.0,
    sink: bool = False,
) -> Tensor:
    """Write new keys and values into the cache, then attend over it.

    Attention sees the part of the cache inside the window or chunk.
    """
    tape = q.tape
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    write_paged_cache(run, (k, v), kv_heads * k.shape[3] + v.shape[2] * v.shape[3])
    keys, causal = _visible_keys(run, k, v, window)
    op: Operator
    if run.served:
        if run.cache_dtype is Dtype.FP8:
            quantize = row_kernels.Quantize(batch * length, heads * dim, "static", dtype=q.dtype)
            tape.emit(quantize, (q,), (q,))
        last_keys = keys if causal else keys + (length - 1) // 2  # of the last token
        replays_graph = batch * length <= engine.GRAPH_TOKENS
        op = engine.PagedAttention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            groups=_list_groups(run, batch, last_keys, chunk),
            kv_dtype=run.cache_dtype,
            window=window,
            splits=engine.GRAPH_SPLITS if replays_graph else 0,
            bound=last_keys,
            softcap=softcap,
            sink=sink,
            dtype=q.dtype,
        )
    else:
        op = Attention(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            q_len=length,
            kv_len=keys,
            head_dim=dim,
            causal=causal,
            dtype=tape.math_dtype(q.dtype),
        )
    out = tape.launch(op, (q, k, v), (batch, length, heads * dim))
    if run.cp > 1 and length == 1:  # results and sums of exponentials of all parts
        partial_results = tape.empty((batch, heads, dim + 1), Dtype.FP32)
        functional.gather_parts(partial_results, run.cp, run.tp)
    return out


def _visible_keys(
    run: PassSettings,
    k: Tensor,
    v: Tensor,
    window: int,
) -> tuple[int, bool]:
    """Return how many keys a token of this GPU attends to, and whether a causal mask hides some.

    GPUs that share a prompt exchange all keys. Early and late tokens are dealt out, so that each
    GPU sees half of the new keys. In decode each attends over its part of the cache."""
    if run.length == 1:
        keys = min(run.context, window) if window else run.context
        return -(-keys // run.cp), False
    if run.cp == 1:
        return run.context, True
    functional.gather_parts(k, run.cp, run.tp)
    functional.gather_parts(v, run.cp, run.tp)
    new_keys = run.context - run.past
    return run.past + max(new_keys // 2, 1), False


def _list_groups(
    run: PassSettings,
    batch: int,
    keys: int,
    chunk: int,
) -> tuple[tuple[int, int, int], ...]:
    """Return groups of sequences alike: how many, new tokens and keys of each.

    Of a prompt in chunks, each chunk is a sequence.
    """
    length = run.length
    if not chunk or length <= chunk or run.past:
        return ((batch, length, keys),)
    chunks, remainder = divmod(length, chunk)
    whole = (batch * chunks, chunk, chunk)
    if not remainder:
        return (whole,)
    return whole, (batch, remainder, remainder)
