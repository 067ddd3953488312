"""Steady states: stretches of samples whose power stays near its running mean [GPUWattch manual, 4.3].

A sample joins the region while |p − mean so far| is below the allowed deviation. The sample that breaks it is
dropped and belongs to no region; a kernel's end closes its region. A region counts when it has more than the
least number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from wattcast.arrays import Array
from wattcast.power.component.simulator_config import SteadyDefinition

NOT_ENOUGH = "ERROR! Not enough steady state points to generate average"


@dataclass(frozen=True)
class Region:
    """One steady state."""

    start: int  # its first sample
    end: int  # the sample after its last
    kernel: int
    power_w: float  # mean
    counter: Array  # means


@dataclass
class SteadyStates:
    """Finds steady states while blocks of samples go by."""

    definition: SteadyDefinition
    counters: int
    found: list[Region | None] = field(default_factory=list)  # None: a kernel without one, before the first of all
    _start: int = 0
    _count: int = 0
    _sum: float = 0.0
    _kernel: int = 0
    _sample: int = 0
    _any: bool = False

    def __post_init__(self) -> None:
        self._held = np.zeros(self.counters)  # sums of the open region's earlier blocks

    def add(self, power_w: Array, counter: Array) -> None:
        """Consecutive samples of the kernel that is running."""
        first = self._sample
        for start, end, total, count in self._walk(power_w.tolist()):
            self._close(start, end, total, count, counter, first)
        self._sample = first + len(power_w)
        if not self._count:
            self._held = np.zeros(self.counters)
        elif self._start >= first:
            self._held = counter[self._start - first :].sum(axis=0)
        else:
            self._held = self._held + counter.sum(axis=0)

    def end_kernel(self) -> None:
        """The kernel is over: close what is open."""
        if self._count > self.definition.minimum_sample:
            mean = self._sum / self._count
            self._keep(Region(self._start, self._sample, self._kernel, mean, self._held / self._count))
        elif not self._any:
            self.found.append(None)
        self._count, self._kernel = 0, self._kernel + 1
        self._held = np.zeros(self.counters)

    def _walk(self, power_w: Sequence[float]) -> Iterator[tuple[int, int, float, int]]:
        """Regions that break inside this block. The recurrence is sequential: each sample needs the mean so far."""
        deviation, least, base = self.definition.deviation_w, self.definition.minimum_sample, self._sample
        start, count, total = self._start, self._count, self._sum
        for i, watts in enumerate(power_w):
            if not count:
                start, count, total = base + i, 1, watts
            elif -deviation < watts - total / count < deviation:
                total += watts
                count += 1
            else:
                if count > least:
                    yield start, base + i, total, count
                count = 0
        self._start, self._count, self._sum = start, count, total

    def _close(self, start: int, end: int, total: float, count: int, counter: Array, first: int) -> None:
        sums = counter[max(start - first, 0) : end - first].sum(axis=0)
        if start < first:
            sums = sums + self._held
        self._keep(Region(start, end, self._kernel, total / count, sums / count))

    def _keep(self, region: Region) -> None:
        self._any = True
        self.found.append(region)
