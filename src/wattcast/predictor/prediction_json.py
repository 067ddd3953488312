"""Write predictions as JSON and tables: the schema of ``predict --json`` and of the HTTP interface."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from wattcast import __version__
from wattcast.core.arrays import Array
from wattcast.core.errors import MissingTool
from wattcast.predictor.prediction_summary import judge_confidence
from wattcast.workload.readers.from_json import operator_to_plain

if TYPE_CHECKING:
    from wattcast.predictor.prediction import ModuleShare, OperatorShare, Prediction, Values


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


class DistanceOut(msgspec.Struct):
    dimension: str  # kernels, number format, clock, power limit, temperature, stack, parallelism, host, GPU
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
    tokens: int | None  # of one run on all GPUs; what a token is: the docstring of wattcast.Prediction
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


class PredictOut(msgspec.Struct):
    wattcast: str
    predictions: list[PredictionOut]


def predictions_to_output(predictions: Sequence[Prediction], most_ops: int | None = None) -> PredictOut:
    """Convert single-point predictions to the output schema, in order; ``most_ops``: those of most energy alone."""
    return PredictOut(__version__, [_prediction(p, most_ops) for p in predictions])


def prediction_to_plain(p: Prediction) -> dict[str, Any]:
    """Return one configuration in the output schema, or a sweep as lists of numbers in its shape."""
    if isinstance(p.latency_s, float):
        plain: dict[str, Any] = msgspec.to_builtins(_prediction(p))
        return plain
    shape = p.latency_s.shape
    found: dict[str, Any] = {"name": p.name, "gpu": p.gpu, "stack": p.stack, "shape": list(shape)}
    for name in (*ANSWERS, *SWEPT):
        value = getattr(p, name)
        found[name] = value.tolist() if isinstance(value, np.ndarray) else value
    found |= {"support": np.broadcast_to(p.support.words, shape).tolist()}
    return found | {"memory_byte": p.memory_byte, "fits": p.fits, "assumptions": list(p.assumptions)}


def prediction_to_frame(p: Prediction) -> Any:
    """Return a data frame with a row for each configuration, in the order of the sweep's flattened shape."""
    shape = np.shape(p.latency_s)
    columns: dict[str, Any] = {"name": p.name, "gpu": p.gpu, "stack": p.stack}
    columns |= {name: getattr(p, name) for name in (*ANSWERS, *SWEPT)}
    columns |= {"support": p.support.words, "memory_byte": p.memory_byte, "fits": p.fits}
    known = {name: value for name, value in columns.items() if value is not None}
    table = {name: np.broadcast_to(np.asarray(value), shape).ravel() for name, value in known.items()}
    for library in ("polars", "pandas"):
        try:
            frames = import_module(library)
        except ImportError:
            continue
        return frames.DataFrame({name: value.tolist() for name, value in table.items()})
    raise MissingTool("a data frame needs polars or pandas. Install it: pip install 'wattcast[explore]', or pandas.")


ANSWERS = (
    "gpu_count", "tokens", "tokens_per_s", "energy_j_per_token", "items", "items_per_s", "energy_j_per_item",
    "total_power_w", "total_energy_j", "cost", "cost_per_million_tokens", "carbon_g",
)  # fmt: skip
SWEPT = ("latency_s", "power_w", "energy_j", "clock_hz", "effective_clock_hz", "capped", "busy_s", "peak_power_w")


def encode_json(out: object, indent: int = 1) -> bytes:
    """Encode an output struct or plain mapping as JSON text; NaN and infinity never pass."""
    data = msgspec.json.encode(out)
    return msgspec.json.format(data, indent=indent)


def _prediction(p: Prediction, most_ops: int | None = None) -> PredictionOut:
    if not isinstance(p.latency_s, float):
        raise ValueError("PredictionOut holds one configuration; a sweep has prediction_to_plain")
    ops = p.ops if most_ops is None else sorted(p.ops, key=lambda share: -share.energy_j)[:most_ops]
    return PredictionOut(
        name=p.name,
        gpu=p.gpu,
        **{name: _number(getattr(p, name)) for name in (*ANSWERS, *SWEPT)},
        stack=p.stack,
        currency=p.prices.currency,
        interval=interval_to_output(p),
        support=support_to_output(p),
        memory_byte=p.memory_byte,
        fits=p.fits,
        modules=[_module(m) for m in p.modules],
        ops=[_operator(o) for o in ops],
        assumptions=list(p.assumptions),
        provenance=provenance_to_output(p),
    )


def interval_to_output(p: Prediction) -> IntervalOut:
    """Convert the interval of a single-point prediction."""
    ends = p.interval
    return IntervalOut(ends.level, _pair(ends.latency_s), _pair(ends.power_w), _pair(ends.energy_j))


def support_to_output(p: Prediction) -> SupportOut:
    """Convert how sure a prediction is, and why."""
    sure = judge_confidence(p)
    found = [DistanceOut(d.dimension, d.word, _finite(np.max(d.beyond)), d.reason) for d in p.support.distances]
    return SupportOut(p.support.inside, p.support.word, p.support.reason, sure.word, sure.reason, found)


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
        operator=str(op),
        name=op.name,
        shape=shape,
        label=op.label,
        count=share.count,
        latency_s=_finite(share.latency_s),
        power_w=_finite(share.power_w),
        energy_j=_finite(share.energy_j),
        modules=[_module(m) for m in share.modules],
    )


def _number(value: Values | int | None) -> Any:
    return value if value is None or isinstance(value, int) else _finite(value)


def _finite(value: Values) -> float:
    number = float(value)
    assert math.isfinite(number), "a prediction is not a finite number: this is a bug in Wattcast"
    return number


def _pair(value: Array) -> tuple[float, float]:
    return _finite(value[0]), _finite(value[1])
