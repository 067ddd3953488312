"""Power over time of a run, as a figure; matplotlib is imported here alone.

A bare GPU node has this package and no ``report/``, so the few lines that check and write a file are here once more.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from wattcast.errors import MissingTool, bad_value
from wattcast.measure.run import Run
from wattcast.measure.samples import ticks

ENDINGS = (".png", ".svg", ".pdf")


def check_path(path: Path) -> None:
    """An error, before anything is measured, where a figure could not be saved under this name."""
    if path.suffix.lower() not in ENDINGS or path.is_dir():
        raise bad_value("--plot", f"a file that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}", str(path))


def save(figure: Any, path: Path) -> None:
    """Write a figure by the ending of its name; whole or not at all."""
    drawn, beside = io.BytesIO(), path.with_name(path.name + ".new")
    figure.savefig(drawn, format=path.suffix.lower().lstrip("."), dpi=150)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        beside.write_bytes(drawn.getvalue())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


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
