"""Judge which bottlenecks of a profiled kernel matter on a device, and what removing each would change (paper 001).

The work of a kernel on each unit is expressed in seconds at the rates that microbenchmarks reached and in joules
above idle. Three counts need care, as the H200's own counters showed: a conflicting pass of shared memory costs less
than a full one, an instruction of a diverged warp less than one of 32 threads (both from the measured curves), and
the energy of a DRAM byte already contains its way through L2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast.core.errors import BadInput, bad_value
from wattcast.counter_models.profiler_counters import read_ncu_metrics
from wattcast.microbench.microbench_results import MicroRow, find_curve, find_fault, keep_first_rounds

TIME = "gpu__time_duration.sum"
SCHEDULERS = 4  # the tensor pipe's cycles are counted on each
ARITHMETIC = ("fp32", "fp64", "int", "special", "half")
PASSES = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
EXTRA_PASSES = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
ACTIVE = "smsp__thread_inst_executed_per_inst_executed.ratio"
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2 = ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum")  # as the L2 benchmark counts
L2_ITSELF = ("lts__t_bytes.sum",)  # counts what goes from one half of the L2 to the other again
TENSOR = ("sm__pipe_tensor_cycles_active.sum", "sm__cycles_elapsed.sum")
# unit: the microbenchmark with its rate and energy, the metrics that count its operations, operations of one count
UNITS: dict[str, tuple[str, tuple[str, ...], float]] = {
    "dram": ("dram_copy", DRAM, 1 / 16.0),
    "l2": ("l2_read", L2, 1 / 16.0),
    "shared": ("conflicts_0", (PASSES,), 32.0),
    "fp32": ("fp32_fma", ("sm__inst_executed_pipe_fma.sum",), 32.0),
    "fp64": ("fp64_fma", ("sm__inst_executed_pipe_fp64.sum",), 32.0),
    "int": ("int32_add", ("sm__inst_executed_pipe_alu.sum",), 32.0),
    "special": ("fp32_rcp", ("sm__inst_executed_pipe_xu.sum",), 32.0),
    "half": ("fp16x2_fma", ("sm__inst_executed_pipe_fp16.sum",), 32.0),
    "tensor": ("wgmma_bf16", TENSOR, 0.0),
}
INSTEAD = {"l2": ("bulk_copy_l2", 1 / 8192.0)}  # where the benchmark is missing or known to be wrong


@dataclass(frozen=True)
class UnitWork:
    """What a unit had to do in a kernel: seconds at its measured rate, joules above idle."""

    seconds: float
    joules: float

    def scaled(self, time: float, energy: float | None = None) -> UnitWork:
        """Return the work with time and energy multiplied, both by ``time`` where ``energy`` is left out."""
        return UnitWork(self.seconds * time, self.joules * (time if energy is None else energy))


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
        return max(self.work, key=lambda unit: self.work[unit].seconds)

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
        instead = INSTEAD.get(unit)
        if instead is not None and not is_sound(by_name.get(bench)):
            bench, each = instead
        if unit == "l2" and not all(name in metrics for name in names):
            names = L2_ITSELF
        if all(name in metrics for name in names) and has_rate(by_name.get(bench)):
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
        count = each * sum(values[metric] for metric in names)
        share = 1.0  # joules of a count over those of the microbenchmark's
        if unit == "shared" and (extra := count_conflicts(values)) is not None:
            ratio = curve_ratio(results, "conflicts", extra, 0.0)
            share = 1.0 / (ratio[1] * (1.0 + extra)) if ratio else 1.0
        elif unit in ARITHMETIC and (active := count_active_threads(values)) is not None:
            ratio = curve_ratio(results, "divergence", 32.0 / active, 1.0)
            share = min(active / 32.0 / ratio[1], 1.0) if ratio else 1.0
        elif unit == "l2" and all(name in values for name in DRAM):
            total = sum(values[name] for name in (L2 if all(name in values for name in L2) else L2_ITSELF))
            share = max(1.0 - sum(values[name] for name in DRAM) / total, 0.0) if total > 0.0 else 1.0
        paid = count * share
        work[unit] = UnitWork(count * (result.operation_s or 0.0), paid * (result.operation_above_idle_j or 0.0))
    return KernelProfile(name, values[TIME], work, values, idle_w)


def count_conflicts(values: Mapping[str, float]) -> float | None:
    """Count the conflicts per access of shared memory."""
    if PASSES not in values or EXTRA_PASSES not in values:
        return None
    passes, extra = values[PASSES], values[EXTRA_PASSES]
    return min(extra / (passes - extra), 31.0) if passes > extra > 0.0 else None


def count_active_threads(values: Mapping[str, float]) -> float | None:
    """Count the threads of a warp that take part, without branches, which whole warps execute."""
    all_names = ("smsp__thread_inst_executed.sum", "smsp__inst_executed.sum")
    control = values.get("sm__sass_thread_inst_executed_op_control_pred_on.sum", 0.0)
    active = values.get(ACTIVE)
    if all(name in values for name in all_names):
        threads, warps = (values[name] for name in all_names)
        if warps > control / 32.0 and threads > control:
            active = (threads - control) / (warps - control / 32.0)
    return min(max(active, 1.0), 32.0) if active and active > 0.0 else None


def curve_ratio(results: Sequence[MicroRow], name: str, at: float, best: float) -> tuple[float, float] | None:
    """Return time and energy of an operation at ``best`` over those at ``at`` on a curve, linear between points."""
    points = [r for r in find_curve(results, name) if r.operation_s and r.operation_above_idle_j]
    if len(points) < 2:
        return None
    x = [p.at for p in points]
    time, energy = ([getattr(p, field) for p in points] for field in ("operation_s", "operation_above_idle_j"))
    found = [float(np.interp(best, x, y) / np.interp(at, x, y)) for y in (time, energy)]
    return found[0], found[1]


def is_sound(result: MicroRow | None) -> bool:
    """Return whether a benchmark was measured by a kernel that does what its name says."""
    fault = find_fault(result) if result is not None else None
    return result is not None and (fault is None or fault.kind != "wrong")


def has_rate(result: MicroRow | None) -> bool:
    """Return whether a benchmark has time and energy of an operation."""
    return result is not None and bool(result.operation_s) and result.operation_above_idle_j is not None


WORTH = 0.005  # a change of time or energy below this is not worth a line
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
CONVERSIONS = "sm__sass_thread_inst_executed_op_conversion_pred_on.sum"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
SIZE_METRICS = {size: f"sm__sass_inst_executed_op_memory_{8 * size}b.sum" for size in (1, 2, 4, 8, 16)}
USED_BYTE = "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio"  # of a sector's 32


@dataclass(frozen=True)
class TuningAdvice:
    """A bottleneck: what was seen, and what removing it would change (relative; negative is less)."""

    kernel: str
    bottleneck: str
    seen: str
    time: float
    power: float
    energy: float
    saved_j: float


def advise_change(
    profile: KernelProfile, work: Mapping[str, UnitWork], bottleneck: str, seen: str, wait: float = 1.0
) -> TuningAdvice:
    """Compute what other ``work`` would do to time, power and energy; ``wait`` scales the time directly."""
    before = max(w.seconds for w in profile.work.values())
    after = max(w.seconds for w in work.values())
    time = wait * (after / before if before > 0.0 else 1.0)
    there = replace(profile, work=work, time_s=profile.time_s * time)
    energy = there.energy_j / profile.energy_j
    saved_j = profile.energy_j - there.energy_j
    return TuningAdvice(profile.name, bottleneck, seen, time - 1.0, energy / time - 1.0, energy - 1.0, saved_j)


def _judge_coalescing(p: KernelProfile, results: Sequence[MicroRow]) -> TuningAdvice | None:
    """Sectors of a load beyond those its bytes fill; more than 16 are too many whatever a thread reads."""
    requests = p.metrics[REQUESTS]
    if requests <= 0.0:
        return None
    each = p.metrics[SECTORS] / requests
    used = p.metrics.get(USED_BYTE)
    needed = each * used / 32.0 if used is not None else min(each, 16.0)
    if each <= 1.05 * needed:
        return None
    wasted = each / needed if used is not None else each / 4.0  # the curve's loads: 4 bytes a thread, 4 sectors
    # n neighbours of 4 bytes use n / 8 of their sectors
    ratio = curve_ratio(results, "coalescence", 8.0 / wasted, 32.0)
    if ratio is None:
        return None
    work = {u: w.scaled(*ratio) if u in ("dram", "l2") else w for u, w in p.work.items()}
    would = f"{needed:.1f} hold what it uses" if used is not None else "4 would do for 4 bytes a thread"
    return advise_change(p, work, "coalescing", f"{each:.1f} sectors a load of a warp, {would}")


def _judge_conflicts(p: KernelProfile, results: Sequence[MicroRow]) -> TuningAdvice | None:
    each = count_conflicts(p.metrics)
    ratio = curve_ratio(results, "conflicts", each, 0.0) if each is not None and "shared" in p.work else None
    if each is None or ratio is None:
        return None
    # passes already count the conflicts: without them only the first pass of each access is left
    work = {u: w.scaled(1.0 / (1.0 + each), ratio[1]) if u == "shared" else w for u, w in p.work.items()}
    return advise_change(p, work, "bank conflicts", f"{each:.1f} conflicts an access of shared memory")


def _judge_divergence(p: KernelProfile, results: Sequence[MicroRow]) -> TuningAdvice | None:
    active = count_active_threads(p.metrics)
    if active is None or active >= 31.0:
        return None
    ratio = curve_ratio(results, "divergence", 32.0 / active, 1.0)
    if ratio is None:
        return None
    work = {u: w.scaled(*ratio) if u in ARITHMETIC else w for u, w in p.work.items()}
    return advise_change(p, work, "divergence", f"{active:.1f} of 32 threads of a warp active")


def _judge_fp64(p: KernelProfile, results: Sequence[MicroRow]) -> TuningAdvice | None:
    single, double = (keep_first_rounds(results).get(name) for name in ("fp32_fma", "fp64_fma"))
    if single is None or double is None or "fp64" not in p.work or p.work["fp64"].seconds <= 0.0:
        return None
    single_j, double_j = single.operation_above_idle_j, double.operation_above_idle_j
    if not (single.operation_s and double.operation_s and single_j and double_j):
        return None
    nothing = UnitWork(0.0, 0.0)
    moved = p.work["fp64"].scaled(single.operation_s / double.operation_s, single_j / double_j)
    there = p.work.get("fp32", nothing)
    both = UnitWork(there.seconds + moved.seconds, there.joules + moved.joules)
    work = {**p.work, "fp64": nothing, "fp32": both}
    share = p.work["fp64"].seconds / p.time_s
    return advise_change(p, work, "fp64", f"the fp64 pipe is busy {share:.0%} of the time; fp32 instead")


def _judge_conversions(p: KernelProfile, results: Sequence[MicroRow]) -> TuningAdvice | None:
    count = p.metrics[CONVERSIONS]
    result = keep_first_rounds(results).get("convert_int32")
    if count <= 0.0 or result is None or not has_rate(result) or "special" not in p.work:
        return None
    spent = UnitWork(count * (result.operation_s or 0.0), count * (result.operation_above_idle_j or 0.0))
    there = p.work["special"]
    left = UnitWork(max(there.seconds - spent.seconds, 0.0), max(there.joules - spent.joules, 0.0))
    return advise_change(p, {**p.work, "special": left}, "conversions", f"{count:.3g} conversions of threads")


def _judge_occupancy(p: KernelProfile, results: Sequence[MicroRow]) -> TuningAdvice | None:
    """Too few warps matter where no unit is near its limit: the time follows the measured curve of warps."""
    warps = 64.0 * p.metrics[WARPS]
    busy = max(w.seconds for w in p.work.values()) / p.time_s
    if not 0.0 < warps < 48.0 or busy > 0.6:
        return None
    points = [r for r in find_curve(results, "occupancy") if r.operations_per_cycle_sm]
    if len(points) < 2:
        return None
    rate = [r.operations_per_cycle_sm or 0.0 for r in points]
    gain = float(np.interp(warps, [r.at for r in points], rate)) / max(rate)
    seen = f"{warps:.0f} warps resident on an SM, no unit above {busy:.0%}"
    return advise_change(p, p.work, "occupancy", seen, wait=max(gain, busy))


def _judge_access_size(p: KernelProfile, results: Sequence[MicroRow]) -> TuningAdvice | None:
    counts = {size: p.metrics[metric] for size, metric in SIZE_METRICS.items()}
    total = sum(counts.values())
    if total <= 0.0 or "dram" not in p.work:
        return None
    mean = sum(size * n for size, n in counts.items()) / total
    points = [r for r in find_curve(results, "access") if r.operation_s and r.operation_above_idle_j]
    if mean >= 15.0 or len(points) < 2:
        return None
    x = [r.at for r in points]
    time = [(r.operation_s or 0.0) / r.at for r in points]  # of a byte
    energy = [(r.operation_above_idle_j or 0.0) / r.at for r in points]
    ratios = [float(np.interp(16.0, x, y) / np.interp(mean, x, y)) for y in (time, energy)]
    work = {u: w.scaled(ratios[0], ratios[1]) if u == "dram" else w for u, w in p.work.items()}
    return advise_change(p, work, "access size", f"{mean:.1f} bytes a thread and access, 16 are possible")


Judge = Callable[[KernelProfile, Sequence[MicroRow]], TuningAdvice | None]
JUDGES: dict[str, tuple[tuple[str, ...], Judge]] = {  # bottleneck: metrics that judging it needs, and how
    "coalescing": ((SECTORS, REQUESTS), _judge_coalescing),
    "bank conflicts": ((PASSES, EXTRA_PASSES), _judge_conflicts),
    "divergence": ((ACTIVE,), _judge_divergence),
    "fp64": (("sm__inst_executed_pipe_fp64.sum",), _judge_fp64),
    "conversions": ((CONVERSIONS,), _judge_conversions),
    "occupancy": ((WARPS,), _judge_occupancy),
    "access size": (tuple(SIZE_METRICS.values()), _judge_access_size),
}


@dataclass(frozen=True)
class TuningReport:
    """Advice for all kernels of a profile, most joules first, and what could not be judged."""

    profiles: tuple[KernelProfile, ...]
    advice: tuple[TuningAdvice, ...]
    missing: Mapping[str, tuple[str, ...]]  # bottleneck -> metrics the profile lacks


def tune_export(path: Path, results: Sequence[MicroRow]) -> TuningReport:
    """Read an Nsight Compute export and judge every kernel on the device of ``results``."""
    names, metrics = read_ncu_metrics(path)
    if TIME not in metrics:
        raise bad_value(path.name, f"the metric {TIME}", "an export without it", "Collect it with ncu --metrics.")
    idle_w = find_idle_power_w(results)
    if not list_usable_units(results, metrics):
        wanted = ", ".join(dict.fromkeys(name for _, names, _ in UNITS.values() for name in names))
        raise BadInput(f"{path.name}: no unit's work can be counted. Collect with ncu --metrics {TIME},{wanted}")
    profiles = []
    for i, name in enumerate(names):
        values = {metric: float(column[i]) for metric, column in metrics.items() if np.isfinite(column[i])}
        profiles.append(make_profile(name, values, results, idle_w))
    missing = {name: tuple(m for m in needs if m not in metrics) for name, (needs, _) in JUDGES.items()}
    advice = rank_advice(profiles, results)
    return TuningReport(tuple(profiles), advice, {name: lacks for name, lacks in missing.items() if lacks})


def rank_advice(profiles: Sequence[KernelProfile], results: Sequence[MicroRow]) -> tuple[TuningAdvice, ...]:
    """Rank the advice that matters on all of ``profiles``, most joules first."""
    known = [(p, judge) for p in profiles for needs, judge in JUDGES.values() if all(m in p.metrics for m in needs)]
    advice = [found for p, judge in known if (found := judge(p, results)) is not None]
    worth = [a for a in advice if max(abs(a.time), abs(a.energy)) >= WORTH]
    return tuple(sorted(worth, key=lambda a: -abs(a.saved_j)))


def make_counted_profile(name: str, counters: Mapping[str, float], results: Sequence[MicroRow]) -> KernelProfile:
    """Make a profile from a row of ``microbench_counters.jsonl``, in ncu's units (nanoseconds, percent)."""
    values = {metric: value / 100.0 if ".pct" in metric else value for metric, value in counters.items()}
    return make_profile(name, values | {TIME: counters[TIME] * 1e-9}, results, find_idle_power_w(results))


def find_idle_power_w(results: Sequence[MicroRow]) -> float:
    """Return the median idle power with a context open, from the rows' own values or from idle rows."""
    known = [r.idle_power_w for r in results if r.idle_power_w]
    known = known or [r.power_w for r in results if r.group == "idle" and r.power_w]
    if not known:
        raise BadInput("the microbenchmark results hold no idle power; measure again with an idle row.")
    return float(np.median(known))
