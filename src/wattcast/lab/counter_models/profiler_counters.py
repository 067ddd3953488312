"""Read hardware counters of kernels as events: AccelWattch's columns, Nsight Compute, nvprof,
microbenchmarks.

``map_accelwattch_hw.csv``, ``map_ncu.csv`` and ``map_nvprof.csv`` map columns to events. An event
whose metrics were not all collected is left out: absent is not zero.

Counts of microbenchmarks and multimedia workloads were taken by a profiler on a shorter launch of
the same kernel (docs/method/microbenchmarks.md) and are scaled to the launch whose power was
measured. Kernels bound by the multiprocessors take the same cycles at every clock; kernels bound by
DRAM take the same time. A clip of 80 frames does not stay in L2 as the 8 counted frames do, so each
byte of a result goes to DRAM once and each byte of a frame comes from there once."""

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
from wattcast.core.measured_rows import Plain
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import COUNTERS_FILE, read_table
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
    known_events,
)
from wattcast.predictor.bundle.bundle_file import shipped_bundle

_MAX_BYTE = 256 << 20
_TIME = "gpu__time_duration.sum"
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
    found = {name.removeprefix("hw_"): name for name in rows[0]}
    mapped = {row["column"]: row["event"] for row in _read_map("map_accelwattch_hw.csv")}
    if lost := [column for column in mapped if column not in found]:
        hint = [name for column in lost for name in nearest_names(column, found, 1)]
        raise bad_value(
            path.name,
            f"columns {', '.join(lost)}",
            f"none ({', '.join(hint)}?)" if hint else "none",
        )

    columns = [found[column] for column in mapped]
    value = np.array(
        [[read_number(row[c], f"{path.name}: {c}", 0.0) for c in columns] for row in rows]
    )
    events = tuple(mapped.values())
    cycles = value[:, events.index("core_cycle")]
    _check_cycles(cycles, path.name)
    named = next((name for name in _NAME_COLUMNS if name in rows[0]), None)
    names = tuple(row[named] if named else str(i) for i, row in enumerate(rows))
    at = OperatingPoint(clock_hz=clock_hz)
    return names, Activity(cycles / clock_hz, value, events, at, ActivitySource.PROFILED)


MOST_CLOCK_HZ = 1e11


def read_ncu(path: Path, sm_count: float | None = None) -> tuple[tuple[LaunchKey, ...], Activity]:
    """Read an Nsight Compute CSV export: ``--page raw`` (a column per metric) or the default (a row
    per metric).

    ``sm_count`` turns active SMs into idle ones. The clock of each kernel is its cycles over its
    time."""
    where = path.name
    launches, metrics = read_ncu_metrics(path)
    known = {name: value for name, value in metrics.items() if not np.isnan(value).all()}
    columns = compute_ncu_events(known)
    for event, value in columns.items():
        if (lacking := np.flatnonzero(np.isnan(value))).size:
            needed = [
                m
                for m in list_ncu_metrics([event])
                if m in known and np.isnan(known[m][lacking]).any()
            ]
            wanted = f"a number for {', '.join(needed)}"
            found = f"none in {lacking.size} of {value.size} kernels"
            do = "Collect these kernels again, or remove their rows."
            raise bad_value(f"{where}: kernel {int(lacking[0]) + 1}", wanted, found, do)
    active = columns.pop("active_sm", None)
    if active is not None and sm_count is not None:
        columns["idle_sm"] = np.clip(sm_count - active, 0.0, sm_count)
    if _TIME not in metrics or "core_cycle" not in columns:
        raise bad_value(
            where, f"metrics {_TIME} and sm__cycles_elapsed.max", "an export without them"
        )
    duration_s = metrics[_TIME]
    _check_cycles(np.minimum(duration_s, columns["core_cycle"]), where)
    with np.errstate(over="ignore"):
        clock_hz = columns["core_cycle"] / duration_s
    if not (clock_hz <= MOST_CLOCK_HZ).all():
        wanted = f"at most {MOST_CLOCK_HZ:g} cycles a second"
        raise bad_value(where, wanted, float(clock_hz.max()))
    at = OperatingPoint(clock_hz=clock_hz)
    counted = np.stack(list(columns.values()), axis=-1)
    return launches, Activity(duration_s, counted, tuple(columns), at, ActivitySource.PROFILED)


def read_nvprof(path: Path) -> dict[str, dict[str, float]]:
    """Read ``nvprof --csv --metrics ...``: the events of a launch of each kernel, means over all of
    its launches.

    nvprof tells neither time nor launch configuration, so every launch of a kernel has the same
    counts."""
    sums: dict[str, dict[str, tuple[float, float]]] = {}
    header: list[str] = []
    for row in csv.reader(
        io.StringIO(read_bytes(path, _MAX_BYTE).decode("utf-8", "replace"), newline=None)
    ):
        if row and row[0] == "Device":
            header = row
        cell = dict(zip(header, row, strict=False))
        whole = (
            row is not header
            and len(row) == len(header)
            and {"Kernel", "Invocations", "Avg"} <= cell.keys()
        )
        if whole and cell.get("Metric Name"):
            launches, mean = (
                _read_value(cell[name], "", path.name) for name in ("Invocations", "Avg")
            )
            before = sums.setdefault(cell["Kernel"], {}).get(cell["Metric Name"], (0.0, 0.0))
            sums[cell["Kernel"]][cell["Metric Name"]] = (
                before[0] + launches,
                before[1] + launches * mean,
            )
    if not sums:
        raise bad_value(
            path.name,
            "kernels below Device, Kernel, Invocations, Metric Name (nvprof --csv)",
            "none",
        )
    found = {}
    for kernel, metrics in sums.items():
        events = {
            row["event"]: float(row["factor"])
            * metrics[row["metric"]][1]
            / metrics[row["metric"]][0]
            for row in _read_map("map_nvprof.csv")
            if row["metric"] in metrics and metrics[row["metric"]][0] > 0.0
        }
        found[kernel] = {event: value for event, value in events.items() if math.isfinite(value)}
    return found


def list_ncu_metrics(wanted: Collection[str]) -> list[str]:
    """List the metrics that ``ncu`` must collect for these events, time and cycles included.

    >>> list_ncu_metrics(["warp_instruction"])
    ['gpu__time_duration.sum', 'sm__cycles_elapsed.max', 'sm__inst_executed.sum']
    """
    events = {*wanted, "core_cycle"} | ({"active_sm"} if "idle_sm" in wanted else set())
    rows = [row for row in _read_map("map_ncu.csv") if row["event"] in events]
    beside = (row[column] for row in rows for column in ("per", "times") if row[column])
    return sorted({_TIME, *(row["metric"] for row in rows), *beside})


def compute_ncu_events(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """Compute every event that these metrics determine, ``(kernel,)`` each.

    >>> {name: value.tolist() for name, value in compute_ncu_events({"lts__t_bytes.sum": np.array([64.0])}).items()}
    {'l2_byte': [64.0]}
    """
    return sum_mapped_events(_read_map("map_ncu.csv"), metrics)


def sum_mapped_events(
    mapped: Iterable[Mapping[str, str]], metrics: Mapping[str, Array]
) -> dict[str, Array]:
    """Return each event as Σ factor · metric (· ``times``, / ``per``), zero or more.

    An event is left out where one of its metrics is not there, unless its row says that it is not
    needed."""
    found: dict[str, Array] = {}
    lacking = set()
    for row in mapped:
        event = row["event"]
        times = row.get("times")
        per = row.get("per")
        if any(name and name not in metrics for name in (row["metric"], per, times)):
            if row.get("needed", "yes") == "yes":
                lacking.add(event)
            continue
        amount = float(row["factor"]) * metrics[row["metric"]]
        if times:
            amount = amount * metrics[times]
        if per:
            below = metrics[per]
            amount = np.divide(
                amount, below, out=np.where(np.isnan(below), below, 0.0), where=below > 0
            )
        found[event] = found.get(event, 0.0) + amount
    return {event: np.maximum(total, 0.0) for event, total in found.items() if event not in lacking}


def read_ncu_metrics(path: Path) -> tuple[tuple[LaunchKey, ...], dict[str, Array]]:
    """Read the launches and every metric of an Nsight Compute CSV export in base units (shares 0 to
    1).
    """
    data = read_bytes(path, _MAX_BYTE)
    if path.suffix == ".ncu-rep":  # readable by ncu alone
        command = [
            find_ncu(),
            "--import",
            str(path),
            "--csv",
            "--page",
            "raw",
            "--print-units",
            "base",
        ]
        ended = subprocess.run(
            command,
            capture_output=True,
            timeout=600.0,
            check=False,
        )
        data = ended.stdout
        if ended.returncode != 0:
            raise bad_value(
                path.name,
                "a report that ncu --import reads",
                clip_text(data.decode(errors="replace"), 200),
            )
    text = data.decode("utf-8", "replace")
    start = next(
        (i for i, line in enumerate(text.splitlines()) if line.lstrip('"').startswith("ID")), None
    )
    if start is None:
        raise bad_value(
            path.name, 'a CSV with a header that starts with "ID" (ncu --csv)', clip_text(text[:60])
        )
    rows = list(csv.reader(io.StringIO("\n".join(text.splitlines()[start:]))))
    header = rows[0]
    body = [row for row in rows[1:] if len(row) == len(rows[0])]
    where = path.name
    kernels: dict[str, LaunchKey] = {}
    values: dict[str, dict[str, float]] = {}
    if "Metric Name" in header:  # one row per metric; the ID identifies kernels
        wanted = ("ID", "Metric Name", "Metric Unit", "Metric Value")
        if not set(wanted) <= set(header):
            raise bad_value(where, f"columns {', '.join(wanted)}", clip_text(", ".join(header)))
        at = [header.index(name) for name in wanted]
        cells = [(row[at[0]], row[at[1]], row[at[2]], row[at[3]]) for row in body]
        for row in body:
            kernels.setdefault(row[at[0]], _read_configuration(header, row))
    else:  # one row per kernel; the row before the first kernel holds units
        if not body or body[0][0].strip():
            raise bad_value(where, "a row of units below the header (ncu --page raw)", "none")
        kernels = {str(k): _read_configuration(header, row) for k, row in enumerate(body[1:])}
        columns = [(i, name, body[0][i]) for i, name in enumerate(header)]
        cells = [
            (str(k), name, unit, row[i])
            for k, row in enumerate(body[1:])
            for i, name, unit in columns
        ]
    if not kernels:
        raise bad_value(where, "at least one kernel", "none")
    for kernel, name, unit, cell in cells:
        if "__" in name:
            values.setdefault(name, {})[kernel] = _read_value(cell, unit, f"{where}: {name}")
    whole = {
        n: v for n, v in values.items() if len(v) == len(kernels)
    }  # a metric that a kernel lacks is not used
    return tuple(kernels.values()), {n: np.array([v[k] for k in kernels]) for n, v in whole.items()}


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


MICROBENCH_COUNTERS_FILE = "microbench_counters.jsonl"
RESULT_FILES = ("microbench.jsonl", "multimedia.jsonl")
# folder beside these with the rows of another card, which the fit that ships does not use
OTHER_CARD = "card-b"
DRAM_BOUND_SHARE = (
    0.5  # share of the largest DRAM rate of all counted kernels from which on DRAM sets the time
)
LUMA_BYTE = 1920 * 1080  # of a full-HD frame; planar 4:2:0 has half as much again of colour
COLOUR_FACTOR = 1.5
LUMA_ONLY_WORKLOADS = ("dct", "motion")  # workloads that read no colour
MOVE_FRAMES = "move_frames"  # moves frames over the bus and runs no kernel
MOVED_SUFFIX = "_moved"  # rows that move frames as well
SECTOR_BYTE = 32.0
FULL_WARP = 32.0  # threads of a warp

PLANE_FOLDER = re.compile(r"(\d+)-(\d+)")  # rows at one pair of clocks: core and memory in MHz

CounterLine = dict[str, float | str]
NcuMetrics = Mapping[str, float]


def make_table_lines(folder: Path, gpu: str) -> list[CounterLine]:
    """Return one line per measured microbenchmark: watts by rail, clocks, counts of one launch, and
    their events.

    ``relative_voltage`` is that of the GPU's fitted bundle at the reported clock, absent without a
    bundle. Lines are of the first round and of the counted version of a kernel; rows without power
    are left out, and the last row of an id counts."""
    counters = folder / MICROBENCH_COUNTERS_FILE
    if counters.is_file():
        plane = [path for path in folder.iterdir() if PLANE_FOLDER.fullmatch(path.name)]
        if plane:
            return _make_plane_lines(sorted(plane, key=_rank_highest_clocks), gpu)
    elif PLANE_FOLDER.fullmatch(folder.name):
        counters = folder.parent / MICROBENCH_COUNTERS_FILE
    if not counters.is_file():
        wanted = f"a folder with {MICROBENCH_COUNTERS_FILE} (lab microbench --counters)"
        raise bad_value(str(folder), wanted, "none")
    counted = {str(row["id"]): row for row in read_lines(counters)}
    names = sorted({name for row in counted.values() for name in row["metrics"]})
    most = max((_dram_byte_per_s(row["metrics"]) for row in counted.values()), default=0.0)
    lines: list[CounterLine] = []
    for file_name in RESULT_FILES:
        for row in _read_latest_rows(folder / file_name, counted):
            metrics = _scale_counts(row, counted, names, most)
            if metrics is not None:
                line = _describe_run(row, gpu)
                lines.append(
                    {
                        **line,
                        **metrics,
                        **events_of_launch(metrics),
                    }
                )
    return lines


def _rank_highest_clocks(folder: Path) -> list[int]:
    """Return a key that sorts the folders of pairs of clocks, the highest first."""
    return [-int(clock) for clock in folder.name.split("-")[::-1]]


def _read_latest_rows(path: Path, counted: Mapping[str, Plain]) -> list[Plain]:
    """Read the last usable row of each benchmark: of the first round, with watts, and of the
    version of the kernel that was counted.
    """
    latest: dict[str, Plain] = {}
    for row in read_lines(path, missing_ok=True):
        name = str(row.get("name"))
        version = counted.get(_counted_kernel(name), row).get("version", 1)
        is_usable = not row.get("error") and row.get("power_w") and not row.get("repeat")
        if is_usable and int(row.get("version", 1)) == int(version):
            latest[name] = row
    return list(latest.values())


def _describe_run(row: Plain, gpu: str) -> CounterLine:
    """Return the watts by rail and the clocks of a measured microbenchmark."""
    name = str(row["name"])
    power_w = float(row["power_w"])
    memory_w = float(row.get("memory_power_w") or 0.0)
    clock_hz = float(row.get("sm_clock_hz") or 0.0)
    line: CounterLine = {
        "benchmark": name,
        "group": f"{row['group']}{MOVED_SUFFIX * moves_frames(name)}",
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
    if level is not None:
        line["relative_voltage"] = level
    return line


def _make_plane_lines(folders: list[Path], gpu: str) -> list[CounterLine]:
    """Return the lines of all pairs of clocks; ``folders`` begin with the highest, at which kernels
    were counted.

    An operation of a kernel counts the same at every clock, so counts go by the operations of a
    launch."""
    highest = {str(line["benchmark"]): line for line in make_table_lines(folders[0], gpu)}
    counts = {name for name, event in known_events().items() if not event.is_mean}
    done = dict[str, float]()
    lines = list[CounterLine]()
    for folder in folders:
        kept = (
            row
            for row in read_lines(folder / RESULT_FILES[0])
            if not (row.get("error") or row.get("repeat"))
        )
        rows = {str(row["name"]): row for row in kept}
        done = done or {name: float(row.get("operations") or 0.0) for name, row in rows.items()}
        for name, row in rows.items():
            line = highest.get(name)
            operations = float(row.get("operations") or 0.0)
            if line is None or not row.get("power_w") or not row.get("sm_clock_hz"):
                continue
            scale = operations / done[name] if done.get(name) else 1.0
            events = {
                n: float(v) * (scale if n in counts else 1.0)
                for n, v in line.items()
                if n in known_events()
            }
            own = {
                "seconds": float(row.get("launch_s") or 1.0),
                "clock_hz": float(row["sm_clock_hz"]),
            }
            own |= {
                "watts": float(row["power_w"]),
                "memory_clock_hz": 1e6 * float(folder.name.split("-")[1]),
            }
            lines.append(
                {
                    "benchmark": name,
                    "group": line["group"],
                    **own,
                    **events,
                }
            )
    return lines


def read_operator_metrics(folder: Path, sm_count: float) -> dict[str, list[dict[str, float]]]:
    """Return the metrics of the kernels of each counted operator of a database, under the
    profiler's names.

    The campaign did not collect active threads, bank conflicts, and integer and fp64 products:
    warps are taken as full, the others as none."""
    found: dict[str, list[dict[str, float]]] = {}
    for kernel in read_table(folder / COUNTERS_FILE):
        # a column's last underscore stands for the point before the metric's roll-up
        metrics = {
            ".".join(name.rsplit("_", 1)): float(value)
            for name, value in kernel.items()
            if "__" in name
        }
        metrics |= {
            "sm__pipe_tensor_cycles_active.sum": sm_count
            * metrics["sm__pipe_tensor_cycles_active.avg"],
            "smsp__thread_inst_executed_per_inst_executed.ratio": FULL_WARP,
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 0.0,
            "sm__inst_executed_pipe_tensor_op_imma.sum": 0.0,
            "sm__inst_executed_pipe_tensor_op_dmma.sum": 0.0,
        }
        for way in ("read", "write"):
            metrics[f"dram__sectors_{way}.sum"] = metrics[f"dram__bytes_{way}.sum"] / SECTOR_BYTE
        found.setdefault(kernel["spec"], []).append(metrics)
    return found


def events_of_launch(metrics: NcuMetrics) -> dict[str, float]:
    """Return the events of one launch, by ``map_ncu.csv``."""
    found = compute_ncu_events({name: np.array([value]) for name, value in metrics.items()})
    return {name: float(value[0]) for name, value in found.items()}


def bundle_voltage(gpu: str, clock_hz: float) -> float | None:
    """Return the core voltage over that at the top clock from the GPU's bundle; flat below its
    lowest clock.
    """
    bundle = shipped_bundle(gpu)
    level = None if bundle is None else bundle.power.relative_voltage(clock_hz)
    return None if level is None else float(level)


def moves_frames(name: str) -> bool:
    """Whether a row moves frames to the device and back, which no counter of a kernel shows."""
    return name == MOVE_FRAMES or name.endswith(MOVED_SUFFIX)


def _counted_kernel(name: str) -> str:
    """Return the counted kernel of a row: without the suffixes for a frame rate and for moved
    frames.
    """
    return name.removesuffix("_at_rate").removesuffix(MOVED_SUFFIX)


def _scale_counts(
    row: Plain,
    counted: Mapping[str, Plain],
    names: list[str],
    most: float,
) -> dict[str, float] | None:
    """Return the counts of the measured launch; zeros for an idle device; None where nothing was
    counted.

    Sums are scaled by frames, by time where DRAM sets it, else by cycles; means and shares stay.
    """
    name = str(row["name"])
    if row["group"] == "idle" or name == MOVE_FRAMES:
        return dict.fromkeys(names, 0.0)
    found = counted.get(_counted_kernel(name))
    if found is None or not row.get("launch_s"):
        return None
    metrics: NcuMetrics = found["metrics"]
    if found.get("frames"):
        scale = float(row["operations"]) / float(found["frames"])
    elif _dram_byte_per_s(metrics) > DRAM_BOUND_SHARE * most:
        scale = float(row["launch_s"]) / (1e-9 * metrics[_TIME])
    else:
        cycles = float(row["launch_s"]) * float(row.get("effective_clock_hz") or row["sm_clock_hz"])
        scale = cycles / metrics["sm__cycles_elapsed.max"]
    scaled = {
        name: value * (scale if name.endswith(".sum") else 1.0) for name, value in metrics.items()
    }
    if found.get("frames") and not moves_frames(name):  # the clip is larger than L2
        read_byte = float(row["operations"]) * LUMA_BYTE
        read_byte *= 1.0 if name.startswith(LUMA_ONLY_WORKLOADS) else COLOUR_FACTOR
        written_byte = scaled.get("l1tex__m_l1tex2xbar_write_bytes.sum", 0.0)
        for way, byte in (("read", read_byte), ("write", written_byte)):
            if f"dram__bytes_{way}.sum" in scaled:
                whole = max(scaled[f"dram__bytes_{way}.sum"], byte)
                scaled |= {
                    f"dram__bytes_{way}.sum": whole,
                    f"dram__sectors_{way}.sum": whole / SECTOR_BYTE,
                }
    return scaled


def _dram_byte_per_s(metrics: NcuMetrics) -> float:
    """Return the DRAM rate, zero where the profiler did not collect it."""
    byte = metrics.get("dram__bytes_read.sum", 0.0) + metrics.get("dram__bytes_write.sum", 0.0)
    return byte / (1e-9 * metrics[_TIME]) if byte else 0.0
