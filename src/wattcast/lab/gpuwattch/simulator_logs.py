"""Read counters of whole kernels from what simulators print: power reports, GPGPU-Sim and Accel-Sim
logs, gem5.

``map_accelsim.csv`` and ``map_gem5.csv`` map statistics to events. An event whose statistics are
not all there is left out: absent is not zero, and the components that need it are named."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import (
    gunzip_bytes,
    read_bytes,
    read_shipped_table,
)
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.profiler_counters import sum_mapped_events
from wattcast.lab.gpuwattch.trace_reading import (
    SimulatorDialect,
    TraceSampling,
    dialect_counters,
)
from wattcast.lab.gpuwattch.trace_statistics import parse_figure
from wattcast.power.activity import Activity, ActivitySource

_MAX_BYTE = 512 << 20
_HEAD_BYTE = 1 << 16
_DIVISION = "-" * 20
_LOWEST_CLOCK_HZ = 1.0
_HIGHEST_CLOCK_HZ = 1e12
_SHORTEST_S = 1e-12  # of an interval: a tick of gem5
_LONGEST_S = 1e9  # thirty years
_GEM5_START = "---------- Begin Simulation Statistics"
_GZIP_MAGIC = b"\x1f\x8b"
# Statistics that GPGPU-Sim prints by kind of access and outcome, and only where they are above zero
_BREAKDOWNS = ("Total_core_cache_stats_breakdown[", "L2_cache_stats_breakdown[")
# Commands to device memory that each partition prints in one line, and the name of their sum
_DRAM_COMMANDS = {
    "n_rd": "total dram reads",
    "n_write": "total dram writes",
    "n_pre": "total dram precharges",
}
# A column of AccelWattch's file of hardware counters that no other table has
_HARDWARE_COLUMN = "Pipeline_Duty"


class CounterSource(StrEnum):
    """Where counters come from."""

    AUTO = "auto"
    TRACE = "trace"
    POWER_REPORT = "power-report"
    ACCELSIM = "accel-sim"
    GEM5 = "gem5"
    ACCELWATTCH_HW = "accelwattch-hw"
    NCU = "ncu"


class CountedKernels(NamedTuple):
    """Kernels with their counters, and the watts of parts that the counters do not determine."""

    names: tuple[str, ...]
    activity: Activity
    given_w: Mapping[str, Array] = {}
    notes: tuple[str, ...] = ()
    reported_w: tuple[float, ...] = ()  # totals that the file itself says, where it does


def find_source(path: Path) -> CounterSource:
    """Tell what a file is from its beginning: a trace unless it reads like something else."""
    if not path.is_file():
        return CounterSource.TRACE
    head = _read_head(path)
    if "Kernel Average Power Data" in head:
        return CounterSource.POWER_REPORT
    if _GEM5_START in head:  # begins with ten dashes, a table of Accel-Sim's with a hundred
        return CounterSource.GEM5
    logged = re.search(r"^\s*(gpu_sim_cycle|gpgpu_simulation_time|GPGPU-Sim)", head, re.MULTILINE)
    if logged or head.startswith(_DIVISION):
        return CounterSource.ACCELSIM
    if _HARDWARE_COLUMN in head.partition("\n")[0]:
        return CounterSource.ACCELWATTCH_HW
    return CounterSource.NCU if re.search(r'^"?ID"?,', head, re.MULTILINE) else CounterSource.TRACE


def _read_head(path: Path) -> str:
    """Return the beginning of a file, unpacked where it is packed."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTE)
    if head.startswith(_GZIP_MAGIC):
        try:
            with gzip.open(path) as stream:
                head = stream.read(_HEAD_BYTE)
        except (OSError, EOFError, zlib.error):  # a trace that still grows, or a damaged one
            head = b""
    return head.decode("utf-8", "replace")


def _read_text(path: Path) -> str:
    """Return the text of a file, unpacked where it is packed."""
    data = gunzip_bytes(read_bytes(path, _MAX_BYTE), path.name, _MAX_BYTE)
    return data.decode("utf-8", "replace")


def read_power_report(
    path: Path,
    dialect: SimulatorDialect,
    scaling: Mapping[str, float],
    sampling: TraceSampling,
) -> CountedKernels:
    """Read the mean counters of each kernel from a power report; each is a sample of the
    simulator's length.

    Every component but static power is linear in its counters, so the mean counters give the mean
    watts. Static power is the report's own mean."""
    blocks = _split_kernels(_read_text(path))
    names = []
    rows = []
    static_w = []
    reported_w = []
    empty = []
    for block in blocks:
        name = block.split(maxsplit=1)[0] if block.strip() else ""
        figures = _read_averages(block)
        counts = _read_counters(figures, dialect, scaling, f"{path.name}: {name}")
        if any(math.isnan(count) for count in counts):
            empty.append(name)
            continue
        names.append(name)
        rows.append(counts)
        static_w.append(_parse_number(figures.get("gpu_avg_STATICP", "0")))
        reported_w.append(_parse_number(figures.get("kernel_avg_power", "nan")))
    if not rows:
        expectation = "a power report with kernels that had samples"
        raise bad_value(path.name, expectation, f"{len(blocks)} kernels without")
    notes = ["means over each kernel's samples, as the report gives them"]
    given_w = {}
    if dialect is SimulatorDialect.ACCELWATTCH:
        given_w = {"STATICP": np.array(static_w)}
        notes.append("STATICP is the report's own: it is not proportional to counters")
    if empty:
        notes.append(f"kernels without a sample left out: {', '.join(empty)}")
    activity = Activity(
        np.full(len(rows), sampling.sample_cycle / sampling.clock_hz),
        np.array(rows),
        tuple(counter.event for counter in dialect_counters(dialect) if counter.event),
        OperatingPoint(clock_hz=sampling.clock_hz),
        ActivitySource.SIMULATED,
    )
    return CountedKernels(
        tuple(names),
        activity,
        given_w,
        tuple(notes),
        tuple(reported_w),
    )


def _split_kernels(text: str) -> list[str]:
    """Return what stands of each kernel, its name first."""
    return re.split(r"^\s*kernel_name\s*=\s*", text, flags=re.MULTILINE)[1:]


def _read_averages(block: str) -> dict[str, str]:
    """Return the averages that a power report gives of one kernel, by name."""
    pattern = r"^(gpu_avg_\w+|kernel_avg_power),?\s*=\s*(\S+)"
    return dict(re.findall(pattern, block, re.MULTILINE))


def _read_counters(
    figures: Mapping[str, str],
    dialect: SimulatorDialect,
    scaling: Mapping[str, float],
    where: str,
) -> list[float]:
    """Return the mean counters of a kernel without their scaling factors; NaN where a kernel had no
    sample.
    """
    counts = []
    for counter in dialect_counters(dialect):
        if not counter.event:
            continue
        name = f"gpu_avg_{counter.column}"
        if name not in figures:
            do = f"This is read as a report of {dialect}, the dialect of the architecture file."
            raise bad_value(where, name, "none", do)
        factor = 1.0
        if counter.prescaled:
            factor = scaling.get(counter.scaling, 1.0) or 1.0
        counts.append(_parse_number(figures[name]) / factor)
    return counts


def read_accelsim(path: Path, clock_hz: float) -> CountedKernels:
    """Read GPGPU-Sim's or Accel-Sim's own output, or the table that Accel-Sim's ``get_stats.py``
    makes of it.
    """
    text = _read_text(path)
    is_table = text.startswith(_DIVISION)
    rows = _read_statistics(text) if is_table else _read_log(text)
    if not rows:
        wanted = (
            "a simulator's output with kernel_name and gpu_sim_cycle lines, or a table "
            "of get_stats.py with them"
        )
        raise bad_value(path.name, wanted, "none")
    events, value = _map_statistics(path.name, "map_accelsim.csv", rows.values())
    cycles = np.array([row["gpu_sim_cycle"] for row in rows.values()])
    if not (cycles > 0).all():
        raise bad_value(f"{path.name}: gpu_sim_cycle", "cycles above zero", cycles.min())
    at = OperatingPoint(clock_hz=clock_hz)
    activity = Activity(
        cycles / clock_hz,
        value,
        events,
        at,
        ActivitySource.SIMULATED,
    )
    note = "each kernel is the difference of the log's totals"
    if is_table:
        note = "statistics of get_stats.py, a row a kernel"
    return CountedKernels(tuple(name for name, _ in rows), activity, {}, (note,))


def _read_log(text: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return the statistics of each kernel that ended; totals add up in a log, so a kernel is a
    difference.
    """
    rows: dict[tuple[str, str], dict[str, float]] = {}
    before: dict[str, float] = {}
    for block in _split_kernels(text):
        totals = _read_totals(block)
        if "gpu_sim_cycle" not in totals:
            continue  # a kernel that had not ended
        row = {key: value - before.get(key, 0.0) for key, value in totals.items()}
        row["gpu_sim_cycle"] = totals["gpu_sim_cycle"]
        lanes = [int(key[1:]) for key in row if re.fullmatch(r"W\d{1,3}", key)]
        warps = sum(row[f"W{n}"] for n in lanes)
        if warps > 0:
            row["threads_per_warp"] = sum(n * row[f"W{n}"] for n in lanes) / warps
        before = totals
        rows[block.split(maxsplit=1)[0], str(len(rows))] = row
    return rows


def _read_totals(block: str) -> dict[str, float]:
    """Return what a log has counted since the program began, at the end of one kernel."""
    pattern = r"^\s*([A-Za-z][\w ]*(?:\[\w+\])*)\s*[=:]\s*([-+.\deE]+)\s*$"
    totals = {
        key.strip(): _parse_number(value) for key, value in re.findall(pattern, block, re.MULTILINE)
    }
    # a warp has 32 lanes or 64, so that a longer number is none of them
    for lanes, count in re.findall(r"\bW(\d{1,3}):(\d{1,300})\b", block):
        totals[f"W{int(lanes)}"] = float(count)
    for command, name in _DRAM_COMMANDS.items():
        counts = re.findall(rf"\b{command}\s*[=:]\s*(\d{{1,18}})\b", block)
        if counts:
            totals[name] = sum(float(count) for count in counts)
    return totals


def _read_statistics(text: str) -> dict[tuple[str, str], dict[str, float]]:
    """Return the statistics of each kernel and configuration; a section has a pattern's name, a
    header and rows.
    """
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for section in re.split(r"^-{20,},*\s*$", text, flags=re.MULTILINE)[1:]:
        full_lines = [line for line in section.strip().splitlines() if line.strip(" ,")]
        if len(full_lines) < 2:
            continue
        title, header, *body = [line.rstrip(",").split(",") for line in full_lines]
        # the name is the pattern that found the figure, such as gpu_sim_cycle\s*=\s*(.*)
        name = re.sub(r"\\[st]\+?\*?|\(.*|=|\^", "", title[0]).replace("\\", "").strip()
        for kernel, *cells in body:
            for configuration, cell in zip(header[1:], cells, strict=False):
                figure = _parse_number(cell)
                if not math.isnan(figure):
                    rows.setdefault((kernel, configuration), {})[name] = figure
    for row in rows.values():
        if "gpu_sim_cycle" not in row and "gpu_tot_sim_cycle" in row:
            row["gpu_sim_cycle"] = row["gpu_tot_sim_cycle"]
    return {key: row for key, row in rows.items() if "gpu_sim_cycle" in row}


def read_gem5_stats(path: Path) -> CountedKernels:
    """Read gem5's ``stats.txt``: each dump is an interval, and counts of all compute units are
    added up.
    """
    text = _read_text(path)
    dumps = [_sum_units(block) for block in text.split(_GEM5_START)[1:]]
    rows = [row for row in dumps if row.get("CUs.totalCycles", 0.0) > 0]
    if not rows:
        expectation = "gem5 statistics of compute units (system.*.CUs0.totalCycles)"
        raise bad_value(path.name, expectation, "none")
    events, value = _map_statistics(path.name, "map_gem5.csv", rows)
    duration_s = np.array([row.get("simSeconds", 0.0) for row in rows])
    if not ((duration_s >= _SHORTEST_S) & (duration_s <= _LONGEST_S)).all():
        expectation = f"from {_SHORTEST_S:g} to {_LONGEST_S:g} seconds"
        raise bad_value(f"{path.name}: simSeconds", expectation, duration_s.max())
    # one unit alone has no number
    unit_names = re.findall(r"^(\S*CUs\d*)\.totalCycles", text, re.MULTILINE)
    unit_count = len(set(unit_names))
    cycles = np.array([row["CUs.totalCycles"] for row in rows]) / unit_count
    is_slow = cycles < _LOWEST_CLOCK_HZ * duration_s
    is_fast = cycles > _HIGHEST_CLOCK_HZ * duration_s
    if (is_slow | is_fast | np.isnan(cycles)).any():
        expectation = f"cycles of {_LOWEST_CLOCK_HZ:g} to {_HIGHEST_CLOCK_HZ:g} Hz over simSeconds"
        raise bad_value(f"{path.name}: totalCycles", expectation, cycles.max())
    notes = (
        f"gem5: {len(rows)} dumps, {unit_count} compute units; a wavefront's instruction counts "
        "as a warp's",
        "integer operations are vector operations less floating-point ones",
    )
    activity = Activity(
        duration_s,
        value,
        events,
        OperatingPoint(clock_hz=cycles / duration_s),
        ActivitySource.SIMULATED,
    )
    names = tuple(f"dump {number}" for number in range(1, len(rows) + 1))
    return CountedKernels(names, activity, {}, notes)


def _sum_units(block: str) -> dict[str, float]:
    """Return the statistics of a dump, those of all compute units (CUs0, CUs1, ...) added up.

    A statistic has the last two parts of its path, or the last one, before its name."""
    sums: dict[str, float] = {}
    for key, text in re.findall(r"^(\S+)\s+([-+.\deE]+)\s", block, re.MULTILINE):
        *path, last = key.removesuffix("::total").split(".")
        units = [re.sub(r"\d+$", "", part) for part in path[-2:]]
        for name in {".".join([*units, last]), ".".join([*units[-1:], last])}:
            sums[name] = sums.get(name, 0.0) + _parse_number(text)
    return sums


def _map_statistics(
    where: str,
    name: str,
    rows: Iterable[dict[str, float]],
) -> tuple[tuple[str, ...], Array]:
    """Return the events that the statistics of all rows determine, and their values."""
    table = list(rows)
    mapped = read_shipped_table("wattcast.lab.gpuwattch", name)
    named = {str(row["metric"]) for row in mapped}
    for row in table:
        _fill_breakdowns(row, named)
    shared = set.intersection(*map(set, table))
    columns = {name: np.array([row[name] for row in table]) for name in shared}
    events = sum_mapped_events(mapped, columns)
    if not events or not all(np.isfinite(value).all() for value in events.values()):
        raise bad_value(where, "finite figures of at least one event", ", ".join(events) or "none")
    return tuple(events), np.stack(list(events.values()), axis=-1)


def _fill_breakdowns(row: dict[str, float], named: Iterable[str]) -> None:
    """Set the statistics of a printed breakdown that are not in it to the zero that they are."""
    for breakdown in _BREAKDOWNS:
        if any(key.startswith(breakdown) for key in row):
            for metric in named:
                if metric.startswith(breakdown):
                    row.setdefault(metric, 0.0)


def _parse_number(text: str) -> float:
    number = parse_figure(text)
    return math.nan if number is None else number
