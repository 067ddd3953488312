"""Read tables of real measurements as plants.

Two forms are read:

- *Blocks*: an application's name on a line of its own, then rows of memory MHz, core MHz, time ms, power W and, where
  known, energy mJ (``real_time_power_by_clock.csv``), which must be power times time. A block that starts over
  without a name is an application of its own, called ``name#2``. A core clock that lacks a memory clock is left out.
- *Runs*: EnergAIzer's ``workload,energy,time,avg_freq,temp`` with the set clock in the workload's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wattcast.core import units
from wattcast.core.errors import bad_value, clip_text, unknown_name
from wattcast.core.strict_files import read_bytes
from wattcast.manage.plants import Knob, KnobRole, Lattice, PlantTables, Settings

ITERATIONS = 100
ENERGY_TOLERANCE = 0.02  # of power times time
_RUN = re.compile(r"(?P<name>.+)_freq(?P<mhz>\d{2,5})_iter(?P<count>\d+)(?:\.csv)?")
_NUMBER = re.compile(r"[-+.\deE]+")


class ReplayRow(NamedTuple):
    """Hold what one application gave at one pair of clocks."""

    time_s: float
    power_w: float
    ran_hz: float = math.nan  # mean core clock it really ran at


Rows = dict[tuple[float, float], ReplayRow]  # by memory and core clock, Hz


def read_replay_tables(path: Path, iterations: int = ITERATIONS, default: str | None = None) -> list[PlantTables]:
    """Read the plants of a file: one per lattice, as applications may have been measured at different clocks.

    ``default`` is ``CORE/MEM`` in MHz or with units (``1164/3505``, ``1410 MHz``); without it the highest clocks.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_value(path.name, "UTF-8 text", f"byte {error.start} that is not") from None
    first = text.lstrip().split("\n", 1)[0]
    blocks = _parse_runs(text, path.name) if first.startswith("workload,") else _parse_blocks(text, path.name)
    if not blocks:
        raise bad_value(path.name, "one application at least", "none")
    groups: dict[tuple[tuple[float, ...], tuple[float, ...]], dict[str, Rows]] = {}
    for name, rows in blocks.items():
        memory = tuple(sorted({m for m, _ in rows}))
        core = tuple(c for c in sorted({c for _, c in rows}) if all((m, c) in rows for m in memory))
        if len(core) < 2:
            found = f"{len(rows)} rows that share {len(core)} core clock"
            raise bad_value(f"{path.name}: {name}", "two core clocks or more at every memory clock", found)
        groups.setdefault((memory, core), {})[name] = rows
    return [_build_tables(path.name, m, c, apps, iterations, default) for (m, c), apps in groups.items()]


def leave_out_applications(plants: Sequence[PlantTables], starts: Sequence[str]) -> list[PlantTables]:
    """Drop the applications whose names start with one of ``starts``; each must match something."""
    names = [name for tables in plants for name in tables.applications]
    for start in starts:
        if not any(name.startswith(start) for name in names):
            raise unknown_name("application to leave out", start, names)
    left = []
    for tables in plants:
        kept = {n: order for n, order in tables.applications.items() if not n.startswith(tuple(starts))}
        if kept:
            left.append(replace(tables, applications=kept))
    if not left:
        raise bad_value("--leave-out", "some applications left", "none")
    return left


def _build_tables(
    name: str,
    memory: tuple[float, ...],
    core: tuple[float, ...],
    apps: Mapping[str, Rows],
    iterations: int,
    default: str | None,
) -> PlantTables:
    knobs = [Knob(KnobRole.CORE_CLOCK, core)]
    if len(memory) > 1:
        knobs.append(Knob(KnobRole.MEMORY_CLOCK, memory))
    lattice = Lattice(tuple(knobs))
    order = [(m, c) for c in core for m in memory]
    table = np.array([[rows[key] for key in order] for rows in apps.values()])  # (application, setting, quantity)
    time_s, power_w, ran_hz = np.moveaxis(table, -1, 0)
    return PlantTables(
        name=name,
        lattice=lattice,
        default=_parse_default(lattice, default, name),
        kernels=tuple(apps),
        time_s=time_s,
        power_w=power_w,
        applications={app: np.full(iterations, i, dtype=np.int64) for i, app in enumerate(apps)},
        clock_hz=ran_hz if np.isfinite(ran_hz).all() else None,
        source=f"measurements replayed from {name}",
    )


def _parse_default(lattice: Lattice, wanted: str | None, where: str) -> Settings:
    """Return ``CORE/MEM`` as a setting; the other order is taken too where only that one exists."""
    if wanted is None:
        return lattice.top
    given = []
    for part in wanted.split("/"):
        unit = "" if re.search(r"[A-Za-z]", part) else " MHz"
        given.append(units.parse(f"{part.strip()}{unit}", "Hz", "--default"))
    if len(given) > 2:
        raise bad_value("--default", "CORE/MEM, such as 1164/3505", wanted)
    for values in (given, given[::-1]):
        full = [values[i] if i < len(values) else knob.levels[-1] for i, knob in enumerate(lattice.knobs)]
        found = lattice.nearest_settings(*full)
        if all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(lattice.level_values(found), values, strict=False)):
            return found
    clocks = "; ".join(f"{k.role}: {', '.join(f'{v / 1e6:g}' for v in k.levels)} MHz" for k in lattice.knobs)
    raise bad_value("--default", f"clocks of {where} ({clip_text(clocks, 400)})", wanted)


def _parse_blocks(text: str, where: str) -> dict[str, Rows]:
    blocks: dict[str, Rows] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if "," not in line:
            if not line.isprintable() or len(line) > 80 or _NUMBER.fullmatch(line):
                raise bad_value(f"{where}: line {number}", "an application's name, or five numbers", line)
            name = _unused_name(line, blocks)
            blocks[name] = {}
            continue
        if not name:
            raise bad_value(f"{where}: line {number}", "an application's name before its rows", line)
        clocks, row = _parse_block_row(line, f"{where}: line {number}")
        if clocks in blocks[name]:
            name = _unused_name(name.split("#")[0], blocks)
            blocks[name] = {}
        blocks[name][clocks] = row
    empty = [name for name, rows in blocks.items() if not rows]
    if empty:
        raise bad_value(f"{where}: {empty[0]}", "rows below the name", "none")
    return blocks


def _unused_name(name: str, taken: Container[str]) -> str:
    """Return ``name``, or ``name#2`` and on where it is taken."""
    count = 1
    while (full := name if count == 1 else f"{name}#{count}") in taken:
        count += 1
    return full


def _parse_block_row(line: str, where: str) -> tuple[tuple[float, float], ReplayRow]:
    wanted = "memory MHz, core MHz, time ms, power W and, if known, energy mJ"
    try:
        memory, core, time_ms, power_w, *energy_mj = numbers = [float(part) for part in line.split(",")]
    except ValueError:
        raise bad_value(where, wanted, line) from None
    if len(energy_mj) > 1:
        raise bad_value(where, wanted, line)
    if not all(0 < n < math.inf for n in numbers):
        raise bad_value(where, "finite numbers above zero", line)
    if energy_mj and abs(energy_mj[0] / (time_ms * power_w) - 1.0) > ENERGY_TOLERANCE:
        raise bad_value(where, "energy equal to power times time", line)
    return (memory * 1e6, core * 1e6), ReplayRow(time_ms * 1e-3, power_w)


def _parse_runs(text: str, where: str) -> dict[str, Rows]:
    header, *lines = text.strip().splitlines()
    columns = header.split(",")
    if not {"workload", "energy", "time"} <= set(columns):
        raise bad_value(f"{where}: line 1", "columns workload, energy and time", header)
    blocks: dict[str, Rows] = {}
    for number, line in enumerate(lines, start=2):
        cells = dict(zip(columns, line.strip().split(","), strict=False))
        match = _RUN.fullmatch(cells.get("workload", ""))
        try:
            energy_j, time_ms = float(cells["energy"]), float(cells["time"])
            ran_mhz = float(cells.get("avg_freq", "nan"))
        except (KeyError, ValueError):
            raise bad_value(f"{where}: line {number}", "a workload, joules and milliseconds", line) from None
        if match is None:
            raise bad_value(f"{where}: line {number}", "a workload named ..._freq<MHz>_iter<n>", line)
        if not (0 < energy_j < math.inf and 0 < time_ms < math.inf) or ran_mhz <= 0:
            raise bad_value(f"{where}: line {number}", "finite numbers above zero", line)
        clocks = (1.0, float(match["mhz"]) * 1e6)  # the memory clock is not known, and one for all
        rows = blocks.setdefault(match["name"], {})
        if clocks in rows:
            raise bad_value(f"{where}: line {number}", "one row per workload and clock", line)
        rows[clocks] = ReplayRow(time_ms * 1e-3, energy_j / (time_ms * 1e-3), ran_mhz * 1e6)
    return blocks
