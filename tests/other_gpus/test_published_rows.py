"""Forecast and calibration against published rows; bounds are the ledger's, with a little room for a refit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.fit.calibrate import calibrate_rows
from wattcast.fit.calibrate_energaizer import GPU, clean, published, rows
from wattcast.fit.calibrate_model import predict, rows_of
from wattcast.fitted import bundle_for
from wattcast.validate.a100 import a100_rows, as_measured
from wattcast.validate.zeus import zeus_rows


def test_the_clean_rows_are_those_the_reference_counts(reference: Path) -> None:
    at_900, clocks = clean(rows(reference, "900")), clean(rows(reference, "clocks"))
    assert len(at_900) == 68
    assert sum(r.model != "resnet101" for r in at_900) == 64
    assert len(clocks) == 163
    assert len(published(reference, clocks)) == 65


def test_the_forecast_of_an_a100_uses_none_of_its_rows_and_meets_the_ledger(reference: Path) -> None:
    gpu = hardware.load(GPU)
    bundle = bundle_for(gpu)
    measured = [as_measured(r, gpu) for r in clean(rows(reference, "900")) if r.model != "resnet101"]
    seconds, watts = predict(rows_of(measured, gpu, bundle), {}, gpu, bundle)
    latency = np.mean([abs(s / m.latency_s - 1) for s, m in zip(seconds, measured, strict=True)])
    power = np.mean([abs(w / m.power_w - 1) for w, m in zip(watts, measured, strict=True)])
    assert latency < 0.14  # the ledger's musts
    assert power < 0.12


def test_zeus_beats_both_baselines_on_every_card(reference: Path) -> None:
    found = zeus_rows(reference)
    assert len(found) == 10
    for r in found:
        assert r["mape"] < r["floor"], r


@pytest.mark.slow
def test_every_row_of_the_ledger_beats_its_floor_and_keeps_to_its_must(reference: Path) -> None:
    for r in a100_rows(reference):
        assert r["mape"] < r["floor"], r
        assert r["must"] is None or r["mape"] <= r["must"], r


@pytest.mark.slow
def test_calibrating_on_eight_rows_does_not_hurt(reference: Path) -> None:
    """Other draws than the ledger's: latency no worse than the forecast's by more than 0.3 points in the mean, power
    better by a point at least. Before, the eight rows made latency worse in one draw of five."""
    gpu = hardware.load(GPU)
    bundle = bundle_for(gpu)
    kept = [as_measured(r, gpu) for r in clean(rows(reference, "900")) if r.model != "resnet101"]
    analysed, draw = rows_of(kept, gpu, bundle), np.random.default_rng(100)
    true = np.array([[m.latency_s for m in kept], [m.power_w for m in kept]])
    plain = np.abs(np.array(predict(analysed, {}, gpu, bundle)) / true - 1)
    change = []
    for _ in range(30):
        chosen = draw.choice(len(kept), 8, replace=False).tolist()
        factors = calibrate_rows([analysed[i] for i in chosen], gpu, bundle, "drawn").factors
        rest = np.setdiff1d(np.arange(len(kept)), chosen)
        said = np.array(predict([analysed[i] for i in rest], factors, gpu, bundle))
        change.append((np.abs(said / true[:, rest] - 1) - plain[:, rest]).mean(axis=1))
    latency, power = np.mean(change, axis=0)
    assert latency < 0.003
    assert power < -0.01
