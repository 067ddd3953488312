"""Make the operator that a row of a public kernel table timed, with what ran beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wattcast.calibrate.other_tables import (
    OTHER_TABLES,
    TableSample,
    place_weights,
)
from wattcast.calibrate.table_coefficients import TABLE
from wattcast.calibrate.table_files import TableFile, version_key
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu
from wattcast.kernels import RunCondition
from wattcast.kernels.families.engine.fused_experts import has_tuned_tiles
from wattcast.options.weight_recipes import RECIPES
from wattcast.workload import engine_operators, engine_row_operators
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Elementwise, Linear

_GROUP = 128  # weights of 4 bits that share a scale
_SCALE_THREADS = 1024 * 1024  # of TensorRT-LLM's search for the scale of a tensor
_SCALE_BYTE = 4  # of what it finds
_BLOCK = 128  # weights of a row in fp8 that share a scale
# that the collector's products go round: weights come from device memory if these outgrow L2
WEIGHT_COPIES = 6
_HALF = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16}


def make_sample(
    plain: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> TableSample | str:
    """Make the operator of a row, or say why it cannot be made."""
    if file.table in OTHER_TABLES:
        return OTHER_TABLES[file.table].make(plain, gpu)
    return _MAKERS[file.table](plain, file, gpu)


def _make_product(
    row: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> TableSample | str:
    """Make the product of a row, with the quantising of its input beside it where the format has
    one; or say why it cannot be made.
    """
    form = row["gemm_dtype"]
    sizes = _ProductSizes(int(row["m"]), int(row["n"]), int(row["k"]))
    if form in _HALF:
        product = Linear(*sizes, dtype=_HALF[form])
        return TableSample(product, _place(product, sizes, WEIGHT_COPIES, gpu))
    if form in ("int8_wo", "int4_wo"):
        return _make_weight_only_product(form, sizes, gpu)
    if file.half_only:
        return f"{form} of {file.engine}, since a bundle means one engine's kernels"
    tensor_formats = gpu.pipes.tensor_flop_per_cycle
    if form == "fp8" and Dtype.FP8 in tensor_formats:
        return _make_scaled_product(sizes, file.engine, gpu)
    if form == "fp8_block" and Dtype.FP8 in tensor_formats:
        if file.engine == "vllm" and row["latency"] < file.host_bound_ms:
            return "fp8_block bound by the host"
        source = str(row.get("kernel_source")).lower()
        return _make_fp8_block_product(sizes, source, file.engine, gpu)
    if form == "nvfp4" and Dtype.FP4 in tensor_formats:
        return _make_fp4_product(sizes, gpu)
    return f"format {form}"


class _ProductSizes(NamedTuple):
    m: int
    n: int
    k: int


def _place(
    product: Operator,
    sizes: _ProductSizes,
    copies: int,
    gpu: Gpu,
) -> RunCondition:
    """Say where the weights of a product come from."""
    return place_weights(
        product,
        sizes.m,
        sizes.k,
        copies,
        gpu,
    )


def _make_weight_only_product(
    form: str,
    sizes: _ProductSizes,
    gpu: Gpu,
) -> TableSample:
    """Make a product whose weights alone are in whole numbers: those of 4 bit have a scale for each
    group of 128, those of 8 bit one for each row.
    """
    weights = form.partition("_")[0]
    product = engine_operators.WeightOnlyProduct(
        *sizes,
        weights,
        _GROUP if weights == "int4" else -1,
        kernel="cutlass",
        dtype=Dtype.BF16,
    )
    return TableSample(product, _place(product, sizes, 1, gpu))


def _make_scaled_product(
    sizes: _ProductSizes,
    engine: str,
    gpu: Gpu,
) -> TableSample:
    """Make a product in fp8, scaled by token in vLLM and by tensor elsewhere.

    TensorRT-LLM's was given no scale of its input, which its linear layer then finds in each run,
    by 1,024 blocks of 1,024 threads whatever the input, and casts to fp32; engines that serve know
    it (aiconfigurator, ``collector/trtllm/collect_gemm.py``; TensorRT-LLM,
    ``invokeComputeFP8QuantizeScale``).
    """
    scales = "token" if engine == "vllm" else "tensor"
    product = engine_operators.ScaledProduct(*sizes, scales, dtype=Dtype.FP8)
    quantising = engine_row_operators.Quantize(sizes.m, sizes.k, scales, dtype=Dtype.BF16)
    beside: tuple[Operator, ...] = (quantising,)
    if engine == "trtllm":
        search = Elementwise(
            "abs",
            _SCALE_THREADS,
            read=_SCALE_BYTE,
            write=_SCALE_BYTE,
            dtype=Dtype.FP32,
        )
        cast = Elementwise("copy", 1, dtype=Dtype.FP32)
        beside += (search, cast)
    return TableSample(product, _place(product, sizes, WEIGHT_COPIES, gpu), beside)


def _make_fp8_block_product(
    sizes: _ProductSizes,
    source: str,
    engine: str,
    gpu: Gpu,
) -> TableSample:
    """Make a product in fp8, scaled by blocks, of DeepGEMM or CUTLASS."""
    kernel = "deepgemm" if "deepgemm" in source else "cutlass"
    product = engine_operators.BlockProduct(*sizes, kernel=kernel, dtype=Dtype.FP8)
    quantising = engine_row_operators.Quantize(sizes.m, sizes.k, "block", dtype=Dtype.BF16)
    beside: tuple[Operator, ...] = (quantising,)
    if engine == "sglang" and Dtype.FP4 in gpu.pipes.tensor_flop_per_cycle:
        beside += _spread_weight_scales(sizes)
    return TableSample(product, _place(product, sizes, 1, gpu), beside)


def _spread_weight_scales(sizes: _ProductSizes) -> tuple[Operator, ...]:
    """Return how DeepGEMM lays out scales of weights on Blackwell where they are given in fp32.

    It gives each row of the weight the scales of its block, and packs them
    (``transform_sf_into_required_layout``). SGLang's collector has it do so in each run; engines
    that serve do it once, as they load the weights.
    """
    values = max(sizes.n * sizes.k // _BLOCK, 1)
    rows = Elementwise("copy", sizes.n, dtype=Dtype.FP32)
    spread = Elementwise("copy", values, dtype=Dtype.FP32)
    pack = Elementwise("copy", values, dtype=Dtype.FP32, write=values)
    return (rows, rows, spread, pack)


def _make_fp4_product(sizes: _ProductSizes, gpu: Gpu) -> TableSample:
    """Make a product in fp4, whose scales take half a bit a number."""
    product = engine_operators.BlockProduct(
        *sizes,
        kernel="cutlass",
        bit=RECIPES["nvfp4"].bit,
        dtype=Dtype.FP4,
    )
    quantising = engine_row_operators.Quantize(sizes.m, sizes.k, "fp4", dtype=Dtype.BF16)
    return TableSample(product, _place(product, sizes, 1, gpu), (quantising,))


# Attention backends in an engine's tables besides the one that it takes by itself: SGLang takes
# FlashAttention 3 on Hopper and TensorRT-LLM's kernels on Blackwell (docs.sglang.ai, attention
# backend).
_OTHER_BACKENDS = {"sglang": ("triton", "flashinfer")}
_CACHE_FORMATS = {**_HALF, "fp8": Dtype.FP8}


def _make_attention(
    row: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> TableSample | str:
    """Make the attention of a row: prefill of ``isl`` tokens, or one token behind those cached,
    over paged caches.
    """
    reason = _refuse_attention(row, file, gpu)
    if reason:
        return reason
    heads = int(row["num_heads"])
    head_dim = int(row["head_dim"])
    kv_heads = int(row.get("num_key_value_heads") or 0) or heads
    if heads % kv_heads:
        return "heads that key heads do not divide"
    cache = _CACHE_FORMATS[row["kv_cache_dtype"]]
    batch = int(row["batch_size"])
    length = int(row["isl"]) + int(row["step"] or 0)
    is_prompt = "generation" not in file.path.name
    new_tokens = int(row["isl"]) if is_prompt else 1
    in_graph = batch * new_tokens <= engine_operators.GRAPH_TOKENS
    op = engine_operators.PagedAttention(
        heads,
        kv_heads,
        head_dim,
        ((batch, new_tokens, length),),
        cache,
        # even one that holds all: FlashAttention 2 runs a slower kernel then, 4 times on an L40S
        window=int(row.get("window_size") or 0),
        splits=engine_operators.GRAPH_SPLITS if in_graph else 0,
        bound=length,
        phase="prefill" if is_prompt and new_tokens == 1 else "",
        dtype=_HALF.get(row["attn_dtype"], Dtype.BF16),
    )
    width = kv_heads * head_dim
    writes = engine_row_operators.CacheWrite(
        batch * new_tokens,
        width,
        1,
        1,
        width,
        cache,
        dtype=op.dtype,
    )
    return TableSample(op, RunCondition(rotated="none"), (writes,))


def _refuse_attention(
    row: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> str:
    """Say why the attention of a row is not the engine's own or not one of this GPU; empty if it
    is.
    """
    other_backends = _OTHER_BACKENDS.get(file.engine, ())
    source = str(row.get("kernel_source"))
    if source in other_backends:
        return f"attention of {source}, which {file.engine} does not take by itself"
    form = row["attn_dtype"]
    cache = _CACHE_FORMATS.get(row["kv_cache_dtype"])
    has_cache = cache in _HALF.values() or cache in gpu.pipes.tensor_flop_per_cycle
    # the backends that an engine takes by itself multiply in fp8 where the cache is in fp8
    has_arithmetic = form in _HALF or (form == "fp8" and file.engine in _OTHER_BACKENDS)
    if cache is None or not has_cache or not has_arithmetic:
        return f"attention in {form} over a cache in {row['kv_cache_dtype']}"
    return ""


# version of vLLM since which experts without tuned tiles have larger ones
LARGE_TILES = ((0, ""), (17, ""))
_EXPERTS = {  # format: weights, scales, arithmetic
    "bfloat16": ("bf16", "none", Dtype.BF16),
    "float16": ("fp16", "none", Dtype.FP16),
    "fp8": ("fp8", "tensor", Dtype.FP8),
    "fp8_block": ("fp8", "block", Dtype.FP8),
    "int4_wo": ("int4", "group", Dtype.BF16),
    "w4a16_mxfp4": ("fp4", "mx", Dtype.BF16),
    "nvfp4": ("fp4", "nv", Dtype.FP4),
}
_GPT_OSS_HIDDEN = 2880


def _make_experts(
    row: Mapping[str, Any],
    file: TableFile,
    gpu: Gpu,
) -> TableSample | str:
    """Make the mixture layer of a row, one GPU's share of its experts and of their width; or say
    why it cannot be made.
    """
    form = row["moe_dtype"]
    weights, scales, dtype = _EXPERTS.get(form, ("", "", Dtype.BF16))
    if not weights or dtype not in gpu.pipes.tensor_flop_per_cycle:
        return f"experts in {form}"
    source = str(row.get("kernel_source"))
    if "nongated" in source:
        return "experts without a gate"
    distribution = str(row.get("distribution") or "balanced")
    law = re.fullmatch(r"power_law_(\d+\.?\d*)", distribution)
    if law is None and distribution != "balanced":
        return f"experts routed by {distribution}"

    part = _divide_experts(row, float(law[1]) if law else None)
    kernel = _name_library(source, form, row, gpu)
    is_plain_triton = kernel == "triton" and scales == "none"
    if is_plain_triton and _has_small_tiles(file, part, gpu):
        kernel = engine_operators.SMALL_TILES
    op = engine_operators.FusedExperts(
        tokens=part.tokens,
        experts=part.experts,
        top_k=part.top_k,
        hidden=int(row["hidden_size"]),
        intermediate=part.inner,
        weights=weights,
        scales=scales,
        routing="power" if law else "balanced",
        kernel=kernel,
        elsewhere=part.visits_elsewhere,
        all_tokens=int(row["num_tokens"]),
        gpus=part.gpus,
        dtype=dtype,
    )
    return TableSample(op, RunCondition(rotated="none"))


def _name_library(
    source: str,
    form: str,
    row: Mapping[str, Any],
    gpu: Gpu,
) -> str:
    """Name the library of a row by the source that a table states.

    Of TensorRT-LLM's, ``min_latency`` are its generated kernels, and so is all that multiplies
    mxfp4 on Blackwell. On Hopper gpt-oss runs OpenAI's kernels there and other models CUTLASS's
    (aiconfigurator, ``collector/trtllm/collect_moe.py``).
    """
    if "min_latency" in source:
        return "trtllm"
    if source == "moe_torch_flow" and form == "w4a16_mxfp4":
        if Dtype.FP4 in gpu.pipes.tensor_flop_per_cycle:
            return "trtllm"
        return "oai" if int(row["hidden_size"]) == _GPT_OSS_HIDDEN else "cutlass"
    libraries = [name for name in engine_operators.EXPERT_LIBRARIES if name in source]
    return libraries[0] if libraries else "triton"


def _has_small_tiles(
    file: TableFile,
    part: _ExpertsPart,
    gpu: Gpu,
) -> bool:
    """Whether a table's engine ran experts in small tiles: an old vLLM, where it had none tuned."""
    if file.engine != "vllm" or version_key(file.version) >= LARGE_TILES:
        return False
    return not has_tuned_tiles(part.experts, part.inner, "half", gpu.name)


@dataclass(frozen=True)
class _ExpertsPart:
    """One GPU's share of a mixture layer."""

    gpus: int
    experts: int
    top_k: int  # of a token's experts, those on this GPU
    tokens: int  # that have an expert on this GPU
    inner: int
    visits_elsewhere: int  # of tokens to experts on other GPUs


def _divide_experts(row: Mapping[str, Any], power_law: float | None) -> _ExpertsPart:
    """Return the share of the busiest GPU; ``power_law`` is the exponent that the table names."""
    gpus = int(row.get("moe_ep_size") or 1)
    tokens = int(row["num_tokens"])
    every_expert = int(row["num_experts"])
    picks = int(row["topk"])
    experts = max(every_expert // gpus, 1)
    visits = picks / gpus  # of a token to this GPU
    if power_law is not None:
        # the busiest GPU is timed; exponents and loads were compared on rows that are fitted to
        visits *= busiest_load(every_expert, picks, gpus, TABLE.popularity_exponent * power_law)
    top_k = min(max(round(visits), 1), experts)
    return _ExpertsPart(
        gpus=gpus,
        experts=experts,
        top_k=top_k,
        tokens=max(round(tokens * visits / top_k), 1),
        inner=max(int(row["inter_size"]) // int(row.get("moe_tp_size") or 1), 1),
        visits_elsewhere=round(tokens * picks * (1.0 - 1.0 / gpus)),
    )


def busiest_load(
    experts: int,
    top_k: int,
    gpus: int,
    exponent: float,
) -> float:
    """Return the visits to the busiest of ``gpus`` over the mean, for a power law and experts dealt
    at random.

    With the popularity w of the experts (rank^-exponent, mean 1) and n of N experts on a GPU, the
    busiest has either the most popular expert, w_1 + (n - 1)·(N - w_1)/(N - 1), or a draw of n that
    is the largest of G: n + √(2·ln G)·σ, σ² = var(w)·n·(N - n)/(N - 1). An expert gets each token
    once at most.

    >>> [round(busiest_load(128, 8, gpus, 0.75), 2) for gpus in (1, 16)]
    [1.0, 2.39]
    """
    weight = np.arange(1.0, experts + 1.0) ** -exponent
    weight /= weight.mean()
    on_gpu = max(experts // gpus, 1)
    other_experts = max(experts - 1, 1)
    with_popular = weight[0] + (on_gpu - 1) * (experts - weight[0]) / other_experts
    spread = weight.std() * (on_gpu * (experts - on_gpu) / other_experts) ** 0.5
    largest_draw = on_gpu + spread * (2.0 * np.log(gpus)) ** 0.5
    most = max(with_popular, largest_draw) / on_gpu
    return float(min(most, experts / top_k))


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], TableFile, Gpu], TableSample | str]] = {
    "gemm": _make_product,
    "attention": _make_attention,
    "experts": _make_experts,
}
