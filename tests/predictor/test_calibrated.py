"""Calibrations that ship: small, on top of the forecast, and lent to cards of the same processor."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle import bundle_for, forecast_bundle
from wattcast.predictor.learned_factors import CarriedFactors, LayeredFactors

SHIPPED = ("a100-sxm-80gb", "b200", "l40s")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_calibration_changes_times_and_leaves_the_rest_to_the_forecast(name: str) -> None:
    gpu = load_gpu(name)
    bundle, forecast = bundle_for(gpu), forecast_bundle(gpu)
    assert bundle.status == "calibrated"
    assert "held out" in bundle.provenance.note
    kept, theirs = bundle.power.to_plain(), forecast.power.to_plain()
    assert {k: v for k, v in kept.items() if k != "energy_j"} == {
        k: v for k, v in theirs.items() if k != "energy_j"
    }
    assert bundle.corrections["softmax"] == forecast.corrections["softmax"]
    assert bundle.corrections["gemm.engine.experts.half"] != forecast.corrections.get(
        "gemm.engine.experts.half"
    )
    assert isinstance(bundle.learned, LayeredFactors)
    assert bundle.learned.carried is forecast.learned
    assert bundle_for(gpu) is bundle  # kept with what it learned of workloads


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_calibration_is_small_and_holds_no_table(name: str) -> None:
    folder = files("wattcast.predictor.bundle").joinpath(name)
    assert {path.name for path in folder.iterdir()} == {"calibration.yaml", "arrays.npz"}
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
    l40s, rtx = (bundle_for(load_gpu(name)) for name in ("l40s", "rtx-4090"))
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
