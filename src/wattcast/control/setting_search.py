"""Choose the settings of a kernel's next run: a coarse target first, then fine steps, then
confirmation.

With time elasticity s (the sensitivity) and power elasticity e, lowering a knob by the log ratio x
changes the score of E · D^k by (w·s - e)·x, w = k + 1. Where a like step was measured, s and e are
read off it. Elsewhere s comes from the beliefs and e from what cards usually do. Such an estimate
is optimistic: it says whether a step is worth a try, not what it will bring."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from operator import sub
from typing import NamedTuple

from wattcast.control.controller_coefficients import CONTROLLER
from wattcast.control.plants import Settings
from wattcast.control.run_memory import RunMemory, SensitivityBeliefs
from wattcast.control.search_problem import (
    BOUND_PENALTY,
    IDLE_KNOB,
    SearchProblem,
    SearchView,
)
from wattcast.control.sensitivity_model import SENSITIVITIES

STEP = "fine"
CAPPED_STEP = "cap"

# Half of the way to a setting that breaks a bound, a third of it to another.
_TO_WALL, _TO_OTHER = 2, 3


class SearchMove(NamedTuple):
    """Hold the settings of the next run; ``settled`` when nothing is left to try."""

    settings: Settings
    settled: bool
    why: str


class FineStep(NamedTuple):
    """Move one knob to another level; ``outer`` when that leads beyond what was tried on its
    line.
    """

    promise: float  # change of score, negative is good
    which: int
    to: int
    outer: bool


def choose_next_move(
    problem: SearchProblem,
    memory: RunMemory,
    beliefs: SensitivityBeliefs | None,
    target: Settings | None,
) -> SearchMove:
    """Choose the settings of the next run.

    ``beliefs`` come from counters, or are sensed where None. ``target`` is the setting of the
    coarse step."""
    if not memory.seen:
        return SearchMove(problem.start, False, "start")
    view = SearchView(problem, memory, beliefs)
    if problem.capped is not None:
        return _choose_capped_move(view)
    opening = _choose_opening(view, target)
    if opening is not None:
        return opening
    step = _choose_step(view)
    if step is not None:
        return SearchMove(step, False, STEP)
    return _choose_end(view)


def _choose_capped_move(view: SearchView) -> SearchMove:
    """Choose the settings of the next run under a power cap."""
    tuning = view.problem.tuning
    doubtful = _choose_doubtful(view)
    if doubtful is not None:
        return SearchMove(doubtful, False, "bound")
    rival = _choose_rival(view, tuning.quick_runs)
    if rival is not None:
        return SearchMove(rival, False, "again")
    step = view.choose_under_cap()
    if step is not None:
        return SearchMove(step, False, CAPPED_STEP)
    return _choose_end(view)


def _choose_opening(view: SearchView, target: Settings | None) -> SearchMove | None:
    """Choose what comes before the search: the default, the coarse step and its doubts."""
    problem = view.problem
    seen = view.seen
    default = problem.default
    if default not in seen:
        return SearchMove(default, False, "default")
    if target is not None and target not in seen:
        return SearchMove(target, False, "coarse")
    sensing = choose_sensing_step(view)
    if sensing is not None:
        return SearchMove(sensing, False, "sense")
    doubtful = _choose_doubtful(view)
    if doubtful is not None:
        return SearchMove(doubtful, False, "bound")
    rival = _choose_rival(view, problem.tuning.quick_runs)
    if rival is not None:
        return SearchMove(rival, False, "again")
    return None


def _choose_end(view: SearchView) -> SearchMove:
    """Settle on the best setting once it is surely better than the default; until then, run both in
    turn.
    """
    tuning = view.problem.tuning
    rival = _choose_rival(view, tuning.rival_runs)
    if rival is not None:
        return SearchMove(rival, False, "again")
    default = view.default
    best = view.best
    score = view.score
    if best != default:
        if default not in score:
            return SearchMove(best, True, "settled")
        gain = score[default] - score[best]
        if gain > tuning.verified * view.error(default, best):
            return SearchMove(best, True, "settled")
        fewest = view.fewest_runs(default, best)
        if view.seen[fewest].runs < tuning.default_runs:
            return SearchMove(fewest, False, "verify")
    return SearchMove(view.problem.default, True, "settled")


def choose_sensing_step(view: SearchView) -> Settings | None:
    """Choose, where there are no counters, one step down of the core clock, which tells compute
    from memory.

    It is repeated while a risky step of the memory clock depends on an answer that scatter leaves
    open."""
    if view.believed is not None:
        return None
    problem = view.problem
    seen = view.seen
    high = view.default
    sensing = problem.sensing_step(high)
    if sensing is None or high not in seen:
        return None
    low, ratio = sensing
    if low not in seen:
        return low
    bandwidth = view.beliefs.bandwidth
    if bandwidth is None or not _is_memory_step_risky(view):
        return None

    # Standard error of the sensitivity, by the runs of both settings.
    tuning = problem.tuning
    time_sigma = view.memory.time_sigma(tuning.prior_sigma / problem.time_weight)
    error = time_sigma * math.sqrt(1.0 / seen[low].runs + 1.0 / seen[high].runs) / ratio
    is_open = abs(bandwidth - SENSITIVITIES.low_edge) < tuning.confident * error
    fewest = view.fewest_runs(low, high)
    return fewest if is_open and seen[fewest].runs < tuning.rival_runs else None


def _is_memory_step_risky(view: SearchView) -> bool:
    """Tell whether the next step down of the memory clock is untried and large."""
    problem = view.problem
    knob = problem.memory
    if knob is None:
        return False
    here = view.best[knob]
    if here == 0 or view.neighbours(knob)[0] is not None:
        return False
    levels = problem.lattice.knobs[knob].levels
    below = here - problem.stride_down[knob][here]
    return levels[here] / levels[below] > problem.tuning.risky_ratio


def _choose_rival(view: SearchView, most_runs: int) -> Settings | None:
    """Choose the least tried setting that scatter does not tell from the best, or the best
    itself.
    """
    seen = view.seen
    score = view.score
    close = [settings for settings in view.close_rivals if seen[settings].runs < most_runs]
    if not close:
        return None
    return min([*close, view.best], key=lambda settings: (seen[settings].runs, score[settings]))


def _choose_doubtful(view: SearchView) -> Settings | None:
    """Choose a setting that would be best if it surely kept its bound, or the default that it is
    compared with.
    """
    if not view.open_bounds:
        return None
    most_runs = view.problem.tuning.default_runs
    lowest = min(view.score[view.best], BOUND_PENALTY + min(view.open_bounds.values()))
    first = None
    for settings, score in view.open_bounds.items():
        if score < lowest and view.seen[settings].runs < most_runs:
            first = settings
            lowest = score
    default = view.problem.default
    if first is None or default not in view.seen:
        return first
    return view.fewest_runs(first, default)


def _list_steps(view: SearchView) -> tuple[list[FineStep], list[tuple[int, int]]]:
    """List the fine steps worth a try, best first, and the smallest steps as (knob, level), of
    every free knob.
    """
    least = -view.problem.tuning.worth
    steps: list[FineStep] = []
    smallest: list[tuple[int, int]] = []
    for which in view.problem.turns:
        below, above = view.neighbours(which)
        if below is None and view.best[which] > 0:
            _add_step_down(view, which, steps, smallest)
        if above is None and view.best[which] < view.tops[which]:
            _add_step_up(view, which, steps, smallest)
        if below is None and above is None:
            continue
        inner = _step_between(view, which, below, above)
        if inner is None or inner.promise >= least:
            continue
        if view.lines[which].along[inner.to] not in view.seen:
            steps.append(inner)
    return sorted(steps), smallest


def _add_step_down(
    view: SearchView,
    which: int,
    steps: list[FineStep],
    smallest: list[tuple[int, int]],
) -> None:
    """Add the step of a knob below all levels tried, where it is worth a try and no risk."""
    problem = view.problem
    here = view.best[which]
    stride = problem.stride_down[which][here]
    finest = problem.finest_down[which][here]
    if _is_step_allowed(view, which, here - stride):
        promise = _estimate_change(view, which, here - stride)
        if promise < -problem.tuning.worth:
            steps.append(FineStep(promise, which, here - stride, True))
    if finest < stride and here >= finest:
        smallest.append((which, here - finest))


def _add_step_up(
    view: SearchView,
    which: int,
    steps: list[FineStep],
    smallest: list[tuple[int, int]],
) -> None:
    """Add the step of a knob above all levels tried, where it is worth a try."""
    problem = view.problem
    here = view.best[which]
    top = view.tops[which]
    stride = problem.stride_up[which][here]
    finest = problem.finest_up[which][here]
    to = min(here + stride, top)
    promise = _estimate_change(view, which, to)
    if promise < -problem.tuning.worth:
        steps.append(FineStep(promise, which, to, True))
    if finest < stride and here + finest <= top:
        smallest.append((which, here + finest))


def _step_between(
    view: SearchView,
    which: int,
    below: int | None,
    above: int | None,
) -> FineStep | None:
    """Find a level between neighbours that were tried: the vertex of the parabola through them, or
    part of the way to one.
    """
    problem = view.problem
    here = view.best[which]
    down = problem.finest_down[which][here]
    up = problem.finest_up[which][here]
    room_below = 0 if below is None else here - below
    room_above = 0 if above is None else above - here
    if room_below <= down and room_above <= up:
        return None
    is_wall_below = below is not None and _breaks_bound(view, which, below)
    is_wall_above = above is not None and _breaks_bound(view, which, above)
    if below is not None and above is not None and not (is_wall_below or is_wall_above):
        return _find_vertex(view, which, below, above)

    # Half of the way to a setting that breaks a bound, a third of it to another.
    promise = -2.0 * problem.tuning.worth
    if room_below > down:
        part = room_below // (_TO_WALL if is_wall_below else _TO_OTHER)
        return FineStep(promise, which, here - max(down, part), False)
    part = room_above // (_TO_WALL if is_wall_above else _TO_OTHER)
    return FineStep(promise, which, here + max(up, part), False)


def _breaks_bound(
    view: SearchView,
    which: int,
    level: int,
) -> bool:
    score = view.score[view.lines[which].along[level]]
    return score - view.score[view.best] > 0.5 * BOUND_PENALTY


def _find_vertex(
    view: SearchView,
    which: int,
    below: int,
    above: int,
) -> FineStep | None:
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
    steps, smallest = _list_steps(view)
    joint = _join_steps_down(view, steps)
    if joint is not None and joint not in view.seen:
        return joint
    for step in steps:
        return view.lines[step.which].along[step.to]
    for which, to in smallest:
        is_cheap = _estimate_change(view, which, to) < view.problem.tuning.polish
        is_up = to > view.best[which]
        if is_cheap and (is_up or _is_step_allowed(view, which, to)):
            return view.lines[which].along[to]
    return None


def _join_steps_down(view: SearchView, steps: list[FineStep]) -> Settings | None:
    """Return the settings with all promising steps down beyond what was tried; None for fewer than
    two.
    """
    if len(steps) < 2:
        return None
    best = view.best
    joint = list(best)
    count = 0
    for step in steps:
        if step.outer and step.to < best[step.which]:
            joint[step.which] = step.to
            count += 1
    return tuple(joint) if count > 1 else None


def _estimate_change(
    view: SearchView,
    which: int,
    to: int,
) -> float:
    """Estimate the best change of score that moving a knob from the best setting to a level could
    bring.
    """
    problem = view.problem
    here = view.best[which]
    logs = problem.log_levels[which]
    s, e = _measured_elasticities(view, which, to, logs)
    if -IDLE_KNOB < s < IDLE_KNOB and -IDLE_KNOB < e < IDLE_KNOB:
        # Nothing is known, or the knob was not what held the card.
        low, high = view.beliefs.bounds(problem.roles[which], problem.has_units)
        if to < here:
            s = low
            e = problem.elastic[which]
        else:
            s = high
            e = CONTROLLER.least_elasticity
    return (problem.time_weight * s - e) * (logs[here] - logs[to])


def _is_step_allowed(
    view: SearchView,
    which: int,
    to: int,
) -> bool:
    """Tell whether lowering a knob this far may be tried: not where it could cost more than it can
    save.
    """
    problem = view.problem
    here = view.best[which]
    if to >= problem.safe[which][here]:
        return True
    belief = view.beliefs.sensitivity_to(problem.roles[which])
    if belief is None or belief < SENSITIVITIES.low_edge:
        return belief is not None
    levels = problem.lattice.knobs[which].levels
    cost: float = (levels[here] / levels[to]) ** (problem.time_weight * belief) - 1.0
    return view.loss() + cost <= problem.tuning.budget * view.runs


def _measured_elasticities(
    view: SearchView,
    which: int,
    to: int,
    logs: tuple[float, ...],
) -> tuple[float, float]:
    """Return the elasticities of time and power from a measured step like this one; zero where
    there is none.

    The same step on the nearest parallel line is like it, else the step before it on the same line.
    """
    pairs = view.knobs[which].pairs
    if not pairs:
        return 0.0, 0.0
    here = view.best[which]
    other_levels = view.lines[which].others
    low = min(to, here)
    high = max(to, here)
    levels = pairs.get(other_levels)
    if levels is None or to not in levels:
        parallel = _find_parallel(pairs, other_levels, low, high)
        if parallel is not None:
            other_levels = parallel
        elif levels is None:
            return 0.0, 0.0
        else:
            low, high = _find_step_before(view, which, to)
            if low < 0 or high < 0:
                return 0.0, 0.0
    ahead = other_levels[:which]
    behind = other_levels[which:]
    _, low_time, low_power = view.seen[(*ahead, low, *behind)]
    _, high_time, high_power = view.seen[(*ahead, high, *behind)]
    ratio = logs[high] - logs[low]
    return (low_time - high_time) / ratio, (high_power - low_power) / ratio


def _find_parallel(
    pairs: Mapping[Settings, tuple[int, ...]],
    here_others: Settings,
    low: int,
    high: int,
) -> Settings | None:
    """Return the nearest line on which both levels of a knob were tried, by its other levels."""
    nearest = None
    nearest_apart = 0
    for other_levels, levels in pairs.items():
        if low in levels and high in levels:
            apart = sum(map(abs, map(sub, other_levels, here_others)))
            if nearest is None or apart < nearest_apart:
                nearest = other_levels
                nearest_apart = apart
                if apart == 1:
                    break
    return nearest


def _find_step_before(
    view: SearchView,
    which: int,
    to: int,
) -> tuple[int, int]:
    """Return the ends of the step on the other side of the best level; -1 where none was tried."""
    here = view.best[which]
    below, above = view.neighbours(which)
    if to < here:
        return here, -1 if above is None else above
    return -1 if below is None else below, here
