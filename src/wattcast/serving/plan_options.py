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
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from wattcast.core import BadInput, bad_value, units
from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.hardware.gpu import Fabric
from wattcast.predictor.api import predict
from wattcast.predictor.prediction_json import take_fields
from wattcast.predictor.prices import Prices
from wattcast.predictor.support_distances import SupportWord
from wattcast.serving.arrivals import Trace, draw_trace, drop_long_requests
from wattcast.serving.engine_simulator import BoundsBroken, Patience
from wattcast.serving.latency_bounds import LatencyBound
from wattcast.serving.least_costs import (
    LoneRequest,
    TokenCost,
    predict_lone_request,
    predict_token_cost,
)
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.serving_result import ServingResult
from wattcast.serving.simulate_serving import TRANSFER_BYTE_PER_S, serve_trace
from wattcast.serving.step_costs import StepCosts
from wattcast.serving.step_tabulation import tabulate_step_costs
from wattcast.workload.build_model import build_graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions, WorkloadPhase, count_positions

TENSOR_PARALLEL = (1, 2, 4, 8)
LIMIT_SHARES = (1.0, 0.85, 0.7, 0.55)  # of the default power limit
CLOCK_SHARES = (0.9, 0.8, 0.7, 0.6)  # of the highest clock
INTERPOLATED = (
    "steps at clocks below the top are interpolated between tabulated clocks, which `simulate "
    "--clock` computes: within 2% in time per token and power"
)
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
LONE_LOAD = 1e-3  # of what a replica serves: requests that never meet
LONE_SLACK = (
    0.95  # of the predicted time of a lone request: interpolated step costs are lower by less
)
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
    force: bool = False  # requests of more tokens than the model was made for are served too

    @property
    def rejection(self) -> str:
        """Say how many of the simulated requests the engine rejects as too long; empty: none."""
        return self._accept_requests(self.requests)[1]

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
    def longest_token_s(self) -> float:
        """Mean time from token to token that no plan exceeds in a steady state; infinite: any.

        A bound on what 9 in 10 requests take, or more of them, bounds their mean as well where
        arrivals do not come in bursts.
        """
        if self.arrivals not in ("poisson", "fixed"):
            return math.inf
        times_s = [
            bound.seconds
            for bound in self.bounds
            if bound.quantity == "tpot" and (bound.percentile or PERCENTILE) >= PERCENTILE
        ]
        return min(times_s, default=math.inf)

    @property
    def peak_per_s(self) -> float:
        """Requests a second that all replicas must serve, headroom included."""
        return self.rate_per_s * (1.0 + self.headroom)

    @cached_property
    def mean_lengths(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an output."""
        trace = self.draw_requests()
        return float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())

    def draw_requests(self, requests: int = 0) -> Trace:
        """Draw requests at one a second; another rate stretches the same arrivals."""
        return self._accept_requests(requests or self.requests)[0]

    def _accept_requests(self, count: int) -> tuple[Trace, str]:
        """Draw requests, and leave out those that the engine rejects as too long."""
        if count not in self._traces:
            asked = (1.0, self.prompt, self.output, self.arrivals, 0.0, count, self.seed)
            most = count_positions(self.model)
            name = self.model.name
            self._traces[count] = drop_long_requests(draw_trace(*asked), name, most, self.force)
        return self._traces[count]

    @cached_property
    def _traces(self) -> dict[int, tuple[Trace, str]]:
        """Draws by their number of requests, each with a sentence about requests rejected."""
        return {}

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
        top_w = float(np.mean(chip.power.limit_w))
        top_hz = float(np.max(chip.clocks.max_hz))
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
    demand: ServiceDemand, chip: Gpu, tried: SearchRange, tables: StepTables | None = None
) -> tuple[list[PlanOption], list[str]]:
    """Return every option of a GPU with its first bounds, and a sentence for each refused replica.

    A replica is refused if the model does not fit or a request that is alone takes too long.
    """
    tables = tables or StepTables()
    settings = tried.list_settings(demand, chip)
    options: list[PlanOption] = []
    refused: list[str] = []
    slow: list[tuple[float, str]] = []
    fitting: list[ModelOptions] = []
    for shared in _list_layouts(demand, chip, tried, fitting):
        layout = PlanOption(chip, shared, 0.0, 0.0, 0, 0, ONE_POOL).layout
        try:
            cost, alone = _predict_layout(demand, chip, shared, tables)
        except WattcastError as error:
            # stages mend a lack of memory, so a pipeline is refused only if it was asked for
            if shared.pp == 1 or tried.pp or not isinstance(error, BadInput):
                refused.append(f"{chip.name}, {layout}: {str(error).rstrip('.')}.")
            continue
        fitting.append(shared)
        late = alone.explain_delay(max(clock_hz for _, clock_hz in settings))
        if late is not None:
            slow.append((late[0], f"{chip.name}, {layout}: {late[1]}"))
            continue
        options += _combine_settings(demand, chip, shared, tried, cost, alone)
    closest_first = [sentence for _, sentence in sorted(slow)]
    return options, [*closest_first, *refused]


def _combine_settings(
    demand: ServiceDemand,
    chip: Gpu,
    shared: ModelOptions,
    tried: SearchRange,
    cost: TokenCost,
    alone: AloneTimes,
) -> Iterator[PlanOption]:
    """Yield a layout at every setting, batch limit, step size and number of pools."""
    tokens = sum(demand.mean_lengths) - 1.0
    batches = MOST_SEQUENCES if demand.bounds_tokens else MOST_SEQUENCES[:1]
    steps = tried.most_tokens or MOST_TOKENS
    pools = tried.pools or (ONE_POOL,)
    lanes = shared.pp * shared.dp
    for watts, clock_hz in tried.list_settings(demand, chip):
        if alone.explain_delay(clock_hz) is not None:
            continue
        second, joule = cost.least_cost(clock_hz)
        least_j = BOUND_SLACK * joule * tokens * shared.tp
        for most, step, engines in itertools.product(batches, steps, pools):
            if not engines[0] or lanes == 1:
                per_s = lanes * sum(engines) / (BOUND_SLACK * second * tokens)
                yield PlanOption(chip, shared, watts, clock_hz, most, step, engines, per_s, least_j)


def _predict_layout(
    demand: ServiceDemand, chip: Gpu, shared: ModelOptions, tables: StepTables
) -> tuple[TokenCost, AloneTimes]:
    """Predict a token of the largest step and a lone request, if they were not predicted before."""
    key = (chip.name, shared)
    if key not in tables.layouts:
        cost = predict_token_cost(demand.model, chip, shared)
        tables.layouts[key] = cost, _predict_alone(demand, chip, shared)
    return tables.layouts[key]


@dataclass(frozen=True)
class AloneTimes:
    """What requests that are alone in an engine take, for each latency bound of a demand."""

    by_bound: tuple[tuple[LatencyBound, int, LoneRequest], ...]  # bound, prompt tokens, times

    def explain_delay(self, clock_hz: float) -> tuple[float, str] | None:
        """Say which bound no request meets at a clock, and by what factor; None if all are met."""
        worst: tuple[float, str] | None = None
        for bound, prompt, times in self.by_bound:
            first_s, later_s = times.least_s(clock_hz)
            least_s = LONE_SLACK * (first_s if bound.quantity == "ttft" else later_s)
            if least_s <= bound.seconds or (worst and worst[0] >= least_s / bound.seconds):
                continue
            taken = units.show(least_s, "s")
            asked = units.show(bound.seconds, "s")
            work = f"a prompt of {prompt} tokens" if bound.quantity == "ttft" else "a further token"
            sentence = f"{work} takes at least {taken} even for a single request, and {bound} within {asked} was asked."
            worst = least_s / bound.seconds, sentence
        return worst


def _predict_alone(demand: ServiceDemand, chip: Gpu, shared: ModelOptions) -> AloneTimes:
    """Predict a request alone at the percentile of lengths that each latency bound names.

    Time to first token grows with the prompt, and time per token with the context, so that their
    percentiles are those of the lengths.
    """
    trace = demand.draw_requests()
    contexts = trace.prompt_tokens + trace.output_tokens // 2
    times: dict[tuple[int, int], LoneRequest] = {}
    by_bound = []
    for bound in demand.bounds:
        share = bound.percentile or PERCENTILE
        prompt = int(np.percentile(trace.prompt_tokens, share, method="lower"))
        context = int(np.percentile(contexts, share, method="lower"))
        sizes = max(prompt, 1), max(context, 1)
        if sizes not in times:
            times[sizes] = predict_lone_request(demand.model, chip, shared, *sizes)
        by_bound.append((bound, sizes[0], times[sizes]))
    return AloneTimes(tuple(by_bound))


def _list_layouts(
    demand: ServiceDemand, chip: Gpu, tried: SearchRange, fitting: Sequence[ModelOptions]
) -> Iterator[ModelOptions]:
    """Yield how GPUs may share the model.

    Layouts that cross nodes come only while ``fitting``, to which the caller adds the layouts that
    fit into memory, is empty.
    """
    tp = tried.tp
    pp = tried.pp
    ep = tried.ep
    node = chip.node or node_of_gpu(chip.name)
    experts = getattr(demand.model.dims, "experts", 0)
    most = node.gpu_count
    loose = node.fabric in (Fabric.PCIE, Fabric.BRIDGE)
    for stages in pp or (1, *PIPELINE_STAGES):
        if stages > 1 and not pp:
            if fitting and not loose:
                return
            most = node.gpu_count * (1 if fitting else MOST_NODES)
        for count in tp:
            groups = {1, count, *(tp if count == 1 and stages == 1 else ())}
            if count == 1 and most > node.gpu_count:  # engines in several nodes share the experts
                groups.add(stages * node.gpu_count)
            for share in ep or (sorted(groups) if experts else (1,)):
                dp = max(share // count, 1)
                deep = 1 if dp > 1 and not pp else stages
                in_node = count <= node.gpu_count
                if in_node and count * deep * dp <= most and experts % share == 0:
                    yield replace(demand.options, tp=count, pp=deep, dp=dp, ep=share)


@dataclass(frozen=True)
class StepTables:
    """Step costs that were tabulated, so that options which differ in little else share them."""

    layouts: dict[Hashable, tuple[TokenCost, AloneTimes]] = field(default_factory=dict)
    # of a GPU and how several share the model
    predicted: dict[Hashable, StepCosts | BadInput] = field(default_factory=dict)
    # at a clock and a power limit besides
    set_to: dict[Hashable, StepCosts] = field(default_factory=dict)


def tabulate_option(demand: ServiceDemand, option: PlanOption, tables: StepTables) -> PlanOption:
    """Return an option with its step costs and the bounds that follow.

    Raises a sentence that says why there are none.
    """
    costs = _tabulate_setting(demand, option, tables)
    seqs = max(option.max_seqs // costs.stages, 1)
    per_s, joules = _bound_steps(demand, costs, seqs, option)
    return replace(
        option,
        costs=costs,
        most_per_s=per_s * costs.lanes,
        least_j=joules * costs.gpu_count,
        idle_w=costs.idle_w,
    )


def _tabulate_setting(demand: ServiceDemand, option: PlanOption, tables: StepTables) -> StepCosts:
    """Return the step costs of an option's GPUs at its clock and power limit."""
    chip = option.gpu
    whole_key = (chip.name, option.shared)
    key = (*whole_key, option.clock_hz, option.power_limit_w)
    if key in tables.set_to:
        return tables.set_to[key]
    if whole_key not in tables.predicted:
        tables.predicted[whole_key] = _predict_table(demand, option)
    table = tables.predicted[whole_key]
    if isinstance(table, BadInput):
        raise table
    governor = table.limit_w / float(np.mean(chip.power.limit_w))  # holds a share of the limit
    costs = table.cap_clock(option.clock_hz, chip)
    tables.set_to[key] = replace(costs, limit_w=option.power_limit_w * governor)
    return tables.set_to[key]


def _predict_table(demand: ServiceDemand, option: PlanOption) -> StepCosts | BadInput:
    """Predict the step costs of an option at the card's own clock, or say why it cannot serve."""
    trace = demand.draw_requests()
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    try:
        table = tabulate_step_costs(
            demand.model,
            option.gpu,
            option.shared,
            longest_context=longest,
            context_spread=trace.context_spread,
            max_seqs=max(MOST_SEQUENCES[0] // option.shared.pp, 1),
        )
        if table.cache_tokens < longest:
            raise BadInput(f"the cache holds {table.cache_tokens} tokens, a request {longest}.")
    except WattcastError as error:
        return BadInput(f"{option.gpu.name}, {option.layout}: {str(error).rstrip('.')}.")
    return table


def _bound_steps(
    demand: ServiceDemand, costs: StepCosts, seqs: int, option: PlanOption
) -> tuple[float, float]:
    """Return the most requests a second of a lane, or of pools, and a request's least joules.

    The joules are those of one of the lane's GPUs beyond idle power.

    Time per token bounds how many sequences decode at once: with λ requests a second of O tokens
    each, and T at most from token to token, N = λ·(O - 1)·T by Little's law. Fewer sequences share
    a step, so the rate falls with N and N with the rate; four rounds come close to where they meet.
    """
    per_s = math.inf
    batch = float(seqs)
    tokens = max(demand.mean_lengths[1] - 1.0, 0.0)
    limit_s = demand.longest_token_s
    for _ in range(4):
        per_s, joules = _bound_batch(demand, costs, max(batch, 1.0), seqs, option)
        decoding = per_s / max(option.pools[1], 1) * tokens * limit_s
        if decoding >= batch:
            break
        batch = decoding
    return per_s, joules


def _bound_batch(
    demand: ServiceDemand, costs: StepCosts, batch: float, seqs: int, option: PlanOption
) -> tuple[float, float]:
    """Bound rate and joules where ``batch`` sequences decode at once, as ``_bound_steps`` does.

    A step over T tokens costs at least a + b·T. A request has P prompt tokens, which cost b·P and
    their own attention, and takes part in O - 1 decode steps. Two bounds hold for these, and the
    larger counts. Each is shared by B sequences at most, so they cost (O - 1)·(a/B + b) and its own
    attention. And prompts are in 1 + P/(C - B) steps of C tokens for each request at most: a step
    either ends a prompt or is full. All other steps only decode, which costs d(B)/B a token at
    least."""
    prompt, output = demand.mean_lengths
    per_step, per_token = costs.token_line
    context = prompt + output / 2.0
    most = max(min(seqs, int(costs.cache_tokens / max(prompt, 1.0))), 1)
    alone = [costs.decode_cost(b, b, context) - costs.tokens[costs.padded[b]] for b in (1, most)]
    attention = np.maximum(np.minimum(alone[0], alone[1] / most), 0.0)
    own_place = min(max(round(prompt), 1), len(costs.prompt) - 1)
    first = costs.prompt[own_place] + per_token * prompt
    shared = (output - 1.0) * (per_token + per_step / most + attention)

    # steps that only decode
    full = min(max(math.ceil(batch), 1), most)
    mixed_steps = 0.0 if option.pools[0] else 1.0 + prompt / max(option.max_tokens - seqs, 1)
    apart = max(output - 1.0 - mixed_steps * full, 0.0)
    sizes = sorted({1, max(full // 4, 1), max(full // 2, 1), full})
    each = np.min([costs.decode_cost(n, n, context) / n for n in sizes], axis=0)
    later = np.maximum(shared, apart * each)

    seconds, joules = np.split(first + later, 2)
    governed = costs.count_governed_clocks()
    beyond_j = float((joules - costs.idle_w * seconds)[:governed].min())
    per_s = 1.0 / float(seconds.min())
    if option.pools[0]:
        prompt_s = float(first[: costs.clocks].min())
        decode_s = max(float(later[: costs.clocks].min()), 1e-12)
        per_s = min(max(option.pools[0] / prompt_s, 1e-9), option.pools[1] / decode_s)
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
    demand: ServiceDemand, option: PlanOption, rate_per_s: float, *, is_brief: bool = False
) -> tuple[ServingResult | None, str]:
    """Simulate one replica at a rate; return what it did and which bounds it broke.

    The run has so many requests that the first have ended long before the last arrive, or fill all
    steps; one that breaks a bound is made no longer. A brief run that is sure to break one ends
    there, without a result."""
    costs, (prefill, decode) = option.costs, option.pools
    assert costs is not None
    if rate_per_s > option.most_per_s * (1.0 + 1e-9):
        return None, "throughput"
    requests = demand.requests
    enough = WAVES * option.max_seqs * costs.lanes * decode
    settings = replace(option.settings, seed=demand.seed)
    sending_s = costs.count_transfer_s(TRANSFER_BYTE_PER_S) if prefill else 0.0
    while True:
        unit = demand.draw_requests(requests)
        trace = replace(unit, arrival_s=unit.arrival_s / rate_per_s)
        layout: dict[str, Any] = {"replicas": decode, "prefill_replicas": prefill}
        patience = _measure_patience(demand.bounds, requests) if is_brief else None
        try:
            result = serve_trace(
                trace,
                costs,
                settings,
                **layout,
                transfer_s_per_token=sending_s,
                prices=demand.prices,
                patience=patience,
            )
        except BoundsBroken:
            return None, "a latency"
        late = [bound for bound in demand.bounds if bound.measure(result) > bound.seconds]
        is_long = trace.arrival_s[-1] >= WAVES * float(result.latency_s.mean())
        if late or requests >= enough or is_long:
            return result, ", ".join(map(str, late))
        requests = min(2 * requests, enough)


def _measure_patience(bounds: Sequence[LatencyBound], requests: int) -> Patience:
    """Return how many late requests break a bound for sure, of the strictest bound of each kind.

    The percentile X of n sorted values lies at the place (n - 1)·X or just above it, so it is late
    once all values from there on are.
    """
    limits: dict[str, tuple[float, int]] = {}
    for bound in bounds:
        place = math.floor((requests - 1) * (bound.percentile or PERCENTILE) / 100.0)
        limit = bound.seconds, requests - place
        limits[bound.quantity] = limits.get(bound.quantity, limit)
    never = math.inf, requests + 1
    first_token_s, late_firsts = limits.get("ttft", never)
    token_s, late_tokens = limits.get("tpot", never)
    return Patience(first_token_s, late_firsts, token_s, late_tokens)


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
    demand: ServiceDemand, option: PlanOption, low: float, high: float
) -> tuple[float, str]:
    """Return the largest rate between two at which a replica keeps all bounds, and what breaks
    above; empty where no rate between them broke one.
    """
    binds = ""
    while high > CLOSE_CAPACITY * low:
        middle = math.sqrt(low * high)
        _, failed = serve_rate(demand, option, middle)
        low, high, binds = (low, middle, failed) if failed else (middle, high, binds)
    return low, binds
