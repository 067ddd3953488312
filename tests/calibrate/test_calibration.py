"""``calibrate``: recovers factors it can see, leaves the rest, and refuses what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.calibrate.calibration import (
    Calibration,
    MeasuredModel,
    analyse_models,
    calibrate_bundle,
)
from wattcast.calibrate.calibration_rows import read_calibration_rows
from wattcast.core.errors import BadInput
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.predictor.bundle.calibrated import apply_factors
from wattcast.predictor.bundle.forecast import forecast_bundle
from wattcast.predictor.pipeline import analyse_graph, total_at_clock
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import load_workload

GPU = load_gpu("a100-sxm-80gb")
CASES = [("gpt2", 1, 128), ("gpt2", 32, 512), ("bert-large", 8, 512), ("bert-large", 32, 256), ("opt-1.3b", 4, 512),
         ("bert-large", 1, 128), ("gpt2", 8, 1024), ("opt-1.3b", 1, 2048)]  # fmt: skip


def synthetic(
    factors: dict[str, float], count: int = 8, noise: float = 0.0, seed: int = 0
) -> list[MeasuredModel]:
    """Rows as a card with these factors would give them."""
    truth, draw = apply_factors(forecast_bundle(GPU), factors), np.random.default_rng(seed)
    rows = []
    for model, batch, seq in CASES[:count]:
        graph = load_workload.load_workload(
            model, ModelOptions(batch=batch, seq=seq, attention="eager", head="none")
        )
        totals = total_at_clock(analyse_graph(graph, GPU, truth), OperatingPoint(1200e6), truth)
        off = np.exp(noise * draw.standard_normal(2))
        rows.append(MeasuredModel(graph.name, graph, float(totals.latency_s) * off[0], float(totals.power_w) * off[1],
                             1200e6, 45.0))  # fmt: skip
    return rows


def calibrate_models(measured: list[MeasuredModel]) -> Calibration:
    base = forecast_bundle(GPU)
    return calibrate_bundle(analyse_models(measured, GPU, base), GPU, base, "rows")


def test_it_recovers_what_the_rows_show() -> None:
    true = {"launch": 1.5, "compute": 1.25, "energy": 0.8}
    found = calibrate_models(synthetic(true, noise=0.02))
    for name, value in true.items():
        assert_allclose(found.factors[name], value, rtol=0.08)
    assert found.latency.left_out < 0.3 * found.latency.forecast
    assert found.power.left_out < 0.5 * found.power.forecast


def test_rows_that_agree_with_the_forecast_teach_nothing() -> None:
    found = calibrate_models(synthetic({}))
    assert all(abs(np.log(v)) < 0.02 for k, v in found.factors.items() if k != "idle_offset")
    assert abs(found.factors.get("idle_offset", 0.0)) < 2.0


def test_a_host_in_a_slow_mood_is_no_factor() -> None:
    """Launch-bound rows are found a quarter apart from day to day: one such row says nothing about
    the next, and rows of the GPU must not pay for it. A host half as fast again shows in the test
    above."""
    rows = synthetic({})
    waits = [i for i, (model, batch, _) in enumerate(CASES) if batch == 1 and model != "opt-1.3b"]
    for i in waits[:1]:
        rows[i] = MeasuredModel(**{**vars(rows[i]), "latency_s": 1.25 * rows[i].latency_s})
    found = calibrate_models(rows)
    assert not {"launch", "compute", "memory", "products"} & set(found.factors)


def test_the_energy_scale_is_always_learned_and_held_back_by_its_prior() -> None:
    found = calibrate_models(synthetic({"energy": 0.95}))
    assert set(found.factors) == {"energy"}
    assert 0.945 < found.factors["energy"] < 0.975


def test_one_row_gives_at_most_one_factor_of_each_kind() -> None:
    found = calibrate_models(synthetic({"compute": 1.3, "energy": 0.7}, count=2)[1:])
    assert len(found.learned) <= 2
    assert found.latency.left_out is None
    assert found.latency.fitted < found.latency.forecast
    assert found.power.fitted < found.power.forecast


def test_never_more_factors_than_rows() -> None:
    true = {
        "launch": 2.0,
        "compute": 1.5,
        "memory": 0.7,
        "products": 1.4,
        "energy": 0.6,
        "dram_energy": 1.6,
    }
    for count in (1, 2, 3):
        found = calibrate_models(synthetic(true, count))
        time = [n for n in found.factors if n in ("launch", "compute", "memory", "products")]
        assert len(time) <= count
        assert len(found.factors) - len(time) <= count


def test_one_odd_row_does_not_rule() -> None:
    rows = synthetic({"compute": 1.2})
    odd = [*rows[:-1], MeasuredModel(**{**vars(rows[-1]), "latency_s": rows[-1].latency_s * 4})]
    found = calibrate_models(odd)
    assert_allclose(found.factors["compute"], 1.2, rtol=0.12)


def test_intervals_shrink_with_good_rows_and_only_then() -> None:
    base = forecast_bundle(GPU)
    good, wild = (calibrate_models(synthetic({}, noise=n, seed=3)).bundle for n in (0.01, 0.5))
    width = [
        np.log(b.residuals["gemm"].latency[1] / b.residuals["gemm"].latency[0])
        for b in (base, good, wild)
    ]
    assert width[1] < width[0] < width[2]


HEAD = "workload,batch,seq,attention,head,latency_ms,energy_j,clock_mhz,temperature_c\n"


def write(folder: Path, rows: list[MeasuredModel], text: str = "") -> Path:
    lines = [
        f"{model},{batch},{seq},eager,none,{m.latency_s * 1e3},{m.power_w * m.latency_s},1200,45\n"
        for m, (model, batch, seq) in zip(rows, CASES, strict=False)
    ]
    path = folder / "rows.csv"
    path.write_text(text or HEAD + "".join(lines))
    return path


def test_the_command_saves_a_bundle_that_predict_uses(call, tmp_path: Path) -> None:
    path = write(tmp_path, synthetic({"compute": 1.4, "energy": 0.8}))
    done = call(
        "calibrate", "--gpu", "a100-sxm", str(path), "--out", str(tmp_path / "mine"), "--json"
    )
    assert done.code == 0, done.err
    out = json.loads(done.out)
    assert {item["name"] for item in out["learned"]} >= {"compute", "energy"}
    options = {"batch": 32, "seq": 512, "attention": "eager", "head": "none", "clock": "1200 MHz"}
    before = wattcast.predict("gpt2", "a100-sxm", **options)
    after = wattcast.predict("gpt2", "a100-sxm", bundle=tmp_path / "mine", **options)
    assert after.latency_s > 1.15 * before.latency_s
    assert after.provenance.source.startswith("wattcast calibrate")
    assert "calibrated on 8 whole-model rows" in " ".join(after.assumptions)
    text = call("calibrate", "--gpu", "a100-sxm", str(path), "--out", str(tmp_path / "mine"))
    assert "90% interval" in text.out
    other = call("predict", "gpt2", "--gpu", "l40s", "--bundle", str(tmp_path / "mine"))
    assert other.code == 2
    assert "a100-sxm-80gb" in other.err


def test_json_rows_with_units_in_the_cells(call, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(
        json.dumps(
            [{"workload": "gpt2", "batch": 8, "seq": 512, "latency": "16 ms", "power": "210 W"}]
        )
    )
    done = call(
        "calibrate", "--gpu", "a100-sxm", str(path), "--out", str(tmp_path / "mine"), "--json"
    )
    assert done.code == 0, done.err
    assert json.loads(done.out)["rows"] == 1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("workload,latency\ngpt2,12.5\n", "unit"),
        ("workload,latency_ms,clock_mhz\ngpt2,12.5,5000\n", "clock of the"),
        ("workload,latency_ms,clock_ghz\ngpt2,12.5,900\n", "clock of the"),
        ("workload,latency_s\ngpt2,9000\n", "prefix|reach"),
        ("workload,latency_ms,power_w\ngpt2,9,0.2\n", "mean power"),
        ("workload,latency_ms,power_w,energy_j\ngpt2,9,200,17\n", "energy = power x latency"),
        ("workload,latency_ms\nno-such-model,9\n", "no-such-model"),
        ("workload,latency_ms,colour\ngpt2,9,red\n", "colour"),
        ("workload,batch,latency_ms\ngpt2,many,9\n", "whole number"),
        ("workload,latency_ms\n", "rows"),
        ("latency_ms\n9\n", "workload"),
        ("workload,latency_ms\ngpt2,-3\n", "above zero"),
        ("workload,latency_ms\ngpt2\n", "cells"),
        (
            "workload,seq,latency_ms,power_w\ngpt2,512,5,150\ngpt2,512,9,150\n",
            "two rows of the same run",
        ),
        ("workload,energy,time,avg_freq,temp\nnonsense.csv,1,2,900,60\n", "nonsense"),
    ],
)
def test_bad_rows_are_refused_in_one_paragraph(call, tmp_path: Path, text: str, word: str) -> None:
    import re

    done = call(
        "calibrate",
        "--gpu",
        "a100-sxm",
        str(write(tmp_path, [], text)),
        "--out",
        str(tmp_path / "mine"),
    )
    assert done.code == 2, done.err
    assert re.search(word, done.err), done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "mine" / "bundle.json").exists()


def test_repeats_that_differ_a_little_are_used_and_noted(call, tmp_path: Path) -> None:
    text = "workload,seq,latency_ms,power_w\ngpt2,512,7.0,150\ngpt2,512,8.4,150\n"
    done = call(
        "calibrate",
        "--gpu",
        "a100-sxm",
        str(write(tmp_path, [], text)),
        "--out",
        str(tmp_path / "m"),
        "--json",
    )
    assert done.code == 0, done.err
    assert "both are used" in " ".join(json.loads(done.out)["notes"])


def test_rows_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"workload,latency_ms\ngpt2 \xb5,5\n")
    with pytest.raises(BadInput, match=r"rows\.csv: not UTF-8 text \(byte 25\)"):
        read_calibration_rows(path, load_gpu("a10"))
