"""List the options of a service: ways to serve it, each with a bound that it cannot beat.

An option is a kind of GPU, how the GPUs of an engine share the model (``tp``, ``pp``, ``ep``), a
power limit or a highest clock, the sequences and tokens of a step, and engines that compute prompts
apart from those that decode.

The first bound of an option is how many requests a second it serves and how many joules a request
takes, if every step were as full as it can be. It takes one prediction, the largest step; the
second bound (``option_bounds``) takes all step costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import (
    Hashable,
    Iterator,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)

import numpy as np

from wattcast.core import (
    BadInput,
    bad_value,
    units,
)
from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.hardware.catalogue_reader import node_of_gpu
from wattcast.hardware.gpu import Fabric, Node
from wattcast.predictor.machine_factors import find_machine_factors
from wattcast.predictor.prediction_json import take_fields
from wattcast.serving.latency_bounds import LatencyBound
from wattcast.serving.least_costs import (
    LoneRequest,
    TokenCost,
    predict_lone_request,
    predict_token_cost,
)
from wattcast.serving.plan_coefficients import PLAN
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.service_demand import (
    PERCENTILE,
    PlanAim,
    ServiceDemand,
)
from wattcast.serving.step_costs import StepCosts
from wattcast.workload.engine_schedule import STEP_TOKENS
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions

TENSOR_PARALLEL = (1, 2, 4, 8)
PIPELINE_STAGES = (2, 3, 4, 6, 8)
LIMIT_SHARES = PLAN.limit_shares
LIMIT_STEP_W = 5.0  # to which limits are rounded
CLOCK_SHARES = PLAN.clock_shares
MOST_SEQUENCES = tuple(int(count) for count in PLAN.most_sequences)
MOST_TOKENS = (STEP_TOKENS,)  # of a step
# Engines that compute prompts only, and engines that decode: none, and one that does both.
ONE_POOL = (0, 1)

INTERPOLATED = (
    "steps at clocks below the top are interpolated between tabulated clocks, which `simulate "
    "--clock` computes: within 2% in time per token and power"
)


@dataclass(frozen=True)
class SearchRange:
    """What options are made of.

    An empty field stands for what is usual for the card and the demand.
    """

    tp: tuple[int, ...] = TENSOR_PARALLEL
    pp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    limits_w: tuple[float, ...] = ()
    clocks_hz: tuple[float, ...] = ()
    pools: tuple[tuple[int, int], ...] = ()
    most_tokens: tuple[int, ...] = ()

    def list_settings(
        self,
        demand: ServiceDemand,
        chip: Gpu,
    ) -> list[tuple[float, float]]:
        """Return power limits with highest clocks to which the card can be set.

        Where energy counts, power limits are tried at the highest clock and clocks at the default
        limit.
        """
        top_w = float(np.mean(chip.power.limit_w))
        top_hz = float(np.max(chip.clocks.max_hz))
        self._check_settings(chip)
        if self.limits_w or self.clocks_hz:
            clocks_hz = np.array(self.clocks_hz or (top_hz,))
            steps_hz = chip.clocks.snap_to_steps(clocks_hz).tolist()
            return list(itertools.product(self.limits_w or (top_w,), steps_hz))
        if demand.aim is PlanAim.GPUS and demand.site_power_w == math.inf:
            return [(top_w, top_hz)]

        settings = []
        low_w, _ = _limit_range_w(chip)
        for share in LIMIT_SHARES:
            limit_w = round(top_w * share / LIMIT_STEP_W) * LIMIT_STEP_W
            if limit_w >= (low_w or top_w):
                settings.append((limit_w, top_hz))
        low_hz = float(np.min(chip.clocks.lowest_hz))
        clocks_hz = chip.clocks.snap_to_steps(top_hz * np.array(CLOCK_SHARES))
        settings += [(top_w, float(clock_hz)) for clock_hz in clocks_hz if clock_hz >= low_hz]
        return settings

    def _check_settings(self, chip: Gpu) -> None:
        """Refuse power limits and clocks that the card does not take."""
        range_hz = (float(np.min(chip.clocks.lowest_hz)), float(np.max(chip.clocks.max_hz)))
        for limit_w in self.limits_w:
            _check_setting(
                chip,
                "power limit",
                limit_w,
                _limit_range_w(chip),
                "W",
            )
        for clock_hz in self.clocks_hz:
            _check_setting(
                chip,
                "clock",
                clock_hz,
                range_hz,
                "Hz",
            )


def _limit_range_w(chip: Gpu) -> tuple[float, float]:
    """Return the lowest and the highest power limit of a card; zero where the lowest is unknown."""
    power = chip.power
    low_w = 0.0 if power.min_limit_w is None else float(np.min(power.min_limit_w))
    if power.max_limit_w is None:
        return low_w, float(np.mean(power.limit_w))
    return low_w, float(np.max(power.max_limit_w))


def _check_setting(
    chip: Gpu,
    name: str,
    value: float,
    ends: tuple[float, float],
    unit: str,
) -> None:
    low, high = ends
    if not low <= value <= high:
        span = f"from {units.show(low, unit)} to {units.show(high, unit)}"
        expected = f"one that the {chip.name} takes, {span}"
        raise bad_value(name, expected, units.show(value, unit))


@dataclass(frozen=True)
class Speculation:
    """Tokens that are drafted for each sequence in a step, and what is kept of them."""

    tokens: int
    acceptance_rate: float
    draft: ModelSpec | None = None  # the model that drafts; None: its cost is not included


@dataclass(frozen=True)
class PlanOption:
    """One way to serve: a replica and its limits, with the bounds that arithmetic gives it."""

    gpu: Gpu
    shared: ModelOptions  # how the GPUs of an engine share the model
    power_limit_w: float
    clock_hz: float  # the highest
    max_seqs: int  # a step may hold
    max_tokens: int  # a step may hold
    pools: tuple[int, int]  # engines that compute prompts only, engines that decode
    most_per_s: float = math.inf  # requests a second of a replica, at the very most
    least_j: float = 0.0  # joules of a request beyond what its GPUs draw idle, at the very least
    idle_w: float = 0.0  # of one GPU
    costs: StepCosts | None = None  # None: the bounds are those of the largest step
    speculation: Speculation | None = None

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.shared.gpu_count * sum(self.pools)

    @property
    def layout(self) -> str:
        """Say how the GPUs of a replica share the model: ``tp 8 x pp 2, ep 8``."""
        counts = take_fields(self.shared, "tp", "pp", "dp")
        factors = [f"{name} {count}" for name, count in counts.items() if name == "tp" or count > 1]
        words = [" x ".join(factors)]
        if self.shared.ep > 1:
            words.append(f"ep {self.shared.ep}")
        if self.pools[0]:
            words.append(f"{self.pools[0]} prefill + {self.pools[1]} decode")
        return ", ".join(words)

    @property
    def setting(self) -> str:
        """Say to what the card is set: ``1.2 GHz``, or a power limit at the highest clock."""
        is_capped = self.clock_hz < float(np.max(self.gpu.clocks.max_hz))
        is_limited = self.power_limit_w < float(np.mean(self.gpu.power.limit_w))
        words = []
        if is_capped:
            words.append(units.show(self.clock_hz, "Hz"))
        if is_limited or not is_capped:
            words.append(f"{self.power_limit_w:.0f} W")
        return ", ".join(words)

    @property
    def settings(self) -> EngineSettings:
        """Limits of an engine of the replica."""
        speculation = self.speculation
        if speculation is None:
            return EngineSettings(max(self.max_tokens, self.max_seqs), self.max_seqs)
        verified_tokens = self.max_seqs * (1 + speculation.tokens)
        return EngineSettings(
            max(self.max_tokens, verified_tokens),
            self.max_seqs,
            speculative_tokens=speculation.tokens,
            acceptance_rate=speculation.acceptance_rate,
        )

    @property
    def key(self) -> Hashable:
        """What a replica is made of, whichever its settings and its batch limit."""
        return (self.gpu.name, self.shared, self.pools)

    def bound_rank(
        self,
        demand: ServiceDemand,
        replicas: int = 0,
    ) -> tuple[float, float]:
        """Return a rank that no plan of so many replicas can beat, or of any number."""
        gpus = (replicas or demand.count_replicas(self.most_per_s)) * self.gpus
        idle_j = PLAN.bound_slack * gpus * self.idle_w * demand.seconds_per_request
        return demand.rank_use(self.gpu.name, gpus, self.least_j + idle_j)

    def __str__(self) -> str:
        return f"{self.gpu.name}, {self.layout}, {self.setting}"


@dataclass(frozen=True)
class AloneTimes:
    """What requests that are alone in an engine take, for each latency bound of a demand."""

    by_bound: tuple[tuple[LatencyBound, int, LoneRequest], ...]  # bound, prompt tokens, times

    def explain_delay(self, clock_hz: float) -> tuple[float, str] | None:
        """Say which bound no request meets at a clock, and by what factor; None if all are met."""
        worst: tuple[float, str] | None = None
        for bound, prompt, times in self.by_bound:
            first_s, later_s = times.least_s(clock_hz)
            least_s = PLAN.lone_slack * (first_s if bound.quantity == "ttft" else later_s)
            factor = least_s / bound.seconds
            if least_s <= bound.seconds or (worst and worst[0] >= factor):
                continue
            work = f"a prompt of {prompt} tokens" if bound.quantity == "ttft" else "a further token"
            sentence = (
                f"{work} takes at least {units.show(least_s, 's')} even for a single request, "
                f"and {bound} within {units.show(bound.seconds, 's')} was asked."
            )
            worst = (factor, sentence)
        return worst


@dataclass(frozen=True)
class StepTables:
    """Step costs that were tabulated, so that options which differ in little else share them."""

    layouts: dict[Hashable, tuple[TokenCost, AloneTimes]] = field(default_factory=dict)
    # by GPU and how several of them share the model
    predicted: dict[Hashable, StepCosts | BadInput] = field(default_factory=dict)
    # by clock and power limit as well
    set_to: dict[Hashable, StepCosts] = field(default_factory=dict)


def list_options(
    demand: ServiceDemand,
    chip: Gpu,
    tried: SearchRange,
    tables: StepTables | None = None,
) -> tuple[list[PlanOption], list[str]]:
    """Return every option of a GPU with its first bounds, and a sentence for each refused replica.

    A replica is refused if the model does not fit or a request that is alone takes too long.
    """
    tables = tables or StepTables()
    settings = tried.list_settings(demand, chip)
    highest_hz = max(clock_hz for _, clock_hz in settings)
    options: list[PlanOption] = []
    refused: list[str] = []
    slow: list[tuple[float, str]] = []
    fitting: list[ModelOptions] = []
    for shared in _list_layouts(demand, chip, tried, fitting):
        layout = PlanOption(
            chip,
            shared,
            0.0,
            0.0,
            0,
            0,
            ONE_POOL,
        ).layout
        try:
            cost, alone = _predict_layout(demand, chip, shared, tables)
        except WattcastError as error:
            # stages mend a lack of memory, so a pipeline is refused only if it was asked for
            if shared.pp == 1 or tried.pp or not isinstance(error, BadInput):
                refused.append(f"{chip.name}, {layout}: {str(error).rstrip('.')}.")
            continue
        fitting.append(shared)
        delay = alone.explain_delay(highest_hz)
        if delay is None:
            options += _combine_settings(
                demand,
                chip,
                shared,
                tried,
                cost,
                alone,
            )
        else:
            slow.append((delay[0], f"{chip.name}, {layout}: {delay[1]}"))
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
    for limit_w, clock_hz in tried.list_settings(demand, chip):
        if alone.explain_delay(clock_hz) is not None:
            continue
        token_s, token_j = cost.least_cost(clock_hz)
        least_j = PLAN.bound_slack * token_j * tokens * shared.tp
        for max_seqs, max_tokens, engines in itertools.product(batches, steps, pools):
            if engines[0] and lanes > 1:
                continue
            yield PlanOption(
                chip,
                shared,
                limit_w,
                clock_hz,
                max_seqs,
                max_tokens,
                engines,
                most_per_s=lanes * sum(engines) / (PLAN.bound_slack * token_s * tokens),
                least_j=least_j,
            )


def _predict_layout(
    demand: ServiceDemand,
    chip: Gpu,
    shared: ModelOptions,
    tables: StepTables,
) -> tuple[TokenCost, AloneTimes]:
    """Predict a token of the largest step and a lone request, if they were not predicted before."""
    key = (chip.name, shared)
    if key not in tables.layouts:
        factors = find_machine_factors(chip.name, demand.machine)
        cost = predict_token_cost(demand.model, chip, shared, power_factor=factors.power)
        tables.layouts[key] = (cost, _predict_alone(demand, chip, shared))
    return tables.layouts[key]


def _predict_alone(
    demand: ServiceDemand,
    chip: Gpu,
    shared: ModelOptions,
) -> AloneTimes:
    """Predict a request alone at the percentile of lengths that each latency bound names.

    Time to first token grows with the prompt, and time per token with the context, so that their
    percentiles are those of the lengths.
    """
    trace = demand.draw_requests()
    contexts = trace.prompt_tokens + trace.output_tokens // 2
    times: dict[tuple[int, int], LoneRequest] = {}
    by_bound = []
    for bound in demand.bounds:
        percentile = bound.percentile or PERCENTILE
        prompt = max(int(np.percentile(trace.prompt_tokens, percentile, method="lower")), 1)
        context = max(int(np.percentile(contexts, percentile, method="lower")), 1)
        sizes = (prompt, context)
        if sizes not in times:
            times[sizes] = predict_lone_request(
                demand.model,
                chip,
                shared,
                prompt,
                context,
            )
        by_bound.append((bound, prompt, times[sizes]))
    return AloneTimes(tuple(by_bound))


def _list_layouts(
    demand: ServiceDemand,
    chip: Gpu,
    tried: SearchRange,
    fitting: Sequence[ModelOptions],
) -> Iterator[ModelOptions]:
    """Yield how GPUs may share the model.

    Layouts that cross nodes come only while ``fitting``, to which the caller adds the layouts that
    fit into memory, is empty.
    """
    node = chip.node or node_of_gpu(chip.name)
    is_loose = node.fabric in (Fabric.PCIE, Fabric.BRIDGE)
    most_gpus = node.gpu_count
    for stages in tried.pp or (1, *PIPELINE_STAGES):
        if stages > 1 and not tried.pp:
            if fitting and not is_loose:
                return
            most_gpus = node.gpu_count * (1 if fitting else PLAN.most_nodes)
        for count in tried.tp:
            if count <= node.gpu_count:
                yield from _share_experts(
                    demand,
                    tried,
                    (count, stages),
                    node,
                    most_gpus,
                )


def _share_experts(
    demand: ServiceDemand,
    tried: SearchRange,
    grid: tuple[int, int],
    node: Node,
    most_gpus: int,
) -> Iterator[ModelOptions]:
    """Yield how ``grid``, GPUs of a stage and stages, shares the experts of a mixture.

    Engines whose experts lie on more GPUs than ``tp`` are data-parallel.
    """
    count, stages = grid
    experts = getattr(demand.model.dims, "experts", 0)
    groups = {1, count}
    if count == 1 and stages == 1:
        groups.update(tried.tp)
    if count == 1 and most_gpus > node.gpu_count:  # engines in several nodes share the experts
        groups.add(stages * node.gpu_count)
    for share in tried.ep or (sorted(groups) if experts else (1,)):
        dp = max(share // count, 1)
        deep = 1 if dp > 1 and not tried.pp else stages
        if count * deep * dp <= most_gpus and experts % share == 0:
            yield replace(
                demand.options,
                tp=count,
                pp=deep,
                dp=dp,
                ep=share,
            )
