"""What is reported of a card, when drivers lie, fail or hang, notes are torn and clients crowd the
daemon.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from standin_node import UNTOUCHED, USUAL, Client, Node, wait_for

from wattcast.control.card_daemon import MOST_CLIENTS, ClientSlot, ClientTable
from wattcast.control.card_notes import note_path, prepare_folder, read_note
from wattcast.control.card_settings import (
    Evidence,
    compare_clock,
    make_unknown_note,
    read_earlier_value,
    reset_unknown_knobs,
)
from wattcast.core.errors import ExitCode, Refused
from wattcast.measure.device_control import ClockReading

WORKING = ClockReading(0.0, 0.0, is_working=True, is_limited=False)
IDLE = ClockReading(0.0, 0.0, is_working=False, is_limited=False)


def read_status(node: Node) -> tuple[int, dict[str, Any]]:
    done = node.call("status", "--socket", str(node.socket), "--json")
    cards = json.loads(done.stdout)["cards"]
    (card,) = [card for card in cards if card["uuid"] == node.uuid]
    return done.returncode, card


def test_a_limit_that_cannot_be_read_is_not_set(node: Node) -> None:
    """One failed reading of the power limit, and it was never given back.

    The note said that the limit before was unknown, so that the daemon tried to set a limit of
    None. The card stayed at 500 W, `status` called it free and `restore` ended with an internal
    error."""
    node.serve()
    node.standin.follow(USUAL, "error number 999 0 1e6")
    with Client(node) as client:
        assert client.ask("claim")["ok"]
        refused = client.ask("set", limit_w=500.0)
        assert (refused["ok"], refused["knob"]) == (False, "limit")
        assert "does not tell its power limit" in refused["say"]
        assert node.card == UNTOUCHED

        node.standin.follow(USUAL)
        assert client.ask("set", core_hz=1.2e9)["ok"]
        assert client.ask("set", core_hz=1.2e9, limit_w=500.0)[
            "ok"
        ]  # it is read when it is first touched
        assert node.card == "1200 1200 0 0 500000"
        assert read_status(node)[1]["before"]["limit_w"] == 700.0
        assert client.ask("release")["ok"]
    assert node.card == UNTOUCHED
    assert read_status(node)[0] == ExitCode.OK
    assert node.notes == []


def test_a_limit_that_cannot_be_read_back_is_not_called_given_back(node: Node) -> None:
    node.serve()
    with Client(node) as client:
        assert client.ask("claim")["ok"]
        assert client.ask("set", limit_w=500.0)["ok"]
        node.standin.follow(USUAL, "error number 999 0 1e6")
        released = client.ask("release")
        assert not released["ok"]
        assert "cannot be read back" in released["say"]
    code, card = read_status(node)
    assert code == ExitCode.REFUSED
    assert card["trouble"]
    node.standin.follow(USUAL)
    wait_for(lambda: node.notes == [])
    assert node.card == UNTOUCHED
    assert read_status(node)[0] == ExitCode.OK


@pytest.mark.parametrize(
    ("lie", "wanted"),
    [
        ("limit_set", {"limit_w": 500.0}),
        ("reset", {"core_hz": 1.2e9}),
        ("set", {"core_hz": 1.2e9, "limit_w": 500.0}),
    ],
)
def test_a_give_back_is_read_back(node: Node, lie: str, wanted: dict[str, float]) -> None:
    """A driver that answered OK and applied nothing was believed, and the note deleted."""
    node.serve()
    with Client(node) as client:
        assert client.ask("claim")["ok"]
        assert client.ask("set", **wanted)["ok"]
        node.standin.follow(USUAL, f"lie {lie} 0 1e6")
        released = client.ask("release")
        assert not released["ok"]
        assert "still" in released["say"]
        assert not client.ask("claim")["ok"]
    assert node.is_set
    code, card = read_status(node)
    assert code == ExitCode.REFUSED
    assert card["before"] is not None
    restored = node.call("restore", "--socket", str(node.socket))
    assert restored.returncode == ExitCode.REFUSED, restored.stderr
    assert "internal error" not in restored.stderr
    node.standin.follow(USUAL)
    wait_for(lambda: node.notes == [])
    assert node.card == UNTOUCHED


def test_a_setting_that_is_not_applied_is_refused(node: Node) -> None:
    node.serve()
    node.standin.follow(USUAL, "lie set 0 1e6")
    with Client(node) as client:
        assert client.ask("claim")["ok"]
        for knob, wanted in (("limit", {"limit_w": 500.0}), ("core", {"core_hz": 1.2e9})):
            refused = client.ask("set", **wanted)
            assert (refused["ok"], refused["knob"]) == (False, knob)
            assert "does not apply it" in refused["say"]
        assert client.ask("release")["ok"]  # the card reads what it had
    assert node.notes == []


def test_an_idle_card_is_given_back_and_looked_at_again(node: Node) -> None:
    """The clock of an idle card shows no lock: the note stays until the card shows that it is free."""
    node.serve()
    with Client(node) as client:
        assert client.ask("claim")["ok"]
        assert client.ask("set", core_hz=1.2e9)["ok"]
        node.standin.follow("at -10 80 345 1 45 60", "lie reset 0 1e6")
        assert client.ask("release")["ok"]
        code, card = read_status(node)
        assert (code, card["knobs"]) == (ExitCode.OK, {"core": "given back"})
        node.standin.follow(USUAL, "lie reset 0 1e6")  # it works, and is still locked
        wait_for(lambda: read_status(node)[0] == ExitCode.REFUSED)
    node.standin.follow(USUAL)
    wait_for(lambda: node.card == UNTOUCHED and read_note(node.uuid) is None)


def test_a_call_that_hangs_may_still_set_the_card(node: Node) -> None:
    """A set that hung was given up, the card given back, and then the call came through."""
    node.serve()
    gate = node.folder / "gate"
    with Client(node) as client:
        assert client.ask("claim")["ok"]
        assert client.ask("set", limit_w=600.0)["ok"]
        node.standin.follow(USUAL, f"gate {gate}")
        assert not client.ask("set", limit_w=500.0)["ok"]
    node.standin.follow(USUAL)
    wait_for(lambda: node.card == UNTOUCHED)
    code, card = read_status(node)
    assert node.notes, "the late call has not come yet"
    assert code == ExitCode.REFUSED
    assert card["trouble"]
    calls = len(node.calls)
    gate.touch()
    wait_for(lambda: any("500000" in line for line in node.calls[calls:]))  # it comes through
    wait_for(lambda: node.notes == [])  # and is undone
    assert node.card == UNTOUCHED


# -- notes that cannot be read --

SECOND_FORMAT = {
    "format": 2,
    "name": "Stand-in H200",
    "holder": "process 1 of user 0",
    "since": "2026-01-01T00:00:00+0000",
    "before": {"core_hz": None, "memory_hz": None, "limit_w": 650.0},
    "now": {"core_hz": [1.2e9, 1.2e9], "memory_hz": None, "limit_w": 500.0},
    "changed": ["core", "limit"],
}


def damage_note(node: Node, kind: str) -> Path:
    """Leave a note that cannot be read."""
    prepare_folder()
    path = note_path(node.uuid)
    sound = json.dumps({"uuid": node.uuid, **SECOND_FORMAT})
    if kind == "link":
        (node.folder / "elsewhere").write_text(sound)
        path.symlink_to(node.folder / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        texts = {
            "torn": sound[:100],
            "empty": "",
            "later format": sound.replace('"format": 2', '"format": 99'),
            "other card": sound.replace(node.uuid, "GPU-x"),
            "limit of another kind": sound.replace("650.0", "[1, 2]"),
        }
        path.write_text(texts.get(kind, sound))
    if kind == "other user":
        os.chown(path, 12345, 12345)
    return path


UNREADABLE = [
    "torn",
    "empty",
    "link",
    "folder",
    "later format",
    "other card",
    "other user",
    "limit of another kind",
]


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_note_that_cannot_be_read_does_not_mean_free(node: Node, kind: str) -> None:
    """Such a note was set aside and its card called free with exit code 0; a folder crashed the
    daemon.
    """
    (node.folder / "card").write_text("1200 1200 0 0 500000\n")
    path = damage_note(node, kind)
    without_daemon = node.call("status", "--socket", str(node.socket))
    assert without_daemon.returncode == ExitCode.REFUSED, without_daemon.stdout
    assert node.uuid in without_daemon.stdout
    refused = node.call("restore", node.uuid, "--socket", str(node.socket))
    assert refused.returncode == ExitCode.REFUSED, refused.stderr

    daemon = node.serve()
    worker = node.worker(daemon)
    code, card = read_status(node)
    assert code == ExitCode.REFUSED
    assert set(card["knobs"].values()) == {"unknown"}
    with Client(node) as client:
        refusal = client.ask("claim")
        assert not refusal["ok"]
        assert "not known" in refusal["say"]
        assert not client.ask("restore")["ok"]
        assert node.card == "1200 1200 0 0 500000"  # nobody guesses
        assert os.path.lexists(path)

        restored = node.call("restore", "--defaults", "--socket", str(node.socket))
        assert restored.returncode == ExitCode.OK, restored.stderr
        assert node.card == UNTOUCHED
        assert not os.path.lexists(path)
        assert client.ask("claim")["ok"]
    assert node.worker(daemon) == worker


@pytest.mark.parametrize("by_daemon", [True, False])
def test_a_note_of_an_earlier_version_is_taken_over(node: Node, by_daemon: bool) -> None:
    (node.folder / "card").write_text("1200 1200 0 0 500000\n")
    damage_note(node, "sound")
    if by_daemon:
        node.serve()
        wait_for(lambda: node.notes == [])
    else:
        done = node.call("restore", node.uuid)
        assert done.returncode == ExitCode.OK, done.stderr
    assert node.card == "0 0 0 0 650000"


def test_a_limit_that_an_earlier_version_did_not_know_is_unknown(node: Node) -> None:
    (node.folder / "card").write_text("1200 1200 0 0 500000\n")
    path = damage_note(node, "sound")
    path.write_text(path.read_text().replace("650.0", "null"))
    node.serve()
    wait_for(lambda: node.card == "0 0 0 0 500000")
    code, card = read_status(node)
    assert code == ExitCode.REFUSED
    assert card["knobs"]["limit"] == "unknown"
    restored = node.call("restore", "--defaults", "--socket", str(node.socket))
    assert restored.returncode == ExitCode.OK, restored.stderr
    assert node.card == UNTOUCHED


# -- many clients --


def test_idle_connections_shut_nobody_out(node: Node) -> None:
    """64 idle connections of any member of the group shut everyone out, and `restore` said no card
    is changed.
    """
    node.serve()
    with Client(node) as holder:
        assert holder.ask("claim")["ok"]
        assert holder.ask("set", core_hz=1.2e9)["ok"]
        crowd = [Client(node) for _ in range(2 * MOST_CLIENTS)]
        code, card = read_status(node)
        assert code == ExitCode.OK
        assert card["holder"]
        assert holder.ask("beat")["ok"]  # who holds a card is safe
        restored = node.call("restore", "--socket", str(node.socket))
        assert restored.returncode == ExitCode.OK, restored.stderr
        assert "has back what it had" in restored.stderr
        assert node.card == UNTOUCHED
        first = json.loads(crowd[0].stream.readline())
        assert "too many connections" in first["say"]
        for client in crowd:
            client.__exit__()


def test_who_has_the_most_connections_makes_room() -> None:
    holders = {3}
    table = ClientTable(lambda number, slot: number in holders)
    connection: Any = None

    def add(number: int, user: int, heard_s: float) -> ClientSlot | None:
        return table.add(number, ClientSlot(connection, 100 + number, user, heard_s))

    for number in range(MOST_CLIENTS + 1):
        assert add(number, user=1, heard_s=float(number)) is None  # one of them holds a card
    turned_away = add(1000, user=2, heard_s=5000.0)
    assert turned_away is not None
    assert (turned_away.user, turned_away.process) == (1, 100)
    turned_away = add(1001, user=1, heard_s=5001.0)
    assert turned_away is not None
    assert (turned_away.user, turned_away.process) == (1, 101)


def test_a_daemon_that_does_not_answer_is_not_called_free(node: Node) -> None:
    daemon = node.serve()
    worker = node.worker(daemon)
    os.kill(daemon.pid, signal.SIGSTOP)
    os.kill(worker, signal.SIGSTOP)
    code = "from wattcast.control import daemon_client; daemon_client.ANSWER_S = -2.5\n"
    node.command = (node.command[0], "-c", code + "from wattcast.cli.main import entry; entry()")
    try:
        status = node.call("status", "--socket", str(node.socket))
        restored = node.call("restore", "--socket", str(node.socket))
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
        os.kill(worker, signal.SIGCONT)
    assert status.returncode == ExitCode.REFUSED, status.stdout
    assert restored.returncode == ExitCode.REFUSED, restored.stderr
    assert "no card is changed" not in restored.stderr


# -- what a clock shows --


@pytest.mark.parametrize(
    ("mhz", "reading", "wanted", "was", "evidence"),
    [
        (1980, WORKING, None, 1200, Evidence.AGREES),
        (1200, WORKING, None, 1200, Evidence.DIFFERS),
        (1200, IDLE, None, 1200, Evidence.SILENT),
        (345, IDLE, None, 1200, Evidence.SILENT),
        (1200, WORKING, 1200, None, Evidence.AGREES),
        (1980, IDLE, 1200, None, Evidence.DIFFERS),
        (345, IDLE, 1200, None, Evidence.SILENT),
        (1000, WORKING, 1200, 1000, Evidence.DIFFERS),
        (1980, WORKING, None, 1980, Evidence.SILENT),
        (float("nan"), WORKING, None, 1200, Evidence.SILENT),
    ],
)
def test_a_clock_shows_a_lock_only_while_the_card_works(
    mhz: float, reading: ClockReading, wanted: float | None, was: float | None, evidence: Evidence
) -> None:
    ranges = [None if value is None else (value * 1e6, value * 1e6) for value in (wanted, was)]
    assert compare_clock(mhz * 1e6, reading, *ranges, 1980e6) is evidence


class QuietCard:
    """A card that reports its clocks alone: no power limit, and what a test says of its use."""

    name = "Quiet card"

    def __init__(
        self,
        core_hz: float = 1980e6,
        is_working: bool | None = None,
        is_limited: bool | None = None,
    ) -> None:
        self.reading = ClockReading(core_hz, 3.2e9, is_working, is_limited)

    def set_knob(self, knob: str, value: Any) -> None:
        """Accept it."""

    def clocks_hz(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return (345e6, 1200e6, 1980e6), (3.2e9,)

    def read_clocks(self) -> ClockReading:
        return self.reading

    def limit_w(self) -> float | None:
        return None

    def default_limit_w(self) -> float | None:
        return 700.0


@pytest.mark.parametrize(
    ("mhz", "is_working", "is_limited", "is_locked"),
    [
        (1200, True, False, True),
        (1980, True, False, False),  # the highest
        (1200, True, True, False),  # power or heat
        (345, False, False, False),  # idle
        (345, None, None, False),  # perhaps idle: the card does not report it
        (1200, True, None, False),
        (1200, None, False, False),
    ],
)
def test_a_lock_is_seen_on_a_card_that_is_known_to_work_unhindered(
    monkeypatch: pytest.MonkeyPatch,
    mhz: float,
    is_working: bool | None,
    is_limited: bool | None,
    is_locked: bool,
) -> None:
    """The idle clock of a card that does not report its use was taken for a lock, and given back as
    one.
    """
    monkeypatch.setattr("wattcast.control.card_settings.LOCK_PAUSE_S", 0.0)
    card: Any = QuietCard(mhz * 1e6, is_working, is_limited)
    expected = (mhz * 1e6, mhz * 1e6) if is_locked else None
    assert read_earlier_value(card, "core", None) == expected
    assert read_earlier_value(card, "core", 1.5e9) == (1.5e9, 1.5e9)


def test_a_default_limit_that_cannot_be_read_back_is_not_believed() -> None:
    """``restore --defaults`` took the driver's word for it, and the note was removed."""
    card: Any = QuietCard()
    note = make_unknown_note("GPU-1", "torn")
    with pytest.raises(Refused, match="its limit cannot be read back"):
        reset_unknown_knobs(card, note, lambda unsaved: None)
