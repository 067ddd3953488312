"""Compute power over time from a simulator's metric trace and the files that a user names."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import (
    dataclass,
    field,
    replace,
)
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import MissingSpecification, bad_value
from wattcast.core.strict_files import parse_csv, read_bytes
from wattcast.lab.gpuwattch.component_build import build_component_model
from wattcast.lab.gpuwattch.simulated_chip import SimulatedChip, read_chip
from wattcast.lab.gpuwattch.simulator_config import SimulatorConfig
from wattcast.lab.gpuwattch.trace_outputs import draw_component_power
from wattcast.lab.gpuwattch.trace_reading import (
    SimulatorDialect,
    TraceSampling,
    open_metric_trace,
)
from wattcast.lab.gpuwattch.trace_request import TraceRequest
from wattcast.lab.gpuwattch.trace_run import (
    FIGURE,
    LOGS,
    TABLE,
    TraceResult,
    TraceRun,
    run_trace,
)
from wattcast.lab.gpuwattch.trace_statistics import read_kernel_list
from wattcast.power.component_power import Leakage, read_mcpat
from wattcast.report.figure_style import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_STEPS_BYTE = 64 << 20
_STEP_COLUMNS = ("sample", "clock", "voltage")
SWITCHED_LOGS = {  # options of the simulator's configuration, and the files that they switch off
    "power_simulation_enabled": ("power_report",),
    "power_trace_enabled": ("power_trace", "metric_trace"),
    "steady_power_levels_enabled": ("steady_state_tracking",),
}


def make_power_trace(
    request: TraceRequest, tell: Callable[[TraceResult], None] | None = None
) -> tuple[TraceRun, TraceResult]:
    """Read the files of a request, run the pass and draw the figure; ``fault`` is set when the
    trace broke off.
    """
    job, notes = prepare_trace_run(request)
    result = run_trace(replace(job, tell=tell))
    result.notes[:0] = notes
    if request.figure and result.timeline is not None and result.samples:
        if importlib.util.find_spec("matplotlib") is None:
            result.notes.append("no figure: matplotlib is not installed")
        else:
            save_figure(draw_trace_power(request, job, result), request.out / FIGURE)
            result.files.append(request.out / FIGURE)
    return job, result


def draw_trace_power(
    request: TraceRequest,
    job: TraceRun,
    result: TraceResult,
) -> Figure:
    """Draw watts by component over the time of a trace that has samples."""
    assert result.timeline is not None
    counts = f"{result.samples} samples, {len(result.kernels)} kernels"
    mode = f"as {request.compat}" if request.compat else "Wattcast"
    energies = request.energies.name if request.energies else "bottom-up energies"
    caption = f"{job.model.reference_clock_hz / 1e6:g} MHz reference, {energies}, {mode}"
    title = f"{request.trace.name}: {result.energy_j / result.duration_s:.4g} W mean, {counts}"
    return draw_component_power(result.timeline, job.model.parts, title, caption)


def prepare_trace_run(request: TraceRequest) -> tuple[TraceRun, list[str]]:
    """Read the files of a request into a run, with notes on every choice that was not the
    user's.
    """
    chip = read_chip(request)
    notes = chip.notes
    built = build_component_model(
        chip.architecture,
        chip.table,
        chip.components,
        sm_count=chip.config.sm_count,
        leakage=_choose_leakage(request, chip),
        voltage=chip.voltage,
        threads=request.threads_per_warp,
    )
    clock_steps = ClockSteps()
    if request.dvfs:
        clock_steps = read_clock_steps(request.dvfs, chip.clock_hz)
        if np.isnan(clock_steps.voltage_v).any():
            notes.append(f"{request.dvfs.name} does not give every voltage: none is scaled")
    outputs = _choose_outputs(request, chip.config, notes)
    trace = open_metric_trace(
        request.trace,
        chip.architecture.dialect,
        chip.trace_scaling(request),
        chip.components.custom,
        request.follow_s,
    )
    kernels = read_kernel_list(request.kernels, chip.config.sample_cycle) if request.kernels else ()
    run = TraceRun(
        trace=trace,
        model=built.model,
        components=chip.components,
        sampling=TraceSampling(
            chip.config.sample_cycle,
            chip.clock_hz,
            clock_steps.first_sample,
            clock_steps.clock_hz,
            clock_steps.voltage_v,
        ),
        out=request.out,
        kernels=kernels,
        config=chip.config,
        wanted=outputs,
        compress=True if request.stamped and request.compress is None else request.compress,
        stamp=time.asctime().replace(" ", "-").replace(":", "-") if request.stamped else "",
    )
    return run, [*notes, *built.notes]


def _choose_leakage(request: TraceRequest, chip: SimulatedChip) -> Leakage | None:
    """Return the leakage that the model adds: of the listing, or of the table."""
    dialect = chip.architecture.dialect
    asks_leakage = request.leakage is not None or request.gate_idle_sms
    if dialect is SimulatorDialect.ACCELWATTCH and asks_leakage:
        raise bad_value(
            "--leakage",
            f"no further leakage: {chip.architecture.name} has AccelWattch's static, idle "
            "and constant power",
            str(request.leakage or "--gate-idle-sms"),
            "Leave --leakage and --gate-idle-sms out.",
        )
    leakage = chip.table.leakage
    if request.leakage:
        leakage = read_mcpat(request.leakage, chip.config.sm_count)
    if leakage is None:
        if request.gate_idle_sms:
            raise MissingSpecification(
                "--gate-idle-sms needs leakage: give --leakage, or a table that holds it."
            )
        if request.compat is None and dialect is SimulatorDialect.GPUWATTCH:
            chip.notes.append("leakage is not known and in no part (--leakage gives it)")
        return None
    if request.compat is not None:
        chip.notes.append("leakage is left out, as in the original")
    return replace(leakage, gated=True) if request.gate_idle_sms else leakage


def _choose_outputs(
    request: TraceRequest,
    config: SimulatorConfig,
    notes: list[str],
) -> list[str]:
    """Return the files to write: what the user asks for and the configuration leaves on."""
    outputs = list(LOGS)
    if request.parquet:
        if importlib.util.find_spec("pyarrow") is None:
            notes.append("no Parquet table: pyarrow is not installed")
        else:
            outputs.append(TABLE)
    if request.figure:
        outputs.append(FIGURE)
    if request.simulator_config is None:
        return outputs
    if config.power_per_cycle_dump:
        notes.append("power_per_cycle_dump: samples.parquet holds every sample's components")
    switches_off = [switch for switch in SWITCHED_LOGS if not getattr(config, switch)]
    if not switches_off:
        return outputs
    for switch in switches_off:
        outputs = [output for output in outputs if output not in SWITCHED_LOGS[switch]]
    notes.append(
        f"{', '.join(switches_off)} off in {request.simulator_config.name}: their files are "
        "not written"
    )
    return outputs


@dataclass(frozen=True)
class ClockSteps:
    """Clock and voltage from given samples on; without steps the clock stays as it is."""

    first_sample: Array = field(default_factory=lambda: np.zeros(0))
    clock_hz: Array = field(default_factory=lambda: np.zeros(0))
    voltage_v: Array = field(default_factory=lambda: np.zeros(0))  # NaN: not known


def read_clock_steps(path: Path, clock_hz: float) -> ClockSteps:
    """Read clock and voltage from given samples on: a CSV of ``sample`` with ``clock``, ``voltage``
    or both.

    A step without a clock has ``clock_hz``, one without a voltage NaN."""
    rows = parse_csv(read_bytes(path, _MAX_STEPS_BYTE), path.name)
    if "sample" not in rows[0] or not set(rows[0]) <= set(_STEP_COLUMNS):
        raise bad_value(f"{path.name}: header", ",".join(_STEP_COLUMNS), ",".join(rows[0]))
    steps: list[tuple[float, float, float]] = []
    for line, row in enumerate(rows, start=2):
        where = f"{path.name}: line {line}"
        if not str(row["sample"]).strip().isdigit():
            raise bad_value(f"{where}: sample", "a whole number", row["sample"])
        step_hz = clock_hz
        if row.get("clock"):
            step_hz = units.parse(row["clock"], "Hz", f"{where}: clock")
        step_v = np.nan
        if row.get("voltage"):
            step_v = units.parse(row["voltage"], "V", f"{where}: voltage")
        if step_hz <= 0 or step_v <= 0:
            figures = f"{step_hz:g} Hz, {step_v:g} V"
            raise bad_value(where, "a clock and a voltage above zero", figures)
        steps.append((float(row["sample"]), step_hz, step_v))
    first_sample, step_clock_hz, step_voltage_v = np.array(steps).T
    return ClockSteps(first_sample, step_clock_hz, step_voltage_v)
