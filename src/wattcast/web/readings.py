"""Readings of cards for operators, no oftener than is worth it.

Nothing is polled: a card is read when somebody asks, and at most every ``busy_s``. A card that says it is idle is
left alone for ``idle_s``, since every reading wakes parts of it; the age of what is shown is shown too. The driver
stays open between readings: opening it anew would wake the whole card.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wattcast.errors import MissingTool
from wattcast.measure.samples import reason_names, unwrap
from wattcast.measure.source import EnergySource, Identity, ReadError, Slow, open_source

BUSY_S, IDLE_S = 5.0, 60.0
IDLE_REASON = "gpu_idle"
MOST_DEVICES = 64


@dataclass(frozen=True)
class Reading:
    """One look at a card; NaN where it does not say."""

    at_s: float
    energy_j: float
    clock_hz: float
    slow: Slow
    idle: bool
    lost: bool = False

    @property
    def power_w(self) -> float:
        """The instant reading, or the average where there is no other."""
        return self.slow.instant_w if math.isfinite(self.slow.instant_w) else self.slow.average_w

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the clock is what it is, by NVML's names."""
        return reason_names(int(self.slow.throttle)) if math.isfinite(self.slow.throttle) else ()


@dataclass
class Card:
    """A card and its latest reading."""

    index: int
    source: EnergySource
    identity: Identity
    busy_s: float = BUSY_S
    idle_s: float = IDLE_S
    now: Callable[[], float] = time.monotonic
    readings: int = 0
    errors: int = 0
    _last: Reading | None = field(default=None, repr=False)
    _offset_j: float = 0.0
    _previous_j: float = 0.0

    def look(self) -> Reading:
        """The latest reading, or a fresh one when that is due."""
        now_s = self.now()
        if self._last is None or now_s - self._last.at_s >= self.due_s:
            self._last = self._read(now_s)
        return self._last

    @property
    def due_s(self) -> float:
        """How old a reading may grow."""
        return self.idle_s if self._last is not None and self._last.idle else self.busy_s

    @property
    def limit_w(self) -> float:
        """The power limit in force when the card was opened; NaN where it does not say."""
        return math.nan if self.identity.power_limit_w is None else self.identity.power_limit_w

    def age_s(self, reading: Reading) -> float:
        """How old a reading is."""
        return self.now() - reading.at_s

    def _read(self, now_s: float) -> Reading:
        self.readings += 1
        try:
            energy_j = self._energy_j()
            clock_hz, slow = self.source.sm_clock_hz(), self.source.slow()
        except ReadError as error:
            self.errors += 1
            return Reading(now_s, math.nan, math.nan, Slow(), idle=False, lost=error.lost)
        reading = Reading(now_s, energy_j, clock_hz, slow, idle=False)
        return Reading(now_s, energy_j, clock_hz, slow, idle=IDLE_REASON in reading.reasons)

    def _energy_j(self) -> float:
        now_j = self.source.energy_j()
        if math.isfinite(now_j):
            self._offset_j, _ = unwrap(self._previous_j, now_j, self._offset_j, self.source.energy_range_j)
            self._previous_j = now_j
        return now_j + self._offset_j


def find_cards(source: str = "auto", busy_s: float = BUSY_S, idle_s: float = IDLE_S) -> list[Card]:
    """All cards of the first source that answers; raises :class:`~wattcast.errors.MissingTool` when none does."""
    if source == "auto":
        for name in ("nvml", "amd"):
            with contextlib.suppress(MissingTool):
                return find_cards(name, busy_s, idle_s)
        return find_cards("rapl", busy_s, idle_s)
    found: list[Card] = []
    for index in range(MOST_DEVICES):
        try:
            opened, identity = open_source(source, index)
        except MissingTool:
            if not found:
                raise
            break
        found.append(Card(index, opened, identity, busy_s, idle_s))
    return found
