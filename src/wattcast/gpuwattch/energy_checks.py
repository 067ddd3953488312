"""Compare bottom-up energies with those of others: dumped from McPAT by a simulator, or fitted to a measured GPU.

A class of components must have its median ratio within a factor of 1.5, and the counters of a file a rank correlation
of 0.8; the energies of a measured GPU must lie within a factor of 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.core.errors import BadInput
from wattcast.core.strict_files import read_bytes
from wattcast.core.units import show
from wattcast.fit.scoring import LedgerRow, make_ledger_row
from wattcast.gpuwattch.architecture import read_architecture
from wattcast.gpuwattch.bottom_up.chip_design import ChipDesign
from wattcast.gpuwattch.bottom_up.chip_model import build_chip, list_chip_parts
from wattcast.gpuwattch.bottom_up.event_energies import (
    AREA,
    LEAKAGE,
    PIPELINES,
    EnergyChange,
    compare_chips,
    energies_of_architecture,
    energies_of_gpu,
    make_energy_table,
    scale_design,
)
from wattcast.gpuwattch.energy_table import read_energies, with_coalescer
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.report.figure_style import add_caption, new_figure
from wattcast.report.text_tables import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

DUMPED_FILES = {  # architecture file -> SMs and clock of the run, where the file does not hold them
    "gpuwattch_gtx480": (None, None),
    "gpuwattch_quadrofx5600": (None, None),
    "gpuwattch_gtx1080Ti": (None, None),
    "accelwattch_ptx_sim": (80, 1132e6),
}
COUNTER_CLASSES = {
    "instruction supply": ("TOT_INST", "IC_H", "IC_M"),
    "scheduler": ("FP_INT",),
    "L1 data cache": ("DC_RH", "DC_RM", "DC_WH", "DC_WM"),
    "texture cache": ("TC_H", "TC_M"),
    "constant cache": ("CC_H", "CC_M"),
    "shared memory": ("SHRD_ACC",),
    "register file": ("REG_RD", "REG_WR", "NON_REG_OPs"),
    "functional units": ("SP_ACC", "INT_ACC", "FPU_ACC", "SFU_ACC", "DPU_ACC", "FP_MUL_ACC", "TENSOR_ACC"),
    "memory controller": ("MEM_RD", "MEM_WR"),
    "L2 cache": ("L2_RH", "L2_RM", "L2_WH", "L2_WM"),
    "network": ("NOC_A",),
}
_MUST, _AIM, _RANK_MUST, _RANK_AIM, _FITTED_MUST = 1.5, 1.25, 0.8, 0.95, 3.0
_LISTING = "mcpat_area_leakage_peak.txt"
_BLOCKS = {"sm": "Total Cores", "l2": "Total L2s", "noc": "Total NoCs", "memory controller": "Total MCs"}
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


def dumped_ratios(folder: Path) -> list[EnergyRatio]:
    """Compare every counter of the four dumped files, without the device memory that the files themselves give."""
    found: list[EnergyRatio] = []
    for name, (sms, clock_hz) in DUMPED_FILES.items():
        architecture = read_architecture(folder / "accelwattch" / "xml" / f"{name}.xml")
        ours = energies_of_architecture(architecture, sms, clock_hz)
        theirs = read_energies(folder / "accelwattch" / "coefficients" / f"{name}.csv")
        mine, design = make_energy_table(ours, architecture.dialect), ours.design
        given = {"MEM_RD": design.dram_read_j or 0.0, "MEM_WR": design.dram_write_j or 0.0}
        for group, counters in COUNTER_CLASSES.items():
            for counter in counters:
                a, b = mine.energy_j.get(counter, 0.0), theirs.energy_j.get(counter, 0.0)
                if a > 0.0 and b > 0.0:
                    off = given.get(counter, 0.0)
                    found.append(EnergyRatio(name, group, counter, "J", a - off, b - off))
        found.append(EnergyRatio(name, "pipelines", "PIPE_A", "W", mine.duty_w, theirs.duty_w))
        constant_w = mine.mc_constant_w, theirs.mc_constant_w
        found.append(EnergyRatio(name, "memory controller", "constant", "W", *constant_w))
        known, note = with_coalescer(theirs, ours.design.feature_nm)
        for way in ("read", "write") if "derived" in note else ():  # not where it would be scaled from another node
            a_j, b_j = (getattr(table, f"coalescer_{way}_j") for table in (mine, known))
            if a_j and b_j:
                found.append(EnergyRatio(name, "coalescing logic", f"coalescer {way}", "J", a_j, b_j))
    return found


def leakage_area_ratios(folder: Path) -> list[EnergyRatio]:
    """Compare leakage and area of the GTX480 and its blocks with McPAT's own listing."""
    run = folder / "simulator_runs" / "gtx480_gpuwattch"
    text = read_bytes(run / _LISTING, 1 << 22).decode("utf-8", "replace")
    chip = energies_of_architecture(read_architecture(run / "gpuwattch_gtx480.xml")).chip
    found: list[EnergyRatio] = []
    for block, heading in {"whole chip": "Processor", **_BLOCKS}.items():
        mine = [part for part in list_chip_parts(chip) if block in ("whole chip", part.group)]
        listed = re.search(rf"^\s*{heading}.*?(?=\n\s*\n)", text, re.DOTALL | re.MULTILINE)
        figures = []
        for what in ("Area", "Subthreshold Leakage", "Gate Leakage"):
            match = re.search(rf"{what} = ([\d.eE+-]+)", listed[0]) if listed else None
            if match is None:
                do = "It should be McPAT's listing of a GTX480 run."
                raise BadInput(f"{_LISTING}: no {what} under {heading!r}. {do}")
            figures.append(float(match[1]))
        leak_w = sum(part.count * part.leakage_w for part in mine)
        area_mm2 = sum(part.count * part.area_mm2 for part in mine)
        found.append(EnergyRatio("gtx480", block, "leakage", "W", leak_w, figures[1] + figures[2]))
        found.append(EnergyRatio("gtx480", block, "area", "mm2", area_mm2, figures[0]))
    return found


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


def class_medians(ratios: Sequence[EnergyRatio]) -> dict[str, float]:
    """Return the median ratio of each component class."""
    groups = dict.fromkeys(r.group for r in ratios)
    return {group: float(np.median([r.ratio for r in ratios if r.group == group])) for group in groups}


def rank_correlation(ratios: Iterable[EnergyRatio]) -> float:
    """Return Spearman's rank correlation over the joules of one file."""
    from scipy.stats import spearmanr

    ours, theirs = zip(*((r.ours, r.theirs) for r in ratios if r.unit == "J"), strict=True)
    return float(spearmanr(ours, theirs).statistic)


def make_energy_rows(folder: Path | None, gpu: str = "h200") -> list[LedgerRow]:
    """Return ledger rows: errors of class medians, of leakage and area, of the fitted GPU, and rank correlations."""

    def row(where: str, quantity: str, n: int, ratio: float, must: float | None, aim: float | None) -> LedgerRow:
        goals: dict[str, Any] = {"factor_must": must, "factor_aim": aim}
        return make_ledger_row(where, quantity, n, 100.0 * abs(ratio - 1.0), ratio=round(ratio, 3), **goals)

    rows: list[LedgerRow] = []
    if folder is not None:
        dumped = dumped_ratios(folder)
        for group, ratio in class_medians(dumped).items():
            rows.append(row("dumped energies", group, sum(r.group == group for r in dumped), ratio, _MUST, _AIM))
        for name in DUMPED_FILES:
            own = [r for r in dumped if r.where == name]
            ranks: dict[str, Any] = {
                "rank": round(rank_correlation(own), 4),
                "rank_must": _RANK_MUST,
                "rank_aim": _RANK_AIM,
            }
            rows.append(make_ledger_row("dumped energies", f"{name}: ranks", len(own), None, **ranks))
        for r in leakage_area_ratios(folder):
            goal = _MUST if r.group == "whole chip" else None
            rows.append(row("GTX480 leakage and area", f"{r.group}: {r.name}", 1, r.ratio, goal, None))
    if shipped_bundle(gpu) is not None:
        rows += [row(f"{gpu} fitted", r.name, 1, r.ratio, _FITTED_MUST, None) for r in fitted_ratios(gpu)]
    return rows


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


def draw_energy_ratios(ratios: Sequence[EnergyRatio]) -> Figure:
    """Draw every ratio by component class, the class's median, and the band it has to lie in."""
    figure = new_figure(8.0, 5.0)
    axes = figure.subplots()
    middle = class_medians(ratios)
    groups = list(middle)
    wheres = list(dict.fromkeys(r.where for r in ratios))
    axes.axvspan(1 / _MUST, _MUST, color="#eeeeee", label=f"within {_MUST:g}")
    axes.axvline(1.0, color="#999999", linewidth=0.8)
    for k, where in enumerate(wheres):
        own = [r for r in ratios if r.where == where]
        height = [groups.index(r.group) + 0.14 * (k - 0.5 * (len(wheres) - 1)) for r in own]
        ratio, mark = [r.ratio for r in own], _MARKS[k % 4]
        axes.plot(ratio, height, mark, color=_LINE_COLOURS[k % 7], markersize=4, alpha=0.8, label=where)
    axes.plot([middle[g] for g in groups], range(len(groups)), "|", color="black", markersize=18, label="median")
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([0.6, 0.8, 1.0, 1.25, 1.5], ["0.6", "0.8", "1", "1.25", "1.5"])
    axes.minorticks_off()
    axes.set_xlim(0.6, 1.65)
    axes.set_xlabel("bottom-up energy over dumped energy")
    axes.set_title("Energies per event, no constant fitted to a file")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return add_caption(figure, "dumped: McPAT inside GPGPU-Sim, before scaling factors; wattcast lab check-energies")


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
        axes.legend(frameon=False, fontsize=8)
    figure.supylabel("relative to the chip as it is")
    note = f"{design.name}, F = {design.feature_nm:g} nm, bottom-up; one size changes, others stay"
    return add_caption(figure, note)
