"""Plan how many GPUs serve a language model, in a steady state without queues.

A replica (``tp`` GPUs) holds B sequences. A decode step at the mean context takes d(B) and yields a token for each
sequence; a request needs one prefill, t_p, and O - 1 steps. Prefills run between steps. So a replica that always has
B sequences serves

    r(B) = 1 / (t_p + (O - 1)·d(B)/B)                                   requests per second
    TPOT = d(B) + t_p·B/(O - 1)      a step, and the prefills that fall between two of them
    TTFT = d(B) + t_p                wait for the running step, then the prefill

By Little's law [Little1961] the B that a rate r sustains satisfies r(B) = r, the same equation. n replicas share the
rate λ evenly, at the smallest batch that carries λ/n; where even B = 1 is more than enough, they idle for the rest of
the time. Arrivals are even: bursts, and queues behind them, are not modelled; ``headroom`` plans for a higher rate
than is served on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.markup import escape

from wattcast import __version__
from wattcast.core import units
from wattcast.core.arrays import Array, as_sweep
from wattcast.core.errors import BadInput, WattcastError, bad_value, unknown_name
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.power.activity import Activity, ActivitySource
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import find_governed_point
from wattcast.predictor.pipeline import analyse_graph, total_at_clock
from wattcast.predictor.prices import Prices
from wattcast.report.figure_style import SERIES_COLOURS, add_caption, new_figure
from wattcast.report.text_tables import print_notes, print_rows
from wattcast.workload.build_model import build_graph, compute_footprint
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import ModelKind, ModelSpec
from wattcast.workload.model_options import ModelOptions, WorkloadPhase
from wattcast.workload.readers import load_workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

CLOCK_COUNT = 28  # tried on each GPU, evenly over its range
MOST_BATCH = 1024
TENSOR_PARALLEL = (1, 2, 4, 8)


class PlanAim(StrEnum):
    """Name what the plan has least of; energy decides between equals."""

    GPUS = "gpus"
    ENERGY = "energy"
    COST = "cost"


@dataclass(frozen=True)
class ServiceDemand:
    """Describe what is to be served."""

    model: ModelSpec
    rate_per_s: float
    prompt: int
    output: int
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    headroom: float = 0.0
    options: ModelOptions = field(default_factory=ModelOptions)  # dtype, attention, stack
    host_s: float = 0.0  # host time per operator

    @property
    def steps(self) -> int:
        """Count the decode steps of a request; the prefill yields the first token."""
        return self.output - 1

    def build_graph(self, phase: WorkloadPhase, batch: int, tp: int) -> Graph:
        """Build the prefill of ``batch`` prompts, or a decode step at the mean context."""
        seq = self.prompt if phase is WorkloadPhase.PREFILL else self.prompt + self.steps // 2
        return build_graph(self.model, replace(self.options, phase=phase, batch=batch, seq=max(seq, 1), tp=tp))

    def memory_byte(self, batch: int, tp: int) -> float:
        """Return the bytes one GPU needs when ``batch`` sequences are as long as they get."""
        longest = replace(
            self.options, phase=WorkloadPhase.DECODE, batch=batch, seq=max(self.prompt + self.output - 1, 1), tp=tp
        )
        return max(
            float(compute_footprint(self.model, longest).total_byte),
            self.build_graph(WorkloadPhase.PREFILL, 1, tp).memory_byte or 0.0,
        )


@dataclass(frozen=True)
class ServingPlan:
    """Hold one way to serve on one kind of GPU, or why it cannot."""

    gpu: str
    row: dict[str, Any]  # columns; empty where it cannot be
    binds: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Replica:
    """Hold the behaviour of a replica over batches and clocks, ``(batch, clock)`` where nothing else is noted."""

    gpu: Gpu
    tp: int
    batch: npt.NDArray[np.int64]  # (batch,)
    clock_hz: Array  # (clock,) asked
    fits: npt.NDArray[np.bool_]  # (batch,)
    memory_byte: Array  # (batch,)
    prefill_s: Array  # (clock,)
    prefill_w: Array  # (clock,)
    step_s: Array
    step_w: Array
    idle_w: Array  # (clock,)
    notes: tuple[str, ...]


def plan(
    model: str,
    rate: str,
    prompt: int,
    output: int,
    gpus: str | Sequence[str],
    *,
    ttft: str | None = None,
    tpot: str | None = None,
    minimise: str = "gpus",
    headroom: str = "0%",
    tp: Sequence[int] = (),
    power_limit: str | None = None,
    host_launch: str = "0us",
    dtype: str = "bf16",
    attention: str = "flash",
    stack: str = "engine",
    prices: Prices = Prices(),  # noqa: B008  (frozen)
) -> list[ServingPlan]:
    """Return how many GPUs serve a model, with batch, clock, energy and cost; one plan per GPU, best first.

    >>> import wattcast
    >>> best = wattcast.plan("llama3-8b", "20/s", prompt=1000, output=300, gpus="h200,l4", tpot="40ms")[0]
    >>> best.row["gpus"] >= 1
    True
    """
    words = {"dtype": dtype, "attention": attention, "stack": stack}
    asked = describe_service(model, rate, prompt, output, ttft, tpot, headroom, host_launch, **words)
    return plan_serving(asked, gpus.split(",") if isinstance(gpus, str) else gpus, prices, minimise, tp, power_limit)


def plan_serving(
    service: ServiceDemand,
    gpus: Sequence[str],
    prices: Prices = Prices(),  # noqa: B008  (frozen)
    minimise: str = "gpus",
    tp: Sequence[int] = (),
    power_limit: str | None = None,
) -> list[ServingPlan]:
    """Return the best plan on each GPU, best first; the error says what binds where none can serve."""
    if minimise not in list(PlanAim):
        raise unknown_name("objective", minimise, list(PlanAim), f"Known: {', '.join(PlanAim)}.")
    aim = PlanAim(minimise)
    chips = [find_gpu(name.strip()) for name in gpus]
    if aim is PlanAim.COST and all(prices.cost(chip.name, 1.0, 1.0) is None for chip in chips):
        raise bad_value("minimise", "a --tariff or a --price to know the cost from", "neither")
    limit_w = None if power_limit is None else units.parse(power_limit, "W", "power_limit")
    plans = [_best(service, chip, prices, aim, tuple(tp), limit_w) for chip in chips]
    if not any(found.row for found in plans):
        raise BadInput("this cannot be served as asked. " + " ".join(f"{p.gpu}: {p.binds}." for p in plans))
    return sorted(plans, key=lambda found: (not found.row, _rank(found.row, aim) if found.row else (0.0,)))


def describe_service(
    model: str,
    rate: str,
    prompt: int,
    output: int,
    ttft: str | None = None,
    tpot: str | None = None,
    headroom: str = "0%",
    host_launch: str = "0us",
    **options: Any,
) -> ServiceDemand:
    """Parse a service in the words of the command line: ``rate="20/s"``, ``ttft="500ms"``."""
    found = load_workload.find_model(model)
    if found is None or found.kind is not ModelKind.LANGUAGE:
        raise bad_value("model", "a language model", model, "`wattcast models` lists them.")
    for name, value in (("prompt", prompt), ("output", output)):
        if isinstance(value, bool) or not 1 <= value < 1 << 24:
            raise bad_value(name, "from 1 to 16,777,215 tokens", value)
    rate_per_s = units.parse(rate, "/s", "rate")
    limits = [
        math.inf if text is None else units.parse(text, "s", name) for name, text in (("ttft", ttft), ("tpot", tpot))
    ]
    if not headroom.strip().endswith("%"):
        raise bad_value("headroom", "a share with its unit, such as 20%", headroom)
    spare, host_s = units.parse(headroom, "", "headroom"), units.parse(host_launch, "s", "host_launch")
    if not rate_per_s > 0 or min(limits) <= 0 or spare < 0 or host_s < 0:
        raise BadInput("rate, ttft and tpot are above zero, headroom and host_launch zero or more.")
    chosen = ModelOptions.from_names(**{"stack": "engine", **options})
    return ServiceDemand(found, rate_per_s, prompt, output, limits[0], limits[1], spare, chosen, host_s)


def _best(
    asked: ServiceDemand, gpu: Gpu, prices: Prices, aim: PlanAim, tp: tuple[int, ...], limit_w: float | None
) -> ServingPlan:
    """Return the best plan on one GPU, with the fewest GPUs a replica that can serve, or those asked for."""
    why = []
    for count in tp or TENSOR_PARALLEL:
        try:
            replica = _replica(asked, gpu, count, limit_w)
        except WattcastError as error:
            why.append(f"tp {count}: {str(error).rstrip('.')}")
            continue
        found = _chosen(asked, replica, prices, aim)
        if found.row:
            return found
        why.append(f"tp {count}: {found.binds}")
    return ServingPlan(gpu.name, {}, "; ".join(dict.fromkeys(why)))


def _replica(asked: ServiceDemand, gpu: Gpu, tp: int, limit_w: float | None) -> _Replica:
    bundle = bundle_for(gpu)
    bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=asked.host_s, engine_replays=False))
    capacity = float(gpu.memory.capacity_byte)
    powers = [1 << k for k in range(MOST_BATCH.bit_length())]
    batches = sorted({b for p in powers for b in (p, p + p // 2) if b <= MOST_BATCH})  # 1, 2, 3, 4, 6, 8, 12 ...
    memory = [asked.memory_byte(batch, tp) for batch in batches]  # too large ones too, to tell what binds
    clock_hz = list_plan_clocks(gpu)
    at = OperatingPoint(clock_hz=as_sweep(clock_hz), power_limit_w=limit_w)
    prefill_s, prefill_w, notes = _ran(asked.build_graph(WorkloadPhase.PREFILL, 1, tp), gpu, at, bundle)
    steps = [_ran(asked.build_graph(WorkloadPhase.DECODE, batch, tp), gpu, at, bundle) for batch in batches]
    return _Replica(
        gpu=gpu,
        tp=tp,
        batch=np.array(batches),
        clock_hz=clock_hz,
        fits=np.array(memory) <= capacity,
        memory_byte=np.array(memory),
        prefill_s=prefill_s,
        prefill_w=prefill_w,
        step_s=np.array([step[0] for step in steps]),
        step_w=np.array([step[1] for step in steps]),
        idle_w=idle_power_w(bundle, clock_hz),
        notes=tuple(dict.fromkeys([*notes, *steps[0][2], *bundle.assumptions])),
    )


def _ran(graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> tuple[Array, Array, tuple[str, ...]]:
    """Return latency and mean power at each clock, as far as the power limit allows."""
    timeline = analyse_graph(graph, gpu, bundle)
    settled = find_governed_point(timeline, gpu, at, bundle)
    totals = total_at_clock(timeline, settled.at, bundle)
    shape = settled.clock_hz.shape[:-1]
    return np.broadcast_to(totals.latency_s, shape), np.broadcast_to(totals.power_w, shape), graph.assumptions


def idle_power_w(bundle: Bundle, clock_hz: Array) -> Array:
    """Return what a GPU draws with a context open and no work, at each set clock, in W."""
    events = bundle.power.required_events
    shape = (clock_hz.size, 1)
    nothing = Activity(
        np.ones(shape),
        np.zeros((*shape, len(events))),
        events,
        OperatingPoint(clock_hz=as_sweep(clock_hz)),
        ActivitySource.PREDICTED,
    )
    return np.asarray(bundle.power.power(nothing).total_w[..., 0])


def list_plan_clocks(gpu: Gpu) -> Array:
    """List clocks the card can be set to, evenly over its range."""
    high = float(gpu.clocks.max_hz)
    low = float(gpu.clocks.min_hz) if gpu.clocks.min_hz is not None else 0.3 * high
    even = np.linspace(low, high, CLOCK_COUNT)
    if gpu.clocks.step_hz is not None:
        step = float(gpu.clocks.step_hz)
        even = high - step * np.round((high - even) / step)
    return np.unique(np.clip(even, low, high))


def _chosen(asked: ServiceDemand, replica: _Replica, prices: Prices, aim: PlanAim) -> ServingPlan:
    rate, ok = _rates(asked, replica)
    allowed = np.logical_and.reduce(list(ok.values()))
    if not allowed.any():
        return ServingPlan(replica.gpu.name, {}, _why_not(asked, replica, ok))
    rows = []
    for clock in np.flatnonzero(allowed.any(axis=0)):
        usable = np.flatnonzero(allowed[:, clock])
        most = rate[usable, clock].max()
        replicas = max(math.ceil(asked.rate_per_s * (1 + asked.headroom) / most - 1e-9), 1)
        carries = usable[rate[usable, clock] >= asked.rate_per_s / replicas * (1 - 1e-12)]
        rows.append(_row(asked, replica, int(carries[0]), int(clock), replicas, prices))
    best = min(rows, key=lambda row: _rank(row, aim))
    return ServingPlan(replica.gpu.name, best, _binds(asked, best, rate, ok), replica.notes)


def _rates(asked: ServiceDemand, replica: _Replica) -> tuple[Array, dict[str, npt.NDArray[np.bool_]]]:
    """Return requests per second of a replica, and which constraint each batch and clock meets."""
    batch = replica.batch[:, np.newaxis]
    rate = 1.0 / (replica.prefill_s + asked.steps * replica.step_s / batch)
    ok = {
        "memory": np.broadcast_to(replica.fits[:, np.newaxis], rate.shape),
        "TTFT": replica.step_s + replica.prefill_s <= asked.ttft_s,
        "TPOT": tpot_s(asked, replica.step_s, replica.prefill_s, batch) <= asked.tpot_s,
    }
    return rate, ok


def tpot_s(asked: ServiceDemand, step_s: Array, prefill_s: Array, batch: npt.NDArray[Any]) -> Array:
    """Return time per output token after the first: a step, and its share of other requests' prefills."""
    return step_s + prefill_s * batch / asked.steps if asked.steps else np.zeros(np.shape(step_s))


def _row(asked: ServiceDemand, replica: _Replica, b: int, c: int, replicas: int, prices: Prices) -> dict[str, Any]:
    batch = int(replica.batch[b])
    each_per_s = asked.rate_per_s / replicas
    prefill_s, step_s = float(replica.prefill_s[c]), float(replica.step_s[b, c])
    prefill = each_per_s * prefill_s
    decode = each_per_s * asked.steps * step_s / batch
    idle = max(1.0 - prefill - decode, 0.0)
    power_w = float(prefill * replica.prefill_w[c] + decode * replica.step_w[b, c] + idle * replica.idle_w[c])
    gpus = replicas * replica.tp
    energy_j = gpus * power_w / asked.rate_per_s
    cost = prices.cost(replica.gpu.name, energy_j, gpus / asked.rate_per_s)
    carbon_g = prices.carbon_g(energy_j)
    return {
        "gpu": replica.gpu.name,
        "gpus": gpus,
        "replicas": replicas,
        "tp": replica.tp,
        "batch": batch,
        "clock_hz": float(replica.clock_hz[c]),
        "power_limit_w": max(
            float(math.ceil(max(replica.prefill_w[c], replica.step_w[b, c]))),
            float(replica.gpu.power.min_limit_w or 0.0),
        ),
        "ttft_s": step_s + prefill_s,
        "tpot_s": float(tpot_s(asked, np.array(step_s), np.array(prefill_s), np.array(batch))),
        "prefill_share": prefill,
        "decode_share": decode,
        "idle_share": idle,
        "power_w_per_gpu": power_w,
        "power_w": gpus * power_w,
        "memory_byte": float(replica.memory_byte[b]),
        "energy_j_per_request": energy_j,
        "energy_j_per_token": energy_j / asked.output,
        "cost_per_request": cost,
        "cost_per_million_tokens": None if cost is None else cost / asked.output * 1e6,
        "carbon_g_per_request": carbon_g,
        "carbon_g_per_million_tokens": None if carbon_g is None else carbon_g / asked.output * 1e6,
    }


def _rank(row: dict[str, Any], aim: PlanAim) -> tuple[float, ...]:
    energy_j = row["energy_j_per_request"]
    if aim is PlanAim.GPUS:
        return row["gpus"], energy_j
    if aim is PlanAim.COST:
        return (math.inf if row["cost_per_request"] is None else row["cost_per_request"]), energy_j
    return energy_j, row["gpus"]


def _binds(asked: ServiceDemand, row: dict[str, Any], rate: Array, ok: dict[str, npt.NDArray[np.bool_]]) -> str:
    """Say what keeps one replica fewer from being enough: constraints that alone stand in the way."""
    if row["replicas"] == 1:
        return f"nothing: one replica carries the rate, idle for {row['idle_share']:.0%} of the time"
    wanted = rate >= asked.rate_per_s * (1 + asked.headroom) / (row["replicas"] - 1) * (1 - 1e-12)
    if np.logical_and.reduce([wanted, *ok.values()]).any():
        return "the aim: fewer GPUs would do, at more energy or cost"
    if not wanted.any():
        return f"throughput: no batch up to {MOST_BATCH} serves more"
    alone = [
        name
        for name in ok
        if np.logical_and.reduce([wanted, *(held for other, held in ok.items() if other != name)]).any()
    ]
    return " or ".join(alone) + (": without it fewer GPUs would do" if alone else "several constraints together")


def _why_not(asked: ServiceDemand, replica: _Replica, ok: dict[str, npt.NDArray[np.bool_]]) -> str:
    """Say why no batch and clock will do: the least that can be had of what is too much."""
    if not ok["memory"].any():
        needs, has = replica.memory_byte[0], float(replica.gpu.memory.capacity_byte)
        return f"memory: one sequence needs {units.show(needs, 'byte')} of {units.show(has, 'byte')} a GPU"
    least = {
        "TTFT": (float((replica.step_s + replica.prefill_s)[replica.fits].min()), asked.ttft_s),
        "TPOT": (
            float(tpot_s(asked, replica.step_s, replica.prefill_s, replica.batch[:, np.newaxis])[replica.fits].min()),
            asked.tpot_s,
        ),
    }
    said = [f"{n}: at least {units.show(v, 's')}, asked {units.show(m, 's')}" for n, (v, m) in least.items() if v > m]
    return ", ".join(said) or "TTFT and TPOT: each can be met, not both at one batch and clock"


def parse_whole_numbers(text: str | None, where: str) -> tuple[int, ...]:
    """Parse ``1,2,4``; None gives no numbers."""
    if text is None:
        return ()
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isascii() and piece.isdigit() and 1 <= int(piece) <= 1024 for piece in pieces):
        raise bad_value(where, "whole numbers from 1 to 1024 with commas", text)
    return tuple(int(piece) for piece in pieces)


def plans_json(asked: ServiceDemand, found: Sequence[ServingPlan], prices: Prices) -> dict[str, Any]:
    """Return plans as plain mappings, best first; a GPU that cannot serve has what binds and no numbers."""
    return {
        "wattcast": __version__,
        "model": asked.model.name,
        "rate_per_s": asked.rate_per_s,
        "prompt": asked.prompt,
        "output": asked.output,
        "ttft_s": asked.ttft_s if math.isfinite(asked.ttft_s) else None,
        "tpot_s": asked.tpot_s if math.isfinite(asked.tpot_s) else None,
        "headroom": asked.headroom,
        "currency": prices.currency or None,
        "plans": [{"gpu": plan.gpu, **plan.row, "served": bool(plan.row), "binds": plan.binds} for plan in found],
        "assumptions": list_plan_notes(asked, found, prices),
    }


def list_plan_notes(asked: ServiceDemand, found: Sequence[ServingPlan], prices: Prices) -> list[str]:
    """List what a plan assumes, beginning with its own model."""
    own = [
        "steady state: requests come evenly, no queues; add --headroom for bursts",
        f"prefills one at a time between decode steps; decode at the mean context, "
        f"{asked.prompt + asked.steps // 2} tokens",
        "idle GPUs keep their clock; energy per token counts prefill and idle, over output tokens",
        f"host: {units.show(asked.host_s, 's')} to issue an operator{' (CUDA graphs)' if asked.host_s == 0 else ''}",
        f"a replica has the fewest GPUs that can serve; batches tried up to {MOST_BATCH}",
    ]
    return list(dict.fromkeys([*own, *(note for plan in found for note in plan.notes), *prices.notes]))


def print_plans(console: Console, asked: ServiceDemand, found: Sequence[ServingPlan], prices: Prices) -> None:
    """Print the best plan in a sentence, then a table of the best on each GPU."""
    best = found[0].row
    console.print(
        f"[bold]{escape(asked.model.name)}[/bold] at {asked.rate_per_s:g} requests/s, "
        f"{asked.prompt} + {asked.output} tokens: [bold]{best['gpus']} x {escape(best['gpu'])}[/bold], "
        f"batch {best['batch']}, {units.show(best['clock_hz'], 'Hz')}, "
        f"power limit {units.show(best['power_limit_w'], 'W')}",
        highlight=False,
    )
    money = prices.currency or "cost"
    columns = {
        "gpu": "gpu",
        "gpus": "GPUs",
        "tp": "tp",
        "batch": "batch",
        "clock_hz": "clock",
        "power_limit_w": "limit",
        "ttft_s": "TTFT",
        "tpot_s": "TPOT",
        "prefill_share": "prefill",
        "decode_share": "decode",
        "idle_share": "idle",
        "power_w": "power",
        "energy_j_per_token": "J/token",
        "energy_j_per_request": "J/request",
        "cost_per_million_tokens": f"{money}/M tokens",
        "carbon_g_per_million_tokens": "g CO2e/M tokens",
    }
    print_rows(console, [plan.row for plan in found if plan.row], columns, "Plans, best first")
    for plan in found:
        word = "binds" if plan.row else "cannot serve it"
        console.print(f"{escape(plan.gpu)} {word}: {escape(plan.binds)}", highlight=False)
    print_notes(console, list_plan_notes(asked, found, prices))


def draw_plans(asked: ServiceDemand, found: Sequence[ServingPlan]) -> Figure:
    """Draw GPUs and joules per output token of the best plan on each kind of GPU."""
    rows = [plan for plan in found if plan.row]
    if not rows:
        raise bad_value("figure", "at least one GPU that can serve it", "none")
    figure = new_figure(8.0, 0.9 + 0.5 * len(rows))
    wanted = (("gpus", "GPUs"), ("energy_j_per_token", "Energy per output token (J)"))
    panels = figure.subplots(1, len(wanted), sharey=True)
    for axes, (column, said) in zip(panels, wanted, strict=True):
        values = [float(plan.row[column]) for plan in rows]
        axes.barh(range(len(rows)), values, color=SERIES_COLOURS[0], height=0.6)
        for place, value in enumerate(values):
            axes.annotate(f"{value:.3g}", (value, place), xytext=(3, 0), textcoords="offset points", va="center",
                          fontsize=7)  # fmt: skip
        axes.set_xlabel(said)
        axes.margins(x=0.15)
    panels[0].set_yticks(range(len(rows)), [plan.gpu for plan in rows])
    panels[0].invert_yaxis()
    left_out = [plan.gpu for plan in found if not plan.row]
    note = f"cannot serve it: {', '.join(left_out)}" if left_out else "predicted"
    return add_caption(figure, f"{asked.rate_per_s:g} requests/s; {note}")
