"""The Pareto front against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattcast.core import arrays


def by_definition(points: np.ndarray) -> set[tuple[float, ...]]:
    return {tuple(p) for p in points if not any((q <= p).all() and (q < p).any() for q in points)}


@pytest.mark.parametrize("objectives", [2, 3, 4])
@given(data=st.data())
def test_the_front_is_what_nothing_beats(objectives: int, data) -> None:
    row = st.lists(st.integers(0, 5), min_size=objectives, max_size=objectives)
    points = np.array(data.draw(st.lists(row, min_size=1, max_size=40)), dtype=float)
    rows = arrays.pareto_front(points)
    assert {tuple(p) for p in points[rows]} == by_definition(points)
    assert len(rows) == len(by_definition(points))
    assert (np.diff(points[rows][:, 0]) >= 0).all()


def test_of_equal_points_the_first_and_the_same_after_splitting() -> None:
    rng = np.random.default_rng(0)
    columns = {
        "point": np.arange(500),
        "a": rng.integers(0, 50, 500) * 1.0,
        "b": rng.integers(0, 50, 500) * 1.0,
    }
    whole = arrays.pareto_rows(columns, ("a", "b"))
    halves = [{k: v[s] for k, v in columns.items()} for s in (slice(0, 250), slice(250, 500))]
    fronts = [arrays.pareto_rows(half, ("a", "b")) for half in halves]
    joined = {k: np.concatenate([f[k] for f in fronts]) for k in columns}
    assert arrays.pareto_rows(joined, ("a", "b"))["point"].tolist() == whole["point"].tolist()
