"""Write the CUDA C source of a microbenchmark from its units.

A unit gives one of its operations in CUDA C with inline PTX. A benchmark interleaves the operations
of one or more units in a long straight loop that has no other work. Operands come from registers
set at run time; results feed later operations and are stored under a condition that only a check
makes true, so the compiler can neither compute in advance nor drop anything. Tests compare the
disassembly with the machine instructions that should result."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from string import Template
from typing import Any

from wattcast.core import files

# of each block: multiprocessor, cycle counter and nanosecond timer at begin and end
STAMP_WORDS = 5
L2_TURNS = 16  # of a benchmark that lives in L2: see `Benchmark.turns`
SINK_WORDS = 1 << 22  # of the sink: the most threads a launch may have
LINE_APART = 33 * 128  # bytes from one single line to the next: no power of two
CHECK_SEED = 0  # with this seed a kernel stores what it computed


@dataclass(frozen=True)
class BenchUnit:
    """One kind of operation. ``step(i)`` is the text of the i-th operation of a loop body."""

    name: str
    declare: str = ""
    step: Callable[[int], str] = lambda i: ""
    fold: str = "0u"  # an unsigned expression of every result
    advance: str = ""  # once an iteration, after the operations
    before: str = ""  # once an iteration, before them
    finish: str = ""  # once, after the loop
    per_step: int = 1  # operations of one thread in one step
    operation: str = "instruction"
    byte: float = 0.0  # moved by one thread in one operation
    flop: float = 0.0  # of one thread in one operation
    source: str = ""  # device functions and constants before the kernel
    chunk: int = 0  # bytes of buffer a block covers in an iteration, of a streaming unit
    one_thread: bool = False  # one thread of a block does it all
    cluster: int = 1  # blocks that are launched together and see one another's shared memory


@cache
def read_pieces() -> dict[str, dict[str, Template]]:
    """Read the CUDA C that units are made of, by kind of unit and part of it."""
    text = files("wattcast.lab.microbench").joinpath("unit_pieces.cu").read_text(encoding="utf-8")
    pieces: dict[str, dict[str, Template]] = defaultdict(dict)
    for piece in re.split(r"^//: ", text, flags=re.MULTILINE)[1:]:
        name, *lines = piece.splitlines()
        kind, _, part = name.partition(".")
        code = [line.strip() for line in lines if line and not line.startswith("//")]
        pieces[kind][part] = Template(" ".join(code))
    return pieces


def write_piece(
    piece: str,
    p: str,
    **values: object,
) -> str:
    """Write the piece called ``kind.part`` for the unit ``p``."""
    kind, _, part = piece.partition(".")
    return read_pieces()[kind][part].substitute(values, p=p)


def fill_unit(
    kind: str,
    name: str,
    values: Mapping[str, object],
    values_of_step: Callable[[int], Mapping[str, object]] = lambda i: {},
    **facts: Any,
) -> BenchUnit:
    """Make a unit of the pieces of its kind, filled with ``values`` and, in the i-th step, with
    ``each(i)``.

    ``facts`` are further fields of the unit, or stand in the place of a piece.
    """
    pieces = read_pieces()[kind]
    part_names = {field.name for field in fields(BenchUnit)} & set(pieces) - {"step", *facts}
    texts: dict[str, Any] = {part: pieces[part].substitute(values, p=name) for part in part_names}
    if "step" in pieces:
        texts["step"] = lambda i: pieces["step"].substitute({**values, **values_of_step(i)}, p=name)
    return BenchUnit(name, **texts | facts)


OLDEST = 70  # compute capability times ten of the oldest cards that are measured


@dataclass(frozen=True)
class Benchmark:
    """Units in proportion, a launch shape and what is to be learned from it."""

    name: str
    group: str
    # a unit and its steps an iteration; the first is what is reported
    parts: tuple[tuple[BenchUnit, int], ...]
    threads: int = 512
    blocks_per_sm: int = 2
    share: float = 1.0  # of the multiprocessors that get blocks
    # a block for every chunk of the buffer, once, instead of a few that walk through it
    whole: bool = False
    # every how many blocks one writes its stamps: a timer costs short blocks much of their time
    stamped: int = 1
    shared_byte: int = 0  # of a block, requested at launch
    working_set: str = ""  # "", "l1", "l2" or "dram": how large the buffers are; or "texture"
    tiles: bool = False  # ``b`` is a tensor map of the buffer ``a``
    # nodes and bytes from one to the next: ``b`` is a ring of addresses
    ring: tuple[int, int] = (
        0,
        0,
    )
    # how the ring goes: "lines" at random, each node in another line of its stride; "plain" at
    # random, all at the same place of it; "walk" from each to its neighbour
    links: str = "lines"
    line: int = 0  # where the ring begins: so many times `LINE_APART` behind the buffer's begin
    timed: bool = False  # one warp of one block, for its cycles alone: a latency
    least: int = OLDEST  # compute capability times ten
    only: tuple[
        str, ...
    ] = ()  # architectures with the instruction, where not every later one has it
    curve: str = ""  # the figure this is a point of, if any
    at: float = 0.0  # where on that curve
    seed: int = 1
    check: str = ""  # which self-check applies (`run_self_check`)
    specification: str = ""  # key of a rate that the vendor states (`find_specified_rate`)
    interleave: bool = True
    once: bool = False  # one of several ways to the same end: measured in the first round only
    # grows when the kernel changes, so that what an older one measured is measured again
    version: int = 1
    has_run: bool = True  # on any card

    @property
    def unit(self) -> BenchUnit:
        """The unit that is reported."""
        return self.parts[0][0]

    @property
    def turns(self) -> int:
        """Blocks for each place on a multiprocessor, one after another.

        L2 serves some multiprocessors sooner than others, and which depends on where a buffer lies;
        these take more blocks, so that a launch is not as long as its slowest multiprocessor
        (docs/method/microbenchmarks.md). Clusters of several blocks leave places empty at the end
        of a launch, which many turns make negligible."""
        return L2_TURNS if self.working_set == "l2" or (self.cluster > 1 and not self.timed) else 1

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return max(unit.cluster for unit, _ in self.parts)

    @property
    def steps(self) -> int:
        """Steps of the reported unit in one iteration."""
        return self.parts[0][1]

    @property
    def operations(self) -> int:
        """Operations of the reported unit, of one thread, in one iteration."""
        return self.steps * self.unit.per_step

    def count(
        self,
        blocks: int,
        iterations: int,
        part: int = 0,
    ) -> float:
        """Count the operations of a unit in one launch, of all threads."""
        unit, steps = self.parts[part]
        threads = 1 if unit.one_thread else self.threads
        return float(steps * unit.per_step) * threads * blocks * iterations

    def supported(self, architecture: str) -> bool:
        """Return whether ``architecture`` (``sm_90a``) has the instructions."""
        number = int(re.sub(r"\D", "", architecture))
        return architecture in self.only if self.only else number >= self.least

    @cached_property
    def source(self) -> str:
        """The kernel; its name is the benchmark's, so that a profiler shows it."""
        units = [unit for unit, _ in self.parts]
        stamps = read_pieces()["stamps"]
        lines = [f"    {line}" for line in interleave_steps(self.parts, self.interleave)]
        text = (
            files("wattcast.lab.microbench")
            .joinpath("microbenchmark.cu")
            .read_text(encoding="utf-8")
        )
        return Template(text).substitute(
            name=self.name,
            cluster=f"__cluster_dims__({self.cluster}, 1, 1) " if self.cluster > 1 else "",
            threads=self.threads,
            blocks=self.blocks_per_sm,
            functions="\n".join(filter(None, dict.fromkeys(unit.source for unit in units))),
            declare="\n  ".join(unit.declare for unit in units),
            before=_join_texts("\n    ", units, "before"),
            body="\n".join(lines),
            advance=_join_texts("\n    ", units, "advance"),
            finish=_join_texts("\n  ", units, "finish"),
            fold=" ^ ".join(f"({unit.fold})" for unit in units),
            begin=stamps["begin_of_some" if self.stamped > 1 else "begin"].substitute(
                every=self.stamped
            ),
            end=stamps["end_of_some" if self.stamped > 1 else "end"].substitute(every=self.stamped),
            words=STAMP_WORDS,
            check=CHECK_SEED,
        )


def _join_texts(
    separator: str,
    units: list[BenchUnit],
    attribute: str,
) -> str:
    """Join a text of all units that have it."""
    texts = [getattr(unit, attribute) for unit in units]
    return separator.join(filter(None, texts))


def interleave_steps(
    parts: tuple[tuple[BenchUnit, int], ...], interleave: bool = True
) -> list[str]:
    """Interleave the steps of all units evenly, or put one unit after another."""
    placed: list[tuple[float, int, int]] = []  # share of the body before it, part, step
    for part, (_, count) in enumerate(parts):
        for step in range(count):
            share = (step + 0.5) / count if interleave else float(part)
            placed.append((share, part, step))
    placed.sort()
    return [parts[part][0].step(step) for _, part, step in placed]


def asm(
    text: str,
    outs: str = "",
    ins: str = "",
) -> str:
    """Write one volatile statement; ``outs`` and ``ins`` are constraint lists as CUDA C writes
    them.
    """
    return f'asm volatile("{text}" : {outs} : {ins});'


def inout(kind: str, name: str) -> str:
    """Write the constraint ``"+r"(name)``."""
    return f'"+{kind}"({name})'


def into(kind: str, *names: str) -> str:
    """Write the constraints ``"r"(a), "r"(b)``."""
    return ", ".join(f'"{kind}"({name})' for name in names)


def out_of(*names: str) -> str:
    """Write the constraints ``"=r"(a), "=r"(b)``."""
    return ", ".join(f'"=r"({name})' for name in names)


def vector(words: int, first: int = 0) -> str:
    """Write operands as PTX does: ``{%0, %1}``, or ``%0`` of a single word."""
    return (
        "{" + ", ".join(f"%{first + w}" for w in range(words)) + "}" if words > 1 else f"%{first}"
    )
