"""What the spreads of calibrating with whole models mean: how far one row moves a forecast.

A row that is d off moves a factor of spread s by s²/(s² + σ²)·d, where σ is what the row itself may
be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from wattcast.calibrate import calibration
from wattcast.calibrate.calibration import (
    CALIBRATION,
    FactorProblem,
    fit_factors,
)
from wattcast.calibrate.scoring import lowers_error
from wattcast.core.arrays import Array
from wattcast.predictor.bundle.calibrated import IDLE_OFFSET

OFF = 0.1  # how far the row is off, in logs


def pose(names: tuple[str, ...], noise: float, scatter: Mapping[str, float]) -> FactorProblem:
    """Pose one row whose logarithm is the sum of the factors' logarithms."""

    def add_logs(factors: Mapping[str, float]) -> Array:
        total = 0.0
        for name in names:
            factor = factors.get(name, 0.0 if name == IDLE_OFFSET else 1.0)
            total += factor if name == IDLE_OFFSET else np.log(factor)
        return np.array([total])

    rows = cast(Any, [None])
    return FactorProblem(rows, np.array([OFF]), noise, 1.0, add_logs, scatter)


def learn_share(name: str, noise: float, scatter: Mapping[str, float] | None = None) -> float:
    """Return by what share of its error a row moves a factor."""
    names = tuple(dict.fromkeys((name, *(scatter or {}))))
    problem = pose(names, noise, scatter or {})
    (theta,) = fit_factors((name,), problem, ()).theta
    return float(theta / OFF)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("compute", 0.75, 0.86),
        ("products", 0.66, 0.8),
        ("memory", 0.55, 0.68),
    ],
)
def test_one_row_moves_what_the_gpu_takes_by_three_fifths_to_four_fifths(
    name: str, least: float, most: float
) -> None:
    """A forecast is known less well the more of the chip stands behind a factor."""
    assert least < learn_share(name, CALIBRATION.latency_row_spread) < most


def test_one_row_moves_what_the_host_takes_by_less_than_its_spread_alone_would() -> None:
    """A run is as much as a quarter apart from the same run on another day (docs/method)."""
    scatter = {"launch": CALIBRATION.host_scatter}
    share = learn_share("launch", CALIBRATION.latency_row_spread, scatter)
    assert 0.74 < share < 0.84


@pytest.mark.parametrize(
    ("name", "least", "most"), [("energy", 0.9, 0.945), (IDLE_OFFSET, 0.6, 0.74)]
)
def test_one_row_moves_energies_by_most_of_what_it_is_off(
    name: str, least: float, most: float
) -> None:
    assert least < learn_share(name, CALIBRATION.power_row_spread) < most


def test_a_row_s_latency_is_known_less_well_than_its_power() -> None:
    """The clock, the cache and the host scatter times; watts are means over seconds."""
    ratio = CALIBRATION.latency_row_spread / CALIBRATION.power_row_spread
    assert 1.4 < ratio < 2.0


@pytest.mark.parametrize(("gain", "is_adopted"), [(0.8, False), (1.25, True)])
def test_a_factor_must_gain_a_standard_error(gain: float, is_adopted: bool) -> None:
    """The rule of one standard error [Breiman1984], here of eight rows."""
    before = np.full(8, 0.2)
    scatter = 0.01 * np.array([1.0, -1.0] * 4)
    standard_error = scatter.std(ddof=1) / np.sqrt(8)
    after = before - gain * standard_error + scatter
    assert lowers_error(before, after, CALIBRATION.least_errors) is is_adopted


@pytest.mark.parametrize(("gain", "is_taken"), [(3.5, False), (4.5, True)])
def test_one_more_factor_must_gain_two_standard_deviations(
    monkeypatch: pytest.MonkeyPatch, gain: float, is_taken: bool
) -> None:
    """Squared, as the loss of the rows left out is: a factor that means nothing gains about 1."""
    losses = {(): 20.0, ("compute",): 20.0 - gain}

    def fit_made_up(chosen: tuple[str, ...], problem: Any, every_name: tuple[str, ...]) -> Any:
        return SimpleNamespace(chosen=chosen, score=lambda: losses[chosen])

    monkeypatch.setattr(calibration, "fit_factors", fit_made_up)
    rows = cast(Any, [None] * 10)
    problem = FactorProblem(rows, np.zeros(10), 0.1, 1.0, lambda factors: np.zeros(10), {})
    best = calibration._best_set(list(losses), problem, lambda fit: True)
    assert best is not None
    assert (best.chosen == ("compute",)) is is_taken
