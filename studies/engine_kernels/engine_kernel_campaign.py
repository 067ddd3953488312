"""Measure vLLM's own kernels on one GPU, standalone: bursts, sustained rows and kernel names.

Run on a node with vLLM: ``python studies/engine_kernels/engine_kernel_campaign.py --out DIR
--seconds 560`` (``--smoke`` tries one operator of every variant).

Each group of families has a worker process; one measures at a time, for a slice of the budget, so
that every family is served early and a crash costs one row and a restart. Kernels that are compiled
at run time are compiled first, in parallel. Rows are saved as they come: burst.jsonl,
sustained.jsonl, names.jsonl, runs.jsonl; failures.jsonl names rows that killed their worker,
log.txt holds what the workers printed. A second call with the same folder, or with ``--done``
folders, measures only what is missing. No clock, limit or mode is changed."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_kernel_worker import (
    APART,
    GROUPS,
    EngineTask,
    list_group_tasks,
    list_smoke_tasks,
    name_variant,
)
from wattcast.core.measured_rows import RowKind
from wattcast.core.row_journals import Journal, read_lines
from wattcast.measure.sampler import make_child_environment
from wattcast.measure.steady_state import say

WORKER = Path(__file__).with_name("engine_kernel_worker.py")
WEIGHTS = {
    "attention": 0.31,
    "experts": 0.27,
    "products": 0.21,
    "small": 0.13,
    "block": 0.08,
    **dict.fromkeys(APART, 1.0),
}  # shares of the budget
WARMERS = {"experts": 5, "block": 5, "small": 1}
BURST_SHARES = (0.42, 0.27, 0.27)  # of the slices of each round
SMOKE_SHARES = (0.6,)
READY_S = 150.0  # a worker that is not ready by then is given up
HANG_S = 20.0  # beyond its slice, after which a worker is killed
MOST_RESTARTS = 2
NAMES_S = {
    "experts": 12.0,
    "others": 18.0,
}  # for experts alone, whose parts are timed, then for all others at once
SMOKE_SLICE_S = 30.0


@dataclass
class WorkerProcess:
    """The campaign's side of one worker."""

    group: str
    command: list[str]
    log: Path
    restarts: int = 0
    given_up: str = ""
    last: str = ""  # the row it began last
    said: str = ""  # the exception that ended it
    ended: bool = False
    ready: bool = False
    process: subprocess.Popen[str] | None = None
    answers: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)

    def start(self) -> None:
        """Start the process and a thread that reads its answers; ``None`` in the queue means that
        it ended.
        """
        environment = _environment()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.answers, self.ready, self.last = queue.Queue(), False, ""
        self.said, self.ended = "", False
        threading.Thread(target=_read, args=(self.process, self.answers), daemon=True).start()

    def order(self, **order: Any) -> None:
        """Send one order; a dead worker is noticed by the next wait."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def wait(self, key: str, seconds: float) -> dict[str, Any] | None:
        """The next answer that holds ``key``; ``None`` when the worker died or did not answer in
        time.
        """
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                answer = self.answers.get(timeout=left_s)
            except queue.Empty:
                return None
            if answer is None:
                self.ended = True
                return None
            self.last = str(answer.get("begin", self.last))
            self.said = str(answer.get("died", self.said))
            if key in answer:
                return answer
        return None

    def kill(self) -> int | None:
        """End the process; its exit status."""
        if self.process is None:
            return None
        if self.ended:  # give it the time to leave its own exit status
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3.0)
        with contextlib.suppress(OSError):
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        return self.process.returncode


@dataclass
class EngineKernelCampaign:
    """One call: its workers, its folder and the time it may take."""

    out: Path
    deadline_s: float
    workers: dict[str, WorkerProcess]
    skip: Path
    tasks: dict[str, EngineTask]  # by id, of all groups
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def left_s(self) -> float:
        """Time until the budget is spent."""
        return self.deadline_s - time.monotonic()

    def await_ready(self, worker: WorkerProcess, longest_s: float) -> bool:
        """Whether the worker is ready, after restarts where it died; gives up after too many."""
        until_s = time.monotonic() + longest_s
        while not worker.ready and not worker.given_up:
            answer = worker.wait("ready", until_s - time.monotonic())
            if answer is not None:
                worker.ready = True
                say(f"{worker.group}: ready after {answer['seconds']} s, left {answer['left']}")
            elif time.monotonic() >= until_s:
                self.revive(worker, f"not ready after {longest_s:.0f} s", restart=False)
            else:
                self.revive(worker, "died while starting")
        return worker.ready

    def serve(self, worker: WorkerProcess, seconds: float, bursts: float) -> None:
        """One slice; a worker that dies or hangs is restarted and goes on in its next slice."""
        if seconds < 2.5 or not self.await_ready(worker, min(READY_S, max(self.left_s - 5.0, 1.0))):
            return
        worker.order(do="slice", seconds=round(min(seconds, self.left_s), 2), bursts=bursts)
        self._finish(worker, seconds)

    def name_kernels(self, groups: list[str], seconds: float) -> None:
        """Names of several workers' operators at once; no restart when one fails, since rows are
        what counts.
        """
        able = [
            self.workers[group]
            for group in groups
            if group in self.workers and self.workers[group].ready
        ]
        if self.left_s > 3.0:
            for worker in able:
                worker.order(do="names", seconds=min(seconds, self.left_s - 2.0))
            for worker in able:
                self._finish(worker, min(seconds, self.left_s), restart=False)

    def _finish(self, worker: WorkerProcess, seconds: float, restart: bool = True) -> None:
        answer = worker.wait("end", min(seconds + HANG_S, max(self.left_s + 20.0, 5.0)))
        if answer is None:
            self.revive(worker, "died or hung while measuring", restart)
            return
        self.counts.update({name: int(count) for name, count in answer["end"].items()})
        say(f"{worker.group}: {answer['end']}, left {answer['left']}, {self.left_s:.0f} s")
        for text, count in answer.get("errors", ()):
            say(f"  {count} x {text}")

    def revive(self, worker: WorkerProcess, reason: str, restart: bool = True) -> None:
        """Record the row that was under way, and start the worker anew unless that failed too
        often.
        """
        status, last = worker.kill(), worker.last
        reason = f"{reason}: {worker.said}" if worker.said else reason
        self.counts["worker deaths"] += 1
        task = self.tasks.get(last)
        entry: dict[str, Any] = {
            "id": last or f"start {worker.group}",
            "group": worker.group,
            "status": status,
        }
        entry["failure"] = f"{worker.group}: {reason}"
        if task is not None:
            entry |= {
                "kind": task.kind.value,
                "family": task.spec.family,
                "operator": task.spec.operator,
            }
        Journal(self.out / "failures.jsonl").append(entry)
        if task is not None:
            Journal(self.skip).append({"id": last})
        say(f"{worker.group}: {reason} (exit status {status}) at {last or 'its start'}")
        worker.restarts += 1
        worker.ready = False
        if not restart or worker.restarts > MOST_RESTARTS:
            worker.given_up = reason
            return
        worker.start()

    def stop(self) -> None:
        """Tell all workers to stop, and make them."""
        for worker in self.workers.values():
            worker.order(do="stop")
        for worker in self.workers.values():
            if worker.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(4.0)
            worker.kill()


def run_engine_kernels(
    out: Path, seconds: float, groups: list[str], *, smoke: bool = False, done: list[Path] | None = None,
    warm_s: float = 75.0, names: bool = True, burst_shares: Sequence[float] = BURST_SHARES,
    worker_command: list[str] | None = None,
) -> Counter[str]:  # fmt: skip
    """Measure ``groups`` within ``seconds``; returns how many rows of each kind, failures and
    deaths.
    """
    began_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    skip = write_done(out, done or [])
    listed = [
        task
        for group in groups
        for task in (list_smoke_tasks(group) if smoke else list_group_tasks(group))
    ]
    start = worker_command or [sys.executable, str(WORKER)]
    common = ["--out", str(out), "--skip", str(skip), *(["--smoke"] if smoke else [])]
    common += ["--warm-seconds", str(warm_s)]
    workers = {
        group: WorkerProcess(group, [*start, group, *common], out / "log.txt") for group in groups
    }
    campaign = EngineKernelCampaign(
        out, began_s + seconds, workers, skip, {task.id: task for task in listed}
    )
    try:
        for worker in workers.values():
            worker.start()
        if not smoke:
            compile_kernels(start, common, groups, out, began_s + warm_s)
            say(f"compiled after {time.monotonic() - began_s:.0f} s")
        for worker in workers.values():
            campaign.await_ready(worker, max(READY_S - (time.monotonic() - began_s), 20.0))
        _take_slices(
            campaign,
            SMOKE_SHARES if smoke else burst_shares,
            sum(NAMES_S.values()) if names else 0.0,
        )
        if names:
            campaign.name_kernels(["experts"], NAMES_S["experts"])
            campaign.name_kernels(
                [group for group in groups if group != "experts"], NAMES_S["others"]
            )
    finally:
        campaign.stop()
    for worker in workers.values():
        if worker.given_up:
            campaign.counts[f"{worker.group} given up: {worker.given_up}"] += 1
    return campaign.counts


def _take_slices(
    campaign: EngineKernelCampaign, burst_shares: Sequence[float], reserve_s: float
) -> None:
    """Serve the workers in rounds; what one leaves over falls to the others' next slices.

    ``burst_shares``: the share of a slice that bursts take while sustained rows are left, for each
    round."""
    total = sum(WEIGHTS[group] for group in campaign.workers)
    for round_, share in enumerate(burst_shares):
        budget_s = (campaign.left_s - reserve_s) / (len(burst_shares) - round_)
        for group, worker in campaign.workers.items():
            slice_s = (
                SMOKE_SLICE_S if burst_shares is SMOKE_SHARES else budget_s * WEIGHTS[group] / total
            )
            campaign.serve(worker, min(slice_s, campaign.left_s - reserve_s), bursts=share)


def compile_kernels(
    start: list[str], common: list[str], groups: list[str], out: Path, until_s: float
) -> None:
    """Compile what Triton and DeepGEMM compile at run time, in several processes, before anything
    is timed.
    """
    running: list[subprocess.Popen[bytes]] = []
    environment = _environment()
    with (out / "log.txt").open("ab") as log:
        for group in groups:
            parts = WARMERS.get(group, 0)
            for part in range(parts):
                command = [*start, group, *common, "--warm", f"{part}/{parts}"]
                quiet = subprocess.DEVNULL
                running.append(
                    subprocess.Popen(
                        command, env=environment, stdin=quiet, stdout=quiet, stderr=log
                    )
                )
        for process in running:
            try:
                process.wait(max(until_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def write_done(out: Path, folders: list[Path]) -> Path:
    """Write the row ids not to measure: rows of other folders, and rows that killed a worker
    before.
    """
    skip = out / "skip.jsonl"
    journal = Journal(skip)
    for folder in folders:
        for kind in (RowKind.BURST, RowKind.SUSTAINED):
            path = folder / f"{kind}.jsonl"
            for row in read_lines(path) if path.exists() else ():
                if not row.get("error") and str(row["id"]) not in journal.ids:
                    journal.append({"id": str(row["id"])})
    return skip


def describe_variants(out: Path) -> list[str]:
    """Describe each variant of a family: rows that worked, latency, power, and why others failed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in (RowKind.BURST, RowKind.SUSTAINED):
        path = out / f"{kind}.jsonl"
        for row in read_lines(path) if path.exists() else ():
            found.setdefault(name_variant(row["operator"]), []).append(row)
    path = out / "failures.jsonl"
    for row in read_lines(path) if path.exists() else ():
        name = name_variant(row["operator"]) if "operator" in row else row["group"]
        found.setdefault(name, []).append(row | {"error": f"worker lost: {row['failure']}"})
    lines = []
    for name in sorted(found):
        good = [row for row in found[name] if not row.get("error")]
        latency = sorted(row["latency_s"] for row in good if "latency_s" in row)
        power = [row["power_w"] for row in good if "power_w" in row]
        text = f"{name:44s} {len(good):3d} of {len(found[name]):3d} ok"
        text += f"  {1e6 * latency[len(latency) // 2]:9.1f} us" if latency else ""
        text += f"  {sum(power) / len(power):4.0f} W" if power else ""
        reasons = Counter(str(row["error"])[:150] for row in found[name] if row.get("error"))
        lines.append(
            text + "".join(f"\n    {count} x {reason}" for reason, count in reasons.most_common(2))
        )
    return lines


def _read(process: subprocess.Popen[str], answers: queue.Queue[dict[str, Any] | None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                answers.put(json.loads(line))
    answers.put(None)


def _environment() -> dict[str, str]:
    """Return a worker's environment, in which it starts no pool of compiling processes of its own."""
    return make_child_environment() | {
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print the table."""
    parser = argparse.ArgumentParser(
        prog="engine_kernel_campaign", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=560.0, help="the whole call, start and names included"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="one operator of every variant, three sustained rows"
    )
    parser.add_argument(
        "--groups", default=",".join(GROUPS), help="of: " + ", ".join((*GROUPS, *APART))
    )
    parser.add_argument(
        "--done", type=Path, nargs="*", default=[], help="folders whose rows are not measured again"
    )
    parser.add_argument(
        "--warm-seconds", type=float, default=75.0, help="longest time to compile kernels first"
    )
    parser.add_argument("--no-names", action="store_true")
    parser.add_argument(
        "--sustained-first", action="store_true", help="bursts only where no sustained row is left"
    )
    given = parser.parse_args(arguments)
    groups = [group for group in given.groups.split(",") if group]
    unknown = [group for group in groups if group not in (*GROUPS, *APART)]
    if unknown:
        parser.error(f"unknown group {unknown[0]!r}; known: {', '.join((*GROUPS, *APART))}")
    began_s = time.monotonic()
    counts = run_engine_kernels(
        given.out,
        given.seconds,
        groups,
        smoke=given.smoke,
        done=given.done,
        warm_s=given.warm_seconds,
        names=not given.no_names,
        burst_shares=(0.0,) * len(BURST_SHARES) if given.sustained_first else BURST_SHARES,
    )
    print("\n".join(describe_variants(given.out)))
    print(f"{time.monotonic() - began_s:.0f} s, {dict(counts)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
