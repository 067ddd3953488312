"""The study of suggestions: weights lie where work is, every way adds new rows, suggested ones are
worth more.
"""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.calibrate.row_suggestions import ModelOperator
from wattcast.cli.measure_bridges import _load_measured_rows
from wattcast.core.errors import WattcastError
from wattcast.lab.validate.long_checks import suggested_rows as suggesting
from wattcast.lab.validate.long_checks.suggested_rows import WAYS, Pool, pool_of, trial
from wattcast.workload.operator_types import Linear


@pytest.fixture(scope="module")
def pool() -> Pool:
    asked = [
        ModelOperator(Linear(4096, 4096, 4096), 0.7, "prefill"),
        ModelOperator(Linear(8, 4096, 4096), 0.3, "decode"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suggesting, "list_model_operators", lambda gpu, tell: asked)
        return pool_of("h200", 4)


def test_weights_lie_on_rows_like_the_work(pool: Pool) -> None:
    for share in (pool.share, pool.test_share):
        assert share.sum() == pytest.approx(1.0)
        assert (share >= 0).all()
    heaviest = pool.rows.ops[pool.bursts[int(np.argmax(pool.share))]]
    assert heaviest.name == "linear"
    assert set(pool.bursts.tolist()).isdisjoint(pool.test.tolist())
    assert not pool.other_kinds[pool.bursts].any()


def test_names_of_kernels_come_from_chosen_rows_alone(pool: Pool) -> None:
    assert not any(
        names
        for names, kind in zip(pool.rows.names, pool.rows.kind, strict=True)
        if kind != "burst"
    )


@pytest.mark.slow
def test_every_way_adds_rows_that_are_new(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[np.ndarray] = []

    def scored(_: Pool, some: np.ndarray) -> np.ndarray:
        chosen.append(some)
        return np.array([float(len(some)), float(pool.share[some].sum())])

    monkeypatch.setattr(suggesting, "scored", scored)
    found = trial(pool, 50, 0)
    assert set(found) == {(50, "start"), *((200, way) for way in WAYS)}
    for some in chosen:
        assert len(set(some.tolist())) == len(some)
        np.testing.assert_array_equal(some[:50], chosen[0])
    worth = {way: found[200, way][1] for way in WAYS}
    assert worth["suggested"] > 2 * worth["random"]
    assert worth["suggested"] > 2 * worth["farthest first"]


def test_a_gpu_without_a_database_begins_with_none() -> None:
    said: list[str] = []
    assert len(_load_measured_rows("h100-sxm", "h100-sxm", said.append)) == 0
    assert "nothing was measured" in said[0]
    with pytest.raises(WattcastError):
        _load_measured_rows("h100-sxm", "no-such-folder", said.append)


@pytest.mark.slow
def test_suggested_rows_beat_random_ones_for_real_models() -> None:
    found = {
        r["quantity"]: r
        for r in suggesting.suggest_rows("h200", lambda _: None)
        if "real models" in r["set"]
    }
    for start in suggesting.STARTS:
        row = found[f"{start} rows grown to {4 * start}, suggested"]
        assert row["mape"] < 0.9 * row["floor"]
