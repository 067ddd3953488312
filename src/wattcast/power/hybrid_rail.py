"""Hybrid rail power: counted events times the square of the voltage, rail by rail.

    P = P_base + Σ_R ( I_leak·V + C_clk·V²·f + P_offset(f) + Σ_i C_i·ρ_i·V² )

    [Stokke2016, Eq. 8 to 10]

over supply rails R, each with its voltage V and clock f. ρ_i is events per second, or the value of
an event that is a mean, such as instructions per cycle [Eq. 7]. A capacitance C_i is in farad when
the voltage is in volts; with a relative voltage it is joules per event at relative voltage 1, and
for a mean event watts at value 1. P_offset is what a rail draws off the straight line at a named
clock [section 4.1.2]. A rail that sleeps without work, such as the memory of an H200, also draws
P_awake·min(Σ ρ_i / ρ_awake, 1). The model holds for the clocks and voltages it was fitted at, and
for work that its events can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import (
    KW_ONLY,
    dataclass,
    field,
)
from enum import StrEnum
from typing import ClassVar

import numpy as np

from wattcast.core import bad_value
from wattcast.core.arrays import Array, Sweepable
from wattcast.hardware import OperatingPoint
from wattcast.power import power_model
from wattcast.power.activity import Activity, known_events

_SAME_CLOCK = 1e-3  # relative difference up to which two clocks are one setting


class RailClock(StrEnum):
    """Which set clock drives a rail."""

    CORE = "core"
    MEMORY = "memory"
    FIXED = "fixed"  # not part of an operating point: voltage and clock never change


@dataclass(frozen=True)
class RailVoltage:
    """Voltage by the rail's clock, linear between points and flat beyond, never below a floor.

    The floor is what the other clock's setting demands: V = max(V(f), V_floor(f_other)). A GTX
    Titan X shows it: with memory at 3300 MHz and more the core voltage stops falling at 975 MHz,
    with memory at 810 MHz only at 785 MHz. ``level`` is in volts, or relative to a reference clock
    where nobody publishes volts; V² times a coefficient needs no more.
    """

    clock_hz: Array
    level: Array
    floor_clock_hz: Array = field(default_factory=lambda: np.zeros(0))
    floor_level: Array = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        _check_levels("voltage", self.clock_hz, self.level)
        _check_levels("voltage floor", self.floor_clock_hz, self.floor_level)
        if self.clock_hz.size == 0:
            raise bad_value("voltage", "at least one clock", "none")

    @classmethod
    def constant(cls, level: float = 1.0) -> RailVoltage:
        """Return a voltage that is the same at every clock."""
        return cls(np.array([1.0]), np.array([level]))

    def level_at(
        self,
        clock_hz: Sweepable,
        other_clock_hz: Sweepable | None = None,
    ) -> Array:
        """Return the voltage at both set clocks, V = max(V(f), V_floor(f_other))."""
        level = np.asarray(np.interp(clock_hz, self.clock_hz, self.level))
        if self.floor_clock_hz.size == 0:
            return level
        if other_clock_hz is None:
            expected = "both clocks, which this rail's voltage depends on"
            raise bad_value("operating point", expected, "one")
        floor = np.interp(other_clock_hz, self.floor_clock_hz, self.floor_level)
        return np.maximum(level, floor)


def _check_levels(
    name: str,
    clock_hz: Array,
    level: Array,
) -> None:
    """Raise an error unless clocks rise and voltages never fall."""
    if clock_hz.shape != level.shape or clock_hz.ndim != 1:
        raise bad_value(name, "one voltage a clock", f"{level.size} for {clock_hz.size}")
    clocks_rise = (np.diff(clock_hz) > 0).all()
    levels_rise = (np.diff(level) >= 0).all() and (level > 0).all()
    if not (clocks_rise and levels_rise):
        expected = "rising clocks, voltages above zero that never fall"
        raise bad_value(name, expected, level.tolist())


BASE = "base"


@dataclass(frozen=True)
class EventRail:
    """One rail: leakage, clock tree, offsets at named clocks, and what events or α switch."""

    name: str
    clock: RailClock
    voltage: RailVoltage = field(default_factory=RailVoltage.constant)
    leakage_a: float = 0.0  # W per V
    clock_f: float = 0.0  # W per (V²·Hz): switched at every cycle, work or not
    # (clock in Hz, W): off the straight line at this clock
    offset_w: tuple[tuple[float, float], ...] = ()
    _: KW_ONLY
    # F of an event, or J at V = 1
    event_f: Mapping[str, float] = field(default_factory=dict, metadata=power_model.SAVED_IF_SET)
    # Drawn whenever there is work, in full at so many events a second
    awake_w: float = field(default=0.0, metadata=power_model.SAVED_IF_SET)
    awake_per_s: float = field(default=0.0, metadata=power_model.SAVED_IF_SET)
    # The activity factor α, a mean event from 0 to 1, and F per cycle at α = 1, or J at V = 1
    alpha: str = field(default="", metadata=power_model.SAVED_IF_SET)
    full_f: float = field(default=0.0, metadata=power_model.SAVED_IF_SET)

    def __post_init__(self) -> None:
        where = f"rail {self.name}"
        offsets_w = [watts for _, watts in self.offset_w]
        numbers = (self.leakage_a, self.clock_f, *offsets_w)
        if not np.isfinite(numbers).all():
            raise bad_value(where, "finite coefficients", numbers)
        needs_clock = bool(self.clock_f or self.offset_w or self.alpha)
        if self.clock is RailClock.FIXED and needs_clock:
            expected = "a clock, for its clock power, offsets or activity factor"
            raise bad_value(where, expected, "none")
        has_no_rate = bool(self.awake_w) and not self.awake_per_s > 0.0
        if not np.isfinite(self.awake_w) or has_no_rate:
            expected = "finite watts awake, in full at a rate above zero"
            raise bad_value(where, expected, (self.awake_w, self.awake_per_s))
        object.__setattr__(self, "event_f", power_model.order_by_event(where, self.event_f))
        if self.alpha:
            power_model.order_by_event(where, {self.alpha: self.full_f})
            if not known_events()[self.alpha].is_mean:
                raise bad_value(f"{where}: alpha", "an event that is a mean, 0 to 1", self.alpha)

    def rail_clock_hz(self, at: OperatingPoint) -> Array:
        """Return the set clock of this rail; 0 where it has none."""
        if self.clock is RailClock.FIXED:
            return np.zeros(())
        setting = at.clock_hz if self.clock is RailClock.CORE else at.memory_clock_hz
        if setting is None:
            name = "clock_hz" if self.clock is RailClock.CORE else "memory_clock_hz"
            raise bad_value(f"activity.at.{name}", f"the set clock of rail {self.name}", None)
        return np.asarray(setting, dtype=np.float64)

    def volt(self, at: OperatingPoint) -> Array:
        """Return the voltage of this rail at a setting."""
        other_clock_hz = at.memory_clock_hz if self.clock is RailClock.CORE else at.clock_hz
        return self.voltage.level_at(self.rail_clock_hz(at), other_clock_hz)

    def leakage_w(self, at: OperatingPoint) -> Array:
        """Return the leakage power, I_leak·V in W [Stokke2016, Eq. 2]."""
        return np.asarray(self.leakage_a * self.volt(at))

    def clock_w(self, at: OperatingPoint) -> Array:
        """Return the power of the clock tree and the offset at a named clock, in W.

        The first is C_clk·V²·f [Stokke2016, 4.1.2 and 4.2.3].
        """
        clock_hz = self.rail_clock_hz(at)
        clock_w = np.asarray(self.clock_f * self.volt(at) ** 2 * clock_hz)
        for named_hz, offset_w in self.offset_w:
            is_named_clock = np.abs(clock_hz - named_hz) <= _SAME_CLOCK * named_hz
            clock_w = clock_w + offset_w * is_named_clock
        return clock_w

    @property
    def required_events(self) -> tuple[str, ...]:
        """Events that its power depends on."""
        return (*self.event_f, self.alpha) if self.alpha else tuple(self.event_f)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of leakage, clock, then each event, then work by α and being awake if they cost."""
        names = [f"{self.name} leakage", f"{self.name} clock", *self.event_f]
        if self.alpha:
            names.append(f"{self.name} dynamic")
        if self.awake_w:
            names.append(f"{self.name} awake")
        return tuple(names)

    def part_w(self, activity: Activity) -> list[Array]:
        """Return the watts of each part."""
        at = activity.at
        volts_squared = self.volt(at) ** 2
        part_w = [self.leakage_w(at), self.clock_w(at)]
        rates = []
        for event, capacitance_f in self.event_f.items():
            rate = power_model.event_intensity(activity, event)
            rates.append(rate)
            part_w.append(capacitance_f * rate * volts_squared)  # Eq. 9
        if self.alpha:
            full_w = self.full_f * volts_squared * self.rail_clock_hz(at)
            part_w.append(full_w * activity.event_values(self.alpha))  # Eq. 3
        if self.awake_w:
            awake_share = np.minimum(np.sum(rates, axis=0) / self.awake_per_s, 1.0)
            part_w.append(self.awake_w * awake_share)
        return part_w


@dataclass(frozen=True)
class HybridRail(power_model.PowerModel):
    """Rails, and a base power for everything that is on none of them."""

    kind: ClassVar[str] = "hybrid_rail"
    base_w: float
    rails: tuple[EventRail, ...]

    def __post_init__(self) -> None:
        parts = self.parts[1:]
        is_unique = len(set(parts)) == len(parts)
        if not is_unique or not np.isfinite(self.base_w):
            expected = "a finite base power, and each rail and event once"
            raise bad_value(self.kind, expected, ", ".join(parts))

    @property
    def required_events(self) -> tuple[str, ...]:
        events: list[str] = []
        for rail in self.rails:
            events += rail.required_events
        return tuple(events)

    @property
    def parts(self) -> tuple[str, ...]:
        parts = [BASE]
        for rail in self.rails:
            parts += rail.parts
        return tuple(parts)

    def power(self, activity: Activity) -> power_model.Power:
        """Return the watts of the base and of each rail's leakage, clock and work (Eq. 10)."""
        activity.require(self.required_events, f"{self.kind.replace('_', ' ')} power")
        part_w = [np.asarray(self.base_w)]
        for rail in self.rails:
            part_w += rail.part_w(activity)
        return power_model.stack_parts(activity, part_w, self.parts)
