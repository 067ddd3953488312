"""What each kernel costs before any clock is chosen: cycles on chip, seconds off it.

Phases overlap within and add up across: a kernel takes Σ_phase max(cycles/f, seconds) at effective
clock f. Changing the core clock never changes the seconds, so a sweep over clocks repeats nothing
but this sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from wattcast.arrays import Array
from wattcast.kernels import Kernels


class Phase(IntEnum):
    """Stretches of a kernel, on the last axis of a Timeline; zero when a kernel has none."""

    FIXED = 0  # start and end of the kernel, whatever its size
    MAIN = 1


@dataclass(frozen=True)
class Timeline:
    """Clock-free cost and event counts of each kernel."""

    kernels: Kernels
    cycles: Array  # (*sweep, kernel, phase) on-chip work
    seconds: Array  # (*sweep, kernel, phase) DRAM and link work
    tensor_cycles: Array  # (*sweep, kernel) cycles the tensor pipes are busy, for the effective clock
    events: tuple[str, ...]
    value: Array  # (*sweep, kernel, event) counts of one run of each kernel
    calls: Array  # (kernel,) how often each runs
    host_s: Array  # (*sweep, kernel) what issuing it costs the host


def kernel_s(timeline: Timeline, effective_hz: Array) -> Array:
    """Duration of one run of each kernel, ``(*sweep, kernel)``, at an effective clock shaped alike."""
    total: Array = _longest(timeline, effective_hz).sum(axis=-1)
    return total


def _longest(timeline: Timeline, effective_hz: Array) -> Array:

    return np.maximum(timeline.cycles / effective_hz[..., np.newaxis], timeline.seconds)
