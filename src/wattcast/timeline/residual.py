"""What the scaffold leaves over, learned from shapes alone: a factor on time and one on energy per kernel.

Trees and a Gaussian process see logarithms of sizes, alignments and how full the last wave is, all on
the reference chip; never a clock or a bandwidth, so a sweep over chips pays for them once and stays
as sane as the scaffold. Factors are held within the range seen while fitting.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.forest import Forest
from wattcast.kernels import Kernels, Reference
from wattcast.timeline.ideal import RATES, ideal, rates
from wattcast.timeline.kriging import Kriging, nearness

Index = npt.NDArray[np.intp]
_Kept = TypeVar("_Kept")
PROCESS_SHARE = 0.6  # of the process in the average: chosen on held-out folds
_MOST_KEPT, _MOST_ROWS = 256, 1024  # workloads and plans kept, and kernels of one worth keeping


@dataclass(frozen=True)
class Learned:
    """Trees and a Gaussian process on log(measured over scaffold), averaged, and the range it was seen in."""

    forest: Forest | None
    kriging: Kriging | None
    low: float
    high: float

    @cached_property
    def wanted(self) -> tuple[str, ...]:
        """Columns that trees or process read, those of the trees first."""
        models = (model for model in (self.forest, self.kriging) if model is not None)
        return tuple(dict.fromkeys(name for model in models for name in model.features))

    def logs(self, table: Array, nearest_out: Array | None = None) -> Array:
        """Log of the factor of each row of ``wanted`` columns, wherever it lies; see :meth:`Kriging.of`."""
        if self.kriging is None:
            return np.zeros(len(table)) if self.forest is None else self.forest.of(table)
        own = table if self._of_kriging is None else table.take(self._of_kriging, axis=1)
        smooth = self.kriging.of(own, nearest_out)
        if self.forest is None:
            return smooth
        return PROCESS_SHARE * smooth + (1.0 - PROCESS_SHARE) * self.forest.of(table)

    @cached_property
    def _of_kriging(self) -> Index | None:
        """Which of the columns the process reads; None: all."""
        if self.kriging is None or self.kriging.features == self.wanted:
            return None
        return np.array([self.wanted.index(name) for name in self.kriging.features])


@dataclass(frozen=True)
class Part:
    """The rows of a workload that a model speaks for, and where their columns lie in its table of features."""

    model: Learned
    rows: Index  # (row, 1)
    columns: Index  # (column,) where each begins in the table laid end to end
    stands: tuple[tuple[int, int], ...]  # columns to which a kind below them adds, and where that begins

    @classmethod
    def of(cls, model: Learned, rows: Iterable[int], names: tuple[str, ...], count: int) -> Part:
        """Of a workload with features ``names`` of ``count`` kernels; a kind that it lacks is a zero."""
        begins = {name: i * count for i, name in enumerate(names, 1)}
        places = {name: i for i, name in enumerate(model.wanted)}
        above = ((_above(name, places), begin) for name, begin in begins.items())
        return cls(
            model,
            np.array(rows, dtype=np.intp)[:, np.newaxis],
            np.array([begins.get(name, 0) for name in places], dtype=np.intp),
            tuple((places[kind], begin) for kind, begin in above if kind),
        )

    def table(self, features: Array) -> Array:
        """Columns of its rows, ``(row, column)``, from the features of all kernels laid end to end."""
        found = features.take(self.columns + self.rows)
        for column, begin in self.stands:
            found[:, column] += features.take(begin + self.rows[:, 0])
        return found


def _above(name: str, known: Mapping[str, object]) -> str:
    """The nearest kind above one that was not measured, as its corrections are; nothing where it was or none is.

    >>> _above("is elementwise.cat.append", {"is elementwise.cat": None})
    'is elementwise.cat'
    """
    if not name.startswith("is ") or name in known:
        return ""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ""


class Plan:
    """Who learned what of which kernels: the same for workloads of equal kinds in equal order, whatever their sizes.

    Rows of one model lie together while they are looked at; those nobody learned anything of come last.
    """

    def __init__(self, models: Mapping[str, Learned], learners: tuple[str, ...], names: tuple[str, ...]) -> None:
        rows_of: dict[str, list[int]] = {}
        for row, name in enumerate(learners):
            rows_of.setdefault(name if name in models else "", []).append(row)
        others = rows_of.pop("", [])
        self._parts = [Part.of(models[name], rows, names, len(learners)) for name, rows in rows_of.items()]
        self._back = np.argsort([row for rows in (*rows_of.values(), others) for row in rows])
        sizes = [*map(len, rows_of.values()), len(others)]
        limits = [*((models[name].low, models[name].high) for name in rows_of), (0.0, 0.0)]
        self._low, self._high = np.repeat(np.array(limits), sizes, axis=0).T.copy()

    def of(self, table: Array, near_out: Array) -> Array:
        """The factor of each kernel, from features ``(feature, kernel)`` of which the first is nothing."""
        features = table.ravel()
        logs, nearest = np.zeros(len(self._back)), np.full(len(self._back), np.nan)
        start = 0
        for part in self._parts:
            stop = start + len(part.rows)
            logs[start:stop] = part.model.logs(part.table(features), nearest[start:stop])
            start = stop
        np.maximum(logs, self._low, out=logs)
        np.minimum(logs, self._high, out=logs)
        nearness(nearest).take(self._back, out=near_out)
        return np.exp(logs, out=logs).take(self._back)


@dataclass(frozen=True)
class Residuals:
    """Learned factors by the first word of a group; a group without any keeps the scaffold's word."""

    reference: Reference
    time: Mapping[str, Learned]
    energy: Mapping[str, Learned]
    # of operators met before: factors depend on shapes alone, so chunks of a sweep need them once
    _kept: dict[Hashable, tuple[Array, Array, Array]] = field(default_factory=dict, repr=False, compare=False)
    _plans: dict[Hashable, tuple[Plan, Plan]] = field(default_factory=dict, repr=False, compare=False)

    def factors(self, kernels: Kernels, corrections: Array) -> tuple[Array, Array, Array]:
        """Factor on time and on energy of each kernel, ``(kernel,)``, and nearness; ``corrections`` are its five λ.

        Nearness, ``(2, kernel)``, is that of the nearest row the factor on time and the one on energy were learned
        from, 1 to 0; NaN where nothing was.
        The energy's sees, besides the shape, how busy the reference chip would be at its top clock.
        """
        kept = self._kept.get(kernels.memo)
        if kept is not None:
            return kept
        count, features = len(kernels.ops), kernels.work.features
        of_time, of_energy = self._plan(kernels.work.learner, tuple(features))
        near = np.empty((2, count))
        table = np.concatenate([np.zeros(count), *features.values()]).reshape(-1, count)
        time = of_time.of(table, near[0])
        terms = ideal(kernels, self.reference)
        seconds = time * terms.corrected(corrections.T, self.reference.top_hz)
        fixed_s = time * corrections[:, 2] * kernels.work.launches
        table = np.concatenate([table, rates(kernels, self.reference, seconds, fixed_s)])
        energy = of_energy.of(table, near[1])
        if count <= _MOST_ROWS:
            _keep(self._kept, kernels.memo, (time, energy, near), _MOST_KEPT)
        return time, energy, near

    def _plan(self, learners: tuple[str, ...], names: tuple[str, ...]) -> tuple[Plan, Plan]:
        """Of time and of energy."""
        found = self._plans.get((learners, names))
        if found is None:
            found = Plan(self.time, learners, names), Plan(self.energy, learners, (*names, *RATES))
            if len(learners) <= _MOST_ROWS:
                _keep(self._plans, (learners, names), found, _MOST_KEPT)
        return found

    def off_chip(self, time: Array) -> Array:
        """The part of the factor on time that seconds of device memory take; here all of it."""
        return time


def _keep(among: dict[Hashable, _Kept], key: Hashable, value: _Kept, most: int) -> None:
    """One more, in place of the oldest where there are many."""
    if len(among) >= most:
        among.pop(next(iter(among)), None)
    among[key] = value
