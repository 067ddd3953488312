"""Assign workloads to the GPUs of a site, with clocks, under its power budget: a mixed-integer
program [HiGHS].

x[w,g,c] replicas of k GPUs of kind g are given to workload w in a way c to use them (a clock, how
GPUs share the model) and are busy for u[w,g,c] <= x[w,g,c] replicas' worth of time; GPUs without
work idle at their lowest clock. With T the requests per second and P the mean power of a busy
replica, I its idle power and N[g] the GPUs there are:

    Σ_wc k·x[w,g,c] <= N[g]                                                of every g
    Σ_gwc x·P + Σ_g (N[g] - Σ_wc k·x)·I[g,lowest] <= power budget / PUE    when all are busy at once

    energy:      Σ_gc u·T >= rate[w];    minimise  Σ u·P + (x - u)·I + (N - Σ k·x)·I[g,lowest]
    gpus:        Σ_gc u·T >= rate[w];    minimise  Σ k·x
    cost:        Σ_gc u·T >= rate[w];    minimise  Σ k·x·rent[g] + tariff·(watts of energy)
    throughput:  Σ_gc u·T >= t·rate[w];  maximise  t

A workload with prompts and outputs is served by an engine: T is the largest rate at which a
simulated replica keeps its latency bounds (``serving/plan_options.py``), and what was chosen is
simulated again at its share of the rate. One GPU holds one workload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import (
    BadInput,
    bad_value,
    check_names,
    units,
)
from wattcast.core.arrays import Array, pareto_front
from wattcast.core.errors import WattcastError, import_extra
from wattcast.core.strict_files import decode_yaml, read_bytes
from wattcast.core.units import show_plain
from wattcast.core.user_results import UserResult
from wattcast.explore.explorations import build_study, describe_point_risk
from wattcast.explore.study import Study, evaluate_points
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.prices import MOST_PUE, Prices, parse_prices
from wattcast.serving import plan_options
from wattcast.serving.latency_bounds import parse_both_bounds
from wattcast.serving.option_bounds import tabulate_option
from wattcast.serving.option_runs import (
    describe_risk,
    find_ceiling,
    saturate_option,
    serve_rate,
)
from wattcast.serving.plan_coefficients import PLAN
from wattcast.serving.service_demand import PERCENTILE, ServiceDemand
from wattcast.serving.simulate_serving import find_language_model
from wattcast.workload.model_options import ModelOptions

LIMIT_S = 60.0  # of the solver
CLOCK_COUNT = 28  # tried on each GPU, evenly over its range
SERVED_CLOCKS = (1.0, 0.8, 0.6)  # of the highest, tried for an engine
SERVED_LAYOUTS = 2  # ways to share the model, those of the fewest GPUs
SERVED_REQUESTS = 200  # simulated for each answer
LIGHT_LOAD = 1e-3  # of what a replica serves at most: a request alone
_TIE_WEIGHT = 1e-3  # of the power beside the number of GPUs, so that power decides between equals
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
    """Hold one workload and its requests per second (for throughput: its share of the mix)."""

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


@dataclass(frozen=True, repr=False)
class FleetAssignment(UserResult):
    """Hold which GPUs run which workload."""

    plain_by = "wattcast.explore.exploration_report:assignment_json"
    drawn_by = "wattcast.explore.exploration_figures:draw_assignment"
    rows_in = "assignment"

    aim: FleetAim
    rows: list[dict[str, Any]]  # workload, gpu, gpus, busy, clock ...
    served: list[dict[str, Any]]  # workload, requests per second that arrive and are served
    power_w: float  # mean at the meter
    peak_w: float  # at the meter, when every assigned GPU is busy
    idle_gpus: dict[str, int]
    factor: float  # served over asked, the least of all workloads
    binds: str
    notes: tuple[str, ...]
    cost_per_h: float | None = None  # rent of the GPUs with work, and what all draw
    currency: str = ""

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        kilowatt = f"{show_plain(self.power_w / 1e3, 3)} kW at the meter"
        return f"{len(self.served)} workloads, {self.factor:.0%} served, {kilowatt}"


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
    """Read a fleet from its YAML file; ``site_power`` takes the place of the file's power
    budget.
    """
    file = decode_yaml(read_bytes(path), _Fleet, path.name)
    if not file.gpus or not file.workloads:
        raise bad_value(path.name, "at least one GPU and one workload", "none")
    for name, count in file.gpus.items():
        if not 1 <= count <= MOST_GPUS:
            raise bad_value(f"{path.name}: gpus.{name}", f"from 1 to {MOST_GPUS:,}", count)
    if not 1.0 <= file.pue <= MOST_PUE:
        raise bad_value(f"{path.name}: pue", "a number from 1 to 10", file.pue)
    headroom = units.parse_amount(file.headroom, "", f"{path.name}: headroom")
    demands = []
    for index, item in enumerate(file.workloads):
        name = item.name or f"{index + 1}: {item.workload}"
        demands.append(_read_demand(item, name, f"{path.name}: workloads[{index}]", headroom))
    if len({demand.name for demand in demands}) < len(demands):
        raise bad_value(f"{path.name}: workloads", "a name of its own for each", "two alike")
    power_w = np.inf if file.power is None else units.parse(file.power, "W", f"{path.name}: power")
    if site_power is not None:
        power_w = units.parse_amount(site_power, "W", "site_power", inclusive=False)
    gpus = tuple((find_gpu(name), count) for name, count in file.gpus.items())
    return Fleet(gpus, tuple(demands), power_w, file.pue)


def _read_demand(
    item: _Workload,
    name: str,
    where: str,
    headroom: float,
) -> WorkloadDemand:
    """Read one workload of a fleet's file."""
    per_s = units.parse(item.rate, "/s", f"{where}.rate")
    if per_s <= 0:
        raise bad_value(f"{where}.rate", "above zero", item.rate)
    option_names = [option.name for option in fields(ModelOptions)]
    check_names(f"option in {where}.options", item.options, option_names)
    latency_s = np.inf
    if item.latency is not None:
        latency_s = units.parse_amount(item.latency, "s", f"{where}.latency")
    served = _read_served(item, where, headroom)
    return WorkloadDemand(
        name,
        item.workload,
        per_s,
        item.options,
        latency_s,
        served,
        item.tp,
    )


def _read_served(
    item: _Workload,
    where: str,
    headroom: float,
) -> ServiceDemand | None:
    """Return the demand of a workload with prompts and outputs; None where batches are run."""
    if item.prompt is None or item.output is None:
        if any(text is not None for text in (item.prompt, item.output, item.ttft, item.tpot)):
            raise bad_value(where, "prompt and output, beside ttft and tpot", "one of them")
        return None
    if item.latency is not None or {"batch", "seq", "phase", "tp"} & item.options.keys():
        expected = "no batch, seq, phase or latency, which follow from traffic (tp beside prompt)"
        raise bad_value(where, expected, "some")
    return ServiceDemand(
        find_language_model(item.workload),
        units.parse_amount(item.rate, "/s", "rate", inclusive=False),
        item.prompt,
        item.output,
        parse_both_bounds(item.ttft, item.tpot, PERCENTILE),
        headroom,
        options=ModelOptions.from_names(**item.options, stack="engine"),
        requests=SERVED_REQUESTS,
    )


def assign_fleet(
    fleet: Fleet,
    aim: str = "energy",
    price: str | Sequence[str] | None = None,
    electricity: str | None = None,
) -> FleetAssignment:
    """Return the best assignment.

    Where there is none, the error says which constraint stands in the way. The least cost counts
    the rent of GPUs that have work, and the energy of all; GPUs without a price stay unused.
    """
    check_names("aim", aim, list(FleetAim))
    prices = parse_prices(price, electricity, pue=fleet.pue)
    priced = [prices.cost(gpu.name, 1.0, 1.0) is not None for gpu, _ in fleet.gpus]
    if aim == FleetAim.COST and not any(priced):
        do = "Give --price or --electricity."
        raise bad_value("aim", "a price to know the cost from", "none", do)
    columns, notes = _list_columns(fleet)
    if aim == FleetAim.COST:
        columns = [column for column in columns if priced[column.kind]]
    program = _Program(fleet, columns, _measure_idle_w(fleet))
    solution = program.solve(FleetAim(aim), fleet.power_w, prices)
    if solution is None:
        raise _explain_failure(program)
    assignment = _make_assignment(program, FleetAim(aim), solution, notes)
    return _add_cost(fleet, assignment, prices, priced)


def _measure_idle_w(fleet: Fleet) -> Array:
    """Return the idle power of each kind of GPU at its lowest clock, or say why it is too much."""
    lowest_w = []
    for gpu, _ in fleet.gpus:
        clock_hz = list_settable_clocks(gpu)[:1]
        lowest_w.append(bundle_for(gpu).power.idle_power_w(clock_hz))
    idle_w = np.concatenate(lowest_w)
    total_w = float(idle_w @ _count_gpus(fleet) * fleet.pue)
    if total_w > fleet.power_w:
        budget = units.show(fleet.power_w, "W")
        shown = units.show(total_w, "W")
        raise BadInput(f"power: the GPUs draw {shown} idle, more than the budget of {budget}.")
    return idle_w


def _count_gpus(fleet: Fleet) -> Array:
    return np.array([count for _, count in fleet.gpus], dtype=float)


def _explain_failure(program: _Program) -> BadInput:
    """Return the error that rates cannot be met.

    It says how much of them can be, and whether power or GPUs are the limit.
    """
    fleet = program.fleet
    share = 0.0
    most = program.solve(FleetAim.THROUGHPUT, fleet.power_w)
    if most is not None:
        rates_per_s = np.array([demand.rate_per_s for demand in fleet.demands])
        share = float((program.served_per_s(most) / rates_per_s).min())
    cause = "GPUs: there are too few, whatever the power"
    if program.solve(FleetAim.ENERGY, np.inf) is not None:
        budget = units.show(fleet.power_w, "W")
        cause = f"power: {budget} is too little, with more these GPUs would do"
    return BadInput(
        f"the rates cannot be met. {cause}. At most {share:.1%} of every rate can be served."
    )


def _add_cost(
    fleet: Fleet,
    assignment: FleetAssignment,
    prices: Prices,
    priced: Sequence[bool],
) -> FleetAssignment:
    """Add the cost of an hour, where all GPUs with work have a price."""
    if not any(priced):
        return assignment
    rent_per_s = 0.0
    for (gpu, count), has_price in zip(fleet.gpus, priced, strict=True):
        busy_gpus = count - assignment.idle_gpus[gpu.name]
        if not has_price and not busy_gpus:
            continue
        rent = prices.cost(gpu.name, 0.0, float(busy_gpus))
        if rent is None:
            return assignment
        rent_per_s += rent
    per_s = rent_per_s + assignment.power_w * (prices.per_j or 0.0)  # power: at the meter
    notes = (*assignment.notes, *prices.notes)
    return replace(
        assignment,
        cost_per_h=3600.0 * per_s,
        currency=prices.currency,
        notes=notes,
    )


# Ways to use GPUs


def _list_columns(fleet: Fleet) -> tuple[list[_Column], tuple[str, ...]]:
    """Return every workload on every GPU at the clocks on the front of speed and power."""
    columns: list[_Column] = []
    notes: list[str] = []
    for index, demand in enumerate(fleet.demands):
        refusals = []
        list_ways = _list_served if demand.served else _list_batches
        for kind, (gpu, count) in enumerate(fleet.gpus):
            try:
                ways, assumptions = list_ways(demand, gpu, count)
            except WattcastError as error:
                refusals.append(f"{gpu.name}: {error}")
                continue
            columns += [replace(way, demand=index, kind=kind) for way in ways]
            notes += assumptions
        if len(refusals) == len(fleet.gpus):
            why = "; ".join(refusals)
            raise BadInput(f"{demand.name}: no GPU of the fleet can run it ({why}).")
    return columns, tuple(dict.fromkeys(notes))


def _list_batches(
    demand: WorkloadDemand,
    gpu: Gpu,
    count: int,
) -> tuple[list[_Column], list[str]]:
    """Return batches of a workload on a GPU at the clocks on the front of speed and power."""
    clock_hz = list_settable_clocks(gpu)
    gpus = ModelOptions(**demand.options).gpu_count
    words = [f"clock={float(clock_hz[0])!r}Hz"]
    study = build_study(demand.workload, gpu, words, **demand.options)
    points = evaluate_points(study, {"asked_clock_hz": clock_hz})
    if not points.get("fits", np.array([True])).all():
        raise BadInput("does not fit in memory")
    if gpus > count:
        raise BadInput(f"{gpus} GPUs a replica, of which there are {count}")
    idle_w = gpus * bundle_for(gpu).power.idle_power_w(clock_hz)
    batch = float(demand.options.get("batch", 1)) * float(demand.options.get("dp", 1))
    columns = []
    for row in pareto_front(np.stack([points["latency_s"], points["power_w"]], axis=-1)):
        latency_s = float(points["latency_s"][row])
        if latency_s > demand.latency_s:
            continue
        columns.append(
            _Column(
                demand=0,
                kind=0,
                clock_hz=float(clock_hz[row]),
                per_s=batch / latency_s,
                power_w=gpus * float(points["power_w"][row]),
                idle_w=float(idle_w[row]),
                gpus=gpus,
                study=study,
            )
        )
    if not columns:
        least = units.show(float(points["latency_s"].min()), "s")
        raise BadInput(f"a batch takes {least}, more than {units.show(demand.latency_s, 's')}")
    return columns, [*study.graph.assumptions, *study.bundle.assumptions]


def _list_served(
    demand: WorkloadDemand,
    gpu: Gpu,
    count: int,
) -> tuple[list[_Column], list[str]]:
    """Return engines of a model on a GPU, at the most they serve.

    They are replicas of few GPUs, at several clocks.
    """
    served = demand.served
    assert served is not None
    clocks_hz = tuple(float(np.max(gpu.clocks.max_hz)) * share for share in SERVED_CLOCKS)
    tried = plan_options.SearchRange(tp=demand.tp, clocks_hz=clocks_hz)
    options, refused = plan_options.list_options(served, gpu, tried)
    tables = plan_options.StepTables()
    columns: list[_Column] = []
    notes: list[str] = []
    layouts: list[ModelOptions] = []
    for option in sorted(options, key=lambda one: (one.gpus, -one.clock_hz)):
        if option.max_seqs < options[0].max_seqs or option.gpus > count:
            continue
        if option.shared not in layouts and len(layouts) == SERVED_LAYOUTS:
            break
        try:
            column, assumptions = _measure_replica(served, option, tables)
        except BadInput as error:
            refused.append(str(error))
            continue
        columns.append(column)
        if option.shared not in layouts:
            layouts.append(option.shared)
        notes += assumptions
    if not columns:
        reasons = " ".join(dict.fromkeys(refused))
        raise BadInput(reasons or f"a replica takes more than {count} GPUs")
    return columns, notes


def _measure_replica(
    served: ServiceDemand,
    option: plan_options.PlanOption,
    tables: plan_options.StepTables,
) -> tuple[_Column, list[str]]:
    """Simulate the most that a replica serves, and half of it, for the line between them."""
    full = saturate_option(served, tabulate_option(served, option, tables))
    per_s = full.most_per_s
    if serve_rate(served, full, per_s)[1]:
        broken = serve_rate(served, full, LIGHT_LOAD * per_s)[1]
        if broken:
            raise BadInput(f"{full}: {broken} cannot be met even by a single request.")
        per_s, _ = find_ceiling(served, full, LIGHT_LOAD * per_s, per_s)
    planned_per_s = per_s / (1.0 + served.headroom)
    half = serve_rate(served, full, planned_per_s * 0.5)[0]
    whole = serve_rate(served, full, planned_per_s)[0]
    assert half is not None
    assert whole is not None
    idle_w = min(2.0 * half.power_w - whole.power_w, half.power_w)
    column = _Column(
        demand=0,
        kind=0,
        clock_hz=full.clock_hz,
        per_s=planned_per_s,
        power_w=whole.power_w,
        idle_w=idle_w,
        gpus=full.gpus,
        option=full,
    )
    notes = [note for note in whole.assumptions if not note.startswith(("cache:", "router:"))]
    return column, notes


# The program


@dataclass(frozen=True)
class _Solution:
    """How many replicas of each column are used, and the replicas' worth of busy time."""

    replicas: Array
    busy: Array


class _Program:
    """The mixed-integer program over variables x (whole numbers) and u of each column, then t."""

    def __init__(
        self,
        fleet: Fleet,
        columns: list[_Column],
        lowest_w: Array,
    ) -> None:
        self.fleet = fleet
        self.columns = columns
        self.lowest_w = lowest_w  # idle power of each kind of GPU at its lowest clock
        self.size = len(columns)
        self.demand = np.array([column.demand for column in columns])
        self.kind = np.array([column.kind for column in columns])
        self.busy_w = np.array([column.power_w for column in columns])
        self.idle_w = np.array([column.idle_w for column in columns])
        self.per_s = np.array([column.per_s for column in columns])
        self.gpus = np.array([float(column.gpus) for column in columns])

    def served_per_s(self, solution: _Solution) -> Array:
        """Return the requests per second served of each demand."""
        served = np.zeros(len(self.fleet.demands))
        np.add.at(served, self.demand, solution.busy * self.per_s)
        return served

    def solve(
        self,
        aim: FleetAim,
        power_w: float,
        prices: Prices | None = None,
    ) -> _Solution | None:
        """Solve the program for an aim within a power at the meter; None: there is no solution."""
        optimize = import_extra("scipy.optimize", "fleets need SciPy", "explore")
        size = self.size
        low = np.zeros(2 * size + 1)
        high = np.full(2 * size + 1, np.inf)
        if aim is not FleetAim.THROUGHPUT:  # the rates are served once
            low[-1] = 1.0
            high[-1] = 1.0
        whole = np.append(np.ones(size), np.zeros(size + 1))
        result = optimize.milp(
            self._weigh(aim, prices),
            constraints=self._list_constraints(optimize, power_w),
            bounds=optimize.Bounds(low, high),
            integrality=whole,
            options={"time_limit": LIMIT_S},
        )
        if result.x is None:
            return None
        replicas = np.round(result.x[:size])  # the solver's whole numbers are whole to 1e-6
        return _Solution(replicas, np.minimum(result.x[size : 2 * size], replicas))

    def _list_constraints(
        self,
        optimize: Any,
        power_w: float,
    ) -> list[Any]:
        """Return that GPUs, busy time, rates and power keep their limits."""
        sparse = import_extra("scipy.sparse", "fleets need SciPy", "explore")
        fleet = self.fleet
        size = self.size
        width = 2 * size + 1
        places = np.arange(size)
        rates_per_s = np.array([demand.rate_per_s for demand in fleet.demands])
        counts = _count_gpus(fleet)

        # Σ k·x <= N of every kind
        used_gpus = sparse.coo_matrix((self.gpus, (self.kind, places)), shape=(len(counts), width))
        # u <= x of every column
        identity = sparse.eye_array(size)
        idle = sparse.hstack([-identity, identity, sparse.coo_matrix((size, 1))])
        # Σ u·T - t·rate >= 0 of every demand, over the rate
        demands = np.arange(len(rates_per_s))
        rows = np.append(self.demand, demands)
        cells = np.append(size + places, np.full(len(demands), 2 * size))
        shares = np.append(self.per_s / rates_per_s[self.demand], -np.ones(len(demands)))
        work = sparse.coo_matrix((shares, (rows, cells)), shape=(len(demands), width))
        constraints = [
            optimize.LinearConstraint(used_gpus, -np.inf, counts),
            optimize.LinearConstraint(idle, -np.inf, 0.0),
            optimize.LinearConstraint(work, 0.0, np.inf),
        ]
        if np.isfinite(power_w):
            # Σ x·(P - k·I[lowest]) <= budget / PUE - Σ N·I[lowest]
            above_w = self.busy_w - self.gpus * self.lowest_w[self.kind]
            power = np.concatenate([above_w, np.zeros(size + 1)])[np.newaxis]
            available_w = power_w / fleet.pue - self.lowest_w @ counts
            constraints.append(optimize.LinearConstraint(power, -np.inf, available_w))
        return constraints

    def _weigh(
        self,
        aim: FleetAim,
        prices: Prices | None,
    ) -> Array:
        """Return what is minimised, as a weight of each variable."""
        size = self.size
        if aim is FleetAim.THROUGHPUT:
            return np.append(np.zeros(2 * size), -1.0)
        above_w = self.idle_w - self.gpus * self.lowest_w[self.kind]
        weights = np.concatenate([above_w, self.busy_w - self.idle_w, [0.0]])
        if aim is FleetAim.COST and prices is not None:
            rents = []
            for column in self.columns:
                name = self.fleet.gpus[column.kind][0].name
                rents.append(prices.cost(name, 0.0, float(column.gpus)) or 0.0)
            tariff = self.fleet.pue * (prices.per_j or 0.0)
            money = tariff * weights + np.append(rents, np.zeros(size + 1))
            # money of a second is small for the solver's tolerances
            return np.asarray(money / max(float(np.abs(money).max()), 1e-30))
        if aim is FleetAim.GPUS:
            largest = max(float(np.abs(weights).max()), 1.0)
            return np.append(self.gpus, np.zeros(size + 1)) + _TIE_WEIGHT * weights / largest
        return weights


# The assignment


def _make_assignment(
    program: _Program,
    aim: FleetAim,
    solution: _Solution,
    notes: tuple[str, ...],
) -> FleetAssignment:
    """Return what was solved as rows, with engines simulated again at their share of the rate."""
    fleet = program.fleet
    rows = []
    mean_w = 0.0
    for replicas, busy, column in zip(
        solution.replicas, solution.busy, program.columns, strict=True
    ):
        if replicas > 0:
            row, drawn_w = _describe_use(fleet, column, replicas, busy)
            rows.append(row)
            mean_w += drawn_w
    unused = _count_gpus(fleet)
    np.subtract.at(unused, program.kind, solution.replicas * program.gpus)
    unused_w = float(unused @ program.lowest_w)
    peak_w = float(solution.replicas @ program.busy_w + unused_w) * fleet.pue
    idle_gpus = {}
    for (gpu, _), count in zip(fleet.gpus, unused, strict=True):
        idle_gpus[gpu.name] = round(count)
    served = []
    factors = []
    for demand, per_s in zip(fleet.demands, program.served_per_s(solution), strict=True):
        rates = {"asked_per_s": demand.rate_per_s, "served_per_s": float(per_s)}
        served.append({"workload": demand.name, **rates})
        factors.append(float(per_s / demand.rate_per_s))
    return FleetAssignment(
        aim,
        rows,
        served,
        float(mean_w + unused_w) * fleet.pue,
        peak_w,
        idle_gpus,
        min(factors),
        _name_limits(fleet, peak_w, idle_gpus),
        (*notes, *_list_notes(fleet)),
    )


def _name_limits(
    fleet: Fleet,
    peak_w: float,
    idle_gpus: Mapping[str, int],
) -> str:
    """Say what keeps the fleet from serving more: its power, its GPUs, both or neither."""
    limits = []
    if peak_w > PLAN.reached_budget * fleet.power_w:
        limits.append("power")
    if not any(idle_gpus.values()):
        limits.append("GPUs")
    return " and ".join(limits) or "neither power nor GPUs"


def _describe_use(
    fleet: Fleet,
    column: _Column,
    replicas: float,
    busy: float,
) -> tuple[dict[str, Any], float]:
    """Return one use of GPUs as a row, and the mean power of its replicas."""
    gpu = fleet.gpus[column.kind][0]
    demand = fleet.demands[column.demand]
    drawn_w = busy * column.power_w + (replicas - busy) * column.idle_w
    power_w_per_gpu = column.power_w / column.gpus
    energy_j_per_unit = column.power_w / column.per_s
    replica = f"{column.gpus} GPUs" if column.gpus > 1 else "1 GPU"
    more: dict[str, Any] = {}
    if demand.served is not None and column.option is not None:
        replica = column.option.layout
        more, result_w = _serve_share(demand.served, column, float(busy / replicas))
        drawn_w = replicas * result_w
        power_w_per_gpu = float(drawn_w / replicas / column.gpus)
        if busy:
            energy_j_per_unit = float(drawn_w / (busy * column.per_s))
    elif column.study is not None:
        at_clock = OperatingPoint(clock_hz=column.clock_hz)
        study = column.study
        more["risk"] = describe_point_risk(study.graph, gpu, at_clock, study.bundle) or None
    row = {
        "workload": demand.name,
        "gpu": gpu.name,
        "gpus": int(replicas) * column.gpus,
        "replica": replica,
        "clock_hz": column.clock_hz,
        "busy_share": float(busy / replicas),
        "power_w_per_gpu": power_w_per_gpu,
        "unit": _name_unit(column),
        "units_per_s": float(busy * column.per_s),
        "energy_j_per_unit": energy_j_per_unit,
        **more,
    }
    return row, drawn_w


def _serve_share(
    demand: ServiceDemand,
    column: _Column,
    busy_share: float,
) -> tuple[dict[str, Any], float]:
    """Simulate a replica at its share of the rate; return latencies and risk, and its power."""
    assert column.option is not None
    rate_per_s = max(busy_share, LIGHT_LOAD) * column.per_s
    result = serve_rate(demand, column.option, rate_per_s)[0]
    assert result is not None
    figures = result.headline
    more: dict[str, Any] = {}
    for quantity in ("ttft", "tpot"):
        for quantile in ("p50", "p99"):
            more[f"{quantity}_{quantile}_s"] = figures[f"{quantity}_s.{quantile}"]
    more["risk"] = describe_risk(demand, column.option, result)
    return more, result.power_w


def _list_notes(fleet: Fleet) -> list[str]:
    """Say what an assignment assumes."""
    notes = ["GPUs without work idle at their lowest clock; one GPU holds one workload"]
    if any(demand.served is not None for demand in fleet.demands):
        notes.append(f"engines: {SERVED_REQUESTS} requests are simulated for each answer")
        notes.append(plan_options.INTERPOLATED)
    return notes


def _name_unit(column: _Column) -> str:
    """Return what the rate of a workload counts, such as tokens of a decode step."""
    if column.study is None:
        return "request"
    phase = column.study.graph.phase
    return {"decode": "token", "train": "sequence"}.get(phase, "request")


def list_settable_clocks(gpu: Gpu) -> Array:
    """List clocks the card can be set to, evenly over its range."""
    low = float(np.min(gpu.clocks.lowest_hz))
    high = float(np.max(gpu.clocks.max_hz))
    clocks_hz = gpu.clocks.snap_to_steps(np.linspace(low, high, CLOCK_COUNT))
    return np.unique(np.clip(clocks_hz, low, high))
