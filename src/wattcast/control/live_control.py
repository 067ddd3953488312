"""Control a real card while a program runs on it.

The controller of the simulations runs here on fixed periods instead of kernels (``live_plant``).
Where neither the program nor the card shows work, performance is not visible and nothing is tuned.
A card that waits for work is not slowed either: its throughput is that of the demand and says
nothing about response times.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.control import plants
from wattcast.control.clock_plane import await_end, start_program
from wattcast.control.daemon_client import DaemonCard
from wattcast.control.job_cards import JobCards
from wattcast.control.live_plant import (
    LIVE,
    PROGRAM_KERNEL,
    LivePlant,
)
from wattcast.control.plants import (
    KnobRole,
    Lattice,
    Observation,
    Settings,
)
from wattcast.control.policies import Harmonia
from wattcast.control.program_files import (
    BUSY_VARIABLE,
    PROGRESS_VARIABLE,
    SM_COUNT_VARIABLE,
    BusyFolder,
    ProgressFile,
    SmCountFile,
    find_local_rank,
)
from wattcast.control.savings import MeasuredSavings, ReferencePairs
from wattcast.control.search_problem import Objective
from wattcast.control.sensitivity_model import SensitivityModel
from wattcast.control.slack_clocks import KNOB_LEVELS as SLACK_LEVELS
from wattcast.core import MissingTool
from wattcast.core.strict_files import encode_csv
from wattcast.core.whole_files import write_whole
from wattcast.measure.measured_run import PassedSignals

if TYPE_CHECKING:  # whoever controls another program does not wait for the predictor of engines
    from wattcast.control.queue_keeper import QueueKeeper
    from wattcast.control.serving_control import EngineReading, LatencyKeeper

SILENT_READINGS = 2  # of an engine in a row, after which the card runs as before
Advice = Callable[[Any, Lattice], Settings | None]  # first guess from a reading


def control_plant(
    plant: LivePlant,
    objective: Objective,
    advise: Advice | None = None,
    seed: int = 0,
    model: SensitivityModel | None = None,
) -> MeasuredSavings | None:
    """Control a plant until its program ends; return what that saves, None where the card stays as
    it was.

    ``advise`` gives a first guess from a reading, which the controller tries before its own steps.
    ``model`` predicts sensitivities from the card's counters; without one they are measured.
    """
    search = _LiveSearch(
        plant,
        objective,
        advise,
        seed,
        model,
    )
    while plant.next_kernel() is not None:
        search.run_period()
    return search.measure_savings()


class _LiveSearch:
    """The search for the best settings of a plant, and the periods that measure what they save."""

    def __init__(
        self,
        plant: LivePlant,
        objective: Objective,
        advise: Advice | None,
        seed: int,
        model: SensitivityModel | None = None,
    ) -> None:
        self._plant = plant
        self._model = model
        self._objective = objective
        self._advise = advise
        self._seed = seed
        self._warm_up = LIVE.warm_up
        self._begin()

    def _begin(self) -> None:
        """Begin anew, at first and when the plant has lost knobs that were refused."""
        self._lattice = self._plant.lattice
        limits_w = None
        with self._plant.ending_control():
            limits_w = self._plant.card.limits_w()
        self._controller = Harmonia(
            self._lattice,
            self._plant.start,
            self._objective,
            self._model,
            free=self._plant.free_knobs,
            limit_w=None if limits_w is None else self._plant.card.count * limits_w[0],
        )
        self._state = self._controller.start()
        self._pairs = ReferencePairs(self._seed)
        self._searched = 0  # periods of search so far
        self._judged: Settings | None = None  # settings whose saving is being measured

    def run_period(self) -> None:
        """Run the plant for a period and learn from it."""
        plant = self._plant
        if plant.lattice is not self._lattice:
            self._begin()
        observation = plant.run(self._choose_settings())
        if not plant.controlled or plant.lattice is not self._lattice:
            return
        if self._warm_up > 0 and observation.usable:
            self._warm_up -= 1
            if self._warm_up == 0:
                self._take_advice()
        elif not plant.saturated:
            self._state = self._controller.start()
            self._judged = None
        else:
            self._learn(observation)

    def _choose_settings(self) -> Settings:
        """Return the next settings of the search, or of the pairs that measure a saving."""
        controller = self._controller
        settings = controller.settings(self._state, PROGRAM_KERNEL)
        if self._objective.cap_w is not None:
            return settings  # pairs would run the earlier settings, which may break the cap
        if controller.is_settled(self._state, PROGRAM_KERNEL):
            self._judged = settings
        elif self._judged == self._plant.default:
            self._judged = None  # nothing is measured there, and the search goes on
        elif self._judged is None and self._searched >= LIVE.search_periods:
            # A long search is interrupted to see what it brought.
            self._judged = controller.best_so_far(self._state, PROGRAM_KERNEL)
        elif self._judged is not None and self._pairs.is_enough(self._judged):
            self._judged = None
            self._searched = 0
        if self._judged is None:
            return settings
        return self._pairs.choose(self._judged, self._plant.default)

    def _check_slack(self) -> None:
        """Give all cards of a job its clock where slower ones for some do not pay.

        In a pipeline, slower stages make its start and end longer. Where few micro-batches go
        through, that is worth more than what they save."""
        judged = self._judged
        if judged is None or all(self._plant.free_knobs) or not self._pairs.is_enough(judged):
            return
        savings = self._pairs.measure()
        if savings is None:
            return
        objective = self._objective
        delays = objective.goal.delay_power * math.log1p(savings.time.change)
        is_worse = math.log1p(savings.energy.change) + delays > 0.0
        is_late = objective.slowdown is not None and savings.time.change > objective.slowdown
        if is_worse or is_late:
            self._plant.stop_slowing()

    def _take_advice(self) -> None:
        """Give the controller a first guess."""
        if self._advise is None:
            return
        reading = self._plant.reading
        power_w = reading.power_w / self._plant.card.count
        guess = self._advise(replace(reading, power_w=power_w), self._lattice)
        if guess is not None:
            free = self._plant.free_knobs
            levels = zip(guess, self._plant.start, free, strict=True)
            guess = tuple(level if is_free else start for level, start, is_free in levels)
            self._controller = replace(self._controller, hint={PROGRAM_KERNEL: guess})

    def _learn(self, observation: Observation) -> None:
        """Show a period to the controller, and add it to the totals of its settings."""
        self._searched += self._judged is None
        self._pairs.record(observation)
        self._check_slack()
        self._state, _ = self._controller.step(self._state, observation)
        if observation.usable and observation.core_hz > 0:  # False for NaN
            seconds = observation.duration_s
            joules = observation.power_w * seconds
            cycles = observation.core_hz * seconds
            period = np.array([seconds, observation.work, joules, cycles])
            totals = self._plant.totals
            totals[observation.settings] = totals.get(observation.settings, 0.0) + period

    def measure_savings(self) -> MeasuredSavings | None:
        """Return what the settings at the end save; None where the card stays as it was."""
        if not self._plant.controlled or self._judged == self._plant.default:
            return None
        return self._pairs.measure()


def control_serving(
    plant: LivePlant,
    keeper: LatencyKeeper | QueueKeeper,
    read_engine: Callable[[], EngineReading],
) -> None:
    """Control a card that serves requests until its program ends; while its engine is silent, it
    runs as before.
    """
    level = keeper.level
    silent = 0  # readings in a row
    top = len(keeper.levels_hz) - 1
    while plant.alive() and plant.controlled:
        plant.pause_heard(keeper.interval_s)
        with plant.ending_control():
            try:
                engine = read_engine()
                card = plant.card.read()
                next_level = keeper.decide(card.at_s, engine, card.energy_j)
                silent = 0
            except MissingTool as error:
                silent += 1
                if silent == SILENT_READINGS:
                    plant.say(f"{error} The card runs as before until the engine answers.")
                next_level = keeper.level if silent < SILENT_READINGS else top
            if next_level != level:
                clock_hz = None if next_level == top else keeper.levels_hz[next_level]
                plant.card.apply(clock_hz, None, None)
                clock = "as before" if clock_hz is None else f"{clock_hz / 1e6:.0f} MHz"
                plant.say(f"core {clock}: {'blind' if silent else keeper.why}")
                level = next_level


@dataclass(frozen=True)
class ControlTask:
    """Hold what a controller has to do: an objective for reported work, or limits for a program
    that serves.
    """

    objective: Objective
    period_s: float = 1.0
    progress: Path | None = None
    units: SmCountFile | None = None
    busy: Path | None = None  # folder in which ranks report how long they were busy
    power_limit: bool = False
    advise: Advice | None = None
    # For serving, of the card's clocks.
    make_keeper: Callable[[Sequence[float]], LatencyKeeper | QueueKeeper] | None = None
    read_engine: Callable[[], EngineReading] | None = None  # with ``make_keeper``
    model: SensitivityModel | None = None  # of sensitivities, from the card's counters
    rows: Path | None = None  # file for what a unit of work took at each clock
    # With ``rows``: the columns that name what a unit of work is.
    workload: Mapping[str, Any] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables that tell a program where its files are."""
        variables = {}
        if self.progress is not None:
            variables[PROGRESS_VARIABLE] = str(self.progress)
        if self.units is not None:
            variables[SM_COUNT_VARIABLE] = str(self.units.path)
        if self.busy is not None:
            variables[BUSY_VARIABLE] = str(self.busy.absolute())
        return variables


def run_controlled_program(
    card: DaemonCard | JobCards,
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
    sm_counts = units.levels if units is not None else ()
    limits_w = card.limits_w() if task.power_limit else None
    busy = None if task.busy is None else BusyFolder(task.busy, card.count)
    shares = () if busy is None else SLACK_LEVELS
    lattice = plants.build_card_lattice(*card.clocks_hz(), sm_counts, limits_w, shares)
    with ExitStack() as stack:
        signals = stack.enter_context(PassedSignals())
        if units is not None:
            units.reset()
            stack.callback(units.reset)
        process: subprocess.Popen[bytes] | None = None
        if command:
            process = start_program(signals, command, {**environment, **task.variables})

        def is_alive() -> bool:
            has_ended = process is not None and process.poll() is not None
            return not has_ended and not signals.came

        progress = ProgressFile(task.progress) if task.progress else None
        plant = LivePlant(
            card,
            lattice,
            task.period_s,
            is_alive,
            time.sleep,
            progress,
            say,
            units,
            busy,
        )
        savings = None
        if task.make_keeper is not None and task.read_engine is not None:
            control_serving(plant, task.make_keeper(lattice.knobs[0].levels), task.read_engine)
        else:
            savings = control_plant(
                plant,
                task.objective,
                task.advise,
                model=task.model,
            )
        try:
            card.give_back()
        finally:
            code = 0 if process is None else await_end(process, signals.came)
    saving = "" if task.make_keeper is not None else "No saving is claimed."
    if savings is not None:
        saving = savings.describe(plant.lattice.describe(savings.settings))
    say(f"{_describe_return(card.count)} {saving}".rstrip())
    if task.rows is not None:
        count = write_calibration_rows(plant, task.workload or {}, task.rows)
        say(f"{task.rows}: {count} rows for `wattcast calibrate`.")
    return code


def _describe_return(cards: int) -> str:
    if cards == 1:
        return "the card has back what it had."
    return f"all {cards} cards have back what they had."


def write_calibration_rows(
    plant: LivePlant,
    workload: Mapping[str, Any],
    path: Path,
) -> int:
    """Save the mean time and power of a unit of work at each clock, as CSV for ``calibrate``;
    return how many rows.

    A unit of work has to be one run of the workload. Settings with fewer SMs or another memory
    clock are left out."""
    names = [str(value) for value in workload.values()]
    lines = [[*workload, "latency_s", "power_w", "clock_mhz"]]
    for settings, (seconds, work, joules, cycles) in plant.totals.items():
        if _moves_clock_alone(plant, settings):
            figures = (seconds / work, joules / seconds, 1e-6 * cycles / seconds)
            lines.append([*names, *(f"{figure:.6g}" for figure in figures)])
    write_whole(path, encode_csv(lines))
    return len(lines) - 1


def _moves_clock_alone(plant: LivePlant, settings: Settings) -> bool:
    """Tell whether settings differ from the default in the core clock and the power limit alone."""
    for knob, level, top in zip(plant.lattice.knobs, settings, plant.default, strict=True):
        moves_clock = knob.role in (KnobRole.CORE_CLOCK, KnobRole.POWER_LIMIT)
        if level != top and not moves_clock:
            return False
    return True


def report_work(amount: float = 1.0, busy_s: float | None = None) -> None:
    """Report work from inside a controlled program, a unit per call or as much as is said. Does
    nothing elsewhere.

    Call it once per training step: ``wattcast.control.live_control.report_work()``. ``busy_s`` is
    how long this rank was busy in the step, waiting for other ranks left out.
    """
    path = os.environ.get(PROGRESS_VARIABLE)
    if path:
        with open(path, "ab", buffering=0) as stream:
            stream.write(f"+{amount:.9g}\n".encode())
    folder = os.environ.get(BUSY_VARIABLE)
    if folder and busy_s is not None:
        rank = find_local_rank(os.environ)
        with open(Path(folder) / f"rank-{rank}", "ab", buffering=0) as stream:
            stream.write(f"{busy_s:.9g}\n".encode())
