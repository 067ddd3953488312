"""Which bottlenecks of a profiled kernel matter on this device, and what removing each would change (paper 001).

For each kernel the profile's counts say how long each unit must have worked at the rates microbenchmarks
reached, and how many joules above idle that cost. A kernel's time is set by its busiest unit; what it took
beyond that stays in proportion. Removing a bottleneck shortens one unit's work, or lowers its energy, by
the ratio of two measured points of a curve; time, power and energy follow:

    t' = t · max_u(w'_u) / max_u(w_u),   E' = E · (P_idle · t' + Σ_u e'_u) / (P_idle · t + Σ_u e_u)

with w the unit's seconds and e its joules above idle. It is a first-order answer: units that wait for each
other, and caches that a change would relieve, are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast.activity.profiled import ncu_metrics
from wattcast.errors import BadInput, bad_value
from wattcast.explore.microbench import Result, curve, first

TIME = "gpu__time_duration.sum"
WORTH = 0.005  # a change of time or energy below this is not worth a line
# unit: the microbenchmark with its rate and energy, and the metrics that count its operations, with factors
UNITS: dict[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "dram": ("dram_copy", (("dram__bytes_read.sum", 1 / 16.0), ("dram__bytes_write.sum", 1 / 16.0))),
    "l2": ("l2_read", (("lts__t_bytes.sum", 1 / 16.0),)),
    "shared": ("conflicts_0", (("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", 32.0),)),
    "fp32": ("fp32_fma", (("sm__inst_executed_pipe_fma.sum", 32.0),)),
    "fp64": ("fp64_fma", (("sm__inst_executed_pipe_fp64.sum", 32.0),)),
    "int": ("int32_add", (("sm__inst_executed_pipe_alu.sum", 32.0),)),
    "special": ("fp32_rcp", (("sm__inst_executed_pipe_xu.sum", 32.0),)),
    "half": ("fp16x2_fma", (("sm__inst_executed_pipe_fp16.sum", 32.0),)),
}


@dataclass(frozen=True)
class Work:
    """What a unit had to do in a kernel: seconds at its measured rate, joules above idle."""

    seconds: float
    joules: float

    def scaled(self, time: float, energy: float | None = None) -> Work:
        """The same with less to do."""
        return Work(self.seconds * time, self.joules * (time if energy is None else energy))


@dataclass(frozen=True)
class Profile:
    """One kernel: its time, its work by unit, and every metric of its profile."""

    name: str
    time_s: float
    work: Mapping[str, Work]
    metrics: Mapping[str, float]
    idle_power_w: float

    @property
    def busiest(self) -> str:
        """The unit that sets the time, as far as the profile tells."""
        return max(self.work, key=lambda unit: self.work[unit].seconds)

    @property
    def energy_j(self) -> float:
        """Idle power over its time, and its units' joules."""
        return self.idle_power_w * self.time_s + sum(work.joules for work in self.work.values())


@dataclass(frozen=True)
class Advice:
    """A bottleneck: what was seen, and what removing it would change (relative; negative is less)."""

    kernel: str
    bottleneck: str
    seen: str
    time: float
    power: float
    energy: float
    joules: float  # saved

    @property
    def matters(self) -> bool:
        """Whether anything would change that one could notice."""
        return max(abs(self.time), abs(self.energy)) >= WORTH


@dataclass(frozen=True)
class Tuning:
    """Advice for all kernels of a profile, most joules first, and what could not be judged."""

    profiles: tuple[Profile, ...]
    advice: tuple[Advice, ...]
    missing: Mapping[str, tuple[str, ...]]  # bottleneck -> metrics the profile lacks


def tune(path: Path, results: Sequence[Result]) -> Tuning:
    """Read an Nsight Compute export and judge every kernel on the device of ``results``."""
    names, metrics = ncu_metrics(path)
    if TIME not in metrics:
        raise bad_value(path.name, f"the metric {TIME}", "an export without it", "Collect it with ncu --metrics.")
    by_name = first(results)
    idle_w = _idle_w(results)
    usable = {unit: UNITS[unit] for unit in UNITS if all(m in metrics for m, _ in UNITS[unit][1])}
    usable = {unit: given for unit, given in usable.items() if _rated(by_name.get(given[0]))}
    if not usable:
        wanted = ", ".join(m for _, pairs in UNITS.values() for m, _ in pairs)
        raise BadInput(f"{path.name}: no unit's work can be counted. Collect with ncu --metrics {TIME},{wanted}")
    profiles = []
    for i, name in enumerate(names):
        values = {metric: float(column[i]) for metric, column in metrics.items() if np.isfinite(column[i])}
        work = {unit: _work(by_name[bench], pairs, values) for unit, (bench, pairs) in usable.items()}
        profiles.append(Profile(name, values[TIME], work, values, idle_w))
    advice = [found for p in profiles for judge in JUDGES.values() if (found := judge.advise(p, results)) is not None]
    ranked = sorted((a for a in advice if a.matters), key=lambda a: -abs(a.joules))
    missing = {name: tuple(m for m in judge.needs if m not in metrics) for name, judge in JUDGES.items()}
    return Tuning(tuple(profiles), tuple(ranked), {name: lacks for name, lacks in missing.items() if lacks})


def _idle_w(results: Sequence[Result]) -> float:
    known = [r.idle_power_w for r in results if r.idle_power_w]
    known = known or [r.power_w for r in results if r.group == "idle" and r.power_w]
    if not known:
        raise BadInput("the microbenchmark results hold no idle power; measure again with an idle row.")
    return float(np.median(known))


def _rated(result: Result | None) -> bool:
    return result is not None and bool(result.operation_s) and result.operation_above_idle_j is not None


def _work(result: Result, pairs: tuple[tuple[str, float], ...], values: Mapping[str, float]) -> Work:
    count = sum(factor * values.get(metric, 0.0) for metric, factor in pairs)
    return Work(count * (result.operation_s or 0.0), count * (result.operation_above_idle_j or 0.0))


def changed(profile: Profile, work: Mapping[str, Work], bottleneck: str, seen: str, wait: float = 1.0) -> Advice:
    """What other ``work`` would do to time, power and energy; ``wait`` scales the time directly."""
    before = max(w.seconds for w in profile.work.values())
    after = max(w.seconds for w in work.values())
    time = wait * (after / before if before > 0.0 else 1.0)
    there = replace(profile, work=work, time_s=profile.time_s * time)
    energy = there.energy_j / profile.energy_j
    saved_j = profile.energy_j - there.energy_j
    return Advice(profile.name, bottleneck, seen, time - 1.0, energy / time - 1.0, energy - 1.0, saved_j)


@dataclass(frozen=True)
class Judge:
    """How one bottleneck is found and what its removal is worth."""

    needs: tuple[str, ...]
    look: Callable[[Profile, Sequence[Result]], Advice | None]

    def advise(self, profile: Profile, results: Sequence[Result]) -> Advice | None:
        """Advice on a kernel whose profile has what is needed."""
        return self.look(profile, results) if all(m in profile.metrics for m in self.needs) else None


def _ratio(results: Sequence[Result], name: str, at: float, best: float) -> tuple[float, float] | None:
    """Time and energy of an operation at ``best`` over those at ``at`` on a measured curve, linear between points."""
    points = [r for r in curve(results, name) if r.operation_s and r.operation_above_idle_j]
    if len(points) < 2:
        return None
    x = [p.at for p in points]
    time, energy = ([getattr(p, field) for p in points] for field in ("operation_s", "operation_above_idle_j"))
    found = [float(np.interp(best, x, y) / np.interp(at, x, y)) for y in (time, energy)]
    return found[0], found[1]


def _coalescing(p: Profile, results: Sequence[Result]) -> Advice | None:
    sectors = p.metrics["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
    requests = p.metrics["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"]
    if requests <= 0.0 or sectors <= 4.0 * requests:
        return None
    each = min(sectors / requests, 32.0)
    ratio = _ratio(results, "coalescence", 32.0 / each, 32.0)  # 4-byte loads: n neighbours share 32 / n sectors
    if ratio is None:
        return None
    work = {u: w.scaled(*ratio) if u in ("dram", "l2") else w for u, w in p.work.items()}
    return changed(p, work, "coalescing", f"{each:.1f} sectors a load of a warp, 4 would do")


def _conflicts(p: Profile, results: Sequence[Result]) -> Advice | None:
    passes = p.metrics["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"]
    extra = p.metrics["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"]
    if extra <= 0.0 or passes <= extra or "shared" not in p.work:
        return None
    each = min(extra / (passes - extra), 31.0)
    ratio = _ratio(results, "conflicts", each, 0.0)
    if ratio is None:
        return None
    # passes already count the conflicts: without them only the first pass of each access is left
    left = (passes - extra) / passes
    work = {u: w.scaled(left, ratio[1]) if u == "shared" else w for u, w in p.work.items()}
    return changed(p, work, "bank conflicts", f"{each:.1f} conflicts an access of shared memory")


def _divergence(p: Profile, results: Sequence[Result]) -> Advice | None:
    active = p.metrics["smsp__thread_inst_executed_per_inst_executed.ratio"]
    if not 0.0 < active < 31.0:
        return None
    ratio = _ratio(results, "divergence", 32.0 / active, 1.0)
    if ratio is None:
        return None
    units = ("fp32", "fp64", "int", "special", "half")
    work = {u: w.scaled(*ratio) if u in units else w for u, w in p.work.items()}
    return changed(p, work, "divergence", f"{active:.1f} of 32 threads of a warp active")


def _double(p: Profile, results: Sequence[Result]) -> Advice | None:
    single, double = (first(results).get(name) for name in ("fp32_fma", "fp64_fma"))
    if single is None or double is None or "fp64" not in p.work or p.work["fp64"].seconds <= 0.0:
        return None
    if not (
        single.operation_s and double.operation_s and single.operation_above_idle_j and double.operation_above_idle_j
    ):
        return None
    moved = p.work["fp64"].scaled(
        single.operation_s / double.operation_s, single.operation_above_idle_j / double.operation_above_idle_j
    )
    there = p.work.get("fp32", Work(0.0, 0.0))
    work = {
        **p.work,
        "fp64": Work(0.0, 0.0),
        "fp32": Work(there.seconds + moved.seconds, there.joules + moved.joules),
    }
    share = p.work["fp64"].seconds / p.time_s
    return changed(p, work, "fp64", f"the fp64 pipe is busy {share:.0%} of the time; fp32 instead")


def _conversions(p: Profile, results: Sequence[Result]) -> Advice | None:
    count = p.metrics["sm__sass_thread_inst_executed_op_conversion_pred_on.sum"]
    result = first(results).get("convert_int32")
    if count <= 0.0 or result is None or not _rated(result) or "special" not in p.work:
        return None
    spent = Work(count * (result.operation_s or 0.0), count * (result.operation_above_idle_j or 0.0))
    there = p.work["special"]
    left = Work(max(there.seconds - spent.seconds, 0.0), max(there.joules - spent.joules, 0.0))
    return changed(p, {**p.work, "special": left}, "conversions", f"{count:.3g} conversions of threads")


def _occupancy(p: Profile, results: Sequence[Result]) -> Advice | None:
    """Too few warps matter where no unit is near its limit: the time follows the measured curve of warps."""
    warps = 64.0 * p.metrics["sm__warps_active.avg.pct_of_peak_sustained_active"]
    busy = max(w.seconds for w in p.work.values()) / p.time_s
    if not 0.0 < warps < 48.0 or busy > 0.6:
        return None
    points = [r for r in curve(results, "occupancy") if r.per_cycle_sm]
    if len(points) < 2:
        return None
    rate = [r.per_cycle_sm or 0.0 for r in points]
    gain = float(np.interp(warps, [r.at for r in points], rate)) / max(rate)
    wait = max(gain, busy)
    return changed(p, p.work, "occupancy", f"{warps:.0f} warps resident on an SM, no unit above {busy:.0%}", wait)


def _access_size(p: Profile, results: Sequence[Result]) -> Advice | None:
    sizes = {1: "8b", 2: "16b", 4: "32b", 8: "64b", 16: "128b"}
    counts = {size: p.metrics[f"sm__sass_inst_executed_op_memory_{word}.sum"] for size, word in sizes.items()}
    total = sum(counts.values())
    if total <= 0.0 or "dram" not in p.work:
        return None
    mean = sum(size * n for size, n in counts.items()) / total
    points = [r for r in curve(results, "access") if r.operation_s and r.operation_above_idle_j]
    if mean >= 15.0 or len(points) < 2:
        return None
    x = [r.at for r in points]
    time = [(r.operation_s or 0.0) / r.at for r in points]  # of a byte
    energy = [(r.operation_above_idle_j or 0.0) / r.at for r in points]
    ratios = [float(np.interp(16.0, x, y) / np.interp(mean, x, y)) for y in (time, energy)]
    work = {u: w.scaled(ratios[0], ratios[1]) if u == "dram" else w for u, w in p.work.items()}
    return changed(p, work, "access size", f"{mean:.1f} bytes a thread and access, 16 are possible")


JUDGES: dict[str, Judge] = {
    "coalescing": Judge(
        ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"),
        _coalescing,
    ),
    "bank conflicts": Judge(
        ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"),
        _conflicts,
    ),
    "divergence": Judge(("smsp__thread_inst_executed_per_inst_executed.ratio",), _divergence),
    "fp64": Judge(("sm__inst_executed_pipe_fp64.sum",), _double),
    "conversions": Judge(("sm__sass_thread_inst_executed_op_conversion_pred_on.sum",), _conversions),
    "occupancy": Judge(("sm__warps_active.avg.pct_of_peak_sustained_active",), _occupancy),
    "access size": Judge(
        tuple(f"sm__sass_inst_executed_op_memory_{word}.sum" for word in ("8b", "16b", "32b", "64b", "128b")),
        _access_size,
    ),
}
