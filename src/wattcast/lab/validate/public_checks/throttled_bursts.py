"""Find bursts of public tables that were throttled while they were measured.

A burst is over before a governor lowers the clock, so that no kernel runs slower in it than in a
run of a second on a card of the same name.
"""

from __future__ import annotations

import itertools

import numpy as np

from wattcast.calibrate.table_rows import TableRows
from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Mask
from wattcast.workload.operator_types import Linear


class ThrottledCoefficients(Coefficients):
    """When bursts were throttled."""

    slowed_burst: float  # of the rate of runs of a second, below which bursts were throttled
    dense_side: int  # least side of products that arithmetic bounds


THROTTLED = load_coefficients("throttled_bursts", ThrottledCoefficients)
# Seconds between which bursts and long runs of a card are compared
BANDS_S = (1e-4, 1e-3, np.inf)


def find_throttled(table: TableRows) -> Mask:
    """Return which bursts of dense products were throttled, ``(row,)``.

    Where the dense products of a table are slower in bursts than in runs of a second, in their
    median over a band of lengths, something else held the card back than power over a second.
    Predictions have no part in it.
    """
    is_dense = np.array([_is_dense(op) for op in table.rows.ops])
    is_burst = table.rows.is_kind("burst")
    measured_s = table.rows.column("latency_s")
    flop = np.array([getattr(op, "flop", 0.0) for op in table.rows.ops])
    rate = flop / measured_s
    throttled = np.zeros(len(table.rows), dtype=bool)
    for low_s, high_s in itertools.pairwise(BANDS_S):
        band = is_dense & (measured_s >= low_s) & (measured_s < high_s)
        bursts = band & is_burst
        sustained = band & ~is_burst
        if not bursts.any() or not sustained.any():
            continue
        if np.median(rate[bursts]) < THROTTLED.slowed_burst * np.median(rate[sustained]):
            throttled |= bursts
    return throttled


def _is_dense(op: object) -> bool:
    return isinstance(op, Linear) and min(op.m, op.n, op.k) >= THROTTLED.dense_side
