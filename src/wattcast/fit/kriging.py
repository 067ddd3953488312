"""Fitting a :class:`~wattcast.timeline.kriging.Kriging`: a length for each feature by marginal likelihood."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.timeline.kriging import Kriging

_MOST_FOR_LENGTHS = 300  # rows the lengths are fitted on; all rows are used for the mean
_STEPS = 25


def fit_kriging(
    columns: Mapping[str, npt.ArrayLike], target: Array, *, sure: Array | None = None, seed: int = 0
) -> Kriging:
    """Lengths, signal and noise by maximum marginal likelihood [Rasmussen2006, Eq. 5.8-5.9], then the mean.

    ``sure``: how well each target is known; its noise is as the inverse of this, the same on average.
    """
    from scipy.linalg import cho_factor, cho_solve

    names = tuple(columns)
    raw = np.stack([np.asarray(columns[name], dtype=np.float64) for name in names], axis=-1)
    spread = raw.std(axis=0)
    kept = spread > 1e-9
    if not kept.any():  # rows all alike: one column stands for them
        kept[0], spread[0] = True, 1.0
    names = tuple(name for name, keep in zip(names, kept, strict=True) if keep)
    raw, spread = raw[:, kept], spread[kept]
    mean = float(np.median(target))
    rows = raw / spread
    picked = np.random.default_rng(seed).permutation(len(target))[:_MOST_FOR_LENGTHS]
    length, variance, noise = _likeliest(rows[picked], target[picked] - mean)
    points = rows * length
    near = variance * np.exp(-_distance(points))
    near[np.diag_indices_from(near)] += noise if sure is None else noise * (sure**2).mean() / sure**2
    alpha = cho_solve(cho_factor(near, lower=True), target - mean)
    return Kriging(names, length / spread, points, np.asarray(alpha), mean, variance)


def _distance(points: Array) -> Array:
    norms = (points**2).sum(axis=-1)
    return np.asarray(np.sqrt(np.maximum(norms[:, None] + norms - 2.0 * points @ points.T, 0.0)))


def _likeliest(rows: Array, target: Array) -> tuple[Array, float, float]:
    from scipy.linalg import LinAlgError, cho_factor, cho_solve
    from scipy.optimize import minimize

    count, width = rows.shape
    # (feature, row, row); single precision: half the memory to walk over, and lengths need no more
    apart = ((rows.T[:, :, None] - rows.T[:, None, :]) ** 2).astype(np.float32)
    flat = apart.reshape(width, -1)
    spread = max(float(target.var()), 1e-6)

    def worse(value: Array) -> tuple[float, Array]:
        weight, variance, noise = np.exp(2.0 * value[:width]), np.exp(value[width]), np.exp(value[width + 1])
        squared = (weight.astype(np.float32) @ flat).reshape(count, count).astype(np.float64)
        radius = np.sqrt(np.maximum(squared, 1e-12))
        signal = variance * np.exp(-radius)
        try:
            factor = cho_factor(signal + noise * np.eye(count), lower=True)
        except LinAlgError:
            return 1e10, np.zeros_like(value)
        alpha = cho_solve(factor, target)
        inverse = cho_solve(factor, np.eye(count))
        inner = inverse - np.outer(alpha, alpha)
        shrink = -signal / radius * inner
        slope = np.empty_like(value)
        slope[:width] = 0.5 * weight * (flat @ shrink.ravel().astype(np.float32))
        slope[width] = 0.5 * (inner * signal).sum()
        slope[width + 1] = 0.5 * noise * np.trace(inner)
        pull = value[:width] - _START_LENGTH
        cost = 0.5 * target @ alpha + np.log(np.diag(factor[0])).sum() + 0.25 * (pull**2).sum()
        slope[:width] += 0.5 * pull
        return float(cost), slope

    start = np.concatenate([np.full(width, _START_LENGTH), [np.log(spread), np.log(0.05 * spread)]])
    bounds = [(-6.0, 1.5)] * width + [(np.log(1e-4), np.log(20.0)), (np.log(2e-5), np.log(0.5))]
    done = minimize(worse, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _STEPS})
    return np.exp(done.x[:width]), float(np.exp(done.x[width])), float(np.exp(done.x[width + 1]))


_START_LENGTH = -1.5  # log of one over the length, in standard deviations of a feature
