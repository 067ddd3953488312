"""Say a prediction in a few words: one line, a card, or the lines that a screen begins with.

Numbers carry as many digits as their interval deserves.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array
from wattcast.core.strict_files import FitStatus
from wattcast.core.units import show
from wattcast.predictor.prediction_values import PredictionValues, Values


class AnswerCoefficients(Coefficients):
    """When words and digits change; widths are half-widths of an interval over the value."""

    good_width: float  # the largest that is called good
    fair_width: float  # the largest that is called fair
    much_waiting: (
        float  # share of the time beyond which the host, which differs by machine, decides
    )
    two_digits_width: float  # the least that is shown with two digits
    three_digits_width: float  # the least that is shown with three digits


ANSWERS_IN_WORDS = load_coefficients("answers", AnswerCoefficients)

_LEAST_SHOWN_J = 1e-3  # a smaller energy of an item is not worth a line
_USUAL_DIGITS, _MOST_DIGITS = 3, 4
MUCH_WAITING = ANSWERS_IN_WORDS.much_waiting

# Beginnings of assumptions, those that move an answer most first. What a user did not choose and
# what was never tried come before what is usual.
_WEIGHTY_ASSUMPTIONS = (
    "the power limit cannot be met",
    "collectives",
    "forecast",
    "no engine template",
    "stack",
    "phase",
    "seq",
    "tokens",
    "pictures",
    "the cache grows",
    "fused attention is assumed",
    "fp8",
    "int8",
    "one of",
    "power limit",
    "host",
    "data",
    "clock",
)
_RUN_OF_PHASE = {
    "decode": " a step",
    "train": " a step",
    "generate": " a generation",
    "prefill": " a prefill",
}
_TOKEN_OF_PHASE = {"prefill": "prompt token", "train": "trained token"}


@dataclass(frozen=True)
class AnswerLine:
    """One line of the answer: what it is, the number, and how far it may be off or what it
    means.
    """

    label: str
    value: str
    remark: str = ""


def list_answers(p: PredictionValues) -> list[AnswerLine]:
    """Return the answer of one configuration, most wanted first: speed, joules, watts, latency,
    memory, money.
    """
    return [
        *_list_speeds(p),
        *_list_energies(p),
        _describe_power(p),
        _describe_latency(p),
        _describe_memory(p),
        *_list_costs(p),
    ]


def _list_counts(p: PredictionValues) -> Iterator[tuple[int, str, str]]:
    """Yield how many tokens or items a run makes, their name, and what they are in full."""
    if p.tokens is not None:
        yield p.tokens, "token", _TOKEN_OF_PHASE.get(p.basis.graph.phase, "token")
    if p.items is not None:
        item = p.basis.graph.item
        yield p.items, item, item


def _list_speeds(p: PredictionValues) -> Iterator[AnswerLine]:
    for count, word, full_name in _list_counts(p):
        ends_per_s = count / p.interval.latency_s[::-1]
        speed, span = span_numbers(count / float(p.latency_s), ends_per_s)
        yield AnswerLine("throughput", f"{speed} {full_name}s/s", f"{span} {word}s/s")


def _list_energies(p: PredictionValues) -> Iterator[AnswerLine]:
    energy_ends_j = p.interval.energy_j * p.gpu_count
    counts = list(_list_counts(p))
    for count, word, _ in counts:
        each_j = float(p.total_energy_j) / count
        each_ends_j = energy_ends_j / count
        if each_j > _LEAST_SHOWN_J:
            number, number_span = span_numbers(each_j, each_ends_j)
            value = f"{number} J"
            span = f"{number_span} J"
        else:
            value, span = show_between(each_j, each_ends_j, "J")
        yield AnswerLine("energy", f"{value}/{word}", span)
    if not counts:
        value, span = show_between(p.total_energy_j, energy_ends_j, "J")
        yield AnswerLine("energy", f"{value} a run", span)


def _describe_power(p: PredictionValues) -> AnswerLine:
    value, span = show_between(p.total_power_w, p.interval.power_w * p.gpu_count, "W")
    gpus = "one GPU"
    if p.gpu_count > 1:
        one_gpu_w, _ = show_between(p.power_w, p.interval.power_w, "W")
        gpus = f"{p.gpu_count} GPUs of {one_gpu_w} each"
    remark = f"{span}; {gpus}"
    if p.capped:
        remark += f"; {describe_cap(p)}"
    return AnswerLine("total power", value, remark)


def describe_cap(p: PredictionValues) -> str:
    """Say of which part of a run the power limit holds the clock down; empty where it does of
    none.
    """
    if not p.capped:
        return ""
    capped_phases = [phase.name for phase in p.phases if phase.capped]
    if not capped_phases or len(capped_phases) == len(p.phases):
        return "the power limit holds the clock down"
    return f"the power limit holds the clock down in {', '.join(capped_phases)}"


def _describe_latency(p: PredictionValues) -> AnswerLine:
    value, span = show_between(p.latency_s, p.interval.latency_s, "s")
    graph = p.basis.graph
    run = _RUN_OF_PHASE.get(graph.phase, "")
    if graph.parts:
        pictures = (graph.items or 1) // graph.gpu_count
        run = f" a {graph.item}" if pictures == 1 else f" for {pictures} {graph.item}s"
    return AnswerLine("latency", f"{value}{run}", span)


def _describe_memory(p: PredictionValues) -> AnswerLine:
    capacity = show(float(np.min(p.basis.gpu.memory.capacity_byte)), "byte", 3)
    if p.memory_byte is None:
        remark = f"the workload does not say; the GPU has {capacity}"
        return AnswerLine("memory", "unknown", remark)
    verdict = "fits" if p.fits else "DOES NOT FIT"
    remark = f"{show(p.memory_byte, 'byte', 3)} of {capacity}"
    if p.gpu_count > 1:
        remark += " on each GPU"
    return AnswerLine("memory", verdict, remark)


def _list_costs(p: PredictionValues) -> Iterator[AnswerLine]:
    if p.cost is not None:
        money = p.cost
        what = "run"
        if p.cost_per_million_tokens is not None:
            money = p.cost_per_million_tokens
            what = "million tokens"
        elif p.items:
            money = p.cost / (p.items / 1e3)
            what = f"thousand {p.basis.graph.item}s"
        unit = f" {p.prices.currency}" if p.prices.currency else ""
        yield AnswerLine("cost", f"{round_number(float(money), 2)}{unit} per {what}")
    if p.carbon_g is not None:
        grams = float(p.carbon_g)
        what = "run"
        if p.tokens:
            grams = grams / (p.tokens / 1e6)
            what = "million tokens"
        yield AnswerLine("carbon", f"{round_number(grams, 2)} g CO2e per {what}")


def judge_confidence(p: PredictionValues) -> AnswerLine:
    """Say how sure a prediction is, ``good``, ``fair`` or ``rough`` from the width of its interval,
    and why.

    What is far from what was measured is never called good: its intervals rest on a few GPUs,
    clocks and limits that could be tried. Where the host decides, a prediction is rough: the speed
    of the host is not known here.
    """
    latency_width = _relative_half_width(p.latency_s, p.interval.latency_s)
    power_width = _relative_half_width(p.power_w, p.interval.power_w)
    half_width = max(latency_width, power_width)
    word = "rough"
    if half_width <= ANSWERS_IN_WORDS.good_width and p.support.inside:
        word = "good"
    elif half_width <= ANSWERS_IN_WORDS.fair_width:
        word = "fair"

    reasons = [f"{p.gpu} is {p.status}"]
    if p.status is FitStatus.FORECAST:
        reasons = [f"{p.gpu} is forecast, not measured"]
    busy_share = np.asarray(p.busy_s) / np.asarray(p.latency_s)
    waiting = float(np.max(1.0 - busy_share))
    if waiting > MUCH_WAITING:
        word = "rough"
        host = f"{waiting:.0%} of the time waits for the host, whose speed differs by machine"
        reasons.insert(0, host)
    if word != "good":
        reasons.insert(0, f"{p.interval.level:.0%} intervals reach {half_width:.0%} either way")
    return AnswerLine("how sure", word, "; ".join(reasons))


def _relative_half_width(values: Values, ends: Array) -> float:
    """Return the largest half-width of intervals ``(*sweep, 2)`` over their values."""
    width = ends[..., 1] - ends[..., 0]
    return float(np.max(width / 2.0 / np.asarray(values)))


def support_line(p: PredictionValues) -> AnswerLine:
    """Return how far a prediction is from what was measured: one word, and why."""
    return AnswerLine("support", p.support.word, p.support.reason)


def rank_assumptions(p: PredictionValues) -> list[str]:
    """Return what was assumed, that which moves the answer most first; a unit that is missing goes
    before all.
    """
    host_decides = float(p.busy_s) < (1.0 - MUCH_WAITING) * float(p.latency_s)

    def rank(note: str) -> int:
        if note.startswith("careful: "):
            return -2
        is_missing = " has no " in note or "more than the" in note
        if is_missing or (host_decides and note.startswith("host")):
            return -1
        for place, beginning in enumerate(_WEIGHTY_ASSUMPTIONS):
            if note.startswith(beginning):
                return place
        return len(_WEIGHTY_ASSUMPTIONS)

    return sorted(p.assumptions, key=rank)


def count_digits(
    value: float,
    low: float,
    high: float,
) -> int:
    """Return how many significant digits a value deserves between the ends of its interval.

    >>> count_digits(8.7508, 7.07, 11.2), count_digits(8.7508, 8.6, 8.9)
    (2, 3)
    >>> count_digits(8.7508, 8.749, 8.752)
    4
    """
    half_width = (high - low) / 2.0 / value if value > 0.0 else 1.0
    if half_width >= ANSWERS_IN_WORDS.two_digits_width:
        return 2
    is_wide = half_width >= ANSWERS_IN_WORDS.three_digits_width
    return _USUAL_DIGITS if is_wide else _MOST_DIGITS


def round_number(value: float, digits: int) -> str:
    """Return a number with so many significant digits, and commas between thousands.

    >>> round_number(21345.6, 2), round_number(0.2741, 2), round_number(7.0, 2)
    ('21,000', '0.27', '7')
    """
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 10 ** (digits - 1):
        return f"{rounded:,.0f}"
    return f"{rounded:.{digits}g}"


def show_between(
    value: Values,
    ends: Array,
    unit: str,
) -> tuple[str, str]:
    """Return a value with the digits it deserves, and its interval."""
    low = float(ends[..., 0])
    high = float(ends[..., 1])
    digits = count_digits(float(value), low, high)
    span = f"{show(low, unit, digits)} to {show(high, unit, digits)}"
    return show(float(value), unit, digits), span


def span_numbers(value: float, ends: Array) -> tuple[str, str]:
    """Return what ``show_between`` does for a number without a unit."""
    low = float(ends[0])
    high = float(ends[1])
    digits = count_digits(value, low, high)
    span = f"{round_number(low, digits)} to {round_number(high, digits)}"
    return round_number(value, digits), span


def title_of(p: PredictionValues) -> str:
    """Return workload (whose name has the stack) and GPUs in one line."""
    count = f"{p.gpu_count} x " if p.gpu_count > 1 else ""
    return f"{p.name} on {count}{p.gpu}"


def summarise_line(p: PredictionValues) -> str:
    """Return a prediction in one line; a sweep as its size and its ranges."""
    if not isinstance(p.latency_s, float):
        latency = _show_range(p.latency_s, "s")
        power = _show_range(p.total_power_w, "W")
        energy = _show_range(p.total_energy_j, "J")
        shape = p.latency_s.shape
        return f"<Prediction {title_of(p)}: sweep of {shape}, {latency}, {power}, {energy}>"
    lines = [line for line in list_answers(p) if line.label not in ("memory", "cost", "carbon")]
    answers = ", ".join(line.value for line in lines)
    warning = ", DOES NOT FIT" if p.fits is False else ""
    return f"<Prediction {title_of(p)}: {answers}, {judge_confidence(p).value}{warning}>"


def _show_range(values: Array, unit: str) -> str:
    low = show(float(np.min(values)), unit, 3)
    high = show(float(np.max(values)), unit, 3)
    return f"{low} to {high}"


def summarise_card(p: PredictionValues) -> str:
    """Return a prediction as a small HTML table for notebooks."""
    if not isinstance(p.latency_s, float):
        return f"<p>{html.escape(summarise_line(p))}</p>"
    lines = [*list_answers(p), judge_confidence(p), support_line(p)]
    rows = "".join(_write_table_row(line) for line in lines)
    caption = f"<caption style='text-align:left'>{html.escape(title_of(p))}</caption>"
    return f"<table style='color:inherit'>{caption}{rows}</table>"


def _write_table_row(line: AnswerLine) -> str:
    # colours and opacity are such that the row can be read on any background
    return (
        f"<tr><td style='text-align:left'>{html.escape(line.label)}</td>"
        f"<td style='text-align:left'><b>{html.escape(line.value)}</b></td>"
        f"<td style='text-align:left;opacity:.75'>{html.escape(line.remark)}</td></tr>"
    )
