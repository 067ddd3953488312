"""List every microbenchmark of ``benchmarks.jsonl``, in the order in which it is measured when time
is short.

A line is a benchmark: its ``unit`` (what makes it, and its options), the steps of an iteration, and
its settings (``Benchmark``). A line with ``each`` is one for each of these values, which takes the
place of ``{n}``. A line with ``part`` names a unit for mixes, which are built like a pyramid: pairs
first, then three and four units at once (papers 000 and 002). Rates of a mix are reported for its
first unit.

A body is long where the unit is fast, so that the loop itself weighs under one percent. DRAM is
copied by few blocks that walk on, by a block for every chunk (``whole``) or for every 2 KiB
(``thin``, as elementwise operators do), and by the copy engine (``bulk``). ``dram_rate`` is DRAM
at a part of its rate, in bytes a cycle and SM. Sent to
four blocks at once, the kernel of ``multicast`` failed on an H200.

``has_run: false`` marks kernels that no card has run yet: they compile, their machine code was
compared with what they declare, and what their curves tell was tried on made-up ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from wattcast.core.errors import check_names
from wattcast.core.measured_rows import Plain
from wattcast.core.regular_files import read_shipped_table
from wattcast.core.row_journals import read_lines
from wattcast.lab.microbench import (
    arithmetic_units,
    memory_units,
    tensor_units,
)
from wattcast.lab.microbench.unit_source import Benchmark, BenchUnit

# launches by the driver, whose times `launch_times` takes; the numbers are nodes of a graph
GRAPH_NODES = (1, 4, 16, 64, 256, 1024)
LAUNCHES = ("launch_queued", "launch_waited", *(f"launch_graph_{n}" for n in GRAPH_NODES))
TRANSFERS = (
    "dram_memcpy",
    "pcie_to_device",
    "pcie_to_host",
    "pcie_both",
    "peer_copy",
)  # by the driver


@cache
def list_benchmarks() -> tuple[Benchmark, ...]:
    """List every benchmark once, most important first; names are unique."""
    benchmarks: list[Benchmark] = []
    named_parts: dict[str, BenchUnit] = {}
    needed = _read_needed()
    for line in read_lines(Path(__file__).with_name("benchmarks.jsonl")):
        for n in line.pop("each", [""]):
            settings = _put_value(line, n)
            if "part" in settings:
                named_parts[settings["part"]] = _make_unit(**settings["unit"])
                continue
            if settings["name"] in needed:
                settings.setdefault("least", needed[settings["name"]])
            benchmarks.append(_make_benchmark(settings, named_parts))
    return tuple(benchmarks)


def _make_benchmark(settings: Plain, named_parts: Mapping[str, BenchUnit]) -> Benchmark:
    """Make a benchmark of a unit of its own, under its name, of named parts, or of both."""
    parts = []
    if "unit" in settings:
        unit = _make_unit(**{"name": settings["name"]} | settings.pop("unit"))
        parts.append((unit, settings.pop("steps")))
    for part, steps in settings.pop("parts", {}).items():
        parts.append((named_parts[part], steps))
    if "ring" in settings:
        nodes, stride = settings["ring"]
        settings.setdefault("at", nodes * stride)
    return Benchmark(parts=tuple(parts), **settings)


def _read_needed() -> dict[str, int]:
    """Read the architectures that benchmarks need where the oldest does not have the instructions.

    Each was compiled by NVRTC 12.9 for sm_70 and sm_75; those that it refused are in the table.
    """
    rows = read_shipped_table("wattcast.lab.microbench", "needed_architectures.csv")
    return {row["benchmark"]: int(row["least"]) for row in rows}


def find_benchmarks(names: list[str]) -> list[Benchmark]:
    """Find benchmarks by name, group or curve; the driver's own copies are known, but have no
    kernel.
    """
    known_names = {"transfer", *TRANSFERS, "launch", *LAUNCHES}
    chosen = []
    for benchmark in list_benchmarks():
        labels = {benchmark.name, benchmark.group, benchmark.curve} - {""}
        known_names |= labels
        if not names or labels & set(names):
            chosen.append(benchmark)
    check_names("microbenchmark", names, known_names, "`--list` names them all.")
    return chosen


def list_transfers(names: list[str]) -> list[str]:
    """List the driver's own copies of these names, or all where none is named."""
    return [name for name in TRANSFERS if not names or {name, "transfer"} & set(names)]


def list_launches(names: list[str]) -> list[str]:
    """List the driver's launches of these names, or all where none is named."""
    return [name for name in LAUNCHES if not names or {name, "launch"} & set(names)]


def _put_value(line: Any, n: int | float | str) -> Any:
    """Put a value in the place of ``{n}``."""
    if isinstance(line, dict):
        return {key: _put_value(value, n) for key, value in line.items()}
    if isinstance(line, list):
        return tuple(_put_value(value, n) for value in line)
    if line == "{n}":
        return n
    return line.replace("{n}", str(n)) if isinstance(line, str) else line


def _make_unit(
    make: str,
    counted: Plain | None = None,
    period: int = 0,
    **options: Any,
) -> BenchUnit:
    """Make a unit by the function called ``make``.

    ``counted`` says what else is counted as an operation; ``period`` is in cycles, of a unit that
    is paced."""
    makers = vars(arithmetic_units) | vars(memory_units) | vars(tensor_units)
    maker: Callable[..., BenchUnit] = makers[make]
    unit = replace(maker(**options), **(counted or {}))
    return memory_units.pace_unit(unit, period) if period else unit
