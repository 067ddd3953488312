"""The ledger of engine kernels: rows held out of the fit stay out of it, and public tables are read by shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.fit.engine_fit import is_engine_family, judge_engine_rows, without_engine
from wattcast.fit.kernel_rows import load_kernel_rows
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.validate.engine_checks import engine_kernel_rows, table_rows

HEADS = {
    "gemm": "kernel_source,gemm_dtype,m,n,k,latency\na,bfloat16,64,4096,4096,0.02\na,fp8,64,4096,4096,0.02\n",
    "context_attention": "kernel_source,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,"
    "kv_cache_dtype,step,window_size,latency\na,1,2048,32,8,128,bfloat16,bfloat16,0,0,0.08\n",
}


@pytest.fixture(scope="module")
def ledger() -> dict[str, dict]:
    return {row["quantity"]: row for row in engine_kernel_rows("h200")}


def test_every_held_out_row_is_judged_and_none_was_fitted(ledger: dict[str, dict]) -> None:
    rows = load_kernel_rows("h200/engine")
    assert rows.held_out is not None
    bundle = shipped_bundle("h200")
    assert bundle is not None
    fitted = sum(residual.rows for name, residual in bundle.residuals.items() if is_engine_family(name))
    bursts = rows.is_kind("burst")
    assert fitted == int((bursts & ~rows.held_out).sum())
    assert ledger["latency"]["n"] == int((bursts & rows.held_out).sum())


def test_held_out_errors_are_those_written_down(ledger: dict[str, dict]) -> None:
    """The figures of docs/method/engine-kernels.md, judged once; a refit that changes them says so there."""
    assert ledger["latency"]["mape"] == pytest.approx(9.6, abs=0.3)
    assert ledger["latency, fp8"]["mape"] == pytest.approx(8.9, abs=0.3)
    assert ledger["latency, engine_experts"]["mape"] == pytest.approx(5.6, abs=0.3)
    assert ledger["power"]["mape"] == pytest.approx(6.3, abs=0.3)


def test_a_bundle_without_engine_rows_falls_back_to_the_families_above() -> None:
    bundle = shipped_bundle("h200")
    assert bundle is not None
    bare = without_engine(bundle)
    assert not any(map(is_engine_family, [*bare.corrections, *bare.seen]))
    rows = load_kernel_rows("h200/engine")
    some = rows.select_rows(rows.is_kind("burst") & (np.arange(len(rows)) % 40 == 0))
    judged = judge_engine_rows(bare, some, hardware.load_gpu("h200"))
    ratio = judged.predicted_latency_s / judged.latency_s
    assert (ratio > 0.2).all()
    assert (ratio < 5.0).all()


def test_public_tables_are_scored_by_format(tmp_path: Path) -> None:
    (tmp_path / "aiconfigurator").mkdir()
    for table, text in HEADS.items():
        (tmp_path / "aiconfigurator" / f"h200_sxm.vllm-0.24.0.{table}.csv").write_text(text)
    found = {row["quantity"]: row for row in table_rows(tmp_path)}
    assert found["latency, gemm bfloat16"]["mape"] == found["latency, gemm bfloat16"]["floor"]
    assert found["latency, context_attention bfloat16"]["n"] == 1
    assert "not found" in found["moe"]["missing"]
