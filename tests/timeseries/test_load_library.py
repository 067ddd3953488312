"""Pieces of simulated serving stand for replicas of a hall over a day."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from wattcast.coefficients.coefficient_files import change_coefficient
from wattcast.timeseries.hall_file import DAY_SHAPES, ServingLoad
from wattcast.timeseries.load_library import (
    HALL,
    LibrarySize,
    LoadLibrary,
    LoadStretch,
    add_replica,
    build_library,
    choose_rates,
    draw_blocks,
    rate_at,
)


def make_load(day: str = "office", rate: float = 4.0) -> ServingLoad:
    shape = DAY_SHAPES[day]
    mean = sum(shape) / len(shape)
    return ServingLoad("llama3-8b", rate, 1, 256, 32, tuple(v / mean for v in shape), {})


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """Simulate little: three rates, two minutes each."""
    with ExitStack() as stack:
        for name, factor in (("rates", 0.375), ("stretch_requests", 0.02), ("least_stretch", 0.2)):
            stack.enter_context(change_coefficient(f"hall.{name}", factor))
        yield


@pytest.fixture(scope="module")
def library(small: None) -> LoadLibrary:
    return build_library(make_load(), "h200", 0.25, 1)


def made_up_library(seconds: int = 400) -> LoadLibrary:
    """Two stretches whose joules say which they are, and which second of it."""
    stretches = []
    for rate in (1.0, 3.0):
        bin_j = 1000.0 * rate + np.repeat(np.arange(float(seconds)), 2)
        stretches.append(LoadStretch(rate, bin_j, np.ones(seconds), 0.0, {"x": rate}))
    return LoadLibrary(tuple(stretches), 1, 0.5)


@pytest.mark.parametrize(
    ("day", "quiet_hours", "busy_hours"),
    [("office", range(1, 6), range(10, 17)), ("evening", range(2, 6), range(19, 23))],
    ids=["office", "evening"],
)
def test_hours_of_a_day_are_over_its_mean(day: str, quiet_hours: range, busy_hours: range) -> None:
    """Nights have two fifths of the mean, the best hours one and a half times it or more."""
    shape = np.array(DAY_SHAPES[day])
    assert shape.mean() == pytest.approx(1.0, abs=0.04)
    quiet = shape[list(quiet_hours)].mean()
    busy = shape[list(busy_hours)].mean()
    assert 0.3 < quiet < 0.45
    assert 1.5 < busy < 1.75


def test_rates_span_the_day() -> None:
    load = make_load()
    rates = choose_rates(load.least_rate_per_s, load.most_rate_per_s)
    assert len(rates) == 8
    assert rates[0] == pytest.approx(4.0 * 0.31 * 24 / sum(DAY_SHAPES["office"]))
    assert rates[-1] == pytest.approx(4.0 * 1.72 * 24 / sum(DAY_SHAPES["office"]))
    assert np.ptp(np.diff(rates)) < 1e-12


def test_a_stretch_holds_thousands_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Stop(Exception):
        pass

    def stop(*_: object, seconds: float, **__: object) -> None:
        asked.append(seconds - 60.0)
        raise Stop

    monkeypatch.setattr("wattcast.timeseries.load_library.simulate", stop)
    for rate in (100.0, 5.0, 0.01):
        with pytest.raises(Stop):
            build_library(make_load("flat", rate), "h200", 1.0, 1)
    assert asked == [600.0, 800.0, 3600.0]


def test_a_stretch_begins_behind_the_start(library: LoadLibrary) -> None:
    """The engine is empty at first: the stretch has its mean power from its first second on."""
    busiest = library.stretches[-1]
    watts = busiest.bin_j.reshape(busiest.seconds, -1).sum(axis=-1)
    assert busiest.seconds == 120
    assert watts[:10].mean() == pytest.approx(watts.mean(), rel=0.1)
    assert HALL.warm_up_s == 60.0


def test_coefficients_decide_how_much_is_simulated(library: LoadLibrary) -> None:
    """Sizes kept the coefficients of the import: changed ones changed nothing."""
    assert len(library.stretches) == HALL.rates
    changed = LibrarySize()
    assert (changed.rates, changed.requests) == (HALL.rates, HALL.stretch_requests)
    assert changed.least_s == HALL.least_stretch_s


def test_a_stretch_belongs_to_the_arrivals_that_it_had(library: LoadLibrary) -> None:
    """Arrivals are drawn: 120 s at 1.24 a second may bring some percent more or fewer."""
    load = make_load()
    asked = choose_rates(load.least_rate_per_s, load.most_rate_per_s)
    for stretch, rate in zip(library.stretches, asked, strict=True):
        arrivals = stretch.rate_per_s * stretch.seconds
        assert arrivals == pytest.approx(round(arrivals), abs=1e-6)
        assert stretch.rate_per_s == pytest.approx(rate, abs=5 * (rate / stretch.seconds) ** 0.5)
        assert stretch.rate_per_s != rate


def test_power_and_work_rise_with_the_rate(library: LoadLibrary) -> None:
    watts = [stretch.figures["gpu_w"] for stretch in library.stretches]
    assert watts == sorted(watts)
    shares = [float(stretch.working.mean()) for stretch in library.stretches]
    assert shares == sorted(shares)
    middle = float(library.average("gpu_w", np.array([library.rates_per_s[:2].mean()]))[0])
    assert middle == pytest.approx((watts[0] + watts[1]) / 2)


def test_the_day_has_its_mean_and_its_shape() -> None:
    load = make_load()
    times_s = np.arange(86400.0)
    rates = rate_at(load, times_s)
    assert rates.mean() == pytest.approx(4.0, rel=1e-6)
    assert rate_at(load, np.array([14.5 * 3600.0]))[0] == pytest.approx(load.most_rate_per_s)
    assert rate_at(load, np.array([4.5 * 3600.0]))[0] == pytest.approx(load.least_rate_per_s)
    np.testing.assert_allclose(rate_at(load, np.array([0.0])), rate_at(load, np.array([86400.0])))


def test_blocks_follow_one_another() -> None:
    """Inside a block a second follows the one before it, until the stretch begins anew."""
    library = made_up_library()
    load = ServingLoad("llama3-8b", 2.0, 1, 1, 1, (1.0,) * 24, {})
    joules = np.zeros(2 * 86400)
    working = np.zeros(86400)
    draw = draw_blocks(library, load, (1, 0, 7), 86400)
    add_replica(library, draw, 0, joules, working)
    assert (working == 1.0).all()
    np.testing.assert_array_equal(joules[0::2], joules[1::2])
    steps = np.diff(joules[0::2])
    breaks = np.flatnonzero(steps != 1.0)
    # 288 blocks, and those in which a stretch of 400 s ends
    assert 288 <= len(breaks) <= 288 * 1.95
    assert set(np.diff(draw.begin_s).tolist()) == {300}
    # half of the blocks are of each rate, since the day asks for the middle
    assert np.mean(joules >= 3000.0) == pytest.approx(0.5, abs=0.1)


def test_any_part_of_a_day_is_the_same() -> None:
    library = made_up_library()
    load = make_load()
    whole = np.zeros(2 * 86400)
    draw = draw_blocks(library, load, (3, 1, 4), 86400)
    add_replica(library, draw, 0, whole, np.zeros(86400))
    for begin_s, seconds in ((0, 10), (299, 2), (43_211, 1234), (86_390, 10)):
        part = np.zeros(2 * seconds)
        add_replica(library, draw, begin_s, part, np.zeros(seconds))
        np.testing.assert_array_equal(part, whole[2 * begin_s : 2 * (begin_s + seconds)])


def test_replicas_differ_and_repeat() -> None:
    library = made_up_library()
    load = make_load()
    first = draw_blocks(library, load, (1, 0, 0), 86400)
    again = draw_blocks(library, load, (1, 0, 0), 86400)
    other = draw_blocks(library, load, (1, 0, 1), 86400)
    np.testing.assert_array_equal(first.offset, again.offset)
    assert not np.array_equal(first.offset[:10], other.offset[:10])
