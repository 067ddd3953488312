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
class _Sums:
    """Over the samples of the kernel that is running."""

    parts: int
    counters: int
    count: int = 0
    total_w: float = 0.0
    thread: float | None = 0.0
    high: Extreme | None = None
    low: Extreme | None = None

    def __post_init__(self) -> None:
        self.part_w, self.counter = np.zeros(self.parts), np.zeros(self.counters)


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
        self._sums = _Sums(self.parts, self.counters)

    @property
    def running(self) -> int:
        """Samples of the kernel that has not ended yet."""
        return self._sums.count

    def add(self, total_w: Array, part_w: Array, counter: Array, thread: Array | None) -> None:
        """Consecutive samples of the kernel that is running."""
        if not len(total_w):
            return
        sums, block_w = self._sums, float(total_w.sum())
        sums.count += len(total_w)
        sums.total_w += block_w
        sums.part_w += part_w.sum(axis=0)
        sums.counter += counter.sum(axis=0)
        sums.thread = None if thread is None or sums.thread is None else sums.thread + float(thread.sum())
        high, low = int(np.argmax(total_w)), int(np.argmin(total_w))
        if sums.high is None or total_w[high] > sums.high.power_w:
            sums.high = _extreme(total_w, part_w, counter, high)
        if sums.low is None or total_w[low] < sums.low.power_w:
            sums.low = _extreme(total_w, part_w, counter, low)
        self._all_sum += block_w
        self._all_count += len(total_w)
        self._all_max = max(self._all_max, float(total_w[high]))
        self._all_min = min(self._all_min or np.inf, float(total_w[low]))

    def end(self, finished: bool = True) -> None:
        """The kernel is over."""
        sums, nothing = self._sums, Extreme(0.0, np.zeros(self.parts), np.zeros(self.counters))
        with np.errstate(invalid="ignore"):
            mean_part_w, mean_counter = (np.true_divide(s, sums.count) for s in (sums.part_w, sums.counter))
        self.kernels.append(
            KernelPower(
                len(self.kernels),
                sums.count,
                sums.total_w / sums.count if sums.count else 0.0,
                mean_part_w,
                mean_counter,
                sums.counter,
                sums.high or nothing,
                sums.low or nothing,
                sums.thread / sums.count if sums.thread is not None and sums.count else None,
                self._all_sum / self._all_count if self._all_count else float("nan"),
                self._all_max,
                self._all_min,
                finished,
            )
        )
        self._sums = _Sums(self.parts, self.counters)


def _extreme(total_w: Array, part_w: Array, counter: Array, at: int) -> Extreme:
    return Extreme(float(total_w[at]), part_w[at].copy(), counter[at].copy())
