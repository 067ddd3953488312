"""Where measuring draws its lines: what lies just inside counts, and what lies just outside does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from synthetic import synthetic

from wattcast.measure import steady_state
from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.device_control import NvmlCard, NvmlReading
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.power_logs import read_power_log
from wattcast.measure.run_verdict import ModelTerm, compare_with_prediction
from wattcast.measure.source_check import check_sources, drop_impossible, is_plausible_power
from wattcast.measure.steady_state import SettlingRule, find_settled_window
from wattcast.measure.window_summary import Measurement, summarise_window


def make_samples(
    power_w: float = 300.0,
    length_s: float = 6.0,
    still_s: float = 0.0,
    limit_reading_w: float | None = None,
) -> EnergySamples:
    """Poll a counter that steps every 100 ms each 2 ms; it may stand still in the middle."""
    time_s = np.arange(0.0, length_s, 0.002)
    moving_s = time_s - np.clip(time_s - 0.5 * length_s, 0.0, still_s)
    rows = np.full((len(time_s), len(COLUMNS)), np.nan)
    rows[:, COLUMNS.index("time_s")] = time_s
    rows[:, COLUMNS.index("energy_j")] = power_w * 0.1 * np.floor(moving_s / 0.1 + 1e-9)
    if limit_reading_w is not None:
        rows[::10, COLUMNS.index("instant_w")] = limit_reading_w
    return EnergySamples(rows)


@pytest.mark.parametrize(("over_limit", "is_plausible"), [(1.2, True), (1.3, False)])
def test_a_card_may_average_a_quarter_above_its_limit(
    over_limit: float, is_plausible: bool
) -> None:
    assert is_plausible_power(over_limit * 700.0, (), 700.0) is is_plausible


@pytest.mark.parametrize(("ratio", "is_plausible"), [(1.4, True), (1.6, False)])
def test_a_counter_may_differ_by_half_from_readings_at_its_ends(
    ratio: float, is_plausible: bool
) -> None:
    assert is_plausible_power(ratio * 200.0, (200.0,), 700.0) is is_plausible


@pytest.mark.parametrize(("over_limit", "flags"), [(2.7, 0), (3.3, 1)])
def test_readings_above_three_times_the_limit_are_left_out(over_limit: float, flags: int) -> None:
    samples = make_samples(limit_reading_w=over_limit * 700.0)
    assert len(drop_impossible(samples, 700.0, (0.0, 6.0))[1]) == flags


@pytest.mark.parametrize(("power_w", "is_doubtful"), [(5500.0, False), (7500.0, True)])
def test_a_card_without_a_limit_draws_some_kilowatts_at_most(
    power_w: float, is_doubtful: bool
) -> None:
    samples = make_samples(power_w)
    check = check_sources(samples, find_ticks(samples), (0.5, 5.5), 5.0 * power_w)
    assert bool(check.doubts) is is_doubtful


@pytest.mark.parametrize(("still_s", "is_doubtful"), [(0.0, False), (0.1, True)])
def test_a_counter_that_keeps_its_value_for_longer_than_a_step_is_doubted(
    still_s: float, is_doubtful: bool
) -> None:
    samples = make_samples(still_s=still_s)
    check = check_sources(samples, find_ticks(samples), (0.5, 5.5), 1500.0, 700.0)
    assert bool(check.doubts) is is_doubtful


@pytest.mark.parametrize(("gap_s", "is_flagged"), [(0.8, False), (1.2, True)])
def test_a_second_without_samples_is_flagged(gap_s: float, is_flagged: bool) -> None:
    rows = make_samples().rows
    time_s = rows[:, 0]
    kept = EnergySamples(rows[(time_s < 3.0) | (time_s > 3.0 + gap_s)])
    flags = summarise_window("window", kept, 0.5, 5.5).flags
    assert any("no samples" in flag for flag in flags) is is_flagged


@pytest.mark.parametrize(("spread", "count"), [(0.03, 1), (0.05, 0)])
def test_steps_within_4_percent_are_one_plateau(spread: float, count: int) -> None:
    samples = make_samples()
    energy = COLUMNS.index("energy_j")
    step = np.floor(samples["time_s"] / 0.1 + 1e-9)
    samples.rows[:, energy] += np.where(step % 2 == 1, 30.0 * 0.5 * spread, 0.0)
    assert len(summarise_window("window", samples, 0.5, 5.5).steady) == count


@pytest.mark.parametrize(
    ("time_ratio", "power_ratio", "term"),
    [
        (1.04, 1.04, ModelTerm.NONE),
        (1.04, 1.06, ModelTerm.ENERGY),
        (1.06, 1.04, ModelTerm.KERNELS),
    ],
)
def test_5_percent_tell_a_run_from_its_prediction(
    time_ratio: float, power_ratio: float, term: ModelTerm
) -> None:
    measured = Measurement("run", time_ratio, power_w=300.0 * power_ratio)
    figures = {"latency_s": 1.0, "power_w": 300.0, "clock_hz": 1.5e9}
    assert compare_with_prediction(measured, {"predictions": [figures]}).term is term


@pytest.mark.parametrize(("busy_s", "term"), [(0.75, ModelTerm.KERNELS), (0.65, ModelTerm.HOST)])
def test_a_late_run_that_was_to_wait_for_its_host_is_blamed_on_the_host(
    busy_s: float, term: ModelTerm
) -> None:
    measured = Measurement("run", 1.2, power_w=300.0)
    figures = {"latency_s": 1.0, "power_w": 300.0, "clock_hz": 1.5e9, "busy_s": busy_s}
    assert compare_with_prediction(measured, {"predictions": [figures]}).term is term


@pytest.mark.parametrize(
    ("busy", "memory_busy", "work", "phase"),
    [
        (0.08, 0.0, 0.0, "idle"),
        (0.12, 0.0, 0.0, "latency"),
        (1.0, 0.55, 0.0, "latency"),
        (1.0, 0.65, 0.0, "memory"),
        (1.0, 0.0, 0.27, "latency"),
        (1.0, 0.0, 0.33, "compute"),
    ],
)
def test_use_of_pipes_and_memory_names_the_phase(
    busy: float, memory_busy: float, work: float, phase: str
) -> None:
    reading = NvmlReading(0.0, 0.0, 300.0, 1e9, 1e9, busy, memory_busy, work * 1e9)
    assert reading.phase == phase


@pytest.mark.parametrize(
    ("form", "watts", "is_flagged"),
    [
        ("nvidia-smi", 3600.0, False),
        ("nvidia-smi", 4400.0, True),
        ("meter", 9e5, False),
        ("meter", 1.1e6, True),
    ],
)
def test_a_log_leaves_out_what_no_gpu_and_no_rack_can_draw(
    tmp_path: Path, form: str, watts: float, is_flagged: bool
) -> None:
    heading = "timestamp, power.draw [W]" if form == "nvidia-smi" else "time (s),Power (W)"
    stamps = [f"2026/10/25 02:59:0{second}.000" for second in range(5)]
    lines = [heading]
    for second in range(5):
        stamp = stamps[second] if form == "nvidia-smi" else str(second)
        lines.append(f"{stamp}, {watts if second == 2 else 300.0}")
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines))
    (summary,) = read_power_log(path).summarise().values()
    assert any("impossible" in flag for flag in summary.flags) is is_flagged


@pytest.mark.parametrize(("pause_s", "is_gap"), [(2.2, False), (2.8, True)])
def test_a_pause_of_more_than_two_and_a_half_intervals_is_a_gap(
    tmp_path: Path, pause_s: float, is_gap: bool
) -> None:
    times_s = [0.0, 1.0, 2.0, 3.0, 3.0 + pause_s, 4.0 + pause_s]
    lines = ["time (s),Power (W)", *(f"{time_s},300.0" for time_s in times_s)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines))
    (summary,) = read_power_log(path).summarise().values()
    assert any("no readings" in flag for flag in summary.flags) is is_gap


POWER_CAP = 0x4  # NVML's reason for a clock that the power cap lowers


@pytest.mark.parametrize(("started_s", "is_settled"), [(0.25, True), (0.35, False)])
def test_a_window_begins_3_tenths_of_a_second_after_its_load(
    started_s: float, is_settled: bool
) -> None:
    """The window of five steps begins at 0.6 s."""
    window = find_settled_window(synthetic(1.15), started_s, SettlingRule())
    assert (window is not None) is is_settled


@pytest.mark.parametrize(("started_s", "is_settled"), [(0.5, True), (0.7, False)])
def test_a_capped_window_has_20_steps_and_begins_after_half_a_second(
    started_s: float, is_settled: bool
) -> None:
    """The window of twenty steps begins at 1.1 s."""
    samples = synthetic(3.15, throttle=lambda t: POWER_CAP)
    assert (find_settled_window(samples, started_s, SettlingRule()) is not None) is is_settled


@pytest.mark.parametrize(("drift", "is_settled"), [(0.008, True), (0.012, False)])
def test_a_clock_that_drifts_by_1_percent_has_not_settled(drift: float, is_settled: bool) -> None:
    samples = synthetic(1.15, clock_hz=lambda t: 1e9 * (1.0 + drift * (t > 0.85)))
    assert (find_settled_window(samples, 0.2, SettlingRule()) is not None) is is_settled


@pytest.mark.parametrize(("drift", "is_settled"), [(0.016, True), (0.024, False)])
def test_power_that_drifts_by_2_percent_has_not_settled(drift: float, is_settled: bool) -> None:
    samples = synthetic(1.15, power_w=lambda t: 300.0 * (1.0 + drift * (t > 0.85)))
    assert (find_settled_window(samples, 0.2, SettlingRule()) is not None) is is_settled


@pytest.mark.parametrize(("drift", "is_settled"), [(0.05, True), (0.07, False)])
def test_a_capped_load_may_drift_by_6_percent(drift: float, is_settled: bool) -> None:
    samples = synthetic(
        3.15, clock_hz=lambda t: 1e9 * (1.0 + drift * (t > 2.1)), throttle=lambda t: POWER_CAP
    )
    assert (find_settled_window(samples, 0.5, SettlingRule()) is not None) is is_settled


@pytest.mark.parametrize(("reported_s", "is_settled"), [(0.035, True), (0.06, False)])
def test_a_cap_reported_at_once_is_that_of_the_load_before(
    reported_s: float, is_settled: bool
) -> None:
    samples = synthetic(1.15, throttle=lambda t: POWER_CAP if t < 0.25 + reported_s else 0)
    assert (find_settled_window(samples, 0.25, SettlingRule()) is not None) is is_settled


@pytest.mark.parametrize(("percent", "is_working"), [(0, False), (40, False), (60, True)])
def test_a_card_that_is_used_half_of_the_time_works(percent: int, is_working: bool) -> None:
    """Only then does a low clock say that something holds it down."""
    card = NvmlCard(0)
    card._caller = cast(Any, SimpleNamespace(call=lambda function, *values: function(*values)))
    card._nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=percent, memory=0),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1000,
    )
    assert card.read_clocks().is_working is is_working


def test_a_load_that_never_settles_is_taken_as_it_is_after_some_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty steps of a counter of 100 ms under a cap, and what comes before them, take 2.5 s."""
    now_s = [0.0]
    monkeypatch.setattr(steady_state.time, "monotonic", lambda: now_s[0])

    def run_chunk() -> None:
        now_s[0] += 0.05

    mark = SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda other: 0.0)
    gpu = cast(Any, SimpleNamespace(mark=lambda: mark, synchronize=lambda: None))
    rows = np.zeros((0, len(COLUMNS)))
    sampler = cast(
        Any,
        SimpleNamespace(head=0, check=lambda: None, since=lambda head: EnergySamples(rows)),
    )
    window = SimpleNamespace(flags=(), whole=lambda edges_s: edges_s)
    monkeypatch.setattr(steady_state, "find_settled_window", lambda *arguments: None)
    monkeypatch.setattr(steady_state, "take_window", lambda *arguments: window)
    monkeypatch.setattr(steady_state, "replace", lambda window, flags: window)
    steady_state.hold_load(sampler, gpu, run_chunk, SettlingRule())
    assert 3.0 < now_s[0] < 5.0
