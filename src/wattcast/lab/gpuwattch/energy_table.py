"""Energies per count of one device, read from files and written.

An energy is joules per count before the architecture's scaling factor; a duty has watts at duty 1
and the reference clock instead. A table comes from a simulator run (CSV), from our YAML form, or is
built bottom-up. Figures that a table cannot hold (the coalescer's share of a cache access) stay
None."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import (
    dataclass,
    field,
    replace,
)
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
)
from wattcast.lab.gpuwattch.trace_reading import (
    SimulatorDialect,
    dialect_counters,
)
from wattcast.power.component_power import Leakage

DUTY = "PIPE_A"
IDLE = "IDLE_CORE_N"
_MAX_BYTE = 1 << 20
_NO_ENERGY = ("CONST_DYNAMICN", "constant_power")  # rows that stand for constants
_SAME_CLOCK = 1e-6  # a clock from a printed time is as fine as its digits


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
    # 5th to 95th percentile of each energy, where it was fitted
    interval_j: Mapping[str, tuple[float, float]] = field(default_factory=dict)

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
    dump = _parse_dump(data, where)
    if "executionTime_s" not in dump.notes or DUTY not in dump.energy_j:
        raise bad_value(where, f"rows #executionTime_s and {DUTY}", "a table without")
    sample_s = dump.notes["executionTime_s"]
    if not sample_s > 0:
        raise bad_value(f"{where}: #executionTime_s", "seconds above zero", sample_s)
    reference_hz = sample_cycle / sample_s
    if clock_hz is not None and abs(reference_hz / clock_hz - 1.0) < _SAME_CLOCK:
        reference_hz = clock_hz
    counted_j = dict(dump.energy_j)
    duty_j = counted_j.pop(DUTY)  # of a sample at duty 1
    counted_j.pop(IDLE, None)  # the architecture file holds it in watts
    return EnergyTable(
        name=path.stem,
        energy_j=counted_j,
        duty_w=duty_j * reference_hz / sample_cycle,
        reference_clock_hz=reference_hz,
        mc_constant_w=dump.notes.get("mcpat_const_dynamic_W", 0.0),
        coalescer_read_j=dump.notes.get("coalescer_read_J"),
        coalescer_write_j=dump.notes.get("coalescer_write_J"),
        scaling=dump.scaling,
        source=path.name,
    )


@dataclass
class _DumpedEnergies:
    """The rows of a table that was dumped from a simulator run."""

    energy_j: dict[str, float] = field(default_factory=dict)  # by counter
    scaling: dict[str, float] = field(default_factory=dict)  # by counter
    notes: dict[str, float] = field(default_factory=dict)  # figures behind a #, by name


def _parse_dump(data: bytes, where: str) -> _DumpedEnergies:
    """Read rows of counter, energy, scaling factor and their product, and notes behind a #."""
    lines = list(csv.reader(strict_files.decode_text(data, where).splitlines()))
    if not lines or lines[0][:2] != ["counter", "mcpat_energy_J_per_count"]:
        expectation = "a CSV that starts with counter,mcpat_energy_J_per_count, or a .yaml file"
        raise bad_value(where, expectation, ",".join(lines[0]) if lines else "nothing")
    dump = _DumpedEnergies()
    for line, row in enumerate(lines[1:], start=2):
        if len(row) < 2:
            continue
        here = f"{where}: line {line}"
        if row[0].startswith("#"):
            name = row[0].strip("# ").partition(" ")[0].partition("(")[0]
            dump.notes[name] = read_number(row[1], here)
            continue
        counter = row[0]
        figures = [read_number(text, f"{here}: {counter}") if text else None for text in row[1:4]]
        if counter not in _NO_ENERGY:
            has_product = len(figures) == 3 and bool(figures[1]) and bool(figures[2])
            dump.energy_j[counter] = _refine_energy_j(row, has_product)
        if len(figures) > 1 and figures[1] is not None:
            dump.scaling[counter] = figures[1]
    return dump


def _refine_energy_j(row: list[str], has_product: bool) -> float:
    """Return the middle of the energies that print as this row's figures.

    The product over the factor, both printed as well, is sometimes finer than the energy itself.
    """
    low, high = _rounding_interval(row[1])
    if has_product:
        factor_low, factor_high = _rounding_interval(row[2])
        product_low, product_high = _rounding_interval(row[3])
        finer_low = max(low, product_low / factor_high)
        finer_high = min(high, product_high / factor_low)
        if finer_low <= finer_high:
            low, high = finer_low, finer_high
    return 0.5 * (low + high)


def with_coalescer(table: EnergyTable, core_tech_node: float) -> tuple[EnergyTable, str]:
    """Fill in coalescer energies where the table has none, and return a sentence on their origin.

    The coalescer's share of a cache access only moves power between components; the total stays the
    same. At a node for which it was never derived, it lies on a log-log line through the two
    derived nodes over the table's instruction-buffer energy."""
    if table.coalescer_read_j is not None and table.coalescer_write_j is not None:
        return table, ""
    for row in _coalescer_rows():
        if row.core_tech_node == core_tech_node:
            note = (
                f"coalescer energies of the {core_tech_node:g} nm node, derived from a "
                f"run ({row.source})"
            )
            return _set_coalescer(table, row.read_j, row.write_j), note
    if "TOT_INST" not in table.energy_j:
        note = "coalescer energies unknown, left with the caches"
        return _set_coalescer(table, 0.0, 0.0), note
    near, far = _coalescer_rows()[:2]
    instruction_ratio = table.energy_j["TOT_INST"] / near.instruction_j
    instruction_slope = math.log(near.instruction_j / far.instruction_j)
    read_slope = math.log(near.read_j / far.read_j) / instruction_slope
    write_slope = math.log(near.write_j / far.write_j) / instruction_slope
    note = (
        f"coalescer energies at {core_tech_node:g} nm scaled from other nodes, an "
        "estimate: it moves power between "
        "the caches and the coalescer but leaves the total as it is"
    )
    scaled = _set_coalescer(
        table,
        near.read_j * instruction_ratio**read_slope,
        near.write_j * instruction_ratio**write_slope,
    )
    return scaled, note


def _set_coalescer(
    table: EnergyTable,
    read_j: float,
    write_j: float,
) -> EnergyTable:
    return replace(table, coalescer_read_j=read_j, coalescer_write_j=write_j)


class _CoalescerRow(msgspec.Struct):
    """One row of ``coalescer.csv``: energies that were derived from a run at one node."""

    core_tech_node: float
    instruction_j: float
    read_j: float
    write_j: float
    source: str


@cache
def _coalescer_rows() -> list[_CoalescerRow]:
    rows = read_shipped_table("wattcast.lab.gpuwattch", "coalescer.csv")
    return [msgspec.convert(row, _CoalescerRow, strict=False) for row in rows]


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
        text: str,
        unit: str,
        key: str,
    ) -> float:
        return units.parse(text, unit, f"{where}: {key}")

    energy_j: dict[str, float] = {}
    interval_j: dict[str, tuple[float, float]] = {}
    for name, entry in file.energies.items():
        energy_j[name] = parse(entry.value, "J", f"energies.{name}")
        if entry.low and entry.high:
            low_j = parse(entry.low, "J", f"{name}.low")
            interval_j[name] = (low_j, parse(entry.high, "J", f"{name}.high"))
    coalescer_j = {
        kind: parse(entry.value, "J", f"coalescer.{kind}") for kind, entry in file.coalescer.items()
    }
    leakage = None
    if file.leakage is not None:
        leakage = Leakage(
            parse(file.leakage.cores.value, "W", "leakage.cores"),
            parse(file.leakage.rest.value, "W", "leakage.rest"),
            file.leakage.sm_count,
            file.leakage.gated,
        )
    mc_constant_w = 0.0
    if file.memory_controller is not None:
        mc_constant_w = parse(file.memory_controller.value, "W", "memory_controller")
    return EnergyTable(
        name=file.name,
        energy_j=energy_j,
        duty_w=parse(file.pipelines.value, "W", "pipelines"),
        reference_clock_hz=parse(file.reference_clock, "Hz", "reference_clock"),
        mc_constant_w=mc_constant_w,
        coalescer_read_j=coalescer_j.get("read"),
        coalescer_write_j=coalescer_j.get("write"),
        leakage=leakage,
        scaling=file.scaling,
        source=file.source,
        interval_j=interval_j,
    )


def format_energy_table(table: EnergyTable) -> bytes:
    """Return the table in our YAML form."""
    import yaml

    def sourced(value: float, unit: str) -> dict[str, str]:
        return {"value": f"{value!r} {unit}", "source": table.source}

    energies = {}
    for name, energy_j in table.energy_j.items():
        energies[name] = sourced(energy_j, "J")
        if name in table.interval_j:
            low_j, high_j = table.interval_j[name]
            energies[name] |= {"low": f"{low_j!r} J", "high": f"{high_j!r} J"}
    plain: dict[str, Any] = {
        "wattcast": "energies",
        "name": table.name,
        "source": table.source or "not said",
        "reference_clock": f"{table.reference_clock_hz!r} Hz",
        "energies": energies,
        "pipelines": sourced(table.duty_w, "W"),
        "memory_controller": sourced(table.mc_constant_w, "W"),
    }
    if table.coalescer_read_j is not None and table.coalescer_write_j is not None:
        plain["coalescer"] = {
            "read": sourced(table.coalescer_read_j, "J"),
            "write": sourced(table.coalescer_write_j, "J"),
        }
    if table.leakage is not None:
        plain["leakage"] = {
            "cores": sourced(table.leakage.cores_w, "W"),
            "rest": sourced(table.leakage.rest_w, "W"),
            "sm_count": table.leakage.sm_count,
            "gated": table.leakage.gated,
        }
    if table.scaling:
        plain["scaling"] = dict(table.scaling)
    text = yaml.safe_dump(
        plain,
        sort_keys=False,
        width=118,
        allow_unicode=True,
    )
    return str(text).encode()


def _rounding_interval(text: str) -> tuple[float, float]:
    """Return the smallest and largest number that print as ``text`` with 8 digits; fewer digits are
    exact.
    """
    mantissa = text.strip().lower().partition("e")[0]
    digits = mantissa.replace(".", "").lstrip("+-0")
    value = float(text)
    if len(digits) < 8 or value == 0.0:
        return value, value
    half = 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) - 7)
    return value - half, value + half
