"""Show the difference between two runs as text, JSON and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wattcast import __version__
from wattcast.core.units import show
from wattcast.predictor.answer_lines import round_number
from wattcast.predictor.prediction_json import take_fields
from wattcast.report import comparison
from wattcast.report.comparison import (
    PartDifference,
    RunComparison,
    RunSummary,
)
from wattcast.report.figure_style import (
    MODULE_COLOURS,
    Axes,
    Figure,
    add_caption,
    new_figure,
)
from wattcast.report.text_tables import new_table, print_notes

MOST_LISTED = 12
MOST_BARS = 10

Quantity = tuple[str, str, str]  # its name, its column, its unit

_QUANTITIES: tuple[Quantity, ...] = (
    ("latency", "latency_s", "s"),
    ("power", "total_power_w", "W"),
    ("energy", "total_energy_j", "J"),
)
_LATENCY = _QUANTITIES[0]
_TOTALS: tuple[Quantity, ...] = (
    ("total power", "total_power_w", "W"),
    ("total energy", "total_energy_j", "J"),
)
# What a user decides by comes first, then what it is made of, then one GPU of several.
_ANSWERS: tuple[Quantity, ...] = (
    ("tokens/s", "tokens_per_s", ""),
    ("energy per token", "energy_j_per_token", "J"),
    ("items/s", "items_per_s", ""),
    ("energy per item", "energy_j_per_item", "J"),
)
_ONE_GPU: tuple[Quantity, ...] = (
    ("power of one GPU", "power_w", "W"),
    ("energy of one GPU", "energy_j", "J"),
)
_CLOCKS: tuple[Quantity, ...] = (
    ("clock", "clock_hz", "Hz"),
    ("effective clock", "effective_hz", "Hz"),
)
_COUNTED = tuple(column for _, column, _ in _ANSWERS)

_NOTHING = {
    "s": 1e-12,
    "J": 1e-9,
    "W": 1e-6,
}  # rounding, not a contribution

# Tol's muted set (2021): terms must not look like modules
_TERM_COLOURS = {
    comparison.WORK: "#332288",
    comparison.CLOCK: "#CC6677",
    comparison.CALLS: "#117733",
    comparison.ONLY: "#DDCC77",
    comparison.GAPS: "#88CCEE",
}
_OTHER_COLOUR = "#AA4499"


def has_several_gpus(result: RunComparison) -> bool:
    """Tell whether a side of a comparison has more than one GPU."""
    return result.a.gpu_count > 1 or result.b.gpu_count > 1


def _name_quantities(result: RunComparison) -> tuple[Quantity, ...]:
    """Return time, power and energy with their names.

    Power and energy are called totals where a side has several GPUs.
    """
    return (_LATENCY, *_TOTALS) if has_several_gpus(result) else _QUANTITIES


# Sentences


def write_sentence(result: RunComparison) -> str:
    """Say in one line how speed and energy per token change, and what contributed most.

    Power and energy are those of all GPUs.
    """
    answers = _write_answers(result)
    parts = [answers] if answers else []
    for name, column, unit in _name_quantities(result):
        a = getattr(result.a, column)
        b = getattr(result.b, column)
        terms = getattr(result, column)
        if not terms or b == a:
            continue
        largest = max(terms, key=lambda term: abs(terms[term]))
        whole = _format_signed(b - a, unit)
        most = _format_signed(terms[largest], unit)
        parts.append(f"{name} {whole} ({b / a - 1:+.1%}), most by {largest} {most}")
    return "; ".join(parts) + "." if parts else "Both sides are equal."


def _write_answers(result: RunComparison) -> str:
    """Say how speed and energy per token or item change; empty where nothing is counted."""
    parts = []
    for name, column, _ in _ANSWERS:
        a = getattr(result.a, column)
        b = getattr(result.b, column)
        if a and b and a != b:
            parts.append(f"{name} {b / a - 1:+.1%}")
    return ", ".join(parts)


def _format_signed(value: float, unit: str) -> str:
    if abs(value) < _NOTHING.get(unit, 0.0):
        value = 0.0
    sign = "+" if value > 0 else ""
    return f"{sign}{show(value, unit, 3)}"


# Text


def print_comparison(console: Console, result: RunComparison) -> None:
    """Print the conclusion, then totals, terms, operators and modules, the largest share first."""
    console.print(f"A: {escape(result.a.name)}\nB: {escape(result.b.name)}")
    console.print(f"B against A: {write_sentence(result)}", style="bold")
    console.print(_table_totals(result))
    titles = [name for name, _, _ in _name_quantities(result)]
    console.print(_table_causes(result, titles))
    if result.operators:
        console.print(_table_operators(result, titles))
    if result.module_w:
        rows = new_table("module", *titles[1:])
        for name in _rank_by_size(result.module_w):
            watts = _format_signed(result.module_w[name], "W")
            rows.add_row(name, watts, _format_signed(result.module_j[name], "J"))
        console.print(rows)
    print_notes(console, result.notes, "")
    console.print(f"Rule: {result.rule}.", style="dim")


def _table_totals(result: RunComparison) -> Table:
    """Return both runs: tokens and joules per token, all GPUs, the time, and one GPU of several."""
    a = result.a
    b = result.b
    rows = new_table(
        "",
        "A",
        "B",
        "B - A",
        "",
    )
    quantities = [*_ANSWERS, *_name_quantities(result)[1:], _LATENCY]
    if has_several_gpus(result):
        more = f"{b.gpu_count - a.gpu_count:+d}"
        relative = f"{b.gpu_count / a.gpu_count - 1:+.1%}"
        rows.add_row(
            "GPUs",
            str(a.gpu_count),
            str(b.gpu_count),
            more,
            relative,
        )
        quantities += _ONE_GPU
    for name, column, unit in (*quantities, *_CLOCKS):
        value_a = getattr(a, column)
        value_b = getattr(b, column)
        if not (value_a and value_b):
            continue
        if unit:
            shown = [show(value_a, unit), show(value_b, unit)]
            difference = _format_signed(value_b - value_a, unit)
        else:
            shown = [round_number(value_a, 4), round_number(value_b, 4)]
            difference = f"{value_b - value_a:+,.4g}"
        rows.add_row(name, *shown, difference, f"{value_b / value_a - 1:+.1%}")
    return rows


def _table_causes(result: RunComparison, titles: Sequence[str]) -> Table:
    """Return what each term contributes to time, power and energy."""
    terms = [getattr(result, column) for _, column, _ in _QUANTITIES]
    units = [unit for _, _, unit in _QUANTITIES]
    rows = new_table("caused by", *titles)
    for name in comparison.sum_terms(terms):
        rows.add_row(name, *_format_term(name, terms, units))
    sums = [sum(contributions.values()) for contributions in terms]
    cells = [_format_signed(total, unit) for total, unit in zip(sums, units, strict=True)]
    rows.add_row("together", *cells, style="bold")
    return rows


def _format_term(
    name: str,
    terms: Sequence[dict[str, float]],
    units: Sequence[str],
) -> list[str]:
    """Return one term of each quantity; empty where a quantity does not have it."""
    cells = []
    for contributions, unit in zip(terms, units, strict=True):
        value = contributions.get(name)
        cells.append("" if value is None else _format_signed(value, unit))
    return cells


def _table_operators(result: RunComparison, titles: Sequence[str]) -> Table:
    """Return the operators that contribute most to any quantity, and the gaps between them."""
    columns = [column for _, column, _ in _QUANTITIES]

    def largest_share(pair: PartDifference) -> float:
        shares = [abs(pair.total(column) / getattr(result.a, column)) for column in columns]
        return float(max(shares))

    ranked = sorted(result.operators, key=lambda pair: -largest_share(pair))
    rows = new_table("operator", "calls", *titles)
    for pair in ranked[:MOST_LISTED]:
        counts = [f"{part.calls:g}" if part else "0" for part in (pair.a, pair.b)]
        calls = " -> ".join(dict.fromkeys(counts))
        rows.add_row(escape(pair.name), calls, *_format_sums([pair]))
    more = ranked[MOST_LISTED:]
    if more:
        rows.add_row(f"... {len(more)} more", "", *_format_sums(more))
    terms = [getattr(result, column) for column in columns]
    units = [unit for _, _, unit in _QUANTITIES]
    rows.add_row(comparison.GAPS, "", *_format_term(comparison.GAPS, terms, units))
    return rows


def _format_sums(pairs: Sequence[PartDifference]) -> list[str]:
    """Return the sums of time, and of power and energy where they are known."""
    quantities = _QUANTITIES if any(pair.total_energy_j for pair in pairs) else (_LATENCY,)
    cells = []
    for _, column, unit in quantities:
        cells.append(_format_signed(sum(pair.total(column) for pair in pairs), unit))
    return cells


def _rank_by_size(values: dict[str, float]) -> list[str]:
    return sorted(values, key=lambda name: -abs(values[name]))


# JSON


def comparison_to_plain(result: RunComparison) -> dict[str, Any]:
    """Return SI numbers for JSON; each list of contributions adds up to its difference B - A.

    ``total_power_w`` and ``total_energy_j`` are of all GPUs, ``power_w`` and ``energy_j`` of one.
    """
    modules = []
    for name, watts in result.module_w.items():
        joules = result.module_j[name]
        modules.append(
            {
                "name": name,
                "total_power_w": watts,
                "total_energy_j": joules,
            }
        )
    gap_s = result.b.gap_s - result.a.gap_s
    return {
        "wattcast": __version__,
        "rule": result.rule,
        "a": _side_to_plain(result.a),
        "b": _side_to_plain(result.b),
        "difference": _subtract_sides(result),
        "terms": take_fields(result, *(column for _, column, _ in _QUANTITIES)),
        "operators": [_pair_to_plain(pair) for pair in result.operators],
        "idle_gaps": {"latency_s": gap_s} if result.operators else None,
        "modules": modules,
        "notes": list(dict.fromkeys(result.notes)),
    }


def _pair_to_plain(pair: PartDifference) -> dict[str, Any]:
    sides = (pair.a, pair.b)
    return {
        **take_fields(pair, "name", "family"),
        "calls": [part.calls if part else 0.0 for part in sides],
        "seconds": [part.seconds if part else 0.0 for part in sides],
        "latency_s": pair.total("latency_s"),
        "total_energy_j": pair.total("total_energy_j") if pair.total_energy_j else None,
        "total_power_w": pair.total("total_power_w") if pair.total_power_w else None,
        "terms": take_fields(pair, "latency_s", "total_energy_j", "total_power_w"),
    }


def _subtract_sides(result: RunComparison) -> dict[str, float]:
    """Return B - A of all that both sides know."""
    of_all = ("total_power_w", "total_energy_j")
    difference = {}
    for column in ("latency_s", *_COUNTED, *of_all, "power_w", "energy_j"):
        a = getattr(result.a, column)
        b = getattr(result.b, column)
        if a is not None and b is not None:
            difference[column] = b - a
    return difference


def _side_to_plain(side: RunSummary) -> dict[str, Any]:
    return {
        **take_fields(
            side,
            "name",
            "measured",
            "gpu_count",
            "tokens",
            "items",
        ),
        **take_fields(side, "latency_s", *_COUNTED),
        **take_fields(
            side,
            "total_power_w",
            "total_energy_j",
            "power_w",
            "energy_j",
            "clock_hz",
        ),
        "effective_clock_hz": side.effective_hz,
        "idle_gaps_s": side.gap_s if side.parts else None,
    }


# Figure

_Row = tuple[str, dict[str, float]]  # a bar's label, and its seconds by term


def draw_difference(result: RunComparison) -> Figure:
    """Draw milliseconds by operator, stacked by term, and watts by module.

    Where no module is known, watts are drawn by term.
    """
    figure = new_figure(11.0, 5.5)
    time_axes, power_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_times(time_axes, _list_times(result))
    _draw_watts(power_axes, result)
    figure.suptitle(f"{result.a.name}  →  {result.b.name}\n{_describe_change(result)}", fontsize=10)
    return add_caption(figure, f"Contributions to B - A. {result.rule}.")


def _list_times(result: RunComparison) -> list[_Row]:
    """Return seconds by term of the operators that changed most, of the others and of gaps."""
    if not result.operators:
        return [(term, {term: value}) for term, value in result.latency_s.items()]
    ranked = sorted(result.operators, key=lambda pair: -abs(pair.total("latency_s")))
    rows = [(pair.name, pair.latency_s) for pair in ranked[:MOST_BARS]]
    more = ranked[MOST_BARS:]
    if more:
        sums = comparison.sum_terms([pair.latency_s for pair in more])
        rows.append((f"{len(more)} more operators", sums))
    rows.append((comparison.GAPS, {comparison.GAPS: result.b.gap_s - result.a.gap_s}))
    return rows


def _draw_times(axes: Axes, rows: Sequence[_Row]) -> None:
    """Draw a bar of each row, stacked by term.

    Positive contributions go to the right, negative ones to the left, and a dot is their sum.
    """
    labelled: set[str] = set()
    for place, (_, terms) in enumerate(rows):
        ends = {True: 0.0, False: 0.0}  # of the bars to the right and to the left
        for term, value in terms.items():
            is_positive = value >= 0
            label = term if term not in labelled and value else None
            colour = _TERM_COLOURS.get(term, _OTHER_COLOUR)
            begin_ms = 1e3 * ends[is_positive]
            axes.barh(
                place,
                1e3 * value,
                left=begin_ms,
                color=colour,
                label=label,
            )
            ends[is_positive] += value
            if value:
                labelled.add(term)
        axes.plot(
            1e3 * sum(terms.values()),
            place,
            "o",
            ms=4,
            color="#000000",
            zorder=5,
        )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.axvline(0.0, color="#000000", lw=0.6)
    if labelled:
        axes.legend(frameon=False, loc="best")
    axes.set_xlabel("Time, B - A (ms)")


def _draw_watts(axes: Axes, result: RunComparison) -> None:
    """Draw the change in mean power by module, or by term."""
    values = result.module_w or result.total_power_w
    names = _rank_by_size(values)
    colours = {**_TERM_COLOURS, **MODULE_COLOURS}
    bar_colours = [colours.get(name, _OTHER_COLOUR) for name in names]
    axes.barh(range(len(names)), [values[name] for name in names], color=bar_colours)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0.0, color="#000000", lw=0.6)
    gpus = " of all GPUs" if has_several_gpus(result) else ""
    axes.set_xlabel(f"Mean power{gpus}, B - A (W)")


def _describe_change(result: RunComparison) -> str:
    """Say by how much time, power and energy change."""
    a = result.a
    b = result.b
    changes = [
        f"{b.latency_s / a.latency_s - 1:+.1%} time",
        f"{b.total_power_w / a.total_power_w - 1:+.1%} power",
        f"{b.total_energy_j / a.total_energy_j - 1:+.1%} energy",
    ]
    change = ", ".join(changes)
    if has_several_gpus(result):
        change += f" of all GPUs ({a.gpu_count} and {b.gpu_count})"
    answers = _write_answers(result)
    return f"{answers}; {change}" if answers else change
