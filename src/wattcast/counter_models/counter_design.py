"""Find the fewest counters that identify a device's power model, and the error to expect with them.

Events are added one at a time, each time the one with which benchmarks that were held out are predicted best. The
fewest events are recommended that no larger number betters by more than two standard errors of the difference. A
profiler that replays a kernel for every few counters then runs it less often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.counter_models.counter_table import CounterTable
from wattcast.counter_models.model_selection import FitWorkbench, deal_folds, held_out_errors
from wattcast.counter_models.profiler_counters import list_ncu_metrics
from wattcast.counter_models.rail_terms import CounterModelKind
from wattcast.counter_models.two_rails import leaning_errors, make_rails_design, solve_rails, split_rows

FOLDS = 8


@dataclass(frozen=True)
class CounterStep:
    """One more event, and how well held-out benchmarks are predicted with it and those before it, in percent."""

    event: str
    metrics: int  # of the profiler, in all
    error: float
    standard_error: float
    tested: float | None  # on groups that are never trained on


@dataclass(frozen=True)
class CounterDesign:
    """Events in the order in which they help, and how many of them are enough."""

    table: str
    always: tuple[str, ...]  # events of a rail that is measured by itself, which needs all of its own
    steps: tuple[CounterStep, ...]
    enough: int  # steps after which the least error is not surely smaller

    @property
    def events(self) -> tuple[str, ...]:
        """The fewest events that are enough."""
        return (*self.always, *(step.event for step in self.steps[: self.enough]))


def design_counters(table: CounterTable) -> CounterDesign:
    """Choose events one after the other by the error on held-out benchmarks of the rows to train on."""
    rails = "memory" in table.rail_w
    always = [i for i, p in enumerate(table.predictors) if rails and p.rail == "memory"]
    left = [i for i in range(len(table.predictors)) if i not in always]
    if len(left) < 2:
        raise bad_value(table.name, "two events or more to choose from", len(left))
    leaning = 0.5
    if rails and table.choose_on:
        trials = leaning_errors(table, make_rails_design(table), split_rows(table)[0])
        leaning = min(trials, key=lambda lean: trials[lean])
    idle = table.busy() == 0.0  # by all events: a row without those chosen so far is no idle device
    chosen: list[int] = []
    steps, errors = [], []
    while left:
        tried = {i: _held_out_errors(_keep_events(table, [*always, *chosen, i]), leaning, idle)[0] for i in left}
        best = min(left, key=lambda i: float(tried[i].mean()))
        chosen.append(best)
        left.remove(best)
        names = [table.predictors[i].event for i in (*always, *chosen)]
        error, tested = _held_out_errors(_keep_events(table, [*always, *chosen]), leaning, idle, test=True)
        errors.append(error)
        steps.append(CounterStep(names[-1], len(list_ncu_metrics(names)), *_mean_and_spread(error), tested))
    least = min(errors, key=lambda error: float(error.mean()))
    gains = [_mean_and_spread(error - least) for error in errors]
    enough = next(n for n, (gain, spread) in enumerate(gains, 1) if gain <= 2.0 * spread)
    return CounterDesign(table.name, tuple(table.predictors[i].event for i in always), tuple(steps), enough)


def _mean_and_spread(error: Array) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(error.mean()), float(error.std(ddof=1) / np.sqrt(error.size))


def _keep_events(table: CounterTable, kept: list[int]) -> CounterTable:
    order = sorted(kept)
    return replace(table, predictors=tuple(table.predictors[i] for i in order), occurrence=table.occurrence[:, order])


def _held_out_errors(
    table: CounterTable, leaning: float, idle: Mask, test: bool = False
) -> tuple[Array, float | None]:
    """Return the error of each benchmark with its fold held out, and that of the groups never trained on."""
    if "memory" not in table.rail_w:
        trained = table.keep_benchmarks(table.split_benchmarks()[0])
        bench = FitWorkbench({"": trained})
        clocks = np.unique(bench.clock_hz).size * np.unique(bench.memory_clock_hz).size
        kind = CounterModelKind.LINEAR if clocks > 1 else CounterModelKind.RATE
        folds = deal_folds(np.arange(trained.benchmarks), FOLDS)
        everything = np.ones(trained.benchmarks, dtype=bool)
        settings = replace(bench.start(), tied=False, strength=0.0)
        return held_out_errors(bench, kind, settings, everything, folds), None
    design = replace(make_rails_design(table), idle=idle)
    train, tested = split_rows(table)
    found_w = np.full(table.rows, np.nan)
    for fold in deal_folds(np.arange(table.benchmarks), FOLDS):
        held = fold[table.benchmark] & train
        if held.any():
            found_w[held] = solve_rails(design, train & ~held, leaning).total_w(design)[held]
    busy = train & ~idle
    error = 100.0 * np.abs(found_w[busy] / table.power_w[busy] - 1.0)
    if not (test and tested.any()):
        return error, None
    total_w = solve_rails(design, train, leaning).total_w(design)
    return error, float(100.0 * np.abs(total_w[tested] / table.power_w[tested] - 1.0).mean())
