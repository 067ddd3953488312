"""Figures of microbenchmarks: one function each, like figures 6 to 8 of the MIPP paper and a few beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from wattcast.explore.microbench import Result, curve, fault_of, first, specified
from wattcast.explore.mipp import published
from wattcast.hardware import Gpu
from wattcast.report.figure import COLOUR, Maker, caption, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {  # curve: title, axis, logarithmic
    "coalescence": ("DRAM coalescence", "Neighbouring lanes with neighbouring words", True),
    "access": ("DRAM access size", "Bytes a thread and access", True),
    "conflicts": ("Shared-memory conflicts", "Bank conflicts of an access", False),
    "divergence": ("Branch divergence", "Paths a warp takes", True),
    "occupancy": ("Occupancy, one chain of instructions", "Resident warps on an SM", True),
    "active": ("Active multiprocessors", "Share of SMs with work", False),
    "icache": ("Instruction cache", "KiB of straight code", True),
}


BY_BYTE = ("access",)  # an operation moves as many bytes as the axis says


def curve_figure(results: Sequence[Result], name: str, gpu: Gpu, source: str) -> Figure:
    """Time and energy of an operation, and average and maximum power, along a curve (figures 6 to 8)."""
    title, axis, logarithmic = CURVES[name]
    points = [r for r in curve(results, name) if r.operation_s and r.operation_j and r.power_w]
    figure = new_figure(9.0, 3.8)
    left, right = figure.subplots(1, 2)
    x = [r.at for r in points]
    each = [r.at if name in BY_BYTE else 1.0 for r in points]
    time = [(r.operation_s or 0.0) / n for r, n in zip(points, each, strict=True)]
    energy = [(r.operation_j or 0.0) / n for r, n in zip(points, each, strict=True)]
    left.plot(x, [seconds / min(time) for seconds in time], "o-", color=COLOUR["dram"], label="time")
    left.plot(x, [joules / min(energy) for joules in energy], "s--", color=COLOUR["tensor"], label="energy")
    left.set_ylabel(f"Of {'a byte' if name in BY_BYTE else 'an operation'}, over the best point")
    right.plot(x, [r.power_w or 0.0 for r in points], "o-", color=COLOUR["shared"], label="average")
    largest = [(r.at, r.max_power_w) for r in points if r.max_power_w]
    if largest:
        places, watts = zip(*largest, strict=True)
        right.plot(places, watts, "^:", color=COLOUR["link"], label="largest sensor reading")
    right.set_ylabel("Power (W)")
    right.set_ylim(0.0, 1.2 * max((r.max_power_w or r.power_w or 1.0 for r in points), default=1.0))
    for axes in (left, right):
        axes.set_xlabel(axis)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, [f"{value / 1024:g}" if name == "icache" else f"{value:g}" for value in x])
    if max(time) / min(time) > 6.0:
        left.set_yscale("log", base=2)
        left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.suptitle(f"{title}: {gpu.title}")
    faults = [fault for r in points if (fault := fault_of(r)) is not None]
    return caption(figure, source + (f". To be measured again: {faults[0].why}" if faults else ""))


def throughput_figure(results: Sequence[Result], gpu: Gpu, source: str) -> Figure:
    """Operations per cycle and SM against the specification, where one is stated."""
    pairs = [(r, specified(gpu, r)) for r in first(results).values() if r.per_cycle_sm]
    known = [(r, spec) for r, spec in pairs if spec]
    figure = new_figure(8.0, 0.9 + 0.24 * len(known))
    axes = figure.subplots()
    share = [(r.per_cycle_sm or 0.0) / spec for r, spec in known]
    axes.barh(range(len(known)), share, color=COLOUR["l2"])
    axes.axvline(1.0, color="black", linewidth=0.8)
    for place, (r, spec) in enumerate(known):
        axes.text(0.02, place, f"{r.per_cycle_sm:.4g} of {spec:g}", va="center", fontsize=7)
    axes.set_yticks(range(len(known)), [r.name for r, _ in known], fontsize=7)
    axes.set_ylim(len(known) - 0.4, -0.6)
    axes.set_xlabel("Measured over specified, operations per true cycle and SM")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(gpu.title)
    return caption(figure, source)


def energy_figure(results: Sequence[Result], gpu: Gpu, source: str) -> Figure:
    """Energy of an arithmetic operation and of a byte, idle included and above idle."""
    rows = [r for r in first(results).values() if not r.curve and r.operation_j and not _wrong(r)]
    arithmetic = sorted((r for r in rows if r.group == "arithmetic"), key=lambda r: r.operation_j or 0.0)
    memory = sorted(
        (r for r in rows if r.group == "memory" and r.byte), key=lambda r: (r.energy_j or 0.0) / (r.byte or 1.0)
    )
    figure = new_figure(9.6, 1.2 + 0.22 * max(len(arithmetic), len(memory)))
    left, right = figure.subplots(1, 2)
    _energies(left, arithmetic, [1.0] * len(arithmetic), [f"{r.name} ({r.operation})" for r in arithmetic])
    _energies(right, memory, [(r.byte or 1.0) / (r.operations or 1.0) for r in memory], [r.name for r in memory])
    left.set_xlabel("Energy (pJ) of an operation of one thread")
    right.set_xlabel("Energy (pJ) of a byte")
    left.legend(frameon=False, loc="lower right", fontsize=8)
    figure.suptitle(gpu.title)
    return caption(figure, source)


def _wrong(r: Result) -> bool:
    fault = fault_of(r)
    return fault is not None and fault.kind == "wrong"


def _energies(axes: Axes, rows: Sequence[Result], each: Sequence[float], labels: Sequence[str]) -> None:
    """Two dots a row, its joules over ``each``."""
    total = [1e12 * (r.operation_j or 0.0) / n for r, n in zip(rows, each, strict=True)]
    above = [1e12 * (r.operation_above_idle_j or 0.0) / n for r, n in zip(rows, each, strict=True)]
    axes.plot(total, range(len(rows)), "o", color=COLOUR["static"], label="idle power included")
    axes.plot(above, range(len(rows)), "o", color=COLOUR["tensor"], label="above idle")
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xscale("log")
    axes.grid(axis="y", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def devices_figure(results: Sequence[Result], gpu: Gpu, source: str) -> Figure:
    """Energy of an arithmetic operation on the paper's devices and on this one."""
    names = list(dict.fromkeys(p.ours for p in published() if p.table in ("I", "II")))
    by_name = first(results)
    figure = new_figure(8.0, 4.2)
    axes = figure.subplots()
    for device, colour, shift in (("gtx-660", "dram", -0.25), ("tegra-k1", "shared", 0.0)):
        of = {p.ours: p.operation_j * 1e9 for p in published() if p.device == device}
        axes.bar(
            [i + shift for i in range(len(names))], [of[n] for n in names], 0.24, color=COLOUR[colour], label=device
        )
    own = [(i + 0.25, 1e9 * (by_name[n].operation_j or 0.0)) for i, n in enumerate(names) if n in by_name]
    if own:
        places, heights = zip(*own, strict=True)
        axes.bar(places, heights, 0.24, color=COLOUR["tensor"], label=gpu.name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.set_ylabel("Energy (nJ) of an operation, idle included")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return caption(figure, source + "; GTX 660 and TK1: MIPP (2016), Tables I and II, errata applied")


def all_figures(results: Sequence[Result], gpu: Gpu, source: str) -> dict[str, Maker]:
    """Every figure the results have points for, by file name."""
    made: dict[str, Maker] = {
        f"microbench-{name}": partial(curve_figure, results, name, gpu, source)
        for name in CURVES
        if len([r for r in curve(results, name) if r.operation_s and r.operation_j]) > 1
    }
    made["microbench-throughput"] = partial(throughput_figure, results, gpu, source)
    made["microbench-energy"] = partial(energy_figure, results, gpu, source)
    made["microbench-devices"] = partial(devices_figure, results, gpu, source)
    return made
