"""Measure how far a prediction lies from what was measured, in every respect.

Every respect (kernels, number format, clock, power limit, temperature, stack, parallelism, host,
links, GPU) is one ``SupportDistance``: the share of time or energy beyond what was measured, a
sentence, and what it adds to the ends of the interval. ``Support`` is the worst of them in a word.
How much each adds is learned from rows that were left out (``bundle/distances.yaml``,
docs/method/confidence.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import (
    Array,
    index_distinct,
    map_distinct,
    sweep_values,
)
from wattcast.core.strict_files import FitStatus
from wattcast.core.units import show
from wattcast.hardware import node_of_gpu
from wattcast.power.power_model import mean_power_w
from wattcast.predictor.bundle.support_widening import (
    HostSpread,
    OutsideReason,
    learned_distances,
)
from wattcast.predictor.prediction_basis import PredictionBasis
from wattcast.predictor.timeline import compute_latency_s
from wattcast.predictor.unmeasured_kernels import SUPPORT
from wattcast.workload.model_options import SoftwareStack
from wattcast.workload.operator_types import Collective


class PictureCoefficients(Coefficients):
    """How far whole pictures lie from the sum of their parts: half-widths of logarithms."""

    latency_spread: float
    power_spread: float


PICTURES = load_coefficients("pictures", PictureCoefficients)

_ANY_CLOCK_HZ = (1.0, 1e18)  # of a family whose clocks are not known
_CHANGE_ENDS = (-0.5, 1.0)  # of power by temperature, beyond which the law of idle power is not
_LEAST_END = 1e-3  # in logs; what moves an interval by less is not reported


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
    ``(*sweep, 4)``.
    """

    dimension: str  # clock, power limit, ...
    beyond: Array
    far: Array
    reason: str
    ends: Array

    @property
    def rank(self) -> Array:
        """0 for measured, 1 for near, 2 for far, ``(*sweep,)``."""
        near_or_measured = np.where(self.beyond >= SUPPORT.near_share, 1, 0)
        return np.where(self.far >= SUPPORT.far_share, 2, near_or_measured)

    @property
    def worst_rank(self) -> int:
        """The worst rank of a sweep."""
        return int(np.max(self.rank))

    @property
    def word(self) -> SupportWord:
        """The worst word of a sweep."""
        return _WORDS[self.worst_rank]


@dataclass(frozen=True)
class Support:
    """How far a prediction is from what was measured: the worst word of all respects, and why."""

    word: SupportWord
    reason: str
    distances: tuple[SupportDistance, ...] = field(
        default=(),
        repr=False,
        compare=False,
    )

    @property
    def inside(self) -> bool:
        """Whether the prediction is measured or near, and not far."""
        return self.word is not SupportWord.FAR

    @property
    def words(self) -> Array:
        """The word of each point of a sweep, ``(*sweep,)``."""
        rank: Array = np.zeros((), np.int64)
        for distance in self.distances:
            rank = np.maximum(rank, distance.rank)
        return np.asarray(np.array(_WORDS)[rank])


def judge_support(basis: PredictionBasis, distances: tuple[SupportDistance, ...]) -> Support:
    """Judge how far a workload is from what was measured, in the respect in which it is
    furthest.
    """
    worst_first = tuple(sorted(distances, key=lambda distance: -distance.worst_rank))
    word = worst_first[0].word if worst_first else SupportWord.MEASURED
    if word is SupportWord.MEASURED:
        device = basis.bundle.provenance.device or basis.bundle.gpu
        return Support(word, f"kernels like those measured on {device}", worst_first)
    reasons = [distance.reason for distance in worst_first if distance.word is word]
    return Support(word, "; ".join(reasons), worst_first)


def measure_distances(basis: PredictionBasis) -> tuple[SupportDistance, ...]:
    """Measure how far a workload is from what was measured, in every respect that differs at
    all.
    """
    bundle = basis.bundle
    if bundle.status is FitStatus.FORECAST:
        everything = np.ones(())
        reason = f"a forecast: nothing was measured on the {bundle.gpu}"
        unmeasured = SupportDistance(
            "GPU",
            everything,
            everything,
            reason,
            _NO_WIDENING,
        )
        return unmeasured, *_measure_host(basis), *_measure_links(basis)
    return (
        *_measure_kernels(basis),
        *_measure_clock(basis),
        *_measure_power_limit(basis),
        *_measure_temperature(basis),
        *_measure_software(basis),
        *_measure_host(basis),
        *_measure_links(basis),
    )


_NO_WIDENING = np.zeros(4)


def _weigh_kernels(basis: PredictionBasis, weight: Array) -> Array:
    """Return the share of the time or of the energy, whichever is larger, of kernels by
    ``weight``.
    """
    time_share = (basis.time_shares * weight).sum(axis=-1)
    energy_share = (basis.energy_shares * weight).sum(axis=-1)
    return np.asarray(np.maximum(time_share, energy_share))


def _half_widths(condition: str, amount: Array) -> Array:
    """Return what ``amount`` units of distance add to the ends of an interval, ``(*sweep, 4)``."""
    widening = learned_distances().conditions[condition]
    ends = np.array([widening.latency, widening.latency, widening.power, widening.power])
    return np.asarray(amount[..., np.newaxis] * ends)


def _join_ends(
    low: Array,
    high: Array,
    low_power: Array,
    high_power: Array,
) -> Array:
    """Stack half-widths of latency and of power as ``SupportDistance.ends``, ``(*sweep, 4)``."""
    return np.stack(np.broadcast_arrays(low, high, low_power, high_power), axis=-1)


def _beyond(octaves: Array, edge: float) -> Array:
    """Return 1 where a distance exceeds an edge, else 0."""
    return (octaves > edge).astype(np.float64)


def _measure_kernels(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Find kernels and number formats that were not measured.

    They widen the ends of each kernel, and so add nothing to the ends of the whole.
    """
    calls = basis.timeline.calls
    spent_s = (basis.detail.kernel_s * calls).reshape(-1, len(calls)).sum(axis=0)
    for dimension, is_of_format in (("kernels", False), ("number format", True)):
        outside = {
            row: kernel
            for row, kernel in basis.reasons.items()
            if (kernel.reason is OutsideReason.DTYPE) == is_of_format
        }
        if not outside:
            continue
        rows = np.array(list(outside))
        far_rows = [row for row, kernel in outside.items() if kernel.far]
        is_outside = np.zeros(len(calls))
        is_outside[rows] = 1.0
        is_far = np.zeros(len(calls))
        is_far[far_rows] = 1.0
        beyond = _weigh_kernels(basis, is_outside)

        longest = int(rows[spent_s[rows] == spent_s[rows].max()].min())
        reason = outside[longest].description
        kind_count = len({kernel.description for kernel in outside.values()})
        if kind_count > 1:
            share = float(np.max(beyond))
            reason += f" (and {kind_count - 1} more kinds, {share:.0%} of the time in all)"
        far = _weigh_kernels(basis, is_far)
        yield SupportDistance(
            dimension,
            beyond,
            far,
            reason,
            _NO_WIDENING,
        )


def _measure_clock(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Find clocks at which kernels of a family never ran, in octaves beyond those at which they
    did.
    """
    learners = basis.timeline.kernels.work.root_family
    names, name_of_kernel = index_distinct(learners)
    ranges_hz = []
    for name in names:
        seen = basis.bundle.seen.get(name)
        ranges_hz.append(seen.clock_hz if seen and seen.clock_hz else _ANY_CLOCK_HZ)
    low_hz, high_hz = np.array(ranges_hz).take(name_of_kernel, axis=0).T

    clock_hz = np.asarray(basis.at.clock_hz, dtype=np.float64)  # (*sweep, 1)
    octaves = np.maximum(np.log2(low_hz / clock_hz), np.log2(clock_hz / high_hz))
    octaves = np.where(octaves > SUPPORT.clock_margin, octaves, 0.0)
    if not octaves.any():
        return

    mean_octaves = _weigh_kernels(basis, octaves)
    worst_point = int(np.argmax(mean_octaves))
    outside_share = basis.time_shares * (octaves > 0.0)
    kernel = int(np.argmax(outside_share.reshape(-1, len(learners))[worst_point]))
    worst_hz = float(clock_hz.reshape(-1)[worst_point])
    reason = (
        f"clock of {show(worst_hz, 'Hz', 3)}: {learners[kernel]} was measured from "
        f"{show(low_hz[kernel], 'Hz', 3)} to {show(high_hz[kernel], 'Hz', 3)}"
    )
    near = learned_distances().conditions["clock"].near
    yield SupportDistance(
        dimension="clock",
        beyond=_weigh_kernels(basis, _beyond(octaves, 0.0)),
        far=_weigh_kernels(basis, _beyond(octaves, near)),
        reason=reason,
        ends=_half_widths("clock", mean_octaves),
    )


def _measure_power_limit(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Find power limits that bind and under which nothing was measured, in octaves beyond those
    that were.
    """
    measured_w = basis.bundle.power_limit_w
    if measured_w is None or basis.at.duration_s is not None:  # no limit binds in a burst
        return
    limit_w = basis.limit_w
    binding_w = SUPPORT.binding_share * basis.bundle.governor_share * limit_w
    excess_w = basis.average_stretches(
        lambda totals, _: np.maximum(totals.power_w - binding_w, 0.0)
    )
    lowest_w, highest_w = measured_w
    octaves = np.maximum(np.log2(lowest_w / limit_w), np.log2(limit_w / highest_w))
    octaves = np.where((excess_w > 0.0) & (octaves > SUPPORT.clock_margin), octaves, 0.0)
    if not octaves.any():
        return

    limits = " to ".join(dict.fromkeys(show(end, "W") for end in measured_w))
    worst_point = int(np.argmax(octaves))
    worst_w = float(np.broadcast_to(limit_w, octaves.shape).reshape(-1)[worst_point])
    near = learned_distances().conditions["power limit"].near
    yield SupportDistance(
        dimension="power limit",
        beyond=_beyond(octaves, 0.0),
        far=_beyond(octaves, near),
        reason=f"power limit of {show(worst_w, 'W', 3)}: all was measured under {limits}",
        ends=_half_widths("power limit", octaves),
    )


def _measure_temperature(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Find temperatures at which nothing was measured: what leakage gains or loses beyond them is
    uncertain.
    """
    measured_c = basis.bundle.temperature_c
    if measured_c is None:
        return
    die_c = sweep_values(basis.at.temperature_c)
    nearest_c = np.clip(die_c, *measured_c)
    if np.all(nearest_c == die_c):
        return

    # the interval holds the whole change of idle power
    clock_hz = sweep_values(np.asarray(basis.at.clock_hz))
    idle_power_w = basis.bundle.power.idle_power_w
    change_w = idle_power_w(clock_hz, die_c) - idle_power_w(clock_hz, nearest_c)
    change = np.abs(np.log1p(np.clip(change_w / basis.totals.power_w, *_CHANGE_ENDS)))
    zero = np.zeros_like(change)

    distance_c = np.abs(die_c - nearest_c)
    worst_point = int(np.argmax(distance_c))
    worst_c = float(np.broadcast_to(die_c, distance_c.shape).reshape(-1)[worst_point])
    low_c, high_c = measured_c
    near_c = learned_distances().conditions["temperature"].near
    yield SupportDistance(
        dimension="temperature",
        beyond=_beyond(distance_c, 0.0),
        far=_beyond(distance_c, near_c),
        reason=f"{worst_c:.0f} C: measured from {low_c:.0f} to {high_c:.0f} C",
        ends=_join_ends(zero, zero, change, change),
    )


def _measure_software(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Find stacks, several GPUs and neighbours of operators that were not measured as a whole."""
    bundle = basis.bundle
    graph = basis.graph
    everything = np.ones(())
    nothing = np.zeros(())
    if bundle.status is FitStatus.CALIBRATED:
        reason = f"the {bundle.gpu} is calibrated on public rows; the rest is a forecast"
        yield SupportDistance(
            "GPU",
            everything,
            nothing,
            reason,
            _NO_WIDENING,
        )

    stack_ends = _half_widths("stack", everything)
    if graph.stack == SoftwareStack.COMPILED:
        reason = "stack compiled: fused kernels were never measured, those they are made of were"
        yield SupportDistance(
            "stack",
            everything,
            nothing,
            reason,
            stack_ends,
        )
    elif graph.stack == SoftwareStack.ENGINE and not bundle.has_engine_kernels:
        reason = f"stack engine: no kernels of an engine were measured on the {bundle.gpu}"
        yield SupportDistance(
            "stack",
            everything,
            everything,
            reason,
            stack_ends,
        )

    if graph.parts:
        reason = (
            f"a whole {graph.item} was never measured on the {bundle.gpu}, nor was a denoising "
            "step: only kernels like theirs"
        )
        ends = (
            *(PICTURES.latency_spread, PICTURES.latency_spread),
            *(PICTURES.power_spread, PICTURES.power_spread),
        )
        yield SupportDistance(
            "parts",
            everything,
            nothing,
            reason,
            np.array(ends),
        )

    if graph.gpu_count > 1:
        families = basis.timeline.kernels.family
        is_collective = map_distinct("collective".__eq__, families).astype(float)
        share = float(np.max(_weigh_kernels(basis, is_collective)))
        reason = (
            f"{graph.gpu_count} GPUs: collectives, {share:.0%} of the time, follow public timings; "
            "their power, and whole models over several GPUs, were not measured"
        )
        yield SupportDistance(
            "parallelism",
            everything,
            nothing,
            reason,
            _NO_WIDENING,
        )
    if bundle.cold is None and len(basis.timeline.calls) > 1:
        reason = f"caches: no operators that follow one another were measured on the {bundle.gpu}"
        yield SupportDistance(
            "cache state",
            everything,
            nothing,
            reason,
            stack_ends,
        )


def _measure_host(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Measure how latency and power change if the host is as much faster or slower as hosts differ.

    Where the host decides nothing even if it is slow, this adds nothing.
    """
    if not basis.timeline.has_host:
        return
    ends = _host_ends(basis, _find_host_spread(basis))
    if np.max(ends) < _LEAST_END:
        return
    totals = basis.totals
    waiting = 1.0 - totals.busy_s / totals.latency_s
    most_waiting = float(np.max(waiting))
    reason = "a slow host would hold the GPU up"
    if most_waiting > SUPPORT.near_share:
        reason = (
            f"the GPU waits for the host {most_waiting:.0%} of the time, "
            "whose speed differs by machine and model"
        )
    beyond = np.maximum(waiting, ends[..., 1])
    yield SupportDistance(
        "host",
        beyond,
        np.zeros_like(waiting),
        reason,
        ends,
    )


def _find_host_spread(basis: PredictionBasis) -> HostSpread:
    """Find how far a host may be from the one assumed; the user's own differs by model alone."""
    distances = learned_distances()
    if basis.timeline.engine is not None:  # differs as much from one process to another
        return distances.engine_host
    return distances.own_host if basis.bundle.launch.measured else distances.host


def _host_ends(basis: PredictionBasis, spread: HostSpread) -> Array:
    """Return how far logs of latency and power move with a host at either end of a spread,
    ``(*sweep, 4)``.
    """
    fast, fast_power = _move_host(basis, spread.low)
    slow, slow_power = _move_host(basis, spread.high)
    return _join_ends(
        np.abs(np.minimum(fast, 0.0)),
        np.abs(slow),
        np.abs(np.minimum(slow_power, 0.0)),
        np.abs(fast_power),
    )


def _move_host(basis: PredictionBasis, factor: float) -> tuple[Array, Array]:
    """Return the logs of latency and of power, over the predicted ones, with a host that takes
    ``factor`` times as long.
    """
    timeline = basis.timeline
    totals = basis.totals
    waiting_w = basis.idle_power_w()
    if timeline.engine is not None:
        waiting_w = timeline.engine.times.waiting_power * waiting_w
    working_j = totals.energy_j - basis.detail.gap_j
    latency_s = compute_latency_s(timeline.scale_host(factor), basis.detail.kernel_s)
    gap_s = np.maximum(latency_s - totals.busy_s, 0.0)
    power_w = mean_power_w(working_j + waiting_w * gap_s, latency_s)
    return np.log(latency_s / totals.latency_s), np.log(power_w / totals.power_w)


def _measure_links(basis: PredictionBasis) -> Iterator[SupportDistance]:
    """Measure how latency and power change if PCIe cards stood in the one node whose timings are
    public.

    Nodes with PCIe cards differ by more than a factor of ten over eight cards, so that the interval
    of a node that was not timed reaches from its law to that node.
    """
    gpu = basis.gpu
    timeline = basis.timeline
    rows = [row for row, op in enumerate(timeline.kernels.ops) if isinstance(op, Collective)]
    if not rows:
        return
    node = gpu.node or node_of_gpu(gpu.name)
    if node.is_timed:
        return
    from wattcast.predictor.link_laws import (
        collective_s,
        goes_over_pcie,
        timed_node_s,
    )

    ops = [cast(Collective, timeline.kernels.ops[row]) for row in rows]
    if not goes_over_pcie(gpu, max(op.gpus for op in ops)):
        return

    extra_s = timed_node_s(ops, gpu) - collective_s(ops, gpu)
    extra_s = np.maximum((extra_s * timeline.calls[rows]).sum(axis=-1), 0.0)
    totals = basis.totals
    slow_s = totals.latency_s + extra_s
    power_w = mean_power_w(totals.energy_j + basis.idle_power_w() * extra_s, slow_s)
    slow = np.log(slow_s / totals.latency_s)
    cool = np.abs(np.minimum(np.log(power_w / totals.power_w), 0.0))
    if np.max(slow) < _LEAST_END:
        return
    zero = np.zeros_like(slow)
    reason = (
        f"links: how the cards of the {node.name} are joined is not known; in the node whose "
        f"timings are public this would take {float(np.max(np.exp(slow))):.3g} times as long"
    )
    ends = _join_ends(zero, slow, cool, zero)
    yield SupportDistance(
        "links",
        1.0 - np.exp(-slow),
        zero,
        reason,
        ends,
    )
