"""A recorded run as a figure: measured power and clock over time, and what was predicted on the same axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.arrays import Array
from wattcast.report.figure import MEASURED, PREDICTED, caption, dots, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Recording:
    """Seconds from the beginning of the run; NaN where a reading is missing."""

    edge_s: Array  # (step + 1,) when the energy counter stepped
    step_w: Array  # (step,) mean power between its steps
    time_s: Array  # (sample,)
    instant_w: Array  # (sample,)
    clock_hz: Array  # (sample,)
    device: str


@dataclass(frozen=True)
class Level:
    """What a workload that repeats without end is predicted to draw."""

    power_w: float
    low_w: float
    high_w: float
    clock_hz: float
    name: str

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Level:
        """From one entry of ``predict --json``."""
        low_w, high_w = plain["interval"]["power_w"]
        return cls(plain["power_w"], low_w, high_w, plain["clock_hz"], f"{plain['name']} on {plain['gpu']}")


def power_over_time(
    run: Recording, title: str, span_s: tuple[float, float] | None = None, level: Level | None = None
) -> Figure:
    """Power above, clock below; measured as dots, the prediction as a line with its interval."""
    figure = new_figure(9.0, 6.0)
    power, clock = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    middle_s = 0.5 * (run.edge_s[1:] + run.edge_s[:-1]) if run.step_w.size else run.edge_s[:0]
    dots(power, middle_s, run.step_w, "measured, steps of the energy counter")
    known = np.isfinite(run.instant_w)
    power.plot(run.time_s[known], run.instant_w[known], ".", ms=3, color="#888888", label="instant readings")
    read = np.isfinite(run.clock_hz)
    clock.plot(run.time_s[read], run.clock_hz[read] / 1e6, ".", ms=3, color=MEASURED)
    if level is not None:
        power.axhline(level.power_w, color=PREDICTED, label=f"predicted: {level.name}")
        power.axhspan(level.low_w, level.high_w, color=PREDICTED, alpha=0.12, lw=0)
        clock.axhline(level.clock_hz / 1e6, color=PREDICTED)
    if span_s is not None:
        for axes in (power, clock):
            axes.axvspan(*span_s, color="0.94", zorder=0)
    power.set_ylim(bottom=0.0)
    power.set(ylabel="Power (W)", title=title)
    clock.set(ylabel="SM clock (MHz)", xlabel="Time (s)")
    clock.set_ylim(bottom=0.0)
    power.legend(frameon=False, fontsize=8, loc="lower right")
    return caption(figure, run.device)
