"""Call vLLM's matrix products, experts and attention as its layers call them.

Products and experts run by CUTLASS, DeepGEMM, Machete, Marlin and Triton; attention by
FlashAttention 3 over paged caches and by FlashMLA."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_shapes import route_tokens
from wattcast.core.errors import BadInput
from wattcast.lab.campaigns.kernel_plan import OperatorSpec
from wattcast.lab.campaigns.operator_calls import (
    L2_TIMES,
    CallBuilder,
    OperandPools,
    OperatorCall,
    torch_dtype,
)

_BLOCK = 128
_FP8_BIAS = (
    2.0**120
)  # Marlin's fp8 scales carry the difference between the exponents of fp8 and bf16


BIT_WORDS = 2 * 10**8  # 32-bit words of random bits, for packed weights


@dataclass(frozen=True)
class EngineBuilder(CallBuilder):
    """Builds calls of vLLM's kernels. ``operands`` holds weights and caches, ``activations``
    everything else.

    The two are apart so that weights can be drawn anew while activations stay. Importing vLLM
    happens inside the functions that call it, so that the plan can be read where it is not
    installed."""

    activations: OperandPools
    sm_count: int
    memory: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Start over in all pools; views handed out before may share memory with later ones."""
        self.operands.reset()
        self.activations.reset()
        self.memory["next_bit"] = 0

    def integers(self, values: np.ndarray, dtype: str = "int32") -> Any:
        """Numbers on the device."""
        return self.torch.from_numpy(np.ascontiguousarray(values)).to(
            device=self.operands.device, dtype=getattr(self.torch, dtype)
        )

    def bits(self, *shape: int) -> Any:
        """Random 32-bit words; packed weights are nothing else."""
        if "bits" not in self.memory:
            low, high = -(2**31), 2**31 - 1
            self.memory["bits"] = self.torch.randint(
                low, high, (BIT_WORDS,), dtype=self.torch.int32, device=self.operands.device
            )
        size = int(np.prod(shape))
        start = self.memory["next_bit"]
        if (
            start + size > BIT_WORDS
        ):  # weights may share words: no kernel sees the difference, the L2 does
            start = 0
        self.memory["next_bit"] = -(-(start + size) // 128) * 128
        return self.memory["bits"][start : start + size].view(shape)

    def scratch(self, dtype: str, *shape: int) -> Any:
        """Activations that a kernel may overwrite."""
        return self.activations.take(dtype, *shape).clone()


def scaled_product(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """``cutlass_scaled_mm`` with one scale a tensor, or one a token and one an output channel."""
    from vllm import _custom_ops as ops

    torch, o = builder.torch, spec.operator
    m, n, k = o["m"], o["n"], o["k"]
    sets = builder.sets(n * k, True)
    x = builder.activations.take("fp8", m, k)
    weights = [builder.operands.take("fp8", n, k).t() for _ in range(sets)]
    tensor = o["scales"] == "tensor"
    scale_a = torch.ones((1,) if tensor else (m, 1), dtype=torch.float32, device=x.device)
    scale_b = torch.ones((1,) if tensor else (n, 1), dtype=torch.float32, device=x.device)

    def run(i: int) -> Any:
        return ops.cutlass_scaled_mm(x, weights[i % sets], scale_a, scale_b, torch.bfloat16)

    return OperatorCall(run, sets, m * k + 2 * m * n, n * k)


def block_product(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """fp8 with a scale for 128 values of a token and one for 128 x 128 weights, by DeepGEMM or
    CUTLASS.
    """
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    torch, o = builder.torch, spec.operator
    m, n, k = o["m"], o["n"], o["k"]
    deep = o["kernel"] == "deepgemm"
    sets = builder.sets(n * k, True)
    x, scale_a = per_token_group_quant_fp8(
        builder.activations.take("bf16", m, k),
        _BLOCK,
        column_major_scales=True,
        tma_aligned_scales=deep,
        use_ue8m0=deep,
    )
    weights = [builder.operands.take("fp8", n, k) for _ in range(sets)]
    scale_b = torch.ones(-(-n // _BLOCK), -(-k // _BLOCK), dtype=torch.float32, device=x.device)
    byte = m * k + 2 * m * n, n * k
    if deep:
        from vllm.utils.deep_gemm import fp8_gemm_nt

        out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)

        def run_deep(i: int) -> Any:
            fp8_gemm_nt(
                (x, scale_a), (weights[i % sets], scale_b), out, is_deep_gemm_e8m0_used=True
            )

        return OperatorCall(run_deep, sets, *byte)
    from vllm import _custom_ops as ops

    def run(i: int) -> Any:
        return ops.cutlass_scaled_mm(x, weights[i % sets].t(), scale_a, scale_b.t(), torch.bfloat16)

    return OperatorCall(run, sets, *byte)


def weight_only_product(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """bf16 tokens times int4 or fp8 weights, by Machete (vLLM's choice on Hopper for int4) or
    Marlin.

    Packed weights are random bits: repacking would only permute them.
    """
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    torch, o = builder.torch, spec.operator
    m, n, k, group, zero_points = o["m"], o["n"], o["k"], o["group"], o["zero_points"]
    fp8 = o["weights"] == "fp8"
    if fp8 and o["kernel"] != "marlin":
        raise BadInput(f"weight-only fp8 runs by Marlin, not by {o['kernel']}.")
    weight_byte = n * k if fp8 else n * k // 2
    sets = builder.sets(weight_byte, True)
    x = builder.activations.take("bf16", m, k)
    groups = 1 if group < 0 else k // group
    scales = torch.full((groups, n), 0.01, dtype=torch.bfloat16, device=x.device)
    byte = 2 * (m * k + m * n), weight_byte + 2 * groups * n
    kind = scalar_types.uint4 if zero_points else scalar_types.uint4b8
    if o["kernel"] == "machete":
        packed = [
            ops.machete_prepack_B(builder.bits(n, k // 8).t(), torch.bfloat16, kind, torch.bfloat16)
            for _ in range(sets)
        ]
        zeros = -8.0 * scales if zero_points else None

        def run_machete(i: int) -> Any:
            return ops.machete_mm(
                a=x,
                b_q=packed[i % sets],
                b_type=kind,
                b_group_zeros=zeros,
                b_group_scales=scales,
                b_group_size=group,
            )

        return OperatorCall(run_machete, sets, *byte)
    workspace = torch.zeros(builder.sm_count, dtype=torch.int32, device=x.device)
    if fp8:
        kind, scales = scalar_types.float8_e4m3fn, scales * _FP8_BIAS
        held = [
            builder.operands.take("fp8", k // 16, n * 16).view(torch.int32) for _ in range(sets)
        ]
    else:
        held = [builder.bits(k // 16, n * 2) for _ in range(sets)]
    packed_zeros = builder.bits(groups, n // 8) if zero_points else None

    def run(i: int) -> Any:
        return ops.marlin_gemm(
            a=x,
            c=None,
            b_q_weight=held[i % sets],
            b_bias=None,
            b_scales=scales,
            a_scales=None,
            global_scale=None,
            b_zeros=packed_zeros,
            g_idx=None,
            perm=None,
            workspace=workspace,
            b_q_type=kind,
            size_m=m,
            size_n=n,
            size_k=k,
            is_k_full=True,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
        )

    return OperatorCall(run, sets, *byte)


def fused_experts(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """vLLM's ``fused_experts`` with the tile sizes its tables give for this GPU; routing is given.

    Copies walk through weight sets and, where few experts are chosen, through other experts, so
    that weights come from DRAM as in a model whose every layer has its own. Tokens are scaled so
    that the gate sees values of order one, unless the weights are tiny."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts as run_experts

    torch, o = builder.torch, spec.operator
    tokens, experts, top_k, hidden, inner = (
        o[name] for name in ("tokens", "experts", "top_k", "hidden", "intermediate")
    )
    dtype = o["weights"]
    width = 1 if dtype == "fp8" else 2
    set_byte = 3 * experts * hidden * inner * width
    ids = route_tokens(tokens, experts, top_k, o["routing"])
    active = len(np.unique(ids))
    touched = active * set_byte // experts
    weight_sets = builder.sets(touched if 2 * active > experts else set_byte, True)
    turns = list_expert_turns(ids, experts, weight_sets * set_byte / experts, builder.l2_byte)
    routed = [builder.integers((ids + turn) % experts) for turn in turns]
    scale = 1.0 if builder.operands.pattern == "tiny" else hidden**-0.5
    x = builder.activations.take("bf16", tokens, hidden) * scale
    shares = torch.full((tokens, top_k), 1.0 / top_k, dtype=torch.float32, device=x.device)
    weights = [
        (
            builder.operands.take(dtype, experts, 2 * inner, hidden),
            builder.operands.take(dtype, experts, hidden, inner),
        )
        for _ in range(weight_sets)
    ]
    quant = None
    if dtype == "fp8":
        block = o["scales"] == "block"

        def ones(rows: int, columns: int) -> Any:
            shape = (experts, -(-rows // _BLOCK), -(-columns // _BLOCK)) if block else (experts,)
            return torch.ones(shape, dtype=torch.float32, device=x.device)

        quant = fp8_w8a8_moe_quant_config(
            w1_scale=ones(2 * inner, hidden),
            w2_scale=ones(hidden, inner),
            block_shape=[_BLOCK, _BLOCK] if block else None,
        )
    sets = weight_sets * len(turns)

    def run(i: int) -> Any:
        w1, w2 = weights[i % weight_sets]
        return run_experts(
            x, w1, w2, shares, routed[i // weight_sets % len(routed)], quant_config=quant
        )

    return OperatorCall(run, sets, 4 * tokens * hidden, touched)


def list_expert_turns(
    ids: np.ndarray, experts: int, expert_byte: float, l2_byte: float
) -> list[int]:
    """List how far to turn the experts' numbers from copy to copy so that the weights pass three
    times the L2.

    ``expert_byte`` is what one expert holds in all weight sets together.
    """
    active = len(np.unique(ids))
    wanted = math.ceil(L2_TIMES * l2_byte / max(active * expert_byte, 1.0))
    count = max(1, min(wanted, experts // active))
    return [turn * (experts // count) for turn in range(count)]


def paged_attention(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """``flash_attn_varlen_func`` of FlashAttention 3 as ``FlashAttentionImpl.forward`` calls it.

    The scheduler's metadata are computed once and used by all copies, as all layers of a step use
    them. The pages of a request lie in random order. An fp8 cache takes fp8 queries and gives bf16
    results."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    torch, o = builder.torch, spec.operator
    heads, kv_heads, dim, page = o["heads"], o["kv_heads"], o["head_dim"], o["page"]
    q_lens = [q_len for count, q_len, _ in o["groups"] for _ in range(count)]
    kv_lens = [kv_len for count, _, kv_len in o["groups"] for _ in range(count)]
    batch, tokens = len(q_lens), sum(q_lens)
    table, blocks = make_page_table(builder, kv_lens, page)
    cu_q = builder.integers(np.concatenate([[0], np.cumsum(q_lens)]))
    seqused = builder.integers(np.array(kv_lens))
    cache_byte = 2 * blocks * page * kv_heads * dim * torch_dtype(torch, o["kv_dtype"]).itemsize
    sets = builder.sets(cache_byte, spec.rotated == "all")
    caches = [
        builder.operands.take(o["kv_dtype"], blocks, 2, page, kv_heads, dim).unbind(1)
        for _ in range(sets)
    ]
    q = builder.activations.take(o["kv_dtype"], tokens, heads, dim)
    out = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=q.device)
    descale = torch.ones(1, dtype=torch.float32, device=q.device).expand(batch, kv_heads)
    window = (o["window"] - 1, 0) if o["window"] else (-1, -1)
    metadata = None
    if o["scheduled"]:
        metadata = get_scheduler_metadata(
            batch_size=batch,
            max_seqlen_q=max(q_lens),
            max_seqlen_k=max(kv_lens),
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            headdim=dim,
            cache_seqlens=seqused,
            qkv_dtype=torch_dtype(torch, o["kv_dtype"]),
            cu_seqlens_q=cu_q,
            page_size=page,
            causal=True,
            window_size=window,
            num_splits=o["splits"],
        )
    options: dict[str, Any] = {
        "out": out,
        "cu_seqlens_q": cu_q,
        "max_seqlen_q": max(q_lens),
        "seqused_k": seqused,
        "max_seqlen_k": o["bound"],
        "softmax_scale": dim**-0.5,
        "causal": True,
        "window_size": list(window),
        "block_table": table,
        "softcap": o["softcap"],
        "scheduler_metadata": metadata,
        "fa_version": 3,
        "q_descale": descale,
        "k_descale": descale,
        "v_descale": descale,
        "num_splits": o["splits"],
        "s_aux": builder.activations.take("bf16", heads) if o["sink"] else None,
    }

    def run(i: int) -> Any:
        k, v = caches[i % sets]
        return flash_attn_varlen_func(q=q, k=k, v=v, **options)

    return OperatorCall(run, sets, tokens * heads * dim * (q.element_size() + 2), cache_byte)


def latent_attention(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    """Latent attention: prefill and decode by FA3 (vLLM's choice on Hopper for bf16), decode by
    FlashMLA.
    """
    if spec.operator["phase"] == "prefill":
        return _latent_prefill(builder, spec)
    if spec.operator["kernel"] == "flashmla":
        return _flash_mla(builder, spec)
    return _latent_decode(builder, spec)


def _latent_decode(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    torch, o = builder.torch, spec.operator
    batch, heads, latent, rope, page = o["batch"], o["heads"], o["latent"], o["rope"], o["page"]
    kv_lens = [o["kv_len"]] * batch
    table, _ = make_page_table(builder, kv_lens, page)
    caches, sets, cache_byte = _latent_caches(builder, spec)
    cu_q = builder.integers(np.arange(batch + 1))
    seqused = builder.integers(np.array(kv_lens))
    splits = 32 if batch <= 512 else 0
    metadata = get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=1,
        max_seqlen_k=o["kv_len"],
        num_heads_q=heads,
        num_heads_kv=1,
        headdim=rope,
        cache_seqlens=seqused,
        qkv_dtype=torch.bfloat16,
        headdim_v=latent,
        page_size=page,
        cu_seqlens_q=cu_q,
        causal=True,
        num_splits=splits,
    )
    q = builder.activations.take("bf16", batch, heads, latent + rope)
    q_latent, q_rope = q.split([latent, rope], dim=-1)
    options: dict[str, Any] = {
        "q": q_rope,
        "q_v": q_latent,
        "max_seqlen_q": 1,
        "cu_seqlens_q": cu_q,
        "max_seqlen_k": max(o["kv_len"], 8192),
        "seqused_k": seqused,
        "block_table": table,
        "softmax_scale": (latent + rope) ** -0.5,
        "causal": True,
        "fa_version": 3,
        "scheduler_metadata": metadata,
        "num_splits": splits,
    }

    def run(i: int) -> Any:
        cache = caches[i % sets]
        return flash_attn_varlen_func(
            k=cache[..., latent:].unsqueeze(-2), v=cache[..., :latent].unsqueeze(-2), **options
        )

    return OperatorCall(run, sets, batch * heads * (2 * latent + rope) * 2, cache_byte)


def _flash_mla(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    from vllm.v1.attention.ops.flashmla import (
        flash_mla_with_kvcache,
        flash_mla_with_kvcache_fp8,
        get_mla_metadata,
        get_mla_metadata_dense_fp8,
    )

    torch, o = builder.torch, spec.operator
    batch, heads, latent, rope = o["batch"], o["heads"], o["latent"], o["rope"]
    table, _ = make_page_table(builder, [o["kv_len"]] * batch, o["page"])
    caches, sets, cache_byte = _latent_caches(builder, spec)
    seqused = builder.integers(np.full(batch, o["kv_len"]))
    q = builder.activations.take(o["kv_dtype"], batch, 1, heads, latent + rope)
    fixed = batch * heads * ((latent + rope) * q.element_size() + 2 * latent)
    options: dict[str, Any] = {
        "q": q,
        "block_table": table,
        "cache_seqlens": seqused,
        "head_dim_v": latent,
        "softmax_scale": (latent + rope) ** -0.5,
        "causal": True,
    }
    if o["kv_dtype"] == "fp8":
        tiles, splits = get_mla_metadata_dense_fp8(seqused, heads, 1)
        one = torch.ones(1, dtype=torch.float32, device=q.device)
        options |= {
            "tile_scheduler_metadata": tiles,
            "num_splits": splits,
            "descale_q": one,
            "descale_k": one,
        }
        return OperatorCall(
            lambda i: flash_mla_with_kvcache_fp8(k_cache=caches[i % sets].unsqueeze(-2), **options),
            sets,
            fixed,
            cache_byte,
        )
    schedule, _ = get_mla_metadata()
    options |= {"tile_scheduler_metadata": schedule, "is_fp8_kvcache": False}
    return OperatorCall(
        lambda i: flash_mla_with_kvcache(k_cache=caches[i % sets].unsqueeze(-2), **options),
        sets,
        fixed,
        cache_byte,
    )


def _latent_prefill(builder: EngineBuilder, spec: OperatorSpec) -> OperatorCall:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    o = spec.operator
    batch, heads, length = o["batch"], o["heads"], o["q_len"]
    tokens = batch * length
    q, k = (builder.activations.take("bf16", tokens, heads, 192) for _ in "qk")
    v = builder.activations.take("bf16", tokens, heads, 128)
    cu = builder.integers(length * np.arange(batch + 1))

    def run(i: int) -> Any:
        return flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            max_seqlen_q=length,
            max_seqlen_k=length,
            softmax_scale=192**-0.5,
            causal=True,
            fa_version=3,
        )

    return OperatorCall(run, 1, tokens * heads * (192 + 192 + 128 + 128) * 2, 0)


def _latent_caches(builder: EngineBuilder, spec: OperatorSpec) -> tuple[list[Any], int, int]:
    """Caches of (pages, page, 576), how many of them, and the bytes of one."""
    o = spec.operator
    width, blocks = o["latent"] + o["rope"], o["batch"] * -(-o["kv_len"] // o["page"])
    byte = blocks * o["page"] * width * torch_dtype(builder.torch, o["kv_dtype"]).itemsize
    sets = builder.sets(byte, spec.rotated == "all")
    return (
        [builder.operands.take(o["kv_dtype"], blocks, o["page"], width) for _ in range(sets)],
        sets,
        byte,
    )


def make_page_table(builder: EngineBuilder, kv_lens: list[int], page: int) -> tuple[Any, int]:
    """Return the pages of each request in random order, (requests, pages), and how many pages there
    are.
    """
    table, blocks = shuffle_pages(kv_lens, page)
    return builder.integers(table), blocks


def shuffle_pages(kv_lens: list[int], page: int) -> tuple[np.ndarray, int]:
    """Draw a block table over as many pages as the requests need; unused places point at page 0."""
    counts = [-(-kv_len // page) for kv_len in kv_lens]
    order = np.random.default_rng(7).permutation(sum(counts)).astype(np.int32)
    table = np.zeros((len(kv_lens), max(counts)), np.int32)
    start = 0
    for request, count in enumerate(counts):
        table[request, :count] = order[start : start + count]
        start += count
    return table, start
