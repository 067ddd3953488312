"""Margins with which a service is planned and a simulated run is judged."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class PlanCoefficients(Coefficients):
    """How close bounds and simulations are, and when a run has a steady state."""

    bound_slack: float  # of the bound of a replica's steps, which a simulated one may beat so
    lone_slack: float  # of the predicted time of a lone request, which interpolated steps may beat
    close_capacity: float  # a rate that fails over one that does not, once both are close enough
    busy_most: float  # of what a replica serves that never lacks requests
    served_share: float  # of the offered requests, below which the rest is lost
    reached_budget: float  # of a power budget, from which on power is said to be the limit
    ended_share: float  # of a crowd of requests, after which steps are emptier
    idle_share: float  # of what one replica serves, below which nothing is the limit
    steady_ends: int  # requests that must end in a window for a steady state
    growth_share: float  # of the arrivals in the window that must pile up
    limit_shares: tuple[float, ...]  # of a card's power limit that are tried where energy counts
    clock_shares: tuple[float, ...]  # likewise, of its highest clock
    most_sequences: tuple[float, ...]  # of a step, that are tried where time per token is bound
    fewer_tokens: tuple[float, ...]  # of a step, that are tried too where it is the limit
    most_nodes: int  # of one replica
    waves: int  # requests of a run over those that fill a step
    growth_deviations: float  # standard deviations of Poisson arrivals that must be exceeded


PLAN = load_coefficients("plan", PlanCoefficients)
