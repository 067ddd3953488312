"""Read measured whole models and fit the host's launch cost to them.

A database of whole models is a folder with ``models.parquet``, that file, the name of a database
that ships, a folder of journals, or a CSV of one's own with the columns of ``ModelRow``.

``wattcast lab fit host`` fits the cost h at which the host issues operators, in order. Latency
rises with h, linearly once the host is the slower queue (docs/method/whole-models.md). Each
host-bound row gives the h at which its predicted latency is the measured one; the fitted h makes
the mean absolute error of log latency over all rows least. Rows whose GPU is the slower queue at
any plausible h tell only that h is not larger, and do so through the same sum.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import hardware
from wattcast.calibrate.kernel_rows import read_plain_rows
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE
from wattcast.calibrate.row_check_coefficients import ROW_CHECKS
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import BadInput, bad_value
from wattcast.core.measured_rows import (
    ModelRow,
    Plain,
    row_from_plain,
)
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
    cases = []
    for plain in _read_plain(Path(database), str(database)):
        if plain.get("error"):
            continue
        cells = {name: plain[name] for name in _NAMES if plain.get(name) is not None}
        row = row_from_plain(cells, ModelRow, f"{database}")
        if row.latency_s:
            cases.append(ModelCase(row, build_row_graph(row)))
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
    is_below_top = row.sm_clock_hz is None or row.sm_clock_hz < TOP_CLOCK_SHARE * top_hz
    return "sw_power_cap" in row.throttle and is_below_top


def measured_column(cases: list[ModelCase], read: Callable[[ModelRow], float | None]) -> Array:
    """Return a measured figure of each case; NaN where it was not measured."""
    # None becomes NaN
    return np.array([read(case.row) for case in cases], dtype=np.float64)


def _read_plain(path: Path, name: str) -> list[Plain]:
    if path.suffix == ".csv":
        if not path.is_file():
            raise bad_value(name, "a file that is there", "none", f"Otherwise {_HOW_TO_MEASURE}.")
        with path.open(newline="", encoding="utf-8") as stream:
            table = list(csv.DictReader(stream))
        lines = enumerate(table, start=2)
        return [_read_line(row, f"{path.name}: line {number}") for number, row in lines]
    if not path.exists() and not (database_folder(name) / MODELS_FILE).exists():
        raise BadInput(f"{name}: its database has no {MODELS_FILE}; {_HOW_TO_MEASURE}.")
    rows = read_plain_rows(path, MODELS_FILE, "model")
    if not rows:
        raise BadInput(
            f"{name}: no {MODELS_FILE} and no journal with whole models; {_HOW_TO_MEASURE}."
        )
    return rows


_WHOLE = ("batch", "seq")
_UNIT = {
    "latency_s": "s",
    "power_w": "W",
    "energy_j": "J",
    "sm_clock_hz": "Hz",
}
_USUAL = {
    "phase": "prefill",
    "dtype": "bf16",
    "attention": "flash",
    "stack": "eager",
    "graph": "no",
}


def _read_line(row: dict[str, str], where: str) -> Plain:
    """Read a line of a user's CSV: whole numbers, quantities with or without a unit, yes or no."""
    cells = {**_USUAL, **{name: text for name, text in row.items() if text}}
    for name in cells:
        if name not in _NAMES:
            expected = f"columns of {', '.join(_NAMES[:11])} and measured figures"
            raise bad_value(where, expected, name)
    if not {"model", "batch", "latency_s"} <= set(cells):
        raise bad_value(where, "at least model, batch and latency_s", ", ".join(cells))
    typed: dict[str, Any] = {"id": where, **cells}
    typed["graph"] = cells["graph"].lower() in ("yes", "true", "1")
    for name in _WHOLE:
        if name in cells:
            if not cells[name].strip().isdigit():
                raise bad_value(f"{where}: {name}", "a whole number", cells[name])
            typed[name] = int(cells[name])
    for name, unit in _UNIT.items():
        if name in cells:
            typed[name] = _read_figure(cells[name], unit, f"{where}: {name}")
    return typed


def _read_figure(
    text: str,
    unit: str,
    where: str,
) -> float:
    try:
        return float(text)
    except ValueError:
        return units.parse(text, unit, where)


# no host issues an operator faster or slower
LOW_S = 1e-7
HIGH_S = 1e-3
_GRID = 64
_FINE_GRID = 101  # points between two of the grid


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
        ratio = np.array([getattr(row, column) / row.latency_s for row in self.rows])
        return float(np.mean(np.abs(ratio - 1.0)))


def fit_host_database(
    database: str | Path,
    gpu: str,
    bundle: Bundle | None = None,
) -> HostFit:
    """Fit the launch cost of the host that measured the eager rows of ``database``."""
    eager = [case for case in load_models(database) if not case.row.graph]
    if not eager:
        raise BadInput(
            f"{database}: no row that the host launched operator by operator, so nothing "
            "says what that costs. "
            "Measure some with `python -m wattcast.lab models`, or give a CSV with graph = no."
        )
    chip = hardware.load_gpu(gpu)
    return fit_host_cost(eager, chip, bundle or bundle_for(chip))


def fit_host_cost(
    cases: list[ModelCase],
    gpu: Gpu,
    bundle: Bundle,
) -> HostFit:
    """Fit the launch cost of the host to measured cases."""
    host_of_one_s = with_launch_cost(bundle, 1.0)
    timelines = [analyse_graph(case.graph, gpu, host_of_one_s) for case in cases]
    measured_s = np.array([float(case.row.latency_s or np.nan) for case in cases])
    grid_s = np.geomspace(LOW_S, HIGH_S, _GRID)
    predicted_s = np.empty((len(cases), _GRID))
    for place, timeline in enumerate(timelines):
        predicted_s[place] = [_predict_latency(timeline, h, gpu, bundle) for h in grid_s]
    host_s = _best_cost(predicted_s, measured_s, grid_s)
    default_s = float(np.mean(bundle.launch.host_s_per_operator))

    models = np.array([case.row.model for case in cases])
    rows = []
    for place, case in enumerate(cases):
        is_other = models != case.row.model
        left_out_s = host_s
        if is_other.any():
            left_out_s = _best_cost(predicted_s[is_other], measured_s[is_other], grid_s)
        timeline = timelines[place]
        row_s = float(measured_s[place])
        rows.append(
            HostRow(
                name=case.graph.name,
                operators=case.operators,
                latency_s=row_s,
                predicted_s=_predict_latency(timeline, host_s, gpu, bundle),
                default_s=_predict_latency(timeline, default_s, gpu, bundle),
                left_out_s=_predict_latency(timeline, left_out_s, gpu, bundle),
                host_s=_cost_of_row(timeline, row_s, gpu, bundle),
            )
        )
    return HostFit(gpu.name, host_s, default_s, tuple(rows))


def with_launch_cost(bundle: Bundle, host_s: float) -> Bundle:
    """Return the bundle with this launch cost."""
    return replace(bundle, launch=replace(bundle.launch, host_s_per_operator=host_s))


def _predict_latency(
    timeline: Timeline,
    host_s: float,
    gpu: Gpu,
    bundle: Bundle,
) -> float:
    """Predict the latency of a timeline, whose host takes a second an operator, under the governor
    at a launch cost; nothing else depends on it.
    """
    timeline = timeline.scale_host(host_s)
    _, totals, _ = run_governed(timeline, gpu, OperatingPoint(), bundle)
    return float(totals.latency_s)


def _best_cost(
    table: Array,
    measured: Array,
    grid: Array,
) -> float:
    """Find the cost of least mean absolute log error: on the grid, then between its neighbours."""
    off = np.abs(np.log(table / measured[:, None])).mean(axis=0)
    best = int(off.argmin())
    low = max(best - 1, 0)
    high = min(best + 1, len(grid) - 1)
    fine = np.geomspace(grid[low], grid[high], _FINE_GRID)
    log_fine = [np.interp(np.log(fine), np.log(grid), np.log(row)) for row in table]
    fine_off = np.abs(np.array(log_fine) - np.log(measured)[:, None]).mean(axis=0)
    return float(fine[fine_off.argmin()])


def _cost_of_row(
    timeline: Timeline,
    measured_s: float,
    gpu: Gpu,
    bundle: Bundle,
) -> float | None:
    """Find the cost at which this row alone would be met; None where the row does not depend on
    it.
    """
    from scipy.optimize import brentq

    def miss(log_cost: float) -> float:
        return _predict_latency(timeline, float(np.exp(log_cost)), gpu, bundle) / measured_s - 1.0

    low, high = np.log([LOW_S, HIGH_S])
    if miss(low) >= 0.0 or miss(high) <= 0.0:
        return None
    cost_s = float(np.exp(brentq(miss, low, high)))
    halved_s = _predict_latency(timeline, 0.5 * cost_s, gpu, bundle)
    is_host_bound = halved_s < (1.0 - ROW_CHECKS.host_bound_change) * measured_s
    return cost_s if is_host_bound else None
