"""Draw figures of counter models: errors over the clock plane, power over time, costs, voltages,
workloads.

Each function takes results and returns one matplotlib Figure; it never shows or saves. "Paper" is
Stokke 2016."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from wattcast.core.arrays import Array
from wattcast.lab.counter_models.counter_fit import CounterFit, main_model_kind
from wattcast.lab.counter_models.fit_diagnostics import FittedCost
from wattcast.lab.counter_models.launch_power import PowerEstimate
from wattcast.lab.counter_models.model_selection import TermsFit, average_error_plane
from wattcast.lab.counter_models.rail_terms import CounterModelKind
from wattcast.lab.counter_models.rails_apart import RailsFit
from wattcast.power.activity import known_events
from wattcast.report import figure_style
from wattcast.report.figure_style import (
    MEASURED,
    PREDICTED,
    FigureMaker,
    add_caption,
    new_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SHOWN_MODELS = (CounterModelKind.RATE, CounterModelKind.ALPHA_C, CounterModelKind.HYBRID)
MODEL_TITLES = {
    CounterModelKind.RATE: "rate-based",
    CounterModelKind.LINEAR: "linear with clocks",
    CounterModelKind.ALPHA_C: "switched capacitance",
    CounterModelKind.HYBRID: "hybrid rail",
}
# Okabe and Ito (2008), safe for colour-blind readers; parts take them in turn
PART_CYCLE = (
    "#999999",
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
    "#000000",
)


def make_counter_figures(result: CounterFit) -> dict[str, FigureMaker]:
    """Return a maker of every figure that a fit can show, by file name."""
    figures: dict[str, FigureMaker] = {"costs": partial(draw_event_costs, result)}
    core_clocks = np.unique(result.table.clock_hz).size
    memory_clocks = np.unique(result.table.memory_clock_hz).size
    if core_clocks > 1 and memory_clocks > 1:
        figures["error_planes"] = partial(draw_error_planes, result)
    if any(rail.clock_hz.size > 1 for rail in result.rails):
        figures["voltages"] = partial(draw_rail_voltages, result)
    if result.training_clocks:
        figures["training_clocks"] = partial(draw_training_clocks, result)
    return figures


def draw_error_planes(result: CounterFit) -> Figure:
    """Draw the mean error of each model over the clock plane on held-out benchmarks (paper figures
    9 and 10).
    """
    models = [model for model in SHOWN_MODELS if model in result.kinds]
    figure = figure_style.new_figure(4.4 * len(models), 4.6)
    axes = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    planes = []
    for model in models:
        held_out = result.kinds[model].held_out["benchmark"]
        planes.append(average_error_plane(result.table, held_out.predicted_w))
    largest = max(float(np.nanmax(error)) for _, _, error in planes)
    for ax, model, (core_hz, memory_hz, error) in zip(axes, models, planes, strict=True):
        image = _draw_error_plane(ax, error, largest)
        ax.set_xticks(range(memory_hz.size), [f"{hz / 1e6:.0f}" for hz in memory_hz])
        ax.set_yticks(range(core_hz.size), [f"{hz / 1e6:.0f}" for hz in core_hz])
        ax.set_xlabel("Memory clock (MHz)")
        mean = np.nanmean(error)
        worst = np.nanmax(error)
        ax.set_title(f"{MODEL_TITLES[model]}: {mean:.1f} %, {worst:.0f} % worst")
    axes[0].set_ylabel("Core clock (MHz)")
    figure.colorbar(
        image,
        ax=list(axes),
        label="Absolute error on unseen work (%)",
        shrink=0.85,
    )
    return add_caption(
        figure, f"{result.table.name}, mean of {result.table.benchmarks} benchmarks, each held out"
    )


def _draw_error_plane(
    ax: Axes,
    error: Array,
    largest: float,
) -> AxesImage:
    """Draw errors as colours and numbers; clocks are in equal steps, since they are uneven."""
    image = ax.imshow(
        error,
        cmap="YlOrBr",
        vmin=0.0,
        vmax=largest,
        aspect="auto",
        origin="lower",
    )
    for (row, column), value in np.ndenumerate(error):
        if np.isfinite(value):
            ax.text(
                column,
                row,
                f"{value:.1f}",
                ha="center",
                va="center",
                color="white" if value > 0.7 * largest else "black",
            )
    return image


def draw_launch_power(
    estimate: PowerEstimate,
    measured: tuple[Array, Array] | None = None,
    most: int = 8,
) -> Figure:
    """Draw watts by part over time, stacked, with measured power as dots (paper figures 8 and 11).

    Time in which a kernel without counters ran stays white. ``measured`` is seconds and watts.
    """
    figure, axes = new_axes(9.0, 4.2)
    end_s = estimate.start_s[-1] + estimate.activity.duration_s[-1]
    edges_ms = 1e3 * np.append(estimate.start_s, end_s)
    counted = np.where(estimate.counted > 0, 1.0, np.nan)
    stacked_w = np.zeros(estimate.start_s.size)
    for index, (name, part_w) in enumerate(_choose_parts(estimate, most)):
        top_w = stacked_w + part_w
        axes.stairs(
            top_w * counted,
            edges_ms,
            baseline=stacked_w * counted,
            fill=True,
            color=_choose_colour(index),
            label=name,
        )
        stacked_w = top_w
    if measured is not None:
        axes.plot(
            measured[0] * 1e3,
            measured[1],
            ".",
            color=MEASURED,
            markersize=4,
            label="measured",
        )
    axes.set(xlabel="Time (ms)", ylabel="Power (W)")
    axes.set_ylim(bottom=0.0)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
    return add_caption(
        figure, f"estimated from {estimate.start_s.size} intervals; mean {estimate.mean_w:.4g} W"
    )


def _choose_parts(estimate: PowerEstimate, most: int) -> list[tuple[str, Array]]:
    """Return the parts of most energy with their watts, static ones first; the others as one."""
    parts = estimate.power.parts
    part_w = estimate.power.part_w
    energy_j = (part_w * estimate.activity.duration_s[:, np.newaxis]).sum(axis=0)
    is_event = np.array([part in known_events() for part in parts])
    order = np.lexsort((-energy_j, is_event)).tolist()
    largest = sorted(order, key=lambda place: -energy_j[place])[:most]
    chosen = [(parts[place], part_w[:, place]) for place in order if place in largest]
    smaller = [place for place in order if place not in largest]
    if smaller:
        chosen.append(("others", part_w[:, smaller].sum(axis=1)))
    return chosen


def draw_event_costs(result: CounterFit) -> Figure:
    """Draw the watts of each cost at its largest measured value, with the 95 % interval (paper
    figure 12).
    """
    main = main_model_kind(result)
    caption = f"{result.table.name}, {MODEL_TITLES[main.model]}; bars 95 %, clustered by benchmark"
    return _draw_costs(main.diagnosis.coefficients, caption)


def _draw_costs(rows: Sequence[FittedCost], caption: str) -> Figure:
    figure, axes = new_axes(7.5, 0.7 + 0.3 * len(rows))
    places = range(len(rows))
    largest_w = np.array([cost.largest_w for cost in rows])
    occurrence = np.array([cost.largest_w / cost.value if cost.value else 0.0 for cost in rows])
    below_w = largest_w - occurrence * [cost.low for cost in rows]
    above_w = occurrence * [cost.high for cost in rows] - largest_w
    axes.barh(places, largest_w, color=PREDICTED, height=0.7)
    axes.errorbar(
        largest_w,
        places,
        xerr=np.maximum([below_w, above_w], 0.0),
        fmt="none",
        ecolor=MEASURED,
        capsize=2,
    )
    axes.set_yticks(places, [cost.name for cost in rows])
    axes.invert_yaxis()
    axes.set_xlabel("Power at the largest value measured, relative voltage 1 (W)")
    axes.axvline(0.0, color=MEASURED, linewidth=0.8)
    return add_caption(figure, caption)


def draw_rail_voltages(result: CounterFit) -> Figure:
    """Draw the inferred relative voltage of each rail with its standard error."""
    rails = [rail for rail in result.rails if rail.clock_hz.size > 1]
    figure = figure_style.new_figure(4.8 * len(rails), 3.8)
    axes = figure.subplots(1, len(rails), squeeze=False)[0]
    for ax, rail in zip(axes, rails, strict=True):
        ax.errorbar(
            rail.clock_hz / 1e6,
            rail.relative,
            yerr=rail.standard_error,
            color=PREDICTED,
            capsize=2,
            label="one curve for all memory clocks" if rail.rail == "core" else "inferred",
        )
        if rail.rail == "core":
            _draw_floored_voltages(ax, main_model_kind(result).fit)
        ax.set_title(f"{rail.rail} rail" + ("" if rail.identifiable else ": not identifiable"))
        ax.set_xlabel("Clock (MHz)")
        ax.legend(frameon=False)
    axes[0].set_ylabel("Relative voltage")
    return add_caption(figure, f"{result.table.name}; bars one standard error")


def _draw_floored_voltages(ax: Axes, fit: TermsFit) -> None:
    """Draw the core voltage at each memory clock, where that sets a floor to it."""
    curve, _ = fit.how.curves(fit.inferred.theta)
    if not curve.floor_clock_hz.size:
        return
    core_hz = fit.how.core.hz
    for index, memory_hz in enumerate(fit.how.memory.hz.tolist()):
        ax.plot(
            core_hz / 1e6,
            curve.level_at(core_hz, memory_hz),
            "--",
            lw=1,
            color=_choose_colour(index + 1),
            label=f"memory {memory_hz / 1e6:.0f} MHz",
        )


def draw_training_clocks(result: CounterFit) -> Figure:
    """Draw the error on unseen work over the whole plane against the number of clock pairs in
    training.
    """
    figure, axes = new_axes(6.0, 3.8)
    by_memory: dict[int, list[tuple[int, float]]] = {}
    for subset in result.training_clocks:
        by_memory.setdefault(len(subset.memory_hz), []).append((subset.points, subset.mape))
    for index, (count, pairs) in enumerate(sorted(by_memory.items())):
        label = f"{count} memory clock{'s' if count > 1 else ''}"
        axes.plot(
            *zip(*pairs, strict=True),
            "o-",
            color=_choose_colour(index + 1),
            label=label,
            markersize=4,
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="Clock pairs in training", ylabel="Error on unseen work (%)")
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False)
    return add_caption(figure, result.table.name)


def _choose_colour(index: int) -> str:
    return PART_CYCLE[index % len(PART_CYCLE)]


def make_rails_figures(fit: RailsFit, device: str = "") -> dict[str, FigureMaker]:
    """Return a maker of every figure that a fit can show, by file name; ``device`` is named in the
    captions.
    """
    costs = [cost for cost in fit.coefficients if cost.value > 0]
    caption = f"{describe_source(fit, device)}; bars 95 %"
    return {
        "counters-rails-errors": partial(draw_rails_errors, fit, device),
        "counters-rails-costs": partial(_draw_costs, costs, caption),
    }


def draw_rails_errors(fit: RailsFit, device: str = "") -> Figure:
    """Draw predicted against measured power: microbenchmarks, each held out, and rows never trained
    on.
    """
    figure, axes = new_axes(5.6, 5.2)
    top_w = 1.03 * float(max(fit.table.power_w.max(), fit.held_out_w[fit.train | fit.test].max()))
    axes.plot([0.0, top_w], [0.0, top_w], color=MEASURED, linewidth=0.8)
    axes.fill_between(
        [0.0, top_w],
        [0.0, 0.9 * top_w],
        [0.0, 1.1 * top_w],
        color="#DDDDDD",
        label="within 10 %",
    )
    sets = {
        "microbenchmarks, held out": (fit.train, PREDICTED),
        "never trained on": (fit.test, figure_style.SERIES_COLOURS[1]),
    }
    for name, (rows, colour) in sets.items():
        if rows.any():
            label = f"{name}: {fit.error_percent(rows, held_out=True):.1f} %"
            axes.plot(
                fit.table.power_w[rows],
                fit.held_out_w[rows],
                "o",
                ms=4,
                color=colour,
                label=label,
            )
    axes.set(xlabel="Measured power (W)", ylabel="Predicted power (W)")
    axes.set_xlim(0.0, top_w)
    axes.set_ylim(0.0, top_w)
    axes.legend(frameon=False, loc="upper left")
    return add_caption(figure, describe_source(fit, device))


def describe_source(fit: RailsFit, device: str) -> str:
    """Name the device and the table of a fit."""
    return ", ".join(filter(None, [device, fit.table.name]))
