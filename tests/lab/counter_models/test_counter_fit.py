"""Least squares, shrinkage, splits, diagnosis and advice on tables with known answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tables import made_table
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput
from wattcast.lab.counter_models.counter_fit import CounterFitOptions, fit_counters
from wattcast.lab.counter_models.fit_diagnostics import (
    diagnose_fit,
    smallest_sufficient_clocks,
    try_training_clocks,
)
from wattcast.lab.counter_models.model_selection import (
    CostEstimator,
    FitSettings,
    FitWorkbench,
    choose_settings,
    cluster_benchmarks,
    deal_folds,
    deal_inner_folds,
    predict_held_out,
)
from wattcast.lab.counter_models.rail_terms import (
    CounterModelKind,
    check_rank,
    family_penalty,
    solve_costs,
)


def everyone(table) -> np.ndarray:
    return np.ones(table.benchmarks, dtype=bool)


@given(st.integers(0, 10_000))
def test_free_least_squares_equals_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((20, 4)), rng.standard_normal(20)
    found = solve_costs(x.T @ x, x.T @ y, [True] * 4)
    assert_allclose(found, np.linalg.lstsq(x, y, rcond=None)[0], rtol=1e-6, atol=1e-8)


@given(st.integers(0, 10_000))
def test_non_negative_least_squares_meets_its_conditions(seed: int) -> None:
    """Karush-Kuhn-Tucker: no coefficient below zero, no gradient that would still help."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((20, 4)), rng.standard_normal(20)
    found = solve_costs(x.T @ x, x.T @ y, [False, False, True, False])
    slope = x.T @ (x @ found - y)
    bound = np.array([True, True, False, True])
    assert (found[bound] >= 0).all()
    assert_allclose(slope[(found > 0) | ~bound], 0.0, atol=1e-6)
    assert (slope[bound & (found == 0)] >= -1e-6).all()


def test_a_singular_design_names_its_columns() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 3))
    x = np.column_stack([x, 2.0 * x[:, 1]])
    with pytest.raises(BadInput, match="singular design: b, d move together"):
        check_rank(x.T @ x, ["a", "b", "c", "d"], "t.csv")
    with pytest.raises(BadInput, match="b: zero in every row"):
        check_rank(np.diag([1.0, 0.0]), ["a", "b"], "t.csv")


def test_a_fit_of_aliased_counters_is_refused_by_name() -> None:
    table = made_table(0.01)
    value = table.occurrence.copy()
    value[:, 1] = 3.0 * value[:, 0]
    with pytest.raises(BadInput, match="int_busy_cycle, l2_busy_cycle move together"):
        fit_counters(
            {"made": replace(table, occurrence=value)},
            CounterFitOptions(models=(CounterModelKind.RATE,), folds=3),
        )


def test_ordinary_least_squares_says_that_a_cost_is_negative() -> None:
    table = made_table(0.0)
    spoiled = table.power_w - 1.2e-8 * table.occurrence[:, 2] - 3e-8 * table.occurrence[:, 2]
    table = replace(table, power_w=np.maximum(spoiled, 5.0))
    bench = FitWorkbench({"made": table}, CostEstimator.ORDINARY)
    settings = FitSettings("made", strength=0.0)
    words = diagnose_fit(
        bench.fit(CounterModelKind.RATE, settings, everyone(table)), table, everyone(table)
    ).warnings
    assert any("Negative" in w and "shared_busy_cycle" in w for w in words)
    held = FitWorkbench({"made": table}).fit(CounterModelKind.RATE, settings, everyone(table))
    diagnosis = diagnose_fit(held, table, everyone(table))
    assert min(c.value for c in diagnosis.coefficients) >= 0.0
    assert any("Held at zero" in w and "shared_busy_cycle" in w for w in diagnosis.warnings)


def test_collinear_counters_are_warned_of() -> None:
    table = made_table(0.01)
    value = table.occurrence.copy()
    value[:, 1] = value[:, 0] * (1.0 + 0.02 * np.random.default_rng(1).standard_normal(table.rows))
    table = replace(table, occurrence=value)
    fit = FitWorkbench({"made": table}).fit(
        CounterModelKind.RATE, FitSettings("made", strength=0.0), everyone(table)
    )
    found = diagnose_fit(fit, table, everyone(table))
    assert found.condition > 30
    assert any("Variance inflation" in w and "int_busy_cycle" in w for w in found.warnings)
    assert {c.name for c in found.coefficients if (c.vif or 0) > 10} == {
        "int_busy_cycle",
        "l2_busy_cycle",
    }


def test_standard_errors_equal_the_textbook_on_independent_rows() -> None:
    """One row a benchmark and equal weights: the sandwich is White's HC0 with n/(n-1)."""
    rng = np.random.default_rng(5)
    n = 60
    whole = made_table(benchmarks=n)
    kept = (whole.clock_hz == 1000e6) & (whole.memory_clock_hz == 2000e6)
    rate = rng.uniform(0, 1e9, (n, 4))
    power_w = 50.0 + rate @ np.array([4e-8, 2e-8, 3e-8, 1e-8]) + rng.standard_normal(n)
    table = replace(
        whole,
        power_w=power_w,
        clock_hz=whole.clock_hz[kept],
        memory_clock_hz=whole.memory_clock_hz[kept],
        occurrence=rate,
        benchmark=np.arange(n),
    )
    bench = FitWorkbench({"made": table}, CostEstimator.ORDINARY)
    fit = bench.fit(CounterModelKind.RATE, FitSettings("made", strength=0.0), everyone(table))
    found = diagnose_fit(fit, table, everyone(table)).coefficients
    x = np.column_stack([np.ones(n), rate]) / power_w[:, None]
    error = 1.0 - x @ fit.coefficient
    bread = np.linalg.inv(x.T @ x)
    wanted = np.sqrt(np.diag(bread @ (x.T * error**2) @ x @ bread) * n / (n - 1))
    assert_allclose([c.standard_error for c in found], wanted, rtol=1e-5)
    centred = rate / power_w[:, None]
    centred = centred - np.outer(1 / power_w, (1 / power_w) @ centred / (1 / power_w**2).sum())
    inflation = np.diag(np.linalg.inv(_uncentred(centred)))
    assert_allclose([c.vif for c in found[1:]], inflation, rtol=1e-5)


def _uncentred(x: np.ndarray) -> np.ndarray:
    size = np.sqrt((x**2).sum(axis=0))
    return (x.T @ x) / size / size[:, None]


def test_shrinkage_pulls_to_family_then_rail() -> None:
    form = family_penalty(("a", "a", "b"))
    assert_allclose(form, form.T)
    assert_allclose(form @ np.ones(3), 0.0, atol=1e-12)  # equal costs are free
    within, between = np.array([1.0, -1.0, 0.0]), np.array([1.0, 1.0, -2.0])
    assert within @ form @ within > 0
    assert between @ form @ between > 0


def test_a_unit_that_training_never_used_gets_the_cost_of_its_kin() -> None:
    table = made_table(0.0, benchmarks=20)
    without = np.array(
        [not table.occurrence[table.benchmark == b, 1].any() for b in range(table.benchmarks)]
    )
    assert 3 < without.sum() < table.benchmarks
    bench = FitWorkbench({"made": table})
    costs = {}
    for strength in (0.0, 1.0):
        fit = bench.fit(CounterModelKind.HYBRID, FitSettings("made", strength=strength), without)
        costs[strength] = dict(zip(fit.terms.names, fit.coefficient, strict=True))["l2_busy_cycle"]
    assert costs[0.0] == 0.0
    assert 3e-8 < costs[1.0] < 4e-8  # between shared memory (3e-8) and integer units (4e-8)


def test_folds_split_whole_labels_and_cover_each_once() -> None:
    labels = np.array([0, 0, 1, 2, 2, 3])
    for folds in (deal_folds(labels), deal_folds(labels, 3)):
        assert (np.sum(folds, axis=0) == 1).all()
        for fold in folds:
            assert all(
                fold[labels == label].min() == fold[labels == label].max() for label in range(4)
            )
    with pytest.raises(BadInput, match="at least two"):
        deal_folds(np.zeros(3, dtype=np.int64), 2)


def test_clusters_put_like_work_together() -> None:
    features = np.concatenate([np.zeros((4, 2)), np.ones((4, 2))]) + 0.01 * np.arange(16).reshape(
        8, 2
    )
    found = cluster_benchmarks(features, 2)
    assert len(set(found[:4])) == len(set(found[4:])) == 1
    assert found[0] != found[7]
    with pytest.raises(BadInput, match="2 to 8"):
        cluster_benchmarks(features, 9)


def test_inner_folds_never_touch_what_is_held_out() -> None:
    labels = np.arange(9) // 3
    train = labels != 1
    folds = deal_inner_folds(labels, train)
    assert all(not (fold & ~train).any() for fold in folds)
    assert (np.sum(folds, axis=0)[train] == 1).all()


def test_held_out_rows_do_not_reach_their_own_prediction() -> None:
    """Spoil the power of one benchmark at all but the default clocks: its own prediction must not
    move.

    It once did: the shrinkage was scaled by the mean power of all rows, the held-out ones among
    them."""
    table = made_table(0.02, benchmarks=9)
    spoiled = table.power_w.copy()
    spoiled[(table.benchmark == 5) & ~table.at_default()] *= 3.0
    labels = np.arange(table.benchmarks) % 3  # three parts, each held out in turn
    first = predict_held_out(
        FitWorkbench({"made": table}), CounterModelKind.HYBRID, labels, "benchmark"
    )
    second = predict_held_out(
        FitWorkbench({"made": replace(table, power_w=spoiled)}),
        CounterModelKind.HYBRID,
        labels,
        "benchmark",
    )
    own = table.benchmark == 5
    assert_allclose(second.predicted_w[own], first.predicted_w[own], rtol=1e-12)
    assert first.anchored_w is not None
    assert second.anchored_w is not None
    assert_allclose(second.anchored_w[own], first.anchored_w[own], rtol=1e-12)
    trained = labels[table.benchmark] != labels[5]
    assert not np.allclose(second.predicted_w[trained], first.predicted_w[trained], rtol=1e-3)


def test_settings_find_the_floor_that_is_there() -> None:
    for floored in (False, True):
        table = made_table(0.003, floored)
        bench = FitWorkbench({"made": table})
        chosen = choose_settings(
            bench,
            CounterModelKind.HYBRID,
            everyone(table),
            deal_inner_folds(np.arange(table.benchmarks), everyone(table)),
        )
        if floored:
            assert chosen.floored


def test_few_clocks_suffice_where_many_agree() -> None:
    table = made_table(0.01)
    subsets = try_training_clocks(
        FitWorkbench({"made": table}), CounterModelKind.HYBRID, FitSettings("made")
    )
    whole = max(subsets, key=lambda s: s.points)
    assert whole.points == 18
    best = smallest_sufficient_clocks(subsets)
    assert best.points < whole.points
    assert best.mape <= 1.05 * whole.mape
    assert min(subsets, key=lambda s: s.points).mape > whole.mape  # one pair shows no voltage


def test_without_inner_folds_the_first_options_stand() -> None:
    table = made_table(0.01)
    bench = FitWorkbench({"made": table})
    assert deal_inner_folds(np.zeros(table.benchmarks, dtype=np.int64), everyone(table)) == []
    assert choose_settings(bench, CounterModelKind.HYBRID, everyone(table), []) == FitSettings(
        "made", tied=False, strength=1.0
    )


def test_one_benchmark_cannot_be_held_out() -> None:
    table = made_table(0.01)
    with pytest.raises(BadInput, match="at least two benchmarks"):
        predict_held_out(
            FitWorkbench({"made": table}),
            CounterModelKind.RATE,
            np.zeros(table.benchmarks, dtype=np.int64),
            "benchmark",
        )
