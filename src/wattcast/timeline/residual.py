"""What the scaffold leaves over, learned from shapes alone: a factor on time and one on energy per kernel.

Trees and a Gaussian process see logarithms of sizes, alignments and how full the last wave is, all on
the reference chip; never a clock or a bandwidth, so a sweep over chips pays for them once and stays
as sane as the scaffold. Factors are held within the range seen while fitting.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

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

    def __call__(self, features: Mapping[str, Array], rows: list[int]) -> Array:
        both = self.forest is not None and self.kriging is not None
        weights = (1.0 - PROCESS_SHARE, PROCESS_SHARE) if both else (1.0, 1.0)
        parts = [(m, w) for m, w in zip((self.forest, self.kriging), weights, strict=True) if m is not None]
        nothing = np.zeros(len(rows))
        wanted = dict.fromkeys(name for model, _ in parts for name in model.features)
        # a kind of kernel that this workload lacks has no column
        columns = {name: features[name][rows] if name in features else nothing for name in wanted}
        for name in features:
            above = _above(name, wanted)
            if above:
                columns[above] = columns[above] + features[name][rows]
        mean = sum((weight * model(columns) for model, weight in parts), nothing)
        return np.asarray(np.exp(np.clip(mean, self.low, self.high)))


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


_MOST_KEPT = 256


@dataclass(frozen=True)
class Residuals:
    """Learned factors by the first word of a group; a group without any keeps the scaffold's word."""

    reference: Reference
    time: Mapping[str, Learned]
    energy: Mapping[str, Learned]
    # of operators met before: factors depend on shapes alone, so chunks of a sweep need them once
    _kept: dict[Hashable, tuple[Array, Array]] = field(default_factory=dict, repr=False, compare=False)

    def factors(self, kernels: Kernels, corrections: Array) -> tuple[Array, Array]:
        """Factor on time and on energy of each kernel, ``(kernel,)``; ``corrections`` are its five λ.

        The energy's sees, besides the shape, how busy the reference chip would be at its top clock.
        """
        kept = self._kept.get(kernels.memo)
        if kept is not None:
            return kept
        rows_of: dict[str, list[int]] = {}
        for i, learner in enumerate(kernels.work.learner):
            rows_of.setdefault(learner, []).append(i)
        time = _factors(self.time, rows_of, kernels.work.features, len(kernels.ops))
        logs = np.log(corrections)
        fixed_s = time * corrections[:, 2] * kernels.work.launches
        seconds = time * ideal(kernels, self.reference).seconds(logs, self.reference.top_hz)
        features = {**kernels.work.features, **rates(kernels, self.reference, seconds, fixed_s)}
        energy = _factors(self.energy, rows_of, features, len(kernels.ops))
        if len(self._kept) < _MOST_KEPT:
            self._kept[kernels.memo] = time, energy
        return time, energy

    def off_chip(self, time: Array) -> Array:
        """The part of the factor on time that seconds of device memory take; here all of it."""
        return time


def _factors(
    models: Mapping[str, Learned], rows_of: Mapping[str, list[int]], features: Mapping[str, Array], count: int
) -> Array:
    found = np.ones(count)
    for family, rows in rows_of.items():
        if family in models:
            found[rows] = models[family](features, rows)
    return found
