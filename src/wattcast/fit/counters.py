"""Counter models of a table: every kind fitted, judged on work it has not seen, and explained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast.arrays import Array
from wattcast.fit import gpmtool, read_table
from wattcast.fit.advise import Candidate, ClockSubset, next_benchmarks, training_clocks
from wattcast.fit.build import power_model
from wattcast.fit.choose import Estimator, Fit, Settings, Workbench, choose
from wattcast.fit.diagnose import UNCERTAIN_VOLTAGE, Diagnosis, diagnose
from wattcast.fit.heldout import HeldOut, Progress, held_out, inner_folds, silent
from wattcast.fit.score import Score, score
from wattcast.fit.split import clusters
from wattcast.fit.table import CounterTable
from wattcast.fit.terms import Model, left_out
from wattcast.power.interface import PowerModel

SATURATIONS = (None, 0.7, 0.8, 0.9)  # shares of the memory bandwidth at which a kernel may saturate


@dataclass(frozen=True)
class Options:
    """How to fit and how to judge."""

    estimator: Estimator = Estimator.NON_NEGATIVE
    models: tuple[Model, ...] = tuple(Model)
    folds: int = 0  # 0: leave one out; else that many parts
    clusters: int = 0  # 0: as many as there are predictors
    advice: bool = True  # training clocks and the next benchmark
    offset_hz: tuple[float, ...] = ()  # memory clocks at which power is off the line; none: tried at the lowest
    hold: tuple[str, ...] = ("benchmark", "group", "cluster")  # what is held out; benchmarks always are


@dataclass(frozen=True)
class FittedKind:
    """One kind of model, fitted to all rows and judged on held-out ones."""

    model: Model
    settings: Settings
    fit: Fit
    power: PowerModel
    predicted_w: Array  # (row,), of the fit to all rows
    in_sample: Score
    held_out: Mapping[str, HeldOut]  # by benchmark, group, cluster
    diagnosis: Diagnosis


@dataclass(frozen=True)
class RailReport:
    """What was found about the voltage of one rail."""

    rail: str
    clock_hz: Array
    relative: Array  # one curve for all settings of the other clock
    standard_error: Array
    identifiable: bool
    reason: str


@dataclass(frozen=True)
class CounterFit:
    """Everything `wattcast fit counters` says."""

    table: CounterTable  # as the best model's settings scale it
    kinds: Mapping[Model, FittedKind]
    rails: tuple[RailReport, ...]
    clusters: int
    training_clocks: tuple[ClockSubset, ...]
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...]


def read(path: Path, form: str, columns: Path | None) -> dict[str, CounterTable]:
    """Tables to choose among: one, or one for each way activity may scale with the clocks."""
    if form == "gpmtool":
        file = gpmtool.read(path)
        return {_variant(s): gpmtool.table(file, s) for s in SATURATIONS}
    assert columns is not None, "the command asks for a map first"
    return {"counted": read_table.read(path, columns)}


def fit_counters(
    tables: Mapping[str, CounterTable], options: Options | None = None, progress: Progress = silent
) -> CounterFit:
    """Fit every kind of model, hold out benchmarks, groups and clusters, and say what else to measure."""
    how = options or Options()
    bench = Workbench(tables, how.estimator, how.offset_hz)
    table = bench.table
    count = how.clusters or min(len(table.predictors), table.benchmarks // 2)
    kinds = {model: _kind(bench, model, how, count, progress) for model in how.models}
    main = kinds.get(Model.HYBRID) or kinds[how.models[-1]]
    everyone = np.ones(table.benchmarks, dtype=bool)
    planes = np.unique(bench.clock_hz).size * np.unique(bench.memory_clock_hz).size > 1
    asked = how.advice and main.model is Model.HYBRID
    clocks = training_clocks(bench, main.model, main.settings) if asked and planes else []
    candidates = next_benchmarks(bench, main.fit, everyone) if asked else []
    scaled = bench.tables[main.settings.variant]
    rails = _rails(bench, main) if main.model is Model.HYBRID else ()
    words = [*left_out(scaled), *main.diagnosis.warnings]
    words += [f"Voltage of the {r.rail} rail: {r.reason}" for r in rails if not r.identifiable]
    return CounterFit(scaled, kinds, rails, count, tuple(clocks), tuple(candidates), tuple(words))


def _kind(bench: Workbench, model: Model, how: Options, count: int, progress: Progress) -> FittedKind:
    table = bench.table
    everyone = np.ones(table.benchmarks, dtype=bool)
    labels = {"benchmark": np.arange(table.benchmarks)}
    if "group" in how.hold and np.unique(table.group).size < table.benchmarks:
        labels["group"] = table.group
    if "cluster" in how.hold and 2 <= count < table.benchmarks:
        labels["cluster"] = clusters(table.features(), count)
    settings = choose(bench, model, everyone, inner_folds(labels["benchmark"], everyone))
    fit = bench.fit(model, settings, everyone)
    scaled = bench.tables[settings.variant]
    diagnosis = diagnose(fit, scaled, everyone)
    predicted_w = bench.predict(fit)
    held = {
        by: held_out(bench, model, label, by, how.folds if by == "benchmark" else 0, progress)
        for by, label in labels.items()
    }
    return FittedKind(
        model,
        settings,
        fit,
        power_model(fit, scaled),
        predicted_w,
        score(table, predicted_w),
        held,
        diagnosis,
    )


def _rails(bench: Workbench, main: FittedKind) -> tuple[RailReport, ...]:
    """Voltage of each rail, as one curve over its own clock, and whether it can be known."""
    everyone = np.ones(bench.table.benchmarks, dtype=bool)
    plain = replace(main.settings, floored=False)
    pooled = bench.fit(main.model, plain, everyone)
    error = diagnose(pooled, bench.tables[plain.variant], everyone).voltage_error
    out = []
    for index, (rail, inferred) in enumerate((("core", pooled.how.core), ("memory", pooled.how.memory))):
        if rail in bench.table.voltage_v:
            continue
        clocks = pooled.how.core_hz if rail == "core" else pooled.how.memory_hz
        at = pooled.how.core_at if rail == "core" else pooled.how.memory_at
        first = np.array([int(np.flatnonzero(at == i)[0]) for i in range(clocks.size)])
        level = pooled.inferred.voltage[first, index]
        out.append(_rail(rail, clocks, level, error[first, index], inferred))
    return tuple(out)


def _rail(rail: str, clock_hz: Array, relative: Array, error: Array, inferred: bool) -> RailReport:
    reason = ""
    if not inferred:
        reason = "not identifiable: its clock never changes, or nothing on it is counted; taken as constant."
    elif error.max() > UNCERTAIN_VOLTAGE:
        worst = int(error.argmax())
        reason = (
            f"not identifiable at {clock_hz[worst] / 1e6:.0f} MHz (standard error {error[worst]:.2f} of a relative "
            "voltage): clock power and dynamic power there fit many voltages. Measure work that uses this rail more."
        )
    return RailReport(rail, clock_hz, relative, error, not reason, reason)


def _variant(saturation: float | None) -> str:
    return "no saturation" if saturation is None else f"saturation {saturation:g}"
