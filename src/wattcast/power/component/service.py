"""From files to a finished trace run: what `wattcast power-trace` calls."""

from __future__ import annotations

import csv
import importlib.util
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast import units
from wattcast.activity.simulated import Dialect, Sampling, open_metric_trace
from wattcast.errors import MissingSpecification, bad_value
from wattcast.files import read_bytes, write_whole
from wattcast.power.component.architecture import Architecture, scaling_names
from wattcast.power.component.architecture_yaml import read_architecture
from wattcast.power.component.build import build
from wattcast.power.component.components import component_set
from wattcast.power.component.energies import EnergyTable, read_energies
from wattcast.power.component.figure import stacked_area
from wattcast.power.component.kernels import read_kernels
from wattcast.power.component.leakage import Leakage, read_mcpat
from wattcast.power.component.run import TraceResult, TraceRun, Wanted, run_trace
from wattcast.power.component.simulator_config import SimulatorConfig, SteadyDefinition, read_config

CONFIG_NAME = "gpgpusim.config"
_MAX_STEPS_BYTE = 64 << 20


@dataclass(frozen=True)
class TraceRequest:
    """What a user may ask for; None leaves a choice to the files."""

    trace: Path
    architecture: Path
    energies: Path | None  # None: built bottom-up from the architecture
    out: Path
    compat: Dialect | None = None
    simulator_config: Path | None = None
    kernels: Path | None = None
    components: tuple[Path, ...] = ()
    dvfs: Path | None = None
    leakage: Path | None = None
    gate_idle_sms: bool = False
    threads_per_warp: float | None = None
    sm_count: int | None = None
    clock_hz: float | None = None
    sample_cycle: int | None = None
    steady: str | None = None
    compress: bool | None = None
    parquet: bool = True
    figure: bool = True


def power_trace(request: TraceRequest) -> tuple[TraceRun, TraceResult]:
    """Read everything, run, draw. The result's ``fault`` is set when the trace broke off."""
    job, notes = prepare(request)
    result = run_trace(job)
    result.notes[:0] = notes
    if request.figure and result.timeline is not None and result.samples:
        if importlib.util.find_spec("matplotlib") is None:
            result.notes.append("no figure: matplotlib is not installed")
        else:
            result.files.append(_draw(request, job, result))
    return job, result


def prepare(request: TraceRequest) -> tuple[TraceRun, list[str]]:
    """Read the files of a request into a run, with notes on every choice that was not the user's."""
    notes: list[str] = []
    architecture = read_architecture(request.architecture)
    if request.compat is not None and request.compat is not architecture.dialect:
        do = f"Leave --compat out or say --compat {architecture.dialect}."
        raise bad_value(
            "--compat", f"{architecture.dialect}, as {request.architecture.name} is", request.compat.value, do
        )
    config = simulator_config(request, notes)
    clock_hz = _clock(request, architecture, config)
    table = find_energies(request, architecture, config, clock_hz, notes)
    if clock_hz is None:
        clock_hz = table.reference_clock_hz
        notes.append(f"core clock {units.show(clock_hz, 'Hz', 6)}, from the sample time of {table.name}")
    components = component_set(architecture.dialect, request.compat is not None, request.components)
    built = build(
        architecture,
        table,
        components,
        sm_count=config.sm_count,
        leakage=_leakage(request, table, config, notes),
        threads=request.threads_per_warp,
    )
    run = TraceRun(
        trace=open_metric_trace(request.trace, architecture.dialect, _scaling(architecture), components.custom),
        model=built.model,
        components=components,
        sampling=_sampling(request, config, clock_hz, notes),
        out=request.out,
        kernels=read_kernels(request.kernels, config.sample_cycle) if request.kernels else (),
        config=config,
        wanted=_wanted(request, config, notes),
        compress=request.compress,
    )
    return run, [*notes, *built.notes]


def summary(job: TraceRun, result: TraceResult) -> dict[str, Any]:
    """The outcome as plain values, for JSON."""
    names = [k.name for k in job.kernels]
    return {
        "samples": result.samples,
        "duration_s": result.duration_s,
        "energy_j": result.energy_j,
        "mean_power_w": result.energy_j / result.duration_s if result.duration_s else None,
        "kernels": [
            {
                "name": names[k.index] if k.index < len(names) else None,
                "samples": k.samples,
                "mean_w": k.mean_w if k.samples else None,
                "max_w": k.highest.power_w if k.samples else None,
                "min_w": k.lowest.power_w if k.samples else None,
                "finished": k.finished,
                "mean_part_w": dict(zip(job.model.parts, k.mean_part_w.tolist(), strict=True)) if k.samples else {},
            }
            for k in result.kernels
        ],
        "steady_states": [
            {"start": r.start, "end": r.end, "kernel": r.kernel, "power_w": r.power_w}
            for r in result.regions
            if r is not None
        ],
        "files": [str(path) for path in result.files],
        "notes": result.notes,
        "fault": str(result.fault) if result.fault else None,
    }


def simulator_config(request: TraceRequest, notes: list[str]) -> SimulatorConfig:
    """The simulator's configuration as files and options have it."""
    path = request.simulator_config
    for near in (request.architecture, request.trace):
        if path is None and (near.parent / CONFIG_NAME).is_file():
            path = near.parent / CONFIG_NAME
            notes.append(f"{CONFIG_NAME} found beside {near.name} and read")
    config = read_config(path) if path else SimulatorConfig()
    if request.sm_count is not None:
        config = replace(config, sm_count=request.sm_count)
    if request.sample_cycle is not None:
        config = replace(config, sample_cycle=request.sample_cycle)
    elif path is None:
        notes.append(f"samples of {config.sample_cycle} cycles, the simulator's default")
    if request.steady is not None:
        config = replace(config, steady=SteadyDefinition.read(request.steady, "--steady"))
    return config


def find_energies(
    request: TraceRequest,
    architecture: Architecture,
    config: SimulatorConfig,
    clock_hz: float | None,
    notes: list[str],
) -> EnergyTable:
    """The table a request names; without one, energies built from the architecture, with a note that says so."""
    if request.energies is not None:
        return read_energies(request.energies, config.sample_cycle, clock_hz)
    from wattcast.power.component.bottom_up.table import energy_table, of_architecture

    found = of_architecture(architecture, int(config.sm_count) if config.sm_count else None, clock_hz)
    notes.append(f"no table of energies: {found.provenance}")
    if left_out := found.design.notes:
        notes.append(f"{len(left_out)} numbers the architecture file leaves out have McPAT's defaults")
    return energy_table(found, architecture.dialect)


def _clock(request: TraceRequest, architecture: Architecture, config: SimulatorConfig) -> float | None:
    """The option, then the clock the simulator's power model itself used: GPUWattch's is the architecture file's."""
    listed = architecture.parameters.get("target_core_clockrate")
    of_file = listed * 1e6 if isinstance(listed, (int, float)) else None
    first, second = (of_file, config.clock_hz) if request.compat is Dialect.GPUWATTCH else (config.clock_hz, of_file)
    return request.clock_hz or first or second


def _scaling(architecture: Architecture) -> dict[str, float]:
    return {name: architecture.scaling_of(name) for name in scaling_names(architecture.dialect)}


def _leakage(request: TraceRequest, table: EnergyTable, config: SimulatorConfig, notes: list[str]) -> Leakage | None:
    found = read_mcpat(request.leakage, config.sm_count) if request.leakage else table.leakage
    if found is None:
        if request.gate_idle_sms:
            raise MissingSpecification("--gate-idle-sms needs leakage: give --leakage, or a table that holds it.")
        if request.compat is None:
            notes.append("leakage is not known and in no part (--leakage gives it)")
    elif request.compat is not None:
        notes.append("leakage is left out, as in the original")
    return replace(found, gated=True) if found is not None and request.gate_idle_sms else found


def _sampling(request: TraceRequest, config: SimulatorConfig, clock_hz: float, notes: list[str]) -> Sampling:
    if request.dvfs is None:
        return Sampling(config.sample_cycle, clock_hz)
    first, clocks, volts = read_steps(request.dvfs, clock_hz)
    if np.isnan(volts).any():
        notes.append(f"{request.dvfs.name} does not give every voltage: none is scaled")
    return Sampling(config.sample_cycle, clock_hz, first, clocks, volts)


def read_steps(path: Path, clock_hz: float) -> tuple[Any, Any, Any]:
    """Clock and voltage from given samples on: CSV with ``sample`` and ``clock`` or ``voltage`` or both."""
    text = read_bytes(path, _MAX_STEPS_BYTE).decode("utf-8", "replace")
    reader = csv.DictReader(io.StringIO(text))
    names = reader.fieldnames or []
    if "sample" not in names or not set(names) <= {"sample", "clock", "voltage"}:
        raise bad_value(f"{path.name}: header", "sample,clock,voltage", ",".join(names))
    first, clocks, volts = [], [], []
    for line, row in enumerate(reader, start=2):
        where = f"{path.name}: line {line}"
        if not str(row["sample"]).strip().isdigit():
            raise bad_value(f"{where}: sample", "a whole number", row["sample"])
        first.append(float(row["sample"]))
        clocks.append(units.parse(row["clock"], "Hz", f"{where}: clock") if row.get("clock") else clock_hz)
        volts.append(units.parse(row["voltage"], "V", f"{where}: voltage") if row.get("voltage") else np.nan)
        if clocks[-1] <= 0 or volts[-1] <= 0:
            raise bad_value(where, "a clock and a voltage above zero", f"{clocks[-1]:g} Hz, {volts[-1]:g} V")
    if not first:
        raise bad_value(path.name, "at least one step", "none")
    return np.array(first), np.array(clocks), np.array(volts)


def _wanted(request: TraceRequest, config: SimulatorConfig, notes: list[str]) -> Wanted:
    """Everything, less what a configuration named by the user switches off, and what no library can write."""
    parquet = request.parquet
    if parquet and importlib.util.find_spec("pyarrow") is None:
        parquet = False
        notes.append("no Parquet table: pyarrow is not installed")
    if request.simulator_config is None:
        return Wanted(parquet=parquet, figure=request.figure)
    if config.power_per_cycle_dump:
        notes.append("power_per_cycle_dump: samples.parquet holds every sample's components")
    switches = {
        "power_simulation_enabled": config.power_simulation_enabled,
        "power_trace_enabled": config.power_trace_enabled,
        "steady_power_levels_enabled": config.steady_power_levels_enabled,
    }
    if off := [name for name, on in switches.items() if not on]:
        notes.append(f"{', '.join(off)} off in {request.simulator_config.name}: their files are not written")
    traces = config.power_trace_enabled
    steady = config.steady_power_levels_enabled
    return Wanted(config.power_simulation_enabled, traces, traces, steady, parquet, request.figure)


def _draw(request: TraceRequest, job: TraceRun, result: TraceResult) -> Path:
    assert result.timeline is not None
    mean_w = result.energy_j / result.duration_s
    title = f"{request.trace.name}: {mean_w:.4g} W mean, {result.samples} samples, {len(result.kernels)} kernels"
    mode = f"as {request.compat}" if request.compat else "Wattcast"
    energies = request.energies.name if request.energies else "bottom-up energies"
    caption = f"{job.model.reference_clock_hz / 1e6:g} MHz reference, {energies}, {mode}"
    figure = stacked_area(result.timeline, job.model.parts, title, caption)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=144)
    path = request.out / "components.png"
    write_whole(path, buffer.getvalue())
    return path
