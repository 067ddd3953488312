"""What single coefficients of rehearsals mean."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from wattcast.control.first_run import _read_sample, plan_first_run
from wattcast.control.hall_rehearsal import RackSupply, plan_events
from wattcast.control.knob_forecast import forecast_knobs
from wattcast.control.planner_power import _round_rate
from wattcast.control.rehearsal_coefficients import REHEARSAL
from wattcast.core.errors import BadInput
from wattcast.hardware import load_gpu

LEVELS_HZ = tuple(1e6 * mhz for mhz in range(345, 1995, 15))


def test_a_minute_and_a_half_has_no_room_for_an_event_and_two_and_a_half_have() -> None:
    """Shares settle before an event and after it, in tens of seconds each."""
    racks = [RackSupply("a", 0, 32, 5e3, 12e3, 40e3), RackSupply("b", 0, 32, 5e3, 12e3, 40e3)]
    with pytest.raises(BadInput, match="of the span for each"):
        plan_events(["daemon"], np.full((2, 90), 1e4), racks)
    (event,) = plan_events(["daemon"], np.full((2, 150), 1e4), racks)
    # a third of the span before it and after it, give or take a twentieth
    assert 40 <= event.begin <= 55
    assert 95 <= event.end <= 110


def test_a_burst_is_what_rises_most_in_a_minute() -> None:
    """Neither 40 steep seconds nor 80 slower ones that rise further."""
    racks = [RackSupply("a", 0, 32, 5e3, 12e3, 40e3)]
    falls_w = np.linspace(1.0, 0.0, 240)
    parts = [np.zeros(300)]
    for seconds, rise_w in ((40, 24e3), (60, 30e3), (80, 36e3)):
        parts += [np.linspace(0.0, rise_w, seconds), rise_w * falls_w]
    demand_w = 10e3 + np.concatenate([*parts, np.zeros(300)])
    (event,) = plan_events(["cap"], demand_w[np.newaxis], racks)
    assert 300 + 40 + 240 + 20 <= event.begin <= 300 + 40 + 240 + 40


def test_a_first_run_locks_a_clock_that_slows_by_less_than_a_seventh() -> None:
    lock_hz = plan_first_run(LEVELS_HZ, 120.0).lock_hz
    assert 1.07 < LEVELS_HZ[-1] / lock_hz < 7 / 6


@pytest.mark.parametrize(("seconds", "step_share"), [(600.0, 1 / 250), (14.0, 1 / 28)])
def test_blocks_are_long_enough_for_a_counter_that_steps_every_100_ms(
    seconds: float, step_share: float
) -> None:
    """A run of fourteen seconds has both kinds of block twice, one of ten minutes ten times."""
    plan = plan_first_run(LEVELS_HZ, seconds)
    assert 0.1 / plan.block_s <= step_share
    assert len(plan.blocks) >= (20 if seconds > 120 else 4)
    with pytest.raises(BadInput, match="first run"):
        plan_first_run(LEVELS_HZ, 10.0)


def test_two_rates_a_seventh_apart_are_two_answers_and_a_thirtieth_apart_mostly_one() -> None:
    """Watts of a replica are kept by steps of its rate, which err upwards by a tenth."""
    rates = np.geomspace(1.0, 10.0, 200)
    levels = np.array([_round_rate(rate) for rate in rates.tolist()])
    rounded = REHEARSAL.planner_step**levels
    assert (rounded >= rates * (1 - 1e-12)).all()
    assert 1.07 < (rounded / rates).max() < 1.13


def test_a_replica_with_a_request_a_minute_is_simulated_with_one_in_eight_seconds() -> None:
    """With fewer than a dozen requests in the simulated minute a draw decides about the watts."""
    assert _round_rate(1 / 60) == _round_rate(1 / 11)
    assert _round_rate(1 / 60) < _round_rate(1 / 8)


def test_smoothing_costs_nothing_that_an_idle_card_draws_and_a_third_of_a_busy_one() -> None:
    """NVIDIA sets floors between idle and the limit; half of it lies in the middle."""
    gpu = load_gpu("b200")
    (row,) = [
        row
        for row in forecast_knobs("gpt2", gpu, {"batch": 64, "seq": 512}, 0.05, pause_share=0.5)
        if row.knob == "power smoothing"
    ]
    floor_w = float(row.setting.split()[2])
    idle_w = 140.0
    middle_w = (idle_w + float(np.max(gpu.power.limit_w))) / 2
    assert abs(floor_w / middle_w - 1) < 0.2
    assert row.energy_saving < 0


def test_power_counts_from_the_second_reading_after_a_change_on() -> None:
    """A card takes 90 ms to a new clock, and its averaged power a second more."""
    reading = SimpleNamespace(at_s=1.0, power_w=1.0, core_hz=1e9, memory_hz=1e9, busy=1.0)
    reader = SimpleNamespace(read=lambda: reading, limit_w=lambda: 700.0)
    settled = [_read_sample(reader, 0.0, True, place).is_settled for place in range(4)]
    assert settled == [False, False, True, True]
