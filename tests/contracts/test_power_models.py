"""What every registered power model must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from numpy.testing import assert_allclose
from power_examples import example_models

from wattcast.core.arrays import Sweepable
from wattcast.core.errors import BadInput, MissingEvents
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.power import Power, PowerModel, power_model_kind, power_model_kinds
from wattcast.power.activity import Activity, ActivitySource, known_events
from wattcast.power.power_model import interval_energy_j, stack_parts
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_graph, detail_at_clock, total_at_clock
from wattcast.workload.graph import Graph
from wattcast.workload.operator_types import Linear

RTOL = 1e-12


@dataclass(frozen=True)
class RooflinePower(PowerModel):
    """A made-up model, as a contributor's file holds it: watts per share of a peak rate, and
    nothing else.

    What predictions, factors and forecasts ask beyond this comes from ``PowerModel``.
    """

    kind: ClassVar[str] = "made_up_roofline"
    idle_w: float
    full_w: float
    peak_byte_per_s: float

    @property
    def required_events(self) -> tuple[str, ...]:
        return ("dram_read_byte",)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("idle", "memory")

    def power(self, activity: Activity) -> Power:
        activity.require(self.required_events, "roofline power")
        busy = activity.rate("dram_read_byte") / self.peak_byte_per_s
        return stack_parts(activity, [np.asarray(self.idle_w), self.full_w * busy], self.parts)

    def to_plain(self) -> dict[str, Any]:
        return vars(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RooflinePower:
        return cls(**plain)


MODELS = {**example_models(), RooflinePower.kind: RooflinePower(60.0, 200.0, 4e12)}


def test_every_kind_has_an_example() -> None:
    assert set(MODELS) >= set(power_model_kinds())


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> PowerModel:
    return MODELS[request.param]


@pytest.fixture
def activity(model: PowerModel) -> Activity:
    rng = np.random.default_rng(7)
    names = model.required_events
    scale = np.array([0.5 if known_events()[name].is_mean else 1e9 for name in names])
    return Activity(
        duration_s=rng.uniform(1e-5, 1e-3, (3, 5)),
        value=rng.uniform(0.1, 1.0, (3, 5, len(names))) * scale,
        events=names,
        at=OperatingPoint(
            clock_hz=rng.uniform(0.6e9, 1.9e9, (3, 1)),
            memory_clock_hz=rng.uniform(0.8e9, 3e9, (3, 1)),
        ),
        source=ActivitySource.PROFILED,
    )


def member(activity: Activity, row: int) -> Activity:
    def of(setting: object) -> object:
        return np.asarray(setting)[row] if np.ndim(setting) else setting

    at = activity.at
    point = OperatingPoint(of(at.clock_hz), None, of(at.temperature_c), of(at.memory_clock_hz))
    return replace(
        activity, duration_s=activity.duration_s[row], value=activity.value[row], at=point
    )


def total_j(model: PowerModel, activity: Activity) -> np.ndarray:
    return interval_energy_j(model.power(activity), activity.duration_s).sum(axis=-1)


def merge_intervals(activity: Activity) -> Activity:
    """Return all intervals as one: counts add up, means are weighted by duration."""
    known = known_events()
    total_s = activity.duration_s.sum(axis=-1, keepdims=True)
    weight = np.divide(
        activity.duration_s,
        total_s,
        out=np.zeros_like(activity.duration_s, dtype=float),
        where=total_s > 0,
    )
    is_mean = np.array([known[name].is_mean for name in activity.events])
    summed = np.where(
        is_mean,
        (activity.value * weight[..., np.newaxis]).sum(axis=-2, keepdims=True),
        activity.value.sum(axis=-2, keepdims=True),
    )
    return replace(activity, duration_s=total_s, value=summed)


def split_intervals(activity: Activity, share: Sweepable) -> Activity:
    """Return each interval cut in two, ``share`` of its time and counts first; means stay as they
    are.
    """
    known = known_events()
    is_mean = np.array([known[name].is_mean for name in activity.events])
    parts_s = [activity.duration_s * share, activity.duration_s * (1.0 - np.asarray(share))]
    factor = np.asarray(share)[..., np.newaxis]
    parts = [activity.value * np.where(is_mean, 1.0, f) for f in (factor, 1.0 - factor)]
    at: Any = {
        name: _twice(value) for name, value in vars(activity.at).items() if value is not None
    }
    return replace(
        activity,
        duration_s=np.concatenate(parts_s, axis=-1),
        value=np.concatenate(parts, axis=-2),
        at=replace(activity.at, **at),
    )


def _twice(setting: Sweepable) -> Sweepable:
    """Return a setting laid out twice along the interval axis, where it differs from interval to
    interval.
    """
    array = np.asarray(setting, dtype=np.float64)
    return (
        setting
        if array.ndim == 0 or array.shape[-1] == 1
        else np.concatenate([array, array], axis=-1)
    )


def test_a_batch_equals_its_members(model: PowerModel, activity: Activity) -> None:
    batch = model.power(activity).part_w
    for row in range(3):
        assert_allclose(batch[row], model.power(member(activity, row)).part_w, rtol=RTOL)


def test_shuffling_intervals_changes_nothing(model: PowerModel, activity: Activity) -> None:
    order = [3, 0, 4, 2, 1]
    shuffled = replace(
        activity, duration_s=activity.duration_s[:, order], value=activity.value[:, order]
    )
    assert_allclose(model.power(shuffled).part_w, model.power(activity).part_w[:, order], rtol=RTOL)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_splitting_an_interval_keeps_its_energy(
    model: PowerModel, activity: Activity, share: float
) -> None:
    assert_allclose(
        total_j(model, split_intervals(activity, share)), total_j(model, activity), rtol=RTOL
    )


def test_merging_at_one_clock_keeps_the_energy(model: PowerModel, activity: Activity) -> None:
    steady = replace(activity, duration_s=np.full((3, 5), 1e-3))
    assert_allclose(total_j(model, merge_intervals(steady)), total_j(model, steady), rtol=1e-9)


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
    empty = replace(
        activity, duration_s=np.zeros_like(activity.duration_s), value=np.zeros_like(activity.value)
    )
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


def test_the_prepared_mean_power_is_that_of_one_interval(
    model: PowerModel, activity: Activity
) -> None:
    """Governors and sweeps ask for it; a model may answer faster, never otherwise."""
    one = replace(
        activity,
        duration_s=activity.duration_s[:, :1],
        value=activity.value[:1, :1].repeat(3, axis=0),
    )
    last = np.array([1.0, 2.0, 5.0]) * one.value[:, 0, -1]
    value = np.concatenate([one.value[..., :-1], last[:, np.newaxis, np.newaxis]], axis=-1)
    mean_power = model.prepare_mean_power(activity.events, one.value[0, 0, :-1])
    whole = model.power(replace(one, value=value)).total_w[:, 0]
    assert_allclose(mean_power(last, one.duration_s[:, 0], activity.at), whole, rtol=RTOL)


def test_idle_power_is_that_of_no_events(model: PowerModel, activity: Activity) -> None:
    clock_hz = np.asarray(activity.at.clock_hz)
    still = replace(
        activity,
        value=np.zeros_like(activity.value),
        at=replace(activity.at, memory_clock_hz=activity.at.clock_hz),
    )
    assert_allclose(
        model.idle_power_w(clock_hz[:, 0], 45.0), model.power(still).total_w[:, 0], rtol=RTOL
    )


def test_scaling_changes_the_named_parts_alone(model: PowerModel, activity: Activity) -> None:
    if not model.scalable_parts:
        with pytest.raises(BadInput, match=model.kind):
            model.scale_energy({"dram": 2.0})
        return
    name = model.scalable_parts[-1]
    before, after = model.power(activity), model.scale_energy({name: 2.0}, 1.5).power(activity)
    idle_w = model.idle_power_w(np.asarray(activity.at.clock_hz), activity.at.temperature_c)
    assert_allclose(after.part_power_w(name), 2.0 * before.part_power_w(name), rtol=RTOL)
    assert_allclose(
        after.total_w, before.total_w + before.part_power_w(name) + 0.5 * idle_w, rtol=RTOL
    )


def test_random_data_changes_nothing(model: PowerModel, activity: Activity) -> None:
    assert (
        model.with_data_factor(1.0).power(activity).part_w == model.power(activity).part_w
    ).all()


def test_it_is_found_by_its_name(model: PowerModel) -> None:
    assert power_model_kind(model.kind) is type(model)


def test_a_made_up_model_predicts_a_workload() -> None:
    """From one file, without a line elsewhere: the governor, the totals and the parts are those of
    the new model.
    """
    gpu = load_gpu("h200")
    bundle = replace(bundle_for(gpu), power=MODELS[RooflinePower.kind])
    timeline = analyse_graph(
        Graph.from_operators("made up", [Linear(4096, 4096, 4096)]), gpu, bundle
    )
    at = run_governed(timeline, gpu, OperatingPoint(), bundle)[0].at
    totals, detail = total_at_clock(timeline, at, bundle), detail_at_clock(timeline, at, bundle)
    assert detail.parts == ("idle", "memory")
    assert_allclose(totals.power_w * totals.latency_s, detail.part_j.sum(), rtol=1e-9)
    assert 60.0 < totals.power_w < 260.0


def test_it_survives_a_round_trip_through_yaml(model: PowerModel, activity: Activity) -> None:
    back = type(model).from_plain(yaml.safe_load(yaml.safe_dump(model.to_plain())))
    assert (back.power(activity).part_w == model.power(activity).part_w).all()
