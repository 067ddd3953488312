"""Evaluate a Gaussian process on many rows at once.

The process has an exponential kernel, exp(-r) with r the distance in scaled coordinates, so that
its mean at a row is a sum over its points. Fitting it is ``calibrate.latency_fit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array

# Sizes of blocks, which decide how fast a process is evaluated and nothing else.
# Multiplications of a product: no library gives so few to threads, which wait for one another.
_PRODUCT = 500_000
_FEWEST_ROWS = 16  # of such a product, with fewer points where they are many
_UNDOUBLED = 0.25  # of squares of what was doubled for the products
_PAIRS = 2**16  # of rows and points whose distances stay in a cache
_LOG2_E = np.log2(np.e)  # scales coordinates so that 2^-r stands for exp(-r), which takes longer


@dataclass(frozen=True, eq=False, repr=False)
class GaussianProcess:
    """Points in scaled coordinates, and what each adds."""

    features: tuple[str, ...]
    scale: Array  # (feature,) multiplies a column
    points: Array  # (point, feature), already scaled
    alpha: Array  # (point,)
    mean: float
    variance: float

    def __post_init__(self) -> None:
        shape = (len(self.alpha), len(self.features))
        if self.points.shape != shape or self.scale.shape != shape[1:]:
            raise bad_value("kriging", f"points of shape {shape}", self.points.shape)
        if not (np.isfinite(self.points).all() and np.isfinite(self.alpha).all()):
            raise bad_value("kriging", "finite numbers", "others")

    def predict_rows(
        self,
        rows: Array,
        nearest_out: Array,
    ) -> Array:
        """Return the mean for each row ``(row, feature)``, columns in the order of ``features``.

        ``nearest_out`` takes r² of the nearest point.

        r² = |x|² + |p|² - 2x·p as one product of a few rows at a time, [x, |x|², 1]·[-2p, 1, |p|²],
        all from the middle of the points. Where a row is a point, only rounding remains, some 1e-15
        of |x|², which may be below zero.
        """
        # one row more than there are: a product of a single row would round otherwise
        table = np.zeros((len(rows) + 1, len(self.features) + 2))
        scaled = np.multiply(rows, self.scale, out=table[:-1, :-2])
        scaled -= self._middle
        scaled *= _LOG2_E
        np.einsum("ij,ij->i", scaled, scaled, out=table[:-1, -2])
        table[:, -1] = 1.0

        points, weights = self._factors
        sums, nearest = _sum_decays(table, points, weights)
        np.divide(nearest[:-1], _LOG2_E**2, out=nearest_out)
        return self.mean + sums[:-1]

    @cached_property
    def _factors(self) -> tuple[Array, Array]:
        """Factors of r² for 2^-r to each point, ``(feature + 2, point)``, and what the point
        adds.
        """
        points = np.empty((len(self.features) + 2, len(self.points)))
        np.multiply((self.points - self._middle).T, -2.0 * _LOG2_E, out=points[:-2])
        points[-2] = 1.0
        np.einsum("ij,ij->j", points[:-2], points[:-2], out=points[-1])
        points[-1] *= _UNDOUBLED
        return points, self.variance * self.alpha

    @cached_property
    def _middle(self) -> Array:
        """The place that distances are computed from: squares of small numbers round less."""
        if not len(self.points):
            return np.zeros(len(self.features))
        return np.asarray(self.points.mean(axis=0))

    def to_arrays(self, prefix: str) -> dict[str, Any]:
        """Return arrays to save beside a bundle; points in single precision, those in one place as
        one.
        """
        single = self.points.astype(np.float32)
        points, place = np.unique(single, axis=0, return_inverse=True)
        return {
            f"{prefix}.features": np.array(self.features),
            f"{prefix}.scale": self.scale,
            f"{prefix}.points": points,
            f"{prefix}.alpha": np.bincount(place.ravel(), weights=self.alpha),
            f"{prefix}.mean": np.array([self.mean, self.variance]),
        }

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Any],
        prefix: str,
    ) -> GaussianProcess:
        """Make a process of what ``to_arrays`` saved."""
        mean, variance = arrays[f"{prefix}.mean"]
        return cls(
            features=tuple(str(name) for name in arrays[f"{prefix}.features"]),
            scale=np.asarray(arrays[f"{prefix}.scale"], np.float64),
            points=np.asarray(arrays[f"{prefix}.points"], np.float64),
            alpha=np.asarray(arrays[f"{prefix}.alpha"], np.float64),
            mean=float(mean),
            variance=float(variance),
        )


def _sum_decays(
    table: Array,
    points: Array,
    weights: Array,
) -> tuple[Array, Array]:
    """Return Σ w·2^-r of each row and the lowest r²; ``table @ points`` are the squares r², ``(row,
    point)``.
    """
    # points are taken in parts of one size, each of which stays in the cache for all rows
    product_rows = min(len(table), max(_PRODUCT // max(points.size, 1), _FEWEST_ROWS))
    part_count = points.size * product_rows // _PRODUCT + 1
    part_points = len(weights) // part_count + 1
    block_rows = product_rows * max(_PAIRS // (product_rows * part_points), 1)

    space = np.empty(min(block_rows, len(table)) * min(part_points, len(weights)))
    sums = np.zeros(len(table))
    nearest = np.full(len(table), np.inf)
    for first_point in range(0, len(weights), part_points):
        part = points[:, first_point : first_point + part_points]
        weight = weights[first_point : first_point + part_points]
        for start in range(0, len(table), block_rows):
            rows = table[start : start + block_rows]
            low = nearest[start : start + block_rows]
            square = space[: len(rows) * len(weight)].reshape(len(rows), -1)
            for first in range(0, len(rows), product_rows):
                last = first + product_rows
                np.matmul(rows[first:last], part, out=square[first:last])
            np.minimum(low, np.minimum.reduce(square, axis=1), out=low)
            if np.minimum.reduce(low) < 0.0:
                np.maximum(square, 0.0, out=square)
            np.negative(np.sqrt(square, out=square), out=square)
            sums[start : start + block_rows] += np.exp2(square, out=square) @ weight
    return sums, nearest
