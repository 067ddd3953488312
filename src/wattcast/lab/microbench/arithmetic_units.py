"""Define units of arithmetic (numbers, special functions, conversions, moves, control flow) and of
latency.

Chains are coupled in rings (each result is used by two or more later operations) where the
assembler would fold a lone chain of additions or permutations, and multiplied by a and -1/a in turn
where a lone chain would overflow, so that operands stay as random as they began.

In a latency unit one warp runs, and every operation waits for the one before it. Instructions
alternate between two registers, so that each reads the result of the last. Memory is walked along a
ring of addresses, each of which holds the next: in the device's memory in random order, so that
nothing can be fetched ahead, over sizes that show the caches or over pages that show address
translation."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any

from wattcast.core.measured_rows import Plain
from wattcast.core.regular_files import read_shipped_table
from wattcast.lab.microbench.unit_source import (
    BenchUnit,
    asm,
    fill_unit,
    inout,
    into,
    write_piece,
)

CHAINS = 8
HELD = 128  # steps with one multiplier
ADDENDS = {  # about 1.414 and its negative: what fits into an instruction
    "f64": ("0d3FF6A09E00000000", "0dBFF6A09E00000000"),
    "f32": ("0f3FB504F3", "0fBFB504F3"),
}
# a full period for 2^n and 3·2^n nodes [Knuth, TAOCP 3.2.1.2]
RING_FACTOR = 12 * 138707 + 1
RING_STEP = 1013904223
LINE_BYTE = 128
WARM_HOPS = 1 << 14  # along a ring before the first stamp, and between the stamps
SHARED_NODES = 512


@dataclass(frozen=True)
class RegisterKind:
    """A kind of register, as CUDA C and inline PTX write it.

    Packed pairs lie between 1 and 2 (random mantissa); a is about 1.4 and c about -0.7, so that a
    times c is above -1. Products of ``odd64`` stay odd and never become zero."""

    kind: str
    type: str  # of C
    letter: str  # of a constraint
    first: str  # its first value; {0} is its number
    bits: str  # an unsigned expression of its value
    constants: str  # declared beside it


@cache
def read_registers(kind: str) -> RegisterKind:
    """Read a kind of register from ``registers.csv``."""
    for row in read_shipped_table("wattcast.lab.microbench", "registers.csv"):
        if row["kind"] == kind:
            return RegisterKind(*row.values())
    raise KeyError(kind)


def register_unit(
    name: str,
    kind: str,
    ptx: str = "",
    operands: str = "",
    chains: int = CHAINS,
    declare: str = "",
    **more: Any,
) -> BenchUnit:
    """Run chains of registers, of which each step changes one: ``ptx`` makes %0 from itself and
    from ``operands``.

    An operand is ``+n`` (the chain n further on), ``^`` (the other one of a pair of chains), ``k``
    (one of four constants by turns), ``q%3`` (one of three, step by step) or a constant; ``r:n`` is
    in another kind of register. ``a|c`` alternate from round to round, as ``(min|max)`` in the
    text. Sums go over pairs: x + y, then y - x, which comes back after six rounds but for rounding,
    so values stay bounded, and no operand is held as a constant addend would be. A sine is 7.5 sin
    x + b, which is chaotic; the sine alone goes to zero."""
    registers = read_registers(kind)
    words = operands.split()
    is_paired = "^" in words

    def step(i: int) -> str:
        register = i % chains
        odd = i // chains % 2
        if is_paired:  # x0 + x1, x2 + x3, ..., then x1 - x0, x3 - x2, ...
            odd = i // (chains // 2) % 2
            register = i % (chains // 2) * 2 + odd
        arguments = []
        for word in words:
            letter_of_word, _, names = word.rpartition(":")
            operand = names.split("|")[odd if "|" in names else 0]
            if operand == "^":
                place = str(register ^ 1)
            elif operand[0] == "+":
                place = str((i + int(operand)) % chains)
            elif operand == "k":
                place = f"_k{i // chains % 4}"
            else:
                stem, _, count = operand.partition("%")
                place = f"_{stem}{i % int(count) if count else ''}"
            arguments.append(into(letter_of_word or registers.letter, name + place))
        text = re.sub(r"\((\w+)\|(\w+)\)", lambda pair: pair[1 + odd], ptx)
        changed = inout(registers.letter, f"{name}{register}")
        return asm(text, changed, ", ".join(arguments))

    lines = []
    folds = []
    for chain in range(chains):
        first = registers.first.format(chain + 1, chain + 51)
        lines.append(f"{registers.type} {name}{chain} = {first};")
        folds.append(registers.bits.format(f"{name}{chain}"))
    lines.append(f"{registers.constants} {declare}".replace("{p}", name))
    return BenchUnit(
        name,
        " ".join(lines),
        step,
        " ^ ".join(folds),
        **more,
    )


def compare_unit(name: str) -> BenchUnit:
    """Compare into predicates, which go back to a register at once because they cannot leave a
    statement.
    """
    base = register_unit(name, "u32")
    pairs = list(permutations(range(CHAINS), 2))
    predicates = range(6)

    def step(i: int) -> str:
        x, y = pairs[i * 5 % len(pairs)]
        return write_piece(
            "compare.step",
            name,
            q=i % len(predicates),
            x=x,
            y=y,
        )

    declare = " ".join([base.declare, *(f"unsigned {name}_q{n} = 0u;" for n in predicates)])
    fold = " ^ ".join([base.fold, *(f"({name}_q{n} << {n})" for n in predicates)])
    return replace(
        base,
        declare=declare,
        step=step,
        fold=fold,
    )


def multiply_adds(
    name: str,
    kind: str = "f32",
    chains: int = CHAINS,
) -> BenchUnit:
    """Multiply and add without waiting for a register bank: x·a+b for ``HELD`` steps, then x·r-b, r
    near 1/a.

    The multiplier changes rarely, so the assembler holds it; the last round with r is negated, so
    chains go back and forth and stay bounded. Where the assembler lets go of what it holds (doubles
    every few instructions, few chains at every one) the addend is part of the instruction: two
    registers are read."""
    registers = read_registers(kind)
    letter = registers.letter
    has_addend_stated = kind == "f64" or chains < CHAINS

    def step(i: int) -> str:
        shrinks = i // HELD % 2 == 1
        turns_sign = shrinks and i % HELD >= HELD - chains
        multiplier = f"{name}_i" if shrinks else f"{name}_g"
        if turns_sign:
            multiplier = f"-{multiplier}"
        accumulator = inout(letter, f"{name}{i % chains}")
        if has_addend_stated:
            return asm(
                f"fma.rn.{kind} %0, %0, %1, {ADDENDS[kind][shrinks]};",
                accumulator,
                into(letter, multiplier),
            )
        return asm(
            "fma.rn.f32 %0, %0, %1, %2;",
            accumulator,
            into(letter, multiplier, f"{name}_d" if shrinks else f"{name}_b"),
        )

    factors = write_piece("growth.declare", name, type=registers.type)
    return replace(
        register_unit(
            name,
            kind,
            "",
            "",
            chains,
            factors,
            flop=2.0,
        ),
        step=step,
    )


def move_unit(name: str, count: int) -> BenchUnit:
    """Let registers change places at the end of each iteration: only moves can do that across a
    loop.

    A rotation of 64 registers takes 73 of them, as the disassembly shows.
    """
    shifts = " ".join(f"{name}{i} = {name}{i + 1};" for i in range(count - 1))
    registers = " ".join(f"unsigned {name}{i} = mixed(state + {i + 1}u);" for i in range(count))
    fold = " ^ ".join(f"{name}{i} * {2 * i + 1}u" for i in range(count))
    values: Plain = {"shifts": shifts, "last": count - 1}
    return fill_unit(
        "move",
        name,
        values,
        declare=registers,
        fold=fold,
        operation="move",
    )


def statement_unit(
    name: str,
    text: str,
    declare: str = "",
    fold: str = "0u",
    leads: int = 0,
    **more: Any,
) -> BenchUnit:
    """Repeat one statement; {p} stands for the name.

    With ``leads``, the first thread of a block executes it so often in an iteration, or lanes would
    queue for one word."""
    statement = text.replace("{p}", name)
    before = ""
    if leads:
        before = f"if (threadIdx.x == 0u) {{ {' '.join([statement] * leads)} }}"
    return BenchUnit(
        name,
        declare.replace("{p}", name),
        lambda i: "" if leads else statement,
        fold.replace("{p}", name),
        before=before,
        one_thread=leads > 0,
        **more,
    )


def chain_unit(
    name: str,
    kind: str,
    ptx: str,
    operation: str = "instruction",
) -> BenchUnit:
    """Let each operation wait for the last: PTX makes %0 from %1, the result before, and %2, a
    constant.
    """
    registers = read_registers(kind)
    results = (f"{name}0", f"{name}1")
    constant = f"{name}_k"
    lines = []
    for number, register in enumerate((*results, constant), start=1):
        lines.append(f"{registers.type} {register} = {registers.first.format(number)};")

    def step(i: int) -> str:
        return asm(
            ptx,
            inout(registers.letter, results[i % 2]),
            into(registers.letter, results[1 - i % 2], constant),
        )

    fold = " ^ ".join(map(registers.bits.format, results))
    return BenchUnit(
        name,
        " ".join(lines),
        step,
        fold,
        operation=operation,
    )


def ring_unit(
    name: str,
    nodes: int,
    stride: int,
    cached: bool = True,
    plain: bool = False,
) -> BenchUnit:
    """Follow the ring of ``nodes`` addresses that lies at ``b``; past L1 unless ``cached``.

    Each node lies in another line of its stride, or all at its beginning where the ring is
    ``plain``.

    Each seed begins elsewhere: launches that walk the same stretch of a large ring would find it in
    the L2."""
    values: Plain = {
        "nodes": nodes,
        "stride": stride,
        "mask": 0 if plain else stride - 1,
        "line": LINE_BYTE,
    }
    values |= {"warm": min(nodes, WARM_HOPS), "cache": "ca" if cached else "cg"}
    return fill_unit("ring", name, values, operation="load")


def shared_ring_unit(name: str, cluster: int = 1) -> BenchUnit:
    """Follow a ring in the block's own shared memory, or in that of its neighbour in a cluster."""
    values: Plain = {
        "nodes": SHARED_NODES,
        "factor": RING_FACTOR,
        "hop": RING_STEP,
    }
    values |= {"cluster": cluster, "sync": write_piece("cluster.sync", "")}
    kind = "cluster_ring" if cluster > 1 else "shared_ring"
    return fill_unit(
        kind,
        name,
        values,
        operation="load",
        cluster=cluster,
    )
