"""Rate-based power: a base power and a fixed cost per event, whatever the voltage.

    P = β_0 + Σ_i ρ_i·β_i        [Stokke2016, Eq. 1]

with base power β_0 in W, rates ρ_i in events per second and energies β_i in J. The two set clocks
may be further predictors. It is the common baseline, and fails where the voltage differs from that
of its training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wattcast.core import bad_value
from wattcast.power.activity import Activity
from wattcast.power.hybrid_rail import (
    BASE,
    EventRail,
    RailClock,
)
from wattcast.power.power_model import (
    Power,
    PowerModel,
    event_intensity,
    order_by_event,
    stack_parts,
)


@dataclass(frozen=True)
class RatePower(PowerModel):
    """Energies by event, a base power, and watts per Hz of the two set clocks."""

    kind: ClassVar[str] = "rate"
    base_w: float
    event_j: Mapping[str, float]  # event -> J; W at value 1 for a mean
    clock_j: float = 0.0  # W per Hz of the core clock
    memory_clock_j: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "event_j", order_by_event("rate power", self.event_j))
        costs = [self.base_w, self.clock_j, self.memory_clock_j]
        if not np.isfinite(costs).all():
            raise bad_value("rate power", "finite coefficients", costs)

    @property
    def required_events(self) -> tuple[str, ...]:
        return tuple(self.event_j)

    @property
    def _rails(self) -> list[EventRail]:
        rails = []
        if self.clock_j:
            rails.append(EventRail("core", RailClock.CORE, clock_f=self.clock_j))
        if self.memory_clock_j:
            rails.append(EventRail("memory", RailClock.MEMORY, clock_f=self.memory_clock_j))
        return rails

    @property
    def parts(self) -> tuple[str, ...]:
        return (BASE, *(f"{rail.name} clock" for rail in self._rails), *self.event_j)

    def power(self, activity: Activity) -> Power:
        """Return the watts of the base, of the clocks and of each event (Eq. 1)."""
        activity.require(self.required_events, "rate power")
        clocks_w = [rail.clock_w(activity.at) for rail in self._rails]
        part_w = [np.asarray(self.base_w), *clocks_w]
        for event, cost_j in self.event_j.items():
            part_w.append(cost_j * event_intensity(activity, event))
        return stack_parts(activity, part_w, self.parts)
