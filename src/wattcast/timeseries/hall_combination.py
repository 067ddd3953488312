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


@dataclass
class _HallSums:
    """What the rows of a hall add up to, filled row by row."""

    work: HallWork
    rack_j: Array  # (rack, bin)
    row_j: Array  # (row, bin)
    group_j: Array  # (group, bin)
    gpu_j: Array  # (bin,)
    counts: npt.NDArray[np.int64]  # (cards or nodes, bin of the histogram)
    capped_racks: Array  # (group, second)
    uncapped_row_j: Array  # (row, bin)
    uncapped_rack_j: list[Array]  # where racks are capped
    card_peaks_w: float = 0.0
    node_peaks_w: float = 0.0
    racks: int = 0  # added so far

    @classmethod
    def start(cls, work: HallWork) -> _HallSums:
        """Return the sums of no row yet."""
        racks = sum(racks for _, _, racks in work.rows)
        return cls(
            work=work,
            rack_j=np.zeros((racks, work.bins)),
            row_j=np.zeros((work.part_count, work.bins)),
            group_j=np.zeros((len(work.groups), work.bins)),
            gpu_j=np.zeros(work.bins),
            counts=np.zeros((2, HISTOGRAM_BINS), dtype=np.int64),
            capped_racks=np.zeros((len(work.groups), work.seconds)),
            uncapped_row_j=np.zeros((work.part_count, work.bins)),
            uncapped_rack_j=[],
        )

    def add_row(
        self,
        index: int,
        part: PartSeries,
        hall_mask: Mask | None,
    ) -> None:
        """Add a row of racks, each capped where the plan says."""
        work = self.work
        mask = _part_mask(work, part, hall_mask)
        drawn_j = _apply_mask(work, part, mask)
        end = self.racks + len(part.rack_j)
        self.rack_j[self.racks : end] = drawn_j
        self.racks = end
        self.row_j[index] = drawn_j.sum(axis=0)
        self.uncapped_row_j[index] = part.rack_j.sum(axis=0)
        if work.plan.cap is not None and work.plan.cap.level == "rack":
            self.uncapped_rack_j += list(part.rack_j)

        group = work.rows[index][0]
        self.group_j[group] += self.row_j[index]
        self.gpu_j += part.gpu_j
        if mask is not None:
            self.capped_racks[group] += mask.sum(axis=0)
        self.counts += np.stack([part.card_counts, part.node_counts])
        self.card_peaks_w += part.card_peaks_w
        self.node_peaks_w += part.node_peaks_w

    @property
    def hall_j(self) -> Array:
        """Joules of the hall in each bin."""
        return np.asarray(self.row_j.sum(axis=0))

    @property
    def peak_sums_w(self) -> dict[str, float]:
        """The peaks of all cards, nodes, racks and rows, each added up, and that of the hall."""
        return {
            "card": self.card_peaks_w,
            "node": self.node_peaks_w,
            "rack": float(self.rack_j.max(axis=-1).sum()) / self.work.bin_s,
            "row": float(self.row_j.max(axis=-1).sum()) / self.work.bin_s,
            "hall": float(self.hall_j.max()) / self.work.bin_s,
        }

    def describe_cap(self) -> CapFigures | None:
        """Return what the cap took away at its level, if there is one."""
        if self.work.plan.cap is None:
            return None
        level = self.work.plan.cap.level
        if level == "rack":
            usual_j = self.uncapped_rack_j
            drawn_j = list(self.rack_j)
        elif level == "row":
            usual_j = list(self.uncapped_row_j)
            drawn_j = list(self.row_j)
        else:
            usual_j = [self.uncapped_row_j.sum(axis=0)]
            drawn_j = [self.hall_j]
        return describe_cap(self.work, usual_j, drawn_j, self.capped_racks)


def combine_parts(
    work: HallWork,
    grid_s: float,
    read: Callable[[int], PartSeries],
) -> CombinedHall:
    """Return the hall of all rows; ``read`` returns a row by its number."""
    hall_mask = _hall_mask(work, read)
    sums = _HallSums.start(work)
    for index in range(work.part_count):
        sums.add_row(index, read(index), hall_mask)
    return CombinedHall(
        work=work,
        grid_s=grid_s,
        rack_j=sums.rack_j,
        row_j=sums.row_j,
        group_j=sums.group_j,
        gpu_j=sums.gpu_j,
        card_counts=sums.counts[0],
        node_counts=sums.counts[1],
        peak_sums_w=sums.peak_sums_w,
        racks=_compare_racks(work, sums.rack_j),
        cap=sums.describe_cap(),
        levels={
            "rack": describe_level(list(sums.rack_j), work.bin_s),
            "row": describe_level(list(sums.row_j), work.bin_s),
            "hall": describe_level([sums.hall_j], work.bin_s),
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
    statistics = {}
    for place in range(len(work.groups)):
        of_group = rack_j[groups == place]
        for window_s in list_windows(work.bin_s, work.seconds):
            means_w = window_means_w(of_group, work.bin_s, window_s)
            variance = np.zeros(means_w.shape[-1])
            if len(means_w) > 1:
                variance = means_w.var(axis=0, ddof=1)
            statistics[place, window_s] = RackStatistics(means_w.mean(axis=0), variance)
    return statistics
