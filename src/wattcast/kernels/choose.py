"""Which kernel a library takes for a product: a fitted choice among those seen, or the one that really ran.

A candidate is a kind of kernel (:func:`kind_of`), the sides of its tile along outputs and tokens, and whether it
splits K. The choice is a conditional logit [McFadden1974]: the candidate with the highest score

    s_c = w·x_c + u_c·z,

x_c what the candidate would do with the shape (padding, waves, the cost of the plain scaffold), z the shape itself.
Where a class has them, trees vote beside it (:mod:`wattcast.kernels.votes`).
Where nothing was fitted, :mod:`wattcast.kernels.gemm` takes the tile that is fastest under the scaffold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.kernels.names import KernelName, parse_kernel_name
from wattcast.kernels.picks import Label as Label
from wattcast.kernels.picks import Picks, joined
from wattcast.kernels.score import Scorer
from wattcast.kernels.tiles import HOPPER, KINDS, VECTOR_KIND, Flags, tile_constants
from wattcast.kernels.votes import Votes

_MOST_VECTORS = 128.0  # rows for which a kernel without a tile is ever taken: 96 are the most in the H200 database
_LOG_TAPS = 5.0  # log2 of the taps of a filter that Hopper's kernels walk over
_VOTES = 0.6  # of the trees beside the logit, where a class has them: chosen on held-out folds
_TOGETHER = 64  # products whose candidates' terms stay in a cache
MOST_PICKS = 8
_SHARPEN = 2.0  # how much more than its likelihood says the likeliest kernel counts, where kinds differ
_PRODUCTS = ("gemm", "gemv", "convolution")
# cuDNN's convolutions on CUDA cores say the logarithms of their sides: ..._sgemm<float, float, 1024, 5, 5, ...>
_PLAIN = re.compile(r"convolve\w*<(?:[^<>,]+, )+?(?:128|256|512|1024), (\d), (\d),")
Ran = tuple[Sequence[str], int]  # names of the kernels that ran, none: unknown; parts of K, 0: as the names say
NOT_RUN: Ran = ((), 0)


VECTOR = Label("vector", 64, 8, False)  # kernels without a tile: a few rows


def label_of(names: Sequence[str]) -> Label | None:
    """The kernel of an operator's product among the names of all its kernels; None where there is none.

    cuBLAS and CUTLASS name the side along outputs first, the xmma kernels and convolutions the other.

    >>> label_of(["nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT"])
    Label(kind='hopper', tile_n=64, tile_m=8, split=True)
    """
    at = main_of(names)
    if at is None:
        return None
    parsed = [parse_kernel_name(name) for name in names]
    main = parsed[at]
    kind = kind_of(main)
    if kind == "vector":
        return VECTOR
    if kind == "plain":
        return _plain(main.name)
    first, second = int(main.tile_m or 0), int(main.tile_n or 0)
    tokens_first = "xmma" in main.name or main.family == "convolution"
    n, m = (second, first) if tokens_first else (first, second)
    split = any(name.split_k or name.family == "splitk_reduce" or "splitK" in name.name for name in parsed)
    return Label(kind, n, m, split)


def main_of(names: Sequence[str]) -> int | None:
    """Place of the kernel of the product itself among the names of an operator's kernels."""
    return next((i for i, name in enumerate(names) if parse_kernel_name(name).family in _PRODUCTS), None)


def _plain(name: str) -> Label:
    """A convolution on CUDA cores that takes the image as it lies; 32 by 32 where its name does not say."""
    sides = _PLAIN.search(name)
    m, n = (2 ** int(sides[1]), 2 ** int(sides[2])) if sides else (32, 32)
    return Label("plain", n, m, False)


def kind_of(name: KernelName) -> str:
    """The kind of a product's kernel: by the generation it was written for and how it loads.

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


@dataclass(frozen=True)
class Chooser:
    """Candidates of one class of products and the weights that choose among them."""

    kind: npt.NDArray[np.str_]  # (candidate,)
    tile_n: Array
    tile_m: Array
    split: Flags
    weight: Array  # (term,) of what a candidate would do
    own: Array  # (candidate, 1 + shape) of the shape, a constant first
    names: tuple[str, ...]  # columns of the shape
    mean: Array  # (shape,)
    spread: Array  # (shape,)
    votes: Votes | None = None

    def __post_init__(self) -> None:
        count, width = len(self.kind), 1 + len(self.names)
        shapes = {self.tile_n.shape, self.tile_m.shape, self.split.shape}
        strange = sorted(set(self.kind.tolist()) - set(KINDS))
        if strange:
            raise bad_value("kernel choice", f"kinds among {', '.join(KINDS)}", ", ".join(strange), "Fit again.")
        if shapes != {(count,)} or self.own.shape != (count, width):
            raise bad_value("kernel choice", f"{count} candidates of {width} weights", self.own.shape)
        if not (np.isfinite(self.own).all() and np.isfinite(self.weight).all() and (self.spread > 0).all()):
            raise bad_value("kernel choice", "finite weights", "others")

    @cached_property
    def alike(self) -> bool:
        """Whether all candidates are of one kind."""
        return len(set(self.kind.tolist())) == 1

    @cached_property
    def all_possible(self) -> bool:
        """Whether no shape bars any candidate."""
        return not ("vector" in self.kind or ("hopper" in self.kind and "log_rs" in self.names))

    @cached_property
    def kind_index(self) -> npt.NDArray[np.int64]:
        """Kinds as positions in ``KINDS``."""
        return np.array([KINDS.index(str(kind)) for kind in self.kind], dtype=np.int64)

    def score(self, b: Array, m: Array, n: Array, k: Array, shape: Array, sms: float) -> Array:
        """Score of every candidate for every product, ``(row, candidate)``, up to a constant of each row."""
        if sms not in self._scorers:
            taste = self.own[:, 1:] / self.spread
            own = np.column_stack([self.own[:, 0] - taste @ self.mean, taste])
            sides = self.tile_n, self.tile_m
            self._scorers[sms] = Scorer.by(self.kind, sides, self.split, self.weight, own, sms)
        return self._scorers[sms].scores(b, m, n, k, shape)

    @cached_property
    def _scorers(self) -> dict[float, Scorer]:
        """By the SMs of the chip; fits and bundles have one."""
        return {}

    def picks(self, best: npt.NDArray[np.intp], share: Array) -> Picks:
        """Candidates ``(row, pick)`` and how likely each is."""
        found = self._table.take(best, axis=1)
        return Picks(self.kind_index.take(best), found[0], found[1], found[2], share, found[3:])

    @cached_property
    def _table(self) -> Array:
        """Sides, parts of K and constants of the candidates."""
        constants = tile_constants(self.kind_index, self.tile_n, self.tile_m)
        return np.array([self.tile_n, self.tile_m, np.where(self.split, 0.0, 1.0), *constants])


def impossible(kind: npt.NDArray[np.str_], m: Array, shape: Array, names: Sequence[str]) -> Flags:
    """Candidates that no library takes for a product, ``(row, candidate)``.

    A kernel without a tile for many rows; a Hopper kernel for a filter of more taps than a mask of 32 bits holds
    (none of 130 such convolutions in the H200 database ran one).
    """
    return _barred(kind == "vector", kind == "hopper", m, shape, names)


def _barred(vector: Flags, hopper: Flags, m: Array, shape: Array, names: Sequence[str]) -> Flags:
    beyond = vector & (m[:, np.newaxis] > _MOST_VECTORS)
    if "log_rs" in names:
        beyond |= hopper & (shape[:, [names.index("log_rs")]] > _LOG_TAPS)
    return np.asarray(beyond)


def _settled(score: Array, chooser: Chooser, m: Array, shape: Array) -> Array:
    """Scores with the votes of trees mixed in, as logs of shares, and without what cannot be."""
    if chooser.votes is not None:
        share = np.exp(score - score.max(axis=1, keepdims=True))
        share *= (1.0 - _VOTES) / share.sum(axis=1, keepdims=True)
        share += _VOTES * chooser.votes.share(shape, score.shape[1])
        score = np.log(np.maximum(share, 1e-12, out=share), out=share)
    if chooser.all_possible:
        return score
    kind = chooser.kind_index
    return np.where(_barred(kind == VECTOR_KIND, kind == HOPPER, m, shape, chooser.names), -np.inf, score)


Choice = Mapping[str, Chooser]  # by class of products


def pick(
    choice: Choice | None,
    classes: Sequence[str],
    ran: Sequence[Ran],
    sizes: tuple[Array, Array, Array, Array],
    shape: Mapping[str, Array],
    fallback: Callable[[], Sequence[Label]],
    sms: float,
) -> Picks:
    """The kernels of each product: the one that ran where names are given, else as fitted, else the fallback."""
    given = [label_of(names) if names else None for names, _ in ran]
    found, rest = [], []
    for name, rows in _by_class(classes, given).items():
        chooser = choice.get(name) if choice is not None else None
        if chooser is None:
            rest += rows
            continue
        most = _TOGETHER if chooser.alike else len(rows)  # where shares are blended, rounding would show
        for start in range(0, len(rows), most):
            some = rows[start : start + most]
            found.append((some, _fitted(some, chooser, sizes, shape, sms)))
    usual = fallback() if rest else ()
    for i in rest:
        given[i] = usual[i]
    sure = [i for i, label in enumerate(given) if label is not None]
    if sure:
        found.append((sure, _sure([(label, ran[i][1]) for i, label in enumerate(given) if label is not None])))
    return joined(found, len(classes))


def _by_class(classes: Sequence[str], given: Sequence[Label | None]) -> dict[str, list[int]]:
    """Rows of each class that have no kernel yet."""
    rows: dict[str, list[int]] = {}
    for i, name in enumerate(classes):
        if given[i] is None:
            rows.setdefault(name, []).append(i)
    return rows


def _fitted(
    rows: list[int], chooser: Chooser, sizes: tuple[Array, ...], shape: Mapping[str, Array], sms: float
) -> Picks:
    columns = np.array([*sizes, *(shape[column] for column in chooser.names)])
    if len(rows) < columns.shape[1]:
        columns = columns.take(rows, axis=1)
    (b, m, n, k), columns = columns[:4], columns[4:].T
    score = _settled(chooser.score(b, m, n, k, columns, sms), chooser, m, columns)
    # Hopper's kernels differ in their tiles alone: the likeliest as it is. Where kinds differ by factors of time,
    # others keep their say.
    if chooser.alike:
        return chooser.picks(score.argmax(axis=1)[:, np.newaxis], np.ones((len(rows), 1)))
    best = np.argsort(-score, axis=1, kind="stable")[:, :MOST_PICKS]
    likely = score[np.arange(len(rows))[:, np.newaxis], best]
    share = np.exp(_SHARPEN * (likely - likely[:, :1]))
    return chooser.picks(best, share / share.sum(axis=1, keepdims=True))


def _sure(labels: Sequence[tuple[Label, int]]) -> Picks:
    """Kernels that are known, with the parts of K each made (0: as its label says)."""
    rows = [
        (KINDS.index(label.kind), label.tile_n, label.tile_m, parts or (0 if label.split else 1), 1)
        for label, parts in labels
    ]
    of_row, tile_n, tile_m, split, share = np.array(rows, dtype=np.float64).T[:, :, np.newaxis]
    kind = of_row.astype(np.int64)
    return Picks(kind, tile_n, tile_m, split, share, tile_constants(kind, tile_n, tile_m))


def to_arrays(choice: Choice, prefix: str) -> dict[str, Any]:
    """Arrays to save beside a bundle."""
    arrays: dict[str, Any] = {}
    for name, chooser in choice.items():
        for item in _ITEMS:
            values = getattr(chooser, item)
            arrays[f"{prefix}.{name}.{item}"] = np.array(values) if item == "names" else values
        if chooser.votes is not None:
            arrays |= chooser.votes.to_arrays(f"{prefix}.{name}.votes")
    return arrays


_ITEMS = tuple(item.name for item in fields(Chooser) if item.name != "votes")


def from_arrays(arrays: Mapping[str, Any], prefix: str) -> dict[str, Chooser]:
    """A choice from what :func:`to_arrays` saved; empty where there is none."""
    found = [key.split(".")[1] for key in arrays if key.startswith(f"{prefix}.") and key.endswith(".weight")]
    choice = {}
    for name in found:
        of = {item: np.asarray(arrays[f"{prefix}.{name}.{item}"]) for item in _ITEMS}
        columns: Any = tuple(str(column) for column in of.pop("names"))
        votes = Votes.from_arrays(arrays, f"{prefix}.{name}.votes", len(columns), len(of["kind"]))
        choice[name] = Chooser(**of, names=columns, votes=votes)
    return choice
