"""Disassembly: what a kernel's loop really consists of, held against what its benchmark declares.

``nvdisasm`` comes with the CUDA toolkit, or from PyPI (``nvidia-cuda-nvdisasm``); no GPU is needed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from wattcast.errors import MissingTool, WattcastError
from wattcast.measure.microbench.unit import Benchmark, Opcodes

_LABEL = re.compile(r"^(\.L[\w.$]*):")
_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
SLACK = 0.02  # by which a count may miss


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly."""

    opcode: str
    operands: str


@dataclass(frozen=True)
class Agreement:
    """How much of a loop body its benchmark foretold."""

    share: float  # of the loop's instructions that were declared
    missing: tuple[str, ...]  # declared operations that came too rarely or too often
    found: dict[str, int]
    size: int

    @property
    def holds(self) -> bool:
        """Whether at least 95 % of the body is as declared, and every operation as often as declared."""
        return self.share >= 0.95 and not self.missing


def disassemble(cubin: bytes) -> str:
    """Machine code as text."""
    tool = nvdisasm()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, timeout=120.0, check=False)
    if done.returncode != 0:
        raise WattcastError(f"nvdisasm failed: {done.stderr.strip()[:300]}")
    return done.stdout


def nvdisasm() -> str:
    """Where the disassembler is."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return str(path)
    raise MissingTool("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm).")


def loops(text: str) -> list[list[Instruction]]:
    """Every loop: from the target of a backward branch to the branch."""
    lines: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(lines)
        elif found := _LINE.match(line):
            lines.append(Instruction(found[1], found[2].strip()))
    bodies = []
    for place, line_ in enumerate(lines):
        target = re.search(r"\.L[\w.$]*", line_.operands) if line_.opcode.startswith("BRA") else None
        begin = labels.get(target[0]) if target else None
        if begin is not None and begin < place:
            bodies.append(lines[begin : place + 1])
    return bodies


def main_loop(text: str, wanted: str) -> list[Instruction]:
    """The loop with the most instructions that match ``wanted``; the shortest of these."""
    scored = [(sum(bool(re.fullmatch(wanted, i.opcode)) for i in body), -len(body), body) for body in loops(text)]
    return max(scored, default=(0, 0, []), key=lambda entry: entry[:2])[2]


def agreement(benchmark: Benchmark, text: str) -> Agreement:
    """Hold a disassembly against the declaration: operations exactly, what surrounds them at most."""
    own = _joined([(pattern, n * count) for unit, n in benchmark.parts for pattern, count in unit.opcodes])
    body = [line.opcode for line in main_loop(text, own[0][0])]
    left = Counter(body)
    missing, explained = [], 0
    for pattern, count in own:
        seen = _take(left, pattern, count)
        explained += seen
        spare = sum(n for op, n in left.items() if re.fullmatch(pattern, op))
        if seen < count * (1.0 - SLACK):
            missing.append(f"{pattern}: {seen} of {count:g}")
        elif spare > SLACK * count + _allowed(benchmark, pattern):
            missing.append(f"{pattern}: {spare} more than {count:g}")
    for pattern, count in benchmark.allowances:
        explained += _take(left, pattern, count)
    return Agreement(explained / len(body) if body else 0.0, tuple(missing), dict(Counter(body)), len(body))


def _joined(opcodes: list[tuple[str, float]]) -> Opcodes:
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


def _allowed(benchmark: Benchmark, pattern: str) -> float:
    """How many instructions of a declared kind may surround the operations, because both look alike."""
    sample = re.sub(r"\\.|\.\*|[?()]", "", pattern.split("|")[0])
    return 2.0 + sum(count for other, count in benchmark.allowances if re.fullmatch(other, sample) or other == ".*")
