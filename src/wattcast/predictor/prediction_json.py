"""Write predictions as JSON, in the schema of ``predict --json`` and of the HTTP interface, and as
data frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from wattcast import __version__
from wattcast.core.arrays import Array
from wattcast.predictor.answer_lines import judge_confidence
from wattcast.predictor.part_shares import PartShare
from wattcast.predictor.prediction_values import (
    ModuleShare,
    OperatorShare,
    PhaseShare,
    PredictionValues,
    Values,
)
from wattcast.predictor.support_distances import Support
from wattcast.workload.readers.from_json import operator_to_plain


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


class PartOut(msgspec.Struct):
    name: str  # a text encoder, denoiser, or a decoder
    runs: int  # how often it runs: the denoiser once a step, or twice
    latency_s: float
    power_w: float  # of one GPU, mean over the part
    energy_j: float  # of one GPU


class DistanceOut(msgspec.Struct):
    # kernels, number format, clock, power limit, temperature, stack, parallelism, host, GPU, parts
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
    # of one run on all GPUs; the docstring of wattcast.Prediction says what a token is
    tokens: int | None
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
    # that the power limit holds at clocks of their own; empty: one clock for all
    phases: list[PhaseOut] = []
    parts: list[PartOut] = []  # of a whole picture, which they add up to; empty: no picture


class PredictOut(msgspec.Struct):
    wattcast: str
    predictions: list[PredictionOut]


# Figures of all GPUs together, some of which a workload or a user may not have
ANSWERS = (
    "gpu_count",
    "tokens",
    "tokens_per_s",
    "energy_j_per_token",
    "items",
    "items_per_s",
    "energy_j_per_item",
    "total_power_w",
    "total_energy_j",
    "cost",
    "cost_per_million_tokens",
    "carbon_g",
)
# Figures of one GPU
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


def predictions_to_output(
    predictions: Sequence[PredictionValues], most_ops: int | None = None
) -> PredictOut:
    """Convert single-point predictions to the output schema, in order.

    ``most_ops`` limits the operators of each to those that take most energy.
    """
    outputs = [_write_prediction(prediction, most_ops) for prediction in predictions]
    return PredictOut(__version__, outputs)


def prediction_to_plain(p: PredictionValues) -> dict[str, Any]:
    """Return one configuration in the output schema, or a sweep as lists of numbers in its
    shape.
    """
    if isinstance(p.latency_s, float):
        plain: dict[str, Any] = msgspec.to_builtins(_write_prediction(p))
        return plain
    shape = p.latency_s.shape
    swept: dict[str, Any] = {
        "name": p.name,
        "gpu": p.gpu,
        "stack": p.stack,
        "shape": list(shape),
    }
    for name in (*ANSWERS, *SWEPT):
        value = getattr(p, name)
        swept[name] = value.tolist() if isinstance(value, np.ndarray) else value
    swept["support"] = np.broadcast_to(p.support.words, shape).tolist()
    swept["memory_byte"] = p.memory_byte
    swept["fits"] = p.fits
    swept["assumptions"] = list(p.assumptions)
    return swept


def list_prediction_rows(p: PredictionValues) -> list[dict[str, Any]]:
    """Return a row for each configuration, in the order of the sweep's flattened shape."""
    shape = np.shape(p.latency_s)
    columns: dict[str, Any] = take_fields(
        p,
        "name",
        "gpu",
        "stack",
        *ANSWERS,
        *SWEPT,
    )
    columns["support"] = p.support.words
    columns["memory_byte"] = p.memory_byte
    columns["fits"] = p.fits
    table = {}
    for name, value in columns.items():
        if value is not None:
            table[name] = np.broadcast_to(np.asarray(value), shape).ravel().tolist()
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def _write_prediction(p: PredictionValues, most_ops: int | None = None) -> PredictionOut:
    if not isinstance(p.latency_s, float):
        raise ValueError("PredictionOut holds one configuration; a sweep has prediction_to_plain")
    ops = p.ops if most_ops is None else p.rank_ops(most_ops)
    figures = {name: _write_number(getattr(p, name)) for name in (*ANSWERS, *SWEPT)}
    return PredictionOut(
        **take_fields(
            p,
            "name",
            "gpu",
            "stack",
            "memory_byte",
            "fits",
        ),
        **figures,
        currency=p.prices.currency,
        interval=IntervalOut(
            level=p.interval.level,
            latency_s=_write_ends(p.interval.latency_s),
            power_w=_write_ends(p.interval.power_w),
            energy_j=_write_ends(p.interval.energy_j),
        ),
        support=_write_support(p, p.support),
        modules=[_write_module(module) for module in p.modules],
        ops=[_write_operator(share) for share in ops],
        assumptions=list(p.assumptions),
        provenance=ProvenanceOut(str(p.status), *msgspec.structs.astuple(p.provenance)),
        phases=[_write_phase(phase) for phase in p.phases],
        parts=[_write_part(part) for part in p.parts],
    )


def _write_ends(ends: Array) -> tuple[float, float]:
    low, high = ends
    return _check_finite(low), _check_finite(high)


def _write_support(p: PredictionValues, support: Support) -> SupportOut:
    confidence = judge_confidence(p)
    distances = []
    for distance in support.distances:
        share = _check_finite(np.max(distance.beyond))
        distances.append(DistanceOut(distance.dimension, distance.word, share, distance.reason))
    return SupportOut(
        inside=support.inside,
        word=support.word,
        reason=support.reason,
        confidence=confidence.value,
        why=confidence.remark,
        distances=distances,
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


def _write_part(part: PartShare) -> PartOut:
    return PartOut(
        name=part.name,
        runs=part.runs,
        latency_s=_check_finite(part.latency_s),
        power_w=_check_finite(part.power_w),
        energy_j=_check_finite(part.energy_j),
    )


def _write_module(module: ModuleShare) -> ModuleOut:
    busy = module.utilisation
    utilisation = None if busy is None else _check_finite(busy)
    return ModuleOut(module.name, _check_finite(module.power_w), utilisation)


def _write_operator(share: OperatorShare) -> OperatorOut:
    op = share.op
    shape = operator_to_plain(op)
    for name in ("count", "label", "op"):
        shape.pop(name, None)
    return OperatorOut(
        operator=str(op),
        **take_fields(op, "name", "label"),
        shape=shape,
        count=share.count,
        latency_s=_check_finite(share.latency_s),
        power_w=_check_finite(share.power_w),
        energy_j=_check_finite(share.energy_j),
        modules=[_write_module(module) for module in share.modules],
    )


def _write_number(value: Values | int | None) -> Any:
    return value if isinstance(value, int | None) else _check_finite(value)


def _check_finite(value: Values) -> float:
    number = float(value)
    assert math.isfinite(number), "a prediction is not a finite number: this is a bug in Wattcast"
    return number
