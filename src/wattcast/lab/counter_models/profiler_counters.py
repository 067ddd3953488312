"""Read hardware counters of kernels as events: AccelWattch's columns, Nsight Compute, nvprof.

``map_accelwattch_hw.csv``, ``map_ncu.csv`` and ``map_nvprof.csv`` map columns to events. An event
whose metrics were not all collected is left out: absent is not zero."""

from __future__ import annotations

import csv
import io
import math
import re
import subprocess
from collections.abc import (
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import (
    bad_value,
    clip_text,
    nearest_names,
)
from wattcast.core.strict_files import (
    parse_csv,
    read_bytes,
    read_number,
    read_shipped_table,
)
from wattcast.hardware import OperatingPoint
from wattcast.lab.campaigns.nsight_counters import find_ncu
from wattcast.power.activity import (
    Activity,
    ActivitySource,
)

_MAX_BYTE = 256 << 20
DURATION_METRIC = "gpu__time_duration.sum"
_PREFIX = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
}
_SECONDS = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "ns": 1e-9,
}  # as ncu writes them since 2025; before: nsecond
_UNIT_WORDS = ("second", "byte", "inst", "sector", "cycle", "request", "hz", "Hz")
_NAME_COLUMNS = ("Kernel Name", "kernel", "Kernel", "name")


@dataclass(frozen=True)
class LaunchKey:
    """A kernel and its launch configuration, which launches with the same counters share; sizes
    empty: not known.
    """

    kernel: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()


def read_accelwattch_hw(path: Path, clock_hz: float) -> tuple[tuple[str, ...], Activity]:
    """Read AccelWattch's one-line-per-kernel counters (``L1_RH`` ... ``Chip Voltage``, with or
    without ``hw_``).

    Time is elapsed cycles over ``clock_hz``, the clock the kernels ran at. Events without a counter
    in AccelWattch's HW model (instruction cache, registers, precharges, constant misses) are left
    out."""
    rows = parse_csv(read_bytes(path, _MAX_BYTE), path.name)
    plain_names = {name.removeprefix("hw_"): name for name in rows[0]}
    mapped = {row["column"]: row["event"] for row in _read_map("map_accelwattch_hw.csv")}
    missing = [column for column in mapped if column not in plain_names]
    if missing:
        similar = [name for column in missing for name in nearest_names(column, plain_names, 1)]
        raise bad_value(
            path.name,
            f"columns {', '.join(missing)}",
            f"none ({', '.join(similar)}?)" if similar else "none",
        )

    columns = [plain_names[column] for column in mapped]
    value = np.array(
        [[read_number(row[c], f"{path.name}: {c}", 0.0) for c in columns] for row in rows]
    )
    events = tuple(mapped.values())
    cycles = value[:, events.index("core_cycle")]
    _check_cycles(cycles, path.name)
    named = next((name for name in _NAME_COLUMNS if name in rows[0]), None)
    names = tuple(row[named] if named else str(i) for i, row in enumerate(rows))
    at = OperatingPoint(clock_hz=clock_hz)
    return names, Activity(
        cycles / clock_hz,
        value,
        events,
        at,
        ActivitySource.PROFILED,
    )


MOST_CLOCK_HZ = 1e11


def read_ncu(path: Path, sm_count: float | None = None) -> tuple[tuple[LaunchKey, ...], Activity]:
    """Read an Nsight Compute CSV export: ``--page raw`` (a column per metric) or the default (a row
    per metric).

    ``sm_count`` turns active SMs into idle ones. The clock of each kernel is its cycles over its
    time."""
    where = path.name
    launches, metrics = read_ncu_metrics(path)
    collected = {name: value for name, value in metrics.items() if not np.isnan(value).all()}
    columns = compute_ncu_events(collected)
    for event, value in columns.items():
        _check_every_kernel(event, value, collected, where)
    active = columns.pop("active_sm", None)
    if active is not None and sm_count is not None:
        columns["idle_sm"] = np.clip(sm_count - active, 0.0, sm_count)
    if DURATION_METRIC not in metrics or "core_cycle" not in columns:
        raise bad_value(
            where,
            f"metrics {DURATION_METRIC} and sm__cycles_elapsed.max",
            "an export without them",
        )
    duration_s = metrics[DURATION_METRIC]
    _check_cycles(np.minimum(duration_s, columns["core_cycle"]), where)
    with np.errstate(over="ignore"):
        clock_hz = columns["core_cycle"] / duration_s
    if not (clock_hz <= MOST_CLOCK_HZ).all():
        expectation = f"at most {MOST_CLOCK_HZ:g} cycles a second"
        raise bad_value(where, expectation, float(clock_hz.max()))
    at = OperatingPoint(clock_hz=clock_hz)
    counted = np.stack(list(columns.values()), axis=-1)
    return launches, Activity(
        duration_s,
        counted,
        tuple(columns),
        at,
        ActivitySource.PROFILED,
    )


def _check_every_kernel(
    event: str,
    value: Array,
    metrics: Mapping[str, Array],
    where: str,
) -> None:
    """Refuse an event that some kernels lack, and name the metrics that were not collected."""
    lacking = np.flatnonzero(np.isnan(value))
    if not lacking.size:
        return
    needed = [name for name in list_ncu_metrics([event]) if name in metrics]
    missing = [name for name in needed if np.isnan(metrics[name][lacking]).any()]
    raise bad_value(
        f"{where}: kernel {int(lacking[0]) + 1}",
        f"a number for {', '.join(missing)}",
        f"none in {lacking.size} of {value.size} kernels",
        "Collect these kernels again, or remove their rows.",
    )


def read_nvprof(path: Path) -> dict[str, dict[str, float]]:
    """Read ``nvprof --csv --metrics ...``: the events of a launch of each kernel, means over all of
    its launches.

    nvprof tells neither time nor launch configuration, so every launch of a kernel has the same
    counts."""
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    launches: dict[str, dict[str, float]] = {}  # of each kernel, by metric
    sums: dict[str, dict[str, float]] = {}  # over these launches
    header: list[str] = []
    for row in csv.reader(io.StringIO(text, newline=None)):
        if row and row[0] == "Device":
            header = row
            continue
        cell = dict(zip(header, row, strict=False))
        is_whole = len(row) == len(header) and {"Kernel", "Invocations", "Avg"} <= cell.keys()
        if is_whole and cell.get("Metric Name"):
            kernel = cell["Kernel"]
            metric = cell["Metric Name"]
            count = _read_value(cell["Invocations"], "", path.name)
            mean = _read_value(cell["Avg"], "", path.name)
            count_of_metric = launches.setdefault(kernel, {})
            sum_of_metric = sums.setdefault(kernel, {})
            count_of_metric[metric] = count_of_metric.get(metric, 0.0) + count
            sum_of_metric[metric] = sum_of_metric.get(metric, 0.0) + count * mean
    if not sums:
        raise bad_value(
            path.name,
            "kernels below Device, Kernel, Invocations, Metric Name (nvprof --csv)",
            "none",
        )
    return {kernel: _average_nvprof(sums[kernel], launches[kernel]) for kernel in sums}


def _average_nvprof(
    sums: Mapping[str, float],
    launches: Mapping[str, float],
) -> dict[str, float]:
    """Return the mean of each event over the launches of a kernel; an infinite one is left out."""
    events = {}
    for row in _read_map("map_nvprof.csv"):
        metric = row["metric"]
        if launches.get(metric, 0.0) > 0.0:
            value = float(row["factor"]) * sums[metric] / launches[metric]
            if math.isfinite(value):
                events[row["event"]] = value
    return events


def list_ncu_metrics(wanted: Collection[str]) -> list[str]:
    """List the metrics that ``ncu`` must collect for these events, time and cycles included.

    >>> list_ncu_metrics(["warp_instruction"])
    ['gpu__time_duration.sum', 'sm__cycles_elapsed.max', 'sm__inst_executed.sum']
    """
    events = {*wanted, "core_cycle"} | ({"active_sm"} if "idle_sm" in wanted else set())
    rows = [row for row in _read_map("map_ncu.csv") if row["event"] in events]
    beside = (row[column] for row in rows for column in ("per", "times") if row[column])
    return sorted({DURATION_METRIC, *(row["metric"] for row in rows), *beside})


def compute_ncu_events(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """Compute every event that these metrics determine, ``(kernel,)`` each.

    >>> compute_ncu_events({"lts__t_bytes.sum": np.array([64.0])})
    {'l2_byte': array([64.])}
    """
    return sum_mapped_events(_read_map("map_ncu.csv"), metrics)


def sum_mapped_events(
    mapped: Iterable[Mapping[str, str]], metrics: Mapping[str, Array]
) -> dict[str, Array]:
    """Return each event as Σ factor · metric (· ``times``, / ``per``), zero or more.

    An event is left out where one of its metrics is not there, unless its row says that it is not
    needed."""
    totals: dict[str, Array] = {}
    incomplete = set()
    for row in mapped:
        event = row["event"]
        factor_metric = row.get("times")
        divisor_metric = row.get("per")
        needed = [name for name in (row["metric"], factor_metric, divisor_metric) if name]
        if any(name not in metrics for name in needed):
            if row.get("needed", "yes") == "yes":
                incomplete.add(event)
            continue
        amount = float(row["factor"]) * metrics[row["metric"]]
        if factor_metric:
            amount = amount * metrics[factor_metric]
        if divisor_metric:
            amount = _divide_counted(amount, metrics[divisor_metric])
        totals[event] = totals.get(event, 0.0) + amount
    whole = {event: total for event, total in totals.items() if event not in incomplete}
    return {event: np.maximum(total, 0.0) for event, total in whole.items()}


def _divide_counted(amount: Array, divisor: Array) -> Array:
    """Return a quotient of counts: zero where nothing was counted, NaN where nothing was known."""
    otherwise = np.where(np.isnan(divisor), divisor, 0.0)
    return np.divide(amount, divisor, out=otherwise, where=divisor > 0)


def read_ncu_metrics(path: Path) -> tuple[tuple[LaunchKey, ...], dict[str, Array]]:
    """Read the launches and every metric of an Nsight Compute CSV export in base units (shares 0 to
    1).
    """
    where = path.name
    data = read_bytes(path, _MAX_BYTE)
    if path.suffix == ".ncu-rep":
        data = import_report(path, ["--page", "raw", "--print-units", "base"])
    header, body = _split_export(data, where)
    if "Metric Name" in header:
        export = _read_metric_rows(header, body, where)
    else:
        export = _read_kernel_rows(header, body, where)
    if not export.launches:
        raise bad_value(where, "at least one kernel", "none")
    values: dict[str, dict[str, float]] = {}
    for kernel, name, unit, cell in export.cells:
        if "__" in name:
            value = _read_value(cell, unit, f"{where}: {name}")
            values.setdefault(name, {})[kernel] = value
    metrics = {}
    for name, value_of_kernel in values.items():
        if len(value_of_kernel) == len(export.launches):  # a metric that a kernel lacks is not used
            in_order = [value_of_kernel[kernel] for kernel in export.launches]
            metrics[name] = np.array(in_order)
    return tuple(export.launches.values()), metrics


def import_report(path: Path, page: Sequence[str]) -> bytes:
    """Return a page of a report as CSV, which ncu alone can read."""
    command = [find_ncu(), "--import", str(path), "--csv", *page]
    ended = subprocess.run(
        command,
        capture_output=True,
        timeout=600.0,
        check=False,
    )
    if ended.returncode != 0:
        raise bad_value(
            path.name,
            "a report that ncu --import reads",
            clip_text(ended.stdout.decode(errors="replace"), 200),
        )
    return ended.stdout


def _split_export(data: bytes, where: str) -> tuple[list[str], list[list[str]]]:
    """Return the header of an export, which ncu writes below its own words, and whole rows."""
    text = data.decode("utf-8", "replace")
    lines = text.splitlines()
    starts = (number for number, line in enumerate(lines) if line.lstrip('"').startswith("ID"))
    start = next(starts, None)
    if start is None:
        raise bad_value(
            where, 'a CSV with a header that starts with "ID" (ncu --csv)', clip_text(text[:60])
        )
    header, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    return header, [row for row in rows if len(row) == len(header)]


@dataclass(frozen=True)
class _Export:
    """The launches of an export by their IDs, and its cells."""

    launches: Mapping[str, LaunchKey]
    cells: list[tuple[str, str, str, str]]  # kernel, metric, unit, value


def _read_metric_rows(
    header: list[str],
    body: list[list[str]],
    where: str,
) -> _Export:
    """Read an export with one row per metric; the ID identifies kernels."""
    columns = ("ID", "Metric Name", "Metric Unit", "Metric Value")
    if not set(columns) <= set(header):
        raise bad_value(where, f"columns {', '.join(columns)}", clip_text(", ".join(header)))
    places = [header.index(name) for name in columns]
    launches: dict[str, LaunchKey] = {}
    cells = []
    for row in body:
        kernel, name, unit, value = (row[place] for place in places)
        launches.setdefault(kernel, _read_configuration(header, row))
        cells.append((kernel, name, unit, value))
    return _Export(launches, cells)


def _read_kernel_rows(
    header: list[str],
    body: list[list[str]],
    where: str,
) -> _Export:
    """Read an export with one row per kernel; the row before the first kernel holds units."""
    if not body or body[0][0].strip():
        raise bad_value(where, "a row of units below the header (ncu --page raw)", "none")
    units, *rows = body
    launches = {}
    cells = []
    for number, row in enumerate(rows):
        kernel = str(number)
        launches[kernel] = _read_configuration(header, row)
        for name, unit, value in zip(header, units, row, strict=True):
            cells.append((kernel, name, unit, value))
    return _Export(launches, cells)


def _read_configuration(header: list[str], row: list[str]) -> LaunchKey:
    """Return kernel name, grid and block of one row; sizes look like ``(128, 1, 1)``."""
    cell = dict(zip(header, row, strict=True))
    sizes = (
        tuple(int(n) for n in re.findall(r"\d+", cell.get(name, "")))
        for name in ("Grid Size", "Block Size")
    )
    return LaunchKey(cell.get("Kernel Name", ""), *sizes)


def _read_value(
    text: str,
    unit: str,
    where: str,
) -> float:
    """Return a number in base units, NaN for an empty cell, n/a or text.

    Exports have thousands separators and prefixes such as Kbyte and usecond.
    """
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return math.nan
    if math.isnan(number):  # a ratio of which nothing was counted
        return math.nan
    if math.isinf(number):
        raise bad_value(where, "a finite number", text)
    unit = unit.strip()
    head = unit.split("/")[0]
    if head in _SECONDS:
        return number * _SECONDS[head]
    for word in _UNIT_WORDS:
        if head.endswith(word) and head.removesuffix(word) in _PREFIX:
            return number * _PREFIX[head.removesuffix(word)]
    return number / 100.0 if unit == "%" else number


@cache
def _read_map(name: str) -> list[dict[str, str]]:
    return read_shipped_table("wattcast.lab.counter_models", name)


def _check_cycles(cycles: Array, where: str) -> None:
    if not (cycles > 0).all():
        row = int(np.argmin(cycles))
        raise bad_value(
            f"{where}: kernel {row + 1}", "cycles and a time above zero", float(cycles[row])
        )
