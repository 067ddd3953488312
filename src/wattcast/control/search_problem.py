"""State the controller's search: its constants, its fixed tables, and how the search stands at a
decision.

``ControllerTuning`` holds the constants, ``SearchProblem`` what stays fixed while a controller
runs, and ``SearchView`` what one decision reads out of the memory of a kernel's runs."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np

from wattcast.control.plants import Knob, KnobRole, Lattice, Settings, move_knob, read_knob_facts
from wattcast.control.run_memory import PowerCapCheck, RunMemory, SensitivityBeliefs
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
        return {Goal.ED2: 2, Goal.ED: 1, Goal.ENERGY: 0}[self]

    @property
    def label(self) -> str:
        """Return the name that tables and figures show."""
        return {Goal.ED2: "ED²", Goal.ED: "ED", Goal.ENERGY: "Energy"}[self]


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

    def log_scores(self, time_s: Array, power_w: Array, reference_s: Array) -> Array:
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

    def total(self, time_s: Array, energy_j: Array) -> Array:
        """Return E · D^k of whole runs."""
        return np.asarray(energy_j * time_s**self.goal.delay_power)


# Coarse step: level of each knob by bin (low, medium, high), as a share of its highest level. The
# paper calls its own values "empirically fixed" and does not print them.
_BY_BIN = [read_knob_facts(f"coarse_{level}") for level in ("low", "medium", "high")]
COARSE_SHARES = {role: (_BY_BIN[0][role], _BY_BIN[1][role], _BY_BIN[2][role]) for role in KnobRole}
COARSE_SHARES_CLOCK_ALONE = (0.85, 0.95, 1.0)  # of the core clock on a card without a unit knob
# Largest log change of board power per log change of a knob to expect: V² f on the switched share
# of board power.
POWER_ELASTICITY = read_knob_facts("elasticity")
# a knob that moves neither time nor power by more than this share of itself is not in force
IDLE_KNOB = 0.05
StepLevels = tuple[tuple[int, ...], ...]  # [knob][level] -> levels of a step from there


@dataclass(frozen=True)
class ControllerTuning:
    """Hold the constants of the controller. docs/method/manage.md says what they were tuned on."""

    probe_change: float = 0.08  # a fine step changes a knob by about this much
    sense_change: float = 0.09  # the sensing step changes the core clock by at least this much
    resolution: float = 0.02  # settings closer than this are not told apart
    worth: float = 0.003  # a step must promise this much of the score
    polish: float = 0.05  # the smallest step is tried where it cannot cost more than this
    margin: float = 0.15  # predicted sensitivities may be off by this
    measured_margin: float = (
        0.20  # sensitivity to memory inferred from that to the core clock, likewise
    )
    prior_sigma: float = 0.002  # scatter of a score before any repeat is seen
    confident: float = 1.5  # standard errors at which two settings are told apart
    quick_runs: int = 2  # runs of a close rival before the search goes on
    rival_runs: int = 4  # runs of a close rival at most
    default_runs: int = (
        10  # runs of the default settings at most, while a gain over them is in doubt
    )
    verified: float = 1.3  # standard errors by which a setting must beat the default to replace it
    risky_ratio: float = (
        1.5  # a knob lowered by more than this in one step may cost more than it can save
    )
    prior_time: float = 0.0005  # scatter of log time before any repeat is seen
    bound_sigmas: float = (
        2.0  # standard errors by which a time must keep to its bound, for a chance of 95 % and more
    )
    bound_doubt: float = 0.03  # settings closer than this to a bound
    bound_runs: int = 3  # are run so often at least before they count as keeping it
    budget: float = 0.01  # share of the objective that risky probes may cost
    surprise: float = 0.10  # log change of time at unchanged settings that is taken for a new phase
    patience: int = 2  # surprises, or unusable observations, in a row before acting on them
    rest: int = 8  # runs a settled kernel is left alone between two looks at its memory
    coarse: Mapping[KnobRole, tuple[float, float, float]] = field(
        default_factory=lambda: COARSE_SHARES
    )

    def coarse_target(
        self, lattice: Lattice, compute: SensitivityBin, bandwidth: SensitivityBin
    ) -> Settings:
        """Return the settings of the coarse step: all knobs at once, by bin (Algorithm 1,
        SetCU_Freq_MemBW).
        """
        alone = lattice.find_knob(KnobRole.COMPUTE_UNITS) is None
        levels = []
        for knob in lattice.knobs:
            clock_alone = alone and knob.role is KnobRole.CORE_CLOCK
            shares = COARSE_SHARES_CLOCK_ALONE if clock_alone else self.coarse[knob.role]
            wanted = shares[compute if knob.role.is_compute else bandwidth] * knob.levels[-1]
            levels.append(next(i for i, v in enumerate(knob.levels) if v >= wanted * (1 - 1e-9)))
        return tuple(levels)


def _step_levels(knob: Knob, level: int, down: bool, change: float) -> int:
    """Return the fewest levels that change a knob by at least ``change`` of its present value."""
    here = knob.levels[level]
    step = -1 if down else 1
    to = level + step
    while 0 < to < len(knob.levels) - 1 and abs(knob.levels[to] / here - 1.0) < change:
        to += step
    return abs(to - level)


class SearchProblem:
    """Hold what stays fixed while a controller runs, with tables that decisions look things up in."""

    def __init__(
        self,
        lattice: Lattice,
        default: Settings,
        start: Settings,
        objective: Objective,
        tuning: ControllerTuning,
        free: tuple[bool, ...],
    ) -> None:
        """Work the tables out; ``start`` is a kernel's first setting, ``free`` says which knobs may
        turn.
        """
        self.lattice = lattice
        self.default = default
        self.start = start
        self.objective = objective
        self.tuning = tuning
        self.free = free
        self.time_weight = objective.time_weight
        self.turns = tuple(
            i for i, may_turn in enumerate(free) if may_turn
        )  # knobs the search may turn
        self.roles = tuple(knob.role for knob in lattice.knobs)
        self.elastic = tuple(POWER_ELASTICITY[role] for role in self.roles)
        self.has_units = KnobRole.COMPUTE_UNITS in self.roles
        self.core = lattice.find_knob(KnobRole.CORE_CLOCK)
        memory = lattice.find_knob(KnobRole.MEMORY_CLOCK)
        self.memory = (
            memory if memory is not None and free[memory] else None
        )  # where the search may turn it
        self.log_levels = lattice.log_levels
        # Log levels along which run memories keep how power rises, which only a cap asks for.
        self.slope_levels = None if objective.cap_w is None else self.log_levels
        # The lowest level of each knob that no risk is run with, from each of its levels.
        self.safe = tuple(
            tuple(
                next(i for i, low in enumerate(k.levels) if high / low <= tuning.risky_ratio)
                for high in k.levels
            )
            for k in lattice.knobs
        )
        # A fine step changes a knob by about probe_change; the smallest one by what can be told
        # apart.
        change = 0.75 * tuning.probe_change
        least = tuning.resolution
        self.stride_down, self.stride_up = (
            self._list_step_levels(change, down) for down in (True, False)
        )
        self.finest_down, self.finest_up = (
            self._list_step_levels(least, down) for down in (True, False)
        )
        self.sensing_down = self._list_step_levels(tuning.sense_change, True)

    def _list_step_levels(self, change: float, down: bool) -> StepLevels:
        knobs = self.lattice.knobs
        return tuple(
            tuple(_step_levels(k, i, down, change) for i in range(len(k.levels))) for k in knobs
        )

    def sensing_step(self, start: Settings) -> tuple[Settings, float] | None:
        """Return the sensing step from a setting, one step of the core clock down, and its log
        ratio.
        """
        which = self.core
        if which is None or not self.free[which] or start[which] == 0:
            return None
        here = start[which]
        logs = self.log_levels[which]
        to = here - self.sensing_down[which][here]
        return move_knob(start, which, to), logs[here] - logs[to]


class SearchView:
    """Read the memory of one kernel for one decision: scores, the best setting, and what is near
    it.
    """

    def __init__(
        self,
        problem: SearchProblem,
        memory: RunMemory,
        beliefs: SensitivityBeliefs | None,
        check_cap: bool = True,
    ) -> None:
        """Score all settings seen. ``beliefs`` come from counters; None takes them from the sensing
        step.
        """
        objective = problem.objective
        tuning = problem.tuning
        self.problem = problem
        self.memory = memory
        self.seen = memory.seen
        self.runs = memory.runs
        self.knobs = memory.knobs
        self.held = memory.held
        capped = check_cap and objective.cap_w is not None
        self._cap = PowerCapCheck(problem.lattice, memory, objective.log_cap) if capped else None
        # Whether a setting may be run: under a cap, only when it is expected to keep to it.
        self.permits: Callable[[Settings], bool] = (
            (lambda _: True) if self._cap is None else self._cap.permits
        )
        self.sigma = memory.score_sigma(problem.time_weight, tuning.prior_sigma)
        self.open_bounds: dict[
            Settings, float
        ] = {}  # settings whose time may break a bound or not -> their score
        self.score = self._score_seen()
        self._ordered = sorted(self.score.values())
        self.alike = self.plateau(
            min(self.score, key=self.score.__getitem__)
        )  # the same state as the best
        self.best = self.alike[0]
        self.lines = problem.lattice.lines_through(self.best)
        self.over_cap = (
            capped and self.seen[self.best].log_power > objective.log_cap
        )  # only when all settings are
        self.tops = problem.lattice.top
        if (
            problem.core is not None and len(self.alike) > 1
        ):  # clocks above a plateau's edge change nothing
            self.tops = move_knob(self.tops, problem.core, self.best[problem.core])
        self.measured = beliefs is None
        if (
            beliefs is None
        ):  # compute sensitivity from the sensing step, and the rest of 1 for that to memory
            sensing = problem.sensing_step(self.default)
            compute = None
            memory_bound = None
            if sensing is not None and sensing[0] in self.seen and self.default in self.seen:
                low = self.seen[sensing[0]]
                high = self.seen[self.default]
                compute = min(max((low.log_time - high.log_time) / sensing[1], 0.0), 1.0)
                memory_bound = 1.0 - compute
            beliefs = SensitivityBeliefs(compute, memory_bound, tuning.measured_margin)
        self.beliefs = beliefs

    def _score_seen(self) -> dict[Settings, float]:
        """Return ``Objective.log_scores`` of all settings seen, on plain numbers, which decisions
        are faster with.
        """
        objective = self.problem.objective
        weight = self.problem.time_weight
        cap = objective.log_cap
        most = objective.log_cap + BOUND_SLACK
        found = {
            s: power + weight * time
            if power <= most
            else power + weight * time + BOUND_PENALTY * (1.0 + power - cap)
            for s, (_, time, power) in self.seen.items()
        }
        default = self.problem.default
        tuning = self.problem.tuning
        reference = self.seen.get(default)  # not known before the default settings were run
        limits = [] if objective.latency_s is None else [math.log(objective.latency_s)]
        if objective.slowdown is not None and reference is not None:
            limits.append(reference.log_time + math.log1p(objective.slowdown))
        if limits:
            sigma = self.memory.time_sigma(tuning.prior_time)
            limit = min(limits)
            repeats = 1.0 / reference.runs if reference and objective.slowdown is not None else 0.0
            for s, (runs, time, _) in self.seen.items():
                margin = tuning.bound_sigmas * sigma * math.sqrt(1.0 / runs + repeats)
                is_close = runs < tuning.bound_runs and time > limit - tuning.bound_doubt
                if s != default and time <= limit < time + margin + (
                    tuning.bound_doubt if is_close else 0.0
                ):
                    self.open_bounds[s] = found[s]
                over = (time if s == default else time + margin) - limit
                if over > BOUND_SLACK:
                    found[s] += BOUND_PENALTY + BOUND_PENALTY * over
        return found

    @cached_property
    def default(self) -> Settings:
        """Return the default settings, or the lowest clock tried that is the same state."""
        default = self.problem.default
        return self.alike[0] if default in self.alike else self.plateau(default)[0]

    def plateau(self, settings: Settings) -> list[Settings]:
        """Return the settings tried that are the same state as this one, itself included, lowest
        core clock first.

        A governor that holds the clock below the one asked for makes all clocks above it one state.
        Where the card reports its clock the memory knows which. Elsewhere they are neighbours on
        the core clock's line between which neither time nor power differ, as far as scatter lets
        that be seen."""
        problem = self.problem
        which = self.problem.core
        held = self.held
        if which is None or settings not in self.seen:
            return [settings]
        if held:
            edge = held.get(settings, settings)
            return [edge, *sorted(asked for asked, got in held.items() if got == edge)]
        sigma = problem.tuning.prior_sigma
        if self.sigma > sigma:
            return [settings]  # no two settings can be called equal within this scatter
        line = problem.lattice.lines_through(settings)[which]
        levels = self.knobs[which].levels[line.others]
        if len(levels) == 1:
            return [settings]
        most = (1.0 + problem.time_weight) * sigma
        low = self.score[settings] - most
        high = self.score[settings] + most
        if bisect_right(self._ordered, high) - bisect_left(self._ordered, low) == 1:
            return [settings]
        logs = problem.log_levels[which]
        here = self.seen[settings]

        def is_same(level: int) -> bool:
            there = self.seen[line.along[level]]
            least = min(IDLE_KNOB * abs(logs[settings[which]] - logs[level]), sigma)
            return (
                abs(there.log_time - here.log_time) <= least
                and abs(there.log_power - here.log_power) <= least
            )

        first = last = bisect_left(levels, settings[which])
        while first > 0 and is_same(levels[first - 1]):
            first -= 1
        while last + 1 < len(levels) and is_same(levels[last + 1]):
            last += 1
        return [line.along[level] for level in levels[first : last + 1]]

    def bins(self) -> tuple[SensitivityBin, SensitivityBin]:
        """Return compute and bandwidth sensitivity as believed, binned; what is not known counts as
        high.
        """
        known = (self.beliefs.compute, self.beliefs.bandwidth)
        compute, bandwidth = (
            SensitivityBin.HIGH if s is None else bin_sensitivity(s) for s in known
        )
        return compute, bandwidth

    def neighbours(self, which: int) -> tuple[int | None, int | None]:
        """Return the nearest levels of a knob below and above that were tried with all others at
        their best.
        """
        levels = self.knobs[which].levels[self.lines[which].others]
        i = bisect_left(levels, self.best[which])
        above = levels[i + 1] if i + 1 < len(levels) and levels[i + 1] <= self.tops[which] else None
        return levels[i - 1] if i else None, above

    def error(self, a: Settings, b: Settings) -> float:
        """Return the standard error of the difference of two scores."""
        return self.sigma * math.sqrt(1.0 / self.seen[a].runs + 1.0 / self.seen[b].runs)

    @cached_property
    def close_rivals(self) -> list[Settings]:
        """Return the settings whose score scatter does not tell from the best, other than the
        best's own plateau.
        """
        score = self.score
        confident = self.problem.tuning.confident
        floor = self.score[self.best]
        farthest = (
            floor + 1.5 * confident * self.sigma
        )  # no error of a difference is larger than sqrt(2) sigma
        if bisect_left(self._ordered, farthest) <= 1:  # none but the best
            return []
        near = [s for s, value in score.items() if value < farthest and s not in self.alike]
        return [s for s in near if score[s] - floor < confident * self.error(s, self.best)]

    def highest_level(self, which: int) -> int:
        """Return the highest level of a knob that a cap leaves room for, all others at their best."""
        top = self.tops[which]
        return top if self._cap is None else min(top, self._cap.highest_level(self.best, which))

    def loss(self) -> float:
        """Return what all runs off the best setting have cost, in runs' worth of the objective."""
        floor = self.score[self.best]
        return sum(
            x.runs * math.expm1(min(self.score[s] - floor, 3.0)) for s, x in self.seen.items()
        )
