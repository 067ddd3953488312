"""``wattcast explore``: many configurations."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from wattcast.cli.command_builder import PLOT, command
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import GPU, WORKLOAD
from wattcast.cli.figure_options import PLOT_FILE
from wattcast.core.errors import (
    bad_value,
    is_interrupt,
    resolve_name,
)
from wattcast.core.option_declaration import Option
from wattcast.options.exploring_options import (
    EXPLORE,
    STUDY,
    DesignOutput,
)
from wattcast.options.run_options import OPTION_NAMES
from wattcast.options.setting_options import PriceOptions
from wattcast.options.verb_options import part_of

if TYPE_CHECKING:
    from wattcast.explore.sweep import Runner


@command("explore sweep", EXPLORE, PLOT)
def sweep(
    workload: Annotated[str, WORKLOAD],
    gpu: Annotated[str, Option("GPU names or YAML files, commas between, or all.")],
    vary: Annotated[
        list[str] | None,
        Option(
            "clock|power_limit|temperature|OPTION=A,B,C or LOW:HIGH:STEP, clock=all; repeatable."
        ),
    ] = None,
    minimise: Annotated[
        str, Option("What the best point has least of: energy|ed|ed2|latency|cost.")
    ] = "energy",
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
    exploration = explore(workload, gpu, vary or [], **options)
    chosen = {name: value for name, value in options.items() if name in OPTION_NAMES}
    figure = partial(draw_exploration, workload=workload, options=chosen)
    return CommandOutput.of(
        exploration, exploration_json, partial(print_exploration, least=least), figure
    )


@dataclass(frozen=True)
class DesignRun:
    """Where designs are computed, and which figure is drawn."""

    plot: Annotated[Path | None, PLOT_FILE] = None
    heat_map: Annotated[str | None, Option("Plot X,Y or X,Y,VALUE, not the front.")] = None
    workers: Annotated[
        int | None,
        Option(
            "Number of processes; default: one per free core for large spaces.",
            panel="How it is computed",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        Option(
            "Dask scheduler you trust, such as tcp://host:8786, or local.",
            panel="How it is computed",
        ),
    ] = None

    @property
    def map_axes(self) -> list[str]:
        """The columns of the heat map; empty: the Pareto front is drawn."""
        if self.heat_map is None:
            return []
        axes = [word.strip() for word in self.heat_map.split(",")]
        if self.plot is None:
            raise bad_value("--heat-map", "--plot FILE as well", "none")
        if len(axes) not in (2, 3):
            raise bad_value("--heat-map", "X,Y or X,Y,VALUE", self.heat_map)
        return axes


@command("explore designs", STUDY)
def designs(
    env: Environment,
    workload: Annotated[str, WORKLOAD],
    gpu: Annotated[str, GPU],
    vary: Annotated[list[str], Option("FIELD=LOW:HIGH:STEP, FIELD=A,B,C.")],
    output: DesignOutput,
    running: DesignRun,
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

    axes = running.map_axes
    study = explorations.build_study(workload, gpu, vary, **options)
    objectives = tuple(name.strip() for name in output.front)
    runner = _choose_runner(running.workers, running.cluster, study.space.size)
    out = None if output.out is None else Path(output.out)
    tell = _make_progress(env) if env.stderr.isatty() else None
    try:
        done = run_sweep(
            study,
            out,
            objectives,
            runner,
            tell,
            output.yes,
        )
    except BaseException as error:
        if out is not None and is_interrupt(error):
            env.say("finished parts are kept; the same command continues.")
        raise
    if out is not None:
        before = f" ({done.continued} parts were there before)" if done.continued else ""
        env.say(f"{done.summary.kept:,} points saved: {out}{before}")
    columns = [find_column(word, study.gpu, study.space.columns)[0] for word in axes]
    if running.plot is not None:
        figure = figures.draw_pareto_front(done)
        if columns:
            figure = figures.draw_heat_map(done, columns)
        env.save_plot(figure, running.plot)
    return CommandOutput.of(done, report.sweep_json, report.print_sweep)


def _make_progress(env: Environment) -> Callable[[int, int], None]:
    def tell(points: int, total: int) -> None:
        end = "\n" if points >= total else ""
        env.stderr.write(f"\r{points:,} of {total:,} points{end}")
        env.stderr.flush()

    return tell


@command("explore fleet", part_of(PriceOptions, "price", "electricity"), PLOT)
def fleet(
    file: Annotated[
        Path, Option("YAML file with GPUs, workloads and their rates, and power.", positional=True)
    ],
    aim: Annotated[
        str,
        Option(
            "energy|gpus|cost: least, every rate met; throughput: as much of the mix as can be."
        ),
    ] = "energy",
    site_power: Annotated[
        str | None, Option("Power of all GPUs, instead of the file's: 12kW.")
    ] = None,
    **prices: Any,
) -> CommandOutput:
    """Decide which GPUs serve which model, in which layout, at which clock, under a power budget.

    Example: wattcast explore fleet site.yaml --aim throughput --site-power 12kW
    """
    from wattcast.explore import exploration_figures as figures
    from wattcast.explore import exploration_report as report
    from wattcast.explore import fleet as fleets

    assignment = fleets.assign_fleet(fleets.read_fleet(file, site_power), aim, **prices)
    figure = partial(figures.draw_assignment, source=file.name)
    return CommandOutput.of(assignment, report.assignment_json, report.print_assignment, figure)


_ALONE_UP_TO = 300_000  # points, which take a process a few seconds


def _choose_runner(
    workers: int | None,
    cluster: str | None,
    size: int,
) -> Runner:
    """Choose where points are computed; a small space stays in this process, since starting one
    costs a second.
    """
    from wattcast.explore.sweep import cluster_runner, process_runner

    if cluster is not None:
        return cluster_runner(cluster, workers)
    if workers is None:
        cores = count_cores()
        free = cores - int(os.getloadavg()[0]) if hasattr(os, "getloadavg") else cores
        workers = max(free, 1) if size > _ALONE_UP_TO else 1
    return process_runner(workers)


def count_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
