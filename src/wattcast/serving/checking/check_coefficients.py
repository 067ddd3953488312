"""When a service that runs is said to differ from its plan."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class CheckCoefficients(Coefficients):
    """Margins of a check, as shares of what they are margins of."""

    false_alarms: float  # healthy services that may raise an alarm
    alike_load: float  # the highest rate of a group of windows, over its lowest
    length_change: float  # of a mean length, within which the traffic is the planned one
    clock_change: float  # within which the clock is the planned one
    limit_share: float  # of the power limit, above which the governor lowers clocks
    latency_drift: float  # of the time per token's error, for each doubling of load or lengths
    first_drift: float  # the same of the time to first token
    power_drift: float  # the same of power
    floor: float  # half-width that no figure's interval falls below
    response: float  # how far a simulated effect of a cause may be off, as a share of it


CHECK = load_coefficients("service_check", CheckCoefficients)
