"""Normal equations by benchmark and operating point, so that a fold or a voltage costs a small sum.

With z = (x, P)/P the weighted row, the Gram cell of benchmark b at operating point p is
G_bp = Σ z·zᵀ. Leaving a benchmark out is a sum over the others, leaving clocks out a sum over the
points kept, and a voltage only scales the columns of each point: V_p^q. Nothing of this is approximate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.fit.table import Codes, CounterTable
from wattcast.fit.terms import Terms

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Grams:
    """Gram cells of a design whose columns are divided by ``scale``; the last column is the target, 1."""

    cell: Array  # (benchmark, point, term + 1, term + 1)
    count: Array  # (benchmark, point) rows
    scale: Array  # (term,)
    terms: Terms
    clock_hz: Array  # (point,)
    memory_clock_hz: Array  # (point,)

    @property
    def width(self) -> int:
        """Number of terms."""
        return self.scale.size

    def summed(self, benchmarks: Mask, points: Mask | None = None) -> Array:
        """Gram of each point over the chosen benchmarks, ``(point, term + 1, term + 1)``; zero at points left out."""
        few = int(benchmarks.sum()) <= benchmarks.size // 2
        kept = self.cell[benchmarks].sum(axis=0) if few else self._total - self.cell[~benchmarks].sum(axis=0)
        return np.asarray(kept if points is None else kept * points[:, np.newaxis, np.newaxis])

    @cached_property
    def _total(self) -> Array:
        total: Array = self.cell.sum(axis=0)
        return total


def points(table: CounterTable) -> tuple[Codes, Array, Array]:
    """Operating point of each row, and the two clocks of each point, sorted by core then memory clock."""
    pairs = np.stack([table.clock_hz, table.memory_clock_hz], axis=1)
    unique, index = np.unique(pairs, axis=0, return_inverse=True)
    return np.asarray(index, dtype=np.int64).reshape(-1), unique[:, 0], unique[:, 1]


def grams(table: CounterTable, design: Terms, weight: Array | None = None) -> Grams:
    """Gram cells of relative errors: each row is divided by its power, and weighted by ``weight`` besides."""
    point, clock_hz, memory_clock_hz = points(table)
    scale = np.abs(design.value).max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    row = np.concatenate([design.value / scale / table.power_w[:, np.newaxis], np.ones((table.rows, 1))], axis=1)
    if weight is not None:
        row = row * np.sqrt(weight)[:, np.newaxis]
    shape = (table.benchmarks, clock_hz.size)
    at = table.benchmark * clock_hz.size + point
    cell = np.zeros((shape[0] * shape[1], row.shape[1], row.shape[1]))
    np.add.at(cell, at, row[:, :, np.newaxis] * row[:, np.newaxis, :])
    count = np.bincount(at, minlength=shape[0] * shape[1]).astype(float)
    return Grams(
        cell.reshape(*shape, *cell.shape[1:]), count.reshape(shape), scale, design, clock_hz, memory_clock_hz
    )
