"""Whole-model rows: what ``wattcast measure models`` wrote, and the same workloads predicted.

``DB`` is a folder with ``models.parquet``, that file, the name of a database that ships, a folder of
journals, or a CSV of one's own with the columns of :class:`~wattcast.records.ModelRow`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware, units
from wattcast.arrays import Array
from wattcast.equilibrium import settle
from wattcast.errors import BadInput, bad_value
from wattcast.fitted import Bundle
from wattcast.flow import Totals, analyse, at_clock
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.records import MODELS_FILE, ModelRow, Plain, database_folder, from_plain, read_lines, read_table
from wattcast.timeline import Timeline
from wattcast.timeline.phases import Launch
from wattcast.workload.build import build
from wattcast.workload.graph import Graph
from wattcast.workload.options import Options

_NAMES = tuple(item.name for item in fields(ModelRow))
_MISSING = "whole-model rows are measured by `python -m wattcast.measure models --out DIR`"


@dataclass(frozen=True)
class Case:
    """A measured whole model and the graph it ran."""

    row: ModelRow
    graph: Graph

    @property
    def operators(self) -> int:
        """Operators the host issues in one iteration."""
        return int(sum(calls for _, calls in self.graph.calls()))


def load(database: str | Path) -> list[Case]:
    """Every row without an error, with the operators its workload has."""
    plain = [row for row in _plain(Path(database), str(database)) if not row.get("error")]
    rows = [_row(row, f"{database}") for row in plain]
    return [Case(row, graph_of(row)) for row in rows if row.latency_s]


def missing(database: str | Path) -> str:
    """Why there are no whole-model rows, or empty where there are."""
    try:
        return "" if load(database) else f"{database}: no row without an error; {_MISSING}"
    except BadInput as error:
        return str(error)


def graph_of(row: ModelRow) -> Graph:
    """The operators of the row's workload; it is written in the catalogue's own terms."""
    options = Options.of(
        batch=row.batch,
        seq=row.seq,
        phase=row.phase,
        dtype=row.dtype,
        attention=row.attention,
        head=row.head or None,
        stack=row.stack,
    )
    return build(row.model, options)


def capped(row: ModelRow, top_hz: float) -> bool:
    """Whether the power limit held the clock down while it was measured."""
    return "sw_power_cap" in row.throttle and (row.sm_clock_hz is None or row.sm_clock_hz < 0.995 * top_hz)


def timelines(cases: list[Case], gpu: Gpu, bundle: Bundle) -> list[Timeline]:
    """Clock-free timelines, for whoever tries several launch costs or clocks."""
    return [analyse(case.graph, gpu, bundle) for case in cases]


def with_host(timeline: Timeline, launch: Launch) -> Timeline:
    """The timeline with another launch cost of the host; nothing else depends on it."""
    return replace(timeline, host_s=launch.host_s([op.kind for op in timeline.kernels.ops]))


def governed(timeline: Timeline, gpu: Gpu, bundle: Bundle) -> tuple[Totals, float]:
    """Latency and power under the governor at the card's own limit, and the clock it finds."""
    found = settle(timeline, gpu, OperatingPoint(), bundle)
    return at_clock(timeline, found.at, bundle), float(found.clock_hz[..., 0])


def number(cases: list[Case], of: Callable[[ModelRow], float | None]) -> Array:
    """A measured figure of each case; NaN where it was not measured."""
    return np.array([np.nan if (value := of(case.row)) is None else value for case in cases], dtype=np.float64)


def top_hz(gpu: str) -> float:
    """The top clock of a catalogue GPU."""
    return float(np.mean(hardware.load(gpu).clocks.max_hz))


def _plain(path: Path, name: str) -> list[Plain]:
    if path.is_dir() and not (path / MODELS_FILE).exists():
        found = (row for file in sorted(path.rglob("*.jsonl")) for row in read_lines(file))
        rows = [row for row in found if row.get("record") == "model"]
        if not rows:
            raise BadInput(f"{name}: no {MODELS_FILE} and no journal with whole models; {_MISSING}.")
        return list({(row.get("id"), row.get("run")): row for row in rows}.values())
    if path.suffix == ".csv":
        return [_typed(row, f"{path.name}: line {i}") for i, row in enumerate(_csv(path), start=2)]
    if path.is_file():
        return read_table(path)
    table = path / MODELS_FILE if path.is_dir() else database_folder(name) / MODELS_FILE
    if not table.exists():
        raise BadInput(f"{name}: its database has no {MODELS_FILE}; {_MISSING}.")
    return read_table(table)


def _row(plain: Plain, where: str) -> ModelRow:
    return from_plain({k: v for k, v in plain.items() if k in _NAMES and v is not None}, ModelRow, where)


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


_WHOLE, _UNIT = ("batch", "seq"), {"latency_s": "s", "power_w": "W", "energy_j": "J", "sm_clock_hz": "Hz"}
_USUAL = {"phase": "prefill", "dtype": "bf16", "attention": "flash", "stack": "eager", "graph": "no"}


def _typed(row: dict[str, str], where: str) -> Plain:
    """A line of one's own CSV: whole numbers, quantities with or without a unit, yes or no."""
    given = {**_USUAL, **{name: text for name, text in row.items() if text}}
    for name in given:
        if name not in _NAMES:
            raise bad_value(where, f"columns of {', '.join(_NAMES[:11])} and measured figures", name)
    if not {"model", "batch", "latency_s"} <= set(given):
        raise bad_value(where, "at least model, batch and latency_s", ", ".join(given))
    typed: dict[str, Any] = {"id": where, **given, "graph": given["graph"].lower() in ("yes", "true", "1")}
    for name in _WHOLE:
        if name in given:
            typed[name] = _int(given[name], f"{where}: {name}")
    for name, unit in _UNIT.items():
        if name in given:
            typed[name] = _quantity(given[name], unit, f"{where}: {name}")
    return typed


def _int(text: str, where: str) -> int:
    if not text.strip().isdigit():
        raise bad_value(where, "a whole number", text)
    return int(text)


def _quantity(text: str, unit: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        return units.parse(text, unit, where)
