"""The component model against public simulator runs and kernels: figures for the accuracy ledger."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.activity.simulated import Dialect, open_power_trace
from wattcast.activity.trace_file import TraceFile
from wattcast.arrays import Array
from wattcast.fit.component import Score, fit_scaling
from wattcast.fit.component_runs import Columns, read_runs
from wattcast.power.component.service import TraceRequest, power_trace

# run -> dialect, architecture file and energy table, components its trace does not determine
RUNS: dict[str, tuple[Dialect, str, tuple[str, ...]]] = {
    "gtx480_gpuwattch": (Dialect.GPUWATTCH, "gpuwattch_gtx480", ()),
    "qv100_accelwattch": (Dialect.ACCELWATTCH, "accelwattch_ptx_sim", ("STATICP", "power")),
}
KERNELS = "volta_hw_counters_power_components.csv"


@dataclass(frozen=True)
class RunError:
    """How far one simulator run's power trace is from ours."""

    run: str
    samples: int
    worst_w: dict[str, float]  # by column, "power" being the total; only what the trace determines


def simulator_runs(reference: Path) -> list[RunError]:
    """Worst error of every component over every row of the runs that are there."""
    found = []
    for run, (dialect, name, undetermined) in RUNS.items():
        folder = reference / "simulator_runs" / run
        table = reference / "accelwattch" / "coefficients" / f"{name}.csv"
        if not folder.is_dir() or not table.is_file():
            continue
        with tempfile.TemporaryDirectory() as out:
            asked = TraceRequest(
                folder / "metric_trace.log.gz",
                folder / f"{name}.xml",
                table,
                Path(out),
                dialect,
                parquet=False,
                figure=False,
            )
            result = power_trace(asked)[1]
            truth = open_power_trace(folder / "power_trace.log.gz")
            error_w = np.abs(_watts(open_power_trace(Path(out) / "power_trace.log.gz")) - _watts(truth))
        worst = dict(zip(truth.columns, error_w.max(axis=0).tolist(), strict=True))
        found.append(RunError(run, result.samples, {k: v for k, v in worst.items() if k not in undetermined}))
    return found


def refinement(reference: Path) -> tuple[int, Score] | None:
    """Kernels and scores of refining AccelWattch's components on measured watts, or None where they are not there."""
    path = reference / "accelwattch" / KERNELS
    if not path.is_file():
        return None
    found = fit_scaling(read_runs(path, Columns("hw_total_W", prefix="accelwattch_HW_", leave_out=("total_W",))))
    return found.kernels, found.score


def _watts(trace: TraceFile) -> Array:
    return np.concatenate([block.value for block in trace.blocks()])
