"""Hardware counters of every microbenchmark and multimedia workload, by Nsight Compute, in a process of its own.

``ncu`` runs this package again (``microbench --target``), which launches each kernel once warm and once
counted. Kernels bear the names of their benchmarks, so the table needs no ranges. Nothing that is timed
runs under the profiler, and clocks and caches are left alone.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from wattcast.errors import MissingTool
from wattcast.measure.kernels.counters import known_metrics, query_metrics
from wattcast.measure.microbench import kernels
from wattcast.measure.microbench.compile import Compiled, cache_folder
from wattcast.measure.microbench.device import Device, DeviceFault
from wattcast.measure.microbench.suite import named, suite
from wattcast.measure.microbench.unit import Benchmark
from wattcast.measure.nvrtc import CudaError
from wattcast.measure.run_info import say
from wattcast.records import Journal, Plain, read_lines

BUFFER_BYTE = 512 << 20  # ncu saves and restores what a kernel may write
COUNTED_S = 4e-4  # of a counted launch
COUNTED_FRAMES = 8
WRITE_S = 15.0  # ncu writes its table after the program has ended


def wanted_metrics() -> list[str]:
    """Every row of ``metrics.csv``."""
    text = files("wattcast.measure.microbench").joinpath("metrics.csv").read_text(encoding="utf-8")
    return [row["metric"] for row in csv.DictReader(text.splitlines())]


def collect(out: Path, budget_s: float, only: list[str], before: Path | None = None) -> dict[str, int]:
    """Run the suite under ``ncu`` within ``budget_s``; one row a kernel into ``microbench_counters.jsonl``.

    What ``before`` has counters of, as the kernels are today, comes last.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise MissingTool("Nsight Compute (ncu) is not on the PATH; counters need it.")
    began_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    metrics = known_metrics(wanted_metrics(), query_metrics(ncu))
    _compile_first(budget_s / 2, tuple(only))
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
    have = counted_ids(out)
    rows = [row for row in read_table(said.splitlines()) if row["id"] not in have]
    for row in rows:
        journal.append(row)
    return {"kernels": len(rows), "metrics": len(metrics)}


def counted_ids(out: Path) -> set[str]:
    """Kernels whose counters are on file, as they are today: a kernel that has changed since is counted again."""
    path, now = out / "microbench_counters.jsonl", {b.name: b.version for b in suite()}
    rows = read_lines(path) if path.exists() else iter(())
    return {str(row["id"]) for row in rows if int(row.get("version", 1)) >= now.get(str(row["id"]), 1)}


def _compile_first(longest_s: float, only: tuple[str, ...]) -> None:
    """Fill the cache of machine code, so that no compiling happens under the profiler."""
    from wattcast.measure.microbench.session import worker_count

    names = tuple(name for name in only if name != "multimedia")
    if only and not names:
        return
    compiled = Compiled(Device.open().architecture, cache_folder(), names)
    compiled.start(2 * worker_count())
    compiled.finish(longest_s)


def read_table(lines: Iterable[str]) -> Iterable[Plain]:
    """Rows of ``ncu --csv --page raw``: one a kernel, by its name; messages and the line of units are passed over."""
    kept = [line for line in lines if line.startswith('"')]
    table = csv.DictReader(kept)
    wanted, versions = set(wanted_metrics()), {b.name: b.version for b in suite() if b.version > 1}
    for row in table:
        name = (row.get("Kernel Name") or "").split("(")[0].strip()
        if not row.get("ID") or not name:
            continue
        metrics = {key: number(value) for key, value in row.items() if key in wanted}
        yield {
            "id": name.removeprefix("media_"),
            "kernel": name,
            **({"version": versions[name]} if name in versions else {}),
            **({"frames": COUNTED_FRAMES} if name.startswith("media_") else {}),
            "metrics": {key: value for key, value in metrics.items() if value is not None},
        }


def number(text: str | None) -> float | None:
    """A number as ncu prints it, or None."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def target(out: Path, budget_s: float, only: list[str], before: Path | None = None) -> int:
    """What runs under ``ncu``; returns how many kernels were counted."""
    deadline_s = time.monotonic() + budget_s
    device = Device.open()
    counted = 0
    have = counted_ids(out)
    if not only or "multimedia" in only:
        counted += _multimedia(device, have)
    compiled = Compiled(device.architecture, cache_folder())
    buffers = kernels.Buffers.take(device, BUFFER_BYTE)
    names = [name for name in only if name != "multimedia"]
    wanted = [b for b in named(names) if b.supported(device.architecture) and b.name not in have]
    wanted = [] if only and not names else in_order(wanted, counted_ids(before) if before is not None else set())
    for place, benchmark in enumerate(wanted):
        if time.monotonic() > deadline_s:
            say(f"counters: budget spent after {place} of {len(wanted)} kernels")
            break
        try:
            ready = kernels.prepare(benchmark, buffers, compiled.cubin(benchmark))
            iterations = kernels.calibrate(ready, COUNTED_S)
            device.synchronize()
            device.profile(True)
            ready.launch(iterations)
            device.synchronize()
            device.profile(False)
            device.unload(ready.kernel)
            counted += 1
        except DeviceFault as error:
            say(f"counters: {benchmark.name}: {error}")
            break
        except CudaError as error:
            say(f"counters: {benchmark.name}: {error}")
    return counted


def in_order(benchmarks: Iterable[Benchmark], known: set[str]) -> list[Benchmark]:
    """What no counters are known of first, several ways to the same end last of these."""
    return sorted(benchmarks, key=lambda b: (b.name in known, b.once))


def _multimedia(device: Device, have: set[str]) -> int:
    from wattcast.measure.multimedia.workloads import NAMES, Clip

    try:
        clip = Clip.make(device, COUNTED_FRAMES)
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
