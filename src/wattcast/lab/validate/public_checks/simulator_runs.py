"""Compare our power traces with those of simulators, and judge AccelWattch's components on measured
kernels.

Run: ``wattcast lab validate`` in the repository (WATTCAST_REFERENCE names the runs).
"""

from __future__ import annotations

import csv
import itertools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast.calibrate.scoring import mean_percent_error
from wattcast.lab.gpuwattch.component_fit import (
    ComponentFitErrors,
    FitConstraints,
    KernelColumns,
    fit_components,
    read_measured_kernels,
)
from wattcast.lab.gpuwattch.simulated_power import make_power_trace
from wattcast.lab.gpuwattch.trace_reading import (
    SimulatorDialect,
    TraceFile,
    open_trace,
)
from wattcast.lab.gpuwattch.trace_request import TraceRequest

SIMULATOR_RUNS = {  # run -> dialect, architecture file and energy table
    "gtx480_gpuwattch": (SimulatorDialect.GPUWATTCH, "gpuwattch_gtx480"),
    "qv100_accelwattch": (SimulatorDialect.ACCELWATTCH, "accelwattch_ptx_sim"),
}
VOLTA_KERNELS_FILE = "volta_hw_counters_power_components.csv"


@dataclass(frozen=True)
class SimulatorRunError:
    """The distance of one simulator run's power trace from ours."""

    run: str
    samples: int
    worst_w: dict[str, float]  # by column, static power and the total ("power") among them
    # whether the simulator's power report was read as well, which knows the active threads
    reported: bool


def compare_simulator_runs(reference: Path) -> list[SimulatorRunError]:
    """Return the worst error of every component over all rows of the runs, from the trace and with
    the report.
    """
    errors = []
    for (run, (dialect, name)), reported in itertools.product(
        SIMULATOR_RUNS.items(), (False, True)
    ):
        folder = reference / "simulator_runs" / run
        table = reference / "accelwattch" / "coefficients" / f"{name}.csv"
        if not folder.is_dir() or not table.is_file():
            continue
        with tempfile.TemporaryDirectory() as out:
            files = (
                folder / "metric_trace.log.gz",
                folder / f"{name}.xml",
                table,
                Path(out),
                dialect,
            )
            kernels = folder / "power_report.log" if reported else None
            request = TraceRequest(
                *files,
                kernels=kernels,
                parquet=False,
                figure=False,
            )
            result = make_power_trace(request)[1]
            truth = open_power_trace(folder / "power_trace.log.gz")
            ours = open_power_trace(Path(out) / "power_trace.log.gz")
            watts = [
                np.concatenate([block.value for block in trace.blocks()]) for trace in (ours, truth)
            ]
            error_w = np.abs(watts[0] - watts[1])
        worst = dict(zip(truth.columns, error_w.max(axis=0).tolist(), strict=True))
        errors.append(SimulatorRunError(run, result.samples, worst, reported))
    return errors


def refine_volta_components(reference: Path) -> tuple[int, ComponentFitErrors] | None:
    """Refine AccelWattch's components on measured watts; return kernels and errors, or None without
    the table.
    """
    path = reference / "accelwattch" / VOLTA_KERNELS_FILE
    if not path.is_file():
        return None
    columns = KernelColumns("hw_total_W", prefix="accelwattch_HW_", leave_out=("total_W",))
    fit = fit_components(read_measured_kernels(path, columns), FitConstraints())
    return fit.kernels, fit.score


def published_model_errors(path: Path) -> list[dict[str, float | str | int]]:
    """Return the mean errors of published models in a table of ``config``, ``hw_total_W`` and
    ``sim_total_W``.
    """
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    errors: list[dict[str, float | str | int]] = []
    for config in dict.fromkeys(row["config"] for row in rows):
        mine = [row for row in rows if row["config"] == config]
        ours, true = (
            np.array([float(row[c]) for row in mine]) for c in ("sim_total_W", "hw_total_W")
        )
        errors.append(
            {
                "config": config,
                "n": len(mine),
                "mape": mean_percent_error(ours, true) or 0.0,
            }
        )
    return errors


def open_power_trace(path: Path) -> TraceFile:
    """Open a power trace: the total, then components. AccelWattch's header joins its last two
    names.
    """
    file = open_trace(path)
    if file.columns[-1] == "CONSTPSTATICP":
        return replace(file, columns=(*file.columns[:-1], "CONSTP", "STATICP"))
    return file
