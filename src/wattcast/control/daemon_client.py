"""Talk to the management daemon without privileges: claim a card, set it, stay heard, give it
back.
"""

from __future__ import annotations

import grp
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from contextlib import (
    ExitStack,
    closing,
    contextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from wattcast.control import card_notes, card_settings
from wattcast.control.card_daemon import (
    ANSWER_S,
    BEAT_S,
    SOCKET,
    UNKNOWN_ADVICE,
    CardStatus,
    DaemonReply,
    DaemonRequest,
    LostClaim,
    describe_status,
)
from wattcast.control.card_notes import describe_leftover, list_leftovers
from wattcast.control.card_settings import (
    CardNote,
    KnobState,
    RefusedKnob,
)
from wattcast.core import files
from wattcast.core.errors import (
    ExitCode,
    MissingTool,
    Refused,
    WattcastError,
    bad_value,
)
from wattcast.measure.device_control import NvmlCard, count_cards

START_S = 30.0  # for a daemon of one's own to listen, on a busy machine
CONNECT_S = 3.0  # for a daemon with many clients waiting to accept one more
REGAIN_S = 60.0  # for a daemon that was lost to take its clients back
REGAIN_PAUSE_S = 0.25  # between attempts meanwhile
RETURN_S = 10.0  # for a daemon that was lost to have given the card back


class SilentDaemon(MissingTool):
    """A daemon is there and does not answer: it is too busy, it hangs, or it has just ended."""


class DaemonLink:
    """Hold one connection to a daemon. Requests are answered one after another."""

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._rest = b""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S + 3.0)
        try:
            self._connect()
        except BaseException:
            self._socket.close()
            raise

    def reconnect(self) -> None:
        """End the connection and begin a new one, after the daemon was lost."""
        self._socket.close()
        self._open()

    def _connect(self) -> None:
        path = self._path
        end_s = time.monotonic() + CONNECT_S
        while True:
            try:
                self._socket.connect(str(path))
                return
            except PermissionError:
                do = (
                    "only root and the daemon's group may use it. Ask the administrator to add you."
                )
                raise Refused(f"{path}: {do}") from None
            except BlockingIOError:  # others are waiting to be accepted
                if time.monotonic() > end_s:
                    raise SilentDaemon(f"the daemon at {path} accepts nobody.") from None
                time.sleep(0.05)
            except OSError as error:
                why = f"no daemon listens at {path} ({error.strerror or error})"
                raise MissingTool(f"{why}. Start it: wattcast manage daemon.") from None

    def close(self) -> None:
        """End the connection; what was claimed through it is given back."""
        self._socket.close()

    def ask(self, request: DaemonRequest) -> DaemonReply:
        """Send a request and return the answer.

        ``SilentDaemon`` when there is none, ``Refused`` when it is no.
        """
        try:
            with suppress(BrokenPipeError):  # who was turned away finds the reason waiting
                self._socket.sendall(msgspec.json.encode(request) + b"\n")
            while b"\n" not in self._rest:
                data = self._socket.recv(65536)
                if not data:
                    raise SilentDaemon("the daemon has ended.")
                self._rest += data
        except OSError as error:
            raise SilentDaemon(f"the daemon does not answer ({error}).") from None
        line, self._rest = self._rest.split(b"\n", 1)
        try:
            reply = msgspec.json.decode(line, type=DaemonReply)
        except msgspec.MsgspecError:
            why = "answers in a way that this version of Wattcast does not understand"
            raise SilentDaemon(f"the daemon at {self._path} {why}.") from None
        if reply.ok:
            return reply
        if reply.again:
            raise LostClaim(reply.say)
        if reply.knob:
            raise RefusedKnob(reply.knob, reply.say, reply.allowed)
        raise Refused(reply.say)

    def status(self) -> tuple[CardStatus, ...]:
        """Return how all cards of the daemon stand."""
        return self.ask(DaemonRequest("status")).cards


class DaemonCard:
    """Control one card through a daemon; readings come from the driver itself, which needs no
    privilege.

    When the daemon is lost, or has not heard of us for too long, the card is claimed and set anew
    as soon as a daemon gives it. A card that somebody had restored is not claimed again.
    """

    count = 1  # of cards; a job has several (``job_cards.JobCards``)

    def __init__(
        self,
        reader: NvmlCard,
        link: DaemonLink,
        rescue: Callable[[], object] | None = None,
    ) -> None:
        """Claim the card. ``rescue`` gives it back without the daemon, where this process may do
        so.
        """
        self._link = link
        self._asked_s = 0.0
        self._rescue = rescue
        self._settings: dict[str, float | None] = {}  # what was asked for last
        self._lost_s = math.inf  # since when the daemon is lost; infinite: it is there
        self._retry_s = 0.0
        self.losses = 0  # of the daemon so far
        self.name = str(reader.name)
        self.uuid = str(reader.uuid)
        self.clocks_hz = reader.clocks_hz
        self.limits_w = reader.limits_w
        self.read = reader.read
        self._ask_once("claim")

    @property
    def is_adrift(self) -> bool:
        """Tell whether the daemon is lost, so that the card has, or will have, what it had
        before.
        """
        return math.isfinite(self._lost_s)

    def read_each(self) -> tuple[Any, ...]:
        """Return the reading of the card."""
        return (self.read(),)

    def beat(self) -> None:
        """Be heard, when it is time. ``Refused`` when the daemon took the card back."""
        if time.monotonic() - self._asked_s > 0.5 * BEAT_S:
            self._ask_daemon("beat")

    def apply(
        self,
        core_hz: float | None,
        memory_hz: float | None,
        limit_w: float | None,
        profile_mask: int | None = None,
        smoothing: bool | None = None,
    ) -> None:
        """Set the card; None leaves a knob as it was before. ``RefusedKnob`` names the one that was
        refused.
        """
        self._settings = {
            "core_hz": core_hz,
            "memory_hz": memory_hz,
            "limit_w": limit_w,
            "profile_mask": profile_mask,
            "smoothing": smoothing,
        }
        self._ask_daemon("set", **self._settings)

    def give_back(self) -> None:
        """Give the card what it had before. ``Refused`` says what it was left at, where that did
        not work.
        """
        try:
            if self.is_adrift:
                raise SilentDaemon("the daemon was lost.")
            self._ask_once("release")
        except (Refused, MissingTool) as error:
            try:
                await_restoration(self.uuid)
            except Refused as left:
                if self._rescue is not None:
                    self._rescue()
                    with suppress(Refused):
                        await_restoration(self.uuid, 0.0)
                        return
                raise Refused(f"{left} The reason: {error}") from None

    def _ask_daemon(
        self,
        op: Any,
        **values: Any,
    ) -> None:
        """Ask the daemon; where it is lost, try to get the card back from another one."""
        if self.is_adrift:
            self._regain_card()
            return
        try:
            self._ask_once(op, **values)
        except (SilentDaemon, LostClaim):
            self._lost_s = time.monotonic()
            self.losses += 1

    def _ask_once(
        self,
        op: Any,
        **values: Any,
    ) -> None:
        self._link.ask(DaemonRequest(op, self.uuid, **values))
        self._asked_s = time.monotonic()

    def _regain_card(self) -> None:
        """Claim the card anew and set what was asked for last; ``SilentDaemon`` after a minute."""
        now_s = time.monotonic()
        if now_s - self._lost_s > REGAIN_S:
            raise SilentDaemon(f"the daemon was lost, and none took the card in {REGAIN_S:.0f} s.")
        if now_s < self._retry_s:
            return
        self._retry_s = now_s + REGAIN_PAUSE_S
        try:
            self._link.reconnect()
            self._ask_once("claim")
            if any(value is not None for value in self._settings.values()):
                self._ask_once("set", **self._settings)
        except RefusedKnob:
            self._lost_s = math.inf
            raise
        except (Refused, MissingTool):
            return  # it does not listen yet, or has not given the card back yet
        self._lost_s = math.inf


def await_restoration(uuid: str, seconds: float = RETURN_S) -> None:
    """Wait until a card whose daemon was lost has back what it had.

    ``Refused`` says what it was left at.
    """
    end_s = time.monotonic() + seconds
    while True:
        note = card_notes.read_note(uuid)
        if note is None or not note.is_changed:
            return
        if time.monotonic() > end_s:
            do = "Start the daemon again, or run `wattcast manage restore` as root."
            raise Refused(f"{describe_leftover(note)}. {do}")
        time.sleep(0.1)


def restore_leftovers(
    open_cards: list[Callable[[], NvmlCard]],
    say: Callable[[str], None],
    uuid: str | None = None,
    by_defaults: bool = False,
) -> list[str]:
    """Give cards back that nobody tends to, without a daemon.

    Return what did not work, one sentence each. With ``uuid`` that card alone is given back, and
    others that were left changed are no trouble of this call.
    """
    leftovers = {note.uuid: note for note in list_leftovers() if uuid in (None, note.uuid)}
    troubles: list[str] = []
    for open_card in open_cards if leftovers else []:
        try:
            card = open_card()
            if leftovers.pop(card.uuid, None) is not None:
                say(_restore_leftover(card, by_defaults))
        except WattcastError as error:
            troubles.append(str(error))
    return troubles + [
        f"{describe_leftover(n)}; the card is not there." for n in leftovers.values()
    ]


def _restore_leftover(card: NvmlCard, by_defaults: bool) -> str:
    """Give one card back by its note, and say what it has."""
    lock = card_notes.lock_card(card.uuid)
    try:
        note = card_notes.read_note(card.uuid)
        if note is None:  # somebody else was faster
            return f"{card.name} has back what it had."
        if by_defaults:
            note = card_settings.reset_unknown_knobs(card, note, card_notes.save_note)
        elif note.unreadable:
            raise Refused(f"{describe_leftover(note)}. {UNKNOWN_ADVICE}")
        note = card_settings.restore_card(card, note, card_notes.save_note)
        card_notes.remove_note(note)
        text = f"{card.name} has back what it had: {note.before.describe()}"
        if note.is_unconfirmed:
            text += ". The driver says so; an idle card does not show its clocks"
        return text
    finally:
        os.close(lock)


@contextmanager
def hold_card(reader: NvmlCard, socket_path: Path | None = None) -> Iterator[DaemonCard]:
    """Claim an opened card through the daemon; root gets a daemon of its own where none runs."""
    with hold_cards([reader], socket_path) as (card,):
        yield card


@contextmanager
def hold_cards(
    readers: Sequence[NvmlCard], socket_path: Path | None = None
) -> Iterator[list[DaemonCard]]:
    """Claim opened cards through the daemon, each by a connection of its own, or none of them."""
    path = socket_path or SOCKET
    with ExitStack() as stack:
        is_own = os.geteuid() == 0 and socket_path is None and not _is_listening(path)
        if is_own:
            path = stack.enter_context(_start_own_daemon([reader.index for reader in readers]))
        cards = []
        for reader in readers:
            rescue = None
            if is_own:
                openers = find_settable_cards([reader.uuid])
                rescue = partial(restore_leftovers, openers, lambda text: None)
            link = stack.enter_context(closing(DaemonLink(path)))
            cards.append(DaemonCard(reader, link, rescue))
        yield cards


def _is_listening(path: Path) -> bool:
    try:
        DaemonLink(path).close()
    except WattcastError:
        return False
    return True


@contextmanager
def _start_own_daemon(devices: Sequence[int]) -> Iterator[Path]:
    """Run a daemon for some cards as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="wattcast-") as folder:
        path = Path(folder) / "socket"
        command = [
            sys.executable,
            "-m",
            "wattcast",
            "manage",
            "daemon",
            "--socket",
            str(path),
        ]
        for device in devices:
            command += ["--gpu", str(device)]
        command.append("--lifeline")  # it ends when we do, whatever ends us
        # A Ctrl-C meant for us must not reach it.
        process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE)
        try:
            end_s = time.monotonic() + START_S
            while not _is_listening(path):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise Refused(
                        "the daemon did not start. Nothing was set, the program was not started."
                    )
                time.sleep(0.05)
            yield path
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(2 * ANSWER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def find_settable_cards(wanted: list[str]) -> list[Callable[[], NvmlCard]]:
    """Return functions that open the cards named by index or UUID; all where none is named."""

    def open_card(index: int) -> NvmlCard:
        card = NvmlCard(index)
        card.open()
        return card

    missing = set(wanted)
    cards: list[Callable[[], NvmlCard]] = []
    for index in range(count_cards()):
        names = {str(index)}
        if missing:
            with suppress(MissingTool):  # a lost card has no UUID, and others are not lost with it
                names.add(open_card(index).uuid)
        if not wanted or names & missing:
            cards.append(partial(open_card, index))
            missing -= names
    if missing or not cards:
        names_text = ", ".join(sorted(missing))
        raise MissingTool(f"no NVIDIA card {names_text}".rstrip() + " on this machine.")
    return cards


def find_group(name: str | None) -> int:
    """Return the number of a group; -1 for root alone."""
    if name is None:
        return -1
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise bad_value(
            "--group", "a group of this machine", name, f"Make it: groupadd --system {name}."
        ) from None


def print_unit() -> str:
    """Return the systemd unit with the path of this installation."""
    text = (
        files("wattcast.control")
        .joinpath("data/wattcast-manage.service")
        .read_text(encoding="utf-8")
    )
    program = shutil.which("wattcast") or f"{sys.executable} -m wattcast"
    return text.replace("@WATTCAST@", program)


def read_status(socket_path: Path | None = None) -> tuple[dict[str, Any], str, ExitCode]:
    """Ask the daemon how its cards stand, and add what the notes of others say.

    Return that for JSON and for people. The code is REFUSED where a card is changed, or may be, and
    nobody is able to give it back, or where a daemon is there and does not answer.
    """
    silence = ""
    is_stuck = False
    cards: list[CardStatus] = []
    try:
        with closing(DaemonLink(socket_path or SOCKET)) as link:
            cards += link.status()
    except MissingTool as error:
        silence = str(error)
        is_stuck = isinstance(error, SilentDaemon)
    tended = {card.uuid for card in cards}
    for note in card_notes.list_notes():
        if note.uuid not in tended:
            cards.append(_describe_untended(note, bool(silence)))
    lines = [silence] if silence else []
    lines += [_describe_card(card) for card in cards]
    plain = {
        "daemon": not silence,
        "why": silence,
        "cards": msgspec.to_builtins(cards),
    }
    has_trouble = is_stuck or any(card.trouble for card in cards)
    return plain, "\n".join(lines), ExitCode.REFUSED if has_trouble else ExitCode.OK


def _describe_untended(note: CardNote, is_silent: bool) -> CardStatus:
    """Return how a card stands that no daemon answers for; another daemon may be at work on it."""
    is_left = note.is_changed and (is_silent or not card_notes.is_tended(note.uuid))
    if not is_left:
        return describe_status(note, "", "")
    trouble = describe_leftover(note) if note.unreadable else f"left by {note.holder}"
    return describe_status(note, "", trouble)


def _describe_card(card: CardStatus) -> str:
    """Say in a line how a card stands."""
    states = set(card.knobs.values())
    text = f"{card.name} ({card.uuid}): "
    text += f"held by {card.holder}" if card.holder else "free"
    if KnobState.UNKNOWN in states:
        text += ", in an unknown state"
    elif card.before is not None:
        text += f", set to {card.now.describe()}, before {card.before.describe()}"
    if KnobState.ASKED in states:
        text += ", not confirmed"
    elif card.before is None and KnobState.GIVEN_BACK in states:
        text += ", given back; an idle card does not show its clocks"
    if card.trouble:
        text += f"; NOT GIVEN BACK: {card.trouble}"
    return text


def restore_cards(
    uuid: str | None,
    socket_path: Path | None,
    say: Callable[[str], None],
    by_defaults: bool = False,
) -> None:
    """Give cards back what they had; ``Refused`` lists those that did not take it."""
    tended: set[str] = set()
    to_restore: list[str] = []
    troubles: list[str] = []
    try:
        with closing(DaemonLink(socket_path or SOCKET)) as link:
            cards = link.status()
            tended = {card.uuid for card in cards}
            to_restore = _list_to_restore(cards, uuid)
            for card_uuid in to_restore:
                troubles += _ask_to_restore(link, card_uuid, by_defaults, say)
    except SilentDaemon as error:
        raise _refuse_to_restore(error) from None
    except MissingTool:
        if os.geteuid() != 0:
            raise
    leftovers = _list_untended(tended, uuid)
    if leftovers:
        troubles += _restore_untended(leftovers, say, by_defaults)
    elif uuid is not None and tended and uuid not in tended:
        troubles.append(f"no GPU {uuid} here. `wattcast manage status` lists them.")
    elif not to_restore:
        say("no card is changed.")
    if troubles:
        raise Refused(" ".join(troubles))


def _list_to_restore(cards: Sequence[CardStatus], uuid: str | None) -> list[str]:
    """Return the cards that the daemon is to give back: one, or all that are changed."""
    if uuid is not None:
        return [card.uuid for card in cards if card.uuid == uuid]
    changed = [c for c in cards if c.before is not None or c.trouble or c.holder]
    return [card.uuid for card in changed]


def _list_untended(tended: set[str], uuid: str | None) -> list[CardNote]:
    """Return the notes of changed cards that the daemon does not tend to."""
    notes = []
    for note in list_leftovers():
        if note.uuid in tended or uuid not in (None, note.uuid):
            continue
        is_of_another_daemon = tended and uuid is None and card_notes.is_tended(note.uuid)
        if not is_of_another_daemon:
            notes.append(note)
    return notes


def _refuse_to_restore(error: SilentDaemon) -> Refused:
    """Return the error that says which cards may be changed while a daemon does not answer."""
    reason = f"a daemon is there and was not reached ({error})"
    advice = "Nothing is known to be given back: try again, or end that daemon first."
    leftovers = ". ".join(describe_leftover(note) for note in list_leftovers())
    return Refused(f"{reason}. {advice} {leftovers}".rstrip())


def _ask_to_restore(
    link: DaemonLink,
    uuid: str,
    by_defaults: bool,
    say: Callable[[str], None],
) -> list[str]:
    """Have the daemon give one card back; return what went wrong."""
    try:
        reply = link.ask(DaemonRequest("restore", uuid, defaults=by_defaults))
    except Refused as error:
        say(f"{uuid}: {error}")
        return [str(error)]
    say(f"{uuid}: {reply.say or 'has back what it had'}")
    return []


def _restore_untended(
    notes: list[CardNote],
    say: Callable[[str], None],
    by_defaults: bool,
) -> list[str]:
    """Give cards back that no daemon tends to, where this user may; return what went wrong."""
    if os.geteuid() != 0:
        return [f"{describe_leftover(note)}. Run this as root." for note in notes]
    troubles: list[str] = []
    for note in notes:
        try:
            cards = find_settable_cards([note.uuid])
        except MissingTool as error:
            troubles.append(f"{describe_leftover(note)}; the card is not there ({error})")
            continue
        troubles += restore_leftovers(cards, say, note.uuid, by_defaults)
    return troubles
