"""Draw the H200's multimedia workloads by the two-rail counter model, like figures 8 and 13 of
Stokke 2016.

Run: ``wattcast lab fit counters h200.csv --columns h200 --figures FOLDER`` in the repository draws
them with its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from wattcast.core.arrays import Array
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.counter_table import CounterTable
from wattcast.lab.counter_models.rails_apart import RailsFit
from wattcast.lab.validate.counter_model_checks import AT_RATE
from wattcast.power.activity import Activity, ActivitySource
from wattcast.report.figure_style import (
    MEASURED,
    MODULE_COLOURS,
    SERIES_COLOURS,
    FigureMaker,
    add_caption,
    new_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RAIL_PARTS = (  # what a colour stands for, and the model's parts in it
    (
        "idle: base and clocks",
        ("base", "core leakage", "core clock", "memory leakage", "memory clock"),
    ),
    ("issue", ("executed_warp",)),
    ("integer and logic", ("alu_full_warp",)),
    ("multiply-add", ("fma_full_warp",)),
    ("fp64", ("fp64_full_warp",)),
    ("special functions, conversions", ("xu_instruction",)),
    ("tensor", ("half_instruction", "wgmma_cycle", "mma_cycle", "imma_cycle", "dmma_cycle")),
    ("L1 and shared memory", ("l1_wavefront",)),
    ("between SMs and L2", ("noc_byte", "l2_write_sector")),
    (
        "DRAM, both rails",
        (
            "dram_read_access",
            "dram_write_access",
            "dram_read_byte",
            "dram_write_byte",
            "memory awake",
        ),
    ),
)
PART_COLOURS = (  # of the modules, and two more of the series for the pipes that share one
    *(
        MODULE_COLOURS["static"],
        MODULE_COLOURS["sm"],
        SERIES_COLOURS[4],
        MODULE_COLOURS["cuda"],
        SERIES_COLOURS[0],
    ),
    *(MODULE_COLOURS[module] for module in ("sfu", "tensor", "shared", "l2", "dram")),
)
# from the most expensive
DCT_ROWS = tuple(
    f"dct_{kind}{AT_RATE}"
    for kind in ("fp64_uncached", "fp64_cached", "fp32_uncached", "fp32_cached")
)


def table_activity(table: CounterTable, names: Sequence[str]) -> Activity:
    """Return the table's rows as activity of one second each, for a power model that needs
    ``names``.
    """
    column = {p.event: i for i, p in enumerate(table.predictors)}
    value = np.stack([table.occurrence[:, column[name]] for name in names], axis=1)
    at = OperatingPoint(clock_hz=table.clock_hz, memory_clock_hz=table.memory_clock_hz)
    return Activity(
        np.ones(table.rows),
        value,
        tuple(names),
        at,
        ActivitySource.PROFILED,
    )


def make_figures(fit: RailsFit, source: str) -> dict[str, FigureMaker]:
    """Return makers of what the rows never trained on allow, by file name; ``source`` stands in the
    captions.
    """
    rows = _find_test_rows(fit)
    figures: dict[str, FigureMaker] = {}
    if rows:
        figures["counters-rails-multimedia"] = partial(draw_multimedia_power, fit, source)
    if set(rows).issuperset(DCT_ROWS):
        figures["counters-rails-dct"] = partial(draw_dct_power, fit, source)
    return figures


def draw_multimedia_power(fit: RailsFit, source: str) -> Figure:
    """Draw the power of each workload that was not trained on: parts stacked, measured as dots
    (paper figure 8).
    """
    rows = _find_test_rows(fit)
    workloads = [name for name in rows if not name.endswith("_moved") and name != "move_frames"]
    figure, axes = new_axes(9.6, 4.8)
    _stack_parts(
        axes,
        fit,
        [rows[name] for name in workloads],
        [name.replace("_", " ") for name in workloads],
    )
    tested = np.isin(np.arange(fit.table.rows), [rows[name] for name in workloads])
    axes.set_title(f"mean absolute error {fit.error_percent(tested):.1f} %")
    return add_caption(figure, f"{source}; trained on {int(fit.train.sum())} microbenchmarks only")


def draw_dct_power(fit: RailsFit, source: str) -> Figure:
    """Draw the DCT at a fixed frame rate in four variants: savings of data type and caching (paper
    figure 13).
    """
    rows = _find_test_rows(fit)
    figure, axes = new_axes(8.2, 4.8)
    labels = [
        name.removeprefix("dct_").removesuffix(AT_RATE).replace("_uncached", ", past L1")
        for name in DCT_ROWS
    ]
    labels = [label.replace("_cached", ", cached") for label in labels]
    _stack_parts(axes, fit, [rows[name] for name in DCT_ROWS], labels)
    first = rows[DCT_ROWS[0]]
    for place, name in enumerate(DCT_ROWS[1:], start=1):
        measured_w = fit.table.power_w[first] - fit.table.power_w[rows[name]]
        predicted_w = fit.predicted_w[first] - fit.predicted_w[rows[name]]
        text = f"saves {measured_w:.0f} W\n(predicted {predicted_w:.0f} W)"
        top_w = max(fit.table.power_w[rows[name]], fit.predicted_w[rows[name]])
        axes.text(
            place,
            top_w + 14.0,
            text,
            ha="center",
            va="bottom",
        )
    axes.set_ylim(top=1.2 * float(fit.table.power_w[first]))
    every = (
        f"a pass every {1e3 * fit.table.duration_s[first]:.1f} ms; "
        if fit.table.duration_s is not None
        else ""
    )
    return add_caption(figure, f"{source}; {every}trained on microbenchmarks only")


def _find_test_rows(fit: RailsFit) -> dict[str, int]:
    """Return the rows never trained on, by name."""
    return {
        fit.table.benchmark_names[fit.table.benchmark[i]]: int(i) for i in np.flatnonzero(fit.test)
    }


def _stack_parts(
    axes: Axes,
    fit: RailsFit,
    rows: Sequence[int],
    labels: Sequence[str],
) -> None:
    power = fit.model.power(table_activity(fit.table, fit.model.required_events))
    base: Array = np.zeros(len(rows))
    for (name, members), colour in zip(RAIL_PARTS, PART_COLOURS, strict=True):
        index = [i for i, part in enumerate(power.parts) if part in members]
        part_w = power.part_w[list(rows)][:, index].sum(axis=1)
        if part_w.max() >= 1.0:
            axes.bar(
                range(len(rows)),
                part_w,
                bottom=base,
                color=colour,
                label=name,
                width=0.7,
            )
        base = base + part_w
    measured_w = fit.table.power_w[list(rows)]
    axes.plot(
        range(len(rows)),
        measured_w,
        "o",
        color=MEASURED,
        markersize=6,
        label="measured",
    )
    turned = len(rows) > 5
    axes.set_xticks(
        range(len(rows)), labels, rotation=35 if turned else 0, ha="right" if turned else "center"
    )
    axes.set_ylabel("Power (W)")
    axes.set_ylim(0.0, 1.08 * max(float(base.max()), float(measured_w.max())))
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
