"""The error that each AccelWattch file was judged by: worked out again, and said wherever the file
goes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from wattcast.lab.gpuwattch import measured_energies as measured
from wattcast.lab.gpuwattch.judged_files import (
    FileJudgement,
    cards_left_out,
    describe_judgement,
    find_judgements,
    read_judgements,
    worst_left_out,
)
from wattcast.lab.validate.public_checks.simulator_files import (
    EVENTS,
    JudgedRates,
    fit_counters_of_events,
    judge_files,
    predicted_counts_control,
    read_volta_kernels,
)

LABEL = FileJudgement(gpu="h200", card="made up", rows_of="made-up rows", counts="counted")


def test_shipped_errors_are_what_the_rows_give(reference: Path) -> None:
    again = (*judge_files(reference), predicted_counts_control())
    assert again == read_judgements()


def test_a_file_that_is_right_has_no_error_and_one_a_tenth_high_has_ten_percent() -> None:
    chip = measured.measured_chip("h200")
    rng = np.random.default_rng(0)
    rate = rng.uniform(1e9, 1e11, (5, len(measured.TERMS)))
    rows = JudgedRates(np.ones(5), rate, np.full(5, 0.5), np.array([1.0, 0.9, 0.8, 1.0, 1.0]))
    watts = rows.file_power_w(chip)
    exact = JudgedRates(watts, rate, rows.active, rows.relative_voltage).judge(chip, LABEL)
    assert (exact.rows, exact.mape, exact.bias) == (5, 0.0, 0.0)
    low = JudgedRates(watts / 1.1, rate, rows.active, rows.relative_voltage).judge(chip, LABEL)
    assert (low.mape, low.bias) == (10.0, 10.0)


def test_rates_give_the_watts_of_the_component_model() -> None:
    """The judge's own sum is the model that ``lab power-trace --config h200`` builds."""
    rates = np.array([[1e9, 2e9, 3e9, 1e8, 2e8, 4e8, 1e8, 2e8, 3e8, 4e8, 1e8, 5e7]])
    launch = measured.CountedLaunch(
        name="a",
        family="made up",
        power_w=1.0,
        duration_s=1.0,
        clock_hz=1.98e9,
        relative_voltage=0.9,
        active=0.75,
        counts=rates[0].tolist(),
    )
    launches = measured.CountedLaunches.gather([launch])
    chip = measured.measured_chip("h200")
    activity = measured.launches_to_activity(launches, float(chip.design.sm_count))
    model_w = measured.measured_model("h200")[2].model.power(activity).total_w
    rows = JudgedRates(np.ones(1), rates, np.array([0.75]), np.array([0.9]))
    assert rows.file_power_w(chip) == pytest.approx(model_w, rel=1e-6)


def test_counters_of_an_event_follow_its_own_unit() -> None:
    counters = fit_counters_of_events()
    place = {name: row for row, name in enumerate(measured.TERMS)}
    tensor = counters[place["TENSOR_ACC"], EVENTS.index("tensor_fp16_flop")]
    assert tensor == pytest.approx(1.0 / 128.0, rel=0.1)  # 32 accesses of 16 x 8 x 16 products
    read = counters[place["MEM_RD"], EVENTS.index("dram_read_byte")]
    assert read == pytest.approx(1.0 / 32.0, rel=0.1)
    assert (counters >= 0.0).all()


def test_an_access_of_volta_s_tensor_cores_is_another_one(reference: Path) -> None:
    """Four kernels are left out for it: their watts would be several times too high."""
    rows = read_volta_kernels(reference, with_tensor_cores=True)
    assert len(rows.power_w) == 4
    assert rows.judge(measured.measured_chip("quadro-gv100"), LABEL).bias > 100.0


@pytest.mark.parametrize("name", [measured.PARENT, *measured.CARRIED])
def test_every_file_says_its_error_or_that_no_row_judges_it(name: str) -> None:
    header = measured.measured_architecture(measured.measured_chip(name)).comments[""]
    own = find_judgements(name)
    assert describe_judgement(name) in header
    if own:
        assert all(
            f"{item.mape:.1f} % off in the mean of {item.rows} rows" in header for item in own
        )
    else:
        assert "forecast, judged on no row of this card" in header
        assert all(item.card in header for item in cards_left_out())


def test_which_cards_have_rows() -> None:
    assert [bool(find_judgements(name)) for name in ("h200", "a100-sxm-80gb", "b200")] == [True] * 3
    assert not find_judgements("h100-sxm")
    assert "another form of the card" in describe_judgement("a100-sxm-80gb")
    assert "another form of the card" not in describe_judgement("a100-pcie-40gb")
    (h200,) = find_judgements("h200")
    assert h200.counts != "predicted"  # counted rows go before predicted ones


def test_intervals_reach_as_far_as_the_farthest_card_left_out() -> None:
    worst = worst_left_out().mape / 100.0
    values = measured.measured_chip("h100-sxm").values
    for value in values.values():
        assert value.high - value.value >= 0.99 * worst * value.value


def test_a_saved_file_of_gpus_show_says_it_too(call, tmp_path: Path) -> None:
    out = tmp_path / "h100.xml"
    shown = call("gpus", "show", "h100-sxm", "--energies", "--save", str(out), "--json")
    assert json.loads(shown.out)["accelwattch_file"]["judged"].startswith("forecast")
    assert "judged on no row of this card" in out.read_text()
    table = tmp_path / "h200.yaml"
    call("lab", "accelwattch", "h200", "--energies", str(table))
    assert "5.0 % off in the mean of 237 rows" in " ".join(table.read_text().split())
    changed = call(
        *("gpus", "show", "h200", "--energies", "--change", "l2=2", "--save", str(out)),
    )
    assert changed.code != 0
    assert "fitted energies" in changed.err
