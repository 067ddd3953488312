"""The cards and the host of this machine, as ``doctor --card`` remembers them, in predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wattcast
from wattcast.core.errors import BadInput
from wattcast.core.own_cards import (
    OwnCard,
    PowerFactor,
    read_own_cards,
    write_own_card,
)
from wattcast.options.setting_options import MachineOptions
from wattcast.predictor.machine_factors import find_machine_factors

STEP: dict[str, Any] = {"phase": "decode", "batch": 8, "seq": 512}
EAGER: dict[str, Any] = {"stack": "eager", "batch": 1, "seq": 64, "head": "none"}
QUIET: dict[str, Any] = {
    **{"rate": "2/s", "requests": 20, "prompt": 256, "output": 32},
    **{"max_seqs": 16, "max_batched_tokens": 512},  # a small table of steps
}


def make_card(
    factor: float = 1.05,
    uuid: str = "GPU-1",
    host: float | None = 0.8,
    date: str = "2026-11-19",
) -> OwnCard:
    power = {"h200": PowerFactor(factor, 0.01)}
    return OwnCard(uuid, "NVIDIA H200", "", date, power, host, 120.0, ())


@pytest.fixture
def cards_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "cards.json"
    monkeypatch.setenv("WATTCAST_CARDS", str(path))
    return path


def test_a_remembered_card_is_used_said_and_ignored_on_demand(cards_file: Path) -> None:
    usual = wattcast.predict("llama3-8b", "h200", **STEP)
    write_own_card(make_card())
    own = wattcast.predict("llama3-8b", "h200", **STEP)
    assert own.power_w == pytest.approx(1.05 * usual.power_w, rel=1e-3)
    assert any("this card draws 5.0 % more than usual" in note for note in own.assumptions)
    assert any("host takes 0.80 times the usual time" in note for note in own.assumptions)
    told = wattcast.predict("llama3-8b", "h200", power_factor=1, host_factor=1, **STEP)
    assert told.power_w == usual.power_w
    assert told.assumptions == usual.assumptions
    other = wattcast.predict("llama3-8b", "h100-sxm", **STEP)
    assert not any("measured 2026-11-19" in note for note in other.assumptions)


def test_watts_of_a_measured_card_are_known_better(cards_file: Path) -> None:
    usual = wattcast.predict("llama3-8b", "h200", **STEP)
    write_own_card(make_card(1.0))
    own = wattcast.predict("llama3-8b", "h200", **STEP)
    told = wattcast.predict("llama3-8b", "h200", power_factor=1.0, **STEP)
    width, own_width, told_width = (np.ptp(p.interval.power_w) for p in (usual, own, told))
    assert own_width < width == told_width
    assert np.ptp(own.interval.latency_s) == np.ptp(usual.interval.latency_s)


def test_a_hungry_card_draws_as_much_while_it_waits() -> None:
    """An eager model at batch 1 waits for its host most of the time."""
    usual = wattcast.predict("gpt2", "h200", **EAGER)
    hungry = wattcast.predict("gpt2", "h200", power_factor=1.1, **EAGER)
    worked = usual.busy_s / usual.latency_s
    assert worked < 0.5
    idle_j = float(usual.basis.detail.gap_j)
    assert float(hungry.basis.detail.gap_j) == pytest.approx(idle_j)
    assert hungry.energy_j - idle_j == pytest.approx(1.1 * (usual.energy_j - idle_j), rel=1e-6)
    parts_w = float(hungry.basis.detail.part_j.sum()) / hungry.latency_s
    assert parts_w == pytest.approx(hungry.power_w, rel=1e-9)


def test_a_hungry_card_is_clocked_lower_under_its_limit() -> None:
    prompt = {"phase": "prefill", "batch": 8, "seq": 2048}
    usual, hungry = (
        wattcast.predict("llama3-8b", "h200", power_factor=factor, **prompt) for factor in (1, 1.1)
    )
    assert usual.capped
    assert hungry.clock_hz < usual.clock_hz
    assert hungry.latency_s > usual.latency_s


def test_a_host_factor_scales_what_the_host_does() -> None:
    usual = wattcast.predict("gpt2", "h200", **EAGER)
    slow = wattcast.predict("gpt2", "h200", host_factor=2.0, **EAGER)
    assert slow.latency_s == pytest.approx(2.0 * usual.latency_s, rel=0.1)
    with pytest.raises(BadInput, match="host_factor"):
        wattcast.predict("gpt2", "h200", host_factor=2.0, host_launch="9us", **EAGER)


def test_simulations_and_plans_take_the_remembered_card(cards_file: Path) -> None:
    usual = wattcast.simulate("llama3-8b", "h200", **QUIET)
    told = wattcast.simulate("llama3-8b", "h200", power_factor=1.05, host_factor=0.8, **QUIET)
    write_own_card(make_card())
    own = wattcast.simulate("llama3-8b", "h200", **QUIET)
    ignored = wattcast.simulate("llama3-8b", "h200", power_factor=1, host_factor=1, **QUIET)
    assert own.summarise()["power_w"] == told.summarise()["power_w"]
    assert ignored.summarise()["power_w"] == usual.summarise()["power_w"]
    assert any("this card draws 5.0 % more" in note for note in own.assumptions)


def test_several_cards_of_a_kind_are_averaged(cards_file: Path) -> None:
    write_own_card(make_card(1.0, "GPU-1"))
    write_own_card(make_card(1.21, "GPU-2", None))
    factors = find_machine_factors("h200")
    assert factors.power == pytest.approx(1.1)
    assert factors.host == pytest.approx(0.8)
    assert "the 2 cards measured here draw 10.0 % more" in factors.power_note
    write_own_card(make_card(1.1, "GPU-2"))
    assert [card.uuid for card in read_own_cards("h200")] == ["GPU-1", "GPU-2"]
    assert read_own_cards("b200") == ()
    assert find_machine_factors("h200", MachineOptions(1.0, 1.0)).notes == ()


def test_cards_that_disagree_widen_the_interval(cards_file: Path) -> None:
    """Two cards of 0.5 and 1.5 times the usual watts had the spread of one that was measured well,
    so that neither lay in the interval of their mean.
    """
    usual = wattcast.predict("llama3-8b", "h200", **STEP)
    write_own_card(make_card(0.5, "GPU-1"))
    write_own_card(make_card(1.5, "GPU-2"))
    factors = find_machine_factors("h200")
    assert factors.power == pytest.approx(np.sqrt(0.75))
    assert factors.power_spread == pytest.approx(np.hypot(0.01, 0.5 * np.log(3.0)))
    own = wattcast.predict("llama3-8b", "h200", **STEP)
    low_w, high_w = own.interval.power_w
    limit_w = 700.0
    assert low_w < 0.5 * usual.power_w
    assert 1.5 * usual.power_w > limit_w < high_w


def test_cards_that_agree_are_known_as_well_as_one(cards_file: Path) -> None:
    write_own_card(make_card(1.05, "GPU-1"))
    write_own_card(make_card(1.05, "GPU-2"))
    assert find_machine_factors("h200").power_spread == pytest.approx(0.01)


def test_cards_may_disagree_as_far_as_their_file_lets_them(cards_file: Path) -> None:
    """A card of 0.1 and one of 10 times the usual watts spread further than a bundle may hold."""
    write_own_card(make_card(0.1, "GPU-1"))
    write_own_card(make_card(10.0, "GPU-2"))
    assert wattcast.predict("llama3-8b", "h200", **STEP).power_w > 0.0


@pytest.mark.parametrize(
    ("power", "host", "amount", "time"),
    [
        (1.0, 1.004, "draws as much as usual", "takes as long as usual"),
        (0.9996, 0.996, "draws as much as usual", "takes as long as usual"),
        (1.001, 1.006, "draws 0.1 % more than usual", "takes 1.01 times the usual time"),
        (0.9, 0.8, "draws 10.0 % less than usual", "takes 0.80 times the usual time"),
    ],
)
def test_what_is_as_usual_is_said_to_be(
    power: float, host: float, amount: str, time: str, cards_file: Path
) -> None:
    """A card was said to draw 0.0 % more than usual, and a host to take 1.00 of the usual time."""
    write_own_card(make_card(power, host=host))
    factors = find_machine_factors("h200")
    assert amount in factors.power_note
    assert time in factors.host_note


def test_a_host_has_the_date_of_its_own_measurement(cards_file: Path) -> None:
    """It had that of the last card, with which no host was measured."""
    write_own_card(make_card(uuid="GPU-1", host=1.2, date="2026-01-01"))
    write_own_card(make_card(uuid="GPU-2", host=None, date="2026-06-01"))
    factors = find_machine_factors("h200")
    assert "measured 2026-01-01" in factors.host_note
    assert "measured 2026-06-01" in factors.power_note


def test_a_damaged_file_says_what_to_do(cards_file: Path) -> None:
    cards_file.parent.mkdir()
    for text in ("{", '{"cards": [{"uuid": "GPU-1"}]}'):
        cards_file.write_text(text)
        with pytest.raises(BadInput, match="doctor --forget-card"):
            wattcast.predict("llama3-8b", "h200", **STEP)
