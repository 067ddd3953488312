"""Print and draw what a simulation of serving found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.units import show_plain
from wattcast.predictor.answer_lines import AnswerLine, round_number
from wattcast.report.figure_style import (
    SERIES_COLOURS,
    Axes,
    Figure,
    add_caption,
    new_figure,
)
from wattcast.report.text_tables import (
    new_table,
    print_answers,
    print_notes,
)
from wattcast.serving.serving_result import (
    PEAK_INTERVAL_S,
    POWER_INTERVAL_S,
    ServingResult,
)

_MOST_POINTS = 4000  # of a curve
_LATENCY_LABELS = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "inter_token_s": "between two tokens",
    "latency_s": "whole request",
}


def print_serving(console: Console, result: ServingResult) -> None:
    """Print throughput, energy, power and money, then latencies and assumptions, on one screen."""
    summary = result.summarise()
    gpus = summary["gpu"]
    if summary["gpu_count"] > 1:
        gpus = f"{summary['gpu_count']} x {gpus}"
    length = units.show(summary["length_s"], "s", 3)
    title = f"{summary['model']} on {gpus}: {summary['requests']:,} requests in {length}"
    if summary["rejected"]:
        title += f"; {summary['rejected']:,} rejected as too long"
    print_answers(console, title, _list_answers(summary, result))

    keys = ("p50", "p90", "p99", "mean")
    rows = []
    for name, label in _LATENCY_LABELS.items():
        times = [units.show(summary[name][key], "s", 3) for key in keys]
        rows.append((label, *times))
    console.print(new_table("latency", *keys, rows=rows))
    print_notes(console, summary["assumptions"])


def _list_answers(summary: dict[str, Any], result: ServingResult) -> list[AnswerLine]:
    """Return the answers of a simulation, the most important first."""
    return [
        *_list_rates(summary),
        *_list_energies(summary),
        _describe_engine(summary),
        *_list_bounds(summary, has_bounds=bool(result.bounds)),
        *_list_costs(summary, result.prices.currency),
        *_list_spreads(summary),
    ]


def _list_rates(summary: dict[str, Any]) -> list[AnswerLine]:
    """Return the throughput while traffic lasts, and over the whole time with start and drain."""
    drain = units.show(summary["drain_s"], "s", 2)
    whole_tokens = f"{round_number(summary['output_tokens_per_s'], 3)} output tokens/s"
    whole_rate = (
        f"{show_plain(summary['requests_per_s'], 3)} requests/s with start and drain "
        f"({drain} after the last arrival)"
    )
    steady = summary["steady"]
    if steady is None:
        why = "too short for a steady state: few requests end before the last arrives"
        return [AnswerLine("throughput", whole_tokens, f"{whole_rate}; {why}")]

    tokens = f"{round_number(steady['output_tokens_per_s'], 3)} output tokens/s"
    rate = f"{show_plain(steady['requests_per_s'], 3)} requests/s in the steady state"
    throughput = AnswerLine("throughput", tokens, f"{rate}; {whole_tokens}, {whole_rate}")
    before, after = steady["in_engine"]
    arriving = f"{show_plain(steady['arrivals_per_s'], 3)} requests/s arrive"
    in_engine = f"{before} to {after} requests in the engine"
    queue = AnswerLine("queue", "steady", f"{arriving}; {in_engine}")
    if steady["queue_grows"]:
        queue = AnswerLine("queue", "GROWS", f"{arriving}, more than are served; {in_engine}")
    return [throughput, queue]


def _list_energies(summary: dict[str, Any]) -> list[AnswerLine]:
    """Return the energy of tokens and requests, and the mean and peak power of all GPUs."""

    def show(name: str) -> str:
        return units.show(summary[name], "W" if name.endswith("_w") else "J", 3)

    peak = f"{show('peak_power_w')} peak over {units.show(PEAK_INTERVAL_S, 's')}"
    if summary["peak_power_w"] > summary["held_power_w"]:
        peak += f": until the governor reacts, then {show('held_power_w')} at most"
    spent = f"{show('energy_j_per_request')} a request, {show('energy_j')} in all"
    return [
        AnswerLine("energy", f"{show('energy_j_per_token')}/output token", spent),
        AnswerLine("total power", f"{show('power_w')} mean", f"{show('p95_power_w')} p95; {peak}"),
    ]


def _describe_engine(summary: dict[str, Any]) -> AnswerLine:
    """Say how full the engine was."""
    batch = summary["batch"]
    queue = summary["queue"]
    cache = summary["cache_use"]
    remarks = [
        f"batch {show_plain(batch['mean'], 3)} mean, {batch['max']:.0f} most",
        f"queue {show_plain(queue['mean'], 2)} mean, {queue['max']:.0f} most",
        f"cache {cache['mean']:.0%} mean, {cache['max']:.0%} most",
        f"{summary['preemptions']} preemptions",
    ]
    if summary["prefix_hit_share"]:
        remarks.append(f"{summary['prefix_hit_share']:.0%} of prompt tokens found in the cache")
    return AnswerLine("engine", f"{summary['busy_share']:.1%} busy", "; ".join(remarks))


def _list_bounds(summary: dict[str, Any], has_bounds: bool) -> list[AnswerLine]:
    """Say which latency bounds the run kept."""
    lines = []
    if has_bounds:
        goodput = f"{show_plain(summary['goodput_per_s'], 3)} requests/s"
        lines.append(AnswerLine("goodput", goodput, f"{summary['good_share']:.1%} of all in time"))
    for row in summary["bounds"]:
        verdict = "within" if row["found_s"] <= row["most_s"] else "NOT within"
        measured = units.show(row["found_s"], "s", 3)
        limit = units.show(row["most_s"], "s", 3)
        lines.append(AnswerLine(row["bound"], measured, f"{verdict} {limit}"))
    return lines


def _list_costs(summary: dict[str, Any], currency: str | None) -> list[AnswerLine]:
    lines = []
    if summary["cost"] is not None:
        per_million = summary["cost_per_million_tokens"]
        remark = f"{show_plain(per_million, 3)} {currency} a million output tokens"
        lines.append(AnswerLine("cost", f"{show_plain(summary['cost'], 3)} {currency}", remark))
    if summary["carbon_g"] is not None:
        lines.append(AnswerLine("carbon", f"{show_plain(summary['carbon_g'], 3)} g CO2e"))
    return lines


def _list_spreads(summary: dict[str, Any]) -> list[AnswerLine]:
    """Return the spread over seeds, and the factors that nine in ten runs lie between."""
    lines = []
    for name, kind in (("seeds", "over seeds"), ("predictor", "of nine in ten runs")):
        intervals = summary["interval"][name]
        ends = [
            f"{key} {show_plain(low, 3)} to {show_plain(high, 3)}"
            for key, (low, high) in intervals.items()
        ]
        if ends:
            lines.append(AnswerLine("spread", kind, ", ".join(ends)))
    return lines


def draw_serving(result: ServingResult) -> Figure:
    """Draw latencies as distributions, and power and requests over time."""
    figure = new_figure(10.0, 7.0)
    (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2)
    _draw_distributions(
        top_left,
        {"to first token": result.ttft_s, "whole request": result.latency_s},
        "Latency (s)",
    )
    _draw_distributions(top_right, {"per output token": result.tpot_s}, "Time per output token (s)")
    _draw_power(bottom_left, result)
    _draw_requests(bottom_right, result)
    gpus = f"{result.gpu_count} x {result.gpu}"
    figure.suptitle(f"{result.model} on {gpus}: {result.requests} requests")
    return add_caption(figure, "; ".join([f"simulated: {result.trace.name}", *result.assumptions]))


def _draw_distributions(
    axes: Axes,
    values: Mapping[str, Array],
    label: str,
) -> None:
    """Draw the share of requests that took at most each time."""
    share = np.linspace(0.0, 100.0, 501)
    for (name, times_s), colour in zip(values.items(), SERIES_COLOURS, strict=False):
        finite_s = times_s[np.isfinite(times_s)]
        if len(finite_s):
            axes.plot(np.percentile(finite_s, share), share, color=colour, label=name)
    axes.set(xlabel=label, ylabel="Requests (%)")
    axes.legend(frameon=False)


def _draw_power(axes: Axes, result: ServingResult) -> None:
    """Draw the power of all GPUs over time, and its mean."""
    interval_s = max(POWER_INTERVAL_S, result.length_s / _MOST_POINTS)
    time_s, power_w = result.power_over_time(interval_s)
    axes.step(
        time_s,
        power_w,
        where="post",
        color=SERIES_COLOURS[0],
        lw=0.8,
    )
    axes.axhline(
        result.power_w,
        color=SERIES_COLOURS[1],
        lw=1.0,
        label="mean",
    )
    axes.set(
        xlabel="Time (s)",
        ylabel="Power (W)",
        ylim=(0.0, None),
    )
    axes.legend(frameon=False)


def _draw_requests(axes: Axes, result: ServingResult) -> None:
    """Draw the requests of the replica with the most steps over time."""
    busiest = max(result.runs, key=lambda run: len(run.segments["steps"]))
    stride = max(len(busiest.segments["steps"]) // _MOST_POINTS, 1)
    times_s = busiest.segments["begin_s"][::stride]
    curves = {"decoding": "decodes", "waiting": "waiting"}
    for (name, column), colour in zip(curves.items(), SERIES_COLOURS, strict=False):
        counts = busiest.segments[column][::stride]
        axes.step(
            times_s,
            counts,
            where="post",
            color=colour,
            lw=0.8,
            label=name,
        )
    axes.set(xlabel="Time (s)", ylabel="Requests of one replica")
    axes.legend(frameon=False)
