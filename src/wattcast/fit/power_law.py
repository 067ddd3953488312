"""How an error falls with the number of rows: e(n) = floor + scale·n^-rate, and how sure that is.

Learning curves follow such laws over the range that matters [Viering2023]. A floor far below what was seen
is an extrapolation, so every figure comes with an interval from resampled shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array

RATES = np.linspace(0.1, 1.2, 45)  # slower than 0.1 is no learning, faster than 1 is not seen of noisy targets
DRAWS = 200
LEVEL = 0.9


@dataclass(frozen=True)
class Law:
    """e(n) = ``floor`` + ``scale``·n^-``rate``, in the unit of the errors it was fitted to."""

    floor: float
    scale: float
    rate: float

    def at(self, count: npt.ArrayLike) -> Array:
        """The error with ``count`` rows."""
        return np.asarray(self.floor + self.scale * np.asarray(count, dtype=np.float64) ** -self.rate)


@dataclass(frozen=True)
class Learned:
    """A law with 90 % intervals of its floor and of what twice the rows would leave."""

    law: Law
    floor: tuple[float, float]
    doubled: float  # the error with twice the rows of the largest point
    doubled_ends: tuple[float, float]
    buys: float  # share of the present error that another doubling takes away, by the law
    buys_ends: tuple[float, float]


def fit_law(count: Array, error: Array) -> Law:
    """Least squares of the relative error: floor and scale, not negative, for each rate of a grid; the best rate.

    >>> n = np.array([50.0, 100.0, 200.0, 400.0])
    >>> law = fit_law(n, 4.0 + 60.0 * n**-0.5)
    >>> round(law.floor, 1), round(law.rate, 2)
    (4.0, 0.5)
    """
    falling = count[np.newaxis, :] ** -RATES[:, np.newaxis] / error  # (rate, point), relative
    flat = 1.0 / error
    # normal equations of two non-negative unknowns: both, or the better one alone
    ff, gg, fg = float(flat @ flat), (falling**2).sum(axis=-1), falling @ flat
    f1, g1 = float(flat.sum()), falling.sum(axis=-1)
    determinant = ff * gg - fg**2
    floor = np.where(determinant > 0, (f1 * gg - g1 * fg) / np.where(determinant > 0, determinant, 1.0), 0.0)
    scale = np.where(determinant > 0, (g1 * ff - f1 * fg) / np.where(determinant > 0, determinant, 1.0), 0.0)
    scale = np.where(floor < 0, g1 / gg, scale)
    floor = np.where(floor < 0, 0.0, floor)
    floor = np.where(scale < 0, f1 / ff, floor)
    scale = np.where(scale < 0, 0.0, scale)
    misfit = ((floor[:, None] * flat + scale[:, None] * falling - 1.0) ** 2).sum(axis=-1)
    best = int(np.argmin(misfit))
    return Law(float(floor[best]), float(scale[best]), float(RATES[best]))


def learned(count: Array, error: Array, cluster: npt.NDArray[np.int64], seed: int = 0) -> Learned:
    """The law of the mean of ``error`` ``(row, point)``; intervals from rows resampled by ``cluster``."""
    law = fit_law(count, error.mean(axis=0))
    names, place = np.unique(cluster, return_inverse=True)
    sums = np.stack([np.bincount(place, column, len(names)) for column in error.T], axis=-1)
    sizes = np.bincount(place, minlength=len(names)).astype(np.float64)
    rng = np.random.default_rng(seed)
    picks = rng.multinomial(len(names), np.full(len(names), 1.0 / len(names)), DRAWS)
    means = (picks @ sums) / (picks @ sizes)[:, np.newaxis]
    laws = [fit_law(count, mean) for mean in means]
    last = float(count[-1])
    doubled = [float(one.at(2.0 * last)) for one in laws]
    buys = [_buys(one, last) for one in laws]
    return Learned(
        law,
        _ends([one.floor for one in laws]),
        float(law.at(2.0 * last)),
        _ends(doubled),
        _buys(law, last),
        _ends(buys),
    )


def _buys(law: Law, count: float) -> float:
    return float(1.0 - law.at(2.0 * count) / law.at(count))


def _ends(values: list[float]) -> tuple[float, float]:
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(values, [tail, 1.0 - tail])
    return float(low), float(high)
