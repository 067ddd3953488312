"""Figures of results that no other file draws: several side by side, measured windows,
calibrations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.core import bad_value
from wattcast.core.user_results import flatten_row
from wattcast.predictor.answer_lines import title_of
from wattcast.predictor.prediction import Prediction
from wattcast.report.figure_style import (
    MEASURED,
    PREDICTED,
    SERIES_COLOURS,
    Figure,
    add_caption,
    describe_origin,
    new_axes,
    new_figure,
)
from wattcast.report.prediction_figures import draw_breakdown

if TYPE_CHECKING:
    from wattcast.calibrate.calibration import Calibration
    from wattcast.calibrate.table_fit import TableCalibration
    from wattcast.core.user_results import ResultList

# Figures that several results share: the plain data's name, the axis, and its unit over SI
_SHARED = {
    "tokens_per_s": ("Tokens per second", 1.0),
    "output_tokens_per_s": ("Output tokens per second", 1.0),
    "items_per_s": ("Items per second", 1.0),
    "hours": ("Hours", 1.0),
    "latency_s": ("Latency (ms)", 1e3),
    "total_power_w": ("Power of all GPUs (W)", 1.0),
    "power_w": ("Power (W)", 1.0),
    "energy_j_per_token": ("Energy per token (J)", 1.0),
    "total_energy_j": ("Energy of all GPUs (J)", 1.0),
    "energy_kwh": ("Energy (kWh)", 1.0),
}
_MOST_PANELS = 3


def draw_results(results: ResultList[Any]) -> Figure:
    """Draw speed, power and energy of several results as bars, a row each."""
    rows = [flatten_row(result.to_dict()) for result in results]
    panels = _choose_panels(rows)
    if not panels:
        expected = "several results, each of one configuration"
        raise bad_value("plot", expected, f"{len(rows)} without a shared figure")
    labels = [_label_row(row) for row in rows]
    figure = new_figure(11.0, 1.4 + 0.35 * len(rows))
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    places = range(len(rows))
    for axes, name, colour in zip(all_axes, panels, SERIES_COLOURS, strict=False):
        title, scale = _SHARED[name]
        axes.barh(places, [scale * row[name] for row in rows], color=colour)
        axes.set_xlabel(title)
        axes.set_yticks(places, labels if axes is all_axes[0] else [""] * len(rows))
        axes.invert_yaxis()
    return figure


def _choose_panels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the figures that all rows have: the first, then those of power and energy."""
    panels: list[str] = []
    for name in _SHARED:
        is_shared = bool(rows) and all(_is_number(row.get(name)) for row in rows)
        is_next = not panels or "power" in name or "energy" in name
        if is_shared and is_next:
            panels.append(name)
    if "total_power_w" in panels and "power_w" in panels:
        panels.remove("power_w")
    return panels[:_MOST_PANELS]


def draw_prediction(p: Prediction) -> Figure:
    """Draw where the power of a configuration goes, or energy against latency over a sweep."""
    if isinstance(p.latency_s, float):
        return draw_breakdown(p)
    figure, axes = new_axes(7.0, 5.0)
    latency_ms = 1e3 * np.ravel(p.latency_s)
    energy_j = np.ravel(np.asarray(p.total_energy_j))
    axes.plot(
        latency_ms,
        energy_j,
        ".-",
        color=PREDICTED,
        lw=1.0,
    )
    axes.set(xlabel="Latency (ms)", ylabel="Energy of all GPUs (J)")
    axes.set_title(f"{title_of(p)}: {latency_ms.size} points", fontsize=10)
    return add_caption(figure, describe_origin(p))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _label_row(row: dict[str, Any]) -> str:
    name = row.get("name") or row.get("model") or ""
    return f"{name} on {row.get('gpu', '')}"


def draw_window(window: Any) -> Figure:
    """Draw a measured window: mean power over its time, with the largest sample."""
    plain = window.to_dict()
    figure, axes = new_axes(7.0, 3.5)
    duration_s = plain["duration_s"]
    power_w = plain.get("power_w")
    if power_w is not None:
        axes.fill_between([0.0, duration_s], [power_w] * 2, color=MEASURED, alpha=0.2)
        axes.plot([0.0, duration_s], [power_w] * 2, color=MEASURED, label="mean")
    if plain.get("peak_w") is not None:
        axes.axhline(
            plain["peak_w"],
            color=MEASURED,
            lw=0.8,
            ls=":",
            label="largest sample",
        )
    axes.set(
        xlabel="Time (s)",
        ylabel="Power (W)",
        xlim=(0.0, duration_s),
        ylim=(0.0, None),
    )
    axes.set_title(plain["name"], fontsize=10)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    flags = plain.get("flags") or ("power was measured",)
    return add_caption(figure, "; ".join(flags))


def draw_calibration(result: Calibration) -> Figure:
    """Draw errors of the forecast, of the fit, and with rows left out, in time and in power."""
    names = ("forecast", "fitted", "left out")
    figure, axes = new_axes(7.0, 3.5)
    for shift, (label, errors) in enumerate((("time", result.latency), ("power", result.power))):
        percents = [errors.forecast, errors.fitted, errors.left_out]
        places = [place + 0.4 * shift for place in range(len(names))]
        heights = [0.0 if percent is None else percent for percent in percents]
        axes.bar(
            places,
            heights,
            width=0.38,
            label=label,
            color=SERIES_COLOURS[shift],
        )
    axes.set_xticks([place + 0.2 for place in range(len(names))], names)
    axes.set_ylabel("Mean absolute error (%)")
    axes.legend(frameon=False)
    return add_caption(figure, f"{result.rows} rows of the {result.bundle.gpu}")


def draw_table_calibration(result: TableCalibration) -> Figure:
    """Draw the error of each family of kernels, forecast and calibrated, on rows held out."""
    labels: Sequence[str] = [f"{e.what} {e.engine} {e.band}" for e in result.errors]
    figure, axes = new_axes(9.0, 1.5 + 0.3 * len(labels))
    for shift, name in enumerate(("forecast", "calibrated")):
        places = [place + 0.4 * shift for place in range(len(labels))]
        percents = [getattr(error, name) for error in result.errors]
        axes.barh(
            places,
            percents,
            height=0.38,
            label=name,
            color=SERIES_COLOURS[shift],
        )
    axes.set_yticks([place + 0.2 for place in range(len(labels))], labels)
    axes.set_xlabel("Mean absolute error in time (%)")
    axes.invert_yaxis()
    axes.legend(frameon=False)
    return add_caption(figure, f"{result.held_out} rows of the {result.bundle.gpu}, held out")
