"""The cards of a job are one plant: one decision, one sum of energy, and all are given back.

``-m slow`` kills 200 times at random moments: ``python -m pytest -m slow
tests/control/test_job_cards.py``; others with ``WATTCAST_SEED=2``.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from standin_node import PATIENCE_S, UNTOUCHED, USUAL, Node, wait_for

from wattcast.control.card_settings import RefusedKnob
from wattcast.control.job_cards import JobCards, combine_readings, parse_devices
from wattcast.control.live_plant import LivePlant
from wattcast.control.plants import build_card_lattice
from wattcast.core.errors import BadInput, MissingTool, Refused
from wattcast.measure.device_control import NvmlReading

CARDS = 8
CORE_HZ = tuple(float(hz) for hz in range(1_000_000_000, 1_981_000_000, 140_000_000))


@dataclass
class RankCard:
    """A card of a job; its counter steps every 0.1 s, ``phase_s`` after those of others."""

    name: str = "Fake"
    uuid: str = "GPU-fake"
    power_w: float = 300.0
    phase_s: float = 0.0
    now_s: float = 0.0
    refuses_hz: float = math.inf  # core clocks below are taken
    is_lost: bool = False
    calls: list[Any] = field(default_factory=list)
    decision: Any = (None, None, None)
    count = 1
    losses = 0
    is_adrift = False

    def clocks_hz(self) -> Any:
        return CORE_HZ, (3.2e9,)

    def limits_w(self) -> Any:
        return 700.0, 200.0, 700.0

    def read(self) -> NvmlReading:
        if self.is_lost:
            raise MissingTool("the card is lost.")
        steps = math.floor((self.now_s - self.phase_s) / 0.1 + 1e-9)
        energy_j = 0.1 * self.power_w * steps
        clock_hz = self.decision[0] or CORE_HZ[-1]
        return NvmlReading(self.now_s, energy_j, self.power_w, clock_hz, 3.2e9, 1.0, 0.5)

    def beat(self) -> None:
        pass

    def apply(self, *decision: float | None) -> None:
        if self.is_lost:
            raise MissingTool("the card is lost.")
        if decision[0] is not None and decision[0] >= self.refuses_hz:
            raise RefusedKnob("core", "refused.")
        self.calls.append(decision)
        self.decision = decision

    def give_back(self) -> None:
        if self.is_lost:
            raise Refused(f"{self.uuid} is lost.")
        self.apply(None, None, None)


def test_devices_are_named_by_ranges() -> None:
    assert parse_devices("0-7") == tuple(range(8))
    assert parse_devices("3,0-1") == (3, 0, 1)
    for wrong in ("", "a", "0-", "1,1", "0-2,1", "7-0", "0-9999", "-1"):
        with pytest.raises(BadInput, match="0-7 or 0,1,4"):
            parse_devices(wrong)


def test_all_cards_get_one_decision_and_energy_is_summed() -> None:
    cards = [RankCard(power_w=200.0 + 10.0 * place) for place in range(CARDS)]
    job = JobCards(cards)
    job.apply(1.42e9, None, 500.0)
    assert [card.decision for card in cards] == [(1.42e9, None, 500.0)] * CARDS
    assert job.read().power_w == pytest.approx(sum(card.power_w for card in cards))
    assert job.clocks_hz() == (CORE_HZ, (3.2e9,))
    assert job.limits_w() == (700.0, 200.0, 700.0)
    job.give_back()
    assert [card.decision for card in cards] == [(None, None, None)] * CARDS


def test_a_refusal_of_one_card_takes_the_decision_back_from_all() -> None:
    """Seven ranks at the new clock and one at the old one would be a job without a setting."""
    cards = [RankCard() for _ in range(CARDS)]
    job = JobCards(cards)
    job.apply(1.14e9, None, None)
    cards[5].refuses_hz = 1.4e9
    with pytest.raises(RefusedKnob):
        job.apply(1.7e9, None, None)
    assert {card.decision for card in cards} == {(1.14e9, None, None)}


def test_cards_that_cannot_be_given_back_are_all_named() -> None:
    cards = [RankCard(uuid=f"GPU-{place}") for place in range(CARDS)]
    job = JobCards(cards)
    job.apply(1.14e9, None, None)
    cards[2].is_lost = cards[6].is_lost = True
    with pytest.raises(Refused, match=r"GPU-2 is lost\. GPU-6 is lost\."):
        job.give_back()
    for place in {*range(CARDS)} - {2, 6}:
        assert cards[place].decision == (None, None, None)


def test_use_of_a_job_is_that_of_its_busiest_card() -> None:
    """A rank that waits for others is idle meanwhile; the job does not wait for work."""
    busy = RankCard().read()
    idle = replace(busy, busy=0.3, core_hz=1.2e9)
    both = combine_readings((busy, idle))
    assert both.busy == 1.0
    assert both.core_hz == 1.2e9
    assert both.energy_j == pytest.approx(busy.energy_j + idle.energy_j)


def test_power_of_a_period_is_exact_though_counters_step_at_different_moments() -> None:
    """Read at one moment for all, eight counters that step every 0.1 s are off by up to a tenth of
    a period of 1 s."""
    cards = [RankCard(power_w=100.0 * (1 + place), phase_s=0.012 * place) for place in range(CARDS)]

    def pass_time(seconds: float) -> None:
        for card in cards:
            card.now_s += seconds

    job = JobCards(cards)
    lattice = build_card_lattice(*job.clocks_hz())
    plant = LivePlant(job, lattice, 1.0, lambda: True, pass_time)
    for _ in range(4):
        observation = plant.run(plant.default)
        assert not observation.stale
        assert observation.power_w == pytest.approx(3600.0, rel=0.005)


# -- eight stand-in cards --


class Job:
    """A daemon of eight cards, and a controller that steers them as one."""

    def __init__(self, node: Node, period: str = "100ms") -> None:
        self.node = node
        names = [f"card.{place}" if place else "card" for place in range(CARDS)]
        self.files = [node.folder / name for name in names]
        for path in self.files:
            path.write_text(f"{UNTOUCHED}\n")
        node.standin.follow(USUAL, f"devices {CARDS}")
        self.daemon = node.serve()
        self.program = node.control("--devices", f"0-{CARDS - 1}", "--period", period)

    def read_cards(self) -> list[str]:
        return [path.read_text().strip() for path in self.files]

    @property
    def is_set(self) -> bool:
        return all(card != UNTOUCHED for card in self.read_cards())

    @property
    def is_restored(self) -> bool:
        return all(card == UNTOUCHED for card in self.read_cards())

    def kill(self, victim: str, number: signal.Signals) -> None:
        """Send a signal to the controller, the daemon's parent or its child."""
        with contextlib.suppress(ProcessLookupError, IndexError):
            if victim == "controller":
                os.kill(self.program.pid, number)
            elif victim == "parent":
                os.kill(self.daemon.pid, number)
            else:
                os.kill(self.node.worker(self.daemon), number)


def test_eight_cards_have_the_same_decision_within_a_period(node: Node) -> None:
    """Files of all cards are read every few milliseconds while the controller searches."""
    period_s = 0.5
    job = Job(node, "500ms")
    wait_for(lambda: job.is_set)
    decisions = set()
    apart_since_s: float | None = None
    longest_s = 0.0
    end_s = time.monotonic() + 12.0
    while time.monotonic() < end_s:
        cards = set(job.read_cards())
        now_s = time.monotonic()
        if len(cards) == 1:
            decisions |= cards
            apart_since_s = None
        else:
            apart_since_s = apart_since_s or now_s
            longest_s = max(longest_s, now_s - apart_since_s)
        time.sleep(0.005)
    node.stop.touch()
    assert job.program.wait(PATIENCE_S) == 3, node.said()
    assert len(decisions) >= 3
    assert longest_s < period_s
    assert job.is_restored
    assert "all 8 cards have back what they had" in node.said()


def test_a_card_that_refuses_leaves_no_card_alone_at_a_clock(node: Node) -> None:
    job = Job(node)
    wait_for(lambda: job.is_set)
    node.standin.follow(USUAL, f"devices {CARDS}", "error core_set 3 0 1e9 5")
    wait_for(lambda: "left alone" in node.said() or "control ends" in node.said())
    node.stop.touch()
    assert job.program.wait(PATIENCE_S) == 3, node.said()
    wait_for(lambda: job.is_restored)


def test_a_card_cannot_be_named_twice_or_beside_a_job(node: Node) -> None:
    done = node.call("run", "--device", "0", "--devices", "0-1")
    assert done.returncode == 2
    assert "one of them" in done.stderr


KILLS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)


def kill_a_job(node: Node, seed: int) -> None:
    """Kill a controller, its daemon, or both at a random moment; all eight cards are restored."""
    chance = random.Random(seed)
    job = Job(node)
    wait_for(lambda: any(card != UNTOUCHED for card in job.read_cards()))
    time.sleep(chance.uniform(0.0, 1.5))
    victims = chance.sample(("controller", "parent", "child"), chance.choice((1, 1, 2, 3)))
    story = []
    for victim in victims:
        number = chance.choice(KILLS)
        story.append(f"{victim} {number.name}")
        job.kill(victim, number)
        time.sleep(chance.choice((0.0, 0.0, 0.3)))
    node.stop.touch()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.program.wait(2 * PATIENCE_S)
    if {"parent", "child"} <= set(victims) and not job.is_restored:
        time.sleep(1.0)  # nobody is left to give them back, until a daemon starts again
        if not job.is_restored and not node.listens():
            node.serve()
    end_s = time.monotonic() + PATIENCE_S
    while not job.is_restored:
        assert time.monotonic() < end_s, f"seed {seed}: {story}: {job.read_cards()}"
        time.sleep(0.1)
    if results := os.environ.get("WATTCAST_CHAOS_RESULTS"):
        with Path(results).open("a") as stream:
            stream.write(f"{seed} {', '.join(story)}: restored\n")


@pytest.mark.parametrize("seed", range(3))
def test_some_kills_of_a_job(node: Node, seed: int) -> None:
    kill_a_job(node, seed)


FIRST_SEED = 1000 * int(os.environ.get("WATTCAST_SEED", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + 200))
def test_two_hundred_kills_of_a_job(node: Node, seed: int) -> None:
    kill_a_job(node, seed)
