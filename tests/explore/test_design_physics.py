"""Area, idle power and energies follow the sizes of a design."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.core.arrays import sweep_values
from wattcast.explore import explorations
from wattcast.explore.design_coefficients import DESIGNS
from wattcast.explore.design_physics import (
    design_energies,
    memory_kinds,
    read_axes,
    relative_area,
    sms_at_equal_area,
)
from wattcast.explore.study import evaluate_points
from wattcast.hardware import load_gpu
from wattcast.predictor.bundle.forecast import forecast_rule

H200 = load_gpu("h200")


def test_area_follows_three_dies_of_one_process() -> None:
    """SMs, bits of memory with their L2, and area of AD102, AD103 and AD104 (NVIDIA Ada whitepaper)
    give an SM and a bit; what they say of AD102 is what a die is taken to be made of.
    """
    dies = np.array([[144, 384, 1], [80, 256, 1], [60, 192, 1]], dtype=np.float64)
    sm_mm2, bit_mm2, _ = np.linalg.solve(dies, [608.5, 378.6, 294.5])
    assert 144 * sm_mm2 / 608.5 == pytest.approx(DESIGNS.sm_area_share, abs=0.05)
    memory_and_l2 = DESIGNS.memory_area_share + DESIGNS.l2_area_share
    assert 384 * bit_mm2 / 608.5 == pytest.approx(memory_and_l2, abs=0.05)
    # 96 MB of cells of 0.021 um2, of which half of an array consists
    l2_mm2 = 96e6 * 8 * 0.021e-6 / 0.5
    assert l2_mm2 / 608.5 == pytest.approx(DESIGNS.l2_area_share, abs=0.02)
    twice = relative_area(H200, {"sm_count": np.array([264.0])})
    assert twice[0] == pytest.approx(1.0 + DESIGNS.sm_area_share)


def test_a_wider_tensor_core_takes_area_and_leaks() -> None:
    wide = {"tensor_scale": np.array([1.0, 2.0])}
    area = relative_area(H200, wide)
    assert area[1] - area[0] == pytest.approx(DESIGNS.sm_area_share * DESIGNS.tensor_of_sm)
    static = sweep_values(design_energies(H200, wide).static)
    assert static[0] == pytest.approx(1.0)
    grown = DESIGNS.static_chip_share * DESIGNS.sm_area_share * DESIGNS.tensor_of_sm
    assert static[1] == pytest.approx(1.0 + grown)


def test_an_sm_without_its_units_keeps_schedulers_and_wires() -> None:
    """Tensor cores, lanes, registers and shared memory are most of an SM, but not all of it."""
    nothing = np.array([0.0])
    bare = {
        "tensor_scale": nothing,
        "pipes.cuda_flop_per_cycle.fp32": nothing,
        "sm.register_count": nothing,
        "sm.shared_byte": nothing,
    }
    missing = 1.0 - float(relative_area(H200, bare)[0])
    of_an_sm = 1.0 - missing / DESIGNS.sm_area_share
    assert 0.05 < of_an_sm < 0.4


def test_a_chip_without_voltage_leaves_the_idle_power_of_its_board() -> None:
    """Of 83 W the memory has 39; regulators, fans and the link to the host draw some of the rest."""
    off = {"memory.byte_per_s": np.array([0.0]), "voltage_scale": np.array([0.0])}
    board_w = 83.0 * float(sweep_values(design_energies(H200, off).static)[0])
    assert 5.0 < board_w < 20.0


def test_idle_power_follows_area_and_memory() -> None:
    """Of 83 W idle at the lowest clock the memory sensor of an H200 showed 39."""
    assert pytest.approx(39.0 / 83.0, abs=0.005) == DESIGNS.static_memory_share
    columns = {"memory.byte_per_s": np.array([4.8e12, 9.6e12]), "voltage_scale": np.array([1, 1.1])}
    energies = design_energies(H200, columns)
    area = relative_area(H200, columns)
    board = 1.0 - DESIGNS.static_memory_share - DESIGNS.static_chip_share
    expected = board + 2.0 * DESIGNS.static_memory_share
    expected += DESIGNS.static_chip_share * area[1] * 1.1
    assert sweep_values(energies.static)[1] == pytest.approx(expected)
    assert sweep_values(energies.clock)[1] == pytest.approx(area[1] * 1.1**2)


def test_a_byte_of_l2_costs_more_on_a_larger_die() -> None:
    columns = {"l2.capacity_byte": np.array([62914560.0, 16 * 62914560.0])}
    factor = sweep_values(design_energies(H200, columns).core["l2"])
    area = relative_area(H200, columns)
    assert factor[0] == pytest.approx(1.0)
    drivers = forecast_rule().classes["l2"]
    assert factor[1] == pytest.approx(drivers + (1.0 - drivers) * area[1] ** 0.5)


def test_bytes_between_dies_cost_energy() -> None:
    """Half of the loads of L2 cross between two dies, at 0.5 pJ a bit."""
    study = explorations.build_study(
        "llama3-8b", "h200", ["dies=1,2"], batch=4, seq=512, clock="1200MHz"
    )
    found = evaluate_points(study, study.space.points(0, 2))
    from wattcast.kernels import lower_graph

    kernels = lower_graph(study.graph, study.gpu, study.bundle.reference)
    timeline_factor = found["energy_j"][1] - found["energy_j"][0]
    crossing_j = 0.5 * float(kernels.calls @ kernels.work.l2_byte)
    joule_per_bit = timeline_factor / crossing_j / 8.0
    # UCIe 1.0 states 0.25 to 0.5 pJ a bit for advanced packages.
    assert 0.25e-12 <= joule_per_bit <= 0.5e-12
    # learned factors on energy multiply the bytes of a kernel too
    assert joule_per_bit == pytest.approx(0.5e-12, rel=0.05)


def test_equal_area_gives_sms_for_l2() -> None:
    columns = {"l2.capacity_byte": np.array([62914560.0, 4 * 62914560.0])}
    sms = sms_at_equal_area(H200, columns)
    assert sms[0] == 132
    area = relative_area(H200, columns | {"sm_count": sms})
    assert np.all((area > 1.0 - 0.6 / 132) & (area <= 1.0 + 1e-9))
    study = explorations.build_study(
        "llama3-8b", "h200", ["l2=62914560B,240MiB"], batch=4, seq=512, hold="area"
    )
    found = evaluate_points(study, study.space.points(0, 2))
    assert found["sm_count"].tolist() == [132, sms[1]]


def test_equal_power_holds_what_the_base_draws() -> None:
    study = explorations.build_study(
        "gpt2", "h200", ["sm_count=132,200"], batch=64, seq=512, hold="power", clock="1500MHz"
    )
    found = evaluate_points(study, study.space.points(0, 2))
    assert found["power_w"][1] <= found["power_w"][0] * 1.001


def test_every_memory_kind_has_an_energy_and_a_source() -> None:
    assert "HBM4" in memory_kinds()
    assert all(len(rule.source) > 5 for rule in forecast_rule().memory.values())
    study = explorations.build_study(
        "llama3-8b", "h200", ["memory.kind=HBM4,HBM3e,GDDR7"], phase="decode", batch=8
    )
    energy_j = evaluate_points(study, study.space.points(0, 3))["energy_j"]
    assert energy_j[0] < energy_j[1] < energy_j[2]


def test_unknown_sizes_of_the_base_change_nothing() -> None:
    axes = read_axes(H200, {"sm_count": np.array([66.0])})
    assert axes.registers == axes.shared == axes.l2_port == 1.0
    assert axes.l2_byte is None


def test_a_higher_top_clock_needs_more_voltage() -> None:
    """Beyond its last point a voltage curve is flat, which once gave clocks for nothing."""
    study = explorations.build_study(
        "llama3-8b", "h200", ["clocks.max=1.98GHz,2.5GHz"], batch=4, seq=512, power_limit="100000W"
    )
    found = evaluate_points(study, study.space.points(0, 2))
    assert found["latency_s"][1] < found["latency_s"][0]
    assert found["energy_j"][1] > 1.1 * found["energy_j"][0]
