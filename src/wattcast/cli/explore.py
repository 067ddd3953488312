"""``wattcast explore designs|clocks|gpus|algorithms|fleet|published``"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.figures import Drawn, Figures, Format, Plot, Which, save_one
from wattcast.cli.options import (
    AttentionName,
    Batch,
    Dp,
    DtypeName,
    HeadName,
    Image,
    PhaseName,
    Pp,
    Recompute,
    Seq,
    Skew,
    Source,
    StackName,
    Tokens,
    Tp,
)

if TYPE_CHECKING:
    from wattcast.explore.sweep import Progress, Runner, Swept

app = typer.Typer(help="Which clock, which GPU, which design, which algorithm.", no_args_is_help=True)

OPTIONS = "batch seq tokens phase dtype attention head stack tp pp dp skew recompute image".split()
GpuName = Annotated[str, typer.Option(help="Catalogue name (`wattcast gpus`) or your own YAML file.")]
Clock = Annotated[str | None, typer.Option(help="Locked core clock, such as 1830MHz; default: the governor.")]
Limit = Annotated[str | None, typer.Option(help="Board power limit, such as 500W.")]
Vary = Annotated[list[str], typer.Option(help="FIELD=LOW:HIGH:STEP, FIELD=A,B,C; may be repeated.")]
Out = Annotated[Path | None, typer.Option(help="Every point: a .parquet, .csv or .json file, or a folder of parts.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _explore() -> None:
    """Many configurations at once."""


@app.command("designs")
def designs(
    ctx: typer.Context,
    workload: Source,
    gpu: GpuName,
    vary: Vary,
    where: Annotated[list[str], typer.Option(help="Keep points that meet this: power_w<=400, latency<=50ms.")] = [],  # noqa: B006
    sample: Annotated[str | None, typer.Option(help="random:N or sobol:N points in place of the grid.")] = None,
    seed: Annotated[int, typer.Option(help="Of random and Sobol samples.")] = 0,
    front: Annotated[str, typer.Option(help="Columns the Pareto front minimises.")] = "latency_s,power_w",
    clock: Clock = None,
    power_limit: Limit = None,
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    head: HeadName = None,
    stack: StackName = "eager",
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    skew: Skew = 0.0,
    recompute: Recompute = False,
    image: Image = None,
    out: Out = None,
    plot: Plot = None,
    heat_map: Annotated[str | None, typer.Option(help="Plot this in place of the front: X,Y or X,Y,VALUE.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; default: one for each free core, for large spaces.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Dask scheduler, such as tcp://host:8786 (one you trust), or local.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Go, however many points there are.")] = False,
    json: Json = False,
) -> None:
    """Any field of a GPU and its settings over a grid or a sample, with the governor.

    Example: wattcast explore designs llama3-8b --gpu h200 --batch 8 --seq 1024
    --vary clock=600MHz:1980MHz:15MHz --vary sm_count=64:192:4 --out points.parquet
    """
    from wattcast.explore import api

    env: Environment = ctx.obj
    figure = _figure_words(plot, heat_map)
    study = api.study(
        workload, gpu, vary, where, sample, seed, clock, power_limit, None, **{k: ctx.params[k] for k in OPTIONS}
    )
    objectives = tuple(name.strip() for name in front.split(","))
    done = _run(env, study, out, objectives, _runner(workers, cluster, study.space.size), yes)
    if plot is not None:
        _plot(env, done, plot, figure)
    if json:
        from wattcast.explore.out import swept_out

        env.json(swept_out(done))
        return
    from wattcast.report.explore_text import print_notes, print_swept

    console = env.console()
    print_swept(console, done)
    print_notes(console, [*study.graph.assumptions, *study.bundle.assumptions, *done.notes])


@app.command("clocks")
def clocks(
    ctx: typer.Context,
    workload: Source,
    gpu: GpuName,
    clocks: Annotated[str | None, typer.Option(help="LOW:HIGH:STEP or a list; default: all of the card.")] = None,
    power_limits: Annotated[str | None, typer.Option(help="LOW:HIGH:STEP or a list; default: the card's.")] = None,
    slowdown: Annotated[str | None, typer.Option(help="The best clock at most this much slower: 5%.")] = None,
    latency: Annotated[str | None, typer.Option(help="The best clock within this latency: 50ms.")] = None,
    objective: Annotated[
        str, typer.Option(help="energy|ed|ed2|latency: what the best clock has least of.")
    ] = "energy",
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    head: HeadName = None,
    stack: StackName = "eager",
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    skew: Skew = 0.0,
    recompute: Recompute = False,
    image: Image = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Latency, power, energy, ED and ED² over all clocks and power limits; the best clock under a bound.

    Example: wattcast explore clocks llama3-8b --gpu h200 --batch 8 --seq 1024 --slowdown 5%
    """
    from wattcast.explore import dvfs, out

    env: Environment = ctx.obj
    least = out.objective(objective)
    found = dvfs.clocks(
        workload,
        gpu,
        clock=clocks,
        power_limit=power_limits,
        slowdown=slowdown,
        latency=latency,
        **{k: ctx.params[k] for k in OPTIONS},
    )
    if plot is not None:
        from wattcast.report import explore

        save_one(env, explore.clocks(found), plot)
    if json:
        env.json(out.clocks_out(found, least))
        return
    from wattcast.report.explore_text import print_clocks

    print_clocks(env.console(), found, least)


Tariff = Annotated[str | None, typer.Option(help="Price of energy, such as 0.12USD/kWh.")]
Carbon = Annotated[str | None, typer.Option(help="Carbon intensity, such as 400g/kWh, or a region: france.")]
Rent = Annotated[list[str], typer.Option("--price", help="Price of a GPU, such as h200=3.50USD/h; may be repeated.")]
Pue = Annotated[float, typer.Option(help="Energy at the meter per energy of the GPU.")]


@app.command("gpus")
def gpus(
    ctx: typer.Context,
    workload: Source,
    gpus: Annotated[str | None, typer.Option(help="Names with commas; default: the whole catalogue.")] = None,
    power_limit: Limit = None,
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    head: HeadName = None,
    stack: StackName = "eager",
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    skew: Skew = 0.0,
    recompute: Recompute = False,
    image: Image = None,
    tariff: Tariff = None,
    carbon: Carbon = None,
    price: Rent = [],  # noqa: B006
    pue: Pue = 1.0,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """The same workload on many GPUs: joules, cost and carbon per request, requests per joule.

    Example: wattcast explore gpus llama3-8b --batch 8 --seq 1024 --gpus h100-sxm,h200 --tariff 0.12USD/kWh
    """
    from wattcast.explore import choices, money

    env: Environment = ctx.obj
    prices = money.prices(tariff, carbon, price, pue)
    names = [name.strip() for name in gpus.split(",")] if gpus is not None else []
    given = {k: ctx.params[k] for k in OPTIONS}
    found = choices.gpus(workload, names, prices, power_limit, **given)
    if plot is not None:
        from wattcast.report import explore

        save_one(env, explore.per_gpu(workload, found, given), plot)
    _show(env, json, found, prices, f"{workload} on {len(found)} GPUs, least energy per request first")


@app.command("algorithms")
def algorithms(
    ctx: typer.Context,
    workload: Source,
    gpu: GpuName,
    vary: Annotated[list[str], typer.Option(help="OPTION=VALUES: dtype=bf16,fp8, batch=1,2,4; may be repeated.")],
    power_limit: Limit = None,
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    head: HeadName = None,
    stack: StackName = "eager",
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Dp = 1,
    skew: Skew = 0.0,
    recompute: Recompute = False,
    image: Image = None,
    tariff: Tariff = None,
    carbon: Carbon = None,
    price: Rent = [],  # noqa: B006
    pue: Pue = 1.0,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Number format, attention, batch, sequence, stack, parallelism: every combination on one GPU.

    Example: wattcast explore algorithms llama3-8b --gpu h200 --seq 2048
    --vary dtype=fp32,bf16 --vary attention=eager,flash
    """
    from wattcast.explore import choices, money

    env: Environment = ctx.obj
    prices = money.prices(tariff, carbon, price, pue)
    given = {k: ctx.params[k] for k in OPTIONS}
    found = choices.algorithms(workload, gpu, vary, prices, power_limit, **given)
    if plot is not None:
        from wattcast.report import choices as drawn

        save_one(env, drawn.algorithms(found, f"{workload} on {gpu}"), plot)
    _show(env, json, found, prices, f"{workload} on {gpu}, speed-up over the first that runs")


@app.command("fleet")
def fleet(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="YAML: gpus, workloads with rates, power.")],
    aim: Annotated[
        str, typer.Option(help="energy: meet every rate; throughput: as much of the mix as can be.")
    ] = "energy",
    power: Annotated[str | None, typer.Option(help="The site's power budget, in place of the file's: 12kW.")] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Which GPU runs what, at which clock, under a site's power budget.

    Example: wattcast explore fleet site.yaml --aim throughput --power 12kW
    """
    from wattcast.explore import fleet as fleets
    from wattcast.explore import out

    env: Environment = ctx.obj
    found = fleets.assign(out.with_power(fleets.read(file), power), aim)
    if plot is not None:
        from wattcast.report import choices as drawn

        save_one(env, drawn.assignment(found, file.name), plot)
    if json:
        env.json(out.assignment_out(found))
        return
    from wattcast.report.explore_text import print_assignment

    print_assignment(env.console(), found)


@app.command("published")
def published(
    ctx: typer.Context,
    plot: Plot = None,
    figure: Which = None,
    figures: Figures = None,
    format: Format = "png",
    json: Json = False,
) -> None:
    """The explorations of the EnergAIzer paper with this predictor, beside its measurements.

    The measurements are found through WATTCAST_REFERENCE, or as ../shared/reference beside this folder.
    """
    from wattcast.explore import out
    from wattcast.explore import published as work
    from wattcast.reference import reference_folder

    env: Environment = ctx.obj
    drawn = Drawn(plot, figure, figures, format)
    rows = work.measured(reference_folder(env.variables))
    curves, formats, forecasts = work.dvfs(rows), work.formats(rows), work.forecast()
    if drawn.any:
        from wattcast.report.explore import published_figures

        drawn.save(env, published_figures(curves, formats, forecasts))
    told = out.published_out(curves, formats, forecasts)
    if json:
        env.json(told)
        return
    from wattcast.report.explore_text import print_published

    print_published(env.console(), told)


def _show(env: Environment, json: bool, found: Any, prices: Any, title: str) -> None:
    from wattcast.explore.out import choices_out

    if json:
        env.json(choices_out(found, prices))
        return
    from wattcast.report.explore_text import print_choices

    print_choices(env.console(), found, prices, title)


def _run(env: Environment, study: Any, out: Path | None, front: tuple[str, ...], runner: Runner, yes: bool) -> Swept:
    from wattcast.explore.sweep import run

    try:
        done = run(study, out, front, runner, _progress(env), yes)
    except KeyboardInterrupt:
        if out is not None:
            env.say("finished parts are kept; the same command continues.")
        raise
    if out is not None:
        before = f" ({done.continued} parts were there before)" if done.continued else ""
        env.say(f"{done.summary.kept:,} points saved: {out}{before}")
    return done


def _runner(workers: int | None, cluster: str | None, size: int) -> Runner:
    """Starting a process costs about a second of work, so a small space stays in this one; so does a busy machine."""
    from wattcast.explore.sweep import PART, processes

    if cluster is not None:
        from wattcast.explore.cluster import on

        return on(cluster, workers)
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        free = cores - int(os.getloadavg()[0]) if hasattr(os, "getloadavg") else cores
        workers = max(free, 1) if size > 3 * PART else 1
    return processes(workers)


def _progress(env: Environment) -> Progress | None:
    """A line that counts up, on a terminal alone."""
    if not env.stderr.isatty():
        return None

    def said(done: int, total: int) -> None:
        env.stderr.write(f"\r{done:,} of {total:,} points{'' if done < total else chr(10)}")
        env.stderr.flush()

    return said


def _figure_words(plot: Path | None, heat_map: str | None) -> list[str]:
    from wattcast.errors import bad_value

    words = [word.strip() for word in heat_map.split(",")] if heat_map is not None else []
    if words and plot is None:
        raise bad_value("--heat-map", "--plot FILE beside it", "none")
    if len(words) not in (0, 2, 3):
        raise bad_value("--heat-map", "X,Y or X,Y,VALUE", heat_map)
    return words


def _plot(env: Environment, done: Swept, path: Path, words: list[str]) -> None:
    from wattcast.explore.out import column
    from wattcast.report import explore

    drawn = explore.heat_map(done, *(column(done, word) for word in words)) if words else explore.front(done)
    save_one(env, drawn, path)
