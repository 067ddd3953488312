"""The only feedback in Wattcast: power lowers the clock.

The governor holds the workload's time-averaged power at the limit by lowering the set clock. So:
find the highest clock, up to the one asked for, at which mean power meets the limit. Only the cheap
last step of the flow is repeated, on arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array, Scalar
from wattcast.fitted import Bundle
from wattcast.flow import power_at
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.timeline import Timeline

STEPS = 8  # of the bracketing secant below; leaves less than 1 ppm of the limit
_MET = 5e-14  # of the power between the ends: as close to the limit as more steps would come


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
    """Highest set clock at which mean power meets what the governor makes of the limit, by a bracketing secant.

    Mean power rises with the clock: voltage and idle power do, and time does not. Where even the
    lowest clock draws too much, the lowest clock is given and ``met`` is False.
    """
    top_hz = np.asarray(gpu.clocks.max_hz if at.clock_hz is None else at.clock_hz, dtype=np.float64)
    over = _over(power_at(timeline, at, bundle), _limit(gpu, at) * bundle.settles)
    wanted = over(top_hz)
    if not (wanted > 0).any():
        return Settled(replace(at, clock_hz=_shaped(top_hz, wanted)), wanted > 0, wanted <= 0)
    low_hz = np.minimum(gpu.clocks.min_hz if gpu.clocks.min_hz is not None else 0.3 * top_hz, top_hz)
    low, high = _shaped(low_hz, wanted)[..., 0], _shaped(top_hz, wanted)[..., 0]
    over_low = over(low[..., None])
    hopeless = over_low > 0
    solved = _secant(lambda hz: over(hz[..., None]), low, high, over_low, wanted)
    clock = np.where((wanted > 0)[..., None], np.where(hopeless[..., None], low_hz, solved[..., None]), top_hz)
    return Settled(replace(at, clock_hz=clock), wanted > 0, ~hopeless | (wanted <= 0))


def _secant(function: Callable[[Array], Array], low: Array, high: Array, at_low: Array, at_high: Array) -> Array:
    """Root of a rising function between ``low`` and ``high``, elementwise, by the Illinois method.

    Regula falsi that halves the value at an end kept twice running [Dowell1971], so that both ends
    close in. A fixed number of steps, so that a batch does what each of its members would.
    """
    if not at_low.ndim:
        return _secant_of_one(function, float(low), float(high), float(at_low), float(at_high))
    side = np.zeros(at_low.shape)
    point = high
    for _ in range(STEPS):
        rise = at_high - at_low
        share = np.divide(-at_low, rise, out=np.full(rise.shape, 0.5), where=rise > 0)
        point = low + np.clip(share, 0.0, 1.0) * (high - low)
        value = function(point)
        above = value > 0
        at_low = np.where(above, np.where(side > 0, 0.5 * at_low, at_low), value)
        at_high = np.where(above, value, np.where(side < 0, 0.5 * at_high, at_high))
        low, high = np.where(above, low, point), np.where(above, point, high)
        side = np.where(above, 1.0, -1.0)
    return point


def _secant_of_one(
    function: Callable[[Array], Array], low: float, high: float, at_low: float, at_high: float
) -> Array:
    """The same of a single number, which arrays would only slow down."""
    side, point, met = 0.0, high, _MET * (at_high - at_low)
    for _ in range(STEPS):
        rise = at_high - at_low
        share = -at_low / rise if rise > 0 else 0.5
        point = low + min(max(share, 0.0), 1.0) * (high - low)
        value = float(function(np.array(point)))
        if value > 0:
            at_low, at_high = (0.5 * at_low if side > 0 else at_low), value
            high, side = point, 1.0
        else:
            at_low, at_high = value, (0.5 * at_high if side < 0 else at_high)
            low, side = point, -1.0
        if abs(value) < met:
            break
    return np.array(point)


def _limit(gpu: Gpu, at: OperatingPoint) -> Array:
    limit: Scalar = gpu.power.limit_w if at.power_limit_w is None else at.power_limit_w
    return np.asarray(limit, dtype=np.float64)


def _over(power_w: Callable[[Array], Array], limit_w: Array) -> Callable[[Array], Array]:
    """Watts above the limit as a function of the set clock, ``(*sweep, 1)`` -> ``(*sweep,)``."""
    limit = limit_w[..., 0] if limit_w.ndim else limit_w
    return lambda clock_hz: np.asarray(power_w(clock_hz) - limit)


def _shaped(clock_hz: Array, like: Array) -> Array:
    """A clock broadcast to ``(*sweep, 1)``."""
    return np.array(np.broadcast_to(clock_hz, (*like.shape, 1)))
