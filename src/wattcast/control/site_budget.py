"""Share a power budget among the GPUs of several nodes.

Every GPU has a *safe share*: the power limit it had before the coordinator came, set by the
administrator. Safe shares together keep to the budget. The coordinator hands out what is left of it
by priority and need, through the daemons of the nodes. A limit is raised only after those that make
room for it were lowered and the nodes have said so; so the limits in force never exceed the budget
in sum, whatever is late or lost. A node that loses the coordinator gets its safe shares back from
its daemon within five seconds, as any client's card does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.control.card_daemon import DaemonRequest
from wattcast.control.daemon_client import DaemonLink
from wattcast.core.arrays import Array
from wattcast.core.errors import Refused, WattcastError, bad_value

HELD_DOWN = 0.95  # of its limit, from which a card would draw more if it might
# a card that is held down is offered this much more, another one this much above its draw
MORE = 1.3
ROOM = 1.1
PERIOD_S = 1.0
ROUNDED_DOWN = 1 - 1e-9  # no sum of shares exceeds a budget by rounding


@dataclass(frozen=True)
class SiteGpu:
    """Describe one GPU of a site. GPUs of higher priority are served before others."""

    name: str
    safe_w: float
    most_w: float
    priority: int = 0


@dataclass(frozen=True)
class SitePlan:
    """Hold a budget and the GPUs that share it. Limits rise by ``ramp_w_per_s`` at most, each."""

    budget_w: float
    gpus: tuple[SiteGpu, ...]
    ramp_w_per_s: float = 50.0

    def __post_init__(self) -> None:
        safe_w = sum(gpu.safe_w for gpu in self.gpus)
        if not self.gpus or safe_w > self.budget_w:
            do = "Lower the power limits of the GPUs first (nvidia-smi -pl), or raise the budget."
            raise bad_value(
                "budget",
                f"at least the {safe_w:.0f} W that the GPUs may draw now",
                self.budget_w,
                do,
            )

    def share(self, drawn_w: Sequence[float], limits_w: Sequence[float]) -> list[float]:
        """Return the limits to aim for, by what each GPU draws under its present limit.

        Everybody keeps its safe share. The rest goes to priorities in falling order. Within one,
        every GPU gets the same fraction of what it needs above its safe share."""
        wanted = []
        for gpu, drawn, limit in zip(self.gpus, drawn_w, limits_w, strict=True):
            need = MORE * limit if drawn >= HELD_DOWN * limit else ROOM * drawn
            wanted.append(
                min(max(need, gpu.safe_w), gpu.most_w, limit + self.ramp_w_per_s * PERIOD_S)
                - gpu.safe_w
            )
        left = ROUNDED_DOWN * self.budget_w - sum(gpu.safe_w for gpu in self.gpus)
        shares = [gpu.safe_w for gpu in self.gpus]
        for priority in sorted({gpu.priority for gpu in self.gpus}, reverse=True):
            members = [i for i, gpu in enumerate(self.gpus) if gpu.priority == priority]
            need = sum(wanted[i] for i in members)
            fraction = min(1.0, max(left, 0.0) / need) if need > 0 else 0.0
            for i in members:
                shares[i] += fraction * wanted[i]
            left -= fraction * need
        return shares


class SiteCoordinator:
    """Lower limits first, and raise others by what was confirmed."""

    def __init__(self, plan: SitePlan, set_limit: Callable[[int, float], bool]) -> None:
        """``set_limit(gpu, watts)`` tells whether the node has confirmed."""
        self._plan = plan
        self._set = set_limit
        self.promised_w = [gpu.safe_w for gpu in plan.gpus]  # the most that each may be at

    def step(self, drawn_w: Mapping[int, float]) -> list[float]:
        """Take one second's readings (a GPU that does not answer is left out) and return the limits
        promised.
        """
        plan = self._plan
        before = list(self.promised_w)
        aims = plan.share([drawn_w.get(i, 0.0) for i in range(len(before))], before)
        for i, aim in enumerate(aims):
            if i in drawn_w and aim < before[i] and self._set(i, aim):
                self.promised_w[i] = aim
        free = ROUNDED_DOWN * plan.budget_w - sum(self.promised_w)
        rising = [i for i, aim in enumerate(aims) if i in drawn_w and aim > before[i]]
        for i in sorted(rising, key=lambda i: -plan.gpus[i].priority):
            more = min(aims[i] - before[i], free)
            if more > 0:  # promised even where the answer is lost: the node may have set it
                self.promised_w[i] = before[i] + more
                free -= more
                self._set(i, self.promised_w[i])
        return self.promised_w


class SiteNode:
    """Reach the GPUs of one node through its daemon, and connect anew when it was lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.link = DaemonLink(path)
        self.uuids = [card.uuid for card in self.link.status()]
        self._claim_cards()

    def _claim_cards(self) -> None:
        for uuid in self.uuids:
            self.link.ask(DaemonRequest("claim", uuid))

    def close(self) -> None:
        """Give all GPUs back."""
        self.link.close()

    def reconnect(self) -> bool:
        """Try to reach the node again; its GPUs then have their safe shares."""
        self.link.close()
        try:
            self.link = DaemonLink(self._path)
            self._claim_cards()
        except WattcastError:
            return False
        return True


def coordinate_site(
    nodes: Sequence[Path],
    budget_w: float,
    priorities: Mapping[str, int],
    say: Callable[[str], None],
    alive: Callable[[], bool],
) -> None:
    """Share a budget among the GPUs behind the sockets of several daemons until ``alive`` ends.

    Sockets of other nodes are forwarded (``ssh -L /run/site/b.sock:/run/wattcast/socket b``). What
    a node was promised stays reserved until it answers again."""
    with ExitStack() as stack:
        reached = [stack.enter_context(closing(SiteNode(path))) for path in nodes]
        cards = [(node, uuid) for node in reached for uuid in node.uuids]
        gpus = []
        for node, uuid in cards:
            limits_w = node.link.ask(DaemonRequest("read", uuid)).limits_w
            if limits_w is None:
                raise Refused(
                    f"{uuid} does not tell its power limit, so that it cannot share a budget."
                )
            gpus.append(SiteGpu(uuid, limits_w[0], limits_w[2], priorities.get(uuid, 0)))
        plan = SitePlan(budget_w, tuple(gpus))

        def set_limit(i: int, watts: float) -> bool:
            node, uuid = cards[i]
            try:
                return node.link.ask(DaemonRequest("set", uuid, limit_w=watts)).ok
            except WattcastError as error:
                say(f"{uuid}: {error}")
                return False

        coordinator = SiteCoordinator(plan, set_limit)
        last = ""
        while alive():
            time.sleep(PERIOD_S)
            drawn: dict[int, float] = {}
            for i, (node, uuid) in enumerate(cards):
                try:
                    power_w = node.link.ask(DaemonRequest("read", uuid)).power_w
                    node.link.ask(DaemonRequest("beat", uuid))
                except WattcastError as error:
                    say(f"{uuid}: {error}")
                    if node.reconnect():
                        for j, (other, _) in enumerate(cards):
                            coordinator.promised_w[j] = (
                                gpus[j].safe_w if other is node else coordinator.promised_w[j]
                            )
                    continue
                if power_w is not None:
                    drawn[i] = power_w
            limits = coordinator.step(drawn)
            said = ", ".join(f"{watts:.0f}" for watts in limits)
            if said != last:
                say(f"{sum(drawn.values()):.0f} W drawn; limits {said} W of {budget_w:.0f}")
                last = said


def rehearse_site(plan: SitePlan, demand_w: Array) -> tuple[Array, Array]:
    """Replay a day: ``demand_w`` is what each GPU would draw without a limit, ``(gpu, second)``.

    Return what all GPUs drew in each second, and the share of the energy that each asked for and
    got."""
    limits_w = [gpu.safe_w for gpu in plan.gpus]

    def set_limit(i: int, watts: float) -> bool:
        limits_w[i] = watts
        return True

    coordinator = SiteCoordinator(plan, set_limit)
    drawn_w = np.zeros_like(demand_w)
    for now, wanted_w in enumerate(demand_w.T):
        drawn_w[:, now] = np.minimum(wanted_w, limits_w)
        coordinator.step(dict(enumerate(drawn_w[:, now].tolist())))
    return drawn_w.sum(axis=0), drawn_w.sum(axis=1) / np.maximum(demand_w.sum(axis=1), 1e-9)
