"""The fine step: settings around the best that are worth a try, and what they might bring.

With time elasticity s (the sensitivity) and power elasticity e, lowering a knob by the log ratio x changes
the score of E · D^k by (w·s - e)·x, w = k + 1. Where a like step was measured, s and e are read off; elsewhere
s comes from the beliefs and e from what cards do. The outlook is optimistic: it says whether a step is worth a
try, not what it will bring.
"""

from __future__ import annotations

from operator import sub
from typing import NamedTuple

from wattcast.manage.knobs import Settings
from wattcast.manage.objective import WALL
from wattcast.manage.sensitivity import LOW_EDGE
from wattcast.manage.view import IDLE_KNOB, View, moved

LEAST_ELASTICITY = 0.05
MOST_TRADED = 3  # levels one knob may go down for one level of another


class Step(NamedTuple):
    """One knob to another level; ``outer`` when it leads beyond what was tried on its line."""

    promise: float  # change of score, negative is good
    which: int
    to: int
    outer: bool


def steps(view: View) -> tuple[list[Step], list[tuple[int, int]]]:
    """Fine steps worth looking at, and the smallest ones as (knob, level), of every knob that may be turned."""
    wide: list[Step] = []
    small: list[tuple[int, int]] = []
    for which in view.problem.turns:
        below, above = view.line(which)
        if below is None or above is None:
            _outwards(view, which, below, above, wide, small)
        if below is not None or above is not None:
            inner = _between(view, which, below, above)
            if inner is not None and view.lines[which].along[inner.to] not in view.seen:
                wide.append(inner)
    return wide, small


def fine(view: View, found: list[Step]) -> Settings | None:
    """All promising knobs down together, else the most promising single step, else None."""
    best, capped = view.best, view.problem.objective.cap_w is not None
    least = -view.problem.tuning.worth
    worth = [step for step in found if step.promise < least]
    worth.sort()
    if len(worth) > 1:
        down = {s.which: s.to for s in worth if s.outer and s.to < best[s.which] and _keeps(view, s)}
        if len(down) > 1:
            joint = tuple([down.get(i, level) for i, level in enumerate(best)])
            if joint not in view.seen:
                return joint
    for step in worth:
        if _keeps(view, step):
            return view.lines[step.which].along[step.to]
    return trade(view) if capped else None


def _keeps(view: View, step: Step) -> bool:
    """Whether a step keeps to the cap: downwards from a setting that does, always."""
    if step.to < view.best[step.which] and not view.over_cap:
        return True
    return view.permits(view.lines[step.which].along[step.to])


def polish(view: View, found: list[tuple[int, int]]) -> Settings | None:
    """The smallest step beyond what was tried, where it cannot cost much and a fine step is larger."""
    best, most = view.best, view.problem.tuning.polish
    for which, to in found:
        if outlook(view, which, to) < most and (to > best[which] or allowed(view, which, to)):
            settings = view.lines[which].along[to]
            if view.permits(settings):
                return settings
    return None


def trade(view: View) -> Settings | None:
    """Under a cap: one knob down, by as little as makes room, for another up, when both together promise a gain.

    A knob whose fall was never measured is lowered alone first: its power is what the room is reckoned from.
    """
    best, seen, turns, least = view.best, view.seen, view.problem.turns, -view.problem.tuning.worth
    rises = sorted([(outlook(view, up, best[up] + 1), up) for up in turns if best[up] < view.tops[up]])
    if not rises:
        return None
    offers: list[tuple[float, Settings]] = []
    for down in turns:
        here, logs = best[down], view.problem.log_levels[down]
        if here == 0:
            continue
        known, along = view.line(down)[0] is not None, view.lines[down].along
        slope = outlook(view, down, here - 1) / (logs[here] - logs[here - 1])
        lowest = max(here - MOST_TRADED, 0)
        if rises[0][0] + slope * (logs[here] - logs[lowest if slope < 0.0 else here - 1]) >= least:
            continue  # not even the best rise for the best fall
        for to in range(here - 1, lowest - 1, -1):
            fall = slope * (logs[here] - logs[to])
            for rise, up in rises:
                if rise + fall >= least:
                    break
                if up != down and (traded := moved(along[to], up, best[up] + 1)) not in seen:
                    offers.append((rise + fall, traded if known else along[here - 1]))
    wanted = (to for _, to in sorted(offers) if to not in seen)
    return next((to for to in wanted if view.permits(to)), None)


def outlook(view: View, which: int, to: int) -> float:
    """The best change of score that moving a knob from the best setting to a level could bring."""
    found = view.outlooks.get((which, to))
    if found is None:
        problem, here = view.problem, view.best[which]
        logs = problem.log_levels[which]
        s, e = _measured(view, which, to, logs)
        if -IDLE_KNOB < s < IDLE_KNOB and -IDLE_KNOB < e < IDLE_KNOB:  # nothing known, or not what held the card
            low, high = view.bounds(which)
            s, e = (low, problem.elastic[which]) if to < here else (high, LEAST_ELASTICITY)
        found = view.outlooks[which, to] = (problem.time_weight * s - e) * (logs[here] - logs[to])
    return found


def allowed(view: View, which: int, to: int) -> bool:
    """Whether lowering a knob this far may be tried: not where it could cost more than it can save."""
    problem, here = view.problem, view.best[which]
    if to >= problem.safe[which][here]:
        return True
    levels, tuning = problem.lattice.knobs[which].levels, problem.tuning
    ratio = levels[here] / levels[to]
    belief = view.beliefs.of(problem.roles[which])
    if belief is None or belief < LOW_EDGE:
        return belief is not None
    cost: float = ratio ** (problem.objective.time_weight * belief) - 1.0
    return view.loss() + cost <= tuning.budget * view.runs


def _measured(view: View, which: int, to: int, logs: tuple[float, ...]) -> tuple[float, float]:
    """Elasticities of time and power from a measured step like this one; zero where there is none.

    Like it is the same step beside it, else the step before it on the same line.
    """
    here, mine, seen = view.best[which], view.lines[which].others, view.seen
    low, high = (to, here) if to < here else (here, to)
    others, nearest = None, 0
    pairs = view.lanes[which].pairs
    if not pairs:
        return 0.0, 0.0
    own = pairs.get(mine)
    if own is not None and to in own:
        others = mine
    else:
        for rest, levels in pairs.items():
            if low in levels and high in levels:
                apart = sum(map(abs, map(sub, rest, mine)))
                if others is None or apart < nearest:
                    others, nearest = rest, apart
                    if apart == 1:
                        break
    if others is None:
        if own is None:
            return 0.0, 0.0
        below, above = view.line(which)
        if to < here:
            low, high = here, -1 if above is None else above
        else:
            low, high = -1 if below is None else below, here
        if low < 0 or high < 0:
            return 0.0, 0.0
        others = mine
    ahead, behind = others[:which], others[which:]
    _, low_time, low_power = seen[(*ahead, low, *behind)]
    _, high_time, high_power = seen[(*ahead, high, *behind)]
    ratio = logs[high] - logs[low]
    return (low_time - high_time) / ratio, (high_power - low_power) / ratio


def _outwards(
    view: View, which: int, below: int | None, above: int | None, wide: list[Step], small: list[tuple[int, int]]
) -> None:
    """Steps of one knob beyond what was tried; the smallest only where a fine step is larger."""
    problem, here, top = view.problem, view.best[which], view.tops[which]
    if below is None and here > 0:
        stride, finest = problem.stride_down[which][here], problem.finest_down[which][here]
        if allowed(view, which, here - stride):
            wide.append(Step(outlook(view, which, here - stride), which, here - stride, True))
        if finest < stride and here - finest >= 0:
            small.append((which, here - finest))
    if above is None and here < top:
        stride, finest = problem.stride_up[which][here], problem.finest_up[which][here]
        to = min(here + stride, top)
        wide.append(Step(outlook(view, which, to), which, to, True))
        if finest < stride and here + finest <= top:
            small.append((which, here + finest))


def _between(view: View, which: int, below: int | None, above: int | None) -> Step | None:
    """A level between known neighbours: the vertex of the parabola through them, or part of the way to one."""
    problem, here = view.problem, view.best[which]
    room_below = below is not None and here - below > problem.finest_down[which][here]
    room_above = above is not None and above - here > problem.finest_up[which][here]
    if not (room_below or room_above):
        return None
    wall_below = below is not None and _wall(view, which, below)
    wall_above = above is not None and _wall(view, which, above)
    if below is not None and above is not None and not (wall_below or wall_above):
        return _vertex(view, which, below, above)
    promise = -2.0 * problem.tuning.worth
    if below is not None and room_below:
        down = problem.finest_down[which][here]
        return Step(promise, which, here - max(down, (here - below) // (2 if wall_below else 3)), False)
    if above is not None and room_above:
        up = problem.finest_up[which][here]
        to = here + max(up, (above - here) // (2 if wall_above else 3))
        return Step(promise, which, max(min(to, view.room(which)), here + up), False)
    return None


def _vertex(view: View, which: int, below: int, above: int) -> Step | None:
    problem, here = view.problem, view.best[which]
    logs = problem.log_levels[which]
    x0, x1 = logs[below] - logs[here], logs[above] - logs[here]
    floor = view.score[view.best]
    y0 = (view.score[view.lines[which].along[below]] - floor) / x0
    y1 = (view.score[view.lines[which].along[above]] - floor) / x1
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
    return view.score[view.lines[which].along[level]] - view.score[view.best] > 0.5 * WALL
