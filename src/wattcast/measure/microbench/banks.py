"""Register banks: which instructions of a loop wait for their operands, read from the disassembly.

From Volta on a scheduler's register file has two banks, even and odd register numbers. The model here gives
each bank one register of a warp in a cycle, so that two operands of one parity take two cycles; a 64-bit
operand takes one of each. An operand whose predecessor in the same place was marked ``.reuse`` is held and
not read again. It was found from the H200's first round: with eight chains the multiplier changes every
eighth FFMA and meets an accumulator of its own parity (128 · 8/9 = 113.8 a cycle, measured 113.6), and every
sixth DFMA the assembler lets go of what it held, so three 64-bit operands are read where two fit into the
instruction's two cycles (64 · 12/13 = 59.1, measured 59.0). Latencies, and warps that take turns, are not in it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from wattcast.measure.microbench.sass import Instruction

_REGISTER = re.compile(r"[-|~]*R(\d+)(?:\.64)?(?:\.H\d_H\d|\.\w+)*?(\.reuse)?\|?$")
SCHEDULERS = 4
LANES = 32


@dataclass(frozen=True)
class Pipe:
    """How a kind of instruction is issued."""

    name: str
    cycles: int  # of a scheduler, for one instruction of a warp
    words: int  # registers an operand has


@dataclass(frozen=True)
class Load:
    """What one instruction asks of the register file."""

    pipe: Pipe
    reads: int  # of the fuller bank

    @property
    def waits(self) -> int:
        """Cycles beyond what its pipe takes anyway."""
        return max(self.reads - self.pipe.cycles, 0)


@dataclass(frozen=True)
class Banks:
    """A loop body's cycles on one scheduler."""

    cycles: float
    conflicts: int  # instructions that wait
    waiting: int  # cycles they wait
    instructions: int

    def per_cycle_sm(self, operations: float) -> float:
        """Operations of a thread and iteration -> those of an SM in a cycle."""
        return operations * LANES * SCHEDULERS / self.cycles


OTHER = Pipe("other", 1, 0)


@cache
def pipes() -> tuple[tuple[re.Pattern[str], Pipe], ...]:
    """``pipes.csv``: rates of compute capability 9.0, with their source."""
    text = files("wattcast.measure.microbench").joinpath("pipes.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple((re.compile(r["opcode"]), Pipe(r["pipe"], int(r["cycles"]), int(r["words"]))) for r in rows)


def pipe_of(opcode: str) -> Pipe:
    """The pipe of an opcode; one that is not listed takes one cycle of its scheduler and reads nothing."""
    return next((pipe for pattern, pipe in pipes() if pattern.fullmatch(opcode)), OTHER)


def sources(instruction: Instruction) -> list[tuple[int | None, bool]]:
    """Source operands in their places: the register (None for anything else) and whether it is kept for reuse."""
    parts = [part.strip() for part in instruction.operands.split(",")]
    values = [part for part in parts if part and not re.fullmatch(r"!?U?P(T|\d+)", part)]
    if "SETP" not in instruction.opcode:
        values = values[1:]  # the result
    found: list[tuple[int | None, bool]] = []
    for value in values:
        seen = _REGISTER.match(value)
        found.append((int(seen[1]), bool(seen[2])) if seen else (None, False))
    return found


def loads(body: Iterable[Instruction]) -> list[Load]:
    """What every instruction of a loop body reads, each bank counted by itself."""
    body = list(body)
    held: dict[int, int] = {}
    found: list[Load] = []
    for _ in range(2):  # the first pass fills what is held at the loop's begin
        found = []
        for instruction in body:
            pipe = pipe_of(instruction.opcode)
            given = sources(instruction)
            fresh = {r for place, (r, _) in enumerate(given) if r is not None and held.get(place) != r}
            words = [r + word for r in fresh for word in range(pipe.words)]
            even = sum(word % 2 == 0 for word in words)
            found.append(Load(pipe, max(even, len(words) - even)))
            held = {place: r for place, (r, kept) in enumerate(given) if kept and r is not None}
    return found


def banks(body: Iterable[Instruction]) -> Banks:
    """Cycles of a loop body: the fullest pipe, or the one instruction a scheduler issues in a cycle."""
    each = loads(body)
    busy: dict[str, float] = {}
    for load in each:
        busy[load.pipe.name] = busy.get(load.pipe.name, 0.0) + load.pipe.cycles + load.waits
    issued = sum(max(1, load.reads - load.pipe.cycles + 1) for load in each)
    return Banks(
        max([float(issued), *busy.values()]),
        sum(load.waits > 0 for load in each),
        sum(load.waits for load in each),
        len(each),
    )
