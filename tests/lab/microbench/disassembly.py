"""Disassembly: what a kernel's loop really consists of, held against what its benchmark declares.

``nvdisasm`` comes with the CUDA toolkit, or from PyPI (``nvidia-cuda-nvdisasm``); no GPU is needed.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from wattcast.core.errors import MissingTool, WattcastError
from wattcast.core.row_journals import read_lines
from wattcast.lab.microbench.unit_source import Benchmark

_LABEL = re.compile(r"^(\.L[\w.$]*):")
_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
SLACK = 0.02  # by which a count may miss
OpcodeCounts = tuple[tuple[str, float], ...]  # (regular expression of an opcode, how often)
TAIL: OpcodeCounts = (
    (r"U?IADD3?|VIADD", 3.0),
    (r"U?ISETP.*|PLOP3.*", 1.0),
    (r"BRA.*", 1.0),
)  # of the loop itself


@dataclass(frozen=True)
class DeclaredLoop:
    """The machine instructions that should result of a benchmark."""

    parts: tuple[OpcodeCounts, ...]  # of one step of each unit
    around: OpcodeCounts = ()  # at most, once an iteration: address arithmetic, waiting


@cache
def read_declared() -> dict[str, DeclaredLoop]:
    """Read ``instructions.jsonl``, which has opcodes as ``POPC 1; LOP3.* 1``."""
    found = {}
    for line in read_lines(Path(__file__).with_name("instructions.jsonl")):
        loop = DeclaredLoop(tuple(map(read_opcodes, line["parts"])), read_opcodes(line["around"]))
        found |= dict.fromkeys(line["of"], loop)
    return found


def read_opcodes(text: str) -> OpcodeCounts:
    """Read opcodes and how often each comes."""
    return tuple(
        (opcode, float(count))
        for opcode, count in (part.split() for part in text.split("; ") if part)
    )


@dataclass(frozen=True)
class SassInstruction:
    """One line of a disassembly."""

    opcode: str
    operands: str


@dataclass(frozen=True)
class SassAgreement:
    """How much of a loop body its benchmark foretold."""

    share: float  # of the loop's instructions that were declared
    missing: tuple[str, ...]  # declared operations that came too rarely or too often
    found: dict[str, int]
    size: int

    @property
    def holds(self) -> bool:
        """Whether at least 95 % of the body is as declared, and every operation as often as
        declared.
        """
        return self.share >= 0.95 and not self.missing


def disassemble(cubin: bytes) -> str:
    """Machine code as text."""
    tool = find_nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-c", "-ndf", file.name],
            capture_output=True,
            text=True,
            timeout=120.0,
            check=False,
        )
    if done.returncode != 0:
        raise WattcastError(f"nvdisasm failed: {done.stderr.strip()[:300]}")
    return done.stdout


def find_nvdisasm() -> str:
    """Where the disassembler is."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    spec = find_spec("nvidia")
    for folder in (
        spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
    ):
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(path)
    raise MissingTool("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm).")


def find_loops(text: str) -> list[list[SassInstruction]]:
    """Every loop: from the target of a backward branch to the branch."""
    lines: list[SassInstruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(lines)
        elif found := _LINE.match(line):
            lines.append(SassInstruction(found[1], found[2].strip()))
    bodies = []
    for place, line_ in enumerate(lines):
        target = (
            re.search(r"\.L[\w.$]*", line_.operands) if line_.opcode.startswith("BRA") else None
        )
        begin = labels.get(target[0]) if target else None
        if begin is not None and begin < place:
            bodies.append(lines[begin : place + 1])
    return bodies


def find_main_loop(text: str, wanted: str) -> list[SassInstruction]:
    """The loop with the most instructions that match ``wanted``; the shortest of these."""
    scored = [
        (sum(bool(re.fullmatch(wanted, i.opcode)) for i in body), -len(body), body)
        for body in find_loops(text)
    ]
    return max(scored, default=(0, 0, []), key=lambda entry: entry[:2])[2]


def check_agreement(
    benchmark: Benchmark, text: str, declared: DeclaredLoop | None = None
) -> SassAgreement:
    """Hold a disassembly against the declaration: operations exactly, what surrounds them at most."""
    loop = declared or read_declared()[benchmark.name]
    steps = zip(benchmark.parts, loop.parts, strict=True)
    own = _joined([(pattern, n * count) for (_, n), opcodes in steps for pattern, count in opcodes])
    body = [line.opcode for line in find_main_loop(text, own[0][0])]
    left = Counter(body)
    missing, explained = [], 0
    for pattern, count in own:
        seen = _take(left, pattern, count)
        explained += seen
        spare = sum(n for op, n in left.items() if re.fullmatch(pattern, op))
        if seen < count * (1.0 - SLACK):
            missing.append(f"{pattern}: {seen} of {count:g}")
        elif spare > SLACK * count + _allowed(loop, pattern):
            missing.append(f"{pattern}: {spare} more than {count:g}")
    for pattern, count in (*loop.around, *TAIL):
        explained += _take(left, pattern, count)
    return SassAgreement(
        explained / len(body) if body else 0.0, tuple(missing), dict(Counter(body)), len(body)
    )


def _joined(opcodes: list[tuple[str, float]]) -> OpcodeCounts:
    """Counts of equal patterns added up."""
    total: dict[str, float] = {}
    for pattern, count in opcodes:
        total[pattern] = total.get(pattern, 0.0) + count
    return tuple(total.items())


def _take(left: Counter[str], pattern: str, most: float) -> int:
    """Take up to ``most`` instructions that match out of ``left``."""
    taken = 0
    for opcode in sorted(left):
        if re.fullmatch(pattern, opcode):
            now = min(left[opcode], max(int(most + 0.5) - taken, 0))
            left[opcode] -= now
            taken += now
    return taken


def _allowed(loop: DeclaredLoop, pattern: str) -> float:
    """How many instructions of a declared kind may surround the operations, because both look
    alike.
    """
    sample = re.sub(r"\\.|\.\*|[?()]", "", pattern.split("|")[0])
    around = (*loop.around, *TAIL)
    return 2.0 + sum(
        count for other, count in around if re.fullmatch(other, sample) or other == ".*"
    )


_REGISTER = re.compile(r"[-|~]*R(\d+)(?:\.64)?(?:\.H\d_H\d|\.\w+)*?(\.reuse)?\|?$")
SCHEDULERS = 4
LANES = 32


@dataclass(frozen=True)
class IssuePipe:
    """How a kind of instruction is issued."""

    name: str
    cycles: int  # of a scheduler, for one instruction of a warp
    words: int  # registers an operand has


@dataclass(frozen=True)
class OperandLoad:
    """What one instruction asks of the register file."""

    pipe: IssuePipe
    reads: int  # of the fuller bank

    @property
    def waits(self) -> int:
        """Cycles beyond what its pipe takes anyway."""
        return max(self.reads - self.pipe.cycles, 0)


@dataclass(frozen=True)
class BankUse:
    """A loop body's cycles on one scheduler."""

    cycles: float
    conflicts: int  # instructions that wait
    waiting: int  # cycles they wait
    instructions: int

    def per_cycle_sm(self, operations: float) -> float:
        """Operations of a thread and iteration -> those of an SM in a cycle."""
        return operations * LANES * SCHEDULERS / self.cycles


OTHER = IssuePipe("other", 1, 0)


@cache
def read_pipes() -> tuple[tuple[re.Pattern[str], IssuePipe], ...]:
    """``pipes.csv``: rates of compute capability 9.0, with their source."""
    text = Path(__file__).with_name("pipes.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(
        (re.compile(r["opcode"]), IssuePipe(r["pipe"], int(r["cycles"]), int(r["words"])))
        for r in rows
    )


def find_pipe(opcode: str) -> IssuePipe:
    """The pipe of an opcode; one that is not listed takes one cycle of its scheduler and reads
    nothing.
    """
    return next((pipe for pattern, pipe in read_pipes() if pattern.fullmatch(opcode)), OTHER)


def list_sources(instruction: SassInstruction) -> list[tuple[int | None, bool]]:
    """Source operands in their places: the register (None for anything else) and whether it is kept
    for reuse.
    """
    parts = [part.strip() for part in instruction.operands.split(",")]
    values = [part for part in parts if part and not re.fullmatch(r"!?U?P(T|\d+)", part)]
    if "SETP" not in instruction.opcode:
        values = values[1:]  # the result
    found: list[tuple[int | None, bool]] = []
    for value in values:
        seen = _REGISTER.match(value)
        found.append((int(seen[1]), bool(seen[2])) if seen else (None, False))
    return found


def find_operand_loads(body: Iterable[SassInstruction]) -> list[OperandLoad]:
    """What every instruction of a loop body reads, each bank counted by itself."""
    body = list(body)
    held: dict[int, int] = {}
    found: list[OperandLoad] = []
    for _ in range(2):  # the first pass fills what is held at the loop's begin
        found = []
        for instruction in body:
            pipe = find_pipe(instruction.opcode)
            given = list_sources(instruction)
            fresh = {
                r for place, (r, _) in enumerate(given) if r is not None and held.get(place) != r
            }
            words = [r + word for r in fresh for word in range(pipe.words)]
            even = sum(word % 2 == 0 for word in words)
            found.append(OperandLoad(pipe, max(even, len(words) - even)))
            held = {place: r for place, (r, kept) in enumerate(given) if kept and r is not None}
    return found


def find_bank_use(body: Iterable[SassInstruction]) -> BankUse:
    """Cycles of a loop body: the fullest pipe, or the one instruction a scheduler issues in a
    cycle.
    """
    each = find_operand_loads(body)
    busy: dict[str, float] = {}
    for load in each:
        busy[load.pipe.name] = busy.get(load.pipe.name, 0.0) + load.pipe.cycles + load.waits
    issued = sum(max(1, load.reads - load.pipe.cycles + 1) for load in each)
    return BankUse(
        max([float(issued), *busy.values()]),
        sum(load.waits > 0 for load in each),
        sum(load.waits for load in each),
        len(each),
    )
