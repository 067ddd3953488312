"""Tables of real measurements as plants.

Two forms are read. *Blocks*: an application's name on a line of its own, then rows of memory MHz, core MHz,
time ms, power W, energy mJ (``real_time_power_by_clock.csv``); a block that starts over without a name is an
application of its own, called ``name#2``. A core clock that lacks a
memory clock is left out. *Runs*: EnergAIzer's ``workload,energy,time,avg_freq,temp`` with the
set clock in the workload's name. Energy, where given, must be power times time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast import units
from wattcast.errors import bad_value, clip, unknown_name
from wattcast.files import read_bytes
from wattcast.manage.knobs import Knob, Lattice, Role, Settings
from wattcast.manage.plant import Tables

ITERATIONS = 100
ENERGY_TOLERANCE = 0.02  # of power times time
_RUN = re.compile(r"(?P<name>.+)_freq(?P<mhz>\d{2,5})_iter(?P<count>\d+)(?:\.csv)?")
_NUMBER = re.compile(r"[-+.\deE]+")


@dataclass(frozen=True)
class Row:
    """One application at one pair of clocks."""

    memory_hz: float
    core_hz: float
    time_s: float
    power_w: float
    ran_hz: float = math.nan  # mean core clock it really ran at


def read(path: Path, iterations: int = ITERATIONS, default: str | None = None) -> list[Tables]:
    """The plants of a table: one per lattice, as applications may have been measured at different clocks.

    ``default`` is ``CORE/MEM`` in MHz or with units (``1164/3505``, ``1410 MHz``); without it the highest clocks.
    """
    text = _text(path)
    first = text.lstrip().split("\n", 1)[0]
    blocks = _runs(text, path.name) if first.startswith("workload,") else _blocks(text, path.name)
    if not blocks:
        raise bad_value(path.name, "one application at least", "none")
    groups: dict[tuple[tuple[float, ...], tuple[float, ...]], dict[str, dict[tuple[float, float], Row]]] = {}
    for name, rows in blocks.items():
        memory = tuple(sorted({m for m, _ in rows}))
        core = tuple(c for c in sorted({c for _, c in rows}) if all((m, c) in rows for m in memory))
        if len(core) < 2:
            found = f"{len(rows)} rows that share {len(core)} core clock"
            raise bad_value(f"{path.name}: {name}", "two core clocks or more at every memory clock", found)
        groups.setdefault((memory, core), {})[name] = rows
    return [_tables(path.name, m, c, apps, iterations, default) for (m, c), apps in groups.items()]


def without(plants: Sequence[Tables], starts: Sequence[str]) -> list[Tables]:
    """The plants less the applications whose names start with one of ``starts``; each must match something."""
    names = [name for tables in plants for name in tables.applications]
    for start in starts:
        if not any(name.startswith(start) for name in names):
            raise unknown_name("application to leave out", start, names)
    kept = [
        replace(
            tables, applications={n: o for n, o in tables.applications.items() if not n.startswith(tuple(starts))}
        )
        for tables in plants
    ]
    left = [tables for tables in kept if tables.applications]
    if not left:
        raise bad_value("--leave-out", "some applications left", "none")
    return left


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_value(path.name, "UTF-8 text", f"byte {error.start} that is not") from None


def _tables(
    name: str,
    memory: tuple[float, ...],
    core: tuple[float, ...],
    apps: Mapping[str, Mapping[tuple[float, float], Row]],
    iterations: int,
    default: str | None,
) -> Tables:
    knobs = [Knob(Role.CORE_CLOCK, core)]
    if len(memory) > 1:
        knobs.append(Knob(Role.MEMORY_CLOCK, memory))
    lattice = Lattice(tuple(knobs))
    order = [(m, c) for c in core for m in memory]
    time_s = np.array([[rows[key].time_s for key in order] for rows in apps.values()])
    power_w = np.array([[rows[key].power_w for key in order] for rows in apps.values()])
    ran_hz = np.array([[rows[key].ran_hz for key in order] for rows in apps.values()])
    return Tables(
        name=name,
        lattice=lattice,
        default=_default(lattice, default, name),
        kernels=tuple(apps),
        time_s=time_s,
        power_w=power_w,
        applications={app: np.full(iterations, i, dtype=np.int64) for i, app in enumerate(apps)},
        clock_hz=ran_hz if np.isfinite(ran_hz).all() else None,
        source=f"measurements replayed from {name}",
    )


def _default(lattice: Lattice, wanted: str | None, where: str) -> Settings:
    """``CORE/MEM`` as a setting; the other order is taken too where only that one exists."""
    if wanted is None:
        return lattice.top
    given = [_hertz(part) for part in wanted.split("/")]
    if len(given) > 2:
        raise bad_value("--default", "CORE/MEM, such as 1164/3505", wanted)
    orders = [given, given[::-1]] if len(given) == 2 else [given]
    for values in orders:
        found = lattice.nearest(*_fill(lattice, values))
        if all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(lattice.values(found), values, strict=False)):
            return found
    clocks = "; ".join(f"{k.role}: {', '.join(f'{v / 1e6:g}' for v in k.levels)} MHz" for k in lattice.knobs)
    raise bad_value("--default", f"clocks of {where} ({clip(clocks, 400)})", wanted)


def _fill(lattice: Lattice, values: list[float]) -> list[float]:
    return [values[i] if i < len(values) else knob.levels[-1] for i, knob in enumerate(lattice.knobs)]


def _hertz(part: str) -> float:
    text = part.strip()
    return units.parse(text if re.search(r"[A-Za-z]", text) else f"{text} MHz", "Hz", "--default")


def _blocks(text: str, where: str) -> dict[str, dict[tuple[float, float], Row]]:
    blocks: dict[str, dict[tuple[float, float], Row]] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if "," not in line:
            if not line.isprintable() or len(line) > 80 or _NUMBER.fullmatch(line):
                raise bad_value(f"{where}: line {number}", "an application's name, or five numbers", line)
            name = _unused(line, blocks)
            blocks[name] = {}
            continue
        if not name:
            raise bad_value(f"{where}: line {number}", "an application's name before its rows", line)
        row = _row(line, f"{where}: line {number}")
        key = (row.memory_hz, row.core_hz)
        if key in blocks[name]:
            name = _unused(name.split("#")[0], blocks)
            blocks[name] = {}
        blocks[name][key] = row
    empty = [name for name, rows in blocks.items() if not rows]
    if empty:
        raise bad_value(f"{where}: {empty[0]}", "rows below the name", "none")
    return blocks


def _unused(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name#2`` and on where it is taken."""
    count = 1
    while (full := name if count == 1 else f"{name}#{count}") in taken:
        count += 1
    return full


def _row(line: str, where: str) -> Row:
    parts = line.split(",")
    wanted = "memory MHz, core MHz, time ms, power W and, if known, energy mJ"
    if len(parts) not in (4, 5):
        raise bad_value(where, wanted, line)
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise bad_value(where, wanted, line) from None
    if not all(0 < n < math.inf for n in numbers):
        raise bad_value(where, "finite numbers above zero", line)
    memory, core, time_ms, power_w = numbers[:4]
    if len(numbers) == 5 and abs(numbers[4] / (time_ms * power_w) - 1.0) > ENERGY_TOLERANCE:
        raise bad_value(where, "energy equal to power times time", line)
    return Row(memory * 1e6, core * 1e6, time_ms * 1e-3, power_w)


def _runs(text: str, where: str) -> dict[str, dict[tuple[float, float], Row]]:
    header, *lines = text.strip().splitlines()
    columns = header.split(",")
    if not {"workload", "energy", "time"} <= set(columns):
        raise bad_value(f"{where}: line 1", "columns workload, energy and time", header)
    blocks: dict[str, dict[tuple[float, float], Row]] = {}
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
        core_hz = float(match["mhz"]) * 1e6
        rows = blocks.setdefault(match["name"], {})
        if (1.0, core_hz) in rows:
            raise bad_value(f"{where}: line {number}", "one row per workload and clock", line)
        rows[1.0, core_hz] = Row(1.0, core_hz, time_ms * 1e-3, energy_j / (time_ms * 1e-3), ran_mhz * 1e6)
    return blocks
