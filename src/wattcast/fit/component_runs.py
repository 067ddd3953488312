"""Tables of kernels for :mod:`wattcast.fit.component`; scores of published models; energies out of a run's traces."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast.activity.simulated import Sampling, counters, open_metric_trace, open_power_trace
from wattcast.arrays import Array
from wattcast.errors import bad_value, nearest, unknown_name
from wattcast.files import read_bytes
from wattcast.fit.component import Runs, mape
from wattcast.power.component.architecture import Architecture, scaling_names
from wattcast.power.component.components import component_set
from wattcast.power.component.energies import DUTY, EnergyTable

_MAX_BYTE = 256 << 20


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are what."""

    measured: str
    kernel: str = "kernel"
    application: str | None = None  # default: the kernel's name without its trailing _k1, _2 ...
    duration: str | None = None  # seconds
    cycles: str | None = None  # with clock_hz, instead of seconds
    clock_hz: float | None = None
    prefix: str = ""  # component columns start with this
    leave_out: tuple[str, ...] = ()


def read_runs(path: Path, columns: Columns, names: Sequence[str] | None = None, rates: bool = False) -> Runs:
    """Kernels of a CSV: component watts (or counts, with ``rates``, divided by the duration) and measured watts."""
    rows = list(csv.DictReader(io.StringIO(read_bytes(path, _MAX_BYTE).decode("utf-8", "replace"))))
    if not rows:
        raise bad_value(path.name, "one line per kernel below a header", "nothing")
    header = list(rows[0])
    for wanted in (columns.measured, columns.kernel, columns.application, columns.duration, columns.cycles):
        if wanted is not None and wanted not in header:
            close = nearest(wanted, header)
            raise bad_value(
                path.name, f"a column {wanted!r}", f"none; closest: {', '.join(close)}" if close else "none"
            )
    chosen = list(names) if names else _chosen(header, columns)
    lost = [name for name in chosen if columns.prefix + name not in header]
    if not chosen or lost:
        raise bad_value(path.name, f"columns {columns.prefix}{', '.join(lost) or '*'}", "none")
    drive = np.array([[_number(row, columns.prefix + name, path.name) for name in chosen] for row in rows])
    duration_s = _durations(rows, columns, path.name)
    if rates:
        if duration_s is None:
            raise bad_value(path.name, "a duration, to turn counts into rates", "none")
        drive = drive / duration_s[:, np.newaxis]
    kernels = tuple(row[columns.kernel] for row in rows)
    applications = tuple(
        row[columns.application] if columns.application else application(row[columns.kernel]) for row in rows
    )
    measured = np.array([_number(row, columns.measured, path.name) for row in rows])
    return Runs(kernels, applications, tuple(chosen), drive, measured, duration_s)


def in_watts(runs: Runs, table: EnergyTable) -> Runs:
    """Event rates times a table's joules: components' watts, whose factors can be fitted.

    ``PIPE_A`` is a duty, not a rate, and costs watts. What the table says is drawn whatever happens (leakage, the
    memory controllers' constant) goes into the offset.
    """
    joule: dict[str, Array | float] = dict(table.energy_j)
    if runs.duration_s is not None:
        joule[DUTY] = table.duty_w * runs.duration_s  # rates were divided by it
    for name in runs.names:
        if name not in joule:
            raise unknown_name("counter", name, joule, "Name the columns to fit with --column.")
    drive = np.stack([runs.drive[:, i] * joule[name] for i, name in enumerate(runs.names)], axis=-1)
    leak_w = table.leakage.cores_w + table.leakage.rest_w if table.leakage else 0.0
    return replace(runs, drive=drive, offset_w=runs.offset_w + leak_w + table.mc_constant_w)


def application(kernel: str) -> str:
    """The program a kernel belongs to, from names such as ``mergeSort_k2``.

    >>> application("mergeSort_k2"), application("sad_1"), application("hotspot")
    ('mergeSort', 'sad', 'hotspot')
    """
    return re.sub(r"_k?\d+$", "", kernel)


def published_errors(path: Path) -> list[dict[str, float | str | int]]:
    """Mean errors of published models in a table of ``config``, ``hw_total_W`` and ``sim_total_W``."""
    rows = list(csv.DictReader(io.StringIO(read_bytes(path, _MAX_BYTE).decode("utf-8", "replace"))))
    if not rows or not {"config", "hw_total_W", "sim_total_W"} <= set(rows[0]):
        raise bad_value(
            path.name, "columns config, hw_total_W and sim_total_W", ", ".join(rows[0]) if rows else "none"
        )
    found: list[dict[str, float | str | int]] = []
    for config in dict.fromkeys(row["config"] for row in rows):
        mine = [row for row in rows if row["config"] == config]
        pairs = np.array([[_number(row, c, path.name) for c in ("sim_total_W", "hw_total_W")] for row in mine])
        found.append({"config": config, "n": len(mine), "mape": mape(pairs[:, 0], pairs[:, 1])})
    return found


def apply_factors(architecture: Architecture, factors: Mapping[str, float]) -> Architecture:
    """The architecture with components' fitted factors multiplied into its scaling factors and powers.

    Memory-controller and coalescer factors share their counters with DRAM and the caches, whose factor holds.
    """
    scaling, parameters, static = dict(architecture.scaling), dict(architecture.parameters), dict(architecture.static)
    by_column = {c.column: c.scaling for c in counters(architecture.dialect)}
    for component in component_set(architecture.dialect).components:
        factor = factors.get(component.name, 1.0)
        if component.static:
            static = {name: value * factor for name, value in static.items()}
        elif component.constant in ("const_dynamic", "constant_power"):
            key = "CONST_DYNAMICN" if component.constant == "const_dynamic" else "constant_power"
            scaling[key] = scaling.get(key, 0.0) * factor
        elif component.name == "IDLE_COREP":
            parameters["idle_core_power"] = architecture.number("idle_core_power") * factor
        elif component.name not in ("MCP", "COALP"):
            for counter in component.terms:
                scaling[by_column[counter]] = architecture.scaling_of(by_column[counter]) * factor
    return replace(architecture, scaling=scaling, parameters=parameters, static=static)


def energies_from_run(
    metric: Path, power: Path, architecture: Architecture, sampling: Sampling, rank_digits: float = 1e-6
) -> dict[str, float]:
    """Joules per count behind a run's power trace, for every component that a single counter drives.

    A least-squares slope of the component's watts on its counter's rate, divided by the scaling factor. Counters
    that never moved have no energy here. Used to check tables, and to make one where a run is all there is.
    """
    trace = open_metric_trace(metric, architecture.dialect, dict(_all_factors(architecture)))
    powers = open_power_trace(power)
    counts = np.concatenate([trace.activity(b, sampling).value for b in trace.blocks()])
    watts = np.concatenate([block.value for block in powers.blocks()])
    found: dict[str, float] = {}
    for component in component_set(architecture.dialect, compat=True).components:
        if len(component.terms) != 1 or component.clocked or component.name == "IDLE_COREP":
            continue
        (counter,) = component.terms
        event, factor = _event(counter, architecture)
        rate = counts[:, trace.events.index(event)] / sampling.sample_s
        part = watts[:, powers.columns.index(component.name)]
        if rate.any() and factor > 0 and part.max() > rank_digits:
            found[counter] = float(rate @ part / (rate @ rate) / factor)
    return found


def _all_factors(architecture: Architecture) -> list[tuple[str, float]]:
    return [(name, architecture.scaling_of(name)) for name in scaling_names(architecture.dialect)]


def _event(counter: str, architecture: Architecture) -> tuple[str, float]:
    found = next(c for c in counters(architecture.dialect) if c.column == counter)
    return found.event, architecture.scaling_of(found.scaling)


def _chosen(header: Sequence[str], columns: Columns) -> list[str]:
    special = {columns.measured, columns.kernel, columns.application, columns.duration, columns.cycles}
    found = [c.removeprefix(columns.prefix) for c in header if c.startswith(columns.prefix) and c not in special]
    return [name for name in found if name not in columns.leave_out]


def _durations(rows: Sequence[Mapping[str, str]], columns: Columns, where: str) -> Array | None:
    if columns.duration is not None:
        return np.array([_number(row, columns.duration, where) for row in rows])
    if columns.cycles is not None and columns.clock_hz is not None:
        return np.array([_number(row, columns.cycles, where) / columns.clock_hz for row in rows])
    return None


def _number(row: Mapping[str, str], column: str, where: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        raise bad_value(f"{where}: {column}", "a number", str(row[column])) from None
    if not math.isfinite(value):
        raise bad_value(f"{where}: {column}", "a finite number", value)
    return value
