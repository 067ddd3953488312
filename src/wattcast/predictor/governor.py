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
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import (
    Array,
    Mask,
    append_axes,
    sweep_values,
    take_sweep,
)
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.pipeline import (
    ClockedTimeline,
    TimelineRunner,
    WorkloadTotals,
)
from wattcast.predictor.timeline import Timeline

if TYPE_CHECKING:
    from wattcast.predictor.run_stretches import Division, Stretch


class GovernorCoefficients(Coefficients):
    """How the governor acts in time."""

    reaction_s: float  # from the start of a load to a lower clock; it averages over as long


REACTION_S = load_coefficients("governor", GovernorCoefficients).reaction_s
# Numerics of the search for the clock: changing them changes no result that anybody would see.
SECANT_STEPS = 8  # within which every card of the catalogue meets the limit closely
_MOST_STEPS = 30  # where voltage rises in stairs
_TIGHT = 1e-10  # share of the limit that ends the search within ``SECANT_STEPS``
_CLOSE = 1e-8  # share of the limit that ends the search after ``SECANT_STEPS``


@dataclass(frozen=True, eq=False, repr=False)
class GovernedStretch:
    """A stretch of a run at the clock that the governor settles at.

    Its latency is that of the stretch.
    """

    stretch: Stretch
    at: OperatingPoint  # with the set clock
    capped: Mask  # (*sweep,) the power limit lowered the clock
    met: Mask  # (*sweep,) mean power is within the limit
    asked_w: Array  # (*sweep,) mean power at the clock asked for
    totals: WorkloadTotals
    run: ClockedTimeline


@dataclass(frozen=True)
class GovernedDivision:
    """The stretches of the runs of some points of a sweep."""

    points: Mask | None  # (*sweep,) None: all of them
    stretches: tuple[GovernedStretch, ...]


@dataclass(frozen=True, eq=False, repr=False)
class GovernedPoint:
    """The operating point that the governor settles at."""

    # with the set clock, as NVML would report it, (*sweep, 1); of stretches the mean over time
    at: OperatingPoint
    capped: Mask  # (*sweep,) the power limit lowered the clock, of a stretch or of the whole
    met: Mask  # (*sweep,) mean power is within the limit; False at the lowest clock
    asked_w: Array  # (*sweep,) mean power at the clock asked for, whatever the limit
    # of runs that do not settle at one clock; empty: all do
    divisions: tuple[GovernedDivision, ...] = ()

    @property
    def clock_hz(self) -> Array:
        """The set clock, ``(*sweep, 1)``."""
        return np.asarray(self.at.clock_hz, dtype=np.float64)


# where the governor settles, the workload's figures there, and its timeline
GovernedRun = tuple[GovernedPoint, WorkloadTotals, ClockedTimeline]


def run_governed(
    timeline: Timeline,
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
) -> GovernedRun:
    """Find the highest set clock at which mean power meets the limit that the governor holds, and
    run the workload there.

    Mean power rises with the clock: voltage and idle power do, and time does not. Where even the
    lowest clock draws too much, the lowest clock is returned and ``met`` is False.
    """
    clocked_run = run_at_asked_clock(timeline, gpu, at, bundle)
    return clocked_run.hold_stretches() or clocked_run.hold_whole()


def run_at_asked_clock(
    timeline: Timeline,
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
) -> AskedRun:
    """Run the workload at the clock asked for, before the governor lowers it."""
    runner = TimelineRunner(timeline, at, bundle)
    bounds = _find_bounds(gpu, at, bundle)
    return AskedRun(
        timeline,
        at,
        bundle,
        runner,
        bounds,
        runner.run_at(bounds.asked_hz),
    )


@dataclass(frozen=True)
class AskedRun:
    """A run at the clock asked for, and what the governor needs to lower it."""

    timeline: Timeline
    at: OperatingPoint
    bundle: Bundle
    runner: TimelineRunner
    bounds: _ClockBounds
    run: ClockedTimeline

    @property
    def is_over(self) -> Mask:
        """The points whose mean power is above the limit, ``(*sweep,)``."""
        return np.asarray(self.run.power_w > self.bounds.limit_w)

    @property
    def totals(self) -> WorkloadTotals:
        """The figures of the workload at the clock asked for."""
        return self.runner.sum_up(self.run)

    def select_points(
        self,
        points: npt.NDArray[np.intp],
        gpu: Gpu,
        at: OperatingPoint,
        bundle: Bundle,
    ) -> AskedRun:
        """Return the run of some points of a sweep, whose chip, settings and bundle are these."""
        size = self.is_over.size
        timeline = self.timeline.select_points(points, size)
        columns = {
            item.name: take_sweep(getattr(self.run, item.name), points, size)
            for item in fields(ClockedTimeline)
        }
        return AskedRun(
            timeline,
            at,
            bundle,
            TimelineRunner(timeline, at, bundle),
            _find_bounds(gpu, at, bundle),
            ClockedTimeline(**columns),
        )

    def hold_stretches(self) -> GovernedRun | None:
        """Hold each stretch of a long run under the limit; None where no stretch exceeds it.

        None too where the run is one stretch.
        """
        duration_s = self.at.duration_s
        is_burst = duration_s is not None and duration_s <= REACTION_S
        if is_burst or not np.any(self.run.latency_s > REACTION_S):
            return None
        return _govern_stretches(
            self.timeline,
            self.at,
            self.bundle,
            self.bounds,
            self.run,
        )

    def hold_whole(self) -> GovernedRun:
        """Hold the mean power of the run as a whole under the limit."""
        settled = _hold_limit(self.runner, self.at, self.bounds, self.run)
        point = GovernedPoint(
            at=replace(self.at, clock_hz=settled.run.clock_hz),
            capped=settled.capped,
            met=settled.met,
            asked_w=settled.asked_w,
        )
        return point, self.runner.sum_up(settled.run), settled.run


@dataclass(frozen=True, eq=False, repr=False)
class _ClockBounds:
    """The clocks between which the governor chooses, and the power that it holds."""

    asked_hz: Array  # (*sweep, 1)
    least_hz: Array  # (*sweep, 1)
    limit_w: Array  # (*sweep,)


def _find_bounds(
    gpu: Gpu,
    at: OperatingPoint,
    bundle: Bundle,
) -> _ClockBounds:
    clock = gpu.clocks.max_hz if at.clock_hz is None else at.clock_hz
    asked_hz = np.asarray(clock, dtype=np.float64)
    if asked_hz.ndim == 0:
        asked_hz = asked_hz.reshape(1)
    limit = gpu.power.limit_w if at.power_limit_w is None else at.power_limit_w
    limit_w = sweep_values(np.asarray(limit, dtype=np.float64))
    least_hz = np.minimum(gpu.clocks.lowest_hz, asked_hz)
    return _ClockBounds(asked_hz, least_hz, limit_w * bundle.governor_share)


@dataclass(frozen=True, eq=False, repr=False)
class _SettledRun:
    """A run at the clock that the governor settles at; ``GovernedPoint`` describes the fields."""

    run: ClockedTimeline
    capped: Mask
    met: Mask
    asked_w: Array


def _hold_limit(
    runner: TimelineRunner,
    at: OperatingPoint,
    bounds: _ClockBounds,
    asked: ClockedTimeline,
    points: Mask | None = None,
) -> _SettledRun:
    """Run what ``runner`` has at the highest clock under the limit.

    ``asked`` is the run at the clock asked for. With ``points`` ``(*sweep,)``, the clocks of all
    other points are not searched for.
    """
    excess_w = np.asarray(asked.power_w - bounds.limit_w)
    if points is not None:
        # any power under the limit, which is positive: the search divides by it
        excess_w = np.where(points, excess_w, -0.5 * bounds.limit_w)
    shape = excess_w.shape
    asked_w = np.broadcast_to(asked.power_w, shape)
    capped = excess_w > 0
    if not capped.any():
        clock_hz = np.array(np.broadcast_to(bounds.asked_hz, (*shape, 1)))
        is_sweep_over_limits = asked.power_w.shape != shape
        run = runner.run_at(clock_hz) if is_sweep_over_limits else asked
        return _SettledRun(replace(run, clock_hz=clock_hz), capped, ~capped, asked_w)

    low_hz = np.array(np.broadcast_to(bounds.least_hz, (*shape, 1))[..., 0])
    high_hz = np.array(np.broadcast_to(bounds.asked_hz, (*shape, 1))[..., 0])
    run, met = _search_clock(
        runner,
        low_hz,
        high_hz,
        excess_w,
        bounds.limit_w,
    )
    if at.duration_s is not None:
        # until the governor reacts, the run has the clock asked for
        before = min(REACTION_S / at.duration_s, 1.0)
        mean_hz = before * high_hz[..., np.newaxis] + (1.0 - before) * run.clock_hz
        run = runner.run_at(mean_hz)
        capped = capped & (before < 1.0)
        met = met | (before == 1.0)
    return _SettledRun(run, capped, met, asked_w)


def _govern_stretches(
    timeline: Timeline,
    at: OperatingPoint,
    bundle: Bundle,
    bounds: _ClockBounds,
    asked: ClockedTimeline,
) -> GovernedRun | None:
    """Hold each stretch of a run under the limit; None where there is one stretch, or where none
    exceeds the limit.

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

    def choose(read_column: Callable[[_JoinedRun], Array | Mask]) -> npt.NDArray[Any]:
        """Take a column of each point from the run that was divided as this point is."""
        values = read_column(joined[0])
        for here, joined_run in zip(points[1:], joined[1:], strict=True):
            column = read_column(joined_run)
            assert here is not None, "one division of several holds for some points"
            spread = append_axes(np.broadcast_to(here, shape), column.ndim)
            values = np.where(spread, column, values)
        return np.asarray(values)

    totals = WorkloadTotals(
        latency_s=choose(lambda run: run.totals.latency_s),
        busy_s=choose(lambda run: run.totals.busy_s),
        power_w=choose(lambda run: run.totals.power_w),
        effective_hz=choose(lambda run: run.totals.effective_hz),
    )
    whole_run = ClockedTimeline(
        clock_hz=choose(lambda run: run.clock_hz),
        effective_hz=choose(lambda run: run.effective_hz),
        kernel_s=choose(lambda run: run.kernel_s),
        latency_s=totals.latency_s,
        power_w=totals.power_w,
    )
    point = GovernedPoint(
        at=replace(at, clock_hz=whole_run.clock_hz),
        capped=choose(lambda run: run.capped),
        met=choose(lambda run: run.met),
        asked_w=np.broadcast_to(asked.power_w, shape),
        divisions=tuple(governed),
    )
    return point, totals, whole_run


def _govern_division(
    division: Division,
    at: OperatingPoint,
    bundle: Bundle,
    bounds: _ClockBounds,
) -> GovernedDivision:
    """Hold stretch after stretch under the limit; the host issues ahead of the device across
    them.
    """
    governed = []
    ahead_s: Array = np.zeros(())
    for stretch in division.stretches:
        runner = TimelineRunner(stretch.timeline, at, bundle, ahead_s)
        run_as_asked = runner.run_at(bounds.asked_hz)
        settled = _hold_limit(
            runner,
            at,
            bounds,
            run_as_asked,
            division.points,
        )
        governed.append(
            GovernedStretch(
                stretch=stretch,
                at=replace(at, clock_hz=settled.run.clock_hz),
                capped=settled.capped,
                met=settled.met,
                asked_w=settled.asked_w,
                totals=runner.sum_up(settled.run),
                run=settled.run,
            )
        )
        issuing_s = stretch.timeline.host_s @ stretch.timeline.calls
        ahead_s = np.asarray(ahead_s + settled.run.latency_s - issuing_s)
    return GovernedDivision(division.points, tuple(governed))


@dataclass(frozen=True, eq=False, repr=False)
class _JoinedRun:
    """Stretches that follow one another, as one run."""

    totals: WorkloadTotals
    clock_hz: Array  # (*sweep, 1) mean over the time
    capped: Mask
    met: Mask
    kernel_s: Array  # (*sweep, kernel) mean over the calls
    effective_hz: Array  # (*sweep, kernel) mean over the time in each kernel


def _join_stretches(
    timeline: Timeline,
    stretches: tuple[GovernedStretch, ...],
    shape: tuple[int, ...],
) -> _JoinedRun:
    """Add up the stretches of a run; ``shape`` is that of the sweep."""
    latency_s = np.zeros(shape)
    busy_s = np.zeros(shape)
    energy_j = np.zeros(shape)
    busy_cycles = np.zeros(shape)
    clock_cycles = np.zeros(shape)
    kernel_s = np.zeros((*shape, len(timeline.calls)))
    kernel_cycles = np.zeros((*shape, len(timeline.calls)))
    for part in stretches:
        totals = part.totals
        latency_s += totals.latency_s
        busy_s += totals.busy_s
        energy_j += totals.energy_j
        busy_cycles += totals.effective_hz * totals.busy_s
        clock_cycles += sweep_values(part.run.clock_hz) * totals.latency_s
        rows = part.stretch.rows
        spent_s = part.run.kernel_s * part.stretch.timeline.calls
        kernel_s[..., rows] += spent_s
        kernel_cycles[..., rows] += spent_s * part.run.effective_hz

    capped = np.zeros(shape, dtype=bool)
    met = np.ones(shape, dtype=bool)
    for part in stretches:
        capped |= part.capped
        met &= part.met
    return _JoinedRun(
        totals=WorkloadTotals(latency_s, busy_s, energy_j / latency_s, busy_cycles / busy_s),
        clock_hz=(clock_cycles / latency_s)[..., np.newaxis],
        capped=capped,
        met=met,
        kernel_s=kernel_s / timeline.calls,
        effective_hz=kernel_cycles / np.maximum(kernel_s, 1e-300),
    )


def _search_clock(
    runner: TimelineRunner,
    least_hz: Array,
    high_hz: Array,
    excess_at_high_w: Array,
    limit_w: Array,
) -> tuple[ClockedTimeline, Mask]:
    """Find the clocks at which power exceeds the limit by nothing, and say for which points the
    search ended above ``least_hz`` or below the limit.

    The first guess takes power as proportional to the clock; then the line through the last two
    points [Press2007, 9.2] gives the next. Where that lies outside the bounds, the next point is
    the lowest clock if no clock below the limit has been seen, else their middle. Points that have
    converged stay, so that a batch does what each of its members would alone.
    """
    low_hz = least_hz
    last_hz = high_hz
    last_excess_w = excess_at_high_w
    proportional_hz = high_hz * (limit_w / (limit_w + excess_at_high_w))
    point_hz = np.minimum(np.maximum(proportional_hz, least_hz), high_hz)
    uncapped = excess_at_high_w <= 0
    for step in range(1, _MOST_STEPS + 1):
        run = runner.run_at(point_hz[..., np.newaxis])
        excess_w = np.asarray(run.power_w - limit_w)
        is_over = excess_w > 0
        tolerance_w = (_TIGHT if step < SECANT_STEPS else _CLOSE) * limit_w
        is_close = np.abs(excess_w) <= tolerance_w
        is_done = uncapped | is_close | (is_over & (point_hz <= least_hz))
        if is_done.all() or step == _MOST_STEPS:
            break
        low_hz = np.where(is_over, low_hz, point_hz)
        high_hz = np.where(is_over, point_hz, high_hz)

        secant_hz = _secant_zero_hz(point_hz, excess_w, last_hz, last_excess_w)
        is_inside = (low_hz <= secant_hz) & (secant_hz <= high_hz)
        nothing_below = (secant_hz < low_hz) & (low_hz == least_hz)
        fallback_hz = np.where(nothing_below, least_hz, 0.5 * (low_hz + high_hz))

        last_hz = point_hz
        last_excess_w = excess_w
        following_hz = np.where(is_inside, secant_hz, fallback_hz)
        point_hz = np.where(is_done, point_hz, following_hz)
    return run, uncapped | (excess_w <= _CLOSE * limit_w) | (point_hz > least_hz)


def _secant_zero_hz(
    point_hz: Array,
    excess_w: Array,
    last_hz: Array,
    last_excess_w: Array,
) -> Array:
    """Return where the line through the last two points of power over clock meets the limit.

    A level line meets it nowhere: the result is minus infinity.
    """
    rise_w = excess_w - last_excess_w
    step_hz = np.divide(
        excess_w * (point_hz - last_hz),
        rise_w,
        out=np.full(rise_w.shape, np.inf),
        where=rise_w != 0,
    )
    return np.asarray(point_hz - step_hz)
