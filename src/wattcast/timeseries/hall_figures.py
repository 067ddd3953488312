"""Figures of a simulated hall: power over time by group, load duration, and a zoom."""

from __future__ import annotations

import numpy as np

from wattcast.core.arrays import Array
from wattcast.report.figure_style import (
    PREDICTED,
    SERIES_COLOURS,
    Axes,
    Figure,
    new_figure,
)
from wattcast.timeseries.hall_combination import CombinedHall
from wattcast.timeseries.hall_statistics import load_duration_w

MOST_POINTS = 1440  # of a drawn series; each is the mean of what falls on it
_LONGEST_IN_SECONDS = 7200.0  # a longer span has hours on its axis
FEWEST_BINS = 60  # of the second panel
ZOOM_SHARE = 60  # the second panel of a zoom shows so small a part of the span


def draw_hall(hall: CombinedHall) -> Figure:
    """Draw power over time by group, one upon the other, with the hall's limit."""
    figure = new_figure(10.0, 5.0)
    axes = figure.subplots()
    _stack_groups(axes, hall, 0, hall.work.bins)
    _draw_limit(axes, hall)
    # The space above the highest of all keeps the names off the curves.
    axes.set_ylim(0.0, 1.2 * _highest_mw(hall))
    axes.legend(
        frameon=False,
        ncols=5,
        loc="upper left",
    )
    figure.suptitle(_title(hall))
    return figure


def draw_load_duration(hall: CombinedHall) -> Figure:
    """Draw how much power is exceeded for which share of the time."""
    figure = new_figure(8.0, 4.5)
    axes = figure.subplots()
    shares, watts = load_duration_w(hall.power_w)
    axes.plot(100.0 * shares, watts / 1e6, color=PREDICTED, label="hall")
    _draw_limit(axes, hall)
    axes.set(
        xlabel="Share of the time (%)",
        ylabel="Power exceeded (MW)",
        xlim=(0.0, 100.0),
    )
    axes.set_ylim(0.0, 1.2 * _highest_mw(hall))
    axes.legend(frameon=False)
    figure.suptitle(_title(hall))
    return figure


def draw_zoom(hall: CombinedHall) -> Figure:
    """Draw the whole span, and below it the part around its highest power at full detail."""
    figure = new_figure(10.0, 7.0)
    above, below = figure.subplots(2, 1)
    _stack_groups(above, hall, 0, hall.work.bins)
    above.set_ylim(0.0, 1.3 * float(hall.power_w.max()) / 1e6)
    above.legend(
        frameon=False,
        ncols=5,
        loc="upper left",
    )
    first, last = _around_peak(hall)
    ends = np.array([first, last], dtype=np.float64)
    seconds = hall.work.bins * hall.work.bin_s
    times = _hours(hall, ends) if seconds > _LONGEST_IN_SECONDS else ends * hall.work.bin_s
    above.axvspan(times[0], times[1], color="#000000", alpha=0.25)
    _stack_groups(below, hall, first, last)
    bottom, top = below.get_ylim()
    stacked_mw = hall.power_w[first:last] / 1e6
    below.set_ylim(max(0.9 * float(stacked_mw.min()), bottom), max(top, bottom))
    below.set_title("around the highest power (the axis does not begin at zero)", fontsize=10)
    figure.suptitle(_title(hall))
    return figure


def _title(hall: CombinedHall) -> str:
    plan = hall.work.plan
    return f"{plan.title}: {plan.gpus:,} GPUs in {plan.racks:,} racks, simulated"


def _highest_mw(hall: CombinedHall) -> float:
    highest_w = float(hall.power_w.max())
    limit_w = hall.work.plan.limits_w.get("hall", 0.0)
    return max(highest_w, limit_w) / 1e6


def _hours(hall: CombinedHall, bins: Array) -> Array:
    """Return the hour of the day at which bins begin."""
    return np.asarray((hall.work.begin_s + bins * hall.work.bin_s) / 3600.0)


def _stack_groups(
    axes: Axes,
    hall: CombinedHall,
    first: int,
    last: int,
) -> None:
    """Draw groups one upon the other, in means over what falls on a point."""
    factor = max((last - first) // MOST_POINTS, 1)
    count = (last - first) // factor
    used = slice(first, first + count * factor)
    bins_of_point_j = hall.group_j[:, used].reshape(len(hall.group_j), count, factor)
    group_w = bins_of_point_j.mean(axis=-1) / hall.work.bin_s
    group_mw = group_w / 1e6
    begins = first + factor * np.arange(count, dtype=np.float64)
    names = [work.group.name for work in hall.work.groups]
    seconds = (last - first) * hall.work.bin_s
    if seconds > _LONGEST_IN_SECONDS:
        times = _hours(hall, begins)
        axes.set_xlabel("Hour of the day")
    else:
        times = (begins - first) * hall.work.bin_s
        start_s = hall.work.begin_s + first * hall.work.bin_s
        clock = f"{int(start_s // 3600):02d}:{int(start_s % 3600 // 60):02d}"
        axes.set_xlabel(f"Time since {clock}:{start_s % 60:04.1f} (s)")
    colours = [SERIES_COLOURS[place % len(SERIES_COLOURS)] for place in range(len(names))]
    axes.stackplot(
        times,
        group_mw,
        labels=names,
        colors=colours,
        step="post",
        lw=0,
    )
    axes.set_ylabel("Power (MW)")
    axes.set_xlim(float(times[0]), float(times[-1]))


def _draw_limit(axes: Axes, hall: CombinedHall) -> None:
    limit_w = hall.work.plan.limits_w.get("hall")
    if limit_w is not None:
        axes.axhline(
            limit_w / 1e6,
            color="#000000",
            lw=1.0,
            ls="--",
            label="limit",
        )


def _around_peak(hall: CombinedHall) -> tuple[int, int]:
    """Return the bins around the highest power, a small part of all."""
    bins = hall.work.bins
    width = max(min(bins, max(bins // ZOOM_SHARE, FEWEST_BINS)), 2)
    middle = int(hall.power_w.argmax())
    first = min(max(middle - width // 2, 0), bins - width)
    return first, first + width


FIGURES = {
    "hall": draw_hall,
    "load-duration": draw_load_duration,
    "zoom": draw_zoom,
}
