"""What every registered power model must hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml
from numpy.testing import assert_allclose

from wattcast.activity import Activity, Source, events, merge, split
from wattcast.energy import energy_j
from wattcast.errors import MissingEvents
from wattcast.hardware import OperatingPoint
from wattcast.power import Power, PowerModel, kind_of, kinds

RTOL = 1e-12


@pytest.fixture(params=sorted(kinds()))
def model(request: pytest.FixtureRequest) -> PowerModel:
    return kind_of(request.param).example()


@pytest.fixture
def activity(model: PowerModel) -> Activity:
    rng = np.random.default_rng(7)
    names = model.required_events
    scale = np.array([0.5 if events()[name].is_mean else 1e9 for name in names])
    return Activity(
        duration_s=rng.uniform(1e-5, 1e-3, (3, 5)),
        value=rng.uniform(0.1, 1.0, (3, 5, len(names))) * scale,
        events=names,
        at=OperatingPoint(
            clock_hz=rng.uniform(0.6e9, 1.9e9, (3, 1)), memory_clock_hz=rng.uniform(0.8e9, 3e9, (3, 1))
        ),
        source=Source.PROFILED,
    )


def member(activity: Activity, row: int) -> Activity:
    def of(setting: object) -> object:
        return np.asarray(setting)[row] if np.ndim(setting) else setting

    at = activity.at
    point = OperatingPoint(of(at.clock_hz), None, of(at.temperature_c), of(at.memory_clock_hz))
    return replace(activity, duration_s=activity.duration_s[row], value=activity.value[row], at=point)


def total_j(model: PowerModel, activity: Activity) -> np.ndarray:
    return energy_j(model.power(activity), activity.duration_s).sum(axis=-1)


def test_a_batch_equals_its_members(model: PowerModel, activity: Activity) -> None:
    batch = model.power(activity).part_w
    for row in range(3):
        assert_allclose(batch[row], model.power(member(activity, row)).part_w, rtol=RTOL)


def test_shuffling_intervals_changes_nothing(model: PowerModel, activity: Activity) -> None:
    order = [3, 0, 4, 2, 1]
    shuffled = replace(activity, duration_s=activity.duration_s[:, order], value=activity.value[:, order])
    assert_allclose(model.power(shuffled).part_w, model.power(activity).part_w[:, order], rtol=RTOL)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_splitting_an_interval_keeps_its_energy(model: PowerModel, activity: Activity, share: float) -> None:
    assert_allclose(total_j(model, split(activity, share)), total_j(model, activity), rtol=RTOL)


def test_merging_at_one_clock_keeps_the_energy(model: PowerModel, activity: Activity) -> None:
    steady = replace(activity, duration_s=np.full((3, 5), 1e-3))
    assert_allclose(total_j(model, merge(steady)), total_j(model, steady), rtol=1e-9)


def test_parts_sum_to_the_total_and_are_named(model: PowerModel, activity: Activity) -> None:
    power: Power = model.power(activity)
    assert power.parts == model.parts
    assert power.part_w.shape == (3, 5, len(power.parts))
    assert_allclose(power.part_w.sum(axis=-1), power.total_w, rtol=RTOL)
    assert np.isfinite(power.part_w).all()


def test_no_work_costs_static_power_only(model: PowerModel, activity: Activity) -> None:
    idle = replace(activity, value=np.zeros_like(activity.value))
    assert (model.power(idle).total_w >= 0).all()
    assert (model.power(idle).total_w <= model.power(activity).total_w * (1 + RTOL)).all()


def test_an_interval_of_no_duration_costs_nothing(model: PowerModel, activity: Activity) -> None:
    empty = replace(activity, duration_s=np.zeros_like(activity.duration_s), value=np.zeros_like(activity.value))
    assert (total_j(model, empty) == 0).all()


def test_inputs_are_untouched(model: PowerModel, activity: Activity) -> None:
    before = activity.value.copy(), activity.duration_s.copy()
    model.power(activity)
    assert (activity.value == before[0]).all()
    assert (activity.duration_s == before[1]).all()


def test_a_missing_event_is_named(model: PowerModel, activity: Activity) -> None:
    if not model.required_events:
        pytest.skip("this model needs no events")
    gone = model.required_events[0]
    blind = replace(activity, value=activity.value[..., 1:], events=activity.events[1:])
    with pytest.raises(MissingEvents, match=gone):
        model.power(blind)


def test_it_survives_a_round_trip_through_yaml(model: PowerModel, activity: Activity) -> None:
    kind = next(kind for kind in kinds().values() if type(kind.example()) is type(model))
    back = kind.from_plain(yaml.safe_load(yaml.safe_dump(model.to_plain())))
    assert (back.power(activity).part_w == model.power(activity).part_w).all()
