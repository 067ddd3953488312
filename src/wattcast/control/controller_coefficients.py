"""Load the constants of the controller, which its search, its memory and its policies share, and
those that estimate what a clock does to a card.
"""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class ControllerCoefficients(Coefficients):
    """How the controller searches settings, and when it believes what it sees."""

    probe_change: float  # a fine step changes a knob by about this much
    sense_change: float  # the sensing step changes the core clock by at least this much
    resolution: float  # settings closer than this are not told apart
    worth: float  # a step must promise this much of the score
    polish: float  # the smallest step is tried where it cannot cost more than this
    margin: float  # predicted sensitivities may be off by this
    measured_margin: float  # likewise, sensitivity to memory inferred from that to the core clock
    prior_sigma: float  # scatter of a score before any repeat is seen
    confident: float  # standard errors at which two settings are told apart
    quick_runs: int  # runs of a close rival before the search goes on
    rival_runs: int  # runs of a close rival at most
    default_runs: int  # runs of the default settings at most, while a gain over them is in doubt
    verified: float  # standard errors by which a setting must beat the default to replace it
    # a knob lowered by more than this ratio in one step may cost more than it can save
    risky_ratio: float
    prior_time: float  # scatter of log time before any repeat is seen
    bound_sigmas: float  # standard errors by which a time must keep to its bound
    bound_doubt: float  # settings closer than this to a bound are run several times
    bound_runs: int  # runs of such a setting before it counts as keeping the bound
    budget: float  # share of the objective that risky probes may cost
    surprise: float  # log change of time at unchanged settings that is taken for a new phase
    patience: int  # surprises, or unusable observations, in a row before acting on them
    rest: int  # runs a settled kernel is left alone between two looks at its memory
    # of the highest core clock by bin, on a card without a knob for units
    coarse_clock_alone: tuple[float, ...]
    least_probe: float  # a fine step may change a knob by this share of what it aims at
    most_loss: float  # of a run, in logs of the score, in the sum of what runs have cost
    # a knob that moves neither time nor power by more than this share of itself is not in force
    idle_knob: float
    least_elasticity: float  # of power over a knob that goes up, before it was measured
    surprise_sigmas: float  # standard deviations of log time beyond which a run is no scatter
    clock_tolerance: float  # of a clock that a card reports


class ClockEstimateCoefficients(Coefficients):
    """How time and power of a card follow its clock where no bundle says so."""

    held_share: float  # of its power limit that a card holds
    lowest_share: float  # of the top clock, below which nothing is forecast
    flat_to: float  # of the top clock, up to which the voltage is flat
    top_over_flat: float  # voltage at the top clock over the flat one
    idle_share: float  # of present power that is taken as idle power, where no bundle gives it


CONTROLLER = load_coefficients("controller", ControllerCoefficients)
ESTIMATES = load_coefficients("clock_estimates", ClockEstimateCoefficients)
