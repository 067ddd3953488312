"""Structure: branch divergence, barriers, and the copies that one thread starts for its block."""

from __future__ import annotations

from wattcast.measure.microbench.unit import Opcodes, Unit, asm, inout, into

PATH_STEPS = 64  # multiply-adds on each path of a divergent branch
BULK_BYTE = 8192
BULK_STAGES = 4
THROUGH_STAGES = 6  # of a copy through shared memory
SPINS = 1 << 22  # tries of a barrier before a kernel gives up: no wait may last for ever


def divergence(ways: int) -> Unit:
    """``ways`` paths of the same length; lanes take them by turns, so each warp runs them one after another.

    Half of a path grows by g, the other half shrinks by r near 1/g and turns the sign last, as
    :func:`~wattcast.measure.microbench.arithmetic.multiply_adds` does, so that values neither settle nor overflow.
    """
    p = f"divergence_{ways}"
    # through a shuffle, or the assembler computes the operands again on every path
    declare = f"const unsigned {p}_way = __shfl_sync(0xffffffffu, lane % {ways}u, lane); "
    declare += f"const float {p}_g = __shfl_sync(0xffffffffu, 1.0f + (unit_float(state) - 1.0f) * 0.0625f, lane); "
    declare += f"const float {p}_r = __shfl_sync(0xffffffffu, 0.999999f / {p}_g, lane); "
    declare += " ".join(f"float {p}{i} = unit_float(mixed(state + {i + 1}u));" for i in range(4))
    paths = []
    for way in range(ways):
        lines = []
        for i in range(PATH_STEPS):
            shrinks, last = i >= PATH_STEPS // 2, i >= PATH_STEPS - 4
            constant = f"0f{(0xBF800000 if shrinks else 0x3F800000) + 4096 * way:08X}"  # tells paths apart
            multiplier = f"{'-' if last else ''}{p}_{'r' if shrinks else 'g'}"
            lines.append(asm(f"fma.rn.f32 %0, %0, %1, {constant};", inout("f", f"{p}{i % 4}"), into("f", multiplier)))
        inner = " ".join(lines)
        paths.append(f"if ({p}_way == {way}u) {{ {inner} }}" if ways > 1 else inner)
    return Unit(
        p,
        declare,
        lambda i: "",
        " ^ ".join(f"__float_as_uint({p}{i})" for i in range(4)),
        ((r"FFMA.*", float(PATH_STEPS * ways)),),
        before="\n    ".join(paths),
        around=(
            (r"BSSY.*|BSYNC.*|ISETP.*|BRA.*|WARPSYNC.*|NOP|BREAK.*|BRX|YIELD|MOV|PLOP3.*|CALL.*", 6.0 * ways + 2),
        ),
        per_step=PATH_STEPS,
        operation="instruction",
    )


def barrier(name: str = "sync_barrier") -> Unit:
    """Barriers of the whole block."""
    return Unit(
        name, "", lambda i: 'asm volatile("bar.sync 0;" ::: "memory");', "0u", ((r"BAR.*", 1),), operation="barrier"
    )


def fence(name: str = "sync_fence") -> Unit:
    """Memory fences of the whole device."""
    return Unit(
        name,
        "",
        lambda i: 'asm volatile("fence.acq_rel.gpu;" ::: "memory");',
        "0u",
        ((r"MEMBAR.*", 1),),
        around=((r"ERRBAR|CCTL.*|CGAERRBAR", 256.0),),
        operation="fence",
    )


def bulk(name: str, working_set_of: str = "a") -> Unit:
    """One thread of a block keeps four bulk copies of 8 KiB from global to shared memory under way."""
    p = name
    size, stages = BULK_BYTE, BULK_STAGES
    declare = (
        f"const unsigned {p}_pool = (unsigned)__cvta_generic_to_shared(pool); "
        f"const unsigned {p}_bar = {p}_pool + {size * stages}u, {p}_chunks = (unsigned)(bytes / {size}ull), "
        f"{p}_step = gridDim.x % {p}_chunks; "
        f"unsigned {p}_k = blockIdx.x % {p}_chunks, {p}_phase = 0u; "
        f"if (threadIdx.x == 0u) {{ for (unsigned s = 0; s < {stages}u; ++s) "
        f'asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"({p}_bar + 8u * s) : "memory"); '
        'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); '
        f"for (unsigned s = 0; s < {stages}u; ++s) {{ {_issue(p, 's', working_set_of)} }} }} __syncthreads();"
    )
    stage = " ".join(_stage(p, s, working_set_of) for s in range(stages))
    before = f"if (threadIdx.x == 0u) {{ {stage} }} {p}_phase ^= 1u;"
    drain = " ".join(_wait(p, s) for s in range(stages))  # no copy may land after the block has gone
    return Unit(
        p,
        declare,
        lambda i: "",
        "((unsigned *)pool)[threadIdx.x]",
        ((r"UBLKCP.*", 1),),
        before=before,
        finish=f"if (threadIdx.x == 0u) {{ {drain} }}",
        around=_bulk_around(stages),
        operation="copy",
        one_thread=True,
        byte=float(size),
    )


def _issue(p: str, stage: str, buffer: str) -> str:
    size = BULK_BYTE
    text = (
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %3; "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%1], [%2], %3, [%0];"
    )
    return (
        f'asm volatile("{text}" :: "r"({p}_bar + 8u * {stage}), "r"({p}_pool + {size}u * {stage}), '
        f'"l"({buffer} + (u64){p}_k * {size}ull), "r"({size}u) : "memory"); '
        f"{p}_k += {p}_step; if ({p}_k >= {p}_chunks) {p}_k -= {p}_chunks;"
    )


def _stage(p: str, stage: int, buffer: str) -> str:
    return f"{_wait(p, stage)} {_issue(p, f'{stage}u', buffer)}"


def bulk_there_and_back(name: str) -> Unit:
    """A copy of one buffer to the other in bulk: into shared memory and out again, one thread of a block for all.

    Stage by stage: wait for what came in, send it out, and when the one before has been read, load into its place.
    """
    p, size, stages = name, BULK_BYTE, THROUGH_STAGES
    declare = (
        f"const unsigned {p}_pool = (unsigned)__cvta_generic_to_shared(pool); "
        f"const unsigned {p}_bar = {p}_pool + {size * stages}u, {p}_chunks = (unsigned)(bytes / {size}ull), "
        f"{p}_step = gridDim.x % {p}_chunks; "
        f"unsigned {p}_k = blockIdx.x % {p}_chunks, {p}_out = {p}_k, {p}_phase = 0u; "
        f"if (threadIdx.x == 0u) {{ for (unsigned s = 0; s < {stages}u; ++s) "
        f'asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"({p}_bar + 8u * s) : "memory"); '
        'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); '
        f"for (unsigned s = 0; s < {stages - 1}u; ++s) {{ {_issue(p, 's', 'a')} }} }} __syncthreads();"
    )
    turns = []
    for s in range(stages):
        send = (
            f'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;" '
            f':: "l"(b + (u64){p}_out * {size}ull), "r"({p}_pool + {size * s}u), "r"({size}u) : "memory"); '
            f"{p}_out += {p}_step; if ({p}_out >= {p}_chunks) {p}_out -= {p}_chunks;"
        )
        read = 'asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");'
        turns.append(f"{_wait(p, s)} {send} {read} {_issue(p, f'{(s - 1) % stages}u', 'a')}")
    drain = " ".join(_wait(p, s) for s in range(stages - 1))
    drain += ' asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");'
    return Unit(
        p,
        declare,
        lambda i: "",
        "((unsigned *)pool)[threadIdx.x]",
        ((r"UBLKCP.*", 2),),
        before=f"if (threadIdx.x == 0u) {{ {' '.join(turns)} }} {p}_phase ^= 1u;",
        finish=f"if (threadIdx.x == 0u) {{ {drain} }}",
        around=_bulk_around(2 * stages),
        operation="copy",
        one_thread=True,
        byte=2.0 * size,
        chunk=size * stages,
    )


def _bulk_around(copies: int) -> Opcodes:
    """What waiting for and starting ``copies`` bulk copies takes."""
    return (
        (r"SYNCS.*|UTMACMDFLUSH|DEPBAR.*", 2.0 * copies),
        (r"ELECT|R2UR.*|UMOV|U?IADD.*|U?PLOP3.*|BRA.*|BSSY.*|BSYNC.*|VIADD.*|YIELD|UISETP.*", 20.0 * copies),
        (r"IMAD.*|ISETP.*|SHF.*|SEL|MOV|LEA.*|LOP3.*|NOP|BREAK.*|WARPSYNC.*|BPT.*|S2UR|USEL|ULEA.*", 12.0 * copies),
    )


def _wait(p: str, stage: int) -> str:
    return (
        f"{{ unsigned done = 0u; for (unsigned spin = 0; spin < {SPINS}u && !done; ++spin) "
        '{ asm volatile("{.reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"'
        f' : "=r"(done) : "r"({p}_bar + {8 * stage}u), "r"({p}_phase) : "memory"); }} '
        'if (!done) asm volatile("trap;"); }'
    )


def sleep(name: str = "sleep") -> Unit:
    """Warps that are resident and do nothing."""
    return Unit(name, "", lambda i: asm("nanosleep.u32 1000;"), "0u", ((r"NANOSLEEP.*", 1),), operation="sleep")
