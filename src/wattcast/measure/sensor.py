"""What the power sensor can and cannot see: update periods and averaging windows, from a step of load.

A counter or reading that changes every 100 ms cannot tell two kernels of 10 ms apart, and an average
over a second shows a short run's past. Found out at start, not assumed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from wattcast.measure.samples import Samples, ticks


@dataclass(frozen=True)
class Sensor:
    """Update periods and averaging windows in seconds; None where there was nothing to see."""

    energy_period_s: float | None
    instant_period_s: float | None
    average_period_s: float | None
    instant_window_s: float | None
    average_window_s: float | None
    memory_window_s: float | None
    poll_period_s: float
    clock_period_s: float | None

    @property
    def implies(self) -> tuple[str, ...]:
        """What follows for anyone who measures with it."""
        said = []
        if self.energy_period_s is None:
            said.append("no energy counter: power comes from readings, and its maximum is the maximum of those.")
        else:
            shortest_s = 5.0 * self.energy_period_s
            said.append(
                f"the energy counter steps every {1e3 * self.energy_period_s:.0f} ms: "
                f"power needs {shortest_s:.1f} s of steady load."
            )
        if self.average_window_s is not None and self.average_window_s > 0.3:
            said.append(f"average power looks back {self.average_window_s:.1f} s: useless for shorter runs.")
        if self.instant_window_s is not None and self.instant_period_s is not None:
            longest_s = max(self.instant_window_s, self.instant_period_s)
            said.append(
                f"instant power answers within {1e3 * longest_s:.0f} ms; its maximum is one of those readings."
            )
        return tuple(said)

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"implies": list(self.implies)}


def describe(samples: Samples, step_s: float | None = None) -> Sensor:
    """Periods from how often values change; windows from how long a step of load at ``step_s`` takes to show."""
    return Sensor(
        energy_period_s=_median(np.diff(ticks(samples).time_s)),
        instant_period_s=change_period_s(samples, "instant_w"),
        average_period_s=change_period_s(samples, "average_w"),
        instant_window_s=rise_s(samples, "instant_w", step_s),
        average_window_s=rise_s(samples, "average_w", step_s),
        memory_window_s=rise_s(samples, "memory_w", step_s),
        poll_period_s=float(np.median(np.diff(samples["time_s"]))) if len(samples) > 1 else float("nan"),
        clock_period_s=change_period_s(samples, "sm_clock_hz"),
    )


def change_period_s(samples: Samples, column: str) -> float | None:
    """Median time between changes of a column."""
    read = np.isfinite(samples[column])
    time_s, value = samples["time_s"][read], samples[column][read]
    return _median(np.diff(time_s[np.flatnonzero(np.diff(value) != 0.0) + 1]))


def rise_s(samples: Samples, column: str, step_s: float | None) -> float | None:
    """Length of the boxcar whose answer to a step at ``step_s`` climbs as seen: 10 % to 90 % over 0.8.

    None when the load did not raise the reading by a tenth. A sensor faster than its own updates
    shows one update period at most.
    """
    if step_s is None:
        return None
    read = np.isfinite(samples[column])
    time_s, value = samples["time_s"][read], samples[column][read]
    before, after = value[(time_s > step_s - 0.4) & (time_s < step_s)], value[time_s > time_s[-1] - 0.3]
    if not len(before) or not len(after) or after.mean() < 1.1 * before.mean():
        return None
    share = (value - before.mean()) / (after.mean() - before.mean())
    late = time_s >= step_s
    low, high = (_first(time_s[late], share[late] >= level) for level in (0.1, 0.9))
    return None if low is None or high is None else float((high - low) / 0.8)


def _first(time_s: np.ndarray, reached: np.ndarray) -> float | None:
    return float(time_s[np.argmax(reached)]) if reached.any() else None


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None
