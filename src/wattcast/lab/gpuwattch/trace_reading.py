"""Read counter traces of simulators in blocks of rows, so that memory stays flat however long the
trace is.

A trace is CSV with a header, plain or gzip; rows may end with a comma, and the simulator starts a
new gzip member for every row it writes. Files come from strangers: the length of a line, the
decompressed size and the compression ratio are bounded. A damaged trace still yields the rows
before the damage; then ``TraceFault`` names the place."""

from __future__ import annotations

import contextlib
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
MAX_GZIP_RATIO = (
    400.0  # rows of digits stay below about 230:1 in deflate; runs of one byte reach 1032:1
)
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
    until = time.monotonic() + follow_s
    while time.monotonic() < until and not (path.is_file() and path.stat().st_size > 1):
        time.sleep(_LOOK_AGAIN_S)  # the simulator has not begun to write
    read = _read_gzip if _is_gzip(path) else _read_plain
    pieces = read(path, block_byte, follow_s)
    rest = b""
    total = 0
    header_sent = False
    ended = False
    fault: BadInput | None = None
    while not ended:
        try:
            piece = next(pieces, None)
        except BadInput as error:
            piece = None
            fault = error
        data = piece or b""
        ended = piece is None
        total += len(data)
        if total > MAX_COUNTER_TRACE_BYTE:
            wanted = f"at most {MAX_COUNTER_TRACE_BYTE} bytes when unpacked"
            raise bad_value(path.name, wanted, "more", "Cut the trace in parts.")
        if not header_sent and b"\n" in data:
            line, _, data = (rest + data).partition(b"\n")
            yield line
            rest = b""
            header_sent = True
        cut = data.rfind(b"\n") + 1 if header_sent else 0
        if cut:
            yield rest + data[:cut] if rest else data[:cut]  # a slice of all of it is no copy
            rest = data[cut:]
        else:
            rest += data
        if len(rest) > MAX_TRACE_LINE_BYTE:
            raise bad_value(
                path.name, f"lines of at most {MAX_TRACE_LINE_BYTE} bytes", "a longer one"
            )
        if fault is not None:
            raise fault
    if not header_sent:
        raise bad_value(path.name, "a header line", "no line at all")
    if rest.strip():
        yield rest + b"\n"


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
    read = written = held = 0
    inside = False  # of a member: ending there is no clean end
    parts: list[bytes] = []
    engine = zlib.decompressobj(wbits=31)
    with open_regular(path) as stream:
        for data in _read_chunks(stream, _GZIP_READ_BYTE, follow_s):
            read += len(data)
            if not data:  # a growing trace stands still: hand on what is there
                yield b"".join(parts)
                parts = []
                held = 0
            while data:
                try:
                    out = engine.decompress(data, block_byte)
                except zlib.error as error:
                    yield b"".join(parts)
                    raise BadInput(
                        f"{path.name}: damaged gzip near byte {read - len(data)} ({error})."
                    ) from None
                data = engine.unconsumed_tail
                inside = True
                parts.append(out)
                written = written + len(out)
                held = held + len(out)
                if written > _RATIO_FROM_BYTE and written > MAX_GZIP_RATIO * read:
                    wanted = f"gzip data of at most {MAX_GZIP_RATIO:.0f}:1"
                    do = "This is no counter trace; unpack it yourself if you trust it."
                    raise bad_value(path.name, wanted, f"{written / read:.0f}:1", do)
                if engine.eof:
                    data = engine.unused_data.lstrip(
                        b"\0"
                    )  # zero padding between members is allowed
                    engine = zlib.decompressobj(wbits=31)
                    inside = False
                if held >= block_byte:
                    yield b"".join(parts)
                    parts = []
                    held = 0
    yield b"".join(parts)
    if inside:
        raise BadInput(
            f"{path.name}: the gzip data break off at byte {read}. Was the simulator stopped?"
        )


def _parse_rows(text: bytes, count: int) -> tuple[Array, str | None]:
    """Return rows of ``count`` numbers up to the first bad line, and the complaint about that line.

    Only a block that polars refuses, or in which something is wrong, is read line by line.
    """
    import polars as pl

    schema: dict[str, type[pl.DataType]] = {f"c{i}": pl.Float64 for i in range(count)}
    first = text[: text.find(b"\n")].rstrip()
    if first.endswith(b","):
        schema["end"] = pl.String
    if first.count(b",") == len(schema) - 1:
        with contextlib.suppress(pl.exceptions.PolarsError):
            frame = pl.read_csv(
                text,
                has_header=False,
                schema=schema,
                quote_char=None,
            )
            value = frame.select(list(schema)[:count]).to_numpy(
                order="fortran"
            )  # what is missing becomes NaN
            ended = "end" not in schema or frame["end"].null_count() == frame.height
            if ended and np.isfinite(value.T.sum()) and value.T.min(initial=0.0) >= 0.0:
                return value, None
    rows: list[list[float]] = []
    complaint = None
    for line in text.split(b"\n")[:-1]:
        fields = line.strip().decode("ascii", "replace").split(",")
        if len(fields) > 1 and not fields[-1].strip():
            fields.pop()
        if len(fields) != count or fields == [""]:
            complaint = (
                f"expected {count} counters, got "
                f"{'an empty line' if fields == [''] else len(fields)}."
            )
            break
        row: list[float] = []
        for cell in fields:
            with contextlib.suppress(ValueError):
                row.append(float(cell))
                if np.isfinite(row[-1]) and row[-1] >= 0.0:
                    continue
                complaint = f"expected finite counters, zero or more, got {clip_text(cell)}."
            complaint = complaint or f"expected numbers, got {clip_text(cell)!r}."
            break
        if complaint is not None:
            break
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(len(rows), count), complaint


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
        index = (
            np.arange(block.first, block.first + len(block), dtype=np.float64)
            if sample is None
            else sample
        )
        clock_hz, voltage_v = sampling.settings_at(index)
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
        unscaled = bool((self.divisor == 1.0).all())
        if unscaled and self.columns == tuple(range(len(self.columns))) and not more:  # no copy
            value = block.value[:, : len(self.columns)]
        else:
            scaled = [
                block.value[:, c] / d for c, d in zip(self.columns, self.divisor, strict=True)
            ]
            value = np.stack([*scaled, *more.values()]).T
        return Activity(
            cycles / clock_hz, value, (*self.events, *more), at, ActivitySource.SIMULATED
        )

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
    known = {c.column: c for c in dialect_counters(dialect)}
    custom = custom or {}
    names: dict[str, int] = {}
    divisor: list[float] = []
    for i, column in enumerate(file.columns):
        counter = known.get(column)
        event = counter.event if counter else custom.get(column, "")
        if counter is None and not event and column not in OPTIONAL_COLUMNS:
            every = [*known, *custom, *OPTIONAL_COLUMNS]
            do = (
                "Name it in a component file (--components), or drop it. This is read as "
                f"{dialect}."
            )
            raise unknown_name(f"counter in {path.name}", column, every, do)
        if event:
            names[event] = i
            factor = (scaling or {}).get(counter.scaling) if counter and counter.prescaled else 1.0
            if factor is None:
                do = "Give the architecture file the simulator ran with."
                raise bad_value(f"scaling factor of {column}", "a number", "none", do)
            divisor.append(
                factor if factor > 0 else 1.0
            )  # a factor of zero leaves only zeros, which stay
    missing = [c.column for c in known.values() if c.event and c.column not in file.columns]
    if missing:
        close = [n for m in missing for n in nearest_names(m, file.columns, 1)]
        hint = f" It has {', '.join(close)}." if close else ""
        raise MissingEvents(
            f"{path.name}: {dialect} counters {', '.join(missing)} are missing.{hint} A "
            "missing counter is not a "
            f"zero: write the column, or choose the other dialect."
        )
    optional = {name: file.columns.index(name) for name in OPTIONAL_COLUMNS if name in file.columns}
    return MetricTrace(
        file, dialect, tuple(names), tuple(names.values()), np.array(divisor), optional
    )
