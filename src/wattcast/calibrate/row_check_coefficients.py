"""When rows of whole models are refused, noted or taken for bound by the host."""

from __future__ import annotations

from wattcast.coefficients import Coefficients, load_coefficients


class RowCheckCoefficients(Coefficients):
    """How far rows may be from their forecast, from one another and from themselves."""

    far: float  # measured over forecast beyond this factor: a unit was mixed up
    contradiction: float  # two rows of one thing further apart than this cannot both be right
    noted: float  # further apart than this, and they are noted
    energy_mismatch: float  # relative, between energy and power x latency of one row
    lowest_clock: float  # of a card whose lowest clock nobody publishes, over its highest
    lowest_power: float  # that a row may state, over the power limit
    highest_power: float  # as lowest_power, at most
    host_bound_change: float  # of the latency of a row bound by the host, when launches cost half


ROW_CHECKS = load_coefficients("calibration_rows", RowCheckCoefficients)
