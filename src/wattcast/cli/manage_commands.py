"""``wattcast manage``: run-time control on simulated cards, on measured tables and on a real
card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NoReturn,
)

import typer

from wattcast.cli.command_builder import command, parse_pairs
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import (
    DEVICE,
    DEVICES,
    MODEL,
    SOCKET,
    TPOT,
    TTFT,
)
from wattcast.cli.figure_options import FigureOptions
from wattcast.cli.rehearsal_commands import FirstRunOptions, HallDayOptions
from wattcast.core import (
    bad_value,
    check_names,
    units,
)
from wattcast.core.option_declaration import Option, parse_group
from wattcast.core.whole_files import check_writable
from wattcast.options.serving_options import RequestShape
from wattcast.options.verb_options import part_of

if TYPE_CHECKING:
    from wattcast.control.live_control import ControlTask
    from wattcast.control.plants import PlantTables
    from wattcast.control.policies import PolicySetup
    from wattcast.control.policy_comparison import PolicyComparison
    from wattcast.control.program_files import SmCountFile
    from wattcast.control.search_problem import Objective
    from wattcast.control.sensitivity_model import SensitivityModel
    from wattcast.control.serving_control import ServingLimits
    from wattcast.hardware import Gpu
    from wattcast.measure.device_control import NvmlCard
    from wattcast.report.figure_style import FigureMaker

SHORTEST_PERIOD_S = 0.02
LONGEST_PERIOD_S = 3600.0


@dataclass(frozen=True)
class PolicyGoal:
    """What a policy seeks."""

    minimise: Annotated[str, Option("ed2|ed|energy")] = "ed2"
    slowdown: Annotated[
        float | None,
        Option("Longest time allowed over the default's, such as 10%.", unit=""),
    ] = None
    latency_s: Annotated[
        float | None,
        Option("Longest time of a run, or unit of work, allowed: 5ms.", unit="s"),
    ] = None
    cap_w: Annotated[
        float | None, Option("Board power not to be exceeded, such as 180W.", unit="W")
    ] = None

    def make_objective(self) -> Objective:
        """Return the objective that policies take."""
        from wattcast.control.search_problem import Goal, Objective

        check_names("objective", self.minimise, list(Goal))
        return Objective(Goal(self.minimise), self.slowdown, self.latency_s, self.cap_w)


@dataclass(frozen=True)
class PlayOptions:
    """Chance in a play of policies."""

    noise: Annotated[
        float,
        Option("Measurement noise of time and power, such as 1%.", unit="", most=0.99),
    ] = 0.0
    seed: Annotated[int, Option("Seed of noise and perturbation.", least=0)] = 0


WATCHED = part_of(PolicyGoal, "minimise", "slowdown")


@dataclass(frozen=True)
class SimulatedCard:
    """The card that is simulated, and its workload."""

    gpu: Annotated[str, Option("hd-7970 (paper 004, simulated) or a catalogue GPU.")] = "hd-7970"
    batch: Annotated[
        int | None, Option("Sequences or images at once (catalogue GPUs).", least=1)
    ] = None
    seq: Annotated[int | None, Option("Prompt or context length (catalogue GPUs).", least=1)] = None
    phase: Annotated[str | None, Option("prefill|decode|train|forward (catalogue GPUs).")] = None
    knobs: Annotated[str, Option("core|memory|sms, with commas (catalogue GPUs).")] = "core"
    perturbed: Annotated[int, Option("Also run this many perturbed cards (hd-7970).", least=0)] = 0
    sensitivity: Annotated[Path | None, Option("Sensitivity model (wattcast lab sensitivity).")] = (
        None
    )
    export: Annotated[Path | None, Option("Save time and counters of all settings as CSV.")] = None


@command("manage simulate", FigureOptions)
def simulate(
    env: Environment,
    card: SimulatedCard,
    policy: PolicyGoal,
    play: PlayOptions,
    workloads: Annotated[
        list[str] | None,
        Option("Workloads for a catalogue GPU; none for hd-7970.", positional=True),
    ] = None,
) -> CommandOutput:
    """Play all policies on a simulated card.

    Example: wattcast manage simulate --perturbed 20
    """
    from wattcast.control import hd7970, policy_comparison
    from wattcast.control.plants import KnobRole

    sizes = {
        "batch": card.batch,
        "seq": card.seq,
        "phase": card.phase,
    }
    options = {name: value for name, value in sizes.items() if value is not None}
    roles = {
        "core": KnobRole.CORE_CLOCK,
        "memory": KnobRole.MEMORY_CLOCK,
        "sms": KnobRole.COMPUTE_UNITS,
    }
    names = [name.strip() for name in card.knobs.split(",")]
    check_names("knob", names, roles)
    knobs = [roles[name] for name in names]
    plant, model = policy_comparison.choose_plant(
        card.gpu,
        workloads or [],
        card.sensitivity,
        options,
        knobs,
    )
    setup = _make_setup(policy, play, model)
    more: dict[str, Any] = {}
    if card.perturbed:
        more["perturbed"] = policy_comparison.sweep_perturbed_cards(
            card.perturbed, setup, setup.seed
        )
    if card.export is not None:
        policy_comparison.export_tables(plant, card.export)
        env.say(f"table saved: {card.export}")
    title = f"{plant.name}, simulated"
    return _compare_policies(
        [plant],
        setup,
        title,
        hd7970.STRESS_APPLICATIONS,
        [],
        more,
    )


@dataclass(frozen=True)
class ReplayedTables:
    """How tables of measurements are read and replayed."""

    default: Annotated[
        str | None,
        Option("The vendor's clocks, CORE/MEM in MHz (1164/3505); default: the highest."),
    ] = None
    repeats: Annotated[
        int, Option("With noise: also repeat this often and count who is worse off.", least=0)
    ] = 0
    iterations: Annotated[int, Option("Runs of each application.", least=1)] = 100
    gpu: Annotated[str | None, Option("The table's card in the catalogue, to predict it.")] = None
    workloads: Annotated[Path | None, Option("Folder of operator lists, NAME.json.")] = None
    leave_out: Annotated[Sequence[str], Option("Applications to leave out, by start of name.")] = ()


@command("manage replay", FigureOptions)
def replay(
    files: Annotated[list[Path], Option("Tables of time and power by clock.", positional=True)],
    tables: ReplayedTables,
    policy: PolicyGoal,
    play: PlayOptions,
) -> CommandOutput:
    """Play all policies on tables of real measurements.

    Example: wattcast manage replay real_time_power_by_clock.csv --default 1164/3505 --json
    """
    from wattcast.control import policy_comparison

    plants: list[PlantTables] = []
    for file in files:
        plants += policy_comparison.read_replay_tables(file, tables.iterations, tables.default)
    plants = policy_comparison.leave_out_applications(plants, list(tables.leave_out))
    goal = policy.make_objective()
    forecast, notes = _forecast_plants(plants, tables.gpu, tables.workloads, goal)
    setup = _make_setup(policy, play, None, forecast)
    if tables.repeats and setup.noise is None:
        do = "Without noise all repeats are alike."
        raise bad_value("--repeats", "noise, such as --noise 1%", "none", do)
    more: dict[str, Any] = {}
    if tables.repeats:
        more["noise"] = policy_comparison.count_worse_runs(plants, setup, tables.repeats)
    title = ", ".join(file.name for file in files)
    return _compare_policies(
        plants,
        setup,
        title,
        (),
        notes,
        more,
    )


@command("manage watch", WATCHED)
def watch(
    env: Environment,
    device: Annotated[int | None, DEVICE] = None,
    period: Annotated[str, Option("Time between two readings.")] = "1s",
    count: Annotated[int, Option("Number of readings; 0: until interrupted.", least=0)] = 5,
    gpu: Annotated[str | None, Option("Catalogue GPU of the card; default: by its name.")] = None,
    **options: Any,
) -> CommandOutput:
    """Observe a card and say what could be set and what that might save. Sets nothing."""
    from wattcast.control import watch_card
    from wattcast.measure.device_control import NvmlCard

    seconds = _period_s(period)
    goal = parse_group(PolicyGoal, options).make_objective()
    with closing(NvmlCard(device)) as card:
        card.open()
        watched = watch_card.watch_card(
            card,
            seconds,
            count,
            goal,
            gpu,
            env.say,
        )
    return CommandOutput.of(watched, dict, watch_card.print_watched)


@dataclass(frozen=True)
class ControlOptions:
    """How a card is controlled while a program runs on it."""

    apply: Annotated[bool, Option("Really set the card; else a dry run.")] = False
    device: Annotated[int | None, DEVICE] = None
    devices: Annotated[str | None, DEVICES] = None
    period: Annotated[str, Option("Time between two decisions.")] = "1s"
    progress: Annotated[
        Path | None,
        Option("File the program appends a byte to per unit of work (WATTCAST_PROGRESS)."),
    ] = None
    metrics: Annotated[
        str | None,
        Option("Metrics of a serving engine (vLLM, SGLang): http://localhost:8000/metrics."),
    ] = None
    model: Annotated[str | None, Option("Model that the engine serves, to forecast its steps.")] = (
        None
    )
    ttft: Annotated[str, TTFT] = "500ms"
    tpot: Annotated[str, TPOT] = "50ms"
    turn_limit: Annotated[bool, Option("Turn the power limit as well.")] = False
    sm_percent: Annotated[int | None, Option("Share of the SMs, through a running MPS server.")] = (
        None
    )
    units: Annotated[
        Path | None,
        Option(
            "File the program reads from how many SMs to use, by green contexts (WATTCAST_UNITS)."
        ),
    ] = None
    busy: Annotated[
        Path | None,
        Option(
            "Folder of the ranks' busy times (WATTCAST_BUSY): those that wait get slower clocks."
        ),
    ] = None
    sms: Annotated[int | None, Option("SMs of the card; default: the catalogue's.")] = None
    sensitivity: Annotated[
        Path | None,
        Option("Model made by `lab sensitivity`."),
    ] = None
    rows: Annotated[
        Path | None, Option("Save time and power at each clock as CSV for `wattcast calibrate`.")
    ] = None
    workload: Annotated[
        str | None,
        Option(
            "With --rows, what a unit of work is: MODEL,key=value,... such as "
            "llama3-8b,phase=train."
        ),
    ] = None
    socket: Annotated[Path | None, SOCKET] = None


@command("manage run", allow_interspersed_args=False)
def run(
    env: Environment,
    policy: PolicyGoal,
    control: ControlOptions,
    command: Annotated[
        list[str] | None,
        Option("The program, after --; none: what runs on the card already.", positional=True),
    ] = None,
) -> None:
    """Control a card while a program runs on it. The daemon sets it, and gives it back however this
    ends.

    Where no daemon runs, root gets one for the time of the program. Training reports its steps
    (--progress), a serving engine its response times (--metrics). Cards of one job (--devices) get
    one decision; --cap is then the power of all.

    Example: wattcast manage run --apply --progress /tmp/done -- python train.py
    """
    from wattcast.control import (
        live_control,
        program_files,
        watch_card,
    )

    goal = policy.make_objective()
    period_s = _period_s(control.period)
    limits = _serving_limits(control.ttft, control.tpot)
    _check_control(control, has_command=bool(command))
    unit = None if control.workload is None else _read_workload(control.workload)
    if control.rows is not None:
        check_writable(control.rows)
    variables = dict(env.variables)
    if control.sm_percent is not None:
        variables |= program_files.limit_sm_share(control.sm_percent, variables)

    cards = _open_cards(control.device, control.devices)
    name = cards[0].name
    model = _read_sensitivity(control.sensitivity, cards)
    if not control.apply:
        _explain_dry_run(env, cards)
    read_metrics = None
    if control.metrics is not None:
        from wattcast.control import serving_control

        read_metrics = partial(serving_control.read_engine_metrics, control.metrics)
    task = live_control.ControlTask(
        goal,
        period_s,
        control.progress,
        _make_count_file(control, name),
        control.busy,
        control.turn_limit,
        watch_card.make_advice(goal, watch_card.find_catalogue_gpu(name)),
        _choose_keeper(
            control.model,
            read_metrics is not None,
            limits,
            name,
            len(cards),
        ),
        read_metrics,
        model,
        control.rows,
        unit,
    )
    raise typer.Exit(
        _control_cards(
            env,
            cards,
            control.socket,
            command or [],
            task,
            variables,
        )
    )


def _read_sensitivity(path: Path | None, cards: Sequence[NvmlCard]) -> SensitivityModel | None:
    """Return a sensitivity model whose counters all cards tell."""
    from wattcast.control.sensitivity_model import read_sensitivity_model
    from wattcast.core import MissingTool

    if path is None:
        return None
    model = read_sensitivity_model(path)
    for card in cards:
        counters = card.read().counters
        if counters is None:
            why = f"{card.name} tells no counters (GPM: Hopper and later)"
            raise MissingTool(f"{why}; leave --sensitivity out: it is then measured.")
        model.predict(counters)  # raises where the model needs others
    return model


@dataclass(frozen=True)
class ServeOptions:
    """How the cards of a serving engine are controlled."""

    metrics: Annotated[
        str, Option("Metrics of the engine (vLLM, SGLang): http://localhost:8000/metrics.")
    ]
    apply: Annotated[bool, Option("Really set the cards; else a dry run.")] = False
    device: Annotated[int | None, DEVICE] = None
    devices: Annotated[str | None, DEVICES] = None
    model: Annotated[str | None, Option("Model that the engine serves, to forecast its steps.")] = (
        None
    )
    ttft: Annotated[str, TTFT] = "500ms"
    tpot: Annotated[str, TPOT] = "50ms"
    socket: Annotated[Path | None, SOCKET] = None


@command("manage serve")
def serve(env: Environment, options: ServeOptions) -> None:
    """Control the cards of a serving engine that runs already, until interrupted: the least energy
    per token that keeps its response times.

    With --model the clock follows every second the requests that wait and run, the cache that they
    use, and what is forecast for them; without, it follows the mean load of minutes. All cards of
    an engine with tensor parallelism (--devices) get one clock.

    Example: wattcast manage serve --apply --devices 0-7 --metrics http://localhost:8000/metrics
    """
    from wattcast.control import live_control, serving_control
    from wattcast.control.search_problem import Objective
    from wattcast.serving.simulate_serving import find_language_model

    limits = _serving_limits(options.ttft, options.tpot)
    if options.model is not None:
        find_language_model(options.model)
    read_metrics = partial(serving_control.read_engine_metrics, options.metrics)
    read_metrics()  # raises where nothing answers
    cards = _open_cards(options.device, options.devices)
    if not options.apply:
        _explain_dry_run(env, cards)
    keeper = _choose_keeper(
        options.model,
        True,
        limits,
        cards[0].name,
        len(cards),
    )
    task = live_control.ControlTask(Objective(), make_keeper=keeper, read_engine=read_metrics)
    raise typer.Exit(
        _control_cards(
            env,
            cards,
            options.socket,
            [],
            task,
            dict(env.variables),
        )
    )


def _open_cards(device: int | None, devices: str | None) -> list[NvmlCard]:
    """Open the cards of a job, or the one card that is steered."""
    from wattcast.control.job_cards import parse_devices
    from wattcast.measure.device_control import NvmlCard

    if devices is not None and device is not None:
        raise bad_value("--device and --devices", "one of them", "both")
    indices: Sequence[int | None] = [device] if devices is None else parse_devices(devices)
    cards = [NvmlCard(index) for index in indices]
    for card in cards:
        card.open()
    return cards


def _explain_dry_run(env: Environment, cards: Sequence[NvmlCard]) -> NoReturn:
    """Say what would be done with --apply, and end."""
    names = ", ".join(dict.fromkeys(card.name for card in cards))
    count = "" if len(cards) == 1 else f"{len(cards)} × "
    env.say(f"dry run on {count}{names}: clocks would be set and given back; add --apply to do it.")
    raise typer.Exit


def _control_cards(
    env: Environment,
    cards: Sequence[NvmlCard],
    socket: Path | None,
    command: Sequence[str],
    task: ControlTask,
    variables: Mapping[str, str],
) -> int:
    """Claim the cards, control them as one, and return the exit code."""
    from wattcast.control import (
        daemon_client,
        job_cards,
        live_control,
    )

    with daemon_client.hold_cards(cards, socket) as claimed:
        steered = claimed[0] if len(claimed) == 1 else job_cards.JobCards(claimed)
        code = live_control.run_controlled_program(
            steered,
            command,
            task,
            env.say,
            variables,
        )
    return code if code >= 0 else 128 - code


def _check_control(control: ControlOptions, has_command: bool) -> None:
    """Raise an error for options that do not go together, before the card is asked for."""
    if control.progress is not None and not control.progress.absolute().parent.is_dir():
        raise bad_value("--progress", "a file in a folder that exists", str(control.progress))
    if control.busy is not None and (control.devices is None or not control.busy.is_dir()):
        actual = "no --devices" if control.devices is None else str(control.busy)
        raise bad_value(
            "--busy", "a folder that exists, and the cards of a job (--devices)", actual
        )
    if control.model is not None:
        from wattcast.serving.simulate_serving import find_language_model

        find_language_model(control.model)
        if control.metrics is None:
            raise bad_value("--model", "the address of its engine's metrics (--metrics)", "none")
    if control.metrics is not None and not has_command:
        from wattcast.control import serving_control

        serving_control.read_engine_metrics(control.metrics)  # raises where nothing answers
    has_rows = control.rows is not None
    has_workload = control.workload is not None
    if has_rows != has_workload or (has_rows and control.progress is None):
        expected = "both, and --progress with them"
        raise bad_value("--rows and --workload", expected, "one of them missing")


def _make_count_file(control: ControlOptions, card_name: str) -> SmCountFile | None:
    """Return the file through which a program is told how many SMs to use."""
    from wattcast.control.program_files import SmCountFile

    if control.units is None:
        return None
    do = "Tell how many SMs it has (--sms)."
    count = control.sms or int(_catalogue_gpu(card_name, "--units", do).sm_count)
    return SmCountFile(control.units, count)


def _choose_keeper(
    model: str | None,
    has_metrics: bool,
    limits: ServingLimits,
    card_name: str,
    count: int,
) -> Any:
    """Return what keeps the latencies of a serving engine on some cards, or None for another
    program.
    """
    if model is not None:
        from wattcast.control import serving_rehearsal, traffic_rehearsal

        do = "Leave it out: what steps take is then learned."
        chip = _catalogue_gpu(card_name, "--model", do)
        by_level = serving_rehearsal.build_clock_levels(model, chip, tensor_parallel=count)
        return partial(traffic_rehearsal.make_queue_keeper, by_level, limits)
    if has_metrics:
        from wattcast.control import serving_control

        return partial(serving_control.LatencyKeeper, limits=limits)
    return None


@command("manage plane")
def plane(
    env: Environment,
    command: Annotated[
        list[str], Option("The program, after --; {core} and {memory} are MHz.", positional=True)
    ],
    apply: Annotated[bool, Option("Really set the card; else name the clocks.")] = False,
    device: Annotated[int | None, DEVICE] = None,
    cores: Annotated[int, Option("Core clocks, evenly over what the card allows.", least=1)] = 6,
    memories: Annotated[
        int, Option("Memory clocks, evenly over what the card allows; 1: not touched.", least=1)
    ] = 1,
    table: Annotated[
        Path | None,
        Option("Save time, power and the card's counters as CSV for `wattcast lab sensitivity`."),
    ] = None,
    name: Annotated[
        str | None, Option("Name of the program in --table; default: its file.")
    ] = None,
    progress: Annotated[
        Path | None,
        Option("File the program appends a byte to per unit of work (WATTCAST_PROGRESS)."),
    ] = None,
    socket: Annotated[Path | None, SOCKET] = None,
) -> None:
    """Run a program at every pair of clocks of a plane. The daemon sets them, and gives them back
    however this ends.

    Example: wattcast manage plane --apply --cores 8 -- wattcast lab microbench --out
    rows/{core}-{memory}"""
    from wattcast.control import (
        clock_plane,
        daemon_client,
        plane_table,
        program_files,
    )
    from wattcast.measure.device_control import NvmlCard

    collected = None
    variables = dict(env.variables)
    if table is not None:
        collected = plane_table.PlaneTable(table, name or Path(command[0]).stem, progress)
    if progress is not None:
        variables[program_files.PROGRESS_VARIABLE] = str(progress)
    card = NvmlCard(device)
    card.open()
    points = clock_plane.choose_clock_plane(*card.clocks_hz(), cores, memories)
    pairs_mhz = ", ".join(f"{core / 1e6:.0f}/{memory / 1e6:.0f}" for core, memory in points)
    if not apply:
        env.say(
            f"dry run on {card.name}: core/memory MHz {pairs_mhz} would be set and given back; "
            "add --apply to do it."
        )
        raise typer.Exit
    with daemon_client.hold_card(card, socket) as leased_card:
        codes = clock_plane.visit_clock_plane(
            leased_card,
            points,
            command,
            env.say,
            variables,
            collected,
        )
    failed = [
        f"{core / 1e6:.0f}/{memory / 1e6:.0f}"
        for (core, memory), code in codes.items()
        if code != 0
    ]
    env.say(
        f"the card has back what it had. {len(codes) - len(failed)} of {len(points)} pairs "
        "of clocks done."
    )
    if failed or len(codes) < len(points):
        env.say(f"refused or ended otherwise, core/memory MHz: {', '.join(failed) or 'none'}")
        raise typer.Exit(next((abs(code) for code in codes.values() if code), 1))


@dataclass(frozen=True)
class DaemonOptions:
    """What the daemon may set, and for whom."""

    gpu: Annotated[
        list[str] | None, Option("Card that clients may set, by index or UUID; default: all.")
    ] = None
    clocks: Annotated[str | None, Option("Core clocks allowed, such as 900MHz:1980MHz.")] = None
    limits: Annotated[str | None, Option("Power limits allowed, such as 300W:700W.")] = None
    locked: Annotated[
        str | None, Option("Core clock the administrator has locked, which drivers do not tell.")
    ] = None
    group: Annotated[str | None, Option("Users that may connect; default: root alone.")] = None
    socket: Annotated[Path | None, SOCKET] = None
    unit: Annotated[bool, Option("Print a systemd unit instead.")] = False
    lifeline: Annotated[bool, Option("End when standard input does.", hidden=True)] = False


@command("manage daemon")
def daemon(
    env: Environment,
    options: DaemonOptions,
) -> None:
    """Own the cards of this node: set them for clients, and give them back when a client is silent
    or gone.

    Example: wattcast manage daemon --group wattcast --clocks 900MHz:1980MHz
    """
    from wattcast.control import card_daemon, daemon_client

    if options.unit:
        env.stdout.write(daemon_client.print_unit())
        return
    locked_hz = None
    if options.locked is not None:
        locked_hz = units.parse(options.locked, "Hz", "--locked")
    scope = card_daemon.DaemonScope(
        _parse_range(options.clocks, "Hz", "--clocks"),
        _parse_range(options.limits, "W", "--limits"),
        locked_hz,
    )
    path = options.socket or card_daemon.SOCKET
    members = daemon_client.find_group(options.group)
    if not options.lifeline:
        clients = f"members of {options.group}" if options.group else "root"
        env.say(f"clients connect to {path} as {clients}")

    def serve(stopped: Any) -> int:
        cards = daemon_client.find_settable_cards(options.gpu or [])
        return card_daemon.serve_cards(
            cards,
            scope,
            path,
            members,
            env.say,
            stopped,
        )

    lifeline = 0 if options.lifeline else None
    raise typer.Exit(card_daemon.run_supervised(serve, env.say, lifeline))


@command("manage status")
def status(socket: Annotated[Path | None, SOCKET] = None) -> CommandOutput:
    """Say what every card is set to, who holds it, and which were left changed; exit code 5 if any
    was.
    """
    from wattcast.control.daemon_client import read_status

    plain, text, code = read_status(socket)
    return CommandOutput(plain, text, exit_code=code)


@command("manage restore")
def restore(
    env: Environment,
    gpu: Annotated[
        str | None, Option("UUID of a card; default: every card that is changed.", positional=True)
    ] = None,
    defaults: Annotated[
        bool, Option("Give a card whose note cannot be read the driver's defaults.")
    ] = False,
    socket: Annotated[Path | None, SOCKET] = None,
) -> None:
    """Give cards back what they had, through the daemon, or as root without one. Whoever holds them
    loses them.
    """
    from wattcast.control.daemon_client import restore_cards

    restore_cards(gpu, socket, env.say, defaults)


@dataclass(frozen=True)
class RehearsalOptions:
    """The traffic of a rehearsal, its bounds, and the power that GPUs share."""

    gpu: Annotated[str, Option("Catalogue GPU.")] = "h200"
    rate_per_s: Annotated[
        float, Option("Requests per second and GPU, such as 10/s.", unit="/s", above=0)
    ] = 10.0
    seconds: Annotated[
        float,
        Option("Time of arrivals, such as 600 or 1h.", unit="s", parse=units.parse_seconds),
    ] = 1800.0
    ttft: Annotated[str, TTFT] = "500ms"
    tpot: Annotated[str, TPOT] = "50ms"
    gpus: Annotated[
        int, Option("GPUs that share --site-power, each with a trace of its own.", least=1)
    ] = 1
    site_power_w: Annotated[
        float | None,
        Option("Power of all of them together, such as 2kW.", unit="W", above=0),
    ] = None
    trace: Annotated[
        Path | None,
        Option("File of requests to replay (CSV, JSON Lines) in place of drawn ones."),
    ] = None
    speed: Annotated[float, Option("How much faster the requests of --trace come.", above=0)] = 1.0
    off: Annotated[
        float,
        Option("How far the costs of steps differ from the forecast at most.", unit="", most=0.5),
    ] = 0.2


@command("manage rehearse")
def rehearse(
    env: Environment,
    rehearsal: RehearsalOptions,
    hall_day: HallDayOptions,
    first: FirstRunOptions,
    shape: RequestShape,
    model: Annotated[str | None, MODEL] = None,
) -> CommandOutput:
    """Rehearse the control of serving GPUs on simulated traffic, before any card is touched.

    --hall: a bad day of a hall (a breaker, lost daemons, a cap in a burst, hands). --card: the
    first run on a real card. --trace: requests of a file, under the policy of `manage serve
    --model`, beside an oracle that knows them all; about a hundredth of its time per try, of which
    there are a dozen.

    Example: wattcast manage rehearse llama3-8b --rate 20/s --gpus 4 --site-power 1800W --seconds
    10min"""
    from wattcast.cli import rehearsal_commands

    rehearsal_commands.check_subject(
        env,
        model,
        hall_day,
        first,
    )
    if first.card:
        seconds = rehearsal.seconds if "seconds" in env.typed_options else None
        return rehearsal_commands.rehearse_card(env, first, seconds)
    if hall_day.hall is not None:
        return rehearsal_commands.rehearse_day(
            env,
            hall_day,
            rehearsal.seconds,
            rehearsal.site_power_w,
        )
    assert model is not None, "checked"
    import numpy as np

    from wattcast.control import serving_rehearsal
    from wattcast.predictor.api import find_gpu
    from wattcast.serving.arrivals import draw_trace

    chip = find_gpu(rehearsal.gpu)
    limits = _serving_limits(rehearsal.ttft, rehearsal.tpot)
    if rehearsal.trace is not None:
        return _replay_trace(
            model,
            chip,
            rehearsal,
            limits,
            shape.seed,
        )
    traces = []
    for place in range(rehearsal.gpus):
        trace = draw_trace(
            rehearsal.rate_per_s,
            shape.prompt,
            shape.output,
            shape.arrivals,
            rehearsal.seconds,
            None,
            shape.seed + place,
        )
        traces.append(trace)
    by_level = serving_rehearsal.build_clock_levels(model, chip)
    most_w = rehearsal.site_power_w
    if most_w is None:
        figures = serving_rehearsal.rehearse_load(by_level, traces[0], limits)
    else:
        limit_w = float(np.mean(chip.power.limit_w))
        figures = serving_rehearsal.rehearse_site_serving(
            by_level,
            traces,
            limits,
            most_w,
            limit_w,
        )
    lines = [f"{name}: {value:.6g}" for name, value in figures.items()]
    return CommandOutput(figures, "\n".join(lines))


def _replay_trace(
    model: str,
    chip: Gpu,
    rehearsal: RehearsalOptions,
    limits: ServingLimits,
    seed: int,
) -> CommandOutput:
    """Replay the requests of a file on a simulated engine under the policy and an oracle."""
    import numpy as np

    from wattcast.control import serving_rehearsal, traffic_rehearsal
    from wattcast.serving.trace_files import read_trace

    assert rehearsal.trace is not None
    if rehearsal.gpus > 1 or rehearsal.site_power_w is not None:
        raise bad_value("--trace", "one GPU without --site-power", "several GPUs or a budget")
    trace = read_trace(rehearsal.trace)
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    by_level = serving_rehearsal.build_clock_levels(model, chip, longest)
    plant = traffic_rehearsal.perturb_levels(by_level, chip, seed, rehearsal.off)
    faster = trace.reorder(np.arange(len(trace)), trace.arrival_s / rehearsal.speed)
    figures = traffic_rehearsal.rehearse_traffic(by_level, plant, faster, limits)
    lines = []
    for name, value in figures.items():
        text = value if isinstance(value, str) else f"{value:.6g}"
        lines.append(f"{name}: {text}")
    return CommandOutput(figures, "\n".join(lines))


@command("manage site")
def site(
    env: Environment,
    nodes: Annotated[
        list[Path],
        Option("Sockets of the nodes' daemons, forwarded where remote.", positional=True),
    ],
    site_power: Annotated[str, Option("Power that all GPUs together may draw, such as 3kW.")],
    priority: Annotated[
        list[str] | None, Option("UUID=NUMBER: GPUs with a higher number are served first.")
    ] = None,
    power_file: Annotated[
        Path | None,
        Option("File that says another budget; read every second."),
    ] = None,
) -> None:
    """Share a power budget among the GPUs of several nodes until interrupted.

    The power limit that each GPU has now is its safe share: it keeps it, and gets it back when this
    command ends. A cap that comes later is written to --power-file; without the file, --site-power
    holds again.

    Example: wattcast manage site /run/wattcast/socket /run/site/b.sock --site-power 3kW
    """
    from wattcast.control.site_budget import coordinate_site
    from wattcast.measure.measured_run import PassedSignals

    ranks = parse_pairs(priority, "--priority", "UUID=NUMBER", int)
    most_w = units.parse_amount(site_power, "W", "--site-power", inclusive=False)
    with PassedSignals() as signals:
        coordinate_site(
            nodes,
            most_w,
            ranks,
            env.say,
            lambda: not signals.came,
            power_file,
        )


def _catalogue_gpu(
    name: str,
    option: str,
    instead: str,
) -> Gpu:
    """Return the catalogue's card by what the driver calls it, which ``option`` needs."""
    from wattcast.control.watch_card import find_catalogue_gpu

    chip = find_catalogue_gpu(name)
    if chip is None:
        raise bad_value(option, "a card that the catalogue knows (`wattcast gpus`)", name, instead)
    return chip


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

    bounds_s = []
    for name, text in (("ttft", ttft), ("tpot", tpot)):
        bound, *more = parse_latency_bounds(name, text, 99.0)
        if more or bound.percentile != 99.0:
            raise bad_value(
                f"--{name}", "one time, of the 99th percentile, which the policy steers by", text
            )
        bounds_s.append(bound.seconds)
    return ServingLimits(*bounds_s)


def _period_s(text: str) -> float:
    seconds = units.parse_amount(text, "s", "--period")
    if not SHORTEST_PERIOD_S <= seconds <= LONGEST_PERIOD_S:
        raise bad_value("--period", "20 ms to 1 h: below, a card's counters stand still", text)
    return seconds


def _parse_range(
    text: str | None,
    unit: str,
    where: str,
) -> tuple[float, float]:
    if text is None:
        return 0.0, float("inf")
    ends = [units.parse(part, unit, where) for part in text.split(":")]
    if len(ends) != 2 or not 0 <= ends[0] <= ends[1]:
        raise bad_value(where, f"LOW:HIGH in {unit}", text)
    return ends[0], ends[1]


def _make_setup(
    policy: PolicyGoal,
    play: PlayOptions,
    model: Any,
    forecast: Any = None,
) -> PolicySetup:
    from wattcast.control import plants, policies

    noise = plants.MeasurementNoise(play.noise, play.noise) if play.noise else None
    goal = policy.make_objective()
    return policies.PolicySetup(
        goal,
        model=model,
        forecast=forecast or {},
        noise=noise,
        seed=play.seed,
    )


def _forecast_plants(
    plants: list[PlantTables],
    gpu: str | None,
    workloads: Path | None,
    goal: Objective,
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    from wattcast.control import clock_forecast
    from wattcast.predictor import api

    if gpu is None:
        return {}, ["model_predictive: left out, as no --gpu says which card the table is of"]
    curves: dict[str, clock_forecast.ClockCurves] = {}
    notes: list[str] = []
    for tables in plants:
        some, missing = clock_forecast.forecast_applications(tables, api.find_gpu(gpu), workloads)
        curves |= some
        notes += [f"model_predictive: none for {name}: {why}" for name, why in missing.items()]
    notes += sorted({f"model_predictive: {f.status} coefficients" for f in curves.values()})
    errors = clock_forecast.measure_slowdown_errors(plants, curves)
    chosen: dict[str, tuple[int, ...]] = {}
    for tables in plants:
        chosen |= clock_forecast.choose_forecast_settings(tables, curves, goal, errors)
    if goal.slowdown is not None:
        notes.append(
            "model_predictive: bounds hold with a chance of 95 %, by the errors of other "
            "model families"
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

    comparison = policy_comparison.compare_policies(plants, setup)
    return CommandOutput(
        lambda: {**policy_comparison.comparison_json(comparison, plants, notes, without), **more},
        lambda console: policy_comparison.print_comparison(
            console,
            comparison,
            title,
            without,
            more,
        ),
        lambda: _list_figures(plants, comparison, setup),
        notes,
    )


def _list_figures(
    plants: list[PlantTables],
    comparison: PolicyComparison,
    setup: PolicySetup,
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
