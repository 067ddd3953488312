"""Follow every setting of a card from the first touch until it is given back.

Each knob of a card (core clock, memory clock, power limit) is in one state, ``KnobState``. Notes on
disk, ``manage status``, ``manage restore`` and exit codes all speak of these states:

    unchanged -> asked -> applied or read back -> given back -> unchanged
                   |                                 |
                   +--- the card reads otherwise ----+

A driver's "OK" is not believed: a setting counts as read back, and a knob as unchanged, when the
card reads so. NVML reads the power limit back at any time. It does not read a lock of a clock back.
The clock of a working card shows a lock, the clock of an idle card shows nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
)

from wattcast.core import MissingTool, Refused

if TYPE_CHECKING:
    from wattcast.measure.device_control import ClockReading, NvmlCard

FORMAT = 3
Range = tuple[float, float]
KnobValue = Range | float | None  # a clock: range in Hz, None for the driver's own; the limit: W
KnobName = Literal["core", "memory", "limit"]
KNOB_FIELDS: dict[KnobName, str] = {  # of ``CardSettings``
    "core": "core_hz",
    "memory": "memory_hz",
    "limit": "limit_w",
}

SETTLE_S = 1.0  # a card that still reads otherwise after this has not taken a setting
READ_PAUSE_S = 0.05  # between two readings meanwhile
LIMIT_ATTEMPTS = 4  # to read the power limit before it is set, as one reading may fail
LIMIT_TOLERANCE_W = 1.0  # boards round limits to whole watts
CLOCK_TOLERANCE_HZ = 16e6  # drivers round clocks to steps of 15 MHz


class KnobState(StrEnum):
    """Say how far a setting of one knob has come."""

    UNCHANGED = "unchanged"  # the card reads what it had before
    ASKED = (
        "asked"  # noted, and perhaps set: the driver has not answered, or the card reads otherwise
    )
    APPLIED = "applied"  # the driver accepted it, and the card does not show it
    READ_BACK = "read back"  # the driver accepted it, and the card reads so
    GIVEN_BACK = (
        "given back"  # the driver accepted the earlier value, and the card does not show it
    )
    UNKNOWN = "unknown"  # nobody knows what the card had before


CHANGED_STATES = frozenset(
    {KnobState.ASKED, KnobState.APPLIED, KnobState.READ_BACK, KnobState.UNKNOWN}
)


class Evidence(Enum):
    """Say what a reading tells about a setting."""

    AGREES = "agrees"
    DIFFERS = "differs"
    SILENT = "silent"


class RefusedKnob(Refused):
    """A driver, or the scope of the daemon, does not allow a setting of one knob."""

    def __init__(
        self,
        knob: str,
        message: str,
        allowed: Range | None = None,
    ) -> None:
        super().__init__(message)
        self.knob = knob
        self.allowed = allowed


@dataclass(frozen=True)
class CardSettings:
    """Hold what is set on a card. None: a clock is left to the driver, the limit is not touched."""

    core_hz: Range | None = None
    memory_hz: Range | None = None
    limit_w: float | None = None

    def describe(self) -> str:
        """Write the settings for people."""
        parts = []
        if self.core_hz is not None:
            parts.append(f"core {self.core_hz[1] / 1e6:.0f} MHz")
        if self.memory_hz is not None:
            parts.append(f"memory {self.memory_hz[1] / 1e6:.0f} MHz")
        if self.limit_w is not None:
            parts.append(f"limit {self.limit_w:.0f} W")
        return ", ".join(parts) or "the driver's own clocks"


def make_settings(values: Mapping[KnobName, Any]) -> CardSettings:
    """Return settings of the knobs that have a value."""
    return CardSettings(**{KNOB_FIELDS[knob]: value for knob, value in values.items()})


@dataclass(frozen=True)
class KnobRecord:
    """Record one knob that was touched: what it had before, what was asked for last, and its
    state.
    """

    knob: KnobName
    before: KnobValue
    asked: KnobValue
    state: KnobState

    @property
    def now(self) -> KnobValue:
        """Return what the card has, as far as is known."""
        is_back = self.state in (KnobState.UNCHANGED, KnobState.GIVEN_BACK)
        return self.before if is_back else self.asked


@dataclass(frozen=True)
class CardNote:
    """Record every knob of a card that was touched, and for whom."""

    format: int
    uuid: str
    name: str
    holder: str
    since: str
    knobs: tuple[KnobRecord, ...] = ()
    unreadable: str = ""  # why the file could not be read, where this note stands for such a file

    @property
    def is_changed(self) -> bool:
        """Tell whether any knob may have another value than before."""
        return any(record.state in CHANGED_STATES for record in self.knobs)

    @property
    def is_unconfirmed(self) -> bool:
        """Tell whether a knob was given back and the card has not shown it yet."""
        return any(record.state is KnobState.GIVEN_BACK for record in self.knobs)

    @property
    def before(self) -> CardSettings:
        """Return what the card had before, of the knobs that were touched."""
        return make_settings({record.knob: record.before for record in self.knobs})

    @property
    def now(self) -> CardSettings:
        """Return what the card has now, of the knobs that were touched."""
        return make_settings({record.knob: record.now for record in self.knobs})

    @property
    def states(self) -> dict[str, KnobState]:
        """Return the state of every knob that was touched."""
        return {record.knob: record.state for record in self.knobs}

    def find_record(self, knob: str) -> KnobRecord | None:
        """Return the record of a knob; None where it was not touched."""
        return next((record for record in self.knobs if record.knob == knob), None)

    def with_record(self, record: KnobRecord) -> CardNote:
        """Return a note in which a record replaces the earlier one of its knob."""
        other_knobs = tuple(knob for knob in self.knobs if knob.knob != record.knob)
        return replace(self, knobs=(*other_knobs, record))

    def describe_change(self) -> str:
        """Say for people what the card is set to."""
        if self.unreadable:
            return "nobody knows what"
        asked_knobs = [record.knob for record in self.knobs if record.state is KnobState.ASKED]
        unknown = [record.knob for record in self.knobs if record.state is KnobState.UNKNOWN]
        text = self.now.describe()
        if asked_knobs:
            text += f" (perhaps: the {' and '.join(asked_knobs)} was asked for and not confirmed)"
        if unknown:
            text += f" (what the {' and '.join(unknown)} was before is not known)"
        return text


def make_unknown_note(uuid: str, reason: str) -> CardNote:
    """Return a note that stands for a file which cannot be read: no knob's earlier value is
    known.
    """
    records = tuple(KnobRecord(knob, None, None, KnobState.UNKNOWN) for knob in KNOB_FIELDS)
    return CardNote(
        FORMAT,
        uuid,
        "card",
        "somebody",
        "some time",
        records,
        reason,
    )


def prepare_records(
    card: NvmlCard,
    note: CardNote,
    wanted: CardSettings,
    locked_hz: float | None,
) -> CardNote:
    """Read what every wanted knob has before it is touched for the first time, and return a note of
    it.
    """
    for knob, field in KNOB_FIELDS.items():
        is_new = note.find_record(knob) is None
        if is_new and getattr(wanted, field) is not None:
            earlier = read_earlier_value(card, knob, locked_hz)
            note = note.with_record(KnobRecord(knob, earlier, earlier, KnobState.UNCHANGED))
    return note


def apply_settings(
    card: NvmlCard,
    note: CardNote,
    wanted: CardSettings,
    save: Callable[[CardNote], None],
) -> None:
    """Set a card whose note has a record of every wanted knob (``prepare_records``).

    ``save`` keeps the note before a knob is touched and after it was read back. A knob that is not
    wanted gets back what it had. ``RefusedKnob`` names a knob that the driver refuses, or accepts
    without applying it; knobs before it stay set and noted.
    """
    for knob, field in KNOB_FIELDS.items():
        record = note.find_record(knob)
        value: KnobValue = getattr(wanted, field)
        if record is None:
            continue
        is_set = record.state in (KnobState.APPLIED, KnobState.READ_BACK)
        if value is None:
            note = _return_knob(card, note, record, save)
        elif record.asked != value or not is_set:
            note = _set_knob(
                card,
                note,
                record,
                value,
                save,
            )


def _set_knob(
    card: NvmlCard,
    note: CardNote,
    earlier: KnobRecord,
    value: KnobValue,
    save: Callable[[CardNote], None],
) -> CardNote:
    """Set one knob and return the note of it: asked, then applied or read back."""
    record = replace(earlier, asked=value, state=KnobState.ASKED)
    fresh = note.with_record(record)
    save(fresh)
    try:
        card.set_knob(record.knob, value)
    except Refused as error:
        # A driver that refuses has changed nothing, unless the card reads otherwise.
        if read_back(card, record.knob, earlier.now, value) is not Evidence.DIFFERS:
            save(note)
        raise RefusedKnob(record.knob, str(error)) from None
    evidence = read_back(card, record.knob, value, earlier.now)
    if evidence is Evidence.DIFFERS:
        text = _describe_value(record.knob, value)
        raise RefusedKnob(record.knob, f"{card.name} accepts {text} and does not apply it.")
    state = KnobState.READ_BACK if evidence is Evidence.AGREES else KnobState.APPLIED
    fresh = note.with_record(replace(record, state=state))
    save(fresh)
    return fresh


def _return_knob(
    card: NvmlCard,
    note: CardNote,
    record: KnobRecord,
    save: Callable[[CardNote], None],
) -> CardNote:
    """Give one knob back what it had, read it back, and return the note of it."""
    if record.state is KnobState.UNCHANGED:
        return note
    if record.state is KnobState.UNKNOWN:
        do = "`wattcast manage restore --defaults` as root gives it the driver's defaults."
        raise Refused(f"what the {record.knob} of {card.name} was before is not known. {do}")
    card.set_knob(record.knob, record.before)
    evidence = read_back(card, record.knob, record.before, record.asked)
    earlier = _describe_value(record.knob, record.before)
    if evidence is Evidence.DIFFERS:
        raise Refused(f"{card.name} accepted {earlier}, and still reads otherwise.")
    if evidence is Evidence.SILENT and record.knob == "limit":
        raise Refused(f"{card.name} accepted {earlier}, and its limit cannot be read back.")
    state = KnobState.UNCHANGED if evidence is Evidence.AGREES else KnobState.GIVEN_BACK
    fresh = note.with_record(replace(record, state=state))
    save(fresh)
    return fresh


def restore_card(
    card: NvmlCard,
    note: CardNote,
    save: Callable[[CardNote], None],
) -> CardNote:
    """Give every knob that was touched back what it had, and return the note of it.

    Where some did not take it, the last error is raised after trying all of them; ``save`` has
    the note by then.
    """
    failure: Exception | None = None
    for knob in KNOB_FIELDS:
        record = note.find_record(knob)
        if record is None:
            continue
        try:
            note = _return_knob(card, note, record, save)
        except (Refused, MissingTool) as error:
            failure = error
    if failure is not None:
        raise failure
    return note


def reset_unknown_knobs(
    card: NvmlCard,
    note: CardNote,
    save: Callable[[CardNote], None],
) -> CardNote:
    """Give knobs whose earlier value is not known the driver's defaults, and return the note of
    it.
    """
    for record in note.knobs:
        if record.state is not KnobState.UNKNOWN:
            continue
        default: KnobValue = card.default_limit_w() if record.knob == "limit" else None
        if record.knob == "limit" and default is None:
            raise Refused(f"{card.name} does not tell its default power limit. Set it by hand.")
        try:
            card.set_knob(record.knob, default)
        except Refused:
            # A clock that cannot be locked was never locked.
            if record.knob == "limit" or _shows_highest_clock(card, record.knob) is False:
                raise
        if read_back(card, record.knob, default, None) is Evidence.DIFFERS:
            text = _describe_value(record.knob, default)
            raise Refused(f"{card.name} accepted {text}, and still reads otherwise.")
        reset_record = KnobRecord(record.knob, default, default, KnobState.UNCHANGED)
        note = note.with_record(reset_record)
        if not note.unreadable:  # a file that cannot be read stays as evidence until all is done
            save(note)
    return note


def confirm_returned_knobs(
    card: NvmlCard,
    note: CardNote,
    save: Callable[[CardNote], None],
) -> CardNote:
    """Look whether a card shows by now that clocks were given back, and return the note of it."""
    for record in note.knobs:
        if record.state is not KnobState.GIVEN_BACK:
            continue
        evidence = read_back(card, record.knob, record.before, record.asked)
        if evidence is Evidence.SILENT:
            continue
        is_back = evidence is Evidence.AGREES
        state = KnobState.UNCHANGED if is_back else KnobState.ASKED
        note = note.with_record(replace(record, state=state))
        save(note)
    return note


def read_earlier_value(
    card: NvmlCard,
    knob: str,
    locked_hz: float | None,
) -> KnobValue:
    """Read what a knob has before it is changed for the first time.

    ``RefusedKnob`` where the power limit cannot be read: what is not known cannot be given back.
    NVML does not tell a lock of the clocks. ``locked_hz`` is what the administrator declares.
    Without it, a core clock is taken for locked that stays the same below the highest while the
    card works and neither power nor heat explains it. The clock of an idle card says nothing, so
    that its lock must be declared."""
    if knob == "memory":
        return None
    if knob == "core":
        return (locked_hz, locked_hz) if locked_hz is not None else _find_core_lock(card)
    for _ in range(LIMIT_ATTEMPTS):
        limit_w = card.limit_w()
        if limit_w is not None:
            return limit_w
        time.sleep(READ_PAUSE_S)
    why = f"{card.name} does not tell its power limit, so that it could not be given back"
    raise RefusedKnob(knob, f"{why}. It is not set.")


def _find_core_lock(card: NvmlCard) -> Range | None:
    readings = [card.read_clocks()]
    for _ in range(3):
        time.sleep(0.1)
        readings.append(card.read_clocks())
    clock_hz = readings[0].core_hz
    levels = card.clocks_hz()[0]
    is_steady = all(reading.core_hz == clock_hz for reading in readings)
    is_explained = any(reading.is_working is False or reading.is_limited for reading in readings)
    is_locked = bool(levels) and is_steady and not is_explained and clock_hz < 0.995 * levels[-1]
    return (clock_hz, clock_hz) if is_locked else None


def read_back(
    card: NvmlCard,
    knob: str,
    wanted: KnobValue,
    was: KnobValue,
) -> Evidence:
    """Compare what a knob is to have with what the card reads; wait while it reads otherwise."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        evidence = _compare_knob(card, knob, wanted, was)
        if evidence is not Evidence.DIFFERS or time.monotonic() > end_s:
            return evidence
        time.sleep(READ_PAUSE_S)


def _compare_knob(
    card: NvmlCard,
    knob: str,
    wanted: KnobValue,
    was: KnobValue,
) -> Evidence:
    if knob == "limit":
        limit_w = card.limit_w()
        if limit_w is None or not isinstance(wanted, float):
            return Evidence.SILENT
        is_near = abs(limit_w - wanted) <= LIMIT_TOLERANCE_W
        return Evidence.AGREES if is_near else Evidence.DIFFERS
    reading = card.read_clocks()
    levels = card.clocks_hz()[0 if knob == "core" else 1]
    clock_hz = reading.core_hz if knob == "core" else reading.memory_hz
    top_hz = levels[-1] if levels else float("inf")
    locked = wanted if isinstance(wanted, tuple) else None
    earlier = was if isinstance(was, tuple) else None
    return compare_clock(
        clock_hz,
        reading,
        locked,
        earlier,
        top_hz,
    )


def compare_clock(
    clock_hz: float,
    reading: ClockReading,
    wanted: Range | None,
    was: Range | None,
    top_hz: float,
) -> Evidence:
    """Say whether a clock shows the lock ``wanted`` (None: no lock) rather than ``was``.

    A lock keeps a clock from rising above it, always. A clock below it, or at the old lock, says
    something only while the card works and neither power nor heat holds it down.
    """
    tolerance_hz = CLOCK_TOLERANCE_HZ
    low_hz, high_hz = wanted if wanted is not None else (0.0, float("inf"))
    if clock_hz > high_hz + tolerance_hz:
        return Evidence.DIFFERS
    if wanted is not None and clock_hz >= low_hz - tolerance_hz:
        return Evidence.AGREES
    if was is None:
        is_free = wanted is None and clock_hz >= top_hz - tolerance_hz
        return Evidence.AGREES if is_free else Evidence.SILENT
    if wanted is None and clock_hz > was[1] + tolerance_hz:
        return Evidence.AGREES
    is_telling = reading.is_working is True and reading.is_limited is False
    is_at_old_lock = abs(clock_hz - was[1]) <= tolerance_hz and was[1] < top_hz - tolerance_hz
    return Evidence.DIFFERS if is_telling and is_at_old_lock else Evidence.SILENT


def _shows_highest_clock(card: NvmlCard, knob: str) -> bool | None:
    """Tell whether a clock stands at its highest; None where the card has no clocks to set."""
    levels = card.clocks_hz()[0 if knob == "core" else 1]
    if not levels:
        return None
    reading = card.read_clocks()
    clock_hz = reading.core_hz if knob == "core" else reading.memory_hz
    return clock_hz >= levels[-1] - CLOCK_TOLERANCE_HZ


def _describe_value(knob: str, value: KnobValue) -> str:
    if isinstance(value, tuple):
        return f"a {knob} clock of {value[1] / 1e6:.0f} MHz"
    if value is None:
        return f"a reset of the {knob} clock"
    return f"a power limit of {value:.0f} W"
