"""``wattcast manage``: run-time control on simulated cards, on measured tables and on a real card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.shared_options import Environment, FigureOptions, Figures, Format, Json, Plot, Which
from wattcast.core import units
from wattcast.core.errors import bad_value, unknown_name

if TYPE_CHECKING:
    from wattcast.manage.plants import MeasurementNoise, PlantTables
    from wattcast.manage.policies import PolicySetup
    from wattcast.manage.search_problem import Objective

SHORTEST_PERIOD_S, LONGEST_PERIOD_S = 0.02, 3600.0
manage_app = typer.Typer(
    add_completion=False, help="Steer clocks to spend less power for the same speed.", no_args_is_help=True
)

Goal = Annotated[str, typer.Option("--objective", help="ed2|ed|energy: what is minimised.")]
Slowdown = Annotated[str | None, typer.Option(help="Longest time allowed over the default's, such as 10%.")]
Latency = Annotated[str | None, typer.Option(help="Longest time of one run allowed, such as 5ms.")]
Cap = Annotated[str | None, typer.Option(help="Board power not to be exceeded, such as 180W.")]
Scatter = Annotated[str | None, typer.Option("--noise", help="Measurement noise of time and power, such as 1%.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of noise and perturbation.")]
Device = Annotated[int, typer.Option(min=0, help="Card, by NVML index.")]
Socket = Annotated[Path | None, typer.Option(help="Socket of the daemon; default: /run/wattcast/socket.")]


@manage_app.command()
def simulate(
    ctx: typer.Context,
    workloads: Annotated[
        list[str] | None, typer.Argument(help="Workloads for a catalogue GPU; none for hd-7970.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="hd-7970 (paper 004, simulated) or a catalogue GPU.")] = "hd-7970",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences or images at once (catalogue GPUs).")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Prompt or context length (catalogue GPUs).")] = None,
    phase: Annotated[str | None, typer.Option(help="prefill|decode|train|forward (catalogue GPUs).")] = None,
    objective: Goal = "ed2",
    slowdown: Slowdown = None,
    latency: Latency = None,
    cap: Cap = None,
    noise: Scatter = None,
    seed: Seed = 0,
    perturbed: Annotated[int, typer.Option(min=0, help="Also run this many perturbed plants (hd-7970).")] = 0,
    sensitivity: Annotated[Path | None, typer.Option(help="Sensitivity model (wattcast lab sensitivity).")] = None,
    export: Annotated[Path | None, typer.Option(help="Save time and counters of all settings as CSV.")] = None,
    json: Json = False,
    plot: Plot = None,
    figure: Which = None,
    figures: Figures = None,
    format: Format = "png",
) -> None:
    """Play all policies on a simulated card.

    Example: wattcast manage simulate --perturbed 20
    """
    from wattcast.manage import policy_comparison
    from wattcast.manage.hd7970 import STRESS_APPLICATIONS

    env: Environment = ctx.obj
    drawn = FigureOptions(plot, figure, figures, format)
    goal = _objective(objective, slowdown, latency, cap)
    given = {"batch": batch, "seq": seq, "phase": phase}
    options = {name: value for name, value in given.items() if value is not None}
    plant, model = policy_comparison.choose_plant(gpu, workloads or [], sensitivity, options)
    setup = _setup(goal, _noise(noise), seed, model)
    sweep = policy_comparison.sweep_perturbed_cards(perturbed, setup, seed) if perturbed else None
    if export is not None:
        policy_comparison.export_tables(plant, export)
        env.say(f"table saved: {export}")
    more = {} if sweep is None else {"perturbed": sweep}
    _compare(env, [plant], setup, f"{plant.name}, simulated", json, drawn, STRESS_APPLICATIONS, [], more)


@manage_app.command()
def replay(
    ctx: typer.Context,
    files: Annotated[list[Path], typer.Argument(help="Tables of time and power by clock.")],
    default: Annotated[
        str | None, typer.Option(help="The vendor's clocks, CORE/MEM in MHz (1164/3505); default: the highest.")
    ] = None,
    objective: Goal = "ed2",
    slowdown: Slowdown = None,
    latency: Latency = None,
    cap: Cap = None,
    noise: Scatter = None,
    seed: Seed = 0,
    repeats: Annotated[
        int, typer.Option(min=0, help="With noise: also repeat this often and count who is worse off.")
    ] = 0,
    iterations: Annotated[int, typer.Option(min=1, help="Runs of each application.")] = 100,
    gpu: Annotated[str | None, typer.Option(help="The table's card in the catalogue, to predict it.")] = None,
    workloads: Annotated[Path | None, typer.Option(help="Folder of operator lists, NAME.json.")] = None,
    leave_out: Annotated[list[str] | None, typer.Option(help="Applications to leave out, by start of name.")] = None,
    json: Json = False,
    plot: Plot = None,
    figure: Which = None,
    figures: Figures = None,
    format: Format = "png",
) -> None:
    """Play all policies on tables of real measurements.

    Example: wattcast manage replay real_time_power_by_clock.csv --default 1164/3505 --json
    """
    from wattcast.manage import replay_tables as tables

    env: Environment = ctx.obj
    drawn = FigureOptions(plot, figure, figures, format)
    goal = _objective(objective, slowdown, latency, cap)
    plants = [p for file in files for p in tables.read_replay_tables(file, iterations, default)]
    plants = tables.leave_out_applications(plants, leave_out or [])
    chosen, notes = _forecast(plants, gpu, workloads, goal)
    setup = _setup(goal, _noise(noise), seed, None, chosen)
    more = _repeated(plants, setup, repeats)
    _compare(
        env,
        plants,
        setup,
        ", ".join(f.name for f in files),
        json,
        drawn,
        (),
        notes,
        more,
    )


@manage_app.command()
def watch(
    ctx: typer.Context,
    device: Device = 0,
    period: Annotated[str, typer.Option(help="Time between two readings.")] = "1s",
    count: Annotated[int, typer.Option(min=0, help="Readings; 0: until interrupted.")] = 5,
    objective: Goal = "ed2",
    slowdown: Slowdown = None,
    gpu: Annotated[str | None, typer.Option(help="Catalogue GPU of the card; default: by its name.")] = None,
    json: Json = False,
) -> None:
    """Observe a card and say what could be set and what that might save. Sets nothing."""
    from wattcast.manage import watch_card
    from wattcast.measure.device_control import NvmlCard

    env: Environment = ctx.obj
    seconds = _period_s(period)
    card = NvmlCard(device)
    card.open()
    try:
        found = watch_card.watch_card(card, seconds, count, _objective(objective, slowdown, None, None), gpu, env.say)
    finally:
        card.close()
    if json:
        env.json(found)
        return
    watch_card.print_watched(env.console(), found)


@manage_app.command(context_settings={"allow_interspersed_args": False})
def run(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(help="The program, after --; none: what runs on the card already.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Really set the card; else a dry run.")] = False,
    device: Device = 0,
    period: Annotated[str, typer.Option(help="Time between two decisions.")] = "1s",
    objective: Goal = "ed2",
    slowdown: Slowdown = None,
    latency: Annotated[
        str | None, typer.Option(help="Longest time of one unit of work allowed, such as 5ms.")
    ] = None,
    cap: Cap = None,
    progress: Annotated[
        Path | None, typer.Option(help="File the program appends a byte to per unit of work (WATTCAST_PROGRESS).")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics of a serving engine (vLLM, SGLang): http://localhost:8000/metrics.")
    ] = None,
    ttft: Annotated[str, typer.Option(help="With --metrics: longest 99th percentile to the first token.")] = "500ms",
    tpot: Annotated[str, typer.Option(help="With --metrics: longest 99th percentile per output token.")] = "50ms",
    power_limit: Annotated[bool, typer.Option("--power-limit", help="Turn the power limit as well.")] = False,
    sm_percent: Annotated[int | None, typer.Option(help="Share of the SMs, through a running MPS server.")] = None,
    units: Annotated[
        Path | None,
        typer.Option(help="File the program reads from how many SMs to use, by green contexts (WATTCAST_UNITS)."),
    ] = None,
    sms: Annotated[int | None, typer.Option(help="SMs of the card; default: the catalogue's.")] = None,
    socket: Socket = None,
) -> None:
    """Control a card while a program runs on it. The daemon sets it, and gives it back however this ends.

    Where no daemon runs, root gets one for the time of the program. A program that trains reports its steps
    (--progress). A serving engine tells its response times (--metrics); its card needs the least energy per token
    that keeps them.

    Example: wattcast manage run --apply --progress /tmp/done -- python train.py
    """
    from functools import partial

    from wattcast.manage import live_control
    from wattcast.manage.daemon_client import hold_card
    from wattcast.manage.serving_control import ServingLimits, read_engine_metrics
    from wattcast.manage.watch_card import find_catalogue_gpu, make_advice
    from wattcast.measure.device_control import NvmlCard

    env: Environment = ctx.obj
    goal = _objective(objective, slowdown, latency, cap)
    seconds = _period_s(period)
    if progress is not None and not progress.absolute().parent.is_dir():
        raise bad_value("--progress", "a file in a folder that exists", str(progress))
    limits = None
    if metrics is not None:
        limits = ServingLimits(_seconds(ttft, "--ttft"), _seconds(tpot, "--tpot"))
        if not command:
            read_engine_metrics(metrics)  # whether it answers is known before the card is asked for
    variables = dict(env.variables)
    if sm_percent is not None:
        variables |= live_control.limit_sm_share(sm_percent, variables)
    card = NvmlCard(device)
    card.open()
    if not apply:
        env.say(f"dry run on {card.name}: clocks would be set and given back; add --apply to do it.")
        raise typer.Exit
    told = live_control.SmCountFile(units, sms or _sm_count(card.name)) if units else None
    task = live_control.ControlTask(
        goal,
        seconds,
        progress,
        told,
        power_limit,
        make_advice(goal, find_catalogue_gpu(card.name)),
        limits,
        None if metrics is None else partial(read_engine_metrics, metrics),
    )
    with hold_card(card, socket) as held:
        ended = live_control.run_controlled_program(held, command or [], task, env.say, variables)
    raise typer.Exit(ended.code if ended.code >= 0 else 128 - ended.code)


@manage_app.command()
def daemon(
    ctx: typer.Context,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", help="Card that clients may set, by index or UUID; default: all.")
    ] = None,
    clocks: Annotated[str | None, typer.Option(help="Core clocks allowed, such as 900MHz:1980MHz.")] = None,
    limits: Annotated[str | None, typer.Option(help="Power limits allowed, such as 300W:700W.")] = None,
    locked: Annotated[
        str | None, typer.Option(help="Core clock the administrator has locked, which drivers do not tell.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Users that may connect; default: root alone.")] = None,
    socket: Socket = None,
    unit: Annotated[bool, typer.Option("--unit", help="Print a systemd unit instead.")] = False,
    lifeline: Annotated[bool, typer.Option("--lifeline", hidden=True, help="End when standard input does.")] = False,
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
        _range(clocks, "Hz", "--clocks"),
        _range(limits, "W", "--limits"),
        None if locked is None else units.parse(locked, "Hz", "--locked"),
    )
    path, members = socket or card_daemon.SOCKET, find_group(group)
    wanted = gpu or []

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
    gpu: Annotated[str | None, typer.Argument(help="UUID; default: every card that is changed.")] = None,
    socket: Socket = None,
) -> None:
    """Give cards back what they had, through the daemon, or as root without one. Whoever holds them loses them."""
    from wattcast.manage.daemon_client import restore_cards

    env: Environment = ctx.obj
    restore_cards(gpu, socket, env.say)


@manage_app.command()
def rehearse(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Language model that the engine serves.")],
    gpu: Annotated[str, typer.Option(help="Catalogue GPU.")] = "h200",
    rate: Annotated[str, typer.Option(help="Requests per second and GPU.")] = "10/s",
    prompt: Annotated[str, typer.Option(help="Prompt tokens, as simulate takes them.")] = "512",
    output: Annotated[str, typer.Option(help="Output tokens, likewise.")] = "128",
    arrivals: Annotated[str, typer.Option(help="poisson, or diurnal:peak=2,period=24h for a day.")] = "poisson",
    seconds: Annotated[str, typer.Option(help="Length of the trace.")] = "30min",
    ttft: Annotated[str, typer.Option(help="Longest 99th percentile to the first token.")] = "500ms",
    tpot: Annotated[str, typer.Option(help="Longest 99th percentile per output token.")] = "50ms",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share --budget, each with a trace of its own.")] = 1,
    budget: Annotated[str | None, typer.Option(help="Power of all of them together, such as 2kW.")] = None,
    seed: Seed = 1,
    json: Json = False,
) -> None:
    """Rehearse the control of serving GPUs on simulated traffic, before any card is touched.

    Example: wattcast manage rehearse llama3-8b --rate 20/s --gpus 4 --budget 1800W --seconds 10min
    """
    import numpy as np

    from wattcast.manage import serving_control
    from wattcast.manage.serving_control import LatencyKeeper, ServingLimits
    from wattcast.predictor.api import find_gpu
    from wattcast.serving.arrivals import draw_trace

    env: Environment = ctx.obj
    chip, limits = find_gpu(gpu), ServingLimits(_seconds(ttft, "--ttft"), _seconds(tpot, "--tpot"))
    by_level = serving_control.build_clock_levels(model, chip)
    per_s, length_s = units.parse(rate, "/s", "--rate"), _seconds(seconds, "--seconds")
    traces = [draw_trace(per_s, prompt, output, arrivals, length_s, None, seed + i) for i in range(gpus)]
    if budget is not None:
        limit_w = float(np.mean(chip.power.limit_w))
        found = serving_control.rehearse_site_serving(
            by_level, traces, limits, units.parse(budget, "W", "--budget"), limit_w
        )
    else:
        keeper = LatencyKeeper([float(costs.clock_hz[0]) for costs in by_level], limits)
        found = serving_control.rehearse_load(by_level, traces[0], limits, keeper)
    if json:
        env.json(found)
        return
    for name, value in found.items():
        env.console().print(f"{name}: {value:.6g}", highlight=False)


@manage_app.command()
def site(
    ctx: typer.Context,
    nodes: Annotated[list[Path], typer.Argument(help="Sockets of the nodes' daemons, forwarded where remote.")],
    budget: Annotated[str, typer.Option(help="Power that all GPUs together may draw, such as 3kW.")],
    priority: Annotated[
        list[str] | None, typer.Option(help="UUID=NUMBER: GPUs with a higher number are served first.")
    ] = None,
) -> None:
    """Share a power budget among the GPUs of several nodes until interrupted.

    The power limit that each GPU has now is its safe share: it keeps it, and gets it back when this command ends.

    Example: wattcast manage site /run/wattcast/socket /run/site/b.sock --budget 3kW
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
    coordinate_site(nodes, units.parse(budget, "W", "--budget"), ranks, env.say, lambda: not ended)


def _sm_count(name: str) -> int:
    """Return the SMs of a card by what the driver calls it."""
    from wattcast.manage.watch_card import find_catalogue_gpu

    chip = find_catalogue_gpu(name)
    if chip is None:
        raise bad_value("--sms", f"how many SMs {name} has, as the catalogue does not know it", "none")
    return int(chip.sm_count)


def _objective(goal: str, slowdown: str | None, latency: str | None, cap: str | None) -> Objective:
    from wattcast.manage.search_problem import Goal as Goals
    from wattcast.manage.search_problem import Objective

    known = [str(g) for g in Goals]
    if goal not in known:
        raise unknown_name("objective", goal, known, f"Known: {', '.join(known)}.")
    return Objective(
        Goals(goal),
        None if slowdown is None else units.parse(slowdown, "", "--slowdown"),
        None if latency is None else units.parse(latency, "s", "--latency"),
        None if cap is None else units.parse(cap, "W", "--cap"),
    )


def _noise(text: str | None) -> MeasurementNoise | None:
    from wattcast.manage.plants import MeasurementNoise

    share = 0.0 if text is None else units.parse(text, "", "--noise")
    if not 0 <= share < 1:
        raise bad_value("--noise", "0% or more, below 100%", text)
    return MeasurementNoise(share, share) if share else None


def _period_s(text: str) -> float:
    seconds = units.parse(text, "s", "--period")
    if not SHORTEST_PERIOD_S <= seconds <= LONGEST_PERIOD_S:
        raise bad_value("--period", "20 ms to 1 h: below, a card's counters stand still", text)
    return seconds


def _seconds(text: str, where: str) -> float:
    return units.parse(text, "s", where)


def _range(text: str | None, unit: str, where: str) -> tuple[float, float]:
    if text is None:
        return 0.0, float("inf")
    ends = [units.parse(part, unit, where) for part in text.split(":")]
    if len(ends) != 2 or not 0 <= ends[0] <= ends[1]:
        raise bad_value(where, f"LOW:HIGH in {unit}", text)
    return ends[0], ends[1]


def _setup(
    goal: Objective, noise: MeasurementNoise | None, seed: int, model: Any, forecast: Any = None
) -> PolicySetup:
    from wattcast.manage.policies import PolicySetup

    return PolicySetup(objective=goal, model=model, forecast=forecast or {}, noise=noise, seed=seed)


def _forecast(
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


def _compare(
    env: Environment,
    plants: list[PlantTables],
    setup: PolicySetup,
    title: str,
    json: bool,
    wanted: FigureOptions,
    without: tuple[str, ...],
    notes: list[str],
    more: dict[str, Any],
) -> None:
    from wattcast.manage.policy_comparison import compare_policies, comparison_json

    comparison = compare_policies(plants, setup)
    if wanted.any:
        from wattcast.manage.management_figures import list_management_figures

        wanted.save(env, list_management_figures(plants, comparison, setup))
    if json:
        env.json({**comparison_json(comparison, plants, notes, without), **more})
        return
    from wattcast.manage.policy_comparison import print_comparison

    print_comparison(env.console(), comparison, title, without, more)
    for line in notes:
        env.say(line)


def _repeated(plants: list[PlantTables], setup: PolicySetup, repeats: int) -> dict[str, Any]:
    from wattcast.manage.policy_comparison import count_worse_runs

    if not repeats:
        return {}
    if setup.noise is None:
        raise bad_value("--repeats", "noise, such as --noise 1%", "none", "Without noise all repeats are alike.")
    return {"noise": count_worse_runs(plants, setup, repeats)}
