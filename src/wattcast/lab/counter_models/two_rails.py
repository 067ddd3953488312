"""Fit counter models of a card that measures its memory power separately: two rails, each to its
own power.

P = P_base + C_clk·V²·f + V²·Σ C_i·ρ_i (all but memory) + P_mem + Σ E_d·ρ_d + P_awake·min(Σ ρ_d /
ρ_awake, 1) (memory) [Stokke2016, Eq. 8 to 10], with the core clock f, the relative voltage V, rates
ρ of events, and leakage within the base. ρ_awake is the rate from which on memory draws a step in
full. Three steps, all non-negative and on relative errors:

1. memory power against DRAM traffic, outliers weighted down (the sensor is a one-second average);
2. power of the idle device over the clock: a base and a clock tree;
3. the rest of the *total* (which is the better sensor) against counted events.

Step 3 leans upwards. Operands that repeat switch less than random ones, and no counter sees it: a
microbenchmark can only cost less than real work of the same counts, not more. So a row with power
above the model weighs τ and one below it 1 - τ (expectiles [Newey1987]; τ = 0.5 is least squares).
τ is the one that predicts a group of benchmarks best (mixes of several units) when that group is
not trained on.

``design_counters`` finds the fewest counters that identify such a model, and the error to expect
with them. Events are added one at a time, each time the one with which benchmarks that were held
out are predicted best. The fewest events are recommended that no larger number betters by more than
two standard errors of the difference. A profiler that replays a kernel for every few counters then
runs it less often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.core.row_tables import database_folder
from wattcast.core.strict_files import Provenance
from wattcast.lab.counter_models import counter_table, fit_diagnostics
from wattcast.lab.counter_models.counter_fit_report import list_test_rows
from wattcast.lab.counter_models.counter_table import CounterTable
from wattcast.lab.counter_models.fit_diagnostics import FittedCost
from wattcast.lab.counter_models.fitted_power_model import average_measured_voltage
from wattcast.lab.counter_models.model_selection import (
    FitWorkbench,
    deal_folds,
    held_out_errors,
    huber_weights,
)
from wattcast.lab.counter_models.profiler_counters import list_ncu_metrics, make_table_lines
from wattcast.lab.counter_models.rail_terms import CounterModelKind
from wattcast.power.activity import known_events
from wattcast.power.hybrid_rail import (
    EventRail,
    HybridRail,
    RailClock,
    RailVoltage,
)
from wattcast.power.power_model import SavedModel

LEANINGS = (0.5, 0.6, 0.7, 0.8, 0.9)
REWEIGHTING_STEPS = 25  # of reweighting
SAME_VOLTAGE = 1e-3  # a point of V(f) this close to the line between its neighbours is not kept
SAME_COUNT = 1.0 - 1e-9  # cosine of two columns that count the same
FOLDS = 8


@dataclass(frozen=True)
class RailsDesign:
    """The columns of both rails by row, which a fit multiplies with costs."""

    static: Array  # (row, 2): 1 and V²·f
    core: Array  # (row, event) occurrence times V²
    # (row, 1 + event): 1 and occurrence, then how far memory is awake where the table says when
    memory: Array
    core_events: tuple[str, ...]
    memory_events: tuple[str, ...]
    voltage: RailVoltage
    power_w: Array
    memory_w: Array
    idle: Mask


@dataclass(frozen=True)
class RailsCosts:
    """Coefficients of the three steps."""

    static: Array
    core: Array
    memory: Array

    def memory_power_w(self, design: RailsDesign) -> Array:
        """Return the power of the memory rail, ``(row,)``."""
        return np.asarray(design.memory @ self.memory)

    def total_w(self, design: RailsDesign) -> Array:
        """Return the power of the card, ``(row,)``."""
        return np.asarray(
            design.static @ self.static + design.core @ self.core + self.memory_power_w(design)
        )


def split_rows(table: CounterTable) -> tuple[Mask, Mask]:
    """Return the rows to train on and those to test on; rows left out with a reason are in
    neither.
    """
    train, test = table.split_benchmarks()
    return train[table.benchmark], test[table.benchmark]


def make_rails_design(table: CounterTable) -> RailsDesign:
    """Return the columns of both rails of a table with measured memory power and known relative
    voltage.
    """
    if "memory" not in table.rail_w:
        raise bad_value(table.name, "power of the memory rail (rails: memory)", "none")
    on = {
        rail: [i for i, p in enumerate(table.predictors) if p.rail == rail]
        for rail in ("core", "memory")
    }
    if not (on["core"] and on["memory"]):
        raise bad_value(
            table.name, "events on the core rail and on the memory rail", "none on one of them"
        )
    voltage = thin_voltage(
        average_measured_voltage(table.clock_hz, table.voltage_v.get("core", np.ones(table.rows)))
    )
    square = voltage.level_at(table.clock_hz) ** 2
    traffic = table.occurrence[:, on["memory"]]
    memory = [np.ones((table.rows, 1)), traffic]
    if table.awake_per_s is not None:
        memory.append(np.minimum(traffic.sum(axis=1, keepdims=True) / table.awake_per_s, 1.0))
    return RailsDesign(
        static=np.stack([np.ones(table.rows), square * table.clock_hz], axis=1),
        core=table.occurrence[:, on["core"]] * square[:, np.newaxis],
        memory=np.concatenate(memory, axis=1),
        core_events=tuple(table.predictors[i].event for i in on["core"]),
        memory_events=tuple(table.predictors[i].event for i in on["memory"]),
        voltage=voltage,
        power_w=table.power_w,
        memory_w=table.rail_w["memory"],
        idle=table.busy() == 0.0,
    )


def leaning_errors(
    table: CounterTable,
    design: RailsDesign,
    train: Mask,
) -> dict[float, float]:
    """Return the error of each leaning τ on the group that chooses it, which is not trained on.

    Only rows at the default clocks count: at the power cap the clock swings, and its mean
    determines V² and rates badly."""
    group = np.array(table.group_names)[table.group][table.benchmark]
    judged = (group == table.choose_on) & train & table.at_default()
    if not judged.any():
        expectation = "a group with rows at the default clocks"
        raise bad_value(f"{table.name}: choose_on", expectation, table.choose_on or "none")
    training = train & (group != table.choose_on)
    out = {}
    for leaning in LEANINGS:
        found_w = solve_rails(design, training, leaning).total_w(design)
        out[leaning] = float(100.0 * np.abs(found_w[judged] / table.power_w[judged] - 1.0).mean())
    return out


def solve_rails(
    design: RailsDesign,
    train: Mask,
    leaning: float,
) -> RailsCosts:
    """Solve the three steps for the rows of ``train`` with the leaning τ.

    Where no row shows an idle device, as in tables of embedded boards, the base and the clock tree
    are found together with the costs of events: clocks that differ tell them apart.
    """
    still = train & design.idle
    busy = train & ~design.idle
    if not busy.any():
        raise bad_value("fit", "rows of a busy device", "none")
    memory_w = design.memory_w[train]

    def huber(predicted_w: Array) -> Array:
        return huber_weights(predicted_w / memory_w - 1.0)

    memory = _solve_reweighted(design.memory[train], memory_w, 1.0 / memory_w, huber)
    rest_w = design.power_w - design.memory @ memory
    if not still.any():
        static, core = _solve_without_idle(design, busy, rest_w, leaning)
        return RailsCosts(static, core, memory)
    static = _solve_reweighted(
        design.static[still], rest_w[still], 1.0 / design.power_w[still], np.ones_like
    )
    busy_w = (rest_w - design.static @ static)[busy]
    lean = partial(_lean_upwards, busy_w, leaning)
    core = _solve_reweighted(design.core[busy], busy_w, 1.0 / design.power_w[busy], lean)
    return RailsCosts(static, core, memory)


def _lean_upwards(
    measured_w: Array,
    leaning: float,
    predicted_w: Array,
) -> Array:
    """Return the weights of rows: τ above the prediction, 1 - τ below it."""
    return np.where(measured_w > predicted_w, leaning, 1.0 - leaning)


def _solve_without_idle(
    design: RailsDesign,
    busy: Mask,
    rest_w: Array,
    leaning: float,
) -> tuple[Array, Array]:
    """Return the costs of base and clock tree, and of events, from busy rows alone.

    At one clock a clock tree cannot be told from the base, which then has all of it.
    """
    static = design.static[busy].copy()
    if np.ptp(static[:, 1]) <= 1e-9 * np.abs(static[:, 1]).max():
        static[:, 1] = 0.0
    columns = np.concatenate([static, design.core[busy]], axis=1)
    lean = partial(_lean_upwards, rest_w[busy], leaning)
    costs = _solve_reweighted(columns, rest_w[busy], 1.0 / design.power_w[busy], lean)
    return costs[:2], costs[2:]


def _solve_reweighted(
    columns: Array,
    target: Array,
    weight: Array,
    reweight: Callable[[Array], Array],
) -> Array:
    """Return non-negative costs of least weighted squares, with weights of the rows set anew from
    the prediction.
    """
    from scipy.optimize import nnls

    scale = np.abs(columns).max(axis=0)
    scale[scale == 0.0] = 1.0
    side = np.ones(target.size)
    for _ in range(REWEIGHTING_STEPS):
        rows = weight * np.sqrt(side)
        costs = (
            nnls(columns / scale * rows[:, np.newaxis], target * rows, maxiter=100 * scale.size)[0]
            / scale
        )
        side, before = reweight(columns @ costs), side
        if (side == before).all():
            break
    return np.asarray(costs)


def thin_voltage(curve: RailVoltage) -> RailVoltage:
    """Return the curve with few points, none further than ``SAME_VOLTAGE`` from the original."""
    points = [0]
    last = curve.clock_hz.size - 1
    while points[-1] < last:
        start = points[-1]
        end = last
        while end > start + 1:
            inner = slice(start + 1, end)
            line = np.interp(
                curve.clock_hz[inner], curve.clock_hz[[start, end]], curve.level[[start, end]]
            )
            if np.abs(line - curve.level[inner]).max() <= SAME_VOLTAGE:
                break
            end -= 1
        points.append(end)
    return RailVoltage(curve.clock_hz[points], curve.level[points])


NO_LEVERAGE = 1e-6  # least that a row may leave to the others
LEAST_OCCURRENCE = (
    0.05  # of the largest occurrence, below which a benchmark says nothing about an event
)


@dataclass(frozen=True)
class RailsFit:
    """A two-rail model, the choice of its leaning, and its predictions of rows it has not seen."""

    table: CounterTable
    design: RailsDesign
    costs: RailsCosts
    model: HybridRail
    leaning: float
    trials: dict[float, float]  # leaning -> error on the group it was chosen by, percent
    train: Mask  # (row,)
    test: Mask  # (row,)
    predicted_w: Array  # (row,) of the fit to all training rows
    held_out_w: Array  # (row,) with the row's benchmark held out; test rows as predicted
    coefficients: tuple[FittedCost, ...]
    condition: float
    warnings: tuple[str, ...]

    def error_percent(
        self,
        rows: Mask,
        held_out: bool = False,
    ) -> float:
        """Return the mean absolute percentage error of the total over some rows."""
        estimate_w = self.held_out_w if held_out else self.predicted_w
        return float(100.0 * np.abs(estimate_w[rows] / self.table.power_w[rows] - 1.0).mean())


def fit_rails(table: CounterTable, leaning: float | None = None) -> RailsFit:
    """Fit both rails to the rows that may be trained on, and predict the others.

    ``leaning`` is τ; without it, τ is chosen by ``leaning_errors``.
    """
    design = make_rails_design(table)
    train, test = split_rows(table)
    trials = {} if leaning is not None else leaning_errors(table, design, train)
    chosen = leaning if leaning is not None else min(trials, key=lambda lean: trials[lean])
    costs = solve_rails(design, train, chosen)
    predicted_w = costs.total_w(design)
    held_w = predicted_w.copy()
    for benchmark in np.unique(table.benchmark[train]):
        mine = table.benchmark == benchmark
        held_w[mine & train] = solve_rails(design, train & ~mine, chosen).total_w(design)[
            mine & train
        ]
    busy = train & ~design.idle
    rest_w = (design.power_w - costs.memory_power_w(design) - design.static @ costs.static)[busy]
    side = np.where(rest_w > design.core[busy] @ costs.core, chosen, 1.0 - chosen)
    relative = np.sqrt(side) / design.power_w[busy]
    memory_w = design.memory_w[train]
    fitted_costs = _diagnose_rail(
        design.core_events, design.core[busy], rest_w, costs.core, relative
    )
    awake = ("memory awake",) * (table.awake_per_s is not None)
    names = ("memory base", *design.memory_events, *awake)
    fitted_costs += _diagnose_rail(
        names, design.memory[train], memory_w, costs.memory, 1.0 / memory_w
    )
    weighted = (
        np.concatenate([np.ones((int(busy.sum()), 1)), design.core[busy]], axis=1)
        * relative[:, np.newaxis]
    )
    number = fit_diagnostics.condition_number(weighted.T @ weighted)
    core_f = dict(zip(design.core_events, costs.core.tolist(), strict=True))
    memory_j = dict(zip(design.memory_events, costs.memory[1:].tolist(), strict=False))
    core = EventRail(
        "core", RailClock.CORE, design.voltage, clock_f=float(costs.static[1]), event_f=core_f
    )
    memory = EventRail("memory", RailClock.MEMORY, event_f=memory_j)
    if table.awake_per_s is not None:
        memory = replace(memory, awake_w=float(costs.memory[-1]), awake_per_s=table.awake_per_s)
    model = HybridRail(float(costs.static[0] + costs.memory[0]), (core, memory))
    words = [f"Not trained on: {name}: {reason}." for name, reason in table.left_out.items()]
    seen = train[:, np.newaxis] & (
        table.occurrence > LEAST_OCCURRENCE * table.occurrence[train].max(axis=0)
    )
    count = [np.unique(table.benchmark[column]).size for column in seen.T]
    if alone := [
        p.event for p, benchmarks in zip(table.predictors, count, strict=True) if benchmarks == 1
    ]:
        words.append(
            f"Rests on a single benchmark, so that its interval says nothing: {', '.join(alone)}."
        )
    words += fit_diagnostics.warn_about_costs(fitted_costs, number)
    if not (train & design.idle).any():
        words.append(
            "No row shows an idle device: base power and clock tree were found together with the "
            "costs of events, from the clocks that differ."
        )
    below = float((~table.at_default()).mean())
    words.append(
        f"{below:.0%} of the rows are below the top clock, mostly at the power cap: they "
        "do not identify V(f), so "
        "the relative one of the GPU's bundle is taken; leakage is not told from the base."
    )
    predictions = (train, test, predicted_w, held_w)
    return RailsFit(
        table,
        design,
        costs,
        model,
        chosen,
        trials,
        *predictions,
        tuple(fitted_costs),
        number,
        tuple(words),
    )


def predict_by_kinds(table: CounterTable) -> dict[str, Array]:
    """Return watts of all rows by every other kind of model, fitted to the total of the same
    training rows.

    Counts that repeat those of a rail measured apart are left out, since one total cannot tell
    their costs apart."""
    measured = [i for i, p in enumerate(table.predictors) if p.rail in table.rail_w]
    unit = table.occurrence / np.maximum(
        np.linalg.norm(table.occurrence, axis=0), np.finfo(float).tiny
    )
    repeats = (unit.T @ unit[:, measured] > SAME_COUNT).any(axis=1)
    repeats[measured] = False
    bench = FitWorkbench(
        {"": replace(_keep_events(table, np.flatnonzero(~repeats).tolist()), rail_w={})}
    )
    settings = replace(bench.start(), tied=False, strength=0.0)
    train = table.split_benchmarks()[0]
    return {str(kind): bench.predict(bench.fit(kind, settings, train)) for kind in CounterModelKind}


def _diagnose_rail(
    names: Sequence[str],
    columns: Array,
    target: Array,
    costs: Array,
    weight: Array,
) -> list[FittedCost]:
    """Return costs with standard errors (HC3 sandwich [MacKinnon1985]), intervals and variance
    inflation.
    """
    weighted = columns * weight[:, np.newaxis]
    free = np.flatnonzero(costs > 0)
    length = np.linalg.norm(
        weighted[:, free], axis=0
    )  # bytes a second beside ones: the inverse needs equal lengths
    even = weighted[:, free] / length
    bread = np.linalg.inv(even.T @ even)
    leverage = np.einsum("ij,jk,ik->i", even, bread, even)
    unseen = (target - columns @ costs) * weight / np.maximum(1.0 - leverage, NO_LEVERAGE)
    spread_by_row = even @ bread * unseen[:, np.newaxis]
    error = np.zeros(costs.size)
    error[free] = np.linalg.norm(spread_by_row, axis=0) / length
    factor = fit_diagnostics.interval_factor(target.size - free.size)
    with_base = np.concatenate([weight[:, np.newaxis], weighted], axis=1)
    vif = fit_diagnostics.variance_inflation(with_base.T @ with_base)[1:]
    rows = []
    for j, name in enumerate(names):
        value = float(costs[j])
        standard_error = float(error[j])
        low = max(value - factor * standard_error, 0.0)
        high = value + factor * standard_error
        largest_w = value * float(columns[:, j].max())
        rows.append(
            FittedCost(
                name, value, standard_error if value > 0 else None, low, high, largest_w, vif[j]
            )
        )
    return rows


def format_event_cost(event: str, cost: float) -> str:
    """Return a cost as text: W, or pJ or nJ per event at relative voltage 1."""
    unit = known_events()[event].unit or "event" if event in known_events() else "W"
    if unit == "W":
        return f"{cost:.4g} W"
    return f"{cost * 1e9:.3g} nJ/{unit}" if cost >= 1e-10 else f"{cost * 1e12:.3g} pJ/{unit}"


def rails_fit_to_plain(result: RailsFit) -> dict[str, Any]:
    """Return the fit as plain values for JSON."""
    table = result.table
    test = result.test
    default = table.at_default()
    group = np.array(table.group_names)[table.group][table.benchmark]
    sets = {
        "trained on": (result.train, False),
        "trained on, benchmark held out": (result.train, True),
        "the same, at the top clock": (result.train & default, True),
        **{f"never trained on, {name}": (test & (group == name), False) for name in table.test},
    }
    sets = {what: (rows, is_held_out) for what, (rows, is_held_out) in sets.items() if rows.any()}
    seen = {what: rows for what, (rows, is_held_out) in sets.items() if not is_held_out}
    off = {
        kind: 100.0 * np.abs(w / table.power_w - 1.0) for kind, w in predict_by_kinds(table).items()
    }
    return {
        "leaning": result.leaning,
        "trials": {f"{lean:g}": error for lean, error in result.trials.items()},
        "errors": [
            (what, int(r.sum()), result.error_percent(r, is_held_out))
            for what, (r, is_held_out) in sets.items()
        ],
        "other_kinds": {
            k: {what: float(e[r].mean()) for what, r in seen.items()} for k, e in off.items()
        },
        "base_w": result.model.base_w,
        "costs": [
            {
                name: getattr(c, name)
                for name in ("name", "value", "standard_error", "largest_w", "vif")
            }
            for c in result.coefficients
        ],
        "condition": result.condition,
        "test": list_test_rows(
            [table.benchmark_names[b] for b in table.benchmark[test]],
            table.power_w[test],
            result.predicted_w[test],
        ),
        "warnings": list(result.warnings),
    }


def make_saved_rails(
    result: RailsFit,
    name: str,
    device: str,
) -> SavedModel:
    """Return the model with its errors, ready to be written."""
    errors = {
        what.replace(",", ""): error for what, _, error in rails_fit_to_plain(result)["errors"]
    }
    leaning = f"Leaning {result.leaning:g}, chosen by held-out {result.table.choose_on} rows."
    source = f"wattcast lab fit counters, {int(result.train.sum())} rows of {result.table.name}"
    return SavedModel(
        name, result.model, Provenance(source, device=device), errors, (leaning, *result.warnings)
    )


@cache
def shipped_fit(gpu: str, card: str = "") -> RailsFit:
    """Return the fit to the shipped microbenchmarks of a GPU, or of another ``card`` of it."""
    return fit_rails(read_shipped_table(gpu, card))


def read_shipped_table(gpu: str, card: str = "") -> CounterTable:
    """Read watts and counters of a GPU's shipped microbenchmarks."""
    import polars as pl

    lines = make_table_lines(database_folder(gpu) / card, gpu)
    frame = pl.DataFrame(lines, infer_schema_length=None, strict=False)
    columns = counter_table.read_column_map(Path(gpu))
    return counter_table.build_counter_table(frame, columns, f"microbenchmarks of {gpu}")


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
    always: tuple[
        str, ...
    ]  # events of a rail that is measured by itself, which needs all of its own
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
    rails = "memory" in table.rail_w
    always = [i for i, p in enumerate(table.predictors) if rails and p.rail == "memory"]
    candidates = [i for i in range(len(table.predictors)) if i not in always]
    if len(candidates) < 2:
        raise bad_value(table.name, "two events or more to choose from", len(candidates))
    leaning, (train, test) = 0.5, split_rows(table)
    if rails and table.choose_on:
        trials = leaning_errors(table, make_rails_design(table), train)
        leaning = min(trials, key=lambda lean: trials[lean])
    idle = table.busy() == 0.0  # by all events: a row without those chosen so far is no idle device
    chosen: list[int] = []
    steps = []
    errors = []
    while candidates:
        tried = {
            i: _held_out_errors(_keep_events(table, [*always, *chosen, i]), leaning, idle)
            for i in candidates
        }
        best = min(candidates, key=lambda i: float(tried[i].mean()))
        chosen.append(best)
        candidates.remove(best)
        errors.append(tried[best])
        tested = None
        if rails and test.any():
            design = replace(make_rails_design(_keep_events(table, [*always, *chosen])), idle=idle)
            found_w = solve_rails(design, train, leaning).total_w(design)[test]
            tested = float(100.0 * np.abs(found_w / table.power_w[test] - 1.0).mean())
        names = [table.predictors[i].event for i in (*always, *chosen)]
        steps.append(
            CounterStep(
                names[-1], len(list_ncu_metrics(names)), *_mean_and_spread(tried[best]), tested
            )
        )
    least = min(errors, key=lambda error: float(error.mean()))
    gains = [_mean_and_spread(error - least) for error in errors]
    enough = next(n for n, (gain, spread) in enumerate(gains, 1) if gain <= 2.0 * spread)
    return CounterDesign(
        table.name, tuple(table.predictors[i].event for i in always), tuple(steps), enough
    )


def _mean_and_spread(error: Array) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(error.mean()), float(error.std(ddof=1) / np.sqrt(error.size))


def _keep_events(table: CounterTable, chosen: list[int]) -> CounterTable:
    order = sorted(chosen)
    return replace(
        table,
        predictors=tuple(table.predictors[i] for i in order),
        occurrence=table.occurrence[:, order],
    )


def _held_out_errors(
    table: CounterTable,
    leaning: float,
    idle: Mask,
) -> Array:
    """Return the error of each benchmark (of each busy row, where memory has a rail) with its fold
    held out.
    """
    if "memory" not in table.rail_w:
        trained = table.keep_benchmarks(table.split_benchmarks()[0])
        bench = FitWorkbench({"": trained})
        clocks = np.unique(bench.clock_hz).size * np.unique(bench.memory_clock_hz).size
        kind = CounterModelKind.LINEAR if clocks > 1 else CounterModelKind.RATE
        folds = deal_folds(np.arange(trained.benchmarks), FOLDS)
        everything = np.ones(trained.benchmarks, dtype=bool)
        settings = replace(bench.start(), tied=False, strength=0.0)
        return held_out_errors(bench, kind, settings, everything, folds)
    design = replace(make_rails_design(table), idle=idle)
    train, _ = split_rows(table)
    found_w = np.full(table.rows, np.nan)
    for fold in deal_folds(np.arange(table.benchmarks), FOLDS):
        test = fold[table.benchmark] & train
        if test.any():
            found_w[test] = solve_rails(design, train & ~test, leaning).total_w(design)[test]
    busy = train & ~idle
    return np.asarray(100.0 * np.abs(found_w[busy] / table.power_w[busy] - 1.0))
