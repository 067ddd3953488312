"""State the controller's search: its constants, its fixed tables, and how the search stands at a
decision.

``ControllerTuning`` holds the constants, ``SearchProblem`` what stays fixed while a controller
runs, and ``SearchView`` what one decision reads out of the memory of a kernel's runs."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np

from wattcast.control.capped_search import CappedSearch
from wattcast.control.controller_coefficients import CONTROLLER
from wattcast.control.plants import (
    Knob,
    KnobRole,
    Lattice,
    Settings,
    move_knob,
    read_knob_facts,
)
from wattcast.control.run_memory import RunMemory, SensitivityBeliefs
from wattcast.control.sensitivity_model import SensitivityBin, bin_sensitivity
from wattcast.core import bad_value
from wattcast.core.arrays import Array

# Added to a score per broken bound, plus as much times the excess: more than any gain of a goal is
# worth, while the score still falls towards settings that keep the bound.
BOUND_PENALTY = 10.0
BOUND_SLACK = 1e-9


class Goal(StrEnum):
    """Name the product to minimise."""

    ED2 = "ed2"
    ED = "ed"
    ENERGY = "energy"

    @property
    def delay_power(self) -> int:
        """Return the exponent k in E · D^k."""
        return {
            Goal.ED2: 2,
            Goal.ED: 1,
            Goal.ENERGY: 0,
        }[self]

    @property
    def label(self) -> str:
        """Return the name that tables and figures show."""
        return {
            Goal.ED2: "ED²",
            Goal.ED: "ED",
            Goal.ENERGY: "Energy",
        }[self]


@dataclass(frozen=True)
class Objective:
    """Combine a goal with its bounds.

    ``slowdown`` bounds time relative to the default settings (0.1: ten percent longer),
    ``latency_s`` bounds the time of one run, ``cap_w`` bounds mean board power, which compute and
    memory share."""

    goal: Goal = Goal.ED2
    slowdown: float | None = None
    latency_s: float | None = None
    cap_w: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency_s), ("power cap", self.cap_w)):
            if value is not None and not 0 < value < math.inf:
                raise bad_value(name, "a finite number above zero", value)
        if self.slowdown is not None and not 0 <= self.slowdown < math.inf:
            raise bad_value("slowdown", "zero or more", self.slowdown)

    @cached_property
    def time_weight(self) -> float:
        """Return the exponent of time, k + 1, once energy is written as power times time."""
        return self.goal.delay_power + 1.0

    @cached_property
    def log_cap(self) -> float:
        """Return the logarithm of the power cap; infinite where there is none."""
        return math.inf if self.cap_w is None else math.log(self.cap_w)

    def log_scores(
        self,
        time_s: Array,
        power_w: Array,
        reference_s: Array,
    ) -> Array:
        """Return the logarithm of the goal, plus a penalty for each broken bound.

        ``reference_s`` is the time at the default settings and broadcasts against ``time_s``.
        """
        log_time = np.log(time_s)
        log_power = np.log(power_w)
        value = log_power + self.time_weight * log_time
        bounds = []
        if self.slowdown is not None:
            bounds.append(log_time - np.log(reference_s) - np.log1p(self.slowdown))
        if self.latency_s is not None:
            bounds.append(log_time - np.log(self.latency_s))
        if self.cap_w is not None:
            bounds.append(log_power - np.log(self.cap_w))
        for over in bounds:
            value = value + np.where(over > BOUND_SLACK, BOUND_PENALTY + BOUND_PENALTY * over, 0.0)
        return np.asarray(value)

    def total(
        self,
        time_s: Array,
        energy_j: Array,
    ) -> Array:
        """Return E · D^k of whole runs."""
        return np.asarray(energy_j * time_s**self.goal.delay_power)


# Coarse step: level of each knob by bin (low, medium, high), as a share of its highest level. The
# paper calls its own values "empirically fixed" and does not print them.
_BY_BIN = [read_knob_facts(f"coarse_{level}") for level in ("low", "medium", "high")]
COARSE_SHARES = {role: (_BY_BIN[0][role], _BY_BIN[1][role], _BY_BIN[2][role]) for role in KnobRole}
# Largest log change of board power per log change of a knob to expect: V² f on the switched share
# of board power.
POWER_ELASTICITY = read_knob_facts("elasticity")
IDLE_KNOB = CONTROLLER.idle_knob
StepLevels = tuple[tuple[int, ...], ...]  # [knob][level] -> levels of a step from there


@dataclass(frozen=True)
class ControllerTuning:
    """Hold the constants of the controller, which ``ControllerCoefficients`` explains.

    docs/method/manage.md says what they were tuned on.
    """

    probe_change: float = CONTROLLER.probe_change
    sense_change: float = CONTROLLER.sense_change
    resolution: float = CONTROLLER.resolution
    worth: float = CONTROLLER.worth
    polish: float = CONTROLLER.polish
    margin: float = CONTROLLER.margin
    measured_margin: float = CONTROLLER.measured_margin
    prior_sigma: float = CONTROLLER.prior_sigma
    confident: float = CONTROLLER.confident
    quick_runs: int = CONTROLLER.quick_runs
    rival_runs: int = CONTROLLER.rival_runs
    default_runs: int = CONTROLLER.default_runs
    verified: float = CONTROLLER.verified
    risky_ratio: float = CONTROLLER.risky_ratio
    prior_time: float = CONTROLLER.prior_time
    bound_sigmas: float = CONTROLLER.bound_sigmas
    bound_doubt: float = CONTROLLER.bound_doubt
    bound_runs: int = CONTROLLER.bound_runs
    budget: float = CONTROLLER.budget
    surprise: float = CONTROLLER.surprise
    patience: int = CONTROLLER.patience
    rest: int = CONTROLLER.rest
    coarse: Mapping[KnobRole, tuple[float, float, float]] = field(
        default_factory=lambda: COARSE_SHARES
    )

    def coarse_target(
        self,
        lattice: Lattice,
        compute: SensitivityBin,
        bandwidth: SensitivityBin,
    ) -> Settings:
        """Return the settings of the coarse step: all knobs at once, by bin (Algorithm 1,
        SetCU_Freq_MemBW).
        """
        has_units = lattice.find_knob(KnobRole.COMPUTE_UNITS) is not None
        levels = []
        for knob in lattice.knobs:
            shares: tuple[float, ...] = self.coarse[knob.role]
            if knob.role is KnobRole.CORE_CLOCK and not has_units:
                shares = CONTROLLER.coarse_clock_alone
            share = shares[compute if knob.role.is_compute else bandwidth]
            least = share * knob.levels[-1] * (1 - 1e-9)
            levels.append(bisect_left(knob.levels, least))
        return tuple(levels)


def _step_levels(
    knob: Knob,
    level: int,
    down: bool,
    change: float,
) -> int:
    """Return the fewest levels that change a knob by at least ``change`` of its present value."""
    here = knob.levels[level]
    step = -1 if down else 1
    to = level + step
    while 0 < to < len(knob.levels) - 1 and abs(knob.levels[to] / here - 1.0) < change:
        to += step
    return abs(to - level)


class SearchProblem:
    """Hold what stays fixed while a controller runs, with tables that decisions look things up
    in.
    """

    def __init__(
        self,
        lattice: Lattice,
        default: Settings,
        start: Settings,
        objective: Objective,
        tuning: ControllerTuning,
        free: tuple[bool, ...],
        limit_w: float | None = None,
    ) -> None:
        """Work the tables out; ``start`` is a kernel's first setting, ``free`` says which knobs may
        turn, ``limit_w`` what the board draws at most.
        """
        self.lattice = lattice
        self.default = default
        self.start = start
        self.objective = objective
        self.tuning = tuning
        self.free = free
        self.time_weight = objective.time_weight
        # Knobs that the search may turn.
        self.turns = tuple(knob for knob, may_turn in enumerate(free) if may_turn)
        self.roles = tuple(knob.role for knob in lattice.knobs)
        self.elastic = tuple(POWER_ELASTICITY[role] for role in self.roles)
        self.has_units = KnobRole.COMPUTE_UNITS in self.roles
        self.core = lattice.find_knob(KnobRole.CORE_CLOCK)
        # The memory clock, where the search may turn it.
        memory = lattice.find_knob(KnobRole.MEMORY_CLOCK)
        self.memory = memory if memory is not None and free[memory] else None
        self.log_levels = lattice.log_levels
        # The lowest level of each knob that no risk is run with, from each of its levels.
        self.safe = tuple(_list_safe_levels(knob, tuning.risky_ratio) for knob in lattice.knobs)
        # A fine step changes a knob by about probe_change; the smallest one by what can be told
        # apart.
        change = CONTROLLER.least_probe * tuning.probe_change
        self.stride_down = self._list_step_levels(change, True)
        self.stride_up = self._list_step_levels(change, False)
        self.finest_down = self._list_step_levels(tuning.resolution, True)
        self.finest_up = self._list_step_levels(tuning.resolution, False)
        self.sensing_down = self._list_step_levels(tuning.sense_change, True)

        self.capped = self._plan_capped_search(limit_w)

    def _plan_capped_search(self, limit_w: float | None) -> CappedSearch | None:
        """Return the search under a cap, and begin inside the cap where the board's limit is known.

        A bound relative to the default needs its time, so that the first run is the default's.
        """
        if self.objective.cap_w is None:
            return None
        is_usable = np.ones(self.lattice.count, dtype=bool)
        for which, role in enumerate(self.roles):
            if not self.free[which]:
                value = self.lattice.knobs[which].levels[self.default[which]]
                is_usable &= self.lattice.knob_values(role) == value
        log_limit = None if limit_w is None else math.log(limit_w)
        capped = CappedSearch(self.lattice, is_usable, log_limit)
        is_unset = self.start == self.default and self.objective.slowdown is None
        if limit_w is not None and is_unset:
            self.start = capped.find_start(self.objective.log_cap, self.default)
        return capped

    def _list_step_levels(
        self,
        change: float,
        down: bool,
    ) -> StepLevels:
        """Return the levels of a step of every knob, from each of its levels."""
        steps = []
        for knob in self.lattice.knobs:
            levels = range(len(knob.levels))
            steps.append(tuple(_step_levels(knob, level, down, change) for level in levels))
        return tuple(steps)

    def sensing_step(self, start: Settings) -> tuple[Settings, float] | None:
        """Return the sensing step from a setting, one step of the core clock down, and its log
        ratio.
        """
        core = self.core
        if core is None or not self.free[core] or start[core] == 0:
            return None
        here = start[core]
        to = here - self.sensing_down[core][here]
        logs = self.log_levels[core]
        return move_knob(start, core, to), logs[here] - logs[to]


def _list_safe_levels(knob: Knob, risky_ratio: float) -> tuple[int, ...]:
    """Return, from each level of a knob, the lowest one that is not risky to go to."""
    safe = []
    lowest = 0
    for value in knob.levels:
        while value / knob.levels[lowest] > risky_ratio:
            lowest += 1
        safe.append(lowest)
    return tuple(safe)


# No error of a difference is larger than sqrt(2) standard deviations of a score.
LARGEST_ERROR = 1.5


class SearchView:
    """Read the memory of one kernel for one decision: scores, the best setting, and what is near
    it.
    """

    def __init__(
        self,
        problem: SearchProblem,
        memory: RunMemory,
        beliefs: SensitivityBeliefs | None,
    ) -> None:
        """Score all settings seen. ``beliefs`` come from counters; None takes them from the sensing
        step.
        """
        self.problem = problem
        self.memory = memory
        self.seen = memory.seen
        self.runs = memory.runs
        self.knobs = memory.knobs
        self.held = memory.held
        self.sigma = memory.score_sigma(problem.time_weight, problem.tuning.prior_sigma)
        # Settings whose time may break a bound or not, with their score.
        self.open_bounds: dict[Settings, float] = {}
        self.score = self._score_seen()
        self._ordered = sorted(self.score.values())
        # Settings that are the same state as the best.
        self.alike = self.plateau(min(self.score, key=self.score.__getitem__))
        self.best = self.alike[0]
        self.lines = problem.lattice.lines_through(self.best)
        # Clocks above a plateau's edge change nothing.
        self.tops = problem.lattice.top
        if problem.core is not None and len(self.alike) > 1:
            self.tops = move_knob(self.tops, problem.core, self.best[problem.core])
        self.believed = beliefs  # from counters
        self.beliefs = self._sense_beliefs() if beliefs is None else beliefs

    def _sense_beliefs(self) -> SensitivityBeliefs:
        """Take compute sensitivity from the sensing step, and the remainder of 1 for that to
        memory.
        """
        margin = self.problem.tuning.measured_margin
        sensing = self.problem.sensing_step(self.default)
        high = self.seen.get(self.default)
        low = None if sensing is None else self.seen.get(sensing[0])
        if sensing is None or low is None or high is None:
            return SensitivityBeliefs(None, None, margin)
        compute = min(max((low.log_time - high.log_time) / sensing[1], 0.0), 1.0)
        return SensitivityBeliefs(compute, 1.0 - compute, margin)

    def _score_seen(self) -> dict[Settings, float]:
        """Return ``Objective.log_scores`` of all settings seen, on plain numbers, which decisions
        are faster with.
        """
        weight = self.problem.time_weight
        cap = self.problem.objective.log_cap
        most = cap + BOUND_SLACK
        scores = {}
        for settings, (_, log_time, log_power) in self.seen.items():
            score = log_power + weight * log_time
            if log_power > most:
                score += BOUND_PENALTY * (1.0 + log_power - cap)
            scores[settings] = score
        limit = self.log_time_limit
        if limit is not None:
            self._penalise_late(scores, limit)
        return scores

    @cached_property
    def log_time_limit(self) -> float | None:
        """Return the log time that no setting may exceed; None where there is no such bound.

        A bound relative to the default is not known before the default settings were run.
        """
        objective = self.problem.objective
        default = self.seen.get(self.problem.default)
        limits = []
        if objective.latency_s is not None:
            limits.append(math.log(objective.latency_s))
        if objective.slowdown is not None and default is not None:
            limits.append(default.log_time + math.log1p(objective.slowdown))
        return min(limits) if limits else None

    def _penalise_late(
        self,
        scores: dict[Settings, float],
        limit: float,
    ) -> None:
        """Add a penalty to settings that do not surely keep to the time, and note which may."""
        tuning = self.problem.tuning
        default = self.problem.default
        sigma = self.memory.time_sigma(tuning.prior_time)
        repeats = 0.0
        if self.problem.objective.slowdown is not None and default in self.seen:
            repeats = 1.0 / self.seen[default].runs
        for settings, (runs, log_time, _) in self.seen.items():
            over = log_time - limit
            if settings != default:
                margin = tuning.bound_sigmas * sigma * math.sqrt(1.0 / runs + repeats)
                doubt = margin
                if runs < tuning.bound_runs and log_time > limit - tuning.bound_doubt:
                    doubt += tuning.bound_doubt
                if log_time <= limit < log_time + doubt:
                    self.open_bounds[settings] = scores[settings]
                over = log_time + margin - limit
            if over > BOUND_SLACK:
                scores[settings] += BOUND_PENALTY + BOUND_PENALTY * over

    def plateau(self, settings: Settings) -> list[Settings]:
        """Return the settings tried that are the same state as this one, itself included, lowest
        core clock first.

        A governor that holds the clock below the one asked for makes all clocks above it one state.
        Where the card reports its clock the memory knows which. Elsewhere they are neighbours on
        the core clock's line between which neither time nor power differ, as far as scatter lets
        that be seen."""
        problem = self.problem
        core = problem.core
        if core is None or settings not in self.seen:
            return [settings]
        if self.held:
            edge = self.held.get(settings, settings)
            above = [
                asked_settings
                for asked_settings, effective in self.held.items()
                if effective == edge
            ]
            return [edge, *sorted(above)]
        if self.sigma > problem.tuning.prior_sigma:
            return [settings]  # no two settings can be called equal within this scatter
        line = problem.lattice.lines_through(settings)[core]
        levels = self.knobs[core].levels[line.others]
        if len(levels) == 1 or not self._has_near_score(settings):
            return [settings]
        first = bisect_left(levels, settings[core])
        last = first
        while first > 0 and self._is_same(settings, line.along[levels[first - 1]]):
            first -= 1
        while last + 1 < len(levels) and self._is_same(settings, line.along[levels[last + 1]]):
            last += 1
        return [line.along[level] for level in levels[first : last + 1]]

    def _has_near_score(self, settings: Settings) -> bool:
        """Tell whether another setting has a score that could be that of the same state."""
        most = (1.0 + self.problem.time_weight) * self.problem.tuning.prior_sigma
        score = self.score[settings]
        low = bisect_left(self._ordered, score - most)
        high = bisect_right(self._ordered, score + most)
        return high - low > 1

    def _is_same(
        self,
        one: Settings,
        another: Settings,
    ) -> bool:
        """Tell whether two settings that differ in the core clock have the same time and power."""
        core = self.problem.core
        assert core is not None
        logs = self.problem.log_levels[core]
        ratio = abs(logs[one[core]] - logs[another[core]])
        least = min(IDLE_KNOB * ratio, self.problem.tuning.prior_sigma)
        here = self.seen[one]
        there = self.seen[another]
        if abs(there.log_time - here.log_time) > least:
            return False
        return abs(there.log_power - here.log_power) <= least

    def bins(self) -> tuple[SensitivityBin, SensitivityBin]:
        """Return compute and bandwidth sensitivity as believed, binned; what is not known counts as
        high.
        """
        compute = self.beliefs.compute
        bandwidth = self.beliefs.bandwidth
        high = SensitivityBin.HIGH
        return (
            high if compute is None else bin_sensitivity(compute),
            high if bandwidth is None else bin_sensitivity(bandwidth),
        )

    def neighbours(self, which: int) -> tuple[int | None, int | None]:
        """Return the nearest levels of a knob below and above that were tried with all others at
        their best.
        """
        levels = self.knobs[which].levels[self.lines[which].others]
        place = bisect_left(levels, self.best[which])
        below = levels[place - 1] if place else None
        above = levels[place + 1] if place + 1 < len(levels) else None
        if above is not None and above > self.tops[which]:
            above = None
        return below, above

    def fewest_runs(
        self,
        one: Settings,
        another: Settings,
    ) -> Settings:
        """Return which of two settings ran less often, the first where both did alike."""
        return another if self.seen[another].runs < self.seen[one].runs else one

    @cached_property
    def default(self) -> Settings:
        """Return the default settings, or the lowest clock tried that is the same state."""
        default = self.problem.default
        return self.alike[0] if default in self.alike else self.plateau(default)[0]

    def error(
        self,
        one: Settings,
        another: Settings,
    ) -> float:
        """Return the standard error of the difference of two scores."""
        return self.sigma * math.sqrt(1.0 / self.seen[one].runs + 1.0 / self.seen[another].runs)

    @cached_property
    def close_rivals(self) -> list[Settings]:
        """Return the settings whose score scatter does not tell from the best, other than the
        best's own plateau.
        """
        confident = self.problem.tuning.confident
        floor = self.score[self.best]
        farthest = floor + LARGEST_ERROR * confident * self.sigma
        if bisect_left(self._ordered, farthest) <= 1:  # none but the best
            return []
        rivals = []
        for settings, score in self.score.items():
            if score >= farthest or settings in self.alike:
                continue
            if score - floor < confident * self.error(settings, self.best):
                rivals.append(settings)
        return rivals

    def choose_under_cap(self) -> Settings | None:
        """Return the setting to try next under a power cap; None where none promises enough."""
        problem = self.problem
        if problem.capped is None:
            return None
        log_time = self.log_time_limit
        limits = (problem.objective.log_cap, math.inf if log_time is None else log_time)
        _, time, power = self.seen[self.best]
        keeps_bounds = power <= limits[0] + BOUND_SLACK and time <= limits[1] + BOUND_SLACK
        best = self.best if keeps_bounds else None
        return problem.capped.choose(
            self.memory,
            self.believed,
            limits,
            problem.time_weight,
            best,
        )

    def loss(self) -> float:
        """Return what all runs off the best setting have cost, in runs' worth of the objective."""
        floor = self.score[self.best]
        loss = 0.0
        for settings, record in self.seen.items():
            excess = min(self.score[settings] - floor, CONTROLLER.most_loss)
            loss += record.runs * math.expm1(excess)
        return loss
