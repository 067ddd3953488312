"""The clock chosen before anything ran, reckoning with what is not known of a card: its path to DRAM.

The predictor keeps the DRAM part of time in seconds: it does not follow the core clock. On real cards it does
below a knee, because L2 and crossbar run on the core clock. On the GTX Titan X (16 DRAM-bound microbenchmarks at
16 core clocks, Guerreiro et al.) time stays put down to 0.87 of the highest clock and follows it one to one below;
paper 004 says the same of the HD 7970 (section 3.5, figure 9). Where the knee of a card lies nobody publishes. So
both laws are given the same weight, and the clock is chosen by the mean over the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.manage.objective import Objective

FOLLOWS = (0.0, 1.0)  # power to which the DRAM part of time follows the core clock; equally likely
POINTS = 64  # clocks at which the curves are sampled, for the governor's clock between two levels


@dataclass(frozen=True)
class Curves:
    """Predicted time and mean power of a workload over the core clock, as if there were no power limit."""

    clock_hz: Array  # (clock,), and so the rest
    time_s: Array
    power_w: Array
    idle_w: Array
    limit_w: float


def core_share(curves: Curves) -> tuple[float, float]:
    """Time at the highest clock that follows the core clock, and that which does not: t(f) = a·f_top/f + b.

    Least squares on relative time; neither is negative.
    """
    stretch = curves.clock_hz[-1] / curves.clock_hz
    columns = np.stack([stretch, np.ones_like(stretch)], axis=-1) / curves.time_s[:, np.newaxis]
    a, b = np.linalg.lstsq(columns, np.ones_like(stretch), rcond=None)[0]
    top = float(curves.time_s[-1])
    return (float(a), float(b)) if a >= 0 and b >= 0 else (top, 0.0) if b < 0 else (0.0, top)


def outlooks(curves: Curves, levels_hz: Array) -> tuple[Array, Array]:
    """Time and power at each level under each law of the path to DRAM, power limit included; ``(law, level)``.

    Work that takes longer draws less: what is above idle power is energy of the work, spread over its time.
    """
    core_s, rest_s = core_share(curves)
    stretch = curves.clock_hz[-1] / curves.clock_hz
    laws = np.asarray(FOLLOWS)[:, np.newaxis]
    slower = (core_s * stretch + rest_s * stretch**laws) / (core_s * stretch + rest_s)
    time_s = curves.time_s * slower
    power_w = curves.idle_w + (curves.power_w - curves.idle_w) / slower
    held_hz = np.array([_held_hz(curves.clock_hz, power, curves.limit_w) for power in power_w])
    at_hz = np.minimum(levels_hz, held_hz[:, np.newaxis])
    read = [
        np.stack([np.interp(hz, curves.clock_hz, row) for hz, row in zip(at_hz, rows, strict=True)])
        for rows in (time_s, power_w)
    ]
    return read[0], read[1]


def best(curves: Curves, levels_hz: Array, objective: Objective, default: int, worth: float) -> int:
    """The level with the best mean score; of those within ``worth`` of it the lowest. Bounds hold in the mean."""
    time_s, power_w = outlooks(curves, levels_hz)
    free = Objective(objective.goal)
    score = free.scores(time_s, power_w, time_s[:, [default]]).mean(axis=0)
    mean_s = float(time_s[:, default].mean())
    slow_s = (time_s / time_s[:, [default]]).mean(axis=0) * mean_s
    mean_w = power_w.mean(axis=0)
    walls = objective.scores(slow_s, mean_w, np.asarray(mean_s)) - free.scores(slow_s, mean_w, np.asarray(mean_s))
    score = score + walls
    return int(np.nonzero(score <= score.min() + worth)[0][0])


def _held_hz(clock_hz: Array, power_w: Array, limit_w: float) -> float:
    """The highest clock whose power keeps to the limit, between two points; the lowest where none does."""
    over = np.nonzero(power_w > limit_w)[0]
    if over.size == 0:
        return float(clock_hz[-1])
    first = int(over[0])
    if first == 0:
        return float(clock_hz[0])
    return float(np.interp(limit_w, power_w[first - 1 : first + 1], clock_hz[first - 1 : first + 1]))
