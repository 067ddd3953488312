"""Energies per count, and the components that they drive.

An energy is joules per count before the architecture's scaling factor; a duty has watts at duty 1
and the reference clock instead. A table comes from a simulator run (CSV), from our YAML form, or is
built bottom-up. Figures that a table cannot hold (the coalescer's share of a cache access) stay
None."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from wattcast.core import strict_files, units
from wattcast.core.errors import bad_value, check_names
from wattcast.core.strict_files import (
    decode_yaml,
    read_bytes,
    read_number,
    read_shipped_table,
    read_shipped_yaml,
)
from wattcast.lab.gpuwattch.trace_reading import (
    CUSTOM_EVENTS,
    SimulatorDialect,
    dialect_counters,
)
from wattcast.power.component_power import Leakage

DUTY = "PIPE_A"
IDLE = "IDLE_CORE_N"
_MAX_BYTE = 1 << 20
_NO_ENERGY = ("CONST_DYNAMICN", "constant_power")  # rows that stand for constants


@dataclass(frozen=True)
class EnergyTable:
    """Energies per count of one device, its constant powers and its leakage."""

    name: str
    energy_j: Mapping[str, float]  # counter -> J per count, unscaled
    duty_w: float  # W of the pipelines at duty 1 and the reference clock, unscaled
    reference_clock_hz: float
    mc_constant_w: float = 0.0
    coalescer_read_j: float | None = None
    coalescer_write_j: float | None = None
    leakage: Leakage | None = None
    scaling: Mapping[str, float] = field(default_factory=dict)  # factors the table itself names
    source: str = ""
    interval_j: Mapping[str, tuple[float, float]] = field(
        default_factory=dict
    )  # 5th to 95th percentile, if fitted

    def __post_init__(self) -> None:
        columns = {c.column for d in SimulatorDialect for c in dialect_counters(d)}
        check_names(f"counter in {self.name}", self.energy_j, columns, "")
        figures = {name: ("J", value) for name, value in self.energy_j.items()}
        figures |= {"pipelines": ("W", self.duty_w), "memory controller": ("W", self.mc_constant_w)}
        for name, (unit, value) in figures.items():
            if not (math.isfinite(value) and value >= 0):
                raise bad_value(f"{self.name}: {name}", f"{unit}, zero or more", value)
        if not (math.isfinite(self.reference_clock_hz) and self.reference_clock_hz > 0):
            raise bad_value(
                f"{self.name}: reference clock", "a clock above zero", self.reference_clock_hz
            )


def read_energies(
    path: Path,
    sample_cycle: int = 500,
    clock_hz: float | None = None,
) -> EnergyTable:
    """Read an energy table: YAML in our form, or CSV as dumped from a simulator run.

    A CSV gives the time of a sample; its clock is ``sample_cycle`` over that time, or ``clock_hz``
    where the two agree to the digits printed."""
    data = read_bytes(path, _MAX_BYTE)
    where = path.name
    if path.suffix.lower() in (".yaml", ".yml"):
        return _parse_yaml(data, where)
    lines = list(csv.reader(strict_files.decode_text(data, where).splitlines()))
    if not lines or lines[0][:2] != ["counter", "mcpat_energy_J_per_count"]:
        expectation = "a CSV that starts with counter,mcpat_energy_J_per_count, or a .yaml file"
        raise bad_value(where, expectation, ",".join(lines[0]) if lines else "nothing")
    energy: dict[str, float] = {}
    scaling: dict[str, float] = {}
    notes: dict[str, float] = {}
    for number, row in enumerate(lines[1:], start=2):
        if len(row) < 2:
            continue
        if row[0].startswith("#"):
            name = row[0].strip("# ").partition(" ")[0].partition("(")[0]
            notes[name] = read_number(row[1], f"{where}: line {number}")
            continue
        figures = [
            read_number(text, f"{where}: line {number}: {row[0]}") if text else None
            for text in row[1:4]
        ]
        if row[0] not in _NO_ENERGY:
            # product over factor, both printed as well, is sometimes finer than the energy itself
            low, high = _rounding_interval(row[1])
            if len(figures) == 3 and figures[1] and figures[2]:
                factor = _rounding_interval(row[2])
                product = _rounding_interval(row[3])
                finer = max(low, product[0] / factor[1]), min(high, product[1] / factor[0])
                low, high = finer if finer[0] <= finer[1] else (low, high)
            energy[row[0]] = 0.5 * (low + high)
        if len(figures) > 1 and figures[1] is not None:
            scaling[row[0]] = figures[1]
    if "executionTime_s" not in notes or DUTY not in energy:
        raise bad_value(where, f"rows #executionTime_s and {DUTY}", "a table without")
    sample_s = notes["executionTime_s"]
    if not sample_s > 0:
        raise bad_value(f"{where}: #executionTime_s", "seconds above zero", sample_s)
    clock = sample_cycle / sample_s
    if clock_hz is not None and abs(clock / clock_hz - 1.0) < 1e-6:
        clock = clock_hz
    energy.pop(IDLE, None)  # the architecture file holds it in watts
    return EnergyTable(
        path.stem,
        {name: value for name, value in energy.items() if name != DUTY},
        energy[DUTY] * clock / sample_cycle,
        clock,
        notes.get("mcpat_const_dynamic_W", 0.0),
        notes.get("coalescer_read_J"),
        notes.get("coalescer_write_J"),
        scaling=scaling,
        source=path.name,
    )


def with_coalescer(table: EnergyTable, core_tech_node: float) -> tuple[EnergyTable, str]:
    """Fill in coalescer energies where the table has none, and return a sentence on their origin.

    The coalescer's share of a cache access only moves power between components; the total stays the
    same. At a node for which it was never derived, it lies on a log-log line through the two
    derived nodes over the table's instruction-buffer energy."""
    if table.coalescer_read_j is not None and table.coalescer_write_j is not None:
        return table, ""
    near, far = _coalescer_rows()[:2]
    for row in _coalescer_rows():
        if row["core_tech_node"] == core_tech_node:
            note = (
                f"coalescer energies of the {core_tech_node:g} nm node, derived from a "
                f"run ({row['source']})"
            )
            return replace(
                table, coalescer_read_j=row["read_j"], coalescer_write_j=row["write_j"]
            ), note
    if "TOT_INST" not in table.energy_j:
        nothing = replace(table, coalescer_read_j=0.0, coalescer_write_j=0.0)
        return nothing, "coalescer energies unknown, left with the caches"

    def scaled_j(key: str) -> float:
        slope = math.log(near[key] / far[key]) / math.log(
            near["instruction_j"] / far["instruction_j"]
        )
        return float(near[key] * (table.energy_j["TOT_INST"] / near["instruction_j"]) ** slope)

    note = (
        f"coalescer energies at {core_tech_node:g} nm scaled from other nodes, an "
        "estimate: it moves power between "
        "the caches and the coalescer but leaves the total as it is"
    )
    return replace(
        table, coalescer_read_j=scaled_j("read_j"), coalescer_write_j=scaled_j("write_j")
    ), note


@cache
def _coalescer_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_shipped_table("wattcast.lab.gpuwattch", "coalescer.csv")
    return [
        r | {k: float(r[k]) for k in ("core_tech_node", "instruction_j", "read_j", "write_j")}
        for r in rows
    ]


class _SourcedText(msgspec.Struct, forbid_unknown_fields=True):
    value: str
    source: str = ""
    low: str = ""
    high: str = ""


class _LeakageTexts(msgspec.Struct, forbid_unknown_fields=True):
    cores: _SourcedText
    rest: _SourcedText
    sm_count: float
    gated: bool = False


class _EnergyFile(msgspec.Struct, forbid_unknown_fields=True):
    wattcast: Literal["energies"]
    name: str
    source: str
    reference_clock: str
    energies: dict[str, _SourcedText]
    pipelines: _SourcedText
    memory_controller: _SourcedText | None = None
    coalescer: dict[str, _SourcedText] = {}
    leakage: _LeakageTexts | None = None
    scaling: dict[str, float] = {}


def _parse_yaml(data: bytes, where: str) -> EnergyTable:
    file = decode_yaml(data, _EnergyFile, where)

    if unknown := set(file.coalescer) - {"read", "write"}:
        raise bad_value(f"{where}: coalescer", "read and write", ", ".join(sorted(unknown)))

    def parse(
        text: _SourcedText,
        unit: str,
        key: str,
    ) -> float:
        return units.parse(text.value, unit, f"{where}: {key}")

    coalescer_j = {k: parse(v, "J", f"coalescer.{k}") for k, v in file.coalescer.items()}
    controller = file.memory_controller
    leakage = None
    if file.leakage is not None:
        cores_w, rest_w = (
            parse(getattr(file.leakage, key), "W", f"leakage.{key}") for key in ("cores", "rest")
        )
        leakage = Leakage(cores_w, rest_w, file.leakage.sm_count, file.leakage.gated)
    clock_hz = units.parse(file.reference_clock, "Hz", f"{where}: reference_clock")
    constant_w = parse(controller, "W", "memory_controller") if controller else 0.0
    interval_j = {
        k: (
            units.parse(v.low, "J", f"{where}: {k}.low"),
            units.parse(v.high, "J", f"{where}: {k}.high"),
        )
        for k, v in file.energies.items()
        if v.low and v.high
    }
    energies_j = {k: parse(v, "J", f"energies.{k}") for k, v in file.energies.items()}
    figures = energies_j, parse(file.pipelines, "W", "pipelines"), clock_hz, constant_w
    read_j = coalescer_j.get("read")
    write_j = coalescer_j.get("write")
    origin = file.scaling, file.source, interval_j
    return EnergyTable(file.name, *figures, read_j, write_j, leakage, *origin)


def format_energy_table(table: EnergyTable) -> bytes:
    """Return the table in our YAML form."""
    import yaml

    def leaf(value: float, unit: str) -> dict[str, str]:
        return {"value": f"{value!r} {unit}", "source": table.source}

    plain: dict[str, Any] = {
        "wattcast": "energies",
        "name": table.name,
        "source": table.source or "not said",
        "reference_clock": f"{table.reference_clock_hz!r} Hz",
        "energies": {
            name: leaf(value, "J")
            | {
                k: f"{end!r} J"
                for k, end in zip(("low", "high"), table.interval_j.get(name, ()), strict=False)
            }
            for name, value in table.energy_j.items()
        },
        "pipelines": leaf(table.duty_w, "W"),
        "memory_controller": leaf(table.mc_constant_w, "W"),
    }
    if table.coalescer_read_j is not None and table.coalescer_write_j is not None:
        plain["coalescer"] = {
            "read": leaf(table.coalescer_read_j, "J"),
            "write": leaf(table.coalescer_write_j, "J"),
        }
    if (leak := table.leakage) is not None:
        watts = {"cores": leaf(leak.cores_w, "W"), "rest": leaf(leak.rest_w, "W")}
        plain["leakage"] = watts | {"sm_count": leak.sm_count, "gated": leak.gated}
    if table.scaling:
        plain["scaling"] = dict(table.scaling)
    return str(
        yaml.safe_dump(
            plain,
            sort_keys=False,
            width=118,
            allow_unicode=True,
        )
    ).encode()


def _rounding_interval(text: str) -> tuple[float, float]:
    """Return the smallest and largest number that print as ``text`` with 8 digits; fewer digits are
    exact.
    """
    mantissa = text.strip().lower().partition("e")[0].replace(".", "").lstrip("+-0")
    value = float(text)
    if len(mantissa) < 8 or value == 0.0:
        return value, value
    half = 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) - 7)
    return value - half, value + half


class ComponentRail(StrEnum):
    """The supply that a component draws from, which sets its power of the core voltage."""

    CORE = "core"  # dynamic power of the core rail: V²
    STATIC = "static"  # leakage of the core rail: V
    OWN = "own"  # does not see the core voltage


@dataclass(frozen=True)
class ChipComponent:
    """One component: the counters that drive it, and how it follows voltage and clock."""

    name: str
    rail: ComponentRail
    clocked: bool
    constant: str | float | None  # a named constant, or watts
    static: bool
    terms: Mapping[
        str, tuple[str, ...] | float
    ]  # counter -> signed names of energies, or J per count


@dataclass(frozen=True)
class ComponentSet:
    """The components of a model in order, and the counters they need beyond those of the
    dialect.
    """

    dialect: SimulatorDialect
    compat: bool
    components: tuple[ChipComponent, ...]
    steady_leaves_out: tuple[str, ...]
    no_comma: tuple[str, ...]
    custom: Mapping[str, str]  # counter -> custom_1 ...


class _ComponentEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    title: str = ""
    rail: ComponentRail = ComponentRail.CORE
    clocked: bool = False
    constant: str | None = None
    static: bool = False
    mode: str = ""
    terms: dict[str, list[str] | str] = {}
    compat_terms: dict[str, list[str] | str] = {}


class _ComponentFile(msgspec.Struct, forbid_unknown_fields=True):
    components: list[_ComponentEntry]
    steady_leaves_out: tuple[str, ...] = ()
    no_comma: tuple[str, ...] = ()
    wattcast: Literal["components"] = "components"


def read_component_set(
    dialect: SimulatorDialect,
    compat: bool = False,
    more: Sequence[Path] = (),
) -> ComponentSet:
    """Read the components of a dialect, then those of further files."""
    base = read_shipped_yaml(_ComponentFile, "wattcast.lab.gpuwattch", f"{dialect}.yaml")
    read = {f"{dialect}.yaml": base}
    for path in more:
        read[str(path)] = decode_yaml(read_bytes(path, _MAX_BYTE), _ComponentFile, path.name)
    components: dict[str, ChipComponent] = {}
    for where, file in read.items():
        for entry in file.components:
            name = f"{Path(where).name}: {entry.name}"
            if entry.mode not in ("", "correct"):
                raise bad_value(f"{name}.mode", "'correct' or nothing", entry.mode)
            if entry.name in components:
                raise bad_value(name, "a name of its own", "a component that is there already")
            if compat and entry.mode == "correct":
                continue
            terms: dict[str, tuple[str, ...] | float] = {}
            for counter, energy in (
                entry.compat_terms if compat and entry.compat_terms else entry.terms
            ).items():
                here = f"{name}.terms.{counter}"
                terms[counter] = (
                    tuple(energy) if isinstance(energy, list) else units.parse(energy, "J", here)
                )
            constant: str | float | None = entry.constant
            if entry.constant is not None and entry.constant[:1].isdigit():
                constant = units.parse(entry.constant, "W", f"{name}.constant")
            if not terms and constant is None and not entry.static:
                raise bad_value(name, "terms, a constant or static", "a component nothing drives")
            component = ChipComponent(
                entry.name, entry.rail, entry.clocked, constant, entry.static, terms
            )
            components[entry.name] = component
    columns = {c.column for c in dialect_counters(dialect)}
    custom = list(
        dict.fromkeys(t for c in components.values() for t in c.terms if t not in columns)
    )
    if len(custom) > len(CUSTOM_EVENTS):
        raise bad_value(
            "components", f"at most {len(CUSTOM_EVENTS)} counters of your own", f"{len(custom)}"
        )
    events = dict(zip(custom, CUSTOM_EVENTS, strict=False))
    return ComponentSet(
        dialect, compat, tuple(components.values()), base.steady_leaves_out, base.no_comma, events
    )
