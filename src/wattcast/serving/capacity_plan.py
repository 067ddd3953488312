"""Plan how many GPUs serve a language model under traffic: screened by arithmetic, decided by simulation.

An option is a kind of GPU, how the GPUs of a replica share the model (``tp``, ``pp``, ``ep``), a power limit and,
where time per output token is bounded, the sequences of a step. Its plan has the fewest replicas n at which a
simulated replica meets every latency bound at λ·(1 + headroom) / n; energy, power and percentiles are those at λ / n.
The same draw of arrivals, stretched in time, serves every rate and every option.

Each option has a bound that it cannot beat: requests a second and joules of a request if every step were as full as
it can be. The first bound takes one prediction, the largest step; the second all step costs. The option with the best
bound comes next, gets its second bound or is simulated, until no bound is better than the best plans found. So no
option that was left out can be better than the plan returned.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from rich.markup import escape

from wattcast import __version__
from wattcast.core import units
from wattcast.core.arrays import pareto_front
from wattcast.core.errors import BadInput, WattcastError, bad_value, unknown_name
from wattcast.hardware import Gpu
from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.hardware.gpu import Fabric
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle.support_widening import learned_distances
from wattcast.predictor.prices import PriceKeywords, Prices, parse_prices
from wattcast.predictor.uncertainty import SupportWord
from wattcast.report.figure_style import SERIES_COLOURS, add_caption, new_figure
from wattcast.report.text_tables import print_notes, print_rows
from wattcast.serving.arrivals import Trace, draw_trace
from wattcast.serving.engine_simulator import EngineSettings
from wattcast.serving.serving_result import LatencyBound, ServingResult, parse_latency_bounds
from wattcast.serving.simulate_serving import serve_trace
from wattcast.serving.step_costs import StepCosts, predict_token_cost, tabulate_step_costs
from wattcast.workload.model_catalogue import ModelKind, ModelSpec
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import load_workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

TENSOR_PARALLEL = (1, 2, 4, 8)
LIMIT_SHARES = (1.0, 0.85, 0.7, 0.55)  # of the default power limit
PERCENTILE = 90.0  # of a latency bound that names none
MOST_SEQUENCES = (256, 128, 64, 32)
PIPELINE_STAGES = (2, 3, 4, 6, 8)
MOST_NODES = 4  # of one replica
REQUESTS = 500  # simulated for each answer
RUNNERS_UP = 3  # plans that are wanted besides the best
LIMIT_STEP_W = 5.0
CLOSE_CAPACITY = 1.03  # the rate at which a replica fails over the rate at which it does not
BUSY_MOST = 0.97  # of what a replica serves that never lacks requests: beyond, queues grow without a bound
WAVES = 4  # requests of a run over those that fill a step
BOUND_SLACK = 0.98  # a simulated replica may be this much better than the bound of its steps, by padding and rounding


class PlanAim(StrEnum):
    """What the plan has least of; energy decides between equals."""

    GPUS = "gpus"
    ENERGY = "energy"
    COST = "cost"
    CARBON = "carbon"


@dataclass(frozen=True)
class ServiceDemand:
    """What is to be served."""

    model: ModelSpec
    rate_per_s: float
    prompt: str | int
    output: str | int
    bounds: tuple[LatencyBound, ...] = ()
    headroom: float = 0.0
    spare_replicas: int = 0  # that may be down while all bounds hold
    site_power_w: float = math.inf  # mean power of all GPUs, at most
    arrivals: str = "poisson"
    options: ModelOptions = field(default_factory=ModelOptions)
    seed: int = 1
    requests: int = REQUESTS  # simulated for each answer

    def draw(self, requests: int = 0) -> Trace:
        """Draw requests at one a second; another rate stretches the same arrivals."""
        return draw_trace(1.0, self.prompt, self.output, self.arrivals, 0.0, requests or self.requests, self.seed)


@dataclass(frozen=True)
class PlanOption:
    """One way to serve: a replica and its limits, with the bounds that arithmetic gives it."""

    gpu: Gpu
    shared: ModelOptions  # how its GPUs share the model
    power_limit_w: float
    max_seqs: int  # a step may hold
    most_per_s: float  # requests a second of a replica, at the very most
    least_j: float  # joules of a request on all GPUs of a replica, at the very least
    costs: StepCosts | None = None  # None: the bounds are those of the largest step

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.shared.gpu_count

    @property
    def layout(self) -> str:
        """Say how the GPUs of a replica share the model: ``tp 8 x pp 2, ep 8``."""
        own = self.shared
        words = [
            f"{name} {getattr(own, name)}" for name in ("tp", "pp", "dp") if name == "tp" or getattr(own, name) > 1
        ]
        return " x ".join(words) + (f", ep {own.ep}" if own.ep > 1 else "")

    def __str__(self) -> str:
        return f"{self.gpu.name}, {self.layout}, {self.power_limit_w:.0f} W"


@dataclass(frozen=True, eq=False)
class ServingPlan:
    """A number of replicas of an option, and what a simulation says of each."""

    option: PlanOption
    replicas: int
    held_per_s: float  # requests a second that one replica was seen to serve within all bounds
    result: ServingResult  # of one replica at its share of the rate
    demand: ServiceDemand
    prices: Prices
    failed_per_s: float = math.inf  # that one replica was seen to fail at
    failed: str = ""

    @cached_property
    def _ceiling(self) -> tuple[float, str]:
        """The largest rate that one replica serves within all bounds, and what breaks above."""
        low, high, binds = self.held_per_s, min(self.failed_per_s, self.option.most_per_s), self.failed
        while high > CLOSE_CAPACITY * low:
            middle = math.sqrt(low * high)
            _, failed = _serve(self.demand, self.option, middle, self.prices)
            low, high, binds = (low, middle, failed) if failed else (middle, high, binds)
        return low, binds or "throughput"

    @property
    def capacity_per_s(self) -> float:
        """Requests a second that one replica serves within all bounds."""
        return self._ceiling[0]

    @property
    def binds(self) -> str:
        """What breaks first if the rate grows."""
        idle = self.replicas == 1 and self.demand.rate_per_s < 0.3 * self.capacity_per_s
        return "nothing: one replica is more than enough" if idle else self._ceiling[1]

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.option.gpus

    @property
    def power_w(self) -> float:
        """Mean power of all GPUs over the simulated run."""
        return self.result.power_w * self.replicas

    @property
    def energy_j_per_request(self) -> float:
        """Joules of a request on all GPUs of its replica, idle time included."""
        return self.result.energy_j / self.result.requests

    @property
    def energy_j_per_token(self) -> float:
        """Joules of an output token."""
        return self.result.energy_j_per_token

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of all replicas in a second."""
        return self.demand.rate_per_s * float(self.result.trace.output_tokens.mean())

    def row(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        seconds = 1.0 / self.demand.rate_per_s
        cost = self.prices.cost(self.option.gpu.name, self.energy_j_per_request, self.gpus * seconds)
        carbon = self.prices.carbon_g(self.energy_j_per_request)
        million = 1e6 / (self.output_tokens_per_s * seconds)
        found = self.result.summarise()
        return {
            "gpu": self.option.gpu.name,
            "gpus": self.gpus,
            "replicas": self.replicas,
            "layout": self.option.layout,
            **{name: getattr(self.option.shared, name) for name in ("tp", "pp", "dp", "ep")},
            "power_limit_w": self.option.power_limit_w,
            "max_seqs": self.option.max_seqs,
            "rate_per_replica_per_s": self.demand.rate_per_s / self.replicas,
            "capacity_per_replica_per_s": self.capacity_per_s,
            "load_share": self.demand.rate_per_s / self.replicas / self.capacity_per_s,
            "ttft_s": found["ttft_s"],
            "tpot_s": found["tpot_s"],
            "output_tokens_per_s": self.output_tokens_per_s,
            "power_w": self.power_w,
            "energy_j_per_token": self.energy_j_per_token,
            "energy_j_per_request": self.energy_j_per_request,
            "cost_per_request": cost,
            "cost_per_million_tokens": None if cost is None else cost * million,
            "carbon_g_per_request": carbon,
            "carbon_g_per_million_tokens": None if carbon is None else carbon * million,
            "binds": self.binds,
            "risk": _risk(self.option),
        }


@dataclass(frozen=True)
class PlanResult:
    """The best plan, all others that were simulated, and why some GPUs cannot serve."""

    demand: ServiceDemand
    aim: PlanAim
    plans: tuple[ServingPlan, ...]  # best first
    refused: tuple[str, ...]
    screened: int  # options that arithmetic left out
    prices: Prices

    @property
    def best(self) -> ServingPlan:
        """The plan that has least of what was asked."""
        return self.plans[0]

    @property
    def front(self) -> tuple[ServingPlan, ...]:
        """Plans that no other beats in GPUs and energy both."""
        pairs = np.array([(plan.gpus, plan.energy_j_per_token) for plan in self.plans])
        return tuple(self.plans[i] for i in pareto_front(pairs))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, as ``--json`` prints it."""
        return {
            "wattcast": __version__,
            "model": self.demand.model.name,
            "rate_per_s": self.demand.rate_per_s,
            "prompt": self.demand.prompt,
            "output": self.demand.output,
            "minimise": str(self.aim),
            "currency": self.prices.currency or None,
            "best": self.best.row(),
            "plans": [plan.row() for plan in self.plans],
            "pareto": [plan.row() for plan in self.front],
            "refused": list(self.refused),
            "assumptions": list_plan_notes(self),
        }


def plan(
    model: str | Path | ModelSpec,
    gpu: str | Sequence[str | Path | Gpu],
    *,
    rate: str | float,
    prompt: str | int = 512,
    output: str | int = 128,
    ttft: str | float | None = None,
    tpot: str | float | None = None,
    minimise: str = "gpus",
    tp: Sequence[int] = TENSOR_PARALLEL,
    pp: Sequence[int] = (),
    ep: Sequence[int] = (),
    power_limits: Sequence[str | float] = (),
    headroom: str | float = 0.1,
    spare_replicas: int = 0,
    site_power: str | float | None = None,
    arrivals: str = "poisson",
    dtype: str = "bf16",
    quantization: str | None = None,
    kv_dtype: str | None = None,
    weights: str | None = None,
    seed: int = 1,
    requests: int = REQUESTS,
    **prices: Unpack[PriceKeywords],
) -> PlanResult:
    """Plan a service: ``rate`` such as ``20/s``, lengths as ``simulate`` takes them, latencies as ``p99:500ms``.

    The best of every kind of GPU, replicas of 1 to 8 GPUs as far as a node has them, power limits and batch limits is
    found for ``minimise``: gpus, energy, cost or carbon. The fewest GPUs are sought at the card's default limit.
    Pipeline stages (``pp``) are tried where a model does not fit into a node or its GPUs are joined by PCIe alone,
    and whole experts on each GPU (``ep``; more than ``tp``: data-parallel engines share them) beside shared ones. A
    latency without a percentile is that of 9 in 10 requests. ``requests`` are simulated for each answer.
    """
    spec = model if isinstance(model, ModelSpec) else load_workload.find_model(model)
    if spec is None or spec.kind is not ModelKind.LANGUAGE:
        raise bad_value("model", "a language model", str(model), "`wattcast models` lists them.")
    if minimise not in list(PlanAim):
        raise unknown_name("objective", minimise, list(PlanAim), f"Known: {', '.join(PlanAim)}.")
    demand = ServiceDemand(
        spec,
        units.parse_amount(rate, "/s", "rate", inclusive=False),
        prompt,
        output,
        (*parse_latency_bounds("ttft", ttft, PERCENTILE), *parse_latency_bounds("tpot", tpot, PERCENTILE)),
        units.parse_amount(headroom, "", "headroom"),
        spare_replicas,
        math.inf if site_power is None else units.parse_amount(site_power, "W", "site_power", inclusive=False),
        arrivals,
        ModelOptions.from_names(
            dtype=dtype, quantization=quantization, kv_dtype=kv_dtype, weights=weights, stack="engine"
        ),
        seed,
        requests,
    )
    if spare_replicas < 0:
        raise bad_value("spare_replicas", "zero or more", spare_replicas)
    chips = [find_gpu(name) for name in (gpu.split(",") if isinstance(gpu, str) else gpu)]
    aim, money = PlanAim(minimise), parse_prices(**prices)
    if aim is PlanAim.COST and all(money.cost(chip.name, 1.0, 1.0) is None for chip in chips):
        raise bad_value("minimise", "a price to know the cost from", "none", "Give --price or --electricity.")
    if aim is PlanAim.CARBON and money.carbon_g(1.0) is None:
        raise bad_value("minimise", "a carbon intensity", "none", "Give --carbon.")
    limits_w = [units.parse_amount(w, "W", "power_limit", inclusive=False) for w in power_limits]
    return _search(demand, chips, aim, money, (tuple(tp), tuple(pp), tuple(ep)), limits_w)


def _search(
    demand: ServiceDemand,
    chips: Sequence[Gpu],
    aim: PlanAim,
    prices: Prices,
    sizes: tuple[tuple[int, ...], ...],
    limits_w: Sequence[float],
) -> PlanResult:
    """Simulate options in the order of their bounds until none can be better than the best."""
    refused: list[str] = []
    queue: list[tuple[tuple[float, float], int, PlanOption]] = []
    tables: dict[tuple[str, ModelOptions], StepCosts | str] = {}
    best: dict[tuple[str, ModelOptions, float], ServingPlan] = {}  # of each option, whichever its batch limit
    number = 0
    for chip in chips:
        own = _default_limits(chip)
        found, why = _list_options(demand, chip, sizes, limits_w or (own[:1] if aim is PlanAim.GPUS else own))
        refused += why
        queue += [(_bound(demand, option, aim, prices), number + place, option) for place, option in enumerate(found)]
        number += len(found)
    heapq.heapify(queue)
    while queue:
        bound, place, option = queue[0]
        ranks = sorted(_rank(made, aim) for made in best.values())
        most = ranks[RUNNERS_UP] if len(ranks) > RUNNERS_UP else (math.inf, math.inf)
        if bound > most:
            break
        heapq.heappop(queue)
        if option.costs is None:
            refined = _tabulate(demand, option, tables)
            if isinstance(refined, str):
                refused.append(refined)
            else:
                heapq.heappush(queue, (_bound(demand, refined, aim, prices), place, refined))
            continue
        key = (option.gpu.name, option.shared, option.power_limit_w)
        made = _size(demand, option, prices, aim, min(most, _rank(best[key], aim)) if key in best else most)
        if isinstance(made, str):
            refused.append(made)
        elif made is not None and (key not in best or _rank(made, aim) < _rank(best[key], aim)):
            best[key] = made
    same = r"(tp|pp|dp|ep) \d+( x |, )?|[\d.]+ (GB|W)|\d+ tokens|(the|each) "
    refused = list({re.sub(same, "", text): text for text in refused}.values())  # of replicas of the most GPUs
    if not best:
        raise BadInput("this cannot be served as asked. " + " ".join(refused))
    plans = sorted(best.values(), key=lambda made: _rank(made, aim))
    return PlanResult(demand, aim, tuple(plans), tuple(refused), len(queue), prices)


def _list_options(
    demand: ServiceDemand, chip: Gpu, sizes: tuple[tuple[int, ...], ...], limits_w: Sequence[float]
) -> tuple[list[PlanOption], list[str]]:
    """Return every option of a GPU with its first bounds, and a sentence for each replica that cannot be."""
    trace = demand.draw()
    tokens = float(trace.prompt_tokens.mean() + trace.output_tokens.mean()) - 1.0
    batches = MOST_SEQUENCES if any(bound.quantity == "tpot" for bound in demand.bounds) else MOST_SEQUENCES[:1]
    found: list[PlanOption] = []
    refused: list[str] = []
    for shared in _list_layouts(demand, chip, sizes, found):
        option = PlanOption(chip, shared, 0.0, 0, 0.0, 0.0)
        try:
            second, joule = predict_token_cost(demand.model, chip, shared)
        except WattcastError as error:
            if shared.pp == 1 or sizes[1] or not isinstance(error, BadInput):  # stages would not mend it
                refused.append(f"{chip.name}, {option.layout}: {str(error).rstrip('.')}.")
            continue
        per_s = shared.pp * shared.dp / (BOUND_SLACK * second * tokens)
        least_j = BOUND_SLACK * joule * tokens * shared.tp
        found += [PlanOption(chip, shared, watts, most, per_s, least_j) for watts in limits_w for most in batches]
    return found, refused


def _list_layouts(
    demand: ServiceDemand, chip: Gpu, sizes: tuple[tuple[int, ...], ...], found: Sequence[PlanOption]
) -> Iterator[ModelOptions]:
    """Yield how GPUs may share the model; what crosses nodes only while ``found`` has nothing that stays inside."""
    tp, pp, ep = sizes
    node = chip.node or node_of_gpu(chip.name)
    experts = getattr(demand.model.dims, "experts", 0)
    most = node.gpu_count
    loose = node.fabric in (Fabric.PCIE, Fabric.BRIDGE)
    for stages in pp or (1, *PIPELINE_STAGES):
        if stages > 1 and not pp:
            if found and not loose:
                return
            most = node.gpu_count * (1 if found else MOST_NODES)
        for count in tp:
            groups = {1, count, *(tp if count == 1 and stages == 1 else ())}
            if count == 1 and most > node.gpu_count:  # engines in several nodes share the experts
                groups.add(stages * node.gpu_count)
            for share in ep or (sorted(groups) if experts else (1,)):
                dp = max(share // count, 1)
                deep = 1 if dp > 1 and not pp else stages
                if count <= node.gpu_count and count * deep * dp <= most and experts % share == 0:
                    yield replace(demand.options, tp=count, pp=deep, dp=dp, ep=share)


def _tabulate(
    demand: ServiceDemand, option: PlanOption, tables: dict[tuple[str, ModelOptions], StepCosts | str]
) -> PlanOption | str:
    """Return an option with its step costs and the bounds that follow; a sentence says why there are none."""
    key, chip = (option.gpu.name, option.shared), option.gpu
    trace = demand.draw()
    if key not in tables:
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        try:
            costs = tabulate_step_costs(
                *(demand.model, chip, option.shared),
                max_seqs=max(MOST_SEQUENCES[0] // option.shared.pp, 1),
                longest_context=longest,
                context_spread=trace.context_spread,
            )
            tables[key] = costs
            if costs.cache_tokens < longest:
                words = f"{chip.name}, {option.layout}: the cache holds"
                tables[key] = f"{words} {costs.cache_tokens} tokens, a request {longest}."
        except WattcastError as error:
            tables[key] = f"{chip.name}, {option.layout}: {str(error).rstrip('.')}."
    table = tables[key]
    if isinstance(table, str):
        return table
    governor = table.limit_w / float(np.mean(chip.power.limit_w))  # the governor holds a share of the limit
    lengths = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    per_s, joules = _step_bounds(table, max(option.max_seqs // table.stages, 1), *lengths)
    seconds_idle = float(trace.arrival_s[-1]) / len(trace) / demand.rate_per_s
    idle_j = BOUND_SLACK * _count_replicas(demand, per_s * table.lanes) * option.gpus * table.idle_w * seconds_idle
    return replace(
        option,
        costs=replace(table, limit_w=option.power_limit_w * governor),
        most_per_s=per_s * table.lanes,
        least_j=max(joules * table.gpu_count, idle_j),
    )


def _default_limits(chip: Gpu) -> list[float]:
    """Return power limits the card can be set to, in whole steps of its range."""
    top = float(np.mean(chip.power.limit_w))
    least = float(np.mean(chip.power.min_limit_w)) if chip.power.min_limit_w is not None else top
    shares = [round(top * share / LIMIT_STEP_W) * LIMIT_STEP_W for share in LIMIT_SHARES]
    return [watts for watts in shares if watts >= least] or [top]


def _step_bounds(costs: StepCosts, seqs: int, prompt: float, output: float) -> tuple[float, float]:
    """Return the most requests a second of a lane, and the least joules of a request on one of its GPUs.

    A step over T tokens costs at least a + b·T, where b is a token's cost in the largest step. A request has P prompt
    tokens and takes part in O - 1 decode steps, each shared by B sequences at most, so it costs at least
    a·(O - 1)/B + b·(P + O - 1) and its own attention.
    """
    sizes = np.arange(1, len(costs.tokens))[:, np.newaxis]
    per_token = costs.tokens[-1] / sizes[-1]
    per_step = np.maximum((costs.tokens[1:] - per_token * sizes).min(axis=0), 0.0)
    context = prompt + output / 2.0
    most = max(min(seqs, int(costs.cache_tokens / max(prompt, 1.0))), 1)
    own = costs.prompt[min(max(round(prompt), 1), len(costs.prompt) - 1)]
    alone = [costs.decode_cost(b, b, context) - costs.tokens[costs.padded[b]] for b in (1, most)]
    attention = np.minimum(alone[0], alone[1] / most)
    taken = (
        own + per_token * (prompt + output - 1.0) + (output - 1.0) * (per_step / most + np.maximum(attention, 0.0))
    )
    seconds, joules = float(taken[: costs.clocks].min()), float(taken[costs.clocks :].min())
    return 1.0 / (BOUND_SLACK * seconds), BOUND_SLACK * joules


def _count_replicas(demand: ServiceDemand, capacity_per_s: float) -> int:
    needed = demand.rate_per_s * (1.0 + demand.headroom) / capacity_per_s
    return max(math.ceil(needed - 1e-9), 1) + demand.spare_replicas


def _bound(demand: ServiceDemand, option: PlanOption, aim: PlanAim, prices: Prices) -> tuple[float, float]:
    """Return a rank that no plan of this option can beat."""
    gpus = _count_replicas(demand, option.most_per_s) * option.gpus
    return _score(demand, option.gpu.name, gpus, option.least_j, aim, prices)


def _rank(plan: ServingPlan, aim: PlanAim) -> tuple[float, float]:
    return _score(plan.demand, plan.option.gpu.name, plan.gpus, plan.energy_j_per_request, aim, plan.prices)


def _score(
    demand: ServiceDemand, gpu: str, gpus: int, joules: float, aim: PlanAim, prices: Prices
) -> tuple[float, float]:
    """Return what is minimised first and what decides between equals."""
    if aim is PlanAim.GPUS:
        return float(gpus), joules
    if aim is PlanAim.COST:
        cost = prices.cost(gpu, joules, gpus / demand.rate_per_s)
        return (math.inf if cost is None else cost), joules
    return joules, float(gpus)  # carbon is energy times one number


def _saturate(demand: ServiceDemand, option: PlanOption) -> PlanOption:
    """Return an option that serves no more than a replica which never lacks requests, less a margin for its queue."""
    assert option.costs is not None
    seqs = max(option.max_seqs // option.costs.stages, 1)
    unit = demand.draw(WAVES * seqs)
    settings = EngineSettings(max_seqs=seqs, seed=demand.seed)
    crowd = replace(unit, arrival_s=np.zeros(len(unit)))
    lane = option.costs if option.costs.lanes == 1 else replace(option.costs, stages=1, lanes=1)
    done_s = np.sort(serve_trace(crowd, lane, settings).last_token_s)
    most = int(0.9 * len(unit))  # the last ones run in steps that are no longer full
    per_s = BUSY_MOST * option.costs.lanes * max(len(unit) / done_s[-1], most / done_s[most - 1])
    return replace(option, most_per_s=min(option.most_per_s, float(per_s)))


def _serve(
    demand: ServiceDemand, option: PlanOption, rate_per_s: float, prices: Prices
) -> tuple[ServingResult | None, str]:
    """Simulate one replica at a rate; return what it did and which bounds it broke.

    The run has so many requests that the first have ended long before the last arrive, or fill all steps.
    """
    assert option.costs is not None
    if rate_per_s > option.most_per_s * (1.0 + 1e-9):
        return None, "throughput"
    requests, enough = demand.requests, WAVES * option.max_seqs * option.costs.lanes
    settings = EngineSettings(max_seqs=option.max_seqs, seed=demand.seed)
    while True:
        unit = demand.draw(requests)
        trace = replace(unit, arrival_s=unit.arrival_s / rate_per_s)
        result = serve_trace(trace, option.costs, settings, prices=prices)
        if requests >= enough or trace.arrival_s[-1] >= WAVES * float(result.latency_s.mean()):
            break
        requests = min(2 * requests, enough)
    late = [bound for bound in demand.bounds if bound.measure(result) > bound.seconds]
    return result, ", ".join(map(str, late))


def _size(
    demand: ServiceDemand, option: PlanOption, prices: Prices, aim: PlanAim, most: tuple[float, float]
) -> ServingPlan | str | None:
    """Find the fewest replicas that keep all bounds; None where a plan would rank behind ``most``.

    A sentence says why no number of replicas does.
    """
    spare, peak_per_s = demand.spare_replicas, demand.rate_per_s * (1.0 + demand.headroom)
    option = _saturate(demand, option)

    def is_beaten(needed: int) -> bool:
        gpus = (needed + spare) * option.gpus
        return _score(demand, option.gpu.name, gpus, option.least_j, aim, prices) > most

    def attempt(needed: int) -> ServingPlan | str:
        result, failed = _serve(demand, option, peak_per_s / needed, prices)
        share_per_s = demand.rate_per_s / (needed + spare)
        if not failed and share_per_s != peak_per_s / needed:
            result, failed = _serve(demand, option, share_per_s, prices)
        if failed or result is None:
            return failed
        return ServingPlan(option, needed + spare, peak_per_s / needed, result, demand, prices)

    low = _count_replicas(demand, option.most_per_s) - spare - 1  # too few
    needed, failed, made = low + 1, "", None
    while made is None or needed - low > max(1, low // 100):
        if made is not None:
            needed = (low + needed) // 2
        while needed > low + 1 and is_beaten(needed):
            needed -= 1
        if is_beaten(needed):
            return None
        tried = attempt(needed)
        if not isinstance(tried, str):
            made = tried
            continue
        if not failed:
            alone = _serve(demand, option, 1e-3 * option.most_per_s, prices)[1]
            if alone:
                return f"{option}: {alone} cannot be met even by a single request."
        low, failed = needed, tried
        needed = made.replicas - spare if made is not None else max(needed + 1, math.ceil(1.4 * needed))
    made = replace(made, failed_per_s=peak_per_s / low if failed else math.inf, failed=failed)
    if made.power_w > demand.site_power_w:
        return f"{option}: {units.show(made.power_w, 'W')} is over the site's {units.show(demand.site_power_w, 'W')}."
    return made


def _risk(option: PlanOption) -> str | None:
    default_w = float(np.mean(option.gpu.power.limit_w))
    if option.power_limit_w >= default_w * 0.999:
        return None
    far = np.log2(default_w / option.power_limit_w) > learned_distances().conditions["power limit"].near
    word = SupportWord.FAR if far else SupportWord.NEAR
    return f"{word}: below the default {default_w:.0f} W, where nothing was measured"


def list_plan_notes(result: PlanResult) -> list[str]:
    """List what a plan assumes, beginning with its own model."""
    demand = result.demand
    own = [
        f"planned for {1.0 + demand.headroom:.0%} of the rate; {demand.spare_replicas} replicas to spare",
        f"{demand.arrivals} arrivals, {demand.requests} requests simulated for each answer; shared at random",
        "bounds without a percentile hold for 9 in 10 requests",
        "idle GPUs keep their clock; energy per token counts prompts and idle time, over output tokens",
        f"{result.screened} more options cannot be better, by arithmetic",
    ]
    notes = [*own, *result.best.result.assumptions, *result.prices.notes]
    return list(dict.fromkeys(notes))


def print_plan(console: Console, result: PlanResult) -> None:
    """Print the best plan in a sentence, then what it gives, the runners-up, and what binds."""
    best, demand = result.best.row(), result.demand
    risk = f" ([yellow]{best['risk']}[/yellow])" if best["risk"] else ""
    console.print(
        f"[bold]{escape(demand.model.name)}[/bold] at {demand.rate_per_s:g} requests/s, "
        f"{demand.prompt} + {demand.output} tokens: [bold]{best['gpus']} x {escape(best['gpu'])}[/bold] "
        f"({best['replicas']} x {best['layout']}), power limit {best['power_limit_w']:.0f} W{risk}, "
        f"at most {best['max_seqs']} sequences",
        highlight=False,
    )
    money = result.prices.currency or "cost"
    cost = best["cost_per_million_tokens"]
    console.print(
        f"{best['output_tokens_per_s']:.4g} output tokens/s, {units.show(best['power_w'], 'W')} in all, "
        f"{best['energy_j_per_token']:.3g} J/token"
        + (f", {cost:.3g} {money} a million output tokens" if cost is not None else "")
        + f"; {best['load_share']:.0%} of what they carry; binds: {best['binds']}",
        highlight=False,
    )
    columns = {
        "gpu": "gpu", "gpus": "GPUs", "layout": "replica", "power_limit_w": "limit", "max_seqs": "most seqs",
        "load_share": "load", "ttft_p50_s": "TTFT p50", "ttft_p99_s": "p99", "tpot_p50_s": "TPOT p50",
        "tpot_p99_s": "p99", "power_w": "power", "energy_j_per_token": "J/token",
        "cost_per_million_tokens": f"{money}/M tokens", "carbon_g_per_million_tokens": "g CO2e/M tokens",
        "binds": "binds",
    }  # fmt: skip
    shown = list(dict.fromkeys([*result.plans[:6], *result.front]))
    rows = []
    for plan_made in shown:
        row = plan_made.row()
        for name in ("ttft", "tpot"):
            row |= {f"{name}_{key}_s": row[f"{name}_s"][key] for key in ("p50", "p99")}
        rows.append(row)
    print_rows(console, rows, columns, "Plans, best first, and the Pareto front of GPUs and energy")
    for sentence in result.refused[:6]:
        console.print(escape(sentence), highlight=False)
    print_notes(console, list_plan_notes(result))


def draw_plan(result: PlanResult) -> Figure:
    """Draw every simulated plan by GPUs and joules per output token, with the Pareto front and the best."""
    figure = new_figure(8.0, 4.5)
    axes = figure.subplots()
    kinds = list(dict.fromkeys(plan_made.option.gpu.name for plan_made in result.plans))
    for kind, colour in zip(kinds, SERIES_COLOURS, strict=False):
        points = [(p.gpus, p.energy_j_per_token) for p in result.plans if p.option.gpu.name == kind]
        axes.plot(*zip(*points, strict=True), "o", color=colour, alpha=0.7, label=kind)
    front = [(p.gpus, p.energy_j_per_token) for p in result.front]
    axes.plot(*zip(*front, strict=True), "-", color="0.4", lw=1.0, label="none is better in both")
    axes.plot(result.best.gpus, result.best.energy_j_per_token, "o", ms=13, mfc="none", color="k", label="best")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("Energy per output token (J)")
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    axes.set_title(f"{result.demand.model.name} at {result.demand.rate_per_s:g} requests/s")
    return add_caption(figure, "; ".join(list_plan_notes(result)[:3]))
