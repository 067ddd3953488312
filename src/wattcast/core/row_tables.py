"""Keep measured rows in Parquet files, and find the kernel databases that ship with Wattcast.

Reading and writing Parquet needs polars, which is imported when a table is read or written.
"""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wattcast.core.column_ranges import check_table
from wattcast.core.errors import (
    BadInput,
    bad_value,
    clip_text,
    import_extra,
    unknown_name,
)
from wattcast.core.measured_rows import Plain
from wattcast.core.regular_files import open_regular

ROWS_FILE = "rows.parquet"
COUNTERS_FILE = "counters.parquet"
MODELS_FILE = "models.parquet"
MODEL_KERNELS_FILE = "model_kernels.parquet"
# One row for each step, run of traffic, idle period and engine.
STEPS_FILE = "engine_steps.parquet"
CHAINS_FILE = "chains.parquet"

_JSON_COLUMNS = ("operator", "detail")
_CHECKSUM_KEY = "wattcast.sha256"
# A table has at most this many bytes and values: a few bytes may claim billions of equal values.
_MOST_BYTE = 2**28
_MOST_VALUES = 2**25
# Standard error belongs to the process: one thread at a time may put another file in its place.
_STDERR_LOCK = threading.RLock()
_STDERR_HANDLE = 2
_LONGEST_STDERR_BYTE = 2**20


def database_folder(gpu: str) -> Path:
    """Return the folder of the kernel database that ships with Wattcast for ``gpu``."""
    folder = Path(__file__).parents[1] / "database" / gpu
    if not (folder / ROWS_FILE).exists():
        tables = folder.parent.glob(f"*/{ROWS_FILE}")
        names = sorted(path.parent.name for path in tables)
        raise unknown_name("kernel database", gpu, names, f"Known: {', '.join(names)}.")
    return folder


def read_table(path: Path, kind: str | None = None) -> list[Plain]:
    """Return the rows of a Parquet file of ours as mappings, JSON columns opened; needs polars.

    With ``kind``, only rows of this kind are returned: to make mappings of all takes a second.
    """
    polars = import_polars()
    try:
        with open_regular(path) as stream:
            data = stream.read(_MOST_BYTE)
        with catch_panics():
            rows = _decode_table(data, clip_text(path, 200), kind)
        for row in rows:
            for name in _JSON_COLUMNS:
                if isinstance(row.get(name), str):
                    row[name] = json.loads(row[name])
    except (OSError, ValueError, polars.exceptions.PolarsError) as error:
        reason = clip_text(error, 200)
        raise BadInput(f"{clip_text(path, 200)}: cannot be read as a table ({reason}).") from None
    return rows


def _decode_table(data: bytes, where: str, kind: str | None = None) -> list[Plain]:
    """Return the rows of a Parquet file once its checksum, size and columns are checked."""
    polars = import_polars()
    expected_checksum = polars.read_parquet_metadata(io.BytesIO(data)).get(_CHECKSUM_KEY)
    if expected_checksum is not None and expected_checksum != _columns_checksum(data):
        raise BadInput(f"{where}: damaged, its checksum differs. Pack the campaigns again.")

    lazy_table = polars.scan_parquet(io.BytesIO(data))
    row_count = lazy_table.select(polars.len()).collect().item()
    value_count = row_count * len(lazy_table.collect_schema())
    if value_count > _MOST_VALUES:
        raise bad_value(where, f"at most {_MOST_VALUES} values", f"{value_count} values")

    table = lazy_table.collect()
    check_table(table, where)
    if kind is not None:
        table = table.filter(polars.col("kind") == kind)
    rows: list[Plain] = table.to_dicts()
    return rows


@contextmanager
def catch_panics() -> Iterator[None]:
    """Raise ``OSError`` where polars panics on a damaged file.

    What the threads of polars print then does not reach standard error.
    """
    with _STDERR_LOCK:
        if hasattr(os, "memfd_create"):
            capture = os.memfd_create("stderr")
        else:
            capture = os.open(os.devnull, os.O_RDWR)
        real_stderr = -1
        try:
            real_stderr = os.dup(_STDERR_HANDLE)
            os.dup2(capture, _STDERR_HANDLE)
            yield
            os.write(real_stderr, os.pread(capture, _LONGEST_STDERR_BYTE, 0))
        except import_polars().exceptions.PanicException as error:
            raise OSError(f"polars panicked: {error}") from None
        finally:
            if real_stderr >= 0:
                os.dup2(real_stderr, _STDERR_HANDLE)
                os.close(real_stderr)
            os.close(capture)


def write_table(path: Path, rows: list[Plain]) -> None:
    """Write mappings as Parquet with a checksum, whole or not at all; needs polars.

    Nested mappings are written as JSON text.
    """
    from wattcast.core.whole_files import write_whole

    polars = import_polars()
    where = clip_text(path, 200)
    flat_rows = [_flatten_row(row) for row in rows]
    try:
        table = polars.DataFrame(flat_rows, infer_schema_length=None)
    except (TypeError, ValueError, OverflowError, polars.exceptions.PolarsError) as error:
        reason = clip_text(error, 200)
        raise BadInput(f"{where}: a column mixes kinds of values ({reason}).") from None
    check_table(table, where)

    # The checksum is that of the columns, so the file is encoded once without it.
    unsigned = io.BytesIO()
    table.write_parquet(unsigned, compression="zstd", compression_level=15)
    metadata = {_CHECKSUM_KEY: _columns_checksum(unsigned.getvalue())}
    signed = io.BytesIO()
    table.write_parquet(
        signed,
        compression="zstd",
        compression_level=15,
        metadata=metadata,
    )
    write_whole(path, signed.getvalue())


def _flatten_row(row: Plain) -> Plain:
    flat = dict(row)
    for name, value in row.items():
        if isinstance(value, dict):
            flat[name] = json.dumps(value, sort_keys=True)
    return flat


def _columns_checksum(data: bytes) -> str:
    """Return the SHA-256 of a Parquet file up to its footer.

    The length of the footer stands in four bytes before the last four.
    """
    import hashlib

    footer_byte = int.from_bytes(data[-8:-4], "little")
    columns_end = max(len(data) - 8 - footer_byte, 0)
    return hashlib.sha256(data[:columns_end]).hexdigest()


def import_polars() -> Any:
    """Import polars, or say what to install."""
    return import_extra("polars", "tables need polars", "measure")
