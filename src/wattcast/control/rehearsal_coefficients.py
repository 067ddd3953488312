"""How events, blocks and budgets of a rehearsal are laid out."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class RehearsalCoefficients(Coefficients):
    """How events, blocks and budgets of a rehearsal are laid out."""

    event_least_s: float  # of the span for each event
    event_begin: float  # of an event's part of the span, before it begins
    event_end: float  # likewise, when it ends
    safe_part: float  # equal shares of a budget over safe ones
    burst_s: float  # over which the steepest rise is looked for
    allowed_s: float  # that a limit may be passed in a row
    lock_share: float  # of the highest clock, that a first run locks where nobody says another
    block_s: float  # as before, then locked, by turns
    least_block_s: float  # of such a block
    settle_readings: int  # after a change, whose power is not counted
    planner_least_per_s: float  # requests of a replica at least
    planner_step: float  # of rates that are simulated, one over the next
    smoothing_floor: float  # of the power limit, that power smoothing keeps


REHEARSAL = load_coefficients("rehearsals", RehearsalCoefficients)
