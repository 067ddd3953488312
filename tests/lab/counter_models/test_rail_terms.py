"""Voltage inference on rows whose voltages are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_tables import CORE_HZ, MEMORY_HZ, activity_of, anchored_w, made_table, tegra_table, truth
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput
from wattcast.lab.counter_models.counter_fit import CounterFitOptions, fit_counters
from wattcast.lab.counter_models.fit_diagnostics import diagnose_fit
from wattcast.lab.counter_models.fitted_power_model import make_power_model
from wattcast.lab.counter_models.model_selection import CostEstimator, FitSettings, FitWorkbench
from wattcast.lab.counter_models.rail_terms import CounterModelKind


def fitted(
    floored: bool, noise: float = 0.0, estimator: CostEstimator = CostEstimator.NON_NEGATIVE
):
    table = made_table(noise, floored)
    bench = FitWorkbench({"made": table}, estimator)
    everyone = np.ones(table.benchmarks, dtype=bool)
    fit = bench.fit(
        CounterModelKind.HYBRID, FitSettings("made", floored=floored, strength=0.0), everyone
    )
    return table, bench, fit, everyone


@pytest.mark.parametrize("floored", [False, True])
def test_voltages_and_costs_are_found_again(floored: bool) -> None:
    _, _, fit, _ = fitted(floored)
    assert fit.inferred.converged
    core, memory = fit.how.curves(fit.inferred.theta)
    wanted = truth(floored).rails[0].voltage
    clocks, others = (a.ravel() for a in np.meshgrid(CORE_HZ, MEMORY_HZ))
    assert_allclose(core.level_at(clocks, others), wanted.level_at(clocks, others), atol=2e-3)
    assert_allclose(memory.level, 1.0, atol=2e-3)
    found = dict(zip(fit.terms.names, fit.coefficient, strict=True))
    for event, cost in (
        ("int_busy_cycle", 4e-8),
        ("l2_busy_cycle", 2.5e-8),
        ("dram_busy_cycle", 1.5e-8),
    ):
        assert_allclose(found[event], cost, rtol=0.01)


def test_the_same_floor_is_missed_by_one_curve() -> None:
    """A single V(f) for all memory clocks cannot follow a floor: its squares are far larger."""
    _, bench, floored, everyone = fitted(True, noise=0.002)
    pooled = bench.fit(
        CounterModelKind.HYBRID, FitSettings("made", floored=False, strength=0.0), everyone
    )
    assert pooled.inferred.squares > 10 * floored.inferred.squares


def test_the_built_model_predicts_what_the_fit_predicts() -> None:
    table, bench, fit, _ = fitted(True, noise=0.02)
    model = make_power_model(fit, table)
    assert_allclose(model.power(activity_of(table)).total_w[:, 0], bench.predict(fit), rtol=1e-9)


def test_anchored_rows_equal_the_models_own_anchoring() -> None:
    from wattcast.hardware import OperatingPoint
    from wattcast.power.activity import Activity, ActivitySource
    from wattcast.power.hybrid_rail import HybridRail

    table, bench, fit, _ = fitted(True, noise=0.02)
    model = make_power_model(fit, table)
    assert isinstance(model, HybridRail)
    assert bench.anchor is not None
    whole = activity_of(table)
    rows = bench.anchor[table.benchmark]
    at = OperatingPoint(
        table.clock_hz[rows][:, None], memory_clock_hz=table.memory_clock_hz[rows][:, None]
    )
    reference = Activity(
        whole.duration_s, whole.value[rows], whole.events, at, ActivitySource.PROFILED
    )
    wanted = anchored_w(model, whole, reference, table.power_w[rows][:, None])[:, 0]
    assert_allclose(bench.anchored(fit), wanted, rtol=1e-9)


def test_huber_shrugs_off_spoiled_rows_that_mislead_plain_squares() -> None:
    table = made_table(0.005)
    spoiled = table.power_w.copy()
    spoiled[::17] *= 1.6
    table = replace(table, power_w=spoiled)
    everyone = np.ones(table.benchmarks, dtype=bool)
    settings = FitSettings("made", strength=0.0)
    errors = {}
    for estimator in (CostEstimator.NON_NEGATIVE, CostEstimator.HUBER):
        fit = FitWorkbench({"made": table}, estimator).fit(
            CounterModelKind.HYBRID, settings, everyone
        )
        found = dict(zip(fit.terms.names, fit.coefficient, strict=True))
        errors[estimator] = abs(found["int_busy_cycle"] / 4e-8 - 1.0)
    assert errors[CostEstimator.HUBER] < 0.02
    assert errors[CostEstimator.HUBER] < errors[CostEstimator.NON_NEGATIVE] / 2


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Clustered 95 % intervals over 40 noisy tables, errors shared by each benchmark's rows."""
    inside = total = 0
    for seed in range(40):
        table = made_table(0.0, seed=seed, benchmarks=30)
        rng = np.random.default_rng(1000 + seed)
        missed = 1.0 + 0.03 * rng.standard_normal(table.benchmarks)
        table = replace(table, power_w=table.power_w * missed[table.benchmark])
        bench = FitWorkbench({"made": table})
        everyone = np.ones(table.benchmarks, dtype=bool)
        fit = bench.fit(CounterModelKind.HYBRID, FitSettings("made", strength=0.0), everyone)
        for c in diagnose_fit(fit, table, everyone).coefficients:
            wanted = {
                "int_busy_cycle": 4e-8,
                "l2_busy_cycle": 2.5e-8,
                "shared_busy_cycle": 3e-8,
            }.get(c.name)
            if wanted is not None:
                inside, total = inside + (c.low <= wanted <= c.high), total + 1
    assert 0.85 <= inside / total <= 1.0, f"{inside} of {total}"


def test_a_clock_that_never_changes_leaves_its_voltage_unknown_and_says_so() -> None:
    whole = made_table(0.01)
    kept = whole.memory_clock_hz == 2000e6
    table = replace(
        whole,
        power_w=whole.power_w[kept],
        clock_hz=whole.clock_hz[kept],
        memory_clock_hz=whole.memory_clock_hz[kept],
        occurrence=whole.occurrence[kept],
        benchmark=whole.benchmark[kept],
    )
    result = fit_counters(
        {"made": table}, CounterFitOptions(models=(CounterModelKind.HYBRID,), folds=3, advice=False)
    )
    memory = next(rail for rail in result.rails if rail.rail == "memory")
    assert not memory.identifiable
    assert "never changes" in memory.reason
    assert any("memory clock is the same in every row" in words for words in result.warnings)
    assert all(
        c.name != "memory clock"
        for c in result.kinds[CounterModelKind.HYBRID].diagnosis.coefficients
    )


def test_measured_volts_are_used_instead_of_inferred_ones() -> None:
    table = made_table()
    volts = truth().rails[0].voltage.level_at(table.clock_hz)
    table = replace(table, voltage_v={"core": volts, "memory": np.ones(table.rows)})
    bench = FitWorkbench({"made": table}, CostEstimator.ORDINARY)
    everyone = np.ones(table.benchmarks, dtype=bool)
    fit = bench.fit(CounterModelKind.HYBRID, FitSettings("made", strength=0.0), everyone)
    assert fit.inferred.theta.size == 0
    found = dict(zip(fit.terms.names, fit.coefficient, strict=True))
    assert_allclose(found["core leakage"], 12.0, rtol=1e-6)
    assert_allclose(found["base"], 20.0, rtol=1e-6)
    assert_allclose(found["core clock"], 8e-9, rtol=1e-6)
    assert_allclose(
        make_power_model(fit, table).power(activity_of(table)).total_w[:, 0],
        table.power_w,
        rtol=1e-9,
    )


def test_the_published_tegra_model_is_found_again_from_rows_it_would_draw() -> None:
    """Section 5.2: ordinary least squares over all benchmarks and clocks, three rails, offsets at
    204 and 300 MHz.

    Only the leakage of the low-power core cannot be found: its voltage never moves, so it is part
    of the base power, as the paper says of the memory rail."""
    table, model = tegra_table()
    bench = FitWorkbench({"tegra": table}, CostEstimator.ORDINARY, (204e6, 300e6))
    fit = bench.fit(
        CounterModelKind.HYBRID,
        FitSettings("tegra", offset=True, strength=0.0),
        np.ones(table.benchmarks, dtype=bool),
    )
    found = dict(zip(fit.terms.names, fit.coefficient, strict=True))
    for rail in model.rails:
        for event, wanted in rail.event_f.items():
            assert_allclose(found[event], wanted, rtol=1e-4, err_msg=event)
    assert_allclose(found["core clock"], 2.10e-9, rtol=1e-4)
    assert_allclose(found["core leakage"], 0.27, rtol=1e-4)
    assert_allclose(found["memory clock"], 258.66e-12, rtol=1e-4)
    assert_allclose(found["memory offset 204 MHz"], -0.03, rtol=1e-3)
    assert_allclose(found["memory offset 300 MHz"], 0.05, rtol=1e-3)
    assert_allclose(found["base"], 0.78 + 0.79 * 1.05, rtol=1e-4)
    assert "host leakage" not in found
    activity = activity_of(table)
    assert_allclose(
        make_power_model(fit, table).power(activity).total_w,
        model.power(activity).total_w,
        rtol=1e-6,
    )


def test_an_offset_at_a_clock_that_was_not_measured_is_refused() -> None:
    with pytest.raises(
        BadInput, match=r"a memory clock of the table \(800, 2000, 3000 MHz\), got '810 MHz'"
    ):
        FitWorkbench({"made": made_table()}, offset_hz=(810e6,))
