"""Compare bottom-up energies with those that McPAT inside GPGPU-Sim dumped, and leakage and area
with its listing.

A class of components must have its median ratio within a factor of 1.5, and the counters of a file
a rank correlation of 0.8. Run: ``wattcast lab check-energies`` in the repository
(WATTCAST_REFERENCE names the dumped files)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattcast.calibrate.scoring import LedgerRow, make_ledger_row
from wattcast.core.errors import BadInput
from wattcast.core.strict_files import read_bytes
from wattcast.lab.gpuwattch.architecture import read_architecture
from wattcast.lab.gpuwattch.bottom_up.chip_design import ChipDesign, list_chip_parts
from wattcast.lab.gpuwattch.bottom_up.event_energies import (
    EnergyRatio,
    build_architecture_chip,
    make_energy_table,
    make_ratio_row,
)
from wattcast.lab.gpuwattch.energy_table import (
    EnergyTable,
    read_energies,
    with_coalescer,
)
from wattcast.report.figure_style import add_caption, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    "functional units": (
        "SP_ACC",
        "INT_ACC",
        "FPU_ACC",
        "SFU_ACC",
        "DPU_ACC",
        "FP_MUL_ACC",
        "TENSOR_ACC",
    ),
    "memory controller": ("MEM_RD", "MEM_WR"),
    "L2 cache": ("L2_RH", "L2_RM", "L2_WH", "L2_WM"),
    "network": ("NOC_A",),
}
_MUST = 1.5
_AIM = 1.25
_RANK_MUST = 0.8
_RANK_AIM = 0.95
_LISTING = "mcpat_area_leakage_peak.txt"
_BLOCKS = {
    "sm": "Total Cores",
    "l2": "Total L2s",
    "noc": "Total NoCs",
    "memory controller": "Total MCs",
}
_LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = ("o", "s", "^", "D")


def make_dumped_rows(folder: Path) -> list[LedgerRow]:
    """Return ledger rows: errors of class medians, rank correlations, leakage and area."""
    dumped = dumped_ratios(folder)
    rows = []
    for group, ratio in class_medians(dumped).items():
        count = sum(r.group == group for r in dumped)
        rows.append(
            make_ratio_row(
                "dumped energies",
                group,
                count,
                ratio,
                _MUST,
                _AIM,
            )
        )
    for name in DUMPED_FILES:
        class_ratios = [r for r in dumped if r.where == name]
        ranks: dict[str, Any] = {
            "rank": round(rank_correlation(class_ratios), 4),
            "rank_must": _RANK_MUST,
            "rank_aim": _RANK_AIM,
        }
        rows.append(
            make_ledger_row(
                "dumped energies",
                f"{name}: ranks",
                len(class_ratios),
                None,
                **ranks,
            )
        )
    for r in leakage_area_ratios(folder):
        goal = _MUST if r.group == "whole chip" else None
        rows.append(
            make_ratio_row(
                "GTX480 leakage and area",
                f"{r.group}: {r.name}",
                1,
                r.ratio,
                goal,
            )
        )
    return rows


def dumped_ratios(folder: Path) -> list[EnergyRatio]:
    """Compare every counter of the four dumped files, without the device memory that the files
    themselves give.
    """
    ratios: list[EnergyRatio] = []
    for name, (sms, clock_hz) in DUMPED_FILES.items():
        architecture = read_architecture(folder / "accelwattch" / "xml" / f"{name}.xml")
        chip = build_architecture_chip(architecture, sms, clock_hz)
        theirs = read_energies(folder / "accelwattch" / "coefficients" / f"{name}.csv")
        ours = make_energy_table(chip, architecture.dialect)
        ratios += _counter_ratios(name, chip.design, ours, theirs)
        ratios.append(
            EnergyRatio(
                name,
                "pipelines",
                "PIPE_A",
                "W",
                ours.duty_w,
                theirs.duty_w,
            )
        )
        constant_w = ours.mc_constant_w, theirs.mc_constant_w
        ratios.append(
            EnergyRatio(
                name,
                "memory controller",
                "constant",
                "W",
                *constant_w,
            )
        )
        ratios += _coalescer_ratios(name, chip.design, ours, theirs)
    return ratios


def _counter_ratios(
    name: str,
    design: ChipDesign,
    ours: EnergyTable,
    theirs: EnergyTable,
) -> list[EnergyRatio]:
    ratios = []
    device_memory_j = {"MEM_RD": design.dram_read_j or 0.0, "MEM_WR": design.dram_write_j or 0.0}
    for group, counters in COUNTER_CLASSES.items():
        for counter in counters:
            our_j = ours.energy_j.get(counter, 0.0)
            their_j = theirs.energy_j.get(counter, 0.0)
            if our_j > 0.0 and their_j > 0.0:
                off_j = device_memory_j.get(counter, 0.0)
                figures = our_j - off_j, their_j - off_j
                ratios.append(
                    EnergyRatio(
                        name,
                        group,
                        counter,
                        "J",
                        *figures,
                    )
                )
    return ratios


def _coalescer_ratios(
    name: str,
    design: ChipDesign,
    ours: EnergyTable,
    theirs: EnergyTable,
) -> list[EnergyRatio]:
    """Compare the coalescer, unless its dumped energy would be scaled from another node."""
    completed, note = with_coalescer(theirs, design.feature_nm)
    if "derived" not in note:
        return []
    ratios = []
    for way in ("read", "write"):
        our_j = getattr(ours, f"coalescer_{way}_j")
        their_j = getattr(completed, f"coalescer_{way}_j")
        if our_j and their_j:
            label = f"coalescer {way}"
            ratios.append(
                EnergyRatio(
                    name,
                    "coalescing logic",
                    label,
                    "J",
                    our_j,
                    their_j,
                )
            )
    return ratios


def leakage_area_ratios(folder: Path) -> list[EnergyRatio]:
    """Compare leakage and area of the GTX480 and its blocks with McPAT's own listing."""
    run = folder / "simulator_runs" / "gtx480_gpuwattch"
    text = read_bytes(run / _LISTING, 1 << 22).decode("utf-8", "replace")
    chip = build_architecture_chip(read_architecture(run / "gpuwattch_gtx480.xml"))
    ratios: list[EnergyRatio] = []
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
        ratios.append(
            EnergyRatio(
                "gtx480",
                block,
                "leakage",
                "W",
                leak_w,
                figures[1] + figures[2],
            )
        )
        ratios.append(
            EnergyRatio(
                "gtx480",
                block,
                "area",
                "mm2",
                area_mm2,
                figures[0],
            )
        )
    return ratios


def class_medians(ratios: Sequence[EnergyRatio]) -> dict[str, float]:
    """Return the median ratio of each component class."""
    groups = dict.fromkeys(r.group for r in ratios)
    return {
        group: float(np.median([r.ratio for r in ratios if r.group == group])) for group in groups
    }


def rank_correlation(ratios: Iterable[EnergyRatio]) -> float:
    """Return Spearman's rank correlation over the joules of one file."""
    from scipy.stats import spearmanr

    ours, theirs = zip(*((r.ours, r.theirs) for r in ratios if r.unit == "J"), strict=True)
    return float(spearmanr(ours, theirs).statistic)


def draw_energy_ratios(ratios: Sequence[EnergyRatio]) -> Figure:
    """Draw every ratio by component class, the class's median, and the band it has to lie in."""
    figure, axes = new_axes(8.0, 5.0)
    middle = class_medians(ratios)
    groups = list(middle)
    wheres = list(dict.fromkeys(r.where for r in ratios))
    axes.axvspan(1 / _MUST, _MUST, color="#eeeeee", label=f"within {_MUST:g}")
    axes.axvline(1.0, color="#999999", linewidth=0.8)
    for k, where in enumerate(wheres):
        set_ratios = [r for r in ratios if r.where == where]
        height = [groups.index(r.group) + 0.14 * (k - 0.5 * (len(wheres) - 1)) for r in set_ratios]
        ratio = [r.ratio for r in set_ratios]
        mark = _MARKS[k % 4]
        axes.plot(
            ratio,
            height,
            mark,
            color=_LINE_COLOURS[k % 7],
            markersize=4,
            alpha=0.8,
            label=where,
        )
    axes.plot(
        [middle[g] for g in groups],
        range(len(groups)),
        "|",
        color="black",
        markersize=18,
        label="median",
    )
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([0.6, 0.8, 1.0, 1.25, 1.5], ["0.6", "0.8", "1", "1.25", "1.5"])
    axes.minorticks_off()
    axes.set_xlim(0.6, 1.65)
    axes.set_xlabel("bottom-up energy over dumped energy")
    axes.set_title("Energies per event, no constant fitted to a file")
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
    return add_caption(
        figure,
        "dumped: McPAT inside GPGPU-Sim, before scaling factors; wattcast lab check-energies",
    )
