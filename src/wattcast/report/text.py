"""Predictions as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wattcast.prediction import Prediction
from wattcast.provenance import Status
from wattcast.units import show

MOST_OPS = 12


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table: first column left, the others right."""
    built = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        built.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return built


def print_predictions(console: Console, predictions: Sequence[Prediction], capacity_byte: float) -> None:
    """One prediction at length, or several as one table."""
    if len(predictions) == 1:
        _print_one(console, predictions[0], capacity_byte)
    else:
        _print_many(console, predictions)
    notes = dict.fromkeys(note for p in predictions for note in p.assumptions)
    console.print("Assumed", style="bold")
    for note in notes:
        console.print(f"  - {escape(note)}", style="dim", highlight=False)


def _print_one(console: Console, p: Prediction, capacity_byte: float) -> None:
    mark = "" if p.status is Status.FITTED else f"  [bold]({p.status} coefficients)[/bold]"
    console.print(f"[bold]{escape(p.name)}[/bold] on [bold]{escape(p.gpu)}[/bold]{mark}", highlight=False)
    rows = table("", "predicted", f"{p.interval.level:.0%} interval")
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
    rows = table("module", "power", "share", "utilisation")
    for module in p.modules:
        share = float(module.power_w) / float(p.power_w)
        busy = "" if module.utilisation is None else f"{float(module.utilisation):.1%}"
        rows.add_row(module.name, show(float(module.power_w), "W", 3), f"{share:.1%}", busy)
    return rows


def _ops(p: Prediction) -> Table:
    rows = table("operator", "calls", "time", "share", "power", "energy")
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
    rows = table("workload", "latency", "power", "energy", "clock", "capped")
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
