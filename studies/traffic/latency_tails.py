"""Learn the slowest one percent of an engine's requests, for a clock that follows its work.

Times are kept as *work*: the seconds that a request would have waited at the highest clock. A
request that waits does work at the relative speed of the clock, so that work done at several clocks
adds up, and the tail that was seen at one clock tells of another.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wattcast.control.serving_control import LatencyHistogram
from wattcast.core.arrays import Array

LEAST_WORK_S = 1e-3  # of a request, by which its logarithm exists


class WaitingRequest(NamedTuple):
    """A request that has no token yet."""

    since_s: float  # the look before it was seen
    done_s: float  # work that the engine had done by then
    ahead_s: float  # work of older requests before it, which a higher clock had time for


@dataclass
class RequestQueue:
    """Keep when the requests came that wait for their first token: engines take them in order."""

    done_s: float = 0.0  # work of the engine since it is watched
    waiting: deque[WaitingRequest] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.waiting)

    def advance(self, seconds: float, speed: float) -> None:
        """Let time pass at a speed, relative to that of the highest clock."""
        self.done_s += seconds * speed

    def add(
        self,
        count: int,
        since_s: float,
        done_s: float,
        ahead_s: float,
    ) -> None:
        """Add requests that came after a look at ``since_s``."""
        self.waiting.extend([WaitingRequest(since_s, done_s, ahead_s)] * count)

    def count_older(self, than_s: float) -> int:
        """Count the requests that came before a moment."""
        return sum(1 for request in self.waiting if request.since_s <= than_s)

    def take(
        self,
        now_s: float,
        new: LatencyHistogram,
    ) -> list[float]:
        """Take the requests out that have their first token, and return the work of each beyond
        what was ahead of it.

        When they came is known to a look; the sum of their times, which the engine tells, corrects
        for that."""
        count = min(round(new.count), len(self.waiting))
        begun = [self.waiting.popleft() for _ in range(count)]
        ages_s = [max(now_s - request.since_s, 1e-6) for request in begun]
        over_s = (sum(ages_s) - new.total_s) / max(count, 1)
        works_s = []
        for request, age_s in zip(begun, ages_s, strict=True):
            time_s = max(age_s - over_s, LEAST_WORK_S)
            work_s = time_s * (self.done_s - request.done_s) / age_s
            works_s.append(max(work_s - request.ahead_s, LEAST_WORK_S))
        return works_s

    def keep_newest(self, count: float) -> None:
        """Forget the oldest beyond ``count``: the engine says that no more wait."""
        while len(self.waiting) > max(count, 0.0):
            self.waiting.popleft()

    def list_columns(self) -> tuple[Array, Array, Array]:
        """Return when each came, the work done by then, and the work ahead of it."""
        table = np.array(self.waiting, float).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]


@dataclass
class TailWatch:
    """Keep the 99th percentiles of blocks of time, and say which the next may have.

    The percentile of the next block is taken to be lognormal over those of the last ones."""

    block_s: float
    blocks: int  # that are remembered, beside the one that goes on
    spread: float  # standard deviations between blocks that are left room for
    count: int = 0  # values so far
    value: float = 0.0
    _begin_s: float = -math.inf
    _sorted: list[float] = field(default_factory=list)  # of the block that goes on
    _ended: deque[tuple[float, int]] = field(default_factory=deque)  # percentile, requests

    def add(self, now_s: float, value: float) -> None:
        """Add a request."""
        if now_s - self._begin_s >= self.block_s:
            if self._sorted:
                self._ended.append((find_percentile(self._sorted), len(self._sorted)))
            if len(self._ended) > self.blocks:
                self._ended.popleft()
            self._sorted = []
            self._begin_s = now_s
        bisect.insort(self._sorted, value)
        self.count += 1
        self.value = self._expect()

    def _expect(self) -> float:
        blocks = [(find_percentile(self._sorted), len(self._sorted)), *self._ended]
        logs = [math.log(max(value, 1e-4)) for value, _ in blocks]
        mean = sum(logs) / len(logs)
        variance = sum((log - mean) ** 2 for log in logs) / len(logs)
        expected = math.exp(mean + self.spread * math.sqrt(variance))
        return min(expected, max(value for value, _ in blocks))

    def widen(self, by_requests: float, by_blocks: float) -> float:
        """Return the percentile with room for how few requests and blocks it is from."""
        seen = len(self._sorted) + sum(count for _, count in self._ended)
        room = by_requests / math.sqrt(max(seen, 1))
        room += by_blocks / math.sqrt(len(self._ended) + 1)
        return self.value * (1.0 + room)


def find_percentile(ascending: list[float]) -> float:
    """Return the 99th percentile, linear between values."""
    place = 0.99 * (len(ascending) - 1)
    low = int(place)
    share = place - low
    if share == 0.0:
        return ascending[low]
    return ascending[low] * (1.0 - share) + ascending[low + 1] * share


def list_times(new: LatencyHistogram) -> list[float]:
    """Return the times of requests as their histogram and its sum tell: one alone exactly.

    Those of a bucket are spread evenly over it, then scaled to the sum inside their buckets."""
    count = round(new.count)
    if count <= 1:
        return [new.mean_s] * count
    times = []
    low_s = 0.0
    below = 0.0
    for edge_s, at_or_below in zip(new.edges, new.counts, strict=True):
        inside = round(at_or_below - below)
        below = at_or_below
        high_s = edge_s if math.isfinite(edge_s) else 2.0 * low_s
        for number in range(inside):
            share = (number + 0.5) / inside
            times.append((low_s + share * (high_s - low_s), low_s, high_s))
        low_s = high_s
    total_s = sum(time_s for time_s, _, _ in times)
    scale = new.total_s / total_s if total_s > 0 else 1.0
    return [min(max(scale * time_s, low), high) for time_s, low, high in times]
