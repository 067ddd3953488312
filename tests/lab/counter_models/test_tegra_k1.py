"""The published Tegra K1 model: Tables 1, 3 and 4 and section 6.3 of Stokke et al. (MMSys 2016),
errata stated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.hardware import OperatingPoint
from wattcast.power import power_model
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.hybrid_rail import HybridRail

LOW_V, HIGH_V, MEMORY_V = 0.79, 1.05, 1.35  # Table 3; the last is not printed (erratum)
TOP = OperatingPoint(clock_hz=852e6, memory_clock_hz=924e6)


@pytest.fixture(scope="module")
def model() -> HybridRail:
    return power_model.load_saved_model(Path("Tegra K1")).model


def one_second(model: HybridRail, at: OperatingPoint = TOP, **events: float) -> dict[str, float]:
    """Watts by part of one second with these counts."""
    value = np.array([[events.get(name, 0.0) for name in model.required_events]])
    power = model.power(
        Activity(np.ones(1), value, model.required_events, at, ActivitySource.PROFILED)
    )
    return dict(zip(power.parts, power.part_w[0].tolist(), strict=True))


@pytest.mark.parametrize(
    ("event", "clock_hz", "printed_nj"),
    [
        ("device_memory_cycle", 852e6, 3.96),
        ("l2_read_sector", 72e6, 6.73),
        ("l2_read_sector", 852e6, 11.89),
        ("l1_read_word", 72e6, 5.55),
        ("l1_read_word", 852e6, 9.81),
    ],
)
def test_table_4_energy_per_transaction(
    model: HybridRail, event: str, clock_hz: float, printed_nj: float
) -> None:
    """To half a unit of the last printed digit, and one more: the paper truncates as often as it
    rounds.
    """
    at = OperatingPoint(clock_hz=clock_hz, memory_clock_hz=924e6)
    assert_allclose(one_second(model, at, **{event: 1e9})[event], printed_nj, atol=0.0101)


@pytest.mark.parametrize(
    ("event", "clock_hz", "byte", "printed_nj"),
    [
        ("device_memory_cycle", 852e6, 8, 0.49),
        ("l2_read_sector", 72e6, 16, 0.42),
        ("l2_read_sector", 852e6, 16, 0.74),
        ("l1_read_word", 72e6, 4, 1.38),
        ("l1_read_word", 852e6, 4, 2.45),
    ],
)
def test_table_4_energy_per_byte(
    model: HybridRail, event: str, clock_hz: float, byte: int, printed_nj: float
) -> None:
    """Erratum: the L2 rows divide by 16 bytes though Table 1 counts 32, so half the printed energy
    is true.
    """
    at = OperatingPoint(clock_hz=clock_hz, memory_clock_hz=924e6)
    assert_allclose(one_second(model, at, **{event: 1e9})[event] / byte, printed_nj, atol=0.0101)
    if event == "l2_read_sector":
        true_nj = one_second(model, at, **{event: 1e9})[event] / 32
        assert_allclose(true_nj, printed_nj / 2, atol=0.006)


def test_section_6_3_clock_watts(model: HybridRail) -> None:
    parts = one_second(model, host_active_cycle=1092e6)
    assert_allclose(parts["gpu clock"], 1.97, atol=0.005)
    assert_allclose(parts["memory clock"], 0.43, atol=0.01)
    assert_allclose(parts["host_active_cycle"], 0.20, atol=0.005)


def test_section_6_3_leakage_watts(model: HybridRail) -> None:
    """0.27 A and 0.79 A (section 6.3) at the voltages of Table 3."""
    top, bottom = (
        one_second(model),
        one_second(model, OperatingPoint(clock_hz=72e6, memory_clock_hz=924e6)),
    )
    assert_allclose(top["gpu leakage"], 0.27 * HIGH_V, rtol=1e-12)
    assert_allclose(bottom["gpu leakage"], 0.27 * LOW_V, rtol=1e-12)
    assert_allclose(top["core leakage"], 0.79 * HIGH_V, rtol=1e-12)


def test_offsets_hold_at_their_clocks_alone(model: HybridRail) -> None:
    def clock_w(memory_hz: float) -> float:
        return one_second(model, OperatingPoint(clock_hz=852e6, memory_clock_hz=memory_hz))[
            "memory clock"
        ]

    line = 258.66e-12 * MEMORY_V**2
    assert_allclose(clock_w(204e6), line * 204e6 - 0.03, rtol=1e-12)
    assert_allclose(clock_w(300e6), line * 300e6 + 0.05, rtol=1e-12)
    assert_allclose(clock_w(396e6), line * 396e6, rtol=1e-12)


def test_instructions_per_cycle_are_a_mean_not_a_rate(model: HybridRail) -> None:
    """Eq. 7: the same instructions per cycle cost the same power however long the interval."""
    value = np.array(
        [[1.5 if n == "host_instruction_per_cycle" else 0.0 for n in model.required_events]] * 2
    )
    activity = Activity(
        np.array([1.0, 7.0]), value, model.required_events, TOP, ActivitySource.PROFILED
    )
    assert_allclose(
        model.power(activity).part_power_w("host_instruction_per_cycle"),
        3.72e-3 * 1.5 * HIGH_V**2,
        rtol=1e-12,
    )


def test_fp64_costs_three_times_fp32(model: HybridRail) -> None:
    """Section 6.4: 64-bit operations consume above three times as much as 32-bit ones."""
    parts = one_second(model, fp64_instruction=1e9, fp32_instruction=1e9)
    assert 3.0 < parts["fp64_instruction"] / parts["fp32_instruction"] < 3.1


def test_the_preset_states_its_source_and_errata() -> None:
    tegra = power_model.load_saved_model(Path("tk1"))
    assert len(tegra.notes) == 3
    assert "16 bytes" in tegra.notes[0]
    assert "Tables 1 and 3" in tegra.provenance.source
