"""Names, grids and blocks of the kernels each operator launches, by PyTorch's profiler in batches.

A process of its own: nothing that is timed runs under the profiler. One session covers many
operators; each runs once inside a named range, and a kernel belongs to the range whose launch call
issued it.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wattcast.measure.kernels.gpu import Gpu
from wattcast.measure.kernels.spec import Spec
from wattcast.records import NameRow

PREFIX = "wattcast:"


def profile_batch(gpu: Gpu, specs: list[Spec], run: str) -> list[NameRow]:
    """Kernels of each operator of a batch; an operator that fails gets a row with its error."""
    torch = gpu.torch
    errors: dict[str, str] = {}
    ready: list[Spec] = []
    for spec in specs:
        try:
            gpu.builder.build(spec).run(0)
            ready.append(spec)
        except Exception as error:
            errors[spec.id] = f"{type(error).__name__}: {error}"[:300]
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for spec in ready:
            call = gpu.builder.build(spec)
            torch.cuda.synchronize()  # building a mask or an index launches kernels too
            with torch.profiler.record_function(PREFIX + spec.id):
                call.run(0)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    found = kernels_by_range(trace["traceEvents"])
    rows = [_row(spec.id, found.get(spec.id, []), run) for spec in ready]
    return rows + [NameRow(spec, run=run, error=text) for spec, text in errors.items()]


def kernels_by_range(events: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Kernel events of a chrome trace, in launch order, under the range that launched them."""
    ranges: list[tuple[float, float, str]] = []
    launched: dict[int, float] = {}
    kernels: list[dict[str, Any]] = []
    for event in events:
        category = event.get("cat", "")
        if category == "user_annotation" and str(event.get("name", "")).startswith(PREFIX):
            begin = float(event["ts"])
            ranges.append((begin, begin + float(event["dur"]), event["name"].removeprefix(PREFIX)))
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            launched.setdefault(int(event["args"]["correlation"]), float(event["ts"]))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):  # a contiguous copy is no kernel
            kernels.append(event)
    ranges.sort()
    starts = [begin for begin, _, _ in ranges]
    found: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(kernels, key=lambda item: float(item["ts"])):
        at = launched.get(int(event.get("args", {}).get("correlation", -1)))
        place = bisect.bisect_right(starts, at) - 1 if at is not None else -1
        if at is not None and place >= 0 and at <= ranges[place][1]:
            found.setdefault(ranges[place][2], []).append(event)
    return found


def _row(spec: str, events: list[dict[str, Any]], run: str) -> NameRow:
    arguments = [event["args"] for event in events]
    return NameRow(
        spec,
        names=tuple(str(event["name"]) for event in events),
        grids=tuple(tuple(int(side) for side in a.get("grid", ())) for a in arguments),
        blocks=tuple(tuple(int(side) for side in a.get("block", ())) for a in arguments),
        kernel_s=tuple(float(event["dur"]) * 1e-6 for event in events),
        shared_byte=tuple(int(a.get("shared memory", 0)) for a in arguments),
        registers=tuple(int(a.get("registers per thread", 0)) for a in arguments),
        run=run,
        error="" if events else "no kernel seen",
    )
