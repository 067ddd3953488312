"""Keep notes of changed cards on disk, so that a card gets back what it had whoever dies.

A note per card (``CardNote``) lies in ``/run/wattcast``, beside a lock of the same name: one place
for all processes. The note is written before the card is changed and removed when the card reads
what it had. Settings do not outlive a reboot and neither does that folder. A note that cannot be
read does not mean that a card is unchanged: it stands for a card in an unknown state until somebody
decides."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wattcast.control.card_settings import (
    FORMAT,
    KNOB_FIELDS,
    READABLE,
    CardNote,
    CardSettings,
    KnobName,
    KnobRecord,
    KnobState,
    make_unknown_note,
)
from wattcast.core import BadInput, Refused
from wattcast.core.whole_files import take_lock, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path("/run/wattcast")  # only root writes to it
LOCK_WAIT_S = 3.0  # a daemon that is just ending is waited for
LONGEST_NOTE = 65536  # byte
HIGHEST_VALUE = 1e13  # no clock in Hz and no limit in W reaches it


def prepare_folder() -> None:
    """Make the folder; Refused where it is a link, of another user, or writable for others."""
    try:
        FOLDER.mkdir(mode=0o755, exist_ok=True)
        info = FOLDER.lstat()
    except OSError as error:
        why = f"{FOLDER}: cannot hold notes ({error.strerror}). The daemon needs root."
        raise Refused(why) from None
    is_private = info.st_uid == os.geteuid() and not info.st_mode & 0o022
    if not stat.S_ISDIR(info.st_mode) or not is_private:
        do = "must be a folder of this user that nobody else can write to, and no link."
        raise Refused(f"{FOLDER}: {do}")


def note_path(uuid: str, ending: str = ".json") -> Path:
    """Return the file of a card; characters that could leave the folder are replaced."""
    plain = "".join(c if c.isalnum() or c == "-" else "_" for c in uuid)
    return FOLDER / (plain[:80] + ending)


def lock_card(uuid: str, wait_s: float = LOCK_WAIT_S) -> int:
    """Take a card for this process and return the open lock; Refused while another process has
    it.
    """
    path = note_path(uuid, ".lock")
    return take_lock(path, wait_s, f"{uuid} is already managed by another daemon")


def is_tended(uuid: str) -> bool:
    """Tell whether a process holds the lock of a card."""
    try:
        os.close(lock_card(uuid, 0.0))
    except Refused:
        return True
    return False


def save_note(note: CardNote) -> None:
    """Write a note, or remove it where every knob is unchanged; Refused where that fails."""
    if not (note.is_changed or note.is_unconfirmed):
        remove_note(note)
        return
    try:
        write_whole(note_path(note.uuid), msgspec.json.encode(note))
    except BadInput as error:
        raise Refused(f"nothing is set that cannot be noted: {error}") from None


def remove_note(note: CardNote) -> None:
    """Remove the note of a card; one that could not be read is set aside, as evidence."""
    path = note_path(note.uuid)
    try:
        if note.unreadable:
            path.rename(note_path(note.uuid, f".suspicious-{time.time_ns()}"))
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return
    except OSError as error:
        why = error.strerror or error
        raise Refused(f"{path}: this note of a card cannot be removed ({why}).") from None


def read_note(uuid: str) -> CardNote | None:
    """Read the note of a card; None where there is none, one of unknown state where it is
    unreadable.
    """
    path = note_path(uuid)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return make_unknown_note(uuid, f"{path}: cannot be opened ({error.strerror or error})")
    try:
        data = _read_trusted(handle)
        note = _decode_note(data)
    except (OSError, ValueError) as error:  # msgspec's errors are values too
        return make_unknown_note(uuid, f"{path}: {error}")
    finally:
        os.close(handle)
    if note_path(note.uuid) != path:
        return make_unknown_note(uuid, f"{path}: is a note about {note.uuid[:80]}")
    return note


def _read_trusted(handle: int) -> bytes:
    """Read an open note; ValueError where it is not a plain file of root, or too long."""
    info = os.fstat(handle)
    is_plain = stat.S_ISREG(info.st_mode) and info.st_nlink == 1
    if not is_plain or info.st_uid not in (0, os.geteuid()):
        raise ValueError("is not a plain file of root")
    data = os.read(handle, LONGEST_NOTE + 1)
    if not data:
        raise ValueError("is empty")
    if len(data) > LONGEST_NOTE:
        raise ValueError("is too long for a note")
    return data


@dataclass(frozen=True)
class _NoteFormat:
    format: int


@dataclass(frozen=True)
class _SecondFormat:
    """The note of earlier versions: settings before and now, and the knobs that were touched."""

    uuid: str
    name: str
    holder: str
    since: str
    before: CardSettings
    now: CardSettings
    changed: tuple[KnobName, ...] = ()


def _decode_note(data: bytes) -> CardNote:
    try:
        number = msgspec.json.decode(data, type=_NoteFormat).format
        if number == 2:
            return _convert_second_format(msgspec.json.decode(data, type=_SecondFormat))
        if number != FORMAT:
            message = f"is a note of another version of Wattcast (format {number}): use that one"
            raise ValueError(message)
        note = msgspec.json.decode(data, type=CardNote)
    except msgspec.MsgspecError:
        raise ValueError("is torn, or no note") from None
    knobs = [record.knob for record in note.knobs]
    if not knobs or len(set(knobs)) < len(knobs):
        raise ValueError("does not name the knobs of a card")
    for record in note.knobs:
        _check_record(record)
    return note


def _check_record(record: KnobRecord) -> None:
    """Raise ValueError where values of a record are not of its knob's kind."""
    if record.state is KnobState.UNKNOWN:
        return
    is_number = record.knob in READABLE
    for value in (record.before, record.asked):
        is_fit = isinstance(value, float) if is_number else not isinstance(value, float)
        ends = value if isinstance(value, tuple) else (value or 0.0,)
        if not is_fit or not all(0.0 <= end < HIGHEST_VALUE for end in ends):
            raise ValueError(f"has a {record.knob} that cannot be set")


def _convert_second_format(note: _SecondFormat) -> CardNote:
    """Take over a note of an earlier version; a limit that it did not know is in an unknown
    state.
    """
    records = []
    for knob in note.changed:
        before: Any = getattr(note.before, KNOB_FIELDS[knob])
        set_value: Any = getattr(note.now, KNOB_FIELDS[knob])
        is_known = knob != "limit" or before is not None
        state = KnobState.ASKED if is_known else KnobState.UNKNOWN
        records.append(KnobRecord(knob, before, before if set_value is None else set_value, state))
    return CardNote(
        FORMAT,
        note.uuid,
        note.name,
        note.holder,
        note.since,
        tuple(records),
    )


def list_notes() -> Iterator[CardNote]:
    """List the notes of all cards, whether or not a daemon is at work on them."""
    try:
        names = sorted(os.listdir(FOLDER))
    except FileNotFoundError:
        return
    except OSError as error:
        raise Refused(f"{FOLDER}: cannot be read ({error.strerror}).") from None
    for name in names:
        stem, ending = os.path.splitext(name)
        if ending != ".json" or name.startswith("."):
            continue
        note = read_note(stem)
        if note is not None:
            yield note


def list_leftovers() -> Iterator[CardNote]:
    """List the notes of cards that are still changed, or may be."""
    for note in list_notes():
        if note.is_changed:
            yield note


def describe_leftover(note: CardNote) -> str:
    """Say what a card was left at, for people."""
    if note.unreadable:
        why = f"its note cannot be read ({note.unreadable})"
        return f"{note.uuid}: what it is set to and what it had before are not known: {why}"
    change = note.describe_change()
    return (
        f"{note.name} ({note.uuid}) is still set to {change} by {note.holder}, since {note.since}"
    )
