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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from wattcast.core.measured_rows import Plain
from wattcast.core.regular_files import read_shipped_table
from wattcast.lab.microbench.unit_source import (
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
# two of four: the last two, or the first two
SPARSE_PAIRS = "(lane & 1u ? 0xeeeeeeeeu : 0x44444444u)"
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
    entries = {}
    for row in read_shipped_table("wattcast.lab.microbench", name):
        values: Plain = {}
        for key, cell in row.items():
            values[key] = numbers.get(key, str)(cell)
        entries[row["name"]] = kind(**values)
    return entries


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
    is_integer = precision == "int8"
    registers = columns // 2  # of accumulators in a thread
    letter = "r" if is_integer else "f"
    bits = "(unsigned)acc[{0}]" if is_integer else "__float_as_uint(acc[{0}])"
    # an A tile for each warpgroup and a B tile for all
    pool = STAGES * (groups * A_TILE_BYTE + columns * 128)
    shape = WgmmaShape(
        form,
        columns,
        sparse,
        apart,
        is_integer,
        pool // STAGES,
    )
    every_bits = [bits.format(place) for place in range(registers)]
    values: Plain = {
        "words": pool // 4,
        "word": "0u" if zeros else f"(seed == 0u ? {form.one} : ({form.word}))",
        "kind": "int" if is_integer else "float",
        "registers": registers,
        "tile": A_TILE_BYTE,
        "tiles": groups * A_TILE_BYTE,
        "lines": " ".join(shape.list_products()),
        "pairs": f', "r"({SPARSE_PAIRS})' if sparse else "",
        "outs": ", ".join(inout(letter, f"acc[{place}]") for place in range(registers)),
    }
    # a thread holds one of 128 parts of the product, so a step counts 1/128 of it
    multiply_adds = 64 * columns * form.k * (2 if sparse else 1)
    return fill_unit(
        "wgmma",
        name,
        values,
        fold=f"seed == 0u ? {every_bits[0]} : " + " ^ ".join(every_bits),
        operation="flop",
        per_step=int(2.0 * multiply_adds / 128.0),
        flop=1.0,
    )


@dataclass(frozen=True)
class WgmmaShape:
    """The products of an iteration of ``wgmma_unit``, and where their tiles lie."""

    form: TensorPrecision
    columns: int
    sparse: bool
    apart: bool
    is_integer: bool
    stage_byte: int

    def list_products(self) -> list[str]:
        """Return the instructions of an iteration.

        All are one statement, since 128 accumulators are costly to name again and again."""
        registers = self.columns // 2
        depth = self.form.k * (2 if self.sparse else 1)
        product = "wgmma.mma_async.sp" if self.sparse else "wgmma.mma_async"
        types = f"m64n{self.columns}k{depth}.{self.form.wgmma}"
        metadata = f", %{registers + 2}, 0" if self.sparse else ""
        scales = "" if self.is_integer else ", 1, 1"
        transpositions = ", 0, 0" if self.form.k == 16 else ""
        wait = ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
        lines = ["wgmma.fence.sync.aligned;"]
        for step in range(WGMMA_STEPS):
            at_a, at_b = self._find_tiles(step)
            lines.append(
                f"add.u64 da, %{registers}, {at_a >> 4}; add.u64 db, %{registers + 1}, {at_b >> 4};"
            )
            keep = "q" if step else "p"  # the first product overwrites the accumulators
            lines.append(
                f"{product}.sync.aligned.{types} {vector(registers)}, da, db{metadata}, "
                f"{keep}{scales}{transpositions};"
            )
            if self.apart:
                lines += wait
        if not self.apart:
            lines += wait
        return lines

    def _find_tiles(self, step: int) -> tuple[int, int]:
        """Return the offsets of the A and B tiles of a step: a stage holds four steps of A, and of
        a sparse product two of B, which is as deep again.
        """
        stage = step // STEPS_OF_STAGE % STAGES * self.stage_byte
        at_a = stage + step % STEPS_OF_STAGE * 32
        at_b = stage + step % 2 * 64 if self.sparse else at_a
        return at_a, at_b


@dataclass(frozen=True)
class ResultType:
    """How the results of ``mma.sync`` are declared, cleared and folded."""

    kind: str
    zero: str
    bits: str


RESULT_TYPES = {
    "f": ResultType("float", "0", "__float_as_uint({0})"),
    "r": ResultType("int", "0", "(unsigned){0}"),
    "d": ResultType("double", "0.0", "(unsigned)__double_as_longlong({0})"),
}


def mma_unit(
    name: str,
    precision: str,
    chains: int = 0,
) -> BenchUnit:
    """Run ``mma.sync`` with operands in registers; eight accumulators in turn, four of the larger
    fp64 form.
    """
    form = MMA[precision]
    is_double = form.letter == "d"
    is_sparse = precision.startswith("sparse")
    if not chains:
        chains = CHAINS // 2 if is_double and form.c > 2 else CHAINS
    sets = 1 if is_double and form.a > 1 else 2  # of operands, in turn
    result_type = RESULT_TYPES[form.letter]
    results = [f"{name}{chain}_{n}" for chain in range(chains) for n in range(form.c)]
    declared = [
        *_declare_operands(
            name,
            form,
            "a",
            sets * form.a,
            0,
        ),
        *_declare_operands(
            name,
            form,
            "b",
            sets * form.b,
            60 if is_double else 50,
        ),
    ]
    declared += [f"{result_type.kind} {result} = {result_type.zero};" for result in results]
    end_a = form.c + form.a
    end_b = end_a + form.b
    values: Plain = {
        "d": _number_operands(0, form.c),
        "a": _number_operands(form.c, end_a),
        "b": _number_operands(end_a, end_b),
        "product": f"mma.{'sp::ordered_metadata.' if is_sparse else ''}sync.aligned.{form.types}",
        "ends": f", %{end_b}, 0" if is_sparse else "",
    }

    def name_operands(step: int) -> dict[str, str]:
        chain = step % chains
        turn = step // chains % sets
        outs = [inout(form.letter, f"{name}{chain}_{n}") for n in range(form.c)]
        ins = [f"{name}_a{turn * form.a + n}" for n in range(form.a)]
        ins += [f"{name}_b{turn * form.b + n}" for n in range(form.b)]
        if is_sparse:
            ins.append(SPARSE_PAIRS)
        return {"outs": ", ".join(outs), "ins": into("d" if is_double else "r", *ins)}

    return fill_unit(
        "mma",
        name,
        values,
        name_operands,
        declare=" ".join(declared),
        fold=" ^ ".join(map(result_type.bits.format, results)),
        operation="flop",
        per_step=2 * form.multiply_adds // 32,
        flop=1.0,
    )


def _number_operands(begin: int, end: int) -> str:
    return ", ".join(f"%{number}" for number in range(begin, end))


def _declare_operands(
    name: str,
    form: MmaShape,
    part: str,
    count: int,
    first_seed: int,
) -> Iterator[str]:
    """Yield the declarations of one operand's registers, with random words from a seed of their
    own.
    """
    for n in range(count):
        word = f"mixed(state + {first_seed + n + 1}u)"
        if form.letter == "d":
            yield f"double {name}_{part}{n} = unit_float({word}) - 1.5;"
        else:
            value = f"const unsigned x = {word}; {name}_{part}{n} = {PRECISIONS[form.word].word};"
            yield f"unsigned {name}_{part}{n}; {{ {value} }}"


PATH_STEPS = 64  # multiply-adds on each path of a divergent branch


def divergence_unit(name: str, ways: int) -> BenchUnit:
    """Branch to ``ways`` paths of the same length; lanes take them by turns, so each warp runs them
    one by one.

    Half of a path grows by g, the other half shrinks by r near 1/g and turns the sign last, as
    ``multiply_adds`` does, so that values neither settle nor overflow.
    """
    paths = []
    for way in range(ways):
        path = " ".join(_write_path_step(name, way, step) for step in range(PATH_STEPS))
        paths.append(f"if ({name}_way == {way}u) {{ {path} }}" if ways > 1 else path)
    registers = []
    folds = []
    for i in range(4):
        registers.append(f"float {name}{i} = unit_float(mixed(state + {i + 1}u));")
        folds.append(f"__float_as_uint({name}{i})")
    values: Plain = {"ways": ways, "registers": " ".join(registers)}
    return fill_unit(
        "divergence",
        name,
        values,
        before="\n    ".join(paths),
        fold=" ^ ".join(folds),
        per_step=PATH_STEPS,
    )


def _write_path_step(
    name: str,
    way: int,
    step: int,
) -> str:
    """Write one multiply-add of a path, whose constant tells the paths apart."""
    shrinks = step >= PATH_STEPS // 2
    turns_sign = step >= PATH_STEPS - 4
    constant = (0xBF800000 if shrinks else 0x3F800000) + 4096 * way
    factor = f"{name}_r" if shrinks else f"{name}_g"
    return asm(
        f"fma.rn.f32 %0, %0, %1, 0f{constant:08X};",
        inout("f", f"{name}{step % 4}"),
        into("f", f"-{factor}" if turns_sign else factor),
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
    return _make_bulk_unit(
        name,
        BULK_STAGES,
        BULK_STAGES,
        turns,
        waits,
        tile,
        **facts,
    )


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
        name,
        stages,
        stages - 1,
        turns,
        drain,
        more=f", {name}_out = {name}_k",
        **facts,
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
    is_cluster = cluster > 1
    sync = write_piece("cluster.sync", "") if is_cluster else ""
    first = ""
    if tile:
        first = write_piece("bulk.tile", p)
    elif is_cluster:
        first = write_piece("bulk.rank", p)
    values: Plain = {
        "room": BULK_BYTE * stages,
        "size": BULK_BYTE,
        "stages": stages,
        "started": started,
        "first": first,
        "meet": write_piece("bulk.meet", p, sync=sync) if is_cluster else "",
        "cluster": cluster,
        "issue": _issue_bulk(p, "s", tile, cluster),
        "turns": " ".join(turns),
        "drain": " ".join(drain),
        "sync": sync,
        "more": more,
    }
    facts |= {
        "operation": "copy",
        "one_thread": True,
        "cluster": cluster,
    }
    return fill_unit("bulk", p, values, **facts)


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
