"""What the watts of a few loads say of a card's other work."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from wattcast.calibrate.card_factor import (
    combine_logs,
    compare_card,
    estimate_factor,
    predict_paced_w,
)
from wattcast.core.card_figures import CardFigures, HostPass, LoadFigures
from wattcast.core.errors import Refused
from wattcast.core.own_cards import read_own_cards, write_own_card
from wattcast.measure.card_loads import list_operators
from wattcast.predictor.api import host_cost_of_run, predict

CARD = ("NVIDIA H200", "GPU-1", "692-2G520-0282-001")
UNTIMED = HostPass(None, 64, "no PyTorch")
CLOCKS_HZ = {"copy": 1.98e9, "product of few rows": 1.98e9, "product": 1.5e9}


def make_figures(factor: float, gpu: str = "h200-001") -> CardFigures:
    """A card that draws ``factor`` times what a board of ``gpu`` does, at 55 C."""
    loads = []
    for name, operator in list_operators("bf16").items():
        p = predict(
            {"name": name, "ops": [dict(operator)]},
            gpu,
            operands="cold",
            clock=CLOCKS_HZ[name],
            temperature=55.0,
            power_limit=1e4,
            power_factor=1.0,
            force=True,
        )
        is_capped = name == "product"
        loads.append(
            LoadFigures(
                name,
                operator,
                float(p.latency_s),
                factor * float(p.power_w),
                CLOCKS_HZ[name],
                55.0,
                is_capped,
                (),
                150.0,
            )
        )
    return CardFigures(*CARD, 118.0, 1.98e9, 40.0, tuple(loads), UNTIMED)


def test_a_usual_card_has_a_factor_of_one() -> None:
    comparison = compare_card(make_figures(1.0))
    assert comparison.gpu == "h200-001"
    assert comparison.factor.value == pytest.approx(1.0, abs=1e-6)
    assert comparison.latency_ratios == pytest.approx((1.0, 1.0, 1.0))
    # against the mean of both boards it draws more
    assert comparison.card.power["h200"].value > 1.0
    assert comparison.card.host_factor is None


def test_a_hungry_card_is_believed_in_part_and_remembered(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTCAST_CARDS", str(tmp_path / "cards.json"))
    comparison = compare_card(make_figures(1.05))
    assert 1.005 < comparison.factor.value < 1.05
    write_own_card(comparison.card)
    (card,) = read_own_cards("h200-001")
    assert [load.memory_w for load in card.loads] == [150.0, 150.0, 150.0]
    assert card == comparison.card
    # what is remembered does not hide in the next measurement of the card
    assert compare_card(make_figures(1.05)).factor == comparison.factor
    step = {"phase": "decode", "batch": 8}
    usual = predict("llama3-8b", "h200-001", power_factor=1.0, **step)
    own = predict("llama3-8b", "h200-001", **step)
    assert own.power_w / usual.power_w == pytest.approx(comparison.factor.value, rel=1e-3)


def test_watts_that_no_card_draws_are_not_remembered() -> None:
    """A card that another program uses as well; four standard deviations are 32 % of a copy."""
    for factor, is_refused in ((1.25, False), (1.45, True), (0.65, True)):
        figures = make_figures(1.0)
        loud = replace(figures.loads[0], power_w=factor * figures.loads[0].power_w)
        changed = replace(figures, loads=(loud, *figures.loads[1:]))
        if is_refused:
            with pytest.raises(Refused, match=r"copy: .* more than cards differ by"):
                compare_card(changed)
        else:
            assert compare_card(changed).factor.value > 1.0


def test_a_third_of_what_cards_differ_by_stays_unknown() -> None:
    """Perfect predictions of endless loads would tell what all kernels share, and no more.

    Of the variance between cards of a kind 36 % is that of a card and a kernel.
    """
    many = combine_logs(np.full(10_000, 0.05), np.zeros(10_000), 0.03)
    assert math.log(many.value) == pytest.approx(0.05, rel=0.01)
    assert many.spread == pytest.approx(0.03 * math.sqrt(0.36), rel=0.01)
    (single,) = [combine_logs(np.array([0.05]), np.zeros(1), 0.03)]
    assert math.log(single.value) == pytest.approx(0.64 * 0.05)


def test_a_load_that_is_predicted_badly_says_little() -> None:
    good = combine_logs(np.array([0.05]), np.array([0.01]), 0.03)
    bad = combine_logs(np.array([0.05]), np.array([0.1]), 0.03)
    assert 1.0 < bad.value < good.value
    assert good.spread < bad.spread < 0.03
    both = combine_logs(np.array([0.0, 0.1]), np.array([0.01, 0.1]), 0.03)
    assert math.log(both.value) < 0.01


def test_a_host_is_compared_with_the_usual_one() -> None:
    usual = predict("gpt2", "h200", stack="eager", batch=1, seq=64, head="none")
    host = HostPass(0.7 * float(usual.latency_s), 64, "x")
    comparison = compare_card(replace(make_figures(1.0), host=host))
    assert comparison.card.host_factor == pytest.approx(0.7, rel=0.02)
    cost_s = host_cost_of_run("gpt2", 0.7 * usual.latency_s, batch=1, seq=64, head="none")
    assert comparison.host_s_per_operator == pytest.approx(cost_s)


def test_a_host_within_a_fifth_of_the_usual_one_is_usual() -> None:
    usual = predict("gpt2", "h200", stack="eager", batch=1, seq=64, head="none")
    factors = []
    for factor in (0.8, 0.87, 1.15, 1.3):
        host = HostPass(factor * float(usual.latency_s), 64, "x")
        measured = replace(make_figures(1.0), host=host)
        factors.append(compare_card(measured).card.host_factor)
    assert factors == [pytest.approx(0.8, rel=0.02), 1.0, 1.0, pytest.approx(1.3, rel=0.02)]


def test_a_load_that_runs_faster_than_predicted_is_no_hungry_card() -> None:
    """It takes the same joules for its bytes and products in less time."""
    figures = make_figures(1.0)
    loads = []
    for load in figures.loads:
        p = predict(
            {"name": load.name, "ops": [dict(load.operator)]},
            "h200-001",
            operands="cold",
            clock=load.clock_hz,
            temperature=55.0,
            power_limit=1e4,
            force=True,
        )
        parts_j = dict(zip(p.basis.detail.parts, p.basis.detail.part_j.tolist(), strict=True))
        counted_j = sum(
            joules for part, joules in parts_j.items() if part not in ("static", "clock", "sm")
        )
        latency_s = 0.85 * load.latency_s
        power_w = (float(p.energy_j) - counted_j) / load.latency_s + counted_j / latency_s
        assert power_w > 1.05 * load.power_w
        assert predict_paced_w(p, latency_s) == pytest.approx(power_w)
        loads.append(replace(load, latency_s=latency_s, power_w=power_w))
    comparison = compare_card(replace(figures, loads=tuple(loads)))
    assert comparison.factor.value == pytest.approx(1.0, abs=1e-6)
    assert comparison.latency_ratios == pytest.approx((0.85, 0.85, 0.85))


def test_loads_and_predictions_belong_together() -> None:
    with pytest.raises(ValueError, match="zip"):
        estimate_factor(make_figures(1.0).loads, [], 0.03)
