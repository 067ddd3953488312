"""Figures of a two-rail counter model: work it has never seen, stacked by part, and what a cheaper DCT saves.

One function, one figure; each takes results and returns a matplotlib Figure, and never shows or saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.counters_two_rails import RailsFit, activity_of
from wattcast.report.figure import COLOUR, MEASURED, PREDICTED, SERIES, new_figure
from wattcast.report.figure import caption as write_caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = (  # what a colour stands for, and the model's parts in it
    ("idle: base and clocks", ("base", "core leakage", "core clock", "memory leakage", "memory clock")),
    ("issue", ("executed_warp",)),
    ("integer and logic", ("alu_full_warp",)),
    ("multiply-add", ("fma_full_warp",)),
    ("fp64", ("fp64_full_warp",)),
    ("special functions, conversions", ("xu_instruction",)),
    ("tensor", ("half_instruction", "wgmma_cycle", "mma_cycle", "imma_cycle", "dmma_cycle")),
    ("L1 and shared memory", ("l1_wavefront",)),
    ("between SMs and L2", ("noc_byte",)),
    ("DRAM, both rails", ("dram_read_access", "dram_write_access", "dram_read_byte", "dram_write_byte")),
)
PART_COLOURS = (  # of the modules, and two more of the series for the pipes that share one
    *(COLOUR["static"], COLOUR["sm"], SERIES[4], COLOUR["cuda"], SERIES[0]),
    *(COLOUR["sfu"], COLOUR["tensor"], COLOUR["shared"], COLOUR["l2"], COLOUR["dram"]),
)
AT_RATE = "_at_rate"
DCT = tuple(
    f"dct_{kind}{AT_RATE}" for kind in ("fp64_uncached", "fp64_cached", "fp32_uncached", "fp32_cached")
)  # from the dearest


def all_figures(fit: RailsFit, device: str = "") -> dict[str, Figure]:
    """Every figure that a fit can show, by file name; ``device`` is named in the captions."""
    names = {fit.table.benchmark_names[fit.table.benchmark[i]] for i in np.flatnonzero(fit.test)}
    figures = {"counters-rails-errors": errors(fit, device), "counters-rails-costs": costs(fit, device)}
    if names:
        figures["counters-rails-multimedia"] = multimedia(fit, device)
    if names.issuperset(DCT):
        figures["counters-rails-dct"] = dct(fit, device)
    return figures


def multimedia(fit: RailsFit, device: str = "") -> Figure:
    """Power of each workload that was not trained on: parts stacked, measured as dots (paper figure 8's parts)."""
    rows = _rows(fit)
    kept = [name for name in rows if not name.endswith("_moved") and name != "move_frames"]
    figure = new_figure(9.6, 4.8)
    axes = figure.subplots()
    _stacked(axes, fit, [rows[name] for name in kept], [name.replace("_", " ") for name in kept])
    axes.set_title(f"mean absolute error {_error(fit, [rows[n] for n in kept]):.1f} %", fontsize=9)
    write_caption(figure, f"{_source(fit, device)}; trained on {int(fit.train.sum())} microbenchmarks only")
    return figure


def dct(fit: RailsFit, device: str = "") -> Figure:
    """The DCT at a fixed frame rate in four variants: what data type and caching save (paper figure 13)."""
    rows = _rows(fit)
    figure = new_figure(8.2, 4.8)
    axes = figure.subplots()
    labels = [name.removeprefix("dct_").removesuffix(AT_RATE).replace("_uncached", ", past L1") for name in DCT]
    _stacked(axes, fit, [rows[name] for name in DCT], [label.replace("_cached", ", cached") for label in labels])
    first = rows[DCT[0]]
    for place, name in enumerate(DCT[1:], start=1):
        measured_w = fit.table.power_w[first] - fit.table.power_w[rows[name]]
        predicted_w = fit.predicted_w[first] - fit.predicted_w[rows[name]]
        text = f"saves {measured_w:.0f} W\n(predicted {predicted_w:.0f} W)"
        top_w = max(fit.table.power_w[rows[name]], fit.predicted_w[rows[name]])
        axes.text(place, top_w + 14.0, text, ha="center", va="bottom", fontsize=8)
    axes.set_ylim(top=1.2 * float(fit.table.power_w[first]))
    every = f"a pass every {1e3 * fit.table.duration_s[first]:.1f} ms; " if fit.table.duration_s is not None else ""
    write_caption(figure, f"{_source(fit, device)}; {every}trained on microbenchmarks only")
    return figure


def errors(fit: RailsFit, device: str = "") -> Figure:
    """Predicted against measured power: microbenchmarks each held out, and rows never trained on."""
    figure = new_figure(5.6, 5.2)
    axes = figure.subplots()
    top_w = 1.03 * float(max(fit.table.power_w.max(), fit.held_out_w[fit.train | fit.test].max()))
    axes.plot([0.0, top_w], [0.0, top_w], color=MEASURED, linewidth=0.8)
    axes.fill_between([0.0, top_w], [0.0, 0.9 * top_w], [0.0, 1.1 * top_w], color="#DDDDDD", label="within 10 %")
    for rows, colour, name in (
        (fit.train, PREDICTED, "microbenchmarks, held out"),
        (fit.test, SERIES[1], "never trained on"),
    ):
        if rows.any():
            label = f"{name}: {fit.error_percent(rows, held_out=True):.1f} %"
            axes.plot(fit.table.power_w[rows], fit.held_out_w[rows], "o", ms=4, color=colour, label=label)
    axes.set_xlabel("Measured power (W)")
    axes.set_ylabel("Predicted power (W)")
    axes.set_xlim(0.0, top_w)
    axes.set_ylim(0.0, top_w)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    write_caption(figure, _source(fit, device))
    return figure


def costs(fit: RailsFit, device: str = "") -> Figure:
    """Watts of each cost at its largest measured value, with the 95 % interval (paper figure 12)."""
    rows = [c for c in fit.coefficients if c.value > 0]
    figure = new_figure(7.5, 0.8 + 0.28 * len(rows))
    axes = figure.subplots()
    value = np.array([c.largest_w for c in rows])
    low = np.array([c.largest_w * c.low / c.value for c in rows])
    high = np.array([c.largest_w * c.high / c.value for c in rows])
    axes.barh(range(len(rows)), value, color=PREDICTED, height=0.7)
    axes.errorbar(value, range(len(rows)), xerr=[value - low, high - value], fmt="none", ecolor=MEASURED, capsize=2)
    axes.set_yticks(range(len(rows)), [c.name for c in rows])
    axes.invert_yaxis()
    axes.set_xlabel("Power at the largest value measured, relative voltage 1 (W)")
    write_caption(figure, f"{_source(fit, device)}; bars 95 %")
    return figure


def _source(fit: RailsFit, device: str) -> str:
    return ", ".join(filter(None, [device, fit.table.name]))


def _rows(fit: RailsFit) -> dict[str, int]:
    """Rows never trained on, by name."""
    return {fit.table.benchmark_names[fit.table.benchmark[i]]: int(i) for i in np.flatnonzero(fit.test)}


def _stacked(axes: Axes, fit: RailsFit, rows: Sequence[int], labels: Sequence[str]) -> None:
    power = fit.model.power(activity_of(fit.table, fit.model.required_events))
    base: Array = np.zeros(len(rows))
    for (name, members), colour in zip(PARTS, PART_COLOURS, strict=True):
        index = [i for i, part in enumerate(power.parts) if part in members]
        part_w = power.part_w[list(rows)][:, index].sum(axis=1)
        if part_w.max() >= 1.0:
            axes.bar(range(len(rows)), part_w, bottom=base, color=colour, label=name, width=0.7)
        base = base + part_w
    measured_w = fit.table.power_w[list(rows)]
    axes.plot(range(len(rows)), measured_w, "o", color=MEASURED, markersize=6, label="measured")
    turned = len(rows) > 5
    axes.set_xticks(
        range(len(rows)), labels, rotation=35 if turned else 0, ha="right" if turned else "center", fontsize=8
    )
    axes.set_ylabel("Power (W)")
    axes.set_ylim(0.0, 1.08 * max(float(base.max()), float(measured_w.max())))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)


def _error(fit: RailsFit, rows: Sequence[int]) -> float:
    at = list(rows)
    return float(100.0 * np.abs(fit.predicted_w[at] / fit.table.power_w[at] - 1.0).mean())
