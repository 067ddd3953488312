"""Say how sure a prediction is: how far it lies from what was measured, in which respect, and its
interval.

Every respect (kernels, number format, clock, power limit, temperature, stack, parallelism, host,
GPU) is one ``SupportDistance``: the share of time or energy beyond what was measured, a sentence,
and what it adds to the ends of the interval. ``Support`` is the worst of them in a word; the
interval holds all of them in quadrature of logs. How much each adds is learned from rows that were
left out (``bundle/distances.yaml``, docs/method/confidence.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, cast

import numpy as np

from wattcast.core.arrays import (
    Array,
    CodedColumn,
    append_axes,
    index_distinct,
    map_distinct,
    split_rows,
    sweep_values,
)
from wattcast.core.strict_files import FitStatus
from wattcast.core.units import show
from wattcast.hardware import node_of_gpu
from wattcast.kernels.kernel_table import Kernels, group_forms, root_family
from wattcast.power.power_model import mean_power_w
from wattcast.predictor.bundle.bundle_file import Bundle, MeasuredRange, ResidualEnds
from wattcast.predictor.bundle.support_widening import (
    NORMAL_P90,
    OUTWARD,
    ForecastEnds,
    HostSpread,
    LearnedPair,
    OutsideReason,
    learned_distances,
)
from wattcast.predictor.timeline import Timeline, compute_latency_s
from wattcast.workload.model_options import SoftwareStack
from wattcast.workload.operator_base import OperatorColumns, RowIndex, select_operators
from wattcast.workload.operator_types import Collective

if TYPE_CHECKING:
    from wattcast.predictor.pipeline import WorkloadTotals
    from wattcast.predictor.prediction import PredictionBasis

# of time or energy beyond what was measured, to be called near and far
NEAR_SHARE = 0.05
FAR_SHARE = 0.10
GOVERNED = (
    0.98,
    1.02,
)  # of a power limit: what a board averages over a second where the limit lowers its clock
MANY_FORMS = (
    8  # of operators that ran as one kind of kernel, to speak for one that was not measured
)
_ENDS_OF = [0, 0, 1, 1]  # low and high end of latency, and of power
_MARGIN = 0.5  # in log2 of a size, beyond the smallest and the largest measured
_ANY_CLOCK_HZ = (1.0, 1e18)  # of a family whose clocks are not known
_CLOCK_MARGIN = 0.3  # in log2 of a clock or a limit: as good as measured


@dataclass(frozen=True)
class PredictionInterval:
    """Low and high ends around a prediction, each ``(*sweep, 2)``."""

    level: float
    latency_s: Array
    power_w: Array
    energy_j: Array


class SupportWord(StrEnum):
    """How far a prediction is from what was measured."""

    MEASURED = "measured"
    NEAR = "near"
    FAR = "far"


_WORDS = tuple(SupportWord)


@dataclass(frozen=True)
class SupportDistance:
    """How far a prediction is from what was measured in one respect.

    ``beyond`` and ``far`` are shares of the time or energy, the larger of both, that lie beyond
    what was measured and far beyond it, ``(*sweep,)``. ``ends`` are half-widths of logs by which
    the interval of the workload widens: low and high end of latency, low and high end of power,
    ``(*sweep, 4)``."""

    dimension: str  # clock, power limit, ...
    beyond: Array
    far: Array
    reason: str
    ends: Array

    @property
    def rank(self) -> Array:
        """0 for measured, 1 for near, 2 for far, ``(*sweep,)``."""
        return np.where(self.far >= FAR_SHARE, 2, np.where(self.beyond >= NEAR_SHARE, 1, 0))

    @property
    def word(self) -> SupportWord:
        """The worst word of a sweep."""
        return _WORDS[int(np.max(self.rank))]


@dataclass(frozen=True)
class Support:
    """How far a prediction is from what was measured: the worst word of all respects, and why."""

    word: SupportWord
    reason: str
    distances: tuple[SupportDistance, ...] = field(default=(), repr=False, compare=False)

    @property
    def inside(self) -> bool:
        """Whether the prediction is measured or near, and not far."""
        return self.word is not SupportWord.FAR

    @property
    def words(self) -> Array:
        """The word of each point of a sweep, ``(*sweep,)``."""
        ranks = [d.rank for d in self.distances]
        return np.array(_WORDS)[np.maximum.reduce(np.broadcast_arrays(*ranks)) if ranks else 0]


@dataclass(frozen=True)
class UnmeasuredKernel:
    """A kernel outside what was measured: the reason, a sentence for people, and whether it is far
    outside.
    """

    reason: OutsideReason
    description: str
    far: bool = True


UnmeasuredKernels = Mapping[int, UnmeasuredKernel]  # by row; others are inside


def compute_interval(
    basis: PredictionBasis,
    residuals: Mapping[str, ResidualEnds] | None = None,
    steps: LearnedPair | None = None,
) -> PredictionInterval:
    """Compute the interval of a workload from the residuals (measured over predicted) of its
    kernels' families.

    With half-widths x_k of kernels and their shares s_k of the time (of the energy, for power), the
    workload has

        x² = ρ·(Σ s_k·x_k)² + (1 - ρ)·Σ (s_k·x_k)² + Σ_d x_d²

    where ρ is how far the errors of kernels go together (learned from layers of operators that were
    measured both alone and together) and x_d what every ``SupportDistance`` adds. Residuals belong
    to the card that was measured, so the ends also move out by the spread of cards, unless the
    bundle is for this very card (``Bundle.for_this_card``). Power errs at the clock asked for.
    Where it then exceeds the limit, the governor holds it within ``GOVERNED`` of that. Where the
    host holds a run up, kernels that take longer hide behind it. The energy interval adds those of
    latency and power in quadrature of logs: their errors have opposite signs if any correlation.
    ``residuals`` and ``steps`` stand for those that ship.

    Steps of the very engine that was measured were measured as a whole: their own spread stands for
    that of their kernels, of which only those that were never measured add to it."""
    bundle = basis.bundle
    totals = basis.totals
    bundle = bundle if residuals is None else replace(bundle, residuals=residuals)
    together, time, energy = learned_distances().together, *kernel_shares(basis)
    is_step = is_measured_engine(basis)
    kernels = kernel_log_ends(basis.timeline, bundle, basis.reasons, is_step=is_step)
    spread = np.array([NORMAL_P90 * bundle.cards.latency, NORMAL_P90 * bundle.cards.power])
    if is_step:
        steps = learned_distances().steps[find_step_kind(basis)] if steps is None else steps
        spread = np.hypot(spread, [steps.latency, steps.power])
    by = np.sqrt(
        sum((np.square(d.ends) for d in basis.distances), np.square(spread.take(_ENDS_OF)))
    )
    time_ends = combine_log_ends(time, kernels[:, :2], together.latency)
    time_ends = time_ends * _scale_ends(basis, bundle)[..., np.newaxis]
    latency = np.exp(widen_log_ends(_hide_behind_host(basis, time_ends), by[..., :2]))
    power = np.exp(
        widen_log_ends(combine_log_ends(energy, kernels[:, 2:], together.power), by[..., 2:])
    )
    latency_s = totals.latency_s[..., np.newaxis] * latency
    mean_w = totals.power_w[..., np.newaxis]
    power_w = _power_ends(basis, power)
    off = np.hypot(np.log(latency), np.log(power_w / mean_w))
    energy_j = totals.energy_j[..., np.newaxis] * np.exp(off * OUTWARD)
    return PredictionInterval(bundle.interval_level, latency_s, power_w, energy_j)


def _hide_behind_host(basis: PredictionBasis, ends: Array) -> Array:
    """Return log-ends of the latency from those of the time in kernels: where the host holds a run
    up, they hide.
    """
    if not basis.timeline.has_host:
        return ends
    kernel_s = basis.detail.kernel_s
    scale = np.exp(ends)[..., np.newaxis]
    each = [compute_latency_s(basis.timeline, kernel_s * scale[..., end, :]) for end in (0, 1)]
    return np.asarray(np.log(np.stack(each, axis=-1) / basis.totals.latency_s[..., np.newaxis]))


def _power_ends(basis: PredictionBasis, ends: Array) -> Array:
    """Return low and high end of power, ``(*sweep, 2)``; of stretches, the means of theirs over the
    time.
    """
    limit_w = _limit_w(basis)[..., np.newaxis]
    in_burst = basis.at.duration_s is not None

    def stretch_ends(totals: WorkloadTotals, asked_w: Array) -> Array:
        mean_w = totals.power_w[..., np.newaxis]
        return govern_ends(mean_w, mean_w if in_burst else asked_w[..., np.newaxis], ends, limit_w)

    return _mean_over_stretches(basis, stretch_ends)


def _scale_ends(basis: PredictionBasis, bundle: Bundle) -> Array:
    """Return the factor on the ends of latency, ``(*sweep,)``; of stretches, the mean of theirs
    over the time.
    """
    limit_w = _limit_w(basis)
    return _mean_over_stretches(
        basis, lambda _, asked_w: scale_capped_ends(bundle, asked_w, limit_w)
    )


def _mean_over_stretches(
    basis: PredictionBasis, compute: Callable[[WorkloadTotals, Array], Array]
) -> Array:
    """Compute a column of each stretch, from its totals and the power it asks for, and average it
    over the time.
    """
    if not basis.divisions:
        return compute(basis.totals, basis.asked_w)
    shape = basis.totals.power_w.shape
    whole: Array | None = None
    for division in basis.divisions:
        summed: Array = np.zeros(())
        for part in division.stretches:
            column = compute(part.totals, part.asked_w)
            share = part.totals.latency_s / sum(
                other.totals.latency_s for other in division.stretches
            )
            summed = summed + column * append_axes(np.asarray(share), column.ndim)
        if whole is None or division.points is None:
            whole = summed
            continue
        points = np.broadcast_to(division.points, shape)
        whole = np.where(append_axes(points, summed.ndim), summed, whole)
    assert whole is not None, "a run has a stretch"
    return whole


def scale_capped_ends(bundle: Bundle, asked_w: Array, limit_w: Array | float) -> Array:
    """Return the factor on the ends of latency: below 1 where the limit holds a measured GPU."""
    capped = (asked_w > limit_w) & (bundle.status is FitStatus.MEASURED)
    return np.where(capped, learned_distances().capped.latency, 1.0)


def govern_ends(mean_w: Array, asked_w: Array, ends: Array, limit_w: Array | float) -> Array:
    """Return low and high end of power, ``(..., 2)``, from ``ends`` of its error at the clock asked
    for.

    Where that exceeds the limit, the governor holds power within ``GOVERNED`` of it, unless no
    clock can.

    >>> govern_ends(np.array([693.0]), np.array([900.0]), np.array([0.9, 1.1]), 700.0).tolist()
    [686.0, 714.0]
    """
    held_w = np.asarray(limit_w) * np.array(GOVERNED)
    free = mean_w > held_w[..., 1:]
    found_w = np.where(free, mean_w * ends, np.minimum(asked_w * ends, held_w))
    return np.stack(
        [np.minimum(found_w[..., 0], mean_w[..., 0]), np.maximum(found_w[..., 1], mean_w[..., 0])],
        axis=-1,
    )


def combine_log_ends(share: Array, ends: Array, together: float) -> Array:
    """Combine log-ends of kernels ``(kernel, 2)`` by their shares ``(*sweep, kernel)`` to those of
    a workload.

    ``together`` is the correlation ρ between errors of two kernels, 0 to 1.

    >>> ends = np.array([[-0.2, 0.2], [-0.2, 0.2]])
    >>> [combine_log_ends(np.array([0.5, 0.5]), ends, rho).round(3).tolist() for rho in (0.0, 1.0)]
    [[-0.141, 0.141], [-0.2, 0.2]]
    """
    middle = np.minimum(
        np.maximum(0.0, ends[:, :1]), ends[:, 1:]
    )  # the prediction, where it lies inside
    off = np.abs(ends - middle)
    spread = together * np.square(share @ off) + (1.0 - together) * (
        np.square(share) @ np.square(off)
    )
    return np.asarray(share @ middle + np.sqrt(spread) * OUTWARD)


def kernel_log_ends(
    timeline: Timeline,
    bundle: Bundle,
    reasons: UnmeasuredKernels,
    engines: Mapping[str, ForecastEnds] | None = None,
    is_step: bool = False,
) -> Array:
    """Return logs of the ends of each kernel, ``(kernel, 4)``: low and high of latency, low and
    high of power.

    Ends are those of the kernel's kind where it has any, else of its family. Where the bundle's own
    rows gave them, they go by the distance from these rows. Kernels of an engine differ more from
    version to version than from row to row of one, so that they take the ends of other versions
    (``engines``, else those learned). In a step of the very engine that was measured (``is_step``)
    only kernels outside what was measured have any."""
    work = timeline.kernels.work
    groups = work.kernel_family
    families = timeline.kernels.family
    place = groups.place * len(families.values) + families.place
    kinds = CodedColumn(list(product(groups.values, families.values)), place)
    found = [
        bundle.residuals[find_ends_name(of, root_family(of), family, bundle)]
        for of, family in kinds.values
    ]
    ends = np.log([(*residual.latency, *residual.power) for residual in found]).take(
        kinds.place, axis=0
    )
    if not bundle.seen:
        return ends
    scale = bundle.widening.scale(timeline.near)
    if scale is not None:
        ends *= scale.T.take(_ENDS_OF, axis=1)
    tabled: list[int] = []
    if is_step:
        ends[:] = 0.0
    elif bundle.status is FitStatus.MEASURED:
        engines = learned_distances().engines if engines is None else engines
        tabled = np.flatnonzero(map_distinct(engines.__contains__, groups)).tolist()
        for row in (
            tabled
        ):  # rows of other versions, at every distance, of kinds never measured here as well
            ends[row, :2] = np.log(engines[work.kernel_family[row]].latency)
    else:
        # tables of other chips gave these kinds their ends, whether the measured card ran them or
        # not
        own = {name for name in groups.values if ".engine." in name and name in bundle.residuals}
        tabled = np.flatnonzero(map_distinct(own.__contains__, groups)).tolist()
    if reasons:
        rows = list(reasons)
        apart = {why: (of.latency, of.power) for why, of in bundle.widening.apart.items()}
        by = np.array([apart[outside.reason] for outside in reasons.values()]).take(
            _ENDS_OF, axis=1
        )
        by[np.isin(rows, tabled), :2] = 0.0
        ends[rows] = widen_log_ends(ends[rows].reshape(-1, 2), by.reshape(-1, 2)).reshape(-1, 4)
    return ends


def is_measured_engine(basis: PredictionBasis) -> bool:
    """Tell whether a workload is a step of an engine whose kernels and steps were measured on this
    GPU.
    """
    bundle = basis.bundle
    measured = bundle.status is FitStatus.MEASURED and any(
        name.startswith("engine_") for name in bundle.seen
    )
    return measured and basis.graph.stack == SoftwareStack.ENGINE


def find_step_kind(basis: PredictionBasis) -> str:
    """Find whether a step is one of a model with ``experts`` or of a ``dense`` one, and whether its
    board is told.
    """
    families = basis.timeline.kernels.work.kernel_family.values
    kind = "experts" if any(".experts" in family for family in families) else "dense"
    return f"{kind}, board told" if basis.gpu.board else kind


def find_ends_name(group: str, learner: str, family: str, bundle: Bundle) -> str:
    """Find the name under which a bundle has ends for a kernel: its kind, a wider kind, its learner
    or its family.
    """
    if learner.startswith("engine_"):
        parts = group.split(".")
        names = [*(".".join(parts[:count]) for count in range(len(parts), 1, -1)), learner]
        return next((name for name in names if name in bundle.residuals), family)
    return family


def widen_log_ends(logs: Array, by: Array | float) -> Array:
    """Widen logs of low and high ends ``(..., 2)`` by a further spread ``by``, in quadrature, each
    side separately.

    >>> widen_log_ends(np.array([-0.3, 0.3]), 0.4).round(3).tolist()
    [-0.5, 0.5]
    """
    middle = np.minimum(
        np.maximum(0.0, logs[..., :1]), logs[..., 1:]
    )  # the prediction, where it lies inside
    return np.asarray(middle + np.hypot(logs - middle, by) * OUTWARD)


def judge_support(basis: PredictionBasis) -> Support:
    """Judge how far a workload is from what was measured, in the respect in which it is furthest."""
    found = sorted(basis.distances, key=lambda d: -int(np.max(d.rank)))
    apart = [d for d in found if d.word is not SupportWord.MEASURED]
    if not apart:
        reason = (
            f"kernels like those measured on {basis.bundle.provenance.device or basis.bundle.gpu}"
        )
        return Support(SupportWord.MEASURED, reason, tuple(found))
    word = apart[0].word
    return Support(word, "; ".join(d.reason for d in apart if d.word is word), tuple(found))


def measure_distances(basis: PredictionBasis) -> tuple[SupportDistance, ...]:
    """Measure how far a workload is from what was measured, in every respect that differs at all."""
    bundle = basis.bundle
    if bundle.status is FitStatus.FORECAST:
        everything = np.ones(())
        reason = f"a forecast: nothing was measured on the {bundle.gpu}"
        unmeasured = SupportDistance("GPU", everything, everything, reason, _NOTHING)
        return unmeasured, *_host_distance(basis), *_link_distance(basis)
    return (
        *_kernel_distances(basis),
        *_clock_distance(basis),
        *_limit_distance(basis),
        *_temperature_distance(basis),
        *_software_distances(basis),
        *_host_distance(basis),
        *_link_distance(basis),
    )


_NOTHING = np.zeros(4)


def kernel_shares(basis: PredictionBasis) -> tuple[Array, Array]:
    """Return each kernel's share of the time in kernels and of their energy, ``(*sweep, kernel)``."""
    spent = [of * basis.timeline.calls for of in (basis.detail.kernel_s, basis.detail.kernel_j)]
    time, energy = (mean_power_w(of, of.sum(axis=-1)[..., np.newaxis]) for of in spent)
    return time, energy


def _larger_share(basis: PredictionBasis, weight: Array) -> Array:
    """Return the share of the time or of the energy, whichever is larger, of kernels by ``weight``."""
    time, energy = kernel_shares(basis)
    return np.asarray(np.maximum((time * weight).sum(axis=-1), (energy * weight).sum(axis=-1)))


def _limit_w(basis: PredictionBasis) -> Array:
    if basis.at.duration_s is not None:
        return np.full((), np.inf)  # nothing holds a burst to the limit
    return sweep_values(
        basis.gpu.power.limit_w if basis.at.power_limit_w is None else basis.at.power_limit_w
    )


def _half_widths(name: str, amount: Array) -> Array:
    """Return what ``amount`` units of distance add to the ends of an interval, ``(*sweep, 4)``."""
    known = learned_distances().conditions[name]
    each = np.array([known.latency, known.latency, known.power, known.power])
    return np.asarray(amount[..., np.newaxis] * each)


def _kernel_distances(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Kernels and number formats that were not measured; they widen the ends of each kernel, not of
    the whole.
    """
    spent_s = (
        (basis.detail.kernel_s * basis.timeline.calls)
        .reshape(-1, len(basis.timeline.calls))
        .sum(axis=0)
    )
    for dimension, of_format in (("kernels", False), ("number format", True)):
        known = [
            (i, r)
            for i, r in basis.reasons.items()
            if (r.reason is OutsideReason.DTYPE) == of_format
        ]
        if not known:
            continue
        rows = np.array([i for i, _ in known])
        kinds = len({r.description for _, r in known})
        longest = int(rows[spent_s[rows] == spent_s[rows].max()].min())
        outside, far_outside = np.zeros((2, len(spent_s)))
        outside[rows] = 1.0
        far_outside[[i for i, r in known if r.far]] = 1.0
        beyond = _larger_share(basis, outside)
        far = _larger_share(basis, far_outside)
        more = (
            f" (and {kinds - 1} more kinds, {float(np.max(beyond)):.0%} of the time in all)"
            if kinds > 1
            else ""
        )
        yield SupportDistance(
            dimension, beyond, far, basis.reasons[longest].description + more, _NOTHING
        )


def _clock_distance(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Clocks at which kernels of a family never ran, in octaves beyond those at which they did."""
    seen = basis.bundle.seen
    learners = basis.timeline.kernels.work.root_family
    names, place = index_distinct(learners)
    ranges = [
        s.clock_hz if (s := seen.get(name)) and s.clock_hz else _ANY_CLOCK_HZ for name in names
    ]
    low, high = np.array(ranges).take(place, axis=0).T
    clock_hz = np.asarray(basis.at.clock_hz, dtype=np.float64)  # (*sweep, 1)
    octaves = np.maximum(np.maximum(np.log2(low / clock_hz), np.log2(clock_hz / high)), 0.0)
    octaves = np.where(octaves > _CLOCK_MARGIN, octaves, 0.0)
    if not octaves.any():
        return
    known = learned_distances().conditions["clock"]
    beyond, far = (
        _larger_share(basis, (octaves > edge).astype(float)) for edge in (0.0, known.near)
    )
    worst = int(np.argmax(_larger_share(basis, octaves)))
    time, _ = kernel_shares(basis)
    kernel = int(np.argmax((time * (octaves > 0.0)).reshape(-1, len(learners))[worst]))
    reason = (
        f"clock of {show(float(clock_hz.reshape(-1)[worst]), 'Hz', 3)}: {learners[kernel]} was measured from "
        f"{show(low[kernel], 'Hz', 3)} to {show(high[kernel], 'Hz', 3)}"
    )
    yield SupportDistance(
        "clock", beyond, far, reason, _half_widths("clock", _larger_share(basis, octaves))
    )


def _limit_distance(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Power limits that bind and under which nothing was measured, in octaves below the lowest that
    was.
    """
    measured_w = basis.bundle.power_limit_w
    if measured_w is None or basis.at.duration_s is not None:  # no limit binds in a burst
        return
    limit_w = _limit_w(basis)
    held_w = basis.bundle.governor_share * limit_w
    excess = _mean_over_stretches(
        basis, lambda totals, _: np.maximum(totals.power_w - 0.99 * held_w, 0.0)
    )
    binds = excess > 0.0
    octaves = np.where(
        binds, np.maximum(np.log2(measured_w[0] / limit_w), np.log2(limit_w / measured_w[1])), 0.0
    )
    octaves = np.where(octaves > _CLOCK_MARGIN, octaves, 0.0)
    if not octaves.any():
        return
    near = learned_distances().conditions["power limit"].near
    limits = " to ".join(dict.fromkeys(show(end, "W") for end in measured_w))
    worst_w = float(np.broadcast_to(limit_w, octaves.shape).reshape(-1)[int(np.argmax(octaves))])
    reason = f"power limit of {show(worst_w, 'W', 3)}: all was measured under {limits}"
    beyond, far = ((octaves > edge).astype(np.float64) for edge in (0.0, near))
    yield SupportDistance("power limit", beyond, far, reason, _half_widths("power limit", octaves))


def _temperature_distance(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Temperatures at which nothing was measured: what leakage gains or loses beyond the edge is
    uncertain.
    """
    measured_c = basis.bundle.temperature_c
    if measured_c is None:
        return
    given_c = sweep_values(basis.at.temperature_c)
    power_w = basis.totals.power_w
    edge_c = np.clip(given_c, *measured_c)
    if np.all(edge_c == given_c):
        return
    clock_hz = sweep_values(np.asarray(basis.at.clock_hz))
    idle_w = [basis.bundle.power.idle_power_w(clock_hz, celsius) for celsius in (given_c, edge_c)]
    change = np.abs(np.log1p(np.clip((idle_w[0] - idle_w[1]) / power_w, -0.5, 1.0)))
    off_c = np.abs(given_c - edge_c)
    near = learned_distances().conditions["temperature"].near
    worst_c = float(np.broadcast_to(given_c, off_c.shape).reshape(-1)[int(np.argmax(off_c))])
    reason = f"{worst_c:.0f} C: measured from {measured_c[0]:.0f} to {measured_c[1]:.0f} C"
    ends = np.stack([np.zeros_like(change), np.zeros_like(change), change, change], axis=-1)
    beyond, far = ((off_c > edge).astype(np.float64) for edge in (0.0, near))
    yield SupportDistance("temperature", beyond, far, reason, ends)


def _software_distances(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Stacks, several GPUs and companies of operators that were not measured as a whole."""
    bundle = basis.bundle
    graph = basis.graph
    one = np.ones(())
    if bundle.status is FitStatus.CALIBRATED:
        reason = (
            f"the {bundle.gpu} is calibrated on rows of others; what they do not hold is forecast"
        )
        yield SupportDistance("GPU", one, 0.0 * one, reason, _NOTHING)
    if graph.stack == SoftwareStack.COMPILED:
        reason = "stack compiled: fused kernels were never measured, those they are made of were"
        yield SupportDistance("stack", one, 0.0 * one, reason, _half_widths("stack", one))
    elif graph.stack == SoftwareStack.ENGINE and not any(
        name.startswith("engine_") for name in bundle.seen
    ):
        reason = f"stack engine: no kernels of an engine were measured on the {bundle.gpu}"
        yield SupportDistance("stack", one, one, reason, _half_widths("stack", one))
    if graph.gpu_count > 1:
        linked = np.array(
            [family == "collective" for family in basis.timeline.kernels.family], dtype=float
        )
        share = float(np.max(_larger_share(basis, linked)))
        reason = (
            f"{graph.gpu_count} GPUs: collectives, {share:.0%} of the time, follow public timings; "
            "their power, and whole models over several GPUs, were not measured"
        )
        yield SupportDistance("parallelism", one, 0.0 * one, reason, _NOTHING)
    if bundle.cold is None and len(basis.timeline.calls) > 1:
        reason = f"caches: no operators that follow one another were measured on the {bundle.gpu}"
        yield SupportDistance("cache state", one, 0.0 * one, reason, _half_widths("stack", one))


def _host_distance(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Latency and power if the host is as much faster or slower as hosts differ.

    Where the host decides nothing even if slow, this adds nothing.
    """
    timeline = basis.timeline
    if not timeline.has_host:
        return
    totals = basis.totals
    spread = _find_host_spread(basis)
    ends = _host_ends(basis, spread)
    if np.max(ends) < 1e-3:
        return
    waits = 1.0 - totals.busy_s / totals.latency_s
    reason = (
        f"the GPU waits for the host {float(np.max(waits)):.0%} of the time, whose speed differs by machine and model"
        if np.max(waits) > NEAR_SHARE
        else "a slow host would hold the GPU up"
    )
    yield SupportDistance(
        "host", np.maximum(waits, ends[..., 1]), np.zeros_like(waits), reason, ends
    )


def _find_host_spread(basis: PredictionBasis) -> HostSpread:
    """Find how far a host may be from the one assumed; the user's own differs by model alone."""
    known = learned_distances()
    if basis.timeline.engine is not None:  # differs as much from one process to another
        return known.engine_host
    return known.own_host if basis.bundle.launch.measured else known.host


def _host_ends(basis: PredictionBasis, spread: HostSpread) -> Array:
    """Return how far logs of latency and power move with a host at either end of a spread,
    ``(*sweep, 4)``.
    """
    timeline = basis.timeline
    totals = basis.totals
    clock_hz = sweep_values(np.asarray(basis.at.clock_hz))
    gap_w = basis.bundle.power.idle_power_w(clock_hz, sweep_values(basis.at.temperature_c))
    if timeline.engine is not None:
        gap_w = timeline.engine.times.waiting_power * gap_w
    working_j = totals.energy_j - basis.detail.gap_j
    moves = []
    for factor in (spread.low, spread.high):
        latency_s = compute_latency_s(timeline.scale_host(factor), basis.detail.kernel_s)
        gap_s = np.maximum(latency_s - totals.busy_s, 0.0)
        power_w = mean_power_w(working_j + gap_w * gap_s, latency_s)
        moves.append((np.log(latency_s / totals.latency_s), np.log(power_w / totals.power_w)))
    (fast, hot), (slow, cool) = moves
    ends = np.stack(
        np.broadcast_arrays(np.minimum(fast, 0.0), slow, np.minimum(cool, 0.0), hot), axis=-1
    )
    return np.asarray(np.abs(ends))


def _link_distance(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Latency and power if PCIe cards stood in the one node whose timings are public.

    Nodes with PCIe cards differ by more than a factor of ten over eight cards, so that the interval
    of a node that was not timed reaches from its law to that node.
    """
    gpu = basis.gpu
    node = gpu.node or node_of_gpu(gpu.name)
    timeline = basis.timeline
    places = [i for i, op in enumerate(timeline.kernels.ops) if isinstance(op, Collective)]
    if node.is_timed or not places:
        return
    from wattcast.predictor.link_laws import collective_s, goes_over_pcie, timed_node_s

    ops = [cast(Collective, timeline.kernels.ops[i]) for i in places]
    if not goes_over_pcie(gpu, max(op.gpus for op in ops)):
        return
    extra_s = timed_node_s(ops, gpu) - collective_s(ops, gpu)
    extra_s = (extra_s * timeline.calls[places]).sum(axis=-1)
    totals = basis.totals
    clock_hz = sweep_values(np.asarray(basis.at.clock_hz))
    idle_w = basis.bundle.power.idle_power_w(clock_hz, sweep_values(basis.at.temperature_c))
    slow_s = totals.latency_s + np.maximum(extra_s, 0.0)
    power_w = mean_power_w(totals.energy_j + idle_w * (slow_s - totals.latency_s), slow_s)
    slow = np.log(slow_s / totals.latency_s)
    cool = np.abs(np.minimum(np.log(power_w / totals.power_w), 0.0))
    if np.max(slow) < 1e-3:
        return
    zero = 0.0 * slow
    reason = (
        f"links: how the cards of the {node.name} are joined is not known; in the node whose "
        f"timings are public this would take {float(np.max(np.exp(slow))):.3g} times as long"
    )
    ends = np.stack(np.broadcast_arrays(zero, slow, cool, zero), axis=-1)
    beyond = 1.0 - np.exp(-slow)
    yield SupportDistance("links", beyond, zero, reason, ends)


def find_unmeasured(timeline: Timeline, bundle: Bundle) -> dict[int, UnmeasuredKernel]:
    """Find the kernels outside what was measured, by row."""
    kernels = timeline.kernels
    reasons: dict[int, UnmeasuredKernel] = {}
    to_size: dict[str, list[RowIndex]] = {}
    unheld = {family for family, residual in bundle.residuals.items() if residual.rows == 0}
    form = np.empty(len(kernels.ops), np.intp)
    groups = kernels.work.kernel_family
    for which, rows in enumerate(group_forms(kernels.ops)):
        form[rows] = which
    alike, place = np.unique(form * len(groups.values) + groups.place, return_inverse=True)
    for code, rows in zip(alike.tolist(), split_rows(place, len(alike)), strict=True):
        op = kernels.ops[int(rows[0])]
        group = groups.values[code % len(groups.values)]
        learner = root_family(group)
        seen = bundle.seen.get(learner)
        why = OutsideReason.KIND
        if op.family in unheld:
            if op.family == "collective":  # its ends are those of public timings
                continue
            said = f"no held-out rows for {op.family}"
        elif seen is None:
            continue
        elif op.dtype not in seen.dtypes:
            why = OutsideReason.DTYPE
            said = f"{op.family} was measured in {', '.join(seen.dtypes)}, not in {op.dtype}"
        elif group not in seen.groups:
            said = f"no kernel of the kind {group} was measured"
        elif seen.forms is not None and op.form not in seen.every_form:
            ran = seen.forms.get(group, ())
            few = ", ".join(ran[:3]) or "others"
            few += f" and {len(ran) - 3} more" if len(ran) > 3 else ""
            # Where many forms ran as one kernel, as plain functions of an element do, another is
            # much like them. Where few did, as in reductions, different code may share the name of
            # a kernel.
            why = OutsideReason.FORM if len(ran) >= MANY_FORMS else OutsideReason.KIND
            said = f"{op.form} was never measured, only {few} that run as {group}"
        else:
            to_size.setdefault(learner, []).append(rows)
            continue
        for i, name in zip(rows.tolist(), _describe_rows(kernels, rows), strict=True):
            where = "" if op.family in unheld else f"{name}: "
            reasons[i] = UnmeasuredKernel(why, where + said, why is not OutsideReason.FORM)
    near = learned_distances().conditions["size"].near
    for learner, parts in to_size.items():
        outside = _sizes_outside(kernels, bundle.seen[learner], np.concatenate(parts))
        names = _describe_rows(kernels, np.array(list(outside), np.intp))
        for name, (row, (octaves, said)) in zip(names, outside.items(), strict=True):
            reasons[row] = UnmeasuredKernel(OutsideReason.SIZE, f"{name}: {said}", octaves > near)
    return reasons


def _describe_rows(kernels: Kernels, rows: RowIndex) -> list[str]:
    some = select_operators(kernels.ops, rows)
    return some.describe() if isinstance(some, OperatorColumns) else list(map(str, some))


def _sizes_outside(
    kernels: Kernels, seen: MeasuredRange, rows: RowIndex
) -> dict[int, tuple[float, str]]:
    """Return octaves and description of the size furthest beyond those measured, for kernels that
    have one.
    """
    features = kernels.work.features
    known, low, high = seen.bounds
    kept = [i for i, name in enumerate(known) if name in features]
    if not kept:
        return {}
    if len(kept) < len(known):
        low = low[kept]
        high = high[kept]
    values = np.array([features[known[i]] for i in kept]).take(rows, axis=1)
    octaves = np.maximum(low - values, values - high)
    at = np.flatnonzero(octaves.max(axis=0) > _MARGIN)
    furthest = octaves[:, at].argmax(axis=0)
    said = [
        f"{known[i].removeprefix('log_')} of {{:.3g}}, measured from {2**least:.3g} to {2**most:.3g}"
        for i in kept
        for least, most in [seen.sizes[known[i]]]
    ]
    columns = (rows[at], furthest, octaves[furthest, at], 2.0 ** values[furthest, at])
    each = zip(*(column.tolist() for column in columns), strict=True)
    return {row: (beyond, said[size].format(value)) for row, size, beyond, value in each}
