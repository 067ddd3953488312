"""The table of counters and measured watts that counter models are fitted to, and its reader.

A column map (YAML) gives the meaning of each column of a CSV or Parquet file; the table is checked
once when it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    NamedTuple,
    TypeAlias,
)

import msgspec
import numpy as np
import numpy.typing as npt

from wattcast.core import files, units
from wattcast.core.arrays import (
    Array,
    Mask,
    index_distinct,
)
from wattcast.core.errors import (
    BadInput,
    bad_unit,
    bad_value,
    check_names,
    clip_text,
    nearest_names,
)
from wattcast.core.row_tables import catch_panics, import_polars
from wattcast.core.strict_files import decode_yaml, read_bytes
from wattcast.power.activity import known_events

if TYPE_CHECKING:
    import polars as pl

LabelCodes: TypeAlias = npt.NDArray[np.int64]

RAILS = ("core", "memory", "host")  # the last has no clock of its own
# a column of watts or hertz with a larger ratio of largest to smallest mixes units
LARGEST_SPREAD = 1000.0
COUNTER_WIDTHS = (2.0**32, 2.0**31, 2.0**40, 2.0**48)  # widths at which hardware counters wrap
# ratio of the longest to the shortest row up to which rows are windows of one length
SAME_LENGTH = 1.05
LEAST_POWER_W = 0.1
MOST_POWER_W = 5000.0


@dataclass(frozen=True)
class CounterPredictor:
    """One column of activity: the event it counts, its rail, and its family of like units."""

    event: str
    rail: str = "core"
    family: str = ""
    column: str = ""  # as the source calls it
    full: float | None = None  # occurrence at full use; None: the largest seen in training

    def __post_init__(self) -> None:
        check_names("event", self.event, known_events(), "")
        check_names("rail", self.rail, RAILS, "")

    @property
    def label(self) -> str:
        """The event, and the source's own name where it differs."""
        if not self.column or self.column == self.event:
            return self.event
        return f"{self.event} ({self.column})"


@dataclass(frozen=True)
class CounterTable:
    """Watts, clocks and event occurrences by row; rows of the same work at different clocks are one
    benchmark.
    """

    name: str
    power_w: Array  # (row,)
    clock_hz: Array  # (row,)
    memory_clock_hz: Array  # (row,)
    occurrence: Array  # (row, predictor) per second; as it is for a mean
    predictors: tuple[CounterPredictor, ...]
    benchmark: LabelCodes  # (row,)
    benchmark_names: tuple[str, ...]
    group: LabelCodes  # (benchmark,): the application, or its own number
    group_names: tuple[str, ...]
    default_hz: tuple[float, float] | None = None  # core and memory clock at which users run
    voltage_v: Mapping[str, Array] = field(default_factory=dict)  # rail -> (row,), where measured
    notes: tuple[str, ...] = ()  # assumptions made on the way in
    # the assumptions about scaled activity as numbers
    scaling: Mapping[str, float] = field(default_factory=dict)
    rail_w: Mapping[str, Array] = field(default_factory=dict)  # (row,), of rails measured apart
    # benchmark -> why it is not trained on
    left_out: Mapping[str, str] = field(default_factory=dict)
    test: tuple[str, ...] = ()  # groups that are predicted and never trained on
    choose_on: str = ""  # group whose held-out error chooses the leaning of a two-rail fit
    # events of the memory rail from which on it draws a step in full
    awake_per_s: float | None = None
    duration_s: Array | None = None  # (row,) of what was counted, where known

    def __post_init__(self) -> None:
        """Refuse a table that no model should be fitted to, and name the bad rows and columns."""
        self._check_shape()
        self._check_power()
        self._check_units()
        for predictor, value in zip(self.predictors, self.occurrence.T, strict=True):
            _check_counts(f"{self.name}: {predictor.label}", value)
        events = Counter(predictor.event for predictor in self.predictors)
        repeated = sorted(event for event, times in events.items() if times > 1)
        if repeated:
            raise bad_value(
                self.name,
                "each event once",
                f"{', '.join(repeated)} twice",
                "Sum the columns in the map.",
            )

    def _check_shape(self) -> None:
        """Refuse columns of different lengths, and fewer rows than a fit needs."""
        rows = self.rows
        width = len(self.predictors)
        if self.occurrence.shape != (rows, width) or self.benchmark.shape != (rows,):
            expectation = f"{rows} rows of {width} counters"
            raise bad_value(self.name, expectation, f"{self.occurrence.shape}")
        if rows < width + 2:
            expectation = f"at least {width + 2} rows for {width} counters"
            raise bad_value(self.name, expectation, f"{rows} rows", "Measure more, or map fewer.")

    def _check_power(self) -> None:
        """Refuse watts that are not above zero, and watts that no card draws."""
        bad_rows = np.flatnonzero(~(np.isfinite(self.power_w) & (self.power_w > 0)))
        if bad_rows.size:
            row = int(bad_rows[0])
            raise bad_value(
                f"{self.name}: power, row {row + 1}",
                "watts above zero",
                float(self.power_w[row]),
                "Remove or redo it.",
            )
        low = float(self.power_w.min())
        high = float(self.power_w.max())
        if low < LEAST_POWER_W or high > MOST_POWER_W:
            raise bad_value(
                f"{self.name}: power",
                f"{LEAST_POWER_W} to {MOST_POWER_W:.0f} W",
                f"{low:.4g} to {high:.4g} W",
                "Is the column in mW or kW? Say so in the map: `unit: mW`.",
            )

    def _check_units(self) -> None:
        """Refuse columns of watts and clocks that mix units."""
        columns = {
            "power": self.power_w,
            "clock": self.clock_hz,
            "memory clock": self.memory_clock_hz,
        }
        for name, value in columns.items():
            where = f"{self.name}: {name}"
            if not (np.isfinite(value).all() and (value > 0).all()):
                raise bad_value(where, "finite numbers above zero", float(value.min()))
            if value.max() > LARGEST_SPREAD * value.min():
                extremes = f"{value.min():.4g} to {value.max():.4g}"
                raise bad_value(where, "one unit throughout", extremes, "Units are mixed.")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.power_w.size)

    @property
    def benchmarks(self) -> int:
        """Number of benchmarks."""
        return len(self.benchmark_names)

    def split_benchmarks(self) -> tuple[Mask, Mask]:
        """Mark the benchmarks to train on and those to test on; one left out with a reason is in
        neither.
        """
        unknown = [name for name in self.test if name not in self.group_names]
        if unknown:
            group_list = ", ".join(self.group_names)
            raise bad_value(
                f"{self.name}: test",
                f"groups of the table ({clip_text(group_list, 200)})",
                unknown[0],
            )
        test = np.isin(np.array(self.group_names)[self.group], self.test)
        return ~test & ~np.isin(self.benchmark_names, list(self.left_out)), test

    def keep_benchmarks(self, chosen: Mask) -> CounterTable:
        """Return the table with the rows of some benchmarks only."""
        if chosen.all():
            return self
        rows = chosen[self.benchmark]
        new_number = np.cumsum(chosen) - 1
        names = [self.benchmark_names[number] for number in np.flatnonzero(chosen).tolist()]
        return replace(
            self,
            power_w=self.power_w[rows],
            clock_hz=self.clock_hz[rows],
            memory_clock_hz=self.memory_clock_hz[rows],
            occurrence=self.occurrence[rows],
            benchmark=new_number[self.benchmark[rows]],
            benchmark_names=tuple(names),
            group=self.group[chosen],
            voltage_v={rail: value[rows] for rail, value in self.voltage_v.items()},
            rail_w={rail: value[rows] for rail, value in self.rail_w.items()},
            duration_s=None if self.duration_s is None else self.duration_s[rows],
        )

    def busy(self) -> Array:
        """Return 1 where any event of the device happened and 0 where it was idle, ``(row,)``."""
        on_device = [predictor.rail != "host" for predictor in self.predictors]
        is_device = np.array(on_device, dtype=bool)
        return (self.occurrence[:, is_device] > 0).any(axis=1).astype(float)

    def full(self, rows: npt.NDArray[np.bool_] | None = None) -> Array:
        """Return the occurrence of each predictor at full use; 0 for one that never happened in
        ``rows``.
        """
        occurrence = self.occurrence if rows is None else self.occurrence[rows]
        full = occurrence.max(axis=0, initial=0.0)
        for column, predictor in enumerate(self.predictors):
            if predictor.full:
                full[column] = predictor.full
        return np.asarray(full)

    def share(self, rail: str) -> Array:
        """Return the activity factor of a rail: the share of cycles in which its busiest unit
        works, ``(row,)``.
        """
        clock_hz = self.memory_clock_hz if rail == "memory" else self.clock_hz
        default_hz = None
        if self.default_hz is not None:
            default_hz = self.default_hz[rail == "memory"]
        busiest = np.zeros(self.rows)
        for predictor, occurrence in zip(self.predictors, self.occurrence.T, strict=True):
            if predictor.rail != rail:
                continue
            is_mean = known_events()[predictor.event].is_mean
            per_cycle = occurrence if is_mean else occurrence / clock_hz
            full_per_cycle = per_cycle.max()
            if predictor.full and default_hz:
                full_per_cycle = predictor.full / default_hz
            busiest = np.maximum(busiest, per_cycle / full_per_cycle)
        return busiest

    def features(self) -> Array:
        """Return the use of each predictor, at the default clocks where measured, ``(benchmark,
        predictor)``.
        """
        full = np.where(self.full() > 0, self.full(), 1.0)
        at = self.at_default()
        rows_of_benchmark = [self.benchmark == b for b in range(self.benchmarks)]
        rows = [mine & at if (mine & at).any() else mine for mine in rows_of_benchmark]
        return np.array([(self.occurrence[r] / full).mean(axis=0) for r in rows])

    def at_default(self) -> npt.NDArray[np.bool_]:
        """Mark the rows at the default clocks; none where no default is known."""
        if self.default_hz is None:
            return np.zeros(self.rows, dtype=bool)
        core_hz, memory_hz = self.default_hz
        return np.asarray((self.clock_hz == core_hz) & (self.memory_clock_hz == memory_hz))


def _check_counts(where: str, value: Array) -> None:
    """Refuse a column of counts that is not finite, negative or constant."""
    if not np.isfinite(value).all():
        row = int(np.argmin(np.isfinite(value)))
        raise bad_value(f"{where}, row {row + 1}", "a finite number", "none")
    if (value < 0).any():
        row = int(np.argmax(value < 0))
        raise bad_value(f"{where}, row {row + 1}", "zero or more", float(value.min()))
    if value.max() == value.min():
        raise bad_value(
            where,
            "values that differ between rows",
            f"{value[0]:.4g} in all {value.size}",
            "A constant column says nothing: leave it out of the map, or measure "
            "benchmarks that vary it.",
        )


def check_wrapped_counter(
    where: str,
    column: str,
    count: Array,
    work: Sequence[str],
    windows: bool = False,
) -> None:
    """Refuse counts that exceeded the width of a counter and wrapped.

    The same work counts the same at every clock, so rows of one benchmark that differ by about 2^32
    (or 2^31, 2^40, 2^48) show a wrap; so does a negative count. In ``windows`` of fixed length the
    work done follows the clock, so only negative counts are refused there."""
    if (count < 0).any():
        row = int(np.argmax(count < 0))
        do = "A counter that wrapped or was read twice: measure this row again."
        raise bad_value(
            f"{where}: column {column!r}, row {row + 1}",
            "counts, zero or more",
            float(count[row]),
            do,
        )
    labels = np.asarray(work)
    for name in () if windows else dict.fromkeys(work):
        same = count[labels == name]
        gap = same.max() - same
        for width in COUNTER_WIDTHS:
            wrapped = np.abs(gap - width) < 0.02 * width
            if wrapped.any() and same.max() > 0.5 * width:
                raise BadInput(
                    f"{where}: column {column!r} wrapped: rows of {clip_text(name)!r} differ by "
                    f"{width:.0f}, the width of a counter. Read it more often, or add "
                    f"{width:.0f} to the low rows."
                )


MOST_MAP_BYTE = 1 << 20


class _MeasuredColumn(msgspec.Struct, forbid_unknown_fields=True):
    column: str
    unit: str


class _GroupColumn(msgspec.Struct, forbid_unknown_fields=True):
    column: str
    before: str = ""


class _DefaultClocks(msgspec.Struct, forbid_unknown_fields=True):
    clock: str
    memory_clock: str


class _EventColumns(msgspec.Struct, forbid_unknown_fields=True):
    column: str | list[str]
    times: list[str | None] = []
    from_: float | None = msgspec.field(default=None, name="from")
    scale: float = 1.0
    rate: bool = False
    rail: str = ""
    family: str = ""
    full: float | None = None


class ColumnMap(msgspec.Struct, forbid_unknown_fields=True):
    """The meaning of each column of a table."""

    benchmark: str
    power: _MeasuredColumn
    events: dict[str, _EventColumns]
    duration: _MeasuredColumn | None = None
    group: _GroupColumn | None = None
    clock: _MeasuredColumn | str | None = None
    memory_clock: _MeasuredColumn | str | None = None
    default: _DefaultClocks | None = None
    voltage: dict[str, _MeasuredColumn] = {}
    rails: dict[str, _MeasuredColumn] = {}
    left_out: dict[str, str] = {}
    test: list[str] = []
    choose_on: str = ""
    awake: str = ""


@dataclass(frozen=True)
class CounterRates:
    """Rows of counters that a model is applied to: any number of them, with watts or without."""

    names: tuple[str, ...]
    clock_hz: Array  # (row,)
    memory_clock_hz: Array  # (row,)
    duration_s: Array  # (row,), a second where the source does not say
    occurrence: Array  # (row, predictor) per second; as it is for a mean
    predictors: tuple[CounterPredictor, ...]
    power_w: Array | None  # (row,)


def read_counter_rates(path: Path, columns: Path) -> CounterRates:
    """Read rows to apply a model to; the power column of the map may be missing from the table."""
    frame = _read_frame(path)
    column_map = read_column_map(columns)
    if frame.height == 0:
        raise bad_value(path.name, "rows", "none")
    reader = _ColumnReader(frame, column_map, path.name)
    work = reader.read_texts(column_map.benchmark)
    clock_hz = reader.read_clock(column_map.clock, "clock")
    power_w = None
    if column_map.power.column in frame.columns:
        power_w = reader.read_quantity(column_map.power, "W", "power")
    duration_s = np.ones(frame.height)
    if column_map.duration is not None:
        duration_s = reader.read_duration_s(clock_hz, "all")
    return CounterRates(
        names=tuple(work),
        clock_hz=clock_hz,
        memory_clock_hz=reader.read_clock(column_map.memory_clock, "memory_clock"),
        duration_s=duration_s,
        occurrence=reader.read_events(clock_hz, work),
        predictors=_list_predictors(column_map),
        power_w=power_w,
    )


def _list_predictors(columns: ColumnMap) -> tuple[CounterPredictor, ...]:
    """Return the predictor of each event of a map, in its order."""
    return tuple(_make_predictor(name, event) for name, event in columns.events.items())


def _make_predictor(name: str, event: _EventColumns) -> CounterPredictor:
    rail = event.rail or ("memory" if known_events()[name].module == "dram" else "core")
    source = event.column if isinstance(event.column, str) else " + ".join(event.column)
    return CounterPredictor(
        name,
        rail,
        event.family,
        source,
        event.full,
    )


def read_counter_table(path: Path, columns: Path) -> CounterTable:
    """Read the table at ``path``, CSV or Parquet, with the column map at ``columns``."""
    return build_counter_table(_read_frame(path), read_column_map(columns), path.name)


def _read_frame(path: Path) -> pl.DataFrame:
    polars = import_polars()
    data = read_bytes(path)
    try:
        is_parquet = path.suffix.lower() == ".parquet"
        with catch_panics():
            frame: pl.DataFrame
            if is_parquet:
                frame = polars.read_parquet(data)
            else:
                frame = polars.read_csv(data, infer_schema_length=None)
    except (polars.exceptions.PolarsError, OSError) as error:
        why = clip_text(str(error).splitlines()[0], 160)
        raise BadInput(f"{path.name}: not a readable CSV or Parquet table ({why}).") from None
    return frame


def read_column_map(path: Path) -> ColumnMap:
    """Read a column map: a file, or the name of one that ships."""
    shipped = files("wattcast.lab.counter_models").joinpath("columns", f"{path.name}.yaml")
    if not path.exists() and len(path.parts) == 1 and shipped.is_file():
        return decode_yaml(shipped.read_bytes(), ColumnMap, f"{path.name}.yaml")
    return decode_yaml(read_bytes(path, MOST_MAP_BYTE), ColumnMap, path.name)


def build_counter_table(
    frame: pl.DataFrame,
    columns: ColumnMap,
    where: str,
) -> CounterTable:
    """Return the table of a data frame by a column map; every bad cell is named."""
    if frame.height == 0:
        raise bad_value(where, "rows", "none")
    if not columns.events:
        raise bad_value(f"{where}: events", "at least one event", "none")
    check_names("rail", (*columns.voltage, *columns.rails), RAILS, "")
    reader = _ColumnReader(frame, columns, where)
    work = reader.read_texts(columns.benchmark)
    clock_hz = reader.read_clock(columns.clock, "clock")
    memory_clock_hz = reader.read_clock(columns.memory_clock, "memory_clock")
    names, benchmark = index_distinct(work)
    group_names, group = index_distinct(reader.read_groups(work, names))
    left_out = {}
    for name, reason in columns.left_out.items():
        left_out[name] = reason if name in names else "it is not in the table"
    awake_per_s = None
    if columns.awake:
        awake_per_s = units.parse(columns.awake, "byte/s", f"{where}: awake")
    return CounterTable(
        name=where,
        power_w=reader.read_quantity(columns.power, "W", "power"),
        clock_hz=clock_hz,
        memory_clock_hz=memory_clock_hz,
        occurrence=reader.read_events(clock_hz, work),
        predictors=_list_predictors(columns),
        benchmark=benchmark,
        benchmark_names=tuple(names),
        group=group,
        group_names=tuple(group_names),
        default_hz=_parse_default_clocks(columns.default, where),
        voltage_v=reader.read_rails(columns.voltage, "V", "voltage"),
        rail_w=reader.read_rails(columns.rails, "W", "rails"),
        left_out=left_out,
        test=tuple(columns.test),
        choose_on=columns.choose_on,
        awake_per_s=awake_per_s,
        duration_s=reader.read_duration_s(clock_hz, "all") if columns.duration else None,
        notes=("Activity was counted at every row's own clocks; nothing is scaled.",),
    )


def _parse_default_clocks(
    clocks: _DefaultClocks | None,
    where: str,
) -> tuple[float, float] | None:
    """Return the core and memory clock at which users run, where the map says."""
    if clocks is None:
        return None
    place = f"{where}: default"
    return (
        units.parse(clocks.clock, "Hz", place),
        units.parse(clocks.memory_clock, "Hz", place),
    )


class _ColumnReader(NamedTuple):
    """Reads columns of a data frame in the units of a column map."""

    frame: pl.DataFrame
    map: ColumnMap
    where: str

    def read_groups(
        self,
        work: Sequence[str],
        names: Sequence[str],
    ) -> list[str]:
        """Return the group of each benchmark: its own name where the map has no groups."""
        column = self.map.group
        if column is None:
            return list(names)
        group_of_work = dict(zip(work, self.read_texts(column.column), strict=True))
        groups = [group_of_work[name] for name in names]
        if column.before:
            groups = [text.rpartition(column.before)[0] or text for text in groups]
        return groups

    def read_rails(
        self,
        columns: Mapping[str, _MeasuredColumn],
        unit: str,
        path: str,
    ) -> dict[str, Array]:
        """Return the measured quantity of each rail that the map names."""
        return {
            rail: self.read_quantity(measured, unit, f"{path}.{rail}")
            for rail, measured in columns.items()
        }

    def read_events(
        self,
        clock_hz: Array,
        work: Sequence[str],
    ) -> Array:
        """Return the occurrences of every event, ``(row, event)``."""
        columns = [
            self.read_event(name, event, clock_hz, work) for name, event in self.map.events.items()
        ]
        return np.stack(columns, axis=1)

    def read_event(
        self,
        name: str,
        event: _EventColumns,
        clock_hz: Array,
        work: Sequence[str],
    ) -> Array:
        """Return occurrences per second, or a mean as it is."""
        check_names("event", name, known_events(), "")
        sources = [event.column] if isinstance(event.column, str) else event.column
        factors = [*event.times, *(None,) * len(sources)][: len(sources)]
        total = np.zeros(self.frame.height)
        windows = False
        counted = not (known_events()[name].is_mean or event.rate)
        if counted and self.map.duration is not None and len(set(work)) > 1:
            lasted = self.read_numbers(self.map.duration.column)
            # rows are samples and no whole runs
            windows = bool(lasted.max() <= SAME_LENGTH * lasted.min())
        for source, factor in zip(sources, factors, strict=True):
            value = self.read_numbers(source)
            if counted:
                check_wrapped_counter(
                    self.where,
                    source,
                    value,
                    work,
                    windows,
                )
            total = total + value * (self.read_numbers(factor) if factor else 1.0)
        total = event.scale * (event.from_ - total if event.from_ is not None else total)
        return np.asarray(total / self.read_duration_s(clock_hz, name) if counted else total)

    def read_duration_s(
        self,
        clock_hz: Array,
        event: str,
    ) -> Array:
        measured = self.map.duration
        if measured is None:
            expectation = f"a column, to turn counts of {event} into rates"
            do = "Map the duration, or say `rate: true` for columns that are per second."
            raise bad_value(f"{self.where}: duration", expectation, "none", do)
        if measured.unit == "cycle":
            value = self.read_numbers(measured.column)
            duration_s = value / clock_hz
        else:
            value = duration_s = self.read_quantity(measured, "s", "duration")
        if not (value > 0).all():
            raise bad_value(
                f"{self.where}: column {measured.column!r}",
                "durations above zero",
                float(value.min()),
            )
        return np.asarray(duration_s)

    def read_clock(
        self,
        measured: _MeasuredColumn | str | None,
        name: str,
    ) -> Array:
        """Return Hz in every row; 1 Hz stands for an unknown clock, which then is the same
        everywhere.
        """
        if measured is None:
            lasts_cycles = self.map.duration is not None and self.map.duration.unit == "cycle"
            if name == "clock" and lasts_cycles:
                expectation = "the core clock, to turn cycles into seconds"
                raise bad_value(f"{self.where}: clock", expectation, "none")
            return np.ones(self.frame.height)
        if isinstance(measured, str):
            return np.full(self.frame.height, units.parse(measured, "Hz", f"{self.where}: {name}"))
        return self.read_quantity(measured, "Hz", name)

    def read_quantity(
        self,
        measured: _MeasuredColumn,
        unit: str,
        path: str,
    ) -> Array:
        conversion = units.factor(measured.unit)
        if conversion is None or conversion[0] != unit:
            raise bad_unit(f"{self.where}: {path}.unit", f"a unit of {unit}", measured.unit)
        with np.errstate(over="ignore"):
            values = self.read_numbers(measured.column) * conversion[1]
        if np.isinf(values).any():
            expectation = f"finite numbers in {measured.unit}"
            raise bad_value(f"{self.where}: {measured.column}", expectation, "larger ones")
        return values

    def read_numbers(self, column: str) -> Array:
        import polars as pl

        series = self.find_column(column)
        value = np.asarray(series.cast(pl.Float64, strict=False).to_numpy(), dtype=np.float64)
        bad = np.flatnonzero(~np.isfinite(value))
        if bad.size:
            where = f"{self.where}: column {column!r}, row {bad[0] + 1}"
            bad_text = clip_text(series[int(bad[0])])
            raise bad_value(
                where, "a finite number", bad_text, "Remove the row, or measure it again."
            )
        return np.array(value)

    def read_texts(self, column: str) -> list[str]:
        return [str(cell) for cell in self.find_column(column).to_list()]

    def find_column(self, name: str) -> pl.Series:
        if name not in self.frame.columns:
            close = nearest_names(name, self.frame.columns)
            hint = f"It has {clip_text(', '.join(self.frame.columns), 200)}."
            if close:
                hint = f"Closest: {', '.join(close)}."
            raise BadInput(f"{self.where}: missing column {clip_text(name)!r}. {hint}")
        return self.frame[name]
