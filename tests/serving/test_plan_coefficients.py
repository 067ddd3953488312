"""What single coefficients of plans and steady states mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from wattcast.core.arrays import Array
from wattcast.hardware import load_gpu
from wattcast.serving import option_runs, plan_options, plan_search
from wattcast.serving.plan_options import AloneTimes, SearchRange
from wattcast.serving.plan_search import ServingPlan
from wattcast.serving.request_plan import EngineSettings
from wattcast.serving.service_demand import PlanAim, ServiceDemand
from wattcast.serving.simulate_serving import find_language_model
from wattcast.serving.steady_state_window import SteadyState, find_steady_state

BEGIN_S = 100.0  # the first request ends
END_S = 200.0  # the last request arrives


@dataclass
class MadeRun:
    """A run with so many requests in the engine at both ends of its steady state."""

    before: int
    after: int
    arrived: int

    @property
    def trace(self) -> Any:
        earlier_s = np.linspace(0.0, 50.0, 1 + self.before)
        later_s = np.linspace(BEGIN_S + 1.0, END_S, self.arrived)
        arrival_s = np.concatenate([earlier_s, later_s])
        return SimpleNamespace(arrival_s=arrival_s, output_tokens=np.ones(len(arrival_s)))

    @property
    def last_token_s(self) -> Array:
        ends = self.before + self.arrived - self.after  # inside of the window
        ended_s = np.linspace(END_S - 1.0, END_S - 0.5, ends)
        return np.concatenate([[BEGIN_S], ended_s, np.full(self.after, 2.0 * END_S)])

    @property
    def first_token_s(self) -> Array:
        return self.last_token_s

    def energy_until(self, moment_s: Array) -> Array:
        return 100.0 * moment_s


def find_state(before: int, after: int, arrived: int) -> SteadyState | None:
    return find_steady_state(cast(Any, MadeRun(before, after, arrived)))


@pytest.mark.parametrize(("ended", "is_named"), [(4, False), (5, True), (6, True)])
def test_a_rate_needs_five_requests_that_end(ended: int, is_named: bool) -> None:
    assert (find_state(0, 0, ended) is not None) is is_named


@pytest.mark.parametrize(
    ("before", "after", "arrived", "grows"),
    [
        (30, 45, 100, False),  # 15 more, where the counts scatter by sqrt(75), 8.7
        (30, 49, 100, True),  # 19 more, where they scatter by 8.9
        (0, 8, 150, True),  # more than a twentieth of the arrivals
        (0, 8, 170, False),
    ],
)
def test_a_queue_grows_by_two_deviations_and_a_twentieth_of_the_arrivals(
    before: int, after: int, arrived: int, grows: bool
) -> None:
    state = find_state(before, after, arrived)
    assert state is not None
    assert state.in_engine == (before, after)
    assert state.queue_grows is grows


@pytest.mark.parametrize(("seconds", "is_impossible"), [(0.97, False), (0.93, True)])
def test_a_bound_a_twentieth_below_a_lone_request_is_impossible(
    seconds: float, is_impossible: bool
) -> None:
    """Steps between tabulated sizes are less than 5 % below the prediction of a lone request."""
    bound = SimpleNamespace(quantity="ttft", seconds=seconds)
    times = SimpleNamespace(least_s=lambda clock_hz: (1.0, 0.1))
    alone = AloneTimes(cast(Any, ((bound, 1000, times),)))
    assert (alone.explain_delay(1e9) is not None) is is_impossible


@pytest.mark.parametrize(("rate_per_s", "is_more"), [(2.7, True), (3.3, False)])
def test_a_replica_that_is_used_to_three_tenths_is_more_than_enough(
    monkeypatch: pytest.MonkeyPatch, rate_per_s: float, is_more: bool
) -> None:
    monkeypatch.setattr(plan_search, "find_ceiling", lambda *arguments: (10.0, "ttft"))
    option = SimpleNamespace(most_per_s=20.0)
    demand = SimpleNamespace(rate_per_s=rate_per_s)
    plan = ServingPlan(
        option=cast(Any, option),
        replicas=1,
        held_per_s=rate_per_s,
        result=cast(Any, None),
        demand=cast(Any, demand),
        peak_batch=8,
    )
    assert ("more than enough" in plan.binds) is is_more


@pytest.mark.parametrize(("last_s", "seats"), [(1.0, 25), (40.0, 25)])
def test_a_replica_is_asked_for_a_little_less_than_a_crowd_gets(
    monkeypatch: pytest.MonkeyPatch, last_s: float, seats: int
) -> None:
    """A crowd of a hundred ends one request a second, the last eight of them in emptier steps.

    Queues grow without a bound at the rate of the first nine in ten; 2 to 4 % below they do not.
    """
    done_s = np.concatenate([np.arange(1.0, 93.0), 92.0 + last_s * np.arange(1.0, 9.0)])
    costs = SimpleNamespace(lanes=1, stages=1)
    demand = SimpleNamespace(seed=0, draw_requests=lambda count: done_s[:count])
    served = SimpleNamespace(last_token_s=done_s)
    monkeypatch.setattr(option_runs, "serve_trace", lambda *arguments, **options: served)
    monkeypatch.setattr(option_runs, "replace", lambda value, **changes: _change(value, changes))
    option = SimpleNamespace(
        costs=costs, max_seqs=seats, settings=None, pools=(0, 0), most_per_s=np.inf
    )
    saturated = option_runs.saturate_option(cast(Any, demand), cast(Any, option))
    assert 0.96 <= saturated.most_per_s <= 0.98


def _change(value: Any, changes: dict[str, Any]) -> Any:
    return SimpleNamespace(**{**getattr(value, "__dict__", {}), **changes})


H200 = load_gpu("h200")
FRUGAL = ServiceDemand(
    find_language_model("llama3-8b"), 10.0, 512, 128, aim=PlanAim.ENERGY, requests=50
)


def list_shares(aim: PlanAim) -> tuple[list[float], list[float]]:
    """Return the power limits and the clocks that are tried, as shares of the card's own."""
    settings = SearchRange().list_settings(replace(FRUGAL, aim=aim), H200)
    top_w = float(np.mean(H200.power.limit_w))
    top_hz = float(np.max(H200.clocks.max_hz))
    limits = [limit_w / top_w for limit_w, clock_hz in settings if clock_hz == top_hz]
    clocks = [clock_hz / top_hz for limit_w, clock_hz in settings if limit_w == top_w]
    return limits, clocks


def test_limits_down_to_a_little_more_than_half_are_tried() -> None:
    """And a card's own; where GPUs alone count, nothing else is worth a search."""
    limits, _ = list_shares(PlanAim.ENERGY)
    assert max(limits) == 1.0
    assert 0.5 <= min(limits) <= 0.6
    assert list_shares(PlanAim.GPUS) == ([1.0], [1.0])


def test_clocks_down_to_three_fifths_are_tried() -> None:
    _, clocks = list_shares(PlanAim.ENERGY)
    below = [share for share in clocks if share < 1.0]
    assert 0.55 < min(below) < 0.65
    assert 0.85 < max(below) < 0.95


def test_batches_up_to_what_the_engine_takes_by_default_are_tried() -> None:
    assert max(plan_options.MOST_SEQUENCES) == EngineSettings().max_seqs


def test_a_replica_spans_four_nodes_at_most() -> None:
    """A model that fits into nothing is tried on more and more of them."""
    layouts = plan_options._list_layouts(FRUGAL, H200, SearchRange(), [])
    assert max(layout.tp * layout.pp for layout in layouts) == 4 * 8


def test_a_crowd_is_four_times_what_fills_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(count: int) -> Array:
        drawn.append(count)
        return np.ones(count)

    served = SimpleNamespace(last_token_s=np.arange(1.0, 101.0))
    monkeypatch.setattr(option_runs, "serve_trace", lambda *arguments, **options: served)
    monkeypatch.setattr(option_runs, "replace", lambda value, **changes: _change(value, changes))
    option = SimpleNamespace(
        costs=SimpleNamespace(lanes=1, stages=1),
        max_seqs=25,
        settings=None,
        pools=(0, 0),
        most_per_s=np.inf,
    )
    demand = SimpleNamespace(seed=0, draw_requests=draw)
    option_runs.saturate_option(cast(Any, demand), cast(Any, option))
    assert drawn == [4 * 25]
