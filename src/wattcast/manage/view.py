"""The ledger seen through an objective: scores, what scatter leaves open, and the lines through the best setting."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from wattcast.manage.beliefs import Beliefs
from wattcast.manage.cap import Reckoned
from wattcast.manage.knobs import Settings
from wattcast.manage.ledger import Ledger
from wattcast.manage.objective import SLACK, WALL
from wattcast.manage.problem import Problem
from wattcast.manage.sensitivity import Bin, binned

IDLE_KNOB = 0.05  # a knob that moves neither time nor power by more than this share of itself is not in force
ALONE = (None, None)


class View:
    """Worked out anew from the ledger at every decision; nothing in it is kept."""

    def __init__(
        self, problem: Problem, ledger: Ledger, beliefs: Beliefs | None, reckoned: Reckoned | None = None
    ) -> None:
        self._reckoned = reckoned
        self.problem, self.seen, self.runs = problem, ledger.seen, ledger.runs
        self.lanes, self.held = ledger.lanes, ledger.held
        objective, tuning = problem.objective, problem.tuning
        self._close: list[Settings] | None = None
        self._default: Settings | None = None
        self._near: list[tuple[int | None, int | None] | None] = [None] * len(problem.roles)
        self._bounds: list[tuple[float, float] | None] = [None] * len(problem.roles)
        self.outlooks: dict[tuple[int, int], float] = {}  # of steps from the best, by knob and level; see steps
        self._ledger, self.sigma = ledger, ledger.sigma(problem.time_weight, tuning.prior_sigma)
        self.score = self._scores()
        self._ordered = sorted(self.score.values())
        first = min(self.score, key=self.score.__getitem__)
        self.alike = self.plateau(first)  # settings that are the same state as the best
        self.best = self.alike[0]
        self.lines = problem.lattice.lines(self.best)
        # the best breaks the cap only when all do
        self.over_cap = reckoned is not None and self.seen[self.best].log_power > objective.log_cap
        self.tops = self._tops()
        self.measured = beliefs is None
        self.beliefs = self._sensed() if beliefs is None else beliefs

    @property
    def default(self) -> Settings:
        """The default settings, or the lowest clock tried that is the same state."""
        if self._default is None:
            default = self.problem.default
            self._default = self.alike[0] if default in self.alike else self.plateau(default)[0]
        return self._default

    def plateau(self, at: Settings) -> list[Settings]:
        """Settings tried that are the same state as this one, itself among them, the lowest core clock first.

        A governor that holds the clock below the one asked for makes all clocks above it one state. Where the
        card tells its clock the ledger knows which; elsewhere they are neighbours on the core clock's line
        between which neither time nor power differ, as far as scatter lets that be seen.
        """
        which, held = self.problem.core, self.held
        if which is None or at not in self.seen:
            return [at]
        if held:
            edge = held.get(at, at)
            return [edge, *sorted(asked for asked, got in held.items() if got == edge)]
        if self.sigma > self.problem.tuning.prior_sigma:
            return [at]  # no two settings can be called equal within this scatter
        levels = self.lanes[which].levels[self.problem.lattice.lines(at)[which].others]
        if len(levels) == 1:
            return [at]
        most = (1.0 + self.problem.time_weight) * self.problem.tuning.prior_sigma
        low, high = self.score[at] - most, self.score[at] + most
        if bisect_right(self._ordered, high) - bisect_left(self._ordered, low) == 1:
            return [at]
        return self._equal_clocks(at, which, levels)

    def _equal_clocks(self, at: Settings, which: int, levels: tuple[int, ...]) -> list[Settings]:
        low = high = bisect_left(levels, at[which])
        while low > 0 and self._same(at, which, levels[low - 1]):
            low -= 1
        while high + 1 < len(levels) and self._same(at, which, levels[high + 1]):
            high += 1
        return [moved(at, which, level) for level in levels[low : high + 1]]

    def _same(self, at: Settings, which: int, level: int) -> bool:
        """Whether another core clock gave the same time and power."""
        logs, here, there = self.problem.log_levels[which], self.seen[at], self.seen[moved(at, which, level)]
        least = min(IDLE_KNOB * abs(logs[at[which]] - logs[level]), self.problem.tuning.prior_sigma)
        return abs(there.log_time - here.log_time) <= least and abs(there.log_power - here.log_power) <= least

    def bins(self) -> tuple[Bin, Bin]:
        """Compute and bandwidth sensitivity as believed, binned; what is not known counts as high."""
        known = (self.beliefs.compute, self.beliefs.bandwidth)
        compute, bandwidth = (Bin.HIGH if s is None else binned(s) for s in known)
        return compute, bandwidth

    def line(self, which: int) -> tuple[int | None, int | None]:
        """The nearest levels of a knob below and above that were tried with all others at their best."""
        found = self._near[which]
        if found is None:
            here, levels = self.best[which], self.lanes[which].levels[self.lines[which].others]
            if len(levels) == 1:
                found = self._near[which] = ALONE
            else:
                i = bisect_left(levels, here)
                below = levels[i - 1] if i else None
                above = levels[i + 1] if i + 1 < len(levels) and levels[i + 1] <= self.tops[which] else None
                found = self._near[which] = below, above
        return found

    def bounds(self, which: int) -> tuple[float, float]:
        """Lowest and highest sensitivity to a knob that the beliefs allow."""
        found = self._bounds[which]
        if found is None:
            problem = self.problem
            found = self._bounds[which] = self.beliefs.bounds(problem.roles[which], problem.has_units)
        return found

    def error(self, a: Settings, b: Settings) -> float:
        """Standard error of the difference of two scores."""
        return self.sigma * math.sqrt(1.0 / self.seen[a].runs + 1.0 / self.seen[b].runs)

    def close(self) -> list[Settings]:
        """Settings whose score scatter does not tell from the best, other than the best's own plateau."""
        if self._close is None:
            score, confident, floor = self.score, self.problem.tuning.confident, self.score[self.best]
            farthest = floor + 1.5 * confident * self.sigma  # no error of a difference is larger than sqrt(2) sigma
            if bisect_left(self._ordered, farthest) <= 1:  # none but the best
                self._close = []
            else:
                near = [s for s, value in score.items() if value < farthest and s not in self.alike]
                self._close = [s for s in near if score[s] - floor < confident * self.error(s, self.best)]
        return self._close

    def permits(self, to: Settings) -> bool:
        """Whether a setting may be run: under a cap, only when it is reckoned to keep to it."""
        return self._reckoned is None or self._reckoned.permits(to)

    def room(self, which: int) -> int:
        """The highest level of a knob that a cap leaves room for, all others at their best."""
        top = self.tops[which]
        return top if self._reckoned is None else min(top, self._reckoned.highest(self.best, which))

    def loss(self) -> float:
        """What all runs off the best setting have cost, in runs' worth of the objective."""
        floor = self.score[self.best]
        return sum(x.runs * math.expm1(min(self.score[s] - floor, 3.0)) for s, x in self.seen.items())

    def sense_error(self) -> float:
        """Standard error of the sensed sensitivity."""
        sensing = self.problem.sensing(self.default)
        assert sensing is not None
        low, ratio = sensing
        runs = 1.0 / self.seen[low].runs + 1.0 / self.seen[self.default].runs
        time_sigma = self._ledger.time_sigma(self.problem.tuning.prior_sigma / self.problem.time_weight)
        return time_sigma * math.sqrt(runs) / ratio

    def _scores(self) -> dict[Settings, float]:
        objective, weight = self.problem.objective, self.problem.objective.time_weight
        if not objective.bounded:  # the same sum, spared the calls
            return {s: x.log_power + weight * x.log_time for s, x in self.seen.items()}
        reference = self.seen.get(self.problem.default)
        longest = objective.log_time_limits(reference.log_time if reference else None)
        log_cap = objective.log_cap
        found = {s: power + weight * time for s, (_, time, power) in self.seen.items()}
        for s, (_, time, _) in self.seen.items() if longest else ():  # Objective.score, spared the calls
            for limit in longest:
                if time - limit > SLACK:
                    found[s] += WALL + WALL * (time - limit)
        if log_cap < math.inf:
            for s, power in [(s, power) for s, (_, _, power) in self.seen.items() if power - log_cap > SLACK]:
                found[s] += WALL + WALL * (power - log_cap)
        return found

    def _tops(self) -> Settings:
        """The highest levels worth a step: clocks above a plateau's edge change nothing."""
        tops, which = self.problem.lattice.top, self.problem.core
        if which is None or len(self.alike) == 1:
            return tops
        return moved(tops, which, self.best[which])

    def _sensed(self) -> Beliefs:
        """Compute sensitivity from the sensing step; what is left of 1 is memory's."""
        margin, sensing = self.problem.tuning.measured_margin, self.problem.sensing(self.default)
        if sensing is None or sensing[0] not in self.seen or self.default not in self.seen:
            return Beliefs(None, None, margin)
        low, high = self.seen[sensing[0]], self.seen[self.default]
        compute = min(max((low.log_time - high.log_time) / sensing[1], 0.0), 1.0)
        return Beliefs(compute, 1.0 - compute, margin)


def moved(at: Settings, which: int, to: int) -> Settings:
    """The same settings with one knob at another level."""
    return (*at[:which], to, *at[which + 1 :])
