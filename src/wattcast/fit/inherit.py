"""A fit from few rows: the forecast of the card, moved by what its own rows say and no further.

With 50 rows there are six a family: too few to fit corrections and energies from nothing. So the card's forecast
(carried over from a card that was measured well) is the prior mean, and its rows move it at three levels, each drawn
to the one above: the card, a family, a group of kernels. Near the forecast, y = log(measured / forecast) is linear,

    y = J·θ + ε,   θ_j ~ N(0, τ_level(j)²),   ε_i ~ N(0, (σ·s_family(i))²)

with J the slopes of log time by the corrections of cycles, device memory and fixed time (of log power by the energies
of modules). The spreads τ and σ are those that make the rows likeliest, with weak priors [Rasmussen2006, 5.4.1], so
that rows that say nothing leave the forecast as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array

STEPS = 6
FREEDOM = 4.0  # of Student's t, whose weights let odd rows count less [Lange1989]
_LEVEL_SPREAD = 1.0  # log-spread of the prior on each τ and on σ around where they start
_FARTHEST = 0.7  # of one step, in logs


@dataclass(frozen=True)
class Level:
    """Coefficients that share a spread: their columns of J, and how far off the forecast may be."""

    name: str
    columns: Sequence[int]
    spread: float  # standard deviation where the search starts


@dataclass(frozen=True)
class Shift:
    """Coefficients moved away from the forecast, and how sure that is."""

    theta: Array
    deviation: Array
    spreads: Mapping[str, float]  # τ by level
    noise: float  # σ over the families' own


def shrink(
    residual: Callable[[Array], Array],
    slopes: Callable[[Array], Array],
    levels: Sequence[Level],
    scale: Array,
) -> Shift:
    """θ of most posterior density by Gauss and Newton, the spreads by marginal likelihood at each step.

    ``residual(θ)`` is log(measured / model) ``(row,)``, ``slopes(θ)`` is J ``(row, coefficient)``, ``scale`` the
    families' own deviations ``(row,)``.
    """
    count = 1 + max(j for level in levels for j in level.columns)
    theta, weight = np.zeros(count), np.ones(len(scale))
    hyper = np.log([*(level.spread for level in levels), 1.0])
    start, here = hyper.copy(), residual(theta)
    for _ in range(STEPS):
        jacobian = slopes(theta)
        target = here + jacobian @ theta  # residual of the linearised model at θ = 0
        noise = scale / np.sqrt(weight)
        hyper = _likeliest(hyper, start, jacobian, target, levels, noise)
        found, deviation = _posterior(hyper, jacobian, target, levels, noise)
        step = np.clip(found - theta, -_FARTHEST, _FARTHEST)
        theta = theta + step
        here = residual(theta)
        sigma = np.exp(hyper[-1]) * scale
        weight = (FREEDOM + 1.0) / (FREEDOM + (here / sigma) ** 2)
        if np.abs(step).max() < 1e-3:
            break
    spreads = {level.name: float(np.exp(h)) for level, h in zip(levels, hyper[:-1], strict=True)}
    return Shift(theta, deviation, spreads, float(np.exp(hyper[-1])))


def _prior(hyper: Array, levels: Sequence[Level], count: int) -> Array:
    variance = np.zeros(count)
    for level, value in zip(levels, hyper, strict=False):
        variance[list(level.columns)] = np.exp(2.0 * value)
    return variance


def _likeliest(
    hyper: Array, start: Array, jacobian: Array, target: Array, levels: Sequence[Level], noise: Array
) -> Array:
    """log τ and log σ that make the rows likeliest [Rasmussen2006, Eq. 5.8]."""
    from scipy.linalg import LinAlgError, cho_factor, cho_solve
    from scipy.optimize import minimize

    blocks = [jacobian[:, list(level.columns)] for level in levels]
    grams = [block @ block.T for block in blocks]

    def worse(value: Array) -> float:
        covariance = np.diag(np.exp(2.0 * value[-1]) * noise**2)
        for gram, log_spread in zip(grams, value[:-1], strict=True):
            covariance = covariance + np.exp(2.0 * log_spread) * gram
        try:
            factor = cho_factor(covariance, lower=True)
        except LinAlgError:
            return 1e10
        misfit = target @ cho_solve(factor, target)
        pull = ((value - start) / _LEVEL_SPREAD) ** 2
        return float(0.5 * misfit + np.log(np.diag(factor[0])).sum() + 0.5 * pull.sum())

    return np.asarray(minimize(worse, hyper, method="L-BFGS-B", bounds=[(-7.0, 2.0)] * len(hyper)).x)


def _posterior(
    hyper: Array, jacobian: Array, target: Array, levels: Sequence[Level], noise: Array
) -> tuple[Array, Array]:
    prior = _prior(hyper, levels, jacobian.shape[1])
    covariance = (jacobian * prior) @ jacobian.T + np.diag(np.exp(2.0 * hyper[-1]) * noise**2)
    gain = np.linalg.solve(covariance, jacobian * prior).T
    variance = prior - np.einsum("ji,ij->j", gain, jacobian * prior)
    return gain @ target, np.sqrt(np.maximum(variance, 0.0))
