"""Control a card that serves requests: energy per token under limits of response times.

A serving engine does what comes in, so that throughput says nothing about the clock until the queue grows. The signal
is the engine's own: histograms of the time to the first token (TTFT) and per output token (TPOT), read from its
Prometheus endpoint, which vLLM and SGLang both have. ``LatencyKeeper`` lowers the clock as long as the 99th
percentiles keep away from their limits and energy per token falls, and goes to the highest clock at once when they
do not.

A rehearsal sends a trace through the engine simulator of ``wattcast simulate``, the policy and its oracle. The policy
sees what an engine's Prometheus endpoint would tell, in vLLM's buckets, and the card's energy. The oracle is the one
clock, of those that keep the limits in 99 % of the minutes, that needs the least energy for the whole trace.
"""

from __future__ import annotations

import bisect
import math
import re
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import MissingTool, bad_value
from wattcast.hardware import Gpu
from wattcast.manage.site_budget import SiteGpu, SitePlan, rehearse_site
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.pipeline import idle_power_w
from wattcast.serving.arrivals import Trace
from wattcast.serving.engine_simulator import EngineReplica, EngineSettings, plan_requests
from wattcast.serving.step_costs import StepCosts, tabulate_step_costs
from wattcast.workload.model_catalogue import ModelKind
from wattcast.workload.model_options import ModelOptions, SoftwareStack
from wattcast.workload.readers.load_workload import find_model

# Metric names by engine, newest first. vLLM: docs.vllm.ai, "Production Metrics"; SGLang: docs.sglang.io, likewise.
FIRST_TOKEN = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
PER_TOKEN = (
    *("vllm:request_time_per_output_token_seconds", "vllm:inter_token_latency_seconds"),
    *("vllm:time_per_output_token_seconds", "sglang:inter_token_latency_seconds"),
    "sglang:time_per_output_token_seconds",
)
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
TOKENS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
TAIL = {"ttft": 2.0, "tpot": 1.25}  # 99th percentile over the mean, where one bucket holds both
READ_TIMEOUT_S = 2.0
LARGEST_ANSWER = 4 * 2**20
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_EDGE = re.compile(r'(?:^|,)\s*le="([^"]+)"')


@dataclass(frozen=True)
class LatencyHistogram:
    """Hold the counts of a Prometheus histogram since its engine started, or between two readings."""

    edges: tuple[float, ...]  # upper ends of the buckets, the last is infinite
    counts: tuple[float, ...]  # at or below each edge
    total_s: float

    def since(self, before: LatencyHistogram | None) -> LatencyHistogram:
        """Return what came after an earlier reading; all of it where the engine was started anew."""
        if before is None or before.edges != self.edges or before.counts[-1] > self.counts[-1]:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return LatencyHistogram(self.edges, counts, self.total_s - before.total_s)

    @property
    def count(self) -> float:
        """Count the observations."""
        return self.counts[-1]

    def quantile_s(self, tail: float, share: float = 0.99) -> float:
        """Estimate a quantile: ``tail`` times the mean, kept within the bucket that holds the quantile.

        Buckets are wide (25 to 50 ms), and the line that Prometheus draws within one would call 26 ms 49.8.
        """
        if self.count <= 0:
            return 0.0
        place = bisect.bisect_left(self.counts, share * self.count)
        low, high = (self.edges[place - 1] if place else 0.0), self.edges[place]
        return min(max(tail * self.total_s / self.count, low), high)


@dataclass(frozen=True)
class EngineReading:
    """Hold what an engine tells: cumulative histograms and tokens, and requests that wait now."""

    ttft: LatencyHistogram
    tpot: LatencyHistogram
    tokens: float
    waiting: float


def parse_engine_metrics(text: str) -> EngineReading:
    """Read an engine's metrics in Prometheus' text format; series of several models or ranks are added up."""
    plain: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        if not math.isfinite(number):
            continue
        edge = _EDGE.search(labels or "")
        if name.endswith("_bucket") and edge is not None:
            series = buckets.setdefault(name.removesuffix("_bucket"), {})
            at = float(edge[1].replace("+Inf", "inf"))
            series[at] = series.get(at, 0.0) + number
        else:
            plain[name] = plain.get(name, 0.0) + number
    found = []
    for names in (FIRST_TOKEN, PER_TOKEN):
        name = next((name for name in names if name in buckets and math.inf in buckets[name]), None)
        if name is None:
            raise bad_value("--metrics", f"a histogram {names[0]} (vLLM) or {names[-1]} (SGLang)", "none")
        edges = tuple(sorted(buckets[name]))
        counts = tuple(buckets[name][edge] for edge in edges)
        found.append(LatencyHistogram(edges, counts, plain.get(f"{name}_sum", 0.0)))
    tokens, waiting = (next((plain[name] for name in names if name in plain), 0.0) for names in (TOKENS, WAITING))
    return EngineReading(found[0], found[1], tokens, waiting)


def read_engine_metrics(url: str) -> EngineReading:
    """Fetch and read an engine's metrics. ``MissingTool`` when it does not answer."""
    if not url.startswith(("http://", "https://")):
        raise bad_value("--metrics", "an address such as http://localhost:8000/metrics", url)
    try:
        with urllib.request.urlopen(url, timeout=READ_TIMEOUT_S) as answer:  # noqa: S310  (scheme checked above)
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


@dataclass
class LatencyKeeper:
    """Choose a core clock from response times: as low as pays, with the 99th percentiles below their limits.

    A *strain* is the larger of the two percentiles over its limit. Going down by the factor x, it is expected to rise
    by x to the power of the steepest rise seen so far, at least 1.5: near saturation it rises faster than 1/f. A step
    after which it rises more than expected is taken back at once. A level that was too low is avoided at the same
    load, for longer each time.
    """

    levels_hz: Sequence[float]  # ascending
    limits: ServingLimits
    look_s: float = 60.0  # window behind a step down
    alarm_s: float = 10.0  # window behind a step up
    easy: float = 0.35  # strain below which several levels are taken at once,
    far: float = 0.6  # to where it is expected to stay below this; no step is taken back below it
    near: float = 0.85  # strain that a single step may be expected to lead to
    alarm: float = 0.95  # strain at which the clock goes to the top
    surprise: float = 1.25  # strain over the expected one, at which a step is taken back
    saved: float = 0.95  # of the energy per token: a step that makes it exceed the one before by more is taken back
    memory_s: float = 600.0  # how long a level that was too low is avoided the first time
    level: int = field(init=False)
    why: str = field(init=False, default="start")

    def __post_init__(self) -> None:
        self.level = len(self.levels_hz) - 1
        self._readings: deque[tuple[float, EngineReading, float]] = deque()  # time, engine, joules of the card
        self._since_s: float | None = None
        self._steepness = 1.5
        self._step: _ClockStep | None = None  # the last one down, while it is on trial
        self._resume: int | None = None  # level to go back to when an alarm is over
        self._floors: dict[int, _TooLow] = {}

    def decide(self, now_s: float, reading: EngineReading, energy_j: float) -> int:
        """Return the level for the next interval. Call it every few seconds."""
        self._readings.append((now_s, reading, energy_j))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - self.look_s:
            self._readings.popleft()
        self._since_s = now_s if self._since_s is None else self._since_s
        seen, top, stayed_s = self._window(now_s, self.alarm_s), len(self.levels_hz) - 1, now_s - self._since_s
        if self.level < top and (seen.strain > self.alarm or reading.waiting > seen.load * self.limits.ttft_s + 1):
            self._avoid(now_s)
            resume = min(self.level + 2, top)
            self._move(now_s, top, "response times are near their limits")
            self._resume = resume
        elif self._step is not None and self._is_worse(self._step, seen):
            self._avoid(now_s)
            self._move(now_s, self._step.before, "response times rose more than expected")
        elif self._resume is not None and seen.strain < self.far and stayed_s >= 2 * self.alarm_s:
            self._move(now_s, self._resume, "response times are well again")
        elif stayed_s >= self.look_s:
            self._consider_lower(now_s)
        return self.level

    def _consider_lower(self, now_s: float) -> None:
        """Go down, several levels where the strain is low, or back up where the last step did not pay."""
        seen = self._window(now_s, self.look_s)
        if self._step is not None:
            before = self._step
            ratio = math.log(self.levels_hz[before.before] / self.levels_hz[self.level])
            if seen.strain > 0 < before.strain:
                self._steepness = max(1.5, 1.5 * math.log(seen.strain / before.strain) / ratio)
            if self.saved * seen.energy_j_per_token > before.energy_j_per_token > 0:
                self._avoid(now_s)
                self._move(now_s, before.before, "the step before did not save energy")
                return
            self._step = None
        at_load = [
            i + 1 for i, floor in self._floors.items() if floor.until_s > now_s and seen.load > 0.8 * floor.load
        ]
        here, lowest, wanted, expected = self.levels_hz[self.level], max(at_load, default=0), self.level, 0.0
        for to in range(self.level - 1, lowest - 1, -1):
            ratio = here / self.levels_hz[to]
            after = seen.strain * ratio**self._steepness
            is_easy = seen.strain < self.easy and seen.strain * ratio ** max(self._steepness, 2.0) <= self.far
            if is_easy or (to == self.level - 1 and after <= self.near):
                wanted, expected = to, after
        if wanted != self.level:
            step = _ClockStep(self.level, seen.strain, seen.energy_j_per_token, expected, seen.load)
            self._move(now_s, wanted, f"response times are at {seen.strain:.0%} of their limits")
            self._step = step

    def _is_worse(self, step: _ClockStep, seen: _ServingWindow) -> bool:
        """Tell whether a step raised the strain more than expected, and a burst of requests does not explain it."""
        if seen.strain <= max(self.surprise * step.expected, self.far):
            return False
        return seen.load <= 1.1 * step.load or seen.strain > self.near

    def _avoid(self, now_s: float) -> None:
        """Remember that the present level is too low for the present load."""
        times = self._floors[self.level].times + 1 if self.level in self._floors else 0
        load = self._window(now_s, self.look_s).load
        self._floors[self.level] = _TooLow(now_s + self.memory_s * 2**times, load, times)

    def _move(self, now_s: float, level: int, why: str) -> None:
        self.level, self.why, self._since_s, self._step, self._resume = level, why, now_s, None, None

    def _window(self, now_s: float, seconds: float) -> _ServingWindow:
        old = next((r for r in reversed(self._readings) if r[0] <= now_s - seconds), self._readings[0])
        new = self._readings[-1]
        ttft, tpot = new[1].ttft.since(old[1].ttft), new[1].tpot.since(old[1].tpot)
        tokens, span_s = new[1].tokens - old[1].tokens, new[0] - old[0]
        return _ServingWindow(
            max(
                ttft.quantile_s(TAIL["ttft"]) / self.limits.ttft_s, tpot.quantile_s(TAIL["tpot"]) / self.limits.tpot_s
            ),
            ttft.count / span_s if span_s > 0 else 0.0,
            (new[2] - old[2]) / tokens if tokens > 0 else 0.0,
        )


@dataclass(frozen=True)
class _ServingWindow:
    strain: float
    load: float  # requests per second
    energy_j_per_token: float


@dataclass(frozen=True)
class _ClockStep:
    before: int  # level
    strain: float  # before, as is the next
    energy_j_per_token: float
    expected: float  # strain after it
    load: float  # requests per second before it


@dataclass(frozen=True)
class _TooLow:
    until_s: float
    load: float
    times: int


LEVEL_SHARES = tuple(np.linspace(0.36, 1.0, 17).tolist())  # of the top clock
INTERVAL_S = 5.0
KEPT = 0.99  # of the minutes, in which an oracle must keep the limits
# Buckets of vLLM's histograms, seconds (vllm/v1/metrics); latencies beyond the last are of no use here
TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    float("inf"),
)
TPOT_EDGES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, float("inf"))


def costs_at_clock(costs: StepCosts, gpu: Gpu, clock_hz: float) -> StepCosts:
    """Return the costs of a card whose core clock is locked: between tabulated clocks they are linear."""
    clocks, n = costs.clock_hz, costs.clocks
    below = int(np.searchsorted(-clocks, -clock_hz, side="right"))  # first tabulated clock below
    above = max(below - 1, 0)
    share = 0.0 if below >= n else (clocks[above] - clock_hz) / (clocks[above] - clocks[below])

    def cut(table: Array) -> Array:
        halves = []
        for start in (0, n):
            rows = table[..., start : start + n]
            mixed = rows[..., [above]] * (1 - share) + rows[..., [min(below, n - 1)]] * share
            halves.append(np.concatenate([mixed, rows[..., below:]], axis=-1))
        return np.concatenate(halves, axis=-1)

    idle_w = float(idle_power_w(bundle_for(gpu), np.array([clock_hz]))[0])
    return replace(
        costs,
        clock_hz=np.append(clock_hz, clocks[below:]),
        tokens=cut(costs.tokens),
        head=cut(costs.head),
        decode=cut(costs.decode),
        prompt=cut(costs.prompt),
        prompt_slope=cut(costs.prompt_slope),
        idle_w=idle_w,
        waiting_w=idle_w * costs.host.waiting_power,
    )


class ServingPlant:
    """Simulate one engine on a trace, with a clock that may change at any moment."""

    def __init__(self, by_level: Sequence[StepCosts], trace: Trace, settings: EngineSettings) -> None:
        self._by_level, self.trace = by_level, trace
        self.engine = EngineReplica(by_level[-1], settings, plan_requests(trace, settings))
        self.engine.submit(range(len(trace)))
        self._arrival_s, self._output = trace.arrival_s.tolist(), trace.output_tokens.tolist()
        self._open: list[int] = []  # requests that have not got all their tokens
        self._next = 0
        self._counts = [np.zeros(len(edges)) for edges in (TTFT_EDGES, TPOT_EDGES)]
        self._sums, self._tokens = [0.0, 0.0], 0.0
        self._begun: set[int] = set()

    def advance(self, until_s: float, level: int) -> None:
        """Let time pass at a clock level."""
        self.engine.costs = self._by_level[level]
        self.engine.run_until(until_s)

    def read(self) -> EngineReading:
        """Return what the engine's metrics endpoint would tell now."""
        engine, now_s = self.engine, self.engine.now_s
        while self._next < len(self._arrival_s) and self._arrival_s[self._next] <= now_s:
            self._open.append(self._next)
            self._next += 1
        still = []
        for request in self._open:
            first_s, last_s = engine.first_token_s[request], engine.last_token_s[request]
            if first_s <= now_s and request not in self._begun:  # False for NaN
                self._begun.add(request)
                self._note(0, first_s - self._arrival_s[request])
            if last_s <= now_s:
                self._tokens += self._output[request]
                if self._output[request] > 1:
                    self._note(1, (last_s - first_s) / (self._output[request] - 1))
            else:
                still.append(request)
        self._open = still
        ttft, tpot = (
            LatencyHistogram(edges, tuple(np.cumsum(counts).tolist()), total)
            for edges, counts, total in zip((TTFT_EDGES, TPOT_EDGES), self._counts, self._sums, strict=True)
        )
        return EngineReading(ttft, tpot, self._tokens, engine.waiting)

    def _note(self, which: int, seconds: float) -> None:
        edges = (TTFT_EDGES, TPOT_EDGES)[which]
        self._counts[which][np.searchsorted(edges, seconds)] += 1
        self._sums[which] += seconds


@dataclass(frozen=True)
class ServedTrace:
    """Hold what a policy made of a trace."""

    energy_j: float
    minutes_kept: float  # share of minutes in which both percentiles kept their limits
    mean_hz: float
    ttft_s: float  # 99th percentile of the whole trace, as is the next
    tpot_s: float
    power_w: Array  # mean in each interval


def serve_at_levels(
    by_level: Sequence[StepCosts],
    trace: Trace,
    limits: ServingLimits,
    keeper: LatencyKeeper | int,
    settings: EngineSettings | None = None,
    interval_s: float = INTERVAL_S,
) -> ServedTrace:
    """Serve a trace under a policy, or at a fixed level, to its end."""
    plant = ServingPlant(by_level, trace, settings or EngineSettings())
    engine, end_s = plant.engine, float(trace.arrival_s[-1])
    level = keeper if isinstance(keeper, int) else keeper.level
    clocks, joules, now_s = [], [0.0], 0.0
    while now_s < end_s:
        now_s += interval_s
        plant.advance(now_s, level)
        clocks.append(float(by_level[level].clock_hz[0]))
        joules.append(engine.spent_j)
        if not isinstance(keeper, int):
            level = keeper.decide(now_s, plant.read(), engine.spent_j)
    run = engine.finish()
    ttft_s = run.first_token_s - trace.arrival_s
    tpot_s = (run.last_token_s - run.first_token_s) / np.maximum(trace.output_tokens - 1, 1)
    minute = (trace.arrival_s // 60).astype(int)
    kept = [
        np.percentile(ttft_s[minute == m], 99) <= limits.ttft_s
        and np.percentile(tpot_s[minute == m], 99) <= limits.tpot_s
        for m in np.unique(minute)
    ]
    return ServedTrace(
        engine.spent_j,
        float(np.mean(kept)),
        float(np.mean(clocks)),
        float(np.percentile(ttft_s, 99)),
        float(np.percentile(tpot_s, 99)),
        np.diff(joules) / interval_s,
    )


def rehearse_load(
    by_level: Sequence[StepCosts], trace: Trace, limits: ServingLimits, keeper: LatencyKeeper
) -> dict[str, Any]:
    """Serve a trace at the highest clock, under the policy and by the oracle; return what each needed and kept."""
    top = serve_at_levels(by_level, trace, limits, len(by_level) - 1)
    ours = serve_at_levels(by_level, trace, limits, keeper)
    low, at, best = 0, len(by_level) - 1, top
    while low < at:  # energy falls with the clock, so that the oracle is the lowest level that keeps the limits
        level = (low + at) // 2
        found = serve_at_levels(by_level, trace, limits, level)
        if found.minutes_kept >= min(KEPT, top.minutes_kept) and found.energy_j <= best.energy_j:
            at, best = level, found
        else:
            low = level + 1
    saving, possible = 1 - ours.energy_j / top.energy_j, 1 - best.energy_j / top.energy_j
    return {
        "requests_per_s": len(trace) / float(trace.arrival_s[-1]),
        "saving": saving,
        "oracle_saving": possible,
        "share_of_oracle": saving / possible if possible > 0 else 1.0,
        "minutes_kept": ours.minutes_kept,
        "minutes_kept_at_top": top.minutes_kept,
        "oracle_hz": float(by_level[at].clock_hz[0]),
        "mean_hz": ours.mean_hz,
        "ttft_s": ours.ttft_s,
        "tpot_s": ours.tpot_s,
    }


def build_clock_levels(model: str, gpu: Gpu, dtype: str = "bf16", longest_context: int = 16384) -> list[StepCosts]:
    """Return the step costs of a model at 17 core clocks of a GPU, lowest first."""
    spec = find_model(model)
    if spec is None or spec.kind is not ModelKind.LANGUAGE:
        raise bad_value("model", "a language model", model, "`wattcast models list` lists them.")
    options = ModelOptions.from_names(dtype=dtype, stack=SoftwareStack.ENGINE)
    costs = tabulate_step_costs(spec, gpu, options, longest_context=longest_context)
    return [costs_at_clock(costs, gpu, share * float(costs.clock_hz[0])) for share in LEVEL_SHARES]


def rehearse_site_serving(
    by_level: Sequence[StepCosts], traces: Sequence[Trace], limits: ServingLimits, budget_w: float, limit_w: float
) -> dict[str, Any]:
    """Serve a trace on each of several GPUs under the policy, and share a budget among what they draw.

    Safe shares are two thirds of equal ones. A GPU that gets less than it would draw is only counted as such: the
    engine is not slowed in turn.
    """
    clocks = [float(costs.clock_hz[0]) for costs in by_level]
    days = [serve_at_levels(by_level, trace, limits, LatencyKeeper(clocks, limits)) for trace in traces]
    seconds = min(len(day.power_w) for day in days)
    demand_w = np.repeat(np.stack([day.power_w[:seconds] for day in days]), int(INTERVAL_S), axis=1)
    safe_w = min(budget_w / len(traces) / 1.5, limit_w)
    gpus = tuple(SiteGpu(f"gpu{i}", safe_w, limit_w) for i in range(len(traces)))
    site = rehearse_site(SitePlan(budget_w, gpus), demand_w)
    return {
        "gpus": len(traces),
        "seconds": demand_w.shape[1],
        "budget_w": budget_w,
        "most_wanted_w": float(demand_w.sum(axis=0).max()),
        "most_drawn_w": float(site.drawn_w.max()),
        "seconds_over_budget": int((site.drawn_w > budget_w).sum()),
        "energy_served": float(site.served.mean()),
        "minutes_kept_without_budget": float(np.mean([day.minutes_kept for day in days])),
    }
