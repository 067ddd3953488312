"""How wrong a prediction is, in percent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.gram import points
from wattcast.fit.table import CounterTable


@dataclass(frozen=True)
class Score:
    """Errors of one prediction against measured watts, in percent."""

    mape: float  # mean absolute percentage error
    bias: float  # mean signed percentage error
    worst: float
    by_benchmark_p90: float  # 90th percentile of the benchmarks' own mean errors
    rows: int


def percent_error(predicted_w: Array, measured_w: Array) -> Array:
    """100·(P̂ - P)/P."""
    return np.asarray(100.0 * (predicted_w / measured_w - 1.0))


def score(table: CounterTable, predicted_w: Array) -> Score:
    """Errors over all rows of a table."""
    error = percent_error(predicted_w, table.power_w)
    each = np.bincount(table.benchmark, np.abs(error)) / np.bincount(table.benchmark)
    return Score(
        float(np.abs(error).mean()),
        float(error.mean()),
        float(np.abs(error).max()),
        float(np.quantile(each, 0.9)),
        table.rows,
    )


def error_plane(table: CounterTable, predicted_w: Array, signed: bool = False) -> tuple[Array, Array, Array]:
    """Mean error in percent by operating point: core clocks, memory clocks, and ``(core, memory)`` errors.

    Points that were never measured are NaN.
    """
    error = percent_error(predicted_w, table.power_w)
    error = error if signed else np.abs(error)
    point, clock_hz, memory_clock_hz = points(table)
    mean = np.bincount(point, error) / np.bincount(point)
    core, memory = np.unique(clock_hz), np.unique(memory_clock_hz)
    plane = np.full((core.size, memory.size), np.nan)
    plane[np.searchsorted(core, clock_hz), np.searchsorted(memory, memory_clock_hz)] = mean
    return core, memory, plane
