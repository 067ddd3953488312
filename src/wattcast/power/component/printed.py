"""Digits a metric trace rounds away, restored where they can only have been one thing.

Traces print six decimals. The simulator's number of idle SMs is float32(N) − float32(k / C) for a whole number k
of SM cycles out of C a sample, so the printed figure names k, and k names the digits. Used in compatibility
mode, for reports that must agree digit by digit. (The pipeline duty is a sum of rounded floats: its digits
beyond the sixth decimal are lost.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.activity.simulated import CYCLES, MetricTrace, Sampling
from wattcast.arrays import Array

_ROUNDING = 0.6e-6  # half of the last printed decimal, and a little for float32


@dataclass(frozen=True)
class Printed:
    """What is needed to restore the idle SMs of a trace."""

    column: int
    sm_count: int
    sample_cycle: float

    @classmethod
    def of(cls, trace: MetricTrace, sampling: Sampling, sm_count: int | None) -> Printed | None:
        """None where the number of SMs is not known, or samples are not of one length."""
        if sm_count is None or CYCLES in trace.optional:
            return None
        return cls(trace.columns[trace.events.index("idle_sm")], sm_count, sampling.sample_cycle)

    def restore(self, value: Array) -> Array:
        """A copy with the idle SMs as the simulator had them; a figure that fits no whole number stays."""
        printed = value[:, self.column]
        cycles = np.rint((self.sm_count - printed) * self.sample_cycle)
        active = (cycles / self.sample_cycle).astype(np.float32)
        idle = (np.float32(self.sm_count) - active).astype(np.float64)
        restored = value.copy(order="K")
        restored[:, self.column] = np.where(np.abs(idle - printed) <= _ROUNDING, idle, printed)
        return restored
