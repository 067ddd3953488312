"""A fitted Gaussian process (kriging) as plain arrays: smooth between what was measured, back to its mean far away.

Covariance v·exp(-r), r² = Σ_d w_d²·(x_d - x'_d)² [Rasmussen2006, Eq. 4.18, the Matérn covariance of order 1/2,
with a length a feature]. The mean at x is m + k(x)·α with α = (K + σ²)⁻¹·(y - m) solved while fitting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import bad_value

_BLOCK = 80_000  # distances held at a time: they stay in a cache from one step to the next
_UNTHREADED = 500_000  # multiplications of a product that no library gives to threads


def _product(left: Array, right: Array, out: Array) -> None:
    """``left @ right`` in blocks, since threads for so little wait for one another.

    On a busy machine a product of 8 by 39 by 3,700 took 18 ms in threads and 0.3 ms in blocks.
    """
    wide = max(_UNTHREADED // left.size, 64)
    if right.shape[1] <= wide:
        np.matmul(left, right, out=out)
        return
    for j in range(0, right.shape[1], wide):
        np.matmul(left, right[:, j : j + wide], out=out[:, j : j + wide])


def nearness(squares: Array) -> Array:
    """exp(-r) of the nearest point, from r²: 1 where a row is one, towards 0 where none is like it.

    >>> nearness(np.array([-1e-15, np.log(2.0) ** 2])).tolist()
    [1.0, 0.5]
    """
    return np.exp(-np.sqrt(np.maximum(squares, 0.0)))


@dataclass(frozen=True)
class Kriging:
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

    def __call__(self, columns: Mapping[str, npt.ArrayLike]) -> Array:
        """The mean for each row of columns, ``(row,)``."""
        return self.of(np.stack([np.asarray(columns[name], dtype=np.float64) for name in self.features], axis=-1))

    def of(self, rows: Array, nearest_out: Array | None = None) -> Array:
        """The mean for each row ``(row, feature)``, columns in the order of ``features``.

        ``nearest_out`` takes r² of the nearest point, for :func:`nearness`.

        r² = |x|² + |p|² - 2x·p as one product of a few rows at a time, [x, |x|², 1]·[-2p, 1, |p|²], all from the
        middle of the points. Where a row is a point, what is left is rounding, some 1e-15 of |x|², maybe below zero.
        """
        table = np.empty((len(rows), len(self.features) + 2))
        scaled = np.multiply(rows, self.scale, out=table[:, :-2])
        scaled -= self._middle
        np.einsum("ij,ij->i", scaled, scaled, out=table[:, -2])
        table[:, -1] = 1.0
        points, weights = self._distinct
        most = max(_BLOCK // max(len(weights), 1), 1)
        distances = np.empty((min(len(rows), most), len(weights)))
        found, nearest = np.empty(len(rows)), np.empty(len(rows)) if nearest_out is None else nearest_out
        for i in range(0, len(rows), most):
            some = distances[: len(rows) - i]
            _product(table[i : i + most], points, some)
            low = some.min(axis=1, out=nearest[i : i + most])
            if low.min() < 0.0:
                np.maximum(some, 0.0, out=some)
            np.negative(np.sqrt(some, out=some), out=some)
            np.matmul(np.exp(some, out=some), weights, out=found[i : i + most])
        return found + self.mean

    @cached_property
    def _distinct(self) -> tuple[Array, Array]:
        """Factors of the squared distance to each distinct point, ``(feature + 2, point)``, and what it adds.

        What was measured twice is a point twice, in the same place: they add as one, and their α, which may be large
        and of opposite sign, lose fewer digits.
        """
        rows = np.ascontiguousarray(self.points)
        places: dict[bytes, int] = {}
        as_bytes = rows.view(f"V{rows.itemsize * len(self.features)}").ravel().tolist()
        which = [places.setdefault(row, len(places)) for row in as_bytes]
        weights = np.bincount(which, weights=self.variance * self.alpha)
        one_of = np.empty(len(places), np.intp)
        one_of[which] = np.arange(len(which))
        points = np.empty((len(self.features) + 2, len(places)))
        np.multiply((rows.take(one_of, axis=0) - self._middle).T, -2.0, out=points[:-2])
        points[-2] = 1.0
        np.einsum("ij,ij->j", points[:-2], points[:-2], out=points[-1])
        points[-1] *= 0.25
        return points, np.asarray(weights, dtype=np.float64)

    @cached_property
    def _middle(self) -> Array:
        """From where distances are worked out: squares of small numbers leave little to round."""
        return np.asarray(self.points.mean(axis=0)) if len(self.points) else np.zeros(len(self.features))

    def to_arrays(self, prefix: str) -> dict[str, Any]:
        """Arrays to save beside a bundle; points in single precision."""
        return {
            f"{prefix}.features": np.array(self.features),
            f"{prefix}.scale": self.scale,
            f"{prefix}.points": self.points.astype(np.float32),
            f"{prefix}.alpha": self.alpha,
            f"{prefix}.mean": np.array([self.mean, self.variance]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str) -> Kriging:
        """A process from what :meth:`to_arrays` saved."""
        mean, variance = (float(x) for x in arrays[f"{prefix}.mean"])
        return cls(
            features=tuple(str(name) for name in arrays[f"{prefix}.features"]),
            scale=np.asarray(arrays[f"{prefix}.scale"], dtype=np.float64),
            points=np.asarray(arrays[f"{prefix}.points"], dtype=np.float64),
            alpha=np.asarray(arrays[f"{prefix}.alpha"], dtype=np.float64),
            mean=mean,
            variance=variance,
        )
