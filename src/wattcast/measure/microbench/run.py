"""``measure microbench`` and ``measure multimedia``: the parent that watches, and what its children do."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from wattcast.errors import BadInput, bad_value
from wattcast.measure.microbench import campaign, counters, session
from wattcast.measure.microbench.suite import named
from wattcast.measure.run_info import say


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    out: Path | None
    budget_s: float = 480.0
    only: tuple[str, ...] = ()
    repeats: int = 1
    before: Path | None = None
    listed: bool = False
    counters: bool = False
    quick: bool = False
    child: bool = False
    target: bool = False
    since: str = ""
    frames: int = 80

    def folder(self) -> Path:
        """Where rows go; asked for when missing."""
        if self.out is None:
            raise BadInput("--out: expected a folder for the rows, got none.")
        if self.repeats < 1:
            raise bad_value("--repeats", "one round or more", self.repeats)
        if self.before is not None and not (self.counters or self.target):
            campaign.adopt(self.before, self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        return self.out


def microbench(request: Request) -> int:
    """Measure the suite, or count it, or list it."""
    if request.listed:
        for b in named(list(request.only)):
            print(f"{b.name:24} {b.group:11} {b.unit.operation}{f', {b.curve} {b.at:g}' if b.curve else ''}")
        return 0
    out = request.folder()
    if request.target:
        counted = counters.target(out, request.budget_s, list(request.only), request.before)
        print(f"counted {counted} kernels", file=sys.stderr)
        return 0
    if request.child:
        return session.run_child(out, request.only, request.repeats, request.budget_s, request.since, request.quick)
    named([name for name in request.only if name != "multimedia"])  # a wrong name costs nothing
    if request.counters:
        print(json.dumps(counters.collect(out, request.budget_s, list(request.only), request.before)))
        return 0
    return _report(out, "microbench", _supervise(request, out, "microbench"))


def multimedia(request: Request) -> int:
    """Measure the multimedia workloads."""
    from wattcast.measure.multimedia.session import run_child

    out = request.folder()
    if request.frames < 3:
        raise bad_value("--frames", "three frames or more", request.frames)
    if request.child:
        return run_child(out, request.repeats, request.budget_s, request.since, request.frames, request.quick)
    return _report(out, "multimedia", _supervise(request, out, "multimedia"))


def _supervise(request: Request, out: Path, verb: str) -> Counter[str]:
    command = [sys.executable, "-m", "wattcast.measure", verb, "--child", "--out", str(out)]
    command += ["--repeats", str(request.repeats), "--frames", str(request.frames)]
    command += ["--only", ",".join(request.only)] if request.only else []
    command += ["--quick"] if request.quick else []
    return campaign.supervise(out, verb, command, request.budget_s)


def _report(out: Path, kind: str, counts: Counter[str]) -> int:
    """Counts to stdout, failures by name to stderr; failures alone are no failure of the whole."""
    for name, error in campaign.failures(out / f"{kind}.jsonl").items():
        say(f"failed: {name}: {error}")
    print(json.dumps(dict(sorted(counts.items()))))
    return 0 if counts["measured"] else 4
