"""Keep a card from being left changed: one controller at a time, a note of what was set, and a watchdog.

Before anything is set, a note in a state folder says so. On every way out, clocks are reset and the note is removed.
A watchdog process holds the other end of a pipe; when the controller dies without cleaning up, the watchdog resets
the clocks. It shares the controller's lock, so that nobody else starts before it is done. A note that a crash left
behind all the same is found at the next start. It is trusted only if it is a regular file of this user in a folder
of this user, with no link in the way; then the card is reset.
"""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from wattcast.core.errors import MissingTool, Refused, WattcastError

FORMAT = 1
WATCHDOG_READY = b"ready\n"
WATCHDOG_START_S = 20.0
LOCK_WAIT_S = 3.0  # a watchdog that is just restoring is waited for


class ControlledCard(Protocol):
    """Read a card, lock its clocks and give them back. ``measure/device_control.py`` has the real one."""

    name: str
    uuid: str

    def clocks_hz(self) -> tuple[tuple[float, ...], tuple[float, ...]]: ...
    def read(self) -> Any: ...
    def lock(self, core_hz: float, memory_hz: float | None = None) -> None: ...
    def reset(self, memory: bool = True) -> None: ...


@dataclass(frozen=True)
class LockNote:
    """Record which card a controller holds; written before the first setting, removed after the last."""

    format: int
    uuid: str
    pid: int
    began: str


def state_folder(variables: dict[str, str]) -> Path:
    """Return where locks and notes live: ``/run/wattcast`` for root, else the user's runtime folder."""
    if os.geteuid() == 0:
        return Path("/run/wattcast")
    runtime = variables.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "wattcast" if runtime else Path.home() / ".local" / "state" / "wattcast"


class ClockGuard:
    """Hold a card for one controller. Use it as a context manager; clocks are reset on the way out."""

    def __init__(
        self, card: ControlledCard, folder: Path, say: Callable[[str], None], watchdog: list[str] | None = None
    ) -> None:
        self._card, self._folder, self._say = card, folder, say
        self._command = watchdog  # None: no watchdog process (tests of the rest)
        self._lock_fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._note = folder / f"{_safe(card.uuid)}.json"

    def __enter__(self) -> ClockGuard:
        _own_folder(self._folder)
        self._lock_fd = _lock(self._folder / f"{_safe(self._card.uuid)}.lock", self._card.name)
        try:
            restore_leftover(self._card, self._note, self._say)
            self._write_note()
            self._start_watchdog()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def nothing_was_set(self) -> None:
        """Remove the note, as the first setting was refused and there is nothing to undo."""
        self._note.unlink(missing_ok=True)

    def _leave(self) -> None:
        found = None
        with suppress(Refused):
            found = read_note(self._note)
        if found is not None and found.pid == os.getpid():
            try:
                self._card.reset()
                self._note.unlink(missing_ok=True)
            except WattcastError as error:  # the note stays, and the next start finds it
                self._say(f"clocks of {self._card.name} could not be reset: {error}")
        self._stop_watchdog()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _write_note(self) -> None:
        note = LockNote(FORMAT, self._card.uuid, os.getpid(), time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._note, flags, 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(msgspec.json.encode(note))
            stream.flush()
            os.fsync(stream.fileno())

    def _start_watchdog(self) -> None:
        if self._command is None:
            return
        self._process = subprocess.Popen(
            [*self._command, str(self._note)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._lock_fd,),  # the lock lasts until the watchdog is done as well
            start_new_session=True,  # a Ctrl-C meant for us must not reach it
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        deadline = time.monotonic() + WATCHDOG_START_S
        answer = b""
        while WATCHDOG_READY not in answer:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise MissingTool("the watchdog process did not start; nothing was set.")
            answer += self._process.stdout.read() or b""
            time.sleep(0.01)

    def _stop_watchdog(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(WATCHDOG_START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process = None


def run_watchdog(card: ControlledCard, note: Path, stdin: int = 0) -> bool:
    """Wait until the pipe ends, then reset the card if the note is still there; return whether it was."""
    while os.read(stdin, 4096):
        pass
    if read_note(note) is None:
        return False
    card.reset()
    note.unlink(missing_ok=True)
    return True


def restore_leftover(card: ControlledCard, note: Path, say: Callable[[str], None]) -> None:
    """Reset a card that a controller left changed. Call it with the lock held."""
    found = read_note(note)
    if found is None:
        return
    if found.uuid != card.uuid:
        raise Refused(f"{note}: is about the card {found.uuid}, not {card.uuid}. Look into it and remove the file.")
    card.reset()
    note.unlink()
    say(f"process {found.pid} left clocks of {card.name} locked on {found.began}; they are reset now.")


def read_note(path: Path) -> LockNote | None:
    """Read a note; None when there is none, Refused when it is a link, not of this user, or not a note."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(f"{path}: cannot be trusted ({error.strerror}). Look into it and remove it.") from None
    with os.fdopen(fd, "rb") as stream:
        info = os.fstat(stream.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
            raise Refused(f"{path}: is not a plain file of this user. Look into it and remove it.")
        data = stream.read(4096)
    try:
        note = msgspec.json.decode(data, type=LockNote)
    except msgspec.DecodeError:
        note = None
    if note is None or note.format != FORMAT:
        raise Refused(f"{path}: is not a note of this Wattcast. Look into it and remove it.")
    return note


def _own_folder(folder: Path) -> None:
    """Make the state folder, or check that it is of this user and that nobody else can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise Refused(f"{folder}: cannot be used for the controller's state ({error.strerror}).") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise Refused(f"{folder}: must be a folder of this user that nobody else can write to, and no link.")


def _lock(path: Path, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise Refused(f"{path}: cannot be used as a lock ({error.strerror}).") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(fd)
        raise Refused(f"{path}: is not a plain file of this user. Look into it and remove it.")
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise Refused(f"{name} is already held by another controller. Wait for it, or end it.") from None
            time.sleep(0.05)


def _safe(uuid: str) -> str:
    return "".join(c if c.isalnum() or c == "-" else "_" for c in uuid)[:80] or "card"


def watchdog_command(index: int) -> list[str]:
    """Return the command that starts the watchdog of a card; the note's path is added to it."""
    return [sys.executable, "-m", "wattcast.cli.manage_commands", "watchdog", "--device", str(index)]
