"""Show a training job: one screen of text, JSON, and a figure."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from wattcast.core import units
from wattcast.core.units import show_plain
from wattcast.predictor.answer_lines import (
    AnswerLine,
    count_digits,
    round_number,
    span_numbers,
)
from wattcast.predictor.prediction_json import take_fields
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
from wattcast.training.train_job import TrainingResult
from wattcast.training.training_coefficients import TRAINING

_PARTS = ("compute", "exchange", "bubble", "optimiser")
_MEMORY = ("weight", "gradient", "optimiser", "activation", "passing")
_CURVE_COLUMNS = ("power_limit_w", "clock_hz", "hours", "energy_kwh")
FEW_NOTES = 4  # assumptions of a first screen and of a figure
MOST_WAYS = 20  # strategies that are listed

_INTERVAL_LEVEL = 0.9


def summarise_training(result: TrainingResult) -> dict[str, Any]:
    """Return all figures of a job as plain values, as ``--json`` prints them."""
    low, high = result.relative_interval
    best = recommend_limit(result)
    return {
        **take_fields(
            result,
            "model",
            "gpu",
            "gpus",
            "tokens",
            "seq",
        ),
        "strategy": {
            **take_fields(
                result.strategy,
                "dp",
                "tp",
                "pp",
                "cp",
                "ep",
                "interleave",
            ),
            "sharding": str(result.strategy.sharding),
            "recompute": str(result.strategy.recompute),
            **take_fields(result.strategy, "micro_batch", "accumulation", "global_batch"),
            "reason": result.reason,
        },
        "step_s": result.step_s,
        "step_parts_s": {part: float(getattr(result.step, f"{part}_s")) for part in _PARTS},
        "power_over_step": power_over_step(result),
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_gpu": result.tokens_per_s / result.gpus,
        **take_fields(
            result,
            "mfu",
            "hours",
            "gpu_hours",
            "power_w",
            "peak_power_w",
            "energy_kwh",
            "site_energy_kwh",
            "checkpoints",
            "checkpoint_hours",
        ),
        "energy_j_per_token": result.energy_kwh * 3.6e6 / result.tokens,
        "cost": result.cost,
        "currency": result.prices.currency or None,
        "carbon_kg": result.carbon_kg,
        "interval": {
            "level": _INTERVAL_LEVEL,
            "hours": list(result.hours_interval),
            "tokens_per_s": [result.tokens_per_s / high, result.tokens_per_s / low],
            "energy_kwh": list(result.energy_interval_kwh),
        },
        "memory_byte": {
            **{name: float(getattr(result.memory, f"{name}_byte")) for name in _MEMORY},
            "total": result.memory.total_byte,
            "usable": result.capacity_byte,
        },
        "fits": result.memory.total_byte <= result.capacity_byte,
        "power_limits": [dict(zip(_CURVE_COLUMNS, point, strict=True)) for point in result.curve],
        "recommended_power_limit_w": best,
        "pipeline_slack_kwh": result.slack_kwh,
        "assumptions": list(result.assumptions),
    }


def power_over_step(result: TrainingResult) -> list[dict[str, float | str]]:
    """Return the parts of a step in order with their length and the power of all GPUs meanwhile."""
    step = result.step
    compute_w = float(step.compute_w) * result.gpus
    waiting_w = float(step.waiting_w) * result.gpus
    power_w = {
        "compute": compute_w,
        "exchange": waiting_w,
        "bubble": waiting_w,
        "optimiser": compute_w,
    }
    parts: list[dict[str, float | str]] = []
    for part in _PARTS:
        length_s = float(getattr(step, f"{part}_s"))
        if length_s > 0.0:
            parts.append(
                {
                    "part": part,
                    "length_s": length_s,
                    "power_w": power_w[part],
                }
            )
    return parts


def recommend_limit(result: TrainingResult) -> float:
    """Return the power limit of least energy among those that cost little more time."""
    _, _, first_hours, _ = result.curve[0]
    longest_hours = (1.0 + TRAINING.limit_delay) * first_hours
    choices = [(kwh, limit_w) for limit_w, _, hours, kwh in result.curve if hours <= longest_hours]
    return min(choices)[1]


def print_training(
    console: Console,
    result: TrainingResult,
    details: bool = False,
    search: bool = False,
) -> None:
    """Print the answer, then the step, the memory, the trade of a power limit and assumptions."""
    summary = summarise_training(result)
    print_answers(console, _write_title(result), _list_answers(result, summary))
    console.print(_table_limits(result, summary["recommended_power_limit_w"]))
    if result.slack_kwh:
        console.print(
            f"lower clocks on waiting stages would save {show_plain(result.slack_kwh, 3)} kWh at "
            "no loss of time"
        )
    if search:
        console.print(_table_strategies(result))
    print_notes(console, result.assumptions if details else result.assumptions[:FEW_NOTES])


def _table_limits(result: TrainingResult, recommended_w: float) -> Table:
    """Return what a power limit or a clock would trade."""
    title = "What a power limit or a clock would trade"
    rows = new_table(
        "power limit",
        "clock",
        "hours",
        "kWh",
        title=title,
    )
    for limit_w, clock_hz, hours, kwh in result.curve:
        mark = " <- recommended" if limit_w == recommended_w else ""
        clock = units.show(clock_hz, "Hz", 3)
        rows.add_row(
            f"{limit_w:.0f} W{mark}", clock, f"{show_plain(hours, 3)}", f"{show_plain(kwh, 3)}"
        )
    return rows


def _table_strategies(result: TrainingResult) -> Table:
    """Return ways to share the job, the best first."""
    title = "Ways to share it, the best first"
    rows = new_table(
        "strategy",
        "step",
        "J a GPU",
        "memory",
        title=title,
    )
    for way in result.candidates[:MOST_WAYS]:
        memory = units.show(way.memory.total_byte, "byte")
        if way.step is None:
            rows.add_row(str(way.strategy), "does not fit", "", memory)
            continue
        length = units.show(float(way.step.latency_s), "s")
        energy = units.show(float(way.step.energy_j), "J")
        rows.add_row(str(way.strategy), length, energy, memory)
    return rows


def _write_title(result: TrainingResult) -> str:
    return f"{result.model}: {result.tokens:,.0f} tokens on {result.gpus} x {result.gpu}"


def _list_answers(result: TrainingResult, summary: dict[str, Any]) -> list[AnswerLine]:
    """Return what people ask of a job, with its spread: hours, kWh, watts, money, speed, memory."""
    digits = count_digits(result.hours, *result.hours_interval)
    return [
        *_describe_whole_job(result, summary, digits),
        *_describe_step(result, summary, digits),
        AnswerLine("shared", str(result.strategy), result.reason),
        _describe_memory(result, summary),
    ]


def _describe_whole_job(
    result: TrainingResult,
    summary: dict[str, Any],
    digits: int,
) -> list[AnswerLine]:
    """Return the lines about the time, the energy, the power and the cost of the whole job."""
    show = partial(units.show, digits=digits)
    number = partial(round_number, digits=digits)
    hours, hours_span = span_numbers(result.hours, np.array(result.hours_interval))
    gpu_hours = f"{number(result.gpu_hours)} GPU hours"
    pue = "" if result.prices.pue == 1.0 else f" and a PUE of {result.prices.pue:g}"
    with_hosts = f"{number(result.site_energy_kwh)} kWh with hosts{pue}"
    per_token = f"{number(summary['energy_j_per_token'])} J/token"
    energy = f"at the GPUs; {with_hosts}; {per_token}"
    peak = f"mean of all GPUs; {show(result.peak_power_w, 'W')} while all compute"
    lines = [
        AnswerLine("time", f"{hours} h", f"{hours_span} h; {gpu_hours}"),
        AnswerLine("energy", f"{number(result.energy_kwh)} kWh", energy),
        AnswerLine("power", show(result.power_w, "W"), peak),
    ]
    if result.checkpoints:
        waited = f"{result.checkpoint_hours / result.hours:.0%} of the time"
        watts = show(result.waiting_w * result.gpus, "W")
        often = f"one every {result.checkpoint_every} steps"
        if result.checkpoint_log:
            often = "as in the log"
        how = f"{waited}, at {watts}; {often}"
        lines.append(AnswerLine("checkpoints", str(result.checkpoints), how))
    if result.cost is not None:
        lines.append(AnswerLine("cost", f"{number(result.cost)} {result.prices.currency}"))
    if result.carbon_kg is not None:
        lines.append(AnswerLine("carbon", f"{number(result.carbon_kg)} kg CO2e"))
    return lines


def _describe_step(
    result: TrainingResult,
    summary: dict[str, Any],
    digits: int,
) -> list[AnswerLine]:
    """Return the lines about the speed and about the parts of one step."""
    speed = round_number(result.tokens_per_s, digits=digits)
    speed_of_gpu = round_number(result.tokens_per_s / result.gpus, digits=digits)
    parts = []
    for name, length_s in summary["step_parts_s"].items():
        if length_s > 0.0:
            parts.append(f"{name} {length_s / result.step_s:.0%}")
    step = f"of {result.step_tokens:,} tokens: {', '.join(parts)}"
    return [
        AnswerLine(
            "speed",
            f"{speed} tokens/s",
            f"{speed_of_gpu} a GPU; {result.mfu:.0%} of the peak (MFU)",
        ),
        AnswerLine("step", units.show(result.step_s, "s", digits=digits), step),
    ]


def _describe_memory(result: TrainingResult, summary: dict[str, Any]) -> AnswerLine:
    """Say whether the job fits, and what it holds by purpose."""
    purposes = []
    for name in _MEMORY:
        byte = summary["memory_byte"][name]
        if byte:
            purposes.append(f"{name} {units.show(byte, 'byte', 3)}")
    need = units.show(result.memory.total_byte, "byte", 3)
    capacity = units.show(result.capacity_byte, "byte", 3)
    verdict = "fits" if summary["fits"] else "DOES NOT FIT"
    return AnswerLine("memory", verdict, f"{need} of {capacity} usable: {', '.join(purposes)}")


def draw_training(result: TrainingResult) -> Figure:
    """Draw power over a step, and hours against kWh at several power limits."""
    figure = new_figure(10.0, 4.2)
    step_axes, trade_axes = figure.subplots(1, 2)
    _draw_step(step_axes, result)
    _draw_trade(trade_axes, result)
    figure.suptitle(f"{_write_title(result)}, {show_plain(result.hours, 3)} h")
    return add_caption(figure, "; ".join(result.assumptions[:FEW_NOTES]))


def _draw_step(axes: Axes, result: TrainingResult) -> None:
    """Draw the power of all GPUs over the parts of a step."""
    begin_s = 0.0
    for part, colour in zip(power_over_step(result), SERIES_COLOURS, strict=False):
        length_s = float(part["length_s"])
        power_kw = float(part["power_w"]) / 1e3
        label = str(part["part"])
        axes.bar(
            begin_s,
            power_kw,
            width=length_s,
            align="edge",
            color=colour,
            label=label,
        )
        begin_s += length_s
    axes.set(xlabel="Time in a step (s)", ylabel="Power of all GPUs (kW)")
    axes.margins(y=0.25)
    axes.legend(
        frameon=False,
        loc="upper right",
        ncols=2,
    )


def _draw_trade(axes: Axes, result: TrainingResult) -> None:
    """Draw hours against kWh at several power limits, with a ring at the recommended one."""
    limits_w, _, hours, kwh = np.array(result.curve).T
    axes.plot(hours, kwh, "-o", color=SERIES_COLOURS[0])
    for limit_w, _, hour, energy in result.curve:
        place = (hour, energy)
        axes.annotate(f"{limit_w:.0f} W", place, textcoords="offset points", xytext=(6, 6))
    best = limits_w.tolist().index(recommend_limit(result))
    ring: dict[str, Any] = {
        "ms": 11,
        "mfc": "none",
        "color": SERIES_COLOURS[1],
    }
    axes.plot(
        hours[best],
        kwh[best],
        "o",
        label="recommended",
        **ring,
    )
    axes.set(xlabel="Time (h)", ylabel="Energy of the GPUs (kWh)")
    axes.legend(frameon=False)
