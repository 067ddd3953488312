"""Samples over time, and power from the ticks of an energy counter.

The counter steps (every 100 ms on an H200), so power is the energy between two steps over the time
between them; anything that ends between steps is left out. DESIGN section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.measure.ring import COLUMNS

Array = npt.NDArray[np.float64]

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
MIN_STEPS = 6  # of a counter, before it may be called regular


@dataclass(frozen=True)
class Samples:
    """What the sampler saw: one array per column of :data:`~wattcast.measure.ring.COLUMNS`."""

    rows: Array  # (sample, column)

    def __getitem__(self, column: str) -> Array:
        return self.rows[:, COLUMNS.index(column)]

    def __len__(self) -> int:
        return len(self.rows)

    def between(self, start_s: float, end_s: float) -> Samples:
        """Samples taken in the closed interval."""
        time_s = self["time_s"]
        return Samples(self.rows[(time_s >= start_s) & (time_s <= end_s)])

    def known(self, column: str) -> Array:
        """Values of a column where it was read."""
        values = self[column]
        return values[np.isfinite(values)]

    def mean(self, column: str) -> float | None:
        """Mean of a column, None where it was never read."""
        values = self.known(column)
        return float(values.mean()) if len(values) else None

    def last(self, column: str) -> float | None:
        """Latest value of a column, None where it was never read."""
        values = self.known(column)
        return float(values[-1]) if len(values) else None

    @property
    def throttle(self) -> tuple[str, ...]:
        """Names of all clock event reasons seen."""
        bits = 0
        for value in self.known("throttle"):
            bits |= int(value)
        return reason_names(bits)

    def save(self, path: Path) -> None:
        """Keep the samples for a later replay, as a compressed NumPy file."""
        np.savez_compressed(path, columns=np.array(COLUMNS), rows=self.rows)

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Samples kept by :meth:`save`."""
        with np.load(path, allow_pickle=False) as kept:
            order = [list(kept["columns"]).index(name) for name in COLUMNS]
            return cls(np.asarray(kept["rows"][:, order], dtype=np.float64))


@dataclass(frozen=True)
class Ticks:
    """Times at which the energy counter stepped, and its value after each step."""

    time_s: Array
    energy_j: Array

    def between(self, start_s: float, end_s: float) -> Ticks:
        """Steps inside the closed interval."""
        inside = (self.time_s >= start_s) & (self.time_s <= end_s)
        return Ticks(self.time_s[inside], self.energy_j[inside])

    def last(self, intervals: int) -> Ticks:
        """The latest stretches between steps."""
        return Ticks(self.time_s[-intervals - 1 :], self.energy_j[-intervals - 1 :])

    @property
    def intervals(self) -> int:
        """Whole stretches between steps."""
        return max(len(self.time_s) - 1, 0)

    @property
    def interval_w(self) -> Array:
        """Mean power of each stretch between two steps."""
        return np.diff(self.energy_j) / np.diff(self.time_s)

    @property
    def power_w(self) -> float:
        """Energy between the first and the last step over the time between them."""
        return float((self.energy_j[-1] - self.energy_j[0]) / (self.time_s[-1] - self.time_s[0]))

    @property
    def spread_w(self) -> float:
        """Standard deviation of :attr:`interval_w`."""
        return float(self.interval_w.std(ddof=1)) if self.intervals > 1 else float("nan")


def ticks(samples: Samples) -> Ticks:
    """Steps of the energy counter: each lies midway between the polls before and after it.

    Polls see a step some milliseconds late. Where the counter steps regularly, its steps are put on the
    regular grid they were seen around. A counter that runs backwards was reset (driver reload) or
    wrapped; see :func:`unwrap`.
    """
    read = np.isfinite(samples["energy_j"])
    time_s, energy_j = samples["time_s"][read], samples["energy_j"][read]
    step = np.flatnonzero(np.diff(energy_j) != 0.0)
    seen_s = 0.5 * (time_s[step] + time_s[step + 1])
    poll_s = float(np.median(np.diff(time_s))) if len(time_s) > 1 else 0.0
    return Ticks(_on_grid_s(seen_s, time_s[step + 1] - time_s[step], poll_s), energy_j[step + 1])


def _on_grid_s(seen_s: Array, gap_s: Array, poll_s: float) -> Array:
    """Times of regular steps without the jitter of polling; as seen when irregular, few, or polled too rarely.

    ``gap_s`` lies between the polls around each sighting: a stall says little about when the step was.
    """
    if len(seen_s) < MIN_STEPS:
        return seen_s
    step_s = float(np.median(np.diff(seen_s)))
    if step_s < 4.0 * poll_s:
        return seen_s
    number = _step_numbers(seen_s, step_s)
    sharp = gap_s <= max(4.0 * poll_s, 0.05 * step_s)
    if sharp.sum() < MIN_STEPS:
        return seen_s
    slope_s, origin_s = np.polyfit(number[sharp], seen_s[sharp], 1)
    grid_s = origin_s + slope_s * number
    return grid_s if float(np.median(np.abs(seen_s - grid_s))) < 0.05 * step_s else seen_s


def _step_numbers(seen_s: Array, step_s: float) -> Array:
    """Which step each sighting is, following the phase slowly, so that one late poll does not shift the rest."""
    number, phase_s, numbers = 0.0, float(seen_s[0]), [0.0]
    for at_s in seen_s[1:]:
        passed = max(round((float(at_s) - phase_s) / step_s), 1)
        number += passed
        phase_s += passed * step_s
        phase_s += 0.2 * (float(at_s) - phase_s)
        numbers.append(number)
    return np.array(numbers)


def unwrap(previous_j: float, now_j: float, offset_j: float, range_j: float | None) -> tuple[float, bool]:
    """Offset to add to a counter that wraps at ``range_j``, and whether it was reset instead.

    A fall to near zero from near the top is a wrap; any other fall is a reset, after which energies
    before and after cannot be compared.

    >>> unwrap(4294967.0, 100.0, 0.0, 4294967.296)
    (4294967.296, False)
    >>> unwrap(5000.0, 3.0, 0.0, 4294967.296)
    (0.0, True)
    """
    if now_j >= previous_j:
        return offset_j, False
    if range_j is not None and previous_j > 0.9 * range_j and now_j < 0.1 * range_j:
        return offset_j + range_j, False
    return offset_j, True


def reason_names(bits: int) -> tuple[str, ...]:
    """Names of the clock event reasons set in ``bits``.

    >>> reason_names(0x24)
    ('sw_power_cap', 'sw_thermal_slowdown')
    """
    unknown = bits & ~sum(REASONS)
    names = [name for bit, name in REASONS.items() if bits & bit]
    return (*names, *([f"unknown_{unknown:#x}"] if unknown else []))
