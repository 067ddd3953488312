"""What a card draws whatever it computes: board, leakage, clock tree. Shared by the models."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wattcast.arrays import Array, Scalar
from wattcast.errors import bad_value


@dataclass(frozen=True)
class VoltageCurve:
    """Relative core voltage by set clock: 1 at the top, linear between points, flat beyond.

    Relative, because dynamic power needs V²·C only up to one factor, and some vendors publish no
    volts at all.
    """

    clock_hz: Array
    relative: Array

    def __post_init__(self) -> None:
        if self.clock_hz.shape != self.relative.shape or self.clock_hz.ndim != 1 or self.clock_hz.size == 0:
            raise bad_value(
                "voltage", "one relative voltage a clock", f"{self.relative.size} for {self.clock_hz.size}"
            )
        if not ((np.diff(self.clock_hz) > 0).all() and (np.diff(self.relative) >= 0).all() and self.relative[0] > 0):
            raise bad_value("voltage", "rising clocks and voltages that never fall", self.relative.tolist())

    def at(self, clock_hz: Scalar) -> Array:
        """Relative voltage at each set clock."""
        return np.asarray(np.interp(clock_hz, self.clock_hz, self.relative))

    def at_one(self, clock_hz: float) -> float:
        """The same of a single clock, as a number."""
        return _between(clock_hz, *self._points)

    @cached_property
    def _points(self) -> tuple[list[float], list[float]]:
        return self.clock_hz.tolist(), self.relative.tolist()

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        return {"clock_hz": self.clock_hz.tolist(), "relative": self.relative.tolist()}


@dataclass(frozen=True)
class IdlePower:
    """What the card draws with a context open and no work, by set clock.

    P_idle(f) = P_board + I_leak·V + C_clk·V²·f as one measured or published curve. The part above
    its lowest point is booked as clock power, the rest as static. Leakage makes it grow with die
    temperature T: P_idle(f, T) = P_idle(f)·(1 + ``per_c``·(T - ``reference_c``)), not below zero.
    """

    clock_hz: Array
    power_w: Array
    reference_c: float
    per_c: float = 0.0

    def __post_init__(self) -> None:
        if self.clock_hz.shape != self.power_w.shape or self.clock_hz.ndim != 1 or self.clock_hz.size == 0:
            raise bad_value("idle", "one power a clock", f"{self.power_w.size} for {self.clock_hz.size}")
        if not ((np.diff(self.clock_hz) > 0).all() and (self.power_w > 0).all()):
            raise bad_value("idle", "rising clocks and powers above zero", self.power_w.tolist())

    def at(self, clock_hz: Scalar, temperature_c: Scalar) -> Array:
        """Idle power in W at each set clock and temperature."""
        warmer: Scalar = 1.0 + self.per_c * (temperature_c - self.reference_c)
        warmer = max(warmer, 0.0) if isinstance(warmer, float) else np.maximum(warmer, 0.0)
        return np.asarray(np.interp(clock_hz, self.clock_hz, self.power_w) * warmer)

    def at_one(self, clock_hz: float, temperature_c: float) -> float:
        """The same of a single clock and temperature, as a number."""
        return _between(clock_hz, *self._points) * max(1.0 + self.per_c * (temperature_c - self.reference_c), 0.0)

    @cached_property
    def _points(self) -> tuple[list[float], list[float]]:
        return self.clock_hz.tolist(), self.power_w.tolist()

    def static_w(self, temperature_c: Scalar) -> Array:
        """The floor of the curve: board, memory standby and leakage at the lowest clock."""
        return self.at(self.clock_hz[np.argmin(self.power_w)], temperature_c)

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        return {
            "clock_hz": self.clock_hz.tolist(),
            "power_w": self.power_w.tolist(),
            "reference_c": self.reference_c,
            "per_c": self.per_c,
        }


def _between(x: float, points: list[float], values: list[float]) -> float:
    """``np.interp`` of a single number, to the last bit, in a tenth of its time.

    >>> _between(1.5, [1.0, 2.0], [10.0, 30.0]), _between(9.0, [1.0, 2.0], [10.0, 30.0])
    (20.0, 30.0)
    """
    at = bisect_right(points, x)
    if at in (0, len(points)):
        return values[max(at - 1, 0)]
    low, high = values[at - 1], values[at]
    return (high - low) / (points[at] - points[at - 1]) * (x - points[at - 1]) + low
