"""The only feedback in Wattcast: power lowers the clock.

The governor holds the workload's time-averaged power at the limit by lowering the set clock. So:
find the highest clock, up to the one asked for, at which mean power meets the limit. Only the cheap
last step of the flow is repeated, on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array, Scalar, per_sweep
from wattcast.fitted import Bundle
from wattcast.flow import Ran, Running, Totals
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.timeline import Timeline

STEPS = 8  # of the secant below that the catalogue takes at most to meet the limit to rounding
_MOST_STEPS = 30  # where voltage rises in stairs
_ROUNDING, _ENOUGH = 2e-13, 1e-8  # of the limit: what ends the search, and what ends it after ``STEPS``


@dataclass(frozen=True)
class Settled:
    """Where the governor settles."""

    at: OperatingPoint  # with the set clock, as NVML would report it, (*sweep, 1)
    capped: npt.NDArray[np.bool_]  # (*sweep,) the power limit lowered the clock
    met: npt.NDArray[np.bool_]  # (*sweep,) mean power is within the limit; False at the lowest clock

    @property
    def clock_hz(self) -> Array:
        """The set clock, ``(*sweep, 1)``."""
        return np.asarray(self.at.clock_hz, dtype=np.float64)


def settle(timeline: Timeline, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> Settled:
    """Highest set clock at which mean power meets what the governor makes of the limit, by a secant.

    Mean power rises with the clock: voltage and idle power do, and time does not. Where even the
    lowest clock draws too much, the lowest clock is given and ``met`` is False.
    """
    return _settled(Running(timeline, at, bundle), gpu, at, bundle)[0]


def governed(timeline: Timeline, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> tuple[Settled, Totals, Ran | None]:
    """Where the governor settles, and the workload there; of a single design also how it ran, which is little."""
    running = Running(timeline, at, bundle)
    settled, ran = _settled(running, gpu, at, bundle)
    return settled, running.totals(running.at(settled.clock_hz) if ran is None else ran), ran


def _settled(running: Running, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> tuple[Settled, Ran | None]:
    top_hz = np.asarray(gpu.clocks.max_hz if at.clock_hz is None else at.clock_hz, dtype=np.float64)
    top_hz = top_hz if top_hz.ndim else top_hz.reshape(1)
    limit_w = per_sweep(_limit(gpu, at)) * bundle.settles
    ran = running.at(top_hz)
    wanted = np.asarray(running.power_w(ran) - limit_w)
    low_hz = np.minimum(gpu.clocks.min_hz if gpu.clocks.min_hz is not None else 0.3 * top_hz, top_hz)
    if not wanted.ndim:
        met = True
        if wanted > 0:
            ran, met = _secant_of_one(running, low_hz.item(), top_hz.item(), wanted.item(), limit_w.item())
        return Settled(replace(at, clock_hz=ran.clock_hz), wanted > 0, np.array(met)), ran
    if not (wanted > 0).any():
        return Settled(replace(at, clock_hz=_shaped(top_hz, wanted)), wanted > 0, wanted <= 0), None
    low, high = _shaped(low_hz, wanted)[..., 0], _shaped(top_hz, wanted)[..., 0]

    def over(clock_hz: Array) -> Array:
        return np.asarray(running.power_w(running.at(clock_hz[..., np.newaxis])) - limit_w)

    solved, solvable = _secant(over, low, high, wanted, limit_w)
    clock = np.where((wanted > 0)[..., None], solved[..., None], top_hz)
    return Settled(replace(at, clock_hz=clock), wanted > 0, solvable | (wanted <= 0)), None


def _secant(
    over: Callable[[Array], Array], least: Array, high: Array, at_high: Array, limit_w: Array
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Where a rising function is zero, elementwise, and whether it is anywhere; ``least`` where it is not even there.

    The first guess takes power as proportional to the clock; then the line through the last two points
    [Press2007, 9.2] says where to look next. Where that is outside the ends known so far: the lowest clock, if
    nothing below the limit is known, or their middle. Points that are there stay, so that a batch does what each of
    its members would.
    """
    low, before, at_before = least, high, at_high
    point = np.minimum(np.maximum(high * (limit_w / (limit_w + at_high)), least), high)
    value, free = over(point), at_high <= 0  # free: no limit lowers their clock
    for step in range(1, _MOST_STEPS):
        there = free | (np.abs(value) <= _close(step) * limit_w) | ((value > 0) & (point <= least))
        if there.all():
            break
        low, high = np.where(value > 0, low, point), np.where(value > 0, point, high)
        rise = value - at_before
        back = np.divide(value * (point - before), rise, out=np.full(rise.shape, np.inf), where=rise != 0)
        following = point - back
        inside = (low <= following) & (following <= high)
        other = np.where((following < low) & (low == least), least, 0.5 * (low + high))
        before, at_before = point, value
        point = np.where(there, point, np.where(inside, following, other))
        value = over(point)
    return point, (value <= _ENOUGH * limit_w) | (point > least)


def _secant_of_one(running: Running, least: float, high: float, at_high: float, limit_w: float) -> tuple[Ran, bool]:
    """The same of a single design, which arrays would only slow down: how it runs at the clock found."""
    low, before, at_before = least, high, at_high
    point = max(high * (limit_w / (limit_w + at_high)), least)
    ran, value = _over_one(running, point, limit_w)
    for step in range(1, _MOST_STEPS):
        if abs(value) <= _close(step) * limit_w or (value > 0 and point <= least):
            break
        low, high = (low, point) if value > 0 else (point, high)
        rise = value - at_before
        following = point - (value * (point - before) / rise if rise != 0 else math.inf)
        before, at_before = point, value
        other = least if following < low == least else 0.5 * (low + high)
        point = following if low <= following <= high else other
        ran, value = _over_one(running, point, limit_w)
    return ran, value <= _ENOUGH * limit_w or point > least


def _close(step: int) -> float:
    return _ROUNDING if step < STEPS else _ENOUGH


def _over_one(running: Running, clock_hz: float, limit_w: float) -> tuple[Ran, float]:
    ran = running.at(np.array([clock_hz]))
    return ran, running.power_w(ran).item() - limit_w


def _limit(gpu: Gpu, at: OperatingPoint) -> Array:
    limit: Scalar = gpu.power.limit_w if at.power_limit_w is None else at.power_limit_w
    return np.asarray(limit, dtype=np.float64)


def _shaped(clock_hz: Array, like: Array) -> Array:
    """A clock broadcast to ``(*sweep, 1)``."""
    return np.array(np.broadcast_to(clock_hz, (*like.shape, 1)))
