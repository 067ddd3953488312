"""Own the cards of a node: ``wattcast manage daemon``, the one process that sets anything.

Clients connect to a Unix socket and send lines of JSON (``DaemonRequest``), each answered by one
line (``DaemonReply``). A client claims a card, sets it within the daemon's scope and is heard at
least every two seconds. A client that is silent, stopped or gone loses its claim, and the card gets
back what it had (``card_settings.py``, ``card_notes.py``).

``run_supervised`` starts the process that serves as a child and starts another one when it dies or
no longer answers; the new one finds the notes and gives the cards back. The child, in turn, gives
everything back and ends when its parent is gone or silent. systemd starts the parent again
(``data/wattcast-manage.service``)."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import (
    dataclass,
    field,
    replace,
)
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Literal,
    NoReturn,
)

import msgspec

from wattcast.control import card_notes, card_settings
from wattcast.control.card_leases import (
    CardLease,
    LeaseKind,
    merge_leases,
    name_holders,
)
from wattcast.control.card_settings import (
    CardNote,
    CardSettings,
    KnobState,
    Range,
    RefusedKnob,
)
from wattcast.core import (
    MissingTool,
    Refused,
    units,
)
from wattcast.core.errors import ExitCode, WattcastError

if TYPE_CHECKING:
    from wattcast.measure.device_control import NvmlCard

SOCKET = card_notes.FOLDER / "socket"
BEAT_S = 2.0  # a client is heard at least this often
SILENT_S = 4.0  # a silent client loses its card, which leaves a second of the promised five
PING_S = 0.5  # between two pings of the parent
LOST_S = 3.0  # a parent or child that is silent for this long is lost
RETRY_S = 2.0  # between attempts to give a card back that did not take it
CONFIRM_S = 60.0  # a card that was idle all this time after it was given back is let go
ANSWER_S = 12.0  # a set of three knobs, each with a driver's deadline, is not waited for longer
ROUNDED = 1.001  # by which a value may pass the ends of a range
RESTART_S = 0.2  # before a serving process that ended is started again; doubled for each failure
LONGEST_RESTART_S = 10.0
ACCEPT_PAUSE_S = 0.2  # after a connection could not be accepted
LONGEST_LINE = 4096
MOST_CLIENTS = 64  # that hold no card; those that hold one are never shut out
UNKNOWN_ADVICE = (
    "Look at the card (nvidia-smi -q -d CLOCK,POWER); "
    "`wattcast manage restore --defaults` as root gives it the driver's defaults."
)
_UNCONFIRMED = (
    "the driver took the clocks back; an idle card does not show it, so it is looked at again"
)


class LostClaim(Refused):
    """A client no longer holds a card, and may claim it anew: it was silent, or the daemon ends."""


Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e13)]
Uuid = Annotated[str, msgspec.Meta(max_length=96)]


class DaemonRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ask the daemon for one thing. ``gpu`` is a UUID."""

    op: Literal["status", "read", "claim", "beat", "set", "release", "restore"]
    gpu: Uuid = ""
    core_hz: Positive | None = None
    memory_hz: Positive | None = None
    limit_w: Positive | None = None
    profile_mask: Annotated[int, msgspec.Meta(ge=0, lt=2**40)] | None = None  # of power profiles
    smoothing: bool | None = None  # of power
    lease: LeaseKind = "control"  # "claim": what of the card is claimed
    defaults: bool = (
        False  # "restore": what a card had is not known, so it gets the driver's defaults
    )


class CardStatus(msgspec.Struct, frozen=True):
    """Tell how a card stands."""

    uuid: str
    name: str
    holder: str  # empty: nobody
    now: CardSettings
    before: CardSettings | None  # None: nothing is changed
    trouble: str = ""  # why it has not back what it had
    knobs: dict[str, KnobState] = {}  # state of every knob that was touched


class DaemonReply(msgspec.Struct, frozen=True):
    """Answer a request. ``knob`` and ``allowed`` name a refused knob and the range it has, if
    any.
    """

    ok: bool
    say: str = ""
    knob: str = ""
    allowed: Range | None = None
    again: bool = False  # the client has lost the card, and may claim it anew
    cards: tuple[CardStatus, ...] = ()
    power_w: float | None = None  # what a card draws, as is the next an answer to "read"
    # The power limit that the card has without control, and the lowest and highest that can be set.
    limits_w: tuple[float, float, float] | None = None
    in_force_w: float | None = None  # the power limit that the card reads now, likewise


@dataclass(frozen=True)
class DaemonScope:
    """Limit what clients may set: ranges of core clock and power limit, on all cards of a
    daemon.
    """

    core_hz: Range = (0.0, float("inf"))
    limit_w: Range = (0.0, float("inf"))
    locked_hz: float | None = None  # the administrator's own lock, which the driver does not tell


def describe_status(
    note: CardNote,
    holder: str,
    trouble: str,
) -> CardStatus:
    """Return how a card stands by its note."""
    before = note.before if note.is_changed else None
    return CardStatus(
        note.uuid,
        note.name,
        holder,
        note.now,
        before,
        trouble,
        note.states,
    )


class CardKeeper:
    """Own one card. All its calls to the driver are made by one thread, one after another."""

    def __init__(
        self,
        open_card: Callable[[], NvmlCard],
        scope: DaemonScope,
        say: Callable[[str], None],
    ) -> None:
        self._open = open_card
        self._scope = scope
        self._say = _make_patient(say)
        self._card: NvmlCard | None = open_card()
        self._late_cards: list[
            NvmlCard
        ] = []  # connections with a call that may still reach the card
        self.uuid = self._card.uuid
        self.card_name = self._card.name
        self._lock = card_notes.lock_card(self.uuid)
        self._driver = ThreadPoolExecutor(1)
        self._tending: Future[None] | None = None
        self._leases: dict[LeaseKind, CardLease] = {}
        self._was_restored = (
            False  # somebody had the card given back, and nobody has claimed it since
        )
        self._is_ending = False
        self._trouble = ""  # why the card has not back what it had
        self._retry_s = 0.0
        self._returned_s = time.monotonic()
        self._note: CardNote | None = None
        self._take_over_note()

    def _take_over_note(self) -> None:
        """Read what an earlier process left; the card is given back at the first look after it."""
        self._note = card_notes.read_note(self.uuid)
        if self._note is None:
            return
        if self._note.unreadable:
            self._trouble = card_notes.describe_leftover(self._note)
            self._say(f"{self.card_name}: {self._trouble}. {UNKNOWN_ADVICE}")
        elif self._note.is_changed:
            self._trouble = f"left by {self._note.holder}"

    def ask(
        self,
        request: DaemonRequest,
        client: int,
        who: str,
    ) -> DaemonReply:
        """Have a request of a client carried out and return the answer."""
        try:
            return self._driver.submit(self._answer, request, client, who).result(ANSWER_S)
        except TimeoutError:
            return DaemonReply(False, f"{self.card_name}: the driver does not answer.")

    def tend(self) -> None:
        """Have the card looked after; call it often.

        It is given back where its client is silent, or where that failed before.
        """
        if self._tending is None or self._tending.done():
            self._tending = self._driver.submit(self._look_after)

    def stop(self) -> str:
        """Give the card back and say what went wrong, if anything."""
        self._is_ending = True
        try:
            self._driver.submit(self._give_back, "the daemon ends").result(ANSWER_S)
        except Exception as error:  # other cards are given back whatever goes wrong with this one
            return self._trouble or str(error) or "the driver does not answer"
        if not self._trouble:
            os.close(self._lock)
        return self._trouble

    def is_held_by(self, client: int) -> bool:
        """Tell whether a client holds a lease of the card now."""
        return self._find_lease(client) is not None

    def _find_lease(self, client: int) -> LeaseKind | None:
        """Return the lease of a client; None where it has none."""
        for kind, lease in tuple(self._leases.items()):
            if lease.client == client:
                return kind
        return None

    @property
    def _who(self) -> str:
        """Name those who hold the card; empty: nobody."""
        return name_holders(self._leases)

    @property
    def status(self) -> CardStatus:
        """Return how the card stands, without asking the driver."""
        if self._note is None:
            plain = CardSettings()
            return CardStatus(
                self.uuid,
                self.card_name,
                self._who,
                plain,
                None,
                self._trouble,
            )
        fresh = describe_status(self._note, self._who, self._trouble)
        return msgspec.structs.replace(fresh, uuid=self.uuid, name=self.card_name)

    def _look_after(self) -> None:
        now_s = time.monotonic()
        for kind, lease in tuple(self._leases.items()):
            if now_s - lease.heard_s > SILENT_S and kind in self._leases:
                self._end_lease(kind, f"{lease.who} was silent for {SILENT_S:.0f} s")
        if now_s < self._retry_s:
            return
        if self._trouble:
            self._give_back(self._trouble)
        elif not self._leases and self._note is not None:
            self._confirm_return()

    def _answer(
        self,
        request: DaemonRequest,
        client: int,
        who: str,
    ) -> DaemonReply:
        try:
            reply = self._carry_out(request, client, who)
        except RefusedKnob as error:
            reply = DaemonReply(False, str(error), error.knob, error.allowed)
        except LostClaim as error:
            reply = DaemonReply(False, str(error), again=True)
        except WattcastError as error:
            reply = DaemonReply(False, str(error))
            if isinstance(error, MissingTool):
                # a driver that hung is asked anew through a connection of its own
                self._drop_card()
        except Exception as error:  # no memory, a failing disk: the card is given back all the same
            self._say(traceback.format_exc())
            reply = DaemonReply(False, f"{self.card_name}: {type(error).__name__}: {error}")
        kind = self._find_lease(client)
        if kind is not None:
            self._leases[kind].heard_s = time.monotonic()
        return reply

    def _carry_out(
        self,
        request: DaemonRequest,
        client: int,
        who: str,
    ) -> DaemonReply:
        op = request.op
        if self._is_ending and op != "release":
            raise LostClaim(f"{self.card_name}: the daemon ends.")
        if op == "restore":
            self._was_restored = True
            return self._give_back(f"{who} asked for it", request.defaults)
        if op == "read":
            return self._read_card()
        if op == "claim":
            return self._claim_card(client, who, request.lease)
        if op == "release" and self._trouble and not self._leases:
            return self._give_back("")  # once more, to say what is wrong
        kind = self._find_lease(client)
        if kind is None:
            why = f"{self.card_name} is not held by you: it was given back, or never claimed."
            raise Refused(why) if self._was_restored else LostClaim(why)
        if op == "release":
            return self._end_lease(kind, "")
        if op == "set":
            self._set_knobs(request, kind)
        return DaemonReply(True, cards=(self.status,))

    def _read_card(self) -> DaemonReply:
        card = self._reach_card()
        power_w = float(card.read().power_w)
        is_told = math.isfinite(power_w)
        limits_w = card.limits_w()
        in_force_w = None if limits_w is None else limits_w[0]
        earlier_w = None if self._note is None else self._note.before.limit_w
        if limits_w is not None and earlier_w is not None:
            limits_w = (earlier_w, *limits_w[1:])
        return DaemonReply(
            True,
            power_w=power_w if is_told else None,
            limits_w=limits_w,
            in_force_w=in_force_w,
        )

    def _claim_card(
        self,
        client: int,
        who: str,
        kind: LeaseKind,
    ) -> DaemonReply:
        holder = self._leases.get(kind)
        if holder is not None and holder.client != client:
            raise Refused(f"{self.card_name} is held by {holder.who}. Wait for it, or end it.")
        if self._find_lease(client) not in (None, kind):
            raise Refused(f"{self.card_name}: one connection cannot hold both leases of a card.")
        if self._trouble:
            why = f"{self.card_name} has not back what it had ({self._trouble})"
            raise Refused(f"{why}. Nothing was set.")
        self._was_restored = False
        if holder is None:
            self._leases[kind] = CardLease(client, who, time.monotonic())
        return DaemonReply(True, cards=(self.status,))

    def _set_knobs(
        self,
        request: DaemonRequest,
        kind: LeaseKind,
    ) -> None:
        """Set what a client wants, as far as the other lease of the card allows it."""
        card = self._reach_card()
        others = (request.core_hz, request.memory_hz, request.profile_mask, request.smoothing)
        if kind == "limit" and any(value is not None for value in others):
            raise Refused("who holds a card's limit sets no clocks.")
        core = None if request.core_hz is None else (request.core_hz, request.core_hz)
        memory = None if request.memory_hz is None else (request.memory_hz, request.memory_hz)
        wanted_settings = CardSettings(
            core,
            memory,
            request.limit_w,
            None if request.profile_mask is None else float(request.profile_mask),
            None if request.smoothing is None else float(request.smoothing),
        )

        since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        note = self._note
        if note is None:
            note = CardNote(
                card_settings.FORMAT,
                self.uuid,
                self.card_name,
                self._who,
                since,
            )
        elif note.holder != self._who:
            note = replace(note, holder=self._who, since=since)
        had_lock = note.before.core_hz is not None
        earlier_wish = self._leases[kind].wanted
        note = card_settings.prepare_records(card, note, wanted_settings, self._scope.locked_hz)
        if note.before.core_hz is not None and not had_lock:
            earlier = note.before.describe()
            self._say(f"{self.card_name} was at {earlier} before; it will get that back")

        self._check_scope(request, note.before.core_hz)
        self._leases[kind].wanted = wanted_settings
        try:
            merged = merge_leases(self._leases, note.before.limit_w)
            card_settings.apply_settings(card, note, merged, self._save_note)
        except BaseException:
            self._leases[kind].wanted = earlier_wish
            raise

    def _check_scope(
        self,
        request: DaemonRequest,
        earlier_hz: Range | None,
    ) -> None:
        """Raise ``RefusedKnob`` where a client asks for more than the daemon allows."""
        lowest_hz, highest_hz = self._scope.core_hz
        if earlier_hz is not None:
            highest_hz = min(highest_hz, earlier_hz[1])
        _check_range("core", request.core_hz, (lowest_hz, highest_hz), "Hz")
        _check_range("limit", request.limit_w, self._scope.limit_w, "W")

    def _save_note(self, note: CardNote) -> None:
        card_notes.save_note(note)
        self._note = note

    def _end_lease(
        self,
        kind: LeaseKind,
        why: str,
    ) -> DaemonReply:
        """Let go of one lease; the card keeps what the other one wants, or gets back what it
        had.
        """
        if len(self._leases) == 1:
            return self._give_back(why)
        del self._leases[kind]
        note = self._note
        if note is None:
            return DaemonReply(True, cards=(self.status,))
        try:
            merged = merge_leases(self._leases, note.before.limit_w)
            note = replace(note, holder=self._who)
            card_settings.apply_settings(self._reach_card(), note, merged, self._save_note)
        except Exception as error:  # what the other one wants cannot be kept: all is given back
            return self._give_back(why or str(error))
        if why:
            self._say(f"{self.card_name}: {kind} was given back: {why}")
        return DaemonReply(True, cards=(self.status,))

    def _give_back(
        self,
        why: str,
        by_defaults: bool = False,
    ) -> DaemonReply:
        """Let go of the card: it gets back what it had, now or at a later attempt."""
        was_held = bool(self._leases)
        self._leases.clear()
        if self._note is None:
            if why and was_held:
                self._say(f"{self.card_name} was given back: {why}")
            self._trouble = ""
            return DaemonReply(True, cards=(self.status,))
        earlier_trouble = self._trouble
        self._trouble = earlier_trouble or "it is being given back"
        try:
            note = self._restore_note(by_defaults)
        except Exception as error:  # whatever goes wrong, the card is not back and is tried again
            return self._report_trouble(error, earlier_trouble)
        self._trouble = ""
        self._returned_s = time.monotonic()
        self._retry_s = self._returned_s + RETRY_S
        if why:
            self._say(f"{self.card_name} was given back: {why}")
        say = "" if note is None else f"{self.card_name}: {_UNCONFIRMED}"
        return DaemonReply(True, say, cards=(self.status,))

    def _restore_note(self, by_defaults: bool) -> CardNote | None:
        """Give back every knob of the note, and return the note where some wait to be confirmed."""
        note = self._note
        if note is not None and note.unreadable:
            note = card_notes.read_note(self.uuid)  # the disk may have recovered
            self._note = note
        if note is None:
            return None
        self._late_cards = [late for late in self._late_cards if late.has_call_under_way]
        card = self._reach_card()
        if self._late_cards:
            card_settings.restore_card(card, note, lambda unsaved: None)
            raise Refused("an earlier call to its driver has not returned and may still set it")
        if by_defaults:
            note = card_settings.reset_unknown_knobs(card, note, self._save_note)
        note = card_settings.restore_card(card, note, self._save_note)
        if note.is_unconfirmed:
            self._save_note(note)
            return note
        card_notes.remove_note(note)
        self._note = None
        return None

    def _report_trouble(
        self,
        error: Exception,
        earlier_trouble: str,
    ) -> DaemonReply:
        self._retry_s = time.monotonic() + RETRY_S
        why = str(error) or type(error).__name__
        if self._note is None:
            text = f"{self.card_name}: {why}"
        elif self._note.unreadable:
            why = f"{card_notes.describe_leftover(self._note)}. {UNKNOWN_ADVICE}"
            text = f"{self.card_name}: {why}"
        else:
            text = f"{self.card_name} still has {self._note.describe_change()}: {why}"
        self._trouble = why
        if not isinstance(error, Refused):
            self._drop_card()
        if earlier_trouble != why:
            self._say(text)
        return DaemonReply(False, text)

    def _confirm_return(self) -> None:
        """Look whether the card shows by now that it was given back; let it go after a minute."""
        note = self._note
        assert note is not None
        self._retry_s = time.monotonic() + RETRY_S
        try:
            note = card_settings.confirm_returned_knobs(self._reach_card(), note, self._save_note)
            is_over = time.monotonic() - self._returned_s > CONFIRM_S
            if note.is_changed:
                self._trouble = "it still reads what it was set to"
            elif is_over or not note.is_unconfirmed:
                card_notes.remove_note(note)
                self._note = None
        except Exception:  # a card that is lost or a disk that fails now is looked at again
            self._drop_card()

    def _reach_card(self) -> NvmlCard:
        if self._card is None:
            card = self._open()
            if card.uuid != self.uuid:
                raise MissingTool(f"the card {self.card_name} is lost: {card.uuid} has its place.")
            self._card = card
        return self._card

    def _drop_card(self) -> None:
        """Leave a connection to the driver; a call that hangs in it may still reach the card."""
        card = self._card
        self._card = None
        if card is not None and card.has_call_under_way:
            self._late_cards.append(card)


def _check_range(
    knob: str,
    value: float | None,
    allowed: Range,
    unit: str,
) -> None:
    lowest, highest = allowed
    if value is None or lowest / ROUNDED <= value <= highest * ROUNDED:
        return
    end = f"{units.show(lowest, unit)} as the lowest"
    if value > highest:
        end = f"{units.show(highest, unit)} as the highest"
    raise RefusedKnob(knob, f"{knob} {units.show(value, unit)}: the daemon allows {end}.", allowed)


def _make_patient(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``say`` that loses a line rather than a card: who read the lines may be gone."""

    def say_if_heard(text: str) -> None:
        with suppress(OSError, ValueError, MemoryError):
            say(text)

    return say_if_heard


@dataclass
class ClientSlot:
    """Hold one connection: whose it is, when it last asked for anything, and what it has
    claimed.
    """

    connection: socket.socket
    process: int
    user: int
    heard_s: float
    claimed: set[str] = field(default_factory=set)

    @property
    def who(self) -> str:
        """Name the client for people."""
        return f"process {self.process} of user {self.user}"


class ClientTable:
    """Hold all connections, and make room for a new one where there are too many.

    Nobody is shut out by connections of others: the user with the most connections loses the one
    that was silent for longest. Connections that hold a card are safe, and there are no more than
    cards."""

    def __init__(self, holds_card: Callable[[int, ClientSlot], bool]) -> None:
        self._holds_card = holds_card
        self._slots: dict[int, ClientSlot] = {}
        self._lock = threading.Lock()

    def add(
        self,
        number: int,
        slot: ClientSlot,
    ) -> ClientSlot | None:
        """Take a connection in and return the one that has to go for it."""
        with self._lock:
            self._slots[number] = slot
            if len(self._slots) <= MOST_CLIENTS:
                return None
            idle = {n: other for n, other in self._slots.items() if not self._holds_card(n, other)}
            if len(idle) <= MOST_CLIENTS:
                return None
            counts = Counter(other.user for other in idle.values())
            most = max(counts.values())
            crowd = {n: other for n, other in idle.items() if counts[other.user] == most}
            victim = min(crowd, key=lambda n: (n == number, crowd[n].heard_s))
            return self._slots.pop(victim)

    def remove(self, number: int) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._slots.pop(number, None)


class DaemonServer:
    """Serve clients on a Unix socket until told to stop."""

    def __init__(
        self,
        path: Path,
        group: int,
        keepers: Sequence[CardKeeper],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path = path
        self._say = _make_patient(say)
        self._keepers = {keeper.uuid: keeper for keeper in keepers}
        self._clients = ClientTable(self._holds_card)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        earlier_mask = os.umask(0o177)  # nobody connects before the permissions are right
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(earlier_mask)
        os.chown(path, -1, group)
        path.chmod(0o660 if group >= 0 else 0o600)
        self._listener.listen(MOST_CLIENTS)

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Accept clients, one thread each, and tend to the cards meanwhile."""
        number = 0
        while not stopped():
            for keeper in self._keepers.values():
                keeper.tend()
            if select.select([self._listener], [], [], 0.2)[0]:
                number += 1
                self._accept_client(number)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _holds_card(
        self,
        number: int,
        slot: ClientSlot,
    ) -> bool:
        return any(self._keepers[uuid].is_held_by(number) for uuid in tuple(slot.claimed))

    def _accept_client(self, number: int) -> None:
        """Take one client in; no memory, threads or descriptors for it is no reason to leave
        cards.
        """
        try:
            connection, _ = self._listener.accept()
        except (OSError, MemoryError) as error:
            self._say(f"a client could not be accepted: {error}")
            time.sleep(ACCEPT_PAUSE_S)
            return
        try:
            size = struct.calcsize("3i")
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            process, user, _ = struct.unpack("3i", peer)
            slot = ClientSlot(connection, process, user, time.monotonic())
            evicted = self._clients.add(number, slot)
            if evicted is not None:
                _turn_away(evicted)
            arguments = (slot, number)
            threading.Thread(
                target=self._attend_client,
                args=arguments,
                daemon=True,
            ).start()
        except (OSError, RuntimeError, MemoryError) as error:
            self._say(f"a client could not be served: {error}")
            self._clients.remove(number)
            connection.close()

    def _attend_client(
        self,
        slot: ClientSlot,
        number: int,
    ) -> None:
        """Answer a client's lines until it ends; then release what it has claimed."""
        unread = b""
        try:
            with slot.connection as connection:
                while data := connection.recv(LONGEST_LINE):
                    *lines, unread = (unread + data).split(b"\n")
                    for line in lines:
                        slot.heard_s = time.monotonic()
                        reply = self._answer_line(line, number, slot)
                        connection.sendall(msgspec.json.encode(reply) + b"\n")
                    if len(unread) > LONGEST_LINE:
                        break
        except (OSError, MemoryError):
            pass
        finally:
            self._clients.remove(number)
            for uuid in slot.claimed:
                self._keepers[uuid].ask(DaemonRequest("release", uuid), number, slot.who)

    def _answer_line(
        self,
        line: bytes,
        number: int,
        slot: ClientSlot,
    ) -> DaemonReply:
        try:
            request = msgspec.json.decode(line[:LONGEST_LINE], type=DaemonRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return DaemonReply(False, f"not a request: {error}")
        if request.op == "status":
            cards = tuple(keeper.status for keeper in self._keepers.values())
            return DaemonReply(True, cards=cards)
        keeper = self._keepers.get(request.gpu)
        if keeper is None:
            why = f"no GPU {request.gpu} here. `wattcast manage status` lists them."
            return DaemonReply(False, why)
        if request.defaults and slot.user != 0:
            return DaemonReply(False, "only root may give a card the driver's defaults.")
        if request.op == "claim":
            slot.claimed.add(
                request.gpu
            )  # before the answer: whatever happens then, it is released
        reply = keeper.ask(request, number, slot.who)
        is_held = reply.ok if request.op == "claim" else not (reply.ok and request.op == "release")
        if not is_held:
            slot.claimed.discard(request.gpu)
        return reply


def _turn_away(slot: ClientSlot) -> None:
    """Tell a client that it has to go, and end its connection."""
    why = f"user {slot.user} has too many connections that hold no card; this one was closed."
    with suppress(OSError):
        line = msgspec.json.encode(DaemonReply(False, why)) + b"\n"
        slot.connection.send(line, socket.MSG_DONTWAIT)
    with suppress(OSError):
        slot.connection.shutdown(socket.SHUT_RDWR)


def serve_cards(
    open_cards: Sequence[Callable[[], NvmlCard]],
    scope: DaemonScope,
    path: Path,
    group: int,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> ExitCode:
    """Serve until ``stopped``; every card is given back on the way out.

    Return REFUSED where one did not take it. Cards that are lost when the daemon starts are left
    out."""
    card_notes.prepare_folder()
    keepers: list[CardKeeper] = []
    lost: list[MissingTool] = []
    for open_card in open_cards:
        try:
            keepers.append(CardKeeper(open_card, scope, say))
        except MissingTool as error:
            lost.append(error)
            say(f"left out until the daemon starts again: {error}")
    if lost and not keepers:
        raise lost[0]
    troubles: list[str] = []
    try:
        DaemonServer(path, group, keepers, say).serve(stopped)
    except OSError as error:
        say(f"{path}: cannot be served ({error.strerror or error}).")
        troubles.append(str(error))
    finally:
        for keeper in keepers:
            trouble = keeper.stop()
            if trouble:
                say(f"not given back: {keeper.card_name}: {trouble}")
                troubles.append(trouble)
    return ExitCode.REFUSED if troubles else ExitCode.OK


def run_supervised(
    serve: Callable[[Callable[[], bool]], int],
    say: Callable[[str], None],
    lifeline: int | None = None,
) -> int:
    """Run ``serve(stopped)`` in a child process and start another one whenever it dies or is
    silent.

    Ends on SIGINT, SIGTERM and SIGHUP, and when the pipe ``lifeline`` does, once the child has
    given the cards back, with the child's exit code."""
    say = _make_patient(say)
    ending: list[int] = []  # plain, as a signal handler must not touch a lock
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: ending.append(number))
    failures = 0
    while True:
        code, has_answered = _run_once(serve, say, ending, lifeline)
        if not ending:
            failures = 0 if has_answered else failures + 1
            if (
                code == ExitCode.REFUSED and failures
            ):  # not even started: another daemon has the card
                return code
            say(f"the serving process ended ({code}); starting another one")
        pause_s = min(RESTART_S * 2**failures, LONGEST_RESTART_S) if failures else 0.0
        end_s = time.monotonic() + pause_s
        while time.monotonic() < end_s and not ending:
            _notify_systemd(b"WATCHDOG=1")
            time.sleep(0.1)
        if ending:
            return code if code >= 0 else ExitCode.REFUSED


def _run_once(
    serve: Callable[[Callable[[], bool]], int],
    say: Callable[[str], None],
    ending: list[int],
    lifeline: int | None,
) -> tuple[int, bool]:
    """Start one child and watch it until it ends; return its code and whether it ever answered."""
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        say(f"no serving process could be started: {error}")
        return ExitCode.FAILED, False
    with ours, theirs:
        try:
            child = os.fork()
        except OSError as error:
            say(f"no serving process could be started: {error}")
            return ExitCode.FAILED, False
        if child == 0:
            ours.close()
            _run_child(serve, theirs, say)
        theirs.close()
        return _watch_child(child, ours, ending, lifeline)


def _watch_child(
    child: int,
    pipe: socket.socket,
    ending: list[int],
    lifeline: int | None,
) -> tuple[int, bool]:
    """Ping a child until it ends and end it when it is silent.

    Return its code and whether it ever answered.
    """
    heard_s = time.monotonic()
    asked_s = 0.0
    was_told_to_end = False
    has_answered = False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), has_answered
        now_s = time.monotonic()
        if now_s - asked_s >= PING_S:
            asked_s = now_s
            with suppress(OSError):
                pipe.send(b"?", socket.MSG_DONTWAIT)
            _notify_systemd(b"WATCHDOG=1")
        if lifeline is not None and not ending and _has_ended(lifeline):
            ending.append(signal.SIGTERM)
        if ending and not was_told_to_end:
            was_told_to_end = True
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
            heard_s += ANSWER_S  # it has cards to give back
        with suppress(ConnectionError):  # it has just ended
            if select.select([pipe], [], [], 0.1)[0] and pipe.recv(64):
                heard_s = max(heard_s, time.monotonic())
                if not has_answered:
                    _notify_systemd(b"READY=1")
                has_answered = True
        patience_s = LOST_S if has_answered else LOST_S + ANSWER_S
        if time.monotonic() - heard_s > patience_s:
            os.kill(child, signal.SIGKILL)


def _has_ended(lifeline: int) -> bool:
    """Tell whether the process at the other end of a pipe is gone."""
    return bool(select.select([lifeline], [], [], 0)[0]) and not os.read(lifeline, 64)


def _run_child(
    serve: Callable[[Callable[[], bool]], int],
    pipe: socket.socket,
    say: Callable[[str], None],
) -> NoReturn:
    """Serve, answering the parent's pings; ends when told to, or when the parent is gone or
    silent.
    """
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent passes on what is meant for both
    heard_s = time.monotonic()

    def stopped() -> bool:
        nonlocal heard_s
        while select.select([pipe], [], [], 0)[0]:
            try:
                if not pipe.recv(64):
                    return True
                heard_s = time.monotonic()
                pipe.send(b"!", socket.MSG_DONTWAIT)
            except OSError:
                return True  # the parent is gone
        return bool(ending) or time.monotonic() - heard_s > LOST_S

    code: int = ExitCode.FAILED
    try:
        code = serve(stopped)
    except WattcastError as error:
        say(str(error))
        code = error.exit_code
    except Exception:
        say(traceback.format_exc())
    finally:
        os._exit(code)


def _notify_systemd(message: bytes) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a name of the abstract kind
        address = address.replace("@", "\0", 1)
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message, address)
