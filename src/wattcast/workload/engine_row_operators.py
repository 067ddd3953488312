"""Small fused kernels of an inference engine over rows: norms, gates, casts, routing, sampling.

Each is one call as vLLM makes it. A measured row of ``database/*/engine`` is such an operator in
JSON, so field names here are the keys of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wattcast.core import Dtype
from wattcast.core.regular_files import read_shipped_table
from wattcast.workload.operator_base import (
    Operator,
    OperatorWork,
    register_operator,
)

_PASSES_TABLE = read_shipped_table("wattcast.workload", "sampling_passes.csv")
_SAMPLING_PASSES = {row["mode"]: float(row["passes"]) for row in _PASSES_TABLE}


@dataclass(frozen=True, eq=False, repr=False)
class RowKernel(Operator):
    """A small fused kernel over ``rows`` tokens of ``dim`` values each."""

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
        n = self.elements
        read_byte, write_byte = self.moved_byte
        return OperatorWork(
            flop=self.flop_per_element * n,
            read_byte=read_byte * n,
            write_byte=write_byte * n,
            sfu_op=self.sfu_per_element * n,
        )


@register_operator("engine_rms_norm", family="rmsnorm")
class EngineRmsNorm(RowKernel):
    """RMS norm, with the residual added first, and with fp8 results.

    ``quant``: static scales, or a scale for each token.
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
        residual_byte = 2.0 * self.residual
        result_byte = 1.0 if self.quant else 2.0
        return 2.0 + residual_byte, result_byte + residual_byte


@register_operator("engine_silu_and_mul", family="elementwise")
class EngineGate(RowKernel):
    """``silu(x[:dim]) * x[dim:]`` of each row.

    ``quant``: fp8 results with a static scale or one for 128 values.
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
        n = self.elements
        table_byte = 2.0 * self.rows * self.head_dim
        return OperatorWork(
            flop=3.0 * n,
            read_byte=2.0 * n + table_byte,
            write_byte=2.0 * n,
        )


@register_operator("engine_cache_write", family="elementwise")
class CacheWrite(RowKernel):
    """Write new keys and values into their pages, converted where the cache is fp8.

    ``dim`` is the width of the keys.
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


_FP4_BYTE = 0.5 + 1.0 / 16.0  # of an element, with its share of a scale


@register_operator("engine_quantize", family="elementwise")
class Quantize(RowKernel):
    """Convert bf16 to fp8 with a scale, or to fp4 with one for 16 values.

    The scale is known before (static), or computed for the tensor, for each token, or for 128
    values.
    """

    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mode": ("static", "tensor", "token", "block", "fp4")
    }
    form_text: ClassVar[str] = "{op.kind} by {op.mode}"
    flop_per_element: ClassVar[float] = 3.0
    mode: str = "static"

    @property
    def moved_byte(self) -> tuple[float, float]:
        read_byte = 4.0 if self.mode == "tensor" else 2.0
        write_byte = _FP4_BYTE if self.mode == "fp4" else 1.0
        return read_byte, write_byte


@register_operator("engine_route", family="elementwise")
class Route(RowKernel):
    """Choose the ``top_k`` experts of each token by the router's scores.

    ``grouped`` chooses groups of experts first, as DeepSeek-V3.
    """

    form_text: ClassVar[str] = "{op.kind} by {op.mode}"
    experts: int = 1
    top_k: int = 1
    mode: str = "softmax"

    @cached_property
    def work(self) -> OperatorWork:
        score_byte = 4.0 if self.mode == "grouped" else 2.0
        return OperatorWork(
            flop=8.0 * self.elements,
            read_byte=self.elements * score_byte,
            write_byte=12.0 * self.rows * self.top_k,
            sfu_op=self.elements,
        )


@register_operator("engine_align", family="elementwise")
class AlignTokens(RowKernel):
    """Sort the choices of ``rows`` tokens by expert, those of an expert padded to whole blocks.

    ``dim`` is the number of experts.
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
        return OperatorWork(
            flop=2.0 * self.elements,
            read_byte=4.0 * self.elements,
            write_byte=4.0 * padded,
        )


@register_operator("engine_sampling", family="elementwise")
class Sampling(RowKernel):
    """Choose the next token of each row of logits.

    ``mode`` is greedy, random, ``top_p`` (among the k likeliest, of which top-p leaves some),
    ``sorted`` (top-p among all words, which are sorted for it) or ``penalised`` (random, with
    penalties for words that were there).
    """

    form_text: ClassVar[str] = "{op.kind} {op.mode}"
    mode: str = "greedy"

    @cached_property
    def work(self) -> OperatorWork:
        n = self.elements
        passes = _SAMPLING_PASSES.get(self.mode, _SAMPLING_PASSES["other"])
        return OperatorWork(
            flop=4.0 * n,
            read_byte=n * (2.0 + 2.0 * passes),
            write_byte=n * 2.0 * passes,
            sfu_op=0.0 if self.mode == "greedy" else 2.0 * n,
        )


# Functions that torch.compile emits; with ``_quant`` their results are in fp8.
_COMPILED_FUNCTIONS = (
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "rms_norm_quant",
    "add_rms_norm_quant",
    "silu_and_mul_quant",
)


@register_operator("engine_compiled", family="elementwise")
class CompiledRows(RowKernel):
    """A norm or gate as torch.compile emits it in vLLM."""

    form_text: ClassVar[str] = "{op.kind} {op.function}"
    allowed: ClassVar[Mapping[str, tuple[str, ...]]] = {"function": _COMPILED_FUNCTIONS}
    function: str = "add_rms_norm"

    @cached_property
    def work(self) -> OperatorWork:
        n = self.elements
        name = self.function
        read_byte = 2.0 if name.startswith("rms_norm") else 4.0
        write_byte = 1.0 if name.endswith("quant") else 2.0
        if name.startswith("add"):  # the sum is written too
            write_byte += 2.0
        return OperatorWork(
            flop=5.0 * n,
            read_byte=n * read_byte,
            write_byte=n * write_byte,
            sfu_op=2.0 * n if name.startswith("silu") else 0.0,
        )
