"""Figures of explorations: one function each; takes results, returns a matplotlib Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wattcast.api import find_gpu
from wattcast.errors import bad_value
from wattcast.explore.api import Workload, study
from wattcast.explore.choices import Choice
from wattcast.explore.dvfs import Clocks
from wattcast.explore.published import GPU, Curve, Format
from wattcast.explore.study import Columns, table
from wattcast.explore.sweep import Swept
from wattcast.fitted import bundle_for
from wattcast.report.figure import COLOUR, PREDICTED, SERIES, Maker, dots, line, new_figure, origin
from wattcast.report.figure import caption as write_caption

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABEL = {
    "latency_s": ("Latency (ms)", 1e3),
    "busy_s": ("Time in kernels (ms)", 1e3),
    "power_w": ("Power (W)", 1.0),
    "energy_j": ("Energy (J)", 1.0),
    "clock_hz": ("Clock (MHz)", 1e-6),
    "asked_clock_hz": ("Asked clock (MHz)", 1e-6),
    "effective_clock_hz": ("Effective clock (MHz)", 1e-6),
    "asked_power_limit_w": ("Power limit (W)", 1.0),
    "memory.byte_per_s": ("Memory bandwidth (TB/s)", 1e-12),
    "l2.capacity_byte": ("L2 capacity (MB)", 1e-6),
    "memory.capacity_byte": ("Memory capacity (GB)", 1e-9),
    "sm_count": ("SMs", 1.0),
    "voltage_scale": ("Relative voltage", 1.0),
    "tensor_scale": ("Relative tensor rate", 1.0),
}


def front(done: Swept) -> Figure:
    """Every point (an even selection of many) by the first two objectives, and the front through them."""
    x, y = done.objectives[:2]
    figure = new_figure(7.0, 5.0)
    axes = figure.subplots()
    shown = done.summary.shown
    axes.plot(
        _scaled(x, shown[x]), _scaled(y, shown[y]), ".", ms=2, color=COLOUR["static"], alpha=0.5, label="points"
    )
    best = done.summary.front
    style = "-" if len(done.objectives) == 2 else "."
    axes.plot(_scaled(x, best[x]), _scaled(y, best[y]), style, color=PREDICTED, label="Pareto front")
    axes.set_xlabel(label(x))
    axes.set_ylabel(label(y))
    axes.set_title(f"{done.study.graph.name} on designs around {done.study.gpu.name}", fontsize=10)
    axes.legend(frameon=False)
    _source(figure, done)
    return figure


def heat_map(done: Swept, x: str, y: str, value: str = "energy_j") -> Figure:
    """The least ``value`` at each pair of two axes, whatever the other axes are, of the points kept to be shown."""
    for name in (x, y, value):
        if name not in done.summary.shown:
            raise bad_value("heat map", f"columns among {', '.join(done.summary.shown)}", name)
    shown = done.summary.shown
    columns, at_x = np.unique(shown[x], return_inverse=True)
    lines, at_y = np.unique(shown[y], return_inverse=True)
    if columns.size * lines.size > 250_000:
        raise bad_value("heat map", "two axes of a grid", f"{columns.size} by {lines.size} different values")
    least = np.full((lines.size, columns.size), np.inf)
    np.minimum.at(least, (at_y, at_x), _scaled(value, shown[value]))
    figure = new_figure(7.0, 5.0)
    axes = figure.subplots()
    seen = np.ma.masked_invalid(least)
    mesh = axes.pcolormesh(_scaled(x, columns), _scaled(y, lines), seen, shading="nearest", cmap="cividis")
    figure.colorbar(mesh, label=f"Least {label(value).lower() if value != 'energy_j' else 'energy (J)'}")
    axes.set_xlabel(label(x))
    axes.set_ylabel(label(y))
    axes.set_title(f"{done.study.graph.name} on designs around {done.study.gpu.name}", fontsize=10)
    _source(figure, done)
    return figure


def curves(
    found: Mapping[str, Mapping[str, npt.NDArray[Any]]], x: str, values: Sequence[str], caption: str
) -> Figure:
    """Several quantities against one, a line for each named table (a GPU, a power limit)."""
    figure = new_figure(3.4 * len(values) + 1.2, 3.6)
    for axes, value in zip(np.ravel(figure.subplots(1, len(values), squeeze=False)), values, strict=True):
        for index, (name, columns) in enumerate(found.items()):
            axes.plot(_scaled(x, columns[x]), _scaled(value, columns[value]), color=SERIES[index % 8], label=name)
        axes.set_xlabel(label(x))
        axes.set_ylabel(label(value))
    axes.legend(frameon=False, fontsize=7)
    write_caption(figure, caption)
    return figure


def clocks(found: Clocks) -> Figure:
    """Latency, power and energy against the asked clock, a line for each power limit."""
    columns, bundle = found.columns, found.study.bundle
    by_limit: dict[str, Columns] = {"the card's limit": columns}
    if "asked_power_limit_w" in columns:
        limits = np.unique(columns["asked_power_limit_w"])
        at = columns["asked_power_limit_w"]
        by_limit = {f"{limit:.0f} W": {k: v[at == limit] for k, v in columns.items()} for limit in limits[:8]}
    said = f"{found.study.graph.name} on {found.study.gpu.name}; {origin(bundle)}"
    return curves(by_limit, "asked_clock_hz", ("latency_s", "power_w", "energy_j"), said)


def per_gpu(workload: Workload, found: Sequence[Choice], options: Mapping[str, Any]) -> Figure:
    """Power and energy against latency over the clocks of each GPU, a line for each, eight at most."""
    tables: dict[str, Columns] = {}
    for chip in [choice.chip for choice in found if choice.results and choice.chip is not None][:8]:
        low, high = float(chip.clocks.min_hz or 0.3 * chip.clocks.max_hz), float(chip.clocks.max_hz)
        step = max((high - low) / 60.0, 1.0)
        asked = study(workload, chip, [f"clock={low!r}Hz:{high!r}Hz:{step!r}Hz"], **options)
        tables[chip.name] = table(asked, 0, asked.space.size)
    caption = "each line runs over the clocks of one GPU, at its default power limit"
    return curves(tables, "latency_s", ("power_w", "energy_j"), caption)


def published_dvfs(found: Sequence[Curve]) -> Figure:
    """Power over clocks of the published workloads: measured dots, predicted line."""
    figure = new_figure(9.0, 5.2)
    for axes, curve in zip(np.ravel(figure.subplots(2, 3)), found, strict=True):
        dots(axes, curve.clock_hz / 1e6, curve.measured_w)
        line(axes, curve.clock_hz / 1e6, curve.predicted_w)
        axes.set_title(f"{curve.name}: {curve.mape()['power']:.0%}", fontsize=8)
        axes.set_xlabel("Clock (MHz)")
        axes.set_ylabel("Power (W)")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=7)
    bundle = bundle_for(find_gpu(GPU))
    write_caption(
        figure,
        "A100-PCIE-40GB; measured: EnergAIzer artifact (a100_pcie_40gb_dvfs.csv, a100_pcie_40gb_900mhz.csv); "
        f"predicted: {origin(bundle)}",
    )
    return figure


def published_formats(found: Sequence[Format]) -> Figure:
    """Speed-up over fp32, and power, by number format and attention: bars predicted, dots measured."""
    figure = new_figure(9.0, 3.8)
    left, right = figure.subplots(1, 2)
    kinds = list(dict.fromkeys((row.dtype, row.attention) for row in found))
    cases = list(dict.fromkeys((row.model, row.batch, row.seq) for row in found))
    base = {(r.model, r.batch, r.seq): r for r in found if (r.dtype, r.attention) == kinds[0]}
    for index, kind in enumerate(kinds):
        mine = [row for row in found if (row.dtype, row.attention) == kind]
        at = np.arange(len(cases)) + 0.27 * (index - 1)
        colour = SERIES[index % 8]
        first = [base[(r.model, r.batch, r.seq)] for r in mine]
        speed = [b.predicted_s / r.predicted_s for r, b in zip(mine, first, strict=True)]
        left.bar(at, speed, 0.25, color=colour, label=" ".join(kind))
        right.bar(at, [r.predicted_w for r in mine], 0.25, color=colour, label=" ".join(kind))
        for x, r, b in zip(at, mine, first, strict=True):
            if r.measured_s is not None and b.measured_s is not None and r.measured_w is not None:
                dots(left, x, b.measured_s / r.measured_s, "", 5.0)
                dots(right, x, r.measured_w, "", 5.0)
    for axes, said in ((left, "Speed-up over fp32"), (right, "Power (W)")):
        axes.set_xticks(range(len(cases)), [f"{m}\nb{b} s{s}" for m, b, s in cases], fontsize=7)
        axes.set_ylabel(said)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    write_caption(figure, "A100-PCIE-40GB at 900 MHz; bars predicted, dots measured (EnergAIzer artifact)")
    return figure


def label(column: str) -> str:
    """What an axis says: the quantity and its unit."""
    return _LABEL.get(column, (column, 1.0))[0]


def _scaled(column: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(values) * _LABEL.get(column, (column, 1.0))[1]


def _source(figure: Figure, done: Swept) -> None:
    kept = f"{done.points:,} points, {len(done.summary.shown['point']):,} shown"
    write_caption(figure, f"{kept}; {origin(done.study.bundle)}")


def published_figures(
    curves: Sequence[Curve], formats: Sequence[Format], forecasts: Sequence[Choice]
) -> dict[str, Maker]:
    """The figures of ``explore published``, by file name."""
    asked = {"batch": 32, "seq": 512, "attention": "eager", "head": "none"}
    return {
        "explore-dvfs": lambda: published_dvfs(curves),
        "explore-formats": lambda: published_formats(formats),
        "explore-forecasts": lambda: per_gpu("bert-large", forecasts, asked),
    }
