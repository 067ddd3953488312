"""Rows of the ledger."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array

Row = dict[str, Any]  # set, quantity, n, mape, floor, published, must, aim; further keys where a row has more to say
Mask = npt.NDArray[np.bool_]


def percent(found: Array, true: Array) -> float | None:
    """Mean absolute percentage error; None of no rows."""
    if found.size == 0:
        return None
    return float(100.0 * np.mean(np.abs(found / true - 1.0)))


def row(
    where: str,
    quantity: str,
    n: int,
    mape: float | None,
    floor: float | None = None,
    published: str | None = None,
    must: float | None = None,
    aim: float | None = None,
    **more: Any,
) -> Row:
    """One row, numbers rounded as they are printed."""

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 2)

    return {
        "set": where,
        "quantity": quantity,
        "n": n,
        "mape": rounded(mape),
        "floor": rounded(floor),
        "published": published,
        "must": must,
        "aim": aim,
        **more,
    }


def absent(where: str, quantity: str, reason: str, must: float | None = None, aim: float | None = None) -> Row:
    """A row of the ledger whose data are not here, with the reason."""
    return row(where, quantity, 0, None, None, None, must, aim, missing=reason)
