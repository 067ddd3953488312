"""Define the policies that choose settings: the Harmonia controller of paper 004 and what it is
compared with.

``Harmonia`` is a pure state machine over observations. Policies that know the tables beforehand
(oracle, static best, vendor default, race to idle, a forecast) are array expressions; the
controller and its reduced forms are played run by run. To add a policy, name it in ``PolicyName``
and handle it in ``run_policy``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import (
    dataclass,
    field,
    replace,
)
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.control import plants
from wattcast.control.controller_coefficients import CONTROLLER
from wattcast.control.plants import (
    KnobRole,
    Lattice,
    MeasurementNoise,
    Observation,
    PlantTables,
    PlayedRun,
    Settings,
)
from wattcast.control.run_memory import RunMemory, SensitivityBeliefs
from wattcast.control.search_problem import (
    BOUND_PENALTY,
    ControllerTuning,
    Objective,
    SearchProblem,
    SearchView,
)
from wattcast.control.sensitivity_model import (
    SensitivityBin,
    SensitivityModel,
    bin_sensitivity,
)
from wattcast.control.setting_search import (
    STEP,
    SearchMove,
    choose_next_move,
    choose_sensing_step,
)
from wattcast.core.arrays import Array

NO_RUNS = RunMemory()
# An application that runs no phase as often as this ends while the controller still searches. What
# it converges to is then read off repeats of the application.
FEWEST_RUNS = 20
Bins = tuple[SensitivityBin, SensitivityBin]  # compute, bandwidth
Indices = npt.NDArray[np.int64]


class PhaseMemory(NamedTuple):
    """Hold what the controller knows of one kernel in its present phase."""

    next_settings: Settings
    why: str = "start"
    runs: RunMemory = NO_RUNS
    beliefs: SensitivityBeliefs | None = None  # from counters
    bins: Bins | None = None
    target: Settings | None = None  # of the coarse step
    last: Settings | None = None  # settings of the run before
    settled: bool = False
    rest: int = 0  # runs to stay before the memory is looked at again
    odd: int = 0  # surprises in a row
    bad: int = 0  # unusable observations in a row


class ControllerState(NamedTuple):
    """Hold the present phase of each kernel, and earlier phases that may come back."""

    kernels: Mapping[str, PhaseMemory]
    shelf: Mapping[tuple[str, Bins], PhaseMemory]  # by kernel and bins


@dataclass(frozen=True)
class Harmonia:
    """Control a card: a coarse step by sensitivity bins, then fine steps by feedback (paper 004,
    Algorithm 1).

    ``fine=False`` is the coarse step alone.
    """

    lattice: Lattice
    default: Settings
    objective: Objective = field(default_factory=Objective)
    model: SensitivityModel | None = None  # None: sensitivities are measured, not predicted
    tuning: ControllerTuning = field(default_factory=ControllerTuning)
    free: tuple[bool, ...] | None = None  # knobs it may turn; None: all
    fine: bool = True
    first: Settings | None = None  # of a kernel's first run; None: the default
    # First guess of a kernel, instead of a coarse step.
    hint: Mapping[str, Settings] = field(default_factory=dict)
    limit_w: float | None = None  # what the board draws at most; None: not known

    @cached_property
    def problem(self) -> SearchProblem:
        """Return the fixed part of the search."""
        free = self.free or (True,) * len(self.lattice.knobs)
        start = self.first or self.default
        return SearchProblem(
            self.lattice,
            self.default,
            start,
            self.objective,
            self.tuning,
            free,
            self.limit_w,
        )

    def start(self) -> ControllerState:
        """Return the first state. Tables are worked out here and not in the first decision."""
        _ = self._coarse_targets
        return ControllerState({}, {})

    def settings(
        self,
        state: ControllerState,
        kernel: str,
    ) -> Settings:
        """Return the settings for the next run of a kernel."""
        memory = state.kernels.get(kernel)
        return self.problem.start if memory is None else memory.next_settings

    def is_settled(
        self,
        state: ControllerState,
        kernel: str,
    ) -> bool:
        """Tell whether nothing is left to try for a kernel."""
        memory = state.kernels.get(kernel)
        return memory is not None and memory.settled

    def best_so_far(
        self,
        state: ControllerState,
        kernel: str,
    ) -> Settings | None:
        """Return the settings with the best score of those tried; None before any was."""
        memory = state.kernels.get(kernel)
        if memory is None or not memory.runs.seen:
            return None
        return SearchView(self.problem, memory.runs, memory.beliefs).best

    def step(
        self,
        state: ControllerState,
        observation: Observation,
    ) -> tuple[ControllerState, Settings]:
        """Return the next state and the settings for this kernel's next run."""
        kernel = observation.kernel
        memory = state.kernels.get(kernel)
        if memory is None:
            memory = PhaseMemory(self.problem.start, target=self.hint.get(kernel))
        settings = observation.settings
        is_on_lattice = settings == memory.next_settings or self.lattice.contains(settings)
        if observation.usable and is_on_lattice:
            state, memory = self._detect_phase(state, memory, observation)
            memory = self._learn_run(memory, observation)
        else:
            memory = self._skip_run(memory)
        kernels = {**state.kernels, kernel: memory}
        return ControllerState(kernels, state.shelf), memory.next_settings

    def _skip_run(self, memory: PhaseMemory) -> PhaseMemory:
        """Stay after an unusable observation; after several in a row fall back to the start
        settings, which need no reading to be safe.
        """
        bad = memory.bad + 1
        if bad < self.tuning.patience:
            return memory._replace(bad=bad)
        start = self.problem.start
        return memory._replace(
            bad=bad,
            next_settings=start,
            why="blind",
            settled=False,
            rest=0,
        )

    def _learn_run(
        self,
        memory: PhaseMemory,
        observation: Observation,
    ) -> PhaseMemory:
        """Record a run and choose the settings of the next one."""
        effective = self._find_effective(memory.runs, observation)
        runs = memory.runs.record(observation, effective)
        if memory.settled and memory.rest > 0:
            move = SearchMove(memory.next_settings, True, memory.why)
            rest_runs = memory.rest - 1
        else:
            move = self._choose_move(memory, runs)
            rest_runs = self.tuning.rest
        # After a fine step, the coarse one is not looked at again.
        target = None if move.why == STEP else memory.target
        return PhaseMemory(
            move.settings,
            move.why,
            runs,
            memory.beliefs,
            memory.bins,
            target,
            last=observation.settings,
            settled=move.settled,
            rest=rest_runs,
            odd=memory.odd,
            bad=0,
        )

    def _find_effective(
        self,
        runs: RunMemory,
        observation: Observation,
    ) -> Settings:
        """Return the settings the card really ran at: the lowest core clock that would have been
        the same state.

        A governor (power, heat) that holds the clock between two levels would hold it there for the
        upper one, too. A clock that wavers by one level between runs counts as the same."""
        settings = observation.settings
        core = self.problem.core
        clock_hz = observation.core_hz
        if core is None:
            return settings
        levels_hz = self.lattice.knobs[core].levels
        is_lower = clock_hz < levels_hz[settings[core]] * (
            1.0 - CONTROLLER.clock_tolerance
        )  # not where NaN
        if not is_lower:
            return settings
        level = bisect_left(levels_hz, clock_hz * (1.0 - CONTROLLER.clock_tolerance))
        before = runs.held.get(settings)
        if before is not None and abs(before[core] - level) <= 1:
            return before
        return plants.move_knob(settings, core, level)

    def _detect_phase(
        self,
        state: ControllerState,
        memory: PhaseMemory,
        observation: Observation,
    ) -> tuple[ControllerState, PhaseMemory]:
        """Switch to another phase when bins changed though no knob did (with counters), or time did
        (without).
        """
        counters = observation.usable_counters
        if self.model is None or counters is None:
            return state, self._detect_surprise(memory, observation)
        if memory.bins is not None and memory.last != observation.settings:
            return state, memory  # sensitivities that moved with a knob say nothing of the program
        compute, bandwidth = self.model.predict(counters)
        bins = (bin_sensitivity(compute), bin_sensitivity(bandwidth))
        if bins == memory.bins:
            return state, memory

        beliefs = SensitivityBeliefs(compute, bandwidth, self.tuning.margin)
        target = self._coarse_targets[bins]
        if memory.bins is None:
            return state, memory._replace(
                beliefs=beliefs,
                bins=bins,
                target=target,
            )
        if memory.runs.confirms(observation, self.tuning.resolution):
            # The same program, which looks different from other settings.
            return state, memory._replace(beliefs=beliefs)

        # Another phase: the present one may come back, and the new one may have been there before.
        kernel = observation.kernel
        shelf = {**state.shelf, (kernel, memory.bins): memory}
        earlier = shelf.get((kernel, bins))
        if earlier is None:
            earlier = PhaseMemory(
                memory.next_settings,
                beliefs=beliefs,
                bins=bins,
                target=target,
            )
        return ControllerState(state.kernels, shelf), earlier._replace(last=memory.last)

    def _detect_surprise(
        self,
        memory: PhaseMemory,
        observation: Observation,
    ) -> PhaseMemory:
        """Return an empty memory after several runs in a row that took another time than before."""
        tuning = self.tuning
        if memory.runs.surprise(observation, tuning.prior_sigma) <= tuning.surprise:
            return memory if memory.odd == 0 else memory._replace(odd=0)
        if memory.odd + 1 < tuning.patience:
            return memory._replace(odd=memory.odd + 1)
        return PhaseMemory(self.problem.start, last=memory.last)

    @cached_property
    def _coarse_targets(self) -> dict[Bins, Settings | None]:
        """Return where the coarse step leads, for all nine pairs of bins; None where it changes
        nothing.

        No knob goes above its default, and none that may not be turned moves.
        """
        targets: dict[Bins, Settings | None] = {}
        for compute in SensitivityBin:
            for bandwidth in SensitivityBin:
                levels = self.tuning.coarse_target(self.lattice, compute, bandwidth)
                target = self._limit_target(levels)
                targets[compute, bandwidth] = None if target == self.default else target
        return targets

    def _limit_target(self, levels: Settings) -> Settings:
        limited = list(self.default)
        for knob, is_free in enumerate(self.problem.free):
            if is_free:
                limited[knob] = min(levels[knob], self.default[knob])
        return tuple(limited)

    def _choose_move(
        self,
        memory: PhaseMemory,
        runs: RunMemory,
    ) -> SearchMove:
        if self.fine:
            return choose_next_move(self.problem, runs, memory.beliefs, memory.target)
        if memory.beliefs is not None:
            return SearchMove(memory.target or self.default, True, "coarse")
        view = SearchView(self.problem, runs, None)
        probe = choose_sensing_step(view)
        if probe is not None and probe not in runs.seen:
            return SearchMove(probe, False, "sense")
        return SearchMove(self._coarse_targets[view.bins()] or self.default, True, "coarse")


class PrintedMemory(NamedTuple):
    """Hold what Algorithm 1 keeps of a kernel between two of its runs."""

    next_settings: Settings
    bins: Bins | None = None
    busy: float = 0.0  # VALUBusy of the run before
    last: Settings | None = None  # settings of the run before
    flat: Settings | None = None  # last settings with a gradient of zero or more
    dithering: int = 0
    settled: bool = False


@dataclass(frozen=True)
class PrintedHarmonia:
    """Control a card by Algorithm 1 of paper 004 as it is printed: fine steps follow the gradient
    of VALUBusy.

    A changed bin reverts the last decision where a tunable had changed, else sets all tunables by
    bin. Unchanged bins lower all tunables by a step while VALUBusy does not fall, and raise them by
    a step when it does. After ``most_dithering`` raises, which the paper does not print, the last
    state without a fall is kept. VALUBusy is a share of time: it does not fall when a lower clock
    makes a compute-bound kernel slower, so that the steps go on."""

    lattice: Lattice
    default: Settings
    model: SensitivityModel
    tuning: ControllerTuning = field(default_factory=ControllerTuning)
    most_dithering: int = 3

    def start(self) -> ControllerState:
        return ControllerState({}, {})

    def settings(
        self,
        state: ControllerState,
        kernel: str,
    ) -> Settings:
        memory = state.kernels.get(kernel)
        return self.default if memory is None else memory.next_settings

    def step(
        self,
        state: ControllerState,
        observation: Observation,
    ) -> tuple[ControllerState, Settings]:
        kernel = observation.kernel
        counters = observation.usable_counters
        memory: Any = state.kernels.get(kernel) or PrintedMemory(self.default)
        if counters is None:
            return state, memory.next_settings
        compute, bandwidth = self.model.predict(counters)
        bins = (bin_sensitivity(compute), bin_sensitivity(bandwidth))
        busy = counters["VALUBusy"]
        after = self._choose_next(memory, observation.settings, bins, busy)
        kernels: Any = {**state.kernels, kernel: after}
        return ControllerState(kernels, state.shelf), after.next_settings

    def _choose_next(
        self,
        memory: PrintedMemory,
        here: Settings,
        bins: Bins,
        busy: float,
    ) -> PrintedMemory:
        """Return what to remember of a run, and the settings of the next one."""
        flat = memory.flat
        dithering = memory.dithering
        settled = False
        if bins != memory.bins:
            if memory.last is not None and memory.last != here:
                to = memory.last  # sensitivities artificially changed due to configuration change
            else:
                to = self.tuning.coarse_target(self.lattice, *bins)
                flat = None
                dithering = 0
        elif dithering > self.most_dithering:
            to = flat or here
            settled = True
        elif busy >= memory.busy:
            flat = here
            to = tuple(max(level - 1, 0) for level in here)
        else:
            tops = zip(here, self.lattice.top, strict=True)
            to = tuple(min(level + 1, top) for level, top in tops)
            dithering += 1
        return PrintedMemory(
            to,
            bins,
            busy,
            here,
            flat,
            dithering,
            settled,
        )


class PolicyName(StrEnum):
    """Name the policies, in the order they are shown."""

    DEFAULT = "default"
    RACE_TO_IDLE = "race_to_idle"
    CORE_CLOCK = "core_clock_only"
    COARSE = "coarse_only"
    PRINTED = "algorithm_1"
    STATIC = "static_best"
    PREDICTIVE = "model_predictive"
    GUIDED = "predictive_then_fine"
    HARMONIA = "harmonia"
    ORACLE = "oracle"


@dataclass(frozen=True)
class PolicySetup:
    """Hold what the policies of one comparison share."""

    objective: Objective = field(default_factory=Objective)
    model: SensitivityModel | None = None
    tuning: ControllerTuning = field(default_factory=ControllerTuning)
    # Settings of an application that were chosen beforehand.
    forecast: Mapping[str, Settings] = field(default_factory=dict)
    noise: MeasurementNoise | None = None
    seed: int = 0


@dataclass(frozen=True)
class PolicyRun:
    """Hold all runs of one application under one policy, and the settings the policy keeps at the
    end.
    """

    policy: PolicyName
    played: PlayedRun
    converged: Indices  # (phase,) settings at the end, for every phase of the tables
    idle_j: float = 0.0  # spent waiting, where the policy does


def score_tables(tables: PlantTables, objective: Objective) -> Array:
    """Return the log score of every phase at every setting, per unit of work; ``(phase,
    setting)``.
    """
    work = tables.work[:, np.newaxis] if tables.work is not None else 1.0
    time_s = tables.time_s / work
    reference = time_s[:, [tables.lattice.flat_index(tables.default)]]
    return objective.log_scores(time_s, tables.power_w, reference)


def find_static_best(
    tables: PlantTables,
    application: str,
    objective: Objective,
) -> int:
    """Find the one setting that serves the whole application best; a slowdown bounds its total
    time.
    """
    counts = _count_runs(tables, application)
    time_s = counts @ tables.time_s
    energy_j = counts @ tables.energy_j

    # The penalty of a bound that some run breaks: latency and cap hold for every run.
    bounds_of_runs = replace(objective, slowdown=None)
    bounded = score_tables(tables, bounds_of_runs)
    unbounded = score_tables(tables, Objective(objective.goal))
    penalty = (bounded - unbounded)[counts > 0].max(axis=0)
    if objective.slowdown is not None:
        default_s = time_s[tables.lattice.flat_index(tables.default)]
        limit_s = default_s * (1 + objective.slowdown)
        penalty = penalty + np.where(time_s > limit_s * (1 + 1e-9), BOUND_PENALTY, 0.0)
    score = np.log(objective.total(time_s, energy_j)) + penalty
    return int(score.argmin())


def _count_runs(tables: PlantTables, application: str) -> Array:
    """Return how often each phase of the tables runs in an application."""
    counts = np.bincount(tables.order(application), minlength=len(tables.kernels))
    return counts.astype(np.float64)


def make_controller(
    tables: PlantTables,
    policy: PolicyName,
    setup: PolicySetup,
) -> Harmonia | PrintedHarmonia | None:
    """Make the controller or one of its other forms; None where the card lacks the knob or the
    counter it needs.
    """
    if policy is PolicyName.PRINTED:
        if setup.model is None or "VALUBusy" not in tables.counters:
            return None
        return PrintedHarmonia(tables.lattice, tables.default, setup.model)
    free = None
    if policy is PolicyName.CORE_CLOCK:
        free = tuple(knob.role is KnobRole.CORE_CLOCK for knob in tables.lattice.knobs)
        if not any(free):
            return None
    return Harmonia(
        tables.lattice,
        tables.default,
        setup.objective,
        model=setup.model if tables.counters else None,
        tuning=setup.tuning,
        free=free,
        fine=policy is not PolicyName.COARSE,
        limit_w=tables.limit_w,
    )


def run_policy(
    tables: PlantTables,
    application: str,
    policy: PolicyName,
    setup: PolicySetup,
) -> PolicyRun | None:
    """Run one application under one policy; None where the plant does not give what the policy
    needs.
    """
    objective = setup.objective
    lattice = tables.lattice
    needs_forecast = policy in (PolicyName.PREDICTIVE, PolicyName.GUIDED)
    if needs_forecast and application not in setup.forecast:
        return None
    match policy:
        case PolicyName.DEFAULT:
            chosen = _choose_everywhere(tables, lattice.flat_index(tables.default))
        case PolicyName.ORACLE:  # the best of each phase, from the whole table
            chosen = score_tables(tables, objective).argmin(axis=-1)
        case PolicyName.STATIC:
            chosen = _choose_everywhere(tables, find_static_best(tables, application, objective))
        case PolicyName.PREDICTIVE:
            forecast = lattice.flat_index(setup.forecast[application])
            chosen = _choose_everywhere(tables, forecast)
        case PolicyName.RACE_TO_IDLE:
            return _race_to_idle(tables, application, objective)
        case _:
            return _run_controller(tables, application, policy, setup)
    order = tables.order(application)
    return PolicyRun(policy, plants.run_at_settings(tables, application, chosen[order]), chosen)


def _choose_everywhere(tables: PlantTables, index: int) -> Indices:
    """Return one setting for every phase."""
    return np.full(len(tables.kernels), index, dtype=np.int64)


def _race_to_idle(
    tables: PlantTables,
    application: str,
    objective: Objective,
) -> PolicyRun | None:
    """Run at the highest settings, then idle until the deadline; None where idle power is
    unknown.
    """
    order = tables.order(application)
    default_s = float(tables.time_s[order, tables.lattice.flat_index(tables.default)].sum())
    deadline_s = 0.0
    if objective.latency_s is not None:
        deadline_s = objective.latency_s * len(order)
    elif objective.slowdown is not None:
        deadline_s = default_s * (1.0 + objective.slowdown)
    chosen = _choose_everywhere(tables, tables.lattice.flat_index(tables.lattice.top))
    played = plants.run_at_settings(tables, application, chosen[order])
    idle_s = max(deadline_s - played.total_s, 0.0)
    if idle_s > 0 and tables.idle_w is None:
        return None
    return PolicyRun(PolicyName.RACE_TO_IDLE, played, chosen, idle_s * (tables.idle_w or 0.0))


def _run_controller(
    tables: PlantTables,
    application: str,
    policy: PolicyName,
    setup: PolicySetup,
) -> PolicyRun | None:
    """Play an application under the controller, or under one of its other forms."""
    controller: Any = make_controller(tables, policy, setup)
    if controller is None:
        return None
    if policy is PolicyName.GUIDED:
        kernels = [tables.kernels[phase] for phase in tables.order(application)]
        hint = dict.fromkeys(kernels, setup.forecast[application])
        controller = replace(controller, hint=hint)
    played, state = plants.play_application(
        tables,
        application,
        controller,
        setup.noise,
        setup.seed,
    )

    # The settings kept at the end: those that a kernel with one phase settled on, else those of the
    # last run (later runs overwrite earlier ones).
    chosen = _choose_everywhere(tables, tables.lattice.flat_index(tables.default))
    chosen[played.phase] = played.chosen
    if np.bincount(played.phase).max() < FEWEST_RUNS:
        state, later = _play_on(
            tables,
            application,
            controller,
            state,
            setup,
        )
        chosen[later.phase] = later.chosen
    for phase in np.unique(played.phase):
        kernel = tables.kernels[phase]
        memory = state.kernels.get(kernel)
        has_settled = memory is not None and memory.settled
        if has_settled and tables.kernels.count(kernel) == 1:
            chosen[phase] = tables.lattice.flat_index(memory.next_settings)
    return PolicyRun(policy, played, chosen)


def _play_on(
    tables: PlantTables,
    application: str,
    controller: Any,
    state: Any,
    setup: PolicySetup,
) -> tuple[Any, PlayedRun]:
    """Repeat a short application until its search has had time to end; return the last state and
    the last repeat.
    """
    played: PlayedRun | None = None
    for repeat in range(FEWEST_RUNS):
        seed = setup.seed + repeat + 1
        plant = plants.TablePlant(tables, application, setup.noise, seed)
        while (kernel := plant.next_kernel()) is not None:
            observation = plant.run(controller.settings(state, kernel))
            state, _ = controller.step(state, observation)
        order = np.asarray(plant.settings, dtype=np.int64)
        played = plants.run_at_settings(tables, application, order)
    assert played is not None
    return state, played
