"""Samples of an imagined counter, for tests that need to know the truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wattcast.measure.energy_samples import COLUMNS, EnergySamples

DATA = Path(__file__).parent / "data"


def synthetic(
    length_s: float,
    power_w=lambda t: 300.0,
    clock_hz=lambda t: 1.98e9,
    step_s: float = 0.1,
    poll_s: float = 0.003,
    jitter_s: float = 0.0,
    throttle=lambda t: 0,
    seed: int = 0,
) -> EnergySamples:
    """Samples of a counter that steps every ``step_s`` under a power that may change, polled with
    jitter.
    """
    random = np.random.default_rng(seed)
    even_s = np.arange(0.0, length_s, poll_s)
    time_s = np.sort(even_s + random.uniform(0.0, jitter_s, len(even_s)))
    fine_s = np.arange(0.0, length_s + 1.0, 1e-3)
    integral_j = np.concatenate([[0.0], np.cumsum([1e-3 * power_w(t) for t in fine_s[:-1]])])
    rows = np.full((len(time_s), len(COLUMNS)), np.nan)
    rows[:, 0] = time_s
    rows[:, 1] = 1000.0 + np.interp(np.floor(time_s / step_s) * step_s, fine_s, integral_j)
    rows[:, COLUMNS.index("sm_clock_hz")] = [clock_hz(t) for t in time_s]
    rows[:, COLUMNS.index("throttle")] = [throttle(t) for t in time_s]
    rows[:, COLUMNS.index("temperature_c")] = 50.0
    return EnergySamples(rows)
