"""Hold power samples in a ring of rows that two processes share through a mapped file.

One process writes the memory-mapped ring, any number read it. A row is complete before the head
moves past it, so a reader never sees half of one; a reader that is overtaken drops the rows it
lost. The clock is ``time.monotonic``, which all processes of one machine share.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wattcast.core.errors import BadInput, CannotWrite
from wattcast.measure.energy_samples import COLUMNS, Array

HEADER = 16  # int64 words
# The words of the header, by place.
MAGIC, CAPACITY, HEAD, STATUS, STOP, ERRORS, PROCESSOR_NS, QUICK = range(8)
# Values of the word STATUS.
STARTING, SAMPLING, LOST, STOPPED = range(4)

_MAGIC = 0x57415454
_WORD_BYTE = 8
_DEFAULT_ROWS = 2**19
_MARGIN_ROWS = 64  # the oldest rows, which the writer may overwrite while they are read


class SampleRing:
    """The mapped file. ``create`` makes one, ``attach`` opens what another process made."""

    def __init__(
        self,
        path: Path,
        capacity: int,
    ) -> None:
        self.path = path
        self.capacity = capacity
        header = np.memmap(path, np.int64, "r+", shape=(HEADER,))
        rows = np.memmap(
            path,
            np.float64,
            "r+",
            HEADER * _WORD_BYTE,
            (capacity, len(COLUMNS)),
        )
        self.header = np.asarray(header)
        self._rows = np.asarray(rows)

    @classmethod
    def create(
        cls,
        path: Path,
        capacity: int = _DEFAULT_ROWS,
    ) -> SampleRing:
        """Create a ring of ``capacity`` rows."""
        size = (HEADER + capacity * len(COLUMNS)) * _WORD_BYTE
        try:
            with path.open("wb") as stream:
                stream.truncate(size)
                # A page that a full disk has no room for would end the process later.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            raise CannotWrite(path, error) from error
        ring = cls(path, capacity)
        ring.header[MAGIC] = _MAGIC
        ring.header[CAPACITY] = capacity
        return ring

    @classmethod
    def attach(cls, path: Path) -> SampleRing:
        """Open the ring that another process created at ``path``."""
        words = np.fromfile(path, np.int64, 2)
        if len(words) < 2 or words[MAGIC] != _MAGIC:
            raise BadInput(f"{path.name}: not a ring of samples.")
        return cls(path, int(words[CAPACITY]))

    def write(self, row: Sequence[float]) -> None:
        """Append one row; the head moves last."""
        head = int(self.header[HEAD])
        self._rows[head % self.capacity] = row
        self.header[HEAD] = head + 1

    def read(self, since: int = 0) -> Array:
        """Return the rows from number ``since`` on that are still in the ring."""
        head = int(self.header[HEAD])
        oldest = head - self.capacity + _MARGIN_ROWS
        first = max(since, oldest, 0)
        places = np.arange(first, head) % self.capacity
        rows = self._rows[places]
        overtaken = max(int(self.header[HEAD]) - self.capacity - first, 0)
        return rows[overtaken:]
