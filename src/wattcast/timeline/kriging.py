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
    for j in range(0, right.shape[1], wide):
        np.matmul(left, right[:, j : j + wide], out=out[:, j : j + wide])


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

    def of(self, rows: Array, near_out: Array | None = None) -> Array:
        """The mean for each row ``(row, feature)``, columns in the order of ``features``.

        ``near_out`` takes exp(-r) of the nearest point: 1 where a row is one, towards 0 where none is like it.

        |x|² + |p|² - 2x·p, a few rows at a time. In this order: where a row is a point, what is left of the squares
        is rounding, and another order would round otherwise.
        """
        scaled = rows * self.scale
        squares = (scaled**2).sum(axis=-1)[:, np.newaxis]
        most = max(_BLOCK // max(len(self.alpha), 1), 1)
        near, sums = np.empty((2, min(len(rows), most), len(self.alpha)))
        found = np.empty(len(rows))
        for i in range(0, len(rows), most):
            some = scaled[i : i + most]
            near, sums = near[: len(some)], sums[: len(some)]
            _product(some, self._doubled, near)
            np.subtract(np.add(squares[i : i + most], self._norms, out=sums), near, out=near)
            np.maximum(near, 0.0, out=near)
            np.sqrt(near, out=near)
            np.exp(np.negative(near, out=near), out=near)
            found[i : i + most] = near @ self._weights
            if near_out is not None:
                near.max(axis=1, out=near_out[i : i + most])
        return found + self.mean

    @cached_property
    def _norms(self) -> Array:
        return np.asarray((self.points**2).sum(axis=-1))

    @cached_property
    def _doubled(self) -> Array:
        """Twice the points, ``(feature, point)``: squared distances take away twice a product."""
        return np.ascontiguousarray(2.0 * self.points.T)

    @cached_property
    def _weights(self) -> Array:
        return self.variance * self.alpha

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
