"""Static power of active SMs by instruction mix, active lanes and active SMs, after AccelWattch.

P = (P_first(mix) + (lanes − 1) · P_more(mix)) · (N − idle) / N. The mix is which kinds of units
worked in the interval. Without any, memory alone is at work (L1, shared memory or L2, in that
order), or almost nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from wattcast.core import bad_value, check_names
from wattcast.core.arrays import Array, Mask
from wattcast.core.strict_files import read_bytes, read_number
from wattcast.power.activity import Activity, known_events
from wattcast.power.power_model import (
    Power,
    PowerModel,
    VoltageCurve,
    build_coefficients,
    coefficients_to_plain,
)

_LANES = ("flane", "addlane")  # the first lane, and each further one
# static powers of an AccelWattch architecture file: by instruction mix, first and further lanes; by
# memory
_MIX_NAMES = (*(f"cat{n}" for n in range(1, 7)), "light", "intadd", "intmul", "geomean")
STATIC_NAMES = tuple(f"static_{mix}_{lane}" for mix in _MIX_NAMES for lane in _LANES)
STATIC_NAMES += tuple(f"static_{memory}_flane" for memory in ("shared", "l1", "l2"))
_UNITS = {  # kinds of units by the events that show them at work
    "add": ("int_access",),
    "mul": ("int_mul24_access", "int_mul32_access", "int_mul_access", "int_div_access"),
    "fp": ("fpu_access", "fp_mul_access", "fp_div_access"),
    "dp": ("dpu_access", "dp_mul_access", "dp_div_access"),
    "sfu": ("fp_sqrt_access", "fp_log_access", "fp_sin_access", "fp_exp_access"),
    "tensor": ("tensor_access",),
    "texture": ("texture_access",),
}
_MEMORIES = {
    "l1": ("l1_read_hit", "l1_read_miss", "l1_write_hit", "l1_write_miss"),
    "shared": ("shared_access",),
    "l2": ("l2_read_hit", "l2_read_miss", "l2_write_hit", "l2_write_miss"),
}
EVENTS = (
    *(event for kinds in (_UNITS, _MEMORIES) for events in kinds.values() for event in events),
    "idle_sm",
)
_WITH_BOTH = {
    "": "cat2",
    "dp": "cat3",
    "sfu": "cat4",
    "texture": "cat5",
    "tensor": "cat6",
}  # beside integer and fp


def _name_mix(kinds: set[str]) -> str:
    """Return AccelWattch's name for a mix of units; light where none works."""
    integer = kinds & {"add", "mul"}
    others = kinds - {"add", "mul", "fp"}
    if integer and "fp" in kinds and len(others) <= 1:
        return _WITH_BOTH["".join(others)]
    if integer == kinds:
        return "light" if not kinds else "cat1" if len(kinds) == 2 else f"int{''.join(kinds)}"
    return "geomean"


_MIXES = tuple(
    _name_mix({kind for i, kind in enumerate(_UNITS) if code >> i & 1})
    for code in range(1 << len(_UNITS))
)


@dataclass(frozen=True)
class LaneStatic:
    """AccelWattch's static powers and the number of SMs they are shared over."""

    power_w: Mapping[str, float]  # static_cat1_flane ...
    sm_count: float
    full_warp: float = 32.0  # lanes of an executing warp where the activity does not say
    compat: bool = False  # AccelWattch asks which energies are not zero instead of which counts

    def __post_init__(self) -> None:
        if lost := [name for name in STATIC_NAMES if name not in self.power_w]:
            raise bad_value(
                "static power", "all of AccelWattch's static powers", f"none for {', '.join(lost)}"
            )
        if not self.sm_count > 0:
            raise bad_value("static power: SMs", "a number above zero", self.sm_count)

    def at(self, activity: Activity) -> Array:
        """Return the watts in each interval, at the reference voltage."""
        lanes = np.ceil(self.lanes(activity))  # the original counts in whole lanes, upwards
        works = {kind: _happened(activity, events) for kind, events in _UNITS.items()}
        if self.compat:  # the energy of an addition is never zero
            works["add"] = np.ones_like(works["add"])
        code = sum(mask.astype(np.intp) << i for i, mask in enumerate(works.values()))
        first, more = (
            np.array([self.power_w[f"static_{m}_{lane}"] for m in _MIXES])[code] for lane in _LANES
        )
        # where no lane is active, or lanes are and no unit works, memory alone is at work, or
        # almost nothing
        used = {memory: _happened(activity, events) for memory, events in _MEMORIES.items()}
        memory_w = [self.power_w[f"static_{memory}_flane"] for memory in used]
        alone_w = np.select(list(used.values()), memory_w, self.power_w["static_light_flane"])
        if self.compat:  # the energy of an L1 access is never zero
            alone_w = np.full(alone_w.shape, self.power_w["static_l1_flane"])
        asleep = lanes <= 0
        no_unit = np.equal(code, 0)
        first = np.where(asleep | no_unit, alone_w, first)
        more = np.where(asleep | (no_unit & np.any(list(used.values()), axis=0)), 0.0, more)
        active = (
            self.sm_count - np.clip(activity.event_values("idle_sm"), 0.0, self.sm_count)
        ) / self.sm_count
        return np.asarray((first + np.where(asleep, 0.0, (lanes - 1.0) * more)) * active)

    def lanes(self, activity: Activity) -> Array:
        """Return the active threads of an executing warp as the activity says, or full warps where
        a unit worked.
        """
        if activity.has("active_thread"):
            return activity.event_values("active_thread")
        return np.asarray(
            _happened(activity, (e for events in _UNITS.values() for e in events)) * self.full_warp
        )


def _happened(activity: Activity, events: Iterable[str]) -> Mask:
    """Tell for each interval whether one of the events happened at all."""
    found = np.zeros(
        np.broadcast_shapes(activity.duration_s.shape, activity.value.shape[:-1]), dtype=np.bool_
    )
    for event in events:
        if activity.has(event):
            found |= activity.event_values(event) > 0
    return found


_MAX_BYTE = 4 << 20


@dataclass(frozen=True)
class Leakage:
    """Leakage of all SMs together and of the rest of the chip, in watts at the reference voltage."""

    cores_w: float
    rest_w: float
    sm_count: float
    gated: bool = False  # idle SMs are cut off from power

    def __post_init__(self) -> None:
        for name, value in (("cores", self.cores_w), ("rest", self.rest_w)):
            if not (np.isfinite(value) and value >= 0):
                raise bad_value(f"leakage of {name}", "watts, zero or more", value)
        if not self.sm_count > 0:
            raise bad_value("leakage: SMs", "a number above zero", self.sm_count)

    def at(self, idle_sm: Array, relative_voltage: Array) -> Array:
        """Return the watts in each interval."""
        idle = np.clip(idle_sm, 0.0, self.sm_count) / self.sm_count
        awake = 1.0 - idle if self.gated else np.ones_like(idle)
        return np.asarray(relative_voltage * (self.cores_w * awake + self.rest_w))


def read_mcpat(path: Path, sm_count: float | None = None, gated: bool = False) -> Leakage:
    """Read leakage from the area and power listing that McPAT prints at the start of a run.

    Subthreshold and gate leakage of ``Total Cores`` and of everything else under ``Processor``.
    ``sm_count`` overrides McPAT's number of cores, which is the architecture file's and not always
    the simulator's."""
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    watts = []
    count = sm_count or 0.0
    for heading in (r"Processor:()", r"Total Cores:\s*(\d+)\s*cores"):
        start = re.search(heading, text)
        block = text[start.end() : start.end() + 2000].split("\n\n")[0] if start else ""
        found = [
            re.search(rf"{kind} Leakage = ([\d.eE+-]+) W", block)
            for kind in ("Subthreshold", "Gate")
        ]
        if start is None or None in found:
            wanted = "McPAT's listing with Subthreshold and Gate Leakage"
            raise bad_value(path.name, wanted, f"none under {heading.removesuffix('()')!r}")
        watts.append(
            sum(read_number(match[1], f"{path.name}: leakage", 0.0) for match in found if match)
        )
        count = count or float(start[1] or 0.0)
    return Leakage(watts[1], watts[0] - watts[1], float(count), gated)


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
class ComponentPower(PowerModel):
    """Energies by event and part; what the parts do with voltage and clock; static power and
    leakage.
    """

    kind: ClassVar[str] = "component"
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
        known = known_events()
        for term in self.terms:
            check_names("event", term.event, known, "")
            check_names("component", term.part, names, "")
            if not (np.isfinite(term.value) and term.value >= 0):
                raise bad_value(f"{term.part}: {term.event}", "J or W, zero or more", term.value)
            if known[term.event].is_mean != (term.drive is not Drive.COUNT):
                raise bad_value(
                    f"{term.part}: {term.event}",
                    "a mean with watts or a count with joules",
                    term.drive,
                )
        if not (self.reference_clock_hz > 0 and self.reference_voltage_v > 0):
            raise bad_value(
                "reference", "a clock and a voltage above zero", self.reference_clock_hz
            )

    @property
    def required_events(self) -> tuple[str, ...]:
        needed = [term.event for term in self.terms if term.value > 0]
        if self.static is not None:
            needed += EVENTS
        if self.leakage is not None and self.leakage.gated:
            needed.append("idle_sm")
        return tuple(dict.fromkeys(needed))

    @property
    def parts(self) -> tuple[str, ...]:
        names = tuple(part.name for part in self.part_list)
        return names if self.leakage is None else (*names, LEAKAGE)

    def power(self, activity: Activity) -> Power:
        """Return the watts of each component in every interval."""
        activity.require(self.required_events, "component power")
        clock = np.ones(())
        voltage = self._relative_voltage(activity)
        if activity.at.clock_hz is not None:
            clock = np.asarray(activity.at.clock_hz, dtype=np.float64) / self.reference_clock_hz
        elif any(t.drive is Drive.DUTY for t in self.terms) or any(
            p.clocked for p in self.part_list
        ):
            raise bad_value("activity.at.clock_hz", "the core clock of each interval", None)
        shape = np.broadcast_shapes(
            activity.duration_s.shape, activity.value.shape[:-1], np.shape(clock), np.shape(voltage)
        )
        parts_w = np.empty((len(self.parts), *shape))
        for row, part in enumerate(self.part_list):
            self._part(part, activity, clock, voltage, parts_w[row])
        if self.leakage is not None:
            idle = activity.event_values("idle_sm") if activity.has("idle_sm") else np.zeros(shape)
            parts_w[-1] = self.leakage.at(idle, voltage)
        return Power(np.moveaxis(parts_w, 0, -1), self.parts)

    def seen_by(
        self, names: Iterable[str]
    ) -> tuple[ComponentPower, tuple[str, ...], tuple[str, ...]]:
        """Leave out what these events cannot show; return the model, the parts lost and the parts
        that are partial.

        A part that no visible event drives is left out; one that some of its events drive stays,
        and is named."""
        visible = set(names)
        kept = tuple(term for term in self.terms if term.event in visible)
        driven = {term.part for term in kept}
        undriven = {term.part for term in self.terms} - driven
        static_lost = self.static is not None and not set(EVENTS) <= visible
        unseen = [
            p
            for p in self.part_list
            if (p.name in undriven and not p.constant_w) or (p.static and static_lost)
        ]
        lost = tuple(part.name for part in unseen)
        partial = [
            t.part
            for t in self.terms
            if t.event not in visible and t.part not in lost and t.value > 0
        ]
        terms = tuple(term for term in kept if term.part not in lost)
        parts = tuple(part for part in self.part_list if part not in unseen)
        model = replace(
            self, terms=terms, part_list=parts, static=None if static_lost else self.static
        )
        return model, lost, tuple(dict.fromkeys(partial))

    def original_total_w(self, power: Power, activity: Activity, left_out: Iterable[str]) -> Array:
        """Return the total that AccelWattch prints: voltage scaling has reached only the parts it
        adds last.
        """
        voltage = self._relative_voltage(activity)
        last = set(left_out)
        total = np.zeros(power.part_w.shape[:-1])
        for column, part in enumerate(self.part_list):
            total += power.part_w[..., column] / voltage ** (
                0 if part.name in last else part.voltage_exponent
            )
        return total

    def to_plain(self) -> dict[str, Any]:
        """Return the coefficients for YAML: terms and parts as rows."""
        plain = coefficients_to_plain(self)
        terms, parts = (
            [list(row.values()) for row in plain.pop(name)] for name in ("terms", "part_list")
        )
        return {"terms": terms, "parts": parts, **plain}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ComponentPower:
        """Build the model from what ``to_plain`` returned."""
        terms, parts = (
            [
                dict(zip((item.name for item in fields(kind)), row, strict=True))
                for row in plain[name]
            ]
            for name, kind in (("terms", Term), ("parts", Part))
        )
        model: ComponentPower = build_coefficients(
            cls, {**plain, "terms": terms, "part_list": parts}
        )
        return model

    def _part(
        self, part: Part, activity: Activity, clock: Array, voltage: Array, out: Array
    ) -> None:
        """Fill ``out`` with one part's watts; joules are added up before the one division by time."""
        out[...] = 0.0
        own = [t for t in self.terms if t.part == part.name and t.value > 0]
        counts = [t for t in own if t.drive is Drive.COUNT]
        for term in counts:
            out += term.value * activity.event_values(term.event)
        if counts:
            lasting = np.broadcast_to(activity.duration_s > 0, out.shape)
            np.divide(out, activity.duration_s, out=out, where=lasting)
            out[~lasting] = 0.0
        for term in own:
            if term.drive is not Drive.COUNT:
                mean = activity.event_values(term.event)
                if term.drive is Drive.DUTY:
                    mean = (
                        mean if self.duty_cap is None else np.minimum(mean, self.duty_cap)
                    ) * clock
                out += term.value * mean
        if part.constant_w:
            out += part.constant_w * (clock if part.clocked else 1.0)
        if part.static and self.static is not None:
            out += self.static.at(activity)
        if part.voltage_exponent:
            out *= voltage**part.voltage_exponent

    def _relative_voltage(self, activity: Activity) -> Array:
        if activity.has("core_voltage"):
            return activity.event_values("core_voltage") / self.reference_voltage_v
        if self.voltage is not None and activity.at.clock_hz is not None:
            return self.voltage.level_at(activity.at.clock_hz) / self.voltage.level_at(
                self.reference_clock_hz
            )
        return np.ones(())
