"""Collect what programs took at every pair of clocks of a plane, with the card's counters, as a
table that ``wattcast lab sensitivity`` fits a sensitivity model to.

A row is one program at one pair of clocks: seconds per unit of work (of the whole run where the
program reports none), watts by the energy counter, and the mean of each counter (GPM). Programs
that run one after another into the same file become the kernels of one table.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from wattcast.control.daemon_client import DaemonCard
from wattcast.control.program_files import ProgressFile
from wattcast.core import MissingTool, bad_value
from wattcast.core.strict_files import (
    encode_csv,
    parse_csv,
    read_bytes,
)
from wattcast.core.whole_files import check_writable, write_whole

READ_S = 0.5  # between two readings of a card
LEAD_SHARE = 0.2  # of a run's readings at its start that are not used: programs start slowly
FIRST_COLUMNS = ("kernel", "core_clock", "memory_clock", "time_s", "power_w")


@dataclass(frozen=True)
class _PlaneReading:
    at_s: float
    energy_j: float
    work_s: float  # when the work was counted
    work: float
    counters: dict[str, float]


@dataclass
class PlaneTable:
    """Collect rows of one program."""

    path: Path
    kernel: str
    progress: Path | None = None
    rows: list[dict[str, str]] = field(default_factory=list)
    _readings: list[_PlaneReading] = field(default_factory=list)
    _file: ProgressFile | None = None
    _next_s: float = 0.0

    def __post_init__(self) -> None:
        check_writable(self.path)
        if not self.kernel or any(sign in self.kernel for sign in ',\n"'):
            raise bad_value("--name", "a name without commas and quotes", self.kernel)
        if self.path.exists():
            self.rows += parse_csv(read_bytes(self.path), self.path.name)
            columns = list(self.rows[0]) if self.rows else []
            if not set(FIRST_COLUMNS) <= set(columns):
                raise bad_value(
                    str(self.path), "a table that manage plane wrote", ", ".join(columns)
                )
            if any(row["kernel"] == self.kernel for row in self.rows):
                raise bad_value("--name", f"a program that is not in {self.path} yet", self.kernel)

    def begin(self) -> None:
        """Forget the readings of the pair before."""
        self._readings = []
        self._next_s = 0.0
        self._file = None if self.progress is None else ProgressFile(self.progress)

    def look(self, card: DaemonCard) -> None:
        """Read the card when it is time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + READ_S
        reading = card.read()
        if reading.counters is None:
            why = f"{card.name} tells no counters (GPM: Hopper and later)"
            raise MissingTool(f"{why}; --table needs them.")
        work = 0.0 if self._file is None else self._file.count()
        self._readings.append(
            _PlaneReading(
                reading.at_s,
                reading.energy_j,
                time.monotonic(),
                work,
                dict(reading.counters),
            )
        )

    def finish(
        self,
        core_hz: float,
        memory_hz: float,
        seconds: float,
    ) -> str:
        """Add the row of a pair of clocks; return why there is none, or nothing."""
        lead = math.ceil(LEAD_SHARE * len(self._readings))
        used = self._readings[lead:]
        if len(used) < 2:
            return "it ended too soon to be read twice"
        first, last = used[0], used[-1]
        span_s = last.at_s - first.at_s
        time_s = seconds
        if self._file is not None:
            if last.work <= first.work:
                return "it reported no work"
            time_s = (last.work_s - first.work_s) / (last.work - first.work)
        power_w = (last.energy_j - first.energy_j) / span_s
        row = {
            "kernel": self.kernel,
            "core_clock": f"{core_hz:.9g}",
            "memory_clock": f"{memory_hz:.9g}",
            "time_s": f"{time_s:.9g}",
            "power_w": f"{power_w:.6g}",
        }
        # The counters of a reading are those since the one before it.
        for name in first.counters:
            mean = math.fsum(each.counters[name] for each in used[1:]) / (len(used) - 1)
            row[name] = f"{mean:.6g}"
        self.rows.append(row)
        self._save()
        return ""

    def _save(self) -> None:
        names = list(self.rows[0])
        lines = [names, *([row.get(name, "") for name in names] for row in self.rows)]
        write_whole(self.path, encode_csv(lines))
