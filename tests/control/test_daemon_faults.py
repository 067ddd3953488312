"""A fault at every allocation and every disk call of the daemon: the card is restored, or reported as it is."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

STANDIN = Path(__file__).parent.parent / "standin"
sys.path.insert(0, str(STANDIN))

from failing_calls import FailingDisk, FailingSites, Site

from wattcast.control import card_daemon, card_notes, card_settings
from wattcast.control.card_daemon import CardKeeper, DaemonReply, DaemonRequest, DaemonScope
from wattcast.core.errors import WattcastError
from wattcast.measure.device_control import ClockReading, NvmlReading

pytestmark = [  # a fault between opening a file and closing it leaves it to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
UUID = "GPU-fault"
ORIGINAL = {"core": None, "memory": None, "limit": 700.0}
SET_TWICE = (
    DaemonRequest("claim", UUID),
    DaemonRequest("set", UUID, core_hz=1.2e9, limit_w=500.0),
    DaemonRequest("set", UUID, limit_w=400.0),
    DaemonRequest("release", UUID),
)


class PlainCard:
    """A card in this process: it has what it was set to, unless its driver is told otherwise."""

    name = "Plain card"
    uuid = UUID
    has_call_under_way = False

    def __init__(self) -> None:
        self.knobs: dict[str, Any] = dict(ORIGINAL)

    def set_knob(self, knob: str, value: Any) -> None:
        self.knobs[knob] = value

    def limit_w(self) -> float | None:
        return float(self.knobs["limit"])

    def default_limit_w(self) -> float | None:
        return 700.0

    def limits_w(self) -> tuple[float, float, float]:
        return self.knobs["limit"], 200.0, 700.0

    def clocks_hz(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return (1.2e9, 1.98e9), (3.2e9,)

    def read_clocks(self) -> ClockReading:
        core = self.knobs["core"]
        memory = self.knobs["memory"]
        return ClockReading(
            1.98e9 if core is None else core[1], 3.2e9 if memory is None else memory[1], True, False
        )

    def read(self) -> NvmlReading:
        return NvmlReading(time.monotonic(), 1.0, 300.0, 1.98e9, 3.2e9)

    @property
    def is_set(self) -> bool:
        return self.knobs != ORIGINAL


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect what a fault left open before another test is blamed for it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let nothing wait, and keep notes in a folder of the test."""
    folder = tmp_path / "notes"
    monkeypatch.setattr(card_notes, "FOLDER", folder)
    monkeypatch.setattr(card_notes, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(card_settings, "SETTLE_S", 0.0)
    monkeypatch.setattr(
        card_settings, "time", SimpleNamespace(sleep=lambda s: None, monotonic=time.monotonic)
    )
    monkeypatch.setattr(card_daemon, "RETRY_S", 0.0)
    card_notes.prepare_folder()
    return folder


def check_truth(card: PlainCard, keeper: CardKeeper, story: str) -> None:
    """Hold that a card that is set is reported as set, by the daemon and by its note."""
    if not card.is_set:
        return
    status = keeper.status
    assert status.trouble or status.before is not None, story
    note = card_notes.read_note(UUID)
    assert note is not None, f"{story}: no note of {card.knobs}"
    assert note.is_changed, story


def drive(keeper: CardKeeper, requests: tuple[DaemonRequest, ...]) -> list[DaemonReply | Exception]:
    """Ask one thing after another as a client would; a fault may come back as an answer or an exception."""
    replies: list[DaemonReply | Exception] = []
    for request in requests:
        try:
            replies.append(keeper.ask(request, 1, "process 1 of user 0"))
        except Exception as error:
            replies.append(error)
    return replies


def check_scenario(card: PlainCard, keeper: CardKeeper, replies: list[Any], story: str) -> None:
    """Hold the truth after a fault, then that the card is given back once the fault is over."""
    check_truth(card, keeper, story)
    last = replies[-1]
    if isinstance(last, DaemonReply) and last.ok:
        assert not card.is_set, f"{story}: called given back, and is {card.knobs}"
    for lease in keeper._leases.values():
        lease.heard_s = -1e9  # the client is silent from now on
    end_s = time.monotonic() + 240.0
    while card.is_set or keeper.status.trouble or card_notes.read_note(UUID) is not None:
        keeper.tend()
        assert time.monotonic() < end_s, f"{story}: {card.knobs}, {keeper.status}"
        time.sleep(0.001)
    os.close(keeper._lock)
    keeper._driver.shutdown()


def find_step(count: int, is_thorough: bool, some: int = 40) -> int:
    """Return the distance between faults: all of them in the nightly run, some dozens in the usual one."""
    return 1 if is_thorough else max(count // some, 1)


def try_every_site(
    sites: FailingSites,
    run: Callable[[Site | None, int], None],
    fewest: int,
    some: int,
    is_thorough: bool,
    latest: int | None = None,
) -> None:
    """Run without a fault, then with one at the first and the last time of each site that was seen."""
    run(None, 0)
    faults = sites.list_faults(latest)
    assert len(faults) > fewest
    step = find_step(len(faults), is_thorough, some)
    missed = []
    for site, turn in faults[::step]:
        run(site, turn)
        if not sites.has_failed:  # threads did not come to it as often this time
            missed.append((site, turn))
    tried = len(faults[::step])
    print(f"{len(faults)} faults, {tried} tried, {len(missed)} not reached")
    assert len(missed) <= max(0.05 * tried, 2), missed


SCOPES = [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.slow)]
MANAGE_FILES = (
    "control/card_daemon",
    "control/card_notes",
    "control/card_settings",
    "core/whole_files",
)


@pytest.mark.parametrize("is_thorough", SCOPES)
def test_no_memory_at_any_site_of_a_set_and_a_release(quick: Path, is_thorough: bool) -> None:
    sites = FailingSites(*MANAGE_FILES)

    def run(site: Site | None, turn: int) -> None:
        card: Any = PlainCard()
        with sites.failing_at(site, turn):
            keeper = CardKeeper(lambda: card, DaemonScope(), lambda text: None)
            replies = drive(keeper, SET_TWICE)
        check_scenario(card, keeper, replies, f"no memory at {site}, time {turn}")

    try_every_site(sites, run, 600, 60, is_thorough)


@pytest.mark.parametrize("is_thorough", SCOPES)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_disk_that_fails_at_any_call(
    quick: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_lasting: bool, is_thorough: bool
) -> None:
    disk = FailingDisk(monkeypatch, str(quick))

    def run(number: int) -> None:
        card: Any = PlainCard()
        keeper = CardKeeper(lambda: card, DaemonScope(), lambda text: None)
        with disk.failing_at(number, code, is_lasting):
            replies = drive(keeper, SET_TWICE)
        check_scenario(card, keeper, replies, f"disk: {disk.failed_at}")

    run(0)
    count = disk.count
    assert count > 20
    for number in range(1, count + 1, find_step(count, is_thorough)):
        run(number)


def leave_set(card: Any) -> None:
    """Set a card as a daemon does that is killed then."""
    keeper = CardKeeper(lambda: card, DaemonScope(), lambda text: None)
    drive(keeper, SET_TWICE[:2])
    assert card.is_set
    os.close(keeper._lock)
    keeper._driver.shutdown()


def take_over(card: Any, failing: AbstractContextManager[None], story: str) -> None:
    """Start a daemon on a card that was left set while something fails, and check what became of it."""
    keeper = None
    with failing:
        try:
            keeper = CardKeeper(lambda: card, DaemonScope(), lambda text: None)
            for _ in range(3):
                keeper.tend()
                if keeper._tending is not None:
                    keeper._tending.exception(30.0)
        except (MemoryError, OSError, WattcastError):
            pass
    if keeper is None:  # the daemon did not start; the parent starts another one
        note = card_notes.read_note(UUID)
        assert note is None or note.is_changed, story
        assert note is not None or not card.is_set, story
        free_lock(story)
        keeper = CardKeeper(lambda: card, DaemonScope(), lambda text: None)
    check_scenario(card, keeper, [None], story)


@pytest.mark.parametrize("is_thorough", SCOPES)
def test_no_memory_at_any_site_while_a_daemon_takes_over(quick: Path, is_thorough: bool) -> None:
    """The card was left set; whatever fails when the next daemon starts, it is restored or reported."""
    sites = FailingSites(*MANAGE_FILES)

    def run(site: Site | None, turn: int) -> None:
        card: Any = PlainCard()
        leave_set(card)
        take_over(card, sites.failing_at(site, turn, here=True), f"no memory at {site}, {turn}")

    try_every_site(sites, run, 250, 60, is_thorough)


@pytest.mark.parametrize("is_thorough", SCOPES)
def test_a_disk_that_fails_while_a_daemon_takes_over(
    quick: Path, monkeypatch: pytest.MonkeyPatch, is_thorough: bool
) -> None:
    disk = FailingDisk(monkeypatch, str(quick))

    def run(number: int) -> None:
        card: Any = PlainCard()
        leave_set(card)
        take_over(card, disk.failing_at(number), f"disk call {number}")

    run(0)
    count = disk.count
    assert count > 10
    for number in range(1, count + 1, find_step(count, is_thorough)):
        run(number)


def free_lock(story: str) -> None:
    """Close the lock that a daemon which did not start still holds: its process would have ended."""
    path = str(card_notes.note_path(UUID, ".lock"))
    for handle in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{handle}") == path:
                os.close(int(handle))
        except OSError:
            continue


# -- the server around it --


def talk(path: Path, messages: tuple[DaemonRequest, ...]) -> list[dict[str, Any]]:
    """Send requests over one connection; return the answers until it ends."""
    answers: list[dict[str, Any]] = []
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(3.0)  # a connection whose thread has failed stays open, in this process
        try:
            link.connect(str(path))
            stream = link.makefile("rb")
            for message in messages:
                fields = {"op": message.op, "gpu": message.gpu}
                values = {"core_hz": message.core_hz, "limit_w": message.limit_w}
                fields |= {name: value for name, value in values.items() if value is not None}
                link.sendall(json.dumps(fields).encode() + b"\n")
                line = stream.readline()
                if not line:
                    break
                answers.append(json.loads(line))
        except OSError:
            pass
    return answers


@pytest.mark.parametrize(
    "is_thorough", [pytest.param(False, id="some", marks=pytest.mark.realtime), SCOPES[1]]
)
def test_no_memory_at_any_site_of_the_server(
    quick: Path, tmp_path: Path, is_thorough: bool
) -> None:
    """A client may lose its connection; the next one is served and the card is given back."""
    sites = FailingSites("control/card_daemon")
    path = tmp_path / "socket"

    def serve(card: Any, has_ended: threading.Event, outcome: list[Any]) -> None:
        try:
            outcome.append(
                card_daemon.serve_cards(
                    [lambda: card], DaemonScope(), path, -1, lambda text: None, has_ended.is_set
                )
            )
        except Exception as error:
            outcome.append(error)

    def start(card: Any) -> tuple[threading.Thread, threading.Event, list[Any]]:
        has_ended = threading.Event()
        outcome: list[Any] = []
        thread = threading.Thread(target=serve, args=(card, has_ended, outcome), daemon=True)
        thread.start()
        wait_until(lambda: is_listening(path) or not thread.is_alive())
        return thread, has_ended, outcome

    def run(site: Site | None, turn: int) -> None:
        card: Any = PlainCard()
        story = f"no memory at {site}, time {turn}"
        with sites.failing_at(site, turn):
            thread, has_ended, _ = start(card)
            talk(path, SET_TWICE[:3])
            wait_until(lambda: not thread.is_alive() or (not card.is_set and answers(path)), story)
            has_ended.set()
            thread.join(30.0)
        assert not thread.is_alive(), story
        free_lock(story)
        if not card.is_set:
            return
        note = card_notes.read_note(UUID)  # its parent would start another one
        assert note is not None, story
        assert note.is_changed, story
        thread, has_ended, _ = start(card)
        wait_until(lambda: not card.is_set, story)
        wait_until(lambda: answers(path), story)
        has_ended.set()
        thread.join(30.0)
        assert not thread.is_alive(), story
        assert not card.is_set, story
        free_lock(story)

    # the server looks at its cards again and again, so that the last time of a site is one of chance
    try_every_site(sites, run, 200, 12, is_thorough, latest=2)


def answers(path: Path) -> bool:
    """Tell whether a client is told how the card stands."""
    return any(answer["ok"] for answer in talk(path, (DaemonRequest("status"),)))


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as link:
        return link.connect_ex(str(path)) == 0


def wait_until(condition: Callable[[], bool], story: str = "") -> None:
    end_s = time.monotonic() + 240.0  # for what takes a moment on a quiet machine
    while not condition():
        assert time.monotonic() < end_s, f"waited too long: {story}"
        time.sleep(0.002)
