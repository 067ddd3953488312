"""What each kernel costs before any clock is chosen: cycles on chip, seconds off it.

Within a phase on-chip and off-chip work overlap; phases follow one another. So a kernel takes
Σ_phase max(cycles/f, seconds) at effective clock f. Changing the core clock never changes the
seconds, and a sweep over clocks repeats nothing but this sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels import Kernels
from wattcast.kernels.table import Segment
from wattcast.workload.graph import Operator


@dataclass(frozen=True)
class Phase:
    """A stretch of every kernel; zero where a kernel has none. Each broadcasts to ``(*sweep, kernel)``.

    Phases are kept apart rather than on one more axis, so that one that does not vary over a sweep
    costs a sweep nothing.
    """

    name: str
    cycles: Array | None  # on-chip work; None: none
    seconds: Array | None  # DRAM and link work

    def at(self, rows: npt.NDArray[np.int64]) -> Phase:
        """The phase of some kernels alone."""
        cycles = None if self.cycles is None else self.cycles[..., rows]
        seconds = None if self.seconds is None else self.seconds[..., rows]
        return Phase(self.name, cycles, seconds)


@dataclass(frozen=True)
class Stack:
    """All phases of all kernels, ``(phase, kernel)``: for one clock, in three steps whatever their number."""

    cycles: Array
    seconds: Array

    def at(self, rows: npt.NDArray[np.int64]) -> Stack:
        """The phases of some kernels alone."""
        return Stack(self.cycles.take(rows, axis=1), self.seconds.take(rows, axis=1))

    def cycles_at(self, clock_hz: Array | float) -> Array:
        """Cycles of each kernel at a clock, ``(kernel,)``: Σ_phase max(cycles, seconds·f)."""
        spent = self.seconds * clock_hz
        return np.asarray(np.add.reduce(np.maximum(spent, self.cycles, out=spent), axis=0))


def stacked(phases: tuple[Phase, ...]) -> Stack | None:
    """The phases on one more axis; None where one of them varies over a sweep."""
    given = [part for phase in phases for part in (phase.cycles, phase.seconds) if part is not None]
    if any(part.ndim != 1 for part in given):
        return None
    cycles, seconds = np.zeros((2, len(phases), len(given[0])))
    for i, phase in enumerate(phases):
        if phase.cycles is not None:
            cycles[i] = phase.cycles
        if phase.seconds is not None:
            seconds[i] = phase.seconds
    return Stack(cycles, seconds)


@dataclass(frozen=True)
class Order:
    """The issue order of all segments laid end to end, with what issuing costs the host."""

    rows: npt.NDArray[np.int64]  # (position,)
    counts: Array  # (position,) how often in a row each is issued
    host_s: Array  # (position,)
    starts: npt.NDArray[np.intp]  # where each segment begins
    repeats: list[int]
    segment_host_s: list[float]  # to issue each segment once
    many: bool  # whether any kernel is issued several times in a row


def ordered(segments: tuple[Segment, ...], host_s: Array) -> Order:
    """The issue order; ``host_s`` is of each kernel."""
    sizes = [len(segment.rows) for segment in segments]
    starts = np.array([0, *accumulate(sizes[:-1])])
    rows = np.concatenate([segment.rows for segment in segments])
    counts = np.concatenate([segment.counts for segment in segments])
    host = host_s.take(rows)
    return Order(
        rows,
        counts,
        host,
        starts,
        [segment.repeat for segment in segments],
        np.add.reduceat(host * counts, starts).tolist(),
        any(segment.many for segment in segments),
    )


@dataclass(frozen=True)
class Timeline:
    """Clock-free cost and event counts of each kernel."""

    kernels: Kernels
    phases: tuple[Phase, ...]
    tensor_rows: npt.NDArray[np.int64]  # kernels that issue tensor instructions
    tensor_cycles: Array  # (*sweep, tensor row) cycles the tensor pipes are busy, for the effective clock
    events: tuple[str, ...]
    value: Array  # (kernel, event) counts of one run of each kernel
    total: Array  # (event,) counts of the whole workload
    energy_factor: Array  # (kernel,) learned factor on what a kernel's events cost
    weighted: Array  # (event,) counts of the whole workload, each kernel's times its energy factor
    active: Array  # (*sweep, kernel) SMs with work, averaged over the kernel
    calls: Array  # (kernel,) how often each runs
    host_s: Array  # (*sweep, kernel) what issuing it costs the host
    # (2, kernel) how like the nearest row that time and energy were learned from, 1 to 0; NaN where nothing was
    near: Array | None = None

    def at(self, rows: npt.NDArray[np.int64], ops: tuple[Operator, ...], segments: tuple[Segment, ...]) -> Timeline:
        """Some kernels, issued in an order of their own, as a timeline of their own."""
        kernels = self.kernels.at(rows, ops, segments)
        phases = tuple(phase.at(rows) for phase in self.phases)
        place = np.full(len(self.calls), -1)
        place[self.tensor_rows] = np.arange(len(self.tensor_rows))
        tensor = place.take(rows)
        tensor_rows = np.flatnonzero(tensor >= 0)
        value, energy_factor, calls = self.value.take(rows, axis=0), self.energy_factor.take(rows), kernels.calls
        return Timeline(
            kernels=kernels,
            phases=phases,
            tensor_rows=tensor_rows,
            tensor_cycles=self.tensor_cycles.take(tensor.take(tensor_rows), axis=-1),
            events=self.events,
            value=value,
            total=calls @ value,
            energy_factor=energy_factor,
            weighted=(calls * energy_factor) @ value,
            active=self.active.take(rows, axis=-1),
            calls=calls,
            host_s=self.host_s.take(rows, axis=-1),
            near=None if self.near is None else self.near.take(rows, axis=-1),
        )

    def later(self, extra_s: Array) -> Timeline:
        """The same where each run of a kernel takes so many seconds more, ``(kernel,)``, in which SMs have no work:
        a part of its fixed phase, which comes first."""
        fixed, *rest = self.phases
        assert fixed.cycles is None, "the fixed phase is of seconds alone"
        seconds = extra_s if fixed.seconds is None else fixed.seconds + extra_s
        return replace(self, phases=(replace(fixed, seconds=seconds), *rest))

    @cached_property
    def stack(self) -> Stack | None:
        """The phases on one more axis, where nothing but the clock is swept."""
        return stacked(self.phases)

    @cached_property
    def tensor_phases(self) -> tuple[Phase, ...]:
        """The phases of the tensor rows alone, for the effective clock."""
        return tuple(phase.at(self.tensor_rows) for phase in self.phases)

    @cached_property
    def tensor_stack(self) -> Stack | None:
        """The same on one more axis."""
        return None if self.stack is None else self.stack.at(self.tensor_rows)

    @cached_property
    def order(self) -> Order | None:
        """The issue order laid end to end, where nothing but the clock is swept."""
        return ordered(self.kernels.segments, self.host_s) if self.host_s.ndim == 1 else None


def kernel_s(timeline: Timeline, effective_hz: Array) -> Array:
    """Duration of one run of each kernel, ``(*sweep, kernel)``, at an effective clock that broadcasts to it."""
    return phases_s(timeline.phases, timeline.stack, effective_hz)


def phases_s(phases: tuple[Phase, ...], stack: Stack | None, effective_hz: Array) -> Array:
    """Σ_phase max(cycles/f, seconds); one reciprocal of the clock serves all phases."""
    if stack is not None and effective_hz.ndim <= 1:
        return np.asarray(stack.cycles_at(effective_hz) / effective_hz)
    period_s = 1.0 / effective_hz
    total: Array = np.zeros(())
    for phase in phases:
        if phase.cycles is None:
            total = total + (0.0 if phase.seconds is None else phase.seconds)
            continue
        part_s = np.multiply(phase.cycles, period_s, order="F")
        if phase.seconds is not None:
            part_s = np.maximum(part_s, phase.seconds, out=_into(part_s, phase.seconds))
        total = np.add(part_s, total, out=_into(part_s, total))
    return np.asarray(total)


def _into(array: Array, other: Array) -> Array | None:
    """The array itself, for a step in place, where ``other`` does not make it wider.

    It may: of a sweep over memory alone, nothing on chip varies.
    """
    return array if array.shape == np.broadcast_shapes(array.shape, other.shape) else None
