"""Draw predictions: breakdown, power over time, roofline, clock curves, against measurements."""

from __future__ import annotations

import re
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from functools import cache
from typing import Any

import numpy as np

from wattcast.core.arrays import Array, pareto_front
from wattcast.core.errors import bad_value, check_names
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware import Gpu
from wattcast.predictor.answer_lines import list_answers, title_of
from wattcast.predictor.prediction import OperatorShare, Prediction
from wattcast.report import figure_style
from wattcast.report.configuration_view import ConfigurationView, PowerTrace
from wattcast.report.figure_style import (
    PREDICTED,
    SERIES_COLOURS,
    Axes,
    Figure,
    add_caption,
    new_figure,
)

MOST_BREAKDOWN_OPS = 10
TRACE_BINS = 600  # steps of a drawn trace; more make a large SVG and show no more
LOGARITHMIC_SPAN = 10.0  # from the least to the most, beyond which axes are logarithmic
CLOSE_LAUNCHES = 80  # launches of the panel that looks closely
FAMILY_MARKS = "os^Dv<>Ph*"
_BEATEN = "#888888"


def draw_breakdown(p: Prediction) -> Figure:
    """Draw watts by module, of the whole workload and of the operators that take most energy."""
    figure, axes = figure_style.new_axes(9.0, 5.0)
    operators = p.rank_ops(MOST_BREAKDOWN_OPS)
    names = ["whole workload"]
    stacks = [p.modules]
    for operator in operators:
        share = float(operator.energy_j) / float(p.energy_j)
        names.append(f"{operator.op}  {share:.0%} of energy")
        stacks.append(operator.modules)

    left_w = np.zeros(len(stacks))
    for place, module in enumerate(p.modules):
        width_w = np.array([float(stack[place].power_w) for stack in stacks])
        if width_w.max() > 0:
            colour = figure_style.MODULE_COLOURS.get(module.name)
            axes.barh(
                range(len(stacks)),
                width_w,
                left=left_w,
                color=colour,
                label=module.name,
            )
        left_w = left_w + width_w
    axes.set_yticks(range(len(stacks)), names)
    axes.invert_yaxis()
    axes.set_xlabel(_label_power(p))
    titled = ("throughput", "energy", "total power", "latency")
    answers = [line.value for line in list_answers(p) if line.label in titled]
    axes.set_title(f"{title_of(p)}\n{', '.join(answers)}")
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )
    return add_caption(figure, figure_style.describe_origin(p))


def _label_power(p: Prediction) -> str:
    return "Power of one GPU (W)" if p.gpu_count > 1 else "Power (W)"


def draw_timeline(trace: PowerTrace, p: Prediction) -> Figure:
    """Draw the power of one run over time, modules stacked, waiting marked below.

    A run of many launches gets a second panel that shows ``CLOSE_LAUNCHES`` of them.
    """
    is_close = len(trace.start_s) > 5 * CLOSE_LAUNCHES and trace.whole
    panel_count = 2 if is_close else 1
    figure = new_figure(9.5, 7.2 if is_close else 4.6)
    panels = np.ravel(figure.subplots(panel_count, 1, squeeze=False))
    scale, unit = _choose_time_unit(trace.duration_s)

    # the whole run
    whole = panels[0]
    power_w = float(p.power_w)
    _draw_stack(whole, trace.binned(TRACE_BINS), scale)
    whole.axhline(
        power_w,
        color=PREDICTED,
        lw=1.2,
        ls="--",
        label=f"mean {power_w:.4g} W",
    )
    _mark_gaps(whole, trace, scale)
    whole.set_xlim(0.0, trace.duration_s * scale)
    waiting = max(1.0 - float(p.busy_s) / float(p.latency_s), 0.0)
    length = f"{trace.duration_s * scale:.4g} {unit}"
    title = f"{p.name} on {p.gpu}: {length}, {waiting:.1%} waiting for the host"
    whole.set_title(title, fontsize=10)
    whole.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )

    # some launches
    if is_close:
        middle = len(trace.start_s) // 2
        part = trace.part(middle, middle + CLOSE_LAUNCHES)
        _draw_stack(panels[1], part, scale)
        _mark_gaps(panels[1], part, scale)
        panels[1].set_title(f"{CLOSE_LAUNCHES} launches and gaps from the middle of it")
        panels[1].set_xlim(part.start_s[0] * scale, part.end_s[-1] * scale)
    for axes in panels:
        axes.set_ylim(bottom=0.0)
        axes.set(xlabel=f"Time ({unit})", ylabel=_label_power(p))
    how = "" if trace.whole else "; each stretch of the issue order at its mean"
    return add_caption(figure, figure_style.describe_origin(p) + how)


def _choose_time_unit(duration_s: float) -> tuple[float, str]:
    """Return how many of a unit are a second, and its name, such that the time is at least one."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if duration_s * scale >= 1.0:
            return scale, unit
    return 1e6, "µs"


def _draw_stack(
    axes: Axes,
    trace: PowerTrace,
    scale: float,
) -> None:
    """Draw the power of the modules one above another."""
    edges = np.append(trace.start_s, trace.end_s[-1]) * scale
    below = np.zeros(len(trace.start_s))
    for index, name in enumerate(trace.parts):
        top = below + trace.part_w[:, index]
        if trace.part_w[:, index].any():
            colour = figure_style.MODULE_COLOURS.get(name, SERIES_COLOURS[index % 8])
            axes.stairs(
                top,
                edges,
                baseline=below,
                fill=True,
                color=colour,
                label=name,
            )
        below = top


def _mark_gaps(
    axes: Axes,
    trace: PowerTrace,
    scale: float,
) -> None:
    """Mark with a strip under the curve where the device waits."""
    idle = trace.idle
    if not idle.any():
        return
    begin = trace.start_s[idle] * scale
    length = (trace.end_s - trace.start_s)[idle] * scale
    spans = list(zip(begin.tolist(), length.tolist(), strict=True))
    strip = axes.inset_axes((0.0, -0.02, 1.0, 0.02), sharex=axes)
    strip.broken_barh(spans, (0.0, 1.0), color="#444444", lw=0)
    strip.axis("off")
    axes.plot(
        [],
        [],
        color="#444444",
        lw=4,
        label="waiting",
    )
    axes.tick_params(axis="x", pad=8)


def draw_roofline(p: Prediction, gpu: Gpu) -> Figure:
    """Draw speed and FLOP per joule of each operator against its FLOP per byte.

    The area of a mark is its share of the energy. Roofs are min(π, β·I), with the peak π of a pipe
    at the predicted clock and DRAM's β [Williams2009]. On the right they are divided by the board's
    power limit: what a run on the roof at the limit would reach (after [Choi2013]).
    """
    figure = new_figure(10.5, 4.8)
    speed_axes, efficiency_axes = figure.subplots(1, 2)
    shares = [share for share in p.ops if share.op.flop > 0 and _count_bytes(share) > 0]
    if not shares:
        raise bad_value("roofline", "operators with arithmetic", f"none in {p.name}")
    limit_w = float(np.mean(gpu.power.limit_w))
    intensities = [share.op.flop / _count_bytes(share) for share in shares]
    span = (min(0.05, min(intensities) / 2), max(5e3, max(intensities) * 2))
    _draw_roofs(
        speed_axes,
        efficiency_axes,
        p,
        gpu,
        np.geomspace(*span, 200),
    )
    for place, kind in enumerate(dict.fromkeys(share.op.kind for share in shares)):
        alike = [share for share in shares if share.op.kind == kind]
        _mark_operators(
            speed_axes,
            efficiency_axes,
            alike,
            place,
            float(p.energy_j),
        )
    for axes, label in ((speed_axes, "Speed (TFLOP/s)"), (efficiency_axes, "Efficiency (GFLOP/J)")):
        axes.set(
            xscale="log",
            yscale="log",
            ylabel=label,
        )
        axes.set_xlabel("Arithmetic per byte asked for (FLOP/B)")
    speed_axes.set_title(f"{p.name} on {p.gpu}", fontsize=10)
    efficiency_axes.set_title(f"lines: on the roof at {limit_w:.4g} W", fontsize=10)
    handles, names = speed_axes.get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    what = "marks are predicted operators, area their share of the energy"
    return add_caption(figure, f"{what}; {figure_style.describe_origin(p)}")


def _count_bytes(share: OperatorShare) -> float:
    return share.op.read_byte + share.op.write_byte


def _draw_roofs(
    left: Axes,
    right: Axes,
    p: Prediction,
    gpu: Gpu,
    intensity: Array,
) -> None:
    """Draw the roof of each pipe, and on the right the roofs at the power limit."""
    limit_w = float(np.mean(gpu.power.limit_w))
    dram_byte_per_s = float(np.mean(gpu.memory.byte_per_s))
    for place, (name, peak) in enumerate(find_roofs(p, gpu).items()):
        roof = np.minimum(peak, dram_byte_per_s * intensity)
        colour = PREDICTED if place == 0 else SERIES_COLOURS[1 + place % 6]
        label = f"{name}, {peak / 1e12:.3g} TFLOP/s"
        left.plot(
            intensity,
            roof / 1e12,
            label=label,
            color=colour,
            lw=1.2,
        )
        right.plot(intensity, roof / limit_w / 1e9, color=colour, lw=1.2)


def _mark_operators(
    left: Axes,
    right: Axes,
    shares: Sequence[OperatorShare],
    place: int,
    total_j: float,
) -> None:
    """Mark the operators of one kind."""
    intensity = np.array([share.op.flop / _count_bytes(share) for share in shares])
    flop = np.array([share.op.flop * share.count for share in shares])
    spent_s = np.array([float(share.latency_s) for share in shares])
    joules = np.array([float(share.energy_j) for share in shares])
    marks: dict[str, Any] = {
        "marker": FAMILY_MARKS[place % len(FAMILY_MARKS)],
        "s": 12 + 500 * joules / total_j,
        "facecolor": "none",
        "edgecolor": SERIES_COLOURS[place % len(SERIES_COLOURS)],
        "linewidth": 1.2,
        "label": shares[0].op.kind,
    }
    left.scatter(intensity, flop / spent_s / 1e12, **marks)
    right.scatter(intensity, flop / joules / 1e9, **marks)


def find_roofs(p: Prediction, gpu: Gpu) -> dict[str, float]:
    """Return the peak FLOP/s of the pipes that a workload's operators may use.

    The clock is the predicted one.
    """
    cycles_per_s = float(np.mean(gpu.sm_count)) * float(p.effective_clock_hz)
    dtypes = {share.op.dtype for share in p.ops if share.op.flop > 0}
    roofs = {}
    for dtype, rate in gpu.pipes.tensor_flop_per_cycle.items():
        if dtype in dtypes:
            roofs[f"tensor {dtype}"] = float(np.mean(rate)) * cycles_per_s
    for dtype, rate in gpu.pipes.cuda_flop_per_cycle.items():
        if str(dtype) == "fp32":
            roofs[f"cores {dtype}"] = float(np.mean(rate)) * cycles_per_s
    return roofs


def draw_pareto(
    points: Mapping[str, tuple[float, float]],
    x: str,
    y: str,
    title: str,
    source: str,
) -> Figure:
    """Draw named points by two quantities to be small, and the front that nothing beats."""
    figure, axes = figure_style.new_axes(7.0, 5.0)
    place = np.array(list(points.values()), dtype=np.float64)
    best = pareto_front(place)
    label = "nothing is better in both"
    axes.step(
        *place[best].T,
        where="post",
        color=PREDICTED,
        lw=1.2,
        label=label,
    )
    for index, (name, point) in enumerate(points.items()):
        on_front = index in best
        edge = PREDICTED if on_front else _BEATEN
        ink = "black" if on_front else _BEATEN
        axes.plot(
            *point,
            "D",
            ms=5,
            mfc="none",
            mec=edge,
        )
        axes.annotate(
            name,
            point,
            xytext=(5, 4),
            textcoords="offset points",
            color=ink,
        )
    axes.set(xlabel=x, ylabel=y)
    is_wide = (place.max(axis=0) > LOGARITHMIC_SPAN * place.min(axis=0)).any()
    if is_wide and (place > 0).all():
        axes.set(xscale="log", yscale="log")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12, y=0.1)
    axes.legend(frameon=False)
    return add_caption(figure, source)


def draw_figure(name: str, view: ConfigurationView) -> Figure:
    """Draw the figure called ``name`` of one configuration."""
    check_names("figure", name, FIGURES)
    return FIGURES[name](view)


def label_views(views: Sequence[ConfigurationView]) -> list[str]:
    """Label configurations by what tells them apart.

    This is the GPU if that is enough, else the workload too, else a number.
    """
    gpus = [view.prediction.gpu for view in views]
    workloads = {view.prediction.name for view in views}
    if len(workloads) == 1 and len(set(gpus)) == len(gpus) > 1:
        return gpus
    names = [f"{view.prediction.name} on {view.prediction.gpu}" for view in views]
    labels = []
    for number, name in enumerate(names, start=1):
        labels.append(f"{number}: {name}" if names.count(name) > 1 else name)
    return labels


def draw_clock_curves(views: Sequence[ConfigurationView]) -> Figure:
    """Draw latency, power and energy over the set clock.

    A ring marks where each configuration settles.
    """
    figure = new_figure(10.5, 3.8)
    whose = " of all GPUs" if any(view.prediction.gpu_count > 1 for view in views) else ""
    titles = {
        "latency_s": "Latency (ms)",
        "power_w": f"Power{whose} (W)",
        "energy_j": f"Energy{whose} (J)",
    }
    labels = label_views(views)
    panels = np.ravel(figure.subplots(1, 3))
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        for place, (label, view) in enumerate(zip(labels, views, strict=True)):
            colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
            prediction = view.prediction
            scale = 1e3 if column == "latency_s" else float(prediction.gpu_count)
            clocks_mhz = view.clocks["asked_hz"] / 1e6
            axes.plot(clocks_mhz, view.clocks[column] * scale, color=colour, label=label)
            settled_mhz = float(prediction.clock_hz) / 1e6
            settled = float(getattr(prediction, column)) * scale
            axes.plot(
                settled_mhz,
                settled,
                "o",
                ms=7,
                mfc="none",
                mec=colour,
                mew=1.6,
            )
        axes.set(xlabel="Clock asked for (MHz)", ylabel=title)
        axes.set_ylim(bottom=0.0)
    panels[-1].legend(frameon=False)
    origins = dict.fromkeys(figure_style.describe_origin(view.prediction) for view in views)
    caption = f"a ring marks where the configuration settles; {'; '.join(origins)}"
    return add_caption(figure, caption)


FIGURES: dict[str, Callable[[ConfigurationView], Figure]] = {
    "breakdown": lambda view: draw_breakdown(view.prediction),
    "timeline": lambda view: draw_timeline(view.trace, view.prediction),
    "roofline": lambda view: draw_roofline(view.prediction, view.gpu),
    "clocks": lambda view: draw_clock_curves([view]),
}


@cache
def find_kernel_family(kernel: str) -> dict[str, str]:
    """Return the family of a kernel and its kind (GEMM-like, reduction, elementwise), by its
    name.
    """
    rows = read_shipped_table("wattcast.report", "kernel_families.csv")
    return next(row for row in rows if re.search(row["pattern"], kernel, re.IGNORECASE))
