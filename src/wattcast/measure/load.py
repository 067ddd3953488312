"""Loads of known power: chosen operators of the plan, each run for a few seconds with a rest between.

``measure run -- python -m wattcast.measure load`` must show the power that the campaign found for the
same operators; ``agree`` does all three ways of measuring in turn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from wattcast.measure.kernels.gpu import Gpu, Graph
from wattcast.measure.kernels.plan import plan
from wattcast.measure.kernels.rows import Bench, sustained
from wattcast.measure.kernels.spec import Spec
from wattcast.measure.run import run_command
from wattcast.measure.sampler import Sampler
from wattcast.measure.window import window


def chosen() -> list[Spec]:
    """Three operators far apart: a dense product, a decode attention and an elementwise sum."""
    kinds: tuple[Callable[[Spec], bool], ...] = (
        lambda s: s.family == "linear" and s.operator["dtype"] == "bf16" and 1e12 < s.flop < 4e12,
        lambda s: s.family == "attention" and s.operator["q_len"] == 1 and s.byte > 1e8,
        lambda s: s.family == "elementwise" and s.operator.get("function") == "add" and s.operator["n"] > 5e7,
    )
    return [next(spec for spec in plan() if keep(spec)) for keep in kinds]


def load(length_s: float, gpu: Gpu | None = None) -> None:
    """Run each chosen operator for ``length_s``, a second of rest after each."""
    gpu = gpu or Gpu.open()
    for spec in chosen():
        graph = gpu.prepare(spec)
        keep_busy(gpu, graph, length_s)
        graph.drop()
        time.sleep(1.0)


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


def agree(length_s: float = 3.0) -> list[dict[str, object]]:
    """Power of the chosen operators by the campaign, by windows and by ``measure run``."""
    gpu = Gpu.open()
    found: list[dict[str, object]] = []
    for spec in chosen():
        with Sampler("nvml") as sampler:
            row = sustained(Bench(gpu, sampler, "agree"), spec)
        graph = gpu.prepare(spec)
        with window("outer", "nvml") as outer:
            keep_busy(gpu, graph, 1.2)  # settle
            with window("inner") as inner:
                keep_busy(gpu, graph, length_s)
        graph.drop()
        found.append(
            {
                "spec": spec.id,
                "operator": spec.operator,
                "campaign_w": row.power_w,
                "campaign_clock_hz": row.sm_clock_hz,
                "window_w": inner.result.power_w,
                "window_clock_hz": inner.result.sm_clock_hz,
                "outer_w": outer.result.power_w,
                "flags": [*row.flags, *inner.result.flags],
            }
        )
    del gpu
    run = run_command([sys.executable, "-m", "wattcast.measure", "load", "--seconds", str(length_s + 1.5)], "nvml")
    plateaus = sorted(run.measurement.steady, key=lambda s: -s.power_w * min(s.duration_s, 1.0))
    busy = sorted((s for s in plateaus if s.power_w > 200.0), key=lambda s: s.start_s)
    for entry, stretch in zip(found, busy, strict=False):
        entry["run_w"] = stretch.power_w
    found.append({"run": run.plain()})
    return found
