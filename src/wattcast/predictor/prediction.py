"""Predict a workload on a GPU: latency, power, energy and clock, with an interval and what was
assumed.

A prediction is computed once. Text, JSON, figures and reports take a ``Prediction``; its ``basis``
has the timeline and the detail by kernel for whoever shows more than its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array, Mask, sweep_values
from wattcast.core.strict_files import FitStatus, Provenance
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.power.activity import Activity, ActivitySource, module_utilisation
from wattcast.power.power_model import mean_power_w
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.governor import GovernedDivision, GovernedStretch, run_governed
from wattcast.predictor.pipeline import (
    ClockedTimeline,
    KernelDetail,
    WorkloadTotals,
    analyse_graph,
    analyse_graphs,
    choose_details,
    detail_at_clock,
    join_details,
    kernel_activity,
    total_at_clock,
)
from wattcast.predictor.prices import Prices
from wattcast.predictor.timeline import MEMORY_KNEE, Timeline, slow_memory_path
from wattcast.predictor.uncertainty import (
    PredictionInterval,
    Support,
    SupportDistance,
    UnmeasuredKernels,
    compute_interval,
    find_unmeasured,
    judge_support,
    measure_distances,
)
from wattcast.workload.graph import Graph
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Collective

# A float for one configuration, an array ``(*sweep,)`` for a sweep. A union would make users tell
# mypy which it is.
Values: TypeAlias = Any
TOGETHER = 128  # workloads, of some fifty kernels each, whose kernels are analysed in one table


@dataclass(frozen=True)
class ModuleShare:
    """Mean watts of one part of the power, and its utilisation where a peak is known."""

    name: str
    power_w: Values
    utilisation: Values | None


@dataclass(frozen=True)
class OperatorShare:
    """Calls of one distinct operator, and time, mean power and energy of all of them."""

    op: Operator
    count: int
    latency_s: Values
    power_w: Values
    energy_j: Values
    basis: PredictionBasis = field(repr=False, compare=False)
    row: int

    @property
    def modules(self) -> tuple[ModuleShare, ...]:
        """The power of the operator by module."""
        detail = self.basis.detail
        busy = self.basis.kernel_utilisation
        watts = np.moveaxis(detail.kernel_part_w[..., self.row, :], -1, 0)
        return tuple(
            ModuleShare(
                part,
                _to_plain(power_w),
                _to_plain(busy[part][..., self.row]) if part in busy else None,
            )
            for part, power_w in zip(detail.parts, watts, strict=True)
        )


@dataclass(frozen=True)
class PhaseShare:
    """A part of a run that the power governor holds at a clock of its own: a prefill, the decode
    steps after it.
    """

    name: str
    latency_s: Values
    power_w: Values  # mean over its time, of one GPU
    clock_hz: Values  # mean over its time
    capped: bool | Mask

    @property
    def energy_j(self) -> Values:
        """Joules of one GPU."""
        return self.power_w * self.latency_s


@dataclass(frozen=True)
class PredictionBasis:
    """What a prediction was computed from; figures and reports read it instead of computing
    anything again.
    """

    graph: Graph
    timeline: Timeline
    totals: WorkloadTotals
    gpu: Gpu
    at: OperatingPoint  # with the clock the governor found
    bundle: Bundle
    asked_w: Array  # (*sweep,) mean power at the clock asked for, whatever the limit
    ran: ClockedTimeline | None = None  # at that clock; None for a sweep, whose arrays are large
    divisions: tuple[
        GovernedDivision, ...
    ] = ()  # of runs whose stretches settle at clocks of their own

    @cached_property
    def detail(self) -> KernelDetail:
        """The workload by kernel and by part of the power."""
        if not self.divisions:
            return detail_at_clock(self.timeline, self.at, self.bundle, self.ran)
        whole = self._join_division(self.divisions[0])
        for division in self.divisions[1:]:
            assert division.points is not None, "one division of several holds for some points"
            points = np.broadcast_to(division.points, self.totals.power_w.shape)
            whole = choose_details(points, self._join_division(division), whole)
        return whole

    def _join_division(self, division: GovernedDivision) -> KernelDetail:
        """Join the details of the stretches of a run, which has the shape of the sweep."""
        parts = []
        for part in division.stretches:
            own = part.stretch.timeline
            parts.append(
                (part.stretch.rows, own.calls, detail_at_clock(own, part.at, self.bundle, part.run))
            )
        return join_details(len(self.timeline.calls), parts)

    @cached_property
    def reasons(self) -> UnmeasuredKernels:
        """The reason why each kernel is outside what was measured; None where it is inside."""
        return find_unmeasured(self.timeline, self.bundle)

    @cached_property
    def distances(self) -> tuple[SupportDistance, ...]:
        """How far the prediction is from what was measured, in each respect that differs."""
        return measure_distances(self)

    @cached_property
    def kernel_utilisation(self) -> Mapping[str, Array]:
        """How busy each module is while a kernel runs: part -> ``(*sweep, kernel)``."""
        each_s = self.detail.kernel_s
        each_hz = np.broadcast_to(self.detail.effective_hz, each_s.shape)
        activity = kernel_activity(
            self.timeline, each_s, each_hz, np.zeros(each_s.shape[:-1]), self.at
        )
        return module_utilisation(
            activity, self.gpu, np.concatenate([each_hz, each_hz[..., :1]], axis=-1)
        )


@dataclass(frozen=True, repr=False)
class Prediction:
    """Latency, power, energy and clock of a workload: floats for one configuration, arrays
    ``(*sweep,)`` for a sweep.

    ``power_w``, ``energy_j`` and ``clock_hz`` are those of one GPU; ``total_power_w`` and
    ``total_energy_j`` are of all ``gpu_count`` GPUs, which are taken to draw the same. ``tokens``
    and ``items`` are counted over all GPUs.

    A token is a prompt token in prefill, a new token in decode (one a sequence) and in generate,
    where the prefill costs time and energy and its prompt does not count, and a token trained on in
    training. An item is a picture, a denoising step or an audio clip. Pipeline stages work on
    batches in turn: once the pipeline is full, one leaves it every ``latency_s``, so that tokens
    per second and joules per token are those of a full pipeline.

    Parts of the power, operators, interval and support are computed when they are read.
    """

    name: str
    gpu: str
    latency_s: Values
    power_w: Values
    energy_j: Values
    clock_hz: Values  # as NVML would report it
    effective_clock_hz: Values
    capped: bool | Mask
    busy_s: Values
    memory_byte: float | None
    fits: bool | None  # in the GPU's memory (in every point of a sweep); None: unknown
    assumptions: tuple[str, ...]
    status: FitStatus
    provenance: Provenance
    basis: PredictionBasis = field(repr=False, compare=False)
    prices: Prices = field(default_factory=Prices, repr=False)

    @property
    def stack(self) -> str:
        """The software that issues the kernels; empty where a list of operators does not say."""
        return self.basis.graph.stack

    @property
    def gpu_count(self) -> int:
        """GPUs that run the workload together."""
        return self.basis.graph.gpu_count

    @property
    def tokens(self) -> int | None:
        """Tokens of one run on all GPUs; None where the workload has none."""
        return self.basis.graph.tokens

    @property
    def items(self) -> int | None:
        """Pictures, denoising steps or audio clips of one run on all GPUs; None where there are
        none.
        """
        return self.basis.graph.items

    @property
    def tokens_per_s(self) -> Values | None:
        """Tokens per second of all GPUs together."""
        return None if self.tokens is None else self.tokens / self.latency_s

    @property
    def items_per_s(self) -> Values | None:
        """Items per second of all GPUs together."""
        return None if self.items is None else self.items / self.latency_s

    @property
    def total_power_w(self) -> Values:
        """Mean power of all GPUs."""
        return self.power_w * self.gpu_count

    @property
    def total_energy_j(self) -> Values:
        """Energy of one run on all GPUs."""
        return self.energy_j * self.gpu_count

    @property
    def energy_j_per_token(self) -> Values | None:
        """Joules of all GPUs per token."""
        return None if self.tokens is None else self.total_energy_j / self.tokens

    @property
    def energy_j_per_item(self) -> Values | None:
        """Joules of all GPUs per item."""
        return None if self.items is None else self.total_energy_j / self.items

    @property
    def cost(self) -> Values | None:
        """Money for one run on all GPUs, in ``prices.currency``; None where no price is known."""
        return self.prices.cost(self.gpu, self.total_energy_j, self.latency_s * self.gpu_count)

    @property
    def cost_per_million_tokens(self) -> Values | None:
        """Money for a million tokens; None where no price is known, or there are no tokens."""
        return None if self.cost is None or self.tokens is None else self.cost / self.tokens * 1e6

    @property
    def carbon_g(self) -> Values | None:
        """Grams of CO2 equivalent of one run on all GPUs; None where no carbon intensity is known."""
        return self.prices.carbon_g(self.total_energy_j)

    def __repr__(self) -> str:
        from wattcast.predictor.prediction_json import summarise_line

        return summarise_line(self)

    def _repr_html_(self) -> str:
        from wattcast.predictor.prediction_json import summarise_card

        return summarise_card(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: for one configuration what ``predict --json`` prints, for a sweep
        lists of numbers.
        """
        from wattcast.predictor.prediction_json import prediction_to_plain

        return prediction_to_plain(self)

    def to_json(self) -> str:
        """Return ``to_dict()`` as JSON text."""
        from wattcast.predictor.prediction_json import encode_json

        return encode_json(self.to_dict()).decode()

    def to_frame(self) -> Any:
        """Return a table with a row for each configuration: polars, or pandas where only that is
        installed.
        """
        from wattcast.predictor.prediction_json import prediction_to_frame

        return prediction_to_frame(self)

    @cached_property
    def peak_power_w(self) -> Values:
        """The most that any kernel draws, of one GPU."""
        return _to_plain(np.broadcast_to(self.basis.detail.peak_w, np.shape(self.power_w)))

    @cached_property
    def modules(self) -> tuple[ModuleShare, ...]:
        """The power by module."""
        basis = self.basis
        totals = basis.totals
        detail = basis.detail
        whole = (
            totals.latency_s[..., np.newaxis],
            basis.timeline.total[..., np.newaxis, :],
        )  # as one interval
        activity = Activity(*whole, basis.timeline.events, basis.at, ActivitySource.PREDICTED)
        busy = module_utilisation(activity, basis.gpu, totals.effective_hz[..., np.newaxis])
        power_w = mean_power_w(detail.part_j, totals.latency_s[..., np.newaxis])
        return tuple(
            ModuleShare(
                part,
                _to_plain(power_w[..., i]),
                _to_plain(busy[part][..., 0]) if part in busy else None,
            )
            for i, part in enumerate(detail.parts)
        )

    @cached_property
    def phases(self) -> tuple[PhaseShare, ...]:
        """The parts of one run that settle at clocks of their own, in order; empty where all of it
        has one clock.

        A sweep has none: its points may be divided in different ways.
        """
        if len(self.basis.divisions) != 1 or self.basis.totals.power_w.ndim:
            return ()
        by_name: dict[str, list[GovernedStretch]] = {}
        for part in self.basis.divisions[0].stretches:
            by_name.setdefault(_name_phase(part.stretch.name, self.basis.graph.phase), []).append(
                part
            )
        return tuple(_sum_phase(name, parts) for name, parts in by_name.items())

    @cached_property
    def ops(self) -> tuple[OperatorShare, ...]:
        """The distinct operators, in order of appearance."""
        return self._share_operators(self.basis.timeline.kernels.appearance)

    def rank_ops(self, most: int | None = None) -> tuple[OperatorShare, ...]:
        """Return the distinct operators of one configuration that take most energy, the first of
        them first.
        """
        rows = self.basis.timeline.kernels.appearance
        spent_j = (self.basis.detail.kernel_j * self.basis.timeline.calls)[rows]
        return self._share_operators(rows[np.argsort(-spent_j, kind="stable")[:most]])

    def _share_operators(self, rows: npt.NDArray[np.intp]) -> tuple[OperatorShare, ...]:
        timeline = self.basis.timeline
        detail = self.basis.detail
        calls = timeline.calls[rows]
        watts = detail.kernel_part_w[..., rows, :].sum(axis=-1)
        columns = detail.kernel_s[..., rows] * calls, watts, detail.kernel_j[..., rows] * calls
        spent_s, power_w, spent_j = (
            of.tolist() if of.ndim == 1 else np.moveaxis(of, -1, 0) for of in columns
        )
        ops = timeline.kernels.ops
        some = rows.tolist()
        each = zip(some, calls.tolist(), spent_s, power_w, spent_j, strict=True)
        return tuple(
            [OperatorShare(ops[i], int(n), s, w, j, self.basis, i) for i, n, s, w, j in each]
        )

    @cached_property
    def interval(self) -> PredictionInterval:
        """How far off latency, power and energy may be."""
        return compute_interval(self.basis)

    @cached_property
    def support(self) -> Support:
        """How far this is from what was measured: ``measured``, ``near`` or ``far``, and why."""
        return judge_support(self.basis)


def _name_phase(stretch: str, phase: str) -> str:
    """Return the name of a stretch; what comes before the decode steps of a generation is its
    prefill.
    """
    return stretch.replace("forward", "prefill") if phase == "generate" else stretch


def _sum_phase(name: str, parts: Sequence[GovernedStretch]) -> PhaseShare:
    """Add up stretches of one name."""
    latency_s = sum(float(part.totals.latency_s) for part in parts)
    energy_j = sum(float(part.totals.energy_j) for part in parts)
    clocked = sum(
        float(sweep_values(part.run.clock_hz)) * float(part.totals.latency_s) for part in parts
    )
    capped = any(bool(part.capped) for part in parts)
    return PhaseShare(name, latency_s, energy_j / latency_s, clocked / latency_s, capped)


def predict_graph(graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle) -> Prediction:
    """Predict one workload: analyse its kernels, find the clock the governor allows, sum up at that
    clock.
    """
    return predict_timeline(analyse_graph(graph, gpu, bundle), graph, gpu, at, bundle)


def predict_graphs(
    graphs: Sequence[Graph], gpu: Gpu, at: OperatingPoint, bundle: Bundle
) -> list[Prediction]:
    """Predict many workloads, in order, with the kernels of ``TOGETHER`` of them in one table."""
    found = []
    for start in range(0, len(graphs), TOGETHER):
        some = graphs[start : start + TOGETHER]
        pairs = zip(analyse_graphs(some, gpu, bundle), some, strict=True)
        found += [predict_timeline(timeline, graph, gpu, at, bundle) for timeline, graph in pairs]
    return found


def predict_timeline(
    timeline: Timeline, graph: Graph, gpu: Gpu, at: OperatingPoint, bundle: Bundle
) -> Prediction:
    """Predict a workload whose timeline is known."""
    settled, totals, ran = run_governed(timeline, gpu, at, bundle)
    power_w = totals.power_w
    memory_byte = graph.memory_byte
    kept = ran if power_w.ndim == 0 else None
    basis = PredictionBasis(
        graph, timeline, totals, gpu, settled.at, bundle, settled.asked_w, kept, settled.divisions
    )
    return Prediction(
        name=graph.name,
        gpu=gpu.name,
        latency_s=_broadcast_like(totals.latency_s, power_w),
        power_w=_to_plain(power_w),
        energy_j=_to_plain(totals.energy_j),
        clock_hz=_broadcast_like(sweep_values(settled.clock_hz), power_w),
        effective_clock_hz=_broadcast_like(totals.effective_hz, power_w),
        capped=_broadcast_like(settled.capped, power_w),
        busy_s=_broadcast_like(totals.busy_s, power_w),
        memory_byte=memory_byte,
        fits=None
        if memory_byte is None
        else bool(np.all(memory_byte <= np.asarray(gpu.memory.capacity_byte))),
        assumptions=_list_assumptions(basis, settled.met, at),
        status=bundle.status,
        provenance=bundle.provenance,
        basis=basis,
    )


def _broadcast_like(values: npt.NDArray[Any], of: Array) -> Any:
    """Broadcast values to the shape of a prediction."""
    return _to_plain(values if values.shape == of.shape else np.broadcast_to(values, of.shape))


def _to_plain(values: npt.NDArray[Any]) -> Any:
    """Return the number of one configuration as Python's own, and arrays of a sweep as they are."""
    return values.item() if values.ndim == 0 else values


_NEGLIGIBLE_SLOWDOWN = 0.05


def _list_assumptions(basis: PredictionBasis, met: Mask, asked: OperatingPoint) -> tuple[str, ...]:
    timeline = basis.timeline
    gpu = basis.gpu
    bundle = basis.bundle
    notes = [*basis.graph.assumptions, *timeline.kernels.assumptions, *bundle.assumptions]
    if not met.all():
        notes.append("the power limit cannot be met even at the lowest clock; that clock is given")
    if asked.clock_hz is not None or asked.power_limit_w is not None:
        slow_s = total_at_clock(
            slow_memory_path(timeline, gpu.clocks.max_hz), basis.at, bundle
        ).latency_s
        slower = float(np.max(slow_s / basis.totals.latency_s)) - 1.0
        if slower > _NEGLIGIBLE_SLOWDOWN:
            notes.append(
                f"clock: the way to device memory keeps up until L2 slows down; if it follows the clock below "
                f"{MEMORY_KNEE:.0%} of the top clock, as on a GTX Titan X, latency is up to {slower:.0%} longer"
            )
    if timeline.kernels.link_byte.any():
        notes += _list_link_notes(basis)
    return tuple(dict.fromkeys(notes))


def _list_link_notes(basis: PredictionBasis) -> list[str]:
    """Say how the GPUs are taken to be joined, and warn where fewer of them would be faster."""
    from wattcast.predictor.link_laws import describe_links, warn_of_slow_links

    timeline = basis.timeline
    ops = timeline.kernels.ops
    places = [i for i, op in enumerate(ops) if isinstance(op, Collective)]
    joined = [(cast(Collective, ops[i]), float(timeline.calls[i])) for i in places]
    notes = [describe_links(basis.gpu, max(op.gpus for op, _ in joined))]
    spent_s = (basis.detail.kernel_s * timeline.calls).reshape(-1, len(timeline.calls))
    if len(spent_s) == 1:  # of a sweep each point may differ
        linked_s = float(spent_s[0, places].sum())
        other_s = float(spent_s.sum()) - linked_s
        notes.append(warn_of_slow_links(joined, linked_s, other_s, basis.gpu) or "")
    return [note for note in notes if note]
