"""Compare three ways of measuring the power of known loads: the campaign, measured windows and
``measure run``.

Run it on a machine with a GPU: ``python -m wattcast.lab.campaigns.measuring_agreement --out DIR``
writes DIR/agreement.json."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wattcast.core.whole_files import write_whole
from wattcast.lab.campaigns.campaign_engine import OperatorBench
from wattcast.lab.campaigns.kernel_plan import OperatorSpec, read_kernel_plan
from wattcast.lab.campaigns.operator_rows import (
    CampaignGpu,
    CapturedGraph,
    measure_sustained_row,
)
from wattcast.lab.module_commands import run_module
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.measured_run import measure, run_command
from wattcast.measure.sampler import Sampler
from wattcast.measure.window_summary import summarise_window

SETTLE_S = 1.2


def choose_known_loads() -> list[OperatorSpec]:
    """Three operators far apart: a dense product, a decode attention and an elementwise sum."""
    kinds: tuple[Callable[[OperatorSpec], bool], ...] = (
        lambda s: s.family == "linear" and s.operator["dtype"] == "bf16" and 1e12 < s.flop < 4e12,
        lambda s: s.family == "attention" and s.operator["q_len"] == 1 and s.byte > 1e8,
        lambda s: (
            s.family == "elementwise"
            and s.operator.get("function") == "add"
            and s.operator["n"] > 5e7
        ),
    )
    return [next(spec for spec in read_kernel_plan() if keep(spec)) for keep in kinds]


def run_known_loads(length_s: float, marks: Path | None = None) -> None:
    """Run each chosen operator for ``length_s``, a second of rest after each; ``marks`` gets their
    times.
    """
    gpu = CampaignGpu.open()
    times = []
    for spec in choose_known_loads():
        with gpu.prepare(spec) as graph:
            began_s = time.monotonic()
            keep_busy(gpu, graph, length_s)
            times.append([began_s, time.monotonic()])
        time.sleep(1.0)
    if marks is not None:
        marks.write_text(json.dumps(times))


def keep_busy(
    gpu: Any,
    graph: CapturedGraph,
    length_s: float,
) -> None:
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


def compare_methods(length_s: float = 4.0) -> list[dict[str, object]]:
    """Power of the chosen operators by the campaign, by windows and by ``measure run``; all after
    settling.
    """
    gpu = CampaignGpu.open()
    pairs = [_campaign_and_window(gpu, spec, length_s) for spec in choose_known_loads()]
    entries = [entry for entry, _ in pairs]
    doubts = [flags for _, flags in pairs]
    del gpu
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks.json"
        command = [sys.executable, __file__, "--marks", str(marks)]
        run = run_command([*command, "--seconds", str(SETTLE_S + length_s)], "nvml")
        times = json.loads(marks.read_text()) if marks.exists() else []
    for entry, flags, (began_s, ended_s) in zip(entries, doubts, times, strict=False):
        part = summarise_window("part", run.samples, began_s + SETTLE_S, ended_s)
        # a step at the edge holds rest, too
        whole = find_ticks(run.samples).between(began_s + SETTLE_S, ended_s)
        entry |= {
            "run_w": whole.power_w if whole.intervals else None,
            "run_clock_hz": part.sm_clock_hz,
            "flags": [*flags, *part.flags],
        }
    entries.append({"overhead": run.measurement.overhead, "exit_code": run.exit_code})
    return entries


def _campaign_and_window(
    gpu: Any,
    spec: OperatorSpec,
    length_s: float,
) -> tuple[dict[str, object], tuple[str, ...]]:
    with Sampler("nvml") as sampler:
        row = measure_sustained_row(OperatorBench(gpu, sampler, "agree"), spec)
    with gpu.prepare(spec) as graph, measure("outer", "nvml"):
        keep_busy(gpu, graph, SETTLE_S)
        with measure("inner") as inner:
            keep_busy(gpu, graph, length_s)
    entry: dict[str, object] = {
        "spec": spec.id,
        "operator": spec.operator,
        "campaign_w": row.power_w,
        "campaign_clock_hz": row.sm_clock_hz,
        "window_w": inner.result.power_w,
        "window_clock_hz": inner.result.sm_clock_hz,
    }
    return entry, (*row.flags, *inner.result.flags)


def main() -> None:
    """Compare the three ways, or with ``--marks`` run the loads alone, as ``measure run`` starts
    them.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for agreement.json")
    parser.add_argument("--marks", type=Path, help="run the loads alone and write their times here")
    parser.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        help="how long each load runs",
    )
    options = parser.parse_args()
    if options.marks:
        run_known_loads(options.seconds, options.marks)
        return
    entries_text = json.dumps(compare_methods(options.seconds), indent=1)
    if options.out:
        write_whole(options.out / "agreement.json", entries_text.encode())
    print(entries_text)


if __name__ == "__main__":
    run_module(main)
