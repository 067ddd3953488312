"""Bottlenecks of a profiled kernel: how each is seen, and what its removal would change (tune.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.explore.microbench import Result, curve, first
from wattcast.explore.tune_work import (
    ACTIVE,
    ARITHMETIC,
    EXTRA_PASSES,
    PASSES,
    Profile,
    Work,
    active_threads,
    conflicts,
    rated,
    ratio_on,
)

WORTH = 0.005  # a change of time or energy below this is not worth a line
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"
REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
USED_BYTE = "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio"  # of a sector's 32


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


def _coalescing(p: Profile, results: Sequence[Result]) -> Advice | None:
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
    ratio = ratio_on(results, "coalescence", 8.0 / wasted, 32.0)  # n neighbours of 4 bytes use n / 8 of their sectors
    if ratio is None:
        return None
    work = {u: w.scaled(*ratio) if u in ("dram", "l2") else w for u, w in p.work.items()}
    would = f"{needed:.1f} hold what it uses" if used is not None else "4 would do for 4 bytes a thread"
    return changed(p, work, "coalescing", f"{each:.1f} sectors a load of a warp, {would}")


def _conflicts(p: Profile, results: Sequence[Result]) -> Advice | None:
    each = conflicts(p.metrics)
    ratio = ratio_on(results, "conflicts", each, 0.0) if each is not None and "shared" in p.work else None
    if each is None or ratio is None:
        return None
    # passes already count the conflicts: without them only the first pass of each access is left
    work = {u: w.scaled(1.0 / (1.0 + each), ratio[1]) if u == "shared" else w for u, w in p.work.items()}
    return changed(p, work, "bank conflicts", f"{each:.1f} conflicts an access of shared memory")


def _divergence(p: Profile, results: Sequence[Result]) -> Advice | None:
    active = active_threads(p.metrics)
    if active is None or active >= 31.0:
        return None
    ratio = ratio_on(results, "divergence", 32.0 / active, 1.0)
    if ratio is None:
        return None
    work = {u: w.scaled(*ratio) if u in ARITHMETIC else w for u, w in p.work.items()}
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
    if count <= 0.0 or result is None or not rated(result) or "special" not in p.work:
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
        (SECTORS, REQUESTS),
        _coalescing,
    ),
    "bank conflicts": Judge(
        (PASSES, EXTRA_PASSES),
        _conflicts,
    ),
    "divergence": Judge((ACTIVE,), _divergence),
    "fp64": Judge(("sm__inst_executed_pipe_fp64.sum",), _double),
    "conversions": Judge(("sm__sass_thread_inst_executed_op_conversion_pred_on.sum",), _conversions),
    "occupancy": Judge(("sm__warps_active.avg.pct_of_peak_sustained_active",), _occupancy),
    "access size": Judge(
        tuple(f"sm__sass_inst_executed_op_memory_{word}.sum" for word in ("8b", "16b", "32b", "64b", "128b")),
        _access_size,
    ),
}
