"""Figures of choices: algorithms, serving plans, and who runs what in a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wattcast.errors import bad_value
from wattcast.explore.choices import Choice
from wattcast.explore.fleet import Assignment
from wattcast.explore.serving import Plan, Service
from wattcast.report.figure import SERIES, caption, new_figure
from wattcast.report.predicted import pareto

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def algorithms(found: Sequence[Choice], title: str) -> Figure:
    """Latency and energy per request of each way to run a workload, and the ways that nothing beats."""
    points = {
        ", ".join(f"{key} {value}" for key, value in choice.names.items()): (
            1e3 * float(choice.results["latency_s"]),
            float(choice.results["energy_j_per_request"]),
        )
        for choice in found
        if choice.results
    }
    if not points:
        raise bad_value("figure", "at least one way that can be run", "none")
    missing = len(found) - len(points)
    note = f"{len(points)} ways, predicted" + (f"; {missing} cannot be run and are not shown" if missing else "")
    return pareto(points, "Latency (ms)", "Energy per request (J)", title, note)


def plans(asked: Service, found: Sequence[Plan]) -> Figure:
    """GPUs, and joules per output token, of the best plan on each kind of GPU."""
    rows = [plan for plan in found if plan.row]
    if not rows:
        raise bad_value("figure", "at least one GPU that can serve it", "none")
    figure = new_figure(8.0, 0.9 + 0.5 * len(rows))
    wanted = (("gpus", "GPUs"), ("energy_j_per_token", "Energy per output token (J)"))
    panels = figure.subplots(1, len(wanted), sharey=True)
    for axes, (column, said) in zip(panels, wanted, strict=True):
        values = [float(plan.row[column]) for plan in rows]
        axes.barh(range(len(rows)), values, color=SERIES[0], height=0.6)
        for place, value in enumerate(values):
            axes.annotate(f"{value:.3g}", (value, place), xytext=(3, 0), textcoords="offset points", va="center",
                          fontsize=7)  # fmt: skip
        axes.set_xlabel(said)
        axes.margins(x=0.15)
    panels[0].set_yticks(range(len(rows)), [plan.gpu for plan in rows])
    panels[0].invert_yaxis()
    left_out = [plan.gpu for plan in found if not plan.row]
    note = f"cannot serve it: {', '.join(left_out)}" if left_out else "predicted"
    return caption(figure, f"{asked.rate_per_s:g} requests/s; {note}")


def assignment(found: Assignment, source: str) -> Figure:
    """How many GPUs of each kind run each workload, stacked; idle ones in grey."""
    kinds = list(dict.fromkeys([*(str(row["gpu"]) for row in found.rows), *found.idle_gpus]))
    work = list(dict.fromkeys(str(row["workload"]) for row in found.rows))
    figure = new_figure(7.5, 1.6 + 0.5 * len(kinds))
    axes = figure.subplots()
    left = np.zeros(len(kinds))
    for index, name in enumerate([*work, "idle"]):
        width = np.zeros(len(kinds))
        for row in found.rows:
            width[kinds.index(str(row["gpu"]))] += float(row["gpus"]) if row["workload"] == name else 0.0
        if name == "idle":
            width = np.array([float(found.idle_gpus.get(kind, 0)) for kind in kinds])
        colour = "#DDDDDD" if name == "idle" else SERIES[index % 8]
        axes.barh(range(len(kinds)), width, left=left, color=colour, label=name, height=0.6)
        left = left + width
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set_xlabel("GPUs")
    axes.set_title(
        f"{found.power_w / 1e3:.4g} kW mean at the meter, {found.peak_w / 1e3:.4g} kW at most", fontsize=10
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    return caption(figure, f"{source}; {found.aim}: {found.binds}")
