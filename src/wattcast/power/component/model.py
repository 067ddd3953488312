"""Component power: energy per count times how often, a constant, and what follows clock and voltage.

P_c = V^k · ( Σ_i s_i·E_i·n_i / t + W_c ), with counts n_i of an interval of length t, energies E_i, scaling
factors s_i folded into them, and a constant W_c [GPUWattch manual, sections 2 and 3]. Duties and idle SMs are
means: they have watts instead of joules, a duty's in proportion to the clock. k is 2 on the core rail, 1 for
its leakage and 0 on other rails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from wattcast.activity import Activity, events
from wattcast.arrays import Array
from wattcast.errors import bad_value, unknown_name
from wattcast.power.component import lanes
from wattcast.power.component.lanes import LaneStatic
from wattcast.power.component.leakage import Leakage
from wattcast.power.interface import Kind, Power
from wattcast.power.static import VoltageCurve

LEAKAGE = "LEAKAGEP"


class Drive(StrEnum):
    """What a term multiplies."""

    COUNT = "count"  # J per count, over the interval's length
    MEAN = "mean"  # W per unit of a mean
    DUTY = "duty"  # W per unit of a mean at the reference clock, in proportion to the clock


@dataclass(frozen=True)
class Term:
    """One event's contribution to one part."""

    event: str
    part: str
    value: float  # J or W, with the scaling factor in it
    drive: Drive


@dataclass(frozen=True)
class Part:
    """One component as the model sees it."""

    name: str
    voltage_exponent: int
    constant_w: float = 0.0
    clocked: bool = False  # its constant is in proportion to the clock
    static: bool = False  # LaneStatic adds to it


@dataclass(frozen=True)
class ComponentPower:
    """Energies by event and part; what the parts do with voltage and clock; static power and leakage."""

    terms: tuple[Term, ...]
    part_list: tuple[Part, ...]
    reference_clock_hz: float
    reference_voltage_v: float = 1.0
    voltage: VoltageCurve | None = None  # for activities that do not say their voltage
    static: LaneStatic | None = None
    leakage: Leakage | None = None
    duty_cap: float | None = None  # the originals cut the pipeline duty here

    def __post_init__(self) -> None:
        names = [part.name for part in self.part_list]
        known = events()
        for term in self.terms:
            if term.event not in known:
                raise unknown_name("event", term.event, known)
            if term.part not in names:
                raise unknown_name("component", term.part, names)
            if not (np.isfinite(term.value) and term.value >= 0):
                raise bad_value(f"{term.part}: {term.event}", "J or W, zero or more", term.value)
            if known[term.event].is_mean != (term.drive is not Drive.COUNT):
                raise bad_value(f"{term.part}: {term.event}", "a mean with watts or a count with joules", term.drive)
        if not (self.reference_clock_hz > 0 and self.reference_voltage_v > 0):
            raise bad_value("reference", "a clock and a voltage above zero", self.reference_clock_hz)

    @property
    def required_events(self) -> tuple[str, ...]:
        needed = [term.event for term in self.terms if term.value > 0]
        if self.static is not None:
            needed += lanes.EVENTS
        if self.leakage is not None and self.leakage.gated:
            needed.append("idle_sm")
        return tuple(dict.fromkeys(needed))

    @property
    def parts(self) -> tuple[str, ...]:
        names = tuple(part.name for part in self.part_list)
        return names if self.leakage is None else (*names, LEAKAGE)

    def power(self, activity: Activity) -> Power:
        """Watts of each component in every interval."""
        activity.require(self.required_events, "component power")
        clock = self._relative_clock(activity)
        voltage = self._relative_voltage(activity)
        shape = np.broadcast_shapes(
            activity.duration_s.shape, activity.value.shape[:-1], np.shape(clock), np.shape(voltage)
        )
        parts_w = np.empty((len(self.parts), *shape))
        for row, part in enumerate(self.part_list):
            self._part(part, activity, clock, voltage, parts_w[row])
        if self.leakage is not None:
            idle = activity.of("idle_sm") if activity.has("idle_sm") else np.zeros(shape)
            parts_w[-1] = self.leakage.at(idle, voltage)
        return Power(np.moveaxis(parts_w, 0, -1), self.parts)

    def seen_by(self, names: Iterable[str]) -> tuple[ComponentPower, tuple[str, ...], tuple[str, ...]]:
        """This model without what these events cannot show: the model, parts lost, parts that are partial.

        A part that no visible event drives is left out; one that some of its events drive stays, and is named.
        """
        visible = set(names)
        kept = tuple(term for term in self.terms if term.event in visible)
        driven = {term.part for term in kept}
        undriven = {term.part for term in self.terms} - driven
        static_lost = self.static is not None and not set(lanes.EVENTS) <= visible
        lost = tuple(
            p.name for p in self.part_list if (p.name in undriven and not p.constant_w) or (p.static and static_lost)
        )
        partial = tuple(
            dict.fromkeys(t.part for t in self.terms if t.event not in visible and t.part not in lost and t.value > 0)
        )
        model = replace(
            self,
            terms=tuple(term for term in kept if term.part not in lost),
            part_list=tuple(p for p in self.part_list if p.name not in lost),
            static=None if static_lost else self.static,
        )
        return model, lost, partial

    def original_total_w(self, power: Power, activity: Activity, left_out: Iterable[str]) -> Array:
        """The total AccelWattch prints: voltage scaling has reached only the parts it adds last."""
        voltage = self._relative_voltage(activity)
        last = set(left_out)
        exponents = [0 if p.name in last else p.voltage_exponent for p in self.part_list]
        total = np.zeros(power.part_w.shape[:-1])
        for column, exponent in enumerate(exponents):
            total += power.part_w[..., column] / voltage**exponent
        return total

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        return {
            "terms": [[t.event, t.part, t.value, t.drive.value] for t in self.terms],
            "parts": [[p.name, p.voltage_exponent, p.constant_w, p.clocked, p.static] for p in self.part_list],
            "reference_clock_hz": self.reference_clock_hz,
            "reference_voltage_v": self.reference_voltage_v,
            "voltage": self.voltage.to_plain() if self.voltage else None,
            "static": self.static.to_plain() if self.static else None,
            "leakage": self.leakage.to_plain() if self.leakage else None,
            "duty_cap": self.duty_cap,
        }

    def _part(self, part: Part, activity: Activity, clock: Array, voltage: Array, out: Array) -> None:
        """Fill ``out`` with one part's watts; joules are added up before the one division by time."""
        out[...] = 0.0
        counts = [t for t in self.terms if t.part == part.name and t.drive is Drive.COUNT and t.value > 0]
        for term in counts:
            out += term.value * activity.of(term.event)
        if counts:
            lasting = activity.duration_s > 0
            np.divide(out, activity.duration_s, out=out, where=np.broadcast_to(lasting, out.shape))
            out[~np.broadcast_to(lasting, out.shape)] = 0.0
        for term in self.terms:
            if term.part == part.name and term.drive is not Drive.COUNT and term.value > 0:
                mean = activity.of(term.event)
                if term.drive is Drive.DUTY:
                    mean = (mean if self.duty_cap is None else np.minimum(mean, self.duty_cap)) * clock
                out += term.value * mean
        if part.constant_w:
            out += part.constant_w * (clock if part.clocked else 1.0)
        if part.static and self.static is not None:
            out += self.static.at(activity)
        if part.voltage_exponent:
            out *= voltage**part.voltage_exponent

    def _relative_clock(self, activity: Activity) -> Array:
        needs = any(t.drive is Drive.DUTY for t in self.terms) or any(p.clocked for p in self.part_list)
        if activity.at.clock_hz is None:
            if needs:
                raise bad_value("activity.at.clock_hz", "the core clock of each interval", None)
            return np.ones(())
        return np.asarray(activity.at.clock_hz, dtype=np.float64) / self.reference_clock_hz

    def _relative_voltage(self, activity: Activity) -> Array:
        if activity.has("core_voltage"):
            return activity.of("core_voltage") / self.reference_voltage_v
        if self.voltage is not None and activity.at.clock_hz is not None:
            return self.voltage.at(activity.at.clock_hz) / self.voltage.at(self.reference_clock_hz)
        return np.ones(())


def _from_plain(plain: Mapping[str, Any]) -> ComponentPower:
    curve = plain["voltage"]
    return ComponentPower(
        tuple(Term(e, p, float(v), Drive(d)) for e, p, v, d in plain["terms"]),
        tuple(Part(n, int(k), float(w), bool(c), bool(s)) for n, k, w, c, s in plain["parts"]),
        float(plain["reference_clock_hz"]),
        float(plain["reference_voltage_v"]),
        None
        if curve is None
        else VoltageCurve(np.array(curve["clock_hz"], float), np.array(curve["relative"], float)),
        None if plain["static"] is None else LaneStatic.from_plain(plain["static"]),
        None if plain["leakage"] is None else Leakage.from_plain(plain["leakage"]),
        None if plain["duty_cap"] is None else float(plain["duty_cap"]),
    )


def _example() -> ComponentPower:
    return ComponentPower(
        (
            Term("l1_read_hit", "DCP", 3e-10, Drive.COUNT),
            Term("dram_read_access", "DRAMP", 2e-8, Drive.COUNT),
            Term("pipe_duty", "PIPEP", 25.0, Drive.DUTY),
            Term("idle_sm", "IDLE_COREP", 1.5, Drive.MEAN),
        ),
        (Part("DCP", 2), Part("DRAMP", 0), Part("PIPEP", 2), Part("IDLE_COREP", 1), Part("CONST", 2, 10.0, True)),
        7e8,
        leakage=Leakage(30.0, 5.0, 16.0),
    )


KIND = Kind("component", _from_plain, _example)
