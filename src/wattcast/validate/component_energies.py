"""Every bottom-up energy beside one from elsewhere: dumped from McPAT by a simulator, or fitted to a measured GPU.

A class of components must have its median ratio within a factor of 1.5, and the counters of a file a rank correlation
of 0.8; the energies of a measured GPU must lie within a factor of 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.activity.simulated import Dialect
from wattcast.arrays import Array
from wattcast.errors import BadInput
from wattcast.files import read_bytes
from wattcast.fitted import fitted
from wattcast.hardware import load
from wattcast.power.component.architecture_yaml import read_architecture
from wattcast.power.component.bottom_up.parts import Part, parts
from wattcast.power.component.bottom_up.table import BottomUp, energy_table, of_architecture, of_gpu
from wattcast.power.component.energies import EnergyTable, read_energies, with_coalescer
from wattcast.power.module import ModulePower
from wattcast.validate.rows import Row, row

DUMPED = {  # architecture file -> SMs and clock of the run, where the file does not say
    "gpuwattch_gtx480": (None, None),
    "gpuwattch_quadrofx5600": (None, None),
    "gpuwattch_gtx1080Ti": (None, None),
    "accelwattch_ptx_sim": (80, 1132e6),
}
CLASSES = {
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


@dataclass(frozen=True)
class Ratio:
    """One figure of ours beside theirs."""

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


def dumped_ratios(folder: Path) -> list[Ratio]:
    """Every counter of the four dumped files; device memory, which a file itself gives, is taken off both sides."""
    found: list[Ratio] = []
    for name, (sms, clock_hz) in DUMPED.items():
        architecture = read_architecture(folder / "accelwattch" / "xml" / f"{name}.xml")
        ours = of_architecture(architecture, sms, clock_hz)
        theirs = read_energies(folder / "accelwattch" / "coefficients" / f"{name}.csv")
        found += _of_file(name, ours, theirs, architecture.dialect)
    return found


def leakage_area_ratios(folder: Path) -> list[Ratio]:
    """Leakage and area of the GTX480 and its blocks against McPAT's own listing."""
    run = folder / "simulator_runs" / "gtx480_gpuwattch"
    text = read_bytes(run / _LISTING, 1 << 22).decode("utf-8", "replace")
    chip = of_architecture(read_architecture(run / "gpuwattch_gtx480.xml")).chip
    found: list[Ratio] = []
    for block, heading in {"whole chip": "Processor", **_BLOCKS}.items():
        mine = [part for part in parts(chip) if block in ("whole chip", part.group)]
        area, sub, gate = (_listed(text, heading, what) for what in ("Area", "Subthreshold Leakage", "Gate Leakage"))
        leak_w = sum(part.count * part.leakage_w for part in mine)
        found.append(Ratio("gtx480", block, "leakage", "W", leak_w, sub + gate))
        found.append(Ratio("gtx480", block, "area", "mm2", _area(mine), area))
    return found


def fitted_ratios(name: str = "h200") -> list[Ratio]:
    """Energies of a catalogue GPU against those fitted to its measured power."""
    bundle = fitted(name)
    if bundle is None:
        raise BadInput(f"no energies were fitted for {name}: there is nothing to compare with.")
    if not isinstance(bundle.power, ModulePower):
        raise BadInput(f"the power model of {name} has no energies by event to compare with.")
    ours, theirs = of_gpu(load(name)).modules, bundle.power.energy_j
    return [
        Ratio(name, "module", event, "J", joule, theirs[event])
        for event, joule in ours.items()
        if theirs.get(event, 0.0) > 0.0
    ]


def medians(ratios: Sequence[Ratio]) -> dict[str, float]:
    """Median ratio of each component class."""
    groups = dict.fromkeys(r.group for r in ratios)
    return {group: float(np.median([r.ratio for r in ratios if r.group == group])) for group in groups}


def rank_correlation(ratios: Iterable[Ratio]) -> float:
    """Spearman's, over the joules of one file."""
    pairs = [(r.ours, r.theirs) for r in ratios if r.unit == "J"]
    ours, theirs = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    return float(np.corrcoef(ours, theirs)[0][1])


def energy_rows(folder: Path | None, gpu: str = "h200") -> list[Row]:
    """Rows of the ledger: errors of class medians, of leakage and area, of the fitted GPU; ranks beside them."""
    rows: list[Row] = []
    if folder is not None:
        dumped = dumped_ratios(folder)
        for group, ratio in medians(dumped).items():
            rows.append(_row("dumped energies", group, sum(r.group == group for r in dumped), ratio, _MUST, _AIM))
        for name in DUMPED:
            own = [r for r in dumped if r.where == name]
            rank = rank_correlation(own)
            rows.append(
                row(
                    "dumped energies",
                    f"{name}: ranks",
                    len(own),
                    None,
                    rank=round(rank, 4),
                    rank_must=_RANK_MUST,
                    rank_aim=_RANK_AIM,
                )
            )
        for r in leakage_area_ratios(folder):
            goal = _MUST if r.group == "whole chip" else None
            rows.append(_row("GTX480 leakage and area", f"{r.group}: {r.name}", 1, r.ratio, goal, None))
    if fitted(gpu) is not None:
        rows += [_row(f"{gpu} fitted", r.name, 1, r.ratio, _FITTED_MUST, None) for r in fitted_ratios(gpu)]
    return rows


def _ranks(values: Sequence[float]) -> Array:
    """Ranks from zero; equal values share the mean of theirs."""
    _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - 0.5 * (count + 1))[place], dtype=np.float64)


def _row(where: str, quantity: str, n: int, ratio: float, must: float | None, aim: float | None) -> Row:
    error = 100.0 * abs(ratio - 1.0)
    return row(where, quantity, n, error, ratio=round(ratio, 3), factor_must=must, factor_aim=aim)


def _of_file(where: str, ours: BottomUp, theirs: EnergyTable, dialect: Dialect) -> list[Ratio]:
    mine = energy_table(ours, dialect)
    d = ours.design
    memory = {"MEM_RD": d.dram_read_j or 0.0, "MEM_WR": d.dram_write_j or 0.0}
    found: list[Ratio] = []
    for group, names in CLASSES.items():
        for name in names:
            a, b = mine.energy_j.get(name, 0.0), theirs.energy_j.get(name, 0.0)
            if a > 0.0 and b > 0.0:
                off = memory.get(name, 0.0)
                found.append(Ratio(where, group, name, "J", a - off, b - off))
    found.append(Ratio(where, "pipelines", "PIPE_A", "W", mine.duty_w, theirs.duty_w))
    found.append(Ratio(where, "memory controller", "constant", "W", mine.mc_constant_w, theirs.mc_constant_w))
    known, said = with_coalescer(theirs, d.feature_nm)
    if "derived" in said:  # not where it would be scaled from another node
        for name, a_j, b_j in (
            ("coalescer read", mine.coalescer_read_j, known.coalescer_read_j),
            ("coalescer write", mine.coalescer_write_j, known.coalescer_write_j),
        ):
            if a_j and b_j:
                found.append(Ratio(where, "coalescing logic", name, "J", a_j, b_j))
    return found


def _listed(text: str, heading: str, what: str) -> float:
    """One figure under a heading of McPAT's listing."""
    block = re.search(rf"^\s*{heading}.*?(?=\n\s*\n)", text, re.DOTALL | re.MULTILINE)
    match = re.search(rf"{what} = ([\d.eE+-]+)", block[0]) if block else None
    if match is None:
        raise BadInput(f"{_LISTING}: no {what} under {heading!r}. It should be McPAT's listing of a GTX480 run.")
    return float(match[1])


def _area(mine: Iterable[Part]) -> float:
    return sum(part.count * part.area_mm2 for part in mine)
