"""Say how many replicas of an engine keep a power budget, for a planner that scales them.

The watts of a replica are those of a simulated minute of its share of the traffic: the engine of
``wattcast simulate`` with step costs as predicted, at the card's own clocks, or under a power
limit.
``deploy/dynamo`` serves the answer to NVIDIA Dynamo's planner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from wattcast.control.rehearsal_coefficients import REHEARSAL
from wattcast.hardware import Gpu
from wattcast.serving.arrivals import draw_trace
from wattcast.serving.engine_simulator import EngineReplica
from wattcast.serving.request_plan import EngineSettings, plan_requests
from wattcast.serving.simulate_serving import find_language_model
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import StepRange, tabulate_step_costs
from wattcast.workload.model_options import ModelOptions, SoftwareStack

MINUTE_S = 60.0
MOST_REPLICAS = 4096
LONGEST_CONTEXT = 16384
LEAST_PER_S = REHEARSAL.planner_least_per_s
STEP_PER_S = REHEARSAL.planner_step


@dataclass(frozen=True)
class PlannedTraffic:
    """What a planner sees or predicts of all replicas together."""

    rate_per_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass
class ReplicaPower:
    """Predict the watts of a replica by its share of the traffic."""

    costs: StepCosts
    gpus: int  # of a replica
    _known: dict[tuple[int, int, int], float] = field(default_factory=dict)

    @classmethod
    def predict(
        cls,
        model: str,
        gpu: Gpu,
        tensor_parallel: int = 1,
    ) -> ReplicaPower:
        """Tabulate the steps of a model on a GPU."""
        options = ModelOptions.from_names(
            dtype="bf16",
            stack=SoftwareStack.ENGINE,
            tp=tensor_parallel,
        )
        steps = StepRange(longest_context=LONGEST_CONTEXT)
        costs = tabulate_step_costs(find_language_model(model), gpu, options, steps)
        return cls(costs, tensor_parallel)

    def predict_watts(self, traffic: PlannedTraffic) -> float:
        """Return the mean watts of all GPUs of one replica that serves this traffic alone."""
        level = _round_rate(traffic.rate_per_s)
        key = (level, traffic.prompt_tokens, traffic.output_tokens)
        if key not in self._known:
            self._known[key] = self._simulate_minute(STEP_PER_S**level, traffic)
        return self._known[key]

    def _simulate_minute(self, rate_per_s: float, traffic: PlannedTraffic) -> float:
        trace = draw_trace(
            rate_per_s,
            traffic.prompt_tokens,
            traffic.output_tokens,
            "poisson",
            MINUTE_S,
            None,
            1,
        )
        settings = EngineSettings()
        engine = EngineReplica(self.costs, settings, plan_requests(trace, settings))
        engine.submit(range(len(trace)))
        engine.run_until(MINUTE_S)
        return float(engine.spent_j) / MINUTE_S

    def count_most_replicas(
        self,
        traffic: PlannedTraffic,
        budget_w: float,
        proposed: int,
    ) -> tuple[int, float]:
        """Return the most replicas, at most as many as proposed, whose predicted watts keep the
        budget, and those watts; one replica is always left.
        """
        most = min(max(proposed, 1), MOST_REPLICAS)
        low, high = 1, most
        while low < high:  # more replicas idle more, so that watts rise with their number
            middle = (low + high + 1) // 2
            if self.sum_watts(traffic, middle) <= budget_w:
                low = middle
            else:
                high = middle - 1
        return low, self.sum_watts(traffic, low)

    def sum_watts(self, traffic: PlannedTraffic, replicas: int) -> float:
        """Return the predicted watts of so many replicas that share the traffic evenly."""
        share = PlannedTraffic(
            traffic.rate_per_s / replicas,
            traffic.prompt_tokens,
            traffic.output_tokens,
        )
        return replicas * self.predict_watts(share)


def _round_rate(rate_per_s: float) -> int:
    """Return the power of ``STEP_PER_S`` next above a rate."""
    return math.ceil(math.log(max(rate_per_s, LEAST_PER_S)) / math.log(STEP_PER_S))
