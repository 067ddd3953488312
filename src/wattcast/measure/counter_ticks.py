"""Find the moments at which an energy counter stepped, and follow a counter beyond its range.

Power is the energy between two steps over the time between them, so it is as exact as the times of
the steps. Polls see a step some milliseconds late; a counter that steps regularly gives its steps
away more exactly than any single poll.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.measure.energy_samples import Array, EnergySamples


class CounterStepCoefficients(Coefficients):
    """How the steps of an energy counter are found among polls."""

    slack_s: float  # by which a counter may be read later than it changed
    min_steps: int  # of a counter, before it may be called regular
    grid_miss: float  # share of a period that sightings of a regular counter may miss the grid by
    polls_a_period: float  # polls must lie closer than this fraction of a period to show it
    late_step: float  # share of a period by which a poll may precede the step that it belongs to
    phase_gain: float  # share of a sighting's deviation that the phase of a counter follows
    # a sighting is sharp when its polls lie within this many of the shortest gaps between polls
    sharp_gaps: float
    sharp_share: float  # or within this share of the time between two sightings
    # without a power limit, a counter wraps when it falls from above this share of its range
    near_top: float


COUNTER = load_coefficients("counter_steps", CounterStepCoefficients)


MOST_PARTS = 5  # shortest regular period that is tried: this fraction of the usual time apart


@dataclass(frozen=True)
class CounterTicks:
    """Times at which the energy counter stepped, and its value after each step.

    Slow polling sees only some of the steps; ``step_s`` is the counter's own period where it is
    regular. ``late_s`` is by how much a stalled poller may have misplaced each step; None where it
    could not."""

    time_s: Array
    energy_j: Array
    step_s: float | None = None
    late_s: Array | None = None

    def between(
        self,
        start_s: float,
        end_s: float,
    ) -> CounterTicks:
        """Return the steps inside the closed interval."""
        return self._part((self.time_s >= start_s) & (self.time_s <= end_s))

    def last(self, stretches: int) -> CounterTicks:
        """Return the latest stretches between steps that were seen."""
        return self._part(slice(-stretches - 1, None))

    def _part(self, which: slice | npt.NDArray[np.bool_]) -> CounterTicks:
        late_s = None if self.late_s is None else self.late_s[which]
        return CounterTicks(self.time_s[which], self.energy_j[which], self.step_s, late_s)

    @property
    def length_s(self) -> float:
        """Seconds from the first step to the last; there are two or more."""
        return float(self.time_s[-1] - self.time_s[0])

    @property
    def power_doubt(self) -> float:
        """Share of ``power_w`` that late polls at the first and the last step may have cost."""
        if self.late_s is None or len(self.time_s) < 2:
            return 0.0
        return float(self.late_s[0] + self.late_s[-1]) / self.length_s

    @property
    def intervals(self) -> int:
        """Whole periods of the counter between the first step and the last."""
        if len(self.time_s) < 2:
            return 0
        if self.step_s:
            return round(self.length_s / self.step_s)
        return len(self.time_s) - 1

    @property
    def interval_w(self) -> Array:
        """Mean power of each stretch between two steps that were seen."""
        return np.diff(self.energy_j) / np.diff(self.time_s)

    @property
    def power_w(self) -> float:
        """Energy between the first and the last step over the time between them."""
        return float(self.energy_j[-1] - self.energy_j[0]) / self.length_s

    @property
    def spread_w(self) -> float:
        """Standard deviation of ``interval_w``."""
        if len(self.time_s) < 3:
            return float("nan")
        return float(self.interval_w.std(ddof=1))


@dataclass(frozen=True)
class TickSightings:
    """Polls that met a new value of the counter."""

    before_s: Array  # the poll before, which still met the old value
    after_s: Array  # the poll that met the new one
    energy_j: Array

    @property
    def middle_s(self) -> Array:
        """The best guess at the step when nothing is known of the counter."""
        return 0.5 * (self.before_s + self.after_s)

    @property
    def gap_s(self) -> Array:
        """Time between the polls around each step."""
        return self.after_s - self.before_s

    @property
    def late_s(self) -> Array:
        """By how much the middle may be off because the poller was stalled: half of a gap beyond
        the usual.
        """
        gap_s = self.gap_s
        if not len(gap_s):
            return gap_s
        return 0.5 * np.maximum(gap_s - np.median(gap_s), 0.0)


def find_sightings(samples: EnergySamples) -> TickSightings:
    """Find every change of the energy counter, as polling met it."""
    counter = samples.read_column("energy_j")
    before = np.flatnonzero(np.diff(counter.values) != 0.0)
    after = before + 1
    return TickSightings(counter.time_s[before], counter.time_s[after], counter.values[after])


def find_ticks(samples: EnergySamples) -> CounterTicks:
    """Find the steps of the energy counter.

    Polls see a step some milliseconds late. Where the counter steps regularly, steps are put on the
    regular grid that the sharpest sightings lie on, and a poll between steps belongs to the step
    before it. Otherwise a step lies midway between the polls around it."""
    sightings = find_sightings(samples)
    sharp_s = sightings.middle_s[_find_sharp_sightings(sightings)]
    if len(sharp_s) >= COUNTER.min_steps:
        # Most sightings may be several steps apart, so parts of the usual time are tried too.
        apart_s = np.sort(np.diff(sharp_s))
        is_one_step = np.round(apart_s / apart_s[2]) <= 1.0
        usual_s = float(np.median(apart_s[is_one_step]))
        for part in range(1, MOST_PARTS + 1):
            ticks = _place_on_grid(sightings, usual_s / part)
            if ticks is not None:
                return ticks
    return CounterTicks(sightings.middle_s, sightings.energy_j, late_s=sightings.late_s)


def _place_on_grid(sightings: TickSightings, guess_s: float) -> CounterTicks | None:
    """Return the steps of a counter with a period near ``guess_s``; None when the sightings do not
    fit one.
    """
    is_sharp = _find_sharp_sightings(sightings)
    middle_s = sightings.middle_s
    sharp_s = middle_s[is_sharp]
    if guess_s < COUNTER.polls_a_period * float(np.median(sightings.gap_s[is_sharp])):
        return None

    # The grid is the line through the sharp sightings, over the numbers of their steps.
    number = _number_steps(sharp_s, guess_s)
    slope, intercept = np.polyfit(number, sharp_s, 1)
    step_s = float(slope)
    origin_s = float(intercept)
    miss_s = np.abs(sharp_s - (origin_s + step_s * number))
    if float(np.median(miss_s)) > COUNTER.grid_miss * step_s:
        return None

    nearest = np.round((middle_s - origin_s) / step_s)
    step_before = np.floor((sightings.after_s - origin_s) / step_s + COUNTER.late_step)
    every_number = np.where(is_sharp, nearest, step_before)
    if (np.diff(every_number) < 1.0).any():  # two steps in one period: the period is shorter
        return None
    return CounterTicks(origin_s + step_s * every_number, sightings.energy_j, step_s)


def _find_sharp_sightings(sightings: TickSightings) -> npt.NDArray[np.bool_]:
    """Tell which sightings lie between two polls that are close together, for the poller and for
    the counter.
    """
    gap_s = sightings.gap_s
    if len(gap_s) < 2:
        return np.ones(len(gap_s), dtype=bool)
    shortest_gap_s = float(np.percentile(gap_s, 4.0))
    closest_s = float(np.percentile(np.diff(sightings.middle_s), 5.0))
    return gap_s <= max(COUNTER.sharp_gaps * shortest_gap_s, COUNTER.sharp_share * closest_s)


def _number_steps(seen_s: Array, step_s: float) -> Array:
    """Number the step of each sighting, following the phase slowly, so that one late poll does not
    shift the later ones.

    Sightings may be seconds apart, so the period is learnt on the way: it is known ever better from
    the first sighting to the latest, and a percent of error in the first guess would miscount."""
    number = 0.0
    phase_s = float(seen_s[0])
    numbers = [0.0]
    period_s = step_s
    for at_s in seen_s[1:]:
        passed = max(round((float(at_s) - phase_s) / period_s), 1)
        number += passed
        phase_s += passed * period_s
        phase_s += COUNTER.phase_gain * (float(at_s) - phase_s)
        numbers.append(number)
        if number >= COUNTER.min_steps:
            period_s = (phase_s - float(seen_s[0])) / number
    return np.array(numbers)


class UnwrappedCounter:
    """Follow a counter of joules beyond the range at which it wraps.

    A fall to near zero from near the top is a wrap, if the card could have drawn what lies between
    in the time that passed. Any other fall is a reset, after which energies before and after cannot
    be compared. A counter that was seen above its range has no such range.

    >>> counter = UnwrappedCounter(4294967.296)
    >>> counter.follow(4294967.0), counter.follow(100.0), counter.follow(3.0)
    (4294967.0, 4295067.296, 4294970.296)
    >>> counter = UnwrappedCounter(4294967.296, most_w=1000.0)
    >>> counter.follow(4000000.0, 0.0), counter.follow(3.0, 0.1)  # 43 kW is no wrap
    (4000000.0, 3.0)
    """

    def __init__(
        self,
        range_j: float | None,
        most_w: float = np.inf,
    ) -> None:
        self._range_j = range_j or np.inf
        self._most_w = most_w
        self._previous_j = 0.0
        self._previous_s = np.nan
        self._offset_j = 0.0

    def follow(
        self,
        now_j: float,
        at_s: float = np.nan,
    ) -> float:
        """Return the counter without its wraps; NaN, a reading that failed, is passed over."""
        if not np.isfinite(now_j):
            return now_j
        if now_j > self._range_j:
            self._range_j = np.inf
        if self._is_wrap(now_j, at_s):
            self._offset_j += self._range_j
        self._previous_j = now_j
        self._previous_s = at_s
        return now_j + self._offset_j

    def _is_wrap(
        self,
        now_j: float,
        at_s: float,
    ) -> bool:
        passed_s = at_s - self._previous_s
        if np.isfinite(passed_s) and np.isfinite(self._most_w):
            risen_j = self._range_j - self._previous_j + now_j
            return now_j < self._previous_j and risen_j <= self._most_w * (
                passed_s + COUNTER.slack_s
            )
        was_near_top = self._previous_j > COUNTER.near_top * self._range_j
        return was_near_top and now_j < (1.0 - COUNTER.near_top) * self._range_j
