"""``wattcast hall``: the power of many racks over a day."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

from wattcast.cli.command_builder import command
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.explore_commands import count_cores
from wattcast.cli.figure_options import FigureOptions
from wattcast.core.errors import is_interrupt
from wattcast.core.option_declaration import Option
from wattcast.options.hall_options import (
    HallOptions,
    HallRun,
    SheddingOptions,
)
from wattcast.options.setting_options import MachineOptions
from wattcast.options.verb_options import part_of

if TYPE_CHECKING:
    from rich.console import Console

    from wattcast.timeseries.hall_run import Runner


@command("hall", part_of(FigureOptions, "plot", "figure"))
def hall(
    env: Environment,
    file: Annotated[
        Path, Option("YAML file with racks, loads, a day and limits.", positional=True)
    ],
    asked: HallOptions,
    shedding: SheddingOptions,
    running: HallRun,
    machine: MachineOptions,
) -> CommandOutput:
    """Simulate the power of a hall: serving, training and idle racks over a day.

    With --shed, say what it costs to draw less for a while, and plan it.

    Examples: wattcast hall hall.yaml --out hall-day --plot hall.png
    ... hall hall.yaml --shed 300kW --begin 18:00 --span 30min
    """
    if shedding.shed_w is not None:
        return _plan_shedding(env, file, asked, shedding, machine)
    from wattcast.timeseries.hall_figures import FIGURES
    from wattcast.timeseries.hall_file import read_hall, tell_machine
    from wattcast.timeseries.hall_report import (
        print_hall,
        summarise_hall,
        write_hall,
    )
    from wattcast.timeseries.hall_run import HallSpan, run_hall

    plan = tell_machine(read_hall(file), machine)
    span = HallSpan(asked.begin_s, asked.span_s, asked.grid_s)
    try:
        hall_result = run_hall(
            plan,
            span,
            asked.out,
            _choose_runner(running),
            env.tell_progress,
        )
    except BaseException as error:
        if asked.out is not None and is_interrupt(error):
            env.say("finished rows are kept; the same command continues.")
        raise
    if asked.out is not None:
        for path in write_hall(hall_result, asked.out, f".{asked.format}", asked.chance):
            env.say(f"written: {path}")
    figures = {name: partial(draw, hall_result) for name, draw in FIGURES.items()}

    def print_text(console: Console) -> None:
        print_hall(console, hall_result, asked.chance)

    plain = partial(summarise_hall, hall_result, asked.chance)
    return CommandOutput(plain, print_text, lambda: figures)


def _plan_shedding(
    env: Environment,
    file: Path,
    asked: HallOptions,
    shedding: SheddingOptions,
    machine: MachineOptions,
) -> CommandOutput:
    """Return what policies cost, and the plan."""
    from wattcast.timeseries import demand_response, shedding_report
    from wattcast.timeseries.hall_file import read_hall, tell_machine

    assert shedding.shed_w is not None, "nothing is to be shed"
    response = demand_response.plan_demand_response(
        tell_machine(read_hall(file), machine),
        shedding.shed_w,
        asked.begin_s,
        asked.span_s,
        env.tell_progress,
        shedding.slowdown,
    )
    return CommandOutput.of(
        response,
        demand_response.DemandResponse.to_dict,
        shedding_report.print_response,
        shedding_report.draw_response,
    )


def _choose_runner(running: HallRun) -> Runner:
    """Choose where rows are computed."""
    from wattcast.explore.sweep import cluster_runner, process_runner

    runner: Any
    if running.cluster is not None:
        runner = cluster_runner(running.cluster, running.workers)
    else:
        count = count_cores() if running.workers is None else running.workers
        runner = process_runner(count)
    return runner  # type: ignore[no-any-return]
