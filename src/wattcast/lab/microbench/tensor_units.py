"""Define units of tensor cores (``mma.sync``, ``wgmma``), branches, barriers, and of the copy
engine (TMA).

wgmma reads both operands from shared memory in the 128-byte swizzled, K-major layout that matrix
products use: rows of 128 bytes, eight rows to a group of 1024 bytes. A step of K is 32 bytes wide
in every precision, so descriptors advance alike. Two warpgroups of a block share the B tiles and
have their own A tiles; four stages of tiles (192 KiB) give sixteen different products an iteration,
the first of which clears the accumulators. All products of an iteration are in flight before it
waits.

A bulk copy by the copy engine of an SM is one instruction of one thread: 8 KiB in a row, a tile of
64 rows of 128 bytes by a tensor map, or a slice that reaches all blocks of a cluster at once, which
share their memory. A barrier in shared memory counts the bytes that have come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from wattcast.core.measured_rows import Plain
from wattcast.core.regular_files import read_shipped_table
from wattcast.lab.microbench.unit_source import (
    CLUSTER_SYNC,
    BenchUnit,
    asm,
    fill_unit,
    inout,
    into,
    vector,
    write_piece,
)

Entry = TypeVar("Entry", bound="TensorPrecision | MmaShape")

STAGES = 4
A_TILE_BYTE = 64 * 128
STEPS_OF_STAGE = 4  # 128 bytes of K in steps of 32
WGMMA_STEPS = STAGES * STEPS_OF_STAGE
CHAINS = 8
SPARSE_PAIRS = (
    "(lane & 1u ? 0xeeeeeeeeu : 0x44444444u)"  # two of four: the last two, or the first two
)
BULK_BYTE = 8192
BULK_STAGES = 4
THROUGH_STAGES = 6  # of a copy through shared memory
LATENCY_STEPS = 16  # copies of an iteration that wait for one another
SPINS = 1 << 22  # tries of a barrier before a kernel gives up: no wait may last for ever
# rows and bytes across of a tile; tiles across the matrix
TILE_ROWS = 64
TILE_BYTE = 128
ROW_TILES = 64


@dataclass(frozen=True)
class TensorPrecision:
    """How a precision is written in PTX, and a random word of it whose values lie between 1 and 2
    in size.
    """

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
    numbers: dict[str, Any] = {"half": float} | dict.fromkeys(
        ("k", "a", "b", "c", "multiply_adds"), int
    )
    rows = read_shipped_table("wattcast.lab.microbench", name)
    converted = ({key: numbers.get(key, str)(cell) for key, cell in row.items()} for row in rows)
    return {values["name"]: kind(**values) for values in converted}


PRECISIONS = _read_table("tensor_formats.csv", TensorPrecision)
MMA = _read_table("mma_shapes.csv", MmaShape)


def wgmma_unit(
    name: str,
    precision: str,
    zeros: bool = False,
    columns: int = 256,
    groups: int = 2,
    sparse: bool = False,
    apart: bool = False,
) -> BenchUnit:
    """Multiply tiles of m64 x ``columns`` in ``groups`` warpgroups; one step is one instruction of
    a warpgroup.

    ``sparse`` A tiles hold two of every four elements, so K doubles; operations are those of the
    dense product, as vendors count them. ``apart`` products wait for the one before."""
    form = PRECISIONS[precision]
    integer = precision == "int8"
    registers = columns // 2  # of accumulators in a thread
    kind = "float"
    letter = "f"
    bits = "__float_as_uint(acc[{0}])"
    if integer:
        kind = "int"
        letter = "r"
        bits = "(unsigned)acc[{0}]"
    pool = STAGES * (
        groups * A_TILE_BYTE + columns * 128
    )  # an A tile for each warpgroup and a B tile for all
    # all products of an iteration are one statement: 128 accumulators are costly to name again and
    # again
    types = f"m64n{columns}k{form.k * (1 + sparse)}.{form.wgmma}"
    flags = ("" if integer else ", 1, 1") + (
        ", 0, 0" if form.k == 16 else ""
    )  # scales, transpositions
    wait = ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    product = f"wgmma.mma_async{'.sp' * sparse}.sync.aligned"
    ends = f", %{registers + 2}, 0" * sparse
    lines = ["wgmma.fence.sync.aligned;"]
    for i in range(WGMMA_STEPS):
        stage = i // STEPS_OF_STAGE % STAGES * pool // STAGES
        at = stage + i % STEPS_OF_STAGE * 32
        at_b = stage + (i % 2 * 64 if sparse else i % STEPS_OF_STAGE * 32)
        lines.append(
            f"add.u64 da, %{registers}, {at >> 4}; add.u64 db, %{registers + 1}, {at_b >> 4};"
        )
        keep = "q" if i else "p"  # the first product overwrites the accumulators
        lines.append(f"{product}.{types} {vector(registers)}, da, db{ends}, {keep}{flags};")
        lines += wait * apart
    values: Plain = {
        "words": pool // 4,
        "word": "0u" if zeros else f"(seed == 0u ? {form.one} : ({form.word}))",
    }
    values |= {
        "kind": kind,
        "registers": registers,
        "tile": A_TILE_BYTE,
        "tiles": groups * A_TILE_BYTE,
    }
    values |= {
        "lines": " ".join(lines + wait * (not apart)),
        "pairs": f', "r"({SPARSE_PAIRS})' * sparse,
    }
    values["outs"] = ", ".join(inout(letter, f"acc[{i}]") for i in range(registers))
    fold = f"seed == 0u ? {bits.format(0)} : " + " ^ ".join(
        bits.format(i) for i in range(registers)
    )
    # a thread holds one of 128 parts of the product, so a step counts 1/128 of it
    per_thread = int(2.0 * 64 * columns * form.k * (1 + sparse) / 128.0)
    return fill_unit(
        "wgmma",
        name,
        values,
        fold=fold,
        operation="flop",
        per_step=per_thread,
        flop=1.0,
    )


def mma_unit(
    name: str,
    precision: str,
    chains: int = 0,
) -> BenchUnit:
    """Run ``mma.sync`` with operands in registers; eight accumulators in turn, four of the larger
    fp64 form.
    """
    p = name
    form = MMA[precision]
    wide = form.letter == "d"
    sparse = precision.startswith("sparse")
    chains = chains or (CHAINS // 2 if wide and form.c > 2 else CHAINS)
    sets = 1 if wide and form.a > 1 else 2  # of operands, in turn
    lines = []
    for part, count in (("a", sets * form.a), ("b", sets * form.b)):
        for n in range(count):
            if wide:
                seed = f"mixed(state + {60 * (part == 'b') + n + 1}u)"
                lines.append(f"double {p}_{part}{n} = unit_float({seed}) - 1.5;")
            else:
                value = (
                    f"const unsigned x = mixed(state + {50 * (part == 'b') + n + 1}u); "
                    f"{p}_{part}{n} = "
                )
                lines.append(f"unsigned {p}_{part}{n}; {{ {value}{PRECISIONS[form.word].word}; }}")
    kind, zero, bits = {
        "f": ("float", "0", "__float_as_uint({0})"),
        "r": ("int", "0", "(unsigned){0}"),
        "d": ("double", "0.0", "(unsigned)__double_as_longlong({0})"),
    }[form.letter]
    results = [f"{p}{i}_{n}" for i in range(chains) for n in range(form.c)]
    last = form.c + form.a + form.b
    places = {
        "d": (0, form.c),
        "a": (form.c, form.c + form.a),
        "b": (form.c + form.a, last),
    }
    values: Plain = {
        part: ", ".join(f"%{n}" for n in range(*ends)) for part, ends in places.items()
    }
    values["product"] = f"mma.{'sp::ordered_metadata.' * sparse}sync.aligned.{form.types}"
    values["ends"] = f", %{last}, 0" * sparse

    def name_operands(i: int) -> dict[str, str]:
        half = i // chains % sets
        names = [f"{p}_a{half * form.a + n}" for n in range(form.a)]
        names += [*(f"{p}_b{half * form.b + n}" for n in range(form.b)), *[SPARSE_PAIRS] * sparse]
        outs = ", ".join(inout(form.letter, f"{p}{i % chains}_{n}") for n in range(form.c))
        return {"outs": outs, "ins": into("d" if wide else "r", *names)}

    declare = " ".join(lines + [f"{kind} {result} = {zero};" for result in results])
    fold = " ^ ".join(map(bits.format, results))
    count = 2 * form.multiply_adds // 32
    facts: Plain = {
        "declare": declare,
        "fold": fold,
        "operation": "flop",
        "per_step": count,
        "flop": 1.0,
    }
    return fill_unit("mma", p, values, name_operands, **facts)


PATH_STEPS = 64  # multiply-adds on each path of a divergent branch


def divergence_unit(name: str, ways: int) -> BenchUnit:
    """Branch to ``ways`` paths of the same length; lanes take them by turns, so each warp runs them
    one by one.

    Half of a path grows by g, the other half shrinks by r near 1/g and turns the sign last, as
    ``multiply_adds`` does, so that values neither settle nor overflow.
    """
    p = name
    paths = []
    for way in range(ways):
        lines = []
        for i in range(PATH_STEPS):
            shrinks = i >= PATH_STEPS // 2
            last = i >= PATH_STEPS - 4
            constant = (
                f"0f{(0xBF800000 if shrinks else 0x3F800000) + 4096 * way:08X}"  # tells paths apart
            )
            multiplier = f"{'-' if last else ''}{p}_{'r' if shrinks else 'g'}"
            lines.append(
                asm(
                    f"fma.rn.f32 %0, %0, %1, {constant};",
                    inout("f", f"{p}{i % 4}"),
                    into("f", multiplier),
                )
            )
        inner = " ".join(lines)
        paths.append(f"if ({p}_way == {way}u) {{ {inner} }}" if ways > 1 else inner)
    registers = " ".join(f"float {p}{i} = unit_float(mixed(state + {i + 1}u));" for i in range(4))
    fold = " ^ ".join(f"__float_as_uint({p}{i})" for i in range(4))
    values: Plain = {"ways": ways, "registers": registers}
    return fill_unit(
        "divergence",
        p,
        values,
        before="\n    ".join(paths),
        fold=fold,
        per_step=PATH_STEPS,
    )


def bulk_unit(
    name: str,
    tile: bool = False,
    cluster: int = 1,
) -> BenchUnit:
    """Keep four copies of 8 KiB from global to shared memory under way, by one thread of a block.

    ``tile`` takes them from a matrix through the tensor map at ``b``. In a cluster each block
    fetches its share and sends it to all; a block counts the bytes that arrive, so one that runs
    ahead cannot lose any."""
    waits = [_wait_bulk(name, stage) for stage in range(BULK_STAGES)]
    turns = [
        f"{wait} {_issue_bulk(name, f'{stage}u', tile, cluster)}"
        for stage, wait in enumerate(waits)
    ]
    facts: Plain = {"byte": float(BULK_BYTE), "cluster": cluster}
    return _make_bulk_unit(name, BULK_STAGES, BULK_STAGES, turns, waits, tile, **facts)


def bulk_latency_unit(name: str, size: int) -> BenchUnit:
    """Copy ``size`` bytes from L2 and wait for them before the next copy begins."""
    step = f"{_issue_bulk(name, '0u', size=size)} {_wait_bulk(name, 0)} {name}_phase ^= 1u;"
    before = f"if (threadIdx.x == 0u) {{ {' '.join([step] * LATENCY_STEPS)} }}"
    return _make_bulk_unit(
        name,
        1,
        0,
        [],
        [],
        before=before,
        finish="",
        byte=float(size),
    )


def bulk_there_and_back_unit(name: str) -> BenchUnit:
    """Copy one buffer to the other in bulk: into shared memory and out again, one thread of a block
    for all.

    Stage by stage: wait for what came in, send it out, and when the one before has been read, load
    into its place."""
    size = BULK_BYTE
    stages = THROUGH_STAGES
    waits = [_wait_bulk(name, stage) for stage in range(stages)]
    turns = []
    for stage, wait in enumerate(waits):
        send = write_piece("bulk.send", name, size=size, at=size * stage)
        turns.append(f"{wait} {send} {_issue_bulk(name, f'{(stage - 1) % stages}u')}")
    drain = [*waits[:-1], 'asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");']
    facts: Plain = {"byte": 2.0 * size, "chunk": size * stages}
    return _make_bulk_unit(
        name, stages, stages - 1, turns, drain, more=f", {name}_out = {name}_k", **facts
    )


def _make_bulk_unit(
    p: str,
    stages: int,
    started: int,
    turns: list[str],
    drain: list[str],
    tile: bool = False,
    cluster: int = 1,
    more: str = "",
    **facts: Any,
) -> BenchUnit:
    """Make a unit of bulk copies, of which the first ``started`` are under way before the loop.

    ``drain`` waits at the end, since no copy may land after the block has gone.
    """
    sync = CLUSTER_SYNC * (cluster > 1)
    values: Plain = {
        "room": BULK_BYTE * stages,
        "size": BULK_BYTE,
        "stages": stages,
        "started": started,
    }
    values |= {
        "first": write_piece("bulk.tile", p)
        if tile
        else write_piece("bulk.rank", p)
        if cluster > 1
        else ""
    }
    values |= {
        "meet": write_piece("bulk.meet", p, sync=sync) if cluster > 1 else "",
        "cluster": cluster,
    }
    values |= {
        "issue": _issue_bulk(p, "s", tile, cluster),
        "turns": " ".join(turns),
        "drain": " ".join(drain),
    }
    facts |= {
        "operation": "copy",
        "one_thread": True,
        "cluster": cluster,
    }
    return fill_unit("bulk", p, values | {"sync": sync, "more": more}, **facts)


def _issue_bulk(
    p: str,
    stage: str,
    tile: bool = False,
    cluster: int = 1,
    size: int = BULK_BYTE,
) -> str:
    """Tell the barrier of a stage how many bytes will come, start their copy, and go on to the next
    chunk.
    """
    slice_byte = size // cluster
    kind = "shared::cluster.global.mbarrier::complete_tx::bytes"
    to = f"{p}_pool + {BULK_BYTE}u * {stage}"
    source = f"a + (u64){p}_k * {BULK_BYTE}ull"
    copy = f"{kind} [%1], [%2], {slice_byte}, [%0];"
    more = ""
    if tile:
        copy = f"tensor.2d.{kind} [%1], [%2, {{%3, %4}}], [%0];"
        source = "b"
        across = f"{p}_k % {ROW_TILES}u * {TILE_BYTE // 2}u"
        down = f"{p}_k / {ROW_TILES}u * {TILE_ROWS}u"
        more = f', "r"({across}), "r"({down})'
    elif cluster > 1:
        copy = f"{kind}.multicast::cluster [%1], [%2], {slice_byte}, [%0], %3;"
        to = f"{to} + {p}_rank * {slice_byte}u"
        source = f"{source} + {p}_rank * {slice_byte}u"
        more = f', "h"((unsigned short){(1 << cluster) - 1})'
    return write_piece(
        "bulk.issue",
        p,
        size=size,
        copy=copy,
        stage=stage,
        to=to,
        source=source,
        more=more,
    )


def _wait_bulk(p: str, stage: int) -> str:
    return write_piece("bulk.wait", p, spins=SPINS, at=8 * stage)
