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

from wattcast.control.card_daemon import DaemonReply, DaemonRequest
from wattcast.control.daemon_client import DaemonLink, SilentDaemon
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
    """Reach the GPUs of one node through its daemon.

    A GPU that fails leaves the others of its node as they are. Where the connection is lost, all of
    them go back to their safe shares and are claimed anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.link = DaemonLink(path)
        self.is_lost = False
        self.uuids = [card.uuid for card in self.link.status()]
        for uuid in self.uuids:
            self.link.ask(DaemonRequest("claim", uuid))

    def close(self) -> None:
        """Give all GPUs back."""
        self.link.close()

    def reconnect(self) -> bool:
        """Try to reach a lost node again, and tell whether it answers."""
        self.link.close()
        try:
            self.link = DaemonLink(self._path)
        except WattcastError:
            return False
        self.is_lost = False
        return True

    def ask(self, request: DaemonRequest) -> DaemonReply:
        """Ask the daemon; one that does not answer is lost until ``reconnect``."""
        try:
            return self.link.ask(request)
        except SilentDaemon:
            self.is_lost = True
            raise

    def read_power_w(self, uuid: str) -> float | None:
        """Return what a GPU draws, if its driver tells."""
        return self.ask(DaemonRequest("read", uuid)).power_w

    def keep(self, uuid: str) -> bool:
        """Hold on to a GPU, and tell whether it was ours.

        One that the daemon gave back meanwhile is claimed anew, at its safe share.
        """
        try:
            self.ask(DaemonRequest("beat", uuid))
        except Refused:
            self.ask(DaemonRequest("claim", uuid))
            return False
        return True


class Site:
    """Keep the budget of all GPUs behind the sockets of several daemons.

    What a GPU was promised stays reserved until its node answers again."""

    def __init__(
        self,
        nodes: Sequence[SiteNode],
        budget_w: float,
        priorities: Mapping[str, int],
        say: Callable[[str], None],
    ) -> None:
        self._nodes = nodes
        self._say = say
        self._cards = [(node, uuid) for node in nodes for uuid in node.uuids]
        gpus = []
        for node, uuid in self._cards:
            limits_w = node.ask(DaemonRequest("read", uuid)).limits_w
            if limits_w is None:
                why = "does not tell its power limit, so that it cannot share a budget"
                raise Refused(f"{uuid} {why}.")
            gpus.append(SiteGpu(uuid, limits_w[0], limits_w[2], priorities.get(uuid, 0)))
        self.plan = SitePlan(budget_w, tuple(gpus))
        self.coordinator = SiteCoordinator(self.plan, self._set_limit)

    def _set_limit(self, i: int, watts: float) -> bool:
        node, uuid = self._cards[i]
        try:
            return node.ask(DaemonRequest("set", uuid, limit_w=watts)).ok
        except WattcastError as error:
            self._say(f"{uuid}: {error}")
            return False

    def step(self) -> tuple[dict[int, float], list[float]]:
        """Take one second's readings; return what GPUs draw and the limits they are promised."""
        for node in self._nodes:
            if node.is_lost and not node.reconnect():
                self._say(f"{', '.join(node.uuids)}: the daemon does not answer.")

        drawn_w: dict[int, float] = {}
        for i, (node, uuid) in enumerate(self._cards):
            if node.is_lost:
                continue
            try:
                if not node.keep(uuid):
                    self.coordinator.promised_w[i] = self.plan.gpus[i].safe_w
                power_w = node.read_power_w(uuid)
            except WattcastError as error:
                self._say(f"{uuid}: {error}")
                continue
            if power_w is not None:
                drawn_w[i] = power_w
        return drawn_w, self.coordinator.step(drawn_w)


def coordinate_site(
    nodes: Sequence[Path],
    budget_w: float,
    priorities: Mapping[str, int],
    say: Callable[[str], None],
    alive: Callable[[], bool],
) -> None:
    """Share a budget among the GPUs behind the sockets of several daemons until ``alive`` ends.

    Sockets of other nodes are forwarded (``ssh -L /run/site/b.sock:/run/wattcast/socket b``)."""
    with ExitStack() as stack:
        reached = [stack.enter_context(closing(SiteNode(path))) for path in nodes]
        site = Site(reached, budget_w, priorities, say)
        earlier_limits = ""
        while alive():
            time.sleep(PERIOD_S)
            drawn_w, limits_w = site.step()
            limits = ", ".join(f"{watts:.0f}" for watts in limits_w)
            if limits != earlier_limits:
                total_w = sum(drawn_w.values())
                say(f"{total_w:.0f} W drawn; limits {limits} W of {budget_w:.0f}")
                earlier_limits = limits


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
