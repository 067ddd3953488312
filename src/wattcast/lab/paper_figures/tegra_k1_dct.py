"""Draw figure 13 of Stokke et al. (MMSys 2016): watts of the DCT by data type and cache, Tegra K1.

The paper prints two numbers of the figure and no counts. The counts here are those of our own DCT
(Eq. 5, one thread a coefficient, full HD), which Nsight Compute took on an H200
(``microbench_counters.jsonl``); the published model of the K1 prices them at its highest clocks and
five frames a second, as the paper sets them. The host is taken as busy throughout, in all variants
alike. Run ``python -m wattcast.lab.paper_figures.tegra_k1 --figure-13 FILE``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wattcast.core.row_tables import database_folder
from wattcast.report.figure_style import MODULE_COLOURS, SERIES_COLOURS, add_caption, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAMES_PER_S = 5.0
HOST_HZ = 1092e6
_COUNTERS_FILE = "microbench_counters.jsonl"
_SECTOR_BYTE = 32.0
_MEMORY_CYCLE_BYTE = 8.0  # of the GPU's way to memory (section 6.3)
_THREADS = "sm__sass_thread_inst_executed_op_{}_pred_on.sum"


@dataclass(frozen=True)
class DctVariant:
    """A column of figure 13, and what the paper prints of it."""

    name: str
    label: str
    printed_saving: float | None  # of the board's power, against the first


VARIANTS = (
    DctVariant("dct_fp64_uncached", "64 bits, L2", None),
    DctVariant("dct_fp32_uncached", "32 bits, L2", 0.024),
    DctVariant("dct_fp32_cached", "32 bits, L1", 0.032),
)
# What a colour stands for: the parts of the published model in it
PARTS = (
    ("base, leakage, clocks", "", MODULE_COLOURS["static"]),
    ("memory", "device_memory_cycle", MODULE_COLOURS["dram"]),
    ("L2 reads", "l2_read_sector", MODULE_COLOURS["l2"]),
    ("L1 reads", "l1_read_word", MODULE_COLOURS["shared"]),
    ("integer", "int_instruction", SERIES_COLOURS[4]),
    ("32 bits", "fp32_instruction", MODULE_COLOURS["cuda"]),
    ("64 bits", "fp64_instruction", MODULE_COLOURS["tensor"]),
    ("conversions", "conversion_instruction", MODULE_COLOURS["sfu"]),
    ("others", "misc_instruction", MODULE_COLOURS["link"]),
)


def read_dct_events(variant: str) -> dict[str, float]:
    """Return the events of a second of a variant, named as the published model names them."""
    path = database_folder("h200") / _COUNTERS_FILE
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["id"] == variant:
            return make_k1_events(row["metrics"], FRAMES_PER_S / row["frames"])
    raise AssertionError(f"no counters of {variant} ship")


def make_k1_events(metrics: Mapping[str, float], scale: float) -> dict[str, float]:
    """Return the K1's events from Nsight Compute metrics of a launch, times ``scale``.

    | event | metric |
    |---|---|
    | instructions | threads that executed one of the kind |
    | L1 reads | requests of loads, by the share of sectors that hit |
    | L2 reads | sectors that came from L2 |
    | memory cycles | bytes of device memory over the 8 of a cycle |
    """
    kinds = ("integer", "fp32", "fp64", "conversion", "misc")
    instructions = {
        f"{'int' if kind == 'integer' else kind}_instruction": metrics[_THREADS.format(kind)]
        for kind in kinds
    }
    loads = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld"
    hit_share = metrics[f"{loads}_lookup_hit.sum"] / metrics[f"{loads}.sum"]
    dram_byte = metrics["dram__bytes_read.sum"] + metrics["dram__bytes_write.sum"]
    events = instructions | {
        "l1_read_word": hit_share * metrics["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"],
        "l2_read_sector": metrics["l1tex__m_xbar2l1tex_read_bytes.sum"] / _SECTOR_BYTE,
        "device_memory_cycle": dram_byte / _MEMORY_CYCLE_BYTE,
    }
    return {name: scale * count for name, count in events.items()} | {"host_active_cycle": HOST_HZ}


def draw_figure_13(watts: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw the watts of each variant by part, and what it saves beside what the paper prints."""
    figure, axes = new_axes(7.4, 4.6)
    base = np.zeros(len(VARIANTS))
    for label, part, colour in PARTS:
        height = np.array([_part_w(watts[variant.name], part) for variant in VARIANTS])
        axes.bar(range(len(VARIANTS)), height, bottom=base, color=colour, label=label, width=0.6)
        base = base + height
    for place, variant in enumerate(VARIANTS):
        if variant.printed_saving is not None:
            text = f"saves {100.0 * (1.0 - base[place] / base[0]):.1f} %"
            text += f"\n(printed {100.0 * variant.printed_saving:.1f} %)"
            axes.text(place, base[place] + 0.05, text, ha="center", va="bottom")
    axes.set_xticks(range(len(VARIANTS)), [variant.label for variant in VARIANTS])
    axes.set_ylabel("Power (W)")
    axes.set_ylim(0.0, 1.15 * float(base.max()))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return add_caption(
        figure,
        "Tegra K1 by its published model, 852 and 924 MHz, five frames a second; counts of our "
        "own DCT, taken on an H200",
    )


def _part_w(watts: Mapping[str, float], part: str) -> float:
    """Return the watts of an event; without a name, those of everything that is no event."""
    if part:
        return watts[part]
    named = {name for _, name, _ in PARTS}
    return sum(value for name, value in watts.items() if name not in named)
