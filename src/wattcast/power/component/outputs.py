"""Files a trace run writes, row blocks at a time; nothing stays half written under its final name."""

from __future__ import annotations

import gzip
import importlib
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from wattcast.arrays import Array
from wattcast.errors import BadInput, MissingTool, clip
from wattcast.power.component.kernels import Mask


class Background:
    """Does things in order on another thread, at most ``waiting`` of them behind; an error comes back at the next."""

    def __init__(self, waiting: int = 2) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._jobs: deque[Future[None]] = deque()
        self._waiting = waiting

    def do(self, work: Callable[..., None], *arguments: object) -> None:
        """Queue ``work(*arguments)``; what it is given must not change any more."""
        self._jobs.append(self._pool.submit(work, *arguments))
        while len(self._jobs) > self._waiting:
            self._jobs.popleft().result()

    def drain(self) -> None:
        """Wait until all is done."""
        while self._jobs:
            self._jobs.popleft().result()

    def __enter__(self) -> Background:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


class TextFile:
    """A text file that grows, plain or gzip, beside its final name until it is whole."""

    def __init__(self, path: Path, compress: bool) -> None:
        self.path = path.with_name(path.name + ".gz") if compress else path
        self._part = self.path.with_name(f".{self.path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.stream: Any = _compressed(self._part) if compress else self._part.open("wb", buffering=0)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def write(self, data: bytes | str) -> None:
        """Append. The stream has no buffer of its own: polars writes to the same file directly."""
        view = memoryview(data.encode() if isinstance(data, str) else data)
        while view:
            view = view[self.stream.write(view) :]

    def __enter__(self) -> TextFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stream.close()
        if kind is None:
            os.replace(self._part, self.path)
        else:
            self._part.unlink(missing_ok=True)


def write_rows(file: TextFile, columns: Sequence[Array], trailing_comma: bool) -> None:
    """Rows of numbers with six decimals, as ``%f`` prints them."""
    import polars as pl

    frame = pl.DataFrame({f"c{i}": np.ascontiguousarray(column) for i, column in enumerate(columns)})
    if trailing_comma:
        frame = frame.with_columns(pl.lit(None, dtype=pl.String).alias("end"))
    frame.write_csv(file.stream, include_header=False, float_precision=6)


def write_text_rows(file: TextFile, text: bytes, drop: Mask, keep_comma: bool) -> None:
    """Rows as they stand in another file, without those of ``drop``."""
    if drop.any():
        stops = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n")) + 1
        starts = np.concatenate([[0], stops[:-1]])
        edges = np.flatnonzero(np.diff(np.concatenate([[1], drop, [1]])))  # kept runs lie between pairs of edges
        pieces = [text[starts[a] : stops[b - 1]] for a, b in zip(edges[0::2], edges[1::2], strict=True)]
        text = b"".join(pieces)
    file.write(text if keep_comma else text.replace(b",\n", b"\n"))


class ParquetTable:
    """Columns of every sample, streamed into one Parquet file."""

    def __init__(self, path: Path) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
            self._parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise MissingTool(
                "Parquet needs pyarrow. Install it (pip install pyarrow), or add --no-parquet."
            ) from None
        self.path = path
        self._part = path.with_name(f".{path.name}.part")
        self._writer: Any = None

    def write(self, columns: Mapping[str, Array]) -> None:
        """Append rows."""
        table = self._arrow.table({name: np.ascontiguousarray(values) for name, values in columns.items()})
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._part, table.schema, compression="zstd")
        self._writer.write_table(table)

    def __enter__(self) -> ParquetTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
            if kind is None:
                os.replace(self._part, self.path)
            else:
                self._part.unlink(missing_ok=True)


def _compressed(path: Path) -> gzip.GzipFile:
    return gzip.GzipFile(path, "wb", compresslevel=6)


def _cannot_write(path: Path, error: OSError) -> BadInput:
    return BadInput(f"{clip(str(path), 200)}: cannot be written ({error.strerror or error}).")
