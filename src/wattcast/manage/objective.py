"""What a controller minimises: energy × delay², energy × delay or energy, within bounds.

Scores are logarithms, so that a difference of 0.01 is one percent. All goals are powers of mean power
and time: log E D^k = log P + (k + 1) log t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import bad_value

WALL = 10.0  # added per bound that is broken: more than any gain, and it still grows towards feasible
SLACK = 1e-9


class Goal(StrEnum):
    """What is multiplied."""

    ED2 = "ed2"
    ED = "ed"
    ENERGY = "energy"

    @property
    def delay_power(self) -> int:
        """k in E · D^k."""
        return {Goal.ED2: 2, Goal.ED: 1, Goal.ENERGY: 0}[self]


@dataclass(frozen=True)
class Objective:
    """A goal and its bounds.

    ``slowdown`` bounds time relative to the default settings (0.1: ten percent longer), ``latency_s``
    bounds the time of one run, ``cap_w`` bounds mean board power, shared by compute and memory.
    """

    goal: Goal = Goal.ED2
    slowdown: float | None = None
    latency_s: float | None = None
    cap_w: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency_s), ("power cap", self.cap_w)):
            if value is not None and not 0 < value < math.inf:
                raise bad_value(name, "a finite number above zero", value)
        if self.slowdown is not None and not 0 <= self.slowdown < math.inf:
            raise bad_value("slowdown", "zero or more", self.slowdown)

    @cached_property
    def time_weight(self) -> float:
        """Exponent of time once energy is written as power times time."""
        return self.goal.delay_power + 1.0

    @cached_property
    def bounded(self) -> bool:
        """Whether there is any bound besides the goal."""
        return not (self.slowdown is None and self.latency_s is None and self.cap_w is None)

    @cached_property
    def log_cap(self) -> float:
        """Log of the power cap; infinite where there is none."""
        return math.inf if self.cap_w is None else math.log(self.cap_w)

    def log_time_limits(self, log_reference: float | None) -> list[float]:
        """Logs of the longest times allowed; ``log_reference`` is that of the default settings, None if not known."""
        limits = [] if self.latency_s is None else [math.log(self.latency_s)]
        if self.slowdown is not None and log_reference is not None:
            limits.append(log_reference + math.log1p(self.slowdown))
        return limits

    def score(self, log_time: float, log_power: float, log_reference: float | None) -> float:
        """Log of the objective of one kernel, plus a wall for each broken bound.

        ``log_reference`` is the log time at the default settings; None where it is not known yet.
        """
        value = log_power + self.time_weight * log_time
        if self.slowdown is not None and log_reference is not None:
            value += _wall(log_time - log_reference - math.log1p(self.slowdown))
        if self.latency_s is not None:
            value += _wall(log_time - math.log(self.latency_s))
        if self.cap_w is not None:
            value += _wall(log_power - math.log(self.cap_w))
        return value

    def scores(self, time_s: Array, power_w: Array, reference_s: Array) -> Array:
        """:meth:`score` of whole tables; ``reference_s`` broadcasts against ``time_s``."""
        log_time, log_power = np.log(time_s), np.log(power_w)
        value = log_power + self.time_weight * log_time
        bounds = []
        if self.slowdown is not None:
            bounds.append(log_time - np.log(reference_s) - np.log1p(self.slowdown))
        if self.latency_s is not None:
            bounds.append(log_time - np.log(self.latency_s))
        if self.cap_w is not None:
            bounds.append(log_power - np.log(self.cap_w))
        for over in bounds:
            value = value + np.where(over > SLACK, WALL + WALL * over, 0.0)
        return np.asarray(value)

    def total(self, time_s: Array, energy_j: Array) -> Array:
        """E · D^k of whole runs."""
        return np.asarray(energy_j * time_s**self.goal.delay_power)


def _wall(over: float) -> float:
    return WALL + WALL * over if over > SLACK else 0.0
