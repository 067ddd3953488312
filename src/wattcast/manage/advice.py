"""What a watched card could save: an estimate from readings alone, with nothing set.

Time follows the core clock as far as memory is not what holds the program: sensitivity 1 - memory utilisation.
Power is idle power, which follows the clock, plus switched power, which follows V² f and the rate of work. Both
curves are the catalogue's where it has them, else the A100's shape and a share of the power now. This is
advice to try, not a forecast: it is labelled so wherever it is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.hardware import Gpu
from wattcast.manage.objective import Objective

FLAT_TO, TOP_OVER_FLAT = (
    0.72,
    1.29,
)  # of the top clock; the A100-PCIE's published V(f): 0.694 V to 1020, 0.894 V at 1410
IDLE_SHARE = 0.2  # of present power, where the catalogue gives no idle power


@dataclass(frozen=True)
class Advice:
    """The clock an estimate picks, and what it expects of it, relative to now."""

    core_hz: float
    slowdown: float
    power_saving: float
    energy_saving: float
    ed2_gain: float
    assumptions: tuple[str, ...]


def advise(
    power_w: float, core_hz: float, memory_busy: float, levels_hz: Array, objective: Objective, gpu: Gpu | None = None
) -> Advice | None:
    """The best of ``levels_hz`` by estimate, or None when the readings do not allow one."""
    readings = (power_w, core_hz, memory_busy)
    if not all(math.isfinite(x) for x in readings) or power_w <= 0 or core_hz <= 0:
        return None
    levels = levels_hz[levels_hz <= core_hz * 1.0001]
    if levels.size == 0:
        return None
    sensitivity = 1.0 - min(max(memory_busy, 0.0), 1.0)
    time = (core_hz / levels) ** sensitivity
    idle_now, idle, notes = _idle_w(power_w, core_hz, levels, gpu)
    switched = max(power_w - idle_now, 0.0)
    scale = (_volts(levels, gpu, float(levels_hz[-1])) / _volts(np.array([core_hz]), gpu, float(levels_hz[-1]))) ** 2
    power = idle + switched * scale / time
    best = int(np.argmin(objective.scores(time, power, np.asarray(1.0))))
    t, p = float(time[best]), float(power[best] / power_w)
    notes = (f"time follows the core clock to the power {sensitivity:.2f}: 1 - memory utilisation", *notes)
    return Advice(float(levels[best]), t - 1, 1 - p, 1 - p * t, 1 - p * t**3, notes)


def _idle_w(power_w: float, core_hz: float, levels: Array, gpu: Gpu | None) -> tuple[float, Array, tuple[str, ...]]:
    curve = gpu.power.idle_w if gpu is not None else None
    if curve is not None:
        return min(float(curve.at(core_hz)), power_w), curve.at(levels), ("idle power by clock from the catalogue",)
    share = IDLE_SHARE * power_w
    return share, np.full(levels.shape, share), (f"idle power taken as {IDLE_SHARE:.0%} of the power now",)


def _volts(clock_hz: Array, gpu: Gpu | None, top_hz: float) -> Array:
    """Relative voltage at each clock."""
    curve = gpu.power.voltage_v if gpu is not None else None
    if curve is not None:
        return curve.at(clock_hz)
    return np.interp(clock_hz / top_hz, [FLAT_TO, 1.0], [1.0, TOP_OVER_FLAT])
