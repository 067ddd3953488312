"""Plan how many GPUs serve a language model under traffic: screened by arithmetic, decided by
simulation.

A plan has the fewest replicas n of an option (``plan_options.py``) at which a simulated replica
meets every latency bound at λ·(1 + headroom) / n; energy, power and percentiles are those at λ / n.
Every kind of GPU is searched by itself (``plan_search.py``), and the best of all is the best of
these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from wattcast import __version__
from wattcast.core import (
    BadInput,
    bad_value,
    units,
)
from wattcast.core.arrays import pareto_front
from wattcast.core.units import show_plain
from wattcast.core.user_results import UserResult, find_notebook_progress
from wattcast.hardware import Gpu
from wattcast.options.keywords import PlanKeywords
from wattcast.options.serving_options import (
    PLAN,
    EngineOptions,
    LatencyTargets,
    PlanDemand,
    PlanSearch,
    RequestShape,
)
from wattcast.options.setting_options import (
    MachineOptions,
    PriceOptions,
    SettingOptions,
)
from wattcast.options.verb_options import ParsedOptions
from wattcast.predictor.api import find_gpu
from wattcast.predictor.prediction_json import take_fields
from wattcast.predictor.prices import (
    BOARD_ENERGY,
    Prices,
    read_prices,
)
from wattcast.serving import plan_options
from wattcast.serving.latency_bounds import parse_both_bounds
from wattcast.serving.plan_options import SearchRange, Speculation
from wattcast.serving.plan_processes import search_in_processes
from wattcast.serving.plan_search import (
    KindPlans,
    KindSearch,
    ServingPlan,
    Tell,
)
from wattcast.serving.service_demand import (
    PERCENTILE,
    PlanAim,
    ServiceDemand,
)
from wattcast.serving.simulate_serving import (
    TRANSFER_BYTE_PER_S,
    find_draft_model,
    find_language_model,
)
from wattcast.serving.speculation_trial import SpeculationTrial, try_speculation
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions


@dataclass(frozen=True, repr=False)
class PlanResult(UserResult):
    """What was found for each kind of GPU, in the order asked, and the best of all."""

    drawn_by = "wattcast.serving.plan_report:draw_plan"
    rows_in = "plans"

    demand: ServiceDemand
    kinds: tuple[KindPlans, ...] = ()
    speculation: SpeculationTrial | None = None  # drafts on the best plan, if they were asked for

    @cached_property
    def plans(self) -> tuple[ServingPlan, ...]:
        """All plans that were found, best first."""
        plans = [kind_plan for kind in self.kinds for kind_plan in kind.plans]
        return tuple(sorted(plans, key=lambda kind_plan: kind_plan.rank))

    @property
    def best(self) -> ServingPlan:
        """The plan that has least of what was asked."""
        return self.plans[0]

    @property
    def ranked_kinds(self) -> list[KindPlans]:
        """The kinds of GPU, the one with the best plan first, those without a plan last."""
        return sorted(self.kinds, key=lambda kind: kind.best.rank if kind.best else (math.inf,) * 2)

    @property
    def refused(self) -> tuple[str, ...]:
        """Why some replicas, or whole kinds, cannot serve."""
        return tuple(dict.fromkeys(text for kind in self.kinds for text in kind.refused))

    @property
    def screened(self) -> int:
        """Options that arithmetic left out."""
        return sum(kind.screened for kind in self.kinds)

    @property
    def is_complete(self) -> bool:
        """Whether every kind was searched to the end."""
        return all(kind.is_complete for kind in self.kinds)

    @property
    def front(self) -> tuple[ServingPlan, ...]:
        """Plans that no other beats in GPUs and energy both."""
        pairs = np.array([(plan.gpus, plan.energy_j_per_token) for plan in self.plans])
        return tuple(self.plans[i] for i in pareto_front(pairs))

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        demand = self.demand
        demanded = f"{demand.model.name} at {demand.rate_per_s:g} requests/s"
        if not self.plans:
            return f"{demanded}: no plan"
        best = self.best
        layout = f"{best.gpus} x {best.option.gpu.name}"
        energy = f"{show_plain(best.energy_j_per_token, 3)} J/token"
        return f"{demanded}: {layout}, {energy}; {len(self.plans)} plans"

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, as ``--json`` prints it."""
        return {
            "wattcast": __version__,
            "model": self.demand.model.name,
            **take_fields(self.demand, "rate_per_s", "prompt", "output"),
            "minimise": str(self.demand.aim),
            "currency": self.demand.prices.currency or None,
            "complete": self.is_complete,
            "best": self.best.make_row(),
            "kinds": [
                {
                    "gpu": kind.gpu,
                    "best": kind.best.make_row() if kind.best else None,
                    "reason": kind.reason,
                }
                for kind in self.ranked_kinds
            ],
            "plans": [plan.make_row() for plan in self.plans],
            "pareto": [plan.make_row() for plan in self.front],
            "speculation": None if self.speculation is None else self.speculation.to_dict(),
            "refused": list(self.refused),
            "assumptions": list_plan_notes(self),
        }


class PlanInterrupted(KeyboardInterrupt):
    """The search was interrupted; ``result`` holds the plans that it had by then."""

    def __init__(self, result: PlanResult) -> None:
        super().__init__("interrupted")
        self.result = result


@PLAN.sign
def plan(
    model: str | Path | ModelSpec,
    gpu: str | Sequence[str | Path | Gpu],
    *,
    progress: Tell | None = None,
    workers: int = 1,
    **options: Unpack[PlanKeywords],
) -> PlanResult:
    """Plan a service: ``rate`` such as ``20/s``, lengths as ``simulate`` takes them, latencies as
    ``p99:500ms``.

    The best of every kind of GPU, replicas of 1 to 8 GPUs as far as a node has them, power limits,
    clocks and batch limits is found for ``minimise``: gpus, energy, cost or carbon. What is found
    for a kind does not depend on the others. The fewest GPUs are sought at the card's default limit
    and highest clock, unless ``site_power`` bounds the power of all GPUs. Pipeline stages (``pp``)
    are tried where a model does not fit into a node or its GPUs are joined by PCIe alone, and whole
    experts on each GPU (``ep``; more than ``tp``: data-parallel engines share them) beside shared
    ones. ``pools`` are engines that compute prompts and engines that decode in a replica, such as
    ``1:2``; some are tried where ``tpot`` limits engines that do both, and so are steps of
    fewer tokens (``max_batched_tokens``). What is tried may be a sequence, or text with commas
    between. A latency without a percentile is that of 9 in 10 requests. ``requests`` are simulated
    for each answer. ``power_budget`` is that of a hall at its meter: the plan says how many GPUs
    fill it, hosts (``host_share`` of the GPUs' energy) and PUE included. Requests of more tokens
    than the model was made for are rejected, as engines do; ``force`` serves them.
    ``speculative_tokens`` say what drafts would change in the best plan at an ``acceptance_rate``;
    ``draft`` is the model that drafts them.

    ``node`` is where the GPUs of every kind stand, if not in the node they are usually built into.
    ``workers`` processes search kinds of GPU side by side, which changes no result.
    ``progress`` is called with a line about the search once a second; a notebook shows that line
    below its cell where no other ``progress`` is given. Ctrl-C raises
    ``PlanInterrupted``, whose ``result`` has the plans so far, if there are any.
    """
    if workers < 1:
        raise bad_value("workers", "one or more", workers)
    chosen = PLAN.parse(options)
    demand = _read_demand(find_language_model(model), chosen)
    speculation = _read_speculation(demand.model, chosen[EngineOptions])
    demand.draw_requests()  # raises an error where the model takes none of them
    search = chosen[PlanSearch]
    largest_step = plan_options.MOST_TOKENS[0]
    most_tokens = max(search.max_batched_tokens, default=1)
    if most_tokens > largest_step:
        raise bad_value("max_batched_tokens", f"from 1 to {largest_step}", most_tokens)
    tried = SearchRange(
        tp=search.tp,
        pp=search.pp,
        ep=search.ep,
        most_tokens=search.max_batched_tokens,
        limits_w=search.power_limits_w,
        clocks_hz=search.clocks_hz,
        pools=search.pools,
    )
    node = chosen[SettingOptions].node
    names = gpu.split(",") if isinstance(gpu, str) else gpu
    by_name = {}  # each kind once
    for name in names:
        chip = find_gpu(name, node)
        by_name[chip.name] = chip
    chips = list(by_name.values())
    _check_prices(demand, chips)
    tell = progress or find_notebook_progress()
    result = _search_kinds(
        demand,
        chips,
        tried,
        tell,
        workers,
    )
    if not result.plans:
        raise BadInput("this cannot be served as asked. " + " ".join(result.refused))
    if speculation is not None:
        result = replace(result, speculation=try_speculation(result.best, speculation))
    return result


def _read_speculation(target: ModelSpec, engine: EngineOptions) -> Speculation | None:
    """Return the drafts that are to be tried, if any."""
    draft = find_draft_model(target, engine)
    if not engine.speculative_tokens:
        return None
    return Speculation(engine.speculative_tokens, engine.acceptance_rate, draft)


def _read_demand(model: ModelSpec, chosen: ParsedOptions) -> ServiceDemand:
    """Return what is to be served, and what the plan has least of."""
    service = chosen[PlanDemand]
    shape = chosen[RequestShape]
    targets = chosen[LatencyTargets]
    formats = chosen.select_keywords(ModelOptions)
    site_power_w = math.inf if service.site_power_w is None else service.site_power_w
    return ServiceDemand(
        model,
        service.rate_per_s,
        shape.prompt,
        shape.output,
        parse_both_bounds(targets.ttft, targets.tpot, PERCENTILE),
        headroom=service.headroom,
        spare_replicas=service.spare_replicas,
        site_power_w=site_power_w,
        power_budget_w=service.power_budget_w,
        host_share=service.host_share,
        arrivals=shape.arrivals,
        options=ModelOptions.from_names(**formats, stack="engine"),
        seed=shape.seed,
        requests=service.requests,
        aim=service.minimise,
        prices=read_prices(chosen[PriceOptions]),
        machine=chosen[MachineOptions],
        force=chosen[SettingOptions].force,
    )


def _search_kinds(
    demand: ServiceDemand,
    chips: Sequence[Gpu],
    tried: SearchRange,
    tell: Tell | None,
    workers: int,
) -> PlanResult:
    """Search every kind of GPU, or raise what was found by the time of an interrupt."""
    searches = {chip.name: KindSearch(demand, chip, tell) for chip in chips}
    waiting = []
    for search in searches.values():
        if demand.aim is PlanAim.COST and _cost_of(demand.prices, search.gpu) is None:
            search.refuse(f"no price of the {search.gpu.name} was given: add it to --price.")
        else:
            waiting.append(search)
    plans_of_kind: dict[str, KindPlans] = {}
    try:
        if min(workers, len(waiting)) > 1:
            chips = [search.gpu for search in waiting]
            for kind in search_in_processes(
                demand,
                chips,
                tried,
                tell,
                workers,
            ):
                plans_of_kind[kind.gpu] = kind
        else:
            for search in waiting:
                search.search(tried)
    except KeyboardInterrupt as error:
        result = _collect_kinds(demand, searches, plans_of_kind)
        if not result.plans:
            raise
        raise PlanInterrupted(result) from error
    return _collect_kinds(demand, searches, plans_of_kind)


def _collect_kinds(
    demand: ServiceDemand,
    searches: Mapping[str, KindSearch],
    found: Mapping[str, KindPlans],
) -> PlanResult:
    """Return the plans of every kind: what other processes found, or a search of this process."""
    kinds = (found.get(name) or search.summarise() for name, search in searches.items())
    return PlanResult(demand, tuple(kinds))


def _cost_of(prices: Prices, chip: Gpu) -> float | None:
    """Return the cost of a joule and a second on a GPU, or None if it has no price."""
    return prices.cost(chip.name, 1.0, 1.0)


def _check_prices(demand: ServiceDemand, chips: Sequence[Gpu]) -> None:
    """Refuse to minimise what is not known of any GPU."""
    is_unpriced = all(_cost_of(demand.prices, chip) is None for chip in chips)
    if demand.aim is PlanAim.COST and is_unpriced:
        do = "Give --price or --electricity."
        raise bad_value("minimise", "a price to know the cost from", "none", do)
    if demand.aim is PlanAim.CARBON and demand.prices.carbon_g(1.0) is None:
        raise bad_value("minimise", "a carbon intensity", "none", "Give --carbon.")


def list_plan_notes(result: PlanResult) -> list[str]:
    """List what a plan assumes, beginning with its own model."""
    demand = result.demand
    is_interrupted = not result.is_complete
    gpu_notes = [
        *(["interrupted: these are the plans so far, and others may be better"] * is_interrupted),
        f"planned for {1.0 + demand.headroom:.0%} of the rate; {demand.spare_replicas} "
        "replicas to spare",
        f"{demand.arrivals} arrivals, {demand.requests} requests simulated for each "
        "answer; shared at random",
        "bounds without a percentile hold for 9 in 10 requests",
        "idle GPUs keep their clock; energy per token counts prompts and idle time, over "
        "output tokens",
        f"{result.screened} more options cannot be better, by arithmetic",
    ]
    if result.best.option.pools[0]:
        speed = units.show(TRANSFER_BYTE_PER_S, "byte/s")
        gpu_notes.append(
            "prompts and decoding on engines of their own; the cache of a prompt is sent "
            f"at {speed}"
        )
    if demand.rejection:
        gpu_notes.insert(0, demand.rejection)
    if any(
        kind_plan.option.clock_hz < float(kind_plan.option.gpu.clocks.max_hz)
        for kind_plan in result.plans
    ):
        gpu_notes.append(plan_options.INTERPOLATED)
    prices = demand.prices
    price_notes = list(prices.notes)
    is_priced = prices.per_j is not None or prices.carbon_g_per_j is not None
    if is_priced or demand.power_budget_w is not None:
        price_notes = [note for note in price_notes if note != BOARD_ENERGY]
        price_notes.append(
            f"energy at the meter: hosts, network and fans take {demand.host_share:.0%} of "
            "the GPUs' "
            f"energy (--host-share), PUE {prices.pue:g}"
        )
    drafting_notes = result.speculation.notes if result.speculation is not None else ()
    notes = [*gpu_notes, *result.best.result.assumptions, *drafting_notes, *price_notes]
    return list(dict.fromkeys(notes))
