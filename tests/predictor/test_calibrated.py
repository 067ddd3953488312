"""Calibrations that ship: small, on top of the forecast, and lent to cards of the same processor."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

import wattcast
from wattcast.core.errors import BadInput, WattcastError
from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.power.module_power import as_module_power
from wattcast.predictor.bundle import bundle_for, forecast_bundle
from wattcast.predictor.learned_factors import CarriedFactors, LayeredFactors

SHIPPED = (
    *("a100-sxm-80gb", "l40s", "h100-sxm", "rtx-pro-6000"),
    *("b200", "gb200", "b300", "gb300"),
)
WITH_WATTS = ("b200", "gb200", "b300", "gb300")  # of their own, or of the B200
ENGINES = ("h100-sxm", "h200", "b200")  # cards with calibrations on other engines' kernels


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_calibration_changes_times_and_leaves_the_rest_to_the_forecast(name: str) -> None:
    gpu = load_gpu(name)
    bundle, forecast = bundle_for(gpu), forecast_bundle(gpu)
    assert bundle.status == "calibrated"
    assert "held out" in bundle.provenance.note
    kept, theirs = bundle.power.to_plain(), forecast.power.to_plain()
    moved = {"energy_j", "idle"} if name in WITH_WATTS else set()
    assert {k for k in kept if kept[k] != theirs[k]} == moved
    assert bundle.corrections["softmax"] == forecast.corrections["softmax"]
    decode = "attention.engine.paged.decode"
    assert bundle.corrections[decode] != forecast.corrections.get(decode)
    assert isinstance(bundle.learned, LayeredFactors)
    assert bundle.learned.carried is forecast.learned
    assert bundle_for(gpu) is bundle  # kept with what it learned of workloads


@pytest.mark.parametrize(
    "name", [*SHIPPED, *(f"{card}.{engine}" for card in ENGINES for engine in ("trtllm", "sglang"))]
)
def test_a_shipped_calibration_is_small_and_holds_no_table(name: str) -> None:
    folder = files("wattcast.predictor.bundle").joinpath(name)
    told = {"errors.csv", "rows.sha256"}  # what it was made from, and how far it is off
    assert {path.name for path in folder.iterdir()} - told == {"calibration.yaml", "arrays.npz"}
    assert len(folder.joinpath("calibration.yaml").read_bytes()) < 20_000
    assert len(folder.joinpath("arrays.npz").read_bytes()) < 600_000


def test_a_card_of_the_same_processor_takes_the_times_and_stays_a_forecast() -> None:
    bundle = bundle_for(load_gpu("a100-pcie-40gb"))
    assert bundle.status == "forecast"
    assert any("same processor" in note for note in bundle.assumptions)
    assert isinstance(bundle.learned, LayeredFactors)
    assert isinstance(bundle.learned.own, CarriedFactors)
    lent = bundle_for(load_gpu("a100-sxm-80gb")).corrections["gemm.ampere"]
    assert bundle.corrections["gemm.ampere"] == lent
    assert bundle.power is forecast_bundle(load_gpu("a100-pcie-40gb")).power


def test_slower_tensor_cores_are_fed_as_well_as_faster_ones_of_the_same_processor() -> None:
    l40s = bundle_for(load_gpu("l40s"))
    # by another name, since the RTX 4090 has rows of its own
    rtx = bundle_for(replace(load_gpu("rtx-4090"), name="other-geforce"))
    assert 1.0 < rtx.corrections["gemm.tensor"].compute < l40s.corrections["gemm.tensor"].compute


def test_a_card_of_the_same_processor_may_lack_a_number_format() -> None:
    rtx = load_gpu("rtx-4090")
    rates = {
        dtype: rate
        for dtype, rate in rtx.pipes.tensor_flop_per_cycle.items()
        if dtype != Dtype.BF16
    }
    without = replace(rtx, name="own", pipes=replace(rtx.pipes, tensor_flop_per_cycle=rates))
    assert (
        bundle_for(without).corrections["gemm.tensor"]
        == bundle_for(load_gpu("l40s")).corrections["gemm.tensor"]
    )


@pytest.mark.parametrize("engine", ["trtllm", "sglang"])
@pytest.mark.parametrize("name", ENGINES)
def test_another_engine_has_kernels_of_its_own_and_the_energies_of_the_card(
    name: str, engine: str
) -> None:
    card = load_gpu(name)
    usual, other = bundle_for(card), bundle_for(replace(card, engine=engine))
    decode = "attention.engine.paged.decode"
    assert other.corrections[decode] != usual.corrections[decode]
    theirs = as_module_power(usual.power)
    for event, joules in as_module_power(other.power).energy_j.items():
        assert joules == pytest.approx(theirs.energy_j.get(event, joules), rel=1e-6)
    assert any(note.startswith(f"engine {engine}: ") for note in other.assumptions)
    same = bundle_for(replace(card, engine="vllm"))
    assert same.corrections == usual.corrections


def test_an_engine_without_tables_of_a_card_is_refused() -> None:
    with pytest.raises(BadInput, match=r"kernels of trtllm .*b200, h100-sxm, h200, got 'l40s'"):
        wattcast.predict("gpt2", "l40s", engine="trtllm")
    with pytest.raises(WattcastError, match="tgi"):
        wattcast.predict("gpt2", "h100-sxm", engine="tgi")


def test_cards_of_one_processor_share_energies_and_how_far_these_are_off() -> None:
    b200, gb200, b300 = (bundle_for(load_gpu(name)) for name in ("b200", "gb200", "b300"))
    for event, joules in as_module_power(b200.power).energy_j.items():
        assert as_module_power(gb200.power).energy_j[event] == pytest.approx(joules, rel=0.1)
        assert as_module_power(b300.power).energy_j[event] == pytest.approx(joules, rel=1e-6)
    assert gb200.residuals["gemm"].power == b200.residuals["gemm"].power
    low, high = b200.residuals["gemm"].power
    assert low < 0.85 < 1.1 < high
