"""Append measured rows to JSON Lines files while measuring, and read them back.

Appending a row never rewrites another, so a crash loses at most the line that was being written.
Only the standard library is needed: this module also runs on a bare GPU node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from wattcast.core.errors import BadInput, bad_value
from wattcast.core.measured_rows import (
    Plain,
    Record,
    row_to_plain,
)
from wattcast.core.regular_files import open_regular

# No row is longer: a file without line ends must not fill the memory.
_LONGEST_LINE_BYTE = 2**28
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')


class Journal:
    """An append-only JSON Lines file that knows the ids of its rows."""

    def __init__(
        self,
        path: Path,
        key: str = "id",
    ) -> None:
        self.path = path
        self.key = key
        self._ids: set[str] | None = None

    @property
    def ids(self) -> set[str]:
        """Ids of complete rows without an error; a re-run skips these."""
        if self._ids is None:
            rows = read_lines(self.path, missing_ok=True)
            self._ids = {str(row[self.key]) for row in rows if self._is_complete(row)}
        return self._ids

    def append(self, row: Record | Plain) -> None:
        """Write one row; it is on the disk when this returns."""
        plain = row_to_plain(row)
        # The file is read before the row is in it.
        ids = self.ids
        append_rows(self.path, [plain])
        if self._is_complete(plain):
            ids.add(str(plain[self.key]))

    def _is_complete(self, row: Plain) -> bool:
        return bool(row.get(self.key)) and not row.get("error")


def append_rows(path: Path, rows: Iterable[Plain]) -> None:
    """Append rows to a JSON Lines file; all are on the disk when this returns, or none."""
    from wattcast.core.whole_files import append_whole

    lines = [json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n" for row in rows]
    append_whole(path, "".join(lines).encode())


def read_lines(path: Path, missing_ok: bool = False) -> Iterator[Plain]:
    """Yield the rows of a JSON Lines file.

    A line that a crash has torn is passed over; any other damage is an error.
    """
    if missing_ok and not path.exists():
        return
    with open_regular(path) as stream:
        for number, line in enumerate(_bounded_lines(stream), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                if _is_torn(line):
                    continue
                raise BadInput(f"{path.name}: line {number} is not valid JSON.") from None
            if not isinstance(row, dict):
                raise bad_value(f"{path.name}: line {number}", "an object", type(row).__name__)
            yield row


def _bounded_lines(stream: BinaryIO) -> Iterator[bytes]:
    while line := stream.readline(_LONGEST_LINE_BYTE):
        yield line


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _is_torn(line: bytes) -> bool:
    """Tell whether a line ends inside a text or an object, as a line cut short anywhere does."""
    without_texts = _TEXT.sub(b"", line)
    ends_in_text = b'"' in without_texts
    opened = without_texts.count(b"{") + without_texts.count(b"[")
    closed = without_texts.count(b"}") + without_texts.count(b"]")
    return ends_in_text or opened > closed
