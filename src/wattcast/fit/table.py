"""A table of counters and measured watts, checked once, that every counter model is fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from wattcast.activity import events
from wattcast.arrays import Array
from wattcast.errors import BadInput, bad_value, clip, unknown_name

Codes: TypeAlias = npt.NDArray[np.int64]

RAILS = ("core", "memory", "host")  # the last has no clock of its own
MOST_SPREAD = 1000.0  # a column of watts or hertz whose largest value is so many times its smallest mixes units
WRAP = (2.0**32, 2.0**31, 2.0**40, 2.0**48)  # widths at which hardware counters wrap
LEAST_POWER_W, MOST_POWER_W = 0.1, 5000.0


@dataclass(frozen=True)
class Predictor:
    """One column of activity: the event it counts, its rail, and the family it shares strength with."""

    event: str
    rail: str = "core"
    family: str = ""
    column: str = ""  # as the source calls it
    full: float | None = None  # occurrence at full use; None: the largest seen in training

    def __post_init__(self) -> None:
        if self.event not in events():
            raise unknown_name("event", self.event, events())
        if self.rail not in RAILS:
            raise unknown_name("rail", self.rail, RAILS)

    @property
    def label(self) -> str:
        """The event, and the source's own name where it differs."""
        return f"{self.event} ({self.column})" if self.column and self.column != self.event else self.event


@dataclass(frozen=True)
class CounterTable:
    """Watts, clocks and event occurrences by row; rows of equal work at other clocks are one benchmark."""

    name: str
    power_w: Array  # (row,)
    clock_hz: Array  # (row,)
    memory_clock_hz: Array  # (row,)
    occurrence: Array  # (row, predictor) per second; as it is for a mean
    predictors: tuple[Predictor, ...]
    benchmark: Codes  # (row,)
    benchmark_names: tuple[str, ...]
    group: Codes  # (benchmark,): the application, or its own number
    group_names: tuple[str, ...]
    default_hz: tuple[float, float] | None = None  # core and memory clock at which users run
    voltage_v: Mapping[str, Array] = field(default_factory=dict)  # rail -> (row,), where measured
    notes: tuple[str, ...] = ()  # assumptions made on the way in
    scaling: Mapping[str, float] = field(default_factory=dict)  # the same as numbers, where activity was scaled
    rail_w: Mapping[str, Array] = field(default_factory=dict)  # rail -> (row,), where measured by itself
    left_out: Mapping[str, str] = field(default_factory=dict)  # benchmark -> why it is not trained on
    test: tuple[str, ...] = ()  # groups that are predicted and never trained on
    choose_on: str = ""  # group whose held-out error chooses how the fit leans
    duration_s: Array | None = None  # (row,) of what was counted, where known

    def __post_init__(self) -> None:
        check(self)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.power_w.size)

    @property
    def benchmarks(self) -> int:
        """Number of benchmarks."""
        return len(self.benchmark_names)

    def busy(self) -> Array:
        """1 where any event of the device happened, 0 in rows of an idle one, ``(row,)``."""
        own = [i for i, predictor in enumerate(self.predictors) if predictor.rail != "host"]
        return (self.occurrence[:, own] > 0).any(axis=1).astype(float)

    def full(self, rows: npt.NDArray[np.bool_] | None = None) -> Array:
        """Occurrence of each predictor at full use; 0 for one that never happened in ``rows``."""
        seen = self.occurrence if rows is None else self.occurrence[rows]
        largest = seen.max(axis=0, initial=0.0)
        return np.array([p.full if p.full else m for p, m in zip(self.predictors, largest, strict=True)])

    def share(self, rail: str) -> Array:
        """Activity factor of a rail: how much of each cycle its busiest unit works, 0 to 1, ``(row,)``."""
        on = [i for i, p in enumerate(self.predictors) if p.rail == rail]
        if not on:
            return np.zeros(self.rows)
        clock_hz = self.memory_clock_hz if rail == "memory" else self.clock_hz
        default_hz = (self.default_hz or (1.0, 1.0))[rail == "memory"]
        each = []
        for i in on:
            predictor, value = self.predictors[i], self.occurrence[:, i]
            per_cycle = value if events()[predictor.event].is_mean else value / clock_hz
            known = predictor.full / default_hz if predictor.full and self.default_hz else None
            each.append(per_cycle / (known or per_cycle.max()))
        return np.asarray(np.max(each, axis=0))

    def features(self) -> Array:
        """Use of each predictor, at the default clocks where they are there, ``(benchmark, predictor)``."""
        full = np.where(self.full() > 0, self.full(), 1.0)
        at = self.at_default()
        rows = [np.flatnonzero((self.benchmark == b) & at) for b in range(self.benchmarks)]
        rows = [r if r.size else np.flatnonzero(self.benchmark == b) for b, r in enumerate(rows)]
        return np.array([(self.occurrence[r] / full).mean(axis=0) for r in rows])

    def at_default(self) -> npt.NDArray[np.bool_]:
        """Rows at the default clocks; none where no default is known."""
        if self.default_hz is None:
            return np.zeros(self.rows, dtype=bool)
        core_hz, memory_hz = self.default_hz
        return np.asarray((self.clock_hz == core_hz) & (self.memory_clock_hz == memory_hz))


def check(table: CounterTable) -> None:
    """Refuse a table no model should be fitted to, naming rows and columns."""
    rows, width = table.rows, len(table.predictors)
    if table.occurrence.shape != (rows, width) or table.benchmark.shape != (rows,):
        raise bad_value(table.name, f"{rows} rows of {width} counters", f"{table.occurrence.shape}")
    if rows < width + 2:
        raise bad_value(
            table.name,
            f"at least {width + 2} rows for {width} counters",
            f"{rows} rows",
            "Measure more, or map fewer.",
        )
    _check_watts(table)
    for name, clock_hz in (("clock", table.clock_hz), ("memory clock", table.memory_clock_hz)):
        _check_spread(table.name, name, clock_hz)
    for index, predictor in enumerate(table.predictors):
        _check_counter(table, predictor, table.occurrence[:, index])
    twice = {p.event for i, p in enumerate(table.predictors) if p.event in {q.event for q in table.predictors[:i]}}
    if twice:
        raise bad_value(
            table.name, "each event once", f"{', '.join(sorted(twice))} twice", "Sum the columns in the map."
        )


def check_wrapped(where: str, column: str, count: Array, work: Sequence[str]) -> None:
    """Refuse counts that went through the width of a counter.

    The same work counts the same at every clock, so rows of one benchmark that differ by just 2^32
    (or 2^31, 2^40, 2^48) show a wrap; a negative count shows one by itself.
    """
    if (count < 0).any():
        row = int(np.flatnonzero(count < 0)[0])
        raise bad_value(
            f"{where}: column {column!r}, row {row + 1}",
            "counts, zero or more",
            float(count[row]),
            "A counter that wrapped or was read twice: measure this row again.",
        )
    labels = np.asarray(work)
    for name in dict.fromkeys(work):
        same = count[labels == name]
        gap = same.max() - same
        for width in WRAP:
            wrapped = np.abs(gap - width) < 0.02 * width
            if wrapped.any() and same.max() > 0.5 * width:
                raise BadInput(
                    f"{where}: column {column!r} wrapped: rows of {clip(name)!r} differ by {width:.0f}, the "
                    f"width of a counter. Read it more often, or add {width:.0f} to the low rows."
                )


def _check_watts(table: CounterTable) -> None:
    bad = np.flatnonzero(~(np.isfinite(table.power_w) & (table.power_w > 0)))
    if bad.size:
        raise bad_value(
            f"{table.name}: power, row {bad[0] + 1}",
            "watts above zero",
            float(table.power_w[bad[0]]),
            "Remove or redo it.",
        )
    low, high = float(table.power_w.min()), float(table.power_w.max())
    if low < LEAST_POWER_W or high > MOST_POWER_W:
        raise bad_value(
            f"{table.name}: power",
            f"{LEAST_POWER_W} to {MOST_POWER_W:.0f} W",
            f"{low:.4g} to {high:.4g} W",
            "Is the column in mW or kW? Say so in the map: `unit: mW`.",
        )
    _check_spread(table.name, "power", table.power_w)


def _check_spread(where: str, column: str, value: Array) -> None:
    if not (np.isfinite(value).all() and (value > 0).all()):
        raise bad_value(f"{where}: {column}", "finite numbers above zero", float(value.min()))
    if value.max() > MOST_SPREAD * value.min():
        raise bad_value(
            f"{where}: {column}", "one unit throughout", f"{value.min():.4g} to {value.max():.4g}", "Units are mixed."
        )


def _check_counter(table: CounterTable, predictor: Predictor, value: Array) -> None:
    where = f"{table.name}: {predictor.label}"
    if not np.isfinite(value).all():
        raise bad_value(f"{where}, row {np.flatnonzero(~np.isfinite(value))[0] + 1}", "a finite number", "none")
    if (value < 0).any():
        raise bad_value(f"{where}, row {np.flatnonzero(value < 0)[0] + 1}", "zero or more", float(value.min()))
    if value.max() == value.min():
        raise bad_value(
            where,
            "values that differ between rows",
            f"{value[0]:.4g} in all {value.size}",
            "A constant column says nothing: leave it out of the map, or measure benchmarks that vary it.",
        )


def codes(labels: Sequence[str]) -> tuple[Codes, tuple[str, ...]]:
    """Labels -> their number in order of appearance, and the names by number.

    >>> codes(["b", "a", "b"])[0].tolist()
    [0, 1, 0]
    """
    names = tuple(dict.fromkeys(labels))
    at = {name: i for i, name in enumerate(names)}
    return np.array([at[label] for label in labels], dtype=np.int64), names
