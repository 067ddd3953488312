"""Trees that vote for a candidate: which kernel a library took for shapes alike, where its rule has corners.

Extremely randomised trees [Geurts2006] as plain arrays; a leaf points to itself and holds the candidate it votes for.
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
from wattcast.forest import Index, Walk, depth_of

_SHALLOWEST, _LOOK = 8, 3  # levels before any tree has ended, and after which it is worth a look which have
_KEPT = ("feature", "threshold", "left", "right", "candidate")


@dataclass(frozen=True)
class Votes:
    """Arrays ``(tree, node)``."""

    feature: Index  # column a node looks at
    threshold: Array  # go left at or below
    left: Index
    right: Index
    candidate: Index  # a leaf's vote
    depth: int

    def __post_init__(self) -> None:
        shapes = {getattr(self, name).shape for name in _KEPT}
        if len(shapes) != 1 or self.feature.ndim != 2:
            raise bad_value("kernel choice", "votes of one shape (tree, node)", shapes)

    def share(self, columns: Array, candidates: int) -> Array:
        """Share of the trees that vote for each candidate, ``(row, candidate)``; columns are ``(row, column)``."""
        first = np.repeat(np.arange(0, len(columns) * candidates, candidates), len(self.feature))
        vote = first + self.candidate.ravel().take(self._leaves(columns))
        count = np.bincount(vote, minlength=len(columns) * candidates)
        return np.asarray(count.reshape(len(columns), candidates) / len(self.feature))

    def _leaves(self, columns: Array) -> npt.NDArray[np.intp]:
        """The leaf of each row in each tree, row by row, as positions in the arrays laid end to end.

        Trees end at very different depths: once some have, every few levels those that have are left behind.
        """
        walk, flat = self._walk, columns.ravel()
        node = np.tile(walk.root, len(columns))
        at = np.repeat(np.arange(0, flat.size, max(columns.shape[1], 1)), len(walk.root))
        here, going = node, np.arange(len(node))
        for level in range(self.depth):
            goes_left = flat.take(walk.feature.take(here) + at) <= walk.threshold.take(here)
            before, here = here, walk.child.take(here + goes_left)
            if level >= _SHALLOWEST and level % _LOOK == 0:
                node[going] = here
                moved = (here != before).nonzero()[0]
                going, here, at = (of.take(moved) for of in (going, here, at))
        node[going] = here
        return node // 2

    @cached_property
    def _walk(self) -> Walk:
        return Walk.of(self.feature, self.threshold, self.left, self.right, self.depth)

    def to_arrays(self, prefix: str) -> dict[str, Any]:
        """Arrays to save, under names that begin with ``prefix``."""
        return {f"{prefix}.{name}": getattr(self, name) for name in _KEPT}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str, columns: int, candidates: int) -> Votes | None:
        """What :meth:`to_arrays` saved; None where there is nothing."""
        if f"{prefix}.feature" not in arrays:
            return None
        given = {name: np.asarray(arrays[f"{prefix}.{name}"]) for name in _KEPT}
        most = {"feature": columns, "candidate": candidates, "left": given["left"].shape[-1]}
        most["right"] = most["left"]
        if any((given[name] < 0).any() or (given[name] >= end).any() for name, end in most.items()):
            raise bad_value("kernel choice", "votes of nodes, columns and candidates that exist", "others")
        whole: dict[str, npt.NDArray[np.int32]] = {name: given[name].astype(np.int32) for name in most}
        threshold = np.asarray(given["threshold"], dtype=np.float64)
        return cls(threshold=threshold, depth=depth_of(whole["left"], whole["right"]), **whole)
