"""Write predictions as JSON, tables and a few words.

The schema is that of ``predict --json`` and of the HTTP interface. In words, an answer is one line,
a card, or the lines that a screen begins with; numbers carry as many digits as their interval
deserves."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from wattcast import __version__
from wattcast.core.arrays import Array
from wattcast.core.errors import MissingTool
from wattcast.core.strict_files import FitStatus
from wattcast.core.units import show
from wattcast.workload.readers.from_json import operator_to_plain

if TYPE_CHECKING:
    from wattcast.predictor.prediction import (
        ModuleShare,
        OperatorShare,
        PhaseShare,
        Prediction,
        Values,
    )

# largest half-width of an interval, over the value, that is called good and fair
GOOD = 0.15
FAIR = 0.35
MUCH_WAITING = 0.1  # share of the time beyond which the host, which differs by machine, decides


def take_fields(of: object, *names: str) -> dict[str, Any]:
    """Return some attributes of an object by name, as JSON has them."""
    return {name: getattr(of, name) for name in names}


class ModuleOut(msgspec.Struct):
    name: str
    power_w: float
    utilisation: float | None  # 0 to 1; null where no peak rate is known


class OperatorOut(msgspec.Struct):
    operator: str  # as tables print it
    name: str
    shape: dict[str, Any]  # the operator as a workload file writes it
    label: str
    count: int
    latency_s: float  # of all calls
    power_w: float  # mean while running
    energy_j: float  # of all calls
    modules: list[ModuleOut]


class IntervalOut(msgspec.Struct):
    level: float
    latency_s: tuple[float, float]
    power_w: tuple[float, float]
    energy_j: tuple[float, float]


class PhaseOut(msgspec.Struct):
    name: str  # prefill, decode, forward, backward, optimiser, or an operator
    latency_s: float
    power_w: float  # of one GPU, mean over the phase
    energy_j: float  # of one GPU
    clock_hz: float  # mean over the phase
    capped: bool


class DistanceOut(msgspec.Struct):
    # kernels, number format, clock, power limit, temperature, stack, parallelism, host, GPU
    dimension: str
    word: str  # measured | near | far
    share: float  # of time or energy, the larger, beyond what was measured
    reason: str


class SupportOut(msgspec.Struct):
    inside: bool  # measured or near
    word: str  # measured | near | far, the worst of all distances
    reason: str
    confidence: str  # good | fair | rough
    why: str
    distances: list[DistanceOut]


class ProvenanceOut(msgspec.Struct):
    status: str
    source: str
    date: str
    device: str
    note: str


class PredictionOut(msgspec.Struct):
    name: str
    gpu: str
    stack: str  # what issues the kernels; empty where a list of operators does not say
    gpu_count: int
    tokens: (
        int | None
    )  # of one run on all GPUs; what a token is: the docstring of wattcast.Prediction
    tokens_per_s: float | None
    energy_j_per_token: float | None
    items: int | None  # pictures, denoising steps, audio clips
    items_per_s: float | None
    energy_j_per_item: float | None
    total_power_w: float  # of all GPUs
    total_energy_j: float  # of one run on all GPUs
    cost: float | None  # of one run on all GPUs, in ``currency``; null where no price is given
    cost_per_million_tokens: float | None
    currency: str
    carbon_g: float | None  # of one run on all GPUs
    latency_s: float
    power_w: float  # of one GPU
    energy_j: float  # of one GPU
    clock_hz: float
    effective_clock_hz: float
    capped: bool
    interval: IntervalOut
    support: SupportOut
    memory_byte: float | None
    fits: bool | None  # in the GPU's memory; null: unknown
    busy_s: float
    peak_power_w: float
    modules: list[ModuleOut]
    ops: list[OperatorOut]
    assumptions: list[str]
    provenance: ProvenanceOut
    phases: list[
        PhaseOut
    ] = []  # that the power limit holds at clocks of their own; empty: one clock for all


class PredictOut(msgspec.Struct):
    wattcast: str
    predictions: list[PredictionOut]


def predictions_to_output(
    predictions: Sequence[Prediction], most_ops: int | None = None
) -> PredictOut:
    """Convert single-point predictions to the output schema, in order; ``most_ops``: those of most
    energy alone.
    """
    return PredictOut(__version__, [_write_prediction(p, most_ops) for p in predictions])


def prediction_to_plain(p: Prediction) -> dict[str, Any]:
    """Return one configuration in the output schema, or a sweep as lists of numbers in its shape."""
    if isinstance(p.latency_s, float):
        plain: dict[str, Any] = msgspec.to_builtins(_write_prediction(p))
        return plain
    shape = p.latency_s.shape
    found: dict[str, Any] = {"name": p.name, "gpu": p.gpu, "stack": p.stack, "shape": list(shape)}
    for name in (*ANSWERS, *SWEPT):
        value = getattr(p, name)
        found[name] = value.tolist() if isinstance(value, np.ndarray) else value
    found |= {"support": np.broadcast_to(p.support.words, shape).tolist()}
    return found | {
        "memory_byte": p.memory_byte,
        "fits": p.fits,
        "assumptions": list(p.assumptions),
    }


def prediction_to_frame(p: Prediction) -> Any:
    """Return a data frame with a row for each configuration, in the order of the sweep's flattened
    shape.
    """
    shape = np.shape(p.latency_s)
    columns: dict[str, Any] = {"name": p.name, "gpu": p.gpu, "stack": p.stack}
    columns |= {name: getattr(p, name) for name in (*ANSWERS, *SWEPT)}
    columns |= {"support": p.support.words, "memory_byte": p.memory_byte, "fits": p.fits}
    known = {name: value for name, value in columns.items() if value is not None}
    table = {
        name: np.broadcast_to(np.asarray(value), shape).ravel() for name, value in known.items()
    }
    for library in ("polars", "pandas"):
        try:
            frames = import_module(library)
        except ImportError:
            continue
        return frames.DataFrame({name: value.tolist() for name, value in table.items()})
    raise MissingTool(
        "a data frame needs polars or pandas. Install it: pip install 'wattcast[explore]', or pandas."
    )


ANSWERS = (
    "gpu_count", "tokens", "tokens_per_s", "energy_j_per_token", "items", "items_per_s", "energy_j_per_item",
    "total_power_w", "total_energy_j", "cost", "cost_per_million_tokens", "carbon_g",
)  # fmt: skip
SWEPT = (
    "latency_s",
    "power_w",
    "energy_j",
    "clock_hz",
    "effective_clock_hz",
    "capped",
    "busy_s",
    "peak_power_w",
)


def encode_json(out: object) -> bytes:
    """Encode an output struct or plain mapping as JSON text; NaN and infinity never pass."""
    return msgspec.json.format(msgspec.json.encode(out), indent=1)


def _write_prediction(p: Prediction, most_ops: int | None = None) -> PredictionOut:
    if not isinstance(p.latency_s, float):
        raise ValueError("PredictionOut holds one configuration; a sweep has prediction_to_plain")
    ops = p.ops if most_ops is None else p.rank_ops(most_ops)
    pairs = (p.interval.latency_s, p.interval.power_w, p.interval.energy_j)
    sure = judge_confidence(p)
    distances = [
        DistanceOut(d.dimension, d.word, _check_finite(np.max(d.beyond)), d.reason)
        for d in p.support.distances
    ]
    return PredictionOut(
        **take_fields(p, "name", "gpu", "stack", "memory_byte", "fits"),
        **{name: _write_number(getattr(p, name)) for name in (*ANSWERS, *SWEPT)},
        currency=p.prices.currency,
        interval=IntervalOut(
            p.interval.level, *((_check_finite(low), _check_finite(high)) for low, high in pairs)
        ),
        support=SupportOut(
            p.support.inside, p.support.word, p.support.reason, sure.value, sure.remark, distances
        ),
        modules=[_write_module(m) for m in p.modules],
        ops=[_write_operator(o) for o in ops],
        assumptions=list(p.assumptions),
        provenance=ProvenanceOut(str(p.status), *msgspec.structs.astuple(p.provenance)),
        phases=[_write_phase(phase) for phase in p.phases],
    )


def _write_phase(phase: PhaseShare) -> PhaseOut:
    return PhaseOut(
        name=phase.name,
        latency_s=_check_finite(phase.latency_s),
        power_w=_check_finite(phase.power_w),
        energy_j=_check_finite(phase.energy_j),
        clock_hz=_check_finite(phase.clock_hz),
        capped=bool(phase.capped),
    )


def describe_cap(p: Prediction) -> str:
    """Say of which part of a run the power limit holds the clock down; empty where it does of none."""
    if not p.capped:
        return ""
    held = [phase.name for phase in p.phases if phase.capped]
    if not held or len(held) == len(p.phases):
        return "the power limit holds the clock down"
    return f"the power limit holds the clock down in {', '.join(held)}"


def _write_module(module: ModuleShare) -> ModuleOut:
    busy = module.utilisation
    return ModuleOut(
        module.name, _check_finite(module.power_w), None if busy is None else _check_finite(busy)
    )


def _write_operator(share: OperatorShare) -> OperatorOut:
    op = share.op
    shape = {k: v for k, v in operator_to_plain(op).items() if k not in ("count", "label", "op")}
    return OperatorOut(
        operator=str(op),
        **take_fields(op, "name", "label"),
        shape=shape,
        count=share.count,
        latency_s=_check_finite(share.latency_s),
        power_w=_check_finite(share.power_w),
        energy_j=_check_finite(share.energy_j),
        modules=[_write_module(m) for m in share.modules],
    )


def _write_number(value: Values | int | None) -> Any:
    return value if isinstance(value, int | None) else _check_finite(value)


def _check_finite(value: Values) -> float:
    number = float(value)
    assert math.isfinite(number), "a prediction is not a finite number: this is a bug in Wattcast"
    return number


@dataclass(frozen=True)
class AnswerLine:
    """One line of the answer: what it is, the number, and how far it may be off or what it means."""

    label: str
    value: str
    remark: str = ""


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


def judge_confidence(p: Prediction) -> AnswerLine:
    """Say how sure a prediction is, ``good``, ``fair`` or ``rough`` from the width of its interval,
    and why.

    What is far from what was measured is never called good: its intervals rest on a few GPUs,
    clocks and limits that could be tried. Where the host decides, a prediction is rough: the speed
    of the host is not known here."""
    ends = [(p.latency_s, p.interval.latency_s), (p.power_w, p.interval.power_w)]
    half = max(float(np.max((e[..., 1] - e[..., 0]) / 2.0 / np.asarray(v))) for v, e in ends)
    word = "good" if half <= GOOD and p.support.inside else "fair" if half <= FAIR else "rough"
    waits = float(np.max(1.0 - np.asarray(p.busy_s) / np.asarray(p.latency_s)))
    why = [
        f"{p.gpu} is {p.status}"
        if p.status is not FitStatus.FORECAST
        else f"{p.gpu} is forecast, not measured"
    ]
    if waits > MUCH_WAITING:
        word = "rough"
        why.insert(0, f"{waits:.0%} of the time waits for the host, whose speed differs by machine")
    if word != "good":
        why.insert(0, f"{p.interval.level:.0%} intervals reach {half:.0%} either way")
    return AnswerLine("how sure", word, "; ".join(why))


def support_line(p: Prediction) -> AnswerLine:
    """Return how far a prediction is from what was measured: one word, and why."""
    return AnswerLine("support", p.support.word, p.support.reason)


def list_answers(p: Prediction) -> list[AnswerLine]:
    """Return the answer of one configuration, most wanted first: speed, joules, watts, latency,
    memory, money.
    """
    speeds = []
    joules = []
    many = p.gpu_count > 1
    latency = p.interval.latency_s
    energy = p.interval.energy_j * p.gpu_count
    all_w = show_between(p.total_power_w, p.interval.power_w * p.gpu_count, "W")
    phase = p.basis.graph.phase
    item = p.basis.graph.item
    token = {"prefill": "prompt token", "train": "trained token"}.get(phase, "token")
    for count, word, what in ((p.tokens, "token", token), (p.items, item, item)):
        if count is not None:
            speed = span_numbers(count / float(p.latency_s), count / latency[::-1])
            speeds.append(
                AnswerLine("throughput", f"{speed[0]} {what}s/s", f"{speed[1]} {word}s/s")
            )
            each_j = float(p.total_energy_j) / count
            value, span = span_numbers(each_j, energy / count)
            value, span = (
                (f"{value} J", f"{span} J")
                if each_j > 1e-3
                else show_between(each_j, energy / count, "J")
            )
            joules.append(AnswerLine("energy", f"{value}/{word}", span))
    if not joules:
        value, span = show_between(p.total_energy_j, energy, "J")
        joules.append(AnswerLine("energy", f"{value} a run", span))
    lines = [*speeds, *joules]
    one_w = show_between(p.power_w, p.interval.power_w, "W")[0]
    capped = f"; {describe_cap(p)}" if p.capped else ""
    each = f"{p.gpu_count} GPUs of {one_w} each" if many else "one GPU"
    lines.append(AnswerLine("total power", all_w[0], f"{all_w[1]}; {each}{capped}"))
    value, span = show_between(p.latency_s, latency, "s")
    run = {
        "decode": " a step",
        "train": " a step",
        "generate": " a generation",
        "prefill": " a prefill",
    }
    lines.append(AnswerLine("latency", f"{value}{run.get(phase, '')}", span))
    capacity = show(float(np.min(p.basis.gpu.memory.capacity_byte)), "byte", 3)
    each = " on each GPU" if many else ""
    if p.memory_byte is None:
        lines.append(
            AnswerLine("memory", "unknown", f"the workload does not say; the GPU has {capacity}")
        )
    else:
        held = f"{show(p.memory_byte, 'byte', 3)} of {capacity}{each}"
        lines.append(AnswerLine("memory", "fits" if p.fits else "DOES NOT FIT", held))
    if p.cost is not None:
        money = p.cost_per_million_tokens
        per = "million tokens"
        if money is None:
            money, per = (
                (p.cost / (p.items / 1e3), f"thousand {item}s") if p.items else (p.cost, "run")
            )
        unit = f" {p.prices.currency}" if p.prices.currency else ""
        lines.append(AnswerLine("cost", f"{round_number(float(money), 2)}{unit} per {per}"))
    if p.carbon_g is not None:
        per, runs = ("million tokens", p.tokens / 1e6) if p.tokens else ("run", 1.0)
        lines.append(
            AnswerLine("carbon", f"{round_number(float(p.carbon_g) / runs, 2)} g CO2e per {per}")
        )
    return lines


def show_between(value: Values, ends: Array, unit: str) -> tuple[str, str]:
    """Return a value with the digits it deserves, and its interval."""
    low = float(ends[..., 0])
    high = float(ends[..., 1])
    digits = count_digits(float(value), low, high)
    return show(
        float(value), unit, digits
    ), f"{show(low, unit, digits)} to {show(high, unit, digits)}"


def span_numbers(value: float, ends: Array) -> tuple[str, str]:
    """Return what ``show_between`` does for a number without a unit."""
    digits = count_digits(value, float(ends[0]), float(ends[1]))
    return round_number(value, digits), " to ".join(
        round_number(float(end), digits) for end in ends
    )


def title_of(p: Prediction) -> str:
    """Return workload (whose name has the stack) and GPUs in one line."""
    count = f"{p.gpu_count} x " if p.gpu_count > 1 else ""
    return f"{p.name} on {count}{p.gpu}"


# Beginnings of assumptions, those that move an answer most first. What a user did not choose and
# what was never tried come before what is usual.
_WEIGHTY = (
    *(
        "the power limit cannot be met",
        "collectives",
        "forecast",
        "no engine template",
        "stack",
        "phase",
        "seq",
    ),
    *(
        "tokens",
        "pictures",
        "the cache grows",
        "fused attention is assumed",
        "fp8",
        "int8",
        "one of",
    ),
    *("power limit", "host", "data", "clock"),
)


def rank_assumptions(p: Prediction) -> list[str]:
    """Return what was assumed, that which moves the answer most first; a unit that is missing goes
    before all.
    """
    waits = float(p.busy_s) < (1.0 - MUCH_WAITING) * float(p.latency_s)

    def weight(note: str) -> int:
        if note.startswith("careful: "):
            return -2
        if " has no " in note or "more than the" in note or (waits and note.startswith("host")):
            return -1
        return next(
            (i for i, start in enumerate(_WEIGHTY) if note.startswith(start)), len(_WEIGHTY)
        )

    return sorted(p.assumptions, key=weight)


def summarise_line(p: Prediction) -> str:
    """Return a prediction in one line; a sweep as its size and its ranges."""
    if isinstance(p.latency_s, float):
        shown = [
            line.value for line in list_answers(p) if line.label not in ("memory", "cost", "carbon")
        ]
        sure = judge_confidence(p).value
        return f"<Prediction {title_of(p)}: {', '.join(shown)}, {sure}{'' if p.fits is not False else ', DOES NOT FIT'}>"
    ranges = [
        f"{show(float(np.min(values)), unit, 3)} to {show(float(np.max(values)), unit, 3)}"
        for values, unit in ((p.latency_s, "s"), (p.total_power_w, "W"), (p.total_energy_j, "J"))
    ]
    return f"<Prediction {title_of(p)}: sweep of {p.latency_s.shape}, {', '.join(ranges)}>"


def summarise_card(p: Prediction) -> str:
    """Return a prediction as a small HTML table for notebooks."""
    if not isinstance(p.latency_s, float):
        return f"<p>{html.escape(summarise_line(p))}</p>"
    rows = "".join(
        f"<tr><td style='text-align:left'>{html.escape(line.label)}</td>"
        f"<td style='text-align:left'><b>{html.escape(line.value)}</b></td>"
        # on any background
        f"<td style='text-align:left;opacity:.75'>{html.escape(line.remark)}</td></tr>"
        for line in (*list_answers(p), judge_confidence(p), support_line(p))
    )
    caption = f"<caption style='text-align:left'>{html.escape(title_of(p))}</caption>"
    return f"<table style='color:inherit'>{caption}{rows}</table>"
