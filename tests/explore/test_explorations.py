"""GPUs, options and settings against single predictions; money and carbon by hand."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import wattcast
from wattcast.core.errors import ExitCode, WattcastError
from wattcast.explore.exploration_report import exploration_json, print_exploration
from wattcast.explore.explorations import Exploration, ExploreObjective, explore
from wattcast.predictor import prices

MODEL = {"batch": 8, "seq": 256}


def test_every_setting_equals_its_prediction_and_the_best_is_the_least() -> None:
    found = explore(
        "gpt2", "h200", ["clock=600MHz:1980MHz:60MHz", "power_limit=250W,700W"], **MODEL
    )
    for point in found.points[::7]:
        asked = {
            "clock": point.names["asked_clock_hz"],
            "power_limit": point.names["asked_power_limit_w"],
        }
        alone = wattcast.predict("gpt2", "h200", **asked, **MODEL)
        assert point.results["energy_j"] == pytest.approx(float(alone.energy_j), rel=1e-12)
        assert point.results["clock_hz"] == pytest.approx(float(alone.clock_hz), rel=1e-12)
    energy, delay = (
        np.array([row[name] for row in found.rows]) for name in ("energy_j", "latency_s")
    )
    least = {**found.best, **found.bolder}
    assert least[ExploreObjective.ENERGY].results["energy_j"] == energy.min()
    assert least[ExploreObjective.ED2] is found.points[int(np.argmin(energy * delay**2))]


def test_anything_varies_with_anything() -> None:
    found = explore(
        "gpt2", "h200,l4", ["dtype=fp32,bf16", "batch=1,4", "clock=900MHz,1.2GHz"], seq=128
    )
    assert found.axes == ("gpu", "dtype", "batch", "asked_clock_hz")
    assert len({tuple(point.names.values()) for point in found.points}) == len(found.points) == 16
    names = dict(found.points[-1].names)
    alone = wattcast.predict(
        "gpt2", names.pop("gpu"), clock=names.pop("asked_clock_hz"), seq=128, **names
    )
    assert found.points[-1].results["latency_s"] == pytest.approx(float(alone.latency_s), rel=1e-12)
    assert found.points[-1].results["energy_j_per_token"] == pytest.approx(
        alone.energy_j_per_token, rel=1e-12
    )


@pytest.mark.parametrize(
    ("model", "options", "unit"),
    [
        ("llama3-8b", {"phase": "decode", "seq": 512}, "token"),
        ("llama3-8b", {"phase": "prefill", "seq": 512}, "token"),
        ("llama3-8b", {"phase": "generate", "seq": 128, "tokens": 8}, "token"),
        ("gpt2", {"phase": "train", "seq": 128}, "token"),
        ("resnet50", {}, "picture"),
    ],
)
def test_speed_and_energy_have_the_name_of_what_they_count(
    model: str, options: dict[str, Any], unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep of decode steps once called its tokens requests: "3374 requests/s" of a card that
    decodes 3374 tokens.

    A request of 4,096 + 300 tokens takes a card a hundred times as long.
    """
    found = explore(model, "h200", ["batch=1,8"], **options)
    for point in found.points:
        alone = wattcast.predict(model, "h200", batch=point.names["batch"], **options)
        counted = alone.tokens_per_s if unit == "token" else alone.items_per_s
        each_j = alone.energy_j_per_token if unit == "token" else alone.energy_j_per_item
        assert point.results["unit"] == unit
        assert point.results["units_per_s"] == pytest.approx(counted, rel=1e-12)
        assert point.results["energy_j_per_unit"] == pytest.approx(each_j, rel=1e-12)
    console = Console(width=200)
    print_exploration(console, found, ExploreObjective.ENERGY)
    said = capsys.readouterr().out
    assert f"{unit}s/s" in said
    assert f"J/{unit}" in said
    assert "request" not in said


def test_points_that_count_different_things_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(
        {"name": "one", "ops": [{"op": "linear", "m": 64, "n": 64, "k": 64}]}, "h200,l4"
    )
    assert {point.results["unit"] for point in found.points} == {"run"}
    print_exploration(Console(width=200), found, ExploreObjective.ENERGY)
    assert "runs/s" in capsys.readouterr().out


def test_all_clocks_of_the_card() -> None:
    assert (
        len(explore("gpt2", "h200", ["clock=all"], **MODEL).points) == 110
    )  # 345 to 1980 MHz by 15


def test_a_bound_holds_and_costs_energy() -> None:
    def ask(**bound: str) -> Exploration:
        return explore("gpt2", "h200", ["clock=all"], stack="eager", batch=64, seq=512, **bound)

    loose, tight = ask(), ask(slowdown="2%")
    best = tight.best[ExploreObjective.ENERGY].results
    assert best["slowdown"] <= 0.02
    assert best["energy_j"] > loose.best[ExploreObjective.ENERGY].results["energy_j"]
    late_s = 1.02 * min(row["latency_s"] for row in loose.rows)
    by_time = ask(latency=f"{late_s}s").best
    assert {k: v.row for k, v in by_time.items()} == {k: v.row for k, v in tight.best.items()}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"latency": "1us"}, "the least is"),
        ({"latency": "1us", "slowdown": "5%"}, "both"),
        ({"slowdown": "-5%"}, "zero or more"),
        ({"slowdown": "5W"}, "pure number"),
        ({"vary": ["clock=2GHz:3GHz:15MHz"]}, "1.98 GHz"),
        ({"clock": "1GHz"}, "one value, or vary"),
    ],
)
def test_a_bad_bound_is_explained(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        explore("gpt2", "h200", **{"vary": ["clock=all"], **MODEL, **asked})


def test_unknown_steps_are_asked_for() -> None:
    with pytest.raises(WattcastError, match="--vary clock="):
        explore("gpt2", "gtx-480", ["clock=all"], **MODEL)


def test_gpus_equal_their_predictions_in_order() -> None:
    found = explore(
        "gpt2", ["h200", "h100-sxm", "a100-sxm-80gb"], electricity="0.36USD/kWh", **MODEL
    ).points
    each = [choice.results["energy_j_per_unit"] for choice in found]
    assert each == sorted(each)
    for choice in found:
        alone = wattcast.predict("gpt2", choice.names["gpu"], **MODEL)
        assert choice.results["energy_j_per_unit"] == pytest.approx(
            alone.energy_j_per_token, rel=1e-12
        )
        assert choice.results["units_per_s"] == pytest.approx(alone.tokens_per_s, rel=1e-12)
        assert choice.results["cost_per_unit"] == pytest.approx(
            alone.energy_j_per_token * 1e-7, rel=1e-12
        )


def test_a_gpu_that_cannot_is_a_row_with_a_reason() -> None:
    found = explore("gpt2", "tegra-k1,h200", tp=2, batch=4, seq=128).points
    assert [choice.names["gpu"] for choice in found] == ["h200", "tegra-k1"]
    assert found[0].results
    assert not found[1].results
    assert "link" in found[1].reason
    with pytest.raises(WattcastError, match=r"none of the 2 combinations can be run: .*link"):
        explore("gpt2", "tegra-k1", ["batch=1,2"], tp=2)


def test_gpus_on_which_it_does_not_fit_come_last() -> None:
    found = [
        choice.results.get("fits")
        for choice in explore("llama3-8b", "all", batch=1, seq=128).points
    ]
    assert found == sorted(found, reverse=True)
    assert set(found) == {True, False}


def test_options_are_every_combination_against_the_first() -> None:
    found = explore("gpt2", "h200", ["dtype=fp32,bf16", "batch=1,4"], seq=256).points
    assert [tuple(c.names.values()) for c in found] == [
        ("fp32", 1),
        ("fp32", 4),
        ("bf16", 1),
        ("bf16", 4),
    ]
    assert found[0].results["speedup"] == 1.0
    assert found[3].results["speedup"] == pytest.approx(
        found[3].results["units_per_s"] / found[0].results["units_per_s"]
    )


def test_several_gpus_are_all_counted() -> None:
    one, two = explore("llama3-8b", "h200", ["tp=1,2"], seq=256).points
    alone = wattcast.predict("llama3-8b", "h200", tp=2, seq=256)
    assert two.results["gpus"] == 2
    assert two.results["energy_j"] == pytest.approx(alone.energy_j, rel=1e-12)
    assert two.results["total_energy_j"] == pytest.approx(alone.total_energy_j, rel=1e-12)
    assert two.results["total_power_w"] == pytest.approx(alone.total_power_w, rel=1e-12)
    assert two.results["memory_byte"] < one.results["memory_byte"]


def test_an_impossible_combination_is_a_row_with_a_reason() -> None:
    found = explore("gpt2", "h200", ["phase=prefill,train", "stack=eager,engine"], seq=128).points
    assert [bool(choice.results) for choice in found] == [True, True, True, False]
    assert "engine" in found[3].reason


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ([], "several GPUs, or an option"),
        (["dtype"], "option=values"),
        (["dtyp=bf16"], "Closest: dtype"),
        (["sm_count=1,2"], "explore designs"),
        (["batch=1.5"], "whole numbers"),
        (["batch=1:9"], "low:high:step"),
        (["batch=1:4000:1", "seq=1:4000:1"], "at most 20,000"),
        (["batch=1,2", "batch=4"], "twice"),
        (["dtype=fp61"], "none of the 1 combinations"),
    ],
)
def test_bad_options_are_explained(vary: list[str], says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        explore("gpt2", "h200", vary, seq=128)


def test_money_by_hand() -> None:
    found = prices.parse_prices("h200=3.6EUR/h", "0.36EUR/kWh", "360g/kWh", pue=1.5)
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
        ({"electricity": "0.12"}, "0.12USD/kWh"),
        ({"electricity": "0.12USD"}, "0.12USD/kWh"),
        ({"electricity": "-1USD/kWh"}, "zero or more"),
        ({"carbon": "frence"}, "Closest: france"),
        ({"carbon": "400kg"}, "carbon"),
        ({"price": ["h200"]}, "h200=3.50USD/h"),
        ({"price": ["h20x=1USD/h"]}, "Closest: h20"),
        ({"electricity": "1USD/kWh", "price": ["h200=1EUR/h"]}, "one currency"),
        ({"pue": 0.5}, "from 1 to 10"),
        ({"pue": float("nan")}, "from 1 to 10"),
    ],
)
def test_bad_prices_are_explained(asked: dict, says: str) -> None:
    with pytest.raises(WattcastError, match=says):
        prices.parse_prices(**asked)


def test_the_commands(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep = ("explore", "sweep", "gpt2", "--batch", "8", "--seq", "256")
    clocks = (*sweep, "--gpu", "h200", "--vary", "clock=all")
    told = json.loads(call(*clocks, "--slowdown", "5%", "--json").out)
    assert told["best"]["energy"]["slowdown"] <= 0.05
    assert len(told["points"]) == 110
    png = tmp_path / "c.png"
    done = call(*clocks, "--vary", "power_limit=300W,700W", "--plot", str(png))
    assert done.code == 0, done.err
    assert "least energy without a bound at asked clock" in done.out
    assert "40 of 220 points" in done.out
    assert png.stat().st_size > 1000
    argv = (
        "--gpu",
        "h200,l4",
        "--electricity",
        "0.12USD/kWh",
        "--carbon",
        "world",
        "--plot",
        f"{tmp_path}/g.svg",
    )
    done = call(*sweep, *argv)
    assert done.code == 0, done.err
    assert "USD/M tokens" in done.out
    assert (tmp_path / "g.svg").read_bytes().startswith(b"<?xml")
    done = call(
        "explore",
        "sweep",
        "gpt2",
        "--gpu",
        "h200",
        "--vary",
        "phase=prefill,train",
        "--vary",
        "dtype=fp8",
    )
    assert done.code == 0, done.err
    assert "train, fp8: " in done.out


def test_a_gpu_of_ones_own_is_compared_and_drawn(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = (files("wattcast.hardware") / "catalogue" / "h200.yaml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        text.replace("sm_count: {value: 132", "sm_count: {value: 160"), encoding="utf-8"
    )
    done = call(
        "explore",
        "sweep",
        "gpt2",
        "--batch",
        "64",
        "--gpu",
        f"h200,{mine}",
        "--plot",
        str(tmp_path / "m.png"),
    )
    assert done.code == 0, done.err
    assert "mine" in done.out
    assert (tmp_path / "m.png").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("explore", "sweep", "gpt2", "--gpu", "h200", "--minimise", "edd"), "Closest: ed"),
        (("explore", "sweep", "gtp2", "--gpu", "all"), "Closest: gpt2"),
        (("explore", "sweep", "gpt2", "--gpu", "h200,h200"), "each GPU once"),
        (("explore", "sweep", "gpt2", "--gpu", "h201"), "Closest: h20"),
        (("explore", "sweep", "gpt2", "--gpu", "h200", "--vary", "dtyp=bf16"), "Closest: dtype"),
        (("explore", "sweep", "lama", "--gpu", "h200", "--vary", "batch=1"), "unknown model"),
    ],
)
def test_a_mistake_gets_one_paragraph(call, argv: tuple[str, ...], says: str) -> None:
    done = call(*argv)
    assert done.code == ExitCode.BAD_INPUT
    assert says in done.err
    assert done.out == ""


def test_the_best_point_is_not_far_from_what_was_measured() -> None:
    """Sweeps recommended clocks and limits far below any measured ones, and warned of them in the
    same line.
    """
    found = explore("llama3-8b", "h200", ["power_limit=200W:700W:100W"], phase="decode", batch=32)
    best, bolder = (some[ExploreObjective.ENERGY] for some in (found.best, found.bolder))
    assert best.describe_risk() == ""
    assert "far from what was measured" in bolder.describe_risk()
    assert bolder.results["energy_j"] < best.results["energy_j"]
    assert exploration_json(found)["bolder"]["energy"]["risk"] == bolder.describe_risk()
