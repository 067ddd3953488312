"""Watts and hardware counters of microbenchmarks and multimedia workloads in one table, for counter models.

Counts were taken by a profiler on a shorter launch of the same kernel (docs/method/microbenchmarks.md) and are
brought to the launch whose power was measured. What is bound by the multiprocessors takes the same cycles at
every clock; what is bound by DRAM takes the same time. A clip of 80 frames does not stay in L2 as the 8 counted
frames do, so each byte of a result goes to DRAM once and each byte of a frame comes from there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from wattcast.activity.profiled import ncu_events
from wattcast.errors import bad_value
from wattcast.fitted import fitted
from wattcast.power.module import ModulePower
from wattcast.records import Plain, read_lines

COUNTERS_FILE = "microbench_counters.jsonl"
RESULT_FILES = ("microbench.jsonl", "multimedia.jsonl")
OTHER_CARD = "card-b"  # folder beside these with the rows of another card, which the fit that ships does not use
DRAM_BOUND = 0.5  # share of the largest DRAM rate of all counted kernels from which on DRAM sets the time
LUMA_BYTE = 1920 * 1080  # of a full-HD frame; planar 4:2:0 has half as much again of colour
COLOUR = 1.5
LUMA_ONLY = ("dct", "motion")  # workloads that read no colour
NO_KERNEL = "move_frames"  # moves frames over the bus and runs no kernel
MOVED = "_moved"  # rows that move frames as well
SECTOR_BYTE = 32.0

Line = dict[str, float | str]
Metrics = Mapping[str, float]


def table_lines(folder: Path, gpu: str) -> list[Line]:
    """One line a measured row: watts by rail, clocks, the counts of one launch, and the events they are.

    ``relative_voltage`` is that of the GPU's fitted bundle at the reported clock, absent where there is no
    bundle. Rows of the first round and of the version of a kernel that was counted; rows without power are left out,
    and the last row of an id counts.
    """
    counters = folder / COUNTERS_FILE
    if not counters.is_file():
        raise bad_value(str(folder), f"a folder with {COUNTERS_FILE} (measure microbench --counters)", "none")
    counted = {str(row["id"]): row for row in read_lines(counters)}
    names = sorted({name for row in counted.values() for name in row["metrics"]})
    most = max((_dram_byte_per_s(row["metrics"]) for row in counted.values()), default=0.0)
    lines: list[Line] = []
    for row in _measured((folder / name for name in RESULT_FILES), counted):
        metrics = _counts(row, counted, names, most)
        if metrics is not None:
            lines.append({**_line(row, gpu), **metrics, **events_of(metrics)})
    return lines


def events_of(metrics: Metrics) -> dict[str, float]:
    """Events of one launch, by ``activity/map_ncu.csv``."""
    found = ncu_events({name: np.array([value]) for name, value in metrics.items()})
    return {name: float(value[0]) for name, value in found.items()}


def relative_voltage(gpu: str, clock_hz: float) -> float | None:
    """Core voltage over that at the top clock, as the GPU's bundle has it; flat below its lowest clock."""
    bundle = fitted(gpu)
    if bundle is None or not isinstance(bundle.power, ModulePower):
        return None
    return float(bundle.power.voltage.at(clock_hz))


def moves_frames(name: str) -> bool:
    """Whether a row moves frames to the device and back, which no counter of a kernel shows."""
    return name == NO_KERNEL or name.endswith(MOVED)


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
    """The counted kernel of a row: of one at a frame rate, or one that moves frames, the plain one."""
    return name.removesuffix("_at_rate").removesuffix(MOVED)


def _version(row: Plain) -> int:
    """Of the kernel; repetitions are shorter and say nothing of memory power, so only the first round has lines."""
    return int(row.get("version", 1))


def _line(row: Plain, gpu: str) -> Line:
    power_w, memory_w = float(row["power_w"]), float(row.get("memory_power_w") or 0.0)
    clock_hz = float(row.get("sm_clock_hz") or 0.0)
    line: Line = {
        "benchmark": str(row["name"]),
        "group": f"{row['group']}{MOVED * moves_frames(str(row['name']))}",
        "repeat": float(row.get("repeat", 0)),
        "watts": power_w,
        "memory_watts": memory_w,
        "other_watts": power_w - memory_w,
        "idle_watts": float(row.get("idle_power_w") or power_w),
        "seconds": float(row.get("launch_s") or 1.0),
        "clock_hz": clock_hz,
        "effective_clock_hz": float(row.get("effective_clock_hz") or clock_hz),
    }
    level = relative_voltage(gpu, clock_hz)
    return line if level is None else line | {"relative_voltage": level}


def _counts(row: Plain, counted: Mapping[str, Plain], names: list[str], most: float) -> dict[str, float] | None:
    """Counts of the measured launch; zeros for an idle device; None where nothing was counted."""
    name = str(row["name"])
    if row["group"] == "idle" or name == NO_KERNEL:
        return dict.fromkeys(names, 0.0)
    found = counted.get(_kernel(name))
    if found is None or not row.get("launch_s"):
        return None
    metrics: Metrics = found["metrics"]
    if found.get("frames"):
        scaled = _scaled(metrics, float(row["operations"]) / float(found["frames"]))
        return scaled if moves_frames(name) else _from_dram(scaled, name, float(row["operations"]))
    if _dram_byte_per_s(metrics) > DRAM_BOUND * most:
        return _scaled(metrics, float(row["launch_s"]) / _seconds(metrics))
    cycles = float(row["launch_s"]) * float(row.get("effective_clock_hz") or row["sm_clock_hz"])
    return _scaled(metrics, cycles / metrics["sm__cycles_elapsed.max"])


def _scaled(metrics: Metrics, scale: float) -> dict[str, float]:
    """Sums by ``scale``; means and shares as they are."""
    return {name: value * (scale if name.endswith(".sum") else 1.0) for name, value in metrics.items()}


def _from_dram(metrics: dict[str, float], name: str, frames: float) -> dict[str, float]:
    """DRAM traffic of a clip that is larger than L2."""
    read_byte = frames * LUMA_BYTE * (1.0 if name.startswith(LUMA_ONLY) else COLOUR)
    least = {"read": read_byte, "write": metrics.get("l1tex__m_l1tex2xbar_write_bytes.sum", 0.0)}
    for way, byte in least.items():
        if f"dram__bytes_{way}.sum" not in metrics:
            continue
        whole = max(metrics[f"dram__bytes_{way}.sum"], byte)
        metrics |= {f"dram__bytes_{way}.sum": whole, f"dram__sectors_{way}.sum": whole / SECTOR_BYTE}
    return metrics


def _dram_byte_per_s(metrics: Metrics) -> float:
    """Zero where the profiler was not asked for it."""
    byte = metrics.get("dram__bytes_read.sum", 0.0) + metrics.get("dram__bytes_write.sum", 0.0)
    return byte / _seconds(metrics) if byte else 0.0


def _seconds(metrics: Metrics) -> float:
    return 1e-9 * metrics["gpu__time_duration.sum"]
