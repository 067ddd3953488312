"""Run a workload's timeline at a clock: activity, latency, power and energy.

To the events of the timeline comes one that a clock decides: cycles of SMs with work resident,
active SMs · (t - t_fixed) · f, since a waiting SM draws power too, but not while a kernel is
launched.

Power models see ``priced`` activities: each kernel's events times its learned energy factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import (
    dataclass,
    fields,
    replace,
)
from operator import attrgetter
from typing import cast

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import (
    Array,
    Mask,
    append_axes,
    map_distinct,
    sweep_values,
)
from wattcast.core.strict_files import FitStatus
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import (
    Kernels,
    build_kernels,
    lower_graph,
    lower_graphs,
)
from wattcast.kernels.kernel_table import LibraryStyle, RunCondition
from wattcast.kernels.machete_kernels import machete_energy
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.power_model import interval_energy_j, mean_power_w
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.engine_host import EngineHost, load_host_times
from wattcast.predictor.ideal_terms import compute_ideal_terms
from wattcast.predictor.kernel_coefficients import KERNEL_TIMES
from wattcast.predictor.kernel_phases import blend_corrections, build_timeline
from wattcast.predictor.learned_factors import LearnedFactors
from wattcast.predictor.timeline import (
    Timeline,
    compute_busy_s,
    compute_effective_hz,
    compute_kernel_s,
    compute_latency_s,
    compute_waiting_s,
)
from wattcast.workload.engine_row_operators import Sampling
from wattcast.workload.graph import Graph
from wattcast.workload.model_options import SoftwareStack
from wattcast.workload.operator_base import Operator, index_words
from wattcast.workload.operator_types import (
    Bmm,
    Collective,
    Linear,
)

BUSY_EVENT = "busy_sm_cycle"


def count_busy_cycles(
    timeline: Timeline,
    kernel_s: Array,
    effective_hz: Array,
) -> Array:
    """Count the cycles of busy SMs in one run of each kernel, ``(*sweep, kernel)``; those that wait
    count less.
    """
    fixed, *later_phases = timeline.phases
    working_s = kernel_s if fixed.seconds is None else kernel_s - fixed.seconds
    if later_phases[0].name == "start":
        assert later_phases[0].cycles is not None, "a start is of cycles alone"
        working_s = working_s - later_phases[0].cycles / effective_hz
    if timeline.waiting_sm != 1.0:
        waiting_s = compute_waiting_s(timeline.phases, effective_hz)
        working_s = working_s - (1.0 - timeline.waiting_sm) * waiting_s
    return np.asarray(working_s * effective_hz * timeline.active)


def kernel_activity(
    timeline: Timeline,
    kernel_s: Array,
    effective_hz: Array,
    gap_s: Array,
    at: OperatingPoint,
    *,
    priced: bool = False,
) -> Activity:
    """Return one run of each kernel as an interval, then the idle gaps as one last interval without
    events.
    """
    kernel_count, event_count = timeline.value.shape
    value = np.zeros((*kernel_s.shape[:-1], kernel_count + 1, event_count + 1))
    value[..., :-1, :-1] = timeline.kernel_value
    value[..., :-1, -1] = count_busy_cycles(timeline, kernel_s, effective_hz)
    if priced:
        value[..., :-1, :] *= timeline.energy_factor[:, np.newaxis]
    return Activity(
        duration_s=np.concatenate([kernel_s, gap_s[..., np.newaxis]], axis=-1),
        value=value,
        events=(*timeline.events, BUSY_EVENT),
        at=at,
        source=ActivitySource.PREDICTED,
    )


@dataclass(frozen=True, eq=False, repr=False)
class WorkloadTotals:
    """Figures of a whole workload at a clock; each ``(*sweep,)``."""

    latency_s: Array
    busy_s: Array  # time in kernels; the rest the device waits for the host
    power_w: Array  # mean over the latency
    effective_hz: Array  # mean over the time in kernels

    @property
    def energy_j(self) -> Array:
        """Joules of one run of the workload."""
        return self.power_w * self.latency_s


@dataclass(frozen=True, eq=False, repr=False)
class KernelDetail:
    """Figures of a workload at a clock by kernel and by part of the power."""

    kernel_s: Array  # (*sweep, kernel) one run
    effective_hz: Array  # broadcasts to (*sweep, kernel)
    kernel_part_w: Array  # (*sweep, kernel, part)
    kernel_j: Array  # (*sweep, kernel) one run
    gap_j: Array  # (*sweep,)
    part_j: Array  # (*sweep, part) whole workload
    parts: tuple[str, ...]
    peak_w: Array  # (*sweep,) the most any kernel draws


def analyse_graph(
    graph: Graph,
    gpu: Gpu,
    bundle: Bundle,
) -> Timeline:
    """Analyse a workload and return its clock-free timeline on this GPU."""
    kernels = lower_graph(graph, gpu, bundle.reference)
    return _place_in_model(graph, analyse_kernels(kernels, gpu, bundle), gpu, bundle)


def analyse_graphs(
    graphs: Sequence[Graph],
    gpu: Gpu,
    bundle: Bundle,
) -> list[Timeline]:
    """Analyse many workloads in one table of kernels and return one timeline per workload."""
    if len(graphs) == 1:
        return [analyse_graph(graphs[0], gpu, bundle)]
    kernels, parts = lower_graphs(graphs, gpu, bundle.reference)
    whole = analyse_kernels(kernels, gpu, bundle)
    timelines = []
    for graph, part in zip(graphs, parts, strict=True):
        timeline = whole.select_rows(*part)
        timelines.append(_place_in_model(graph, timeline, gpu, bundle))
    return timelines


def analyse_kernels(
    kernels: Kernels,
    gpu: Gpu,
    bundle: Bundle,
) -> Timeline:
    """Analyse kernels and return their clock-free timeline on this GPU.

    A library may run a product of some rows as one of more, with rows to spare. So where several
    kinds of kernel are likely, and the mean over them rises and falls with the rows, a product
    takes no longer than the next larger ones. Nor does one of a vector, whose kernel has
    corrections of its own, nor any on a card that a table calibrated: between the sizes of the
    table its factors rise and fall.
    """
    l2_rate = bundle.reference.l2_byte_per_cycle
    timeline = build_timeline(
        kernels,
        gpu,
        bundle.corrections,
        bundle.launch,
        bundle.learned,
        l2_rate,
        bundle.reference.lone_sm_share,
    )
    if bundle.waiting_sm != 1.0:
        timeline = replace(timeline, waiting_sm=bundle.waiting_sm)
    factor = find_padding_factor(kernels, gpu, bundle, timeline.time_factor)
    if factor is None:
        return timeline
    return stretch_phases(timeline, factor)


def stretch_phases(timeline: Timeline, factor: Array) -> Timeline:
    """Return the timeline with all phases of each kernel ``factor`` ``(kernel,)`` times as long."""
    phases = [phase.change(factor.__mul__, factor.__mul__) for phase in timeline.phases]
    return replace(timeline, phases=tuple(phases))


def find_padding_factor(
    kernels: Kernels,
    gpu: Gpu,
    bundle: Bundle,
    time_factor: Array,
) -> Array | None:
    """Return the factor on the time of products that run faster with rows to spare, ``(kernel,)``;
    None where there are none.
    """
    if bundle.learned is None:
        return None
    by_table = bundle.status is FitStatus.CALIBRATED
    products = _find_paddable(kernels, by_table)
    if not products:
        return None
    padded_s = _shortest_padded_s(
        kernels,
        products,
        gpu,
        bundle,
        bundle.learned,
    )
    predicted_s = _reference_s(kernels, bundle, time_factor)[products]
    slack = KERNEL_TIMES.table_slack if by_table else 1.0
    factor = np.ones(len(kernels.ops))
    factor[products] = np.minimum(slack * padded_s / predicted_s, 1.0)
    return factor


_LARGER_SIZES = 4  # that a product is compared with


def _find_paddable(kernels: Kernels, by_table: bool) -> list[int]:
    """Find the products that a library may run with rows to spare."""
    is_vector = map_distinct(
        lambda family: family.startswith("gemm.vector"), kernels.work.kernel_family
    )
    is_mixed = kernels.work.units % 1.0 > 0.0
    products = []
    for row in np.flatnonzero(by_table | is_vector | is_mixed).tolist():
        op = kernels.ops[row]
        is_small = isinstance(op, Linear | Bmm) and op.m <= KERNEL_TIMES.padded_rows
        if is_small and not kernels.conditions[row].kernels:
            products.append(row)
    return products


def _shortest_padded_s(
    kernels: Kernels,
    products: Sequence[int],
    gpu: Gpu,
    bundle: Bundle,
    learned: LearnedFactors,
) -> Array:
    """Return the shortest time of the next larger products on the reference chip,
    ``(product,)``.
    """
    # of many products that differ in rows alone, the larger ones are few
    place_of: dict[tuple[Operator, RunCondition], int] = {}
    places = []
    for row in products:
        op = cast("Linear | Bmm", kernels.ops[row])
        for size in _list_larger_sizes(op.m):
            larger = (replace(op, m=size), kernels.conditions[row])
            places.append(place_of.setdefault(larger, len(place_of)))
    ops, conditions = zip(*place_of, strict=True)
    padded = build_kernels(
        ops,
        conditions,
        gpu,
        bundle.reference,
        (),
    )
    corrections = blend_corrections(padded.work, bundle.corrections)
    time_factor, _, _ = learned.factors(padded, corrections, energy=False)
    padded_s = _reference_s(padded, bundle, time_factor)[places]
    return np.asarray(padded_s.reshape(-1, _LARGER_SIZES).min(axis=1))


def _list_larger_sizes(m: int) -> list[int]:
    """Return the next sizes above ``m`` among powers of two and one and a half times these.

    >>> _list_larger_sizes(96), _list_larger_sizes(5)
    ([128, 192, 256, 384], [6, 8, 12, 16])
    """
    power = 1 << m.bit_length()
    sizes = [
        size for double in (power // 2, power, 2 * power) for size in (double, double + double // 2)
    ]
    return [size for size in sizes if size > m][:_LARGER_SIZES]


def _reference_s(
    kernels: Kernels,
    bundle: Bundle,
    time_factor: Array,
) -> Array:
    """Return the seconds of each kernel on the reference chip at its top clock, ``(kernel,)``."""
    blended = blend_corrections(kernels.work, bundle.corrections)
    terms = compute_ideal_terms(kernels, bundle.reference)
    return np.asarray(time_factor * terms.corrected(blended.T, bundle.reference.top_hz))


def _place_in_model(
    graph: Graph,
    timeline: Timeline,
    gpu: Gpu,
    bundle: Bundle,
) -> Timeline:
    """Return a workload's timeline with what operators take more or less than alone."""
    cold_s = None
    if bundle.cold is not None and not graph.operands:
        cold_s = bundle.cold.extra_s(timeline.kernels, bundle.reference.l2_byte)
    return place_in_model(
        graph,
        timeline,
        gpu,
        bundle,
        cold_s,
    )


def place_in_model(
    graph: Graph,
    timeline: Timeline,
    gpu: Gpu,
    bundle: Bundle,
    cold_s: Array | None,
) -> Timeline:
    """Return a workload's timeline with what operators take more or less than alone: cold caches
    (``cold_s`` seconds, ``(*sweep, kernel)``), overlap.
    """
    if graph.stack == SoftwareStack.ENGINE:
        timeline = _run_by_engine(timeline, bundle)
    elif graph.layer_host != 1.0:
        kinds = index_words(timeline.kernels.ops, attrgetter("kind"))
        timeline = replace(timeline, host_s=bundle.launch.host_s(kinds, graph.layer_host))
    if cold_s is not None:
        timeline = timeline.delay_kernels(cold_s)
    ops = timeline.kernels.ops
    has_collectives = Collective in index_words(ops, type).values
    if has_collectives and any(isinstance(op, Collective) and op.overlaps for op in ops):
        from wattcast.predictor.link_laws import hidden_s  # most predictions are of one GPU

        timeline = timeline.delay_kernels(-hidden_s(timeline, gpu))
    return timeline


def _run_by_engine(timeline: Timeline, bundle: Bundle) -> Timeline:
    """Return the timeline of an inference engine's steps.

    Kernels take less energy in a step that decodes than alone, and a step that yields tokens takes
    a little time outside of them, which goes to the kernel that chooses tokens. The engine replays
    its kernels: issuing one costs nothing, and the host counts step by step.
    """
    times = load_host_times()
    step_energy = np.where(_find_decoding(timeline), bundle.step_energy, 1.0)
    in_step = machete_energy(timeline.kernels.work) * step_energy
    timeline = replace(timeline, energy_factor=in_step * timeline.energy_factor)

    kinds = index_words(timeline.kernels.ops, attrgetter("kind"))
    is_sampling = map_distinct(Sampling.kind.__eq__, kinds)
    timeline = timeline.delay_kernels(np.where(is_sampling, times.sample_s, 0.0))

    by_openai = bundle.reference.style is LibraryStyle.HOPPER
    launch = bundle.launch
    factor = sweep_values(launch.engine_factor)
    engine = EngineHost(times, by_openai, factor, launch.engine_waits)
    return replace(timeline, host_s=np.zeros_like(timeline.host_s), engine=engine)


def _find_decoding(timeline: Timeline) -> Mask:
    """Find the kernels of steps that only decode, ``(kernel,)``.

    The energy of steps was fitted to these. With it, traffic of fitting models, most of whose
    energy goes to prompts, was 3.0 % off in TPOT and 4.0 % in energy, without it 1.7 and 3.2 %.
    """
    decodes = np.zeros(len(timeline.calls), dtype=bool)
    prompts = np.zeros(len(timeline.calls), dtype=bool)
    for segment in timeline.kernels.segments:
        if segment.step is not None:
            of_step = prompts if segment.step.prompts else decodes
            of_step[segment.rows] = True
    return decodes & ~prompts


@dataclass(frozen=True, eq=False, repr=False)
class ClockedTimeline:
    """A timeline at a set clock."""

    clock_hz: Array
    effective_hz: Array
    kernel_s: Array  # (*sweep, kernel)
    latency_s: Array  # (*sweep,)
    power_w: Array  # (*sweep,) mean over the latency


class TimelineRunner:
    """Runs a timeline at one clock after another; what no clock changes is computed once.

    ``ahead_s`` ``(*sweep,)`` is the earlier work that the device still has to do when the host
    begins to issue.
    """

    def __init__(
        self,
        timeline: Timeline,
        at: OperatingPoint,
        bundle: Bundle,
        ahead_s: Array | float = 0.0,
    ) -> None:
        self._timeline = timeline
        self._at = at
        self._bundle = bundle
        self._ahead_s = ahead_s
        self._weight = timeline.calls * timeline.energy_factor
        self._mean_power = bundle.power.prepare_mean_power(
            (*timeline.events, BUSY_EVENT), timeline.weighted
        )

    def run_at(self, clock_hz: Array) -> ClockedTimeline:
        """Run the timeline at a set clock, ``(*sweep, 1)``.

        All power models are linear in counts at a given clock, so the workload's mean power is that
        of its counts added up, over its latency: no need to look at kernels one by one.
        """
        timeline = self._timeline
        running_hz = compute_effective_hz(timeline, clock_hz, self._bundle.clock_law)
        kernel_s = compute_kernel_s(timeline.phases, running_hz)
        latency_s = compute_latency_s(timeline, kernel_s, self._ahead_s)
        busy = count_busy_cycles(timeline, kernel_s, running_hz) @ self._weight
        at = replace(self._at, clock_hz=clock_hz)
        power_w = self._mean_power(busy, latency_s, at)
        factor = self._bundle.power_factor
        if timeline.engine is not None or factor != 1.0:
            gap_s = np.maximum(latency_s - compute_busy_s(timeline, kernel_s), 0.0)
            gap_share = mean_power_w(gap_s, latency_s)
            if factor != 1.0:  # of a GPU that works; one that waits draws as usual
                gap_w = _idle_w(at, self._bundle) * gap_share
                power_w = gap_w + factor * (power_w - gap_w)
            if timeline.engine is not None:
                power_w = power_w + _waiting_w(timeline.engine, at, self._bundle) * gap_share
        return ClockedTimeline(
            clock_hz,
            running_hz,
            kernel_s,
            latency_s,
            power_w,
        )

    def sum_up(self, run: ClockedTimeline) -> WorkloadTotals:
        """Return the figures of the workload as a whole."""
        busy_s = compute_busy_s(self._timeline, run.kernel_s)
        cycles = (run.kernel_s * run.effective_hz) @ self._timeline.calls
        return WorkloadTotals(run.latency_s, busy_s, run.power_w, mean_power_w(cycles, busy_s))


def _waiting_w(
    engine: EngineHost,
    at: OperatingPoint,
    bundle: Bundle,
) -> Array:
    """Return the watts by which a GPU that waits for an engine's host draws more than an idle one,
    ``(*sweep,)``.
    """
    return np.asarray((engine.times.waiting_power - 1.0) * _idle_w(at, bundle))


def _idle_w(at: OperatingPoint, bundle: Bundle) -> Array:
    """Return the watts of a GPU with nothing to do at the set clock, ``(*sweep,)``."""
    idle_w = bundle.power.idle_power_w(_set_clock(at), at.temperature_c)
    return np.asarray(sweep_values(idle_w))


def total_at_clock(
    timeline: Timeline,
    at: OperatingPoint,
    bundle: Bundle,
) -> WorkloadTotals:
    """Compute latency and mean power at a set clock (``at.clock_hz``, not None)."""
    runner = TimelineRunner(timeline, at, bundle)
    return runner.sum_up(runner.run_at(_set_clock(at)))


def detail_at_clock(
    timeline: Timeline,
    at: OperatingPoint,
    bundle: Bundle,
    run: ClockedTimeline | None = None,
) -> KernelDetail:
    """Split what ``total_at_clock`` sums up by kernel and by part; ``run``: the timeline at that
    clock, if known.
    """
    if run is None:
        run = TimelineRunner(timeline, at, bundle).run_at(_set_clock(at))
    gap_s = np.maximum(run.latency_s - compute_busy_s(timeline, run.kernel_s), 0.0)
    activity = kernel_activity(
        timeline,
        run.kernel_s,
        run.effective_hz,
        gap_s,
        at,
        priced=True,
    )
    power = bundle.power.power(activity)
    if bundle.power_factor != 1.0:
        part_w = power.part_w.copy()
        part_w[..., :-1, :] *= bundle.power_factor  # of kernels, not of the gaps
        power = replace(power, part_w=part_w)
    joules = interval_energy_j(power, activity.duration_s)
    part_j = power.part_w * activity.duration_s[..., np.newaxis]
    if timeline.engine is not None:  # a GPU that waits for it draws more than an idle one
        part_j[..., -1, :] *= timeline.engine.times.waiting_power
        joules[..., -1] *= timeline.engine.times.waiting_power
    calls = np.append(timeline.calls, 1.0)
    return KernelDetail(
        kernel_s=run.kernel_s,
        effective_hz=run.effective_hz,
        kernel_part_w=power.part_w[..., :-1, :],
        kernel_j=joules[..., :-1],
        gap_j=joules[..., -1],
        part_j=np.einsum("...ip,i->...p", part_j, calls),
        parts=power.parts,
        peak_w=power.total_w[..., :-1].max(axis=-1),
    )


@dataclass(frozen=True, eq=False, repr=False)
class StretchDetail:
    """The detail of a stretch of a run."""

    rows: npt.NDArray[np.int64]  # of its kernels in the whole run
    calls: Array  # of its kernels
    detail: KernelDetail


def join_details(kernel_count: int, stretches: Sequence[StretchDetail]) -> KernelDetail:
    """Join the details of stretches that follow one another to that of the run of ``kernel_count``
    kernels.

    A kernel that runs in several stretches, at several clocks, has the means over its calls.
    """
    parts = stretches[0].detail.parts
    shape = np.broadcast_shapes(*(stretch.detail.gap_j.shape for stretch in stretches))
    calls = np.zeros(kernel_count)
    kernel_s = np.zeros((*shape, kernel_count))
    kernel_j = np.zeros((*shape, kernel_count))
    cycles = np.zeros((*shape, kernel_count))
    kernel_part_j = np.zeros((*shape, kernel_count, len(parts)))
    gap_j = np.zeros(shape)
    part_j = np.zeros((*shape, len(parts)))
    peak_w = np.zeros(shape)
    for stretch in stretches:
        rows = stretch.rows
        detail = stretch.detail
        spent_s = detail.kernel_s * stretch.calls
        calls[rows] += stretch.calls
        kernel_s[..., rows] += spent_s
        kernel_j[..., rows] += detail.kernel_j * stretch.calls
        cycles[..., rows] += spent_s * detail.effective_hz
        kernel_part_j[..., rows, :] += spent_s[..., np.newaxis] * detail.kernel_part_w
        gap_j += detail.gap_j
        part_j += detail.part_j
        peak_w = np.maximum(peak_w, detail.peak_w)

    divisor_s = np.maximum(kernel_s, 1e-300)  # a kernel without time has no power
    return KernelDetail(
        kernel_s=kernel_s / calls,
        effective_hz=cycles / divisor_s,
        kernel_part_w=kernel_part_j / divisor_s[..., np.newaxis],
        kernel_j=kernel_j / calls,
        gap_j=gap_j,
        part_j=part_j,
        parts=parts,
        peak_w=peak_w,
    )


def choose_details(
    points: Mask,
    detail: KernelDetail,
    detail_elsewhere: KernelDetail,
) -> KernelDetail:
    """Return ``detail`` at some ``points`` ``(*sweep,)`` of a sweep, another one elsewhere."""
    chosen: dict[str, Array] = {}
    for item in fields(KernelDetail):
        if item.name != "parts":
            here = getattr(detail, item.name)
            elsewhere = getattr(detail_elsewhere, item.name)
            chosen[item.name] = np.where(append_axes(points, here.ndim), here, elsewhere)
    return KernelDetail(**chosen, parts=detail.parts)


def _set_clock(at: OperatingPoint) -> Array:
    assert at.clock_hz is not None, "no clock is set: call governor.run_governed first"
    return np.asarray(at.clock_hz, dtype=np.float64)
