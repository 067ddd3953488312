"""What single coefficients of forecasts and of an engine's host mean."""

from __future__ import annotations

import pytest

from wattcast.hardware import load_gpu
from wattcast.power.module_power import ModulePower
from wattcast.predictor.bundle import forecast_bundle, shipped_bundle
from wattcast.predictor.engine_host import LaunchCounts, load_host_times
from wattcast.workload.engine_schedule import EngineLaunches

A100 = load_gpu("a100-sxm-80gb")


def test_programs_that_are_the_same_take_half_more_on_half_of_the_lanes() -> None:
    """Half of the instructions are fp32 arithmetic, of which an A100's SM does 64 in a cycle."""
    parent = shipped_bundle("h200")
    assert parent is not None
    ratios = []
    for group, correction in forecast_bundle(A100).corrections.items():
        if group.startswith("softmax") and group in parent.corrections:
            parent_cycles = parent.corrections[group].serial_cycle
            if parent_cycles > 0.0:
                ratios.append(correction.serial_cycle / parent_cycles)
    assert ratios
    assert ratios == [pytest.approx(1.5, abs=0.1)] * len(ratios)


def test_loads_fit_between_the_arithmetic_of_an_sm_with_64_lanes() -> None:
    """fp32 products on CUDA cores take 1.2 times their arithmetic on an H200, whose 128 lanes take
    every slot of the schedulers, and next to none more on an A100.
    """
    parent = shipped_bundle("h200")
    assert parent is not None
    assert parent.corrections["gemm.simt"].compute > 1.15
    assert 1.0 <= forecast_bundle(A100).corrections["gemm.simt"].compute < 1.15


def test_a_serial_link_takes_some_five_picojoules_a_bit() -> None:
    power = forecast_bundle(A100).power
    assert isinstance(power, ModulePower)
    assert 4e-12 < power.energy_j["link_byte"] / 8 < 6.5e-12


def count_loose(launches: EngineLaunches) -> float:
    counts: LaunchCounts = load_host_times().count_launches(launches, by_openai=False)
    return counts.loose_layers


def test_latent_attention_launches_seven_tenths_of_a_layer_more() -> None:
    """It runs seven more calls outside the compiled graph, a tenth of a layer each."""
    more = count_loose(EngineLaunches(layers=10, latent=10)) - count_loose(EngineLaunches(10))
    assert more / 10 == pytest.approx(0.65, abs=0.1)


def test_a_shared_expert_launches_four_to_seven_tenths_of_a_layer_more() -> None:
    """It runs four to seven calls outside the compiled graph, a tenth of a layer each."""
    plain = EngineLaunches(layers=10, experts=10)
    shared = EngineLaunches(layers=10, experts=10, shared_expert=True)
    assert 0.4 < (count_loose(shared) - count_loose(plain)) / 10 < 0.66
