"""Operators of an inference engine: attention over paged caches, narrow products, fused experts,
and small fused kernels.

Each is one call as vLLM makes it. A measured row of ``database/*/engine`` is such an operator in
JSON, so field names here are the keys of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import (
    ceil,
    erfc,
    expm1,
)
from typing import ClassVar

from wattcast.core import Dtype, bad_value
from wattcast.workload.operator_base import (
    Operator,
    OperatorWork,
    register_operator,
)
from wattcast.workload.workload_coefficients import WORKLOADS

# Steps of at most so many tokens replay CUDA graphs, in which a sequence may be split.
GRAPH_TOKENS = WORKLOADS.graph_tokens
GRAPH_SPLITS = WORKLOADS.graph_splits
# Bits of a weight, without scales.
WEIGHT_BIT = {
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4.0,
    "fp4": 4.0,
}
# Bytes of scales for a weight, by what shares a scale.
_SCALE_BYTE = {
    "block": 4.0 / 128.0**2,
    "group": 2.0 / 128.0,
    "mx": 1.0 / 32.0,
    "nv": 1.0 / 16.0,
}
# Rows of queries that one sequence may bring, a row being one token of one head: attention is
# walked tile by tile, and so many rows are 8 million tiles. Ten million tokens of Llama 4 Scout's
# 40 heads fit.
_MOST_QUERY_ROWS = 1 << 29
# Values of a key head and of a value head in DeepSeek's prefill, where the latent is expanded.
_EXPANDED_DIMS = (192, 128)


@register_operator("engine_attention", family="attention")
class PagedAttention(Operator):
    """Attention of several sequences at once over a paged cache (FlashAttention 3).

    ``groups`` lists (sequences, new tokens of each, keys of each). A ``window`` of w lets a token
    see w keys. An fp8 cache is multiplied in fp8, with queries in fp8 and results in bf16.
    ``splits`` is the most parts a sequence may be cut into, 0 where the library chooses; ``bound``
    the longest sequence that a captured graph allows for."""

    is_product: ClassVar[bool] = True
    form_text: ClassVar[str] = "{op.kind} {op.kind_of_batch} over {op.kv_dtype}"
    form_words: ClassVar[Mapping[str, str]] = {"window": " in a window", "sink": " with a sink"}
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "page", "splits", "bound"})
    heads: int
    kv_heads: int
    head_dim: int
    groups: tuple[tuple[int, int, int], ...]
    kv_dtype: Dtype = Dtype.BF16
    window: int = 0
    window_kind: str = ""
    softcap: float = 0.0
    sink: bool = False
    page: int = 16
    scheduled: bool = True
    splits: int = 0
    bound: int = 1
    phase: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            expected = f"a divisor of heads={self.heads}"
            raise bad_value("engine_attention.kv_heads", expected, self.kv_heads)
        are_valid = all(count > 0 and 0 < q <= kv for count, q, kv in self.groups)
        if not self.groups or not are_valid:
            expected = "lists of sequences, new tokens and at least as many keys"
            raise bad_value("engine_attention.groups", expected, self.groups)
        query_rows = self.heads * max(q for _, q, _ in self.groups)
        if query_rows > _MOST_QUERY_ROWS:
            expected = (
                f"at most {_MOST_QUERY_ROWS} rows of queries in a sequence (heads x new tokens)"
            )
            raise bad_value("engine_attention.groups", expected, query_rows)

    @property
    def math_dtype(self) -> Dtype:
        return Dtype.FP8 if self.kv_dtype is Dtype.FP8 else self.dtype

    def __str__(self) -> str:
        batch = " + ".join(f"{count}x{q}of{kv}" for count, q, kv in self.groups)
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        return f"{self.name} {batch} {heads} {self.kv_dtype}"

    @cached_property
    def kind_of_batch(self) -> str:
        """``decode``: one new token each; ``prefill``: several each; ``mixed``: some of either."""
        decodes = [q == 1 for _, q, _ in self.groups]
        if all(decodes):
            return "decode"
        return "mixed" if any(decodes) else "prefill"

    @cached_property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(count * q for count, q, _ in self.groups)

    @cached_property
    def scores(self) -> float:
        """Scores of one head that the causal mask and the window keep."""
        return sum(count * _visible_scores(q, kv, self.window) for count, q, kv in self.groups)

    @cached_property
    def keys(self) -> float:
        """Keys that any token sees, over all sequences."""
        keys = 0
        for count, q, kv in self.groups:
            visible = min(kv, self.window + q - 1) if self.window else kv
            keys += count * visible
        return float(keys)

    @property
    def flop_dense(self) -> float:
        scores = sum(float(count) * q * kv for count, q, kv in self.groups)
        return 4.0 * scores * self.heads * self.head_dim

    @property
    def cache_byte(self) -> float:
        """Bytes of the keys and values that are read."""
        return 2.0 * self.keys * self.kv_heads * self.head_dim * self.kv_dtype.byte

    @cached_property
    def work(self) -> OperatorWork:
        queries = float(self.tokens) * self.heads * self.head_dim
        return OperatorWork(
            flop=4.0 * self.scores * self.heads * self.head_dim,
            read_byte=self.cache_byte + queries * self.math_dtype.byte,
            write_byte=queries * self.dtype.byte,
            sfu_op=self.scores * self.heads,
        )


def _visible_scores(
    q: int,
    kv: int,
    window: int,
) -> float:
    """Return the scores of q tokens that a causal mask and a window keep.

    The mask is aligned to the last key.
    """
    if not window or window >= kv:
        return q * (kv - 0.5 * (q - 1))
    first_keys = kv - q + 1  # keys that the first token may see
    full = q  # tokens whose window is full
    if first_keys < window:
        full = min(max(kv - window + 1, 0), q)
    partial = q - full
    return full * float(window) + partial * (first_keys + 0.5 * (partial - 1))


@register_operator("engine_latent", family="attention")
class LatentAttention(Operator):
    """Latent attention.

    In decode all heads read one cache of ``latent`` + ``rope`` values a token, once. In prefill
    keys and values are expanded: 192 values of a query or key head and 128 of a value head."""

    is_product: ClassVar[bool] = True
    form_text: ClassVar[str] = "{op.kind} {op.phase} by {op.kernel} over {op.kv_dtype}"
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "page"})
    batch: int
    heads: int
    q_len: int
    kv_len: int
    latent: int = 512
    rope: int = 64
    kernel: str = "fa3"
    kv_dtype: Dtype = Dtype.BF16
    page: int = 16
    phase: str = "decode"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_len > self.kv_len:
            expected = f"at least as many keys as new tokens ({self.q_len})"
            raise bad_value("engine_latent.kv_len", expected, self.kv_len)

    @property
    def math_dtype(self) -> Dtype:
        return Dtype.FP8 if self.kv_dtype is Dtype.FP8 else self.dtype

    @property
    def dims(self) -> tuple[int, int]:
        """Values of a key and of a value, as they are multiplied."""
        if self.phase == "decode":
            return self.latent + self.rope, self.latent
        return _EXPANDED_DIMS

    @property
    def scores(self) -> float:
        """Scores of one head."""
        return self.batch * _visible_scores(self.q_len, self.kv_len, 0)

    @property
    def cache_byte(self) -> float:
        """Bytes of the cache, read once; in prefill those of keys and values of all heads."""
        values = self.latent + self.rope  # of a token
        if self.phase != "decode":
            values = self.heads * sum(self.dims)
        return float(self.batch) * self.kv_len * values * self.kv_dtype.byte

    @cached_property
    def work(self) -> OperatorWork:
        key, value = self.dims
        queries = float(self.batch) * self.q_len * self.heads
        return OperatorWork(
            flop=2.0 * self.scores * self.heads * (key + value),
            read_byte=self.cache_byte + queries * key * self.math_dtype.byte,
            write_byte=queries * value * self.dtype.byte,
            sfu_op=self.scores * self.heads,
        )


@dataclass(frozen=True, eq=False, repr=False)
class NarrowProduct(Operator):
    """``out[m, n] = in[m, k] @ weight[n, k]ᵀ`` with weights narrower than the bf16 result.

    The subclasses say how.
    """

    is_product: ClassVar[bool] = True
    m: int
    n: int
    k: int
    kernel: str = field(default="", kw_only=True)

    @property
    def weight_byte(self) -> float:
        """Bytes of the weight and its scales."""
        return float(self.n) * self.k * self.dtype.byte

    @property
    def token_byte(self) -> float:
        """Bytes of one value of a token."""
        return self.dtype.byte

    @cached_property
    def work(self) -> OperatorWork:
        read = self.weight_byte + float(self.m) * self.k * self.token_byte
        return OperatorWork(2.0 * self.m * self.n * self.k, read, 2.0 * self.m * self.n)


@register_operator("engine_scaled_mm", family="gemm")
class ScaledProduct(NarrowProduct):
    """fp8 by fp8 (CUTLASS) with one scale a tensor, or one for each token and output channel."""

    form_text: ClassVar[str] = "{op.kind} with scales of a {op.scales}"
    scales: str = "token"
    kernel: str = field(default="cutlass", kw_only=True)


@register_operator("engine_block_mm", family="gemm")
class BlockProduct(NarrowProduct):
    """fp8 by fp8 with a scale for 128 values of a token and one for 128 by 128 weights.

    DeepGEMM or CUTLASS runs it. In ``dtype`` fp4 a scale is for 16 values of either.
    """

    form_text: ClassVar[str] = "{op.kind} by {op.kernel}"
    scales: str = "block"
    kernel: str = field(default="deepgemm", kw_only=True)
    bit: float = 8.0 + 32.0 / 128.0**2  # of a weight, with its share of a scale

    @property
    def weight_byte(self) -> float:
        return float(self.n) * self.k * self.bit / 8.0

    @property
    def token_byte(self) -> float:
        return min(self.bit, 8.0) / 8.0


@register_operator("engine_weight_only", family="gemm")
class WeightOnlyProduct(NarrowProduct):
    """bf16 tokens times int4, fp4 or fp8 weights that are widened on chip (Machete or Marlin).

    ``group`` weights of a column share a scale of two bytes; -1: the whole column does.
    """

    form_text: ClassVar[str] = "{op.kind} of {op.weights} by {op.kernel}"
    form_words: ClassVar[Mapping[str, str]] = {"zero_points": " with zero points"}
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "group"})
    allowed: ClassVar[Mapping[str, Mapping[str, float]]] = {"weights": WEIGHT_BIT}
    weights: str = "int4"
    group: int = 128
    zero_points: bool = False
    kernel: str = field(default="machete", kw_only=True)

    @property
    def weight_byte(self) -> float:
        scale = 2.0 if self.weights == "int4" else 1.0  # fp4: a byte for a group
        if self.zero_points:
            scale += 0.5
        byte = WEIGHT_BIT[self.weights] / 8.0
        if self.group > 0:
            byte += scale / self.group
        return float(self.n) * self.k * byte


# The chance that a token visits an expert falls as 1 / rank^exponent. "power" stands for the "power
# laws" of public tables: 0.55 gives the experts that get any token, as their times show.
RANK_EXPONENTS = {"skewed": WORKLOADS.skewed_exponent, "power": WORKLOADS.power_exponent}
# What a kernel of experts takes after its library's name where no autotuner chose its tactics.
UNTUNED = "untuned"
# Libraries other than vLLM's Triton kernels, and whether they were untuned.
EXPERT_LIBRARIES = ("marlin", "cutlass", "trtllm", "deepgemm", "oai", UNTUNED)
# vLLM's Triton kernels before 0.17, which chose tiles of 64 x 64 where none are tuned
SMALL_TILES = "triton_small"


@register_operator("engine_experts", family="gemm")
class FusedExperts(Operator):
    """The experts of a mixture layer behind the router: sort, two grouped products, gate and sum.

    ``routing``: ``even`` draws experts at random, ``skewed`` with a chance that falls as 1 / rank
    of the expert, ``power`` with one that falls more slowly, ``balanced`` gives all experts equally
    many tokens, ``same`` sends all tokens to the same ones. ``skew`` is the share of choices that
    fall on the same ``top_k`` experts, the rest being even. fp8 experts quantize their inputs
    themselves. ``kernel`` names the library; empty: the one vLLM takes on the chip. ``elsewhere``
    counts visits to experts of other GPUs, which vLLM's own kernels sum up as zeros, ``gpus`` the
    GPUs that share the experts, and ``all_tokens`` their tokens, by which tiles are chosen (0:
    ``tokens``). ``all_picks`` are the visits to experts of all GPUs, for which DeepGEMM has rows
    where vLLM may run it (0: where it does not)."""

    is_product: ClassVar[bool] = True
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "all_tokens", "gpus", "all_picks"})
    allowed: ClassVar[Mapping[str, Mapping[str, float]]] = {"weights": WEIGHT_BIT}
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    weights: str = "bf16"
    scales: str = "none"
    routing: str = "even"
    kernel: str = "triton"
    skew: float = 0.0
    elsewhere: int = 0
    all_tokens: int = 0
    gpus: int = 1
    all_picks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            raise bad_value("engine_experts.top_k", f"at most experts={self.experts}", self.top_k)

    @property
    def form(self) -> str:
        form = f"{self.kind} in {self.weights}"
        if self.scales == "none":
            return form
        return f"{form} with scales of a {self.scales}"

    @property
    def picks(self) -> int:
        """Visits of tokens to experts."""
        return self.tokens * self.top_k

    @cached_property
    def loads(self) -> tuple[tuple[float, float], ...]:
        """Groups of experts alike: how many, and the chance that a token visits one of them.

        Drawn without replacement with weights w, an expert is visited with about 1 - exp(-λ·w), λ
        such that the chances add up to ``top_k`` (Rosén's approximation of successive sampling).
        """
        share = self.top_k / self.experts
        if self.routing == "same" or self.skew >= 1.0:
            return ((float(self.top_k), 1.0),)
        if self.skew:
            even = (1.0 - self.skew) * share
            busy_experts = (float(self.top_k), self.skew + even)
            other_experts = (float(self.experts - self.top_k), even)
            return busy_experts, other_experts
        if self.routing not in RANK_EXPONENTS:
            return ((float(self.experts), share),)
        return tuple([(1.0, chance) for chance in self._solve_rank_chances()])

    def _solve_rank_chances(self) -> list[float]:
        """Return the chance of each expert where it falls with the expert's rank.

        The factor λ is doubled until the chances add up to too many, then bisected."""
        exponent = RANK_EXPONENTS[self.routing]
        low = 0.0
        high = _UNBOUNDED
        chances: list[float] = []
        for _ in range(_BISECTIONS):
            is_bounded = high < _LARGEST_FACTOR
            factor = 0.5 * (low + high) if is_bounded else max(2.0 * low, 1.0)
            ranks = range(1, self.experts + 1)
            chances = [-expm1(-factor * rank**-exponent) for rank in ranks]
            if sum(chances) < self.top_k:
                low = factor
            else:
                high = factor
        return chances

    @cached_property
    def active(self) -> float:
        """Experts that any token visits, as expected."""
        if self.routing == "balanced":
            return float(min(self.picks, self.experts))
        return sum(many * (1.0 - (1.0 - chance) ** self.tokens) for many, chance in self.loads)

    def count_blocks(self, block: int) -> float:
        """Return the expected number of blocks of ``block`` rows that hold the tokens of experts.

        It is Σ_j P(n > j·block). The first term is of the binomial n of tokens of an expert, the
        others of a normal one as wide."""
        if self.routing == "balanced":
            return self.active * ceil(self.picks / (self.active * block))
        blocks = 0.0
        for experts, chance in self.loads:
            mean = self.tokens * chance
            first = 1.0 - (1.0 - chance) ** self.tokens
            further = _expected_further_blocks(mean, mean * (1.0 - chance), block)
            blocks += experts * (first + further)
        return blocks

    @property
    def expert_byte(self) -> float:
        """Bytes of the weights of one expert, with scales of blocks or groups."""
        weight_byte = WEIGHT_BIT[self.weights] / 8.0 + _SCALE_BYTE.get(self.scales, 0.0)
        return 3.0 * self.hidden * self.intermediate * weight_byte

    @cached_property
    def work(self) -> OperatorWork:
        token_byte = 2.0 * self.tokens * self.hidden
        return OperatorWork(
            flop=6.0 * self.picks * self.hidden * self.intermediate,
            read_byte=self.active * self.expert_byte + token_byte,
            write_byte=token_byte,
        )


# Numerical guards of the loads of experts.
_UNBOUNDED = 1e9
_LARGEST_FACTOR = 1e8
_BISECTIONS = 60
_LEAST_VARIANCE = 1e-12
_CERTAIN = 4.0  # standard deviations beyond which nothing is expected


def _expected_further_blocks(
    mean: float,
    variance: float,
    block: int,
) -> float:
    """Return Σ_j P(n > j·block) over j from 1 of a normal n."""
    deviation = max(variance, _LEAST_VARIANCE) ** 0.5
    certain = max(int((mean - _CERTAIN * deviation - 0.5) / block), 0)
    uncertain = int(2.0 * _CERTAIN * deviation / block) + 2
    chances = 0.0
    for place in range(certain + 1, certain + uncertain + 1):
        excess = (place * block + 0.5 - mean) / (deviation * 2**0.5)
        chances += 0.5 * erfc(excess)
    return certain + chances
