"""What single coefficients of moving a forecast by a card's own rows mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wattcast.calibrate.forecast_shift import (
    ShrinkageLevel,
    forecast_deviation,
    shrink_towards_forecast,
)
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import forecast_bundle
from wattcast.predictor.bundle.bundle_file import ResidualEnds


def shrink(log_ratios: list[float], spread: float = 0.1) -> float:
    """Return by how much rows move a forecast whose own deviation and theirs are ``spread``."""
    y = np.array(log_ratios)
    theta = shrink_towards_forecast(
        residual=lambda theta: y - theta[0],
        slopes=lambda theta: np.ones((len(y), 1)),
        levels=[ShrinkageLevel([0], spread)],
        scale=np.full(len(y), spread),
    )
    return float(theta[0])


def test_one_row_three_deviations_off_moves_a_forecast_by_more_than_half_of_that() -> None:
    """It says as much of the spread, which the prior leaves open to a factor of e, as of itself."""
    assert 0.5 < shrink([0.3]) / 0.3 < 0.7


def test_two_odd_rows_of_eight_hardly_move_a_forecast() -> None:
    """The mean of the rows is 0.19. Student's t leaves them a tenth of their pull [Lange1989]."""
    moved = shrink([0.05] * 6 + [0.6] * 2)
    assert 0.05 + 0.1 * 0.14 < moved < 0.05 + 0.2 * 0.14


def test_rows_of_a_family_are_never_taken_to_be_known_to_a_hundredth() -> None:
    """Operators repeat to 1 or 2 % from run to run; a family that seems better has few rows."""
    bundle = forecast_bundle(load_gpu("a100-sxm-80gb"))
    narrow = ResidualEnds((0.99, 1.01), (0.99, 1.01), 50)
    narrow_bundle = replace(bundle, residuals={**bundle.residuals, "gemm": narrow})
    assert 0.025 < forecast_deviation(narrow_bundle, "gemm", "latency") < 0.035
