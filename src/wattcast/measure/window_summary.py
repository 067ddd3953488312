"""Summarise what was sampled between two moments: time, energy, power, clock, and reasons to doubt.

Energy is read off the steps of the energy counter. What the steps at both ends of a window leave
open is bounded by the power around them. A window with fewer than five whole steps keeps its time
and gets no power, and neither does one in which the counter stopped: a lost device or a hanging
driver draws power that nobody counted. ``flags`` name the reasons to doubt a result."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.errors import Refused
from wattcast.core.units import show
from wattcast.core.user_results import UserResult
from wattcast.measure.counter_ticks import CounterTicks, find_ticks
from wattcast.measure.energy_samples import (
    BENIGN,
    Array,
    EnergySamples,
)
from wattcast.measure.source_check import (
    CHECKS,
    BelievedSource,
    check_sources,
    drop_impossible,
)


class EnergyWindowCoefficients(Coefficients):
    """What a measured window needs to have energy and power, and what is flagged."""

    least_ticks: int  # steps of the counter in a window that has power
    # of power or energy that late polls, or steps at both ends, may have cost without a flag
    late_share: float
    usual_step_s: float  # period of a counter whose period is not known
    blur_s: float  # by which polls misplace a step
    one_level: float  # two powers within this ratio are one level that was seen twice
    stopped_s: float  # without a step, after which a counter without a known period has stopped
    busy_s: float  # a step that is missing for less may only have been read late, on a busy machine
    carried_share: float  # of a window that may lie beyond the counter's steps without a flag
    # a result whose energy or times may be off by more than this share is doubtful
    doubtful_share: float
    coarse_s: float  # power is doubtful where a counter without a known period was read less often
    gap_s: float  # samples that are further apart are flagged
    steady_spread: float  # from the median power, for a counter step to belong to a plateau
    steady_steps: int  # counter steps that a plateau needs
    # time between seen steps over the usual time, beyond which a step was missed
    missed_step: float


WINDOWS = load_coefficients("energy_windows", EnergyWindowCoefficients)


NO_LIMIT_W = 1e9


@dataclass(frozen=True)
class SteadyStretch:
    """A plateau: consecutive counter steps whose power stays within a few percent."""

    start_s: float  # from the beginning of the measurement
    duration_s: float
    power_w: float


@dataclass(frozen=True, repr=False)
class Measurement(UserResult):
    """One named window. ``None`` means it could not be measured; ``flags`` say why to be
    careful.
    """

    drawn_by = "wattcast.report.result_figures:draw_window"

    name: str
    duration_s: float
    energy_j: float | None = None
    power_w: float | None = None
    power_spread_w: float | None = None
    peak_w: float | None = None  # largest of the sensor's samples, not of the power itself
    peak_of: str = ""
    sm_clock_hz: float | None = None
    memory_power_w: float | None = None
    temperature_c: float | None = None
    ticks: int = 0
    throttle: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    steady: tuple[SteadyStretch, ...] = ()
    # Share of the processors that the sampler took while the window ran.
    overhead: float | None = None
    # Seconds of the window in which the counter had stopped, so that there is no energy.
    unmeasured_s: float | None = None
    doubts: tuple[str, ...] = ()  # the flags for which energy and power may be off by more than 5 %
    # Where the joules come from: the counter, power readings, or neither where they contradict.
    believed: str = ""
    # Joules by power readings, which the counter was checked against.
    readings_j: float | None = None

    def require(self) -> Measurement:
        """Return the measurement, or raise ``Refused`` with the reasons when power cannot be
        trusted.
        """
        if self.power_w is None or self.flags:
            raise Refused(f"{self.name}: {', '.join(self.flags) or 'no power'}.")
        return self

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        return f"{self.name}: {self.sentence}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; what was not measured is left out."""
        return self.plain()

    def plain(self) -> dict[str, object]:
        """Return plain data for JSON; what was not measured is left out."""
        plain: dict[str, object] = {}
        for name, value in asdict(self).items():
            is_nan = isinstance(value, float) and math.isnan(value)
            if value is not None and not is_nan:
                plain[name] = value
        return plain

    @property
    def sentence(self) -> str:
        """One line for people."""
        quantities = [
            ("{}", self.duration_s, "s"),
            ("{}", self.energy_j, "J"),
            ("mean {}", self.power_w, "W"),
            (f"largest sample {{}} ({self.peak_of})", self.peak_w, "W"),
            ("clock {}", self.sm_clock_hz, "Hz"),
        ]
        parts = []
        for text, value, unit in quantities:
            if value is not None:
                parts.append(text.format(show(value, unit)))
        flags = f" [{', '.join(self.flags)}]" if self.flags else ""
        return f"{self.name}: {', '.join(parts)}{flags}"


@dataclass(frozen=True)
class _Window:
    """The samples of a window and of some time around it."""

    samples: EnergySamples
    ticks: CounterTicks  # of all samples
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def seen(self) -> EnergySamples:
        return self.samples.between(self.start_s, self.end_s)

    @property
    def inside(self) -> CounterTicks:
        return self.ticks.between(self.start_s, self.end_s)

    @property
    def is_counter_read(self) -> bool:
        return len(self.samples.known("energy_j")) > 0


@dataclass(frozen=True)
class _CounterCoverage:
    """How much of a window the energy counter covers, and the flags that say so."""

    shortage: str  # too few counter steps; empty where there are enough
    is_reset: bool
    end_flags: tuple[str, ...]  # time at the start or the end without a step
    stopped_s: float  # 0 where the counter has not stopped

    @property
    def has_energy(self) -> bool:
        return not (self.shortage or self.is_reset or self.stopped_s)


def summarise_window(
    name: str,
    samples: EnergySamples,
    start_s: float,
    end_s: float,
    overhead: float | None = None,
    limit_w: float | None = None,
) -> Measurement:
    """Evaluate the window from ``start_s`` to ``end_s``; ``samples`` should reach a step beyond
    both ends.

    ``limit_w`` is the card's power limit, which the counter and the readings are checked against.
    """
    most_w = limit_w or CHECKS.most_w
    samples, impossible_flags = drop_impossible(samples, most_w, (start_s, end_s))
    window = _Window(samples, find_ticks(samples), start_s, end_s)
    seen = window.seen
    inside = window.inside
    coverage = _check_coverage(window, inside)
    flags = _list_flags(window, inside, coverage)
    doubts = _list_coverage_doubts(window, coverage)

    # Energy by the counter, and by how much the steps at both ends leave it open.
    energy_j = None
    steady: tuple[SteadyStretch, ...] = ()
    if coverage.has_energy:
        energy_j, open_j = bound_energy_j(window.ticks, samples, start_s, end_s)
        steady = find_stretches(inside, start_s)
        if open_j > WINDOWS.late_share * energy_j:
            flags.append(
                f"energy known only to {show(open_j, 'J')}: power changed at the start or end"
            )
            if open_j > WINDOWS.doubtful_share * energy_j:
                doubts.append(flags[-1])
    if inside.power_doubt > WINDOWS.doubtful_share:
        doubts.append("late_polls")

    # Power readings confirm the counter, replace it, or contradict it.
    check = check_sources(
        samples,
        window.ticks,
        (start_s, end_s),
        energy_j,
        limit_w,
    )
    if energy_j is not None and check.believed is BelievedSource.READINGS:
        energy_j = energy_j if check.readings_j is None else check.readings_j
    power_w = None if energy_j is None else energy_j / window.duration_s

    peak_w, peak_of = _find_peak(seen, inside)
    return Measurement(
        name,
        window.duration_s,
        energy_j=energy_j,
        power_w=power_w,
        power_spread_w=inside.spread_w if coverage.has_energy else None,
        peak_w=peak_w,
        peak_of=peak_of,
        sm_clock_hz=seen.mean("sm_clock_hz"),
        memory_power_w=seen.mean("memory_w"),
        temperature_c=seen.mean("temperature_c"),
        ticks=inside.intervals,
        throttle=seen.throttle,
        flags=(*flags, *impossible_flags, *check.flags, *check.doubts),
        steady=steady,
        overhead=overhead,
        unmeasured_s=coverage.stopped_s or None,
        doubts=(*doubts, *check.doubts),
        believed=str(check.believed),
        readings_j=check.readings_j,
    )


def _check_coverage(window: _Window, inside: CounterTicks) -> _CounterCoverage:
    """Find out whether the counter stepped often enough, restarted, or stopped."""
    shortage = ""
    if inside.intervals < WINDOWS.least_ticks:
        shortage = f"{inside.intervals} counter steps, {WINDOWS.least_ticks} needed"
    step_s = window.ticks.step_s or WINDOWS.busy_s
    around = window.ticks.between(window.start_s - step_s, window.end_s + step_s)
    is_reset = bool((np.diff(around.energy_j) < 0.0).any())
    if not window.ticks.intervals:
        # A counter that was read and never stepped has stopped for the whole window.
        has_stopped = window.is_counter_read and window.duration_s > WINDOWS.stopped_s
        return _CounterCoverage(shortage, is_reset, (), window.duration_s if has_stopped else 0.0)
    return _check_ends(window, inside, shortage, is_reset)


def _check_ends(
    window: _Window,
    inside: CounterTicks,
    shortage: str,
    is_reset: bool,
) -> _CounterCoverage:
    """Find the time before the first and after the last step of the counter."""
    period_s = window.ticks.step_s
    allowed_s = max(2.0 * period_s, WINDOWS.busy_s) if period_s else WINDOWS.stopped_s
    late_s, early_s = _find_uncounted_s(window)
    stopped_s = 0.0
    flags = []
    for apart_s, flag in (
        (late_s, f"counter started {late_s:.2f} s late"),
        (early_s, f"counter stopped {early_s:.2f} s before the end"),
    ):
        if apart_s > allowed_s:
            stopped_s += apart_s
        if apart_s > WINDOWS.carried_share * window.duration_s:
            flags.append(flag)
    if stopped_s and inside.intervals and not is_reset:
        counted_j = inside.energy_j[-1] - inside.energy_j[0]
        flags.append(f"{counted_j:.0f} J counted until then")
    return _CounterCoverage(shortage, is_reset, tuple(flags), stopped_s)


def _find_uncounted_s(window: _Window) -> tuple[float, float]:
    """Return how much of a window lies before the first step of the counter and after the last."""
    step_s = window.ticks.time_s
    before_s = max(float(step_s[0]) - window.start_s, 0.0)
    after_s = max(window.end_s - float(step_s[-1]), 0.0)
    return before_s, after_s


def _list_flags(
    window: _Window,
    inside: CounterTicks,
    coverage: _CounterCoverage,
) -> list[str]:
    """Return the reasons to be careful with a window."""
    flags = []
    if coverage.shortage:
        flags.append(coverage.shortage)
    if coverage.is_reset:
        flags.append("counter_reset")

    # Polling may have been too rare or too late to place the steps.
    apart_s = float(np.median(np.diff(inside.time_s))) if inside.intervals else 0.0
    if inside.step_s is None and apart_s > WINDOWS.coarse_s:
        flags.append(f"steps of the counter known only to {apart_s:.2f} s")
    if inside.power_doubt > WINDOWS.late_share:
        flags.append("late_polls")
    seen = window.seen
    gap_s = window.duration_s
    if len(seen):
        gap_s = np.diff(seen["time_s"]).max(initial=0.0)
    if gap_s > WINDOWS.gap_s:
        flags.append(f"no samples for {gap_s:.1f} s")

    flags += flag_throttling(seen.throttle)
    flags += coverage.end_flags
    return flags


def flag_throttling(reasons: Iterable[str]) -> list[str]:
    """Return a flag for each reason that slows a card down, other than its power cap and idling."""
    return [f"throttle_{reason}" for reason in reasons if reason not in BENIGN]


def _list_coverage_doubts(window: _Window, coverage: _CounterCoverage) -> list[str]:
    """Return the flags of the counter's coverage for which the result is doubtful."""
    doubts = []
    if coverage.is_reset:
        doubts.append("counter_reset")
    if coverage.has_energy:
        if sum(_find_uncounted_s(window)) > WINDOWS.doubtful_share * window.duration_s:
            doubts += coverage.end_flags
        return doubts

    # A short window has too few steps of any counter; in a long one the counter is at fault.
    step_s = window.ticks.step_s or WINDOWS.usual_step_s
    is_long = window.duration_s > 2.0 * WINDOWS.least_ticks * step_s
    if coverage.shortage and window.is_counter_read and is_long:
        doubts.append(coverage.shortage)
    return doubts


def _find_peak(seen: EnergySamples, inside: CounterTicks) -> tuple[float | None, str]:
    """Return the largest power that was seen, and by which sensor."""
    instant_w = seen.known("instant_w")
    if len(instant_w):
        return float(instant_w.max()), "instant readings"
    if inside.intervals:
        return float(inside.interval_w.max()), "counter steps"
    return None, ""


def bound_energy_j(
    ticks: CounterTicks,
    samples: EnergySamples,
    start_s: float,
    end_s: float,
) -> tuple[float, float]:
    """Return the joules between two moments, and by how many they may be off."""
    at_start = _locate_energy(ticks, samples, float(start_s), is_end=False)
    at_end = _locate_energy(ticks, samples, float(end_s), is_end=True)
    best_j = at_end.best_j - at_start.best_j
    least_j = at_end.least_j - at_start.most_j
    most_j = at_end.most_j - at_start.least_j
    return best_j, max(best_j - least_j, most_j - best_j)


@dataclass(frozen=True)
class _CounterValue:
    """What the counter would say at a moment between two steps."""

    best_j: float
    least_j: float
    most_j: float


def _locate_energy(
    ticks: CounterTicks,
    samples: EnergySamples,
    moment_s: float,
    is_end: bool,
) -> _CounterValue:
    """Return what the counter would say at a moment, which may lie inside one of its steps.

    Power is taken to jump once in the step, from that of the step before to that of the step after.
    Where this does not give the step's energy, power outside the window is that of the next step
    there: ``is_end`` says whether the window ends or begins at the moment. Beyond the steps power
    goes on as it was.
    """
    watts = ticks.interval_w
    place = int(np.searchsorted(ticks.time_s, moment_s)) - 1
    place = min(max(place, 0), len(watts) - 1)
    step_w = float(watts[place])
    begin_j = float(ticks.energy_j[place])
    passed_s = moment_s - float(ticks.time_s[place])
    remaining_s = float(ticks.time_s[place + 1]) - moment_s
    if passed_s < 0.0 or remaining_s < 0.0:
        beyond_j = begin_j + step_w * passed_s
        return _CounterValue(beyond_j, beyond_j, beyond_j)

    # Bounds: power stays between the lowest and the highest level around.
    counted_j = step_w * (passed_s + remaining_s)
    around_w = _list_powers_around(ticks, samples, place)
    lowest_w, highest_w = _bound_power(watts, place, around_w)
    blur_j = WINDOWS.blur_s * (float(around_w.max(initial=step_w)) - lowest_w)
    least_j = max(lowest_w * passed_s, counted_j - highest_w * remaining_s) - blur_j
    most_j = min(highest_w * passed_s, counted_j - lowest_w * remaining_s) + blur_j

    # Best guess: the power of the step before until it jumps to that of the step after.
    before_w = float(watts[max(place - 1, 0)])
    after_w = float(watts[min(place + 1, len(watts) - 1)])
    by_before_j = before_w * passed_s
    by_after_j = counted_j - after_w * remaining_s
    best_j = by_after_j if is_end else by_before_j
    if before_w < after_w and before_w <= step_w <= after_w:
        best_j = max(by_before_j, by_after_j)
    elif after_w <= step_w <= before_w:
        best_j = min(by_before_j, by_after_j)
    best_j = min(max(best_j, least_j), most_j)
    return _CounterValue(best_j + begin_j, least_j + begin_j, most_j + begin_j)


def _list_powers_around(
    ticks: CounterTicks,
    samples: EnergySamples,
    place: int,
) -> Array:
    """Return the powers, ascending, of two steps on either side of a step and of the readings
    there.

    All steps count where one of these was missed.
    """
    time_s = ticks.time_s
    watts = ticks.interval_w
    first = max(place - 2, 0)
    last = min(place + 3, len(watts))
    usual_s = ticks.step_s or np.median(np.diff(time_s))
    if time_s[last] - time_s[first] > WINDOWS.missed_step * (last - first) * usual_s:
        first = 0
        last = len(watts)
    read_w = samples.between(time_s[first], time_s[last]).known("instant_w")
    return np.sort(np.concatenate([watts[first:place], watts[place + 1 : last], read_w]))


def _bound_power(
    watts: Array,
    place: int,
    around_w: Array,
) -> tuple[float, float]:
    """Return the lowest and the highest power that a step may hold.

    A level counts where it was seen twice, because a pulse may lie across two steps.
    """
    step_w = float(watts[place])
    lowest_w = 0.0
    highest_w = NO_LIMIT_W
    elsewhere_w = np.sort(np.delete(watts, place))
    for level_w in (elsewhere_w, around_w):
        if (
            len(level_w) > 1
            and WINDOWS.one_level * step_w >= level_w[0] >= level_w[1] / WINDOWS.one_level
        ):
            lowest_w = min(step_w, float(level_w[0]))
    if (
        len(around_w) > 1
        and step_w / WINDOWS.one_level <= around_w[-1] <= WINDOWS.one_level * around_w[-2]
    ):
        highest_w = max(step_w, float(around_w[-1]))
    return lowest_w, highest_w


def find_stretches(inside: CounterTicks, origin_s: float) -> tuple[SteadyStretch, ...]:
    """Return the plateaus of at least eight steps within 4 % of their median power.

    Steps at either end of a plateau are mixed with what lies outside and are left out.
    """
    watts = inside.interval_w
    stretches: list[SteadyStretch] = []
    first = 0
    for place in range(1, len(watts) + 1):
        if place < len(watts):
            usual_w = np.median(watts[first:place])
            if abs(watts[place] - usual_w) <= WINDOWS.steady_spread * usual_w:
                continue
        if place - first >= WINDOWS.steady_steps:
            stretches.append(_make_stretch(inside, first + 1, place - 1, origin_s))
        first = place
    return tuple(stretches)


def _make_stretch(
    inside: CounterTicks,
    begin: int,
    end: int,
    origin_s: float,
) -> SteadyStretch:
    """Return the plateau between two steps of the counter."""
    start_s = float(inside.time_s[begin])
    duration_s = float(inside.time_s[end]) - start_s
    spent_j = float(inside.energy_j[end] - inside.energy_j[begin])
    return SteadyStretch(start_s - float(origin_s), duration_s, spent_j / duration_s)
