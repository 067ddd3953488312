"""Forecast and calibration against published rows; bounds are the ledger's, with a little room for
a refit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.calibrate.calibration import analyse_models, calibrate_bundle, predict_models
from wattcast.lab.validate.public_checks.other_gpu_checks import other_gpu_rows, to_calibration_row
from wattcast.lab.validate.public_checks.published_checks import power_limit_rows
from wattcast.lab.validate.public_checks.published_runs import (
    PUBLISHED_GPU,
    clean_runs,
    read_published_runs,
    select_reported_runs,
)
from wattcast.predictor.bundle import bundle_for


def test_the_clean_rows_are_those_the_reference_counts(reference: Path) -> None:
    at_900, clocks = (
        clean_runs(read_published_runs(reference, "900")),
        clean_runs(read_published_runs(reference, "clocks")),
    )
    assert len(at_900) == 68
    assert sum(r.model != "resnet101" for r in at_900) == 64
    assert len(clocks) == 163
    assert len(select_reported_runs(reference, clocks)) == 65


def test_the_forecast_of_an_a100_uses_none_of_its_rows_and_meets_the_ledger(
    reference: Path,
) -> None:
    gpu = hardware.load_gpu(PUBLISHED_GPU)
    bundle = bundle_for(gpu)
    measured = [
        to_calibration_row(r, gpu)
        for r in clean_runs(read_published_runs(reference, "900"))
        if r.model != "resnet101"
    ]
    seconds, watts = predict_models(analyse_models(measured, gpu, bundle), {}, gpu, bundle)
    latency = np.mean([abs(s / m.latency_s - 1) for s, m in zip(seconds, measured, strict=True)])
    power = np.mean([abs(w / m.power_w - 1) for w, m in zip(watts, measured, strict=True)])
    assert latency < 0.14  # the ledger's musts
    assert power < 0.12


def test_zeus_beats_both_baselines_on_every_card(reference: Path) -> None:
    found = power_limit_rows(reference)
    assert len(found) == 10
    for r in found:
        assert r["mape"] < r["floor"], r


@pytest.mark.slow
def test_every_row_of_the_ledger_beats_its_floor_and_keeps_to_its_must(reference: Path) -> None:
    for r in other_gpu_rows(reference):
        assert r["mape"] < r["floor"], r
        assert r["must"] is None or r["mape"] <= r["must"], r


@pytest.mark.slow
def test_calibrating_on_eight_rows_does_not_hurt(reference: Path) -> None:
    """Other draws than the ledger's: latency no worse than the forecast's by more than 0.3 points
    in the mean, power better by a point at least. Before, the eight rows made latency worse in one
    draw of five."""
    gpu = hardware.load_gpu(PUBLISHED_GPU)
    bundle = bundle_for(gpu)
    kept = [
        to_calibration_row(r, gpu)
        for r in clean_runs(read_published_runs(reference, "900"))
        if r.model != "resnet101"
    ]
    analysed, draw = analyse_models(kept, gpu, bundle), np.random.default_rng(100)
    true = np.array([[m.latency_s for m in kept], [m.power_w for m in kept]])
    plain = np.abs(np.array(predict_models(analysed, {}, gpu, bundle)) / true - 1)
    change = []
    for _ in range(30):
        chosen = draw.choice(len(kept), 8, replace=False).tolist()
        factors = calibrate_bundle([analysed[i] for i in chosen], gpu, bundle, "drawn").factors
        rest = np.setdiff1d(np.arange(len(kept)), chosen)
        said = np.array(predict_models([analysed[i] for i in rest], factors, gpu, bundle))
        change.append((np.abs(said / true[:, rest] - 1) - plain[:, rest]).mean(axis=1))
    latency, power = np.mean(change, axis=0)
    assert latency < 0.003
    assert power < -0.01
