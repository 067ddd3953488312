"""A fitted two-rail counter model: what it is worth on unseen rows, how sure its costs are, and its saved form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.activity import Activity, Source, events
from wattcast.arrays import Array
from wattcast.fit import read_table
from wattcast.fit.counters_rails import Costs, Design, Mask, design_of, leaning_errors, masks, solve_rails
from wattcast.fit.counters_table import table_lines
from wattcast.fit.diagnose import HIGH_CONDITION, Coefficient, condition, inflation, t_factor
from wattcast.fit.table import CounterTable
from wattcast.hardware import OperatingPoint
from wattcast.power.hybrid_rail import EventRail, HybridRail
from wattcast.power.rail import Clock, Rail
from wattcast.power.saved import SavedModel
from wattcast.provenance import Provenance
from wattcast.records import database_folder

NO_LEVERAGE = 1e-6  # least that a row may leave to the others
ALONE = 0.05  # of the largest occurrence, below which a benchmark says nothing about an event


@dataclass(frozen=True)
class RailsFit:
    """A two-rail model, how it was chosen, and what it is worth on rows it has not seen."""

    table: CounterTable
    design: Design
    costs: Costs
    model: HybridRail
    leaning: float
    trials: dict[float, float]  # leaning -> error on the group it was chosen by, percent
    train: Mask  # (row,)
    test: Mask  # (row,)
    predicted_w: Array  # (row,) of the fit to all training rows
    held_out_w: Array  # (row,) with the row's benchmark held out; test rows as predicted
    coefficients: tuple[Coefficient, ...]
    condition: float
    warnings: tuple[str, ...]

    def error_percent(self, rows: Mask, held_out: bool = False) -> float:
        """Mean absolute percentage error of the total over some rows."""
        found = self.held_out_w if held_out else self.predicted_w
        return float(100.0 * np.abs(found[rows] / self.table.power_w[rows] - 1.0).mean())


def fit_rails(table: CounterTable, leaning: float | None = None) -> RailsFit:
    """Fit both rails to the rows that may be trained on, and predict the others.

    ``leaning`` is τ where it is known; else it is chosen.
    """
    design = design_of(table)
    train, test = masks(table)
    trials = {} if leaning is not None else leaning_errors(table, design, train)
    chosen = leaning if leaning is not None else min(trials, key=lambda lean: trials[lean])
    costs = solve_rails(design, train, chosen)
    predicted_w = costs.total_w(design)
    held_w = predicted_w.copy()
    for benchmark in np.unique(table.benchmark[train]):
        mine = table.benchmark == benchmark
        held_w[mine & train] = solve_rails(design, train & ~mine, chosen).total_w(design)[mine & train]
    coefficients, number = _diagnosed(design, costs, train, chosen)
    words = _words(table, train, coefficients, number)
    model = _model(design, costs)
    return RailsFit(
        table, design, costs, model, chosen, trials, train, test, predicted_w, held_w, coefficients, number, words
    )


def activity_of(table: CounterTable, names: Sequence[str]) -> Activity:
    """The table's rows as activity of one second each, for a power model that needs ``names``."""
    column = {p.event: i for i, p in enumerate(table.predictors)}
    value = np.stack([table.occurrence[:, column[name]] for name in names], axis=1)
    at = OperatingPoint(clock_hz=table.clock_hz, memory_clock_hz=table.memory_clock_hz)
    return Activity(np.ones(table.rows), value, tuple(names), at, Source.PROFILED)


def _diagnosed(design: Design, costs: Costs, train: Mask, leaning: float) -> tuple[tuple[Coefficient, ...], float]:
    """Standard errors (sandwich, residuals as of unseen rows), intervals, variance inflation, condition number."""
    busy = train & ~design.idle
    rest_w = (design.power_w - costs.memory_power_w(design) - design.static @ costs.static)[busy]
    side = np.where(rest_w > design.core[busy] @ costs.core, leaning, 1.0 - leaning)
    relative = np.sqrt(side) / design.power_w[busy]
    memory_w = design.memory_w[train]
    out = _rail_coefficients(design.core_events, design.core[busy], rest_w, costs.core, relative)
    names = ("memory base", *design.memory_events)
    out += _rail_coefficients(names, design.memory[train], memory_w, costs.memory, 1.0 / memory_w)
    weighted = np.concatenate([np.ones((int(busy.sum()), 1)), design.core[busy]], axis=1) * relative[:, np.newaxis]
    return tuple(out), condition(weighted.T @ weighted)


def _rail_coefficients(
    names: Sequence[str], columns: Array, target: Array, found: Array, weight: Array
) -> list[Coefficient]:
    weighted = columns * weight[:, np.newaxis]
    free = np.flatnonzero(found > 0)
    bread = np.linalg.inv(weighted[:, free].T @ weighted[:, free])
    leverage = np.einsum("ij,jk,ik->i", weighted[:, free], bread, weighted[:, free])
    unseen = (target - columns @ found) * weight / np.maximum(1.0 - leverage, NO_LEVERAGE)  # HC3 [MacKinnon1985]
    score = weighted[:, free] * unseen[:, np.newaxis]
    covariance = bread @ (score.T @ score) @ bread
    error = dict(zip(free.tolist(), np.sqrt(np.diag(covariance)).tolist(), strict=True))
    factor = t_factor(target.size - free.size)
    with_base = np.concatenate([weight[:, np.newaxis], weighted], axis=1)
    vif = inflation(with_base.T @ with_base)[1:]
    rows = []
    for j, name in enumerate(names):
        value, spread = float(found[j]), factor * error.get(j, 0.0)
        largest = float(columns[:, j].max())
        low, high = max(value - spread, 0.0), value + spread
        rows.append(Coefficient(name, value, error.get(j), low, high, value * largest, vif[j]))
    return rows


def _words(table: CounterTable, rows: Mask, coefficients: tuple[Coefficient, ...], number: float) -> tuple[str, ...]:
    words = [f"Not trained on: {name}: {reason}." for name, reason in table.left_out.items()]
    seen = rows[:, np.newaxis] & (table.occurrence > ALONE * table.occurrence[rows].max(axis=0))
    count = [np.unique(table.benchmark[column]).size for column in seen.T]
    alone = [p.event for p, benchmarks in zip(table.predictors, count, strict=True) if benchmarks == 1]
    if alone:
        words.append(f"Rests on a single benchmark, so that its interval says nothing: {', '.join(alone)}.")
    unsure = [c.name for c in coefficients if c.standard_error is not None and c.low <= 0.0]
    held = [c.name for c in coefficients if c.standard_error is None]
    if unsure:
        words.append(f"Not distinguishable from zero at 95 %: {', '.join(unsure)}.")
    if held:
        words.append(f"Held at zero: {', '.join(held)}.")
    if number > HIGH_CONDITION:
        words.append(
            f"Condition number {number:.0f} (over {HIGH_CONDITION:.0f}): trust totals more than single costs."
        )
    share = float((~table.at_default()).mean())
    words.append(
        f"{share:.0%} of the rows are below the top clock, mostly at the power cap: they do not identify V(f), so "
        "the relative one of the GPU's bundle is taken; leakage is not told from the base."
    )
    return tuple(words)


def _model(design: Design, costs: Costs) -> HybridRail:
    core = Rail("core", Clock.CORE, design.voltage, clock_f=float(costs.static[1]))
    memory = Rail("memory", Clock.MEMORY)
    core_f = {name: float(cost) for name, cost in zip(design.core_events, costs.core, strict=True)}
    memory_j = {name: float(cost) for name, cost in zip(design.memory_events, costs.memory[1:], strict=True)}
    base_w = float(costs.static[0] + costs.memory[0])
    return HybridRail(base_w, (EventRail(core, core_f), EventRail(memory, memory_j)))


def unit_cost(event: str, cost: float) -> str:
    """A cost for people: pJ or nJ an event at relative voltage 1."""
    unit = events()[event].unit or "event" if event in events() else "W"
    if unit == "W":
        return f"{cost:.4g} W"
    return f"{cost * 1e9:.3g} nJ/{unit}" if cost >= 1e-10 else f"{cost * 1e12:.3g} pJ/{unit}"


def summary(result: RailsFit) -> dict[str, Any]:
    """The fit as plain data."""
    table, test = result.table, result.test
    default, group = table.at_default(), np.array(table.group_names)[table.group][table.benchmark]
    sets = {
        "trained on": (result.train, False),
        "trained on, benchmark held out": (result.train, True),
        "the same, at the top clock": (result.train & default, True),
        **{f"never trained on, {name}": (test & (group == name), False) for name in table.test},
    }
    return {
        "leaning": result.leaning,
        "trials": {f"{lean:g}": error for lean, error in result.trials.items()},
        "errors": [
            (what, int(rows.sum()), result.error_percent(rows, held))
            for what, (rows, held) in sets.items()
            if rows.any()
        ],
        "base_w": result.model.base_w,
        "costs": [
            {
                "name": c.name,
                "value": c.value,
                "standard_error": c.standard_error,
                "largest_w": c.largest_w,
                "vif": c.vif,
            }
            for c in result.coefficients
        ],
        "condition": result.condition,
        "test": [
            {
                "benchmark": table.benchmark_names[table.benchmark[i]],
                "measured_w": float(table.power_w[i]),
                "predicted_w": float(result.predicted_w[i]),
            }
            for i in np.flatnonzero(test)
        ],
        "warnings": list(result.warnings),
    }


def saved_rails(result: RailsFit, name: str, device: str, date: str = "") -> SavedModel:
    """The model with its errors, to be written to a file."""
    errors = {what.replace(",", ""): error for what, _, error in summary(result)["errors"]}
    leaning = f"Leaning {result.leaning:g}, chosen by held-out {result.table.choose_on} rows."
    source = f"wattcast fit counters, {int(result.train.sum())} rows of {result.table.name}"
    return SavedModel(name, result.model, Provenance(source, date, device), errors, (leaning, *result.warnings))


@cache
def shipped_fit(gpu: str, card: str = "") -> RailsFit:
    """The fit to the microbenchmarks that ship for a GPU, or for another card of it, by the map of its name."""
    import polars as pl

    lines = table_lines(database_folder(gpu) / card, gpu)
    names = list(dict.fromkeys(name for line in lines for name in line))
    frame = pl.DataFrame({name: [line.get(name) for line in lines] for name in names}, strict=False)
    return fit_rails(read_table.build(frame, read_table.read_map(Path(gpu)), f"microbenchmarks of {gpu}"))
