"""Make the Nth step of a piece of code fail, as SQLite tests itself: no memory at a line, a disk that fails at a call.

``FailingLines`` raises MemoryError at the Nth line of some files, in any thread that starts meanwhile.
``FailingDisk`` raises OSError at the Nth call that touches the disk. With 0 both only count.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

DISK_CALLS: tuple[tuple[Any, str], ...] = (
    *(
        (os, name)
        for name in (
            "open",
            "read",
            "write",
            "pwrite",
            "ftruncate",
            "fsync",
            "fstat",
            "lstat",
            "stat",
        )
    ),
    *((os, name) for name in ("replace", "rename", "unlink", "listdir", "mkdir", "chmod")),
    (io, "open"),
    (builtins, "open"),
    (fcntl, "flock"),
)


class FailingLines:
    """Count the lines that run in files whose path holds one of ``places``, and fail at one of them."""

    def __init__(self, *places: str) -> None:
        self.places = places
        self.count = 0
        self.fails_at = 0
        self.failed_at = ""
        self.lock = threading.Lock()

    @contextmanager
    def failing_at(self, number: int, here: bool = False) -> Iterator[None]:
        """Fail at line ``number`` of threads that start in the block, and of this one with ``here``."""
        self.count = 0
        self.fails_at = number
        self.failed_at = ""
        threading.settrace(self.trace)
        if here:
            sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.fails_at = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Follow frames of the files in question."""
        path = frame.f_code.co_filename
        return self.trace_line if any(place in path for place in self.places) else None

    def trace_line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        """Count a line, or fail."""
        if event == "line":
            with self.lock:
                self.count += 1
                is_failing = self.count == self.fails_at
            if is_failing:
                self.failed_at = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                raise MemoryError(self.failed_at)
        return self.trace_line


class FailingDisk:
    """Count calls that touch the disk in files below ``folder``, and fail at one of them or from it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
        self.folder = folder
        self.count = 0
        self.fails_at = 0
        self.code = errno.EIO
        self.is_lasting = False
        self.failed_at = ""
        self.handles: set[int] = set()
        for module, name in DISK_CALLS:
            monkeypatch.setattr(module, name, self.wrap(name, getattr(module, name)))

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` that may fail."""

        def call_or_fail(*arguments: Any, **options: Any) -> Any:
            target = arguments[0] if arguments else None
            is_path = isinstance(target, str | os.PathLike)
            is_ours = is_path and os.fspath(target).startswith(self.folder)
            if is_ours or (isinstance(target, int) and target in self.handles):
                self.count += 1
                is_due = (
                    self.count >= self.fails_at if self.is_lasting else self.count == self.fails_at
                )
                if self.fails_at and is_due:
                    self.failed_at = f"{name} number {self.count}"
                    raise OSError(self.code, os.strerror(self.code))
            result = call(*arguments, **options)
            if is_ours and isinstance(result, int) and name == "open":
                self.handles.add(result)
            return result

        return call_or_fail

    @contextmanager
    def failing_at(
        self, number: int, code: int = errno.EIO, lasting: bool = False
    ) -> Iterator[None]:
        """Fail at call ``number`` of the block, or from it on."""
        self.count = 0
        self.code = code
        self.is_lasting = lasting
        self.failed_at = ""
        self.fails_at = number
        try:
            yield
        finally:
            self.fails_at = 0
