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

from wattcast.core.units import show
from wattcast.measure.counter_ticks import CounterTicks
from wattcast.measure.energy_samples import COLUMNS, Array, EnergySamples

AVERAGE_S = 1.0  # that NVML_FI_DEV_POWER_AVERAGE looks back (an H200: docs/method/measuring.md)
SENSOR_SHARE = (
    0.02  # counter and average of an H200 agree within 0.4 % in steady load (tests/measure/data)
)
SENSOR_W = 3.0  # by which they may differ on an idle card
DOUBTFUL_SHARE = 0.025  # of the energy that may be contradicted: with SENSOR_SHARE below 5 % in all
ABOVE_LIMIT = 1.25  # an H200 averages 5 % above its limit for a second, and other boards more
PEAK_ABOVE_LIMIT = 3.0  # over one step of the counter
MOST_W = 5000.0  # where a card tells no limit
STILL_STEPS = 1.6  # a counter that keeps its value for longer stands still
STILL_S = 0.3  # the same where its steps are not regular
APART = (
    1.5  # a counter's mean over seconds and readings at both ends differ by less in a steady load
)
LEAST_READINGS = 3
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
        return SourceCheck(BelievedSource.NEITHER, doubts=("the machine's clock was set back",))
    average = read_column(samples, "average_w")
    instant = read_column(samples, "instant_w")
    readings_j = integrate_readings(instant, average, window_s)
    if counter_j is None or ticks.intervals < 2:
        return SourceCheck(readings_j=readings_j)
    faults = _find_counter_faults(samples, ticks, window_s, limit_w or MOST_W)
    by_average = _compare_averages(average, ticks, instant, window_s, counter_j)
    by_instant = _compare_instants(instant, ticks, window_s)

    # Averages miss nothing between two readings: they decide, unless instants confirm the counter.
    allowed_j = DOUBTFUL_SHARE * abs(counter_j)
    is_averaged = by_average is not None
    averages_differ = by_average is not None and by_average.energy_j > allowed_j
    instants_differ = by_instant is not None and by_instant.energy_j > allowed_j
    instants_agree = by_instant is not None and by_instant.is_decisive and not instants_differ
    contradicted = instants_differ if not is_averaged else averages_differ and not instants_agree
    is_unjudged = by_average is None and by_instant is None
    if not (faults.above_limit or contradicted or (faults.stillness and is_unjudged)):
        told = ("average power readings contradict the counter and the instant readings",)
        return SourceCheck(readings_j=readings_j, flags=told if averages_differ else ())
    reason = faults.above_limit or faults.stillness
    believed = BelievedSource.NEITHER
    if readings_j is not None:
        believed = _choose_source(bool(reason), average, instant, ticks, window_s)
    doubt = _describe_doubt(counter_j, readings_j, reason, believed)
    return SourceCheck(believed, readings_j, (doubt,))


def is_plausible_power(mean_w: float, ends_w: Sequence[float], most_w: float) -> bool:
    """Tell whether a counter's mean power can be true, given readings at both ends of its time.

    A counter that stood still, fell, or rose above ``most_w`` cannot. Nor can one that is far from
    readings of a load that is steady enough for them to count; NaN readings do not.

    >>> is_plausible_power(300.0, (290.0, 310.0), 700.0)
    True
    >>> is_plausible_power(600.0, (290.0, 310.0), 700.0), is_plausible_power(0.0, (), 700.0)
    (False, False)
    """
    if not 0.0 < mean_w <= ABOVE_LIMIT * most_w:
        return False
    readings_w = [watts for watts in ends_w if 0.0 < watts <= PEAK_ABOVE_LIMIT * most_w]
    if not readings_w:
        return True
    return min(readings_w) / APART <= mean_w <= APART * max(readings_w)


@dataclass(frozen=True)
class Readings:
    """Watts at the moments they were read, without those that no card can have drawn."""

    time_s: Array
    watts: Array

    def between(self, start_s: float, end_s: float) -> Readings:
        """Return the readings in the closed interval."""
        inside = (self.time_s >= start_s) & (self.time_s <= end_s)
        return Readings(self.time_s[inside], self.watts[inside])

    def __len__(self) -> int:
        return len(self.time_s)


def read_column(samples: EnergySamples, column: str) -> Readings:
    """Return the readings of a column, where it was read."""
    is_read = np.isfinite(samples[column])
    return Readings(samples["time_s"][is_read], samples[column][is_read])


def drop_impossible(
    samples: EnergySamples, most_w: float, window_s: tuple[float, float]
) -> tuple[EnergySamples, tuple[str, ...]]:
    """Return samples without power readings that no card can have drawn, and a flag for these."""
    rows = samples.rows.copy()
    inside = (rows[:, 0] >= window_s[0]) & (rows[:, 0] <= window_s[1])
    dropped_w: list[float] = []
    for column in POWER_COLUMNS:
        watts = rows[:, COLUMNS.index(column)]
        is_wrong = np.isfinite(watts) & ((watts < 0.0) | (watts > PEAK_ABOVE_LIMIT * most_w))
        dropped_w += watts[is_wrong & inside].tolist()
        watts[is_wrong] = np.nan
    if not dropped_w:
        return EnergySamples(rows), ()
    told = f"{len(dropped_w)} impossible power readings left out, such as {dropped_w[0]:.6g} W"
    return EnergySamples(rows), (told,)


def integrate_readings(
    instant: Readings, average: Readings, window_s: tuple[float, float]
) -> float | None:
    """Return the joules of a window by its power readings; None where there are too few."""
    start_s, end_s = window_s
    for readings, back_s in ((instant, 0.0), (average, 0.5 * AVERAGE_S)):
        near = readings.between(start_s, end_s + back_s)
        if len(near) < LEAST_READINGS:
            continue
        middle_s = np.clip(near.time_s - back_s, start_s, end_s)  # of what a reading is the mean of
        edges_s = np.concatenate([[start_s], middle_s, [end_s]])
        watts = np.concatenate([near.watts[:1], near.watts, near.watts[-1:]])
        return float(np.sum(0.5 * (watts[1:] + watts[:-1]) * np.diff(edges_s)))
    return None


@dataclass(frozen=True)
class _CounterFaults:
    """What is wrong with a counter by itself; empty where nothing is."""

    above_limit: str = ""
    stillness: str = ""


def _find_counter_faults(
    samples: EnergySamples, ticks: CounterTicks, window_s: tuple[float, float], most_w: float
) -> _CounterFaults:
    """Look for a counter that says more than the card may draw, or that keeps its value."""
    start_s, end_s = window_s
    near = ticks.between(start_s - AVERAGE_S, end_s + AVERAGE_S)
    above_limit = ""
    if near.intervals:
        step_s = np.diff(near.time_s)
        step_w = near.interval_w
        mean_s = near.time_s[near.time_s >= near.time_s[0] + AVERAGE_S]
        mean_w = (_interpolate(near, mean_s) - _interpolate(near, mean_s - AVERAGE_S)) / AVERAGE_S
        largest_w = float(max(step_w.max(), mean_w.max(initial=0.0)))
        sustained_w = np.concatenate([mean_w, step_w[step_s >= AVERAGE_S]])
        is_peak_above = float(step_w.max()) > PEAK_ABOVE_LIMIT * most_w
        is_mean_above = float(sustained_w.max(initial=0.0)) > ABOVE_LIMIT * most_w
        if is_peak_above or is_mean_above:
            rise = f"the counter rose by {show(largest_w, 'W')}"
            above_limit = f"{rise}, above the limit of {show(most_w, 'W')}"
    still_s = _longest_stillness_s(samples.between(start_s, end_s))
    allowed_s = STILL_STEPS * ticks.step_s + 0.02 if ticks.step_s else STILL_S
    stillness = f"the counter stood still for {still_s:.1f} s" if still_s > allowed_s else ""
    return _CounterFaults(above_limit, stillness)


def _longest_stillness_s(samples: EnergySamples) -> float:
    """Return the longest time between two readings of the counter with one value between them."""
    is_read = np.isfinite(samples["energy_j"])
    time_s = samples["time_s"][is_read]
    energy_j = samples["energy_j"][is_read]
    if len(time_s) < 2:
        return 0.0
    changes = np.flatnonzero(np.diff(energy_j) != 0.0)
    firsts = np.concatenate([[0], changes + 1])
    lasts = np.concatenate([changes, [len(time_s) - 1]])
    return float((time_s[lasts] - time_s[firsts]).max())


def _interpolate(ticks: CounterTicks, time_s: Array) -> Array:
    return np.interp(time_s, ticks.time_s, ticks.energy_j)


def _compare_averages(
    average: Readings,
    ticks: CounterTicks,
    instant: Readings,
    window_s: tuple[float, float],
    counter_j: float,
) -> _Contradiction | None:
    """Compare readings that are means over a second with the counter over the same second."""
    start_s, end_s = window_s
    update_s = ticks.step_s or float(np.median(np.diff(ticks.time_s)))
    lag_s = update_s + 0.03
    last_s = float(ticks.time_s[-1])
    near = average.between(max(start_s, float(ticks.time_s[0]) + AVERAGE_S + lag_s), last_s + lag_s)
    if len(near) < LEAST_READINGS:
        return None
    shifts_s = np.linspace(-lag_s, 0.01, SHIFTS)
    updated_s = np.minimum(near.time_s[:, None] + shifts_s, last_s)
    counted_j = _interpolate(ticks, updated_s) - _interpolate(ticks, updated_s - AVERAGE_S)
    counted_w = counted_j / AVERAGE_S
    open_w = _find_open_joules(ticks, instant, updated_s) / AVERAGE_S
    tolerance_w = SENSOR_SHARE * near.watts + SENSOR_W
    low_w = (counted_w - open_w).min(axis=1) - tolerance_w
    high_w = (counted_w + open_w).max(axis=1) + tolerance_w
    beyond_w = near.watts - np.clip(near.watts, low_w, high_w)
    # Each reading stands for the time until the next; one alone may catch the whole of a fault.
    for_s = np.minimum(np.diff(near.time_s, append=near.time_s[-1]), AVERAGE_S)
    missing_j = float((np.maximum(beyond_w, 0.0) * for_s).sum())
    surplus_j = float((np.maximum(-beyond_w, 0.0) * for_s).sum())
    local_j = max(missing_j, surplus_j, float(np.abs(beyond_w).max()) * AVERAGE_S)
    # a rate that is off by little hides in these tolerances, and shows in the mean
    inside = near.time_s <= end_s
    if inside.sum() < LEAST_READINGS or end_s - start_s < 3.0 * AVERAGE_S:
        return _Contradiction(local_j)
    counted_mean_w = float(counted_w[inside].mean())
    ratio = float(near.watts[inside].mean()) / max(counted_mean_w, 1e-9)
    edges = 2.0 * float(open_w.max()) * AVERAGE_S / max(abs(counter_j), 1e-9)
    overall = max(abs(ratio - 1.0) - SENSOR_SHARE - edges, 0.0)
    return _Contradiction(max(local_j, overall * abs(counter_j)))


def _find_open_joules(ticks: CounterTicks, instant: Readings, moments_s: Array) -> Array:
    """Return by how much the counter may differ from a line between two steps that lie far apart.

    Power may have been anything between the lowest and the highest around while nobody read the
    counter.
    """
    usual_s = ticks.step_s or 0.0
    place = np.clip(np.searchsorted(ticks.time_s, moments_s) - 1, 0, len(ticks.time_s) - 2)
    gap_s = np.diff(ticks.time_s)[place]
    to_edge_s = np.minimum(moments_s - ticks.time_s[place], ticks.time_s[place + 1] - moments_s)
    is_wide = gap_s > 1.5 * usual_s
    near = instant.between(float(moments_s.min()) - AVERAGE_S, float(moments_s.max()))
    span_w = float(np.ptp(near.watts)) if len(near) > 1 else 0.0
    return np.where(is_wide, 0.5 * np.maximum(to_edge_s, 0.0) * span_w, 0.0)


def _compare_instants(
    instant: Readings, ticks: CounterTicks, window_s: tuple[float, float]
) -> _Contradiction | None:
    """Compare the mean of instant readings with the counter, second by second."""
    start_s, end_s = window_s
    first_s = max(start_s, float(ticks.time_s[0]))
    last_s = min(float(ticks.time_s[-1]), end_s + AVERAGE_S)
    if last_s - first_s < 0.5 * AVERAGE_S:
        return None
    count = max(round((last_s - first_s) / AVERAGE_S), 1)
    edges_s = np.linspace(first_s, last_s, count + 1)
    length_s = (last_s - first_s) / count
    counted_w = np.diff(_interpolate(ticks, edges_s)) / length_s
    missing_j = surplus_j = 0.0
    tolerances = []
    for begin_s, stop_s, by_counter_w in zip(edges_s[:-1], edges_s[1:], counted_w, strict=True):
        watts = instant.between(begin_s, stop_s).watts
        if len(watts) < LEAST_READINGS:
            continue
        mean_w = float(watts.mean())
        sampling_w = 3.0 * float(watts.std(ddof=1)) / np.sqrt(len(watts))
        tolerance_w = SENSOR_SHARE * mean_w + SENSOR_W + sampling_w
        tolerances.append(tolerance_w / max(mean_w, SENSOR_W))
        missing_j += max(mean_w - by_counter_w - tolerance_w, 0.0) * length_s
        surplus_j += max(by_counter_w - mean_w - tolerance_w, 0.0) * length_s
    if not tolerances:
        return None
    is_decisive = len(tolerances) == count and float(np.median(tolerances)) < 2.0 * SENSOR_SHARE
    return _Contradiction(max(missing_j, surplus_j), is_decisive)


def _choose_source(
    is_counter_wrong: bool,
    average: Readings,
    instant: Readings,
    ticks: CounterTicks,
    window_s: tuple[float, float],
) -> BelievedSource:
    """Say which source is believed where they contradict one another."""
    inside = ticks.between(*window_s)
    mean_w = [
        float(r.between(*window_s).watts.mean())
        for r in (average, instant)
        if len(r.between(*window_s))
    ]
    if not mean_w:
        return BelievedSource.NEITHER
    is_stale = any(
        len(r.between(*window_s)) >= LEAST_READINGS and np.ptp(r.between(*window_s).watts) == 0.0
        for r in (average, instant)
    )
    power_w = inside.interval_w
    has_changed = len(power_w) > 1 and float(np.ptp(power_w)) > 2.0 * SENSOR_SHARE * abs(
        float(power_w.mean())
    )
    if is_counter_wrong:
        return BelievedSource.READINGS
    if is_stale and has_changed:
        return (
            BelievedSource.NEITHER
        )  # a reading that repeats itself, or a steady card whose counter jumped
    agree = len(mean_w) == 2 and abs(mean_w[0] - mean_w[1]) <= 0.1 * max(*mean_w, SENSOR_W)
    return BelievedSource.READINGS if agree else BelievedSource.NEITHER


def _describe_doubt(
    counter_j: float, readings_j: float | None, reason: str, believed: BelievedSource
) -> str:
    said = f"the energy counter says {show(counter_j, 'J')}"
    if readings_j is not None and readings_j > 0.0:
        off = 100.0 * (counter_j / readings_j - 1.0)
        said += f", {off:+.0f} % against the {show(readings_j, 'J')} of power readings"
    if reason:
        said += f" ({reason})"
    if believed is BelievedSource.READINGS:
        return f"{said}; the readings are believed"
    if believed is BelievedSource.NEITHER:
        return f"{said}; neither can be relied on: measure again, or with a meter"
    return said
