"""Simulate continuous batching: a scheduler like vLLM's, its paged cache, its host and the GPU's
governor.

Time has two clocks. The host schedules step n, launches it, waits for step n - 1 and hands out that
step's tokens, which take e(n); then it takes in requests that arrived and goes on. The device runs
step n after step n - 1 and not before its launch:

    launched(n) = b(n) + schedule + launch,  e(n) = max(launched(n), D(n - 1)) + output,  b(n + 1) =
    e(n) D(n) = max(D(n - 1), launched(n)) + d(n)

with D the end on the device and d the step's kernels. A step that is launched piece by piece ends
no earlier than its last launch, and how long that takes varies from step to step.

Steps that only decode change nothing but the contexts until a request arrives, ends, or the cache
is full, so a run of k of them is advanced at once; costs are linear in the context, which makes the
sum exact but for the bends of the table.

The governor holds the mean power over a time τ at the limit: with P̄ the mean before, a step of
length t may draw (L - P̄ e^(-t/τ)) / (1 - e^(-t/τ)), and runs at the highest clock that keeps to
it. After a pause this is more than the limit (a burst), under steady load it is the limit."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import numpy as np

from wattcast.core import BadInput, bad_value
from wattcast.core.arrays import Array
from wattcast.serving.arrivals import NO_PREFIX, Trace
from wattcast.serving.step_costs import StepCosts, StepShape
from wattcast.workload.engine_schedule import STEP_TOKENS

SEGMENT_COLUMNS = (
    *(
        "begin_s",
        "first_output_s",
        "last_output_s",
        "device_begin_s",
        "device_end_s",
        "steps",
        "decodes",
        "prompts",
    ),
    *("prompt_tokens", "context", "energy_j", "waiting", "cache_use"),
)
_LAUNCHES = 4096  # that are drawn; then they come again
# (block - 1) / (2 block) of a block of 16: the share of the last block that is empty on average
_UNFILLED = 0.46875


@dataclass(frozen=True)
class EngineSettings:
    """Limits and features of one engine, named as vLLM names them."""

    max_batched_tokens: int = STEP_TOKENS
    max_seqs: int = 256
    prefix_hit_rate: float = 0.0  # share of every prompt found in the cache
    speculative_tokens: int = 0  # drafted per step
    acceptance_rate: float = 0.0  # chance that a drafted token is kept
    seed: int = 1

    def __post_init__(self) -> None:
        ranges = {
            "max_batched_tokens": (1, 1 << 20),
            "max_seqs": (1, 1 << 20),
            "speculative_tokens": (0, 64),
        }
        ranges |= {"prefix_hit_rate": (0, 1), "acceptance_rate": (0, 1)}
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise bad_value(name, f"from {least} to {most}", getattr(self, name))
        if self.max_seqs * (1 + self.speculative_tokens) > self.max_batched_tokens:
            raise bad_value(
                "max_batched_tokens",
                "a token for each of max_seqs sequences",
                self.max_batched_tokens,
            )


@dataclass(frozen=True)
class Patience:
    """When a run may be given up, since so many requests are late that a bound is broken for sure."""

    first_token_s: float = math.inf  # from arrival
    late_firsts: int = 1 << 62  # so many requests later than that end the run
    token_s: float = math.inf  # from token to token
    late_tokens: int = 1 << 62


class BoundsBroken(Exception):
    """A run was given up, since it was sure to break a latency bound."""


@dataclass(frozen=True)
class RequestPlan:
    """How each request of a trace goes through an engine, worked out before the simulation."""

    arrival_s: list[float]
    prompt_tokens: list[int]
    shared_tokens: list[int]  # of the prompt, found in the cache
    prefix_id: list[
        int
    ]  # whose first request on an engine finds nothing; -1: no prefix of that kind
    decode_steps: list[int]  # after the step that yields the first token
    growth: list[float]  # tokens a decode step adds
    carried: bool = (
        False  # prompts were computed on another engine and their cache is brought along
    )


def plan_requests(trace: Trace, settings: EngineSettings, carried: bool = False) -> RequestPlan:
    """Draw how many steps each request decodes, and find what the cache holds of its prompt.

    A speculative step keeps i of γ drafted tokens with chance α^i (1 - α), so it yields (1 -
    α^(γ+1)) / (1 - α) on average. Requests that share a prefix find it once the first of them has
    been on the same engine; its length is that of their shortest prompt, in whole blocks."""
    prompt = trace.prompt_tokens
    shared = np.floor(settings.prefix_hit_rate * prompt).astype(np.int64)
    if (grouped := trace.prefix_id != NO_PREFIX).any():
        group = trace.prefix_id[grouped]
        shortest = np.full(group.max() + 1, np.iinfo(np.int64).max)
        np.minimum.at(shortest, group, prompt[grouped])
        shared[grouped] = np.maximum(shared[grouped], shortest[group] // 16 * 16)
    shared = np.minimum(shared, prompt - 1)
    steps = (trace.output_tokens - 1).astype(np.float64)
    if settings.speculative_tokens:
        places = np.arange(settings.speculative_tokens + 1)
        kept = settings.acceptance_rate**places
        mean = float(kept.sum())
        variance = max(float(2 * (places * kept).sum()) + mean - mean**2, 0.0)
        random = np.random.default_rng(settings.seed)
        noise = random.standard_normal(len(steps)) * np.sqrt(steps * variance / mean**3)
        least = np.ceil(steps / (settings.speculative_tokens + 1))
        steps = np.clip(np.rint(steps / mean + noise), least, steps)
    growth = np.divide(trace.output_tokens - 1, steps, out=np.ones(len(steps)), where=steps > 0)
    return RequestPlan(
        trace.arrival_s.tolist(),
        prompt.tolist(),
        shared.tolist(),
        trace.prefix_id.tolist(),
        steps.astype(np.int64).tolist(),
        growth.tolist(),
        carried,
    )


def govern_steps(
    costs: StepCosts, cost: Array, steps: int, floor_s: float, mean_w: float | None = None
) -> tuple[float, float]:
    """Return time and energy of ``steps`` steps at the highest clock at which mean power meets the
    limit.

    ``mean_w`` is the mean power before; None stands for steady load. The steps take no less than
    ``floor_s``, the time of the host. Where even the lowest clock draws too much, that clock is
    taken."""
    clocks = costs.clocks
    limit_w = costs.limit_w
    values: list[float] = cost.tolist()
    before_s = before_w = 0.0
    for place in range(clocks):
        span_s = values[place] * steps
        energy_j = values[clocks + place] * steps
        if floor_s > span_s:
            energy_j += costs.waiting_w * (floor_s - span_s)
            span_s = floor_s
        power_w = energy_j / span_s
        kept = 0.0 if mean_w is None else math.exp(-span_s / costs.host.governor_s)
        earlier_w = kept * (mean_w or 0.0)
        if earlier_w + power_w * (1.0 - kept) <= limit_w:
            if place == 0 or power_w >= before_w:
                return span_s, energy_j
            allowed_w = min(max((limit_w - earlier_w) / (1.0 - kept), power_w), before_w)
            span_s = before_s + (before_w - allowed_w) / (before_w - power_w) * (span_s - before_s)
            return span_s, allowed_w * span_s
        before_s = span_s
        before_w = power_w
    return before_s, before_s * before_w


def predict_steady_step(
    costs: StepCosts,
    decodes: int,
    context: float,
    chunks: Sequence[tuple[int, int]],
    admitted: float = 0.0,
) -> tuple[float, float]:
    """Return latency and energy of a step that is repeated for so long that the governor has
    settled.

    ``chunks`` are prompt tokens and the tokens computed before them; ``admitted`` requests come in
    with each step."""
    prompts = len(chunks)
    tokens = decodes + sum(tokens for tokens, _ in chunks)
    host_s = costs.host.repeated_step_s(costs.launches, tokens, decodes, prompts, admitted)
    cost = costs.mixed_cost(tokens, decodes, context, chunks, decodes + prompts)
    return govern_steps(costs, cost, 1, host_s)


@dataclass(frozen=True)
class ReplicaRun:
    """What one replica did: when each request had its tokens, and every run of equal steps as
    columns.
    """

    first_token_s: Array
    last_token_s: Array
    segments: dict[str, Array]
    preemptions: int
    gpu_count: int
    idle_w: float
    limit_w: float  # mean power that the governor of a GPU holds


@dataclass(slots=True)
class _ActiveRequest:
    """A request in the engine: its prompt is computed, then it decodes."""

    request: int
    shared: int  # tokens found in the cache, which others hold too
    context: (
        float  # tokens computed or found so far; of one that decodes, those it attended to at first
    )
    left: int  # tokens of the prompt that are to be computed
    reserved: int  # tokens of cache that its prompt holds
    begun: int = 0  # decode step at which it began to decode


@cache
def _draw_launches(seed: int, spread: float, memory: float) -> tuple[float, ...]:
    """Draw launch times as multiples of their mean: lognormal, each correlated with the one before."""
    logs = []
    last = 0.0
    for drawn in np.random.default_rng(seed).standard_normal(_LAUNCHES).tolist():
        last = memory * last + math.sqrt(1.0 - memory**2) * drawn
        logs.append(math.exp(spread * last - 0.5 * spread**2))
    return tuple(logs)


_EVENTS_LEFT: ContextVar[list[int] | None] = ContextVar("events left", default=None)


@contextmanager
def limit_events(most: int) -> Iterator[None]:
    """Let all simulations inside take ``most`` events together (0.1 ms each); one more raises
    ``BadInput``.

    How many a simulation takes shows only as it runs: a cache that is too small computes requests
    again and again."""
    token = _EVENTS_LEFT.set([most])
    try:
        yield
    finally:
        _EVENTS_LEFT.reset(token)


class EngineReplica:
    """One engine on its GPUs. ``submit`` gives it requests, ``run_until`` lets time pass."""

    def __init__(
        self,
        costs: StepCosts,
        settings: EngineSettings,
        plan: RequestPlan,
        patience: Patience | None = None,
    ) -> None:
        longest = max(plan.prompt_tokens) + 1
        if longest + costs.block_tokens > costs.cache_tokens:
            raise BadInput(
                f"the cache of {costs.cache_tokens} tokens cannot hold a prompt of {longest - 1}. "
                "Use more GPUs (tp), more of the memory or shorter prompts."
            )
        self.costs = costs
        self.settings = settings
        self.plan = plan
        self.now_s = self.device_s = 0.0
        self.first_token_s = [math.nan] * len(plan.arrival_s)
        self.last_token_s = [math.nan] * len(plan.arrival_s)
        self.preemptions = 0
        self.spent_j = 0.0  # up to device_s
        self.decoded = 0.0  # tokens, the first of each request left out
        self.outstanding = 0
        self._arriving: deque[int] = deque()
        self._waiting: deque[int] = deque()
        self._prompts: list[_ActiveRequest] = []
        self._running: dict[int, _ActiveRequest] = {}  # in order of admission
        self._ends: list[
            tuple[int, int]
        ] = []  # decode step after which a request has all tokens, request
        self._step = 0  # decode steps so far
        self._context = 0.0  # tokens all decoding sequences attend to
        self._shared = 0  # of these, counted in the cache of another
        self._growth = 0.0  # tokens a step adds
        self._reserved = 0  # tokens of prompts being computed
        self._left = list(plan.decode_steps)
        self._prefixes: set[int] = set()  # in the cache
        self._again: dict[int, int] = {}  # preempted requests: tokens to compute anew
        self._first: list[
            int
        ] = []  # requests whose first or last token the device has not handed out yet
        self._last: list[int] = []
        self._patience = patience
        self._late_firsts = 0
        self._late_tokens = 0
        self._after_prompts = False  # the last step held prompts
        self._mean_w = costs.idle_w
        self._segments = array("d")  # rows of SEGMENT_COLUMNS, one after another
        self._tokens_a_step = 1 + settings.speculative_tokens
        host = costs.host
        self._factors = itertools.cycle(
            _draw_launches(settings.seed, host.launch_spread, host.launch_memory)
        )

    def submit(self, requests: Sequence[int]) -> None:
        """Add requests in order of arrival."""
        self._arriving.extend(requests)
        self.outstanding += len(requests)

    def run_until(self, until_s: float) -> None:
        """Simulate up to the first moment at or after ``until_s`` at which the host is free."""
        arrival_s = self.plan.arrival_s
        left = _EVENTS_LEFT.get()
        while self.now_s < until_s:
            if left is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise BadInput(
                        "this traffic takes more events than may be simulated here. Ask for fewer requests, shorter "
                        "prompts or outputs, or fewer kinds of GPUs, or use the command line."
                    )
            arriving = self._arriving
            while arriving and arrival_s[arriving[0]] <= self.now_s:
                self._waiting.append(arriving.popleft())
                self.now_s += self.costs.host.admit_s
            if not (self._running or self._prompts or self._waiting):
                drained_s = max(self.now_s, self.device_s) + self.costs.host.output_s
                self._hand_out(drained_s)
                if not arriving:
                    self.now_s = max(self.now_s, self.device_s)
                    return
                if (next_s := arrival_s[arriving[0]]) > self.now_s:  # the engine idles until then
                    idle_s = max(next_s - self.device_s, 0.0)
                    begin_s = self.device_s
                    self.device_s += idle_s
                    idle_j = self.costs.idle_w * idle_s
                    self._record((next_s, drained_s, drained_s), begin_s, (0, 0, 0, 0), idle_j)
                    self.now_s = next_s
                continue
            chunks = self._schedule_prompts() if self._prompts or self._waiting else []
            if chunks:
                self._advance_prompts(chunks)
            else:
                self._advance_decodes(until_s)

    def finish(self) -> ReplicaRun:
        """Run until every request has ended, and return what was recorded."""
        while self.outstanding:
            self.run_until(math.inf)
        table = np.array(self._segments).reshape(-1, len(SEGMENT_COLUMNS))
        columns = {name: table[:, place] for place, name in enumerate(SEGMENT_COLUMNS)}
        costs = self.costs
        moments = (np.array(self.first_token_s), np.array(self.last_token_s))
        return ReplicaRun(
            *moments, columns, self.preemptions, costs.gpu_count, costs.idle_w, costs.limit_w
        )

    @property
    def waiting(self) -> int:
        """Count the requests that wait for their prompt."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Count the requests that are computed."""
        return len(self._running) + len(self._prompts)

    @property
    def load(self) -> int:
        """Weigh requests as vLLM's router does: one that waits for its prompt counts as four that
        decode.
        """
        return 4 * (len(self._arriving) + len(self._waiting) + len(self._prompts)) + len(
            self._running
        )

    def _cache_used(self) -> float:
        unfilled = _UNFILLED * self.costs.block_tokens * len(self._running)
        return self._context - self._shared + unfilled + self._reserved

    def _schedule_prompts(self) -> list[tuple[_ActiveRequest, int]]:
        """Choose prompt chunks for the next step: first those begun, then requests in order of
        arrival.
        """
        settings = self.settings
        plan = self.plan
        block = self.costs.block_tokens
        budget = settings.max_batched_tokens - len(self._running) * self._tokens_a_step
        room = self.costs.cache_tokens - self._cache_used() - self._growth
        if room < 0 and self._running:
            return []
        chunks = []
        for prompt in self._prompts:
            tokens = min(prompt.left, budget)
            if tokens > 0:
                chunks.append((prompt, tokens))
                budget -= tokens
        while (
            self._waiting
            and budget > 0
            and len(self._running) + len(self._prompts) < settings.max_seqs
        ):
            request = self._waiting[0]
            total = self._again.get(request, plan.prompt_tokens[request])
            shared = plan.shared_tokens[request]
            prefix = plan.prefix_id[request]
            if prefix != NO_PREFIX and prefix not in self._prefixes:
                shared = 0
            reserved = -(-(total - shared) // block) * block
            if reserved > room:
                break
            self._waiting.popleft()
            self._prefixes.add(prefix)
            room -= reserved
            prompt = _ActiveRequest(request, shared, shared, total - shared, reserved)
            if (
                plan.carried and request not in self._again
            ):  # nothing to compute: it decodes at once
                prompt.context = total
                self._begin_decoding(prompt)
                continue
            self._reserved += reserved
            self._prompts.append(prompt)
            tokens = min(prompt.left, budget)
            budget -= tokens
            chunks.append((prompt, tokens))
        return chunks

    def _begin_decoding(self, prompt: _ActiveRequest) -> None:
        request = prompt.request
        steps = self._left[prompt.request]
        if steps <= 0:
            self._last.append(request)
            self.outstanding -= 1
            return
        prompt.context, prompt.begun = prompt.context + 1.0, self._step
        self._running[request] = prompt
        self._context += prompt.context
        self._shared += prompt.shared
        self._growth += self.plan.growth[request]
        heapq.heappush(self._ends, (self._step + steps, request))

    def _advance_prompts(self, chunks: list[tuple[_ActiveRequest, int]]) -> None:
        """Simulate one step that holds prompt chunks beside the decodes."""
        costs = self.costs
        host = self.costs.host
        decodes = len(self._running)
        sizes = []
        prompt_tokens = 0
        ended = 0
        for prompt, tokens in chunks:
            sizes.append((tokens, prompt.context))
            prompt_tokens += tokens
            prompt.context += tokens
            prompt.left -= tokens
            ended += prompt.left == 0
        total = prompt_tokens + decodes * self._tokens_a_step
        sampled = decodes * self._tokens_a_step + ended
        asked = (total, decodes, self._context / decodes if decodes else 0.0, sizes, sampled)
        launch_s = costs.launch_s(total, decodes, host.launch_layer_s, next(self._factors))
        begin_s = self.now_s
        device_begin_s = self.device_s
        launch_begin_s = (
            begin_s + host.schedule_s + host.schedule_per_sequence_s * (decodes + len(chunks))
        )
        launch_end_s = launch_begin_s + launch_s
        output_s = (
            max(launch_end_s, device_begin_s) + host.output_s + host.output_per_sequence_s * decodes
        )
        start_s = max(device_begin_s, launch_begin_s)
        step_s, energy_j = self._run_steps(
            costs.cost_at_top(*asked), asked, 1, launch_end_s - start_s
        )
        energy_j += costs.waiting_w * (start_s - device_begin_s)
        self.device_s, self._after_prompts = start_s + step_s, True
        counts = (1, decodes, len(chunks), prompt_tokens)
        self._record((begin_s, output_s, output_s), device_begin_s, counts, energy_j)
        self._context += self._growth
        self._step += 1
        if decodes:
            self._end_requests()
        if ended:
            for prompt in [prompt for prompt in self._prompts if prompt.left == 0]:
                self._reserved -= prompt.reserved
                if self._again.pop(prompt.request, None) is None:
                    self._first.append(prompt.request)
                self._begin_decoding(prompt)
            self._prompts = [prompt for prompt in self._prompts if prompt.left]

    def _advance_decodes(self, until_s: float) -> None:
        """Simulate a run of decode-only steps up to the next event, as one."""
        costs = self.costs
        host = self.costs.host
        decodes = len(self._running)
        if not decodes:  # prompts wait for cache that nobody will free
            raise BadInput(
                "no request can be admitted: the cache is too small for the next prompt."
            )
        room = costs.cache_tokens - self._cache_used()
        while room < self._growth and len(self._running) > 1:
            self._preempt()
            room = costs.cache_tokens - self._cache_used()
        decodes = len(self._running)
        most = self._ends[0][0] - self._step
        if self._growth > 0:
            most = max(min(most, int(room / self._growth)), 1)
        context = self._context / decodes
        tokens = decodes * self._tokens_a_step
        cost = costs.cost_at_top(tokens, decodes, context, (), tokens)
        step_s = cost.real
        launch_s = (
            costs.launch_s(tokens, decodes)
            + host.schedule_s
            + host.schedule_per_sequence_s * decodes
        )
        handing_s = host.output_s + host.output_per_sequence_s * decodes
        host_s = launch_s + handing_s
        begin_s = self.now_s
        device_begin_s = self.device_s
        start_s = max(begin_s + launch_s, device_begin_s) + host.switch_s * self._after_prompts
        self._after_prompts = False
        first_output_s = start_s + handing_s
        event_s = self.plan.arrival_s[self._arriving[0]] if self._arriving else until_s
        steps = most
        if first_output_s >= event_s:
            steps = 1
        elif event_s < until_s or until_s < math.inf:
            second_s = max(first_output_s + host_s, start_s + step_s + handing_s)
            steps = min(
                most,
                2 + max(math.ceil((min(event_s, until_s) - second_s) / max(step_s, host_s)), 0),
            )
        later = context + self._growth / decodes * (steps - 1)
        if steps > 1:
            cost = 0.5 * (cost + costs.cost_at_top(tokens, decodes, later, (), tokens))
        floor_s = host_s * (steps - 1) + min(cost.real, host_s)
        middle = (tokens, decodes, 0.5 * (context + later), (), tokens)
        span_s, energy_j = self._run_steps(cost, middle, steps, floor_s)
        self.device_s = start_s + span_s
        last_output_s = first_output_s
        if steps > 1:
            last_output_s = max(
                first_output_s + host_s * (steps - 1), self.device_s - span_s / steps + handing_s
            )
        energy_j += costs.waiting_w * (start_s - device_begin_s)
        self._record(
            (begin_s, first_output_s, last_output_s),
            device_begin_s,
            (steps, decodes, 0, 0),
            energy_j,
        )
        self._context += self._growth * steps
        self._step += steps
        self._end_requests()

    def _end_requests(self) -> None:
        """Take requests out that have all their tokens scheduled."""
        ends = self._ends
        while ends and ends[0][0] <= self._step:
            at_step, request = heapq.heappop(ends)
            running = self._running.get(request)
            if running is None or running.begun + self._left[request] != at_step:
                continue  # was preempted, and has another end
            self._drop(running)
            self._last.append(request)
            self.outstanding -= 1

    def _drop(self, running: _ActiveRequest) -> None:
        request = running.request
        growth = self.plan.growth[request]
        self._context -= running.context + growth * (self._step - running.begun)
        self._growth -= growth
        self._shared -= running.shared
        del self._running[request]
        if not self._running:
            self._context = self._growth = 0.0  # no rounding is carried on

    def _preempt(self) -> None:
        """Throw out the request that was admitted last; it computes its prompt and its tokens anew."""
        running = self._running[next(reversed(self._running))]
        request = running.request
        done = self._step - running.begun
        tokens = int(running.context + self.plan.growth[request] * done)
        self._drop(running)
        self._left[request] -= done
        self._again[request] = tokens
        self._waiting.appendleft(request)
        self.preemptions += 1

    def _run_steps(
        self, at_top: complex, asked: StepShape, steps: int, floor_s: float
    ) -> tuple[float, float]:
        """Return time and energy of ``steps`` steps: ``at_top`` clock where the governor lets them
        run so.
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
        kept = math.exp(-span_s / costs.host.governor_s)
        if self._mean_w * kept + power_w * (1.0 - kept) <= limit_w:
            return span_s, energy_j
        return govern_steps(costs, costs.mixed_cost(*asked), steps, floor_s, self._mean_w)

    def _hand_out(self, moment_s: float) -> None:
        """Note the moment at which tokens of the step before reach their requests."""
        if self._patience is not None and (self._first or self._last):
            self._count_late(moment_s, self._patience)
        for requests, moments_s in (
            (self._first, self.first_token_s),
            (self._last, self.last_token_s),
        ):
            for request in requests:
                moments_s[request] = moment_s
            requests.clear()

    def _count_late(self, moment_s: float, patience: Patience) -> None:
        """Give the run up if too many requests were late by now."""
        plan = self.plan
        for request in self._first:
            waited_s = moment_s - plan.arrival_s[request]
            self._late_firsts += waited_s > patience.first_token_s
        for request in self._last:
            decoding_s = moment_s - self.first_token_s[request]
            self._late_tokens += decoding_s > patience.token_s * plan.decode_steps[request] > 0.0
        if self._late_firsts >= patience.late_firsts or self._late_tokens >= patience.late_tokens:
            raise BoundsBroken

    def _record(
        self,
        host_s: tuple[float, float, float],
        device_begin_s: float,
        counts: tuple[int, ...],
        energy_j: float,
    ) -> None:
        """Record a run of equal steps that ends at ``device_s``, and hand out the tokens of the
        step before.

        ``host_s`` are begin, first and last output; ``counts`` steps, decodes, prompts and their
        tokens."""
        self._hand_out(host_s[1])
        self.now_s, span_s, (steps, decodes, *_) = host_s[2], self.device_s - device_begin_s, counts
        if span_s > 0.0:
            kept = math.exp(-span_s / self.costs.host.governor_s)
            self._mean_w = self._mean_w * kept + energy_j / span_s * (1.0 - kept)
        context = self._context / decodes if decodes else 0.0
        used = self._cache_used() / self.costs.cache_tokens
        self._segments.extend((*host_s, device_begin_s, self.device_s, *counts))
        self._segments.extend((context, energy_j, len(self._waiting), used))
        self.spent_j += energy_j
        self.decoded += self._growth * steps
