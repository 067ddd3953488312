"""What a controller sees of one kernel run or one period, and whether it can be used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from wattcast.manage.knobs import Settings


@dataclass(frozen=True, slots=True)
class Observation:
    """One kernel run (or one period of a card) at known settings.

    ``work`` is how much was done, in any unit that stays the same for a kernel: 1 where every run is
    alike, instructions where a counter tells, iterations reported by the program. ``stale`` says that
    the sensor gave the values of an earlier time again. ``core_hz`` is the core clock it really ran at, as
    the card reports it; NaN where that is not told.
    """

    kernel: str
    settings: Settings
    duration_s: float
    power_w: float  # mean; NaN where no sensor is
    work: float = 1.0
    counters: Mapping[str, float] | None = None
    stale: bool = False
    core_hz: float = math.nan

    @property
    def usable(self) -> bool:
        """Time, power and work are finite and above zero, and new. A NaN anywhere makes it unusable."""
        most = math.inf
        return (
            not self.stale and 0.0 < self.duration_s < most and 0.0 < self.power_w < most and 0.0 < self.work < most
        )

    @property
    def usable_counters(self) -> Mapping[str, float] | None:
        """The counters, or None when there are none or one of them is not a number."""
        counters = self.counters
        if counters is None or not all(map(math.isfinite, counters.values())):
            return None
        return counters
