"""Find out how fast the power sensor of a device is: how often it is renewed, and how far back it averages.

A counter that changes every 100 ms cannot tell two kernels of 10 ms apart, and an average over a second still shows
the time before a short run. ``probe_sensor`` measures both instead of assuming them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from wattcast.core.errors import MissingTool
from wattcast.measure.energy_samples import EnergySamples, find_ticks
from wattcast.measure.sampler import Sampler


@dataclass(frozen=True)
class PowerSensor:
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
        """Return plain data for JSON."""
        return asdict(self) | {"implies": list(self.implies)}


def describe_sensor(samples: EnergySamples, step_s: float | None = None) -> PowerSensor:
    """Return periods, by how often values change, and windows, by how long a load from ``step_s`` takes to show."""
    return PowerSensor(
        energy_period_s=_median(np.diff(find_ticks(samples).time_s)),
        instant_period_s=find_change_period_s(samples, "instant_w"),
        average_period_s=find_change_period_s(samples, "average_w"),
        instant_window_s=find_rise_s(samples, "instant_w", step_s),
        average_window_s=find_rise_s(samples, "average_w", step_s),
        memory_window_s=find_rise_s(samples, "memory_w", step_s),
        poll_period_s=float(np.median(np.diff(samples["time_s"]))) if len(samples) > 1 else float("nan"),
        clock_period_s=find_change_period_s(samples, "sm_clock_hz"),
    )


def find_change_period_s(samples: EnergySamples, column: str) -> float | None:
    """Return the median time between changes of a column."""
    read = np.isfinite(samples[column])
    time_s, value = samples["time_s"][read], samples[column][read]
    return _median(np.diff(time_s[np.flatnonzero(np.diff(value) != 0.0) + 1]))


def find_rise_s(samples: EnergySamples, column: str, step_s: float | None) -> float | None:
    """Return the length of the boxcar whose answer to a step at ``step_s`` climbs as seen: 10 % to 90 % over 0.8.

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
    reached = [time_s[late & (share >= level)] for level in (0.1, 0.9)]
    return float((reached[1][0] - reached[0][0]) / 0.8) if all(map(len, reached)) else None


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


IDLE_S, LOAD_S = 2.5, 3.0


def probe_sensor(source: str = "auto", index: int = 0) -> tuple[PowerSensor, EnergySamples]:
    """Idle, then copy random data steadily; return what the sensor showed and all samples."""
    with Sampler(source, index) as sampler:
        load = _copy_load()
        mark = sampler.head
        time.sleep(IDLE_S)
        step_s = time.monotonic() if load is not None else None
        if load is not None:
            load(LOAD_S)
        samples = sampler.since(mark)
    return describe_sensor(samples, step_s), samples


def _copy_load() -> Any:
    """Return a function that copies random data for some seconds; None where PyTorch or CUDA is missing."""
    try:
        import torch

        if not torch.cuda.is_available():
            raise MissingTool("no CUDA device")
    except (ImportError, MissingTool):
        return None
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()

    def load(length_s: float) -> None:
        end_s = time.monotonic() + length_s
        while time.monotonic() < end_s:
            for _ in range(40):
                target.copy_(source)
            torch.cuda.synchronize()

    return load
