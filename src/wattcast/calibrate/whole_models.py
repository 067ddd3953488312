"""Read measured whole models and fit the host's launch cost to them.

A database of whole models is a folder with ``models.parquet``, that file, the name of a database
that ships, a folder of journals, or a CSV of one's own with the columns of ``ModelRow``.

``wattcast lab fit host`` fits the cost h at which the host issues operators, in order. Latency
rises with h, linearly once the host is the slower queue (docs/method/whole-models.md). Each
host-bound row gives the h at which its predicted latency is the measured one; the fitted h makes
the mean absolute error of log latency over all rows least. Rows whose GPU is the slower queue at
any plausible h tell only that h is not larger, and do so through the same sum."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate.kernel_rows import read_plain_rows
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput, bad_value
from wattcast.core.measured_rows import ModelRow, Plain, row_from_plain
from wattcast.core.row_tables import MODELS_FILE, database_folder
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_graph
from wattcast.predictor.timeline import Timeline
from wattcast.workload.build_model import build_graph
from wattcast.workload.graph import Graph
from wattcast.workload.model_options import ModelOptions

_NAMES = tuple(item.name for item in fields(ModelRow))
_HOW_TO_MEASURE = "whole-model rows are measured by `python -m wattcast.lab models --out DIR`"


@dataclass(frozen=True)
class ModelCase:
    """A measured whole model and the graph it ran."""

    row: ModelRow
    graph: Graph

    @property
    def operators(self) -> int:
        """Operators the host issues in one iteration."""
        return int(sum(calls for _, calls in self.graph.calls()))


def load_models(database: str | Path) -> list[ModelCase]:
    """Load every row without an error, at least one, with the operators of its workload."""
    plain = [row for row in _read_plain(Path(database), str(database)) if not row.get("error")]
    known = [{k: v for k, v in row.items() if k in _NAMES and v is not None} for row in plain]
    rows = [row_from_plain(row, ModelRow, f"{database}") for row in known]
    cases = [ModelCase(row, build_row_graph(row)) for row in rows if row.latency_s]
    if not cases:
        raise BadInput(f"{database}: no row without an error; {_HOW_TO_MEASURE}")
    return cases


def build_row_graph(row: ModelRow) -> Graph:
    """Build the operators of a row's workload."""
    options = ModelOptions.from_names(
        batch=row.batch,
        seq=row.seq,
        phase=row.phase,
        dtype=row.dtype,
        attention=row.attention,
        head=row.head or None,
        stack=row.stack,
    )
    return build_graph(row.model, options)


def was_capped(row: ModelRow, top_hz: float) -> bool:
    """Tell whether the power limit held the clock down while a row was measured."""
    return "sw_power_cap" in row.throttle and (
        row.sm_clock_hz is None or row.sm_clock_hz < 0.995 * top_hz
    )


def measured_column(cases: list[ModelCase], of: Callable[[ModelRow], float | None]) -> Array:
    """Return a measured figure of each case; NaN where it was not measured."""
    return np.array(
        [np.nan if (value := of(case.row)) is None else value for case in cases], dtype=np.float64
    )


def _read_plain(path: Path, name: str) -> list[Plain]:
    if path.suffix == ".csv":
        if not path.is_file():
            raise bad_value(name, "a file that is there", "none", f"Otherwise {_HOW_TO_MEASURE}.")
        with path.open(newline="", encoding="utf-8") as stream:
            return [
                _read_line(row, f"{path.name}: line {i}")
                for i, row in enumerate(csv.DictReader(stream), start=2)
            ]
    if not path.exists() and not (database_folder(name) / MODELS_FILE).exists():
        raise BadInput(f"{name}: its database has no {MODELS_FILE}; {_HOW_TO_MEASURE}.")
    rows = read_plain_rows(path, MODELS_FILE, "model")
    if not rows:
        raise BadInput(
            f"{name}: no {MODELS_FILE} and no journal with whole models; {_HOW_TO_MEASURE}."
        )
    return rows


_WHOLE = ("batch", "seq")
_UNIT = {"latency_s": "s", "power_w": "W", "energy_j": "J", "sm_clock_hz": "Hz"}
_USUAL = {
    "phase": "prefill",
    "dtype": "bf16",
    "attention": "flash",
    "stack": "eager",
    "graph": "no",
}


def _read_line(row: dict[str, str], where: str) -> Plain:
    """Read a line of a user's CSV: whole numbers, quantities with or without a unit, yes or no."""
    given = {**_USUAL, **{name: text for name, text in row.items() if text}}
    for name in given:
        if name not in _NAMES:
            raise bad_value(
                where, f"columns of {', '.join(_NAMES[:11])} and measured figures", name
            )
    if not {"model", "batch", "latency_s"} <= set(given):
        raise bad_value(where, "at least model, batch and latency_s", ", ".join(given))
    typed: dict[str, Any] = {
        "id": where,
        **given,
        "graph": given["graph"].lower() in ("yes", "true", "1"),
    }
    for name in _WHOLE:
        if name in given:
            if not given[name].strip().isdigit():
                raise bad_value(f"{where}: {name}", "a whole number", given[name])
            typed[name] = int(given[name])
    for name, unit in _UNIT.items():
        if name in given:
            try:
                typed[name] = float(given[name])
            except ValueError:
                typed[name] = units.parse(given[name], unit, f"{where}: {name}")
    return typed


# no host issues an operator faster or slower
LOW_S = 1e-7
HIGH_S = 1e-3
_GRID = 64
_BOUND = 0.10  # a row counts as host-bound when its latency changes by this much when h halves


@dataclass(frozen=True)
class HostRow:
    """One eager row: measured and predicted latency, and the launch cost it asks for (None:
    GPU-bound).
    """

    name: str
    operators: int
    latency_s: float
    predicted_s: float  # at the fitted cost
    default_s: float  # at the bundle's own cost
    left_out_s: float  # at the cost fitted without this row's model
    host_s: float | None


@dataclass(frozen=True)
class HostFit:
    """The fitted launch cost and how well it does."""

    gpu: str
    host_s: float
    default_s: float
    rows: tuple[HostRow, ...]

    def error(self, column: str) -> float:
        """Return the mean absolute relative error of a column of predictions."""
        found = np.array([getattr(row, column) / row.latency_s for row in self.rows])
        return float(np.mean(np.abs(found - 1.0)))


def fit_host_database(database: str | Path, gpu: str, bundle: Bundle | None = None) -> HostFit:
    """Fit the launch cost of the host that measured the eager rows of ``database``."""
    eager = [case for case in load_models(database) if not case.row.graph]
    if not eager:
        raise BadInput(
            f"{database}: no row that the host launched operator by operator, so nothing says what that costs. "
            "Measure some with `python -m wattcast.lab models`, or give a CSV with graph = no."
        )
    chip = hardware.load_gpu(gpu)
    return fit_host_cost(eager, chip, bundle or bundle_for(chip))


def fit_host_cost(cases: list[ModelCase], gpu: Gpu, bundle: Bundle) -> HostFit:
    """Fit the launch cost of the host to measured cases."""
    lines = [analyse_graph(case.graph, gpu, bundle) for case in cases]
    measured = np.array([float(case.row.latency_s or np.nan) for case in cases])
    grid = np.geomspace(LOW_S, HIGH_S, _GRID)
    table = np.array(
        [[_predict_latency(line, h, gpu, bundle) for h in grid] for line in lines]
    )  # (case, h)
    host_s = _best_cost(table, measured, grid)
    default_s = float(np.mean(bundle.launch.host_s_per_operator))
    models = [case.row.model for case in cases]
    rows = []
    for i, case in enumerate(cases):
        others = np.array([model != case.row.model for model in models])
        elsewhere = _best_cost(table[others], measured[others], grid) if others.any() else host_s
        at = {h: _predict_latency(lines[i], h, gpu, bundle) for h in (host_s, default_s, elsewhere)}
        asked = _cost_of_row(lines[i], float(measured[i]), gpu, bundle)
        seconds = float(measured[i]), at[host_s], at[default_s], at[elsewhere]
        rows.append(HostRow(case.graph.name, case.operators, *seconds, asked))
    return HostFit(gpu.name, host_s, default_s, tuple(rows))


def with_launch_cost(bundle: Bundle, host_s: float) -> Bundle:
    """Return the bundle with this launch cost."""
    return replace(bundle, launch=replace(bundle.launch, host_s_per_operator=host_s))


def _predict_latency(line: Timeline, host_s: float, gpu: Gpu, bundle: Bundle) -> float:
    """Predict the latency of a timeline under the governor at another launch cost; nothing else
    depends on it.
    """
    launch = replace(bundle.launch, host_s_per_operator=host_s)
    line = replace(line, host_s=launch.host_s([op.kind for op in line.kernels.ops]))
    return float(run_governed(line, gpu, OperatingPoint(), bundle)[1].latency_s)


def _best_cost(table: Array, measured: Array, grid: Array) -> float:
    """Find the cost of least mean absolute log error: on the grid, then between its neighbours."""
    off = np.abs(np.log(table / measured[:, None])).mean(axis=0)
    best = int(off.argmin())
    low = max(best - 1, 0)
    high = min(best + 1, len(grid) - 1)
    fine = np.geomspace(grid[low], grid[high], 101)
    between = np.array([np.interp(np.log(fine), np.log(grid), np.log(row)) for row in table])
    return float(fine[np.abs(between - np.log(measured)[:, None]).mean(axis=0).argmin()])


def _cost_of_row(line: Timeline, measured_s: float, gpu: Gpu, bundle: Bundle) -> float | None:
    """Find the cost at which this row alone would be met; None where the row does not depend on it."""
    from scipy.optimize import brentq

    def miss(log_cost: float) -> float:
        return _predict_latency(line, float(np.exp(log_cost)), gpu, bundle) / measured_s - 1.0

    low, high = np.log([LOW_S, HIGH_S])
    if miss(low) >= 0.0 or miss(high) <= 0.0:
        return None
    found = float(np.exp(brentq(miss, low, high)))
    halved = _predict_latency(line, 0.5 * found, gpu, bundle)
    return found if halved < (1.0 - _BOUND) * measured_s else None
