"""Draw predictions: breakdown, power over time, roofline, clock curves, against measurements."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from wattcast.core.arrays import pareto_front
from wattcast.core.errors import bad_value, check_names
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware import Gpu
from wattcast.predictor.answer_lines import list_answers, title_of
from wattcast.predictor.prediction import Prediction
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


def draw_breakdown(p: Prediction) -> Figure:
    """Draw watts by module, of the whole workload and of the operators that take most energy."""
    figure, axes = figure_style.new_axes(9.0, 5.0)
    ranked = p.rank_ops(MOST_BREAKDOWN_OPS)
    shares = (f"{o.op}  {float(o.energy_j) / float(p.energy_j):.0%} of energy" for o in ranked)
    names = ["whole workload", *shares]
    stacks = [p.modules, *(o.modules for o in ranked)]
    left = [0.0] * len(stacks)
    for i, module in enumerate(p.modules):
        widths = [float(stack[i].power_w) for stack in stacks]
        if max(widths) > 0:
            colour = figure_style.MODULE_COLOURS.get(module.name)
            axes.barh(range(len(stacks)), widths, left=left, color=colour, label=module.name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(stacks)), names)
    axes.invert_yaxis()
    axes.set_xlabel("Power of one GPU (W)" if p.gpu_count > 1 else "Power (W)")
    shown = [
        line.value
        for line in list_answers(p)
        if line.label in ("throughput", "energy", "total power", "latency")
    ]
    axes.set_title(f"{title_of(p)}\n{', '.join(shown)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return add_caption(figure, figure_style.describe_origin(p))


def draw_timeline(trace: PowerTrace, p: Prediction) -> Figure:
    """Draw the power of one run over time, modules stacked, waiting marked below.

    A run of many launches gets a second panel that shows ``CLOSE_LAUNCHES`` of them.
    """
    close = len(trace.start_s) > 5 * CLOSE_LAUNCHES and trace.whole
    figure = new_figure(9.5, 7.2 if close else 4.6)
    panels = np.ravel(figure.subplots(2 if close else 1, 1, squeeze=False))
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
    scale, unit = next((each for each in units if trace.duration_s * each[0] >= 1.0), units[-1])
    _draw_stack(panels[0], trace.binned(TRACE_BINS), scale)
    panels[0].axhline(
        float(p.power_w), color=PREDICTED, lw=1.2, ls="--", label=f"mean {float(p.power_w):.4g} W"
    )
    _mark_gaps(panels[0], trace, scale)
    panels[0].set_xlim(0.0, trace.duration_s * scale)
    waiting = max(1.0 - float(p.busy_s) / float(p.latency_s), 0.0)
    said = f"{p.name} on {p.gpu}: {trace.duration_s * scale:.4g} {unit}, {waiting:.1%} waiting for the host"
    panels[0].set_title(said, fontsize=10)
    panels[0].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    if close:
        middle = len(trace.start_s) // 2
        part = trace.part(middle, middle + CLOSE_LAUNCHES)
        _draw_stack(panels[1], part, scale)
        _mark_gaps(panels[1], part, scale)
        panels[1].set_title(f"{CLOSE_LAUNCHES} launches and gaps from the middle of it")
        panels[1].set_xlim(part.start_s[0] * scale, part.end_s[-1] * scale)
    for axes in panels:
        axes.set_ylim(bottom=0.0)
        axes.set(
            xlabel=f"Time ({unit})",
            ylabel="Power of one GPU (W)" if p.gpu_count > 1 else "Power (W)",
        )
    how = "" if trace.whole else "; each stretch of the issue order at its mean"
    return add_caption(figure, figure_style.describe_origin(p) + how)


def _draw_stack(axes: Axes, shown: PowerTrace, scale: float) -> None:
    edges = np.append(shown.start_s, shown.end_s[-1]) * scale
    below = np.zeros(len(shown.start_s))
    for index, name in enumerate(shown.parts):
        top = below + shown.part_w[:, index]
        if shown.part_w[:, index].any():
            colour = figure_style.MODULE_COLOURS.get(name, SERIES_COLOURS[index % 8])
            axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=name)
        below = top


def _mark_gaps(axes: Axes, trace: PowerTrace, scale: float) -> None:
    """Mark with a strip under the curve where the device waits."""
    idle = trace.idle
    if idle.any():
        spans = (
            np.stack([trace.start_s[idle], (trace.end_s - trace.start_s)[idle]], axis=-1) * scale
        )
        strip = axes.inset_axes((0.0, -0.02, 1.0, 0.02), sharex=axes)
        strip.broken_barh(
            [(float(a), float(b)) for a, b in spans], (0.0, 1.0), color="#444444", lw=0
        )
        strip.axis("off")
        axes.plot([], [], color="#444444", lw=4, label="waiting")
        axes.tick_params(axis="x", pad=8)


def draw_roofline(p: Prediction, gpu: Gpu) -> Figure:
    """Draw speed and FLOP per joule of each operator against its FLOP per byte; area is its share
    of the energy.

    Roofs are min(π, β·I), with the peak π of a pipe at the predicted clock and DRAM's β
    [Williams2009]. On the right they are divided by the board's power limit: what a run on the roof
    at the limit would reach (after [Choi2013])."""
    figure = new_figure(10.5, 4.8)
    left, right = figure.subplots(1, 2)
    rows = [o for o in p.ops if o.op.flop > 0 and o.op.read_byte + o.op.write_byte > 0]
    if not rows:
        raise bad_value("roofline", "operators with arithmetic", f"none in {p.name}")
    intensity = np.array([o.op.flop / (o.op.read_byte + o.op.write_byte) for o in rows])
    along = np.geomspace(min(0.05, intensity.min() / 2), max(5e3, intensity.max() * 2), 200)
    limit_w = float(np.mean(gpu.power.limit_w))
    beta = float(np.mean(gpu.memory.byte_per_s))
    for index, (name, peak) in enumerate(find_roofs(p, gpu).items()):
        roof = np.minimum(peak, beta * along)
        style = {"color": PREDICTED if index == 0 else SERIES_COLOURS[1 + index % 6], "lw": 1.2}
        left.plot(along, roof / 1e12, label=f"{name}, {peak / 1e12:.3g} TFLOP/s", **style)
        right.plot(along, roof / limit_w / 1e9, **style)
    for index, kind in enumerate(dict.fromkeys(o.op.kind for o in rows)):
        at = [i for i, o in enumerate(rows) if o.op.kind == kind]
        flop = np.array([rows[i].op.flop * rows[i].count for i in at])
        spent_s = np.array([float(rows[i].latency_s) for i in at])
        joules = np.array([float(rows[i].energy_j) for i in at])
        marks: dict[str, Any] = {
            "marker": FAMILY_MARKS[index % 10],
            "s": 12 + 500 * joules / float(p.energy_j),
        }
        marks |= {
            "facecolor": "none",
            "edgecolor": SERIES_COLOURS[index % 8],
            "linewidth": 1.2,
            "label": kind,
        }
        left.scatter(intensity[at], flop / spent_s / 1e12, **marks)
        right.scatter(intensity[at], flop / joules / 1e9, **marks)
    for axes, said in ((left, "Speed (TFLOP/s)"), (right, "Efficiency (GFLOP/J)")):
        axes.set(
            xscale="log", yscale="log", xlabel="Arithmetic per byte asked for (FLOP/B)", ylabel=said
        )
    left.set_title(f"{p.name} on {p.gpu}", fontsize=10)
    right.set_title(f"lines: on the roof at {limit_w:.4g} W", fontsize=10)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False)
    return add_caption(
        figure,
        f"marks are predicted operators, area their share of the energy; {figure_style.describe_origin(p)}",
    )


def find_roofs(p: Prediction, gpu: Gpu) -> dict[str, float]:
    """Return the peak FLOP/s of the pipes that a workload's operators may use, at the predicted
    clock.
    """
    cycles = float(np.mean(gpu.sm_count)) * float(p.effective_clock_hz)
    used = {o.op.dtype for o in p.ops if o.op.flop > 0}
    tensor = {f"tensor {d}": r for d, r in gpu.pipes.tensor_flop_per_cycle.items() if d in used}
    cuda = {f"cores {d}": r for d, r in gpu.pipes.cuda_flop_per_cycle.items() if str(d) == "fp32"}
    return {name: float(np.mean(rate)) * cycles for name, rate in {**tensor, **cuda}.items()}


def draw_pareto(
    points: Mapping[str, tuple[float, float]], x: str, y: str, title: str, source: str
) -> Figure:
    """Draw named points by two quantities to be small, and the front through those that nothing
    beats.
    """
    figure, axes = figure_style.new_axes(7.0, 5.0)
    place = np.array(list(points.values()), dtype=np.float64)
    best = pareto_front(place)
    axes.step(
        place[best, 0],
        place[best, 1],
        where="post",
        color=PREDICTED,
        lw=1.2,
        label="nothing is better in both",
    )
    for index, (name, (a, b)) in enumerate(points.items()):
        on_it = index in best
        axes.plot(a, b, "D", ms=5, mfc="none", mec=PREDICTED if on_it else "#888888")
        axes.annotate(name, (a, b), xytext=(5, 4), textcoords="offset points",
                      color="black" if on_it else "#888888")  # fmt: skip
    axes.set(xlabel=x, ylabel=y)
    if (place.max(axis=0) > LOGARITHMIC_SPAN * place.min(axis=0)).any() and (place > 0).all():
        axes.set(xscale="log", yscale="log")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.12, y=0.1)
    axes.legend(frameon=False)
    return add_caption(figure, source)


def draw_figure(name: str, seen: ConfigurationView) -> Figure:
    """Draw the figure called ``name`` of one configuration."""
    check_names("figure", name, FIGURES)
    return FIGURES[name](seen)


def label_views(seen: Sequence[ConfigurationView]) -> list[str]:
    """Label configurations by what tells them apart: GPU if that is enough, else workload too, else
    a number.
    """
    gpus = [look.prediction.gpu for look in seen]
    if len({look.prediction.name for look in seen}) == 1 and len(set(gpus)) == len(gpus) > 1:
        return gpus
    names = [f"{look.prediction.name} on {look.prediction.gpu}" for look in seen]
    return [
        f"{i}: {name}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)
    ]


def draw_clock_curves(seen: Sequence[ConfigurationView]) -> Figure:
    """Draw latency, power and energy over the set clock, with a ring where each configuration
    settles.
    """
    figure = new_figure(10.5, 3.8)
    whose = " of all GPUs" if any(look.prediction.gpu_count > 1 for look in seen) else ""
    wanted = (
        ("latency_s", "Latency (ms)"),
        ("power_w", f"Power{whose} (W)"),
        ("energy_j", f"Energy{whose} (J)"),
    )
    for axes, (column, said) in zip(np.ravel(figure.subplots(1, 3)), wanted, strict=True):
        for index, (label, look) in enumerate(zip(label_views(seen), seen, strict=True)):
            colour = SERIES_COLOURS[index % 8]
            here = look.prediction
            scale = 1e3 if column == "latency_s" else float(here.gpu_count)
            axes.plot(
                look.clocks["asked_hz"] / 1e6,
                look.clocks[column] * scale,
                color=colour,
                label=label,
            )
            axes.plot(float(here.clock_hz) / 1e6, float(getattr(here, column)) * scale, "o", ms=7, mfc="none",
                      mec=colour, mew=1.6)  # fmt: skip
        axes.set(xlabel="Clock asked for (MHz)", ylabel=said)
        axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False)
    origins = "; ".join(
        dict.fromkeys(figure_style.describe_origin(look.prediction) for look in seen)
    )
    return add_caption(figure, f"a ring marks where the configuration settles; {origins}")


FIGURES: dict[str, Callable[[ConfigurationView], Figure]] = {
    "breakdown": lambda seen: draw_breakdown(seen.prediction),
    "timeline": lambda seen: draw_timeline(seen.trace, seen.prediction),
    "roofline": lambda seen: draw_roofline(seen.prediction, seen.gpu),
    "clocks": lambda seen: draw_clock_curves([seen]),
}


@cache
def find_kernel_family(kernel: str) -> dict[str, str]:
    """Return the family of a kernel and its kind (GEMM-like, reduction, elementwise), by its name."""
    rows = read_shipped_table("wattcast.report", "kernel_families.csv")
    return next(row for row in rows if re.search(row["pattern"], kernel, re.IGNORECASE))
