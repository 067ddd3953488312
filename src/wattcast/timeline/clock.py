"""The effective clock: what the SMs run at within the clock NVML reports.

Under tensor-core load Hopper slows itself within the reported clock. The law is measured, belongs to
a bundle, and holds only for architectures known to do this; elsewhere the two clocks are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array, Scalar
from wattcast.errors import bad_value
from wattcast.timeline.timeline import Stack, Timeline, phases_s

_NO_TIME = 1e-300  # of a kernel that takes none, which is not busy either


@dataclass(frozen=True)
class ClockLaw:
    """Effective over set clock: ``without`` tensor work, else linear between points of activity.

    ``activity`` is the share of cycles in which tensor pipes are busy, times data toggling, times
    (set clock / ``top_hz``) to ``clock_power``: what slows the chip is the load on its supply, which
    falls with clock and voltage. Zero power: the set clock does not matter.
    """

    without: float
    activity: Array
    ratio: Array
    toggling: float = 1.0
    clock_power: float = 0.0
    top_hz: float = 1.0

    def __post_init__(self) -> None:
        if self.activity.shape != self.ratio.shape or self.activity.size == 0 or (np.diff(self.activity) <= 0).any():
            raise bad_value("effective clock", "a ratio for each of rising activities", self.activity.tolist())
        if not ((self.ratio > 0).all() and (self.ratio <= 1).all() and 0 < self.without <= 1):
            raise bad_value("effective clock", "ratios above 0 and at most 1", self.ratio.tolist())

    def load(self, clock_hz: Array) -> Array:
        """What one unit of tensor activity counts for at a set clock."""
        return np.asarray(self.toggling * (clock_hz / self.top_hz) ** self.clock_power)


def effective_hz(timeline: Timeline, clock_hz: Scalar, law: ClockLaw | None) -> Array:
    """Effective clock of each kernel; broadcasts to ``(*sweep, kernel)``.

    Tensor activity is taken at the set clock, one step instead of a fixed point: a slower clock
    raises the activity of memory-bound kernels only, whose time hardly depends on it.
    """
    set_hz = np.asarray(clock_hz, dtype=np.float64)
    if law is None:
        return set_hz
    rows, stack = timeline.tensor_rows, timeline.tensor_stack
    if stack is not None and set_hz.size == 1 and set_hz.ndim <= 1:
        return _of_one(timeline, stack, set_hz.item(), law)
    cycles = phases_s(timeline.tensor_phases, stack, set_hz) * set_hz
    busy = np.divide(timeline.tensor_cycles, cycles, out=np.zeros(cycles.shape, order="F"), where=cycles > 0)
    activity = busy * law.load(set_hz)
    running_hz = np.full((*activity.shape[:-1], len(timeline.kernels.ops)), law.without, order="F")
    running_hz[..., rows] = np.interp(activity.T, law.activity, law.ratio).T  # transposed, it lies end to end
    running_hz *= set_hz
    return running_hz


def _of_one(timeline: Timeline, stack: Stack, set_hz: float, law: ClockLaw) -> Array:
    """The same at a single clock, in as few steps as it takes."""
    found = np.empty(len(timeline.calls))
    found.fill(set_hz * law.without)
    if len(timeline.tensor_rows):
        load = law.toggling * (set_hz / law.top_hz) ** law.clock_power
        cycles = np.maximum(stack.cycles_at(set_hz), _NO_TIME)
        activity = timeline.tensor_cycles * load / cycles
        found[timeline.tensor_rows] = set_hz * np.interp(activity, law.activity, law.ratio)
    return found
