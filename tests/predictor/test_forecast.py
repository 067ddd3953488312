"""Forecasts of GPUs nobody measured: what is carried over, and that it follows the specification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.testing import assert_allclose

import wattcast
from wattcast import hardware
from wattcast.core.errors import BadInput
from wattcast.core.units import Dtype
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.kernels import LibraryStyle, build_kernels
from wattcast.kernels.kernel_table import USUAL_CONDITION
from wattcast.power.module_power import ModulePower, as_module_power
from wattcast.predictor.bundle import bundle_file as bundles
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import shipped_bundle
from wattcast.predictor.bundle.forecast import (
    FORECAST,
    forecast_bundle,
    forecast_rule,
    module_factors,
)
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.engine_operators import WeightOnlyProduct
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Bmm, Conv2d, Elementwise, LayerNorm, Linear

WORK = Graph.from_operators(
    "mix", [Linear(4096, 4096, 4096), LayerNorm(4096, 4096), Elementwise("add", 1 << 26)]
)
TOP = OperatingPoint(power_limit_w=1e6)


def test_a_chip_like_the_parent_is_predicted_like_the_parent() -> None:
    """Nothing is lost on the way: the H200 itself, under another name, comes out as its fitted
    bundle says.

    But for the host, whose cost a forecast spreads over operators by their kind.
    """
    parent, own = load_gpu("h200"), shipped_bundle("h200")
    twin = replace(parent, name="twin")
    carried = replace(forecast_bundle(twin), launch=own.launch)
    one, two = predict_graph(WORK, parent, TOP, own), predict_graph(WORK, twin, TOP, carried)
    assert_allclose(two.latency_s, one.latency_s, rtol=0.05)
    assert_allclose(two.power_w, one.power_w, rtol=0.10)
    assert two.status == "forecast"
    assert not two.support.inside


def test_the_same_processor_with_slower_memory_is_never_faster() -> None:
    """An early rule gave an H100 316 ms where the H200, the same processor, takes 234."""
    options = {"batch": 8, "seq": 1024, "stack": "eager"}
    h200, h100 = (wattcast.predict("llama3-8b", gpu, **options) for gpu in ("h200", "h100-sxm"))
    assert 1.0 <= h100.latency_s / h200.latency_s < 1.12
    stream = Graph.from_operators("stream", [Elementwise("add", 1 << 28)])
    one, two = (
        predict_graph(stream, load_gpu(g), TOP, bundle_for(load_gpu(g)))
        for g in ("h200", "h100-sxm")
    )
    assert_allclose(two.latency_s / one.latency_s, 4800 / 3352, rtol=0.05)


def test_kernel_style_and_clock_law_follow_the_architecture() -> None:
    assert forecast_bundle(load_gpu("h100-sxm")).clock_law is not None
    assert forecast_bundle(load_gpu("h100-sxm")).reference.style is LibraryStyle.HOPPER
    for name in ("a100-sxm-80gb", "l40s", "v100-sxm"):
        bundle = forecast_bundle(load_gpu(name))
        assert bundle.clock_law is not None
        assert not bundle.clock_law.in_bursts
        assert bundle.reference.style is LibraryStyle.AMPERE
        assert set(bundle.learned.time) <= set(forecast_rule().same_programs)
    assert forecast_bundle(load_gpu("b200")).clock_law is None


def test_products_with_narrow_weights_stay_below_the_peak_of_a_chip() -> None:
    """The H200's λ of 0.16, where arithmetic bounds none, once forecast them at twice the peak of
    an A100.
    """
    gpu = load_gpu("a100-sxm-80gb")
    op = WeightOnlyProduct(8192, 8192, 8192, "int8", -1, kernel="cutlass", dtype=Dtype.BF16)
    found = predict_graph(Graph.from_operators("x", [op]), gpu, TOP, forecast_bundle(gpu))
    assert 0.5 * 312e12 < op.flop / found.latency_s < 312e12


@pytest.mark.parametrize(("gpu", "peak"), [("a100-sxm-80gb", 0.5), ("a10", 0.25)])
def test_unaligned_products_take_the_cycles_of_the_same_programs_on_the_parent(
    gpu: str, peak: float
) -> None:
    """The H200 runs them in kernels of Ampere and Turing, which loads hold up, whatever the tensor
    cores could do.
    """
    parent, found = (shipped_bundle("h200"), forecast_bundle(load_gpu(gpu)))
    assert parent is not None
    for group in ("gemm.turing", "gemm.wmma", "gemm.ampere.wide"):
        assert found.corrections[group].compute == pytest.approx(
            max(peak * parent.corrections[group].compute, parent.corrections["gemm.tensor"].compute)
        )
    ops = [Conv2d(64, 256, 1024, side, side, 1, 1) for side in (16, 14)] + [Bmm(256, 197, 197, 64)]
    work = build_kernels(ops, (USUAL_CONDITION,) * 3, load_gpu(gpu), found.reference, ()).work
    assert list(work.kernel_family) == ["gemm.tensor", "gemm.ampere", "gemm.turing"]


def test_what_energy_was_learned_holds_for_other_chips_too() -> None:
    """Without, 28 rows of a B200 were 35 % off in watts, with 25 %. Times of products are another
    library's.
    """
    learned = forecast_bundle(load_gpu("b200")).learned
    assert learned is not None
    assert {"gemm", "conv2d", "attention"} <= set(learned.energy)
    assert "gemm" not in learned.time


def test_experts_on_an_a100_wait_for_its_l2() -> None:
    """Its L2 gives less of the rate that is stated for it to cp.async than the H200's."""
    a100, h200 = (
        forecast_bundle(load_gpu(name)).corrections for name in ("a100-sxm-80gb", "h100-sxm")
    )
    assert a100["gemm.engine.experts.half"].l2 == pytest.approx(
        h200["gemm.engine.experts.half"].l2 / 0.81
    )


def test_every_catalogue_process_and_memory_has_a_factor_with_a_source() -> None:
    for name in hardware.gpu_names():
        gpu = load_gpu(name)
        assert forecast_rule().process(gpu).source
        factors = module_factors(gpu, forecast_rule())
        assert all(np.isfinite(f) and f > 0 for f in factors.values())
    assert all(kind.source for kind in forecast_rule().memory.values())


def test_older_processes_cost_more_and_logic_shrinks_most() -> None:
    new, old, older = (
        module_factors(load_gpu(n), forecast_rule())
        for n in ("h100-sxm", "a100-sxm-80gb", "v100-sxm")
    )
    for module in ("tensor", "cuda", "shared", "l2"):
        assert new[module] < old[module] < older[module]
    assert old["l2"] < old["shared"] < old["cuda"]


def test_a_higher_published_voltage_costs_its_square() -> None:
    pcie, sxm = (
        module_factors(load_gpu(n), forecast_rule()) for n in ("a100-pcie-40gb", "a100-sxm-80gb")
    )
    assert_allclose(sxm["cuda"] / pcie["cuda"], (918.75 / 893.75) ** 2, rtol=1e-9)


def test_gddr_costs_more_per_byte_than_hbm() -> None:
    def per_byte(name: str) -> float:
        return forecast_bundle(load_gpu(name)).power.energy_j["dram_read_byte"]

    assert per_byte("h100-sxm") < per_byte("l40s")
    assert per_byte("a100-sxm-80gb") < per_byte("a40")


def test_part_of_a_memory_byte_follows_the_core_voltage() -> None:
    power = forecast_bundle(load_gpu("a100-pcie-40gb")).power
    assert isinstance(power, ModulePower)
    assert 0.3 < power.memory_on_core < 0.8
    assert (
        shipped_bundle("h200").power.memory_on_core == 0.0
        or shipped_bundle("h200").power.memory_on_core <= 1.0
    )


def test_published_curves_are_used_and_inherited_ones_say_so() -> None:
    a100 = load_gpu("a100-pcie-40gb")
    bundle = forecast_bundle(a100)
    assert_allclose(
        bundle.power.idle.power_at(900e6, bundle.power.idle.reference_c), 47.35, rtol=1e-6
    )
    assert_allclose(bundle.power.voltage.level_at(900e6), 693.75 / 893.75, rtol=1e-9)
    assert not any("V(f)" in note or "idle power of" in note for note in bundle.assumptions)
    l40s = forecast_bundle(load_gpu("l40s"))
    assert any("V(f)" in note for note in l40s.assumptions)
    assert any("idle power of" in note for note in l40s.assumptions)


def test_a_missing_field_is_named_with_what_it_costs() -> None:
    notes = " ".join(forecast_bundle(load_gpu("a40")).assumptions)
    assert "l2.byte_per_cycle is unknown" in notes
    assert "taken as 40 bytes a cycle" in notes


def test_an_unknown_process_or_memory_is_refused_by_name(tmp_path: Path) -> None:
    text = (Path(hardware.__file__).parent / "catalogue" / "l40s.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("process: {value: TSMC 4N", "process: {value: Moon 1 nm"))
    with pytest.raises(BadInput, match=r"mine: process.*Moon 1 nm"):
        wattcast.predict("gpt2", path)
    path.write_text(text.replace("kind: {value: GDDR6", "kind: {value: FRAM"))
    with pytest.raises(BadInput, match=r"memory\.kind.*FRAM"):
        wattcast.predict("gpt2", path)


def test_any_clock_and_limit_on_a_forecast_card() -> None:
    gpu = load_gpu("l40s")
    clocks = np.linspace(0.3, 1.0, 8) * gpu.clocks.max_hz
    p = predict_graph(
        WORK, gpu, OperatingPoint(clock_hz=clocks[:, None], power_limit_w=1e6), forecast_bundle(gpu)
    )
    assert (np.diff(p.latency_s) <= 1e-15).all()
    assert (np.diff(p.power_w) > 0).all()
    limits = np.array([150.0, 200.0, 250.0, 300.0])
    q = predict_graph(
        WORK, gpu, OperatingPoint(power_limit_w=limits[:, None]), forecast_bundle(gpu)
    )
    assert (q.power_w <= limits * 1.001).all()
    assert (np.diff(q.latency_s) <= 0).all()


def test_a_forecast_survives_being_written_and_read(tmp_path: Path) -> None:
    gpu = load_gpu("a100-pcie-40gb")
    bundles.write_bundle(forecast_bundle(gpu), tmp_path / "bundle.json")
    back = bundles.read_bundle(tmp_path)
    one, two = (predict_graph(WORK, gpu, TOP, b) for b in (forecast_bundle(gpu), back))
    assert_allclose(two.latency_s, one.latency_s, rtol=1e-5)
    assert_allclose(two.power_w, one.power_w, rtol=1e-5)
    assert yaml.safe_load((tmp_path / "bundle.json").read_text())["learned_on"]["sm_count"] == 132


def test_old_style_products_load_more_from_shared_memory_and_have_no_slim_tiles() -> None:
    from wattcast.kernels import build_kernels

    a100 = load_gpu("a100-pcie-40gb")
    mine = forecast_bundle(a100).reference
    ops = (Linear(16, 4096, 4096), Linear(4096, 4096, 4096))
    tiles = {
        style: build_kernels(ops, [wattcast_usual()] * 2, a100, replace(mine, style=style), ())
        for style in LibraryStyle
    }
    assert tiles[LibraryStyle.AMPERE].work.features["tile_m"].min() >= 32
    assert tiles[LibraryStyle.HOPPER].work.features["tile_m"].min() < 32


def wattcast_usual():
    from wattcast.kernels.kernel_table import USUAL_CONDITION

    return USUAL_CONDITION


def test_an_sm_of_an_a100_is_three_quarters_of_an_h100s() -> None:
    """Transistors per SM are 54.2e9/128 on GA100 and 80e9/144 on GH100 (NVIDIA's whitepapers)."""
    rule = forecast_rule()
    gpu = load_gpu("a100-sxm-80gb")
    factor = module_factors(gpu, rule)
    of_process = rule.process(gpu).logic ** rule.classes["sm"]
    voltage_square = factor["cuda"] / rule.process(gpu).logic ** rule.classes["cuda"]
    transistors = (54.2e9 / 128) / (80e9 / 144)
    assert factor["sm"] / of_process / voltage_square == pytest.approx(transistors, rel=0.05)


def test_the_rail_of_memory_takes_what_was_read_from_its_sensor() -> None:
    """The memory's rail of an H200 takes 23 to 34 W per TB/s by family of kernels, and HBM3e on an
    H200 costs no more on chip and rail than its bundle says.
    """
    rail_w_per_tb_s = 1e12 * FORECAST.memory_rail_j_per_byte
    assert 23.0 < rail_w_per_tb_s < 34.0
    bundle = shipped_bundle("h200")
    assert bundle is not None
    energy_j = as_module_power(bundle.power).energy_j
    assert FORECAST.memory_rail_j_per_byte < energy_j["dram_read_byte"]
