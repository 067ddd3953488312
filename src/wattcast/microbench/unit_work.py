"""Collect counters of kernels, and express their work in seconds and joules of each unit, at measured rates.

Units work at the same time but never overlap perfectly, so the time that they need together is

    N = max((Σ u^3)^(1/3), issue)

with the seconds u of each unit and the slots that all instructions take to issue. Where that is more than the kernel
took, its busiest unit was faster than in the microbenchmark and gets the seconds that are left to it. Three counts
need care, as the H200's own counters showed: a conflicting pass of shared memory costs less energy than a full one,
an instruction of a diverged warp less than one of 32 threads (both from the measured curves), and the energy of a
DRAM byte already contains its way through L2.

``collect_unit_counters`` has Nsight Compute count every microbenchmark and multimedia workload. ``ncu`` runs this
package again (``microbench --target``), which launches each kernel once warm and once counted. Kernels bear the names
of their benchmarks, so the table needs no ranges. Nothing that is timed runs under the profiler, and clocks and
caches are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.core.errors import BadInput
from wattcast.core.measured_rows import Journal, Plain, read_lines, read_shipped_table
from wattcast.measure.campaigns import nsight_counters
from wattcast.measure.cuda_device import CudaDevice, CudaError, DeviceFault
from wattcast.measure.steady_state import say
from wattcast.microbench.benchmark_kernels import DeviceBuffers, calibrate_iterations, prepare_benchmark
from wattcast.microbench.benchmark_suite import find_benchmarks, list_benchmarks
from wattcast.microbench.microbench_campaign import CompiledKernels, cache_folder, worker_count
from wattcast.microbench.microbench_results import MicroRow, find_best_copy, find_curve, find_fault, keep_first_rounds
from wattcast.microbench.unit_source import Benchmark

TIME = "gpu__time_duration.sum"
SCHEDULERS = 4  # the tensor pipe's cycles are counted on each
ARITHMETIC = ("fp32", "fp64", "int", "special", "half")
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts.sum"
PASSES = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
EXTRA_PASSES = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
INSTRUCTIONS = "smsp__inst_executed.sum"
ACTIVE = "smsp__thread_inst_executed_per_inst_executed.ratio"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
FROM_L2, TO_L2 = "l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"
L2_ITSELF = ("lts__t_bytes.sum",)  # counts what goes from one half of the L2 to the other again
PIPE = "sm__inst_executed_pipe_{}.sum"
PIPES = tuple(map(PIPE.format, "alu fma fp64 xu lsu adu cbu uniform".split()))
FP64, XU = PIPE.format("fp64"), PIPE.format("xu")
REDUCED = "lts__t_sectors_op_red.sum"
GLOBAL = "l1tex__t_{}_pipe_lsu_mem_global_op_{}.sum"
SECTORS, REQUESTS = (GLOBAL.format(what, "ld") for what in ("sectors", "requests"))
STORED_SECTORS, STORES = (GLOBAL.format(what, "st") for what in ("sectors", "requests"))
HITS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum"
TABLE_REUSE = 4.0  # uses of a byte that L2 gave, from which on reads are of a table
SECTORS_A_PASS = 4.0  # that the L1 looks up in the time of one pass through its data
LAUNCHED = ("launch__grid_size", "launch__block_size")
# unit: the microbenchmark with its rate and energy, the metrics that count its operations, operations of one count.
# While it starts and ends a warp, an SM could issue 80 instructions, by thin kernels of the pairs.
UNITS: dict[str, tuple[str, tuple[str, ...], float]] = {
    row["unit"]: (row["benchmark"], tuple(row["metrics"].split()), float(row["operations"]))
    for row in read_shipped_table("wattcast.microbench", "unit_counts.csv")
}
SIZE_METRICS = {size: f"sm__sass_inst_executed_op_memory_{8 * size}b.sum" for size in (1, 2, 4, 8, 16)}
INSTEAD = {"l2": ("bulk_copy_l2", 1 / 8192.0)}  # where the benchmark is missing or known to be wrong
ELSEWHERE = ("issue", "products", "launch")  # their joules are counted with other units
EXPONENT = 3.0  # of units that work at the same time
BUFFER_BYTE = 512 << 20  # ncu saves and restores what a kernel may write
COUNTED_S = 4e-4  # of a counted launch
COUNTED_FRAMES = 8
WRITE_S = 15.0  # ncu writes its table after the program has ended


@dataclass(frozen=True)
class UnitWork:
    """What a unit had to do in a kernel: seconds at its measured rate, joules above idle."""

    seconds: float
    joules: float

    def scaled(self, time: float, energy: float | None = None) -> UnitWork:
        """Return the work with time and energy multiplied, both by ``time`` where ``energy`` is left out."""
        return UnitWork(self.seconds * time, self.joules * (time if energy is None else energy))


def combine_units_s(work: Mapping[str, UnitWork], exponent: float = EXPONENT) -> float:
    """Return the seconds N that all units need together; products run on half of the fp32 pipe."""
    seconds = {unit: w.seconds for unit, w in work.items() if unit != "issue"}
    if "products" in seconds:
        seconds["fp32"] = max(seconds.get("fp32", 0.0), seconds.pop("products"))
    most = max(seconds.values(), default=0.0)
    together = most * sum((s / most) ** exponent for s in seconds.values()) ** (1.0 / exponent) if most else 0.0
    return max(together, work["issue"].seconds if "issue" in work else 0.0)


@dataclass(frozen=True)
class KernelProfile:
    """One kernel: its time, its work by unit, and every metric of its profile."""

    name: str
    time_s: float
    work: Mapping[str, UnitWork]
    metrics: Mapping[str, float]
    idle_power_w: float

    @property
    def busiest(self) -> str:
        """The unit that sets the time, as far as the profile tells."""
        return max((u for u in self.work if u not in ELSEWHERE), key=lambda unit: self.work[unit].seconds)

    @property
    def busy_share(self) -> float:
        """Share of the time that the busiest unit, or the issue of instructions, works."""
        return max(w.seconds for w in self.work.values()) / self.time_s

    @property
    def energy_j(self) -> float:
        """Energy of the kernel: idle power over its time, and its units' joules."""
        return self.idle_power_w * self.time_s + sum(work.joules for work in self.work.values())


def list_usable_units(
    results: Sequence[MicroRow], metrics: Mapping[str, object]
) -> dict[str, tuple[str, tuple[str, ...], float]]:
    """List units whose counts the profile has and whose rate was measured."""
    by_name, found = keep_first_rounds(results), {}
    for unit, (bench, names, each) in UNITS.items():
        fault = find_fault(by_name[bench]) if bench in by_name else None
        if unit in INSTEAD and (bench not in by_name or (fault is not None and fault.kind == "wrong")):
            bench, each = INSTEAD[unit]
        if unit == "l2" and not all(name in metrics for name in names):
            names = L2_ITSELF
        if unit == "l1" and WAVEFRONTS not in metrics:
            names = (PASSES,)
        rate = by_name.get(bench)
        measured = rate is not None and rate.operation_s and rate.operation_above_idle_j is not None
        if measured and all(name in metrics for name in names):
            found[unit] = (bench, names, each)
    return found


def make_profile(name: str, values: Mapping[str, float], results: Sequence[MicroRow], idle_w: float) -> KernelProfile:
    """Compute a kernel's work by unit."""
    by_name, work = keep_first_rounds(results), {}
    for unit, (bench, names, each) in list_usable_units(results, values).items():
        result = by_name[bench]
        if unit == "tensor":
            seconds = values[TIME] * values[names[0]] / (SCHEDULERS * values[names[1]]) if values[names[1]] else 0.0
            work[unit] = UnitWork(seconds, seconds * max((result.power_w or 0.0) - idle_w, 0.0))
            continue
        amount = sum(values[metric] for metric in names)
        if unit == "l1":
            amount = count_passes(values)
        if unit == "launch":
            amount = values[names[0]] * values[names[1]] / 32.0
        slower, share = 1.0, 1.0  # seconds and joules of a count over those of the microbenchmark's
        if unit in ELSEWHERE:
            share = 0.0
        elif unit == "dram":
            slower = access_ratio(values, results)[0] * turn_around_ratio(values, by_name)
        elif unit == "l1" and (extra := count_conflicts(values)) is not None:
            ratio = curve_ratio(results, "conflicts", extra, 0.0)
            cheaper = 1.0 - 1.0 / (ratio[1] * (1.0 + extra)) if ratio else 0.0
            share = 1.0 - cheaper * values[PASSES] / amount
        elif unit in ARITHMETIC and (active := count_active_threads(values)) is not None:
            ratio = curve_ratio(results, "divergence", 32.0 / active, 1.0)
            share = min(active / 32.0 / ratio[1], 1.0) if ratio else 1.0
        elif unit == "l2" and READ in values and WRITTEN in values:
            share = max(1.0 - (values[READ] + values[WRITTEN]) / amount, 0.0) if amount > 0.0 else 1.0
        seconds = each * amount * slower * (result.operation_s or 0.0)
        work[unit] = UnitWork(seconds, each * amount * share * (result.operation_above_idle_j or 0.0))
    busiest = max((unit for unit in work if unit != "issue"), key=lambda unit: work[unit].seconds, default="")
    rest_s = combine_units_s({unit: w for unit, w in work.items() if unit != busiest})
    if combine_units_s(work) > values[TIME] > rest_s:  # it is faster here than its microbenchmark
        fitted_s = (values[TIME] ** EXPONENT - rest_s**EXPONENT) ** (1.0 / EXPONENT)
        work[busiest] = UnitWork(fitted_s, work[busiest].joules)
    return KernelProfile(name, values[TIME], work, values, idle_w)


def count_passes(values: Mapping[str, float]) -> float:
    """Return the passes of the L1: those through its data, or the lookup of all sectors where that takes longer."""
    sectors = values.get(SECTORS, 0.0) + values.get(STORED_SECTORS, 0.0)
    shared = values.get(PASSES, 0.0)
    return max(values.get(WAVEFRONTS, shared), shared + sectors / SECTORS_A_PASS)


def count_conflicts(values: Mapping[str, float]) -> float | None:
    """Count the conflicts per access of shared memory."""
    if PASSES not in values or EXTRA_PASSES not in values:
        return None
    passes, extra = values[PASSES], values[EXTRA_PASSES]
    return min(extra / (passes - extra), 31.0) if passes > extra > 0.0 else None


def count_active_threads(values: Mapping[str, float]) -> float | None:
    """Count the threads of a warp that take part, without branches, which whole warps execute."""
    all_names = ("smsp__thread_inst_executed.sum", INSTRUCTIONS)
    control = values.get("sm__sass_thread_inst_executed_op_control_pred_on.sum", 0.0)
    active = values.get(ACTIVE)
    if all(name in values for name in all_names):
        threads, warps = (values[name] for name in all_names)
        if warps > control / 32.0 and threads > control:
            active = (threads - control) / (warps - control / 32.0)
    return min(max(active, 1.0), 32.0) if active and active > 0.0 else None


def turn_around_ratio(values: Mapping[str, float], by_name: Mapping[str, MicroRow]) -> float:
    """Return the time of a DRAM byte in the kernel's mix of reads and writes over that of a byte read."""
    measured = [by_name.get("dram_read"), find_best_copy(by_name.values()), by_name.get("dram_write")]
    each_s = [r.operation_s for r in measured if r is not None and r.operation_s]
    total = values[READ] + values[WRITTEN]
    if len(each_s) < len(measured) or total <= 0.0:
        return 1.0
    return max(float(np.interp(values[WRITTEN] / total, (0.0, 0.5, 1.0), each_s)) / each_s[0], 1.0)


def mean_access_byte(values: Mapping[str, float]) -> float | None:
    """Return the mean bytes of a thread's access to memory."""
    counts = {size: values.get(metric, 0.0) for size, metric in SIZE_METRICS.items()}
    total = sum(counts.values())
    return sum(size * n for size, n in counts.items()) / total if total > 0.0 else None


def reads_table(values: Mapping[str, float]) -> bool:
    """Return whether warps read scattered words of a small set again and again: no order brings these together."""
    used_byte = 32.0 * values.get(REQUESTS, 0.0) * (mean_access_byte(values) or 4.0)
    return values.get(SECTORS, 0.0) > 1.5 * used_byte / 32.0 and used_byte > TABLE_REUSE * values.get(FROM_L2, np.inf)


def stretch_byte(values: Mapping[str, float]) -> float | None:
    """Return the bytes between neighbouring threads where each walks along a stretch of its own; None elsewhere.

    Their sectors come from the L1 again while they walk, so that the warp's accesses reach as far as wide ones.
    """
    mean, sectors = mean_access_byte(values), values.get(SECTORS, 0.0)
    each = sectors / max(values.get(REQUESTS, 0.0), 1.0)
    walks = values.get(HITS, 0.0) >= 0.5 * sectors and not reads_table(values)
    return each if mean and each > 1.5 * mean and walks else None


def access_ratio(values: Mapping[str, float], results: Sequence[MicroRow]) -> tuple[float, float]:
    """Return time and energy of a DRAM byte at the kernel's mean access size over those at 16 bytes a thread."""
    mean = mean_access_byte(values)
    if mean is not None:
        mean = min(max(mean, stretch_byte(values) or 0.0), 16.0)
    found = curve_ratio(results, "access", 16.0, mean, by_byte=True) if mean is not None else None
    return (max(found[0], 1.0), max(found[1], 1.0)) if found else (1.0, 1.0)


def curve_ratio(
    results: Sequence[MicroRow], name: str, at: float, best: float, by_byte: bool = False
) -> tuple[float, float] | None:
    """Return time and energy of an operation, or of a byte, at ``best`` over those at ``at`` on a curve."""
    points = [r for r in find_curve(results, name) if r.operation_s and r.operation_above_idle_j]
    if len(points) < 2:
        return None
    x, each = [p.at for p in points], [p.at if by_byte else 1.0 for p in points]
    time = [(p.operation_s or 0.0) / n for p, n in zip(points, each, strict=True)]
    energy = [(p.operation_above_idle_j or 0.0) / n for p, n in zip(points, each, strict=True)]
    found = [float(np.interp(best, x, y) / np.interp(at, x, y)) for y in (time, energy)]
    return found[0], found[1]


def find_idle_power_w(results: Sequence[MicroRow]) -> float:
    """Return the median idle power with a context open, from the rows' own values or from idle rows."""
    known = [r.idle_power_w for r in results if r.idle_power_w]
    known = known or [r.power_w for r in results if r.group == "idle" and r.power_w]
    if not known:
        raise BadInput("the microbenchmark results hold no idle power; measure again with an idle row.")
    return float(np.median(known))


def read_unit_metrics() -> list[str]:
    """Read every metric of ``microbench_metrics.csv``."""
    return [row["metric"] for row in read_shipped_table("wattcast.microbench", "microbench_metrics.csv")]


def collect_unit_counters(out: Path, budget_s: float, only: list[str], before: Path | None = None) -> dict[str, int]:
    """Run the suite under ``ncu`` within ``budget_s``, one row a kernel into ``microbench_counters.jsonl``.

    What ``before`` has counters of, as the kernels are today, comes last.
    """
    nsight_counters.find_ncu()
    began_s = time.monotonic()
    names = tuple(name for name in only if name != "multimedia")
    if names or not only:  # no compiling may happen under the profiler
        compiled = CompiledKernels(CudaDevice.open().architecture, cache_folder(), names)
        compiled.start(2 * worker_count())
        compiled.finish(budget_s / 2)
    verb = ["microbench", *(["--only", ",".join(only)] if only else [])]
    verb += ["--from", str(before)] if before is not None else []
    left_s, raw = budget_s - (time.monotonic() - began_s), out / "microbench_counters.csv"
    lines, metrics = nsight_counters.run_target(raw, verb, read_unit_metrics(), left_s, WRITE_S)
    journal = Journal(out / "microbench_counters.jsonl")
    have = read_counted_ids(out)
    rows = [row for row in read_unit_table(lines) if row["id"] not in have]
    for row in rows:
        journal.append(row)
    return {"kernels": len(rows), "metrics": metrics}


def read_counted_ids(out: Path) -> set[str]:
    """Return the kernels whose counters are on file for their present version."""
    path, now = out / "microbench_counters.jsonl", {b.name: b.version for b in list_benchmarks()}
    rows = read_lines(path) if path.exists() else ()
    return {str(row["id"]) for row in rows if int(row.get("version", 1)) >= now.get(str(row["id"]), 1)}


def read_unit_table(lines: Iterable[str]) -> Iterable[Plain]:
    """Read one row a kernel of ``ncu``'s table, by the kernel's name."""
    versions = {b.name: b.version for b in list_benchmarks() if b.version > 1}
    for row, metrics in nsight_counters.read_ncu_rows(lines, read_unit_metrics()):
        name = (row.get("Kernel Name") or "").split("(")[0].strip()
        if not name:
            continue
        found: Plain = {"id": name.removeprefix("media_"), "kernel": name}
        found |= {"version": versions[name]} if name in versions else {}
        found |= {"frames": COUNTED_FRAMES} if name.startswith("media_") else {}
        yield found | {"metrics": metrics}


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
