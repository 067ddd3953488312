"""Fit counter models of a device that measures rails apart, each of these to its own power.

The H200 measures its memory, boards such as Jetson Orin their GPU, processor and input. With memory
measured apart,

P = P_base + C_clk·V²·f + V²·Σ C_i·ρ_i (all but memory) + P_mem + Σ E_d·ρ_d + P_awake·min(Σ ρ_d /
ρ_awake, 1) (memory) [Stokke2016, Eq. 8 to 10], with the core clock f, the relative voltage V, rates
ρ of events, and leakage within the base. ρ_awake is the rate from which on memory draws a step in
full. Three steps, all non-negative and on relative errors:

1. power of each rail measured apart against its events, such as memory's against DRAM traffic,
   outliers weighted down (the sensor is a one-second average);
2. power of the idle device over the clock: a base and a clock tree;
3. the rest of the *total* (which is the better sensor) against counted events.

Where the core's rail is measured too, steps 2 and 3 take its power, and one rail that is not
measured has what the others leave of the total.

Step 3 leans upwards. Operands that repeat switch less than random ones, and no counter sees it: a
microbenchmark can only cost less than real work of the same counts, not more. So a row with power
above the model weighs τ and one below it 1 - τ (expectiles [Newey1987]; τ = 0.5 is least squares).
τ is the one that predicts a group of benchmarks best (mixes of several units) when that group is
not trained on."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
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
from wattcast.lab.counter_models.fitted_power_model import (
    RAIL_CLOCKS,
    average_measured_voltage,
)
from wattcast.lab.counter_models.microbench_lines import make_table_lines
from wattcast.lab.counter_models.model_selection import (
    FitWorkbench,
    huber_weights,
    mean_absolute_error_percent,
)
from wattcast.lab.counter_models.rail_terms import CounterModelKind
from wattcast.power.activity import known_events
from wattcast.power.hybrid_rail import (
    EventRail,
    HybridRail,
    RailClock,
    RailVoltage,
)
from wattcast.power.power_model import SavedModel

LEAST_SQUARES = 0.5  # the leaning that does not lean
LEANINGS = (0.5, 0.6, 0.7, 0.8, 0.9)
REWEIGHTING_STEPS = 25  # of reweighting
SMALLEST_NANOJOULE_COST = 1e-10  # J; smaller costs are shown in picojoules
SAME_VOLTAGE = 1e-3  # a point of V(f) this close to the line between its neighbours is not kept
SAME_COUNT = 1.0 - 1e-9  # cosine of two columns that count the same


@dataclass(frozen=True)
class ApartRail:
    """A rail whose power is known by itself, and its columns by row."""

    name: str
    # (row, 1 + event): 1 and occurrence, then how far memory is awake where the table says when
    columns: Array
    events: tuple[str, ...]
    power_w: Array

    @property
    def cost_names(self) -> tuple[str, ...]:
        """What each column costs, in words."""
        awake = [f"{self.name} awake"] * (self.columns.shape[1] - 1 - len(self.events))
        return (f"{self.name} base", *self.events, *awake)


@dataclass(frozen=True)
class RailsDesign:
    """The columns of all rails by row, which a fit multiplies with costs."""

    static: Array  # (row, 2): 1 and V²·f
    core: Array  # (row, event) occurrence times V²
    core_events: tuple[str, ...]
    apart: tuple[ApartRail, ...]
    voltage: RailVoltage
    power_w: Array
    idle: Mask
    core_w: Array | None = None  # where the core's rail is measured too

    def rail(self, name: str) -> ApartRail:
        """Return a rail measured apart by its name."""
        return next(rail for rail in self.apart if rail.name == name)

    def with_rail(self, rail: ApartRail) -> RailsDesign:
        """Return the design with another version of one of its rails."""
        apart = tuple(rail if old.name == rail.name else old for old in self.apart)
        return replace(self, apart=apart)


@dataclass(frozen=True)
class RailsCosts:
    """Coefficients of the three steps."""

    static: Array
    core: Array
    apart: Mapping[str, Array]  # of each rail measured apart

    def apart_w(self, design: RailsDesign) -> Array:
        """Return the power of all rails measured apart, ``(row,)``."""
        return np.asarray(
            np.sum([rail.columns @ self.apart[rail.name] for rail in design.apart], axis=0)
        )

    def total_w(self, design: RailsDesign) -> Array:
        """Return the power of the device, ``(row,)``."""
        return np.asarray(
            design.static @ self.static + design.core @ self.core + self.apart_w(design)
        )


def split_rows(table: CounterTable) -> tuple[Mask, Mask]:
    """Return the rows to train on and those to test on; rows left out with a reason are in
    neither.
    """
    train, test = table.split_benchmarks()
    return train[table.benchmark], test[table.benchmark]


def make_rails_design(table: CounterTable) -> RailsDesign:
    """Return the columns of all rails of a table with measured rails and known relative voltage."""
    core_columns = [place for place, p in enumerate(table.predictors) if p.rail == "core"]
    if not core_columns:
        raise bad_value(table.name, "events on the core rail", "none")
    measured_v = table.voltage_v.get("core", np.ones(table.rows))
    voltage = thin_voltage(average_measured_voltage(table.clock_hz, measured_v))
    voltage_squared = voltage.level_at(table.clock_hz) ** 2
    return RailsDesign(
        static=np.stack([np.ones(table.rows), voltage_squared * table.clock_hz], axis=1),
        core=table.occurrence[:, core_columns] * voltage_squared[:, np.newaxis],
        core_events=tuple(table.predictors[column].event for column in core_columns),
        apart=tuple(
            _make_apart_rail(table, name, power_w) for name, power_w in _list_rail_powers(table)
        ),
        voltage=voltage,
        power_w=table.power_w,
        idle=table.busy() == 0.0,
        core_w=table.rail_w.get("core"),
    )


def _list_rail_powers(table: CounterTable) -> list[tuple[str, Array]]:
    """Return the rails beside the core whose power is known: measured, or what the others leave."""
    powers = [(name, watts) for name, watts in table.rail_w.items() if name != "core"]
    if "core" in table.rail_w:
        with_events = dict.fromkeys(p.rail for p in table.predictors)
        left = [name for name in with_events if name not in table.rail_w]
        if len(left) > 1:
            expectation = "one rail at most that is not measured, where the core's is"
            raise bad_value(table.name, expectation, ", ".join(left))
        rest_w = table.power_w - np.sum(list(table.rail_w.values()), axis=0)
        powers += [(name, rest_w) for name in left]
    if not powers:
        expectation = "power of a rail beside the core, such as rails: {memory: ...}"
        raise bad_value(table.name, expectation, "none")
    return powers


def _make_apart_rail(
    table: CounterTable,
    name: str,
    power_w: Array,
) -> ApartRail:
    """Return a rail's columns: one, its events, and how far memory is awake."""
    places = [place for place, p in enumerate(table.predictors) if p.rail == name]
    if not places:
        raise bad_value(table.name, f"events on the rail {name}, which is measured apart", "none")
    if not (power_w > 0.0).all():
        raise bad_value(table.name, f"positive power of the rail {name}", "a row without")
    traffic = table.occurrence[:, places]
    columns = [np.ones((table.rows, 1)), traffic]
    if name == "memory" and table.awake_per_s is not None:
        columns.append(np.minimum(traffic.sum(axis=1, keepdims=True) / table.awake_per_s, 1.0))
    events = tuple(table.predictors[place].event for place in places)
    return ApartRail(
        name,
        np.concatenate(columns, axis=1),
        events,
        power_w,
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
    errors = {}
    for leaning in LEANINGS:
        predicted_w = solve_rails(design, training, leaning).total_w(design)
        errors[leaning] = mean_absolute_error_percent(predicted_w[judged], table.power_w[judged])
    return errors


def choose_leaning(errors: Mapping[float, float]) -> float:
    """Return the leaning of least error."""
    return min(errors, key=lambda leaning: errors[leaning])


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
    apart = {rail.name: _solve_apart(rail, train) for rail in design.apart}
    rest_w = design.core_w
    if rest_w is None:
        rest_w = design.power_w - RailsCosts(np.empty(0), np.empty(0), apart).apart_w(design)
    if not still.any():
        static, core = _solve_without_idle(design, busy, rest_w, leaning)
        return RailsCosts(static, core, apart)
    static = _solve_reweighted(
        design.static[still], rest_w[still], 1.0 / design.power_w[still], np.ones_like
    )
    busy_w = (rest_w - design.static @ static)[busy]
    lean = partial(_lean_upwards, busy_w, leaning)
    core = _solve_reweighted(design.core[busy], busy_w, 1.0 / design.power_w[busy], lean)
    return RailsCosts(static, core, apart)


def _solve_apart(rail: ApartRail, train: Mask) -> Array:
    """Return the costs of a rail from its own power, outliers weighted down."""
    power_w = rail.power_w[train]

    def huber(predicted_w: Array) -> Array:
        return huber_weights(predicted_w / power_w - 1.0)

    return _solve_reweighted(rail.columns[train], power_w, 1.0 / power_w, huber)


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

    largest = np.abs(columns).max(axis=0)
    scale = np.where(largest == 0.0, 1.0, largest)
    side = np.ones(target.size)
    for _ in range(REWEIGHTING_STEPS):
        rows = weight * np.sqrt(side)
        scaled, _ = nnls(
            columns / scale * rows[:, np.newaxis], target * rows, maxiter=100 * scale.size
        )
        costs = scaled / scale
        new_side = reweight(columns @ costs)
        if (new_side == side).all():
            break
        side = new_side
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


LEAST_LEVERAGE_LEFT = 1e-6  # of a row: 1 less its leverage, which divides its error
# share of the largest occurrence below which a benchmark says nothing about an event
LEAST_OCCURRENCE = 0.05


@dataclass(frozen=True)
class RailsFit:
    """A model of rails, the choice of its leaning, and its predictions of rows it has not seen."""

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
        return mean_absolute_error_percent(estimate_w[rows], self.table.power_w[rows])


def fit_rails(table: CounterTable, leaning: float | None = None) -> RailsFit:
    """Fit all rails to the rows that may be trained on, and predict the others.

    ``leaning`` is τ; without it, τ is chosen by ``leaning_errors``, where the table names a group
    to choose it on.
    """
    design = make_rails_design(table)
    train, test = split_rows(table)
    trials = {}
    if leaning is None and not table.choose_on:
        leaning = LEAST_SQUARES
    if leaning is None:
        trials = leaning_errors(table, design, train)
        leaning = choose_leaning(trials)
    costs = solve_rails(design, train, leaning)
    coefficients, condition = _diagnose_rails(
        table,
        design,
        train,
        costs,
        leaning,
    )
    return RailsFit(
        table=table,
        design=design,
        costs=costs,
        model=_make_hybrid_rail(table, design, costs),
        leaning=leaning,
        trials=trials,
        train=train,
        test=test,
        predicted_w=costs.total_w(design),
        held_out_w=_predict_held_out(table, design, train, leaning),
        coefficients=tuple(coefficients),
        condition=condition,
        warnings=tuple(
            _warn_about_rails(
                table,
                design,
                train,
                coefficients,
                condition,
            )
        ),
    )


def _predict_held_out(
    table: CounterTable,
    design: RailsDesign,
    train: Mask,
    leaning: float,
) -> Array:
    """Return the watts of each training row with its benchmark held out, and of the other rows by
    the fit to all training rows.
    """
    held_out_w = solve_rails(design, train, leaning).total_w(design)
    for benchmark in np.unique(table.benchmark[train]):
        is_benchmark = table.benchmark == benchmark
        without = solve_rails(design, train & ~is_benchmark, leaning)
        rows = is_benchmark & train
        held_out_w[rows] = without.total_w(design)[rows]
    return held_out_w


def _diagnose_rails(
    table: CounterTable,
    design: RailsDesign,
    train: Mask,
    costs: RailsCosts,
    leaning: float,
) -> tuple[list[FittedCost], float]:
    """Return the costs of all rails with their uncertainty, and the condition of the core's
    columns with a base.
    """
    busy = train & ~design.idle
    core = design.core[busy]
    rest_w = design.power_w - costs.apart_w(design) if design.core_w is None else design.core_w
    core_w = (rest_w - design.static @ costs.static)[busy]
    side = _lean_upwards(core_w, leaning, core @ costs.core)
    weight = np.sqrt(side) / design.power_w[busy]
    coefficients = _diagnose_rail(
        design.core_events,
        core,
        core_w,
        costs.core,
        weight,
    )

    for rail in design.apart:
        power_w = rail.power_w[train]
        coefficients += _diagnose_rail(
            rail.cost_names,
            rail.columns[train],
            power_w,
            costs.apart[rail.name],
            1.0 / power_w,
        )

    with_base = np.concatenate([np.ones((core.shape[0], 1)), core], axis=1)
    weighted = with_base * weight[:, np.newaxis]
    return coefficients, fit_diagnostics.condition_number(weighted.T @ weighted)


def _make_hybrid_rail(
    table: CounterTable,
    design: RailsDesign,
    costs: RailsCosts,
) -> HybridRail:
    """Return the power model that predicts the same watts as the costs."""
    base_w, clock_f = costs.static.tolist()
    core = EventRail(
        "core",
        RailClock.CORE,
        design.voltage,
        clock_f=clock_f,
        event_f=dict(zip(design.core_events, costs.core.tolist(), strict=True)),
    )
    rails = [core]
    for rail in design.apart:
        costs_of_rail = costs.apart[rail.name]
        base_w += float(costs_of_rail[0])
        event_j = costs_of_rail[1 : 1 + len(rail.events)].tolist()
        saved = EventRail(
            rail.name,
            RAIL_CLOCKS[rail.name],
            event_f=dict(zip(rail.events, event_j, strict=True)),
        )
        if table.awake_per_s is not None and rail.columns.shape[1] > 1 + len(rail.events):
            awake_w = float(costs_of_rail[-1])
            saved = replace(saved, awake_w=awake_w, awake_per_s=table.awake_per_s)
        rails.append(saved)
    return HybridRail(base_w, tuple(rails))


def _warn_about_rails(
    table: CounterTable,
    design: RailsDesign,
    train: Mask,
    coefficients: list[FittedCost],
    condition: float,
) -> list[str]:
    """Return sentences on what the rows do not determine."""
    words = [f"Not trained on: {name}: {reason}." for name, reason in table.left_out.items()]
    alone = _list_single_benchmark_events(table, train)
    if alone:
        words.append(
            f"Rests on a single benchmark, so that its interval says nothing: {', '.join(alone)}."
        )
    words += fit_diagnostics.warn_about_costs(coefficients, condition)
    if not (train & design.idle).any():
        words.append(
            "No row shows an idle device: base power and clock tree were found together with the "
            "costs of events, from the clocks that differ."
        )
    below_share = float((~table.at_default()).mean())
    words.append(
        f"{below_share:.0%} of the rows are below the top clock, mostly at the power cap: they "
        "do not identify V(f), so the relative one of the GPU's bundle is taken; leakage is not "
        "told from the base."
    )
    return words


def _list_single_benchmark_events(table: CounterTable, train: Mask) -> list[str]:
    """Return the events that only one of the training benchmarks uses."""
    least = LEAST_OCCURRENCE * table.occurrence[train].max(axis=0)
    is_used = train[:, np.newaxis] & (table.occurrence > least)
    alone = []
    for predictor, rows in zip(table.predictors, is_used.T, strict=True):
        if np.unique(table.benchmark[rows]).size == 1:
            alone.append(predictor.event)
    return alone


def predict_by_kinds(table: CounterTable) -> dict[str, Array]:
    """Return watts of all rows by every other kind of model, fitted to the total of the same
    training rows.

    Counts that repeat those of a rail measured apart are left out, since one total cannot tell
    their costs apart."""
    on_measured_rail = np.array([p.rail in table.rail_w for p in table.predictors])
    length = np.linalg.norm(table.occurrence, axis=0)
    unit = table.occurrence / np.maximum(length, np.finfo(float).tiny)
    cosine = unit.T @ unit[:, on_measured_rail]
    repeats = (cosine > SAME_COUNT).any(axis=1) & ~on_measured_rail
    distinct = keep_events(table, np.flatnonzero(~repeats).tolist())
    bench = FitWorkbench({"": replace(distinct, rail_w={})})
    settings = replace(bench.start(), tied=False, strength=0.0)
    train, _ = table.split_benchmarks()
    return {str(kind): bench.predict(bench.fit(kind, settings, train)) for kind in CounterModelKind}


def keep_events(table: CounterTable, events: Sequence[int]) -> CounterTable:
    """Return the table with some of its events only, in the order of the table."""
    order = sorted(events)
    return replace(
        table,
        predictors=tuple(table.predictors[event] for event in order),
        occurrence=table.occurrence[:, order],
    )


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
    # bytes a second stand with ones: the inverse needs columns of equal length
    length = np.linalg.norm(weighted[:, free], axis=0)
    even = weighted[:, free] / length
    bread = np.linalg.inv(even.T @ even)
    leverage = np.einsum("ij,jk,ik->i", even, bread, even)
    miss = (target - columns @ costs) * weight
    held_out_miss = miss / np.maximum(1.0 - leverage, LEAST_LEVERAGE_LEFT)
    spread_by_row = even @ bread * held_out_miss[:, np.newaxis]
    error = np.zeros(costs.size)
    error[free] = np.linalg.norm(spread_by_row, axis=0) / length
    factor = fit_diagnostics.interval_factor(target.size - free.size)
    with_base = np.concatenate([weight[:, np.newaxis], weighted], axis=1)
    vif = fit_diagnostics.variance_inflation(with_base.T @ with_base)[1:]
    fitted_costs = []
    for column, name in enumerate(names):
        value = float(costs[column])
        standard_error = float(error[column])
        fitted_costs.append(
            FittedCost(
                name=name,
                value=value,
                standard_error=standard_error if value > 0 else None,
                low=max(value - factor * standard_error, 0.0),
                high=value + factor * standard_error,
                largest_w=value * float(columns[:, column].max()),
                vif=vif[column],
            )
        )
    return fitted_costs


def format_event_cost(event: str, cost: float) -> str:
    """Return a cost as text: W, or pJ or nJ per event at relative voltage 1."""
    if event not in known_events():
        return f"{cost:.4g} W"
    unit = known_events()[event].unit or "event"
    if unit == "W":
        return f"{cost:.4g} W"
    if cost >= SMALLEST_NANOJOULE_COST:
        return f"{cost * 1e9:.3g} nJ/{unit}"
    return f"{cost * 1e12:.3g} pJ/{unit}"


def rails_fit_to_plain(result: RailsFit) -> dict[str, Any]:
    """Return the fit as plain values for JSON."""
    table = result.table
    sets = _list_judged_sets(result)
    other_kinds: dict[str, dict[str, float]] = {}
    for kind, power_w in predict_by_kinds(table).items():
        error = 100.0 * np.abs(power_w / table.power_w - 1.0)
        other_kinds[kind] = {
            judged.name: float(error[judged.rows].mean()) for judged in sets if not judged.held_out
        }
    test = result.test
    return {
        "leaning": result.leaning,
        "trials": {f"{leaning:g}": error for leaning, error in result.trials.items()},
        "errors": [
            (
                judged.name,
                int(judged.rows.sum()),
                result.error_percent(judged.rows, judged.held_out),
            )
            for judged in sets
        ],
        "other_kinds": other_kinds,
        "base_w": result.model.base_w,
        "costs": [_describe_cost(cost) for cost in result.coefficients],
        "condition": result.condition,
        "test": list_test_rows(
            [table.benchmark_names[benchmark] for benchmark in table.benchmark[test]],
            table.power_w[test],
            result.predicted_w[test],
        ),
        "warnings": list(result.warnings),
    }


@dataclass(frozen=True)
class _JudgedSet:
    """Rows over which an error is averaged."""

    name: str
    rows: Mask
    held_out: bool = False  # whether each benchmark is held out of its own prediction


def _list_judged_sets(result: RailsFit) -> list[_JudgedSet]:
    """Return the sets of rows that have rows: those trained on, and each group that never is."""
    table = result.table
    group_of_row = np.array(table.group_names)[table.group][table.benchmark]
    at_default = result.train & table.at_default()
    sets = [
        _JudgedSet("trained on", result.train),
        _JudgedSet("trained on, benchmark held out", result.train, held_out=True),
        _JudgedSet("the same, at the top clock", at_default, held_out=True),
    ]
    for name in table.test:
        rows = result.test & (group_of_row == name)
        sets.append(_JudgedSet(f"never trained on, {name}", rows))
    return [judged for judged in sets if judged.rows.any()]


def _describe_cost(cost: FittedCost) -> dict[str, Any]:
    """Return a cost as plain values."""
    return {
        "name": cost.name,
        "value": cost.value,
        "standard_error": cost.standard_error,
        "largest_w": cost.largest_w,
        "vif": cost.vif,
    }


def make_saved_rails(
    result: RailsFit,
    name: str,
    device: str,
) -> SavedModel:
    """Return the model with its errors, ready to be written."""
    errors = {
        judged.name.replace(",", ""): result.error_percent(judged.rows, judged.held_out)
        for judged in _list_judged_sets(result)
    }
    chosen = f", chosen by held-out {result.table.choose_on} rows" if result.trials else ""
    leaning = f"Leaning {result.leaning:g}{chosen}."
    source = f"wattcast lab fit counters, {int(result.train.sum())} rows of {result.table.name}"
    return SavedModel(
        name,
        result.model,
        Provenance(source, device=device),
        errors,
        (leaning, *result.warnings),
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
