"""What it costs to draw less for a while: by policy, in requests, latency and joules.

Policies of serving: hold GPUs at a power limit, lock a slower clock, or drain replicas, whose
requests go to the others. Policies of training: a power limit, a slower clock, or a pause of whole
jobs behind a checkpoint. Each is simulated at several depths with the traffic of that hour.

    shed = P_usual - P                                         at the plug, mean over the event
    joules lost = E_event + E_later - E_usual                  for the same work

Work of training that is missed is done later at its usual joules. Requests that are served later
than they come are not caught up: those beyond what the replicas can serve are lost.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wattcast.core import (
    BadInput,
    bad_value,
    units,
)
from wattcast.hardware.catalogue_reader import load_gpu
from wattcast.serving.plan_coefficients import PLAN
from wattcast.serving.simulate_serving import simulate
from wattcast.timeseries.hall_file import (
    HallPlan,
    ServingLoad,
    TrainingLoad,
)
from wattcast.timeseries.hall_parts import GroupWork
from wattcast.timeseries.hall_run import prepare_group
from wattcast.timeseries.job_timeline import JobSteps, plan_steps
from wattcast.timeseries.load_library import rate_at

ReportProgress = Callable[[str], None]

LIMIT_SHARES = (0.85, 0.7, 0.6, 0.5)  # of a card's power limit
CLOCK_SHARES = (0.85, 0.7, 0.6, 0.5)  # of a card's top clock
DRAINED_SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)  # of the replicas
USUAL_SLOWDOWN = 0.5  # of p99 latencies, that an event may cost where nobody says another
USUAL_EVENT_S = 1800.0
_SEED = 7
_MOST_IN_FLIGHT = 0.02  # share of the requests that count as served though a run ends before
_LEAST_PER_S = 1e-3  # of a group at night
_REQUESTS = 2000  # that are simulated at each depth
_LEAST_S = 300.0
_WARM_UP_S = 60.0


@dataclass(frozen=True)
class ShedPoint:
    """One policy at one depth in one group: what it sheds, and what that costs."""

    group: str
    policy: str  # usual, cap, clock, drain, pause
    depth: float  # watts, hertz, or a share
    shed_w: float  # at the plug, mean over the event
    requests_lost: float
    requests: float  # that come during the event
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    lost_j: float
    gpu_limit_w: float  # what the GPUs of the group may draw each

    def describe(self) -> str:
        """Return what is done, in words."""
        if self.policy == "usual":
            return f"{self.group}: as usual"
        if self.policy == "cap":
            return f"{self.group}: hold each GPU at {units.show(self.depth, 'W', 3)}"
        if self.policy == "clock":
            return f"{self.group}: lock the clock at {units.show(self.depth, 'Hz', 4)}"
        if self.policy == "drain":
            return f"{self.group}: drain {self.depth:.0%} of the replicas"
        return f"{self.group}: pause {self.depth:.0%} of the jobs behind a checkpoint"


@dataclass(frozen=True)
class ShedPlan:
    """A point for each group that together shed what was asked."""

    points: tuple[ShedPoint, ...]

    @property
    def shed_w(self) -> float:
        """Watts at the plug that all points shed."""
        return sum(point.shed_w for point in self.points)

    @property
    def requests_lost(self) -> float:
        """Requests that no replica can serve during the event."""
        return sum(point.requests_lost for point in self.points)

    @property
    def lost_j(self) -> float:
        """Joules more than usual for the same work; negative: fewer."""
        return sum(point.lost_j for point in self.points)


@dataclass(frozen=True)
class DemandResponse:
    """All policies of all groups for one event, and the plan that was chosen."""

    title: str
    begin_s: float
    span_s: float
    asked_w: float
    usual_w: float
    groups: tuple[tuple[ShedPoint, ...], ...]
    plan: ShedPlan
    gpus: tuple[int, ...]  # of each group

    @property
    def gpu_budget_w(self) -> float:
        """What all GPUs together may draw under the plan: the site power of ``manage site``."""
        pairs = zip(self.plan.points, self.gpus, strict=True)
        return sum(gpus * point.gpu_limit_w for point, gpus in pairs)

    def list_steps(self) -> list[str]:
        """Return the plan as what an operator does, in order."""
        hour = int(self.begin_s // 3600)
        minute = int(self.begin_s % 3600 // 60)
        clock = f"{hour:02d}:{minute:02d}"
        span = units.show(self.span_s / 60.0, "", 3).strip()
        steps = [f"At {clock}, for {span} min:"]
        steps += [point.describe() for point in self.plan.points if point.policy != "usual"]
        if any(point.policy == "cap" for point in self.plan.points):
            budget = f"{self.gpu_budget_w / 1e3:.0f}kW"
            steps.append(f"wattcast manage site SOCKET ... --site-power {budget}")
        return steps

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "title": self.title,
            "begin_s": self.begin_s,
            "span_s": self.span_s,
            "asked_w": self.asked_w,
            "usual_w": self.usual_w,
            "curve": [vars(point) for points in self.groups for point in points],
            "plan": {
                "shed_w": self.plan.shed_w,
                "requests_lost": self.plan.requests_lost,
                "lost_j": self.plan.lost_j,
                "gpu_budget_w": self.gpu_budget_w,
                "steps": self.list_steps(),
                "points": [vars(point) for point in self.plan.points],
            },
        }


def plan_demand_response(
    plan: HallPlan,
    asked_w: float,
    begin_s: float,
    span_s: float | None,
    progress: ReportProgress,
    slowdown: float = USUAL_SLOWDOWN,
) -> DemandResponse:
    """Return what every policy sheds and costs, and the best plan for ``asked_w``.

    The plan has policies whose p99 latencies are at most a share ``slowdown`` above the usual ones.
    """
    left_s = plan.hours * 3600.0 - begin_s
    event_s = min(USUAL_EVENT_S, left_s) if span_s is None else span_s
    if not 0 < event_s <= left_s:
        expected = f"a time up to the end of the hall's {plan.hours:g} hours"
        raise bad_value("--span", expected, units.show(event_s, "s"))
    groups = []
    usual_w = 0.0
    for group in plan.groups:
        work = prepare_group(plan, group)
        progress(f"policies of {group.name}")
        points, group_w = _list_points(work, begin_s, event_s)
        groups.append(points)
        usual_w += group_w
    if asked_w <= 0 or asked_w >= usual_w:
        expected = f"more than nothing, less than the {units.show(usual_w, 'W', 4)} it draws then"
        raise bad_value("--shed", expected, units.show(asked_w, "W"))
    return DemandResponse(
        title=plan.title,
        begin_s=begin_s,
        span_s=event_s,
        asked_w=asked_w,
        usual_w=usual_w,
        groups=tuple(groups),
        plan=choose_plan([_drop_slow(points, slowdown) for points in groups], asked_w),
        gpus=tuple(group.gpus for group in plan.groups),
    )


def _drop_slow(points: Sequence[ShedPoint], slowdown: float) -> list[ShedPoint]:
    """Return the points whose latencies are at most so many times those of the usual one."""
    usual = points[0]

    def is_fast(point: ShedPoint) -> bool:
        for name in ("ttft_p99_s", "tpot_p99_s"):
            usual_s = getattr(usual, name)
            if usual_s is not None and getattr(point, name) > (1.0 + slowdown) * usual_s:
                return False
        return True

    return [point for point in points if is_fast(point)]


def choose_plan(groups: Sequence[Sequence[ShedPoint]], asked_w: float) -> ShedPlan:
    """Return the points of all groups that shed enough and cost least.

    Fewer lost requests come first, then fewer joules. Groups are joined one after another; of the
    plans so far only those stay that no other beats in all three.
    """
    plans = [ShedPlan(())]
    for points in groups:
        joined = [ShedPlan((*plan.points, point)) for plan in plans for point in points]
        plans = _keep_best(joined)
    enough = [plan for plan in plans if plan.shed_w >= asked_w]
    if not enough:
        most_w = max(plan.shed_w for plan in plans)
        raise BadInput(
            f"--shed: all policies together shed {units.show(most_w, 'W', 3)} at most, not "
            f"{units.show(asked_w, 'W', 3)}. Ask for less, or allow a larger --slowdown."
        )
    return min(enough, key=lambda plan: (round(plan.requests_lost), plan.lost_j, plan.shed_w))


def _keep_best(plans: Sequence[ShedPlan]) -> list[ShedPlan]:
    """Return the plans that no other beats in watts, requests and joules at once."""
    ordered = sorted(plans, key=lambda plan: (-plan.shed_w, plan.requests_lost, plan.lost_j))
    best: list[ShedPlan] = []
    for plan in ordered:
        beaten = any(
            kept_point.requests_lost <= plan.requests_lost and kept_point.lost_j <= plan.lost_j
            for kept_point in best
        )
        if not beaten:
            best.append(plan)
    return best


def _list_points(
    work: GroupWork,
    begin_s: float,
    event_s: float,
) -> tuple[tuple[ShedPoint, ...], float]:
    """Return the points of one group, the usual one first, and what it usually draws."""
    load = work.group.load
    if isinstance(load, ServingLoad):
        return _serving_points(work, load, begin_s, event_s)
    if isinstance(load, TrainingLoad):
        return _training_points(work, load, event_s)
    limit_w = _limit_w(work)
    each_w = work.loaded_w if load == "loaded" else work.cold_w
    return (_as_usual(work.group.name, limit_w),), _group_wall_w(work, each_w, 0.0)


def _as_usual(group: str, gpu_limit_w: float) -> ShedPoint:
    """Return the point of a group that serves nobody and runs as always: it sheds nothing."""
    return ShedPoint(
        group,
        policy="usual",
        depth=0.0,
        shed_w=0.0,
        requests_lost=0.0,
        requests=0.0,
        ttft_p99_s=None,
        tpot_p99_s=None,
        lost_j=0.0,
        gpu_limit_w=gpu_limit_w,
    )


def _limit_w(work: GroupWork) -> float:
    return float(np.max(load_gpu(work.group.gpu).power.limit_w))


def _top_hz(work: GroupWork) -> float:
    return float(np.max(load_gpu(work.group.gpu).clocks.max_hz))


def _group_wall_w(
    work: GroupWork,
    card_w: float,
    working: float,
) -> float:
    """Return the watts of a group at the plug, of the mean watts of its cards."""
    group = work.group
    node_w = np.array(group.system.gpu_count * card_w)
    wall_w = float(node_w + work.node.added_w(node_w, np.array(working)))
    return group.racks * group.nodes_per_rack * wall_w


@dataclass(frozen=True)
class _Served:
    """A replica over the event: mean watts of a card, and what it served."""

    card_w: float
    working: float
    served_per_s: float
    ttft_p99_s: float
    tpot_p99_s: float


def _serve(
    load: ServingLoad,
    gpu: str,
    rate_per_s: float,
    **settings: float,
) -> _Served:
    """Simulate a replica at one rate; with less power or clock, by the settings."""
    seconds = max(_REQUESTS / rate_per_s, _LEAST_S)
    result = simulate(
        load.model,
        gpu,
        rate=rate_per_s,
        prompt=load.prompt,
        output=load.output,
        tp=load.tp,
        seconds=seconds,
        seed=_SEED,
        **{**load.options, **settings},
    )
    run = result.runs[0]
    columns = run.segments
    spans_s = columns["device_end_s"] - columns["device_begin_s"]
    inside = columns["device_end_s"] <= seconds
    idle_s = float(spans_s[inside & (columns["steps"] == 0)].sum())
    length_s = float(spans_s[inside].sum())
    served = float((run.last_token_s <= seconds).sum())
    in_flight = min(
        rate_per_s * float(np.nanmean(result.latency_s)), _MOST_IN_FLIGHT * len(result.trace)
    )
    return _Served(
        card_w=float(columns["energy_j"][inside].sum()) / length_s,
        working=1.0 - idle_s / length_s,
        served_per_s=(served + in_flight) / seconds,
        ttft_p99_s=float(np.percentile(result.ttft_s, 99)),
        tpot_p99_s=float(np.nanpercentile(result.tpot_s, 99)),
    )


def _serving_points(
    work: GroupWork,
    load: ServingLoad,
    begin_s: float,
    event_s: float,
) -> tuple[tuple[ShedPoint, ...], float]:
    """Return the policies of a serving group with the traffic of the event."""
    group = work.group
    rate_per_s = float(rate_at(load, np.array([begin_s + 0.5 * event_s]))[0])
    rate_per_s = max(rate_per_s, _LEAST_PER_S)
    replicas_per_node = group.system.gpu_count // load.tp
    replicas = group.racks * group.nodes_per_rack * replicas_per_node
    busy_share = replicas_per_node * load.tp / group.system.gpu_count
    usual = _serve(load, group.gpu, rate_per_s)

    def wall_w(served: _Served, share: float = 1.0) -> float:
        """Return the watts of the group where so many replicas serve, and others are loaded."""
        rest_w = (1.0 - busy_share) * work.cold_w + busy_share * (1.0 - share) * work.loaded_w
        card_w = busy_share * share * served.card_w + rest_w
        return _group_wall_w(work, card_w, busy_share * share * served.working)

    usual_w = wall_w(usual)
    requests = rate_per_s * replicas * event_s
    start = ShedPoint(
        group.name,
        "usual",
        0.0,
        0.0,
        0.0,
        requests,
        usual.ttft_p99_s,
        usual.tpot_p99_s,
        0.0,
        _limit_w(work),
    )

    def point(
        policy: str,
        depth: float,
        served: _Served,
        share: float = 1.0,
    ) -> ShedPoint:
        offered_per_s = rate_per_s / share
        served_share = served.served_per_s / offered_per_s
        lost = 0.0 if served_share >= PLAN.served_share else (1.0 - served_share) * requests
        shed_w = usual_w - wall_w(served, share)
        return replace(
            start,
            policy=policy,
            depth=depth,
            shed_w=shed_w,
            requests_lost=lost,
            ttft_p99_s=served.ttft_p99_s,
            tpot_p99_s=served.tpot_p99_s,
            lost_j=-shed_w * event_s,
            gpu_limit_w=depth if policy == "cap" else start.gpu_limit_w,
        )

    points = [start]
    for policy, depth, settings in _list_settings(work):
        points.append(point(policy, depth, _serve(load, group.gpu, rate_per_s, **settings)))
    for drained in DRAINED_SHARES:
        served = _serve(load, group.gpu, rate_per_s / (1.0 - drained))
        points.append(point("drain", drained, served, 1.0 - drained))
    return tuple(points), usual_w


def _list_limits(work: GroupWork) -> list[float]:
    """Return the limits to try: none below what the card can be set to."""
    power = load_gpu(work.group.gpu).power
    least_w = 0.0 if power.min_limit_w is None else float(np.min(power.min_limit_w))
    limits_w = [share * _limit_w(work) for share in LIMIT_SHARES]
    return [limit_w for limit_w in limits_w if limit_w >= least_w]


def _list_settings(work: GroupWork) -> list[tuple[str, float, dict[str, float]]]:
    """Return the settings of cards to try: policy, depth, and options of ``simulate``."""
    settings = [("cap", limit_w, {"power_limit": limit_w}) for limit_w in _list_limits(work)]
    for share in CLOCK_SHARES:
        clock_hz = share * _top_hz(work)
        settings.append(("clock", clock_hz, {"clock": clock_hz}))
    return settings


def _training_points(
    work: GroupWork,
    load: TrainingLoad,
    event_s: float,
) -> tuple[tuple[ShedPoint, ...], float]:
    """Return the policies of a training group.

    A capped or slowed job makes less progress, which is made up for later at its usual joules. A
    paused one waits at waiting power, and writes a checkpoint first.
    """
    group = work.group
    gpus = group.gpus // load.jobs
    usual = plan_steps(load, group.gpu, gpus)
    usual_card_w = _step_power_w(usual)
    usual_w = _group_wall_w(work, usual_card_w, 1.0)
    start = _as_usual(group.name, _limit_w(work))

    def point(
        policy: str,
        depth: float,
        wall_w: float,
        pace: float,
    ) -> ShedPoint:
        shed_w = usual_w - wall_w
        # E_event + E_later - E_usual, with the missed share of the work done later
        lost_j = (wall_w + (1.0 - pace) * usual_w - usual_w) * event_s
        limit_w = depth if policy == "cap" else start.gpu_limit_w
        return replace(
            start,
            policy=policy,
            depth=depth,
            shed_w=shed_w,
            lost_j=lost_j,
            gpu_limit_w=limit_w,
        )

    points = [start]
    for policy, depth, settings in _list_settings(work):
        changed = replace(load, options={**load.options, **settings})
        steps = plan_steps(changed, group.gpu, gpus)
        pace = steps.tokens_per_s / usual.tokens_per_s
        points.append(point(policy, depth, _group_wall_w(work, _step_power_w(steps), 1.0), pace))
    for share in _list_pauses(load.jobs):
        # the checkpoint that is written first is time without progress, at waiting power
        wall_w = (1.0 - share) * usual_w + share * _group_wall_w(work, usual.waiting_w, 0.0)
        points.append(point("pause", share, wall_w, 1.0 - share))
    return tuple(points), usual_w


def _list_pauses(jobs: int) -> Iterable[float]:
    """Return the shares of the jobs that can be paused: at most eight steps."""
    counts = sorted({max(round(jobs * step / 8), 1) for step in range(1, 9)})
    return [count / jobs for count in counts]


def _step_power_w(steps: JobSteps) -> float:
    """Return the mean watts of a card over a step."""
    return float(steps.step.joules[-1].sum()) / steps.step_s
