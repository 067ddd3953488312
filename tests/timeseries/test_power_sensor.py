"""What a sensor shows of a load that switches between 100 and 500 W, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.timeseries.power_curve import PowerCurve, join_pieces
from wattcast.timeseries.power_sensor import SensorKind, read_sensor, sensor_window_s

INSTANT_S = sensor_window_s(SensorKind.INSTANT, "h200", "hopper")
AVERAGE_S = sensor_window_s(SensorKind.NVML, "h200", "hopper")


def make_burst(begin_s: float, length_s: float) -> PowerCurve:
    """Return a card that idles at 100 W and draws 500 W in one burst."""
    spans_s = np.array([begin_s, length_s, 10.0])
    part_j = (spans_s * [100.0, 500.0, 100.0])[:, np.newaxis]
    states = np.array([7, 2, 7], dtype=np.int8)
    return join_pieces(spans_s, part_j, states, ("all",), np.array([100.0]), 1)


def test_an_instant_reading_is_of_25_ms_in_100() -> None:
    """A burst of 30 ms is seen whole or not at all, as it falls before an update or after it."""
    seen = make_burst(0.97, 0.03)
    missed = make_burst(1.00, 0.03)
    times_s = np.arange(0.95, 1.5, 0.01)
    assert read_sensor([seen], times_s, INSTANT_S).max() == pytest.approx(500.0)
    assert read_sensor([missed], times_s, INSTANT_S).max() == pytest.approx(100.0)
    half = make_burst(0.9875, 1.0)
    assert read_sensor([half], np.array([1.05]), INSTANT_S)[0] == pytest.approx(300.0)


def test_an_average_rises_over_a_second() -> None:
    curve = make_burst(2.0, 3.0)
    shown_w = read_sensor([curve], np.array([1.95, 2.55, 3.05, 4.0, 5.55]), AVERAGE_S)
    np.testing.assert_allclose(shown_w, [100.0, 300.0, 500.0, 500.0, 300.0], rtol=1e-9)


def test_readings_change_every_100_ms() -> None:
    curve = make_burst(1.0, 1.0)
    times_s = 1.0 + np.arange(0.005, 1.0, 0.01)
    shown_w = read_sensor([curve], times_s, AVERAGE_S)
    changes = np.flatnonzero(np.diff(shown_w))
    assert np.diff(changes).tolist() == [10] * (len(changes) - 1)


def test_a_reading_is_as_old_as_the_call() -> None:
    """The update at 1.5 s is seen 0.5 ms later, by a caller who asked before it."""
    curve = make_burst(1.4, 1.0)
    shown_w = read_sensor([curve], np.array([1.5003, 1.5006]), INSTANT_S)
    np.testing.assert_allclose(shown_w, [100.0, 500.0])


def test_sensors_of_two_cards_add_up() -> None:
    curve = make_burst(1.0, 1.0)
    one_w = read_sensor([curve], np.array([1.55]), INSTANT_S)
    assert read_sensor([curve, curve], np.array([1.55]), INSTANT_S) == pytest.approx(2.0 * one_w)


@pytest.mark.parametrize(
    ("gpu", "architecture", "window_s"),
    [("a100-sxm-80gb", "ampere", 0.025), ("a10", "ampere", 1.0), ("v100-sxm", "volta", 0.025)],
)
def test_nvidia_smi_shows_what_the_card_has(gpu: str, architecture: str, window_s: float) -> None:
    assert sensor_window_s(SensorKind.NVML, gpu, architecture) == window_s


def test_a_counter_gives_the_mean_between_its_steps() -> None:
    window_s = sensor_window_s(SensorKind.COUNTER, "h200", "hopper")
    curve = make_burst(1.05, 1.0)
    assert read_sensor([curve], np.array([1.15]), window_s)[0] == pytest.approx(300.0)
