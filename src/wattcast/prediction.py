"""Prediction: what Wattcast says of a workload on a GPU, with how sure it is and what it assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wattcast.activity import predicted
from wattcast.activity.utilisation import utilisation
from wattcast.arrays import Array, per_sweep
from wattcast.energy import mean_w
from wattcast.equilibrium import Settled, settle
from wattcast.fitted import Bundle
from wattcast.flow import Detail, Totals, analyse, both
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.provenance import Provenance, Status
from wattcast.timeline import Timeline
from wattcast.uncertainty import Interval, Support, interval, outside, support
from wattcast.workload.graph import Graph, Operator


@dataclass(frozen=True)
class Module:
    """One part of the power: mean watts, and utilisation where a peak is known. ``(*sweep,)``"""

    name: str
    power_w: Array
    utilisation: Array | None


@dataclass(frozen=True)
class ModuleTable:
    """The modules of all operators, looked up when somebody asks for one's."""

    timeline: Timeline
    detail: Detail
    gpu: Gpu
    at: OperatingPoint

    def of(self, row: int) -> tuple[Module, ...]:
        """The modules of one operator."""
        power_w, busy = self.detail.kernel_part_w, self._utilisation
        return tuple(
            Module(part, power_w[..., row, i], busy[part][..., row] if part in busy else None)
            for i, part in enumerate(self.detail.parts)
        )

    @cached_property
    def _utilisation(self) -> Mapping[str, Array]:
        """How busy each module is while an operator runs: part -> ``(*sweep, operator)``."""
        each_s = self.detail.kernel_s
        each_hz = np.broadcast_to(self.detail.effective_hz, each_s.shape)
        activity = predicted.per_kernel(self.timeline, each_s, each_hz, np.zeros(each_s.shape[:-1]), self.at)
        return utilisation(activity, self.gpu, np.concatenate([each_hz, each_hz[..., :1]], axis=-1))


@dataclass(frozen=True)
class OperatorShare:
    """One distinct operator: calls, and time, mean power and energy of all its calls. ``(*sweep,)``"""

    op: Operator
    count: int
    latency_s: Array
    power_w: Array
    energy_j: Array
    table: ModuleTable = field(repr=False)
    row: int

    @property
    def modules(self) -> tuple[Module, ...]:
        """Its power by module."""
        return self.table.of(self.row)


@dataclass(frozen=True)
class Prediction:
    """Latency, power, energy and clock of a workload; every array is ``(*sweep,)``."""

    name: str
    gpu: str
    latency_s: Array
    power_w: Array
    energy_j: Array
    clock_hz: Array  # as NVML would report it
    effective_clock_hz: Array
    capped: npt.NDArray[np.bool_]
    busy_s: Array
    peak_power_w: Array
    memory_byte: float | None
    fits: bool | None  # in the GPU's memory (in every point of a sweep); None: unknown
    modules: tuple[Module, ...]
    ops: tuple[OperatorShare, ...]
    interval: Interval
    support: Support
    assumptions: tuple[str, ...]
    status: Status
    provenance: Provenance


def predict(graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> Prediction:
    """The whole flow for one workload: once per kernel, then the governor, then the clock it found."""
    return predict_timeline(analyse(graph, gpu, bundle), graph, gpu, at, bundle)


def predict_timeline(timeline: Timeline, graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> Prediction:
    """The same from the workload's timeline, for those who go on using it."""
    settled = settle(timeline, gpu, at, bundle)
    totals, detail = both(timeline, settled.at, bundle)
    reasons = outside(timeline, bundle)
    shape = totals.power_w.shape
    return Prediction(
        name=graph.name,
        gpu=gpu.name,
        latency_s=np.broadcast_to(totals.latency_s, shape),
        power_w=totals.power_w,
        energy_j=totals.energy_j,
        clock_hz=np.broadcast_to(per_sweep(settled.clock_hz), shape),
        effective_clock_hz=np.broadcast_to(totals.effective_hz, shape),
        capped=np.broadcast_to(settled.capped, shape),
        busy_s=np.broadcast_to(totals.busy_s, shape),
        peak_power_w=np.broadcast_to(detail.peak_w, shape),
        memory_byte=graph.memory_byte,
        fits=None
        if graph.memory_byte is None
        else bool(np.all(graph.memory_byte <= np.asarray(gpu.memory.capacity_byte))),
        modules=_modules(timeline, totals, detail, gpu, settled.at),
        ops=_ops(timeline, detail, gpu, settled.at),
        interval=interval(timeline, totals, detail, bundle, reasons),
        support=support(timeline, detail, bundle, reasons),
        assumptions=_assumptions(graph, timeline, settled, bundle),
        status=bundle.status,
        provenance=bundle.provenance,
    )


def _assumptions(graph: Graph, timeline: Timeline, settled: Settled, bundle: Bundle) -> tuple[str, ...]:
    notes = [*graph.assumptions, *timeline.kernels.assumptions, *bundle.assumptions]
    if not settled.met.all():
        notes.append("the power limit cannot be met even at the lowest clock; that clock is given")
    if timeline.kernels.link_byte.any():
        notes.append("collectives from link bandwidth and latency alone: unverified")
    return tuple(dict.fromkeys(notes))


def _modules(timeline: Timeline, totals: Totals, detail: Detail, gpu: Gpu, at: OperatingPoint) -> tuple[Module, ...]:
    activity = predicted.whole(timeline, totals.latency_s, at)
    busy = utilisation(activity, gpu, totals.effective_hz[..., np.newaxis])
    power_w = mean_w(detail.part_j, totals.latency_s[..., np.newaxis])
    return tuple(
        Module(part, power_w[..., i], busy[part][..., 0] if part in busy else None)
        for i, part in enumerate(detail.parts)
    )


def _ops(timeline: Timeline, detail: Detail, gpu: Gpu, at: OperatingPoint) -> tuple[OperatorShare, ...]:
    table = ModuleTable(timeline, detail, gpu, at)
    spent_s, power_w, spent_j = (
        np.moveaxis(values, -1, 0)
        for values in (
            detail.kernel_s * timeline.calls,
            detail.kernel_part_w.sum(axis=-1),
            detail.kernel_j * timeline.calls,
        )
    )
    rows = zip(timeline.kernels.ops, timeline.calls.tolist(), spent_s, power_w, spent_j, strict=True)
    return tuple(OperatorShare(op, int(calls), s, w, j, table, i) for i, (op, calls, s, w, j) in enumerate(rows))
