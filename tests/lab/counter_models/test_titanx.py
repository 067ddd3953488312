"""The Titan X clock plane: 102 microbenchmarks, 16 core and 4 memory clocks, utilisations at the
defaults only.

Every error is on benchmarks never used for fitting or choosing. The quick tests hold out four parts
of the benchmarks instead of each one and choose between two scalings of activity instead of four;
the slow one leaves each benchmark out in turn, as the ledger reports it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.lab.counter_models import gpmtool_files
from wattcast.lab.counter_models.counter_fit import (
    MEMORY_SATURATIONS,
    CounterFit,
    CounterFitOptions,
    fit_counters,
    predict_applications,
    predict_programs,
    read_counter_tables,
)
from wattcast.lab.counter_models.counter_fit_report import counter_fit_to_plain
from wattcast.lab.counter_models.fitted_power_model import make_power_model
from wattcast.lab.counter_models.gpmtool_files import application_activity
from wattcast.lab.counter_models.model_selection import FitSettings, FitWorkbench
from wattcast.lab.counter_models.rail_terms import CounterModelKind

TABLE = "titanx/micro_gtxtitanx.csv"


@pytest.fixture(scope="module")
def quick(titanx: gpmtool_files.UtilisationFile) -> CounterFit:
    return fit_counters(
        {
            str(s): gpmtool_files.make_utilisation_table(titanx, s)
            for s in MEMORY_SATURATIONS
            if s in (None, 0.8)
        },
        CounterFitOptions(folds=4, hold=()),
    )


def published_voltage(reference: Path) -> tuple[np.ndarray, np.ndarray]:
    """Core clocks and relative core voltages that the authors' own tool fitted."""
    lines = (reference / "titanx" / "model_gtxtitanx.csv").read_text().splitlines()
    return np.array(lines[4].split(","), float) * 1e6, np.array(lines[7].split(","), float)


def test_the_file_is_what_it_is_said_to_be(titanx: gpmtool_files.UtilisationFile) -> None:
    table = gpmtool_files.make_utilisation_table(titanx, None)
    assert (table.rows, table.benchmarks, len(table.predictors)) == (6528, 102, 12)
    assert (np.bincount(table.benchmark) == 64).all()


def test_unseen_benchmarks(quick: CounterFit) -> None:
    held = quick.kinds[CounterModelKind.HYBRID].held_out["benchmark"]
    assert held.score.mape <= 5.8
    assert held.anchored is not None
    assert held.anchored.mape <= 1.2  # 3.0 was the aim; a rise above this is a regression


def test_the_hybrid_beats_a_linear_model_with_clock_terms(quick: CounterFit) -> None:
    def error(model: CounterModelKind) -> float:
        return quick.kinds[model].held_out["benchmark"].score.mape

    assert error(CounterModelKind.HYBRID) <= error(CounterModelKind.LINEAR) - 2.0
    assert (
        error(CounterModelKind.LINEAR)
        < error(CounterModelKind.ALPHA_C)
        < error(CounterModelKind.RATE)
    )


def test_the_inferred_core_voltage_agrees_with_the_published_fit(
    quick: CounterFit, reference: Path
) -> None:
    """The authors fit one V(f) for all memory clocks, so the one-curve fit is what compares."""
    core = next(rail for rail in quick.rails if rail.rail == "core")
    clocks, wanted = published_voltage(reference)
    assert_allclose(core.clock_hz, clocks)
    assert np.abs(core.relative - wanted).max() <= 0.015
    assert core.identifiable


def test_the_memory_voltage_is_said_to_be_unknown(quick: CounterFit) -> None:
    memory = next(rail for rail in quick.rails if rail.rail == "memory")
    assert not memory.identifiable
    assert "810 MHz" in memory.reason
    assert any("memory rail" in words for words in quick.warnings)


def test_the_core_voltage_has_a_floor_set_by_the_memory_clock(quick: CounterFit) -> None:
    """At 810 MHz of memory the voltage falls by 10 % below the default clock, at 3300 and more by
    nothing.
    """
    hybrid = quick.kinds[CounterModelKind.HYBRID]
    assert hybrid.settings.floored
    curve, _ = hybrid.fit.how.curves(hybrid.fit.inferred.theta)
    assert curve.level_at(595e6, 810e6) < 0.92
    assert curve.level_at(595e6, 3505e6) > 0.99


def test_a_quarter_of_the_clocks_is_enough(quick: CounterFit) -> None:
    said = counter_fit_to_plain(quick)["training_clocks"]
    assert said["enough"] <= 16


def test_the_model_file_predicts_what_the_fit_predicts(
    titanx: gpmtool_files.UtilisationFile, quick: CounterFit
) -> None:
    hybrid = quick.kinds[CounterModelKind.HYBRID]
    first = [
        int(np.flatnonzero(quick.table.benchmark == b)[0]) for b in range(quick.table.benchmarks)
    ]
    names = quick.table.benchmark_names
    work = replace(titanx, names=names, share=titanx.share[first])
    plane = np.array([row["power_w"] for row in predict_applications(quick, work)])
    core, memory = np.unique(quick.table.clock_hz), np.unique(quick.table.memory_clock_hz)
    at = (
        np.searchsorted(core, quick.table.clock_hz),
        np.searchsorted(memory, quick.table.memory_clock_hz),
    )
    assert_allclose(plane[quick.table.benchmark, at[0], at[1]], hybrid.predicted_w, rtol=1e-9)


def test_programs_over_the_clock_plane_are_predicted_by_models_of_microbenchmarks(
    quick: CounterFit, reference: Path
) -> None:
    """Eight programs that both files name: 20 % off, nearly the same at all clocks of a program."""
    work = gpmtool_files.read_applications(reference / "titanx" / "real_gtxtitanx.csv")
    measured = gpmtool_files.read_measured_programs(
        reference / "titanx" / "real_time_power_by_clock.csv"
    )
    tested = predict_programs(quick, work, measured).tested
    assert tested is not None
    assert (len(set(tested.names)), len(tested.names)) == (8, 256)
    errors = [tested.mape(kind) for kind in CounterModelKind]
    assert errors == sorted(errors, reverse=True)  # rate, linear, switched capacitance, hybrid
    assert errors[-1] < 22.0


def test_the_plain_fit_takes_the_scaling_it_is_given(titanx: gpmtool_files.UtilisationFile) -> None:
    table = gpmtool_files.make_utilisation_table(titanx, 0.8)
    bench = FitWorkbench({"0.8": table})
    fit = bench.fit(
        CounterModelKind.HYBRID,
        FitSettings("0.8", floored=True),
        np.ones(table.benchmarks, dtype=bool),
    )
    model = make_power_model(fit, table)
    work = replace(titanx, names=("idle",), share=np.zeros((1, 12)))
    idle_w = model.power(
        application_activity(work, table.scaling, np.array([975e6]), np.array([3505e6]))
    )
    assert_allclose(idle_w.total_w, 75.5, rtol=0.05)  # measured: 75.5 W


@pytest.mark.slow
def test_every_benchmark_left_out_in_turn(reference: Path) -> None:
    """The figures of the accuracy ledger: must 6.5, 3.5, 8.5 and 1 point; aims 5.8, 3.0, 7.5 and 2
    points.

    12 Ward clusters, one a predictor, make whole kinds of work unseen: all shared-memory
    benchmarks, or all that multiply in fp64."""
    result = fit_counters(
        read_counter_tables(reference / TABLE, "gpmtool", None), CounterFitOptions(advice=False)
    )
    hybrid = result.kinds[CounterModelKind.HYBRID].held_out
    linear = result.kinds[CounterModelKind.LINEAR].held_out["benchmark"].score.mape
    assert hybrid["benchmark"].score.mape <= 5.8
    assert hybrid["benchmark"].anchored is not None
    assert hybrid["benchmark"].anchored.mape <= 3.0
    assert result.clusters == 12
    assert hybrid["cluster"].score.mape <= 7.5
    assert hybrid["cluster"].anchored is not None
    assert hybrid["cluster"].anchored.mape <= 3.0
    assert linear - hybrid["benchmark"].score.mape >= 2.0
    assert_allclose(linear, 7.6, atol=0.1)  # the floor that the ledger states
