"""Read counter traces of simulators in blocks of rows, so that memory stays flat however long the
trace is.

A trace is CSV with a header, plain or gzip; rows may end with a comma, and the simulator starts a
new gzip member for every row it writes. Files come from strangers: the length of a line, the
decompressed size and the compression ratio are bounded. A damaged trace still yields the rows
before the damage; then ``TraceFault`` names the place."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.errors import (
    BadInput,
    MissingEvents,
    bad_value,
    clip_text,
    nearest_names,
    unknown_name,
)
from wattcast.core.regular_files import cannot_read, open_regular
from wattcast.core.strict_files import read_shipped_table
from wattcast.hardware import OperatingPoint
from wattcast.power.activity import Activity, ActivitySource

MAX_TRACE_LINE_BYTE = 1 << 20
MAX_COUNTER_TRACE_BYTE = 64 << 30
# rows of digits stay below about 230:1 in deflate; runs of one byte reach 1032:1
MAX_GZIP_RATIO = 400.0
_RATIO_FROM_BYTE = 8 << 20  # a short file may compress as well as it likes
_GZIP_READ_BYTE = 1 << 12  # small: what follows a member is copied once for each member
BLOCK_BYTE = 8 << 20
_LOOK_AGAIN_S = 0.05  # how often a growing trace is looked at


class TraceFault(BadInput):
    """The error of a trace that cannot be read further; ``rows`` good rows came before."""

    def __init__(
        self,
        message: str,
        rows: int,
    ) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class TraceBlock:
    """Consecutive rows of a trace."""

    first: int  # index of the first row in the trace
    value: Array  # (row, column); each column is contiguous
    text: bytes  # these rows as they stand in the file

    def __len__(self) -> int:
        return int(self.value.shape[0])


@dataclass(frozen=True)
class TraceFile:
    """A trace whose header has been read."""

    path: Path
    columns: tuple[str, ...]
    is_gzip: bool
    follow_s: float = 0.0  # wait so long for a growing trace to grow on before its end is believed

    def blocks(self, block_byte: int = BLOCK_BYTE) -> Iterator[TraceBlock]:
        """Yield the rows in order, then raise ``TraceFault`` if the file is damaged."""
        rows = 0
        source = _read_lines(self.path, block_byte, self.follow_s)
        next(source)  # the header
        while True:
            try:
                text = next(source, None)
            except BadInput as fault:
                raise TraceFault(f"{fault} {rows} samples before it are good.", rows) from None
            if text is None:
                return
            value, complaint = _parse_rows(text, len(self.columns))
            if len(value):
                yield TraceBlock(
                    rows, value, text if complaint is None else _take_lines(text, len(value))
                )
                rows += len(value)
            if complaint is not None:
                where = f"{self.path.name}: line {rows + 2}"
                raise TraceFault(f"{where}: {complaint} {rows} samples before it are good.", rows)


def open_trace(path: Path, follow_s: float = 0.0) -> TraceFile:
    """Read the header of a trace and find out whether the file is compressed."""
    header = next(_read_lines(path, BLOCK_BYTE, follow_s))
    try:
        names = header.decode("ascii").strip().rstrip(",").split(",")
    except UnicodeDecodeError:
        raise bad_value(f"{path.name}: line 1", "counter names", "bytes that are no text") from None
    columns = tuple(name.strip() for name in names)
    if not all(columns):
        raise bad_value(
            f"{path.name}: line 1", "a name for every column", clip_text(header.decode("ascii"))
        )
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise bad_value(f"{path.name}: line 1", "each counter once", f"{', '.join(twice)} twice")
    return TraceFile(path, columns, _is_gzip(path), follow_s)


def _is_gzip(path: Path) -> bool:
    try:
        with open_regular(path) as stream:
            return stream.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise cannot_read(path, error) from error


def _read_lines(
    path: Path,
    block_byte: int,
    follow_s: float = 0.0,
) -> Iterator[bytes]:
    """Yield the header line, then blocks of whole lines."""
    _await_beginning(path, follow_s)
    read = _read_gzip if _is_gzip(path) else _read_plain
    incomplete = b""  # the beginning of a line whose end has not come yet
    total_byte = 0
    has_header = False
    for piece in read(path, block_byte, follow_s):
        data = piece
        total_byte += len(data)
        if total_byte > MAX_COUNTER_TRACE_BYTE:
            limit = f"at most {MAX_COUNTER_TRACE_BYTE} bytes when unpacked"
            raise bad_value(path.name, limit, "more", "Cut the trace in parts.")
        if not has_header and b"\n" in data:
            header, _, data = (incomplete + data).partition(b"\n")
            yield header
            incomplete = b""
            has_header = True
        end = data.rfind(b"\n") + 1 if has_header else 0
        if end:
            lines = data[:end]  # a slice of all of it is no copy
            yield incomplete + lines if incomplete else lines
            incomplete = data[end:]
        else:
            incomplete += data
        if len(incomplete) > MAX_TRACE_LINE_BYTE:
            limit = f"lines of at most {MAX_TRACE_LINE_BYTE} bytes"
            raise bad_value(path.name, limit, "a longer one")
    if not has_header:
        raise bad_value(path.name, "a header line", "no line at all")
    if incomplete.strip():
        yield incomplete + b"\n"


def _await_beginning(path: Path, follow_s: float) -> None:
    """Wait for a trace that grows until the simulator has begun to write, at most ``follow_s``."""
    until = time.monotonic() + follow_s
    while time.monotonic() < until and not (path.is_file() and path.stat().st_size > 1):
        time.sleep(_LOOK_AGAIN_S)


def _read_chunks(
    stream: BinaryIO,
    size: int,
    follow_s: float,
) -> Iterator[bytes]:
    """Yield what the file holds; of a growing one, yield nothing while it stands still, until
    ``follow_s`` passed.
    """
    until = time.monotonic() + follow_s
    while True:
        if data := stream.read(size):
            until = time.monotonic() + follow_s
            yield data
        elif time.monotonic() < until:
            yield b""
            time.sleep(_LOOK_AGAIN_S)
        else:
            return


def _read_plain(
    path: Path,
    block_byte: int,
    follow_s: float,
) -> Iterator[bytes]:
    with open_regular(path) as stream:
        for data in _read_chunks(stream, block_byte, follow_s):
            whole = not data or data.endswith(b"\n")
            yield data if whole else data + stream.readline(MAX_TRACE_LINE_BYTE + 1)


def _read_gzip(
    path: Path,
    block_byte: int,
    follow_s: float,
) -> Iterator[bytes]:
    """Decompress member after member, handing out pieces of about ``block_byte``."""
    read_byte = 0
    written_byte = 0
    piece = bytearray()
    is_inside = False  # of a member: ending there is no clean end
    engine = zlib.decompressobj(wbits=31)
    with open_regular(path) as stream:
        for chunk in _read_chunks(stream, _GZIP_READ_BYTE, follow_s):
            data = chunk
            read_byte += len(data)
            if not data:  # a growing trace stands still: hand on what is there
                yield bytes(piece)
                piece.clear()
            while data:
                try:
                    output = engine.decompress(data, block_byte)
                except zlib.error as error:
                    yield bytes(piece)
                    place = f"near byte {read_byte - len(data)}"
                    raise BadInput(f"{path.name}: damaged gzip {place} ({error}).") from None
                data = engine.unconsumed_tail
                is_inside = True
                piece += output
                written_byte += len(output)
                _check_gzip_ratio(path.name, read_byte, written_byte)
                if engine.eof:
                    data = engine.unused_data.lstrip(b"\0")  # members may be padded with zeros
                    engine = zlib.decompressobj(wbits=31)
                    is_inside = False
                if len(piece) >= block_byte:
                    yield bytes(piece)
                    piece.clear()
    yield bytes(piece)
    if is_inside:
        raise BadInput(
            f"{path.name}: the gzip data break off at byte {read_byte}. Was the simulator stopped?"
        )


def _check_gzip_ratio(
    where: str,
    read_byte: int,
    written_byte: int,
) -> None:
    """Refuse data that unpack to more than a trace of numbers can."""
    if written_byte > _RATIO_FROM_BYTE and written_byte > MAX_GZIP_RATIO * read_byte:
        raise bad_value(
            where,
            f"gzip data of at most {MAX_GZIP_RATIO:.0f}:1",
            f"{written_byte / read_byte:.0f}:1",
            "This is no counter trace; unpack it yourself if you trust it.",
        )


def _parse_rows(text: bytes, count: int) -> tuple[Array, str | None]:
    """Return rows of ``count`` numbers up to the first bad line, and the complaint about that line.

    Only a block that polars refuses, or in which something is wrong, is read line by line.
    """
    value = _parse_block(text, count)
    if value is not None:
        return value, None
    rows: list[list[float]] = []
    complaint = None
    for line in text.split(b"\n")[:-1]:
        try:
            rows.append(_parse_row(line, count))
        except BadInput as error:
            complaint = str(error)
            break
    return np.array(rows, dtype=np.float64).reshape(len(rows), count), complaint


def _parse_block(text: bytes, count: int) -> Array | None:
    """Return the numbers of a whole block at once, or None where anything is wrong with it."""
    import polars as pl

    schema: dict[str, type[pl.DataType]] = {f"c{i}": pl.Float64 for i in range(count)}
    first_line = text[: text.find(b"\n")].rstrip()
    has_end_comma = first_line.endswith(b",")
    if has_end_comma:
        schema["end"] = pl.String
    if first_line.count(b",") != len(schema) - 1:
        return None
    try:
        frame = pl.read_csv(
            text,
            has_header=False,
            schema=schema,
            quote_char=None,
        )
        value = frame.select(list(schema)[:count]).to_numpy(order="fortran")
    except pl.exceptions.PolarsError:
        return None
    if has_end_comma and frame["end"].null_count() != frame.height:
        return None
    # a cell that is missing has become NaN
    is_good = np.isfinite(value.T.sum()) and value.T.min(initial=0.0) >= 0.0
    return value if is_good else None


def _parse_row(line: bytes, count: int) -> list[float]:
    """Return the counters of one line, or raise BadInput with the complaint about it."""
    cells = line.strip().decode("ascii", "replace").split(",")
    if len(cells) > 1 and not cells[-1].strip():
        cells.pop()
    if cells == [""]:
        raise BadInput(f"expected {count} counters, got an empty line.")
    if len(cells) != count:
        raise BadInput(f"expected {count} counters, got {len(cells)}.")
    row: list[float] = []
    for cell in cells:
        try:
            counter = float(cell)
        except ValueError:
            raise BadInput(f"expected numbers, got {clip_text(cell)!r}.") from None
        if not (np.isfinite(counter) and counter >= 0.0):
            raise BadInput(f"expected finite counters, zero or more, got {clip_text(cell)}.")
        row.append(counter)
    return row


def _take_lines(text: bytes, count: int) -> bytes:
    return b"\n".join(text.split(b"\n", count)[:count]) + b"\n"


class SimulatorDialect(StrEnum):
    """The simulator whose counters and components a file uses."""

    GPUWATTCH = "gpuwattch"
    ACCELWATTCH = "accelwattch"


@dataclass(frozen=True)
class SimulatorCounter:
    """One counter, which is one column of a metric trace."""

    column: str
    event: str  # empty: the column carries no information
    scaling: str  # its scaling factor in the architecture file
    prescaled: bool  # the simulator has multiplied by that factor already


CYCLES = "CYCLES"
CLOCK = "CORE_CLOCK_MHZ"
VOLTAGE = "CORE_VOLTAGE_V"
THREADS = "THREADS_PER_WARP"
INSTRUCTIONS = "INSTRUCTIONS"
OPTIONAL_COLUMNS = (CYCLES, CLOCK, VOLTAGE, THREADS, INSTRUCTIONS)
CUSTOM_EVENTS = tuple(f"custom_{i}" for i in range(1, 9))


@cache
def dialect_counters(dialect: SimulatorDialect) -> tuple[SimulatorCounter, ...]:
    """Return the counters of a dialect in the order its simulator writes them."""
    rows = read_shipped_table("wattcast.lab.gpuwattch", f"map_{dialect}.csv")
    return tuple(
        SimulatorCounter(r["column"], r["event"], r["scaling"], r["prescaled"] == "yes")
        for r in rows
    )


@dataclass(frozen=True)
class TraceSampling:
    """The length of a sample and its clock and voltage: fixed, or in steps that start at given
    samples.
    """

    sample_cycle: float
    clock_hz: float
    first: Array = field(default_factory=lambda: np.zeros(0))  # first sample of each step, rising
    step_clock_hz: Array = field(default_factory=lambda: np.zeros(0))
    step_voltage_v: Array = field(default_factory=lambda: np.zeros(0))  # NaN: not known

    def __post_init__(self) -> None:
        if not (np.isfinite(self.sample_cycle) and self.sample_cycle > 0):
            raise bad_value("sample length", "cycles above zero", self.sample_cycle)
        if not (np.isfinite(self.clock_hz) and self.clock_hz > 0):
            raise bad_value("core clock", "a clock above zero", self.clock_hz)
        if self.first.size and not ((np.diff(self.first) > 0).all() and self.first[0] == 0):
            raise bad_value("clock steps", "rising sample numbers from 0 on", self.first.tolist())

    def settings_at(self, sample: Array) -> tuple[Array, Array]:
        """Return clock and voltage (NaN where unknown) of each sample number."""
        if not self.first.size:
            return np.full(sample.shape, self.clock_hz), np.full(sample.shape, np.nan)
        step = np.searchsorted(self.first, sample, side="right") - 1
        return self.step_clock_hz[step], self.step_voltage_v[step]


@dataclass(frozen=True)
class MetricTrace:
    """A metric trace whose columns are resolved to events."""

    file: TraceFile
    dialect: SimulatorDialect
    events: tuple[str, ...]
    columns: tuple[int, ...]  # of those events
    divisor: Array  # of those events: the scaling factor already applied, or 1
    optional: Mapping[str, int]  # optional columns that are there

    def blocks(self) -> Iterator[TraceBlock]:
        """Yield the rows in order; a row without cycles, clock or voltage is a fault like any
        other.
        """
        for block in self.file.blocks():
            bad = np.zeros(len(block), dtype=np.bool_)
            for name in (CYCLES, CLOCK, VOLTAGE):
                if name in self.optional:
                    bad |= block.value[:, self.optional[name]] <= 0
            if bad.any():
                row = int(np.argmax(bad))
                if row:
                    yield TraceBlock(block.first, block.value[:row], _take_lines(block.text, row))
                good = block.first + row
                raise TraceFault(
                    f"{self.file.path.name}: line {good + 2}: expected cycles, a clock and "
                    "a voltage above zero, "
                    f"got a sample without. {good} samples before it are good.",
                    good,
                )
            yield block

    def activity(
        self,
        block: TraceBlock,
        sampling: TraceSampling,
        sample: Array | None = None,
    ) -> Activity:
        """Return the rows of a block as intervals; ``sample`` numbers them (default: the row)."""
        if sample is None:
            sample = np.arange(block.first, block.first + len(block), dtype=np.float64)
        clock_hz, voltage_v = sampling.settings_at(sample)
        if CLOCK in self.optional:
            clock_hz = 1e6 * self.column(block, CLOCK)
        cycles: Array | float = sampling.sample_cycle
        if CYCLES in self.optional:
            cycles = self.column(block, CYCLES)
        added = {}
        if VOLTAGE in self.optional:
            added["core_voltage"] = self.column(block, VOLTAGE)
        elif not np.isnan(voltage_v).any():
            added["core_voltage"] = voltage_v
        if THREADS in self.optional:
            added["active_thread"] = self.column(block, THREADS)
        return Activity(
            cycles / clock_hz,
            self._unscaled_values(block, added),
            (*self.events, *added),
            OperatingPoint(clock_hz=clock_hz),
            ActivitySource.SIMULATED,
        )

    def _unscaled_values(
        self,
        block: TraceBlock,
        added: Mapping[str, Array],
    ) -> Array:
        """Return the counts of all events without applied factors; a plain block is not copied."""
        is_unscaled = bool((self.divisor == 1.0).all())
        if is_unscaled and self.columns == tuple(range(len(self.columns))) and not added:
            return block.value[:, : len(self.columns)]
        unscaled = []
        for column, divisor in zip(self.columns, self.divisor, strict=True):
            unscaled.append(block.value[:, column] / divisor)
        return np.stack([*unscaled, *added.values()]).T

    def column(
        self,
        block: TraceBlock,
        name: str,
    ) -> Array:
        """Return the values of an optional column that the file has."""
        return block.value[:, self.optional[name]]


def open_metric_trace(
    path: Path,
    dialect: SimulatorDialect,
    scaling: Mapping[str, float] | None = None,
    custom: Mapping[str, str] | None = None,
    follow_s: float = 0.0,
) -> MetricTrace:
    """Open a metric trace and find the event of every column.

    ``scaling`` holds the architecture file's factors, for counters that the simulator wrote already
    scaled. ``custom`` maps further columns to ``custom_1`` and so on. An unknown column and a
    missing counter of the dialect are errors: a missing counter is not a zero. A trace that grows
    is read on until ``follow_s`` pass without a row."""
    file = open_trace(path, follow_s)
    counters = {counter.column: counter for counter in dialect_counters(dialect)}
    custom = custom or {}
    column_of_event: dict[str, int] = {}
    divisor: list[float] = []
    for place, column in enumerate(file.columns):
        counter = counters.get(column)
        event = counter.event if counter else custom.get(column, "")
        if event:
            column_of_event[event] = place
            divisor.append(_applied_factor(counter, scaling or {}))
        elif counter is None and column not in OPTIONAL_COLUMNS:
            do = (
                "Name it in a component file (--components), or drop it. This is read as "
                f"{dialect}."
            )
            readable = [*counters, *custom, *OPTIONAL_COLUMNS]
            raise unknown_name(f"counter in {path.name}", column, readable, do)
    _check_complete(file, dialect)
    optional = {name: file.columns.index(name) for name in OPTIONAL_COLUMNS if name in file.columns}
    return MetricTrace(
        file,
        dialect,
        tuple(column_of_event),
        tuple(column_of_event.values()),
        np.array(divisor),
        optional,
    )


def _applied_factor(counter: SimulatorCounter | None, scaling: Mapping[str, float]) -> float:
    """Return the factor that the simulator has multiplied a counter by, 1 where it has not."""
    if counter is None or not counter.prescaled:
        return 1.0
    if counter.scaling not in scaling:
        do = "Give the architecture file the simulator ran with."
        raise bad_value(f"scaling factor of {counter.column}", "a number", "none", do)
    factor = scaling[counter.scaling]
    return factor if factor > 0 else 1.0  # a factor of zero leaves only zeros, which stay


def _check_complete(file: TraceFile, dialect: SimulatorDialect) -> None:
    """Refuse a trace in which a counter of the dialect is missing."""
    needed = [counter.column for counter in dialect_counters(dialect) if counter.event]
    missing = [column for column in needed if column not in file.columns]
    if not missing:
        return
    close: list[str] = []
    for column in missing:
        close += nearest_names(column, file.columns, 1)
    hint = f" It has {', '.join(close)}." if close else ""
    raise MissingEvents(
        f"{file.path.name}: {dialect} counters {', '.join(missing)} are missing.{hint} "
        "A missing counter is not a zero: write the column, or choose the other dialect."
    )
