"""Remember what a card had before it was changed, so that it gets that back whoever dies.

A note per card lies in ``/run/wattcast``, beside a lock of the same name: one place for all processes. The note is
written before the card is changed and removed when the card has back what it had. Settings do not outlive a reboot
and neither does that folder. A note that cannot be trusted is set aside under another name and reported.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from wattcast.core import BadInput, MissingTool, Refused, dataclass, replace
from wattcast.core.whole_files import take_lock, write_whole

if TYPE_CHECKING:
    from wattcast.measure.device_control import NvmlCard

FOLDER = Path("/run/wattcast")  # only root writes to it
FORMAT = 2
LOCK_WAIT_S = 3.0  # a daemon that is just ending is waited for
BUSY = 0.5  # share of time with a kernel running, from which a clock says what the card is allowed
Range = tuple[float, float]
KNOB_FIELDS = {"core": "core_hz", "memory": "memory_hz", "limit": "limit_w"}  # of ``CardSettings``


@dataclass(frozen=True)
class CardSettings:
    """Hold what is set on a card. None: a clock is left to the driver, the power limit is not touched."""

    core_hz: Range | None = None
    memory_hz: Range | None = None
    limit_w: float | None = None

    def describe(self) -> str:
        """Write the settings for people."""
        clocks = {"core": self.core_hz, "memory": self.memory_hz}
        said = [f"{name} {ends[1] / 1e6:.0f} MHz" for name, ends in clocks.items() if ends is not None]
        said += [] if self.limit_w is None else [f"limit {self.limit_w:.0f} W"]
        return ", ".join(said) or "the driver's own clocks"


@dataclass(frozen=True)
class CardNote:
    """Record what a card had before and what was set since; ``changed`` names the knobs that were touched."""

    format: int
    uuid: str
    name: str
    holder: str
    since: str
    before: CardSettings
    now: CardSettings
    changed: tuple[str, ...] = ()  # core, memory, limit


class RefusedKnob(Refused):
    """A driver, or the scope of the daemon, does not allow a setting of one knob."""

    def __init__(self, knob: str, message: str, allowed: Range | None = None) -> None:
        super().__init__(message)
        self.knob, self.allowed = knob, allowed


def apply_settings(
    card: NvmlCard, note: CardNote, wanted: CardSettings, save: Callable[[CardNote], None]
) -> CardNote:
    """Set a card and return the note of it. Every knob is noted before it is touched.

    A knob that is not wanted gets back what it had. Where the driver refuses a knob, those before it stay set and
    noted, and ``RefusedKnob`` names it.
    """
    for knob, field in KNOB_FIELDS.items():
        value, is_changed = getattr(wanted, field), knob in note.changed
        if getattr(note.now, field) == value if is_changed else value is None:
            continue
        target = getattr(note.before, field) if value is None else value
        fresh = replace(note, now=replace(note.now, **{field: value}), changed=tuple(sorted({*note.changed, knob})))
        save(fresh)
        try:
            card.set_knob(knob, target)
        except Refused as error:
            save(note)
            raise RefusedKnob(knob, str(error)) from None
        note = fresh
    return note


def restore_card(card: NvmlCard, note: CardNote) -> None:
    """Give every knob that was touched back what it had, and remove the note.

    Where some did not take it, the note stays, and the last error is raised after trying all of them.
    """
    failed: Exception | None = None
    for knob, field in KNOB_FIELDS.items():
        if knob in note.changed:
            try:
                card.set_knob(knob, getattr(note.before, field))
            except (Refused, MissingTool) as error:
                failed = error
    if failed is not None:
        raise failed
    note_path(note.uuid).unlink(missing_ok=True)


def find_earlier_settings(card: NvmlCard, locked_hz: float | None) -> CardSettings:
    """Find what a card has before it is changed for the first time.

    NVML tells the power limit but not a lock of the clocks. ``locked_hz`` is what the administrator declares. Without
    it, a core clock is taken for locked that stays the same below the highest while the card works and neither power
    nor heat explains it. The clock of an idle card says nothing, so that its lock must be declared.
    """
    limits = card.limits_w()
    limit_w = None if limits is None else limits[0]
    if locked_hz is not None:
        return CardSettings((locked_hz, locked_hz), None, limit_w)
    readings = [card.read()]
    for _ in range(3):
        time.sleep(0.1)
        readings.append(card.read())
    clocks, levels = {r.core_hz for r in readings}, card.clocks_hz()[0]
    clock = readings[0].core_hz
    held = len(clocks) == 1 and levels and clock < 0.995 * levels[-1] and not card.is_limited()
    idle = any(r.busy < BUSY for r in readings)  # False where utilisation is not told
    return CardSettings((clock, clock) if held and not idle else None, None, limit_w)


def prepare_folder() -> None:
    """Make the folder; Refused where it is a link, of another user, or writable for others."""
    try:
        FOLDER.mkdir(mode=0o755, exist_ok=True)
        info = FOLDER.lstat()
    except OSError as error:
        raise Refused(f"{FOLDER}: cannot hold notes ({error.strerror}). The daemon needs root.") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise Refused(f"{FOLDER}: must be a folder of this user that nobody else can write to, and no link.")


def note_path(uuid: str, ending: str = ".json") -> Path:
    """Return the file of a card; characters that could leave the folder are replaced."""
    return FOLDER / ("".join(c if c.isalnum() or c == "-" else "_" for c in uuid)[:80] + ending)


def lock_card(uuid: str, wait_s: float = LOCK_WAIT_S) -> int:
    """Take a card for this process and return the open lock; Refused while another process has it."""
    return take_lock(note_path(uuid, ".lock"), wait_s, f"{uuid} is already managed by another daemon")


def save_note(note: CardNote) -> None:
    """Write a note; Refused where that fails, so that nothing is set that is not noted."""
    try:
        write_whole(note_path(note.uuid), msgspec.json.encode(note))
    except BadInput as error:
        raise Refused(f"nothing is set that cannot be noted first: {error}") from None


def read_note(uuid: str) -> CardNote | None:
    """Read the note of a card; None where there is none. Refused, with the reason, where it is no such note."""
    path = note_path(uuid)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(f"{path}: cannot be trusted ({error.strerror}).") from None
    with os.fdopen(fd, "rb") as stream:
        info = os.fstat(stream.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_nlink != 1:
            raise Refused(f"{path}: is not a plain file of root.")
        data = stream.read(65536)
    try:
        note = msgspec.json.decode(data, type=CardNote)
    except msgspec.MsgspecError:
        raise Refused(f"{path}: is not a note of this Wattcast.") from None
    if note.format != FORMAT or note.uuid != uuid:
        raise Refused(f"{path}: is not a note about {uuid}.")
    return note


def take_over_note(uuid: str, say: Callable[[str], None]) -> CardNote | None:
    """Read the note that an earlier process left; one that cannot be trusted is set aside and reported."""
    try:
        return read_note(uuid)
    except Refused as error:
        aside = note_path(uuid, f".suspicious-{time.time_ns()}")
        note_path(uuid).rename(aside)
        say(f"{error} It is set aside as {aside.name}; the card is left as it is.")
        return None


def list_leftovers() -> Iterator[CardNote]:
    """List the notes of cards that are still changed, whether or not a daemon is at work on them."""
    for path in sorted(FOLDER.glob("*.json")):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=CardNote)
        except (OSError, msgspec.MsgspecError):
            continue
        if note.changed:
            yield note


def is_tended(uuid: str) -> bool:
    """Tell whether a process holds the lock of a card."""
    try:
        os.close(lock_card(uuid, 0.0))
    except Refused:
        return True
    return False


def describe_leftover(note: CardNote) -> str:
    """Say what a card was left at, for people."""
    return f"{note.name} ({note.uuid}) is still set to {note.now.describe()} by {note.holder}, since {note.since}"
