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

from wattcast.arrays import Array
from wattcast.errors import bad_value

Index = npt.NDArray[np.int32]
_MOST_LEAVES = 16  # of a tree, a bit of a word each
_BLOCK = 128  # rows whose answers stay in a cache of a megabyte
_FEW, _MOST_REPEATED = 6, 64  # rows that are looked at one by one, and of which thresholds are repeated
_LOOK = 5  # levels after which it is worth a look whether all rows have reached a leaf


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
        return self.of(rows.reshape(-1, len(self.features))).reshape(rows.shape[:-1])

    def of(self, rows: Array) -> Array:
        """The sum of the trees for each row ``(row, feature)``, columns in the order of ``features``."""
        if self._leaves is None:
            return np.asarray(self.base + self.value.ravel().take(self._walk.leaves(rows)).sum(axis=-1))
        if len(rows) <= _BLOCK:
            return self.base + self._leaves.sums(rows)
        blocks = [self._leaves.sums(rows[start : start + _BLOCK]) for start in range(0, len(rows), _BLOCK)]
        return self.base + np.concatenate(blocks)

    @cached_property
    def _walk(self) -> Walk:
        return Walk.of(self.feature, self.threshold, self.left, self.right, self.depth)

    @cached_property
    def _leaves(self) -> _Leaves | None:
        """The trees as questions all asked at once; None where a tree is too large for that."""
        inner = self.left != np.arange(self.left.shape[-1])
        return _leaves(self, inner) if int(inner.sum(axis=-1).max(initial=0)) < _MOST_LEAVES else None

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


@dataclass(frozen=True)
class Walk:
    """Trees laid end to end to be walked from the root down, every node twice: to the right, then to the left."""

    feature: npt.NDArray[np.intp]
    threshold: Array
    child: npt.NDArray[np.intp]
    root: npt.NDArray[np.intp]  # (tree,)
    depth: int

    @classmethod
    def of(cls, feature: Index, threshold: Array, left: Index, right: Index, depth: int) -> Walk:
        """From arrays ``(tree, node)``."""
        trees, nodes = feature.shape
        first = np.arange(trees, dtype=np.intp) * nodes
        child = 2 * (np.stack([right, left], axis=-1).astype(np.intp) + first[:, np.newaxis, np.newaxis])
        twice = np.repeat(feature.astype(np.intp).ravel(), 2), np.repeat(threshold.ravel(), 2)
        return cls(*twice, child.ravel(), 2 * first, depth)

    def leaves(self, rows: Array) -> npt.NDArray[np.intp]:
        """The leaf of each row in each tree, ``(row, tree)``, as positions in the arrays laid end to end."""
        flat, column = rows.ravel(), np.arange(0, rows.size, max(rows.shape[1], 1))[:, np.newaxis]
        node: npt.NDArray[np.intp] = np.broadcast_to(self.root, (len(rows), len(self.root)))
        for level in range(self.depth):
            goes_left = flat.take(column + self.feature.take(node)) <= self.threshold.take(node)
            before, node = node, self.child.take(node + goes_left)
            if level % _LOOK == _LOOK - 1 and (node == before).all():
                break
        return node // 2


@dataclass(frozen=True)
class _Leaves:
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
        """What the leaves of each row add up to."""
        return self._of_few(rows) if len(rows) <= _FEW else self._of_many(rows)

    def _of_many(self, rows: Array) -> Array:
        """Rows on the last axis: ``(question, tree, row)``."""
        threshold, left = self._repeated(len(rows))
        asked = np.ascontiguousarray(rows.T).take(self.feature, axis=0) > threshold
        crossed = asked.astype(np.uint16).take(self.which, axis=0)
        crossed *= left
        of_tree = np.bitwise_or.reduce(crossed.reshape(*self._shape, len(rows)), axis=0)
        leaf = np.add(self._lowest_zero.take(of_tree), self.first)
        return np.asarray(self.value.take(leaf).sum(axis=0))

    def _of_few(self, rows: Array) -> Array:
        """Rows on the first axis, and trees on the last: of a few, asking again is cheaper than finding an answer."""
        feature, threshold = self._each
        crossed = (rows.take(feature, axis=1) > threshold) * self.left[:, 0]
        of_tree = np.bitwise_or.reduce(crossed.reshape(len(rows), *self._shape), axis=1)
        leaf = np.add(self._lowest_zero.take(of_tree), self.first[:, 0])
        return np.asarray(self.value.take(leaf).sum(axis=1))

    def _repeated(self, rows: int) -> tuple[Array, npt.NDArray[np.uint16]]:
        """Thresholds and masks once a row: NumPy then walks them in one long loop, not in as many as questions.

        Of the number of rows last asked for, which a model of whatever size asks for again. Where rows are many,
        loops are long anyway.
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

    @cached_property
    def _each(self) -> tuple[npt.NDArray[np.intp], Array]:
        """Feature and threshold of every question, those that trees share as often as they do."""
        return self.feature.take(self.which), self.threshold[:, 0].take(self.which)


def _leaves(forest: Forest, inner: npt.NDArray[np.bool_]) -> _Leaves:
    """Leaves of each tree counted from left to right, and which of them lie on the left of each question."""
    trees, nodes = inner.shape
    node = _reached(forest, inner)
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
    return _Leaves(
        distinct[:, 0].astype(np.intp),
        distinct[:, 1:],
        which.ravel(),
        crossed[:, np.newaxis],
        value,
        first[:, np.newaxis],
    )


def _reached(forest: Forest, inner: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Questions that a path from a root leads to, as positions in the arrays laid end to end."""
    trees, nodes = inner.shape
    found, level = [], np.arange(trees, dtype=np.intp) * nodes
    for _ in range(forest.depth + 1):
        level = level[inner.ravel()[level]]
        found.append(level)
        tree = level // nodes * nodes
        level = np.concatenate([child.ravel()[level] + tree for child in (forest.left, forest.right)])
    return np.sort(np.concatenate(found))
