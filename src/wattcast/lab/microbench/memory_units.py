"""Define memory units: DRAM, L2, L1, shared, constant and texture reads and writes, copies and
atomics.

A streaming unit walks a buffer in chunks: a block takes the chunk of its own number, then that
number plus the number of blocks, and so on, round and round. Within a chunk each load covers a
whole row of the block, so addresses differ by constants. Loaded values are folded with exclusive
or, so that a check can compare them with the same fold of the buffer."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from wattcast.core.measured_rows import Plain
from wattcast.lab.microbench.unit_source import (
    BenchUnit,
    fill_unit,
    into,
    out_of,
    vector,
    write_piece,
)

KINDS = {
    1: ("u8", 1),
    2: ("u16", 1),
    4: ("u32", 1),
    8: ("v2.u32", 2),
    16: ("v4.u32", 4),
}  # width: PTX type, words
READ_ONCE = "ld.global.nc.L1::no_allocate"
SPINS = 1 << 12  # naps of a paced unit before it goes on anyway


def name_words(
    p: str,
    step: int,
    words: int,
) -> list[str]:
    """Name the registers that a step loads."""
    return [f"{p}{step}_{w}" for w in range(words)]


def declare_words(
    p: str,
    steps: int,
    words: int,
) -> str:
    """Declare the registers of all steps."""
    return " ".join(f"unsigned {word};" for i in range(steps) for word in name_words(p, i, words))


def load_unit(
    name: str,
    declare: str,
    load: str,
    row: int,
    steps: int,
    width: int,
    advance: str,
    letter: str = "l",
    **more: Any,
) -> BenchUnit:
    """Load ``width`` bytes a thread from ``name``_at, ``row`` bytes further in every step, into two
    sums by turns.
    """
    p, (kind, words) = name, KINDS[width]
    loaded_words = [word for i in range(steps) for word in name_words(p, i, words)]
    folds = " ".join(
        f"{p}_s{n // 2 % 2} ^= {' ^ '.join(loaded_words[n : n + 2])};"
        for n in range(0, len(loaded_words), 2)
    )
    values: Plain = {
        "declare": declare,
        "words": declare_words(p, steps, words),
        "folds": folds,
        "advance": advance,
    }
    values |= {
        "load": load,
        "kind": kind,
        "registers": vector(words),
        "count": words,
        "letter": letter,
    }
    return fill_unit(
        "load",
        p,
        values,
        lambda i: {"at": i * row, "outs": out_of(*name_words(p, i, words))},
        byte=float(width),
        **{"operation": "load"} | more,
    )


def write_unit(
    name: str,
    declare: str,
    store: str,
    row: int,
    width: int,
    advance: str,
    letter: str = "l",
) -> BenchUnit:
    """Store ``width`` bytes a thread, random and different in every iteration, as ``load_unit``
    loads them.

    A step stores one of two sets of four random words, in turn.
    """
    p, (kind, words) = name, KINDS[width]
    quads = [(n, w) for n in range(2) for w in range(4)]
    values: Plain = {
        "declare": declare,
        "store": store,
        "kind": kind,
        "registers": vector(words, 1),
    }
    values["letter"] = letter
    values["words"] = " ".join(
        f"unsigned {p}q{n}_{w} = mixed(state + {4 * n + w + 1}u);" for n, w in quads
    )
    values |= {
        "turns": " ".join(f"{p}q{n}_{w} ^= {p}q{1 - n}_{w} << 1;" for n, w in quads),
        "advance": advance,
    }
    return fill_unit(
        "store",
        p,
        values,
        lambda i: {"at": i * row, "ins": into("r", *(f"{p}q{i % 2}_{w}" for w in range(words)))},
        fold=" ^ ".join(f"{p}q{n}_{w}" for n, w in quads),
        operation="store",
        byte=float(width),
    )


def stream_unit(
    name: str,
    steps: int,
    width: int = 16,
    threads: int = 512,
    read: str = READ_ONCE,
    lanes: int = 32,
) -> BenchUnit:
    """Load ``width`` bytes a thread; groups of ``lanes`` neighbours are contiguous, groups lie 128
    bytes apart.
    """
    row = threads * width
    place = f"threadIdx.x * {width}u"
    if lanes < 32:  # a group's place in its own 128-byte line; lines of a warp follow each other
        row = threads // lanes * 128
        place = f"(threadIdx.x / {lanes}u) * 128u + (threadIdx.x % {lanes}u) * {width}u"
    chunk = steps * row
    walk = write_piece(
        "walk.declare",
        name,
        buffer="a",
        chunk=chunk,
        place=place,
    )
    go_on = write_piece("walk.advance", name, chunk=chunk)
    return load_unit(
        name,
        walk,
        read,
        row,
        steps,
        width,
        go_on,
        chunk=chunk,
    )


def store_unit(
    name: str,
    steps: int,
    width: int = 16,
    threads: int = 512,
) -> BenchUnit:
    """Store ``width`` bytes a thread along a walk."""
    row = threads * width
    chunk = steps * threads * width
    walk = write_piece(
        "walk.declare",
        name,
        buffer="b",
        chunk=chunk,
        place=f"threadIdx.x * {width}u",
    )
    return write_unit(
        name,
        walk,
        "st.global",
        row,
        width,
        write_piece("walk.advance", name, chunk=chunk),
    )


def pace_unit(unit: BenchUnit, period_cycles: int) -> BenchUnit:
    """Let a streaming unit begin an iteration every so many cycles: DRAM at a part of its rate,
    warps at rest.

    One thread of a block watches the clock, asleep most of the time; the others wait at a barrier.
    Blocks begin spread over half a period, so that their traffic is, too.
    """
    first = write_piece("pace.declare", unit.name, apart=period_cycles // 32)
    before = write_piece("pace.before", unit.name, spins=SPINS, period=period_cycles)
    return replace(unit, declare=f"{unit.declare} {first}", before=before)


def cached_unit(
    name: str,
    steps: int,
    threads: int = 512,
) -> BenchUnit:
    """Load 16 bytes of a region that stays in L1: each block has its own, two halves in turn."""
    half = steps * threads * 16
    declare = write_piece("cached.declare", name, half=half, both=2 * half)
    return load_unit(
        name,
        declare,
        "ld.global",
        threads * 16,
        steps,
        16,
        write_piece("cached.advance", name),
    )


def local_unit(name: str, slots: int = 4) -> BenchUnit:
    """Store 16 bytes to a thread's own local memory, over and over to ``slots`` places, so few that
    L1 holds all.
    """
    unit = write_unit(
        name,
        write_piece("local.declare", name, slots=slots),
        "st.local",
        16,
        16,
        "",
        "r",
    )
    fold = f"{name}[seed % {slots}u].x ^ {name}[seed % {slots}u].y"
    return replace(unit, step=lambda i: unit.step(i % slots), fold=fold)


def words_of_conflict(conflicts: int) -> list[int]:
    """Return the 4-byte word that each lane reads, so that ``conflicts`` + 1 words share the
    fullest bank.

    Lanes are dealt to banks in groups of ``conflicts`` + 1; the lanes of a group read different
    rows of their bank. A stride of ``conflicts`` + 1 words, as paper 001's figure 4 has it, does
    not do this: a stride of three words has no conflict at all.

    >>> sorted({word % 32 for word in words_of_conflict(31)}), len(set(words_of_conflict(31)))
    ([0], 32)
    """
    ways = conflicts + 1
    return [lane % ways * 32 + lane // ways for lane in range(32)]


def shared_unit(
    name: str,
    steps: int,
    width: int = 4,
    conflicts: int = 0,
    write: bool = False,
    cluster: int = 1,
) -> BenchUnit:
    """Load or store shared memory, 4 bytes wide with chosen bank conflicts or 16 bytes wide
    without.

    In a cluster the warps of a block take the memory of all other blocks, by turns.
    """
    p = name
    space = "shared::cluster" if cluster > 1 else "shared"
    row, place = (4096, f"{p}_word[lane] * 4u") if width == 4 else (512, "lane * 16u")
    table = ", ".join(map(str, words_of_conflict(conflicts)))
    half = steps * row
    declare = write_piece(
        "shared.declare",
        p,
        table=table,
        place=place,
        half=half,
        all=2 * half // 4,
    )
    go_on = write_piece("shared.advance", p)
    if write:
        unit = write_unit(
            p,
            declare,
            f"st.{space}",
            row,
            width,
            go_on,
            "r",
        )
    else:
        unit = load_unit(
            p,
            declare,
            f"ld.{space}",
            row,
            steps,
            width,
            go_on,
            "r",
        )
    if cluster == 1:
        return unit
    remote_piece = write_piece(
        "shared_cluster.declare",
        p,
        others=cluster - 1,
        cluster=cluster,
        sync=write_piece("cluster.sync", ""),
    )
    # no block may go while another reads its memory
    return replace(
        unit,
        declare=f"{unit.declare} {remote_piece}",
        finish=write_piece("cluster.sync", ""),
        cluster=cluster,
    )


def constant_unit(name: str, steps: int) -> BenchUnit:
    """Load one constant a warp, from a table that the constant cache holds."""
    table = accumulate(
        range(512), lambda state, _: (state * 1664525 + 1013904223) & 0xFFFFFFFF, initial=12345
    )
    values: Plain = {"table": ", ".join(f"{word}u" for word in list(table)[1:]), "size": 4 * steps}
    values["words"] = " ".join(f"unsigned {name}{i};" for i in range(steps))
    values["folds"] = " ".join(
        f"{name}_s ^= {name}{i} ^ {name}{i + 1};" for i in range(0, steps, 2)
    )
    return fill_unit(
        "constant",
        name,
        values,
        lambda i: {"i": i, "at": 4 * i},
        operation="load",
        byte=4.0,
    )


def texture_unit(
    name: str,
    steps: int,
    threads: int = 512,
) -> BenchUnit:
    """Fetch four words of a texture; ``b`` is the handle of a texture over the first bytes of
    ``a``.
    """
    texts = (
        write_piece("texture.declare", name, all=steps * threads),
        write_piece("texture.advance", name),
    )
    unit = load_unit(
        name,
        texts[0],
        "",
        0,
        steps,
        16,
        texts[1],
        operation="fetch",
    )

    def step(i: int) -> str:
        return write_piece(
            "texture.step", name, outs=out_of(*name_words(name, i, 4)), at=i * threads
        )

    return replace(unit, step=step)


def copy_unit(
    name: str,
    steps: int,
    width: int = 16,
    threads: int = 512,
    read: str = READ_ONCE,
) -> BenchUnit:
    """Load from one buffer and store to the same place of the other."""
    kind, words = KINDS[width]
    row_byte = threads * width
    chunk = steps * row_byte
    values: Plain = {
        "walk": write_piece(
            "walk.declare",
            name,
            buffer="a",
            chunk=chunk,
            place=f"threadIdx.x * {width}u",
        ),
        "count": words,
        "kind": kind,
        "words": declare_words(name, steps, words),
        "read": read,
        "write": "st.global",
        "loaded": vector(words),
        "stored": vector(words, 1),
    }

    def step(i: int) -> str:
        names = name_words(name, i % steps, words)
        return write_piece(
            "copy.load" if i < steps else "copy.store",
            name,
            **values,
            at=i % steps * row_byte,
            outs=out_of(*names),
            ins=into("r", *names),
        )

    return fill_unit(
        "copy",
        name,
        values,
        step=step,
        advance=write_piece("walk.advance", name, chunk=chunk),
        operation="load or store",
        byte=float(width),
        chunk=chunk,
    )


def block_copy_unit(
    name: str,
    steps: int,
    threads: int,
) -> BenchUnit:
    """Copy the chunk that has the block's number: little code before the loads are on their way.

    Plain loads: the address never changes, so a load that promises constant data would be taken out
    of the loop."""
    plain = copy_unit(name, steps, threads=threads, read="ld.global")
    walk = write_piece("block_copy.walk", name, chunk=plain.chunk)
    declare = write_piece("copy.declare", name, walk=walk, words=declare_words(name, steps, 4))
    return replace(plain, declare=declare, advance="")


def async_copy_unit(
    name: str,
    steps: int,
    threads: int = 512,
) -> BenchUnit:
    """Copy 16 bytes asynchronously from global to shared memory (cp.async), into two halves in
    turn.

    The halves matter: with one place for all, copies to a place that an earlier copy had yet to
    fill were not all made; 11 of 16 sectors of a request were fetched (H200, ncu), and DRAM seemed
    to deliver 6.5 TB/s."""
    row = threads * 16
    chunk = steps * threads * 16
    walk = write_piece(
        "walk.declare",
        name,
        buffer="a",
        chunk=chunk,
        place="threadIdx.x * 16u",
    )
    advance = write_piece("walk.advance", name, chunk=chunk)
    values: Plain = {
        "walk": walk,
        "advance": advance,
        "chunk": chunk,
        "both": 2 * steps,
        "row": row,
    }
    facts: Plain = {
        "operation": "copy",
        "byte": 16.0,
        "chunk": chunk,
    }
    return fill_unit(
        "async_copy",
        name,
        values,
        lambda i: {"at": i * row},
        **facts,
    )
