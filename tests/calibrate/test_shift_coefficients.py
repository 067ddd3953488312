"""What single coefficients of moving a forecast by a card's own rows mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from wattcast.calibrate import forecast_shift
from wattcast.calibrate.forecast_shift import (
    SHIFT,
    ShrinkageLevel,
    forecast_deviation,
    shrink_towards_forecast,
)
from wattcast.core.arrays import Array
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


@pytest.mark.parametrize(
    ("spread", "least", "most"),
    [
        (SHIFT.card_time, 0.58, 0.7),
        (SHIFT.card_energy, 0.58, 0.7),
        (SHIFT.module_energy, 0.52, 0.63),
        (SHIFT.family_time, 0.46, 0.58),
        (SHIFT.group_time, 0.35, 0.48),
    ],
    ids=["card_time", "card_energy", "module_energy", "family_time", "group_time"],
)
def test_one_row_that_may_be_a_tenth_off_moves_all_of_a_card_more_than_a_part(
    spread: float, least: float, most: float
) -> None:
    """A forecast knows a group of kernels better than a family, and this better than a card.

    It moves by some s² / (s² + 0.1²) of what the row is off: two thirds for all times or energies,
    half for a family, two fifths for a group of kernels.
    """
    y = np.array([0.05])
    theta = shrink_towards_forecast(
        residual=lambda theta: y - theta[0],
        slopes=lambda theta: np.ones((1, 1)),
        levels=[ShrinkageLevel([0], spread)],
        scale=np.array([0.1]),
    )
    assert least < float(theta[0]) / 0.05 < most


@dataclass(frozen=True)
class MadeRows:
    """Rows that are nothing but their places."""

    places: Array

    def __len__(self) -> int:
        return len(self.places)

    def select_rows(self, mask: Array) -> MadeRows:
        return MadeRows(self.places[mask])


@pytest.mark.parametrize(("errors", "is_taken"), [(1.35, False), (1.65, True)])
def test_a_further_level_must_gain_one_and_a_half_standard_errors(
    monkeypatch: pytest.MonkeyPatch, errors: float, is_taken: bool
) -> None:
    """Rows gain unevenly: their mean gain is so many of its standard errors."""
    count = 20
    spread = np.tile([1.0, -1.0], count // 2)
    standard_error = spread.std(ddof=1) / np.sqrt(count)
    gain = 0.01 * (errors * standard_error + spread)

    def log_ratio(rows: Any, gpu: Any, levels: Any) -> Array:
        return np.asarray((0.3 - gain if levels else np.full(count, 0.3))[rows.places])

    monkeypatch.setattr(
        forecast_shift, "assign_folds", lambda rows, folds: np.arange(len(rows)) % folds
    )
    mover = forecast_shift._Mover(
        sets=((), ("card",)),
        move=lambda rows, gpu, bundle, levels: cast(Any, levels),
        log_ratio=log_ratio,
    )
    nothing = cast(Any, None)
    rows = cast(Any, MadeRows(np.arange(count)))
    moved, _ = forecast_shift._best_levels(rows, nothing, nothing, mover)
    assert (moved.levels == ("card",)) is is_taken
