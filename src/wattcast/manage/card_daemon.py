"""Own the cards of a node: ``wattcast manage daemon``, the one process that sets anything.

Clients connect to a Unix socket and send lines of JSON (``DaemonRequest``), each answered by one line
(``DaemonReply``). A client claims a card, sets it within the daemon's scope and is heard at least every two seconds.
A client that is silent, stopped or gone loses its claim, and the card gets back what it had (``card_notes.py``).

``run_supervised`` starts the process that serves as a child and starts another one when it dies or no longer
answers; the new one finds the notes and gives the cards back. The child, in turn, gives everything back and ends when
its parent is gone or silent. systemd starts the parent again (``data/wattcast-manage.service``).
"""

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import msgspec

from wattcast.core import MissingTool, Refused, dataclass, units
from wattcast.core.errors import ExitCode, WattcastError
from wattcast.manage import card_notes
from wattcast.manage.card_notes import CardNote, CardSettings, Range, RefusedKnob

if TYPE_CHECKING:
    from wattcast.measure.device_control import NvmlCard

SOCKET = card_notes.FOLDER / "socket"
BEAT_S = 2.0  # a client is heard at least this often
SILENT_S = 4.0  # without a word from its client a card is given back, which leaves a second of the promised five
PING_S, LOST_S = 0.5, 3.0  # between parent and child
RETRY_S = 2.0  # between attempts to give a card back that did not take it
ANSWER_S = 12.0  # a set of three knobs, each with a driver's deadline, is not waited for longer
LONGEST_LINE = 4096
MOST_CLIENTS = 64
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e13)]
Uuid = Annotated[str, msgspec.Meta(max_length=96)]


class DaemonRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask the daemon for one thing. ``gpu`` is a UUID."""

    op: Literal["status", "read", "claim", "beat", "set", "release", "restore"]
    gpu: Uuid = ""
    core_hz: Positive | None = None
    memory_hz: Positive | None = None
    limit_w: Positive | None = None


class CardStatus(msgspec.Struct, frozen=True):
    """Tell how a card stands."""

    uuid: str
    name: str
    holder: str  # empty: nobody
    now: CardSettings
    before: CardSettings | None  # None: nothing is changed
    trouble: str = ""  # why it has not back what it had


class DaemonReply(msgspec.Struct, frozen=True):
    """Answer a request. ``knob`` and ``allowed`` say which knob was refused, and its range where it has one."""

    ok: bool
    say: str = ""
    knob: str = ""
    allowed: Range | None = None
    cards: tuple[CardStatus, ...] = ()
    power_w: float | None = None  # what a card draws, as is the next an answer to "read"
    limits_w: tuple[float, float, float] | None = None  # power limit in force, lowest and highest


@dataclass(frozen=True)
class DaemonScope:
    """Limit what clients may set: ranges of the core clock and of the power limit, on all cards of a daemon."""

    core_hz: Range = (0.0, float("inf"))
    limit_w: Range = (0.0, float("inf"))
    locked_hz: float | None = None  # the administrator's own lock, which the driver does not tell


class CardKeeper:
    """Own one card. All its calls to the driver are made by one thread, one after another."""

    def __init__(self, open_card: Callable[[], NvmlCard], scope: DaemonScope, say: Callable[[str], None]) -> None:
        self._open, self._scope, self._say = open_card, scope, say
        self._card: NvmlCard | None = open_card()
        self.uuid, self.card_name = self._card.uuid, self._card.name
        self._lock = card_notes.lock_card(self.uuid)
        self._driver = ThreadPoolExecutor(1)
        self._tending: Future[None] | None = None
        self._note = card_notes.take_over_note(self.uuid, say)
        self._client, self._who, self._heard_s = 0, "", 0.0
        self._trouble, self._retry_s = "", 0.0
        if self._note is not None:
            self._trouble = f"left by {self._note.holder}"

    def ask(self, request: DaemonRequest, client: int, who: str) -> DaemonReply:
        """Have a request of a client carried out and return the answer."""
        try:
            return self._driver.submit(self._answer, request, client, who).result(ANSWER_S)
        except TimeoutError:
            return DaemonReply(False, f"{self.card_name}: the driver does not answer.")

    def tend(self) -> None:
        """Have the card given back where its client is silent, or where that failed before; call it often."""
        if self._tending is None or self._tending.done():
            self._tending = self._driver.submit(self._look_after)

    def stop(self) -> str:
        """Give the card back and say what went wrong, if anything."""
        try:
            self._driver.submit(self._give_back, "the daemon ends").result(ANSWER_S)
        except Exception as error:  # other cards are given back whatever goes wrong with this one
            return self._trouble or str(error) or "the driver does not answer"
        os.close(self._lock)
        return self._trouble

    @property
    def status(self) -> CardStatus:
        """Return how the card stands, without asking the driver."""
        note = self._note if self._note is not None and self._note.changed else None
        now, before = (note.now, note.before) if note is not None else (CardSettings(), None)
        return CardStatus(self.uuid, self.card_name, self._who, now, before, self._trouble)

    def _look_after(self) -> None:
        now_s = time.monotonic()
        if self._client and now_s - self._heard_s > SILENT_S:
            self._give_back(f"{self._who} was silent for {SILENT_S:.0f} s")
        elif self._trouble and now_s >= self._retry_s:
            self._give_back(self._trouble)

    def _answer(self, request: DaemonRequest, client: int, who: str) -> DaemonReply:
        try:
            reply = self._carry_out(request, client, who)
        except RefusedKnob as error:
            reply = DaemonReply(False, str(error), error.knob, error.allowed)
        except WattcastError as error:
            reply = DaemonReply(False, str(error))
            if isinstance(error, MissingTool):
                self._card = None  # a driver that hung is asked anew through a connection of its own
        if client == self._client:
            self._heard_s = time.monotonic()
        return reply

    def _carry_out(self, request: DaemonRequest, client: int, who: str) -> DaemonReply:
        op = request.op
        if op == "restore":
            return self._give_back(f"{who} asked for it")
        if op == "read":
            card = self._reach_card()
            power_w = float(card.read().power_w)
            return DaemonReply(True, power_w=power_w if math.isfinite(power_w) else None, limits_w=card.limits_w())
        if op == "claim":
            if self._client not in (0, client):
                raise Refused(f"{self.card_name} is held by {self._who}. Wait for it, or end it.")
            if self._trouble:
                raise Refused(f"{self.card_name} has not back what it had ({self._trouble}). Nothing was set.")
            self._client, self._who = client, who
            return DaemonReply(True, cards=(self.status,))
        if op == "release" and self._trouble and not self._client:
            return self._give_back("")  # once more, to say what is wrong
        if client != self._client:
            raise Refused(f"{self.card_name} is not held by you: it was given back, or never claimed.")
        if op == "release":
            return self._give_back("")
        if op == "set":
            self._set_knobs(request)
        return DaemonReply(True, cards=(self.status,))

    def _set_knobs(self, wanted: DaemonRequest) -> None:
        scope, card = self._scope, self._reach_card()
        if self._note is None:
            before = card_notes.find_earlier_settings(card, scope.locked_hz)
            if before.core_hz is not None:
                self._say(f"{self.card_name} was at {before.describe()} before; it will get that back")
            told = card_notes.FORMAT, self.uuid, self.card_name, self._who, time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._note = CardNote(*told, before, CardSettings())
        earlier_hz, (lowest_hz, highest_hz) = self._note.before.core_hz, scope.core_hz
        core_hz = lowest_hz, highest_hz if earlier_hz is None else min(highest_hz, earlier_hz[1])
        asked = ("core", wanted.core_hz, core_hz, "Hz"), ("limit", wanted.limit_w, scope.limit_w, "W")
        for knob, value, allowed, unit in asked:
            if value is not None and not allowed[0] * 0.999 <= value <= allowed[1] * 1.001:
                end, word = (allowed[0], "lowest") if value < allowed[0] else (allowed[1], "highest")
                said = f"{knob} {units.show(value, unit)}: the daemon allows {units.show(end, unit)} as the {word}."
                raise RefusedKnob(knob, said, allowed)
        core, memory = (None if hz is None else (hz, hz) for hz in (wanted.core_hz, wanted.memory_hz))

        def save(note: CardNote) -> None:
            card_notes.save_note(note)
            self._note = note

        card_notes.apply_settings(card, self._note, CardSettings(core, memory, wanted.limit_w), save)

    def _give_back(self, why: str) -> DaemonReply:
        """Let go of the card: it gets back what it had, now or at a later attempt."""
        note, held = self._note, bool(self._client)
        self._client, self._who = 0, ""
        if note is not None:
            try:
                card_notes.restore_card(self._reach_card(), note)
            except (WattcastError, OSError) as error:
                self._card = None
                self._retry_s = time.monotonic() + RETRY_S
                if self._trouble != str(error):
                    self._say(f"{self.card_name} still has {note.now.describe()}: {error}")
                self._trouble = str(error)
                return DaemonReply(False, f"{self.card_name} still has {note.now.describe()}: {error}")
            self._note = None
        if why and (held or note is not None):
            self._say(f"{self.card_name} was given back: {why}")
        self._trouble = ""
        return DaemonReply(True, cards=(self.status,))

    def _reach_card(self) -> NvmlCard:
        if self._card is None:
            self._card = self._open()
        return self._card


class DaemonServer:
    """Serve clients on a Unix socket until told to stop."""

    def __init__(self, path: Path, group: int, keepers: Sequence[CardKeeper]) -> None:
        self._path, self._clients = path, 0
        self._keepers = {keeper.uuid: keeper for keeper in keepers}
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)  # nobody connects before the permissions are right
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(before)
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
                connection, _ = self._listener.accept()
                number += 1
                if self._clients >= MOST_CLIENTS:
                    connection.close()
                    continue
                self._clients += 1
                threading.Thread(target=self._attend_client, args=(connection, number), daemon=True).start()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _attend_client(self, connection: socket.socket, client: int) -> None:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        process, user, _ = struct.unpack("3i", peer)
        who, claimed, waiting = f"process {process} of user {user}", set[str](), b""
        try:
            with connection:
                while data := connection.recv(LONGEST_LINE):
                    *lines, waiting = (waiting + data).split(b"\n")
                    for line in lines:
                        connection.sendall(msgspec.json.encode(self._answer_line(line, client, who, claimed)) + b"\n")
                    if len(waiting) > LONGEST_LINE:
                        break
        except OSError:
            pass
        finally:
            self._clients -= 1
            for uuid in claimed:
                self._keepers[uuid].ask(DaemonRequest("release", uuid), client, who)

    def _answer_line(self, line: bytes, client: int, who: str, claimed: set[str]) -> DaemonReply:
        try:
            request = msgspec.json.decode(line[:LONGEST_LINE], type=DaemonRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return DaemonReply(False, f"not a request: {error}")
        if request.op == "status":
            return DaemonReply(True, cards=tuple(keeper.status for keeper in self._keepers.values()))
        keeper = self._keepers.get(request.gpu)
        if keeper is None:
            return DaemonReply(False, f"no GPU {request.gpu} here. `wattcast manage status` lists them.")
        reply = keeper.ask(request, client, who)
        if request.op == "claim" and reply.ok:
            claimed.add(request.gpu)
        return reply


def serve_cards(
    open_cards: Sequence[Callable[[], NvmlCard]],
    scope: DaemonScope,
    path: Path,
    group: int,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> ExitCode:
    """Serve until ``stopped``; every card is given back on the way out. Return REFUSED where one did not take it."""
    card_notes.prepare_folder()
    keepers = [CardKeeper(open_card, scope, say) for open_card in open_cards]
    DaemonServer(path, group, keepers).serve(stopped)
    troubles = [f"{keeper.card_name}: {why}" for keeper in keepers if (why := keeper.stop())]
    for trouble in troubles:
        say(f"not given back: {trouble}")
    return ExitCode.REFUSED if troubles else ExitCode.OK


def run_supervised(
    serve: Callable[[Callable[[], bool]], int], say: Callable[[str], None], lifeline: int | None = None
) -> int:
    """Run ``serve(stopped)`` in a child process and start another one whenever it dies or is silent.

    Ends on SIGINT, SIGTERM and SIGHUP, and when the pipe ``lifeline`` does, once the child has given the cards back,
    with the child's exit code.
    """
    ending: list[int] = []  # plain, as a signal handler must not touch a lock
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: ending.append(number))
    failures = 0
    while True:
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            ours.close()
            _run_child(serve, theirs, say)
        theirs.close()
        code, answered = _watch_child(child, ours, ending, lifeline)
        ours.close()
        if not ending:
            failures = 0 if answered else failures + 1
            if code == ExitCode.REFUSED and failures:  # not even started: another daemon has the card
                return code
            say(f"the serving process ended ({code}); starting another one")
        end_s = time.monotonic() + min(0.2 * 2**failures, 10.0) * (failures > 0)
        while time.monotonic() < end_s and not ending:
            _notify_systemd(b"WATCHDOG=1")
            time.sleep(0.1)
        if ending:
            return code if code >= 0 else ExitCode.REFUSED


def _watch_child(child: int, pipe: socket.socket, ending: list[int], lifeline: int | None) -> tuple[int, bool]:
    """Ping a child until it ends and end it when it is silent; return its code and whether it ever answered."""
    heard_s, asked_s, told, answered = time.monotonic(), 0.0, False, False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), answered
        now_s = time.monotonic()
        if now_s - asked_s >= PING_S:
            asked_s = now_s
            with suppress(OSError):
                pipe.send(b"?", socket.MSG_DONTWAIT)
            _notify_systemd(b"WATCHDOG=1")
        if lifeline is not None and not ending and select.select([lifeline], [], [], 0)[0]:
            ending += [] if os.read(lifeline, 64) else [signal.SIGTERM]  # whoever started the daemon is gone
        if ending and not told:
            told = True
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
            heard_s += ANSWER_S  # it has cards to give back
        with suppress(ConnectionError):  # it has just ended
            if select.select([pipe], [], [], 0.1)[0] and pipe.recv(64):
                heard_s = max(heard_s, time.monotonic())
                if not answered:
                    _notify_systemd(b"READY=1")
                answered = True
        if time.monotonic() - heard_s > LOST_S + (0.0 if answered else ANSWER_S):
            os.kill(child, signal.SIGKILL)


def _run_child(
    serve: Callable[[Callable[[], bool]], int], pipe: socket.socket, say: Callable[[str], None]
) -> NoReturn:
    """Serve, answering the parent's pings; ends when told to, or when the parent is gone or silent."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ending.append(number))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent passes on what is meant for both
    heard_s = time.monotonic()

    def stopped() -> bool:
        nonlocal heard_s
        while select.select([pipe], [], [], 0)[0]:
            with suppress(OSError):
                if not pipe.recv(64):
                    return True
                heard_s = time.monotonic()
                pipe.send(b"!", socket.MSG_DONTWAIT)
                continue
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
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
            sender.sendto(message, address.replace("@", "\0", 1) if address.startswith("@") else address)
