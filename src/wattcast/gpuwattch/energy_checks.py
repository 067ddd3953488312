"""Show bottom-up energies, and compare them with those fitted to a measured GPU, which must lie within a factor of 3.

``studies/public_checks/dumped_energies.py`` compares them with energies that a simulator dumped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wattcast.core.errors import BadInput
from wattcast.core.units import show
from wattcast.fit.scoring import LedgerRow, make_ledger_row
from wattcast.gpuwattch.bottom_up.chip_design import ChipDesign
from wattcast.gpuwattch.bottom_up.chip_model import build_chip
from wattcast.gpuwattch.bottom_up.event_energies import (
    AREA,
    LEAKAGE,
    PIPELINES,
    EnergyChange,
    compare_chips,
    energies_of_gpu,
    scale_design,
)
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.report.figure_style import add_caption, new_figure
from wattcast.report.text_tables import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_FITTED_MUST = 3.0
_LEAST_CHANGE = 5e-4  # a smaller relative change is not printed
_LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = ("o", "s", "^", "D")
_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)
_PANELS = {  # size to change -> title, and the figures that show its effect
    "registers": ("registers of an SM", ("REG_RD", "REG_WR", LEAKAGE, AREA)),
    "l1": ("L1 data cache", ("DC_RH", "DC_RM", "DC_WH", "DC_WM")),
    "l2": ("L2 slice", ("L2_RH", "L2_RM", "L2_WH", LEAKAGE)),
    "sms": ("SMs, and the network's ports", ("NOC_A", PIPELINES, LEAKAGE, AREA)),
}


@dataclass(frozen=True)
class EnergyRatio:
    """One of our figures and the corresponding one of another source."""

    where: str  # file or GPU
    group: str  # component class
    name: str
    unit: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.ours / self.theirs


def fitted_ratios(name: str = "h200") -> list[EnergyRatio]:
    """Compare the energies of a catalogue GPU with those fitted to its measured power."""
    bundle = shipped_bundle(name)
    if bundle is None:
        raise BadInput(f"no energies were fitted for {name}: there is nothing to compare with.")
    ours, theirs = energies_of_gpu(load_gpu(name)).modules, bundle.power.as_module_power().energy_j
    return [
        EnergyRatio(name, "module", event, "J", joule, theirs[event])
        for event, joule in ours.items()
        if theirs.get(event, 0.0) > 0.0
    ]


def make_energy_rows(gpu: str = "h200") -> list[LedgerRow]:
    """Return ledger rows of a fitted GPU's energies."""
    if shipped_bundle(gpu) is None:
        return []
    return [make_ratio_row(f"{gpu} fitted", r.name, 1, r.ratio, _FITTED_MUST) for r in fitted_ratios(gpu)]


def make_ratio_row(
    where: str, quantity: str, n: int, ratio: float, must: float | None, aim: float | None = None
) -> LedgerRow:
    """Return a ledger row of a ratio: its distance from one, and the factor within which it must lie."""
    goals: dict[str, Any] = {"factor_must": must, "factor_aim": aim}
    return make_ledger_row(where, quantity, n, 100.0 * abs(ratio - 1.0), ratio=round(ratio, 3), **goals)


def print_energies(console: Console, plain: dict[str, Any]) -> None:
    """Print energies by counter and by event, leakage and area by part, and their sources."""
    from rich.markup import escape

    console.print(f"[bold]{escape(plain['name'])}[/bold]  {escape(plain['provenance'])}", highlight=False)
    listing = new_table("counter", "energy", "from")
    listing.columns[2].justify = "left"
    for row in plain["counters"]:
        listing.add_row(row["counter"], show(row["energy_j"], "J", 4), row["from"])
    listing.add_row("PIPE_A", show(plain["pipelines_w"], "W", 4), "pipeline latches of all SMs at duty one")
    console.print(listing)
    if plain["events"]:
        events = new_table("event", "energy")
        for row in plain["events"]:
            events.add_row(row["event"], show(row["energy_j"], "J", 4))
        console.print(events)
    published = new_table("unit", "operation at this node and voltage", "source")
    published.columns[2].justify = "left"
    for row in plain["units"]:
        published.add_row(row["unit"], show(row["energy_j"], "J", 4), escape(row["source"]))
    console.print(published)
    pieces = new_table("part", "count", "leakage of one", "area of one")
    for row in plain["parts"]:
        leak_w = row["subthreshold_w"] + row["gate_w"]
        pieces.add_row(row["part"], str(row["count"]), show(leak_w, "W", 3), f"{row['area_mm2']:.4g} mm2")
    pieces.add_row("whole chip", "", show(plain["leakage_w"], "W", 4), f"{plain['area_mm2']:.4g} mm2")
    console.print(pieces)
    for note in plain["notes"]:
        console.print(f"note: {escape(note)}", style="dim", highlight=False)


def print_changes(console: Console, changes: Sequence[EnergyChange]) -> None:
    """Print the figures that changed, before and after."""
    listing = new_table("figure", "before", "after", "ratio")
    for change in changes:
        if abs(change.ratio - 1.0) >= _LEAST_CHANGE:
            before, after = (_format_quantity(value, change.unit) for value in (change.before, change.after))
            listing.add_row(change.name, before, after, f"{change.ratio:.3f}")
    console.print(listing)


def print_ratios(console: Console, ratios: Sequence[EnergyRatio]) -> None:
    """Print every ratio on a line of its own."""
    listing = new_table("where", "class", "name", "bottom up", "theirs", "ratio")
    for r in ratios:
        ours, theirs = _format_quantity(r.ours, r.unit), _format_quantity(r.theirs, r.unit)
        listing.add_row(r.where, r.group, r.name, ours, theirs, f"{r.ratio:.3f}")
    console.print(listing)


def _format_quantity(value: float, unit: str) -> str:
    return f"{value:.4g} mm2" if unit == "mm2" else show(value, unit, 4)


def draw_size_changes(design: ChipDesign) -> Figure:
    """Draw energies, leakage and area of a chip relative to its own, as one size after another is multiplied."""
    figure = new_figure(9.0, 6.0)
    panels = figure.subplots(2, 2, sharex=True)
    base = build_chip(design)
    for axes, (knob, (title, names)) in zip(panels.flat, _PANELS.items(), strict=True):
        chips = [build_chip(scale_design(design, {knob: step})) for step in _STEPS]
        tables = [{change.name: change.ratio for change in compare_chips(base, chip)} for chip in chips]
        for k, name in enumerate(names):
            line = "--" if name in (LEAKAGE, AREA) else "-"
            ratios = [t[name] for t in tables]
            axes.plot(_STEPS, ratios, f"{_MARKS[k]}{line}", color=_LINE_COLOURS[k], label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(_STEPS, [f"{step:g}x" for step in _STEPS])
        values = [table[name] for table in tables for name in names]
        ticks = [t for t in _STEPS if 0.7 * min(values) <= t <= 1.4 * max(values)]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.axhline(1.0, color="#999999", linewidth=0.8)
        axes.set_title(title)
        axes.legend(frameon=False)
    figure.supylabel("relative to the chip as it is")
    note = f"{design.name}, F = {design.feature_nm:g} nm, bottom-up; one size changes, others stay"
    return add_caption(figure, note)
