"""Draw sweeps, explorations and fleets; a figure function takes results and returns a Figure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.core.errors import bad_value
from wattcast.core.strict_files import read_shipped_table
from wattcast.explore.exploration_report import name_unit
from wattcast.explore.explorations import (
    Alternative,
    Exploration,
    build_study,
)
from wattcast.explore.fleet import FleetAssignment
from wattcast.explore.study import Columns, tabulate_points
from wattcast.explore.sweep import SweepResult
from wattcast.hardware.card_coefficients import CARDS
from wattcast.report import figure_style
from wattcast.report.figure_style import (
    SERIES_COLOURS,
    Figure,
    add_caption,
    new_axes,
)
from wattcast.report.prediction_figures import draw_pareto
from wattcast.report.text_tables import format_cell
from wattcast.workload.readers.load_workload import Workload

MOST_LINES = 8
_TITLE_SIZE = 10
MOST_CELLS = 250_000  # of a heat map
CLOCK_STEPS = 60.0  # steps of a GPU's curve over its clocks
_IDLE_COLOUR = "#DDDDDD"


def draw_pareto_front(result: SweepResult) -> Figure:
    """Draw a selection of points by the first two objectives, and the Pareto front through them."""
    x, y = result.objectives[:2]
    figure, axes = new_axes(7.0, 5.0)
    shown = result.summary.shown
    front = result.summary.front
    grey: dict[str, Any] = {"color": figure_style.MODULE_COLOURS["static"], "alpha": 0.5}
    axes.plot(
        *_scale_pair(shown, x, y),
        ".",
        ms=2,
        label="points",
        **grey,
    )
    style = "-" if len(result.objectives) == 2 else "."
    colour = figure_style.PREDICTED
    axes.plot(*_scale_pair(front, x, y), style, color=colour, label="Pareto front")
    axes.legend(frameon=False)
    return _label_sweep(figure, result, x, y)


def draw_heat_map(result: SweepResult, columns: Sequence[str]) -> Figure:
    """Draw the least value at each pair of two axes, whatever the other axes are.

    ``columns`` are the two axes and the value, which is the energy where it is not named.
    """
    x, y = columns[:2]
    value = columns[2] if len(columns) > 2 else "energy_j"
    shown = result.summary.shown
    for name in (x, y, value):
        if name not in shown:
            raise bad_value("heat map", f"columns among {', '.join(shown)}", name)
    values_x, place_x = np.unique(shown[x], return_inverse=True)
    values_y, place_y = np.unique(shown[y], return_inverse=True)
    if values_x.size * values_y.size > MOST_CELLS:
        sizes = f"{values_x.size} by {values_y.size} different values"
        raise bad_value("heat map", "two axes of a grid", sizes)
    least = np.full((values_y.size, values_x.size), np.inf)
    np.minimum.at(least, (place_y, place_x), _scale_column(value, shown[value]))

    figure, axes = new_axes(7.0, 5.0)
    mesh = axes.pcolormesh(
        _scale_column(x, values_x),
        _scale_column(y, values_y),
        np.ma.masked_invalid(least),
        shading="nearest",
        cmap="cividis",
    )
    label = axis_label(value, result.study.graph.gpu_count)
    figure.colorbar(mesh, label=f"Least {label[0].lower()}{label[1:]}")
    return _label_sweep(figure, result, x, y)


def draw_curves(
    tables: Mapping[str, Mapping[str, npt.NDArray[Any]]],
    x: str,
    values: Sequence[str],
    caption: str,
) -> Figure:
    """Draw several quantities against one, a line for each named table (a GPU, a power limit)."""
    figure = figure_style.new_figure(3.4 * len(values) + 1.2, 3.6)
    panels = np.ravel(figure.subplots(1, len(values), squeeze=False))
    for axes, value in zip(panels, values, strict=True):
        for place, (name, columns) in enumerate(tables.items()):
            colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
            axes.plot(*_scale_pair(columns, x, value), color=colour, label=name)
        axes.set(xlabel=axis_label(x), ylabel=axis_label(value))
    panels[-1].legend(frameon=False)
    return add_caption(figure, caption)


def draw_exploration(
    result: Exploration,
    workload: Workload | None = None,
    options: Mapping[str, Any] | None = None,
) -> Figure:
    """Draw curves over clocks where they vary, or each GPU's curve where GPUs do.

    Otherwise, and where the workload is not given, energy is drawn against latency.
    """
    if "asked_clock_hz" in result.axes:
        return _draw_over_clocks(result)
    if result.axes == ("gpu",) and workload is not None:
        return draw_gpus(workload, result.points, options or {})
    points = {}
    for point in result.points:
        if point.results:
            label = ", ".join(f"{name} {value}" for name, value in point.names.items())
            latency_ms = 1e3 * point.results["latency_s"]
            points[label] = (latency_ms, point.results["energy_j_per_unit"])
    if not points:
        raise bad_value("figure", "at least one way that can be run", "none")
    note = f"{len(points)} ways, predicted"
    missing = len(result.points) - len(points)
    if missing:
        note += f"; {missing} cannot be run and are not shown"
    energy = f"Energy per {name_unit(result)} (J)"
    return draw_pareto(
        points,
        "Latency (ms)",
        energy,
        result.title,
        note,
    )


def _draw_over_clocks(result: Exploration) -> Figure:
    """Draw latency, power and energy over the clocks asked for, a line for each other choice."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for point in result.points:
        if not point.results:
            continue
        words = []
        for name, value in point.names.items():
            if name != "asked_clock_hz":
                words.append(format_cell(name, value))
        label = ", ".join(words) or str(point.row["gpu"])
        lines.setdefault(label, []).append(point.row)
    has_several_gpus = any(rows[0]["gpus"] > 1 for rows in lines.values())
    columns = ("asked_clock_hz", "latency_s", *_choose_totals(has_several_gpus))
    tables = {}
    for label, rows in itertools.islice(lines.items(), MOST_LINES):
        table = {}
        for name in columns:
            table[name] = np.array([row[name] for row in rows])
        tables[label] = table
    return draw_curves(tables, columns[0], columns[1:], result.title)


def _choose_totals(has_several_gpus: bool) -> tuple[str, str]:
    return ("total_power_w", "total_energy_j") if has_several_gpus else ("power_w", "energy_j")


def draw_gpus(
    workload: Workload,
    points: Sequence[Alternative],
    options: Mapping[str, Any],
) -> Figure:
    """Draw power and energy against latency over the clocks of each GPU, of eight at most."""
    chips = [point.chip for point in points if point.results and point.chip is not None]
    tables: dict[str, Columns] = {}
    has_several_gpus = False
    for chip in chips[:MOST_LINES]:
        high_hz = float(chip.clocks.max_hz)
        low_hz = float(chip.clocks.min_hz or CARDS.lowest_clock * chip.clocks.max_hz)
        step_hz = max((high_hz - low_hz) / CLOCK_STEPS, 1.0)
        words = [f"clock={low_hz!r}Hz:{high_hz!r}Hz:{step_hz!r}Hz"]
        study = build_study(workload, chip, words, **options)
        has_several_gpus = study.graph.gpu_count > 1
        tables[chip.name] = tabulate_points(study, 0, study.space.size)
    caption = "each line runs over the clocks of one GPU, at its default power limit"
    return draw_curves(tables, "latency_s", _choose_totals(has_several_gpus), caption)


def draw_assignment(result: FleetAssignment, source: str = "") -> Figure:
    """Draw how many GPUs of each kind run each workload, stacked; idle ones in grey."""
    counts: dict[tuple[str, str], float] = {}  # by workload and kind
    for row in result.rows:
        key = (str(row["workload"]), str(row["gpu"]))
        counts[key] = counts.get(key, 0.0) + float(row["gpus"])
    workloads = dict.fromkeys(workload for workload, _ in counts)
    kinds = list(dict.fromkeys([*(kind for _, kind in counts), *result.idle_gpus]))
    for kind, count in result.idle_gpus.items():
        counts["idle", kind] = float(count)
    colours = dict(zip(workloads, itertools.cycle(SERIES_COLOURS), strict=False))
    colours["idle"] = _IDLE_COLOUR

    figure, axes = new_axes(7.5, 1.6 + 0.5 * len(kinds))
    begin = np.zeros(len(kinds))
    for workload, colour in colours.items():
        width = np.array([counts.get((workload, kind), 0.0) for kind in kinds])
        axes.barh(
            range(len(kinds)),
            width,
            left=begin,
            color=colour,
            label=workload,
            height=0.6,
        )
        begin = begin + width
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlabel("GPUs")
    mean = f"{result.power_w / 1e3:.4g} kW mean at the meter"
    axes.set_title(f"{mean}, {result.peak_w / 1e3:.4g} kW at most", fontsize=10)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
    caption = f"{source}; {result.aim}: {result.binds}"
    return add_caption(figure, caption.removeprefix("; "))


# Labels


@cache
def _read_labels() -> dict[str, dict[str, str]]:
    return {row["column"]: row for row in read_shipped_table("wattcast.explore", "axis_labels.csv")}


def axis_label(column: str, gpus: int = 1) -> str:
    """Return what an axis says: the quantity and its unit.

    Of several GPUs that share a run, ``power_w`` and ``energy_j`` are those of one.
    """
    label = _read_labels().get(column, {"label": column})["label"]
    if gpus > 1 and column in ("power_w", "energy_j"):
        return label.replace(" (", " of one GPU (")
    return label


def _scale_column(column: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(values) * float(_read_labels().get(column, {"scale": "1"})["scale"])


def _scale_pair(
    columns: Mapping[str, npt.NDArray[Any]],
    x: str,
    y: str,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return _scale_column(x, columns[x]), _scale_column(y, columns[y])


def _label_sweep(
    figure: Figure,
    result: SweepResult,
    x: str,
    y: str,
) -> Figure:
    axes = figure.axes[0]
    study = result.study
    gpus = study.graph.gpu_count
    axes.set(xlabel=axis_label(x, gpus), ylabel=axis_label(y, gpus))
    axes.set_title(f"{study.graph.name} on designs around {study.gpu.name}", fontsize=_TITLE_SIZE)
    points = f"{result.points:,} points, {len(result.summary.shown['point']):,} shown"
    return add_caption(figure, f"{points}; {figure_style.describe_origin(study.bundle)}")
