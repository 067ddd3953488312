"""Host and device queues: when the device waits for the host.

The host issues operators in order, each at a cost c; the device runs them in order, each for d;
kernel i starts at max(issued_i, end of i-1). In max-plus algebra a stretch of the issue order is
three numbers: C = Σc, D = Σd, and L, its end when both queues start empty. Stretches compose as

    C = C₁ + C₂,   D = D₁ + D₂,   L = max(L₁ + D₂, C₁ + L₂)

and a stretch repeated R times has L_R = L + (R - 1)·max(C, D). So eighty equal layers cost as much
to evaluate as one. Within a stretch, L = D + max_j (C up to and with j - D before j): the furthest
the host ever lags behind.
"""

from __future__ import annotations

import numpy as np

from wattcast.arrays import Array
from wattcast.kernels.table import Segment
from wattcast.timeline.timeline import Order, Timeline


def latency_s(timeline: Timeline, kernel_s: Array) -> Array:
    """End of the last kernel when the host starts at zero, ``(*sweep,)``."""
    if kernel_s.ndim == 1 and timeline.order is not None:
        return _at_once(timeline.order, kernel_s)
    host = end = np.zeros(())
    for segment in timeline.kernels.segments:
        c_sum, d_sum, lag = _stretch(segment, timeline.host_s, kernel_s)
        many = d_sum + lag + (segment.repeat - 1) * np.maximum(c_sum, d_sum)
        end = np.maximum(end + segment.repeat * d_sum, host + many)
        host = host + segment.repeat * c_sum
    return np.asarray(end)


def _stretch(segment: Segment, host_s: Array, kernel_s: Array) -> tuple[Array, Array, Array]:
    """C, D and how far the host ever lags behind, of a segment run once; kernel after kernel, each a whole sweep."""
    c_sum: Array = np.zeros(host_s.shape[:-1])
    d_sum, lag, now = np.zeros((3, *kernel_s.shape[:-1]))
    lag -= np.inf
    for row, count in zip(segment.rows.tolist(), segment.counts.tolist(), strict=True):
        c, d = host_s[..., row], kernel_s[..., row]
        np.subtract(c_sum + c, d_sum, out=now)
        if count > 1:  # the last of several equal kernels in a row may lag furthest
            now += (count - 1.0) * np.maximum(c - d, 0.0)
        np.maximum(lag, now, out=lag)
        c_sum = c_sum + count * c
        d_sum += d if count == 1 else count * d
    return c_sum, d_sum, lag


def _at_once(order: Order, kernel_s: Array) -> Array:
    """The same for one design: all segments in one go, since each of so few kernels costs more than its numbers."""
    d = kernel_s.take(order.rows)
    ahead = order.host_s - d
    furthest = d  # each kernel's lag, less what is added up to and with it: host - ahead
    if order.many:
        furthest = order.host_s + (order.counts - 1.0) * np.maximum(ahead, 0.0)
        ahead, d = ahead * order.counts, d * order.counts
        furthest -= ahead
    lag = np.add.accumulate(ahead)
    before = lag.take(order.starts) - ahead.take(order.starts)
    lags = (np.maximum.reduceat(lag + furthest, order.starts) - before).tolist()
    host = end = 0.0
    segments = zip(order.repeats, order.segment_host_s, np.add.reduceat(d, order.starts).tolist(), lags, strict=True)
    for repeat, c_sum, d_sum, lag_s in segments:
        many = d_sum + lag_s + (repeat - 1) * max(c_sum, d_sum)
        end = max(end + repeat * d_sum, host + many)
        host += repeat * c_sum
    return np.asarray(end)


def busy_s(timeline: Timeline, kernel_s: Array) -> Array:
    """Time the device spends in kernels, ``(*sweep,)``."""
    return np.asarray(kernel_s @ timeline.calls)
