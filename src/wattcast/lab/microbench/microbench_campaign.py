"""Measure rows in order of importance within a budget, in a child process that is watched.

Rows are saved at once, and rows on file are skipped. The device is used by a child process
(``microbench --child``). An error after which CUDA cannot go on costs one row: the child ends, and
the parent starts another, which continues with the next row. A child that writes nothing for too
long is ended, and its row is recorded as hung.

Worker processes compile benchmarks into a folder while the device measures. The campaign takes
machine code from there as it arrives, and compiles what no worker has brought in time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import (
    Callable,
    Iterable,
    Sequence,
)
from concurrent.futures import (
    Future,
    ProcessPoolExecutor,
    wait,
)
from dataclasses import (
    asdict,
    dataclass,
    field,
    replace,
)
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path

from wattcast.core.errors import (
    MissingTool,
    Refused,
    WattcastError,
)
from wattcast.core.measured_rows import Plain
from wattcast.core.row_journals import Journal, read_lines
from wattcast.core.whole_files import (
    hold_folder,
    private_cache,
    write_whole,
)
from wattcast.lab.microbench.benchmark_kernels import DeviceBench
from wattcast.lab.microbench.benchmark_suite import list_benchmarks
from wattcast.lab.microbench.microbench_results import MicroRow
from wattcast.lab.microbench.unit_source import Benchmark
from wattcast.measure.cuda_device import (
    DeviceFault,
    compile_cubin,
    import_bindings,
)
from wattcast.measure.sampler import make_child_environment
from wattcast.measure.steady_state import format_now, say

BROKEN = 75  # exit code of a child whose device context is lost
STALL_S = 40.0  # without a word from the child
MOST_STARTS = 12
RESERVE_S = 4.0  # a row is begun only with this much time left
PATIENCE_S = 25.0
WORKERS = 6


@dataclass(frozen=True)
class MicroTask:
    """One row to measure: ``measure`` fills ``blank``, which names it."""

    blank: MicroRow
    measure: Callable[[MicroRow], MicroRow]


@dataclass
class MicroCampaign:
    """The file that rows go to, and the time when measuring must stop."""

    out: Path
    kind: str  # name of the file: microbench or multimedia
    deadline_s: float
    since: str = ""  # rows that failed after this moment are not tried again
    repeats: int = 1  # rounds
    quick: bool = False  # shorter windows
    bench: DeviceBench | None = None

    def __post_init__(self) -> None:
        self.journal = Journal(self.out / f"{self.kind}.jsonl")
        failed = [row for row in read_lines(self.journal.path, missing_ok=True) if row.get("error")]
        self.failed = {
            str(row.get("id")) for row in failed if str(row.get("date", "")) >= self.since
        }

    def run(self, tasks: Sequence[MicroTask]) -> None:
        """Measure what is not on file while there is time. A broken device raises
        ``DeviceFault``.
        """
        for place, task in enumerate(tasks):
            name = task.blank.id
            if name in self.journal.ids or (self.since and name in self.failed):
                continue
            began_s = time.monotonic()
            if self.deadline_s - began_s < RESERVE_S:
                say(f"{self.kind}: budget spent after {place} of {len(tasks)} rows")
                return
            write_heartbeat(self.out, name, self.kind)
            row = replace(task.blank, date=format_now())
            failed = None
            try:
                row = task.measure(row)
            except Exception as error:
                row = replace(row, error=f"{type(error).__name__}: {error}"[:400])
                failed = error
            self.journal.append(asdict(row))
            now_s = time.monotonic()
            spent = f"({now_s - began_s:.1f} s, {self.deadline_s - now_s:.0f} s left)"
            outcome = f"{name}: {row.error[:160]}" if failed else f"{describe_row(row)} {spent}"
            say(f"{place + 1}/{len(tasks)} {outcome}")
            if isinstance(failed, DeviceFault):
                raise failed
            if failed and self.bench is not None and not self.bench.sampler.healthy:
                if isinstance(failed, Refused) and self.bench.sampler.lost:
                    raise DeviceFault(str(failed)) from failed
                self.bench.sampler.restart()


def describe_row(row: MicroRow) -> str:
    """Describe a row in one line."""
    figures = [
        (row.operations_per_cycle_sm, 1.0, ".4g", f"{row.operation}/cycle/SM"),
        (row.latency_cycles, 1.0, ".1f", "cycles"),
        (row.byte_per_s, 1e-9, ".4g", "GB/s"),
        (row.power_w, 1.0, ".1f", "W"),
        (row.effective_clock_hz, 1e-6, ".0f", "MHz"),
    ]
    shown = [
        f"{value * scale:{form}} {unit}"
        for value, scale, form, unit in figures
        if value is not None
    ]
    return ", ".join([row.id, *shown]) + (f" [{', '.join(row.flags)}]" if row.flags else "")


def write_heartbeat(
    out: Path,
    task: str,
    kind: str,
) -> None:
    """Write which row is being measured, for the parent to see."""
    write_whole(
        out / ".progress",
        json.dumps(
            {
                "id": task,
                "kind": kind,
                "at": time.time(),
            }
        ).encode(),
    )


def supervise_child(
    out: Path,
    kind: str,
    command: list[str],
    budget_s: float,
    stall_s: float = STALL_S,
) -> Counter[str]:
    """Run the child again and again until its work is done or time is up; return counts of rows on
    file.
    """
    began_s = time.monotonic()
    since = format_now()
    progress = out / ".progress"
    rows = out / f"{kind}.jsonl"
    counts: Counter[str] = Counter()
    with hold_folder(out):
        for _ in range(MOST_STARTS):
            left_s = budget_s - (time.monotonic() - began_s)
            if left_s < 2 * RESERVE_S:
                counts["out of time"] += 1
                break
            progress.unlink(missing_ok=True)
            code = _await_child(
                [*command, "--budget", f"{left_s:.1f}s", "--since", since],
                progress,
                stall_s,
                left_s,
            )
            if code is None:
                counts["hung"] += 1
                name = str(json.loads(_read_text(progress) or "{}").get("id", ""))
                if name:
                    why = "the device did not answer in time; the process was ended."
                    Journal(rows).append(asdict(MicroRow(name, name, date=format_now(), error=why)))
                    say(f"{name}: hung")
            elif code == BROKEN:
                counts["restarted after a lost device"] += 1
            elif code != 0:
                raise MissingTool(f"measuring ended with exit code {code}; what it said is above.")
            else:
                break
        progress.unlink(missing_ok=True)
        latest: dict[str, Plain] = {}
        for row in read_lines(rows, missing_ok=True):
            if row.get("id") not in latest or not row.get("error"):
                latest[str(row.get("id"))] = row
        counts.update("failed" if row.get("error") else "measured" for row in latest.values())
        counts["flagged"] = sum(bool(row.get("flags")) for row in latest.values())
        return +counts  # without zeros


def _await_child(
    command: list[str],
    progress: Path,
    stall_s: float,
    left_s: float,
) -> int | None:
    """Return the exit code of the child, or None when it hung and was ended."""
    process = subprocess.Popen(command, env=make_child_environment())
    heard_s = time.monotonic()
    last = ""
    end_s = time.monotonic() + left_s + stall_s
    try:
        while (code := process.poll()) is None:
            text = _read_text(progress)
            if text != last:
                heard_s = time.monotonic()
                last = text
            if time.monotonic() - heard_s > stall_s or time.monotonic() > end_s:
                process.kill()
                process.wait(10.0)
                return None
            time.sleep(0.05)
    except BaseException:
        process.kill()
        raise
    return code


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def worker_count() -> int:
    """Return how many compiling processes leave the measuring ones alone."""
    return min(WORKERS, max((os.cpu_count() or 2) - 2, 1))


def cubin_name(benchmark: Benchmark, architecture: str) -> str:
    """Name a benchmark's machine code by its source and the compiler's version."""
    digest = hashlib.sha256(f"{benchmark.source} {nvrtc_version()}".encode()).hexdigest()[:16]
    return f"{benchmark.name}-{architecture}-{digest}.cubin"


@cache
def nvrtc_version() -> str:
    """Return the version of the run-time compiler."""
    try:
        status, major, minor = import_bindings("nvrtc").nvrtcVersion()
    except Exception:
        return ""
    return f"{major}.{minor}" if int(status) == 0 else ""


def end_with_parent() -> None:
    """Let this worker end when its parent is gone; one that was killed could not tell it."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compile_benchmark(
    name: str,
    architecture: str,
    folder: Path,
) -> None:
    """Compile one benchmark into the folder unless it is there; the campaign reports what does not
    compile.
    """
    (benchmark,) = (b for b in list_benchmarks() if b.name == name)
    path = folder / cubin_name(benchmark, architecture)
    if not path.exists():
        with contextlib.suppress(WattcastError):
            write_whole(path, compile_cubin(benchmark.source, architecture, f"{name}.cu"))


@dataclass
class CompiledKernels:
    """Machine code of benchmarks, from workers or from here; it is kept between commands, named by
    its source.
    """

    architecture: str
    folder: Path = field(default_factory=lambda: private_cache("cubins"))
    _pool: ProcessPoolExecutor | None = None
    _begun: dict[str, Future[None]] = field(default_factory=dict)  # by name of the benchmark

    def start(
        self,
        benchmarks: Iterable[Benchmark],
        workers: int,
    ) -> None:
        """Set workers to work on the benchmarks that the device can run, in their order."""
        self._pool = ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent)
        for b in benchmarks:
            if b.supported(self.architecture):
                self._begun[b.name] = self._pool.submit(
                    compile_benchmark, b.name, self.architecture, self.folder
                )

    def cubin(self, benchmark: Benchmark) -> bytes:
        """Machine code; waits a while for a worker that is at it, and compiles here what none has
        begun.
        """
        begun = self._begun.get(benchmark.name)
        if begun is not None and not begun.cancel():
            wait([begun], PATIENCE_S)
        path = self.folder / cubin_name(benchmark, self.architecture)
        return (
            path.read_bytes()
            if path.exists()
            else compile_cubin(benchmark.source, self.architecture)
        )

    def stop(self, longest_s: float = 0.0) -> None:
        """End the workers; those still at work are given ``longest_s`` to come to the end of
        theirs.
        """
        wait(self._begun.values(), longest_s)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
