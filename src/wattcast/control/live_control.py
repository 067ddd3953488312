"""Control a real card while a program runs on it.

The controller of the simulations runs here on fixed periods instead of kernels. One period is one
observation: energy comes from the card's counter, work from what the program reports
(``ProgressFile``) or, where the card measures it, from how busy its pipes were. Without either,
performance is not visible and nothing is tuned. A card that waits for work is not slowed either:
its throughput is that of the demand and says nothing about response times. The card is set through
the daemon (``daemon_client.py``), which gives it back whatever happens here.

The number of SMs is a further knob. MPS fixes a program's share when it starts
(``limit_sm_share``). Green contexts (CUDA 12.4 and later) can be changed while a program runs, but
only from inside it. So the program turns this knob: before each unit of work it reads how many SMs
to use from the file named in ``WATTCAST_UNITS``, which ``SmCountFile`` writes, and runs that unit
in a green context of that size. A program that does not look keeps all SMs; time and power then do
not change with the knob, and the controller leaves it where it was."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.control import plants
from wattcast.control.card_settings import RefusedKnob
from wattcast.control.daemon_client import DaemonCard
from wattcast.control.plants import Knob, KnobRole, Lattice, Observation, Settings
from wattcast.control.policies import Harmonia
from wattcast.control.savings import MeasuredSavings, ReferencePairs
from wattcast.control.search_problem import Objective
from wattcast.control.serving_control import READING_INTERVAL_S, EngineReading, LatencyKeeper
from wattcast.core import MissingTool, Refused, bad_value
from wattcast.core.arrays import Array
from wattcast.core.regular_files import open_regular
from wattcast.core.strict_files import encode_csv
from wattcast.core.whole_files import write_whole
from wattcast.measure.device_control import BUSY
from wattcast.measure.measured_run import PassedSignals
from wattcast.measure.source_check import AVERAGE_S, MOST_W, is_plausible_power

PROGRESS_VARIABLE = "WATTCAST_PROGRESS"
SM_COUNT_VARIABLE = "WATTCAST_UNITS"
MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
SATURATED = 0.95  # share of time with a kernel running, below which a card waits for work
# of its memory, or of an issue slot, from which a card without a program's own signal counts as
# busy
IN_USE = 0.5
BLIND_PERIODS = 5  # without visible work, after which the user is told
WARM_UP = 2  # periods with work that are not looked at: programs start slowly
SEARCH_PERIODS = 20  # of search, after which the saving of the best setting so far is measured
# step of waiting, time a new setting is given, wait for a counter's step
POLL_S = 0.01
SETTLE_S = 0.2
MARK_S = 0.3
PROGRAM_KERNEL = "program"
GRACE_S = 5.0  # for the program to end after a signal was passed on
ROLES = {
    "core": KnobRole.CORE_CLOCK,
    "memory": KnobRole.MEMORY_CLOCK,
    "limit": KnobRole.POWER_LIMIT,
}
Advice = Callable[[Any, Lattice], Settings | None]  # first guess from a reading


@dataclass(frozen=True)
class SmCountFile:
    """Tell a program through a file how many of a card's SMs to use."""

    path: Path
    total: int

    def __post_init__(self) -> None:
        if self.total < 2 * plants.SM_GRAIN:
            raise bad_value("--sms", f"{2 * plants.SM_GRAIN} SMs or more", self.total)

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the counts that can be asked for."""
        return plants.list_sm_counts(self.total)

    def set(self, count: float) -> None:
        """Ask for this many; a reader sees the old number or the new one."""
        write_whole(self.path, f"{count:.0f}\n".encode())

    def reset(self) -> None:
        """Ask for all of them again."""
        self.set(self.total)


def limit_sm_share(percent: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give a program a share of the SMs through MPS; Refused where no MPS
    server listens.
    """
    if not 1 <= percent <= 100:
        raise bad_value("--sm-percent", "1 to 100", percent)
    pipe = Path(variables.get(MPS_PIPE, "/tmp/nvidia-mps")) / "control"  # noqa: S108  (NVIDIA's own default)
    if not pipe.exists():
        raise Refused(
            f"--sm-percent needs an MPS server; none listens at {pipe}. Start nvidia-cuda-mps-control -d."
        )
    return {MPS_SHARE: str(percent)}


class ProgressFile:
    """Count units of work done so far from a file the program appends to.

    Every byte is a unit. A file that starts with "+" has lines instead, each a "+" and an amount,
    such as "+4096"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._sum = 0.0
        self._rest = b""

    def count(self) -> float:
        """Return the units done so far; 0 before the program made the file."""
        try:
            with open_regular(self._path) as stream:
                if stream.read(1) != b"+":
                    return float(os.fstat(stream.fileno()).st_size)
                stream.seek(self._read)
                data = stream.read(1 << 20)
        except FileNotFoundError:
            return 0.0
        except OSError as error:
            raise bad_value(
                str(self._path), "a file the program appends to", error.strerror or "none"
            ) from None
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with suppress(ValueError):
                amount = float(line)
                self._sum += amount if 0.0 <= amount < math.inf else 0.0
        return self._sum


def report_work(amount: float = 1.0) -> None:
    """Report work from inside a controlled program, a unit per call or as much as is said. Does
    nothing elsewhere.

    Call it once per training step: ``wattcast.control.live_control.report_work()``.
    """
    path = os.environ.get(PROGRESS_VARIABLE)
    if path:
        with open(path, "ab", buffering=0) as stream:
            stream.write(f"+{amount:.9g}\n".encode())


@dataclass
class LivePlant:
    """Run a card and a program in periods."""

    card: DaemonCard
    lattice: Lattice  # of fewer knobs after the driver or the daemon refused some
    period_s: float
    alive: Callable[[], bool]
    wait: Callable[[float], None]
    progress: ProgressFile | None = None
    say: Callable[[str], None] = lambda text: None
    units: SmCountFile | None = None
    controlled: bool = True
    reading: Any = None  # the last one
    totals: dict[Settings, Array] = field(
        default_factory=dict
    )  # seconds, units of work, joules and core cycles
    _now: Settings | None = None
    _worked: set[KnobRole] = field(default_factory=set)  # knobs that were set at least once
    _busy: deque[float] = field(default_factory=lambda: deque(maxlen=BLIND_PERIODS))
    _reported: bool = False  # whether the program has reported any progress
    _blind: int = 0  # periods in a row without visible work

    @property
    def default(self) -> Settings:
        return self.lattice.top

    @property
    def saturated(self) -> bool:
        """Tell whether the card is kept busy, as far as it tells: else its throughput is that of
        the demand.
        """
        return not self._busy or sum(self._busy) / len(self._busy) >= SATURATED

    def next_kernel(self) -> str | None:
        return PROGRAM_KERNEL if self.alive() else None

    def run(self, settings: Settings) -> Observation:
        """Run one period. Settings the card refuses are left out from then on; the program runs on."""
        left_s = self.period_s
        if self.controlled and settings != self._now and self._set_knobs(settings):
            left_s -= self.pause_heard(min(SETTLE_S, 0.2 * self.period_s))
        begin, used_s = self._mark_counters()
        self.pause_heard(left_s - used_s)
        end, _ = self._mark_counters()
        if begin is None or end is None:
            return Observation(PROGRAM_KERNEL, settings, math.nan, math.nan, stale=True)
        self.reading = end.reading
        joules = end.energy_j - begin.energy_j
        span_s = end.energy_s - begin.energy_s
        is_counted = math.isfinite(joules) and joules > 0 and span_s > 0
        stale = math.isfinite(joules) and joules <= 0  # the counter stood still, or was reset
        if is_counted and span_s >= AVERAGE_S:  # power readings are means over a second
            ends_w = (begin.reading.power_w, end.reading.power_w)
            stale = stale or not is_plausible_power(joules / span_s, ends_w, MOST_W)
        seconds = end.work_s - begin.work_s
        work = end.work - begin.work
        self._reported = self._reported or work > 0
        if not self._reported:
            seconds = end.reading.at_s - begin.reading.at_s
            work = end.reading.work_per_s * seconds
        self._blind = 0 if work > 0 else self._blind + 1  # NaN counts as none
        if self._blind == BLIND_PERIODS and self.controlled:
            self.say(
                "no work seen, so nothing is tuned; have the program append to WATTCAST_PROGRESS (--progress)"
            )
        reading = end.reading
        busy = float(end.reading.busy)
        if (
            not self._reported
            and math.isfinite(reading.work_per_s)
            and not reading.memory_busy >= IN_USE
        ):
            busy = min(
                busy,
                float(reading.busy >= SATURATED and reading.work_per_s >= IN_USE * reading.core_hz),
            )
        if math.isfinite(busy):
            was = self.saturated
            self._busy.append(busy)
            if was and not self.saturated and self.controlled:
                said = "the card waits for work, so that a lower clock would lengthen response times unseen"
                self.say(f"{said}; nothing is slowed without a latency signal (--metrics)")
        # The reported clock is a governor's only while the card works: an idle card's clock says
        # nothing.
        lowest_hz = (
            self.lattice.knobs[0].levels[0]
            if self.lattice.knobs[0].role is KnobRole.CORE_CLOCK
            else 0.0
        )
        is_held = end.reading.busy >= BUSY and end.reading.core_hz >= lowest_hz  # False for NaN
        held_hz = float(end.reading.core_hz) if is_held else math.nan
        power_w = joules / span_s if is_counted else float(end.reading.power_w)
        return Observation(PROGRAM_KERNEL, settings, seconds, power_w, work, None, stale, held_hz)

    def _set_knobs(self, settings: Settings) -> bool:
        """Set the knobs; those at their default get back what they had before. Tell whether
        anything changed.
        """
        if settings == self.default and self._now is None and not self._worked:
            self._now = settings
            return False
        each = zip(
            self.lattice.knobs,
            self.lattice.level_values(settings),
            settings,
            self.default,
            strict=True,
        )
        values = {knob.role: None if level == top else value for knob, value, level, top in each}
        with self.ending_control():
            if self.units is not None:
                self.units.set(values.get(KnobRole.COMPUTE_UNITS) or self.units.total)
            try:
                self.card.apply(*(values.get(role) for role in ROLES.values()))
            except RefusedKnob as error:
                self._leave_out_refused(error, settings)
                return False
            self._worked |= {role for role, value in values.items() if value is not None}
            self._now = settings
            self.say(
                "the card as before"
                if settings == self.default
                else f"{self.lattice.describe(settings)}: set"
            )
            return True
        return False

    def _leave_out_refused(self, error: RefusedKnob, settings: Settings) -> None:
        """Leave refused levels out: those outside the range that is allowed, or the whole knob if
        it never worked.
        """
        role = ROLES[error.knob]
        knobs = []
        for knob, level in zip(self.lattice.knobs, settings, strict=True):
            levels = knob.levels
            if knob.role is role and error.allowed is not None:
                levels = tuple(
                    v for v in levels if error.allowed[0] * 0.999 <= v <= error.allowed[1] * 1.001
                )
            elif knob.role is role:
                levels = (
                    tuple(v for i, v in enumerate(levels) if i != level)
                    if role in self._worked
                    else ()
                )
            knobs += [Knob(knob.role, levels)] if len(levels) > 1 else []
        if not any(knob.role in ROLES.values() for knob in knobs):
            self._end_control(f"nothing is left to set: {error}")
            return
        self.say(f"{error} It is left alone from now on.")
        self.lattice, self._now, self.totals = Lattice(tuple(knobs)), None, {}

    def _end_control(self, why: str) -> None:
        """Stop steering: the card gets back what it had, and the program runs on."""
        self.controlled = False
        self.say(f"control ends: {why}")
        if self.units is not None:
            self.units.reset()
        with suppress(Refused, MissingTool):
            self.card.give_back()

    @contextmanager
    def ending_control(self) -> Iterator[None]:
        """Stop steering where the card, its driver or the daemon refuses what is done in the block."""
        try:
            yield
        except (Refused, MissingTool) as error:
            if self.controlled:
                self._end_control(str(error))

    def pause_heard(self, seconds: float) -> float:
        """Wait, being heard meanwhile, and return how long."""
        waited = 0.0
        while waited < seconds - 1e-9 and self.alive():
            step = min(seconds - waited, 5 * POLL_S)
            self.wait(step)
            waited += step
            if self.controlled:
                with self.ending_control():
                    self.card.beat()
        return waited

    def _mark_counters(self) -> tuple[_CounterMark | None, float]:
        """Read the card just after its energy counter stepped, and the work just after a unit
        ended.

        Both counters move in steps; read at any other moment, a step more or less would be noise.
        Return also how long that took."""
        waited = 0.0
        most_s = min(MARK_S, 0.3 * self.period_s)
        energy = work = None
        with self.ending_control():
            first = self.card.read()
            done = self.progress.count() if self.progress else 0.0
            while True:
                waited += self.pause_heard(POLL_S)
                reading = self.card.read()
                count = self.progress.count() if self.progress else 0.0
                now_s = reading.at_s
                if energy is None and reading.energy_j != first.energy_j:
                    energy = now_s, reading.energy_j
                if work is None and count != done:
                    work = now_s, count
                if (
                    (energy and (work or self.progress is None))
                    or waited >= most_s
                    or not self.alive()
                ):
                    mark = _CounterMark(
                        reading, *(energy or (now_s, reading.energy_j)), *(work or (now_s, count))
                    )
                    return mark, waited
        return None, waited


@dataclass(frozen=True)
class _CounterMark:
    reading: Any
    energy_s: float
    energy_j: float
    work_s: float
    work: float


def control_plant(
    plant: LivePlant, objective: Objective, advise: Advice | None = None, seed: int = 0
) -> MeasuredSavings | None:
    """Control a plant until its program ends; return what that saves, None where the card stays as
    it was.

    ``advise`` gives a first guess from a reading, which the controller tries before its own steps.
    """
    lattice = None
    controller = Harmonia(plant.lattice, plant.default, objective)
    warm_up = WARM_UP
    pairs = ReferencePairs(seed)
    state = controller.start()
    # periods of search so far; settings whose saving is being measured
    searched = 0
    held = None
    while plant.next_kernel() is not None:
        if plant.lattice is not lattice:  # the first time, or some knobs were refused
            lattice = plant.lattice
            pairs = ReferencePairs(seed)
            searched = 0
            held = None
            controller = Harmonia(lattice, plant.default, objective)
            state = controller.start()
        wanted = controller.settings(state, PROGRAM_KERNEL)
        settled = controller.is_settled(state, PROGRAM_KERNEL)
        if settled:
            held = wanted
        elif (
            held is None and searched >= SEARCH_PERIODS
        ):  # a long search is interrupted to see what it brought
            held = controller.best_so_far(state, PROGRAM_KERNEL)
        elif held is not None and pairs.is_enough(held):
            held = None
            searched = 0
        if held is not None:
            wanted = pairs.choose(held, plant.default)
        seen = plant.run(wanted)
        if not plant.controlled or plant.lattice is not lattice:
            continue
        if warm_up > 0 and seen.usable:
            warm_up -= 1
            if (
                warm_up == 0
                and advise is not None
                and (hint := advise(plant.reading, lattice)) is not None
            ):
                controller = replace(controller, hint={PROGRAM_KERNEL: hint})
        elif not plant.saturated:
            state = controller.start()
            held = None
        else:
            searched += held is None
            pairs.record(seen)
            state, _ = controller.step(state, seen)
            if seen.usable and seen.core_hz > 0:  # False for NaN
                each = seen.duration_s * np.array(
                    [1.0, seen.work / seen.duration_s, seen.power_w, seen.core_hz]
                )
                plant.totals[seen.settings] = plant.totals.get(seen.settings, 0.0) + each
    return pairs.measure() if plant.controlled and held != plant.default else None


def control_serving(
    plant: LivePlant, keeper: LatencyKeeper, read_engine: Callable[[], EngineReading]
) -> None:
    """Control a card that serves requests until its program ends; while its engine is silent, it
    runs as before.
    """
    level = keeper.level
    blind = 0
    top = len(keeper.levels_hz) - 1
    while plant.alive() and plant.controlled:
        plant.pause_heard(READING_INTERVAL_S)
        with plant.ending_control():
            try:
                reading = read_engine()
                seen = plant.card.read()
                wanted = keeper.decide(seen.at_s, reading, seen.energy_j)
                blind = 0
            except MissingTool as error:
                blind += 1
                if blind == 2:
                    plant.say(f"{error} The card runs as before until the engine answers.")
                wanted = keeper.level if blind < 2 else top
            if wanted != level:
                hz = None if wanted == top else keeper.levels_hz[wanted]
                plant.card.apply(hz, None, None)
                clock = "as before" if hz is None else f"{hz / 1e6:.0f} MHz"
                plant.say(f"core {clock}: {'blind' if blind else keeper.why}")
                level = wanted


@dataclass(frozen=True)
class ControlTask:
    """Hold what a controller has to do: an objective for reported work, or limits for a program
    that serves.
    """

    objective: Objective
    period_s: float = 1.0
    progress: Path | None = None
    units: SmCountFile | None = None
    power_limit: bool = False
    advise: Advice | None = None
    make_keeper: Callable[[Sequence[float]], LatencyKeeper] | None = (
        None  # of the card's clocks, for serving
    )
    read_engine: Callable[[], EngineReading] | None = None  # with ``make_keeper``
    rows: Path | None = None  # file for what a unit of work took at each clock
    workload: Mapping[str, Any] | None = (
        None  # with ``rows``: the columns that name what a unit of work is
    )


def run_controlled_program(
    card: DaemonCard,
    command: Sequence[str],
    task: ControlTask,
    say: Callable[[str], None],
    environment: Mapping[str, str],
) -> int:
    """Run ``command`` under control and return its exit code; without one, control what runs until
    a signal comes.

    ``Refused`` when the card did not get back what it had.
    """
    units = task.units
    limits_w = card.limits_w() if task.power_limit else None
    lattice = plants.build_card_lattice(*card.clocks_hz(), units.levels if units else (), limits_w)
    with ExitStack() as stack:
        signals = stack.enter_context(PassedSignals())
        if units is not None:
            units.reset()
            stack.callback(units.reset)
        paths = {PROGRESS_VARIABLE: task.progress, SM_COUNT_VARIABLE: units.path if units else None}
        variables = {
            **environment,
            **{name: str(path) for name, path in paths.items() if path is not None},
        }
        process = _start_program(signals, command, variables) if command else None

        def is_alive() -> bool:
            return (process is None or process.poll() is None) and not signals.came

        told = ProgressFile(task.progress) if task.progress else None
        plant = LivePlant(card, lattice, task.period_s, is_alive, time.sleep, told, say, units)
        savings = None
        if task.make_keeper is not None and task.read_engine is not None:
            control_serving(plant, task.make_keeper(lattice.knobs[0].levels), task.read_engine)
        else:
            savings = control_plant(plant, task.objective, task.advise)
        try:
            card.give_back()
        finally:
            code = 0 if process is None else _await_end(process, signals.came)
    said = "" if task.make_keeper is not None else "No saving is claimed."
    if savings is not None:
        said = savings.describe(plant.lattice.describe(savings.settings))
    say(f"the card has back what it had. {said}".rstrip())
    if task.rows is not None:
        count = write_calibration_rows(plant, task.workload or {}, task.rows)
        say(f"{task.rows}: {count} rows for `wattcast calibrate`.")
    return code


def write_calibration_rows(plant: LivePlant, workload: Mapping[str, Any], path: Path) -> int:
    """Save the mean time and power of a unit of work at each clock, as CSV for ``calibrate``;
    return how many rows.

    A unit of work has to be one run of the workload. Settings with fewer SMs or another memory
    clock are left out."""
    lines = [[*workload, "latency_s", "power_w", "clock_mhz"]]
    for settings, (seconds, work, joules, cycles) in plant.totals.items():
        each = zip(plant.lattice.knobs, settings, plant.default, strict=True)
        if all(
            level == top or knob.role in (KnobRole.CORE_CLOCK, KnobRole.POWER_LIMIT)
            for knob, level, top in each
        ):
            found = seconds / work, joules / seconds, 1e-6 * cycles / seconds
            lines.append([*map(str, workload.values()), *(f"{value:.6g}" for value in found)])
    write_whole(path, encode_csv(lines))
    return len(lines) - 1


def choose_clock_plane(
    core_hz: Sequence[float], memory_hz: Sequence[float], cores: int, memories: int
) -> list[tuple[float, float]]:
    """Return evenly spread pairs of clocks, the ends among them, from the highest down.

    >>> choose_clock_plane([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0], 3, 1)
    [(5.0, 2.0), (3.0, 2.0), (1.0, 2.0)]
    """
    if not (core_hz and memory_hz):
        raise MissingTool("the driver names no clocks of this card that could be set.")
    axes = []
    for clocks, count in ((core_hz, cores), (memory_hz, memories)):
        places = np.linspace(
            len(clocks) - 1, 0 if count > 1 else len(clocks) - 1, min(count, len(clocks))
        )
        axes.append([clocks[int(place)] for place in np.rint(places)])
    return [(core, memory) for memory in axes[1] for core in axes[0]]


def visit_clock_plane(
    card: DaemonCard,
    plane: Sequence[tuple[float, float]],
    command: Sequence[str],
    say: Callable[[str], None],
    environment: Mapping[str, str],
) -> dict[tuple[float, float], int | None]:
    """Run ``command`` at every pair of clocks and return its exit codes, None where the driver
    refused the pair.

    ``{core}`` and ``{memory}`` in its words are the clocks in MHz. A memory clock is set only where
    the plane has several. The card gets back what it had however this ends; a signal ends the
    program and the visits."""
    codes: dict[tuple[float, float], int | None] = {}
    several = len({memory for _, memory in plane}) > 1
    with ExitStack() as stack:
        signals = stack.enter_context(PassedSignals())
        stack.callback(card.give_back)
        for core_hz, memory_hz in plane:
            if signals.came:
                break
            mhz = {"{core}": f"{core_hz / 1e6:.0f}", "{memory}": f"{memory_hz / 1e6:.0f}"}
            try:
                card.apply(core_hz, memory_hz if several else None, None)
            except RefusedKnob as error:
                say(f"{mhz['{core}']} and {mhz['{memory}']} MHz are left out: {error}")
                codes[core_hz, memory_hz] = None
                continue
            words = [
                word.replace("{core}", mhz["{core}"]).replace("{memory}", mhz["{memory}"])
                for word in command
            ]
            process = _start_program(signals, words, environment)
            try:
                while process.poll() is None:
                    card.beat()
                    time.sleep(POLL_S)
            finally:
                if process.poll() is None and not signals.came:
                    process.terminate()
                codes[core_hz, memory_hz] = _await_end(
                    process, signals.came or process.poll() is None
                )
    return codes


def _start_program(
    signals: PassedSignals, words: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        return signals.start_program(words, env=dict(variables))
    except OSError as error:
        raise MissingTool(f"{words[0]}: cannot be started ({error.strerror}).") from None


def _await_end(process: subprocess.Popen[bytes], signalled: bool) -> int:
    try:
        return process.wait(GRACE_S if signalled else None)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
