"""The Pareto front: points that no other point beats in every objective. All objectives are minimised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array


def front(objectives: Array) -> npt.NDArray[np.int64]:
    """Rows of ``(point, objective)`` on the front, in order of the first objective.

    A point is on the front when none is at least as good everywhere and better somewhere. Of points
    equal in all objectives the first is kept; objectives count as equal to ten digits, so that the
    last bits, which depend on how a sweep was cut into chunks, decide nothing.

    >>> front(np.array([[1.0, 9.0], [2.0, 5.0], [3.0, 7.0], [4.0, 1.0], [4.0, 1.0]])).tolist()
    [0, 1, 3]
    """
    rounded = _ten_digits(objectives)
    order = np.lexsort(rounded.T[::-1])  # stable: equal points stay in order
    ranked = rounded[order]
    if ranked.shape[1] == 2:
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], ranked[:-1, 1]]))
        return order[ranked[:, 1] < best_before].astype(np.int64)
    return order[_undominated(ranked)].astype(np.int64)


def of_columns(columns: Mapping[str, npt.NDArray[Any]], objectives: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """The rows of a table that are on the front of the named columns."""
    rows = front(np.stack([np.asarray(columns[name], dtype=np.float64) for name in objectives], axis=-1))
    return {name: values[rows] for name, values in columns.items()}


def _ten_digits(values: Array) -> Array:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2.0**33) / 2.0**33, exponent)


def _undominated(ranked: Array) -> npt.NDArray[np.int64]:
    """Rows that nothing dominates, for rows in lexicographic order: only an earlier row can dominate one."""
    left = np.arange(len(ranked))
    kept = []
    while left.size:
        head = left[0]
        kept.append(head)
        rest = left[1:]
        left = rest[(ranked[rest] < ranked[head]).any(axis=-1)]
    return np.array(kept, dtype=np.int64)
