"""Choose the clock of a serving card from the work that is in its engine, second by second.

``serving_control.LatencyKeeper`` takes load for stationary. Real traffic comes in bursts and its
lengths are random, so that ``QueueKeeper`` looks at what is there: requests that wait, sequences
that decode, the cache they use, and what is forecast to come before the next look. It takes the
frugal clock at which all of this still meets the limits, with margins learned from how far its own
forecasts were off.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.control.serving_control import (
    EngineReading,
    LatencyHistogram,
    ServingLimits,
    adjust_care,
)
from wattcast.core.arrays import Array
from wattcast.serving.governed_steps import predict_steady_step
from wattcast.serving.step_costs import StepCosts


class QueueKeeperCoefficients(Coefficients):
    """How the clock of a serving card follows the work in its engine."""

    interval_s: float  # between two decisions
    reaction_s: float  # until a decision that is made at the next look has an effect
    burst_spread: float  # standard deviations of arrivals before the next look to be ready for
    load_spread: float  # standard errors added to the load of a minute
    long_s: float  # window behind the load, and behind the lengths of requests
    short_s: float  # window that shows that the load rises
    learning_s: float  # age at which a measured step counts 1/e
    tie: float  # how much the scales of a forecast are held to it
    memory_s: float  # age at which a request counts 1/e in the margins
    margin_spread: float  # standard deviations of the forecast's errors that are left room for
    tail_requests: float  # share of the requests that may lie above a margin
    first_margin: float  # mean of measured over forecast times without experience
    first_deviation: float  # of single requests, relative to that
    first_weight: float  # requests that the margin without experience counts for
    block_s: float  # of ended requests, whose late ones are counted
    care_rise: float  # by which it rises in a block without
    goal: float  # of a limit, which a forecast with its margin keeps to
    full_cache: float  # share of the cache, above which requests may be computed anew
    full_seats: float  # share of the seats, above which requests may have to wait
    calm_s: float  # after the clock was raised, before it falls
    most_levels_down: int  # at once
    new_lengths: float  # log change of mean lengths, beyond which a forecast is made anew
    least_step_scale: float  # of measured over forecast times of steps that is believed
    most_step_scale: float
    least_prompt_scale: float  # as of steps, of prompts
    most_prompt_scale: float
    first_token_independence: float  # power of the number of requests that are independent
    token_independence: float  # as of first tokens, of times per token


QUEUE = load_coefficients("queue_keeper", QueueKeeperCoefficients)

SEQUENCES = (1, 4, 16, 32, 64, 96, 128, 192, 256)  # in the steps that are forecast
RATIOS = np.append(np.geomspace(0.2, 100.0, 80), math.inf)  # of measured over forecast times
WITHIN_BUCKETS = (0.125, 0.375, 0.625, 0.875)  # where times of a bucket are taken to be
PROMPT_SEQUENCES = 16  # in the step that a forecast prompt is added to
# Wilson and Hilferty: a variable of a gamma distribution is the cube of a normal one, whose terms
# are thirds of the variation.
CUBE = 3
LEAST_FREE = 1e-3  # share of the time without prompts, where prompts alone are too many
FIT_SUMS = ("weights", "x²", "xy", "y²", "x", "y")  # by which scales are fitted
LEAST_WEIGHT = 1e-3  # of the measured intervals, to divide by


@dataclass(frozen=True)
class WorkForecast:
    """Forecast times and energies of an engine's work at each clock level.

    ``decode_s`` and ``decode_j`` are those of a step in which ``sequences`` decode, ``(level,
    sequences)``; ``prompt_s`` and ``prompt_j`` what a mean prompt adds, ``(level,)``."""

    sequences: Array
    decode_s: Array
    decode_j: Array
    prompt_s: Array
    prompt_j: Array
    idle_w: Array

    def interpolate(
        self,
        known_hz: Sequence[float],
        clocks_hz: Sequence[float],
    ) -> WorkForecast:
        """Return the forecast at other clocks, linear between those that are known."""

        def at_clocks(table: Array) -> Array:
            columns = [np.interp(clocks_hz, known_hz, column) for column in np.atleast_2d(table.T)]
            rows = np.transpose(columns)
            return rows[:, 0] if table.ndim == 1 else rows

        return WorkForecast(
            self.sequences,
            at_clocks(self.decode_s),
            at_clocks(self.decode_j),
            at_clocks(self.prompt_s),
            at_clocks(self.prompt_j),
            at_clocks(self.idle_w),
        )


def forecast_work(
    by_level: Sequence[StepCosts],
    prompt: float,
    output: float,
) -> WorkForecast:
    """Forecast the work of requests with these mean lengths from the costs of steps."""
    context = prompt + 0.5 * output
    decode = np.empty((2, len(by_level), len(SEQUENCES)))
    prompts = np.empty((2, len(by_level)))
    for level, costs in enumerate(by_level):
        for place, sequences in enumerate(SEQUENCES):
            decode[:, level, place] = predict_steady_step(costs, sequences, context, ())
        middle = SEQUENCES.index(PROMPT_SEQUENCES)
        room = len(costs.prompt) - 1 - SEQUENCES[middle]
        chunk = min(max(round(prompt), 1), room)
        earlier = round(0.5 * max(prompt - chunk, 0.0))
        mixed = predict_steady_step(costs, SEQUENCES[middle], context, [(chunk, earlier)])
        prompts[:, level] = (np.array(mixed) - decode[:, level, middle]) * prompt / chunk
    idle_w = np.array([costs.idle_w for costs in by_level])
    prompts = np.maximum(prompts, 1e-9)
    return WorkForecast(
        sequences=np.array(SEQUENCES, float),
        decode_s=decode[0],
        decode_j=decode[1],
        prompt_s=prompts[0],
        prompt_j=prompts[1],
        idle_w=idle_w,
    )


class _Look(NamedTuple):
    """What was read at a moment."""

    at_s: float
    reading: EngineReading

    @property
    def arrivals(self) -> float:
        """Count the requests that had come by then."""
        return self.reading.ttft.count + self.reading.waiting


class _Load(NamedTuple):
    """The traffic that is prepared for."""

    per_s: float
    mean_per_s: float
    prompt: float
    output: float
    dispersion: float  # variance of the arrivals of a second over their mean


class _WorkTimes(NamedTuple):
    """What the work of an engine takes at each level, ``(level,)``."""

    first_s: Array  # from arrival to the first token, on average
    token_s: Array  # per token, now or if the level stays, whichever takes longer
    now_s: Array  # per token, with the sequences that decode now
    steady: Array  # sequences that decode if the level stays


@dataclass
class _Margin:
    """Learn how far single requests lie above what was forecast for them.

    An engine tells the sum and the number of times since the last look. With r the mean over its
    forecast, and n the number, the variance of single requests lies between (r - mean r)², where
    those of a second are alike, and n times that, where they are independent: it is n^p times that.
    First tokens of a burst wait for each other (p = 0); outputs differ in length (p = 1/2). The
    margin is the 99th percentile of a gamma distribution with that mean and deviation (Wilson and
    Hilferty), a little further out, since it has to hold in nearly every minute."""

    independence: float  # p
    weight: float = QUEUE.first_weight  # requests
    looks: float = QUEUE.first_weight
    total: float = QUEUE.first_weight * QUEUE.first_margin
    squares: float = QUEUE.first_weight * (QUEUE.first_margin * QUEUE.first_deviation) ** 2
    bounds: Array = field(default_factory=lambda: np.zeros(len(RATIOS)))  # requests by ``RATIOS``

    def learn(
        self,
        new: LatencyHistogram,
        forecast_s: float,
        seconds: float,
    ) -> None:
        """Add requests for which ``forecast_s`` was forecast."""
        kept = math.exp(-seconds / QUEUE.memory_s)
        count = new.count
        ratio = new.mean_s / forecast_s
        off = ratio - self.total / self.weight
        self.bounds *= kept
        high = np.minimum(new.edges, 2.0 * new.edges[-2])
        low = np.append(0.0, high[:-1])
        numbers = np.diff(new.counts, prepend=0.0)
        for share in WITHIN_BUCKETS:
            ratios = (low + share * (high - low)) / forecast_s
            places = np.searchsorted(RATIOS[:-1], ratios)
            np.add.at(self.bounds, places, numbers / len(WITHIN_BUCKETS))
        self.squares = kept * self.squares + count**self.independence * off * off
        self.looks = kept * self.looks + 1.0
        self.total = kept * self.total + count * ratio
        self.weight = kept * self.weight + count

    @property
    def factor(self) -> float:
        """Return by what a forecast is multiplied to be kept to nearly always."""
        mean = self.total / self.weight
        variation = math.sqrt(self.squares / self.looks) / mean
        part = variation / CUBE
        root = 1.0 - part**2 + QUEUE.margin_spread * part
        # no further out than the buckets of the engine's histogram allow
        above = np.cumsum(self.bounds[::-1])[::-1]
        place = int(np.searchsorted(-above, -QUEUE.tail_requests * self.bounds.sum()))
        bound = RATIOS[max(place - 1, 0)] if above[0] > QUEUE.first_weight else math.inf
        return float(min(mean * max(root, 1.0) ** CUBE, bound))


@dataclass
class QueueKeeper:
    """Choose a core clock from the work in an engine: the most frugal that meets the limits.

    At each level, with d(N) the time of a step in which N sequences decode, q that of a mean
    prompt, λ the requests per second and ρ = λ·q the share of the time that prompts take,

        τ = d(N) / (1 - ρ)

    is forecast for a token. N is what is in the engine now, and what will be there if this level
    stays: N = λ·L·τ with L tokens per output. The last of W waiting requests and of n that may come
    before the next look has its first token after

        t = (W + n)·q + d(N)

    of which what is left after the next look is done at the highest clock. Both times d and q are
    scaled by what is measured, and τ and t multiplied by a margin learned from earlier errors."""

    levels_hz: Sequence[float]  # ascending
    limits: ServingLimits
    forecast: Callable[[float, float], WorkForecast]  # by mean tokens of prompts and of outputs
    seats: float = 256.0  # requests that the engine computes at once; vLLM's max_num_seqs
    interval_s: float = QUEUE.interval_s
    level: int = field(init=False)
    why: str = field(init=False, default="start")

    def __post_init__(self) -> None:
        self.level = len(self.levels_hz) - 1
        self._looks: deque[_Look] = deque()
        self._raised_s = 0.0
        self._work: WorkForecast | None = None
        self._lengths = np.ones(2)
        self._sums = np.zeros(len(FIT_SUMS))
        self._margins = (
            _Margin(QUEUE.first_token_independence),
            _Margin(QUEUE.token_independence),
        )
        self._forecasts: tuple[float, float] | None = None  # for now: both times, without margin
        self._care = 1.0  # share of the limits that is made use of
        self._judged: _Look | None = None  # begin of the requests whose lateness is counted

    def decide(
        self,
        now_s: float,
        reading: EngineReading,
        energy_j: float,
    ) -> int:
        """Return the level for the next interval. Call it every ``interval_s``."""
        self._looks.append(_Look(now_s, reading))
        while len(self._looks) > 2 and self._looks[1].at_s <= now_s - QUEUE.long_s:
            self._looks.popleft()
        load = self._estimate_load()
        if load is None:
            return self._move(now_s, len(self.levels_hz) - 1, "nothing is known of its requests")
        work = self._renew_forecast(load)
        self._learn_steps(work, load)
        self._learn_margins()

        times = self._forecast_times(work, load, reading)
        margins = [margin.factor for margin in self._margins]
        goal = QUEUE.goal * self._care
        fits = margins[0] * times.first_s <= goal * self.limits.ttft_s
        fits &= margins[1] * times.token_s <= goal * self.limits.tpot_s
        power_w = self._forecast_power_w(work, load, times.steady)
        level = _choose_level(fits, power_w)
        why = f"{reading.running:.0f} requests run, {reading.waiting:.0f} wait"
        inside = reading.running + reading.waiting
        is_full = reading.cache_use > QUEUE.full_cache or inside > QUEUE.full_seats * self.seats
        if is_full and reading.waiting > 0:
            level = len(self.levels_hz) - 1
            why = "its cache or its seats are full"
        self._move(now_s, level, why)
        self._remember_forecast(times, load)
        return self.level

    def _remember_forecast(
        self,
        times: _WorkTimes,
        load: _Load,
    ) -> None:
        """Keep what is forecast for requests at the level that was chosen.

        A request that ends has seen the times per token of its whole life."""
        token_s = float(times.now_s[self.level])
        if self._forecasts is not None:
            share = min(QUEUE.interval_s / max(load.output * token_s, QUEUE.interval_s), 1.0)
            token_s = share * token_s + (1.0 - share) * self._forecasts[1]
        self._forecasts = (float(times.first_s[self.level]), token_s)

    def _move(
        self,
        now_s: float,
        level: int,
        why: str,
    ) -> int:
        """Raise the clock at once, and let it fall after a calm, not too far."""
        if level > self.level:
            self._raised_s = now_s
            self.why = why
            self.level = level
        elif level < self.level and now_s - self._raised_s >= QUEUE.calm_s:
            self.why = why
            self.level = max(level, self.level - QUEUE.most_levels_down)
        return self.level

    def _estimate_load(self) -> _Load | None:
        """Return the traffic that is prepared for; None before enough of it came."""
        last = self._looks[-1]
        first = self._looks[0]
        seconds = last.at_s - first.at_s
        begun = last.reading.ttft.count - first.reading.ttft.count
        ended = last.reading.tpot.count - first.reading.tpot.count
        tokens = last.reading.tokens - first.reading.tokens
        if seconds < QUEUE.short_s or min(begun, ended, tokens) <= 0:
            return None
        counts = np.diff([look.arrivals for look in self._looks])
        mean = float(counts.mean())
        dispersion = max(float(counts.var()) / mean, 1.0) if mean > 0 else 1.0
        mean_per_s = (last.arrivals - first.arrivals) / seconds
        error_per_s = math.sqrt(dispersion * mean_per_s / seconds)
        recent = [look for look in self._looks if look.at_s >= last.at_s - QUEUE.short_s]
        recent_s = max(last.at_s - recent[0].at_s, QUEUE.interval_s)
        recent_per_s = (last.arrivals - recent[0].arrivals) / recent_s
        recent_per_s -= math.sqrt(max(recent_per_s, 0.0) / recent_s)
        per_s = max(mean_per_s + QUEUE.load_spread * error_per_s, recent_per_s)
        prompts = last.reading.prompt_tokens - first.reading.prompt_tokens
        return _Load(
            per_s,
            mean_per_s,
            max(prompts / begun, 1.0),
            max(tokens / begun, 1.0),
            dispersion,
        )

    def _renew_forecast(self, load: _Load) -> WorkForecast:
        """Return the forecast for the lengths of requests, a new one where these changed."""
        lengths = np.array([load.prompt, load.output])
        if self._work is None or np.abs(np.log(lengths / self._lengths)).max() > QUEUE.new_lengths:
            self._lengths = lengths
            self._work = self.forecast(load.prompt, load.output)
        return self._work

    def _learn_steps(
        self,
        work: WorkForecast,
        load: _Load,
    ) -> None:
        """Learn from the last interval how far times of steps and of prompts are off.

        With s steps and n prompts in T seconds, A·x + B·y = 1, where x = s·d/T and y = n·q/T."""
        if len(self._looks) < 2:
            return
        before = self._looks[-2]
        last = self._looks[-1]
        seconds = last.at_s - before.at_s
        running = 0.5 * (before.reading.running + last.reading.running)
        prompts = last.reading.ttft.count - before.reading.ttft.count
        tokens = last.reading.tokens - before.reading.tokens - prompts
        if min(before.reading.running, last.reading.running) < 2 or tokens <= 0 or seconds <= 0:
            return
        x = tokens / running * self._find_step_s(work, running)[self.level] / seconds
        y = prompts * work.prompt_s[self.level] / seconds
        kept = math.exp(-seconds / QUEUE.learning_s)
        interval = np.array([1.0, x * x, x * y, y * y, x, y])
        self._sums = kept * self._sums + (1 - kept) * interval

    @property
    def scales(self) -> tuple[float, float]:
        """Return by what forecast times of steps and of prompts are multiplied.

        They minimise the mean of (A·x + B·y - 1)² + μ·((A - 1)² + (B - 1)²)."""
        weight = self._sums[0]
        if not weight > 0:
            return 1.0, 1.0
        xx, xy, yy, x, y = self._sums[1:] / weight
        tie = QUEUE.tie / max(weight, LEAST_WEIGHT)
        matrix = np.array([[xx + tie, xy], [xy, yy + tie]])
        steps, prompts = np.linalg.solve(matrix, np.array([x + tie, y + tie]))
        steps = np.clip(steps, QUEUE.least_step_scale, QUEUE.most_step_scale)
        prompts = np.clip(prompts, QUEUE.least_prompt_scale, QUEUE.most_prompt_scale)
        return float(steps), float(prompts)

    def _learn_margins(self) -> None:
        """Compare the requests since the last look with what was forecast for them."""
        if self._forecasts is None:
            return
        last = self._looks[-1]
        before = self._looks[-2]
        seconds = last.at_s - before.at_s
        for place, name in enumerate(("ttft", "tpot")):
            earlier: LatencyHistogram = getattr(before.reading, name)
            new = getattr(last.reading, name).since(earlier)
            if new.count > 0:
                self._margins[place].learn(new, self._forecasts[place], seconds)

        if self._judged is None:
            self._judged = last
        if last.at_s - self._judged.at_s < QUEUE.block_s:
            return
        begin = self._judged.reading
        first = last.reading.ttft.since(begin.ttft)
        token = last.reading.tpot.since(begin.tpot)
        late = max(first.count_above(self.limits.ttft_s), token.count_above(self.limits.tpot_s))
        self._judged = last
        self._care = adjust_care(self._care, late, first.count, QUEUE.care_rise)

    def _find_step_s(
        self,
        work: WorkForecast,
        sequences: Array | float,
    ) -> Array:
        """Return the time of a step at each level, with as many sequences at each or at all."""
        return _interpolate_rows(work.sequences, work.decode_s, sequences)

    def _forecast_times(
        self,
        work: WorkForecast,
        load: _Load,
        reading: EngineReading,
    ) -> _WorkTimes:
        """Return what the work in the engine takes at each level."""
        step_scale, prompt_scale = self.scales
        prompt_s = prompt_scale * work.prompt_s
        free = np.maximum(
            1.0 - load.per_s * prompt_s, LEAST_FREE
        )  # share of the time without prompts

        # sequences that decode if the level stays: N = λ·L·τ(N)
        step_s = step_scale * work.decode_s
        wanted = load.per_s * load.output * step_s / free[:, np.newaxis]
        steady = _find_crossing(work.sequences, wanted)
        inside = reading.running + reading.waiting
        decoding = np.maximum(steady, inside)
        decoding_s = step_scale * self._find_step_s(work, np.minimum(decoding, self.seats))
        token_s = np.where(np.isfinite(steady), decoding_s / free, math.inf)
        mean_free = np.maximum(1.0 - load.mean_per_s * prompt_s, LEAST_FREE)
        now_s = step_scale * self._find_step_s(work, max(reading.running, 1.0)) / mean_free

        # prompts wait for each other as in a queue with random arrivals (Pollaczek and Khinchine),
        # and for those that wait now; what a burst leaves at the next look is done at the top clock
        reaction_s = QUEUE.reaction_s
        expected = load.per_s * reaction_s
        burst = expected + QUEUE.burst_spread * math.sqrt(load.dispersion * expected)
        burst_s = np.maximum(burst * prompt_s - reaction_s, 0.0) * prompt_s[-1] / prompt_s
        others_s = load.dispersion * (1.0 - free) / free * prompt_s
        waiting_s = reading.waiting * prompt_s
        first_s = waiting_s + burst_s + others_s + prompt_s
        first_s += step_scale * self._find_step_s(work, inside)
        return _WorkTimes(first_s, token_s, now_s, steady)

    def _forecast_power_w(
        self,
        work: WorkForecast,
        load: _Load,
        steady: Array,
    ) -> Array:
        """Return the mean power at each level under the mean load."""
        step_scale, prompt_scale = self.scales
        sequences = np.clip(steady, 1.0, self.seats)
        per_s = load.mean_per_s
        steps_per_s = per_s * load.output / sequences
        step_s = step_scale * self._find_step_s(work, sequences)
        step_j = step_scale * _interpolate_rows(work.sequences, work.decode_j, sequences)
        busy = steps_per_s * step_s + per_s * prompt_scale * work.prompt_s
        idle = np.maximum(1.0 - busy, 0.0)
        prompts_w = per_s * prompt_scale * work.prompt_j
        return np.asarray(steps_per_s * step_j + prompts_w + idle * work.idle_w)


def _interpolate_rows(
    knots: Array,
    rows: Array,
    at: Array | float,
) -> Array:
    """Return each row at a value of its own, or all at the same one; the last piece goes on."""
    values = np.broadcast_to(at, len(rows))
    place = np.clip(np.searchsorted(knots, values), 1, len(knots) - 1)
    low = knots[place - 1]
    share = np.maximum((values - low) / (knots[place] - low), 0.0)
    each = np.arange(len(rows))
    return np.asarray((1.0 - share) * rows[each, place - 1] + share * rows[each, place])


def _find_crossing(
    knots: Array,
    wanted: Array,
) -> Array:
    """Return for each row where it falls below its knots, linear between them; infinite:
    nowhere."""
    over = wanted - knots
    crossing = np.full(len(wanted), math.inf)
    for row, excess in enumerate(over):
        below = np.flatnonzero(excess <= 0)
        if not len(below):
            continue
        place = below[0]
        if place == 0:
            crossing[row] = wanted[row, 0]
            continue
        share = excess[place - 1] / (excess[place - 1] - excess[place])
        crossing[row] = knots[place - 1] + share * (knots[place] - knots[place - 1])
    return crossing


def _choose_level(
    fits: npt.NDArray[np.bool_],
    power_w: Array,
) -> int:
    """Return the most frugal level of those from which on all fit, or the highest."""
    last_unfit = int(np.max(np.nonzero(~fits)[0], initial=-1))
    lowest = min(last_unfit + 1, len(fits) - 1)
    return lowest + int(np.argmin(power_w[lowest:]))
