"""Fit counter models to a table, choose their settings by cross-validation, and predict held-out
benchmarks.

A fold is a mask over benchmarks that is True for those held out: one at a time, a group, a cluster
of similar work, or one of a few parts. All rows of a benchmark stay on one side."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.errors import bad_value
from wattcast.lab.counter_models import rail_terms
from wattcast.lab.counter_models.counter_table import CounterTable, LabelCodes
from wattcast.lab.counter_models.rail_terms import (
    CounterModelKind,
    GramCells,
    ModelTerms,
)


def deal_folds(labels: LabelCodes, folds: int = 0) -> list[Mask]:
    """Return at most ``folds`` folds of whole labels, dealt out in a fixed random order; 0: one per
    label.
    """
    unique = np.unique(labels)
    if unique.size < 2:
        raise bad_value(
            "cross-validation",
            "at least two benchmarks or groups",
            f"{unique.size}",
            "Measure more.",
        )
    dealt = np.random.default_rng(0).permutation(unique)
    count = min(folds or unique.size, unique.size)
    return [np.isin(labels, dealt[i::count]) for i in range(count)]


def cluster_benchmarks(features: Array, count: int) -> LabelCodes:
    """Return the Ward cluster of each benchmark, ``count`` clusters of similar work."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if not 2 <= count <= len(features):
        raise bad_value("clusters", f"2 to {len(features)}", count)
    return np.asarray(fcluster(linkage(features, "ward"), count, "maxclust"), dtype=np.int64)


@dataclass(frozen=True)
class PowerErrors:
    """Errors of one prediction against measured watts, in percent."""

    mape: float  # mean absolute percentage error
    bias: float  # mean signed percentage error
    worst: float
    by_benchmark_p90: float  # 90th percentile of the benchmarks' own mean errors
    rows: int


def percent_error(predicted_w: Array, measured_w: Array) -> Array:
    """Return the signed error 100·(P̂ - P)/P."""
    return np.asarray(100.0 * (predicted_w / measured_w - 1.0))


def mean_absolute_error_percent(predicted_w: Array, measured_w: Array) -> float:
    """Return the mean of |P̂/P - 1| in percent."""
    return float(100.0 * np.abs(predicted_w / measured_w - 1.0).mean())


def score_prediction(table: CounterTable, predicted_w: Array) -> PowerErrors:
    """Return the errors of a prediction over all rows of a table."""
    error = percent_error(predicted_w, table.power_w)
    size = np.abs(error)
    benchmark_errors = np.bincount(table.benchmark, size) / np.bincount(table.benchmark)
    worst = float(size.max())
    p90 = float(np.quantile(benchmark_errors, 0.9))
    return PowerErrors(
        float(size.mean()),
        float(error.mean()),
        worst,
        p90,
        table.rows,
    )


def average_error_plane(
    table: CounterTable,
    predicted_w: Array,
    signed: bool = False,
) -> tuple[Array, Array, Array]:
    """Return core clocks, memory clocks, and the mean error in percent at each pair, ``(core,
    memory)``.

    Pairs that were never measured are NaN.
    """
    error = percent_error(predicted_w, table.power_w)
    point, clock_hz, memory_clock_hz = rail_terms.operating_points(table)
    mean = np.bincount(point, error if signed else np.abs(error)) / np.bincount(point)
    core = np.unique(clock_hz)
    memory = np.unique(memory_clock_hz)
    plane = np.full((core.size, memory.size), np.nan)
    plane[np.searchsorted(core, clock_hz), np.searchsorted(memory, memory_clock_hz)] = mean
    return core, memory, plane


HUBER_LIMIT = 1.345  # in standard deviations: 95 % efficient on Gaussian errors
HUBER_STEPS = 6
NORMAL_MEDIAN_DEVIATION = 1.4826  # standard deviation of Gaussian errors over their median size
NOT_EVENTS = ("core leakage", "core clock")
SHRINKAGE_STRENGTHS = (1.0, 0.0, 0.1, 10.0)
FEW_BENCHMARKS = 5  # below so many per predictor, events of a family share one coefficient at first


def huber_weights(error: Array) -> Array:
    """Return weights of rows by their relative errors, below 1 for those beyond ``HUBER_LIMIT``
    robust deviations.
    """
    deviation = float(np.median(np.abs(error - np.median(error))))
    robust_deviation = NORMAL_MEDIAN_DEVIATION * deviation + 1e-12
    return np.minimum(1.0, HUBER_LIMIT * robust_deviation / np.maximum(np.abs(error), 1e-12))


class CostEstimator(StrEnum):
    """The estimator of coefficients; all minimise relative errors."""

    NON_NEGATIVE = "nnls"
    ORDINARY = "ols"
    HUBER = "huber"  # non-negative, with outliers weighted down


@dataclass(frozen=True)
class FitSettings:
    """The settings that are chosen by cross-validation inside the training rows."""

    variant: str  # which table: how activity was scaled to other clocks
    floored: bool = False  # whether the memory clock sets a floor to the core voltage
    offset: bool = False  # offsets at the named memory clocks, or at the lowest
    tied: bool = False  # one coefficient a family
    strength: float = 1.0  # of the shrinkage, 0 for none


@dataclass(frozen=True)
class TermsFit:
    """One fitted model in terms of design columns."""

    model: CounterModelKind
    settings: FitSettings
    grams: GramCells
    how: rail_terms.VoltagePlan
    inferred: rail_terms.InferredVoltages
    penalty: Array | None
    signed: tuple[bool, ...]

    @property
    def terms(self) -> ModelTerms:
        """The terms that were fitted."""
        return self.grams.terms

    @property
    def coefficient(self) -> Array:
        """Coefficients in the units of the columns, ``(term,)``."""
        return self.inferred.coefficient / self.grams.scale

    def sum_grams(self, train: Mask) -> Array:
        """Return the Gram of the terms over benchmarks of ``train`` at the inferred voltages,
        ``(term, term)``.
        """
        return rail_terms.sum_at_voltage(
            self.terms, self.grams.summed(train), self.inferred.voltage
        )[:-1, :-1]


class FitWorkbench:
    """Holds the tables of a fit and the designs made of them, each made once."""

    def __init__(
        self,
        tables: Mapping[str, CounterTable],
        estimator: CostEstimator = CostEstimator.NON_NEGATIVE,
        offset_hz: Sequence[float] = (),
    ) -> None:
        self.tables = dict(tables)
        self.estimator = estimator
        self.table = next(iter(self.tables.values()))
        self.has_named_offsets = bool(offset_hz)
        self.offset_hz = tuple(offset_hz) or (float(self.table.memory_clock_hz.min()),)
        self._check_offsets()
        point, clock_hz, memory_clock_hz = rail_terms.operating_points(self.table)
        self.point = point
        self.clock_hz = clock_hz
        self.memory_clock_hz = memory_clock_hz
        # the row of each benchmark at the default clocks; None where some benchmark has none
        self.anchor = _find_default_rows(self.table)
        self._cells: dict[tuple[CounterModelKind, str, bool, bool], GramCells] = {}
        self._fits: dict[tuple[Any, ...], TermsFit] = {}

    def _check_offsets(self) -> None:
        """Refuse an offset at a memory clock that the table does not have."""
        table_hz = np.unique(self.table.memory_clock_hz).tolist()
        for clock_hz in self.offset_hz:
            if clock_hz not in table_hz:
                in_table = ", ".join(f"{hz / 1e6:g}" for hz in table_hz)
                expectation = f"a memory clock of the table ({in_table} MHz)"
                raise bad_value("offset", expectation, f"{clock_hz / 1e6:g} MHz")

    @property
    def reference_hz(self) -> tuple[float, float]:
        """Core and memory clock at which relative voltage is 1: the defaults, or the highest
        measured.
        """
        return self.table.default_hz or (
            float(self.clock_hz.max()),
            float(self.memory_clock_hz.max()),
        )

    def start(self) -> FitSettings:
        """Return the settings with which the search begins."""
        few = self.table.benchmarks < FEW_BENCHMARKS * len(self.table.predictors)
        return FitSettings(next(iter(self.tables)), tied=few and self._has_families(), strength=1.0)

    def options(self, model: CounterModelKind) -> list[list[dict[str, Any]]]:
        """Return the settings to try, one axis after the other.

        Only the hybrid model has any: the others are baselines, as they were published. How
        activity scales with the clocks and whether the voltage has a floor are tried together,
        since each can hide the other."""
        if model is not CounterModelKind.HYBRID:
            return [[{"tied": False, "strength": 0.0}]]
        core_clocks = np.unique(self.clock_hz).size
        memory_clocks = np.unique(self.memory_clock_hz).size
        infers_core = "core" not in self.table.voltage_v
        may_be_floored = core_clocks > 2 and memory_clocks > 1 and infers_core
        floors = (False, True) if may_be_floored else (False,)
        variants = product(self.tables, floors)
        axes: list[list[dict[str, Any]]] = [
            [{"variant": name, "floored": is_floored} for name, is_floored in variants]
        ]
        if self.has_named_offsets:
            axes.append([{"offset": True}])
        elif memory_clocks > 3:
            axes.append([{"offset": False}, {"offset": True}])
        if self._has_families():
            first = self.start().tied
            axes.append([{"tied": first}, {"tied": not first}])
        axes.append([{"strength": strength} for strength in SHRINKAGE_STRENGTHS])
        return axes

    def _has_families(self) -> bool:
        """Whether some family has several predictors on one rail."""
        families = [(p.rail, p.family) for p in self.table.predictors if p.family]
        return len(set(families)) < len(families)

    def make_cells(
        self,
        model: CounterModelKind,
        settings: FitSettings,
    ) -> GramCells:
        """Return the Gram cells of the terms for these settings."""
        key = (model, settings.variant, settings.offset, settings.tied)
        if key not in self._cells:
            offsets = self.offset_hz if settings.offset else ()
            table = self.tables[settings.variant]
            terms = rail_terms.build_terms(model, table, offsets, settings.tied)
            self._cells[key] = rail_terms.make_gram_cells(table, terms)
        return self._cells[key]

    def fit(
        self,
        model: CounterModelKind,
        settings: FitSettings,
        train: Mask,
        clocks: Mask | None = None,
        robust: bool = True,
    ) -> TermsFit:
        """Fit a model to the benchmarks of ``train`` (and the operating points of ``clocks``).

        ``robust`` False omits the reweighting of outliers, for the many fits that choose settings.
        Where two benchmarks are held out, one within the other, both orders ask for the same fit.
        """
        if robust and self.estimator is CostEstimator.HUBER:
            return self._fit_anew(model, settings, train, clocks, robust)
        key = (model, settings, train.tobytes(), None if clocks is None else clocks.tobytes())
        if key not in self._fits:
            self._fits[key] = self._fit_anew(model, settings, train, clocks, robust)
        return self._fits[key]

    def _fit_anew(
        self,
        model: CounterModelKind,
        settings: FitSettings,
        train: Mask,
        clocks: Mask | None,
        robust: bool,
    ) -> TermsFit:
        cells = self.make_cells(model, settings)
        terms = cells.terms
        table = self.tables[settings.variant]
        rows = train[table.benchmark]
        if clocks is not None:
            rows = rows & clocks[self.point]
        is_ordinary = self.estimator is CostEstimator.ORDINARY
        signed = tuple(is_ordinary or flag for flag in terms.signed)
        rows_per_benchmark = float(rows.sum()) / max(int(train.sum()), 1)
        firmness = settings.strength * rows_per_benchmark
        mean_w = float(table.power_w[rows].mean())
        full = table.full(rows)
        for _ in range(1 + HUBER_STEPS):
            how = rail_terms.plan_voltages(cells, *self.reference_hz, settings.floored)
            pull = rail_terms.shrinkage_penalty(
                table,
                terms,
                cells.scale,
                full,
                mean_w,
                firmness,
            )
            gram = cells.summed(train, clocks)
            inferred = rail_terms.infer_voltages(
                terms,
                gram,
                how,
                signed,
                pull,
            )
            terms_fit = TermsFit(
                model,
                settings,
                cells,
                how,
                inferred,
                pull,
                signed,
            )
            if self.estimator is not CostEstimator.HUBER or not robust:
                break
            weight = np.ones(table.rows)
            relative_error = self.predict(terms_fit)[rows] / table.power_w[rows] - 1.0
            weight[rows] = huber_weights(relative_error)
            cells = rail_terms.make_gram_cells(table, terms, weight)
        return terms_fit

    def predict(self, fit: TermsFit) -> Array:
        """Return the predicted watts of every row of the table."""
        return np.asarray(self._term_watts(fit).sum(axis=1))

    def _term_watts(self, fit: TermsFit) -> Array:
        """Return the watts of every term, ``(row, term)``."""
        felt, _ = fit.terms.voltage_factors(fit.inferred.voltage)
        return np.asarray(fit.terms.value * felt[self.point] * fit.coefficient)

    def anchored(self, fit: TermsFit) -> Array:
        """Return the watts of every row when each benchmark's power at the default clocks is known.

        P = P̂ + (P₀ - P̂₀)·S/S₀: the error at the default clocks (index 0) scales with the
        switching S of the core rail's events. A model without rails keeps the error as it is, S =
        S₀."""
        assert self.anchor is not None, "every benchmark was measured at the default clocks"
        anchor = self.anchor[self.table.benchmark]  # the row at the default clocks of each row
        predicted_w = self.predict(fit)
        missed_w = (self.table.power_w - predicted_w)[anchor]
        switching = np.ones(self.table.rows)
        if fit.model not in (CounterModelKind.RATE, CounterModelKind.LINEAR):
            switching = self._switching(fit)
        return np.asarray(predicted_w + missed_w * switching / switching[anchor])

    def _switching(self, fit: TermsFit) -> Array:
        """Return the watts of the core rail's events in each row, V²·f where nothing happens."""
        is_event = (fit.terms.rail == 0) & ~np.isin(fit.terms.names, NOT_EVENTS)
        event_w = self._term_watts(fit)[:, is_event].sum(axis=1)
        core_voltage = fit.inferred.voltage[self.point, 0]
        return np.asarray(np.where(event_w > 0, event_w, core_voltage**2 * self.table.clock_hz))


def _find_default_rows(table: CounterTable) -> LabelCodes | None:
    """Return the row of each benchmark at the default clocks; None where some benchmark has
    none.
    """
    rows = np.flatnonzero(table.at_default())
    benchmark = table.benchmark[rows]
    if np.unique(benchmark).size < table.benchmarks:
        return None
    row_of_benchmark = np.zeros(table.benchmarks, dtype=np.int64)
    row_of_benchmark[benchmark] = rows
    return row_of_benchmark


def choose_settings(
    bench: FitWorkbench,
    model: CounterModelKind,
    train: Mask,
    inner: Sequence[Mask],
) -> FitSettings:
    """Choose settings axis by axis by their error on the inner folds, from benchmarks of ``train``
    only.

    The first option of an axis is kept unless another is better by more than the standard error of
    their difference over benchmarks: on few benchmarks the least error is mostly luck. Settings
    about how power changes with the clocks are judged with the power at the default clocks known,
    where possible: the difference of two benchmarks at one clock carries no information about them.
    """

    @cache
    def judge(trial: FitSettings, anchored: bool) -> Array:
        return held_out_errors(
            bench,
            model,
            trial,
            train,
            inner,
            anchored,
        )

    best = bench.start()
    for axis in bench.options(model):
        trials = [replace(best, **option) for option in axis]
        best = trials[0]
        if len(trials) == 1 or not inner:
            continue
        is_about_clocks = not {"tied", "strength"} & set(axis[0])
        anchored = bench.anchor is not None and is_about_clocks
        error = np.array([judge(trial, anchored) for trial in trials])
        least = int(error.mean(axis=1).argmin())
        if _is_surely_better(error[least], error[0]):
            best = trials[least]
    return best


def _is_surely_better(error: Array, first_error: Array) -> bool:
    """Whether errors of benchmarks are less by more than the standard error of the difference."""
    gain = first_error - error
    if gain.size < 2:
        return False
    return bool(gain.mean() > gain.std(ddof=1) / np.sqrt(gain.size))


def held_out_errors(
    bench: FitWorkbench,
    model: CounterModelKind,
    settings: FitSettings,
    train: Mask,
    inner: Sequence[Mask],
    anchored: bool = False,
) -> Array:
    """Return the mean absolute percentage error of each benchmark of ``train`` with its inner fold
    held out.
    """
    table = bench.table
    error = np.full(table.rows, np.nan)
    for fold in inner:
        training = train & ~fold
        test = train & fold
        if test.any() and training.any():
            fit = bench.fit(model, settings, training, robust=False)
            predicted_w = bench.anchored(fit) if anchored else bench.predict(fit)
            rows = test[table.benchmark]
            error[rows] = 100.0 * np.abs(predicted_w[rows] / table.power_w[rows] - 1.0)
    seen = np.isfinite(error)
    count = np.bincount(table.benchmark[seen], minlength=table.benchmarks)
    total = np.bincount(table.benchmark[seen], error[seen], minlength=table.benchmarks)
    return np.asarray(total[count > 0] / count[count > 0])


INNER_FOLDS = 4
MANY_BENCHMARKS = 40  # above so many, there are a few inner folds instead of one per benchmark


@dataclass(frozen=True)
class HeldOutPrediction:
    """Predictions of rows whose benchmark, group or cluster was held out."""

    predicted_w: Array  # (row,)
    score: PowerErrors
    anchored_w: Array | None = None  # with the power at the default clocks known
    anchored: PowerErrors | None = None


def predict_held_out(
    bench: FitWorkbench,
    model: CounterModelKind,
    labels: LabelCodes,
    by: str,
    folds: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> HeldOutPrediction:
    """Hold out each label in turn (or ``folds`` parts of them), choose settings within the rest,
    and predict it.

    The held-out rows influence nothing: neither settings nor the scale of a column, voltages or
    costs. With the power at the default clocks known, one row of each held-out benchmark enters its
    own prediction alone."""
    table = bench.table
    predicted_w = np.full(table.rows, np.nan)
    anchored_w = np.full(table.rows, np.nan)
    outer = deal_folds(labels, folds)
    for index, fold in enumerate(outer):
        train = ~fold
        inner = deal_inner_folds(labels, train)
        settings = choose_settings(bench, model, train, inner)
        fit = bench.fit(model, settings, train)
        rows = fold[table.benchmark]
        predicted_w[rows] = bench.predict(fit)[rows]
        if bench.anchor is not None:
            anchored_w[rows] = bench.anchored(fit)[rows]
        if (index + 1) * 10 // len(outer) > index * 10 // len(outer):
            progress(f"{model}: {index + 1} of {len(outer)} held out by {by}")
    score = score_prediction(table, predicted_w)
    if bench.anchor is None:
        return HeldOutPrediction(predicted_w, score)
    anchored_score = score_prediction(table, anchored_w)
    return HeldOutPrediction(predicted_w, score, anchored_w, anchored_score)


def deal_inner_folds(labels: LabelCodes, train: Mask) -> list[Mask]:
    """Return folds inside the training part, of the same kind as the outer ones."""
    training_labels = np.unique(labels[train])
    if training_labels.size < 2:
        return []
    # held-out benchmarks are in no inner fold that counts
    spare = np.where(train, labels, training_labels[0])
    folds = deal_folds(spare, INNER_FOLDS if training_labels.size > MANY_BENCHMARKS else 0)
    return [fold & train for fold in folds]
