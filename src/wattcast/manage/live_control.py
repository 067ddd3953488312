"""Control a real card while a program runs on it.

The controller of the simulations runs here on fixed periods instead of kernels. One period is one observation: energy
comes from the card's counter, work from what the program reports (it appends one byte to a file per unit of work) or,
where the card measures it, from how busy its pipes were. Without either, performance is not visible and nothing is
tuned.

The number of SMs is a third knob beside the clocks. MPS fixes a program's share when it starts (``limit_sm_share``).
Green contexts (CUDA 12.4 and later) can be changed while a program runs, but only from inside it. So the program
turns this knob: before each unit of work it reads how many SMs to use from the file named in ``WATTCAST_UNITS``,
which ``SmCountFile`` writes, and runs that unit in a green context of that size. A program that does not look keeps
all SMs; time and power then do not change with the knob, and the controller leaves it where it was.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from wattcast.core.errors import MissingTool, Refused, bad_value
from wattcast.core.strict_files import write_whole
from wattcast.manage.clock_guard import ClockGuard, ControlledCard
from wattcast.manage.knobs import Knob, KnobRole, Lattice, Settings
from wattcast.manage.plants import Observation
from wattcast.manage.policies import ControllerState, Harmonia
from wattcast.manage.search_problem import Objective

PROGRESS_VARIABLE, SM_COUNT_VARIABLE = "WATTCAST_PROGRESS", "WATTCAST_UNITS"
MPS_SHARE, MPS_PIPE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PIPE_DIRECTORY"
SM_GRAIN = 8  # SMs: green contexts on compute capability 9.0 and later come in multiples of it (CUDA driver API)
SM_SHARES = (0.5, 0.625, 0.75, 0.875)
LEVELS = 16
LOWEST = 0.5  # of the highest core clock; below, no objective here is ever served
BUSY = 0.5  # share of time with a kernel running, from which the reported clock is that of the work
BLIND_PERIODS = 5  # without visible work, after which the user is told
PROGRAM_KERNEL = "program"
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0  # for the program to end after a signal was passed on


@dataclass(frozen=True)
class SmCountFile:
    """Tell a program through a file how many of a card's SMs to use."""

    path: Path
    total: int

    def __post_init__(self) -> None:
        if self.total < 2 * SM_GRAIN:
            raise bad_value("--sms", f"{2 * SM_GRAIN} SMs or more", self.total)

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the counts that can be asked for: about eighths of the card down to a half, and all of it."""
        lower = {SM_GRAIN * round(share * self.total / SM_GRAIN) for share in SM_SHARES}
        return tuple(float(n) for n in sorted({n for n in lower if n < self.total} | {self.total}))

    def set(self, count: float) -> None:
        """Ask for this many; a reader sees the old number or the new one."""
        write_whole(self.path, f"{count:.0f}\n".encode())

    def reset(self) -> None:
        """Ask for all of them again."""
        self.set(self.total)


def limit_sm_share(percent: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give a program a share of the SMs through MPS; Refused where no MPS server listens."""
    if not 1 <= percent <= 100:
        raise bad_value("--sm-percent", "1 to 100", percent)
    pipe = Path(variables.get(MPS_PIPE, "/tmp/nvidia-mps")) / "control"  # noqa: S108  (NVIDIA's own default)
    if not pipe.exists():
        raise Refused(f"--sm-percent needs an MPS server; none listens at {pipe}. Start nvidia-cuda-mps-control -d.")
    return {MPS_SHARE: str(percent)}


def build_card_lattice(
    core_hz: tuple[float, ...], memory_hz: tuple[float, ...], units: tuple[float, ...] = ()
) -> Lattice:
    """Return the knobs of a card: up to 16 core clocks of its upper half, memory clocks and SM counts if several."""
    usable = [c for c in core_hz if c >= LOWEST * core_hz[-1]] if core_hz else []
    if not usable:
        raise MissingTool("the card names no core clock that could be locked.")
    step = max(1, math.ceil((len(usable) - 1) / (LEVELS - 1)))
    knobs = [Knob(KnobRole.CORE_CLOCK, tuple(sorted(usable[::-1][::step])))]
    if len(memory_hz) > 1:
        knobs.append(Knob(KnobRole.MEMORY_CLOCK, tuple(sorted(memory_hz))))
    if len(units) > 1:
        knobs.append(Knob(KnobRole.COMPUTE_UNITS, units))
    return Lattice(tuple(knobs))


class ProgressFile:
    """Count units of work done so far: the size of a file the program appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self) -> float:
        """Return the units done so far; 0 before the program made the file."""
        try:
            return float(os.stat(self._path).st_size)
        except FileNotFoundError:
            return 0.0
        except OSError as error:
            raise bad_value(str(self._path), "a file the program appends to", error.strerror or "none") from None


class LivePlant:
    """Run a card and a program in periods. ``dry`` never sets anything."""

    def __init__(
        self,
        card: ControlledCard,
        lattice: Lattice,
        period_s: float,
        alive: Callable[[], bool],
        wait: Callable[[float], None],
        progress: ProgressFile | None = None,
        dry: bool = True,
        log: Callable[[Settings, str], None] | None = None,
        units: SmCountFile | None = None,
    ) -> None:
        self._card, self._lattice, self._period_s = card, lattice, period_s
        self._alive, self._wait, self._progress = alive, wait, progress
        self._log = log or (lambda settings, why: None)
        self._units = units
        self._now: Settings | None = None
        self.controlled = not dry
        self._reported = False  # whether the program has reported any progress
        self._blind = 0  # periods in a row without visible work

    @property
    def lattice(self) -> Lattice:
        return self._lattice

    @property
    def default(self) -> Settings:
        return self._lattice.top

    def next_kernel(self) -> str | None:
        return PROGRAM_KERNEL if self._alive() else None

    def run(self, settings: Settings) -> Observation:
        """Run one period. Settings the card refuses end control, not the program."""
        if self.controlled and settings != self._now:
            self._set(settings)
        begin, done = self._read(), self._count()
        self._wait(self._period_s)
        end, more = self._read(), self._count()
        ran = settings if self.controlled else self._nearest_settings(end)
        if begin is None or end is None:
            return Observation(PROGRAM_KERNEL, ran, math.nan, math.nan, stale=True)
        seconds, joules = end.at_s - begin.at_s, end.energy_j - begin.energy_j
        power_w = joules / seconds if math.isfinite(joules) and joules > 0 else end.power_w
        stale = math.isfinite(joules) and joules <= 0  # the counter stood still, or was reset
        self._reported = self._reported or more - done > 0
        work = more - done if self._reported else end.work_per_s * seconds
        self._blind = 0 if work > 0 else self._blind + 1  # NaN counts as none
        if self._blind == BLIND_PERIODS and self.controlled:
            hint = "have the program append to WATTCAST_PROGRESS (--progress)"
            self._log(ran, f"no work seen, so nothing is tuned; {hint}")
        # The reported clock is a governor's only while the card works: an idle card's clock says nothing.
        lowest_hz = self._lattice.level_values(self._lattice.bottom)[0]
        is_held = end.busy >= BUSY and end.core_hz >= lowest_hz  # False for NaN
        held_hz = float(end.core_hz) if is_held else math.nan
        return Observation(PROGRAM_KERNEL, ran, seconds, power_w, work, None, stale, held_hz)

    def _set(self, settings: Settings) -> None:
        """Lock the clocks of a setting and ask for its SMs; clocks at their default are left to the driver."""
        each = zip(self._lattice.knobs, self._lattice.level_values(settings), settings, self.default, strict=True)
        values = {knob.role: (value, level == top) for knob, value, level, top in each}
        count, _ = values.pop(KnobRole.COMPUTE_UNITS, (None, True))
        try:
            if self._units is not None and count is not None:
                self._units.set(count)
            if all(at_default for _, at_default in values.values()):
                self._card.reset()
            else:
                memory_hz, _ = values.get(KnobRole.MEMORY_CLOCK, (None, True))
                self._card.lock(values[KnobRole.CORE_CLOCK][0], memory_hz)
        except (Refused, MissingTool) as error:
            self._end_control(settings, f"not set, control ends: {error}")
            return
        self._now = settings
        self._log(settings, "left to the driver" if settings == self.default else "set")

    def _end_control(self, settings: Settings, why: str) -> None:
        """Stop steering: the driver gets its clocks back, and the program runs on."""
        self.controlled = False
        self._log(settings, why)
        if self._units is not None:
            self._units.reset()
        with suppress(Refused, MissingTool):
            self._card.reset()

    def _read(self) -> Any:
        try:
            return self._card.read()
        except MissingTool as error:
            if self.controlled:
                self._end_control(self._now or self.default, f"control ends: {error}")
            return None

    def _count(self) -> float:
        return math.nan if self._progress is None else self._progress.count()

    def _nearest_settings(self, reading: Any) -> Settings:
        """Return the setting closest to what the card runs at, for a plant that is only watched."""
        if reading is None or not math.isfinite(reading.core_hz):
            return self.default
        values = {
            KnobRole.CORE_CLOCK: reading.core_hz,
            KnobRole.MEMORY_CLOCK: reading.memory_hz,
            KnobRole.COMPUTE_UNITS: math.inf,
        }
        return self._lattice.nearest_settings(*(values[knob.role] for knob in self._lattice.knobs))


@dataclass(frozen=True)
class EndedProgram:
    """Say how a controlled program ended."""

    code: int
    changes: int
    controlled: bool  # to the end


def run_controlled_program(
    card: ControlledCard,
    command: Sequence[str],
    objective: Objective,
    folder: Path,
    period_s: float,
    say: Callable[[str], None],
    environment: Mapping[str, str],
    progress: Path | None = None,
    watchdog: list[str] | None = None,
    units: SmCountFile | None = None,
) -> EndedProgram:
    """Run ``command`` while the controller sets clocks; they are reset however this ends."""
    lattice = build_card_lattice(*card.clocks_hz(), units.levels if units else ())
    changes: list[str] = []

    def log(settings: Settings, why: str) -> None:
        if why.startswith(("set", "left")):
            changes.append(why)
        say(f"{lattice.describe(settings)}: {why}")

    with ExitStack() as stack:
        guard = stack.enter_context(ClockGuard(card, folder, say, watchdog))
        signals = stack.enter_context(_Signals())
        if units is not None:
            units.reset()
            stack.callback(units.reset)
        try:
            card.lock(lattice.level_values(lattice.top)[0])  # whether this works is known before the program starts
        except Refused:
            guard.nothing_was_set()
            raise
        log(lattice.top, "set, to see whether it works")
        paths = {PROGRESS_VARIABLE: progress, SM_COUNT_VARIABLE: units.path if units else None}
        variables = {**environment, **{name: str(path) for name, path in paths.items() if path is not None}}
        try:
            process = subprocess.Popen(list(command), env=variables)
        except OSError as error:
            raise MissingTool(f"{command[0]}: cannot be started ({error.strerror}).") from None
        signals.pass_on_to(process)

        def is_alive() -> bool:
            return process.poll() is None and not signals.came

        def wait(seconds: float) -> None:
            pause, waited = min(seconds, 0.05), 0.0
            while waited < seconds and is_alive():
                time.sleep(pause)
                waited += pause

        told = ProgressFile(progress) if progress else None
        plant = LivePlant(card, lattice, period_s, is_alive, wait, told, dry=False, log=log, units=units)
        controller = Harmonia(lattice, lattice.top, objective)
        state = controller.start()
        while (kernel := plant.next_kernel()) is not None:
            observation = plant.run(controller.settings(state, kernel))
            if plant.controlled:  # where control has ended the program is only waited for
                state, _ = controller.step(state, observation)
        if signals.came and process.poll() is None:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        code = process.wait()
    count = len(changes)
    say(f"clocks reset after {count} change{'s' if count > 1 else ''}. {_describe_gain(state, lattice)}")
    return EndedProgram(code, count, plant.controlled)


def _describe_gain(state: ControllerState, lattice: Lattice) -> str:
    """Say what the settings at the end brought against the default, by the runs there were."""
    memory = state.kernels.get(PROGRAM_KERNEL)
    before = memory.runs.seen.get(lattice.top) if memory else None
    after = memory.runs.seen.get(memory.next_settings) if memory else None
    if memory is None or before is None or after is None:
        return "Nothing was learned: no period told both power and work."
    if memory.next_settings == lattice.top:
        return "The driver's own clocks were best."
    time_ratio, power_ratio = (math.exp(b - a) for a, b in zip(before[1:], after[1:], strict=True))
    return (
        f"{lattice.describe(memory.next_settings)} against the driver's own: time {time_ratio - 1:+.1%}, "
        f"power {power_ratio - 1:+.1%}, energy {time_ratio * power_ratio - 1:+.1%} per unit of work."
    )


class _Signals:
    """Pass signals on to the program and remember that one came, so that the way out is the usual one."""

    def __init__(self) -> None:
        self.came = False  # no Event: its lock may be held by the very code a signal interrupts
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        """Name the program that signals are passed on to."""
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
