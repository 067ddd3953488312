"""Capped rows over whole governor cycles, from the raw samples of their run.

Under the power cap an H200 runs about 0.7 s a few percent above its limit and then cuts the clock for
about 0.3 s. A window of half a second that asks for steady power finds the first part and shows 715 W
where the load settles at 695 W. The raw samples hold the whole load, so its settled power and clock can
be had afterwards: from 0.35 s after the load began to the end of the row's own window, when that is at
least one cycle long. The row's own figures stay as they are: power, clock and latency of one window
belong together. A row whose own window holds a cycle is settled as it is; to look for it among the samples
would find other rows, since whole cycles of all capped loads draw alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt

from wattcast.measure.samples import Array, Samples, sightings, ticks
from wattcast.records import KernelRow

CYCLE_TICKS = 10
SKIP_S = 0.35  # from the begin of the load until the governor has answered
QUEUED_S = 0.05  # the load runs on this long after its window has closed
NEARBY_S = 4.0  # windows end within this long of the usual time after their row was begun
CLOSE = 1e-3  # relative difference in power between a row and its own window, evaluated again


@dataclass(frozen=True)
class Settled:
    """Mean power and reported clock of a capped load over at least one governor cycle."""

    power_w: float
    sm_clock_hz: float
    ticks: int


def settle(rows: list[KernelRow], samples: Samples) -> dict[str, Settled]:
    """Settled figures by row id, for the capped sustained rows of one run whose windows the samples hold."""
    found = {row.id: own for row in rows if _capped(row) and (own := _own(row)) is not None}
    capped = [row for row in rows if _capped(row) and row.id not in found]
    seen, grid_s = sightings(samples), ticks(samples).time_s
    seen_s, energy_j = seen.middle_s, seen.energy_j
    if not capped or len(grid_s) != len(seen_s) or len(grid_s) < CYCLE_TICKS:
        return found
    offset_s = _offset_s(capped, seen_s, grid_s, energy_j)
    for row in capped:
        last = _window_end(row, offset_s, seen_s, grid_s, energy_j)
        settled = _widen(row, last, grid_s, energy_j, samples) if last is not None else None
        if settled is not None:
            found[row.id] = settled
    return found


def _capped(row: KernelRow) -> bool:
    return row.kind == "sustained" and not row.error and "sw_power_cap" in row.throttle and bool(row.power_w)


def _own(row: KernelRow) -> Settled | None:
    """A row's own figures, where its window holds at least one cycle."""
    if row.power_w is None or row.sm_clock_hz is None or (row.ticks or 0) < CYCLE_TICKS:
        return None
    return Settled(row.power_w, row.sm_clock_hz, row.ticks or 0)


def _offset_s(rows: list[KernelRow], seen_s: Array, grid_s: Array, energy_j: Array) -> float:
    """Sampler time minus calendar time, the same for all rows of a run.

    The densest place among all windows that match some row closely: chance matches scatter, true ones agree.
    """
    offsets: list[Array] = []
    for row in rows:
        error, last = _matches(row, seen_s, grid_s, energy_j)
        offsets.append(grid_s[last[error < CLOSE]] - _calendar_s(row))
    every_s = np.sort(np.concatenate(offsets))
    if not len(every_s):
        return float("nan")
    inside = np.searchsorted(every_s, every_s + NEARBY_S) - np.arange(len(every_s))
    first = int(np.argmax(inside))
    return float(np.median(every_s[first : first + inside[first]]))


def _matches(row: KernelRow, seen_s: Array, grid_s: Array, energy_j: Array) -> tuple[Array, npt.NDArray[np.intp]]:
    """Relative difference between the row's power and that of every window as long as the row's."""
    count = row.ticks or 0
    joules = energy_j[count:] - energy_j[:-count]
    wanted_w = row.power_w or float("nan")
    seen, grid = (np.abs(joules / (t[count:] - t[:-count]) / wanted_w - 1.0) for t in (seen_s, grid_s))
    return np.minimum(seen, grid), np.arange(count, len(energy_j), dtype=np.intp)


def _window_end(row: KernelRow, offset_s: float, seen_s: Array, grid_s: Array, energy_j: Array) -> int | None:
    """Which counter step closed the row's window: the best match in the seconds after the row was begun."""
    error, last = _matches(row, seen_s, grid_s, energy_j)
    late_s = grid_s[last] - (_calendar_s(row) + offset_s)
    error = np.where(np.abs(late_s) < NEARBY_S, error, np.inf)
    place = int(np.argmin(error))
    return int(last[place]) if error[place] < CLOSE else None


def _widen(row: KernelRow, last: int, grid_s: Array, energy_j: Array, samples: Samples) -> Settled | None:
    length_s = (row.replays or 0) * (row.copies or 0) * (row.latency_s or 0.0)
    begin_s = grid_s[last] + QUEUED_S - length_s + SKIP_S
    first = int(np.searchsorted(grid_s, begin_s))
    if last - first < CYCLE_TICKS:
        return None
    clock = samples.between(float(grid_s[first]), float(grid_s[last])).known("sm_clock_hz")
    if not len(clock):
        return None
    power_w = (energy_j[last] - energy_j[first]) / (grid_s[last] - grid_s[first])
    return Settled(float(power_w), float(clock.mean()), last - first)


def _calendar_s(row: KernelRow) -> float:
    return datetime.fromisoformat(row.date).timestamp()
