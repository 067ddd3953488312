"""A fitted ensemble of regression trees as plain arrays: read without scikit-learn, evaluated at once.

Trees are stored level by level in arrays shaped ``(tree, node)``; a leaf points to itself, so that
every row takes the same number of steps and no row needs an ``if``.
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

Index = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Forest:
    """Sum of trees plus a constant; ``features`` names the columns it reads, in order."""

    features: tuple[str, ...]
    base: float
    feature: Index  # (tree, node) column a node looks at
    threshold: Array  # (tree, node) go left at or below
    left: Index  # (tree, node)
    right: Index  # (tree, node)
    value: Array  # (tree, node) what a leaf adds
    depth: int

    def __post_init__(self) -> None:
        shapes = {a.shape for a in (self.feature, self.threshold, self.left, self.right, self.value)}
        if len(shapes) != 1 or self.feature.ndim != 2:
            raise bad_value("forest", "arrays of one shape (tree, node)", shapes)
        trees, nodes = self.feature.shape
        inside = [(a >= 0).all() and (a < nodes).all() for a in (self.left, self.right)]
        columns = (self.feature >= 0).all() and (self.feature < max(len(self.features), 1)).all()
        finite = np.isfinite(self.value).all() and not np.isnan(self.threshold).any()
        if trees and not (all(inside) and columns and finite):
            raise bad_value("forest", "nodes and features that exist, finite values", "others")

    def __call__(self, columns: Mapping[str, npt.ArrayLike]) -> Array:
        """The sum of the trees for each row; columns broadcast to one shape, which is the result's."""
        rows = np.stack(np.broadcast_arrays(*(np.asarray(columns[name], float) for name in self.features)), axis=-1)
        flat = np.ascontiguousarray(rows.reshape(-1, len(self.features)))
        trees, nodes = self.feature.shape
        first = np.arange(trees, dtype=np.int64) * nodes  # where a tree begins in the flattened arrays
        feature, threshold, left, right, value = self._flat
        cell = np.broadcast_to(first, (len(flat), trees))
        column = (np.arange(len(flat), dtype=np.int64) * flat.shape[1])[:, np.newaxis]
        cells = flat.ravel()
        for _ in range(self.depth):
            goes_left = cells.take(column + feature.take(cell)) <= threshold.take(cell)
            cell = np.where(goes_left, left.take(cell), right.take(cell))
        return np.asarray(self.base + value.take(cell).sum(axis=-1)).reshape(rows.shape[:-1])

    @cached_property
    def _flat(self) -> tuple[npt.NDArray[np.int64], Array, npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
        """The arrays laid end to end; children as positions in them."""
        trees, nodes = self.feature.shape
        first = np.arange(trees, dtype=np.int64)[:, np.newaxis] * nodes
        return (
            self.feature.astype(np.int64).ravel(),
            self.threshold.ravel(),
            (self.left + first).ravel(),
            (self.right + first).ravel(),
            self.value.ravel(),
        )

    def to_arrays(self, prefix: str) -> dict[str, Any]:
        """Arrays to save beside a bundle, under names that begin with ``prefix``."""
        kept = ("feature", "threshold", "left", "right", "value")
        arrays = {f"{prefix}.{name}": getattr(self, name) for name in kept}
        return arrays | {f"{prefix}.features": np.array(self.features), f"{prefix}.base": np.array(self.base)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str) -> Forest:
        """A forest from what :meth:`to_arrays` saved."""
        found = {name: np.asarray(arrays[f"{prefix}.{name}"]) for name in ("feature", "left", "right")}
        left, right = found["left"].astype(np.int32), found["right"].astype(np.int32)
        if ((left < 0) | (right < 0) | (left >= left.shape[-1]) | (right >= left.shape[-1])).any():
            raise bad_value("forest", "nodes that exist", "others")
        return cls(
            features=tuple(str(name) for name in arrays[f"{prefix}.features"]),
            base=float(arrays[f"{prefix}.base"]),
            feature=found["feature"].astype(np.int32),
            threshold=np.asarray(arrays[f"{prefix}.threshold"], dtype=np.float64),
            left=left,
            right=right,
            value=np.asarray(arrays[f"{prefix}.value"], dtype=np.float64),
            depth=depth_of(left, right),
        )


def depth_of(left: Index, right: Index) -> int:
    """Steps after which every path has reached a leaf."""
    trees, nodes = left.shape
    depth, level = 0, np.zeros((trees, nodes), dtype=bool)
    level[:, :1] = True
    while depth <= nodes:
        rows, columns = np.nonzero(level)
        inner = left[rows, columns] != columns
        if not inner.any():
            return depth
        following = np.zeros_like(level)
        following[rows[inner], left[rows[inner], columns[inner]]] = True
        following[rows[inner], right[rows[inner], columns[inner]]] = True
        level, depth = following, depth + 1
    raise bad_value("forest", "trees", "a cycle")
