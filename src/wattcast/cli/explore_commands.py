"""``wattcast explore`` and ``wattcast plan``: many configurations."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.shared_options import (
    MODEL_OPTIONS,
    PRICES,
    Arrivals,
    Environment,
    GpuName,
    GpuNames,
    Json,
    Lengths,
    Model,
    Plot,
    Source,
    argument,
    folded,
    option,
    options_besides,
    takes_options,
)
from wattcast.core.errors import bad_value, resolve_name

if TYPE_CHECKING:
    from wattcast.explore.sweep import ReportProgress, Runner, SweepResult

explore_app = typer.Typer(
    add_completion=False,
    help="Sweep GPUs, options, clocks and limits; search chip designs; assign a fleet.",
    no_args_is_help=True,
)

Vary = Annotated[list[str], option("FIELD=LOW:HIGH:STEP, FIELD=A,B,C; may be repeated.")]
_place = folded("Where it is computed")
_replica = folded("What a replica may be")


@explore_app.callback()
def _explore() -> None:
    """Explore many configurations at once."""


@explore_app.command("sweep")
@takes_options(MODEL_OPTIONS, "clock", "power_limit", PRICES)
def sweep(
    ctx: typer.Context,
    workload: Source,
    gpu: Annotated[str, option("GPU names or YAML files, commas between, or all.")],
    vary: Annotated[
        list[str], option("clock|power_limit|temperature|OPTION=A,B,C or LOW:HIGH:STEP, clock=all; repeatable.")
    ] = [],  # noqa: B006
    minimise: Annotated[str, option("energy|ed|ed2|latency|cost: has the best least of.")] = "energy",
    slowdown: Annotated[str | None, option("Of the best over the fastest at most: 5%.")] = None,
    latency: Annotated[str | None, option("Of the best at most: 50ms.")] = None,
    plot: Plot = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Predict every combination of GPUs, model options, clocks and power limits, and name the best.

    Examples: wattcast explore sweep llama3-8b --gpu h200 --vary clock=all --slowdown 5%
    ... sweep llama3-8b --gpu h100-sxm,h200,l40s --phase decode --vary batch=1,8,64 --vary dtype=bf16,fp8
    """
    from wattcast.explore.exploration_report import draw_exploration, exploration_json, print_exploration
    from wattcast.explore.explorations import ExploreObjective, explore

    env: Environment = ctx.obj
    least = ExploreObjective(resolve_name("objective", minimise, list(ExploreObjective)))
    found = explore(**options_besides(ctx, "minimise", "plot", "json"))
    figure = partial(draw_exploration, workload=workload, options={name: options[name] for name in MODEL_OPTIONS})
    env.show(found, json, exploration_json, partial(print_exploration, least=least), plot, figure)


@explore_app.command("designs")
@takes_options(MODEL_OPTIONS, "clock", "power_limit")
def designs(
    ctx: typer.Context,
    workload: Source,
    gpu: GpuName,
    vary: Vary,
    where: Annotated[list[str], option("Keep points of power_w<=400, latency<=50ms.")] = [],  # noqa: B006
    sample: Annotated[str | None, option("random:N or sobol:N points, not the grid.")] = None,
    seed: Annotated[int, option("Of random and Sobol samples.")] = 0,
    front: Annotated[str, option("Columns the Pareto front minimises.")] = "latency_s,power_w",
    out: Annotated[Path | None, option("Every point: a .parquet, .csv or .json file, or a folder.")] = None,
    plot: Plot = None,
    heat_map: Annotated[str | None, option("Plot X,Y or X,Y,VALUE, not the front.")] = None,
    workers: Annotated[int | None, _place("Processes; default: one per free core, for large spaces.")] = None,
    cluster: Annotated[str | None, _place("Dask scheduler you trust, such as tcp://host:8786, or local.")] = None,
    yes: Annotated[bool, _place("Go, however many points there are.", "--yes")] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Vary any field of a GPU and its settings over a grid or a sample, with the governor.

    Example: wattcast explore designs llama3-8b --gpu h200 --batch 8 --seq 1024
    --vary clock=600MHz:1980MHz:15MHz --vary sm_count=64:192:4 --out points.parquet
    """
    from wattcast.explore import exploration_report as report
    from wattcast.explore import explorations

    env: Environment = ctx.obj
    axes = [word.strip() for word in heat_map.split(",")] if heat_map is not None else []
    if axes and plot is None:
        raise bad_value("--heat-map", "--plot FILE beside it", "none")
    if len(axes) not in (0, 2, 3):
        raise bad_value("--heat-map", "X,Y or X,Y,VALUE", heat_map)
    study = explorations.build_study(workload, gpu, vary, where, sample, seed, **options)
    objectives = tuple(name.strip() for name in front.split(","))
    done = _run_designs(env, study, out, objectives, _choose_runner(workers, cluster, study.space.size), yes)
    columns = [report.find_column(done, word) for word in axes]
    figure = partial(report.draw_heat_map, columns=columns) if axes else report.draw_pareto_front
    env.show(done, json, report.sweep_json, report.print_sweep, plot, figure)


@explore_app.command("fleet")
@takes_options("price", "electricity")
def fleet(
    ctx: typer.Context,
    file: Annotated[Path, argument("YAML: gpus, workloads with rates, power.")],
    aim: Annotated[
        str, option("energy|gpus|cost: least, every rate met; throughput: as much of the mix as can be.")
    ] = "energy",
    site_power: Annotated[str | None, option("Of all GPUs, in place of the file's: 12kW.")] = None,
    plot: Plot = None,
    json: Json = False,
    **prices: Any,
) -> None:
    """Decide which GPUs serve which model, how shared, at which clock, under a site's power budget.

    Example: wattcast explore fleet site.yaml --aim throughput --site-power 12kW
    """
    from wattcast.explore import exploration_report as report
    from wattcast.explore import fleet as fleets

    env: Environment = ctx.obj
    found = fleets.assign_fleet(fleets.read_fleet(file, site_power), aim, **prices)
    figure = partial(report.draw_assignment, source=file.name)
    env.show(found, json, report.assignment_json, report.print_assignment, plot, figure)


def _run_designs(
    env: Environment, study: Any, out: Path | None, front: tuple[str, ...], runner: Runner, yes: bool
) -> SweepResult:
    from wattcast.explore.sweep import run_sweep

    try:
        done = run_sweep(study, out, front, runner, _make_progress(env), yes)
    except KeyboardInterrupt:
        if out is not None:
            env.say("finished parts are kept; the same command continues.")
        raise
    if out is not None:
        before = f" ({done.continued} parts were there before)" if done.continued else ""
        env.say(f"{done.summary.kept:,} points saved: {out}{before}")
    return done


def _choose_runner(workers: int | None, cluster: str | None, size: int) -> Runner:
    """Choose where points are computed; a small space stays in this process, since starting one costs a second."""
    from wattcast.explore.sweep import PART_POINTS, process_runner

    if cluster is not None:
        from wattcast.explore.sweep import cluster_runner

        return cluster_runner(cluster, workers)
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        free = cores - int(os.getloadavg()[0]) if hasattr(os, "getloadavg") else cores
        workers = max(free, 1) if size > 3 * PART_POINTS else 1
    return process_runner(workers)


def _make_progress(env: Environment) -> ReportProgress | None:
    """Return what counts points on a terminal; None elsewhere."""
    if not env.stderr.isatty():
        return None

    def said(done: int, total: int) -> None:
        env.stderr.write(f"\r{done:,} of {total:,} points{'' if done < total else chr(10)}")
        env.stderr.flush()

    return said


@takes_options("dtype", "quantization", "weights", "kv_dtype", PRICES)
def plan(
    ctx: typer.Context,
    model: Model,
    rate: Annotated[str, option("Requests, such as 20/s or 600/min.")],
    gpu: GpuNames,
    prompt: Lengths = "512",
    output: Lengths = "128",
    ttft: Annotated[str | None, option("To first token: p99:500ms (p90: 500ms).")] = None,
    tpot: Annotated[str | None, option("Per output token: p90:40ms.")] = None,
    minimise: Annotated[str, option("gpus|energy|cost|carbon")] = "gpus",
    headroom: Annotated[str, option("Plan for so much more than the rate.")] = "10%",
    spare_replicas: Annotated[int, option("Replicas that may be down.", "--spare", min=0)] = 0,
    tp: Annotated[str, option("Tensor-parallel GPUs to try.")] = "1,2,4,8",
    pp: Annotated[str | None, _replica("Pipeline stages to try; default: where needed.")] = None,
    ep: Annotated[str | None, _replica("GPUs that share experts to try; 1: none.")] = None,
    pools: Annotated[str | None, _replica("Prefill:decode engines to try: 0:1,1:2; default: where needed.")] = None,
    max_batched_tokens: Annotated[str | None, _replica("Tokens of a step to try; default: where needed.")] = None,
    power_limit: Annotated[str | None, option("To try: 700W,500W; default: several where energy counts.")] = None,
    clock: Annotated[str | None, option("Highest clocks to try: 1.98GHz,1.4GHz; default: as above.")] = None,
    site_power: Annotated[str | None, option("Mean of all GPUs at most: 20kW.")] = None,
    arrivals: Arrivals = "poisson",
    plot: Plot = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Find how many GPUs, how shared, at which clock or power limit. For several models: explore fleet.

    Example: wattcast plan llama3-8b --rate 20/s --prompt 1000 --output 300 --ttft p99:500ms --tpot p90:40ms
    --gpu h100-sxm,h200
    """
    from wattcast.explore import exploration_report as report
    from wattcast.serving import capacity_plan

    env: Environment = ctx.obj
    given = options_besides(
        ctx, "tp", "pp", "ep", "power_limit", "clock", "pools", "max_batched_tokens", "plot", "json"
    )
    whole = {"tp": tp, "pp": pp, "ep": ep, "max_batched_tokens": max_batched_tokens}
    given |= {name: _parse_whole_numbers(text, name) for name, text in whole.items() if text}
    lists = {"power_limits": power_limit, "clocks": clock, "pools": pools}
    given |= {name: text.split(",") for name, text in lists.items() if text}
    found = capacity_plan.plan(**given)
    env.show(found, json, type(found).to_dict, report.print_plan, plot, report.draw_plan)


def _parse_whole_numbers(text: str, where: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise bad_value(where, "whole numbers from 1, such as 1,2,4", text)
    return found
