"""Daemon, client and controller against a stand-in driver: what is set, and that nothing stays set."""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from standin_node import IMPATIENT, PATIENCE_S, UNTOUCHED, USUAL, Node, ask, request, wait_for

from wattcast.control import card_notes
from wattcast.control.card_settings import FORMAT, CardNote, CardSettings, KnobRecord, KnobState
from wattcast.core.errors import ExitCode
from wattcast.measure.device_control import NvmlReading

READ = (
    "import math, sys; from wattcast.measure.device_control import NvmlCard\n"
    "card = NvmlCard(0, timeout_s=1.0); card.open(); r = card.read()\n"
    "print(card.name, card.uuid, r.core_hz, r.energy_j, math.isnan(r.work_per_s), card.clocks_hz()[0][-1])"
)


def test_readings_come_from_the_driver_and_what_it_lacks_is_nan(node: Node) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env=node.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    core_hz, energy_j, no_work, top_hz = done.stdout.split()[-4:]
    assert float(core_hz) == float(top_hz) == 1980e6
    assert float(energy_j) > 0
    assert no_work == "True"


PHASES = (
    "import sys; from wattcast.measure.device_control import NvmlCard\n"
    "card = NvmlCard(0, timeout_s=1.0); card.open(); r = card.read()\n"
    "print(r.phase, r.busy, r.memory_busy, r.work_per_s)"
)


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("gpm 95 80 10 20", "memory"),
        ("gpm 98 30 70 5", "compute"),
        ("utilisation 90", "None"),
    ],
)
def test_the_kind_of_phase_comes_from_performance_monitoring_where_there_is_any(
    node: Node, told: str, kind: str
) -> None:
    node.standin.follow(USUAL, told)
    argv = [sys.executable, "-c", PHASES]
    done = subprocess.run(
        argv, env=node.environment, capture_output=True, text=True, timeout=60, check=True
    )
    phase, busy, memory, work = done.stdout.split()
    assert phase == kind
    if told.startswith("gpm"):
        shares = [float(value) / 100 for value in told.split()[1:]]
        assert [float(busy), float(memory)] == pytest.approx(shares[:2])
        assert float(work) == pytest.approx((shares[2] + shares[3]) * 1980e6)


def test_a_phase_that_is_neither_memory_nor_compute_waits_or_is_idle() -> None:
    waits = NvmlReading(0.0, 1.0, 300.0, 2e9, 3e9, busy=0.6, memory_busy=0.2, work_per_s=0.2e9)
    assert waits.phase == "latency"
    assert replace(waits, busy=0.02).phase == "idle"
    assert replace(waits, busy=0.03, work_per_s=math.nan).phase == "idle"


def test_a_dry_run_sets_nothing_and_starts_nothing(node: Node) -> None:
    mark = node.folder / "started"
    done = node.call("run", "--", sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    assert done.returncode == 0, done.stderr
    assert "--apply" in done.stderr
    assert node.calls == []
    assert not mark.exists()


# -- without a daemon, root gets one for the time of the program --


def test_a_program_runs_and_the_card_has_back_what_it_had(node: Node) -> None:
    process = node.control(by_daemon=False)
    wait_for(lambda: len({line for line in node.calls if line.startswith("SetGpu")}) > 1)
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 3, node.said()
    assert not node.is_set
    assert node.notes == []
    assert "the card has back what it had" in node.said()
    assert "NOT" not in node.said()


def test_a_killed_controller_takes_its_own_daemon_along(node: Node) -> None:
    """The daemon of a killed controller stayed, and kept the card from others."""
    process = node.control(by_daemon=False)
    wait_for(lambda: node.is_set)
    process.kill()
    wait_for(lambda: not node.is_set)
    wait_for(lambda: not card_notes.is_tended(node.uuid))


VISIT = "import sys; print(open(sys.argv[1]).read().strip(), file=open(sys.argv[2], 'w'))"


def test_a_program_visits_a_plane_of_clocks(node: Node) -> None:
    """The program sees the clocks that its words name, and the card has back what it had, also when
    we are killed.
    """
    program = (
        sys.executable,
        "-c",
        VISIT,
        str(node.folder / "card"),
        str(node.folder / "at-{core}"),
    )
    dry = node.call("plane", "--cores", "3", "--", *program)
    assert dry.returncode == 0
    assert "1980/" in dry.stderr
    assert not node.calls or not any(line.startswith("Set") for line in node.calls)
    done = node.call("plane", "--apply", "--cores", "3", "--", *program)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 pairs" in done.stderr
    seen = {path.name: path.read_text().split() for path in node.folder.glob("at-*")}
    assert len(seen) == 3
    assert all(card[0] == card[1] == name.removeprefix("at-") for name, card in seen.items()), seen
    assert not node.is_set
    sleeping = node.start(
        "plane",
        "--apply",
        "--cores",
        "2",
        "--",
        sys.executable,
        "-c",
        "import time; time.sleep(60)",
    )
    wait_for(lambda: node.is_set)
    sleeping.kill()
    wait_for(lambda: not node.is_set and not node.notes)  # the note goes last


def test_a_reset_that_fails_is_told_with_exit_code_5(node: Node) -> None:
    """The controller said "clocks reset" and ended with 0 when the driver had refused to reset
    them.
    """
    node.command = (sys.executable, "-c", IMPATIENT)
    process = node.control(by_daemon=False)
    wait_for(lambda: node.is_set)
    node.standin.follow(USUAL, "error reset 3 0 1e9")
    node.stop.touch()
    assert process.wait(2 * PATIENCE_S) == ExitCode.REFUSED, node.said()
    assert node.is_set
    assert "is still set to core" in node.said()
    assert "has back" not in node.said()
    assert node.notes[0].uuid == node.uuid
    told = node.call("status")
    assert told.returncode == ExitCode.REFUSED
    assert node.uuid in told.stdout
    assert "left changed: Stand-in H200" in node.call_doctor()
    node.standin.follow(USUAL)
    assert node.call("restore", node.uuid).returncode == 0
    assert not node.is_set
    assert node.notes == []


def test_an_administrators_lock_is_found_kept_to_and_given_back(node: Node) -> None:
    """A lock somebody else had set was lost when the controller reset the clocks."""
    (node.folder / "card").write_text("1200 1200 0 0 700000\n")
    process = node.control(by_daemon=False)
    wait_for(lambda: any(line.startswith("SetGpu") and "1200" not in line for line in node.calls))
    assert node.notes[0].before == CardSettings((1200e6, 1200e6), None, None)
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 3, node.said()
    assert node.card.startswith("1200 1200")
    set_mhz = [int(line.split()[2]) for line in node.calls if line.startswith("SetGpu")]
    assert max(set_mhz) == 1200  # never above what the administrator allows


def test_memory_clocks_that_cannot_be_locked_are_left_alone(node: Node) -> None:
    """A card that listed two memory clocks and refused to lock them ended control at the first
    move.
    """
    node.standin.follow(USUAL, "memory_mhz 810", "error memory_set 3 0 1e9")
    process = node.control(by_daemon=False)
    wait_for(lambda: len({line for line in node.calls if line.startswith("SetGpu")}) > 1)
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 3, node.said()
    assert "control ends" not in node.said()
    assert not node.is_set


def test_the_power_limit_is_a_knob_where_clocks_are_refused(node: Node) -> None:
    node.standin.follow(USUAL, "error core_set 4 0 1e9")
    process = node.control("--turn-limit", by_daemon=False)
    wait_for(lambda: any(line.startswith("SetPower") for line in node.calls))
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 3, node.said()
    assert "left alone from now on" in node.said()
    assert node.card == UNTOUCHED


def test_a_driver_that_allows_nothing_ends_control_and_not_the_program(node: Node) -> None:
    node.standin.follow(USUAL, "error set 4 0 1e9")
    process = node.control(by_daemon=False)
    wait_for(lambda: "nothing is left to set" in node.said())
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 3, node.said()
    assert node.calls == []
    assert node.notes == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_program_and_the_card_has_back_what_it_had(
    node: Node, number: signal.Signals
) -> None:
    process = node.control(by_daemon=False)
    wait_for(lambda: node.is_set)
    process.send_signal(number)
    assert process.wait(PATIENCE_S) != 0
    assert not node.is_set
    assert node.notes == []


@pytest.mark.parametrize(
    "fault",
    [("tick_ms 1e9",), ("error energy 3 -1 1e9", "error power 3 -1 1e9")],
    ids=["the energy counter stands still", "neither energy nor power can be read"],
)
def test_readings_that_end_give_the_card_back(node: Node, fault: tuple[str, ...]) -> None:
    """Blind, the controller leaves the card as it was; the program runs on."""
    node.serve()
    process = node.control()
    wait_for(lambda: node.is_set)
    node.standin.follow(USUAL, *fault)
    wait_for(lambda: not node.is_set)
    assert process.poll() is None
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 3, node.said()
    assert "Traceback" not in node.said()


# -- the daemon --


def test_one_daemon_has_a_card_wherever_its_socket_is(node: Node) -> None:
    """Another --state folder allowed two controllers on one card."""
    node.serve()
    second = node.call("daemon", "--socket", str(node.folder / "other"))
    assert second.returncode == ExitCode.REFUSED
    assert "another daemon" in second.stderr


def test_a_card_has_one_controller_and_settings_stay_in_scope(node: Node) -> None:
    node.serve("--clocks", "1000MHz:1500MHz", "--limits", "400W:700W")
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(str(node.socket))
        stream = first.makefile("rb")

        def say(message: bytes) -> Any:
            first.sendall(message + b"\n")
            return json.loads(stream.readline())

        assert say(request("claim", gpu=node.uuid))["ok"]
        refused, unclaimed = ask(
            node, request("claim", gpu=node.uuid), request("set", gpu=node.uuid, core_hz=1.2e9)
        )
        assert "is held by" in refused["say"]
        assert not unclaimed["ok"]
        assert not say(request("set", gpu=node.uuid, core_hz=1.98e9))["ok"]
        outside = say(request("set", gpu=node.uuid, core_hz=1.2e9, limit_w=300.0))
        assert (outside["knob"], outside["allowed"]) == ("limit", [400.0, 700.0])
        assert not node.is_set
        assert say(request("set", gpu=node.uuid, core_hz=1.2e9, limit_w=500.0))["ok"]
        assert node.card == "1200 1200 0 0 500000"
        assert say(request("set", gpu=node.uuid, limit_w=500.0))[
            "ok"
        ]  # the clock is not wanted any more
        assert node.card == "0 0 0 0 500000"
    wait_for(
        lambda: not node.is_set and not node.notes
    )  # the connection has ended; the note goes last


def test_a_silent_client_loses_its_card_and_is_told(node: Node) -> None:
    node.serve()
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE_S)
        link.connect(str(node.socket))
        stream = link.makefile("rb")
        for message in (
            request("claim", gpu=node.uuid),
            request("set", gpu=node.uuid, core_hz=1.2e9),
        ):
            link.sendall(message + b"\n")
            assert json.loads(stream.readline())["ok"]
        began = time.monotonic()
        wait_for(lambda: not node.is_set)
        assert time.monotonic() - began > 3.0  # not at the first missed beat
        link.sendall(request("beat", gpu=node.uuid) + b"\n")
        assert "given back" in json.loads(stream.readline())["say"]


def test_status_names_who_holds_a_card_and_restore_takes_it(node: Node) -> None:
    node.serve()
    process = node.control()
    wait_for(lambda: node.is_set)
    told = node.call("status", "--socket", str(node.socket), "--json")
    assert told.returncode == 0, told.stderr
    (card,) = json.loads(told.stdout)["cards"]
    assert str(process.pid) in card["holder"]
    assert set(card["knobs"]) == {"core"}
    done = node.call("restore", "--socket", str(node.socket))
    assert done.returncode == 0, done.stderr
    assert not node.is_set
    wait_for(lambda: "control ends" in node.said())
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 3, node.said()
    nothing, named = (
        node.call("restore", "--socket", str(node.socket), *given).stderr
        for given in ((), (node.uuid,))
    )
    assert nothing.strip() == "no card is changed."
    assert named.strip() == f"{node.uuid}: has back what it had"


MALFORMED = [
    b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"op":"set"}', b'{"op":"launch","gpu":"GPU"}', b'{"op":"set","gpu":1}',
    b'{"op":"set","gpu":"UUID","core_hz":-1}', b'{"op":"set","gpu":"UUID","core_hz":1e400}', b"{" * 3000,
    b'{"op":"set","gpu":"UUID","core_hz":NaN}', b'{"op":"set","gpu":"UUID","core_hz":"1e9"}', b"set UUID 1",
    b'{"op":"set","gpu":"../../etc","core_hz":1e9}', b'{"op":"set","gpu":"UUID","core_hz":1e9,"more":1}',
    b'{"op":"beat","gpu":"UUID"}', b'{"op":"set","gpu":"UUID","limit_w":1}', b'{"op":"release","gpu":"UUID"}',
]  # fmt: skip


def test_ten_thousand_malformed_messages_change_nothing(node: Node) -> None:
    daemon = node.serve()
    worker, draw = node.worker(daemon), random.Random(28)
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(PATIENCE_S)
            link.connect(str(node.socket))
            stream = link.makefile("rb")
            for _ in range(500):
                message = draw.choice(MALFORMED).replace(b"UUID", node.uuid.encode())
                if draw.random() < 0.5:  # any bytes changed, cut or repeated
                    message = bytearray(message * draw.choice((1, 1, 2)))
                    for _ in range(min(len(message), 3)):
                        message[draw.randrange(len(message))] = draw.randrange(256)
                    message = bytes(message[: draw.randrange(len(message) + 1)]).replace(
                        b"\n", b" "
                    )
                link.sendall(message + b"\n")
                assert json.loads(stream.readline())["ok"] is False
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(node.socket))
        with contextlib.suppress(OSError):
            link.sendall(b"x" * 100_000)  # a line that never ends
            link.recv(10)
    assert node.calls == []
    assert node.worker(daemon) == worker
    assert ask(node, request("status"))[0]["ok"]


def test_a_user_outside_the_group_gets_nothing(node: Node) -> None:
    group = next(group for group in grp.getgrall() if group.gr_gid != 0)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        os.chmod(folder, 0o755)
        node.socket = Path(folder) / "socket"
        node.serve("--group", group.gr_name)
        assert node.socket.stat().st_mode & 0o777 == 0o660
        connect = (
            "import os, socket, sys\n"
            "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(12345)\n"
            "raise SystemExit(socket.socket(socket.AF_UNIX).connect_ex(sys.argv[1]))"
        )
        codes = {}
        for gid in (12345, group.gr_gid):
            argv = [sys.executable, "-c", connect, str(node.socket), str(gid)]
            codes[gid] = subprocess.run(argv, timeout=PATIENCE_S).returncode
        node.end()
    assert codes == {12345: errno.EACCES, group.gr_gid: 0}


def test_a_full_disk_refuses_the_setting_and_leaves_no_note(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note cut short by a full disk blocked every later run."""
    from wattcast.control import card_notes
    from wattcast.core.errors import BadInput, Refused

    def full(path: Path, data: bytes) -> None:
        raise BadInput("cannot be written (No space left on device).")

    record = KnobRecord("core", None, (1.2e9, 1.2e9), KnobState.ASKED)
    note = CardNote(FORMAT, node.uuid, "card", "me", "now", (record,))
    monkeypatch.setattr(card_notes, "write_whole", full)
    with pytest.raises(Refused, match="No space left"):
        card_notes.save_note(note)
    assert node.notes == []


def test_watching_sets_nothing_and_uses_the_bundle(node: Node) -> None:
    node.standin.follow(USUAL, "utilisation 90", "name NVIDIA A100-SXM4-80GB")
    done = node.call("watch", "--count", "2", "--period", "200ms", "--json")
    assert done.returncode == 0, done.stderr
    advice = json.loads(done.stdout)["advice"]
    assert any("bundle of a100-sxm-80gb" in note for note in advice["assumptions"])
    assert node.calls == []


def test_a_site_shares_its_budget_and_gives_every_limit_back(node: Node) -> None:
    """Two cards with a safe share of 300 W and 250 W to hand out; both draw all they may."""
    for name in ("card", "card.1"):
        (node.folder / name).write_text("0 0 0 0 300000\n")
    node.standin.follow(USUAL, "devices 2")
    daemon = node.serve()
    coordinator = node.start(
        "site", str(node.socket), "--site-power", "850W", "--priority", f"{node.uuid}-1=1"
    )

    def limits() -> list[float]:
        return [
            int((node.folder / name).read_text().split()[4]) / 1e3 for name in ("card", "card.1")
        ]

    wait_for(lambda: limits()[1] > 340.0)  # the one of priority is raised first, in steps of 50 W
    assert sum(limits()) <= 850.0
    os.kill(node.worker(daemon), signal.SIGKILL)  # the node is lost for a moment
    wait_for(lambda: limits() == [300.0, 300.0])
    wait_for(lambda: limits()[1] > 340.0)  # and found again
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(PATIENCE_S) == 0, node.said()
    wait_for(lambda: limits() == [300.0, 300.0])
    too_small = node.call("site", str(node.socket), "--site-power", "500W")
    assert too_small.returncode == ExitCode.BAD_INPUT
    assert "600 W" in too_small.stderr


def test_no_driver_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "LD_LIBRARY_PATH": str(tmp_path)}
    argv = [sys.executable, "-m", "wattcast", "manage", "watch", "--device", "99"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.MISSING
    assert done.stderr.count("\n") == 1
