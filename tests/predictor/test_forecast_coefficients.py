"""What single coefficients of forecasts and of an engine's host mean."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import wattcast
from wattcast.hardware import load_gpu
from wattcast.kernels import reference_chip
from wattcast.power.module_power import ModulePower
from wattcast.predictor.bundle import calibrated, forecast_bundle, shipped_bundle
from wattcast.predictor.bundle.bundle_file import (
    FitStatus,
    bundle_to_plain,
    plain_to_bundle,
)
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


@pytest.mark.parametrize("name", ["v100-sxm", "a100-sxm-80gb", "rtx-a6000"])
@pytest.mark.parametrize("group", ["elementwise.batchnorm.train", "elementwise.batchnorm.backward"])
def test_a_load_takes_as_many_seconds_on_every_card(name: str, group: str) -> None:
    """Statistics of batch norm walk over a channel one load after another. Counted as instructions,
    half of which take longer on 64 fp32 lanes, they took a V100 twice as long.
    """
    parent = shipped_bundle("h200")
    assert parent is not None
    gpu = load_gpu(name)
    parent_s = parent.corrections[group].serial_cycle / load_gpu("h200").clocks.max_hz
    carried_s = forecast_bundle(gpu).corrections[group].serial_cycle / gpu.clocks.max_hz
    assert carried_s == pytest.approx(parent_s, rel=1e-9)


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


def test_an_unpublished_l2_gives_an_sm_what_those_of_its_kin_give() -> None:
    """NVIDIA publishes 5,120 bytes a cycle for 132 SMs of an H200 and for 108 of an A100."""
    of_an_sm = []
    for name in ("h200", "a100-sxm-80gb"):
        gpu = load_gpu(name)
        assert gpu.l2.byte_per_cycle is not None
        of_an_sm.append(float(np.mean(gpu.l2.byte_per_cycle)) / float(np.mean(gpu.sm_count)))
    b200 = load_gpu("b200")
    assert b200.l2.byte_per_cycle is None
    chip = reference_chip(b200)
    assert of_an_sm[0] < chip.l2_byte_per_cycle / chip.sm_count < of_an_sm[1]


def test_an_l2_over_gddr_gives_what_was_measured_on_another_card_of_the_chip() -> None:
    """None is published for an RTX 5090. An RTX PRO 6000 has its chip and its memory."""
    gpu = load_gpu("rtx-5090")
    assert gpu.l2.byte_per_cycle is None
    chip = reference_chip(gpu)
    measured = load_gpu("rtx-pro-6000")
    measured_over_memory = (
        measured.l2.byte_per_cycle * measured.clocks.max_hz / measured.memory.byte_per_s
    )
    taken_over_memory = chip.l2_byte_per_cycle / chip.dram_byte_per_cycle
    assert taken_over_memory == pytest.approx(measured_over_memory, rel=0.1)


@pytest.mark.parametrize(("sms", "is_alike"), [(132, True), (123, True), (115, False)])
def test_chips_of_one_processor_have_the_same_energies_if_a_tenth_of_their_sms_differ(
    sms: int, is_alike: bool
) -> None:
    """An H100 PCIe, with 114 of 132 SMs, is another chip in power than an H100 SXM."""
    chip = load_gpu("h200")
    bundle = forecast_bundle(chip)
    energies = bundle.power.scale_energy({"sm": 2.0})
    plain = bundle_to_plain(replace(bundle, power=energies, learned=None))
    calibration = cast(Any, SimpleNamespace(plain={"power": plain["power"], "residuals": {}}))
    carried = calibrated._carry_power(bundle, replace(chip, sm_count=float(sms)), calibration, chip)
    assert (carried is not bundle) is is_alike


def test_the_sms_of_an_a40_that_wait_for_memory_draw_less_than_busy_ones() -> None:
    """An A40 draws 206 W as it streams; with SMs as busy as an H200's it would draw 270 W."""
    stream = {"name": "stream", "ops": [{"op": "add", "n": 2**28}]}
    prediction = wattcast.predict(stream, "a40", host_launch=0.0)
    assert prediction.basis.bundle.status is FitStatus.FORECAST
    assert 206.0 < prediction.power_w < 206.0 + 35.0


PREFILL = "attention.engine.paged.prefill"


def test_scores_of_flash_attention_2_take_an_a100_as_long_as_half_of_its_products() -> None:
    """For a score of heads of 128 values an SM multiplies for a quarter of a cycle; its exponential
    takes a sixteenth, and 4.5 instructions on 64 lanes a little more.
    """
    parent = shipped_bundle("h200")
    assert parent is not None
    product_cycles = 4 * 128 / 2048
    counted_cycles = product_cycles + 0.045  # as the work of FlashAttention 3 counts them
    cycles = forecast_bundle(A100).corrections[PREFILL].compute * counted_cycles
    score_cycles = cycles - parent.corrections[PREFILL].compute * product_cycles
    assert 0.5 < score_cycles / product_cycles < 0.6
    # twice the lanes, half of the tensor cores' rate
    l40s = forecast_bundle(load_gpu("l40s")).corrections[PREFILL].compute
    assert parent.corrections[PREFILL].compute < l40s < 1.2
    # other makers' programs stay as they were
    mi300x = forecast_bundle(load_gpu("mi300x")).corrections[PREFILL].compute
    assert mi300x == parent.corrections[PREFILL].compute


def test_a_tile_of_256_queries_loads_keys_once_on_blackwell() -> None:
    parent = shipped_bundle("h200")
    assert parent is not None
    b200 = forecast_bundle(load_gpu("b200")).corrections
    assert b200[PREFILL].l2 == pytest.approx(0.5 * parent.corrections[PREFILL].l2)
    decode = PREFILL.replace("prefill", "decode")
    assert b200[decode].l2 == parent.corrections[decode].l2


def test_a_rate_of_l2_that_was_reached_loses_nothing_again() -> None:
    """An RTX PRO 6000's was measured; that taken for an A10, for which none is published, is what
    measured products need. An L40S's is stated, and nearly all of it is reached."""
    parent = shipped_bundle("h200")
    assert parent is not None
    stated = parent.corrections[PREFILL].l2
    for name, share in (("rtx-pro-6000", 1.86 / 2.0), ("a10", 1.86 / 2.0), ("l40s", 1.86 / 1.9)):
        found = forecast_bundle(load_gpu(name)).corrections[PREFILL].l2
        assert found == pytest.approx(stated * share, rel=0.01), name


def test_an_sm_of_blackwell_gets_a_tenth_more_from_l2_than_is_taken_for_others() -> None:
    """44.2 bytes a cycle were measured, 40 are taken where nothing is known."""
    parent = shipped_bundle("h200")
    assert parent is not None
    b300 = forecast_bundle(load_gpu("b300")).corrections["gemm.tensor"].l2
    assert parent.corrections["gemm.tensor"].l2 / b300 == pytest.approx(44.2 / 40.0)


def test_a_lone_sm_reads_as_many_bytes_a_second_on_every_chip() -> None:
    """Its bytes in flight and the latency of memory are alike; the share it would get is not."""
    h200 = load_gpu("h200")
    rates = []
    for name in ("a100-sxm-80gb", "l40s", "b200", "h100-sxm"):
        chip = load_gpu(name)
        share = forecast_bundle(chip).reference.lone_sm_share
        rates.append(share * chip.memory.byte_per_s / chip.sm_count)
    assert rates == pytest.approx([2.0 * h200.memory.byte_per_s / h200.sm_count] * 4)
    l40s = load_gpu("l40s")
    alike = replace(
        forecast_bundle(l40s),
        reference=replace(forecast_bundle(l40s).reference, lone_sm_share=0.0),
    )
    asked: dict[str, Any] = {"gpu": l40s, "phase": "decode", "batch": 1, "seq": 16384}
    fast = wattcast.predict("llama2-7b", bundle=forecast_bundle(l40s), force=True, **asked)
    slow = wattcast.predict("llama2-7b", bundle=alike, force=True, **asked)
    assert fast.latency_s < slow.latency_s


def test_calibrations_stand_on_lone_sms_as_their_fits_had_them() -> None:
    l40s = load_gpu("l40s")
    calibration = calibrated.calibrated_bundle(l40s)
    assert calibration is not None
    assert calibration.reference.lone_sm_share == 0.0
    assert calibrated.calibration_base(l40s).reference.lone_sm_share == 0.0
    forecast = forecast_bundle(l40s)
    read = plain_to_bundle(bundle_to_plain(replace(forecast, learned=None)), "test")
    assert read.reference.lone_sm_share == forecast.reference.lone_sm_share
