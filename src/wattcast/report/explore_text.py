"""Explorations as tables for a terminal. A column's name says its unit; the cell shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from wattcast.explore.choices import Choice
from wattcast.explore.dvfs import Clocks, Objective
from wattcast.explore.fleet import Assignment
from wattcast.explore.money import Prices
from wattcast.explore.out import plan_notes
from wattcast.explore.serving import Plan, Service
from wattcast.explore.store import rows
from wattcast.explore.sweep import BEST, Swept
from wattcast.provenance import Status
from wattcast.report.text import table
from wattcast.units import show

MOST_ROWS = 15
_UNITS = (
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


def cell(column: str, value: Any) -> str:
    """One value, in the unit its column names.

    >>> cell("power_w", 412.04), cell("capped", True), cell("sm_count", 132.0), cell("reason", None)
    ('412 W', 'yes', '132', '')
    """
    if value is None:
        return ""
    if column.endswith("_share"):
        return f"{value:.0%}"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else ""
    if isinstance(value, str):
        return escape(value)
    unit = next((unit for ending, unit in _UNITS if column.endswith(ending)), "")
    return show(float(value), unit) if unit else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def print_rows(console: Console, found: Sequence[Mapping[str, Any]], columns: Mapping[str, str], title: str) -> None:
    """Rows as a table; ``columns`` maps a column to its heading. Columns that are empty everywhere are left out."""
    used = {c: h for c, h in columns.items() if any(row.get(c) is not None for row in found)}
    built = table(*used.values(), title=title)
    for row in found:
        built.add_row(*(cell(column, row.get(column)) for column in used))
    console.print(built)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """What was assumed, small."""
    if notes:
        console.print("Assumed", style="bold")
    for note in dict.fromkeys(notes):
        console.print(f"  - {escape(note)}", style="dim", highlight=False)


def print_swept(console: Console, done: Swept) -> None:
    """The best points and the front of a sweep."""
    study, summary = done.study, done.summary
    mark = "" if study.bundle.status is Status.FITTED else f" ({study.bundle.status} coefficients)"
    share = "" if summary.kept == done.points else f", {summary.kept:,} meet the constraints"
    console.print(
        f"[bold]{escape(study.graph.name)}[/bold] on designs around [bold]{escape(study.gpu.name)}[/bold]{mark}: "
        f"{done.points:,} points{share}",
        highlight=False,
    )
    columns = _headings(study.space.columns)
    least = [{"least": name, **row} for name, row in zip(BEST, rows(summary.best), strict=True)]
    print_rows(console, least, {"least": "least"} | columns, "The best of each")
    front = rows(summary.front)
    chosen = [front[i] for i in np.unique(np.linspace(0, len(front) - 1, min(MOST_ROWS, len(front))).astype(int))]
    some = "" if len(chosen) == len(front) else f", {len(chosen)} of {len(front):,} shown"
    print_rows(console, chosen, columns, f"Pareto front of {' and '.join(done.objectives)}{some}")


def print_clocks(console: Console, found: Clocks, least: Objective) -> None:
    """The best clocks, and an even selection of all."""
    study, points = found.study, rows(found.columns)
    mark = "" if study.bundle.status is Status.FITTED else f" ({study.bundle.status} coefficients)"
    chosen = points[found.best[least]]
    limit = f" under a limit of {show(chosen['asked_power_limit_w'], 'W')}" if "asked_power_limit_w" in chosen else ""
    console.print(
        f"[bold]{escape(study.graph.name)}[/bold] on [bold]{escape(study.gpu.name)}[/bold]{mark}: least {least} "
        f"{found.bound} at [bold]{show(chosen['asked_clock_hz'], 'Hz')}[/bold]{limit}",
        highlight=False,
    )
    columns = _headings(study.space.columns) | {"slowdown": "slowdown", "energy_delay_js": "ED (J s)"}
    best = [{"least": str(objective), **points[row]} for objective, row in found.best.items()]
    print_rows(console, best, {"least": "least"} | columns, f"The best of each, {found.bound}")
    some = [points[i] for i in np.unique(np.linspace(0, len(points) - 1, min(30, len(points))).astype(int))]
    print_rows(console, some, columns, f"{len(some)} of {len(points):,} points")
    print_notes(console, [*study.graph.assumptions, *study.bundle.assumptions])


def print_choices(console: Console, found: Sequence[Choice], prices: Prices, title: str) -> None:
    """Choices side by side, those that cannot be run last."""
    money = f"cost ({prices.currency})" if prices.currency else "cost"
    columns = {name: name for name in found[0].names} | {
        "latency_s": "latency",
        "power_w": "power",
        "clock_hz": "clock",
        "capped": "capped",
        "fits": "fits",
        "gpus": "GPUs",
        "requests_per_s": "requests/s",
        "energy_j_per_request": "J/request",
        "requests_per_j": "requests/J",
        "cost_per_request": f"{money}/request",
        "carbon_g_per_request": "g CO2e/request",
        "speedup": "speed-up",
        "energy_ratio": "energy ratio",
        "coefficients": "coefficients",
    }
    shown = [choice.row for choice in found if choice.results]
    print_rows(console, shown, columns, title)
    for choice in found:
        if choice.reason:
            names = ", ".join(str(value) for value in choice.names.values())
            console.print(f"{escape(names)}: {escape(choice.reason)}", highlight=False)
    print_notes(console, [*(note for choice in found for note in choice.notes), *prices.notes])


def print_plans(console: Console, asked: Service, found: Sequence[Plan], prices: Prices) -> None:
    """The best plan in a sentence, then each GPU's."""
    best = found[0].row
    console.print(
        f"[bold]{escape(asked.model.name)}[/bold] at {asked.rate_per_s:g} requests/s, "
        f"{asked.prompt} + {asked.output} tokens: [bold]{best['gpus']} x {escape(best['gpu'])}[/bold], "
        f"batch {best['batch']}, {show(best['clock_hz'], 'Hz')}, power limit {show(best['power_limit_w'], 'W')}",
        highlight=False,
    )
    money = prices.currency or "cost"
    columns = {
        "gpu": "gpu",
        "gpus": "GPUs",
        "tp": "tp",
        "batch": "batch",
        "clock_hz": "clock",
        "power_limit_w": "limit",
        "ttft_s": "TTFT",
        "tpot_s": "TPOT",
        "prefill_share": "prefill",
        "decode_share": "decode",
        "idle_share": "idle",
        "power_w": "power",
        "energy_j_per_token": "J/token",
        "energy_j_per_request": "J/request",
        "cost_per_million_tokens": f"{money}/M tokens",
        "carbon_g_per_million_tokens": "g CO2e/M tokens",
    }
    print_rows(console, [plan.row for plan in found if plan.row], columns, "Plans, best first")
    for plan in found:
        word = "binds" if plan.row else "cannot serve it"
        console.print(f"{escape(plan.gpu)} {word}: {escape(plan.binds)}", highlight=False)
    print_notes(console, plan_notes(asked, found, prices))


def print_assignment(console: Console, found: Assignment) -> None:
    """Who runs what, at which clock, and what the site draws."""
    console.print(
        f"[bold]{found.factor:.1%}[/bold] of every rate served, {show(found.power_w, 'W')} on average, "
        f"{show(found.peak_w, 'W')} with every assigned GPU busy; {found.binds} bind",
        highlight=False,
    )
    columns = {
        "workload": "workload",
        "gpu": "gpu",
        "gpus": "GPUs",
        "clock_hz": "clock",
        "busy_share": "busy",
        "power_w_per_gpu": "power each",
        "requests_per_s": "requests/s",
        "energy_j_per_request": "J/request",
    }
    print_rows(console, found.rows, columns, f"Assignment for {found.aim}")
    left = ", ".join(f"{count} x {escape(name)}" for name, count in found.idle_gpus.items() if count)
    console.print(f"Idle: {left or 'none'}", highlight=False)
    print_notes(console, found.notes)


def print_published(console: Console, told: Mapping[str, Any]) -> None:
    """Errors over clocks, number formats, forecasts."""
    errors = {"latency_mape": "latency", "power_mape": "power", "energy_mape": "energy"}
    shown = [row | {name: f"{row[name]:.1%}" for name in errors} for row in told["dvfs"]]
    title = f"Clocks of the {told['gpu']} ({told['status']} coefficients): mean absolute error"
    print_rows(console, shown, {"workload": "workload", "n": "clocks"} | errors, title)
    columns = {
        "model": "model",
        "batch": "batch",
        "seq": "tokens",
        "dtype": "format",
        "attention": "attention",
        "predicted_s": "predicted",
        "measured_s": "measured",
        "predicted_w": "predicted ",
        "measured_w": "measured ",
    }
    print_rows(console, told["formats"], columns, "Number formats and attention at 900 MHz")
    forecast = {"gpu": "gpu", "latency_s": "latency", "power_w": "power", "clock_hz": "clock", "capped": "capped"}
    print_rows(console, told["forecasts"], forecast, "bert-large, batch 32, 512 tokens, on other GPUs: forecasts")


def _headings(axes: Sequence[str]) -> dict[str, str]:
    results = {"latency_s": "latency", "power_w": "power", "energy_j": "energy", "clock_hz": "clock"}
    flags = {"capped": "capped", "limit_met": "limit met", "fits": "fits"}
    return {name: name for name in axes} | results | flags
