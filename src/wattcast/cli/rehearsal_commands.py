"""What ``wattcast manage rehearse`` rehearses besides one engine: a bad day of a hall, and the
first run on a real card.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.core import bad_value
from wattcast.core.option_declaration import Option
from wattcast.options.hall_options import parse_moment

_PANEL = "A bad day of a hall"
_CARD_PANEL = "The first run on a real card"
_ENGINE = "gpu rate ttft tpot gpus trace speed off prompt output arrivals seed site_power seconds"
# Keywords of the options that say something about each thing to rehearse.
_OPTIONS = {
    "engine": set(_ENGINE.split()),
    "hall": {"begin", "event_cap", "events", "site_power", "seconds"},
    "card": {"apply", "device", "lock", "out", "socket", "seconds"},
}


@dataclass(frozen=True)
class HallDayOptions:
    """A hall that has a bad day, and what happens to it."""

    hall: Annotated[
        Path | None, Option("Hall file (`wattcast hall`) to rehearse a bad day of.", panel=_PANEL)
    ] = None
    begin_s: Annotated[
        float,
        Option(
            "Begin at: 14:30, 2h; --seconds says how long.",
            "begin",
            keyword="begin",
            parse=parse_moment,
            panel=_PANEL,
        ),
    ] = 0.0
    event_cap_w: Annotated[
        float | None,
        Option(
            "Budget that the event `cap` leaves; default: 85% of it.",
            unit="W",
            above=0,
            panel=_PANEL,
        ),
    ] = None
    events: Annotated[
        str,
        Option("What happens, in this order: breaker, daemon, cap, restore.", panel=_PANEL),
    ] = "breaker,daemon,cap,restore"


@dataclass(frozen=True)
class FirstRunOptions:
    """A real card that is set for the first time, and how."""

    card: Annotated[
        bool, Option("Walk through the first run on a real card; only reads.", panel=_CARD_PANEL)
    ] = False
    apply: Annotated[
        bool,
        Option("With --card: really lock its core clock, by turns.", panel=_CARD_PANEL),
    ] = False
    device: Annotated[
        int | None,
        Option("With --card: the card, by NVML index; default: 0.", least=0, panel=_CARD_PANEL),
    ] = None
    lock_hz: Annotated[
        float | None,
        Option(
            "With --card: the clock to lock; default: 90% of the highest.",
            unit="Hz",
            above=0,
            panel=_CARD_PANEL,
        ),
    ] = None
    out: Annotated[Path, Option("With --card: folder of the report.", panel=_CARD_PANEL)] = Path(
        "first-run"
    )
    socket: Annotated[
        Path | None,
        Option("With --card: socket of the daemon; default: one of its own.", panel=_CARD_PANEL),
    ] = None


def check_subject(
    env: Environment,
    model: str | None,
    day: HallDayOptions,
    first: FirstRunOptions,
) -> None:
    """Raise an error where not one thing is to be rehearsed, or an option says nothing about it."""
    subjects = {
        "engine": model is not None,
        "hall": day.hall is not None,
        "card": first.card,
    }
    chosen = [name for name, is_chosen in subjects.items() if is_chosen]
    if len(chosen) != 1:
        actual = " and ".join(chosen) or "none of them"
        raise bad_value("rehearse", "a model that an engine serves, --hall or --card", actual)
    known = _OPTIONS[chosen[0]]
    for name in sorted(set().union(*_OPTIONS.values()) - known):
        if name not in env.typed_options:
            continue
        expected = f"an option for the rehearsal of this {chosen[0]}"
        raise bad_value(f"--{name.replace('_', '-')}", expected, f"--{name}")


def rehearse_card(
    env: Environment,
    first: FirstRunOptions,
    seconds: float | None,
) -> CommandOutput:
    """Walk through the first run on a real card; nothing is set without ``--apply``."""
    from wattcast.control import daemon_client, first_run
    from wattcast.core.errors import ExitCode
    from wattcast.measure.device_control import NvmlCard
    from wattcast.measure.measured_run import PassedSignals

    device = first.device or 0
    reader = NvmlCard(device)
    reader.open()
    before = first_run.look_at_card(reader)
    lines = first_run.describe_look(before)
    if before.missing:
        report = first_run.write_report(first.out, before)
        lines.append(f"Written: {first.out}. {first_run.SENT}")
        return CommandOutput(report, "\n".join(lines), exit_code=ExitCode.REFUSED)
    levels_hz, _ = reader.clocks_hz()
    longest_s = first_run.LONGEST_S if seconds is None else seconds
    plan = first_run.plan_first_run(levels_hz, longest_s, first.lock_hz)
    lines += first_run.describe_plan(before, plan, device)
    if not first.apply:
        lines.append(f"Nothing was set. Written: {first.out}. Do it, as root: add --apply.")
        return CommandOutput(first_run.write_report(first.out, before, plan), "\n".join(lines))
    for line in lines:
        env.say(line)
    with (
        PassedSignals() as signals,
        daemon_client.hold_card(reader, first.socket) as held,
    ):
        figures = first_run.run_first_control(
            held,
            reader,
            plan,
            before,
            env.say,
            lambda: bool(signals.came),
        )
    after = first_run.look_at_card(reader)
    report = first_run.write_report(
        first.out,
        before,
        plan,
        figures,
        after,
    )
    text = first_run.describe_figures(figures, plan, report["differences"])
    text.append(f"Written: {first.out}. {first_run.SENT}")
    is_sound = figures.is_back and not figures.faults and not report["differences"]
    code = ExitCode.OK if is_sound else ExitCode.REFUSED
    return CommandOutput(report, "\n".join(text), exit_code=code)


def rehearse_day(
    env: Environment,
    day: HallDayOptions,
    seconds: float,
    budget_w: float | None,
) -> CommandOutput:
    """Simulate the hall, and play the events on it."""
    from wattcast.control import hall_rehearsal
    from wattcast.timeseries.hall_file import read_hall
    from wattcast.timeseries.hall_run import HallSpan, run_hall

    assert day.hall is not None, "no hall to rehearse"
    span = HallSpan(day.begin_s, float(round(seconds)))
    hall = run_hall(read_hall(day.hall), span, progress=env.tell_progress)
    names = [name.strip() for name in day.events.split(",") if name.strip()]
    rehearsal = hall_rehearsal.rehearse_hall(hall, names, budget_w, day.event_cap_w)
    text = hall_rehearsal.describe_rehearsal(rehearsal)
    return CommandOutput(partial(hall_rehearsal.HallRehearsal.to_dict, rehearsal), text)
