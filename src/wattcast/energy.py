"""Power x time -> joules."""

from __future__ import annotations

import numpy as np

from wattcast.arrays import Array
from wattcast.power import Power


def energy_j(power: Power, duration_s: Array) -> Array:
    """Joules of each interval, ``(*sweep, interval)``."""
    return np.asarray(power.total_w * duration_s)


def part_energy_j(power: Power, duration_s: Array) -> Array:
    """Joules of each part in each interval, ``(*sweep, interval, part)``."""
    return np.asarray(power.part_w * duration_s[..., np.newaxis])


def mean_w(joules: Array, seconds: Array) -> Array:
    """Mean power; no time, no power."""
    spent = np.asarray(seconds) > 0
    if spent.all():
        return np.asarray(joules / seconds)
    return np.divide(joules, seconds, out=np.zeros(np.broadcast_shapes(joules.shape, seconds.shape)), where=spent)
