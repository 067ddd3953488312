"""Show a training job: one screen of text, JSON, and a figure."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from wattcast.core import units
from wattcast.predictor.answer_lines import AnswerLine, count_digits, round_number, span_numbers
from wattcast.predictor.prediction_json import take_fields
from wattcast.report.figure_style import SERIES_COLOURS, Figure, add_caption, new_figure
from wattcast.report.text_tables import new_table, print_answers, print_notes
from wattcast.training.train_job import TrainingResult

_PARTS = ("compute", "exchange", "bubble", "optimiser")
_MEMORY = ("weight", "gradient", "optimiser", "activation", "passing")


def summarise_training(result: TrainingResult) -> dict[str, Any]:
    """Return all figures of a job as plain values, as ``--json`` prints them."""
    low, high = result.relative_interval
    best = recommend_limit(result)
    return {
        **take_fields(result, "model", "gpu", "gpus", "tokens", "seq"),
        "strategy": {
            **take_fields(result.strategy, "dp", "tp", "pp", "cp", "ep", "interleave"),
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
        ),
        "energy_j_per_token": result.energy_kwh * 3.6e6 / result.tokens,
        "cost": result.cost,
        "currency": result.prices.currency or None,
        "carbon_kg": result.carbon_kg,
        "interval": {
            "level": 0.9,
            "hours": [result.hours * low, result.hours * high],
            "tokens_per_s": [result.tokens_per_s / high, result.tokens_per_s / low],
            "energy_kwh": [result.energy_kwh * low, result.energy_kwh * high],
        },
        "memory_byte": {
            **{name: float(getattr(result.memory, f"{name}_byte")) for name in _MEMORY},
            "total": result.memory.total_byte,
            "usable": result.capacity_byte,
        },
        "fits": result.memory.total_byte <= result.capacity_byte,
        "power_limits": [
            {"power_limit_w": w, "clock_hz": hz, "hours": h, "energy_kwh": e}
            for w, hz, h, e in result.curve
        ],
        "recommended_power_limit_w": best,
        "pipeline_slack_kwh": result.slack_kwh,
        "assumptions": list(result.assumptions),
    }


def power_over_step(result: TrainingResult) -> list[dict[str, float | str]]:
    """Return the parts of a step in order with their length and the power of all GPUs meanwhile."""
    step = result.step
    compute_w = float(step.compute_w) * result.gpus
    waiting_w = float(step.waiting_w) * result.gpus
    power = {
        "compute": compute_w,
        "exchange": waiting_w,
        "bubble": waiting_w,
        "optimiser": compute_w,
    }
    lengths = {part: float(getattr(step, f"{part}_s")) for part in _PARTS}
    return [
        {"part": part, "length_s": s, "power_w": power[part]}
        for part, s in lengths.items()
        if s > 0.0
    ]


def recommend_limit(result: TrainingResult) -> float:
    """Return the power limit that takes the least energy among those that cost at most a tenth more
    time.
    """
    return min((e, w) for w, _, h, e in result.curve if h <= 1.1 * result.curve[0][2])[1]


def print_training(
    console: Console, result: TrainingResult, details: bool = False, search: bool = False
) -> None:
    """Print the answer first, then the step, the memory, the trade of a power limit, and what was
    assumed.
    """
    found = summarise_training(result)
    print_answers(console, _write_title(result), _list_answers(result, found))
    best = found["recommended_power_limit_w"]
    title = "What a power limit or a clock would trade"
    limits = [
        (
            f"{w:.0f} W{' <- recommended' * (w == best)}",
            units.show(hz, "Hz", 3),
            f"{hours:.3g}",
            f"{kwh:.3g}",
        )
        for w, hz, hours, kwh in result.curve
    ]
    console.print(new_table("power limit", "clock", "hours", "kWh", title=title, rows=limits))
    if result.slack_kwh:
        console.print(
            f"lower clocks on waiting stages would save {result.slack_kwh:.3g} kWh at no loss of time"
        )
    if search:
        ways = new_table(
            "strategy", "step", "J a GPU", "memory", title="Ways to share it, the best first"
        )
        for way in result.candidates[:20]:
            took = ("does not fit", "")
            if way.step is not None:
                took = (
                    units.show(float(way.step.latency_s), "s"),
                    units.show(float(way.step.energy_j), "J"),
                )
            ways.add_row(str(way.strategy), *took, units.show(way.memory.total_byte, "byte"))
        console.print(ways)
    print_notes(console, result.assumptions if details else result.assumptions[:4])


def _write_title(result: TrainingResult) -> str:
    return f"{result.model}: {result.tokens:,.0f} tokens on {result.gpus} x {result.gpu}"


def _list_answers(result: TrainingResult, found: dict[str, Any]) -> list[AnswerLine]:
    """Return what people ask of a job, with its spread: hours, kWh, watts, money, speed, memory."""
    ends = np.array(result.relative_interval)
    hours, hours_span = span_numbers(result.hours, result.hours * ends)
    digits = count_digits(result.hours, *(result.hours * ends))
    show = partial(units.show, digits=digits)
    number = partial(round_number, digits=digits)
    pue = "" if result.prices.pue == 1.0 else f" and a PUE of {result.prices.pue:g}"
    with_hosts = f"{number(result.site_energy_kwh)} kWh with hosts{pue}"
    each_token = f"{number(found['energy_j_per_token'])} J/token"
    peak = show(result.peak_power_w, "W")
    lines = [
        AnswerLine("time", f"{hours} h", f"{hours_span} h; {number(result.gpu_hours)} GPU hours"),
        AnswerLine(
            "energy", f"{number(result.energy_kwh)} kWh", f"at the GPUs; {with_hosts}; {each_token}"
        ),
        AnswerLine(
            "power", show(result.power_w, "W"), f"mean of all GPUs; {peak} while all compute"
        ),
    ]
    spent = (("cost", result.cost, result.prices.currency), ("carbon", result.carbon_kg, "kg CO2e"))
    lines += [
        AnswerLine(name, f"{number(value)} {unit}")
        for name, value, unit in spent
        if value is not None
    ]
    each = f"{number(result.tokens_per_s / result.gpus)} a GPU; {result.mfu:.0%} of the peak (MFU)"
    parts = ", ".join(
        f"{name} {s / result.step_s:.0%}" for name, s in found["step_parts_s"].items() if s > 0.0
    )
    byte = found["memory_byte"]
    memory = ", ".join(
        f"{name} {units.show(byte[name], 'byte', 3)}" for name in _MEMORY if byte[name]
    )
    need, have = (
        units.show(byte, "byte", 3) for byte in (result.memory.total_byte, result.capacity_byte)
    )
    verdict = "fits" if found["fits"] else "DOES NOT FIT"
    return [
        *lines,
        AnswerLine("speed", f"{number(result.tokens_per_s)} tokens/s", each),
        AnswerLine("step", show(result.step_s, "s"), f"of {result.step_tokens:,} tokens: {parts}"),
        AnswerLine("shared", str(result.strategy), result.reason),
        AnswerLine("memory", verdict, f"{need} of {have} usable: {memory}"),
    ]


def draw_training(result: TrainingResult) -> Figure:
    """Draw power over a step, and hours against kWh at several power limits with the recommended
    one.
    """
    figure = new_figure(10.0, 4.2)
    left, right = figure.subplots(1, 2)
    begin = 0.0
    for part, colour in zip(power_over_step(result), SERIES_COLOURS, strict=False):
        length = float(part["length_s"])
        watts = float(part["power_w"])
        left.bar(
            begin, watts / 1e3, width=length, align="edge", color=colour, label=str(part["part"])
        )
        begin += length
    left.set(xlabel="Time in a step (s)", ylabel="Power of all GPUs (kW)")
    left.margins(y=0.25)
    left.legend(frameon=False, loc="upper right", ncols=2)
    watts, _, hours, kwh = np.array(result.curve).T
    right.plot(hours, kwh, "-o", color=SERIES_COLOURS[0])
    for w, _, h, e in result.curve:
        right.annotate(f"{w:.0f} W", (h, e), textcoords="offset points", xytext=(6, 6))
    best = list(watts).index(recommend_limit(result))
    right.plot(
        hours[best], kwh[best], "o", ms=11, mfc="none", color=SERIES_COLOURS[1], label="recommended"
    )
    right.set(xlabel="Time (h)", ylabel="Energy of the GPUs (kWh)")
    right.legend(frameon=False)
    figure.suptitle(f"{_write_title(result)}, {result.hours:.3g} h")
    return add_caption(figure, "; ".join(result.assumptions[:4]))
