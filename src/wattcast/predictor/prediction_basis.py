"""Hold what a prediction was computed from, for whoever shows more than its numbers.

Intervals, distances from what was measured, figures and reports read the basis of a prediction
instead of computing anything again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wattcast.core.arrays import (
    Array,
    append_axes,
    sweep_values,
)
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.power.activity import module_utilisation
from wattcast.power.power_model import mean_power_w
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import GovernedDivision
from wattcast.predictor.pipeline import (
    ClockedTimeline,
    KernelDetail,
    StretchDetail,
    WorkloadTotals,
    choose_details,
    detail_at_clock,
    join_details,
    kernel_activity,
)
from wattcast.predictor.timeline import Timeline
from wattcast.predictor.unmeasured_kernels import UnmeasuredKernels, find_unmeasured
from wattcast.workload.graph import Graph


@dataclass(frozen=True, eq=False, repr=False)
class PredictionBasis:
    """What a prediction was computed from."""

    graph: Graph
    timeline: Timeline
    totals: WorkloadTotals
    gpu: Gpu
    at: OperatingPoint  # with the clock that the governor settled at
    bundle: Bundle
    asked_w: Array  # (*sweep,) mean power at the clock asked for, whatever the limit
    run: ClockedTimeline | None = None  # at that clock; None for a sweep, whose arrays are large
    # of runs whose stretches settle at clocks of their own
    divisions: tuple[GovernedDivision, ...] = ()

    @cached_property
    def detail(self) -> KernelDetail:
        """The workload by kernel and by part of the power."""
        if not self.divisions:
            return detail_at_clock(self.timeline, self.at, self.bundle, self.run)
        whole = self._join_division(self.divisions[0])
        for division in self.divisions[1:]:
            assert division.points is not None, "one division of several holds for some points"
            points = np.broadcast_to(division.points, self.totals.power_w.shape)
            whole = choose_details(points, self._join_division(division), whole)
        return whole

    def _join_division(self, division: GovernedDivision) -> KernelDetail:
        """Join the details of the stretches of a run, which has the shape of the sweep."""
        parts = []
        for part in division.stretches:
            timeline = part.stretch.timeline
            detail = detail_at_clock(timeline, part.at, self.bundle, part.run)
            parts.append(StretchDetail(part.stretch.rows, timeline.calls, detail))
        return join_details(len(self.timeline.calls), parts)

    @cached_property
    def reasons(self) -> UnmeasuredKernels:
        """The reason why each kernel is outside what was measured; kernels inside have none."""
        return find_unmeasured(self.timeline, self.bundle)

    @cached_property
    def kernel_utilisation(self) -> Mapping[str, Array]:
        """How busy each module is while a kernel runs: part -> ``(*sweep, kernel)``."""
        kernel_s = self.detail.kernel_s
        kernel_hz = np.broadcast_to(self.detail.effective_hz, kernel_s.shape)
        no_gap_s = np.zeros(kernel_s.shape[:-1])
        activity = kernel_activity(
            self.timeline,
            kernel_s,
            kernel_hz,
            no_gap_s,
            self.at,
        )
        # the interval of the gap comes last and takes the clock of any kernel
        interval_hz = np.concatenate([kernel_hz, kernel_hz[..., :1]], axis=-1)
        return module_utilisation(activity, self.gpu, interval_hz)

    @property
    def time_shares(self) -> Array:
        """Each kernel's share of the time in kernels, ``(*sweep, kernel)``."""
        spent_s = self.detail.kernel_s * self.timeline.calls
        return mean_power_w(spent_s, spent_s.sum(axis=-1)[..., np.newaxis])

    @property
    def energy_shares(self) -> Array:
        """Each kernel's share of the energy of kernels, ``(*sweep, kernel)``."""
        spent_j = self.detail.kernel_j * self.timeline.calls
        return mean_power_w(spent_j, spent_j.sum(axis=-1)[..., np.newaxis])

    @property
    def working_share(self) -> Array:
        """The share of the energy that is not drawn by an idle GPU between kernels,
        ``(*sweep,)``."""
        total_j = self.totals.energy_j
        idle_share = np.divide(
            self.detail.gap_j, total_j, out=np.zeros_like(total_j), where=total_j > 0.0
        )
        return np.clip(1.0 - idle_share, 0.0, 1.0)

    @property
    def limit_w(self) -> Array:
        """The power limit that holds the run, ``(*sweep,)``; infinite where none does."""
        if self.at.duration_s is not None:
            return np.full((), np.inf)  # nothing holds a burst to the limit
        limit = self.at.power_limit_w
        return sweep_values(self.gpu.power.limit_w if limit is None else limit)

    def idle_power_w(self) -> Array:
        """Compute the watts of an idle GPU at the clock of the run, ``(*sweep,)``."""
        clock_hz = sweep_values(np.asarray(self.at.clock_hz))
        return self.bundle.power.idle_power_w(clock_hz, sweep_values(self.at.temperature_c))

    def average_stretches(self, compute: Callable[[WorkloadTotals, Array], Array]) -> Array:
        """Compute a column of each stretch, from its totals and the power that it asks for, and
        average it over the time.
        """
        if not self.divisions:
            return compute(self.totals, self.asked_w)
        shape = self.totals.power_w.shape
        whole: Array | None = None
        for division in self.divisions:
            division_s = sum(part.totals.latency_s for part in division.stretches)
            mean: Array = np.zeros(())
            for part in division.stretches:
                column = compute(part.totals, part.asked_w)
                time_share = np.asarray(part.totals.latency_s / division_s)
                mean = mean + column * append_axes(time_share, column.ndim)
            if whole is None or division.points is None:
                whole = mean
            else:
                points = np.broadcast_to(division.points, shape)
                whole = np.where(append_axes(points, mean.ndim), mean, whole)
        assert whole is not None, "a run has a stretch"
        return whole
