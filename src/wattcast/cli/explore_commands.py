"""``wattcast explore`` and ``wattcast plan``: many configurations."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattcast.cli.shared_options import (
    MODEL_OPTIONS,
    PLOT,
    PRICES,
    CommandOutput,
    Environment,
    command,
)
from wattcast.core.errors import ExitCode, bad_value, is_interrupt, resolve_name

if TYPE_CHECKING:
    from wattcast.explore.sweep import Runner


@command("explore sweep", MODEL_OPTIONS, "clock", "power_limit", PRICES, PLOT)
def sweep(
    workload: str,
    gpu: str,
    vary: list[str] | None = None,
    minimise: str = "energy",
    slowdown: str | None = None,
    latency: str | None = None,
    **options: Any,
) -> CommandOutput:
    """Predict every combination of GPUs, model options, clocks and power limits, and name the best.

    Examples: wattcast explore sweep llama3-8b --gpu h200 --vary clock=all --slowdown 5%
    ... sweep llama3-8b --gpu h100-sxm,h200,l40s --phase decode --vary batch=1,8,64 --vary
    dtype=bf16,fp8"""
    from wattcast.explore.exploration_figures import draw_exploration
    from wattcast.explore.exploration_report import (
        exploration_json,
        print_exploration,
    )
    from wattcast.explore.explorations import ExploreObjective, explore

    least = ExploreObjective(resolve_name("objective", minimise, list(ExploreObjective)))
    found = explore(workload, gpu, vary or [], slowdown=slowdown, latency=latency, **options)
    figure = partial(
        draw_exploration, workload=workload, options={name: options[name] for name in MODEL_OPTIONS}
    )
    return CommandOutput.of(
        found, exploration_json, partial(print_exploration, least=least), figure
    )


@command("explore designs", MODEL_OPTIONS, "clock", "power_limit")
def designs(
    env: Environment,
    workload: str,
    gpu: str,
    vary: list[str],
    where: list[str] | None = None,
    sample: str | None = None,
    seed: int = 0,
    front: str = "latency_s,power_w",
    out: Path | None = None,
    plot: Path | None = None,
    heat_map: str | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    yes: bool = False,
    **options: Any,
) -> CommandOutput:
    """Vary any field of a GPU and its settings over a grid or a sample, with the governor.

    Example: wattcast explore designs llama3-8b --gpu h200 --batch 8 --seq 1024
    --vary clock=600MHz:1980MHz:15MHz --vary sm_count=64:192:4 --out points.parquet
    """
    from wattcast.explore import exploration_figures as figures
    from wattcast.explore import exploration_report as report
    from wattcast.explore import explorations
    from wattcast.explore.search_space import find_column
    from wattcast.explore.sweep import run_sweep

    axes = [word.strip() for word in heat_map.split(",")] if heat_map is not None else []
    if axes and plot is None:
        raise bad_value("--heat-map", "--plot FILE beside it", "none")
    if len(axes) not in (0, 2, 3):
        raise bad_value("--heat-map", "X,Y or X,Y,VALUE", heat_map)
    study = explorations.build_study(workload, gpu, vary, where or [], sample, seed, **options)
    objectives = tuple(name.strip() for name in front.split(","))
    runner = _choose_runner(workers, cluster, study.space.size)

    def tell(points: int, total: int) -> None:
        env.stderr.write(f"\r{points:,} of {total:,} points{'' if points < total else chr(10)}")
        env.stderr.flush()

    try:
        done = run_sweep(study, out, objectives, runner, tell if env.stderr.isatty() else None, yes)
    except BaseException as error:
        if out is not None and is_interrupt(error):
            env.say("finished parts are kept; the same command continues.")
        raise
    if out is not None:
        before = f" ({done.continued} parts were there before)" if done.continued else ""
        env.say(f"{done.summary.kept:,} points saved: {out}{before}")
    columns = [find_column(word, study.gpu, study.space.columns)[0] for word in axes]
    if plot is not None:
        env.save_plot(
            figures.draw_heat_map(done, columns) if axes else figures.draw_pareto_front(done), plot
        )
    return CommandOutput.of(done, report.sweep_json, report.print_sweep)


@command("explore fleet", "price", "electricity", PLOT)
def fleet(
    file: Path, aim: str = "energy", site_power: str | None = None, **prices: Any
) -> CommandOutput:
    """Decide which GPUs serve which model, how shared, at which clock, under a site's power budget.

    Example: wattcast explore fleet site.yaml --aim throughput --site-power 12kW
    """
    from wattcast.explore import exploration_figures as figures
    from wattcast.explore import exploration_report as report
    from wattcast.explore import fleet as fleets

    found = fleets.assign_fleet(fleets.read_fleet(file, site_power), aim, **prices)
    figure = partial(figures.draw_assignment, source=file.name)
    return CommandOutput.of(found, report.assignment_json, report.print_assignment, figure)


def _choose_runner(workers: int | None, cluster: str | None, size: int) -> Runner:
    """Choose where points are computed; a small space stays in this process, since starting one
    costs a second.
    """
    from wattcast.explore.sweep import PART_POINTS, cluster_runner, process_runner

    if cluster is not None:
        return cluster_runner(cluster, workers)
    if workers is None:
        cores = _count_cores()
        free = cores - int(os.getloadavg()[0]) if hasattr(os, "getloadavg") else cores
        workers = max(free, 1) if size > 3 * PART_POINTS else 1
    return process_runner(workers)


def _count_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


PLANNED = ("dtype", "quantization", "weights", "kv_dtype")


@command("plan", *PLANNED, PRICES, PLOT, library="wattcast.serving.capacity_plan:plan")
def plan(
    env: Environment, model: str, gpu: str, workers: int | None = None, **asked: Any
) -> CommandOutput:
    """Find how many GPUs, how shared, at which clock or power limit. For several models: explore fleet.

    Example: wattcast plan llama3-8b --rate 20/s --prompt 1000 --output 300 --ttft p99:500ms
    --tpot p90:40ms --gpu h100-sxm,h200 --minimise cost --price h100-sxm=2.5,h200=3.5
    """
    from wattcast.serving import capacity_plan
    from wattcast.serving import plan_report as report

    try:
        count = _count_cores() if workers is None else workers
        found = capacity_plan.plan(model, gpu, progress=env.tell_progress, workers=count, **asked)
    except capacity_plan.PlanInterrupted as error:
        found = error.result
    output = CommandOutput.of(found, type(found).to_dict, report.print_plan, report.draw_plan)
    return replace(output, exit_code=0 if found.is_complete else ExitCode.INTERRUPTED)
