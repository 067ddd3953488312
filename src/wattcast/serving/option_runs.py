"""Simulate options of a plan: what a replica serves at most, and which bounds it keeps at a rate.

The same draw of arrivals, stretched in time, serves every rate and option.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.options.serving_options import Deployment
from wattcast.predictor.api import predict
from wattcast.predictor.support_distances import SupportWord
from wattcast.serving.arrivals import Trace
from wattcast.serving.engine_simulator import BoundsBroken, Patience
from wattcast.serving.latency_bounds import LatencyBound
from wattcast.serving.plan_coefficients import PLAN
from wattcast.serving.plan_options import PlanOption
from wattcast.serving.service_demand import PERCENTILE, ServiceDemand
from wattcast.serving.serving_result import ServingResult
from wattcast.serving.simulate_serving import serve_trace
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_options import WorkloadPhase

LONE_LOAD = 1e-3  # share of what a replica serves, at which requests never meet
_UNLIMITED_SHARE = 0.999  # of the default power limit, from which on nothing is limited


def saturate_option(demand: ServiceDemand, option: PlanOption) -> PlanOption:
    """Return an option that serves no more than a replica which never lacks requests.

    A margin is left for its queue.
    """
    costs = option.costs
    assert costs is not None
    lane = costs if costs.lanes == 1 else replace(costs, stages=1, lanes=1)
    max_seqs = max(option.max_seqs // costs.stages, 1)
    settings = replace(option.settings, max_seqs=max_seqs, seed=demand.seed)
    unit = demand.draw_requests(PLAN.waves * max_seqs)
    crowd = replace(unit, arrival_s=np.zeros(len(unit)))

    def serve_crowd(trace: Trace, carried: bool = False) -> float:
        done_s = np.sort(serve_trace(trace, lane, settings, carried=carried).last_token_s)
        most = int(PLAN.ended_share * len(done_s))
        return float(max(len(done_s) / done_s[-1], most / done_s[most - 1]))

    prefill, decode = option.pools
    if prefill:
        prompts = replace(crowd, output_tokens=np.ones(len(unit), dtype=np.int64))
        per_s = min(prefill * serve_crowd(prompts), decode * serve_crowd(crowd, carried=True))
    else:
        per_s = costs.lanes * serve_crowd(crowd)
    return replace(option, most_per_s=min(option.most_per_s, PLAN.busy_most * float(per_s)))


@dataclass(frozen=True)
class RateRun:
    """What one replica did at a rate."""

    result: ServingResult | None  # None: the run was given up, or is beyond what a replica serves
    broken: str  # the bounds that it broke
    requests: int = 0  # that were simulated
    most_running: int = 0  # requests that an engine computed at once
    largest_batch: int = 0  # sequences of the largest step of all engines

    def holds_for_limit(
        self,
        max_seqs: int,
        demand: ServiceDemand,
    ) -> bool:
        """Whether the run would have been the same if an engine computed ``max_seqs`` at most.

        It would if no engine ever computed more, and if the run was not made longer: how long a run
        is made depends on the limit.
        """
        return self.requests == demand.requests and self.most_running <= max_seqs


def serve_rate(
    demand: ServiceDemand,
    option: PlanOption,
    rate_per_s: float,
) -> tuple[ServingResult | None, str]:
    """Simulate one replica at a rate; return what it did and which bounds it broke."""
    run = run_at_rate(demand, option, rate_per_s)
    return run.result, run.broken


def run_at_rate(
    demand: ServiceDemand,
    option: PlanOption,
    rate_per_s: float,
    *,
    is_brief: bool = False,
) -> RateRun:
    """Simulate one replica at a rate.

    The run has so many requests that the first have ended long before the last arrive, or fill all
    steps; one that breaks a bound is made no longer. A brief run that is sure to break one ends
    there, without a result.
    """
    costs = option.costs
    assert costs is not None
    if rate_per_s > option.most_per_s * (1.0 + 1e-9):
        return RateRun(None, "throughput")
    prefill, decode = option.pools
    settings = replace(option.settings, seed=demand.seed)
    deployment = Deployment(replicas=decode, prefill_replicas=prefill)
    requests = demand.requests
    enough = PLAN.waves * option.max_seqs * costs.lanes * decode
    while True:
        unit = demand.draw_requests(requests)
        trace = replace(unit, arrival_s=unit.arrival_s / rate_per_s)
        try:
            result = serve_trace(
                trace,
                costs,
                settings,
                deployment,
                prices=demand.prices,
                patience=_measure_patience(demand.bounds, requests) if is_brief else None,
            )
        except BoundsBroken as given_up:
            return RateRun(None, "a latency", requests, given_up.most_running)
        late = [bound for bound in demand.bounds if bound.measure(result) > bound.seconds]
        is_long = trace.arrival_s[-1] >= PLAN.waves * float(result.latency_s.mean())
        if late or requests >= enough or is_long:
            most_running = max(run.most_running for run in result.runs)
            batches = [run.segments["decodes"] + run.segments["prompts"] for run in result.runs]
            largest_batch = int(max(batch.max() for batch in batches))
            broken = ", ".join(map(str, late))
            return RateRun(
                result,
                broken,
                requests,
                most_running,
                largest_batch,
            )
        requests = min(2 * requests, enough)


def _measure_patience(bounds: Sequence[LatencyBound], requests: int) -> Patience:
    """Return how many late requests break a bound for sure, of the strictest bound of each kind.

    The percentile X of n sorted values lies at the place (n - 1)·X or just above it, so it is late
    once all values from there on are.
    """
    limits: dict[str, tuple[float, int]] = {}
    for bound in bounds:
        place = math.floor((requests - 1) * (bound.percentile or PERCENTILE) / 100.0)
        limits.setdefault(bound.quantity, (bound.seconds, requests - place))
    never = (math.inf, requests + 1)
    first_token_s, late_firsts = limits.get("ttft", never)
    token_s, late_tokens = limits.get("tpot", never)
    return Patience(first_token_s, late_firsts, token_s, late_tokens)


def describe_risk(
    demand: ServiceDemand,
    option: PlanOption,
    result: ServingResult,
) -> str | None:
    """Say how far clock and power limit are from what was measured.

    None where they are the card's own.
    """
    chip = option.gpu
    is_capped = option.clock_hz < float(np.max(chip.clocks.max_hz))
    default_w = float(np.mean(chip.power.limit_w))
    is_limited = option.power_limit_w < _UNLIMITED_SHARE * default_w
    if not is_capped and not is_limited:
        return None
    batch = max(round(result.summarise()["batch"]["max"]), 1)
    context = max(int((result.trace.prompt_tokens + result.trace.output_tokens / 2).mean()), 1)
    step = replace(
        option.shared,
        phase=WorkloadPhase.DECODE,
        batch=batch,
        seq=context,
    )
    prediction = predict(
        build_graph(demand.model, step),
        chip,
        host_launch=0.0,
        clock=option.clock_hz if is_capped else None,
        power_limit=option.power_limit_w if is_limited else None,
    )
    support = prediction.support
    distances = [far for far in support.distances if far.dimension in ("clock", "power limit")]
    if distances:
        words = {far.word for far in distances}
        word = SupportWord.FAR if SupportWord.FAR in words else SupportWord.NEAR
        return f"{word} from what was measured: {'; '.join(far.reason for far in distances)}"
    if support.word is SupportWord.MEASURED:
        return None
    return f"{support.word}: nothing was measured at {option.setting}"


def find_ceiling(
    demand: ServiceDemand,
    option: PlanOption,
    low: float,
    high: float,
) -> tuple[float, str]:
    """Return the largest rate between two at which a replica keeps all bounds.

    The text says what breaks above; it is empty where no rate between them broke a bound.
    """
    binds = ""
    while high > PLAN.close_capacity * low:
        middle = math.sqrt(low * high)
        _, failed = serve_rate(demand, option, middle)
        if failed:
            high = middle
            binds = failed
        else:
            low = middle
    return low, binds
