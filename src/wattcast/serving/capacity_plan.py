"""Plan how many GPUs serve a language model under traffic: screened by arithmetic, decided by simulation.

An option is a kind of GPU, how the GPUs of an engine share the model (``tp``, ``pp``, ``ep``), a power limit or a
highest clock, the sequences and tokens of a step, and engines that compute prompts apart from those that decode. Its
plan has the fewest replicas n at which a simulated replica meets every latency bound at λ·(1 + headroom) / n; energy,
power and percentiles are those at λ / n. The same draw of arrivals, stretched in time, serves every rate and option.

Each option has a bound that it cannot beat: requests a second and joules of a request if every step were as full as
it can be. The first bound takes one prediction, the largest step; the second all step costs. The option with the best
bound comes next, gets its second bound or is simulated, until no bound is better than the best plans found. So no
option that was left out can be better than the plan returned.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from wattcast import __version__
from wattcast.core import units
from wattcast.core.arrays import pareto_front
from wattcast.core.errors import BadInput, WattcastError, bad_value, check_names
from wattcast.core.records import dataclass, field, replace
from wattcast.hardware import Gpu
from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.hardware.gpu import Fabric
from wattcast.predictor.api import find_gpu, predict
from wattcast.predictor.prediction_json import take_fields
from wattcast.predictor.prices import PriceKeywords, Prices, parse_prices
from wattcast.predictor.uncertainty import SupportWord
from wattcast.serving.arrivals import Trace, draw_trace
from wattcast.serving.engine_simulator import EngineSettings
from wattcast.serving.serving_result import LatencyBound, ServingResult, parse_both_bounds
from wattcast.serving.simulate_serving import ROUTERS, TRANSFER_BYTE_PER_S, find_language_model, serve_trace
from wattcast.serving.step_costs import StepCosts, predict_token_cost, tabulate_step_costs
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions, WorkloadPhase

TENSOR_PARALLEL = (1, 2, 4, 8)
LIMIT_SHARES = (1.0, 0.85, 0.7, 0.55)  # of the default power limit
CLOCK_SHARES = (0.9, 0.8, 0.7, 0.6)  # of the highest clock
PERCENTILE = 90.0  # of a latency bound that names none
MOST_SEQUENCES = (256, 128, 64, 32)
MOST_TOKENS = (8192,)  # of a step
FEWER_TOKENS = (1024, 512)  # tried too where time per token binds: shorter chunks of prompts hold up decoding less
PIPELINE_STAGES = (2, 3, 4, 6, 8)
ONE_POOL = (0, 1)  # engines that compute prompts alone, and engines that decode: none, and one that does both
POOLS = ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1))
MOST_NODES = 4  # of one replica
REQUESTS = 500  # simulated for each answer
RUNNERS_UP = 3  # plans that are wanted besides the best
LIMIT_STEP_W = 5.0
GROWTH = (2, 5, 10)  # times the rate for which the GPUs are told
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
    """What is to be served, and what the plan has least of."""

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
    aim: PlanAim = PlanAim.GPUS
    prices: Prices = field(default_factory=Prices)

    @cached_property
    def seconds_per_request(self) -> float:
        """Mean time between the arrivals that are simulated."""
        trace = self.draw_requests()
        return float(trace.arrival_s[-1]) / len(trace) / self.rate_per_s

    @property
    def bounds_tokens(self) -> bool:
        """Whether time per output token is bounded."""
        return any(bound.quantity == "tpot" for bound in self.bounds)

    @property
    def mean_lengths(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an output."""
        trace = self.draw_requests()
        return float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())

    def draw_requests(self, requests: int = 0) -> Trace:
        """Draw requests at one a second; another rate stretches the same arrivals."""
        return draw_trace(1.0, self.prompt, self.output, self.arrivals, 0.0, requests or self.requests, self.seed)

    def count_replicas(self, capacity_per_s: float, growth: float = 1.0) -> int:
        """Return the replicas of a capacity that serve ``growth`` times the rate, headroom and spares included."""
        needed = growth * self.rate_per_s * (1.0 + self.headroom) / capacity_per_s
        return max(math.ceil(needed - 1e-9), 1) + self.spare_replicas

    def rank_use(self, gpu: str, gpus: int, joules: float) -> tuple[float, float]:
        """Return what is minimised first and what decides between equals, for the joules of a request."""
        match self.aim:
            case PlanAim.GPUS:
                return float(gpus), joules
            case PlanAim.COST:
                cost = self.prices.cost(gpu, joules, gpus / self.rate_per_s)
                return (math.inf if cost is None else cost), joules
            case _:
                return joules, float(gpus)  # carbon is energy times one number


@dataclass(frozen=True)
class SearchRange:
    """What options are made of; an empty field stands for what is usual for the card and the demand."""

    tp: tuple[int, ...] = TENSOR_PARALLEL
    pp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    limits_w: tuple[float, ...] = ()
    clocks_hz: tuple[float, ...] = ()
    pools: tuple[tuple[int, int], ...] = ()
    most_tokens: tuple[int, ...] = ()

    def list_settings(self, demand: ServiceDemand, chip: Gpu) -> list[tuple[float, float]]:
        """Return power limits with highest clocks that the card can be set to, in whole steps of its range.

        Where energy counts, power limits are tried at the highest clock and clocks at the default limit.
        """
        top_w, top_hz = float(np.mean(chip.power.limit_w)), float(np.max(chip.clocks.max_hz))
        low_w = 0.0 if chip.power.min_limit_w is None else float(np.min(chip.power.min_limit_w))
        high_w = top_w if chip.power.max_limit_w is None else float(np.max(chip.power.max_limit_w))
        low_hz = float(np.min(chip.clocks.lowest_hz))
        asked = ("power limit", self.limits_w, low_w, high_w, "W"), ("clock", self.clocks_hz, low_hz, top_hz, "Hz")
        for name, values, low, high, unit in asked:
            for value in values:
                if not low <= value <= high:
                    span = f"from {units.show(low, unit)} to {units.show(high, unit)}"
                    raise bad_value(name, f"one that the {chip.name} takes, {span}", units.show(value, unit))
        if self.limits_w or self.clocks_hz:
            clocks = chip.clocks.snap_to_steps(np.array(self.clocks_hz or (top_hz,))).tolist()
            return [(watts, clock) for watts in self.limits_w or (top_w,) for clock in clocks]
        if demand.aim is PlanAim.GPUS and demand.site_power_w == math.inf:
            return [(top_w, top_hz)]
        limits = [round(top_w * share / LIMIT_STEP_W) * LIMIT_STEP_W for share in LIMIT_SHARES]
        clocks = [clock for clock in chip.clocks.snap_to_steps(top_hz * np.array(CLOCK_SHARES)) if clock >= low_hz]
        return [
            *((watts, top_hz) for watts in limits if watts >= (low_w or top_w)),
            *((top_w, float(clock)) for clock in clocks),
        ]


@dataclass(frozen=True)
class PlanOption:
    """One way to serve: a replica and its limits, with the bounds that arithmetic gives it."""

    gpu: Gpu
    shared: ModelOptions  # how the GPUs of an engine share the model
    power_limit_w: float
    clock_hz: float  # the highest
    max_seqs: int  # a step may hold
    max_tokens: int  # a step may hold
    pools: tuple[int, int]  # engines that compute prompts alone, engines that decode
    most_per_s: float = math.inf  # requests a second of a replica, at the very most
    least_j: float = 0.0  # joules of a request beyond what its GPUs draw idle, at the very least
    idle_w: float = 0.0  # of one GPU
    costs: StepCosts | None = None  # None: the bounds are those of the largest step

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.shared.gpu_count * sum(self.pools)

    @property
    def layout(self) -> str:
        """Say how the GPUs of a replica share the model: ``tp 8 x pp 2, ep 8``."""
        counts = take_fields(self.shared, "tp", "pp", "dp")
        words = [f"{name} {count}" for name, count in counts.items() if name == "tp" or count > 1]
        apart = f", {self.pools[0]} prefill + {self.pools[1]} decode" if self.pools[0] else ""
        return " x ".join(words) + (f", ep {self.shared.ep}" if self.shared.ep > 1 else "") + apart

    @property
    def setting(self) -> str:
        """Say to what the card is set: ``1.2 GHz``, or a power limit where the highest clock may be used."""
        capped = self.clock_hz < float(np.max(self.gpu.clocks.max_hz))
        limited = not capped or self.power_limit_w < float(np.mean(self.gpu.power.limit_w))
        return ", ".join([units.show(self.clock_hz, "Hz")] * capped + [f"{self.power_limit_w:.0f} W"] * limited)

    @property
    def settings(self) -> EngineSettings:
        """Limits of an engine of the replica."""
        return EngineSettings(max(self.max_tokens, self.max_seqs), self.max_seqs)

    @property
    def key(self) -> Hashable:
        """What a replica is made of, whichever its settings and its batch limit."""
        return (self.gpu.name, self.shared, self.pools)

    def bound_rank(self, demand: ServiceDemand, replicas: int = 0) -> tuple[float, float]:
        """Return a rank that no plan of so many replicas can beat, or of any number."""
        gpus = (replicas or demand.count_replicas(self.most_per_s)) * self.gpus
        idle_j = BOUND_SLACK * gpus * self.idle_w * demand.seconds_per_request
        return demand.rank_use(self.gpu.name, gpus, self.least_j + idle_j)

    def __str__(self) -> str:
        return f"{self.gpu.name}, {self.layout}, {self.setting}"


@dataclass(frozen=True, eq=False)
class ServingPlan:
    """A number of replicas of an option, and what a simulation says of each."""

    option: PlanOption
    replicas: int
    held_per_s: float  # requests a second that one replica was seen to serve within all bounds
    result: ServingResult  # of one replica at its share of the rate
    demand: ServiceDemand
    peak_batch: int  # sequences of the largest step, at the rate with headroom too
    failed_per_s: float = math.inf  # that one replica was seen to fail at
    failed: str = ""

    @cached_property
    def ceiling(self) -> tuple[float, str]:
        """The largest rate that one replica serves within all bounds, and what breaks first if the rate grows."""
        high = min(self.failed_per_s, self.option.most_per_s)
        most_per_s, binds = find_ceiling(self.demand, self.option, self.held_per_s, high, self.failed)
        idle = self.replicas == 1 and self.demand.rate_per_s < 0.3 * most_per_s
        return most_per_s, "nothing: one replica is more than enough" if idle else binds

    @property
    def capacity_per_s(self) -> float:
        """Requests a second that one replica serves within all bounds."""
        return self.ceiling[0]

    @property
    def binds(self) -> str:
        """What breaks first if the rate grows."""
        return self.ceiling[1]

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of all replicas in a second."""
        return self.demand.rate_per_s * float(self.result.trace.output_tokens.mean())

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
    def rank(self) -> tuple[float, float]:
        """What the demand minimises first, and what decides between equals."""
        return self.demand.rank_use(self.option.gpu.name, self.gpus, self.energy_j_per_request)

    @cached_property
    def risk(self) -> str | None:
        """How far clock and power limit are from what was measured, where they are not the card's own."""
        return describe_risk(self.demand, self.option, self.result)

    def holds_for(self, option: PlanOption) -> bool:
        """Whether an option with a smaller batch limit serves in the same way, since no step was full."""
        fits = self.peak_batch * option.shared.pp <= option.max_seqs <= self.option.max_seqs
        return fits and self.failed in ("", "throughput")

    def make_row(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        option, demand, each_j = self.option, self.demand, self.energy_j_per_request
        capacity_per_s, binds = self.ceiling
        tokens, found = float(self.result.trace.output_tokens.mean()), self.result.summarise()
        cost = demand.prices.cost(option.gpu.name, each_j, self.gpus / demand.rate_per_s)
        carbon = demand.prices.carbon_g(each_j)
        return {
            "gpu": option.gpu.name,
            **take_fields(self, "gpus", "replicas"),
            **take_fields(option, "layout", "power_limit_w", "clock_hz", "setting", "max_seqs"),
            **take_fields(option.shared, "tp", "pp", "dp", "ep"),
            **dict(zip(("prefill_engines", "decode_engines"), option.pools, strict=True)),
            "max_batched_tokens": option.settings.max_batched_tokens,
            "rate_per_replica_per_s": demand.rate_per_s / self.replicas,
            "capacity_per_replica_per_s": capacity_per_s,
            "load_share": demand.rate_per_s / self.replicas / capacity_per_s,
            **{name: found[name] for name in ("ttft_s", "tpot_s")},
            "output_tokens_per_s": self.output_tokens_per_s,
            **take_fields(self, "power_w", "energy_j_per_token", "energy_j_per_request"),
            "cost_per_request": cost,
            "cost_per_million_tokens": None if cost is None else cost * 1e6 / tokens,
            "carbon_g_per_request": carbon,
            "carbon_g_per_million_tokens": None if carbon is None else carbon * 1e6 / tokens,
            "growth": [
                {"times": times, "gpus": demand.count_replicas(capacity_per_s, times) * option.gpus}
                for times in GROWTH
            ],
            "binds": binds,
            "risk": self.risk,
        }


@dataclass(frozen=True)
class PlanResult:
    """The best plan, all others that were simulated, and why some GPUs cannot serve."""

    demand: ServiceDemand
    plans: tuple[ServingPlan, ...] = ()  # best first
    refused: tuple[str, ...] = ()
    screened: int = 0  # options that arithmetic left out

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
            **take_fields(self.demand, "rate_per_s", "prompt", "output"),
            "minimise": str(self.demand.aim),
            "currency": self.demand.prices.currency or None,
            "best": self.best.make_row(),
            "plans": [plan.make_row() for plan in self.plans],
            "pareto": [plan.make_row() for plan in self.front],
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
    tp: str | Sequence[int] = "1,2,4,8",
    pp: str | Sequence[int] | None = None,
    ep: str | Sequence[int] | None = None,
    power_limits: str | Sequence[str | float] | None = None,
    clocks: str | Sequence[str | float] | None = None,
    pools: str | Sequence[str] | None = None,
    max_batched_tokens: str | Sequence[int] | None = None,
    headroom: str | float = "10%",
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

    The best of every kind of GPU, replicas of 1 to 8 GPUs as far as a node has them, power limits, clocks and batch
    limits is found for ``minimise``: gpus, energy, cost or carbon. The fewest GPUs are sought at the card's default
    limit and highest clock, unless ``site_power`` bounds the power of all GPUs. Pipeline stages (``pp``) are tried
    where a model does not fit into a node or its GPUs are joined by PCIe alone, and whole experts on each GPU
    (``ep``; more than ``tp``: data-parallel engines share them) beside shared ones. ``pools`` are engines that
    compute prompts and engines that decode in a replica, such as ``1:2``; some are tried where
    ``tpot`` is what binds engines that do both, and so are steps of fewer tokens (``max_batched_tokens``). What is
    tried may be a sequence, or text with commas between. A latency without a percentile is that of 9 in 10 requests.
    ``requests`` are simulated for each answer.
    """
    check_names("objective", minimise, list(PlanAim))
    aim, money = PlanAim(minimise), parse_prices(**prices)
    formats = {"dtype": dtype, "quantization": quantization, "kv_dtype": kv_dtype, "weights": weights}
    demand = read_demand(
        model,
        rate,
        parse_both_bounds(ttft, tpot, PERCENTILE),
        **{"prompt": prompt, "output": output, "arrivals": arrivals, "seed": seed, "requests": requests},
        **{"spare_replicas": spare_replicas, "aim": aim, "prices": money},
        headroom=units.parse_amount(headroom, "", "headroom"),
        site_power_w=math.inf
        if site_power is None
        else units.parse_amount(site_power, "W", "site_power", inclusive=False),
        options=ModelOptions.from_names(**formats, stack="engine"),
    )
    if spare_replicas < 0:
        raise bad_value("spare_replicas", "zero or more", spare_replicas)
    chips = [find_gpu(name) for name in _list_items(gpu)]
    if aim is PlanAim.COST and all(money.cost(chip.name, 1.0, 1.0) is None for chip in chips):
        raise bad_value("minimise", "a price to know the cost from", "none", "Give --price or --electricity.")
    if aim is PlanAim.CARBON and money.carbon_g(1.0) is None:
        raise bad_value("minimise", "a carbon intensity", "none", "Give --carbon.")
    whole = {"tp": tp, "pp": pp, "ep": ep, "most_tokens": max_batched_tokens}
    counts = {name: tuple(_parse_count(text, name) for text in _list_items(given)) for name, given in whole.items()}
    tried = SearchRange(
        **counts,
        limits_w=tuple(units.parse_amount(w, "W", "power_limit", inclusive=False) for w in _list_items(power_limits)),
        clocks_hz=tuple(units.parse_amount(hz, "Hz", "clock", inclusive=False) for hz in _list_items(clocks)),
        pools=tuple(map(_parse_pools, _list_items(pools))),
    )
    if max(tried.most_tokens, default=1) > MOST_TOKENS[0]:
        raise bad_value("max_batched_tokens", f"from 1 to {MOST_TOKENS[0]}", max(tried.most_tokens))
    tables: StepTables = {}
    found = _search_options(PlanResult(demand), chips, tried, tables)
    for more in ({"most_tokens": FEWER_TOKENS}, {"pools": POOLS}):
        late = demand.bounds_tokens and (not found.plans or "TPOT" in found.best.failed)
        if late and not any(getattr(tried, name) for name in more):
            found = _search_options(found, chips, replace(tried, **more), tables)
    if not found.plans:
        raise BadInput("this cannot be served as asked. " + " ".join(found.refused))
    return found


def read_demand(
    model: str | Path | ModelSpec, rate: str | float, bounds: tuple[LatencyBound, ...], **more: Any
) -> ServiceDemand:
    """Return the demand for a language model by its name or file; ``more`` are fields of ``ServiceDemand``."""
    per_s = units.parse_amount(rate, "/s", "rate", inclusive=False)
    return ServiceDemand(find_language_model(model), per_s, bounds=bounds, **more)


def _list_items(given: str | Sequence[Any] | None) -> Sequence[Any]:
    """Return what was given as a sequence, or as text with commas between."""
    return given.split(",") if isinstance(given, str) else given or ()


def _parse_count(given: str | int, where: str) -> int:
    if not str(given).strip().isdecimal() or int(given) < 1:
        where = "max_batched_tokens" if where == "most_tokens" else where
        raise bad_value(where, "whole numbers from 1, such as 1,2,4", given)
    return int(given)


def _parse_pools(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d{1,2}):([1-9]\d?)\s*", text)
    if not found or (text.strip().startswith("0:") and text.strip() != "0:1"):
        raise bad_value("pools", "engines for prompts and engines that decode, such as 1:2, or 0:1 for none", text)
    return int(found[1]), int(found[2])


def _search_options(known: PlanResult, chips: Sequence[Gpu], tried: SearchRange, tables: StepTables) -> PlanResult:
    """Simulate options in the order of their bounds until none can be better than the best, those known included."""
    demand, refused, screened = known.demand, [*known.refused], known.screened
    queue: list[tuple[tuple[float, float], int, PlanOption]] = []
    best = {made.option.key: made for made in known.plans}  # of each replica, whichever its settings
    sized: dict[Hashable, ServingPlan] = {}  # with a larger batch limit
    for chip in chips:
        found, why = list_options(demand, chip, tried)
        refused += why
        queue += [(option.bound_rank(demand), len(queue) + i, option) for i, option in enumerate(found)]
    heapq.heapify(queue)
    while queue:
        bound, place, option = queue[0]
        ranks = sorted(made.rank for made in best.values())
        most = ranks[RUNNERS_UP] if len(ranks) > RUNNERS_UP else (math.inf, math.inf)
        if bound > most:
            break
        heapq.heappop(queue)
        like_key = (option.key, option.setting, option.max_tokens)
        own, like = best.get(option.key), sized.get(like_key)
        if (own is not None and bound > own.rank) or (like is not None and like.holds_for(option)):
            screened += 1
            continue
        try:
            if option.costs is None:
                refined = tabulate_option(demand, option, tables)
                heapq.heappush(queue, (refined.bound_rank(demand), place, refined))
            elif made := size_option(demand, option, most if own is None else min(most, own.rank)):
                sized[like_key] = made
                best[option.key] = min(made, own or made, key=lambda one: one.rank)
        except BadInput as error:
            refused.append(str(error))
    same = r"(tp|pp|dp|ep) \d+( x |, )?|\d+ prefill \+ \d+ decode(, )?|[\d.]+ (GB|W|[MG]Hz)|\d+ tokens|(the|each) "
    refused = list({re.sub(same, "", text): text for text in refused}.values())  # of replicas of the most GPUs
    plans = sorted(best.values(), key=lambda made: made.rank)
    return PlanResult(demand, tuple(plans), tuple(refused), screened + len(queue))


def list_options(demand: ServiceDemand, chip: Gpu, tried: SearchRange) -> tuple[list[PlanOption], list[str]]:
    """Return every option of a GPU with its first bounds, and a sentence for each replica that cannot be."""
    tokens = sum(demand.mean_lengths) - 1.0
    batches = MOST_SEQUENCES if demand.bounds_tokens else MOST_SEQUENCES[:1]
    pools, steps = tried.pools or (ONE_POOL,), tried.most_tokens or MOST_TOKENS
    settings = tried.list_settings(demand, chip)
    found: list[PlanOption] = []
    refused: list[str] = []
    for shared in _list_layouts(demand, chip, tried, found):
        try:
            cost = predict_token_cost(demand.model, chip, shared)
        except WattcastError as error:
            if shared.pp == 1 or tried.pp or not isinstance(error, BadInput):  # stages would not mend it
                layout = PlanOption(chip, shared, 0.0, 0.0, 0, 0, ONE_POOL).layout
                refused.append(f"{chip.name}, {layout}: {str(error).rstrip('.')}.")
            continue
        lanes = shared.pp * shared.dp
        for (watts, clock_hz), most, step, engines in itertools.product(settings, batches, steps, pools):
            if not engines[0] or lanes == 1:
                second, joule = cost.least_cost(clock_hz)
                per_s = lanes * sum(engines) / (BOUND_SLACK * second * tokens)
                least_j = BOUND_SLACK * joule * tokens * shared.tp
                found.append(PlanOption(chip, shared, watts, clock_hz, most, step, engines, per_s, least_j))
    return found, refused


def _list_layouts(
    demand: ServiceDemand, chip: Gpu, tried: SearchRange, found: Sequence[PlanOption]
) -> Iterator[ModelOptions]:
    """Yield how GPUs may share the model; what crosses nodes only while ``found`` has nothing that stays inside."""
    tp, pp, ep = tried.tp, tried.pp, tried.ep
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


StepTables = dict[tuple[str, ModelOptions], "StepCosts | BadInput"]  # of a GPU and how several share the model


def tabulate_option(demand: ServiceDemand, option: PlanOption, tables: StepTables) -> PlanOption:
    """Return an option with its step costs and the bounds that follow, or raise a sentence why there are none."""
    key, chip = (option.gpu.name, option.shared), option.gpu
    if key not in tables:
        trace = demand.draw_requests()
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        most = max(MOST_SEQUENCES[0] // option.shared.pp, 1)
        size: dict[str, Any] = {"longest_context": longest, "context_spread": trace.context_spread, "max_seqs": most}
        try:
            made = tabulate_step_costs(demand.model, chip, option.shared, **size)
            if made.cache_tokens < longest:
                raise BadInput(f"the cache holds {made.cache_tokens} tokens, a request {longest}.")
            tables[key] = made
        except WattcastError as error:
            tables[key] = BadInput(f"{chip.name}, {option.layout}: {str(error).rstrip('.')}.")
    table = tables[key]
    if isinstance(table, BadInput):
        raise table
    governor = table.limit_w / float(np.mean(chip.power.limit_w))  # the governor holds a share of the limit
    costs = replace(table.cap_clock(option.clock_hz, chip), limit_w=option.power_limit_w * governor)
    seqs = max(option.max_seqs // costs.stages, 1)
    per_s, joules = _bound_steps(costs, seqs, option.pools, *demand.mean_lengths)
    most_per_s, least_j = per_s * costs.lanes, joules * costs.gpu_count
    return replace(option, costs=costs, most_per_s=most_per_s, least_j=least_j, idle_w=costs.idle_w)


def _bound_steps(
    costs: StepCosts, seqs: int, pools: tuple[int, int], prompt: float, output: float
) -> tuple[float, float]:
    """Return the most requests a second of a lane, or of pools, and the least joules of a request on one of its GPUs.

    The joules are those beyond idle power.

    A step over T tokens costs at least a + b·T, where b is a token's cost in the largest step. A request has P prompt
    tokens, which cost b·P and their own attention, and takes part in O - 1 decode steps, each shared by B sequences
    at most, which cost at least (O - 1)·(a/B + b) and its own attention.
    """
    sizes = np.arange(1, len(costs.tokens))[:, np.newaxis]
    per_token = costs.tokens[-1] / sizes[-1]
    per_step = np.maximum((costs.tokens[1:] - per_token * sizes).min(axis=0), 0.0)
    context = prompt + output / 2.0
    most = max(min(seqs, int(costs.cache_tokens / max(prompt, 1.0))), 1)
    alone = [costs.decode_cost(b, b, context) - costs.tokens[costs.padded[b]] for b in (1, most)]
    attention = np.maximum(np.minimum(alone[0], alone[1] / most), 0.0)
    first = costs.prompt[min(max(round(prompt), 1), len(costs.prompt) - 1)] + per_token * prompt
    later = (output - 1.0) * (per_token + per_step / most + attention)
    seconds, joules = np.split(first + later, 2)
    beyond_j = float((joules - costs.idle_w * seconds)[: costs.count_governed_clocks()].min())
    prompt_s, decode_s = (float(taken[: costs.clocks].min()) for taken in (first, later))
    engines = (max(pools[0] / prompt_s, 1e-9), pools[1] / max(decode_s, 1e-12)) if pools[0] else ()
    per_s = min(engines) if engines else 1.0 / float(seconds.min())
    return per_s / BOUND_SLACK, BOUND_SLACK * max(beyond_j, 0.0)


def saturate_option(demand: ServiceDemand, option: PlanOption) -> PlanOption:
    """Return an option that serves no more than a replica which never lacks requests, less a margin for its queue."""
    assert option.costs is not None
    seqs = max(option.max_seqs // option.costs.stages, 1)
    unit = demand.draw_requests(WAVES * seqs)
    crowd = replace(unit, arrival_s=np.zeros(len(unit)))
    lane = option.costs if option.costs.lanes == 1 else replace(option.costs, stages=1, lanes=1)
    settings = replace(option.settings, max_seqs=seqs, seed=demand.seed)
    most = int(0.9 * len(unit))

    def serve_crowd(trace: Trace, carried: bool = False) -> float:
        done_s = np.sort(serve_trace(trace, lane, settings, carried=carried).last_token_s)
        return float(max(len(unit) / done_s[-1], most / done_s[most - 1]))  # the last ones run in emptier steps

    prefill, decode = option.pools
    if prefill:
        alone = replace(crowd, output_tokens=np.ones(len(unit), dtype=np.int64))
        per_s = min(prefill * serve_crowd(alone), decode * serve_crowd(crowd, carried=True))
    else:
        per_s = option.costs.lanes * serve_crowd(crowd)
    return replace(option, most_per_s=min(option.most_per_s, BUSY_MOST * float(per_s)))


def serve_rate(demand: ServiceDemand, option: PlanOption, rate_per_s: float) -> tuple[ServingResult | None, str]:
    """Simulate one replica at a rate; return what it did and which bounds it broke.

    The run has so many requests that the first have ended long before the last arrive, or fill all steps.
    """
    costs, (prefill, decode) = option.costs, option.pools
    assert costs is not None
    if rate_per_s > option.most_per_s * (1.0 + 1e-9):
        return None, "throughput"
    requests, enough = demand.requests, WAVES * option.max_seqs * costs.lanes * decode
    settings = replace(option.settings, seed=demand.seed)
    sending_s = costs.count_transfer_s(TRANSFER_BYTE_PER_S) if prefill else 0.0
    while True:
        unit = demand.draw_requests(requests)
        trace = replace(unit, arrival_s=unit.arrival_s / rate_per_s)
        result = serve_trace(trace, costs, settings, decode, ROUTERS[0], prefill, sending_s, prices=demand.prices)
        if requests >= enough or trace.arrival_s[-1] >= WAVES * float(result.latency_s.mean()):
            break
        requests = min(2 * requests, enough)
    late = [bound for bound in demand.bounds if bound.measure(result) > bound.seconds]
    return result, ", ".join(map(str, late))


def describe_risk(demand: ServiceDemand, option: PlanOption, result: ServingResult) -> str | None:
    """Say how far clock and power limit are from what was measured, where they are not the card's own."""
    chip = option.gpu
    clock_hz = option.clock_hz if option.clock_hz < float(np.max(chip.clocks.max_hz)) else None
    limit_w = option.power_limit_w if option.power_limit_w < 0.999 * float(np.mean(chip.power.limit_w)) else None
    if clock_hz is None and limit_w is None:
        return None
    batch = max(round(result.summarise()["batch"]["max"]), 1)
    context = max(int((result.trace.prompt_tokens + result.trace.output_tokens / 2).mean()), 1)
    step = replace(option.shared, phase=WorkloadPhase.DECODE, batch=batch, seq=context)
    found = predict(build_graph(demand.model, step), chip, host_launch=0.0, clock=clock_hz, power_limit=limit_w)
    told = [d for d in found.support.distances if d.dimension in ("clock", "power limit")]
    if told:
        word = SupportWord.FAR if any(d.word is SupportWord.FAR for d in told) else SupportWord.NEAR
        return f"{word} from what was measured: {'; '.join(d.reason for d in told)}"
    unknown = found.support.word is not SupportWord.MEASURED
    return f"{found.support.word}: nothing was measured at {option.setting}" if unknown else None


def find_ceiling(
    demand: ServiceDemand, option: PlanOption, low: float, high: float, binds: str = ""
) -> tuple[float, str]:
    """Return the largest rate between two at which a replica keeps all bounds, and what breaks above."""
    while high > CLOSE_CAPACITY * low:
        middle = math.sqrt(low * high)
        _, failed = serve_rate(demand, option, middle)
        low, high, binds = (low, middle, failed) if failed else (middle, high, binds)
    return low, binds or "throughput"


def size_option(demand: ServiceDemand, option: PlanOption, most: tuple[float, float]) -> ServingPlan | None:
    """Find the fewest replicas that keep all bounds; None where a plan would rank behind ``most``.

    Raises a sentence that says why no number of replicas does.
    """
    spare, peak_per_s = demand.spare_replicas, demand.rate_per_s * (1.0 + demand.headroom)
    option = saturate_option(demand, option)

    def is_beaten(needed: int) -> bool:
        return option.bound_rank(demand, needed + spare) > most

    def attempt(needed: int) -> ServingPlan | str:
        results = []
        for rate_per_s in dict.fromkeys((peak_per_s / needed, demand.rate_per_s / (needed + spare))):
            result, failed = serve_rate(demand, option, rate_per_s)
            if failed or result is None:
                return failed
            results.append(result)
        steps = [run.segments["decodes"] + run.segments["prompts"] for result in results for run in result.runs]
        largest = int(max(count.max() for count in steps))
        return ServingPlan(option, needed + spare, peak_per_s / needed, results[-1], demand, largest)

    low = demand.count_replicas(option.most_per_s) - spare - 1  # too few
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
            alone = serve_rate(demand, option, 1e-3 * option.most_per_s)[1]
            if alone:
                raise BadInput(f"{option}: {alone} cannot be met even by a single request.")
        low, failed = needed, tried
        needed = made.replicas - spare if made is not None else max(needed + 1, math.ceil(1.4 * needed))
    made = replace(made, failed_per_s=peak_per_s / low if failed else math.inf, failed=failed)
    if made.power_w > demand.site_power_w:
        drawn, most_w = units.show(made.power_w, "W"), units.show(demand.site_power_w, "W")
        raise BadInput(f"{option}: {drawn} is over the site's {most_w}.")
    return made


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
    if result.best.option.pools[0]:
        speed = units.show(TRANSFER_BYTE_PER_S, "byte/s")
        own.append(f"prompts and decoding on engines of their own; the cache of a prompt is sent at {speed}")
    notes = [*own, *result.best.result.assumptions, *demand.prices.notes]
    return list(dict.fromkeys(notes))
