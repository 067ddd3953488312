"""Assign workloads to the GPUs of a site, with clocks, under its power budget: a mixed-integer program [HiGHS].

x[w,g,c] GPUs of kind g are given to workload w at clock c and are busy for u[w,g,c] <= x[w,g,c] GPUs' worth of time;
GPUs without work idle at their lowest clock. With T the requests per second and P the mean power of one busy GPU,
I[g,c] its idle power and N[g] the GPUs there are:

    Σ_wc x[w,g,c] <= N[g]                                                    every g
    Σ_gwc x·P + Σ_g (N[g] - Σ_wc x)·I[g,lowest] <= power budget / PUE        when all are busy at once
    energy:      Σ_gc u·T >= rate[w];            minimise  Σ u·P + (x - u)·I + (N - Σx)·I[g,lowest]
    throughput:  Σ_gc u·T >= t·rate[w];          maximise  t

One GPU holds one workload; several GPUs a replica (tp, pp) are not assigned here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wattcast.core import units
from wattcast.core.arrays import Array, pareto_front
from wattcast.core.errors import BadInput, MissingTool, WattcastError, bad_value, unknown_name
from wattcast.core.strict_files import decode_yaml, read_bytes
from wattcast.explore.explorations import build_study
from wattcast.explore.study import evaluate_points
from wattcast.hardware import Gpu
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.pipeline import idle_power_w
from wattcast.workload.model_options import ModelOptions

LIMIT_S = 60.0  # of the solver
CLOCK_COUNT = 28  # tried on each GPU, evenly over its range
MOST_GPUS = 1_000_000


class FleetAim(StrEnum):
    """Name what the assignment is best at."""

    ENERGY = "energy"
    THROUGHPUT = "throughput"


class _Workload(msgspec.Struct, forbid_unknown_fields=True):
    workload: str
    rate: str
    name: str = ""
    options: dict[str, Any] = {}


class _Fleet(msgspec.Struct, forbid_unknown_fields=True):
    gpus: dict[str, int]
    workloads: list[_Workload]
    power: str | None = None
    pue: float = 1.0


@dataclass(frozen=True)
class WorkloadDemand:
    """Hold one workload and the requests per second asked of it (for throughput: its share of the mix)."""

    name: str
    workload: str
    rate_per_s: float
    options: dict[str, Any]


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


@dataclass(frozen=True)
class _Column:
    """Hold one way to use one GPU: a column of the program."""

    demand: int
    kind: int
    clock_hz: float
    per_s: float
    power_w: float
    idle_w: float


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
        rate = units.parse(item.rate, "/s", f"{path.name}: workloads[{index}].rate")
        if rate <= 0:
            raise bad_value(f"{path.name}: workloads[{index}].rate", "above zero", item.rate)
        where, known = f"{path.name}: workloads[{index}].options", [field.name for field in fields(ModelOptions)]
        for name in item.options:
            if name not in known:
                raise unknown_name(f"option in {where}", name, known, f"Known: {', '.join(known)}.")
        chosen = ModelOptions(**item.options)
        if chosen.gpu_count > 1:
            raise bad_value(where, "one GPU a workload (tp, pp, dp and cp of 1)", "several")
        demands.append(
            WorkloadDemand(item.name or f"{index + 1}: {item.workload}", item.workload, rate, item.options)
        )
    if len({demand.name for demand in demands}) < len(demands):
        raise bad_value(f"{path.name}: workloads", "a name of its own for each", "two alike")
    power_w = np.inf if file.power is None else units.parse(file.power, "W", f"{path.name}: power")
    if site_power is not None:
        power_w = units.parse_amount(site_power, "W", "site_power", inclusive=False)
    return Fleet(tuple((find_gpu(n), count) for n, count in file.gpus.items()), tuple(demands), power_w, file.pue)


def assign_fleet(fleet: Fleet, aim: str = "energy") -> FleetAssignment:
    """Return the best assignment; the error says which constraint stands in the way where there is none."""
    if aim not in list(FleetAim):
        raise unknown_name("aim", aim, list(FleetAim), f"Known: {', '.join(FleetAim)}.")
    columns, notes = _list_columns(fleet)
    base_w = np.array(
        [float(idle_power_w(bundle_for(gpu), list_settable_clocks(gpu)[:1])[0]) for gpu, _ in fleet.gpus]
    )
    counts = np.array([count for _, count in fleet.gpus])
    if base_w @ counts * fleet.pue > fleet.power_w:
        idle = units.show(float(base_w @ counts * fleet.pue), "W")
        raise BadInput(f"power: the GPUs draw {idle} idle, more than the budget of {units.show(fleet.power_w, 'W')}.")
    solved = _solve_assignment(fleet, columns, base_w, FleetAim(aim), fleet.power_w)
    if solved is None:
        # The error that rates cannot be met: how much of them can be, and whether power or GPUs bind
        free = _solve_assignment(fleet, columns, base_w, FleetAim.THROUGHPUT, fleet.power_w)
        asked = np.array([d.rate_per_s for d in fleet.demands])
        share = float((_served_per_s(fleet, columns, free[1]) / asked).min()) if free is not None else 0.0
        if _solve_assignment(fleet, columns, base_w, FleetAim.ENERGY, np.inf) is not None:
            what = f"power: {units.show(fleet.power_w, 'W')} is too little, with more these GPUs would do"
        else:
            what = "GPUs: there are too few, whatever the power"
        raise BadInput(f"the rates cannot be met. {what}. At most {share:.1%} of every rate can be served.")
    return _make_assignment(fleet, columns, base_w, FleetAim(aim), *solved, notes)


def _list_columns(fleet: Fleet) -> tuple[list[_Column], tuple[str, ...]]:
    """Return every workload on every GPU at the clocks on the front of speed and power."""
    columns: list[_Column] = []
    notes: list[str] = []
    for index, demand in enumerate(fleet.demands):
        why = []
        for kind, (gpu, _) in enumerate(fleet.gpus):
            clock_hz = list_settable_clocks(gpu)
            try:
                asked = build_study(demand.workload, gpu, [f"clock={float(clock_hz[0])!r}Hz"], **demand.options)
                found = evaluate_points(asked, {"asked_clock_hz": clock_hz})
            except WattcastError as error:
                why.append(f"{gpu.name}: {error}")
                continue
            if not found.get("fits", np.array([True])).all():
                why.append(f"{gpu.name}: does not fit in memory")
                continue
            idle = idle_power_w(bundle_for(gpu), clock_hz)
            batch = float(demand.options.get("batch", 1))
            for row in pareto_front(np.stack([found["latency_s"], found["power_w"]], axis=-1)):
                per_s = batch / float(found["latency_s"][row])
                values = (float(clock_hz[row]), per_s, float(found["power_w"][row]), float(idle[row]))
                columns.append(_Column(index, kind, *values))
            notes += [*asked.graph.assumptions, *asked.bundle.assumptions]
        if len(why) == len(fleet.gpus):
            raise BadInput(f"{demand.name}: no GPU of the fleet can run it ({'; '.join(why)}).")
    return columns, tuple(dict.fromkeys(notes))


def _solve_assignment(
    fleet: Fleet, columns: list[_Column], base_w: Array, aim: FleetAim, power_w: float
) -> tuple[Array, Array] | None:
    """Return the GPUs given and the GPUs' worth of busy time in each column; None where there is no solution."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix, eye_array, hstack
    except ImportError:
        raise MissingTool("fleets need SciPy. Install it: pip install 'wattcast[explore]'.") from None
    size = len(columns)
    demand = np.array([c.demand for c in columns])
    kind = np.array([c.kind for c in columns])
    busy_w, rest_w = np.array([c.power_w for c in columns]), np.array([c.idle_w for c in columns])
    per_s = np.array([c.per_s for c in columns])
    rate = np.array([d.rate_per_s for d in fleet.demands])
    counts = np.array([count for _, count in fleet.gpus], dtype=float)
    every = np.arange(size)
    # variables: x (whole), u, t
    owned = coo_matrix((np.ones(size), (kind, every)), shape=(len(counts), 2 * size + 1))
    held = hstack([-eye_array(size), eye_array(size), coo_matrix((size, 1))])
    each = np.arange(len(rate))
    at = (np.append(demand, each), np.append(size + every, np.full(len(rate), 2 * size)))
    work = coo_matrix((np.append(per_s / rate[demand], -np.ones(len(rate))), at), shape=(len(rate), 2 * size + 1))
    above_w = busy_w - base_w[kind]
    budget = np.concatenate([above_w, np.zeros(size + 1)])[np.newaxis]
    room_w = power_w / fleet.pue - base_w @ counts
    limits = [
        LinearConstraint(owned, -np.inf, counts),
        LinearConstraint(held, -np.inf, 0.0),
        LinearConstraint(work, 0.0, np.inf),
    ]
    if np.isfinite(power_w):
        limits.append(LinearConstraint(budget, -np.inf, room_w))
    fixed = aim is FleetAim.ENERGY
    energy = np.concatenate([rest_w - base_w[kind], busy_w - rest_w, [0.0]])
    cost = energy if fixed else np.append(np.zeros(2 * size), -1.0)
    low, high = np.zeros(2 * size + 1), np.full(2 * size + 1, np.inf)
    if fixed:
        low[-1] = high[-1] = 1.0
    bounds = Bounds(low, high)
    integrality = np.append(np.ones(size), np.zeros(size + 1))
    done = milp(cost, constraints=limits, bounds=bounds, integrality=integrality, options={"time_limit": LIMIT_S})
    if done.x is None:
        return None
    given = np.round(done.x[:size])
    return given, np.minimum(done.x[size : 2 * size], given)  # the solver's whole numbers are whole to 1e-6


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
    counts = np.array([count for _, count in fleet.gpus])
    rows, served = [], _served_per_s(fleet, columns, busy)
    mean_w = peak_w = 0.0
    left = counts.astype(float)
    for x, u, c in zip(given, busy, columns, strict=True):
        left[c.kind] -= x
        mean_w += u * c.power_w + (x - u) * c.idle_w
        peak_w += x * c.power_w
        if x > 0:
            rows.append(
                {
                    "workload": fleet.demands[c.demand].name,
                    "gpu": fleet.gpus[c.kind][0].name,
                    "gpus": int(x),
                    "clock_hz": c.clock_hz,
                    "busy_share": float(u / x),
                    "power_w_per_gpu": c.power_w,
                    "requests_per_s": float(u * c.per_s),
                    "energy_j_per_request": c.power_w / c.per_s,
                }
            )
    rest_w = float(left @ base_w)
    peak_w = float(peak_w + rest_w) * fleet.pue
    shortest = [float(s / d.rate_per_s) for s, d in zip(served, fleet.demands, strict=True)]
    asked = [
        {"workload": d.name, "asked_per_s": d.rate_per_s, "served_per_s": float(s)}
        for d, s in zip(fleet.demands, served, strict=True)
    ]
    idle = {gpu.name: round(count) for (gpu, _), count in zip(fleet.gpus, left, strict=True)}
    said = (*notes, "GPUs without work idle at their lowest clock; one GPU holds one workload")
    limits = {"power": peak_w > 0.98 * fleet.power_w, "GPUs": not any(idle.values())}
    binds = " and ".join(name for name, reached in limits.items() if reached) or "neither power nor GPUs"
    return FleetAssignment(
        aim, rows, asked, float(mean_w + rest_w) * fleet.pue, peak_w, idle, min(shortest), binds, said
    )


def list_settable_clocks(gpu: Gpu) -> Array:
    """List clocks the card can be set to, evenly over its range."""
    high = float(gpu.clocks.max_hz)
    low = float(gpu.clocks.min_hz) if gpu.clocks.min_hz is not None else 0.3 * high
    even = np.linspace(low, high, CLOCK_COUNT)
    if gpu.clocks.step_hz is not None:
        step = float(gpu.clocks.step_hz)
        even = high - step * np.round((high - even) / step)
    return np.unique(np.clip(even, low, high))
