"""Compute how wrong predictions are, in percent, and make the rows of the accuracy ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wattcast.core.arrays import Array

Tell = Callable[[str], None]  # takes a line of progress

# set, quantity, n, mape, floor, published, must, aim; further keys where a row has more to say
LedgerRow = dict[str, Any]


def mean_percent_error(predicted: Array, true: Array) -> float | None:
    """Return the mean absolute percentage error; None of no rows."""
    if predicted.size == 0:
        return None
    return float(100.0 * np.mean(np.abs(predicted / true - 1.0)))


def percent_errors(log_ratio: Array) -> Array:
    """Return the absolute error of each prediction in percent, from log(measured / predicted)."""
    return np.asarray(100.0 * np.abs(np.expm1(-log_ratio)))


def lowers_error(
    before: Array,
    after: Array,
    least: float,
) -> bool:
    """Tell whether the mean error falls by more than ``least`` standard errors of its fall
    [Breiman1984].

    Both are log(measured / predicted), row by row.

    >>> bias = np.array([-0.10, -0.08, -0.12, -0.09])
    >>> lowers_error(bias, bias + 0.1, 1.0)
    True
    >>> lowers_error(bias, bias + np.array([0.1, -0.1, 0.1, -0.1]), 1.0)
    False
    """
    gain = percent_errors(before) - percent_errors(after)
    return bool(gain.mean() > least * gain.std(ddof=1) / np.sqrt(gain.size))


def make_ledger_row(
    where: str,
    quantity: str,
    n: int,
    mape: float | None,
    floor: float | None = None,
    published: str | None = None,
    must: float | None = None,
    aim: float | None = None,
    **more: Any,
) -> LedgerRow:
    """Make a row, its numbers rounded as they are printed."""
    return {
        "set": where,
        "quantity": quantity,
        "n": n,
        "mape": None if mape is None else round(mape, 2),
        "floor": None if floor is None else round(floor, 2),
        "published": published,
        "must": must,
        "aim": aim,
        **more,
    }


def score_row(
    where: str,
    quantity: str,
    predicted: Array,
    true: Array,
    floor: Array | None = None,
    *goals: Any,
    **more: Any,
) -> LedgerRow:
    """Make a row with the mean error of ``predicted`` against ``true``; ``floor`` is what a trivial
    model predicts.

    Further arguments are those of ``make_ledger_row``.
    """
    error = mean_percent_error(predicted, true)
    floor_error = None if floor is None else mean_percent_error(floor, true)
    return make_ledger_row(
        where,
        quantity,
        len(true),
        error,
        floor_error,
        *goals,
        **more,
    )


def make_absent_row(
    where: str,
    quantity: str,
    reason: str,
    must: float | None = None,
    aim: float | None = None,
) -> LedgerRow:
    """Make a row of the ledger whose data are not here, with the reason."""
    return make_ledger_row(
        where,
        quantity,
        0,
        None,
        None,
        None,
        must,
        aim,
        missing=reason,
    )
