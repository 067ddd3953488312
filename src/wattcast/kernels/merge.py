"""Columns of all operators from those of each family."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.kernels.work import WORK_COLUMNS, Columns, Part, alignment

Rows = npt.NDArray[np.intp]
_Names = tuple[str, ...]


def merged(parts: Sequence[tuple[Rows, Part]], count: int) -> tuple[Columns, Columns, _Names]:
    """Work and features of all operators from those of each family, zero where a family has none; and the features
    that say how likely a row is of a group."""
    of = _places(tuple([tuple(map(tuple, part[1:])) for _, part in parts]))
    table = np.zeros((len(WORK_COLUMNS) + len(of.names), count))
    for (rows, part), place in zip(parts, of.places, strict=True):
        table[place, rows] = np.array([column for columns in part[1:] for column in columns.values()])
    logs, aligned = table[of.logs : of.aligned], table[of.aligned : of.plain]
    np.log2(np.maximum(logs, 1.0, out=logs), out=logs)
    aligned[:] = alignment(aligned)
    work = dict(zip(WORK_COLUMNS, table, strict=False))
    return work, dict(zip(of.names, table[of.logs :], strict=True)), of.blends


class _Places(NamedTuple):
    """Where the columns of all families lie in a table: work, then features in logs, by alignment, plain."""

    names: _Names  # of features
    blends: _Names  # those of them that say how likely a row is of a group
    logs: int
    aligned: int
    plain: int
    places: list[Rows]  # of each family, ``(column, 1)``


@lru_cache(maxsize=256)
def _places(families: tuple[tuple[_Names, ...], ...]) -> _Places:
    """From the names of each family's columns, as a :class:`Part` has them."""
    plain, logs, aligned = (tuple(dict.fromkeys(chain(*(family[i] for family in families)))) for i in (1, 2, 3))
    names = (*logs, *aligned, *plain)
    place = {name: i for i, name in enumerate((*WORK_COLUMNS, *names))}
    return _Places(
        names=names,
        blends=tuple(name for name in plain if name.startswith("is ")),
        logs=len(WORK_COLUMNS),
        aligned=len(WORK_COLUMNS) + len(logs),
        plain=len(WORK_COLUMNS) + len(logs) + len(aligned),
        places=[np.array([place[name] for name in chain(*family)])[:, np.newaxis] for family in families],
    )


def groups_of(group: Sequence[str], told: Columns) -> Columns:
    """Columns ``is GROUP``, how likely each row is of it: some families have told, else all or not."""
    place = {name: i for i, name in enumerate(dict.fromkeys(group))}
    alike = np.equal(np.arange(len(place))[:, np.newaxis], [place[name] for name in group]).astype(np.float64)
    columns = {f"is {name}": values for name, values in zip(place, alike, strict=True)}
    if told:
        shared = np.add.reduce(list(told.values())) > 0
        alike *= ~shared
        for name in columns.keys() & told.keys():
            columns[name] += told[name]
    return columns
