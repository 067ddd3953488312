"""A fitted ensemble of regression trees as plain arrays, read without scikit-learn.

Trees are stored level by level in arrays shaped ``(tree, node)``; a leaf points to itself. They are
walked, all rows a step at a time (``TreeWalk``); for many rows, small trees answer all questions at
once (``LeafMasks``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, find_equal
from wattcast.core.errors import bad_value

NodeIndex = npt.NDArray[np.int32]
_BLOCK = 128  # rows whose places in the trees stay in a cache of a megabyte
_MANY_ROWS = 1024  # from which masks of leaves gain more than making them takes
_LOOK = 5  # levels after which it is worth a look whether all rows have reached a leaf


@dataclass(frozen=True, eq=False, repr=False)
class TreeEnsemble:
    """Sum of trees plus a constant; ``features`` names the columns it reads, in order."""

    features: tuple[str, ...]
    base: float
    feature: NodeIndex  # (tree, node) column a node looks at
    threshold: Array  # (tree, node) go left at or below
    left: NodeIndex  # (tree, node)
    right: NodeIndex  # (tree, node)
    value: Array  # (tree, node) what a leaf adds

    def __post_init__(self) -> None:
        shapes = {
            a.shape for a in (self.feature, self.threshold, self.left, self.right, self.value)
        }
        if len(shapes) != 1 or self.feature.ndim != 2:
            raise bad_value("forest", "arrays of one shape (tree, node)", shapes)
        trees, nodes = self.feature.shape
        inside = [(a >= 0).all() and (a < nodes).all() for a in (self.left, self.right)]
        columns = (self.feature >= 0).all() and (self.feature < max(len(self.features), 1)).all()
        finite = np.isfinite(self.value).all() and not np.isnan(self.threshold).any()
        if trees and not (all(inside) and columns and finite):
            raise bad_value("forest", "nodes and features that exist, finite values", "others")

    def sum_trees(self, rows: npt.NDArray[Any]) -> Array:
        """Return the sum of the trees for each row ``(row, feature)``, columns in the order of
        ``features``.
        """
        finder: LeafMasks | TreeWalk = self._walk
        value = self.value.ravel()
        most = _BLOCK
        place = np.arange(len(rows))
        if len(rows) >= _MANY_ROWS and self._masks is not None:
            finder, rows = self._masks.answer_questions(rows)
            first = find_equal(rows.T)  # many give the same answers
            alike = np.flatnonzero(first == place)
            rows = rows[alike]
            place = alike.searchsorted(first)
            value = value.take(finder.leaf)
            most = 4 * _BLOCK
        starts = range(0, max(len(rows), 1), most)
        # "clip": places are known to exist, and a check of each takes as long again
        blocks = [
            value.take(finder.leaves(rows[i : i + most]), mode="clip").sum(axis=-1) for i in starts
        ]
        return np.asarray(self.base + np.concatenate(blocks)).take(place)

    @cached_property
    def _walk(self) -> TreeWalk:
        return TreeWalk.from_arrays(self.feature, self.threshold, self.left, self.right)

    @cached_property
    def _masks(self) -> LeafMasks | None:
        return LeafMasks.from_arrays(self.feature, self.threshold, self.left, self.right)

    def to_arrays(self, prefix: str) -> dict[str, Any]:
        """Return the arrays to save with a bundle, under names that begin with ``prefix``."""
        columns = ("feature", "threshold", "left", "right", "value")
        arrays = {f"{prefix}.{name}": getattr(self, name) for name in columns}
        return arrays | {
            f"{prefix}.features": np.array(self.features),
            f"{prefix}.base": np.array(self.base),
        }

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Any],
        prefix: str,
    ) -> TreeEnsemble:
        """Build the trees from what ``to_arrays`` saved."""
        nodes = {
            name: np.asarray(arrays[f"{prefix}.{name}"], np.int32)
            for name in ("feature", "left", "right")
        }
        return cls(
            features=tuple(str(name) for name in arrays[f"{prefix}.features"]),
            base=float(arrays[f"{prefix}.base"]),
            threshold=np.asarray(arrays[f"{prefix}.threshold"], dtype=np.float64),
            value=np.asarray(arrays[f"{prefix}.value"], dtype=np.float64),
            **nodes,
        )


def tree_depth(left: NodeIndex, right: NodeIndex) -> int:
    """Return the steps after which every path has reached a leaf."""
    trees, nodes = left.shape
    depth = 0
    level = np.zeros((trees, nodes), dtype=bool)
    level[:, :1] = True
    while depth <= nodes:
        rows, columns = np.nonzero(level)
        inner = left[rows, columns] != columns
        if not inner.any():
            return depth
        following = np.zeros_like(level)
        following[rows[inner], left[rows[inner], columns[inner]]] = True
        following[rows[inner], right[rows[inner], columns[inner]]] = True
        level = following
        depth = depth + 1
    raise bad_value("forest", "trees", "a cycle")


_MOST_LEAVES = 16


@dataclass(frozen=True, eq=False, repr=False)
class LeafMasks:
    """Trees of at most 16 leaves, whose leaves are found without walking [Lucchese2015].

    A bit stands for each leaf of a tree, from left to right. A question answered "right" clears the
    bits of the leaves on its left; the lowest bit that remains is the row's leaf. Questions about
    one column are sorted by threshold, so that a row's place among them answers them all
    (QuickScorer, SIGIR 2015)."""

    columns: tuple[
        tuple[int, Array, npt.NDArray[np.uint16]], ...
    ]  # column, thresholds, (place, tree) bits left
    leaf: npt.NDArray[np.intp]  # (tree, 16) positions of leaves in the arrays laid end to end
    bits: npt.NDArray[np.uint16]  # (tree,) left by columns that are equal in all rows

    @classmethod
    def from_arrays(
        cls,
        feature: NodeIndex,
        threshold: Array,
        left: NodeIndex,
        right: NodeIndex,
    ) -> LeafMasks | None:
        """Number the leaves of arrays ``(tree, node)``; None where a tree has too many."""
        trees, nodes = feature.shape
        is_leaf = left == np.arange(nodes)
        every_tree = np.arange(trees)[:, np.newaxis]
        below = np.ones((trees, nodes), np.int64)  # leaves below a node
        for _ in range(tree_depth(left, right)):
            below = np.where(
                is_leaf,
                1,
                np.minimum(below[every_tree, left] + below[every_tree, right], _MOST_LEAVES + 1),
            )
        if (below[:, :1] > _MOST_LEAVES).any():
            return None
        first = np.zeros((trees, nodes), np.int64)  # of these leaves
        leaf = np.zeros((trees, _MOST_LEAVES), np.intp)
        questions: list[npt.NDArray[np.intp]] = []
        level = np.stack([np.arange(trees), np.zeros(trees, np.intp)])
        while level.size:
            tree, node = level[:, is_leaf[*level]]
            leaf[tree, first[tree, node]] = tree * nodes + node
            tree, node = inner = level[:, ~is_leaf[*level]]
            lower = left[tree, node]
            upper = right[tree, node]
            first[tree, lower] = first[tree, node]
            first[tree, upper] = first[tree, node] + below[tree, lower]
            questions.append(inner)
            level = np.concatenate([[tree, lower], [tree, upper]], axis=1)
        tree, node = np.concatenate([*questions, np.zeros((2, 0), np.intp)], axis=1)
        lower = left[tree, node]
        leaves_below = ~(((1 << below[tree, lower]) - 1) << first[tree, lower]).astype(np.uint16)
        columns = []
        for column in np.unique(feature[tree, node]).tolist():
            some = np.flatnonzero(feature[tree, node] == column)
            some = some[np.argsort(threshold[tree[some], node[some]])]
            remain = np.full((len(some) + 1, trees), _ALL_LEAVES)
            remain[np.arange(1, len(some) + 1), tree[some]] = leaves_below[some]
            columns.append(
                (
                    column,
                    threshold[tree[some], node[some]],
                    np.bitwise_and.accumulate(remain, axis=0),
                )
            )
        return cls(tuple(columns), leaf, np.full(trees, _ALL_LEAVES))

    def answer_questions(self, rows: Array) -> tuple[LeafMasks, npt.NDArray[np.intp]]:
        """Return masks for these rows, without columns that are equal in all, and their places,
        ``(row, column)``.
        """
        varies = (rows != rows[0]).any(axis=0)
        bits = [
            table[thresholds.searchsorted(rows[0, i])]
            for i, thresholds, table in self.columns
            if not varies[i]
        ]
        open_columns = tuple(column for column in self.columns if varies[column[0]])
        places = [
            thresholds.searchsorted(rows[:, column]) for column, thresholds, _ in open_columns
        ]
        open_masks = LeafMasks(open_columns, self.leaf, np.bitwise_and.reduce([self.bits, *bits]))
        return open_masks, np.array(places, np.intp).reshape(len(open_columns), len(rows)).T

    def leaves(self, places: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the leaf of each row in each tree, ``(row, tree)``, as positions in ``leaf`` laid
        end to end.
        """
        remain = np.repeat(self.bits[np.newaxis], len(places), axis=0)
        for place, (_, _, table) in zip(places.T, self.columns, strict=True):
            remain &= table.take(place, axis=0, mode="clip")
        return np.arange(0, self.leaf.size, _MOST_LEAVES) + _lowest_bits().take(remain)


_ALL_LEAVES = np.uint16(2**_MOST_LEAVES - 1)


@cache
def _lowest_bits() -> npt.NDArray[np.uint8]:
    """Return the place of the lowest bit of every number of 16 bits, in bytes so that all stay in a
    cache.
    """
    numbers = np.arange(1, 2**_MOST_LEAVES)
    return np.append(0, np.log2(numbers & -numbers)).astype(np.uint8)


@dataclass(frozen=True, eq=False, repr=False)
class TreeWalk:
    """Trees laid end to end to be walked from the root down, every node twice: to the right, then
    to the left.
    """

    feature: npt.NDArray[np.intp]
    threshold: Array
    child: npt.NDArray[np.intp]
    root: npt.NDArray[np.intp]  # (tree,)
    depth: int

    @classmethod
    def from_arrays(
        cls,
        feature: NodeIndex,
        threshold: Array,
        left: NodeIndex,
        right: NodeIndex,
    ) -> TreeWalk:
        """Lay arrays ``(tree, node)`` end to end."""
        trees, nodes = feature.shape
        first = np.arange(trees, dtype=np.intp) * nodes
        child = 2 * (
            np.stack([right, left], axis=-1).astype(np.intp) + first[:, np.newaxis, np.newaxis]
        )
        twice = np.repeat(feature.astype(np.intp).ravel(), 2), np.repeat(threshold.ravel(), 2)
        return cls(*twice, child.ravel(), 2 * first, tree_depth(left, right))

    def leaves(self, rows: Array) -> npt.NDArray[np.intp]:
        """Return the leaf of each row in each tree, ``(row, tree)``, as positions in the arrays
        laid end to end.
        """
        flat = rows.ravel()
        column = np.arange(0, rows.size, max(rows.shape[1], 1))[:, np.newaxis]
        node: npt.NDArray[np.intp] = np.broadcast_to(self.root, (len(rows), len(self.root)))
        for level in range(self.depth):
            goes_left = flat.take(column + self.feature.take(node)) <= self.threshold.take(node)
            before = node
            node = self.child.take(node + goes_left)
            if level % _LOOK == _LOOK - 1 and (node == before).all():
                break
        return node // 2
