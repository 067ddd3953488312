"""Counter traces of simulators, plain or gzip, as blocks of rows: columnar, and flat in memory however long.

A trace is CSV with a header; rows may end with a comma, and the simulator starts a new gzip member for
every row it writes. The file is a stranger's: the length of a line, the decompressed size and the
compression ratio are bounded. A fault ends the trace, not the work: the rows before it have been handed
out by then, and :class:`TraceFault` names the place.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import BadInput, bad_value, clip

MAX_LINE_BYTE = 1 << 20
MAX_TRACE_BYTE = 64 << 30
MAX_RATIO = 400.0  # rows of digits stay below about 230:1 in deflate; runs of one byte reach 1032:1
_RATIO_FROM_BYTE = 8 << 20  # a short file may compress as well as it likes
_GZIP_READ_BYTE = 1 << 12  # small: what follows a member is copied once for each member
BLOCK_BYTE = 8 << 20


class TraceFault(BadInput):
    """A trace that cannot be read on. ``rows`` good rows came before."""

    def __init__(self, message: str, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a trace."""

    first: int  # index of the first row in the trace
    value: Array  # (row, column); each column is contiguous
    text: bytes  # the same rows as they stand in the file

    def __len__(self) -> int:
        return int(self.value.shape[0])

    def head(self, rows: int) -> Block:
        """The first ``rows`` rows."""
        return Block(self.first, self.value[:rows], _first_lines(self.text, rows))


@dataclass(frozen=True)
class TraceFile:
    """A trace whose header has been read."""

    path: Path
    columns: tuple[str, ...]
    is_gzip: bool

    def blocks(self, block_byte: int = BLOCK_BYTE) -> Iterator[Block]:
        """The rows in order, then :class:`TraceFault` if the file is not whole."""
        rows = 0
        source = _lines(self.path, block_byte)
        next(source)  # the header
        while True:
            try:
                text = next(source, None)
            except BadInput as fault:
                raise TraceFault(f"{fault} {rows} samples before it are good.", rows) from None
            if text is None:
                return
            value, complaint = _parse(text, len(self.columns))
            if len(value):
                yield Block(rows, value, text if complaint is None else _first_lines(text, len(value)))
                rows += len(value)
            if complaint is not None:
                line = rows + 2
                where = f"{self.path.name}: line {line}"
                raise TraceFault(f"{where}: {complaint} {rows} samples before it are good.", rows)


def open_trace(path: Path) -> TraceFile:
    """Read the header of a trace and find out whether it is compressed."""
    header = next(_lines(path, BLOCK_BYTE))
    try:
        names = header.decode("ascii").strip().rstrip(",").split(",")
    except UnicodeDecodeError:
        raise bad_value(f"{path.name}: line 1", "counter names", "bytes that are no text") from None
    columns = tuple(name.strip() for name in names)
    if not all(columns):
        raise bad_value(f"{path.name}: line 1", "a name for every column", clip(header.decode("ascii")))
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise bad_value(f"{path.name}: line 1", "each counter once", f"{', '.join(twice)} twice")
    return TraceFile(path, columns, _is_gzip(path))


def _is_gzip(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise BadInput(f"{clip(str(path), 200)}: cannot be read ({error.strerror or error}).") from error


def _lines(path: Path, block_byte: int) -> Iterator[bytes]:
    """The header line, then blocks of whole lines."""
    pieces = _gunzip(path, block_byte) if _is_gzip(path) else _plain(path, block_byte)
    rest, header_sent, ended = b"", False, False
    fault: BadInput | None = None
    while not ended:
        try:
            piece = next(pieces, None)
        except BadInput as error:
            piece, fault = None, error
        data, ended = piece or b"", piece is None
        if not header_sent and b"\n" in data:
            line, _, data = (rest + data).partition(b"\n")
            yield line
            rest, header_sent = b"", True
        cut = data.rfind(b"\n") + 1 if header_sent else 0
        if cut:
            yield rest + data[:cut] if rest else data[:cut]  # a slice of all of it is no copy
            rest = data[cut:]
        else:
            rest += data
        if len(rest) > MAX_LINE_BYTE:
            raise bad_value(path.name, f"lines of at most {MAX_LINE_BYTE} bytes", "a longer one")
        if fault is not None:
            raise fault
    if not header_sent:
        raise bad_value(path.name, "a header line", "no line at all")
    if rest.strip():
        yield rest + b"\n"


def _plain(path: Path, block_byte: int) -> Iterator[bytes]:
    total = 0
    with path.open("rb") as stream:
        while data := stream.read(block_byte):
            if not data.endswith(b"\n"):
                data += stream.readline(MAX_LINE_BYTE + 1)
            total += len(data)
            if total > MAX_TRACE_BYTE:
                raise bad_value(path.name, f"at most {MAX_TRACE_BYTE} bytes", "more", "Cut the trace in parts.")
            yield data


def _gunzip(path: Path, block_byte: int) -> Iterator[bytes]:
    """Decompress member after member, handing out pieces of about ``block_byte``."""
    read = written = held = 0
    inside = False  # of a member: ending there is no clean end
    parts: list[bytes] = []
    engine = zlib.decompressobj(wbits=31)
    with path.open("rb") as stream:
        while data := stream.read(_GZIP_READ_BYTE):
            read += len(data)
            while data:
                try:
                    out = engine.decompress(data, block_byte)
                except zlib.error as error:
                    yield b"".join(parts)
                    raise BadInput(f"{path.name}: damaged gzip near byte {read - len(data)} ({error}).") from None
                data, inside = engine.unconsumed_tail, True
                parts.append(out)
                written, held = written + len(out), held + len(out)
                _check_bomb(path, read, written)
                if engine.eof:
                    data = engine.unused_data.lstrip(b"\0")  # zero padding between members is allowed
                    engine, inside = zlib.decompressobj(wbits=31), False
                if held >= block_byte:
                    yield b"".join(parts)
                    parts, held = [], 0
    yield b"".join(parts)
    if inside:
        raise BadInput(f"{path.name}: the gzip data break off at byte {read}. Was the simulator stopped?")


def _check_bomb(path: Path, read: int, written: int) -> None:
    if written > MAX_TRACE_BYTE:
        raise bad_value(path.name, f"at most {MAX_TRACE_BYTE} bytes when unpacked", "more", "Cut the trace in parts.")
    if written > _RATIO_FROM_BYTE and written > MAX_RATIO * read:
        do = "This is no counter trace; unpack it yourself if you trust it."
        raise bad_value(path.name, f"gzip data of at most {MAX_RATIO:.0f}:1", f"{written / read:.0f}:1", do)


def _parse(text: bytes, count: int) -> tuple[Array, str | None]:
    """Rows of ``count`` numbers, up to the first line that is none, and what is wrong with that line."""
    value = _parse_fast(text, count)
    return (value, None) if value is not None else _parse_slow(text, count)


def _parse_fast(text: bytes, count: int) -> Array | None:
    import polars as pl

    schema: dict[str, type[pl.DataType]] = {f"c{i}": pl.Float64 for i in range(count)}
    first = text[: text.find(b"\n")].rstrip()
    if first.endswith(b","):
        schema["end"] = pl.String
    if first.count(b",") != len(schema) - 1:
        return None
    try:
        frame = pl.read_csv(text, has_header=False, schema=schema, quote_char=None)
    except pl.exceptions.PolarsError:
        return None
    if "end" in schema and frame["end"].null_count() != frame.height:
        return None
    value = frame.select(list(schema)[:count]).to_numpy(order="fortran")  # what is missing becomes NaN
    if not np.isfinite(value.T.sum()) or value.T.min(initial=0.0) < 0.0:
        return None
    return value


def _parse_slow(text: bytes, count: int) -> tuple[Array, str | None]:
    """Line by line, only for a block in which something is wrong."""
    rows: list[list[float]] = []
    complaint = None
    for line in text.split(b"\n")[:-1]:
        complaint = _row(line, count, rows)
        if complaint is not None:
            break
    return np.array(rows, dtype=np.float64).reshape(len(rows), count), complaint


def _row(line: bytes, count: int, rows: list[list[float]]) -> str | None:
    fields = line.strip().decode("ascii", "replace").split(",")
    if len(fields) > 1 and not fields[-1].strip():
        fields.pop()
    if fields == [""]:
        return f"expected {count} counters, got an empty line."
    if len(fields) != count:
        return f"expected {count} counters, got {len(fields)}."
    try:
        row = [float(field) for field in fields]
    except ValueError:
        bad = next(field for field in fields if not _is_number(field))
        return f"expected numbers, got {clip(bad)!r}."
    if not all(np.isfinite(x) and x >= 0.0 for x in row):
        bad = next(field for field, x in zip(fields, row, strict=True) if not (np.isfinite(x) and x >= 0.0))
        return f"expected finite counters, zero or more, got {clip(bad)}."
    rows.append(row)
    return None


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _first_lines(text: bytes, count: int) -> bytes:
    return b"\n".join(text.split(b"\n", count)[:count]) + b"\n"
