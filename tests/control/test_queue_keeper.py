"""The clock of a serving card follows the work in its engine: bursts, long prompts, full caches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest

from wattcast.control import queue_keeper
from wattcast.control.queue_keeper import (
    QUEUE,
    QueueKeeper,
    WorkForecast,
    forecast_work,
)
from wattcast.control.serving_control import (
    KEEPER,
    EngineReading,
    LatencyHistogram,
    ServingLimits,
    parse_engine_metrics,
)
from wattcast.control.serving_rehearsal import ServingPlant
from wattcast.control.traffic_rehearsal import (
    KINDS_OF_STEP,
    count_kept_of_top,
    follow_keeper,
    make_queue_keeper,
    perturb_costs,
    perturb_levels,
    rehearse_traffic,
    serve_traffic,
)
from wattcast.predictor.api import find_gpu
from wattcast.serving.arrivals import draw_trace
from wattcast.serving.step_costs import StepCosts

Array = npt.NDArray[np.float64]
LEVELS_HZ = np.linspace(0.5e9, 2e9, 16)
TOP = len(LEVELS_HZ) - 1
EDGES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, math.inf)
OUTPUT, PROMPT = 100.0, 500.0


def forecast(prompt: float = PROMPT, output: float = OUTPUT) -> WorkForecast:
    """Steps of 5 ms and 50 µs a sequence, prompts of 10 ms at the top clock; all follow 1/f."""
    stretch = LEVELS_HZ[-1] / LEVELS_HZ
    sequences = np.array([1.0, 256.0])
    power_w = 100.0 + 500.0 * stretch**-3
    step_s = stretch[:, np.newaxis] * (0.005 + 5e-5 * sequences)
    return WorkForecast(
        sequences=sequences,
        decode_s=step_s,
        decode_j=power_w[:, np.newaxis] * step_s,
        prompt_s=0.01 * stretch,
        prompt_j=power_w * 0.01 * stretch,
        idle_w=np.full(len(stretch), 90.0),
    )


@dataclass
class SteadyEngine:
    """An engine whose requests take what the forecast says, times ``slower``."""

    load: float = 5.0
    slower: float = 1.0
    limits: ServingLimits = field(default_factory=lambda: ServingLimits(0.5, 0.05))
    waiting: float = 0.0
    cache_use: float = 0.2
    late_share: float = 0.0

    def __post_init__(self) -> None:
        self.keeper = QueueKeeper(LEVELS_HZ.tolist(), self.limits, lambda *_: forecast())
        self.now_s = 0.0
        self.requests = self.first_s = self.token_s = self.late = 0.0

    def play(self, seconds: int) -> list[int]:
        """Return the levels that are chosen, second by second."""
        levels = []
        for _ in range(seconds):
            level = self.keeper.level
            work = forecast()
            free = 1.0 - self.load * self.slower * work.prompt_s[level]
            each_s = self.slower * (work.decode_s[level, 1] - work.decode_s[level, 0]) / 255.0
            empty_s = self.slower * work.decode_s[level, 0] - each_s
            token_s = empty_s / (free - self.load * OUTPUT * each_s)
            self.now_s += 1.0
            self.requests += self.load
            self.first_s += self.load * (token_s + self.slower * work.prompt_s[level])
            self.token_s += self.load * token_s
            self.late += self.late_share * self.load
            levels.append(self.keeper.decide(self.now_s, self.read(token_s), 0.0))
        return levels

    def read(self, token_s: float) -> EngineReading:
        """Return what the metrics tell; all times lie in the bucket of the mean, but late ones."""
        counts = np.where(np.array(EDGES) >= 0.1, self.requests, self.requests - self.late)
        first = LatencyHistogram(EDGES, tuple(counts.tolist()), self.first_s)
        token = LatencyHistogram(EDGES, tuple(counts.tolist()), self.token_s)
        return EngineReading(
            ttft=first,
            tpot=token,
            tokens=self.requests * OUTPUT,
            waiting=self.waiting,
            running=max(self.load * OUTPUT * token_s, 2.0),
            prompt_tokens=self.requests * PROMPT,
            cache_use=self.cache_use,
        )


def test_the_top_clock_is_kept_until_requests_are_known() -> None:
    engine = SteadyEngine()
    assert engine.play(int(QUEUE.short_s)) == [TOP] * int(QUEUE.short_s)
    assert engine.play(60)[-1] < TOP


def test_a_higher_load_takes_a_higher_clock() -> None:
    levels = [SteadyEngine(load=load).play(120)[-1] for load in (2.0, 20.0, 40.0)]
    assert levels[0] < levels[1] < levels[2]


def test_tighter_limits_take_a_higher_clock() -> None:
    wide = SteadyEngine(limits=ServingLimits(1.0, 0.1)).play(200)[-1]
    tight = SteadyEngine(limits=ServingLimits(0.1, 0.012)).play(200)[-1]
    assert wide < tight


def test_a_queue_raises_the_clock_at_once() -> None:
    engine = SteadyEngine()
    assert engine.play(120)[-1] < TOP // 2
    engine.waiting = 60.0
    assert engine.play(1) == [TOP]
    assert "60 wait" in engine.keeper.why


def test_a_full_cache_with_a_queue_takes_the_top_clock() -> None:
    engine = SteadyEngine()
    engine.play(120)
    engine.cache_use, engine.waiting = 0.97, 1.0
    assert engine.play(1) == [TOP]
    assert engine.keeper.why == "its cache or its seats are full"
    nearly = SteadyEngine(cache_use=0.9, waiting=1.0)
    assert nearly.play(120)[-1] < TOP


def test_full_seats_with_a_queue_take_the_top_clock() -> None:
    engine = SteadyEngine()
    engine.play(120)
    engine.keeper.seats = 1.0
    engine.waiting = 1.0
    assert engine.play(1) == [TOP]


def test_the_clock_falls_three_levels_a_second_after_three_calm_seconds() -> None:
    engine = SteadyEngine(load=2.0)
    engine.play(120)
    engine.waiting = 60.0
    engine.play(1)
    engine.waiting = 0.0
    levels = engine.play(8)
    assert levels[: int(QUEUE.calm_s) - 1] == [TOP] * (int(QUEUE.calm_s) - 1)
    steps = -np.diff(levels)
    assert steps.max() == QUEUE.most_levels_down


@pytest.mark.parametrize("slower", [0.8, 1.3])
def test_steps_that_take_longer_than_forecast_are_learned(slower: float) -> None:
    """Within a minute, the scale of times is nearly that of the engine."""
    engine = SteadyEngine(load=10.0, slower=slower)
    engine.play(180)
    steps, _ = engine.keeper.scales
    assert steps == pytest.approx(slower, rel=0.1)


def test_margins_grow_with_the_scatter_of_requests_and_forget() -> None:
    """Requests that vary by half have a 99th percentile far above their mean."""
    random = np.random.default_rng(1)

    def learn(deviation: float, margin: queue_keeper._Margin) -> float:
        for _ in range(1500):
            seconds = 0.02 * max(1.0 + deviation * random.standard_normal(), 0.05)
            histogram = LatencyHistogram((0.1, 0.2, math.inf), (1.0, 1.0, 1.0), seconds)
            margin.learn(histogram, 0.02, 1.0)
        return margin.factor

    margin = queue_keeper._Margin(0.0)
    steady = learn(0.05, margin)
    varied = learn(0.5, margin)
    again = learn(0.05, margin)
    assert steady == pytest.approx(1.0 + 2.8 * 0.05, abs=0.06)
    assert varied > 2.0
    assert again < 1.3


def test_margins_reach_no_further_than_the_buckets() -> None:
    """Nobody waited for longer than the last bucket that holds requests."""
    margin = queue_keeper._Margin(0.0)
    for place in range(600):
        seconds = 0.02 if place % 10 else 0.09
        histogram = LatencyHistogram((0.1, 0.2, math.inf), (20.0, 20.0, 20.0), 20.0 * seconds)
        margin.learn(histogram, 0.02, 1.0)
    assert margin.factor < 0.1 / 0.02


def test_late_requests_make_careful() -> None:
    engine = SteadyEngine(limits=ServingLimits(0.05, 0.05))
    engine.play(125)
    assert engine.keeper._care == 1.0
    engine.late_share = 0.05
    engine.play(65)
    assert engine.keeper._care == pytest.approx(KEEPER.care_fall)
    engine.play(1200)
    assert engine.keeper._care == KEEPER.least_care
    engine.late_share = 0.0
    engine.play(130)
    assert engine.keeper._care > KEEPER.least_care


def test_a_clock_that_needs_more_energy_is_not_taken() -> None:
    """Where idle power is all there is, a lower clock only takes longer."""
    work = forecast()
    hungry = replace(work, decode_j=1e3 * work.decode_s, prompt_j=1e3 * work.prompt_s)
    engine = SteadyEngine(load=0.5)
    engine.keeper.forecast = lambda *_: hungry
    assert engine.play(120)[-1] == TOP


def test_a_forecast_at_the_clocks_of_a_card_lies_between_its_own() -> None:
    work = forecast()
    between_hz = (0.5 * (LEVELS_HZ[3] + LEVELS_HZ[4]), LEVELS_HZ[-1])
    card = work.interpolate(LEVELS_HZ.tolist(), between_hz)
    assert card.decode_s[0] == pytest.approx(work.decode_s[3:5].mean(axis=0))
    assert card.prompt_s[1] == pytest.approx(work.prompt_s[-1])
    assert card.idle_w.shape == (2,)


@pytest.mark.parametrize(
    "name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"]
)
def test_the_use_of_the_cache_is_read(name: str) -> None:
    engine = name.partition(":")[0]
    lines = [f"{name} 0.85"]
    for metric in ("time_to_first_token_seconds", "time_per_output_token_seconds"):
        lines.append(f'{engine}:{metric}_bucket{{le="+Inf"}} 3')
        lines.append(f"{engine}:{metric}_sum 1.5")
    assert parse_engine_metrics("\n".join(lines)).cache_use == 0.85


# -- on the simulated engine


@pytest.fixture(scope="module")
def engine() -> list[StepCosts]:
    from wattcast.control.serving_rehearsal import build_clock_levels

    return build_clock_levels("llama3-8b", find_gpu("h200"), longest_context=4096)


def test_a_plant_differs_from_the_forecast_by_a_fifth_at_most(engine: list[StepCosts]) -> None:
    top = engine[-1]
    factors: dict[str, list[float]] = {name: [] for name in KINDS_OF_STEP}
    for seed in range(12):
        plant = perturb_costs(top, seed)
        for kind, (name, *_) in KINDS_OF_STEP.items():
            ours, theirs = (getattr(costs, name)[..., 0].max() for costs in (top, plant))
            factors[kind].append(theirs / ours)
    values = np.array(list(factors.values()))
    assert values.min() >= 0.8 - 1e-9
    assert values.max() <= 1.2 + 1e-9
    assert values.max() - values.min() > 0.2
    assert np.ptp(values, axis=0).max() > 0.1  # kinds of steps differ from each other
    again = perturb_costs(top, 3)
    assert np.array_equal(again.decode, perturb_costs(top, 3).decode)


def test_costs_of_a_plant_scatter_by_a_tenth(engine: list[StepCosts]) -> None:
    factors = []
    for seed in range(40):
        plant = perturb_costs(engine[-1], seed)
        ratio = plant.decode[..., 0].max() / engine[-1].decode[..., 0].max()
        factors.append(ratio)
    assert 0.085 < np.std(factors) < 0.111


def test_a_clock_that_was_asked_for_is_there_a_tenth_of_a_second_later(
    engine: list[StepCosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[tuple[float, int]] = []
    advance = ServingPlant.advance

    def remember(plant: ServingPlant, to_s: float, level: int) -> None:
        played.append((to_s, level))
        advance(plant, to_s, level)

    monkeypatch.setattr(ServingPlant, "advance", remember)
    trace = draw_trace(4.0, 512, 128, "poisson", 3.0, seed=1)
    serve_traffic(engine, trace, ServingLimits(1.0, 0.05), lambda *_: 0)
    top = len(engine) - 1
    assert played[0] == (1.0, top)
    later_s, level = played[1]
    assert level == top
    assert 1.08 < later_s < 1.12
    assert played[2] == (2.0, 0)


def test_bursts_are_served_within_limits_at_less_energy(engine: list[StepCosts]) -> None:
    plant = perturb_levels(engine, find_gpu("h200"), 7)
    trace = draw_trace(
        8.0,
        "lognormal:median=512,sigma=0.8,most=3000",
        "lognormal:median=128,sigma=0.8,most=900",
        "gamma:cv=2",
        240.0,
        seed=5,
    )
    limits = ServingLimits(1.0, 0.05)
    top = serve_traffic(plant, trace, limits, len(plant) - 1)
    ours = serve_traffic(plant, trace, limits, follow_keeper(make_queue_keeper(engine, limits)))
    assert count_kept_of_top(ours, top) == 1.0
    assert ours.energy_j < 0.75 * top.energy_j


def test_the_oracle_saves_no_less_than_the_policy(engine: list[StepCosts]) -> None:
    plant = perturb_levels(engine, find_gpu("h200"), 8)
    trace = draw_trace(6.0, 600, 100, "gamma:cv=2", 90.0, seed=6)
    found = rehearse_traffic(engine, plant, trace, ServingLimits(0.5, 0.05))
    assert found["minutes_kept_of_top"] == found["minutes_kept_at_top"] == 2
    assert 0.1 < found["saving"] <= found["oracle_saving"]


def test_long_prompts_are_forecast_in_chunks(engine: list[StepCosts]) -> None:
    short, long = (forecast_work(engine[-2:], prompt, 100.0) for prompt in (2000.0, 20000.0))
    assert (long.prompt_s > 8.0 * short.prompt_s).all()
