"""A supply rail: its clock, its voltage, and what it costs before any event is counted.

P_R = I_leak·V + C_clk·V²·f + P_offset(f)   [Stokke2016, Eq. 2 and 3 and section 4.1.2], to which each
model adds its own dynamic power.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from wattcast.activity import events
from wattcast.arrays import Array, Scalar
from wattcast.errors import bad_value, unknown_name
from wattcast.hardware import OperatingPoint

SAME_CLOCK = 1e-3  # relative difference up to which two clocks are one setting


class Clock(StrEnum):
    """Which set clock drives a rail."""

    CORE = "core"
    MEMORY = "memory"
    FIXED = "fixed"  # not part of an operating point: voltage and clock never change


def _empty() -> Array:
    return np.zeros(0)


@dataclass(frozen=True)
class RailVoltage:
    """Voltage by the rail's own clock, linear between points and flat beyond, but never below a floor.

    The floor is what the other clock's setting demands: V = max(V(f), V_floor(f_other)). A GTX Titan X
    shows it: with memory at 3300 MHz and more the core voltage stops falling at 975 MHz, with memory
    at 810 MHz only at 785 MHz. ``level`` is in volts, or relative to a reference clock where nobody
    publishes volts; V² times a coefficient needs no more.
    """

    clock_hz: Array
    level: Array
    floor_clock_hz: Array = field(default_factory=_empty)
    floor_level: Array = field(default_factory=_empty)

    def __post_init__(self) -> None:
        pairs = (("voltage", self.clock_hz, self.level), ("voltage floor", self.floor_clock_hz, self.floor_level))
        for name, clock_hz, level in pairs:
            if clock_hz.shape != level.shape or clock_hz.ndim != 1:
                raise bad_value(name, "one voltage a clock", f"{level.size} for {clock_hz.size}")
            if not ((np.diff(clock_hz) > 0).all() and (np.diff(level) >= 0).all() and (level > 0).all()):
                raise bad_value(name, "rising clocks, voltages above zero that never fall", level.tolist())
        if self.clock_hz.size == 0:
            raise bad_value("voltage", "at least one clock", "none")

    @classmethod
    def constant(cls, level: float = 1.0) -> RailVoltage:
        """The same voltage at every clock."""
        return cls(np.array([1.0]), np.array([level]))

    def at(self, clock_hz: Scalar, other_clock_hz: Scalar | None = None) -> Array:
        """Voltage at the rail's own clock and the other one."""
        own = np.asarray(np.interp(clock_hz, self.clock_hz, self.level))
        if self.floor_clock_hz.size == 0:
            return own
        if other_clock_hz is None:
            raise bad_value("operating point", "both clocks, which this rail's voltage depends on", "one")
        return np.maximum(own, np.interp(other_clock_hz, self.floor_clock_hz, self.floor_level))

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        plain: dict[str, Any] = {"clock_hz": self.clock_hz.tolist(), "level": self.level.tolist()}
        if self.floor_clock_hz.size:
            plain |= {"floor_clock_hz": self.floor_clock_hz.tolist(), "floor_level": self.floor_level.tolist()}
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RailVoltage:
        """What :meth:`to_plain` wrote."""
        arrays = {key: np.array(value, dtype=float) for key, value in plain.items()}
        return cls(**arrays)


@dataclass(frozen=True)
class Rail:
    """One rail without its dynamic power: leakage, clock tree, and offsets at named clocks."""

    name: str
    clock: Clock
    voltage: RailVoltage = field(default_factory=RailVoltage.constant)
    leakage_a: float = 0.0  # W per V
    clock_f: float = 0.0  # W per (V²·Hz): switched at every cycle, work or not
    offset_w: tuple[tuple[float, float], ...] = ()  # (clock in Hz, W): off the straight line at this clock

    def __post_init__(self) -> None:
        numbers = (self.leakage_a, self.clock_f, *(w for _, w in self.offset_w))
        if not np.isfinite(numbers).all():
            raise bad_value(f"rail {self.name}", "finite coefficients", numbers)
        if self.clock is Clock.FIXED and (self.clock_f or self.offset_w):
            raise bad_value(f"rail {self.name}", "a clock, for its clock power or offsets", "none")

    def own_clock_hz(self, at: OperatingPoint) -> Array:
        """The set clock of this rail; 0 where it has none."""
        if self.clock is Clock.FIXED:
            return np.zeros(())
        setting = at.clock_hz if self.clock is Clock.CORE else at.memory_clock_hz
        if setting is None:
            name = "clock_hz" if self.clock is Clock.CORE else "memory_clock_hz"
            raise bad_value(f"activity.at.{name}", f"the set clock of rail {self.name}", None)
        return np.asarray(setting, dtype=np.float64)

    def volt(self, at: OperatingPoint) -> Array:
        """Voltage of this rail at a setting."""
        other = at.memory_clock_hz if self.clock is Clock.CORE else at.clock_hz
        return self.voltage.at(self.own_clock_hz(at), other)

    def leakage_w(self, at: OperatingPoint) -> Array:
        """Static power [Stokke2016, Eq. 2]."""
        return np.asarray(self.leakage_a * self.volt(at))

    def clock_w(self, at: OperatingPoint) -> Array:
        """Power of the clock tree and the offset at a named clock [Stokke2016, sections 4.1.2 and 4.2.3]."""
        clock_hz = self.own_clock_hz(at)
        clock_w = np.asarray(self.clock_f * self.volt(at) ** 2 * clock_hz)
        for named_hz, offset_w in self.offset_w:
            clock_w = clock_w + offset_w * (np.abs(clock_hz - named_hz) <= SAME_CLOCK * named_hz)
        return clock_w

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        return {
            "name": self.name,
            "clock": str(self.clock),
            "voltage": self.voltage.to_plain(),
            "leakage_a": self.leakage_a,
            "clock_f": self.clock_f,
            "offset_w": [[clock_hz, offset_w] for clock_hz, offset_w in self.offset_w],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Rail:
        """What :meth:`to_plain` wrote."""
        return cls(
            str(plain["name"]),
            Clock(plain["clock"]),
            RailVoltage.from_plain(plain["voltage"]),
            float(plain["leakage_a"]),
            float(plain["clock_f"]),
            tuple((float(clock_hz), float(offset_w)) for clock_hz, offset_w in plain["offset_w"]),
        )


def in_order(where: str, coefficients: Mapping[str, float]) -> dict[str, float]:
    """Coefficients in the order of ``events.csv``, so that parts stand alike however a file was written.

    Every event must be known and every coefficient a finite number.
    """
    known = events()
    for name, coefficient in coefficients.items():
        if name not in known:
            raise unknown_name("event", name, known)
        if not np.isfinite(coefficient):
            raise bad_value(f"{where}: {name}", "a finite number", coefficient)
    return {name: float(coefficients[name]) for name in known if name in coefficients}
