"""A site limits cards while programs turn their clocks; both go on after a daemon's restart.

``-m slow`` restarts daemons for an hour:
``WATTCAST_CHAOS_S=3600 python -m pytest -m slow tests/control/test_card_leases.py``.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from standin_node import PATIENCE_S, UNTOUCHED, Client, Node, ask, request, wait_for
from test_daemon_faults import PlainCard

from wattcast.control import card_notes
from wattcast.control.card_daemon import CardKeeper, DaemonRequest, DaemonScope
from wattcast.control.card_leases import CardLease, merge_leases, name_holders
from wattcast.control.card_settings import CardSettings

# A program that follows the slowest card: at a clock of s times the highest it makes s^0.3 of the
# work. Its speed stands still otherwise, so that a controller that is at work locks the clocks.
FOLLOWS = (
    "import os, sys, time\n"
    "def read_clock(path):\n"
    "    return int(open(path).read().split()[1]) or 1980\n"
    "work = 0.0\n"
    "while not os.path.exists(sys.argv[1]):\n"
    "    share = min(map(read_clock, sys.argv[2:])) / 1980\n"
    "    work += 20 * share ** 0.3\n"
    "    count = int(work)\n"
    "    work -= count\n"
    "    open(os.environ['WATTCAST_PROGRESS'], 'ab').write(b'.' * count); time.sleep(0.05)\n"
    "raise SystemExit(3)"
)
CARDS = 2
SAFE_W = 300.0
BUDGET_W = 900.0


def lease(number: int, **wanted: object) -> CardLease:
    return CardLease(number, f"process {number}", 0.0, CardSettings(**wanted))


@pytest.mark.parametrize(
    ("control_w", "site_w", "result_w"),
    [
        (None, None, None),
        (None, 450.0, 450.0),
        (250.0, None, 250.0),
        (250.0, 450.0, 250.0),
        (500.0, 450.0, 450.0),
        (500.0, None, 300.0),
    ],
)
def test_the_lower_limit_wins(
    control_w: float | None, site_w: float | None, result_w: float | None
) -> None:
    """Without a site, the administrator's 300 W bound what a program asks for."""
    clocks = {"core_hz": (1.2e9, 1.2e9)}
    leases = {"control": lease(1, limit_w=control_w, **clocks), "limit": lease(2, limit_w=site_w)}
    merged = merge_leases(leases, 300.0)
    assert merged == CardSettings((1.2e9, 1.2e9), None, result_w)


def test_a_site_alone_raises_limits_and_a_program_alone_does_not() -> None:
    assert merge_leases({"limit": lease(2, limit_w=600.0)}, 300.0).limit_w == 600.0
    assert merge_leases({"control": lease(1, limit_w=600.0)}, 300.0).limit_w == 300.0
    assert merge_leases({"control": lease(1, limit_w=600.0)}, None).limit_w == 600.0


def test_holders_are_named_with_what_they_hold() -> None:
    assert name_holders({}) == ""
    assert name_holders({"limit": lease(2)}) == "process 2"
    both = {"limit": lease(2), "control": lease(1)}
    assert name_holders(both) == "process 1 (control) and process 2 (limit)"


def test_two_clients_hold_a_card_and_each_gets_its_part_back(node: Node) -> None:
    (node.folder / "card").write_text("0 0 0 0 300000\n")
    node.serve()
    with Client(node) as site, Client(node) as program:
        assert site.ask("claim", lease="limit")["ok"]
        assert program.ask("claim")["ok"]
        assert not site.ask("set", core_hz=1.2e9)["ok"]
        assert program.ask("set", core_hz=1.2e9, limit_w=500.0)["ok"]
        assert node.card == "1200 1200 0 0 300000"  # nobody has raised it
        assert site.ask("set", limit_w=450.0)["ok"]
        assert node.card == "1200 1200 0 0 450000"
        assert site.ask("read")["limits_w"][0] == 300.0
        assert program.ask("set", core_hz=1.2e9, limit_w=250.0)["ok"]
        assert node.card == "1200 1200 0 0 250000"
        holder = node.call("status", "--socket", str(node.socket)).stdout
        assert "(control)" in holder
        assert "(limit)" in holder
        assert program.ask("release")["ok"]
        assert node.card == "0 0 0 0 450000"
        assert program.ask("claim")["ok"]
        assert program.ask("set", core_hz=1.5e9)["ok"]
        site.__exit__()  # a coordinator that is gone
        wait_for(lambda: node.card == "1500 1500 0 0 300000")
        assert program.ask("release")["ok"]
        assert node.card == "0 0 0 0 300000"


def test_one_connection_holds_one_lease_and_a_lease_has_one_holder(node: Node) -> None:
    node.serve()
    with Client(node) as first, Client(node) as second:
        assert first.ask("claim")["ok"]
        assert "both leases" in first.ask("claim", lease="limit")["say"]
        assert "is held by" in second.ask("claim")["say"]
        assert second.ask("claim", lease="limit")["ok"]
        assert "is held by" in Client(node).ask("claim", lease="limit")["say"]


def test_control_goes_on_after_the_daemon_was_killed(node: Node) -> None:
    """A restarted daemon ended control for the rest of the job."""
    daemon = node.serve()
    program = node.control()
    wait_for(lambda: node.is_set)
    os.kill(node.worker(daemon), signal.SIGKILL)
    wait_for(lambda: node.said().count("the daemon is back") == 1)
    os.kill(node.worker(daemon), signal.SIGKILL)
    wait_for(lambda: node.said().count("the daemon is back") == 2)
    node.stop.touch()
    assert program.wait(PATIENCE_S) == 3, node.said()
    assert "control ends" not in node.said()
    assert node.card == UNTOUCHED


def test_control_goes_on_after_the_controller_was_stopped_for_a_while(node: Node) -> None:
    """A process that the machine did not run for five seconds lost its card for good."""
    node.serve()
    program = node.control()
    wait_for(lambda: node.is_set)
    os.kill(program.pid, signal.SIGSTOP)
    wait_for(lambda: not node.is_set)
    time.sleep(5.0)
    os.kill(program.pid, signal.SIGCONT)
    wait_for(lambda: "the daemon is back, control goes on" in node.said())
    node.stop.touch()
    assert program.wait(PATIENCE_S) == 3, node.said()
    assert "control ends" not in node.said()
    assert node.card == UNTOUCHED


def test_a_daemon_that_ends_tells_its_clients_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between giving cards back and ending it said "not held by you", and control ended."""
    monkeypatch.setattr(card_notes, "FOLDER", tmp_path)
    card: Any = PlainCard()
    keeper = CardKeeper(lambda: card, DaemonScope(), lambda text: None)
    uuid = keeper.uuid
    assert keeper.ask(DaemonRequest("claim", uuid), 1, "us").ok
    assert keeper.stop() == ""
    for op in ("beat", "claim"):
        reply = keeper.ask(DaemonRequest(op, uuid), 1, "us")
        assert not reply.ok
        assert reply.again
        assert reply.say.endswith("the daemon ends.")


def test_a_plane_of_clocks_ends_where_its_daemon_is_lost(node: Node) -> None:
    """Going on, a program would run at the card's own clocks and be filed under others."""
    daemon = node.serve()
    sleeps = (sys.executable, "-c", "import time; time.sleep(30)")
    arguments = ("--apply", "--cores", "2", "--socket", str(node.socket))
    visit = node.start("plane", *arguments, "--", *sleeps)
    wait_for(lambda: node.is_set)
    os.kill(node.worker(daemon), signal.SIGKILL)
    assert visit.wait(PATIENCE_S) != 0
    assert "the daemon was lost at 1980 MHz" in node.said()
    wait_for(lambda: not node.is_set)


def test_a_card_that_an_operator_restored_is_not_claimed_again(node: Node) -> None:
    """A daemon that is there gave the card back on purpose."""
    node.serve()
    program = node.control()
    wait_for(lambda: node.is_set)
    assert node.call("restore", node.uuid, "--socket", str(node.socket)).returncode == 0
    wait_for(lambda: "control ends" in node.said())
    time.sleep(2.0)
    assert not node.is_set
    node.stop.touch()
    program.wait(PATIENCE_S)


class LimitWatch:
    """Read the limits of all cards many times a second, and how long their sum was too high."""

    def __init__(self, node: Node) -> None:
        self.paths = [
            node.folder / (f"card.{place}" if place else "card") for place in range(CARDS)
        ]
        self.node = node
        self.longest_s = 0.0
        self.most_w = 0.0
        self.locked_s = -math.inf  # when clocks of all cards were seen locked last
        self.raised_s = -math.inf  # when limits above the safe shares were seen last
        self.has_ended = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def read_cards(self) -> list[list[int]]:
        return [[int(word) for word in path.read_text().split()] for path in self.paths]

    @property
    def is_controlled(self) -> bool:
        """Tell whether the site and the program hold all cards."""
        if not self.node.listens():
            return False
        with contextlib.suppress(OSError, ValueError):
            (answer,) = ask(self.node, request("status"))
            holders = [card["holder"] for card in answer["cards"]]
            return all("(control)" in who and "(limit)" in who for who in holders)
        return False

    def await_control(self) -> tuple[float, float, float]:
        """Wait until both hold all cards, limits are raised and clocks are locked again; return how
        many seconds each took.

        A restarted daemon gives cards back before anybody gets them, so that a lock seen later is a
        new one."""
        begin_s = time.monotonic()
        wait_for(lambda: self.is_controlled)
        held_s = time.monotonic()
        wait_for(lambda: self.raised_s > held_s)
        raised_s = self.raised_s
        wait_for(lambda: self.locked_s > held_s)
        locked_s = self.locked_s
        return held_s - begin_s, raised_s - begin_s, locked_s - begin_s

    def watch(self) -> None:
        since_s: float | None = None
        while not self.has_ended.wait(0.01):
            cards = self.read_cards()
            now_s = time.monotonic()
            if all(card[1] > 0 for card in cards):
                self.locked_s = now_s
            total_w = sum(card[4] for card in cards) / 1e3
            self.most_w = max(self.most_w, total_w)
            if total_w > 1.001 * SAFE_W * CARDS:
                self.raised_s = now_s
            if total_w <= BUDGET_W + 0.5:
                since_s = None
                continue
            since_s = since_s or now_s
            self.longest_s = max(self.longest_s, now_s - since_s)


def run_site_and_program(node: Node, seconds: float, seed: int) -> tuple[int, LimitWatch]:
    """Limit two cards by a site, turn their clocks by a program, and kill daemons meanwhile."""
    chance = random.Random(seed)
    watch = LimitWatch(node)
    for path in watch.paths:
        path.write_text(f"0 0 0 0 {SAFE_W * 1e3:.0f}\n")
    # A locked clock saves watts here, so that a controller that is at work locks it. With watts that
    # stay, it rightly leaves clocks alone, and nobody sees whether it is at work.
    node.standin.follow("at -10 600 1980 0 45 60", "follow 2.5", f"devices {CARDS}")
    daemon = node.serve()
    site = node.start("site", str(node.socket), "--site-power", f"{BUDGET_W:.0f}W")
    arguments = f"--apply --devices 0-{CARDS - 1} --turn-limit --period 200ms".split()
    files = ("--progress", str(node.folder / "progress"), "--socket", str(node.socket))
    follows = (sys.executable, "-c", FOLLOWS, str(node.stop), *map(str, watch.paths))
    program = node.start("run", *arguments, *files, "--", *follows)
    place = node.started.index(program)
    watch.thread.start()
    resumptions = [watch.await_control()]
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(chance.uniform(1.0, 5.0))
        number = chance.choice((signal.SIGKILL, signal.SIGTERM))
        if chance.random() < 0.7:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(node.worker(daemon), number)
        else:  # a new version is installed
            daemon.send_signal(number)
            daemon.wait(PATIENCE_S)
            wait_for(lambda: not node.listens())
            daemon = node.serve()
        assert program.poll() is None, node.said(place)
        assert site.poll() is None
        resumptions.append(watch.await_control())
    watch.has_ended.set()
    assert "control ends" not in node.said(place)
    node.stop.touch()
    assert program.wait(PATIENCE_S) == 3, node.said(place)
    site.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        site.wait(PATIENCE_S)
    at_rest = [[0, 0, 0, 0, round(1e3 * SAFE_W)]] * CARDS
    wait_for(lambda: watch.read_cards() == at_rest)
    names = ("held by both", "limits raised", "clocks locked")
    for name, after_s in zip(names, np.transpose(resumptions[1:]), strict=True):
        print(f"{name} {np.median(after_s):.1f} s after a restart, at most {max(after_s):.1f} s")
    print(f"limits of {watch.most_w:.0f} W at most, over the budget for {watch.longest_s:.3f} s")
    restarts = len(resumptions) - 1
    print(f"{restarts} restarts; control went on after all of them")
    return restarts, watch


def test_a_site_and_a_program_outlive_some_restarts(node: Node) -> None:
    restarts, watch = run_site_and_program(node, 12.0, seed=53)
    assert restarts >= 1
    assert watch.longest_s < 1.0


@pytest.mark.slow
def test_a_site_and_a_program_outlive_an_hour_of_restarts(node: Node) -> None:
    seconds = float(os.environ.get("WATTCAST_CHAOS_S", "3600"))
    restarts, watch = run_site_and_program(node, seconds, seed=time.time_ns())
    assert restarts > seconds / 60.0
    assert watch.longest_s < 1.0
