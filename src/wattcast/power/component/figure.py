"""Power by component over time, stacked; any length of trace in a bounded number of bins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import MissingTool

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BINS = 1024
MOST_PARTS = 9
# Okabe and Ito's colour-blind-safe set, then darker and lighter ones; a component keeps its colour by its place
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_SHADES = (0.0, 0.45, -0.4, 0.7, -0.65)
_REST = "#BFBFBF"


@dataclass
class Timeline:
    """Energy and time in bins of equal numbers of samples; bins merge in pairs when there are too many."""

    parts: int
    width: int = 1  # samples in a bin
    _energy_j: Array = field(init=False)
    _time_s: Array = field(init=False)
    _sample: int = 0

    def __post_init__(self) -> None:
        self._energy_j = np.zeros((2 * MOST_BINS, self.parts))
        self._time_s = np.zeros(2 * MOST_BINS)

    def add(self, part_w: Array, duration_s: Array) -> None:
        """Consecutive samples."""
        count = len(duration_s)
        if not count:
            return
        while (self._sample + count - 1) // self.width >= 2 * MOST_BINS:
            self._merge()
        bins = (self._sample + np.arange(count)) // self.width
        starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
        self._energy_j[bins[starts]] += np.add.reduceat(part_w * duration_s[:, np.newaxis], starts, axis=0)
        self._time_s[bins[starts]] += np.add.reduceat(duration_s, starts)
        self._sample += count

    def mean(self) -> tuple[Array, float, Array]:
        """Start time of each bin, end of the last, and mean watts by part."""
        used = self._time_s > 0
        time_s = self._time_s[used]
        end_s = np.cumsum(time_s)
        return np.concatenate([[0.0], end_s[:-1]]), float(end_s[-1]), self._energy_j[used] / time_s[:, np.newaxis]

    def _merge(self) -> None:
        self._energy_j = np.concatenate(
            [self._energy_j[0::2] + self._energy_j[1::2], np.zeros((MOST_BINS, self.parts))]
        )
        self._time_s = np.concatenate([self._time_s[0::2] + self._time_s[1::2], np.zeros(MOST_BINS)])
        self.width *= 2


def stacked_area(timeline: Timeline, parts: tuple[str, ...], title: str, caption: str) -> Figure:
    """Components stacked over time: the largest by name, the rest together."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingTool("figures need matplotlib. Install it: pip install 'wattcast[plot]'") from None
    start_s, end_s, part_w = timeline.mean()
    order = np.argsort(-part_w.sum(axis=0), kind="stable")
    shown = [int(i) for i in order[:MOST_PARTS] if part_w[:, i].any()]
    rest = part_w.sum(axis=1) - part_w[:, shown].sum(axis=1)
    figure = Figure(figsize=(10.0, 5.0), layout="constrained")
    axes = figure.subplots()
    others = bool(rest.max(initial=0.0) > 1e-9)
    stack = [part_w[:, i] for i in shown] + ([rest] if others else [])
    names = [parts[i] for i in shown] + (["all others"] if others else [])
    colours = [_colour(i) for i in shown] + [_REST]
    edges = np.append(start_s, end_s) * 1e6
    axes.stackplot(edges, [np.append(y, y[-1]) for y in stack], labels=names, colors=colours, step="post")
    axes.set_xlabel("Time (µs)")
    axes.set_ylabel("Power (W)")
    axes.set_ylim(bottom=0.0)
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    note = f"{caption}; each step is the mean of {timeline.width} sample{'s' * (timeline.width > 1)}"
    figure.supxlabel(note, fontsize=7, color="#666666")
    return figure


def _colour(place: int) -> str:
    base, shade = _COLOURS[place % len(_COLOURS)], _SHADES[place // len(_COLOURS) % len(_SHADES)]
    channels = [int(base[i : i + 2], 16) for i in (1, 3, 5)]
    mixed = [c + (255 - c) * shade if shade > 0 else c * (1.0 + shade) for c in channels]
    return "#" + "".join(f"{round(c):02X}" for c in mixed)
