"""Ways to hold benchmarks back: one by one, by group, by cluster of similar work, or in a few folds.

A fold is a mask over benchmarks that is True for those held back. All rows of a benchmark stay on
one side.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.fit.table import Codes

Mask = npt.NDArray[np.bool_]


def by_label(labels: Codes) -> list[Mask]:
    """One fold a label.

    >>> [fold.tolist() for fold in by_label(np.array([0, 1, 0]))]
    [[True, False, True], [False, True, False]]
    """
    return [labels == label for label in np.unique(labels)]


def leave_one_out(count: int) -> list[Mask]:
    """One fold a benchmark."""
    return by_label(np.arange(count))


def few_folds(labels: Codes, folds: int, seed: int = 0) -> list[Mask]:
    """At most ``folds`` folds of whole labels, dealt out in a fixed random order."""
    unique = np.unique(labels)
    if unique.size < 2:
        raise bad_value("cross-validation", "at least two benchmarks or groups", f"{unique.size}", "Measure more.")
    dealt = np.random.default_rng(seed).permutation(unique)
    return [np.isin(labels, dealt[i :: min(folds, unique.size)]) for i in range(min(folds, unique.size))]


def clusters(features: Array, count: int) -> Codes:
    """Ward clusters of similar benchmarks, ``count`` of them; the same for the same features always."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if not 2 <= count <= len(features):
        raise bad_value("clusters", f"2 to {len(features)}", count)
    return np.asarray(fcluster(linkage(features, "ward"), count, "maxclust"), dtype=np.int64)
