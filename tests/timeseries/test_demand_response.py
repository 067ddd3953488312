"""Drawing less for a while costs requests, latency or joules, by policy."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from wattcast.core import BadInput
from wattcast.timeseries import demand_response
from wattcast.timeseries.demand_response import (
    DemandResponse,
    ShedPoint,
    _Served,
    choose_plan,
    plan_demand_response,
)
from wattcast.timeseries.hall_file import parse_hall
from wattcast.timeseries.shedding_report import draw_response

HALL = """
title: test hall
groups:
  - name: chat
    system: dgx-h200
    racks: 2
    nodes_per_rack: 2
    serve: {model: llama3-8b, rate: 8/s, prompt: 256, output: 64}
  - name: jobs
    system: dgx-h100
    racks: 2
    nodes_per_rack: 1
    train: {model: llama3-8b, jobs: 2, options: {tp: 2, pp: 1, micro_batch: 1}}
  - name: spare
    system: dgx-h100
    racks: 1
    nodes_per_rack: 1
    idle: loaded
"""


@pytest.fixture(scope="module", autouse=True)
def steps_planned_once() -> Iterator[None]:
    """Plan the same steps of the same job once."""
    plan_steps = demand_response.plan_steps
    planned: dict[bytes, Any] = {}

    def plan_once(*asked: Any, **options: Any) -> Any:
        key = pickle.dumps((asked, options))
        if key not in planned:
            planned[key] = plan_steps(*asked, **options)
        return planned[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demand_response, "plan_steps", plan_once)
        yield


@pytest.fixture(scope="module")
def response() -> DemandResponse:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demand_response, "_REQUESTS", 300)
        patch.setattr(demand_response, "_LEAST_S", 40.0)
        plan = parse_hall(HALL.encode(), "hall.yaml", Path())
        return plan_demand_response(plan, 6e3, 18 * 3600.0, 1800.0, lambda _: None)


def list_policy(response: DemandResponse, group: int, policy: str) -> list[ShedPoint]:
    return [point for point in response.groups[group] if point.policy == policy]


@pytest.mark.parametrize("policy", ["cap", "clock", "drain"])
def test_serving_sheds_more_the_deeper_and_answers_later(
    response: DemandResponse, policy: str
) -> None:
    points = list_policy(response, 0, policy)
    assert len(points) >= 4
    shed_w = [point.shed_w for point in points]
    assert shed_w == sorted(shed_w)
    usual = response.groups[0][0]
    assert usual.policy == "usual"
    assert usual.requests == pytest.approx(8 * 32 * 1800.0)
    assert points[-1].tpot_p99_s > 1.05 * usual.tpot_p99_s


def test_drained_replicas_shed_what_their_work_took(response: DemandResponse) -> None:
    """Three quarters idle with their model loaded: what stays is idle power and the others' work."""
    deepest = list_policy(response, 0, "drain")[-1]
    assert deepest.depth == 0.75
    assert 0 < deepest.shed_w < 0.75 * response.usual_w


def test_paused_jobs_save_now_and_pay_later(response: DemandResponse) -> None:
    half, both = list_policy(response, 1, "pause")
    assert (half.depth, both.depth) == (0.5, 1.0)
    assert both.shed_w == pytest.approx(2 * half.shed_w)
    # the missed work is done later at its usual joules; the wait was for nothing
    assert 0 < both.lost_j < (response.usual_w - both.shed_w) * 1800.0
    slow = list_policy(response, 1, "clock")[1]
    assert slow.shed_w > 0 > slow.lost_j  # a slower clock does the same work with less


def test_idle_racks_have_nothing_to_shed(response: DemandResponse) -> None:
    assert [point.policy for point in response.groups[2]] == ["usual"]


def test_the_plan_sheds_enough_and_says_how(response: DemandResponse) -> None:
    plan = response.plan
    assert plan.shed_w >= 6e3
    assert plan.requests_lost == 0
    for point, points in zip(plan.points, response.groups, strict=True):
        usual = points[0]
        if usual.tpot_p99_s is not None:
            assert point.tpot_p99_s <= 1.5 * usual.tpot_p99_s
    steps = response.list_steps()
    assert steps[0] == "At 18:00, for 30 min:"
    assert len(steps) > 1
    plain = json.loads(json.dumps(response.to_dict()))
    assert len(plain["curve"]) == sum(map(len, response.groups))


def make_point(group: str, policy: str, shed_w: float, lost: float, lost_j: float) -> ShedPoint:
    limit_w = 350.0 if policy == "cap" else 700.0
    return ShedPoint(group, policy, limit_w, shed_w, lost, 100.0, None, None, lost_j, limit_w)


def test_the_cheapest_combination_is_chosen() -> None:
    first = [
        make_point("a", "usual", 0, 0, 0),
        make_point("a", "cap", 50, 0, -5),
        make_point("a", "drain", 200, 40, -20),
    ]
    second = [make_point("b", "usual", 0, 0, 0), make_point("b", "pause", 100, 0, 30)]
    assert [p.policy for p in choose_plan([first, second], 40).points] == ["cap", "usual"]
    assert [p.policy for p in choose_plan([first, second], 140).points] == ["cap", "pause"]
    assert [p.policy for p in choose_plan([first, second], 160).points] == ["drain", "usual"]
    assert [p.policy for p in choose_plan([first, second], 300).points] == ["drain", "pause"]
    with pytest.raises(BadInput, match="shed 300 W at most, not 301 W"):
        choose_plan([first, second], 301)


def test_a_cap_is_carried_out_by_the_site(response: DemandResponse) -> None:
    points = tuple(
        make_point(point.group, "cap" if place == 0 else "usual", 10, 0, 0)
        for place, point in enumerate(response.plan.points)
    )
    plan = demand_response.ShedPlan(points)
    changed = DemandResponse(**{**vars(response), "plan": plan})
    budget_w = 32 * 350.0 + (16 + 8) * 700.0
    assert changed.gpu_budget_w == budget_w
    assert changed.list_steps()[-1] == "wattcast manage site SOCKET ... --site-power 28kW"


def test_the_figure_has_a_curve_for_each_policy(response: DemandResponse) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install 'wattcast[plot]'")
    (axes,) = draw_response(response).axes
    labels = axes.get_legend_handles_labels()[1]
    assert {"chat: cap", "chat: drain", "jobs: pause", "asked"} <= set(labels)


def test_too_much_is_refused(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hall.yaml").write_text(
        HALL[: HALL.index("  - name: chat")] + HALL[HALL.index("  - name: jobs") :]
    )
    for shed, sentence in (("900kW", "less than the"), ("18kW", "kW at most, not 18 kW")):
        done = call("hall", str(tmp_path / "hall.yaml"), "--shed", shed, "--begin", "18:00")
        assert done.code == 2
        assert sentence in done.err.splitlines()[-1]
    done = call("hall", str(tmp_path / "hall.yaml"), "--shed", "-3kW")
    assert done.code == 2
    assert "shed: expected a number above zero" in done.err


@pytest.mark.parametrize(("served_share", "lost"), [(1.01, 0.0), (0.985, 0.0), (0.96, 0.04)])
def test_what_chance_takes_from_a_simulation_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, served_share: float, lost: float
) -> None:
    """Of 2,000 Poisson arrivals a standard deviation is 2 %; a replica that serves less loses."""

    def serve(_load: Any, _gpu: str, rate_per_s: float, **_settings: float) -> Any:
        return _Served(400.0, 0.5, served_share * rate_per_s, 0.5, 0.02)

    monkeypatch.setattr(demand_response, "_serve", serve)
    served = HALL[: HALL.index("  - name: jobs")]
    plan = parse_hall(served.encode(), "hall.yaml", Path())
    points = plan_demand_response(plan, 1.0, 18 * 3600.0, 1800.0, lambda _: None).groups[0]
    assert all(
        point.requests_lost == pytest.approx(lost * points[0].requests) for point in points[1:]
    )
