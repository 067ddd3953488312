"""Run a program at every pair of core and memory clocks of a plane."""

from __future__ import annotations

import subprocess
import time
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack

import numpy as np

from wattcast.control.card_settings import RefusedKnob
from wattcast.control.daemon_client import DaemonCard, SilentDaemon
from wattcast.control.live_plant import POLL_S
from wattcast.control.plane_table import PlaneTable
from wattcast.core import MissingTool
from wattcast.measure.measured_run import PassedSignals

GRACE_S = 5.0  # for a program to end after a signal was passed on


def choose_clock_plane(
    core_hz: Sequence[float],
    memory_hz: Sequence[float],
    cores: int,
    memories: int,
) -> list[tuple[float, float]]:
    """Return evenly spread pairs of clocks, the ends among them, from the highest down.

    >>> choose_clock_plane([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0], 3, 1)
    [(5.0, 2.0), (3.0, 2.0), (1.0, 2.0)]
    """
    if not (core_hz and memory_hz):
        raise MissingTool("the driver names no clocks of this card that could be set.")
    core_axis = _spread_clocks(core_hz, cores)
    memory_axis = _spread_clocks(memory_hz, memories)
    return [(core, memory) for memory in memory_axis for core in core_axis]


def _spread_clocks(clocks_hz: Sequence[float], count: int) -> list[float]:
    """Return so many clocks from the highest down to the lowest; the highest alone for one."""
    highest = len(clocks_hz) - 1
    lowest = 0 if count > 1 else highest
    places = np.linspace(highest, lowest, min(count, len(clocks_hz)))
    return [clocks_hz[int(place)] for place in np.rint(places)]


def visit_clock_plane(
    card: DaemonCard,
    plane: Sequence[tuple[float, float]],
    command: Sequence[str],
    say: Callable[[str], None],
    environment: Mapping[str, str],
    table: PlaneTable | None = None,
) -> dict[tuple[float, float], int | None]:
    """Run ``command`` at every pair of clocks and return its exit codes, None where the driver
    refused the pair.

    ``{core}`` and ``{memory}`` in its words are the clocks in MHz. A memory clock is set only where
    the plane has several. ``table`` gets a row of each run that ends well. The card gets back what
    it had however this ends; a signal ends the
    program and the visits."""
    codes: dict[tuple[float, float], int | None] = {}
    has_several = len({memory_hz for _, memory_hz in plane}) > 1
    with ExitStack() as stack:
        signals = stack.enter_context(PassedSignals())
        stack.callback(card.give_back)
        for core_hz, memory_hz in plane:
            if signals.came:
                break
            core = f"{core_hz / 1e6:.0f}"
            memory = f"{memory_hz / 1e6:.0f}"
            try:
                card.apply(core_hz, memory_hz if has_several else None, None)
                _check_daemon(card, core)
            except RefusedKnob as error:
                say(f"{core} and {memory} MHz are left out: {error}")
                codes[core_hz, memory_hz] = None
                continue
            words = [word.replace("{core}", core).replace("{memory}", memory) for word in command]
            process = start_program(signals, words, environment)
            begin_s = time.monotonic()
            if table is not None:
                table.begin()
            codes[core_hz, memory_hz] = _await_program(process, signals, card, core, table)
            if table is not None and codes[core_hz, memory_hz] == 0:
                why = table.finish(core_hz, memory_hz, time.monotonic() - begin_s)
                if why:
                    say(f"{core} and {memory} MHz are not in the table: {why}")
    return codes


def _await_program(
    process: subprocess.Popen[bytes],
    signals: PassedSignals,
    card: DaemonCard,
    core: str,
    table: PlaneTable | None,
) -> int:
    """Wait for a program, look at its card meanwhile, and return its exit code.

    The program is ended where the daemon is lost."""
    try:
        while process.poll() is None:
            card.beat()
            _check_daemon(card, core)
            if table is not None:
                table.look(card)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None and not signals.came:
            process.terminate()
        is_ending = signals.came or process.poll() is None
        code = await_end(process, is_ending)
    return code


def _check_daemon(card: DaemonCard, core: str) -> None:
    """Raise an error where the card may have lost the clocks of a pair while its program ran."""
    if card.losses > 0:
        do = "What ran there is not to be used; visit the plane again."
        raise SilentDaemon(f"the daemon was lost at {core} MHz. {do}")


def start_program(
    signals: PassedSignals,
    words: Sequence[str],
    variables: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start a program that signals are passed on to."""
    try:
        return signals.start_program(words, env=dict(variables))
    except OSError as error:
        raise MissingTool(f"{words[0]}: cannot be started ({error.strerror}).") from None


def await_end(process: subprocess.Popen[bytes], is_signalled: bool) -> int:
    """Wait for a program's exit code; one that was signalled is killed after some seconds."""
    try:
        return process.wait(GRACE_S if is_signalled else None)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
