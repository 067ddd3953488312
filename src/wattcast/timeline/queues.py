"""Host and device queues: when the device waits for the host.

The host issues operators in order, each at a cost c; the device runs them in order, each for d;
kernel i starts at max(issued_i, end of i-1). In max-plus algebra a stretch of the issue order is
three numbers: C = Σc, D = Σd, and L, its end when both queues start empty. Stretches compose as

    C = C₁ + C₂,   D = D₁ + D₂,   L = max(L₁ + D₂, C₁ + L₂)

and a stretch repeated R times has L_R = L + (R - 1)·max(C, D). So eighty equal layers cost as much
to evaluate as one.
"""

from __future__ import annotations

import numpy as np

from wattcast.arrays import Array
from wattcast.timeline.timeline import Timeline


def latency_s(timeline: Timeline, kernel_s: Array) -> Array:
    """End of the last kernel when the host starts at zero, ``(*sweep,)``."""
    host_s, kernel_s = np.broadcast_arrays(timeline.host_s, kernel_s)
    host = end = np.zeros(kernel_s.shape[:-1])
    for segment in timeline.kernels.segments:
        c, d = host_s[..., segment.rows], kernel_s[..., segment.rows]
        one = (c + d) + (segment.counts - 1.0) * np.maximum(c, d)  # each position by itself
        c, d = c * segment.counts, d * segment.counts
        before = np.cumsum(c, axis=-1) - c
        after = np.cumsum(d[..., ::-1], axis=-1)[..., ::-1] - d
        c_sum, d_sum = c.sum(axis=-1), d.sum(axis=-1)
        once = (before + one + after).max(axis=-1)
        many = once + (segment.repeat - 1) * np.maximum(c_sum, d_sum)
        end = np.maximum(end + segment.repeat * d_sum, host + many)
        host = host + segment.repeat * c_sum
    return np.asarray(end)


def busy_s(timeline: Timeline, kernel_s: Array) -> Array:
    """Time the device spends in kernels, ``(*sweep,)``."""
    return np.asarray((kernel_s * timeline.calls).sum(axis=-1))
