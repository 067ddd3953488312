"""Metrics as vLLM, DCGM and a Prometheus server would have them, of an engine that is not the plan's.

The engine is a simulated one, but its step costs, its host and its power are not those that the plan
was made of: each table of its costs is off by an error of its own, as predictions are, and it has
other traffic. So a check cannot find what it put in itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from wattcast.serving.arrivals import draw_trace
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.serving_result import ServingResult
from wattcast.serving.simulate_serving import serve_trace
from wattcast.serving.step_costs import StepCosts

TABLES = ("tokens", "head", "decode", "prompt", "prompt_more", "prompt_slope")
# Errors of the ledger on held-out steps: decode 3 to 4 % in time and 2 to 3 % in watts, prompts 6 %,
# and hosts that differ by 0.7 to 1.5 (docs/method/serving.md).
TIME_ERROR = 0.05
POWER_ERROR = 0.03
HOST_ERROR = 0.15
TIME_EDGES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 40.0)
TOKEN_EDGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


def disturb_costs(costs: StepCosts, random: np.random.Generator) -> StepCosts:
    """Step costs that are off as predictions are, each table by its own error."""

    def error(size: float) -> float:
        return float(np.exp(size * random.standard_normal()))

    changed = {}
    for name in TABLES:
        seconds, joules = np.split(getattr(costs, name), 2, axis=-1)
        time = error(TIME_ERROR)
        changed[name] = np.concatenate(
            [seconds * time, joules * time * error(POWER_ERROR)], axis=-1
        )
    factor = error(HOST_ERROR)
    times = {
        item.name: getattr(costs.host, item.name) * factor
        for item in fields(costs.host)
        if item.name.startswith(("schedule", "launch_", "output", "admit"))
        and item.name.endswith("_s")
    }
    idle = error(POWER_ERROR)
    return replace(
        costs,
        **changed,
        host=replace(costs.host, **times),
        idle_w=costs.idle_w * idle,
        waiting_w=costs.waiting_w * idle,
    )


def slow_down(costs: StepCosts, factor: float) -> StepCosts:
    """A card all of whose kernels take longer, at the same power."""
    return replace(costs, **{name: getattr(costs, name) * factor for name in TABLES})


@dataclass(frozen=True)
class RunningService:
    """An engine that serves, as its own metrics see it."""

    costs: StepCosts
    max_seqs: int
    rate_per_s: float
    prompt: str = "1000"
    output: str = "200"
    clock_hz: float | None = None
    seconds: float = 600.0

    def serve(self, seed: int) -> ServingResult:
        trace = draw_trace(
            self.rate_per_s, self.prompt, self.output, seconds=self.seconds, seed=seed
        )
        settings = EngineSettings(8192, self.max_seqs, seed=seed + 7)
        return serve_trace(trace, self.costs, settings)

    def scrape_twice(self, seed: int) -> tuple[str, str]:
        """The metrics at the start of the traffic, and at the last arrival."""
        result = self.serve(seed)
        end_s = float(result.trace.arrival_s[-1])
        return self._write(result, 0.0), self._write(result, end_s)

    def _write(self, result: ServingResult, moment_s: float) -> str:
        """All metrics up to a moment."""
        labels = 'engine="0",model_name="m"'
        first = result.first_token_s <= moment_s
        ended = result.last_token_s <= moment_s
        several = ended & (result.trace.output_tokens > 1)
        name = "vllm:request_time_per_output_token_seconds"
        lines = [
            *write_histogram(
                "vllm:time_to_first_token_seconds", result.ttft_s[first], TIME_EDGES, labels
            ),
            *write_histogram(name, result.tpot_s[several], TIME_EDGES, labels),
            *write_histogram(
                "vllm:request_prompt_tokens",
                result.trace.prompt_tokens[ended],
                TOKEN_EDGES,
                labels,
            ),
            *write_histogram(
                "vllm:request_generation_tokens",
                result.trace.output_tokens[ended],
                TOKEN_EDGES,
                labels,
            ),
            f"vllm:num_requests_running{{{labels}}} 3.0",
            f"vllm:num_requests_waiting{{{labels}}} 0.0",
            f"vllm:num_preemptions_total{{{labels}}} {result.preemptions}",
        ]
        joules = float(result.energy_until(np.array([moment_s]))[0]) / result.gpu_count
        for gpu in range(result.gpu_count):
            card = f'gpu="{gpu}"'
            millijoules = 1e3 * (joules + 5e5)
            lines.append(f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{card}}} {millijoules:.0f}")
            if self.clock_hz is not None:
                lines.append(f"DCGM_FI_DEV_SM_CLOCK{{{card}}} {self.clock_hz / 1e6:.0f}")
        return "\n".join(lines) + "\n"


def write_histogram(
    name: str, values: np.ndarray, edges: tuple[float, ...], labels: str
) -> list[str]:
    """A histogram in Prometheus' text format."""
    lines = [f"# TYPE {name} histogram"]
    for edge in edges:
        count = int((values <= edge).sum())
        lines.append(f'{name}_bucket{{{labels},le="{edge}"}} {count}')
    lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {len(values)}')
    lines.append(f"{name}_count{{{labels}}} {len(values)}")
    lines.append(f"{name}_sum{{{labels}}} {float(np.sum(values))}")
    return lines


Spoil = Callable[[StepCosts], StepCosts]
