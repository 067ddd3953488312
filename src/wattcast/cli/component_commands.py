"""``wattcast lab power-trace``, ``lab fit component``, ``lab check-energies`` and ``gpus show
--energies``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from rich.console import Console

from wattcast.cli.command_builder import command, parse_pairs
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.figure_options import PLOT_FILE
from wattcast.core import files
from wattcast.core.errors import (
    ExitCode,
    bad_value,
    resolve_name,
)
from wattcast.core.option_declaration import Option
from wattcast.core.row_tables import database_folder
from wattcast.core.strict_files import (
    REFERENCE_VARIABLE,
    read_bytes,
    reference_folder,
)
from wattcast.core.units import parse, show
from wattcast.core.whole_files import write_whole

if TYPE_CHECKING:
    from wattcast.hardware import Gpu
    from wattcast.lab.gpuwattch.bottom_up.chip_design import BuiltChip
    from wattcast.lab.gpuwattch.component_fit import (
        ComponentFit,
        FitConstraints,
        KernelColumns,
        MeasuredKernels,
    )
    from wattcast.lab.gpuwattch.counted_kernel_power import CountedKernelPower
    from wattcast.lab.gpuwattch.measured_energies import HeldOutJudgement, MeasuredValue
    from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect
    from wattcast.lab.gpuwattch.trace_run import TraceResult


@command("lab power-trace", "wattcast.lab.gpuwattch.trace_request:TraceRequest")
def power_trace(
    env: Environment,
    counters: Annotated[
        str, Option("What the file is: auto|trace|power-report|accel-sim|gem5|accelwattch-hw|ncu.")
    ] = "auto",
    save_config: Annotated[
        Path | None, Option("Also write the architecture as XML.", panel="Files")
    ] = None,
    plot: Annotated[Path | None, PLOT_FILE] = None,
    **asked: Any,
) -> CommandOutput:
    """Report, power trace, metric trace and steady states from the counters a simulator wrote.

    Example: wattcast lab power-trace --config gpuwattch_gtx480.xml metric_trace.log.gz --energies
    gtx480.csv --compat gpuwattch --out power"""
    from wattcast.lab.gpuwattch import (
        architecture,
        measured_energies,
        simulated_power,
        simulator_logs,
    )
    from wattcast.lab.gpuwattch.counted_kernel_power import compute_kernel_power
    from wattcast.lab.gpuwattch.simulated_chip import find_measured_chip
    from wattcast.lab.gpuwattch.simulator_logs import CounterSource
    from wattcast.lab.gpuwattch.trace_request import TraceRequest
    from wattcast.lab.gpuwattch.trace_run import trace_to_plain

    request = TraceRequest(**asked)
    request, trace = replace(request, figure=request.figure or plot is not None), request.trace
    if save_config is not None:
        chip = find_measured_chip(request.architecture)
        file = request.architecture
        if chip:
            used = measured_energies.measured_architecture(chip)
        else:
            used = architecture.read_architecture(file)
        architecture.write_architecture(used, save_config)
    source = CounterSource(resolve_name("counter source", counters, list(CounterSource)))
    source = simulator_logs.find_source(trace) if source is CounterSource.AUTO else source
    if request.follow_s and source is not CounterSource.TRACE:
        raise bad_value(
            "--follow", "a metric trace, which grows", f"{trace.name} ({source})", "Leave it out."
        )
    if source is not CounterSource.TRACE:
        return _show_kernel_power(compute_kernel_power(request, source))

    def mean_power(found: TraceResult) -> str:
        return show(found.energy_j / found.duration_s, "W") if found.duration_s else "no power"

    def tell(so_far: TraceResult) -> None:
        env.say(
            f"{so_far.samples} samples, {show(so_far.duration_s, 's')}: "
            f"{mean_power(so_far)} mean so far."
        )

    job, result = simulated_power.make_power_trace(request, tell if request.follow_s else None)
    if plot is not None and result.timeline is not None and result.duration_s:
        env.save_plot(simulated_power.draw_trace_power(request, job, result), plot)
    mean = f"{mean_power(result)} mean power" if result.duration_s else "no mean power"
    first = (
        f"{result.samples} samples, {show(result.duration_s, 's')}, "
        f"{len(result.kernels)} kernels, {mean}"
    )
    notes = [f"note: {note}." for note in result.notes]
    text = "\n".join([first, *map(str, result.files)])
    return CommandOutput(
        partial(trace_to_plain, job, result), text, notes=notes, fault=result.fault
    )


def _show_kernel_power(kernels: CountedKernelPower) -> CommandOutput:
    """Return the watts of kernels; sums that lack a component are lower bounds, and end with 3."""
    lines = [
        f"{name[:60]:60s} {kernels.describe_kernel(row)}" for row, name in enumerate(kernels.names)
    ]
    lines.append(str(kernels.file))
    notes = [f"note: {note}." for note in kernels.notes]
    if not kernels.is_lower_bound:
        return CommandOutput(kernels.to_plain, "\n".join(lines), notes=notes)
    notes.append(f"note: {kernels.describe_unseen()}.")
    text = "\n".join(lines)
    return CommandOutput(kernels.to_plain, text, notes=notes, exit_code=ExitCode.PARTIAL)


@command("lab power-meter")
def power_meter(
    env: Environment,
    config: Annotated[
        Path,
        Option(
            "Architecture file: GPUWattch or AccelWattch XML; or a GPU with "
            "energies: h200 (measured), a100-sxm-80gb, h100-sxm, h100-nvl, gh200, b200, t4, "
            "rtx-3070, rtx-3090, rtx-4090 (carried over)."
        ),
    ],
    energies: Annotated[
        Path | None, Option("Energies per count; default: from the architecture.")
    ] = None,
    clock: Annotated[
        str | None, Option("Core clock at the start; default: from the files.")
    ] = None,
    sms: Annotated[int | None, Option("Number of SMs, where no file says.")] = None,
    header: Annotated[bool, Option("Print where the C++ header is, and end.")] = False,
) -> None:
    """Answer a simulator in another process sample by sample: counters on stdin, watts by component
    on stdout.

    A C++ simulator such as GPGPU-Sim includes wattcast_power.hpp, which starts this command and
    talks to it."""
    from wattcast.lab.gpuwattch.component_build import (
        ClockSetting,
        PowerMeter,
        answer_samples,
        build_component_model,
    )
    from wattcast.lab.gpuwattch.simulated_chip import read_chip
    from wattcast.lab.gpuwattch.trace_request import TraceRequest

    if header:
        env.stdout.write(f"{files('wattcast.lab.gpuwattch').joinpath('wattcast_power.hpp')}\n")
        return
    hertz = parse(clock, "Hz", "--clock") if clock else None
    description = read_chip(
        TraceRequest(
            config,
            config,
            energies,
            Path(),
            sm_count=sms,
            clock_hz=hertz,
        )
    )
    chip = description.architecture
    count = description.config.sm_count
    built = build_component_model(
        chip,
        description.table,
        description.components,
        sm_count=count,
        voltage=description.voltage,
    )
    meter = PowerMeter(
        built.model, ClockSetting(description.clock_hz), chip.dialect, scaling=chip.all_scaling()
    )

    def answer(line: str) -> None:
        env.stdout.write(line + "\n")
        env.stdout.flush()

    answer_samples(meter, sys.stdin, answer, lambda text: env.say(f"note: {text}."))


@command("lab accelwattch")
def accelwattch(
    gpu: Annotated[
        str,
        Option(
            "h200 (measured), a100-sxm-80gb, h100-sxm, b200 and others (carried over).",
            positional=True,
        ),
    ],
    out: Annotated[Path | None, Option("Write the architecture here, as XML.")] = None,
    energies: Annotated[
        Path | None, Option("Write the energies it multiplies here, .yaml.")
    ] = None,
    base: Annotated[
        Path | None,
        Option(
            "A simulator's own AccelWattch XML: its tree and sizes stay, so that the "
            "simulator reads it."
        ),
    ] = None,
    judge: Annotated[
        bool, Option("Also compare with operators of the H200 that were never used.")
    ] = False,
    refit: Annotated[bool, Option("Fit again to the database instead of what ships.")] = False,
) -> CommandOutput:
    """Write AccelWattch XML of a current GPU: energies fitted to our measurements, an interval
    beside each.

    Example: wattcast lab accelwattch h200 --out h200.xml --base accelwattch_sass_sim.xml
    """
    from wattcast.lab.gpuwattch import (
        architecture,
        energy_table,
        measured_energies,
    )

    chip = measured_energies.measured_chip(gpu)
    folder = database_folder(measured_energies.PARENT)
    if refit:
        if chip.name != measured_energies.PARENT:
            expected = f"{measured_energies.PARENT}, which has a database"
            raise bad_value("--refit", expected, chip.name)
        chip = replace(chip, values=measured_energies.fit_measured_energies(folder))

    tree = architecture.read_architecture(base) if base is not None else None
    fitted = measured_energies.measured_architecture(chip, tree)
    if out is not None:
        architecture.write_architecture(fitted, out)
    if energies is not None:
        table = measured_energies.measured_table(chip, fitted)
        write_whole(energies, energy_table.format_energy_table(table))

    plain: dict[str, Any] = {
        "gpu": chip.name,
        "source": chip.source,
        "judged": chip.judgement,
        "values": {name: vars(value) for name, value in chip.values.items()},
    }
    lines = [f"{chip.name}: {chip.source}", *_list_energies(chip.values)]
    lines.append(f"error of watts: {chip.judgement}")
    if judge:
        judged = measured_energies.judge_held_out(folder)
        plain["held_out"] = vars(judged) | {"gpu": measured_energies.PARENT}
        if chip.name != measured_energies.PARENT:
            lines.append(
                f"no counted operator of {chip.name} was measured: its own error is not known. "
                f"That of the {measured_energies.PARENT.upper()}'s file, which it was carried from:"
            )
        lines += _describe_held_out(judged)
    partly = (
        "note: without --base the file holds what Wattcast reads; a simulator needs "
        "the tree of its own file."
    )
    notes = [partly] if base is None and out is not None else []
    return CommandOutput(plain, "\n".join(lines), notes=notes)


def _list_energies(values: Mapping[str, MeasuredValue]) -> list[str]:
    """Return a line for each energy: its value, its interval and the counters it is shared by."""
    from wattcast.lab.gpuwattch.measured_energies import (
        ACTIVE,
        CONSTANT,
        TERMS,
    )

    lines = []
    for name, value in values.items():
        if name in (CONSTANT, ACTIVE):
            size = 1.0
            unit = "W"
            counters = ""
        else:
            size = 1e12
            unit = "pJ"
            counters = ", ".join(TERMS[name].counters[1:])
        ends = f"{value.low * size:9.4g} to {value.high * size:.4g}"
        lines.append(f"{name:15s} {value.value * size:9.4g} {unit:2s} {ends:20s} {counters}")
    return lines


def _describe_held_out(judged: HeldOutJudgement) -> list[str]:
    """Return the error on operators that were never used, over all rows and by family."""
    lines = [
        f"{judged.rows} rows of {judged.operators} operators never used: {judged.mape:.2f} % "
        f"(bias {judged.bias:+.2f} %; their mean power for all: {judged.constant:.1f} %)"
    ]
    for name, (rows, error) in judged.by_family.items():
        lines.append(f"  {name:12s} {rows:4d} rows {error:6.2f} %")
    return lines


@command("lab side-by-side")
def side_by_side(
    gpu: Annotated[
        str, Option("GPU with a database of counted operators.", positional=True)
    ] = "h200",
    kernels: Annotated[int, Option("Number of kernels to show.")] = 40,
    page: Annotated[Path | None, Option("Replace the tables at the end of this page.")] = None,
) -> CommandOutput:
    """Put measured kernels through forecast, counter model and components, and show where they
    differ.

    Example: wattcast lab side-by-side h200
    """
    from wattcast.lab.validate.power_checks import (
        compare_power_models,
        format_views,
        summarise_views,
    )

    if kernels < 3:
        raise bad_value("--kernels", "three or more", kernels)
    mark = f"<!-- wattcast lab side-by-side {gpu} -->".encode()
    text = b"" if page is None else read_bytes(page)
    if page is not None and mark not in text:
        raise bad_value(
            str(page), "a page with the command's name in a comment before its tables", "none"
        )
    views = compare_power_models(gpu, kernels)
    if page is not None:
        write_whole(page, text.partition(mark)[0] + mark + f"\n\n{format_views(views)}".encode())
    rows = [vars(view) | {"nearest": view.nearest, "dispute": view.dispute} for view in views]
    return CommandOutput({"kernels": rows, "summary": summarise_views(views)}, format_views(views))


@dataclass(frozen=True)
class ComponentFitOptions:
    """What is fitted, within which bounds, and where it is written."""

    columns: Annotated[
        list[str] | None, Option("A column to fit; default: all with the prefix.", "column")
    ] = None
    energies: Annotated[
        bool, Option("Columns are counts: fit joules per count, such as DRAM's.")
    ] = False
    bottom_up: Annotated[
        Path | None,
        Option(
            "Architecture file: columns are counts, its bottom-up energies make them "
            "watts, factors are fitted."
        ),
    ] = None
    shortest: Annotated[str, Option("Kernels shorter than this are dropped.")] = "0.5 ms"
    bounds: Annotated[str, Option("Bounds of every factor, declared beforehand.")] = "0.5:2"
    bound: Annotated[
        list[str] | None, Option("Bounds of one factor: NAME=low:high; NAME=1:1 fixes it.")
    ] = None
    order: Annotated[
        list[str] | None, Option("An order that factors keep: 'A<=B' or 'A<=1.5*B'.")
    ] = None
    architecture: Annotated[Path | None, Option("Architecture file to recalibrate.")] = None
    out: Annotated[Path | None, Option("Where to write it, as XML.")] = None


@command("lab fit component", "wattcast.lab.gpuwattch.component_fit:KernelColumns")
def fit_component(
    env: Environment,
    runs: Annotated[
        Path,
        Option(
            "CSV, one line per kernel: components' watts (or counts) and measured watts.",
            positional=True,
        ),
    ],
    choices: ComponentFitOptions,
    **layout: Any,
) -> CommandOutput:
    """Fit by bounded least squares on relative error; held-out errors beside the in-sample one,
    always.

    Example: wattcast lab fit component runs.csv --measured watts --prefix part_ --leave-out total
    --architecture gpu.xml --out recalibrated.xml
    """
    from wattcast.lab.gpuwattch import component_fit

    if (choices.architecture is None) != (choices.out is None):
        raise bad_value("--architecture and --out", "both or neither", "one")
    special = parse_pairs(choices.bound, "--bound", "NAME=low:high", _read_bounds)
    orders = tuple(component_fit.ValueOrdering.read(text) for text in choices.order or ())
    if choices.energies and choices.bottom_up is not None:
        raise bad_value("--energies and --bottom-up", "one of them", "both")
    table = _read_kernel_table(env, runs, choices, component_fit.KernelColumns(**layout))
    shortest_s = parse(choices.shortest, "s", "--shortest")
    limits = replace(_choose_limits(choices), special=special, orders=orders)
    fit = component_fit.fit_components(table, limits, shortest_s)
    if choices.architecture is not None and choices.out is not None:
        _write_recalibrated(fit, choices.architecture, choices.out, choices.energies)

    notes = []
    if fit.dropped:
        first_names = ", ".join(fit.dropped[:5])
        count = len(fit.dropped)
        notes.append(
            f"note: {count} kernels shorter than {choices.shortest} dropped: {first_names} ..."
        )
    return CommandOutput(fit.to_plain, _list_fitted_values(fit, choices.energies), notes=notes)


def _read_kernel_table(
    env: Environment,
    runs: Path,
    choices: ComponentFitOptions,
    columns: KernelColumns,
) -> MeasuredKernels:
    """Read the kernels to fit to; with ``--bottom-up`` their counts become watts."""
    from wattcast.lab.gpuwattch import component_fit

    counts = choices.energies or choices.bottom_up is not None
    table = component_fit.read_measured_kernels(runs, columns, choices.columns, rates=counts)
    if choices.bottom_up is None:
        return table

    from wattcast.lab.gpuwattch.architecture import read_architecture
    from wattcast.lab.gpuwattch.bottom_up.event_energies import (
        build_architecture_chip,
        make_energy_table,
    )

    architecture = read_architecture(choices.bottom_up)
    chip = build_architecture_chip(architecture)
    env.say(f"note: {chip.provenance}; its leakage and memory-controller constant are not fitted.")
    return component_fit.rates_to_watts(table, make_energy_table(chip, architecture.dialect))


def _choose_limits(choices: ComponentFitOptions) -> FitConstraints:
    """Return the bounds of all values: of energies, or those that the user gave for factors."""
    from wattcast.lab.gpuwattch import component_fit

    if choices.energies:
        return component_fit.ENERGY_CONSTRAINTS
    try:
        return component_fit.FitConstraints(_read_bounds(choices.bounds))
    except ValueError:
        raise bad_value("--bounds", "low:high, such as 0.5:2", choices.bounds) from None


def _write_recalibrated(
    fit: ComponentFit,
    architecture: Path,
    out: Path,
    fitted_energies: bool,
) -> None:
    """Write an architecture file whose energies are multiplied by the fitted factors."""
    from wattcast.lab.gpuwattch import component_fit
    from wattcast.lab.gpuwattch.architecture import read_architecture, write_architecture

    if fitted_energies:
        do = "Write energies into the architecture by hand."
        raise bad_value("--architecture", "factors", "energies", do)
    factors = dict(zip(fit.names, fit.value.tolist(), strict=True))
    write_architecture(component_fit.apply_factors(read_architecture(architecture), factors), out)


def _list_fitted_values(fit: ComponentFit, fitted_energies: bool) -> str:
    """List each value with what the kernels say of it, and the errors of the fit."""
    unit = " J" if fitted_energies else ""
    lines = []
    for name, value in zip(fit.names, fit.value.tolist(), strict=True):
        mark = "" if name in fit.determined else " (not driven)"
        if name in fit.at_bound:
            mark = " (at its bound)"
        lines.append(f"{name:16s} {value:12.5g}{unit}{mark}")
    score = fit.score
    lines.append(
        f"MAPE over {fit.kernels} kernels: {score.start:.2f} % before, "
        f"{score.in_sample:.2f} % in sample, {score.leave_one_out:.2f} % leave one out, "
        f"{score.leave_application_out:.2f} % leave one application out; "
        f"a constant {score.constant:.2f} %"
    )
    return "\n".join(lines)


def _read_bounds(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    return float(low), float(high)


@dataclass(frozen=True)
class EnergyOptions:
    """Energies per event of a chip, built from its architecture (--energies)."""

    energies: Annotated[
        bool, Option("Show energies per event, leakage and area, built from the architecture.")
    ] = False
    feature_size: Annotated[
        str | None,
        Option(
            "With --energies: feature size such as 28nm, or a process such as 'TSMC 12 nm FFN'."
        ),
    ] = None
    voltage: Annotated[str | None, Option("With --energies: core voltage, such as 0.9V.")] = None
    temperature: Annotated[
        str | None, Option("With --energies: temperature of the die, such as 80C.")
    ] = None
    change: Annotated[
        list[str] | None,
        Option(
            "With --energies: PART=FACTOR, PART one of registers, l1, shared, l2, sms; may repeat."
        ),
    ] = None
    dialect: Annotated[
        str | None,
        Option("With --energies: counters of gpuwattch or accelwattch; default: the file's."),
    ] = None
    save: Annotated[
        Path | None,
        Option(
            "With --energies: also write them as a table for power-trace (.yaml), or a GPU's "
            "fitted ones as AccelWattch XML (.xml)."
        ),
    ] = None
    plot: Annotated[Path | None, PLOT_FILE] = None


_ZERO_C_IN_K = 273.15


def show_bottom_up(
    env: Environment,
    name: str,
    build: EnergyOptions,
) -> CommandOutput:
    """Build energies per event from an architecture, and save or draw them where asked for."""
    from wattcast.lab.gpuwattch.bottom_up import chip_design, event_energies
    from wattcast.lab.gpuwattch.bottom_up.technology import explain_feature
    from wattcast.lab.gpuwattch.energy_table import format_energy_table
    from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect

    settings = _read_process(build)
    parts = ", ".join(event_energies.SIZE_KNOBS)
    form = f"PART=FACTOR with a part of {parts}"
    factors = parse_pairs(build.change or [], "--change", form, float)

    original, gpu, dialect = _build_chip(name, settings)
    if build.dialect is not None:
        dialects = list(SimulatorDialect)
        dialect = SimulatorDialect(resolve_name("dialect", build.dialect, dialects))
    changed = original
    if factors:
        changed = chip_design.build_chip(event_energies.scale_design(original.design, factors))
    if build.save is not None and build.save.suffix.lower() == ".xml":
        _save_accelwattch(name, build)
    elif build.save is not None:
        table = event_energies.make_energy_table(changed, dialect)
        write_whole(build.save, format_energy_table(table))
    if build.plot is not None:
        env.save_plot(event_energies.draw_size_changes(changed.design), build.plot)

    moved = event_energies.compare_chips(original, changed) if factors else ()
    plain = event_energies.energies_to_plain(changed, gpu)
    fitted_file = None if gpu is None else _describe_fitted_file(gpu.name)
    if fitted_file is not None:
        plain = plain | {"accelwattch_file": fitted_file}

    def print_text(console: Console) -> None:
        event_energies.print_energies(console, plain)
        if fitted_file is not None:
            console.print(
                f"Fitted energies for AccelWattch: {fitted_file['command']}. Error of their "
                f"watts: {fitted_file['judged']}.",
                markup=False,
                highlight=False,
            )
        if moved:
            event_energies.print_changes(console, moved)

    shown = dict(plain)
    if moved:
        shown["changes"] = [vars(change) | {"ratio": change.ratio} for change in moved]
    notes = []
    if _names_number(build.feature_size, gpu):
        warning = explain_feature(original.design.feature_nm)
        if warning:
            notes.append(f"warning: {warning}.")
    return CommandOutput(shown, print_text, notes=notes)


def _describe_fitted_file(name: str) -> dict[str, str] | None:
    """Return the command that writes a GPU's AccelWattch file, and how far its watts are off."""
    from wattcast.lab.gpuwattch import measured_energies

    if name not in (measured_energies.PARENT, *measured_energies.CARRIED):
        return None
    return {
        "command": f"wattcast lab accelwattch {name} --out {name}.xml",
        "judged": measured_energies.measured_chip(name).judgement,
    }


def _save_accelwattch(name: str, build: EnergyOptions) -> None:
    """Write a GPU's fitted energies as AccelWattch XML; nothing that was set can change them."""
    from wattcast.lab.gpuwattch import architecture, measured_energies

    assert build.save is not None
    settings = (build.feature_size, build.voltage, build.temperature, build.change)
    if Path(name).suffix.lower() == ".xml" or any(settings):
        expected = "a name that ends in .yaml for energies that are built from sizes"
        do = "An .xml file holds the fitted energies of a GPU of the catalogue."
        raise bad_value("--save", expected, build.save.name, do)
    chip = measured_energies.measured_chip(name)
    architecture.write_architecture(measured_energies.measured_architecture(chip), build.save)


def _read_process(build: EnergyOptions) -> dict[str, Any]:
    """Return the feature size, the voltage and the temperature that were set, in nm, V and K."""
    from wattcast.lab.gpuwattch.bottom_up.technology import read_feature_nm

    settings: dict[str, Any] = {
        "feature_nm": None,
        "voltage_v": None,
        "temperature_k": None,
    }
    if build.feature_size is not None:
        settings["feature_nm"] = read_feature_nm(build.feature_size, "--feature-size")
    if build.voltage is not None:
        settings["voltage_v"] = parse(build.voltage, "V", "--voltage")
    if build.temperature is not None:
        celsius = parse(build.temperature, "C", "--temperature")
        settings["temperature_k"] = celsius + _ZERO_C_IN_K
    return settings


def _build_chip(
    name: str,
    settings: dict[str, Any],
) -> tuple[BuiltChip, Gpu | None, SimulatorDialect]:
    """Build the chip of an architecture file or of a GPU; return which GPU, and the dialect."""
    from wattcast.lab.gpuwattch.architecture import read_architecture
    from wattcast.lab.gpuwattch.bottom_up import chip_design, event_energies
    from wattcast.lab.gpuwattch.trace_reading import SimulatorDialect
    from wattcast.predictor.api import find_gpu

    if Path(name).suffix.lower() == ".xml":
        architecture = read_architecture(Path(name))
        chip = event_energies.build_architecture_chip(architecture, **settings)
        return chip, None, architecture.dialect
    gpu = find_gpu(name)
    chip = chip_design.build_chip(chip_design.design_from_gpu(gpu, **settings))
    return chip, gpu, SimulatorDialect.GPUWATTCH


def _names_number(feature_size: str | None, gpu: Gpu | None) -> bool:
    """Whether a number of nanometres was written where a process might have been meant.

    An architecture file always holds a number.
    """
    if feature_size is None:
        return gpu is None
    return feature_size.strip()[:1].isdigit()


@command("lab check-energies")
def check_energies(
    env: Environment,
    reference: Annotated[
        Path | None,
        Option("Folder with accelwattch/ and simulator_runs/; default: WATTCAST_REFERENCE."),
    ] = None,
    gpu: Annotated[str, Option("GPU whose fitted energies to compare with.")] = "h200",
    plot: Annotated[Path | None, PLOT_FILE] = None,
) -> CommandOutput:
    """Compare bottom-up energies with those dumped from a simulator or fitted to a measured GPU."""
    from wattcast.lab.gpuwattch.bottom_up import event_energies
    from wattcast.lab.validate.ledger import format_ledger
    from wattcast.lab.validate.public_checks import dumped_energies

    folder = reference or reference_folder(env.variables)
    if folder is not None and not (folder / "accelwattch").is_dir():
        raise bad_value("--reference", "a folder with accelwattch/ in it", str(folder))
    study = dumped_energies if folder is not None else None
    dumped = study.dumped_ratios(folder) if study else []
    ratios = (
        dumped
        + (study.leakage_area_ratios(folder) if study else [])
        + event_energies.fitted_ratios(gpu)
    )
    if plot is not None:
        if study is None:
            do = f"Name them with {REFERENCE_VARIABLE}, in a checkout of the repository."
            raise bad_value("--plot", "dumped energies to compare with", "none", do)
        env.save_plot(study.draw_energy_ratios(dumped), plot)
    rows = [
        *(study.make_dumped_rows(folder) if study else []),
        *event_energies.make_energy_rows(gpu),
    ]

    def print_text(console: Console) -> None:
        event_energies.print_ratios(console, ratios)
        env.stdout.write(format_ledger(rows) + "\n")

    missing = (
        "note: no dumped energies here; name their folder with --reference or "
        f"{REFERENCE_VARIABLE}."
    )
    plain = {"ratios": [vars(r) | {"ratio": r.ratio} for r in ratios], "rows": rows}
    return CommandOutput(plain, print_text, notes=[] if study else [missing])
