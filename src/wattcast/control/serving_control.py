"""Control a card that serves requests: energy per token under limits of response times.

A serving engine does what comes in, so that throughput says nothing about the clock until the queue
grows. The signal is the engine's own: histograms of the time to the first token (TTFT) and per
output token (TPOT), and counts, read from its Prometheus endpoint, which vLLM and SGLang both have.
``LatencyKeeper`` computes from the load which clocks keep the 99th percentiles below their limits,
and takes the lowest. ``serving_rehearsal`` plays it on a simulated engine.
"""

from __future__ import annotations

import bisect
import math
import urllib.error
import urllib.request
from collections import deque
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import MissingTool, bad_value
from wattcast.core.arrays import Array
from wattcast.serving.checking.metrics_text import parse_metrics_text

if TYPE_CHECKING:
    from wattcast.serving.step_costs import StepCosts


class LatencyKeeperCoefficients(Coefficients):
    """How the clock of a serving card follows its response times."""

    # below, the mean of two readings does not tell how many there were between them
    few_sequences: float
    tied: float  # how much the scales of a forecast are held together
    loosely_tied: float  # the same without a forecast
    most_levels_down: int  # of the clock, at once
    late_requests: float  # of the requests of a minute, above which less of the limits is used
    care_fall: float  # by which the used share of the limits falls then
    care_rise: float  # by which it rises in a minute without
    least_care: float  # share of the limits that is used at least
    # of the deviation of the number of requests, for which there have to be seats
    seat_spread: float
    queued_share: float  # of the requests of a TTFT limit, above which a queue raises the clock
    # times of steps within this of the shortest are as fast as the power limit allows
    fastest: float
    least_scale: float  # by which a forecast may be scaled at least
    # log change of the lengths of requests, beyond which a forecast is made anew
    new_lengths: float
    # of a token's time that a step takes without sequences, before it is learned
    empty_share: float
    alike_load: float  # relative difference within which two loads are compared by energy
    cheaper: float  # ratio of joules per token, beyond which a lower level costs more
    spread: float  # standard deviations of the number of requests that the limits leave room for
    goal: float  # of a limit, which the expected percentile keeps to
    # share of a limit, above which the requests that are in the engine now raise the clock
    guard: float
    tail: float  # 99th percentile of TTFT over its mean
    load_s: float  # window behind the load
    short_s: float  # window that shows that the load rises
    learning_s: float  # age at which a measured step counts 1/e
    patience_s: float  # between two steps of the clock down


KEEPER = load_coefficients("latency_keeper", LatencyKeeperCoefficients)


def adjust_care(
    care: float,
    late: float,
    requests: float,
    rise: float,
) -> float:
    """Return the share of the limits that is used next: less after many late requests, else more.

    ``care`` is the share that was used, and ``rise`` by what it grows after a time with few.
    """
    if late > KEEPER.late_requests * requests:
        return max(KEEPER.care_fall * care, KEEPER.least_care)
    return min(rise * care, 1.0)


# Metric names by engine, newest first. vLLM: docs.vllm.ai, "Production Metrics"; SGLang:
# docs.sglang.io, likewise.
FIRST_TOKEN = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
PER_TOKEN = (
    *("vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds"),
    *("vllm:time_per_output_token_seconds", "sglang:inter_token_latency_seconds"),
    "sglang:time_per_output_token_seconds",
)
GAUGES = (  # tokens, requests that wait, requests that are computed, tokens of prompts
    ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    ("vllm:num_requests_running", "sglang:num_running_reqs"),
    ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
)
CACHE_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
READ_TIMEOUT_S = 2.0
READING_INTERVAL_S = 2.0  # between two readings of an engine's metrics, simulated or real
LARGEST_ANSWER = 4 * 2**20


@dataclass(frozen=True)
class LatencyHistogram:
    """Hold the counts of a Prometheus histogram since its engine started, or between two
    readings."""

    edges: tuple[float, ...]  # upper ends of the buckets, the last is infinite
    counts: tuple[float, ...]  # at or below each edge
    total_s: float

    def since(self, before: LatencyHistogram | None) -> LatencyHistogram:
        """Return what came after an earlier reading; all of it where the engine was started
        anew."""
        if before is None or before.edges != self.edges or before.counts[-1] > self.counts[-1]:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return LatencyHistogram(self.edges, counts, self.total_s - before.total_s)

    @property
    def count(self) -> float:
        """Count the observations."""
        return self.counts[-1]

    @property
    def mean_s(self) -> float:
        """Return the mean of the observations, 0 where there are none."""
        return self.total_s / self.count if self.count > 0 else 0.0

    def count_above(self, limit_s: float) -> float:
        """Count the observations above the first edge that is not below a limit."""
        return self.count - self.counts[bisect.bisect_left(self.edges, limit_s)]


@dataclass(frozen=True)
class EngineReading:
    """Hold what an engine tells: cumulative histograms and tokens, and requests that wait or are
    computed now.
    """

    ttft: LatencyHistogram
    tpot: LatencyHistogram
    tokens: float
    waiting: float
    running: float = 0.0
    prompt_tokens: float = 0.0
    cache_use: float = 0.0  # share of the paged cache that is in use


def parse_engine_metrics(text: str) -> EngineReading:
    """Read an engine's metrics in Prometheus' text format; series of several models or ranks are
    added up.
    """
    metrics = parse_metrics_text(text)
    plain = metrics.sums
    buckets = metrics.buckets
    tokens, waiting, running, prompt_tokens = (_find_gauge(names, plain) for names in GAUGES)
    first_token = _find_histogram(FIRST_TOKEN, buckets, plain)
    per_token = _find_histogram(PER_TOKEN, buckets, plain)
    cache_use = metrics.find_largest(CACHE_USE) or 0.0
    return EngineReading(
        first_token,
        per_token,
        tokens,
        waiting,
        running,
        prompt_tokens,
        cache_use,
    )


def _find_gauge(names: Sequence[str], plain: Mapping[str, float]) -> float:
    """Return the first of these values that the engine reports; 0 where it reports none."""
    return next((plain[name] for name in names if name in plain), 0.0)


def _find_histogram(
    names: Sequence[str],
    buckets: Mapping[str, Mapping[float, float]],
    plain: Mapping[str, float],
) -> LatencyHistogram:
    """Return the first histogram of these names that is complete."""
    for name in names:
        series = buckets.get(name, {})
        if math.inf in series:
            edges = tuple(sorted(series))
            counts = tuple(series[edge] for edge in edges)
            return LatencyHistogram(edges, counts, plain.get(f"{name}_sum", 0.0))
    form = f"a histogram {names[0]} (vLLM) or {names[-1]} (SGLang)"
    raise bad_value("--metrics", form, "none")


FIT_SUMS = ("weights", "x²", "xy", "y²", "x", "y")  # by which A and W are fitted
FEW_AND_MANY = (4, 128)  # sequences in the steps that a forecast is taken from


def read_engine_metrics(url: str) -> EngineReading:
    """Fetch and read an engine's metrics. ``MissingTool`` when it does not answer."""
    if not url.startswith(("http://", "https://")):
        raise bad_value("--metrics", "an address such as http://localhost:8000/metrics", url)
    try:
        # The scheme was checked above.
        with urllib.request.urlopen(url, timeout=READ_TIMEOUT_S) as answer:  # noqa: S310
            return parse_engine_metrics(answer.read(LARGEST_ANSWER).decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError) as error:
        raise MissingTool(f"{url}: the engine's metrics cannot be read ({error}).") from None


@dataclass(frozen=True)
class ServingLimits:
    """Bound the 99th percentiles of response times."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise bad_value(name, "a time above zero", value)


@dataclass(frozen=True)
class StepForecast:
    """Hold what the steps of an engine take at each clock level, ``(level,)``.

    A step in which N sequences decode, and as many prompts come in as sequences end, takes a +
    w·N/L, with a = ``empty_s``, w = ``request_s`` and L output tokens per request."""

    empty_s: Array  # a step without a sequence
    request_s: Array  # what one request adds to all its steps together, its prompt included


def forecast_steps(
    by_level: Sequence[StepCosts],
    prompt: float,
    output: float,
) -> StepForecast:
    """Take both times from steps of 4 and 128 sequences without and with a prompt, as the power
    limit holds them.
    """
    few, many = FEW_AND_MANY
    context = prompt + 0.5 * output
    empty_s = []
    request_s = []
    for costs in by_level:
        most_tokens = len(costs.prompt) - 1 - many
        chunk = min(max(round(prompt), 1), most_tokens)
        mixed = costs.mixed_cost(
            many + chunk,
            many,
            context,
            [(chunk, 0)],
            many + 1,
        )
        few_s = _govern_step_s(costs, costs.decode_cost(few, few, context))
        many_s = _govern_step_s(costs, costs.decode_cost(many, many, context))
        prompt_s = (_govern_step_s(costs, mixed) - many_s) * prompt / chunk
        per_token_s = (many_s - few_s) / (many - few)
        empty_s.append(few_s - few * per_token_s)
        request_s.append(output * per_token_s + prompt_s)
    return StepForecast(np.array(empty_s), np.array(request_s))


def _govern_step_s(costs: StepCosts, cost: Any) -> float:
    """Return the seconds of a step under the power limit."""
    # A controller that forecasts no steps starts without the predictor.
    from wattcast.serving.governed_steps import govern_steps

    return govern_steps(costs, cost, 1, 0.0)[0]


@dataclass
class LatencyKeeper:
    """Choose a core clock from response times: the lowest at which the 99th percentiles keep their
    limits.

    An engine shares its steps among its N requests, so that with λ requests per second, and a and w
    of ``StepForecast``, a token takes

        τ = a / (1 - λw)

    on average, and N = λLτ requests are in the engine. N varies with the coefficient c = 1 /
    √(λLa): arrivals are random, and what carries N back, d(N / Lτ)/dN, is a / Lτ². A level is low
    enough where τ·(1 + z·c·(1 - a/τ)) and N·(1 + z·c) keep below their limits, and TTFT, which
    grows as τ does, too. Where more requests are in the engine than that, the clock goes up at
    once, by what a step with these requests takes. After a minute in which more than 1 % of the
    requests were late, less of the limits is used.

    a and w come from ``forecast`` and are scaled by what is measured: in a second, G tokens come
    from N sequences and A·a·G/N + W·w·G/L = 1. Without a forecast both follow 1/f, and the division
    of the time between them is learned."""

    levels_hz: Sequence[float]  # ascending
    limits: ServingLimits
    # By mean tokens of prompts and of outputs.
    forecast: Callable[[float, float], StepForecast] | None = None
    seats: float = 256.0  # requests that the engine computes at once; vLLM's max_num_seqs
    # z: standard deviations of the number of requests that the limits leave room for.
    spread: float = KEEPER.spread
    goal: float = KEEPER.goal  # of a limit, which the expected percentile keeps to
    # Share of a limit, above which the requests that are in the engine now raise the clock.
    guard: float = KEEPER.guard
    tail: float = KEEPER.tail  # 99th percentile of TTFT over its mean
    load_s: float = KEEPER.load_s  # window behind the load; the shorter one tells that it rises
    short_s: float = KEEPER.short_s
    learning_s: float = KEEPER.learning_s
    patience_s: float = KEEPER.patience_s  # between two steps down
    interval_s: float = READING_INTERVAL_S  # between two decisions
    level: int = field(init=False)
    why: str = field(init=False, default="start")

    def __post_init__(self) -> None:
        self.level = len(self.levels_hz) - 1
        # Time, engine, joules of the card.
        self._readings: deque[tuple[float, EngineReading, float]] = deque()
        self._moved_s = 0.0
        self._judged_s = 0.0
        self._care = 1.0  # share of the limits that is made use of
        self._steps: StepForecast | None = None
        self._lengths = np.ones(2)  # tokens of prompts and outputs that the forecast is for
        self._sums = np.zeros(len(FIT_SUMS))
        self._spent: dict[int, tuple[float, float]] = {}  # by level: load, joules per token

    def decide(
        self,
        now_s: float,
        reading: EngineReading,
        energy_j: float,
    ) -> int:
        """Return the level for the next interval. Call it every few seconds."""
        self._readings.append((now_s, reading, energy_j))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - self.load_s:
            self._readings.popleft()
        latest = self._read_window(0.0)
        lately = self._read_window(self.short_s)
        long = self._read_window(self.load_s)
        is_served = min(lately.ttft.count, long.tokens, long.tpot.mean_s) > 0
        if lately.seconds < 0.5 * self.short_s or not is_served:
            return self.level
        self._judge_lateness(now_s, lately)

        # The load that is prepared for: a standard error above the count, or a rise that is surer.
        load = max(long.load, lately.load - 2 * math.sqrt(lately.load / lately.seconds))
        load += math.sqrt(long.load / long.seconds)
        output = long.tokens / long.ttft.count
        steps = self._scale_forecast(latest, long, output)
        fits = self._find_fitting(steps, load, output, long)
        fits[: self._find_cheapest(now_s, long.load)] = False
        level = _lowest_level(fits)
        why = f"{load:.3g} requests/s take {load * steps.request_s[level]:.0%} of its time"
        urgent = self._find_urgent(
            steps,
            load,
            output,
            reading,
            latest.begin,
        )
        if urgent > level:
            level = urgent
            why = f"{reading.running + reading.waiting:.0f} requests are in the engine"
        may_fall = now_s - self._moved_s >= self.patience_s
        if level > self.level or (level < self.level and may_fall):
            self.level = max(level, self.level - KEEPER.most_levels_down)
            self.why = why
            self._moved_s = now_s
        return self.level

    def _judge_lateness(
        self,
        now_s: float,
        lately: _ServingWindow,
    ) -> None:
        """Use less of the limits after a minute with 1 % late requests, for an hour or so."""
        if now_s - self._judged_s < self.short_s:
            return
        self._judged_s = now_s
        late_first = lately.ttft.count_above(self.limits.ttft_s)
        late_tokens = lately.tpot.count_above(self.limits.tpot_s)
        late = max(late_first, late_tokens)
        self._care = adjust_care(self._care, late, lately.ttft.count, KEEPER.care_rise)

    def _find_fitting(
        self,
        steps: StepForecast,
        load: float,
        output: float,
        long: _ServingWindow,
    ) -> npt.NDArray[np.bool_]:
        """Tell at which levels the 99th percentiles keep their limits under a load,
        ``(level,)``."""
        tpot_s = self.goal * self._care * self.limits.tpot_s
        ttft_s = self.goal * self._care * self.limits.ttft_s
        a = steps.empty_s
        tau = a / np.maximum(1 - load * steps.request_s, 1e-6)
        deviation = self.spread / np.sqrt(load * output * a)
        fits = tau * (1 + deviation * (1 - a / tau)) <= tpot_s
        running = load * output * tau * (1 + KEEPER.seat_spread * deviation)
        fits &= running <= self.seats + 0.5 * load * self.limits.ttft_s
        ttft_over_tpot = long.ttft.mean_s / long.tpot.mean_s
        fits &= self.tail * ttft_over_tpot * tau <= ttft_s
        return fits

    def _find_urgent(
        self,
        steps: StepForecast,
        load: float,
        output: float,
        reading: EngineReading,
        before: EngineReading,
    ) -> int:
        """Return the lowest level that copes with the requests that are in the engine now."""
        inside = reading.running + reading.waiting
        # As many more may come until the next reading as came since the last one.
        more = max(inside - before.running - before.waiting, 0.0)
        is_crowded = inside + 0.5 * more > self.seats
        is_queueing = reading.waiting > KEEPER.queued_share * load * self.limits.ttft_s + 1
        w = steps.request_s
        if is_crowded or is_queueing:
            # Above this level, the power limit lets nothing run faster.
            return _lowest_level(w <= KEEPER.fastest * w.min())
        step_s = steps.empty_s + w * (inside + more) / output
        return _lowest_level(step_s <= self.guard * self._care * self.limits.tpot_s)

    def _scale_forecast(
        self,
        latest: _ServingWindow,
        long: _ServingWindow,
        output: float,
    ) -> StepForecast:
        """Return what steps take at each level: as forecast, times what was measured over that.

        The scales A and W minimise the mean of (A·x + W·y - 1)² + μ·(A - W)², with x = a·G/N and y
        = w·G/L in an interval, which counts by exp(-age / ``learning_s``)."""
        steps = self._renew_forecast(long, output)
        per_token_s = self._measure_per_token_s(latest)
        if per_token_s > 0:
            x = steps.empty_s[self.level] / per_token_s
            y = steps.request_s[self.level] * latest.tokens / latest.seconds / output
            remembered = math.exp(-latest.seconds / self.learning_s)
            interval = np.array([1.0, x * x, x * y, y * y, x, y])
            self._sums = remembered * self._sums + (1 - remembered) * interval
        if not self._sums[0] > 0:
            return steps
        xx, xy, yy, x, y = self._sums[1:] / self._sums[0]
        tie = KEEPER.tied if self.forecast is not None else KEEPER.loosely_tied
        xx = xx + tie
        xy = xy - tie
        yy = yy + tie
        determinant = xx * yy - xy * xy
        least = KEEPER.least_scale * determinant
        scale_a = max(yy * x - xy * y, least) / determinant
        scale_w = max(xx * y - xy * x, least) / determinant
        return StepForecast(scale_a * steps.empty_s, scale_w * steps.request_s)

    def _renew_forecast(
        self,
        long: _ServingWindow,
        output: float,
    ) -> StepForecast:
        """Return the forecast for the lengths of requests, a new one where these changed."""
        prompt = max(long.prompt_tokens / long.ttft.count, 1.0)
        lengths = np.array([prompt, output])
        if self._steps is not None:
            change = np.abs(np.log(lengths / self._lengths))
            if change.max() <= KEEPER.new_lengths:
                return self._steps
        self._lengths = lengths
        self._sums = np.zeros(len(FIT_SUMS))
        if self.forecast is not None:
            self._steps = self.forecast(prompt, output)
        else:
            # Most of the time is taken for that of requests, with which response times rise most.
            stretch = self.levels_hz[self.level] / np.asarray(self.levels_hz)
            empty_s = KEEPER.empty_share * long.tpot.mean_s * stretch
            request_s = (1.0 - KEEPER.empty_share) / long.load * stretch
            self._steps = StepForecast(empty_s, request_s)
        return self._steps

    def _measure_per_token_s(self, latest: _ServingWindow) -> float:
        """Return the time that a token of a sequence took; 0 where none was made.

        With few sequences it is the TPOT of those that end.
        """
        _, reading, _ = self._readings[-1]
        inside = 0.5 * (latest.begin.running + reading.running)
        if inside < KEEPER.few_sequences:
            return latest.tpot.mean_s
        return inside * latest.seconds / latest.tokens if latest.tokens > 0 else 0.0

    def _find_cheapest(
        self,
        now_s: float,
        load: float,
    ) -> int:
        """Return the lowest level that did not need more energy per token than one above it at
        about this load.
        """
        stayed_s = now_s - self._moved_s
        if stayed_s >= 0.5 * self.short_s:
            stayed = self._read_window(min(stayed_s, self.short_s))
            self._spent[self.level] = (load, stayed.energy_j / max(stayed.tokens, 1.0))
        alike = {}
        for level, (level_load, joules) in self._spent.items():
            if abs(level_load / load - 1) < KEEPER.alike_load:
                alike[level] = joules
        lowest = 0
        least_j = math.inf  # of the levels above
        for level in sorted(alike, reverse=True):
            if KEEPER.cheaper * least_j < alike[level]:
                lowest = max(lowest, level + 1)
            least_j = min(least_j, alike[level])
        return lowest

    def _read_window(self, seconds: float) -> _ServingWindow:
        """Return what came in the last seconds, or since the reading before."""
        now_s, new, new_j = self._readings[-1]
        place = len(self._readings) - 2
        while place > 0 and self._readings[place][0] > now_s - seconds:
            place -= 1
        then_s, old, old_j = self._readings[max(place, 0)]
        return _ServingWindow(
            seconds=now_s - then_s,
            ttft=new.ttft.since(old.ttft),
            tpot=new.tpot.since(old.tpot),
            tokens=max(new.tokens - old.tokens, 0.0),
            prompt_tokens=max(new.prompt_tokens - old.prompt_tokens, 0.0),
            energy_j=new_j - old_j,
            begin=old,
        )


class _ServingWindow(NamedTuple):
    seconds: float
    ttft: LatencyHistogram
    tpot: LatencyHistogram
    tokens: float
    prompt_tokens: float
    energy_j: float
    begin: EngineReading

    @property
    def load(self) -> float:
        return self.ttft.count / self.seconds if self.seconds > 0 else 0.0


def _lowest_level(fits: npt.NDArray[np.bool_]) -> int:
    """Return the lowest level from which on all fit, or the highest."""
    last_unfit = int(np.max(np.nonzero(~fits)[0], initial=-1))
    return min(last_unfit + 1, len(fits) - 1)
