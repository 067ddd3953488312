"""Assign workloads to the GPUs of a site, with clocks, under its power budget: a mixed-integer
program [HiGHS].

x[w,g,c] replicas of k GPUs of kind g are given to workload w in a way c to use them (a clock, how
GPUs share the model) and are busy for u[w,g,c] <= x[w,g,c] replicas' worth of time; GPUs without
work idle at their lowest clock. With T the requests per second and P the mean power of a busy
replica, I its idle power and N[g] the GPUs there are:

    Σ_wc k·x[w,g,c] <= N[g]                                                    every g
    Σ_gwc x·P + Σ_g (N[g] - Σ_wc k·x)·I[g,lowest] <= power budget / PUE        when all are busy at
    once energy:      Σ_gc u·T >= rate[w];            minimise  Σ u·P + (x - u)·I + (N - Σ
    k·x)·I[g,lowest] gpus:        Σ_gc u·T >= rate[w];            minimise  Σ k·x cost:        Σ_gc
    u·T >= rate[w];            minimise  Σ k·x·rent[g] + tariff·(watts of energy) throughput:  Σ_gc
    u·T >= t·rate[w];          maximise  t

A workload with prompts and outputs is served by an engine: T is the largest rate at which a
simulated replica keeps its latency bounds (``serving/plan_options.py``), and what was chosen is
simulated again at its share of the rate. One GPU holds one workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import BadInput, bad_value, check_names, units
from wattcast.core.arrays import Array, pareto_front
from wattcast.core.errors import WattcastError, import_extra
from wattcast.core.strict_files import decode_yaml, read_bytes
from wattcast.explore.explorations import build_study, describe_point_risk
from wattcast.explore.study import Study, evaluate_points
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.prices import Prices, parse_prices
from wattcast.serving import plan_options
from wattcast.serving.latency_bounds import parse_both_bounds
from wattcast.serving.option_bounds import tabulate_option
from wattcast.serving.option_runs import describe_risk, find_ceiling, saturate_option, serve_rate
from wattcast.serving.service_demand import PERCENTILE, ServiceDemand
from wattcast.serving.simulate_serving import find_language_model
from wattcast.workload.model_options import ModelOptions

LIMIT_S = 60.0  # of the solver
CLOCK_COUNT = 28  # tried on each GPU, evenly over its range
SERVED_CLOCKS = (1.0, 0.8, 0.6)  # of the highest, tried for an engine
SERVED_LAYOUTS = 2  # ways to share the model, those of the fewest GPUs
SERVED_REQUESTS = 200  # simulated for each answer
LIGHT_LOAD = 1e-3  # of what a replica serves at most: a request alone
MOST_GPUS = 1_000_000


class FleetAim(StrEnum):
    """Name what the assignment is best at."""

    ENERGY = "energy"
    GPUS = "gpus"
    COST = "cost"
    THROUGHPUT = "throughput"


class _Workload(msgspec.Struct, forbid_unknown_fields=True):
    workload: str
    rate: str
    name: str = ""
    options: dict[str, Any] = {}
    latency: str | None = None
    prompt: str | int | None = None
    output: str | int | None = None
    ttft: str | None = None
    tpot: str | None = None
    tp: tuple[int, ...] = plan_options.TENSOR_PARALLEL


class _Fleet(msgspec.Struct, forbid_unknown_fields=True):
    gpus: dict[str, int]
    workloads: list[_Workload]
    power: str | None = None
    pue: float = 1.0
    headroom: str | float = 0.1


@dataclass(frozen=True)
class WorkloadDemand:
    """Hold one workload and the requests per second asked of it (for throughput: its share of the
    mix).
    """

    name: str
    workload: str
    rate_per_s: float
    options: dict[str, Any]
    latency_s: float = np.inf  # of a batch, at most
    served: ServiceDemand | None = None  # by an engine, one request after another
    tp: tuple[int, ...] = plan_options.TENSOR_PARALLEL


@dataclass(frozen=True)
class Fleet:
    """Hold the GPUs of a site, its workloads and its power budget."""

    gpus: tuple[tuple[Gpu, int], ...]
    demands: tuple[WorkloadDemand, ...]
    power_w: float  # at the meter; inf: no budget
    pue: float = 1.0


@dataclass(frozen=True)
class FleetAssignment:
    """Hold which GPUs run which workload."""

    aim: FleetAim
    rows: list[dict[str, Any]]  # workload, gpu, gpus, busy, clock ...
    served: list[dict[str, Any]]  # workload, asked and served requests per second
    power_w: float  # mean at the meter
    peak_w: float  # at the meter, when every assigned GPU is busy
    idle_gpus: dict[str, int]
    factor: float  # served over asked, the least of all workloads
    binds: str
    notes: tuple[str, ...]
    cost_per_h: float | None = None  # rent of the GPUs with work, and what all draw
    currency: str = ""


@dataclass(frozen=True)
class _Column:
    """Hold one way to use GPUs: a column of the program. Rates and powers are of a replica."""

    demand: int
    kind: int
    clock_hz: float
    per_s: float
    power_w: float
    idle_w: float  # with little to do
    gpus: int = 1
    option: plan_options.PlanOption | None = None  # of an engine
    study: Study | None = None  # of batches


def read_fleet(path: Path, site_power: str | None = None) -> Fleet:
    """Read a fleet from its YAML file; ``site_power`` takes the place of the file's power budget."""
    file = decode_yaml(read_bytes(path), _Fleet, path.name)
    if not file.gpus or not file.workloads:
        raise bad_value(path.name, "at least one GPU and one workload", "none")
    for name, count in file.gpus.items():
        if not 1 <= count <= MOST_GPUS:
            raise bad_value(f"{path.name}: gpus.{name}", f"from 1 to {MOST_GPUS:,}", count)
    if not 1.0 <= file.pue <= 10.0:
        raise bad_value(f"{path.name}: pue", "a number from 1 to 10", file.pue)
    demands = []
    for index, item in enumerate(file.workloads):
        where = f"{path.name}: workloads[{index}]"
        rate = units.parse(item.rate, "/s", f"{where}.rate")
        if rate <= 0:
            raise bad_value(f"{where}.rate", "above zero", item.rate)
        check_names(
            f"option in {where}.options",
            item.options,
            [field.name for field in fields(ModelOptions)],
        )
        latency_s = (
            np.inf
            if item.latency is None
            else units.parse_amount(item.latency, "s", f"{where}.latency")
        )
        served = _read_served(
            item, where, units.parse_amount(file.headroom, "", f"{path.name}: headroom")
        )
        name = item.name or f"{index + 1}: {item.workload}"
        demands.append(
            WorkloadDemand(name, item.workload, rate, item.options, latency_s, served, item.tp)
        )
    if len({demand.name for demand in demands}) < len(demands):
        raise bad_value(f"{path.name}: workloads", "a name of its own for each", "two alike")
    power_w = np.inf if file.power is None else units.parse(file.power, "W", f"{path.name}: power")
    if site_power is not None:
        power_w = units.parse_amount(site_power, "W", "site_power", inclusive=False)
    return Fleet(
        tuple((find_gpu(n), count) for n, count in file.gpus.items()),
        tuple(demands),
        power_w,
        file.pue,
    )


def _read_served(item: _Workload, where: str, headroom: float) -> ServiceDemand | None:
    """Return the demand of a workload with prompts and outputs; None where batches are run."""
    if item.prompt is None or item.output is None:
        if any(given is not None for given in (item.prompt, item.output, item.ttft, item.tpot)):
            raise bad_value(where, "prompt and output, beside ttft and tpot", "one of them")
        return None
    if item.latency is not None or {"batch", "seq", "phase", "tp"} & item.options.keys():
        raise bad_value(
            where,
            "no batch, seq, phase or latency, which follow from traffic (tp beside prompt)",
            "some",
        )
    model = find_language_model(item.workload)
    per_s = units.parse_amount(item.rate, "/s", "rate", inclusive=False)
    asked = (
        model,
        per_s,
        item.prompt,
        item.output,
        parse_both_bounds(item.ttft, item.tpot, PERCENTILE),
    )
    formats = ModelOptions.from_names(**item.options, stack="engine")
    return ServiceDemand(*asked, headroom, options=formats, requests=SERVED_REQUESTS)


def assign_fleet(
    fleet: Fleet,
    aim: str = "energy",
    price: str | Sequence[str] | None = None,
    electricity: str | None = None,
) -> FleetAssignment:
    """Return the best assignment; the error says which constraint stands in the way where there is
    none.

    The least cost counts the rent of GPUs that have work, and the energy of all; GPUs without a
    price stay unused."""
    check_names("aim", aim, list(FleetAim))
    money = parse_prices(price, electricity, pue=fleet.pue)
    priced = [money.cost(gpu.name, 1.0, 1.0) is not None for gpu, _ in fleet.gpus]
    if aim == FleetAim.COST and not any(priced):
        raise bad_value(
            "aim", "a price to know the cost from", "none", "Give --price or --electricity."
        )
    columns, notes = _list_columns(fleet)
    if aim == FleetAim.COST:
        columns = [column for column in columns if priced[column.kind]]
    lowest_w = [
        bundle_for(gpu).power.idle_power_w(list_settable_clocks(gpu)[:1]) for gpu, _ in fleet.gpus
    ]
    base_w = np.concatenate(lowest_w)
    counts = np.array([count for _, count in fleet.gpus])
    if base_w @ counts * fleet.pue > fleet.power_w:
        idle = units.show(float(base_w @ counts * fleet.pue), "W")
        raise BadInput(
            f"power: the GPUs draw {idle} idle, more than the budget of {units.show(fleet.power_w, 'W')}."
        )
    solved = _solve_assignment(fleet, columns, base_w, FleetAim(aim), fleet.power_w, money)
    if solved is None:
        # The error that rates cannot be met: how much of them can be, and whether power or GPUs
        # bind
        free = _solve_assignment(fleet, columns, base_w, FleetAim.THROUGHPUT, fleet.power_w)
        asked = np.array([d.rate_per_s for d in fleet.demands])
        share = (
            float((_served_per_s(fleet, columns, free[1]) / asked).min())
            if free is not None
            else 0.0
        )
        if _solve_assignment(fleet, columns, base_w, FleetAim.ENERGY, np.inf) is not None:
            what = f"power: {units.show(fleet.power_w, 'W')} is too little, with more these GPUs would do"
        else:
            what = "GPUs: there are too few, whatever the power"
        raise BadInput(
            f"the rates cannot be met. {what}. At most {share:.1%} of every rate can be served."
        )
    made = _make_assignment(fleet, columns, base_w, FleetAim(aim), *solved, notes)
    rents = [
        money.cost(gpu.name, 0.0, float(count - made.idle_gpus[gpu.name]))
        for (gpu, count), known in zip(fleet.gpus, priced, strict=True)
        if known or made.idle_gpus[gpu.name] < count
    ]
    if not any(priced) or None in rents:
        return made
    per_s = sum(rent or 0.0 for rent in rents) + made.power_w * (
        money.per_j or 0.0
    )  # power: at the meter
    return replace(
        made, cost_per_h=3600.0 * per_s, currency=money.currency, notes=(*made.notes, *money.notes)
    )


def _list_columns(fleet: Fleet) -> tuple[list[_Column], tuple[str, ...]]:
    """Return every workload on every GPU at the clocks on the front of speed and power."""
    columns: list[_Column] = []
    notes: list[str] = []
    for index, demand in enumerate(fleet.demands):
        why = []
        for kind, (gpu, count) in enumerate(fleet.gpus):
            try:
                found = (_list_served if demand.served else _list_batches)(demand, gpu, count)
            except WattcastError as error:
                why.append(f"{gpu.name}: {error}")
                continue
            columns += [replace(column, demand=index, kind=kind) for column in found[0]]
            notes += found[1]
        if len(why) == len(fleet.gpus):
            raise BadInput(f"{demand.name}: no GPU of the fleet can run it ({'; '.join(why)}).")
    return columns, tuple(dict.fromkeys(notes))


def _list_batches(demand: WorkloadDemand, gpu: Gpu, count: int) -> tuple[list[_Column], list[str]]:
    """Return batches of a workload on a GPU at the clocks on the front of speed and power."""
    clock_hz = list_settable_clocks(gpu)
    gpus = ModelOptions(**demand.options).gpu_count
    asked = build_study(demand.workload, gpu, [f"clock={float(clock_hz[0])!r}Hz"], **demand.options)
    found = evaluate_points(asked, {"asked_clock_hz": clock_hz})
    if not found.get("fits", np.array([True])).all():
        raise BadInput("does not fit in memory")
    if gpus > count:
        raise BadInput(f"{gpus} GPUs a replica, of which there are {count}")
    idle_w = gpus * bundle_for(gpu).power.idle_power_w(clock_hz)
    batch = float(demand.options.get("batch", 1)) * float(demand.options.get("dp", 1))
    columns = []
    for row in pareto_front(np.stack([found["latency_s"], found["power_w"]], axis=-1)):
        latency_s = float(found["latency_s"][row])
        if latency_s <= demand.latency_s:
            values = (batch / latency_s, gpus * float(found["power_w"][row]), float(idle_w[row]))
            columns.append(_Column(0, 0, float(clock_hz[row]), *values, gpus, study=asked))
    if not columns:
        least = units.show(float(found["latency_s"].min()), "s")
        raise BadInput(f"a batch takes {least}, more than {units.show(demand.latency_s, 's')}")
    return columns, [*asked.graph.assumptions, *asked.bundle.assumptions]


def _list_served(demand: WorkloadDemand, gpu: Gpu, count: int) -> tuple[list[_Column], list[str]]:
    """Return engines of a model on a GPU: replicas of few GPUs, at several clocks, at the most they
    serve.
    """
    served = demand.served
    assert served is not None
    clocks_hz = tuple(float(np.max(gpu.clocks.max_hz)) * share for share in SERVED_CLOCKS)
    options, refused = plan_options.list_options(
        served, gpu, plan_options.SearchRange(tp=demand.tp, clocks_hz=clocks_hz)
    )
    tables = plan_options.StepTables()
    columns: list[_Column] = []
    notes: list[str] = []
    for option in sorted(options, key=lambda one: (one.gpus, -one.clock_hz)):
        layouts = {column.option.shared for column in columns if column.option}
        if option.max_seqs < options[0].max_seqs or option.gpus > count:
            continue
        if option.shared not in layouts and len(layouts) == SERVED_LAYOUTS:
            break
        try:
            full = saturate_option(served, tabulate_option(served, option, tables))
        except BadInput as error:
            refused.append(str(error))
            continue
        per_s = full.most_per_s
        if serve_rate(served, full, per_s)[1]:
            alone = serve_rate(served, full, LIGHT_LOAD * per_s)[1]
            if alone:
                refused.append(f"{full}: {alone} cannot be met even by a single request.")
                continue
            per_s, _ = find_ceiling(served, full, LIGHT_LOAD * per_s, per_s)
        rates = [per_s / (1.0 + served.headroom) * share for share in (0.5, 1.0)]
        half, whole = (
            result for rate in rates if (result := serve_rate(served, full, rate)[0]) is not None
        )
        least_w = min(
            2.0 * half.power_w - whole.power_w, half.power_w
        )  # the line through half and full load
        columns.append(
            _Column(0, 0, full.clock_hz, rates[1], whole.power_w, least_w, full.gpus, full)
        )
        notes += [note for note in whole.assumptions if not note.startswith(("cache:", "router:"))]
    if not columns:
        raise BadInput(
            " ".join(dict.fromkeys(refused)) or f"a replica takes more than {count} GPUs"
        )
    return columns, notes


def _solve_assignment(
    fleet: Fleet,
    columns: list[_Column],
    base_w: Array,
    aim: FleetAim,
    power_w: float,
    prices: Prices | None = None,
) -> tuple[Array, Array] | None:
    """Return the GPUs given and the GPUs' worth of busy time in each column; None where there is no
    solution.
    """
    why = "fleets need SciPy", "explore"
    optimize = import_extra("scipy.optimize", *why)
    sparse = import_extra("scipy.sparse", *why)
    size = len(columns)
    demand = np.array([c.demand for c in columns])
    kind = np.array([c.kind for c in columns])
    busy_w = np.array([c.power_w for c in columns])
    rest_w = np.array([c.idle_w for c in columns])
    per_s = np.array([c.per_s for c in columns])
    gpus = np.array([float(c.gpus) for c in columns])
    rate = np.array([d.rate_per_s for d in fleet.demands])
    counts = np.array([count for _, count in fleet.gpus], dtype=float)
    every = np.arange(size)
    # variables: x (whole), u, t
    owned = sparse.coo_matrix((gpus, (kind, every)), shape=(len(counts), 2 * size + 1))
    held = sparse.hstack(
        [-sparse.eye_array(size), sparse.eye_array(size), sparse.coo_matrix((size, 1))]
    )
    each = np.arange(len(rate))
    at = (np.append(demand, each), np.append(size + every, np.full(len(rate), 2 * size)))
    shares = np.append(per_s / rate[demand], -np.ones(len(rate)))
    work = sparse.coo_matrix((shares, at), shape=(len(rate), 2 * size + 1))
    above_w = busy_w - gpus * base_w[kind]
    budget = np.concatenate([above_w, np.zeros(size + 1)])[np.newaxis]
    room_w = power_w / fleet.pue - base_w @ counts
    limits = [
        optimize.LinearConstraint(owned, -np.inf, counts),
        optimize.LinearConstraint(held, -np.inf, 0.0),
        optimize.LinearConstraint(work, 0.0, np.inf),
    ]
    if np.isfinite(power_w):
        limits.append(optimize.LinearConstraint(budget, -np.inf, room_w))
    fixed = aim is not FleetAim.THROUGHPUT
    cost = np.append(np.zeros(2 * size), -1.0)
    if fixed:
        cost = np.concatenate([rest_w - gpus * base_w[kind], busy_w - rest_w, [0.0]])
    if aim is FleetAim.COST and prices is not None:
        rents = [
            prices.cost(fleet.gpus[c.kind][0].name, 0.0, float(c.gpus)) or 0.0 for c in columns
        ]
        cost = fleet.pue * (prices.per_j or 0.0) * cost + np.append(rents, np.zeros(size + 1))
        cost /= max(
            float(np.abs(cost).max()), 1e-30
        )  # money a second is small for the solver's tolerances
    if aim is FleetAim.GPUS:  # power decides between equals
        cost = np.append(gpus, np.zeros(size + 1)) + 1e-3 * cost / max(
            float(np.abs(cost).max()), 1.0
        )
    low = np.zeros(2 * size + 1)
    high = np.full(2 * size + 1, np.inf)
    if fixed:
        low[-1] = high[-1] = 1.0
    bounds = optimize.Bounds(low, high)
    whole = np.append(np.ones(size), np.zeros(size + 1))
    done = optimize.milp(
        cost, constraints=limits, bounds=bounds, integrality=whole, options={"time_limit": LIMIT_S}
    )
    if done.x is None:
        return None
    given = np.round(done.x[:size])
    return given, np.minimum(
        done.x[size : 2 * size], given
    )  # the solver's whole numbers are whole to 1e-6


def _served_per_s(fleet: Fleet, columns: list[_Column], busy: Array) -> Array:
    """Return the requests per second served of each demand."""
    served = np.zeros(len(fleet.demands))
    np.add.at(served, [c.demand for c in columns], busy * np.array([c.per_s for c in columns]))
    return served


def _make_assignment(
    fleet: Fleet,
    columns: list[_Column],
    base_w: Array,
    aim: FleetAim,
    given: Array,
    busy: Array,
    notes: tuple[str, ...],
) -> FleetAssignment:
    """Return what was solved as rows, with engines simulated again at their share of the rate."""
    counts = np.array([count for _, count in fleet.gpus])
    rows = []
    served = _served_per_s(fleet, columns, busy)
    mean_w = peak_w = 0.0
    left = counts.astype(float)
    for x, u, c in zip(given, busy, columns, strict=True):
        left[c.kind] -= x * c.gpus
        drawn_w = u * c.power_w + (x - u) * c.idle_w
        peak_w += x * c.power_w
        if x > 0:
            more: dict[str, Any] = {}
            demand = fleet.demands[c.demand].served
            gpu = fleet.gpus[c.kind][0]
            if demand is not None and c.option is not None:
                result = serve_rate(demand, c.option, max(float(u / x), LIGHT_LOAD) * c.per_s)[0]
                assert result is not None
                drawn_w = x * result.power_w
                at = result.headline
                more = {
                    f"{n}_{q}_s": at[f"{n}_s.{q}"] for n in ("ttft", "tpot") for q in ("p50", "p99")
                }
                more["risk"] = describe_risk(demand, c.option, result)
            elif c.study is not None:
                at_clock = OperatingPoint(clock_hz=c.clock_hz)
                more["risk"] = (
                    describe_point_risk(c.study.graph, gpu, at_clock, c.study.bundle) or None
                )
            rows.append(
                {
                    "workload": fleet.demands[c.demand].name,
                    "gpu": gpu.name,
                    "gpus": int(x) * c.gpus,
                    "replica": c.option.layout
                    if c.option
                    else f"{c.gpus} GPUs"
                    if c.gpus > 1
                    else "1 GPU",
                    "clock_hz": c.clock_hz,
                    "busy_share": float(u / x),
                    "power_w_per_gpu": float(drawn_w / x / c.gpus)
                    if c.option
                    else c.power_w / c.gpus,
                    "unit": _name_unit(c),
                    "units_per_s": float(u * c.per_s),
                    "energy_j_per_unit": float(drawn_w / (u * c.per_s))
                    if c.option and u
                    else c.power_w / c.per_s,
                    **more,
                }
            )
        mean_w += drawn_w
    rest_w = float(left @ base_w)
    peak_w = float(peak_w + rest_w) * fleet.pue
    shortest = [float(s / d.rate_per_s) for s, d in zip(served, fleet.demands, strict=True)]
    asked = [
        {"workload": d.name, "asked_per_s": d.rate_per_s, "served_per_s": float(s)}
        for d, s in zip(fleet.demands, served, strict=True)
    ]
    idle = {gpu.name: round(count) for (gpu, _), count in zip(fleet.gpus, left, strict=True)}
    said = (*notes, "GPUs without work idle at their lowest clock; one GPU holds one workload")
    if any(demand.served is not None for demand in fleet.demands):
        drawn = f"engines: {SERVED_REQUESTS} requests are simulated for each answer"
        said = (*said, drawn, plan_options.INTERPOLATED)
    limits = {"power": peak_w > 0.98 * fleet.power_w, "GPUs": not any(idle.values())}
    binds = (
        " and ".join(name for name, reached in limits.items() if reached)
        or "neither power nor GPUs"
    )
    return FleetAssignment(
        aim,
        rows,
        asked,
        float(mean_w + rest_w) * fleet.pue,
        peak_w,
        idle,
        min(shortest),
        binds,
        said,
    )


def _name_unit(column: _Column) -> str:
    """Return what the rate of a workload counts: requests, or tokens where a batch is one decode
    step.
    """
    if column.study is None:
        return "request"
    phase = column.study.graph.phase
    return {"decode": "token", "train": "sequence"}.get(phase, "request")


def list_settable_clocks(gpu: Gpu) -> Array:
    """List clocks the card can be set to, evenly over its range."""
    low = float(np.min(gpu.clocks.lowest_hz))
    high = float(np.max(gpu.clocks.max_hz))
    return np.unique(
        np.clip(gpu.clocks.snap_to_steps(np.linspace(low, high, CLOCK_COUNT)), low, high)
    )
