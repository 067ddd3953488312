"""Read the files that a user names and compute power from them: a simulator's trace, or a table of
hardware counters.

``make_power_trace`` runs a metric trace through the component model; ``compute_kernel_power`` does
the same for counters of whole kernels: hardware counters, power reports, and statistics that
simulators print."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
)

import numpy as np

from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import MissingSpecification, bad_value
from wattcast.core.option_declaration import Option
from wattcast.core.strict_files import (
    encode_csv,
    parse_csv,
    read_bytes,
)
from wattcast.core.whole_files import write_whole
from wattcast.lab.counter_models.profiler_counters import read_accelwattch_hw, read_ncu
from wattcast.lab.gpuwattch import architecture as architecture_files
from wattcast.lab.gpuwattch import measured_energies, simulator_logs
from wattcast.lab.gpuwattch.architecture import (
    ChipArchitecture,
    SimulatorConfig,
    read_architecture,
)
from wattcast.lab.gpuwattch.component_build import build_component_model
from wattcast.lab.gpuwattch.energy_table import (
    ComponentSet,
    EnergyTable,
    read_component_set,
    read_energies,
)
from wattcast.lab.gpuwattch.simulator_logs import CountedKernels, CounterSource
from wattcast.lab.gpuwattch.trace_outputs import draw_component_power
from wattcast.lab.gpuwattch.trace_reading import (
    SimulatorDialect,
    TraceSampling,
    dialect_counters,
    open_metric_trace,
)
from wattcast.lab.gpuwattch.trace_run import (
    FIGURE,
    LOGS,
    TABLE,
    TraceResult,
    TraceRun,
    run_trace,
)
from wattcast.lab.gpuwattch.trace_statistics import read_kernel_list
from wattcast.lab.gpuwattch.unseen_counters import (
    IssueWidth,
    PowerRange,
    estimate_unseen_power,
)
from wattcast.power.component_power import read_mcpat
from wattcast.power.power_model import Power, VoltageCurve
from wattcast.report.figure_style import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIMULATOR_CONFIG_FILE = "gpgpusim.config"
_MAX_STEPS_BYTE = 64 << 20
SWITCHED_LOGS = {  # options of the simulator's configuration, and the files that they switch off
    "power_simulation_enabled": ("power_report",),
    "power_trace_enabled": ("power_trace", "metric_trace"),
    "steady_power_levels_enabled": ("steady_state_tracking",),
}
_SAME_FACTOR = 1e-4  # files print factors with five digits and more


@dataclass(frozen=True)
class TraceRequest:
    """The files and options of a user; None leaves a choice to the files."""

    trace: Annotated[
        Path,
        Option(
            "Metric trace of GPUWattch or AccelWattch, plain or .gz; power report, log, "
            "gem5's stats.txt.",
            positional=True,
        ),
    ]
    architecture: Annotated[
        Path,
        Option(
            "Architecture file: GPUWattch or AccelWattch XML, or our YAML; or a GPU with "
            "energies: h200 (measured), a100-sxm-80gb, h100-sxm, h100-nvl, gh200, b200, t4, "
            "rtx-3070, rtx-3090, rtx-4090 (carried over).",
            "config",
        ),
    ]
    energies: Annotated[
        Path | None,
        Option("Energies per count: dumped CSV or our YAML; default: from the architecture."),
    ] = None  # None: built bottom-up from the architecture
    out: Annotated[Path, Option("Folder for the results.")] = Path("power")
    compat: Annotated[
        SimulatorDialect | None, Option("gpuwattch|accelwattch: with the original's quirks.")
    ] = None
    simulator_config: Annotated[
        Path | None,
        Option(
            "gpgpusim.config, if not beside the XML.", panel="The simulated run, where no file says"
        ),
    ] = None
    kernels: Annotated[
        Path | None,
        Option(
            "Kernel names, one a line; CSV name,uid,samples|cycles,ipc,threads; or a power "
            "report or log."
        ),
    ] = None
    components: Annotated[
        tuple[Path, ...], Option("YAML with further components.", panel="The chip")
    ] = ()
    dvfs: Annotated[
        Path | None, Option("CSV sample,clock,voltage, from there on.", panel="The chip")
    ] = None
    leakage: Annotated[
        Path | None, Option("McPAT's area and leakage listing.", panel="The chip")
    ] = None
    gate_idle_sms: Annotated[bool, Option("Idle SMs do not leak.", panel="The chip")] = False
    threads_per_warp: Annotated[
        float | None,
        Option("Active threads of a warp.", panel="The simulated run, where no file says"),
    ] = None
    sm_count: Annotated[
        int | None, Option("Number of SMs.", "sms", panel="The simulated run, where no file says")
    ] = None
    clock_hz: Annotated[
        float | None,
        Option(
            "Core clock, such as 700MHz.", unit="Hz", panel="The simulated run, where no file says"
        ),
    ] = None
    sample_cycle: Annotated[
        int | None,
        Option(
            "Core cycles of a sample.",
            "sample-cycles",
            panel="The simulated run, where no file says",
        ),
    ] = None
    steady: Annotated[str | None, Option("Steady states: watts:samples, as 8:4.")] = None
    compress: Annotated[
        bool | None, Option("Default: as the trace is.", "gzip/plain", panel="Files")
    ] = None
    parquet: Annotated[bool, Option("Write every sample to samples.parquet.", panel="Files")] = True
    figure: Annotated[bool, Option("Draw components.png.", panel="Files")] = True
    follow_s: Annotated[
        float, Option("Read a growing trace until nothing has come for so long: 10s.", unit="s")
    ] = 0.0  # read a growing trace until so long nothing has come
    stamped: Annotated[
        bool, Option("Name files as the manual does, with the date.", "date-stamp", panel="Files")
    ] = False  # names of files as in the manual, with date and time
    ran_with: Annotated[
        Path | None,
        Option(
            "AccelWattch XML the simulator ran with, if another one.",
            panel="The simulated run, where no file says",
        ),
    ] = None  # architecture file the simulator ran with, whose factors its unit counters hold


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
    found = read_chip(request)
    architecture, config, table, clock_hz, components, notes, _ = found
    dialect = architecture.dialect
    has_leakage = request.leakage is not None or request.gate_idle_sms
    if dialect is SimulatorDialect.ACCELWATTCH and has_leakage:
        do = "Leave --leakage and --gate-idle-sms out."
        wanted = (
            f"no further leakage: {architecture.name} has AccelWattch's static, idle "
            "and constant power"
        )
        raise bad_value("--leakage", wanted, str(request.leakage or "--gate-idle-sms"), do)
    leakage = read_mcpat(request.leakage, config.sm_count) if request.leakage else table.leakage
    if leakage is None and request.gate_idle_sms:
        raise MissingSpecification(
            "--gate-idle-sms needs leakage: give --leakage, or a table that holds it."
        )
    if leakage is None and request.compat is None and dialect is SimulatorDialect.GPUWATTCH:
        notes.append("leakage is not known and in no part (--leakage gives it)")
    if leakage is not None and request.compat is not None:
        notes.append("leakage is left out, as in the original")
    if leakage is not None and request.gate_idle_sms:
        leakage = replace(leakage, gated=True)
    sms = config.sm_count
    threads = request.threads_per_warp
    built = build_component_model(
        architecture,
        table,
        components,
        sm_count=sms,
        leakage=leakage,
        voltage=found.voltage,
        threads=threads,
    )
    steps = read_clock_steps(request.dvfs, clock_hz) if request.dvfs else ()
    sampling = TraceSampling(config.sample_cycle, clock_hz, *steps)
    if request.dvfs and np.isnan(sampling.step_voltage_v).any():
        notes.append(f"{request.dvfs.name} does not give every voltage: none is scaled")
    parquet = request.parquet
    if parquet and importlib.util.find_spec("pyarrow") is None:
        parquet = False
        notes.append("no Parquet table: pyarrow is not installed")
    outputs = [*LOGS, *[TABLE] * parquet, *[FIGURE] * request.figure]
    if request.simulator_config is not None:
        if config.power_per_cycle_dump:
            notes.append("power_per_cycle_dump: samples.parquet holds every sample's components")
        if off := [switch for switch in SWITCHED_LOGS if not getattr(config, switch)]:
            outputs = [
                file for file in outputs if not any(file in SWITCHED_LOGS[switch] for switch in off)
            ]
            notes.append(
                f"{', '.join(off)} off in {request.simulator_config.name}: their files are "
                "not written"
            )
    scaling = found.trace_scaling(request)
    custom = components.custom
    run = TraceRun(
        trace=open_metric_trace(request.trace, dialect, scaling, custom, request.follow_s),
        model=built.model,
        components=components,
        sampling=sampling,
        out=request.out,
        kernels=read_kernel_list(request.kernels, config.sample_cycle) if request.kernels else (),
        config=config,
        wanted=outputs,
        compress=True if request.stamped and request.compress is None else request.compress,
        stamp=time.asctime().replace(" ", "-").replace(":", "-") if request.stamped else "",
    )
    return run, [*notes, *built.notes]


class ChipFiles(NamedTuple):
    """What the files of a request hold about the chip, and notes on every choice that was not the
    user's.
    """

    architecture: ChipArchitecture
    config: SimulatorConfig
    table: EnergyTable
    clock_hz: float
    components: ComponentSet
    notes: list[str]
    chip: measured_energies.MeasuredChip | None = None  # where the architecture is a GPU's name

    @property
    def voltage(self) -> VoltageCurve | None:
        """Core voltage by clock, where it was measured."""
        return None if self.chip is None else self.chip.voltage

    def trace_scaling(self, request: TraceRequest) -> dict[str, float]:
        """Return the scaling factors that the simulator has multiplied its unit counters by."""
        if request.ran_with is not None:
            return read_architecture(request.ran_with).all_scaling()
        if self.chip is not None:
            self.notes.append(
                "unit counters are taken as scaled by this GPU's own file (lab "
                "accelwattch); --ran-with names another"
            )
        return self.architecture.all_scaling()


def read_chip(request: TraceRequest) -> ChipFiles:
    """Read architecture, simulator configuration and energies, and check that they belong
    together.
    """
    notes: list[str] = []
    chip = find_measured_chip(request.architecture)
    if chip is None:
        architecture = read_architecture(request.architecture)
    else:
        architecture = measured_energies.measured_architecture(chip)
    dialect = architecture.dialect
    if request.compat is not None and request.compat is not dialect:
        do = f"Leave --compat out or say --compat {dialect}."
        raise bad_value(
            "--compat", f"{dialect}, as {request.architecture.name} is", request.compat.value, do
        )
    config = _find_config(request, notes)
    if chip is not None and config.sm_count is None:
        config = replace(config, sm_count=chip.design.sm_count)
    # GPUWattch's power model takes its clock from the architecture file, AccelWattch's from the
    # configuration
    listed = architecture.parameters.get("target_core_clockrate")
    clocks = [config.clock_hz, listed * 1e6 if isinstance(listed, (int, float)) else None]
    if request.compat is SimulatorDialect.GPUWATTCH:
        clocks.reverse()
    clock_hz = request.clock_hz or clocks[0] or clocks[1]
    if request.energies is not None:
        table = read_energies(request.energies, config.sample_cycle, clock_hz)
    elif chip is not None:
        table = measured_energies.measured_table(chip, architecture)
        notes.append(f"{table.name}: {chip.source}")
    else:
        from wattcast.lab.gpuwattch.bottom_up.event_energies import (
            build_architecture_chip,
            make_energy_table,
        )
        from wattcast.lab.gpuwattch.bottom_up.technology import explain_feature

        found = build_architecture_chip(
            architecture, int(config.sm_count) if config.sm_count else None, clock_hz
        )
        table = make_energy_table(found, dialect)
        notes.append(f"no table of energies: {found.provenance}")
        if other_process := explain_feature(found.design.feature_nm):
            notes.append(f"warning: {other_process}")
        if left_out := found.design.notes:
            notes.append(
                f"{len(left_out)} numbers the architecture file leaves out have McPAT's defaults"
            )
    if clock_hz is None:
        clock_hz = table.reference_clock_hz
        of = "the sample time of" if chip is None else "the top clock of"
        notes.append(f"core clock {units.show(clock_hz, 'Hz', 6)}, from {of} {table.name}")
    _check_match(architecture, table, notes)
    components = read_component_set(dialect, request.compat is not None, request.components)
    return ChipFiles(architecture, config, table, clock_hz, components, notes, chip)


def find_measured_chip(name: Path) -> measured_energies.MeasuredChip | None:
    """Return the measured GPU that ``--config`` names instead of a file; None for a file."""
    if name.exists() or name.suffix or len(name.parts) > 1:
        return None
    return measured_energies.measured_chip(name.name)


def _check_match(
    architecture: ChipArchitecture,
    table: EnergyTable,
    notes: list[str],
) -> None:
    """Refuse energies of the other dialect's counters; note where the table was dumped with other
    scaling factors.
    """
    columns = {
        dialect: {c.column for c in dialect_counters(dialect)} for dialect in SimulatorDialect
    }
    own = columns[architecture.dialect]
    foreign = [name for name in table.energy_j if name not in own]
    if foreign:
        do = f"Take the energies dumped with {architecture.name}, or leave --energies out."
        wanted = f"energies of {architecture.dialect} counters for {architecture.name}"
        raise bad_value(
            f"energies {table.name}", wanted, f"{', '.join(foreign[:4])} of the other dialect", do
        )
    by_column = {c.column: c.scaling for c in dialect_counters(architecture.dialect)}
    factors = {
        by_column[name]: factor for name, factor in table.scaling.items() if name in by_column
    }
    other = [
        f"{name} {factor:g} instead of {architecture.scaling_of(name):g}"
        for name, factor in factors.items()
        if abs(factor - architecture.scaling_of(name))
        > _SAME_FACTOR * max(factor, architecture.scaling_of(name))
    ]
    if other:
        shown = ", ".join(other[:3]) + (" ..." if len(other) > 3 else "")
        notes.append(
            f"warning: {table.name} was dumped with other scaling factors than "
            f"{architecture.name} has in "
            f"{len(other)} of {len(factors)} counters ({shown}): are they of one chip? The "
            "architecture's are used"
        )


def _find_config(request: TraceRequest, notes: list[str]) -> SimulatorConfig:
    """Return the simulator's configuration: the named file or the one next to the input, with the
    options on top.
    """
    path = request.simulator_config
    for near in (request.architecture, request.trace):
        if path is None and (near.parent / SIMULATOR_CONFIG_FILE).is_file():
            path = near.parent / SIMULATOR_CONFIG_FILE
            notes.append(f"{SIMULATOR_CONFIG_FILE} found beside {near.name} and read")
    config = architecture_files.read_simulator_config(path) if path else SimulatorConfig()
    if request.sm_count is not None:
        config = replace(config, sm_count=request.sm_count)
    if request.sample_cycle is not None:
        config = replace(config, sample_cycle=request.sample_cycle)
    elif path is None:
        notes.append(f"samples of {config.sample_cycle} cycles, the simulator's default")
    if request.steady is not None:
        config = replace(
            config, steady=architecture_files.SteadyStateDefinition.read(request.steady, "--steady")
        )
    return config


def read_clock_steps(path: Path, clock_hz: float) -> tuple[Array, Array, Array]:
    """Read clock and voltage from given samples on: a CSV of ``sample`` with ``clock``, ``voltage``
    or both.

    Returns first samples, clocks (``clock_hz`` where none is given) and voltages (NaN where none is
    given)."""
    rows = parse_csv(read_bytes(path, _MAX_STEPS_BYTE), path.name)
    if "sample" not in rows[0] or not set(rows[0]) <= {"sample", "clock", "voltage"}:
        raise bad_value(f"{path.name}: header", "sample,clock,voltage", ",".join(rows[0]))
    steps: list[tuple[float, float, float]] = []
    for line, row in enumerate(rows, start=2):
        where = f"{path.name}: line {line}"
        if not str(row["sample"]).strip().isdigit():
            raise bad_value(f"{where}: sample", "a whole number", row["sample"])
        hertz = units.parse(row["clock"], "Hz", f"{where}: clock") if row.get("clock") else clock_hz
        volts = (
            units.parse(row["voltage"], "V", f"{where}: voltage") if row.get("voltage") else np.nan
        )
        if hertz <= 0 or volts <= 0:
            raise bad_value(where, "a clock and a voltage above zero", f"{hertz:g} Hz, {volts:g} V")
        steps.append((float(row["sample"]), hertz, volts))
    first, clocks, voltages = np.array(steps).T
    return first, clocks, voltages


@dataclass(frozen=True)
class CountedKernelPower:
    """Power of kernels from counters of whole kernels, and the components that they cannot show."""

    names: tuple[str, ...]
    duration_s: Array
    power: Power
    lost: tuple[str, ...]  # components none of whose counters is there
    partial: tuple[str, ...]  # components some of whose counters are there
    notes: tuple[str, ...]
    file: Path
    estimate: PowerRange | None = None  # with the unseen components estimated

    @property
    def is_lower_bound(self) -> bool:
        """Tell whether a component is missing from the sums, which are then no totals."""
        return bool(self.lost or self.partial)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for JSON; a sum that lacks a component is not called a power."""
        kernels = []
        for row, name in enumerate(self.names):
            parts_w = self.power.part_w[row].tolist()
            kernels.append(
                {
                    "name": name,
                    "duration_s": float(self.duration_s[row]),
                    **self.kernel_watts(row),
                    "part_w": dict(zip(self.power.parts, parts_w, strict=True)),
                }
            )
        return {
            "kernels": kernels,
            "at_least": self.is_lower_bound,
            "parts_lost": list(self.lost),
            "parts_partial": list(self.partial),
            "notes": list(self.notes),
            "files": [str(self.file)],
        }

    def kernel_watts(self, row: int) -> dict[str, float | None]:
        """Return the watts of a kernel by name: its power, or a lower bound and an estimate."""
        sum_w = float(self.power.total_w[row])
        if not self.is_lower_bound:
            return {"power_w": sum_w}
        watts: dict[str, float | None] = {"power_w": None, "power_at_least_w": sum_w}
        if self.estimate is not None:
            watts["estimate_w"] = float(self.estimate.about_w[row])
            watts["estimate_low_w"] = float(self.estimate.low_w[row])
            watts["estimate_high_w"] = float(self.estimate.high_w[row])
        return watts

    def describe_kernel(self, row: int) -> str:
        """Return the watts of a kernel in words."""
        watts = self.kernel_watts(row)
        if not self.is_lower_bound:
            return f"{watts['power_w']:10.3f} W"
        text = f"at least {watts['power_at_least_w']:10.3f} W"
        if self.estimate is not None:
            low, high = watts["estimate_low_w"], watts["estimate_high_w"]
            text += (
                f"; about {watts['estimate_w']:.0f} W ({low:.0f} to {high:.0f}) with "
                "the others estimated"
            )
        return text

    def describe_unseen(self) -> str:
        """Say which components are missing from the sums."""
        lost = ", ".join(self.lost) or "none"
        partial = ", ".join(self.partial) or "none"
        text = (
            "the sums are lower bounds, not totals (exit code 3): components no counter shows: "
            f"{lost}; shown in part: {partial}"
        )
        if self.estimate is not None and self.estimate.unseen:
            text += f". The estimate lacks {', '.join(self.estimate.unseen)}"
        return text


def compute_kernel_power(request: TraceRequest, source: CounterSource) -> CountedKernelPower:
    """Compute the power of each kernel from counters of whole kernels and write it to
    ``kernel_power.csv``.

    Components that no counter shows are left out and named, and so are those that only some of
    their counters show: the sum is then a lower bound, beside which an estimate stands where the
    issued instructions are known."""
    chip_files = read_chip(request)
    dialect = chip_files.architecture.dialect
    config = chip_files.config
    built = build_component_model(
        chip_files.architecture,
        chip_files.table,
        chip_files.components,
        voltage=chip_files.voltage,
        capped=source is CounterSource.POWER_REPORT and request.compat is not None,
        sm_count=config.sm_count,
        threads=request.threads_per_warp,
    )
    counted = _read_counted_kernels(request, source, chip_files)
    model, lost, partial = built.model.seen_by(counted.activity.events)
    power = model.power(counted.activity)
    for part, watts in counted.given_w.items():
        if part in power.parts:
            power.part_w[:, power.parts.index(part)] = watts
    estimate = None
    if lost or partial:
        sm_count = config.sm_count or chip_files.architecture.parameters.get("number_of_cores")
        width = IssueWidth.of(
            dialect, sm_count if isinstance(sm_count, (int, float)) else None, config.schedulers
        )
        estimate = estimate_unseen_power(
            built.model, counted.activity, dialect, width, counted.given_w, counted.names
        )
    kernels = CountedKernelPower(
        counted.names,
        np.broadcast_to(counted.activity.duration_s, (len(counted.names),)),
        power,
        lost,
        partial,
        (*chip_files.notes, *counted.notes, *built.notes),
        request.out / "kernel_power.csv",
        estimate,
    )
    _write_kernel_power(kernels)
    return kernels


def _read_counted_kernels(
    request: TraceRequest,
    source: CounterSource,
    chip_files: ChipFiles,
) -> CountedKernels:
    """Read the kernels of a file whose source is known."""
    path = request.trace
    clock_hz = chip_files.clock_hz
    sm_count = chip_files.config.sm_count
    chip = chip_files.chip
    match source:
        case CounterSource.NCU if chip is not None:
            return CountedKernels(*measured_energies.read_measured_counters(path, chip))
        case CounterSource.NCU:
            launches, activity = read_ncu(path, sm_count)
            return CountedKernels(tuple(launch.kernel for launch in launches), activity)
        case CounterSource.POWER_REPORT:
            scaling = chip_files.trace_scaling(request)
            sampling = TraceSampling(chip_files.config.sample_cycle, clock_hz)
            dialect = chip_files.architecture.dialect
            return simulator_logs.read_power_report(path, dialect, scaling, sampling)
        case CounterSource.ACCELSIM:
            return simulator_logs.read_accelsim(path, clock_hz)
        case CounterSource.GEM5:
            return simulator_logs.read_gem5_stats(path)
        case _ if request.clock_hz is None:
            do = "The counters hold cycles and no time."
            wanted = "the core clock the kernels ran at, such as 1447MHz"
            raise bad_value("--clock", wanted, "none", do)
        case _:
            return CountedKernels(*read_accelwattch_hw(path, request.clock_hz))


def _write_kernel_power(kernels: CountedKernelPower) -> None:
    """Write a row a kernel: time, watts and components; lower bounds have columns of their own."""
    names = [name for name, watts in kernels.kernel_watts(0).items() if watts is not None]
    lines: list[list[str]] = [["kernel", "duration_s", *names, *kernels.power.parts]]
    for row, name in enumerate(kernels.names):
        watts = kernels.kernel_watts(row)
        lines.append(
            [
                name,
                repr(float(kernels.duration_s[row])),
                *(f"{watts[column]:.6f}" for column in names),
                *(f"{part_w:.6f}" for part_w in kernels.power.part_w[row]),
            ]
        )
    write_whole(kernels.file, encode_csv(lines))
