"""Simulate continuous batching: an engine's scheduler (``engines``), its paged cache, its host and
the GPU's governor.

Time has two clocks. The host schedules step n, launches it, waits for step n - 1 and hands out that
step's tokens, which takes until e(n); then it takes in requests that arrived and goes on. The
device runs step n after step n - 1 and not before its launch:

    launched(n) = b(n) + schedule + launch
    e(n) = max(launched(n), D(n - 1)) + output
    b(n + 1) = e(n)
    D(n) = max(D(n - 1), launched(n)) + d(n)

with D the end on the device and d the step's kernels. A step that is launched piece by piece ends
no earlier than its last launch, and how long that takes varies from step to step.

Steps that only decode change nothing but the contexts until a request arrives, ends, or the cache
is full, so a run of k of them is advanced at once; costs are linear in the context, which makes the
sum exact but for the bends of the table.
"""

from __future__ import annotations

import heapq
import itertools
import math
import struct
from array import array
from collections import deque
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from wattcast.core import BadInput
from wattcast.core.arrays import Array
from wattcast.serving.engines.step_scheduler import ActiveRequest, PromptChunks
from wattcast.serving.governed_steps import settle_clock
from wattcast.serving.prefix_cache import PrefixCache, SharedPath
from wattcast.serving.request_plan import EngineSettings, RequestPlan
from wattcast.serving.step_coefficients import STEPS
from wattcast.serving.step_costs import StepCosts, StepShape

SEGMENT_COLUMNS = (
    *("begin_s", "first_output_s", "last_output_s", "device_begin_s", "device_end_s"),
    *("steps", "decodes", "prompts", "prompt_tokens"),
    *("context", "energy_j", "waiting", "cache_use"),
    "device_waited_s",  # for the host, before the first step: part of the span and of its energy
)
_pack_segment = struct.Struct(f"{len(SEGMENT_COLUMNS)}d").pack  # twice as fast as array.extend
_LAUNCHES = 4096  # launch times that are drawn; then the same ones come again


@dataclass(frozen=True)
class Patience:
    """When a run may be given up, since so many requests are late that a bound is broken for
    sure.
    """

    first_token_s: float = math.inf  # from arrival
    late_firsts: int = 1 << 62  # so many requests later than that end the run
    token_s: float = math.inf  # from token to token
    late_tokens: int = 1 << 62


class BoundsBroken(Exception):
    """A run was given up, since it was sure to break a latency bound.

    ``most_running`` are the requests that an engine computed at once by then.
    """

    def __init__(self, most_running: int) -> None:
        super().__init__(most_running)
        self.most_running = most_running


@dataclass(frozen=True)
class ReplicaRun:
    """What one replica did: when each request had its tokens, and every run of equal steps."""

    first_token_s: Array
    last_token_s: Array
    segments: dict[str, Array]  # runs of equal steps, by ``SEGMENT_COLUMNS``
    preemptions: int
    gpu_count: int
    idle_w: float
    limit_w: float  # the mean power to which the governor limits a GPU
    waiting_w: float  # of a GPU between steps, while its host prepares one
    asked_tokens: int = 0  # of prompts that were looked up in the prefix cache
    found_tokens: int = 0  # of these, found there
    most_running: int = 0  # requests at once


@cache
def _draw_launches(
    seed: int,
    spread: float,
    memory: float,
) -> tuple[float, ...]:
    """Draw launch times as multiples of their mean: lognormal, each correlated with the one
    before.
    """
    factors = []
    level = 0.0
    for noise in np.random.default_rng(seed).standard_normal(_LAUNCHES).tolist():
        level = memory * level + math.sqrt(1.0 - memory**2) * noise
        factors.append(math.exp(spread * level - 0.5 * spread**2))
    return tuple(factors)


_EVENTS_LEFT: ContextVar[list[int] | None] = ContextVar("events left", default=None)


@contextmanager
def limit_events(most: int) -> Iterator[None]:
    """Let all simulations inside take ``most`` events together, of 0.1 ms each.

    One more raises ``BadInput``. How many a simulation takes shows only as it runs: a cache that is
    too small computes requests again and again.
    """
    token = _EVENTS_LEFT.set([most])
    try:
        yield
    finally:
        _EVENTS_LEFT.reset(token)


def _count_event(events_left: list[int]) -> None:
    """Count one event of those that ``limit_events`` allows."""
    events_left[0] -= 1
    if events_left[0] < 0:
        raise BadInput(
            "this traffic takes more events than may be simulated here. Ask for fewer requests, "
            "shorter prompts or outputs, or fewer kinds of GPUs, or use the command line."
        )


class EngineReplica:
    """One engine on its GPUs. ``submit`` gives it requests, ``run_until`` lets time pass.

    ``tell_end`` is called when a request has its last token, with the moment; it may submit others.
    """

    def __init__(
        self,
        costs: StepCosts,
        settings: EngineSettings,
        plan: RequestPlan,
        patience: Patience | None = None,
        tell_end: Callable[[int, float], None] | None = None,
    ) -> None:
        longest = max(plan.prompt_tokens) + 1
        if costs.groups.count_slots(longest + costs.block_tokens) > costs.cache_tokens:
            raise BadInput(
                f"the cache of {costs.cache_tokens} tokens cannot hold a prompt of {longest - 1}. "
                "Use more GPUs (tp), more of the memory or shorter prompts."
            )
        self.costs = costs
        self.settings = settings
        self.plan = plan
        self.scheduler = settings.scheduler()

        # time, and what was yielded by then
        self.now_s = 0.0
        self.device_s = 0.0
        self.first_token_s = [math.nan] * len(plan.arrival_s)
        self.last_token_s = [math.nan] * len(plan.arrival_s)
        self.preemptions = 0
        self.most_running = 0
        self.spent_j = 0.0  # up to device_s
        self.decoded = 0.0  # tokens without the first of each request
        self.outstanding = 0

        # requests on their way through the engine
        self._arriving: list[tuple[float, int]] = []  # a heap, by the time of arrival
        self.queue: deque[int] = deque()
        self.prompts: list[ActiveRequest] = []
        self.decoding: dict[int, ActiveRequest] = {}  # in order of admission
        # (decode step after which a request has all tokens, request)
        self._ends: list[tuple[int, int]] = []
        self._steps_left = list(plan.decode_steps)
        self._again: dict[int, int] = {}  # preempted requests: tokens to compute anew
        # requests whose first or last token the device has not handed out yet
        self._first: list[int] = []
        self._last: list[int] = []

        # sums over these requests
        self.decode_step = 0  # decode steps so far
        self._context = 0.0  # tokens all decoding sequences attend to
        self._shared = 0  # of these, counted in the cache of another
        self._growth = 0.0  # tokens a step adds
        self._reserved = 0  # tokens of prompts being computed
        self._kept = 0  # tokens of blocks that windows and states of decoding sequences hold
        self._groups = costs.groups
        self.full_groups = costs.groups.full
        self._keeps_parts = bool(costs.groups.windows or costs.groups.states)
        self._tokens_a_block = costs.block_tokens * max(costs.groups.count, 1)  # of all groups
        # of each decoding sequence, on average: half of its last block is empty in every group
        self.unfilled_tokens = 0.5 * (costs.block_tokens - 1) * costs.groups.count
        self._cache: PrefixCache | None = None
        if settings.prefix_caching and not plan.carried:
            self._cache = PrefixCache(costs.block_tokens)
        self._asked_tokens = 0
        self._found_tokens = 0

        self._patience = patience
        self._late_firsts = 0
        self._late_tokens = 0
        self._tell_end = tell_end
        self._has_told = False  # of an end, in this ``run_until``

        self._after_prompts = False  # the last step held prompts
        self._mean_w = costs.idle_w
        self._segments = array("d")  # rows of SEGMENT_COLUMNS, one after another
        self.tokens_a_step = 1 + settings.speculative_tokens
        self._decode_host_s: dict[int, tuple[float, float]] = {}  # by sequences
        host = costs.host
        factors = _draw_launches(settings.seed, host.launch_spread, host.launch_memory)
        self._factors = itertools.cycle(factors)

    def submit(self, requests: Sequence[int]) -> None:
        """Add requests, which arrive when the plan says."""
        arrival_s = self.plan.arrival_s
        for request in requests:
            heapq.heappush(self._arriving, (arrival_s[request], request))
        self.outstanding += len(requests)

    def run_until(
        self,
        until_s: float,
        stops_at_end: bool = False,
    ) -> None:
        """Simulate up to the first moment at or after ``until_s`` at which the host is free.

        With ``stops_at_end`` it stops before that when a request has its last token.
        """
        self._has_told = False
        arriving = self._arriving
        scheduler = self.scheduler
        events_left = _EVENTS_LEFT.get()
        while self.now_s < until_s and not (stops_at_end and self._has_told):
            if events_left is not None:
                _count_event(events_left)
            if arriving and arriving[0][0] <= self.now_s and scheduler.receives(self):
                self._take_in_arrivals()
            if not (self.decoding or self.prompts or self.queue):
                if not self._idle_until_arrival():
                    return
                continue
            chunks = scheduler.schedule_prompts(self) if self.prompts or self.queue else []
            if chunks:
                self._advance_prompts(chunks)
            else:
                self._advance_decodes(until_s)

    def finish(self) -> ReplicaRun:
        """Run until every request has ended, and return what was recorded."""
        while self.is_busy:
            self.run_until(math.inf)
        table = np.array(self._segments).reshape(-1, len(SEGMENT_COLUMNS))
        return ReplicaRun(
            first_token_s=np.array(self.first_token_s),
            last_token_s=np.array(self.last_token_s),
            segments={name: table[:, place] for place, name in enumerate(SEGMENT_COLUMNS)},
            preemptions=self.preemptions,
            gpu_count=self.costs.gpu_count,
            idle_w=self.costs.idle_w,
            limit_w=self.costs.limit_w,
            waiting_w=self.costs.waiting_w,
            asked_tokens=self._asked_tokens,
            found_tokens=self._found_tokens,
            most_running=self.most_running,
        )

    @property
    def is_busy(self) -> bool:
        """Whether requests are in the engine, or tokens that it has not handed out."""
        return bool(self.outstanding or self._first or self._last)

    @property
    def waiting(self) -> int:
        """Count the requests that wait for their prompt."""
        return len(self.queue)

    @property
    def running(self) -> int:
        """Count the requests that are computed."""
        return len(self.decoding) + len(self.prompts)

    @property
    def cache_use(self) -> float:
        """Return the share of the paged cache that requests use."""
        return self._cache_used() / self.costs.cache_tokens

    @property
    def remaining_tokens(self) -> float:
        """Count the tokens that requests which decode are still to get."""
        ends = 0.0
        for running in self.decoding.values():
            steps = self._steps_left[running.request] - (self.decode_step - running.begun)
            ends += steps * self.plan.growth[running.request]
        return ends

    @property
    def load(self) -> int:
        """Weigh requests as vLLM's router does: one without its prompt counts as four that
        decode.
        """
        without_prompt = len(self._arriving) + len(self.queue) + len(self.prompts)
        return STEPS.waiting_weight * without_prompt + len(self.decoding)

    # Requests come in

    def _take_in_arrivals(self) -> None:
        """Queue the requests that have arrived by now."""
        arriving = self._arriving
        while arriving and arriving[0][0] <= self.now_s:
            self.queue.append(heapq.heappop(arriving)[1])
            self.now_s += self.costs.host.admit_s

    def _idle_until_arrival(self) -> bool:
        """Let an empty engine idle until the next request; False: none is to come."""
        drained_s = max(self.now_s, self.device_s) + self.costs.host.output_s
        self._hand_out(drained_s)
        if not self._arriving:
            self.now_s = max(self.now_s, self.device_s)
            return False
        next_s = self._arriving[0][0]
        if next_s > self.now_s:
            begin_s = self.device_s
            idle_s = max(next_s - begin_s, 0.0)
            self.device_s += idle_s
            idle_j = self.costs.idle_w * idle_s
            self._record(
                next_s,
                drained_s,
                drained_s,
                begin_s,
                (0, 0, 0, 0),
                idle_j,
            )
            self.now_s = next_s
        return True

    def _cache_used(self) -> float:
        used = self._context - self._shared
        cache = self._cache
        if cache is not None:
            used += cache.used_blocks * cache.block_tokens
        unfilled = self.unfilled_tokens * len(self.decoding)
        return self.full_groups * used + unfilled + self._reserved + self._kept

    # What the scheduler asks for

    def count_room(self) -> float:
        """Count the tokens of cache that are free after one more decode step."""
        return self.costs.cache_tokens - self._cache_used() - self.full_groups * self._growth

    def count_left(self, active: ActiveRequest) -> float:
        """Count the tokens that a request with a place is still to get."""
        request = active.request
        steps = self._steps_left[request]
        if request in self.decoding:
            steps -= self.decode_step - active.begun
        return steps * self.plan.growth[request]

    def count_outputs(self, active: ActiveRequest) -> float:
        """Count the tokens that a request which decodes has got since it came in."""
        return 1.0 + self._count_growth(active)

    def count_wanted(self, request: int) -> float:
        """Count the tokens that a request is to get from where it came in, or comes in next."""
        return self._steps_left[request] * self.plan.growth[request]

    def admit(self, prompt: ActiveRequest) -> bool:
        """Give the first request of the queue its place; False: it has no prompt to compute."""
        self.queue.popleft()
        running = self.running
        if running >= self.most_running:
            self.most_running = running + 1
        self._enter_cache(prompt)
        if self.plan.carried and prompt.request not in self._again:
            # nothing is to be computed: it decodes at once
            prompt.context += prompt.remaining
            self._begin_decoding(prompt)
            return False
        self._reserved += prompt.reserved
        self.prompts.append(prompt)
        return True

    def reserve_cache(self, request: int) -> ActiveRequest:
        """Return a request as it would come in: what the cache holds of it and what it needs."""
        plan = self.plan
        total = self._again.get(request, plan.prompt_tokens[request])
        path = SharedPath((), request) if plan.paths is None else plan.paths[request]
        block = self.costs.block_tokens
        cached_tokens = plan.shared_tokens[request]
        shared = cached_tokens
        joined = 0
        if self._cache is not None:
            prefix = self._cache.find_prefix(path, total)
            cached_tokens = max(cached_tokens, prefix.found_tokens)
            shared = max(shared, prefix.shared_tokens)
            joined = prefix.new_blocks * block
        full_groups = self.full_groups
        reserved = full_groups * (-(-(total - shared) // block) * block)
        if self._keeps_parts:
            reserved += self._groups.count_kept_tokens(total, self.settings.max_batched_tokens)
        joined *= full_groups
        return ActiveRequest(
            request,
            shared,
            cached_tokens,
            total - cached_tokens,
            reserved,
            path,
            joined,
        )

    def _enter_cache(self, prompt: ActiveRequest) -> None:
        """Note that a request uses what the cache holds of it."""
        if self._cache is None:
            return
        self._cache.use(prompt.path)
        if prompt.request not in self._again:
            self._asked_tokens += self.plan.prompt_tokens[prompt.request]
            self._found_tokens += int(prompt.context)

    def _leave_cache(
        self,
        request: ActiveRequest,
        tokens: float,
    ) -> None:
        """Leave so many tokens of a request in the cache for later prompts."""
        if self._cache is not None:
            self._cache.leave(request.path, int(tokens))

    def _begin_decoding(self, prompt: ActiveRequest) -> None:
        request = prompt.request
        steps = self._steps_left[request]
        if steps <= 0:
            self._leave_cache(prompt, prompt.context)
            self._last.append(request)
            self.outstanding -= 1
            return
        prompt.context += 1.0
        prompt.begun = self.decode_step
        if self._keeps_parts:
            prompt.kept = self._groups.count_kept_tokens(int(prompt.context) + steps)
            self._kept += prompt.kept
        self.decoding[request] = prompt
        self._context += prompt.context
        self._shared += prompt.shared
        self._growth += self.plan.growth[request]
        heapq.heappush(self._ends, (self.decode_step + steps, request))

    # Steps

    def _advance_prompts(self, chunks: PromptChunks) -> None:
        """Simulate one step that holds prompt chunks, and the decodes if the engine mixes them."""
        costs = self.costs
        host = costs.host
        decodes = len(self.decoding) if self.scheduler.mixes else 0
        shape, ended = self._shape_prompt_step(chunks, decodes)
        tokens = shape[0]

        # the host launches the step, then hands out the tokens of the step before
        begin_s = self.now_s
        device_begin_s = self.device_s
        sequences = decodes + len(chunks)
        launch_begin_s = begin_s + host.schedule_s + host.schedule_per_sequence_s * sequences
        launch_s = costs.launch_s(tokens, decodes, host.launch_layer_s, next(self._factors))
        launch_end_s = launch_begin_s + launch_s
        free_s = max(launch_end_s, device_begin_s)
        output_s = free_s + host.output_s + host.output_per_sequence_s * decodes

        # the device runs it
        start_s = max(device_begin_s, launch_begin_s)
        step_s, energy_j = self._run_steps(
            costs.cost_at_top(*shape), shape, 1, launch_end_s - start_s
        )
        waited_s = start_s - device_begin_s
        energy_j += costs.waiting_w * waited_s
        self.device_s = start_s + step_s
        self._after_prompts = True
        prompt_tokens = tokens - decodes * self.tokens_a_step
        counts = (1, decodes, len(chunks), prompt_tokens)
        self._record(
            begin_s,
            output_s,
            output_s,
            device_begin_s,
            counts,
            energy_j,
            waited_s,
        )

        if self.scheduler.mixes:
            self._context += self._growth
            self.decode_step += 1
        if decodes:
            self._end_requests()
        if ended:
            self._end_prompts()

    def _shape_prompt_step(self, chunks: PromptChunks, decodes: int) -> tuple[StepShape, int]:
        """Take the chunks of a step off their prompts; ``decodes`` requests decode in it.

        Return the shape of the step, and how many prompts end with it.
        """
        sizes = []
        ended = 0
        prompt_tokens = 0
        for prompt, tokens in chunks:
            sizes.append((tokens, prompt.context))
            prompt.context += tokens
            prompt.remaining -= tokens
            prompt_tokens += tokens
            ended += prompt.remaining == 0
        decode_tokens = decodes * self.tokens_a_step
        context = self._context / decodes if decodes else 0.0
        shape = (prompt_tokens + decode_tokens, decodes, context, sizes, decode_tokens + ended)
        return shape, ended

    def _end_prompts(self) -> None:
        """Let the requests decode whose prompt has been computed."""
        prompts = self.prompts
        self.prompts = [prompt for prompt in prompts if prompt.remaining]
        for prompt in prompts:
            if prompt.remaining:
                continue
            self._reserved -= prompt.reserved
            if self._again.pop(prompt.request, None) is None:
                self._first.append(prompt.request)
            self._begin_decoding(prompt)

    def _advance_decodes(self, until_s: float) -> None:
        """Simulate a run of decode-only steps up to the next event, as one."""
        most_steps = min(self._make_room(), self.scheduler.count_steps_ahead(self))
        costs = self.costs
        decodes = len(self.decoding)
        tokens = decodes * self.tokens_a_step
        cost = costs.decode_cost_at_top(tokens, decodes, self._context / decodes)

        # host and device in the first step
        launch_s, output_s = self._time_decode_host(decodes)
        host_s = launch_s + output_s
        begin_s = self.now_s
        device_begin_s = self.device_s
        start_s = (
            max(begin_s + launch_s, device_begin_s) + costs.host.switch_s * self._after_prompts
        )
        self._after_prompts = False
        first_output_s = start_s + output_s

        # all steps up to the next event
        second_output_s = max(first_output_s + host_s, start_s + cost.real + output_s)
        steps = self._count_steps(
            most_steps, (first_output_s, second_output_s), max(cost.real, host_s), until_s
        )
        span_s, energy_j = self._run_decodes(cost, steps, host_s)
        self.device_s = start_s + span_s
        last_output_s = first_output_s
        if steps > 1:
            device_output_s = self.device_s - span_s / steps + output_s
            last_output_s = max(first_output_s + host_s * (steps - 1), device_output_s)
        waited_s = start_s - device_begin_s
        energy_j += costs.waiting_w * waited_s
        self._record(
            begin_s,
            first_output_s,
            last_output_s,
            device_begin_s,
            (steps, decodes, 0, 0),
            energy_j,
            waited_s,
        )
        self._context += self._growth * steps
        self.decode_step += steps
        self._end_requests()

    def _run_decodes(
        self,
        cost: complex,
        steps: int,
        host_s: float,
    ) -> tuple[float, float]:
        """Return time and energy of decode steps, of which the first costs ``cost``.

        All of them are taken at the mean of the first and the last context.
        """
        decodes = len(self.decoding)
        tokens = decodes * self.tokens_a_step
        context = self._context / decodes
        last_context = context + self._growth / decodes * (steps - 1)
        if steps > 1:
            last_cost = self.costs.decode_cost_at_top(tokens, decodes, last_context)
            cost = 0.5 * (cost + last_cost)
        middle = (tokens, decodes, 0.5 * (context + last_context), (), tokens)
        floor_s = host_s * (steps - 1) + min(cost.real, host_s)
        return self._run_steps(cost, middle, steps, floor_s)

    def _time_decode_host(self, decodes: int) -> tuple[float, float]:
        """Return the host's time before and after a decode-only step of so many sequences."""
        times_s = self._decode_host_s.get(decodes)
        if times_s is None:
            host = self.costs.host
            launch_s = self.costs.launch_s(decodes * self.tokens_a_step, decodes)
            launch_s = launch_s + host.schedule_s + host.schedule_per_sequence_s * decodes
            output_s = host.output_s + host.output_per_sequence_s * decodes
            times_s = self._decode_host_s[decodes] = (launch_s, output_s)
        return times_s

    def _make_room(self) -> int:
        """Preempt requests until the cache has room for a step.

        Returns the most steps before a request ends or the cache is full.
        """
        if not self.decoding:  # prompts wait for cache that nobody will free
            raise BadInput(
                "no request can be admitted: the cache is too small for the next prompt."
            )
        room = self.costs.cache_tokens - self._cache_used()
        growth = self.full_groups * self._growth
        while room < growth and len(self.decoding) > 1:
            self._preempt()
            room = self.costs.cache_tokens - self._cache_used()
            growth = self.full_groups * self._growth
        most_steps = self._ends[0][0] - self.decode_step
        if growth > 0:
            most_steps = max(min(most_steps, int(room / growth)), 1)
        return most_steps

    def _count_steps(
        self,
        most: int,
        outputs_s: tuple[float, float],
        step_s: float,
        until_s: float,
    ) -> int:
        """Return how many steps are advanced at once: until a request arrives, or time is up.

        ``outputs_s`` are when the first and the second step hand out their tokens.
        """
        arriving = self._arriving
        event_s = arriving[0][0] if arriving and self.scheduler.receives_always else until_s
        first_s, second_s = outputs_s
        answers = self._tell_end is not None and self._last  # those who have the last token now
        if first_s >= event_s or answers:
            return 1
        stop_s = min(event_s, until_s)
        if stop_s == math.inf:
            return most
        return min(most, 2 + max(math.ceil((stop_s - second_s) / step_s), 0))

    def _end_requests(self) -> None:
        """Take requests out that have all their tokens scheduled."""
        ends = self._ends
        while ends and ends[0][0] <= self.decode_step:
            at_step, request = heapq.heappop(ends)
            running = self.decoding.get(request)
            if running is None or running.begun + self._steps_left[request] != at_step:
                continue  # was preempted, and has another end
            self._drop(running)
            self._leave_cache(running, running.context - 1.0 + self._count_growth(running))
            self._last.append(request)
            self.outstanding -= 1

    def _drop(self, running: ActiveRequest) -> None:
        request = running.request
        self._context -= running.context + self._count_growth(running)
        self._growth -= self.plan.growth[request]
        self._shared -= running.shared
        self._kept -= running.kept
        del self.decoding[request]
        if not self.decoding:  # no rounding error is carried on
            self._context = 0.0
            self._growth = 0.0

    def _count_growth(self, running: ActiveRequest) -> float:
        """Count the tokens that a request has decoded since it was admitted."""
        return self.plan.growth[running.request] * (self.decode_step - running.begun)

    def _preempt(self) -> None:
        """Evict the request that the scheduler chooses; it computes prompt and tokens anew."""
        running = self.scheduler.choose_victim(self)
        request = running.request
        done = self.decode_step - running.begun
        tokens = int(running.context + self._count_growth(running))
        self._drop(running)
        self._leave_cache(running, tokens - 1)
        self._steps_left[request] -= done
        self._again[request] = tokens
        if self.scheduler.requeues_first:
            self.queue.appendleft(request)
        else:
            self.queue.append(request)
        self.preemptions += 1

    def _run_steps(
        self,
        at_top: complex,
        shape: StepShape,
        steps: int,
        floor_s: float,
    ) -> tuple[float, float]:
        """Return time and energy of ``steps`` steps, at the top clock where the governor allows it.

        ``at_top`` is the cost of one at the top clock.
        """
        costs = self.costs
        span_s = at_top.real * steps
        energy_j = at_top.imag * steps
        if floor_s > span_s:
            energy_j += costs.waiting_w * (floor_s - span_s)
            span_s = floor_s
        limit_w = costs.limit_w
        power_w = energy_j / span_s
        if power_w <= limit_w and self._mean_w <= limit_w:
            return span_s, energy_j
        earlier_share = math.exp(-span_s / costs.host.governor_s)
        if self._mean_w * earlier_share + power_w * (1.0 - earlier_share) <= limit_w:
            return span_s, energy_j
        return settle_clock(
            costs,
            partial(costs.cost_at_clock, shape),
            steps,
            floor_s,
            self._mean_w,
        )

    # Tokens go out

    def _hand_out(self, moment_s: float) -> None:
        """Note the moment at which tokens of the step before reach their requests."""
        if self._patience is not None and (self._first or self._last):
            self._count_late(moment_s, self._patience)
        for request in self._first:
            self.first_token_s[request] = moment_s
        self._first.clear()
        ended = self._last
        self._last = []
        for request in ended:
            self.last_token_s[request] = moment_s
        if self._tell_end is not None and ended:
            self._has_told = True
            for request in ended:
                self._tell_end(request, moment_s)

    def _count_late(
        self,
        moment_s: float,
        patience: Patience,
    ) -> None:
        """Give the run up if too many requests were late by now."""
        plan = self.plan
        for request in self._first:
            waited_s = moment_s - plan.arrival_s[request]
            self._late_firsts += waited_s > patience.first_token_s
        for request in self._last:
            decoding_s = moment_s - self.first_token_s[request]
            later_tokens = plan.decode_steps[request] * plan.growth[request]
            self._late_tokens += decoding_s > patience.token_s * later_tokens > 0.0
        if self._late_firsts >= patience.late_firsts or self._late_tokens >= patience.late_tokens:
            raise BoundsBroken(self.most_running)

    def _record(
        self,
        begin_s: float,
        first_output_s: float,
        last_output_s: float,
        device_begin_s: float,
        counts: tuple[int, int, int, int],
        energy_j: float,
        waited_s: float = 0.0,
    ) -> None:
        """Record a run of equal steps that ends at ``device_s``, which waited for the host before.

        The tokens of the step before are handed out. ``counts`` are steps, decodes, prompts and
        their tokens.
        """
        costs = self.costs
        decodes = counts[1]
        if self._first or self._last:
            self._hand_out(first_output_s)
        self.now_s = last_output_s
        device_end_s = self.device_s
        span_s = device_end_s - device_begin_s
        if span_s > 0.0:
            earlier_share = math.exp(-span_s / costs.host.governor_s)
            self._mean_w = self._mean_w * earlier_share + energy_j / span_s * (1.0 - earlier_share)
        used_tokens = self._cache_used()
        cache = self._cache
        if cache is not None and cache.free_blocks:
            room_blocks = (costs.cache_tokens - used_tokens) / self._tokens_a_block
            if cache.free_blocks > room_blocks:
                cache.shrink(room_blocks)
        segment = _pack_segment(
            begin_s,
            first_output_s,
            last_output_s,
            device_begin_s,
            device_end_s,
            *counts,
            self._context / decodes if decodes else 0.0,
            energy_j,
            len(self.queue),
            used_tokens / costs.cache_tokens,
            waited_s,
        )
        self._segments.frombytes(segment)
        self.spent_j += energy_j
        if decodes:
            self.decoded += self._growth * counts[0]
