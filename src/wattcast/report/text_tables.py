"""Print predictions as tables in a terminal, and make the plain tables that all commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wattcast.core.strict_files import FitStatus
from wattcast.core.units import show
from wattcast.predictor.prediction import Prediction

MOST_OPS = 12
_UNIT_BY_ENDING = (
    ("byte_per_s", "byte/s"),
    ("byte_per_cycle", "byte/cycle"),
    ("_per_s", ""),
    ("_per_j", ""),
    ("_js", ""),
    ("_hz", "Hz"),
    ("_byte", "byte"),
    ("_s", "s"),
    ("_w", "W"),
    ("_j", "J"),
)


def new_table(*columns: str, title: str | None = None) -> Table:
    """Return an empty plain table with the first column left-aligned and the others right-aligned."""
    built = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        built.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return built


def format_cell(column: str, value: Any) -> str:
    """Format one value in the unit that its column names.

    >>> format_cell("power_w", 412.04), format_cell("capped", True), format_cell("sm_count", 132.0)
    ('412 W', 'yes', '132')
    """
    if value is None:
        return ""
    if column.endswith("_share"):
        return f"{value:.0%}"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else ""
    if isinstance(value, str):
        return escape(value)
    unit = next((unit for ending, unit in _UNIT_BY_ENDING if column.endswith(ending)), "")
    return show(float(value), unit) if unit else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def print_rows(console: Console, found: Sequence[Mapping[str, Any]], columns: Mapping[str, str], title: str) -> None:
    """Print rows as a table; ``columns`` maps columns to headings. Columns that are empty everywhere are left out."""
    used = {c: h for c, h in columns.items() if any(row.get(c) is not None for row in found)}
    built = new_table(*used.values(), title=title)
    for row in found:
        built.add_row(*(format_cell(column, row.get(column)) for column in used))
    console.print(built)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print what was assumed, in small type."""
    if notes:
        console.print("Assumed", style="bold")
    for note in dict.fromkeys(notes):
        console.print(f"  - {escape(note)}", style="dim", highlight=False)


def print_predictions(console: Console, predictions: Sequence[Prediction], capacity_byte: float) -> None:
    """Print one prediction at length, or several as one table."""
    if len(predictions) == 1:
        _print_one(console, predictions[0], capacity_byte)
    else:
        _print_many(console, predictions)
    print_notes(console, [note for p in predictions for note in p.assumptions])


def _print_one(console: Console, p: Prediction, capacity_byte: float) -> None:
    mark = "" if p.status is FitStatus.FITTED else f"  [bold]({p.status} coefficients)[/bold]"
    console.print(f"[bold]{escape(p.name)}[/bold] on [bold]{escape(p.gpu)}[/bold]{mark}", highlight=False)
    rows = new_table("", "predicted", f"{p.interval.level:.0%} interval")
    for name, value, ends, unit in (
        ("latency", p.latency_s, p.interval.latency_s, "s"),
        ("power", p.power_w, p.interval.power_w, "W"),
        ("energy", p.energy_j, p.interval.energy_j, "J"),
    ):
        span = f"{show(float(ends[0]), unit, 3)} to {show(float(ends[1]), unit, 3)}"
        rows.add_row(name, show(float(value), unit), span)
    held = "held down by the power limit" if bool(p.capped) else ""
    rows.add_row("clock", show(float(p.clock_hz), "Hz"), held)
    rows.add_row("effective clock", show(float(p.effective_clock_hz), "Hz"), "")
    waiting = 1.0 - float(p.busy_s) / float(p.latency_s)
    rows.add_row("waiting for the host", f"{waiting:.1%}", "")
    if p.memory_byte is not None:
        fits = "fits" if p.fits else "DOES NOT FIT"
        rows.add_row("memory", show(p.memory_byte, "byte"), f"{fits} in {show(capacity_byte, 'byte')}")
    console.print(rows)
    console.print(_modules(p))
    console.print(_ops(p))
    inside = "inside" if p.support.inside else "outside"
    console.print(f"Support: {inside} what was measured: {escape(p.support.reason)}", highlight=False)


def _modules(p: Prediction) -> Table:
    rows = new_table("module", "power", "share", "utilisation")
    for module in p.modules:
        share = float(module.power_w) / float(p.power_w)
        busy = "" if module.utilisation is None else f"{float(module.utilisation):.1%}"
        rows.add_row(module.name, show(float(module.power_w), "W", 3), f"{share:.1%}", busy)
    return rows


def _ops(p: Prediction) -> Table:
    rows = new_table("operator", "calls", "time", "share", "power", "energy")
    ranked = sorted(p.ops, key=lambda o: -float(o.latency_s))
    for share in ranked[:MOST_OPS]:
        rows.add_row(
            escape(str(share.op)),
            str(share.count),
            show(float(share.latency_s), "s", 3),
            f"{float(share.latency_s) / float(p.busy_s):.1%}",
            show(float(share.power_w), "W", 3),
            show(float(share.energy_j), "J", 3),
        )
    rest = ranked[MOST_OPS:]
    if rest:
        seconds = sum(float(o.latency_s) for o in rest)
        joules = sum(float(o.energy_j) for o in rest)
        share_text = f"{seconds / float(p.busy_s):.1%}"
        rows.add_row(f"... {len(rest)} more", "", show(seconds, "s", 3), share_text, "", show(joules, "J", 3))
    return rows


def _print_many(console: Console, predictions: Sequence[Prediction]) -> None:
    rows = new_table("workload", "latency", "power", "energy", "clock", "capped")
    for p in predictions:
        rows.add_row(
            escape(p.name),
            show(float(p.latency_s), "s"),
            show(float(p.power_w), "W"),
            show(float(p.energy_j), "J"),
            show(float(p.clock_hz), "Hz"),
            "yes" if bool(p.capped) else "",
        )
    statuses = ", ".join(dict.fromkeys(str(p.status) for p in predictions))
    rows.title = f"{len(predictions)} workloads on {predictions[0].gpu} ({statuses} coefficients)"
    console.print(rows)
    reasons = dict.fromkeys(p.support.reason for p in predictions if not p.support.inside)
    for reason in reasons:
        console.print(f"Support: outside what was measured: {escape(reason)}", highlight=False)
