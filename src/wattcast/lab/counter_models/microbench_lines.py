"""Read measured microbenchmarks as rows of a counter table: watts, clocks, counts and events.

Counts of microbenchmarks and multimedia workloads were taken by a profiler on a shorter launch of
the same kernel (docs/method/microbenchmarks.md) and are scaled to the launch whose power was
measured. Kernels bound by the multiprocessors take the same cycles at every clock; kernels bound by
DRAM take the same time. A clip of 80 frames does not stay in L2 as the 8 counted frames do, so each
byte of a result goes to DRAM once and each byte of a frame comes from there once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.core.errors import bad_value
from wattcast.core.measured_rows import Plain
from wattcast.core.row_journals import read_lines
from wattcast.core.row_tables import COUNTERS_FILE, read_table
from wattcast.lab.counter_models.profiler_counters import DURATION_METRIC, compute_ncu_events
from wattcast.power.activity import known_events
from wattcast.predictor.bundle.bundle_file import shipped_bundle

MICROBENCH_COUNTERS_FILE = "microbench_counters.jsonl"
RESULT_FILES = ("microbench.jsonl", "multimedia.jsonl")
# folder beside these with the rows of another card, which the fit that ships does not use
OTHER_CARD = "card-b"
# share of the largest DRAM rate of all counted kernels from which on DRAM sets the time
DRAM_BOUND_SHARE = 0.5
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
    if (folder / MICROBENCH_COUNTERS_FILE).is_file():
        plane = [path for path in folder.iterdir() if PLANE_FOLDER.fullmatch(path.name)]
        if plane:
            return _make_plane_lines(sorted(plane, key=_rank_highest_clocks), gpu)
    counts = _read_profiled_counts(folder)
    lines: list[CounterLine] = []
    for file_name in RESULT_FILES:
        for row in _read_latest_rows(folder / file_name, counts.kernels):
            metrics = _scale_counts(row, counts)
            if metrics is not None:
                line = _describe_run(row, gpu)
                line.update(metrics)
                line.update(events_of_launch(metrics))
                lines.append(line)
    return lines


@dataclass(frozen=True)
class _ProfiledCounts:
    """What a profiler counted of the kernels of a folder of microbenchmarks."""

    kernels: Mapping[str, Plain]  # by id
    metrics: tuple[str, ...]  # of any of them
    largest_dram_byte_per_s: float


def _read_profiled_counts(folder: Path) -> _ProfiledCounts:
    """Read the counts of a folder, or for one pair of clocks those beside all pairs."""
    counters = folder / MICROBENCH_COUNTERS_FILE
    if not counters.is_file() and PLANE_FOLDER.fullmatch(folder.name):
        counters = folder.parent / MICROBENCH_COUNTERS_FILE
    if not counters.is_file():
        expectation = f"a folder with {MICROBENCH_COUNTERS_FILE} (lab microbench --counters)"
        raise bad_value(str(folder), expectation, "none")
    kernels = {str(row["id"]): row for row in read_lines(counters)}
    metrics: set[str] = set()
    largest = 0.0
    for row in kernels.values():
        metrics.update(row["metrics"])
        largest = max(largest, _dram_byte_per_s(row["metrics"]))
    return _ProfiledCounts(kernels, tuple(sorted(metrics)), largest)


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
    counted_operations: dict[str, float] = {}  # of the launches that were counted
    lines = []
    for folder in folders:
        rows = _read_plane_rows(folder)
        if not counted_operations:
            counted_operations = {name: _count_operations(row) for name, row in rows.items()}
        memory_clock_mhz = float(folder.name.split("-")[1])
        for name, row in rows.items():
            if name not in highest or not row.get("power_w") or not row.get("sm_clock_hz"):
                continue
            scale = 1.0
            if counted_operations.get(name):
                scale = _count_operations(row) / counted_operations[name]
            line: CounterLine = {
                "benchmark": name,
                "group": highest[name]["group"],
                "seconds": float(row.get("launch_s") or 1.0),
                "clock_hz": float(row["sm_clock_hz"]),
                "watts": float(row["power_w"]),
                "memory_clock_hz": 1e6 * memory_clock_mhz,
            }
            lines.append(line | _scale_events(highest[name], scale))
    return lines


def _read_plane_rows(folder: Path) -> dict[str, Plain]:
    """Read the last usable row of each benchmark at one pair of clocks."""
    rows = {}
    for row in read_lines(folder / RESULT_FILES[0]):
        if not (row.get("error") or row.get("repeat")):
            rows[str(row["name"])] = row
    return rows


def _count_operations(row: Plain) -> float:
    """Return the operations of a launch, zero where a row does not say."""
    return float(row.get("operations") or 0.0)


def _scale_events(line: CounterLine, scale: float) -> CounterLine:
    """Return the events of a line, counts multiplied by ``scale`` and means as they are."""
    events: CounterLine = {}
    for name, value in line.items():
        event = known_events().get(name)
        if event is not None:
            events[name] = float(value) * (1.0 if event.is_mean else scale)
    return events


def read_operator_metrics(folder: Path, sm_count: float) -> dict[str, list[dict[str, float]]]:
    """Return the metrics of the kernels of each counted operator of a database, under the
    profiler's names.

    The campaign did not collect active threads, bank conflicts, and integer and fp64 products:
    warps are taken as full, the others as none."""
    metrics_of_operator: dict[str, list[dict[str, float]]] = {}
    for kernel in read_table(folder / COUNTERS_FILE):
        metrics = {}
        for name, value in kernel.items():
            if "__" in name:
                # a column's last underscore stands for the point before the metric's roll-up
                metrics[".".join(name.rsplit("_", 1))] = float(value)
        tensor_cycles = sm_count * metrics["sm__pipe_tensor_cycles_active.avg"]
        metrics |= {
            "sm__pipe_tensor_cycles_active.sum": tensor_cycles,
            "smsp__thread_inst_executed_per_inst_executed.ratio": FULL_WARP,
            "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 0.0,
            "sm__inst_executed_pipe_tensor_op_imma.sum": 0.0,
            "sm__inst_executed_pipe_tensor_op_dmma.sum": 0.0,
        }
        for way in ("read", "write"):
            metrics[f"dram__sectors_{way}.sum"] = metrics[f"dram__bytes_{way}.sum"] / SECTOR_BYTE
        metrics_of_operator.setdefault(kernel["spec"], []).append(metrics)
    return metrics_of_operator


def events_of_launch(metrics: NcuMetrics) -> dict[str, float]:
    """Return the events of one launch, by ``map_ncu.csv``."""
    columns = {name: np.array([value]) for name, value in metrics.items()}
    return {event: float(value[0]) for event, value in compute_ncu_events(columns).items()}


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


def _scale_counts(row: Plain, counts: _ProfiledCounts) -> dict[str, float] | None:
    """Return the counts of the measured launch; zeros for an idle device; None where nothing was
    counted.

    Sums are scaled by frames, by time where DRAM sets it, else by cycles; means and shares stay.
    """
    name = str(row["name"])
    if row["group"] == "idle" or name == MOVE_FRAMES:
        return dict.fromkeys(counts.metrics, 0.0)
    kernel = counts.kernels.get(_counted_kernel(name))
    if kernel is None or not row.get("launch_s"):
        return None
    metrics: NcuMetrics = kernel["metrics"]
    dram_bound_byte_per_s = DRAM_BOUND_SHARE * counts.largest_dram_byte_per_s
    if kernel.get("frames"):
        scale = float(row["operations"]) / float(kernel["frames"])
    elif _dram_byte_per_s(metrics) > dram_bound_byte_per_s:
        scale = float(row["launch_s"]) / (1e-9 * metrics[DURATION_METRIC])
    else:
        clock_hz = float(row.get("effective_clock_hz") or row["sm_clock_hz"])
        scale = float(row["launch_s"]) * clock_hz / metrics["sm__cycles_elapsed.max"]
    scaled = {}
    for metric, value in metrics.items():
        scaled[metric] = value * scale if metric.endswith(".sum") else value
    if kernel.get("frames") and not moves_frames(name):
        scaled |= _move_whole_clip(name, float(row["operations"]), scaled)
    return scaled


def _move_whole_clip(
    name: str,
    frames: float,
    scaled: NcuMetrics,
) -> dict[str, float]:
    """Return the DRAM traffic of a clip that is larger than L2: at least each byte of its frames
    once, and each byte of its result once.
    """
    frame_byte = LUMA_BYTE if name.startswith(LUMA_ONLY_WORKLOADS) else LUMA_BYTE * COLOUR_FACTOR
    least_byte = {
        "read": frames * frame_byte,
        "write": scaled.get("l1tex__m_l1tex2xbar_write_bytes.sum", 0.0),
    }
    traffic = {}
    for way, byte in least_byte.items():
        metric = f"dram__bytes_{way}.sum"
        if metric in scaled:
            traffic[metric] = max(scaled[metric], byte)
            traffic[f"dram__sectors_{way}.sum"] = traffic[metric] / SECTOR_BYTE
    return traffic


def _dram_byte_per_s(metrics: NcuMetrics) -> float:
    """Return the DRAM rate, zero where the profiler did not collect it."""
    byte = metrics.get("dram__bytes_read.sum", 0.0) + metrics.get("dram__bytes_write.sum", 0.0)
    return byte / (1e-9 * metrics[DURATION_METRIC]) if byte else 0.0
