"""Report what is inside one kernel as JSON, as text and as a figure of its life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from wattcast.core.errors import bad_value
from wattcast.core.units import show
from wattcast.predictor.kernel_view import (
    KernelView,
    TileChoice,
    view_kernel,
)
from wattcast.predictor.prediction import Prediction
from wattcast.report import figure_style
from wattcast.report.figure_style import (
    Axes,
    Figure,
    add_caption,
)
from wattcast.report.text_tables import print_rows

_LEAST_LABEL_SHARE = 0.06  # of a kernel's time below which a phase is not named in the figure
_RESOURCE_COLOURS = {
    "launch": "#BBBBBB",
    "latency": "#999999",
    "L2": figure_style.MODULE_COLOURS["l2"],
    "device memory": figure_style.MODULE_COLOURS["dram"],
}


def view_numbered_kernel(prediction: Prediction, number: int) -> KernelView:
    """Look into the kernel of a number, which counts distinct operators in order of appearance."""
    rows = prediction.basis.timeline.kernels.appearance.tolist()
    if not 1 <= number <= len(rows):
        listing = [f"{place} {share.op}" for place, share in enumerate(prediction.ops, 1)]
        expected = f"a number from 1 to {len(rows)} ({'; '.join(listing)})"
        raise bad_value("kernel", expected, number)
    return view_kernel(prediction.basis, rows[number - 1])


def kernel_to_plain(view: KernelView) -> dict[str, Any]:
    """Return a kernel as plain data."""
    choices = [] if view.chosen is None else [view.chosen, *view.alternatives]
    return {
        "operator": str(view.op),
        "gpu": view.gpu,
        "family": view.family,
        "count": view.calls,
        "latency_s": view.seconds,
        "power_w": view.power_w,
        "energy_j": view.energy_j,
        "effective_clock_hz": view.effective_hz,
        "tiles": [vars(choice) for choice in choices],
        "units": view.units,
        "waves": view.waves,
        "last_wave_share": view.last_wave_share,
        "active_share": view.active_share,
        "byte": dict(view.level_byte),
        "least_byte": dict(view.least_byte),
        "phases": [
            {
                "name": phase.name,
                "latency_s": phase.seconds,
                "bound": phase.bound,
                "resource_s": dict(phase.resource_s),
                "power_w": phase.power_w,
                "energy_j": phase.energy_j,
                "part_w": dict(phase.part_w),
            }
            for phase in view.phases
        ],
    }


def print_kernel(console: Console, view: KernelView) -> None:
    """Print a kernel: its tile and why, its waves, its bytes, its phases."""
    title = f"[bold]{escape(str(view.op))}[/bold] on [bold]{escape(view.gpu)}[/bold]"
    a_run = f"{show(view.seconds, 's')}, {view.power_w:.4g} W, {show(view.energy_j, 'J')} a run"
    runs = "1 run" if view.calls == 1 else f"{view.calls:g} runs"
    console.print(f"{title}: {a_run}, {runs}, as {escape(view.family)}")
    if view.chosen is not None:
        _print_tiles(console, view.chosen, view.alternatives)
    console.print(
        f"{view.units:,.6g} blocks or tiles over the SMs: {view.waves:.4g} waves, of the last "
        f"{view.last_wave_share:.0%} of the SMs have work; {view.active_share:.0%} on average"
    )
    _print_bytes(console, view)
    _print_phases(console, view)


def _print_tiles(
    console: Console,
    chosen: TileChoice,
    alternatives: Sequence[TileChoice],
) -> None:
    console.print(f"Tile: {escape(explain_tile(chosen, alternatives))}")
    headings = {
        "tile": "tile",
        "likelihood_share": "likely",
        "tiles": "tiles",
        "waves": "waves",
        "steps": "steps of K",
        "stages": "stages that fit",
        "compute_s": "arithmetic",
        "load_s": "loads from L2",
    }
    print_rows(
        console,
        [_row_of_tile(choice) for choice in (chosen, *alternatives)],
        headings,
        "Tiles, and what each alone would take",
        ["tile"],
    )


def _print_bytes(console: Console, view: KernelView) -> None:
    """Print the bytes that each level of memory moves beside those it moves at least."""
    levels = []
    for level, amount in view.level_byte.items():
        least = view.least_byte.get(level)
        row = {
            "level": level,
            "moved_byte": amount,
            "least_byte": least,
        }
        if least:
            row["times"] = f"{amount / least:.2f}"
        levels.append(row)
    headings = {
        "level": "level",
        "moved_byte": "moved",
        "least_byte": "operands once",
        "times": "times",
    }
    print_rows(
        console,
        levels,
        headings,
        "Bytes at every level",
        ["level"],
    )


def _print_phases(console: Console, view: KernelView) -> None:
    rows = []
    for phase in view.phases:
        words = [f"{name} {show(seconds, 's')}" for name, seconds in phase.resource_s.items()]
        rows.append(
            {
                "phase": phase.name,
                "latency_s": phase.seconds,
                "bound": phase.bound,
                "power_w": phase.power_w,
                "energy_j": phase.energy_j,
                "resources": ", ".join(words),
            }
        )
    headings = {
        "phase": "phase",
        "latency_s": "time",
        "bound": "bound by",
        "power_w": "power",
        "energy_j": "energy",
        "resources": "what each resource alone takes",
    }
    print_rows(
        console,
        rows,
        headings,
        "Phases",
        ["phase", "bound", "resources"],
    )


def explain_tile(chosen: TileChoice, others: Sequence[TileChoice]) -> str:
    """Say which tile runs and why."""
    text = f"{chosen.label}, {chosen.likelihood or 0.0:.0%} likely by the choice fitted to names"
    slowest_s = max(chosen.compute_s, chosen.load_s)
    better = [tile for tile in others if max(tile.compute_s, tile.load_s) < 0.99 * slowest_s]
    if better:
        best = min(better, key=lambda tile: max(tile.compute_s, tile.load_s))
        return f"{text}; {best.label} would seem faster by arithmetic and loads alone"
    return f"{text}; no other tile here needs less for arithmetic and loads"


def _row_of_tile(choice: TileChoice) -> dict[str, Any]:
    return {
        "tile": choice.label,
        "likelihood_share": choice.likelihood,
        "tiles": f"{choice.tiles:,.6g}",
        "waves": f"{choice.waves:.2f}",
        "steps": f"{choice.step_count:g}",
        "stages": None if choice.stages is None else f"{choice.stages:g}",
        "compute_s": choice.compute_s,
        "load_s": choice.load_s,
    }


def draw_kernel(view: KernelView) -> Figure:
    """Draw the life of a kernel: which resource is busy when, and the watts by part.

    The upper panel has a lane for each resource: in each phase a bar as long as the resource alone
    would take, the one that bounds the phase in full colour. The lower panel stacks watts by part.
    """
    figure = figure_style.new_figure(9.5, 6.4)
    lanes, watts = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 1.3]})
    scale, unit = _choose_unit(view.seconds)
    _draw_lanes(lanes, view, scale)
    _draw_watts(watts, view, scale)
    watts.set(xlabel=f"Time ({unit})", ylabel="Power (W)")
    watts.set_xlim(0.0, view.seconds * scale)
    length = f"{view.seconds * scale:.4g} {unit}"
    title = f"{view.op} on {view.gpu}: {length}, {view.power_w:.4g} W"
    if view.chosen is not None:
        title += f"\n{view.chosen.label}, {view.waves:.3g} waves over the SMs"
    lanes.set_title(title, fontsize=10)
    note = "bars: what each resource alone takes in a phase; hatched: the one that bounds it"
    return add_caption(figure, f"{note}; predicted at {view.effective_hz / 1e6:.0f} MHz")


def _choose_unit(seconds: float) -> tuple[float, str]:
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def _draw_lanes(
    axes: Axes,
    view: KernelView,
    scale: float,
) -> None:
    names = list(dict.fromkeys(name for phase in view.phases for name in phase.resource_s))
    begin = 0.0
    for phase in view.phases:
        for name, seconds in phase.resource_s.items():
            is_bound = name == phase.bound
            colour = _RESOURCE_COLOURS.get(name, figure_style.MODULE_COLOURS["tensor"])
            axes.barh(
                names.index(name),
                min(seconds, phase.seconds) * scale,
                left=begin * scale,
                height=0.7,
                color=colour,
                alpha=1.0 if is_bound else 0.45,
                hatch="//" if is_bound else None,
                edgecolor="white",
            )
        if begin:
            axes.axvline(
                begin * scale,
                color="#444444",
                lw=0.8,
                ls=":",
            )
        if phase.seconds > _LEAST_LABEL_SHARE * view.seconds:
            middle = (begin + 0.5 * phase.seconds) * scale
            axes.text(
                middle,
                -0.75,
                phase.name,
                ha="center",
                va="bottom",
                fontsize=10,
            )
        begin += phase.seconds
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -1.1)


def _draw_watts(
    axes: Axes,
    view: KernelView,
    scale: float,
) -> None:
    edges = np.cumsum([0.0, *(phase.seconds for phase in view.phases)]) * scale
    below = np.zeros(len(view.phases))
    for part in view.phases[0].part_w:
        height = np.array([phase.part_w[part] for phase in view.phases])
        if height.max() > 0:
            colour = figure_style.MODULE_COLOURS.get(part)
            axes.stairs(
                below + height,
                edges,
                baseline=below,
                fill=True,
                color=colour,
                label=part,
            )
        below = below + height
    axes.axhline(
        view.power_w,
        color=figure_style.PREDICTED,
        lw=1.2,
        ls="--",
        label="mean",
    )
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
    axes.set_ylim(bottom=0.0)
