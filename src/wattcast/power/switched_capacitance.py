"""Switched-capacitance (alpha-C) power: one activity factor a rail, times V²·f.

    P = P_base + Σ_R ( I_leak·V + (C_clk + α·C)·V²·f )        [Stokke2016, Eq. 2 and 3]

over supply rails R with voltage V and clock f; α is the share of its peak at which a rail works, from 0 to 1. It
follows the voltage, but one factor cannot tell kinds of work apart, and α is taken to stay the same at every clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wattcast.core.errors import bad_value
from wattcast.power.activity import Activity, known_events
from wattcast.power.hybrid_rail import BASE, RailClock, SupplyRail
from wattcast.power.power_model import (
    Power,
    PowerModel,
    build_coefficients,
    coefficients_to_plain,
    order_by_event,
    stack_parts,
)


@dataclass(frozen=True)
class AlphaRail:
    """A rail, the event that is its activity factor, and the capacitance switched at full activity."""

    rail: SupplyRail
    alpha: str  # a mean event, 0 to 1
    full_f: float  # farad per cycle at α = 1, or J at relative voltage 1

    def __post_init__(self) -> None:
        order_by_event(f"rail {self.rail.name}", {self.alpha: self.full_f})
        if not known_events()[self.alpha].is_mean:
            raise bad_value(f"rail {self.rail.name}: alpha", "an event that is a mean, 0 to 1", self.alpha)
        if self.rail.clock is RailClock.FIXED:
            raise bad_value(f"rail {self.rail.name}", "a clock", "none")


@dataclass(frozen=True)
class SwitchedCapacitance(PowerModel):
    """Rails with one activity factor each, and a base power."""

    kind: ClassVar[str] = "switched_capacitance"
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
        """Return the watts of the base and of each rail's leakage, clock and dynamic power."""
        activity.require(self.required_events, "switched-capacitance power")
        at, part_w = activity.at, [np.asarray(self.base_w)]
        for rail in self.rails:
            per_alpha_w = rail.full_f * rail.rail.volt(at) ** 2 * rail.rail.own_clock_hz(at)  # Eq. 3
            part_w += [
                rail.rail.leakage_w(at),
                rail.rail.clock_w(at),
                per_alpha_w * activity.event_values(rail.alpha),
            ]
        return stack_parts(activity, part_w, self.parts)

    def to_plain(self) -> dict[str, Any]:
        """Return the coefficients as mappings, lists and numbers, for YAML."""
        rails = [coefficients_to_plain(r.rail) | {"alpha": r.alpha, "full_f": r.full_f} for r in self.rails]
        return {"base_w": self.base_w, "rails": rails}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SwitchedCapacitance:
        """Build the model from what ``to_plain`` returned."""
        rails = plain["rails"]
        built = (AlphaRail(build_coefficients(SupplyRail, r), str(r["alpha"]), float(r["full_f"])) for r in rails)
        return cls(float(plain["base_w"]), tuple(built))
