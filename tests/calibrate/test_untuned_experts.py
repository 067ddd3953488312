"""Rows of TensorRT-LLM's experts that ran without tuned tactics are told by their model and split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast.calibrate.row_prediction import predict_with_bundle
from wattcast.calibrate.table_rows import RUN_S, TableRows, held_out, read_tables
from wattcast.calibrate.untuned_experts import mark_untuned
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import forecast_bundle
from wattcast.workload.engine_operators import FusedExperts

_COLUMNS = (
    "kernel_source,moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,"
    "moe_tp_size,moe_ep_size,distribution,latency"
)
_CHIP = replace(load_gpu("h200"), engine="trtllm")
_SPLITS = (1, 2, 4, 8, 16)  # GPUs that share the experts


def read_experts(folder: Path, dtype: str, slow_split: int, excess: float) -> TableRows:
    """Read experts of five splits that take the forecast's time, those of one by a factor longer."""
    path = folder / "h200_sxm.trtllm-1.3.0rc20.moe.csv"
    lines = [_COLUMNS]
    for split in _SPLITS:
        for tokens in range(8, 408, 20):
            row = f"moe_torch_flow_cutlass,{dtype},{tokens},5120,2048,4,128,1,{split},balanced,1.0"
            lines.append(row)
    path.write_text("\n".join(lines) + "\n")
    table = read_tables([path], _CHIP, engine="trtllm")
    seconds = predict_with_bundle(forecast_bundle(_CHIP), table.rows, _CHIP, RUN_S)[:, 0]
    is_slow = np.array([op.gpus == slow_split for op in table.rows.ops])
    number = {**table.rows.number, "latency_s": np.where(is_slow, excess, 1.0) * seconds}
    return replace(table, rows=replace(table.rows, number=number))


def list_untuned_splits(table: TableRows) -> list[int]:
    ops = [op for op in mark_untuned(table, _CHIP).rows.ops if isinstance(op, FusedExperts)]
    return [op.gpus for op in ops if op.kernel == "cutlass_untuned"]


@pytest.mark.parametrize(("excess", "count"), [(3.0, 20), (2.0, 0)])
def test_a_split_that_takes_thrice_its_format_was_not_tuned(
    tmp_path: Path, excess: float, count: int
) -> None:
    """One row in four of an H200's took three to eighteen times what the hardware needs, by model
    and split. Its collector had loaded another model's tactics from a file of the same name.
    """
    assert list_untuned_splits(read_experts(tmp_path, "fp8", 8, excess)) == [8] * count


def test_rows_held_out_take_what_fitted_rows_say(tmp_path: Path) -> None:
    """A held-out row that is slow alone is not marked, since nobody else says that it was."""
    table = read_experts(tmp_path, "fp8", 8, 1.0)
    is_judged = held_out(table.rows.ops)
    assert 0 < is_judged.sum() < len(is_judged)
    seconds = np.where(is_judged, 9.0, 1.0) * table.rows.number["latency_s"]
    number = {**table.rows.number, "latency_s": seconds}
    assert not list_untuned_splits(replace(table, rows=replace(table.rows, number=number)))


def test_experts_by_block_have_no_tactics(tmp_path: Path) -> None:
    assert not list_untuned_splits(read_experts(tmp_path, "fp8_block", 8, 9.0))
