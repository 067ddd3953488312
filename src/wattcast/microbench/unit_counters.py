"""Collect hardware counters of every microbenchmark and multimedia workload with Nsight Compute.

``ncu`` runs this package again (``microbench --target``), which launches each kernel once warm and once counted.
Kernels bear the names of their benchmarks, so the table needs no ranges. Nothing that is timed runs under the
profiler, and clocks and caches are left alone.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from wattcast.core.errors import MissingTool
from wattcast.core.measured_rows import Journal, Plain, read_lines
from wattcast.measure.campaigns.nsight_counters import keep_known_metrics, query_metrics
from wattcast.measure.cuda_device import CudaDevice, CudaError, DeviceFault
from wattcast.measure.steady_state import say
from wattcast.microbench.benchmark_kernels import DeviceBuffers, calibrate_iterations, prepare_benchmark
from wattcast.microbench.benchmark_suite import find_benchmarks, list_benchmarks
from wattcast.microbench.compile_ahead import CompiledKernels, cache_folder, worker_count
from wattcast.microbench.unit_source import Benchmark

BUFFER_BYTE = 512 << 20  # ncu saves and restores what a kernel may write
COUNTED_S = 4e-4  # of a counted launch
COUNTED_FRAMES = 8
WRITE_S = 15.0  # ncu writes its table after the program has ended


def read_unit_metrics() -> list[str]:
    """Read every metric of ``microbench_metrics.csv``."""
    text = files("wattcast.microbench").joinpath("microbench_metrics.csv").read_text(encoding="utf-8")
    return [row["metric"] for row in csv.DictReader(text.splitlines())]


def collect_unit_counters(out: Path, budget_s: float, only: list[str], before: Path | None = None) -> dict[str, int]:
    """Run the suite under ``ncu`` within ``budget_s``, one row a kernel into ``microbench_counters.jsonl``.

    What ``before`` has counters of, as the kernels are today, comes last.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise MissingTool("Nsight Compute (ncu) is not on the PATH; counters need it.")
    began_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    metrics = keep_known_metrics(read_unit_metrics(), query_metrics(ncu))
    names = tuple(name for name in only if name != "multimedia")
    if names or not only:  # no compiling may happen under the profiler
        compiled = CompiledKernels(CudaDevice.open().architecture, cache_folder(), names)
        compiled.start(2 * worker_count())
        compiled.finish(budget_s / 2)
    raw = out / "microbench_counters.csv"
    left_s = budget_s - (time.monotonic() - began_s) - WRITE_S
    command = [ncu, "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(raw)]
    command += ["--metrics", ",".join(metrics), sys.executable, "-m", "wattcast.measure", "microbench", "--target"]
    command += ["--out", str(out), "--budget", f"{left_s:.1f}s", *(["--only", ",".join(only)] if only else [])]
    command += ["--from", str(before)] if before is not None else []
    try:
        code = subprocess.run(command, timeout=budget_s + 30.0, check=False, env=dict(os.environ)).returncode
    except subprocess.TimeoutExpired:
        code = -1
    said = raw.read_text(errors="replace") if raw.exists() else ""
    if code != 0:
        say(f"ncu ended with {code}. {said[-600:]}")
    journal = Journal(out / "microbench_counters.jsonl")
    have = read_counted_ids(out)
    rows = [row for row in read_unit_table(said.splitlines()) if row["id"] not in have]
    for row in rows:
        journal.append(row)
    return {"kernels": len(rows), "metrics": len(metrics)}


def read_counted_ids(out: Path) -> set[str]:
    """Return the kernels whose counters are on file for their present version."""
    path, now = out / "microbench_counters.jsonl", {b.name: b.version for b in list_benchmarks()}
    rows = read_lines(path) if path.exists() else iter(())
    return {str(row["id"]) for row in rows if int(row.get("version", 1)) >= now.get(str(row["id"]), 1)}


def read_unit_table(lines: Iterable[str]) -> Iterable[Plain]:
    """Read ``ncu --csv --page raw``, one row a kernel by its name; messages and units are passed over."""
    kept = [line for line in lines if line.startswith('"')]
    table = csv.DictReader(kept)
    wanted, versions = set(read_unit_metrics()), {b.name: b.version for b in list_benchmarks() if b.version > 1}
    for row in table:
        name = (row.get("Kernel Name") or "").split("(")[0].strip()
        if not row.get("ID") or not name:
            continue
        metrics = {}
        for key in wanted & set(row):
            with contextlib.suppress(ValueError):  # a metric without a value
                metrics[key] = float((row[key] or "").replace(",", ""))
        found: Plain = {"id": name.removeprefix("media_"), "kernel": name}
        found |= {"version": versions[name]} if name in versions else {}
        found |= {"frames": COUNTED_FRAMES} if name.startswith("media_") else {}
        yield found | {"metrics": {key: metrics[key] for key in read_unit_metrics() if key in metrics}}


def count_kernels(out: Path, budget_s: float, only: list[str], before: Path | None = None) -> int:
    """Launch every kernel under ``ncu``; return how many were counted."""
    deadline_s = time.monotonic() + budget_s
    device = CudaDevice.open()
    counted = 0
    have = read_counted_ids(out)
    if not only or "multimedia" in only:
        counted += _count_multimedia(device, have)
    compiled = CompiledKernels(device.architecture, cache_folder())
    buffers = DeviceBuffers.allocate(device, BUFFER_BYTE)
    names = [name for name in only if name != "multimedia"]
    wanted = [b for b in find_benchmarks(names) if b.supported(device.architecture) and b.name not in have]
    wanted = [b for b in wanted if not b.timed]
    known = read_counted_ids(before) if before is not None else set()
    wanted = order_benchmarks(wanted, known) if names or not only else []
    for place, benchmark in enumerate(wanted):
        if time.monotonic() > deadline_s:
            say(f"counters: budget spent after {place} of {len(wanted)} kernels")
            break
        try:
            ready = prepare_benchmark(benchmark, buffers, compiled.cubin(benchmark))
            iterations = calibrate_iterations(ready, COUNTED_S)
            device.synchronize()
            device.profile(True)
            ready.launch(iterations)
            device.synchronize()
            device.profile(False)
            ready.discard()
            counted += 1
        except DeviceFault as error:
            say(f"counters: {benchmark.name}: {error}")
            break
        except CudaError as error:
            say(f"counters: {benchmark.name}: {error}")
    return counted


def order_benchmarks(benchmarks: Iterable[Benchmark], known: set[str]) -> list[Benchmark]:
    """Sort benchmarks: those without counters first, several ways to the same end last of these."""
    return sorted(benchmarks, key=lambda b: (b.name in known, b.once))


def _count_multimedia(device: CudaDevice, have: set[str]) -> int:
    from wattcast.microbench.multimedia_clip import NAMES, MediaClip

    try:
        clip = MediaClip.make(device, COUNTED_FRAMES)
        todo = [name for name in NAMES if name not in have]
        for name in todo:
            clip.enqueue(name)
            device.synchronize()
            device.profile(True)
            clip.enqueue(name)
            device.synchronize()
            device.profile(False)
        for address in (clip.taken, clip.result, *clip.tables.values()):
            device.free(address)
        return len(todo)
    except DeviceFault:
        raise
    except Exception as error:
        say(f"counters: multimedia: {error}")
        return 0
