"""Which settings to run next, given what was seen: a pure function of the ledger.

Nothing is remembered of the search itself: at every run the next step is worked out from the ledger alone,
so a revert is simply that the best setting is again the best, and isolation of a guilty knob is that each
knob has a line of its own. Order: the default; back under the cap; the coarse target; sensing; close rivals
once more; fine steps; rivals until told apart; and last the check that the default is really beaten.
"""

from __future__ import annotations

from typing import NamedTuple

from wattcast.manage import cap
from wattcast.manage.beliefs import Beliefs
from wattcast.manage.knobs import Settings
from wattcast.manage.ledger import Ledger
from wattcast.manage.problem import Problem
from wattcast.manage.sensitivity import LOW_EDGE
from wattcast.manage.steps import fine, polish, steps
from wattcast.manage.view import View


class Move(NamedTuple):
    """Settings for the next run; ``settled`` when nothing is left to try."""

    settings: Settings
    settled: bool
    why: str


def next_move(problem: Problem, ledger: Ledger, beliefs: Beliefs | None, target: Settings | None) -> Move:
    """The settings of the next run. ``beliefs`` come from counters; None: sense them."""
    seen = ledger.seen
    if not seen:
        return Move(problem.start, False, "start")
    view = View(problem, ledger, beliefs, problem.reckoned(ledger))
    if problem.default not in seen and view.permits(problem.default):
        return Move(problem.default, False, "default")
    if view.over_cap:
        lower = cap.descend(problem.lattice, seen, beliefs, problem.objective.log_cap)
        if lower is not None:
            return Move(lower, False, "cap")
    if target is not None and target not in seen and view.permits(target):
        return Move(target, False, "coarse")
    return _probe(view) or verified(view)


def _probe(view: View) -> Move | None:
    tuning = view.problem.tuning
    if (found := sense(view)) is not None:
        return Move(found, False, "sense")
    if (found := rival(view, tuning.quick_runs)) is not None:
        return Move(found, False, "again")
    fine_steps, smallest_steps = steps(view)
    if (found := fine(view, fine_steps)) is not None or (found := polish(view, smallest_steps)) is not None:
        return Move(found, False, "fine")
    if (found := rival(view, tuning.rival_runs)) is not None:
        return Move(found, False, "again")
    return None


def sense(view: View) -> Settings | None:
    """Without counters, one step down of the core clock tells compute from memory.

    Tried again while a risky step hangs on an answer that scatter leaves open.
    """
    if not view.measured:
        return None
    problem, seen, sensing = view.problem, view.seen, view.problem.sensing(view.default)
    if sensing is None or view.default not in seen:
        return None
    low, high = sensing[0], view.default
    if low not in seen:
        return low if view.permits(low) else None
    if view.beliefs.bandwidth is None or not _risk_ahead(view):
        return None
    fewest = min(low, high, key=lambda s: seen[s].runs)
    is_open = abs(view.beliefs.bandwidth - LOW_EDGE) < problem.tuning.confident * view.sense_error()
    return fewest if is_open and seen[fewest].runs < problem.tuning.rival_runs else None


def rival(view: View, most_runs: int) -> Settings | None:
    """The least tried setting that scatter does not tell from the best, or the best itself."""
    seen, score = view.seen, view.score
    close = [s for s in view.close() if seen[s].runs < most_runs]
    if not close:
        return None
    return min([*close, view.best], key=lambda s: (seen[s].runs, score[s]))


def verified(view: View) -> Move:
    """The best setting, once it is surely better than the default; until then, both in turn."""
    default, best, tuning = view.default, view.best, view.problem.tuning
    if best == default:
        return Move(view.problem.default, True, "settled")
    if default not in view.score:
        return Move(best, True, "settled")
    if view.score[default] - view.score[best] > tuning.verified * view.error(default, best):
        return Move(best, True, "settled")
    fewest = min((default, best), key=lambda s: view.seen[s].runs)
    if view.seen[fewest].runs < tuning.default_runs:
        return Move(fewest, False, "verify")
    return Move(view.problem.default, True, "settled")


def _risk_ahead(view: View) -> bool:
    """Whether a risky step of the memory clock is still to be tried."""
    problem, which = view.problem, view.problem.memory
    if which is None or view.best[which] == 0 or view.line(which)[0] is not None:
        return False
    here, levels = view.best[which], problem.lattice.knobs[which].levels
    return levels[here] / levels[here - problem.stride_down[which][here]] > problem.tuning.risky_ratio
