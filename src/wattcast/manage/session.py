"""Run a program under the controller on a real card, or watch a card; the loop around both."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from wattcast.errors import MissingTool, Refused
from wattcast.manage.guard import Guard
from wattcast.manage.harmonia import Harmonia, State
from wattcast.manage.knobs import Lattice, Settings
from wattcast.manage.live import KERNEL, ControlledCard, LivePlant, Progress, lattice_of
from wattcast.manage.objective import Objective
from wattcast.manage.sm_share import UNITS, Units

PROGRESS = "WATTCAST_PROGRESS"
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0  # for the program to end after a signal was passed on


@dataclass
class Log:
    """Every change, as it happens."""

    say: Callable[[str], None]
    lattice: Lattice
    changes: list[tuple[Settings, str]] = field(default_factory=list)

    def __call__(self, settings: Settings, why: str) -> None:
        if why.startswith(("set", "left")):
            self.changes.append((settings, why))
        self.say(f"{self.lattice.show(settings)}: {why}")


@dataclass(frozen=True)
class Ended:
    """How a controlled program ended."""

    code: int
    changes: int
    controlled: bool  # to the end


def run_controlled(
    card: ControlledCard,
    command: Sequence[str],
    objective: Objective,
    folder: Path,
    period_s: float,
    say: Callable[[str], None],
    environment: Mapping[str, str],
    progress: Path | None = None,
    watchdog: list[str] | None = None,
    units: Units | None = None,
) -> Ended:
    """Run ``command`` while the controller sets clocks; they are reset however this ends."""
    lattice = lattice_of(*card.clocks_hz(), units.levels if units else ())
    log = Log(say, lattice)
    with Guard(card, folder, say, watchdog) as guard, _Signals() as signals, _restored(units):
        try:
            card.lock(lattice.values(lattice.top)[0])  # whether this works is known before the program starts
        except Refused:
            guard.nothing_was_set()
            raise
        log(lattice.top, "set, to see whether it works")
        try:
            process = subprocess.Popen(list(command), env={**environment, **_tell(progress, units)})
        except OSError as error:
            raise MissingTool(f"{command[0]}: cannot be started ({error.strerror}).") from None
        signals.pass_on_to(process)
        plant = LivePlant(
            card,
            lattice,
            period_s,
            alive=lambda: process.poll() is None and not signals.came,
            wait=lambda s: _wait(process, signals, s),
            progress=Progress(progress) if progress else None,
            dry=False,
            log=log,
            units=units,
        )
        state = _steer(plant, Harmonia(lattice, lattice.top, objective))
        code = _end(process, signals)
    count = len(log.changes)
    say(f"clocks reset after {count} change{'s' if count > 1 else ''}. {_brought(state, lattice)}")
    return Ended(code, len(log.changes), plant.controlled)


def _brought(state: State, lattice: Lattice) -> str:
    """What the settings at the end brought against the default, by the runs there were."""
    memory = state.kernels.get(KERNEL)
    before = memory.ledger.seen.get(lattice.top) if memory else None
    after = memory.ledger.seen.get(memory.at) if memory else None
    if memory is None or before is None or after is None:
        return "Nothing was learned: no period told both power and work."
    if memory.at == lattice.top:
        return "The driver's own clocks were best."
    time, power = (math.exp(b - a) for a, b in zip(before[1:], after[1:], strict=True))
    return (
        f"{lattice.show(memory.at)} against the driver's own: time {time - 1:+.1%}, power {power - 1:+.1%}, "
        f"energy {time * power - 1:+.1%} per unit of work."
    )


def _tell(progress: Path | None, units: Units | None) -> dict[str, str]:
    told = {PROGRESS: progress, UNITS: units.path if units else None}
    return {name: str(path) for name, path in told.items() if path is not None}


@contextmanager
def _restored(units: Units | None) -> Iterator[None]:
    """All SMs before the program starts and after it ended."""
    if units is None:
        yield
        return
    units.reset()
    try:
        yield
    finally:
        units.reset()


def _steer(plant: LivePlant, controller: Harmonia) -> State:
    """The loop: the same controller as in simulation; without control left, only wait."""
    state = controller.start()
    while (kernel := plant.next_kernel()) is not None:
        observation = plant.run(controller.settings(state, kernel))
        if plant.controlled:
            state, _ = controller.step(state, observation)
    return state


def _wait(process: subprocess.Popen[bytes], signals: _Signals, seconds: float) -> None:
    """A period, or less when the program ends or a signal comes."""
    pause = min(seconds, 0.05)
    waited = 0.0
    while waited < seconds and process.poll() is None and not signals.came:
        time.sleep(pause)
        waited += pause


def _end(process: subprocess.Popen[bytes], signals: _Signals) -> int:
    if signals.came and process.poll() is None:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


class _Signals:
    """Passes signals on to the program and remembers that one came, so that the way out is the usual one."""

    def __init__(self) -> None:
        self.came = False  # no Event: its lock may be held by the very code a signal interrupts
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._came) for number in ENDED_BY}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, _: FrameType | None) -> None:
        self.came = True
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)
