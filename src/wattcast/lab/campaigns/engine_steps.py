"""Record every step of a vLLM engine from inside its process, and measure one kind of step until it
has settled.

vLLM schedules asynchronously: one call of ``step`` schedules and launches a step, then waits for
the tokens of the step before it. Hooks on the scheduler and the executor therefore split the call
into scheduling, launching, waiting for the GPU and the rest. Marks on the GPU's stream give the
device's time. The hooks only read the clock and keep references; sums over requests are made after
the run.

To measure one kind of step, requests that decode stay in the batch, and a prompt that was computed
is followed by another one at once. Power comes from whole ticks of the energy counter; times are
means over the steps inside the same window."""

from __future__ import annotations

import itertools
import time
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core import Refused
from wattcast.lab.campaigns.engine_campaign import StepPoint
from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.steady_state import (
    SettledWindow,
    SettlingRule,
    describe_window,
    take_window,
)

Array = npt.NDArray[np.float64]
COLUMNS = (
    "begin_s",
    "end_s",
    "tokens",
    "prompt_tokens",
    "decodes",
    "prompts",
    "decode_context",
    "prompt_context",
    "running",
    "waiting",
    "cache_use",
    "schedule_s",
    "launch_s",
    "wait_s",
    "host_s",
    "device_s",
    "device_gap_s",
)


@dataclass(slots=True)
class StepRecord:
    """One call of the engine's ``step``, as the hooks saw it."""

    begin_s: float  # of the call
    end_s: float = 0.0
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0  # blocked until the GPU had finished the step before
    scheduled: dict[str, int] = field(default_factory=dict)  # tokens by request
    # requests, tokens computed before
    cached: tuple[list[str], list[int]] = field(default_factory=lambda: ([], []))
    # request, computed before, tokens of its prompt
    new: list[tuple[str, int, int]] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    begin_mark: Any = None
    end_mark: Any = None

    @property
    def tokens(self) -> int:
        """Tokens of the step, over all requests."""
        return sum(self.scheduled.values())


class _ComputedElsewhere:
    """Answers the scheduler as a cache on another machine would: all of a prompt but its last token
    is computed.

    The cache blocks of such a request are allocated and hold whatever lies there, so decode steps
    at long contexts can be measured without computing the prompts first."""

    def get_num_new_matched_tokens(
        self,
        request: Any,
        computed: int,
    ) -> tuple[int, bool]:
        return max(int(request.num_tokens) - computed - 1, 0), False

    def update_state_after_alloc(
        self,
        *_: Any,
        **__: Any,
    ) -> None:
        return None

    def build_connector_meta(
        self,
        *_: Any,
        **__: Any,
    ) -> None:
        return None


class StepRecorder:
    """Hooks on one engine. ``mark`` makes a mark on the GPU's stream; marks have ``elapsed_time``
    in milliseconds.
    """

    def __init__(
        self,
        engine: Any,
        mark: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.records: list[StepRecord] = []
        self.preemptions = 0
        self.skip_prompts = False
        self._mark = mark
        self._now = StepRecord(0.0)  # of calls outside a step: nobody reads it
        self._prompt_tokens: dict[str, int] = {}
        core = engine.engine_core.engine_core
        self._scheduler = core.scheduler
        executor = core.model_executor
        self._scheduler.schedule = partial(self._timed_schedule, self._scheduler.schedule)
        executor.execute_model = partial(self._timed_execute, executor.execute_model)
        executor.sample_tokens = partial(self._timed_sample, executor.sample_tokens)
        if preempt := getattr(self._scheduler, "_preempt_request", None):
            self._scheduler._preempt_request = partial(self._counted_preempt, preempt)

    def step(self) -> list[Any]:
        """Call the engine's step once, and record it when it launched anything."""
        record = self._now = StepRecord(self.clock())
        outputs: list[Any] = self.engine.step()
        record.end_s = self.clock()
        self._now = StepRecord(0.0)
        if record.scheduled:
            self.records.append(record)
        return outputs

    def clear(self) -> None:
        """Forget the steps so far."""
        self.records = []
        self.preemptions = 0
        self._prompt_tokens.clear()

    def _timed_schedule(
        self,
        original: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        began_s = self.clock()
        if self.skip_prompts:
            self._scheduler.connector = _ComputedElsewhere()
        try:
            output = original(*arguments, **named)
        finally:
            if self.skip_prompts:
                self._scheduler.connector = None
        record = self._now
        cached = output.scheduled_cached_reqs
        record.scheduled = output.num_scheduled_tokens
        record.cached = cached.req_ids, cached.num_computed_tokens
        record.new = [
            (r.req_id, r.num_computed_tokens, len(r.prompt_token_ids or ()))
            for r in output.scheduled_new_reqs
        ]
        record.running = len(self._scheduler.running)
        record.waiting = len(self._scheduler.waiting)
        record.cache_use = float(self._scheduler.kv_cache_manager.usage)
        record.schedule_s = self.clock() - began_s
        return output

    def _timed_execute(
        self,
        original: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        began_s = self.clock()
        record = self._now
        if record.scheduled:
            record.begin_mark = self._mark()
        result = original(*arguments, **named)
        record.launch_s += self.clock() - began_s
        return result

    def _timed_sample(
        self,
        original: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        began_s = self.clock()
        record = self._now
        future = original(*arguments, **named)
        record.end_mark = self._mark()
        record.launch_s += self.clock() - began_s
        if wait := getattr(future, "result", None):
            future.result = partial(self._timed_wait, wait)
        return future

    def _timed_wait(
        self,
        original: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        began_s = self.clock()
        result = original(*arguments, **named)
        self._now.wait_s += self.clock() - began_s
        return result

    def _counted_preempt(
        self,
        original: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        self.preemptions += 1
        return original(*arguments, **named)

    def table(self, origin_s: float = 0.0) -> dict[str, Array]:
        """Return one array per column of ``COLUMNS``, times from ``origin_s``; call it after the
        GPU has finished.

        ``decode_context`` is the sum over decoding requests of the tokens they attend to,
        ``prompt_context`` the sum over prompt chunks of the tokens computed before them. ``host_s``
        is the call without waiting for the GPU. ``device_s`` runs from the first launch to the last
        on the GPU's own clock, ``device_gap_s`` from the end of the step before to the first
        launch; both are NaN where there was no mark."""
        rows = []
        previous_mark = None
        for record in self.records:
            length_s = record.end_s - record.begin_s
            row = {
                "begin_s": record.begin_s - origin_s,
                "end_s": record.end_s - origin_s,
                "tokens": record.tokens,
                **self._count_scheduled(record),
                "running": record.running,
                "waiting": record.waiting,
                "cache_use": record.cache_use,
                "schedule_s": record.schedule_s,
                "launch_s": record.launch_s,
                "wait_s": record.wait_s,
                "host_s": length_s - record.wait_s,
                "device_s": _between_s(record.begin_mark, record.end_mark),
                "device_gap_s": _between_s(previous_mark, record.begin_mark),
            }
            rows.append([row[column] for column in COLUMNS])
            previous_mark = record.end_mark
        values = np.array(rows, dtype=np.float64).reshape(len(rows), len(COLUMNS))
        return {name: values[:, place] for place, name in enumerate(COLUMNS)}

    def _count_scheduled(self, record: StepRecord) -> dict[str, int]:
        """Count decoding requests, prompt chunks and their tokens in one step."""
        for name, _, prompt_tokens in record.new:
            self._prompt_tokens.setdefault(name, prompt_tokens)
        computed_before = dict(zip(*record.cached, strict=True))
        computed_before.update({name: computed for name, computed, _ in record.new})
        counts = dict.fromkeys(
            ("prompt_tokens", "decodes", "prompts", "decode_context", "prompt_context"), 0
        )
        for name, scheduled in record.scheduled.items():
            computed = computed_before.get(name, 0)
            if scheduled > 1 or computed + 1 < self._prompt_tokens.get(name, 0):
                counts["prompts"] += 1
                counts["prompt_tokens"] += scheduled
                counts["prompt_context"] += computed
            else:
                counts["decodes"] += 1
                counts["decode_context"] += computed + 1
        return counts


def _between_s(first: Any, second: Any) -> float:
    if first is None or second is None:
        return float("nan")
    return float(first.elapsed_time(second)) / 1e3


_NUMBERS = itertools.count()  # request names are never used twice
_ADAPTER_TURNS = itertools.count()


# 0.3 s to settle and nine ticks; under the power cap the governor hunts for a second
RUN_S = 1.3
CAPPED_RUN_S = 2.8
# after a row; under the cap longer, so that the clock climbs back
REST_S = 0.2
CAPPED_REST_S = 0.8
MOST_SETUP_S = 25.0
RULE = SettlingRule()


@dataclass
class EngineBench:
    """What measuring an engine needs."""

    recorder: StepRecorder
    sampler: Any  # wattcast.measure.sampler.Sampler, or a stand-in
    sampling: Callable[..., Any]  # makes SamplingParams of max_tokens and temperature
    vocab_size: int
    max_model_len: int
    synchronize: Callable[[], None]
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20))
    sleep: Callable[[float], None] = time.sleep
    adapters: list[Any] = field(default_factory=list)  # that requests take in turn

    def prompt(self, tokens: int) -> list[int]:
        """Return random token ids."""
        ids: list[int] = self.random.integers(3, self.vocab_size - 1, tokens).tolist()
        return ids

    def add(
        self,
        ids: list[int],
        max_tokens: int,
        sampling: Mapping[str, float] | None = None,
        name: str = "",
    ) -> str:
        """Give the engine one request and return its name."""
        name = name or f"r{next(_NUMBERS)}"
        parameters = self.sampling(max_tokens=max_tokens, **(sampling or {"temperature": 0.0}))
        options: dict[str, Any] = {}
        if self.adapters:
            options["lora_request"] = self.adapters[next(_ADAPTER_TURNS) % len(self.adapters)]
        self.recorder.engine.add_request(name, {"prompt_token_ids": ids}, parameters, **options)
        return name

    def drain(self, names: list[str]) -> None:
        """Abort requests and step until nothing is in flight."""
        engine = self.recorder.engine
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            self.recorder.step()
        for _ in range(2):  # the step that was launched ahead
            self.recorder.step()
        self.synchronize()
        self.recorder.clear()


def measure_point(bench: EngineBench, point: StepPoint) -> dict[str, Any]:
    """Measure one row, the mean step of ``point`` once settled, and return it ready for JSON."""
    recorder = bench.recorder
    clock = bench.recorder.clock
    with _running_batch(bench, point) as feeder:
        mark = bench.sampler.head
        started_s = clock()
        feeder.run_until(started_s + RUN_S)
        if "sw_power_cap" in bench.sampler.since(mark).throttle:
            feeder.run_until(started_s + CAPPED_RUN_S)
        ended_s = clock()
        bench.synchronize()
        bench.sampler.check()
        table = recorder.table()
    samples = bench.sampler.since(mark)
    capped = "sw_power_cap" in samples.throttle
    settle_s = RULE.capped_settle_s if capped else RULE.settle_s
    window = take_window(samples, started_s + settle_s, ended_s, RULE)
    row = summarise_steps(table, window, point)
    row["distinct_tokens"] = feeder.distinct_tokens
    if point.batch >= MANY_SEQUENCES and feeder.distinct_tokens < DISTINCT_SHARE * point.batch:
        row["flags"].append("tokens_alike")
    bench.sleep(CAPPED_REST_S if capped else REST_S)
    return row | {"added_s": feeder.added_s, "run_s": ended_s - started_s}


# Sequences that all yield the same token look alike to a router, which then visits few experts.
MANY_SEQUENCES = 8
DISTINCT_SHARE = 0.5
MET_STEPS = 3  # enough for a kernel to be compiled and its graph to be replayed


def meet_point(bench: EngineBench, point: StepPoint) -> None:
    """Run a few steps of ``point`` and measure nothing."""
    with _running_batch(bench, point) as feeder:
        feeder.run_steps(MET_STEPS)
        bench.synchronize()


@contextmanager
def _running_batch(bench: EngineBench, point: StepPoint) -> Iterator[_Feeder]:
    """Bring the sequences of ``point`` into the engine, and take them out at the end."""
    recorder = bench.recorder
    recorder.clear()
    names: list[str] = []
    feeder = _Feeder(bench, point)
    try:
        recorder.skip_prompts = True
        _fill_batch(bench, point, names)
        recorder.skip_prompts = False
        yield feeder
    finally:
        recorder.skip_prompts = False
        bench.drain(names + feeder.names)


def summarise_steps(
    table: dict[str, Array],
    settled: SettledWindow,
    point: StepPoint,
) -> dict[str, Any]:
    """Return means over the steps of ``table`` that lie inside the window, and the window's power
    and clock.
    """
    inside = (table["begin_s"] >= settled.start_s) & (table["end_s"] <= settled.end_s)
    steps = {name: values[inside] for name, values in table.items()}
    number = int(inside.sum())
    if number < 3:
        raise Refused(
            f"{point.id}: {number} steps inside the window of {settled.duration_s:.2f} s, 3 needed."
        )
    flags = list(settled.flags)
    if (steps["decodes"] != point.batch).any():
        flags.append("batch_changed")
    if point.prompts and (steps["prompt_tokens"] == 0).any():
        flags.append("steps_without_prompt")
    period_s = np.diff(steps["end_s"])
    window = describe_window(settled)
    latency_s = float(period_s.mean())
    decodes = max(float(steps["decodes"].mean()), 1.0)
    return {
        "latency_s": latency_s,
        "latency_median_s": float(np.median(period_s)),
        "latency_spread_s": float(period_s.std()),
        **{name: _finite_mean(steps[name]) for name in _MEANS},
        "device_median_s": _finite_mean(steps["device_s"], np.median),
        "host_median_s": _finite_mean(steps["host_s"], np.median),
        "steps": number,
        "prompt_tokens_per_step": _finite_mean(steps["prompt_tokens"]),
        "context_mean": _finite_mean(steps["decode_context"]) / decodes if point.batch else 0.0,
        "energy_j": window["power_w"] * latency_s,
        "window_s": window.pop("duration_s"),
        **window,
        "throttle": list(window["throttle"]),
        "flags": flags,
        "groups": _group_steps(steps) if point.prompts else [],
    }


_MEANS = ("device_s", "device_gap_s", "host_s", "schedule_s", "launch_s", "wait_s", "tokens")


PROFILED_STEPS = 8


def list_step_kernels(
    bench: EngineBench,
    point: StepPoint,
    torch: Any,
) -> list[dict[str, Any]]:
    """Return the kernels of one kind of step: name, calls and seconds of each in a step.

    Which kernels an engine chooses depends on its version, the card and the format of the weights,
    so rows are worth little without their names.
    """
    recorder = bench.recorder
    with _running_batch(bench, point) as feeder:
        feeder.run_steps(PROFILED_STEPS)
        bench.synchronize()
        recorder.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            feeder.run_steps(PROFILED_STEPS)
            bench.synchronize()
        steps = max(len(recorder.records), 1)
    entries = []
    for event in profile.key_averages():
        if event.self_device_time_total > 0.0:
            seconds = 1e-6 * event.self_device_time_total / steps
            entry = {
                "name": str(event.key)[:160],
                "calls": event.count / steps,
                "time_s": seconds,
            }
            entries.append(entry)
    return sorted(entries, key=lambda entry: -entry["time_s"])


def measure_idle_engine(bench: EngineBench, duration_s: float = 1.2) -> dict[str, Any]:
    """Measure the power of an engine that is loaded and has nothing to do."""
    mark = bench.sampler.head
    started_s = bench.recorder.clock()
    bench.sleep(duration_s)
    samples: EnergySamples = bench.sampler.since(mark)
    window = take_window(samples, started_s, bench.recorder.clock(), RULE)
    fields = ("power_w", "power_spread_w", "ticks", "sm_clock_hz", "temperature_c")
    row = {name: value for name, value in describe_window(window).items() if name in fields}
    return row | {"flags": [flag for flag in window.flags if "drift" not in flag]}


def warm_engine(bench: EngineBench, lengths: tuple[int, ...]) -> None:
    """Compute one prompt of each length, so that kernels compiled at first use are not met in a
    measurement.
    """
    names = []
    for tokens in lengths:
        names.append(bench.add(bench.prompt(tokens), 2))
        while bench.recorder.engine.has_unfinished_requests():
            bench.recorder.step()
    bench.drain(names)


class _Feeder:
    """Keeps prompts coming: new ones as soon as the ones before are scheduled to the last token."""

    def __init__(
        self,
        bench: EngineBench,
        point: StepPoint,
    ) -> None:
        self._bench = bench
        self._point = point
        self._pool = [bench.prompt(point.prompt_tokens) for _ in range(8 if point.prompts else 0)]
        self._backlog = 0
        self._spent_s = 0.0
        self._latest: list[Any] = []
        self.names: list[str] = []

    @property
    def distinct_tokens(self) -> int:
        """Different tokens that the latest step yielded, over all sequences."""
        tokens = set()
        for output in self._latest:
            token_ids = output.outputs[0].token_ids
            tokens.update(token_ids[-1:])
        return len(tokens)

    @property
    def added_s(self) -> float:
        """Host time a new request takes before it is scheduled."""
        return self._spent_s / len(self.names) if self.names else 0.0

    def run_until(self, until_s: float) -> None:
        """Step the engine, fed before each step where no prompt waits."""
        while self._bench.recorder.clock() < until_s:
            self._run_step()

    def run_steps(self, count: int) -> None:
        """Step the engine so many times."""
        for _ in range(count):
            self._run_step()

    def _run_step(self) -> None:
        recorder = self._bench.recorder
        point = self._point
        if point.prompts and self._backlog <= 0:
            began_s = recorder.clock()
            for _ in range(point.prompts):
                ids = list(self._pool[len(self.names) % len(self._pool)])
                ids[0] = next(_NUMBERS) % self._bench.vocab_size  # else a cached prefix is met
                self.names.append(self._bench.add(ids, 1, point.sampling))
                self._backlog += len(ids)
            self._spent_s += recorder.clock() - began_s
        number = len(recorder.records)
        self._latest = recorder.step()
        if len(recorder.records) > number:
            self._backlog -= max(recorder.records[-1].tokens - point.batch, 0)


def _fill_batch(
    bench: EngineBench,
    point: StepPoint,
    names: list[str],
) -> None:
    """Bring all decoding requests into the batch; refused when the engine does not take them."""
    if not point.batch:
        return
    # requests differ in their last token
    ids = bench.prompt(point.context - 1)
    last = bench.prompt(point.batch)
    most_tokens = bench.max_model_len - point.context
    names.extend(bench.add([*ids, token], most_tokens, point.sampling) for token in last)
    recorder = bench.recorder
    deadline_s = bench.recorder.clock() + MOST_SETUP_S
    while True:
        latest = recorder.records[-1] if recorder.records else None
        if (
            latest is not None and len(latest.scheduled) == point.batch == latest.tokens
        ):  # each makes one token
            return
        recorder.step()
        if recorder.clock() > deadline_s:
            seen = len(recorder.records[-1].scheduled) if recorder.records else 0
            raise Refused(
                f"{point.id}: {seen} of {point.batch} requests in the batch after the set-up time."
            )


def _group_steps(steps: dict[str, Array]) -> list[dict[str, float | None]]:
    """Return median times of steps with equal prompt tokens and context; chunks of one prompt
    differ in context.
    """
    keys = np.stack([steps["prompt_tokens"], steps["prompt_context"]], axis=1)
    groups = []
    for tokens, context in np.unique(keys, axis=0)[:8]:
        same = (keys == (tokens, context)).all(axis=1)
        device_s = _finite_mean(steps["device_s"][same], np.median)
        groups.append(
            {
                "prompt_tokens": float(tokens),
                "prompt_context": float(context),
                "steps": int(same.sum()),
                "device_median_s": device_s if np.isfinite(device_s) else None,
                "call_median_s": float(np.median((steps["end_s"] - steps["begin_s"])[same])),
            }
        )
    return groups


def _finite_mean(values: Array, average: Callable[[Array], Any] = np.mean) -> float:
    """Return the mean, or another ``average``, of the values that are known; NaN where none is."""
    finite = values[np.isfinite(values)]
    return float(average(finite)) if len(finite) else float("nan")
