"""Collect counters of kernels, and express their work in seconds and joules of each unit, at
measured rates.

Units work at the same time but never overlap perfectly, so the time that they need together is

    N = max((Σ u^3)^(1/3), issue)

with the seconds u of each unit and the slots that all instructions take to issue. Where that is
more than the kernel took, its busiest unit was faster than in the microbenchmark and gets the
seconds that are left to it. Three counts need care, as the H200's own counters showed: a
conflicting pass of shared memory costs less energy than a full one, an instruction of a diverged
warp less than one of 32 threads (both from the measured curves), and the energy of a DRAM byte
already contains its way through L2.

``collect_unit_counters`` has Nsight Compute count every microbenchmark and multimedia workload.
``ncu`` runs this package again (``microbench --target``), which launches each kernel once warm and
once counted. Kernels bear the names of their benchmarks, so the table needs no ranges. Nothing that
is timed runs under the profiler, and clocks and caches are left alone."""

from __future__ import annotations

import time
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wattcast.core import BadInput
from wattcast.core.measured_rows import Plain
from wattcast.core.regular_files import read_shipped_table
from wattcast.core.row_journals import Journal, read_lines
from wattcast.lab.campaigns import nsight_counters
from wattcast.lab.microbench.benchmark_kernels import (
    DeviceBuffers,
    calibrate_iterations,
    prepare_benchmark,
)
from wattcast.lab.microbench.benchmark_suite import find_benchmarks, list_benchmarks
from wattcast.lab.microbench.microbench_campaign import CompiledKernels, worker_count
from wattcast.lab.microbench.microbench_results import (
    MicroRow,
    compute_costs,
    find_best_copy,
    find_curve,
    find_fault,
    keep_first_rounds,
)
from wattcast.lab.microbench.unit_source import Benchmark
from wattcast.measure.cuda_device import (
    CudaDevice,
    CudaError,
    DeviceFault,
)
from wattcast.measure.steady_state import say

TIME = "gpu__time_duration.sum"
METRICS = {
    row["counter"]: row["metric"]
    for row in read_shipped_table("wattcast.lab.microbench", "profile_counters.csv")
}
SCHEDULERS = 4  # the tensor pipe's cycles are counted on each
ARITHMETIC = ("fp32", "fp64", "int", "special", "half")
PIPES = tuple(f"pipe_{name}" for name in "alu fma fp64 xu lsu adu cbu uniform".split())
FULL_SET_PIPES = tuple(f"pipe_{name}" for name in "alu fma fp64 xu lsu".split())
ACCESSES = {size: f"accesses_{size}" for size in (1, 2, 4, 8, 16)}  # by bytes of a thread
TABLE_REUSE = 4.0  # uses of a byte that L2 gave, from which on reads are of a table
SECTORS_A_PASS = 4.0  # that the L1 looks up in the time of one pass through its data
OTHER_CLOCK = 0.1  # relative difference of clocks from which on a profile ran at another one
OCCUPANCY_LIMIT = "launch__occupancy_limit_"  # blocks that fit on an SM, by what limits them
SPILLING = "derived__local_spilling_requests"  # of the full set: the others index arrays
FAR_STALLS = ("long_scoreboard", "lg_throttle")
NO_STALLS = ("selected", "not_selected")
STALL_START = "smsp__average_warps_issue_stalled_"
STALL_END = "_per_issue_active.ratio"
FAR_SHARE = 0.7  # of the waiting that is for memory beyond the L1, where the profile does not say
FUNCTION_LENGTH = 40.0  # fp64 instructions of a function at most
MIXED_LENGTH = 2.0  # fp64 instructions for one conversion at most, in code that mixes formats
ELSEWHERE = ("issue", "products", "launch")  # their joules are counted with other units
EXPONENT = 3.0  # of units that work at the same time
QUEUED_SHARE = 0.5  # of the time that a unit is busy, from which on waiting is queueing
BUFFER_BYTE = 512 << 20  # ncu saves and restores what a kernel may write
COUNTED_S = 4e-4  # of a counted launch
COUNTED_FRAMES = 8
WRITE_S = 15.0  # ncu writes its table after the program has ended


class KernelCounters(dict[str, float]):
    """Hold what was counted of a kernel, by the names of ``profile_counters.csv``; what was not
    counted is zero.
    """

    def __missing__(self, name: str) -> float:
        return 0.0

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> KernelCounters:
        """Take the metrics of a profiler; ``stalled_x`` are the waits for x of an instruction."""
        counters = cls()
        for name, metric in METRICS.items():
            if metric in metrics:
                counters[name] = metrics[metric]
        for metric, value in metrics.items():
            if metric.startswith(OCCUPANCY_LIMIT):
                counters["resident_blocks"] = min(counters.get("resident_blocks", np.inf), value)
            elif metric.startswith(STALL_START) and metric.endswith(STALL_END):
                # the full set also has samples of the same reasons, which are counts
                reason = metric.removeprefix(STALL_START).removesuffix(STALL_END)
                counters[f"stalled_{reason}"] = value
        if SPILLING in metrics:
            counters["spilling_requests"] = metrics[SPILLING]
        elapsed = metrics.get("sm__cycles_elapsed.max", 0.0)
        if elapsed > 0.0 and "sm_cycles" in counters:
            counters["sm_count"] = float(round(counters["sm_cycles"] / elapsed))
        return counters

    def has(self, *names: str) -> bool:
        """Tell whether all of these were counted."""
        return self.keys() >= set(names)

    @property
    def passes(self) -> float:
        """Passes of the L1: those through its data, or the lookup of all sectors where that takes
        longer.
        """
        sectors = self["loaded_sectors"] + self["stored_sectors"]
        shared = self["shared_passes"]
        return max(self.get("wavefronts", shared), shared + sectors / SECTORS_A_PASS)

    @property
    def least_passes(self) -> float:
        """Passes through the L1 that all accesses to global memory take at least, 128 bytes in
        each.
        """
        return (self["loads"] + self["stores"]) * max((self.access_byte or 4.0) / 4.0, 1.0)

    @property
    def conflicts(self) -> float | None:
        """Conflicts per access of shared memory."""
        passes = self["shared_passes"]
        extra = self["extra_passes"]
        return min(extra / (passes - extra), 31.0) if passes > extra > 0.0 else None

    @property
    def active(self) -> float | None:
        """Threads of a warp that take part, without branches, which whole warps execute."""
        branches = self["branches_of_threads"]
        active = self["active_threads"]
        if self.has("thread_instructions", "instructions"):
            threads = self["thread_instructions"] - branches
            warps = self["instructions"] - branches / 32.0
            active = threads / warps if warps > 0.0 and threads > 0.0 else active
        return min(max(active, 1.0), 32.0) if active > 0.0 else None

    @property
    def access_byte(self) -> float | None:
        """Mean bytes of a thread's access to memory."""
        accesses = 0.0
        accessed_byte = 0.0
        for size, counter in ACCESSES.items():
            accesses += self[counter]
            accessed_byte += size * self[counter]
        return accessed_byte / accesses if accesses > 0.0 else None

    @property
    def reads_table(self) -> bool:
        """Whether warps read scattered words of a small set again and again: no order brings these
        together.
        """
        used_byte = 32.0 * self["loads"] * (self.access_byte or 4.0)
        scattered = self["loaded_sectors"] > 1.5 * used_byte / 32.0
        return scattered and used_byte > TABLE_REUSE * self.get("l2_read", np.inf)

    @property
    def reuse(self) -> float:
        """Uses of a byte that came to a multiprocessor, by loads of global memory."""
        used_byte = 32.0 * self["loads"] * (self.access_byte or 4.0)
        fetched_byte = self["l2_read"]
        return used_byte / fetched_byte if fetched_byte > 0.0 else 1.0

    @property
    def stretch_byte(self) -> float | None:
        """Bytes between neighbouring threads where each walks along a stretch of its own; None
        elsewhere.

        Their sectors come from the L1 again while they walk, so that the warp's accesses reach as
        far as wide ones."""
        mean = self.access_byte
        sectors = self["loaded_sectors"]
        load_byte = sectors / max(self["loads"], 1.0)
        walks = self["hit_sectors"] >= 0.5 * sectors and not self.reads_table
        return load_byte if mean and load_byte > 1.5 * mean and walks else None

    @property
    def far_share(self) -> float:
        """Share of waiting that is for memory beyond the L1."""
        far = 0.0
        every = 0.0
        for name, share in self.items():
            stall, prefix, reason = name.rpartition("stalled_")
            if not prefix or stall or reason in NO_STALLS:
                continue
            every += share
            if reason in FAR_STALLS:
                far += share
        return far / every if every > 0.0 else FAR_SHARE

    @property
    def constants(self) -> float:
        """Instructions that no pipe counts: they put 8-byte constants together."""
        if not self.has("instructions", *PIPES):
            return 0.0
        return max(self["instructions"] - sum(self[name] for name in PIPES), 0.0)

    @property
    def double_constants(self) -> float:
        """Instructions that put 8-byte constants together, of a kernel in double precision.

        ``--set full`` does not count all pipes: there, what neither those that it counts nor
        branches explain."""
        if self.has(*PIPES) or not self.has("instructions", *FULL_SET_PIPES):
            return self.constants
        others = sum(self[name] for name in FULL_SET_PIPES) + self["branches_of_threads"] / 32.0
        return max(self["instructions"] - others, 0.0)

    @property
    def converted(self) -> float:
        """Conversions, in instructions of warps, that the special unit executed.

        Where they were not counted, those of a kernel with few fp64 instructions for each of the
        special unit are taken for conversions: functions in software have more."""
        if not self.has("conversions_of_threads"):
            is_mixed = 0.0 < self["pipe_fp64"] < MIXED_LENGTH * self["pipe_xu"]
            return self["pipe_xu"] if is_mixed else 0.0
        return min(self["conversions_of_threads"] / 32.0, self["pipe_xu"])

    @property
    def calls_functions(self) -> bool:
        """Whether fp64 instructions are functions in software, which begin with one of the special
        unit.
        """
        return 0.0 < self["pipe_fp64"] < FUNCTION_LENGTH * (self["pipe_xu"] - self.converted)


@dataclass(frozen=True)
class UnitWork:
    """What a unit had to do in a kernel: seconds at its measured rate, joules above idle."""

    seconds: float
    joules: float

    def scaled(
        self,
        time: float,
        energy: float | None = None,
    ) -> UnitWork:
        """Return the work with time and energy multiplied, both by ``time`` where ``energy`` is
        left out.
        """
        return UnitWork(self.seconds * time, self.joules * (time if energy is None else energy))


def combine_units_s(
    work: Mapping[str, UnitWork],
    exponent: float = EXPONENT,
    issue_overlaps: bool = True,
) -> float:
    """Return the seconds N that all units need together; products run on half of the fp32 pipe.

    Slots of issue bound them from below, or count as one more unit."""
    unit_s = {unit: w.seconds for unit, w in work.items()}
    issue_s = unit_s.pop("issue", 0.0)
    if "products" in unit_s:
        unit_s["fp32"] = max(unit_s.get("fp32", 0.0), unit_s.pop("products"))
    most_s = max(unit_s.values(), default=0.0)
    if most_s == 0.0:
        return issue_s
    if not issue_overlaps:
        unit_s["issue"] = issue_s
    powers = [(seconds / most_s) ** exponent for seconds in unit_s.values()]
    together_s = float(most_s * sum(powers) ** (1.0 / exponent))
    return max(together_s, issue_s)


@dataclass(frozen=True)
class KernelProfile:
    """One kernel: its time, its work by unit, and the counters of its profile."""

    name: str
    time_s: float
    work: Mapping[str, UnitWork]
    counters: KernelCounters
    idle_power_w: float

    @property
    def busiest(self) -> str:
        """The unit that sets the time, as far as the profile tells."""
        units = [unit for unit in self.work if unit not in ELSEWHERE]
        return max(units, key=lambda unit: self.work[unit].seconds)

    @property
    def busy_share(self) -> float:
        """Share of the time that the busiest unit, or the issue of instructions, works."""
        return max(w.seconds for w in self.work.values()) / self.time_s

    @property
    def energy_j(self) -> float:
        """Energy of the kernel: idle power over its time, and its units' joules."""
        return self.idle_power_w * self.time_s + sum(work.joules for work in self.work.values())


@dataclass(frozen=True)
class UnitCount:
    """How the work of a unit is counted: the microbenchmark with its rate and energy, the counters
    of its operations, and the operations of one count.
    """

    benchmark: str
    counters: tuple[str, ...]
    operations: float


# While it starts and ends a warp, an SM could issue 80 instructions, by thin kernels of the pairs.
UNITS = {
    row["unit"]: UnitCount(
        row["benchmark"], tuple(row["counters"].split()), float(row["operations"])
    )
    for row in read_shipped_table("wattcast.lab.microbench", "unit_counts.csv")
}
# What counts a unit where its benchmark is missing or known to be wrong
INSTEAD = {"l2": ("bulk_copy_l2", 1 / 8192.0)}


def list_usable_units(results: Sequence[MicroRow], counted: Container[str]) -> dict[str, UnitCount]:
    """List units whose counts the profile has and whose rate was measured."""
    by_name = keep_first_rounds(results)
    units = {}
    for unit, count in UNITS.items():
        usable = _adapt_count(unit, count, by_name, counted)
        rate = by_name.get(usable.benchmark)
        if rate is None or not rate.operation_s or rate.operation_above_idle_j is None:
            continue
        if _are_counted(usable.counters, counted):
            units[unit] = usable
    return units


def _adapt_count(
    unit: str,
    count: UnitCount,
    by_name: Mapping[str, MicroRow],
    counted: Container[str],
) -> UnitCount:
    """Return how a unit is counted with the benchmarks and counters that are there."""
    if unit in INSTEAD and _is_missing_or_wrong(by_name.get(count.benchmark)):
        benchmark, operations = INSTEAD[unit]
        count = replace(count, benchmark=benchmark, operations=operations)
    if unit == "l2" and not _are_counted(count.counters, counted):
        # counts what goes from one half of the L2 to the other again
        return replace(count, counters=("l2_itself",))
    if unit == "l1" and "wavefronts" not in counted:
        return replace(count, counters=("shared_passes",))
    return count


def _are_counted(counters: Iterable[str], counted: Container[str]) -> bool:
    return all(counter in counted for counter in counters)


def _is_missing_or_wrong(result: MicroRow | None) -> bool:
    return result is None or find_fault(result) is not None


def make_profile(
    name: str,
    values: Mapping[str, float],
    results: Sequence[MicroRow],
    idle_w: float,
) -> KernelProfile:
    """Compute a kernel's work by unit, from its metrics as the profiler names them."""
    counters = KernelCounters.from_metrics(values)
    time_s = counters["time"]
    by_name = keep_first_rounds(results)
    work = {}
    for unit, count in list_usable_units(results, counters).items():
        result = by_name[count.benchmark]
        if unit == "tensor":
            work[unit] = _tensor_work(counters, result, idle_w)
        else:
            work[unit] = _unit_work(unit, count, counters, results)
    units = [unit for unit in work if unit != "issue"]
    busiest = max(units, key=lambda unit: work[unit].seconds, default="")
    other_work = dict(work)
    other_work.pop(busiest, None)
    others_s = combine_units_s(other_work)
    if combine_units_s(work) > time_s > others_s:  # it is faster here than its microbenchmark
        fitted_s = (time_s**EXPONENT - others_s**EXPONENT) ** (1.0 / EXPONENT)
        work[busiest] = UnitWork(fitted_s, work[busiest].joules)
    return KernelProfile(
        name,
        time_s,
        work,
        counters,
        idle_w,
    )


def _tensor_work(
    counters: KernelCounters,
    result: MicroRow,
    idle_w: float,
) -> UnitWork:
    """Return the work of tensor cores: the cycles in which they are active, at the microbenchmark's
    watts above idle.
    """
    cycles = counters["sm_cycles"]
    seconds = 0.0
    if cycles:
        seconds = counters["time"] * counters["tensor_cycles"] / (SCHEDULERS * cycles)
    above_idle_w = max((result.power_w or 0.0) - idle_w, 0.0)
    return UnitWork(seconds, seconds * above_idle_w)


def _unit_work(
    unit: str,
    count: UnitCount,
    counters: KernelCounters,
    results: Sequence[MicroRow],
) -> UnitWork:
    """Return the seconds and joules of a unit's operations at the rate and energy of its
    microbenchmark.
    """
    by_name = keep_first_rounds(results)
    result = by_name[count.benchmark]
    amount = sum(counters[counter] for counter in count.counters)
    if unit == "l1":
        amount = counters.passes
    elif unit == "launch":
        amount = counters["grid"] * counters["block"] / 32.0
    if unit == "dram":
        # device memory has a clock of its own
        slower = access_ratio(counters, results)[0] * turn_around_ratio(counters, by_name)
    else:
        slower = clock_ratio(counters, result)
    operations = count.operations * amount
    energy_share = _energy_share(unit, amount, counters, results)
    return UnitWork(
        operations * slower * (result.operation_s or 0.0),
        operations * energy_share * (result.operation_above_idle_j or 0.0),
    )


def _energy_share(
    unit: str,
    amount: float,
    counters: KernelCounters,
    results: Sequence[MicroRow],
) -> float:
    """Return the joules of a count over those of the microbenchmark's."""
    if unit in ELSEWHERE:
        return 0.0
    if unit == "l1":
        return _conflict_energy_share(amount, counters, results)
    if unit in ARITHMETIC and counters.active is not None:
        active = counters.active
        ratio = curve_ratio(results, "divergence", 32.0 / active, 1.0)
        return min(active / 32.0 / ratio.energy, 1.0) if ratio else 1.0
    if unit == "l2" and counters.has("dram_read", "dram_written") and amount > 0.0:
        dram_amount = counters["dram_read"] + counters["dram_written"]
        return max(1.0 - dram_amount / amount, 0.0)
    return 1.0


def _conflict_energy_share(
    amount: float,
    counters: KernelCounters,
    results: Sequence[MicroRow],
) -> float:
    """Return what the passes of the L1 cost where conflicting ones cost less than full ones."""
    conflicts = counters.conflicts
    if conflicts is None:
        return 1.0
    ratio = curve_ratio(results, "conflicts", conflicts, 0.0)
    if ratio is None:
        return 1.0
    cheaper = 1.0 - 1.0 / (ratio.energy * (1.0 + conflicts))
    return 1.0 - cheaper * counters["shared_passes"] / amount


def clock_ratio(counters: KernelCounters, result: MicroRow) -> float:
    """Return the clock of a microbenchmark over that of a profile, 1 where they are near.

    Nsight Compute locks the clock to its base unless ``--clock-control none`` is given, at which
    units on the core clock need longer."""
    sms = counters["sm_count"]
    time_s = counters["time"]
    bench_hz = result.effective_clock_hz or result.sm_clock_hz
    if not (sms > 0.0 and time_s > 0.0 and bench_hz and counters["sm_cycles"] > 0.0):
        return 1.0
    ratio = bench_hz * time_s * sms / counters["sm_cycles"]
    return ratio if abs(ratio - 1.0) > OTHER_CLOCK else 1.0


def turn_around_ratio(counters: KernelCounters, by_name: Mapping[str, MicroRow]) -> float:
    """Return the time of a DRAM byte in the kernel's mix of reads and writes over that of a byte
    read.
    """
    operation_s = []
    for r in (
        by_name.get("dram_read"),
        find_best_copy(by_name.values()),
        by_name.get("dram_write"),
    ):
        if r is None or not r.operation_s:
            return 1.0
        operation_s.append(r.operation_s)
    total = counters["dram_read"] + counters["dram_written"]
    if total <= 0.0:
        return 1.0
    mixed_s = float(np.interp(counters["dram_written"] / total, (0.0, 0.5, 1.0), operation_s))
    return max(mixed_s / operation_s[0], 1.0)


class CurveRatio(NamedTuple):
    """Time and energy at one place of a curve over those at another."""

    time: float
    energy: float


def access_ratio(counters: KernelCounters, results: Sequence[MicroRow]) -> CurveRatio:
    """Return time and energy of a DRAM byte at the kernel's mean access size over those at 16 bytes
    a thread.
    """
    mean = counters.access_byte
    if mean is None:
        return CurveRatio(1.0, 1.0)
    at = min(max(mean, counters.stretch_byte or 0.0), 16.0)
    ratio = curve_ratio(
        results,
        "access",
        16.0,
        at,
        by_byte=True,
    ) or CurveRatio(1.0, 1.0)
    return CurveRatio(max(ratio.time, 1.0), max(ratio.energy, 1.0))


def curve_ratio(
    results: Sequence[MicroRow],
    name: str,
    at: float,
    best: float,
    by_byte: bool = False,
) -> CurveRatio | None:
    """Return time and energy of an operation, or of a byte, at ``best`` over those at ``at`` on a
    curve.
    """
    points = [r for r in find_curve(results, name) if r.operation_s and r.operation_above_idle_j]
    if len(points) < 2:
        return None
    costs = compute_costs(points, by_byte)
    best_s, at_s = np.interp([best, at], costs.at, costs.time_s)
    best_j, at_j = np.interp([best, at], costs.at, costs.above_idle_j)
    return CurveRatio(float(best_s / at_s), float(best_j / at_j))


def find_idle_power_w(results: Sequence[MicroRow]) -> float:
    """Return the median idle power with a context open, from the rows' own values or from idle
    rows.
    """
    idle_w = [r.idle_power_w for r in results if r.idle_power_w]
    idle_w = idle_w or [r.power_w for r in results if r.group == "idle" and r.power_w]
    if not idle_w:
        raise BadInput(
            "the microbenchmark results hold no idle power; measure again with an idle row."
        )
    return float(np.median(idle_w))


def _list_benchmark_names(only: list[str]) -> list[str]:
    """Return the names that are of benchmarks, not of the multimedia workloads."""
    return [name for name in only if name != "multimedia"]


def read_unit_metrics() -> list[str]:
    """Read every metric of ``microbench_metrics.csv``."""
    rows = read_shipped_table("wattcast.lab.microbench", "microbench_metrics.csv")
    return [row["metric"] for row in rows]


def collect_unit_counters(
    out: Path,
    budget_s: float,
    only: list[str],
    before: Path | None = None,
) -> dict[str, int]:
    """Run the suite under ``ncu`` within ``budget_s``, one row a kernel into
    ``microbench_counters.jsonl``.

    What ``before`` has counters of, as the kernels are today, comes last.
    """
    nsight_counters.find_ncu()
    began_s = time.monotonic()
    names = _list_benchmark_names(only)
    if names or not only:  # no compiling may happen under the profiler
        compiled = CompiledKernels(CudaDevice.open().architecture)
        compiled.start(find_benchmarks(names), 2 * worker_count())
        compiled.stop(budget_s / 2)
    verb = ["microbench", *(["--only", ",".join(only)] if only else [])]
    verb += ["--from", str(before)] if before is not None else []
    left_s = budget_s - (time.monotonic() - began_s)
    raw = out / "microbench_counters.csv"
    lines, metrics = nsight_counters.run_target(
        raw,
        verb,
        read_unit_metrics(),
        left_s,
        WRITE_S,
    )
    journal = Journal(out / "microbench_counters.jsonl")
    have = read_counted_ids(out)
    rows = [row for row in read_unit_table(lines) if row["id"] not in have]
    for row in rows:
        journal.append(row)
    return {"kernels": len(rows), "metrics": metrics}


def read_counted_ids(out: Path) -> set[str]:
    """Return the kernels whose counters are on file for their present version."""
    path = out / "microbench_counters.jsonl"
    versions = {benchmark.name: benchmark.version for benchmark in list_benchmarks()}
    counted_ids = set()
    for row in read_lines(path, missing_ok=True):
        name = str(row["id"])
        if int(row.get("version", 1)) >= versions.get(name, 1):
            counted_ids.add(name)
    return counted_ids


def read_unit_table(lines: Iterable[str]) -> Iterable[Plain]:
    """Read one row a kernel of ``ncu``'s table, by the kernel's name."""
    versions = {benchmark.name: benchmark.version for benchmark in list_benchmarks()}
    for row, metrics in nsight_counters.read_ncu_rows(lines, read_unit_metrics()):
        name = (row.get("Kernel Name") or "").split("(")[0].strip()
        if not name:
            continue
        fields: Plain = {"id": name.removeprefix("media_"), "kernel": name}
        if versions.get(name, 1) > 1:
            fields["version"] = versions[name]
        if name.startswith("media_"):
            fields["frames"] = COUNTED_FRAMES
        fields["metrics"] = metrics
        yield fields


def count_kernels(
    out: Path,
    budget_s: float,
    only: list[str],
    before: Path | None = None,
) -> int:
    """Launch every kernel under ``ncu``; return how many were counted."""
    deadline_s = time.monotonic() + budget_s
    device = CudaDevice.open()
    counted = 0
    if not only or "multimedia" in only:
        counted = _count_multimedia(device, read_counted_ids(out))
    compiled = CompiledKernels(device.architecture)
    buffers = DeviceBuffers.allocate(device, BUFFER_BYTE)
    chosen = _choose_benchmarks(device, out, only, before)
    for place, benchmark in enumerate(chosen):
        if time.monotonic() > deadline_s:
            say(f"counters: budget spent after {place} of {len(chosen)} kernels")
            break
        try:
            ready = prepare_benchmark(benchmark, buffers, compiled.cubin(benchmark))
            _count_launch(device, partial(ready.launch, calibrate_iterations(ready, COUNTED_S)))
            ready.discard()
            counted += 1
        except DeviceFault as error:
            say(f"counters: {benchmark.name}: {error}")
            break
        except CudaError as error:
            say(f"counters: {benchmark.name}: {error}")
    return counted


def _choose_benchmarks(
    device: CudaDevice,
    out: Path,
    only: list[str],
    before: Path | None,
) -> list[Benchmark]:
    """Return the benchmarks to count, those without counters in ``before`` first."""
    names = _list_benchmark_names(only)
    if only and not names:
        return []
    counted_ids = read_counted_ids(out)
    countable = []
    for benchmark in find_benchmarks(names):
        is_able = benchmark.supported(device.architecture) and not benchmark.timed
        if is_able and benchmark.name not in counted_ids:
            countable.append(benchmark)
    counted_before = read_counted_ids(before) if before is not None else set()
    return order_benchmarks(countable, counted_before)


def _count_launch(device: CudaDevice, launch: Callable[[], None]) -> None:
    device.synchronize()
    device.profile(True)
    launch()
    device.synchronize()
    device.profile(False)


def order_benchmarks(benchmarks: Iterable[Benchmark], counted_before: set[str]) -> list[Benchmark]:
    """Sort benchmarks: those without counters first, several ways to the same end last of these."""
    return sorted(benchmarks, key=lambda b: (b.name in counted_before, b.once))


def _count_multimedia(device: CudaDevice, have: set[str]) -> int:
    from wattcast.lab.microbench.multimedia_clip import NAMES, MediaClip

    try:
        clip = MediaClip.make(device, COUNTED_FRAMES)
        todo = [name for name in NAMES if name not in have]
        for name in todo:
            clip.enqueue(name)
            _count_launch(device, partial(clip.enqueue, name))
        for address in (clip.frames_at, clip.result, *clip.tables.values()):
            device.free(address)
        return len(todo)
    except DeviceFault:
        raise
    except Exception as error:
        say(f"counters: multimedia: {error}")
        return 0
