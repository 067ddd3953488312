"""Simulate the replica of ``expected.json`` under the traffic that really came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from wattcast.hardware import Gpu
from wattcast.options.serving_options import Deployment
from wattcast.options.setting_options import MachineOptions
from wattcast.predictor.api import find_gpu
from wattcast.serving.arrivals import (
    Counts,
    Trace,
    draw_trace,
)
from wattcast.serving.deployment.expected_service import ExpectedService, measure_figures
from wattcast.serving.option_bounds import set_card
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.serving_result import ServingResult
from wattcast.serving.simulate_serving import (
    find_language_model,
    measure_model_interval,
    serve_trace,
)
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
from wattcast.workload.model_options import ModelOptions, count_positions

# What is compared: all that engines and cards report as means.
COMPARED = ("ttft_mean_s", "tpot_mean_s", "output_tokens_per_s", "power_w")
DRAWN_LENGTHS = 500  # of which the longest says what is tabulated
LONGER = 4  # times the planned lengths that the step costs are tabulated for
MOST_REQUESTS = 2000  # of a simulated run
LEAST_REQUESTS = 200
Figures = dict[str, float]


@dataclass(frozen=True)
class ServedTraffic:
    """The traffic of one engine: how fast requests come, and how long they are."""

    rate_per_s: float
    prompt_scale: float = 1.0  # of the planned lengths
    output_scale: float = 1.0
    arrivals: str = "poisson"
    requests: int = 500
    prefix_hit_rate: float = 0.0  # share of each prompt that is found in the cache


@dataclass(frozen=True)
class EngineChange:
    """How a replica differs from the one that was planned."""

    change_costs: Callable[[StepCosts], StepCosts] = lambda costs: costs
    change_settings: Callable[[EngineSettings], EngineSettings] = lambda settings: settings


AS_PLANNED = EngineChange()


class PromisedReplica:
    """The replica of a plan, with its step costs predicted anew."""

    def __init__(
        self,
        expected: ExpectedService,
        gpu: str | Path | Gpu | None = None,
    ) -> None:
        self.expected = expected
        self.gpu = find_gpu(gpu or expected.replica.gpu, None)

    @cached_property
    def shared(self) -> ModelOptions:
        """How the GPUs of an engine share the model, and in which formats it runs."""
        replica = self.expected.replica
        layout = {name: getattr(replica, name) for name in ("tp", "pp", "dp", "ep")}
        return ModelOptions.from_names(
            **replica.formats,
            **layout,
            stack="engine",
        )

    @property
    def machine(self) -> MachineOptions:
        """How its host and card were taken to differ from the usual ones."""
        replica = self.expected.replica
        return MachineOptions(replica.host_factor, replica.power_factor)

    @cached_property
    def costs(self) -> StepCosts:
        """Step costs at the planned clock and power limit."""
        replica = self.expected.replica
        spec = find_language_model(replica.model)
        trace = self._draw(1.0, 1.0, DRAWN_LENGTHS, 1)
        longest = LONGER * int((trace.prompt_tokens + trace.output_tokens).max())
        most = count_positions(spec)
        steps = StepRange(
            max_tokens=max(replica.max_batched_tokens, replica.max_seqs),
            longest_context=min(longest, most or longest),
            context_spread=trace.context_spread,
            max_seqs=max(2 * replica.max_seqs // self.shared.pp, 1),
        )
        table = tabulate_step_costs(
            spec,
            self.gpu,
            self.shared,
            steps,
            machine=self.machine,
        )
        return set_card(table, self.gpu, replica.clock_hz, replica.power_limit_w)

    @cached_property
    def model_interval(self) -> dict[str, tuple[float, float]]:
        """The predictor's interval of the mean decode step, as factors."""
        traffic = self.expected.traffic
        rate_per_s = traffic.rate_per_s / self.expected.replicas
        result = self._serve(ServedTraffic(rate_per_s, arrivals=traffic.arrivals), 1, AS_PLANNED)
        spec = find_language_model(self.expected.replica.model)
        return measure_model_interval(spec, self.gpu, self.shared, result, self.machine)

    def length_spread(self, kind: str) -> float:
        """Return the standard deviation of planned lengths of a kind, over their mean."""
        lengths = getattr(self._draw(1.0, 1.0, MOST_REQUESTS, 1), f"{kind}_tokens")
        return float(lengths.std() / lengths.mean())

    def simulate(
        self,
        traffic: ServedTraffic,
        seed: int,
        change: EngineChange = AS_PLANNED,
    ) -> Figures:
        """Return the figures of a replica under traffic."""
        figures = measure_figures(self._serve(traffic, seed, change))
        return {name: figures[name] for name in COMPARED}

    def _serve(
        self,
        traffic: ServedTraffic,
        seed: int,
        change: EngineChange,
    ) -> ServingResult:
        replica = self.expected.replica
        unit = self._draw(
            traffic.prompt_scale,
            traffic.output_scale,
            traffic.requests,
            seed,
            traffic.arrivals,
        )
        trace = replace(unit, arrival_s=unit.arrival_s / traffic.rate_per_s)
        most_tokens = max(replica.max_batched_tokens, replica.max_seqs)
        settings = EngineSettings(
            most_tokens, replica.max_seqs, prefix_hit_rate=traffic.prefix_hit_rate, seed=seed
        )
        costs = change.change_costs(self.costs)
        deployment = Deployment(
            replicas=replica.decode_engines,
            prefill_replicas=replica.prefill_engines,
        )
        return serve_trace(trace, costs, change.change_settings(settings), deployment)

    def _draw(
        self,
        prompt_scale: float,
        output_scale: float,
        requests: int,
        seed: int,
        arrivals: str = "",
    ) -> Trace:
        """Draw requests of the planned lengths, scaled, at one a second."""
        planned = self.expected.traffic
        trace = draw_trace(
            1.0,
            planned.prompt,
            planned.output,
            arrivals or planned.arrivals,
            seconds=0.0,
            requests=requests,
            seed=seed,
        )
        return replace(
            trace,
            prompt_tokens=scale_lengths(trace.prompt_tokens, prompt_scale),
            output_tokens=scale_lengths(trace.output_tokens, output_scale),
        )


def scale_lengths(tokens: Counts, scale: float) -> Counts:
    """Return lengths times a factor, one token at least.

    >>> scale_lengths(np.array([10, 1]), 0.5)
    array([5, 1])
    """
    if scale == 1.0:
        return tokens
    scaled: Counts = np.maximum(np.rint(tokens * scale), 1.0).astype(np.int64)
    return scaled
