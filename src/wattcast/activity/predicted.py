"""Timeline at an operating point -> Activity."""

from __future__ import annotations

import numpy as np

from wattcast.activity.activity import Activity, Source
from wattcast.arrays import Array
from wattcast.hardware import OperatingPoint
from wattcast.timeline import Timeline


def per_kernel(timeline: Timeline, duration_s: Array, gap_s: Array, at: OperatingPoint) -> Activity:
    """One run of each kernel, then the idle gaps as one last interval in which nothing happens."""
    counts = np.broadcast_to(timeline.value, (*duration_s.shape, len(timeline.events)))
    nothing = np.zeros((*duration_s.shape[:-1], 1, len(timeline.events)))
    return Activity(
        duration_s=np.concatenate([duration_s, gap_s[..., np.newaxis]], axis=-1),
        value=np.concatenate([counts, nothing], axis=-2),
        events=timeline.events,
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
