"""Power from counter steps: right where it can be known, refused or flagged where not."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import synthetic

from wattcast.core.errors import CannotWrite, Refused
from wattcast.measure.counter_ticks import CounterTicks, UnwrappedCounter, find_ticks
from wattcast.measure.energy_samples import COLUMNS, EnergySamples, name_throttle_reasons
from wattcast.measure.sample_ring import SampleRing
from wattcast.measure.steady_state import SettlingRule, find_settled_window, take_window
from wattcast.measure.window_summary import bound_energy_j, find_stretches, summarise_window


@given(power_w=st.floats(40.0, 1000.0), poll_s=st.floats(0.001, 0.005), seed=st.integers(0, 1000))
def test_constant_power_is_found_whatever_the_polls_do(
    power_w: float, poll_s: float, seed: int
) -> None:
    samples = synthetic(1.5, lambda t: power_w, poll_s=poll_s, jitter_s=0.004, seed=seed)
    found = find_ticks(samples)
    assert found.intervals >= 12
    assert found.power_w == pytest.approx(power_w, rel=0.004)
    assert found.spread_w < 0.01 * power_w


def test_steps_lie_on_the_regular_grid_they_were_seen_around() -> None:
    """Polls of 4 ms put jitter of 2 % on single steps; on their grid nothing of it is left."""
    samples = synthetic(2.0, poll_s=0.004, jitter_s=0.003)
    assert np.ptp(np.diff(find_ticks(samples).time_s)) < 1e-9


def test_one_late_poll_does_not_shift_the_steps_after_it() -> None:
    samples = synthetic(2.0)
    time_s = samples["time_s"]
    stalled = EnergySamples(samples.rows[(time_s < 0.95) | (time_s > 1.06)])
    assert find_ticks(stalled).power_w == pytest.approx(300.0, rel=2e-3)


def test_irregular_counters_keep_the_times_they_were_seen_at() -> None:
    rows = synthetic(1.0).rows.copy()
    rows[:, 1] = 1000.0 + 300.0 * rows[:, 0]  # steps with every poll, as RAPL does
    found = find_ticks(EnergySamples(rows))
    assert found.intervals > 300
    assert found.power_w == pytest.approx(300.0, rel=1e-6)


def test_a_failed_reading_leaves_a_hole_not_a_zero() -> None:
    samples = synthetic(1.5)
    samples.rows[100:140, 1] = np.nan
    assert find_ticks(samples).power_w == pytest.approx(300.0, rel=5e-3)


def test_counter_wraps_are_bridged_and_resets_are_not() -> None:
    for range_j, readings_j, followed_j in (
        (65.536, (65.0, 1.0, 2.0), (65.0, 66.536, 67.536)),
        (65.536, (30.0, 1.0), (30.0, 1.0)),
        (65.536, (30.0, np.nan, 31.0), (30.0, np.nan, 31.0)),
        (None, (30.0, 1.0), (30.0, 1.0)),
    ):
        counter = UnwrappedCounter(range_j)
        np.testing.assert_allclose([counter.follow(now_j) for now_j in readings_j], followed_j)


def test_unknown_throttle_bits_are_named_not_dropped() -> None:
    assert name_throttle_reasons(0x4 | 0x1000) == ("sw_power_cap", "unknown_0x1000")


def test_samples_survive_a_file(tmp_path) -> None:
    samples = synthetic(0.5)
    samples.save(tmp_path / "kept.npz")
    np.testing.assert_array_equal(EnergySamples.load(tmp_path / "kept.npz").rows, samples.rows)


def test_a_steady_load_settles_and_gives_its_power() -> None:
    samples = synthetic(1.4, lambda t: 120.0 if t < 0.2 else 500.0)
    held = find_settled_window(samples, 0.2, SettlingRule())
    assert held is not None
    assert held.start_s >= 0.2 + SettlingRule().settle_s
    assert held.ticks.power_w == pytest.approx(500.0, rel=5e-3)
    assert held.flags == ()


def test_a_load_that_has_not_run_long_enough_is_not_settled() -> None:
    assert find_settled_window(synthetic(0.7, lambda t: 500.0), 0.2, SettlingRule()) is None


def test_a_capped_load_must_wait_longer() -> None:
    """The governor hunts with a period of about a second: a capped window holds two of them."""
    samples = synthetic(1.9, lambda t: 690.0, throttle=lambda t: 4 if t > 0.3 else 0)
    assert find_settled_window(samples, 0.0, SettlingRule()) is None
    longer = synthetic(3.0, lambda t: 690.0, throttle=lambda t: 4 if t > 0.3 else 0)
    assert find_settled_window(longer, 0.0, SettlingRule()) is not None


def test_a_drifting_clock_is_not_steady() -> None:
    samples = synthetic(1.5, clock_hz=lambda t: 1.98e9 - 1.5e8 * t)
    assert find_settled_window(samples, 0.0, SettlingRule()) is None
    assert "clock_drift" in take_window(samples, 0.3, 1.4, SettlingRule()).flags


def test_drifting_power_is_not_steady() -> None:
    samples = synthetic(1.5, lambda t: 300.0 + 100.0 * t)
    assert find_settled_window(samples, 0.0, SettlingRule()) is None
    assert "power_drift" in take_window(samples, 0.3, 1.4, SettlingRule()).flags


def test_thermal_throttling_is_flagged_and_the_power_cap_is_not() -> None:
    samples = synthetic(1.5, throttle=lambda t: 0x4 | (0x20 if t > 0.7 else 0))
    assert take_window(samples, 0.1, 1.4, SettlingRule()).flags == ("throttle_sw_thermal_slowdown",)


def test_too_few_steps_are_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match="3 whole steps of the energy counter, and power needs 5"):
        take_window(synthetic(1.0), 0.05, 0.45, SettlingRule())


def test_energy_between_moments_inside_steps() -> None:
    stepped, none = (
        CounterTicks(np.arange(0.0, 2.0, 0.1), 300.0 * np.arange(0.0, 2.0, 0.1)),
        synthetic(0.0),
    )
    assert bound_energy_j(stepped, none, 0.333, 1.271) == pytest.approx(
        (300.0 * 0.938, 0.0), abs=1e-9
    )
    assert bound_energy_j(stepped, none, -0.05, 1.95) == pytest.approx((300.0 * 2.0, 0.0), abs=1e-9)
    two = CounterTicks(np.array([0.0, 1.0]), np.array([0.0, 300.0]), 0.1)
    assert bound_energy_j(two, none, 0.25, 0.75)[1] > 150.0, "anything may have been inside"


def test_energy_where_power_jumps_inside_a_step_is_exact_and_bounded() -> None:
    """A line through the step gave 22 J of the 40 J that a load had drawn in it until its end."""
    samples = synthetic(4.0, lambda t: 500.0 if 1.0 <= t < 2.58 else 50.0)
    energy_j, doubt_j = bound_energy_j(find_ticks(samples), samples, 1.0, 2.58)
    assert energy_j == pytest.approx(500.0 * 1.58, rel=2e-3)
    assert doubt_j == pytest.approx(450.0 * 0.02, abs=3.0), (
        "20 ms of the step may have been idle before the end"
    )
    found = summarise_window("jump", samples, 1.0, 2.58)
    assert len(found.flags) == 1
    assert re.fullmatch(
        r"energy known only to .* J: power changed at the start or end", found.flags[0]
    )
    longer = synthetic(8.0, lambda t: 500.0 if 1.0 <= t < 6.58 else 50.0)
    assert summarise_window("jump", longer, 1.0, 6.58).require().energy_j == pytest.approx(
        500.0 * 5.58, rel=2e-3
    )


def test_a_pulse_across_two_steps_is_not_taken_for_a_level() -> None:
    """Power of the two steps was taken for the highest there is; the pulse was 700 W, half of it
    after the end.
    """
    samples = synthetic(5.0, lambda t: 700.0 if 3.05 <= t < 3.13 else 100.0)
    found = summarise_window("pulse", samples, 1.0, 3.09)
    drawn_j = 100.0 * 2.05 + 700.0 * 0.04
    assert found.flags
    assert bound_energy_j(find_ticks(samples), samples, 1.0, 3.09)[1] > abs(
        found.energy_j - drawn_j
    )


def test_readings_of_power_show_a_load_that_swings_inside_steps() -> None:
    """Every step shows 400 W of a load that swings between 100 and 700 W twenty times a second."""
    samples = synthetic(3.0, lambda t: 700.0 if t % 0.05 < 0.025 else 100.0)
    assert bound_energy_j(find_ticks(samples), samples, 0.51, 2.52)[1] < 1.0
    samples.rows[:, COLUMNS.index("instant_w")] = np.where(
        samples["time_s"] % 0.05 < 0.025, 700.0, 100.0
    )
    assert bound_energy_j(find_ticks(samples), samples, 0.51, 2.52)[1] > 8.0


def test_a_window_says_energy_power_peak_and_clock() -> None:
    found = summarise_window("load", synthetic(3.0, lambda t: 400.0), 0.5, 2.5)
    assert found.energy_j == pytest.approx(800.0, rel=2e-3)
    assert found.power_w == pytest.approx(400.0, rel=2e-3)
    assert found.peak_of == "counter steps"
    assert found.sm_clock_hz == 1.98e9
    assert found.require() is found
    assert "800" in found.sentence


def test_a_short_window_keeps_its_time_but_gets_no_power() -> None:
    found = summarise_window("short", synthetic(1.0), 0.2, 0.45)
    assert found.duration_s == pytest.approx(0.25)
    assert found.power_w is None
    assert found.energy_j is None
    with pytest.raises(Refused, match="counter steps, 5 needed"):
        found.require()


def test_plateaus_are_found_one_by_one() -> None:
    samples = synthetic(
        6.0, lambda t: 600.0 if 1.0 < t < 2.5 else (300.0 if 3.5 < t < 5.0 else 100.0)
    )
    powers = [round(s.power_w) for s in find_stretches(find_ticks(samples), 0.0)]
    assert 600 in powers
    assert 300 in powers


def test_a_counter_reset_inside_a_window_gives_no_power() -> None:
    samples = synthetic(2.0)
    samples.rows[300:, 1] -= 900.0
    found = summarise_window("reset", samples, 0.1, 1.9)
    assert "counter_reset" in found.flags
    assert found.power_w is None


def test_a_gap_in_the_samples_is_flagged() -> None:
    samples = synthetic(4.0)
    time_s = samples["time_s"]
    found = summarise_window(
        "gap", EnergySamples(samples.rows[(time_s < 1.0) | (time_s > 2.5)]), 0.1, 3.9
    )
    assert any("no samples for 1.5 s" in flag for flag in found.flags)


def test_a_counter_read_too_rarely_to_know_its_period_is_flagged() -> None:
    samples = synthetic(12.0, poll_s=0.45)
    assert find_ticks(samples).step_s is None
    assert any(
        "known only to 0.45 s" in flag
        for flag in summarise_window("slow", samples, 0.5, 11.5).flags
    )


def test_a_stalled_poller_is_noticed_where_the_counter_has_no_grid() -> None:
    """Too few steps for a grid: one seen 80 ms late misplaces the power of a half-second window by
    up to 8 %.
    """
    samples = synthetic(0.55)
    stalled = EnergySamples(samples.rows[(samples["time_s"] < 0.45) | (samples["time_s"] > 0.53)])
    assert find_ticks(samples).power_doubt < 0.01
    assert find_ticks(stalled).step_s is None
    assert find_ticks(stalled).power_doubt == pytest.approx(0.5 * 0.08 / 0.4, rel=0.2)
    assert "late_polls" in summarise_window("stalled", stalled, 0.0, 0.55).flags


@pytest.mark.parametrize("how", ["lost", "hung", "frozen"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_no_energy_is_invented_after_the_counter_stops(how: str, seed: int) -> None:
    """A command drew 13,000 J and was told 2,003 J: the last reading was carried on for half a
    minute, unflagged.
    """
    random = np.random.default_rng(seed)
    level_w, jump_s = random.uniform(100.0, 700.0, 3), np.sort(random.uniform(1.0, 7.5, 2))
    samples = synthetic(8.0, lambda t: level_w[(t > jump_s).sum()], poll_s=0.004, jitter_s=0.003)
    edge_s = np.clip([1.1, *jump_s, 7.6], 1.1, 7.6)
    true_j = float(np.diff(edge_s) @ level_w)
    reported = 0
    for at_s in random.uniform(0.0, 8.0, 25):
        rows, gone = samples.rows.copy(), samples["time_s"] >= at_s
        rows[gone, 1:] = np.nan if how == "lost" else rows[gone, 1:]
        rows[gone, 1] = rows[gone, 1][0] if how == "frozen" and gone.any() else rows[gone, 1]
        found = summarise_window(
            "run", EnergySamples(rows[~gone] if how == "hung" else rows), 1.1, 7.6
        )
        if found.energy_j is not None and not found.flags:
            assert found.energy_j == pytest.approx(true_j, rel=0.01)
            reported += 1
        if at_s < 7.3:
            assert found.energy_j is None
            assert found.power_w is None
            assert found.flags
    assert reported


def test_a_stopped_counter_says_for_how_long_and_what_it_counted() -> None:
    samples = synthetic(10.0)
    found = summarise_window("run", EnergySamples(samples.rows[samples["time_s"] < 4.05]), 1.0, 9.0)
    assert found.unmeasured_s == pytest.approx(5.0, abs=0.01)
    assert found.flags[-2:] == ("counter stopped 5.00 s before the end", "900 J counted until then")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no posix_fallocate on this system")
def test_a_full_disk_under_the_samples_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch
) -> None:
    """The file was left sparse: the first sample that found no room ended the process with SIGBUS."""

    def fill(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(CannotWrite, match="No space left"):
        SampleRing.create(tmp_path / "samples", 64)
