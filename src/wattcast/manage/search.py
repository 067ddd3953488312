"""The fine step: which settings to try next, given what was seen. A pure function of the ledger.

Nothing is remembered of the search itself: at every run the next step is worked out from the ledger alone,
so a revert is simply that the best setting is again the best, and isolation of a guilty knob is that each
knob has a line of its own. Order: the default, the coarse target, sensing; then close rivals once more; then
all promising knobs down together; then single knobs, most promising first; then rivals until told apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from wattcast.manage import cap
from wattcast.manage.knobs import Lattice, Role, Settings
from wattcast.manage.ledger import Ledger
from wattcast.manage.objective import WALL, Objective
from wattcast.manage.outlook import Beliefs, moved, neighbour, outlook
from wattcast.manage.sensitivity import LOW_EDGE, Bin, binned
from wattcast.manage.tuning import Tuning


@dataclass(frozen=True)
class Problem:
    """What is searched: fixed while the controller runs."""

    lattice: Lattice
    default: Settings
    start: Settings  # of a kernel's first run
    objective: Objective
    tuning: Tuning
    free: tuple[bool, ...]  # knobs the search may turn

    def permits(self, ledger: Ledger, to: Settings) -> bool:
        """Whether a setting may be run: under a cap, only when it is reckoned to keep to it."""
        cap_w = self.objective.cap_w
        return cap_w is None or cap.within(self.lattice, ledger.seen, to, cap_w)


@dataclass(frozen=True, slots=True)
class Move:
    """Settings for the next run; ``settled`` when nothing is left to try."""

    settings: Settings
    settled: bool
    why: str


def next_move(problem: Problem, ledger: Ledger, beliefs: Beliefs, target: Settings | None, spent: float) -> Move:
    """The settings of the next run."""
    seen = ledger.seen
    if not seen:
        return Move(problem.start, False, "start")
    if problem.default not in seen and problem.permits(ledger, problem.default):
        return Move(problem.default, False, "default")
    if problem.objective.cap_w is not None:
        lower = cap.descend(problem.lattice, seen, beliefs, problem.objective.cap_w)
        if lower is not None:
            return Move(lower, False, "cap")
    if target is not None and target not in seen and problem.permits(ledger, target):
        return Move(target, False, "coarse")
    view = View(problem, ledger, beliefs, spent)
    for why, found in (
        ("sense", view.sense()),
        ("again", view.rival(problem.tuning.quick_runs)),
        ("fine", view.fine()),
        ("fine", view.polish()),
        ("again", view.rival(problem.tuning.rival_runs)),
    ):
        if found is not None:
            return Move(found, False, why)
    return view.verified()


class View:
    """The ledger seen through an objective: scores, their scatter, and the steps around the best."""

    def __init__(self, problem: Problem, ledger: Ledger, beliefs: Beliefs, spent: float) -> None:
        self.problem, self.ledger, self.spent = problem, ledger, spent
        self.beliefs = beliefs if beliefs.compute is not None else self._measured_beliefs()
        reference = ledger.seen.get(problem.default)
        log_reference = reference.log_time if reference else None
        objective = problem.objective
        self.score = {s: objective.score(x.log_time, x.log_power, log_reference) for s, x in ledger.seen.items()}
        self.best = min(self.score, key=self.score.__getitem__)
        self.sigma = ledger.sigma(objective.time_weight, problem.tuning.prior_sigma)

    def bins(self) -> tuple[Bin, Bin]:
        """Compute and bandwidth sensitivity as believed, binned; what is not known counts as high."""
        known = (self.beliefs.compute, self.beliefs.bandwidth)
        compute, bandwidth = (Bin.HIGH if s is None else binned(s) for s in known)
        return compute, bandwidth

    def sense(self) -> Settings | None:
        """Without counters, one step down of the core clock tells compute from memory.

        Tried again while a risky step hangs on an answer that scatter leaves open.
        """
        pair = self._sense_pair()
        if pair is None:
            return None
        low, high = pair
        seen = self.ledger.seen
        if low not in seen:
            return low
        if self._risky_step() is None or self.beliefs.bandwidth is None:
            return None
        error = self._sense_error(low, high)
        fewest = min(low, high, key=lambda s: seen[s].runs)
        open_question = abs(self.beliefs.bandwidth - LOW_EDGE) < self.problem.tuning.confident * error
        return fewest if open_question and seen[fewest].runs < self.problem.tuning.rival_runs else None

    def rival(self, most_runs: int) -> Settings | None:
        """The least tried setting that scatter does not tell from the best, or the best itself."""
        seen, best = self.ledger.seen, self.best
        close = [
            s
            for s, score in self.score.items()
            if s != best
            and seen[s].runs < most_runs
            and score - self.score[best] < self.problem.tuning.confident * self._error(s, best)
        ]
        if not close:
            return None
        return min([*close, best], key=lambda s: (seen[s].runs, self.score[s]))

    def fine(self) -> Settings | None:
        """All promising knobs down together, else the most promising single step, else None."""
        steps = [step for i, free in enumerate(self.problem.free) if free for step in self._steps(i)]
        steps = [step for step in steps if self._permits(moved(self.best, step[1], step[2]))]
        worth = [step for step in steps if step[0] < -self.problem.tuning.worth]
        down = [(which, to) for _, which, to, outer in worth if outer and to < self.best[which]]
        if len(down) > 1:
            levels = dict(down)
            joint = tuple(levels.get(i, level) for i, level in enumerate(self.best))
            if joint not in self.score:
                return joint
        for _, which, to, _ in sorted(worth):
            return moved(self.best, which, to)
        return self._trade() if self.problem.objective.cap_w is not None else None

    def _trade(self) -> Settings | None:
        """Under a cap: one knob down to make room for another, when both together promise a gain.

        The lower step is run first, as its power is what bounds the trade.
        """
        lattice, best = self.problem.lattice, self.best
        turns = [i for i, free in enumerate(self.problem.free) if free]
        offers = []
        for down in turns:
            for up in turns:
                if down == up or best[down] == 0 or best[up] == len(lattice.knobs[up].levels) - 1:
                    continue
                lower = moved(best, down, best[down] - 1)
                traded = moved(lower, up, best[up] + 1)
                promise = self._outlook(down, best[down] - 1) + self._outlook(up, best[up] + 1)
                if traded not in self.score and promise < -self.problem.tuning.worth:
                    offers.append((promise, lower if lower not in self.score else traded))
        allowed = (to for _, to in sorted(offers) if self._permits(to))
        return next(allowed, None)

    def _permits(self, to: Settings) -> bool:
        return self.problem.permits(self.ledger, to)

    def polish(self) -> Settings | None:
        """The smallest steps around the best, where trying them costs next to nothing."""
        tuning = self.problem.tuning
        for which, knob in enumerate(self.problem.lattice.knobs):
            here = self.best[which]
            for down in (True, False):
                step = tuning.finest(knob, here, down)
                to = here - step if down else here + step
                fits = 0 <= to < len(knob.levels) and self.problem.free[which]
                fits = fits and step < tuning.stride(knob, here, down)
                if (
                    fits
                    and moved(self.best, which, to) not in self.score
                    and self._outlook(which, to) < tuning.polish
                ):
                    gap = neighbour(self.score, self.best, which, up=not down)
                    if (
                        gap is None
                        and self._allowed(which, min(to, here))
                        and self._permits(moved(self.best, which, to))
                    ):
                        return moved(self.best, which, to)
        return None

    def verified(self) -> Move:
        """The best setting, once it is surely better than the default; until then, both in turn."""
        default, best, tuning = self.problem.default, self.best, self.problem.tuning
        if best == default or default not in self.score:
            return Move(best, True, "settled")
        gain = self.score[default] - self.score[best]
        if gain > tuning.verified * self._error(default, best):
            return Move(best, True, "settled")
        fewest = min((default, best), key=lambda s: self.ledger.seen[s].runs)
        if self.ledger.seen[fewest].runs < tuning.default_runs:
            return Move(fewest, False, "verify")
        return Move(default, True, "settled")

    def _steps(self, which: int) -> Iterator[tuple[float, int, int, bool]]:
        """(outlook, knob, level, outer) of steps of one knob: out into the unknown, or in between known ones."""
        knob, here = self.problem.lattice.knobs[which], self.best[which]
        below = neighbour(self.score, self.best, which, up=False)
        above = neighbour(self.score, self.best, which, up=True)
        tuning = self.problem.tuning
        if below is None and here > 0:
            to = here - tuning.stride(knob, here, down=True)
            if self._allowed(which, to):
                yield self._outlook(which, to), which, to, True
        if above is None and here < len(knob.levels) - 1:
            to = here + tuning.stride(knob, here, down=False)
            yield self._outlook(which, to), which, to, True
        inner = self._between(which, below, above)
        if inner is not None and moved(self.best, which, inner[1]) not in self.score:
            yield inner[0], which, inner[1], False

    def _between(self, which: int, below: int | None, above: int | None) -> tuple[float, int] | None:
        """(promise, level) between known neighbours: the vertex of the parabola through them, or halfway."""
        knob, here, tuning = self.problem.lattice.knobs[which], self.best[which], self.problem.tuning
        down_gap = here - below if below is not None else 0
        up_gap = above - here if above is not None else 0
        fine_down, fine_up = tuning.finest(knob, here, True), tuning.finest(knob, here, False)
        if below is not None and above is not None and not (self._wall(which, below) or self._wall(which, above)):
            return self._vertex(which, below, above, fine_down, fine_up)
        promise = -2.0 * tuning.worth
        if down_gap > fine_down and below is not None:
            wall = self._wall(which, below)
            return promise, here - max(fine_down, down_gap // 2 if wall else down_gap // 3)
        if up_gap > fine_up and above is not None:
            wall = self._wall(which, above)
            return promise, here + max(fine_up, up_gap // 2 if wall else up_gap // 3)
        return None

    def _vertex(self, which: int, below: int, above: int, fine_down: int, fine_up: int) -> tuple[float, int] | None:
        levels, here = self.problem.lattice.knobs[which].levels, self.best[which]
        x = [math.log(levels[i] / levels[here]) for i in (below, above)]
        y = [self.score[moved(self.best, which, i)] - self.score[self.best] for i in (below, above)]
        curvature = (y[0] / x[0] - y[1] / x[1]) / (x[0] - x[1])
        if curvature <= 0:
            return None
        slope = y[0] / x[0] - curvature * x[0]
        at = -0.5 * slope / curvature
        to = min(range(below, above + 1), key=lambda i: abs(math.log(levels[i] / levels[here]) - at))
        if -fine_down < to - here < fine_up:
            return None
        return (curvature * at + slope) * at - self.problem.tuning.worth, to

    def _wall(self, which: int, level: int) -> bool:
        return self.score[moved(self.best, which, level)] - self.score[self.best] > 0.5 * WALL

    def _outlook(self, which: int, to: int) -> float:
        p = self.problem
        return outlook(p.lattice, p.objective, self.ledger.seen, self.beliefs, self.best, which, to)

    def _allowed(self, which: int, to: int) -> bool:
        """Whether lowering a knob this far may be tried: not where it could cost more than it can save."""
        knob, tuning = self.problem.lattice.knobs[which], self.problem.tuning
        ratio = knob.levels[self.best[which]] / knob.levels[to]
        if ratio <= tuning.risky_ratio:
            return True
        belief = self.beliefs.compute if knob.role.is_compute else self.beliefs.bandwidth
        if belief is None:
            return False
        if belief < LOW_EDGE:
            return True
        cost = ratio ** (self.problem.objective.time_weight * belief) - 1.0
        return self.spent + cost <= tuning.budget * self.ledger.runs

    def _risky_step(self) -> int | None:
        """The level a risky step of the memory clock would go to, where one is still to be tried."""
        which = self.problem.lattice.index(Role.MEMORY_CLOCK)
        if which is None or not self.problem.free[which] or self.best[which] == 0:
            return None
        if neighbour(self.score, self.best, which, up=False) is not None:
            return None
        knob = self.problem.lattice.knobs[which]
        to = self.best[which] - self.problem.tuning.stride(knob, self.best[which], down=True)
        return to if knob.levels[self.best[which]] / knob.levels[to] > self.problem.tuning.risky_ratio else None

    def _sense_pair(self) -> tuple[Settings, Settings] | None:
        problem = self.problem
        which = problem.lattice.index(Role.CORE_CLOCK)
        if which is None or not problem.free[which] or self.beliefs.margin != problem.tuning.measured_margin:
            return None
        here = problem.default[which]
        if here == 0 or problem.default not in self.ledger.seen:
            return None
        to = here - problem.tuning.sense(problem.lattice.knobs[which], here)
        return moved(problem.default, which, to), problem.default

    def _sense_error(self, low: Settings, high: Settings) -> float:
        which = self.problem.lattice.index(Role.CORE_CLOCK)
        assert which is not None
        levels = self.problem.lattice.knobs[which].levels
        seen = self.ledger.seen
        runs = 1.0 / seen[low].runs + 1.0 / seen[high].runs
        sigma = self.ledger.time_sigma(self.problem.tuning.prior_sigma / self.problem.objective.time_weight)
        return sigma * math.sqrt(runs) / math.log(levels[high[which]] / levels[low[which]])

    def _measured_beliefs(self) -> Beliefs:
        """Compute sensitivity from the sensing step; what is left of 1 is memory's."""
        tuning = self.problem.tuning
        self.beliefs = Beliefs(None, None, tuning.measured_margin)
        pair = self._sense_pair()
        if pair is None or pair[0] not in self.ledger.seen:
            return self.beliefs
        low, high = self.ledger.seen[pair[0]], self.ledger.seen[pair[1]]
        which = self.problem.lattice.index(Role.CORE_CLOCK)
        assert which is not None
        levels = self.problem.lattice.knobs[which].levels
        ratio = math.log(levels[pair[1][which]] / levels[pair[0][which]])
        compute = min(max((low.log_time - high.log_time) / ratio, 0.0), 1.0)
        return Beliefs(compute, 1.0 - compute, tuning.measured_margin)

    def _error(self, a: Settings, b: Settings) -> float:
        seen = self.ledger.seen
        return self.sigma * math.sqrt(1.0 / seen[a].runs + 1.0 / seen[b].runs)
