"""Static power of active SMs by instruction mix, active lanes and active SMs, after AccelWattch.

P = (P_first(mix) + (lanes − 1) · P_more(mix)) · (N − idle) / N. The mix is which kinds of units
worked in the interval. Without any, memory alone is at work (L1, shared memory or L2, in that
order), or almost nothing.
"""

from __future__ import annotations

import re
from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
)
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from enum import StrEnum
from itertools import chain
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
# Static powers of an AccelWattch architecture file: by instruction mix, first and further lanes; by
# memory
_MIX_NAMES = (*(f"cat{n}" for n in range(1, 7)), "light", "intadd", "intmul", "geomean")
STATIC_NAMES = tuple(f"static_{mix}_{lane}" for mix in _MIX_NAMES for lane in _LANES)
STATIC_NAMES += ("static_shared_flane", "static_l1_flane", "static_l2_flane")
# Kinds of units by the events that show them at work
_UNITS = {
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
_UNIT_EVENTS = tuple(chain.from_iterable(_UNITS.values()))
_MEMORY_EVENTS = tuple(chain.from_iterable(_MEMORIES.values()))
EVENTS = (*_UNIT_EVENTS, *_MEMORY_EVENTS, "idle_sm")
# Mixes of integer and fp units with one further kind
_MIX_WITH_BOTH = {
    "": "cat2",
    "dp": "cat3",
    "sfu": "cat4",
    "texture": "cat5",
    "tensor": "cat6",
}


def _name_mix(kinds: set[str]) -> str:
    """Return AccelWattch's name for a mix of units; light where none works."""
    integer_kinds = kinds & {"add", "mul"}
    further_kinds = kinds - {"add", "mul", "fp"}
    if integer_kinds and "fp" in kinds and len(further_kinds) <= 1:
        return _MIX_WITH_BOTH["".join(further_kinds)]
    if not kinds:
        return "light"
    if integer_kinds == kinds:
        return "cat1" if len(kinds) == 2 else f"int{''.join(kinds)}"
    return "geomean"


def _list_mixes() -> Iterator[str]:
    """Yield the mix of each code, whose bits say which kinds of ``_UNITS`` work."""
    for code in range(1 << len(_UNITS)):
        yield _name_mix({kind for bit, kind in enumerate(_UNITS) if code >> bit & 1})


_MIXES = tuple(_list_mixes())


@dataclass(frozen=True)
class LaneStatic:
    """AccelWattch's static powers and the number of SMs they are shared over."""

    power_w: Mapping[str, float]  # static_cat1_flane ...
    sm_count: float
    full_warp: float = 32.0  # lanes of an executing warp where the activity does not say
    compat: bool = False  # AccelWattch asks which energies are not zero instead of which counts

    def __post_init__(self) -> None:
        missing_names = [name for name in STATIC_NAMES if name not in self.power_w]
        if missing_names:
            listed = ", ".join(missing_names)
            expected = "all of AccelWattch's static powers"
            raise bad_value("static power", expected, f"none for {listed}")
        if not self.sm_count > 0:
            raise bad_value("static power: SMs", "a number above zero", self.sm_count)

    def at(self, activity: Activity) -> Array:
        """Return the watts in each interval, at the reference voltage."""
        lanes = np.ceil(self.lanes(activity))  # the original counts in whole lanes, upwards
        works = {kind: _happened(activity, events) for kind, events in _UNITS.items()}
        if self.compat:  # the energy of an addition is never zero
            works["add"] = np.ones_like(works["add"])
        code = sum(mask.astype(np.intp) << bit for bit, mask in enumerate(works.values()))
        first_w = self._mix_w("flane")[code]
        more_w = self._mix_w("addlane")[code]

        # Where no lane is active, or lanes are and no unit works, memory alone is at work, or
        # almost nothing.
        uses = {memory: _happened(activity, events) for memory, events in _MEMORIES.items()}
        memory_w = [self.power_w[f"static_{memory}_flane"] for memory in uses]
        alone_w = np.select(list(uses.values()), memory_w, self.power_w["static_light_flane"])
        if self.compat:  # the energy of an L1 access is never zero
            alone_w = np.full(alone_w.shape, self.power_w["static_l1_flane"])
        is_asleep = lanes <= 0
        no_unit_works = np.equal(code, 0)
        uses_memory_alone = no_unit_works & np.any(list(uses.values()), axis=0)
        first_w = np.where(is_asleep | no_unit_works, alone_w, first_w)
        more_w = np.where(is_asleep | uses_memory_alone, 0.0, more_w)

        idle_sm = np.clip(activity.event_values("idle_sm"), 0.0, self.sm_count)
        active_share = (self.sm_count - idle_sm) / self.sm_count
        lanes_w = np.where(is_asleep, 0.0, (lanes - 1.0) * more_w)
        return np.asarray((first_w + lanes_w) * active_share)

    def _mix_w(self, lane: str) -> Array:
        """Return the watts of a lane by the code of the mix."""
        return np.array([self.power_w[f"static_{mix}_{lane}"] for mix in _MIXES])

    def lanes(self, activity: Activity) -> Array:
        """Return the active threads of an executing warp.

        They are as the activity says, or full warps where a unit worked.
        """
        if activity.has("active_thread"):
            return activity.event_values("active_thread")
        return np.asarray(_happened(activity, _UNIT_EVENTS) * self.full_warp)


def _happened(activity: Activity, events: Iterable[str]) -> Mask:
    """Tell for each interval whether one of the events happened at all."""
    shape = np.broadcast_shapes(activity.duration_s.shape, activity.value.shape[:-1])
    happened = np.zeros(shape, dtype=np.bool_)
    for event in events:
        if activity.has(event):
            happened |= activity.event_values(event) > 0
    return happened


_MAX_BYTE = 4 << 20


@dataclass(frozen=True)
class Leakage:
    """Leakage of all SMs together and of the rest of the chip, in watts at the reference
    voltage.
    """

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

    def at(
        self,
        idle_sm: Array,
        relative_voltage: Array,
    ) -> Array:
        """Return the watts in each interval."""
        idle = np.clip(idle_sm, 0.0, self.sm_count) / self.sm_count
        awake = 1.0 - idle if self.gated else np.ones_like(idle)
        return np.asarray(relative_voltage * (self.cores_w * awake + self.rest_w))


def read_mcpat(
    path: Path,
    sm_count: float | None = None,
    gated: bool = False,
) -> Leakage:
    """Read leakage from the area and power listing that McPAT prints at the start of a run.

    Subthreshold and gate leakage of ``Total Cores`` and of everything else under ``Processor``.
    ``sm_count`` overrides McPAT's number of cores, which is the architecture file's and not always
    the simulator's.
    """
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    processor_w, _ = _read_leakage(text, r"Processor:()", path.name)
    cores_w, core_count = _read_leakage(text, r"Total Cores:\s*(\d+)\s*cores", path.name)
    return Leakage(cores_w, processor_w - cores_w, float(sm_count or core_count), gated)


def _read_leakage(
    text: str,
    heading: str,
    where: str,
) -> tuple[float, float]:
    """Return the leakage in W of the block below a heading of McPAT, and the number in it."""
    start = re.search(heading, text)
    block = ""
    if start is not None:
        block = text[start.end() : start.end() + 2000].split("\n\n")[0]
    leakage_w = 0.0
    for kind in ("Subthreshold", "Gate"):
        match = re.search(rf"{kind} Leakage = ([\d.eE+-]+) W", block)
        if start is None or match is None:
            expected = "McPAT's listing with Subthreshold and Gate Leakage"
            raise bad_value(where, expected, f"none under {heading.removesuffix('()')!r}")
        leakage_w += read_number(match[1], f"{where}: leakage", 0.0)
    count = float(start[1] or 0.0) if start is not None else 0.0
    return leakage_w, count


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
    """Energies by event and part, how parts follow voltage and clock, static power and leakage."""

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
        for term in self.terms:
            self._check_term(term)
        if not (self.reference_clock_hz > 0 and self.reference_voltage_v > 0):
            expected = "a clock and a voltage above zero"
            raise bad_value("reference", expected, self.reference_clock_hz)

    def _check_term(self, term: Term) -> None:
        events = known_events()
        where = f"{term.part}: {term.event}"
        check_names("event", term.event, events, "")
        check_names("component", term.part, [part.name for part in self.part_list], "")
        if not (np.isfinite(term.value) and term.value >= 0):
            raise bad_value(where, "J or W, zero or more", term.value)
        if events[term.event].is_mean != (term.drive is not Drive.COUNT):
            raise bad_value(where, "a mean with watts or a count with joules", term.drive)

    @property
    def required_events(self) -> tuple[str, ...]:
        events = [term.event for term in self.terms if term.value > 0]
        if self.static is not None:
            events += EVENTS
        if self.leakage is not None and self.leakage.gated:
            events.append("idle_sm")
        return tuple(dict.fromkeys(events))

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
        elif self._follows_clock:
            raise bad_value("activity.at.clock_hz", "the core clock of each interval", None)
        shape = np.broadcast_shapes(
            activity.duration_s.shape, activity.value.shape[:-1], np.shape(clock), np.shape(voltage)
        )
        parts_w = np.empty((len(self.parts), *shape))
        for row, part in enumerate(self.part_list):
            self._part(
                part,
                activity,
                clock,
                voltage,
                parts_w[row],
            )
        if self.leakage is not None:
            idle = activity.event_values("idle_sm") if activity.has("idle_sm") else np.zeros(shape)
            parts_w[-1] = self.leakage.at(idle, voltage)
        return Power(np.moveaxis(parts_w, 0, -1), self.parts)

    @property
    def _follows_clock(self) -> bool:
        has_duty = any(term.drive is Drive.DUTY for term in self.terms)
        return has_duty or any(part.clocked for part in self.part_list)

    def seen_by(
        self, names: Iterable[str]
    ) -> tuple[ComponentPower, tuple[str, ...], tuple[str, ...]]:
        """Leave out what these events cannot show.

        With the model come the parts that are left out, because no visible event drives them, and
        those that are partial, because only some of their events are visible.
        """
        visible = set(names)
        driven_parts = {term.part for term in self.terms if term.event in visible}
        undriven_parts = {term.part for term in self.terms} - driven_parts
        static = self.static if set(EVENTS) <= visible else None
        loses_static = self.static is not None and static is None

        parts = []
        hidden_names = []
        for part in self.part_list:
            is_undriven = part.name in undriven_parts and not part.constant_w
            if is_undriven or (part.static and loses_static):
                hidden_names.append(part.name)
            else:
                parts.append(part)

        terms = []
        partial_names = []
        for term in self.terms:
            if term.part in hidden_names:
                continue
            if term.event in visible:
                terms.append(term)
            elif term.value > 0:
                partial_names.append(term.part)
        model = replace(
            self,
            terms=tuple(terms),
            part_list=tuple(parts),
            static=static,
        )
        return model, tuple(hidden_names), tuple(dict.fromkeys(partial_names))

    def original_total_w(
        self,
        power: Power,
        activity: Activity,
        left_out: Iterable[str],
    ) -> Array:
        """Return the total that AccelWattch prints.

        There voltage scaling has reached only the parts that it adds last.
        """
        voltage = self._relative_voltage(activity)
        last_parts = set(left_out)
        total = np.zeros(power.part_w.shape[:-1])
        for column, part in enumerate(self.part_list):
            part_w = power.part_w[..., column]
            if part.name not in last_parts:
                part_w = part_w / voltage**part.voltage_exponent
            total += part_w
        return total

    def to_plain(self) -> dict[str, Any]:
        """Return the coefficients for YAML: terms and parts as rows."""
        plain = coefficients_to_plain(self)
        terms = [list(row.values()) for row in plain.pop("terms")]
        parts = [list(row.values()) for row in plain.pop("part_list")]
        return {
            "terms": terms,
            "parts": parts,
            **plain,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ComponentPower:
        """Build the model from what ``to_plain`` returned."""
        terms = [_name_columns(Term, row) for row in plain["terms"]]
        parts = [_name_columns(Part, row) for row in plain["parts"]]
        columns = {
            **plain,
            "terms": terms,
            "part_list": parts,
        }
        model: ComponentPower = build_coefficients(cls, columns)
        return model

    def _part(
        self,
        part: Part,
        activity: Activity,
        clock: Array,
        voltage: Array,
        out: Array,
    ) -> None:
        """Fill ``out`` with one part's watts; joules are added up before one division by time."""
        out[...] = 0.0
        counts: list[Term] = []
        means: list[Term] = []
        for term in self.terms:
            if term.part == part.name and term.value > 0:
                terms_of_drive = counts if term.drive is Drive.COUNT else means
                terms_of_drive.append(term)
        for term in counts:
            out += term.value * activity.event_values(term.event)
        if counts:
            has_duration = np.broadcast_to(activity.duration_s > 0, out.shape)
            np.divide(out, activity.duration_s, out=out, where=has_duration)
            out[~has_duration] = 0.0
        for term in means:
            out += term.value * self._mean_value(term, activity, clock)
        if part.constant_w:
            out += part.constant_w * (clock if part.clocked else 1.0)
        if part.static and self.static is not None:
            out += self.static.at(activity)
        if part.voltage_exponent:
            out *= voltage**part.voltage_exponent

    def _mean_value(
        self,
        term: Term,
        activity: Activity,
        clock: Array,
    ) -> Array:
        """Return the value of a mean; a duty is capped, and in proportion to the clock."""
        mean = activity.event_values(term.event)
        if term.drive is not Drive.DUTY:
            return mean
        if self.duty_cap is not None:
            mean = np.minimum(mean, self.duty_cap)
        return mean * clock

    def _relative_voltage(self, activity: Activity) -> Array:
        if activity.has("core_voltage"):
            return activity.event_values("core_voltage") / self.reference_voltage_v
        if self.voltage is not None and activity.at.clock_hz is not None:
            reference_level = self.voltage.level_at(self.reference_clock_hz)
            return self.voltage.level_at(activity.at.clock_hz) / reference_level
        return np.ones(())


def _name_columns(kind: type[Term] | type[Part], row: Iterable[Any]) -> dict[str, Any]:
    """Return a row of a file with the names of its columns."""
    names = [item.name for item in fields(kind)]
    return dict(zip(names, row, strict=True))
