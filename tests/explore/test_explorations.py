"""Clocks, GPUs and algorithms against single predictions; money and carbon by hand."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import wattcast
from wattcast.core.errors import ExitCode, WattcastError
from wattcast.explore import explorations
from wattcast.explore.explorations import ClockObjective, explore_clocks
from wattcast.predictor import prices

MODEL = {"batch": 8, "seq": 256}


def test_every_clock_equals_its_prediction_and_the_best_is_the_least() -> None:
    found = explore_clocks("gpt2", "h200", clock="600MHz:1980MHz:60MHz", power_limit="250W,700W", **MODEL)
    columns = found.columns
    for row in range(0, len(columns["point"]), 7):
        alone = wattcast.predict(
            "gpt2",
            "h200",
            clock=columns["asked_clock_hz"][row],
            power_limit=columns["asked_power_limit_w"][row],
            **MODEL,
        )
        assert columns["energy_j"][row] == pytest.approx(float(alone.energy_j), rel=1e-12)
        assert columns["clock_hz"][row] == pytest.approx(float(alone.clock_hz), rel=1e-12)
    assert columns["energy_j"][found.best[ClockObjective.ENERGY]] == columns["energy_j"].min()
    delay = columns["energy_j"] * columns["latency_s"] ** 2
    assert found.best[ClockObjective.ED2] == int(np.argmin(delay))


def test_all_clocks_of_the_card_by_default() -> None:
    assert len(explore_clocks("gpt2", "h200", **MODEL).columns["point"]) == 110  # 345 to 1980 MHz by 15


def test_a_bound_holds_and_costs_energy() -> None:
    loose = explore_clocks("gpt2", "h200", batch=64, seq=512)
    tight = explore_clocks("gpt2", "h200", slowdown="2%", batch=64, seq=512)
    row = tight.best[ClockObjective.ENERGY]
    assert tight.columns["slowdown"][row] <= 0.02
    assert tight.columns["energy_j"][row] > loose.columns["energy_j"][loose.best[ClockObjective.ENERGY]]
    late = float(loose.columns["latency_s"].min()) * 1.02
    by_time = explore_clocks("gpt2", "h200", latency=f"{late}s", batch=64, seq=512)
    assert by_time.best == tight.best


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"latency": "1us"}, "the least is"),
        ({"latency": "1us", "slowdown": "5%"}, "both"),
        ({"slowdown": "-5%"}, "zero or more"),
        ({"slowdown": "5W"}, "pure number"),
        ({"clock": "2GHz:3GHz:15MHz"}, "1.98 GHz"),
    ],
)
def test_a_bad_bound_is_explained(asked: dict[str, str], says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        explore_clocks("gpt2", "h200", **MODEL, **asked)


def test_unknown_steps_are_asked_for() -> None:
    with pytest.raises(WattcastError, match="--clocks"):
        explore_clocks("gpt2", "gtx-480", **MODEL)


def test_gpus_equal_their_predictions_in_order() -> None:
    found = explorations.compare_gpus(
        "gpt2", ["h200", "h100-sxm", "a100-sxm-80gb"], prices.parse_prices("0.36USD/kWh"), **MODEL
    )
    each = [choice.results["energy_j_per_request"] for choice in found]
    assert each == sorted(each)
    for choice in found:
        alone = wattcast.predict("gpt2", choice.names["gpu"], **MODEL)
        assert choice.results["energy_j_per_request"] == pytest.approx(float(alone.energy_j) / 8, rel=1e-12)
        assert choice.results["requests_per_s"] == pytest.approx(8 / float(alone.latency_s), rel=1e-12)
        assert choice.results["cost_per_request"] == pytest.approx(float(alone.energy_j) / 8 * 1e-7, rel=1e-12)


def test_a_gpu_that_cannot_is_a_row_with_a_reason() -> None:
    found = explorations.compare_gpus("gpt2", ["tegra-k1", "h200"], tp=2, batch=4, seq=128)
    assert [choice.names["gpu"] for choice in found] == ["h200", "tegra-k1"]
    assert found[0].results
    assert not found[1].results
    assert "link" in found[1].reason
    with pytest.raises(WattcastError, match=r"no GPU can run this workload: tegra-k1: .*link"):
        explorations.compare_gpus("gpt2", ["tegra-k1"], tp=2)


def test_gpus_on_which_it_does_not_fit_come_last() -> None:
    found = [choice.results.get("fits") for choice in explorations.compare_gpus("llama3-8b", batch=1, seq=128)]
    assert found == sorted(found, reverse=True)
    assert set(found) == {True, False}


def test_algorithms_are_every_combination_against_the_first() -> None:
    found = explorations.compare_algorithms("gpt2", "h200", ["dtype=fp32,bf16", "batch=1,4"], seq=256)
    assert [tuple(c.names.values()) for c in found] == [("fp32", 1), ("fp32", 4), ("bf16", 1), ("bf16", 4)]
    assert found[0].results["speedup"] == 1.0
    alone = wattcast.predict("gpt2", "h200", dtype="bf16", batch=4, seq=256)
    assert found[3].results["energy_j_per_request"] == pytest.approx(float(alone.energy_j) / 4, rel=1e-12)
    assert found[3].results["speedup"] == pytest.approx(
        found[3].results["requests_per_s"] / found[0].results["requests_per_s"]
    )


def test_several_gpus_are_all_counted() -> None:
    one, two = explorations.compare_algorithms("llama3-8b", "h200", ["tp=1,2"], seq=256)
    alone = wattcast.predict("llama3-8b", "h200", tp=2, seq=256)
    assert two.results["gpus"] == 2
    assert two.results["energy_j"] == pytest.approx(2 * float(alone.energy_j), rel=1e-12)
    assert two.results["memory_byte"] < one.results["memory_byte"]


def test_an_impossible_combination_is_a_row_with_a_reason() -> None:
    found = explorations.compare_algorithms("gpt2", "h200", ["phase=prefill,train", "stack=eager,engine"], seq=128)
    assert [bool(choice.results) for choice in found] == [True, True, True, False]
    assert "engine" in found[3].reason


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ([], "at least one"),
        (["dtype"], "option=values"),
        (["dtyp=bf16"], "Closest: dtype"),
        (["batch=1.5"], "whole numbers"),
        (["batch=1:9"], "low:high:step"),
        (["batch=1:4000:1", "seq=1:4000:1"], "at most 10,000"),
        (["batch=1,2", "batch=4"], "twice"),
        (["dtype=fp61"], "none of the 1 combinations"),
    ],
)
def test_bad_options_are_explained(vary: list[str], says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        explorations.compare_algorithms("gpt2", "h200", vary, seq=128)


def test_money_by_hand() -> None:
    found = prices.parse_prices("0.36EUR/kWh", "360g/kWh", ["h200=3.6EUR/h"], pue=1.5)
    assert found.cost("h200", 1e6, 10.0) == pytest.approx(1e6 * 1.5 * 1e-7 + 10 * 1e-3)
    assert found.cost("l4", 1e6, 10.0) is None
    assert found.carbon_g(1e6) == pytest.approx(1e6 * 1.5 * 1e-4)
    assert prices.parse_prices().cost("h200", 1.0, 1.0) is None
    assert prices.parse_prices().carbon_g(1.0) is None
    france = prices.parse_prices(carbon="France")
    assert france.carbon_g(3.6e6) == pytest.approx(56.0)
    assert any("Ember" in note for note in france.notes)


def test_every_intensity_has_a_year_and_a_source() -> None:
    for region, (grams, source) in prices.carbon_regions().items():
        assert 0 < grams < 1500, region
        assert source.startswith("20")
        assert len(source) > 20


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tariff": "0.12"}, "0.12USD/kWh"),
        ({"tariff": "0.12USD"}, "0.12USD/kWh"),
        ({"tariff": "-1USD/kWh"}, "zero or more"),
        ({"carbon": "frence"}, "Closest: france"),
        ({"carbon": "400kg"}, "carbon"),
        ({"rent": ["h200"]}, "h200=3.50USD/h"),
        ({"rent": ["h20x=1USD/h"]}, "Closest: h200"),
        ({"tariff": "1USD/kWh", "rent": ["h200=1EUR/h"]}, "one currency"),
        ({"pue": 0.5}, "from 1 to 10"),
        ({"pue": float("nan")}, "from 1 to 10"),
    ],
)
def test_bad_prices_are_explained(asked: dict, says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        prices.parse_prices(**asked)


def test_the_commands(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    asked = ("gpt2", "--batch", "8", "--seq", "256")
    done = call("explore", "clocks", *asked, "--gpu", "h200", "--slowdown", "5%", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["best"]["energy"]["slowdown"] <= 0.05
    assert len(told["points"]) == 110
    png = tmp_path / "c.png"
    done = call("explore", "clocks", *asked, "--gpu", "h200", "--power-limits", "300W,700W", "--plot", str(png))
    assert done.code == 0, done.err
    assert "least energy without a bound at" in done.out
    assert png.stat().st_size > 1000
    argv = ("--gpus", "h200,l4", "--tariff", "0.12USD/kWh", "--carbon", "world", "--plot", str(tmp_path / "g.svg"))
    done = call("explore", "gpus", *asked, *argv)
    assert done.code == 0, done.err
    assert "cost (USD)/request" in done.out
    assert (tmp_path / "g.svg").read_bytes().startswith(b"<?xml")
    done = call("explore", "gpus", *asked, "--gpus", "h200,l4", "--json")
    assert [c["reason"] for c in json.loads(done.out)["choices"]] == [None, None]
    done = call(
        "explore", "algorithms", "gpt2", "--gpu", "h200", "--vary", "phase=prefill,train", "--vary", "dtype=fp8"
    )
    assert done.code == 0, done.err
    assert "train, fp8: " in done.out


def test_a_gpu_of_ones_own_is_compared_and_drawn(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = (files("wattcast.hardware") / "catalogue" / "h200.yaml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(text.replace("sm_count: {value: 132", "sm_count: {value: 160"), encoding="utf-8")
    done = call(
        "explore", "gpus", "gpt2", "--batch", "64", "--gpus", f"h200,{mine}", "--plot", str(tmp_path / "m.png")
    )
    assert done.code == 0, done.err
    assert "mine" in done.out
    assert (tmp_path / "m.png").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("explore", "clocks", "gpt2", "--gpu", "h200", "--objective", "edd"), "Closest: ed"),
        (("explore", "gpus", "gtp2"), "Closest: gpt2"),
        (("explore", "gpus", "gpt2", "--gpus", "h200,h200"), "each GPU once"),
        (("explore", "gpus", "gpt2", "--gpus", "h20"), "Closest: h200"),
        (("explore", "algorithms", "gpt2", "--gpu", "h200", "--vary", "dtyp=bf16"), "Closest: dtype"),
        (("explore", "algorithms", "lama", "--gpu", "h200", "--vary", "batch=1"), "unknown model"),
    ],
)
def test_a_mistake_gets_one_paragraph(call, argv: tuple[str, ...], says: str) -> None:
    done = call(*argv)
    assert done.code == ExitCode.BAD_INPUT
    assert says in done.err
    assert done.out == ""
