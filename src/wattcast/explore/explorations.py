"""Explore many designs, clocks, GPUs or algorithms from Python, with the names and units of the command line.

    from wattcast import explore
    found = explore.explore_designs("llama3-8b", "h200", ["sm_count=64:192:4", "clock=1GHz,1.5GHz"], seq=1024)
    found.summary.front["latency_s"]

Columns are NumPy arrays in SI units, named with their unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from wattcast import hardware
from wattcast.core import units
from wattcast.core.errors import BadInput, MissingSpecification, WattcastError, bad_value, unknown_name
from wattcast.explore.search_space import parse_constraints, parse_space
from wattcast.explore.study import Columns, Study, tabulate_points
from wattcast.explore.sweep import ReportProgress, Runner, SweepResult, run_sweep
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import find_governed_point
from wattcast.predictor.pipeline import analyse_graph, total_at_clock
from wattcast.predictor.prices import Prices
from wattcast.workload.graph import Graph
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import load_workload

WorkloadSource = str | Path | Graph | Mapping[str, object]


def explore_designs(
    workload: WorkloadSource,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    *,
    where: Sequence[str] = (),
    sample: str | None = None,
    seed: int = 0,
    front: Sequence[str] = ("latency_s", "power_w"),
    clock: str | None = None,
    power_limit: str | None = None,
    out: str | Path | None = None,
    runner: Runner | None = None,
    progress: ReportProgress | None = None,
    yes: bool = False,
    bundle: Bundle | None = None,
    **options: object,
) -> SweepResult:
    """Evaluate every point of a space of chips and settings; return the Pareto front, write all points to ``out``.

    ``vary`` and ``where`` are written as on the command line (``explore/search_space.py``); ``options`` are those of
    ``ModelOptions``.
    """
    found = build_study(workload, gpu, vary, where, sample, seed, clock, power_limit, bundle, **options)
    return run_sweep(found, None if out is None else Path(out), tuple(front), runner, progress, yes)


def build_study(
    workload: WorkloadSource,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    where: Sequence[str] = (),
    sample: str | None = None,
    seed: int = 0,
    clock: str | None = None,
    power_limit: str | None = None,
    bundle: Bundle | None = None,
    **options: object,
) -> Study:
    """Build the study that these words describe."""
    chip = find_gpu(gpu)
    space = parse_space(list(vary), chip, sample, seed)
    for name, value in (("clock", clock), ("power_limit", power_limit)):
        if value is not None and any(axis.field.name == name for axis in space.axes):
            raise bad_value(name, "one value, or --vary", "both")
    at = OperatingPoint(
        # parsed as a space of one value, which checks that the card can be set to it
        clock_hz=None if clock is None else float(parse_space([f"clock={clock}"], chip).axes[0].values[0]),
        power_limit_w=None if power_limit is None else units.parse(power_limit, "W", "power_limit"),
    )
    graph = load_workload.load_workload(workload, ModelOptions.from_names(**options))
    return Study(graph, chip, bundle or bundle_for(chip), space, at, parse_constraints(where, chip, space.columns))


MOST_CLOCK_POINTS = 1_000_000  # clocks times power limits


class ClockObjective(StrEnum):
    """Name what the best clock has least of."""

    ENERGY = "energy"
    ED = "ed"  # energy x delay
    ED2 = "ed2"  # energy x delay²
    LATENCY = "latency"


OBJECTIVE_COLUMN = {
    ClockObjective.ENERGY: "energy_j",
    ClockObjective.ED: "energy_delay_js",
    ClockObjective.ED2: "energy_delay2_js2",
    ClockObjective.LATENCY: "latency_s",
}


@dataclass(frozen=True)
class ClockSweep:
    """Hold every clock and power limit, and the best by each objective among those within the bound."""

    study: Study
    columns: Columns
    best: dict[ClockObjective, int]  # row of ``columns``
    bound: str


def explore_clocks(
    workload: WorkloadSource,
    gpu: str | Path | Gpu,
    *,
    clock: str | None = None,
    power_limit: str | None = None,
    slowdown: str | None = None,
    latency: str | None = None,
    bundle: Bundle | None = None,
    **options: Any,
) -> ClockSweep:
    """Evaluate a workload at every clock (``low:high:step`` or a list; default: all of the card) and power limit.

    The best clock is sought among those at most ``slowdown`` (``5%``) slower than the fastest, or within
    ``latency``. ED = E·t and ED² = E·t² [Gonzalez1996; Martin2001].
    """
    chip = find_gpu(gpu)
    if clock is None:
        low, high, step = chip.clocks.min_hz, chip.clocks.max_hz, chip.clocks.step_hz
        if low is None or step is None:
            raise MissingSpecification(
                f"{chip.name}: its lowest clock or the step between clocks is not published. "
                "Say which clocks to try: --clocks 600MHz:1500MHz:15MHz."
            )
        clock = f"{float(low)!r}Hz:{float(high)!r}Hz:{float(step)!r}Hz"
    vary = [f"clock={clock}"] + ([f"power_limit={power_limit}"] if power_limit else [])
    found = build_study(workload, chip, vary, bundle=bundle, **options)
    if found.space.size > MOST_CLOCK_POINTS:
        raise bad_value(
            "clocks", f"at most {MOST_CLOCK_POINTS:,} points", f"{found.space.size:,}", "Take larger steps."
        )
    columns = tabulate_points(found, 0, found.space.size)
    columns |= energy_delay_products(columns)
    within, bound = _find_within(columns, slowdown, latency)
    rows = np.flatnonzero(within)
    best = {objective: int(rows[np.argmin(columns[name][rows])]) for objective, name in OBJECTIVE_COLUMN.items()}
    return ClockSweep(found, columns, best, bound)


def energy_delay_products(columns: Columns) -> Columns:
    """Return energy-delay products and slowdown against the fastest of these points."""
    latency_s, energy_j = columns["latency_s"], columns["energy_j"]
    return {
        "energy_delay_js": energy_j * latency_s,
        "energy_delay2_js2": energy_j * latency_s**2,
        "slowdown": latency_s / latency_s.min() - 1.0,
    }


def _find_within(columns: Columns, slowdown: str | None, latency: str | None) -> tuple[npt.NDArray[np.bool_], str]:
    """Tell which points keep the bound, and describe it."""
    if slowdown is not None and latency is not None:
        raise bad_value("bound", "a slowdown or a latency", "both")
    if slowdown is not None:
        most = units.parse(slowdown, "", "slowdown")
        if most < 0:
            raise bad_value("slowdown", "zero or more, such as 5%", slowdown)
        return columns["slowdown"] <= most, f"at most {most:.1%} slower than the fastest"
    if latency is not None:
        most = units.parse(latency, "s", "latency")
        within = columns["latency_s"] <= most
        if not within.any():
            least = float(columns["latency_s"].min())
            raise BadInput(f"latency: no clock meets {units.show(most, 's')}: the least is {units.show(least, 's')}.")
        return within, f"within {units.show(most, 's')}"
    return np.ones(len(columns["latency_s"]), dtype=bool), "without a bound"


MOST_COMBINATIONS = 10_000  # combinations of options


@dataclass(frozen=True)
class Alternative:
    """Hold one way to run the workload, or why it cannot be run."""

    names: Mapping[str, Any]  # what distinguishes it: the GPU, or the options varied
    results: Mapping[str, Any]  # columns; empty where it cannot be run
    reason: str = ""
    notes: tuple[str, ...] = ()
    chip: Gpu | None = None

    @property
    def row(self) -> dict[str, Any]:
        """Return names and results as one row, for tables and JSON."""
        return {**self.names, **self.results, "reason": self.reason or None}


def compare_gpus(
    workload: WorkloadSource,
    names: Sequence[str] = (),
    prices: Prices = Prices(),  # noqa: B008  (frozen)
    power_limit: str | None = None,
    **options: object,
) -> list[Alternative]:
    """Predict a workload on several GPUs (default: the catalogue), least energy per request first.

    GPUs whose memory is too small follow those that fit, and GPUs that cannot run it come last.
    """
    chips = [find_gpu(name) for name in names or hardware.gpu_names()]
    twice = [chip.name for chip in chips if [other.name for other in chips].count(chip.name) > 1]
    if twice:
        raise bad_value("gpus", "each GPU once", f"{twice[0]} twice")
    chosen = ModelOptions.from_names(**options)
    graph = load_workload.load_workload(workload, chosen)
    at = _limit_settings(power_limit)
    found = [_try_alternative({"gpu": chip.name}, lambda: (graph, chosen), chip, prices, at) for chip in chips]
    if not any(choice.results for choice in found):
        why = "; ".join(f"{choice.names['gpu']}: {choice.reason}" for choice in found)
        raise BadInput(f"no GPU can run this workload: {why}")

    def rank(choice: Alternative) -> tuple[bool, bool, float]:
        results = choice.results
        return not results, results.get("fits") is False, float(results.get("energy_j_per_request", 0.0))

    return sorted(found, key=rank)


def compare_algorithms(
    workload: WorkloadSource,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    prices: Prices = Prices(),  # noqa: B008  (frozen)
    power_limit: str | None = None,
    **options: object,
) -> list[Alternative]:
    """Predict every combination of ``vary`` (``dtype=bf16,fp8``, ``batch=1,2,4``), with speed-up over the first."""
    axes = _parse_options(vary)
    chip, at = find_gpu(gpu), _limit_settings(power_limit)
    if load_workload.find_model(workload) is None:
        raise bad_value("workload", "a model, whose options can vary", "a list of operators")
    count = math.prod(len(values) for values in axes.values())
    if count > MOST_COMBINATIONS:
        raise bad_value("vary", f"at most {MOST_COMBINATIONS:,} combinations", f"{count:,}", "Name fewer values.")

    def load(names: Mapping[str, Any]) -> tuple[Graph, ModelOptions]:
        chosen = ModelOptions.from_names(**{**options, **names})
        return load_workload.load_workload(workload, chosen), chosen

    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    found = [_try_alternative(names, partial(load, names), chip, prices, at) for names in combinations]
    first = next((choice.results for choice in found if choice.results), None)
    if first is None:
        raise BadInput(f"none of the {count} combinations can be run. The first: {found[0].reason}")
    compared = []
    for choice in found:
        ratios = choice.results and {
            "speedup": choice.results["requests_per_s"] / first["requests_per_s"],
            "energy_ratio": choice.results["energy_j_per_request"] / first["energy_j_per_request"],
        }
        compared.append(replace(choice, results={**choice.results, **ratios}))
    return compared


def _limit_settings(power_limit: str | None) -> OperatingPoint:
    return OperatingPoint(power_limit_w=None if power_limit is None else units.parse(power_limit, "W", "power_limit"))


def _try_alternative(
    names: Mapping[str, Any],
    load: Callable[[], tuple[Graph, ModelOptions]],
    gpu: Gpu,
    prices: Prices,
    at: OperatingPoint,
) -> Alternative:
    """Predict one alternative. One that cannot be run is a result, not a failure of the whole comparison."""
    try:
        graph, chosen = load()
        bundle = bundle_for(gpu)
        timeline = analyse_graph(graph, gpu, bundle)
        settled = find_governed_point(timeline, gpu, at, bundle)
        totals = total_at_clock(timeline, settled.at, bundle)
    except WattcastError as error:
        return Alternative(names, {}, str(error), chip=gpu)
    many = chosen.tp * chosen.pp * chosen.dp
    requests = chosen.batch * chosen.dp
    latency_s, energy_j = float(totals.latency_s), float(totals.energy_j)
    each_j, each_s = energy_j * many / requests, latency_s * many / requests
    results = {
        "gpus": many,
        "latency_s": latency_s,
        "power_w": float(totals.power_w),
        "energy_j": energy_j * many,
        "clock_hz": float(settled.clock_hz.reshape(-1)[0]),
        "capped": bool(settled.capped),
        "limit_met": bool(settled.met),
        "requests_per_s": requests / latency_s,
        "energy_j_per_request": each_j,
        "requests_per_j": 1.0 / each_j,
        "memory_byte": graph.memory_byte,
        "fits": None if graph.memory_byte is None else bool(graph.memory_byte <= gpu.memory.capacity_byte),
        "cost_per_request": prices.cost(gpu.name, each_j, each_s),
        "carbon_g_per_request": prices.carbon_g(each_j),
        "coefficients": str(bundle.status),
    }
    return Alternative(names, results, notes=(*graph.assumptions, *bundle.assumptions), chip=gpu)


def _parse_options(vary: Sequence[str]) -> dict[str, list[Any]]:
    if not vary:
        raise bad_value("vary", "at least one option to vary, such as dtype=bf16,fp8", "none")
    axes: dict[str, list[Any]] = {}
    known = {item.name for item in fields(ModelOptions)} - {"recompute"}
    for spec in vary:
        name, equals, text = (piece.strip() for piece in spec.partition("="))
        if not equals or not text:
            raise bad_value("vary", "option=values, such as dtype=bf16,fp8", spec)
        if name not in known:
            raise unknown_name("option", name, known, f"Known: {', '.join(sorted(known))}.")
        if name in axes:
            raise bad_value("vary", "each option once", f"{name} twice")
        axes[name] = _parse_option_values(name, text)
    return axes


def _parse_option_values(name: str, text: str) -> list[Any]:
    """Return the values of one option: names, numbers, or ``low:high:step``."""
    kind = str(get_type_hints(ModelOptions)[name])
    if "int" not in kind and "float" not in kind:
        return [piece.strip() for piece in text.split(",")]
    where = f"vary {name}"
    pieces = text.split(":")
    numbers = [units.parse(piece.strip(), "", where) for piece in (pieces if len(pieces) > 1 else text.split(","))]
    if len(pieces) > 1:
        if len(pieces) != 3 or not numbers[2] > 0 or not numbers[0] <= numbers[1]:
            raise bad_value(where, "low:high:step or a list", text)
        count = int((numbers[1] - numbers[0]) / numbers[2] + 1e-9) + 1
        if count > MOST_COMBINATIONS:
            raise bad_value(where, f"at most {MOST_COMBINATIONS:,} values", f"{count:,}")
        numbers = [numbers[0] + numbers[2] * i for i in range(count)]
    if "int" in kind and any(number != round(number) for number in numbers):
        raise bad_value(where, "whole numbers", text)
    return [round(number) if "int" in kind else number for number in numbers]
