"""Rehearse the control of a serving card: a trace through the engine simulator, the policy and its oracle.

The plant is the simulator of ``wattcast simulate``. The policy sees what an engine's Prometheus endpoint would tell,
in vLLM's buckets, and the card's energy. The oracle is the one clock, of those that keep the limits in 99 % of the
minutes, that needs the least energy for the whole trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value
from wattcast.hardware import Gpu
from wattcast.manage.serving_control import EngineReading, LatencyHistogram, LatencyKeeper, ServingLimits
from wattcast.manage.site_budget import SiteGpu, SitePlan, rehearse_site
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.pipeline import idle_power_w
from wattcast.serving.arrivals import Trace, draw_trace
from wattcast.serving.engine_simulator import EngineReplica, EngineSettings, plan_requests
from wattcast.serving.step_costs import StepCosts, tabulate_step_costs
from wattcast.workload.model_options import ModelOptions, SoftwareStack
from wattcast.workload.readers.load_workload import find_model

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
    best, at = top, len(by_level) - 1
    for level in range(len(by_level) - 2, -1, -1):
        found = serve_at_levels(by_level, trace, limits, level)
        if found.minutes_kept < min(KEPT, top.minutes_kept):
            break
        if found.energy_j < best.energy_j:
            best, at = found, level
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
    if spec is None:
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


def find_capacity(costs: StepCosts, prompt: str | int, output: str | int) -> float:
    """Return the requests per second that the engine serves at its highest clock when all come at once."""
    trace = draw_trace(1e3, prompt, output, "poisson", requests=2000)
    engine = EngineReplica(costs, EngineSettings(), plan_requests(trace, EngineSettings()))
    engine.submit(range(len(trace)))
    run = engine.finish()
    return len(trace) / float(np.nanmax(run.last_token_s))
