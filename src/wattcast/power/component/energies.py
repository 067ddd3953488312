"""Energies per count: a table from a simulator run, or our own YAML form, or any other source of an EnergyTable.

An energy is joules per count before the architecture's scaling factor. A duty has watts at duty 1 and the
reference clock instead. What a table cannot say (how much of a cache access is the coalescer) stays None.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from wattcast import units
from wattcast.activity.simulated import Dialect, counters
from wattcast.errors import BadInput, bad_value, clip, unknown_name
from wattcast.files import from_yaml, read_bytes
from wattcast.power.component.leakage import Leakage

FORM = "energies"
DUTY, IDLE = "PIPE_A", "IDLE_CORE_N"
_MAX_BYTE = 1 << 20
_NO_ENERGY = ("CONST_DYNAMICN", "constant_power")  # rows that stand for constants


@dataclass(frozen=True)
class EnergyTable:
    """Energies per count of one device, and what goes with them."""

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

    def __post_init__(self) -> None:
        known = {c.column for d in Dialect for c in counters(d)}
        for name, value in self.energy_j.items():
            if name not in known:
                raise unknown_name(f"counter in {self.name}", name, known)
            _check(f"{self.name}: {name}", "J", value)
        for name, value in (("pipelines", self.duty_w), ("memory controller", self.mc_constant_w)):
            _check(f"{self.name}: {name}", "W", value)
        if not (math.isfinite(self.reference_clock_hz) and self.reference_clock_hz > 0):
            raise bad_value(f"{self.name}: reference clock", "a clock above zero", self.reference_clock_hz)


def read_energies(path: Path, sample_cycle: int = 500, clock_hz: float | None = None) -> EnergyTable:
    """An energy table: YAML in our form, or CSV as dumped from a simulator run.

    A CSV gives the time of a sample; the clock it means is ``sample_cycle`` over that time, taken as
    ``clock_hz`` where they agree to the digits printed.
    """
    if path.suffix.lower() in (".yaml", ".yml"):
        return _from_yaml(path)
    return _from_csv(path, sample_cycle, clock_hz)


def with_coalescer(table: EnergyTable, core_tech_node: float) -> tuple[EnergyTable, str]:
    """The table with coalescer energies filled in where it has none, and a sentence on where from.

    The coalescer's share of a cache access only moves power between components; the total is the same.
    A node that was never derived is scaled by the table's instruction-buffer energy, on a log scale.
    """
    if table.coalescer_read_j is not None and table.coalescer_write_j is not None:
        return table, ""
    rows = _coalescers()
    exact = [row for row in rows if row["core_tech_node"] == core_tech_node]
    if exact:
        found = exact[0]
        said = f"coalescer energies of the {core_tech_node:g} nm node, derived from a run ({found['source']})"
        return _replace(table, float(found["read_j"]), float(found["write_j"])), said
    if "TOT_INST" not in table.energy_j:
        return _replace(table, 0.0, 0.0), "coalescer energies unknown, left with the caches"
    read, write = (_scaled(rows, table.energy_j["TOT_INST"], key) for key in ("read_j", "write_j"))
    said = (
        f"coalescer energies at {core_tech_node:g} nm scaled from other nodes, an estimate: it moves power between "
        "the caches and the coalescer but leaves the total as it is"
    )
    return _replace(table, read, write), said


class _Leaf(msgspec.Struct, forbid_unknown_fields=True):
    value: str
    source: str = ""


class _Leakage(msgspec.Struct, forbid_unknown_fields=True):
    cores: _Leaf
    rest: _Leaf
    sm_count: float
    gated: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    wattcast: str
    name: str
    source: str
    reference_clock: str
    energies: dict[str, _Leaf]
    pipelines: _Leaf
    memory_controller: _Leaf | None = None
    coalescer: dict[str, _Leaf] = {}
    leakage: _Leakage | None = None
    scaling: dict[str, float] = {}


def _from_yaml(path: Path) -> EnergyTable:
    where = path.name
    file = from_yaml(read_bytes(path, _MAX_BYTE), _File, where)
    if file.wattcast != FORM:
        raise bad_value(f"{where}: wattcast", repr(FORM), file.wattcast)
    if unknown := set(file.coalescer) - {"read", "write"}:
        raise bad_value(f"{where}: coalescer", "read and write", ", ".join(sorted(unknown)))
    joule = {k: units.parse(v.value, "J", f"{where}: coalescer.{k}") for k, v in file.coalescer.items()}
    leak = file.leakage
    return EnergyTable(
        file.name,
        {k: units.parse(v.value, "J", f"{where}: energies.{k}") for k, v in file.energies.items()},
        units.parse(file.pipelines.value, "W", f"{where}: pipelines"),
        units.parse(file.reference_clock, "Hz", f"{where}: reference_clock"),
        units.parse(file.memory_controller.value, "W", f"{where}: memory_controller")
        if file.memory_controller
        else 0.0,
        joule.get("read"),
        joule.get("write"),
        None
        if leak is None
        else Leakage(
            units.parse(leak.cores.value, "W", f"{where}: leakage.cores"),
            units.parse(leak.rest.value, "W", f"{where}: leakage.rest"),
            leak.sm_count,
            leak.gated,
        ),
        file.scaling,
        file.source,
    )


def to_yaml(table: EnergyTable) -> bytes:
    """The table in our YAML form."""
    import yaml

    def leaf(value: float, unit: str) -> dict[str, str]:
        return {"value": f"{value!r} {unit}", "source": table.source}

    plain: dict[str, Any] = {
        "wattcast": FORM,
        "name": table.name,
        "source": table.source or "not said",
        "reference_clock": f"{table.reference_clock_hz!r} Hz",
        "energies": {name: leaf(value, "J") for name, value in table.energy_j.items()},
        "pipelines": leaf(table.duty_w, "W"),
        "memory_controller": leaf(table.mc_constant_w, "W"),
    }
    if table.coalescer_read_j is not None and table.coalescer_write_j is not None:
        plain["coalescer"] = {"read": leaf(table.coalescer_read_j, "J"), "write": leaf(table.coalescer_write_j, "J")}
    if table.leakage is not None:
        leak = table.leakage
        plain["leakage"] = {
            "cores": leaf(leak.cores_w, "W"),
            "rest": leaf(leak.rest_w, "W"),
            "sm_count": leak.sm_count,
            "gated": leak.gated,
        }
    if table.scaling:
        plain["scaling"] = dict(table.scaling)
    return str(yaml.safe_dump(plain, sort_keys=False, width=118, allow_unicode=True)).encode()


def _from_csv(path: Path, sample_cycle: int, clock_hz: float | None) -> EnergyTable:
    where = path.name
    try:
        lines = list(csv.reader(io.StringIO(read_bytes(path, _MAX_BYTE).decode("utf-8"))))
    except UnicodeDecodeError:
        raise bad_value(where, "text", "bytes that are none") from None
    if not lines or lines[0][:2] != ["counter", "mcpat_energy_J_per_count"]:
        wanted = "a CSV that starts with counter,mcpat_energy_J_per_count, or a .yaml file"
        raise bad_value(where, wanted, ",".join(lines[0]) if lines else "nothing")
    energy: dict[str, float] = {}
    scaling: dict[str, float] = {}
    notes: dict[str, float] = {}
    for number, row in enumerate(lines[1:], start=2):
        if len(row) < 2:
            continue
        if row[0].startswith("#"):
            notes[row[0].strip("# ").partition(" ")[0].partition("(")[0]] = _float(row[1], f"{where}: line {number}")
            continue
        figures = [_float(text, f"{where}: line {number}: {row[0]}") if text else None for text in row[1:4]]
        if row[0] not in _NO_ENERGY:
            energy[row[0]] = _sharpest(row[1:4], figures)
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
        source=f"{path.name}",
    )


def _sharpest(texts: Sequence[str], figures: Sequence[float | None]) -> float:
    """Energy per count from its print and, finer where digits fall so, from energy times factor over factor."""
    low, high = _printed_as(texts[0])
    if len(figures) == 3 and figures[1] and figures[2]:
        factor, scaled = _printed_as(texts[1]), _printed_as(texts[2])
        finer = max(low, scaled[0] / factor[1]), min(high, scaled[1] / factor[0])
        low, high = finer if finer[0] <= finer[1] else (low, high)
    return 0.5 * (low + high)


def _printed_as(text: str) -> tuple[float, float]:
    """The numbers that print as ``text`` with 8 digits; a number of fewer digits is itself."""
    mantissa = text.strip().lower().partition("e")[0].replace(".", "").lstrip("+-0")
    value = float(text)
    if len(mantissa) < 8 or value == 0.0:
        return value, value
    half = 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) - 7)
    return value - half, value + half


def _float(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise bad_value(where, "a number", clip(text)) from None
    if not math.isfinite(value):
        raise bad_value(where, "a finite number", text)
    return value


def _check(where: str, unit: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise bad_value(where, f"{unit}, zero or more", value)


def _replace(table: EnergyTable, read_j: float, write_j: float) -> EnergyTable:
    import dataclasses

    return dataclasses.replace(table, coalescer_read_j=read_j, coalescer_write_j=write_j)


@cache
def _coalescers() -> list[dict[str, Any]]:
    text = files("wattcast.power.component").joinpath("coalescer.csv").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = list(csv.DictReader(text.splitlines()))
    if not rows:
        raise BadInput("coalescer.csv is empty.")
    return [r | {k: float(r[k]) for k in ("core_tech_node", "instruction_j", "read_j", "write_j")} for r in rows]


def _scaled(rows: list[dict[str, Any]], instruction_j: float, key: str) -> float:
    """Log-log line through the two derived nodes, at this table's instruction-buffer energy."""
    near, far = rows[0], rows[1]
    slope = math.log(near[key] / far[key]) / math.log(near["instruction_j"] / far["instruction_j"])
    return float(near[key] * (instruction_j / near["instruction_j"]) ** slope)
