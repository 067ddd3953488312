"""Efficiency factors of a user's own, and that the calibration's shortcut equals them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import wattcast
from wattcast.calibrate.calibration import MeasuredModel, analyse_models, predict_models
from wattcast.core.errors import BadInput, UnknownName
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.hardware.catalogue_reader import list_boards
from wattcast.predictor.bundle.calibrated import apply_factors, factor_names
from wattcast.predictor.bundle.forecast import forecast_bundle
from wattcast.predictor.pipeline import analyse_graph, total_at_clock
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Elementwise, Linear, Softmax

GPU = load_gpu("a100-pcie-40gb")
WORK = Graph.from_operators(
    "mix",
    [Linear(2048, 2048, 2048), Softmax(8192, 512), Elementwise("add", 1 << 25), Linear(64, 64, 64)],
)


def run(factors: dict[str, float]) -> tuple[float, float]:
    bundle = apply_factors(forecast_bundle(GPU), factors)
    totals = total_at_clock(analyse_graph(WORK, GPU, bundle), OperatingPoint(900e6), bundle)
    return float(totals.latency_s), float(totals.power_w)


@pytest.mark.parametrize("name", ["launch", "compute", "products", "memory"])
def test_a_factor_on_time_slows(name: str) -> None:
    assert run({name: 2.0})[0] > run({})[0]


@pytest.mark.parametrize("name", ["energy", "tensor_energy", "dram_energy", "sm_energy"])
def test_a_factor_on_energy_costs_watts_and_no_time(name: str) -> None:
    assert run({name: 1.5})[1] > run({})[1]
    assert run({name: 1.5})[0] == run({})[0]


def test_an_idle_offset_adds_its_watts() -> None:
    offset = 10.0 * (1 + 0.0 * GPU.power.limit_w)
    hotter = run({"idle_offset": offset})[1] - run({})[1]
    assert_allclose(hotter, 10.0, rtol=0.05)


@pytest.mark.parametrize(
    "factors",
    [
        {},
        {"launch": 1.7, "compute": 1.2},
        {"products": 1.3, "memory": 0.8, "energy": 1.4},
        {"dram_energy": 0.7, "idle_offset": -5.0, "tensor_energy": 1.1},
    ],
)
def test_the_shortcut_of_calibration_equals_a_bundle_with_factors(
    factors: dict[str, float],
) -> None:
    measured = MeasuredModel("w", WORK, 1.0, 1.0, 900e6, 45.0)
    base = forecast_bundle(GPU)
    seconds, watts = predict_models(analyse_models([measured], GPU, base), factors, GPU, base)
    assert_allclose((seconds[0], watts[0]), run(factors), rtol=2e-3)


def test_unknown_and_unreasonable_factors_are_refused() -> None:
    assert "dram_energy" in factor_names()
    with pytest.raises(UnknownName, match="dram_energy"):
        wattcast.predict("gpt2", "l40s", factors={"dram_energi": 1.1})
    for value in (0.0, -1.0, 1e6, np.nan):
        with pytest.raises(BadInput, match="compute"):
            wattcast.predict("gpt2", "l40s", factors={"compute": value})
    with pytest.raises(BadInput, match="idle_offset"):
        wattcast.predict("gpt2", "l40s", factors={"idle_offset": -1000.0})


def test_factors_on_the_command_line(call) -> None:
    plain = call("predict", "gpt2", "--gpu", "l40s", "--json")
    slow = call("predict", "gpt2", "--gpu", "l40s", "--factor", "launch=2", "--json")
    assert plain.code == slow.code == 0
    assert "factor of your own: launch 2" in slow.out
    for bad in ("launch", "launch=", "launch=x", "=2"):
        done = call("predict", "gpt2", "--gpu", "l40s", "--factor", bad)
        assert done.code == 2
        assert "NAME=VALUE" in done.err
    twice = call("predict", "gpt2", "--gpu", "l40s", "--factor", "launch=2", "--factor", "launch=3")
    assert twice.code == 2


def test_boards_differ_from_the_mean_card_in_what_memory_draws() -> None:
    asked = {
        "phase": "decode",
        "batch": 16,
        "seq": 2048,
        "stack": "engine",
        "price": "h200=3.6EUR/h",
    }
    lean, mean, hungry = (
        wattcast.predict("llama-3.1-8b", g, **asked) for g in ("h200-000", "h200", "h200-001")
    )
    assert lean.power_w < mean.power_w < hungry.power_w < 700.0
    assert lean.latency_s == mean.latency_s == hungry.latency_s
    assert lean.support.word == "measured"
    assert lean.cost is not None
    assert lean.cost == mean.cost
    assert list(list_boards()) == [lean.gpu, hungry.gpu], (
        "a board has factors, and a place in this test"
    )
    for one, part_number in ((lean, "692-2G520-0282-000"), (hungry, "692-2G520-0282-001")):
        (note,) = [text for text in one.assumptions if part_number in text]
        factor = float(note.partition("dram_energy ")[2].split()[0])
        told = wattcast.predict("llama-3.1-8b", "h200", factors={"dram_energy": factor}, **asked)
        assert_allclose(one.power_w, told.power_w, rtol=1e-9)
