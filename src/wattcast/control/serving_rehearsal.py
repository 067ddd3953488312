"""Rehearse the clock control of a serving card on a simulated engine, beside its oracle.

A rehearsal sends a trace through the engine simulator of ``wattcast simulate``, the policy and its
oracle. The policy sees what an engine's Prometheus endpoint would tell, in vLLM's buckets, and the
card's energy. The oracle is the one clock, of those that keep the limits in 99 % of the minutes (or
in as many as the highest clock does), that needs the least energy for the whole trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.control.rehearsal_coefficients import REHEARSAL
from wattcast.control.serving_control import (
    READING_INTERVAL_S,
    EngineReading,
    LatencyHistogram,
    LatencyKeeper,
    ServingLimits,
    StepForecast,
    forecast_steps,
)
from wattcast.control.site_budget import (
    SiteGpu,
    SitePlan,
    rehearse_site,
)
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.serving.arrivals import Trace
from wattcast.serving.engine_simulator import EngineReplica
from wattcast.serving.request_plan import EngineSettings, plan_requests
from wattcast.serving.simulate_serving import find_language_model
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
from wattcast.workload.model_options import ModelOptions, SoftwareStack

LONGEST_CONTEXT = 16384  # tokens that step costs are tabulated for
LEVEL_SHARES = tuple(np.linspace(0.36, 1.0, 17).tolist())  # of the top clock
# Buckets of vLLM's histograms, seconds (vllm/v1/metrics); latencies beyond the last are of no use
# here
TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, float("inf")),
)
TPOT_EDGES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, float("inf"))


class ServingPlant:
    """Simulate one engine on a trace, with a clock that may change at any moment."""

    def __init__(
        self,
        by_level: Sequence[StepCosts],
        trace: Trace,
    ) -> None:
        self._by_level = by_level
        settings = EngineSettings()
        self.engine = EngineReplica(by_level[-1], settings, plan_requests(trace, settings))
        self.engine.submit(range(len(trace)))
        self._arrival_s, self._output = trace.arrival_s.tolist(), trace.output_tokens.tolist()
        self._prompt = trace.prompt_tokens.tolist()
        self._open: list[int] = []  # requests that have not got all their tokens
        self._next = 0
        self._counts = [np.zeros(len(edges)) for edges in (TTFT_EDGES, TPOT_EDGES)]
        self._sums = [0.0, 0.0]
        self._prompt_tokens = 0
        self._begun: set[int] = set()

    def advance(
        self,
        until_s: float,
        level: int,
    ) -> None:
        """Let time pass at a clock level."""
        self.engine.costs = self._by_level[level]
        self.engine.run_until(until_s)

    def read(self) -> EngineReading:
        """Return what the engine's metrics endpoint would tell now."""
        engine = self.engine
        now_s = self.engine.now_s
        while self._next < len(self._arrival_s) and self._arrival_s[self._next] <= now_s:
            self._open.append(self._next)
            self._next += 1
        still = []
        for request in self._open:
            first_s = engine.first_token_s[request]
            last_s = engine.last_token_s[request]
            if first_s <= now_s and request not in self._begun:  # False for NaN
                self._begun.add(request)
                self._note_latency(0, first_s - self._arrival_s[request])
                self._prompt_tokens += self._prompt[request]
            if last_s <= now_s:
                if self._output[request] > 1:
                    self._note_latency(1, (last_s - first_s) / (self._output[request] - 1))
            else:
                still.append(request)
        self._open = still
        ttft, tpot = (
            LatencyHistogram(edges, tuple(np.cumsum(counts).tolist()), total)
            for edges, counts, total in zip(
                (TTFT_EDGES, TPOT_EDGES), self._counts, self._sums, strict=True
            )
        )
        tokens = engine.decoded + len(self._begun)
        return EngineReading(
            ttft,
            tpot,
            tokens,
            engine.waiting,
            engine.running,
            self._prompt_tokens,
            engine.cache_use,
        )

    def _note_latency(
        self,
        which: int,
        seconds: float,
    ) -> None:
        edges = (TTFT_EDGES, TPOT_EDGES)[which]
        self._counts[which][np.searchsorted(edges, seconds)] += 1
        self._sums[which] += seconds


@dataclass(frozen=True)
class ServedTrace:
    """Hold what a policy made of a trace."""

    energy_j: float
    kept: npt.NDArray[np.bool_]  # by minute: whether both percentiles kept their limits
    mean_hz: float
    ttft_s: float  # 99th percentile of the whole trace, as is the next
    tpot_s: float
    power_w: Array  # mean in each interval

    @property
    def minutes_kept(self) -> float:
        """Return the share of minutes in which both percentiles kept their limits."""
        return float(self.kept.mean())


def serve_at_levels(
    by_level: Sequence[StepCosts],
    trace: Trace,
    limits: ServingLimits,
    keeper: LatencyKeeper | int,
) -> ServedTrace:
    """Serve a trace under a policy, or at a fixed level, to its end."""
    plant = ServingPlant(by_level, trace)
    engine = plant.engine
    end_s = float(trace.arrival_s[-1])
    level = keeper if isinstance(keeper, int) else keeper.level
    clocks = []
    joules = [0.0]
    now_s = 0.0
    while now_s < end_s:
        now_s += READING_INTERVAL_S
        plant.advance(now_s, level)
        clocks.append(float(by_level[level].clock_hz[0]))
        joules.append(engine.spent_j)
        if not isinstance(keeper, int):
            level = keeper.decide(now_s, plant.read(), engine.spent_j)
    run = engine.finish()
    ttft_s = run.first_token_s - trace.arrival_s
    tpot_s = (run.last_token_s - run.first_token_s) / np.maximum(trace.output_tokens - 1, 1)
    minute = (trace.arrival_s // 60).astype(int)
    within_limits = [
        np.percentile(ttft_s[minute == m], 99) <= limits.ttft_s
        and np.percentile(tpot_s[minute == m], 99) <= limits.tpot_s
        for m in np.unique(minute)
    ]
    return ServedTrace(
        engine.spent_j,
        np.array(within_limits),
        float(np.mean(clocks)),
        float(np.percentile(ttft_s, 99)),
        float(np.percentile(tpot_s, 99)),
        np.diff(joules) / READING_INTERVAL_S,
    )


def rehearse_load(
    by_level: Sequence[StepCosts],
    trace: Trace,
    limits: ServingLimits,
) -> dict[str, Any]:
    """Serve a trace at the highest clock, under the policy and by the oracle; return what each
    needed and kept.
    """
    top = serve_at_levels(by_level, trace, limits, len(by_level) - 1)
    ours = serve_at_levels(by_level, trace, limits, make_keeper(by_level, limits))
    low = 0
    at = len(by_level) - 1
    best = top
    while (
        low < at
    ):  # energy falls with the clock, so that the oracle is the lowest level that keeps the limits
        level = (low + at) // 2
        served = serve_at_levels(by_level, trace, limits, level)
        if (
            served.minutes_kept >= min(REHEARSAL.oracle_kept, top.minutes_kept)
            and served.energy_j <= best.energy_j
        ):
            at = level
            best = served
        else:
            low = level + 1
    saving = 1 - ours.energy_j / top.energy_j
    possible = 1 - best.energy_j / top.energy_j
    return {
        "requests_per_s": len(trace) / float(trace.arrival_s[-1]),
        "saving": saving,
        "oracle_saving": possible,
        "share_of_oracle": saving / possible if possible > 0 else 1.0,
        "minutes_kept": ours.minutes_kept,
        "minutes_kept_at_top": top.minutes_kept,
        "minutes_kept_of_top": float(ours.kept[top.kept].mean()) if top.kept.any() else 1.0,
        "oracle_hz": float(by_level[at].clock_hz[0]),
        "mean_hz": ours.mean_hz,
        "ttft_s": ours.ttft_s,
        "tpot_s": ours.tpot_s,
    }


def build_clock_levels(
    model: str,
    gpu: Gpu,
    longest_context: int = LONGEST_CONTEXT,
    tensor_parallel: int = 1,
) -> list[StepCosts]:
    """Return the step costs of a model at 17 core clocks of a GPU, or of several that share it,
    lowest first.
    """
    options = ModelOptions.from_names(
        dtype="bf16",
        stack=SoftwareStack.ENGINE,
        tp=tensor_parallel,
    )
    steps = StepRange(longest_context=longest_context)
    costs = tabulate_step_costs(find_language_model(model), gpu, options, steps)
    return [costs.cap_clock(share * float(costs.clock_hz[0]), gpu) for share in LEVEL_SHARES]


def make_keeper(
    by_level: Sequence[StepCosts],
    limits: ServingLimits,
    clocks_hz: Sequence[float] | None = None,
) -> LatencyKeeper:
    """Return a policy that knows what the steps of the engine take at each clock, or at those that
    a card has.
    """
    known_hz = [float(costs.clock_hz[0]) for costs in by_level]

    def forecast(prompt: float, output: float) -> StepForecast:
        at_levels = forecast_steps(by_level, prompt, output)
        if clocks_hz is None:
            return at_levels
        return StepForecast(
            *(
                np.interp(clocks_hz, known_hz, each)
                for each in (at_levels.empty_s, at_levels.request_s)
            )
        )

    return LatencyKeeper(clocks_hz or known_hz, limits, forecast)


def rehearse_site_serving(
    by_level: Sequence[StepCosts],
    traces: Sequence[Trace],
    limits: ServingLimits,
    budget_w: float,
    limit_w: float,
) -> dict[str, Any]:
    """Serve a trace on each of several GPUs under the policy, and share a budget among what they
    draw.

    Safe shares are two thirds of equal ones. A GPU that gets less than it would draw is only
    counted as such: the engine is not slowed in turn."""
    days = [
        serve_at_levels(by_level, trace, limits, make_keeper(by_level, limits)) for trace in traces
    ]
    seconds = min(len(day.power_w) for day in days)
    demand_w = np.repeat(
        np.stack([day.power_w[:seconds] for day in days]), int(READING_INTERVAL_S), axis=1
    )
    safe_w = min(budget_w / len(traces) / REHEARSAL.safe_part, limit_w)
    gpus = tuple(SiteGpu(f"gpu{i}", safe_w, limit_w) for i in range(len(traces)))
    drawn_w, served = rehearse_site(SitePlan(budget_w, gpus), demand_w)
    return {
        "gpus": len(traces),
        "seconds": demand_w.shape[1],
        "budget_w": budget_w,
        "most_wanted_w": float(demand_w.sum(axis=0).max()),
        "most_drawn_w": float(drawn_w.max()),
        "seconds_over_budget": int((drawn_w > budget_w).sum()),
        "energy_served": float(served.mean()),
        "minutes_kept_without_budget": float(np.mean([day.minutes_kept for day in days])),
    }
