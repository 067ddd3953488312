"""Find the clock at which the power governor holds a workload.

This is the only feedback in Wattcast: power lowers the clock. The governor holds the workload's time-averaged power
at the limit by lowering the set clock, so the answer is the highest clock, up to the one asked for, at which mean
power meets the limit. Only the cheap last step of the flow is repeated, on arrays.

It answers after ``REACTION_S``. Shorter work runs at the clock asked for, whatever it draws; longer work of a given
duration at the mean of those before and after, f = s·f_asked + (1 - s)·f_held with s = ``REACTION_S`` / duration.
"""

from __future__ import annotations

import numpy as np

from wattcast.core import dataclass, replace
from wattcast.core.arrays import Array, Mask, sweep_values
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.pipeline import ClockedTimeline, TimelineRunner, WorkloadTotals
from wattcast.predictor.timeline import Timeline

REACTION_S = 0.090  # from the begin of a load to a lower clock, on an H200 (docs/method/serving.md)
SECANT_STEPS = 8  # within which every card of the catalogue meets the limit closely
_MOST_STEPS = 30  # where voltage rises in stairs
_TIGHT, _CLOSE = 1e-10, 1e-8  # shares of the limit that end the search, before and after ``SECANT_STEPS``


@dataclass(frozen=True)
class GovernedPoint:
    """The operating point that the governor settles at."""

    at: OperatingPoint  # with the set clock, as NVML would report it, (*sweep, 1)
    capped: Mask  # (*sweep,) the power limit lowered the clock
    met: Mask  # (*sweep,) mean power is within the limit; False at the lowest clock
    asked_w: Array  # (*sweep,) mean power at the clock asked for, whatever the limit

    @property
    def clock_hz(self) -> Array:
        """The set clock, ``(*sweep, 1)``."""
        return np.asarray(self.at.clock_hz, dtype=np.float64)


def run_governed(
    timeline: Timeline, gpu: Gpu, at: OperatingPoint, bundle: Bundle
) -> tuple[GovernedPoint, WorkloadTotals, ClockedTimeline]:
    """Find the highest set clock at which mean power meets the limit that the governor holds, and the workload there.

    Mean power rises with the clock: voltage and idle power do, and time does not. Where even the
    lowest clock draws too much, the lowest clock is given and ``met`` is False.
    """
    runner = TimelineRunner(timeline, at, bundle)
    asked_hz = np.asarray(gpu.clocks.max_hz if at.clock_hz is None else at.clock_hz, dtype=np.float64)
    asked_hz = asked_hz if asked_hz.ndim else asked_hz.reshape(1)
    limit = gpu.power.limit_w if at.power_limit_w is None else at.power_limit_w
    limit_w = sweep_values(np.asarray(limit, dtype=np.float64)) * bundle.governor_share
    ran = runner.run_at(asked_hz)
    excess_w = np.asarray(ran.power_w - limit_w)
    asked_w = np.broadcast_to(ran.power_w, excess_w.shape)
    capped = excess_w > 0
    if not capped.any():
        clock_hz = np.array(np.broadcast_to(asked_hz, (*excess_w.shape, 1)))
        if ran.power_w.shape != excess_w.shape:  # a sweep over limits alone
            ran = runner.run_at(clock_hz)
        return GovernedPoint(replace(at, clock_hz=clock_hz), capped, ~capped, asked_w), runner.sum_up(ran), ran
    low_hz = np.minimum(gpu.clocks.lowest_hz, asked_hz)
    low, high = (np.array(np.broadcast_to(clock, (*excess_w.shape, 1))[..., 0]) for clock in (low_hz, asked_hz))
    ran, met = _search_clock(runner, low, high, excess_w, limit_w)
    if at.duration_s is not None:
        before = min(REACTION_S / at.duration_s, 1.0)
        ran = runner.run_at(before * high[..., np.newaxis] + (1.0 - before) * ran.clock_hz)
        capped, met = capped & (before < 1.0), met | (before == 1.0)
    return GovernedPoint(replace(at, clock_hz=ran.clock_hz), capped, met, asked_w), runner.sum_up(ran), ran


def _search_clock(
    runner: TimelineRunner, least: Array, high: Array, at_high: Array, limit_w: Array
) -> tuple[ClockedTimeline, Mask]:
    """Find the clocks at which power exceeds the limit by nothing, and whether there are any above ``least``.

    The first guess takes power as proportional to the clock; then the line through the last two points
    [Press2007, 9.2] gives the next. Where that lies outside the known ends, the next point is the lowest clock if
    nothing below the limit is known, else their middle. Points that have converged stay, so that a batch does what
    each of its members would alone.
    """
    low, before, at_before = least, high, at_high
    point = np.minimum(np.maximum(high * (limit_w / (limit_w + at_high)), least), high)
    uncapped = at_high <= 0
    for step in range(1, _MOST_STEPS + 1):
        ran = runner.run_at(point[..., np.newaxis])
        value = np.asarray(ran.power_w - limit_w)
        over = value > 0
        close = (_TIGHT if step < SECANT_STEPS else _CLOSE) * limit_w
        done = uncapped | (np.abs(value) <= close) | (over & (point <= least))
        if done.all() or step == _MOST_STEPS:
            break
        low, high = np.where(over, low, point), np.where(over, point, high)
        rise = value - at_before
        back = np.divide(value * (point - before), rise, out=np.full(rise.shape, np.inf), where=rise != 0)
        following = point - back
        inside = (low <= following) & (following <= high)
        other = np.where((following < low) & (low == least), least, 0.5 * (low + high))
        before, at_before = point, value
        point = np.where(done, point, np.where(inside, following, other))
    return ran, uncapped | (value <= _CLOSE * limit_w) | (point > least)
