"""The clock chosen before anything ran: what a card does beyond the predictor, which knows no path to DRAM.

The predictor keeps the DRAM part of time in seconds: it does not follow the core clock. On real cards it does
below a knee, because L2 and crossbar run on the core clock. On the GTX Titan X (16 DRAM-bound microbenchmarks at
16 core clocks, Guerreiro et al.) time is max(1, 0.86·f_top/f) of that at the top clock: it stays put down to 0.86 of
it and follows one to one below; paper 004 says the same of the HD 7970 (section 3.5, figure 9). Where the knee of
another card lies nobody publishes, so the one that was measured is taken.

A card does not hold its power limit to the watt: four cards under limits (Zeus, training epochs) held 0.92 to 0.98 of
them in the mean, an H200 690 to 700 W of 700. As in the validation with Zeus' rows, 0.98 is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.manage.objective import Objective

KNEE = 0.86  # of the top clock: below it the DRAM part of time follows the core clock
HELD = 0.98  # of its power limit that a card holds
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


def outlook(curves: Curves, levels_hz: Array) -> tuple[Array, Array]:
    """Time and power at each level with the path to DRAM and the power limit, ``(level,)``.

    Work that takes longer draws less: what is above idle power is energy of the work, spread over its time.
    """
    core_s, rest_s = core_share(curves)
    stretch = curves.clock_hz[-1] / curves.clock_hz
    slower = (core_s * stretch + rest_s * np.maximum(1.0, KNEE * stretch)) / (core_s * stretch + rest_s)
    time_s = curves.time_s * slower
    power_w = curves.idle_w + (curves.power_w - curves.idle_w) / slower
    at_hz = np.minimum(levels_hz, _held_hz(curves.clock_hz, power_w, HELD * curves.limit_w))
    return np.interp(at_hz, curves.clock_hz, time_s), np.interp(at_hz, curves.clock_hz, power_w)


def best(curves: Curves, levels_hz: Array, objective: Objective, default: int, worth: float) -> int:
    """The level with the best score; of those within ``worth`` of it the lowest."""
    time_s, power_w = outlook(curves, levels_hz)
    score = objective.scores(time_s, power_w, time_s[default])
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
