"""Show the difference between two runs as text, JSON and a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from wattcast import __version__
from wattcast.core.units import show
from wattcast.report.comparison import CALLS, CLOCK, GAPS, ONLY, WORK, PartDifference, RunComparison, RunSummary
from wattcast.report.figure_style import MODULE_COLOURS, add_caption, new_figure
from wattcast.report.text_tables import new_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LISTED = 12
_QUANTITIES = (("latency", "latency_s", "s"), ("power", "power_w", "W"), ("energy", "energy_j", "J"))


def print_comparison(console: Console, found: RunComparison) -> None:
    """Print totals, terms, operators and modules, the largest contribution first."""
    console.print(f"A: {escape(found.a.name)}\nB: {escape(found.b.name)}", highlight=False)
    rows = new_table("", "A", "B", "B - A", "")
    for name, column, unit in _QUANTITIES:
        left, right = getattr(found.a, column), getattr(found.b, column)
        rows.add_row(
            name, show(left, unit), show(right, unit), _signed(right - left, unit), f"{right / left - 1:+.1%}"
        )
    for name, column in (("clock", "clock_hz"), ("effective clock", "effective_hz")):
        left, right = getattr(found.a, column), getattr(found.b, column)
        if left and right:
            change = f"{right / left - 1:+.1%}"
            rows.add_row(name, show(left, "Hz"), show(right, "Hz"), _signed(right - left, "Hz"), change)
    console.print(rows)
    console.print(_terms(found))
    if found.operators:
        console.print(_operators(found))
    if found.module_w:
        console.print(_modules(found))
    console.print(write_sentence(found), highlight=False)
    for note in dict.fromkeys(found.notes):
        console.print(f"  - {escape(note)}", style="dim", highlight=False)
    console.print(f"Rule: {found.rule}.", style="dim", highlight=False)


def write_sentence(found: RunComparison) -> str:
    """Say in one line what contributed most."""
    parts = []
    for name, column, unit in _QUANTITIES:
        a, b = getattr(found.a, column), getattr(found.b, column)
        terms = getattr(found, column)
        if not terms or b == a:
            continue
        largest = max(terms, key=lambda term: abs(terms[term]))
        parts.append(
            f"{name} {_signed(b - a, unit)} ({b / a - 1:+.1%}), most by {largest} {_signed(terms[largest], unit)}"
        )
    return "; ".join(parts) + "." if parts else "Both sides are equal."


def _terms(found: RunComparison) -> Any:
    rows = new_table("caused by", *(name for name, _, _ in _QUANTITIES))
    names = dict.fromkeys(term for _, column, _ in _QUANTITIES for term in getattr(found, column))
    for name in names:
        cells = [
            _signed(getattr(found, column)[name], unit) if name in getattr(found, column) else ""
            for _, column, unit in _QUANTITIES
        ]
        rows.add_row(name, *cells)
    totals = [_signed(sum(getattr(found, column).values()), unit) for _, column, unit in _QUANTITIES]
    rows.add_row("together", *totals, style="bold")
    return rows


def _operators(found: RunComparison) -> Any:
    rows = new_table("operator", "calls", "latency", "power", "energy")
    a = found.a

    def share(pair: PartDifference) -> float:
        shares = pair.total_s / a.latency_s, pair.total_j / a.energy_j, pair.total_w / a.power_w
        return max(map(abs, shares))

    ranked = sorted(found.operators, key=share, reverse=True)
    for pair in ranked[:MOST_LISTED]:
        calls = f"{_calls(pair.a)} -> {_calls(pair.b)}" if _calls(pair.a) != _calls(pair.b) else _calls(pair.a)
        rows.add_row(escape(pair.name), calls, *_cells(pair.total_s, pair.total_w, pair.total_j, bool(pair.energy_j)))
    rest = ranked[MOST_LISTED:]
    if rest:
        seconds, watts, joules = (sum(getattr(p, name) for p in rest) for name in ("total_s", "total_w", "total_j"))
        rows.add_row(f"... {len(rest)} more", "", *_cells(seconds, watts, joules, any(p.energy_j for p in rest)))
    gap_s, gap_j = found.b.gap_s - found.a.gap_s, found.energy_j.get("idle gaps")
    rows.add_row(
        "idle gaps", "", *_cells(gap_s, found.power_w.get("idle gaps", 0.0), gap_j or 0.0, gap_j is not None)
    )
    return rows


def _calls(part: Any) -> str:
    return "0" if part is None else f"{part.calls:g}"


def _cells(seconds: float, watts: float, joules: float, known: bool) -> list[str]:
    return [_signed(seconds, "s"), _signed(watts, "W") if known else "", _signed(joules, "J") if known else ""]


def _modules(found: RunComparison) -> Any:
    rows = new_table("module", "power", "energy")
    for name in sorted(found.module_w, key=lambda n: -abs(found.module_w[n])):
        rows.add_row(name, _signed(found.module_w[name], "W"), _signed(found.module_j[name], "J"))
    return rows


_NOTHING = {"s": 1e-12, "J": 1e-9, "W": 1e-6}  # rounding, not a contribution


def _signed(value: float, unit: str) -> str:
    value = 0.0 if abs(value) < _NOTHING.get(unit, 0.0) else value
    return f"{'+' if value > 0 else ''}{show(value, unit, 3)}"


def comparison_to_plain(found: RunComparison) -> dict[str, Any]:
    """Return SI numbers for JSON; each list of contributions adds up to its difference B - A."""
    return {
        "wattcast": __version__,
        "rule": found.rule,
        "a": _side(found.a),
        "b": _side(found.b),
        "difference": {column: getattr(found.b, column) - getattr(found.a, column) for _, column, _ in _QUANTITIES},
        "terms": {column: getattr(found, column) for _, column, _ in _QUANTITIES},
        "operators": [_pair(pair) for pair in found.operators],
        "idle_gaps": {"latency_s": found.b.gap_s - found.a.gap_s} if found.operators else None,
        "modules": [{"name": n, "power_w": found.module_w[n], "energy_j": found.module_j[n]} for n in found.module_w],
        "notes": list(dict.fromkeys(found.notes)),
    }


def _side(side: RunSummary) -> dict[str, Any]:
    return {
        "name": side.name,
        "measured": side.measured,
        "latency_s": side.latency_s,
        "power_w": side.power_w,
        "energy_j": side.energy_j,
        "clock_hz": side.clock_hz,
        "effective_clock_hz": side.effective_hz,
        "idle_gaps_s": side.gap_s if side.parts else None,
    }


def _pair(pair: PartDifference) -> dict[str, Any]:
    return {
        "name": pair.name,
        "family": pair.family,
        "calls": [pair.a.calls if pair.a else 0.0, pair.b.calls if pair.b else 0.0],
        "seconds": [pair.a.seconds if pair.a else 0.0, pair.b.seconds if pair.b else 0.0],
        "latency_s": pair.total_s,
        "energy_j": pair.total_j if pair.energy_j else None,
        "power_w": pair.total_w if pair.power_w else None,
        "terms": {"latency_s": pair.latency_s, "energy_j": pair.energy_j, "power_w": pair.power_w},
    }


# Tol's muted set (2021): terms must not look like modules
_TERM = {WORK: "#332288", CLOCK: "#CC6677", CALLS: "#117733", ONLY: "#DDCC77", GAPS: "#88CCEE"}
_OTHER = "#AA4499"
MOST_BARS = 10


def draw_difference(found: RunComparison) -> Figure:
    """Draw milliseconds by operator, stacked by term, and watts by module (by term where no module is known)."""
    figure = new_figure(11.0, 5.5)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    ranked = sorted(found.operators, key=lambda pair: -abs(pair.total_s))
    rows = [(pair.name, pair.latency_s) for pair in ranked[:MOST_BARS]]
    if ranked[MOST_BARS:]:
        rest: dict[str, float] = {}
        for pair in ranked[MOST_BARS:]:
            for term, value in pair.latency_s.items():
                rest[term] = rest.get(term, 0.0) + value
        rows.append((f"{len(ranked) - MOST_BARS} more operators", rest))
    if found.operators:
        rows.append((GAPS, {GAPS: found.b.gap_s - found.a.gap_s}))
    else:
        rows = [(term, {term: value}) for term, value in found.latency_s.items()]
    _stacked(left, rows)
    left.set_xlabel("Time, B - A (ms)")
    values = found.module_w or found.power_w
    names = sorted(values, key=lambda name: -abs(values[name]))
    colours = [MODULE_COLOURS.get(name, _TERM.get(name, _OTHER)) for name in names]
    right.barh(range(len(names)), [values[name] for name in names], color=colours)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.axvline(0.0, color="#000000", lw=0.6)
    right.set_xlabel("Mean power, B - A (W)")
    right.spines[["top", "right"]].set_visible(False)
    a, b = found.a, found.b
    change = f"{b.latency_s / a.latency_s - 1:+.1%} time, {b.power_w / a.power_w - 1:+.1%} power"
    figure.suptitle(f"{a.name}  →  {b.name}\n{change}", fontsize=10)
    return add_caption(figure, f"Contributions to B - A. {found.rule}.")


def _stacked(axes: Axes, rows: list[tuple[str, dict[str, float]]]) -> None:
    """Stack positive contributions to the right and negative ones to the left, with a dot at the sum."""
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
