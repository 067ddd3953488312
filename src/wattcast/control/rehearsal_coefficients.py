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
    demand_spread: float  # deviation of the logarithm of what a perturbed kernel asks for
    power_spread: float  # as of demand, of the power coefficients of a perturbed card
    path_spread: float  # as of demand, of its memory path
    counter_spread: float  # as of demand, of its counters
    most_efficiency: float  # of the peak rate of its memory
    cost_error: float  # of the costs of a simulated engine at most, over their forecast
    shared_error: float  # share of that error which all kinds of step have in common
    actuation_s: float  # until a clock that was asked for is there
    cap_share: float  # of the budget, that a cap leaves by default
    oracle_kept: float  # share of the minutes in which an oracle must keep the limits


REHEARSAL = load_coefficients("rehearsals", RehearsalCoefficients)
