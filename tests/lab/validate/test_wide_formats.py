"""Public rows in fp32, TF32 and fp16 of single cards, and the windows they were polled in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.lab.validate.public_checks.published_runs import (
    PollingWindow,
    fp32_runs,
    read_published_runs,
)
from wattcast.lab.validate.public_checks.wide_format_checks import (
    INSIDE,
    ask_fp32_rows,
    ask_speed_rows,
    judge_fp32_rows,
    training_speed_rows,
)
from wattcast.lab.validate.public_checks.wide_format_intervals import (
    WideRows,
    find_ends_without_networks,
    learn_wide_spread,
    learn_wide_spreads,
)
from wattcast.lab.validate.typed_commands import JudgedRow, answer_commands, judge_rows
from wattcast.predictor.bundle.support_widening import learned_distances
from wattcast.predictor.prediction import Prediction


def test_a_window_is_removed_from_time_and_energy() -> None:
    """Twenty iterations of 1.5 s at 200 W, polled for 2 s longer at 50 W."""
    window = PollingWindow(beyond_s=2.0, power_w=50.0)
    published_w = (30.0 * 200.0 + 2.0 * 50.0) / 32.0
    assert_allclose(window.remove(32.0 / 20, published_w, 20), (1.5, 200.0))


def test_a_failed_run_keeps_what_was_published() -> None:
    """Of a run that failed at once nothing but the window is left."""
    window = PollingWindow(beyond_s=1.6, power_w=60.0)
    assert window.remove(2.0, 61.0, 1) == (2.0, 61.0)


def test_runs_at_the_limit_draw_the_limit_once_the_window_is_removed(reference: Path) -> None:
    """Runs that a 250 W card slowed down were published at 241 W: the window holds idle time."""
    runs = read_published_runs(reference, "clocks")
    slowed = [r for r in runs if r.set_hz - r.clock_hz > 30e6 and not r.corrupt]
    assert len(slowed) == 29
    assert np.median([r.power_w for r in slowed]) == pytest.approx(250.0, abs=1.0)
    assert np.median([r.published_w for r in slowed]) < 243.0


@pytest.fixture(scope="module")
def fp32_answers(reference: Path) -> tuple[list[JudgedRow], list[Prediction]]:
    """Every published run in fp32, and what `predict` says of it."""
    rows = ask_fp32_rows(reference)
    return rows, answer_commands([row.command for row in rows])


def test_fp32_models_are_judged_and_meet_their_goals(
    reference: Path, fp32_answers: tuple[list[JudgedRow], list[Prediction]]
) -> None:
    """40 fp32 rows of an A100 were in no ledger: 49 % off in time and 20 % inside.

    The ledger kept only runs with an operator list, and no run in fp32 has one. Intervals of time
    held 97.5 and 100 % of the A100's rows and 67 % of the A10's, as long as tables of products on
    tensor cores gave them. Those of power are judged on all 96 rows of both cards: the A10's
    twelve lie inside too seldom.
    """
    assert len(fp32_runs(read_published_runs(reference, "900"))) == 40
    rows = judge_fp32_rows(reference, *fp32_answers)
    for row in rows:
        assert row["mape"] <= row["must"], row
        if row["quantity"] == "latency" or row["set"].startswith("A100"):
            assert INSIDE[0] <= row["inside"] <= INSIDE[1], row
    for quantity in ("latency", "power"):
        judged = [row for row in rows if row["quantity"] == quantity]
        count = sum(row["n"] for row in judged)
        inside = sum(row["n"] * row["inside"] for row in judged) / count
        assert count == 96
        assert INSIDE[0] <= inside <= INSIDE[1]


def test_shipped_spreads_of_fp32_are_the_learned_ones(
    fp32_answers: tuple[list[JudgedRow], list[Prediction]],
) -> None:
    assert learn_wide_spreads(WideRows.from_judged(*fp32_answers)) == learned_distances().wide


def test_networks_count_alike_whatever_they_have_of_rows() -> None:
    """gpt2 ran at eleven clocks, which is half of an A100's rows and still one network."""
    predictions = wattcast.predict_many([("gpt2", {"dtype": "fp32"})] * 24, "a100-pcie-40gb")
    factors = np.array([1.02] * 20 + [1.15] * 4)
    measured_s = factors * np.array([p.latency_s for p in predictions])
    networks = np.array(["gpt2"] * 20 + ["opt-1.3b"] * 4)
    rows = WideRows(networks, tuple(predictions), measured_s)
    spread = learn_wide_spread(rows, np.ones(24, dtype=bool))
    assert spread.latency == pytest.approx(np.log(1.15), abs=0.01)
    without = find_ends_without_networks(rows)
    assert (without[:20, 1] > measured_s[:20]).all()
    assert (without[20:, 1] < measured_s[20:]).all()


def test_training_speeds_of_single_cards_are_judged_whole(reference: Path) -> None:
    """All 24 rows count, those of ResNet-50 too, which is forecast with channels first."""
    rows = training_speed_rows(reference)
    assert sum(row["n"] for row in rows if " on " not in row["quantity"]) == 24


def test_squad_computes_no_logits_of_the_vocabulary(reference: Path) -> None:
    """The head for masked tokens was a fifth of BERT-base's work and a tenth of BERT-large's: base
    came out 11 to 17 points slower than large on the same card. Without it they agree.
    """
    rows = [row for row in ask_speed_rows(reference) if row.command.subject.startswith("bert")]
    assert len(rows) == 16
    predicted = judge_rows(rows)
    off: dict[str, list[float]] = {}
    for row, one in zip(rows, predicted, strict=True):
        options = row.command.options
        card = f"{options['gpu']} {options['dtype']}"
        off.setdefault(card, []).append(one["latency"] / row.measured["latency"] - 1.0)
    gaps = {card: abs(base - large) for card, (base, large) in off.items()}
    assert len(gaps) == 8
    assert np.median(list(gaps.values())) < 0.04, gaps


def test_long_runs_on_v100_and_a100_meet_the_goal(reference: Path) -> None:
    """BERT's weights are updated as ``run_squad.py`` does; a fused update left it 10.6 % too fast.
    ResNet-50 was 18 % too slow: a block of batch norm's statistics waited for loads as if they were
    arithmetic, and a V100 had no Winograd.
    """
    judged = [row for row in training_speed_rows(reference) if row["must"] is not None]
    assert {row["quantity"] for row in judged} == {
        "latency, v100-sxm",
        "latency, a100-pcie-40gb",
        "latency, BERT on V100 and A100",
        "latency, ResNet-50 on V100 and A100",
    }
    for row in judged:
        assert row["mape"] <= row["must"], row
