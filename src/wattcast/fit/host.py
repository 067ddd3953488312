"""``wattcast fit host``: what issuing an operator costs the host, from eager whole-model rows.

The host issues operators in order at a cost h each; latency rises with h, linearly once the host is the
slower queue (docs/method/whole-models.md). Each host-bound row gives the h at which its predicted
latency is the measured one; the fitted h is the one that makes the mean absolute error of log latency over
all rows least. Rows whose GPU is the slower queue at any plausible h say only that h is not larger, and do
so through the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast import hardware
from wattcast.arrays import Array
from wattcast.errors import BadInput
from wattcast.fit.models_data import Case, governed, load, timelines, with_host
from wattcast.fitted import Bundle, bundle_for
from wattcast.hardware import Gpu
from wattcast.timeline import Timeline

LOW_S, HIGH_S = 1e-7, 1e-3  # no host issues an operator faster or slower
_BISECTIONS = 40
_GRID = 64
_BOUND = 0.10  # a row counts as host-bound when its latency changes by this much when h halves


@dataclass(frozen=True)
class HostRow:
    """One eager row: measured and predicted latency, and the launch cost it asks for (None: GPU-bound)."""

    name: str
    operators: int
    latency_s: float
    predicted_s: float  # at the fitted cost
    default_s: float  # at the bundle's own cost
    left_out_s: float  # at the cost fitted without this row's model
    host_s: float | None


@dataclass(frozen=True)
class Host:
    """The fitted launch cost and how well it does."""

    gpu: str
    host_s: float
    default_s: float
    rows: tuple[HostRow, ...]

    def error(self, column: str) -> float:
        """Mean absolute relative error of a column of predictions."""
        found = np.array([getattr(row, column) / row.latency_s for row in self.rows])
        return float(np.mean(np.abs(found - 1.0)))


def fit_host(database: str | Path, gpu: str, bundle: Bundle | None = None) -> Host:
    """The launch cost of the host that measured ``database``'s eager rows."""
    eager = [case for case in load(database) if not case.row.graph]
    if not eager:
        raise BadInput(
            f"{database}: no row that the host launched operator by operator, so nothing says what that costs. "
            "Measure some with `python -m wattcast.measure models`, or give a CSV with graph = no."
        )
    chip = hardware.load(gpu)
    return calibrate(eager, chip, bundle or bundle_for(chip))


def calibrate(cases: list[Case], gpu: Gpu, bundle: Bundle) -> Host:
    """The same on cases at hand."""
    lines = timelines(cases, gpu, bundle)
    measured = np.array([float(case.row.latency_s or np.nan) for case in cases])
    grid = np.geomspace(LOW_S, HIGH_S, _GRID)
    table = np.array([[_latency(line, h, gpu, bundle) for h in grid] for line in lines])  # (case, h)
    host_s = _best(table, measured, grid)
    default_s = float(np.mean(bundle.launch.host_s_per_operator))
    models = [case.row.model for case in cases]
    rows = []
    for i, case in enumerate(cases):
        others = np.array([model != case.row.model for model in models])
        elsewhere = _best(table[others], measured[others], grid) if others.any() else host_s
        at = {h: _latency(lines[i], h, gpu, bundle) for h in (host_s, default_s, elsewhere)}
        asked = _asked(lines[i], float(measured[i]), gpu, bundle)
        seconds = float(measured[i]), at[host_s], at[default_s], at[elsewhere]
        rows.append(HostRow(case.graph.name, case.operators, *seconds, asked))
    return Host(gpu.name, host_s, default_s, tuple(rows))


def with_launch(bundle: Bundle, host_s: float) -> Bundle:
    """The bundle with this launch cost."""
    return replace(bundle, launch=replace(bundle.launch, host_s_per_operator=host_s))


def _latency(line: Timeline, host_s: float, gpu: Gpu, bundle: Bundle) -> float:
    launch = replace(bundle.launch, host_s_per_operator=host_s)
    return float(governed(with_host(line, launch), gpu, bundle)[0].latency_s)


def _best(table: Array, measured: Array, grid: Array) -> float:
    """The cost of least mean absolute log error: on the grid, then between its neighbours."""
    off = np.abs(np.log(table / measured[:, None])).mean(axis=0)
    best = int(off.argmin())
    low, high = max(best - 1, 0), min(best + 1, len(grid) - 1)
    fine = np.geomspace(grid[low], grid[high], 101)
    between = np.array([np.interp(np.log(fine), np.log(grid), np.log(row)) for row in table])
    return float(fine[np.abs(between - np.log(measured)[:, None]).mean(axis=0).argmin()])


def _asked(line: Timeline, measured_s: float, gpu: Gpu, bundle: Bundle) -> float | None:
    """The cost at which this row alone would be met; None where the row does not depend on it."""
    low, high = LOW_S, HIGH_S
    if _latency(line, low, gpu, bundle) >= measured_s or _latency(line, high, gpu, bundle) <= measured_s:
        return None
    for _ in range(_BISECTIONS):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if _latency(line, middle, gpu, bundle) < measured_s else (low, middle)
    found = float(np.sqrt(low * high))
    halved = _latency(line, 0.5 * found, gpu, bundle)
    return found if halved < (1.0 - _BOUND) * measured_s else None
