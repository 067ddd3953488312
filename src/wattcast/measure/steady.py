"""When a load has settled, and whether a window may be trusted.

A window runs from one step of the energy counter to another, holds at least five stretches between
steps, and starts only after the governor has had time to answer (about 90 ms after a load begins,
docs/method/measuring.md). It is steady when clock and power of its first and second half agree.

Under the power cap there is no such quiet: an H200 runs about a second a few percent above its limit,
then cuts the clock deeply for two tenths, and again. So a capped window holds two seconds, twice that
cycle, and its mean is what the load settles at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.errors import Refused
from wattcast.measure.samples import BENIGN, Samples, Ticks, ticks


@dataclass(frozen=True)
class Rule:
    """What settled means."""

    settle_s: float = 0.30  # before a window may begin
    capped_settle_s: float = 0.50  # the same once the power cap has been seen
    least_ticks: int = 5  # stretches between counter steps
    capped_ticks: int = 20  # the same under the cap, where the governor hunts
    clock_drift: float = 0.010  # between the halves, relative
    power_drift: float = 0.020
    capped_drift: float = 0.060  # of clock or power under the cap
    late_share: float = 0.010  # of the power that late polls may have cost
    longest_s: float = 4.0  # then the window is taken as it is, and flagged


@dataclass(frozen=True)
class Window:
    """A stretch of samples between two counter steps, and what is wrong with it, if anything."""

    samples: Samples
    ticks: Ticks
    flags: tuple[str, ...]

    @property
    def start_s(self) -> float:
        return float(self.ticks.time_s[0])

    @property
    def end_s(self) -> float:
        return float(self.ticks.time_s[-1])

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def whole(self, edges_s: np.ndarray) -> np.ndarray:
        """Lengths of the chunks between ``edges_s`` that lie wholly inside; the last one's when none does."""
        length_s = np.diff(edges_s)
        inside = (edges_s[:-1] >= self.start_s) & (edges_s[1:] <= self.end_s)
        return length_s[inside] if inside.any() else length_s[-1:]


def settled(samples: Samples, started_s: float, rule: Rule) -> Window | None:
    """The latest window of a running load if it is steady, else None: keep the load running.

    ``samples`` begin at or before ``started_s``, the moment the load began.
    """
    stepped = ticks(samples)
    if stepped.intervals < rule.least_ticks:
        return None
    capped = "sw_power_cap" in samples.between(started_s + 0.05, np.inf).throttle
    last = stepped.last(rule.capped_ticks if capped else rule.least_ticks)
    if last.time_s[0] < started_s + (rule.capped_settle_s if capped else rule.settle_s):
        return None
    window = _window(samples, last, rule)
    return None if {"clock_drift", "power_drift", "late_polls"} & set(window.flags) else window


def window(samples: Samples, start_s: float, end_s: float, rule: Rule) -> Window:
    """All whole stretches inside ``start_s`` to ``end_s``; refused with a reason when too few."""
    inside = ticks(samples).between(start_s, end_s)
    if inside.intervals < rule.least_ticks:
        raise Refused(
            f"the window of {end_s - start_s:.2f} s holds {inside.intervals} whole steps of the energy counter, and "
            f"power needs {rule.least_ticks}: run longer, or repeat the work."
        )
    return _window(samples, inside, rule)


def _window(samples: Samples, inside: Ticks, rule: Rule) -> Window:
    held = samples.between(float(inside.time_s[0]), float(inside.time_s[-1]))
    flags = []
    capped = "sw_power_cap" in held.throttle
    if _drift(held.known("sm_clock_hz")) > (rule.capped_drift if capped else rule.clock_drift):
        flags.append("clock_drift")
    if _drift(inside.interval_w) > (rule.capped_drift if capped else rule.power_drift):
        flags.append("power_drift")
    if inside.power_doubt > rule.late_share:
        flags.append("late_polls")
    if (np.diff(inside.energy_j) < 0.0).any():
        flags.append("counter_reset")
    harmful = [reason for reason in held.throttle if reason not in BENIGN]
    flags += [f"throttle_{reason}" for reason in harmful]
    return Window(held, inside, tuple(flags))


def _drift(values: np.ndarray) -> float:
    """Relative difference between the means of the first and the second half."""
    if len(values) < 2:
        return 0.0
    half = len(values) // 2
    first, second = float(values[:half].mean()), float(values[-half:].mean())
    return abs(second - first) / max(abs(first), 1e-12)
