"""Power around the limit that a governor holds, compared with what an H200 drew."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.core.arrays import Array
from wattcast.timeseries.governor_ripple import add_ripple, overshoot_after_pause_j
from wattcast.timeseries.power_curve import PowerCurve, join_pieces, state_code

HELD_W = 692.0
UNLIMITED_W = 820.0
IDLE_W = 120.0


def make_curve(*pieces: tuple[float, float], gpus: int = 1) -> PowerCurve:
    """Return the curve of pieces of so many seconds at so many watts, in two parts."""
    spans_s = np.array([span_s for span_s, _ in pieces])
    watts = np.array([watt for _, watt in pieces])
    part_j = (spans_s * watts)[:, np.newaxis] * np.array([0.2, 0.8])
    states = np.full(len(pieces), state_code("compute"), dtype=np.int8)
    idle_part_w = np.array([IDLE_W, 0.0])
    return join_pieces(spans_s, part_j, states, ("static", "work"), idle_part_w, gpus)


def sample_w(curve: PowerCurve, interval_s: float) -> Array:
    edges_s = np.arange(0.0, curve.length_s + 1e-9, interval_s)
    return np.diff(curve.energy_until(edges_s).sum(axis=-1)) / interval_s


def test_tenths_of_a_second_differ_as_measured() -> None:
    """H200s at their limit: 17 and 21 W from tenth to tenth, 8 and 14 W over quarters of a second
    (two runs, docs/method/power-over-time.md)."""
    watts = sample_w(add_ripple(make_curve((400.0, HELD_W)), HELD_W, HELD_W), 0.1)
    assert 17.0 <= watts.std() <= 21.0
    quarters = sample_w(add_ripple(make_curve((400.0, HELD_W)), HELD_W, HELD_W), 0.25)
    assert 7.5 <= quarters.std() <= 14.5


def test_what_a_tenth_draws_too_much_the_next_draws_less() -> None:
    watts = sample_w(add_ripple(make_curve((400.0, HELD_W)), HELD_W, HELD_W), 0.1)
    beyond_w = watts - watts.mean()
    correlation = (beyond_w[1:] * beyond_w[:-1]).mean() / beyond_w.var()
    assert -0.4 <= correlation <= -0.26  # measured: -0.37 and -0.28


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_stretch_at_the_limit_keeps_its_energy(gpus: int) -> None:
    curve = make_curve((2.0, 650.0), (3.33, HELD_W), (1.5, IDLE_W), (2.07, HELD_W), gpus=gpus)
    rippled = add_ripple(curve, HELD_W, UNLIMITED_W)
    ends_s = np.array([2.0, 5.4, 6.8, curve.length_s])
    before_j = curve.energy_until(ends_s)
    after_j = rippled.energy_until(ends_s)
    assert after_j == pytest.approx(before_j, rel=1e-12)
    assert np.array_equal(rippled.state_until(ends_s), curve.state_until(ends_s))
    assert not np.allclose(sample_w(rippled, 0.1), sample_w(curve, 0.1))


def test_below_the_limit_nothing_moves() -> None:
    curve = make_curve((3.0, 0.95 * HELD_W), (3.0, IDLE_W))
    rippled = add_ripple(curve, HELD_W, UNLIMITED_W)
    assert sample_w(rippled, 0.1) == pytest.approx(sample_w(curve, 0.1), rel=1e-12)


def test_gpus_of_a_job_ripple_independently() -> None:
    """The mean of eight independent ripples varies by an eighth root as much as one."""
    one = sample_w(add_ripple(make_curve((60.0, HELD_W)), HELD_W, HELD_W), 0.1)
    eight = sample_w(add_ripple(make_curve((60.0, HELD_W), gpus=8), HELD_W, HELD_W), 0.1) / 8
    assert eight.std() == pytest.approx(one.std() / np.sqrt(8), rel=1e-9)


def test_a_card_overshoots_after_a_pause() -> None:
    """H200s in training drew 1.5 to 7.5 % more for most of a second after pauses, and then less."""
    curve = make_curve((2.0, HELD_W), (9.0, IDLE_W), (20.0, HELD_W))
    watts = sample_w(add_ripple(curve, HELD_W, UNLIMITED_W), 0.1)
    more = watts[110:119].mean() / HELD_W - 1.0
    assert 0.02 <= more <= 0.06
    assert watts[119] < 550.0
    assert watts[110:120].mean() == pytest.approx(HELD_W, rel=0.015)


def test_an_overshoot_draws_no_more_than_the_work_without_a_limit() -> None:
    curve = make_curve((2.0, HELD_W), (9.0, IDLE_W), (20.0, HELD_W))
    watts = sample_w(add_ripple(curve, HELD_W, 700.0), 0.1)
    assert watts[110:119].mean() == pytest.approx(700.0, rel=0.015)


@pytest.mark.parametrize(
    ("span_s", "watts", "overshoots"),
    [
        (0.8, IDLE_W, False),
        (1.2, IDLE_W, True),
        (9.0, 0.45 * HELD_W, True),
        (9.0, 0.6 * HELD_W, False),
    ],
)
def test_a_short_pause_has_no_overshoot(span_s: float, watts: float, overshoots: bool) -> None:
    """A pause under a second, and work at over half of the limit, leave the governor less room."""
    curve = make_curve((2.0, HELD_W), (span_s, watts), (60.0, HELD_W))
    rippled = sample_w(add_ripple(curve, HELD_W, UNLIMITED_W), 0.1)
    first = round((2.0 + span_s) / 0.1)
    more = rippled[first : first + 9].mean() / HELD_W - 1.0
    assert (more > 0.022) == overshoots


def test_what_is_drawn_beyond_the_limit_is_given_back() -> None:
    since_s = np.array([0.0, 0.45, 0.9, 1.0, 60.0])
    beyond_j = overshoot_after_pause_j(since_s, HELD_W, UNLIMITED_W)
    assert beyond_j[0] == 0.0
    assert beyond_j[1] == pytest.approx(beyond_j[2] / 2.0)
    assert 20.0 <= beyond_j[2] <= 35.0  # 30 W over 0.9 s
    assert np.array_equal(beyond_j[3:], np.zeros(2))


@pytest.mark.parametrize(("share", "moves"), [(0.95, False), (0.995, True)])
def test_power_moves_at_the_limit_and_not_a_twentieth_below_it(share: float, moves: bool) -> None:
    """Half a percent below it is where a search for the limit may end."""
    curve = make_curve((20.0, share * HELD_W))
    watts = sample_w(add_ripple(curve, HELD_W, HELD_W), 0.1)
    assert bool(watts.std() > 1.0) is moves
