"""A fitted ensemble of regression trees as plain arrays: read without scikit-learn, evaluated at once.

Trees are stored level by level in arrays shaped ``(tree, node)``; a leaf points to itself. Small trees are not
walked: all their questions are asked at once, and each that sends a row to the right crosses out the leaves to its
left. The first leaf left is the row's [Lucchese2015, QuickScorer]. Large trees are walked, all rows a step at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value

NodeIndex = npt.NDArray[np.int32]
_MOST_LEAVES = 16  # of a tree, a bit of a word each
_BLOCK = 128  # rows whose answers stay in a cache of a megabyte
_MOST_REPEATED = 64  # rows for which thresholds are repeated
_LOOK = 5  # levels after which it is worth a look whether all rows have reached a leaf


@dataclass(frozen=True)
class TreeEnsemble:
    """Sum of trees plus a constant; ``features`` names the columns it reads, in order."""

    features: tuple[str, ...]
    base: float
    feature: NodeIndex  # (tree, node) column a node looks at
    threshold: Array  # (tree, node) go left at or below
    left: NodeIndex  # (tree, node)
    right: NodeIndex  # (tree, node)
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
        """Return the sum of the trees for each row; columns broadcast to one shape, which is the result's."""
        rows = np.stack(np.broadcast_arrays(*(np.asarray(columns[name], float) for name in self.features)), axis=-1)
        return self.sum_trees(rows.reshape(-1, len(self.features))).reshape(rows.shape[:-1])

    def sum_trees(self, rows: Array) -> Array:
        """Return the sum of the trees for each row ``(row, feature)``, columns in the order of ``features``."""
        if self._leaves is None:
            return np.asarray(self.base + self.value.ravel().take(self._walk.leaves(rows)).sum(axis=-1))
        if len(rows) <= _BLOCK:
            return self.base + self._leaves.sums(rows)
        blocks = [self._leaves.sums(rows[start : start + _BLOCK]) for start in range(0, len(rows), _BLOCK)]
        return self.base + np.concatenate(blocks)

    @cached_property
    def _walk(self) -> TreeWalk:
        return TreeWalk.from_arrays(self.feature, self.threshold, self.left, self.right, self.depth)

    @cached_property
    def _leaves(self) -> _LeafMasks | None:
        """The trees as questions all asked at once; None where a tree is too large for that."""
        inner = self.left != np.arange(self.left.shape[-1])
        return _build_leaf_masks(self, inner) if int(inner.sum(axis=-1).max(initial=0)) < _MOST_LEAVES else None

    def to_arrays(self, prefix: str) -> dict[str, Any]:
        """Return the arrays to save with a bundle, under names that begin with ``prefix``."""
        kept = ("feature", "threshold", "left", "right", "value")
        arrays = {f"{prefix}.{name}": getattr(self, name) for name in kept}
        return arrays | {f"{prefix}.features": np.array(self.features), f"{prefix}.base": np.array(self.base)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str) -> TreeEnsemble:
        """Build the trees from what ``to_arrays`` saved."""
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
            depth=tree_depth(left, right),
        )


def tree_depth(left: NodeIndex, right: NodeIndex) -> int:
    """Return the steps after which every path has reached a leaf."""
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


@dataclass(frozen=True)
class TreeWalk:
    """Trees laid end to end to be walked from the root down, every node twice: to the right, then to the left."""

    feature: npt.NDArray[np.intp]
    threshold: Array
    child: npt.NDArray[np.intp]
    root: npt.NDArray[np.intp]  # (tree,)
    depth: int

    @classmethod
    def from_arrays(
        cls, feature: NodeIndex, threshold: Array, left: NodeIndex, right: NodeIndex, depth: int
    ) -> TreeWalk:
        """Lay arrays ``(tree, node)`` end to end."""
        trees, nodes = feature.shape
        first = np.arange(trees, dtype=np.intp) * nodes
        child = 2 * (np.stack([right, left], axis=-1).astype(np.intp) + first[:, np.newaxis, np.newaxis])
        twice = np.repeat(feature.astype(np.intp).ravel(), 2), np.repeat(threshold.ravel(), 2)
        return cls(*twice, child.ravel(), 2 * first, depth)

    def leaves(self, rows: Array) -> npt.NDArray[np.intp]:
        """Return the leaf of each row in each tree, ``(row, tree)``, as positions in the arrays laid end to end."""
        flat, column = rows.ravel(), np.arange(0, rows.size, max(rows.shape[1], 1))[:, np.newaxis]
        node: npt.NDArray[np.intp] = np.broadcast_to(self.root, (len(rows), len(self.root)))
        for level in range(self.depth):
            goes_left = flat.take(column + self.feature.take(node)) <= self.threshold.take(node)
            before, node = node, self.child.take(node + goes_left)
            if level % _LOOK == _LOOK - 1 and (node == before).all():
                break
        return node // 2


@dataclass(frozen=True)
class _LeafMasks:
    """Every question of every tree, ``(question, tree)`` laid end to end; those a small tree lacks are never true.

    Trees share many questions: each is asked once.
    """

    feature: npt.NDArray[np.intp]  # (distinct question,)
    threshold: Array  # (distinct question, 1)
    which: npt.NDArray[np.intp]  # the distinct question that each is
    left: npt.NDArray[np.uint16]  # leaves on the left of a question, a bit each; (question, 1)
    value: Array  # (tree, leaf) laid end to end
    first: npt.NDArray[np.intp]  # where a tree's leaves begin, (tree, 1)

    def sums(self, rows: Array) -> Array:
        """Return what the leaves of each row add up to; rows lie on the last axis, ``(question, tree, row)``."""
        threshold, left = self._repeated(len(rows))
        asked = np.ascontiguousarray(rows.T).take(self.feature, axis=0) > threshold
        crossed = asked.astype(np.uint16).take(self.which, axis=0)
        crossed *= left
        of_tree = np.bitwise_or.reduce(crossed.reshape(*self._shape, len(rows)), axis=0)
        leaf = np.add(self._lowest_zero.take(of_tree), self.first)
        return np.asarray(self.value.take(leaf).sum(axis=0))

    def _repeated(self, rows: int) -> tuple[Array, npt.NDArray[np.uint16]]:
        """Return thresholds and masks repeated for each row: NumPy then runs one long loop, not many short ones.

        Those for the last number of rows are kept, since a model asks for as many again; that is three times as fast
        for 6 to 30 rows. Where rows are many, loops are long anyway.
        """
        if rows > _MOST_REPEATED:
            return self.threshold, self.left
        found = self._kept.get(rows)
        if found is None:
            found = np.repeat(self.threshold, rows, axis=1), np.repeat(self.left, rows, axis=1)
            self._kept.clear()
            self._kept[rows] = found
        return found

    @cached_property
    def _kept(self) -> dict[int, tuple[Array, npt.NDArray[np.uint16]]]:
        return {}

    @cached_property
    def _lowest_zero(self) -> npt.NDArray[np.intp]:
        """Place of the lowest bit that is not set, of every word that the leaves of a tree can make."""
        words = np.arange(1 << (self._shape[0] + 1))
        return np.asarray(np.log2(~words & (words + 1)), dtype=np.intp)

    @cached_property
    def _shape(self) -> tuple[int, int]:
        """Questions of a tree, and trees."""
        return len(self.which) // max(len(self.first), 1), len(self.first)


def _build_leaf_masks(forest: TreeEnsemble, inner: npt.NDArray[np.bool_]) -> _LeafMasks:
    """Leaves of each tree counted from left to right, and which of them lie on the left of each question."""
    trees, nodes = inner.shape
    node = _reachable_nodes(forest, inner)
    tree = node // nodes
    left, right = (child.ravel()[node] + tree * nodes for child in (forest.left, forest.right))
    below, first = np.ones(inner.size, np.intp), np.zeros(inner.size, np.intp)  # leaves under a node, and their first
    for _ in range(forest.depth):
        below[node] = below.take(left) + below.take(right)
    for _ in range(forest.depth):
        first[left] = first.take(node)
        first[right] = first.take(node) + below.take(left)
    most = int(inner.sum(axis=-1).max(initial=0))
    question = (np.cumsum(inner, axis=-1).ravel()[node] - 1) * trees + tree
    feature, threshold = np.zeros(most * trees, np.intp), np.full(most * trees, np.inf)
    crossed, value = np.zeros(most * trees, np.uint16), np.zeros(trees * (most + 1))
    feature[question], threshold[question] = forest.feature.ravel()[node], forest.threshold.ravel()[node]
    crossed[question] = ((1 << below.take(left)) - 1) << first.take(node)
    ends = np.concatenate([np.arange(trees) * nodes, left, right])
    ends = ends[~inner.ravel()[ends]]
    value[ends // nodes * (most + 1) + first.take(ends)] = forest.value.ravel()[ends]
    distinct, which = np.unique(np.stack([feature, threshold], axis=-1), axis=0, return_inverse=True)
    first = np.arange(trees) * (most + 1)
    return _LeafMasks(
        distinct[:, 0].astype(np.intp),
        distinct[:, 1:],
        which.ravel(),
        crossed[:, np.newaxis],
        value,
        first[:, np.newaxis],
    )


def _reachable_nodes(forest: TreeEnsemble, inner: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Questions that a path from a root leads to, as positions in the arrays laid end to end."""
    trees, nodes = inner.shape
    found, level = [], np.arange(trees, dtype=np.intp) * nodes
    for _ in range(forest.depth + 1):
        level = level[inner.ravel()[level]]
        found.append(level)
        tree = level // nodes * nodes
        level = np.concatenate([child.ravel()[level] + tree for child in (forest.left, forest.right)])
    return np.sort(np.concatenate(found))
