"""A fitted ensemble says the same as scikit-learn, from plain arrays alone."""

from __future__ import annotations

import io

import numpy as np
import pytest
from numpy.testing import assert_allclose

from wattcast.core.errors import BadInput
from wattcast.core.tree_ensemble import TreeEnsemble


@pytest.fixture(scope="module")
def data() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(3)
    columns = {"a": rng.uniform(0, 10, 400), "b": rng.normal(size=400)}
    return columns, np.sin(columns["a"]) + 0.3 * columns["b"]


@pytest.fixture(scope="module")
def forest(data) -> TreeEnsemble:
    pytest.importorskip("sklearn", reason="fitting trees needs scikit-learn")
    from wattcast.calibrate.latency_fit import fit_trees

    columns, target = data
    return fit_trees(tuple(columns), stack(columns), target)


def stack(columns: dict[str, np.ndarray]) -> np.ndarray:
    return np.stack(list(columns.values()), axis=-1)


def test_it_equals_the_library_it_came_from(data) -> None:
    sklearn = pytest.importorskip("sklearn.ensemble")
    from wattcast.calibrate.latency_fit import _export_trees

    columns, target = data
    rows = stack(columns)
    model = sklearn.HistGradientBoostingRegressor(max_iter=40, max_leaf_nodes=9).fit(rows, target)
    found = _export_trees(model, tuple(columns)).sum_trees(rows)
    assert_allclose(found, model.predict(rows), rtol=1e-12, atol=1e-12)


def test_it_learns(forest: TreeEnsemble, data) -> None:
    columns, target = data
    off = np.abs(forest.sum_trees(stack(columns)) - target)
    assert off.mean() < 0.25 * np.abs(target - np.median(target)).mean()


def test_rows_do_not_mix(forest: TreeEnsemble, data) -> None:
    rows = stack(data[0])
    parts = [forest.sum_trees(part) for part in np.split(rows, 20)]
    assert_allclose(np.concatenate(parts), forest.sum_trees(rows), rtol=0)
    assert forest.sum_trees(np.array([[3.0, 0.5]])).shape == (1,)


def test_it_survives_a_file_without_pickles(forest: TreeEnsemble, data) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **forest.to_arrays("gemm"))
    buffer.seek(0)
    back = TreeEnsemble.from_arrays(np.load(buffer, allow_pickle=False), "gemm")
    rows = stack(data[0])
    assert (back.sum_trees(rows) == forest.sum_trees(rows)).all()


def test_arrays_that_point_nowhere_are_refused(forest: TreeEnsemble) -> None:
    arrays = forest.to_arrays("x")
    with pytest.raises(BadInput, match="exist"):
        TreeEnsemble.from_arrays(arrays | {"x.left": np.where(arrays["x.left"] > 0, 10**6, 0)}, "x")
    with pytest.raises(BadInput, match="finite"):
        TreeEnsemble.from_arrays(arrays | {"x.value": np.full_like(arrays["x.value"], np.nan)}, "x")


@pytest.mark.parametrize(("trees", "depth"), [(1, 0), (3, 1), (20, 3), (5, 6)])
def test_trees_answered_at_once_are_the_trees_walked(trees: int, depth: int) -> None:
    """Random trees, some branches cut short; the last have too many leaves to be answered at once."""
    rng = np.random.default_rng(depth)
    nodes = 2 ** (depth + 1) - 1
    itself = np.broadcast_to(np.arange(nodes, dtype=np.int32), (trees, nodes))
    inner = (rng.random((trees, nodes)) < 0.8) & (itself < nodes // 2)
    left, right = np.where(inner, 2 * itself + 1, itself), np.where(inner, 2 * itself + 2, itself)
    feature = rng.integers(0, 2, (trees, nodes), dtype=np.int32)
    made = rng.normal(size=(2, trees, nodes))
    forest = TreeEnsemble(("a", "b"), 0.5, feature, made[0].round(1), left, right, made[1])
    rows = rng.normal(size=(200, 2)).round(1)  # some on a threshold
    few = [forest.sum_trees(rows[i : i + 5]) for i in range(0, 200, 5)]
    assert_allclose(np.concatenate(few), forest.sum_trees(rows), rtol=1e-12)
    many = forest.sum_trees(np.tile(rows, (6, 1)))  # by masks of leaves, where trees are small
    assert (many == np.tile(forest.sum_trees(rows), 6)).all()
    assert forest.sum_trees(rows[:0]).shape == (0,)
    for row, found in zip(rows, forest.sum_trees(rows), strict=True):
        total = 0.5
        for t in range(trees):
            node = 0
            while inner[t, node]:
                node = (
                    left[t, node]
                    if row[feature[t, node]] <= forest.threshold[t, node]
                    else right[t, node]
                )
            total += forest.value[t, node]
        assert found == pytest.approx(total, rel=1e-12)
