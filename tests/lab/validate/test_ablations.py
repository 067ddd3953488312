"""Ablations: leaving parts of the model out costs accuracy, and each is compared on its own rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wattcast import hardware
from wattcast.calibrate import kernel_rows
from wattcast.lab.fit.database_fit import load_held_out
from wattcast.lab.fit.kernel_fit import fit_idle_curve
from wattcast.lab.validate.long_checks import ablations
from wattcast.lab.validate.long_checks.ablations import power_rows, prediction_time_rows


@pytest.mark.slow
def test_leaving_parts_out_costs_accuracy() -> None:
    found = {r["quantity"]: r["mape"] for r in ablations.quick_rows("h200", load_held_out("h200"))}
    full = found.pop("full model")
    found.pop("tile oracle: the kernels that ran")
    assert len(found) == 2
    assert all(error > 2 * full for error in found.values())


@pytest.mark.slow
def test_module_power_beats_simpler_models_at_equal_time_and_clock() -> None:
    chip = hardware.load_gpu("h200")
    rows = power_rows(
        kernel_rows.load_kernel_rows("h200"),
        chip,
        fit_idle_curve(kernel_rows.load_idle_rows("h200"), chip),
    )
    ours, alpha, rate = (r["mape"] for r in rows)
    assert ours < rate
    assert ours < alpha
    assert rows[0]["n"] > 300


def test_altered_rows_keep_everything_else() -> None:
    rows = kernel_rows.load_kernel_rows("h200")
    reported = ablations._reported(rows)
    known = np.isfinite(rows.column("effective_clock_hz")) & np.isfinite(rows.column("sm_clock_hz"))
    np.testing.assert_array_equal(
        reported.column("effective_clock_hz")[known], rows.column("sm_clock_hz")[known]
    )
    np.testing.assert_array_equal(reported.column("latency_s"), rows.column("latency_s"))


def test_the_oracle_of_the_cross_validation_is_taken_where_it_is() -> None:
    held = load_held_out("h200")
    known = replace(held, oracle_latency_s=np.where(held.fold == 0, held.latency_s, np.nan))
    found = ablations._oracle("a set", known)
    assert found["mape"] == 0.0
    assert found["n"] == (held.fold == 0).sum()
    assert found["floor"] > 5.0


def test_a_refit_is_compared_on_its_own_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that gives the truth has no error; the full model's error beside it is of the same
    folds.
    """
    rows, held = kernel_rows.load_kernel_rows("h200"), load_held_out("h200")
    monkeypatch.setattr(ablations, "fit_kernel_rows", lambda rows, gpu, idle: None)
    monkeypatch.setattr(
        ablations,
        "predict_with_fit",
        lambda fit, some, gpu: np.column_stack(
            [some.column(name) for name in ("latency_s", "power_w", "sm_clock_hz", "power_w")]
        ),
    )
    chip = hardware.load_gpu("h200")
    latency, _, power, clock = ablations._refitted(
        "h200", "x", rows, held, chip, None, lambda _: None
    )
    assert latency["mape"] == 0.0
    assert power["mape"] < 3.0  # settled power beside that of the window
    assert clock["n"] == power["n"]
    inside = np.isin(held.fold, ablations.FOLDS) & held.is_random("burst")
    assert latency["n"] == inside.sum()
    assert latency["floor"] == pytest.approx(
        100 * np.mean(np.abs(held.predicted_latency_s / held.latency_s - 1)[inside]), abs=0.01
    )


def test_a_prediction_is_faster_than_profiling_by_far() -> None:
    for found in prediction_time_rows("h200"):
        assert found["profiling_over_ours"] > 100
