"""Compare the energy counter of a card with its power readings and its power limit.

A card tells its energy twice: by a counter of joules and by readings of watts. A driver or a
firmware that is wrong is mostly wrong in one of them: the counter stands still for a second, jumps,
restarts or runs at another rate; a reading repeats an old value or says what no card can draw.
Where both agree, the counter is believed, because it misses nothing between two readings. Where
they do not, the result is doubtful and says how far they are apart.

A reading of average power (NVML: one second) is compared with the counter's mean power over the
same second, wherever in a step of the counter the reading may have been updated. Instant readings
are compared second by second, with what their own spread leaves open. The counter alone is checked
against the limit and for standing still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.units import show
from wattcast.measure.counter_ticks import CounterTicks
from wattcast.measure.energy_samples import (
    COLUMNS,
    Array,
    ColumnReadings,
    EnergySamples,
)


class SourceCheckCoefficients(Coefficients):
    """When power readings and the power limit contradict an energy counter."""

    average_s: float  # that readings of average power look back
    sensor_share: float  # by which counter and readings may differ in steady load
    sensor_w: float  # by which they may differ on an idle card
    contradicted_share: float  # of the energy that may be contradicted
    above_limit: float  # times its limit that a card may draw over a second
    peak_above_limit: float  # times its limit that a card may draw over one step of the counter
    most_w: float  # that a card may draw which does not report its limit
    still_steps: float  # usual steps for which a counter may keep its value
    still_slack_s: float  # by which polls may misplace both ends of that time
    still_s: float  # for which a counter without regular steps may keep its value
    apart: float  # ratio of a counter's mean power to readings at both ends, in a steady load
    least_readings: int  # power readings that a window needs, to be judged by them
    late_reading_s: float  # by which a reading may be updated after the counter's step
    early_reading_s: float  # and before it
    mean_averages: float  # averages that a window must span, to be compared by their mean
    sampling_deviations: float  # standard errors that the mean of instant readings may be off
    agreement: float  # share by which two kinds of readings may differ and agree


CHECKS = load_coefficients("source_checks", SourceCheckCoefficients)


POWER_COLUMNS = ("instant_w", "average_w", "memory_w")
SHIFTS = 7  # moments of a step at which a reading may have been updated


class BelievedSource(StrEnum):
    """Where the joules of a window come from."""

    COUNTER = "counter"
    READINGS = "readings"
    NEITHER = "neither"  # they contradict one another, and nothing says which is right


@dataclass(frozen=True)
class SourceCheck:
    """What counter and readings say of one window, which one is believed, and why to doubt it."""

    believed: BelievedSource = BelievedSource.COUNTER
    readings_j: float | None = None  # None: there are too few of them
    doubts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # what is wrong without making the joules doubtful


@dataclass(frozen=True)
class _Contradiction:
    """Joules in which readings contradict the counter; whether they would have shown a fault."""

    energy_j: float
    is_decisive: bool = True


def check_sources(
    samples: EnergySamples,
    ticks: CounterTicks,
    window_s: tuple[float, float],
    counter_j: float | None,
    limit_w: float | None = None,
) -> SourceCheck:
    """Check the joules that the counter gives for a window.

    ``samples`` and ``ticks`` reach beyond both ends.
    """
    if (np.diff(samples["time_s"]) < 0.0).any():
        doubt = "the machine's clock was set back"
        return SourceCheck(BelievedSource.NEITHER, doubts=(doubt,))
    readings = PowerReadings.read(samples)
    readings_j = readings.integrate(window_s)
    if counter_j is None or ticks.intervals < 2:
        return SourceCheck(readings_j=readings_j)
    faults = _find_counter_faults(samples, ticks, window_s, limit_w or CHECKS.most_w)
    comparison = _compare_readings(readings, ticks, window_s, counter_j)

    # Standing still is a doubt where no readings tell whether it cost joules.
    is_still = bool(faults.stillness) and not comparison.is_judged
    if not (faults.above_limit or comparison.contradicts or is_still):
        flags: tuple[str, ...] = ()
        if comparison.averages_differ:
            flags = ("average power readings contradict the counter and the instant readings",)
        return SourceCheck(readings_j=readings_j, flags=flags)
    reason = faults.above_limit or faults.stillness
    believed = BelievedSource.NEITHER
    if readings_j is not None:
        believed = _choose_source(bool(reason), readings, ticks, window_s)
    doubt = _describe_doubt(counter_j, readings_j, reason, believed)
    return SourceCheck(believed, readings_j, (doubt,))


@dataclass(frozen=True)
class _Comparison:
    """Whether the power readings of a window contradict its counter."""

    is_judged: bool  # there are readings enough to tell
    averages_differ: bool
    contradicts: bool


def _compare_readings(
    readings: PowerReadings,
    ticks: CounterTicks,
    window_s: tuple[float, float],
    counter_j: float,
) -> _Comparison:
    """Compare the counter with both kinds of readings.

    Averages miss nothing between two readings: they decide, unless instants confirm the counter.
    """
    by_average = _compare_averages(readings, ticks, window_s, counter_j)
    by_instant = _compare_instants(readings.instant, ticks, window_s)
    allowed_j = CHECKS.contradicted_share * abs(counter_j)
    averages_differ = by_average is not None and by_average.energy_j > allowed_j
    instants_differ = by_instant is not None and by_instant.energy_j > allowed_j
    contradicts = instants_differ
    if by_average is not None:
        instants_agree = by_instant is not None and by_instant.is_decisive and not instants_differ
        contradicts = averages_differ and not instants_agree
    is_judged = by_average is not None or by_instant is not None
    return _Comparison(is_judged, averages_differ, contradicts)


def is_plausible_power(
    mean_w: float,
    ends_w: Sequence[float],
    most_w: float,
) -> bool:
    """Tell whether a counter's mean power can be true, given readings at both ends of its time.

    A counter that stood still, fell, or rose above ``most_w`` cannot. Nor can one that is far from
    readings of a load that is steady enough for them to count; NaN readings do not.

    >>> is_plausible_power(300.0, (290.0, 310.0), 700.0)
    True
    >>> is_plausible_power(600.0, (290.0, 310.0), 700.0), is_plausible_power(0.0, (), 700.0)
    (False, False)
    """
    if not 0.0 < mean_w <= CHECKS.above_limit * most_w:
        return False
    readings_w = [watts for watts in ends_w if 0.0 < watts <= CHECKS.peak_above_limit * most_w]
    if not readings_w:
        return True
    return min(readings_w) / CHECKS.apart <= mean_w <= CHECKS.apart * max(readings_w)


@dataclass(frozen=True)
class PowerReadings:
    """Both kinds of power readings of a card."""

    instant: ColumnReadings
    average: ColumnReadings  # over the second before

    @classmethod
    def read(cls, samples: EnergySamples) -> PowerReadings:
        """Return the power readings among the samples."""
        return cls(samples.read_column("instant_w"), samples.read_column("average_w"))

    def integrate(self, window_s: tuple[float, float]) -> float | None:
        """Return the joules of a window by its power readings; None where there are too few."""
        start_s, end_s = window_s
        for readings, back_s in ((self.instant, 0.0), (self.average, 0.5 * CHECKS.average_s)):
            near = readings.between(start_s, end_s + back_s)
            if len(near) < CHECKS.least_readings:
                continue
            # An average stands for the middle of the time that it looks back.
            middle_s = np.clip(near.time_s - back_s, start_s, end_s)
            edges_s = np.concatenate([[start_s], middle_s, [end_s]])
            watts = np.concatenate([near.values[:1], near.values, near.values[-1:]])
            mean_w = 0.5 * (watts[1:] + watts[:-1])
            return float(np.sum(mean_w * np.diff(edges_s)))
        return None


def drop_impossible(
    samples: EnergySamples,
    most_w: float,
    window_s: tuple[float, float],
) -> tuple[EnergySamples, tuple[str, ...]]:
    """Return samples without power readings that no card can have drawn, and a flag for these."""
    rows = samples.rows.copy()
    time_s = rows[:, COLUMNS.index("time_s")]
    is_inside = (time_s >= window_s[0]) & (time_s <= window_s[1])
    dropped_w: list[float] = []
    for column in POWER_COLUMNS:
        watts = rows[:, COLUMNS.index(column)]
        is_above = watts > CHECKS.peak_above_limit * most_w
        is_wrong = np.isfinite(watts) & ((watts < 0.0) | is_above)
        dropped_w += watts[is_wrong & is_inside].tolist()
        watts[is_wrong] = np.nan
    if not dropped_w:
        return EnergySamples(rows), ()
    flag = f"{len(dropped_w)} impossible power readings left out, such as {dropped_w[0]:.6g} W"
    return EnergySamples(rows), (flag,)


@dataclass(frozen=True)
class _CounterFaults:
    """What is wrong with a counter on its own; empty where nothing is."""

    above_limit: str = ""
    stillness: str = ""


def _find_counter_faults(
    samples: EnergySamples,
    ticks: CounterTicks,
    window_s: tuple[float, float],
    most_w: float,
) -> _CounterFaults:
    """Look for a counter that says more than the card may draw, or that keeps its value."""
    start_s, end_s = window_s
    near = ticks.between(start_s - CHECKS.average_s, end_s + CHECKS.average_s)
    above_limit = _describe_excess(near, most_w) if near.intervals else ""
    stillness = ""
    still_s = _longest_stillness_s(samples.between(start_s, end_s))
    allowed_s = (
        CHECKS.still_steps * ticks.step_s + CHECKS.still_slack_s if ticks.step_s else CHECKS.still_s
    )
    if still_s > allowed_s:
        stillness = f"the counter stood still for {still_s:.1f} s"
    return _CounterFaults(above_limit, stillness)


def _describe_excess(near: CounterTicks, most_w: float) -> str:
    """Say by how much a counter rose above the card's limit; empty where it did not."""
    # Mean power over every second that ends at a step, and over steps that last a second or more.
    end_s = near.time_s[near.time_s >= near.time_s[0] + CHECKS.average_s]
    risen_j = _interpolate(near, end_s) - _interpolate(near, end_s - CHECKS.average_s)
    mean_w = risen_j / CHECKS.average_s
    step_w = near.interval_w
    is_long = np.diff(near.time_s) >= CHECKS.average_s
    sustained_w = np.concatenate([mean_w, step_w[is_long]])

    peak_w = float(step_w.max())
    is_peak_above = peak_w > CHECKS.peak_above_limit * most_w
    is_mean_above = float(sustained_w.max(initial=0.0)) > CHECKS.above_limit * most_w
    if not (is_peak_above or is_mean_above):
        return ""
    largest_w = max(peak_w, float(mean_w.max(initial=0.0)))
    rise = f"the counter rose by {show(largest_w, 'W')}"
    return f"{rise}, above the limit of {show(most_w, 'W')}"


def _longest_stillness_s(samples: EnergySamples) -> float:
    """Return the longest time between two readings of the counter with one value between them."""
    counter = samples.read_column("energy_j")
    time_s = counter.time_s
    if len(time_s) < 2:
        return 0.0
    changes = np.flatnonzero(np.diff(counter.values) != 0.0)
    firsts = np.concatenate([[0], changes + 1])
    lasts = np.concatenate([changes, [len(time_s) - 1]])
    length_s = time_s[lasts] - time_s[firsts]
    return float(length_s.max())


def _interpolate(ticks: CounterTicks, time_s: Array) -> Array:
    return np.interp(time_s, ticks.time_s, ticks.energy_j)


def _compare_averages(
    readings: PowerReadings,
    ticks: CounterTicks,
    window_s: tuple[float, float],
    counter_j: float,
) -> _Contradiction | None:
    """Compare readings that are means over a second with the counter over the same second."""
    start_s, end_s = window_s
    update_s = ticks.step_s or float(np.median(np.diff(ticks.time_s)))
    lag_s = update_s + CHECKS.late_reading_s
    first_s = float(ticks.time_s[0]) + CHECKS.average_s + lag_s
    last_s = float(ticks.time_s[-1])
    near = readings.average.between(max(start_s, first_s), last_s + lag_s)
    if len(near) < CHECKS.least_readings:
        return None

    # Power by the counter, had the reading been updated at each of several moments (last axis).
    shifts_s = np.linspace(-lag_s, CHECKS.early_reading_s, SHIFTS)
    updated_s = np.minimum(near.time_s[:, None] + shifts_s, last_s)
    counted_j = _interpolate(ticks, updated_s) - _interpolate(ticks, updated_s - CHECKS.average_s)
    counted_w = counted_j / CHECKS.average_s
    open_w = _find_open_joules(ticks, readings.instant, updated_s) / CHECKS.average_s
    local_j = _sum_contradictions(near, counted_w, open_w)

    # A rate that is off by little hides in the tolerances, and shows in the mean.
    is_inside = near.time_s <= end_s
    if (
        is_inside.sum() < CHECKS.least_readings
        or end_s - start_s < CHECKS.mean_averages * CHECKS.average_s
    ):
        return _Contradiction(local_j)
    ratio = float(near.values[is_inside].mean()) / max(float(counted_w[is_inside].mean()), 1e-9)
    edge_share = 2.0 * float(open_w.max()) * CHECKS.average_s / max(abs(counter_j), 1e-9)
    overall = max(abs(ratio - 1.0) - CHECKS.sensor_share - edge_share, 0.0)
    return _Contradiction(max(local_j, overall * abs(counter_j)))


def _sum_contradictions(
    near: ColumnReadings,
    counted_w: Array,
    open_w: Array,
) -> float:
    """Return the joules in which averages lie outside what the counter may mean, ``(reading,
    moment)``, and the tolerance of a sensor.

    Each reading stands for the time until the next; one alone may catch the whole of a fault.
    """
    tolerance_w = CHECKS.sensor_share * near.values + CHECKS.sensor_w
    low_w = (counted_w - open_w).min(axis=1) - tolerance_w
    high_w = (counted_w + open_w).max(axis=1) + tolerance_w
    beyond_w = near.values - np.clip(near.values, low_w, high_w)
    for_s = np.minimum(np.diff(near.time_s, append=near.time_s[-1]), CHECKS.average_s)
    missing_j = float((np.maximum(beyond_w, 0.0) * for_s).sum())
    surplus_j = float((np.maximum(-beyond_w, 0.0) * for_s).sum())
    largest_j = float(np.abs(beyond_w).max()) * CHECKS.average_s
    return max(missing_j, surplus_j, largest_j)


def _find_open_joules(
    ticks: CounterTicks,
    instant: ColumnReadings,
    moments_s: Array,
) -> Array:
    """Return by how much the counter may differ from a line between two steps that lie far apart.

    Power may have been anything between the lowest and the highest around while nobody read the
    counter.
    """
    place = np.searchsorted(ticks.time_s, moments_s) - 1
    place = np.clip(place, 0, len(ticks.time_s) - 2)
    gap_s = np.diff(ticks.time_s)[place]
    has_step_between = np.round(gap_s / ticks.step_s) > 1.0 if ticks.step_s else gap_s > 0.0
    from_begin_s = moments_s - ticks.time_s[place]
    to_end_s = ticks.time_s[place + 1] - moments_s
    to_edge_s = np.maximum(np.minimum(from_begin_s, to_end_s), 0.0)
    near = instant.between(float(moments_s.min()) - CHECKS.average_s, float(moments_s.max()))
    span_w = float(np.ptp(near.values)) if len(near) > 1 else 0.0
    return np.where(has_step_between, 0.5 * to_edge_s * span_w, 0.0)


def _compare_instants(
    instant: ColumnReadings,
    ticks: CounterTicks,
    window_s: tuple[float, float],
) -> _Contradiction | None:
    """Compare the mean of instant readings with the counter, second by second."""
    start_s, end_s = window_s
    first_s = max(start_s, float(ticks.time_s[0]))
    last_s = min(float(ticks.time_s[-1]), end_s + CHECKS.average_s)
    if last_s - first_s < 0.5 * CHECKS.average_s:
        return None
    count = max(round((last_s - first_s) / CHECKS.average_s), 1)
    length_s = (last_s - first_s) / count
    edges_s = np.linspace(first_s, last_s, count + 1)
    counted_w = np.diff(_interpolate(ticks, edges_s)) / length_s
    missing_j = 0.0
    surplus_j = 0.0
    tolerances = []
    for begin_s, stop_s, by_counter_w in zip(edges_s[:-1], edges_s[1:], counted_w, strict=True):
        watts = instant.between(begin_s, stop_s).values
        if len(watts) < CHECKS.least_readings:
            continue
        mean_w = float(watts.mean())
        standard_error_w = float(watts.std(ddof=1)) / np.sqrt(len(watts))
        tolerance_w = (
            CHECKS.sensor_share * mean_w
            + CHECKS.sensor_w
            + CHECKS.sampling_deviations * standard_error_w
        )
        tolerances.append(tolerance_w / max(mean_w, CHECKS.sensor_w))
        missing_j += max(mean_w - by_counter_w - tolerance_w, 0.0) * length_s
        surplus_j += max(by_counter_w - mean_w - tolerance_w, 0.0) * length_s
    if not tolerances:
        return None
    is_complete = len(tolerances) == count
    is_sharp = float(np.median(tolerances)) < 2.0 * CHECKS.sensor_share
    return _Contradiction(max(missing_j, surplus_j), is_complete and is_sharp)


def _choose_source(
    is_counter_wrong: bool,
    readings: PowerReadings,
    ticks: CounterTicks,
    window_s: tuple[float, float],
) -> BelievedSource:
    """Say which source is believed where they contradict one another."""
    mean_w = []
    is_stale = False
    for kind in (readings.average, readings.instant):
        watts = kind.between(*window_s).values
        if len(watts):
            mean_w.append(float(watts.mean()))
            is_constant = float(np.ptp(watts)) == 0.0
            is_stale = is_stale or (len(watts) >= CHECKS.least_readings and is_constant)
    if not mean_w:
        return BelievedSource.NEITHER
    if is_counter_wrong:
        return BelievedSource.READINGS
    if is_stale and _has_changed(ticks.between(*window_s).interval_w):
        # Either a reading repeats itself, or the card was steady and its counter jumped.
        return BelievedSource.NEITHER
    if len(mean_w) < 2:
        return BelievedSource.NEITHER
    agree = abs(mean_w[0] - mean_w[1]) <= CHECKS.agreement * max(*mean_w, CHECKS.sensor_w)
    return BelievedSource.READINGS if agree else BelievedSource.NEITHER


def _has_changed(step_w: Array) -> bool:
    """Tell whether power by the counter changed by more than a sensor is off."""
    if len(step_w) < 2:
        return False
    return float(np.ptp(step_w)) > 2.0 * CHECKS.sensor_share * abs(float(step_w.mean()))


def _describe_doubt(
    counter_j: float,
    readings_j: float | None,
    reason: str,
    believed: BelievedSource,
) -> str:
    doubt = f"the energy counter says {show(counter_j, 'J')}"
    if readings_j is not None and readings_j > 0.0:
        deviation = 100.0 * (counter_j / readings_j - 1.0)
        doubt += f", {deviation:+.0f} % against the {show(readings_j, 'J')} of power readings"
    if reason:
        doubt += f" ({reason})"
    if believed is BelievedSource.READINGS:
        return f"{doubt}; the readings are believed"
    if believed is BelievedSource.NEITHER:
        return f"{doubt}; neither can be relied on: measure again, or with a meter"
    return doubt
