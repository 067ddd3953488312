"""Where kernels end in a trace, and what they are called.

A simulator writes one more row when a kernel ends: its last sample again, or zeros throughout when it had none.
An equal neighbour is such a row only if work was done in it: idle samples are all alike. Of several equal rows
the last one ends the kernel. A list of kernels with their samples or cycles decides without looking at rows.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import bad_value, clip
from wattcast.files import read_bytes

_MAX_BYTE = 64 << 20
_COLUMNS = ("name", "uid", "samples", "cycles", "ipc")
NO_WORK = ("PIPE_A", "IDLE_CORE_N", "CONST_DYNAMICN", "constant_power")  # columns that may stand without work
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class KernelName:
    """One launch, as a list of kernels has it."""

    name: str
    uid: int
    samples: int | None = None
    ipc: float | None = None


def read_kernels(path: Path, sample_cycle: int) -> tuple[KernelName, ...]:
    """Names of the launches, in order: one a line, or CSV with a header, or a simulator's own output.

    CSV columns: ``name`` and, if known, ``uid``, ``samples`` or ``cycles``, ``ipc``. A simulator's output or
    power report is searched for its ``kernel_name =`` and ``kernel_launch_uid =`` lines, and for
    ``gpu_sim_cycle`` and ``gpu_ipc``.
    """
    text = read_bytes(path, _MAX_BYTE).decode("utf-8", "replace")
    if re.search(r"^\s*kernel_name\s*=", text, re.MULTILINE):
        return _from_log(text, sample_cycle)
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].split(",")[0].strip() == "name":
        return _from_csv(text, path.name, sample_cycle)
    return tuple(KernelName(clip(line.strip(), 4096), i) for i, line in enumerate(lines, start=1))


def _from_log(text: str, sample_cycle: int) -> tuple[KernelName, ...]:
    pattern = r"^\s*(kernel_name|kernel_launch_uid|gpu_sim_cycle|gpu_ipc)\s*=\s*(\S+)"
    launches: list[dict[str, str]] = []
    for key, value in re.findall(pattern, text, re.MULTILINE):
        if key == "kernel_name":
            launches.append({})
        if launches:
            launches[-1].setdefault(key, value)
    samples = _samples([_maybe(k.get("gpu_sim_cycle")) for k in launches], sample_cycle)
    return tuple(
        KernelName(k["kernel_name"], int(k.get("kernel_launch_uid", i)), count, _maybe(k.get("gpu_ipc")))
        for i, (k, count) in enumerate(zip(launches, samples, strict=True), start=1)
    )


def _from_csv(text: str, where: str, sample_cycle: int) -> tuple[KernelName, ...]:
    reader = csv.DictReader(io.StringIO(text))
    strange = [name for name in reader.fieldnames or () if name not in _COLUMNS]
    if strange:
        raise bad_value(f"{where}: header", f"columns of {', '.join(_COLUMNS)}", ", ".join(strange))
    rows = list(reader)
    for line, row in enumerate(rows, start=2):
        for key in ("uid", "samples", "cycles"):
            if row.get(key) and not str(row[key]).strip().isdigit():
                raise bad_value(f"{where}: line {line}: {key}", "a whole number", row[key])
    cycles = [float(row["cycles"]) if row.get("cycles") else None for row in rows]
    counted = _samples(cycles, sample_cycle)
    return tuple(
        KernelName(
            row["name"],
            int(row["uid"]) if row.get("uid") else i,
            int(row["samples"]) if row.get("samples") else count,
            _maybe(row.get("ipc")),
        )
        for i, (row, count) in enumerate(zip(rows, counted, strict=True), start=1)
    )


def _samples(cycles: Sequence[float | None], sample_cycle: int) -> list[int | None]:
    """Samples that fall into each kernel: one at every multiple of the sample length since the program began."""
    found: list[int | None] = []
    total = 0.0
    for count in cycles:
        if count is None:
            return [None] * len(cycles)
        found.append(int((total + count) // sample_cycle - total // sample_cycle))
        total += count
    return found


def _maybe(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is None or np.isfinite(value) else None


@dataclass
class KernelEnds:
    """Marks the rows that end a kernel, block after block."""

    columns: tuple[str, ...]
    kernels: tuple[KernelName, ...] = ()
    _planned: list[int] = field(default_factory=list)  # rows that end kernels, where the list of kernels says so
    _row: int = 0
    _last: Array | None = None

    def __post_init__(self) -> None:
        counts = [k.samples for k in self.kernels]
        if counts and all(count is not None for count in counts):
            rows = np.cumsum([count + 1 for count in counts if count is not None]) - 1
            self._planned = [int(row) for row in rows]

    @property
    def by_list(self) -> bool:
        """Whether the list of kernels, and not the rows, says where kernels end."""
        return bool(self._planned)

    def mark(self, value: Array, following: Array | None) -> Mask:
        """Rows of a block that end a kernel. ``following`` is the first row after the block, if there is one."""
        count = len(value)
        ends = np.zeros(count, dtype=np.bool_)
        if self._planned:
            here = [row - self._row for row in self._planned if self._row <= row < self._row + count]
            ends[here] = True
        else:
            ends = self._found(value, following)
        self._row += count
        self._last = value[-1].copy() if count else self._last
        return ends

    def _found(self, value: Array, following: Array | None) -> Mask:
        count = len(value)
        same = np.zeros(count + 1, dtype=np.bool_)  # same[i]: row i equals row i − 1
        if self._last is not None and count:
            same[0] = bool((value[0] == self._last).all())
        rows = np.arange(1, count)
        for column in range(value.shape[1]):
            rows = rows[value[rows, column] == value[rows - 1, column]]
            if not rows.size:
                break
        same[rows] = True
        if following is not None and count:
            same[count] = bool((value[-1] == following).all())
        working = np.array([name not in NO_WORK for name in self.columns])
        ends = same[:-1] & ~same[1:]
        candidates = np.flatnonzero(ends)
        ends[candidates] = (value[candidates][:, working] > 0).any(axis=1)
        empty = np.flatnonzero(value[:, 0] == 0)
        empty = empty[(value[empty] == 0).all(axis=1)]
        ends[empty] = True  # a kernel without a sample
        return ends
