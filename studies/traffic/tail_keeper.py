"""A policy that was tried in place of ``QueueKeeper``, and not taken: it was never judged.

It looks at an engine ten times a second: requests that wait and for how long, sequences that decode,
and the cache they use. It takes the most frugal clock with which the slowest percent of all
requests, as they were lately, still keeps the limits if the clock is raised at the next look.
``try_tail_keeper.py`` serves traces with it (docs/method/history.md, "Traffic").
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from latency_tails import RequestQueue, TailWatch, list_times

from wattcast.control.serving_control import (
    EngineReading,
    LatencyHistogram,
    ServingLimits,
)
from wattcast.core.arrays import Array
from wattcast.serving.governed_steps import predict_steady_step
from wattcast.serving.step_costs import StepCosts


@dataclass(frozen=True)
class TailKeeperConstants:
    """How the clock of a serving card follows the work in its engine."""

    interval_s: float = 0.1  # between two looks
    reaction_s: float = 0.2  # from an arrival until a clock raised for it is there, at most
    still_s: float = 0.45  # after which is decided anew though nothing has changed
    watched_s: float = 20.0  # at the highest clock, before any other is taken
    watched_requests: float = 10.0  # likewise
    long_s: float = 60.0  # window behind the load, and behind the lengths of requests
    short_s: float = 5.0  # window that shows that the load rises
    load_spread: float = 1.0  # standard errors added to the load of a minute
    measuring_s: float = 1.0  # that a measurement of steps takes
    learning_s: float = 30.0  # age at which a measured step counts 1/e
    tie: float = 0.02  # how much the scales of a forecast are held to it
    prompt_memory: float = 100.0  # requests, after which a prompt's length counts 1/e
    busy_memory_s: float = 5.0  # age at which the use of the engine counts 1/e
    calm_share: float = 0.2  # of an engine's time, added to that of prompts, by which tails grow
    block_s: float = 60.0  # of requests, whose slowest percent is kept
    blocks: float = 4.0  # that are remembered
    block_spread: float = 1.2  # standard deviations between blocks that are left room for
    block_room: float = 0.12  # of the tail of one block; less by the root of their number
    request_room: float = 0.5  # of the tail of one request; less by the root of their number
    goal: float = 0.95  # of a limit, which a tail with its room keeps to
    base: float = 0.9  # share of the tail that keeps to it without a higher clock later
    waiting_means: float = 3.0  # mean waits of a steady queue that are left room for
    late_means: float = 0.75  # of the highest speed, at which the rest of a late request is done
    queue_spread: float = 3.5  # standard deviations of the work of waiting prompts
    full_power_s: float = 0.1  # of work, before the power limit slows the highest clock down
    crowding: float = 0.5  # power of the growth of queues, by which tails per token grow
    backlog: float = 0.35  # of what mean outputs may be held up, which waiting prompts may take
    spare_late: float = 0.005  # share of a minute's requests that may be late, and are given up
    late_requests: float = 0.004  # share of late requests, below which more of the limits is used
    care: float = 0.08  # log change of the used share of the limits by a late request
    least_care: float = 0.6  # share of the limits that is used at least
    full_cache: float = 0.95  # share of the cache, above which requests may be computed anew
    full_seats: float = 0.9  # share of the seats, above which requests may have to wait
    calm_s: float = 1.0  # after the clock was raised, before it falls
    most_levels_down: float = 1.0  # at once


QUEUE = TailKeeperConstants()

SEQUENCES = (1, 4, 16, 32, 64, 96, 128, 192, 256)  # in the steps that are forecast
NEW_LENGTHS = 0.25  # log change of mean lengths, beyond which a forecast is made anew
BATCH_TOKENS = 4096  # of prompts that are computed together, in the forecast of a queue
BESIDE = 16  # sequences that decode beside prompts, in the forecast
MINUTE_S = 60.0


@dataclass(frozen=True)
class WorkForecast:
    """Forecast times and energies of an engine's work at each clock level.

    ``decode_s`` and ``decode_j`` are those of a step in which ``sequences`` decode, ``(level,
    sequences)``; ``prompt_s`` and ``prompt_j`` what a mean prompt adds if it comes alone,
    ``(level,)``. ``batch_s`` is what it adds among many, as the power limit allows, and
    ``full_power_s`` that without a power limit, as in the first tenth of a second after a pause."""

    sequences: Array
    decode_s: Array
    decode_j: Array
    prompt_s: Array
    prompt_j: Array
    batch_s: Array
    full_power_s: Array
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
            at_clocks(self.batch_s),
            at_clocks(self.full_power_s),
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
    batches = np.empty((2, len(by_level)))
    middle = SEQUENCES.index(BESIDE)
    for level, costs in enumerate(by_level):
        for place, sequences in enumerate(SEQUENCES):
            decode[:, level, place] = predict_steady_step(costs, sequences, context, ())
        room = len(costs.prompt) - 1 - BESIDE
        chunk = min(max(round(prompt), 1), room)
        earlier = round(0.5 * max(prompt - chunk, 0.0))
        mixed = predict_steady_step(costs, BESIDE, context, [(chunk, earlier)])
        prompts[:, level] = (np.array(mixed) - decode[:, level, middle]) * prompt / chunk

        # many prompts in one step, with and without a power limit
        copies = max(min(BATCH_TOKENS, room) // chunk, 1)
        chunks = [(chunk, earlier)] * copies
        together_s, _ = predict_steady_step(costs, BESIDE, context, chunks)
        tokens = BESIDE + copies * chunk
        with_prompts = costs.mixed_cost(tokens, BESIDE, context, chunks, BESIDE + copies)
        without = costs.mixed_cost(BESIDE, BESIDE, context, [], BESIDE)
        batch_s = (together_s - decode[0, level, middle], with_prompts[0] - without[0])
        batches[:, level] = np.array(batch_s) * prompt / (chunk * copies)
    prompts = np.maximum(prompts, 1e-9)
    batches = np.maximum(batches, 1e-9)
    return WorkForecast(
        sequences=np.array(SEQUENCES, float),
        decode_s=decode[0],
        decode_j=decode[1],
        prompt_s=prompts[0],
        prompt_j=prompts[1],
        batch_s=batches[0],
        full_power_s=batches[1],
        idle_w=np.array([costs.idle_w for costs in by_level]),
    )


@dataclass(frozen=True)
class CountedReading(EngineReading):
    """A reading with the count of requests that ended (vLLM's ``vllm:request_success_total``)."""

    ended: float = 0.0


class _Look(NamedTuple):
    """What was read at a moment."""

    at_s: float
    reading: CountedReading
    arrived: float  # requests by then


class _Load(NamedTuple):
    """The traffic that is prepared for."""

    per_s: float
    mean_per_s: float
    prompt: float
    output: float


class _LevelWork(NamedTuple):
    """What the work of an engine takes at each level, ``(level,)``, scaled by what was measured."""

    prompt_s: Array  # a mean prompt alone
    batch_s: Array  # among others, as fast as the levels' speeds say
    decode_s: Array  # a step with the sequences that decode now
    crowded_s: Array  # with those that decode if the level stays, if that is more
    steady: Array  # sequences that decode if the level stays
    speed: Array  # at which first tokens come, relative to the highest level
    prompt_speed: Array  # at which prompts are computed, likewise


@dataclass
class _StepScales:
    """Learn by what forecast times of steps and prompts are to be multiplied.

    With s steps of d and n prompts of q in T seconds, A·x + B·y = 1 where x = s·d/T and y = n·q/T. A
    and B minimise the mean of (A·x + B·y - 1)² + μ·((A - 1)² + (B - 1)²)."""

    steps: float = 1.0  # A
    prompts: float = 1.0  # B
    _sums: Array = field(default_factory=lambda: np.zeros(6))  # weights, x², xy, y², x and y

    def learn(self, x: float, y: float, seconds: float) -> None:
        """Add an interval."""
        remembered = math.exp(-seconds / QUEUE.learning_s)
        interval = np.array([1.0, x * x, x * y, y * y, x, y])
        self._sums = remembered * self._sums + (1.0 - remembered) * interval
        weight = self._sums[0]
        xx, xy, yy, mean_x, mean_y = self._sums[1:] / weight
        tie = QUEUE.tie / max(weight, 1e-3)
        matrix = np.array([[xx + tie, xy], [xy, yy + tie]])
        steps, prompts = np.linalg.solve(matrix, np.array([mean_x + tie, mean_y + tie]))
        self.steps = float(np.clip(steps, 0.5, 2.0))
        self.prompts = float(np.clip(prompts, 0.05, 3.0))


@dataclass
class _PromptVariation:
    """Learn the coefficient of variation of the lengths of prompts."""

    _weight: float = 0.0
    _total: float = 0.0
    _squares: float = 0.0

    def learn(self, count: float, tokens: float) -> None:
        """Add prompts; the variance of their mean is a part of that of one."""
        remembered = math.exp(-count / QUEUE.prompt_memory)
        mean = tokens / count
        before = self._total / self._weight if self._weight > 0 else 0.0
        self._weight = remembered * self._weight + count
        self._total = remembered * self._total + tokens
        self._squares = remembered * self._squares + count * count * (mean - before) ** 2

    @property
    def value(self) -> float:
        """Return the deviation over the mean, no more than three."""
        if not self._total > 0:
            return 1.0
        mean = self._total / self._weight
        return min(math.sqrt(self._squares / self._weight) / mean, 3.0)


def _make_tail() -> TailWatch:
    return TailWatch(QUEUE.block_s, round(QUEUE.blocks), QUEUE.block_spread)


@dataclass
class TailKeeper:
    """Choose a core clock from the work in an engine: the most frugal that keeps the limits.

    *First tokens.* Work is counted in seconds at the highest clock, v is the speed of a clock
    relative to that. F is the tail (``TailWatch``) of the work from arrival to the first token,
    without that of older requests ahead. Of a request that came a seconds ago, of which p is done
    and w = F plus the work ahead is to be done, the clock is high enough with

        w - p - v·r <= k·(T - a - r)

    with r the reaction, T the limit and k a share of the highest speed: what this clock leaves is
    done at a higher one. This holds for all requests but those that a minute may be late with, and
    for one that comes now. *Tokens.* E is the tail of what prompts add to the time per token. The
    clock is high enough where d + E / v, with d the time of a decode step, is within the limit."""

    levels_hz: Sequence[float]  # ascending
    limits: ServingLimits
    forecast: Callable[[float, float], WorkForecast]  # by mean tokens of prompts and of outputs
    seats: float = 256.0  # requests that the engine computes at once; vLLM's max_num_seqs
    interval_s: float = QUEUE.interval_s
    level: int = field(init=False)
    why: str = field(init=False, default="start")

    def __post_init__(self) -> None:
        self.level = len(self.levels_hz) - 1
        self.scales = _StepScales()
        self._wanted = self.level
        self._looks: deque[_Look] = deque()
        self._begin_s = math.nan
        self._raised_s = 0.0
        self._decided_s = -math.inf
        self._work: WorkForecast | None = None
        self._at_levels: _LevelWork | None = None
        self._lengths = np.ones(2)
        self._queue = RequestQueue()
        self._tails = (_make_tail(), _make_tail())  # of first tokens, and per token
        self._variation = _PromptVariation()
        self._cares = [0.0, 0.0]  # logs of the shares of the limits that are made use of
        self._late: deque[tuple[float, float]] = deque()  # first tokens, by the second
        self._busy = 0.0  # share of the time that prompts took lately
        self._measured: list[tuple[float, int]] = []  # sequences and level since ``_measure_look``
        self._measure_look: _Look | None = None
        self._rush = QUEUE.calm_share  # of the engine's time that prompts take now, and a bit
        self._life = (0.0, 1.0)  # step time and speed over the life of those that end now

    def decide(
        self,
        now_s: float,
        reading: CountedReading,
        energy_j: float,
    ) -> int:
        """Return the level for the next interval. Call it every ``interval_s``."""
        before = self._looks[-1] if self._looks else None
        self._watch(now_s, reading)
        last = self._looks[-1]
        is_still = before is not None and self._is_still(before, last)
        if is_still and now_s - self._decided_s < QUEUE.still_s:
            return self.level
        self._decided_s = now_s
        load = self._estimate_load()
        if load is None:
            return self._move(now_s, len(self.levels_hz) - 1, "nothing is known of its requests")
        work = self._renew_forecast(load)
        at_levels = self._scale_work(work, load, reading)
        self._learn_steps(work)
        requests = min(tail.count for tail in self._tails)
        if requests < QUEUE.watched_requests or now_s - self._begin_s < QUEUE.watched_s:
            return self._move(now_s, len(self.levels_hz) - 1, "its requests are watched")

        fits = np.isfinite(at_levels.steady)
        fits &= self._keeps_first_tokens(at_levels, load, now_s)
        fits &= self._keeps_tokens(at_levels, load)
        power_w = self._forecast_power_w(work, load, at_levels.steady)
        level = _choose_level(fits, power_w)
        why = f"{reading.running:.0f} requests run, {reading.waiting:.0f} wait"
        inside = reading.running + reading.waiting
        is_full = reading.cache_use > QUEUE.full_cache or inside > QUEUE.full_seats * self.seats
        if is_full and reading.waiting > 0:
            level = len(self.levels_hz) - 1
            why = "its cache or its seats are full"
        return self._move(now_s, level, why)

    def _watch(self, now_s: float, reading: CountedReading) -> None:
        """Note what came, began and ended since the last look."""
        before = self._looks[-1] if self._looks else None
        begun = reading.ttft.count
        arrived = max(reading.ended + reading.running, begun) + reading.waiting
        if before is None:
            self._begin_s = now_s
            self._looks.append(_Look(now_s, reading, arrived))
            return
        arrived = max(before.arrived, arrived)
        at_levels = self._at_levels
        speed = 1.0 if at_levels is None else float(at_levels.speed[self.level])
        prompt_s = 0.0 if at_levels is None else float(at_levels.batch_s[-1])
        older = self._queue.count_older(before.at_s - QUEUE.reaction_s)
        done_s = self._queue.done_s
        self._queue.advance(now_s - before.at_s, speed)
        new = max(round(arrived - before.arrived), 0)
        self._queue.add(new, before.at_s, done_s, older * prompt_s)
        self._learn_requests(now_s, reading, before.reading)
        self._queue.keep_newest(arrived - begun)
        self._looks.append(_Look(now_s, reading, arrived))
        alone_s = 0.0 if at_levels is None else float(at_levels.prompt_s[-1])
        self._rush = QUEUE.calm_share + min(self._count_recent()[0] * alone_s, 1.0)
        while len(self._looks) > 2 and self._looks[1].at_s <= now_s - QUEUE.long_s:
            self._looks.popleft()

    def _is_still(self, before: _Look, last: _Look) -> bool:
        """Tell whether nothing has come, begun or ended, nobody waits and the clock stays."""
        if self._queue or self._wanted != self.level or last.arrived != before.arrived:
            return False
        now, then = last.reading, before.reading
        is_same = now.ttft.count == then.ttft.count and now.ended == then.ended
        return is_same and now.running == then.running and now.waiting == then.waiting

    def _learn_requests(
        self,
        now_s: float,
        reading: CountedReading,
        before: CountedReading,
    ) -> None:
        """Learn from the requests that began or ended since the last look."""
        first = reading.ttft.since(before.ttft)
        token = reading.tpot.since(before.tpot)
        if first.count > 0:
            prompts = max(reading.prompt_tokens - before.prompt_tokens, 0.0)
            self._variation.learn(first.count, prompts)
            works_s = self._queue.take(now_s, first)
            for work_s in works_s if self._at_levels is not None else ():
                self._tails[0].add(now_s, work_s / self._rush)
        step_s, speed = self._life
        for time_s in list_times(token) if self._at_levels is not None else ():
            excess_s = max(time_s - step_s, 0.0) * speed
            self._tails[1].add(now_s, excess_s / self._rush)
        late = self._judge(0, first, self.limits.ttft_s)
        self._judge(1, token, self.limits.tpot_s)
        if late > 0:
            self._late.append((now_s, late))

    def _judge(self, place: int, new: LatencyHistogram, limit_s: float) -> float:
        """Use less of a limit after late requests, more after others; return how many were late."""
        late = new.count_above(limit_s)
        care = self._cares[place] + QUEUE.care * (QUEUE.late_requests * new.count - late)
        self._cares[place] = min(max(care, math.log(QUEUE.least_care)), 0.0)
        return late

    def _move(
        self,
        now_s: float,
        level: int,
        why: str,
    ) -> int:
        """Raise the clock at once, and let it fall after a calm, not too far."""
        self._wanted = level
        if level > self.level:
            self._raised_s = now_s
            self.why = why
            self.level = level
        elif level < self.level and now_s - self._raised_s >= QUEUE.calm_s:
            self.why = why
            self.level = max(level, self.level - round(QUEUE.most_levels_down))
        return self.level

    def _estimate_load(self) -> _Load | None:
        """Return the traffic that is prepared for; None before enough of it came."""
        last = self._looks[-1]
        first = self._looks[0]
        seconds = last.at_s - first.at_s
        begun = last.reading.ttft.count - first.reading.ttft.count
        tokens = last.reading.tokens - first.reading.tokens
        if begun <= 0 or tokens <= 0:
            return None
        mean_per_s = max((last.arrived - first.arrived) / seconds, 1e-6)
        error_per_s = math.sqrt(mean_per_s / seconds)
        recent_per_s, recent_s = self._count_recent()
        recent_per_s -= math.sqrt(max(recent_per_s, 0.0) / recent_s)
        prompts = last.reading.prompt_tokens - first.reading.prompt_tokens
        return _Load(
            max(mean_per_s + QUEUE.load_spread * error_per_s, recent_per_s),
            mean_per_s,
            max(prompts / begun, 1.0),
            max(tokens / begun, 1.0),
        )

    def _count_recent(self) -> tuple[float, float]:
        """Return the arrivals per second of the last seconds, and how many these are."""
        last = self._looks[-1]
        begin = last
        for look in reversed(self._looks):
            if look.at_s < last.at_s - QUEUE.short_s:
                break
            begin = look
        seconds = max(last.at_s - begin.at_s, self.interval_s)
        return (last.arrived - begin.arrived) / seconds, seconds

    def _renew_forecast(self, load: _Load) -> WorkForecast:
        """Return the forecast for the lengths of requests, a new one where these changed."""
        lengths = np.array([load.prompt, load.output])
        if self._work is None or np.abs(np.log(lengths / self._lengths)).max() > NEW_LENGTHS:
            self._lengths = lengths
            self._work = self.forecast(load.prompt, load.output)
        return self._work

    def _scale_work(
        self,
        work: WorkForecast,
        load: _Load,
        reading: CountedReading,
    ) -> _LevelWork:
        """Return what the work in the engine takes at each level."""
        steps, prompts = self.scales.steps, self.scales.prompts
        prompt_s = prompts * work.prompt_s
        running = min(max(reading.running, 1.0), self.seats)
        decode_s = steps * _interpolate_rows(work.sequences, work.decode_s, running)

        # sequences that decode if the level stays: N = λ·L·τ(N)
        free = np.maximum(1.0 - load.per_s * prompt_s, 1e-3)
        wanted = load.per_s * load.output * steps * work.decode_s / free[:, np.newaxis]
        steady = _find_crossing(work.sequences, wanted)
        crowd = np.minimum(np.maximum(steady, reading.running + reading.waiting), self.seats)
        crowded_s = steps * _interpolate_rows(work.sequences, work.decode_s, crowd)

        # short bursts are over before the power limit slows the highest clocks down
        at_limit = work.batch_s[-1] / work.batch_s
        at_full = work.full_power_s[-1] / work.full_power_s
        share = min(QUEUE.full_power_s / max(self._rush * self._tails[0].value, 1e-3), 1.0)
        prompt_speed = at_limit + share * (at_full - at_limit)
        prompt_speed = np.minimum(prompt_speed, prompt_s[-1] / prompt_s)
        batch_s = np.minimum(prompts * work.batch_s, prompt_s)
        mixed_s = batch_s[-1] / prompt_speed + decode_s
        speed = np.minimum((batch_s[-1] + decode_s[-1]) / mixed_s, 1.0)
        self._at_levels = _LevelWork(
            prompt_s,
            batch_s,
            decode_s,
            crowded_s,
            steady,
            speed,
            prompt_speed,
        )
        self._follow_life(self._at_levels)
        return self._at_levels

    def _follow_life(self, at_levels: _LevelWork) -> None:
        """Follow the step time and the speed that requests see which end now."""
        now = (float(at_levels.decode_s[self.level]), float(at_levels.prompt_speed[self.level]))
        if not self._life[0] > 0:
            self._life = now
            return
        life_s = max(float(self._lengths[1]) * now[0], 2.0 * self.interval_s)
        share = 1.0 - math.exp(-self.interval_s / life_s)
        step_s, speed = self._life
        self._life = (step_s + share * (now[0] - step_s), speed + share * (now[1] - speed))

    def _keeps_first_tokens(
        self,
        at_levels: _LevelWork,
        load: _Load,
        now_s: float,
    ) -> npt.NDArray[np.bool_]:
        """Tell at which levels first tokens come in time, ``(level,)``."""
        limit_s = QUEUE.goal * math.exp(self._cares[0]) * self.limits.ttft_s
        tail_s = self._rush * self._tails[0].widen(QUEUE.request_room, QUEUE.block_room)
        speed = at_levels.speed
        reaction_s = QUEUE.reaction_s

        # if the level stays: a part of the tail, and the waits of Pollaczek and Khinchine
        busy = np.minimum(load.mean_per_s * at_levels.prompt_s, 0.999)
        wait_s = 0.5 * (1.0 + self._variation.value**2) * busy / (1.0 - busy) * at_levels.prompt_s
        fits = QUEUE.base * tail_s / speed + QUEUE.waiting_means * wait_s <= limit_s

        # one that comes now
        prompt_s = float(at_levels.batch_s[-1])
        begun_s = 0.0
        if self._queue:
            begun_s = self._queue.done_s - self._queue.waiting[0].done_s
        ahead_s = max(len(self._queue) * prompt_s - begun_s, 0.0)
        if limit_s > 2.0 * reaction_s:
            rest_s = tail_s + ahead_s - speed * reaction_s
            fits &= rest_s <= QUEUE.late_means * (limit_s - reaction_s)
        else:
            fits &= (tail_s + ahead_s) / speed <= limit_s
        if not self._queue:
            return fits

        # those that wait
        since_s, done_s, older_s = self._queue.list_columns()
        places = np.arange(1.0, len(since_s) + 1.0)
        spread = QUEUE.queue_spread * self._variation.value
        ahead = float(at_levels.prompt_s[-1]) + float(at_levels.decode_s[-1])
        ahead = ahead + (places - 1.0 + spread * np.sqrt(places)) * prompt_s
        rest = np.maximum(tail_s + older_s - (self._queue.done_s - done_s), ahead)
        left_s = QUEUE.late_means * (limit_s - (now_s - since_s) - reaction_s)
        is_late = rest - speed[:, np.newaxis] * reaction_s > left_s
        return np.asarray(fits & (is_late.sum(axis=1) <= self._count_spare(now_s)))

    def _count_spare(self, now_s: float) -> float:
        """Count the requests that may still be late in a minute."""
        while self._late and self._late[0][0] < now_s - MINUTE_S:
            self._late.popleft()
        late = sum(count for _, count in self._late)
        first, last = self._looks[0].reading, self._looks[-1].reading
        allowed = QUEUE.spare_late * (last.ttft.count - first.ttft.count)
        return max(allowed - late, 0.0) // 1.0

    def _keeps_tokens(self, at_levels: _LevelWork, load: _Load) -> npt.NDArray[np.bool_]:
        """Tell at which levels the times per token keep their limit, ``(level,)``."""
        limit_s = self.limits.tpot_s
        aim_s = QUEUE.goal * math.exp(self._cares[1]) * limit_s
        tail_s = self._rush * self._tails[1].widen(QUEUE.request_room, QUEUE.block_room)
        busy = np.minimum(load.mean_per_s * at_levels.prompt_s, 0.98)
        share = 1.0 - math.exp(-self.interval_s / QUEUE.busy_memory_s)
        self._busy += share * (float(busy[self.level]) - self._busy)
        growth = np.maximum((1.0 - self._busy) / (1.0 - busy), 1.0) ** QUEUE.crowding
        fits = at_levels.crowded_s + tail_s / at_levels.prompt_speed * growth <= aim_s
        if len(self._queue) > 1:
            room_s = QUEUE.backlog * load.output * np.maximum(limit_s - at_levels.crowded_s, 0.0)
            fits &= (len(self._queue) - 1) * at_levels.prompt_s <= room_s
        return np.asarray(fits)

    def _learn_steps(self, work: WorkForecast) -> None:
        """Learn from the last second how far times of steps and of prompts are off."""
        last = self._looks[-1]
        begin = self._measure_look
        if begin is not None:
            self._measured.append((last.reading.running, self.level))
            if last.at_s - begin.at_s < QUEUE.measuring_s:
                return
        measured = self._measured
        self._measure_look = last
        self._measured = []
        if begin is None or min(running for running, _ in measured) < 2:
            return
        seconds = last.at_s - begin.at_s
        prompts = last.reading.ttft.count - begin.reading.ttft.count
        tokens = last.reading.tokens - begin.reading.tokens - prompts
        if tokens <= 0:
            return
        running = float(np.mean([running for running, _ in measured]))
        levels = [level for _, level in measured]
        step_s = _interpolate_rows(work.sequences, work.decode_s, running)[levels].mean()
        prompt_s = work.prompt_s[levels].mean()
        x = tokens / running * float(step_s) / seconds
        y = prompts * float(prompt_s) / seconds
        self.scales.learn(x, y, seconds)

    def _forecast_power_w(
        self,
        work: WorkForecast,
        load: _Load,
        steady: Array,
    ) -> Array:
        """Return the mean power at each level under the mean load."""
        step_scale, prompt_scale = self.scales.steps, self.scales.prompts
        sequences = np.clip(steady, 1.0, self.seats)
        per_s = load.mean_per_s
        steps_per_s = per_s * load.output / sequences
        step_s = step_scale * _interpolate_rows(work.sequences, work.decode_s, sequences)
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
    """Return for each row where it falls below its knots, linear between them; infinite: nowhere."""
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
