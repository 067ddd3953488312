"""What single coefficients of the search under a power cap mean, one setting at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from wattcast.control.capped_search import CappedSearch, _Estimate, _weigh_tries

DEVIATION = 0.3  # of the logarithm of the score


def is_tried(
    sigmas: float = 1.0, chance: float = 1.0, deviation: float = DEVIATION, runs: int = 0
) -> bool:
    """Tell whether a setting is worth a run that is expected ``sigmas`` deviations better than the
    best so far, and keeps the cap with a chance.
    """
    power = _Estimate(np.array([-sigmas * deviation]), np.array([deviation]))
    time = _Estimate(np.zeros(1), np.zeros(1))
    utility = _weigh_tries(np.array([chance]), power, time, 1.0, 0.0, runs)
    return float(utility[0]) > 0.0 and not math.isinf(utility[0])


@pytest.mark.parametrize(("chance", "expected"), [(0.25, False), (0.35, True)])
def test_a_setting_that_breaks_the_cap_two_times_of_three_may_be_tried(
    chance: float, expected: bool
) -> None:
    assert is_tried(chance=chance) is expected


@pytest.mark.parametrize(("deviation", "expected"), [(0.0045, False), (0.0055, True)])
def test_a_try_must_promise_two_thousandths_of_the_score(deviation: float, expected: bool) -> None:
    """Of a setting that is as likely better as worse, 0.41 deviations are expected."""
    assert is_tried(sigmas=0.0, deviation=deviation) is expected


@pytest.mark.parametrize(
    ("sigmas", "runs", "expected"),
    [(-1.5, 0, True), (-1.6, 0, False), (-2.1, 10, True), (-2.15, 10, False)],
)
def test_a_try_pays_for_itself_in_forty_runs_and_ten_times_those_that_were_made(
    sigmas: float, runs: int, expected: bool
) -> None:
    """A gain at 1.5 deviations takes 35 later runs to pay for the try, one at 2.1 takes 130."""
    assert is_tried(sigmas, runs=runs) is expected


def test_half_of_both_clocks_doubles_the_time_of_a_program_that_nothing_is_known_of() -> None:
    """Whatever it does, all of it becomes half as fast."""
    search = SimpleNamespace(
        _logs=np.log([[0.5, 0.5]]), _shares=np.ones(2), _compute=np.array([True, False])
    )
    log_time = CappedSearch._expect_time_mean(cast(Any, search), None)
    assert math.exp(log_time[0]) == pytest.approx(2.0, rel=0.05)
