"""The flow, composed: workload -> kernels -> timeline -> activity -> power -> energy. One screen.

``analyse`` is clock-free and done once; ``at_clock`` is the cheap last step that sweeps and
``equilibrium.py`` repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    return _totals(timeline, at, bundle, _run(timeline, _set_clock(at), bundle))


def _totals(timeline: Timeline, at: OperatingPoint, bundle: Bundle, ran: _Run) -> Totals:
    in_kernels_s = busy_s(timeline, ran.each_s)
    cycles = (ran.each_s * ran.effective_hz) @ timeline.calls
    power_w = _mean_power(timeline, at, bundle)(ran)
    return Totals(ran.latency_s, in_kernels_s, power_w, mean_w(cycles, in_kernels_s))


def power_at(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> Callable[[Array], Array]:
    """Mean power as a function of the set clock, ``(*sweep, 1)`` -> ``(*sweep,)``.

    That of :func:`at_clock`, for many clocks: what no clock changes is worked out once.
    """
    mean_power = _mean_power(timeline, at, bundle)
    return lambda clock_hz: mean_power(_run(timeline, clock_hz, bundle))


@dataclass(frozen=True)
class _Run:
    """A timeline at a set clock."""

    clock_hz: Array
    effective_hz: Array
    each_s: Array  # (*sweep, kernel)
    latency_s: Array  # (*sweep,)


def _run(timeline: Timeline, clock_hz: Array, bundle: Bundle) -> _Run:
    running_hz = effective_hz(timeline, clock_hz, bundle.clock_law)
    each_s = kernel_s(timeline, running_hz)
    return _Run(clock_hz, running_hz, each_s, latency_s(timeline, each_s))


def _mean_power(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> Callable[[_Run], Array]:
    model, names = bundle.power, (*timeline.events, predicted.BUSY)
    if not isinstance(model, ModulePower) or not set(model.required_events) <= set(names):
        return lambda ran: model.power(
            predicted.priced(
                timeline, ran.each_s, ran.effective_hz, ran.latency_s, replace(at, clock_hz=ran.clock_hz)
            )
        ).total_w[..., 0]
    cost = model.priced(names, timeline.weighted)
    weight = timeline.calls * timeline.energy_factor

    def power_w(ran: _Run) -> Array:
        busy = predicted.busy_cycles(timeline, ran.each_s, ran.effective_hz) @ weight
        return model.mean_w(cost, busy, ran.latency_s, ran.clock_hz, at.temperature_c)

    return power_w


def in_detail(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> Detail:
    """What :func:`at_clock` sums up, by kernel and by part."""
    return both(timeline, at, bundle)[1]


def both(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> tuple[Totals, Detail]:
    """:func:`at_clock` and :func:`in_detail`, for those who want both."""
    ran = _run(timeline, _set_clock(at), bundle)
    totals = _totals(timeline, at, bundle, ran)
    clock, each_s = ran.effective_hz, ran.each_s
    gap_s = np.maximum(totals.latency_s - totals.busy_s, 0.0)
    activity = predicted.per_kernel(timeline, each_s, clock, gap_s, at, priced=True)
    power = bundle.power.power(activity)
    joules = energy_j(power, activity.duration_s)
    calls = np.append(timeline.calls, 1.0)
    return totals, Detail(
        kernel_s=each_s,
        effective_hz=clock,
        kernel_part_w=power.part_w[..., :-1, :],
        kernel_j=joules[..., :-1],
        gap_j=joules[..., -1],
        part_j=np.einsum("...ip,i->...p", part_energy_j(power, activity.duration_s), calls),
        parts=power.parts,
        peak_w=power.total_w[..., :-1].max(axis=-1),
    )


def _set_clock(at: OperatingPoint) -> Array:
    assert at.clock_hz is not None, "the governor has not spoken yet: call equilibrium.settle first"
    return np.asarray(at.clock_hz, dtype=np.float64)
