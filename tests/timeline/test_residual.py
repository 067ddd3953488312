"""Learned factors: smooth between what was measured, held within its range, the same for a batch."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.errors import WattcastError
from wattcast.fit.kriging import fit_kriging
from wattcast.timeline.kriging import Kriging
from wattcast.timeline.residual import Features, Learned, Wanted


@pytest.fixture(scope="module")
def fitted() -> tuple[Kriging, dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    columns = {"a": rng.uniform(0, 4, 200), "b": rng.uniform(0, 4, 200), "noise": rng.normal(size=200)}
    target = np.sin(columns["a"]) + 0.3 * columns["b"]
    return fit_kriging(columns, target), columns, target


def test_it_learns_what_is_there_and_leaves_noise_alone(fitted) -> None:
    model, _, _ = fitted
    rng = np.random.default_rng(4)
    fresh = {"a": rng.uniform(0.3, 3.7, 100), "b": rng.uniform(0.3, 3.7, 100), "noise": rng.normal(size=100)}
    error = model(fresh) - (np.sin(fresh["a"]) + 0.3 * fresh["b"])
    assert np.abs(error).mean() < 0.1


def test_far_away_it_returns_to_its_mean(fitted) -> None:
    model, _, _ = fitted
    far = model({"a": np.array([1e4]), "b": np.array([-1e4]), "noise": np.array([0.0])})
    assert_allclose(far, model.mean, atol=1e-3)


def test_it_survives_being_saved(fitted) -> None:
    model, columns, _ = fitted
    back = Kriging.from_arrays(model.to_arrays("x"), "x")
    assert_allclose(back(columns), model(columns), atol=1e-3)


def test_factors_are_held_within_the_range_seen(fitted) -> None:
    model, columns, _ = fitted
    learned = Learned(None, model, -0.1, 0.2)
    factor = learned(Features(columns, 200), np.arange(200))
    assert factor.min() == pytest.approx(np.exp(-0.1))
    assert factor.max() == pytest.approx(np.exp(0.2))


def test_a_kind_of_kernel_that_is_absent_counts_as_none(fitted) -> None:
    model, columns, _ = fitted
    learned = Learned(None, model, -9.0, 9.0)
    without = {name: values for name, values in columns.items() if name != "noise"}
    zero = {**columns, "noise": np.zeros(200)}
    rows = np.arange(200)
    assert_allclose(learned(Features(without, 200), rows), learned(Features(zero, 200), rows))


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(WattcastError, match="kriging"):
        Kriging(("a",), np.ones(1), np.ones((3, 2)), np.ones(3), 0.0, 1.0)


def test_a_kind_that_was_not_measured_counts_as_the_one_above_it() -> None:
    named = {"is cat": np.array([0.0, 1.0, 0.0]), "is cat.append": np.array([0.5, 0.0, 1.0])}
    found = Features(named, 3).columns(Wanted(["is cat", "size"]), np.array([0, 2]))
    assert_allclose(found, [[0.5, 0.0], [1.0, 0.0]])


@pytest.mark.parametrize("rows", [1, 7, 9, 40])
def test_a_few_rows_at_a_time_are_all_rows(rows: int) -> None:
    rng = np.random.default_rng(rows)
    points, asked = rng.normal(size=(2500, 5)), rng.normal(size=(rows, 5))
    model = Kriging(tuple("abcde"), rng.uniform(0.5, 2.0, 5), points, rng.normal(size=2500), 0.3, 2.0)
    distance = np.linalg.norm((asked * model.scale)[:, np.newaxis] - points, axis=-1)
    plain = model.mean + (model.variance * np.exp(-distance)) @ model.alpha
    assert_allclose(model(dict(zip("abcde", asked.T, strict=True))), plain, rtol=1e-9, atol=1e-9)
