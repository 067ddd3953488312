"""Estimate the power of a running program from its kernel launches and counters collected once per
kernel.

Collecting counters slows a kernel down, so they are collected once for each kernel symbol and
execution configuration, in as many passes as needed, and reused for every later launch [Stokke2016,
section 6.1 and figure 7]. Changes with a kernel's arguments alone are not seen."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.core.arrays import Array
from wattcast.core.errors import (
    MissingEvents,
    bad_value,
    check_names,
)
from wattcast.core.strict_files import (
    decode_json,
    gunzip_bytes,
    read_bytes,
)
from wattcast.hardware import OperatingPoint
from wattcast.lab.counter_models.profiler_counters import (
    LaunchKey,
    read_ncu,
    read_nvprof,
)
from wattcast.power.activity import (
    Activity,
    ActivitySource,
    known_events,
)
from wattcast.power.power_model import Power, PowerModel
from wattcast.workload.readers.from_profiler import MAX_PROFILE_BYTE, ProfilerTrace

COUNTER_BOOK_FORMAT = 1
CYCLE_EVENT = "core_cycle"
ANY_SIZE = (0, 0, 0)  # grid or block of counts that hold for every launch of a kernel


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: its start, and its duration where that was timed."""

    key: LaunchKey
    start_s: float
    duration_s: float | None = None


@dataclass(frozen=True)
class CounterBook:
    """Counts per launch by key, each the mean of the passes that saw it."""

    count: Mapping[LaunchKey, Mapping[str, float]] = field(default_factory=dict)
    passes: Mapping[LaunchKey, Mapping[str, int]] = field(default_factory=dict)

    def find_counts(self, key: LaunchKey) -> Mapping[str, float]:
        """Return the counts of a launch: of its configuration, or of its kernel in any; empty where
        none are.
        """
        return self.count.get(key) or self.count.get(LaunchKey(key.kernel, ANY_SIZE, ANY_SIZE), {})

    def missing(
        self,
        key: LaunchKey,
        events: Sequence[str],
    ) -> tuple[str, ...]:
        """Return the events still to be collected for this key; none when its launches can be
        estimated.
        """
        seen = self.find_counts(key)
        return tuple(event for event in events if event not in seen)

    def with_pass(
        self,
        key: LaunchKey,
        counts: Mapping[str, float],
    ) -> CounterBook:
        """Return the book after one more pass over one launch."""
        count = dict(self.count.get(key, {}))
        passes = dict(self.passes.get(key, {}))
        for event, value in counts.items():
            check_names("event", event, known_events(), "")
            if not (np.isfinite(value) and value >= 0):
                raise bad_value(
                    f"{key.kernel}: {event}",
                    "a count, zero or more",
                    value,
                    "Did the counter wrap?",
                )
            before = passes.get(event, 0)
            count[event] = (count.get(event, 0.0) * before + value) / (before + 1)
            passes[event] = before + 1
        return CounterBook({**self.count, key: count}, {**self.passes, key: passes})


@dataclass(frozen=True)
class PowerEstimate:
    """Power of a program over time, in intervals between starts and ends of launches."""

    start_s: Array  # (interval,)
    activity: Activity
    power: Power
    counted: Array  # (interval,), 1 where every running kernel has counters, else 0
    unknown: tuple[LaunchKey, ...]  # still to be collected
    missing_events: tuple[str, ...] = ()  # that some kernel lacks
    has_known_kernels: bool = True  # or only gaps between kernels are known

    @property
    def energy_j(self) -> float:
        """Energy of the intervals that are known."""
        return float((self.power.total_w * self.activity.duration_s * self.counted).sum())

    @property
    def mean_w(self) -> float:
        """Mean power over the intervals that are known; 0 where none is."""
        time_s = float((self.activity.duration_s * self.counted).sum())
        return self.energy_j / time_s if time_s > 0 else 0.0


def estimate_launch_power(
    launches: Sequence[KernelLaunch],
    book: CounterBook,
    model: PowerModel,
    at: OperatingPoint,
    background: Mapping[str, float] | None = None,
) -> PowerEstimate:
    """Estimate power over time of launches whose counters are in the book.

    A launch that was not timed takes T = cycles / f [Stokke2016, Eq. 11]. Counts spread evenly over
    a launch; kernels that overlap add up. ``background`` holds further events per second (such as
    the host's cycles), or the value of a mean. Time in which a launch lacks an event of the model
    is marked as unknown, never counted as zero."""
    if not launches:
        raise bad_value("launches", "at least one", "none")
    background_rates = dict(background or {})
    launch_events = tuple(event for event in model.required_events if event not in background_rates)
    missing_events: dict[LaunchKey, Sequence[str]] = {}  # of launches whose counters are not whole
    for launch in launches:
        missing = book.missing(launch.key, launch_events)
        if missing:
            missing_events[launch.key] = missing

    duration_s = np.array([_find_duration_s(launch, book, at) for launch in launches])
    intervals = _divide_time(launches, duration_s)
    columns = []
    for event in model.required_events:
        counted = np.array([book.find_counts(launch.key).get(event, 0.0) for launch in launches])
        if known_events()[event].is_mean:
            columns.append(intervals.sum_running(counted) + background_rates.get(event, 0.0))
        else:
            per_s = intervals.sum_running(counted / duration_s) + background_rates.get(event, 0.0)
            columns.append(per_s * intervals.length_s)
    value = np.stack(columns, axis=-1)
    activity = Activity(
        intervals.length_s,
        value,
        model.required_events,
        at,
        ActivitySource.PROFILED,
    )

    is_unknown = np.array([launch.key in missing_events for launch in launches])
    has_counters = intervals.sum_running(is_unknown.astype(float)) == 0.0
    lacking = {event for missing in missing_events.values() for event in missing}
    return PowerEstimate(
        intervals.start_s,
        activity,
        model.power(activity),
        has_counters.astype(float),
        tuple(missing_events),
        tuple(event for event in launch_events if event in lacking),
        not is_unknown.all(),
    )


@dataclass(frozen=True)
class _LaunchIntervals:
    """Time divided at every begin and end of a launch."""

    edges_s: Array  # (interval + 1,)
    first: npt.NDArray[np.intp]  # (launch,): the interval with which it begins
    after: npt.NDArray[np.intp]  # (launch,): the interval before which it ends

    @property
    def start_s(self) -> Array:
        """Begin of each interval."""
        return self.edges_s[:-1]

    @property
    def length_s(self) -> Array:
        """Length of each interval."""
        return np.diff(self.edges_s)

    def sum_running(self, per_launch: Array) -> Array:
        """Sum over the launches that run in each interval; exactly zero where none does."""
        running = np.cumsum(self._changes(np.ones(self.first.size)))
        total = np.cumsum(self._changes(per_launch))
        return np.where(running > 0, np.maximum(total, 0.0), 0.0)[:-1]

    def _changes(self, per_launch: Array) -> Array:
        """Return by how much the sum over running launches changes at each edge."""
        size = self.edges_s.size
        begun = np.bincount(self.first, per_launch, size)
        ended = np.bincount(self.after, per_launch, size)
        return np.asarray(begun - ended)


def _divide_time(launches: Sequence[KernelLaunch], duration_s: Array) -> _LaunchIntervals:
    """Divide time at every begin and end of a launch."""
    start_s = np.array([launch.start_s for launch in launches])
    end_s = start_s + duration_s
    edges_s = np.unique(np.concatenate([start_s, end_s]))
    return _LaunchIntervals(
        edges_s,
        np.searchsorted(edges_s, start_s),
        np.searchsorted(edges_s, end_s),
    )


def _find_duration_s(
    launch: KernelLaunch,
    book: CounterBook,
    at: OperatingPoint,
) -> float:
    if launch.duration_s is not None:
        if not launch.duration_s > 0:
            raise bad_value(
                f"launch of {launch.key.kernel}", "a duration above zero", launch.duration_s
            )
        return launch.duration_s
    cycles = book.find_counts(launch.key).get(CYCLE_EVENT)
    if cycles is None or at.clock_hz is None:
        raise MissingEvents(
            f"a launch of {launch.key.kernel} was not timed, and its length needs "
            f"{CYCLE_EVENT} in the counter book "
            "and the core clock. Time the launches, or collect the cycles."
        )
    return cycles / float(np.asarray(at.clock_hz))  # Eq. 11


@dataclass(frozen=True)
class LaunchLog:
    """Launches of a program by start; ``epoch_s`` is the Unix time from which starts count."""

    launches: tuple[KernelLaunch, ...]
    epoch_s: float | None  # None where the trace does not hold it

    @property
    def span_s(self) -> tuple[float, float]:
        """First start and last end, on the trace's own clock."""
        return self.launches[0].start_s, max(
            x.start_s + (x.duration_s or 0.0) for x in self.launches
        )


def read_launches(path: Path) -> LaunchLog:
    """Read the kernels of a trace of PyTorch's profiler, or of ``nsys export --type sqlite``.

    Copies and fills have no counters and are left out.
    """
    if is_database(path):
        return _read_nsys_launches(path)
    data = gunzip_bytes(read_bytes(path, MAX_PROFILE_BYTE), path.name, MAX_PROFILE_BYTE)
    trace = decode_json(data, ProfilerTrace, path.name)
    launches = []
    for event in trace.traceEvents:
        if event.ph == "X" and event.cat == "kernel" and event.dur > 0:
            grid = _read_sides(event.args.get("grid"))
            block = _read_sides(event.args.get("block"))
            if grid is None or block is None:
                raise bad_value(
                    f"{path.name}: {event.name}",
                    "grid and block of three numbers each",
                    f"{event.args.get('grid')} and {event.args.get('block')}",
                )
            key = make_launch_key(event.name, grid, block)
            launches.append(KernelLaunch(key, 1e-6 * event.ts, 1e-6 * event.dur))
    if not launches:
        categories = sorted({event.cat for event in trace.traceEvents if event.cat})
        raise bad_value(
            path.name,
            "kernels (events of category kernel)",
            ", ".join(categories[:6]) or "none",
            "Profile CUDA activity too.",
        )
    launches.sort(key=lambda launch: launch.start_s)
    epoch_s = None
    if trace.baseTimeNanoseconds is not None:
        epoch_s = 1e-9 * trace.baseTimeNanoseconds
    return LaunchLog(tuple(launches), epoch_s)


def _read_sides(value: object) -> tuple[int, ...] | None:
    """Return the three sides of a grid or a block; None where a trace has anything else."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    sides = tuple(value)
    return sides if all(isinstance(side, int) for side in sides) else None


def _read_nsys_launches(path: Path) -> LaunchLog:
    """Read the kernels of a database of Nsight Systems, whose times count from its session."""
    expectation = "kernels (nsys profile --trace cuda, nsys export --type sqlite)"
    launches = []
    for name, *shape, start_ns, end_ns in query_nsys(path, NSYS_KERNELS, expectation):
        key = make_launch_key(name, shape[:3], shape[3:])
        launches.append(KernelLaunch(key, 1e-9 * start_ns, 1e-9 * (end_ns - start_ns)))
    return LaunchLog(tuple(launches), None)


def is_database(path: Path) -> bool:
    """Return whether a file is an SQLite database, as ``nsys export --type sqlite`` writes it."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(15) == b"SQLite format 3"


NSYS_KERNELS = """
SELECT s.value, k.gridX, k.gridY, k.gridZ, k.blockX, k.blockY, k.blockZ, k.start, k.end
FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName
WHERE k.end > k.start ORDER BY k.start"""


def query_nsys(
    path: Path,
    query: str,
    expectation: str,
) -> list[Any]:
    """Return the rows of a query, at least one; an error says what was ``wanted``."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
            rows = base.execute(query).fetchall()
    except sqlite3.Error as error:
        raise bad_value(path.name, expectation, error) from None
    if not rows:
        raise bad_value(path.name, expectation, "none")
    return rows


def find_clock_hz(launches: Sequence[KernelLaunch], book: CounterBook) -> float | None:
    """Return the clock at which timed launches take as long as their counted cycles."""
    counted_cycles = 0.0
    measured_s = 0.0
    for launch in launches:
        cycles = book.find_counts(launch.key).get(CYCLE_EVENT)
        if cycles and launch.duration_s:
            counted_cycles += cycles
            measured_s += launch.duration_s
    return counted_cycles / measured_s if measured_s > 0 else None


class _CountedLaunch(msgspec.Struct, forbid_unknown_fields=True):
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    count: dict[str, float]
    passes: dict[str, int]
    shared_byte: int = 0  # which no trace of launches holds


class _CounterBookFile(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    kernels: list[_CountedLaunch]


def read_counter_book(path: Path, sm_count: float | None = None) -> CounterBook:
    """Read a counter book (JSON), an export of ``ncu --csv``, a report of ncu (``.ncu-rep``), or
    ``nvprof --csv``.
    """
    if path.suffix == ".json":
        return _read_saved_book(path)
    book = CounterBook()
    if b'"Invocations","Metric Name"' in read_bytes(path, MAX_PROFILE_BYTE):
        for kernel, counts in read_nvprof(path).items():
            book = book.with_pass(make_launch_key(kernel, ANY_SIZE, ANY_SIZE), counts)
        return book
    launches, activity = read_ncu(path, sm_count)
    for launch, row in zip(launches, activity.value.tolist(), strict=True):
        if len(launch.grid) != 3 or len(launch.block) != 3:
            do = "Export with ncu --csv --page raw."
            raise bad_value(path.name, "columns Grid Size and Block Size", "none", do)
        counts = dict(zip(activity.events, row, strict=True))
        book = book.with_pass(make_launch_key(launch.kernel, launch.grid, launch.block), counts)
    return book


def _read_saved_book(path: Path) -> CounterBook:
    """Read a counter book as it was saved, and check its counts."""
    file = decode_json(read_bytes(path), _CounterBookFile, path.name)
    if file.format != COUNTER_BOOK_FORMAT:
        raise bad_value(f"{path.name}: format", str(COUNTER_BOOK_FORMAT), file.format)
    count: dict[LaunchKey, Mapping[str, float]] = {}
    passes: dict[LaunchKey, Mapping[str, int]] = {}
    for entry in file.kernels:
        check_names("event", entry.count, known_events(), "")
        for event, value in entry.count.items():
            if value < 0 or entry.passes.get(event, 0) < 1:
                raise bad_value(
                    f"{path.name}: {entry.kernel}: {event}",
                    "a count of zero or more, and its passes",
                    value,
                )
        key = make_launch_key(entry.kernel, entry.grid, entry.block)
        count[key] = entry.count
        passes[key] = entry.passes
    return CounterBook(count, passes)


def make_launch_key(
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
) -> LaunchKey:
    """Return the key of a launch, whatever tool named its kernel."""
    return LaunchKey(plain_kernel_name(kernel), tuple(grid[:3]), tuple(block[:3]))


def plain_kernel_name(kernel: str) -> str:
    """Return a kernel's name without spaces, return type and parameters, in which tools differ.

    >>> plain_kernel_name("void at::native::add<float, 4>(int, float*)")
    'at::native::add<float,4>'
    >>> plain_kernel_name("dct8x8")
    'dct8x8'
    """
    name = re.sub(r"\(anonymous namespace\)::", "", kernel.strip())
    depth = 0
    end = len(name)
    for place, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = place
            break
    return re.sub(r"\s+", "", name[:end].removeprefix("void "))
