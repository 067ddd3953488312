"""Figure of the learning curves: error against rows, by family, the law fitted to it, and the noise of repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wattcast.fitted import fitted
from wattcast.report.figure import caption, new_figure
from wattcast.validate.learning import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOUR = {"latency": "#332288", "power": "#CC6677"}  # Tol's muted set (2021), as in the other figures of the ledger
_COLUMNS = 4


def learning_curves(curves: Sequence[Curve], gpu: str) -> Figure:
    """A panel a family: dots are held-out errors (bars: between orders), lines the law, to four times the rows."""
    families = list(dict.fromkeys(curve.family for curve in curves))
    lines = -(-len(families) // _COLUMNS)
    figure = new_figure(11.0, 2.6 * lines + 0.6)
    panels = figure.subplots(lines, _COLUMNS, squeeze=False).ravel()
    for panel, family in zip(panels, families, strict=False):
        for curve in curves:
            if curve.family == family:
                _draw(panel, curve)
        _finish(panel, family)
    for panel in panels[len(families) :]:
        panel.set_visible(False)
    for panel in panels[::_COLUMNS]:
        panel.set_ylabel("Held-out error (%)", fontsize=8)
    for panel in panels[max(len(families) - _COLUMNS, 0) : len(families)]:
        panel.set_xlabel("Rows of the family trained on", fontsize=8)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=len(labels), loc="outside upper right")
    bundle = fitted(gpu)
    origin = f", {bundle.provenance.device}" if bundle else ""
    note = "nested subsets of the training folds, the same held-out rows; bars at twice the rows: 90 % interval"
    return caption(figure, f"{gpu}{origin}: {note}")


def _draw(axes: Axes, curve: Curve) -> None:
    colour, first = _COLOUR[curve.quantity], curve.quantity == "latency"
    what = {"latency": "latency of bursts", "power": "power of sustained rows"}[curve.quantity]
    axes.errorbar(curve.rows, curve.error, yerr=curve.spread, fmt="o", ms=3.5, lw=0.8, color=colour, label=what)
    along = np.geomspace(curve.rows[0], 4.0 * curve.rows[-1], 60)
    axes.plot(along, curve.law.law.at(along), "-", lw=1.0, color=colour, label="law" if first else None)
    low, high = curve.law.doubled_ends
    axes.plot([2.0 * curve.rows[-1]] * 2, [low, high], "-", lw=4.0, alpha=0.35, color=colour)
    if curve.noise is not None:
        axes.axhline(curve.noise, ls=":", lw=1.0, color=colour, label="repeats" if first else None)


def _finish(axes: Axes, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.1, 60.0)
    axes.set_yticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
    axes.minorticks_off()
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
