"""A serving engine on a clock of its own: it schedules one step ahead as vLLM does, with step times
as told.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.energy_sources import DeviceIdentity

SCHEDULE_S, LAUNCH_S, REST_S = 0.0002, 0.0005, 0.0003  # host time of a step
POLL_S, TICK_S = 0.005, 0.1


@dataclass
class FakeClock:
    now_s: float = 100.0

    def __call__(self) -> float:
        self.now_s += 1e-7  # reading it takes time, so that waiting by reading it ends
        return self.now_s

    def sleep(self, length_s: float) -> None:
        self.now_s += length_s


class FakeSampler:
    """A counter that ticks every 100 ms under a constant power."""

    def __init__(self, clock: FakeClock, power_w: float = 300.0, throttle: int = 0) -> None:
        self._clock, self._power_w, self._throttle = clock, power_w, throttle
        self._begun_s = clock()
        self.identity = DeviceIdentity("fake")
        self.healthy, self.errors, self.restarts = True, 0, 0

    @property
    def head(self) -> int:
        return int((self._clock() - self._begun_s) / POLL_S)

    def since(self, mark: int) -> EnergySamples:
        time_s = self._begun_s + POLL_S * np.arange(mark, self.head)
        rows = np.full((len(time_s), len(COLUMNS)), np.nan)
        rows[:, 0] = time_s
        rows[:, 1] = 1000.0 + self._power_w * TICK_S * np.floor(time_s / TICK_S)
        rows[:, COLUMNS.index("sm_clock_hz")] = 1.98e9
        rows[:, COLUMNS.index("throttle")] = self._throttle
        rows[:, COLUMNS.index("temperature_c")] = 50.0
        return EnergySamples(rows)

    def check(self) -> None:
        return None

    def restart(self) -> None:
        self.restarts += 1
        self.healthy = True


@dataclass
class FakeMark:
    at_s: float

    def elapsed_time(self, other: FakeMark) -> float:
        return 1e3 * (other.at_s - self.at_s)


@dataclass
class _Request:
    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    computed: int = 0
    made: int = 0  # tokens scheduled to be sampled
    given: int = 0  # tokens handed out

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass
class _Scheduler:
    clock: FakeClock
    budget: int
    max_seqs: int
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    connector: Any = None
    kv_cache_manager: Any = field(default_factory=lambda: SimpleNamespace(usage=0.25))

    def schedule(self, throttle: bool = False) -> Any:
        self.clock.sleep(SCHEDULE_S)
        left, scheduled, cached, new = self.budget, {}, [], []
        for request in self.running:
            count = min(max(request.num_tokens - request.computed, 1), left)
            if request.made < request.max_tokens and count:
                cached.append((request.request_id, request.computed))
                left -= self._take(request, count, scheduled)
        while self.waiting and left and len(self.running) < self.max_seqs:
            request = self.waiting.popleft()
            if self.connector is not None:
                request.computed, _ = self.connector.get_num_new_matched_tokens(request, 0)
                self.connector.update_state_after_alloc(request, None, request.computed)
            entry = SimpleNamespace(
                req_id=request.request_id,
                num_computed_tokens=request.computed,
                prompt_token_ids=request.prompt_token_ids,
            )
            new.append(entry)
            self.running.append(request)
            left -= self._take(request, min(request.num_tokens - request.computed, left), scheduled)
        if self.connector is not None:
            self.connector.build_connector_meta(None)
        names, computed = [name for name, _ in cached], [count for _, count in cached]
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=names, num_computed_tokens=computed),
            sampled=[
                r for r in self.running if r.request_id in scheduled and r.computed >= r.num_tokens
            ],
        )

    @staticmethod
    def _take(request: _Request, count: int, scheduled: dict[str, int]) -> int:
        scheduled[request.request_id] = count
        request.computed += count
        request.made += request.computed >= request.num_tokens
        return count


class _Future:
    def __init__(self, clock: FakeClock, done_s: float) -> None:
        self._clock, self._done_s = clock, done_s

    def result(self) -> None:
        self._clock.now_s = max(self._clock.now_s, self._done_s)


class _Executor:
    def __init__(self, clock: FakeClock, token_s: float, step_s: float) -> None:
        self.clock, self.token_s, self.step_s = clock, token_s, step_s
        self.free_s = 0.0
        self.launched: list[int] = []  # tokens of each step

    def mark(self) -> FakeMark:
        return FakeMark(max(self.clock(), self.free_s))

    def execute_model(self, output: Any, non_block: bool = False) -> None:
        self.clock.sleep(LAUNCH_S / 2)
        tokens = sum(output.num_scheduled_tokens.values())
        self.launched.append(tokens)
        if tokens:
            self.free_s = max(self.free_s, self.clock()) + self.step_s + tokens * self.token_s

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> _Future:
        self.clock.sleep(LAUNCH_S / 2)
        return _Future(self.clock, self.free_s)


class FakeEngine:
    """Stands in for ``LLMEngine``: add_request, abort_request, step, has_unfinished_requests."""

    def __init__(
        self, token_s: float = 1e-5, step_s: float = 8e-3, budget: int = 1024, max_seqs: int = 64
    ) -> None:
        self.clock = FakeClock()
        self.scheduler = _Scheduler(self.clock, budget, max_seqs)
        self.model_executor = _Executor(self.clock, token_s, step_s)
        self.engine_core = SimpleNamespace(engine_core=self)
        self.queue: deque[tuple[Any, Any]] = deque()
        self.unfinished: dict[str, _Request] = {}
        self.fail_after = 10**9
        self.tokens_alike = False  # every sequence yields the same token

    def add_request(
        self, name: str, prompt: dict[str, list[int]], parameters: SimpleNamespace
    ) -> None:
        request = _Request(name, prompt["prompt_token_ids"], parameters.max_tokens)
        self.unfinished[name] = request
        self.scheduler.waiting.append(request)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.unfinished.pop(name, None)
        self.scheduler.running = [
            r for r in self.scheduler.running if r.request_id in self.unfinished
        ]
        self.scheduler.waiting = deque(
            r for r in self.scheduler.waiting if r.request_id in self.unfinished
        )

    def reset_prefix_cache(self) -> bool:
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.unfinished)

    def step(self) -> list[Any]:
        self.fail_after -= 1
        if self.fail_after < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if not self.unfinished and not self.queue:
            return []
        output = self.scheduler.schedule(False)
        self.model_executor.execute_model(output, non_block=True)
        if output.num_scheduled_tokens:
            self.queue.appendleft((self.model_executor.sample_tokens(None, non_block=True), output))
            if len(self.queue) < 2:
                return []
        if not self.queue:
            return []
        future, output = self.queue.pop()
        future.result()
        self.clock.sleep(REST_S)
        return [
            self._hand_out(request)
            for request in output.sampled
            if request.request_id in self.unfinished
        ]

    def _hand_out(self, request: _Request) -> Any:
        request.given += 1
        finished = request.given >= request.max_tokens
        if finished:
            self.unfinished.pop(request.request_id)
            self.scheduler.running.remove(request)
        token = 7 if self.tokens_alike else zlib.crc32(request.request_id.encode())
        outputs = [SimpleNamespace(token_ids=[token])]
        return SimpleNamespace(request_id=request.request_id, outputs=outputs, finished=finished)
