"""Fit every kind of counter model to a table, judge it on held-out work, and save it as a power
model.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from wattcast import __version__
from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.strict_files import Provenance
from wattcast.lab.counter_models import (
    counter_table,
    fit_diagnostics,
    gpmtool_files,
    model_selection,
)
from wattcast.lab.counter_models.counter_table import RAILS, CounterTable
from wattcast.lab.counter_models.gpmtool_files import MeasuredPrograms, UtilisationFile
from wattcast.lab.counter_models.rail_terms import (
    ACTIVE_CYCLE,
    CounterModelKind,
    describe_missing_terms,
    offset_name,
)
from wattcast.power.hybrid_rail import (
    EventRail,
    HybridRail,
    RailClock,
    RailVoltage,
)
from wattcast.power.power_model import PowerModel, SavedModel
from wattcast.power.rate_power import RatePower
from wattcast.power.switched_capacitance import SwitchedCapacitance

RAIL_CLOCKS = {
    "core": RailClock.CORE,
    "memory": RailClock.MEMORY,
    "host": RailClock.FIXED,
}


def make_power_model(fit: model_selection.TermsFit, table: CounterTable) -> PowerModel:
    """Return the power model, in terms of events, that predicts the same watts as the fit."""
    coefficients = dict(zip(fit.terms.names, fit.coefficient.tolist(), strict=True))
    events_of: dict[str, dict[str, float]] = {rail: {} for rail in RAILS}
    for members, coefficient in zip(fit.terms.members, fit.coefficient.tolist(), strict=True):
        for i in members:
            events_of[table.predictors[i].rail][table.predictors[i].event] = coefficient
    if fit.model in (CounterModelKind.RATE, CounterModelKind.LINEAR):
        events = {event: cost for costs in events_of.values() for event, cost in costs.items()}
        return RatePower(
            coefficients["base"],
            events,
            coefficients.get("core clock", 0.0),
            coefficients.get("memory clock", 0.0),
        )
    inferred = dict(zip(("core", "memory"), fit.how.curves(fit.inferred.theta), strict=True))
    clocks_hz = {
        "core": table.clock_hz,
        "memory": table.memory_clock_hz,
        "host": np.ones(table.rows),
    }
    offsets = [
        (hz, coefficients.get(offset_name(hz))) for hz in np.unique(table.memory_clock_hz).tolist()
    ]
    rails = {}
    for name in RAILS:
        voltage = inferred.get(name, RailVoltage.constant())
        if name in table.voltage_v:
            voltage = average_measured_voltage(clocks_hz[name], table.voltage_v[name])
        named = tuple(
            (hz, watts) for hz, watts in offsets if name == "memory" and watts is not None
        )
        leakage_w = coefficients.get(f"{name} leakage", 0.0)
        clock_f = coefficients.get(f"{name} clock", 0.0)
        rails[name] = EventRail(name, RAIL_CLOCKS[name], voltage, leakage_w, clock_f, named)
    if fit.model is CounterModelKind.ALPHA_C:
        busy = {
            n: event
            for n, event in gpmtool_files.BUSY_SHARE_EVENTS.items()
            if f"{n} dynamic" in coefficients
        }
        alpha = (
            replace(rails[n], alpha=event, full_f=coefficients[f"{n} dynamic"])
            for n, event in busy.items()
        )
        return SwitchedCapacitance(coefficients["base"], tuple(alpha))
    if ACTIVE_CYCLE in coefficients:
        events_of["core"] = {ACTIVE_CYCLE: coefficients[ACTIVE_CYCLE]} | events_of["core"]
    used = [name for name in RAILS if name != "host" or events_of[name]]
    return HybridRail(
        coefficients["base"], tuple(replace(rails[name], event_f=events_of[name]) for name in used)
    )


def average_measured_voltage(clock_hz: Array, voltage_v: Array) -> RailVoltage:
    """Return the mean measured voltage by clock, made non-decreasing."""
    clocks, at = np.unique(clock_hz, return_inverse=True)
    mean = np.bincount(at.reshape(-1), voltage_v) / np.bincount(at.reshape(-1))
    return RailVoltage(clocks, np.maximum.accumulate(mean))


MEMORY_SATURATIONS = (
    None,
    0.7,
    0.8,
    0.9,
)  # shares of the memory bandwidth at which a kernel may saturate


@dataclass(frozen=True)
class CounterFitOptions:
    """The options of fitting and judging."""

    estimator: Annotated[
        model_selection.CostEstimator,
        Option(
            "nnls (non-negative), ols (ordinary) or huber (robust nnls).", panel="How it is fitted"
        ),
    ] = model_selection.CostEstimator.NON_NEGATIVE
    models: Annotated[
        tuple[CounterModelKind, ...],
        Option(
            "Kinds: rate, linear_with_clocks, switched_capacitance, hybrid_rail.",
            "model",
            panel="How it is fitted",
        ),
    ] = tuple(CounterModelKind)
    folds: Annotated[
        int,
        Option(
            "Parts of benchmarks to hold out; 0 leaves one out at a time.",
            panel="How it is fitted",
            least=0,
        ),
    ] = 0  # 0: leave one out; else that many parts
    clusters: Annotated[
        int,
        Option(
            "Clusters of similar work; 0: as many as predictors.", panel="How it is fitted", least=0
        ),
    ] = 0  # 0: as many as there are predictors
    advice: Annotated[bool, Option("Say how many training clocks are enough.")] = True
    offset_hz: Annotated[
        tuple[float, ...],
        Option(
            "Memory clock at which power is off the line: 204MHz; repeatable.",
            unit="Hz",
            panel="How it is fitted",
        ),
    ] = ()  # memory clocks at which power is off the line; none: tried at the lowest
    hold: tuple[str, ...] = (
        "benchmark",
        "group",
        "cluster",
    )  # units to hold out; benchmarks always are


@dataclass(frozen=True)
class FittedModelKind:
    """One kind of model, fitted to all rows and judged on held-out ones."""

    model: CounterModelKind
    settings: model_selection.FitSettings
    fit: model_selection.TermsFit
    power: PowerModel
    scaling: Mapping[str, float]  # how its table carries activity to other clocks
    predicted_w: Array  # (row,), of the fit to all rows
    in_sample: model_selection.PowerErrors
    held_out: Mapping[str, model_selection.HeldOutPrediction]  # by benchmark, group, cluster
    diagnosis: fit_diagnostics.FitDiagnosis


@dataclass(frozen=True)
class RailVoltageReport:
    """The inferred voltage of one rail, and whether the data identify it."""

    rail: str
    clock_hz: Array
    relative: Array  # one curve for all settings of the other clock
    standard_error: Array
    identifiable: bool
    reason: str


@dataclass(frozen=True)
class HeldBackRows:
    """Rows that were never trained on, and each model's watts of them."""

    names: tuple[str, ...]  # (row,) benchmarks
    power_w: Array  # (row,)
    predicted_w: Mapping[CounterModelKind, Array]  # (row,) each

    def mape(self, model: CounterModelKind) -> float:
        """Return the mean absolute error of a model in percent."""
        return float(
            np.abs(model_selection.percent_error(self.predicted_w[model], self.power_w)).mean()
        )

    def summarise(self, model: CounterModelKind) -> list[tuple[str, int, float, float, float]]:
        """Return each benchmark's rows, mean watts, mean absolute and mean signed error in
        percent.
        """
        error = model_selection.percent_error(self.predicted_w[model], self.power_w)
        names = np.array(self.names)
        rows = []
        for name in dict.fromkeys(self.names):
            of_name = names == name
            watts, size, signed = (
                float(v[of_name].mean()) for v in (self.power_w, np.abs(error), error)
            )
            rows.append((name, int(of_name.sum()), watts, size, signed))
        return rows


@dataclass(frozen=True)
class CounterFit:
    """The complete result of ``wattcast lab fit counters``."""

    table: CounterTable  # trained on, as the best model's settings scale it
    kinds: Mapping[CounterModelKind, FittedModelKind]
    rails: tuple[RailVoltageReport, ...]
    clusters: int
    training_clocks: tuple[fit_diagnostics.ClockSubset, ...]
    warnings: tuple[str, ...]
    tested: HeldBackRows | None = None


def read_counter_tables(
    path: Path,
    form: str,
    columns: Path | None,
) -> dict[str, CounterTable]:
    """Read the tables to choose from: one, or one for each way in which activity may scale with the
    clocks.
    """
    if form == "gpmtool":
        file = gpmtool_files.read_utilisations(path)
        names = ["no saturation" if s is None else f"saturation {s:g}" for s in MEMORY_SATURATIONS]
        tables = [gpmtool_files.make_utilisation_table(file, s) for s in MEMORY_SATURATIONS]
        return dict(zip(names, tables, strict=True))
    if form == "dcgm":
        return {"counted": gpmtool_files.read_dcgm_table(path)}
    assert columns is not None, "the command asks for a map first"
    return {"counted": counter_table.read_counter_table(path, columns)}


def fit_counters(
    tables: Mapping[str, CounterTable],
    options: CounterFitOptions | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> CounterFit:
    """Fit every kind of model, hold out benchmarks, groups and clusters, and say how many
    training clocks are enough.

    Groups that the table names as its test, and benchmarks left out with a reason, are not trained
    on in any way."""
    how = options or CounterFitOptions()
    train, test = next(iter(tables.values())).split_benchmarks()
    training_tables = {
        name: table_of_kind.keep_benchmarks(train) for name, table_of_kind in tables.items()
    }
    bench = model_selection.FitWorkbench(training_tables, how.estimator, how.offset_hz)
    table = bench.table
    count = how.clusters or min(len(table.predictors), table.benchmarks // 2)
    kinds = {model: _fit_kind(bench, model, how, count, progress) for model in how.models}
    main = kinds.get(CounterModelKind.HYBRID) or kinds[how.models[-1]]
    planes = np.unique(bench.clock_hz).size * np.unique(bench.memory_clock_hz).size > 1
    wants_advice = how.advice and main.model is CounterModelKind.HYBRID
    clocks = (
        fit_diagnostics.try_training_clocks(bench, main.model, main.settings)
        if wants_advice and planes
        else []
    )
    scaled = bench.tables[main.settings.variant]
    rails = _report_voltages(bench, main) if main.model is CounterModelKind.HYBRID else ()
    words = [*describe_missing_terms(scaled), *main.diagnosis.warnings]
    words += [f"Voltage of the {r.rail} rail: {r.reason}" for r in rails if not r.identifiable]
    words += [f"Not trained on: {name}: {reason}." for name, reason in scaled.left_out.items()]
    tested = None
    if test.any():  # is predicted by models of the same settings, fitted to the others
        bench = model_selection.FitWorkbench(tables, how.estimator, how.offset_hz)
        rows = np.flatnonzero(test[bench.table.benchmark])
        names = tuple(bench.table.benchmark_names[b] for b in bench.table.benchmark[rows])
        predicted_w = {
            model: bench.predict(bench.fit(model, kind.settings, train))[rows]
            for model, kind in kinds.items()
        }
        tested = HeldBackRows(names, bench.table.power_w[rows], predicted_w)
    return CounterFit(scaled, kinds, rails, count, tuple(clocks), tuple(words), tested)


def _fit_kind(
    bench: model_selection.FitWorkbench,
    model: CounterModelKind,
    how: CounterFitOptions,
    count: int,
    progress: Callable[[str], None],
) -> FittedModelKind:
    table = bench.table
    everyone = np.ones(table.benchmarks, dtype=bool)
    labels = {"benchmark": np.arange(table.benchmarks)}
    if "group" in how.hold and 1 < np.unique(table.group).size < table.benchmarks:
        labels["group"] = table.group
    if "cluster" in how.hold and 2 <= count < table.benchmarks:
        labels["cluster"] = model_selection.cluster_benchmarks(table.features(), count)
    inner = model_selection.deal_inner_folds(labels["benchmark"], everyone)
    settings = model_selection.choose_settings(bench, model, everyone, inner)
    fit = bench.fit(model, settings, everyone)
    scaled = bench.tables[settings.variant]
    predicted_w = bench.predict(fit)
    held_out = {
        by: model_selection.predict_held_out(
            bench, model, label, by, how.folds if by == "benchmark" else 0, progress
        )
        for by, label in labels.items()
    }
    power = make_power_model(fit, scaled)
    diagnosis = fit_diagnostics.diagnose_fit(fit, scaled, everyone)
    score = model_selection.score_prediction(table, predicted_w)
    return FittedModelKind(
        model, settings, fit, power, scaled.scaling, predicted_w, score, held_out, diagnosis
    )


def _report_voltages(
    bench: model_selection.FitWorkbench, main: FittedModelKind
) -> tuple[RailVoltageReport, ...]:
    """Report the voltage of each rail as one curve over its own clock, and whether the data
    identify it.
    """
    everyone = np.ones(bench.table.benchmarks, dtype=bool)
    plain = replace(main.settings, floored=False)
    pooled = bench.fit(main.model, plain, everyone)
    diagnosis = fit_diagnostics.diagnose_fit(pooled, bench.tables[plain.variant], everyone)
    how = pooled.how
    all_errors = diagnosis.voltage_error
    out = []
    for index, (rail, axis) in enumerate((("core", how.core), ("memory", how.memory))):
        if rail in bench.table.voltage_v:
            continue
        clocks = axis.hz
        first = np.unique(axis.at, return_index=True)[1]
        error = all_errors[first, index]
        reason = ""
        if not axis.inferred:
            reason = (
                "not identifiable: its clock never changes, or nothing on it is "
                "counted; taken as constant."
            )
        elif error.max() > fit_diagnostics.UNCERTAIN_VOLTAGE:
            worst = int(error.argmax())
            reason = (
                f"not identifiable at {clocks[worst] / 1e6:.0f} MHz (standard error "
                f"{error[worst]:.2f} of a relative "
                "voltage): clock power and dynamic power there fit many voltages. Measure "
                "work that uses this rail "
                "more."
            )
        level = pooled.inferred.voltage[first, index]
        out.append(RailVoltageReport(rail, clocks, level, error, not reason, reason))
    return tuple(out)


def counter_fit_to_plain(result: CounterFit) -> dict[str, Any]:
    """Return the result as plain mappings for JSON; numbers are SI, errors in percent."""
    table = result.table
    main = main_model_kind(result)
    tested = result.tested
    models = []
    for kind in result.kinds.values():
        predicted_w = kind.held_out["benchmark"].predicted_w
        core_hz, memory_hz, mape = model_selection.average_error_plane(table, predicted_w)
        bias = model_selection.average_error_plane(table, predicted_w, signed=True)[2]
        planes = {  # null where nothing was measured
            name: [[float(v) if np.isfinite(v) else None for v in row] for row in plane]
            for name, plane in (("mape", mape), ("bias", bias))
        }
        held_out = {
            by: vars(prediction.score)
            | {"default_known": vars(prediction.anchored) if prediction.anchored else None}
            for by, prediction in kind.held_out.items()
        }
        errors = {
            "in_sample": vars(kind.in_sample),
            "held_out": held_out,
            "settings": vars(kind.settings),
        }
        plane = {
            "core_hz": core_hz.tolist(),
            "memory_hz": memory_hz.tolist(),
            **planes,
        }
        test = {"test_mape": tested.mape(kind.model)} if tested else {}
        models.append(
            {
                "kind": str(kind.model),
                **errors,
                **test,
                "plane": plane,
            }
        )
    how = main.fit.how
    by_memory_clock = []
    if main.model is CounterModelKind.HYBRID and how.core.inferred:
        curve = how.curves(main.fit.inferred.theta)[0]
        for clock_hz in how.memory.hz.tolist():
            level = [float(v) for v in curve.level_at(how.core.hz, clock_hz)]
            entry = {
                "memory_clock_hz": clock_hz,
                "clock_hz": how.core.hz.tolist(),
                "relative": level,
            }
            by_memory_clock.append(entry)
    clocks: dict[str, Any] | None = None
    if result.training_clocks:
        clocks = {"subsets": [vars(s) for s in result.training_clocks]}
        clocks["enough"] = fit_diagnostics.smallest_sufficient_clocks(
            list(result.training_clocks)
        ).points
    return {
        "wattcast": __version__,
        "table": {
            "name": table.name,
            "rows": table.rows,
            "benchmarks": table.benchmarks,
            "groups": int(np.unique(table.group).size),
            "clusters": result.clusters,
            "core_clocks": int(np.unique(table.clock_hz).size),
            "memory_clocks": int(np.unique(table.memory_clock_hz).size),
            "predictors": [
                {
                    "event": p.event,
                    "column": p.column,
                    "rail": p.rail,
                }
                for p in table.predictors
            ],
        },
        "models": models,
        "coefficients": [vars(c) for c in main.diagnosis.coefficients],
        "condition": main.diagnosis.condition,
        "voltage": [
            {
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in vars(rail).items()
            }
            for rail in result.rails
        ],
        "voltage_by_memory_clock": by_memory_clock,
        "training_clocks": clocks,
        "test": list_test_rows(tested.names, tested.power_w, tested.predicted_w[main.model])
        if tested
        else [],
        "warnings": list(result.warnings),
        "assumptions": list(table.notes),
    }


def list_test_rows(
    names: Sequence[str],
    measured_w: Array,
    predicted_w: Array,
) -> list[dict[str, Any]]:
    """Return measured and predicted watts of rows that were never trained on, as plain values for
    JSON.
    """
    rows = zip(names, measured_w.tolist(), predicted_w.tolist(), strict=True)
    return [
        {
            "benchmark": name,
            "measured_w": real_w,
            "predicted_w": found_w,
        }
        for name, real_w, found_w in rows
    ]


def main_model_kind(result: CounterFit) -> FittedModelKind:
    """Return the main model of a fit: the hybrid, or the last kind asked for."""
    return result.kinds.get(CounterModelKind.HYBRID) or list(result.kinds.values())[-1]


def make_saved_model(
    result: CounterFit,
    name: str,
    device: str = "",
) -> SavedModel:
    """Return the main model with its held-out errors, ready to be written."""
    main = main_model_kind(result)
    table = result.table
    errors = {
        f"held out by {by}": prediction.score.mape for by, prediction in main.held_out.items()
    }
    anchored = main.held_out["benchmark"].anchored
    if result.tested is not None:
        errors["never trained on"] = result.tested.mape(main.model)
    if anchored is not None:
        errors["held out by benchmark, power at the default clocks known"] = anchored.mape
    rows = f"{table.rows} rows of {table.benchmarks} benchmarks"
    source = f"wattcast lab fit counters {__version__}, {table.name}: {rows}"
    origin = Provenance(source, datetime.now(tz=UTC).date().isoformat(), device)
    return SavedModel(
        name, main.power, origin, errors, (*table.notes, *result.warnings), table.scaling
    )


def predict_programs(
    result: CounterFit,
    work: UtilisationFile,
    measured: MeasuredPrograms,
) -> CounterFit:
    """Return the fit with programs as its test: watts over the clocks they were measured at, by
    every model.
    """
    match = gpmtool_files.match_programs(measured.names, work.names)
    rows = np.array([i for i, name in enumerate(measured.names) if name in match])
    if not rows.size:
        raise bad_value(
            "--measured",
            f"programs of --predict ({', '.join(work.names[:6])}, ...)",
            measured.names[0],
        )
    clocks = measured.clock_hz[rows], measured.memory_clock_hz[rows]
    which = [work.names.index(match[measured.names[i]]) for i in rows]
    predicted_w = {}
    for model, kind in result.kinds.items():
        activity = gpmtool_files.application_activity(work, kind.scaling, *clocks)
        predicted_w[model] = kind.power.power(activity).total_w[which, np.arange(rows.size), 0]
    names = tuple(measured.names[i] for i in rows)
    return replace(result, tested=HeldBackRows(names, measured.power_w[rows], predicted_w))


def predict_applications(result: CounterFit, work: UtilisationFile) -> list[dict[str, Any]]:
    """Predict applications, known by utilisations at the default clocks, over the measured clock
    plane.
    """
    core_hz = np.unique(result.table.clock_hz)
    memory_hz = np.unique(result.table.memory_clock_hz)
    core, memory = (axis.ravel() for axis in np.meshgrid(core_hz, memory_hz, indexing="ij"))
    activity = gpmtool_files.application_activity(work, result.table.scaling, core, memory)
    total_w = main_model_kind(result).power.power(activity).total_w[..., 0]
    planes = total_w.reshape(len(work.names), core_hz.size, memory_hz.size).tolist()
    clocks = {"core_hz": core_hz.tolist(), "memory_hz": memory_hz.tolist()}
    return [
        {
            "name": name,
            **clocks,
            "power_w": plane,
        }
        for name, plane in zip(work.names, planes, strict=True)
    ]
