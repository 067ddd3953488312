"""What workers are sent: what decides results, and no more."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.contracts.power_examples import example_models

from wattcast.explore import study as study_module
from wattcast.explore.study import (
    Columns,
    Study,
    analyse_points,
    pack_value,
    tabulate_points,
    unpack_value,
)
from wattcast.power.power_model import PowerModel
from wattcast.predictor.timeline import Timeline
from wattcast.workload.graph import count_operators


def test_a_used_study_ships_no_more_than_a_fresh_one(study: Study) -> None:
    """A bundle keeps what it worked out; once every part that went to a cluster took all of it
    along.
    """
    tabulate_points(study, 0, 1)  # reads the learned factors that the study asks for
    fresh = len(pickle.dumps(study))
    tabulate_points(study, 0, 200)
    kept = len(pickle.dumps(study.bundle))
    used = len(pack_value(study))
    assert used <= 1.01 * fresh
    assert used < 0.25 * kept


def test_an_unpacked_study_is_the_same_study(study: Study) -> None:
    tabulate_points(study, 0, 200)
    unpack_value.cache_clear()
    again = pickle.loads(pickle.dumps(study))
    assert again is not study
    assert again.digest() == study.digest()
    assert again.bundle.learned.reference is again.bundle.reference
    found, wanted = (
        tabulate_points(again, 0, study.space.size),
        tabulate_points(study, 0, study.space.size),
    )
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert np.array_equal(found[name], values), name


@pytest.mark.parametrize("model", example_models().values(), ids=lambda model: model.kind)
def test_every_power_model_travels(study: Study, model: PowerModel) -> None:
    with_it = replace(study, bundle=replace(study.bundle, power=model))
    unpack_value.cache_clear()
    assert pickle.loads(pickle.dumps(with_it)).digest() == with_it.digest() != study.digest()


def test_a_worker_that_gets_a_study_again_goes_on_with_what_it_has(study: Study) -> None:
    assert pickle.loads(pickle.dumps(study)) is pickle.loads(pickle.dumps(study))


@pytest.mark.parametrize(("governed_from", "collected_to"), [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)])
def test_points_are_the_same_however_many_of_a_chunk_exceed_the_limit(
    study: Study, monkeypatch: pytest.MonkeyPatch, governed_from: float, collected_to: float
) -> None:
    """Whole chunks go through the governor, only the points that exceed the limit, or those of
    several chunks together.
    """
    limited = replace(study, settings=replace(study.settings, power_limit_w=450.0))
    wanted = tabulate_points(limited, 0, 40)
    assert 0 < wanted["capped"].sum() < 40
    monkeypatch.setattr(study_module, "_MOSTLY_OVER", governed_from)
    monkeypatch.setattr(study_module, "_FEW_OVER", collected_to)
    found = tabulate_points(limited, 0, 40)
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, err_msg=name)


def test_points_over_the_limit_are_laid_out_once(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = replace(study, settings=replace(study.settings, power_limit_w=450.0))
    sizes = []

    def count_points(study: Study, columns: Columns, *others: Any) -> Timeline:
        sizes.append(len(next(iter(columns.values()))))
        return analyse_points(study, columns, *others)

    monkeypatch.setattr(study_module, "analyse_points", count_points)
    assert 0 < tabulate_points(limited, 0, 40)["capped"].sum() < 20
    assert sizes == [40]


def test_chunks_are_of_one_size(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one at the end costs as many calls as a large one."""
    monkeypatch.setattr(study_module, "CELLS", 15 * len(count_operators(study.graph)))
    sizes = []

    def count_points(study: Study, columns: Columns, *others: Any) -> Timeline:
        sizes.append(len(next(iter(columns.values()))))
        return analyse_points(study, columns, *others)

    monkeypatch.setattr(study_module, "analyse_points", count_points)
    tabulate_points(study, 0, 40)
    assert sizes == [14, 14, 12]
