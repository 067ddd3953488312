"""Learned factors: smooth between what was measured, held within its range, the same for a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.calibrate.latency_fit import fit_gaussian_process
from wattcast.core.errors import WattcastError
from wattcast.core.tree_ensemble import TreeEnsemble
from wattcast.predictor.gaussian_process import GaussianProcess
from wattcast.predictor.learned_factors import LearnedFactor, evaluate_factors


def factors(
    model: LearnedFactor, named: dict[str, np.ndarray], learners: tuple[str, ...] = ()
) -> np.ndarray:
    """Of kernels with these features, all of the model's family unless said otherwise."""
    count = len(next(iter(named.values())))
    return evaluate_factors({"gemm": model}, learners or ("gemm",) * count, named)[0]


def predict(
    model: GaussianProcess, columns: Mapping[str, Sequence[float] | np.ndarray]
) -> np.ndarray:
    """Return the mean of a process for each row of named columns."""
    rows = np.stack(
        [np.asarray(columns[name], dtype=np.float64) for name in model.features], axis=-1
    )
    return model.predict_rows(rows, np.empty(len(rows)))


@pytest.fixture(scope="module")
def fitted() -> tuple[GaussianProcess, dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    columns = {
        "a": rng.uniform(0, 4, 200),
        "b": rng.uniform(0, 4, 200),
        "noise": rng.normal(size=200),
    }
    target = np.sin(columns["a"]) + 0.3 * columns["b"]
    rows = np.stack(list(columns.values()), axis=-1)
    return fit_gaussian_process(tuple(columns), rows, target), columns, target


def test_it_learns_what_is_there_and_leaves_noise_alone(fitted) -> None:
    model, _, _ = fitted
    rng = np.random.default_rng(4)
    fresh = {
        "a": rng.uniform(0.3, 3.7, 100),
        "b": rng.uniform(0.3, 3.7, 100),
        "noise": rng.normal(size=100),
    }
    error = predict(model, fresh) - (np.sin(fresh["a"]) + 0.3 * fresh["b"])
    assert np.abs(error).mean() < 0.1


def test_far_away_it_returns_to_its_mean(fitted) -> None:
    model, _, _ = fitted
    far = predict(model, {"a": np.array([1e4]), "b": np.array([-1e4]), "noise": np.array([0.0])})
    assert_allclose(far, model.mean, atol=1e-3)


def test_it_survives_being_saved(fitted) -> None:
    model, columns, _ = fitted
    back = GaussianProcess.from_arrays(model.to_arrays("x"), "x")
    assert_allclose(predict(back, columns), predict(model, columns), atol=1e-3)


def test_factors_are_held_within_the_range_seen(fitted) -> None:
    model, columns, _ = fitted
    learned = LearnedFactor(None, model, -0.1, 0.2)
    factor = factors(learned, columns)
    assert factor.min() == pytest.approx(np.exp(-0.1))
    assert factor.max() == pytest.approx(np.exp(0.2))


def test_a_kind_of_kernel_that_is_absent_counts_as_none(fitted) -> None:
    model, columns, _ = fitted
    learned = LearnedFactor(None, model, -9.0, 9.0)
    without = {name: values for name, values in columns.items() if name != "noise"}
    zero = {**columns, "noise": np.zeros(200)}
    assert_allclose(factors(learned, without), factors(learned, zero))


def test_kernels_that_nobody_learned_of_keep_a_factor_of_one_and_others_their_places(
    fitted,
) -> None:
    model, columns, _ = fitted
    learned = LearnedFactor(None, model, -9.0, 9.0)
    learners = tuple("other" if i % 3 == 0 else "gemm" for i in range(200))
    found, near = evaluate_factors({"gemm": learned}, learners, columns)
    known = np.arange(200) % 3 > 0
    assert_allclose(found[known], factors(learned, columns)[known], rtol=1e-12)
    assert (found[~known] == 1.0).all()
    assert np.isnan(near[~known]).all()
    assert_allclose(near[known], 1.0, atol=1e-6)  # they are the rows it was fitted on


def test_a_point_measured_twice_counts_twice() -> None:
    """The two lie in one place: what they add is added up."""
    points, alpha = np.array([[0.0, 1.0], [2.0, 0.0], [0.0, 1.0]]), np.array([3.0, 1.0, -1.0])
    model = GaussianProcess(("a", "b"), np.ones(2), points, alpha, 0.5, 2.0)
    distance = np.hypot(*(np.array([1.0, 1.0]) - points).T)
    found = predict(model, {"a": [1.0], "b": [1.0]})
    assert_allclose(found, 0.5 + 2.0 * (np.exp(-distance) @ alpha), rtol=1e-12)


def test_trees_and_process_may_read_other_columns(fitted) -> None:
    """Trees that read a column the process does not, in front of the others."""
    model, columns, _ = fitted
    split = {
        "feature": [[0]],
        "left": [[0]],
        "right": [[0]],
        "threshold": [[0.0]],
        "value": [[0.0]],
    }
    leaf = {f"x.{name}": np.array(value) for name, value in split.items()}
    trees = TreeEnsemble.from_arrays(leaf | {"x.features": ["c", "a"], "x.base": 0.1}, "x")
    found = factors(
        LearnedFactor(trees, model, -9.0, 9.0), {"b": columns["b"], "c": columns["a"], **columns}
    )
    assert_allclose(found, np.exp(0.4 * 0.1 + 0.6 * predict(model, columns)), rtol=1e-12)


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(WattcastError, match="kriging"):
        GaussianProcess(("a",), np.ones(1), np.ones((3, 2)), np.ones(3), 0.0, 1.0)


def test_a_kind_that_was_not_measured_counts_as_the_one_above_it() -> None:
    named = {"is cat": np.array([0.0, 1.0, 0.0]), "is cat.append": np.array([0.5, 0.0, 1.0])}
    process = GaussianProcess(
        ("is cat", "size"), np.ones(2), np.zeros((1, 2)), np.ones(1), 0.0, 1.0
    )
    found = factors(LearnedFactor(None, process, -1.0, 1.0), named, ("gemm", "other", "gemm"))
    assert_allclose(
        found[[0, 2]], np.exp(predict(process, {"is cat": [0.5, 1.0], "size": [0.0, 0.0]}))
    )


@pytest.mark.parametrize("rows", [1, 7, 9, 40])
def test_a_few_rows_at_a_time_are_all_rows(rows: int) -> None:
    rng = np.random.default_rng(rows)
    points, asked = rng.normal(size=(2500, 5)), rng.normal(size=(rows, 5))
    model = GaussianProcess(
        tuple("abcde"), rng.uniform(0.5, 2.0, 5), points, rng.normal(size=2500), 0.3, 2.0
    )
    distance = np.linalg.norm((asked * model.scale)[:, np.newaxis] - points, axis=-1)
    plain = model.mean + (model.variance * np.exp(-distance)) @ model.alpha
    assert_allclose(
        predict(model, dict(zip("abcde", asked.T, strict=True))), plain, rtol=1e-9, atol=1e-9
    )


def test_a_measured_row_alone_is_the_row_among_others() -> None:
    """Its distance to its own point is what rounding leaves, and a product of one row rounded
    otherwise.
    """
    rng = np.random.default_rng(6)
    points = rng.normal(size=(800, 20)).astype(np.float32).astype(np.float64)
    model = GaussianProcess(
        tuple(map(str, range(20))), np.ones(20), points, rng.normal(size=800), 0.3, 2.0
    )
    near = np.empty(40)
    among = model.predict_rows(points[:40], near)
    alone = [model.predict_rows(points[i : i + 1], near[i : i + 1])[0] for i in range(40)]
    assert_allclose(among, alone, rtol=1e-12)


def test_many_rows_in_threads_are_few_rows_one_after_another(fitted) -> None:
    """A million distinct operators took minutes on one core; columns that are equal in many rows
    are left out.
    """
    process, columns, _ = fitted
    models, rng = {"gemm": LearnedFactor(None, process, -9.0, 9.0)}, np.random.default_rng(5)
    many = {name: rng.uniform(0.0, 4.0, 9_000) for name in process.features}
    many[process.features[1]][:] = 2.0
    for name, values in many.items():
        values[0] = columns[name][0]
    factor, near = evaluate_factors(models, ("gemm",) * 9_000, many)
    few = [
        {name: values[i : i + 500] for name, values in many.items()} for i in range(0, 9_000, 500)
    ]
    some = np.concatenate([evaluate_factors(models, ("gemm",) * 500, part) for part in few], axis=1)
    assert_allclose(factor, some[0], rtol=1e-9)
    assert_allclose(
        np.log(near) ** 2, np.log(some[1]) ** 2, rtol=1e-9, atol=1e-12
    )  # squares of distances
