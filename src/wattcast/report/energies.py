"""Bottom-up energies, what a change does to them, and their ratios to those of others, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wattcast.report.text import table
from wattcast.units import show

if TYPE_CHECKING:
    from rich.console import Console

    from wattcast.power.component.bottom_up.what_if import Change
    from wattcast.validate.component_energies import Ratio

_LEAST = 5e-4  # a change that is worth a line


def show_energies(console: Console, plain: dict[str, Any]) -> None:
    """Energies by counter and by event, leakage and area by part, and where they come from."""
    from rich.markup import escape

    console.print(f"[bold]{escape(plain['name'])}[/bold]  {escape(plain['provenance'])}", highlight=False)
    listing = table("counter", "energy", "from")
    listing.columns[2].justify = "left"
    for row in plain["counters"]:
        listing.add_row(row["counter"], show(row["energy_j"], "J", 4), row["from"])
    listing.add_row("PIPE_A", show(plain["pipelines_w"], "W", 4), "pipeline latches of all SMs at duty one")
    console.print(listing)
    if plain["events"]:
        events = table("event", "energy")
        for row in plain["events"]:
            events.add_row(row["event"], show(row["energy_j"], "J", 4))
        console.print(events)
    published = table("unit", "operation at this node and voltage", "source")
    published.columns[2].justify = "left"
    for row in plain["units"]:
        published.add_row(row["unit"], show(row["energy_j"], "J", 4), escape(row["source"]))
    console.print(published)
    pieces = table("part", "count", "leakage of one", "area of one")
    for row in plain["parts"]:
        leak_w = row["subthreshold_w"] + row["gate_w"]
        pieces.add_row(row["part"], str(row["count"]), show(leak_w, "W", 3), f"{row['area_mm2']:.4g} mm2")
    pieces.add_row("whole chip", "", show(plain["leakage_w"], "W", 4), f"{plain['area_mm2']:.4g} mm2")
    console.print(pieces)
    for note in plain["notes"]:
        console.print(f"note: {escape(note)}", style="dim", highlight=False)


def show_changes(console: Console, changes: Sequence[Change]) -> None:
    """What moved, before and after."""
    listing = table("figure", "before", "after", "ratio")
    for change in changes:
        if abs(change.ratio - 1.0) >= _LEAST:
            before, after = (_figure(value, change.unit) for value in (change.before, change.after))
            listing.add_row(change.name, before, after, f"{change.ratio:.3f}")
    console.print(listing)


def show_ratios(console: Console, ratios: Sequence[Ratio]) -> None:
    """Every ratio, one line each."""
    listing = table("where", "class", "name", "bottom up", "theirs", "ratio")
    for r in ratios:
        listing.add_row(
            r.where, r.group, r.name, _figure(r.ours, r.unit), _figure(r.theirs, r.unit), f"{r.ratio:.3f}"
        )
    console.print(listing)


def _figure(value: float, unit: str) -> str:
    return f"{value:.4g} mm2" if unit == "mm2" else show(value, unit, 4)
