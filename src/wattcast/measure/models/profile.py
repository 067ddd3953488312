"""Kernels of one eager iteration, by PyTorch's profiler, to tell which operator a prediction has wrong.

After all rows are measured, since the profiler's hooks stay in the process. The clock is whatever the
card was at; shares of time matter, not their sum.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wattcast.records import ModelKernels

LONGEST_NAME = 200


def profile(device: Any, row_id: str, run: Callable[[], Any], bench_run: str) -> ModelKernels:
    """Names and durations of the kernels of one iteration."""
    torch = device.torch
    device.warm(run)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        device.issue(run, 1)
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return kernels_of(row_id, trace["traceEvents"], bench_run)


def kernels_of(row_id: str, events: Iterable[dict[str, Any]], run: str) -> ModelKernels:
    """The kernels of a chrome trace in the order they started."""
    kept = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    kept.sort(key=lambda event: float(event["ts"]))
    names: dict[str, int] = {}
    order = [names.setdefault(str(event["name"])[:LONGEST_NAME], len(names)) for event in kept]
    seconds = tuple(round(float(event["dur"]) * 1e-6, 9) for event in kept)
    return ModelKernels(row_id, tuple(names), tuple(order), seconds, run=run, error="" if kept else "no kernel seen")
