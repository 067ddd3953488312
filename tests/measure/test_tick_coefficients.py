"""What single coefficients of finding the steps of an energy counter mean."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.measure.counter_ticks import (
    TickSightings,
    _find_sharp_sightings,
    _number_steps,
    _place_on_grid,
)

STEP_S = 0.1


def see_steps(gaps_s: list[float], step_s: float = STEP_S) -> TickSightings:
    """Return sightings of a counter whose steps lie midway between the polls around them."""
    middle_s = step_s * np.arange(1, len(gaps_s) + 1, dtype=np.float64)
    half_s = 0.5 * np.array(gaps_s, dtype=np.float64)
    return TickSightings(
        middle_s - half_s, middle_s + half_s, 10.0 * np.arange(len(gaps_s), dtype=np.float64)
    )


@pytest.mark.parametrize(("gap_s", "is_sharp"), [(2.7e-3, True), (3.3e-3, False)])
def test_polls_three_times_as_far_apart_as_the_closest_see_a_step_sharply(
    gap_s: float, is_sharp: bool
) -> None:
    """Of a counter that steps every 10 ms."""
    sightings = see_steps([1e-3] * 20 + [gap_s], step_s=0.01)
    assert bool(_find_sharp_sightings(sightings)[-1]) is is_sharp


@pytest.mark.parametrize(("gap_s", "is_sharp"), [(9e-3, True), (11e-3, False)])
def test_polls_within_a_tenth_of_a_period_see_a_step_sharply(gap_s: float, is_sharp: bool) -> None:
    """Of a counter that steps every 100 ms, however fast others are polled."""
    sightings = see_steps([1e-3] * 20 + [gap_s])
    assert bool(_find_sharp_sightings(sightings)[-1]) is is_sharp


@pytest.mark.parametrize(("early_s", "fits_grid"), [(1.6e-3, True), (2.4e-3, False)])
def test_a_poll_may_come_two_milliseconds_before_its_step(early_s: float, fits_grid: bool) -> None:
    """A poller that was stalled for half a period sees a step at its end."""
    sightings = see_steps([1e-3] * 31)
    after_s = sightings.after_s.copy()
    before_s = sightings.before_s.copy()
    after_s[15] = 16 * STEP_S - early_s
    before_s[15] = after_s[15] - 0.05
    stalled = TickSightings(before_s, after_s, sightings.energy_j)
    assert (_place_on_grid(stalled, STEP_S) is not None) is fits_grid


@pytest.mark.parametrize("period_s", [0.09, 0.112])
def test_steps_are_counted_though_the_first_guess_of_their_period_is_off(period_s: float) -> None:
    """The phase follows each sighting, so that an error of the guess does not add up to a step."""
    seen_s = period_s * np.arange(12)
    assert _number_steps(seen_s, STEP_S).tolist() == list(range(12))
