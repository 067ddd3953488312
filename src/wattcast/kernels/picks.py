"""Kernels that a product may run, how likely each is, and the groups that follow."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels.tiles import KINDS, TILE_CONSTANTS, Flags


class Label(NamedTuple):
    """A kernel as the choice sees it."""

    kind: str
    tile_n: int  # along outputs (channels of a convolution)
    tile_m: int  # along tokens (pixels)
    split: bool  # of K over blocks, with a reduction behind

    def __str__(self) -> str:
        return f"{self.kind} {self.tile_n}x{self.tile_m}{' split' if self.split else ''}"


@dataclass(frozen=True)
class Picks:
    """Candidates of each product and how likely each is, ``(row, pick)``; the likeliest first."""

    kind: npt.NDArray[np.int64]  # position in KINDS
    tile_n: Array
    tile_m: Array
    split: Array  # parts of K: 1 none, 0 as many as fill the chip
    share: Array  # sums to 1
    constants: Array  # (constant, row, pick), as :func:`tile_constants` has them

    @cached_property
    def sure(self) -> Flags:
        """Rows of which one kernel is certain, ``(row,)``."""
        return np.asarray(self.share[:, 0] == 1.0)

    def narrow(self) -> Picks:
        """The first pick of each row alone, where every row is sure of it."""
        if self.share.shape[1] == 1 or not self.sure.all():
            return self
        return Picks(*(values[..., :1] for values in vars(self).values() if values.ndim > 1))

    def label(self, row: int) -> Label:
        """The likeliest kernel of a row."""
        kind = KINDS[int(self.kind[row, 0])]
        return Label(kind, int(self.tile_n[row, 0]), int(self.tile_m[row, 0]), bool(self.split[row, 0] != 1.0))

    def of_kind(self, name: str) -> Array:
        """How likely each row runs a kind of kernel, ``(row,)``."""
        return np.asarray((self.share * (self.kind == KINDS.index(name))).sum(axis=1))


Form = TypeVar("Form", bound=Hashable)


def blended(
    name_of: Callable[[Form, str], str], forms: Sequence[Form], picks: Picks
) -> tuple[list[str], dict[str, Array]]:
    """The group of the likeliest kernel of each row, and columns ``is GROUP`` of how likely each group is.

    ``name_of`` is the group of a form run by a kind of kernel. Without columns every row is sure of its group.
    """
    if picks.share.shape[1] == 1:
        return [name_of(form, KINDS[k]) for form, k in zip(forms, picks.kind[:, 0].tolist(), strict=True)], {}
    of = {form: i for i, form in enumerate(dict.fromkeys(forms))}
    given = [name_of(form, kind) for form in of for kind in KINDS]
    place = {name: i for i, name in enumerate(dict.fromkeys(given))}
    of_kind = np.array([place[name] for name in given]).reshape(len(of), len(KINDS))
    group = of_kind[np.array([of[form] for form in forms])[:, np.newaxis], picks.kind]  # (row, pick)
    at = group * len(forms) + np.arange(len(forms))[:, np.newaxis]
    shares: Array = np.bincount(at.ravel(), picks.share.ravel(), len(place) * len(forms)).astype(np.float64)
    names = list(place)
    columns = {
        f"is {name}": of_name
        for name, of_name in zip(names, shares.reshape(len(place), -1), strict=True)
        if of_name.any()
    }
    return [names[i] for i in group[:, 0].tolist()], columns


def joined(parts: Sequence[tuple[list[int], Picks]], count: int) -> Picks:
    """The picks of all rows; those that have fewer than others have picks beyond that never run."""
    if len(parts) == 1:
        return parts[0][1].narrow()
    width = max([picks.share.shape[1] for _, picks in parts], default=1)
    kind, rest = np.zeros((count, width), np.int64), np.ones((4 + TILE_CONSTANTS, count, width))
    rest[3] = 0.0
    for rows, picks in parts:
        at = slice(0, picks.share.shape[1])
        kind[rows, at] = picks.kind
        rest[:, rows, at] = np.array([picks.tile_n, picks.tile_m, picks.split, picks.share, *picks.constants])
    return Picks(kind, rest[0], rest[1], rest[2], rest[3], rest[4:]).narrow()
