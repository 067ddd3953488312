"""Say what a planned service is to do at each load: throughput, latencies, watts, with intervals.

A replica is simulated at several shares of its capacity, with several draws of the traffic. The
interval of a figure adds three independent parts in the logarithm:

    half² = serving² + model² + seeds²

``serving`` is how far traffic that was measured and never fitted lies from its simulation,
``model`` the predictor's own interval of the mean decode step on this card (latencies and power),
``seeds`` what another draw of arrivals and lengths changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from wattcast import __version__
from wattcast.core import bad_value, check_names
from wattcast.core.strict_files import (
    convert_plain,
    decode_json,
    read_bytes,
)
from wattcast.options.setting_options import MachineOptions
from wattcast.predictor.engine_host import ENGINE
from wattcast.predictor.machine_factors import find_machine_factors
from wattcast.predictor.prediction_json import take_fields
from wattcast.serving.option_runs import serve_rate
from wattcast.serving.plan_options import PlanOption
from wattcast.serving.plan_search import ServingPlan
from wattcast.serving.service_demand import ServiceDemand
from wattcast.serving.serving_intervals import INTERVALS
from wattcast.serving.serving_result import ServingResult, percentiles
from wattcast.serving.simulate_serving import measure_model_interval

LOAD_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # of what a replica serves within all bounds
SEEDS = 3
MEAN_REQUESTS = 20_000  # drawn for the mean lengths, so that chance moves them by less than 1 %
_NINE_IN_TEN = 1.645  # standard deviations to either side
FORM = 1  # of ``expected.json``; a file of another form is not read

Positive = Annotated[float, msgspec.Meta(gt=0.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]

# figure -> the serving interval, and the predictor's interval that goes into it
FIGURES = {
    "ttft_mean_s": ("ttft", "tpot_s"),
    "ttft_p50_s": ("ttft", "tpot_s"),
    "ttft_p90_s": ("ttft", "tpot_s"),
    "ttft_p99_s": ("ttft_tail", "tpot_s"),
    "tpot_mean_s": ("tpot", "tpot_s"),
    "tpot_p50_s": ("tpot", "tpot_s"),
    "tpot_p90_s": ("tpot", "tpot_s"),
    "tpot_p99_s": ("tpot_tail", "tpot_s"),
    "output_tokens_per_s": ("throughput", ""),
    "power_w": ("power", "power_w"),
    "energy_j_per_token": ("energy", "energy_j"),
}


@dataclass(frozen=True)
class ExpectedFigure:
    """A figure of one replica, and the interval that nine in ten runs lie in."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ExpectedLevel:
    """What a replica does at one rate."""

    rate_per_s: Positive
    load_share: float  # of what the replica serves within all bounds
    running: float  # mean sequences of a step
    waiting: float  # mean requests in the queue
    figures: dict[str, ExpectedFigure]


@dataclass(frozen=True)
class ExpectedReplica:
    """What a replica is made of, in the words of ``wattcast plan``."""

    model: str
    gpu: str
    engine: str
    gpus: Count
    tp: Count
    pp: Count
    dp: Count
    ep: Count
    prefill_engines: int
    decode_engines: Count
    max_seqs: Count
    max_batched_tokens: Count
    power_limit_w: Positive
    clock_hz: Positive
    formats: dict[str, Any]  # dtype, quantization, weights, kv_dtype, lora, adapters, sampling
    # of its hosts and cards, over the usual ones
    host_factor: Positive = 1.0
    power_factor: Positive = 1.0


@dataclass(frozen=True)
class ExpectedTraffic:
    """The requests that were planned for."""

    prompt: str | int
    output: str | int
    arrivals: str
    seed: int
    requests: Count  # simulated for each answer
    rate_per_s: Positive  # of all replicas
    mean_prompt_tokens: Positive
    mean_output_tokens: Positive


@dataclass(frozen=True)
class AdoptedFigure:
    """How a healthy service compared with its plan: the logarithm of measured over simulated."""

    log_ratio: float
    spread: float  # its standard deviation, by the traffic that happened to come


@dataclass(frozen=True)
class AdoptedService:
    """A service that was declared healthy; later ones are compared with it."""

    rate_per_s: Positive  # of an engine
    prompt_tokens: Positive
    output_tokens: Positive
    figures: dict[str, AdoptedFigure]


@dataclass(frozen=True)
class ExpectedService:
    """The content of ``expected.json``."""

    wattcast: str  # version
    replicas: Count
    replica: ExpectedReplica
    traffic: ExpectedTraffic
    capacity_per_replica_per_s: Positive
    bounds: tuple[str, ...]
    levels: Annotated[tuple[ExpectedLevel, ...], msgspec.Meta(min_length=1)]
    adopted: AdoptedService | None = None
    form: int = FORM


def expect_service(plan: ServingPlan, model: str | Path) -> ExpectedService:
    """Simulate a plan's replica at several loads and return what is expected of it."""
    demand = plan.demand
    capacity_per_s = plan.capacity_per_s
    planned = demand.rate_per_s / plan.replicas / capacity_per_s
    shares = sorted({*LOAD_SHARES, round(planned, 4)})
    levels = [expect_level(demand, plan.option, capacity_per_s, share) for share in shares]
    drawn = demand.draw_requests(MEAN_REQUESTS)
    traffic = ExpectedTraffic(
        prompt=demand.prompt,
        output=demand.output,
        arrivals=demand.arrivals,
        seed=demand.seed,
        requests=demand.requests,
        rate_per_s=demand.rate_per_s,
        mean_prompt_tokens=float(drawn.prompt_tokens.mean()),
        mean_output_tokens=float(drawn.output_tokens.mean()),
    )
    return ExpectedService(
        wattcast=__version__,
        replicas=plan.replicas,
        replica=_describe_replica(plan.option, model, demand.machine),
        traffic=traffic,
        capacity_per_replica_per_s=capacity_per_s,
        bounds=tuple(f"{bound} {bound.seconds:g} s" for bound in demand.bounds),
        levels=tuple(levels),
    )


def expect_level(
    demand: ServiceDemand,
    option: PlanOption,
    capacity_per_s: float,
    share: float,
) -> ExpectedLevel:
    """Return what a replica does at a share of its capacity."""
    rate_per_s = share * capacity_per_s
    results = simulate_rate(demand, option, rate_per_s)
    model = measure_model_interval(
        demand.model,
        option.gpu,
        option.shared,
        results[0],
        demand.machine,
    )
    rows = [measure_figures(result) for result in results]
    figures = {}
    for name, (serving, predicted) in FIGURES.items():
        values = np.array([row[name] for row in rows])
        ends = model.get(predicted, (1.0, 1.0))
        figures[name] = widen_figure(values, getattr(INTERVALS, serving), ends)
    summary = results[0].summarise()
    running = summary["batch"]["mean"] / max(summary["busy_share"], 1e-9)
    return ExpectedLevel(
        rate_per_s,
        share,
        running,
        summary["queue"]["mean"],
        figures,
    )


def simulate_rate(
    demand: ServiceDemand,
    option: PlanOption,
    rate_per_s: float,
    seeds: int = SEEDS,
) -> list[ServingResult]:
    """Simulate a replica at a rate with several draws of the traffic."""
    results = []
    for place in range(seeds):
        drawn = replace(demand, bounds=(), seed=demand.seed + place)
        result, _ = serve_rate(drawn, replace(option, most_per_s=math.inf), rate_per_s)
        assert result is not None, "without bounds a run goes to its end"
        results.append(result)
    return results


def measure_figures(result: ServingResult) -> dict[str, float]:
    """Return the figures of a simulated replica, those of its steady state where it has one."""
    figures: dict[str, float] = {}
    for name in ("ttft", "tpot"):
        ranks = percentiles(getattr(result, f"{name}_s"))
        for rank in ("mean", "p50", "p90", "p99"):
            figures[f"{name}_{rank}_s"] = ranks[rank]
    source = result.steady or result
    for name in ("output_tokens_per_s", "power_w", "energy_j_per_token"):
        figures[name] = float(getattr(source, name))
    return figures


def widen_figure(
    values: np.ndarray[Any, Any],
    serving: float,
    model: tuple[float, float],
) -> ExpectedFigure:
    """Return the mean of several draws with its interval.

    The half-widths of serving, of the predictor and of the draws are added as squares.

    >>> figure = widen_figure(np.array([1.0, 1.0]), 0.1, (0.9, 1.1))
    >>> round(figure.low, 3), round(figure.high, 3)
    (0.865, 1.148)
    """
    value = float(values.mean())
    if value <= 0.0:
        return ExpectedFigure(value, value, value)
    seeds = _NINE_IN_TEN * float(values.std()) / value
    low = math.exp(-math.hypot(serving, math.log(model[0]), seeds))
    high = math.exp(math.hypot(serving, math.log(model[1]), seeds))
    return ExpectedFigure(value, value * low, value * high)


def _describe_replica(
    option: PlanOption,
    model: str | Path,
    machine: MachineOptions,
) -> ExpectedReplica:
    """Return what a replica is made of."""
    factors = find_machine_factors(option.gpu.name, machine)
    names = ("dtype", "quantization", "weights", "kv_dtype", "lora", "adapters", "sampling")
    formats = {}
    for name, value in take_fields(option.shared, *names).items():
        if value is not None:
            formats[name] = value if isinstance(value, int) else str(value)
    return ExpectedReplica(
        model=str(model),
        gpu=option.gpu.name,
        engine=ENGINE,
        gpus=option.gpus,
        **take_fields(
            option.shared,
            "tp",
            "pp",
            "dp",
            "ep",
        ),
        prefill_engines=option.pools[0],
        decode_engines=option.pools[1],
        max_seqs=option.max_seqs,
        max_batched_tokens=option.settings.max_batched_tokens,
        power_limit_w=option.power_limit_w,
        clock_hz=option.clock_hz,
        formats=formats,
        host_factor=factors.host,
        power_factor=factors.power,
    )


def read_expected(path: Path) -> ExpectedService:
    """Read ``expected.json``; an error names the field that is wrong."""
    data = read_bytes(path)
    return parse_expected(data, path.name)


def parse_expected(data: bytes, where: str) -> ExpectedService:
    """Parse the content of ``expected.json``."""
    plain = decode_json(data, dict, where)
    if isinstance(plain, dict) and plain.get("form", FORM) != FORM:
        raise bad_value(f"{where}: form", f"form {FORM}, which this version writes", plain["form"])
    expected = convert_plain(plain, ExpectedService, where)
    for level in expected.levels:
        check_names(f"figure at {where}", FIGURES, level.figures)
    return expected


def find_level(levels: Sequence[ExpectedLevel], rate_per_s: float) -> ExpectedLevel:
    """Return the level whose rate is closest, as a ratio."""

    def distance(level: ExpectedLevel) -> float:
        return abs(math.log(level.rate_per_s / rate_per_s))

    return min(levels, key=distance)
