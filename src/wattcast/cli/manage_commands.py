"""``wattcast manage``: run-time control on simulated cards, on measured tables and on a real card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.shared_options import (
    FIGURES,
    Arrivals,
    Environment,
    FigureOptions,
    Json,
    Lengths,
    Model,
    argument,
    option,
    shared_option,
    takes_options,
)
from wattcast.core import units
from wattcast.core.errors import bad_value, check_names
from wattcast.core.whole_files import check_writable

if TYPE_CHECKING:
    from wattcast.hardware import Gpu
    from wattcast.manage.plants import PlantTables
    from wattcast.manage.policies import PolicySetup
    from wattcast.manage.search_problem import Objective
    from wattcast.manage.serving_control import ServingLimits

SHORTEST_PERIOD_S, LONGEST_PERIOD_S = 0.02, 3600.0
manage_app = typer.Typer(
    add_completion=False, help="Steer clocks to spend less power for the same speed.", no_args_is_help=True
)

GOAL: dict[str, tuple[Any, Any]] = {  # what a policy seeks; _read_objective reads them
    "minimise": shared_option(str, "ed2|ed|energy", "ed2"),
    "slowdown": shared_option(str | None, "Longest time allowed over the default's, such as 10%."),
    "latency": shared_option(str | None, "Longest time of a run, or unit of work, allowed: 5ms."),
    "cap": shared_option(str | None, "Board power not to be exceeded, such as 180W."),
}
PLAYED: dict[str, tuple[Any, Any]] = {
    **GOAL,
    "noise": shared_option(str | None, "Measurement noise of time and power, such as 1%."),
    "seed": shared_option(int, "Of noise and perturbation.", 0, min=0),
    "json": (Json, False),
    **FIGURES,
}
WATCHED = {name: GOAL[name] for name in ("minimise", "slowdown")}
Device = Annotated[int, option("Card, by NVML index.", min=0)]
Socket = Annotated[Path | None, option("Socket of the daemon; default: /run/wattcast/socket.")]
FirstToken = Annotated[str, option("Longest 99th percentile to the first token.", "--ttft")]
PerToken = Annotated[str, option("Longest 99th percentile per output token.", "--tpot")]


@manage_app.command()
@takes_options(PLAYED)
def simulate(
    ctx: typer.Context,
    workloads: Annotated[list[str] | None, argument("Workloads for a catalogue GPU; none for hd-7970.")] = None,
    gpu: Annotated[str, option("hd-7970 (paper 004, simulated) or a catalogue GPU.")] = "hd-7970",
    batch: Annotated[int | None, option("Sequences or images at once (catalogue GPUs).", min=1)] = None,
    seq: Annotated[int | None, option("Prompt or context length (catalogue GPUs).", min=1)] = None,
    phase: Annotated[str | None, option("prefill|decode|train|forward (catalogue GPUs).")] = None,
    knobs: Annotated[str, option("core|memory|sms, with commas (catalogue GPUs).")] = "core",
    perturbed: Annotated[int, option("Also run this many perturbed plants (hd-7970).", min=0)] = 0,
    sensitivity: Annotated[Path | None, option("Sensitivity model (wattcast lab sensitivity).")] = None,
    export: Annotated[Path | None, option("Save time and counters of all settings as CSV.")] = None,
    **options: Any,
) -> None:
    """Play all policies on a simulated card.

    Example: wattcast manage simulate --perturbed 20
    """
    from wattcast.manage import policy_comparison
    from wattcast.manage.hd7970 import STRESS_APPLICATIONS
    from wattcast.manage.plants import KnobRole

    env: Environment = ctx.obj
    given = {"batch": batch, "seq": seq, "phase": phase}
    of_model = {name: value for name, value in given.items() if value is not None}
    roles = {"core": KnobRole.CORE_CLOCK, "memory": KnobRole.MEMORY_CLOCK, "sms": KnobRole.COMPUTE_UNITS}
    wanted = [name.strip() for name in knobs.split(",")]
    check_names("knob", wanted, roles)
    turned = [roles[name] for name in wanted]
    plant, model = policy_comparison.choose_plant(gpu, workloads or [], sensitivity, of_model, turned)
    setup = _make_setup(options, model)
    sweep = policy_comparison.sweep_perturbed_cards(perturbed, setup, setup.seed) if perturbed else None
    if export is not None:
        policy_comparison.export_tables(plant, export)
        env.say(f"table saved: {export}")
    more = {} if sweep is None else {"perturbed": sweep}
    _compare_policies(env, [plant], setup, f"{plant.name}, simulated", options, STRESS_APPLICATIONS, [], more)


@manage_app.command()
@takes_options(PLAYED)
def replay(
    ctx: typer.Context,
    files: Annotated[list[Path], argument("Tables of time and power by clock.")],
    default: Annotated[
        str | None, option("The vendor's clocks, CORE/MEM in MHz (1164/3505); default: the highest.")
    ] = None,
    repeats: Annotated[int, option("With noise: also repeat this often and count who is worse off.", min=0)] = 0,
    iterations: Annotated[int, option("Runs of each application.", min=1)] = 100,
    gpu: Annotated[str | None, option("The table's card in the catalogue, to predict it.")] = None,
    workloads: Annotated[Path | None, option("Folder of operator lists, NAME.json.")] = None,
    leave_out: Annotated[list[str] | None, option("Applications to leave out, by start of name.")] = None,
    **options: Any,
) -> None:
    """Play all policies on tables of real measurements.

    Example: wattcast manage replay real_time_power_by_clock.csv --default 1164/3505 --json
    """
    from wattcast.manage import policy_comparison as tables

    env: Environment = ctx.obj
    plants = [p for file in files for p in tables.read_replay_tables(file, iterations, default)]
    plants = tables.leave_out_applications(plants, leave_out or [])
    chosen, notes = _forecast_plants(plants, gpu, workloads, _read_objective(**options))
    setup = _make_setup(options, None, chosen)
    more = _repeat_with_noise(plants, setup, repeats)
    _compare_policies(env, plants, setup, ", ".join(f.name for f in files), options, (), notes, more)


@manage_app.command()
@takes_options(WATCHED)
def watch(
    ctx: typer.Context,
    device: Device = 0,
    period: Annotated[str, option("Time between two readings.")] = "1s",
    count: Annotated[int, option("Readings; 0: until interrupted.", min=0)] = 5,
    gpu: Annotated[str | None, option("Catalogue GPU of the card; default: by its name.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Observe a card and say what could be set and what that might save. Sets nothing."""
    from wattcast.manage import watch_card
    from wattcast.measure.device_control import NvmlCard

    env: Environment = ctx.obj
    seconds, goal = _period_s(period), _read_objective(**options)
    card = NvmlCard(device)
    card.open()
    try:
        found = watch_card.watch_card(card, seconds, count, goal, gpu, env.say)
    finally:
        card.close()
    if json:
        env.json(found)
        return
    watch_card.print_watched(env.console(), found)


@manage_app.command(context_settings={"allow_interspersed_args": False})
@takes_options(GOAL)
def run(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None, argument("The program, after --; none: what runs on the card already.")
    ] = None,
    apply: Annotated[bool, option("Really set the card; else a dry run.", "--apply")] = False,
    device: Device = 0,
    period: Annotated[str, option("Time between two decisions.")] = "1s",
    progress: Annotated[
        Path | None, option("File the program appends a byte to per unit of work (WATTCAST_PROGRESS).")
    ] = None,
    metrics: Annotated[
        str | None, option("Metrics of a serving engine (vLLM, SGLang): http://localhost:8000/metrics.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model that the engine serves, to forecast its steps.")] = None,
    ttft: FirstToken = "500ms",
    tpot: PerToken = "50ms",
    turn_limit: Annotated[bool, option("Turn the power limit as well.", "--turn-limit")] = False,
    sm_percent: Annotated[int | None, option("Share of the SMs, through a running MPS server.")] = None,
    units: Annotated[
        Path | None, option("File the program reads from how many SMs to use, by green contexts (WATTCAST_UNITS).")
    ] = None,
    sms: Annotated[int | None, option("SMs of the card; default: the catalogue's.")] = None,
    rows: Annotated[Path | None, option("Save time and power at each clock as CSV for `wattcast calibrate`.")] = None,
    workload: Annotated[
        str | None, option("With --rows, what a unit of work is: MODEL,key=value,... such as llama3-8b,phase=train.")
    ] = None,
    socket: Socket = None,
    **options: Any,
) -> None:
    """Control a card while a program runs on it. The daemon sets it, and gives it back however this ends.

    Where no daemon runs, root gets one for the time of the program. A program that trains reports its steps
    (--progress). A serving engine tells its response times (--metrics); its card needs the least energy per token
    that keeps them.

    Example: wattcast manage run --apply --progress /tmp/done -- python train.py
    """
    from functools import partial

    from wattcast.manage import live_control, serving_control
    from wattcast.manage.daemon_client import hold_card
    from wattcast.manage.serving_control import read_engine_metrics
    from wattcast.manage.watch_card import find_catalogue_gpu, make_advice
    from wattcast.measure.device_control import NvmlCard

    env: Environment = ctx.obj
    goal = _read_objective(**options)
    seconds = _period_s(period)
    if progress is not None and not progress.absolute().parent.is_dir():
        raise bad_value("--progress", "a file in a folder that exists", str(progress))
    limits = _serving_limits(ttft, tpot)
    if model is not None:
        serving_control.find_served_model(model)
        if metrics is None:
            raise bad_value("--model", "the address of its engine's metrics (--metrics)", "none")
    if metrics is not None and not command:
        read_engine_metrics(metrics)  # whether it answers is known before the card is asked for
    if (rows is None) != (workload is None) or (rows is not None and progress is None):
        raise bad_value("--rows and --workload", "both, and --progress with them", "one of them missing")
    unit = None if workload is None else _read_workload(workload)
    if rows is not None:
        check_writable(rows)
    variables = dict(env.variables)
    if sm_percent is not None:
        variables |= live_control.limit_sm_share(sm_percent, variables)
    card = NvmlCard(device)
    card.open()
    if not apply:
        env.say(f"dry run on {card.name}: clocks would be set and given back; add --apply to do it.")
        raise typer.Exit
    told = None
    if units is not None:
        total = sms or int(_catalogue_gpu(card.name, "--units", "Tell how many SMs it has (--sms).").sm_count)
        told = live_control.SmCountFile(units, total)
    keeper: Any = None if metrics is None else partial(serving_control.LatencyKeeper, limits=limits)
    if model is not None:
        chip = _catalogue_gpu(card.name, "--model", "Leave it out: what steps take is then learned.")
        by_level = serving_control.build_clock_levels(model, chip)
        keeper = partial(serving_control.make_keeper, by_level, limits)
    task = live_control.ControlTask(
        goal,
        seconds,
        progress,
        told,
        turn_limit,
        make_advice(goal, find_catalogue_gpu(card.name)),
        keeper,
        None if metrics is None else partial(read_engine_metrics, metrics),
        rows,
        unit,
    )
    with hold_card(card, socket) as held:
        ended = live_control.run_controlled_program(held, command or [], task, env.say, variables)
    raise typer.Exit(ended.code if ended.code >= 0 else 128 - ended.code)


@manage_app.command()
def plane(
    ctx: typer.Context,
    command: Annotated[list[str], argument("The program, after --; {core} and {memory} are MHz.")],
    apply: Annotated[bool, option("Really set the card; else name the clocks.", "--apply")] = False,
    device: Device = 0,
    cores: Annotated[int, option("Core clocks, evenly over what the card allows.", min=1)] = 6,
    memories: Annotated[int, option("Memory clocks, likewise; 1: not touched.", min=1)] = 1,
    socket: Socket = None,
) -> None:
    """Run a program at every pair of clocks of a plane. The daemon sets them, and gives them back however this ends.

    Example: wattcast manage plane --apply --cores 8 -- wattcast lab microbench --out rows/{core}-{memory}
    """
    from wattcast.manage.daemon_client import hold_card
    from wattcast.manage.live_control import choose_clock_plane, visit_clock_plane
    from wattcast.measure.device_control import NvmlCard

    env: Environment = ctx.obj
    card = NvmlCard(device)
    card.open()
    points = choose_clock_plane(*card.clocks_hz(), cores, memories)
    told = ", ".join(f"{core / 1e6:.0f}/{memory / 1e6:.0f}" for core, memory in points)
    if not apply:
        env.say(f"dry run on {card.name}: core/memory MHz {told} would be set and given back; add --apply to do it.")
        raise typer.Exit
    with hold_card(card, socket) as held:
        codes = visit_clock_plane(held, points, command, env.say, env.variables)
    failed = [f"{core / 1e6:.0f}/{memory / 1e6:.0f}" for (core, memory), code in codes.items() if code != 0]
    env.say(f"the card has back what it had. {len(codes) - len(failed)} of {len(points)} pairs of clocks done.")
    if failed or len(codes) < len(points):
        env.say(f"refused or ended otherwise, core/memory MHz: {', '.join(failed) or 'none'}")
        raise typer.Exit(next((abs(code) for code in codes.values() if code), 1))


@manage_app.command()
def daemon(
    ctx: typer.Context,
    gpu: Annotated[
        list[str] | None, option("Card that clients may set, by index or UUID; default: all.", "--gpu")
    ] = None,
    clocks: Annotated[str | None, option("Core clocks allowed, such as 900MHz:1980MHz.")] = None,
    limits: Annotated[str | None, option("Power limits allowed, such as 300W:700W.")] = None,
    locked: Annotated[
        str | None, option("Core clock the administrator has locked, which drivers do not tell.")
    ] = None,
    group: Annotated[str | None, option("Users that may connect; default: root alone.")] = None,
    socket: Socket = None,
    unit: Annotated[bool, option("Print a systemd unit instead.", "--unit")] = False,
    lifeline: Annotated[bool, option("End when standard input does.", "--lifeline", hidden=True)] = False,
) -> None:
    """Own the cards of this node: set them for clients, and give them back when a client is silent or gone.

    Example: wattcast manage daemon --group wattcast --clocks 900MHz:1980MHz
    """
    from wattcast.manage import card_daemon
    from wattcast.manage.daemon_client import find_group, find_settable_cards, print_unit

    env: Environment = ctx.obj
    if unit:
        env.stdout.write(print_unit())
        return
    scope = card_daemon.DaemonScope(
        _parse_range(clocks, "Hz", "--clocks"),
        _parse_range(limits, "W", "--limits"),
        None if locked is None else units.parse(locked, "Hz", "--locked"),
    )
    path, members = socket or card_daemon.SOCKET, find_group(group)
    wanted = gpu or []
    if not lifeline:
        env.say(f"clients connect to {path} as {f'members of {group}' if group else 'root'}")

    def serve(stopped: Any) -> int:
        return card_daemon.serve_cards(find_settable_cards(wanted), scope, path, members, env.say, stopped)

    raise typer.Exit(card_daemon.run_supervised(serve, env.say, 0 if lifeline else None))


@manage_app.command()
def status(ctx: typer.Context, socket: Socket = None, json: Json = False) -> None:
    """Say what every card is set to, who holds it, and which were left changed; exit code 5 if any was."""
    from wattcast.manage.daemon_client import read_status

    env: Environment = ctx.obj
    found = read_status(socket)
    if json:
        env.json(found.to_plain())
    else:
        for line in found.lines():
            env.console().print(line, markup=False, highlight=False)
    raise typer.Exit(found.exit_code)


@manage_app.command()
def restore(
    ctx: typer.Context,
    gpu: Annotated[str | None, argument("UUID; default: every card that is changed.")] = None,
    socket: Socket = None,
) -> None:
    """Give cards back what they had, through the daemon, or as root without one. Whoever holds them loses them."""
    from wattcast.manage.daemon_client import restore_cards

    env: Environment = ctx.obj
    restore_cards(gpu, socket, env.say)


@manage_app.command()
def rehearse(
    ctx: typer.Context,
    model: Model,
    gpu: Annotated[str, option("Catalogue GPU.")] = "h200",
    rate: Annotated[str, option("Requests per second and GPU.")] = "10/s",
    prompt: Lengths = "512",
    output: Lengths = "128",
    arrivals: Arrivals = "poisson",
    seconds: Annotated[str, option("Time of arrivals, such as 600 or 1h.")] = "30min",
    ttft: FirstToken = "500ms",
    tpot: PerToken = "50ms",
    gpus: Annotated[int, option("GPUs that share --site-power, each with a trace of its own.", min=1)] = 1,
    site_power: Annotated[str | None, option("Power of all of them together, such as 2kW.")] = None,
    seed: Annotated[int, option("Of the drawn arrivals and lengths.", min=0)] = 1,
    json: Json = False,
) -> None:
    """Rehearse the control of serving GPUs on simulated traffic, before any card is touched.

    Example: wattcast manage rehearse llama3-8b --rate 20/s --gpus 4 --site-power 1800W --seconds 10min
    """
    import numpy as np

    from wattcast.manage import serving_control
    from wattcast.predictor.api import find_gpu
    from wattcast.serving.arrivals import draw_trace

    env: Environment = ctx.obj
    per_s = units.parse_amount(rate, "/s", "--rate", inclusive=False)
    length_s = units.parse_seconds(seconds, "--seconds")
    chip, limits = find_gpu(gpu), _serving_limits(ttft, tpot)
    most_w = units.parse_amount(site_power, "W", "--site-power", inclusive=False) if site_power else None
    traces = [draw_trace(per_s, prompt, output, arrivals, length_s, None, seed + i) for i in range(gpus)]
    by_level = serving_control.build_clock_levels(model, chip)
    if most_w is not None:
        limit_w = float(np.mean(chip.power.limit_w))
        found = serving_control.rehearse_site_serving(by_level, traces, limits, most_w, limit_w)
    else:
        found = serving_control.rehearse_load(by_level, traces[0], limits)
    if json:
        env.json(found)
        return
    for name, value in found.items():
        env.console().print(f"{name}: {value:.6g}", highlight=False)


@manage_app.command()
def site(
    ctx: typer.Context,
    nodes: Annotated[list[Path], argument("Sockets of the nodes' daemons, forwarded where remote.")],
    site_power: Annotated[str, option("Power that all GPUs together may draw, such as 3kW.")],
    priority: Annotated[list[str] | None, option("UUID=NUMBER: GPUs with a higher number are served first.")] = None,
) -> None:
    """Share a power budget among the GPUs of several nodes until interrupted.

    The power limit that each GPU has now is its safe share: it keeps it, and gets it back when this command ends.

    Example: wattcast manage site /run/wattcast/socket /run/site/b.sock --site-power 3kW
    """
    import signal

    from wattcast.manage.site_budget import coordinate_site

    env: Environment = ctx.obj
    ended: list[int] = []
    ranks: dict[str, int] = {}
    for text in priority or []:
        uuid, _, rank = text.rpartition("=")
        if not uuid or not rank.lstrip("-").isdigit():
            raise bad_value("--priority", "UUID=NUMBER", text)
        ranks[uuid] = int(rank)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: ended.append(number))
    coordinate_site(
        nodes, units.parse_amount(site_power, "W", "--site-power", inclusive=False), ranks, env.say, lambda: not ended
    )


def _catalogue_gpu(name: str, option: str, instead: str) -> Gpu:
    """Return the catalogue's card by what the driver calls it, which ``option`` needs."""
    from wattcast.manage.watch_card import find_catalogue_gpu

    chip = find_catalogue_gpu(name)
    if chip is None:
        raise bad_value(option, "a card that the catalogue knows (`wattcast gpus`)", name, instead)
    return chip


def _read_objective(
    minimise: str, slowdown: str | None, latency: str | None = None, cap: str | None = None, **_: Any
) -> Objective:
    from wattcast.manage.search_problem import Goal, Objective

    known = [str(g) for g in Goal]
    check_names("objective", minimise, known)
    return Objective(
        Goal(minimise),
        None if slowdown is None else units.parse_amount(slowdown, "", "--slowdown"),
        None if latency is None else units.parse_amount(latency, "s", "--latency"),
        None if cap is None else units.parse_amount(cap, "W", "--cap"),
    )


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
    from wattcast.manage.serving_control import ServingLimits
    from wattcast.serving.serving_result import parse_latency_bounds

    found = []
    for name, text in (("ttft", ttft), ("tpot", tpot)):
        bounds = parse_latency_bounds(name, text, 99.0)
        if [bound.percentile for bound in bounds] != [99.0]:
            raise bad_value(f"--{name}", "one time, of the 99th percentile, which the policy steers by", text)
        found.append(bounds[0].seconds)
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
    from wattcast.manage.plants import MeasurementNoise
    from wattcast.manage.policies import PolicySetup

    share = units.parse_amount(options["noise"] or 0.0, "", "--noise", most=0.99)
    noise = MeasurementNoise(share, share) if share else None
    return PolicySetup(
        _read_objective(**options), model=model, forecast=forecast or {}, noise=noise, seed=options["seed"]
    )


def _forecast_plants(
    plants: list[PlantTables], gpu: str | None, workloads: Path | None, goal: Objective
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    from wattcast.manage import clock_forecast
    from wattcast.predictor import api

    if gpu is None:
        return {}, ["model_predictive: left out, as no --gpu says which card the table is of"]
    found: dict[str, clock_forecast.ClockForecast] = {}
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
        notes.append("model_predictive: bounds hold with a chance of 95 %, by the errors of other model families")
    return chosen, list(dict.fromkeys(notes))


def _compare_policies(
    env: Environment,
    plants: list[PlantTables],
    setup: PolicySetup,
    title: str,
    options: dict[str, Any],
    without: tuple[str, ...],
    notes: list[str],
    more: dict[str, Any],
) -> None:
    from wattcast.manage.policy_comparison import compare_policies, comparison_json

    wanted = FigureOptions(*(options[name] for name in FIGURES))
    comparison = compare_policies(plants, setup)
    if wanted.any:
        from wattcast.manage.management_figures import list_management_figures

        wanted.save(env, list_management_figures(plants, comparison, setup))
    if options["json"]:
        env.json({**comparison_json(comparison, plants, notes, without), **more})
        return
    from wattcast.manage.policy_comparison import print_comparison

    print_comparison(env.console(), comparison, title, without, more)
    for line in notes:
        env.say(line)


def _repeat_with_noise(plants: list[PlantTables], setup: PolicySetup, repeats: int) -> dict[str, Any]:
    from wattcast.manage.policy_comparison import count_worse_runs

    if not repeats:
        return {}
    if setup.noise is None:
        raise bad_value("--repeats", "noise, such as --noise 1%", "none", "Without noise all repeats are alike.")
    return {"noise": count_worse_runs(plants, setup, repeats)}
