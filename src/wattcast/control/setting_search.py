"""Choose the settings of a kernel's next run: a coarse target first, then fine steps, then
confirmation.

With time elasticity s (the sensitivity) and power elasticity e, lowering a knob by the log ratio x
changes the score of E · D^k by (w·s - e)·x, w = k + 1. Where a like step was measured, s and e are
read off it. Elsewhere s comes from the beliefs and e from what cards usually do. Such an estimate
is optimistic: it says whether a step is worth a try, not what it will bring."""

from __future__ import annotations

import math
from bisect import bisect_left
from operator import sub
from typing import NamedTuple

from wattcast.control.plants import Settings, move_knob
from wattcast.control.run_memory import RunMemory, SensitivityBeliefs, lower_below_cap
from wattcast.control.search_problem import BOUND_PENALTY, IDLE_KNOB, SearchProblem, SearchView
from wattcast.control.sensitivity_model import LOW_EDGE

LEAST_ELASTICITY = 0.05
STEP = "fine"
TRADING = "trade"  # the reason of a run after which trades of one knob for others are looked for
MOST_TRADED = 3  # levels one knob may go down for one level of another


class SearchMove(NamedTuple):
    """Hold the settings of the next run; ``settled`` when nothing is left to try."""

    settings: Settings
    settled: bool
    why: str
    turn: int = 0  # of the free knobs, the one whose trades the next decision looks for; 0 is none


class FineStep(NamedTuple):
    """Move one knob to another level; ``outer`` when that leads beyond what was tried on its line."""

    promise: float  # change of score, negative is good
    which: int
    to: int
    outer: bool


def choose_next_move(
    problem: SearchProblem,
    memory: RunMemory,
    beliefs: SensitivityBeliefs | None,
    target: Settings | None,
    turn: int = 0,
    settled: bool = False,
) -> SearchMove:
    """Choose the settings of the next run.

    ``beliefs`` come from counters, or are sensed where None. ``target`` is the setting of the
    coarse step. Under a cap, when no step of one knob is left, decisions of their own look for
    trades between two, for one knob after another; ``turn`` and ``settled`` are those of the move
    before."""
    seen = memory.seen
    if not seen:
        return SearchMove(problem.start, False, "start")
    view = SearchView(problem, memory, beliefs)
    if problem.default not in seen and view.permits(problem.default):
        return SearchMove(problem.default, False, "default")
    if view.over_cap:
        lower = lower_below_cap(problem.lattice, seen, beliefs, problem.objective.log_cap)
        if lower is not None:
            return SearchMove(lower, False, "cap")
    if target is not None and target not in seen and view.permits(target):
        return SearchMove(target, False, "coarse")
    if (found := choose_sensing_step(view)) is not None:
        return SearchMove(found, False, "sense")
    if (found := _choose_doubtful(view)) is not None:
        return SearchMove(found, False, "bound")
    if (found := _choose_rival(view, problem.tuning.quick_runs)) is not None:
        return SearchMove(found, False, "again")
    if turn == 0:
        if (found := _choose_step(view)) is not None:
            return SearchMove(found, False, STEP)
        if problem.objective.cap_w is not None and not settled:
            return SearchMove(view.best, False, TRADING, 1)
    else:
        if (found := _trade_knob(view, problem.turns[turn - 1])) is not None:
            return SearchMove(found, False, STEP)
        if turn < len(problem.turns):
            return SearchMove(view.best, False, TRADING, turn + 1)
    if (found := _choose_rival(view, problem.tuning.rival_runs)) is not None:
        return SearchMove(found, False, "again")
    # Settle on the best setting once it is surely better than the default; until then, run both in
    # turn
    default = view.default
    best = view.best
    score = view.score
    tuning = problem.tuning
    if best != default:
        if default not in score or score[default] - score[best] > tuning.verified * view.error(
            default, best
        ):
            return SearchMove(best, True, "settled")
        fewest = min((default, best), key=lambda s: seen[s].runs)
        if seen[fewest].runs < tuning.default_runs:
            return SearchMove(fewest, False, "verify")
    return SearchMove(problem.default, True, "settled")


def choose_sensing_step(view: SearchView) -> Settings | None:
    """Choose, where there are no counters, one step down of the core clock, which tells compute
    from memory.

    It is repeated while a risky step of the memory clock depends on an answer that scatter leaves
    open."""
    if not view.measured:
        return None
    problem = view.problem
    tuning = view.problem.tuning
    seen = view.seen
    high = view.default
    sensing = problem.sensing_step(high)
    if sensing is None or high not in seen:
        return None
    low, ratio = sensing
    if low not in seen:
        return low if view.permits(low) else None
    which = problem.memory
    if view.beliefs.bandwidth is None or which is None:
        return None
    here = view.best[which]
    levels = problem.lattice.knobs[which].levels
    if here == 0 or view.neighbours(which)[0] is not None:
        return None
    if levels[here] / levels[here - problem.stride_down[which][here]] <= tuning.risky_ratio:
        return None
    fewest = min(low, high, key=lambda s: seen[s].runs)
    time_sigma = view.memory.time_sigma(tuning.prior_sigma / problem.time_weight)
    error = (
        time_sigma * math.sqrt(1.0 / seen[low].runs + 1.0 / seen[high].runs) / ratio
    )  # of the sensitivity
    is_open = abs(view.beliefs.bandwidth - LOW_EDGE) < tuning.confident * error
    return fewest if is_open and seen[fewest].runs < tuning.rival_runs else None


def _choose_rival(view: SearchView, most_runs: int) -> Settings | None:
    """Choose the least tried setting that scatter does not tell from the best, or the best itself."""
    seen = view.seen
    score = view.score
    close = [s for s in view.close_rivals if seen[s].runs < most_runs]
    if not close:
        return None
    return min([*close, view.best], key=lambda s: (seen[s].runs, score[s]))


def _choose_doubtful(view: SearchView) -> Settings | None:
    """Choose a setting that would be best if it surely kept its bound, or the default that it is
    compared with.
    """
    if not view.open_bounds:
        return None
    seen = view.seen
    tuning = view.problem.tuning
    default = view.problem.default
    best = min(view.score[view.best], BOUND_PENALTY + min(view.open_bounds.values()))
    open_bounds = [
        s
        for s, score in view.open_bounds.items()
        if score < best and seen[s].runs < tuning.default_runs
    ]
    if not open_bounds:
        return None
    first = min(open_bounds, key=view.open_bounds.__getitem__)
    return min((first, default), key=lambda s: seen[s].runs) if default in seen else first


def _list_steps(view: SearchView) -> tuple[list[FineStep], list[tuple[int, int]]]:
    """List the fine steps worth a try, best first, and the smallest steps as (knob, level), of
    every free knob.
    """
    problem = view.problem
    least = -view.problem.tuning.worth
    steps: list[FineStep] = []
    smallest: list[tuple[int, int]] = []
    for which in problem.turns:
        below, above = view.neighbours(which)
        here = view.best[which]
        top = view.tops[which]
        if below is None and here > 0:
            stride = problem.stride_down[which][here]
            finest = problem.finest_down[which][here]
            if _is_step_allowed(view, which, here - stride):
                promise = _estimate_change(view, which, here - stride)
                if promise < least:
                    steps.append(FineStep(promise, which, here - stride, True))
            if finest < stride and here - finest >= 0:
                smallest.append((which, here - finest))
        if above is None and here < top:
            stride = problem.stride_up[which][here]
            finest = problem.finest_up[which][here]
            to = min(here + stride, top)
            promise = _estimate_change(view, which, to)
            if promise < least:
                steps.append(FineStep(promise, which, to, True))
            if finest < stride and here + finest <= top:
                smallest.append((which, here + finest))
        if below is not None or above is not None:
            inner = _step_between(view, which, below, above)
            if (
                inner is not None
                and inner.promise < least
                and view.lines[which].along[inner.to] not in view.seen
            ):
                steps.append(inner)
    return sorted(steps), smallest


def _step_between(
    view: SearchView, which: int, below: int | None, above: int | None
) -> FineStep | None:
    """Find a level between known neighbours: the vertex of the parabola through them, or part of
    the way to one.
    """
    problem = view.problem
    here = view.best[which]
    down = problem.finest_down[which][here]
    up = problem.finest_up[which][here]
    room_below = below is not None and here - below > down
    room_above = above is not None and above - here > up
    if not (room_below or room_above):
        return None
    wall_below = below is not None and _breaks_bound(view, which, below)
    wall_above = above is not None and _breaks_bound(view, which, above)
    if below is not None and above is not None and not (wall_below or wall_above):
        return _find_vertex(view, which, below, above)
    promise = -2.0 * problem.tuning.worth
    if below is not None and room_below:
        return FineStep(
            promise, which, here - max(down, (here - below) // (2 if wall_below else 3)), False
        )
    if above is not None and room_above:
        to = here + max(up, (above - here) // (2 if wall_above else 3))
        return FineStep(promise, which, max(min(to, view.highest_level(which)), here + up), False)
    return None


def _breaks_bound(view: SearchView, which: int, level: int) -> bool:
    return view.score[view.lines[which].along[level]] - view.score[view.best] > 0.5 * BOUND_PENALTY


def _find_vertex(view: SearchView, which: int, below: int, above: int) -> FineStep | None:
    """Find the lowest point of the parabola through the scores of the best and its two neighbours
    on a line.
    """
    problem = view.problem
    here = view.best[which]
    logs = problem.log_levels[which]
    x0 = logs[below] - logs[here]
    x1 = logs[above] - logs[here]
    floor = view.score[view.best]
    y0 = (view.score[view.lines[which].along[below]] - floor) / x0
    y1 = (view.score[view.lines[which].along[above]] - floor) / x1
    curvature = (y0 - y1) / (x0 - x1)
    if curvature <= 0:
        return None
    slope = y0 - curvature * x0
    at = -0.5 * slope / curvature
    to = bisect_left(logs, logs[here] + at, below, above)
    if to > below and logs[here] + at - logs[to - 1] <= logs[to] - logs[here] - at:
        to -= 1
    if -problem.finest_down[which][here] < to - here < problem.finest_up[which][here]:
        return None
    return FineStep((curvature * at + slope) * at - problem.tuning.worth, which, to, False)


def _choose_step(view: SearchView) -> Settings | None:
    """Choose all promising knobs down together, else the most promising single step, else the
    smallest step.

    The smallest one goes beyond what was tried, where it cannot cost much and a fine step is
    larger."""
    (steps, smallest), best = _list_steps(view), view.best
    if len(steps) > 1:
        down = {
            s.which: s.to for s in steps if s.outer and s.to < best[s.which] and _keeps_cap(view, s)
        }
        if len(down) > 1:
            joint = tuple([down.get(i, level) for i, level in enumerate(best)])
            if joint not in view.seen:
                return joint
    for step in steps:
        if _keeps_cap(view, step):
            return view.lines[step.which].along[step.to]
    for which, to in smallest:
        cheap = _estimate_change(view, which, to) < view.problem.tuning.polish
        if cheap and (to > best[which] or _is_step_allowed(view, which, to)):
            settings = view.lines[which].along[to]
            if view.permits(settings):
                return settings
    return None


def _keeps_cap(view: SearchView, step: FineStep) -> bool:
    """Tell whether a step from the best setting keeps to the cap; downwards from one that does, it
    always does.
    """
    return step.to <= view.highest_level(step.which) or (
        step.to < view.best[step.which] and not view.over_cap
    )


def _trade_knob(view: SearchView, which: int) -> Settings | None:
    """Raise a knob under a cap where other runs than the best say that there is room, or lower it
    for another's rise.

    It is lowered by as little as makes room, when fall and rise together promise a gain. A knob
    whose fall was never measured is lowered alone first, because its power says how much room there
    is."""
    best = view.best
    seen = view.seen
    least = -view.problem.tuning.worth
    here = best[which]
    logs = view.problem.log_levels[which]
    along = view.lines[which].along
    raised = [up for up in view.problem.turns if best[up] < view.tops[up]]
    rises = sorted([(_estimate_change(view, up, best[up] + 1), up) for up in raised])
    offers = [(rise, along[here + 1]) for rise, up in rises if up == which and rise < least]
    if here > 0:
        known = view.neighbours(which)[0] is not None
        slope = _estimate_change(view, which, here - 1) / (logs[here] - logs[here - 1])
        for to in range(here - 1, max(here - MOST_TRADED, 0) - 1, -1):
            fall = slope * (logs[here] - logs[to])
            for rise, up in rises:
                if rise + fall >= least:
                    break
                if up != which and (traded := move_knob(along[to], up, best[up] + 1)) not in seen:
                    offers.append((rise + fall, traded if known else along[here - 1]))
    return next((to for _, to in sorted(offers) if to not in seen and view.permits(to)), None)


def _estimate_change(view: SearchView, which: int, to: int) -> float:
    """Estimate the best change of score that moving a knob from the best setting to a level could
    bring.
    """
    problem = view.problem
    here = view.best[which]
    logs = problem.log_levels[which]
    s, e = _measured_elasticities(view, which, to, logs)
    if (
        -IDLE_KNOB < s < IDLE_KNOB and -IDLE_KNOB < e < IDLE_KNOB
    ):  # nothing known, or not what held the card
        low, high = view.beliefs.bounds(problem.roles[which], problem.has_units)
        s, e = (low, problem.elastic[which]) if to < here else (high, LEAST_ELASTICITY)
    return (problem.time_weight * s - e) * (logs[here] - logs[to])


def _is_step_allowed(view: SearchView, which: int, to: int) -> bool:
    """Tell whether lowering a knob this far may be tried: not where it could cost more than it can
    save.
    """
    problem = view.problem
    here = view.best[which]
    if to >= problem.safe[which][here]:
        return True
    belief = view.beliefs.sensitivity_to(problem.roles[which])
    if belief is None or belief < LOW_EDGE:
        return belief is not None
    levels = problem.lattice.knobs[which].levels
    cost: float = (levels[here] / levels[to]) ** (problem.time_weight * belief) - 1.0
    return view.loss() + cost <= problem.tuning.budget * view.runs


def _measured_elasticities(
    view: SearchView, which: int, to: int, logs: tuple[float, ...]
) -> tuple[float, float]:
    """Return the elasticities of time and power from a measured step like this one; zero where
    there is none.

    The same step on the nearest parallel line is like it, else the step before it on the same line.
    """
    here = view.best[which]
    mine = view.lines[which].others
    seen = view.seen
    low, high = (to, here) if to < here else (here, to)
    others = None
    nearest = 0
    pairs = view.knobs[which].pairs
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
                    others = rest
                    nearest = apart
                    if apart == 1:
                        break
    if others is None:
        if own is None:
            return 0.0, 0.0
        below, above = view.neighbours(which)
        if to < here:
            low = here
            high = -1 if above is None else above
        else:
            low = -1 if below is None else below
            high = here
        if low < 0 or high < 0:
            return 0.0, 0.0
        others = mine
    ahead = others[:which]
    behind = others[which:]
    _, low_time, low_power = seen[(*ahead, low, *behind)]
    _, high_time, high_power = seen[(*ahead, high, *behind)]
    ratio = logs[high] - logs[low]
    return (low_time - high_time) / ratio, (high_power - low_power) / ratio
