"""Talk to the management daemon without privileges: claim a card, set it, stay heard, give it back."""

from __future__ import annotations

import grp
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from wattcast.core import files
from wattcast.core.errors import ExitCode, MissingTool, Refused, WattcastError, bad_value
from wattcast.manage import card_notes
from wattcast.manage.card_daemon import ANSWER_S, BEAT_S, SOCKET, CardStatus, DaemonReply, DaemonRequest
from wattcast.manage.card_notes import RefusedKnob, describe_leftover, list_leftovers
from wattcast.measure.device_control import NvmlCard, count_cards

START_S = 30.0  # for a daemon of one's own to listen, on a busy machine
RETURN_S = 10.0  # for a daemon that was lost to have given the card back


class DaemonLink:
    """Hold one connection to a daemon. Requests are answered one after another."""

    def __init__(self, path: Path = SOCKET) -> None:
        self._path, self._rest = path, b""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S + 3.0)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            if isinstance(error, PermissionError):
                message = f"{path}: only root and the daemon's group may use it. Ask the administrator to add you."
                raise Refused(message) from None
            why = f"no daemon listens at {path} ({error.strerror or error})"
            raise MissingTool(f"{why}. Start it: wattcast manage daemon.") from None

    def close(self) -> None:
        """End the connection; what was claimed through it is given back."""
        self._socket.close()

    def ask(self, request: DaemonRequest) -> DaemonReply:
        """Send a request and return the answer. ``MissingTool`` when there is none, ``Refused`` when it is no."""
        try:
            self._socket.sendall(msgspec.json.encode(request) + b"\n")
            while b"\n" not in self._rest:
                data = self._socket.recv(65536)
                if not data:
                    raise MissingTool("the daemon has ended.")
                self._rest += data
        except OSError as error:
            raise MissingTool(f"the daemon does not answer ({error}).") from None
        line, self._rest = self._rest.split(b"\n", 1)
        reply = msgspec.json.decode(line, type=DaemonReply)
        if not reply.ok:
            raise RefusedKnob(reply.knob, reply.say, reply.allowed) if reply.knob else Refused(reply.say)
        return reply

    def status(self) -> tuple[CardStatus, ...]:
        """Return how all cards of the daemon stand."""
        return self.ask(DaemonRequest("status")).cards


class DaemonCard:
    """Control one card through a daemon; readings come from the driver itself, which needs no privilege."""

    def __init__(self, reader: NvmlCard, link: DaemonLink, rescue: Callable[[], object] | None = None) -> None:
        """Claim the card. ``rescue`` gives it back without the daemon, where this process may do so."""
        self._link, self._asked_s, self._rescue = link, 0.0, rescue
        self.name, self.uuid = str(reader.name), str(reader.uuid)
        self.clocks_hz, self.limits_w, self.read = reader.clocks_hz, reader.limits_w, reader.read
        self._ask_daemon("claim")

    def beat(self) -> None:
        """Be heard, when it is time. ``Refused`` when the daemon took the card back."""
        if time.monotonic() - self._asked_s > 0.5 * BEAT_S:
            self._ask_daemon("beat")

    def apply(self, core_hz: float | None, memory_hz: float | None, limit_w: float | None) -> None:
        """Set the card; None leaves a knob as it was before. ``RefusedKnob`` names the one that was refused."""
        self._ask_daemon("set", core_hz=core_hz, memory_hz=memory_hz, limit_w=limit_w)

    def give_back(self) -> None:
        """Give the card what it had before. ``Refused`` says what it was left at, where that did not work."""
        try:
            self._ask_daemon("release")
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

    def _ask_daemon(self, op: Any, **values: float | None) -> None:
        self._link.ask(DaemonRequest(op, self.uuid, **values))
        self._asked_s = time.monotonic()


def await_restoration(uuid: str, seconds: float = RETURN_S) -> None:
    """Wait until a card whose daemon was lost has back what it had; ``Refused`` says what it was left at."""
    end_s = time.monotonic() + seconds
    while True:
        left = [note for note in list_leftovers() if note.uuid == uuid]
        if not left:
            return
        if time.monotonic() > end_s:
            do = "Start the daemon again, or run `wattcast manage restore` as root."
            raise Refused(f"{describe_leftover(left[0])}. {do}")
        time.sleep(0.1)


def restore_leftovers(
    open_cards: list[Callable[[], NvmlCard]], say: Callable[[str], None], uuid: str | None = None
) -> list[str]:
    """Give cards back that nobody tends to, without a daemon; return what did not work, one sentence each.

    With ``uuid`` that card alone is given back, and others that were left changed are no trouble of this call.
    """
    troubles: list[str] = []
    left = {note.uuid: note for note in list_leftovers() if uuid in (None, note.uuid)}
    for open_card in open_cards if left else []:
        try:
            card = open_card()
            note = left.pop(card.uuid, None)
            if note is None:
                continue
            lock = card_notes.lock_card(card.uuid)
            try:
                card_notes.restore_card(card, note)

                say(f"{card.name} has back what it had: {note.before.describe()}")
            finally:
                os.close(lock)
        except WattcastError as error:
            troubles.append(str(error))
    return troubles + [f"{describe_leftover(note)}; the card is not there." for note in left.values()]


@contextmanager
def hold_card(reader: NvmlCard, socket_path: Path | None = None) -> Iterator[DaemonCard]:
    """Claim an opened card through the daemon; root gets a daemon of its own where none runs."""
    path = socket_path or SOCKET
    with ExitStack() as stack:
        rescue = None
        if os.geteuid() == 0 and socket_path is None and not _is_listening(path):
            path = stack.enter_context(_start_own_daemon(reader.index))
            rescue = partial(restore_leftovers, find_settable_cards([reader.uuid]), lambda text: None)
        link = stack.enter_context(closing(DaemonLink(path)))
        yield DaemonCard(reader, link, rescue)


def _is_listening(path: Path) -> bool:
    try:
        DaemonLink(path).close()
    except WattcastError:
        return False
    return True


@contextmanager
def _start_own_daemon(device: int) -> Iterator[Path]:
    """Run a daemon for one card as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="wattcast-") as folder:
        path = Path(folder) / "socket"
        command = [sys.executable, "-m", "wattcast", "manage", "daemon", "--gpu", str(device), "--socket", str(path)]
        command.append("--lifeline")  # it ends when we do, whatever ends us
        # A Ctrl-C meant for us must not reach it.
        process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE)
        try:
            end_s = time.monotonic() + START_S
            while not _is_listening(path):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise Refused("the daemon did not start. Nothing was set, the program was not started.")
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

    left, found = set(wanted), list[Callable[[], NvmlCard]]()
    for index in range(count_cards()):
        if not wanted or str(index) in left or (left and open_card(index).uuid in left):
            found.append(partial(open_card, index))
            left -= {str(index), open_card(index).uuid} if left else set()
    if left or not found:
        raise MissingTool(f"no NVIDIA card {', '.join(sorted(left))}".rstrip() + " on this machine.")
    return found


def find_group(name: str | None) -> int:
    """Return the number of a group; -1 for root alone."""
    if name is None:
        return -1
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise bad_value("--group", "a group of this machine", name, f"Make it: groupadd --system {name}.") from None


def print_unit() -> str:
    """Return the systemd unit with the path of this installation."""
    text = files("wattcast.manage").joinpath("data/wattcast-manage.service").read_text(encoding="utf-8")
    program = shutil.which("wattcast") or f"{sys.executable} -m wattcast"
    return text.replace("@WATTCAST@", program)


def read_status(socket_path: Path | None = None) -> tuple[dict[str, Any], str, ExitCode]:
    """Ask the daemon how its cards stand; without one, say what notes were left.

    Return that for JSON and for people, and REFUSED where a card is changed and nobody is able to give it back.
    """
    silence = ""
    try:
        with closing(DaemonLink(socket_path or SOCKET)) as link:
            cards = link.status()
    except MissingTool as error:
        silence = str(error)
        cards = tuple(
            CardStatus(note.uuid, note.name, "", note.now, note.before, f"left by {note.holder}")
            for note in list_leftovers()
        )
    lines = [silence] if silence else []
    for card in cards:
        held = f"held by {card.holder}" if card.holder else "free"
        changed = f", set to {card.now.describe()}, before {card.before.describe()}" if card.before else ""
        trouble = f"; NOT GIVEN BACK: {card.trouble}" if card.trouble else ""
        lines.append(f"{card.name} ({card.uuid}): {held}{changed}{trouble}")
    plain = {"daemon": not silence, "why": silence, "cards": msgspec.to_builtins(cards)}
    is_left = any(card.trouble or (silence and card.before is not None) for card in cards)
    return plain, "\n".join(lines), ExitCode.REFUSED if is_left else ExitCode.OK


def restore_cards(uuid: str | None, socket_path: Path | None, say: Callable[[str], None]) -> None:
    """Give cards back what they had; ``Refused`` lists those that did not take it."""
    troubles: list[str] = []
    try:
        with closing(DaemonLink(socket_path or SOCKET)) as link:
            changed = [c.uuid for c in link.status() if c.before is not None or c.trouble or c.holder]
            for one in [uuid] if uuid else changed:
                try:
                    link.ask(DaemonRequest("restore", one))
                    say(f"{one}: has back what it had")
                except Refused as error:
                    troubles.append(str(error))
                    say(f"{one}: {error}")
            if not changed and not uuid:
                say("no card is changed.")
    except MissingTool:
        if os.geteuid() != 0:
            raise
        if not list(list_leftovers()):
            say("no card is changed.")
            return
        troubles = restore_leftovers(find_settable_cards([uuid] if uuid else []), say, uuid)
    if troubles:
        raise Refused(" ".join(troubles))
