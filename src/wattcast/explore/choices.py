"""Which GPU, which algorithm: separate workloads and chips, each predicted once, side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from wattcast import hardware, units
from wattcast.api import find_gpu
from wattcast.equilibrium import settle
from wattcast.errors import BadInput, WattcastError, bad_value, unknown_name
from wattcast.explore.api import Workload
from wattcast.explore.money import Prices
from wattcast.fitted import bundle_for
from wattcast.flow import analyse, at_clock
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.workload import source
from wattcast.workload.graph import Graph
from wattcast.workload.options import Options

MOST = 10_000  # combinations of options


@dataclass(frozen=True)
class Choice:
    """One way to run the workload, or why it cannot be."""

    names: Mapping[str, Any]  # what distinguishes it: the GPU, or the options varied
    results: Mapping[str, Any]  # columns; empty where it cannot be run
    reason: str = ""
    notes: tuple[str, ...] = ()
    chip: Gpu | None = None

    @property
    def row(self) -> dict[str, Any]:
        """For tables and JSON."""
        return {**self.names, **self.results, "reason": self.reason or None}


def gpus(
    workload: Workload,
    names: Sequence[str] = (),
    prices: Prices = Prices(),  # noqa: B008  (frozen)
    power_limit: str | None = None,
    **options: object,
) -> list[Choice]:
    """The same workload on several GPUs (default: the catalogue), least energy per request first."""
    chips = [find_gpu(name) for name in names or hardware.names()]
    twice = [chip.name for chip in chips if [other.name for other in chips].count(chip.name) > 1]
    if twice:
        raise bad_value("gpus", "each GPU once", f"{twice[0]} twice")
    chosen = Options.of(**options)
    graph = source.load(workload, chosen)
    at = _settings(power_limit)
    found = [_tried({"gpu": chip.name}, lambda: (graph, chosen), chip, prices, at) for chip in chips]
    if not any(choice.results for choice in found):
        why = "; ".join(f"{choice.names['gpu']}: {choice.reason}" for choice in found)
        raise BadInput(f"no GPU can run this workload: {why}")
    return sorted(found, key=_rank)


def _rank(choice: Choice) -> tuple[bool, bool, float]:
    """Those that fit, then those that do not, then those that cannot be run; by energy within each."""
    results = choice.results
    return not results, results.get("fits") is False, float(results.get("energy_j_per_request", 0.0))


def algorithms(
    workload: Workload,
    gpu: str | Path | Gpu,
    vary: Sequence[str],
    prices: Prices = Prices(),  # noqa: B008  (frozen)
    power_limit: str | None = None,
    **options: object,
) -> list[Choice]:
    """Every combination of ``vary`` (``dtype=bf16,fp8``, ``batch=1,2,4``), with speed-up over the first that runs."""
    axes = _axes(vary)
    chip, at = find_gpu(gpu), _settings(power_limit)
    if source.find_model(workload) is None:
        raise bad_value("workload", "a model, whose options can vary", "a list of operators")
    count = math.prod(len(values) for values in axes.values())
    if count > MOST:
        raise bad_value("vary", f"at most {MOST:,} combinations", f"{count:,}", "Name fewer values.")
    found = []
    for combination in itertools.product(*axes.values()):
        names = dict(zip(axes, combination, strict=True))
        asked = partial(_asked, workload, {**options, **names})
        found.append(_tried(names, asked, chip, prices, at))
    first = next((choice.results for choice in found if choice.results), None)
    if first is None:
        raise BadInput(f"none of the {count} combinations can be run. The first: {found[0].reason}")
    return [_compared(choice, first) for choice in found]


def _asked(workload: Workload, options: Mapping[str, object]) -> tuple[Graph, Options]:
    chosen = Options.of(**options)
    return source.load(workload, chosen), chosen


def _settings(power_limit: str | None) -> OperatingPoint:
    return OperatingPoint(power_limit_w=None if power_limit is None else units.parse(power_limit, "W", "power_limit"))


def _tried(
    names: Mapping[str, Any],
    asked: Callable[[], tuple[Graph, Options]],
    gpu: Gpu,
    prices: Prices,
    at: OperatingPoint,
) -> Choice:
    """Predict one choice. One that cannot be run is a result, not a failure of the whole."""
    try:
        graph, chosen = asked()
        bundle = bundle_for(gpu)
        timeline = analyse(graph, gpu, bundle)
        settled = settle(timeline, gpu, at, bundle)
        totals = at_clock(timeline, settled.at, bundle)
    except WattcastError as error:
        return Choice(names, {}, str(error), chip=gpu)
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
    return Choice(names, results, notes=(*graph.assumptions, *bundle.assumptions), chip=gpu)


def _compared(choice: Choice, first: Mapping[str, Any]) -> Choice:
    if not choice.results:
        return choice
    more = {
        "speedup": choice.results["requests_per_s"] / first["requests_per_s"],
        "energy_ratio": choice.results["energy_j_per_request"] / first["energy_j_per_request"],
    }
    return replace(choice, results={**choice.results, **more})


def _axes(vary: Sequence[str]) -> dict[str, list[Any]]:
    if not vary:
        raise bad_value("vary", "at least one option to vary, such as dtype=bf16,fp8", "none")
    axes: dict[str, list[Any]] = {}
    known = {item.name for item in fields(Options)} - {"recompute"}
    for spec in vary:
        name, equals, text = (piece.strip() for piece in spec.partition("="))
        if not equals or not text:
            raise bad_value("vary", "option=values, such as dtype=bf16,fp8", spec)
        if name not in known:
            raise unknown_name("option", name, known, f"Known: {', '.join(sorted(known))}.")
        if name in axes:
            raise bad_value("vary", "each option once", f"{name} twice")
        axes[name] = _listed(name, text)
    return axes


def _listed(name: str, text: str) -> list[Any]:
    """Values of one option: names, or whole numbers, or ``low:high:step``."""
    kind = str(get_type_hints(Options)[name])
    if "int" not in kind and "float" not in kind:
        return [piece.strip() for piece in text.split(",")]
    where = f"vary {name}"
    pieces = text.split(":")
    numbers = [units.parse(piece.strip(), "", where) for piece in (pieces if len(pieces) > 1 else text.split(","))]
    if len(pieces) > 1:
        if len(pieces) != 3 or not numbers[2] > 0 or not numbers[0] <= numbers[1]:
            raise bad_value(where, "low:high:step or a list", text)
        count = int((numbers[1] - numbers[0]) / numbers[2] + 1e-9) + 1
        if count > MOST:
            raise bad_value(where, f"at most {MOST:,} values", f"{count:,}")
        numbers = [numbers[0] + numbers[2] * i for i in range(count)]
    if "int" in kind and any(number != round(number) for number in numbers):
        raise bad_value(where, "whole numbers", text)
    return [round(number) if "int" in kind else number for number in numbers]
