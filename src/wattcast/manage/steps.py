"""The fine step: settings around the best that are worth a try, and what they might bring.

With time elasticity s (the sensitivity) and power elasticity e, lowering a knob by the log ratio x changes
the score of E · D^k by (w·s - e)·x, w = k + 1. Where a like step was measured, s and e are read off; elsewhere
s comes from the beliefs and e from what cards do. The outlook is optimistic: it says whether a step is worth a
try, not what it will bring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from wattcast.manage.knobs import Role, Settings
from wattcast.manage.objective import WALL
from wattcast.manage.sensitivity import LOW_EDGE
from wattcast.manage.view import IDLE_KNOB, View, moved

# Largest log change of board power per log change of a knob worth reckoning with: V² f on the share of
# board power that is switched.
POWER_ELASTICITY = {Role.COMPUTE_UNITS: 0.5, Role.CORE_CLOCK: 1.3, Role.MEMORY_CLOCK: 0.3}
LEAST_ELASTICITY = 0.05
MOST_TRADED = 3  # levels one knob may go down for one level of another


class Step(NamedTuple):
    """One knob to another level; ``outer`` when it leads beyond what was tried on its line."""

    promise: float  # change of score, negative is good
    which: int
    to: int
    outer: bool


def fine(view: View) -> Settings | None:
    """All promising knobs down together, else the most promising single step, else None."""
    least = -view.problem.tuning.worth
    best, seen = view.best, view.seen
    worth = [
        step
        for which in view.problem.turns
        for step in _steps(view, which)
        if step.promise < least and view.problem.permits(seen, moved(best, step.which, step.to))
    ]
    down = {step.which: step.to for step in worth if step.outer and step.to < best[step.which]}
    if len(down) > 1:
        joint = tuple(down.get(i, level) for i, level in enumerate(best))
        if joint not in seen:
            return joint
    if worth:
        step = min(worth)
        return moved(best, step.which, step.to)
    return trade(view) if view.problem.objective.cap_w is not None else None


def polish(view: View) -> Settings | None:
    """The smallest step beyond what was tried, where it cannot cost much and a fine step is larger."""
    problem, best = view.problem, view.best
    for which in problem.turns:
        here = best[which]
        for to in _smallest(view, which):
            if outlook(view, which, to) < problem.tuning.polish and (to > here or allowed(view, which, to)):
                settings = moved(best, which, to)
                if problem.permits(view.seen, settings):
                    return settings
    return None


def trade(view: View) -> Settings | None:
    """Under a cap: one knob down, by as little as makes room, for another up, when both together promise a gain.

    A knob whose fall was never measured is lowered alone first: its power is what the room is reckoned from.
    """
    problem, best, tops = view.problem, view.best, view.tops
    offers: list[tuple[float, Settings]] = []
    for down in problem.turns:
        for up in problem.turns:
            if down == up or best[down] == 0 or best[up] == tops[up]:
                continue
            rise = outlook(view, up, best[up] + 1)
            for by in range(1, min(MOST_TRADED, best[down]) + 1):
                lower = moved(best, down, best[down] - by)
                traded = moved(lower, up, best[up] + 1)
                promise = rise + outlook(view, down, best[down] - by)
                if traded not in view.seen and promise < -problem.tuning.worth:
                    known = view.line(down)[0] is not None
                    offers.append((promise, traded if known else moved(best, down, best[down] - 1)))
    wanted = (to for _, to in sorted(offers) if to not in view.seen)
    return next((to for to in wanted if problem.permits(view.seen, to)), None)


def outlook(view: View, which: int, to: int) -> float:
    """The best change of score that moving a knob from the best setting to a level could bring."""
    problem, here = view.problem, view.best[which]
    logs, down = problem.log_levels[which], to < here
    s, e = _measured(view, which, to)
    if abs(s) < IDLE_KNOB and abs(e) < IDLE_KNOB:  # nothing known, or the knob was not what held the card
        role = problem.lattice.knobs[which].role
        low, high = view.beliefs.bounds(role, problem.has_units)
        s, e = (low, POWER_ELASTICITY[role]) if down else (high, LEAST_ELASTICITY)
    return (problem.objective.time_weight * s - e) * (logs[here] - logs[to])


def allowed(view: View, which: int, to: int) -> bool:
    """Whether lowering a knob this far may be tried: not where it could cost more than it can save."""
    problem, tuning = view.problem, view.problem.tuning
    knob = problem.lattice.knobs[which]
    ratio = knob.levels[view.best[which]] / knob.levels[to]
    if ratio <= tuning.risky_ratio:
        return True
    belief = view.beliefs.of(knob.role)
    if belief is None or belief < LOW_EDGE:
        return belief is not None
    cost: float = ratio ** (problem.objective.time_weight * belief) - 1.0
    return view.loss() + cost <= tuning.budget * view.runs


def _measured(view: View, which: int, to: int) -> tuple[float, float]:
    """Elasticities of time and power from a measured step like this one; zero where there is none."""
    found = _like(view, which, to)
    if found is None:
        return 0.0, 0.0
    at, a, b = found
    low, high = view.seen[moved(at, which, a)], view.seen[moved(at, which, b)]
    logs = view.problem.log_levels[which]
    ratio = logs[b] - logs[a]
    return (low.log_time - high.log_time) / ratio, (high.log_power - low.log_power) / ratio


def _like(view: View, which: int, to: int) -> tuple[Settings, int, int] | None:
    """A measured step like this one: the same step beside it, else the step before it; (setting, low, high)."""
    best, here = view.best, view.best[which]
    low, high = (to, here) if to < here else (here, to)
    rests = [r for r, levels in view.lanes(which).items() if len(levels) > 1 and low in levels and high in levels]
    if rests:
        mine = best[:which] + best[which + 1 :]
        rest = rests[0] if len(rests) == 1 else min(rests, key=lambda r: _apart(r, mine))
        return (*rest[:which], here, *rest[which:]), low, high
    below, above = view.line(which)
    if to < here:
        return None if above is None else (best, here, above)
    return None if below is None else (best, below, here)


def _apart(a: Settings, b: Settings) -> int:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


def _steps(view: View, which: int) -> Iterator[Step]:
    problem, here = view.problem, view.best[which]
    below, above = view.line(which)
    if below is None and here > 0:
        to = here - problem.stride_down[which][here]
        if allowed(view, which, to):
            yield Step(outlook(view, which, to), which, to, True)
    if above is None and here < view.tops[which]:
        to = min(here + problem.stride_up[which][here], view.tops[which])
        yield Step(outlook(view, which, to), which, to, True)
    inner = _between(view, which, below, above)
    if inner is not None and moved(view.best, which, inner.to) not in view.seen:
        yield inner


def _smallest(view: View, which: int) -> Iterator[int]:
    problem, here = view.problem, view.best[which]
    down, up = problem.finest_down[which][here], problem.finest_up[which][here]
    below, above = view.line(which)
    if here - down >= 0 and down < problem.stride_down[which][here] and below is None:
        yield here - down
    if here + up <= view.tops[which] and up < problem.stride_up[which][here] and above is None:
        yield here + up


def _between(view: View, which: int, below: int | None, above: int | None) -> Step | None:
    """A level between known neighbours: the vertex of the parabola through them, or part of the way to one."""
    problem, here = view.problem, view.best[which]
    down, up = problem.finest_down[which][here], problem.finest_up[which][here]
    wall_below = below is not None and _wall(view, which, below)
    wall_above = above is not None and _wall(view, which, above)
    if below is not None and above is not None and not (wall_below or wall_above):
        return _vertex(view, which, below, above)
    promise = -2.0 * problem.tuning.worth
    if below is not None and here - below > down:
        return Step(promise, which, here - max(down, (here - below) // (2 if wall_below else 3)), False)
    if above is not None and above - here > up:
        return Step(promise, which, here + max(up, (above - here) // (2 if wall_above else 3)), False)
    return None


def _vertex(view: View, which: int, below: int, above: int) -> Step | None:
    problem, here = view.problem, view.best[which]
    logs = problem.log_levels[which]
    x0, x1 = logs[below] - logs[here], logs[above] - logs[here]
    floor = view.score[view.best]
    y0 = (view.score[moved(view.best, which, below)] - floor) / x0
    y1 = (view.score[moved(view.best, which, above)] - floor) / x1
    curvature = (y0 - y1) / (x0 - x1)
    if curvature <= 0:
        return None
    slope = y0 - curvature * x0
    at = -0.5 * slope / curvature
    to = min(range(below, above + 1), key=lambda i: abs(logs[i] - logs[here] - at))
    if -problem.finest_down[which][here] < to - here < problem.finest_up[which][here]:
        return None
    return Step((curvature * at + slope) * at - problem.tuning.worth, which, to, False)


def _wall(view: View, which: int, level: int) -> bool:
    return view.score[moved(view.best, which, level)] - view.score[view.best] > 0.5 * WALL
