"""The difference as bars: which operators and terms changed the time, which modules changed the power."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wattcast.explain.explanation import CALLS, CLOCK, GAPS, ONLY, WORK, Explanation
from wattcast.report.figure import COLOUR, caption, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Tol's muted set (2021): terms must not look like modules
_TERM = {WORK: "#332288", CLOCK: "#CC6677", CALLS: "#117733", ONLY: "#DDCC77", GAPS: "#88CCEE"}
_OTHER = "#AA4499"
MOST = 10


def difference(found: Explanation) -> Figure:
    """Left: milliseconds by operator, stacked by term. Right: watts by module, or by term where none is known."""
    figure = new_figure(11.0, 5.5)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _latency(left, found)
    _power(right, found)
    a, b = found.a, found.b
    change = f"{b.latency_s / a.latency_s - 1:+.1%} time, {b.power_w / a.power_w - 1:+.1%} power"
    figure.suptitle(f"{a.name}  →  {b.name}\n{change}", fontsize=10)
    return caption(figure, f"Contributions to B - A. {found.rule}.")


def _latency(axes: Axes, found: Explanation) -> None:
    ranked = sorted(found.operators, key=lambda pair: -abs(pair.total_s))
    rows = [(pair.name, pair.latency_s) for pair in ranked[:MOST]]
    if ranked[MOST:]:
        rest: dict[str, float] = {}
        for pair in ranked[MOST:]:
            for term, value in pair.latency_s.items():
                rest[term] = rest.get(term, 0.0) + value
        rows.append((f"{len(ranked) - MOST} more operators", rest))
    if found.operators:
        rows.append((GAPS, {GAPS: found.b.gap_s - found.a.gap_s}))
    else:
        rows = [(term, {term: value}) for term, value in found.latency_s.items()]
    _stacked(axes, rows)
    axes.set_xlabel("Time, B - A (ms)")


def _stacked(axes: Axes, rows: list[tuple[str, dict[str, float]]]) -> None:
    """Positive parts to the right, negative ones to the left, each term in its colour; a dot at the sum."""
    seen: set[str] = set()
    for place, (_, terms) in enumerate(rows):
        ends = [0.0, 0.0]
        for term, value in terms.items():
            side = int(value >= 0)
            label = term if term not in seen and value else None
            colour = _TERM.get(term, _OTHER)
            axes.barh(place, 1e3 * value, left=1e3 * ends[side], color=colour, label=label)
            ends[side] += value
            seen |= {term} if value else set()
        axes.plot(1e3 * sum(terms.values()), place, "o", ms=4, color="#000000", zorder=5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#000000", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if seen:
        axes.legend(frameon=False, fontsize=7, loc="best")


def _power(axes: Axes, found: Explanation) -> None:
    values = found.module_w or found.power_w
    names = sorted(values, key=lambda name: -abs(values[name]))
    colours = [COLOUR.get(name, _TERM.get(name, _OTHER)) for name in names]
    axes.barh(range(len(names)), [values[name] for name in names], color=colours)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#000000", lw=0.6)
    axes.set_xlabel("Mean power, B - A (W)")
    axes.spines[["top", "right"]].set_visible(False)
