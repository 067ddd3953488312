"""``wattcast manage knobs`` and ``hold``: what each knob saves by forecast, and setting them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from wattcast.cli.command_builder import command
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import (
    DEVICE,
    SOCKET,
    WORKLOAD,
)
from wattcast.core import bad_value
from wattcast.core.option_declaration import Option


@dataclass(frozen=True)
class KnobWorkload:
    """What runs on the card, and how much slower it may be."""

    gpu: Annotated[str, Option("Catalogue GPU.")] = "b200"
    batch: Annotated[int | None, Option("Sequences or images at once.", least=1)] = None
    seq: Annotated[int | None, Option("Prompt or context length.", least=1)] = None
    phase: Annotated[str | None, Option("prefill|decode|train|forward.")] = None
    slowdown: Annotated[
        float, Option("Longest time allowed over the default's.", unit="", most=10.0)
    ] = 0.05
    pauses: Annotated[
        float, Option("Share of the time in which the card idles.", unit="", most=0.95)
    ] = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the workload that were given."""
        named = {
            "batch": self.batch,
            "seq": self.seq,
            "phase": self.phase,
        }
        return {name: value for name, value in named.items() if value is not None}


@command("manage knobs")
def knobs(
    workload: Annotated[str, WORKLOAD],
    about: KnobWorkload,
) -> CommandOutput:
    """Say what each knob of a card saves by forecast: clocks, SMs, power limit, power profiles,
    power smoothing. Unmeasured, and nothing is set.

    Example: wattcast manage knobs llama3-8b --gpu b200 --phase decode --batch 32 --seq 4096
    """
    from wattcast.control import knob_forecast
    from wattcast.predictor.api import find_gpu

    rows = knob_forecast.forecast_knobs(
        workload,
        find_gpu(about.gpu),
        about.options,
        about.slowdown,
        about.pauses,
    )
    plain = {"workload": workload, "gpu": about.gpu, "knobs": [asdict(row) for row in rows]}
    return CommandOutput(plain, partial(knob_forecast.print_forecasts, rows=rows))


@dataclass(frozen=True)
class HeldKnobs:
    """What a card is to have while a program runs."""

    core_clock_hz: Annotated[float | None, Option("Core clock: 1.5GHz.", unit="Hz", above=0)] = None
    memory_clock_hz: Annotated[
        float | None, Option("Memory clock: 2.6GHz.", unit="Hz", above=0)
    ] = None
    power_limit_w: Annotated[float | None, Option("Power limit: 500W.", unit="W", above=0)] = None
    profile: Annotated[
        str | None,
        Option("Power profiles of the firmware: max-q, llm-inference, with commas."),
    ] = None
    smoothing: Annotated[str | None, Option("Power smoothing: on|off.", choices=("on", "off"))] = (
        None
    )


@command("manage hold", allow_interspersed_args=False)
def hold(
    env: Environment,
    command: Annotated[list[str], Option("The program, after --.", positional=True)],
    held: HeldKnobs,
    apply: Annotated[bool, Option("Really set the card; else say what would be.")] = False,
    device: Annotated[int | None, DEVICE] = None,
    socket: Annotated[Path | None, SOCKET] = None,
) -> None:
    """Hold clocks, a power limit, power profiles or power smoothing while a program runs. The
    daemon sets them, and gives them back however this ends.

    Example: wattcast manage hold --apply --profile max-q -- python serve.py
    """
    from wattcast.control import daemon_client, held_settings
    from wattcast.measure.device_control import NvmlCard

    names = [name.strip() for name in (held.profile or "").split(",") if name.strip()]
    settings = held_settings.HeldSettings(
        held.core_clock_hz,
        held.memory_clock_hz,
        held.power_limit_w,
        None,
        None if held.smoothing is None else held.smoothing == "on",
    )
    if settings.is_empty and not names:
        expected = "--core-clock, --memory-clock, --power-limit, --profile or --smoothing"
        raise bad_value("manage hold", expected, "none")
    card = NvmlCard(device)
    card.open()
    mask = held_settings.find_profiles(card, names)
    settings = held_settings.HeldSettings(**{**vars(settings), "profile_mask": mask})
    if not apply:
        env.say(
            f"dry run on {card.name}: {settings.describe()} would be set and given back; add "
            "--apply to do it."
        )
        raise typer.Exit
    with daemon_client.hold_card(card, socket) as leased_card:
        code = held_settings.run_with_settings(
            leased_card,
            settings,
            command,
            env.say,
            env.variables,
        )
    raise typer.Exit(code if code >= 0 else 128 - code)
