"""The flow, composed: workload -> kernels -> timeline -> activity -> power -> energy. One screen.

``analyse`` is clock-free and done once; ``at_clock`` is the cheap last step that sweeps and
``equilibrium.py`` repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.activity import predicted
from wattcast.arrays import Array
from wattcast.energy import energy_j, mean_w, part_energy_j
from wattcast.fitted import Bundle
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import Kernels, lower
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
    return analyse_kernels(lower(graph, gpu, bundle.reference), gpu, bundle)


def analyse_kernels(kernels: Kernels, gpu: Gpu, bundle: Bundle) -> Timeline:
    """Kernels -> clock-free timeline on this GPU."""
    return schedule(kernels, gpu, bundle.corrections, bundle.launch, bundle.learned)


def at_clock(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> Totals:
    """Latency and mean power at a set clock (``at.clock_hz``, not None).

    All models are linear in counts at a given clock, so the workload's mean power is that of its
    counts added up, over its latency: no need to look at kernels one by one.
    """
    clock = effective_hz(timeline, _set_clock(at), bundle.clock_law)
    each_s = kernel_s(timeline, clock)
    total_s = latency_s(timeline, each_s)
    power = bundle.power.power(predicted.priced(timeline, each_s, clock, total_s, at))
    in_kernels_s = busy_s(timeline, each_s)
    cycles = (each_s * clock) @ timeline.calls
    return Totals(total_s, in_kernels_s, power.total_w[..., 0], mean_w(cycles, in_kernels_s))


def in_detail(timeline: Timeline, at: OperatingPoint, bundle: Bundle) -> Detail:
    """What :func:`at_clock` sums up, by kernel and by part."""
    clock = effective_hz(timeline, _set_clock(at), bundle.clock_law)
    each_s = kernel_s(timeline, clock)
    gap_s = np.maximum(latency_s(timeline, each_s) - busy_s(timeline, each_s), 0.0)
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


def _set_clock(at: OperatingPoint) -> Array:
    assert at.clock_hz is not None, "the governor has not spoken yet: call equilibrium.settle first"
    return np.asarray(at.clock_hz, dtype=np.float64)
