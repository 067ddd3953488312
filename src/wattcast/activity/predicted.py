"""Timeline at an operating point -> Activity.

To the events of the timeline comes one that a clock decides: cycles of SMs with work resident,
active SMs · (t - t_fixed) · f, since a waiting SM draws power too, but not while a kernel is launched.

``priced`` activities are what power models see: each kernel's events times its learned energy factor.
"""

from __future__ import annotations

import numpy as np

from wattcast.activity.activity import Activity, Source
from wattcast.arrays import Array
from wattcast.hardware import OperatingPoint
from wattcast.timeline import Timeline

BUSY = "busy_sm_cycle"


def busy_cycles(timeline: Timeline, kernel_s: Array, effective_hz: Array) -> Array:
    """Cycles of busy SMs in one run of each kernel, ``(*sweep, kernel)``."""
    fixed_s = timeline.phases[0].seconds
    working_s = kernel_s if fixed_s is None else kernel_s - fixed_s
    return np.asarray(working_s * effective_hz * timeline.active)


def per_kernel(
    timeline: Timeline,
    kernel_s: Array,
    effective_hz: Array,
    gap_s: Array,
    at: OperatingPoint,
    *,
    priced: bool = False,
) -> Activity:
    """One run of each kernel, then the idle gaps as one last interval in which nothing happens."""
    kernels, events = timeline.value.shape
    value = np.zeros((*kernel_s.shape[:-1], kernels + 1, events + 1))
    value[..., :-1, :-1] = timeline.value
    value[..., :-1, -1] = busy_cycles(timeline, kernel_s, effective_hz)
    if priced:
        value[..., :-1, :] *= timeline.energy_factor[:, np.newaxis]
    return Activity(
        duration_s=np.concatenate([kernel_s, gap_s[..., np.newaxis]], axis=-1),
        value=value,
        events=(*timeline.events, BUSY),
        at=at,
        source=Source.PREDICTED,
    )


def whole(timeline: Timeline, latency_s: Array, at: OperatingPoint) -> Activity:
    """The workload as one interval: counts of all its kernels over its latency."""
    return Activity(
        duration_s=latency_s[..., np.newaxis],
        value=timeline.total[..., np.newaxis, :],
        events=timeline.events,
        at=at,
        source=Source.PREDICTED,
    )


def priced(
    timeline: Timeline, kernel_s: Array, effective_hz: Array, latency_s: Array, at: OperatingPoint
) -> Activity:
    """The workload as one interval, as power models see it."""
    busy = busy_cycles(timeline, kernel_s, effective_hz) @ (timeline.calls * timeline.energy_factor)
    counts = np.broadcast_to(timeline.weighted, (*busy.shape, len(timeline.events)))
    value = np.concatenate([counts, busy[..., np.newaxis]], axis=-1)
    return Activity(
        duration_s=latency_s[..., np.newaxis],
        value=value[..., np.newaxis, :],
        events=(*timeline.events, BUSY),
        at=at,
        source=Source.PREDICTED,
    )
