"""Intervals and support: how sure a prediction is, and when it is outside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.energy import mean_w
from wattcast.fitted import Bundle
from wattcast.flow import Detail, Totals
from wattcast.provenance import Status
from wattcast.timeline import Timeline


@dataclass(frozen=True)
class Interval:
    """Low and high ends around a prediction, each ``(*sweep, 2)``."""

    level: float
    latency_s: Array
    power_w: Array
    energy_j: Array


@dataclass(frozen=True)
class Support:
    """Whether the bundle has seen anything like this, and if not, why not."""

    inside: bool
    reason: str


def interval(timeline: Timeline, totals: Totals, detail: Detail, bundle: Bundle) -> Interval:
    """Interval of the whole from the residuals of its kernels' families.

    Each family's residual (measured over predicted) is weighted by its share of time, in logs: as if
    all kernels of a workload erred together. That is wider than independent errors would be. The
    energy interval multiplies the two, for the same reason.
    """
    share = mean_w(detail.kernel_s * timeline.calls, totals.busy_s[..., np.newaxis])
    of = [bundle.residuals[family] for family in timeline.kernels.family]
    latency = np.exp(share @ np.log([r.latency for r in of]))  # (*sweep, 2)
    power = np.exp(share @ np.log([r.power for r in of]))
    latency_s = totals.latency_s[..., np.newaxis] * latency
    power_w = totals.power_w[..., np.newaxis] * power
    return Interval(bundle.interval_level, latency_s, power_w, totals.energy_j[..., np.newaxis] * latency * power)


def support(timeline: Timeline, bundle: Bundle) -> Support:
    """Inside only when every family was fitted on held-out-tested measurements of this device."""
    if bundle.status is Status.PROVISIONAL:
        return Support(False, f"no measurements of {bundle.gpu} were fitted; coefficients are provisional")
    bare = sorted({f for f in timeline.kernels.family if bundle.residuals[f].rows == 0})
    if bare:
        return Support(False, f"no held-out rows for {', '.join(bare)}")
    return Support(True, f"all kernel families measured on {bundle.provenance.device or bundle.gpu}")
