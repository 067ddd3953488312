"""Draw the power and the clock of a measured run over time, and save the figure."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wattcast.core.errors import MissingTool, bad_value
from wattcast.core.whole_files import check_writable, write_whole
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.measured_run import MeasuredRun

ENDINGS = (".png", ".svg", ".pdf")
_MEASURED_COLOUR = "#000000"
_READINGS_COLOUR = "#888888"
_PREDICTED_COLOUR = "#332288"
_LONGEST_TITLE = 80


def check_figure_path(path: Path) -> None:
    """Raise an error, before anything is measured, where a figure could not be saved under this
    name.
    """
    if path.suffix.lower() not in ENDINGS or path.is_dir():
        endings = f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        raise bad_value("--plot", f"a file that ends in {endings}", str(path))
    if not path.absolute().parent.is_dir():
        folder = "a file in a folder that exists"
        raise bad_value("--plot", folder, str(path), "Create the folder first.")
    check_writable(path)


def save_run_figure(figure: Any, path: Path) -> None:
    """Write a figure by the ending of its name; whole or not at all."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.lower().lstrip("."), dpi=150)
    write_whole(path, image.getvalue())


def draw_run_power(run: MeasuredRun, predicted: Mapping[str, Any] | None = None) -> Any:
    """Draw power above and clock below: measured as dots, what ``predict --json`` says as a line
    and interval.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingTool(
            "--plot needs matplotlib, which is not installed (pip install 'wattcast[plot]')."
        ) from None
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    power, clock = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_measured(run, power, clock)
    if predicted is not None:
        _draw_predicted(predicted, power, clock)
    for axes in (power, clock):
        axes.axvspan(0.0, run.measurement.duration_s, color="0.94", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0.0)
    power.set(ylabel="Power (W)", title=" ".join(run.command)[:_LONGEST_TITLE])
    clock.set(ylabel="SM clock (MHz)", xlabel="Time (s)")
    power.legend(frameon=False, loc="lower right")
    figure.supxlabel(f"{run.identity.name}, driver {run.identity.driver or 'unknown'}")
    return figure


def _draw_measured(
    run: MeasuredRun,
    power: Any,
    clock: Any,
) -> None:
    """Draw counter steps, power readings and the clock as dots."""
    samples = run.samples
    ticks = find_ticks(samples)
    if ticks.intervals:
        edge_s = ticks.time_s - run.started_s
        middle_s = 0.5 * (edge_s[1:] + edge_s[:-1])
        label = "measured, steps of the energy counter"
        power.plot(
            middle_s,
            ticks.interval_w,
            "o",
            ms=4,
            color=_MEASURED_COLOUR,
            label=label,
        )
    time_s = samples["time_s"] - run.started_s
    label = "instant readings"
    power.plot(
        time_s,
        samples["instant_w"],
        ".",
        ms=3,
        color=_READINGS_COLOUR,
        label=label,
    )
    clock.plot(
        time_s,
        samples["sm_clock_hz"] / 1e6,
        ".",
        ms=3,
        color=_MEASURED_COLOUR,
    )


def _draw_predicted(
    predicted: Mapping[str, Any],
    power: Any,
    clock: Any,
) -> None:
    """Draw a prediction as lines, with the interval of its power."""
    label = f"predicted: {predicted['name']} on {predicted['gpu']}"
    power.axhline(predicted["power_w"], color=_PREDICTED_COLOUR, label=label)
    low_w, high_w = predicted["interval"]["power_w"]
    power.axhspan(
        low_w,
        high_w,
        color=_PREDICTED_COLOUR,
        alpha=0.12,
        lw=0,
    )
    clock.axhline(predicted["clock_hz"] / 1e6, color=_PREDICTED_COLOUR)
