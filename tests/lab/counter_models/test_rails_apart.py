"""Two rails, each with its own power: known costs are found, the fit leans where told, unseen rows
stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.core.arrays import index_distinct
from wattcast.core.errors import BadInput
from wattcast.lab.counter_models.counter_table import CounterPredictor, CounterTable
from wattcast.lab.counter_models.rails_apart import (
    fit_rails,
    make_rails_design,
    make_saved_rails,
    rails_fit_to_plain,
    solve_rails,
    split_rows,
)
from wattcast.lab.paper_figures.multimedia_figures import table_activity
from wattcast.power import power_model

CORE_J = np.array([4e-10, 6e-10])
DRAM_J, MEMORY_W, BASE_W, CLOCK_J = 5e-11, 50.0, 10.0, 3.5e-8
TOP_HZ = 1.98e9


def two_rail_table(seed: int = 5, singles: int = 30) -> CounterTable:
    """A device of known costs: idle at two clocks, single units, mixes, and a group kept for
    testing.
    """
    rng = np.random.default_rng(seed)
    groups = ["idle"] * 2 + ["arithmetic"] * singles + ["mix"] * 8 + ["multimedia"] * 6
    names = [f"{group}_{i}" for i, group in enumerate(groups)]
    rate = rng.uniform(0.05, 1.0, (len(names), 3)) * np.array([5e11, 3e11, 4e12])
    for i, group in enumerate(groups):
        if group == "arithmetic":
            rate[i] *= np.eye(3)[i % 3]  # one unit at a time
    rate[:2] = 0.0
    clock_hz = np.full(len(names), TOP_HZ)
    clock_hz[0], clock_hz[-1] = 0.9e9, 1.5e9
    relative = np.interp(clock_hz, [0.9e9, 1.5e9, TOP_HZ], [0.9, 0.92, 1.0])
    memory_w = MEMORY_W + DRAM_J * rate[:, 2]
    power_w = (
        BASE_W + CLOCK_J * relative**2 * clock_hz + relative**2 * (rate[:, :2] @ CORE_J) + memory_w
    )
    benchmark_names, benchmark = index_distinct(names)
    group_names, group_of = index_distinct(groups)
    return CounterTable(
        name="made",
        power_w=power_w,
        clock_hz=clock_hz,
        memory_clock_hz=np.full(len(names), 3.2e9),
        occurrence=rate,
        predictors=(
            CounterPredictor("alu_full_warp"),
            CounterPredictor("l1_wavefront"),
            CounterPredictor("dram_read_byte", "memory"),
        ),
        benchmark=benchmark,
        benchmark_names=tuple(benchmark_names),
        group=group_of,
        group_names=tuple(group_names),
        default_hz=(TOP_HZ, 3.2e9),
        voltage_v={"core": relative},
        rail_w={"memory": memory_w},
        test=("multimedia",),
        choose_on="mix",
    )


def test_known_costs_are_found() -> None:
    fit = fit_rails(two_rail_table())
    assert_allclose(fit.costs.core, CORE_J, rtol=1e-6)
    assert_allclose(fit.costs.apart["memory"], [MEMORY_W, DRAM_J], rtol=1e-6)
    assert_allclose(fit.costs.static, [BASE_W, CLOCK_J], rtol=1e-6)
    assert fit.error_percent(fit.test) < 1e-4
    assert fit.error_percent(fit.train & ~fit.design.idle, held_out=True) < 1e-4
    assert {c.name for c in fit.coefficients} == {
        "alu_full_warp",
        "l1_wavefront",
        "memory base",
        "dram_read_byte",
    }


def with_a_step(
    table: CounterTable, awake_per_s: float = 2e11, awake_w: float = 12.0
) -> CounterTable:
    """The same device with a memory that draws 12 W more as soon as it is awake."""
    step_w = awake_w * np.minimum(table.occurrence[:, 2] / awake_per_s, 1.0)
    rails = {"memory": table.rail_w["memory"] + step_w}
    return replace(table, power_w=table.power_w + step_w, rail_w=rails, awake_per_s=awake_per_s)


def test_memory_that_wakes_up_draws_a_step() -> None:
    fit = fit_rails(with_a_step(two_rail_table()))
    assert_allclose(fit.costs.apart["memory"], [MEMORY_W, DRAM_J, 12.0], rtol=1e-6)
    assert fit.error_percent(fit.test) < 1e-4
    assert fit.model.rails[1].awake_w == pytest.approx(12.0)
    assert "memory awake" in {c.name for c in fit.coefficients}
    assert (
        fit_rails(replace(fit.table, awake_per_s=None)).error_percent(fit.test) > 0.1
    )  # a line misses it


@pytest.mark.parametrize("change", [lambda table: table, with_a_step])
def test_the_model_predicts_what_the_fit_predicts(
    change: Callable[[CounterTable], CounterTable],
) -> None:
    fit = fit_rails(change(two_rail_table()))
    power = fit.model.power(table_activity(fit.table, fit.model.required_events))
    assert_allclose(power.total_w, fit.predicted_w, rtol=1e-9)
    back = power_model.parse_saved_model(
        power_model.encode_model(make_saved_rails(fit, "made", "a device")), "made.yaml"
    )
    assert back.model.to_plain() == fit.model.to_plain()
    assert back.error_percent.keys() == {
        what.replace(",", "") for what, _, _ in rails_fit_to_plain(fit)["errors"]
    }


def test_a_fit_leans_towards_rows_whose_operands_do_not_repeat() -> None:
    """Half of the single units switch little; the mixes show what real operands cost, so the fit
    leans upwards.
    """
    table = two_rail_table(singles=60)
    cheap = np.array([name.startswith("arithmetic") for name in table.benchmark_names]) & (
        np.arange(table.rows) % 2 == 0
    )
    switched_w = table.occurrence[:, :2] @ CORE_J
    quiet = replace(table, power_w=np.where(cheap, table.power_w - 0.4 * switched_w, table.power_w))
    fit = fit_rails(quiet)
    plain = fit_rails(quiet, 0.5)
    assert fit.leaning >= 0.7
    assert fit.trials[fit.leaning] == min(fit.trials.values()) < fit.trials[0.5]
    assert fit.error_percent(fit.test) < 0.6 * plain.error_percent(plain.test)
    assert (fit.costs.core > plain.costs.core).all()


def test_rows_that_are_not_trained_on_change_nothing() -> None:
    """Watts of test rows and of benchmarks left out may be anything: costs and the leaning stay the
    same.
    """
    table = replace(two_rail_table(), left_out={"arithmetic_5": "broken", "mix_33": "broken"})
    _, test = split_rows(table)
    gone = test | np.isin(np.array(table.benchmark_names)[table.benchmark], list(table.left_out))
    assert gone.sum() == 8
    spoilt = replace(
        table,
        power_w=np.where(gone, 3.0 * table.power_w, table.power_w),
        rail_w={"memory": np.where(gone, 9.0 * table.rail_w["memory"], table.rail_w["memory"])},
    )
    one, other = fit_rails(table), fit_rails(spoilt)
    assert_allclose(other.costs.core, one.costs.core, rtol=0)
    assert_allclose(other.predicted_w, one.predicted_w, rtol=0)
    assert other.trials == one.trials


def test_a_held_out_row_does_not_see_itself() -> None:
    table = two_rail_table()
    spoilt = replace(
        table, power_w=np.where(np.arange(table.rows) == 9, 2.0 * table.power_w, table.power_w)
    )
    one, other = fit_rails(table, 0.6), fit_rails(spoilt, 0.6)
    assert_allclose(other.held_out_w[9], one.held_out_w[9], rtol=1e-9)
    assert abs(other.predicted_w[9] / one.predicted_w[9] - 1.0) > 1e-3


def test_memory_outliers_are_weighted_down() -> None:
    table = two_rail_table()
    memory_w = table.rail_w["memory"].copy()
    memory_w[[4, 7]] += 150.0
    costs = solve_rails(
        make_rails_design(replace(table, rail_w={"memory": memory_w})), split_rows(table)[0], 0.5
    )
    assert_allclose(costs.apart["memory"], [MEMORY_W, DRAM_J], rtol=0.02)


def test_an_event_of_one_benchmark_is_named() -> None:
    table = two_rail_table()
    occurrence = table.occurrence.copy()
    occurrence[:, 1] = np.where(np.arange(table.rows) == 6, occurrence[:, 0].max(), 0.0)
    words = fit_rails(replace(table, occurrence=occurrence), 0.5).warnings
    assert any("single benchmark" in sentence and "l1_wavefront" in sentence for sentence in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rail_w": {}}, "power of a rail beside the core"),
        ({"test": ("multimedai",)}, "multimedai"),
        ({"choose_on": "mixes"}, "choose_on"),
        (
            {
                "predictors": tuple(
                    CounterPredictor(e) for e in ("alu_full_warp", "l1_wavefront", "dram_read_byte")
                )
            },
            "events on",
        ),
    ],
)
def test_a_table_that_cannot_be_fitted_says_why(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        fit_rails(replace(two_rail_table(), **change))  # type: ignore[arg-type]


def test_a_table_without_idle_rows_is_fitted() -> None:
    """Boards such as the Tegra K1 are seldom measured idle; clocks that differ tell the base."""
    table = two_rail_table()
    clock_hz = np.where(np.arange(table.rows) % 3 == 0, 1.2e9, table.clock_hz)
    relative = np.interp(clock_hz, [0.9e9, 1.5e9, TOP_HZ], [0.9, 0.92, 1.0])
    square = relative**2
    core_w = square * (table.occurrence[:, :2] @ CORE_J)
    power_w = BASE_W + CLOCK_J * square * clock_hz + core_w + table.rail_w["memory"]
    table = replace(table, clock_hz=clock_hz, power_w=power_w, voltage_v={"core": relative})
    busy = np.array([not name.startswith("idle") for name in table.benchmark_names])
    fit = fit_rails(table.keep_benchmarks(busy))
    assert_allclose(fit.costs.core, CORE_J, rtol=1e-3)
    assert_allclose(fit.costs.static, [BASE_W, CLOCK_J], rtol=0.02)
    assert fit.error_percent(fit.test) < 0.05
    assert any("No row shows an idle device" in word for word in fit.warnings)


def test_at_one_clock_the_base_has_the_clock_tree() -> None:
    table = two_rail_table()
    design = make_rails_design(table)
    at_top = split_rows(table)[0] & ~design.idle & (table.clock_hz == TOP_HZ)
    costs = solve_rails(design, at_top, 0.5)
    assert costs.static[1] == 0.0
    assert_allclose(costs.static[0], BASE_W + CLOCK_J * TOP_HZ, rtol=1e-3)
    assert_allclose(costs.core, CORE_J, rtol=1e-3)


def test_no_busy_row_is_refused() -> None:
    table = two_rail_table()
    design = make_rails_design(table)
    with pytest.raises(BadInput, match="busy"):
        solve_rails(design, design.idle, 0.5)


HOST_W, HOST_J = 3.0, 2e-10


def three_rail_table() -> CounterTable:
    """The same device with a host whose rail is measured as well, as Jetson boards have it."""
    table = two_rail_table()
    rate = np.random.default_rng(11).uniform(0.0, 3e10, table.rows)
    rate[:2] = 0.0
    host_w = HOST_W + HOST_J * rate
    return replace(
        table,
        power_w=table.power_w + host_w,
        occurrence=np.concatenate([table.occurrence, rate[:, np.newaxis]], axis=1),
        predictors=(*table.predictors, CounterPredictor("noc_byte", "host")),
        rail_w={**table.rail_w, "host": host_w},
    )


def test_several_rails_are_measured_apart() -> None:
    fit = fit_rails(three_rail_table())
    assert_allclose(fit.costs.core, CORE_J, rtol=1e-6)
    assert_allclose(fit.costs.apart["memory"], [MEMORY_W, DRAM_J], rtol=1e-6)
    assert_allclose(fit.costs.apart["host"], [HOST_W, HOST_J], rtol=1e-6)
    assert [rail.name for rail in fit.model.rails] == ["core", "memory", "host"]
    assert fit.error_percent(fit.test) < 1e-4
    activity = table_activity(fit.table, fit.model.required_events)
    assert_allclose(fit.model.power(activity).total_w, fit.predicted_w, rtol=1e-9)


def test_the_core_is_measured_and_memory_is_what_is_left() -> None:
    """Orin measures GPU and processor; memory is in what its input draws beyond these."""
    table = three_rail_table()
    core_w = table.power_w - table.rail_w["memory"] - table.rail_w["host"]
    fit = fit_rails(replace(table, rail_w={"core": core_w, "host": table.rail_w["host"]}))
    assert_allclose(fit.costs.core, CORE_J, rtol=1e-6)
    assert_allclose(fit.costs.static, [BASE_W, CLOCK_J], rtol=1e-6)
    assert_allclose(fit.costs.apart["memory"], [MEMORY_W, DRAM_J], rtol=1e-6)
    assert fit.error_percent(fit.test) < 1e-4


def test_two_rails_that_nobody_measured_cannot_be_told_apart() -> None:
    table = three_rail_table()
    core_w = table.power_w - table.rail_w["memory"] - table.rail_w["host"]
    with pytest.raises(BadInput, match="one rail at most"):
        fit_rails(replace(table, rail_w={"core": core_w}))


def test_without_a_group_to_choose_on_the_fit_does_not_lean() -> None:
    fit = fit_rails(replace(two_rail_table(), choose_on=""))
    assert fit.leaning == 0.5
    assert fit.trials == {}
    assert_allclose(fit.costs.core, CORE_J, rtol=1e-6)
