"""``wattcast manage``: run-time control on simulated cards, on measured tables and on a real card."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wattcast.cli.shared_options import (
    FIGURES,
    CommandOutput,
    Environment,
    Options,
    command,
    parse_pairs,
)
from wattcast.core import bad_value, check_names, units
from wattcast.core.whole_files import check_writable

if TYPE_CHECKING:
    from wattcast.control.plants import PlantTables
    from wattcast.control.policies import PolicySetup
    from wattcast.control.policy_comparison import PolicyComparison
    from wattcast.control.search_problem import Objective
    from wattcast.control.serving_control import ServingLimits
    from wattcast.hardware import Gpu
    from wattcast.report.figure_style import FigureMaker

SHORTEST_PERIOD_S = 0.02
LONGEST_PERIOD_S = 3600.0
GOAL: Options = {  # what a policy seeks; _read_objective reads them
    "minimise": (str, "ed2"),
    **dict.fromkeys(("slowdown", "latency", "cap"), (str | None, None)),
}
PLAYED: Options = {**GOAL, "noise": (str | None, None), "seed": (int, 0), **FIGURES}
WATCHED: Options = {name: GOAL[name] for name in ("minimise", "slowdown")}


@command("manage simulate", PLAYED)
def simulate(
    env: Environment,
    workloads: list[str] | None = None,
    gpu: str = "hd-7970",
    batch: int | None = None,
    seq: int | None = None,
    phase: str | None = None,
    knobs: str = "core",
    perturbed: int = 0,
    sensitivity: Path | None = None,
    export: Path | None = None,
    **options: Any,
) -> CommandOutput:
    """Play all policies on a simulated card.

    Example: wattcast manage simulate --perturbed 20
    """
    from wattcast.control import hd7970, policy_comparison
    from wattcast.control.plants import KnobRole

    given = {"batch": batch, "seq": seq, "phase": phase}
    of_model = {name: value for name, value in given.items() if value is not None}
    roles = {
        "core": KnobRole.CORE_CLOCK,
        "memory": KnobRole.MEMORY_CLOCK,
        "sms": KnobRole.COMPUTE_UNITS,
    }
    wanted = [name.strip() for name in knobs.split(",")]
    check_names("knob", wanted, roles)
    turned = [roles[name] for name in wanted]
    plant, model = policy_comparison.choose_plant(
        gpu, workloads or [], sensitivity, of_model, turned
    )
    setup = _make_setup(options, model)
    more = (
        {"perturbed": policy_comparison.sweep_perturbed_cards(perturbed, setup, setup.seed)}
        if perturbed
        else {}
    )
    if export is not None:
        policy_comparison.export_tables(plant, export)
        env.say(f"table saved: {export}")
    return _compare_policies(
        [plant], setup, f"{plant.name}, simulated", hd7970.STRESS_APPLICATIONS, [], more
    )


@command("manage replay", PLAYED)
def replay(
    files: list[Path],
    default: str | None = None,
    repeats: int = 0,
    iterations: int = 100,
    gpu: str | None = None,
    workloads: Path | None = None,
    leave_out: list[str] | None = None,
    **options: Any,
) -> CommandOutput:
    """Play all policies on tables of real measurements.

    Example: wattcast manage replay real_time_power_by_clock.csv --default 1164/3505 --json
    """
    from wattcast.control import policy_comparison as tables

    plants = [p for file in files for p in tables.read_replay_tables(file, iterations, default)]
    plants = tables.leave_out_applications(plants, leave_out or [])
    chosen, notes = _forecast_plants(plants, gpu, workloads, _read_objective(**options))
    setup = _make_setup(options, None, chosen)
    if repeats and setup.noise is None:
        raise bad_value(
            "--repeats", "noise, such as --noise 1%", "none", "Without noise all repeats are alike."
        )
    more = {"noise": tables.count_worse_runs(plants, setup, repeats)} if repeats else {}
    return _compare_policies(plants, setup, ", ".join(f.name for f in files), (), notes, more)


@command("manage watch", WATCHED)
def watch(
    env: Environment,
    device: int | None = None,
    period: str = "1s",
    count: int = 5,
    gpu: str | None = None,
    **options: Any,
) -> CommandOutput:
    """Observe a card and say what could be set and what that might save. Sets nothing."""
    from wattcast.control import watch_card
    from wattcast.measure.device_control import NvmlCard

    seconds = _period_s(period)
    goal = _read_objective(**options)
    with closing(NvmlCard(device)) as card:
        card.open()
        found = watch_card.watch_card(card, seconds, count, goal, gpu, env.say)
    return CommandOutput.of(found, dict, watch_card.print_watched)


@command("manage run", GOAL, allow_interspersed_args=False)
def run(
    env: Environment,
    command: list[str] | None = None,
    apply: bool = False,
    device: int | None = None,
    period: str = "1s",
    progress: Path | None = None,
    metrics: str | None = None,
    model: str | None = None,
    ttft: str = "500ms",
    tpot: str = "50ms",
    turn_limit: bool = False,
    sm_percent: int | None = None,
    units: Path | None = None,
    sms: int | None = None,
    rows: Path | None = None,
    workload: str | None = None,
    socket: Path | None = None,
    **options: Any,
) -> None:
    """Control a card while a program runs on it. The daemon sets it, and gives it back however this
    ends.

    Where no daemon runs, root gets one for the time of the program. A program that trains reports
    its steps (--progress). A serving engine tells its response times (--metrics); its card needs
    the least energy per token that keeps them.

    Example: wattcast manage run --apply --progress /tmp/done -- python train.py
    """
    from wattcast.control import (
        daemon_client,
        live_control,
        program_files,
        serving_control,
        serving_rehearsal,
        watch_card,
    )
    from wattcast.measure.device_control import NvmlCard
    from wattcast.serving.simulate_serving import find_language_model

    goal = _read_objective(**options)
    seconds = _period_s(period)
    if progress is not None and not progress.absolute().parent.is_dir():
        raise bad_value("--progress", "a file in a folder that exists", str(progress))
    limits = _serving_limits(ttft, tpot)
    if model is not None:
        find_language_model(model)
        if metrics is None:
            raise bad_value("--model", "the address of its engine's metrics (--metrics)", "none")
    if metrics is not None and not command:
        serving_control.read_engine_metrics(
            metrics
        )  # whether it answers is known before the card is asked for
    if (rows is None) != (workload is None) or (rows is not None and progress is None):
        raise bad_value(
            "--rows and --workload", "both, and --progress with them", "one of them missing"
        )
    unit = None if workload is None else _read_workload(workload)
    if rows is not None:
        check_writable(rows)
    variables = dict(env.variables)
    if sm_percent is not None:
        variables |= program_files.limit_sm_share(sm_percent, variables)
    card = NvmlCard(device)
    card.open()
    if not apply:
        env.say(
            f"dry run on {card.name}: clocks would be set and given back; add --apply to do it."
        )
        raise typer.Exit
    told = None
    if units is not None:
        total = sms or int(
            _catalogue_gpu(card.name, "--units", "Tell how many SMs it has (--sms).").sm_count
        )
        told = program_files.SmCountFile(units, total)
    keeper: Any = None if metrics is None else partial(serving_control.LatencyKeeper, limits=limits)
    if model is not None:
        chip = _catalogue_gpu(
            card.name, "--model", "Leave it out: what steps take is then learned."
        )
        by_level = serving_rehearsal.build_clock_levels(model, chip)
        keeper = partial(serving_rehearsal.make_keeper, by_level, limits)
    advice = watch_card.make_advice(goal, watch_card.find_catalogue_gpu(card.name))
    told_by = None if metrics is None else partial(serving_control.read_engine_metrics, metrics)
    task = live_control.ControlTask(
        goal, seconds, progress, told, turn_limit, advice, keeper, told_by, rows, unit
    )
    with daemon_client.hold_card(card, socket) as held:
        code = live_control.run_controlled_program(held, command or [], task, env.say, variables)
    raise typer.Exit(code if code >= 0 else 128 - code)


@command("manage plane")
def plane(
    env: Environment,
    command: list[str],
    apply: bool = False,
    device: int | None = None,
    cores: int = 6,
    memories: int = 1,
    socket: Path | None = None,
) -> None:
    """Run a program at every pair of clocks of a plane. The daemon sets them, and gives them back
    however this ends.

    Example: wattcast manage plane --apply --cores 8 -- wattcast lab microbench --out
    rows/{core}-{memory}"""
    from wattcast.control import clock_plane, daemon_client
    from wattcast.measure.device_control import NvmlCard

    card = NvmlCard(device)
    card.open()
    points = clock_plane.choose_clock_plane(*card.clocks_hz(), cores, memories)
    told = ", ".join(f"{core / 1e6:.0f}/{memory / 1e6:.0f}" for core, memory in points)
    if not apply:
        env.say(
            f"dry run on {card.name}: core/memory MHz {told} would be set and given back; add --apply to do it."
        )
        raise typer.Exit
    with daemon_client.hold_card(card, socket) as held:
        codes = clock_plane.visit_clock_plane(held, points, command, env.say, env.variables)
    failed = [
        f"{core / 1e6:.0f}/{memory / 1e6:.0f}"
        for (core, memory), code in codes.items()
        if code != 0
    ]
    env.say(
        f"the card has back what it had. {len(codes) - len(failed)} of {len(points)} pairs of clocks done."
    )
    if failed or len(codes) < len(points):
        env.say(f"refused or ended otherwise, core/memory MHz: {', '.join(failed) or 'none'}")
        raise typer.Exit(next((abs(code) for code in codes.values() if code), 1))


@command("manage daemon")
def daemon(
    env: Environment,
    gpu: list[str] | None = None,
    clocks: str | None = None,
    limits: str | None = None,
    locked: str | None = None,
    group: str | None = None,
    socket: Path | None = None,
    unit: bool = False,
    lifeline: bool = False,
) -> None:
    """Own the cards of this node: set them for clients, and give them back when a client is silent
    or gone.

    Example: wattcast manage daemon --group wattcast --clocks 900MHz:1980MHz
    """
    from wattcast.control import card_daemon, daemon_client

    if unit:
        env.stdout.write(daemon_client.print_unit())
        return
    ranges = _parse_range(clocks, "Hz", "--clocks"), _parse_range(limits, "W", "--limits")
    scope = card_daemon.DaemonScope(
        *ranges, None if locked is None else units.parse(locked, "Hz", "--locked")
    )
    path = socket or card_daemon.SOCKET
    members = daemon_client.find_group(group)
    if not lifeline:
        env.say(f"clients connect to {path} as {f'members of {group}' if group else 'root'}")

    def serve(stopped: Any) -> int:
        cards = daemon_client.find_settable_cards(gpu or [])
        return card_daemon.serve_cards(cards, scope, path, members, env.say, stopped)

    raise typer.Exit(card_daemon.run_supervised(serve, env.say, 0 if lifeline else None))


@command("manage status")
def status(socket: Path | None = None) -> CommandOutput:
    """Say what every card is set to, who holds it, and which were left changed; exit code 5 if any
    was.
    """
    from wattcast.control.daemon_client import read_status

    plain, text, code = read_status(socket)
    return CommandOutput(plain, text, exit_code=code)


@command("manage restore")
def restore(
    env: Environment,
    gpu: str | None = None,
    defaults: bool = False,
    socket: Path | None = None,
) -> None:
    """Give cards back what they had, through the daemon, or as root without one. Whoever holds them
    loses them.
    """
    from wattcast.control.daemon_client import restore_cards

    restore_cards(gpu, socket, env.say, defaults)


@command("manage rehearse")
def rehearse(
    model: str,
    gpu: str = "h200",
    rate: str = "10/s",
    prompt: str = "512",
    output: str = "128",
    arrivals: str = "poisson",
    seconds: str = "30min",
    ttft: str = "500ms",
    tpot: str = "50ms",
    gpus: int = 1,
    site_power: str | None = None,
    seed: int = 1,
) -> CommandOutput:
    """Rehearse the control of serving GPUs on simulated traffic, before any card is touched.

    Example: wattcast manage rehearse llama3-8b --rate 20/s --gpus 4 --site-power 1800W --seconds
    10min"""
    import numpy as np

    from wattcast.control import serving_rehearsal
    from wattcast.predictor.api import find_gpu
    from wattcast.serving.arrivals import draw_trace

    per_s = units.parse_amount(rate, "/s", "--rate", inclusive=False)
    length_s = units.parse_seconds(seconds, "--seconds")
    chip = find_gpu(gpu)
    limits = _serving_limits(ttft, tpot)
    most_w = (
        units.parse_amount(site_power, "W", "--site-power", inclusive=False) if site_power else None
    )
    traces = [
        draw_trace(per_s, prompt, output, arrivals, length_s, None, seed + i) for i in range(gpus)
    ]
    by_level = serving_rehearsal.build_clock_levels(model, chip)
    if most_w is not None:
        limit_w = float(np.mean(chip.power.limit_w))
        found = serving_rehearsal.rehearse_site_serving(by_level, traces, limits, most_w, limit_w)
    else:
        found = serving_rehearsal.rehearse_load(by_level, traces[0], limits)
    return CommandOutput(found, "\n".join(f"{name}: {value:.6g}" for name, value in found.items()))


@command("manage site")
def site(
    env: Environment, nodes: list[Path], site_power: str, priority: list[str] | None = None
) -> None:
    """Share a power budget among the GPUs of several nodes until interrupted.

    The power limit that each GPU has now is its safe share: it keeps it, and gets it back when this
    command ends.

    Example: wattcast manage site /run/wattcast/socket /run/site/b.sock --site-power 3kW
    """
    from wattcast.control.site_budget import coordinate_site
    from wattcast.measure.measured_run import PassedSignals

    ranks = parse_pairs(priority, "--priority", "UUID=NUMBER", int)
    most_w = units.parse_amount(site_power, "W", "--site-power", inclusive=False)
    with PassedSignals() as signals:
        coordinate_site(nodes, most_w, ranks, env.say, lambda: not signals.came)


def _catalogue_gpu(name: str, option: str, instead: str) -> Gpu:
    """Return the catalogue's card by what the driver calls it, which ``option`` needs."""
    from wattcast.control.watch_card import find_catalogue_gpu

    chip = find_catalogue_gpu(name)
    if chip is None:
        raise bad_value(option, "a card that the catalogue knows (`wattcast gpus`)", name, instead)
    return chip


def _read_objective(
    minimise: str,
    slowdown: str | None,
    latency: str | None = None,
    cap: str | None = None,
    **_: Any,
) -> Objective:
    from wattcast.control.search_problem import Goal, Objective

    check_names("objective", minimise, list(Goal))
    bounds = (slowdown, "", "--slowdown"), (latency, "s", "--latency"), (cap, "W", "--cap")
    most = [None if given is None else units.parse_amount(given, *of) for given, *of in bounds]
    return Objective(Goal(minimise), *most)


def _read_workload(text: str) -> dict[str, Any]:
    """Return the columns of a calibration row that say what was run, of ``MODEL,key=value,...``."""
    from wattcast.report.comparison_sides import PredictionSpec, parse_prediction_spec
    from wattcast.workload.model_options import ModelOptions
    from wattcast.workload.readers.load_workload import load_workload

    spec = parse_prediction_spec(text, PredictionSpec("", "any", {}))
    load_workload(spec.workload, ModelOptions.from_names(**spec.options))  # wrong names end here
    path = Path(spec.workload)
    return {"workload": str(path.absolute()) if path.is_file() else spec.workload, **spec.options}


def _serving_limits(ttft: str, tpot: str) -> ServingLimits:
    """Return the bounds of the 99th percentiles, written ``500ms`` or ``p99:500ms``."""
    from wattcast.control.serving_control import ServingLimits
    from wattcast.serving.latency_bounds import parse_latency_bounds

    found = []
    for name, text in (("ttft", ttft), ("tpot", tpot)):
        bound, *more = parse_latency_bounds(name, text, 99.0)
        if more or bound.percentile != 99.0:
            raise bad_value(
                f"--{name}", "one time, of the 99th percentile, which the policy steers by", text
            )
        found.append(bound.seconds)
    return ServingLimits(*found)


def _period_s(text: str) -> float:
    seconds = units.parse_amount(text, "s", "--period")
    if not SHORTEST_PERIOD_S <= seconds <= LONGEST_PERIOD_S:
        raise bad_value("--period", "20 ms to 1 h: below, a card's counters stand still", text)
    return seconds


def _parse_range(text: str | None, unit: str, where: str) -> tuple[float, float]:
    if text is None:
        return 0.0, float("inf")
    ends = [units.parse(part, unit, where) for part in text.split(":")]
    if len(ends) != 2 or not 0 <= ends[0] <= ends[1]:
        raise bad_value(where, f"LOW:HIGH in {unit}", text)
    return ends[0], ends[1]


def _make_setup(options: dict[str, Any], model: Any, forecast: Any = None) -> PolicySetup:
    from wattcast.control import plants, policies

    share = units.parse_amount(options["noise"] or 0.0, "", "--noise", most=0.99)
    noise = plants.MeasurementNoise(share, share) if share else None
    goal = _read_objective(**options)
    return policies.PolicySetup(
        goal, model=model, forecast=forecast or {}, noise=noise, seed=options["seed"]
    )


def _forecast_plants(
    plants: list[PlantTables], gpu: str | None, workloads: Path | None, goal: Objective
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    from wattcast.control import clock_forecast
    from wattcast.predictor import api

    if gpu is None:
        return {}, ["model_predictive: left out, as no --gpu says which card the table is of"]
    found: dict[str, clock_forecast.ClockCurves] = {}
    notes: list[str] = []
    for tables in plants:
        some, missing = clock_forecast.forecast_applications(tables, api.find_gpu(gpu), workloads)
        found |= some
        notes += [f"model_predictive: none for {name}: {why}" for name, why in missing.items()]
    notes += sorted({f"model_predictive: {f.status} coefficients" for f in found.values()})
    errors = clock_forecast.measure_slowdown_errors(plants, found)
    chosen: dict[str, tuple[int, ...]] = {}
    for tables in plants:
        chosen |= clock_forecast.choose_forecast_settings(tables, found, goal, errors)
    if goal.slowdown is not None:
        notes.append(
            "model_predictive: bounds hold with a chance of 95 %, by the errors of other model families"
        )
    return chosen, list(dict.fromkeys(notes))


def _compare_policies(
    plants: list[PlantTables],
    setup: PolicySetup,
    title: str,
    without: tuple[str, ...],
    notes: list[str],
    more: dict[str, Any],
) -> CommandOutput:
    from wattcast.control import policy_comparison

    found = policy_comparison.compare_policies(plants, setup)
    return CommandOutput(
        lambda: {**policy_comparison.comparison_json(found, plants, notes, without), **more},
        lambda console: policy_comparison.print_comparison(console, found, title, without, more),
        lambda: _list_figures(plants, found, setup),
        notes,
    )


def _list_figures(
    plants: list[PlantTables], comparison: PolicyComparison, setup: PolicySetup
) -> dict[str, FigureMaker]:
    """Return the figures of a comparison; on the card of paper 004 also those that the paper draws
    of it alone.
    """
    from wattcast.control import management_figures, sensitivity_model
    from wattcast.lab.paper_figures import hd7970_figures

    figures = management_figures.list_management_figures(plants, comparison, setup)
    for tables in plants:
        if "Graph500" in tables.applications:
            models = [sensitivity_model.load_shipped_model()]
            if setup.model is not None:
                models.insert(0, setup.model)
            by_name = {model.name: model for model in models}
            figures |= hd7970_figures.list_figures(tables, comparison, by_name)
    return figures
