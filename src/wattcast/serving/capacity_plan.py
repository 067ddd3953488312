"""Plan how many GPUs serve a language model under traffic: screened by arithmetic, decided by simulation.

An option is a kind of GPU, the GPUs of a replica (``tp``) and a power limit. Its capacity λ* is the largest rate of
one replica at which the simulated engine meets every latency bound; n = ⌈λ·(1 + headroom) / λ*⌉ replicas share the
rate λ, and energy, power and percentiles are those of a replica simulated at λ / n. The same draw of arrivals,
stretched in time, serves every rate and every option. Where time per output token binds, smaller steps are tried too.

Before anything is simulated, each option gets bounds that it cannot beat: requests a second and joules of a request
if every step were as full as it can be. Options are simulated in the order of their bounds until no bound is better
than the best plan found, so no option that was left out can be better than the plan returned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
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
from wattcast.serving.step_costs import StepCosts, tabulate_step_costs
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
REQUESTS = 500  # simulated for each answer
LIMIT_STEP_W = 5.0
RATE_STEPS = 7  # halvings of the range in which the capacity of a replica lies
BUSY_MOST = 0.97  # of the steps a replica could run: beyond, queues grow without a bound
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

    def draw(self, rate_per_s: float) -> Trace:
        """Draw the requests of one replica; another rate stretches the same arrivals."""
        return draw_trace(rate_per_s, self.prompt, self.output, self.arrivals, 0.0, self.requests, self.seed)


@dataclass(frozen=True)
class PlanOption:
    """One way to serve: a replica and its limits, with the bounds that arithmetic gives it."""

    gpu: Gpu
    costs: StepCosts
    power_limit_w: float
    most_per_s: float  # requests a second of a replica, at the very most
    least_j: float  # joules of a request on all GPUs of a replica, at the very least


@dataclass(frozen=True, eq=False)
class ServingPlan:
    """A number of replicas of an option, and what a simulation says of each."""

    option: PlanOption
    max_seqs: int  # a step may hold
    replicas: int
    capacity_per_s: float  # of one replica
    binds: str
    result: ServingResult  # of one replica at its share of the rate
    demand: ServiceDemand
    prices: Prices

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.option.costs.gpu_count

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
            "tp": self.option.costs.gpu_count,
            "power_limit_w": self.option.power_limit_w,
            "max_seqs": self.max_seqs,
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
    found for ``minimise``: gpus, energy, cost or carbon. The fewest GPUs are sought at the card's default limit. A
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
    return _search(demand, chips, aim, money, tuple(tp), limits_w)


def _search(
    demand: ServiceDemand,
    chips: Sequence[Gpu],
    aim: PlanAim,
    prices: Prices,
    tp: tuple[int, ...],
    limits_w: Sequence[float],
) -> PlanResult:
    """Simulate options in the order of their bounds until none can be better than the best."""
    options: list[PlanOption] = []
    refused: list[str] = []
    for chip in chips:
        own = _default_limits(chip)
        found, why = _list_options(demand, chip, tp, limits_w or (own[:1] if aim is PlanAim.GPUS else own))
        options += found
        refused += why
    options.sort(key=lambda option: _bound(demand, option, aim, prices))
    plans: list[ServingPlan] = []
    screened = 0
    for place, option in enumerate(options):
        if plans and _bound(demand, option, aim, prices) > min(_rank(p, aim) for p in plans):
            screened = len(options) - place
            break
        made = _size(demand, option, prices)
        if isinstance(made, str):
            refused.append(made)
        else:
            plans.append(made)
    if not plans:
        reasons = {re.sub(r"tp \d+|[\d.]+ GB", "", text): text for text in refused}  # of replicas of the most GPUs
        raise BadInput("this cannot be served as asked. " + " ".join(reasons.values()))
    plans.sort(key=lambda p: _rank(p, aim))
    return PlanResult(demand, aim, tuple(plans), tuple(dict.fromkeys(refused)), screened, prices)


def _list_options(
    demand: ServiceDemand, chip: Gpu, tp: tuple[int, ...], limits_w: Sequence[float]
) -> tuple[list[PlanOption], list[str]]:
    """Return every option of a GPU with its bounds, and a sentence for each replica size that cannot be."""
    node = chip.node or node_of_gpu(chip.name)
    trace = demand.draw(1.0)
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    prompt, output = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    found: list[PlanOption] = []
    refused = []
    for count in tp:
        if count > node.gpu_count:
            continue
        try:
            costs = tabulate_step_costs(
                demand.model, chip, replace(demand.options, tp=count), max_seqs=MOST_SEQUENCES[0],
                longest_context=longest,
            )  # fmt: skip
        except WattcastError as error:
            refused.append(f"{chip.name}, tp {count}: {str(error).rstrip('.')}.")
            continue
        if costs.cache_tokens < longest:
            refused.append(
                f"{chip.name}, tp {count}: the cache holds {costs.cache_tokens} tokens, a request {longest}."
            )
            continue
        governor = costs.limit_w / float(np.mean(chip.power.limit_w))  # the governor holds a share of the limit
        per_s, joules = _step_bounds(costs, prompt, output)
        for limit_w in limits_w:
            limited = replace(costs, limit_w=limit_w * governor)
            found.append(PlanOption(chip, limited, limit_w, per_s, joules * count))
    return found, refused


def _default_limits(chip: Gpu) -> list[float]:
    """Return power limits the card can be set to, in whole steps of its range."""
    top = float(np.mean(chip.power.limit_w))
    least = float(np.mean(chip.power.min_limit_w)) if chip.power.min_limit_w is not None else top
    shares = [round(top * share / LIMIT_STEP_W) * LIMIT_STEP_W for share in LIMIT_SHARES]
    return [watts for watts in shares if watts >= least] or [top]


def _step_bounds(costs: StepCosts, prompt: float, output: float) -> tuple[float, float]:
    """Return the most requests a second of a replica, and the least joules of a request on one of its GPUs.

    A step over T tokens costs at least a + b·T, where b is a token's cost in the largest step. A request has P prompt
    tokens and takes part in O - 1 decode steps, each shared by B sequences at most, so it costs at least
    a·(O - 1)/B + b·(P + O - 1) and its own attention.
    """
    sizes = np.arange(1, len(costs.tokens))[:, np.newaxis]
    per_token = costs.tokens[-1] / sizes[-1]
    per_step = np.maximum((costs.tokens[1:] - per_token * sizes).min(axis=0), 0.0)
    context = prompt + output / 2.0
    most = max(min(MOST_SEQUENCES[0], int(costs.cache_tokens / max(prompt, 1.0))), 1)
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
    gpus = _count_replicas(demand, option.most_per_s) * option.costs.gpu_count
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


def _size(demand: ServiceDemand, option: PlanOption, prices: Prices) -> ServingPlan | str:
    """Find the number of replicas; fewer sequences a step are tried while they raise what a bound on TPOT allows."""
    best: ServingPlan | str = ""
    for most in MOST_SEQUENCES:
        made = _size_for_batch(demand, option, most, prices)
        if isinstance(best, str) or (not isinstance(made, str) and made.capacity_per_s > 1.02 * best.capacity_per_s):
            best = made
        elif most != MOST_SEQUENCES[0]:
            break
        if "TPOT" not in (made if isinstance(made, str) else made.binds):
            break
    return best


def _size_for_batch(demand: ServiceDemand, option: PlanOption, most: int, prices: Prices) -> ServingPlan | str:
    """Find the capacity of a replica and the number of replicas; a sentence says why there is none."""
    settings = EngineSettings(max_seqs=most, seed=demand.seed)
    unit = demand.draw(1.0)

    def serve(rate_per_s: float) -> ServingResult:
        trace = replace(unit, arrival_s=unit.arrival_s / rate_per_s)
        return serve_trace(trace, option.costs, settings, prices=prices)

    def broken(result: ServingResult, rate_per_s: float) -> str:
        late = [bound for bound in demand.bounds if bound.measure(result) > bound.seconds]
        if late:
            return ", ".join(map(str, late))
        done = float(np.nanmax(result.last_token_s))
        alone_s = float(np.nanmin(result.latency_s))
        kept_up = float(unit.arrival_s[-1]) / rate_per_s >= BUSY_MOST * (done - 2.0 * alone_s)
        return "" if kept_up else "throughput"

    words = f"{option.gpu.name}, tp {option.costs.gpu_count}, {option.power_limit_w:.0f} W"
    high = option.most_per_s
    low = high / 512.0
    if failed := broken(serve(low), low):
        return f"{words}: {failed} cannot be met even by a single request."
    binds = "throughput"
    for _ in range(RATE_STEPS):
        middle = math.sqrt(low * high) if high > 4.0 * low else 0.5 * (low + high)
        failed = broken(serve(middle), middle)
        if failed:
            high, binds = middle, failed
        else:
            low = middle
    replicas = _count_replicas(demand, low)
    share = demand.rate_per_s / replicas
    if replicas == 1 and share < 0.3 * low:
        binds = "nothing: one replica is more than enough"
    result = serve(share)
    if late := broken(result, share):  # bursts of this very draw
        replicas += 1
        result, binds = serve(demand.rate_per_s / replicas), late
    made = ServingPlan(option, most, replicas, low, binds, result, demand, prices)
    if made.power_w > demand.site_power_w:
        return f"{words}: {units.show(made.power_w, 'W')} is over the site's {units.show(demand.site_power_w, 'W')}."
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
    notes = [*own, *result.best.option.costs.assumptions, *result.prices.notes]
    return list(dict.fromkeys(notes))


def print_plan(console: Console, result: PlanResult) -> None:
    """Print the best plan in a sentence, then what it gives, the runners-up, and what binds."""
    best, demand = result.best.row(), result.demand
    risk = f" ([yellow]{best['risk']}[/yellow])" if best["risk"] else ""
    console.print(
        f"[bold]{escape(demand.model.name)}[/bold] at {demand.rate_per_s:g} requests/s, "
        f"{demand.prompt} + {demand.output} tokens: [bold]{best['gpus']} x {escape(best['gpu'])}[/bold] "
        f"({best['replicas']} x tp {best['tp']}), power limit {best['power_limit_w']:.0f} W{risk}, "
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
        "gpu": "gpu", "gpus": "GPUs", "tp": "tp", "power_limit_w": "limit", "max_seqs": "most seqs",
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
