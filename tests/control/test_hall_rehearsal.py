"""A bad day of a hall: what goes wrong is seen, and the coordinator of a site lives through it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wattcast.cli.main import main
from wattcast.control.hall_rehearsal import (
    EVENTS,
    HallRehearsal,
    PlannedEvent,
    RackSupply,
    list_rack_supplies,
    plan_events,
    play_events,
    rehearse_hall,
)
from wattcast.control.site_budget import SiteCoordinator
from wattcast.core.errors import BadInput
from wattcast.timeseries.hall_combination import CombinedHall
from wattcast.timeseries.hall_file import parse_hall
from wattcast.timeseries.hall_run import HallSpan, run_hall

HALL = """
title: Test
limits: {hall: 150 kW}
groups:
  - {name: training, system: dgx-h100, racks: 4, racks_per_row: 2,
     train: {model: llama3-8b, checkpoint_every: 5min, checkpoint_takes: 40s}}
  - {name: spare, system: dgx-h100, racks: 1, idle: loaded}
"""
BUDGET_W = 120e3
CAP_W = 100e3


def make_racks(count: int = 6) -> list[RackSupply]:
    return [RackSupply(f"r{i}", i // 2, 32, 5e3, 12e3, 40e3) for i in range(count)]


def play(name: str, seconds: int = 400) -> tuple[np.ndarray, np.ndarray, Any]:
    """Play one event on racks that always want more than the budget allows."""
    racks = make_racks()
    demand_w = np.full((len(racks), seconds), 35e3)
    (event,) = plan_events([name], demand_w, racks)
    drawn_w, allowed_w, again_s = play_events(racks, demand_w, [event], BUDGET_W, CAP_W)
    return drawn_w, allowed_w, (event, again_s)


def test_dark_racks_come_back_at_their_boards_limit_for_one_second() -> None:
    """A coordinator that believed in safe shares left such racks above them for good."""
    drawn_w, _, (event, again_s) = play("breaker")
    racks = list(event.racks)
    assert racks == [0, 1]
    assert drawn_w[racks, event.begin : event.end].max() == 0.0
    assert drawn_w[racks, event.end].tolist() == [35e3, 35e3]  # nobody has lowered them yet
    total_w = drawn_w.sum(axis=0)
    assert total_w[event.end] > BUDGET_W
    assert total_w[event.end + 1 :].max() <= BUDGET_W
    assert total_w[: event.end].max() <= BUDGET_W
    assert again_s == {"breaker": 1}


def test_a_coordinator_that_reads_no_limits_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal shows the fault: a limit that was raised by hand stayed for good."""
    racks = make_racks()
    demand_w = np.full((len(racks), 400), 35e3)
    demand_w[0] = 6e3  # the rack that is given back wants no more than its safe share
    event = PlannedEvent("restore", 200, 380, (0, 1))
    after = slice(230, 380)

    drawn_w, *_ = play_events(racks, demand_w, [event], BUDGET_W, CAP_W)
    assert drawn_w.sum(axis=0)[after].max() <= BUDGET_W
    step = SiteCoordinator.step
    monkeypatch.setattr(SiteCoordinator, "step", lambda self, drawn_w, _: step(self, drawn_w))
    drawn_w, *_ = play_events(racks, demand_w, [event], BUDGET_W, CAP_W)
    assert drawn_w.sum(axis=0)[after].min() > BUDGET_W


def test_lost_daemons_never_bring_the_racks_above_the_budget() -> None:
    drawn_w, _, (event, again_s) = play("daemon")
    assert drawn_w.sum(axis=0).max() <= BUDGET_W
    racks = list(event.racks)
    before_w = drawn_w[racks, event.begin - 1]
    assert drawn_w[racks, event.end - 1] == pytest.approx(before_w)  # limits outlive their daemon
    assert drawn_w[racks, event.end].tolist() == [12e3, 12e3]  # given back
    assert again_s["daemon"] == 1


def test_a_cap_in_a_burst_holds_from_the_second_second_on() -> None:
    racks = make_racks()
    demand_w = np.full((len(racks), 400), 10e3)
    demand_w[:, 120:] = 30e3
    demand_w[:, 120:180] = np.linspace(10e3, 30e3, 60)
    (event,) = plan_events(["cap"], demand_w, racks)
    assert abs(event.begin - 150) <= 2  # the middle of the steepest minute
    drawn_w, allowed_w, _ = play_events(racks, demand_w, [event], BUDGET_W, CAP_W)
    total_w = drawn_w.sum(axis=0)
    assert total_w[event.begin] > CAP_W
    assert total_w[event.begin + 1 : event.end].max() <= CAP_W
    assert total_w[event.end + 60] > CAP_W  # it ended
    assert set(allowed_w[event.begin : event.end].tolist()) == {CAP_W}


def test_a_cap_finds_what_silent_racks_were_promised_reserved() -> None:
    """Others were lowered as if a rack that answers nobody had been lowered too."""
    racks = make_racks(4)
    limits_w = [12e3] * 4
    silent: set[int] = set()

    def set_limit(i: int, watts: float) -> bool:
        if i in silent:
            return False
        limits_w[i] = watts
        return True

    from wattcast.control.site_budget import SiteGpu, SitePlan

    gpus = tuple(SiteGpu(rack.name, rack.safe_w, rack.most_w) for rack in racks)
    coordinator = SiteCoordinator(SitePlan(100e3, gpus, 5e3), set_limit)
    for _ in range(10):
        coordinator.step(dict(enumerate(limits_w)))
    assert limits_w == pytest.approx([25e3] * 4)
    silent.add(0)
    coordinator.change_budget(70e3)
    for _ in range(3):
        coordinator.step({i: limits_w[i] for i in (1, 2, 3)})
        assert sum(limits_w) <= 70e3
    assert limits_w[0] == pytest.approx(25e3)
    assert limits_w[1:] == pytest.approx([15e3] * 3)
    with pytest.raises(BadInput, match="48000 W"):
        coordinator.change_budget(40e3)


def test_a_limit_set_by_hand_is_lowered_within_a_second() -> None:
    drawn_w, _, (event, again_s) = play("restore")
    total_w = drawn_w.sum(axis=0)
    assert (total_w > BUDGET_W).sum() <= 1
    assert total_w[event.begin + 1 :].max() <= BUDGET_W
    assert again_s["restore"] <= 2


@cache
def run_small_hall(seconds: float) -> CombinedHall:
    """Run the hall once for all tests that rehearse it; a rehearsal changes nothing of it."""
    plan = parse_hall(HALL.encode(), "hall.yaml", Path())
    return run_hall(plan, HallSpan(0.0, seconds))


def rehearse_small_hall(**options: Any) -> HallRehearsal:
    return rehearse_hall(run_small_hall(600.0), **options)


def test_all_events_of_a_hall_keep_its_limit() -> None:
    rehearsal = rehearse_small_hall()
    assert [event.name for event in rehearsal.events] == list(EVENTS)
    assert all(event.has_kept_limits for event in rehearsal.events)
    assert all(event.steered_again_s is not None for event in rehearsal.events)
    assert rehearsal.racks == 5
    dark = rehearsal.events[0]
    assert dark.racks == ("training/0", "training/1")
    idle_j = 0.9 * 240 * 2 * 20e3
    assert dark.denied_j > 0.1 * idle_j  # two racks were dark
    assert rehearsal.events[2].budget_w == pytest.approx(0.85 * 150e3)


def test_safe_shares_leave_a_third_of_the_budget_to_those_who_work() -> None:
    racks = list_rack_supplies(run_small_hall(60.0), 150e3)
    assert 0.28 < 1.0 - sum(rack.safe_w for rack in racks) / 150e3 < 0.38


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget_w": 20e3}, "safe shares need"),
        ({"cap_w": 200e3}, "less than the budget"),
        ({"names": ["breaker"] * 6}, "of the span for each"),
        ({"names": ["flood"]}, "flood"),
        ({"names": []}, "one or more events"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        rehearse_small_hall(**options)


def test_the_command_tells_what_each_event_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hall.yaml"
    path.write_text(HALL)
    arguments = ["manage", "rehearse", "--hall", str(path), "--seconds", "5min"]
    arguments += ["--events", "restore,cap", "--begin", "00:10"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [event["name"] for event in figures["events"]] == ["restore", "cap"]
    assert figures["events"][0]["begin_s"] == pytest.approx(600 + 45)
    assert figures["events"][0]["has_kept_limits"] is True
    assert main(arguments) == 0
    assert "limit kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "none of them"),
        (["gpt2", "--hall", "hall.yaml"], "engine and hall"),
        (["gpt2", "--events", "cap"], "the rehearsal of this engine"),
        (["--hall", "hall.yaml", "--rate", "2/s"], "the rehearsal of this hall"),
    ],
)
def test_options_of_the_other_rehearsal_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["manage", "rehearse", *arguments]) == 2
    assert words in capsys.readouterr().err
