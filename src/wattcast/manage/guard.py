"""What keeps a card from being left changed: one controller at a time, a note of what was set, and a watchdog.

Before anything is set, a state file says so. On the way out, whatever the way, clocks are reset and the file is
removed. A watchdog process holds the other end of a pipe; when this process dies without having cleaned up, it
resets the clocks itself. The lock is shared with it, so that nobody else starts before it is done. A file that a
crash left behind all the same is found at the next start: it is trusted only if it is a regular file of our own
in a folder of our own, with no link in the way, and then the card is reset.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from wattcast.errors import MissingTool, Refused, WattcastError

FORMAT = 1
WATCHDOG_READY = b"ready\n"
WATCHDOG_START_S = 20.0
LOCK_WAIT_S = 3.0  # a watchdog that is just restoring is waited for


class Settable(Protocol):
    """A card whose clocks can be locked and given back."""

    name: str
    uuid: str

    def lock(self, core_hz: float, memory_hz: float | None = None) -> None: ...

    def reset(self, memory: bool = True) -> None: ...


@dataclass(frozen=True)
class Note:
    """What a controller holds: written before the first setting, removed after the last."""

    format: int
    uuid: str
    pid: int
    began: str


def state_folder(variables: dict[str, str]) -> Path:
    """Where locks and notes live: ``/run/wattcast`` for root, else the user's runtime folder."""
    if os.geteuid() == 0:
        return Path("/run/wattcast")
    runtime = variables.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "wattcast" if runtime else Path.home() / ".local" / "state" / "wattcast"


class Guard:
    """Holds a card for one controller. Use as a context manager; clocks are reset on the way out."""

    def __init__(
        self, card: Settable, folder: Path, say: Callable[[str], None], watchdog: list[str] | None = None
    ) -> None:
        self._card, self._folder, self._say = card, folder, say
        self._command = watchdog  # None: no watchdog process (tests of the rest)
        self._lock_fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._note = folder / f"{_safe(card.uuid)}.json"

    def __enter__(self) -> Guard:
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
        """The first setting was refused: there is nothing to undo."""
        self._note.unlink(missing_ok=True)

    def restore(self) -> bool:
        """Reset the clocks; True when that worked. The note stays when it did not."""
        try:
            self._card.reset()
        except WattcastError as error:
            self._say(f"clocks of {self._card.name} could not be reset: {error}")
            return False
        return True

    def _leave(self) -> None:
        if self._note_is_ours() and self.restore():
            self._note.unlink(missing_ok=True)
        self._stop_watchdog()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _note_is_ours(self) -> bool:
        with suppress(Refused):
            found = read_note(self._note)
            return found is not None and found.pid == os.getpid()
        return False

    def _write_note(self) -> None:
        note = Note(FORMAT, self._card.uuid, os.getpid(), time.strftime("%Y-%m-%dT%H:%M:%S%z"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._note, flags, 0o600)
        with os.fdopen(fd, "w") as stream:
            json.dump(asdict(note), stream)
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


def watch_over(card: Settable, note: Path, stdin: int = 0) -> bool:
    """The watchdog: waits until the pipe ends, then resets the card if the note is still there; True if it did."""
    while os.read(stdin, 4096):
        pass
    if read_note(note) is None:
        return False
    card.reset()
    note.unlink(missing_ok=True)
    return True


def restore_leftover(card: Settable, note: Path, say: Callable[[str], None]) -> bool:
    """Reset a card that a controller left changed; True if there was one. Call with the lock held."""
    found = read_note(note)
    if found is None:
        return False
    if found.uuid != card.uuid:
        raise Refused(f"{note}: is about the card {found.uuid}, not {card.uuid}. Look into it and remove the file.")
    card.reset()
    note.unlink()
    say(f"process {found.pid} left clocks of {card.name} locked on {found.began}; they are reset now.")
    return True


def read_note(path: Path) -> Note | None:
    """A note, or None when there is none. Refused when it is a link, not ours, or not a note."""
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
        plain = json.loads(data)
        note = Note(int(plain["format"]), str(plain["uuid"]), int(plain["pid"]), str(plain["began"]))
    except (ValueError, KeyError, TypeError):
        note = None
    if note is None or note.format != FORMAT:
        raise Refused(f"{path}: is not a note of this Wattcast. Look into it and remove it.")
    return note


def _own_folder(folder: Path) -> None:
    """A folder of our own that nobody else can write to, made if it is not there."""
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
    """How the watchdog of a card is started; the note's path is added."""
    return [sys.executable, "-m", "wattcast.cli.manage", "watchdog", "--device", str(index)]
