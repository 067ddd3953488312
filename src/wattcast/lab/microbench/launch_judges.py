"""Judge bottlenecks of a kernel's launch and code: barriers, few blocks, tails, divisions, tensor
cores, fetches of instructions.

Each judge returns the change that removes its bottleneck, or None where there is none. What a
change really brings depends on code that a profile does not show, so that all of these are unsure:
their intervals reach to no change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from wattcast.lab.microbench.code_changes import CodeChange
from wattcast.lab.microbench.microbench_results import MicroRow, keep_first_rounds
from wattcast.lab.microbench.unit_work import (
    ARITHMETIC,
    NO_STALLS,
    QUEUED_SHARE,
    SCHEDULERS,
    KernelProfile,
    UnitWork,
    curve_ratio,
)

LAUNCH_METRICS = (
    "launch__occupancy_limit_blocks",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
)
WHOLE_WARP = 31.0  # active threads of a warp from which on it does not diverge
MUCH_WAITING = 0.3  # share of waiting from which on its reason is a bottleneck
FEW_BLOCKS = 0.75  # for a multiprocessor, below which few blocks are what leaves warps few
LITTLE_TAIL = 0.9  # share of the last wave's multiprocessors at work from which on it costs little
MOST_WAVES = 4.0  # beyond which a tail is short
# A 32-bit integer division is software: to float and back, a reciprocal, five products and six
# other instructions; a multiplication and a shift do instead where the divisor is known.
CONVERSIONS_OF_DIVISION = 2.0
SPECIAL_OF_DIVISION = 3.0
WHOLE_OF_DIVISION = 6.0
PRODUCTS_OF_DIVISION = 5.0
LEFT_OF_DIVISION = 1.0 / 6.0
DIVISION_SHARES = (0.55, 0.8)  # of the special unit's instructions that convert
MOST_SINGLE = 1.5  # fp32 instructions for one of the special unit, where it serves divisions
PRODUCT_SHARE = 0.4  # of a matrix product's instructions that are multiply-adds
LITTLE_TENSOR = 0.05  # share of the tensor pipe's cycles that moves of constants can take
TENSOR_L1_SHARE = 0.25  # of its passes that are left where fragments serve tensor cores
# Threads of a block that combine values in shared memory, level by level: each level has a barrier,
# loads, a store and an index. Threads of a warp can shuffle instead, with one pass and no barrier.
EXCHANGE_WAITING = 0.15  # share of the waiting at barriers
EXCHANGE_ACCESSES = 3.0  # accesses of shared memory for one of global memory
EXCHANGE_ARITHMETIC = 1.0  # multiply-adds for an access at most: tiles of products have more
MANY_CONFLICTS = 0.75  # of an access, from which on they are what to mend first
LEFT_PASSES = 1.0 / 3.0  # a shuffle instead of two loads and a store
LEFT_INSTRUCTIONS = 0.5

Judge = Callable[[KernelProfile, Sequence[MicroRow]], CodeChange | None]


def waiting_share(profile: KernelProfile, reason: str) -> float:
    """Return the share of all waiting of warps that has one reason, zero where it was not
    counted.
    """
    waits = {
        name.removeprefix("stalled_"): each
        for name, each in profile.counters.items()
        if name.startswith("stalled_") and name.removeprefix("stalled_") not in NO_STALLS
    }
    total = sum(waits.values())
    return waits.get(reason, 0.0) / total if total > 0.0 else 0.0


def judge_barriers(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Warps that wait at a barrier wait for the slowest of their block."""
    share = waiting_share(p, "barrier")
    active = p.counters.active or 32.0
    exchange = _judge_exchange(p, share) if active >= WHOLE_WARP else None
    if exchange is not None or share < MUCH_WAITING:
        return exchange
    seen = f"{share:.0%} of the waiting is at barriers: warps of a block take different times"
    ratio = curve_ratio(results, "divergence", 32.0 / active, 1.0) if active < WHOLE_WARP else None
    # few threads of a warp do what the others wait for: shared out, it takes fewer instructions
    factor = dict.fromkeys((*ARITHMETIC, "issue", "products"), ratio) if ratio else {}
    return CodeChange("barriers", seen, factor, wait=1.0 - share, unsure=True)


def _judge_exchange(p: KernelProfile, share: float) -> CodeChange | None:
    """Values that a block combines in shared memory, with a barrier a level, could be shuffled."""
    m = p.counters
    accesses = m["shared_passes"] - m["extra_passes"]
    # integer products run on the heavy half of the pipe alone, and are no arithmetic of tiles
    single = min(2.0 * max(m["pipe_fma"] - m["pipe_fmaheavy"], 0.0), m["pipe_fma"])
    is_exchange = (
        share >= EXCHANGE_WAITING
        and (m.conflicts or 0.0) < MANY_CONFLICTS
        and accesses >= EXCHANGE_ACCESSES * max(m["loads"], 1.0)
        and single <= EXCHANGE_ARITHMETIC * accesses
    )
    if not is_exchange or m.passes <= 0.0:
        return None
    factor = dict.fromkeys(("int", "issue", "products"), (LEFT_INSTRUCTIONS,) * 2)
    shared = min(m["shared_passes"] / m.passes, 1.0)
    factor["l1"] = (1.0 - (1.0 - LEFT_PASSES) * shared,) * 2
    seen = (
        f"{accesses / max(m['loads'], 1.0):.0f} accesses of shared memory for one of memory and "
        f"{share:.0%} of the waiting at barriers: threads of a warp can shuffle instead"
    )
    return CodeChange("barriers", seen, factor, wait=1.0 - share, unsure=True)


def judge_instruction_fetch(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Code that is longer than the instruction cache is fetched again and again."""
    share = waiting_share(p, "no_instruction")
    active = p.counters.active or 32.0
    if share < MUCH_WAITING or active < WHOLE_WARP:  # branches of diverged warps fetch as well
        return None
    seen = f"{share:.0%} of the waiting is for instructions: the code is longer than its cache"
    return CodeChange("instruction cache", seen, wait=1.0 - share, unsure=True)


def judge_small_grid(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Fewer blocks than multiprocessors leave some of them without work, and others with few warps.

    As many blocks as fit at once hide waiting as well."""
    m = p.counters
    sms = m["sm_count"]
    if not (sms > 0.0 and 0.0 < m["grid"] < sms):
        return None
    seen = f"{m['grid']:.0f} blocks for {sms:.0f} multiprocessors"
    # nearly a block each is a matter of occupancy
    places = sms * (max(m["resident_blocks"], 1.0) if m["grid"] < FEW_BLOCKS * sms else 1.0)
    return CodeChange("small grid", seen, wait=m["grid"] / places, unsure=True)


def share_before_tail(p: KernelProfile) -> float:
    """Return the share of the time that a kernel would take without the tail of its last wave."""
    m = p.counters
    places = m["sm_count"] * m["resident_blocks"]
    waves = m["grid"] / places if places > 0.0 else 0.0
    if not 1.0 < waves < MOST_WAVES:
        return 1.0
    each = m["grid"] / m["sm_count"]
    by_blocks = each / math.ceil(each)
    q = min(p.busy_share / by_blocks / QUEUED_SHARE, 1.0)  # units are busier before the tail
    return q * by_blocks + (1.0 - q) * waves / math.ceil(waves)


def judge_tail(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """The last wave of blocks leaves multiprocessors idle.

    Where warps wait for latency, each wave takes as long as a full one. Where units are busy, a
    multiprocessor takes as long as it has blocks, and the ones with most of them set the time."""
    share = share_before_tail(p)
    if share >= LITTLE_TAIL:
        return None
    m = p.counters
    waves = m["grid"] / (m["sm_count"] * m["resident_blocks"])
    seen = f"{waves:.2f} waves of blocks: the last fills {waves % 1.0:.0%} of the places"
    return CodeChange("tail wave", seen, wait=share, unsure=True)


def count_divisions(p: KernelProfile) -> float:
    """Return the integer divisions, in instructions of warps, that a kernel seems to do."""
    m = p.counters
    if not m.has("conversions_of_threads"):
        return guess_divisions(p)
    special = m["pipe_xu"]
    converted = m["conversions_of_threads"] / 32.0
    if special <= 0.0 or m["pipe_fp64"] > 0.01 * special:
        return 0.0
    is_division = DIVISION_SHARES[0] <= converted / special <= DIVISION_SHARES[1]
    whole = m["pipe_alu"]
    products = m["pipe_fmaheavy"]
    divisions = converted / CONVERSIONS_OF_DIVISION
    has_others = (
        whole >= 0.8 * WHOLE_OF_DIVISION * divisions
        and products >= 0.5 * PRODUCTS_OF_DIVISION * divisions
    )
    return divisions if is_division and has_others else 0.0


def guess_divisions(p: KernelProfile) -> float:
    """Return the integer divisions of a profile without counts of conversions, by its pipes.

    ``ncu --set full`` has none. Integer products run on the heavy half of the multiply-add pipe
    alone and others on both halves alike: that half tells how many there are. Divisions by one
    divisor share its reciprocal, so that they are counted by their products and integer
    instructions. A kernel with many fp32 instructions for each of the special unit computes
    functions there, and gets no answer."""
    m = p.counters
    special = m["pipe_xu"]
    single = 2.0 * max(m["pipe_fma"] - m["pipe_fmaheavy"], 0.0)
    products = max(2.0 * m["pipe_fmaheavy"] - m["pipe_fma"], 0.0)
    whole = m["pipe_alu"]
    if special <= 0.0 or m["pipe_fp64"] > 0.01 * special or not m.has("pipe_fma"):
        return 0.0
    reciprocals = special / SPECIAL_OF_DIVISION
    if single > MOST_SINGLE * special:
        return 0.0
    if products < 0.8 * PRODUCTS_OF_DIVISION * reciprocals:
        return 0.0
    if whole < 0.8 * WHOLE_OF_DIVISION * reciprocals:
        return 0.0
    return min(products / PRODUCTS_OF_DIVISION, whole / WHOLE_OF_DIVISION)


def judge_division(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Divisions by a known divisor are a multiplication and a shift."""
    m = p.counters
    divisions = count_divisions(p)
    if divisions <= 0.0:
        return None
    gone = (1.0 - LEFT_OF_DIVISION) * divisions
    factor = {"special": (max(1.0 - SPECIAL_OF_DIVISION * divisions / m["pipe_xu"], 0.0),) * 2}
    factor["int"] = (max(1.0 - WHOLE_OF_DIVISION * gone / m["pipe_alu"], 0.0),) * 2
    left = max(1.0 - PRODUCTS_OF_DIVISION * gone / max(m["pipe_fmaheavy"], 1.0), 0.0)
    factor["products"] = (left, left)
    fewer = SPECIAL_OF_DIVISION + WHOLE_OF_DIVISION + PRODUCTS_OF_DIVISION
    if m["instructions"] > 0.0:
        factor["issue"] = (max(1.0 - fewer * gone / m["instructions"], 0.0), 1.0)
    seen = (
        f"{32.0 * divisions:.3g} integer divisions of threads, each of about "
        f"{fewer:.0f} instructions"
    )
    return CodeChange("integer division", seen, factor, unsure=True)


def judge_tensor_cores(p: KernelProfile, results: Sequence[MicroRow]) -> CodeChange | None:
    """Multiply-adds of a matrix product that the tensor cores could do in tf32."""
    m = p.counters
    single = p.work.get("fp32")
    by_name = keep_first_rounds(results)
    vector = by_name.get("fp32_fma")
    tensor = by_name.get("wgmma_tf32") or by_name.get("mma_tf32")
    if single is None or vector is None or tensor is None:
        return None
    is_idle = m["tensor_cycles"] <= LITTLE_TENSOR * SCHEDULERS * m["sm_cycles"]
    if not is_idle or p.busiest not in ("fp32", "l1"):
        return None
    is_product = m["pipe_fma"] >= PRODUCT_SHARE * m["instructions"] > 0.0
    has_tiles = m["shared_passes"] > 0.1 * m["pipe_fma"]
    if not (is_product and has_tiles and vector.operation_s and tensor.operation_s):
        return None
    time = tensor.operation_s / vector.operation_s
    joules = (tensor.operation_above_idle_j or 0.0) / (vector.operation_above_idle_j or 1.0)
    factor = {
        "fp32": (0.0, 0.0),
        "issue": (1.0 - m["pipe_fma"] / m["instructions"], 1.0),
    }
    if m.passes > 0.0:
        # fragments lie otherwise in shared memory, so that few conflicts go with the passes; many are
        # a bottleneck of their own
        kept = m["extra_passes"] if (m.conflicts or 0.0) >= MANY_CONFLICTS else 0.0
        tiles = min(max(m["shared_passes"] - kept, 0.0) / m.passes, 1.0)
        factor["l1"] = (1.0 - (1.0 - TENSOR_L1_SHARE) * tiles,) * 2
    added = {"tensor": UnitWork(single.seconds * time, single.joules * joules)}
    share = single.seconds / p.time_s
    seen = f"fp32 multiply-adds on tiles take {share:.0%} of the time, tensor cores are idle"
    return CodeChange(
        "tensor cores",
        seen,
        factor,
        added,
        unsure=True,
    )


# bottleneck: metrics that judging it needs, and how
LAUNCH_JUDGES: dict[str, tuple[tuple[str, ...], Judge]] = {
    "barriers": ((), judge_barriers),
    "instruction cache": ((), judge_instruction_fetch),
    "small grid": (("grid", "sm_cycles"), judge_small_grid),
    "tail wave": (("grid", "sm_cycles"), judge_tail),
    "integer division": (("pipe_xu", "pipe_alu", "pipe_fmaheavy"), judge_division),
    "tensor cores": (("pipe_fma", "instructions", "shared_passes"), judge_tensor_cores),
}
