"""Learning curves: the law is found again, subsets are nested, results are kept, and the limit is
named rightly.
"""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.calibrate import kernel_rows
from wattcast.calibrate.kernel_rows import KernelRows, assign_folds, shape_name
from wattcast.lab.validate.long_checks import learning_curves as learning
from wattcast.lab.validate.long_checks.learning_curves import (
    Curve,
    LearningCurve,
    PowerLaw,
    draw_learning_curves,
    fit_learning_curve,
    fit_power_law,
)


@pytest.fixture(scope="module")
def rows() -> KernelRows:
    """Every fifth row: enough of every family."""
    whole = kernel_rows.load_kernel_rows("h200")
    return whole.select_rows(np.arange(len(whole)) % 5 == 0)


@pytest.fixture
def kept(tmp_path: object) -> dict[str, str]:
    return {"WATTCAST_CACHE": str(tmp_path)}


@pytest.mark.parametrize(
    ("floor", "scale", "rate"), [(4.0, 60.0, 0.5), (0.0, 40.0, 0.3), (9.0, 200.0, 1.0)]
)
def test_a_law_is_found_again(floor: float, scale: float, rate: float) -> None:
    count = np.array([50.0, 100.0, 200.0, 400.0, 800.0])
    law = fit_power_law(count, floor + scale * count**-rate)
    assert law.rate == pytest.approx(rate, abs=0.03)
    assert law.at(1600.0) == pytest.approx(floor + scale * 1600.0**-rate, rel=0.01)


def test_an_error_that_does_not_fall_is_all_floor() -> None:
    law = fit_power_law(np.array([50.0, 100.0, 200.0]), np.array([7.0, 7.0, 7.0]))
    assert law.at(1e6) == pytest.approx(7.0, rel=1e-6)


def test_an_error_that_rises_is_not_extrapolated_upwards() -> None:
    law = fit_power_law(np.array([50.0, 100.0, 200.0]), np.array([6.0, 7.0, 8.0]))
    assert law.scale == 0.0
    assert 6.0 < law.floor < 8.0


def test_intervals_hold_the_truth_and_narrow_with_rows() -> None:
    rng = np.random.default_rng(3)
    count = np.array([50.0, 100.0, 200.0, 400.0, 800.0])
    mean = 3.0 + 50.0 * count**-0.5

    def from_rows(n: int) -> LearningCurve:
        return fit_learning_curve(
            count, mean * rng.exponential(1.0, (n, 1)) * rng.lognormal(0, 0.3, (n, 5)), np.arange(n)
        )

    few, many = from_rows(60), from_rows(4000)
    truth = 3.0 + 50.0 * 1600.0**-0.5
    assert many.doubled_ends[0] < truth * np.exp(0.5 * 0.3**2) < many.doubled_ends[1]
    assert np.ptp(many.doubled_ends) < 0.4 * np.ptp(few.doubled_ends)


def test_subsets_are_nested_and_keep_shapes_whole(rows: KernelRows) -> None:
    place = learning.nested(rows, 0, 1)
    assert ((place >= 0) & (place < 1)).all()
    of: dict[str, set[float]] = {}
    for op, at in zip(rows.ops, place.tolist(), strict=True):
        of.setdefault(shape_name(op), set()).add(at)
    assert all(len(at) == 1 for at in of.values())
    assert (place < 1 / 8).mean() == pytest.approx(1 / 8, abs=0.04)
    assert not np.array_equal(place, learning.nested(rows, 0, 0))


def made_up(rows: KernelRows, floor: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A fit whose error follows a law of the training rows; returns the sizes it was called with."""
    called: list[int] = []

    def fitted(chip: object, idle: object, train: KernelRows, test: KernelRows) -> np.ndarray:
        called.append(len(train))
        off = 1.0 + floor + 2.0 * len(train) ** -0.5
        power_w, clock_hz, latency_s = learning.settled_figures(test)
        return np.column_stack([latency_s * off, power_w * off, clock_hz])

    monkeypatch.setattr(learning, "_fitted", fitted)
    monkeypatch.setattr(learning.kernel_rows, "load_kernel_rows", lambda _: rows)
    monkeypatch.setattr(learning, "measurement_noise", lambda _: {("burst", "all"): 0.5})
    return called


@pytest.mark.slow
def test_curves_show_the_law_and_are_made_once(
    rows: KernelRows, kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = made_up(rows, 0.05, monkeypatch)
    said: list[str] = []
    found = {(c.quantity, c.family): c for c in learning.curves("h200", kept, said.append)}
    assert len(called) == learning.ORDERS * 5 * len(learning.SHARES) - 5 * (learning.ORDERS - 1)
    assert len(said) == len(called)
    whole = found["latency", "all"]
    assert whole.law.law.floor == pytest.approx(5.0, abs=0.5)  # rates are on a grid
    assert whole.law.doubled == pytest.approx(
        5.0 + 200.0 * (2 * max(called)) ** -0.5, rel=0.02
    )  # subsets vary in size
    assert whole.law.law.rate == pytest.approx(0.5, abs=0.06)
    assert (np.diff(whole.rows) > 0).all()
    assert (np.diff(whole.error) < 0).all()
    assert found["power", "all"].tested < whole.tested
    assert sum(c.tested for key, c in found.items() if key[0] == "latency") == 2 * whole.tested
    again = learning.curves("h200", kept, said.append)
    assert len(said) == len(called)  # kept: nothing was made
    assert again[0].error == pytest.approx(whole.error)
    figure = draw_learning_curves(again, "h200")
    assert len([axes for axes in figure.axes if axes.get_visible()]) == 8
    assert figure.axes[0].get_ylabel() == "Held-out error (%)"


def test_training_rows_never_have_a_held_out_shape(
    rows: KernelRows, kept: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = assign_folds(rows)

    def predict(train: KernelRows, test: KernelRows) -> np.ndarray:
        assert not {shape_name(op) for op in train.ops} & {shape_name(op) for op in test.ops}
        return np.ones((len(test), 3))

    assert len(learning._one(rows, fold, 2, 0, predict, lambda _: None)) == len(learning.SHARES)


def curve(error: float, noise: float | None, buys: tuple[float, float]) -> Curve:
    law = LearningCurve(
        PowerLaw(1.0, 1.0, 0.5), (0.0, 2.0), error, (0.0, error), float(np.mean(buys)), buys
    )
    count = np.array([1.0, 2.0])
    return Curve(
        "latency", "gemm", 10, count, np.array([2 * error, error]), np.zeros(2), law, noise
    )


@pytest.mark.parametrize(
    ("error", "noise", "buys", "limit"),
    [
        (1.0, 0.7, (0.1, 0.2), "noise"),
        (8.0, 0.7, (0.1, 0.2), "rows"),
        (8.0, None, (0.01, 0.05), "model"),
        (8.0, 0.7, (0.01, 0.2), "rows or model"),
    ],
)
def test_the_limit_is_named(
    error: float, noise: float | None, buys: tuple[float, float], limit: str
) -> None:
    assert curve(error, noise, buys).limited_by == limit
