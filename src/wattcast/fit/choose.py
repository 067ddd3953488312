"""Fitting one kind of model with given settings, and choosing the settings inside the training rows only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.fit.gram import Grams, Mask, grams, points
from wattcast.fit.shrink import penalty
from wattcast.fit.table import Codes, CounterTable
from wattcast.fit.terms import Model, Terms, terms
from wattcast.fit.voltage import Inferred, VoltagePlan, factors, infer, plan

HUBER = 1.345  # in standard deviations: 95 % efficient on Gaussian errors
HUBER_STEPS = 6
NOT_EVENTS = ("core leakage", "core clock")
STRENGTHS = (1.0, 0.0, 0.1, 10.0)
FEW = 5  # benchmarks a predictor, below which the events of a family share one coefficient to begin with


class Estimator(StrEnum):
    """How coefficients are found, all on relative errors."""

    NON_NEGATIVE = "nnls"
    ORDINARY = "ols"
    HUBER = "huber"  # non-negative, with outliers weighted down


@dataclass(frozen=True)
class Settings:
    """What is chosen by cross-validation inside the training rows."""

    variant: str  # which table: how activity was scaled to other clocks
    floored: bool = False  # whether the memory clock sets a floor to the core voltage
    offset: bool = False  # offsets at the named memory clocks, or at the lowest
    tied: bool = False  # one coefficient a family
    strength: float = 1.0  # of the shrinkage, 0 for none


@dataclass(frozen=True)
class Fit:
    """One fitted model, still in terms of design columns."""

    model: Model
    settings: Settings
    design: Terms
    grams: Grams
    how: VoltagePlan
    inferred: Inferred
    penalty: Array | None
    signed: tuple[bool, ...]

    @property
    def coefficient(self) -> Array:
        """In the units of the columns, ``(term,)``."""
        return self.inferred.coefficient / self.grams.scale


class Workbench:
    """Tables and the designs made of them, each made once."""

    def __init__(
        self,
        tables: Mapping[str, CounterTable],
        estimator: Estimator = Estimator.NON_NEGATIVE,
        offset_hz: Sequence[float] = (),
    ) -> None:
        if not tables:
            raise bad_value("fit", "at least one table", "none")
        self.tables, self.estimator = dict(tables), estimator
        self.table = next(iter(self.tables.values()))
        self.named = bool(offset_hz)
        self.offset_hz = tuple(offset_hz) or (float(self.table.memory_clock_hz.min()),)
        gone = [hz for hz in self.offset_hz if hz not in self.table.memory_clock_hz]
        if gone:
            seen = ", ".join(f"{hz / 1e6:g}" for hz in np.unique(self.table.memory_clock_hz))
            raise bad_value("offset", f"a memory clock of the table ({seen} MHz)", f"{gone[0] / 1e6:g} MHz")
        self.point, self.clock_hz, self.memory_clock_hz = points(self.table)
        self.anchor = _anchor(self.table)
        self._made: dict[tuple[Model, str, bool, bool], tuple[Terms, Grams]] = {}

    @property
    def reference_hz(self) -> tuple[float, float]:
        """Clocks at which relative voltage is 1: the defaults, or the highest seen."""
        return self.table.default_hz or (float(self.clock_hz.max()), float(self.memory_clock_hz.max()))

    def start(self) -> Settings:
        """Where a search begins."""
        few = self.table.benchmarks < FEW * len(self.table.predictors)
        return Settings(next(iter(self.tables)), tied=few and self._has_families(), strength=1.0)

    def options(self, model: Model) -> list[list[dict[str, Any]]]:
        """Settings worth trying, one axis after the other.

        Only the hybrid model has any: the others are baselines, as they are published. How activity
        scales and whether the voltage has a floor are tried together, since each hides the other.
        """
        if model is not Model.HYBRID:
            return [[{"tied": False, "strength": 0.0}]]
        clocks = np.unique(self.clock_hz).size, np.unique(self.memory_clock_hz).size
        floors = (False, True) if clocks[0] > 2 and clocks[1] > 1 and "core" not in self.table.voltage_v else (False,)
        axes: list[list[dict[str, Any]]] = [
            [{"variant": name, "floored": flag} for name in self.tables for flag in floors]
        ]
        if self.named or clocks[1] > 3:
            axes.append([{"offset": flag} for flag in ((True,) if self.named else (False, True))])
        if self._has_families():
            first = self.start().tied
            axes.append([{"tied": flag} for flag in (first, not first)])
        axes.append([{"strength": strength} for strength in STRENGTHS])
        return axes

    def _has_families(self) -> bool:
        families = [(p.rail, p.family) for p in self.table.predictors if p.family]
        return len(set(families)) < len(families)

    def design(self, model: Model, settings: Settings) -> tuple[Terms, Grams]:
        """Terms and Gram cells for these settings."""
        key = (model, settings.variant, settings.offset, settings.tied)
        if key not in self._made:
            offsets = self.offset_hz if settings.offset else ()
            table = self.tables[settings.variant]
            made = terms(model, table, offsets, settings.tied)
            self._made[key] = made, grams(table, made)
        return self._made[key]

    def fit(
        self, model: Model, settings: Settings, train: Mask, clocks: Mask | None = None, robust: bool = True
    ) -> Fit:
        """Fit to the benchmarks of ``train`` (and the operating points of ``clocks``).

        ``robust`` False leaves out the reweighting of outliers, for the many fits that choose settings.
        """
        design, cells = self.design(model, settings)
        if self.estimator is not Estimator.HUBER or not robust:
            return self._fit(model, settings, design, cells, train, clocks)
        table = self.tables[settings.variant]
        rows = train[table.benchmark] & (clocks[self.point] if clocks is not None else True)
        found = self._fit(model, settings, design, cells, train, clocks)
        for _ in range(HUBER_STEPS):
            error = self.predict(found)[rows] / table.power_w[rows] - 1.0
            spread = 1.4826 * float(np.median(np.abs(error - np.median(error)))) + 1e-12
            weight = np.ones(table.rows)
            weight[rows] = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(error), 1e-12))
            found = self._fit(model, settings, design, grams(table, design, weight), train, clocks)
        return found

    def _fit(
        self, model: Model, settings: Settings, design: Terms, cells: Grams, train: Mask, clocks: Mask | None
    ) -> Fit:
        table = self.tables[settings.variant]
        how = plan(cells, *self.reference_hz, settings.floored)
        signed = tuple(self.estimator is Estimator.ORDINARY or flag for flag in design.signed)
        rows = train[table.benchmark] if clocks is None else train[table.benchmark] & clocks[self.point]
        firmness = settings.strength * float(rows.sum()) / max(int(train.sum()), 1)
        mean_w = float(table.power_w[rows].mean())
        pull = penalty(table, design, cells.scale, table.full(rows), mean_w, firmness)
        found = infer(cells, cells.summed(train, clocks), how, signed, pull)
        return Fit(model, settings, design, cells, how, found, pull, signed)

    def predict(self, fit: Fit) -> Array:
        """Watts of every row of the table."""
        felt, _ = factors(fit.grams, fit.inferred.voltage)
        return np.asarray((fit.design.value * felt[self.point] * fit.coefficient).sum(axis=1))

    def anchored(self, fit: Fit) -> Array:
        """Watts of every row when each benchmark's power at the default clocks is known.

        The same law as :func:`wattcast.power.hybrid_rail.anchored_w`: what the model misses there
        scales like the switching of the core rail's events. A model without rails keeps the miss as it is.
        """
        if self.anchor is None:
            raise bad_value(self.table.name, "every benchmark at the default clocks", "some are not")
        at = self.anchor[self.table.benchmark]
        predicted_w, switching = self.predict(fit), self._switching(fit)
        missed_w = (self.table.power_w - predicted_w)[at]
        return np.asarray(predicted_w + missed_w * switching / switching[at])

    def _switching(self, fit: Fit) -> Array:
        """How much the core rail's events switch in each row; its clock stands in where nothing happens."""
        if fit.model in (Model.RATE, Model.LINEAR):
            return np.ones(self.table.rows)
        core = np.array(
            [r == 0 and n not in NOT_EVENTS for r, n in zip(fit.design.rail, fit.design.names, strict=True)]
        )
        felt, _ = factors(fit.grams, fit.inferred.voltage)
        counted = (fit.design.value * felt[self.point] * fit.coefficient)[:, core].sum(axis=1)
        return np.asarray(
            np.where(counted > 0, counted, fit.inferred.voltage[self.point, 0] ** 2 * self.table.clock_hz)
        )


def choose(bench: Workbench, model: Model, train: Mask, inner: Sequence[Mask]) -> Settings:
    """Settings with the smallest error on the inner folds, axis by axis, from benchmarks of ``train`` only.

    The first option of an axis is kept unless another is better by more than the standard error of
    their difference over benchmarks: on few benchmarks the least error is mostly luck. Settings that
    say how power changes with the clocks are judged with the power at the default clocks known, where
    that can be: what two benchmarks differ in at one clock says nothing about them.
    """
    best = bench.start()
    for axis in bench.options(model):
        trials = [replace(best, **option) for option in axis]
        if len(trials) == 1 or not inner:
            best = trials[0]
            continue
        anchored = bench.anchor is not None and not {"tied", "strength"} & set(axis[0])
        error = np.array([held_out_errors(bench, model, trial, train, inner, anchored) for trial in trials])
        least = int(error.mean(axis=1).argmin())
        gain = error[0] - error[least]
        sure = gain.mean() > gain.std(ddof=1) / np.sqrt(gain.size) if gain.size > 1 else False
        best = trials[least] if sure else trials[0]
    return best


def held_out_errors(
    bench: Workbench, model: Model, settings: Settings, train: Mask, inner: Sequence[Mask], anchored: bool = False
) -> Array:
    """Mean absolute percentage error of each benchmark of ``train`` when its inner fold is held out."""
    table = bench.table
    error = np.full(table.rows, np.nan)
    for fold in inner:
        kept, held = train & ~fold, train & fold
        if held.any() and kept.any():
            fit = bench.fit(model, settings, kept, robust=False)
            predicted_w = bench.anchored(fit) if anchored else bench.predict(fit)
            rows = held[table.benchmark]
            error[rows] = 100.0 * np.abs(predicted_w[rows] / table.power_w[rows] - 1.0)
    seen = np.isfinite(error)
    count = np.bincount(table.benchmark[seen], minlength=table.benchmarks)
    total = np.bincount(table.benchmark[seen], error[seen], minlength=table.benchmarks)
    return np.asarray(total[count > 0] / count[count > 0])


def _anchor(table: CounterTable) -> Codes | None:
    """The row of each benchmark at the default clocks, or None where some benchmark has none."""
    at = np.flatnonzero(table.at_default())
    if np.unique(table.benchmark[at]).size < table.benchmarks:
        return None
    row = np.zeros(table.benchmarks, dtype=np.int64)
    row[table.benchmark[at]] = at
    return row
