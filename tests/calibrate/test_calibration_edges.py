"""What single coefficients of calibration mean."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.calibrate.calibration import FactorFit, shrink_ends
from wattcast.calibrate.measured_clocks import TOP_CLOCK_SHARE


def test_four_rows_that_are_right_halve_the_variance_of_the_forecast() -> None:
    low, high = shrink_ends((0.8, 1.25), np.zeros(4))
    assert np.log(low) == pytest.approx(np.log(0.8) / np.sqrt(2.0))
    assert np.log(high) == pytest.approx(np.log(1.25) / np.sqrt(2.0))


def _score(deviations: float) -> float:
    one = np.array([deviations])
    nothing = np.zeros(1)
    fit = FactorFit((), nothing, nothing, nothing, nothing, one, np.ones(1), 0.0)
    return fit.score()


def test_a_row_two_and_a_half_deviations_off_counts_less_than_its_square() -> None:
    assert _score(1.8) == pytest.approx(1.8**2)
    assert 2.5 * 2.0 < _score(2.5) < 2.5**2 - 0.1


def test_a_row_one_step_of_its_clock_below_the_top_was_held_down() -> None:
    """Clocks of an H200 move in steps of 15 MHz, and means of sensors round by a MHz."""
    assert 1965e6 < TOP_CLOCK_SHARE * 1980e6 < 1979e6
