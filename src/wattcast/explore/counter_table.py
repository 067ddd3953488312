"""Watts and hardware counters of microbenchmarks in one table, for counter models (docs/method/counters.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wattcast.explore.microbench import Result
from wattcast.records import Plain, read_lines

COUNTERS_FILE = "microbench_counters.jsonl"


def counter_table(results: Sequence[Result], counters: Path) -> list[dict[str, float | str]]:
    """One line a measured row: its watts and the counts of one launch, for ``wattcast fit counters``.

    Counts were taken on a shorter launch of the same kernel. They are brought to the measured one by
    cycles, or by frames for multimedia workloads. Idle rows, and the one that moves frames
    without a kernel, count nothing. Means and shares stay as they are.
    """
    counted = {str(row["id"]): row for row in read_lines(counters)}
    names = sorted({name for row in counted.values() for name in row["metrics"]})
    table: list[dict[str, float | str]] = []
    for r in results:
        if r.power_w is None:
            continue
        line = _line(r)
        found = counted.get(r.name.removesuffix("_at_rate").removesuffix("_moved"))
        if r.group == "idle" or r.name == "move_frames":
            table.append(line | dict.fromkeys(names, 0.0))
        elif found is not None and (scale := _scale(r, found)) is not None:
            metrics = found["metrics"]
            counts = {n: metrics[n] * (scale if n.endswith(".sum") else 1.0) for n in names if n in metrics}
            table.append(line | counts)
    return table


def _line(r: Result) -> dict[str, float | str]:
    memory_w = r.memory_power_w or 0.0
    return {
        "benchmark": r.name,
        "group": r.group,
        "repeat": float(r.repeat),
        "watts": r.power_w or 0.0,
        "memory_watts": memory_w,
        "other_watts": (r.power_w or 0.0) - memory_w,
        "seconds": r.time_s or 1.0,
        "clock_hz": r.clock_hz or 0.0,
        "effective_clock_hz": r.effective_clock_hz or r.clock_hz or 0.0,
    }


def _scale(r: Result, found: Plain) -> float | None:
    """Counts of the measured launch over those of the counted one."""
    if found.get("frames"):
        return r.operations / float(found["frames"]) if r.operations else None
    cycles = found["metrics"].get("sm__cycles_elapsed.max")
    return r.cycles / float(cycles) if cycles and r.cycles else None
