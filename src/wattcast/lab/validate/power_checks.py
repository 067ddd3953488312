"""The same kernels through three power models side by side.

Beside the measured power of a kernel stand three models:

- **forecast** knows the operator's shapes alone: time, counts and clock are predicted by a fit
  without that shape.
- **counters** is the counter model that ships, fitted to microbenchmarks: counted events over the
  measured time.
- **components** are the energies of AccelWattch's counters (``gpuwattch.measured_energies``), on
  the same counts.

The kernels are operators that the components were not fitted to. Each model's watts are grouped by
where they are spent. The memory rail is measured too, so it can tell which model has device memory
right."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.calibrate.kernel_rows import (
    parse_operators,
    read_condition,
    shape_name,
)
from wattcast.core.arrays import Array
from wattcast.core.measured_rows import Plain
from wattcast.core.row_tables import database_folder, read_table
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import build_kernels
from wattcast.kernels.kernel_table import IssueSegment
from wattcast.lab.gpuwattch import measured_energies
from wattcast.lab.validate.counter_model_checks import sum_events
from wattcast.power.activity import (
    Activity,
    ActivitySource,
    known_events,
)
from wattcast.power.power_model import load_saved_model
from wattcast.predictor.api import find_gpu
from wattcast.predictor.bundle.bundle_file import Bundle, shipped_bundle
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_kernels, detail_at_clock
from wattcast.workload.operator_base import Operator

# a forecast counts the cycles of busy SMs, the others instructions and threads
SM = "instructions, arithmetic"
MODELS = ("forecast", "counters", "components")
PLACES = ("base", SM, "tensor", "L1, shared", "L2, network", "device memory")
KERNELS = 40
_OF_A_FAMILY = 5


@dataclass(frozen=True)
class KernelViews:
    """One measured kernel as three models see it, in watts."""

    name: str
    family: str
    measured_w: float
    memory_rail_w: float  # of the measured power, the memory's
    capped: bool  # at the power limit, which a forecast knows
    model_w: Mapping[str, float]
    place_w: Mapping[str, Mapping[str, float]]  # model -> place -> watts

    @property
    def nearest(self) -> str:
        """The model whose total is nearest to the measurement."""
        return min(MODELS, key=lambda model: abs(self.model_w[model] - self.measured_w))

    @property
    def dispute(self) -> tuple[str, float]:
        """The place where the models differ most, and by how many watts."""
        spread = {}
        for place in PLACES:
            watts = [self.place_w[model].get(place, 0.0) for model in MODELS]
            spread[place] = max(watts) - min(watts)
        place = max(spread, key=lambda name: spread[name])
        return place, spread[place]


def compare_power_models(gpu: str = "h200", count: int = KERNELS) -> list[KernelViews]:
    """Return ``count`` counted operators that no component was fitted to, each through the three
    models.
    """
    folder = database_folder(gpu)
    chip = find_gpu(gpu)
    bundle = shipped_bundle(gpu)
    assert bundle is not None
    forecast_w = _held_out_watts(
        folder.parent.parent / "predictor" / "bundle" / gpu / "out_of_fold.parquet"
    )
    entries = measured_energies.counted_rows(folder, gpu)
    chosen = _choose_rows([row for row, _ in entries], forecast_w, count)
    is_chosen = np.isin(np.arange(len(entries)), chosen)
    launches = measured_energies.read_operators(folder, gpu).select(is_chosen)
    counter_w = _counter_parts([entries[i] for i in chosen], launches, gpu)
    component_w = _component_parts(launches, gpu)
    views = []
    for k, i in enumerate(chosen):
        row = entries[i][0]
        (op,) = parse_operators([row["operator"]])
        place_w = {
            "forecast": _forecast_parts(
                row,
                op,
                chip,
                bundle,
                forecast_w[_row_key(row)],
            ),
            "counters": counter_w[k],
            "components": component_w[k],
        }
        view = KernelViews(
            _SILENT_SETTINGS.sub("", shape_name(op)),
            row["family"],
            row["power_w"],
            float(row["memory_power_w"]),
            "sw_power_cap" in (row["throttle"] or []),
            {model: sum(place_w[model].values()) for model in MODELS},
            place_w,
        )
        views.append(view)
    return views


# settings of an operator that have their usual value
_SILENT_SETTINGS = re.compile(r" \w+=(None|False|forward|contiguous|0\.0|1(?= ))(?= |$)")


def _component_parts(
    launches: measured_energies.CountedLaunches, gpu: str
) -> list[dict[str, float]]:
    """Return the watts of each operator by place, as the measured component energies give them."""
    sm_count = float(measured_energies.measured_chip(gpu).design.sm_count)
    activity = measured_energies.launches_to_activity(launches, sm_count)
    power = measured_energies.measured_model(gpu)[2].model.power(activity)
    place_of = _read_places("component")
    return [_group_watts(power.parts, watts, place_of, SM) for watts in power.part_w]


def _forecast_parts(
    row: Plain,
    op: Operator,
    chip: Gpu,
    bundle: Bundle,
    total_w: float,
) -> dict[str, float]:
    """Return the watts of an operator by place: shares of the shipped fit, in a total from a fit
    without this shape.
    """
    segment = IssueSegment(np.array([0]), np.array([1.0]), 1)
    kernels = build_kernels(
        (op,),
        (read_condition(row),),
        chip,
        bundle.reference,
        (segment,),
    )
    timeline = analyse_kernels(kernels, chip, bundle)
    at = run_governed(timeline, chip, OperatingPoint(), bundle)[0].at
    detail = detail_at_clock(timeline, at, bundle)
    part_j = (detail.kernel_part_w * detail.kernel_s[..., np.newaxis]).sum(axis=-2)
    part_w = part_j / detail.kernel_s.sum()
    places = _group_watts(bundle.power.parts, part_w.reshape(-1), _read_places("module"))
    scale = total_w / sum(places.values())
    return {place: scale * value for place, value in places.items()}


def summarise_views(views: Sequence[KernelViews]) -> dict[str, Any]:
    """Return each model's error, how often it is nearest, where models differ, and what the memory
    rail supports.
    """
    measured = np.array([view.measured_w for view in views])
    rail_w = np.array([view.memory_rail_w for view in views])
    free = np.array([not view.capped for view in views])
    summary: dict[str, Any] = {"kernels": len(views), "capped": int((~free).sum())}
    summary |= {
        "models": {},
        "disputes": {},
        "families": {},
    }
    for model in MODELS:
        watts = np.array([view.model_w[model] for view in views])
        memory_w = np.array([view.place_w[model].get("device memory", 0.0) for view in views])
        slope, rest_w = np.polyfit(memory_w, rail_w, 1)
        off = watts / measured - 1
        summary["models"][model] = {
            "mape": float(100 * np.mean(np.abs(off))),
            "below_limit": float(100 * np.mean(np.abs(off)[free])),
            "bias": float(100 * np.mean(off)),
            "nearest": sum(view.nearest == model for view in views),
            "memory_correlation": float(np.corrcoef(memory_w, rail_w)[0, 1]),
            "memory_slope": float(slope),
            "memory_rest_w": float(rest_w),
        }
    for view in views:
        place, spread_w = view.dispute
        summary["disputes"].setdefault(place, []).append(spread_w)
    for family in dict.fromkeys(view.family for view in views):
        family_views = [view for view in views if view.family == family]
        errors = {
            m: float(100 * np.mean([abs(v.model_w[m] / v.measured_w - 1) for v in family_views]))
            for m in MODELS
        }
        summary["families"][family] = {"kernels": len(family_views), **errors}
    return summary


def format_views(views: Sequence[KernelViews]) -> str:
    """Return the page's tables in Markdown."""
    summary = summarise_views(views)
    free = summary["kernels"] - summary["capped"]
    head = (
        f"| model | error % | of the {free} below the limit | bias % | nearest | memory "
        "rail: r | slope |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for model, of in summary["models"].items():
        figures = (
            f"{of['mape']:.1f} | {of['below_limit']:.1f} | {of['bias']:+.1f} | {of['nearest']}"
        )
        lines.append(
            f"| {model} | {figures} | {of['memory_correlation']:.2f} | {of['memory_slope']:.2f} |"
        )
    lines += [
        "",
        "| family | kernels | forecast % | counters % | components % |",
        "|---|---|---|---|---|",
    ]
    for family, of in summary["families"].items():
        lines.append(
            f"| {family} | {of['kernels']} | "
            + " | ".join(f"{of[model]:.1f}" for model in MODELS)
            + " |"
        )
    lines += ["", "| models differ most in | kernels | median W |", "|---|---|---|"]
    for place, watts in sorted(summary["disputes"].items(), key=lambda item: -len(item[1])):
        lines.append(f"| {place} | {len(watts)} | {np.median(watts):.0f} |")
    head = (
        "| kernel | measured W | forecast | counters | components | nearest | models "
        "differ most in, W |"
    )
    lines += ["", head, "|---|---|---|---|---|---|---|"]
    for view in views:
        watts_of = " | ".join(f"{view.model_w[model]:.0f}" for model in MODELS)
        place = view.dispute[0]
        shown = ", ".join(f"{view.place_w[model].get(place, 0.0):.0f}" for model in MODELS)
        lines.append(
            f"| {view.name} | {view.measured_w:.0f} | {watts_of} | {view.nearest} | "
            f"{place}: {shown} |"
        )
    return "\n".join(lines) + "\n"


def _row_key(row: Plain) -> str:
    return f"{row['latency_s']:.5e}"


def _held_out_watts(path: Path) -> dict[str, float]:
    """Return the held-out power of each sustained row of random data, by its latency, where no
    other has the same.
    """
    rows = [
        row
        for row in read_table(path)
        if row["kind"] == "sustained" and row["predicted_power_w"] is not None
    ]
    seen = Counter(map(_row_key, rows))
    alone = (row for row in rows if row["data"] == "random" and seen[_row_key(row)] == 1)
    return {_row_key(row): row["predicted_power_w"] for row in alone}


def _choose_rows(
    rows: Sequence[Plain],
    forecast_w: Mapping[str, float],
    count: int,
) -> list[int]:
    """Choose rows of operators never used: a few of each family by the order of their hash, then
    the rest alike.
    """
    first: dict[str, int] = {}
    for i, row in enumerate(rows):
        if (
            measured_energies.is_held_out(row["spec"])
            and _row_key(row) in forecast_w
            and row["memory_power_w"]
        ):
            first.setdefault(row["spec"], i)
    order = [first[spec] for spec in sorted(first)]
    rank: dict[str, int] = {}
    places = []
    for i in order:
        family = rows[i]["family"]
        rank[family] = rank.get(family, 0) + 1
        places.append((rank[family] > _OF_A_FAMILY, i))
    return sorted(i for _, i in sorted(places, key=lambda place: place[0])[:count])


def _read_places(of: str) -> dict[str, str]:
    """Return where modules, events or components spend their power, by name."""
    rows = read_shipped_table("wattcast.lab.validate", "power_places.csv")
    return {row["name"]: row["place"] for row in rows if row["of"] == of}


def _group_watts(
    parts: Sequence[str],
    watts: Array,
    place_of: Mapping[str, str],
    default: str = "base",
) -> dict[str, float]:
    place_w = dict.fromkeys(PLACES, 0.0)
    for part, value in zip(parts, watts.tolist(), strict=True):
        place_w[place_of.get(part, default)] += value
    return place_w


def _counter_parts(
    entries: Sequence[tuple[Plain, list[dict[str, float]]]],
    launches: measured_energies.CountedLaunches,
    gpu: str,
) -> list[dict[str, float]]:
    """Return the watts of the counter model that ships, on the metrics of each operator's
    kernels.
    """
    model = load_saved_model(Path(gpu)).model
    modules = _read_places("module")
    place_of = {name: modules.get(event.module, "base") for name, event in known_events().items()}
    place_of |= _read_places("event")
    chip = find_gpu(gpu)
    operator_parts = []
    for (row, kernels), seconds in zip(entries, launches.duration_s, strict=True):
        events = sum_events(kernels)
        events["core_cycle"] = seconds * row["sm_clock_hz"]
        at = OperatingPoint(clock_hz=row["sm_clock_hz"], memory_clock_hz=chip.memory.clock_hz)
        counts = np.array([list(events.values())])
        activity = Activity(
            np.array([seconds]),
            counts,
            tuple(events),
            at,
            ActivitySource.PROFILED,
        )
        power = model.power(activity)
        operator_parts.append(_group_watts(power.parts, power.part_w[0], place_of))
    return operator_parts
