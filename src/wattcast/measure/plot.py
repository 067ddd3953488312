"""Power over time of a run, as a figure; matplotlib is imported here alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from wattcast.errors import MissingTool
from wattcast.measure.run import Run
from wattcast.measure.samples import ticks


def power_figure(run: Run) -> Any:
    """Counter steps as a stair, instant readings as dots, clock on a second axis."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingTool("--plot needs matplotlib, which is not installed (pip install 'wattcast[plot]').") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    stepped = ticks(run.samples)
    if stepped.intervals:
        axes.stairs(stepped.interval_w, stepped.time_s - run.started_s, color="#0072B2", label="energy counter")
    instant = np.isfinite(run.samples["instant_w"])
    time_s = run.samples["time_s"] - run.started_s
    axes.plot(
        time_s[instant], run.samples["instant_w"][instant], ".", ms=3, color="#D55E00", label="instant readings"
    )
    axes.axvspan(0.0, run.measurement.duration_s, color="0.93", zorder=0)
    axes.set(xlabel="Time (s)", ylabel="Power (W)", title=" ".join(run.command)[:80])
    clock = np.isfinite(run.samples["sm_clock_hz"])
    if clock.any():
        right = axes.twinx()
        right.plot(time_s[clock], run.samples["sm_clock_hz"][clock] / 1e6, color="#999999", lw=0.8)
        right.set_ylabel("SM clock (MHz)")
    axes.legend(loc="lower right")
    figure.supxlabel(f"{run.identity.name}, driver {run.identity.driver or 'unknown'}", fontsize=8)
    return figure
