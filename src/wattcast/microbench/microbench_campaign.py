"""Measure rows in order of importance within a budget, in a child process that is watched.

Rows are saved at once, and rows on file are skipped. The device is used by a child process (``microbench --child``).
An error after which CUDA cannot go on costs one row: the child ends, and the parent starts another, which continues
with the next row. A child that writes nothing for too long is ended, and its row is recorded as hung.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from wattcast.core.errors import MissingTool, Refused, WattcastError
from wattcast.core.measured_rows import Journal, Plain, read_lines
from wattcast.measure.cuda_device import DeviceFault
from wattcast.measure.sampler import make_child_environment
from wattcast.measure.steady_state import say
from wattcast.microbench.benchmark_kernels import DeviceBench, MicroRow

BROKEN = 75  # exit code of a child whose device context is lost
STALL_S = 40.0  # without a word from the child
MOST_STARTS = 12
RESERVE_S = 4.0  # a row is begun only with this much time left


@dataclass(frozen=True)
class MicroTask:
    """One row to measure: ``make`` measures, ``blank`` says what it would have been."""

    id: str
    make: Callable[[], MicroRow]
    blank: Callable[[], MicroRow]


@dataclass
class MicroCampaign:
    """Where rows go and when to stop."""

    out: Path
    kind: str  # name of the file: microbench or multimedia
    deadline_s: float
    since: str = ""  # rows that failed after this moment are not tried again
    bench: DeviceBench | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.journal = Journal(self.out / f"{self.kind}.jsonl")
        failed = read_lines(self.journal.path) if self.journal.path.exists() else iter(())
        self.failed = {str(r.get("id")) for r in failed if r.get("error") and str(r.get("date", "")) >= self.since}

    @property
    def left_s(self) -> float:
        """Time until the budget is spent."""
        return self.deadline_s - time.monotonic()

    def run(self, tasks: Sequence[MicroTask]) -> None:
        """Measure what is not on file while there is time. A broken device raises ``DeviceFault``."""
        for place, task in enumerate(tasks):
            if task.id in self.journal.ids or (self.since and task.id in self.failed):
                self.counts["skipped"] += 1
                continue
            if self.left_s < RESERVE_S:
                say(f"{self.kind}: budget spent after {place} of {len(tasks)} rows")
                self.counts["left for want of time"] += len(tasks) - place
                return
            self._one(task, place, len(tasks))

    def _one(self, task: MicroTask, place: int, count: int) -> None:
        write_heartbeat(self.out, task.id, self.kind)
        began_s = time.monotonic()
        try:
            row = task.make()
        except Exception as error:
            row = replace(task.blank(), error=f"{type(error).__name__}: {error}"[:400])
            self._write(row)
            self.counts["failed"] += 1
            say(f"{place + 1}/{count} {task.id}: {row.error[:160]}")
            self._mend(error)
            return
        self._write(row)
        self.counts["measured"] += 1
        took_s = time.monotonic() - began_s
        say(f"{place + 1}/{count} {describe_row(row)} ({took_s:.1f} s, {self.left_s:.0f} s left)")

    def _write(self, row: MicroRow) -> None:
        self.journal.append(row.plain())

    def _mend(self, error: Exception) -> None:
        """A lost device ends this process; a sampler that hangs is started again."""
        bench = self.bench
        if isinstance(error, DeviceFault):
            raise error
        if bench is None:
            return
        if isinstance(error, Refused) and bench.sampler.lost:
            raise DeviceFault(str(error))
        if not bench.sampler.healthy:
            bench.sampler.restart()


def describe_row(row: MicroRow) -> str:
    """Describe a row in one line."""
    parts = [row.id]
    if row.operations_per_cycle_sm is not None:
        parts.append(f"{row.operations_per_cycle_sm:.4g} {row.operation}/cycle/SM")
    if row.byte and row.launch_s:
        parts.append(f"{row.byte / row.launch_s / 1e9:.4g} GB/s")
    if row.power_w is not None:
        parts.append(f"{row.power_w:.1f} W")
    if row.effective_clock_hz is not None:
        parts.append(f"{row.effective_clock_hz / 1e6:.0f} MHz")
    return ", ".join(parts) + (f" [{', '.join(row.flags)}]" if row.flags else "")


def write_heartbeat(out: Path, task: str, kind: str) -> None:
    """Write which row is being measured, for the parent to see."""
    text = json.dumps({"id": task, "kind": kind, "at": time.time()})
    part = out / ".progress.part"
    part.write_text(text)
    part.replace(out / ".progress")


def format_now() -> str:
    """Return the time in UTC, as rows carry it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def supervise_child(
    out: Path, kind: str, command: list[str], budget_s: float, stall_s: float = STALL_S
) -> Counter[str]:
    """Run the child again and again until its work is done or time is up; return counts of rows on file."""
    began_s, since, starts = time.monotonic(), format_now(), 0
    out.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    while starts < MOST_STARTS:
        left_s = budget_s - (time.monotonic() - began_s)
        if left_s < 2 * RESERVE_S:
            counts["out of time"] += 1
            break
        starts += 1
        (out / ".progress").unlink(missing_ok=True)
        code = _child([*command, "--budget", f"{left_s:.1f}s", "--since", since], out, stall_s, left_s)
        if code is None:
            _hung(out, kind, counts)
            continue
        if code == BROKEN:
            counts["restarted after a lost device"] += 1
            continue
        if code != 0:
            raise MissingTool(f"measuring ended with exit code {code}; what it said is above.")
        break
    (out / ".progress").unlink(missing_ok=True)
    return counts + count_rows(out / f"{kind}.jsonl")


def _child(command: list[str], out: Path, stall_s: float, left_s: float) -> int | None:
    """Exit code of the child, None when it hung and was ended."""
    process = subprocess.Popen(command, env=make_child_environment())
    heard_s, last, end_s = time.monotonic(), "", time.monotonic() + left_s + stall_s
    try:
        while (code := process.poll()) is None:
            text = _read(out / ".progress")
            if text != last:
                heard_s, last = time.monotonic(), text
            if time.monotonic() - heard_s > stall_s or time.monotonic() > end_s:
                process.kill()
                process.wait(10.0)
                return None
            time.sleep(0.05)
    except BaseException:
        process.kill()
        raise
    return code


def _hung(out: Path, kind: str, counts: Counter[str]) -> None:
    """Write the row that a child was at as failed."""
    counts["hung"] += 1
    try:
        told = json.loads(_read(out / ".progress") or "{}")
    except ValueError:
        told = {}
    name = str(told.get("id", ""))
    if name:
        row = MicroRow(
            name, name, "", date=format_now(), error="the device did not answer in time; the process was ended."
        )
        Journal(out / f"{kind}.jsonl").append(row.plain())
        say(f"{name}: hung")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def count_rows(path: Path) -> Counter[str]:
    """Count the rows on file: measured, failed, flagged."""
    counts: Counter[str] = Counter()
    latest: dict[str, Plain] = {}
    for row in read_lines(path) if path.exists() else ():
        if row.get("id") not in latest or not row.get("error"):
            latest[str(row.get("id"))] = row
    for row in latest.values():
        counts["failed" if row.get("error") else "measured"] += 1
        counts["flagged"] += bool(row.get("flags"))
    return counts


def list_failures(path: Path) -> dict[str, str]:
    """List rows that failed and were not measured later, with their errors."""
    latest: dict[str, str] = {}
    for row in read_lines(path) if path.exists() else ():
        latest[str(row.get("id"))] = str(row.get("error", ""))
    return {name: error for name, error in latest.items() if error}


def adopt_rows(source: Path, out: Path) -> int:
    """Copy rows measured before into ``out``; return how many files were taken."""
    if not source.is_dir():
        raise WattcastError(f"{source} is no folder; --from names one with rows measured before.")
    out.mkdir(parents=True, exist_ok=True)
    taken = 0
    for path in sorted(source.glob("*.jsonl")):
        if not (out / path.name).exists():
            (out / path.name).write_bytes(path.read_bytes())
            taken += 1
    return taken
