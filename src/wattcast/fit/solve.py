"""Least squares from normal equations: free, non-negative, or partly so, with shrinkage; never a pseudo-inverse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import BadInput

JITTER = 1e-12  # of a unit diagonal: lets an unseen column be factored; too small to move a seen one
SINGULAR = 1e-9  # smallest eigenvalue of the Gram of unit columns that still counts as full rank


def solve(gram: Array, moment: Array, signed: Sequence[bool], penalty: Array | None = None) -> Array:
    """Coefficients that minimise cᵀ·G·c - 2·mᵀ·c + cᵀ·S·c, non-negative but where ``signed``.

    A column that never differs from zero gets coefficient zero unless the penalty ties it to others.
    """
    from scipy.linalg import solve_triangular
    from scipy.optimize import nnls

    full = gram if penalty is None else gram + penalty
    unit = _unit(full)
    factor = np.linalg.cholesky(full / unit / unit[:, np.newaxis] + JITTER * np.eye(unit.size)).T
    target = solve_triangular(factor, moment / unit, trans="T", check_finite=False)
    free = np.flatnonzero(signed)
    if free.size == unit.size:
        scaled = solve_triangular(factor, target, check_finite=False)
    else:
        both, _ = nnls(np.concatenate([factor, -factor[:, free]], axis=1), target, maxiter=100 * unit.size)
        scaled = both[: unit.size]
        scaled[free] -= both[unit.size :]
    return np.asarray(np.where(np.diag(full) > 0, scaled / unit, 0.0))


def check_rank(gram: Array, names: Sequence[str], where: str) -> None:
    """Refuse a design whose columns depend on one another, naming them."""
    unit = _unit(gram)
    empty = [name for name, size in zip(names, np.diag(gram), strict=True) if size == 0]
    if empty:
        raise BadInput(f"{where}: {', '.join(empty)}: zero in every row. Leave it out, or measure work that uses it.")
    value, vector = np.linalg.eigh(gram / unit / unit[:, np.newaxis])
    if value[0] > SINGULAR:
        return
    share = np.abs(vector[:, 0])
    involved = [name for name, s in zip(names, share, strict=True) if s > 0.1 * share.max()]
    raise BadInput(
        f"{where}: singular design: {', '.join(involved)} move together in every row, so their costs cannot be told "
        "apart. Leave one out, tie them as one family, or add a benchmark that moves one without the others."
    )


def _unit(gram: Array) -> Array:
    size = np.sqrt(np.diag(gram))
    return np.where(size > 0, size, 1.0)
