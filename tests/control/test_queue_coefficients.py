"""What single coefficients of a clock that follows an engine's work mean."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from test_queue_keeper import LEVELS_HZ, PROMPT, SteadyEngine, forecast

from wattcast.control import queue_keeper
from wattcast.control.queue_keeper import RATIOS, QueueKeeper, _Load, _Margin
from wattcast.control.serving_control import EngineReading, LatencyHistogram, ServingLimits

NO_TIMES = LatencyHistogram((math.inf,), (0.0,), 0.0)
EMPTY = EngineReading(NO_TIMES, NO_TIMES, tokens=0.0, waiting=0.0, running=0.0, prompt_tokens=0.0)


def make_keeper() -> QueueKeeper:
    return QueueKeeper(LEVELS_HZ.tolist(), ServingLimits(0.5, 0.05), lambda *_: forecast())


def test_first_requests_may_take_a_fifth_more_than_forecast_and_vary_by_a_half() -> None:
    """Nothing is known of an engine at first."""
    margin = _Margin(0.5)
    mean = margin.total / margin.weight
    assert 1.1 < mean < 1.3
    assert 0.4 < math.sqrt(margin.squares / margin.looks) / mean < 0.6


def test_twenty_requests_count_as_much_as_what_is_thought_before_them() -> None:
    margin = _Margin(0.0)
    thought = margin.total / margin.weight
    as_forecast = LatencyHistogram((0.1, 0.2, math.inf), (20.0, 20.0, 20.0), 20.0 * 0.02)
    margin.learn(as_forecast, 0.02, 0.0)
    believed = (margin.total / margin.weight - 1.0) / (thought - 1.0)
    assert believed == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("far", "is_reached"), [(4.0, False), (6.0, True)])
def test_one_request_of_two_hundred_is_looked_at(far: float, is_reached: bool) -> None:
    """A limit of the 99th percentile leaves as many for chance."""
    margin = _Margin(0.0)
    near_place, far_place = np.searchsorted(RATIOS, (1.5, 3.0))
    margin.bounds[near_place] = 1000.0 - far
    margin.bounds[far_place] = far
    assert bool(margin.factor > 2.0) is is_reached


def test_traffic_of_the_last_minute_is_looked_at() -> None:
    engine = SteadyEngine()
    engine.play(200)
    looks = engine.keeper._looks
    assert 50.0 < looks[-1].at_s - looks[0].at_s < 70.0


def test_a_load_is_prepared_for_that_is_a_standard_error_above_the_mean() -> None:
    """Five requests a second for a minute may be 300 by chance, give or take 17."""
    engine = SteadyEngine(load=5.0)
    engine.play(200)
    load = engine.keeper._estimate_load()
    assert load is not None
    errors = (load.per_s - load.mean_per_s) / math.sqrt(load.mean_per_s / 60.0)
    assert 0.8 < errors < 1.2


@pytest.mark.parametrize(("late_share", "is_careful"), [(0.008, False), (0.012, True)])
def test_a_percent_of_late_requests_makes_careful(late_share: float, is_careful: bool) -> None:
    engine = SteadyEngine(limits=ServingLimits(0.05, 0.05))
    engine.play(125)
    engine.late_share = late_share
    engine.play(65)
    assert (engine.keeper._care < 1.0) is is_careful


def test_prompts_that_take_a_third_of_the_forecast_are_believed_for_four_fifths() -> None:
    """One interval in which prompts alone took time: a forecast is not given up for it."""
    keeper = make_keeper()
    taken = 0.3
    keeper._sums = np.array([1.0, 0.0, 0.0, taken * taken, 0.0, taken])
    _, prompts = keeper.scales
    assert 0.8 < (prompts - 1.0) / (1.0 / taken - 1.0) < 0.84


def test_nine_tenths_of_a_limit_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expected of the 99th percentile keeps a little off the limit."""
    engine = SteadyEngine()
    engine.play(30)
    keeper = engine.keeper
    shares = np.linspace(0.5, 1.4, len(LEVELS_HZ))
    nothing = np.zeros(len(LEVELS_HZ))
    times = queue_keeper._WorkTimes(shares * keeper.limits.ttft_s, nothing, nothing, nothing + 1.0)
    known = cast(Any, SimpleNamespace(factor=1.0, learn=lambda *_: None))
    keeper._margins = (known, known)
    monkeypatch.setattr(keeper, "_forecast_times", lambda *_: times)
    seen: list[npt.NDArray[np.bool_]] = []

    def remember_fits(fits: npt.NDArray[np.bool_], power_w: Any) -> int:
        seen.append(fits)
        return 0

    monkeypatch.setattr(queue_keeper, "_choose_level", remember_fits)
    engine.play(1)
    assert 0.83 < shares[seen[0]].max() < 0.97


def first_token_s(per_s: float, dispersion: float) -> float:
    """Return the time to a first token at the top clock, where prompts take 0.1 s there."""
    keeper = make_keeper()
    work = forecast()
    slow = replace(work, prompt_s=10.0 * work.prompt_s)
    load = _Load(per_s, per_s, PROMPT, 1.0, dispersion)
    times = keeper._forecast_times(slow, load, EMPTY)
    return float(times.first_s[-1])


def test_a_burst_of_three_deviations_is_served_in_time() -> None:
    """As many requests more may come until a higher clock is there."""
    per_s, prompt_s, reaction_s = 8.0, 0.1, 1.2
    busy = per_s * prompt_s
    waiting_s = 3.0 * busy / (1.0 - busy) * prompt_s  # of Pollaczek and Khinchine
    longer_s = first_token_s(per_s, 4.0) - first_token_s(per_s, 1.0) - waiting_s
    assert 2.5 < longer_s / (math.sqrt(per_s * reaction_s) * prompt_s) < 3.5


def test_a_clock_is_there_a_little_more_than_a_second_after_it_is_needed() -> None:
    """Metrics are read once a second, and a clock takes a tenth of one.

    Of 12 prompts a second of 0.1 s each, a fifth is left over by then.
    """
    alone_s = first_token_s(1e-9, 0.0)
    left_s = first_token_s(12.0, 0.0) - alone_s
    assert 1.05 < left_s / 0.2 < 1.4


def test_five_seconds_of_requests_are_waited_for() -> None:
    levels = SteadyEngine().play(20)
    top = len(LEVELS_HZ) - 1
    assert 5 <= next(second for second, level in enumerate(levels) if level < top) <= 6


def test_a_late_minute_takes_a_seventh_of_the_limits_and_two_others_a_tenth_back() -> None:
    """Never more than half of them is given up."""
    engine = SteadyEngine(limits=ServingLimits(0.05, 0.05))
    engine.play(125)
    engine.late_share = 0.05
    seconds = 0
    while engine.keeper._care == 1.0:
        engine.play(1)
        seconds += 1
        assert seconds < 100, "lateness is never judged"
    assert 1 / 8 < 1.0 - engine.keeper._care < 1 / 6
    engine.play(1200)
    least = engine.keeper._care
    assert 0.45 < least < 0.55
    engine.late_share = 0.0
    while engine.keeper._care == least:
        engine.play(1)
    once = engine.keeper._care
    assert once / least == pytest.approx(1.05, abs=0.01)
    waited = 0
    while engine.keeper._care == once:
        engine.play(1)
        waited += 1
    assert 55 <= waited <= 65


@pytest.mark.parametrize(("share", "is_full"), [(0.85, False), (0.95, True)])
def test_seats_are_full_where_nine_in_ten_are_taken(share: float, is_full: bool) -> None:
    engine = SteadyEngine(load=10.0)
    engine.play(120)
    engine.waiting = 1.0
    token_s = engine.keeper._forecasts[1] if engine.keeper._forecasts else 0.0
    reading = engine.read(token_s)
    engine.keeper.seats = (reading.running + reading.waiting) / share
    engine.keeper.decide(engine.now_s + 1.0, reading, 0.0)
    assert (engine.keeper.why == "its cache or its seats are full") is is_full


def test_a_clock_falls_three_levels_at_once_three_seconds_after_it_rose() -> None:
    engine = SteadyEngine(load=2.0)
    engine.play(120)
    engine.waiting = 60.0
    engine.play(1)
    engine.waiting = 0.0
    levels = np.array([len(LEVELS_HZ) - 1, *engine.play(8)])
    falls = -np.diff(levels)
    assert np.flatnonzero(falls)[0] == 2
    assert falls.max() == 3


def test_half_of_what_margins_learned_is_forgotten_in_three_and_a_half_minutes() -> None:
    margin = _Margin(0.0)
    margin.learn(LatencyHistogram((0.1, 0.2, math.inf), (1e4,) * 3, 200.0), 0.02, 1.0)
    before = margin.weight
    margin.learn(LatencyHistogram((0.1, 0.2, math.inf), (1.0,) * 3, 0.02), 0.02, 208.0)
    assert margin.weight / before == pytest.approx(0.5, abs=0.04)


def test_intervals_of_forty_seconds_say_half_of_what_is_known_of_steps() -> None:
    """Their weights sum up to one, as those of a mean over a minute do."""
    engine = SteadyEngine(load=10.0)
    engine.play(6 + 42)
    assert engine.keeper._sums[0] == pytest.approx(0.5, abs=0.06)


def test_a_clock_reacts_an_interval_and_two_changes_of_clocks_later() -> None:
    """A clock takes some 0.1 s to change; what comes after a look waits for the next one."""
    keeper = make_keeper()
    assert 0.1 < queue_keeper.QUEUE.reaction_s - keeper.interval_s < 0.3


@pytest.mark.parametrize(("longer", "forecasts"), [(1.08, 1), (1.12, 2)])
def test_a_forecast_is_made_anew_when_prompts_are_a_ninth_longer(
    longer: float, forecasts: int
) -> None:
    made = []
    keeper = make_keeper()
    keeper.forecast = lambda prompt, output: made.append(prompt) or forecast()  # type: ignore
    for prompt in (PROMPT, longer * PROMPT):
        keeper._renew_forecast(_Load(1.0, 1.0, prompt, 100.0, 1.0))
    assert len(made) == forecasts


def measure_scales(steps: float, prompts: float) -> tuple[float, float]:
    """Return what a keeper believes that saw steps and prompts of so many times their forecast."""
    keeper = make_keeper()
    shares = np.array([(share, 1.0 - share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)])
    x, y = (shares / (steps, prompts)).T
    sums = [np.ones(5), x * x, x * y, y * y, x, y]
    keeper._sums = 1e4 * np.array([each.mean() for each in sums])
    return keeper.scales


def test_steps_are_believed_between_half_of_their_forecast_and_twice_as_much() -> None:
    """Beyond, the engine did something else than its steps say."""
    assert measure_scales(1.6, 1.0)[0] == pytest.approx(1.6, rel=0.05)
    assert 1.7 < measure_scales(5.0, 1.0)[0] < 2.3
    assert 0.4 < measure_scales(0.1, 1.0)[0] < 0.6


def test_prompts_are_believed_between_a_twentieth_of_their_forecast_and_three_times_as_much() -> (
    None
):
    """Those that are found in a prefix cache take next to nothing."""
    assert measure_scales(1.0, 0.2)[1] == pytest.approx(0.2, rel=0.05)
    assert 0.04 < measure_scales(1.0, 0.01)[1] < 0.06
    assert 2.5 < measure_scales(1.0, 9.0)[1] < 3.5


def test_first_tokens_of_sixteen_requests_tell_as_much_as_two_alone() -> None:
    """Those of a burst wait for each other; times per token tell as much as four alone."""

    def learn_spread(place: int, count: float) -> float:
        margin = make_keeper()._margins[place]
        before = margin.squares
        slow = LatencyHistogram((0.1, 0.2, math.inf), (count,) * 3, count * 0.08)
        margin.learn(slow, 0.02, 0.0)
        return margin.squares - before

    for place, independent in enumerate((2.0, 4.0)):
        alone = learn_spread(place, 1.0)
        assert learn_spread(place, 16.0) / alone == pytest.approx(independent, rel=0.15)
