"""Put the rows of a hall together: sums by row, group and hall, capping, and what a planner asks.

Rows are read one after another, in their order, so that sums do not depend on which was finished
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Mask
from wattcast.timeseries.hall_capping import (
    CapFigures,
    describe_cap,
    hold_cap,
)
from wattcast.timeseries.hall_parts import (
    HISTOGRAM_BINS,
    HallWork,
    PartSeries,
)
from wattcast.timeseries.hall_statistics import (
    LevelFigures,
    RackStatistics,
    describe_level,
    list_windows,
    window_means_w,
)


@dataclass(frozen=True)
class CombinedHall:
    """The power of a hall over a span, at every level."""

    work: HallWork
    grid_s: float
    rack_j: Array  # (rack, bin)
    row_j: Array  # (row, bin)
    group_j: Array  # (group, bin)
    gpu_j: Array  # (bin,) of all GPUs
    card_counts: npt.NDArray[np.int64]
    node_counts: npt.NDArray[np.int64]
    peak_sums_w: dict[str, float]  # of the peaks of all members of a level
    racks: dict[tuple[int, float], RackStatistics]  # by group and window
    cap: CapFigures | None = None
    levels: dict[str, LevelFigures] = field(default_factory=dict)

    @property
    def hall_j(self) -> Array:
        """Joules of the hall in each bin."""
        return np.asarray(self.row_j.sum(axis=0))

    @property
    def energy_j(self) -> float:
        """Joules of the hall over the span."""
        return math.fsum(self.hall_j.tolist())

    @property
    def power_w(self) -> Array:
        """Mean power of the hall in each bin."""
        return self.hall_j / self.work.bin_s

    def on_grid(self, bin_j: Array) -> Array:
        """Return joules on the grid that was asked for; a rest at the end is an interval, too."""
        factor = max(round(self.grid_s / self.work.bin_s), 1)
        begins = np.arange(0, bin_j.shape[-1], factor)
        return np.asarray(np.add.reduceat(bin_j, begins, axis=-1))

    @property
    def grid_begin_s(self) -> Array:
        """When each interval of the grid begins, in seconds of the day."""
        count = math.ceil(self.work.seconds / self.grid_s - 1e-9)
        return np.asarray(self.work.begin_s + np.arange(count) * self.grid_s)

    @property
    def grid_duration_s(self) -> Array:
        """Length of each interval; the last may be shorter."""
        end_s = float(self.work.begin_s + self.work.seconds)
        return np.diff(np.append(self.grid_begin_s, end_s))


def combine_parts(
    work: HallWork,
    grid_s: float,
    read: Callable[[int], PartSeries],
) -> CombinedHall:
    """Return the hall of all rows; ``read`` returns a row by its number."""
    hall_mask = _hall_mask(work, read)
    racks = sum(racks for _, _, racks in work.rows)
    rack_j = np.zeros((racks, work.bins))
    row_j = np.zeros((work.part_count, work.bins))
    group_j = np.zeros((len(work.groups), work.bins))
    gpu_j = np.zeros(work.bins)
    counts = np.zeros((2, HISTOGRAM_BINS), dtype=np.int64)
    card_peaks_w = 0.0
    node_peaks_w = 0.0
    capped_racks = np.zeros((len(work.groups), work.seconds))
    uncapped_row_j = np.zeros_like(row_j)
    uncapped_rack_j = [np.zeros(0)]
    first = 0
    for index in range(work.part_count):
        part = read(index)
        count = len(part.rack_j)
        mask = _part_mask(work, part, hall_mask)
        drawn_j = _apply_mask(work, part, mask)
        rack_j[first : first + count] = drawn_j
        row_j[index] = drawn_j.sum(axis=0)
        uncapped_row_j[index] = part.rack_j.sum(axis=0)
        if work.plan.cap is not None and work.plan.cap.level == "rack":
            uncapped_rack_j += list(part.rack_j)
        place = work.rows[index][0]
        group_j[place] += row_j[index]
        gpu_j += part.gpu_j
        if mask is not None:
            capped_racks[place] += mask.sum(axis=0)
        counts += np.stack([part.card_counts, part.node_counts])
        card_peaks_w += part.card_peaks_w
        node_peaks_w += part.node_peaks_w
        first += count
    hall_j = row_j.sum(axis=0)
    peak_sums_w = {
        "card": card_peaks_w,
        "node": node_peaks_w,
        "rack": float(rack_j.max(axis=-1).sum()) / work.bin_s,
        "row": float(row_j.max(axis=-1).sum()) / work.bin_s,
        "hall": float(hall_j.max()) / work.bin_s,
    }
    cap = None
    if work.plan.cap is not None:
        drawn = {
            "rack": rack_j,
            "row": row_j,
            "hall": hall_j[np.newaxis],
        }
        usual = {
            "rack": uncapped_rack_j[1:],
            "row": uncapped_row_j,
            "hall": uncapped_row_j.sum(axis=0)[np.newaxis],
        }
        level = work.plan.cap.level
        cap = describe_cap(work, list(usual[level]), list(drawn[level]), capped_racks)
    return CombinedHall(
        work=work,
        grid_s=grid_s,
        rack_j=rack_j,
        row_j=row_j,
        group_j=group_j,
        gpu_j=gpu_j,
        card_counts=counts[0],
        node_counts=counts[1],
        peak_sums_w=peak_sums_w,
        racks=_compare_racks(work, rack_j),
        cap=cap,
        levels={
            "rack": describe_level(list(rack_j), work.bin_s),
            "row": describe_level(list(row_j), work.bin_s),
            "hall": describe_level([hall_j], work.bin_s),
        },
    )


def _second_means_w(work: HallWork, bin_j: Array) -> Array:
    """Return the mean power of each second."""
    return window_means_w(bin_j, work.bin_s, 1.0)


def _hall_mask(work: HallWork, read: Callable[[int], PartSeries]) -> Mask | None:
    """Return the seconds in which the whole hall is capped, where the cap is of the hall."""
    cap = work.plan.cap
    if cap is None or cap.level != "hall":
        return None
    total_j = np.zeros(work.bins)
    for index in range(work.part_count):
        total_j += read(index).rack_j.sum(axis=0)
    power_w = _second_means_w(work, total_j)
    return hold_cap(power_w, work.plan.limits_w["hall"], round(cap.hold_s))


def _part_mask(
    work: HallWork,
    part: PartSeries,
    hall_mask: Mask | None,
) -> Mask | None:
    """Return which racks of a row are capped in which seconds."""
    cap = work.plan.cap
    if cap is None:
        return None
    hold_s = round(cap.hold_s)
    if cap.level == "rack":
        power_w = _second_means_w(work, part.rack_j)
        limit_w = work.plan.limits_w["rack"]
        return np.stack([hold_cap(rack_w, limit_w, hold_s) for rack_w in power_w])
    mask = hall_mask
    if mask is None:
        power_w = _second_means_w(work, part.rack_j.sum(axis=0))
        mask = hold_cap(power_w, work.plan.limits_w["row"], hold_s)
    return np.repeat(mask[np.newaxis], len(part.rack_j), axis=0)


def _apply_mask(
    work: HallWork,
    part: PartSeries,
    mask: Mask | None,
) -> Array:
    """Return the joules of racks with the cap in the seconds that it holds."""
    if mask is None or part.capped_j is None:
        return part.rack_j
    in_bins = np.repeat(mask, work.bins_per_s, axis=-1)
    return np.where(in_bins, part.capped_j, part.rack_j)


def _compare_racks(work: HallWork, rack_j: Array) -> dict[tuple[int, float], RackStatistics]:
    """Return mean and variance between the racks of each group, by window."""
    groups = np.concatenate(
        [np.full(racks, place, dtype=np.int64) for place, _, racks in work.rows]
    )
    found = {}
    for place in range(len(work.groups)):
        of_group = rack_j[groups == place]
        for window_s in list_windows(work.bin_s, work.seconds):
            means_w = window_means_w(of_group, work.bin_s, window_s)
            variance = np.zeros(means_w.shape[-1])
            if len(means_w) > 1:
                variance = means_w.var(axis=0, ddof=1)
            found[place, window_s] = RackStatistics(means_w.mean(axis=0), variance)
    return found
