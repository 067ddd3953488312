"""Two figures of bottom-up energies: their ratios to others', and what they do when a chip's sizes change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wattcast.power.component.bottom_up.chip import build_chip
from wattcast.power.component.bottom_up.design import Design
from wattcast.power.component.bottom_up.what_if import AREA, LEAKAGE, PIPELINES, compare, with_changes
from wattcast.report.figure import caption, new_figure
from wattcast.validate.component_energies import Ratio, medians

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = ("o", "s", "^", "D")
_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)
_SHOWN = {
    "registers": ("REG_RD", "REG_WR", LEAKAGE, AREA),
    "l1": ("DC_RH", "DC_RM", "DC_WH", "DC_WM"),
    "l2": ("L2_RH", "L2_RM", "L2_WH", LEAKAGE),
    "sms": ("NOC_A", PIPELINES, LEAKAGE, AREA),
}
_TITLES = {
    "registers": "registers of an SM",
    "l1": "L1 data cache",
    "l2": "L2 slice",
    "sms": "SMs, and the network's ports",
}


def ratios_figure(ratios: Sequence[Ratio]) -> Figure:
    """Every ratio by component class, the class's median, and the band it has to lie in."""
    figure = new_figure(8.0, 5.0)
    axes = figure.subplots()
    middle = medians(ratios)
    groups = list(middle)
    wheres = list(dict.fromkeys(r.where for r in ratios))
    axes.axvspan(1 / 1.5, 1.5, color="#eeeeee", label="within 1.5")
    axes.axvline(1.0, color="#999999", linewidth=0.8)
    for k, where in enumerate(wheres):
        own = [r for r in ratios if r.where == where]
        height = [groups.index(r.group) + 0.14 * (k - 0.5 * (len(wheres) - 1)) for r in own]
        axes.plot(
            [r.ratio for r in own], height, _MARKS[k % 4], color=_COLOURS[k % 7], markersize=4, alpha=0.8, label=where
        )
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
    axes.spines[["top", "right"]].set_visible(False)
    return caption(figure, "dumped: McPAT inside GPGPU-Sim, before scaling factors; wattcast gpus check-energies")


def what_if_figure(design: Design) -> Figure:
    """Energies, leakage and area of a chip over its own, as one size after another is multiplied."""
    figure = new_figure(9.0, 6.0)
    panels = figure.subplots(2, 2, sharex=True)
    base = build_chip(design)
    for axes, (knob, names) in zip(panels.flat, _SHOWN.items(), strict=True):
        at = [build_chip(with_changes(design, {knob: step})) for step in _STEPS]
        tables = [{change.name: change.ratio for change in compare(base, chip)} for chip in at]
        for k, name in enumerate(names):
            line = "--" if name in (LEAKAGE, AREA) else "-"
            axes.plot(_STEPS, [t[name] for t in tables], f"{_MARKS[k]}{line}", color=_COLOURS[k], label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(_STEPS, [f"{step:g}x" for step in _STEPS])
        ticks = [t for t in (0.25, 0.5, 1.0, 2.0, 4.0) if _near(t, tables, names)]
        axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axes.axhline(1.0, color="#999999", linewidth=0.8)
        axes.set_title(_TITLES[knob])
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("relative to the chip as it is")
    return caption(figure, f"{design.name}, F = {design.feature_nm:g} nm, bottom-up; one size changes, others stay")


def _near(tick: float, tables: Sequence[dict[str, float]], names: Sequence[str]) -> bool:
    values = [table[name] for table in tables for name in names]
    return 0.7 * min(values) <= tick <= 1.4 * max(values)
