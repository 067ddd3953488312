"""Judge predicted kernels of an inference engine on public tables that nothing was fitted to.

The tables are aiconfigurator's of vLLM 0.24.0 on an H200. The floor is the error when PyTorch's
kernels stand for the engine's, as predictions had it before the engine's kernels were measured.
Run: ``wattcast lab validate`` in the repository (WATTCAST_REFERENCE names the measurements)."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wattcast import hardware
from wattcast.calibrate.scoring import (
    LedgerRow,
    make_absent_row,
    make_ledger_row,
    mean_percent_error,
)
from wattcast.core.arrays import Array
from wattcast.core.units import Dtype
from wattcast.hardware import Gpu
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_table import RunCondition
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.pipeline import analyse_kernels
from wattcast.predictor.timeline import compute_effective_hz, compute_kernel_s
from wattcast.workload.engine_operators import (
    GRAPH_SPLITS,
    GRAPH_TOKENS,
    BlockProduct,
    FusedExperts,
    PagedAttention,
    ScaledProduct,
)
from wattcast.workload.engine_row_operators import CacheWrite, Quantize
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Attention,
    Bmm,
    Elementwise,
    Linear,
)

TABLES = "h200_sxm.vllm-0.24.0"
_Calls = tuple[list[Operator], list[Operator]]  # by the engine's kernels, and by PyTorch's


def table_rows(reference: Path) -> list[LedgerRow]:
    """Return errors on public tables of an H200's engine kernels, by table and format."""
    gpu = hardware.load_gpu("h200")
    bundle = shipped_bundle("h200")
    assert bundle is not None, "the bundle of the H200 ships"
    ledger_rows = []
    for table in _TABLES:
        path = reference / "aiconfigurator" / f"{TABLES}.{table.name}.csv"
        if not path.is_file():
            reason = f"{path.name} not found"
            ledger_rows.append(make_absent_row("aiconfigurator h200 vllm", table.name, reason))
            continue
        is_warm = table.name.endswith("attention")
        for form, timed in sorted(_read_calls(path, table).items()):
            measured_s = np.array([call.latency_s for call in timed])
            new_s = _seconds([call.by_engine for call in timed], is_warm, gpu, bundle)
            old_s = _seconds([call.by_torch for call in timed], is_warm, gpu, bundle)
            error = 100.0 * np.abs(new_s / measured_s - 1.0)
            row = make_ledger_row(
                "aiconfigurator h200 vllm 0.24.0, nothing fitted",
                f"latency, {table.name} {form}",
                len(timed),
                float(error.mean()),
                mean_percent_error(old_s, measured_s),
                median=round(float(np.median(error)), 1),
            )
            ledger_rows.append(row)
    return ledger_rows


class _TimedCalls(NamedTuple):
    """A row of a table: its latency, and its operators as the engine runs them and as PyTorch."""

    latency_s: float
    by_engine: list[Operator]
    by_torch: list[Operator]


class _Table(NamedTuple):
    """A table, the column of its number format, and how a line becomes operators."""

    name: str
    column: str
    read: Callable[[dict[str, str]], _Calls | None]


def _read_calls(path: Path, table: _Table) -> dict[str, list[_TimedCalls]]:
    """Read the lines of a table that become operators, by number format."""
    calls_of_form: dict[str, list[_TimedCalls]] = {}
    with path.open(newline="", encoding="utf-8") as stream:
        for line in csv.DictReader(stream):
            calls = table.read(line)
            if calls is not None:
                timed = _TimedCalls(1e-3 * float(line["latency"]), *calls)
                calls_of_form.setdefault(line[table.column], []).append(timed)
    return calls_of_form


def _seconds(
    calls: Sequence[Sequence[Operator]],
    warm: bool,
    gpu: Gpu,
    bundle: Bundle,
) -> Array:
    """Return the seconds of each list of operators at the top clock, one after another."""
    ops = [op for some in calls for op in some]
    row = np.repeat(np.arange(len(calls)), [len(some) for some in calls])
    condition = RunCondition(rotated="none" if warm else "")
    kernels = build_kernels(
        tuple(ops),
        (condition,) * len(ops),
        gpu,
        bundle.reference,
        (),
    )
    timeline = analyse_kernels(kernels, gpu, bundle)
    running_hz = compute_effective_hz(
        timeline, np.asarray(float(np.mean(gpu.clocks.max_hz))), bundle.clock_law
    )
    return np.asarray(
        np.bincount(row, compute_kernel_s(timeline.phases, running_hz), len(calls)),
        dtype=np.float64,
    )


def _gemm(line: dict[str, Any]) -> _Calls | None:
    m, n, k = (int(line[name]) for name in "mnk")
    if line["gemm_dtype"] == "bfloat16":
        return [Linear(m, n, k)], [Linear(m, n, k)]
    if line["gemm_dtype"] not in ("fp8", "fp8_block") or k % 128 or n % 64:
        return None
    block = line["gemm_dtype"] == "fp8_block"
    if block and float(line["latency"]) < 0.1:  # bound by the host: not to be judged
        return None
    old: list[Operator] = [
        Elementwise("cast", m * k, Dtype.FP8),
        Linear(
            m,
            n,
            k,
            dtype=Dtype.FP8,
            out_dtype=Dtype.BF16,
        ),
    ]
    product = (
        BlockProduct(m, n, k, dtype=Dtype.FP8) if block else ScaledProduct(m, n, k, dtype=Dtype.FP8)
    )
    return [Quantize(m, k, "block" if block else "token"), product], old


def _attention(line: dict[str, Any]) -> _Calls | None:
    batch, new, heads, dim = (
        int(line[name]) for name in ("batch_size", "isl", "num_heads", "head_dim")
    )
    kv_heads = int(line["num_key_value_heads"]) or heads
    window = int(line["window_size"])
    keys = new + int(line["step"])
    fp8 = line["kv_cache_dtype"] == "fp8"
    form = Dtype.FP8 if fp8 else Dtype.BF16
    tokens = batch * new
    splits = GRAPH_SPLITS if tokens <= GRAPH_TOKENS else 0
    attention = PagedAttention(
        heads,
        kv_heads,
        dim,
        ((batch, new, keys),),
        form,
        window,
        splits=splits,
        bound=keys,
    )
    seen = min(keys, window) if window and new == 1 else keys
    old: list[Operator] = [
        Elementwise("copy", 2 * tokens * kv_heads * dim),
        Attention(
            batch,
            heads,
            kv_heads,
            new,
            seen,
            dim,
            causal=new > 1,
        ),
    ]
    return [
        CacheWrite(
            tokens,
            kv_heads * dim,
            heads,
            kv_heads,
            dim,
            form,
        ),
        attention,
    ], old


def _experts(line: dict[str, Any]) -> _Calls | None:
    """Take experts that Triton runs and that all are visited: a balanced table visits as many as it
    can.
    """
    tokens, hidden, chosen, experts, parts = (
        int(line[name])
        for name in ("num_tokens", "hidden_size", "topk", "num_experts", "moe_ep_size")
    )
    inner = int(line["inter_size"]) // int(line["moe_tp_size"])
    if (
        "triton_tritonexperts" not in line["kernel_source"]
        or parts > 1
        or tokens * chosen < 4 * experts
    ):
        return None
    if line["distribution"] != "balanced":
        return None
    fp8 = line["moe_dtype"].startswith("fp8")
    form = Dtype.FP8 if fp8 else Dtype.BF16
    scales = "block" if "block" in line["moe_dtype"] else "tensor" if fp8 else "none"
    op = FusedExperts(
        tokens,
        experts,
        chosen,
        hidden,
        inner,
        "fp8" if fp8 else "bf16",
        scales,
        dtype=form,
    )
    expert_tokens = max(tokens * chosen // experts, 1)
    old: list[Operator] = [
        Bmm(
            experts,
            expert_tokens,
            2 * inner,
            hidden,
            Dtype.BF16,
            dtype=form,
        ),
        Elementwise("silu_mul", tokens * chosen * inner),
        Bmm(
            experts,
            expert_tokens,
            hidden,
            inner,
            Dtype.BF16,
            dtype=form,
        ),
    ]
    return [op], old


_TABLES = (
    _Table("gemm", "gemm_dtype", _gemm),
    _Table("context_attention", "kv_cache_dtype", _attention),
    _Table("generation_attention", "kv_cache_dtype", _attention),
    _Table("moe", "moe_dtype", _experts),
)
