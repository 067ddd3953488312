"""Report explorations as JSON, as tables in a terminal and as figures.

JSON fields may be added, never renamed or removed. A figure function takes results and returns a
matplotlib Figure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

from wattcast import __version__
from wattcast.core.arrays import table_rows
from wattcast.core.errors import bad_value
from wattcast.core.strict_files import FitStatus, read_shipped_table
from wattcast.core.units import show
from wattcast.explore.explorations import (
    OBJECTIVE_COLUMNS,
    Alternative,
    Exploration,
    ExploreObjective,
    build_study,
)
from wattcast.explore.fleet import FleetAssignment
from wattcast.explore.search_space import SamplingMethod
from wattcast.explore.study import Columns, tabulate_points
from wattcast.explore.sweep import BEST_COLUMNS, SweepResult
from wattcast.predictor.prediction_json import take_fields
from wattcast.report import figure_style
from wattcast.report.figure_style import SERIES_COLOURS, Figure, add_caption, new_axes
from wattcast.report.prediction_figures import draw_pareto
from wattcast.report.text_tables import format_cell, print_notes, print_rows
from wattcast.serving.capacity_plan import PlanResult, list_plan_notes
from wattcast.serving.plan_options import MOST_TOKENS
from wattcast.serving.plan_search import ServingPlan
from wattcast.serving.service_demand import ServiceDemand
from wattcast.workload.readers.load_workload import Workload


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
            "axes": [
                {
                    "field": axis.field.name,
                    "column": axis.field.column,
                    "low": float(axis.values.min()),
                    "high": float(axis.values.max()),
                    "values": None if axis.continuous else int(axis.values.size),
                }
                for axis in study.space.axes
            ],
        },
        "where": [str(constraint) for constraint in study.constraints],
        "objectives": list(done.objectives),
        "best": dict(zip(BEST_COLUMNS, table_rows(summary.best), strict=True)),
        "front": table_rows(summary.front),
        "status": str(study.bundle.status),
        "notes": list(done.notes),
        "assumptions": list(dict.fromkeys([*study.graph.assumptions, *study.bundle.assumptions])),
    }


def exploration_json(found: Exploration) -> dict[str, Any]:
    """Return every point, and the best by each objective; a point that cannot be run has a reason
    and no numbers.
    """
    notes = [note for point in found.points for note in point.notes]
    return {
        "wattcast": __version__,
        "axes": list(found.axes),
        "bound": found.bound,
        "currency": found.prices.currency or None,
        **{
            name: {
                str(aim): point.row | {"risk": point.describe_risk()} for aim, point in some.items()
            }
            for name, some in (("best", found.best), ("bolder", found.bolder))
        },
        "points": found.rows,
        "assumptions": list(dict.fromkeys([*notes, *found.prices.notes])),
    }


def assignment_json(found: FleetAssignment) -> dict[str, Any]:
    """Return which GPUs run which workload."""
    return {
        "wattcast": __version__,
        "aim": str(found.aim),
        "served_share": found.factor,
        "peak_power_w": found.peak_w,
        "currency": found.currency or None,
        **take_fields(found, "power_w", "cost_per_h", "binds", "idle_gpus"),
        "assignment": found.rows,
        "workloads": found.served,
        "assumptions": list(found.notes),
    }


MOST_ROWS = 15


def print_sweep(console: Console, done: SweepResult) -> None:
    """Print the best points and the front of a sweep, and what was assumed."""
    study = done.study
    summary = done.summary
    mark = (
        ""
        if study.bundle.status is FitStatus.MEASURED
        else f" ({study.bundle.status} coefficients)"
    )
    share = "" if summary.kept == done.points else f", {summary.kept:,} meet the constraints"
    console.print(
        f"[bold]{escape(study.graph.name)}[/bold] on designs around [bold]{escape(study.gpu.name)}[/bold]{mark}: "
        f"{done.points:,} points{share}"
    )
    results = {
        "latency_s": "latency",
        "power_w": "power",
        "energy_j": "energy",
        "clock_hz": "clock",
    }
    flags = {"capped": "capped", "limit_met": "limit met", "fits": "fits"}
    columns = {name: name for name in study.space.columns} | results | flags
    least = [
        {"least": name, **row}
        for name, row in zip(BEST_COLUMNS, table_rows(summary.best), strict=True)
    ]
    print_rows(console, least, {"least": "least"} | columns, "The best of each")
    front = table_rows(summary.front)
    chosen = _choose_spread(front, MOST_ROWS)
    some = "" if len(chosen) == len(front) else f", {len(chosen)} of {len(front):,} shown"
    print_rows(console, chosen, columns, f"Pareto front of {' and '.join(done.objectives)}{some}")
    print_notes(console, [*study.graph.assumptions, *study.bundle.assumptions, *done.notes])


def print_exploration(console: Console, found: Exploration, least: ExploreObjective) -> None:
    """Print the best points, a selection of all, and why others cannot be run."""
    said = {
        "asked_clock_hz": "asked clock",
        "asked_power_limit_w": "limit",
        "temperature_c": "temperature",
    }
    compared = {"speedup": "speed-up", "energy_ratio": "energy ratio"}
    ran = [_add_slowdown(point) for point in found.points if point.results]
    columns = {name: said.get(name, name) for name in found.axes} | {
        "latency_s": "latency",
        "total_power_w": "total power" if any(row["gpus"] > 1 for row in ran) else "power",
        "clock_hz": "clock",
        "capped": "capped",
        "fits": "fits",
        **_name_units(found, any(row["gpus"] > 1 for row in ran)),
        **({"slowdown": "slowdown"} if set(found.axes) & set(said) else compared),
        "coefficients": "coefficients",
    }

    def name_point(point: Alternative) -> str:
        return ", ".join(
            f"{columns[name]} {format_cell(name, value)}" for name, value in point.names.items()
        )

    answer = f"no point fits the memory {found.bound}"
    if least in found.best:
        chosen = found.best[least]
        bold = found.bolder.get(least)
        risk = (bold or chosen).describe_risk()
        if bold is not None:
            column = OBJECTIVE_COLUMNS[least]
            saved = 1.0 - bold.results[column] / chosen.results[column]
            risk = f"{name_point(bold)} would take {saved:.1%} less, {risk}"
        told = f" ([yellow]{escape(risk)}[/yellow])" if risk else ""
        answer = f"least {least} {found.bound} at {name_point(chosen)}{told}"
    console.print(f"[bold]{escape(found.title)}[/bold]: {answer}")
    best = [{"least": str(aim)} | _add_slowdown(point) for aim, point in found.best.items()]
    if len(ran) > len(best):
        print_rows(console, best, {"least": "least"} | columns, f"The best of each, {found.bound}")
    some = _choose_spread(ran, 40)
    title = f"{len(some)} of {len(ran):,} points" if len(some) < len(ran) else "All points"
    print_rows(console, some, columns, title)
    for point in found.points:
        if point.reason:
            names = ", ".join(str(value) for value in point.names.values())
            console.print(f"{escape(names)}: {escape(point.reason)}")
    print_notes(
        console, [*(note for point in found.points for note in point.notes), *found.prices.notes]
    )


def name_unit(found: Exploration) -> str:
    """Return what speed and energy of all points are counted in: tokens, pictures, runs, or each
    point's own.
    """
    words = {point.results["unit"] for point in found.points if point.results}
    return words.pop() if len(words) == 1 else "unit"


def _name_units(found: Exploration, several_gpus: bool) -> dict[str, str]:
    """Return the columns of speed, energy, cost and carbon with the words of what they are counted
    in.
    """
    unit = name_unit(found)
    money = found.prices.currency or "cost"
    columns = {"gpus": "GPUs"} if several_gpus else {}
    if unit == "unit":
        columns["unit"] = "unit"
    columns |= {"units_per_s": f"{unit}s/s", "energy_j_per_unit": f"J/{unit}"}
    if unit == "token":
        names = ("cost_per_million_tokens", "carbon_g_per_million_tokens")
        return columns | dict(zip(names, (f"{money}/M tokens", "g CO2e/M tokens"), strict=True))
    return columns | {"cost_per_unit": f"{money}/{unit}", "carbon_g_per_unit": f"g CO2e/{unit}"}


def _add_slowdown(point: Alternative) -> dict[str, Any]:
    return point.row | {"slowdown": f"{point.results['slowdown']:.1%}"}


def _choose_spread(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return at most so many rows, spread evenly over all."""
    return [
        rows[i] for i in np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))
    ]


def print_assignment(console: Console, found: FleetAssignment) -> None:
    """Print which GPUs run which workload, at which clock, and what the site draws."""
    console.print(
        f"[bold]{found.factor:.1%}[/bold] of every rate served, {show(found.power_w, 'W')} on average, "
        f"{show(found.peak_w, 'W')} with every assigned GPU busy; {found.binds} bind"
        + (
            ""
            if found.cost_per_h is None
            else f"; {found.cost_per_h:.4g} {found.currency or 'cost'} an hour"
        )
    )
    columns = {
        "workload": "workload",
        "gpu": "gpu",
        "gpus": "GPUs",
        "replica": "replica",
        "clock_hz": "clock",
    }
    columns |= {"busy_share": "busy", "power_w_per_gpu": "power each"}
    words = {row["unit"] for row in found.rows}
    unit = words.pop() if len(words) == 1 else "unit"
    columns |= {"unit": "unit"} if unit == "unit" else {}
    columns |= {"units_per_s": f"{unit}s/s", "energy_j_per_unit": f"J/{unit}"}
    more = {"ttft_p99_s": "TTFT p99", "tpot_p99_s": "TPOT p99", "risk": "risk"}
    columns |= {
        name: title for name, title in more.items() if any(row.get(name) for row in found.rows)
    }
    print_rows(console, found.rows, columns, f"Assignment for {found.aim}")
    left = ", ".join(
        f"{count} x {escape(name)}" for name, count in found.idle_gpus.items() if count
    )
    console.print(f"Idle: {left or 'none'}")
    print_notes(console, found.notes)


def print_plan(console: Console, result: PlanResult) -> None:
    """Print the best plan in a sentence, then what it gives, and the best of each kind of GPU."""
    best = result.best.make_row()
    demand = result.demand
    money = demand.prices.currency or "cost"
    if not result.is_complete:
        console.print("[yellow]Interrupted: these are the plans so far.[/yellow]")
    _print_best_plan(console, demand, best, money)
    columns = {
        "gpu": "gpu", "gpus": "GPUs", "layout": "replica", "setting": "at most", "max_seqs": "most seqs",
        "load_share": "load", "ttft_p50_s": "TTFT p50", "ttft_p99_s": "p99", "tpot_p50_s": "TPOT p50",
        "tpot_p99_s": "p99", "power_w": "power", "energy_j_per_token": "J/token",
        "cost_per_million_tokens": f"{money}/M tokens", "carbon_g_per_million_tokens": "g CO2e/M tokens",
        "binds": "binds",
    }  # fmt: skip
    bests = [kind.best for kind in result.ranked_kinds if kind.best is not None]
    if len(result.kinds) > 1:
        title = "The best of each kind of GPU, best first"
        print_rows(console, _list_plan_rows(bests), columns, title)
        for kind in result.ranked_kinds:
            if kind.reason is not None:
                console.print(f"[bold]{escape(kind.gpu)}[/bold]: none. {escape(kind.reason)}")
    others = [made for made in result.plans if made not in bests or len(result.kinds) == 1]
    shown = list(dict.fromkeys([*others[:6], *(set(others) & set(result.front))]))
    if shown:
        title = "Plans, best first" if len(result.kinds) == 1 else "Other plans, best first"
        print_rows(
            console, _list_plan_rows(sorted(shown, key=lambda made: made.rank)), columns, title
        )
    served = {kind.gpu for kind in result.kinds if kind.best is not None}
    refused = [text for kind in result.kinds if kind.gpu in served for text in kind.refused]
    for sentence in refused[:6]:
        console.print(escape(sentence))
    print_notes(console, list_plan_notes(result))


def _print_best_plan(
    console: Console, demand: ServiceDemand, best: dict[str, Any], money: str
) -> None:
    """Print the best plan, what it gives, and what more traffic would take."""
    risk = f" ([yellow]{escape(best['risk'])}[/yellow])" if best["risk"] else ""
    has_short_steps = best["max_batched_tokens"] < MOST_TOKENS[0]
    step = f" and {best['max_batched_tokens']} tokens a step" if has_short_steps else ""
    is_limit = best["setting"].endswith("W") and "Hz" not in best["setting"]
    kind = "power limit" if is_limit else "at most"
    console.print(
        f"[bold]{escape(demand.model.name)}[/bold] at {demand.rate_per_s:g} requests/s, "
        f"{demand.prompt} + {demand.output} tokens: "
        f"[bold]{best['gpus']} x {escape(best['gpu'])}[/bold] "
        f"({best['replicas']} x {best['layout']}), {kind} {best['setting']}{risk}, "
        f"at most {best['max_seqs']} sequences{step}"
    )
    cost = best["cost_per_million_tokens"]
    spent = f", {cost:.3g} {money} a million output tokens" if cost is not None else ""
    console.print(
        f"{best['output_tokens_per_s']:.4g} output tokens/s, {show(best['power_w'], 'W')} in all, "
        f"{best['energy_j_per_token']:.3g} J/token{spent}; "
        f"running at {best['load_share']:.0%} of capacity; {describe_limit(best['binds'])}"
    )
    more = "; ".join(f"at {step['times']} times, {step['gpus']}" for step in best["growth"])
    console.print(f"GPUs if the traffic grows: {more}")


def describe_limit(binds: str) -> str:
    """Say what breaks first if the rate grows.

    >>> describe_limit("TPOT p99")
    'TPOT p99 is the limit'
    """
    return binds if binds.startswith("nothing") else f"{binds} is the limit"


def _list_plan_rows(plans: Sequence[ServingPlan]) -> list[dict[str, Any]]:
    """Return plans as rows of a table, with percentiles of latencies as columns."""
    rows = []
    for made in plans:
        row = made.make_row()
        for name in ("ttft", "tpot"):
            for percentile in ("p50", "p99"):
                row[f"{name}_{percentile}_s"] = row[f"{name}_s"][percentile]
        rows.append(row)
    return rows


def draw_pareto_front(done: SweepResult) -> Figure:
    """Draw a selection of points by the first two objectives, and the Pareto front through them."""
    x, y = done.objectives[:2]
    figure, axes = new_axes(7.0, 5.0)
    shown = done.summary.shown
    grey: dict[str, Any] = {"color": figure_style.MODULE_COLOURS["static"], "alpha": 0.5}
    axes.plot(
        _scale_column(x, shown[x]), _scale_column(y, shown[y]), ".", ms=2, label="points", **grey
    )
    best = done.summary.front
    style = "-" if len(done.objectives) == 2 else "."
    axes.plot(
        _scale_column(x, best[x]),
        _scale_column(y, best[y]),
        style,
        color=figure_style.PREDICTED,
        label="Pareto front",
    )
    axes.legend(frameon=False)
    return _label_sweep(figure, done, x, y)


def draw_heat_map(done: SweepResult, columns: Sequence[str]) -> Figure:
    """Draw the least value at each pair of two axes, whatever the other axes are, of the points
    shown.

    ``columns`` are the two axes and the value, which is the energy where it is not named.
    """
    x, y, value = (*columns, "energy_j")[:3]
    for name in (x, y, value):
        if name not in done.summary.shown:
            raise bad_value("heat map", f"columns among {', '.join(done.summary.shown)}", name)
    shown = done.summary.shown
    across, at_x = np.unique(shown[x], return_inverse=True)
    lines, at_y = np.unique(shown[y], return_inverse=True)
    if across.size * lines.size > 250_000:
        raise bad_value(
            "heat map", "two axes of a grid", f"{across.size} by {lines.size} different values"
        )
    least = np.full((lines.size, across.size), np.inf)
    np.minimum.at(least, (at_y, at_x), _scale_column(value, shown[value]))
    figure, axes = new_axes(7.0, 5.0)
    seen = np.ma.masked_invalid(least)
    mesh = axes.pcolormesh(
        _scale_column(x, across), _scale_column(y, lines), seen, shading="nearest", cmap="cividis"
    )
    figure.colorbar(
        mesh, label=f"Least {axis_label(value).lower() if value != 'energy_j' else 'energy (J)'}"
    )
    return _label_sweep(figure, done, x, y)


def draw_curves(
    found: Mapping[str, Mapping[str, npt.NDArray[Any]]], x: str, values: Sequence[str], caption: str
) -> Figure:
    """Draw several quantities against one, a line for each named table (a GPU, a power limit)."""
    figure = figure_style.new_figure(3.4 * len(values) + 1.2, 3.6)
    for axes, value in zip(
        np.ravel(figure.subplots(1, len(values), squeeze=False)), values, strict=True
    ):
        for index, (name, columns) in enumerate(found.items()):
            colour = SERIES_COLOURS[index % 8]
            axes.plot(
                _scale_column(x, columns[x]),
                _scale_column(value, columns[value]),
                color=colour,
                label=name,
            )
        axes.set(xlabel=axis_label(x), ylabel=axis_label(value))
    axes.legend(frameon=False)
    return add_caption(figure, caption)


def draw_exploration(found: Exploration, workload: Workload, options: Mapping[str, Any]) -> Figure:
    """Draw curves over clocks where they vary, each GPU's curve where GPUs do, else energy against
    latency.
    """
    if "asked_clock_hz" in found.axes:
        lines: dict[str, list[dict[str, Any]]] = {}
        for point in (point for point in found.points if point.results):
            others = {
                name: value for name, value in point.names.items() if name != "asked_clock_hz"
            }
            label = ", ".join(format_cell(name, value) for name, value in others.items())
            lines.setdefault(label or str(point.row["gpu"]), []).append(point.row)
        many = any(rows[0]["gpus"] > 1 for rows in lines.values())
        drawn = ("total_power_w", "total_energy_j") if many else ("power_w", "energy_j")
        names = ("asked_clock_hz", "latency_s", *drawn)
        tables = {
            label: {n: np.array([row[n] for row in rows]) for n in names}
            for label, rows in lines.items()
        }
        return draw_curves(dict(list(tables.items())[:8]), names[0], names[1:], found.title)
    if found.axes == ("gpu",):
        return draw_gpus(workload, found.points, options)
    points = {}
    for choice in (choice for choice in found.points if choice.results):
        label = ", ".join(f"{key} {value}" for key, value in choice.names.items())
        points[label] = 1e3 * choice.results["latency_s"], choice.results["energy_j_per_unit"]
    if not points:
        raise bad_value("figure", "at least one way that can be run", "none")
    missing = len(found.points) - len(points)
    note = f"{len(points)} ways, predicted" + (
        f"; {missing} cannot be run and are not shown" if missing else ""
    )
    return draw_pareto(
        points, "Latency (ms)", f"Energy per {name_unit(found)} (J)", found.title, note
    )


def draw_gpus(
    workload: Workload, found: Sequence[Alternative], options: Mapping[str, Any]
) -> Figure:
    """Draw power and energy against latency over the clocks of each GPU, a line for each, eight at
    most.
    """
    tables: dict[str, Columns] = {}
    for chip in [choice.chip for choice in found if choice.results and choice.chip is not None][:8]:
        low = float(chip.clocks.min_hz or 0.3 * chip.clocks.max_hz)
        high = float(chip.clocks.max_hz)
        step = max((high - low) / 60.0, 1.0)
        asked = build_study(workload, chip, [f"clock={low!r}Hz:{high!r}Hz:{step!r}Hz"], **options)
        tables[chip.name] = tabulate_points(asked, 0, asked.space.size)
    caption = "each line runs over the clocks of one GPU, at its default power limit"
    return draw_curves(tables, "latency_s", ("power_w", "energy_j"), caption)


@cache
def _read_labels() -> dict[str, dict[str, str]]:
    return {row["column"]: row for row in read_shipped_table("wattcast.explore", "axis_labels.csv")}


def axis_label(column: str) -> str:
    """Return what an axis says: the quantity and its unit."""
    return _read_labels().get(column, {"label": column})["label"]


def _scale_column(column: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(values) * float(_read_labels().get(column, {"scale": "1"})["scale"])


def _label_sweep(figure: Figure, done: SweepResult, x: str, y: str) -> Figure:
    axes = figure.axes[0]
    axes.set(xlabel=axis_label(x), ylabel=axis_label(y))
    axes.set_title(f"{done.study.graph.name} on designs around {done.study.gpu.name}", fontsize=10)
    kept = f"{done.points:,} points, {len(done.summary.shown['point']):,} shown"
    return add_caption(figure, f"{kept}; {figure_style.describe_origin(done.study.bundle)}")


def draw_assignment(found: FleetAssignment, source: str) -> Figure:
    """Draw how many GPUs of each kind run each workload, stacked; idle ones in grey."""
    kinds = list(dict.fromkeys([*(str(row["gpu"]) for row in found.rows), *found.idle_gpus]))
    work = list(dict.fromkeys(str(row["workload"]) for row in found.rows))
    figure, axes = new_axes(7.5, 1.6 + 0.5 * len(kinds))
    left = np.zeros(len(kinds))
    counts = [(row["workload"], row["gpu"], row["gpus"]) for row in found.rows]
    counts += [("idle", kind, count) for kind, count in found.idle_gpus.items()]
    for name, colour in [
        *zip(work, itertools.cycle(SERIES_COLOURS), strict=False),
        ("idle", "#DDDDDD"),
    ]:
        width = np.array(
            [float(sum(n for of, gpu, n in counts if (of, gpu) == (name, kind))) for kind in kinds]
        )
        axes.barh(range(len(kinds)), width, left=left, color=colour, label=name, height=0.6)
        left = left + width
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlabel("GPUs")
    axes.set_title(
        f"{found.power_w / 1e3:.4g} kW mean at the meter, {found.peak_w / 1e3:.4g} kW at most",
        fontsize=10,
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return add_caption(figure, f"{source}; {found.aim}: {found.binds}")


def draw_plan(result: PlanResult) -> Figure:
    """Draw every simulated plan by GPUs and joules per output token, with the Pareto front and the
    best.
    """
    figure, axes = new_axes(8.0, 4.5)
    kinds = list(dict.fromkeys(plan_made.option.gpu.name for plan_made in result.plans))
    for kind, colour in zip(kinds, SERIES_COLOURS, strict=False):
        points = [(p.gpus, p.energy_j_per_token) for p in result.plans if p.option.gpu.name == kind]
        axes.plot(*zip(*points, strict=True), "o", color=colour, alpha=0.7, label=kind)
    front = [(p.gpus, p.energy_j_per_token) for p in result.front]
    axes.plot(*zip(*front, strict=True), "-", color="0.4", lw=1.0, label="none is better in both")
    axes.plot(
        result.best.gpus,
        result.best.energy_j_per_token,
        "o",
        ms=13,
        mfc="none",
        color="k",
        label="best",
    )
    axes.set(xlabel="GPUs", ylabel="Energy per output token (J)", xlim=(0, None))
    axes.set_title(f"{result.demand.model.name} at {result.demand.rate_per_s:g} requests/s")
    axes.legend(frameon=False)
    return add_caption(figure, "; ".join(list_plan_notes(result)[:3]))
