"""Say the answer of a prediction in a few words: one line, a card, and the lines that a screen begins with.

Numbers carry as many digits as their interval deserves.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.strict_files import FitStatus
from wattcast.core.units import show

if TYPE_CHECKING:
    from wattcast.predictor.prediction import Prediction, Values

GOOD, FAIR = 0.15, 0.35  # largest half-width of an interval, over the value, that is called good and fair
MUCH_WAITING = 0.1  # share of the time beyond which the host, which differs by machine, decides


@dataclass(frozen=True)
class AnswerLine:
    """One line of the answer: what it is, the number, and how far it may be off or what it means."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class Confidence:
    """How sure a prediction is: ``good``, ``fair`` or ``rough``, and why."""

    word: str
    reason: str


def count_digits(value: float, low: float, high: float) -> int:
    """Return how many significant digits a value deserves between the ends of its interval.

    >>> count_digits(8.7508, 7.07, 11.2), count_digits(8.7508, 8.6, 8.9), count_digits(8.7508, 8.749, 8.752)
    (2, 3, 4)
    """
    half = (high - low) / 2.0 / value if value > 0.0 else 1.0
    return 2 if half >= 0.05 else 3 if half >= 0.005 else 4


def round_number(value: float, digits: int) -> str:
    """Return a number with so many significant digits, and commas between thousands.

    >>> round_number(21345.6, 2), round_number(0.2741, 2), round_number(7.0, 2)
    ('21,000', '0.27', '7')
    """
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def judge_confidence(p: Prediction) -> Confidence:
    """Say in one word how sure a prediction is, from the width of its interval, and why.

    What is far from what was measured is never called good: its intervals rest on a few GPUs, clocks and limits that
    could be tried. Where the host decides, a prediction is rough: the speed of the host is not known here.
    """
    ends = [(p.latency_s, p.interval.latency_s), (p.power_w, p.interval.power_w)]
    half = max(float(np.max((e[..., 1] - e[..., 0]) / 2.0 / np.asarray(v))) for v, e in ends)
    word = "good" if half <= GOOD and p.support.inside else "fair" if half <= FAIR else "rough"
    waits = float(np.max(1.0 - np.asarray(p.busy_s) / np.asarray(p.latency_s)))
    why = [f"{p.gpu} is {p.status}" if p.status is not FitStatus.FORECAST else f"{p.gpu} is forecast, not measured"]
    if waits > MUCH_WAITING:
        word = "rough"
        why.insert(0, f"{waits:.0%} of the time waits for the host, whose speed differs by machine")
    if word != "good":
        why.insert(0, f"{p.interval.level:.0%} intervals reach {half:.0%} either way")
    return Confidence(word, "; ".join(why))


def support_line(p: Prediction) -> AnswerLine:
    """Return how far a prediction is from what was measured: one word, and why."""
    return AnswerLine("support", p.support.word, p.support.reason)


def list_answers(p: Prediction) -> list[AnswerLine]:
    """Return the answer of one configuration, most wanted first: speed, joules, watts, latency, memory, money."""
    lines, many = [], p.gpu_count > 1
    latency, energy = p.interval.latency_s, p.interval.energy_j * p.gpu_count
    all_w = show_between(p.total_power_w, p.interval.power_w * p.gpu_count, "W")
    phase, item = p.basis.graph.phase, p.basis.graph.item
    token = {"prefill": "prompt token", "train": "trained token"}.get(phase, "token")
    for count, word, what in ((p.tokens, "token", token), (p.items, item, item)):
        if count is not None:
            speed = span_numbers(count / float(p.latency_s), count / latency[::-1])
            lines.append(AnswerLine("throughput", f"{speed[0]} {what}s/s", f"{speed[1]} {word}s/s"))
    for count, word in ((p.tokens, "token"), (p.items, item)):
        if count is not None:
            each_j = float(p.total_energy_j) / count
            value, span = span_numbers(each_j, energy / count)
            value, span = (f"{value} J", f"{span} J") if each_j > 1e-3 else show_between(each_j, energy / count, "J")
            lines.append(AnswerLine("energy", f"{value}/{word}", span))
    if not lines:
        value, span = show_between(p.total_energy_j, energy, "J")
        lines.append(AnswerLine("energy", f"{value} a run", span))
    one_w = show_between(p.power_w, p.interval.power_w, "W")[0]
    capped = "; the power limit holds the clock down" if p.capped else ""
    each = f"{p.gpu_count} GPUs of {one_w} each" if many else "one GPU"
    lines.append(AnswerLine("total power", all_w[0], f"{all_w[1]}; {each}{capped}"))
    value, span = show_between(p.latency_s, latency, "s")
    run = {"decode": " a step", "train": " a step", "generate": " a generation", "prefill": " a prefill"}
    lines.append(AnswerLine("latency", f"{value}{run.get(phase, '')}", span))
    lines.append(_memory_line(p))
    if p.cost is not None:
        lines.append(_money_line(p))
    if p.carbon_g is not None:
        per, runs = ("million tokens", p.tokens / 1e6) if p.tokens else ("run", 1.0)
        lines.append(AnswerLine("carbon", f"{round_number(float(p.carbon_g) / runs, 2)} g CO2e per {per}"))
    return lines


def show_between(value: Values, ends: Array, unit: str) -> tuple[str, str]:
    """Return a value with the digits it deserves, and its interval."""
    low, high = float(ends[..., 0]), float(ends[..., 1])
    digits = count_digits(float(value), low, high)
    return show(float(value), unit, digits), f"{show(low, unit, digits)} to {show(high, unit, digits)}"


def span_numbers(value: float, ends: Array) -> tuple[str, str]:
    """Return what ``show_between`` does for a number without a unit."""
    digits = count_digits(value, float(ends[0]), float(ends[1]))
    return round_number(value, digits), " to ".join(round_number(float(end), digits) for end in ends)


def _memory_line(p: Prediction) -> AnswerLine:
    capacity = show(float(np.min(p.basis.gpu.memory.capacity_byte)), "byte", 3)
    if p.memory_byte is None:
        return AnswerLine("memory", "unknown", f"the workload does not say; the GPU has {capacity}")
    each = " on each GPU" if p.gpu_count > 1 else ""
    return AnswerLine(
        "memory", "fits" if p.fits else "DOES NOT FIT", f"{show(p.memory_byte, 'byte', 3)} of {capacity}{each}"
    )


def _money_line(p: Prediction) -> AnswerLine:
    unit = f" {p.prices.currency}" if p.prices.currency else ""
    if p.cost_per_million_tokens is not None:
        return AnswerLine("cost", f"{round_number(float(p.cost_per_million_tokens), 2)}{unit} per million tokens")
    assert p.cost is not None
    per, count = (f"thousand {p.basis.graph.item}s", p.items / 1e3) if p.items else ("run", 1.0)
    return AnswerLine("cost", f"{round_number(float(p.cost) / count, 2)}{unit} per {per}")


def title_of(p: Prediction) -> str:
    """Return workload (whose name has the stack) and GPUs in one line."""
    count = f"{p.gpu_count} x " if p.gpu_count > 1 else ""
    return f"{p.name} on {count}{p.gpu}"


# Beginnings of assumptions, those that move an answer most first. What a user did not choose and what was never tried
# come before what is usual.
_WEIGHTY = (
    *("the power limit cannot be met", "collectives", "forecast", "no engine template", "stack", "phase", "seq"),
    *("tokens", "pictures", "the cache grows", "fused attention is assumed", "fp8", "int8", "one of"),
    *("power limit", "host", "data", "clock"),
)


def rank_assumptions(p: Prediction) -> list[str]:
    """Return what was assumed, that which moves the answer most first; a unit that is missing goes before all."""
    waits = float(p.busy_s) < (1.0 - MUCH_WAITING) * float(p.latency_s)

    def weight(note: str) -> int:
        if " has no " in note or "more than the" in note or (waits and note.startswith("host")):
            return -1
        return next((i for i, start in enumerate(_WEIGHTY) if note.startswith(start)), len(_WEIGHTY))

    return sorted(p.assumptions, key=weight)


def summarise_line(p: Prediction) -> str:
    """Return a prediction in one line; a sweep as its size and its ranges."""
    if isinstance(p.latency_s, float):
        shown = [line.value for line in list_answers(p) if line.label not in ("memory", "cost", "carbon")]
        sure = judge_confidence(p).word
        return (
            f"<Prediction {title_of(p)}: {', '.join(shown)}, {sure}{'' if p.fits is not False else ', DOES NOT FIT'}>"
        )
    ranges = [
        f"{show(float(np.min(values)), unit, 3)} to {show(float(np.max(values)), unit, 3)}"
        for values, unit in ((p.latency_s, "s"), (p.total_power_w, "W"), (p.total_energy_j, "J"))
    ]
    return f"<Prediction {title_of(p)}: sweep of {p.latency_s.shape}, {', '.join(ranges)}>"


def summarise_card(p: Prediction) -> str:
    """Return a prediction as a small HTML table for notebooks."""
    if not isinstance(p.latency_s, float):
        return f"<p>{html.escape(summarise_line(p))}</p>"
    sure = judge_confidence(p)
    rows = "".join(
        f"<tr><td style='text-align:left'>{html.escape(line.label)}</td>"
        f"<td style='text-align:left'><b>{html.escape(line.value)}</b></td>"
        f"<td style='text-align:left;opacity:.75'>{html.escape(line.remark)}</td></tr>"  # on any background
        for line in (*list_answers(p), AnswerLine("how sure", sure.word, sure.reason), support_line(p))
    )
    caption = f"<caption style='text-align:left'>{html.escape(title_of(p))}</caption>"
    return f"<table style='color:inherit'>{caption}{rows}</table>"
