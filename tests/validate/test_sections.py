"""Sections of the ledger beside the kernels: what is long is kept, what is missing says so, ablations ablate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattcast import hardware
from wattcast.fit import kernels_data
from wattcast.fit.kernels import idle_curve
from wattcast.report import validation
from wattcast.validate import ablations, ledger, published, store
from wattcast.validate import ledger as whole
from wattcast.validate.cases import NEAR, cases
from wattcast.validate.kinds import KINDS, of_profile
from wattcast.validate.layers import layer_rows
from wattcast.validate.ledger import held_out
from wattcast.validate.power_baselines import power_rows
from wattcast.validate.rows import Row, row
from wattcast.validate.walltime import wall_rows


def test_long_sections_are_named_until_they_are_made(elsewhere: dict[str, str]) -> None:
    rows = {r["set"]: r for r in ledger(variables=elsewhere)}
    assert "--ablations" in rows["h200 ablations"]["missing"]
    assert "--ablations" in rows["Titan X clock plane"]["missing"]
    assert "WATTCAST_REFERENCE" in rows["simulator power traces"]["missing"]
    assert rows["h200 whole models, GPU-bound"]["n"] >= 0


def counted() -> tuple[list[int], Callable[[], list[Row]]]:
    made: list[int] = []

    def make() -> list[Row]:
        made.append(1)
        return [row("a set", "a quantity", len(made), 1.25)]

    return made, make


def test_a_long_section_is_made_once_and_kept(elsewhere: dict[str, str]) -> None:
    made, make = counted()
    assert not store.seen("x", elsewhere)
    first = store.kept("x", make, elsewhere)
    assert store.seen("x", elsewhere)
    assert store.kept("x", make, elsewhere) == first
    assert len(made) == 1
    assert store.kept("x", make, elsewhere, again=True) != first
    assert len(made) == 2


def test_half_a_file_is_made_again(elsewhere: dict[str, str]) -> None:
    made, make = counted()
    store.kept("x", make, elsewhere)
    (path,) = store.folder(elsewhere).glob("x-*.json")
    path.write_text('{"rows": [')
    assert store.kept("x", make, elsewhere)[0]["n"] == 2
    assert len(made) == 2


def test_asking_for_ablations_runs_every_long_section(
    elsewhere: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ablations, "long_rows", lambda gpu, held, tell: [row(f"{gpu} ablations, latency", "x", 1, 2.0)]
    )
    said: list[str] = []
    rows = whole(tell=said.append, long=True, variables=elsewhere)
    sets = {r["set"] for r in rows}
    assert {"h200 ablations, latency", "h200 ablations, power at measured time and clock"} <= sets
    assert "wall time of one prediction" in sets
    assert any("working" in text for text in said)
    for section in ("ablations-h200", "titanx", "v100"):
        assert store.seen(section, elsewhere)


def test_leaving_parts_out_costs_accuracy() -> None:
    found = {r["quantity"]: r["mape"] for r in ablations.quick_rows("h200", held_out("h200"))}
    full = found.pop("full model")
    found.pop("tile oracle: the kernels that ran")
    assert len(found) == 2
    assert all(error > 2 * full for error in found.values())


def test_module_power_beats_simpler_models_at_equal_time_and_clock() -> None:
    chip = hardware.load("h200")
    rows = power_rows(kernels_data.load("h200"), chip, idle_curve(kernels_data.idle("h200"), chip))
    ours, alpha, rate = (r["mape"] for r in rows)
    assert ours < rate
    assert ours < alpha
    assert rows[0]["n"] > 300


def test_altered_rows_keep_everything_else() -> None:
    rows = kernels_data.load("h200")
    reported = ablations._reported(rows)
    known = np.isfinite(rows.of("effective_clock_hz")) & np.isfinite(rows.of("sm_clock_hz"))
    np.testing.assert_array_equal(reported.of("effective_clock_hz")[known], rows.of("sm_clock_hz")[known])
    np.testing.assert_array_equal(reported.of("latency_s"), rows.of("latency_s"))


def test_the_oracle_of_the_cross_validation_is_taken_where_it_is() -> None:
    held = held_out("h200")
    known = replace(held, oracle_latency_s=np.where(held.fold == 0, held.latency_s, np.nan))
    found = ablations._oracle("a set", known)
    assert found["mape"] == 0.0
    assert found["n"] == (held.fold == 0).sum()
    assert found["floor"] > 5.0


def test_a_refit_is_compared_on_its_own_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that gives the truth has no error; the full model's error beside it is of the same folds."""
    rows, held = kernels_data.load("h200"), held_out("h200")
    monkeypatch.setattr(ablations, "fit_rows", lambda rows, gpu, idle: None)
    monkeypatch.setattr(
        ablations,
        "predict_rows",
        lambda fit, some, gpu: np.column_stack([some.of("latency_s"), some.of("power_w"), some.of("sm_clock_hz")]),
    )
    chip = hardware.load("h200")
    latency, _, power, clock = ablations._refitted("h200", "x", rows, held, chip, None, lambda _: None)
    assert latency["mape"] == 0.0
    assert power["mape"] < 3.0  # settled power beside that of the window
    assert clock["n"] == power["n"]
    inside = np.isin(held.fold, ablations.FOLDS) & validation._kind(held, "burst")
    assert latency["n"] == inside.sum()
    assert latency["floor"] == pytest.approx(
        100 * np.mean(np.abs(held.predicted_latency_s / held.latency_s - 1)[inside]), abs=0.01
    )


def test_pairs_of_equal_latency_differ_in_power_as_the_rule_says() -> None:
    found = cases("h200", held_out("h200"))
    assert found.imbalance
    assert found.reuse
    for a, b in (*found.imbalance, *found.reuse):
        assert abs(b.latency_s / a.latency_s - 1) < NEAR
        assert b.power_w > a.power_w
    few, many = found.imbalance[0]
    assert few.tiles < many.tiles <= 132
    assert many.power_w - few.power_w > 96.0  # the paper's own pair differs by 96 W
    assert many.predicted_w - few.predicted_w > 0.5 * (many.power_w - few.power_w)
    assert all(b.memory_w > a.memory_w + 20 for a, b in found.reuse)


def test_held_out_rows_of_another_database_are_refused() -> None:
    held = held_out("h200")
    with pytest.raises(Exception, match="Fit again"):
        cases("h200", replace(held, work=held.work[:-1]))


def test_kinds_of_a_profile() -> None:
    names = ["nvjet_sm90_tst", "void softmax_warp_forward", "void elementwise_kernel", "void reduce_kernel<512>"]
    profile = {"names": names, "order": [0, 1, 2, 3, 0], "kernel_s": [2.0, 1.0, 3.0, 1.0, 3.0]}
    assert of_profile("x", profile).share == pytest.approx({"GEMM-like": 0.5, "reduction": 0.2, "elementwise": 0.3})


def test_shares_add_up() -> None:
    for entry in validation.shares("h200"):
        assert sum(entry.share.values()) == pytest.approx(1.0)
        assert entry.share["GEMM-like"] > 0.2
        assert set(entry.share) == set(KINDS)


def test_a_prediction_is_faster_than_profiling_by_far() -> None:
    for found in wall_rows("h200"):
        assert found["profiling_over_ours"] > 100


def test_a_figure_shows_each_pair() -> None:
    found = cases("h200", held_out("h200"))
    figure = validation.equal_latency(found, "h200")
    left, right = figure.axes
    assert len(left.patches) == 2 * len(found.imbalance)
    assert len(right.patches) == 2 * len(found.reuse)
    assert left.get_xlabel() == "Power (W)"


@pytest.mark.slow
def test_every_figure_is_drawn(tmp_path: Path) -> None:
    made = validation.save_all(tmp_path)
    assert {path.stem for path in made} >= {
        "validation-latency",
        "validation-power",
        "validation-size",
        "validation-kinds",
        "validation-equal-latency",
    }
    assert all(path.stat().st_size > 20_000 for path in made)


def test_component_sets_meet_their_goals(reference: Path) -> None:
    traces = published.component_rows(reference, lambda _: None)
    assert traces[0]["worst_w"] <= traces[0]["must"]
    refined = next(r for r in traces if "AccelWattch" in r["set"] and r["floor"])
    assert refined["mape"] < refined["floor"]


@pytest.mark.slow
def test_counter_models_meet_their_goals(reference: Path) -> None:
    titanx, v100 = (make(reference, lambda _: None) for make in (published.titanx_rows, published.v100_rows))
    for found in (*titanx[:2], v100[0]):
        assert found["mape"] <= found["must"]


def test_layers_are_in_the_ledger_and_the_law_beats_the_sum_of_operators() -> None:
    (found,) = layer_rows("h200")
    assert found["n"] >= 36
    assert found["mape"] < 0.5 * found["floor"]
