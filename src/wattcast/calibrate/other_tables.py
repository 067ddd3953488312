"""Make operators of two further kinds of public kernel tables: AMD's tuner and layers of vLLM.

AITER's tables (github.com/ROCm/aiter) time tuned products and mixtures of MI300X and MI355X in
microseconds: the best of many kernels for each shape, over some hundred copies of the arguments.
Nothing is quantised inside. LLMServingSim's (github.com/casys-kaist/LLMServingSim) time each layer
and each batch of attention of a model inside vLLM, eager, weights from device memory. Both are
recognised by their columns and named ``SYSTEM.TABLE.csv.gz``; ``table_rows`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from wattcast.core.arrays import sweep_values
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu
from wattcast.kernels import RunCondition
from wattcast.options.weight_recipes import RECIPES
from wattcast.workload import engine_operators, engine_row_operators
from wattcast.workload.model_catalogue import load_model
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Linear


class TableSample(NamedTuple):
    """What a row of a table timed."""

    op: Operator
    condition: RunCondition  # how it ran
    beside: tuple[Operator, ...] = ()  # operators inside the latency besides the row's own


_PARTITIONS = 2.0  # of L2 beside HBM
_TUNER_COPIES = 101  # of its arguments, that AITER's tuner goes round at most


@dataclass(frozen=True)
class OtherTable:
    """A kind of table: the engine that it times, its columns, and how a row becomes an operator."""

    engine: str
    version: str
    columns: frozenset[str]
    time: str  # column of microseconds
    shape: tuple[str, ...]  # by which rows are drawn
    formats: tuple[str, ...]  # of which rows are drawn in equal numbers
    make: Callable[[Mapping[str, Any], Gpu], TableSample | str]


def place_weights(
    op: Operator,
    m: int,
    k: int,
    copies: int,
    gpu: Gpu,
) -> RunCondition:
    """Say where the weights of a product come from.

    They come from device memory if the copies that the collector goes round outgrow L2. Beside HBM
    it has two partitions, each of which keeps what its own SMs read (A100 whitepaper); beside GDDR
    a slice serves all SMs.
    """
    weight_byte = op.read_byte - float(m) * k * op.dtype.byte
    l2_byte = 0.0 if gpu.l2.capacity_byte is None else float(sweep_values(gpu.l2.capacity_byte))
    if not gpu.memory.kind.startswith("GDDR"):
        l2_byte /= _PARTITIONS
    return RunCondition(rotated="none" if copies * weight_byte <= l2_byte else "weights")


def _make_tuned_product(row: Mapping[str, Any], gpu: Gpu) -> TableSample | str:
    """Make a product of AITER's tables."""
    form = row["format"]
    if int(row["b"]) > 1:
        return "batched products"
    m, n, k = (int(row[name]) for name in "MNK")
    tensor = gpu.pipes.tensor_flop_per_cycle
    op: Operator
    if form == "bf16":
        op = Linear(m, n, k, dtype=Dtype.BF16)
    elif form in ("fp8", "int8") and Dtype.parse(form) in tensor:
        op = engine_operators.ScaledProduct(
            m,
            n,
            k,
            "token",
            dtype=Dtype.parse(form),
        )
    elif form == "fp8_block" and Dtype.FP8 in tensor:
        op = engine_operators.BlockProduct(
            m,
            n,
            k,
            kernel="cutlass",
            dtype=Dtype.FP8,
        )
    elif form == "mxfp4" and Dtype.FP4 in tensor:
        op = engine_operators.BlockProduct(
            m,
            n,
            k,
            kernel="cutlass",
            bit=RECIPES["mxfp4"].bit,
            dtype=Dtype.FP4,
        )
    else:
        return f"products in {form}"
    return TableSample(
        op,
        place_weights(
            op,
            m,
            k,
            _TUNER_COPIES,
            gpu,
        ),
    )


# scale and format of weights -> weights, scales and arithmetic of experts
_TUNED_EXPERTS = {
    ("No", "bfloat16"): ("bf16", "none", Dtype.BF16),
    ("per_Token", "float8_e4m3fn"): ("fp8", "tensor", Dtype.FP8),
    ("per_1x128", "float8_e4m3fn"): ("fp8", "block", Dtype.FP8),
    ("per_1x128", "float8_e4m3fnuz"): ("fp8", "block", Dtype.FP8),
}


def _make_tuned_experts(row: Mapping[str, Any], gpu: Gpu) -> TableSample | str:
    """Make a mixture of AITER's tables."""
    form = (row["q_type"], row["q_dtype_w"])
    if form not in _TUNED_EXPERTS:
        return f"experts in {row['q_dtype_w']} by {row['q_type']}"
    weights, scales, dtype = _TUNED_EXPERTS[form]
    op = engine_operators.FusedExperts(
        tokens=int(row["token"]),
        experts=int(row["expert"]),
        top_k=int(row["topk"]),
        hidden=int(row["model_dim"]),
        intermediate=int(row["inter_dim"]),
        weights=weights,
        scales=scales,
        dtype=dtype,
    )
    return TableSample(op, RunCondition(rotated="weights"))


_MODELS = {
    "Llama-3.1-8B": "llama3-8b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
}


@dataclass(frozen=True)
class _ModelPart:
    """The sizes of a model's layer on one of its GPUs."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int


def _divide_model(row: Mapping[str, Any]) -> _ModelPart:
    """Return the sizes of a row's model on one of ``tp`` GPUs."""
    dims: Any = load_model(_MODELS[row["model"]]).dims
    parts = int(row["tp"])
    return _ModelPart(
        hidden=dims.hidden,
        heads=dims.heads // parts,
        kv_heads=max(dims.kv_heads // parts, 1),
        head_dim=dims.head_dim or dims.hidden // dims.heads,
        inner=dims.intermediate // parts,
        vocabulary=dims.vocab // parts,
    )


def _make_layer(row: Mapping[str, Any], gpu: Gpu) -> TableSample | str:
    """Make a linear layer of a model, one GPU's part of it."""
    if row["model"] not in _MODELS:
        return f"layers of {row['model']}"
    part = _divide_model(row)
    sides = {
        "qkv_proj": ((part.heads + 2 * part.kv_heads) * part.head_dim, part.hidden),
        "o_proj": (part.hidden, part.heads * part.head_dim),
        "gate_up_proj": (2 * part.inner, part.hidden),
        "down_proj": (part.hidden, part.inner),
        "lm_head": (part.vocabulary, part.hidden),
    }
    if row["layer"] not in sides:
        return f"layers {row['layer']}"
    n, k = sides[row["layer"]]
    m = int(row["tokens"])
    return TableSample(Linear(m, n, k, dtype=Dtype.BF16), RunCondition(rotated="weights"))


def _make_layer_attention(row: Mapping[str, Any], gpu: Gpu) -> TableSample | str:
    """Make one layer's attention of a batch: a prompt's chunk, sequences that decode, or both."""
    if row["model"] not in _MODELS:
        return f"layers of {row['model']}"
    part = _divide_model(row)
    chunk = int(row["prefill_chunk"])
    decoding = int(row["n_decode"])
    groups = []
    if chunk:
        groups.append((1, chunk, chunk + int(row["kv_prefill"])))
    if decoding:
        groups.append((decoding, 1, int(row["kv_decode"]) + 1))
    bound = max(keys for _, _, keys in groups)
    op = engine_operators.PagedAttention(
        part.heads,
        part.kv_heads,
        part.head_dim,
        tuple(groups),
        Dtype.BF16,
        bound=bound,
        dtype=Dtype.BF16,
    )
    width = part.kv_heads * part.head_dim
    writes = engine_row_operators.CacheWrite(
        chunk + decoding,
        width,
        1,
        1,
        width,
        Dtype.BF16,
    )
    return TableSample(op, RunCondition(rotated="none"), (writes,))


OTHER_TABLES = {
    "tuned products": OtherTable(
        "aiter",
        "2026",
        frozenset({"b", "M", "N", "K", "format", "us"}),
        "us",
        ("M", "N", "K"),
        ("format",),
        _make_tuned_product,
    ),
    "tuned experts": OtherTable(
        "aiter",
        "2026",
        frozenset({"token", "model_dim", "inter_dim", "expert", "topk", "q_type", "us"}),
        "us",
        ("token", "model_dim", "inter_dim", "expert", "topk"),
        ("q_type",),
        _make_tuned_experts,
    ),
    "layers": OtherTable(
        "vllm",
        "0.19.0",
        frozenset({"model", "tp", "layer", "counts", "tokens", "time_us"}),
        "time_us",
        ("tp", "tokens"),
        ("layer",),
        _make_layer,
    ),
    "layer attention": OtherTable(
        "vllm",
        "0.19.0",
        frozenset({"prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"}),
        "time_us",
        ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"),
        (),
        _make_layer_attention,
    ),
}
