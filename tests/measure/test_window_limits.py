"""What a measured window needs to have joules, and when they are flagged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from synthetic import synthetic

from wattcast.measure.counter_ticks import find_ticks
from wattcast.measure.energy_samples import COLUMNS, EnergySamples
from wattcast.measure.window_summary import bound_energy_j, summarise_window

Array = npt.NDArray[np.float64]


def jump_at(moment_s: float) -> Callable[[float], float]:
    """Return a power that jumps from 100 to 300 W."""
    return lambda t: 100.0 if t < moment_s else 300.0


def make_counter(steps_s: Array, length_s: float, step_j: float = 30.0) -> EnergySamples:
    """Make samples, each 2 ms, of a counter that rises at each moment."""
    time_s = np.arange(0.0, length_s, 0.002)
    rows = np.full((len(time_s), len(COLUMNS)), np.nan)
    rows[:, COLUMNS.index("time_s")] = time_s
    rows[:, COLUMNS.index("energy_j")] = step_j * np.searchsorted(steps_s, time_s, side="right")
    return EnergySamples(rows)


def draw_steps(usual_s: float, end_s: float) -> Array:
    """Draw the moments of a counter without a period, whose steps are about so far apart."""
    gaps_s = np.random.default_rng(1).uniform(0.6, 1.4, 400) * usual_s
    steps_s = np.cumsum(gaps_s)
    return steps_s[steps_s < end_s]


@pytest.mark.parametrize(("steps", "has_energy"), [(4, False), (5, True)])
def test_five_steps_make_joules(steps: int, has_energy: bool) -> None:
    window = summarise_window("run", synthetic(6.0), 2.05, 2.05 + 0.1 * (steps + 1))
    assert (window.energy_j is not None) is has_energy


@pytest.mark.parametrize(("length_s", "is_flagged"), [(3.0, True), (4.0, False)])
def test_a_percent_left_open_at_an_end_is_flagged(length_s: float, is_flagged: bool) -> None:
    """A jump of 200 W in the middle of a step of 100 ms leaves 10 J open: 1 % of 3.5 s."""
    samples = synthetic(length_s + 4.0, power_w=jump_at(1.55))
    flags = summarise_window("run", samples, 1.55, 1.55 + length_s).flags
    assert any("known only to" in flag for flag in flags) is is_flagged


def test_polls_blur_a_jump_by_two_milliseconds() -> None:
    """Where power jumps together with a step, 2 ms of the jump stay open, at each end."""
    samples = synthetic(6.0, power_w=lambda t: 300.0 if 1.5 <= t < 3.5 else 100.0, poll_s=0.001)
    _, open_j = bound_energy_j(find_ticks(samples), samples, 1.5, 3.5)
    assert open_j == pytest.approx(2.0 * 0.002 * 200.0, rel=0.25)


@pytest.mark.parametrize(("rest_s", "has_stopped"), [(0.42, False), (0.58, True)])
def test_a_counter_without_a_period_has_stopped_after_half_a_second(
    rest_s: float, has_stopped: bool
) -> None:
    steps_s = draw_steps(0.1, 6.0)
    samples = make_counter(steps_s, 9.0)
    window = summarise_window("run", samples, 0.5, float(steps_s[-1]) + rest_s)
    assert (window.unmeasured_s is not None) is has_stopped


@pytest.mark.parametrize(("rest_s", "has_stopped"), [(0.17, False), (0.23, True)])
def test_a_fast_counter_has_stopped_after_a_fifth_of_a_second(
    rest_s: float, has_stopped: bool
) -> None:
    """A busy machine may read it that late."""
    steps_s = np.arange(0.02, 5.0, 0.02)
    samples = make_counter(steps_s, 8.0)
    window = summarise_window("run", samples, 0.51, float(steps_s[-1]) + rest_s)
    assert (window.unmeasured_s is not None) is has_stopped


@pytest.mark.parametrize(("length_s", "is_doubtful"), [(0.85, False), (1.2, True)])
def test_a_window_of_ten_usual_steps_lacks_none_without_a_fault(
    length_s: float, is_doubtful: bool
) -> None:
    """A second that saw three steps of a counter tells of a fault, a shorter window does not."""
    steps_s = np.array([1.0, 1.25, 1.5, 1.62])
    window = summarise_window("run", make_counter(steps_s, 4.0), 0.9, 0.9 + length_s)
    assert any("needed" in doubt for doubt in window.doubts) is is_doubtful


@pytest.mark.parametrize(("after_s", "is_flagged"), [(0.0083, False), (0.0117, True)])
def test_a_thousandth_of_a_window_may_lie_beyond_the_last_step(
    after_s: float, is_flagged: bool
) -> None:
    samples = make_counter(np.arange(0.1, 11.05, 0.1), 13.0)
    last_s = float(find_ticks(samples).time_s[-1])
    flags = summarise_window("run", samples, last_s + after_s - 10.0, last_s + after_s).flags
    assert any("before the end" in flag for flag in flags) is is_flagged


@pytest.mark.parametrize(("usual_s", "is_flagged"), [(0.13, False), (0.17, True)])
def test_steps_without_a_period_are_known_to_a_step_and_a_half(
    usual_s: float, is_flagged: bool
) -> None:
    steps_s = draw_steps(usual_s, 20.0)
    samples = make_counter(steps_s, 20.0)
    assert find_ticks(samples).step_s is None
    flags = summarise_window("run", samples, 1.0, 19.0).flags
    assert any("steps of the counter known only" in flag for flag in flags) is is_flagged


def test_levels_far_from_an_end_say_nothing_of_it() -> None:
    """No step was missed: the idle seconds before do not widen what the end leaves open."""
    samples = synthetic(8.0, power_w=jump_at(3.0))
    ticks = find_ticks(samples)
    _, open_j = bound_energy_j(ticks, samples, 5.02, 6.57)
    assert open_j < 0.5


@pytest.mark.parametrize(("length_s", "is_doubtful"), [(0.6, True), (0.85, False)])
def test_a_twentieth_left_open_at_an_end_is_doubtful(length_s: float, is_doubtful: bool) -> None:
    """A jump of 200 W in the middle of a step of 100 ms leaves 10 J open: 5 % of 0.7 s."""
    samples = synthetic(length_s + 4.0, power_w=jump_at(1.55))
    doubts = summarise_window("run", samples, 1.55, 1.55 + length_s).doubts
    assert any("known only to" in doubt for doubt in doubts) is is_doubtful


@pytest.mark.parametrize(("steps", "plateaus"), [(7, 0), (9, 1)])
def test_eight_steps_are_a_plateau(steps: int, plateaus: int) -> None:
    """Around it the load changes with every step of the counter."""

    def draw_power(t: float) -> float:
        step = int(t / 0.1 + 1e-6)
        is_steady = 20 <= step < 20 + steps
        return 300.0 if is_steady else 150.0 + 100.0 * (step % 3)

    window = summarise_window("run", synthetic(6.0, power_w=draw_power), 1.0, 5.0)
    assert len(window.steady) == plateaus
