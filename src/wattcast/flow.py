"""The flow, composed: workload -> kernels -> timeline -> activity -> power -> energy. One screen.

``analyse`` is clock-free and done once; ``at_clock`` is the cheap last step that sweeps and
``equilibrium.py`` repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.activity import predicted
from wattcast.arrays import Array
from wattcast.energy import energy_j, mean_w, part_energy_j
from wattcast.fitted import Bundle
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import Kernels, lower, lower_many
from wattcast.power.module import ModulePower
from wattcast.timeline import Timeline, kernel_s
from wattcast.timeline.clock import effective_hz
from wattcast.timeline.phases import schedule
from wattcast.timeline.queues import busy_s, latency_s
from wattcast.workload.graph import Graph


@dataclass(frozen=True)
class Totals:
    """A workload at a clock, as a whole; each ``(*sweep,)``."""

    latency_s: Array
    busy_s: Array  # time in kernels; the rest the device waits for the host
    power_w: Array  # mean over the latency
    effective_hz: Array  # mean over the time in kernels

    @property
    def energy_j(self) -> Array:
        """Joules of one run of the workload."""
        return self.power_w * self.latency_s


@dataclass(frozen=True)
class Detail:
    """The same by kernel and by part. The last interval of ``part_j`` is the idle gaps."""

    kernel_s: Array  # (*sweep, kernel) one run
    effective_hz: Array  # broadcasts to (*sweep, kernel)
    kernel_part_w: Array  # (*sweep, kernel, part)
    kernel_j: Array  # (*sweep, kernel) one run
    gap_j: Array  # (*sweep,)
    part_j: Array  # (*sweep, part) whole workload
    parts: tuple[str, ...]
    peak_w: Array  # (*sweep,) the most any kernel draws


def analyse(graph: Graph, gpu: Gpu, bundle: Bundle) -> Timeline:
    """Workload -> clock-free timeline on this GPU."""
    return _among(analyse_kernels(lower(graph, gpu, bundle.reference), gpu, bundle), bundle)


def analyse_many(graphs: Sequence[Graph], gpu: Gpu, bundle: Bundle) -> list[Timeline]:
    """The same of many workloads: their kernels are one table, of which each takes its rows."""
    kernels, parts = lower_many(graphs, gpu, bundle.reference)
    whole = analyse_kernels(kernels, gpu, bundle)
    return [_among(whole.at(*part), bundle) for part in parts]


def _among(timeline: Timeline, bundle: Bundle) -> Timeline:
    """The timeline of operators that were measured by themselves, among one another."""
    if bundle.cold is None:
        return timeline
    return timeline.later(bundle.cold.extra_s(timeline.kernels, bundle.reference.l2_byte))


def analyse_kernels(kernels: Kernels, gpu: Gpu, bundle: Bundle) -> Timeline:
    """Kernels -> clock-free timeline on this GPU."""
    return schedule(kernels, gpu, bundle.corrections, bundle.launch, bundle.learned)


def at_clock(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> Totals:
    """Latency and mean power at a set clock (``at.clock_hz``, not None).

    All models are linear in counts at a given clock, so the workload's mean power is that of its
    counts added up, over its latency: no need to look at kernels one by one.
    """
    running = Running(timeline, at, bundle)
    return running.totals(running.at(_set_clock(at)))


@dataclass(frozen=True)
class Ran:
    """A timeline at a set clock."""

    clock_hz: Array
    effective_hz: Array
    each_s: Array  # (*sweep, kernel)
    latency_s: Array  # (*sweep,)


class Running:
    """A timeline to be looked at under one clock after another: what none of them changes is worked out once."""

    def __init__(self, timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> None:
        self._timeline, self._at, self._bundle = timeline, at, bundle
        self._weight = timeline.calls * timeline.energy_factor
        self._module = bundle.power if isinstance(bundle.power, ModulePower) else None
        names = (*timeline.events, predicted.BUSY)
        self._cost = self._module.priced(names, timeline.weighted) if self._module is not None else None

    def at(self, clock_hz: Array) -> Ran:
        """The timeline at a set clock, ``(*sweep, 1)``."""
        running_hz = effective_hz(self._timeline, clock_hz, self._bundle.clock_law)
        each_s = kernel_s(self._timeline, running_hz)
        return Ran(clock_hz, running_hz, each_s, latency_s(self._timeline, each_s))

    def power_w(self, ran: Ran) -> Array:
        """Mean power, ``(*sweep,)``."""
        timeline = self._timeline
        if self._module is None or self._cost is None:
            at = replace(self._at, clock_hz=ran.clock_hz)
            seen = predicted.priced(timeline, ran.each_s, ran.effective_hz, ran.latency_s, at)
            return self._bundle.power.power(seen).total_w[..., 0]
        busy = predicted.busy_cycles(timeline, ran.each_s, ran.effective_hz) @ self._weight
        return self._module.mean_w(self._cost, busy, ran.latency_s, ran.clock_hz, self._at.temperature_c)

    def totals(self, ran: Ran) -> Totals:
        """The workload as a whole."""
        in_kernels_s = busy_s(self._timeline, ran.each_s)
        cycles = (ran.each_s * ran.effective_hz) @ self._timeline.calls
        return Totals(ran.latency_s, in_kernels_s, self.power_w(ran), mean_w(cycles, in_kernels_s))


def in_detail(timeline: Timeline, at: OperatingPoint, bundle: Bundle, ran: Ran | None = None) -> Detail:
    """What :func:`at_clock` sums up, by kernel and by part; ``ran``: the timeline at that clock, if it is known."""
    ran = Running(timeline, at, bundle).at(_set_clock(at)) if ran is None else ran
    clock, each_s = ran.effective_hz, ran.each_s
    gap_s = np.maximum(ran.latency_s - busy_s(timeline, each_s), 0.0)
    activity = predicted.per_kernel(timeline, each_s, clock, gap_s, at, priced=True)
    power = bundle.power.power(activity)
    joules = energy_j(power, activity.duration_s)
    calls = np.append(timeline.calls, 1.0)
    return Detail(
        kernel_s=each_s,
        effective_hz=clock,
        kernel_part_w=power.part_w[..., :-1, :],
        kernel_j=joules[..., :-1],
        gap_j=joules[..., -1],
        part_j=np.einsum("...ip,i->...p", part_energy_j(power, activity.duration_s), calls),
        parts=power.parts,
        peak_w=power.total_w[..., :-1].max(axis=-1),
    )


def both(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> tuple[Totals, Detail]:
    """:func:`at_clock` and :func:`in_detail`, for those who want both."""
    running = Running(timeline, at, bundle)
    ran = running.at(_set_clock(at))
    return running.totals(ran), in_detail(timeline, at, bundle, ran)


def _set_clock(at: OperatingPoint) -> Array:
    assert at.clock_hz is not None, "the governor has not spoken yet: call equilibrium.settle first"
    return np.asarray(at.clock_hz, dtype=np.float64)
