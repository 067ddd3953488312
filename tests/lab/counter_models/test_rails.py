"""Rails, voltages with floors, anchoring, and what the models refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_tables import activity_of, anchored_w, made_table, truth
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput, UnknownName
from wattcast.hardware import OperatingPoint
from wattcast.power.activity import Activity, ActivitySource
from wattcast.power.hybrid_rail import EventRail, HybridRail, RailClock, RailVoltage
from wattcast.power.rate_power import RatePower
from wattcast.power.switched_capacitance import SwitchedCapacitance

CLOCKS = np.array([1e9, 2e9])


def test_a_floor_holds_the_voltage_up() -> None:
    voltage = RailVoltage(CLOCKS, np.array([0.8, 1.0]), np.array([1e9, 3e9]), np.array([0.8, 0.95]))
    assert_allclose(
        voltage.level_at(np.array([1e9, 1e9, 2e9, 1.5e9]), np.array([1e9, 3e9, 3e9, 1e9])),
        [0.8, 0.95, 1.0, 0.9],
    )


def test_a_floor_needs_both_clocks() -> None:
    voltage = RailVoltage(CLOCKS, np.array([0.8, 1.0]), np.array([1e9]), np.array([0.9]))
    with pytest.raises(BadInput, match="both clocks"):
        voltage.level_at(1e9)


@pytest.mark.parametrize("level", [[1.0, 0.9], [0.0, 1.0], [1.0]])
def test_voltages_that_fall_or_vanish_are_refused(level: list[float]) -> None:
    with pytest.raises(BadInput, match="voltage"):
        RailVoltage(CLOCKS, np.array(level))


def test_a_fixed_rail_has_no_clock_power() -> None:
    with pytest.raises(BadInput, match="rail host"):
        EventRail("host", RailClock.FIXED, clock_f=1e-9)


def test_events_and_coefficients_are_checked() -> None:
    rail = EventRail("core", RailClock.CORE)
    with pytest.raises(UnknownName, match="int_busy_cycle"):
        replace(rail, event_f={"int_busy_cycles": 1.0})
    with pytest.raises(BadInput, match="finite"):
        replace(rail, event_f={"int_busy_cycle": float("nan")})
    with pytest.raises(BadInput, match="finite watts awake"):
        replace(rail, event_f={"int_busy_cycle": 1.0}, awake_w=1.0, awake_per_s=0.0)
    with pytest.raises(BadInput, match="once"):
        HybridRail(0.0, (replace(rail, event_f={}), replace(rail, event_f={})))
    with pytest.raises(BadInput, match="mean"):
        replace(rail, alpha="int_busy_cycle", full_f=1.0)
    with pytest.raises(BadInput, match="finite"):
        RatePower(float("inf"), {})


def test_a_missing_clock_is_named() -> None:
    model = RatePower(1.0, {}, clock_j=1e-9)
    still = Activity(np.ones(1), np.zeros((1, 0)), (), OperatingPoint(), ActivitySource.PROFILED)
    with pytest.raises(BadInput, match="clock_hz"):
        model.power(still)


def test_alpha_c_follows_equation_3() -> None:
    voltage = RailVoltage(CLOCKS, np.array([0.8, 1.0]))
    work = {"alpha": "core_busy_share", "full_f": 5e-9}
    rail = EventRail("core", RailClock.CORE, voltage, leakage_a=3.0, clock_f=2e-9, **work)
    at = OperatingPoint(clock_hz=1e9)
    activity = Activity(
        np.ones(1), np.array([[0.5]]), ("core_busy_share",), at, ActivitySource.PROFILED
    )
    power = SwitchedCapacitance(7.0, (rail,)).power(activity)
    assert_allclose(power.part_w[0], [7.0, 3.0 * 0.8, 2e-9 * 0.64 * 1e9, 0.5 * 5e-9 * 0.64 * 1e9])


def test_anchoring_gives_back_the_anchor_and_scales_with_switching() -> None:
    model, table = truth(), made_table()
    activity = activity_of(table)
    row = 40
    at = OperatingPoint(
        float(table.clock_hz[row]), memory_clock_hz=float(table.memory_clock_hz[row])
    )
    reference = Activity(
        np.ones(1), activity.value[row], activity.events, at, ActivitySource.PROFILED
    )
    plain = model.power(reference).total_w
    assert_allclose(anchored_w(model, reference, reference, plain + 9.0), plain + 9.0)
    faster = OperatingPoint(1.1e9, memory_clock_hz=float(table.memory_clock_hz[row]))
    again = Activity(
        np.ones(1), activity.value[row], activity.events, faster, ActivitySource.PROFILED
    )
    square = (model.rails[0].volt(faster) / model.rails[0].volt(at)) ** 2
    assert_allclose(
        anchored_w(model, again, reference, plain + 9.0), model.power(again).total_w + 9.0 * square
    )
