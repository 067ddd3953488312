"""Switched-capacitance (alpha-C) power: one activity factor a rail, times V²·f.

P = P_base + Σ_R ( I_R,leak·V_R + (C_R,clk + α_R·C_R)·V_R²·f_R )   [Stokke2016, Eq. 2 and 3], with α the
share of its peak at which a rail works. It follows the voltage, but one factor cannot tell kinds of
work apart, and α is taken to stay the same at every clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wattcast.activity import Activity, events
from wattcast.errors import bad_value
from wattcast.power.hybrid_rail import BASE, stacked
from wattcast.power.interface import Kind, Power
from wattcast.power.rail import Clock, Rail, RailVoltage, in_order


@dataclass(frozen=True)
class AlphaRail:
    """A rail, the event that is its activity factor, and the capacitance switched at full activity."""

    rail: Rail
    alpha: str  # a mean event, 0 to 1
    full_f: float  # farad per cycle at α = 1, or J at relative voltage 1

    def __post_init__(self) -> None:
        in_order(f"rail {self.rail.name}", {self.alpha: self.full_f})
        if not events()[self.alpha].is_mean:
            raise bad_value(f"rail {self.rail.name}: alpha", "an event that is a mean, 0 to 1", self.alpha)
        if self.rail.clock is Clock.FIXED:
            raise bad_value(f"rail {self.rail.name}", "a clock", "none")


@dataclass(frozen=True)
class SwitchedCapacitance:
    """Rails with one activity factor each, and a base power."""

    base_w: float
    rails: tuple[AlphaRail, ...]

    def __post_init__(self) -> None:
        if not np.isfinite(self.base_w):
            raise bad_value("switched capacitance: base_w", "a finite number", self.base_w)

    @property
    def required_events(self) -> tuple[str, ...]:
        return tuple(rail.alpha for rail in self.rails)

    @property
    def parts(self) -> tuple[str, ...]:
        rails = (f"{r.rail.name} {part}" for r in self.rails for part in ("leakage", "clock", "dynamic"))
        return (BASE, *rails)

    def power(self, activity: Activity) -> Power:
        """Watts of the base and of each rail's leakage, clock and dynamic power."""
        activity.require(self.required_events, "switched-capacitance power")
        at, part_w = activity.at, [np.asarray(self.base_w)]
        for rail in self.rails:
            per_alpha_w = rail.full_f * rail.rail.volt(at) ** 2 * rail.rail.own_clock_hz(at)  # Eq. 3
            part_w += [rail.rail.leakage_w(at), rail.rail.clock_w(at), per_alpha_w * activity.of(rail.alpha)]
        return stacked(activity, part_w, self.parts)

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        rails = [r.rail.to_plain() | {"alpha": r.alpha, "full_f": r.full_f} for r in self.rails]
        return {"base_w": self.base_w, "rails": rails}


def _from_plain(plain: Mapping[str, Any]) -> SwitchedCapacitance:
    rails = tuple(AlphaRail(Rail.from_plain(r), str(r["alpha"]), float(r["full_f"])) for r in plain["rails"])
    return SwitchedCapacitance(float(plain["base_w"]), rails)


def _example() -> SwitchedCapacitance:
    voltage = RailVoltage(np.array([0.5e9, 1e9, 2e9]), np.array([0.8, 0.85, 1.1]))
    core = Rail("core", Clock.CORE, voltage, leakage_a=20.0, clock_f=1e-8)
    memory = Rail("memory", Clock.MEMORY, clock_f=5e-9)
    return SwitchedCapacitance(
        15.0, (AlphaRail(core, "core_busy_share", 5e-8), AlphaRail(memory, "memory_busy_share", 2e-8))
    )


KIND = Kind("switched_capacitance", _from_plain, _example)
