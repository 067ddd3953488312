"""Fit every kind of counter model to a table and judge it on held-out work."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.core.option_declaration import Option
from wattcast.lab.counter_models import (
    busy_share_logs,
    counter_table,
    fit_diagnostics,
    gpmtool_files,
    model_selection,
)
from wattcast.lab.counter_models.counter_table import CounterTable, LabelCodes
from wattcast.lab.counter_models.fitted_power_model import make_power_model
from wattcast.lab.counter_models.gpmtool_files import MeasuredPrograms, UtilisationFile
from wattcast.lab.counter_models.rail_terms import (
    ClockAxis,
    CounterModelKind,
    describe_missing_terms,
)
from wattcast.power.power_model import PowerModel

# shares of the memory bandwidth at which a kernel may saturate; None: it never does
MEMORY_SATURATIONS = (None, 0.7, 0.8, 0.9)


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
    ] = 0
    clusters: Annotated[
        int,
        Option(
            "Clusters of similar work; 0: as many as predictors.", panel="How it is fitted", least=0
        ),
    ] = 0
    advice: Annotated[bool, Option("Say how many training clocks are enough.")] = True
    offset_hz: Annotated[
        tuple[float, ...],
        Option(
            "Memory clock at which power is off the line: 204MHz; repeatable.",
            unit="Hz",
            panel="How it is fitted",
        ),
    ] = ()  # none: an offset at the lowest memory clock is tried
    # units to hold out; benchmarks always are
    hold: tuple[str, ...] = ("benchmark", "group", "cluster")


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
        error = model_selection.percent_error(self.predicted_w[model], self.power_w)
        return float(np.abs(error).mean())

    def summarise(self, model: CounterModelKind) -> list[tuple[str, int, float, float, float]]:
        """Return each benchmark's rows, mean watts, mean absolute and mean signed error in
        percent.
        """
        error = model_selection.percent_error(self.predicted_w[model], self.power_w)
        names = np.array(self.names)
        rows = []
        for name in dict.fromkeys(self.names):
            of_name = names == name
            mean_w = float(self.power_w[of_name].mean())
            mean_absolute = float(np.abs(error)[of_name].mean())
            mean_signed = float(error[of_name].mean())
            rows.append((name, int(of_name.sum()), mean_w, mean_absolute, mean_signed))
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
        tables = {}
        for saturation in MEMORY_SATURATIONS:
            name = "no saturation" if saturation is None else f"saturation {saturation:g}"
            tables[name] = gpmtool_files.make_utilisation_table(file, saturation)
        return tables
    if form == "dcgm":
        return {"counted": busy_share_logs.read_dcgm_table(path)}
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
    training_tables = {name: table.keep_benchmarks(train) for name, table in tables.items()}
    bench = model_selection.FitWorkbench(training_tables, how.estimator, how.offset_hz)
    clusters = how.clusters or min(len(bench.table.predictors), bench.table.benchmarks // 2)
    kinds = {
        model: _fit_kind(
            bench,
            model,
            how,
            clusters,
            progress,
        )
        for model in how.models
    }
    main = _choose_main_kind(kinds)
    rails = _report_voltages(bench, main) if main.model is CounterModelKind.HYBRID else ()
    tested = None
    if test.any():
        whole_bench = model_selection.FitWorkbench(tables, how.estimator, how.offset_hz)
        tested = _predict_test_rows(whole_bench, kinds, train, test)
    table = bench.tables[main.settings.variant]
    return CounterFit(
        table=table,
        kinds=kinds,
        rails=rails,
        clusters=clusters,
        training_clocks=_advise_training_clocks(bench, main) if how.advice else (),
        warnings=_warn_about_fit(table, main, rails),
        tested=tested,
    )


def _advise_training_clocks(
    bench: model_selection.FitWorkbench,
    main: FittedModelKind,
) -> tuple[fit_diagnostics.ClockSubset, ...]:
    """Return the error by number of training clocks, for a hybrid model over several clocks."""
    clock_pairs = np.unique(bench.clock_hz).size * np.unique(bench.memory_clock_hz).size
    if main.model is not CounterModelKind.HYBRID or clock_pairs == 1:
        return ()
    return tuple(fit_diagnostics.try_training_clocks(bench, main.model, main.settings))


def _warn_about_fit(
    table: CounterTable,
    main: FittedModelKind,
    rails: Sequence[RailVoltageReport],
) -> tuple[str, ...]:
    """Return sentences on terms, costs and voltages that the table does not determine."""
    words = [*describe_missing_terms(table), *main.diagnosis.warnings]
    unidentified = [rail for rail in rails if not rail.identifiable]
    words += [f"Voltage of the {rail.rail} rail: {rail.reason}" for rail in unidentified]
    words += [f"Not trained on: {name}: {reason}." for name, reason in table.left_out.items()]
    return tuple(words)


def _predict_test_rows(
    bench: model_selection.FitWorkbench,
    kinds: Mapping[CounterModelKind, FittedModelKind],
    train: Mask,
    test: Mask,
) -> HeldBackRows:
    """Predict the benchmarks of ``test`` by models of the same settings, fitted to ``train``."""
    table = bench.table
    rows = np.flatnonzero(test[table.benchmark])
    names = tuple(table.benchmark_names[benchmark] for benchmark in table.benchmark[rows])
    predicted_w = {}
    for model, kind in kinds.items():
        fit = bench.fit(model, kind.settings, train)
        predicted_w[model] = bench.predict(fit)[rows]
    return HeldBackRows(names, table.power_w[rows], predicted_w)


def _fit_kind(
    bench: model_selection.FitWorkbench,
    model: CounterModelKind,
    how: CounterFitOptions,
    clusters: int,
    progress: Callable[[str], None],
) -> FittedModelKind:
    """Fit one kind of model to all benchmarks, and predict each with it held out."""
    table = bench.table
    everyone = np.ones(table.benchmarks, dtype=bool)
    labels = _label_held_out_units(table, how, clusters)
    inner = model_selection.deal_inner_folds(labels["benchmark"], everyone)
    settings = model_selection.choose_settings(bench, model, everyone, inner)
    fit = bench.fit(model, settings, everyone)
    scaled = bench.tables[settings.variant]
    predicted_w = bench.predict(fit)
    held_out = {}
    for by, label in labels.items():
        folds = how.folds if by == "benchmark" else 0
        held_out[by] = model_selection.predict_held_out(
            bench,
            model,
            label,
            by,
            folds,
            progress,
        )
    return FittedModelKind(
        model=model,
        settings=settings,
        fit=fit,
        power=make_power_model(fit, scaled),
        scaling=scaled.scaling,
        predicted_w=predicted_w,
        in_sample=model_selection.score_prediction(table, predicted_w),
        held_out=held_out,
        diagnosis=fit_diagnostics.diagnose_fit(fit, scaled, everyone),
    )


def _label_held_out_units(
    table: CounterTable,
    how: CounterFitOptions,
    clusters: int,
) -> dict[str, LabelCodes]:
    """Return the label of each benchmark by unit to hold out: itself, its group, its cluster."""
    labels = {"benchmark": np.arange(table.benchmarks)}
    if "group" in how.hold and 1 < np.unique(table.group).size < table.benchmarks:
        labels["group"] = table.group
    if "cluster" in how.hold and 2 <= clusters < table.benchmarks:
        labels["cluster"] = model_selection.cluster_benchmarks(table.features(), clusters)
    return labels


def _report_voltages(
    bench: model_selection.FitWorkbench,
    main: FittedModelKind,
) -> tuple[RailVoltageReport, ...]:
    """Report the voltage of each rail as one curve over its own clock, and whether the data
    identify it.
    """
    everyone = np.ones(bench.table.benchmarks, dtype=bool)
    without_floor = replace(main.settings, floored=False)
    pooled = bench.fit(main.model, without_floor, everyone)
    table = bench.tables[without_floor.variant]
    diagnosis = fit_diagnostics.diagnose_fit(pooled, table, everyone)
    axes = {"core": pooled.how.core, "memory": pooled.how.memory}
    reports = []
    for index, (rail, axis) in enumerate(axes.items()):
        if rail in bench.table.voltage_v:
            continue
        _, first_point = np.unique(axis.at, return_index=True)
        standard_error = diagnosis.voltage_error[first_point, index]
        reason = _explain_unidentified_voltage(axis, standard_error)
        reports.append(
            RailVoltageReport(
                rail=rail,
                clock_hz=axis.hz,
                relative=pooled.inferred.voltage[first_point, index],
                standard_error=standard_error,
                identifiable=not reason,
                reason=reason,
            )
        )
    return tuple(reports)


def _explain_unidentified_voltage(axis: ClockAxis, standard_error: Array) -> str:
    """Return why the data do not identify the voltage of a rail; empty where they do."""
    if not axis.inferred:
        return (
            "not identifiable: its clock never changes, or nothing on it is "
            "counted; taken as constant."
        )
    worst = int(standard_error.argmax())
    if standard_error[worst] > fit_diagnostics.UNCERTAIN_VOLTAGE:
        return (
            f"not identifiable at {axis.hz[worst] / 1e6:.0f} MHz (standard error "
            f"{standard_error[worst]:.2f} of a relative voltage): clock power and dynamic power "
            "there fit many voltages. Measure work that uses this rail more."
        )
    return ""


def main_model_kind(result: CounterFit) -> FittedModelKind:
    """Return the main model of a fit: the hybrid, or the last kind asked for."""
    return _choose_main_kind(result.kinds)


def _choose_main_kind(kinds: Mapping[CounterModelKind, FittedModelKind]) -> FittedModelKind:
    return kinds.get(CounterModelKind.HYBRID) or list(kinds.values())[-1]


def predict_programs(
    result: CounterFit,
    work: UtilisationFile,
    measured: MeasuredPrograms,
) -> CounterFit:
    """Return the fit with programs as its test: watts over the clocks they were measured at, by
    every model.
    """
    match = gpmtool_files.match_programs(measured.names, work.names)
    rows = np.array([row for row, name in enumerate(measured.names) if name in match])
    if not rows.size:
        raise bad_value(
            "--measured",
            f"programs of --predict ({', '.join(work.names[:6])}, ...)",
            measured.names[0],
        )
    names = tuple(measured.names[row] for row in rows)
    application = [work.names.index(match[name]) for name in names]
    clock_hz = measured.clock_hz[rows]
    memory_clock_hz = measured.memory_clock_hz[rows]
    predicted_w = {}
    for model, kind in result.kinds.items():
        activity = gpmtool_files.application_activity(work, kind.scaling, clock_hz, memory_clock_hz)
        total_w = kind.power.power(activity).total_w  # (application, row, 1)
        predicted_w[model] = total_w[application, np.arange(rows.size), 0]
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
    planes_w = total_w.reshape(len(work.names), core_hz.size, memory_hz.size)
    applications = []
    for name, plane_w in zip(work.names, planes_w.tolist(), strict=True):
        applications.append(
            {
                "name": name,
                "core_hz": core_hz.tolist(),
                "memory_hz": memory_hz.tolist(),
                "power_w": plane_w,
            }
        )
    return applications
