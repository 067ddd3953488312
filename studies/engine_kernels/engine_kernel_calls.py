"""Build calls of vLLM's kernels, and capture and time them in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import engine_products as products
from engine_products import EngineBuilder
from engine_shapes import route_tokens
from wattcast.lab.campaigns.kernel_plan import OperatorSpec
from wattcast.lab.campaigns.operator_calls import OperandPools, OperatorCall
from wattcast.lab.campaigns.operator_rows import (
    GRAPH_S,
    MOST_COPIES,
    ROTATION_S,
    CampaignGpu,
    CapturedGraph,
)

ACTIVATION_BYTE = {"bf16": 13 * 10**8, "fp8": 6 * 10**8}
WEIGHT_BYTE: dict[str, dict[str, int]] = {
    "attention": {"bf16": 33 * 10**8, "fp8": 33 * 10**8},
    "products": {"bf16": 10**6, "fp8": 9 * 10**8},
    "experts": {"bf16": 33 * 10**8, "fp8": 33 * 10**8},
    "block": {"bf16": 10**6, "fp8": 9 * 10**8},
    "small": {"bf16": 22 * 10**8, "fp8": 12 * 10**8},
    "served": {"bf16": 33 * 10**8, "fp8": 33 * 10**8},
    "decoded": {"bf16": 33 * 10**8, "fp8": 33 * 10**8},
}
PROBE_COPIES = 4
_EPSILON = 1e-6
_FP8_MOST = 448.0


class EngineGpu(CampaignGpu):
    """A GPU whose graphs hold vLLM's kernels.

    The length of a graph follows from a short probe graph: eager calls of the engine's Python
    wrappers take longer than many of the kernels, and would leave too few copies to pass the L2.
    """

    @classmethod
    def open_group(cls, group: str) -> EngineGpu:
        """Draw the pools one group of families needs; ``Gpu.open`` captures the keeper."""
        gpu = cls.open(ACTIVATION_BYTE)
        assert isinstance(gpu, EngineGpu)
        torch = gpu.torch
        weights = OperandPools(torch, "cuda", WEIGHT_BYTE[group])
        weights.fill("random")
        properties = torch.cuda.get_device_properties(0)
        gpu.builder = EngineBuilder(
            torch,
            weights,
            float(properties.L2_cache_size),
            gpu.operands,
            properties.multi_processor_count,
        )
        gpu.operands = weights
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # drawing took a gigabyte that other workers can use
        return gpu

    def build(self, spec: OperatorSpec) -> OperatorCall:
        """Build the call of one of vLLM's kernels, or of PyTorch's where the operator is not the
        engine's.
        """
        if spec.operator["op"] not in CALLS:
            return super().build(spec)
        assert isinstance(self.builder, EngineBuilder)
        self.builder.reset()
        return CALLS[spec.operator["op"]](self.builder, spec)

    def run_once(self, spec: OperatorSpec) -> None:
        """Build and run one call, so that whatever is compiled at run time is compiled now."""
        with self.torch.cuda.stream(self.stream):
            self.stream.wait_stream(self.torch.cuda.default_stream())
            self.build(spec).run(0)
        self.torch.cuda.synchronize()

    def prepare(
        self, spec: OperatorSpec, graph_s: float = GRAPH_S, most_copies: int = MOST_COPIES
    ) -> CapturedGraph:
        """Build, warm up, probe and capture; the graph runs about ``graph_s`` and visits the
        operand sets.
        """
        call = self.build(spec)
        with self.torch.cuda.stream(self.stream):
            self.stream.wait_stream(self.torch.cuda.default_stream())
            call.run(0)
            call.run(1)
        self.torch.cuda.synchronize()
        with self._graph(call, PROBE_COPIES) as probe:
            guess_s = float(self.timed(probe, 2)[-1])
        copies = int(
            min(max(graph_s / guess_s, min(call.sets, ROTATION_S / guess_s), 1), most_copies)
        )
        return self._graph(call, copies)

    def _graph(self, call: OperatorCall, copies: int) -> CapturedGraph:
        graph = self.torch.cuda.CUDAGraph()
        held: list[Any] = [None] * min(call.sets, copies, 8)

        def run() -> None:
            for copy in range(copies):
                held[copy % len(held)] = call.run(copy)

        self._capture(graph, run)
        held.clear()
        return CapturedGraph(graph, copies, call)


def rms_norm(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """RMS norm, with the residual added and with fp8 results where the form says so."""
    from vllm import _custom_ops as ops

    torch, o = builder.torch, spec.operator
    rows, dim, residual, quant = o["rows"], o["dim"], o["residual"], o["quant"]
    native = torch.ops._C
    byte = rows * dim * (2 + 4 * residual + (1 if quant else 2 - 2 * residual))
    sets = builder.sets(byte, spec.rotated == "all")
    xs = [builder.scratch("bf16", rows, dim) for _ in range(sets)]
    kept = [builder.scratch("bf16", rows, dim) for _ in range(sets if residual else 0)]
    weight = builder.activations.take("bf16", dim)
    out = torch.empty(
        rows, dim, dtype=torch.float8_e4m3fn if quant else torch.bfloat16, device=weight.device
    )
    scale = torch.ones(1, dtype=torch.float32, device=weight.device)

    def run(i: int) -> Any:
        x, other = xs[i % sets], kept[i % sets] if residual else None
        if quant == "token":
            return ops.rms_norm_dynamic_per_token_quant(
                x, weight, _EPSILON, torch.float8_e4m3fn, residual=other
            )
        if quant and residual:
            return native.fused_add_rms_norm_static_fp8_quant(
                out, x, other, weight, scale, _EPSILON
            )
        if quant:
            return native.rms_norm_static_fp8_quant(out, x, weight, scale, _EPSILON)
        if residual:
            return ops.fused_add_rms_norm(x, other, weight, _EPSILON)
        return ops.rms_norm(out, x, weight, _EPSILON)

    return OperatorCall(run, sets, 2 * dim, byte)


def silu_and_mul(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """The gate of a gated MLP over (rows, 2 dim), with fp8 results where the form says so."""
    from vllm import _custom_ops as ops

    torch, o = builder.torch, spec.operator
    rows, dim, quant = o["rows"], o["dim"], o["quant"]
    byte = rows * dim * (5 if quant else 6)
    sets = builder.sets(byte, spec.rotated == "all")
    xs = [builder.operands.take("bf16", rows, 2 * dim) for _ in range(sets)]
    out = torch.empty(
        rows, dim, dtype=torch.float8_e4m3fn if quant else torch.bfloat16, device=xs[0].device
    )
    scale = torch.ones(1, dtype=torch.float32, device=out.device)

    def run(i: int) -> Any:
        x = xs[i % sets]
        if quant == "block":
            return ops.silu_and_mul_per_block_quant(x, 128, torch.float8_e4m3fn)
        return (
            torch.ops._C.silu_and_mul_quant(out, x, scale)
            if quant
            else torch.ops._C.silu_and_mul(out, x)
        )

    return OperatorCall(run, sets, 0, byte)


def rotary(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """Rotary embedding of queries and keys in place."""
    from vllm import _custom_ops as ops

    o = spec.operator
    rows, heads, kv_heads, dim = o["rows"], o["heads"], o["kv_heads"], o["head_dim"]
    byte = 4 * rows * (heads + kv_heads) * dim
    sets = builder.sets(byte, spec.rotated == "all")
    pairs = [
        (builder.scratch("bf16", rows, heads * dim), builder.scratch("bf16", rows, kv_heads * dim))
        for _ in range(sets)
    ]
    table = builder.activations.take("bf16", 8192, dim).clamp(-1.0, 1.0)
    positions = builder.integers(np.arange(rows) % 8192, "int64")

    def run(i: int) -> Any:
        q, k = pairs[i % sets]
        return ops.rotary_embedding(positions, q, k, dim, table, True)

    return OperatorCall(run, sets, 2 * 8192 * dim, byte)


def cache_write(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """New keys and values into their pages of the cache, converted where the cache is fp8."""
    from vllm import _custom_ops as ops

    torch, o = builder.torch, spec.operator
    rows, kv_heads, dim, fp8 = o["rows"], o["kv_heads"], o["head_dim"], o["kv_dtype"] == "fp8"
    blocks = rows // 16 + 16
    byte = 2 * rows * kv_heads * dim * (3 if fp8 else 4)
    sets = builder.sets(byte, spec.rotated == "all")
    k, v = (builder.activations.take("bf16", rows, kv_heads, dim) for _ in "kv")
    caches = [
        builder.operands.take(o["kv_dtype"], blocks, 2, 16, kv_heads, dim) for _ in range(sets)
    ]
    caches = [cache.view(torch.uint8) if fp8 else cache for cache in caches]
    slots = builder.integers(np.random.default_rng(3).permutation(16 * blocks)[:rows], "int64")
    one = torch.ones(1, dtype=torch.float32, device=k.device)

    def run(i: int) -> Any:
        keys, values = caches[i % sets].unbind(1)
        return ops.reshape_and_cache_flash(
            k, v, keys, values, slots, "fp8" if fp8 else "auto", one, one
        )

    return OperatorCall(run, sets, 0, byte)


def quantize(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """bf16 to fp8 with a given scale, one found for the tensor, one a token, or one for 128 values."""
    from vllm import _custom_ops as ops

    torch, o = builder.torch, spec.operator
    rows, dim, mode = o["rows"], o["dim"], o["mode"]
    byte = rows * dim * 3
    sets = builder.sets(byte, spec.rotated == "all")
    xs = [builder.operands.take("bf16", rows, dim) for _ in range(sets)]
    if mode == "block":
        from vllm.model_executor.layers.quantization.utils.fp8_utils import (
            per_token_group_quant_fp8,
        )

        return OperatorCall(
            lambda i: per_token_group_quant_fp8(
                xs[i % sets], 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=True
            ),
            sets,
            0,
            byte,
        )
    scale = torch.ones(1, dtype=torch.float32, device=xs[0].device) if mode == "static" else None
    each = mode == "token"
    return OperatorCall(
        lambda i: ops.scaled_fp8_quant(xs[i % sets], scale, use_per_token_if_dynamic=each),
        sets,
        0,
        byte,
    )


def route(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """Top-k of the router's scores: softmax over all experts, or DeepSeek-V3's groups."""
    from vllm import _custom_ops as ops

    torch, o = builder.torch, spec.operator
    rows, experts, top_k = o["rows"], o["experts"], o["top_k"]
    byte = rows * (2 * experts + 12 * top_k)
    device = builder.operands.device
    if o["mode"] == "grouped":
        scores = builder.operands.take("bf16", rows, experts).float()
        bias = torch.zeros(experts, dtype=torch.float32, device=device)
        return OperatorCall(
            lambda i: ops.grouped_topk(scores, 8, 4, top_k, True, 2.5, bias, 1), 1, byte, 0
        )
    sets = builder.sets(byte, spec.rotated == "all")
    many = [builder.operands.take("bf16", rows, experts) for _ in range(sets)]
    shares = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    ids, places = (torch.empty(rows, top_k, dtype=torch.int32, device=device) for _ in "ab")
    return OperatorCall(
        lambda i: ops.topk_softmax(shares, ids, places, many[i % sets], True), sets, 0, byte
    )


def align(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """Sort tokens by expert and pad each expert's tokens to whole blocks."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    o = spec.operator
    ids = builder.integers(route_tokens(o["rows"], o["experts"], o["top_k"], "even"))
    return OperatorCall(
        lambda i: moe_align_block_size(ids, o["block"], o["experts"]),
        1,
        8 * o["rows"] * o["top_k"],
        0,
    )


def sampling(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """Next tokens of logits in bf16: greedy, at random, or at random among the likeliest (top-k 50,
    top-p 0.9).
    """
    torch, o = builder.torch, spec.operator
    rows, vocabulary, mode = o["rows"], o["dim"], o["mode"]
    byte = 2 * rows * vocabulary
    sets = builder.sets(byte, spec.rotated == "all")
    logits = [builder.operands.take("bf16", rows, vocabulary) for _ in range(sets)]
    if mode == "greedy":
        return OperatorCall(
            lambda i: logits[i % sets].to(torch.float32).argmax(dim=-1), sets, 0, byte
        )
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

    device = logits[0].device
    temperature = torch.full((rows, 1), 0.8, dtype=torch.float32, device=device)
    k = torch.full((rows,), 50, dtype=torch.int32, device=device)
    p = torch.full((rows,), 0.9, dtype=torch.float32, device=device)

    def run(i: int) -> Any:
        scores = logits[i % sets].to(torch.float32).div_(temperature)
        scores = apply_top_k_top_p(scores, k, p) if mode == "top_p" else scores
        return random_sample(scores.softmax(dim=-1, dtype=torch.float32), {})

    return OperatorCall(run, sets, 0, byte)


def compiled(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """Norms and gates as torch.compile emits them, the number of tokens left open as in vLLM."""
    torch, o = builder.torch, spec.operator
    rows, dim, name = o["rows"], o["dim"], o["function"]
    function = _compiled_function(builder, name)
    gated = name.startswith("silu")
    byte = rows * dim * (6 if gated else 8 if "add" in name else 4)
    sets = builder.sets(byte, spec.rotated == "all")
    xs = [builder.operands.take("bf16", rows, (2 if gated else 1) * dim) for _ in range(sets)]
    others = [builder.operands.take("bf16", rows, dim) for _ in range(0 if gated else sets)]
    weight = builder.activations.take("bf16", dim)
    scale = torch.ones(1, dtype=torch.float32, device=weight.device)
    for tensor in xs + others:
        torch._dynamo.mark_dynamic(tensor, 0)

    def run(i: int) -> Any:
        x = xs[i % sets]
        return function(x, scale) if gated else function(x, others[i % sets], weight, scale)

    return OperatorCall(run, sets, 0, byte)


def _compiled_function(builder: EngineBuilder, name: str) -> Callable[..., Any]:
    torch = builder.torch
    made: dict[str, Callable[..., Any]] = builder.memory.setdefault("compiled", {})
    if name in made:
        return made[name]
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = (
        False  # a model's hidden size is fixed; only tokens vary
    )

    def to_fp8(x: Any, scale: Any) -> Any:
        return (x.float() * scale.reciprocal()).clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn)

    def norm(x: Any, other: Any, weight: Any, scale: Any) -> Any:
        wide = x.float()
        if "add" in name:
            wide = wide + other.float()
        kept = wide.to(torch.bfloat16)
        normed = (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + _EPSILON)).to(
            torch.bfloat16
        ) * weight
        normed = to_fp8(normed, scale) if "quant" in name else normed
        return (normed, kept) if "add" in name else normed

    def gate(x: Any, scale: Any) -> Any:
        half = x.shape[-1] // 2
        gated = torch.nn.functional.silu(x[..., :half]) * x[..., half:]
        return to_fp8(gated, scale) if "quant" in name else gated

    made[name] = torch.compile(gate if name.startswith("silu") else norm, fullgraph=True)
    return made[name]


CALLS: dict[str, Callable[[EngineBuilder, OperatorSpec], OperatorCall]] = {
    "engine_attention": products.paged_attention,
    "engine_latent": products.latent_attention,
    "engine_scaled_mm": products.scaled_product,
    "engine_block_mm": products.block_product,
    "engine_weight_only": products.weight_only_product,
    "engine_experts": products.fused_experts,
    "engine_rms_norm": rms_norm,
    "engine_silu_and_mul": silu_and_mul,
    "engine_rotary": rotary,
    "engine_cache_write": cache_write,
    "engine_quantize": quantize,
    "engine_route": route,
    "engine_align": align,
    "engine_sampling": sampling,
    "engine_compiled": compiled,
}
