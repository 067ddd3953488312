"""Judge which bottlenecks of a profiled kernel matter on a device, and what removing each would
change (paper 001).

A kernel's units need N seconds together (`unit_work`). With the measured time T the rest is

    T^3 = N^3 + W^3

in which warps wait. A change replaces the work of some units. Where a unit is busy half of the time
and warps are many, W is mostly queueing and follows N; otherwise it is latency, which stays, or is
hidden by more warps and independent instructions. The exponent was set on the DCT of the multimedia
workloads and on four pairs of kernels (docs/method/microbenchmarks.md); the interval of an advice
spans exponents from 2 to 4, half as much queueing, T'/T to the power of 0.5 to 1.5, and 5 points to
both sides."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from wattcast.core import BadInput, bad_value
from wattcast.lab.counter_models.profiler_counters import read_ncu_metrics
from wattcast.lab.microbench import launch_judges, unit_work
from wattcast.lab.microbench.code_changes import CodeChange
from wattcast.lab.microbench.microbench_results import MicroRow, keep_first_rounds
from wattcast.lab.microbench.profile_sets import PipeRates, complete_metrics
from wattcast.lab.microbench.unit_work import (
    KernelProfile,
    UnitWork,
    combine_units_s,
    curve_ratio,
)

EXPONENTS = (2.0, 4.0)  # of an interval
LIKELY_POWERS = (
    0.5,
    1.5,
)  # of the predicted ratio of times; with LEAST_SPREAD 91 % of 127 measured pairs lie inside
LEAST_SPREAD = 0.05  # of the time, to both sides
LEAST_WAIT = (
    0.9  # waiting that a changed kernel keeps where it had as much, over what its units need
)
WORTH = 0.005  # a change of time or energy below this is not worth a line
NEAR_LATENCY = 0.2  # latency of the L1 over that of L2 and DRAM
# of an SM: resident at most, and those that hide arithmetic latency
MOST_WARPS = 64.0
ENOUGH_WARPS = 14.0
IN_FLIGHT_BYTE = (
    12e3  # of an SM that fill DRAM: 340 ns of latency (kernels of 4 warps) at 35 bytes a nanosecond
)
SINGLE_SHARE = 0.25  # of the fp64 instructions of a function, which are left of it in fp32
# reasons for which a warp waits, as Nsight Compute names them
STALLS = (
    *("barrier", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected"),
    *("selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
MOVED = {
    "dram": ("dram_read", "dram_written"),
    "l2": ("l2_read", "l2_written"),
}  # counters of bytes, to and fro
LOCAL = ("local_loaded_sectors", "local_stored_sectors")
CACHE_COUNTERS = ("l2_read", "l2_written", "hit_sectors", "loaded_sectors")
ACCESSES = unit_work.ACCESSES
SAME_BYTES = (
    0.03  # difference of bytes through the L2, as a share, that passes over the same data have
)
INDEPENDENT = 4.0  # instructions that a thread can have under way at once
MOST_OUTPUTS = 4.0  # of a thread along one side of what it keeps in registers
LEAST_REUSE = 4.0  # uses of a byte that the L1 got, from which on registers could keep it
INDICES_OF_LOAD = 2.0  # integer instructions of an address of 64 bits
CODE_OF_INDEX = 4.0  # instructions beside an access to an array that loops index
LEAST_CODE = 0.1  # share of instructions that stays in any case
LEAST_ARITHMETIC = 0.5  # floating-point instructions for a load, where outputs are computed of it
WIDE_BYTE = 15.0  # of a thread and access, from which on accesses are as wide as can be
LEAST_HIT = 0.5  # of the sectors that the L1 gives itself, where bytes are used again
ADDITIONS_OF_ROUNDING = 2.0
LIKE_SAVING = (
    0.9  # of the most joules saved, from which on the change that saves more time is first
)


@dataclass(frozen=True)
class TuningAdvice:
    """A bottleneck: what was seen, and what removing it would change (relative; negative is
    less).
    """

    kernel: str
    bottleneck: str
    seen: str
    time: float
    power: float
    energy: float
    saved_j: float
    time_range: tuple[float, float]


def predict_time_s(
    profile: KernelProfile,
    after: Mapping[str, UnitWork],
    wait: float,
    exponent: float = unit_work.EXPONENT,
    queued: float | None = None,
) -> float:
    """Return the time T' of a kernel whose units have the work ``after`` and whose waiting is
    scaled by ``wait``.

    T'^p = N'^p + W'^p with W' = W·``wait``·(q·N'/N + 1 - q) and q the share of W that is queueing
    (``queued``, or ``queued_share``). Where the units still explain more than the measured time, T'
    = T·N'/N."""
    before_s = combine_units_s(profile.work, exponent)
    after_s = combine_units_s(after, exponent)
    if before_s <= 0.0:
        return profile.time_s * wait
    ratio = after_s / before_s
    if before_s >= profile.time_s:
        return profile.time_s * ratio
    q = queued_share(profile) if queued is None else queued
    waited_s = (profile.time_s**exponent - before_s**exponent) ** (1.0 / exponent)
    left_s = max(
        waited_s * wait * (q * ratio + 1.0 - q), min(LEAST_WAIT, waited_s / before_s) * after_s
    )
    return float((after_s**exponent + left_s**exponent) ** (1.0 / exponent))


def queued_share(profile: KernelProfile) -> float:
    """Return the share of the waiting that is queueing: all with a unit busy
    ``unit_work.QUEUED_SHARE`` and
    enough warps.

    Where warps wait for memory and read neighbouring words, enough of them have ``IN_FLIGHT_BYTE``
    under way."""
    m = profile.counters
    enough = ENOUGH_WARPS
    sectors = m["loaded_sectors"]
    requests = m["loads"]
    if (
        requests > 0.0
        and m.far_share > unit_work.FAR_SHARE
        and sectors <= 1.1 * requests * (m.access_byte or 0.0)
    ):
        enough = max(IN_FLIGHT_BYTE * requests / (32.0 * sectors), enough)
    return min(profile.busy_share / unit_work.QUEUED_SHARE, 1.0) * min(
        MOST_WARPS * m.get("warps", 1.0) / enough, 1.0
    )


def queued_share_of_threads(profile: KernelProfile) -> float:
    """Return the share of the waiting that other warps or instructions cannot hide.

    A wait of fixed length is for the instruction before it and never queueing."""
    return queued_share(profile) * (1.0 - launch_judges.waiting_share(profile, "wait"))


def advise_change(profile: KernelProfile, changes: Sequence[CodeChange]) -> TuningAdvice:
    """Compute what one change, or several together, would do to time, power and energy."""
    work: dict[str, UnitWork] = dict(profile.work)
    wait = 1.0
    for change in changes:
        work = change.apply(work)
        wait = wait * change.wait
    time = predict_time_s(profile, work, wait) / profile.time_s
    q = queued_share(profile)
    ways = [(exponent, queued) for exponent in EXPONENTS for queued in (0.5 * q, q)]
    spread = [predict_time_s(profile, work, wait, *way) / profile.time_s for way in ways]
    spread += [max(time, 1e-9) ** power for power in LIKELY_POWERS]
    spread += [max(time - LEAST_SPREAD, 0.0), time + LEAST_SPREAD]
    spread += [1.0] * all(change.unsure for change in changes)
    there = replace(profile, work=work, time_s=profile.time_s * time)
    energy = there.energy_j / profile.energy_j
    return TuningAdvice(
        profile.name,
        " + ".join(change.bottleneck for change in changes),
        "; ".join(change.seen for change in changes),
        time - 1.0,
        energy / time - 1.0,
        energy - 1.0,
        profile.energy_j - there.energy_j,
        (min(spread) - 1.0, max(spread) - 1.0),
    )


def _judge_coalescing(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Sectors beyond those of neighbouring threads; what L1 or L2 give again does not come from
    DRAM.
    """
    m = p.counters
    if m.reads_table:  # a matter of caching
        return None
    mean = max(
        m.access_byte or 4.0, 1.0
    )  # bytes a thread, and so sectors of 32 neighbouring threads
    ways = [(m["loaded_sectors"], m["loads"]), (m["stored_sectors"], m["stores"])]
    needed = [min(sectors, mean * requests) for sectors, requests in ways]
    sectors, requests = (sum(column) for column in zip(*ways, strict=True))
    shifted = m["hit_sectors"] >= 0.5 * m.get("loaded_sectors", 1.0) and sectors < 1.5 * sum(needed)
    if (
        sectors <= 1.1 * sum(needed) or shifted
    ):  # neighbours that read the same lines, shifted: a matter of caching
        return None
    factor = {}
    for unit, names in MOVED.items():
        moved = [m[name] for name in names]
        if sum(moved) > 0.0:
            after = sum(min(byte, 32.0 * n) for byte, n in zip(moved, needed, strict=True))
            factor[unit] = (after / sum(moved),) * 2
    if (passes := m.passes) > 0.0:
        factor["l1"] = (1.0 - max(passes - m["shared_passes"] - m.least_passes, 0.0) / passes,) * 2
    seen = (
        f"{sectors / requests:.1f} sectors an access of a warp, "
        f"{sum(needed) / requests:.1f} would do"
    )
    # a warp waits for every sector of its access
    return CodeChange(
        "coalescing", seen, factor, wait=1.0 - m.far_share * (1.0 - sum(needed) / sectors)
    )


def _judge_conflicts(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    each = p.counters.conflicts
    ratio = (
        curve_ratio(results, "conflicts", each, 0.0)
        if each is not None and "l1" in p.work
        else None
    )
    if each is None or ratio is None:
        return None
    # passes already count the conflicts: without them only the first pass of each access is left
    passes = p.counters.passes
    energy = 1.0 - p.counters["shared_passes"] / passes * (1.0 - ratio[1])
    factor = {"l1": (1.0 - p.counters["extra_passes"] / passes, energy)}
    return CodeChange("bank conflicts", f"{each:.1f} conflicts an access of shared memory", factor)


def _judge_divergence(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    active = p.counters.active
    if active is None or active >= 31.0:
        return None
    barrier = launch_judges.waiting_share(p, "barrier")
    if barrier >= launch_judges.MUCH_WAITING:
        return None  # others wait for these threads: a matter of barriers
    ratio = curve_ratio(results, "divergence", 32.0 / active, 1.0)
    if ratio is None:
        return None
    factor = dict.fromkeys(
        (*unit_work.ARITHMETIC, "issue", "products"), ratio
    )  # as many warps start as before
    # a barrier is waited for as long as the slowest warp takes, which may be the diverged one
    seen = f"{active:.1f} of 32 threads of a warp active"
    wait = ratio[0] * (1.0 - barrier) + barrier
    return CodeChange("divergence", seen, factor, wait=wait)


@dataclass(frozen=True)
class _PrecisionCosts:
    """Seconds and joules of one multiply-add of a thread in either precision, and of an integer
    addition where that was measured.
    """

    single: UnitWork
    double: UnitWork
    integer: UnitWork | None


def _read_precision_costs(results: Sequence[MicroRow]) -> _PrecisionCosts | None:
    """Return what operations cost, or None where one of the multiply-adds was not measured."""
    rows = keep_first_rounds(results)
    costs: dict[str, UnitWork] = {}
    for name in ("fp32_fma", "fp64_fma"):
        row = rows.get(name)
        if row is None or not (row.operation_s and row.operation_above_idle_j):
            return None
        costs[name] = UnitWork(row.operation_s, row.operation_above_idle_j)
    integer = None
    row = rows.get("int32_add")
    if row is not None and row.operation_s:
        integer = UnitWork(row.operation_s, row.operation_above_idle_j or 0.0)
    return _PrecisionCosts(costs["fp32_fma"], costs["fp64_fma"], integer)


def _judge_fp64(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Instructions become fp32 ones, fewer in functions; conversions and constants go, 8-byte
    accesses halve.
    """
    costs = _read_precision_costs(results)
    if costs is None or "fp64" not in p.work or p.work["fp64"].seconds <= 0.0:
        return None
    kept = SINGLE_SHARE if p.counters.calls_functions else 1.0
    single = p.work["fp64"].scaled(
        kept * costs.single.seconds / costs.double.seconds,
        kept * costs.single.joules / costs.double.joules,
    )
    factor = {"fp64": (0.0, 0.0)}
    added = {"fp32": single}
    gone = p.counters.double_constants + (1.0 - kept) * p.counters["pipe_fp64"]

    converted = p.counters.converted
    if converted > 0.0:
        factor["special"] = (1.0 - converted / p.counters["pipe_xu"],) * 2
        if (p.counters.access_byte or 4.0) >= 4.0:
            gone += converted  # from and to fp32
        elif costs.integer is not None:
            # from integers, which the integer pipe turns into fp32
            threads = 32.0 * converted
            added["int"] = costs.integer.scaled(threads, threads)
    if "instructions" in p.counters:
        factor["issue"] = (1.0 - min(gone / p.counters["instructions"], 1.0), 1.0)
    factor |= _halve_wide_accesses(p)
    if p.counters.calls_functions and p.counters.reuse >= LEAST_REUSE:
        factor["l1"] = (_share_without_tables(p),) * 2
    share = p.work["fp64"].seconds / p.time_s
    return CodeChange(
        "fp64", f"the fp64 pipe is busy {share:.0%} of the time; fp32 instead", factor, added
    )


def _share_without_tables(p: KernelProfile) -> float:
    """Return the share of the L1's passes that stays without loads that it gives itself.

    Functions in double precision load their coefficients, where single precision has few."""
    m = p.counters
    own = max(m.passes - m["shared_passes"], 0.0)
    hit = m["hit_sectors"] / m["loaded_sectors"] if m["loaded_sectors"] > 0.0 else 0.0
    return 1.0 - hit * own / m.passes if m.passes > 0.0 else 1.0


def _halve_wide_accesses(p: KernelProfile) -> dict[str, tuple[float, float]]:
    """Return the factors of memory's work where accesses of 8 bytes become ones of 4."""
    counts = {size: p.counters[metric] for size, metric in ACCESSES.items()}
    byte = sum(size * count for size, count in counts.items())
    if byte <= 0.0 or counts[8] <= 0.0:
        return {}
    halved = 1.0 - 0.5 * 8.0 * counts[8] / byte
    factor = {"dram": (halved, halved), "l2": (halved, halved)}
    passes = p.counters.passes
    wide_passes = passes - sum(count for size, count in counts.items() if size < 8)
    if wide_passes > 0.0:
        factor["l1"] = (1.0 - 0.5 * wide_passes / passes,) * 2
    return factor


def _judge_conversions(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Conversions fill slots of the special unit, or of the integer pipe where the device has them
    there.
    """
    if not p.counters.has("conversions_of_threads"):
        return _suspect_conversions(p, results)
    count = p.counters["conversions_of_threads"] / 32.0
    if (
        count <= 4.0 * p.counters["pipe_fp64"] or "special" not in p.work
    ):  # those of fp64 go with it
        return None
    if launch_judges.count_divisions(p) > 0.0:  # those of integer divisions go with them
        return None
    special = p.counters.converted
    factor = {"special": (1.0 - special / p.counters["pipe_xu"],) * 2} if special > 0.0 else {}
    whole = p.counters["pipe_alu"]
    if count > special and whole > 0.0:
        factor["int"] = (1.0 - min((count - special) / whole, 1.0),) * 2
    if "instructions" in p.counters:
        factor["issue"] = (1.0 - min(count / p.counters["instructions"], 1.0), 1.0)
    return CodeChange("conversions", f"{32.0 * count:.3g} conversions of threads", factor)


def _suspect_conversions(
    p: KernelProfile,
    results: Sequence[MicroRow],
) -> CodeChange | None:
    """Say what conversions would cost if all instructions of a busy special unit were such.

    ``ncu --set full`` does not count conversions. One is replaced by two additions, of 1.5·2^23 and
    of its negative, which take a slot of issue more and work of their pipe: little is saved, and
    time may be lost."""
    if "special" not in p.work or p.counters["pipe_fp64"] > 0.0:
        return None
    share = p.work["special"].seconds / p.time_s
    if share < unit_work.QUEUED_SHARE or launch_judges.count_divisions(p) > 0.0:
        return None
    seen = (
        f"the special unit is busy {share:.0%} of the time: if those are conversions, "
        "additions of 1.5·2^23 round as well"
    )
    after = dict(p.work)
    gone = after.pop("special")
    each = UnitWork(0.0, 0.0)
    addition = keep_first_rounds(results).get("fp32_fma")
    if addition is not None and addition.operation_s:
        each = UnitWork(addition.operation_s, addition.operation_above_idle_j or 0.0)
    more = each.scaled(ADDITIONS_OF_ROUNDING * 32.0 * p.counters["pipe_xu"])
    single = after.get("fp32", UnitWork(0.0, 0.0))
    after["fp32"] = UnitWork(single.seconds + more.seconds, single.joules + more.joules)
    if p.counters["instructions"] > 0.0 and "issue" in after:
        slots = (ADDITIONS_OF_ROUNDING - 1.0) * p.counters["pipe_xu"] / p.counters["instructions"]
        after["issue"] = after["issue"].scaled(1.0 + slots)
    # what is saved on one pipe comes back on another and in slots of issue, so that these count
    ratio = combine_units_s(after, issue_overlaps=False) / combine_units_s(
        p.work, issue_overlaps=False
    )
    factor = dict.fromkeys(p.work, (ratio, 1.0)) | {"special": (ratio, 0.0)}
    return CodeChange(
        "conversions",
        seen,
        factor,
        {"special": UnitWork(0.0, more.joules)} if gone.joules else {},
        unsure=True,
    )


def _judge_occupancy(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """More resident warps hide the waiting, in proportion, until a unit sets the time."""
    warps = MOST_WARPS * p.counters["warps"]
    if not 0.0 < warps < 0.75 * MOST_WARPS:
        return None
    q = queued_share_of_threads(p)
    seen = f"{warps:.0f} warps resident on an SM, no unit above {p.busy_share:.0%}"
    wait = q + (1.0 - q) * warps / MOST_WARPS
    return CodeChange("occupancy", seen, wait=_keep_tail(p, wait))


def _judge_parallelism(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Independent instructions of a thread hide the waiting as more warps do."""
    q = queued_share_of_threads(p)
    if q >= 1.0:
        return None
    seen = (
        f"instructions wait for each other, no unit above {p.busy_share:.0%}; "
        f"{INDEPENDENT:.0f} at once"
    )
    return CodeChange("parallelism", seen, wait=_keep_tail(p, q + (1.0 - q) / INDEPENDENT))


def _keep_tail(p: KernelProfile, wait: float) -> float:
    """Return a factor of the waiting that leaves the time in which the last wave runs alone.

    Before the tail, units are busier and warps wait less: T = (1 - s)T + sT, and only the waiting
    within sT is hidden."""
    share = launch_judges.share_before_tail(p)
    power = unit_work.EXPONENT
    busy_s = combine_units_s(p.work)
    if share >= launch_judges.LITTLE_TAIL or busy_s >= p.time_s:
        return wait
    full_s = share * p.time_s
    waited_s = max(full_s**power - busy_s**power, 0.0) ** (1.0 / power)
    after_s = (min(busy_s, full_s) ** power + (waited_s * wait) ** power) ** (1.0 / power)
    time_s = p.time_s - full_s + after_s
    before_s = (p.time_s**power - busy_s**power) ** (1.0 / power)
    return float(max(time_s**power - busy_s**power, 0.0) ** (1.0 / power) / before_s)


def _judge_access_size(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    mean = p.counters.access_byte
    if mean is None or mean >= WIDE_BYTE or "dram" not in p.work or p.counters.reads_table:
        return None
    time, energy = unit_work.access_ratio(p.counters, results)
    factor = {"dram": (1.0 / time, 1.0 / energy)}
    passes = p.counters.passes
    each = p.counters.stretch_byte
    own = passes - p.counters["shared_passes"]
    if each is not None and own > 0.0:
        # as many threads walk along their stretches, and wider accesses come back to a sector less
        # often
        fewer = mean / 16.0 * max(each, 16.0) / each
        factor["l1"] = (1.0 - (1.0 - fewer) * own / passes,) * 2
    else:
        factor["launch"] = (mean / 16.0,) * 2
        if mean < 4.0 and own > 0.0:
            factor["l1"] = (1.0 - (1.0 - mean / 4.0) * own / passes,) * 2
    if "instructions" in p.counters:
        constants = (
            0.0 if p.counters.calls_functions else p.counters.constants
        )  # each call loads its own
        shared = sum(p.counters[metric] for metric in ACCESSES.values()) + constants
        fewer = shared * (1.0 - mean / 16.0)  # a thread with more elements needs its constants once
        factor["issue"] = (1.0 - min(fewer / p.counters["instructions"], 1.0), 1.0)
    q = queued_share(p)  # fewer accesses are waited for
    wait = q + (1.0 - q) * (1.0 - p.counters.far_share * (1.0 - mean / 16.0))
    return CodeChange(
        "access size", f"{mean:.1f} bytes a thread and access, 16 are possible", factor, wait=wait
    )


def _judge_caching(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Bytes that the L2 gives again and again could stay in the L1; those of the L1, in a tile of
    shared memory.

    The L1 serves one SM, and a profile does not tell which SM wants a byte again. If all that want
    it are of one block, L2 gives it once instead of r times; if each is of another block, r times
    as before. Neighbours along a row share a block and those of other rows do not, as a rule, so
    the geometric mean is taken: √r times."""
    m = p.counters
    factor = {}
    wait = 1.0
    again = (
        1.0 - (m["dram_read"] / m["l2_read"]) ** 0.5 if 0.0 < m["dram_read"] < m["l2_read"] else 0.0
    )
    hit = m["hit_sectors"] / m["loaded_sectors"] if m["loaded_sectors"] > 0.0 else 0.0
    if again >= 0.5 and "l2" in p.work and p.work["l2"].seconds >= 0.02 * p.time_s:
        factor["l2"] = (1.0 - again * m["l2_read"] / (m["l2_read"] + m["l2_written"]),) * 2
        wait = 1.0 - m.far_share * again * (1.0 - NEAR_LATENCY)
    scattered = m["loaded_sectors"] > 1.5 * m["loads"] * (
        m.access_byte or 4.0
    )  # a tile also brings these together
    if hit >= 0.5 and m["wavefronts"] > 0.0 and (scattered or not factor):
        passes = m.passes  # a table is read in no order in a tile too, without the lookup
        least = m["wavefronts"] - m["shared_passes"] if m.reads_table else m.least_passes
        factor["l1"] = (1.0 - max(passes - m["shared_passes"] - least, 0.0) / passes,) * 2
    if not factor:
        return None
    times = m["l2_read"] / max(m["dram_read"], 1.0)
    seen = f"{hit:.0%} of the sectors loaded are in the L1, L2 gives {times:.1f} times DRAM's"
    return CodeChange(
        "caching",
        seen,
        factor,
        wait=wait,
        unsure="l2" in factor,
    )


def _judge_register_tiles(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Values that the L1 gives to many threads, or to one again and again, could stay in registers.

    A thread with several outputs loads what these share once. Of R uses of a byte, outputs along
    one of two sides share √R, and a thread has registers for few of them. Index arithmetic of the
    loads goes with them."""
    m = p.counters
    reuse = m.reuse
    hit = m["hit_sectors"] / m["loaded_sectors"] if m["loaded_sectors"] > 0.0 else 0.0
    own = m.passes - m["shared_passes"]
    if reuse < LEAST_REUSE or hit < LEAST_HIT or m.reads_table or "l1" not in p.work:
        return None
    arithmetic = m["pipe_fma"] + m["pipe_fp64"] + m["pipe_fp16"]
    if (m.access_byte or 4.0) >= WIDE_BYTE:
        return None  # a thread has as many values at once already
    if own < 0.5 * m.passes or arithmetic < LEAST_ARITHMETIC * m["loads"]:
        return None
    # DRAM gives each byte once, unless it is in the L2 already; then the L2's bytes tell least
    distinct_byte = min(m.get("dram_read", np.inf), m["l2_read"])
    uses = reuse * m["l2_read"] / max(distinct_byte, 1.0)
    left = max(1.0 / MOST_OUTPUTS, uses**-0.5)
    gone = (1.0 - left) * m["loads"]
    factor = {"l1": (1.0 - (1.0 - left) * own / m.passes,) * 2}
    factor["launch"] = (1.0 / MOST_OUTPUTS,) * 2
    if "l2" in p.work and m["l2_read"] + m["l2_written"] > 0.0:
        again = 1.0 - max((reuse / uses) ** 0.5, 1.0 / MOST_OUTPUTS)
        factor["l2"] = (1.0 - again * m["l2_read"] / (m["l2_read"] + m["l2_written"]),) * 2
    indices = 0.0
    for unit, pipe in (("int", "pipe_alu"), ("products", "pipe_fmaheavy")):
        with_loads = min(INDICES_OF_LOAD * gone, (1.0 - left) * m[pipe])
        if with_loads > 0.0:
            factor[unit] = (1.0 - with_loads / m[pipe],) * 2
            indices = max(indices, with_loads)
    if m["instructions"] > 0.0:
        factor["issue"] = (max(1.0 - (gone + indices) / m["instructions"], 0.0), 1.0)
    q = queued_share(p)
    return CodeChange(
        "register tiles",
        f"a byte that the L1 got is used {reuse:.0f} times; registers of a thread with several "
        "outputs can keep it",
        factor,
        wait=q + (1.0 - q) * (1.0 - m.far_share * (1.0 - left)),
        unsure=True,
    )


def _judge_spills(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Values that do not fit into registers go to local memory and back, four sectors an access of
    a warp.
    """
    count = sum(p.counters[name] for name in LOCAL) / 4.0
    if count <= 0.0 or "l1" not in p.work:
        return None
    share = min(count / p.counters.passes, 1.0)
    instructions = count * (1.0 + _instructions_of_index(p))
    kept = max(1.0 - instructions / p.counters["instructions"], LEAST_CODE)
    factor = {"l1": (1.0 - share,) * 2, "issue": (kept, 1.0)}
    for unit, pipe in (("int", "pipe_alu"), ("products", "pipe_fmaheavy")):
        whole = p.counters[pipe]
        if instructions > count and whole > 0.0:
            factor[unit] = (max(1.0 - INDICES_OF_LOAD * count / whole, LEAST_CODE),) * 2
    own = [32.0 * p.counters[sectors] for sectors in ("loaded_sectors", "stored_sectors")]
    for unit, names in MOVED.items():
        moved = [p.counters[name] for name in names]
        if sum(moved) > 0.0:  # what global accesses do not explain
            factor[unit] = (sum(map(min, moved, own)) / sum(moved),) * 2
    return CodeChange(
        "spills", f"{count:.3g} accesses of warps to local memory", factor, wait=1.0 - share
    )


def _judge_atomics(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Additions in the L2 become additions in shared memory, and few of a block are left.

    Additions to the same places wait for each other, which no counter of the L2 tells. So all
    waiting is taken for theirs, up to as much as the other units work."""
    shared = keep_first_rounds(results).get("atomic_shared")
    many = p.counters["reduced_sectors"] > 0.01 * p.counters["instructions"]
    if not many or "atomics" not in p.work or shared is None or not shared.operation_s:
        return None
    count = p.counters["reduced_sectors"]  # of threads, where all add to different places
    added = {
        "l1": UnitWork(count * shared.operation_s, count * (shared.operation_above_idle_j or 0.0))
    }
    alone = CodeChange(
        "atomics", f"{count:.3g} sectors of additions in the L2", {"atomics": (0.0, 0.0)}, added
    )
    return replace(alone, wait=min(combine_units_s(alone.apply(p.work)) / p.time_s, 1.0))


def _instructions_of_index(p: KernelProfile) -> float:
    """Return the instructions that go with an access to local memory: index, comparison, branch.

    An array that loops index lies there without a register having been spilled, which the full set
    tells; loops that are unrolled keep it in registers and need none of these."""
    is_array = p.counters.get("spilling_requests", 1.0) == 0.0
    return CODE_OF_INDEX if is_array else 0.0


Judge = Callable[[KernelProfile, Sequence[MicroRow]], CodeChange | None]
JUDGES: dict[
    str, tuple[tuple[str, ...], Judge]
] = {  # bottleneck: metrics that judging it needs, and how
    "coalescing": (("loaded_sectors", "loads"), _judge_coalescing),
    "bank conflicts": (("shared_passes", "extra_passes"), _judge_conflicts),
    "divergence": (("active_threads",), _judge_divergence),
    "fp64": (("pipe_fp64",), _judge_fp64),
    "conversions": (("pipe_xu",), _judge_conversions),
    "occupancy": (("warps",), _judge_occupancy),
    "parallelism": (("warps",), _judge_parallelism),
    "access size": (tuple(ACCESSES.values()), _judge_access_size),
    "caching": (
        (*CACHE_COUNTERS, "dram_read", "loads", "wavefronts", "shared_passes"),
        _judge_caching,
    ),
    "register tiles": (
        (*CACHE_COUNTERS, "loads", "wavefronts", "instructions"),
        _judge_register_tiles,
    ),
    "spills": ((*LOCAL, "wavefronts", "instructions"), _judge_spills),
    "atomics": (("reduced_sectors",), _judge_atomics),
    **launch_judges.LAUNCH_JUDGES,
}


def judge_fusion(profiles: Sequence[KernelProfile]) -> TuningAdvice | None:
    """Judge what one pass would save over ``profiles``, kernels that run one after the other over
    the same data.

    The pass reads the first input, adds what each later one reads beyond the result handed on to it
    (or beyond the input that it reads again, where little is handed on), and writes the last
    result; arithmetic stays."""
    factor = _fuse_traffic(profiles)
    if not factor:
        return None
    starts_s = [p.work["launch"].seconds for p in profiles if "launch" in p.work]
    if sum(starts_s) > 0.0:
        factor["launch"] = (max(starts_s) / sum(starts_s), 1.0)
    seen = f"{len(profiles)} passes move {1.0 / min(factor.values())[0]:.1f} times what one would"
    seen += ", if each reads what the one before read or wrote"
    change = CodeChange("fusion", seen, factor, unsure=True)
    return advise_change(_add_profiles(profiles), [change])


def _fuse_traffic(profiles: Sequence[KernelProfile]) -> dict[str, tuple[float, float]]:
    """Return the share of the bytes through DRAM and L2 that one pass would still move."""
    factor: dict[str, tuple[float, float]] = {}
    for unit, (reads, writes) in MOVED.items():
        moved = sum(p.counters[reads] + p.counters[writes] for p in profiles)
        kept = profiles[0].counters[reads] + profiles[-1].counters[writes]
        for last, p in pairwise(profiles):
            read = p.counters[reads]
            handed = last.counters[writes]
            reread = handed if handed > 0.3 * read else last.counters[reads]
            kept += max(read - reread, 0.0)
        if moved > 0.0:
            factor[unit] = (kept / moved,) * 2
    return factor


def _add_profiles(profiles: Sequence[KernelProfile]) -> KernelProfile:
    """Return kernels that run one after the other as one: times and work of units are summed."""
    work: dict[str, UnitWork] = {}
    for p in profiles:
        for unit, part in p.work.items():
            before = work.get(unit, UnitWork(0.0, 0.0))
            work[unit] = UnitWork(before.seconds + part.seconds, before.joules + part.joules)
    return KernelProfile(
        " + ".join(p.name for p in profiles),
        sum(p.time_s for p in profiles),
        work,
        unit_work.KernelCounters(),
        profiles[0].idle_power_w,
    )


def find_passes(profiles: Sequence[KernelProfile]) -> list[list[KernelProfile]]:
    """Find runs of different kernels with one launch shape of which each reads about what the one
    before moved.

    A pass may also take a second operand as large as the result before it, as the sum with another
    stream does."""
    runs: list[list[KernelProfile]] = []
    for profile in profiles:
        if runs and _reads_what_moved(profile, runs[-1][-1]):
            runs[-1].append(profile)
        else:
            runs.append([profile])
    return [run for run in runs if len(run) > 1]


def _reads_what_moved(profile: KernelProfile, last: KernelProfile) -> bool:
    """Tell whether a kernel reads as much as the one before read, wrote, or twice wrote.

    DRAM's bytes are near, since the L2 holds some of them; bytes through the L2 are the same."""
    now = profile.counters
    before = last.counters
    is_same_shape = all(now[side] == before.get(side, -1.0) for side in ("grid", "block"))
    if last.name == profile.name or not is_same_shape:
        return False
    moved = _handed_bytes(before, *MOVED["dram"])
    if not any(0.7 * byte < now["dram_read"] < 1.4 * byte for byte in moved):
        return False
    if not (now.has(*MOVED["l2"]) and before.has(*MOVED["l2"])):
        return True
    moved = _handed_bytes(before, *MOVED["l2"])
    return any(abs(now["l2_read"] - byte) <= SAME_BYTES * byte for byte in moved)


def _handed_bytes(
    counters: unit_work.KernelCounters,
    reads: str,
    writes: str,
) -> list[float]:
    """Return the bytes that a next pass may read: the input again, the result, or two results."""
    return [counters[reads], counters[writes], 2.0 * counters[writes]]


@dataclass(frozen=True)
class TuningReport:
    """Advice for all kernels of a profile, most joules first, and what could not be judged."""

    profiles: tuple[KernelProfile, ...]
    advice: tuple[TuningAdvice, ...]
    combined: tuple[TuningAdvice, ...]  # two changes of a kernel at once
    missing: Mapping[str, tuple[str, ...]]  # bottleneck -> metrics the profile lacks


def tune_export(
    path: Path,
    results: Sequence[MicroRow],
    pipes: PipeRates | None = None,
) -> TuningReport:
    """Read an Nsight Compute export and judge every kernel on the device of ``results``.

    ``pipes`` are the device's, for exports of ``ncu --set full``, which give shares of peaks."""
    launches, exported = read_ncu_metrics(path)
    metrics = complete_metrics(exported, launches, pipes)
    do = f"Collect with `{collect_command()}`, or with ncu --set full --csv --page raw."
    if unit_work.TIME not in metrics:
        raise bad_value(path.name, f"the metric {unit_work.TIME}", "an export without it", do)
    counted = {name for name, metric in unit_work.METRICS.items() if metric in metrics}
    idle_w = unit_work.find_idle_power_w(results)
    if not unit_work.list_usable_units(results, counted):
        raise BadInput(f"{path.name}: no unit's work can be counted. {do}")
    profiles = []
    for place, launch in enumerate(launches):
        row = {name: float(column[place]) for name, column in metrics.items()}
        finite = {name: value for name, value in row.items() if np.isfinite(value)}
        profiles.append(unit_work.make_profile(launch.kernel, finite, results, idle_w))
    return TuningReport(
        tuple(profiles),
        *rank_advice(profiles, results),
        _list_missing_metrics(metrics),
    )


def _list_missing_metrics(metrics: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the metrics that judging each bottleneck needs and the export lacks."""
    missing: dict[str, tuple[str, ...]] = {}
    for bottleneck, (needs, _) in JUDGES.items():
        names = [unit_work.METRICS[need] for need in needs]
        absent = tuple(name for name in names if name not in metrics)
        if absent:
            missing[bottleneck] = absent
    return missing


def collect_command() -> str:
    """Return the ``ncu`` command that collects every metric which ``lab tune`` can use."""
    named = [metric for metric in unit_work.METRICS.values() if not metric.startswith("launch__")]
    stalls = [f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio" for why in STALLS]
    metrics = ",".join([*named, *launch_judges.LAUNCH_METRICS, *stalls])
    return (
        "ncu --clock-control none --cache-control none --csv --page raw --print-units base "
        f"--log-file profile.csv --metrics {metrics} PROGRAM"
    )


def rank_advice(
    profiles: Sequence[KernelProfile], results: Sequence[MicroRow]
) -> tuple[tuple[TuningAdvice, ...], tuple[TuningAdvice, ...]]:
    """Rank the single changes that matter on all of ``profiles``, most joules first, and pairs of
    them.
    """
    single = [found for run in find_passes(profiles) if (found := judge_fusion(run)) is not None]
    pairs = []
    for p in profiles:
        judged = (judge(p, results) for needs, judge in JUDGES.values() if p.counters.has(*needs))
        changes = [change for change in judged if change is not None]
        single += [advise_change(p, [change]) for change in changes]
        pairs += [advise_change(p, both) for both in combinations(changes, 2)]
    return _order_advice(single), _order_advice(pairs)


def _order_advice(advice: Sequence[TuningAdvice]) -> tuple[TuningAdvice, ...]:
    """Order what is worth a line by joules saved, and by time among those that save about as
    many.
    """
    left = [a for a in advice if max(abs(a.time), abs(a.energy)) >= WORTH]
    left.sort(key=lambda a: -a.saved_j)
    ordered = []
    while left:
        least_j = LIKE_SAVING * left[0].saved_j
        alike = [a for a in left if a is left[0] or a.saved_j >= least_j > 0.0]
        first = min(alike, key=lambda a: a.time)
        ordered.append(first)
        left.remove(first)
    return tuple(ordered)
