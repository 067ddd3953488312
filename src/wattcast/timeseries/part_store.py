"""Keep the finished rows of a hall in a folder, written by whoever computes them.

A worker that sees the folder writes its row there and sends its number alone: hundreds of megabytes
need not cross a cluster. Whether it sees the very folder, it tells by a mark with a random word. A
worker elsewhere sends the row, and the process that asked for it writes it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wattcast.core import BadInput
from wattcast.core.whole_files import write_whole
from wattcast.timeseries.hall_parts import (
    HallWork,
    PartSeries,
    unpack_part,
)


@dataclass(frozen=True)
class PartStore:
    """Finished parts in a folder, one file each."""

    folder: Path
    digest: str

    def path(self, index: int) -> Path:
        """Return the file of a part."""
        return self.folder / f"{self.digest}-{index:05d}.npz"

    def read(self, index: int) -> PartSeries:
        """Return a part."""
        path = self.path(index)
        return unpack_part(path.read_bytes(), index, path.name)

    def write(self, part: PartSeries) -> None:
        """Keep a part."""
        write_whole(self.path(part.index), part.pack())

    def is_finished(self, index: int) -> bool:
        """Return whether a part is there, and whole."""
        if not self.path(index).is_file():
            return False
        try:
            self.read(index)
        except BadInput:
            return False
        return True


@dataclass(frozen=True)
class StoredWork:
    """Compute rows of a hall and keep them, where the folder is in sight. Workers are sent this."""

    work: HallWork
    store: PartStore
    mark: Path  # a file beside the parts ...
    word: str  # ... that holds this

    @property
    def part_count(self) -> int:
        """Number of parts."""
        return self.work.part_count

    def compute_part(self, index: int) -> tuple[int, PartSeries | None]:
        """Compute row ``index``; return it with its number, or the number of a row that was kept."""
        part = self.work.compute_part(index)
        if not self._sees_folder():
            return index, part
        self.store.write(part)
        return index, None

    def _sees_folder(self) -> bool:
        try:
            return self.mark.read_text() == self.word
        except OSError:
            return False


@contextlib.contextmanager
def keep_parts(work: HallWork, store: PartStore) -> Iterator[StoredWork]:
    """Return work whose parts are kept in the folder of a store, as long as the block runs."""
    word = secrets.token_hex()
    mark = store.folder.absolute() / f".{word[:16]}"
    write_whole(mark, word.encode())
    try:
        yield StoredWork(work, PartStore(store.folder.absolute(), store.digest), mark, word)
    finally:
        mark.unlink(missing_ok=True)
