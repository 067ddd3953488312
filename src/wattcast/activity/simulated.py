"""Simulator traces -> Activity: GPUWattch's and AccelWattch's counters by name, whatever their order.

``map_gpuwattch.csv`` and ``map_accelwattch.csv`` say which event a column is. AccelWattch writes its
execution-unit counters already multiplied by the scaling factor of the architecture file; they are
divided again here, so that an event counts the same from every source. Columns a simulator may add
(cycles of the sample, clock, voltage, active threads, instructions) are taken when they are there.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from wattcast.activity.activity import Activity, Source
from wattcast.activity.trace_file import Block, TraceFault, TraceFile, open_trace
from wattcast.arrays import Array
from wattcast.errors import MissingEvents, bad_value, nearest, unknown_name
from wattcast.hardware import OperatingPoint


class Dialect(StrEnum):
    """Whose counters and components a file speaks of."""

    GPUWATTCH = "gpuwattch"
    ACCELWATTCH = "accelwattch"


@dataclass(frozen=True)
class Counter:
    """One column of a metric trace."""

    column: str
    event: str  # empty: the column says nothing
    scaling: str  # its scaling factor in the architecture file
    prescaled: bool  # the simulator has multiplied by that factor already


CYCLES, CLOCK, VOLTAGE, THREADS, INSTRUCTIONS = (
    "CYCLES",
    "CORE_CLOCK_MHZ",
    "CORE_VOLTAGE_V",
    "THREADS_PER_WARP",
    "INSTRUCTIONS",
)
OPTIONAL = (CYCLES, CLOCK, VOLTAGE, THREADS, INSTRUCTIONS)
CUSTOM = tuple(f"custom_{i}" for i in range(1, 9))


@cache
def counters(dialect: Dialect) -> tuple[Counter, ...]:
    """The counters of a dialect, in the order its simulator writes them."""
    text = files("wattcast.activity").joinpath(f"map_{dialect}.csv").read_text(encoding="utf-8")
    return tuple(
        Counter(row["column"], row["event"], row["scaling"], row["prescaled"] == "yes")
        for row in csv.DictReader(text.splitlines())
    )


@dataclass(frozen=True)
class Sampling:
    """How long a sample lasts and at what setting: fixed, or in steps from given samples on."""

    sample_cycle: float
    clock_hz: float
    first: Array = field(default_factory=lambda: np.zeros(0))  # first sample of each step, rising
    step_clock_hz: Array = field(default_factory=lambda: np.zeros(0))
    step_voltage_v: Array = field(default_factory=lambda: np.zeros(0))  # NaN: not said

    def __post_init__(self) -> None:
        if not (np.isfinite(self.sample_cycle) and self.sample_cycle > 0):
            raise bad_value("sample length", "cycles above zero", self.sample_cycle)
        if not (np.isfinite(self.clock_hz) and self.clock_hz > 0):
            raise bad_value("core clock", "a clock above zero", self.clock_hz)
        if self.first.size and not ((np.diff(self.first) > 0).all() and self.first[0] == 0):
            raise bad_value("clock steps", "rising sample numbers from 0 on", self.first.tolist())

    @property
    def sample_s(self) -> float:
        """Time of one sample at the fixed clock."""
        return self.sample_cycle / self.clock_hz

    def at(self, sample: Array) -> tuple[Array, Array]:
        """Clock and voltage (NaN where not said) of each sample."""
        if not self.first.size:
            return np.full(sample.shape, self.clock_hz), np.full(sample.shape, np.nan)
        step = np.searchsorted(self.first, sample, side="right") - 1
        return self.step_clock_hz[step], self.step_voltage_v[step]


@dataclass(frozen=True)
class MetricTrace:
    """A metric trace with its columns resolved to events."""

    file: TraceFile
    dialect: Dialect
    events: tuple[str, ...]
    columns: tuple[int, ...]  # of those events
    divisor: Array  # of those events: the scaling factor already applied, or 1
    optional: Mapping[str, int]  # optional columns that are there

    def blocks(self) -> Iterator[Block]:
        """The rows in order; a row that lasts no time is a fault like any other."""
        for block in self.file.blocks():
            bad = np.zeros(len(block), dtype=np.bool_)
            for name in (CYCLES, CLOCK, VOLTAGE):
                if name in self.optional:
                    bad |= block.value[:, self.optional[name]] <= 0
            if bad.any():
                row = int(np.argmax(bad))
                if row:
                    yield block.head(row)
                good = block.first + row
                raise TraceFault(
                    f"{self.file.path.name}: line {good + 2}: expected cycles, a clock and a voltage above zero, "
                    f"got a sample without. {good} samples before it are good.",
                    good,
                )
            yield block

    def activity(self, block: Block, sampling: Sampling, sample: Array | None = None) -> Activity:
        """The rows of a block as intervals. ``sample`` numbers them (default: the row)."""
        index = np.arange(block.first, block.first + len(block), dtype=np.float64) if sample is None else sample
        clock_hz, voltage_v = sampling.at(index)
        if CLOCK in self.optional:
            clock_hz = 1e6 * self.column(block, CLOCK)
        cycles = self.column(block, CYCLES) if CYCLES in self.optional else sampling.sample_cycle
        more = {}
        if VOLTAGE in self.optional:
            more["core_voltage"] = self.column(block, VOLTAGE)
        elif not np.isnan(voltage_v).any():
            more["core_voltage"] = voltage_v
        if THREADS in self.optional:
            more["active_thread"] = self.column(block, THREADS)
        at = OperatingPoint(clock_hz=clock_hz)
        if self._as_they_stand and not more:
            value = block.value[:, : len(self.columns)]
        else:
            scaled = [block.value[:, c] / d for c, d in zip(self.columns, self.divisor, strict=True)]
            value = np.stack([*scaled, *more.values()]).T
        return Activity(cycles / clock_hz, value, (*self.events, *more), at, Source.SIMULATED)

    @property
    def _as_they_stand(self) -> bool:
        """Whether the events are the first columns of the file, unscaled."""
        return self.columns == tuple(range(len(self.columns))) and bool((self.divisor == 1.0).all())

    def column(self, block: Block, name: str) -> Array:
        """Values of an optional column that is there."""
        return block.value[:, self.optional[name]]


def open_metric_trace(
    path: Path,
    dialect: Dialect,
    scaling: Mapping[str, float] | None = None,
    custom: Mapping[str, str] | None = None,
) -> MetricTrace:
    """Open a metric trace and find the event of every column.

    ``scaling`` holds the architecture file's factors, for counters written already scaled. ``custom``
    maps further columns to ``custom_1`` ... An unknown column, and a counter of the dialect that is not
    there, are errors: a missing counter is not a zero.
    """
    file = open_trace(path)
    known = {c.column: c for c in counters(dialect)}
    custom = custom or {}
    names: dict[str, int] = {}
    divisor: list[float] = []
    for i, column in enumerate(file.columns):
        counter = known.get(column)
        event = counter.event if counter else custom.get(column, "")
        if counter is None and not event and column not in OPTIONAL:
            every = [*known, *custom, *OPTIONAL]
            do = f"Name it in a component file (--components), or drop it. This is read as {dialect}."
            raise unknown_name(f"counter in {path.name}", column, every, do)
        if event:
            names[event] = i
            divisor.append(_divisor(counter, scaling) if counter and counter.prescaled else 1.0)
    _check_complete(path, dialect, file.columns)
    optional = {name: file.columns.index(name) for name in OPTIONAL if name in file.columns}
    return MetricTrace(file, dialect, tuple(names), tuple(names.values()), np.array(divisor), optional)


def open_power_trace(path: Path) -> TraceFile:
    """Open a power trace: the total, then components. AccelWattch's header runs its last two names together."""
    file = open_trace(path)
    if file.columns[-1] == "CONSTPSTATICP":
        return replace(file, columns=(*file.columns[:-1], "CONSTP", "STATICP"))
    return file


def _divisor(counter: Counter, scaling: Mapping[str, float] | None) -> float:
    """The factor a counter was multiplied with; a factor of zero leaves only zeros, which stay."""
    factor = (scaling or {}).get(counter.scaling)
    if factor is None:
        do = "Give the architecture file the simulator ran with."
        raise bad_value(f"scaling factor {counter.scaling}", "a number", "none", do)
    return factor if factor > 0 else 1.0


def _check_complete(path: Path, dialect: Dialect, columns: tuple[str, ...]) -> None:
    missing = [c.column for c in counters(dialect) if c.event and c.column not in columns]
    if missing:
        close = [n for m in missing for n in nearest(m, columns, 1)]
        hint = f" It has {', '.join(close)}." if close else ""
        raise MissingEvents(
            f"{path.name}: {dialect} counters {', '.join(missing)} are missing.{hint} A missing counter is not a "
            f"zero: write the column, or choose the other dialect."
        )
