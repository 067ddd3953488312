"""How units of work fall on SMs: waves, rounds, busy and lazy SMs."""

from __future__ import annotations

import numpy as np

from wattcast.arrays import Array, Scalar
from wattcast.kernels import Kernels


def waves(kernels: Kernels, sm_count: Scalar) -> Array:
    """Rounds of units over the SMs, ``(*sweep, kernel)``: whole ones for tiles that fill an SM."""
    rounds = np.divide(kernels.work.units, sm_count, order="F")
    return np.ceil(rounds, out=np.maximum(rounds, 1.0), where=kernels.fills)


def rounds(kernels: Kernels, sm_count: Scalar) -> Array:
    """How often an SM takes new units while the last ones still run, ``(*sweep, kernel)``; at least once."""
    each = np.divide(kernels.work.units / kernels.work.slots, sm_count, order="F")
    return np.maximum(each, 1.0, out=each)


def active(kernels: Kernels, waves: Array) -> Array:
    """SMs with work, averaged over a kernel's waves, ``(*sweep, kernel)``."""
    return np.asarray(kernels.work.units / np.maximum(waves, 1e-30))


def active_share(kernels: Kernels, sm_count: Scalar) -> Array:
    """Share of the SMs with work, averaged over a kernel's waves, ``(*sweep, kernel)``."""
    return np.asarray(active(kernels, waves(kernels, sm_count)) / sm_count)
