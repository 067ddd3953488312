"""Predict a workload on a GPU: latency, power, energy and clock, with an interval and what was assumed.

A prediction is computed once. Text, JSON, figures and reports take a ``Prediction``; its ``basis`` has the timeline
and the detail by kernel for whoever shows more than its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, sweep_values
from wattcast.core.strict_files import FitStatus, Provenance
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.power.activity import module_utilisation
from wattcast.power.power_model import mean_power_w
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import GovernedPoint, run_governed
from wattcast.predictor.pipeline import (
    ClockedTimeline,
    KernelDetail,
    WorkloadTotals,
    analyse_graph,
    analyse_graphs,
    detail_at_clock,
    kernel_activity,
    workload_activity,
)
from wattcast.predictor.timeline import Timeline
from wattcast.predictor.uncertainty import (
    PredictionInterval,
    Support,
    UnmeasuredKernels,
    compute_interval,
    find_unmeasured,
    judge_support,
)
from wattcast.workload.graph import Graph
from wattcast.workload.operator_base import Operator

_Any = TypeVar("_Any", bound=np.generic)
TOGETHER = 128  # workloads, of some fifty kernels each, whose kernels are analysed in one table


@dataclass(frozen=True)
class ModuleShare:
    """Mean watts of one part of the power, and its utilisation where a peak is known, ``(*sweep,)``."""

    name: str
    power_w: Array
    utilisation: Array | None


@dataclass(frozen=True)
class OperatorShare:
    """Calls of one distinct operator, and time, mean power and energy of all of them, ``(*sweep,)``."""

    op: Operator
    count: int
    latency_s: Array
    power_w: Array
    energy_j: Array
    basis: PredictionBasis = field(repr=False, compare=False)
    row: int

    @property
    def modules(self) -> tuple[ModuleShare, ...]:
        """The power of the operator by module."""
        power_w, busy = self.basis.detail.kernel_part_w, self.basis.kernel_utilisation
        return tuple(
            ModuleShare(part, power_w[..., self.row, i], busy[part][..., self.row] if part in busy else None)
            for i, part in enumerate(self.basis.detail.parts)
        )


@dataclass(frozen=True)
class PredictionBasis:
    """What a prediction was computed from; figures and reports read it instead of computing anything again."""

    graph: Graph
    timeline: Timeline
    totals: WorkloadTotals
    gpu: Gpu
    at: OperatingPoint  # with the clock the governor found
    bundle: Bundle
    ran: ClockedTimeline | None = None  # at that clock; None for a sweep, whose arrays are large

    @cached_property
    def detail(self) -> KernelDetail:
        """The workload by kernel and by part of the power."""
        return detail_at_clock(self.timeline, self.at, self.bundle, self.ran)

    @cached_property
    def reasons(self) -> UnmeasuredKernels:
        """The reason why each kernel is outside what was measured; None where it is inside."""
        return find_unmeasured(self.timeline, self.bundle)

    @cached_property
    def kernel_utilisation(self) -> Mapping[str, Array]:
        """How busy each module is while a kernel runs: part -> ``(*sweep, kernel)``."""
        each_s = self.detail.kernel_s
        each_hz = np.broadcast_to(self.detail.effective_hz, each_s.shape)
        activity = kernel_activity(self.timeline, each_s, each_hz, np.zeros(each_s.shape[:-1]), self.at)
        return module_utilisation(activity, self.gpu, np.concatenate([each_hz, each_hz[..., :1]], axis=-1))


@dataclass(frozen=True)
class Prediction:
    """Latency, power, energy and clock of a workload; every array is ``(*sweep,)``.

    Parts of the power, operators, interval and support are computed when they are read.
    """

    name: str
    gpu: str
    latency_s: Array
    power_w: Array
    energy_j: Array
    clock_hz: Array  # as NVML would report it
    effective_clock_hz: Array
    capped: npt.NDArray[np.bool_]
    busy_s: Array
    memory_byte: float | None
    fits: bool | None  # in the GPU's memory (in every point of a sweep); None: unknown
    assumptions: tuple[str, ...]
    status: FitStatus
    provenance: Provenance
    basis: PredictionBasis = field(repr=False, compare=False)

    @cached_property
    def peak_power_w(self) -> Array:
        """The most that any kernel draws."""
        return np.broadcast_to(self.basis.detail.peak_w, self.power_w.shape)

    @cached_property
    def modules(self) -> tuple[ModuleShare, ...]:
        """The power by module."""
        basis = self.basis
        totals, detail = basis.totals, basis.detail
        activity = workload_activity(basis.timeline, totals.latency_s, basis.at)
        busy = module_utilisation(activity, basis.gpu, totals.effective_hz[..., np.newaxis])
        power_w = mean_power_w(detail.part_j, totals.latency_s[..., np.newaxis])
        return tuple(
            ModuleShare(part, power_w[..., i], busy[part][..., 0] if part in busy else None)
            for i, part in enumerate(detail.parts)
        )

    @cached_property
    def ops(self) -> tuple[OperatorShare, ...]:
        """The distinct operators, in order of appearance."""
        timeline, detail = self.basis.timeline, self.basis.detail
        columns = (
            detail.kernel_s * timeline.calls,
            detail.kernel_part_w.sum(axis=-1),
            detail.kernel_j * timeline.calls,
        )
        spent_s, power_w, spent_j = (of if of.ndim == 1 else np.moveaxis(of, -1, 0) for of in columns)
        rows = zip(timeline.kernels.ops, timeline.calls.tolist(), spent_s, power_w, spent_j, strict=True)
        return tuple(
            OperatorShare(op, int(calls), s, w, j, self.basis, i) for i, (op, calls, s, w, j) in enumerate(rows)
        )

    @cached_property
    def interval(self) -> PredictionInterval:
        """How far off latency, power and energy may be."""
        b = self.basis
        return compute_interval(b.timeline, b.totals, b.detail, b.bundle, b.reasons)

    @cached_property
    def support(self) -> Support:
        """Whether anything like this was measured."""
        b = self.basis
        return judge_support(b.timeline, b.detail, b.bundle, b.reasons)


def predict_graph(graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> Prediction:
    """Predict one workload: analyse its kernels, find the clock the governor allows, sum up at that clock."""
    return predict_timeline(analyse_graph(graph, gpu, bundle), graph, gpu, at, bundle)


def predict_graphs(graphs: Sequence[Graph], gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> list[Prediction]:
    """Predict many workloads, in order, with the kernels of ``TOGETHER`` of them in one table."""
    found = []
    for start in range(0, len(graphs), TOGETHER):
        some = graphs[start : start + TOGETHER]
        timelines = analyse_graphs(some, gpu, bundle)
        found += [
            predict_timeline(timeline, graph, gpu, at, bundle)
            for timeline, graph in zip(timelines, some, strict=True)
        ]
    return found


def predict_timeline(timeline: Timeline, graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> Prediction:
    """Predict a workload whose timeline is known."""
    settled, totals, ran = run_governed(timeline, gpu, at, bundle)
    power_w, memory_byte = totals.power_w, graph.memory_byte
    return Prediction(
        name=graph.name,
        gpu=gpu.name,
        latency_s=_like(totals.latency_s, power_w),
        power_w=power_w,
        energy_j=totals.energy_j,
        clock_hz=_like(sweep_values(settled.clock_hz), power_w),
        effective_clock_hz=_like(totals.effective_hz, power_w),
        capped=_like(settled.capped, power_w),
        busy_s=_like(totals.busy_s, power_w),
        memory_byte=memory_byte,
        fits=None if memory_byte is None else bool(np.all(memory_byte <= np.asarray(gpu.memory.capacity_byte))),
        assumptions=_assumptions(graph, timeline, settled, bundle),
        status=bundle.status,
        provenance=bundle.provenance,
        basis=PredictionBasis(graph, timeline, totals, gpu, settled.at, bundle, ran if power_w.ndim == 0 else None),
    )


def _like(values: npt.NDArray[_Any], of: Array) -> npt.NDArray[_Any]:
    """Broadcast values to the shape of a prediction."""
    return values if values.shape == of.shape else np.broadcast_to(values, of.shape)


def _assumptions(graph: Graph, timeline: Timeline, settled: GovernedPoint, bundle: Bundle) -> tuple[str, ...]:
    notes = [*graph.assumptions, *timeline.kernels.assumptions, *bundle.assumptions]
    if not settled.met.all():
        notes.append("the power limit cannot be met even at the lowest clock; that clock is given")
    if timeline.kernels.link_byte.any():
        notes.append("collectives from link bandwidth and latency alone: unverified")
    return tuple(dict.fromkeys(notes))
