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
from wattcast.lab.counter_models.model_selection import average_error_plane
from wattcast.lab.counter_models.rail_terms import CounterModelKind
from wattcast.lab.counter_models.two_rails import RailsFit
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
    from matplotlib.figure import Figure

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
    if (
        np.unique(result.table.clock_hz).size > 1
        and np.unique(result.table.memory_clock_hz).size > 1
    ):
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
    held_w = [result.kinds[model].held_out["benchmark"].predicted_w for model in models]
    planes = [average_error_plane(result.table, predicted_w) for predicted_w in held_w]
    reach = max(float(np.nanmax(plane)) for _, _, plane in planes)
    for at, model, (core_hz, memory_hz, plane) in zip(axes, models, planes, strict=True):
        # clocks are in equal steps, since they are uneven
        image = at.imshow(
            plane,
            cmap="YlOrBr",
            vmin=0.0,
            vmax=reach,
            aspect="auto",
            origin="lower",
        )
        for (i, j), value in np.ndenumerate(plane):
            if np.isfinite(value):
                ink = "white" if value > 0.7 * reach else "black"
                at.text(
                    j,
                    i,
                    f"{value:.1f}",
                    ha="center",
                    va="center",
                    color=ink,
                )
        at.set_xticks(range(memory_hz.size), [f"{f / 1e6:.0f}" for f in memory_hz])
        at.set_yticks(range(core_hz.size), [f"{f / 1e6:.0f}" for f in core_hz])
        at.set_xlabel("Memory clock (MHz)")
        at.set_title(
            f"{MODEL_TITLES[model]}: {np.nanmean(plane):.1f} %, {np.nanmax(plane):.0f} % worst"
        )
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


def draw_launch_power(
    estimate: PowerEstimate,
    measured: tuple[Array, Array] | None = None,
    most: int = 8,
) -> Figure:
    """Draw watts by part over time, stacked, with measured power as dots (paper figures 8 and 11).

    Time in which a kernel without counters ran stays white. ``measured`` is seconds and watts.
    """
    figure, axes = new_axes(9.0, 4.2)
    edges = (
        np.append(estimate.start_s, estimate.start_s[-1] + estimate.activity.duration_s[-1]) * 1e3
    )
    counted = np.where(estimate.counted > 0, 1.0, np.nan)
    stacked = np.zeros(estimate.start_s.size)
    parts = estimate.power.parts
    part_w = estimate.power.part_w
    energy_j = (part_w * estimate.activity.duration_s[:, np.newaxis]).sum(axis=0)
    order = sorted(
        range(len(parts)), key=lambda i: (parts[i] in known_events(), -energy_j[i])
    )  # static ones first
    largest = sorted(order, key=lambda i: -energy_j[i])[:most]
    rows = [(parts[i], part_w[:, i]) for i in order if i in largest]
    if smaller := [i for i in order if i not in largest]:
        rows.append(("others", part_w[:, smaller].sum(axis=1)))
    for index, (name, part_w) in enumerate(rows):
        top = stacked + part_w
        axes.stairs(
            top * counted,
            edges,
            baseline=stacked * counted,
            fill=True,
            color=_choose_colour(index),
            label=name,
        )
        stacked = top
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


def draw_event_costs(result: CounterFit) -> Figure:
    """Draw the watts of each cost at its largest measured value, with the 95 % interval (paper
    figure 12).
    """
    main = main_model_kind(result)
    caption = f"{result.table.name}, {MODEL_TITLES[main.model]}; bars 95 %, clustered by benchmark"
    return _draw_costs(main.diagnosis.coefficients, caption)


def _draw_costs(rows: Sequence[FittedCost], caption: str) -> Figure:
    figure, axes = new_axes(7.5, 0.7 + 0.3 * len(rows))
    scale = np.array([c.largest_w / c.value if c.value else 0.0 for c in rows])
    value = np.array([c.largest_w for c in rows])
    low = value - scale * [c.low for c in rows]
    high = scale * [c.high for c in rows] - value
    axes.barh(range(len(rows)), value, color=PREDICTED, height=0.7)
    axes.errorbar(
        value,
        range(len(rows)),
        xerr=np.maximum([low, high], 0.0),
        fmt="none",
        ecolor=MEASURED,
        capsize=2,
    )
    axes.set_yticks(range(len(rows)), [c.name for c in rows])
    axes.invert_yaxis()
    axes.set_xlabel("Power at the largest value measured, relative voltage 1 (W)")
    axes.axvline(0.0, color=MEASURED, linewidth=0.8)
    return add_caption(figure, caption)


def draw_rail_voltages(result: CounterFit) -> Figure:
    """Draw the inferred relative voltage of each rail with its standard error."""
    rails = [rail for rail in result.rails if rail.clock_hz.size > 1]
    figure = figure_style.new_figure(4.8 * len(rails), 3.8)
    axes = figure.subplots(1, len(rails), squeeze=False)[0]
    for at, rail in zip(axes, rails, strict=True):
        clock = rail.clock_hz / 1e6
        one = "one curve for all memory clocks" if rail.rail == "core" else "inferred"
        at.errorbar(
            clock,
            rail.relative,
            yerr=rail.standard_error,
            color=PREDICTED,
            capsize=2,
            label=one,
        )
        main = main_model_kind(result).fit
        curve, _ = main.how.curves(main.inferred.theta)
        for index, hz in (
            enumerate(main.how.memory.hz)
            if rail.rail == "core" and curve.floor_clock_hz.size
            else ()
        ):
            level = curve.level_at(main.how.core.hz, float(hz))
            label = f"memory {hz / 1e6:.0f} MHz"
            at.plot(
                main.how.core.hz / 1e6,
                level,
                "--",
                lw=1,
                color=_choose_colour(index + 1),
                label=label,
            )
        at.set_title(f"{rail.rail} rail" + ("" if rail.identifiable else ": not identifiable"))
        at.set_xlabel("Clock (MHz)")
        at.legend(frameon=False)
    axes[0].set_ylabel("Relative voltage")
    return add_caption(figure, f"{result.table.name}; bars one standard error")


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
    shown = [c for c in fit.coefficients if c.value > 0]
    source = describe_source(fit, device)
    figures: dict[str, FigureMaker] = {
        "counters-rails-errors": partial(draw_rails_errors, fit, device),
        "counters-rails-costs": partial(_draw_costs, shown, f"{source}; bars 95 %"),
    }
    return figures


def draw_rails_errors(fit: RailsFit, device: str = "") -> Figure:
    """Draw predicted against measured power: microbenchmarks, each held out, and rows never trained
    on.
    """
    figure, axes = new_axes(5.6, 5.2)
    top_w = 1.03 * float(max(fit.table.power_w.max(), fit.held_out_w[fit.train | fit.test].max()))
    axes.plot([0.0, top_w], [0.0, top_w], color=MEASURED, linewidth=0.8)
    axes.fill_between(
        [0.0, top_w], [0.0, 0.9 * top_w], [0.0, 1.1 * top_w], color="#DDDDDD", label="within 10 %"
    )
    held_out = (fit.train, PREDICTED)
    unseen = (fit.test, figure_style.SERIES_COLOURS[1])
    for rows, colour, name in (
        (*held_out, "microbenchmarks, held out"),
        (*unseen, "never trained on"),
    ):
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
