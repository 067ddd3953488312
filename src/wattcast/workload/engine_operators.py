"""Operators of an inference engine: attention over paged caches, narrow products, fused experts,
small fused kernels.

Each is one call as vLLM makes it. A measured row of ``database/*/engine`` is such an operator in
JSON, so field names here are the keys of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, erfc, expm1
from typing import ClassVar

from wattcast.core import Dtype, bad_value
from wattcast.workload.operator_base import Operator, OperatorWork, register_operator

GRAPH_TOKENS = (
    512  # steps of at most so many tokens replay CUDA graphs, in which a sequence may be split
)
GRAPH_SPLITS = 32
WEIGHT_BIT = {
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4.0,
    "fp4": 4.0,
}  # without scales


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
            raise bad_value(
                "engine_attention.kv_heads", f"a divisor of heads={self.heads}", self.kv_heads
            )
        if not self.groups or any(not (count > 0 and 0 < q <= kv) for count, q, kv in self.groups):
            wanted = "lists of sequences, new tokens and at least as many keys"
            raise bad_value("engine_attention.groups", wanted, self.groups)

    @property
    def math_dtype(self) -> Dtype:
        return Dtype.FP8 if self.kv_dtype is Dtype.FP8 else self.dtype

    def __str__(self) -> str:
        batch = " + ".join(f"{count}x{q}of{kv}" for count, q, kv in self.groups)
        return f"{self.name} {batch} {self.heads}/{self.kv_heads}x{self.head_dim} {self.kv_dtype}"

    @cached_property
    def kind_of_batch(self) -> str:
        """``decode``: one new token each; ``prefill``: several each; ``mixed``: some of either."""
        single = [q == 1 for _, q, _ in self.groups]
        return "decode" if all(single) else "mixed" if any(single) else "prefill"

    @cached_property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(count * q for count, q, _ in self.groups)

    @cached_property
    def scores(self) -> float:
        """Scores of one head that the causal mask and the window keep."""
        return sum(count * _kept_scores(q, kv, self.window) for count, q, kv in self.groups)

    @cached_property
    def keys(self) -> float:
        """Keys that any token sees, over all sequences."""
        seen = (
            (count, min(kv, self.window + q - 1) if self.window else kv)
            for count, q, kv in self.groups
        )
        return float(sum(count * keys for count, keys in seen))

    @property
    def flop_dense(self) -> float:
        return (
            4.0
            * sum(float(count) * q * kv for count, q, kv in self.groups)
            * self.heads
            * self.head_dim
        )

    @property
    def cache_byte(self) -> float:
        """Bytes of the keys and values that are read."""
        return 2.0 * self.keys * self.kv_heads * self.head_dim * self.kv_dtype.byte

    @cached_property
    def work(self) -> OperatorWork:
        queries = float(self.tokens) * self.heads * self.head_dim
        read = self.cache_byte + queries * self.math_dtype.byte
        write = queries * self.dtype.byte
        return OperatorWork(
            4.0 * self.scores * self.heads * self.head_dim, read, write, self.scores * self.heads
        )


def _kept_scores(q: int, kv: int, window: int) -> float:
    """Return the scores that a causal mask aligned to the last key, and a window, keep of q tokens."""
    if not window or window >= kv:
        return q * (kv - 0.5 * (q - 1))
    first = kv - q + 1  # keys that the first token may see
    full = min(max(kv - window + 1, 0), q) if first < window else q  # tokens whose window is full
    rest = q - full
    return full * float(window) + rest * (first + 0.5 * (rest - 1))


@register_operator("engine_latent", family="attention")
class LatentAttention(Operator):
    """Latent attention. In decode all heads read one cache of ``latent`` + ``rope`` values a token,
    once.

    In prefill keys and values are expanded: 192 values of a query or key head and 128 of a value
    head."""

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
            wanted = f"at least as many keys as new tokens ({self.q_len})"
            raise bad_value("engine_latent.kv_len", wanted, self.kv_len)

    @property
    def math_dtype(self) -> Dtype:
        return Dtype.FP8 if self.kv_dtype is Dtype.FP8 else self.dtype

    @property
    def dims(self) -> tuple[int, int]:
        """Values of a key and of a value, as they are multiplied."""
        return (self.latent + self.rope, self.latent) if self.phase == "decode" else (192, 128)

    @property
    def scores(self) -> float:
        """Scores of one head."""
        return self.batch * _kept_scores(self.q_len, self.kv_len, 0)

    @property
    def cache_byte(self) -> float:
        """Bytes of the cache, read once; in prefill those of keys and values of all heads."""
        each = self.latent + self.rope if self.phase == "decode" else self.heads * sum(self.dims)
        return float(self.batch) * self.kv_len * each * self.kv_dtype.byte

    @cached_property
    def work(self) -> OperatorWork:
        (key, value), queries = self.dims, float(self.batch) * self.q_len * self.heads
        read = self.cache_byte + queries * key * self.math_dtype.byte
        write = queries * value * self.dtype.byte
        return OperatorWork(
            2.0 * self.scores * self.heads * (key + value), read, write, self.scores * self.heads
        )


@dataclass(frozen=True)
class NarrowProduct(Operator):
    """``out[m, n] = in[m, k] @ weight[n, k]ᵀ`` with weights narrower than the bf16 result; see the
    subclasses.
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
    """fp8 by fp8 (CUTLASS) with one scale for a tensor, or one for each token and output channel."""

    form_text: ClassVar[str] = "{op.kind} with scales of a {op.scales}"
    scales: str = "token"
    kernel: str = field(default="cutlass", kw_only=True)


@register_operator("engine_block_mm", family="gemm")
class BlockProduct(NarrowProduct):
    """fp8 by fp8 with a scale for 128 values of a token and one for 128 by 128 weights (DeepGEMM or
    CUTLASS).

    In ``dtype`` fp4 a scale is for 16 values of either.
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
        scale += 0.5 * self.zero_points
        each = WEIGHT_BIT[self.weights] / 8.0 + (scale / self.group if self.group > 0 else 0.0)
        return float(self.n) * self.k * each


# The chance that a token visits an expert falls as 1 / rank^exponent. "power" stands for the "power
# laws" of public tables: 0.55 gives the experts that get any token, as their times show.
RANK_EXPONENTS = {"skewed": 1.0, "power": 0.55}
EXPERT_LIBRARIES = (
    "marlin",
    "cutlass",
    "trtllm",
    "deepgemm",
    "oai",
)  # besides vLLM's own Triton kernels
SMALL_TILES = (
    "triton_small"  # vLLM's own before 0.17, which chose tiles of 64 x 64 where none are tuned
)


@register_operator("engine_experts", family="gemm")
class FusedExperts(Operator):
    """The experts of a mixture layer behind the router: sort, two grouped products, gate and sum
    (Triton).

    ``routing``: ``even`` draws experts at random, ``skewed`` with a chance that falls as 1 / rank
    of the expert, ``power`` with one that falls more slowly, ``balanced`` gives all experts equally
    many tokens, ``same`` sends all tokens to the same ones. ``skew`` is the share of choices that
    fall on the same ``top_k`` experts, the rest being even. fp8 experts quantize their inputs
    themselves. ``kernel`` names the library; empty: the one vLLM takes on the chip. ``elsewhere``
    counts visits to experts of other GPUs, which vLLM's own kernels sum up as zeros, ``gpus`` the
    GPUs that share the experts, and ``all_tokens`` their tokens, by which tiles are chosen (0:
    ``tokens``)."""

    is_product: ClassVar[bool] = True
    hidden_sizes: ClassVar[frozenset[str]] = frozenset({"count", "all_tokens", "gpus"})
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            raise bad_value("engine_experts.top_k", f"at most experts={self.experts}", self.top_k)

    @property
    def form(self) -> str:
        scales = f" with scales of a {self.scales}" if self.scales != "none" else ""
        return f"{self.kind} in {self.weights}{scales}"

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
            rest = (1.0 - self.skew) * share
            return (float(self.top_k), self.skew + rest), (float(self.experts - self.top_k), rest)
        if self.routing not in RANK_EXPONENTS:
            return ((float(self.experts), share),)
        exponent = RANK_EXPONENTS[self.routing]
        low = 0.0
        high = 1e9
        for _ in range(60):
            factor = 0.5 * (low + high) if high < 1e8 else max(2.0 * low, 1.0)
            chance = [-expm1(-factor * rank**-exponent) for rank in range(1, self.experts + 1)]
            if sum(chance) < self.top_k:
                low = factor
            else:
                high = factor
        return tuple((1.0, one) for one in chance)

    @cached_property
    def active(self) -> float:
        """Experts that any token visits, as expected."""
        if self.routing == "balanced":
            return float(min(self.picks, self.experts))
        return sum(many * (1.0 - (1.0 - chance) ** self.tokens) for many, chance in self.loads)

    def count_blocks(self, block: int) -> float:
        """Return the blocks of ``block`` rows that hold the tokens of each expert, as expected: Σ_j
        P(n > j·block).

        The first term is of the binomial n of tokens of an expert, the others of a normal one as
        wide."""
        if self.routing == "balanced":
            return self.active * ceil(self.picks / (self.active * block))
        found = 0.0
        for many, chance in self.loads:
            mean = self.tokens * chance
            spread = max(mean * (1.0 - chance), 1e-12) ** 0.5
            sure = max(
                int((mean - 4.0 * spread - 0.5) / block), 0
            )  # further blocks that are full for certain
            beyond = (sure + j for j in range(1, int(8.0 * spread / block) + 3))
            more = sure + sum(
                0.5 * erfc((j * block + 0.5 - mean) / (spread * 2**0.5)) for j in beyond
            )
            found += many * (1.0 - (1.0 - chance) ** self.tokens + more)
        return found

    @property
    def expert_byte(self) -> float:
        """Bytes of the weights of one expert, with scales of blocks or groups."""
        scales = {"block": 4.0 / 128.0**2, "group": 2.0 / 128.0, "mx": 1.0 / 32.0, "nv": 1.0 / 16.0}
        each = WEIGHT_BIT[self.weights] / 8.0 + scales.get(self.scales, 0.0)
        return 3.0 * self.hidden * self.intermediate * each

    @cached_property
    def work(self) -> OperatorWork:
        values = 2.0 * self.tokens * self.hidden
        flop = 6.0 * self.picks * self.hidden * self.intermediate
        return OperatorWork(flop, self.active * self.expert_byte + values, values)


@dataclass(frozen=True)
class RowKernel(Operator):
    """A small fused kernel over ``rows`` tokens of ``dim`` values each; see the subclasses."""

    flop_per_element: ClassVar[float] = 2.0
    sfu_per_element: ClassVar[float] = 0.0
    rows: int
    dim: int

    @property
    def elements(self) -> float:
        """Values of all rows."""
        return float(self.rows) * self.dim

    @property
    def moved_byte(self) -> tuple[float, float]:
        """Bytes read and written for one element."""
        return 2.0, 2.0

    @cached_property
    def work(self) -> OperatorWork:
        n, (read, write) = self.elements, self.moved_byte
        return OperatorWork(
            self.flop_per_element * n, read * n, write * n, self.sfu_per_element * n
        )


@register_operator("engine_rms_norm", family="rmsnorm")
class EngineRmsNorm(RowKernel):
    """RMS norm, with the residual added first, and with fp8 results (``quant``: static, or a scale
    a token).
    """

    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {"quant": ("", "static", "token")}
    form_words: ClassVar[Mapping[str, str]] = {
        "residual": " of a sum",
        "quant": " to fp8 {op.quant}",
    }
    flop_per_element: ClassVar[float] = 5.0
    residual: bool = False
    quant: str = ""

    @property
    def moved_byte(self) -> tuple[float, float]:
        return 2.0 + 2.0 * self.residual, (1.0 if self.quant else 2.0) + 2.0 * self.residual


@register_operator("engine_silu_and_mul", family="elementwise")
class EngineGate(RowKernel):
    """``silu(x[:dim]) * x[dim:]`` of each row; ``quant``: fp8 results with a static scale or one
    for 128 values.
    """

    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {"quant": ("", "static", "block")}
    form_words: ClassVar[Mapping[str, str]] = {"quant": " to fp8 {op.quant}"}
    flop_per_element: ClassVar[float] = 5.0
    sfu_per_element: ClassVar[float] = 2.0
    quant: str = ""

    @property
    def moved_byte(self) -> tuple[float, float]:
        return 4.0, 1.0 if self.quant else 2.0


@register_operator("engine_rotary", family="elementwise")
class EngineRotary(RowKernel):
    """Rotary embedding of queries and keys in place; ``dim`` is the width of the keys."""

    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1

    @property
    def elements(self) -> float:
        return float(self.rows) * (self.heads + self.kv_heads) * self.head_dim

    @cached_property
    def work(self) -> OperatorWork:
        table = 2.0 * self.rows * self.head_dim
        return OperatorWork(3.0 * self.elements, 2.0 * self.elements + table, 2.0 * self.elements)


@register_operator("engine_cache_write", family="elementwise")
class CacheWrite(RowKernel):
    """New keys and values into their pages, converted where the cache is fp8; ``dim`` is the width
    of the keys.
    """

    form_text: ClassVar[str] = "{op.kind} of {op.kv_dtype}"
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    kv_dtype: Dtype = Dtype.BF16

    @property
    def elements(self) -> float:
        return 2.0 * self.rows * self.dim

    @property
    def moved_byte(self) -> tuple[float, float]:
        return 2.0, self.kv_dtype.byte


@register_operator("engine_quantize", family="elementwise")
class Quantize(RowKernel):
    """bf16 to fp8 with a given scale (static), one found for the tensor, one a token, or one for
    128 values.
    """

    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mode": ("static", "tensor", "token", "block")
    }
    form_text: ClassVar[str] = "{op.kind} by {op.mode}"
    flop_per_element: ClassVar[float] = 3.0
    mode: str = "static"

    @property
    def moved_byte(self) -> tuple[float, float]:
        return 4.0 if self.mode == "tensor" else 2.0, 1.0


@register_operator("engine_route", family="elementwise")
class Route(RowKernel):
    """The ``top_k`` experts of each token from the router's scores; ``grouped`` as DeepSeek-V3
    chooses.
    """

    form_text: ClassVar[str] = "{op.kind} by {op.mode}"
    experts: int = 1
    top_k: int = 1
    mode: str = "softmax"

    @cached_property
    def work(self) -> OperatorWork:
        read = self.elements * (4.0 if self.mode == "grouped" else 2.0)
        return OperatorWork(8.0 * self.elements, read, 12.0 * self.rows * self.top_k, self.elements)


@register_operator("engine_align", family="elementwise")
class AlignTokens(RowKernel):
    """Sort the choices of ``rows`` tokens by expert, each expert's padded to whole blocks; ``dim``
    is the experts.
    """

    experts: int = 1
    top_k: int = 1
    block: int = 16

    @property
    def elements(self) -> float:
        return float(self.rows) * self.top_k

    @cached_property
    def work(self) -> OperatorWork:
        padded = self.elements + self.experts * (self.block - 1.0)
        return OperatorWork(2.0 * self.elements, 4.0 * self.elements, 4.0 * padded)


@register_operator("engine_sampling", family="elementwise")
class Sampling(RowKernel):
    """The next token of each row of logits: greedy, at random, or at random among the likeliest
    (``top_p``).
    """

    form_text: ClassVar[str] = "{op.kind} {op.mode}"
    mode: str = "greedy"

    @cached_property
    def work(self) -> OperatorWork:
        n = self.elements
        passes = {"greedy": 2.0, "random": 7.0}.get(
            self.mode, 20.0
        )  # of logits in fp32, written or read again
        exponentials = 0.0 if self.mode == "greedy" else 2.0 * n
        return OperatorWork(4.0 * n, n * (2.0 + 2.0 * passes), n * 2.0 * passes, exponentials)


@register_operator("engine_compiled", family="elementwise")
class CompiledRows(RowKernel):
    """A norm or gate as torch.compile emits it in vLLM; ``quant``: its results are in fp8."""

    form_text: ClassVar[str] = "{op.kind} {op.function}"
    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "function": tuple(
            name + end
            for end in ("", "_quant")
            for name in ("rms_norm", "add_rms_norm", "silu_and_mul")
        )
    }
    function: str = "add_rms_norm"

    @cached_property
    def work(self) -> OperatorWork:
        n = self.elements
        name = self.function
        read = 2.0 if name.startswith("rms_norm") else 4.0
        write = (1.0 if name.endswith("quant") else 2.0) + 2.0 * name.startswith("add")
        return OperatorWork(
            5.0 * n, n * read, n * write, 2.0 * n if name.startswith("silu") else 0.0
        )


@register_operator("causal_conv", family="elementwise")
class CausalConv(Operator):
    """Convolve every channel with its own few taps over earlier tokens, and apply an activation."""

    batch: int
    length: int
    channels: int
    kernel: int

    @cached_property
    def work(self) -> OperatorWork:
        flop = float(self.batch) * self.length * self.channels * (2.0 * self.kernel + 4.0)
        tokens = float(self.batch * (self.length + self.kernel * (self.length == 1)))
        byte = self.dtype.byte * self.channels
        return OperatorWork(flop, byte * (tokens + self.kernel), byte * tokens)


@register_operator("state_scan", family="gemm")
class StateScan(Operator):
    """Carry a state of ``key_dim`` by ``value_dim`` of each head along a sequence.

    A prompt is cut into chunks of Q tokens. With K = ``key_dim``, V = ``value_dim`` and g key heads
    for h heads, a token of a head costs 2QK·g/h (scores inside the chunk), 2QV (their sum of
    values) and 4KV (into and out of the state) [Dao2024, section 6]. The delta rule solves a
    triangle besides: 2QK·g/h + 2Q(K + V) + 2Q²/3 + 2KV more [Yang2024]. A single token costs 6KV,
    by the delta rule 8KV. ``resumed``: an earlier state is read. ``wide_state``: the state is kept
    in fp32.

    Mamba's first rule decays every value of the state by itself, so that heads are channels (V = 1)
    and tokens follow one another: 7K each, for exp(Δ·A), (Δ·x)·B, the state's a·h + b and the sum
    of C·h [Gu2023, algorithm 2]."""

    form_text: ClassVar[str] = "{op.kind} {op.rule}"
    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rule": ("mamba", "mamba2", "delta", "lightning")
    }
    batch: int
    length: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    rule: str = "mamba2"
    resumed: bool = False
    wide_state: bool = False

    @cached_property
    def work(self) -> OperatorWork:
        k = float(self.key_dim)
        v = float(self.value_dim)
        chunk = float(self.chunk)
        delta = self.rule == "delta"
        if self.rule == "mamba":
            each = 7.0 * k * v
        elif self.length == 1:
            each = (8.0 if delta else 6.0) * k * v
        else:
            scores = 2.0 * chunk * k * self.key_heads / self.heads
            each = scores + 2.0 * chunk * v + 4.0 * k * v
            if delta:
                each += scores + 2.0 * chunk * (k + v) + 2.0 * chunk * chunk / 3.0 + 2.0 * k * v
        tokens = float(self.batch) * self.length
        state = (
            self.batch * self.heads * k * v * (4 if self.wide_state else self.dtype.byte)
        )  # of all sequences
        token = self.heads * self.value_dim + 2 * self.key_heads * self.key_dim + 2 * self.heads
        read = self.dtype.byte * tokens * token + state * self.resumed
        write = self.dtype.byte * tokens * self.heads * v + state
        exponentials = tokens * self.heads * (k if self.rule == "mamba" else 1.0)
        return OperatorWork(tokens * self.heads * each, read, write, exponentials)
