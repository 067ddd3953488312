"""Define units of tensor cores (``mma.sync``, ``wgmma``), branches, barriers, and of the copy engine (TMA).

wgmma reads both operands from shared memory in the 128-byte swizzled, K-major layout that matrix products use: rows
of 128 bytes, eight rows to a group of 1024 bytes. A step of K is 32 bytes wide in every precision, so descriptors
advance alike. Two warpgroups of a block share the B tiles and have their own A tiles; four stages of tiles (192 KiB)
give sixteen different products an iteration, the first of which clears the accumulators. All products of an
iteration are in flight before it waits.

A bulk copy by the copy engine of an SM is one instruction of one thread: 8 KiB in a row, a tile of 64 rows of 128
bytes by a tensor map, or a slice that reaches all blocks of a cluster at once, which share their memory. A barrier in
shared memory counts the bytes that have come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from wattcast.core.measured_rows import read_shipped_table
from wattcast.microbench.unit_source import CLUSTER_SYNC, BenchUnit, asm, inout, into, vector

Entry = TypeVar("Entry", bound="TensorPrecision | MmaShape")

STAGES = 4
A_TILE_BYTE = 64 * 128
STEPS_OF_STAGE = 4  # 128 bytes of K in steps of 32
WGMMA_STEPS = STAGES * STEPS_OF_STAGE
CHAINS = 8
SPARSE_PAIRS = "(lane & 1u ? 0xeeeeeeeeu : 0x44444444u)"  # two of four: the last two, or the first two
BULK_BYTE = 8192
BULK_STAGES = 4
THROUGH_STAGES = 6  # of a copy through shared memory
LATENCY_STEPS = 16  # copies of an iteration that wait for one another
SPINS = 1 << 22  # tries of a barrier before a kernel gives up: no wait may last for ever
TILE_ROWS, TILE_BYTE, ROW_TILES = 64, 128, 64  # rows and bytes across of a tile; tiles across the matrix


@dataclass(frozen=True)
class TensorPrecision:
    """How a precision is written in PTX, and a random word of it whose values lie between 1 and 2 in size."""

    name: str
    word: str  # C expression of random bits x
    one: str  # a word of ones (0.5 for floating point), for the check
    half: float  # the value of its elements
    k: int  # of a 32-byte step
    wgmma: str  # types of a product: result and operands


@dataclass(frozen=True)
class MmaShape:
    """One form of ``mma.sync``: registers of A, B and C, and multiply-adds."""

    name: str
    types: str
    a: int
    b: int
    c: int
    letter: str  # of C
    multiply_adds: int
    word: str  # the precision of random operands


def _read_table(name: str, kind: type[Entry]) -> dict[str, Entry]:
    numbers: dict[str, Any] = {"half": float} | dict.fromkeys(("k", "a", "b", "c", "multiply_adds"), int)
    rows = read_shipped_table("wattcast.microbench", name)
    made = ({key: numbers.get(key, str)(cell) for key, cell in row.items()} for row in rows)
    return {values["name"]: kind(**values) for values in made}


PRECISIONS, MMA = _read_table("tensor_formats.csv", TensorPrecision), _read_table("mma_shapes.csv", MmaShape)


def wgmma_shared_byte(columns: int, groups: int) -> int:
    """Return the shared memory of all stages: an A tile for each warpgroup and a B tile for all."""
    return STAGES * (groups * A_TILE_BYTE + columns * 128)


def wgmma_unit(
    name: str,
    precision: str,
    zeros: bool = False,
    columns: int = 256,
    groups: int = 2,
    sparse: bool = False,
    apart: bool = False,
) -> BenchUnit:
    """Multiply tiles of m64 x ``columns`` in ``groups`` warpgroups; one step is one instruction of a warpgroup.

    ``sparse`` A tiles hold two of every four elements, so K doubles; operations are those of the dense product, as
    vendors count them. ``apart`` products wait for the one before.
    """
    form = PRECISIONS[precision]
    registers = columns // 2  # of accumulators in a thread
    integer = precision == "int8"
    kind, letter = ("int", "r") if integer else ("float", "f")
    word = "0u" if zeros else f"(seed == 0u ? {form.one} : ({form.word}))"
    declare = (
        f"for (unsigned i = threadIdx.x; i < {wgmma_shared_byte(columns, groups) // 4}u; i += blockDim.x) "
        f"{{ const unsigned x = mixed(state + i); ((unsigned *)pool)[i] = {word}; (void)x; }} "
        'asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncthreads(); '
        f'{kind} acc[{registers}]; _Pragma("unroll") for (int i = 0; i < {registers}; ++i) acc[i] = 0; '
        "const unsigned group = threadIdx.x / 128u, pool_at = (unsigned)__cvta_generic_to_shared(pool); "
        # start address / 16; leading offset 16 B and stride 1024 B, both / 16; bit 62: 128-byte swizzle
        "const u64 layout = (1ull << 62) | (64ull << 32) | (1ull << 16); "
        f"const u64 at_a = layout | ((pool_at + group * {A_TILE_BYTE}u) >> 4); "
        f"const u64 at_b = layout | ((pool_at + {groups * A_TILE_BYTE}u) >> 4);"
    )
    # all products of an iteration are one statement: 128 accumulators are costly to name again and again
    types, stage = f"m64n{columns}k{form.k * (1 + sparse)}.{form.wgmma}", wgmma_shared_byte(columns, groups) // STAGES
    flags = ("" if integer else ", 1, 1") + (", 0, 0" if form.k == 16 else "")  # scales, transpositions
    wait = ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    product, ends = "wgmma.mma_async.sync.aligned", ""
    if sparse:
        product, ends = "wgmma.mma_async.sp.sync.aligned", f", %{registers + 2}, 0"
    lines = ["wgmma.fence.sync.aligned;"]
    for i in range(WGMMA_STEPS):
        at = i // STEPS_OF_STAGE % STAGES * stage + i % STEPS_OF_STAGE * 32
        at_b = i // STEPS_OF_STAGE % STAGES * stage + (i % 2 * 64 if sparse else i % STEPS_OF_STAGE * 32)
        lines.append(f"add.u64 da, %{registers}, {at >> 4}; add.u64 db, %{registers + 1}, {at_b >> 4};")
        keep = "q" if i else "p"  # the first product overwrites the accumulators
        lines.append(f"{product}.{types} {vector(registers)}, da, db{ends}, {keep}{flags};")
        lines += wait * apart
    lines += wait * (not apart)
    head = "{.reg .pred p, q; .reg .b64 da, db; setp.ne.b32 p, 0, 0; setp.eq.b32 q, 0, 0; "
    outs = ", ".join(inout(letter, f"acc[{i}]") for i in range(registers))
    pairs = f', "r"({SPARSE_PAIRS})' if sparse else ""
    products = f'asm volatile("{head}{" ".join(lines)}}}" : {outs} : "l"(at_a), "l"(at_b){pairs} : "memory");'
    bits = "(unsigned)acc[{0}]" if integer else "__float_as_uint(acc[{0}])"
    # a thread holds one of 128 parts of the product, so a step counts 1/128 of it
    per_thread = 2.0 * 64 * columns * form.k * (1 + sparse) / 128.0
    return BenchUnit(
        name,
        declare,
        lambda i: "",
        f"seed == 0u ? {bits.format(0)} : " + " ^ ".join(bits.format(i) for i in range(registers)),
        before=products,
        operation="flop",
        per_step=int(per_thread),
        flop=1.0,
    )


def mma_unit(name: str, precision: str, chains: int = 0) -> BenchUnit:
    """Run ``mma.sync`` with operands in registers; eight accumulators in turn, four of the larger fp64 form."""
    p, form = name, MMA[precision]
    wide, sparse = form.letter == "d", precision.startswith("sparse")
    chains = chains or (CHAINS // 2 if wide and form.c > 2 else CHAINS)
    sets = 1 if wide and form.a > 1 else 2  # of operands, in turn
    lines = []
    for part, count in (("a", sets * form.a), ("b", sets * form.b)):
        for n in range(count):
            if wide:
                seed = f"mixed(state + {60 * (part == 'b') + n + 1}u)"
                lines.append(f"double {p}_{part}{n} = unit_float({seed}) - 1.5;")
            else:
                value = f"const unsigned x = mixed(state + {50 * (part == 'b') + n + 1}u); {p}_{part}{n} = "
                lines.append(f"unsigned {p}_{part}{n}; {{ {value}{PRECISIONS[form.word].word}; }}")
    kind, zero, bits = {
        "f": ("float", "0", "__float_as_uint({0})"),
        "r": ("int", "0", "(unsigned){0}"),
        "d": ("double", "0.0", "(unsigned)__double_as_longlong({0})"),
    }[form.letter]
    lines += [f"{kind} {p}{i}_{n} = {zero};" for i in range(chains) for n in range(form.c)]

    def step(i: int) -> str:
        half = i // chains % sets
        outs = ", ".join(inout(form.letter, f"{p}{i % chains}_{n}") for n in range(form.c))
        a = [f"{p}_a{half * form.a + n}" for n in range(form.a)]
        b = [f"{p}_b{half * form.b + n}" for n in range(form.b)]
        d, operands = (
            _write_register_list(0, form.c),
            f"{_write_register_list(form.c, form.a)}, {_write_register_list(form.c + form.a, form.b)}",
        )
        kind, pairs, ends = "mma.sync.aligned", [SPARSE_PAIRS] * sparse, ""
        if sparse:
            kind, ends = "mma.sp::ordered_metadata.sync.aligned", f", %{form.c + form.a + form.b}, 0"
        return asm(
            f"{kind}.{form.types} {d}, {operands}, {d}{ends};", outs, into("d" if wide else "r", *a, *b, *pairs)
        )

    return BenchUnit(
        p,
        " ".join(lines),
        step,
        " ^ ".join(bits.format(f"{p}{i}_{n}") for i in range(chains) for n in range(form.c)),
        operation="flop",
        per_step=2 * form.multiply_adds // 32,
        flop=1.0,
    )


def _write_register_list(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{first + n}" for n in range(count)) + "}"


PATH_STEPS = 64  # multiply-adds on each path of a divergent branch


def divergence_unit(name: str, ways: int) -> BenchUnit:
    """Branch to ``ways`` paths of the same length; lanes take them by turns, so each warp runs them one by one.

    Half of a path grows by g, the other half shrinks by r near 1/g and turns the sign last, as
    ``multiply_adds`` does, so that values neither settle nor overflow.
    """
    p = name
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
    return BenchUnit(
        p,
        declare,
        lambda i: "",
        " ^ ".join(f"__float_as_uint({p}{i})" for i in range(4)),
        before="\n    ".join(paths),
        per_step=PATH_STEPS,
        operation="instruction",
    )


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
        before=before,
        finish=f"if (threadIdx.x == 0u) {{ {drain} }}" + (f" {CLUSTER_SYNC}" if cluster > 1 else ""),
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
        before=f"if (threadIdx.x == 0u) {{ {' '.join([step] * LATENCY_STEPS)} }}",
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
        before=f"if (threadIdx.x == 0u) {{ {' '.join(turns)} }} {p}_phase ^= 1u;",
        finish=f"if (threadIdx.x == 0u) {{ {drain} }}",
        operation="copy",
        one_thread=True,
        byte=2.0 * size,
        chunk=size * stages,
    )


def _wait_bulk(p: str, stage: int) -> str:
    return (
        f"{{ unsigned done = 0u; for (unsigned spin = 0; spin < {SPINS}u && !done; ++spin) "
        '{ asm volatile("{.reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [%1], %2; selp.u32 %0, 1, 0, q;}"'
        f' : "=r"(done) : "r"({p}_bar + {8 * stage}u), "r"({p}_phase) : "memory"); }} '
        'if (!done) asm volatile("trap;"); }'
    )
