"""Choose the fewest counters that identify a counter model, and the error to expect with them.

Events are added one at a time, each time the one with which benchmarks that were held out are
predicted best. The fewest events are recommended that no larger number betters by more than two
standard errors of the difference. A profiler that replays a kernel for every few counters then runs
it less often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.lab.counter_models.counter_table import CounterTable
from wattcast.lab.counter_models.model_selection import (
    FitWorkbench,
    deal_folds,
    held_out_errors,
    mean_absolute_error_percent,
    percent_error,
)
from wattcast.lab.counter_models.profiler_counters import list_ncu_metrics
from wattcast.lab.counter_models.rail_terms import CounterModelKind
from wattcast.lab.counter_models.rails_apart import (
    choose_leaning,
    keep_events,
    leaning_errors,
    make_rails_design,
    solve_rails,
    split_rows,
)

FOLDS = 8
LEAST_SQUARES = 0.5  # the leaning that treats errors of both signs alike
SURE_GAIN = 2.0  # standard errors by which more events have to be better


@dataclass(frozen=True)
class CounterStep:
    """One more event, and how well held-out benchmarks are predicted with it and those before it,
    in percent.
    """

    event: str
    metrics: int  # of the profiler, in all
    error: float
    standard_error: float
    tested: float | None  # on groups that are never trained on


@dataclass(frozen=True)
class CounterDesign:
    """Events in the order in which they help, and how many of them are enough."""

    table: str
    # events of a rail that is measured apart, which needs all of its events
    always: tuple[str, ...]
    steps: tuple[CounterStep, ...]
    enough: int  # steps after which the least error is not surely smaller

    @property
    def events(self) -> tuple[str, ...]:
        """The fewest events that are enough."""
        return (*self.always, *(step.event for step in self.steps[: self.enough]))


def design_counters(table: CounterTable) -> CounterDesign:
    """Choose events one after the other by the error on held-out benchmarks of the rows to train
    on.
    """
    always = _list_apart_events(table)
    candidates = [event for event in range(len(table.predictors)) if event not in always]
    if len(candidates) < 2:
        raise bad_value(table.name, "two events or more to choose from", len(candidates))
    # by all events: a row without those chosen so far is no idle device
    judge = _EventJudge(table, _choose_leaning(table), table.busy() == 0.0)
    chosen = list(always)
    steps = []
    errors = []
    while candidates:
        error_with = {event: judge.held_out_errors([*chosen, event]) for event in candidates}
        best = min(candidates, key=lambda event: float(error_with[event].mean()))
        candidates.remove(best)
        chosen.append(best)
        errors.append(error_with[best])
        names = [table.predictors[event].event for event in chosen]
        mean, standard_error = _mean_and_spread(error_with[best])
        steps.append(
            CounterStep(
                event=names[-1],
                metrics=len(list_ncu_metrics(names)),
                error=mean,
                standard_error=standard_error,
                tested=judge.test_error(chosen),
            )
        )
    return CounterDesign(
        table=table.name,
        always=tuple(table.predictors[event].event for event in always),
        steps=tuple(steps),
        enough=_count_enough(errors),
    )


def _list_apart_events(table: CounterTable) -> list[int]:
    """Return the predictors of rails beside the core that are measured apart."""
    apart = table.rail_w.keys() - {"core"}
    return [place for place, p in enumerate(table.predictors) if p.rail in apart]


def _choose_leaning(table: CounterTable) -> float:
    """Return the leaning of all events, least squares where no group chooses it."""
    if not table.rail_w or not table.choose_on:
        return LEAST_SQUARES
    train, _ = split_rows(table)
    return choose_leaning(leaning_errors(table, make_rails_design(table), train))


def _count_enough(errors: Sequence[Array]) -> int:
    """Return after how many steps the least error is not surely smaller."""
    least = min(errors, key=lambda error: float(error.mean()))
    for count, error in enumerate(errors, 1):
        gain, standard_error = _mean_and_spread(error - least)
        if gain <= SURE_GAIN * standard_error:
            return count
    raise AssertionError("the least error is not larger than itself")


def _mean_and_spread(error: Array) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(error.mean()), float(error.std(ddof=1) / np.sqrt(error.size))


@dataclass(frozen=True)
class _EventJudge:
    """Judges sets of events by benchmarks that were not trained on."""

    table: CounterTable
    leaning: float
    idle: Mask  # (row,)

    @property
    def has_rails(self) -> bool:
        """Whether a rail is measured apart."""
        return bool(self.table.rail_w)

    def held_out_errors(self, events: Sequence[int]) -> Array:
        """Return the error of each benchmark (of each busy row, where a rail is measured apart)
        with its fold held out.
        """
        table = keep_events(self.table, events)
        if not self.has_rails:
            return _held_out_errors_of_total(table)
        design = replace(make_rails_design(table), idle=self.idle)
        train, _ = split_rows(table)
        predicted_w = np.full(table.rows, np.nan)
        for fold in deal_folds(np.arange(table.benchmarks), FOLDS):
            test = fold[table.benchmark] & train
            if test.any():
                costs = solve_rails(design, train & ~test, self.leaning)
                predicted_w[test] = costs.total_w(design)[test]
        busy = train & ~self.idle
        return np.abs(percent_error(predicted_w[busy], table.power_w[busy]))

    def test_error(self, events: Sequence[int]) -> float | None:
        """Return the error on groups that are never trained on; None where there are none."""
        train, test = split_rows(self.table)
        if not self.has_rails or not test.any():
            return None
        table = keep_events(self.table, events)
        design = replace(make_rails_design(table), idle=self.idle)
        predicted_w = solve_rails(design, train, self.leaning).total_w(design)
        return mean_absolute_error_percent(predicted_w[test], table.power_w[test])


def _held_out_errors_of_total(table: CounterTable) -> Array:
    """Return the error of each benchmark with its fold held out, where only the total is measured.

    Where the clocks vary they are predictors too."""
    train, _ = table.split_benchmarks()
    trained = table.keep_benchmarks(train)
    bench = FitWorkbench({"": trained})
    clock_pairs = np.unique(bench.clock_hz).size * np.unique(bench.memory_clock_hz).size
    kind = CounterModelKind.LINEAR if clock_pairs > 1 else CounterModelKind.RATE
    folds = deal_folds(np.arange(trained.benchmarks), FOLDS)
    everything = np.ones(trained.benchmarks, dtype=bool)
    settings = replace(bench.start(), tied=False, strength=0.0)
    return held_out_errors(
        bench,
        kind,
        settings,
        everything,
        folds,
    )
