"""How often the polling process asks a card, and how closely it sees its counter step.

Time is imagined: a call of the driver takes a tenth of a millisecond, and the counter steps every
100 ms.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from test_polling_process import ImaginedGpu, poll_until

from wattcast.measure.energy_samples import EnergySamples
from wattcast.measure.polling_process import PollingPace

Array = npt.NDArray[np.float64]
CALL_S = 1e-4


@pytest.fixture
def poll(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function that polls an imagined card for some seconds."""

    def run(length_s: float, relaxed: bool = True, gpu: ImaginedGpu | None = None) -> EnergySamples:
        card = gpu or ImaginedGpu(lambda now_s: CALL_S)
        samples = poll_until(card, length_s, monkeypatch, tmp_path, relaxed)
        (tmp_path / "ring").unlink()
        return samples

    return run


def times_of(samples: EnergySamples, column: str, start_s: float, end_s: float) -> Array:
    """Return when a column was read between two moments."""
    read_s = samples["time_s"][np.isfinite(samples[column])]
    return read_s[(read_s >= start_s) & (read_s < end_s)]


def gaps_at_steps(samples: EnergySamples, start_s: float) -> Array:
    """Return how far apart the readings around each step are that was seen from a moment on."""
    counter = samples.read_column("energy_j")
    changes = np.flatnonzero(np.diff(counter.values) != 0.0)
    changes = changes[counter.time_s[changes] > start_s]
    return counter.time_s[changes + 1] - counter.time_s[changes]


def test_a_known_step_is_seen_within_a_millisecond_or_so(poll) -> None:
    """That is 1 % of the usual period, and a thousand readings a second for some milliseconds."""
    closest_s = float(gaps_at_steps(poll(30.0), 5.0).min())
    assert 0.8e-3 < closest_s < 1.3e-3


def test_an_unknown_counter_is_read_five_hundred_times_a_second(poll) -> None:
    read_s = times_of(poll(0.6), "energy_j", 0.1, 0.5)
    assert 400 < len(read_s) / 0.4 < 600


def test_eight_steps_make_a_counter_known(poll) -> None:
    """The first step is at 0.1 s, the eighth at 0.8 s: until then the card is read quickly."""
    read_s = times_of(poll(2.0), "energy_j", 0.0, 2.0)
    first_pause_s = float(read_s[:-1][np.diff(read_s) > 0.01][0])
    assert 0.7 < first_pause_s < 0.9


@pytest.mark.parametrize(
    ("method", "least_per_s", "most_per_s"), [("sm_clock_hz", 180, 240), ("slow", 45, 65)]
)
def test_a_quick_run_has_the_clock_every_5_ms_and_power_every_20(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    least_per_s: float,
    most_per_s: float,
) -> None:
    gpu = ImaginedGpu(lambda now_s: CALL_S)
    read_s: list[float] = []
    read = getattr(gpu, method)

    def count_readings() -> object:
        read_s.append(gpu.now_s)
        return read()

    monkeypatch.setattr(gpu, method, count_readings)
    poll_until(gpu, 2.0, monkeypatch, tmp_path, relaxed=False, period_s=0.001)
    assert least_per_s < len(read_s) / 2.0 < most_per_s


def test_a_users_program_is_beside_five_readings_of_the_clock_a_second(poll) -> None:
    read_s = times_of(poll(30.0), "sm_clock_hz", 10.0, 30.0)
    assert 4.0 < len(read_s) / 20.0 < 6.0


def test_an_old_relaxed_sampler_reads_the_counter_twice_a_second(poll) -> None:
    gaps_s = np.diff(times_of(poll(90.0), "energy_j", 60.0, 90.0))
    assert 0.45 < float(np.median(gaps_s[gaps_s > 0.05])) < 0.6


def test_a_relaxed_sampler_waits_a_fiftieth_of_its_age(poll) -> None:
    """At ten seconds it waits about 0.2 s, at twenty 0.4 s: the middle of a period is awaited."""
    samples = poll(22.0)
    for age_s in (10.0, 20.0):
        gaps_s = np.diff(times_of(samples, "energy_j", age_s - 1.0, age_s + 2.0))
        assert float(np.median(gaps_s[gaps_s > 0.05])) == pytest.approx(0.02 * age_s, rel=0.2)


def test_a_step_is_watched_closely_every_fourth_second_or_so(poll) -> None:
    """An old sampler waits half a second at a time, and sees every eighth reading's step sharply."""
    sharp = gaps_at_steps(poll(140.0), 60.0) < 0.003
    assert 15 <= int(sharp.sum()) <= 24


def test_readings_of_a_measured_run_lie_in_the_middle_of_a_period(poll) -> None:
    """A reading beside a step could belong to either side of it."""
    read_s = times_of(poll(4.0, relaxed=False), "energy_j", 2.0, 4.0)
    alone_s = read_s[1:-1][(np.diff(read_s)[:-1] > 0.02) & (np.diff(read_s)[1:] > 0.02)]
    phase = (alone_s / 0.1) % 1.0
    assert len(phase) > 5
    assert float(np.median(np.abs(phase - 0.5))) < 0.1


def test_a_call_five_times_as_long_as_the_quickest_has_no_moment(poll) -> None:
    """Calls of 10 ms are usual here; one of 44 ms is used, one of 56 ms is not."""
    for odd_s, is_used in ((0.044, True), (0.056, False)):
        gpu = ImaginedGpu(lambda now_s, odd_s=odd_s: odd_s if now_s > 2.0 else 0.01)
        samples = poll(6.0, gpu=gpu)
        assert (len(samples.between(2.5, 6.0).known("energy_j")) > 0) is is_used


def follow_steps(gap_s: float, count: int) -> PollingPace:
    """Show a pace so many steps of a counter, each between two readings ``gap_s`` apart."""
    pace = PollingPace(0.05, relaxed=True)
    for step in range(count):
        at_s = 0.1 * step
        pace.wait_s(at_s, float(step))
        pace.wait_s(at_s + gap_s, float(step + 1))
    return pace


@pytest.mark.parametrize(("gap_s", "is_sharp"), [(0.007, True), (0.009, False)])
def test_readings_eight_milliseconds_apart_tell_the_moment_of_a_step(
    gap_s: float, is_sharp: bool
) -> None:
    pace = follow_steps(gap_s, 12)
    is_known = pace.wait_s(1.15, 12.0) > 0.01
    assert is_known is is_sharp


@pytest.mark.parametrize(("before_s", "is_close"), [(0.0075, True), (0.0115, False)])
def test_a_step_is_expected_for_eight_milliseconds(before_s: float, is_close: bool) -> None:
    """A step that comes up to so much early is still seen sharply."""
    pace = follow_steps(0.002, 12)
    wait_s = pace.wait_s(8.0 + 0.001 - before_s, 12.0)
    assert (wait_s < 0.0015) is is_close


def test_a_missed_step_is_looked_for_through_two_and_a_half_periods() -> None:
    """Then the pace goes back to rare readings: the card may be idle, its counter at rest."""
    pace = follow_steps(0.002, 12)
    now_s = 8.0
    quick_s = 0.0
    longest_s = 0.0
    for _ in range(2000):
        wait_s = pace.wait_s(now_s, 12.0)
        now_s += wait_s
        quick_s = quick_s + wait_s if math.isclose(wait_s, 0.002, rel_tol=0.5) else 0.0
        longest_s = max(longest_s, quick_s)
    assert 0.2 < longest_s < 0.3
