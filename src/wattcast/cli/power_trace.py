"""``wattcast power-trace METRIC_TRACE --config X.xml [--energies TABLE] --out DIR``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Plot, save_one

app = typer.Typer(help="Power by component from a simulator's metric trace, in the simulator's own files.")


@app.command()
def command(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Argument(help="Metric trace of GPUWattch or AccelWattch, plain or .gz.")],
    config: Annotated[Path, typer.Option(help="Architecture file: GPUWattch or AccelWattch XML, or our YAML.")],
    energies: Annotated[
        Path | None,
        typer.Option(
            help="Energies per count: CSV dumped from a run, or our YAML; default: built from the architecture file."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("power"),
    compat: Annotated[
        str | None, typer.Option(help="gpuwattch|accelwattch: reproduce the original, quirks included.")
    ] = None,
    counters: Annotated[
        str,
        typer.Option(help="trace|accelwattch-hw|ncu: what the file is; hardware counters have a line per kernel."),
    ] = "trace",
    simulator_config: Annotated[
        Path | None, typer.Option(help="gpgpusim.config; default: the one beside the architecture file.")
    ] = None,
    kernels: Annotated[
        Path | None,
        typer.Option(help="Kernel names, one a line; or CSV name,uid,samples|cycles,ipc; or a simulator log."),
    ] = None,
    components: Annotated[list[Path] | None, typer.Option(help="YAML with further components.")] = None,
    dvfs: Annotated[Path | None, typer.Option(help="CSV sample,clock,voltage: settings from that sample on.")] = None,
    leakage: Annotated[Path | None, typer.Option(help="McPAT's area and leakage listing.")] = None,
    gate_idle_sms: Annotated[bool, typer.Option(help="Idle SMs are power-gated: they do not leak.")] = False,
    threads_per_warp: Annotated[
        float | None, typer.Option(help="Active threads of a warp, where the trace does not say; default: all.")
    ] = None,
    sms: Annotated[int | None, typer.Option(help="Number of SMs, where no file says.")] = None,
    clock: Annotated[str | None, typer.Option(help="Core clock, such as 700MHz; default: from the files.")] = None,
    sample_cycles: Annotated[
        int | None, typer.Option(help="Core cycles of a sample; default: from the files.")
    ] = None,
    steady: Annotated[str | None, typer.Option(help="Steady states: watts:samples, such as 8:4.")] = None,
    gzip: Annotated[bool | None, typer.Option("--gzip/--plain", help="Default: as the trace is.")] = None,
    parquet: Annotated[bool, typer.Option(help="Write every sample to samples.parquet.")] = True,
    figure: Annotated[bool, typer.Option(help="Draw components.png.")] = True,
    plot: Plot = None,
    save_config: Annotated[
        Path | None, typer.Option(help="Also write the architecture as .xml or .yaml, whichever is named.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report, power trace, metric trace and steady states from the counters a simulator wrote.

    Example: wattcast power-trace --config gpuwattch_gtx480.xml metric_trace.log.gz --energies gtx480.csv
    --compat gpuwattch --out power
    """
    from wattcast.activity.simulated import Dialect
    from wattcast.naming import resolve
    from wattcast.power.component.architecture_yaml import read_architecture, write_architecture
    from wattcast.power.component.hardware_counters import Counters, power_kernels
    from wattcast.power.component.service import TraceRequest, power_trace, summary
    from wattcast.units import parse, show

    env: Environment = ctx.obj
    if plot is not None:
        figure = True
    if save_config is not None:
        write_architecture(read_architecture(config), save_config)
    request = TraceRequest(
        trace,
        config,
        energies,
        out,
        Dialect(resolve("dialect", compat, [d.value for d in Dialect])) if compat else None,
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
        figure,
    )
    source = Counters(resolve("counter source", counters, [c.value for c in Counters]))
    if source is not Counters.TRACE:
        kernels_found = power_kernels(request, source)
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
    job, result = power_trace(request)
    if plot is not None and result.timeline is not None and result.duration_s:
        from wattcast.power.component.figure import stacked_area

        title = f"{trace.name}: {show(result.energy_j / result.duration_s, 'W')} mean"
        origin = energies.name if energies else "bottom-up"
        save_one(env, stacked_area(result.timeline, job.model.parts, title, origin), plot)
    if json:
        env.json(summary(job, result))
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
