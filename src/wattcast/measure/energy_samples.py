"""Hold power samples in a ring shared between two processes, and find energy steps in them.

One process writes the memory-mapped ring, any number read it. A row is complete before the head
moves past it, so a reader never sees half of one; a reader that is overtaken drops the rows it
lost. The clock is ``time.monotonic``, which all processes of one machine share."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import read_arrays
from wattcast.core.errors import BadInput, CannotWrite, clip_text
from wattcast.core.regular_files import open_regular
from wattcast.core.whole_files import write_whole

COLUMNS = (
    *("time_s", "energy_j", "sm_clock_hz", "memory_clock_hz", "instant_w", "average_w", "memory_w"),
    *("temperature_c", "throttle"),
)
Array = npt.NDArray[np.float64]
_MAGIC = 0x57415454
HEADER = 16  # int64 words
_MOST_BYTE = 2**28  # of a recording: a device that is read as one has no end
MAGIC, CAPACITY, HEAD, STATUS, STOP, ERRORS, PROCESSOR_NS, QUICK = range(8)
STARTING, SAMPLING, LOST, STOPPED = range(4)


class SampleRing:
    """The mapped file. ``create`` makes one, ``attach`` opens what another process made."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self.header = np.asarray(np.memmap(path, np.int64, "r+", shape=(HEADER,)))
        self._rows = np.asarray(
            np.memmap(path, np.float64, "r+", HEADER * 8, (capacity, len(COLUMNS)))
        )

    @classmethod
    def create(cls, path: Path, capacity: int = 2**19) -> SampleRing:
        """Create a ring of ``capacity`` rows."""
        size = HEADER * 8 + capacity * len(COLUMNS) * 8
        try:
            with path.open("wb") as stream:
                stream.truncate(size)
                if hasattr(
                    os, "posix_fallocate"
                ):  # a page that a full disk has no room for would end the process
                    os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            raise CannotWrite(path, error) from error
        ring = cls(path, capacity)
        ring.header[[MAGIC, CAPACITY]] = _MAGIC, capacity
        return ring

    @classmethod
    def attach(cls, path: Path) -> SampleRing:
        """Open the ring that another process created at ``path``."""
        words = np.fromfile(path, np.int64, 2)
        if len(words) < 2 or words[0] != _MAGIC:
            raise BadInput(f"{path.name}: not a ring of samples.")
        return cls(path, int(words[1]))

    def write(self, row: Sequence[float]) -> None:
        """Append one row; the head moves last."""
        head = int(self.header[HEAD])
        self._rows[head % self.capacity] = row
        self.header[HEAD] = head + 1

    def read(self, since: int = 0) -> Array:
        """Return the rows from number ``since`` on that are still held."""
        head = int(self.header[HEAD])
        first = max(since, head - self.capacity + 64, 0)
        index = np.arange(first, head) % self.capacity
        rows = self._rows[index]
        overtaken = max(int(self.header[HEAD]) - self.capacity - first, 0)
        return rows[overtaken:]


# NVML's clock event reasons (nvml.h); those marked benign do not spoil a measurement.
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
BENIGN = frozenset({"gpu_idle", "sw_power_cap"})
SLACK_S = 0.5  # by which a counter may be read later than it changed
MIN_STEPS = 6  # of a counter, before it may be called regular


@dataclass(frozen=True)
class EnergySamples:
    """What the sampler saw: one array per column of ``COLUMNS``."""

    rows: Array  # (sample, column)

    def __getitem__(self, column: str) -> Array:
        return self.rows[:, COLUMNS.index(column)]

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, start_s: float, end_s: float) -> EnergySamples:
        """Return the samples taken in the closed interval."""
        time_s = self["time_s"]
        return EnergySamples(self.rows[(time_s >= start_s) & (time_s <= end_s)])

    def known(self, column: str) -> Array:
        """Return the values of a column where it was read."""
        values = self[column]
        return values[np.isfinite(values)]

    def mean(self, column: str) -> float | None:
        """Return the mean of a column, None where it was never read."""
        values = self.known(column)
        return float(values.mean()) if len(values) else None

    def last(self, column: str) -> float | None:
        """Return the latest value of a column, None where it was never read."""
        values = self.known(column)
        return float(values[-1]) if len(values) else None

    @property
    def throttle(self) -> tuple[str, ...]:
        """Names of all clock event reasons seen."""
        return name_throttle_reasons(
            int(np.bitwise_or.reduce(self.known("throttle").astype(np.int64)))
        )

    def save(self, path: Path) -> None:
        """Keep the samples for a later replay, as a compressed NumPy file; whole or not at all."""
        write_whole(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the samples as a compressed NumPy file."""
        packed = io.BytesIO()
        np.savez_compressed(packed, columns=np.array(COLUMNS), rows=self.rows)
        return packed.getvalue()

    @classmethod
    def load(cls, path: Path) -> EnergySamples:
        """Read the samples that ``save`` kept."""
        try:
            with open_regular(path) as stream:
                kept = read_arrays(stream.read(_MOST_BYTE), path.name)
            order = [list(kept["columns"]).index(name) for name in COLUMNS]
            return cls(np.asarray(kept["rows"][:, order], dtype=np.float64))
        except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
            raise BadInput(
                f"{path.name}: not a recording of `measure run --save` ({clip_text(error)})."
            ) from None


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

    def between(self, start_s: float, end_s: float) -> CounterTicks:
        """Return the steps inside the closed interval."""
        return self._part((self.time_s >= start_s) & (self.time_s <= end_s))

    def last(self, stretches: int) -> CounterTicks:
        """Return the latest stretches between steps that were seen."""
        return self._part(slice(-stretches - 1, None))

    def _part(self, which: slice | npt.NDArray[np.bool_]) -> CounterTicks:
        late_s = None if self.late_s is None else self.late_s[which]
        return CounterTicks(self.time_s[which], self.energy_j[which], self.step_s, late_s)

    @property
    def power_doubt(self) -> float:
        """Share of ``power_w`` that late polls at the first and the last step may have cost."""
        if self.late_s is None or len(self.time_s) < 2:
            return 0.0
        return float((self.late_s[0] + self.late_s[-1]) / (self.time_s[-1] - self.time_s[0]))

    @property
    def intervals(self) -> int:
        """Whole periods of the counter between the first step and the last."""
        if len(self.time_s) < 2:
            return 0
        length_s = float(self.time_s[-1] - self.time_s[0])
        return round(length_s / self.step_s) if self.step_s else len(self.time_s) - 1

    @property
    def interval_w(self) -> Array:
        """Mean power of each stretch between two steps that were seen."""
        return np.diff(self.energy_j) / np.diff(self.time_s)

    @property
    def power_w(self) -> float:
        """Energy between the first and the last step over the time between them."""
        return float((self.energy_j[-1] - self.energy_j[0]) / (self.time_s[-1] - self.time_s[0]))

    @property
    def spread_w(self) -> float:
        """Standard deviation of ``interval_w``."""
        return float(self.interval_w.std(ddof=1)) if len(self.time_s) > 2 else float("nan")


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
    def late_s(self) -> Array:
        """By how much that guess may be off because the poller was stalled: half of a gap beyond
        the usual.
        """
        gap_s = self.after_s - self.before_s
        return 0.5 * np.maximum(gap_s - np.median(gap_s), 0.0) if len(gap_s) else gap_s


def find_sightings(samples: EnergySamples) -> TickSightings:
    """Find every change of the energy counter, as polling met it."""
    read = np.isfinite(samples["energy_j"])
    time_s = samples["time_s"][read]
    energy_j = samples["energy_j"][read]
    step = np.flatnonzero(np.diff(energy_j) != 0.0)
    return TickSightings(time_s[step], time_s[step + 1], energy_j[step + 1])


def find_ticks(samples: EnergySamples) -> CounterTicks:
    """Find the steps of the energy counter.

    Polls see a step some milliseconds late. Where the counter steps regularly, steps are put on the
    regular grid that the sharpest sightings lie on, and a poll between steps belongs to the step
    before it. Otherwise a step lies midway between the polls around it."""
    seen = find_sightings(samples)
    sharp_s = seen.middle_s[_find_sharp_sightings(seen)]
    if len(sharp_s) >= MIN_STEPS:
        apart_s = np.sort(np.diff(sharp_s))
        usual_s = float(
            np.median(apart_s[apart_s <= 1.5 * apart_s[2]])
        )  # most may be several steps apart
        for part in (1, 2, 3, 4, 5):
            if (found := _on_grid(seen, usual_s / part)) is not None:
                return found
    return CounterTicks(seen.middle_s, seen.energy_j, late_s=seen.late_s)


def _on_grid(seen: TickSightings, guess_s: float) -> CounterTicks | None:
    """Return the steps of a counter with a period near ``guess_s``; None when the sightings do not
    fit one.
    """
    sharp = _find_sharp_sightings(seen)
    sharp_s = seen.middle_s[sharp]
    gap_s = (seen.after_s - seen.before_s)[sharp]
    if guess_s < 4.0 * float(np.median(gap_s)):
        return None
    number = _step_numbers(sharp_s, guess_s)
    step_s, origin_s = (float(value) for value in np.polyfit(number, sharp_s, 1))
    if float(np.median(np.abs(sharp_s - (origin_s + step_s * number)))) > 0.05 * step_s:
        return None
    late = np.floor((seen.after_s - origin_s) / step_s + 0.02)
    every = np.where(sharp, np.round((seen.middle_s - origin_s) / step_s), late)
    if (np.diff(every) < 1.0).any():  # two steps in one period: the period is shorter
        return None
    return CounterTicks(origin_s + step_s * every, seen.energy_j, step_s)


def _find_sharp_sightings(seen: TickSightings) -> npt.NDArray[np.bool_]:
    """Tell which sightings lie between two polls that are close together, for the poller and for
    the counter.
    """
    gap_s = seen.after_s - seen.before_s
    if len(gap_s) < 2:
        return np.ones(len(gap_s), dtype=bool)
    closest_s = float(np.percentile(np.diff(seen.middle_s), 5.0))
    return gap_s <= max(3.0 * float(np.percentile(gap_s, 4.0)), 0.1 * closest_s)


def _step_numbers(seen_s: Array, step_s: float) -> Array:
    """Number the step of each sighting, following the phase slowly, so that one late poll does not
    shift the rest.

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
        phase_s += 0.2 * (float(at_s) - phase_s)
        numbers.append(number)
        if number >= MIN_STEPS:
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

    def __init__(self, range_j: float | None, most_w: float = np.inf) -> None:
        self._range_j = range_j or np.inf
        self._most_w = most_w
        self._previous_j = 0.0
        self._previous_s = np.nan
        self._offset_j = 0.0

    def follow(self, now_j: float, at_s: float = np.nan) -> float:
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

    def _is_wrap(self, now_j: float, at_s: float) -> bool:
        passed_s = at_s - self._previous_s
        if np.isfinite(passed_s) and np.isfinite(self._most_w):
            risen_j = self._range_j - self._previous_j + now_j
            return now_j < self._previous_j and risen_j <= self._most_w * (passed_s + SLACK_S)
        return self._previous_j > 0.9 * self._range_j and now_j < 0.1 * self._range_j


def name_throttle_reasons(bits: int) -> tuple[str, ...]:
    """Name the clock event reasons set in ``bits``.

    >>> name_throttle_reasons(0x24)
    ('sw_power_cap', 'sw_thermal_slowdown')
    """
    unknown = bits & ~sum(REASONS)
    names = [name for bit, name in REASONS.items() if bits & bit]
    return (*names, *([f"unknown_{unknown:#x}"] if unknown else []))
