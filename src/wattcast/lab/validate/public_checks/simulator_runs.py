"""Compare our power traces with those of simulators, and judge AccelWattch's components on measured
kernels.

Run: ``wattcast lab validate`` in the repository (WATTCAST_REFERENCE names the runs).
"""

from __future__ import annotations

import csv
import itertools
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wattcast.calibrate.scoring import mean_percent_error
from wattcast.core.errors import bad_value
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


@dataclass(frozen=True)
class PublishedErrors:
    """How far a variant of a published model is off the watts that its authors measured."""

    config: str
    kernels: int
    mape: float
    correlation: float
    worst_kernel: str
    worst: float  # percent, signed
    least_sum: float | None  # of the components over the total; None without components
    most_sum: float | None


_TOTALS = ("hw_total_W", "sim_total_W")
_LABELS = ("config", "benchmark", "suite", "kernel")


def published_model_errors(path: Path) -> list[PublishedErrors]:
    """Return the errors of published models in a table of ``config``, ``hw_total_W``,
    ``sim_total_W`` and, where it has them, watts of components.
    """
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        rows = list(reader)
        columns = tuple(reader.fieldnames or ())
    lacking = [name for name in ("config", *_TOTALS) if name not in columns]
    if lacking or not rows:
        raise bad_value(path.name, "config, hw_total_W and sim_total_W", ", ".join(columns))
    parts = [name for name in columns if name not in (*_TOTALS, *_LABELS)]
    configs = dict.fromkeys(row["config"] for row in rows)
    return [
        _judge_variant(config, [row for row in rows if row["config"] == config], parts)
        for config in configs
    ]


def _judge_variant(
    config: str,
    rows: list[dict[str, str]],
    parts: Sequence[str],
) -> PublishedErrors:
    """Return the errors of one variant."""
    measured, modelled = (np.array([float(row[name]) for row in rows]) for name in _TOTALS)
    off = 100.0 * (modelled / measured - 1.0)
    worst = int(np.abs(off).argmax())
    sums = np.array([sum(float(row[name] or 0.0) for name in parts) for row in rows]) / modelled
    return PublishedErrors(
        config=config,
        kernels=len(rows),
        mape=mean_percent_error(modelled, measured) or 0.0,
        correlation=float(np.corrcoef(measured, modelled)[0, 1]) if len(rows) > 2 else math.nan,
        worst_kernel=rows[worst].get("kernel") or rows[worst].get("benchmark") or "",
        worst=float(off[worst]),
        least_sum=float(sums.min()) if parts else None,
        most_sum=float(sums.max()) if parts else None,
    )


def open_power_trace(path: Path) -> TraceFile:
    """Open a power trace: the total, then components. AccelWattch's header joins its last two
    names.
    """
    file = open_trace(path)
    if file.columns[-1] == "CONSTPSTATICP":
        return replace(file, columns=(*file.columns[:-1], "CONSTP", "STATICP"))
    return file
