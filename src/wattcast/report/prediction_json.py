"""Write predictions as JSON: the schema of ``predict --json`` and of the HTTP interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from wattcast import __version__
from wattcast.core.arrays import Array
from wattcast.predictor.prediction import ModuleShare, OperatorShare, Prediction
from wattcast.workload.readers.from_json import operator_to_plain


class ModuleOut(msgspec.Struct):
    name: str
    power_w: float
    utilisation: float | None  # 0 to 1; null where no peak rate is known


class OperatorOut(msgspec.Struct):
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


class SupportOut(msgspec.Struct):
    inside: bool
    reason: str


class ProvenanceOut(msgspec.Struct):
    status: str
    source: str
    date: str
    device: str
    note: str


class PredictionOut(msgspec.Struct):
    name: str
    gpu: str
    latency_s: float
    power_w: float
    energy_j: float
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


class PredictOut(msgspec.Struct):
    wattcast: str
    predictions: list[PredictionOut]


def predictions_to_output(predictions: Sequence[Prediction]) -> PredictOut:
    """Convert single-point predictions to the output schema, in order."""
    return PredictOut(__version__, [_prediction(p) for p in predictions])


def encode_json(out: object, indent: int = 1) -> bytes:
    """Encode an output struct or plain mapping as JSON text; NaN and infinity never pass."""
    data = msgspec.json.encode(out)
    return msgspec.json.format(data, indent=indent)


def _prediction(p: Prediction) -> PredictionOut:
    if p.latency_s.shape:
        raise ValueError("JSON holds single predictions; a sweep is written by `explore`")
    return PredictionOut(
        name=p.name,
        gpu=p.gpu,
        latency_s=_finite(p.latency_s),
        power_w=_finite(p.power_w),
        energy_j=_finite(p.energy_j),
        clock_hz=_finite(p.clock_hz),
        effective_clock_hz=_finite(p.effective_clock_hz),
        capped=bool(p.capped),
        interval=interval_to_output(p),
        support=SupportOut(p.support.inside, p.support.reason),
        memory_byte=p.memory_byte,
        fits=p.fits,
        busy_s=_finite(p.busy_s),
        peak_power_w=_finite(p.peak_power_w),
        modules=[_module(m) for m in p.modules],
        ops=[_operator(o) for o in p.ops],
        assumptions=list(p.assumptions),
        provenance=provenance_to_output(p),
    )


def interval_to_output(p: Prediction) -> IntervalOut:
    """Convert the interval of a single-point prediction."""
    ends = p.interval
    return IntervalOut(ends.level, _pair(ends.latency_s), _pair(ends.power_w), _pair(ends.energy_j))


def provenance_to_output(p: Prediction) -> ProvenanceOut:
    """Convert the source of a prediction's coefficients."""
    return ProvenanceOut(str(p.status), *msgspec.structs.astuple(p.provenance))


def _module(module: ModuleShare) -> ModuleOut:
    busy = module.utilisation
    return ModuleOut(module.name, _finite(module.power_w), None if busy is None else _finite(busy))


def _operator(share: OperatorShare) -> OperatorOut:
    op = share.op
    shape = {k: v for k, v in operator_to_plain(op).items() if k not in ("count", "label", "op")}
    return OperatorOut(
        name=op.name,
        shape=shape,
        label=op.label,
        count=share.count,
        latency_s=_finite(share.latency_s),
        power_w=_finite(share.power_w),
        energy_j=_finite(share.energy_j),
        modules=[_module(m) for m in share.modules],
    )


def _finite(value: Array) -> float:
    number = float(value)
    assert np.isfinite(number), "a prediction is not a finite number: this is a bug in Wattcast"
    return number


def _pair(value: Array) -> tuple[float, float]:
    return _finite(value[0]), _finite(value[1])
