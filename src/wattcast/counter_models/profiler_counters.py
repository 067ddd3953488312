"""Read hardware counters of kernels as events: AccelWattch's columns, Nsight Compute exports, microbenchmarks.

``map_accelwattch_hw.csv`` and ``map_ncu.csv`` map columns to events. An event whose metrics were not all collected is
left out: absent is not zero.

Counts of microbenchmarks and multimedia workloads were taken by a profiler on a shorter launch of the same kernel
(docs/method/microbenchmarks.md) and are scaled to the launch whose power was measured. Kernels bound by the
multiprocessors take the same cycles at every clock; kernels bound by DRAM take the same time. A clip of 80 frames
does not stay in L2 as the 8 counted frames do, so each byte of a result goes to DRAM once and each byte of a frame
comes from there once.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput, bad_value, clip_text, nearest_names
from wattcast.core.measured_rows import Plain, read_lines
from wattcast.core.strict_files import read_bytes
from wattcast.hardware import OperatingPoint
from wattcast.power.activity import Activity, ActivitySource
from wattcast.predictor.bundle.bundle_file import shipped_bundle

_MAX_BYTE = 256 << 20
_TIME = "gpu__time_duration.sum"
_PREFIX = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNIT_WORDS = ("second", "byte", "inst", "sector", "cycle", "request", "hz", "Hz")
_NAME_COLUMNS = ("Kernel Name", "kernel", "Kernel", "name")


class ConfiguredKernel(NamedTuple):
    """A kernel with its launch configuration; sizes are empty where the export does not hold them."""

    kernel: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()


def read_accelwattch_hw(path: Path, clock_hz: float) -> tuple[tuple[str, ...], Activity]:
    """Read AccelWattch's one-line-per-kernel counters (``L1_RH`` ... ``Chip Voltage``, with or without ``hw_``).

    Time is elapsed cycles over ``clock_hz``, the clock the kernels ran at. Events without a counter in AccelWattch's
    HW model (instruction cache, registers, precharges, constant misses) are left out.
    """
    rows = _rows(path)
    found = {name.removeprefix("hw_"): name for name in rows[0]}
    mapped = [row for row in _table("map_accelwattch_hw.csv") if row["column"] in found]
    lost = [row["column"] for row in _table("map_accelwattch_hw.csv") if row["column"] not in found]
    if lost:
        hint = [name for column in lost for name in nearest_names(column, found, 1)]
        raise bad_value(path.name, f"columns {', '.join(lost)}", f"none ({', '.join(hint)}?)" if hint else "none")
    value = np.array([[_number(row, found[m["column"]], path.name) for m in mapped] for row in rows])
    events = tuple(m["event"] for m in mapped)
    cycles = value[:, events.index("core_cycle")]
    _check_cycles(cycles, path.name)
    at = OperatingPoint(clock_hz=clock_hz)
    return _names(rows), Activity(cycles / clock_hz, value, events, at, ActivitySource.PROFILED)


def read_ncu(path: Path, sm_count: float | None = None) -> tuple[tuple[str, ...], Activity]:
    """Read an Nsight Compute CSV export: ``--page raw`` (a column per metric) or the default (a row per metric).

    ``sm_count`` turns active SMs into idle ones. The clock of each kernel is its cycles over its time.
    """
    launches, metrics = _ncu_metrics(path)
    names = tuple(launch.kernel for launch in launches)
    return names, _ncu_activity(metrics, sm_count, path.name)


def read_ncu_launches(path: Path, sm_count: float | None = None) -> list[tuple[ConfiguredKernel, dict[str, float]]]:
    """Read each launch of an Nsight Compute CSV export with its counts."""
    launches, metrics = _ncu_metrics(path)
    activity = _ncu_activity(metrics, sm_count, path.name)
    rows = [dict(zip(activity.events, row.tolist(), strict=True)) for row in activity.value]
    return list(zip(launches, rows, strict=True))


def list_ncu_metrics(wanted: Collection[str]) -> list[str]:
    """List the metrics that ``ncu`` must collect for these events, time and cycles included.

    >>> list_ncu_metrics(["warp_instruction"])
    ['gpu__time_duration.sum', 'sm__cycles_elapsed.max', 'sm__inst_executed.sum']
    """
    events = {*wanted, "core_cycle"} | ({"active_sm"} if "idle_sm" in wanted else set())
    rows = [row for row in _table("map_ncu.csv") if row["event"] in events]
    beside = (row[column] for row in rows for column in ("per", "times") if row[column])
    return sorted({_TIME, *(row["metric"] for row in rows), *beside})


def compute_ncu_events(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """Compute every event that these metrics determine, ``(kernel,)`` each.

    >>> {name: value.tolist() for name, value in compute_ncu_events({"lts__t_bytes.sum": np.array([64.0])}).items()}
    {'l2_byte': [64.0]}
    """
    count = len(next(iter(metrics.values()), ()))
    found = {
        name: _ncu_event(name, metrics, count) for name in dict.fromkeys(r["event"] for r in _table("map_ncu.csv"))
    }
    return {name: value for name, value in found.items() if value is not None}


def _ncu_activity(metrics: Mapping[str, Array], sm_count: float | None, where: str) -> Activity:
    columns = compute_ncu_events(metrics)
    active = columns.pop("active_sm", None)
    if active is not None and sm_count is not None:
        columns["idle_sm"] = np.clip(sm_count - active, 0.0, sm_count)
    if _TIME not in metrics or "core_cycle" not in columns:
        raise bad_value(where, f"metrics {_TIME} and sm__cycles_elapsed.max", "an export without them")
    duration_s = metrics[_TIME]
    _check_cycles(np.minimum(duration_s, columns["core_cycle"]), where)
    at = OperatingPoint(clock_hz=columns["core_cycle"] / duration_s)
    return Activity(
        duration_s, np.stack(list(columns.values()), axis=-1), tuple(columns), at, ActivitySource.PROFILED
    )


def read_ncu_metrics(path: Path) -> tuple[tuple[str, ...], dict[str, Array]]:
    """Read kernel names and every metric of an Nsight Compute CSV export in base units (shares 0 to 1)."""
    launches, metrics = _ncu_metrics(path)
    return tuple(launch.kernel for launch in launches), metrics


def _ncu_event(event: str, metrics: Mapping[str, Array], count: int) -> Array | None:
    """Return Σ factor · metric (· another, / another), zero or more; None when a metric was not collected."""
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


def _ncu_metrics(path: Path) -> tuple[tuple[ConfiguredKernel, ...], dict[str, Array]]:
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    start = next((i for i, line in enumerate(text.splitlines()) if line.lstrip('"').startswith("ID")), None)
    if start is None:
        raise bad_value(path.name, 'a CSV with a header that starts with "ID" (ncu --csv)', clip_text(text[:60]))
    rows = list(csv.reader(io.StringIO("\n".join(text.splitlines()[start:]))))
    header, body = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    if "Metric Name" in header:
        return _ncu_long(header, body, path.name)
    return _ncu_wide(header, body, path.name)


def _ncu_wide(
    header: list[str], body: list[list[str]], where: str
) -> tuple[tuple[ConfiguredKernel, ...], dict[str, Array]]:
    """Read one row per kernel; the row before the first kernel holds units."""
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
) -> tuple[tuple[ConfiguredKernel, ...], dict[str, Array]]:
    """Read one row per metric; the ID identifies kernels. A metric that some kernel lacks is not used."""
    at = {name: header.index(name) for name in ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")}
    kernels: dict[str, ConfiguredKernel] = {}
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


def _configured(header: list[str], row: list[str]) -> ConfiguredKernel:
    """Return kernel name, grid and block of one row; sizes look like ``(128, 1, 1)``."""
    cell = dict(zip(header, row, strict=True))
    sizes = (tuple(int(n) for n in re.findall(r"\d+", cell.get(name, ""))) for name in ("Grid Size", "Block Size"))
    return ConfiguredKernel(cell.get("Kernel Name", ""), *sizes)


def _value(text: str, unit: str, where: str) -> float:
    """Return a number in base units; exports have thousands separators and prefixes such as Kbyte and usecond."""
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
    text = files("wattcast.counter_models").joinpath(name).read_text(encoding="utf-8")
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


MICROBENCH_COUNTERS_FILE = "microbench_counters.jsonl"
RESULT_FILES = ("microbench.jsonl", "multimedia.jsonl")
OTHER_CARD = "card-b"  # folder beside these with the rows of another card, which the fit that ships does not use
DRAM_BOUND_SHARE = 0.5  # share of the largest DRAM rate of all counted kernels from which on DRAM sets the time
LUMA_BYTE = 1920 * 1080  # of a full-HD frame; planar 4:2:0 has half as much again of colour
COLOUR_FACTOR = 1.5
LUMA_ONLY_WORKLOADS = ("dct", "motion")  # workloads that read no colour
MOVE_FRAMES = "move_frames"  # moves frames over the bus and runs no kernel
MOVED_SUFFIX = "_moved"  # rows that move frames as well
SECTOR_BYTE = 32.0

CounterLine = dict[str, float | str]
NcuMetrics = Mapping[str, float]


def make_table_lines(folder: Path, gpu: str) -> list[CounterLine]:
    """Return one line per measured microbenchmark: watts by rail, clocks, counts of one launch, and their events.

    ``relative_voltage`` is that of the GPU's fitted bundle at the reported clock, absent without a bundle. Lines are
    of the first round and of the counted version of a kernel; rows without power are left out, and the last row of an
    id counts.
    """
    counters = folder / MICROBENCH_COUNTERS_FILE
    if not counters.is_file():
        raise bad_value(str(folder), f"a folder with {MICROBENCH_COUNTERS_FILE} (lab microbench --counters)", "none")
    counted = {str(row["id"]): row for row in read_lines(counters)}
    names = sorted({name for row in counted.values() for name in row["metrics"]})
    most = max((_dram_byte_per_s(row["metrics"]) for row in counted.values()), default=0.0)
    lines: list[CounterLine] = []
    for row in _measured((folder / name for name in RESULT_FILES), counted):
        metrics = _counts(row, counted, names, most)
        if metrics is not None:
            lines.append({**_line(row, gpu), **metrics, **events_of_launch(metrics)})
    return lines


def events_of_launch(metrics: NcuMetrics) -> dict[str, float]:
    """Return the events of one launch, by ``map_ncu.csv``."""
    found = compute_ncu_events({name: np.array([value]) for name, value in metrics.items()})
    return {name: float(value[0]) for name, value in found.items()}


def bundle_voltage(gpu: str, clock_hz: float) -> float | None:
    """Return the core voltage over that at the top clock from the GPU's bundle; flat below its lowest clock."""
    bundle = shipped_bundle(gpu)
    level = None if bundle is None else bundle.power.relative_voltage(clock_hz)
    return None if level is None else float(level)


def moves_frames(name: str) -> bool:
    """Whether a row moves frames to the device and back, which no counter of a kernel shows."""
    return name == MOVE_FRAMES or name.endswith(MOVED_SUFFIX)


def _measured(paths: Iterable[Path], counted: Mapping[str, Plain]) -> Iterator[Plain]:
    for path in paths:
        latest: dict[str, Plain] = {}
        for row in read_lines(path) if path.is_file() else ():
            name = str(row.get("name"))
            same = _version(row) == _version(counted.get(_kernel(name), row))
            if not row.get("error") and row.get("power_w") and not row.get("repeat") and same:
                latest[name] = row
        yield from latest.values()


def _kernel(name: str) -> str:
    """Return the counted kernel of a row: without the suffixes for a frame rate and for moved frames."""
    return name.removesuffix("_at_rate").removesuffix(MOVED_SUFFIX)


def _version(row: Plain) -> int:
    """Return the version of a row's kernel."""
    return int(row.get("version", 1))


def _line(row: Plain, gpu: str) -> CounterLine:
    power_w, memory_w = float(row["power_w"]), float(row.get("memory_power_w") or 0.0)
    clock_hz = float(row.get("sm_clock_hz") or 0.0)
    line: CounterLine = {
        "benchmark": str(row["name"]),
        "group": f"{row['group']}{MOVED_SUFFIX * moves_frames(str(row['name']))}",
        "repeat": float(row.get("repeat", 0)),
        "watts": power_w,
        "memory_watts": memory_w,
        "other_watts": power_w - memory_w,
        "idle_watts": float(row.get("idle_power_w") or power_w),
        "seconds": float(row.get("launch_s") or 1.0),
        "clock_hz": clock_hz,
        "effective_clock_hz": float(row.get("effective_clock_hz") or clock_hz),
    }
    level = bundle_voltage(gpu, clock_hz)
    return line if level is None else line | {"relative_voltage": level}


def _counts(row: Plain, counted: Mapping[str, Plain], names: list[str], most: float) -> dict[str, float] | None:
    """Return the counts of the measured launch; zeros for an idle device; None where nothing was counted."""
    name = str(row["name"])
    if row["group"] == "idle" or name == MOVE_FRAMES:
        return dict.fromkeys(names, 0.0)
    found = counted.get(_kernel(name))
    if found is None or not row.get("launch_s"):
        return None
    metrics: NcuMetrics = found["metrics"]
    if found.get("frames"):
        scaled = _scaled(metrics, float(row["operations"]) / float(found["frames"]))
        return scaled if moves_frames(name) else _from_dram(scaled, name, float(row["operations"]))
    if _dram_byte_per_s(metrics) > DRAM_BOUND_SHARE * most:
        return _scaled(metrics, float(row["launch_s"]) / _seconds(metrics))
    cycles = float(row["launch_s"]) * float(row.get("effective_clock_hz") or row["sm_clock_hz"])
    return _scaled(metrics, cycles / metrics["sm__cycles_elapsed.max"])


def _scaled(metrics: NcuMetrics, scale: float) -> dict[str, float]:
    """Multiply sums by ``scale``; means and shares stay."""
    return {name: value * (scale if name.endswith(".sum") else 1.0) for name, value in metrics.items()}


def _from_dram(metrics: dict[str, float], name: str, frames: float) -> dict[str, float]:
    """Replace DRAM traffic by that of a clip larger than L2."""
    read_byte = frames * LUMA_BYTE * (1.0 if name.startswith(LUMA_ONLY_WORKLOADS) else COLOUR_FACTOR)
    least = {"read": read_byte, "write": metrics.get("l1tex__m_l1tex2xbar_write_bytes.sum", 0.0)}
    for way, byte in least.items():
        if f"dram__bytes_{way}.sum" not in metrics:
            continue
        whole = max(metrics[f"dram__bytes_{way}.sum"], byte)
        metrics |= {f"dram__bytes_{way}.sum": whole, f"dram__sectors_{way}.sum": whole / SECTOR_BYTE}
    return metrics


def _dram_byte_per_s(metrics: NcuMetrics) -> float:
    """Return the DRAM rate, zero where the profiler did not collect it."""
    byte = metrics.get("dram__bytes_read.sum", 0.0) + metrics.get("dram__bytes_write.sum", 0.0)
    return byte / _seconds(metrics) if byte else 0.0


def _seconds(metrics: NcuMetrics) -> float:
    return 1e-9 * metrics["gpu__time_duration.sum"]
