"""What is answered over HTTP beside predictions: the catalogue, and one configuration seen from all sides."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec
import numpy as np

from wattcast import __version__, hardware
from wattcast.fitted import bundle_for
from wattcast.report.look import Look, Room, clock_span
from wattcast.report.plain import IntervalOut, ProvenanceOut, SupportOut, interval_out, provenance_out
from wattcast.report.trace import PowerTrace
from wattcast.workload import models

BINS = 240
CLOSE = 80  # launches and gaps shown closely
MOST_OPS = 40


class GpuOut(msgspec.Struct):
    name: str
    title: str
    coefficients: str  # fitted | provisional
    memory_byte: float
    min_clock_hz: float
    max_clock_hz: float
    step_clock_hz: float | None
    min_limit_w: float
    max_limit_w: float
    limit_w: float
    dtypes: list[str]  # of its tensor cores


class ModelOut(msgspec.Struct):
    name: str
    title: str
    kind: str


class CatalogueOut(msgspec.Struct):
    wattcast: str
    gpus: list[GpuOut]
    models: list[ModelOut]


class OpOut(msgspec.Struct):
    operator: str
    count: int
    latency_s: float
    power_w: float
    energy_j: float
    part_w: list[float]  # in the order of ``parts``


class TraceOut(msgspec.Struct):
    """Mean watts by part in steps that follow one another."""

    edge_s: list[float]  # one more than steps
    part_w: list[list[float]]  # [part][step]
    waiting: list[float]  # share of each step the device waits
    whole: bool  # False: stretches of the issue order are drawn at their mean


class ClocksOut(msgspec.Struct):
    asked_hz: list[float]
    clock_hz: list[float]
    latency_s: list[float]
    power_w: list[float]
    energy_j: list[float]


class ViewOut(msgspec.Struct):
    wattcast: str
    name: str
    gpu: str
    latency_s: float
    power_w: float
    energy_j: float
    clock_hz: float
    effective_clock_hz: float
    capped: bool
    busy_s: float
    peak_power_w: float
    memory_byte: float | None
    capacity_byte: float
    fits: bool | None
    interval: IntervalOut
    support: SupportOut
    parts: list[str]
    part_w: list[float]
    utilisation: list[float | None]
    ops: list[OpOut]  # those of most energy
    more_ops: int
    trace: TraceOut
    close: TraceOut | None
    clocks: ClocksOut
    assumptions: list[str]
    provenance: ProvenanceOut


class RoomOut(msgspec.Struct):
    """Bytes by purpose, and the largest batch that fits; null where a list of operators does not say."""

    capacity_byte: float
    held: dict[str, float] | None
    total_byte: float | None
    fits: bool | None
    largest_batch: int | None


class ErrorOut(msgspec.Struct):
    error: str


def catalogue() -> CatalogueOut:
    """Every GPU and model by name, with the range of its sliders."""
    return CatalogueOut(__version__, [_gpu(name) for name in hardware.names()], [_model(n) for n in models.names()])


def _gpu(name: str) -> GpuOut:
    gpu = hardware.load(name)
    low_hz, high_hz = clock_span(gpu)
    limit_w = float(np.mean(gpu.power.limit_w))
    least, most, step = gpu.power.min_limit_w, gpu.power.max_limit_w, gpu.clocks.step_hz
    return GpuOut(
        name=gpu.name,
        title=gpu.title,
        coefficients=str(bundle_for(gpu).status),
        memory_byte=float(np.mean(gpu.memory.capacity_byte)),
        min_clock_hz=low_hz,
        max_clock_hz=high_hz,
        step_clock_hz=None if step is None else float(np.mean(step)),
        min_limit_w=0.3 * limit_w if least is None else float(np.mean(least)),
        max_limit_w=limit_w if most is None else float(np.mean(most)),
        limit_w=limit_w,
        dtypes=[str(dtype) for dtype in gpu.pipes.tensor_flop_per_cycle],
    )


def _model(name: str) -> ModelOut:
    model = models.load(name)
    return ModelOut(model.name, model.title, str(model.kind))


def view(seen: Look) -> ViewOut:
    """One configuration, short enough to be sent at every move of a slider."""
    p = seen.prediction
    ranked = sorted(p.ops, key=lambda o: -float(o.energy_j))
    middle = len(seen.trace.start_s) // 2
    close = len(seen.trace.start_s) > 2 * CLOSE and seen.trace.whole
    return ViewOut(
        wattcast=__version__,
        name=p.name,
        gpu=p.gpu,
        latency_s=float(p.latency_s),
        power_w=float(p.power_w),
        energy_j=float(p.energy_j),
        clock_hz=float(p.clock_hz),
        effective_clock_hz=float(p.effective_clock_hz),
        capped=bool(p.capped),
        busy_s=float(p.busy_s),
        peak_power_w=float(p.peak_power_w),
        memory_byte=p.memory_byte,
        capacity_byte=seen.room.capacity_byte,
        fits=p.fits,
        interval=interval_out(p),
        support=SupportOut(p.support.inside, p.support.reason),
        parts=[m.name for m in p.modules],
        part_w=[float(m.power_w) for m in p.modules],
        utilisation=[None if m.utilisation is None else float(m.utilisation) for m in p.modules],
        ops=[
            OpOut(
                str(o.op),
                o.count,
                float(o.latency_s),
                float(o.power_w),
                float(o.energy_j),
                _short(np.array([float(m.power_w) for m in o.modules])),
            )
            for o in ranked[:MOST_OPS]
        ],
        more_ops=max(len(ranked) - MOST_OPS, 0),
        trace=_trace(seen.trace, BINS),
        close=_trace(seen.trace.part(middle, middle + CLOSE), CLOSE) if close else None,
        clocks=ClocksOut(**{name: values.tolist() for name, values in seen.clocks.items()}),
        assumptions=list(p.assumptions),
        provenance=provenance_out(p),
    )


def _trace(trace: PowerTrace, bins: int) -> TraceOut:
    shown = trace.binned(bins)
    edges = np.append(shown.start_s, shown.end_s[-1])
    known = np.append(trace.start_s, trace.end_s[-1])
    waited_s = np.concatenate([[0.0], np.cumsum((trace.end_s - trace.start_s) * trace.idle)])
    share = np.diff(np.interp(edges, known, waited_s)) / np.diff(edges)
    return TraceOut(
        edges.tolist(), [_short(part) for part in shown.part_w.T], np.round(share, 3).tolist(), trace.whole
    )


def _short(watts: np.ndarray) -> list[float]:
    """A tenth of a watt is finer than any screen."""
    rounded: list[float] = np.round(watts, 1).tolist()
    return rounded


def room(found: Room) -> RoomOut:
    """What the run holds."""
    if found.footprint is None:
        return RoomOut(found.capacity_byte, None, None, None, None)
    held = {name.removesuffix("_byte"): float(value) for name, value in vars(found.footprint).items()}
    total = float(found.footprint.total_byte)
    return RoomOut(found.capacity_byte, held, total, found.footprint.fits(found.capacity_byte), found.largest_batch)


def operators_csv(seen: Sequence[Look]) -> bytes:
    """A row for each operator of each configuration, SI units in the head."""
    parts = list(dict.fromkeys(m.name for look in seen for m in look.prediction.modules))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fixed = ["configuration", "workload", "gpu", "operator", "label", "count", "latency_s", "power_w", "energy_j"]
    writer.writerow([*fixed, *(f"{part}_w" for part in parts)])
    for index, look in enumerate(seen, start=1):
        p = look.prediction
        for share in p.ops:
            watts = {m.name: float(m.power_w) for m in share.modules}
            words = [_inert(p.name), _inert(p.gpu), _inert(str(share.op)), _inert(share.op.label)]
            numbers = [share.count, float(share.latency_s), float(share.power_w), float(share.energy_j)]
            writer.writerow([index, *words, *numbers, *(watts.get(part, "") for part in parts)])
    return out.getvalue().encode()


def _inert(cell: str) -> str:
    """Text that no spreadsheet takes for a formula (OWASP, CSV injection)."""
    return f"'{cell}" if cell[:1] in "=+-@\t\r" and cell else cell
