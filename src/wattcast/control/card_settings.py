"""Follow every setting of a card from the first touch until it is given back.

A *knob* is what can be set on a card: its core clock, its memory clock, its power limit, the power
profiles that are requested of its firmware, and power smoothing. Each is in one state,
``KnobState``. The notes on disk (``card_notes.py``), what ``wattcast manage status``
and ``wattcast manage restore`` say, and their exit codes speak of these states:

    state                        becomes      when
    unchanged                    asked        it is noted on disk, before the driver is called
    asked                        read back    the driver accepted it, and the card reads so
    asked                        applied      the driver accepted it, and the card tells nothing
    asked                        as before    the driver refused, and the card does not read
    otherwise
    asked, applied, read back    unchanged    it was given back, and the card reads so
    asked, applied, read back    given back   it was given back, and the card tells nothing
    given back                   unchanged    the card reads so later
    given back                   asked        the card still reads what was asked for
    unknown                      unchanged    it was set to the driver's default

Where a card reads otherwise than the driver says, the state stays and the caller gets an error.

A driver's "OK" is not believed: what the card reads decides. NVML reads the power limit back at any
time, and profiles and smoothing where a card has them, so that these are given back only when the
card reads so. It does not read a lock of a clock back. A clock above a lock shows that the lock is
not in force, even on an idle card. A clock below
a lock shows something only while the card works and neither power nor heat holds it down.
"""

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
from wattcast.measure.device_control import POWER_PROFILES

if TYPE_CHECKING:
    from wattcast.measure.device_control import ClockReading, NvmlCard

FORMAT = 3  # of notes on disk; ``card_notes.py`` reads this one and 2
# The lowest and the highest value. NVML locks a clock between two values in Hz; Wattcast asks for
# one clock, so that both are the same.
Range = tuple[float, float]
# A clock: the range in Hz that it is locked to, None for no lock (the driver's own clocks). The
# power limit: W. Profiles: the mask of those that are requested, as NVML numbers its bits.
# Smoothing: 1 where it is on, else 0. The last three are never None but in the state ``UNKNOWN``.
KnobValue = Range | float | None
KnobName = Literal["core", "memory", "limit", "profiles", "smoothing"]
KNOB_FIELDS: dict[KnobName, str] = {  # of ``CardSettings``; knobs are set in this order
    "core": "core_hz",
    "memory": "memory_hz",
    "limit": "limit_w",
    "profiles": "profile_mask",
    "smoothing": "smoothing",
}
# Knobs that a card reads back at any time, where it has them.
READABLE: tuple[KnobName, ...] = ("limit", "profiles", "smoothing")
OPTIONAL_KNOBS: tuple[KnobName, ...] = ("profiles", "smoothing")  # that few cards have

NAMES = {"profiles": "power profiles", "smoothing": "power smoothing"}  # for people
SETTLE_S = 1.0  # a card that still reads otherwise after this has not taken a setting
READ_PAUSE_S = 0.05  # between two readings meanwhile
# Readings of the power limit before it is first set: a driver may fail one of them for a moment.
LIMIT_ATTEMPTS = 4
LIMIT_TOLERANCE_W = 1.0  # boards round limits to whole watts, up or down
# Drivers round clocks to steps of 15 MHz, and report whole MHz. Two levels side by side are thus
# not told apart.
CLOCK_TOLERANCE_HZ = 16e6
# A lock that was there before: a core clock that is the same in so many readings, this far apart,
# and below this share of the highest. Half a percent of 1980 MHz is less than a step of 15 MHz.
LOCK_READINGS = 4
LOCK_PAUSE_S = 0.1
LOCK_BELOW = 0.995


class KnobState(StrEnum):
    """Say how far a setting of one knob has come."""

    UNCHANGED = "unchanged"  # the card reads what it had before
    # Noted, and perhaps set: the driver has not answered, or the card reads otherwise.
    ASKED = "asked"
    # The driver accepted it. The card tells neither that it has it nor that it has not.
    APPLIED = "applied"
    READ_BACK = "read back"  # the driver accepted it, and the card reads so
    # The driver accepted the earlier value, and the card tells nothing (the clock of an idle card).
    GIVEN_BACK = "given back"
    UNKNOWN = "unknown"  # what the card had before is not known: its note cannot be read


# States in which a knob may have another value than before. ``GIVEN_BACK`` is none of them: the
# driver has confirmed it, and the card is only looked at once more (``CardNote.is_unconfirmed``).
CHANGED_STATES = frozenset(
    {KnobState.ASKED, KnobState.APPLIED, KnobState.READ_BACK, KnobState.UNKNOWN}
)


class Evidence(Enum):
    """Say what a reading tells about a setting."""

    AGREES = "agrees"  # the card has it
    DIFFERS = "differs"  # the card has it not
    SILENT = "silent"  # the reading tells neither


class RefusedKnob(Refused):
    """A driver, or the scope of the daemon (``card_daemon.DaemonScope``, what its administrator
    allows), does not allow a setting of one knob. ``allowed`` is the range that the daemon allows,
    in Hz or W; None where the driver refused.
    """

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
    """Hold what a card is to have, or has.

    As a wish, None is a knob that nobody wants to set: it keeps, or gets back, what it had before.
    As what a card has, None is a clock without a lock, or a limit that was not touched."""

    core_hz: Range | None = None  # lowest and highest of the lock
    memory_hz: Range | None = None
    limit_w: float | None = None
    profile_mask: float | None = None
    smoothing: float | None = None

    def describe(self) -> str:
        """Write the settings for people; a clock by the highest that its lock lets it have."""
        parts = []
        if self.core_hz is not None:
            parts.append(f"core {self.core_hz[1] / 1e6:.0f} MHz")
        if self.memory_hz is not None:
            parts.append(f"memory {self.memory_hz[1] / 1e6:.0f} MHz")
        if self.limit_w is not None:
            parts.append(f"limit {self.limit_w:.0f} W")
        if self.profile_mask is not None:
            parts.append(f"power profiles {name_profiles(self.profile_mask)}")
        if self.smoothing is not None:
            parts.append(f"power smoothing {'on' if self.smoothing else 'off'}")
        return ", ".join(parts) or "the driver's own clocks"


def name_profiles(mask: float) -> str:
    """Name the profiles of a mask, in the order of their bits; "none" for none.

    >>> name_profiles(0b1000010)
    'max-q, llm-inference'
    """
    names = {number: name for name, number in POWER_PROFILES.items()}
    bits = [bit for bit in range(int(mask).bit_length()) if int(mask) >> bit & 1]
    return ", ".join(names.get(bit, f"number {bit}") for bit in bits) or "none"


def make_settings(values: Mapping[KnobName, Any]) -> CardSettings:
    """Return settings of the knobs that have a value."""
    return CardSettings(**{KNOB_FIELDS[knob]: value for knob, value in values.items()})


@dataclass(frozen=True)
class KnobRecord:
    """Record one knob that was touched. In the state ``UNKNOWN`` both values are None and mean
    nothing.
    """

    knob: KnobName
    before: KnobValue  # what it had before the first touch, and is to get back
    asked: KnobValue  # what was asked for last
    state: KnobState

    @property
    def now(self) -> KnobValue:
        """Return what the card has as far as is known, else what was asked for last."""
        is_back = self.state in (KnobState.UNCHANGED, KnobState.GIVEN_BACK)
        return self.before if is_back else self.asked


@dataclass(frozen=True)
class CardNote:
    """Record every knob of a card that was touched, and for whom."""

    format: int  # ``FORMAT``
    uuid: str  # of the card, as NVML tells it
    name: str  # of the card, such as "NVIDIA H200"
    holder: str  # who had it set, such as "process 1 of user 0"
    since: str  # when that holder first did, such as "2026-01-01T00:00:00+0000"
    knobs: tuple[KnobRecord, ...] = ()
    # Not empty: this note was not read from disk but stands for a file there that cannot be read
    # (``make_unknown_note``), and this says why.
    unreadable: str = ""

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
        """Say for people what the card is set to. A note that stands for an unreadable file cannot
        say that; its callers tell ``unreadable`` instead.
        """
        asked_knobs = [record.knob for record in self.knobs if record.state is KnobState.ASKED]
        unknown = [record.knob for record in self.knobs if record.state is KnobState.UNKNOWN]
        text = self.now.describe()
        if asked_knobs:
            text += f" (perhaps: the {' and '.join(asked_knobs)} was asked for and not confirmed)"
        if unknown:
            text += f" (what the {' and '.join(unknown)} was before is not known)"
        return text


def make_unknown_note(uuid: str, reason: str) -> CardNote:
    """Return a note that stands for a file which cannot be read, for ``reason``: no knob's earlier
    value is known.
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
    it. ``locked_hz`` is the core lock that the administrator declares (``read_earlier_value``).
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

    ``save`` gets the note before a knob is set, and again after it was read back; what it got last
    is the note of the card. A knob that is not wanted gets back what it had. ``RefusedKnob`` names
    a knob that the driver refuses, or accepts without applying it; knobs earlier in the order of
    ``KNOB_FIELDS`` stay set and noted. A power limit that somebody else has changed meanwhile is
    set once more.
    """
    for knob, field in KNOB_FIELDS.items():
        record = note.find_record(knob)
        value: KnobValue = getattr(wanted, field)
        if record is None:
            continue
        is_set = record.state in (KnobState.APPLIED, KnobState.READ_BACK)
        if value is None:
            note = _return_knob(card, note, record, save)
        elif record.asked != value or not is_set or _has_strayed(card, record):
            note = _set_knob(
                card,
                note,
                record,
                value,
                save,
            )


def _has_strayed(card: NvmlCard, record: KnobRecord) -> bool:
    """Tell whether somebody else has changed a power limit that the card had read back."""
    if record.knob != "limit" or record.state is not KnobState.READ_BACK:
        return False
    return _compare_knob(card, record.knob, record.asked, record.before) is Evidence.DIFFERS


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
        # A driver that refuses has changed nothing, unless the card reads otherwise: then the knob
        # stays noted as asked.
        if read_back(card, record.knob, earlier.now, value) is not Evidence.DIFFERS:
            save(note)
        raise RefusedKnob(record.knob, str(error)) from None
    evidence = read_back(card, record.knob, value, earlier.now)
    if evidence is Evidence.DIFFERS:  # the knob stays noted as asked
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
    """Give one knob back what it had, read it back, and return the note of it.

    Until the card was read, the note on disk stays as it is: it says that the knob may be changed.
    """
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
    if evidence is Evidence.SILENT and record.knob in READABLE:  # on any sound card
        raise Refused(f"{card.name} accepted {earlier}, and its {record.knob} cannot be read back.")
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
    """Give knobs whose earlier value is not known the driver's defaults, and return the note of it:
    the board's own power limit, which the card must read then, and no lock of the clocks.

    A clock that tells nothing (of an idle card) counts as unchanged here, on the driver's word
    alone: with no earlier value known, there is nothing to look for later.
    """
    for record in note.knobs:
        if record.state is not KnobState.UNKNOWN:
            continue
        default: KnobValue = card.default_limit_w() if record.knob == "limit" else None
        if record.knob == "limit" and default is None:
            raise Refused(f"{card.name} does not tell its default power limit. Set it by hand.")
        if record.knob in OPTIONAL_KNOBS:
            # A card that does not have it has nothing to give back.
            default = 0.0
            if card.read_optional_knob(record.knob) is None:
                note = note.with_record(
                    KnobRecord(record.knob, default, default, KnobState.UNCHANGED)
                )
                continue
        try:
            card.set_knob(record.knob, default)
        except Refused:
            # A clock that cannot be locked was never locked, so that a refusal does no harm where
            # it stands at its highest or the card has none to set. Below, also on an idle card, it
            # may be locked.
            if record.knob == "limit" or _shows_highest_clock(card, record.knob) is False:
                raise
        evidence = read_back(card, record.knob, default, None)
        text = _describe_value(record.knob, default)
        if evidence is Evidence.DIFFERS:
            raise Refused(f"{card.name} accepted {text}, and still reads otherwise.")
        if evidence is Evidence.SILENT and record.knob in READABLE:
            raise Refused(f"{card.name} accepted {text}, and its limit cannot be read back.")
        reset_record = KnobRecord(record.knob, default, default, KnobState.UNCHANGED)
        note = note.with_record(reset_record)
        # A file that cannot be read stays as evidence until all is done, when the caller sets it
        # aside (``card_notes.remove_note``).
        if not note.unreadable:
            save(note)
    return note


def confirm_returned_knobs(
    card: NvmlCard,
    note: CardNote,
    save: Callable[[CardNote], None],
) -> CardNote:
    """Look whether a card shows by now that clocks were given back, and return the note of it.

    A clock that still shows what was asked for is noted as asked again: it was not given back."""
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

    Limit: what NVML reads, in W. ``RefusedKnob`` where it cannot be read: what is not known cannot
    be given back.

    Core clock: NVML does not tell a lock. ``locked_hz`` is what the administrator declares
    (``wattcast manage daemon --locked``). Where nothing is declared, a clock is taken for locked
    that stays the same, below the highest, while the card works and neither power nor heat holds it
    down. An idle card has low clocks without any lock, so that its lock has to be declared; so does
    one of a card that does not report whether it works or what holds it down.

    Profiles and smoothing: what NVML reads. ``RefusedKnob`` where the card does not have them.

    Memory clock: None, always. A lock of it can neither be seen nor declared, and is lost when
    Wattcast locks that clock and gives it back."""
    if knob == "memory":
        return None
    if knob == "core":
        return (locked_hz, locked_hz) if locked_hz is not None else _find_core_lock(card)
    if knob in OPTIONAL_KNOBS:
        value = card.read_optional_knob(knob)
        if value is None:
            raise RefusedKnob(knob, f"{card.name} has no {NAMES[knob]} that its driver tells.")
        return value
    for _ in range(LIMIT_ATTEMPTS):
        limit_w = card.limit_w()
        if limit_w is not None:
            return limit_w
        time.sleep(READ_PAUSE_S)
    why = f"{card.name} does not tell its power limit, so that it could not be given back"
    raise RefusedKnob(knob, f"{why}. It is not set.")


def _find_core_lock(card: NvmlCard) -> Range | None:
    """Return the lock that a working card's core clock shows; None where it shows none."""
    readings = [card.read_clocks()]
    for _ in range(LOCK_READINGS - 1):
        time.sleep(LOCK_PAUSE_S)
        readings.append(card.read_clocks())
    if not all(_is_telling(reading) for reading in readings):
        return None
    clock_hz = readings[0].core_hz
    core_levels_hz, _ = card.clocks_hz()
    is_steady = all(reading.core_hz == clock_hz for reading in readings)
    is_low = bool(core_levels_hz) and clock_hz < LOCK_BELOW * core_levels_hz[-1]
    return (clock_hz, clock_hz) if is_steady and is_low else None


def _is_telling(reading: ClockReading) -> bool:
    """Tell whether a clock says what the card is allowed: it works, and neither power nor heat
    holds it down. Where the card does not report one of these (None), it tells nothing.
    """
    return reading.is_working is True and reading.is_limited is False


def read_back(
    card: NvmlCard,
    knob: str,
    wanted: KnobValue,
    was: KnobValue,
) -> Evidence:
    """Compare what a knob is to have with what the card reads; wait while it reads otherwise.

    ``was`` is what the knob had before it was set to ``wanted``; None where that is not known or
    was no lock."""
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
    if knob in OPTIONAL_KNOBS:
        value = card.read_optional_knob(knob)
        if value is None:
            return Evidence.SILENT
        return Evidence.AGREES if value == wanted else Evidence.DIFFERS
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
    """Say whether a clock shows the lock ``wanted`` (None: no lock) or still the one before,
    ``was`` (None: no lock, or not known). The first rule that fits decides:

    1. Above ``wanted``: it differs, as a lock keeps every clock from rising above it.
    2. Within ``wanted``: it agrees, though an idle card may be there by chance.
    3. No ``was``: it agrees if no lock is wanted and the clock is at its highest level, ``top_hz``.
       Otherwise it tells nothing: an idle or slowed card is below any lock.
    4. No lock wanted, and above ``was``: it agrees.
    5. At ``was``, while the card works and neither power nor heat holds it down: it differs. A lock
       at the highest level is no lock that one could see.
    6. Anywhere else it tells nothing; nor does a clock that cannot be read (NaN).
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
    is_at_old_lock = abs(clock_hz - was[1]) <= tolerance_hz and was[1] < top_hz - tolerance_hz
    return Evidence.DIFFERS if _is_telling(reading) and is_at_old_lock else Evidence.SILENT


def _shows_highest_clock(card: NvmlCard, knob: str) -> bool | None:
    """Tell whether a clock stands at its highest; None where it has no levels to set."""
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
    if knob == "profiles":
        return f"the power profiles {name_profiles(value)}"
    if knob == "smoothing":
        return f"power smoothing {'on' if value else 'off'}"
    return f"a power limit of {value:.0f} W"
