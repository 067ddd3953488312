"""Prediction: what Wattcast says of a workload on a GPU, with how sure it is and what it assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from wattcast.activity import predicted
from wattcast.activity.utilisation import utilisation
from wattcast.arrays import Array, per_sweep
from wattcast.energy import mean_w
from wattcast.equilibrium import Settled, governed
from wattcast.fitted import Bundle
from wattcast.flow import Detail, Ran, Totals, analyse, analyse_many, in_detail
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.provenance import Provenance, Status
from wattcast.timeline import Timeline
from wattcast.uncertainty import Interval, Reasons, Support, interval, outside, support
from wattcast.workload.graph import Graph, Operator

_Any = TypeVar("_Any", bound=np.generic)
TOGETHER = 128  # workloads whose kernels are one table, of some fifty kernels each


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
class _Behind:
    """What a prediction was made from, for whoever wants to know more than its numbers."""

    timeline: Timeline
    totals: Totals
    gpu: Gpu
    at: OperatingPoint  # with the clock the governor found
    bundle: Bundle
    ran: Ran | None = None  # at that clock, of a single design

    @cached_property
    def detail(self) -> Detail:
        """The workload by kernel and by part."""
        return in_detail(self.timeline, self.at, self.bundle, self.ran)

    @cached_property
    def reasons(self) -> Reasons:
        """Of each kernel, why it is outside what was measured."""
        return outside(self.timeline, self.bundle)


@dataclass(frozen=True)
class Prediction:
    """Latency, power, energy and clock of a workload; every array is ``(*sweep,)``.

    What else there is to say (parts of the power, operators, interval, support) is worked out when it is asked for.
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
    status: Status
    provenance: Provenance
    behind: _Behind = field(repr=False, compare=False)

    @cached_property
    def peak_power_w(self) -> Array:
        """The most any kernel draws."""
        return np.broadcast_to(self.behind.detail.peak_w, self.power_w.shape)

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """The power by module."""
        return _modules(self.behind)

    @cached_property
    def ops(self) -> tuple[OperatorShare, ...]:
        """The distinct operators, in order of appearance."""
        return _ops(self.behind)

    @cached_property
    def interval(self) -> Interval:
        """How far off latency, power and energy may be."""
        b = self.behind
        return interval(b.timeline, b.totals, b.detail, b.bundle, b.reasons)

    @cached_property
    def support(self) -> Support:
        """Whether anything like this was measured."""
        b = self.behind
        return support(b.timeline, b.detail, b.bundle, b.reasons)


def predict(graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> Prediction:
    """The whole flow for one workload: once per kernel, then the governor, then the clock it found."""
    return predict_timeline(analyse(graph, gpu, bundle), graph, gpu, at, bundle)


def predict_many(graphs: Sequence[Graph], gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> list[Prediction]:
    """The same of many workloads, in order: kernels of as many as fit a table are looked at together."""
    found = []
    for start in range(0, len(graphs), TOGETHER):
        some = graphs[start : start + TOGETHER]
        timelines = analyse_many(some, gpu, bundle)
        found += [
            predict_timeline(timeline, graph, gpu, at, bundle)
            for timeline, graph in zip(timelines, some, strict=True)
        ]
    return found


def predict_timeline(timeline: Timeline, graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> Prediction:
    """The same from the workload's timeline, for those who go on using it."""
    settled, totals, ran = governed(timeline, gpu, at, bundle)
    power_w, memory_byte = totals.power_w, graph.memory_byte
    return Prediction(
        name=graph.name,
        gpu=gpu.name,
        latency_s=_like(totals.latency_s, power_w),
        power_w=power_w,
        energy_j=totals.energy_j,
        clock_hz=_like(per_sweep(settled.clock_hz), power_w),
        effective_clock_hz=_like(totals.effective_hz, power_w),
        capped=_like(settled.capped, power_w),
        busy_s=_like(totals.busy_s, power_w),
        memory_byte=memory_byte,
        fits=None if memory_byte is None else bool(np.all(memory_byte <= np.asarray(gpu.memory.capacity_byte))),
        assumptions=_assumptions(graph, timeline, settled, bundle),
        status=bundle.status,
        provenance=bundle.provenance,
        behind=_Behind(timeline, totals, gpu, settled.at, bundle, ran),
    )


def _like(values: npt.NDArray[_Any], of: Array) -> npt.NDArray[_Any]:
    """Values of a prediction's shape, whatever varies over its sweep."""
    return values if values.shape == of.shape else np.broadcast_to(values, of.shape)


def _assumptions(graph: Graph, timeline: Timeline, settled: Settled, bundle: Bundle) -> tuple[str, ...]:
    notes = [*graph.assumptions, *timeline.kernels.assumptions, *bundle.assumptions]
    if not settled.met.all():
        notes.append("the power limit cannot be met even at the lowest clock; that clock is given")
    if timeline.kernels.link_byte.any():
        notes.append("collectives from link bandwidth and latency alone: unverified")
    return tuple(dict.fromkeys(notes))


def _modules(behind: _Behind) -> tuple[Module, ...]:
    totals, detail = behind.totals, behind.detail
    activity = predicted.whole(behind.timeline, totals.latency_s, behind.at)
    busy = utilisation(activity, behind.gpu, totals.effective_hz[..., np.newaxis])
    power_w = mean_w(detail.part_j, totals.latency_s[..., np.newaxis])
    return tuple(
        Module(part, power_w[..., i], busy[part][..., 0] if part in busy else None)
        for i, part in enumerate(detail.parts)
    )


def _ops(behind: _Behind) -> tuple[OperatorShare, ...]:
    timeline, detail = behind.timeline, behind.detail
    table = ModuleTable(timeline, detail, behind.gpu, behind.at)
    columns = (detail.kernel_s * timeline.calls, detail.kernel_part_w.sum(axis=-1), detail.kernel_j * timeline.calls)
    spent_s, power_w, spent_j = (of if of.ndim == 1 else np.moveaxis(of, -1, 0) for of in columns)
    rows = zip(timeline.kernels.ops, timeline.calls.tolist(), spent_s, power_w, spent_j, strict=True)
    return tuple(OperatorShare(op, int(calls), s, w, j, table, i) for i, (op, calls, s, w, j) in enumerate(rows))
