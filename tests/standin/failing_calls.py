"""Make the Nth step of a piece of code fail, as SQLite tests itself: no memory at an instruction, a disk that fails at a call.

``FailingSites`` raises MemoryError at an instruction of some files that may ask for memory.
``FailingDisk`` raises OSError at the Nth call that touches the disk. With 0 it only counts.
"""

from __future__ import annotations

import builtins
import dis
import errno
import fcntl
import io
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

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


class FailingDisk:
    """Count calls that touch the disk in files below ``folders``, and fail at one of them or from it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
        self.folders = folders
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
            is_ours = is_path and os.fspath(target).startswith(self.folders)
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


WORKING = (  # parts of the names of instructions that may ask for memory
    *("CALL", "BINARY", "BUILD", "FORMAT", "LOAD_ATTR", "LOAD_METHOD", "MAKE_", "GET_", "FOR_ITER"),
    *("STORE_ATTR", "STORE_SUBSCR", "APPEND", "EXTEND", "UPDATE", "IMPORT", "UNPACK", "COMPARE"),
    *("BEFORE_WITH", "CONTAINS", "CONVERT", "RAISE", "SET_ADD", "MAP_ADD", "UNARY", "YIELD"),
)


class Site(NamedTuple):
    """An instruction of our code that may ask for memory."""

    file: str
    function: str
    line: int
    offset: int  # of the instruction in its function

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} ({self.function}, {self.offset})"


@cache
def find_working_offsets(code: CodeType) -> frozenset[int]:
    """Return the places of instructions of a function that may ask for memory.

    Left out is the call that ends a ``with`` block: nothing could make up for it, and the lock that
    it lets go is of C, which asks for no memory then.
    """
    offsets = set()
    before: list[Any] = []
    for step in dis.get_instructions(code):
        ends_block = before[-3:] == [None] * 3
        if not ends_block and any(part in step.opname for part in WORKING):
            offsets.add(step.offset)
        if step.opname == "LOAD_CONST":
            before.append(step.argval)
        elif step.opname != "PRECALL":
            before.clear()
    return frozenset(offsets)


class FailingSites:
    """Find the instructions that may ask for memory in some files, and fail at one of them.

    ``seen`` counts how often each ran. A fault is at the ``turn``-th time that a site is reached, in
    any thread that starts in the block, and in this one where ``here`` says so.
    """

    def __init__(self, *places: str) -> None:
        self.places = places
        self.seen: Counter[Site] = Counter()
        self.fails_at: Site | None = None
        self.turn = 0
        self.has_failed = False
        self.is_counting = False
        self.lock = threading.Lock()

    @contextmanager
    def failing_at(self, site: Site | None, turn: int = 1, here: bool = False) -> Iterator[None]:
        """Fail at a site; at none, sites are only counted."""
        self.seen.clear()
        self.fails_at = site
        self.turn = turn
        self.has_failed = False
        self.is_counting = True
        threading.settrace(self.trace)
        if here:
            sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.fails_at = None
            self.is_counting = False

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Follow frames of the files in question, instruction by instruction."""
        path = frame.f_code.co_filename
        if not any(place in path for place in self.places):
            return None
        frame.f_trace_opcodes = True
        return self.trace_instruction

    def trace_instruction(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        """Count an instruction, or fail at it."""
        code = frame.f_code
        if event != "opcode" or frame.f_lasti not in find_working_offsets(code):
            return self.trace_instruction
        site = Site(code.co_filename, code.co_qualname, frame.f_lineno, frame.f_lasti)
        with self.lock:
            if self.is_counting:
                self.seen[site] += 1
            is_due = site == self.fails_at and self.seen[site] == self.turn and not self.has_failed
            self.has_failed |= is_due
        if is_due:
            raise MemoryError(str(site))
        return self.trace_instruction

    def list_faults(self, latest: int | None = None) -> list[tuple[Site, int]]:
        """Return the first and the last turn of each site that was seen, none after ``latest``."""
        faults = []
        for site, count in sorted(self.seen.items()):
            last = count if latest is None else min(count, latest)
            faults += [(site, turn) for turn in sorted({1, last})]
        return faults
