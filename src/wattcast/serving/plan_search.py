"""Search the options of one kind of GPU for the plan that has least of what is asked.

An option (``plan_options.py``) has a bound that it cannot beat. The option with the best bound
comes next, gets its second bound or is simulated, until no bound is better than the best plans so
far. So no option that was left out can be better than the plan returned. Each kind of GPU is
searched as if it were the only one: what is best for it does not depend on what else was asked.

Three shortcuts save simulations. An option must beat the plans so far with so many replicas at
most; if it fails with as many, it is simulated no further. No setting serves a higher rate than the
highest clock without a power limit, so one failure of that settles all others. A step that never
filled its batch limit would have been the same under a lower one."""

from __future__ import annotations

import heapq
import math
import re
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from wattcast.core import BadInput, units
from wattcast.core.errors import WattcastError
from wattcast.hardware import Gpu
from wattcast.predictor.prediction_json import take_fields
from wattcast.serving.option_bounds import tabulate_option
from wattcast.serving.option_runs import (
    LONE_LOAD,
    RateRun,
    describe_risk,
    find_ceiling,
    run_at_rate,
    saturate_option,
    serve_rate,
)
from wattcast.serving.plan_coefficients import PLAN
from wattcast.serving.plan_options import (
    PlanOption,
    SearchRange,
    StepTables,
    list_options,
)
from wattcast.serving.service_demand import ServiceDemand
from wattcast.serving.serving_result import ServingResult

FEWER_TOKENS = tuple(int(count) for count in PLAN.fewer_tokens)
# Engines that compute prompts, and engines that decode, of a pair of pools that is tried.
POOLS = ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1))
# Layouts that are searched to the end besides the best one. There are none, since one more takes
# half again as long; what was sized on the way is listed after the best.
RUNNERS_UP = 0
GROWTH = (2, 5, 10)  # times the rate for which the GPUs are counted
_MORE_REPLICAS = 1.4  # over those that do not serve the rate: how fast the search goes up
PROGRESS_S = 1.0  # between two messages about the search

Rank = tuple[float, float]
UNBEATEN: Rank = (math.inf, math.inf)
Tell = Callable[[str], None]


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

    @cached_property
    def failed(self) -> str:
        """Which bounds break at the rate at which a replica was seen to fail; empty: none did."""
        if self.failed_per_s == math.inf:
            return ""
        return serve_rate(self.demand, self.option, self.failed_per_s)[1]

    @cached_property
    def ceiling(self) -> tuple[float, str]:
        """The largest rate that one replica serves within all bounds, and what breaks first."""
        high = min(self.failed_per_s, self.option.most_per_s)
        most_per_s, binds = find_ceiling(self.demand, self.option, self.held_per_s, high)
        if self.replicas == 1 and self.demand.rate_per_s < PLAN.idle_share * most_per_s:
            return most_per_s, "nothing: one replica is more than enough"
        return most_per_s, binds or self.failed or "throughput"

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
    def meter_power_w(self) -> float:
        """Mean power at the meter of the site: GPUs, hosts, network, fans and PUE."""
        return self.power_w * self.demand.meter_share

    @property
    def energy_j_per_request(self) -> float:
        """Joules of a request on all GPUs of its replica, idle time included."""
        return self.result.energy_j / self.result.requests

    @property
    def energy_j_per_token(self) -> float:
        """Joules of an output token."""
        return self.result.energy_j_per_token

    @property
    def rank(self) -> Rank:
        """What the demand minimises first, and what decides between equals."""
        return self.demand.rank_use(self.option.gpu.name, self.gpus, self.energy_j_per_request)

    @cached_property
    def risk(self) -> str | None:
        """How far clock and power limit are from what was measured, if not the card's own."""
        return describe_risk(self.demand, self.option, self.result)

    def holds_for(self, option: PlanOption) -> bool:
        """Whether an option with a smaller batch limit serves alike, since no step was full."""
        needed = self.peak_batch * option.shared.pp
        fits = needed <= option.max_seqs <= self.option.max_seqs
        no_bound_broke = self.failed_per_s > self.option.most_per_s
        return fits and no_bound_broke

    def make_row(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        option = self.option
        demand = self.demand
        each_j = self.energy_j_per_request
        capacity_per_s, binds = self.ceiling
        tokens = float(self.result.trace.output_tokens.mean())
        summary = self.result.summarise()
        cost = demand.find_cost(option.gpu.name, each_j, self.gpus / demand.rate_per_s)
        carbon = demand.find_carbon_g(each_j)
        return {
            "gpu": option.gpu.name,
            **take_fields(self, "gpus", "replicas"),
            **take_fields(
                option,
                "layout",
                "power_limit_w",
                "clock_hz",
                "setting",
                "max_seqs",
            ),
            **take_fields(
                option.shared,
                "tp",
                "pp",
                "dp",
                "ep",
            ),
            "prefill_engines": option.pools[0],
            "decode_engines": option.pools[1],
            "max_batched_tokens": option.settings.max_batched_tokens,
            "rate_per_replica_per_s": demand.rate_per_s / self.replicas,
            "capacity_per_replica_per_s": capacity_per_s,
            "load_share": demand.rate_per_s / self.replicas / capacity_per_s,
            "ttft_s": summary["ttft_s"],
            "tpot_s": summary["tpot_s"],
            "output_tokens_per_s": self.output_tokens_per_s,
            **take_fields(self, "power_w", "meter_power_w"),
            **take_fields(self, "energy_j_per_token", "energy_j_per_request"),
            "cost_per_request": cost,
            "cost_per_million_tokens": None if cost is None else cost * 1e6 / tokens,
            "carbon_g_per_request": carbon,
            "carbon_g_per_million_tokens": None if carbon is None else carbon * 1e6 / tokens,
            "growth": [self._grow(times) for times in GROWTH],
            "hall": None if demand.power_budget_w is None else fill_hall(self),
            "binds": binds,
            "risk": self.risk,
        }

    def _grow(self, times: int) -> dict[str, int]:
        """Return the GPUs that serve so many times the rate."""
        replicas = self.demand.count_replicas(self.capacity_per_s, times)
        return {"times": times, "gpus": replicas * self.option.gpus}


def fill_hall(plan: ServingPlan) -> dict[str, Any]:
    """Return what a hall of some power at its meter holds of a plan's replicas.

    Replicas are counted by the mean power at the planned load, and, as ``safe``, by the power limit
    of all their GPUs, which they draw together at the very most.
    """
    demand = plan.demand
    budget_w = demand.power_budget_w
    assert budget_w is not None, "asked for where there is a budget"
    replica_w = plan.meter_power_w / plan.replicas
    replicas = int(budget_w / replica_w)
    limit_w = plan.option.gpus * plan.option.power_limit_w * demand.meter_share
    safe = int(budget_w / limit_w)
    share_of_replica = 1.0 / plan.replicas
    return {
        "power_budget_w": budget_w,
        "replicas": replicas,
        "gpus": replicas * plan.option.gpus,
        "power_w": replicas * replica_w,
        "requests_per_s": replicas * demand.rate_per_s * share_of_replica,
        "output_tokens_per_s": replicas * plan.output_tokens_per_s * share_of_replica,
        "safe_gpus": safe * plan.option.gpus,
        "safe_output_tokens_per_s": safe * plan.output_tokens_per_s * share_of_replica,
    }


@dataclass(frozen=True)
class KindPlans:
    """The plans of one kind of GPU, best first, or why there is none."""

    gpu: str
    plans: tuple[ServingPlan, ...] = ()
    refused: tuple[str, ...] = ()  # a sentence for replicas that cannot serve
    screened: int = 0  # options that arithmetic left out
    is_complete: bool = True  # False: the search was interrupted

    @property
    def best(self) -> ServingPlan | None:
        """The plan that has least of what was asked, if any serves."""
        return self.plans[0] if self.plans else None

    @property
    def reason(self) -> str | None:
        """Why no plan serves, or None where one does."""
        if self.plans:
            return None
        if not self.is_complete:
            return "not searched to the end."
        return " ".join(self.refused) or "no option keeps to what was asked."


class KindSearch:
    """The state of a search: plans so far, and what simulations have shown of rates that fail."""

    def __init__(
        self,
        demand: ServiceDemand,
        gpu: Gpu,
        tell: Tell | None = None,
    ) -> None:
        self.demand = demand
        self.gpu = gpu
        self.tell = tell
        self.tables = StepTables()
        self.best: dict[Hashable, ServingPlan] = {}  # of each layout, whichever its settings
        self.refused: list[str] = []
        self.screened = 0
        self.trials = RateTrials(demand)
        self.is_complete = False
        self._sized: dict[Hashable, ServingPlan] = {}  # with a larger batch limit
        self._reported_s = time.monotonic()

    def search(self, tried: SearchRange) -> None:
        """Search all options; shorter steps and engines for prompts alone come if tokens are
        late.
        """
        self._search_range(tried)
        for more in ({"most_tokens": FEWER_TOKENS}, {"pools": POOLS}):
            plans = self.list_plans()
            is_late = not plans or "TPOT" in plans[0].failed
            is_free = not any(getattr(tried, name) for name in more)
            if self.demand.bounds_tokens and is_late and is_free and self.tables.predicted:
                self._search_range(replace(tried, **more))
        self.is_complete = True

    def refuse(self, reason: str) -> None:
        """End the search with a reason why this kind of GPU is not considered."""
        self.refused.append(reason)
        self.is_complete = True

    def list_plans(self) -> list[ServingPlan]:
        """Return the plans so far, best first."""
        return sorted(self.best.values(), key=lambda plan: plan.rank)

    def summarise(self) -> KindPlans:
        """Return what was found so far."""
        plans = tuple(self.list_plans())
        refused = tuple(merge_alike_reasons(self.refused))
        return KindPlans(
            self.gpu.name,
            plans,
            refused,
            self.screened,
            self.is_complete,
        )

    def _search_range(self, tried: SearchRange) -> None:
        """Simulate options in the order of their bounds until none can be better."""
        try:
            options, reasons = list_options(self.demand, self.gpu, tried, self.tables)
        except WattcastError as error:
            self.refused.append(str(error))
            return
        self.refused += reasons
        queue = [(one.bound_rank(self.demand), place, one) for place, one in enumerate(options)]
        heapq.heapify(queue)
        while queue:
            bound, place, option = queue[0]
            most = self._worst_wanted_rank()
            if bound > most:
                break
            heapq.heappop(queue)
            self._report_progress(len(queue))
            best_of_layout = self.best.get(option.key)
            if best_of_layout is not None:
                most = min(most, best_of_layout.rank)
            if bound > most or self._serves_alike(option) or self._is_settled(option, most):
                self.screened += 1
                continue
            try:
                if option.costs is None:
                    refined = tabulate_option(self.demand, option, self.tables)
                    heapq.heappush(queue, (refined.bound_rank(self.demand), place, refined))
                else:
                    self._try_option(option, most, tried)
            except BadInput as error:
                self.refused.append(str(error))
        self.screened += len(queue)

    def _worst_wanted_rank(self) -> Rank:
        """Return the rank that a further plan must beat to be wanted."""
        ranks = sorted(plan.rank for plan in self.best.values())
        return ranks[RUNNERS_UP] if len(ranks) > RUNNERS_UP else UNBEATEN

    def _serves_alike(self, option: PlanOption) -> bool:
        larger = self._sized.get(_key_of_limits(option))
        return larger is not None and larger.holds_for(option)

    def _is_settled(
        self,
        option: PlanOption,
        most: Rank,
    ) -> bool:
        """Whether as many replicas as could be useful were seen to fail, at this setting or a
        faster one.
        """
        useful = count_useful_replicas(self.demand, option, most)
        if useful is None:
            return False
        return useful == 0 or self.trials.is_settled(option, self.demand.peak_per_s / useful)

    def _try_option(
        self,
        option: PlanOption,
        most: Rank,
        tried: SearchRange,
    ) -> None:
        """Size an option, unless its replica fails at the fastest setting where it would have to
        hold.
        """
        useful = count_useful_replicas(self.demand, option, most)
        if useful == 0 or self._fails_at_fastest(option, useful, tried):
            self.screened += 1
            return
        plan = size_option(self.demand, option, most, self.trials)
        if plan is None:
            return
        self._sized[_key_of_limits(option)] = plan
        best_of_layout = self.best.get(option.key, plan)
        self.best[option.key] = min(plan, best_of_layout, key=lambda one: one.rank)

    def _fails_at_fastest(
        self,
        option: PlanOption,
        useful: int | None,
        tried: SearchRange,
    ) -> bool:
        """Whether the replica fails at its highest clock, without a power limit, where it has to
        serve.

        Without a limit, since the governor's swings may delay a token that a lower clock does not.
        """
        if useful and self.trials.has_served(option, self.demand.peak_per_s / useful):
            return False  # a setting that is no faster did, and so the fastest hardly fails
        settings = tried.list_settings(self.demand, self.gpu)
        clock_hz = max(clock for _, clock in settings)
        fastest = replace(
            option,
            power_limit_w=math.inf,
            clock_hz=clock_hz,
            costs=None,
        )
        fastest = tabulate_option(self.demand, fastest, self.tables)
        if useful is None:
            rate_per_s = LONE_LOAD * fastest.most_per_s
        else:
            rate_per_s = self.demand.peak_per_s / useful
        return self.trials.fails_at(fastest, rate_per_s)

    def _report_progress(self, waiting: int) -> None:
        """Say how far the search is, once a second."""
        now_s = time.monotonic()
        if self.tell is None or now_s - self._reported_s < PROGRESS_S:
            return
        self._reported_s = now_s
        plans = self.list_plans()
        so_far = f"best so far {plans[0].gpus} GPUs" if plans else "none serves yet"
        self.tell(
            f"{self.gpu.name}: {self.trials.simulated} simulated, {waiting} options left, {so_far}"
        )


@dataclass(frozen=True)
class FailedRate:
    """A rate at which a replica broke a bound, at a power limit and a highest clock."""

    power_limit_w: float
    clock_hz: float
    rate_per_s: float
    is_governed: bool  # the power limit may have lowered the clock

    def settles(
        self,
        option: PlanOption,
        rate_per_s: float,
    ) -> bool:
        """Whether an option as fast or slower must break it too at a rate as high or higher."""
        if rate_per_s < self.rate_per_s or option.power_limit_w > self.power_limit_w:
            return False
        if self.is_governed:  # a lower clock may swing less and do better
            return option.clock_hz == self.clock_hz
        return option.clock_hz <= self.clock_hz


@dataclass(frozen=True)
class LimitedRun:
    """A run of engines that compute so many requests at once at most."""

    limit: int
    run: RateRun


class RateTrials:
    """The rates that replicas were seen to serve or to fail at, so that little is simulated
    twice.
    """

    def __init__(self, demand: ServiceDemand) -> None:
        self.demand = demand
        self.simulated = 0
        self._failed: dict[Hashable, list[FailedRate]] = {}
        self._largest: dict[Hashable, int] = {}  # sequences of a step, of rates that were served
        self._served_per_s: dict[Hashable, float] = {}  # the highest rate, by layout
        # brief and whole runs, by all but the batch limit: the limit of an engine, and the run
        self._brief: dict[Hashable, list[LimitedRun]] = {}
        self._whole: dict[Hashable, list[LimitedRun]] = {}

    def fails_at(
        self,
        option: PlanOption,
        rate_per_s: float,
    ) -> bool:
        """Say whether a replica breaks a bound at a rate, by a run that ends as soon as it is
        sure.
        """
        if rate_per_s > option.most_per_s * (1.0 + 1e-9) or self.is_settled(option, rate_per_s):
            return True
        key = self._key_of_run(option, rate_per_s)
        if key in self._largest:
            return False
        run = self._run_once(self._brief, option, rate_per_s, is_brief=True)
        if run.broken:
            setting = option.power_limit_w, option.clock_hz
            is_governed = option.costs is not None and option.costs.count_governed_clocks() > 1
            failures = self._failed.setdefault(self._key_of_group(option), [])
            failures.append(FailedRate(*setting, rate_per_s, is_governed))
            return True
        self._largest[key] = run.largest_batch
        layout = option.key, option.max_tokens
        self._served_per_s[layout] = max(rate_per_s, self._served_per_s.get(layout, 0.0))
        return False

    def has_served(
        self,
        option: PlanOption,
        rate_per_s: float,
    ) -> bool:
        """Say whether a replica of this layout was seen to serve a rate, at any setting."""
        return self._served_per_s.get((option.key, option.max_tokens), 0.0) >= rate_per_s

    def serve(
        self,
        option: PlanOption,
        rate_per_s: float,
    ) -> RateRun:
        """Simulate a replica to the end of the run."""
        return self._run_once(self._whole, option, rate_per_s, is_brief=False)

    def _run_once(
        self,
        runs: dict[Hashable, list[LimitedRun]],
        option: PlanOption,
        rate_per_s: float,
        is_brief: bool,
    ) -> RateRun:
        """Simulate a replica, or take a run with a larger batch limit that it never reached."""
        stages = option.costs.stages if option.costs is not None else 1
        limit = max(option.max_seqs // stages, 1)
        setting = option.power_limit_w, option.clock_hz
        key = (option.key, option.settings.max_batched_tokens, setting, rate_per_s)
        alike = runs.setdefault(key, [])
        for larger in alike:
            if limit <= larger.limit and larger.run.holds_for_limit(limit, self.demand):
                return larger.run
        run = run_at_rate(self.demand, option, rate_per_s, is_brief=is_brief)
        self.simulated += is_brief
        # of a brief run the verdict is enough, and a result holds every step
        alike.append(LimitedRun(limit, replace(run, result=None) if is_brief else run))
        return run

    def is_settled(
        self,
        option: PlanOption,
        rate_per_s: float,
    ) -> bool:
        """Whether a run that was simulated shows that an option breaks bounds at a rate."""
        failures = self._failed.get(self._key_of_group(option), ())
        return any(failure.settles(option, rate_per_s) for failure in failures)

    def largest_batch(
        self,
        option: PlanOption,
        rate_per_s: float,
    ) -> int:
        """Return the sequences of the largest step of a run that broke no bound."""
        return self._largest[self._key_of_run(option, rate_per_s)]

    @staticmethod
    def _key_of_group(option: PlanOption) -> Hashable:
        return (option.key, option.max_seqs, option.max_tokens)

    def _key_of_run(
        self,
        option: PlanOption,
        rate_per_s: float,
    ) -> Hashable:
        setting = option.power_limit_w, option.clock_hz
        return (self._key_of_group(option), setting, rate_per_s)


def _key_of_limits(option: PlanOption) -> Hashable:
    return (option.key, option.setting, option.max_tokens)


def merge_alike_reasons(reasons: list[str]) -> list[str]:
    """Return one reason of those that differ in nothing but layout, setting and amounts."""
    numbers = (
        r"(tp|pp|dp|ep) \d+( x |, )?|\d+ prefill \+ \d+ decode(, )?"
        r"|[\d.]+ ([GM]B|W|[MG]Hz|m?s)\b|\d+ tokens|(the|each) "
    )
    first: dict[str, str] = {}
    for text in reasons:
        first.setdefault(re.sub(numbers, "", text), text)
    return list(first.values())


def count_useful_replicas(
    demand: ServiceDemand,
    option: PlanOption,
    most: Rank,
) -> int | None:
    """Return the most replicas, spares left out, whose bound is not behind ``most``; 0 if none.

    None: any number may be useful.
    """
    spare = demand.spare_replicas

    def is_behind(count: int) -> bool:
        return option.bound_rank(demand, count + spare) > most

    least = demand.count_replicas(option.most_per_s) - spare
    if is_behind(least):
        return 0
    most_count = least
    while not is_behind(2 * most_count):
        most_count *= 2
        if most_count > 1 << 24:
            return None
    # behind at ``high``
    low = most_count
    high = 2 * most_count
    while high - low > 1:
        middle = (low + high) // 2
        if is_behind(middle):
            high = middle
        else:
            low = middle
    return low


def size_option(
    demand: ServiceDemand,
    option: PlanOption,
    most: Rank,
    trials: RateTrials | None = None,
) -> ServingPlan | None:
    """Find the fewest replicas that keep all bounds; None where a plan would rank behind ``most``.

    Raises a sentence that says why no number of replicas does.
    """
    trials = trials or RateTrials(demand)
    useful = count_useful_replicas(demand, option, most)
    if useful == 0:
        return None
    fewest_per_s = None if useful is None else demand.peak_per_s / useful
    if fewest_per_s is not None and trials.fails_at(option, fewest_per_s):
        return None
    option = saturate_option(demand, option)
    low = demand.count_replicas(option.most_per_s) - demand.spare_replicas - 1  # too few
    if useful is not None and useful <= low:
        return None
    plan = _find_fewest_replicas(
        demand,
        option,
        low,
        useful,
        trials,
    )
    if plan.power_w > demand.site_power_w:
        drawn = units.show(plan.power_w, "W")
        limit = units.show(demand.site_power_w, "W")
        raise BadInput(f"{option}: {drawn} is over the site's {limit}.")
    return plan


def _find_fewest_replicas(
    demand: ServiceDemand,
    option: PlanOption,
    low: int,
    useful: int | None,
    trials: RateTrials,
) -> ServingPlan:
    """Return the plan of the fewest replicas above ``low``, which are too few, that serve.

    ``useful`` are enough, if it is known. The number is exact up to 200 replicas, and within 1 %
    beyond. The largest rate is simulated for each number, the rate without headroom at the end.
    """
    enough = useful
    has_failed = False
    needed = low + 1
    while True:
        while enough is None or enough - low > max(1, low // 100):
            if has_failed and enough is not None:
                needed = (low + enough) // 2
            if not trials.fails_at(option, demand.peak_per_s / needed):
                enough = needed
                continue
            if not has_failed and useful is None:
                _check_alone(option, trials)
            has_failed = True
            low = needed
            needed = max(needed + 1, math.ceil(_MORE_REPLICAS * needed))
        plan = _serve_share(demand, option, enough, trials)
        if plan is not None:
            failed_per_s = demand.peak_per_s / low if has_failed else math.inf
            return replace(plan, failed_per_s=failed_per_s)
        # more requests in a second were served, so this is luck of a draw: one replica more
        has_failed = True
        low = enough
        needed = low + 1
        enough = None


def _serve_share(
    demand: ServiceDemand,
    option: PlanOption,
    needed: int,
    trials: RateTrials,
) -> ServingPlan | None:
    """Simulate a replica at its share of the rate without headroom; None where it breaks a
    bound.
    """
    replicas = needed + demand.spare_replicas
    peak_per_s = demand.peak_per_s / needed
    if trials.fails_at(option, peak_per_s):  # not simulated yet if nothing less could do
        return None
    run = trials.serve(option, demand.rate_per_s / replicas)
    if run.broken or run.result is None:
        return None
    largest = max(trials.largest_batch(option, peak_per_s), run.largest_batch)
    return ServingPlan(
        option,
        replicas,
        peak_per_s,
        run.result,
        demand,
        largest,
    )


def _check_alone(option: PlanOption, trials: RateTrials) -> None:
    """Raise a sentence if even a single request breaks a bound."""
    lone_per_s = LONE_LOAD * option.most_per_s
    if trials.fails_at(option, lone_per_s):
        broken = serve_rate(trials.demand, option, lone_per_s)[1]
        raise BadInput(f"{option}: {broken} cannot be met even by a single request.")
