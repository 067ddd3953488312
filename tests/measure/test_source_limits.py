"""From which contradictions on a counter or its readings are doubted, and which steps are regular."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from wattcast.measure.counter_ticks import UnwrappedCounter, find_ticks
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.source_check import BelievedSource, SourceCheck, check_sources

Array = npt.NDArray[np.float64]
MARGIN_S = 1.5  # of samples on both sides of a window


def make_card(
    power_w: float,
    length_s: float,
    average_w: float = np.nan,
    instant_w: Callable[[Array], Array] | float = np.nan,
    readings_s: float = 0.1,
) -> EnergySamples:
    """Make samples of a counter that steps every 100 ms, polled each 2 ms, with power readings."""
    time_s = np.arange(0.0, length_s + 2.0 * MARGIN_S, 0.002)
    rows = np.full((len(time_s), len(COLUMNS)), np.nan)
    rows[:, COLUMNS.index("time_s")] = time_s
    rows[:, COLUMNS.index("energy_j")] = power_w * 0.1 * np.floor(time_s / 0.1 + 1e-9)
    read = np.arange(0, len(time_s), round(readings_s / 0.002))
    rows[read, COLUMNS.index("average_w")] = average_w
    rows[read, COLUMNS.index("instant_w")] = (
        instant_w(np.arange(len(read), dtype=float)) if callable(instant_w) else instant_w
    )
    return EnergySamples(rows)


def check_card(samples: EnergySamples, power_w: float, length_s: float) -> SourceCheck:
    window_s = (MARGIN_S, MARGIN_S + length_s)
    return check_sources(samples, find_ticks(samples), window_s, power_w * length_s, 700.0)


@pytest.mark.parametrize(("deviation", "is_doubted"), [(0.041, False), (0.049, True)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_averages_within_four_and_a_half_percent_confirm_a_counter(
    deviation: float, is_doubted: bool, sign: float
) -> None:
    """The sensor may be 2 % off, and 2.5 % of the energy may be contradicted: 5 % in all at most."""
    samples = make_card(400.0, 6.0, average_w=400.0 * (1.0 + sign * deviation))
    assert bool(check_card(samples, 400.0, 6.0).doubts) is is_doubted


@pytest.mark.parametrize(("surplus_w", "is_doubted"), [(3.5, False), (4.4, True)])
def test_readings_of_an_idle_card_may_be_three_watts_off(
    surplus_w: float, is_doubted: bool
) -> None:
    samples = make_card(20.0, 2.5, average_w=20.0 + surplus_w)
    assert bool(check_card(samples, 20.0, 2.5).doubts) is is_doubted


@pytest.mark.parametrize(("length_s", "is_doubted"), [(2.6, False), (3.4, True)])
def test_a_mean_over_three_seconds_shows_what_one_reading_cannot(
    length_s: float, is_doubted: bool
) -> None:
    """A reading of 23 W beside 20 W is within the tolerance of the sensor; three seconds are not."""
    samples = make_card(20.0, length_s, average_w=23.0)
    assert bool(check_card(samples, 20.0, length_s).doubts) is is_doubted


@pytest.mark.parametrize(("readings", "is_judged"), [(2, False), (3, True)])
def test_three_readings_make_a_mean(readings: int, is_judged: bool) -> None:
    samples = make_card(300.0, 3.0, instant_w=300.0)
    time_s = samples.rows[:, 0]
    instant = samples.rows[:, COLUMNS.index("instant_w")]
    inside = np.flatnonzero(
        np.isfinite(instant) & (time_s > MARGIN_S - 0.001) & (time_s < MARGIN_S + 3.001)
    )
    instant[inside[readings:]] = np.nan
    check = check_card(samples, 300.0, 3.0)
    assert (check.readings_j is not None) is is_judged


@pytest.mark.parametrize(("apart", "believed"), [(0.08, "readings"), (0.12, "neither")])
def test_readings_that_agree_within_a_tenth_are_believed_against_the_counter(
    apart: float, believed: str
) -> None:
    def draw_instants(number: Array) -> Array:
        return 450.0 * (1.0 - apart) + 2.0 * (number % 2.0)  # not stale

    samples = make_card(300.0, 5.0, average_w=450.0, instant_w=draw_instants)
    samples.rows[::100, COLUMNS.index("average_w")] += 1.0
    assert check_card(samples, 300.0, 5.0).believed == BelievedSource(believed)


@pytest.mark.parametrize(("deviations", "is_doubted"), [(2.4, False), (3.6, True)])
def test_scattered_instants_may_be_three_standard_errors_off(
    deviations: float, is_doubted: bool
) -> None:
    """Ten readings a second scatter by 63 W about their mean, which is known to 21 W."""
    standard_error_w = 60.0 / 3.0
    tolerance_w = 0.02 * 300.0 + 3.0 + 0.025 * 300.0  # of the sensor, and of what may differ

    def draw_instants(number: Array) -> Array:
        mean_w = 300.0 + tolerance_w + deviations * standard_error_w
        return mean_w + 60.0 * np.where(number % 2.0 == 0.0, 1.0, -1.0)

    samples = make_card(300.0, 5.0, instant_w=draw_instants)
    assert bool(check_card(samples, 300.0, 5.0).doubts) is is_doubted


def make_counter(steps_s: Array, polls_s: Array) -> EnergySamples:
    """Make samples of a counter that rises by 30 J at each moment."""
    rows = np.full((len(polls_s), len(COLUMNS)), np.nan)
    rows[:, COLUMNS.index("time_s")] = polls_s
    rows[:, COLUMNS.index("energy_j")] = 30.0 * np.searchsorted(steps_s, polls_s, side="right")
    return EnergySamples(rows)


@pytest.mark.parametrize(("rest_s", "is_doubted"), [(0.26, False), (0.35, True)])
def test_a_counter_without_regular_steps_may_rest_for_three_tenths(
    rest_s: float, is_doubted: bool
) -> None:
    random = np.random.default_rng(0)
    gaps_s = random.uniform(0.03, 0.2, 60)
    gaps_s[30] = rest_s
    steps_s = np.cumsum(gaps_s)
    samples = make_counter(steps_s, np.arange(0.0, steps_s[-1], 0.002))
    ticks = find_ticks(samples)
    assert ticks.step_s is None
    check = check_sources(samples, ticks, (0.5, steps_s[-1] - 0.5), 1200.0, 1e4)
    assert any("stood still" in doubt for doubt in check.doubts) is is_doubted


@pytest.mark.parametrize(("rest_s", "is_doubted"), [(0.174, False), (0.186, True)])
def test_polls_may_misplace_both_ends_of_a_rest_by_ten_milliseconds(
    rest_s: float, is_doubted: bool
) -> None:
    """A counter that steps every 100 ms may rest for 1.6 steps and 20 ms."""
    gaps_s = np.full(60, 0.1)
    gaps_s[30] = rest_s
    steps_s = np.cumsum(gaps_s)
    samples = make_counter(steps_s, np.arange(0.0, 6.0, 0.001))
    check = check_sources(samples, find_ticks(samples), (0.5, 5.5), 1500.0, 1e4)
    assert any("stood still" in doubt for doubt in check.doubts) is is_doubted


@pytest.mark.parametrize(("miss", "is_regular"), [(0.04, True), (0.06, False)])
def test_steps_within_a_twentieth_of_their_period_are_regular(
    miss: float, is_regular: bool
) -> None:
    number = np.arange(60.0)
    steps_s = 0.1 * (number + miss * np.where(number % 2.0 == 0.0, 1.0, -1.0))
    samples = make_counter(steps_s, np.arange(0.0, 6.0, 0.0075))
    assert (find_ticks(samples).step_s is not None) is is_regular


@pytest.mark.parametrize(("polls", "is_regular"), [(5, True), (3, False)])
def test_a_period_shows_from_four_polls_in_it_on(polls: int, is_regular: bool) -> None:
    samples = make_counter(np.arange(0.051, 8.0, 0.1), np.arange(0.0, 8.0, 0.1 / polls))
    assert (find_ticks(samples).step_s is not None) is is_regular


@pytest.mark.parametrize(("top_share", "is_wrap"), [(0.87, False), (0.93, True)])
def test_a_counter_wraps_from_the_last_tenth_of_its_range(top_share: float, is_wrap: bool) -> None:
    counter = UnwrappedCounter(1000.0)
    counter.follow(1000.0 * top_share)
    assert (counter.follow(5.0) > 1000.0) is is_wrap


@pytest.mark.parametrize(("risen_j", "is_wrap"), [(400.0, True), (600.0, False)])
def test_a_wrap_may_have_been_read_half_a_second_late(risen_j: float, is_wrap: bool) -> None:
    """At most 1000 W were drawn since the reading before, which was a moment ago."""
    counter = UnwrappedCounter(1e6, most_w=1000.0)
    counter.follow(1e6 - risen_j, 1.0)
    assert (counter.follow(0.0, 1.0) == 1e6) is is_wrap


def doubts_ramp(late_s: float) -> bool:
    """Tell whether averages over a second are doubted that were updated so late after their second.

    Power climbs by 600 W a second here, and the tolerance of a sensor is worth 35 ms.
    """
    slope_w_per_s = 600.0
    samples = make_card(100.0, 1.0, average_w=0.0)
    time_s = samples.rows[:, 0]

    def energy_j(at_s: Array) -> Array:
        climb_s = np.clip(at_s - MARGIN_S, 0.0, 1.0)
        after_s = np.maximum(at_s - MARGIN_S - 1.0, 0.0)
        return np.asarray(100.0 * at_s + slope_w_per_s * (0.5 * climb_s**2 + after_s))

    stepped_s = 0.1 * np.floor(time_s / 0.1 + 1e-9)
    samples.rows[:, COLUMNS.index("energy_j")] = energy_j(stepped_s)
    is_read = np.isfinite(samples.rows[:, COLUMNS.index("average_w")])
    updated_s = time_s[is_read] - late_s
    mean_w = energy_j(updated_s) - energy_j(updated_s - 1.0)
    samples.rows[is_read, COLUMNS.index("average_w")] = mean_w
    return bool(check_card(samples, 100.0 + 0.5 * slope_w_per_s, 1.0).doubts)


@pytest.mark.parametrize(("late_s", "is_doubted"), [(0.158, False), (0.168, True)])
def test_a_reading_may_be_a_step_and_thirty_milliseconds_old(
    late_s: float, is_doubted: bool
) -> None:
    """The counter steps every 100 ms, and the sensor's tolerance hides 35 ms more."""
    assert doubts_ramp(late_s) is is_doubted


@pytest.mark.parametrize(("early_s", "is_doubted"), [(0.0455, False), (0.0485, True)])
def test_a_reading_may_be_ten_milliseconds_ahead_of_its_step(
    early_s: float, is_doubted: bool
) -> None:
    assert doubts_ramp(-early_s) is is_doubted
