"""What a stretch of time took: joules, watts, clock, from samples; with the reasons to doubt it.

Energy between two moments is read off the counter's steps, linear between them: within a step the
counter says nothing. A stretch with fewer than five whole steps keeps its time but gets no power.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from wattcast.errors import Refused
from wattcast.measure.samples import BENIGN, Samples, Ticks, ticks
from wattcast.units import show

LEAST_TICKS = 5
LATE_SHARE = 0.01  # of the power that late polls may have cost, beyond which it is doubtful
COARSE_S = 0.15  # between readings of a counter whose period is not known, beyond which power is doubtful


@dataclass(frozen=True)
class Stretch:
    """A plateau: consecutive counter steps whose power stays within a few percent."""

    start_s: float  # from the beginning of the measurement
    duration_s: float
    power_w: float


@dataclass(frozen=True)
class Measurement:
    """One named window. ``None`` means it could not be measured; ``flags`` say why to be careful."""

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
    steady: tuple[Stretch, ...] = ()
    overhead: float | None = None  # share of the processors that the sampler took while the window ran

    def require(self) -> Measurement:
        """Itself, or :class:`~wattcast.errors.Refused` with the reasons when power cannot be trusted."""
        if self.power_w is None or self.flags:
            raise Refused(f"{self.name}: {', '.join(self.flags) or 'no power'}.")
        return self

    def plain(self) -> dict[str, object]:
        """For JSON; what was not measured is left out."""
        values = asdict(self).items()
        return {name: v for name, v in values if v is not None and not (isinstance(v, float) and math.isnan(v))}

    @property
    def sentence(self) -> str:
        """One line for people."""
        parts = [f"{self.name}: {show(self.duration_s, 's')}"]
        if self.energy_j is not None:
            parts.append(show(self.energy_j, "J"))
        if self.power_w is not None:
            parts.append(f"mean {show(self.power_w, 'W')}")
        if self.peak_w is not None:
            parts.append(f"largest sample {show(self.peak_w, 'W')} ({self.peak_of})")
        if self.sm_clock_hz is not None:
            parts.append(f"clock {show(self.sm_clock_hz, 'Hz')}")
        return ", ".join(parts) + (f" [{', '.join(self.flags)}]" if self.flags else "")


def measured(name: str, samples: Samples, start_s: float, end_s: float, overhead: float | None = None) -> Measurement:
    """The window from ``start_s`` to ``end_s``; ``samples`` should reach a step beyond both ends."""
    stepped = ticks(samples)
    held, inside = samples.between(start_s, end_s), stepped.between(start_s, end_s)
    peak_w, peak_of = _peak(held, inside)
    flags = _flags(held, inside, stepped, start_s, end_s)
    enough = inside.intervals >= LEAST_TICKS and "counter_reset" not in flags
    energy_j = energy_between_j(stepped, start_s, end_s) if enough else None
    return Measurement(
        name,
        end_s - start_s,
        energy_j=energy_j,
        power_w=energy_j / (end_s - start_s) if energy_j is not None else None,
        power_spread_w=inside.spread_w if enough else None,
        peak_w=peak_w,
        peak_of=peak_of,
        sm_clock_hz=held.mean("sm_clock_hz"),
        memory_power_w=held.mean("memory_w"),
        temperature_c=held.mean("temperature_c"),
        ticks=inside.intervals,
        throttle=held.throttle,
        flags=flags,
        steady=stretches(inside, start_s) if enough else (),
        overhead=overhead,
    )


def energy_between_j(stepped: Ticks, start_s: float, end_s: float) -> float:
    """Counter difference between two moments, linear inside steps, the end steps' power carried outwards."""
    time_s, energy_j = stepped.time_s, stepped.energy_j
    before_w, after_w = stepped.interval_w[0], stepped.interval_w[-1]

    def at(moment_s: float) -> float:
        inner_j = float(np.interp(moment_s, time_s, energy_j))
        early_s, late_s = max(time_s[0] - moment_s, 0.0), max(moment_s - time_s[-1], 0.0)
        return float(inner_j - before_w * early_s + after_w * late_s)

    return at(end_s) - at(start_s)


def stretches(inside: Ticks, origin_s: float, tolerance: float = 0.04, least: int = 8) -> tuple[Stretch, ...]:
    """Plateaus of at least ``least`` steps within ``tolerance`` of their median power.

    Steps at either end of a plateau are mixed with what lies outside and are left out.
    """
    watts = inside.interval_w
    found: list[Stretch] = []
    first = 0
    for place in range(1, len(watts) + 1):
        stretch = watts[first:place]
        ended = place == len(watts)
        if not ended and abs(watts[place] - np.median(stretch)) <= tolerance * np.median(stretch):
            continue
        if place - first >= least:
            begin, end = first + 1, place - 1
            length_s = inside.time_s[end] - inside.time_s[begin]
            power_w = (inside.energy_j[end] - inside.energy_j[begin]) / length_s
            found.append(Stretch(float(inside.time_s[begin] - origin_s), float(length_s), float(power_w)))
        first = place
    return tuple(found)


def _peak(held: Samples, inside: Ticks) -> tuple[float | None, str]:
    instant = held.known("instant_w")
    if len(instant):
        return float(instant.max()), "instant readings"
    if inside.intervals:
        return float(inside.interval_w.max()), "counter steps"
    return None, ""


def _flags(held: Samples, inside: Ticks, stepped: Ticks, start_s: float, end_s: float) -> tuple[str, ...]:
    flags = []
    if inside.intervals < LEAST_TICKS:
        flags.append(f"{inside.intervals} counter steps, {LEAST_TICKS} needed")
    if (np.diff(inside.energy_j) < 0.0).any():
        flags.append("counter_reset")
    apart_s = float(np.median(np.diff(inside.time_s))) if inside.intervals else 0.0
    if inside.step_s is None and apart_s > COARSE_S:
        flags.append(f"steps of the counter known only to {apart_s:.2f} s")
    if inside.power_doubt > LATE_SHARE:
        flags.append("late_polls")
    gap_s = np.diff(held["time_s"]).max(initial=0.0) if len(held) else end_s - start_s
    if gap_s > 1.0:
        flags.append(f"no samples for {gap_s:.1f} s")
    flags += [f"throttle_{reason}" for reason in held.throttle if reason not in BENIGN]
    if stepped.intervals and stepped.time_s[0] > start_s + 0.5:
        flags.append("counter started late")
    return tuple(flags)
