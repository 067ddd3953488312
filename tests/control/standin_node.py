"""A node with a stand-in card, and commands that meet it: shared by tests of the daemon."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wattcast.control import card_notes
from wattcast.control.card_settings import CardNote

WORKS = (
    "import os, sys, time\n"
    "while not os.path.exists(sys.argv[1]):\n"
    "    open(os.environ['WATTCAST_PROGRESS'], 'ab').write(b'.' * 20); time.sleep(0.05)\n"
    "raise SystemExit(3)"
)
USUAL = "at -10 300 1980 0 45 60"
UNTOUCHED = "0 0 0 0 700000"
PATIENCE_S = 60.0  # for what takes five seconds on a quiet machine
IMPATIENT = (  # does not wait ten seconds for a card that cannot be given back
    "from wattcast.control import daemon_client; daemon_client.await_restoration.__defaults__ = (1.0,)\n"
    "from wattcast.cli.main import entry; entry()"
)


class Node:
    """The stand-in card, and commands that meet it."""

    def __init__(self, standin: Any, folder: Path) -> None:
        self.standin, self.folder = standin, folder
        self.uuid = standin.always[0].split()[1]
        self.command = (sys.executable, "-m", "wattcast")
        self.stop, self.socket = folder / "stop", folder / "socket"
        tests = Path(__file__).resolve().parents[1]
        places = (tests / "standin" / "own_notes", tests.parent / "src")
        self.environment = {
            **os.environ,
            **standin.environment,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "WATTCAST_TEST_NOTES": str(card_notes.FOLDER),
        }
        self.started: list[subprocess.Popen[str]] = []
        self.clients: list[Client] = []

    def argv(self, *arguments: str) -> list[str]:
        return [*self.command, "manage", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command; its stderr goes to a file, so that nobody blocks on a full pipe."""
        said = (self.folder / f"said{len(self.started)}").open("w")
        process = subprocess.Popen(
            self.argv(*arguments),
            env=self.environment,
            stderr=said,
            stdout=said,
            text=True,
            start_new_session=True,
        )
        said.close()
        self.started.append(process)
        return process

    def said(self, place: int = -1) -> str:
        place = range(len(self.started))[place]
        return (self.folder / f"said{place}").read_text()

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )

    def call_doctor(self) -> str:
        argv = [*self.command, "doctor"]
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=2 * PATIENCE_S
        )
        return done.stdout

    def serve(self, *more: str) -> subprocess.Popen[str]:
        """Start a daemon and wait until it listens."""
        process = self.start("daemon", "--socket", str(self.socket), *more)
        wait_for(lambda: self.listens() or process.poll() is not None)
        assert process.poll() is None, self.said()
        return process

    def listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as link:
            return link.connect_ex(str(self.socket)) == 0

    def control(self, *more: str, by_daemon: bool = True) -> subprocess.Popen[str]:
        """Start a controller on a program that works until ``stop`` exists."""
        where = ("--socket", str(self.socket)) if by_daemon else ()
        arguments = ("--apply", "--period", "100ms", "--progress", str(self.folder / "progress"))
        return self.start(
            "run", *arguments, *where, *more, "--", sys.executable, "-c", WORKS, str(self.stop)
        )

    @property
    def card(self) -> str:
        path = self.folder / "card"
        return path.read_text().strip() if path.exists() else UNTOUCHED

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def is_set(self) -> bool:
        return self.card != UNTOUCHED

    @property
    def notes(self) -> list[CardNote]:
        return [note for note in card_notes.list_leftovers() if note.uuid == self.uuid]

    def worker(self, daemon: subprocess.Popen[str]) -> int:
        """Return the process that serves, a child of the daemon's first one."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(daemon.pid)], capture_output=True, text=True
        )
        return int(listed.stdout.split()[0])

    def end(self) -> None:
        self.stop.touch()
        for client in self.clients:
            client.__exit__()
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def ask(node: Node, *messages: bytes) -> list[dict[str, Any]]:
    """Send raw lines over one connection and return the answers; the connection is closed."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE_S)
        link.connect(str(node.socket))
        stream, found = link.makefile("rb"), []
        for message in messages:
            link.sendall(message + b"\n")
            found.append(json.loads(stream.readline()))
        return found


def request(op: str, **fields: Any) -> bytes:
    return json.dumps({"op": op, **fields}).encode()


class Client:
    """Hold one connection to the daemon of a node, and be heard while the test does other things."""

    def __init__(self, node: Node) -> None:
        self.node = node
        node.clients.append(self)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        wait_for(self.is_accepted)
        self.stream = self.socket.makefile("rb")
        self.turn = threading.Lock()
        self.is_over = threading.Event()
        self.beats = threading.Thread(target=self.keep_heard, daemon=True)

    def is_accepted(self) -> bool:
        """Try to connect; a daemon that has many to accept first is tried again."""
        return self.socket.connect_ex(str(self.node.socket)) != errno.EAGAIN

    def __enter__(self) -> Client:
        self.beats.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the connection, once or again."""
        self.is_over.set()
        if self.beats.ident is not None:
            self.beats.join(PATIENCE_S)
        self.stream.close()
        self.socket.close()

    def keep_heard(self) -> None:
        """Beat every half second; whether the card is held by us does not matter here."""
        while not self.is_over.wait(0.5):
            with contextlib.suppress(OSError, ValueError):
                self.ask("beat")

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request about the node's card and return the answer."""
        with self.turn:
            self.socket.sendall(request(op, gpu=self.node.uuid, **fields) + b"\n")
            answer: dict[str, Any] = json.loads(self.stream.readline())
            return answer
