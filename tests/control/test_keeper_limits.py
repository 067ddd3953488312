"""How far a serving card is slowed, how fast it follows its load, and what makes it careful.

The engine here is the one of the policy's law: a token takes a / (1 - load·w), with a and w in
inverse proportion to the clock. There are so many levels that a clock is found to half a percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from wattcast.control.serving_control import (
    EngineReading,
    LatencyHistogram,
    LatencyKeeper,
    ServingLimits,
    StepForecast,
)

Array = npt.NDArray[np.float64]
FINE_HZ = np.geomspace(0.2e9, 2e9, 401)
COARSE_HZ = np.linspace(0.5e9, 2e9, 4)
NO_LIMIT_S = 1e6
READ_S = 5.0
PROMPT = 200.0


@dataclass
class LawfulEngine:
    """An engine that shares its time among its requests, and a keeper that reads it."""

    limits: ServingLimits
    levels_hz: Array = field(default_factory=lambda: FINE_HZ)
    output: float = 100.0
    first_over_token: float = 0.01  # seconds to a first token over those of a further one
    empty_s: float = 0.005  # of a step at the top clock
    request_s: float = 0.02
    seats: float = 1e9
    prompt: float = PROMPT
    late_share: float = 0.0  # of the requests
    waiting: float = 0.0
    told_over_true: float = 1.0  # of the sequences that run
    slower: float = 1.0  # than forecast

    def __post_init__(self) -> None:
        self.forecasts = 0
        self.keeper = LatencyKeeper(
            self.levels_hz.tolist(), self.limits, self._forecast, seats=self.seats
        )
        self.now_s = 0.0
        self.history: list[tuple[float, int]] = []
        # requests, seconds to first tokens, seconds per token, tokens, late, tokens of prompts
        self._counts = np.zeros(6)

    def _forecast(self, prompt: float, output: float) -> StepForecast:
        self.forecasts += 1
        stretch = self.levels_hz[-1] / self.levels_hz
        return StepForecast(self.empty_s * stretch, self.request_s * stretch)

    def token_s(self, load: float) -> float:
        """Return the time of a token at the level that the keeper chose."""
        stretch = self.slower * float(self.levels_hz[-1] / self.levels_hz[self.keeper.level])
        return self.empty_s * stretch / (1.0 - load * self.request_s * stretch)

    def play(self, load: float, seconds: float) -> float:
        """Serve for some time and return the time of a token at its end."""
        for _ in range(round(seconds / READ_S)):
            token_s = self.token_s(load)
            requests = READ_S * load
            first_s = self.first_over_token * token_s
            self._counts += requests * np.array(
                [1.0, first_s, token_s, self.output, self.late_share, self.prompt]
            )
            self.now_s += READ_S
            ended, all_first_s, all_token_s, tokens, late, prompts = self._counts.tolist()
            edges = (0.5 * self.limits.tpot_s, self.limits.tpot_s, math.inf)
            on_time = (ended - late, ended - late, ended)
            reading = EngineReading(
                LatencyHistogram((math.inf,), (ended,), all_first_s),
                LatencyHistogram(edges, on_time, all_token_s),
                tokens,
                self.waiting,
                self.told_over_true * load * self.output * token_s,
                prompts,
            )
            self.keeper.decide(self.now_s, reading, self.now_s)
            self.history.append((self.now_s, self.keeper.level))
        return self.token_s(load)

    def since(self, moment_s: float) -> Array:
        """Return moments and levels after a moment, ``(reading, 2)``."""
        return np.array([entry for entry in self.history if entry[0] > moment_s])


TOKEN_LIMIT = ServingLimits(NO_LIMIT_S, 0.05)
# So many tokens that the number of requests does not fluctuate, and next to no work for a request.
STEADY = {"output": 1e6, "request_s": 0.002}


def test_a_steady_load_uses_four_fifths_of_a_limit() -> None:
    """The requests that are in the engine now must not need more."""
    token_s = LawfulEngine(TOKEN_LIMIT, **STEADY).play(10.0, 7200.0)
    assert 0.75 < token_s / 0.05 < 0.85


def test_a_fluctuating_load_has_room_for_three_to_four_deviations() -> None:
    """Requests come at random: their number varies, and with it the time of a token."""
    load = 10.0
    engine = LawfulEngine(TOKEN_LIMIT)
    token_s = engine.play(load, 7200.0)
    empty_s = engine.empty_s * float(FINE_HZ[-1] / FINE_HZ[engine.keeper.level])
    load += math.sqrt(load / 300.0)  # a standard error above the count of five minutes
    deviation = 1.0 / math.sqrt(load * engine.output * empty_s)
    room = (0.92 * 0.05 / token_s - 1.0) / (deviation * (1.0 - empty_s / token_s))
    assert 3.0 < room < 4.2


def test_the_99th_percentile_of_first_tokens_is_that_of_an_exponential() -> None:
    engine = LawfulEngine(ServingLimits(0.5, NO_LIMIT_S), first_over_token=5.0, **STEADY)
    mean_s = 5.0 * engine.play(10.0, 7200.0)
    assert 0.92 * 0.5 / mean_s == pytest.approx(math.log(100.0), rel=0.1)


def test_seats_leave_room_for_two_and_a_half_deviations() -> None:
    load = 10.0
    limits = ServingLimits(0.01, NO_LIMIT_S)
    engine = LawfulEngine(limits, seats=40.0, first_over_token=1e-6)
    token_s = engine.play(load, 7200.0)
    empty_s = engine.empty_s * float(FINE_HZ[-1] / FINE_HZ[engine.keeper.level])
    deviation = 1.0 / math.sqrt(load * engine.output * empty_s)
    room = (40.0 / (load * engine.output * token_s) - 1.0) / deviation
    assert 2.0 < room < 3.2


@pytest.mark.parametrize(("waiting", "is_top"), [(11.0, False), (16.0, True)])
def test_a_queue_of_a_third_of_what_a_limit_lets_wait_raises_the_clock(
    waiting: float, is_top: bool
) -> None:
    """In the four seconds of the limit 40 requests come."""
    engine = LawfulEngine(ServingLimits(4.0, 1.0))
    engine.play(10.0, 3600.0)
    engine.waiting = waiting
    engine.play(10.0, READ_S)
    assert bool(engine.levels_hz[engine.keeper.level] > 0.95 * engine.levels_hz[-1]) is is_top


def test_a_fall_of_the_load_is_believed_after_five_minutes() -> None:
    engine = LawfulEngine(TOKEN_LIMIT, COARSE_HZ, output=1e6)
    engine.play(35.0, 1800.0)
    engine.play(1.0, 1800.0)
    moments_s, levels = engine.since(1800.0).T
    assert levels[0] > levels[-1]
    settled_s = float(moments_s[levels > levels[-1]][-1]) - 1800.0
    assert 225.0 < settled_s < 330.0


def test_half_a_minute_is_needed_to_know_a_load() -> None:
    engine = LawfulEngine(TOKEN_LIMIT, **STEADY)
    engine.play(1.0, 120.0)
    top = len(FINE_HZ) - 1
    first_s = next(moment_s for moment_s, level in engine.history if level < top)
    assert 27.0 < first_s < 39.0


def test_the_clock_falls_four_levels_every_quarter_of_a_minute() -> None:
    engine = LawfulEngine(TOKEN_LIMIT, **STEADY)
    engine.play(1.0, 600.0)
    moments_s, levels = np.array(engine.history).T
    falls = np.flatnonzero(np.diff(levels) < 0.0)
    assert float(np.median(np.diff(moments_s[falls]))) == pytest.approx(15.0, abs=2.0)
    assert float(np.diff(levels).min()) == pytest.approx(-4.0, abs=0.5)


@pytest.mark.parametrize(("late_share", "is_careful"), [(0.008, False), (0.012, True)])
def test_a_percent_of_late_requests_makes_careful(late_share: float, is_careful: bool) -> None:
    engine = LawfulEngine(TOKEN_LIMIT, **STEADY)
    usual_s = engine.play(10.0, 7200.0)
    engine.late_share = late_share
    assert (engine.play(10.0, 300.0) < 0.95 * usual_s) is is_careful


def test_a_late_minute_takes_a_seventh_of_the_limit_for_half_an_hour() -> None:
    engine = LawfulEngine(TOKEN_LIMIT, **STEADY)
    usual_s = engine.play(10.0, 7200.0)
    engine.late_share = 0.05
    engine.play(10.0, 60.0)
    engine.late_share = 0.0
    careful_s = engine.play(10.0, 120.0)
    assert 0.7 < careful_s / usual_s < 0.9
    minutes = 2
    while engine.play(10.0, 60.0) < 0.985 * usual_s:
        minutes += 1
        assert minutes < 100, "care is never forgotten"
    assert 20 < minutes < 75


def test_the_most_careful_use_half_of_what_others_use() -> None:
    engine = LawfulEngine(TOKEN_LIMIT, late_share=0.1, **STEADY)
    token_s = engine.play(10.0, 7200.0)
    assert 0.35 < token_s / 0.05 < 0.46


@pytest.mark.parametrize(("sequences", "is_misled"), [(7.0, False), (9.5, True)])
def test_eight_sequences_tell_their_mean_number(sequences: float, is_misled: bool) -> None:
    """With fewer, the mean of two readings is no measure, and the times of the tokens count."""
    loads = sequences / (100.0 * 0.045)
    honest = LawfulEngine(TOKEN_LIMIT)
    honest.play(loads, 7200.0)
    scale = sequences / (loads * honest.output * honest.token_s(loads))
    wrong = LawfulEngine(TOKEN_LIMIT, told_over_true=scale)
    wrong.play(loads, 7200.0)
    levels = honest.keeper.level, wrong.keeper.level
    assert (abs(levels[0] - levels[1]) > 4) is is_misled


@pytest.mark.parametrize(("growth", "is_renewed"), [(1.15, False), (1.3, True)])
def test_prompts_a_fifth_longer_are_forecast_anew(growth: float, is_renewed: bool) -> None:
    engine = LawfulEngine(TOKEN_LIMIT)
    engine.play(10.0, 1200.0)
    engine.prompt = growth * PROMPT
    engine.play(10.0, 1200.0)
    assert (engine.forecasts > 1) is is_renewed


def test_a_slower_engine_is_known_after_two_minutes() -> None:
    """The clock rises with what is learned: two thirds of the way in about that time."""
    engine = LawfulEngine(TOKEN_LIMIT, **STEADY)
    engine.play(5.0, 7200.0)
    engine.slower = 1.5
    engine.play(5.0, 1800.0)
    moments_s, levels = engine.since(7200.0).T
    risen = (levels - levels[0]) / (levels[-1] - levels[0])
    assert 135.0 < float(moments_s[risen > 0.63][0]) - 7200.0 < 205.0


@pytest.mark.parametrize(("other_load", "lowest"), [(10.7, 4), (11.4, 0)])
def test_energies_of_loads_within_a_tenth_are_compared(other_load: float, lowest: int) -> None:
    """A token cost twice as much at level 3 as at level 5."""
    engine = LawfulEngine(TOKEN_LIMIT)
    engine.play(10.0, 60.0)
    engine.keeper._spent = {3: (10.0, 2.0), 5: (10.0, 1.0)}
    engine.keeper._moved_s = engine.now_s
    assert engine.keeper._find_cheapest(engine.now_s, other_load) == lowest


def learn_scales(
    monkeypatch: pytest.MonkeyPatch, shares: list[tuple[float, float]], forecast: Any = None
) -> tuple[float, float]:
    """Return by how much a forecast of steps is scaled, without and for each request.

    ``shares`` are what the forecast says of the time of intervals, for both.
    """
    keeper = LatencyKeeper(COARSE_HZ.tolist(), TOKEN_LIMIT, forecast)
    ones = np.ones(len(COARSE_HZ))
    monkeypatch.setattr(keeper, "_renew_forecast", lambda long, output: StepForecast(ones, ones))
    monkeypatch.setattr(keeper, "_measure_per_token_s", lambda latest: 0.0)
    keeper._sums = np.mean([[1.0, x * x, x * y, y * y, x, y] for x, y in shares], axis=0)
    steps = keeper._scale_forecast(cast(Any, None), cast(Any, None), 1.0)
    return float(steps.empty_s[0]), float(steps.request_s[0])


def split_time(requests: float) -> tuple[float, float]:
    """Say of an interval what requests took, where steps without them take twice the forecast."""
    return (1.0 - requests) / 2.0, requests


def test_a_forecast_is_trusted_to_know_what_requests_take_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though loads from a tenth to nine tenths say that the scales are 2 and 1, both become 1.3."""
    shares = [split_time(0.1), split_time(0.9)]
    empty, request = learn_scales(monkeypatch, shares, lambda prompt, output: None)
    assert empty == pytest.approx(1.3, abs=0.05)
    assert 0.055 < empty - request < 0.07


def test_without_a_forecast_loads_of_47_and_53_percent_tell_the_scales_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They say that the scales are 1 apart, and are believed for more than a quarter of it."""
    empty, request = learn_scales(monkeypatch, [split_time(0.47), split_time(0.53)])
    assert 0.25 < empty - request < 0.33


def test_no_part_of_a_step_is_scaled_to_less_than_a_twentieth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise can say that steps without requests take less than nothing."""
    empty, request = learn_scales(monkeypatch, [(0.1, 0.3), (0.5, 1.0)])
    assert 1 / 25 < empty < 1 / 17
    assert request > 1.0
