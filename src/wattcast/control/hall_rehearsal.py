"""Rehearse a bad day of a hall whose power a site's coordinator shares among its racks.

The demand of every rack comes from ``wattcast hall`` (``timeseries/hall_run.py``), second by
second.
The coordinator is that of ``wattcast manage site`` (``site_budget.SiteCoordinator``), in imagined
time. Each rack stands for the cards in it: it has one limit, in watts at its plug, and one daemon.

Four events go wrong one after another:

- ``breaker``: the breaker of the row that draws most opens. Its racks are dark and answer nobody.
  When it closes, their boards start at their own power limit, not at the safe share.
- ``daemon``: the daemons of the racks of one row end, and start again later. Cards keep their
limits
  meanwhile, and have their safe shares when the daemons start.
- ``cap``: the grid asks for less power in the middle of the steepest minute.
- ``restore``: an operator gives one rack back through the daemon (``manage restore``), and sets the
  limit of another one to the board's own behind the daemon's back (``nvidia-smi -pl``).

Demand does not wait: what a limit takes away is not asked for again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.control.rehearsal_coefficients import REHEARSAL
from wattcast.control.site_budget import (
    SiteCoordinator,
    SiteGpu,
    SitePlan,
)
from wattcast.core import (
    bad_value,
    check_names,
    units,
)
from wattcast.core.arrays import Array
from wattcast.hardware.catalogue_reader import load_gpu
from wattcast.timeseries.hall_combination import CombinedHall
from wattcast.timeseries.hall_file import HallPlan
from wattcast.timeseries.hall_parts import GroupWork
from wattcast.timeseries.hall_statistics import window_means_w
from wattcast.timeseries.node_power import wall_power_w

EVENTS = ("breaker", "daemon", "cap", "restore")
LEAST_EVENT_S = round(REHEARSAL.event_least_s)
BURST_S = round(REHEARSAL.burst_s)
CARD_RAMP_W_PER_S = SitePlan.ramp_w_per_s
ALLOWED_S = REHEARSAL.allowed_s

_MINUTE_S = 60
_NAMED_RACKS = 3  # of an event, before the others are counted


@dataclass(frozen=True)
class RackSupply:
    """What one rack draws at its plug: idle, at its safe share, and at the boards' own limits."""

    name: str
    row: int
    cards: int
    idle_w: float
    safe_w: float
    most_w: float


@dataclass(frozen=True)
class PlannedEvent:
    """When an event begins and ends, in seconds of the span, and which racks it meets."""

    name: str
    begin: int
    end: int
    racks: tuple[int, ...]


@dataclass(frozen=True)
class EventFigures:
    """What an event did, from its beginning until the next one."""

    name: str
    begin_s: float  # of the day
    duration_s: int
    racks: tuple[str, ...]
    budget_w: float  # that was to be kept
    over_s: int  # seconds above it
    longest_over_s: int  # in a row
    most_over_w: float
    denied_j: float  # that racks asked for and did not get, more than without events
    steered_again_s: int | None  # after the end; None: not before the next event

    @property
    def has_kept_limits(self) -> bool:
        """Tell whether the budget was never passed for longer than is allowed."""
        return self.longest_over_s <= ALLOWED_S


@dataclass(frozen=True)
class HallRehearsal:
    """What all events did to a hall."""

    title: str
    budget_w: float
    cap_w: float
    racks: int
    most_wanted_w: float
    events: tuple[EventFigures, ...]
    drawn_w: Array  # (second,)
    allowed_w: Array  # (second,), the budget

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        events = [
            {**vars(event), "has_kept_limits": event.has_kept_limits} for event in self.events
        ]
        return {
            "hall": self.title,
            "racks": self.racks,
            "budget_w": self.budget_w,
            "cap_w": self.cap_w,
            "most_wanted_w": self.most_wanted_w,
            "most_drawn_w": float(self.drawn_w.max()),
            "events": events,
        }


def list_rack_supplies(hall: CombinedHall, budget_w: float) -> list[RackSupply]:
    """Return the racks of a hall, in the order of its series. Safe shares together are two thirds
    of the budget, by what the boards' own limits let each rack draw, and at least what it draws
    idle.
    """
    ends = []
    for row, (place, first, count) in enumerate(hall.work.rows):
        group = hall.work.groups[place]
        idle_w, most_w = _find_rack_ends_w(hall.work.plan, group)
        for rack in range(first, first + count):
            cards = group.group.gpus_per_rack
            ends.append((f"{group.group.name}/{rack}", row, cards, idle_w, most_w))
    total_w = sum(most_w for *_, most_w in ends)
    share = min(budget_w / REHEARSAL.safe_part / total_w, 1.0)
    return [
        RackSupply(
            name,
            row,
            cards,
            idle_w,
            max(share * most_w, idle_w),
            most_w,
        )
        for name, row, cards, idle_w, most_w in ends
    ]


def _find_rack_ends_w(plan: HallPlan, group: GroupWork) -> tuple[float, float]:
    """Return what a rack of a group draws idle, and with all GPUs at the boards' own limit."""
    system = group.group.system
    limit_w = float(np.max(load_gpu(group.group.gpu).power.limit_w))
    ends = []
    for gpu_w, working in ((group.loaded_w, 0.0), (limit_w, 1.0)):
        node_w = wall_power_w(
            system,
            np.array(system.gpu_count * gpu_w),
            np.array(working),
            plan.inlet_c,
        )
        ends.append(group.group.nodes_per_rack * float(node_w))
    return ends[0], ends[1]


def plan_events(
    names: Sequence[str],
    demand_w: Array,
    racks: Sequence[RackSupply],
) -> list[PlannedEvent]:
    """Spread events evenly over the span; a cap comes in the middle of its part's steepest rise."""
    for name in names:
        check_names("event", name, EVENTS)
    seconds = demand_w.shape[1]
    part = seconds // max(len(names), 1)
    if not names or part < LEAST_EVENT_S:
        expected = f"one or more events, and {LEAST_EVENT_S} s or more of the span for each"
        raise bad_value("--events", expected, f"{len(names)} in {seconds} s")
    rows = np.array([rack.row for rack in racks])
    planned = []
    for place, name in enumerate(names):
        start = place * part
        begin = start + round(REHEARSAL.event_begin * part)
        end = start + round(REHEARSAL.event_end * part)
        if name == "cap":
            begin = start + _find_burst(demand_w[:, start:end].sum(axis=0))
        planned.append(
            PlannedEvent(name, begin, end, _choose_racks(name, demand_w[:, begin], rows))
        )
    return planned


def _find_burst(total_w: Array) -> int:
    """Return the second in the middle of the steepest rise."""
    half = min(BURST_S, len(total_w) - 2) // 2
    rise_w = total_w[2 * half :] - total_w[: len(total_w) - 2 * half]
    return int(np.argmax(rise_w)) + half


def _choose_racks(
    name: str,
    demand_w: Array,
    rows: npt.NDArray[np.int64],
) -> tuple[int, ...]:
    """Return the racks that an event meets: the row that draws most, all of them, or two."""
    if name == "cap":
        return tuple(range(len(rows)))
    if name == "restore":
        return tuple(int(rack) for rack in np.argsort(demand_w)[::-1][:2])
    by_row = np.bincount(rows, weights=demand_w)
    return tuple(int(rack) for rack in np.flatnonzero(rows == int(np.argmax(by_row))))


class RehearsedSite:
    """Racks under a coordinator, in imagined time."""

    def __init__(
        self,
        racks: Sequence[RackSupply],
        budget_w: float,
        ramp_w_per_s: float,
    ) -> None:
        self._racks = racks
        gpus = tuple(SiteGpu(rack.name, rack.safe_w, rack.most_w) for rack in racks)
        self.coordinator = SiteCoordinator(
            SitePlan(budget_w, gpus, ramp_w_per_s),
            self._set_limit,
        )
        self.in_force_w = [rack.safe_w for rack in racks]
        self.is_dark = np.zeros(len(racks), dtype=bool)
        self.is_silent = np.zeros(len(racks), dtype=bool)  # nobody answers for it
        self.was_given_back = np.zeros(len(racks), dtype=bool)
        self._idle_w = np.array([rack.idle_w for rack in racks])

    def _set_limit(self, i: int, watts: float) -> bool:
        if self.is_silent[i]:
            return False
        self.in_force_w[i] = watts
        return True

    def draw_second(self, demand_w: Array) -> Array:
        """Return what racks draw in a second, and have the coordinator look at it."""
        drawn_w = np.minimum(demand_w, np.maximum(self.in_force_w, self._idle_w))
        drawn_w[self.is_dark] = 0.0
        answering = np.flatnonzero(~self.is_silent).tolist()
        for i in answering:
            if self.was_given_back[i]:
                self.was_given_back[i] = False
                self.coordinator.reclaim(i)
        self.coordinator.step(
            {i: float(drawn_w[i]) for i in answering},
            {i: self.in_force_w[i] for i in answering},
        )
        return np.asarray(drawn_w)

    def begin_event(self, event: PlannedEvent, cap_w: float) -> None:
        """Have something go wrong."""
        racks = list(event.racks)
        if event.name == "cap":
            self.coordinator.change_budget(cap_w)
        elif event.name == "restore":
            by_daemon, *by_hand = racks
            self.in_force_w[by_daemon] = self._racks[by_daemon].safe_w
            self.was_given_back[by_daemon] = True
            for i in by_hand:
                self.in_force_w[i] = self._racks[i].most_w
        else:
            self.is_silent[racks] = True
            self.is_dark[racks] = event.name == "breaker"

    def end_event(self, event: PlannedEvent, budget_w: float) -> None:
        """Have it mended."""
        racks = list(event.racks)
        if event.name == "cap":
            self.coordinator.change_budget(budget_w)
        elif event.name in ("breaker", "daemon"):
            self.is_silent[racks] = False
            self.is_dark[racks] = False
            self.was_given_back[racks] = True
            for i in racks:
                rack = self._racks[i]
                self.in_force_w[i] = rack.most_w if event.name == "breaker" else rack.safe_w

    def is_steered(self, racks: Sequence[int]) -> bool:
        """Tell whether racks have the limits that the coordinator promised them."""
        promised_w = self.coordinator.promised_w
        return all(
            not self.is_silent[i]
            and not self.was_given_back[i]
            and abs(self.in_force_w[i] - promised_w[i]) < 1.0
            for i in racks
        )


def play_events(
    racks: Sequence[RackSupply],
    demand_w: Array,
    events: Sequence[PlannedEvent],
    budget_w: float,
    cap_w: float,
) -> tuple[Array, Array, dict[str, int]]:
    """Play the span; return what each rack drew ``(rack, second)``, the budget ``(second,)``, and
    how long after its end each event's racks were steered again.
    """
    seconds = demand_w.shape[1]
    ramp_w_per_s = CARD_RAMP_W_PER_S * max(rack.cards for rack in racks)
    site = RehearsedSite(racks, budget_w, ramp_w_per_s)
    drawn_w = np.zeros_like(demand_w)
    allowed_w = np.full(seconds, budget_w)
    waiting: dict[str, PlannedEvent] = {}
    steered_again_s: dict[str, int] = {}
    for now in range(seconds):
        for event in events:
            if now == event.begin:
                site.begin_event(event, cap_w)
                if event.name == "cap":
                    allowed_w[event.begin : event.end] = cap_w
            if now == event.end:
                site.end_event(event, budget_w)
            if now == (event.begin if event.name == "restore" else event.end):
                waiting[event.name] = event
        drawn_w[:, now] = site.draw_second(demand_w[:, now])
        for name, event in list(waiting.items()):
            if site.is_steered(event.racks):
                since = event.begin if name == "restore" else event.end
                steered_again_s[name] = now + 1 - since
                del waiting[name]
    return drawn_w, allowed_w, steered_again_s


def rehearse_hall(
    hall: CombinedHall,
    names: Sequence[str] = EVENTS,
    budget_w: float | None = None,
    cap_w: float | None = None,
) -> HallRehearsal:
    """Play events on a hall; its budget is the limit of its file where none is given."""
    budget_w = hall.work.plan.limits_w.get("hall") if budget_w is None else budget_w
    if budget_w is None:
        expected = "a budget (--site-power), or a limit of the hall in its file (limits: hall)"
        raise bad_value("hall", expected, "neither")
    cap_w = REHEARSAL.cap_share * budget_w if cap_w is None else cap_w
    if not 0 < cap_w < budget_w:
        raise bad_value(
            "--event-cap", f"less than the budget of {units.show(budget_w, 'W')}", cap_w
        )
    racks = list_rack_supplies(hall, budget_w)
    needed_w = sum(rack.safe_w for rack in racks)
    if needed_w > cap_w:
        expected = f"at least {units.show(needed_w, 'W', 3)}, what the racks' safe shares need"
        raise bad_value("budget or cap", expected, units.show(cap_w, "W", 3))
    demand_w = window_means_w(hall.rack_j, hall.work.bin_s, 1.0)
    events = plan_events(names, demand_w, racks)
    drawn_w, allowed_w, steered_again_s = play_events(
        racks,
        demand_w,
        events,
        budget_w,
        cap_w,
    )
    usual_w, *_ = play_events(
        racks,
        demand_w,
        (),
        budget_w,
        cap_w,
    )
    rehearsal = HallRehearsal(
        title=hall.work.plan.title,
        budget_w=budget_w,
        cap_w=cap_w,
        racks=len(racks),
        most_wanted_w=float(demand_w.sum(axis=0).max()),
        events=(),
        drawn_w=drawn_w.sum(axis=0),
        allowed_w=allowed_w,
    )
    denied_w = (usual_w - drawn_w).sum(axis=0)
    figures = []
    for place, event in enumerate(events):
        end = events[place + 1].begin if place + 1 < len(events) else demand_w.shape[1]
        figures.append(
            _judge_event(
                rehearsal,
                event,
                slice(event.begin, end),
                float(denied_w[event.begin : end].sum()),
                hall.work.begin_s,
                tuple(racks[i].name for i in event.racks),
                steered_again_s.get(event.name),
            )
        )
    return replace(rehearsal, events=tuple(figures))


def _judge_event(
    rehearsal: HallRehearsal,
    event: PlannedEvent,
    seconds: slice,
    denied_j: float,
    day_s: float,
    racks: tuple[str, ...],
    steered_again_s: int | None,
) -> EventFigures:
    """Return what happened in the seconds of an event."""
    over_w = rehearsal.drawn_w[seconds] - rehearsal.allowed_w[seconds]
    is_over = over_w > 1.0
    longest = 0
    run = 0
    for is_above in is_over.tolist():
        run = run + 1 if is_above else 0
        longest = max(longest, run)
    return EventFigures(
        name=event.name,
        begin_s=day_s + event.begin,
        duration_s=event.end - event.begin,
        racks=racks,
        budget_w=float(rehearsal.allowed_w[seconds].min()),
        over_s=int(is_over.sum()),
        longest_over_s=longest,
        most_over_w=max(float(over_w.max()), 0.0),
        denied_j=denied_j,
        steered_again_s=steered_again_s,
    )


def describe_rehearsal(rehearsal: HallRehearsal) -> str:
    """Say for people what the events did."""
    lines = [
        f"{rehearsal.title}: {rehearsal.racks} racks share "
        f"{units.show(rehearsal.budget_w, 'W', 4)}; "
        f"they ask for {units.show(rehearsal.most_wanted_w, 'W', 4)} at most, and draw "
        f"{units.show(float(rehearsal.drawn_w.max()), 'W', 4)}"
    ]
    for event in rehearsal.events:
        minutes, seconds = divmod(int(event.begin_s), _MINUTE_S)
        moment = f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
        racks = "all racks" if len(event.racks) == rehearsal.racks else ", ".join(event.racks[:3])
        more = len(event.racks) - _NAMED_RACKS
        if racks != "all racks" and more > 0:
            racks += f" and {more} more"
        lines.append(f"{moment} {event.name}, {event.duration_s} s, {racks}")
        verdict = "kept" if event.has_kept_limits else "NOT KEPT"
        lines.append(
            f"  limit {verdict}: passed in {event.over_s} s, {event.longest_over_s} s in a row at "
            f"most, by {units.show(event.most_over_w, 'W', 3)} at most"
        )
        again = "not steered again before the next event"
        if event.steered_again_s is not None:
            again = f"steered again after {event.steered_again_s} s"
        lines.append(f"  {units.show(event.denied_j, 'J', 3)} less than without events; {again}")
    lines.append("simulated: racks follow the hall's loads, the coordinator is that of manage site")
    return "\n".join(lines)
