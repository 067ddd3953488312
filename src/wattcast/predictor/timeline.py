"""Describe what each kernel costs before any clock is chosen, and time it at a clock.

Within a phase on-chip and off-chip work overlap; phases follow one another. So a kernel takes
Σ_phase max(cycles/f, seconds) at effective clock f. Changing the core clock never changes the
seconds, and a sweep over clocks repeats nothing but this sum.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from wattcast.core import bad_value
from wattcast.core.arrays import Array, Sweepable, take_sweep
from wattcast.kernels import Kernels
from wattcast.kernels.kernel_table import IssueSegment, RowIndex
from wattcast.predictor.engine_host import EngineHost, HostBounds
from wattcast.predictor.kernel_coefficients import CLOCK_LAW
from wattcast.workload.operator_base import Operator


@dataclass(frozen=True)
class KernelPhase:
    """A stretch of every kernel; zero where a kernel has none. Each broadcasts to ``(*sweep,
    kernel)``.

    Phases are kept apart rather than on one more axis, so that one that does not vary over a sweep
    costs a sweep nothing.
    """

    name: str
    cycles: Array | None  # on-chip work; None: none
    seconds: Array | None  # DRAM and link work

    def change(
        self,
        cycles: Callable[[Array], Array],
        seconds: Callable[[Array], Array],
    ) -> KernelPhase:
        """Return the phase with its cycles and its seconds changed, as far as it has any."""
        changed_cycles = None if self.cycles is None else cycles(self.cycles)
        changed_seconds = None if self.seconds is None else seconds(self.seconds)
        return KernelPhase(self.name, changed_cycles, changed_seconds)

    def select_rows(self, rows: npt.NDArray[np.int64]) -> KernelPhase:
        """Return the phase of some of the kernels."""

        def take_rows(column: Array) -> Array:
            # the sweep of each kernel stays end to end in memory
            return column.T.take(rows, axis=0).T

        return self.change(take_rows, take_rows)


@dataclass(frozen=True, eq=False, repr=False)
class IssueOrder:
    """The issue order of all segments laid end to end, with what issuing costs the host."""

    rows: npt.NDArray[np.int64]  # (position,)
    counts: Array  # (position,) how often in a row each is issued
    host_s: Array  # (position,)
    starts: npt.NDArray[np.intp]  # where each segment begins
    repeats: list[int]
    segment_host_s: list[float]  # to issue each segment once
    many: bool  # whether any kernel is issued several times in a row


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Clock-free cost and event counts of each kernel."""

    kernels: Kernels
    phases: tuple[KernelPhase, ...]
    tensor_rows: npt.NDArray[np.int64]  # kernels that issue tensor instructions
    # (*sweep, tensor row) cycles the tensor pipes are busy, for the effective clock
    tensor_cycles: Array
    events: tuple[str, ...]
    value: Array  # (kernel, event) counts of one run of each kernel
    time_factor: Array  # (kernel,) learned factor on the time of a kernel
    energy_factor: Array  # (kernel,) learned factor on what a kernel's events cost
    active: Array  # (*sweep, kernel) SMs with work, averaged over the kernel
    calls: Array  # (kernel,) how often each runs
    host_s: Array  # (*sweep, kernel) what issuing it costs the host
    # (2, kernel) how like the nearest row that time and energy were learned from, 1 to 0; NaN where
    # nothing was
    near: Array | None = None
    waiting_sm: float = 1.0  # energy of an SM that waits for memory, over that of one with work
    # the host of an engine that replays its kernels, whose ``host_s`` are zero
    engine: EngineHost | None = None
    # counts of one run that follow the design, (*sweep, kernel), in place of those of ``value``
    varied: Mapping[str, Array] = field(default_factory=dict)

    @property
    def has_host(self) -> bool:
        """Whether a host could hold this workload up."""
        return self.engine is not None or bool(np.any(self.host_s))

    def scale_host(self, factor: float) -> Timeline:
        """Return the timeline with a host that takes ``factor`` times as long for everything."""
        engine = self.engine
        if engine is not None:
            engine = replace(engine, factor=factor * engine.factor)
        return replace(self, host_s=factor * self.host_s, engine=engine)

    @property
    def total(self) -> Array:
        """Counts of the whole workload, ``(event,)``."""
        return np.asarray(self.calls @ self.value)

    @property
    def weighted(self) -> Array:
        """Counts of the whole workload with each kernel's multiplied by its energy factor,
        ``(event,)``; of a sweep that changes counts ``(*sweep, event)``.
        """
        weight = self.calls * self.energy_factor
        counts = np.asarray(weight @ self.value)
        if not self.varied:
            return counts
        sums = {event: values @ weight for event, values in self.varied.items()}
        shape = np.broadcast_shapes(*(values.shape for values in sums.values()))
        swept = np.broadcast_to(counts, (*shape, len(counts))).copy()
        for event, values in sums.items():
            swept[..., self.events.index(event)] = values
        return swept

    @property
    def kernel_value(self) -> Array:
        """Counts of one run of each kernel, ``(*sweep, kernel, event)``."""
        if not self.varied:
            return self.value
        shape = np.broadcast_shapes(*(values.shape for values in self.varied.values()))
        swept = np.broadcast_to(self.value, (*shape, len(self.events))).copy()
        for event, values in self.varied.items():
            swept[..., self.events.index(event)] = values
        return swept

    def select_rows(
        self,
        rows: npt.NDArray[np.int64],
        ops: Sequence[Operator],
        segments: tuple[IssueSegment, ...],
    ) -> Timeline:
        """Return a timeline of some of the kernels, issued in an order of their own."""
        kernels = self.kernels.select_rows(rows, ops, segments)
        # the place of each row among the tensor rows of the whole, -1 where it is none
        tensor_place = np.full(len(self.calls), -1)
        tensor_place[self.tensor_rows] = np.arange(len(self.tensor_rows))
        place = tensor_place.take(rows)
        tensor_rows = np.flatnonzero(place >= 0)
        return replace(
            self,
            kernels=kernels,
            phases=tuple(phase.select_rows(rows) for phase in self.phases),
            tensor_rows=tensor_rows,
            tensor_cycles=self.tensor_cycles.take(place.take(tensor_rows), axis=-1),
            value=self.value.take(rows, axis=0),
            time_factor=self.time_factor.take(rows),
            energy_factor=self.energy_factor.take(rows),
            active=self.active.take(rows, axis=-1),
            calls=kernels.calls,
            host_s=self.host_s.take(rows, axis=-1),
            near=None if self.near is None else self.near.take(rows, axis=-1),
            varied={event: counts.take(rows, axis=-1) for event, counts in self.varied.items()},
        )

    def select_points(self, points: npt.NDArray[np.intp], size: int) -> Timeline:
        """Return the timeline of some points of a sweep of ``size`` points.

        The host of an engine must not follow the sweep.
        """

        def take_points(values: Array) -> Array:
            return take_sweep(values, points, size) if values.ndim > 1 else values

        return replace(
            self,
            phases=tuple(phase.change(take_points, take_points) for phase in self.phases),
            tensor_cycles=take_points(self.tensor_cycles),
            active=take_points(self.active),
            host_s=take_points(self.host_s),
            varied={event: take_points(counts) for event, counts in self.varied.items()},
        )

    def delay_kernels(self, extra_s: Array) -> Timeline:
        """Return this timeline with ``extra_s`` ``(kernel,)`` more seconds in the fixed phase of
        each run.
        """
        fixed, *later_phases = self.phases
        assert fixed.cycles is None, "the fixed phase is of seconds alone"
        seconds = extra_s if fixed.seconds is None else fixed.seconds + extra_s
        return replace(self, phases=(replace(fixed, seconds=seconds), *later_phases))

    @cached_property
    def tensor_phases(self) -> tuple[KernelPhase, ...]:
        """The phases of the tensor rows alone, for the effective clock."""
        return tuple(phase.select_rows(self.tensor_rows) for phase in self.phases)

    @cached_property
    def engine_groups(self) -> tuple[EngineGroup, ...]:
        """The runs of equal steps of the engine, with what its host takes for each."""
        assert self.engine is not None
        groups = []
        for step, neighbours in groupby(self.kernels.segments, key=attrgetter("step")):
            segments = tuple(neighbours)
            host = None
            if step is not None:
                host = self.engine.bound_steps(step, segments[0].step_share * step.count)
            groups.append(
                EngineGroup(
                    segments=segments,
                    rows=np.concatenate([segment.rows for segment in segments]),
                    runs=np.concatenate([item.repeat * item.counts for item in segments]),
                    host=host,
                )
            )
        return tuple(groups)

    @cached_property
    def order(self) -> IssueOrder | None:
        """The issue order laid end to end; None where the host's cost is swept."""
        if self.host_s.ndim != 1:
            return None
        segments = self.kernels.segments
        lengths = [len(segment.rows) for segment in segments]
        starts = np.cumsum([0, *lengths[:-1]])
        rows = np.concatenate([segment.rows for segment in segments])
        counts = np.concatenate([segment.counts for segment in segments])
        host_s = self.host_s.take(rows)
        return IssueOrder(
            rows=rows,
            counts=counts,
            host_s=host_s,
            starts=starts,
            repeats=[segment.repeat for segment in segments],
            segment_host_s=np.add.reduceat(host_s * counts, starts).tolist(),
            many=bool((counts > 1).any()),
        )


_LEAST_SUMMED = 512  # loads, from which on a sum of bends is faster than ``np.interp``


def slow_memory_path(timeline: Timeline, top_hz: Sweepable) -> Timeline:
    """Return the timeline of a card whose way to device memory runs on the core clock below
    ``CLOCK_LAW.memory_knee``.

    Time t in device memory becomes t·max(1, 0.86·f_top/f), at least 0.86·f_top·t cycles of the core
    clock, as on a GTX Titan X (16 microbenchmarks bound by device memory, 16 core clocks, within 2
    %, [Guerreiro2018]). Predictions follow the clock later, where L2 does: models on an A100 at 510
    to 1,410 MHz are 6.9 % off, and 7.6 % with a knee chosen on other models. This is how much
    slower memory-bound work at a low clock may turn out.
    """
    knee_hz = CLOCK_LAW.memory_knee * top_hz
    phases = []
    for phase in timeline.phases:
        if phase.cycles is not None and phase.seconds is not None:
            phase = replace(phase, cycles=np.maximum(phase.cycles, knee_hz * phase.seconds))
        phases.append(phase)
    return replace(timeline, phases=tuple(phases))


def compute_kernel_s(phases: tuple[KernelPhase, ...], effective_hz: Array) -> Array:
    """Compute the duration of one run of each kernel, ``(*sweep, kernel)``: Σ_phase max(cycles/f,
    seconds).

    ``effective_hz`` broadcasts to ``(*sweep, kernel)``; one reciprocal of it serves all phases.
    """
    period_s = 1.0 / effective_hz
    total: Array = np.zeros(())
    for phase in phases:
        if phase.cycles is None:
            total = total + (0.0 if phase.seconds is None else phase.seconds)
            continue
        part_s = np.multiply(phase.cycles, period_s, order="F")
        if phase.seconds is not None:
            part_s = np.maximum(part_s, phase.seconds, out=_reuse_array(part_s, phase.seconds))
        total = np.add(part_s, total, out=_reuse_array(part_s, total))
    return np.asarray(total)


def compute_waiting_s(phases: tuple[KernelPhase, ...], effective_hz: Array) -> Array:
    """Compute the seconds in which a kernel waits for device memory, ``(*sweep, kernel)``.

    That is the time beyond which its work on the chip would have been done, Σ_phase max(seconds -
    cycles/f, 0).
    """
    waiting_s: Array = np.zeros(())
    for phase in phases:
        if phase.cycles is not None and phase.seconds is not None:
            excess_s = phase.seconds - phase.cycles / effective_hz
            waiting_s = waiting_s + np.maximum(excess_s, 0.0)
    return np.asarray(waiting_s)


def _reuse_array(array: Array, other: Array) -> Array | None:
    """Return the array itself, for a step in place, where ``other`` does not make it wider.

    It may: in a sweep over memory alone, nothing on chip varies.
    """
    fits = other.shape == array.shape[array.ndim - other.ndim :]
    return array if fits else None


def compute_latency_s(
    timeline: Timeline,
    kernel_s: Array,
    ahead_s: Array | float = 0.0,
) -> Array:
    """Compute when the last kernel ends if the host starts at zero, ``(*sweep,)``.

    A device that still has ``ahead_s`` of earlier work to do at the start lets the host issue so
    much earlier; the time is that from the end of the earlier work.

    The host issues kernels in order at a cost c_i each, the device runs them in order for d_i each,
    so kernel i ends at max(end_{i-1}, C_i) + d_i with C_i = Σ_{j<=i} c_j. With D_i = Σ_{j<=i} d_j
    and lag = max_i(C_i - D_{i-1}), a segment that repeats R times ends at max(end + R·D, host + D +
    lag + (R-1)·max(C, D)).

    A sweep goes kernel by kernel, ten times as fast as with one array of all; a single design takes
    all kernels at once, which is three times as fast for it.

    The host of an engine prepares a step while the GPU computes the one before: each step takes the
    longer of both.
    """
    if timeline.engine is not None:
        stretches = list_engine_steps(timeline, kernel_s)
        return np.asarray(sum(stretch.latency_s for stretch in stretches))
    if kernel_s.ndim == 1 and np.ndim(ahead_s) == 0 and timeline.order is not None:
        return _run_at_once(timeline.order, kernel_s, float(ahead_s))

    host_end_s = np.zeros(())
    end_s = np.asarray(ahead_s, dtype=np.float64)
    if kernel_s.ndim == 1 and end_s.ndim:
        kernel_s = np.broadcast_to(kernel_s, (*end_s.shape, len(kernel_s)))
    for segment in timeline.kernels.segments:
        issue_s, device_s, lag_s = _run_segment(segment, timeline.host_s, kernel_s)
        later_s = (segment.repeat - 1) * np.maximum(issue_s, device_s)
        held_up_s = host_end_s + (device_s + lag_s + later_s)
        end_s = np.maximum(end_s + segment.repeat * device_s, held_up_s)
        host_end_s = host_end_s + segment.repeat * issue_s
    return np.asarray(end_s - ahead_s)


@dataclass(frozen=True, eq=False, repr=False)
class EngineGroup:
    """Neighbouring segments that are one run of equal steps of an engine, whatever they take."""

    segments: tuple[IssueSegment, ...]
    rows: RowIndex  # (position,) kernels of all segments
    runs: Array  # (position,) how often each of them runs
    host: HostBounds | None  # None: these kernels belong to no step


@dataclass(frozen=True, eq=False, repr=False)
class EngineStretch:
    """Neighbouring segments that are one run of equal steps of an engine, and what it takes."""

    segments: tuple[IssueSegment, ...]
    device_s: Array  # (*sweep,) in kernels
    latency_s: Array  # (*sweep,) with the host, where that takes longer


def list_engine_steps(
    timeline: Timeline,
    kernel_s: Array,
) -> list[EngineStretch]:
    """List the runs of equal steps of an engine; a step takes as long as its kernels or as its
    host.
    """
    stretches = []
    for group in timeline.engine_groups:
        device_s = np.asarray(kernel_s[..., group.rows] @ group.runs)
        latency_s = device_s if group.host is None else group.host.join(device_s)
        stretches.append(EngineStretch(group.segments, device_s, latency_s))
    return stretches


SMALL_SWEEP = 2**16  # kernels times points, up to which one array of all kernels is faster


def _run_segment(
    segment: IssueSegment,
    host_s: Array,
    kernel_s: Array,
) -> tuple[Array, Array, Array]:
    """Return C, D and the lag of a segment that runs once, each ``(*sweep,)``."""
    if kernel_s.size <= SMALL_SWEEP:
        return _run_small_segment(segment, host_s, kernel_s)
    shape = np.broadcast_shapes(host_s.shape[:-1], kernel_s.shape[:-1])
    c_sum: Array = np.zeros(host_s.shape[:-1])
    d_sum = np.zeros(shape)
    lag = np.full(shape, -np.inf)
    lag_here = np.empty(shape)
    for row, count in zip(segment.rows.tolist(), segment.counts.tolist(), strict=True):
        c = host_s[..., row]
        d = kernel_s[..., row]
        np.subtract(c_sum + c, d_sum, out=lag_here)
        if count > 1:  # the last of several equal kernels in a row may lag furthest
            lag_here += (count - 1.0) * np.maximum(c - d, 0.0)
        np.maximum(lag, lag_here, out=lag)
        c_sum = c_sum + count * c
        d_sum += d if count == 1 else count * d
    return c_sum, d_sum, lag


def _run_small_segment(
    segment: IssueSegment,
    host_s: Array,
    kernel_s: Array,
) -> tuple[Array, Array, Array]:
    """Do what ``_run_segment`` does, with all kernels in one array."""
    counts = segment.counts
    c = host_s.take(segment.rows, axis=-1)
    d = kernel_s.take(segment.rows, axis=-1)
    c_ends = np.add.accumulate(counts * c, axis=-1)
    d_ends = np.add.accumulate(counts * d, axis=-1)
    # C_i - D_{i-1} of the first of several equal kernels in a row, then of the one that lags most
    lags = (c_ends - d_ends) - counts * (c - d) + c
    lags = lags + (counts - 1.0) * np.maximum(c - d, 0.0)
    return c_ends[..., -1], d_ends[..., -1], np.maximum.reduce(lags, axis=-1)


def _run_at_once(
    order: IssueOrder,
    kernel_s: Array,
    ahead_s: float,
) -> Array:
    """Return the latency of a single design, all kernels of all segments in one array."""
    d = kernel_s.take(order.rows)
    ahead = order.host_s - d
    furthest = d  # each kernel's lag, less the sum of ``ahead`` up to it: host - ahead
    if order.many:
        furthest = order.host_s + (order.counts - 1.0) * np.maximum(ahead, 0.0)
        ahead = ahead * order.counts
        d = d * order.counts
        furthest -= ahead
    ahead_sum = np.add.accumulate(ahead)
    before_segment = ahead_sum.take(order.starts) - ahead.take(order.starts)
    furthest_in_segment = np.maximum.reduceat(ahead_sum + furthest, order.starts)

    device_s = np.add.reduceat(d, order.starts).tolist()
    lag_s = (furthest_in_segment - before_segment).tolist()
    host_end_s = 0.0
    end_s = ahead_s
    for place, repeat in enumerate(order.repeats):
        issue_s = order.segment_host_s[place]
        once_s = device_s[place]
        held_up_s = once_s + lag_s[place] + (repeat - 1) * max(issue_s, once_s)
        end_s = max(end_s + repeat * once_s, host_end_s + held_up_s)
        host_end_s += repeat * issue_s
    return np.asarray(end_s - ahead_s)


def compute_busy_s(timeline: Timeline, kernel_s: Array) -> Array:
    """Compute the time that the device spends in kernels, ``(*sweep,)``."""
    return np.asarray(kernel_s @ timeline.calls)


def count_waves(kernels: Kernels, sm_count: Sweepable) -> Array:
    """Count the waves of units over the SMs, ``(*sweep, kernel)``; tiles that fill an SM take whole
    waves.
    """
    waves = np.divide(kernels.work.units, sm_count, order="F")
    return np.ceil(waves, out=np.maximum(waves, 1.0), where=kernels.fills_sm)


def count_rounds(kernels: Kernels, sm_count: Sweepable) -> Array:
    """Count how often an SM takes new units while the last ones still run, ``(*sweep, kernel)``; at
    least once.
    """
    rounds = np.divide(kernels.work.units / kernels.work.slots, sm_count, order="F")
    return np.maximum(rounds, 1.0, out=rounds)


def count_active_sms(kernels: Kernels, waves: Array) -> Array:
    """Count the SMs with work, averaged over a kernel's waves, ``(*sweep, kernel)``."""
    return np.asarray(kernels.work.units / np.maximum(waves, 1e-30))


@dataclass(frozen=True)
class ClockLaw:
    """Effective over set clock: ``without`` tensor work, else linear between points of activity.

    ``activity`` is the share of cycles in which tensor pipes are busy, times data toggling, times
    (set clock / ``top_hz``) to ``clock_power``: what slows the chip is the load on its supply,
    which falls with clock and voltage. Zero power: the set clock does not matter.
    """

    without: float
    activity: Array
    ratio: Array
    toggling: float = 1.0
    clock_power: float = 0.0
    top_hz: float = 1.0
    in_bursts: bool = True  # whether it holds in the first milliseconds of a run too

    def __post_init__(self) -> None:
        matches = self.activity.shape == self.ratio.shape and self.activity.size > 0
        if not matches or (np.diff(self.activity) <= 0).any():
            expected = "a ratio for each of rising activities"
            raise bad_value("effective clock", expected, self.activity.tolist())
        ratios = np.append(self.ratio, self.without)
        if not ((ratios > 0) & (ratios <= 1)).all():
            raise bad_value("effective clock", "ratios above 0 and at most 1", self.ratio.tolist())

    def load(self, clock_hz: Array) -> Array:
        """Return the load on the supply of one unit of tensor activity at a set clock."""
        return np.asarray(self.toggling * (clock_hz / self.top_hz) ** self.clock_power)

    def carry(self, load: Array) -> Array:
        """Return the ratio of effective to set clock under a load on the supply.

        A supply that carries an effective clock at some set clock carries it at every higher one,
        which skips cycles. So where the line falls faster than the set clock rises, from a crest
        x_c on, the effective clock stays: R(x) = R(x_c)·(x_c/x)^(1/p).
        """
        if load.size < _LEAST_SUMMED:
            ratio = np.asarray(np.interp(load, self.activity, self.ratio))
            most = float(load.max()) if load.size else 0.0
        else:
            most = float(load.max())
            ratio = self._sum_bends(load, most)
        for crest_load, clock in self._crests:
            if most > crest_load:
                beyond = np.flatnonzero(load > crest_load)
                kept = clock / load.take(beyond) ** (1.0 / self.clock_power)
                np.put(ratio, beyond, np.maximum(ratio.take(beyond), kept))
        return ratio

    def _sum_bends(self, load: Array, most: float) -> Array:
        """Return the ratio on the line through the points, as ``np.interp`` does, for a sweep
        several times as fast: R = c + Σ s_i·max(x, x_i), with loads of at least 0.
        """
        level, bends = self._bends
        ratio = np.full(load.shape, level)
        part = np.empty(load.shape)
        for activity, slope in bends:
            if activity >= most:
                ratio += slope * activity
                continue
            if activity > 0.0:
                np.maximum(load, activity, out=part)
                part *= slope
            else:
                np.multiply(load, slope, out=part)
            ratio += part
        return ratio

    @cached_property
    def _bends(self) -> tuple[float, list[tuple[float, float]]]:
        """Return c, and the points with the change of slope at each, the last one's to level."""
        slopes = np.diff(self.ratio) / np.diff(self.activity)
        changes = np.diff(np.concatenate([[0.0], slopes, [0.0]]))
        bends = list(zip(self.activity.tolist(), changes.tolist(), strict=True))
        level = float(self.ratio[0]) - sum(activity * slope for activity, slope in bends)
        return level, bends

    @cached_property
    def is_level(self) -> bool:
        """Whether no load changes the ratio."""
        return bool((self.ratio == self.ratio[0]).all())

    @property
    def lowest_ratio(self) -> float:
        """No more than the ratio under any load."""
        return float(self.ratio.min())

    @cached_property
    def _crests(self) -> list[tuple[float, float]]:
        """Loads from which on a higher set clock would run slower by the line, and the effective
        clock there, load^(1/p)·ratio, relative to the set clock of a load of one.

        On a piece r_0 - s·(x - x_0) that clock is highest at x = (r_0/s + x_0) / (1 + p).
        """
        if self.clock_power == 0.0:
            return []
        crests = []
        for place in range(len(self.activity) - 1):
            start, end = self.activity[place : place + 2].tolist()
            high, low = self.ratio[place : place + 2].tolist()
            if low >= high:
                continue
            slope = (high - low) / (end - start)
            highest = (high / slope + start) / (1.0 + self.clock_power)
            crest = max(highest, start)
            if crest < end:
                ratio = high - slope * (crest - start)
                crests.append((crest, crest ** (1.0 / self.clock_power) * ratio))
        return crests


def compute_effective_hz(
    timeline: Timeline,
    clock_hz: Sweepable,
    law: ClockLaw | None,
    rows: RowIndex | None = None,
) -> Array:
    """Compute the effective clock of each kernel; it broadcasts to ``(*sweep, kernel)``.

    With ``rows``, that of other kernels on tensor cores is left at ``law.without``.

    Activity is the share of the cycles that a kernel really takes, so its wait for device memory
    counts in cycles of the effective clock, y times the set clock f:

        y = R(B·load / T(y)),    T(y) = Σ_phase max(cycles, seconds·f·y)

    T and R rise with y, R by less than in proportion where ``ClockLaw.carry`` holds it, so there is
    one such y. What a phase that only waits takes is counted at the set clock.
    """
    set_hz = np.asarray(clock_hz, dtype=np.float64)
    if law is None:
        return set_hz
    steady, waits = _split_waits(timeline.tensor_phases, set_hz)
    load = timeline.tensor_cycles * law.load(set_hz)
    shapes = [values.shape for values in chain([load, steady], chain.from_iterable(waits))]
    shape = np.broadcast_shapes(*shapes)
    running_hz = np.full((*shape[:-1], len(timeline.calls)), law.without, order="F")
    if running_hz.ndim == 1:
        running_hz[timeline.tensor_rows] = _find_ratio(law, steady, waits, load)
    else:  # one kernel after another, whose arrays stay in cache
        columns = [np.broadcast_to(values, shape) for values in (steady, load)]
        asked = timeline.tensor_rows if rows is None else np.intersect1d(timeline.tensor_rows, rows)
        for row in asked.tolist():
            place = int(timeline.tensor_rows.searchsorted(row))
            own_steady, own_load = (column[..., place] for column in columns)
            own_waits = [
                (own[..., min(place, own.shape[-1] - 1)], wait[..., min(place, wait.shape[-1] - 1)])
                for own, wait in waits
            ]
            running_hz[..., row] = _find_ratio(law, own_steady, own_waits, own_load)
    running_hz *= set_hz
    return running_hz


# Cycles of a phase on the chip, and those of the set clock that it waits for device memory
_Waits = list[tuple[Array, Array]]
# Numerics of ``_settle_ratio``: changing them changes no result that anybody would see.
_SETTLED = 1e-9  # of the set clock: from there the next step ends a third of it off at most
_MOST_SETTLING_STEPS = 40
_MOSTLY_MOVING = 0.75  # share of kernels
_LEAST_RISE = 0.75  # of the excess over the ratio: it lies between 0.5 and 1, and steps get shorter


def _split_waits(phases: tuple[KernelPhase, ...], set_hz: Array) -> tuple[Array, _Waits]:
    """Return the cycles of phases that no effective clock changes, and the other phases."""
    steady: Array = np.zeros(())
    waits: _Waits = []
    for phase in phases:
        if phase.cycles is None:
            if phase.seconds is not None:
                steady = steady + phase.seconds * set_hz
        elif phase.seconds is None:
            steady = steady + phase.cycles
        else:
            waits.append((phase.cycles, phase.seconds * set_hz))
    return steady, waits


def _find_ratio(
    law: ClockLaw,
    steady: Array,
    waits: _Waits,
    load: Array,
) -> Array:
    """Return the ratio of effective to set clock that waits counted at that ratio give."""
    highest = float(law.ratio.max())
    cycles = steady
    waiting = []
    for own_cycles, wait_cycles in waits:
        part = np.asarray(wait_cycles * highest)
        waiting.append(part > own_cycles)
        cycles = cycles + np.maximum(part, own_cycles)
    ratio = law.carry(_divide_cycles(load, cycles))
    if not waiting or law.is_level:
        return ratio
    is_waiting = waiting[0]
    for here in waiting[1:]:
        is_waiting = is_waiting | here
    if is_waiting.shape != ratio.shape:
        is_waiting = np.broadcast_to(is_waiting, ratio.shape)
    count = int(np.count_nonzero(is_waiting))
    if count == 0:
        return ratio
    takes_all = 2 * count > ratio.size  # where to select them takes longer than to do all
    rows = np.arange(0) if takes_all else np.flatnonzero(is_waiting)

    def pick(values: Array) -> Array:
        everywhere = values
        if values.shape != ratio.shape:  # to broadcast takes longer than to take some
            everywhere = np.broadcast_to(values, ratio.shape)
        return everywhere if takes_all else everywhere.take(rows)

    # phases that wait at every ratio, those that wait at none, and others
    steady = pick(steady)
    following: Array = np.zeros(1)
    mixed: _Waits = []
    for (own_cycles, wait_cycles), here in zip(waits, waiting, strict=True):
        own = pick(own_cycles)
        wait = pick(wait_cycles)
        if here.all() and (wait * law.lowest_ratio >= own).all():
            following = following + wait
        elif not here.any():
            steady = steady + own
        else:
            mixed.append((own, wait))
    kernels = _WaitingKernels(pick(load), steady, following, mixed)
    settled = _settle_ratio(law, kernels, pick(ratio))
    if takes_all:
        return settled
    np.put(ratio, rows, settled)
    return ratio


@dataclass(frozen=True)
class _WaitingKernels:
    """Kernels whose cycles are steady + following·y + Σ max(own, wait·y) at a ratio y."""

    load: Array
    steady: Array
    following: Array
    mixed: _Waits

    def select_rows(self, rows: npt.NDArray[np.intp]) -> _WaitingKernels:
        """Return some of the kernels."""
        mixed = [(own.take(rows), wait.take(rows)) for own, wait in self.mixed]
        following = self.following if self.following.size == 1 else self.following.take(rows)
        steady = self.steady
        if steady.shape != self.load.shape:
            steady = np.broadcast_to(steady, self.load.shape)
        steady = steady.take(rows)
        return _WaitingKernels(self.load.take(rows), steady, following, mixed)

    def find_excess(self, law: ClockLaw, y: Array) -> Array:
        """Return by how much a ratio exceeds the one that its load gives."""
        cycles = self.following * y
        cycles += self.steady
        for own_cycles, wait_cycles in self.mixed:
            part = wait_cycles * y
            cycles += np.maximum(part, own_cycles, out=part)
        load = np.divide(self.load, cycles, out=cycles)
        return np.asarray(y - law.carry(load))


def _settle_ratio(
    law: ClockLaw,
    kernels: _WaitingKernels,
    first: Array,
) -> Array:
    """Return the ratios that give the loads they come from; the highest ratio gives ``first``.

    Each kernel takes steps of its own along its first chord [Press2007, 9.2] and stays where it
    rests, so that a batch does what each of its members would alone.
    """
    start = float(law.ratio.max())
    excess = kernels.find_excess(law, first)
    # excess over ratio; ratios follow waits by less than in proportion
    rise = np.ones(first.shape)
    np.divide(start - first - excess, start - first, out=rise, where=first < start)
    slope = 1.0 / np.maximum(rise, _LEAST_RISE)
    settled = first - excess * slope
    is_moving = np.abs(excess) > _SETTLED
    places: npt.NDArray[np.intp] | None = None  # of the kernels of ``y``; None: it has all
    y = settled
    for _ in range(_MOST_SETTLING_STEPS):
        count = int(np.count_nonzero(is_moving))
        if count == 0:
            break
        if count < _MOSTLY_MOVING * y.size:  # above, to select them takes longer than to do all
            rows = np.flatnonzero(is_moving)
            kernels = kernels.select_rows(rows)
            slope = slope.take(rows)
            places = rows if places is None else places.take(rows)
            y = y.take(rows)
            is_moving = np.ones(rows.shape, dtype=bool)
        excess = kernels.find_excess(law, y)
        y = np.subtract(y, excess * slope, out=y.copy(), where=is_moving)
        if places is None:
            settled = y
        else:
            np.put(settled, places, y)
        is_moving &= np.abs(excess) > _SETTLED
    return settled


def _divide_cycles(load: Array, cycles: Array) -> Array:
    """Return the load on the supply of each kernel; none of a kernel without cycles."""
    if cycles.size and cycles.min() > 0.0:
        return np.asarray(load / cycles)
    no_load = np.zeros(np.broadcast_shapes(load.shape, cycles.shape), order="F")
    return np.divide(load, cycles, out=no_load, where=cycles > 0)
