"""Power of a running program from its kernel launches: counters once per kernel and launch configuration.

Collecting counters slows a kernel down, so they are collected once for each kernel symbol and
execution configuration, in as many passes as it takes, and reused for every later launch
[Stokke2016, section 6.1 and figure 7]. What changes with a kernel's arguments alone is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.activity import Activity, Source, events
from wattcast.arrays import Array
from wattcast.errors import MissingEvents, bad_value, unknown_name
from wattcast.files import from_json, read_bytes, write_whole
from wattcast.hardware import OperatingPoint
from wattcast.power.interface import Power, PowerModel

FORMAT = 1
CYCLES = "core_cycle"


@dataclass(frozen=True)
class LaunchKey:
    """What two launches must share to share their counters."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_byte: int = 0  # dynamic shared memory


@dataclass(frozen=True)
class Launch:
    """One launch: when it began, and how long it ran where that was timed."""

    key: LaunchKey
    start_s: float
    duration_s: float | None = None


@dataclass(frozen=True)
class CounterBook:
    """Counts per launch by key, each the mean of the passes that saw it."""

    count: Mapping[LaunchKey, Mapping[str, float]] = field(default_factory=dict)
    passes: Mapping[LaunchKey, Mapping[str, int]] = field(default_factory=dict)

    def missing(self, key: LaunchKey, wanted: Sequence[str]) -> tuple[str, ...]:
        """Events still to be collected for this key; empty when its launches can be estimated."""
        seen = self.count.get(key, {})
        return tuple(event for event in wanted if event not in seen)

    def with_pass(self, key: LaunchKey, counts: Mapping[str, float]) -> CounterBook:
        """The book after one more pass over one launch."""
        count, passes = dict(self.count.get(key, {})), dict(self.passes.get(key, {}))
        for event, value in counts.items():
            if event not in events():
                raise unknown_name("event", event, events())
            if not (np.isfinite(value) and value >= 0):
                raise bad_value(f"{key.kernel}: {event}", "a count, zero or more", value, "Did the counter wrap?")
            before = passes.get(event, 0)
            count[event] = (count.get(event, 0.0) * before + value) / (before + 1)
            passes[event] = before + 1
        return CounterBook({**self.count, key: count}, {**self.passes, key: passes})


@dataclass(frozen=True)
class Estimate:
    """Power over the time of a program, in intervals between launches' starts and ends."""

    start_s: Array  # (interval,)
    activity: Activity
    power: Power
    known: Array  # (interval,), 1 where every running kernel has counters, else 0
    unknown: tuple[LaunchKey, ...]  # still to be collected

    @property
    def energy_j(self) -> float:
        """Energy of the intervals that are known."""
        return float((self.power.total_w * self.activity.duration_s * self.known).sum())

    @property
    def mean_w(self) -> float:
        """Mean power over the intervals that are known; 0 where none is."""
        time_s = float((self.activity.duration_s * self.known).sum())
        return self.energy_j / time_s if time_s > 0 else 0.0


def estimate(
    launches: Sequence[Launch],
    book: CounterBook,
    model: PowerModel,
    at: OperatingPoint,
    background: Mapping[str, float] | None = None,
) -> Estimate:
    """Power over time of launches whose counters are in the book.

    A launch that was not timed takes its counted cycles over the clock, T = cycles / f [Eq. 11]. Counts
    spread evenly over a launch; kernels that overlap add up. ``background`` holds what goes on beside
    the kernels, per second (the host's cycles, say), or the value of a mean. A launch for which an
    event of the model is in neither makes its time unknown, never zero.
    """
    if not launches:
        raise bad_value("launches", "at least one", "none")
    beside = dict(background or {})
    wanted = tuple(event for event in model.required_events if event not in beside)
    unknown = tuple(dict.fromkeys(launch.key for launch in launches if book.missing(launch.key, wanted)))
    start_s = np.array([launch.start_s for launch in launches])
    end_s = start_s + np.array([_duration_s(launch, book, at) for launch in launches])
    edges = np.unique(np.concatenate([start_s, end_s]))
    span = _Spans(np.searchsorted(edges, start_s), np.searchsorted(edges, end_s), np.diff(edges))
    value = np.stack([_value(e, launches, book, beside, span, end_s - start_s) for e in model.required_events], -1)
    activity = Activity(span.length_s, value, model.required_events, at, Source.PROFILED)
    hide = set(unknown)
    hidden = np.array([launch.key in hide for launch in launches], dtype=float)
    known = (span.sum(hidden) == 0.0).astype(float)
    return Estimate(edges[:-1], activity, model.power(activity), known, unknown)


@dataclass(frozen=True)
class _Spans:
    """From which interval on each launch runs and before which it has ended; memory is linear in launches."""

    first: npt.NDArray[np.int64]  # (launch,)
    after: npt.NDArray[np.int64]  # (launch,)
    length_s: Array  # (interval,)

    def sum(self, per_launch: Array) -> Array:
        """Sum over the launches that run in each interval, exactly zero where none does."""
        count = len(self.length_s) + 1
        change = np.bincount(self.first, per_launch, count) - np.bincount(self.after, per_launch, count)
        running = np.cumsum(np.bincount(self.first, minlength=count) - np.bincount(self.after, minlength=count))
        return np.where(running > 0, np.maximum(np.cumsum(change), 0.0), 0.0)[:-1]


def save(book: CounterBook, path: Path) -> None:
    """Write a book as JSON."""
    entries = [
        _Entry(k.kernel, k.grid, k.block, dict(counts), dict(book.passes[k]), k.shared_byte)
        for k, counts in book.count.items()
    ]
    write_whole(path, msgspec.json.format(msgspec.json.encode(_BookFile(FORMAT, entries)), indent=1))


def load(path: Path) -> CounterBook:
    """Read a book."""
    file = from_json(read_bytes(path), _BookFile, path.name)
    if file.format != FORMAT:
        raise bad_value(f"{path.name}: format", str(FORMAT), file.format)
    keys = [LaunchKey(e.kernel, e.grid, e.block, e.shared_byte) for e in file.kernels]
    for entry in file.kernels:
        for event, value in entry.count.items():
            if event not in events():
                raise unknown_name("event", event, events())
            if value < 0 or entry.passes.get(event, 0) < 1:
                raise bad_value(
                    f"{path.name}: {entry.kernel}: {event}", "a count of zero or more, and its passes", value
                )
    return CounterBook(
        {key: entry.count for key, entry in zip(keys, file.kernels, strict=True)},
        {key: entry.passes for key, entry in zip(keys, file.kernels, strict=True)},
    )


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    count: dict[str, float]
    passes: dict[str, int]
    shared_byte: int = 0


class _BookFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    kernels: list[_Entry]


def _duration_s(launch: Launch, book: CounterBook, at: OperatingPoint) -> float:
    if launch.duration_s is not None:
        if not launch.duration_s > 0:
            raise bad_value(f"launch of {launch.key.kernel}", "a duration above zero", launch.duration_s)
        return launch.duration_s
    cycles = book.count.get(launch.key, {}).get(CYCLES)
    if cycles is None or at.clock_hz is None:
        raise MissingEvents(
            f"a launch of {launch.key.kernel} was not timed, and its length needs {CYCLES} in the counter book and "
            "the core clock. Time the launches, or collect the cycles."
        )
    return cycles / float(np.asarray(at.clock_hz))  # Eq. 11


def _value(
    event: str,
    launches: Sequence[Launch],
    book: CounterBook,
    beside: Mapping[str, float],
    span: _Spans,
    duration_s: Array,
) -> Array:
    """Value of one event in each interval."""
    counted = np.array([book.count.get(launch.key, {}).get(event, 0.0) for launch in launches])
    if events()[event].is_mean:
        return np.asarray(span.sum(counted) + beside.get(event, 0.0))
    return np.asarray((span.sum(counted / duration_s) + beside.get(event, 0.0)) * span.length_s)
