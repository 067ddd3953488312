"""Write files so that nothing is lost: whole or not at all, on the disk at once, one writer at a
time.

Every command writes through ``replace_whole`` (a file) or ``append_whole`` (a journal), and holds
the folder that it adds to with ``hold_folder``. Only the standard library is needed: this module
also runs on a bare GPU node."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from wattcast.core.errors import (
    CannotWrite,
    Refused,
    bad_value,
    clip_text,
    nearest_names,
)


def check_new_file(path: Path, where: str = "--out") -> Path:
    """Return the file that a user asked for, or raise where its folder is not there.

    A command that made the folder of a mistyped path would hide the mistake.
    """
    folder = path.absolute().parent
    if folder.is_dir():
        return path
    do = "Create the folder first."
    beside = folder.parent
    if beside.is_dir():
        names = [entry.name for entry in beside.iterdir() if entry.is_dir()]
        nearest = nearest_names(folder.name, names, 1)
        if nearest:
            do = f"Did you mean {beside / nearest[0] / path.name}?"
    raise bad_value(where, "a file in a folder that exists", str(path), do)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that a reader sees as the old one or as the new one, never as half of one."""
    with replace_whole(path) as beside:
        beside.write_bytes(data)


@contextlib.contextmanager
def replace_whole(path: Path) -> Iterator[Path]:
    """Yield a name of its own beside ``path`` to write to, which takes the place of ``path`` when
    the block ends.

    File and folder are on the disk by then, so that a power cut leaves the old file or the new one.
    A block that raises leaves the old file. Links are followed and a file keeps its mode. A device
    or a pipe stays one: what is written goes into it."""
    try:
        target = Path(os.path.realpath(path))
        if not _can_be_replaced(target):
            yield target
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name[:100]}.{os.urandom(6).hex()}")
        try:
            os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            if target.exists():
                os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
            yield beside
            with beside.open("rb") as stream:
                os.fsync(stream.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
    except OSError as error:
        raise CannotWrite(path, error) from error


def _can_be_replaced(path: Path) -> bool:
    """Return False for a device or a pipe: root that said ``--out /dev/null`` had no /dev/null any
    more.
    """
    return not path.exists() or path.is_file() or path.is_dir()


def append_whole(path: Path, data: bytes) -> None:
    """Append whole lines, on the disk when this returns; a line that a crash left torn is ended
    first.

    What a full disk takes of the lines is taken back, so that the file is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as stream:
            length = stream.seek(0, os.SEEK_END)
            stream.seek(max(length - 1, 0))
            torn = stream.read(1) not in (b"", b"\n")
            view = memoryview(b"\n" + data if torn else data)
            try:
                while view:
                    view = view[stream.write(view) :]
                os.fsync(stream.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    stream.truncate(length)
                raise
    except OSError as error:
        raise CannotWrite(path, error) from error


LOCK_FILE = ".wattcast.lock"


@contextlib.contextmanager
def hold_folder(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Keep all other writers out of a folder; Refused, naming the one that holds it, after
    ``wait_s``.

    The system releases the lock when its owner ends, however it ends. Deleting the lock file breaks
    the lock of a process that hangs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(folder, error) from error
    lock = take_lock(
        folder / LOCK_FILE, wait_s, f"{clip_text(folder, 200)} is written to by another process"
    )
    try:
        yield
    finally:
        os.close(lock)


def take_lock(
    path: Path,
    wait_s: float,
    held: str,
) -> int:
    """Return an open lock file that holds owner and time; Refused with ``held`` after ``wait_s`` of
    one owner.
    """
    import fcntl

    deadline = time.monotonic() + wait_s
    owner = ""
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Refused(f"{path}: cannot be used as a lock ({error.strerror}).") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (
                path.exists() and os.fstat(lock).st_ino == path.stat().st_ino
            ):  # nobody broke it in the meantime
                owner = (
                    f"process {os.getpid()} on {platform.node()}, since "
                    f"{time.strftime('%Y-%m-%d %H:%M:%S')}"
                )
                with contextlib.suppress(OSError):  # a full disk takes the lock without the name
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, owner.encode(), 0)
                return lock
        except OSError:
            before = owner
            owner = clip_text(os.pread(lock, 200, 0).decode(errors="replace")) or "unknown"
            if before not in ("", owner):  # a hundred may wait: each owner has its time
                deadline = time.monotonic() + wait_s
            if time.monotonic() >= deadline:
                os.close(lock)
                do = f"Wait for it or end it; where it hangs, delete {path} to break its lock."
                raise Refused(f"{held} ({owner}). {do}") from None
            time.sleep(0.05)
        os.close(lock)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk; a file system that has no such call is left to
    itself.
    """
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_writable(path: Path) -> None:
    """Raise, before long work begins, where its result could not be written to ``path``; makes the
    folder.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        target.parent.mkdir(parents=True, exist_ok=True)
        if _can_be_replaced(target):
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise CannotWrite(path, error) from error


def write_somewhere(path: Path, data: bytes) -> Path:
    """Write what cannot be had again to ``path`` or, where that fails, beside it; return where it
    was written.

    The working folder and the temporary one come last. Raises the first reason where no place takes
    it."""
    beside = path.with_name(f"{path.stem}-{os.getpid()}-{time.time_ns()}{path.suffix}")
    failed: list[CannotWrite] = []
    for place in (
        path,
        beside,
        Path.cwd() / beside.name,
        Path(tempfile.gettempdir()) / beside.name,
    ):
        try:
            write_whole(place, data)
            return place
        except CannotWrite as error:
            failed.append(error)
    raise failed[0]


CACHE_VARIABLE = "WATTCAST_CACHE"


def cache_root(variables: Mapping[str, str] = os.environ) -> Path:
    """Return Wattcast's folder in the user's cache directory: ``WATTCAST_CACHE``, else below
    ``XDG_CACHE_HOME``.
    """
    shared = Path(variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME", "."), ".cache"))
    return Path(variables.get(CACHE_VARIABLE) or shared / "wattcast")


def private_cache(name: str) -> Path:
    """Return a folder in ``cache_root`` that only this user can read and write.

    Where the folder or the one above is a link or another user's, or others can write to it, files
    in it are not trusted: a fresh folder takes its place for the life of this process."""
    folder = cache_root() / name
    try:
        folder.parent.mkdir(
            mode=0o700,
            parents=True,
            exist_ok=True,
        )
        folder.mkdir(mode=0o700, exist_ok=True)
        for place in (folder.parent, folder):
            info = place.lstat()
            if (
                not stat.S_ISDIR(info.st_mode)
                or info.st_uid != os.geteuid()
                or info.st_mode & 0o022
            ):
                raise PermissionError(errno.EPERM, "not private", str(place))
        folder.chmod(0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"wattcast-{name}-"))
    return folder
