"""Samples shared between two processes: a ring of float rows in a memory-mapped file.

One process writes, any number read. A row is complete before the head moves past it, so a reader
never sees half of one; a reader that is overtaken drops the rows it lost. The clock is
``time.monotonic``, which all processes of one machine share.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wattcast.errors import BadInput

COLUMNS = (
    "time_s",
    "energy_j",
    "sm_clock_hz",
    "memory_clock_hz",
    "instant_w",
    "average_w",
    "memory_w",
    "temperature_c",
    "throttle",
)
_MAGIC = 0x57415454
_HEADER = 16  # int64 words
MAGIC, CAPACITY, HEAD, STATUS, STOP, ERRORS, LAST_ERROR, RESETS, PROCESSOR_NS, QUICK = range(10)
STARTING, SAMPLING, LOST, STOPPED = range(4)


class Ring:
    """The mapped file. ``create`` makes one, ``attach`` opens what another process made."""

    def __init__(self, path: Path, capacity: int, mapped: mmap.mmap) -> None:
        self.path = path
        self.capacity = capacity
        self._map = mapped
        self.header: npt.NDArray[np.int64] = np.frombuffer(mapped, np.int64, _HEADER)
        body = np.frombuffer(mapped, np.float64, capacity * len(COLUMNS), _HEADER * 8)
        self._rows = body.reshape(capacity, len(COLUMNS))

    @classmethod
    def create(cls, path: Path, capacity: int = 2**19) -> Ring:
        """A fresh ring of ``capacity`` rows."""
        size = _HEADER * 8 + capacity * len(COLUMNS) * 8
        with path.open("wb") as stream:
            stream.truncate(size)
        ring = cls._map_file(path, capacity)
        ring.header[[MAGIC, CAPACITY]] = _MAGIC, capacity
        return ring

    @classmethod
    def attach(cls, path: Path) -> Ring:
        """The ring another process created at ``path``."""
        words = np.fromfile(path, np.int64, 2)
        if len(words) < 2 or words[0] != _MAGIC:
            raise BadInput(f"{path.name}: not a ring of samples.")
        return cls._map_file(path, int(words[1]))

    @classmethod
    def _map_file(cls, path: Path, capacity: int) -> Ring:
        with path.open("r+b") as stream:
            return cls(path, capacity, mmap.mmap(stream.fileno(), 0))

    def write(self, row: Sequence[float]) -> None:
        """Append one row; the head moves last."""
        head = int(self.header[HEAD])
        self._rows[head % self.capacity] = row
        self.header[HEAD] = head + 1

    def read(self, since: int = 0) -> tuple[npt.NDArray[np.float64], int]:
        """Rows from number ``since`` on (those still held), and the number after the last."""
        head = int(self.header[HEAD])
        first = max(since, head - self.capacity + 64, 0)
        index = np.arange(first, head) % self.capacity
        rows = self._rows[index].copy()
        overtaken = max(int(self.header[HEAD]) - self.capacity - first, 0)
        return rows[overtaken:], head
