"""What the scaffold leaves over, learned from shapes alone: a factor on time and one on energy per kernel.

Trees and a Gaussian process see logarithms of sizes, alignments and how full the last wave is, all on
the reference chip; never a clock or a bandwidth, so a sweep over chips pays for them once and stays
as sane as the scaffold. Factors are held within the range seen while fitting.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.forest import Forest
from wattcast.kernels import Kernels, Reference
from wattcast.timeline.ideal import ideal, rates
from wattcast.timeline.kriging import Kriging


@dataclass(frozen=True)
class Learned:
    """Trees and a Gaussian process on log(measured over scaffold), averaged, and the range it was seen in."""

    forest: Forest | None
    kriging: Kriging | None
    low: float
    high: float

    def __call__(self, features: Features, rows: npt.NDArray[np.intp], near_out: Array | None = None) -> Array:
        table = features.columns(self._wanted, rows)
        both = self.forest is not None and self.kriging is not None
        share = PROCESS_SHARE if both else 1.0
        mean = np.zeros(len(rows))
        if self.forest is not None:
            mean += (1.0 - share if both else 1.0) * self.forest.of(table[:, : len(self.forest.features)])
        if self.kriging is not None:
            mean += share * self.kriging.of(table.take(self._of_kriging, axis=1), near_out)
        return np.asarray(np.exp(np.minimum(np.maximum(mean, self.low), self.high)))

    @cached_property
    def _wanted(self) -> Wanted:
        """Columns that trees or process read, those of the trees first."""
        names = (name for model in (self.forest, self.kriging) if model is not None for name in model.features)
        return Wanted(dict.fromkeys(names))

    @cached_property
    def _of_kriging(self) -> list[int]:
        return [self._wanted.places[name] for name in self.kriging.features] if self.kriging is not None else []


class Wanted:
    """Names of columns, each with its place, and where to find them among the features of a workload."""

    def __init__(self, names: Iterable[str]) -> None:
        self.places = {name: i for i, name in enumerate(names)}
        self._found: dict[tuple[str, ...], tuple[list[int], list[tuple[int, int]]]] = {}

    def among(self, names: tuple[str, ...]) -> tuple[list[int], list[tuple[int, int]]]:
        """Which of ``names`` each column is, counted from one (none: 0), and which stand for a column above them."""
        if names not in self._found:
            if len(self._found) >= _MOST_KEPT:
                self._found.clear()
            at = {name: i for i, name in enumerate(names, 1)}
            above = [(_above(name, self.places), i) for name, i in at.items()]
            stands = [(self.places[kind], i) for kind, i in above if kind]
            self._found[names] = [at.get(name, 0) for name in self.places], stands
        return self._found[names]


class Features:
    """Features of all kernels as one table, from which each family takes its own."""

    def __init__(self, named: Mapping[str, Array], count: int) -> None:
        self._names = tuple(named)
        self._table = np.array([np.zeros(count), *named.values()])  # (feature, kernel), nothing first

    def add(self, named: Mapping[str, Array]) -> None:
        """More features."""
        self._names = (*self._names, *named)
        self._table = np.concatenate([self._table, list(named.values())])

    def columns(self, wanted: Wanted, rows: npt.NDArray[np.intp]) -> Array:
        """The columns of a family for its rows, ``(row, feature)``; a kind that this workload lacks is a zero."""
        places, stands = wanted.among(self._names)
        found = self._table.take(places, axis=0).take(rows, axis=1)
        for column, name in stands:
            found[column] += self._table[name].take(rows)
        return np.ascontiguousarray(found.T)


PROCESS_SHARE = 0.6  # of the process in the average: chosen on held-out folds


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


_MOST_KEPT, _MOST_ROWS = 256, 1024  # workloads kept, and kernels of one worth keeping


@dataclass(frozen=True)
class Residuals:
    """Learned factors by the first word of a group; a group without any keeps the scaffold's word."""

    reference: Reference
    time: Mapping[str, Learned]
    energy: Mapping[str, Learned]
    # of operators met before: factors depend on shapes alone, so chunks of a sweep need them once
    _kept: dict[Hashable, tuple[Array, Array, Array]] = field(default_factory=dict, repr=False, compare=False)

    def factors(self, kernels: Kernels, corrections: Array) -> tuple[Array, Array, Array]:
        """Factor on time and on energy of each kernel, ``(kernel,)``, and nearness; ``corrections`` are its five λ.

        Nearness, ``(2, kernel)``, is that of the nearest row the factor on time and the one on energy were learned
        from, 1 to 0; NaN where nothing was.
        The energy's sees, besides the shape, how busy the reference chip would be at its top clock.
        """
        kept = self._kept.get(kernels.memo)
        if kept is not None:
            return kept
        learners = kernels.work.learner
        code = {name: i for i, name in enumerate(dict.fromkeys(learners))}
        codes = np.array([code[name] for name in learners])
        rows_of = {name: np.flatnonzero(codes == i) for name, i in code.items()}
        count = len(kernels.ops)
        features = Features(kernels.work.features, count)
        near = np.full((2, count), np.nan)
        time = _factors(self.time, rows_of, features, count, near[0])
        logs = np.log(corrections)
        fixed_s = time * corrections[:, 2] * kernels.work.launches
        seconds = time * ideal(kernels, self.reference).seconds(logs, self.reference.top_hz)
        features.add(rates(kernels, self.reference, seconds, fixed_s))
        energy = _factors(self.energy, rows_of, features, count, near[1])
        if count <= _MOST_ROWS:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)), None)  # the oldest
            self._kept[kernels.memo] = time, energy, near
        return time, energy, near

    def off_chip(self, time: Array) -> Array:
        """The part of the factor on time that seconds of device memory take; here all of it."""
        return time


def _factors(
    models: Mapping[str, Learned],
    rows_of: Mapping[str, npt.NDArray[np.intp]],
    features: Features,
    count: int,
    near: Array,
) -> Array:
    found = np.ones(count)
    for family, rows in rows_of.items():
        if family in models:
            own = np.full(len(rows), np.nan)
            found[rows] = models[family](features, rows, own)
            near[rows] = own
    return found
