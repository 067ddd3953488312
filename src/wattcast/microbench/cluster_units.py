"""Define copies by the copy engine of an SM (TMA) and the memory that the blocks of a cluster share.

A bulk copy is one instruction of one thread: 8 KiB in a row, a tile of 64 rows of 128 bytes by a tensor map, or a
slice that reaches all blocks of a cluster at once. A barrier in shared memory counts the bytes that have come.
"""

from __future__ import annotations

from wattcast.microbench.unit_source import CLUSTER_SYNC, BenchUnit, OpcodeCounts, asm, into

BULK_BYTE = 8192
BULK_STAGES = 4
THROUGH_STAGES = 6  # of a copy through shared memory
LATENCY_STEPS = 16  # copies of an iteration that wait for one another
SPINS = 1 << 22  # tries of a barrier before a kernel gives up: no wait may last for ever
TILE_ROWS, TILE_BYTE, ROW_TILES = 64, 128, 64  # rows and bytes across of a tile; tiles across the matrix


def bulk_unit(name: str, tile: bool = False, cluster: int = 1) -> BenchUnit:
    """Keep four copies of 8 KiB from global to shared memory under way, by one thread of a block.

    ``tile`` takes them from a matrix through the tensor map at ``b``. In a cluster each block fetches its share and
    sends it to all; a block counts the bytes that arrive, so one that runs ahead cannot lose any.
    """
    p, stages = name, BULK_STAGES
    declare = _declare_bulk(p, stages, stages, tile, cluster)
    stage = " ".join(f"{_wait_bulk(p, s)} {_issue_bulk(p, f'{s}u', tile, cluster)}" for s in range(stages))
    before = f"if (threadIdx.x == 0u) {{ {stage} }} {p}_phase ^= 1u;"
    drain = " ".join(_wait_bulk(p, s) for s in range(stages))  # no copy may land after the block has gone
    return BenchUnit(
        p,
        declare,
        lambda i: "",
        "((unsigned *)pool)[threadIdx.x]",
        ((r"UTMALDG.*" if tile else r"UBLKCP.*", 1),),
        before=before,
        finish=f"if (threadIdx.x == 0u) {{ {drain} }}" + (f" {CLUSTER_SYNC}" if cluster > 1 else ""),
        around=_count_bulk_around(stages),
        operation="copy",
        one_thread=True,
        byte=float(BULK_BYTE),
        cluster=cluster,
    )


def bulk_latency_unit(name: str, size: int) -> BenchUnit:
    """Copy ``size`` bytes from L2 and wait for them before the next copy begins."""
    p = name
    step = f"{_issue_bulk(p, '0u', size=size)} {_wait_bulk(p, 0)} {p}_phase ^= 1u;"
    return BenchUnit(
        p,
        _declare_bulk(p, 1, 0),
        lambda i: "",
        "((unsigned *)pool)[threadIdx.x]",
        ((r"UBLKCP.*", 1),),
        before=f"if (threadIdx.x == 0u) {{ {' '.join([step] * LATENCY_STEPS)} }}",
        around=_count_bulk_around(LATENCY_STEPS),
        operation="copy",
        one_thread=True,
        byte=float(size),
    )


def _declare_bulk(p: str, stages: int, started: int, tile: bool = False, cluster: int = 1, more: str = "") -> str:
    """Declare places and barriers of bulk copies, and start the first ``started`` of them."""
    begin = (
        f"for (unsigned s = 0; s < {started}u; ++s) {{ {_issue_bulk(p, 's', tile, cluster)} }} }} __syncthreads();"
    )
    first = ""
    if tile:  # the host wrote the map, which the copy engine reads past the usual caches
        first = asm("fence.proxy.tensormap::generic.acquire.sys [%0], 128;", "", into("l", "b")) + " "
    if cluster > 1:  # a block may send only when the others count
        begin = f"}} {CLUSTER_SYNC} if (threadIdx.x == 0u) {{ {begin}"
        first = f'unsigned {p}_rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"({p}_rank)); '
    return (
        f"const unsigned {p}_pool = (unsigned)__cvta_generic_to_shared(pool); "
        f"const unsigned {p}_bar = {p}_pool + {BULK_BYTE * stages}u, "
        f"{p}_chunks = (unsigned)(bytes / {BULK_BYTE}ull), {p}_step = gridDim.x / {cluster}u % {p}_chunks; "
        f"unsigned {p}_k = blockIdx.x / {cluster}u % {p}_chunks, {p}_phase = 0u{more}; {first}"
        f"if (threadIdx.x == 0u) {{ for (unsigned s = 0; s < {stages}u; ++s) "
        f'asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"({p}_bar + 8u * s) : "memory"); '
        f'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); {begin}'
    )


def _issue_bulk(p: str, stage: str, tile: bool = False, cluster: int = 1, size: int = BULK_BYTE) -> str:
    """Tell the barrier of a stage how many bytes will come, start their copy, and go on to the next chunk."""
    slice_byte, kind = size // cluster, "shared::cluster.global.mbarrier::complete_tx::bytes"
    to, source = f"{p}_pool + {BULK_BYTE}u * {stage}", f"a + (u64){p}_k * {BULK_BYTE}ull"
    copy = f"cp.async.bulk.{kind} [%1], [%2], {slice_byte}, [%0];"
    more = ""
    if tile:
        copy, source = f"cp.async.bulk.tensor.2d.{kind} [%1], [%2, {{%3, %4}}], [%0];", "b"
        across, down = f"{p}_k % {ROW_TILES}u * {TILE_BYTE // 2}u", f"{p}_k / {ROW_TILES}u * {TILE_ROWS}u"
        more = f', "r"({across}), "r"({down})'
    elif cluster > 1:
        copy = f"cp.async.bulk.{kind}.multicast::cluster [%1], [%2], {slice_byte}, [%0], %3;"
        to, source = f"{to} + {p}_rank * {slice_byte}u", f"{source} + {p}_rank * {slice_byte}u"
        more = f', "h"((unsigned short){(1 << cluster) - 1})'
    text = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], {size}; {copy}"
    return (
        f'asm volatile("{text}" :: "r"({p}_bar + 8u * {stage}), "r"({to}), "l"({source}){more} : "memory"); '
        f"{p}_k += {p}_step; if ({p}_k >= {p}_chunks) {p}_k -= {p}_chunks;"
    )


def bulk_there_and_back_unit(name: str) -> BenchUnit:
    """Copy one buffer to the other in bulk: into shared memory and out again, one thread of a block for all.

    Stage by stage: wait for what came in, send it out, and when the one before has been read, load into its place.
    """
    p, size, stages = name, BULK_BYTE, THROUGH_STAGES
    declare = _declare_bulk(p, stages, stages - 1, more=f", {p}_out = {p}_k")
    turns = []
    for s in range(stages):
        send = (
            f'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;" '
            f':: "l"(b + (u64){p}_out * {size}ull), "r"({p}_pool + {size * s}u), "r"({size}u) : "memory"); '
            f"{p}_out += {p}_step; if ({p}_out >= {p}_chunks) {p}_out -= {p}_chunks;"
        )
        read = 'asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");'
        turns.append(f"{_wait_bulk(p, s)} {send} {read} {_issue_bulk(p, f'{(s - 1) % stages}u')}")
    drain = " ".join(_wait_bulk(p, s) for s in range(stages - 1))
    drain += ' asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");'
    return BenchUnit(
        p,
        declare,
        lambda i: "",
        "((unsigned *)pool)[threadIdx.x]",
        ((r"UBLKCP.*", 2),),
        before=f"if (threadIdx.x == 0u) {{ {' '.join(turns)} }} {p}_phase ^= 1u;",
        finish=f"if (threadIdx.x == 0u) {{ {drain} }}",
        around=_count_bulk_around(2 * stages),
        operation="copy",
        one_thread=True,
        byte=2.0 * size,
        chunk=size * stages,
    )


def _count_bulk_around(copies: int) -> OpcodeCounts:
    """Return the instructions that wait for and start ``copies`` bulk copies."""
    return (
        (r"SYNCS.*|UTMACMDFLUSH|DEPBAR.*", 2.0 * copies),
        (r"ELECT|R2UR.*|UMOV|U?IADD.*|U?PLOP3.*|BRA.*|BSSY.*|BSYNC.*|VIADD.*|YIELD|UISETP.*", 20.0 * copies),
        (
            r"IMAD.*|ISETP.*|SHF.*|SEL|MOV|LEA.*|LOP3.*|NOP|BREAK.*|WARPSYNC.*|BPT.*|S2UR|USEL|ULEA.*|U?LDCU?.*",
            12.0 * copies,
        ),
    )


def _wait_bulk(p: str, stage: int) -> str:
    return (
        f"{{ unsigned done = 0u; for (unsigned spin = 0; spin < {SPINS}u && !done; ++spin) "
        '{ asm volatile("{.reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"'
        f' : "=r"(done) : "r"({p}_bar + {8 * stage}u), "r"({p}_phase) : "memory"); }} '
        'if (!done) asm volatile("trap;"); }'
    )
