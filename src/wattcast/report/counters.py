"""Figures of counter models: errors over the clock plane, power over time, costs, idle planes, voltages.

One function, one figure; each takes results and returns a matplotlib Figure, and never shows or saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from wattcast.activity import Activity, Source, events
from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.fit.counters import CounterFit
from wattcast.fit.score import error_plane
from wattcast.fit.summary import main_kind
from wattcast.fit.terms import Model
from wattcast.hardware import OperatingPoint
from wattcast.power.hybrid_rail import HybridRail
from wattcast.power.launches import Estimate
from wattcast.report.figure import MEASURED, PREDICTED, Maker, new_figure
from wattcast.report.figure import caption as write_caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SHOWN = (Model.RATE, Model.ALPHA_C, Model.HYBRID)
TITLES = {
    Model.RATE: "rate-based",
    Model.LINEAR: "linear with clocks",
    Model.ALPHA_C: "switched capacitance",
    Model.HYBRID: "hybrid rail",
}
# Okabe and Ito (2008), safe for colour-blind readers; parts take them in turn
COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")


def all_figures(result: CounterFit) -> dict[str, Maker]:
    """Every figure that a fit can show, by file name."""
    figures: dict[str, Maker] = {"costs": partial(costs, result)}
    if np.unique(result.table.clock_hz).size > 1 and np.unique(result.table.memory_clock_hz).size > 1:
        figures["error_planes"] = partial(error_planes, result)
    if any(rail.clock_hz.size > 1 for rail in result.rails):
        figures["voltages"] = partial(voltages, result)
    if result.training_clocks:
        figures["training_clocks"] = partial(training_clocks, result)
    return figures


def error_planes(result: CounterFit, benchmark: int | None = None, caption: str = "") -> Figure:
    """Error of each model over the clock plane, on benchmarks held out (paper figures 1, 9, 10).

    Mean absolute error over all benchmarks, or the signed error of one ``benchmark``, as the paper shows.
    """
    models = [model for model in SHOWN if model in result.kinds]
    signed = benchmark is not None
    figure = new_figure(4.4 * len(models), 4.6)
    axes = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    planes = [_plane(result, model, benchmark) for model in models]
    reach = max(float(np.nanmax(np.abs(plane))) for _, _, plane in planes)
    for at, model, (core_hz, memory_hz, plane) in zip(axes, models, planes, strict=True):
        image = _heat(at, core_hz, memory_hz, plane, reach, signed)
        size = np.abs(plane)
        at.set_title(f"{TITLES[model]}: {np.nanmean(size):.1f} %, {np.nanmax(size):.0f} % worst", fontsize=9)
    axes[0].set_ylabel("Core clock (MHz)")
    label = "Error on unseen work (%)" if signed else "Absolute error on unseen work (%)"
    figure.colorbar(image, ax=list(axes), label=label, shrink=0.85)
    who = f"benchmark {benchmark + 1}" if benchmark is not None else f"mean of {result.table.benchmarks} benchmarks"
    write_caption(
        figure, caption or f"{result.table.name}, {who}, each held out" + ("; predicted minus measured" * signed)
    )
    return figure


def power_over_time(
    estimate: Estimate, measured: tuple[Array, Array] | None = None, most: int = 8, caption: str = ""
) -> Figure:
    """Watts by part over time, stacked, with measured power as dots (paper figures 8 and 11).

    Time in which a kernel without counters ran is left white. ``measured`` is seconds and watts.
    """
    figure = new_figure(9.0, 4.2)
    axes = figure.subplots()
    edges = np.append(estimate.start_s, estimate.start_s[-1] + estimate.activity.duration_s[-1]) * 1e3
    known = np.where(estimate.known > 0, 1.0, np.nan)
    stacked = np.zeros(estimate.start_s.size)
    for index, (name, part_w) in enumerate(_largest(estimate, most)):
        top = stacked + part_w
        axes.stairs(top * known, edges, baseline=stacked * known, fill=True, color=_colour(index), label=name)
        stacked = top
    if measured is not None:
        axes.plot(measured[0] * 1e3, measured[1], ".", color=MEASURED, markersize=4, label="measured")
    axes.set_xlabel("Time (ms)")
    axes.set_ylabel("Power (W)")
    axes.set_ylim(bottom=0.0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    write_caption(
        figure, caption or f"estimated from {estimate.start_s.size} intervals; mean {estimate.mean_w:.4g} W"
    )
    return figure


def costs(result: CounterFit, caption: str = "") -> Figure:
    """Watts of each cost at its largest measured value, with the 95 % interval (paper figure 12)."""
    main = main_kind(result)
    rows = main.diagnosis.coefficients
    figure = new_figure(7.5, 0.6 + 0.3 * len(rows))
    axes = figure.subplots()
    scale = np.array([c.largest_w / c.value if c.value else 0.0 for c in rows])
    value = np.array([c.largest_w for c in rows])
    low, high = value - scale * [c.low for c in rows], scale * [c.high for c in rows] - value
    axes.barh(range(len(rows)), value, color=COLOURS[1], height=0.7)
    axes.errorbar(value, range(len(rows)), xerr=np.maximum([low, high], 0.0), fmt="none", ecolor=MEASURED, capsize=2)
    axes.set_yticks(range(len(rows)), [c.name for c in rows])
    axes.invert_yaxis()
    axes.set_xlabel("Power at the largest value measured, relative voltage 1 (W)")
    axes.axvline(0.0, color=MEASURED, linewidth=0.8)
    write_caption(figure, caption or f"{result.table.name}, {TITLES[main.model]}; bars 95 %, clustered by benchmark")
    return figure


def idle_planes(
    model: HybridRail, core_hz: Array, memory_hz: Array, gated: str | None = None, caption: str = ""
) -> Figure:
    """Idle power over the clock plane, with the rail ``gated`` off and on (paper figure 5)."""
    names = [rail.rail.name for rail in model.rails]
    if gated is not None and gated not in names:
        raise bad_value("gated", f"one of {', '.join(names)}", gated)
    panels: list[tuple[str, Array]] = []
    if gated is not None:
        panels.append((f"{gated} rail off", idle_w(model, core_hz, memory_hz, without=gated)))
    panels.append(("all rails on", idle_w(model, core_hz, memory_hz)))
    figure = new_figure(4.6 * len(panels), 4.2)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for at, (title, plane) in zip(axes, panels, strict=True):
        for index, clock_hz in enumerate(memory_hz):
            at.plot(core_hz / 1e6, plane[:, index], color=_colour(index), label=f"{clock_hz / 1e6:.0f}")
        at.set_title(title)
        at.set_xlabel("Core clock (MHz)")
        at.set_ylim(0.0, 1.05 * max(float(p.max()) for _, p in panels))
    axes[0].set_ylabel("Idle power (W)")
    axes[-1].legend(
        title="Memory clock (MHz)", frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0)
    )
    write_caption(figure, caption or "as the model says: base, leakage and clocks; no work")
    return figure


def idle_w(model: HybridRail, core_hz: Array, memory_hz: Array, without: str | None = None) -> Array:
    """Idle power over the clock plane, ``(core, memory)``, leaving one rail out where asked."""
    core, memory = np.meshgrid(core_hz, memory_hz, indexing="ij")
    names = model.required_events
    at = OperatingPoint(clock_hz=core[..., np.newaxis], memory_clock_hz=memory[..., np.newaxis])
    still = Activity(np.ones((*core.shape, 1)), np.zeros((*core.shape, 1, len(names))), names, at, Source.PREDICTED)
    power = model.power(still)
    gone = [part for rail in model.rails if rail.rail.name == without for part in rail.parts]
    kept = [i for i, part in enumerate(power.parts) if part not in gone]
    return np.asarray(power.part_w[..., 0, kept].sum(axis=-1))


def voltages(
    result: CounterFit, published: Mapping[str, tuple[Array, Array]] | None = None, caption: str = ""
) -> Figure:
    """Inferred relative voltage of each rail with its standard error, beside a published curve where given."""
    rails = [rail for rail in result.rails if rail.clock_hz.size > 1]
    if not rails:
        raise bad_value("voltages", "a rail whose clock varies", "none")
    figure = new_figure(4.8 * len(rails), 3.8)
    axes = figure.subplots(1, len(rails), squeeze=False)[0]
    for at, rail in zip(axes, rails, strict=True):
        clock = rail.clock_hz / 1e6
        one = "one curve for all memory clocks" if rail.rail == "core" else "inferred"
        at.errorbar(clock, rail.relative, yerr=rail.standard_error, color=PREDICTED, capsize=2, label=one)
        if rail.rail == "core":
            _by_memory_clock(at, result)
        if published and rail.rail in published:
            at.plot(
                published[rail.rail][0] / 1e6, published[rail.rail][1], "o", color=MEASURED, ms=4, label="published"
            )
        at.set_title(f"{rail.rail} rail" + ("" if rail.identifiable else ": not identifiable"))
        at.set_xlabel("Clock (MHz)")
        at.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("Relative voltage")
    write_caption(figure, caption or f"{result.table.name}; bars one standard error")
    return figure


def training_clocks(result: CounterFit, caption: str = "") -> Figure:
    """Error on unseen work over the whole plane by number of clock pairs trained at."""
    figure = new_figure(6.0, 3.8)
    axes = figure.subplots()
    by_memory: dict[int, list[tuple[int, float]]] = {}
    for subset in result.training_clocks:
        by_memory.setdefault(len(subset.memory_hz), []).append((subset.points, subset.mape))
    for index, (count, pairs) in enumerate(sorted(by_memory.items())):
        label = f"{count} memory clock{'s' if count > 1 else ''}"
        axes.plot(*zip(*pairs, strict=True), "o-", color=_colour(index + 1), label=label, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("Clock pairs in training")
    axes.set_ylabel("Error on unseen work (%)")
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False, fontsize=8)
    write_caption(figure, caption or result.table.name)
    return figure


def _plane(result: CounterFit, model: Model, benchmark: int | None) -> tuple[Array, Array, Array]:
    predicted_w = result.kinds[model].held_out["benchmark"].predicted_w
    if benchmark is None:
        return error_plane(result.table, predicted_w)
    if not 0 <= benchmark < result.table.benchmarks:
        raise bad_value("benchmark", f"0 to {result.table.benchmarks - 1}", benchmark)
    only = np.where(result.table.benchmark == benchmark, predicted_w, np.nan)
    kept = np.isfinite(only)
    core_hz, memory_hz = np.unique(result.table.clock_hz), np.unique(result.table.memory_clock_hz)
    plane = np.full((core_hz.size, memory_hz.size), np.nan)
    row = np.searchsorted(core_hz, result.table.clock_hz[kept])
    column = np.searchsorted(memory_hz, result.table.memory_clock_hz[kept])
    plane[row, column] = 100.0 * (only[kept] / result.table.power_w[kept] - 1.0)
    return core_hz, memory_hz, plane


def _heat(axes: Axes, core_hz: Array, memory_hz: Array, plane: Array, reach: float, signed: bool) -> AxesImage:
    """Errors as colours; clocks in equal steps, since they are uneven."""
    colours = ("PuOr_r", -reach) if signed else ("YlOrBr", 0.0)
    image = axes.imshow(plane, cmap=colours[0], vmin=colours[1], vmax=reach, aspect="auto", origin="lower")
    for (i, j), value in np.ndenumerate(plane):
        if np.isfinite(value):
            ink = "white" if abs(value) > 0.7 * reach else "black"
            axes.text(
                j, i, f"{value:+.0f}" if signed else f"{value:.1f}", ha="center", va="center", fontsize=6, color=ink
            )
    axes.set_xticks(range(memory_hz.size), [f"{f / 1e6:.0f}" for f in memory_hz])
    axes.set_yticks(range(core_hz.size), [f"{f / 1e6:.0f}" for f in core_hz], fontsize=7)
    axes.set_xlabel("Memory clock (MHz)")
    return image


def _largest(estimate: Estimate, most: int) -> list[tuple[str, Array]]:
    """Parts by energy, the smallest added up as one."""
    part_w = estimate.power.part_w
    energy = (part_w * estimate.activity.duration_s[:, np.newaxis]).sum(axis=0)
    order = sorted(range(len(estimate.power.parts)), key=lambda i: (not _static(estimate.power.parts[i]), -energy[i]))
    kept = sorted(order, key=lambda i: -energy[i])[:most]
    rows = [(estimate.power.parts[i], part_w[:, i]) for i in order if i in kept]
    rest = [i for i in order if i not in kept]
    return [*rows, ("others", part_w[:, rest].sum(axis=1))] if rest else rows


def _static(part: str) -> bool:
    return part not in events()


def _by_memory_clock(axes: Axes, result: CounterFit) -> None:
    main = main_kind(result)
    curve, _ = main.fit.how.curves(main.fit.inferred.theta)
    if curve.floor_clock_hz.size == 0:
        return
    for index, clock_hz in enumerate(main.fit.how.memory_hz):
        level = curve.at(main.fit.how.core_hz, float(clock_hz))
        axes.plot(
            main.fit.how.core_hz / 1e6,
            level,
            "--",
            lw=1,
            color=_colour(index + 1),
            label=f"memory {clock_hz / 1e6:.0f} MHz",
        )


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
