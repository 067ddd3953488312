"""The first run on a real card, walked through on the stand-in: read first, one knob, given back."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from standin_node import PATIENCE_S, USUAL, wait_for

from wattcast.control.first_run import plan_first_run
from wattcast.core.errors import BadInput, MissingTool

if TYPE_CHECKING:
    from standin_node import Node

LEVELS_HZ = [1e9, 1.2e9, 1.5e9, 1.755e9, 1.98e9]
WORKS = (USUAL, "utilisation 100", "follow 1.5")


def rehearse(node: Node, *more: str, seconds: str = "12s") -> subprocess.CompletedProcess[str]:
    out = str(node.folder / "out")
    return node.call("rehearse", "--card", "--out", out, "--seconds", seconds, *more)


def read_report(node: Node) -> dict:
    return json.loads((node.folder / "out" / "report.json").read_text())


def test_without_apply_nothing_is_set_and_all_is_told(node: Node) -> None:
    node.standin.follow(*WORKS)
    done = rehearse(node)
    assert done.returncode == 0, done.stderr
    assert not node.is_set
    assert node.calls == []
    said = done.stdout
    for words in ("Only read", "What is set: the core clock of card 0 alone, to 1785 MHz", "-rgc"):
        assert words in said
    assert "-pl 700" in said
    assert "Nothing was set" in said
    report = read_report(node)
    assert report["before"]["limit_w"] == 700.0
    assert report["plan"]["lock_hz"] == 1785e6
    assert report["after"] is None


def test_the_clock_alone_is_locked_by_turns_and_given_back(node: Node) -> None:
    node.standin.follow(*WORKS)
    done = rehearse(node, "--apply", "--lock", "1.2GHz")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not node.is_set
    assert node.notes == []
    kinds = {call.split()[0] for call in node.calls}
    assert kinds == {"SetGpuLockedClocks", "ResetGpuLockedClocks"}
    assert {call for call in node.calls if "Set" in call and "Reset" not in call} == {
        "SetGpuLockedClocks 1200 1200"
    }
    report = read_report(node)
    assert report["is_back"] is True
    assert report["faults"] == report["differences"] == []
    assert report["power_locked_w"] < 0.9 * report["power_as_before_w"]
    with (node.folder / "out" / "samples.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == report["readings"]
    locked_hz = {float(row["core_hz"]) for row in rows if row["is_locked"] == "1"}
    assert locked_hz == {1.2e9}
    assert "no saving is claimed" in done.stdout.replace("\n", " ").lower()


def test_a_card_that_tells_no_power_is_left_alone(node: Node) -> None:
    node.standin.follow(USUAL, "error power 3 0 1e9", "error energy 3 0 1e9")
    done = rehearse(node, "--apply")
    assert done.returncode == 5
    assert "STOP: the card does not tell power, the energy counter" in done.stdout
    assert not node.is_set
    assert read_report(node)["plan"] is None


def test_a_driver_that_lies_is_found_out_and_the_card_given_back(node: Node) -> None:
    node.standin.follow(*WORKS, "lie core_set 0 1e9")
    done = rehearse(node, "--apply", "--lock", "1.2GHz")
    assert done.returncode == 5
    assert "FAULT" in done.stdout
    assert "does not apply it" in done.stdout
    assert not node.is_set
    assert "Send the folder" in done.stdout


def test_a_refusal_ends_the_run_with_what_to_send(node: Node) -> None:
    node.standin.follow(*WORKS, "error core_set 4 0 1e9")
    done = rehearse(node, "--apply")
    assert done.returncode == 5
    assert "FAULT" in done.stdout
    assert not node.is_set


def test_a_limit_that_somebody_changes_meanwhile_stops_the_run(node: Node) -> None:
    node.standin.follow(*WORKS)
    out = str(node.folder / "out")
    process = node.start("rehearse", "--card", "--apply", "--out", out, "--seconds", "60s")
    wait_for(lambda: node.is_set)
    low, high, *_ = node.card.split()
    (node.folder / "card").write_text(f"{low} {high} 0 0 500000\n")
    assert process.wait(PATIENCE_S) == 5
    report = read_report(node)
    assert any("power limit is 500 W" in fault for fault in report["faults"])
    assert any("before 700" in difference for difference in report["differences"])
    assert node.card.split()[1] == "0"  # the clock was given back


def test_a_signal_ends_the_run_and_the_card_is_given_back(node: Node) -> None:
    node.standin.follow(*WORKS)
    out = str(node.folder / "out")
    process = node.start("rehearse", "--card", "--apply", "--out", out, "--seconds", "60s")
    wait_for(lambda: node.is_set)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    assert not node.is_set
    assert "has back what it had" in node.said()
    assert Path(out, "samples.csv").is_file()


def test_a_killed_run_gives_the_card_back(node: Node) -> None:
    node.standin.follow(*WORKS)
    out = str(node.folder / "out")
    process = node.start("rehearse", "--card", "--apply", "--out", out, "--seconds", "60s")
    wait_for(lambda: node.is_set)
    process.kill()
    wait_for(lambda: not node.is_set)


def test_the_lock_is_the_nearest_clock_below_the_highest() -> None:
    plan = plan_first_run(LEVELS_HZ, 600.0)
    assert plan.lock_hz == 1.755e9
    assert plan.block_s == 30.0
    assert plan.blocks == [False, True] * 10 + [False]
    assert plan_first_run(LEVELS_HZ, 60.0, 1.97e9).lock_hz == 1.755e9
    assert plan_first_run(LEVELS_HZ, 60.0, 1.1e9).lock_hz in (1e9, 1.2e9)


@pytest.mark.parametrize(
    ("seconds", "clock_hz", "words"),
    [
        (1200.0, None, "10 minutes"),
        (5.0, None, "12 s"),
        (60.0, 1.98e9, "below"),
        (60.0, 0.5e9, "1 GHz"),
    ],
)
def test_longer_runs_and_other_clocks_are_refused(
    seconds: float, clock_hz: float | None, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        plan_first_run(LEVELS_HZ, seconds, clock_hz)


def test_a_card_without_clocks_is_refused() -> None:
    with pytest.raises(MissingTool, match="no clocks"):
        plan_first_run([1.98e9], 60.0)
