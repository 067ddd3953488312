"""Power over time of one predicted run: watts by module from the first launch to the last kernel's end.

Start times follow the two queues of :mod:`wattcast.timeline.queues`: the host issues operators in order, the
device runs them in order, and kernel i starts at max(issued_i, end of i-1). What lies between two kernels is a
gap, drawn at idle power. Energy and length equal those of the prediction; where there are too many launches to
draw, stretches of the issue order stand at their mean power, and both equal it to within a percent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.equilibrium import settle
from wattcast.errors import bad_value
from wattcast.fitted import Bundle
from wattcast.flow import Detail, analyse, at_clock, in_detail
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels.table import Index, Segment
from wattcast.timeline import Timeline
from wattcast.workload.graph import Graph

MOST_LAUNCHES = 200_000  # beyond this each stretch of the issue order is drawn at its mean power
GAP = "waiting for the host"


@dataclass(frozen=True)
class PowerTrace:
    """Intervals that follow one another without a hole; the last axis of ``part_w`` is the module."""

    start_s: Array  # (interval,)
    end_s: Array  # (interval,)
    part_w: Array  # (interval, part)
    parts: tuple[str, ...]
    labels: tuple[str, ...]  # of ``which``: operators, then the gap
    which: Index  # (interval,) index into ``labels``; -1 where several are one
    whole: bool  # False: too many launches, stretches are drawn at their mean

    @property
    def duration_s(self) -> float:
        """From the first launch to the end of the last kernel."""
        return float(self.end_s[-1])

    @property
    def energy_j(self) -> float:
        """Joules under the curve."""
        return float(((self.end_s - self.start_s)[:, np.newaxis] * self.part_w).sum())

    @property
    def idle(self) -> npt.NDArray[np.bool_]:
        """Intervals in which the device waits."""
        return np.asarray(self.which == len(self.labels) - 1)

    def part(self, first: int, last: int) -> PowerTrace:
        """Some of the intervals, at their own times."""
        at = slice(first, last)
        return replace(
            self, start_s=self.start_s[at], end_s=self.end_s[at], part_w=self.part_w[at], which=self.which[at]
        )

    def binned(self, bins: int) -> PowerTrace:
        """The same energy in at most ``bins`` steps of equal length; a shorter trace comes back as it is."""
        if len(self.start_s) <= bins:
            return self
        edges = np.linspace(0.0, self.duration_s, bins + 1)
        known = np.concatenate([self.start_s, self.end_s[-1:]])
        length = self.end_s - self.start_s
        joules = np.vstack([np.zeros(len(self.parts)), np.cumsum(length[:, np.newaxis] * self.part_w, axis=0)])
        at_edges = np.stack([np.interp(edges, known, joules[:, i]) for i in range(len(self.parts))], axis=-1)
        part_w = np.diff(at_edges, axis=0) / np.diff(edges)[:, np.newaxis]
        return replace(self, start_s=edges[:-1], end_s=edges[1:], part_w=part_w, which=np.full(bins, -1))


def power_trace(graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> PowerTrace:
    """Power over time of one run of ``graph`` where the governor settles; a single operating point."""
    timeline = analyse(graph, gpu, bundle)
    return trace_at(timeline, settle(timeline, gpu, at, bundle).at, bundle)


def trace_at(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> PowerTrace:
    """The same from a timeline at a set clock (``at.clock_hz``, not None)."""
    detail = in_detail(timeline, at, bundle)
    if detail.kernel_s.ndim != 1:
        raise bad_value("power over time", "a single operating point", f"a sweep of {detail.kernel_s.shape[:-1]}")
    launches = float(timeline.calls.sum())
    gap_w = _gap_w(timeline, at, bundle, detail)
    make = _each_launch if launches <= MOST_LAUNCHES else _each_stretch
    start_s, end_s, which, part_w = make(timeline, detail, gap_w)
    labels = (*(str(op) for op in timeline.kernels.ops), GAP)
    return PowerTrace(start_s, end_s, part_w, detail.parts, labels, which, launches <= MOST_LAUNCHES)


def _gap_w(timeline: Timeline, at: OperatingPoint, bundle: Bundle, detail: Detail) -> Array:
    """Watts by part while the device waits: the energy the kernels leave over, ``(part,)``."""
    totals = at_clock(timeline, at, bundle)
    gap_s = float(totals.latency_s - totals.busy_s)
    if gap_s <= 1e-12:
        return np.zeros(len(detail.parts))
    of_kernels = (detail.kernel_s * timeline.calls) @ detail.kernel_part_w
    return np.asarray((detail.part_j - of_kernels) / gap_s)


def _order(segment: Segment) -> Index:
    once = np.repeat(segment.rows, segment.counts.astype(np.int64))
    return np.tile(once, segment.repeat)


def _each_launch(timeline: Timeline, detail: Detail, gap_w: Array) -> tuple[Array, Array, Index, Array]:
    """Every launch, and every gap before one.

    end_i = D_i + max_{j<=i} (C_j - D_{j-1}), with C the issue times and D the running sum of durations: the
    queue recursion in one pass.
    """
    order = np.concatenate([_order(segment) for segment in timeline.kernels.segments])
    run_s = detail.kernel_s[order]
    issued_s = np.cumsum(np.broadcast_to(timeline.host_s, detail.kernel_s.shape)[order])
    done_s = np.cumsum(run_s)
    end_s = done_s + np.maximum.accumulate(issued_s - (done_s - run_s))
    start_s = end_s - run_s
    previous_s = np.concatenate([[0.0], end_s[:-1]])
    waited = start_s - previous_s > 1e-12
    start_s = np.where(waited, start_s, previous_s)
    gap = len(detail.kernel_s)
    which = np.stack([np.full(order.size, gap), order], axis=-1)
    starts = np.stack([previous_s, start_s], axis=-1)
    ends = np.stack([start_s, end_s], axis=-1)
    keep = np.stack([waited, np.ones(order.size, dtype=bool)], axis=-1)
    levels = np.vstack([detail.kernel_part_w, gap_w])
    return starts[keep], ends[keep], which[keep], levels[which[keep]]


def _each_stretch(timeline: Timeline, detail: Detail, gap_w: Array) -> tuple[Array, Array, Index, Array]:
    """One interval a stretch, at its mean power: repeated R times it takes R·max(C, D) (``queues.py``)."""
    host_s = np.broadcast_to(timeline.host_s, detail.kernel_s.shape)
    length, energy = [], []
    for segment in timeline.kernels.segments:
        rows, counts = segment.rows, segment.counts
        run_s, issue_s = float(detail.kernel_s[rows] @ counts), float(host_s[rows] @ counts)
        once_s = max(run_s, issue_s)
        part_j = (detail.kernel_s[rows] * counts) @ detail.kernel_part_w[rows] + (once_s - run_s) * gap_w
        length.append(segment.repeat * once_s)
        energy.append(segment.repeat * part_j)
    seconds = np.array(length)
    end_s = np.cumsum(seconds)
    start_s = np.concatenate([[0.0], end_s[:-1]])
    return start_s, end_s, np.full(len(length), -1), np.array(energy) / seconds[:, np.newaxis]
