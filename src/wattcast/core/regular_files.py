"""Open files of users for reading, regular files alone, and read tables that ship with Wattcast.

A FIFO blocks whoever opens it until somebody writes, a device may have no end, a socket cannot be
opened. A command that is given one by mistake says so at once. Only the standard library is needed:
measuring code runs on a bare node.
"""

from __future__ import annotations

import csv
import os
import stat
from pathlib import Path
from typing import BinaryIO

from wattcast.core import files
from wattcast.core.errors import (
    BadInput,
    bad_value,
    clip_text,
)

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes.

    Raises ``BadInput`` for anything that is no regular file, and ``OSError`` where there is none or
    it may not be read. The file is looked at before and after it is opened, and opened without
    blocking, so that no name that changes its meaning in between can hang the caller.
    """
    _check_mode(path, os.stat(path).st_mode)
    # Windows has neither of these flags.
    non_blocking = getattr(os, "O_NONBLOCK", 0)
    close_on_exec = getattr(os, "O_CLOEXEC", 0)
    handle = os.open(path, os.O_RDONLY | non_blocking | close_on_exec)
    try:
        _check_mode(path, os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def is_regular(path: Path) -> bool:
    """Tell whether a name is that of a regular file; one that cannot be a name is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def check_regular(path: Path) -> None:
    """Raise ``BadInput`` for what is no regular file, before a library opens it by its name."""
    try:
        open_regular(path).close()
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> BadInput:
    """Return the error of a file that cannot be read."""
    return BadInput(f"{clip_text(str(path), 200)}: cannot be read ({error.strerror or error}).")


def _check_mode(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    matching_kinds = [name for is_kind, name in _KINDS if is_kind(mode)]
    kind = matching_kinds[0] if matching_kinds else "something else"
    advice = "" if stat.S_ISDIR(mode) else "Write what it gives into a file first."
    raise bad_value(clip_text(str(path), 200), "a file", kind, advice)


def read_shipped_table(package: str, *place: str) -> list[dict[str, str]]:
    """Read the rows of a CSV table that ships in a package; lines with a # say where it is from."""
    text = files(package).joinpath(*place).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines, restval=""))
