"""List operator forms of published models, draw random ones, and count the work each does.

Sizes of models come from the ``config.json`` that each publisher ships with the checkpoint. A form
uses the field names that rows keep: ``groups`` of attention are [requests, query tokens, keys]."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Form = dict[str, Any]
Named = tuple[str, Form]

ROUTINGS = ("even", "skewed", "same")
GRAPH_TOKENS = (
    512  # vLLM captures batches up to this; their attention may split a sequence 32 times
)
GRAPH_SPLITS = 32
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# name: query heads, key heads, head size, window (0: none), softcap, one window for all layers,
# sink
ATTENTION: dict[str, tuple[int, int, int, int, float, bool, bool]] = {
    "llama-3-8b": (32, 8, 128, 0, 0.0, True, False),
    "llama-3-70b": (64, 8, 128, 0, 0.0, True, False),
    "llama-3-70b-tp8": (8, 1, 128, 0, 0.0, True, False),
    "llama-3.2-1b": (32, 8, 64, 0, 0.0, True, False),
    "llama-2-7b": (32, 32, 128, 0, 0.0, True, False),
    "qwen2.5-0.5b": (14, 2, 64, 0, 0.0, True, False),
    "qwen2.5-7b": (28, 4, 128, 0, 0.0, True, False),
    "qwen3-0.6b": (16, 8, 128, 0, 0.0, True, False),
    "qwen3-30b-a3b": (32, 4, 128, 0, 0.0, True, False),
    "qwen3-235b-a22b": (64, 4, 128, 0, 0.0, True, False),
    "mistral-7b-v0.1": (32, 8, 128, 4096, 0.0, True, False),
    "phi-3-mini": (32, 32, 96, 0, 0.0, True, False),
    "gemma-2-9b-local": (16, 8, 256, 4096, 50.0, False, False),
    "gemma-3-27b-local": (32, 16, 128, 1024, 0.0, False, False),
    "gemma-3-27b-global": (32, 16, 128, 0, 0.0, False, False),
    "gemma-3-4b-global": (8, 4, 256, 0, 0.0, False, False),
    "gpt-oss-120b-local": (64, 8, 64, 128, 0.0, False, True),
}
# name: (out, in) of the projections one layer has
LINEARS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "llama-3-70b-tp4": ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)),
    "qwen2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "gemma-3-27b": ((8192, 5376), (5376, 4096), (43008, 5376), (5376, 21504)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
}
BLOCK_LINEARS: dict[str, tuple[tuple[int, int], ...]] = {
    "deepseek-v3": ((24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)),
    "qwen3-8b-fp8": ((6144, 4096), (24576, 4096), (4096, 12288)),
}
# name: experts, experts a token, hidden size, intermediate size of one expert
EXPERTS: dict[str, tuple[int, int, int, int]] = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "mixtral-8x7b-tp4": (8, 2, 4096, 3584),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b-tp4": (128, 8, 4096, 384),
    "deepseek-v3-tp8": (256, 8, 7168, 256),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "olmoe-1b-7b": (64, 8, 2048, 1024),
    "llama-4-scout-tp4": (16, 1, 5120, 2048),
    "phi-3.5-moe": (16, 2, 4096, 6400),
    "qwen1.5-moe-a2.7b": (60, 4, 2048, 1408),
}
HIDDEN = {"llama-3-8b": (4096, 14336), "llama-3-70b": (8192, 28672), "qwen2.5-0.5b": (896, 4864)}
HIDDEN |= {"qwen3-30b-a3b": (2048, 768), "gemma-3-27b": (5376, 21504), "deepseek-v3": (7168, 18432)}
COMPILED = ("rms_norm", "add_rms_norm", "add_rms_norm_quant", "silu_and_mul", "silu_and_mul_quant")
VOCABULARIES = {"llama-3": 128256, "qwen2.5": 152064, "mistral": 32000, "gemma-3": 262144}


def attention_form(
    heads: int, kv_heads: int, head_dim: int, groups: list[list[int]], kv_dtype: str = "bf16", window: int = 0,
    softcap: float = 0.0, scheduled: bool = True, sink: bool = False,
) -> Form:  # fmt: skip
    """Paged FA3 as the engine calls it: splits and the bound on keys as in its captured graphs."""
    tokens = sum(count * q_len for count, q_len, _ in groups)
    longest = max(kv_len for _, _, kv_len in groups)
    decode = all(q_len == 1 for _, q_len, _ in groups)
    phase = (
        "decode" if decode else "mixed" if any(q_len == 1 for _, q_len, _ in groups) else "prefill"
    )
    bound = (
        2 ** math.ceil(math.log2(max(longest, 8192)))
        if decode and tokens <= GRAPH_TOKENS
        else longest
    )
    return {
        "op": "engine_attention", "phase": phase, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "groups": groups, "window": window, "window_kind": "window" if window else "", "softcap": softcap,
        "sink": sink, "page": 16, "scheduled": scheduled, "splits": GRAPH_SPLITS if tokens <= GRAPH_TOKENS else 0,
        "bound": bound, "dtype": "bf16", "kv_dtype": kv_dtype,
    }  # fmt: skip


def attention_shapes() -> list[Named]:
    """Decode, prefill, chunks with context and mixed batches of the models."""
    found = []
    decode = [
        (b, kv)
        for b in (1, 4, 16, 64, 128, 256)
        for kv in (128, 512, 1024, 2048, 4096, 8192, 32768)
    ]
    prefill = [(1, n) for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)]
    prefill += [(4, 512), (4, 2048), (16, 128), (16, 512), (64, 128), (64, 256)]
    chunks = [(1, 512, 4096), (1, 2048, 8192), (1, 2048, 32768), (2, 1024, 16384)]
    mixed = [
        ([32, 1, 1024], [1, 480, 480]),
        ([64, 1, 2048], [1, 1984, 1984]),
        ([255, 1, 1024], [1, 1793, 1793]),
    ]
    for place, (name, (heads, kv_heads, dim, window, cap, scheduled, sink)) in enumerate(
        ATTENTION.items()
    ):
        source = random.Random(f"{name} attention")
        batches = [[[b, 1, kv]] for b, kv in source.sample(decode, 12)]
        batches += [[[b, n, n]] for b, n in source.sample(prefill, 7)]
        batches += [[list(chunk)] for chunk in source.sample(chunks, 2)]
        batches += [[list(group) for group in pair] for pair in source.sample(mixed, 2)]
        for order, groups in enumerate(batches):
            kv_dtype = "fp8" if (place + order) % 3 == 0 and not sink and not cap else "bf16"
            form = attention_form(
                heads, kv_heads, dim, groups, kv_dtype, window, cap, scheduled, sink
            )
            found.append((name, form))
    return found


def draw_attention(source: random.Random) -> Form:
    """Random heads, lengths and batches; one in three of several lengths."""
    kv_heads = source.choice((1, 2, 4, 8, 8, 16))
    heads = kv_heads * source.choice((1, 2, 4, 5, 7, 8, 16))
    dim = source.choice((64, 96, 128, 128, 128, 192, 256))
    groups = []
    decode = source.random() < 0.55
    for _ in range(source.choice((1, 1, 2, 4))):
        batch = _log_uniform(source, 1, 192 if decode else 8)
        kv_len = _log_uniform(source, 32, 20000)
        q_len = (
            1
            if decode
            else min(kv_len, _log_uniform(source, 16, 8192))
            if source.random() < 0.6
            else kv_len
        )
        groups.append([batch, q_len, kv_len])
    window = source.choice((0, 0, 0, 512, 1024, 4096))
    kv_dtype = source.choice(("bf16", "bf16", "fp8"))
    return attention_form(
        heads, kv_heads, dim, groups, kv_dtype, window, scheduled=source.random() < 0.8
    )


def latent_form(
    phase: str, kernel: str, heads: int, batch: int, length: int, kv_dtype: str = "bf16"
) -> Form:
    """Latent attention of DeepSeek's sizes: 512 latent and 64 rotary values a key, or prefill of
    192 and 128.
    """
    return {
        "op": "engine_latent", "phase": phase, "kernel": kernel, "heads": heads, "batch": batch,
        "q_len": 1 if phase == "decode" else length, "kv_len": length, "latent": 512, "rope": 64,
        "page": 64 if kernel == "flashmla" else 16, "dtype": "bf16", "kv_dtype": kv_dtype,
    }  # fmt: skip


def latent_shapes() -> list[Named]:
    """DeepSeek-V3 with all heads and an eighth of them, and V2-Lite."""
    found = []
    for name, heads in (("deepseek-v3", 128), ("deepseek-v3-tp8", 16), ("deepseek-v2-lite", 16)):
        for batch in (1, 8, 32, 128):
            for length in (512, 2048, 8192, 32768):
                found.append((name, latent_form("decode", "fa3", heads, batch, length)))
                if batch in (8, 128):
                    found.append((name, latent_form("decode", "flashmla", heads, batch, length)))
                if batch in (1, 32):
                    found.append(
                        (name, latent_form("decode", "flashmla", heads, batch, length, "fp8"))
                    )
        for batch, length in ((1, 512), (1, 2048), (1, 8192), (8, 512)):
            found.append((name, latent_form("prefill", "fa3", heads, batch, length)))
    return found


def draw_latent(source: random.Random) -> Form:
    """Random batches and lengths."""
    kernel, kv_dtype = source.choice((("fa3", "bf16"), ("flashmla", "bf16"), ("flashmla", "fp8")))
    heads = source.choice((16, 32, 64, 128))
    return latent_form(
        "decode",
        kernel,
        heads,
        _log_uniform(source, 1, 160),
        _log_uniform(source, 64, 40000),
        kv_dtype,
    )


def linear_form(op: str, m: int, n: int, k: int, **more: Any) -> Form:
    """A product of ``m`` tokens with a weight of ``n`` rows and ``k`` columns."""
    return {"op": op, "m": m, "n": n, "k": k, "dtype": "bf16", **more}


def scaled_shapes() -> list[Named]:
    """fp8 projections of the models with one scale a tensor or one a token and channel."""
    sides = [(name, side) for name, all_ in LINEARS.items() for side in all_]
    return [
        (
            name,
            linear_form("engine_scaled_mm", m, n, k, kernel="cutlass", scales=scales, dtype="fp8"),
        )
        for order, (name, (n, k)) in enumerate(sides)
        for m in TOKENS
        for scales in (("tensor", "token") if (order + m.bit_length()) % 3 == 0 else ("token",))
    ]


def draw_scaled(source: random.Random) -> Form:
    """Random sizes, sides a multiple of 64."""
    scales = source.choice(("tensor", "token", "token"))
    m, n, k = _draw_sides(source, 64)
    return linear_form("engine_scaled_mm", m, n, k, kernel="cutlass", scales=scales, dtype="fp8")


def block_shapes() -> list[Named]:
    """fp8 projections with scales of blocks of 128: DeepGEMM, as vLLM takes on Hopper, and CUTLASS."""
    sides = [(name, side) for name, all_ in BLOCK_LINEARS.items() for side in all_]
    return [
        (name, linear_form("engine_block_mm", m, n, k, kernel=kernel, scales="block", dtype="fp8"))
        for name, (n, k) in sides
        for m in (8, 32, 64, 128, 512, 2048, 8192)
        for kernel in ("deepgemm", "cutlass")
    ]


def draw_block(source: random.Random) -> Form:
    """Random sizes for CUTLASS alone: DeepGEMM compiles a kernel for every weight shape."""
    m, n, k = _draw_sides(source, 128)
    return linear_form(
        "engine_block_mm", max(m // 4, 1) * 4, n, k, kernel="cutlass", scales="block", dtype="fp8"
    )


def weight_only_shapes() -> list[Named]:
    """int4 in groups of 128 (Machete, as vLLM takes on Hopper, and Marlin), with zero points, and
    fp8 by Marlin.
    """
    kinds = (
        {"kernel": "machete", "weights": "int4", "group": 128, "zero_points": False},
        {"kernel": "marlin", "weights": "int4", "group": 128, "zero_points": False},
        {"kernel": "marlin", "weights": "int4", "group": 128, "zero_points": True},
        {"kernel": "machete", "weights": "int4", "group": 128, "zero_points": True},
        {"kernel": "marlin", "weights": "fp8", "group": -1, "zero_points": False},
    )
    return [
        (name, linear_form("engine_weight_only", m, n, k, **kind))
        for name in ("llama-3-8b", "llama-3-70b-tp4", "qwen2.5-7b", "llama-3-70b")
        for n, k in LINEARS[name]
        for m in (1, 4, 16, 64, 256, 1024, 4096)
        for kind in kinds
    ]


def draw_weight_only(source: random.Random) -> Form:
    """Random sizes, sides a multiple of 256."""
    m, n, k = _draw_sides(source, 256)
    kernel, weights = source.choice((("machete", "int4"), ("marlin", "int4"), ("marlin", "fp8")))
    group = 128 if weights == "int4" else -1
    more = {"kernel": kernel, "weights": weights, "group": group, "zero_points": False}
    return linear_form("engine_weight_only", min(m, 4096), n, k, **more)


def experts_form(
    tokens: int, experts: int, top_k: int, hidden: int, intermediate: int, weights: str, scales: str,
    routing: str = "even",
) -> Form:  # fmt: skip
    """vLLM's Triton experts: sort, first product, gate, second product and sum, as one operator."""
    return {
        "op": "engine_experts", "tokens": tokens, "experts": experts, "top_k": top_k, "hidden": hidden,
        "intermediate": intermediate, "kernel": "triton", "weights": weights, "scales": scales,
        "routing": routing, "dtype": "fp8" if weights == "fp8" else "bf16",
    }  # fmt: skip


def experts_shapes() -> list[Named]:
    """Mixtures of the models in bf16, fp8 with a scale a tensor, and fp8 with scales of blocks."""
    found = []
    for place, (name, (experts, top_k, hidden, intermediate)) in enumerate(EXPERTS.items()):
        for order, tokens in enumerate((1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)):
            routing = "skewed" if (place + order) % 4 == 3 else "even"
            kinds = [("bf16", "none")]
            kinds += [("fp8", "tensor")] if (place + order) % 3 == 0 else []
            kinds += [("fp8", "block")] if (place + order) % 3 == 1 else []
            for weights, scales in kinds:
                form = experts_form(
                    tokens, experts, top_k, hidden, intermediate, weights, scales, routing
                )
                found.append((name, form))
    return found


def draw_experts(source: random.Random) -> Form:
    """Random mixtures of 8 to 256 experts."""
    experts = source.choice((8, 16, 32, 64, 128, 256))
    top_k = min(source.choice((1, 2, 4, 6, 8)), experts // 2)
    hidden = 256 * _log_uniform(source, 4, 24)
    intermediate = 128 * _log_uniform(source, 2, 48)
    weights, scales = source.choice((("bf16", "none"), ("fp8", "tensor"), ("fp8", "block")))
    routing = source.choice(("even", "even", "skewed"))
    tokens = _log_uniform(source, 1, 8192)
    return experts_form(tokens, experts, top_k, hidden, intermediate, weights, scales, routing)


def _draw_sides(source: random.Random, step: int) -> tuple[int, int, int]:
    sides = [step * _log_uniform(source, max(512 // step, 1), 24576 // step) for _ in "nk"]
    return _log_uniform(source, 1, 16384), sides[0], sides[1]


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(high))))


def rows_form(op: str, rows: int, dim: int, **more: Any) -> Form:
    """A small kernel over ``rows`` tokens of ``dim`` values."""
    return {"op": op, "rows": rows, "dim": dim, "dtype": "bf16", **more}


_ROWS = (1, 16, 64, 256, 1024, 4096, 8192)
_NORMS = [{"residual": r, "quant": q} for r in (False, True) for q in ("", "static", "token")]
_GATES = [{"quant": quant} for quant in ("", "static", "block")]
_QUANTS = [{"mode": mode} for mode in ("static", "tensor", "token", "block")]


def small_shapes(op: str, place: int, kinds: list[Form]) -> Callable[[], list[Named]]:
    """Shapes of a kernel over rows: hidden (``place`` 0) or intermediate sizes (1) of the models."""

    def make() -> list[Named]:
        return [
            (name, rows_form(op, rows, sizes[place], **kind))
            for name, sizes in HIDDEN.items()
            for rows in _ROWS
            for kind in kinds
            if sizes[place] % 128 == 0
        ]

    return make


def draw_small(op: str, kinds: list[Form]) -> Callable[[random.Random], Form]:
    """Random rows and sizes of such a kernel."""

    def draw(source: random.Random) -> Form:
        rows, dim = _log_uniform(source, 1, 16384), 128 * _log_uniform(source, 4, 160)
        return rows_form(op, rows, dim, **source.choice(kinds))

    return draw


def head_forms(op: str, rows: int, heads: int, kv_heads: int, head_dim: int) -> list[Form]:
    """Rotary in place, or writes of keys and values into the cache in both formats."""
    form = rows_form(
        op, rows, kv_heads * head_dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )
    return (
        [form] if op == "engine_rotary" else [form | {"kv_dtype": kind} for kind in ("bf16", "fp8")]
    )


def head_shapes(op: str) -> Callable[[], list[Named]]:
    """The models' heads."""

    def make() -> list[Named]:
        names = ("llama-3-8b", "llama-3-70b", "qwen2.5-0.5b", "gemma-3-4b-global", "qwen3-30b-a3b")
        forms = [
            (name, head_forms(op, rows, *ATTENTION[name][:3])) for name in names for rows in _ROWS
        ]
        return [(name, form) for name, several in forms for form in several]

    return make


def draw_heads(op: str) -> Callable[[random.Random], Form]:
    """Random heads."""

    def draw(source: random.Random) -> Form:
        kv_heads = source.choice((1, 2, 4, 8, 16, 32))
        heads = kv_heads * source.choice((1, 2, 4, 8))
        rows, dim = _log_uniform(source, 1, 16384), source.choice((64, 128, 256))
        return source.choice(head_forms(op, rows, heads, kv_heads, dim))

    return draw


def route_shapes(op: str) -> Callable[[], list[Named]]:
    """Top-k of router scores, or the sort of tokens by expert, for the models' experts."""

    def make() -> list[Named]:
        return [
            (
                name,
                route_form(
                    op,
                    rows,
                    experts,
                    top_k,
                    "grouped" if name.startswith("deepseek-v3") else "softmax",
                ),
            )
            for name, (experts, top_k, _, _) in EXPERTS.items()
            for rows in _ROWS
        ]

    return make


def route_form(op: str, rows: int, experts: int, top_k: int, mode: str) -> Form:
    """Routing of ``rows`` tokens; ``grouped`` is DeepSeek-V3's choice of groups first."""
    form = rows_form(op, rows, experts, experts=experts, top_k=top_k)
    return form | ({"mode": mode} if op == "engine_route" else {"block": 16 if rows <= 64 else 64})


def draw_route(op: str) -> Callable[[random.Random], Form]:
    """Random numbers of experts."""

    def draw(source: random.Random) -> Form:
        experts = source.choice((8, 16, 32, 64, 128, 256))
        return route_form(
            op, _log_uniform(source, 1, 16384), experts, source.choice((1, 2, 4, 8)), "softmax"
        )

    return draw


def sampling_shapes() -> list[Named]:
    """Greedy, random and top-p sampling over the models' vocabularies."""
    return [
        (name, rows_form("engine_sampling", rows, vocabulary, mode=mode))
        for name, vocabulary in VOCABULARIES.items()
        for rows in (1, 16, 64, 256)
        for mode in ("greedy", "random", "top_p")
        if rows * vocabulary <= 3.4e7
    ]


def compiled_shapes() -> list[Named]:
    """Kernels that torch.compile emits for norms and gates, which vLLM runs by default."""
    sizes = {name: (4096, 8192) if "norm" in name else (14336, 3584) for name in COMPILED}
    return [
        ("llama-3", rows_form("engine_compiled", rows, dim, function=name))
        for name in COMPILED
        for dim in sizes[name]
        for rows in (16, 64, 256, 1024, 4096, 8192)
    ]


CAPTURED = (
    1,
    4,
    8,
    16,
    24,
    32,
    40,
    48,
    56,
    64,
    72,
    80,
    96,
    112,
    128,
    136,
    160,
    192,
    224,
    256,
    320,
    384,
    448,
    512,
)
SERVED_LINEARS = ("llama-3-8b", "qwen3-32b", "qwen2.5-7b", "gemma-3-27b")
SERVED_HEADS = ((32, 8, 128), (28, 4, 128), (40, 8, 128), (64, 8, 128), (32, 4, 128))
LENGTH_SIGMA = 0.8  # of the logarithm of a context, as in the traffic of ``measure engine``


def served_shapes() -> list[Named]:
    """Products of steps as an engine captures them, in bf16 and fp8, and decode attention over
    uneven contexts.
    """
    source = random.Random("served")
    sides = [(name, side) for name in SERVED_LINEARS for side in LINEARS[name]]
    sides += [
        ("plan", (128 * _log_uniform(source, 8, 320), 128 * _log_uniform(source, 8, 224)))
        for _ in range(8)
    ]
    found: list[Named] = []
    scaled = {"kernel": "cutlass", "scales": "token", "dtype": "fp8"}
    for op, more in (("engine_scaled_mm", scaled), ("linear", {"bias": False})):
        for name, (n, k) in sides:
            found.extend(
                (name, linear_form(op, m, n, k, **more)) for m in source.sample(CAPTURED, 7)
            )
    for place in range(96):
        heads, kv_heads, dim = SERVED_HEADS[place % len(SERVED_HEADS)]
        batch, median = (
            source.choice((8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)),
            source.choice((300, 600, 1500)),
        )
        lengths = sorted(
            min(max(round(math.exp(source.gauss(math.log(median), LENGTH_SIGMA))), 16), 8000)
            for _ in range(batch)
        )
        count = (8, 8, batch, 1)[place % 4]  # groups of like lengths, all unlike, or all alike
        groups = [
            [len(part), 1, round(sum(part) / len(part))]
            for part in _split(lengths, min(count, batch))
        ]
        found.append(
            (
                "traffic",
                attention_form(heads, kv_heads, dim, groups, ("bf16", "bf16", "fp8")[place % 3]),
            )
        )
    return found


def decoded_shapes() -> list[Named]:
    """fp8 products of few tokens, and decode attention over even contexts in both cache formats."""
    scaled = {"kernel": "cutlass", "scales": "token", "dtype": "fp8"}
    found: list[Named] = [
        (name, linear_form("engine_scaled_mm", m, n, k, **scaled))
        for name, sides in LINEARS.items()
        for n, k in sides
        for m in (1, 8, 16, 32, 64)
    ]
    for heads, kv_heads, dim in SERVED_HEADS:
        for batch, length in (
            (1, 8192),
            (8, 1024),
            (8, 16384),
            (32, 2048),
            (64, 1024),
            (128, 1024),
        ):
            groups = [[batch, 1, length]]
            found.extend(
                ("steps", attention_form(heads, kv_heads, dim, groups, kv))
                for kv in ("fp8", "bf16")
            )
    return found


def _split(values: list[int], count: int) -> list[list[int]]:
    """Cut a list into ``count`` parts of nearly one size."""
    return [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]


def set_byte(operator: Form) -> float:
    """Bytes of one set of weights or caches."""
    width = (
        1.0
        if "fp8" in (operator["dtype"], operator.get("kv_dtype"), operator.get("weights"))
        else 2.0
    )
    match operator["op"]:
        case "engine_attention":
            keys = sum(count * (kv_len + 16) for count, _, kv_len in operator["groups"])
            return float(2.0 * keys * operator["kv_heads"] * operator["head_dim"] * width)
        case "engine_latent":
            per_key = 576.0 if operator["phase"] == "decode" else operator["heads"] * 320.0
            return float(operator["batch"] * operator["kv_len"] * per_key * width)
        case "engine_experts":
            sides = 3.0 * operator["hidden"] * operator["intermediate"]
            return float(operator["experts"] * sides * width)
        case "engine_scaled_mm" | "engine_block_mm" | "engine_weight_only" | "linear":
            return float(
                operator["n"]
                * operator["k"]
                * (0.53 if operator.get("weights") == "int4" else width)
            )
        case _:
            return 0.0


def operator_work(operator: Form) -> tuple[float, float]:
    """Arithmetic and bytes of one call, roughly; for planning alone."""
    o = operator
    match o["op"]:
        case "engine_attention":
            window = o["window"] or math.inf
            pairs, keys = 0.0, 0.0
            for count, q_len, kv_len in o["groups"]:
                pairs += count * q_len * min(kv_len - q_len / 2 + 0.5, window)
                keys += count * min(kv_len, window + q_len)
            width = 1 if o["kv_dtype"] == "fp8" else 2
            return 4.0 * pairs * o["heads"] * o["head_dim"], 2.0 * keys * o["kv_heads"] * o[
                "head_dim"
            ] * width
        case "engine_latent" if o["phase"] == "decode":
            return 2.0 * o["batch"] * o["heads"] * o["kv_len"] * 1088, set_byte(o)
        case "engine_latent":
            return 1.0 * o["batch"] * o["heads"] * o["kv_len"] ** 2 * 320, set_byte(o)
        case "engine_experts":
            active = min(o["experts"], o["tokens"] * o["top_k"])
            pairs = o["tokens"] * o["top_k"]
            flop = 6.0 * pairs * o["hidden"] * o["intermediate"]
            return flop, set_byte(o) * active / o["experts"] + 4.0 * pairs * (
                o["hidden"] + 3 * o["intermediate"]
            )
        case "engine_scaled_mm" | "engine_block_mm" | "engine_weight_only" | "linear":
            width = 1 if o["dtype"] == "fp8" else 2
            return 2.0 * o["m"] * o["n"] * o["k"], set_byte(o) + o["m"] * (
                o["k"] * width + 2.0 * o["n"]
            )
        case "engine_rotary":
            return 0.0, 4.0 * o["rows"] * (o["heads"] + o["kv_heads"]) * o["head_dim"]
        case _:
            return 0.0, 6.0 * o["rows"] * o["dim"] * (2 if o["op"] == "engine_sampling" else 1)


def activation_byte(operator: Form) -> float:
    """Bytes of the tokens a call reads, in the widest format it holds them in."""
    o = operator
    match o["op"]:
        case "engine_attention":
            tokens = sum(count * q_len for count, q_len, _ in o["groups"])
            return float(2.0 * tokens * o["heads"] * o["head_dim"])
        case "engine_latent":
            wide = 576.0 if o["phase"] == "decode" else 512.0
            return float(2.0 * o["batch"] * o["q_len"] * o["heads"] * wide)
        case "engine_experts":
            return float(2.0 * o["tokens"] * o["hidden"])
        case "engine_scaled_mm" | "engine_block_mm" | "engine_weight_only" | "linear":
            return float((1.0 if o["op"] == "engine_scaled_mm" else 2.0) * o["m"] * o["k"])
        case _:
            return operator_work(o)[1]


MODEL_SHAPES: dict[str, Callable[[], list[Named]]] = {
    "engine_attention": attention_shapes,
    "engine_latent": latent_shapes,
    "engine_scaled_mm": scaled_shapes,
    "engine_weight_only": weight_only_shapes,
    "engine_experts": experts_shapes,
    "engine_block_mm": block_shapes,
    "engine_rms_norm": small_shapes("engine_rms_norm", 0, _NORMS),
    "engine_silu_and_mul": small_shapes("engine_silu_and_mul", 1, _GATES),
    "engine_rotary": head_shapes("engine_rotary"),
    "engine_cache_write": head_shapes("engine_cache_write"),
    "engine_quantize": small_shapes("engine_quantize", 0, _QUANTS),
    "engine_route": route_shapes("engine_route"),
    "engine_align": route_shapes("engine_align"),
    "engine_sampling": sampling_shapes,
    "engine_compiled": compiled_shapes,
}
DRAW_SHAPE: dict[str, Callable[[random.Random], Form]] = {
    "engine_attention": draw_attention,
    "engine_latent": draw_latent,
    "engine_scaled_mm": draw_scaled,
    "engine_weight_only": draw_weight_only,
    "engine_experts": draw_experts,
    "engine_block_mm": draw_block,
    "engine_rms_norm": draw_small("engine_rms_norm", _NORMS),
    "engine_silu_and_mul": draw_small("engine_silu_and_mul", _GATES),
    "engine_rotary": draw_heads("engine_rotary"),
    "engine_cache_write": draw_heads("engine_cache_write"),
    "engine_quantize": draw_small("engine_quantize", _QUANTS),
    "engine_route": draw_route("engine_route"),
    "engine_align": draw_route("engine_align"),
    "engine_sampling": draw_small(
        "engine_sampling", [{"mode": mode} for mode in ("greedy", "random")]
    ),
}


def route_tokens(tokens: int, experts: int, top_k: int, routing: str) -> npt.NDArray[np.int32]:
    """Experts of each token, (tokens, top_k); the same numbers on every machine.

    ``even`` draws uniformly, ``skewed`` with a probability that falls as 1 / rank of the expert,
    ``same`` sends all tokens to the same experts."""
    source = np.random.default_rng([tokens, experts, top_k, ROUTINGS.index(routing)])
    if routing == "same":
        return np.tile(source.permutation(experts)[:top_k].astype(np.int32), (tokens, 1))
    score = source.gumbel(size=(tokens, experts)).astype(np.float32)
    if routing == "skewed":
        score -= np.log(1.0 + source.permutation(experts)).astype(np.float32)
    return np.argpartition(-score, top_k - 1, axis=1)[:, :top_k].astype(np.int32)
