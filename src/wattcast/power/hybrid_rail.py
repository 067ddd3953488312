"""Hybrid rail power: counted events times the square of the voltage, rail by rail.

P = P_base + Σ_R ( I_R,leak·V_R + C_R,clk·V_R²·f_R + Σ_i C_R,i·ρ_R,i·V_R² )   [Stokke2016, Eq. 8 to 10],
with ρ events per second, or the value of an event that is a mean, such as instructions per cycle
[Eq. 7]. A capacitance is in farad when the voltage is in volts; with a relative voltage it is joules
per event at relative voltage 1, and for a mean event watts at value 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wattcast.activity import Activity, events
from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.power.interface import Kind, Power
from wattcast.power.rail import Clock, Rail, RailVoltage, in_order

BASE = "base"


@dataclass(frozen=True)
class EventRail:
    """A rail and what each event on it switches."""

    rail: Rail
    event_f: Mapping[str, float]  # event -> farad, or J at relative voltage 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "event_f", in_order(f"rail {self.rail.name}", self.event_f))

    @property
    def parts(self) -> tuple[str, ...]:
        """Leakage, clock, then each event."""
        return (f"{self.rail.name} leakage", f"{self.rail.name} clock", *self.event_f)

    def part_w(self, activity: Activity) -> list[Array]:
        """Watts of each part."""
        at = activity.at
        square = self.rail.volt(at) ** 2
        dynamic = [c * occurrence(activity, event) * square for event, c in self.event_f.items()]  # Eq. 9
        return [self.rail.leakage_w(at), self.rail.clock_w(at), *dynamic]


@dataclass(frozen=True)
class HybridRail:
    """Rails, and a base power for everything that is on none of them."""

    base_w: float
    rails: tuple[EventRail, ...]

    def __post_init__(self) -> None:
        names = [part for rail in self.rails for part in rail.parts]
        if len(set(names)) != len(names) or not np.isfinite(self.base_w):
            raise bad_value("hybrid rail", "a finite base power, and each rail and event once", ", ".join(names))

    @property
    def required_events(self) -> tuple[str, ...]:
        return tuple(event for rail in self.rails for event in rail.event_f)

    @property
    def parts(self) -> tuple[str, ...]:
        return (BASE, *(part for rail in self.rails for part in rail.parts))

    def power(self, activity: Activity) -> Power:
        """Watts of the base and of each rail's leakage, clock and events (Eq. 10)."""
        activity.require(self.required_events, "hybrid rail power")
        part_w = [np.asarray(self.base_w)]
        for rail in self.rails:
            part_w += rail.part_w(activity)
        return stacked(activity, part_w, self.parts)

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        rails = [r.rail.to_plain() | {"event_f": dict(r.event_f)} for r in self.rails]
        return {"base_w": self.base_w, "rails": rails}


def occurrence(activity: Activity, event: str) -> Array:
    """Events per second, or the value of an event that is a mean."""
    return activity.of(event) if events()[event].is_mean else activity.rate(event)


def stacked(activity: Activity, part_w: list[Array], parts: tuple[str, ...]) -> Power:
    """Watts of each part over the intervals of ``activity``."""
    shape = np.broadcast_shapes(activity.duration_s.shape, activity.value.shape[:-1], *(np.shape(w) for w in part_w))
    return Power(np.stack([np.broadcast_to(w, shape) for w in part_w], axis=-1), parts)


def actual_transactions(transactions: Array, shared_efficiency: Array) -> Array:
    """Shared-memory transactions that really happened.

    L1_actual = L1_counted·shared_efficiency [Stokke2016, Eq. 6]: the counter adds one for each thread
    although a broadcast serves many. The efficiency mixes reads and writes, so each is approximate.

    >>> float(actual_transactions(np.float64(1000.0), np.float64(0.25)))
    250.0
    """
    return np.asarray(transactions * shared_efficiency)


def anchored_w(model: HybridRail, activity: Activity, reference: Activity, measured_w: Array) -> Array:
    """Total power when that of the same work is known at one setting, ``(*sweep, interval)``.

    What the model misses there is taken for activity of the first rail that no counter sees, so it
    scales like that rail's counted events: P(f) = P̂(f) + (P_0 - P̂_0)·D(f)/D_0, with
    D = V²·Σ C_i·ρ_i; for work without events D = V²·f.
    """
    now, then = _switching(model, activity), _switching(model, reference)
    missed_w = np.asarray(measured_w) - model.power(reference).total_w
    return np.asarray(model.power(activity).total_w + missed_w * now / then)


def _switching(model: HybridRail, activity: Activity) -> Array:
    """How much the first rail switches, in a unit of its own; its clock stands in where nothing is counted."""
    rail = model.rails[0]
    square = rail.rail.volt(activity.at) ** 2
    counted = sum((c * occurrence(activity, e) for e, c in rail.event_f.items()), np.zeros(activity.duration_s.shape))
    return np.where(counted > 0, square * counted, square * rail.rail.own_clock_hz(activity.at))


def _from_plain(plain: Mapping[str, Any]) -> HybridRail:
    rails = tuple(
        EventRail(Rail.from_plain(r), {e: float(c) for e, c in r["event_f"].items()}) for r in plain["rails"]
    )
    return HybridRail(float(plain["base_w"]), rails)


def _example() -> HybridRail:
    core = Rail(
        "core",
        Clock.CORE,
        RailVoltage(
            np.array([0.5e9, 1e9, 2e9]), np.array([0.8, 0.85, 1.1]), np.array([1e9, 3e9]), np.array([0.8, 0.9])
        ),
        leakage_a=20.0,
        clock_f=1e-8,
    )
    memory = Rail("memory", Clock.MEMORY, clock_f=5e-9, offset_w=((0.81e9, 2.0),))
    host = Rail("host", Clock.FIXED, RailVoltage.constant(1.05), leakage_a=0.8)
    return HybridRail(
        15.0,
        (
            EventRail(core, {"active_cycle": 1e-8, "int_busy_cycle": 3e-8, "l2_busy_cycle": 2e-8}),
            EventRail(memory, {"dram_busy_cycle": 2e-8}),
            EventRail(host, {"host_instruction_per_cycle": 3.7e-3, "host_active_cycle": 1.7e-10}),
        ),
    )


KIND = Kind("hybrid_rail", _from_plain, _example)
