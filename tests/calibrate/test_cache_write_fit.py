"""Writes into the cache by another engine take what rows of attention show."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from wattcast.calibrate import table_fit
from wattcast.calibrate.latency_fit import fit_trees, one_thread
from wattcast.calibrate.table_fit import (
    _scale_groups,
    fit_cache_writes,
    predict_tables_s,
    start_bundle,
)
from wattcast.calibrate.table_rows import TableRows, read_tables
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import Bundle

GROUP = "elementwise.engine.rows.cache_write.fp8"
HEAD = (
    "kernel_source,batch_size,isl,num_heads,num_key_value_heads,head_dim,window_size,"
    "attn_dtype,kv_cache_dtype,step,latency"
)


def read_prompts(folder: Path, count: int, engine: str) -> TableRows:
    """Return attention of prompts over an fp8 cache, each timed together with its writes."""
    draw = np.random.default_rng(4)
    lines = [HEAD]
    for _ in range(count):
        batch, kv_heads, group = draw.choice([1, 2, 4, 8], 3).tolist()
        length = 64 * int(draw.integers(4, 64))
        heads = f"{group * kv_heads},{kv_heads},128,0"
        lines.append(f"fa3,{batch},{length},{heads},bfloat16,fp8,0,1.0")
    path = folder / f"h200_sxm.{engine}-0.5.14.context_attention.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_tables([path], replace(load_gpu("h200"), engine=engine), engine=engine)


def time_prompts(table: TableRows, truth: Bundle) -> TableRows:
    """Return the same rows with the latencies that a bundle predicts."""
    gpu = replace(load_gpu("h200"), engine=truth.reference.engine)
    latency_s = predict_tables_s(table, gpu, truth)
    number = {**table.rows.number, "latency_s": latency_s}
    return replace(table, rows=replace(table.rows, number=number))


def fitted_share(table: TableRows, engine: str, share: float) -> float:
    """Return the share of their time that writes are fitted to take where they take ``share``."""
    gpu = replace(load_gpu("h200"), engine=engine)
    start = start_bundle(gpu)
    timed = time_prompts(table, _scale_groups(start, {GROUP}, share))
    with one_thread():
        fitted = fit_cache_writes(timed, gpu, start)
    return fitted.corrections[GROUP].serial_cycle / start.corrections[GROUP].serial_cycle


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_writes_that_take_a_quarter_of_what_is_known_are_recognised(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that take what is known of them stay as they are. Thirty trees tell them apart."""
    monkeypatch.setattr(table_fit, "fit_trees", partial(fit_trees, trees=30))
    table = read_prompts(tmp_path, 180, "sglang")
    assert fitted_share(table, "sglang", share) == pytest.approx(share)


def test_fewer_than_a_hundred_prompts_say_nothing_of_writing(tmp_path: Path) -> None:
    table = read_prompts(tmp_path, 90, "sglang")
    assert fitted_share(table, "sglang", 0.25) == 1.0
