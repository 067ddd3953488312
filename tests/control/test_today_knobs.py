"""Power profiles, power smoothing and fixed settings: forecast, set through the daemon, given back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from standin_node import PATIENCE_S, USUAL, Client, wait_for

from wattcast.cli.main import main
from wattcast.control.card_leases import CardLease, merge_leases
from wattcast.control.card_settings import CardSettings, name_profiles
from wattcast.control.knob_forecast import MARK, forecast_knobs
from wattcast.hardware import load_gpu

if TYPE_CHECKING:
    from standin_node import Node

ALL = sum(1 << bit for bit in (0, 1, 6, 7, 20, 21))
MAX_Q = 1 << 1
INFERENCE = 1 << 6
BLACKWELL = (USUAL, "utilisation 100", f"profiles {ALL}", "smoothing")
SLEEPS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)"


def read_more(node: Node) -> tuple[int, int]:
    """Return the mask of requested profiles and whether smoothing is on."""
    path = Path(str(node.folder / "card") + ".more")
    if not path.exists():
        return 0, 0
    mask, smoothing = map(int, path.read_text().split())
    return mask, smoothing


def hold(node: Node, *options: str) -> Any:
    program = (sys.executable, "-c", SLEEPS, str(node.stop))
    return node.start("hold", "--apply", *options, "--", *program)


def test_profiles_and_smoothing_are_held_and_given_back(node: Node) -> None:
    node.standin.follow(*BLACKWELL)
    process = hold(node, "--profile", "max-q,llm-inference", "--smoothing", "on")
    wait_for(lambda: read_more(node) == (MAX_Q | INFERENCE, 1))
    node.stop.touch()
    assert process.wait(PATIENCE_S) == 0, node.said()
    assert read_more(node) == (0, 0)
    assert node.notes == []
    assert "power profiles max-q, llm-inference, power smoothing on: set" in node.said()


def test_what_was_requested_before_comes_back(node: Node) -> None:
    node.standin.follow(*BLACKWELL)
    Path(str(node.folder / "card") + ".more").write_text(f"{INFERENCE} 1\n")
    process = hold(
        node,
        "--profile",
        "max-q",
        "--smoothing",
        "off",
        "--core-clock",
        "1.5GHz",
        "--power-limit",
        "500W",
    )
    wait_for(lambda: read_more(node) == (MAX_Q, 0))
    wait_for(lambda: node.card == "1500 1500 0 0 500000")
    process.kill()
    wait_for(lambda: read_more(node) == (INFERENCE, 1) and not node.is_set)
    wait_for(lambda: node.notes == [])


def test_a_killed_daemon_gives_profiles_back_when_it_starts_again(node: Node) -> None:
    node.standin.follow(*BLACKWELL)
    daemon = node.serve()
    with Client(node) as client:
        assert client.ask("claim")["ok"]
        assert client.ask("set", profile_mask=MAX_Q, smoothing=True)["ok"]
        assert read_more(node) == (MAX_Q, 1)
        (note,) = node.notes
        assert note.states == {"profiles": "read back", "smoothing": "read back"}
        worker = node.worker(daemon)
        import os
        import signal

        os.kill(worker, signal.SIGKILL)
    wait_for(lambda: read_more(node) == (0, 0))


def test_a_card_without_profiles_is_told_so_and_left_alone(node: Node) -> None:
    node.standin.follow(USUAL)
    done = node.call("hold", "--apply", "--profile", "max-q", "--", "true")
    assert done.returncode == 2
    assert "its firmware or driver has no power profiles" in done.stderr
    done = node.call(
        "hold", "--apply", "--smoothing", "on", "--", "touch", str(node.folder / "ran")
    )
    assert done.returncode == 5
    assert "has no power smoothing" in done.stderr
    assert not (node.folder / "ran").exists()
    assert not node.is_set


@pytest.mark.parametrize("fault", ["error profiles_set 4 0 1e9", "lie profiles_set 0 1e9"])
def test_a_refused_profile_runs_nothing_and_gives_the_rest_back(node: Node, fault: str) -> None:
    node.standin.follow(*BLACKWELL, fault)
    ran = node.folder / "ran"
    done = node.call(
        "hold", "--apply", "--profile", "max-q", "--core-clock", "1.5GHz", "--", "touch", str(ran)
    )
    assert done.returncode == 5
    assert not ran.exists()
    wait_for(lambda: not node.is_set and read_more(node) == (0, 0))


def test_a_profile_that_the_firmware_does_not_have_is_refused(node: Node) -> None:
    node.standin.follow(USUAL, f"profiles {MAX_Q}")
    done = node.call("hold", "--profile", "training", "--", "true")
    assert done.returncode == 2
    assert "(max-q)" in done.stderr
    dry = node.call("hold", "--profile", "max-q", "--", "true")
    assert dry.returncode == 0
    assert "dry run" in dry.stderr
    assert read_more(node) == (0, 0)


def test_who_holds_the_limit_requests_no_profiles(node: Node) -> None:
    node.standin.follow(*BLACKWELL)
    node.serve()
    with Client(node) as client:
        assert client.ask("claim", lease="limit")["ok"]
        reply = client.ask("set", profile_mask=MAX_Q)
        assert not reply["ok"]
        assert "sets no clocks" in reply["say"]
    assert read_more(node) == (0, 0)


def test_a_limit_above_leaves_profiles_alone() -> None:
    control = CardLease(1, "run", 0.0, CardSettings((1e9, 1e9), None, 600.0, float(MAX_Q), 1.0))
    limit = CardLease(2, "site", 0.0, CardSettings(limit_w=500.0))
    merged = merge_leases({"control": control, "limit": limit}, 700.0)
    assert merged == CardSettings((1e9, 1e9), None, 500.0, float(MAX_Q), 1.0)


def test_a_mask_is_written_by_name() -> None:
    assert name_profiles(MAX_Q | INFERENCE | 1 << 30) == "max-q, llm-inference, number 30"
    assert name_profiles(0) == "none"


def test_every_row_of_the_table_is_marked_and_keeps_its_bound() -> None:
    options = {"phase": "decode", "batch": 32, "seq": 4096}
    rows = {row.knob: row for row in forecast_knobs("llama3-8b", load_gpu("b200"), options, 0.05)}
    assert {row.mark for row in rows.values()} == {MARK}
    assert all(row.slowdown <= 0.0501 for row in rows.values())
    assert all(row.energy_saving >= 0.0 for row in rows.values())
    assert rows["core clock"].energy_saving > 0.05
    assert rows["memory clock"].setting == "as it is"  # the catalogue has one
    max_q = rows["power profile max-q"]
    assert max_q.slowdown <= 0.0301
    assert 0.0 < max_q.energy_saving <= rows["core clock"].energy_saving
    assert rows["power profile llm-training"].slowdown <= 1e-6
    assert rows["power smoothing"].energy_saving == 0.0  # a card that never idles pays nothing


def test_smoothing_costs_what_its_floor_takes_in_pauses() -> None:
    gpu = load_gpu("b200")
    options = {"phase": "decode", "batch": 32, "seq": 4096}
    paused = forecast_knobs("llama3-8b", gpu, options, 0.05, pause_share=0.2)[-1]
    assert paused.knob == "power smoothing"
    assert paused.energy_saving < -0.02


def test_the_table_is_printed_and_wrong_options_get_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["manage", "knobs", "gpt2", "--gpu", "h200", "--phase", "prefill", "--seq", "128"]
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["knobs"]) == 8
    assert main(words) == 0
    assert "unmeasured" in capsys.readouterr().out
    assert main(["manage", "hold", "--", "true"]) == 2
    assert "--profile" in capsys.readouterr().err
    assert main(["manage", "knobs", "gpt3"]) == 2
