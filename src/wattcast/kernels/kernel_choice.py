"""Which kernels a library may run for a product, and how likely each is.

Libraries choose kernels by rules nobody publishes. A chooser holds the candidates of products that
a library chooses for alike (say, half precision with aligned rows) and scores them: by what each
would do with the product (tiles, waves, padding, a rough cost) and by the shape itself. Where
decision trees were fitted too, their votes are mixed in. A kernel is described by its kind (how it
loads and which generation it was written for), the sides of its tile and whether it splits K."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from wattcast.core import bad_value
from wattcast.core.arrays import Array, CodedColumn, Mask, index_distinct, map_blocks
from wattcast.core.tree_ensemble import NodeIndex, TreeWalk
from wattcast.kernels.kernel_names import ParsedKernelName, parse_kernel_name

KERNEL_KINDS = ("hopper", "ampere", "turing", "wmma", "direct", "simt", "plain", "vector")
HOPPER_KIND = KERNEL_KINDS.index("hopper")
VECTOR_KIND = KERNEL_KINDS.index("vector")
_Rows = npt.NDArray[np.intp]
STANDARD_SIDE = 128.0  # of a tile that feeds the tensor cores of an SM
_BY_KIND = np.array(
    [
        # bytes of K that a block takes at a time
        [128.0, 64.0, 64.0, 128.0, 32.0, 32.0, 32.0, 0.0],
        # blocks on an SM that a split of K aims at; from grids
        [1.0, 1.0, 2.5, 2.5, 2.5, 2.0, 2.0, 2.5],
        # parts of a split K at least; 0: by its length
        [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        # on CUDA cores, whatever the format
        [float(kind in ("simt", "plain", "vector")) for kind in KERNEL_KINDS],
        # how the share of the pipe's rate that a tile feeds falls with its area: (128²/area)^x;
        # measured on an H200
        [0.0, 0.38, 0.38, 0.38, 0.38, 0.3, 0.3, 0.0],
        # how often a loaded byte crosses shared memory over what a Hopper kernel of the same tile
        # does (warps before Hopper load operands each for themselves; from profiler counters)
        [1.0, 2.2, 2.2, 2.2, 2.2, 3.5, 3.5, 1.0],
    ]
)
# Blocks of kernels before Hopper that registers and shared memory of an SM hold, by elements of
# their tile.
_AREAS = np.array([2048.0, 4096.0, 8192.0, 32768.0])
_HELD = np.array([12.0, 9.0, 4.0, 2.0, 1.0])
_HELD_VECTORS = 16.0
_TILE_CONSTANTS = 7


class KernelLabel(NamedTuple):
    """A kernel as the choice sees it."""

    kind: str  # one of KERNEL_KINDS
    tile_n: int  # along outputs (channels of a convolution)
    tile_m: int  # along tokens (pixels)
    split: bool  # of K over blocks, followed by a reduction

    def __str__(self) -> str:
        return f"{self.kind} {self.tile_n}x{self.tile_m}{' split' if self.split else ''}"


VECTOR_LABEL = KernelLabel("vector", 64, 8, False)  # kernels without a tile, for a few rows
KernelsRun = tuple[
    Sequence[str], int
]  # names of the kernels that ran, none: unknown; parts of K, 0: as names say
NOT_RUN: KernelsRun = ((), 0)


@dataclass(frozen=True)
class KernelPicks:
    """Kernels each product may run and how likely each is, ``(row, pick)``; the likeliest first."""

    kind: npt.NDArray[np.int64]  # position in KERNEL_KINDS
    tile_n: Array
    tile_m: Array
    split: Array  # parts of K: 1 none, 0 as many as fill the chip
    share: Array  # sums to 1
    constants: Array  # (constant, row, pick), as ``tile_constants`` has them

    @cached_property
    def sure(self) -> Mask:
        """Rows of which one kernel is certain, ``(row,)``."""
        return np.asarray(self.share[:, 0] == 1.0)

    def label(self, row: int) -> KernelLabel:
        """Return the likeliest kernel of a row."""
        kind = KERNEL_KINDS[int(self.kind[row, 0])]
        return KernelLabel(
            kind,
            int(self.tile_n[row, 0]),
            int(self.tile_m[row, 0]),
            bool(self.split[row, 0] != 1.0),
        )

    def of_kind(self, name: str) -> Array:
        """Return how likely each row runs a kind of kernel, ``(row,)``."""
        return np.asarray((self.share * (self.kind == KERNEL_KINDS.index(name))).sum(axis=1))


def tile_constants(kind: npt.NDArray[np.int64], tile_n: Array, tile_m: Array) -> Array:
    """Return what follows from a kind of kernel and the sides of its tile, whatever the product,
    ``(7, ...)``.

    The rows are the first four of ``_BY_KIND``, the tiles an SM holds, arithmetic over that of a
    tile that feeds the pipe, and bytes through shared memory over those loaded."""
    step_byte, blocks, fewest, cuda, feed, crossings = _BY_KIND[:, kind]
    area = tile_n * tile_m
    slots = np.where(kind == VECTOR_KIND, _HELD_VECTORS, _tiles_per_sm(kind == HOPPER_KIND, area))
    # written once; each m64 warpgroup then reads its own rows and the columns of the tile, most of
    # them
    shared = (1.0 + 0.6 * np.maximum(tile_n, tile_m) / 64.0) * crossings
    return np.array(
        [step_byte, blocks, fewest, cuda, slots, (STANDARD_SIDE**2 / area) ** feed, shared]
    )


def _tiles_per_sm(hopper: Mask, area: Array) -> Array:
    """Return the tiles an SM works on at a time: one of Hopper's, which fill it; more of smaller
    ones before.
    """
    return np.where(hopper, 1.0, _HELD[np.searchsorted(_AREAS, area, side="right")])


def find_label(names: Sequence[str]) -> KernelLabel | None:
    """Return the kernel of an operator's product among the names of all its kernels; None where
    there is none.

    cuBLAS and CUTLASS name the side along outputs first, the xmma kernels and convolutions the
    other.

    >>> find_label(["nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT"])
    KernelLabel(kind='hopper', tile_n=64, tile_m=8, split=True)
    """
    at = find_product_kernel(names)
    if at is None:
        return None
    parsed = [parse_kernel_name(name) for name in names]
    main = parsed[at]
    kind = _kernel_kind(main)
    if kind == "vector":
        return VECTOR_LABEL
    if kind == "plain":  # a convolution on CUDA cores that takes the image as it lies
        sides = _PLAIN_SIDES.search(main.name)
        m, n = (2 ** int(sides[1]), 2 ** int(sides[2])) if sides else (32, 32)
        return KernelLabel("plain", n, m, False)
    first = int(main.tile_m or 0)
    second = int(main.tile_n or 0)
    tokens_first = "xmma" in main.name or main.family == "convolution"
    n, m = (second, first) if tokens_first else (first, second)
    split = any(
        name.split_k or name.family == "splitk_reduce" or "splitK" in name.name for name in parsed
    )
    return KernelLabel(kind, n, m, split)


# cuDNN's convolutions on CUDA cores say the logarithms of their sides: ..._sgemm<float, float,
# 1024, 5, 5, ...>
_PLAIN_SIDES = re.compile(r"convolve\w*<(?:[^<>,]+, )+?(?:128|256|512|1024), (\d), (\d),")


def find_product_kernel(names: Sequence[str]) -> int | None:
    """Return the place of the kernel of the product itself among the names of an operator's
    kernels.
    """
    products = ("gemm", "gemv", "convolution")
    return next(
        (i for i, name in enumerate(names) if parse_kernel_name(name).family in products), None
    )


def _kernel_kind(name: ParsedKernelName) -> str:
    """Return the kind of a product's kernel: by the generation it was written for and how it loads.

    Direct ones load operands past shared memory, an element at a time, and are slow by factors.
    """
    if not name.tiled:
        return "plain" if name.family == "convolution" else "vector"
    if name.architecture == "sm90":
        return "hopper"
    if "wo_smem" in name.name:
        return "direct"
    if "wmma" in name.name:
        return "wmma"
    if any(word in name.name for word in ("simt", "ffma", "sgemm")):
        return "simt"
    return "turing" if name.architecture == "sm75" else "ampere"


STEP_K = 64.0  # elements of K in a step
_LOADS = 5500.0  # elements of both operands that the chip loads in a cycle
_SPLIT_CYCLES = 1500.0  # of a split of K: another pass through L2
_LONGEST = 4096.0  # side of a product beyond which its ratio to the other tells no more


def candidate_terms(
    b: Array,
    m: Array,
    n: Array,
    k: Array,
    kind: Any,
    tile_n: Array,
    tile_m: Array,
    split: Mask,
    sms: float,
) -> Array:
    """Return what each candidate would do with each product, ``(term, row, candidate)``; sizes are
    ``(row,)``.

    The first term is the log of a rough cost: cycles of compute or loads, whichever is more. Others
    are padding, waves and how full they are, shapes alike, and what a split of K would be worth.
    Terms may be off by what all candidates of a product share, which changes no choice."""
    area = tile_n * tile_m
    both = tile_n + tile_m
    feed = np.minimum(1.0, 0.12 + 0.88 * np.sqrt(area / STANDARD_SIDE**2))
    held = _tiles_per_sm(kind == "hopper", area)
    step_cycles = np.maximum(2.0 * area * STEP_K / (4096.0 * feed), 60.0)
    b, m, n, k = (size[:, np.newaxis] for size in (b, m, n, k))
    across = np.ceil(n / tile_n)
    down = np.ceil(m / tile_m)
    tiles = b * across * down
    parts = np.maximum(np.floor(split * sms * held / tiles), 1.0 + split)
    full = tiles * parts / (sms * held)
    waves = np.ceil(full)
    compute = waves * np.ceil(k / STEP_K / parts) * (held * step_cycles)
    loads = tiles * (both / _LOADS) * k
    log_full = np.log(full)
    log_tiles = np.log(tiles)
    longest = np.log(_LONGEST)
    sides = np.minimum(np.log(n), longest) - np.minimum(np.log(m), longest)
    found = np.empty((17, *tiles.shape))
    np.log(np.maximum(compute, loads) + split * _SPLIT_CYCLES, out=found[0])
    np.log(across * tile_n, out=found[1])
    np.log(down * tile_m, out=found[2])
    np.subtract(np.log(waves), log_full, out=found[3])
    np.maximum(log_full, np.zeros(len(area)), out=found[5])
    np.subtract(found[5], log_full, out=found[4])
    np.log(compute, out=found[6])
    np.add(log_tiles, np.log(both), out=found[7])
    np.abs(sides + np.log(tile_m / tile_n), out=found[8])
    found[9] = across * tile_n == n
    found[10] = down * tile_m == m
    found[11] = waves <= 1
    found[12] = waves <= 2
    found[13] = np.maximum(m, 8.0) <= tile_m
    np.multiply(split, np.log(k), out=found[14])
    np.multiply(split, log_tiles, out=found[15])
    found[16] = split & (tiles <= sms / 2.0)
    return found


_VOTE_ARRAYS = ("feature", "threshold", "left", "right", "candidate")


@dataclass(frozen=True)
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

    def share(self, columns: Array, candidates: int) -> Array:
        """Return the share of the trees that vote for each candidate, ``(row, candidate)``."""
        leaf = self._walk.leaves(columns)
        first = np.arange(0, len(columns) * candidates, candidates)[:, np.newaxis]
        vote = first + self.candidate.ravel().take(leaf)
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
        cls, arrays: Mapping[str, Any], prefix: str, columns: int, candidates: int
    ) -> TreeVotes | None:
        """Build the trees from what ``to_arrays`` saved; None where there is nothing."""
        if f"{prefix}.feature" not in arrays:
            return None
        given = {name: np.asarray(arrays[f"{prefix}.{name}"]) for name in _VOTE_ARRAYS}
        nodes = given["left"].shape[-1]
        most = {"feature": columns, "candidate": candidates, "left": nodes, "right": nodes}
        if any((given[name] < 0).any() or (given[name] >= end).any() for name, end in most.items()):
            raise bad_value(
                "kernel choice", "votes of nodes, columns and candidates that exist", "others"
            )
        whole: dict[str, npt.NDArray[np.int32]] = {
            name: given[name].astype(np.int32) for name in most
        }
        threshold = np.asarray(given["threshold"], dtype=np.float64)
        return cls(threshold=threshold, **whole)


@dataclass(frozen=True)
class KernelChooser:
    """Candidates of products that a library chooses for alike, and the weights that choose among
    them.
    """

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
        count = len(self.kind)
        width = 1 + len(self.names)
        shapes = {self.tile_n.shape, self.tile_m.shape, self.split.shape}
        unknown = sorted(set(self.kind.tolist()) - set(KERNEL_KINDS))
        if unknown:
            raise bad_value(
                "kernel choice",
                f"kinds among {', '.join(KERNEL_KINDS)}",
                ", ".join(unknown),
                "Fit again.",
            )
        if shapes != {(count,)} or self.own.shape != (count, width):
            raise bad_value(
                "kernel choice", f"{count} candidates of {width} weights", self.own.shape
            )
        if not (
            np.isfinite(self.own).all()
            and np.isfinite(self.weight).all()
            and (self.spread > 0).all()
        ):
            raise bad_value("kernel choice", "finite weights", "others")

    @cached_property
    def alike(self) -> bool:
        """Whether all candidates are of one kind."""
        return len(set(self.kind.tolist())) == 1

    def score(self, b: Array, m: Array, n: Array, k: Array, shape: Array, sms: float) -> Array:
        """Return the score of every candidate for every product, ``(row, candidate)``; it is a log
        of likelihood.
        """
        terms = candidate_terms(b, m, n, k, self.kind, self.tile_n, self.tile_m, self.split, sms)
        own = self.own[:, 0] + ((shape - self.mean) / self.spread) @ self.own[:, 1:].T
        # row by row: libraries give a product of all rows to threads, which on busy cores wait for
        # one another
        return np.asarray(own + np.matmul(self.weight, terms.transpose(1, 0, 2)))

    def picks(self, best: npt.NDArray[np.intp], share: Array) -> KernelPicks:
        """Return candidates ``(row, pick)`` with how likely each is."""
        found = self._table.take(best, axis=1)
        return KernelPicks(
            self._kind_index.take(best), found[0], found[1], found[2], share, found[3:]
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
# rows for which a kernel without a tile is taken: 61 of the 62 in the H200 database have fewer
_MOST_VECTORS = 32.0
# rows beyond which it is taken for little work alone, in multiplications
_FEW_VECTORS = 8.0
_VECTOR_WORK = 4e7
TF32_CODE = 3.0  # of the format, among the columns that choosers see
_LOG_TAPS = 5.0  # log2 of the taps of a filter that Hopper's kernels walk over
_VOTES = 0.6  # of the trees against the score, where there are any: chosen on held-out folds
# products whose candidates' terms stay in a cache, and in memory
_TOGETHER = 128
_MOST_TOGETHER = 8192
_MOST_PICKS = 8
_SHARPEN = (
    2.0  # how much more than its likelihood says the likeliest kernel counts, where kinds differ
)


def impossible_candidates(
    kind: npt.NDArray[np.str_], m: Array, shape: Array, names: Sequence[str]
) -> Mask:
    """Return the candidates that no library takes for a product, ``(row, candidate)``.

    These are kernels without a tile where their time, which goes with the rows, passes that of
    tiles: for many rows, for more than a few rows of a large product, and in tf32 for more than one
    (none of 62 such rows ran one). And Hopper kernels for a filter of more taps than a mask of 32
    bits holds (none of 130 such convolutions in the H200 database ran one)."""
    columns = dict(zip(names, shape.T, strict=True))
    slow = m > _MOST_VECTORS
    if {"b", "n", "k", "dtype"} <= columns.keys():
        work = m * 2.0 ** (columns["b"] + columns["n"] + columns["k"])
        slow = (
            slow
            | ((m > _FEW_VECTORS) & (work > _VECTOR_WORK))
            | ((m > 1.0) & (columns["dtype"] == TF32_CODE))
        )
    beyond = (kind == "vector") & slow[:, np.newaxis]
    if "log_rs" in columns:
        beyond |= (kind == "hopper") & (columns["log_rs"][:, np.newaxis] > _LOG_TAPS)
    return np.asarray(beyond)


def pick_kernels(
    choice: KernelChoice | None,
    choosers: Sequence[str],
    ran: Sequence[KernelsRun],
    sizes: tuple[Array, Array, Array, Array],
    shape: Mapping[str, Array],
    fallback: Callable[[], Sequence[KernelLabel]],
    sms: float,
) -> KernelPicks:
    """Return the kernels of each product: those that ran where names are given, else as fitted,
    else the fallback.
    """
    named = (
        [i for i, (names, _) in enumerate(ran) if names] if ran.count(NOT_RUN) < len(ran) else []
    )
    labels = {i: label for i in named if (label := find_label(ran[i][0])) is not None}
    choosers, place = index_distinct(choosers)
    if labels:
        place = place.copy()
        place[list(labels)] = -1
    found: list[tuple[_Rows, KernelPicks]] = []
    rest: list[int] = []
    for which, name in enumerate(choosers):
        rows = np.flatnonzero(place == which)
        chooser = choice.get(name) if choice is not None else None
        if chooser is None:
            rest += rows.tolist()
        else:
            columns = np.array([*sizes, *(shape[column] for column in chooser.names)])
            most = (
                _TOGETHER if chooser.alike else _MOST_TOGETHER
            )  # where shares are blended, rounding would show
            found += map_blocks(partial(_pick_fitted, rows, chooser, columns, sms), len(rows), most)
    usual = fallback() if rest else ()
    labels |= {i: usual[i] for i in rest}
    if labels:
        described = [
            (
                KERNEL_KINDS.index(label.kind),
                label.tile_n,
                label.tile_m,
                ran[i][1] or (0 if label.split else 1),
                1,
            )
            for i, label in labels.items()
        ]
        of_row, tile_n, tile_m, split, share = np.array(described, dtype=np.float64).T[
            :, :, np.newaxis
        ]
        kind = of_row.astype(np.int64)
        picks = KernelPicks(
            kind, tile_n, tile_m, split, share, tile_constants(kind, tile_n, tile_m)
        )
        found.append((np.array(list(labels)), picks))
    return _join_picks(found, len(place))


def _pick_fitted(
    rows: _Rows, chooser: KernelChooser, columns: Array, sms: float, block: slice
) -> tuple[_Rows, KernelPicks]:
    """Return a block of the rows and their picks; ``columns`` of all operators are b, m, n, k and
    the shape.
    """
    rows = rows[block]
    columns = columns.take(rows, axis=1)
    (b, m, n, k), columns = columns[:4], columns[4:].T
    score = chooser.score(b, m, n, k, columns, sms)
    if chooser.votes is not None:  # mixed as shares, then logs of shares
        share = np.exp(score - score.max(axis=1, keepdims=True))
        share *= (1.0 - _VOTES) / share.sum(axis=1, keepdims=True)
        share += _VOTES * chooser.votes.share(columns, score.shape[1])
        score = np.log(np.maximum(share, 1e-12))
    score = np.where(impossible_candidates(chooser.kind, m, columns, chooser.names), -np.inf, score)
    # Hopper's kernels differ in their tiles alone, so the likeliest is taken as it is. Where kinds
    # differ by factors of time, others keep their say.
    if chooser.alike:
        return rows, chooser.picks(score.argmax(axis=1)[:, np.newaxis], np.ones((len(rows), 1)))
    best = np.argsort(-score, axis=1, kind="stable")[:, :_MOST_PICKS]
    likely = np.take_along_axis(score, best, axis=1)
    share = np.exp(_SHARPEN * (likely - likely[:, :1]))
    return rows, chooser.picks(best, share / share.sum(axis=1, keepdims=True))


def _join_picks(parts: Sequence[tuple[_Rows, KernelPicks]], count: int) -> KernelPicks:
    """Return the picks of all rows; picks that a row lacks never run. Where every row is sure, one
    pick is left.
    """
    width = max([1 if picks.sure.all() else picks.share.shape[1] for _, picks in parts], default=1)
    kind = np.zeros((count, width), np.int64)
    rest = np.ones((4 + _TILE_CONSTANTS, count, width))
    rest[3] = 0.0
    for rows, picks in parts:
        at = slice(0, min(picks.share.shape[1], width))
        kind[rows, at] = picks.kind[:, at]
        columns = [picks.tile_n, picks.tile_m, picks.split, picks.share, *picks.constants]
        rest[:, rows, at] = np.array([values[:, at] for values in columns])
    return KernelPicks(kind, rest[0], rest[1], rest[2], rest[3], rest[4:])


_Form = TypeVar("_Form", bound=Hashable)


def blend_families(
    name_of: Callable[[_Form, str], str], forms: CodedColumn[_Form], picks: KernelPicks
) -> tuple[CodedColumn[str], dict[str, Array]]:
    """Return the family of the likeliest kernel of each row, and columns ``is FAMILY`` of how
    likely each family is.

    ``name_of`` names the family of a product of some form that is run by a kind of kernel. Without
    columns every row is sure of its family."""
    names, by_kind = index_distinct(
        name_of(form, kind) for form in forms.values for kind in KERNEL_KINDS
    )
    family = by_kind[len(KERNEL_KINDS) * forms.place[:, np.newaxis] + picks.kind]  # (row, pick)
    likeliest = CodedColumn(names, family[:, 0])
    if picks.share.shape[1] == 1:
        return likeliest, {}
    at = family * len(forms) + np.arange(len(forms))[:, np.newaxis]
    shares: Array = np.bincount(at.ravel(), picks.share.ravel(), len(names) * len(forms)).astype(
        np.float64
    )
    shares = np.minimum(
        shares, 1.0
    )  # rounding must not take a certain family past a threshold of the learned trees
    columns = zip(names, shares.reshape(len(names), -1), strict=True)
    return likeliest, {f"is {name}": share for name, share in columns if share.any()}


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
    found = [
        key.split(".")[1]
        for key in arrays
        if key.startswith(f"{prefix}.") and key.endswith(".weight")
    ]
    choice = {}
    for name in found:
        of = {item: np.asarray(arrays[f"{prefix}.{name}.{item}"]) for item in _CHOOSER_ARRAYS}
        columns: Any = tuple(str(column) for column in of.pop("names"))
        votes = TreeVotes.from_arrays(
            arrays, f"{prefix}.{name}.votes", len(columns), len(of["kind"])
        )
        choice[name] = KernelChooser(**of, names=columns, votes=votes)
    return choice
