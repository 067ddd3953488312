"""Find the clock at which the power governor holds a workload.

This is the only feedback in Wattcast: power lowers the clock. The governor holds time-averaged
power at the limit by lowering the set clock, so the answer is the highest clock, up to the one
asked for, at which mean power meets the limit. Only the cheap last step of the flow is repeated, on
arrays.

It averages over a window, and answers within it (``REACTION_S``). Kernels that follow one another
faster than that settle at one clock. A run that is longer has stretches, each of which settles at
its own (``run_stretches``): the prefill of a generation is held at the limit by itself, and so are
the decode steps after it. The run's clock is then the mean over its time.

Work that lasts no longer than the window after a pause runs at the clock asked for, whatever it
draws; longer work of a given duration at the mean of those before and after, f = s·f_asked + (1 -
s)·f_held with s = ``REACTION_S`` / duration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import load_coefficients
from wattcast.core.arrays import Array, Mask, append_axes, sweep_values
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.pipeline import ClockedTimeline, TimelineRunner, WorkloadTotals
from wattcast.predictor.timeline import Timeline

if TYPE_CHECKING:
    from wattcast.predictor.run_stretches import Division, Stretch


@dataclass(frozen=True)
class GovernorCoefficients:
    """How the governor acts in time."""

    reaction_s: float  # from the begin of a load to a lower clock; it averages over as long


REACTION_S = load_coefficients("governor", GovernorCoefficients).reaction_s
# Numerics of the search for the clock: changing them changes no result that anybody would see.
SECANT_STEPS = 8  # within which every card of the catalogue meets the limit closely
_MOST_STEPS = 30  # where voltage rises in stairs
_TIGHT = 1e-10  # share of the limit that ends the search within ``SECANT_STEPS``
_CLOSE = 1e-8  # share of the limit that ends the search after ``SECANT_STEPS``


@dataclass(frozen=True)
class GovernedStretch:
    """A stretch of a run at the clock that the governor settles at; the latency is that of the
    stretch.
    """

    stretch: Stretch
    at: OperatingPoint  # with the set clock
    capped: Mask  # (*sweep,) the power limit lowered the clock
    met: Mask  # (*sweep,) mean power is within the limit
    asked_w: Array  # (*sweep,) mean power at the clock asked for
    totals: WorkloadTotals
    ran: ClockedTimeline


@dataclass(frozen=True)
class GovernedDivision:
    """The stretches of the runs of some points of a sweep."""

    points: Mask | None  # (*sweep,) None: all of them
    stretches: tuple[GovernedStretch, ...]


@dataclass(frozen=True)
class GovernedPoint:
    """The operating point that the governor settles at."""

    # with the set clock, as NVML would report it, (*sweep, 1); of stretches the mean over time
    at: OperatingPoint
    capped: Mask  # (*sweep,) the power limit lowered the clock, of a stretch or of the whole
    met: Mask  # (*sweep,) mean power is within the limit; False at the lowest clock
    asked_w: Array  # (*sweep,) mean power at the clock asked for, whatever the limit
    divisions: tuple[
        GovernedDivision, ...
    ] = ()  # of runs that do not settle at one clock; empty: all do

    @property
    def clock_hz(self) -> Array:
        """The set clock, ``(*sweep, 1)``."""
        return np.asarray(self.at.clock_hz, dtype=np.float64)


def run_governed(
    timeline: Timeline, gpu: Gpu, at: OperatingPoint, bundle: Bundle
) -> tuple[GovernedPoint, WorkloadTotals, ClockedTimeline]:
    """Find the highest set clock at which mean power meets the limit that the governor holds, and
    the workload there.

    Mean power rises with the clock: voltage and idle power do, and time does not. Where even the
    lowest clock draws too much, the lowest clock is given and ``met`` is False.
    """
    runner = TimelineRunner(timeline, at, bundle)
    asked_hz = np.asarray(
        gpu.clocks.max_hz if at.clock_hz is None else at.clock_hz, dtype=np.float64
    )
    asked_hz = asked_hz if asked_hz.ndim else asked_hz.reshape(1)
    limit = gpu.power.limit_w if at.power_limit_w is None else at.power_limit_w
    limit_w = sweep_values(np.asarray(limit, dtype=np.float64)) * bundle.governor_share
    least_hz = np.minimum(gpu.clocks.lowest_hz, asked_hz)
    ran = runner.run_at(asked_hz)
    is_burst = at.duration_s is not None and at.duration_s <= REACTION_S
    if not is_burst and np.any(ran.latency_s > REACTION_S):
        found = _govern_stretches(timeline, at, bundle, (asked_hz, least_hz, limit_w), ran)
        if found is not None:
            return found
    ran, capped, met, asked_w = _hold_limit(runner, at, (asked_hz, least_hz, limit_w), ran)
    return (
        GovernedPoint(replace(at, clock_hz=ran.clock_hz), capped, met, asked_w),
        runner.sum_up(ran),
        ran,
    )


_Bounds = tuple[
    Array, Array, Array
]  # the clock asked for, the lowest, (*sweep, 1), and the power to hold, (*sweep,)


def _hold_limit(
    runner: TimelineRunner, at: OperatingPoint, bounds: _Bounds, ran: ClockedTimeline
) -> tuple[ClockedTimeline, Mask, Mask, Array]:
    """Return what ``runner`` runs at the clock under the limit, whether capped, whether met, and
    the power asked for.

    ``ran`` is the run at the clock asked for.
    """
    asked_hz, least_hz, limit_w = bounds
    excess_w = np.asarray(ran.power_w - limit_w)
    asked_w = np.broadcast_to(ran.power_w, excess_w.shape)
    capped = excess_w > 0
    if not capped.any():
        clock_hz = np.array(np.broadcast_to(asked_hz, (*excess_w.shape, 1)))
        if ran.power_w.shape != excess_w.shape:  # a sweep over limits alone
            ran = runner.run_at(clock_hz)
        return replace(ran, clock_hz=clock_hz), capped, ~capped, asked_w
    low, high = (
        np.array(np.broadcast_to(hz, (*excess_w.shape, 1))[..., 0]) for hz in (least_hz, asked_hz)
    )
    ran, met = _search_clock(runner, low, high, excess_w, limit_w)
    if at.duration_s is not None:
        before = min(REACTION_S / at.duration_s, 1.0)
        ran = runner.run_at(before * high[..., np.newaxis] + (1.0 - before) * ran.clock_hz)
        capped = capped & (before < 1.0)
        met = met | (before == 1.0)
    return ran, capped, met, asked_w


def _govern_stretches(
    timeline: Timeline, at: OperatingPoint, bundle: Bundle, bounds: _Bounds, asked: ClockedTimeline
) -> tuple[GovernedPoint, WorkloadTotals, ClockedTimeline] | None:
    """Hold each stretch of a run under the limit; None where there is one stretch, or nothing to
    hold.

    ``asked`` is the whole run at the clock asked for.
    """
    from wattcast.predictor.run_stretches import divide_run  # most runs are shorter than the window

    divisions = divide_run(timeline, asked.kernel_s, asked.latency_s, REACTION_S)
    if all(len(division.stretches) == 1 for division in divisions):
        return None
    governed = [_govern_division(division, at, bundle, bounds) for division in divisions]
    stretches = [stretch for division in governed for stretch in division.stretches]
    if not any(stretch.capped.any() for stretch in stretches):
        return None
    shape = np.broadcast_shapes(*(stretch.capped.shape for stretch in stretches))
    joined = [_join_stretches(timeline, division.stretches, shape) for division in governed]
    points = [division.points for division in governed]

    def choose(column: Callable[[_JoinedRun], Array | Mask]) -> npt.NDArray[Any]:
        """Take a column of each point from the run that was divided as this point is."""
        values = column(joined[0])
        for here, run in zip(points[1:], joined[1:], strict=True):
            other = column(run)
            assert here is not None, "one division of several holds for some points"
            spread = append_axes(np.broadcast_to(here, shape), other.ndim)
            values = np.where(spread, other, values)
        return np.asarray(values)

    totals = WorkloadTotals(
        latency_s=choose(lambda run: run.totals.latency_s),
        busy_s=choose(lambda run: run.totals.busy_s),
        power_w=choose(lambda run: run.totals.power_w),
        effective_hz=choose(lambda run: run.totals.effective_hz),
    )
    ran = ClockedTimeline(
        clock_hz=choose(lambda run: run.clock_hz),
        effective_hz=choose(lambda run: run.effective_hz),
        kernel_s=choose(lambda run: run.kernel_s),
        latency_s=totals.latency_s,
        power_w=totals.power_w,
    )
    point = GovernedPoint(
        at=replace(at, clock_hz=ran.clock_hz),
        capped=choose(lambda run: run.capped),
        met=choose(lambda run: run.met),
        asked_w=np.broadcast_to(asked.power_w, shape),
        divisions=tuple(governed),
    )
    return point, totals, ran


def _govern_division(
    division: Division, at: OperatingPoint, bundle: Bundle, bounds: _Bounds
) -> GovernedDivision:
    """Hold stretch after stretch under the limit; the host issues ahead of the device across them."""
    governed = []
    ahead_s: Array = np.zeros(())
    for stretch in division.stretches:
        runner = TimelineRunner(stretch.timeline, at, bundle, ahead_s)
        ran, capped, met, asked_w = _hold_limit(runner, at, bounds, runner.run_at(bounds[0]))
        settled = replace(at, clock_hz=ran.clock_hz)
        governed.append(
            GovernedStretch(stretch, settled, capped, met, asked_w, runner.sum_up(ran), ran)
        )
        issuing_s = stretch.timeline.host_s @ stretch.timeline.calls
        ahead_s = np.asarray(ahead_s + ran.latency_s - issuing_s)
    return GovernedDivision(division.points, tuple(governed))


@dataclass(frozen=True)
class _JoinedRun:
    """Stretches that follow one another, as one run."""

    totals: WorkloadTotals
    clock_hz: Array  # (*sweep, 1) mean over the time
    capped: Mask
    met: Mask
    kernel_s: Array  # (*sweep, kernel) mean over the calls
    effective_hz: Array  # (*sweep, kernel) mean over the time in each kernel


def _join_stretches(
    timeline: Timeline, stretches: tuple[GovernedStretch, ...], shape: tuple[int, ...]
) -> _JoinedRun:
    """Add up the stretches of a run; ``shape`` is that of the sweep."""
    latency_s, busy_s, energy_j, busy_cycles, clocked = np.zeros((5, *shape))
    kernel_s, cycles = np.zeros((2, *shape, len(timeline.calls)))
    for part in stretches:
        totals = part.totals
        rows = part.stretch.rows
        calls = part.stretch.timeline.calls
        latency_s += totals.latency_s
        busy_s += totals.busy_s
        energy_j += totals.energy_j
        busy_cycles += totals.effective_hz * totals.busy_s
        clocked += sweep_values(part.ran.clock_hz) * totals.latency_s
        kernel_s[..., rows] += part.ran.kernel_s * calls
        cycles[..., rows] += part.ran.kernel_s * calls * part.ran.effective_hz
    return _JoinedRun(
        totals=WorkloadTotals(latency_s, busy_s, energy_j / latency_s, busy_cycles / busy_s),
        clock_hz=(clocked / latency_s)[..., np.newaxis],
        capped=np.asarray(
            np.any([np.broadcast_to(part.capped, shape) for part in stretches], axis=0)
        ),
        met=np.asarray(np.all([np.broadcast_to(part.met, shape) for part in stretches], axis=0)),
        kernel_s=kernel_s / timeline.calls,
        effective_hz=cycles / np.maximum(kernel_s, 1e-300),
    )


def _search_clock(
    runner: TimelineRunner, least: Array, high: Array, at_high: Array, limit_w: Array
) -> tuple[ClockedTimeline, Mask]:
    """Find the clocks at which power exceeds the limit by nothing, and whether there are any above
    ``least``.

    The first guess takes power as proportional to the clock; then the line through the last two
    points [Press2007, 9.2] gives the next. Where that lies outside the known ends, the next point
    is the lowest clock if nothing below the limit is known, else their middle. Points that have
    converged stay, so that a batch does what each of its members would alone."""
    low = least
    before = high
    at_before = at_high
    point = np.minimum(np.maximum(high * (limit_w / (limit_w + at_high)), least), high)
    uncapped = at_high <= 0
    for step in range(1, _MOST_STEPS + 1):
        ran = runner.run_at(point[..., np.newaxis])
        value = np.asarray(ran.power_w - limit_w)
        over = value > 0
        close = (_TIGHT if step < SECANT_STEPS else _CLOSE) * limit_w
        done = uncapped | (np.abs(value) <= close) | (over & (point <= least))
        if done.all() or step == _MOST_STEPS:
            break
        low = np.where(over, low, point)
        high = np.where(over, point, high)
        rise = value - at_before
        back = np.divide(
            value * (point - before), rise, out=np.full(rise.shape, np.inf), where=rise != 0
        )
        following = point - back
        inside = (low <= following) & (following <= high)
        other = np.where((following < low) & (low == least), least, 0.5 * (low + high))
        before = point
        at_before = value
        point = np.where(done, point, np.where(inside, following, other))
    return ran, uncapped | (value <= _CLOSE * limit_w) | (point > least)
