"""Hardware counters -> Activity, one interval a kernel: AccelWattch's HW columns and Nsight Compute exports.

``map_accelwattch_hw.csv`` and ``map_ncu.csv`` say which events the columns are. An event whose metrics were not
all collected is left out: absent is not zero.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wattcast.activity.activity import Activity, Source
from wattcast.arrays import Array
from wattcast.errors import BadInput, bad_value, clip, nearest
from wattcast.files import read_bytes
from wattcast.hardware import OperatingPoint

_MAX_BYTE = 256 << 20
_TIME = "gpu__time_duration.sum"
_PREFIX = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNIT_WORDS = ("second", "byte", "inst", "sector", "cycle", "request", "hz", "Hz")
_NAME_COLUMNS = ("Kernel Name", "kernel", "Kernel", "name")


class Configured(NamedTuple):
    """A kernel as it was launched; empty sizes where the export does not give them."""

    kernel: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()


def read_accelwattch_hw(path: Path, clock_hz: float) -> tuple[tuple[str, ...], Activity]:
    """AccelWattch's one-line-per-kernel counters (``L1_RH`` ... ``Chip Voltage``, with or without ``hw_``).

    Time is elapsed cycles over ``clock_hz``, the clock the kernels ran at. What AccelWattch's HW model has no
    counter for (instruction cache, registers, precharges, constant misses) is left out.
    """
    rows = _rows(path)
    found = {name.removeprefix("hw_"): name for name in rows[0]}
    mapped = [row for row in _table("map_accelwattch_hw.csv") if row["column"] in found]
    lost = [row["column"] for row in _table("map_accelwattch_hw.csv") if row["column"] not in found]
    if lost:
        hint = [name for column in lost for name in nearest(column, found, 1)]
        raise bad_value(path.name, f"columns {', '.join(lost)}", f"none ({', '.join(hint)}?)" if hint else "none")
    value = np.array([[_number(row, found[m["column"]], path.name) for m in mapped] for row in rows])
    events = tuple(m["event"] for m in mapped)
    cycles = value[:, events.index("core_cycle")]
    _check_cycles(cycles, path.name)
    at = OperatingPoint(clock_hz=clock_hz)
    return _names(rows), Activity(cycles / clock_hz, value, events, at, Source.PROFILED)


def read_ncu(path: Path, sm_count: float | None = None) -> tuple[tuple[str, ...], Activity]:
    """An Nsight Compute CSV export: ``--page raw`` (a column a metric) or the default (a row a metric).

    ``sm_count`` turns active SMs into idle ones. The clock of each kernel is its cycles over its time.
    """
    launches, metrics = _ncu_metrics(path)
    names = tuple(launch.kernel for launch in launches)
    return names, _ncu_activity(metrics, sm_count, path.name)


def read_ncu_launches(path: Path, sm_count: float | None = None) -> list[tuple[Configured, dict[str, float]]]:
    """Each launch of an Nsight Compute CSV export with the counts that it gives."""
    launches, metrics = _ncu_metrics(path)
    activity = _ncu_activity(metrics, sm_count, path.name)
    rows = [dict(zip(activity.events, row.tolist(), strict=True)) for row in activity.value]
    return list(zip(launches, rows, strict=True))


def metrics_for(wanted: Collection[str]) -> list[str]:
    """Metrics that ``ncu`` must collect for these events, time and cycles included.

    >>> metrics_for(["warp_instruction"])
    ['gpu__time_duration.sum', 'sm__cycles_elapsed.max', 'sm__inst_executed.sum']
    """
    events = {*wanted, "core_cycle"} | ({"active_sm"} if "idle_sm" in wanted else set())
    rows = [row for row in _table("map_ncu.csv") if row["event"] in events]
    beside = (row[column] for row in rows for column in ("per", "times") if row[column])
    return sorted({_TIME, *(row["metric"] for row in rows), *beside})


def ncu_events(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """Every event that these metrics give, ``(kernel,)`` each; one that misses a metric is left out.

    >>> {name: value.tolist() for name, value in ncu_events({"lts__t_bytes.sum": np.array([64.0])}).items()}
    {'l2_byte': [64.0]}
    """
    count = len(next(iter(metrics.values()), ()))
    found = {
        name: _ncu_event(name, metrics, count) for name in dict.fromkeys(r["event"] for r in _table("map_ncu.csv"))
    }
    return {name: value for name, value in found.items() if value is not None}


def _ncu_activity(metrics: Mapping[str, Array], sm_count: float | None, where: str) -> Activity:
    columns = ncu_events(metrics)
    active = columns.pop("active_sm", None)
    if active is not None and sm_count is not None:
        columns["idle_sm"] = np.clip(sm_count - active, 0.0, sm_count)
    if _TIME not in metrics or "core_cycle" not in columns:
        raise bad_value(where, f"metrics {_TIME} and sm__cycles_elapsed.max", "an export without them")
    duration_s = metrics[_TIME]
    _check_cycles(np.minimum(duration_s, columns["core_cycle"]), where)
    at = OperatingPoint(clock_hz=columns["core_cycle"] / duration_s)
    return Activity(duration_s, np.stack(list(columns.values()), axis=-1), tuple(columns), at, Source.PROFILED)


def ncu_metrics(path: Path) -> tuple[tuple[str, ...], dict[str, Array]]:
    """Kernel names and every metric of an Nsight Compute CSV export in base units (shares 0 to 1), as exported."""
    launches, metrics = _ncu_metrics(path)
    return tuple(launch.kernel for launch in launches), metrics


def _ncu_event(event: str, metrics: Mapping[str, Array], count: int) -> Array | None:
    """Σ factor · metric (times one, over another), zero or more; None when a metric was not collected."""
    total = np.zeros(count)
    for row in _table("map_ncu.csv"):
        if row["event"] != event:
            continue
        if any(name and name not in metrics for name in (row["metric"], row["per"], row["times"])):
            return None
        amount = float(row["factor"]) * metrics[row["metric"]]
        if row["times"]:
            amount = amount * metrics[row["times"]]
        if row["per"]:
            below = metrics[row["per"]]
            amount = np.divide(amount, below, out=np.zeros(count), where=below > 0)
        total = total + amount
    return np.maximum(total, 0.0)


def _ncu_metrics(path: Path) -> tuple[tuple[Configured, ...], dict[str, Array]]:
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    start = next((i for i, line in enumerate(text.splitlines()) if line.lstrip('"').startswith("ID")), None)
    if start is None:
        raise bad_value(path.name, 'a CSV with a header that starts with "ID" (ncu --csv)', clip(text[:60]))
    rows = list(csv.reader(io.StringIO("\n".join(text.splitlines()[start:]))))
    header, body = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    if "Metric Name" in header:
        return _ncu_long(header, body, path.name)
    return _ncu_wide(header, body, path.name)


def _ncu_wide(
    header: list[str], body: list[list[str]], where: str
) -> tuple[tuple[Configured, ...], dict[str, Array]]:
    """One row a kernel; the row before the first kernel holds units."""
    if not body or body[0][0].strip():
        raise bad_value(where, "a row of units below the header (ncu --page raw)", "none")
    units, kernels = body[0], body[1:]
    if not kernels:
        raise bad_value(where, "at least one kernel", "none")
    metrics: dict[str, Array] = {}
    for i, name in enumerate(header):
        if "__" in name:
            metrics[name] = np.array([_value(row[i], units[i], f"{where}: {name}") for row in kernels])
    return tuple(_configured(header, row) for row in kernels), metrics


def _ncu_long(
    header: list[str], body: list[list[str]], where: str
) -> tuple[tuple[Configured, ...], dict[str, Array]]:
    """One row a metric; the ID tells kernels apart. A metric that misses for a kernel is not used."""
    at = {name: header.index(name) for name in ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")}
    kernels: dict[str, Configured] = {}
    values: dict[str, dict[str, float]] = {}
    for row in body:
        kernel, name = row[at["ID"]], row[at["Metric Name"]]
        kernels.setdefault(kernel, _configured(header, row))
        text, unit = row[at["Metric Value"]], row[at["Metric Unit"]]
        if "__" in name:
            values.setdefault(name, {})[kernel] = _value(text, unit, f"{where}: {name}")
    whole = {n: v for n, v in values.items() if len(v) == len(kernels)}
    if not kernels:
        raise bad_value(where, "at least one kernel", "none")
    return tuple(kernels.values()), {n: np.array([v[k] for k in kernels]) for n, v in whole.items()}


def _configured(header: list[str], row: list[str]) -> Configured:
    """Kernel name, grid and block of one row; sizes look like ``(128, 1, 1)``."""
    cell = dict(zip(header, row, strict=True))
    sizes = (tuple(int(n) for n in re.findall(r"\d+", cell.get(name, ""))) for name in ("Grid Size", "Block Size"))
    return Configured(cell.get("Kernel Name", ""), *sizes)


def _value(text: str, unit: str, where: str) -> float:
    """A number of an export in base units: thousands separators and prefixes such as Kbyte and usecond."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return math.nan
    if not math.isfinite(number):
        raise bad_value(where, "a finite number", text)
    unit = unit.strip()
    for word in _UNIT_WORDS:
        head = unit.split("/")[0]
        if head.endswith(word) and head.removesuffix(word) in _PREFIX:
            return number * _PREFIX[head.removesuffix(word)]
    return number / 100.0 if unit == "%" else number


@cache
def _table(name: str) -> list[dict[str, str]]:
    text = files("wattcast.activity").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), restval=""))


def _rows(path: Path) -> list[dict[str, str]]:
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows:
        raise BadInput(f"{path.name}: expected one line per kernel below a header, got none.")
    return rows


def _number(row: Mapping[str, str], column: str, where: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        raise bad_value(f"{where}: {column}", "a number", str(row[column])) from None
    if not (math.isfinite(value) and value >= 0):
        raise bad_value(f"{where}: {column}", "a finite number, zero or more", value)
    return value


def _names(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    column = next((name for name in _NAME_COLUMNS if name in rows[0]), None)
    return tuple(row[column] if column else str(i) for i, row in enumerate(rows))


def _check_cycles(cycles: Array, where: str) -> None:
    if not (cycles > 0).all():
        row = int(np.argmin(cycles))
        raise bad_value(f"{where}: kernel {row + 1}", "cycles and a time above zero", float(cycles[row]))
