"""Options of a service: what is asked for, one way to serve it, the bounds that it cannot beat, and
its simulation.

An option is a kind of GPU, how the GPUs of an engine share the model (``tp``, ``pp``, ``ep``), a
power limit or a highest clock, the sequences and tokens of a step, and engines that compute prompts
apart from those that decode. The same draw of arrivals, stretched in time, serves every rate and
option.

Each option has a bound that it cannot beat: requests a second and joules of a request if every step
were as full as it can be. The first bound takes one prediction, the largest step; the second all
step costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from wattcast.core import BadInput, bad_value, dataclass, field, replace, units
from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.hardware.gpu import Fabric
from wattcast.predictor.api import predict
from wattcast.predictor.prediction_json import take_fields
from wattcast.predictor.prices import Prices
from wattcast.predictor.uncertainty import SupportWord
from wattcast.serving.arrivals import Trace, draw_trace
from wattcast.serving.engine_simulator import EngineSettings
from wattcast.serving.serving_result import LatencyBound, ServingResult
from wattcast.serving.simulate_serving import ROUTERS, TRANSFER_BYTE_PER_S, serve_trace
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
PIPELINE_STAGES = (2, 3, 4, 6, 8)
ONE_POOL = (
    0,
    1,
)  # engines that compute prompts alone, and engines that decode: none, and one that does both
MOST_NODES = 4  # of one replica
REQUESTS = 500  # simulated for each answer
LIMIT_STEP_W = 5.0
CLOSE_CAPACITY = 1.03  # the rate at which a replica fails over the rate at which it does not
BUSY_MOST = (
    0.97  # of what a replica serves that never lacks requests: beyond, queues grow without a bound
)
WAVES = 4  # requests of a run over those that fill a step
# a simulated replica may be this much better than the bound of its steps, by padding and rounding
BOUND_SLACK = 0.98


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
        return draw_trace(
            1.0, self.prompt, self.output, self.arrivals, 0.0, requests or self.requests, self.seed
        )

    def count_replicas(self, capacity_per_s: float, growth: float = 1.0) -> int:
        """Return the replicas of a capacity that serve ``growth`` times the rate, headroom and
        spares included.
        """
        needed = growth * self.rate_per_s * (1.0 + self.headroom) / capacity_per_s
        return max(math.ceil(needed - 1e-9), 1) + self.spare_replicas

    def rank_use(self, gpu: str, gpus: int, joules: float) -> tuple[float, float]:
        """Return what is minimised first and what decides between equals, for the joules of a
        request.
        """
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
    """What options are made of; an empty field stands for what is usual for the card and the
    demand.
    """

    tp: tuple[int, ...] = TENSOR_PARALLEL
    pp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    limits_w: tuple[float, ...] = ()
    clocks_hz: tuple[float, ...] = ()
    pools: tuple[tuple[int, int], ...] = ()
    most_tokens: tuple[int, ...] = ()

    def list_settings(self, demand: ServiceDemand, chip: Gpu) -> list[tuple[float, float]]:
        """Return power limits with highest clocks that the card can be set to, in whole steps of
        its range.

        Where energy counts, power limits are tried at the highest clock and clocks at the default
        limit."""
        top_w, top_hz = float(np.mean(chip.power.limit_w)), float(np.max(chip.clocks.max_hz))
        low_w = 0.0 if chip.power.min_limit_w is None else float(np.min(chip.power.min_limit_w))
        high_w = top_w if chip.power.max_limit_w is None else float(np.max(chip.power.max_limit_w))
        low_hz = float(np.min(chip.clocks.lowest_hz))
        asked = (
            ("power limit", self.limits_w, low_w, high_w, "W"),
            ("clock", self.clocks_hz, low_hz, top_hz, "Hz"),
        )
        for name, values, low, high, unit in asked:
            for value in values:
                if not low <= value <= high:
                    span = f"from {units.show(low, unit)} to {units.show(high, unit)}"
                    raise bad_value(
                        name, f"one that the {chip.name} takes, {span}", units.show(value, unit)
                    )
        if self.limits_w or self.clocks_hz:
            clocks = chip.clocks.snap_to_steps(np.array(self.clocks_hz or (top_hz,))).tolist()
            return [(watts, clock) for watts in self.limits_w or (top_w,) for clock in clocks]
        if demand.aim is PlanAim.GPUS and demand.site_power_w == math.inf:
            return [(top_w, top_hz)]
        limits = [round(top_w * share / LIMIT_STEP_W) * LIMIT_STEP_W for share in LIMIT_SHARES]
        clocks = [
            clock
            for clock in chip.clocks.snap_to_steps(top_hz * np.array(CLOCK_SHARES))
            if clock >= low_hz
        ]
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
        """Say to what the card is set: ``1.2 GHz``, or a power limit where the highest clock may be
        used.
        """
        capped = self.clock_hz < float(np.max(self.gpu.clocks.max_hz))
        limited = not capped or self.power_limit_w < float(np.mean(self.gpu.power.limit_w))
        return ", ".join(
            [units.show(self.clock_hz, "Hz")] * capped + [f"{self.power_limit_w:.0f} W"] * limited
        )

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


def list_options(
    demand: ServiceDemand, chip: Gpu, tried: SearchRange
) -> tuple[list[PlanOption], list[str]]:
    """Return every option of a GPU with its first bounds, and a sentence for each replica that
    cannot be.
    """
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
            if (
                shared.pp == 1 or tried.pp or not isinstance(error, BadInput)
            ):  # stages would not mend it
                layout = PlanOption(chip, shared, 0.0, 0.0, 0, 0, ONE_POOL).layout
                refused.append(f"{chip.name}, {layout}: {str(error).rstrip('.')}.")
            continue
        lanes = shared.pp * shared.dp
        for (watts, clock_hz), most, step, engines in itertools.product(
            settings, batches, steps, pools
        ):
            if not engines[0] or lanes == 1:
                second, joule = cost.least_cost(clock_hz)
                per_s = lanes * sum(engines) / (BOUND_SLACK * second * tokens)
                least_j = BOUND_SLACK * joule * tokens * shared.tp
                found.append(
                    PlanOption(chip, shared, watts, clock_hz, most, step, engines, per_s, least_j)
                )
    return found, refused


def _list_layouts(
    demand: ServiceDemand, chip: Gpu, tried: SearchRange, found: Sequence[PlanOption]
) -> Iterator[ModelOptions]:
    """Yield how GPUs may share the model; what crosses nodes only while ``found`` has nothing that
    stays inside.
    """
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


StepTables = dict[
    tuple[str, ModelOptions], "StepCosts | BadInput"
]  # of a GPU and how several share the model


def tabulate_option(demand: ServiceDemand, option: PlanOption, tables: StepTables) -> PlanOption:
    """Return an option with its step costs and the bounds that follow, or raise a sentence why
    there are none.
    """
    key, chip = (option.gpu.name, option.shared), option.gpu
    if key not in tables:
        trace = demand.draw_requests()
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        most = max(MOST_SEQUENCES[0] // option.shared.pp, 1)
        size: dict[str, Any] = {
            "longest_context": longest,
            "context_spread": trace.context_spread,
            "max_seqs": most,
        }
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
    governor = table.limit_w / float(
        np.mean(chip.power.limit_w)
    )  # the governor holds a share of the limit
    costs = replace(table.cap_clock(option.clock_hz, chip), limit_w=option.power_limit_w * governor)
    seqs = max(option.max_seqs // costs.stages, 1)
    per_s, joules = _bound_steps(costs, seqs, option.pools, *demand.mean_lengths)
    most_per_s, least_j = per_s * costs.lanes, joules * costs.gpu_count
    return replace(option, costs=costs, most_per_s=most_per_s, least_j=least_j, idle_w=costs.idle_w)


def _bound_steps(
    costs: StepCosts, seqs: int, pools: tuple[int, int], prompt: float, output: float
) -> tuple[float, float]:
    """Return the most requests a second of a lane, or of pools, and the least joules of a request
    on one of its GPUs.

    The joules are those beyond idle power.

    A step over T tokens costs at least a + b·T, where b is a token's cost in the largest step. A
    request has P prompt tokens, which cost b·P and their own attention, and takes part in O - 1
    decode steps, each shared by B sequences at most, which cost at least (O - 1)·(a/B + b) and its
    own attention."""
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
    """Return an option that serves no more than a replica which never lacks requests, less a margin
    for its queue.
    """
    assert option.costs is not None
    seqs = max(option.max_seqs // option.costs.stages, 1)
    unit = demand.draw_requests(WAVES * seqs)
    crowd = replace(unit, arrival_s=np.zeros(len(unit)))
    lane = option.costs if option.costs.lanes == 1 else replace(option.costs, stages=1, lanes=1)
    settings = replace(option.settings, max_seqs=seqs, seed=demand.seed)
    most = int(0.9 * len(unit))

    def serve_crowd(trace: Trace, carried: bool = False) -> float:
        done_s = np.sort(serve_trace(trace, lane, settings, carried=carried).last_token_s)
        return float(
            max(len(unit) / done_s[-1], most / done_s[most - 1])
        )  # the last ones run in emptier steps

    prefill, decode = option.pools
    if prefill:
        alone = replace(crowd, output_tokens=np.ones(len(unit), dtype=np.int64))
        per_s = min(prefill * serve_crowd(alone), decode * serve_crowd(crowd, carried=True))
    else:
        per_s = option.costs.lanes * serve_crowd(crowd)
    return replace(option, most_per_s=min(option.most_per_s, BUSY_MOST * float(per_s)))


def serve_rate(
    demand: ServiceDemand, option: PlanOption, rate_per_s: float
) -> tuple[ServingResult | None, str]:
    """Simulate one replica at a rate; return what it did and which bounds it broke.

    The run has so many requests that the first have ended long before the last arrive, or fill all
    steps."""
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
        result = serve_trace(
            trace, costs, settings, decode, ROUTERS[0], prefill, sending_s, prices=demand.prices
        )
        if requests >= enough or trace.arrival_s[-1] >= WAVES * float(result.latency_s.mean()):
            break
        requests = min(2 * requests, enough)
    late = [bound for bound in demand.bounds if bound.measure(result) > bound.seconds]
    return result, ", ".join(map(str, late))


def describe_risk(demand: ServiceDemand, option: PlanOption, result: ServingResult) -> str | None:
    """Say how far clock and power limit are from what was measured, where they are not the card's
    own.
    """
    chip = option.gpu
    clock_hz = option.clock_hz if option.clock_hz < float(np.max(chip.clocks.max_hz)) else None
    limit_w = (
        option.power_limit_w
        if option.power_limit_w < 0.999 * float(np.mean(chip.power.limit_w))
        else None
    )
    if clock_hz is None and limit_w is None:
        return None
    batch = max(round(result.summarise()["batch"]["max"]), 1)
    context = max(int((result.trace.prompt_tokens + result.trace.output_tokens / 2).mean()), 1)
    step = replace(option.shared, phase=WorkloadPhase.DECODE, batch=batch, seq=context)
    found = predict(
        build_graph(demand.model, step), chip, host_launch=0.0, clock=clock_hz, power_limit=limit_w
    )
    told = [d for d in found.support.distances if d.dimension in ("clock", "power limit")]
    if told:
        word = SupportWord.FAR if any(d.word is SupportWord.FAR for d in told) else SupportWord.NEAR
        return f"{word} from what was measured: {'; '.join(d.reason for d in told)}"
    unknown = found.support.word is not SupportWord.MEASURED
    return f"{found.support.word}: nothing was measured at {option.setting}" if unknown else None


def find_ceiling(
    demand: ServiceDemand, option: PlanOption, low: float, high: float, binds: str = ""
) -> tuple[float, str]:
    """Return the largest rate between two at which a replica keeps all bounds, and what breaks
    above.
    """
    while high > CLOSE_CAPACITY * low:
        middle = math.sqrt(low * high)
        _, failed = serve_rate(demand, option, middle)
        low, high, binds = (low, middle, failed) if failed else (middle, high, binds)
    return low, binds or "throughput"
