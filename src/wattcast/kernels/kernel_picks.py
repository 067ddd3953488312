"""The kernels that products may run, and how likely each is."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Hashable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    CodedColumn,
    Mask,
    index_distinct,
)
from wattcast.kernels.kernel_labels import (
    KERNEL_KINDS,
    KernelLabel,
    KernelsRun,
    TileConstants,
    tile_constants,
)

RowIndex = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False, repr=False)
class KernelPicks:
    """Kernels each product may run and how likely each is, ``(row, pick)``; the likeliest first."""

    kind: npt.NDArray[np.int64]  # position in KERNEL_KINDS
    tile_n: Array
    tile_m: Array
    split: Array  # parts of K: 1 none, 0 as many as fill the chip
    share: Array  # sums to 1
    constants: Array  # (constant, row, pick), fields of ``TileConstants``

    @cached_property
    def sure(self) -> Mask:
        """Rows of which one kernel is certain, ``(row,)``."""
        return np.asarray(self.share[:, 0] == 1.0)

    def label(self, row: int) -> KernelLabel:
        """Return the likeliest kernel of a row."""
        return KernelLabel(
            kind=KERNEL_KINDS[int(self.kind[row, 0])],
            tile_n=int(self.tile_n[row, 0]),
            tile_m=int(self.tile_m[row, 0]),
            split=bool(self.split[row, 0] != 1.0),
        )

    def of_kind(self, name: str) -> Array:
        """Return how likely each row runs a kind of kernel, ``(row,)``."""
        is_kind = self.kind == KERNEL_KINDS.index(name)
        return np.asarray((self.share * is_kind).sum(axis=1))


_PICK_COLUMNS = 4  # sides of the tile, parts, and the kind or the share


def picks_of_labels(
    labels: Mapping[int, KernelLabel], kernels_run: Sequence[KernelsRun]
) -> KernelPicks:
    """Return picks of rows whose kernel is certain, in the order of ``labels``."""
    table = np.empty((_PICK_COLUMNS, len(labels), 1))
    for place, (row, label) in enumerate(labels.items()):
        _, counted_parts = kernels_run[row]
        parts = counted_parts or (0 if label.split else 1)
        kind_index = KERNEL_KINDS.index(label.kind)
        table[:, place, 0] = (kind_index, label.tile_n, label.tile_m, parts)
    kind = table[0].astype(np.int64)
    _, tile_n, tile_m, split = table
    constants = tile_constants(kind, tile_n, tile_m)
    return KernelPicks(
        kind,
        tile_n,
        tile_m,
        split,
        np.ones_like(split),
        constants,
    )


def join_picks(parts: Sequence[tuple[RowIndex, KernelPicks]], count: int) -> KernelPicks:
    """Return the picks of all rows; picks that a row lacks never run.

    Where every row is sure of its kernel, there is one pick.
    """
    widths = [1 if picks.sure.all() else picks.share.shape[1] for _, picks in parts]
    width = max(widths, default=1)
    kind = np.zeros((count, width), np.int64)
    table = np.ones((_PICK_COLUMNS + len(TileConstants._fields), count, width))
    table[3] = 0.0
    for rows, picks in parts:
        filled = slice(0, min(picks.share.shape[1], width))
        kind[rows, filled] = picks.kind[:, filled]
        columns = [picks.tile_n, picks.tile_m, picks.split, picks.share, *picks.constants]
        table[:, rows, filled] = np.array([values[:, filled] for values in columns])
    tile_n, tile_m, split, share = table[:4]
    return KernelPicks(
        kind,
        tile_n,
        tile_m,
        split,
        share,
        table[4:],
    )


_Form = TypeVar("_Form", bound=Hashable)


def blend_families(
    name_of: Callable[[_Form, str], str],
    forms: CodedColumn[_Form],
    picks: KernelPicks,
) -> tuple[CodedColumn[str], dict[str, Array]]:
    """Return the family of the likeliest kernel of each row, and how likely each family is.

    ``name_of`` names the family of a product of some form that is run by a kind of kernel. The
    likelihoods are columns ``is FAMILY``; without them every row is sure of its family.
    """
    names, by_kind = index_distinct(
        name_of(form, kind) for form in forms.values for kind in KERNEL_KINDS
    )
    first_of_form = len(KERNEL_KINDS) * forms.place[:, np.newaxis]
    family = by_kind[first_of_form + picks.kind]  # (row, pick)
    likeliest = CodedColumn(names, family[:, 0])
    if picks.share.shape[1] == 1:
        return likeliest, {}

    # Shares of each family in each row
    row_count = len(forms)
    cell = family * row_count + np.arange(row_count)[:, np.newaxis]
    counts = np.bincount(cell.ravel(), picks.share.ravel(), len(names) * row_count)
    # Rounding must not take a certain family past a threshold of the learned trees.
    shares = np.minimum(counts.astype(np.float64), 1.0).reshape(len(names), -1)
    columns = {}
    for name, share in zip(names, shares, strict=True):
        if share.any():
            columns[f"is {name}"] = share
    return likeliest, columns
