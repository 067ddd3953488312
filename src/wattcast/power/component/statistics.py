"""Average, maximum and minimum power of each kernel and of the whole, from blocks of samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from wattcast.arrays import Array


@dataclass(frozen=True)
class Extreme:
    """Components and counters of the sample with the most, or the least, power."""

    power_w: float
    part_w: Array
    counter: Array


@dataclass(frozen=True)
class KernelPower:
    """What a report says of one kernel."""

    index: int
    samples: int
    mean_w: float
    mean_part_w: Array
    mean_counter: Array
    total_counter: Array
    highest: Extreme
    lowest: Extreme
    mean_thread: float | None
    so_far_mean_w: float  # over all samples until this kernel ended
    so_far_max_w: float
    so_far_min_w: float
    finished: bool = True


@dataclass
class Tally:
    """Sums over one kernel while its samples go by, and over everything before."""

    parts: int
    counters: int
    kernels: list[KernelPower] = field(default_factory=list)
    _all_sum: float = 0.0
    _all_count: int = 0
    _all_max: float = 0.0
    _all_min: float = 0.0

    def __post_init__(self) -> None:
        self._begin()

    def add(self, total_w: Array, part_w: Array, counter: Array, thread: Array | None) -> None:
        """Consecutive samples of the kernel that is running."""
        if not len(total_w):
            return
        self._count += len(total_w)
        self._sum += float(total_w.sum())
        self._part_sum += part_w.sum(axis=0)
        self._counter_sum += counter.sum(axis=0)
        self._thread_sum = None if thread is None or self._thread_sum is None else self._thread_sum + float(thread.sum())
        high, low = int(np.argmax(total_w)), int(np.argmin(total_w))
        if self._high is None or total_w[high] > self._high.power_w:
            self._high = _extreme(total_w, part_w, counter, high)
        if self._low is None or total_w[low] < self._low.power_w:
            self._low = _extreme(total_w, part_w, counter, low)
        self._all_sum += float(total_w.sum())
        self._all_count += len(total_w)
        self._all_max = max(self._all_max, float(total_w[high]))
        self._all_min = min(self._all_min or np.inf, float(total_w[low]))

    def end(self, finished: bool = True) -> None:
        """The kernel is over."""
        nothing = Extreme(0.0, np.zeros(self.parts), np.zeros(self.counters))
        with np.errstate(invalid="ignore"):
            means = [np.true_divide(s, self._count) for s in (self._part_sum, self._counter_sum)]
        self.kernels.append(
            KernelPower(
                len(self.kernels),
                self._count,
                self._sum / self._count if self._count else 0.0,
                means[0],
                means[1],
                self._counter_sum,
                self._high or nothing,
                self._low or nothing,
                self._thread_sum / self._count if self._thread_sum is not None and self._count else None,
                self._all_sum / self._all_count if self._all_count else float("nan"),
                self._all_max,
                self._all_min,
                finished,
            )
        )
        self._begin()

    @property
    def running(self) -> int:
        """Samples of the kernel that has not ended yet."""
        return self._count

    def _begin(self) -> None:
        self._count, self._sum = 0, 0.0
        self._part_sum, self._counter_sum = np.zeros(self.parts), np.zeros(self.counters)
        self._thread_sum: float | None = 0.0
        self._high: Extreme | None = None
        self._low: Extreme | None = None


def _extreme(total_w: Array, part_w: Array, counter: Array, at: int) -> Extreme:
    return Extreme(float(total_w[at]), part_w[at].copy(), counter[at].copy())
