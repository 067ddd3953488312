"""Report sweeps, explorations and fleets as JSON and as tables in a terminal.

JSON fields may be added, never renamed or removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from wattcast import __version__
from wattcast.core.arrays import table_rows
from wattcast.core.strict_files import FitStatus
from wattcast.core.units import show, show_plain
from wattcast.explore.explorations import (
    OBJECTIVE_COLUMNS,
    Alternative,
    Exploration,
    ExploreObjective,
)
from wattcast.explore.fleet import FleetAssignment
from wattcast.explore.search_space import SamplingMethod, SpaceAxis
from wattcast.explore.sweep import BEST_COLUMNS, SweepResult
from wattcast.predictor.prediction_json import take_fields
from wattcast.report.text_tables import (
    format_cell,
    print_notes,
    print_rows,
)


def sweep_json(done: SweepResult) -> dict[str, Any]:
    """Return the front, the best points and what was asked."""
    study = done.study
    summary = done.summary
    sampled = study.space.method is not SamplingMethod.GRID
    return {
        "wattcast": __version__,
        "workload": study.graph.name,
        "gpu": study.gpu.name,
        "points": done.points,
        "kept": summary.kept,
        "space": {
            "method": str(study.space.method),
            "seed": study.space.seed if sampled else None,
            "axes": [_axis_to_plain(axis) for axis in study.space.axes],
        },
        "where": [str(constraint) for constraint in study.constraints],
        "objectives": list(done.objectives),
        "gpu_count": study.graph.gpu_count,
        "best": dict(zip(BEST_COLUMNS, table_rows(summary.best), strict=True)),
        "front": table_rows(summary.front),
        "status": str(study.bundle.status),
        "notes": list(done.notes),
        "assumptions": list(dict.fromkeys([*study.graph.assumptions, *study.bundle.assumptions])),
    }


def _axis_to_plain(axis: SpaceAxis) -> dict[str, Any]:
    if axis.field.choices:
        names = [axis.field.choices[int(number)] for number in axis.values]
        return {
            "field": axis.field.name,
            "column": axis.field.column,
            "values": names,
        }
    return {
        "field": axis.field.name,
        "column": axis.field.column,
        "low": float(axis.values.min()),
        "high": float(axis.values.max()),
        "values": None if axis.continuous else int(axis.values.size),
    }


def exploration_json(result: Exploration) -> dict[str, Any]:
    """Return every point, and the best by each objective.

    A point that cannot be run has a reason and no numbers.
    """
    return {
        "wattcast": __version__,
        "axes": list(result.axes),
        "bound": result.bound,
        "currency": result.prices.currency or None,
        "best": _choices_to_plain(result.best),
        "bolder": _choices_to_plain(result.bolder),
        "points": result.rows,
        "assumptions": _list_assumptions(result),
    }


def _choices_to_plain(choices: Mapping[ExploreObjective, Alternative]) -> dict[str, Any]:
    rows = {}
    for objective, point in choices.items():
        rows[str(objective)] = {**point.row, "risk": point.describe_risk()}
    return rows


def _list_assumptions(result: Exploration) -> list[str]:
    notes: list[str] = []
    for point in result.points:
        notes += point.notes
    return list(dict.fromkeys([*notes, *result.prices.notes]))


def assignment_json(result: FleetAssignment) -> dict[str, Any]:
    """Return which GPUs run which workload."""
    return {
        "wattcast": __version__,
        "aim": str(result.aim),
        "served_share": result.factor,
        "peak_power_w": result.peak_w,
        "currency": result.currency or None,
        **take_fields(
            result,
            "power_w",
            "cost_per_h",
            "binds",
            "idle_gpus",
        ),
        "assignment": result.rows,
        "workloads": result.served,
        "assumptions": list(result.notes),
    }


MOST_ROWS = 15


def print_sweep(console: Console, done: SweepResult) -> None:
    """Print the best points and the front of a sweep, and what was assumed."""
    study = done.study
    summary = done.summary
    mark = ""
    if study.bundle.status is not FitStatus.MEASURED:
        mark = f" ({study.bundle.status} coefficients)"
    share = "" if summary.kept == done.points else f", {summary.kept:,} meet the constraints"
    count = study.graph.gpu_count
    gpus = f", {count} GPUs each" if count > 1 else ""
    console.print(
        f"[bold]{escape(study.graph.name)}[/bold] on designs around "
        f"[bold]{escape(study.gpu.name)}[/bold]{mark}: {done.points:,} points{share}{gpus}"
    )
    watts_and_joules = {"power_w": "power", "energy_j": "energy"}
    if study.graph.gpu_count > 1:
        watts_and_joules = {
            "total_power_w": "total power",
            "power_w": "of one GPU",
            "total_energy_j": "total energy",
        }
    results = {
        "latency_s": "latency",
        **watts_and_joules,
        "clock_hz": "clock",
    }
    flags = {
        "capped": "capped",
        "limit_met": "limit met",
        "fits": "fits",
    }
    columns = {name: name for name in study.space.columns} | results | flags
    best = zip(BEST_COLUMNS, table_rows(summary.best), strict=True)
    rows = [{"least": name, **row} for name, row in best]
    print_rows(console, rows, {"least": "least"} | columns, "The best of each")
    front = table_rows(summary.front)
    chosen = _choose_spread(front, MOST_ROWS)
    title = f"Pareto front of {' and '.join(done.objectives)}"
    if len(chosen) < len(front):
        title += f", {len(chosen)} of {len(front):,} shown"
    print_rows(console, chosen, columns, title)
    print_notes(console, [*study.graph.assumptions, *study.bundle.assumptions, *done.notes])


_SETTING_TITLES = {
    "asked_clock_hz": "asked clock",
    "asked_power_limit_w": "limit",
    "temperature_c": "temperature",
}
MOST_POINTS = 40  # points of an exploration that are printed


def print_exploration(
    console: Console,
    result: Exploration,
    least: ExploreObjective,
) -> None:
    """Print the best points, a selection of all, and why others cannot be run."""
    ran = [_add_slowdown(point) for point in result.points if point.results]
    columns = _name_columns(result, has_several_gpus=any(row["gpus"] > 1 for row in ran))
    console.print(f"[bold]{escape(result.title)}[/bold]: {_write_answer(result, least, columns)}")
    best = [{"least": str(aim)} | _add_slowdown(point) for aim, point in result.best.items()]
    if len(ran) > len(best):
        title = f"The best of each, {result.bound}"
        print_rows(console, best, {"least": "least"} | columns, title)
    shown = _choose_spread(ran, MOST_POINTS)
    title = "All points"
    if len(shown) < len(ran):
        title = f"{len(shown)} of {len(ran):,} points"
    print_rows(console, shown, columns, title)
    for point in result.points:
        if point.reason:
            names = ", ".join(str(value) for value in point.names.values())
            console.print(f"{escape(names)}: {escape(point.reason)}")
    print_notes(console, _list_assumptions(result))


def _name_columns(result: Exploration, has_several_gpus: bool) -> dict[str, str]:
    """Return the columns of an exploration's table with their titles."""
    columns = {name: _SETTING_TITLES.get(name, name) for name in result.axes}
    columns |= {
        "latency_s": "latency",
        "total_power_w": "total power" if has_several_gpus else "power",
        "clock_hz": "clock",
        "capped": "capped",
        "fits": "fits",
    }
    columns |= _name_units(result, has_several_gpus)
    if set(result.axes) & set(_SETTING_TITLES):
        columns["slowdown"] = "slowdown"
    else:
        columns |= {"speedup": "speed-up", "energy_ratio": "energy ratio"}
    columns["coefficients"] = "coefficients"
    return columns


def _write_answer(
    result: Exploration,
    least: ExploreObjective,
    columns: Mapping[str, str],
) -> str:
    """Say which point has the least of an objective, and how far it is from measurements."""
    if least not in result.best:
        return f"no point fits the memory {result.bound}"

    def name_point(point: Alternative) -> str:
        words = []
        for name, item in point.names.items():
            value = format_cell(name, item)
            words.append(f"{columns[name]} {value}")
        return ", ".join(words)

    best = result.best[least]
    risk = best.describe_risk()
    bolder = result.bolder.get(least)
    if bolder is not None:
        column = OBJECTIVE_COLUMNS[least]
        saved = 1.0 - bolder.results[column] / best.results[column]
        risk = f"{name_point(bolder)} would take {saved:.1%} less, {bolder.describe_risk()}"
    warning = f" ([yellow]{escape(risk)}[/yellow])" if risk else ""
    return f"least {least} {result.bound} at {name_point(best)}{warning}"


def name_unit(result: Exploration) -> str:
    """Return what speed and energy of all points are counted in.

    This is tokens, pictures or runs, or each point's own unit.
    """
    words = {point.results["unit"] for point in result.points if point.results}
    return words.pop() if len(words) == 1 else "unit"


def _name_units(result: Exploration, has_several_gpus: bool) -> dict[str, str]:
    """Return the columns of speed, energy, cost and carbon, with what they are counted in."""
    unit = name_unit(result)
    currency = result.prices.currency or "cost"
    columns = {"gpus": "GPUs"} if has_several_gpus else {}
    if unit == "unit":
        columns["unit"] = "unit"
    columns["units_per_s"] = f"{unit}s/s"
    columns["energy_j_per_unit"] = f"J/{unit}"
    if unit == "token":
        columns["cost_per_million_tokens"] = f"{currency}/M tokens"
        columns["carbon_g_per_million_tokens"] = "g CO2e/M tokens"
    else:
        columns["cost_per_unit"] = f"{currency}/{unit}"
        columns["carbon_g_per_unit"] = f"g CO2e/{unit}"
    return columns


def _add_slowdown(point: Alternative) -> dict[str, Any]:
    return point.row | {"slowdown": f"{point.results['slowdown']:.1%}"}


def _choose_spread(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return at most so many rows, spread evenly over all."""
    places = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)
    return [rows[place] for place in np.unique(places)]


def print_assignment(console: Console, result: FleetAssignment) -> None:
    """Print which GPUs run which workload, at which clock, and what the site draws."""
    cost = ""
    if result.cost_per_h is not None:
        cost = f"; {show_plain(result.cost_per_h, 4)} {result.currency or 'cost'} an hour"
    console.print(
        f"[bold]{result.factor:.1%}[/bold] of every rate served, "
        f"{show(result.power_w, 'W')} on average, "
        f"{show(result.peak_w, 'W')} with every assigned GPU busy; limited by {result.binds}{cost}"
    )
    columns = {
        "workload": "workload",
        "gpu": "gpu",
        "gpus": "GPUs",
        "replica": "replica",
        "clock_hz": "clock",
        "busy_share": "busy",
        "power_w_per_gpu": "power each",
    }
    words = {row["unit"] for row in result.rows}
    unit = words.pop() if len(words) == 1 else "unit"
    if unit == "unit":
        columns["unit"] = "unit"
    columns["units_per_s"] = f"{unit}s/s"
    columns["energy_j_per_unit"] = f"J/{unit}"
    optional = {
        "ttft_p99_s": "TTFT p99",
        "tpot_p99_s": "TPOT p99",
        "risk": "risk",
    }
    for name, title in optional.items():
        is_filled = any(row.get(name) for row in result.rows)
        if is_filled:
            columns[name] = title
    print_rows(console, result.rows, columns, f"Assignment for {result.aim}")
    idle = [f"{count} x {escape(name)}" for name, count in result.idle_gpus.items() if count]
    console.print(f"Idle: {', '.join(idle) or 'none'}")
    print_notes(console, result.notes)
