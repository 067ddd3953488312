"""Hold fixed settings of a card while a program runs, and give them back."""

from __future__ import annotations

import time
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from dataclasses import dataclass

from wattcast.control.clock_plane import await_end, start_program
from wattcast.control.daemon_client import DaemonCard
from wattcast.control.live_plant import POLL_S
from wattcast.core import bad_value, check_names
from wattcast.measure.device_control import POWER_PROFILES, NvmlCard
from wattcast.measure.measured_run import PassedSignals


@dataclass(frozen=True)
class HeldSettings:
    """What a card is to have while a program runs; None leaves a knob as it was."""

    core_hz: float | None = None
    memory_hz: float | None = None
    limit_w: float | None = None
    profile_mask: int | None = None
    smoothing: bool | None = None

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is to be set."""
        return all(value is None for value in vars(self).values())

    def describe(self) -> str:
        """Name what is set, for people."""
        from wattcast.control.card_settings import CardSettings

        ends = (self.core_hz, self.memory_hz)
        core, memory = (None if hz is None else (hz, hz) for hz in ends)
        mask = None if self.profile_mask is None else float(self.profile_mask)
        smoothing = None if self.smoothing is None else float(self.smoothing)
        return CardSettings(
            core,
            memory,
            self.limit_w,
            mask,
            smoothing,
        ).describe()


def find_profiles(card: NvmlCard, names: Sequence[str]) -> int | None:
    """Return the mask of power profiles by name; an error where the card does not have one."""
    if not names:
        return None
    offered = card.list_power_profiles()
    mask = 0
    for name in names:
        check_names("power profile", name, POWER_PROFILES)
        if POWER_PROFILES[name] not in offered:
            known = [each for each, number in POWER_PROFILES.items() if number in offered]
            have = ", ".join(known) or "none: its firmware or driver has no power profiles"
            raise bad_value("--profile", f"a power profile of {card.name} ({have})", name)
        mask |= 1 << POWER_PROFILES[name]
    return mask


def run_with_settings(
    card: DaemonCard,
    settings: HeldSettings,
    command: Sequence[str],
    say: Callable[[str], None],
    environment: Mapping[str, str],
) -> int:
    """Set a card, run a program to its end, and give the card back; return the program's exit code.

    Where the driver refuses a knob, nothing is run and everything is given back. While the daemon
    is lost the program goes on; the card is set again when another daemon takes it."""
    with ExitStack() as stack:
        signals = stack.enter_context(PassedSignals())
        stack.callback(card.give_back)
        card.apply(
            settings.core_hz,
            settings.memory_hz,
            settings.limit_w,
            settings.profile_mask,
            settings.smoothing,
        )
        say(f"{card.name}: {settings.describe()}: set")
        process = start_program(signals, command, environment)
        try:
            while process.poll() is None and not signals.came:
                card.beat()
                time.sleep(POLL_S)
        finally:
            if process.poll() is None and not signals.came:
                process.terminate()
            is_ending = bool(signals.came) or process.poll() is None
            code = await_end(process, is_ending)
    say("the card has back what it had.")
    return code
