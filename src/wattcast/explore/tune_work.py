"""What a profiled kernel asked of each unit: seconds at the rates microbenchmarks reached, joules above idle.

Counts of a profile are brought to the operations a microbenchmark counts. Three of them need care, as the H200's
own counters showed: a pass of shared memory that conflicts costs less than a full one, an instruction of a
diverged warp less than one of 32 threads (both from the measured curves), and what DRAM delivers has its way
through L2 in its own energy already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.explore.microbench import Result, curve, fault_of, first

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


def usable_units(
    results: Sequence[Result], metrics: Mapping[str, object]
) -> dict[str, tuple[str, tuple[str, ...], float]]:
    """Units whose counts the profile has and whose rate was measured."""
    by_name, found = first(results), {}
    for unit, (bench, names, each) in UNITS.items():
        instead = INSTEAD.get(unit)
        if instead is not None and not sound(by_name.get(bench)):
            bench, each = instead
        if unit == "l2" and not all(name in metrics for name in names):
            names = L2_ITSELF
        if all(name in metrics for name in names) and rated(by_name.get(bench)):
            found[unit] = (bench, names, each)
    return found


def profile_of(name: str, values: Mapping[str, float], results: Sequence[Result], idle_w: float) -> Profile:
    """A kernel's work by unit."""
    by_name, work = first(results), {}
    for unit, (bench, names, each) in usable_units(results, values).items():
        result = by_name[bench]
        if unit == "tensor":
            seconds = values[TIME] * values[names[0]] / (SCHEDULERS * values[names[1]]) if values[names[1]] else 0.0
            work[unit] = Work(seconds, seconds * max((result.power_w or 0.0) - idle_w, 0.0))
            continue
        count = each * sum(values[metric] for metric in names)
        paid = count * _joule_share(unit, values, results)
        work[unit] = Work(count * (result.operation_s or 0.0), paid * (result.operation_above_idle_j or 0.0))
    return Profile(name, values[TIME], work, values, idle_w)


def _joule_share(unit: str, values: Mapping[str, float], results: Sequence[Result]) -> float:
    """Joules of a count over those of the microbenchmark's: what conflicts, diverged warps and DRAM traffic leave."""
    if unit == "shared" and (each := conflicts(values)) is not None:
        ratio = ratio_on(results, "conflicts", each, 0.0)
        return 1.0 / (ratio[1] * (1.0 + each)) if ratio else 1.0
    if unit in ARITHMETIC and (active := active_threads(values)) is not None:
        ratio = ratio_on(results, "divergence", 32.0 / active, 1.0)
        return min(active / 32.0 / ratio[1], 1.0) if ratio else 1.0
    if unit == "l2" and all(name in values for name in DRAM):
        total = sum(values[name] for name in (L2 if all(name in values for name in L2) else L2_ITSELF))
        return max(1.0 - sum(values[name] for name in DRAM) / total, 0.0) if total > 0.0 else 1.0
    return 1.0


def conflicts(values: Mapping[str, float]) -> float | None:
    """Conflicts of an access of shared memory."""
    if PASSES not in values or EXTRA_PASSES not in values:
        return None
    passes, extra = values[PASSES], values[EXTRA_PASSES]
    return min(extra / (passes - extra), 31.0) if passes > extra > 0.0 else None


def active_threads(values: Mapping[str, float]) -> float | None:
    """Threads of a warp that take part, without branches, which whole warps execute before they part."""
    all_names = ("smsp__thread_inst_executed.sum", "smsp__inst_executed.sum")
    control = values.get("sm__sass_thread_inst_executed_op_control_pred_on.sum", 0.0)
    active = values.get(ACTIVE)
    if all(name in values for name in all_names):
        threads, warps = (values[name] for name in all_names)
        if warps > control / 32.0 and threads > control:
            active = (threads - control) / (warps - control / 32.0)
    return min(max(active, 1.0), 32.0) if active and active > 0.0 else None


def ratio_on(results: Sequence[Result], name: str, at: float, best: float) -> tuple[float, float] | None:
    """Time and energy of an operation at ``best`` over those at ``at`` on a measured curve, linear between points."""
    points = [r for r in curve(results, name) if r.operation_s and r.operation_above_idle_j]
    if len(points) < 2:
        return None
    x = [p.at for p in points]
    time, energy = ([getattr(p, field) for p in points] for field in ("operation_s", "operation_above_idle_j"))
    found = [float(np.interp(best, x, y) / np.interp(at, x, y)) for y in (time, energy)]
    return found[0], found[1]


def sound(result: Result | None) -> bool:
    """Whether a benchmark was measured by a kernel that does what its name says."""
    fault = fault_of(result) if result is not None else None
    return result is not None and (fault is None or fault.kind != "wrong")


def rated(result: Result | None) -> bool:
    """Whether a benchmark has time and energy of an operation."""
    return result is not None and bool(result.operation_s) and result.operation_above_idle_j is not None
