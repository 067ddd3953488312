"""``wattcast lab power-trace``, ``lab fit component``, ``lab check-energies`` and ``gpus show --energies``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.shared_options import Environment, Json, Plot, argument, folded, option, save_plot
from wattcast.core.errors import bad_value, resolve_name
from wattcast.core.strict_files import REFERENCE_VARIABLE, load_study, read_bytes, reference_folder
from wattcast.core.units import parse, show
from wattcast.core.whole_files import write_whole

ChipOption = Annotated[
    Path,
    option(
        "Architecture file: GPUWattch or AccelWattch XML, or our YAML; or a GPU with measured energies: h200, "
        "a100-sxm-80gb, h100-sxm, b200."
    ),
]
_run = folded("The simulated run, where no file says")
_chip = folded("The chip")
_file = folded("Files")


def power_trace(
    ctx: typer.Context,
    trace: Annotated[
        Path, argument("Metric trace of GPUWattch or AccelWattch, plain or .gz; power report, log, gem5's stats.txt.")
    ],
    config: ChipOption,
    energies: Annotated[
        Path | None, option("Energies per count: dumped CSV or our YAML; default: from the architecture.")
    ] = None,
    out: Annotated[Path, option("Folder for the results.")] = Path("power"),
    compat: Annotated[str | None, option("gpuwattch|accelwattch: with the original's quirks.")] = None,
    counters: Annotated[
        str, option("What the file is: auto|trace|power-report|accel-sim|gem5|accelwattch-hw|ncu.")
    ] = "auto",
    kernels: Annotated[
        Path | None,
        option("Kernel names, one a line; CSV name,uid,samples|cycles,ipc,threads; or a power report or log."),
    ] = None,
    steady: Annotated[str | None, option("Steady states: watts:samples, as 8:4.")] = None,
    follow: Annotated[str | None, option("Read a growing trace until nothing has come for so long: 10s.")] = None,
    simulator_config: Annotated[Path | None, _run("gpgpusim.config, if not beside the XML.")] = None,
    threads_per_warp: Annotated[float | None, _run("Active threads of a warp.")] = None,
    sms: Annotated[int | None, _run("Number of SMs.")] = None,
    clock: Annotated[str | None, _run("Core clock, such as 700MHz.")] = None,
    sample_cycles: Annotated[int | None, _run("Core cycles of a sample.")] = None,
    ran_with: Annotated[Path | None, _run("AccelWattch XML the simulator ran with, if another one.")] = None,
    components: Annotated[list[Path] | None, _chip("YAML with further components.")] = None,
    dvfs: Annotated[Path | None, _chip("CSV sample,clock,voltage, from there on.")] = None,
    leakage: Annotated[Path | None, _chip("McPAT's area and leakage listing.")] = None,
    gate_idle_sms: Annotated[bool, _chip("Idle SMs do not leak.", "--gate-idle-sms")] = False,
    gzip: Annotated[bool | None, _file("Default: as the trace is.", "--gzip/--plain")] = None,
    parquet: Annotated[bool, _file("Write every sample to samples.parquet.")] = True,
    figure: Annotated[bool, _file("Draw components.png.")] = True,
    date_stamp: Annotated[bool, _file("Name files as the manual does, with the date.", "--date-stamp")] = False,
    save_config: Annotated[Path | None, _file("Also write the architecture, .xml or .yaml.")] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Report, power trace, metric trace and steady states from the counters a simulator wrote.

    Example: wattcast lab power-trace --config gpuwattch_gtx480.xml metric_trace.log.gz --energies gtx480.csv
    --compat gpuwattch --out power
    """
    from wattcast.gpuwattch.architecture import read_architecture, write_architecture
    from wattcast.gpuwattch.measured_energies import measured_architecture
    from wattcast.gpuwattch.simulator_logs import CounterSource, find_source
    from wattcast.gpuwattch.trace_reading import SimulatorDialect
    from wattcast.gpuwattch.trace_request import (
        TraceRequest,
        compute_kernel_power,
        find_measured_chip,
        make_power_trace,
    )
    from wattcast.gpuwattch.trace_run import TraceResult, trace_to_plain

    env: Environment = ctx.obj
    if save_config is not None:
        chip = find_measured_chip(config)
        write_architecture(measured_architecture(chip) if chip else read_architecture(config), save_config)
    request = TraceRequest(
        trace,
        config,
        energies,
        out,
        SimulatorDialect(resolve_name("dialect", compat, list(SimulatorDialect))) if compat else None,
        simulator_config,
        kernels,
        tuple(components or ()),
        dvfs,
        leakage,
        gate_idle_sms,
        threads_per_warp,
        sms,
        parse(clock, "Hz", "--clock") if clock else None,
        sample_cycles,
        steady,
        gzip,
        parquet,
        figure or plot is not None,
        parse(follow, "s", "--follow") if follow else 0.0,
        date_stamp,
        ran_with,
    )
    source = CounterSource(resolve_name("counter source", counters, [c.value for c in CounterSource]))
    if source is CounterSource.AUTO:
        source = find_source(trace)
    if follow and source is not CounterSource.TRACE:
        raise bad_value("--follow", "a metric trace, which grows", f"{trace.name} ({source})", "Leave it out.")
    if source is not CounterSource.TRACE:
        kernels_found = compute_kernel_power(request, source)
        if json:
            env.json(kernels_found.to_plain())
        else:
            for name, watts in zip(kernels_found.names, kernels_found.power.total_w, strict=True):
                env.stdout.write(f"{name[:60]:60s} {watts:10.3f} W\n")
            env.stdout.write(f"{kernels_found.file}\n")
        for note in kernels_found.notes:
            env.say(f"note: {note}.")
        if kernels_found.lost or kernels_found.partial:
            gone, some = ", ".join(kernels_found.lost) or "none", ", ".join(kernels_found.partial) or "none"
            env.say(f"note: components no counter shows: {gone}; shown in part: {some}.")
        return

    def tell(so_far: TraceResult) -> None:
        watts = show(so_far.energy_j / so_far.duration_s, "W") if so_far.duration_s else "no power"
        env.say(f"{so_far.samples} samples, {show(so_far.duration_s, 's')}: {watts} mean so far.")

    job, result = make_power_trace(request, tell if follow else None)
    if plot is not None and result.timeline is not None and result.duration_s:
        from wattcast.gpuwattch.trace_outputs import draw_component_power

        title = f"{trace.name}: {show(result.energy_j / result.duration_s, 'W')} mean"
        origin = energies.name if energies else "bottom-up"
        save_plot(env, draw_component_power(result.timeline, job.model.parts, title, origin), plot)
    if json:
        env.json(trace_to_plain(job, result))
    else:
        mean_w = show(result.energy_j / result.duration_s, "W") if result.duration_s else "no"
        lasting = show(result.duration_s, "s")
        env.stdout.write(f"{result.samples} samples, {lasting}, {len(result.kernels)} kernels, {mean_w} mean power\n")
        for path in result.files:
            env.stdout.write(f"{path}\n")
    for note in result.notes:
        env.say(f"note: {note}.")
    if result.fault is not None:
        raise result.fault


def power_meter(
    ctx: typer.Context,
    config: ChipOption,
    energies: Annotated[Path | None, option("Energies per count; default: from the architecture.")] = None,
    clock: Annotated[str | None, option("Core clock at the start; default: from the files.")] = None,
    sms: Annotated[int | None, option("Number of SMs, where no file says.")] = None,
    header: Annotated[bool, option("Print where the C++ header is, and end.", "--header")] = False,
) -> None:
    """Answer a simulator in another process sample by sample: counters on stdin, watts by component on stdout.

    A C++ simulator such as GPGPU-Sim includes wattcast_power.hpp, which starts this command and talks to it.
    """
    from importlib.resources import files

    from wattcast.gpuwattch.component_build import ClockSetting, PowerMeter, answer_samples, build_component_model
    from wattcast.gpuwattch.trace_request import TraceRequest, read_chip

    env: Environment = ctx.obj
    if header:
        env.stdout.write(f"{files('wattcast.gpuwattch').joinpath('wattcast_power.hpp')}\n")
        return
    hertz = parse(clock, "Hz", "--clock") if clock else None
    found = read_chip(TraceRequest(config, config, energies, Path(), sm_count=sms, clock_hz=hertz))
    built = build_component_model(
        found.architecture,
        found.table,
        found.components,
        sm_count=found.config.sm_count,
        voltage=found.voltage,
    )
    meter = PowerMeter(
        built.model,
        ClockSetting(found.clock_hz),
        found.architecture.dialect,
        scaling=found.architecture.all_scaling(),
    )

    def answer(line: str) -> None:
        env.stdout.write(line + "\n")
        env.stdout.flush()

    answer_samples(meter, sys.stdin, answer)


def accelwattch(
    ctx: typer.Context,
    gpu: Annotated[str, argument("h200 (measured), a100-sxm-80gb, h100-sxm or b200 (carried over).")],
    out: Annotated[Path | None, option("Write the architecture here, .xml or .yaml.")] = None,
    energies: Annotated[Path | None, option("Write the energies it multiplies here, .yaml.")] = None,
    base: Annotated[
        Path | None,
        option("A simulator's own AccelWattch XML: its tree and sizes stay, so that the simulator reads it."),
    ] = None,
    judge: Annotated[bool, option("Also compare with operators that were never used.", "--judge")] = False,
    refit: Annotated[bool, option("Fit again to the database instead of what ships.", "--refit")] = False,
    json: Json = False,
) -> None:
    """Write AccelWattch XML of a current GPU: energies fitted to our measurements, an interval beside each.

    Example: wattcast lab accelwattch h200 --out h200.xml --base accelwattch_sass_sim.xml
    """
    from wattcast.core.measured_rows import database_folder
    from wattcast.gpuwattch import measured_energies
    from wattcast.gpuwattch.architecture import read_architecture, write_architecture
    from wattcast.gpuwattch.energy_table import format_energy_table

    env: Environment = ctx.obj
    chip = measured_energies.measured_chip(gpu)
    folder = database_folder(measured_energies.PARENT)
    if refit and chip.name != measured_energies.PARENT:
        raise bad_value("--refit", f"{measured_energies.PARENT}, which has a database", chip.name)
    if refit:
        chip = replace(chip, values=measured_energies.fit_measured_energies(folder))
    values = chip.values
    made = measured_energies.measured_architecture(chip, read_architecture(base) if base is not None else None)
    if out is not None:
        write_architecture(made, out)
    if energies is not None:
        write_whole(energies, format_energy_table(measured_energies.measured_table(chip, made)))
    judged = measured_energies.judge_held_out(folder) if judge else None
    if json:
        plain = {"gpu": chip.name, "source": chip.source, "values": {k: vars(v) for k, v in values.items()}}
        env.json(plain | ({"held_out": vars(judged)} if judged else {}))
        return
    env.stdout.write(f"{chip.name}: {chip.source}\n")
    for name, value in values.items():
        watts = name in (measured_energies.CONSTANT, measured_energies.ACTIVE)
        size, unit = (1.0, "W") if watts else (1e12, "pJ")
        ends = f"{value.low * size:9.4g} to {value.high * size:.4g}"
        shared = ", ".join(measured_energies.TERMS[name].counters[1:]) if not watts else ""
        env.stdout.write(f"{name:15s} {value.value * size:9.4g} {unit:2s} {ends:20s} {shared}\n")
    if judged is not None:
        env.stdout.write(
            f"{judged.rows} rows of {judged.operators} operators never used: {judged.mape:.2f} % "
            f"(bias {judged.bias:+.2f} %; their mean power for all: {judged.constant:.1f} %)\n"
        )
        for family, (rows, error) in judged.by_family.items():
            env.stdout.write(f"  {family:12s} {rows:4d} rows {error:6.2f} %\n")
    if base is None and out is not None:
        env.say(
            "note: without --base the file holds what Wattcast reads; a simulator needs the tree of its own file."
        )


def side_by_side(
    ctx: typer.Context,
    gpu: Annotated[str, argument("GPU with a database of counted operators.")] = "h200",
    kernels: Annotated[int, option("How many kernels.")] = 40,
    page: Annotated[Path | None, option("Replace the tables at the end of this page.")] = None,
    json: Json = False,
) -> None:
    """Put measured kernels through forecast, counter model and components, and show where they differ.

    Example: wattcast lab side-by-side h200
    """
    from wattcast.validate.power_checks import compare_power_models, format_views, summarise_views

    env: Environment = ctx.obj
    if kernels < 3:
        raise bad_value("--kernels", "three or more", kernels)
    mark, text = f"<!-- wattcast lab side-by-side {gpu} -->".encode(), b"" if page is None else read_bytes(page)
    if page is not None and mark not in text:
        raise bad_value(str(page), "a page with the command's name in a comment before its tables", "none")
    views = compare_power_models(gpu, kernels)
    if page is not None:
        write_whole(page, text.partition(mark)[0] + mark + f"\n\n{format_views(views)}".encode())
    if json:
        rows = [vars(view) | {"nearest": view.nearest, "dispute": view.dispute} for view in views]
        env.json({"kernels": rows, "summary": summarise_views(views)})
    else:
        env.stdout.write(format_views(views))


def fit_component(
    ctx: typer.Context,
    runs: Annotated[Path, argument("CSV, one line per kernel: components' watts (or counts) and measured watts.")],
    measured: Annotated[str, option("Column of measured watts.")],
    prefix: Annotated[str, option("Component columns start with this.")] = "",
    columns: Annotated[list[str] | None, option("A column to fit; default: all with the prefix.", "--column")] = None,
    leave_out: Annotated[list[str] | None, option("A column not to fit, such as a total.")] = None,
    energies: Annotated[
        bool, option("Columns are counts: fit joules per count, such as DRAM's.", "--energies")
    ] = False,
    bottom_up: Annotated[
        Path | None,
        option("Architecture file: columns are counts, its bottom-up energies make them watts, factors are fitted."),
    ] = None,
    kernel: Annotated[str, option("Column of kernel names.")] = "kernel",
    application: Annotated[str | None, option("Column of programs; default: from the kernel's name.")] = None,
    duration: Annotated[str | None, option("Column of seconds.")] = None,
    cycles: Annotated[str | None, option("Column of cycles, with --clock, instead of seconds.")] = None,
    clock: Annotated[str | None, option("Core clock, such as 1447MHz.")] = None,
    shortest: Annotated[str, option("Kernels shorter than this are dropped.")] = "0.5 ms",
    bounds: Annotated[str, option("Bounds of every factor, declared beforehand.")] = "0.5:2",
    bound: Annotated[list[str] | None, option("Bounds of one: NAME=low:high; NAME=1:1 fixes it.")] = None,
    order: Annotated[list[str] | None, option("An ordering: 'A<=B' or 'A<=1.5*B'.")] = None,
    architecture: Annotated[Path | None, option("Architecture file to recalibrate.")] = None,
    out: Annotated[Path | None, option("Where to write it, .xml or .yaml.")] = None,
    json: Json = False,
) -> None:
    """Fit by bounded least squares on relative error; held-out errors beside the in-sample one, always.

    Example: wattcast lab fit component runs.csv --measured watts --prefix part_ --leave-out total
    --architecture gpu.xml --out recalibrated.xml
    """
    from wattcast.gpuwattch.architecture import read_architecture, write_architecture
    from wattcast.gpuwattch.component_fit import (
        ENERGY_CONSTRAINTS,
        FitConstraints,
        KernelColumns,
        ValueOrdering,
        apply_factors,
        fit_energies,
        fit_scaling,
        rates_to_watts,
        read_measured_kernels,
    )

    env: Environment = ctx.obj
    if (architecture is None) != (out is None):
        raise bad_value("--architecture and --out", "both or neither", "one")
    special = {}
    for text in bound or ():
        named, equals, ends = text.partition("=")
        if not equals:
            raise bad_value("--bound", "NAME=low:high", text)
        special[named] = _parse_bounds(ends, "--bound")
    orders = tuple(ValueOrdering.read(text) for text in order or ())
    clock_hz = parse(clock, "Hz", "--clock") if clock else None
    layout = KernelColumns(
        measured, kernel, application, duration, cycles, clock_hz, prefix, leave_out=tuple(leave_out or ())
    )
    if energies and bottom_up is not None:
        raise bad_value("--energies and --bottom-up", "one of them", "both")
    table = read_measured_kernels(runs, layout, columns, rates=energies or bottom_up is not None)
    if bottom_up is not None:
        from wattcast.gpuwattch.bottom_up.event_energies import energies_of_file, make_energy_table

        built, dialect = energies_of_file(bottom_up)
        table = rates_to_watts(table, make_energy_table(built, dialect))
        env.say(f"note: {built.provenance}; its leakage and memory-controller constant are not fitted.")
    shortest_s = parse(shortest, "s", "--shortest")
    if energies:
        wide = FitConstraints(ENERGY_CONSTRAINTS.bounds, special, orders, ENERGY_CONSTRAINTS.prior_weight)
        found = fit_energies(table, wide, shortest_s)
    else:
        found = fit_scaling(table, FitConstraints(_parse_bounds(bounds, "--bounds"), special, orders), shortest_s)
    if architecture is not None and out is not None:
        if energies:
            raise bad_value("--architecture", "factors", "energies", "Write energies into the architecture by hand.")
        factors = dict(zip(found.names, found.value.tolist(), strict=True))
        write_architecture(apply_factors(read_architecture(architecture), factors), out)
    if json:
        env.json(found.to_plain())
        return
    for name, value in zip(found.names, found.value.tolist(), strict=True):
        mark = " (at its bound)" if name in found.at_bound else "" if name in found.determined else " (not driven)"
        env.stdout.write(f"{name:16s} {value:12.5g}{' J' if energies else ''}{mark}\n")
    score = found.score
    env.stdout.write(
        f"MAPE over {found.kernels} kernels: {score.start:.2f} % before, {score.in_sample:.2f} % in sample, "
        f"{score.leave_one_out:.2f} % leave one out, {score.leave_application_out:.2f} % leave one application out; "
        f"a constant {score.constant:.2f} %\n"
    )
    if found.dropped:
        env.say(
            f"note: {len(found.dropped)} kernels shorter than {shortest} dropped: {', '.join(found.dropped[:5])} ..."
        )


def _parse_bounds(text: str, where: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise bad_value(where, "low:high, such as 0.5:2", text) from None


_ZERO_C_IN_K = 273.15


def print_bottom_up(
    env: Environment,
    name: str,
    feature_size: str | None,
    voltage: str | None,
    temperature: str | None,
    changes: list[str],
    save: Path | None,
    plot: Path | None,
    json: bool,
) -> None:
    """Build energies per event from an architecture, print them, and save or draw them where asked for."""
    from wattcast.gpuwattch.bottom_up import event_energies
    from wattcast.gpuwattch.bottom_up.chip_model import build_chip
    from wattcast.gpuwattch.energy_table import format_energy_table
    from wattcast.gpuwattch.trace_reading import SimulatorDialect
    from wattcast.predictor.api import find_gpu

    settings = (
        None if feature_size is None else 1e9 * parse(feature_size, "m", "--feature-size"),
        None if voltage is None else parse(voltage, "V", "--voltage"),
        None if temperature is None else parse(temperature, "C", "--temperature") + _ZERO_C_IN_K,
    )
    factors = {}
    for text in changes:
        part, _, number = text.partition("=")
        try:
            factors[part.strip()] = float(number)
        except ValueError:
            known = ", ".join(event_energies.SIZE_KNOBS)
            raise bad_value("--change", f"PART=FACTOR with a part of {known}", text) from None
    if _is_architecture(Path(name)):
        found, dialect = event_energies.energies_of_file(Path(name), *settings)
    else:
        found, dialect = event_energies.energies_of_gpu(find_gpu(name), *settings), SimulatorDialect.GPUWATTCH
    changed = event_energies.scale_sizes(found, factors) if factors else found
    if save is not None:
        write_whole(save, format_energy_table(event_energies.make_energy_table(changed, dialect)))
    if plot is not None:
        save_plot(env, event_energies.draw_size_changes(changed.design), plot)
    moved = event_energies.compare_chips(build_chip(found.design), build_chip(changed.design)) if factors else ()
    plain = event_energies.energies_to_plain(changed)
    if json:
        said = [vars(change) | {"ratio": change.ratio} for change in moved]
        env.json(plain | ({"changes": said} if moved else {}))
        return
    console = env.console()
    event_energies.print_energies(console, plain)
    if moved:
        event_energies.print_changes(console, moved)


def _is_architecture(path: Path) -> bool:
    """Tell whether a file is an architecture: XML, or our YAML form of it."""
    if path.suffix.lower() in (".yaml", ".yml") and path.is_file():
        with path.open("rb") as stream:
            return b"wattcast: architecture" in stream.read(4096)
    return path.suffix.lower() == ".xml"


def check_energies(
    ctx: typer.Context,
    reference: Annotated[
        Path | None, option("Folder with accelwattch/ and simulator_runs/; default: WATTCAST_REFERENCE.")
    ] = None,
    gpu: Annotated[str, option("GPU whose fitted energies to compare with.")] = "h200",
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Compare bottom-up energies with those dumped from a simulator or fitted to a measured GPU."""
    from wattcast.gpuwattch.bottom_up import event_energies
    from wattcast.validate.ledger import format_ledger

    env: Environment = ctx.obj
    folder = reference or reference_folder(env.variables)
    if folder is not None and not (folder / "accelwattch").is_dir():
        raise bad_value("--reference", "a folder with accelwattch/ in it", str(folder))
    study = load_study("public_checks.dumped_energies") if folder is not None else None
    dumped = study.dumped_ratios(folder) if study else []
    ratios = dumped + (study.leakage_area_ratios(folder) if study else []) + event_energies.fitted_ratios(gpu)
    if plot is not None:
        if study is None:
            do = f"Name them with {REFERENCE_VARIABLE}, in a checkout of the repository."
            raise bad_value("--plot", "dumped energies to compare with", "none", do)
        save_plot(env, study.draw_energy_ratios(dumped), plot)
    rows = [*(study.make_dumped_rows(folder) if study else []), *event_energies.make_energy_rows(gpu)]
    if json:
        env.json({"ratios": [vars(r) | {"ratio": r.ratio} for r in ratios], "rows": rows})
    else:
        event_energies.print_ratios(env.console(), ratios)
        env.stdout.write(format_ledger(rows) + "\n")
    if study is None:
        env.say(f"note: no dumped energies here; name their folder with --reference or {REFERENCE_VARIABLE}.")
