"""One configuration with everything there is to show of it: prediction, power over time, clock
curve, memory.

Reports, the page in the browser and ``--plot`` all take a ``ConfigurationView``, so that they show
the numbers of one prediction.
"""

from __future__ import annotations

from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import cached_property
from typing import Unpack

import numpy as np
import numpy.typing as npt

from wattcast.core import bad_value
from wattcast.core.arrays import Array, as_sweep
from wattcast.hardware import Gpu
from wattcast.kernels.kernel_table import IssueSegment, RowIndex
from wattcast.options.keywords import SettingKeywords
from wattcast.predictor import api
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import KernelDetail, total_at_clock
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.timeline import Timeline, list_engine_steps
from wattcast.workload import build_model
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import load_workload

# Launches beyond which each stretch of the issue order is drawn at its mean power.
MOST_LAUNCHES = 200_000
CLOCK_POINTS = 48  # points of a clock curve
_NO_WAIT_S = 1e-12  # rounding, not a wait
GAP = "waiting for the host"


@dataclass(frozen=True)
class PowerTrace:
    """Intervals that follow one another without a hole; the last axis of ``part_w`` is the
    module.
    """

    start_s: Array  # (interval,)
    end_s: Array  # (interval,)
    part_w: Array  # (interval, part)
    parts: tuple[str, ...]
    labels: tuple[str, ...]  # of ``which``: operators, then the gap
    which: RowIndex  # (interval,) index into ``labels``; -1 where several are one
    whole: bool  # False: too many launches, stretches are drawn at their mean

    @property
    def duration_s(self) -> float:
        """Seconds from the first launch to the end of the last kernel."""
        return float(self.end_s[-1])

    @property
    def energy_j(self) -> float:
        """Joules under the curve."""
        length_s = self.end_s - self.start_s
        return float((length_s[:, np.newaxis] * self.part_w).sum())

    @property
    def idle(self) -> npt.NDArray[np.bool_]:
        """Intervals in which the device waits."""
        return np.asarray(self.which == len(self.labels) - 1)

    def part(
        self,
        first: int,
        last: int,
    ) -> PowerTrace:
        """Return some of the intervals, at their own times."""
        chosen = slice(first, last)
        return replace(
            self,
            start_s=self.start_s[chosen],
            end_s=self.end_s[chosen],
            part_w=self.part_w[chosen],
            which=self.which[chosen],
        )

    def binned(self, bins: int) -> PowerTrace:
        """Return the same energy in at most ``bins`` steps of equal length.

        A shorter trace is returned unchanged.
        """
        if len(self.start_s) <= bins:
            return self
        edges = np.linspace(0.0, self.duration_s, bins + 1)
        # joules of each part up to the moments of the trace, and up to the edges of the steps
        moments_s = np.concatenate([self.start_s, self.end_s[-1:]])
        length_s = (self.end_s - self.start_s)[:, np.newaxis]
        spent_j = np.cumsum(length_s * self.part_w, axis=0)
        joules = np.vstack([np.zeros(len(self.parts)), spent_j])
        at_edges = np.stack([np.interp(edges, moments_s, part_j) for part_j in joules.T], axis=-1)
        part_w = np.diff(at_edges, axis=0) / np.diff(edges)[:, np.newaxis]
        which = np.full(bins, -1)
        return replace(
            self,
            start_s=edges[:-1],
            end_s=edges[1:],
            part_w=part_w,
            which=which,
        )


def build_power_trace(prediction: Prediction) -> PowerTrace:
    """Build the power trace of a prediction of one configuration."""
    timeline = prediction.basis.timeline
    detail = prediction.basis.detail
    totals = prediction.basis.totals
    if detail.kernel_s.ndim != 1:
        sweep = f"a sweep of {detail.kernel_s.shape[:-1]}"
        raise bad_value("power over time", "a single operating point", sweep)
    launches = float(timeline.calls.sum())
    gap_s = float(totals.latency_s - totals.busy_s)
    gap_w = np.zeros(len(detail.parts))
    if gap_s > _NO_WAIT_S:  # what the kernels do not take, by part
        kernel_j = (detail.kernel_s * timeline.calls) @ detail.kernel_part_w
        gap_w = np.asarray((detail.part_j - kernel_j) / gap_s)
    is_whole = launches <= MOST_LAUNCHES
    trace_intervals = _each_launch if is_whole else _each_stretch
    start_s, end_s, which, part_w = trace_intervals(timeline, detail, gap_w)
    labels = (*(str(op) for op in timeline.kernels.ops), GAP)
    return PowerTrace(
        start_s,
        end_s,
        part_w,
        detail.parts,
        labels,
        which,
        is_whole,
    )


def _each_launch(
    timeline: Timeline,
    detail: KernelDetail,
    gap_w: Array,
) -> tuple[Array, Array, RowIndex, Array]:
    """Return every launch, and every gap before one."""
    order = np.concatenate([_list_launches(segment) for segment in timeline.kernels.segments])
    run_s = detail.kernel_s[order]
    end_s = _end_launches(timeline, detail, order)
    start_s = end_s - run_s
    previous_s = np.concatenate([[0.0], end_s[:-1]])
    has_waited = start_s - previous_s > _NO_WAIT_S
    start_s = np.where(has_waited, start_s, previous_s)

    # (launch, 2): the gap before a launch, and the launch; gaps that last no time are left out
    gap = len(detail.kernel_s)
    which = np.stack([np.full(order.size, gap), order], axis=-1)
    starts = np.stack([previous_s, start_s], axis=-1)
    ends = np.stack([start_s, end_s], axis=-1)
    is_interval = np.stack([has_waited, np.ones(order.size, dtype=bool)], axis=-1)
    levels = np.vstack([detail.kernel_part_w, gap_w])
    chosen = which[is_interval]
    return starts[is_interval], ends[is_interval], chosen, levels[chosen]


def _end_launches(
    timeline: Timeline,
    detail: KernelDetail,
    order: RowIndex,
) -> Array:
    """Return when each launch ends.

    end_i = D_i + max_{j<=i} (C_j - D_{j-1}), with C the issue times and D the running sum of
    durations, solves the queue recursion in one pass.
    """
    run_s = detail.kernel_s[order]
    if timeline.engine is not None:
        return np.cumsum(run_s + _spread_waiting(timeline, detail))
    issued_s = np.cumsum(np.broadcast_to(timeline.host_s, detail.kernel_s.shape)[order])
    done_s = np.cumsum(run_s)
    return np.asarray(done_s + np.maximum.accumulate(issued_s - (done_s - run_s)))


def _list_launches(segment: IssueSegment) -> RowIndex:
    """Return the rows of a stretch of the issue order, one a launch."""
    return np.tile(np.repeat(segment.rows, segment.counts.astype(np.int64)), segment.repeat)


def _spread_waiting(timeline: Timeline, detail: KernelDetail) -> Array:
    """Return the wait before each launch: what the host takes longer for a step, in equal parts."""
    waits = []
    for stretch in list_engine_steps(timeline, detail.kernel_s):
        launches = sum(len(_list_launches(segment)) for segment in stretch.segments)
        wait_s = float(stretch.latency_s - stretch.device_s)
        waits.append(np.full(launches, wait_s / max(launches, 1)))
    return np.concatenate(waits)


def _engine_stretches(
    timeline: Timeline,
    detail: KernelDetail,
    gap_w: Array,
) -> tuple[list[float], list[Array]]:
    """Return seconds of each run of equal steps of an engine, and its joules by part."""
    seconds = []
    joules = []
    for stretch in list_engine_steps(timeline, detail.kernel_s):
        part_j = float(stretch.latency_s - stretch.device_s) * gap_w
        for segment in stretch.segments:
            run_s = segment.repeat * detail.kernel_s[segment.rows] * segment.counts
            part_j = part_j + run_s @ detail.kernel_part_w[segment.rows]
        seconds.append(float(stretch.latency_s))
        joules.append(np.asarray(part_j))
    return seconds, joules


def _each_stretch(
    timeline: Timeline,
    detail: KernelDetail,
    gap_w: Array,
) -> tuple[Array, Array, RowIndex, Array]:
    """Return one interval per stretch at its mean power; repeated R times it takes R·max(C, D)."""
    if timeline.engine is not None:
        lengths_s, joules = _engine_stretches(timeline, detail, gap_w)
    else:
        lengths_s, joules = _host_stretches(timeline, detail, gap_w)
    seconds = np.array(lengths_s)
    end_s = np.cumsum(seconds)
    start_s = np.concatenate([[0.0], end_s[:-1]])
    part_w = np.array(joules) / seconds[:, np.newaxis]
    return start_s, end_s, np.full(len(seconds), -1), part_w


def _host_stretches(
    timeline: Timeline,
    detail: KernelDetail,
    gap_w: Array,
) -> tuple[list[float], list[Array]]:
    """Return seconds of each stretch that a host issues, and its joules by part."""
    host_s = np.broadcast_to(timeline.host_s, detail.kernel_s.shape)
    seconds = []
    joules = []
    for segment in timeline.kernels.segments:
        rows = segment.rows
        counts = segment.counts
        run_s = float(detail.kernel_s[rows] @ counts)
        issue_s = float(host_s[rows] @ counts)
        once_s = max(run_s, issue_s)
        kernel_j = (detail.kernel_s[rows] * counts) @ detail.kernel_part_w[rows]
        part_j = kernel_j + (once_s - run_s) * gap_w
        seconds.append(segment.repeat * once_s)
        joules.append(segment.repeat * part_j)
    return seconds, joules


@dataclass(frozen=True)
class MemoryRoom:
    """What a run holds in memory by purpose, and the largest batch that would fit.

    None stands for what is not known.
    """

    footprint: build_model.MemoryFootprint | None
    capacity_byte: float
    largest_batch: int | None


@dataclass(frozen=True)
class ConfigurationView:
    """A prediction of one configuration.

    Curves and memory are computed from its basis when they are needed.
    """

    prediction: Prediction
    model: ModelSpec | None = None  # None: the workload is a list of operators
    options: ModelOptions = field(default_factory=ModelOptions)

    @property
    def gpu(self) -> Gpu:
        """The GPU that it was predicted on."""
        return self.prediction.basis.gpu

    @cached_property
    def trace(self) -> PowerTrace:
        """Power over time of one run."""
        return build_power_trace(self.prediction)

    @cached_property
    def clocks(self) -> dict[str, Array]:
        """Latency, power and energy at all clocks of the card, under the same power limit.

        Power rises with the clock, so every clock that the governor lowers ends at the same one,
        found once. A run whose stretches settle at clocks of their own goes through the governor at
        every clock.
        """
        basis = self.prediction.basis
        low_hz, high_hz = find_clock_span(self.gpu)
        asked_hz = np.linspace(low_hz, high_hz, CLOCK_POINTS)
        at_top = replace(basis.at, clock_hz=high_hz)
        top = run_governed(basis.timeline, basis.gpu, at_top, basis.bundle)[0]
        if top.divisions:
            at_all = replace(basis.at, clock_hz=as_sweep(asked_hz))
            settled, totals, _ = run_governed(basis.timeline, basis.gpu, at_all, basis.bundle)
            clock_hz = np.array(settled.clock_hz[..., 0])
        else:
            clock_hz = np.minimum(asked_hz, float(top.clock_hz[..., 0]))
            at_settled = replace(basis.at, clock_hz=as_sweep(clock_hz))
            totals = total_at_clock(basis.timeline, at_settled, basis.bundle)
        return {
            "asked_hz": asked_hz,
            "clock_hz": clock_hz,
            "latency_s": np.array(np.broadcast_to(totals.latency_s, asked_hz.shape)),
            "power_w": np.array(totals.power_w),
            "energy_j": np.array(totals.energy_j),
        }

    @cached_property
    def room(self) -> MemoryRoom:
        """What the run holds in the GPU's memory."""
        return compute_memory_room(self.model, self.gpu, self.options)


def view_configuration(
    workload: load_workload.Workload,
    gpu: Gpu,
    options: ModelOptions = ModelOptions(),  # noqa: B008  (frozen)
    **settings: Unpack[SettingKeywords],
) -> ConfigurationView:
    """Predict a workload on a GPU, and view the prediction.

    The settings are those of ``wattcast.predict``.
    """
    (prediction,) = api.predict_many([(workload, vars(options))], gpu, **settings)
    return ConfigurationView(prediction, load_workload.find_model(workload), options)


def find_clock_span(gpu: Gpu) -> tuple[float, float]:
    """Return the lowest and highest core clock."""
    lowest_hz = float(np.mean(gpu.clocks.lowest_hz))
    highest_hz = float(np.mean(gpu.clocks.max_hz))
    return lowest_hz, highest_hz


def compute_memory_room(
    model: ModelSpec | None,
    gpu: Gpu,
    options: ModelOptions,
) -> MemoryRoom:
    """Return what a model holds on a GPU; without a model nothing is known but the capacity."""
    capacity_byte = float(np.mean(gpu.memory.capacity_byte))
    if model is None:
        return MemoryRoom(None, capacity_byte, None)
    largest = build_model.find_largest_batch(model, options, capacity_byte)
    return MemoryRoom(build_model.compute_footprint(model, options), capacity_byte, largest)
