"""Fewest counters: events that power does not depend on are not asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_tables import made_table
from test_rails_apart import two_rail_table

from wattcast.core.errors import BadInput
from wattcast.lab.counter_models.counter_design import design_counters
from wattcast.lab.counter_models.counter_table import CounterPredictor, CounterTable


def with_idle_talk(table: CounterTable) -> CounterTable:
    """The table with two events that cost nothing, busy whenever the device is."""
    rng = np.random.default_rng(1)
    more = (
        rng.uniform(0.0, 1e9, (table.benchmarks, 2))[table.benchmark] * table.busy()[:, np.newaxis]
    )
    names = (CounterPredictor("dmma_cycle", "core"), CounterPredictor("imma_cycle", "core"))
    return replace(
        table,
        predictors=(*table.predictors, *names),
        occurrence=np.concatenate([table.occurrence, more], axis=1),
    )


@pytest.mark.parametrize("rails", [True, False], ids=["two rails", "one power"])
def test_events_that_cost_nothing_are_left_out(rails: bool) -> None:
    table = two_rail_table() if rails else made_table(benchmarks=30)
    if not rails:  # watts that a straight line gives, a percent apart
        straight_w = 30.0 + table.occurrence @ np.array([4e-8, 2.5e-8, 3e-8, 1.5e-8])
        table = replace(
            table,
            power_w=straight_w
            * (1.0 + 0.01 * np.random.default_rng(2).standard_normal(table.rows)),
        )
    table = with_idle_talk(table)
    found = design_counters(table)
    assert not {"dmma_cycle", "imma_cycle"} & set(found.events)
    assert found.always == (
        tuple(p.event for p in table.predictors if p.rail == "memory") if rails else ()
    )
    assert [s.metrics for s in found.steps] == sorted(s.metrics for s in found.steps)
    assert found.steps[found.enough - 1].error < 0.5 * found.steps[0].error


def test_one_event_is_no_choice() -> None:
    table = made_table()
    one = replace(table, predictors=table.predictors[:1], occurrence=table.occurrence[:, :1])
    with pytest.raises(BadInput, match="two events"):
        design_counters(one)
