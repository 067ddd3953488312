"""Which kernels a library may run for a product, and how likely each is.

Libraries choose kernels by rules nobody publishes. A chooser holds the candidates of products that
a library chooses for alike (say, half precision with aligned rows) and scores them: by what each
would do with the product (tiles, waves, padding, a rough cost) and by the shape itself. Where
decision trees were fitted too, their votes are mixed in.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import bad_value
from wattcast.core.arrays import (
    Array,
    Mask,
    index_distinct,
    map_blocks,
)
from wattcast.core.tree_ensemble import NodeIndex, TreeWalk
from wattcast.kernels.kernel_labels import (
    KERNEL_KINDS,
    NOT_RUN,
    TILES,
    KernelLabel,
    KernelsRun,
    feed_share,
    find_label,
    tile_constants,
    tiles_per_sm,
)
from wattcast.kernels.kernel_picks import (
    KernelPicks,
    RowIndex,
    join_picks,
    picks_of_labels,
)


class KernelChoiceCoefficients(Coefficients):
    """What the terms of a choice assume, and how scores become shares."""

    loads_per_cycle: float  # elements of both operands that the chip loads in a cycle
    longest_side: float  # of a product, beyond which its ratio to the other tells no more
    most_vector_rows: float  # for which a kernel without a tile is taken
    few_vector_rows: float  # beyond which it is taken for little work alone
    little_vector_work: float  # in multiplications
    vote_share: float  # of the trees against the score, where there are any
    sharpness: float  # exponent of likelihoods where kernels differ in kind
    step_k: float  # elements of K in a step
    most_log_taps: float  # log2 of the taps that Hopper's kernels walk over


CHOICE = load_coefficients("kernel_choice", KernelChoiceCoefficients)

ProductSizes = tuple[Array, Array, Array, Array]  # b, m, n and k, each ``(row,)``
TF32_CODE = 3.0  # of the format, among the columns that choosers see
# Terms of a choice are those of one chip, whatever runs: of a Hopper's SM in halves.
_FLOP_PER_CYCLE = 4096.0
_MOST_PICKS = 8  # kernels that a prediction is averaged over
# Products whose candidates' terms stay in a cache, and in memory
_CACHED_PRODUCTS = 128
_MOST_PRODUCTS = 8192
_TERMS = 17
_LEAST_TILE = 8.0  # tokens of the smallest tile that a library has


class Candidates(NamedTuple):
    """The kernels that a library chooses among, each ``(candidate,)``."""

    kind: npt.NDArray[np.str_]
    tile_n: Array
    tile_m: Array
    split: Mask  # of K over blocks


class _TiledProducts(NamedTuple):
    """What the tiles of each candidate take for each product, ``(row, candidate)``."""

    covered_n: Array  # outputs, those of partly filled tiles included
    covered_m: Array  # tokens, likewise
    tiles: Array
    waves: Array
    compute_cycles: Array
    load_cycles: Array


def candidate_terms(
    sizes: ProductSizes,
    candidates: Candidates,
    sm_count: float,
) -> Array:
    """Return what each candidate would do with each product, ``(term, row, candidate)``.

    The first term is the log of a rough cost: cycles of compute or loads, whichever is more. Others
    are padding, waves and how full they are, shapes alike, and what a split of K would be worth.
    Terms may be off by what all candidates of a product share, which changes no choice.
    """
    _, tile_n, tile_m, split = candidates
    _, m, n, k = (size[:, np.newaxis] for size in sizes)
    tiled = _tile_products(sizes, candidates, sm_count)
    whole_waves = np.ceil(tiled.waves)
    log_waves = np.log(tiled.waves)
    log_tiles = np.log(tiled.tiles)

    terms = np.empty((_TERMS, *tiled.tiles.shape))
    busy_cycles = np.maximum(tiled.compute_cycles, tiled.load_cycles)
    np.log(busy_cycles + split * TILES.reduce_cycles, out=terms[0])
    np.log(tiled.covered_n, out=terms[1])
    np.log(tiled.covered_m, out=terms[2])
    np.subtract(np.log(whole_waves), log_waves, out=terms[3])
    np.maximum(log_waves, np.zeros(len(tile_n)), out=terms[5])
    np.subtract(terms[5], log_waves, out=terms[4])
    np.log(tiled.compute_cycles, out=terms[6])
    np.add(log_tiles, np.log(tile_n + tile_m), out=terms[7])
    np.abs(_log_side_ratio(m, n) + np.log(tile_m / tile_n), out=terms[8])
    terms[9] = tiled.covered_n == n
    terms[10] = tiled.covered_m == m
    terms[11] = whole_waves <= 1
    terms[12] = whole_waves <= 2
    terms[13] = np.maximum(m, _LEAST_TILE) <= tile_m
    np.multiply(split, np.log(k), out=terms[14])
    np.multiply(split, log_tiles, out=terms[15])
    terms[16] = split & (tiled.tiles <= sm_count / 2.0)
    return terms


def _tile_products(
    sizes: ProductSizes,
    candidates: Candidates,
    sm_count: float,
) -> _TiledProducts:
    """Cut each product into the tiles of each candidate, and count waves and cycles."""
    kind, tile_n, tile_m, split = candidates
    b, m, n, k = (size[:, np.newaxis] for size in sizes)

    # What a tile costs, ``(candidate,)``
    area = tile_n * tile_m
    slots = tiles_per_sm(kind == "hopper", area)
    fed_flop_per_cycle = _FLOP_PER_CYCLE * feed_share(area / TILES.standard_side**2)
    step_cycles = np.maximum(2.0 * area * CHOICE.step_k / fed_flop_per_cycle, TILES.step_cycles)

    # Tiles and waves, ``(row, candidate)``
    across = np.ceil(n / tile_n)
    down = np.ceil(m / tile_m)
    tiles = b * across * down
    parts = np.maximum(np.floor(split * sm_count * slots / tiles), 1.0 + split)
    waves = tiles * parts / (sm_count * slots)
    return _TiledProducts(
        covered_n=across * tile_n,
        covered_m=down * tile_m,
        tiles=tiles,
        waves=waves,
        compute_cycles=np.ceil(waves) * np.ceil(k / CHOICE.step_k / parts) * (slots * step_cycles),
        load_cycles=tiles * ((tile_n + tile_m) / CHOICE.loads_per_cycle) * k,
    )


def _log_side_ratio(m: Array, n: Array) -> Array:
    """Return the log of outputs over tokens, each as long as a ratio tells anything."""
    longest = np.log(CHOICE.longest_side)
    return np.asarray(np.minimum(np.log(n), longest) - np.minimum(np.log(m), longest))


_VOTE_ARRAYS = ("feature", "threshold", "left", "right", "candidate")


@dataclass(frozen=True, eq=False, repr=False)
class TreeVotes:
    """Decision trees of which each votes for a candidate; arrays ``(tree, node)``."""

    feature: NodeIndex  # column a node looks at
    threshold: Array  # go left at or below
    left: NodeIndex
    right: NodeIndex
    candidate: NodeIndex  # a leaf's vote

    def __post_init__(self) -> None:
        shapes = {getattr(self, name).shape for name in _VOTE_ARRAYS}
        if len(shapes) != 1 or self.feature.ndim != 2:
            raise bad_value("kernel choice", "votes of one shape (tree, node)", shapes)

    def share(
        self,
        columns: Array,
        candidates: int,
    ) -> Array:
        """Return the share of the trees that vote for each candidate, ``(row, candidate)``."""
        leaf = self._walk.leaves(columns)
        first_cell = np.arange(0, len(columns) * candidates, candidates)[:, np.newaxis]
        vote = first_cell + self.candidate.ravel().take(leaf)
        count = np.bincount(vote.ravel(), minlength=len(columns) * candidates)
        return np.asarray(count.reshape(len(columns), candidates) / len(self.feature))

    @cached_property
    def _walk(self) -> TreeWalk:
        return TreeWalk.from_arrays(self.feature, self.threshold, self.left, self.right)

    def to_arrays(self, prefix: str) -> dict[str, Any]:
        """Return the arrays to save, under names that begin with ``prefix``."""
        return {f"{prefix}.{name}": getattr(self, name) for name in _VOTE_ARRAYS}

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Any],
        prefix: str,
        columns: int,
        candidates: int,
    ) -> TreeVotes | None:
        """Build the trees from what ``to_arrays`` saved; None where there is nothing."""
        if f"{prefix}.feature" not in arrays:
            return None
        saved = {name: np.asarray(arrays[f"{prefix}.{name}"]) for name in _VOTE_ARRAYS}
        nodes = saved["left"].shape[-1]
        ends = {
            "feature": columns,
            "candidate": candidates,
            "left": nodes,
            "right": nodes,
        }
        indices: dict[str, NodeIndex] = {}
        for name, end in ends.items():
            if (saved[name] < 0).any() or (saved[name] >= end).any():
                expected = "votes of nodes, columns and candidates that exist"
                raise bad_value("kernel choice", expected, "others")
            indices[name] = saved[name].astype(np.int32)
        return cls(threshold=np.asarray(saved["threshold"], dtype=np.float64), **indices)


@dataclass(frozen=True, eq=False, repr=False)
class KernelChooser:
    """Candidates of products that a library chooses for alike, and the weights that choose."""

    kind: npt.NDArray[np.str_]  # (candidate,)
    tile_n: Array
    tile_m: Array
    split: Mask
    weight: Array  # (term,) of what a candidate would do
    own: Array  # (candidate, 1 + shape) of the shape, a constant first
    names: tuple[str, ...]  # columns of the shape
    mean: Array  # (shape,)
    spread: Array  # (shape,)
    votes: TreeVotes | None = None

    def __post_init__(self) -> None:
        unknown_kinds = sorted(set(self.kind.tolist()) - set(KERNEL_KINDS))
        if unknown_kinds:
            expected = f"kinds among {', '.join(KERNEL_KINDS)}"
            raise bad_value("kernel choice", expected, ", ".join(unknown_kinds), "Fit again.")
        count = len(self.kind)
        width = 1 + len(self.names)
        shapes = {self.tile_n.shape, self.tile_m.shape, self.split.shape}
        if shapes != {(count,)} or self.own.shape != (count, width):
            expected = f"{count} candidates of {width} weights"
            raise bad_value("kernel choice", expected, self.own.shape)
        are_finite = np.isfinite(self.own).all() and np.isfinite(self.weight).all()
        if not (are_finite and (self.spread > 0).all()):
            raise bad_value("kernel choice", "finite weights", "others")

    @cached_property
    def candidates(self) -> Candidates:
        """The kernels without their weights."""
        return Candidates(self.kind, self.tile_n, self.tile_m, self.split)

    @cached_property
    def alike(self) -> bool:
        """Whether all candidates are of one kind."""
        return len(set(self.kind.tolist())) == 1

    def score(
        self,
        sizes: ProductSizes,
        shape: Array,
        sm_count: float,
    ) -> Array:
        """Return the log of likelihood of each candidate for each product, ``(row, candidate)``."""
        terms = candidate_terms(sizes, self.candidates, sm_count)
        by_shape = self.own[:, 0] + ((shape - self.mean) / self.spread) @ self.own[:, 1:].T
        # Row by row: libraries give a product of all rows to threads, which on busy cores wait for
        # one another.
        return np.asarray(by_shape + np.matmul(self.weight, terms.transpose(1, 0, 2)))

    def picks(
        self,
        best: npt.NDArray[np.intp],
        share: Array,
    ) -> KernelPicks:
        """Return candidates ``(row, pick)`` with how likely each is."""
        columns = self._table.take(best, axis=1)
        kind = self._kind_index.take(best)
        return KernelPicks(
            kind,
            columns[0],
            columns[1],
            columns[2],
            share,
            columns[3:],
        )

    @cached_property
    def _kind_index(self) -> npt.NDArray[np.int64]:
        return np.array([KERNEL_KINDS.index(str(kind)) for kind in self.kind], dtype=np.int64)

    @cached_property
    def _table(self) -> Array:
        """Sides, parts of K and constants of the candidates."""
        constants = tile_constants(self._kind_index, self.tile_n, self.tile_m)
        return np.array([self.tile_n, self.tile_m, np.where(self.split, 0.0, 1.0), *constants])


KernelChoice = Mapping[str, KernelChooser]  # by the name of the chooser, such as "half-unaligned"


def impossible_candidates(
    kind: npt.NDArray[np.str_],
    m: Array,
    shape: Array,
    names: Sequence[str],
) -> Mask:
    """Return the candidates that no library takes for a product, ``(row, candidate)``.

    These are kernels without a tile where their time, which goes with the rows, passes that of
    tiles: for many rows, for more than a few rows of a large product, and in tf32 for more than one
    (none of 62 such rows ran one). And Hopper kernels for a filter of more taps than a mask of 32
    bits holds (none of 130 such convolutions in the H200 database ran one).
    """
    columns = dict(zip(names, shape.T, strict=True))
    is_slow = m > CHOICE.most_vector_rows
    if {"b", "n", "k", "dtype"} <= columns.keys():
        work = m * 2.0 ** (columns["b"] + columns["n"] + columns["k"])
        is_large = (m > CHOICE.few_vector_rows) & (work > CHOICE.little_vector_work)
        is_tf32 = columns["dtype"] == TF32_CODE
        is_slow = is_slow | is_large | ((m > 1.0) & is_tf32)
    impossible = (kind == "vector") & is_slow[:, np.newaxis]
    if "log_rs" in columns:
        has_many_taps = columns["log_rs"] > CHOICE.most_log_taps
        impossible |= (kind == "hopper") & has_many_taps[:, np.newaxis]
    return np.asarray(impossible)


def pick_kernels(
    choice: KernelChoice | None,
    choosers: Sequence[str],
    kernels_run: Sequence[KernelsRun],
    sizes: ProductSizes,
    shape: Mapping[str, Array],
    fallback: Callable[[], Sequence[KernelLabel]],
    sm_count: float,
) -> KernelPicks:
    """Return the kernels of each product.

    They are those that ran where names are known, else as fitted, else the fallback.
    """
    labels = _labels_run(kernels_run)
    chooser_names, place = index_distinct(choosers)
    if labels:
        place = place.copy()
        place[list(labels)] = -1

    parts: list[tuple[RowIndex, KernelPicks]] = []
    rows_without_choice: list[int] = []
    for which, name in enumerate(chooser_names):
        rows = np.flatnonzero(place == which)
        chooser = choice.get(name) if choice is not None else None
        if chooser is None:
            rows_without_choice += rows.tolist()
        else:
            columns = np.array([*sizes, *(shape[column] for column in chooser.names)])
            parts += _pick_in_blocks(rows, chooser, columns, sm_count)

    if rows_without_choice:
        usual_labels = fallback()
        labels |= {row: usual_labels[row] for row in rows_without_choice}
    if labels:
        parts.append((np.array(list(labels)), picks_of_labels(labels, kernels_run)))
    return join_picks(parts, len(place))


def _labels_run(kernels_run: Sequence[KernelsRun]) -> dict[int, KernelLabel]:
    """Return the kernels of rows that name them, by row."""
    labels: dict[int, KernelLabel] = {}
    if kernels_run.count(NOT_RUN) == len(kernels_run):
        return labels
    for row, (names, _) in enumerate(kernels_run):
        label = find_label(names) if names else None
        if label is not None:
            labels[row] = label
    return labels


def _pick_in_blocks(
    rows: RowIndex,
    chooser: KernelChooser,
    columns: Array,
    sm_count: float,
) -> list[tuple[RowIndex, KernelPicks]]:
    """Return some rows and their picks, block by block.

    Blocks are small where the likeliest candidate is all that counts. Where shares are blended,
    rounding, which goes with the size of a block, would show.
    """
    most = _CACHED_PRODUCTS if chooser.alike else _MOST_PRODUCTS
    return map_blocks(
        partial(
            _pick_fitted,
            rows,
            chooser,
            columns,
            sm_count,
        ),
        len(rows),
        most,
    )


def _pick_fitted(
    rows: RowIndex,
    chooser: KernelChooser,
    columns: Array,
    sm_count: float,
    block: slice,
) -> tuple[RowIndex, KernelPicks]:
    """Return a block of the rows and their picks.

    ``columns`` of all operators are b, m, n, k and the shape.
    """
    rows = rows[block]
    columns = columns.take(rows, axis=1)
    b, m, n, k = columns[:4]
    shape = columns[4:].T
    score = chooser.score((b, m, n, k), shape, sm_count)
    if chooser.votes is not None:
        score = _mix_votes(score, chooser.votes.share(shape, score.shape[1]))
    impossible = impossible_candidates(chooser.kind, m, shape, chooser.names)
    score = np.where(impossible, -np.inf, score)

    # Hopper's kernels differ in their tiles alone, so the likeliest is taken as it is.
    if chooser.alike:
        best = score.argmax(axis=1)[:, np.newaxis]
        return rows, chooser.picks(best, np.ones((len(rows), 1)))

    # Where kinds differ by factors of time, the less likely ones count as well.
    best = np.argsort(-score, axis=1, kind="stable")[:, :_MOST_PICKS]
    best_score = np.take_along_axis(score, best, axis=1)
    share = np.exp(CHOICE.sharpness * (best_score - best_score[:, :1]))
    return rows, chooser.picks(best, share / share.sum(axis=1, keepdims=True))


def _mix_votes(score: Array, votes: Array) -> Array:
    """Return the log of shares that are mixed of scores and votes."""
    share = np.exp(score - score.max(axis=1, keepdims=True))
    share *= (1.0 - CHOICE.vote_share) / share.sum(axis=1, keepdims=True)
    share += CHOICE.vote_share * votes
    return np.asarray(np.log(np.maximum(share, 1e-12)))


def choice_to_arrays(choice: KernelChoice, prefix: str) -> dict[str, Any]:
    """Return the arrays to save with a bundle."""
    arrays: dict[str, Any] = {}
    for name, chooser in choice.items():
        for item in _CHOOSER_ARRAYS:
            values = getattr(chooser, item)
            arrays[f"{prefix}.{name}.{item}"] = np.array(values) if item == "names" else values
        if chooser.votes is not None:
            arrays |= chooser.votes.to_arrays(f"{prefix}.{name}.votes")
    return arrays


_CHOOSER_ARRAYS = tuple(item.name for item in fields(KernelChooser) if item.name != "votes")


def choice_from_arrays(arrays: Mapping[str, Any], prefix: str) -> dict[str, KernelChooser]:
    """Build a choice from what ``choice_to_arrays`` saved; empty where there is none."""
    choice = {}
    for key in arrays:
        if key.startswith(f"{prefix}.") and key.endswith(".weight"):
            name = key.split(".")[1]
            choice[name] = _chooser_from_arrays(arrays, f"{prefix}.{name}")
    return choice


def _chooser_from_arrays(arrays: Mapping[str, Any], prefix: str) -> KernelChooser:
    saved = {item: np.asarray(arrays[f"{prefix}.{item}"]) for item in _CHOOSER_ARRAYS}
    names: Any = tuple(str(column) for column in saved.pop("names"))
    votes = TreeVotes.from_arrays(arrays, f"{prefix}.votes", len(names), len(saved["kind"]))
    return KernelChooser(
        **saved,
        names=names,
        votes=votes,
    )
