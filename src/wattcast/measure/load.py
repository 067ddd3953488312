"""Loads of known power: chosen operators of the plan, each run for a few seconds with a rest between.

``measure run -- python -m wattcast.measure load`` must show the power that the campaign found for the
same operators; ``agree`` does all three ways of measuring in turn.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wattcast.measure.kernels.gpu import Gpu, Graph
from wattcast.measure.kernels.plan import plan
from wattcast.measure.kernels.rows import Bench, sustained
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.measurement import measured
from wattcast.measure.run import run_command
from wattcast.measure.sampler import Sampler
from wattcast.measure.samples import ticks
from wattcast.measure.window import window

SETTLE_S = 1.2


def chosen() -> list[Spec]:
    """Three operators far apart: a dense product, a decode attention and an elementwise sum."""
    kinds: tuple[Callable[[Spec], bool], ...] = (
        lambda s: s.family == "linear" and s.operator["dtype"] == "bf16" and 1e12 < s.flop < 4e12,
        lambda s: s.family == "attention" and s.operator["q_len"] == 1 and s.byte > 1e8,
        lambda s: s.family == "elementwise" and s.operator.get("function") == "add" and s.operator["n"] > 5e7,
    )
    return [next(spec for spec in plan() if keep(spec)) for keep in kinds]


def load(length_s: float, marks: Path | None = None) -> None:
    """Run each chosen operator for ``length_s``, a second of rest after each; ``marks`` gets their times."""
    gpu, times = Gpu.open(), []
    for spec in chosen():
        graph = gpu.prepare(spec)
        began_s = time.monotonic()
        keep_busy(gpu, graph, length_s)
        times.append([began_s, time.monotonic()])
        graph.drop()
        time.sleep(1.0)
    if marks is not None:
        marks.write_text(json.dumps(times))


def keep_busy(gpu: Any, graph: Graph, length_s: float) -> None:
    """Replay without gaps for ``length_s``; the host stays a few chunks ahead."""
    per_chunk = max(int(0.02 / (float(gpu.timed(graph, 2)[-1]) * graph.copies)), 1)
    end_s = time.monotonic() + length_s
    waiting: list[Any] = []
    while time.monotonic() < end_s:
        gpu.replay(graph, per_chunk)
        waiting.append(gpu.mark())
        if len(waiting) > 3:
            waiting.pop(0).synchronize()
    gpu.synchronize()


def agree(length_s: float = 4.0) -> list[dict[str, object]]:
    """Power of the chosen operators by the campaign, by windows and by ``measure run``; all after settling."""
    gpu = Gpu.open()
    both = [_campaign_and_window(gpu, spec, length_s) for spec in chosen()]
    found, doubts = [entry for entry, _ in both], [flags for _, flags in both]
    del gpu
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks.json"
        command = [sys.executable, "-m", "wattcast.measure", "load", "--marks", str(marks)]
        run = run_command([*command, "--seconds", str(SETTLE_S + length_s)], "nvml")
        times = json.loads(marks.read_text()) if marks.exists() else []
    for entry, flags, (began_s, ended_s) in zip(found, doubts, times, strict=False):
        part = measured("part", run.samples, began_s + SETTLE_S, ended_s)
        whole = ticks(run.samples).between(began_s + SETTLE_S, ended_s)  # a step at the edge holds rest, too
        entry |= {
            "run_w": whole.power_w if whole.intervals else None,
            "run_clock_hz": part.sm_clock_hz,
            "flags": [*flags, *part.flags],
        }
    found.append({"overhead": run.measurement.overhead, "exit_code": run.exit_code})
    return found


def _campaign_and_window(gpu: Any, spec: Spec, length_s: float) -> tuple[dict[str, object], tuple[str, ...]]:
    with Sampler("nvml") as sampler:
        row = sustained(Bench(gpu, sampler, "agree"), spec)
    graph = gpu.prepare(spec)
    with window("outer", "nvml"):
        keep_busy(gpu, graph, SETTLE_S)
        with window("inner") as inner:
            keep_busy(gpu, graph, length_s)
    graph.drop()
    entry: dict[str, object] = {
        "spec": spec.id,
        "operator": spec.operator,
        "campaign_w": row.power_w,
        "campaign_clock_hz": row.sm_clock_hz,
        "window_w": inner.result.power_w,
        "window_clock_hz": inner.result.sm_clock_hz,
    }
    return entry, (*row.flags, *inner.result.flags)
