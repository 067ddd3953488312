"""Shrinkage: costs of like units are alike until the data say otherwise.

Each event's power at full use, w_i, is drawn to the mean of its family and each family to the mean
of its rail, min over μ of Σ_i (w_i - μ_f(i))² + Σ_f (μ_f - μ)², a quadratic form wᵀ·S·w. So a unit that
no training benchmark uses is given the cost of its kin instead of none.
"""

from __future__ import annotations

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.table import CounterTable
from wattcast.fit.terms import Terms

MISSED = 0.10  # of a benchmark's power
SPREAD = 0.25  # of the mean power


def penalty(
    table: CounterTable, design: Terms, scale: Array, full: Array, mean_w: float, firmness: float
) -> Array | None:
    """S for coefficients of columns divided by ``scale``, times how firmly it pulls.

    ``full`` is each predictor's occurrence at full use, 0 where it was never seen and has no scale;
    ``mean_w`` is the mean power of the training rows; ``firmness`` is the strength times the rows of a
    benchmark. Strength 1 says: benchmarks miss the model by about 10 % of their power, all their rows alike, and
    like units differ by about 25 % of the mean power. Both are guesses, so other strengths are tried.
    """
    if firmness <= 0:
        return None
    out = np.zeros((len(design.names), len(design.names)))
    for rail in np.unique(design.rail[design.rail >= 0]):
        term = [
            j
            for j, members in enumerate(design.members)
            if members and design.rail[j] == rail and full[list(members)].max() > 0
        ]
        if len(term) < 2:
            continue
        families = [table.predictors[design.members[j][0]].family or design.names[j] for j in term]
        at_full = np.array([full[list(design.members[j])].max() for j in term]) / scale[term]
        out[np.ix_(term, term)] = at_full[:, np.newaxis] * hierarchy(families) * at_full
    return out * firmness * (MISSED / SPREAD / mean_w) ** 2


def hierarchy(families: list[str]) -> Array:
    """S of the quadratic form above, the family and rail means eliminated.

    >>> hierarchy(["a", "a"]).round(3).tolist()
    [[0.5, -0.5], [-0.5, 0.5]]
    """
    names = list(dict.fromkeys(families))
    member = np.array([[family == name for name in names] for family in families], dtype=float)
    k, f = member.shape
    # unknowns: w (k), family means (f), rail mean (1)
    to_family = np.concatenate([np.eye(k), -member, np.zeros((k, 1))], axis=1)
    to_rail = np.concatenate([np.zeros((f, k)), np.eye(f), -np.ones((f, 1))], axis=1)
    whole = to_family.T @ to_family + to_rail.T @ to_rail
    means = whole[k:, k:]
    return np.asarray(whole[:k, :k] - whole[:k, k:] @ np.linalg.solve(means, whole[k:, :k]))
