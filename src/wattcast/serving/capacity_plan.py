"""Plan how many GPUs serve a language model under traffic: screened by arithmetic, decided by
simulation.

A plan has the fewest replicas n of an option (``plan_options.py``) at which a simulated replica
meets every latency bound at λ·(1 + headroom) / n; energy, power and percentiles are those at λ / n.
The option with the best bound comes next, gets its second bound or is simulated, until no bound is
better than the best plans found. So no option that was left out can be better than the plan
returned."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from wattcast import __version__
from wattcast.core import BadInput, bad_value, check_names, dataclass, replace, units
from wattcast.core.arrays import pareto_front
from wattcast.hardware import Gpu
from wattcast.predictor.api import find_gpu
from wattcast.predictor.prediction_json import take_fields
from wattcast.predictor.prices import PriceKeywords, parse_prices
from wattcast.serving import plan_options
from wattcast.serving.plan_options import (
    PlanAim,
    PlanOption,
    SearchRange,
    ServiceDemand,
    StepTables,
)
from wattcast.serving.serving_result import ServingResult, parse_both_bounds
from wattcast.serving.simulate_serving import TRANSFER_BYTE_PER_S, find_language_model
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions

FEWER_TOKENS = (
    1024,
    512,
)  # tried too where time per token binds: shorter chunks of prompts hold up decoding less
POOLS = ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1))
RUNNERS_UP = 3  # plans that are wanted besides the best
GROWTH = (2, 5, 10)  # times the rate for which the GPUs are told


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
        """The largest rate that one replica serves within all bounds, and what breaks first if the
        rate grows.
        """
        high = min(self.failed_per_s, self.option.most_per_s)
        most_per_s, binds = plan_options.find_ceiling(
            self.demand, self.option, self.held_per_s, high, self.failed
        )
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
        """How far clock and power limit are from what was measured, where they are not the card's
        own.
        """
        return plan_options.describe_risk(self.demand, self.option, self.result)

    def holds_for(self, option: PlanOption) -> bool:
        """Whether an option with a smaller batch limit serves in the same way, since no step was
        full.
        """
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
    requests: int = plan_options.REQUESTS,
    **prices: Unpack[PriceKeywords],
) -> PlanResult:
    """Plan a service: ``rate`` such as ``20/s``, lengths as ``simulate`` takes them, latencies as
    ``p99:500ms``.

    The best of every kind of GPU, replicas of 1 to 8 GPUs as far as a node has them, power limits,
    clocks and batch limits is found for ``minimise``: gpus, energy, cost or carbon. The fewest GPUs
    are sought at the card's default limit and highest clock, unless ``site_power`` bounds the power
    of all GPUs. Pipeline stages (``pp``) are tried where a model does not fit into a node or its
    GPUs are joined by PCIe alone, and whole experts on each GPU (``ep``; more than ``tp``:
    data-parallel engines share them) beside shared ones. ``pools`` are engines that compute prompts
    and engines that decode in a replica, such as ``1:2``; some are tried where ``tpot`` is what
    binds engines that do both, and so are steps of fewer tokens (``max_batched_tokens``). What is
    tried may be a sequence, or text with commas between. A latency without a percentile is that of
    9 in 10 requests. ``requests`` are simulated for each answer."""
    check_names("objective", minimise, list(PlanAim))
    aim, money = PlanAim(minimise), parse_prices(**prices)
    formats = {
        "dtype": dtype,
        "quantization": quantization,
        "kv_dtype": kv_dtype,
        "weights": weights,
    }
    most_w = (
        math.inf
        if site_power is None
        else units.parse_amount(site_power, "W", "site_power", inclusive=False)
    )
    demand = ServiceDemand(
        find_language_model(model),
        units.parse_amount(rate, "/s", "rate", inclusive=False),
        prompt,
        output,
        parse_both_bounds(ttft, tpot, plan_options.PERCENTILE),
        headroom=units.parse_amount(headroom, "", "headroom"),
        spare_replicas=spare_replicas,
        site_power_w=most_w,
        arrivals=arrivals,
        options=ModelOptions.from_names(**formats, stack="engine"),
        seed=seed,
        requests=requests,
        aim=aim,
        prices=money,
    )
    if spare_replicas < 0:
        raise bad_value("spare_replicas", "zero or more", spare_replicas)
    chips = [find_gpu(name) for name in _list_items(gpu)]
    if aim is PlanAim.COST and all(money.cost(chip.name, 1.0, 1.0) is None for chip in chips):
        raise bad_value(
            "minimise", "a price to know the cost from", "none", "Give --price or --electricity."
        )
    if aim is PlanAim.CARBON and money.carbon_g(1.0) is None:
        raise bad_value("minimise", "a carbon intensity", "none", "Give --carbon.")
    tried = SearchRange(
        tp=_parse_counts(tp, "tp"),
        pp=_parse_counts(pp, "pp"),
        ep=_parse_counts(ep, "ep"),
        most_tokens=_parse_counts(max_batched_tokens, "max_batched_tokens"),
        limits_w=tuple(
            units.parse_amount(w, "W", "power_limit", inclusive=False)
            for w in _list_items(power_limits)
        ),
        clocks_hz=tuple(
            units.parse_amount(hz, "Hz", "clock", inclusive=False) for hz in _list_items(clocks)
        ),
        pools=tuple(map(_parse_pools, _list_items(pools))),
    )
    if max(tried.most_tokens, default=1) > plan_options.MOST_TOKENS[0]:
        raise bad_value(
            "max_batched_tokens", f"from 1 to {plan_options.MOST_TOKENS[0]}", max(tried.most_tokens)
        )
    tables: StepTables = {}
    found = _search_options(PlanResult(demand), chips, tried, tables)
    for more in ({"most_tokens": FEWER_TOKENS}, {"pools": POOLS}):
        late = demand.bounds_tokens and (not found.plans or "TPOT" in found.best.failed)
        if late and not any(getattr(tried, name) for name in more):
            found = _search_options(found, chips, replace(tried, **more), tables)
    if not found.plans:
        raise BadInput("this cannot be served as asked. " + " ".join(found.refused))
    return found


def _list_items(given: str | Sequence[Any] | None) -> Sequence[Any]:
    """Return what was given as a sequence, or as text with commas between."""
    return given.split(",") if isinstance(given, str) else given or ()


def _parse_counts(given: str | Sequence[int] | None, where: str) -> tuple[int, ...]:
    for item in _list_items(given):
        if not str(item).strip().isdecimal() or int(item) < 1:
            raise bad_value(where, "whole numbers from 1, such as 1,2,4", item)
    return tuple(map(int, _list_items(given)))


def _parse_pools(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d{1,2}):([1-9]\d?)\s*", text)
    if not found or (text.strip().startswith("0:") and text.strip() != "0:1"):
        raise bad_value(
            "pools",
            "engines for prompts and engines that decode, such as 1:2, or 0:1 for none",
            text,
        )
    return int(found[1]), int(found[2])


def _search_options(
    known: PlanResult, chips: Sequence[Gpu], tried: SearchRange, tables: StepTables
) -> PlanResult:
    """Simulate options in the order of their bounds until none can be better than the best, those
    known included.
    """
    demand, refused, screened = known.demand, [*known.refused], known.screened
    queue: list[tuple[tuple[float, float], int, PlanOption]] = []
    best = {
        made.option.key: made for made in known.plans
    }  # of each replica, whichever its settings
    sized: dict[Hashable, ServingPlan] = {}  # with a larger batch limit
    for chip in chips:
        found, why = plan_options.list_options(demand, chip, tried)
        refused += why
        queue += [
            (option.bound_rank(demand), len(queue) + i, option) for i, option in enumerate(found)
        ]
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
                refined = plan_options.tabulate_option(demand, option, tables)
                heapq.heappush(queue, (refined.bound_rank(demand), place, refined))
            elif made := size_option(demand, option, most if own is None else min(most, own.rank)):
                sized[like_key] = made
                best[option.key] = min(made, own or made, key=lambda one: one.rank)
        except BadInput as error:
            refused.append(str(error))
    same = r"(tp|pp|dp|ep) \d+( x |, )?|\d+ prefill \+ \d+ decode(, )?|[\d.]+ (GB|W|[MG]Hz)|\d+ tokens|(the|each) "
    refused = list(
        {re.sub(same, "", text): text for text in refused}.values()
    )  # of replicas of the most GPUs
    plans = sorted(best.values(), key=lambda made: made.rank)
    return PlanResult(demand, tuple(plans), tuple(refused), screened + len(queue))


def size_option(
    demand: ServiceDemand, option: PlanOption, most: tuple[float, float]
) -> ServingPlan | None:
    """Find the fewest replicas that keep all bounds; None where a plan would rank behind ``most``.

    Raises a sentence that says why no number of replicas does.
    """
    spare, peak_per_s = demand.spare_replicas, demand.rate_per_s * (1.0 + demand.headroom)
    option = plan_options.saturate_option(demand, option)

    def is_beaten(needed: int) -> bool:
        return option.bound_rank(demand, needed + spare) > most

    def attempt(needed: int) -> ServingPlan | str:
        results = []
        for rate_per_s in dict.fromkeys(
            (peak_per_s / needed, demand.rate_per_s / (needed + spare))
        ):
            result, failed = plan_options.serve_rate(demand, option, rate_per_s)
            if failed or result is None:
                return failed
            results.append(result)
        steps = [
            run.segments["decodes"] + run.segments["prompts"]
            for result in results
            for run in result.runs
        ]
        largest = int(max(count.max() for count in steps))
        return ServingPlan(
            option, needed + spare, peak_per_s / needed, results[-1], demand, largest
        )

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
            alone = plan_options.serve_rate(demand, option, 1e-3 * option.most_per_s)[1]
            if alone:
                raise BadInput(f"{option}: {alone} cannot be met even by a single request.")
        low, failed = needed, tried
        needed = (
            made.replicas - spare if made is not None else max(needed + 1, math.ceil(1.4 * needed))
        )
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
        own.append(
            f"prompts and decoding on engines of their own; the cache of a prompt is sent at {speed}"
        )
    notes = [*own, *result.best.result.assumptions, *demand.prices.notes]
    return list(dict.fromkeys(notes))
