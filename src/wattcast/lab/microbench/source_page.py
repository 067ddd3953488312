"""Read the instructions of profiled kernels, ncu's ``--page source``, and find where warps wait.

``ncu --set full`` samples warps as they run. Each instruction has the samples of warps that were at
it, by reason, and how often it was executed. A warp waits *at* the instruction that needs a result,
not at the one that makes it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wattcast.core.errors import bad_value
from wattcast.core.strict_files import read_bytes
from wattcast.lab.counter_models.profiler_counters import import_report

KERNEL = "Kernel Name"
ADDRESS = "Address"
INSTRUCTION = "Source"
SAMPLES = "# Samples"
EXECUTED = "Instructions Executed"
STALL = "stall_"
NOT_WAITING = ("stall_selected", "stall_not_selected")
REASONS = {  # ncu's short names of what a warp waits for, in words
    "long_sb": "memory",
    "lg": "the queue to memory",
    "short_sb": "shared memory or special unit",
    "mio": "the queue to shared memory and special unit",
    "math": "a busy pipe",
    "wait": "a fixed delay",
    "barrier": "a barrier",
    "no_inst": "instructions",
    "dispatch": "dispatch",
    "branch_resolving": "a branch",
    "drain": "stores to end",
    "imc": "constants",
    "tex": "the texture queue",
    "membar": "a fence",
    "sleep": "its sleep",
}
MOST_BYTE = 1 << 30
MOST_LINES = 5  # of a kernel that are shown
LEAST_SHARE = 0.02  # of a kernel's samples that a line needs to be shown


@dataclass(frozen=True)
class SourceLine:
    """An instruction: its place in the kernel, how often it ran, and the samples of warps at it."""

    place: int
    instruction: str
    executed: float
    samples: float
    reason: str  # why most of the warps that waited there did; empty where none did


@dataclass(frozen=True)
class HotLine:
    """An instruction with its share of a kernel's samples."""

    kernel: str
    line: SourceLine
    share: float


def read_source_page(path: Path) -> dict[str, tuple[SourceLine, ...]]:
    """Read the instructions of every kernel from a CSV of ``--page source``, or from a report."""
    is_report = path.suffix == ".ncu-rep"
    data = import_report(path, ["--page", "source"]) if is_report else read_bytes(path, MOST_BYTE)
    kernels: dict[str, list[SourceLine]] = {}
    header: list[str] = []
    stalls: list[str] = []
    lines: list[SourceLine] = []
    name = ""
    for row in csv.reader(io.StringIO(data.decode("utf-8", "replace"))):
        if row[:1] == [KERNEL] and len(row) > 1:
            name = row[1].split("(")[0]
            lines = []
            header = []
        elif row[:2] == [ADDRESS, INSTRUCTION]:
            header = row
            stalls = _list_stalls(header)
        elif name and len(row) == len(header):
            cells = dict(zip(header, row, strict=True))
            lines.append(_read_line(cells, stalls, len(lines)))
            kernels[name] = lines
    if not kernels:
        raise bad_value(
            path.name,
            "the instructions of a kernel (ncu --import report.ncu-rep --csv --page source)",
            "none",
        )
    return {name: tuple(lines) for name, lines in kernels.items()}


def _list_stalls(header: Sequence[str]) -> list[str]:
    """Return the columns that count the samples of warps that waited, one for each reason."""
    stalls = [name for name in header if name.startswith(STALL) and "(" not in name]
    return [name for name in dict.fromkeys(stalls) if name not in NOT_WAITING]


def _read_line(
    cells: Mapping[str, str],
    stalls: Sequence[str],
    place: int,
) -> SourceLine:
    samples = {name: _read_count(cells[name]) for name in stalls}
    most = max(samples, key=lambda name: samples[name], default="")
    short = most.removeprefix(STALL) if samples.get(most, 0.0) > 0.0 else ""
    reason = REASONS.get(short, short)
    return SourceLine(
        place,
        cells[INSTRUCTION].strip(),
        _read_count(cells.get(EXECUTED, "0")),
        _read_count(cells.get(SAMPLES, "0")),
        reason,
    )


def _read_count(text: str) -> float:
    """Return a count, zero where ncu writes none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def find_hot_lines(
    kernels: Mapping[str, Sequence[SourceLine]],
    most: int = MOST_LINES,
) -> list[HotLine]:
    """Return the instructions of each kernel at which most samples were taken, those first."""
    hot = []
    for kernel, lines in kernels.items():
        total = sum(line.samples for line in lines)
        ranked = sorted(lines, key=lambda line: -line.samples)[:most]
        for line in ranked:
            share = line.samples / total if total > 0.0 else 0.0
            if share >= LEAST_SHARE:
                hot.append(HotLine(kernel, line, share))
    return hot
