"""How clocks of measured rows are read.

A file of its own, without msgspec: campaigns read it on a bare GPU node.
"""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class MeasuredClockCoefficients(Coefficients):
    """How clocks of measured rows are read."""

    top_share: float  # of the top clock, below which the power limit held the clock down


MEASURED_CLOCKS = load_coefficients("measured_clocks", MeasuredClockCoefficients)
TOP_CLOCK_SHARE = MEASURED_CLOCKS.top_share
