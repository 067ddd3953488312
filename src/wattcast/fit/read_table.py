"""CSV or Parquet and a small YAML map of its columns -> CounterTable.

The map names columns and their units; nothing is guessed::

    benchmark: kernel                          # which rows are the same work
    group: {column: kernel, before: "_k"}      # its application, for leave-one-application-out
    power: {column: watts, unit: W}
    duration: {column: time, unit: ms}         # or unit: cycle, of the core clock
    clock: {column: core_mhz, unit: MHz}       # or a quantity, such as 1132 MHz, for all rows
    memory_clock: 850 MHz
    default: {clock: 975 MHz, memory_clock: 3505 MHz}
    voltage: {core: {column: v_gpu, unit: V}}
    events:
      l2_read_sector: {column: l2_reads, family: l2}
      l1_read_word: {column: [l1_hits, shared_loads], times: [null, shared_efficiency]}   # Eq. 6
      active_sm: {column: idle_sm, from: 80}                                              # 80 - column
      dram_byte: {column: dram_gb_per_s, scale: 1e9, rate: true, rail: memory}
    rails: {memory: {column: memory_watts, unit: W}}   # a rail measured by itself: fit/counters_rails.py
    left_out: {l2_read: "its traffic was another while it was counted"}
    test: [multimedia]                         # groups that are predicted, never trained on
    choose_on: mix                             # group whose held-out error chooses how the fit leans

``--columns h200`` is a map that ships (``columns/h200.yaml``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from wattcast import units
from wattcast.activity import events
from wattcast.arrays import Array
from wattcast.errors import BadInput, MissingTool, bad_unit, bad_value, clip, nearest, unknown_name
from wattcast.files import from_yaml, read_bytes
from wattcast.fit.table import RAILS, CounterTable, Predictor, check_wrapped, codes

if TYPE_CHECKING:
    import polars as pl

MOST_MAP_BYTE = 1 << 20


class _Measured(msgspec.Struct, forbid_unknown_fields=True):
    column: str
    unit: str


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    column: str
    before: str = ""


class _Default(msgspec.Struct, forbid_unknown_fields=True):
    clock: str
    memory_clock: str


class _Event(msgspec.Struct, forbid_unknown_fields=True):
    column: str | list[str]
    times: list[str | None] = []
    from_: float | None = msgspec.field(default=None, name="from")
    scale: float = 1.0
    rate: bool = False
    rail: str = ""
    family: str = ""
    full: float | None = None


class ColumnMap(msgspec.Struct, forbid_unknown_fields=True):
    """What each column of a table means."""

    benchmark: str
    power: _Measured
    events: dict[str, _Event]
    duration: _Measured | None = None
    group: _Group | None = None
    clock: _Measured | str | None = None
    memory_clock: _Measured | str | None = None
    default: _Default | None = None
    voltage: dict[str, _Measured] = {}
    rails: dict[str, _Measured] = {}
    left_out: dict[str, str] = {}
    test: list[str] = []
    choose_on: str = ""


def read(path: Path, columns: Path) -> CounterTable:
    """The table at ``path`` by the map at ``columns``."""
    return build(_frame(path), read_map(columns), path.name)


def read_map(path: Path) -> ColumnMap:
    """A column map: a file, or the name of one that ships."""
    shipped = files("wattcast.fit").joinpath("columns", f"{path.name}.yaml")
    if not path.exists() and len(path.parts) == 1 and shipped.is_file():
        return from_yaml(shipped.read_bytes(), ColumnMap, f"{path.name}.yaml")
    return from_yaml(read_bytes(path, MOST_MAP_BYTE), ColumnMap, path.name)


def build(frame: pl.DataFrame, columns: ColumnMap, where: str) -> CounterTable:
    """A data frame by a map; every bad cell is named."""
    return _Builder(frame, columns, where).table()


def _frame(path: Path) -> pl.DataFrame:
    try:
        import polars as pl
    except ImportError:
        raise MissingTool("reading tables needs polars. Install it: pip install 'wattcast[fit]'.") from None
    data = read_bytes(path)
    try:
        if path.suffix.lower() == ".parquet":
            return pl.read_parquet(data)
        return pl.read_csv(data, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise BadInput(
            f"{path.name}: not a readable CSV or Parquet table ({clip(str(error).splitlines()[0], 160)})."
        ) from None


class _Builder:
    """Walks one map over one frame."""

    def __init__(self, frame: pl.DataFrame, columns: ColumnMap, where: str) -> None:
        self.frame, self.map, self.where = frame, columns, where
        if frame.height == 0:
            raise bad_value(where, "rows", "none")
        if not columns.events:
            raise bad_value(f"{where}: events", "at least one event", "none")

    def table(self) -> CounterTable:
        work = self.text(self.map.benchmark)
        clock_hz, memory_clock_hz = (
            self.clock(self.map.clock, "clock"),
            self.clock(self.map.memory_clock, "memory_clock"),
        )
        occurrence = [self.event(name, event, clock_hz, work) for name, event in self.map.events.items()]
        benchmark, names = codes(work)
        groups = self.groups(work, names)
        group, group_names = codes(groups)
        table = CounterTable(
            name=self.where,
            power_w=self.quantity(self.map.power, "W", "power"),
            clock_hz=clock_hz,
            memory_clock_hz=memory_clock_hz,
            occurrence=np.stack(occurrence, axis=1),
            predictors=tuple(self.predictor(name, event) for name, event in self.map.events.items()),
            benchmark=benchmark,
            benchmark_names=names,
            group=group,
            group_names=group_names,
            default_hz=self.default(),
            voltage_v={rail: self.quantity(m, "V", f"voltage.{rail}") for rail, m in self.map.voltage.items()},
            rail_w={rail: self.quantity(m, "W", f"rails.{rail}") for rail, m in self.map.rails.items()},
            left_out=self.map.left_out,
            test=tuple(self.map.test),
            choose_on=self.map.choose_on,
            duration_s=self.duration_s(clock_hz, "all") if self.map.duration else None,
        )
        unknown = [rail for rail in (*self.map.voltage, *self.map.rails) if rail not in RAILS]
        if unknown:
            raise unknown_name("rail", unknown[0], RAILS)
        return replace(table, notes=("Activity was counted at every row's own clocks; nothing is scaled.",))

    def predictor(self, name: str, event: _Event) -> Predictor:
        on_memory = name in events() and events()[name].module == "dram"
        source = event.column if isinstance(event.column, str) else " + ".join(event.column)
        return Predictor(name, event.rail or ("memory" if on_memory else "core"), event.family, source, event.full)

    def event(self, name: str, event: _Event, clock_hz: Array, work: Sequence[str]) -> Array:
        """Occurrences per second, or the mean as it is."""
        if name not in events():
            raise unknown_name("event", name, events())
        sources = [event.column] if isinstance(event.column, str) else event.column
        factors = [*event.times, *(None,) * len(sources)][: len(sources)]
        total = np.zeros(self.frame.height)
        is_mean = events()[name].is_mean
        for source, factor in zip(sources, factors, strict=True):
            value = self.number(source)
            if not (is_mean or event.rate):
                check_wrapped(self.where, source, value, work)
            total = total + value * (self.number(factor) if factor else 1.0)
        total = event.scale * (event.from_ - total if event.from_ is not None else total)
        if is_mean or event.rate:
            return np.asarray(total)
        return np.asarray(total / self.duration_s(clock_hz, name))

    def duration_s(self, clock_hz: Array, event: str) -> Array:
        measured = self.map.duration
        if measured is None:
            raise bad_value(
                f"{self.where}: duration",
                f"a column, to turn counts of {event} into rates",
                "none",
                "Map the duration, or say `rate: true` for columns that are per second.",
            )
        if measured.unit == "cycle":
            value = self.number(measured.column)
            duration_s = value / clock_hz
        else:
            value = duration_s = self.quantity(measured, "s", "duration")
        if not (value > 0).all():
            raise bad_value(f"{self.where}: column {measured.column!r}", "durations above zero", float(value.min()))
        return np.asarray(duration_s)

    def clock(self, measured: _Measured | str | None, name: str) -> Array:
        """Hz in every row; 1 Hz stands for a clock nobody states, which then is the same everywhere."""
        if measured is None:
            if self.map.duration is not None and self.map.duration.unit == "cycle" and name == "clock":
                raise bad_value(f"{self.where}: clock", "the core clock, to turn cycles into seconds", "none")
            return np.ones(self.frame.height)
        if isinstance(measured, str):
            return np.full(self.frame.height, units.parse(measured, "Hz", f"{self.where}: {name}"))
        return self.quantity(measured, "Hz", name)

    def default(self) -> tuple[float, float] | None:
        given = self.map.default
        if given is None:
            return None
        where = f"{self.where}: default"
        return units.parse(given.clock, "Hz", where), units.parse(given.memory_clock, "Hz", where)

    def groups(self, work: Sequence[str], names: Sequence[str]) -> list[str]:
        """The application of each benchmark."""
        given = self.map.group
        if given is None:
            return list(names)
        label = dict(zip(work, self.text(given.column), strict=True))
        return [
            label[name].rpartition(given.before)[0] or label[name] if given.before else label[name] for name in names
        ]

    def quantity(self, measured: _Measured, unit: str, path: str) -> Array:
        found = units.factor(measured.unit)
        if found is None or found[0] != unit:
            raise bad_unit(f"{self.where}: {path}.unit", f"a unit of {unit}", measured.unit)
        return self.number(measured.column) * found[1]

    def number(self, column: str) -> Array:
        import polars as pl

        series = self.column(column)
        try:
            value = series.cast(pl.Float64).to_numpy()
        except pl.exceptions.PolarsError:
            raise bad_value(f"{self.where}: column {column!r}", "numbers", f"{series.dtype}") from None
        bad = np.flatnonzero(~np.isfinite(value))
        if bad.size:
            raise bad_value(
                f"{self.where}: column {column!r}, row {bad[0] + 1}", "a finite number", clip(series[int(bad[0])])
            )
        return np.array(value, dtype=np.float64)

    def text(self, column: str) -> list[str]:
        return [str(cell) for cell in self.column(column).to_list()]

    def column(self, name: str) -> pl.Series:
        if name not in self.frame.columns:
            close = nearest(name, self.frame.columns)
            hint = (
                f" Closest: {', '.join(close)}." if close else f" It has {clip(', '.join(self.frame.columns), 200)}."
            )
            raise BadInput(f"{self.where}: missing column {clip(name)!r}.{hint}")
        return self.frame[name]
