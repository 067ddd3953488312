"""Predict how a card's own limiter lengthens bursts of kernels.

A governor lowers clock and voltage within a tenth of a second, and a burst of nine replays is over
before. Cards on a slot guard their supply themselves, much sooner: a burst that asks for more than
k times the power limit skips clocks. The voltage stays, so that the share of clocks left is

    s = (k·P_limit - P_idle) / (P - P_idle),    P: power at the top clock

with k = ``over_limit``. Modules on a board (SXM, NVL72) show no such limit. Corrections that
were fitted to bursts hold what a limiter did to them, so that it bears on forecasts alone.
"""

from __future__ import annotations

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array, sweep_values
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.pipeline import kernel_activity
from wattcast.predictor.timeline import Timeline, compute_effective_hz, compute_kernel_s


class LimiterCoefficients(Coefficients):
    """When a card on a slot skips clocks."""

    over_limit: float  # power of a burst over the limit from which on clocks are skipped
    least_share: float  # of clocks that are left


LIMITER = load_coefficients("burst_limiter", LimiterCoefficients)
_STEPS = 8  # of clocks, between which times are taken as linear


def skips_clocks(gpu: Gpu) -> bool:
    """Return whether a card guards its own supply; those on a slot do, and have GDDR."""
    return gpu.memory.kind.startswith("GDDR")


def added_by_limiter_s(timeline: Timeline, gpu: Gpu, bundle: Bundle) -> Array:
    """Return the seconds by which a card's limiter makes each kernel of a burst longer,
    ``(kernel,)``.
    """
    top_hz = float(np.mean(sweep_values(gpu.clocks.max_hz)))
    top_s = time_burst_s(timeline, top_hz, bundle)
    if not skips_clocks(gpu):
        return np.zeros_like(top_s)
    asked_w, idle_w = _ask_power(timeline, top_s, top_hz, bundle)
    limit_w = float(np.mean(sweep_values(gpu.power.limit_w)))
    left = (LIMITER.over_limit * limit_w - idle_w) / (asked_w - idle_w)
    share = np.clip(left, LIMITER.least_share, 1.0)

    steps = np.linspace(share.min(), 1.0, _STEPS)
    step_s = np.array([time_burst_s(timeline, step * top_hz, bundle) for step in steps])
    kernels = range(len(share))
    limited_s = [np.interp(share[kernel], steps, step_s[:, kernel]) for kernel in kernels]
    return np.array(limited_s) - top_s


def time_burst_s(timeline: Timeline, clock_hz: float, bundle: Bundle) -> Array:
    """Return the seconds of each kernel in a burst at a set clock, ``(kernel,)``."""
    clock_law = bundle.for_bursts().clock_law
    running_hz = compute_effective_hz(timeline, np.asarray(clock_hz), clock_law)
    return compute_kernel_s(timeline.phases, running_hz)


def _ask_power(
    timeline: Timeline,
    kernel_s: Array,
    clock_hz: float,
    bundle: Bundle,
) -> tuple[Array, float]:
    """Return the watts that each kernel asks for at a clock, and those of an idle card."""
    clock_law = bundle.for_bursts().clock_law
    running_hz = compute_effective_hz(timeline, np.asarray(clock_hz), clock_law)
    at = OperatingPoint(clock_hz=np.asarray(clock_hz))
    gap_s = np.asarray(1.0)  # an idle second behind the kernels
    activity = kernel_activity(timeline, kernel_s, running_hz, gap_s, at, priced=True)
    total_w = bundle.power.power(activity).total_w
    return total_w[:-1], float(total_w[-1])
