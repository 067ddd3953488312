"""Small made-up traces, and a command line without its main program."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.lab.gpuwattch.demo_chip import demo_architecture, demo_energies

from wattcast.lab.gpuwattch.bottom_up.chip_design import ChipDesign, design_from_architecture
from wattcast.lab.gpuwattch.component_build import build_component_model
from wattcast.lab.gpuwattch.component_set import read_component_set
from wattcast.lab.gpuwattch.trace_reading import (
    SimulatorDialect,
    TraceSampling,
    dialect_counters,
    open_metric_trace,
)
from wattcast.lab.gpuwattch.trace_run import FIGURE, LOGS, TraceRun

COLUMNS = [c.column for c in dialect_counters(SimulatorDialect.GPUWATTCH)]
TraceMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def demo() -> ChipDesign:
    """Return the design of the demo chip."""
    return design_from_architecture(demo_architecture())


def sample_rows(count: int, seed: int = 1) -> np.ndarray:
    """Rows of plausible counters for the demo chip."""
    random = np.random.default_rng(seed)
    rows = np.rint(random.exponential(10.0 ** (1 + np.arange(30) % 4), (count, 30)))
    rows[:, COLUMNS.index("PIPE_A")] = np.round(random.random(count) * 0.8, 6)
    rows[:, COLUMNS.index("IDLE_CORE_N")] = np.round(random.random(count) * 8, 3)
    rows[:, COLUMNS.index("CONST_DYNAMICN")] = 0.0
    return rows


def trace_text(rows: np.ndarray, columns: list[str] | None = None) -> str:
    """A trace as the simulator writes it: rows end with a comma."""
    lines = [",".join(columns or COLUMNS)]
    lines += ["".join(f"{value:f}," for value in row) for row in rows]
    return "\n".join(lines) + "\n"


@pytest.fixture
def write_trace(tmp_path: Path) -> TraceMaker:
    """Write rows to a trace; ``members`` makes one gzip member a line, as the simulator does."""

    def write(
        rows: np.ndarray,
        columns: list[str] | None = None,
        members: bool = False,
        name: str = "m.log",
    ) -> Path:
        text = trace_text(rows, columns)
        path = tmp_path / (name + ".gz" if members else name)
        if members:
            path.write_bytes(
                b"".join(gzip.compress(line.encode()) for line in text.splitlines(keepends=True))
            )
        else:
            path.write_text(text)
        return path

    return write


@pytest.fixture
def demo_run(tmp_path: Path):
    """A run of the demo chip over a trace: ``demo_run(path, compat=True, ...)`` -> TraceRun."""

    def make(
        path: Path, compat: bool = False, sampling: TraceSampling | None = None, **more: object
    ) -> TraceRun:
        components = read_component_set(SimulatorDialect.GPUWATTCH, compat)
        model = build_component_model(demo_architecture(), demo_energies(), components).model
        trace = open_metric_trace(path, SimulatorDialect.GPUWATTCH)
        more.setdefault("wanted", (*LOGS, FIGURE))
        out = more.pop("out", tmp_path / "out")
        return TraceRun(trace, model, components, sampling or TraceSampling(500, 1e9), out, **more)

    return make


@pytest.fixture
def verb(call):
    """Call a command: ``verb(*argv)`` -> code, out, err."""

    def run(*argv: str) -> tuple[int, str, str]:
        done = call(*argv)
        return done.code, done.out, done.err

    return run


def read_lines(path: Path) -> list[str]:
    """Lines of a plain or gzip file."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()


def read_table(path: Path) -> tuple[list[str], np.ndarray]:
    """Header and numbers of a trace, with or without trailing commas."""
    head, *rows = read_lines(path)
    return head.split(","), np.array(
        [[float(x) for x in row.rstrip(",").split(",")] for row in rows]
    )
