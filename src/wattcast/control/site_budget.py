"""Share a power budget among the GPUs of several nodes.

Every GPU has a *safe share*: the power limit it had before the coordinator came, set by the
administrator. Safe shares together keep to the budget. The coordinator hands out what is left of it
by priority and need, through the daemons of the nodes. A limit is raised only after those that make
room for it were lowered and the nodes have said so; so the limits in force never exceed the budget
in sum, whatever is late or lost. A node that loses the coordinator gets its safe shares back from
its daemon within five seconds, as any client's card does."""

from __future__ import annotations

import time
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import (
    Any,
    Literal,
    TypeVar,
)

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.control.card_daemon import BEAT_S, DaemonRequest
from wattcast.control.daemon_client import DaemonLink, SilentDaemon
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import (
    Refused,
    WattcastError,
    bad_value,
)


class SiteBudgetCoefficients(Coefficients):
    """How a site's watts are shared among its GPUs."""

    held_down: float  # of its limit, from which a card would draw more if it might
    more: float  # times its limit that a card that is held down is offered
    room: float  # times its draw that another card is offered


SITE = load_coefficients("site_budget", SiteBudgetCoefficients)


PERIOD_S = 1.0
LONGEST_NOTICE = 64  # characters of a file that says a budget
PATIENCE_S = 1.0  # with the daemon of one GPU, before the others are looked after
STRAY_W = 2.0  # above what a GPU was promised, from which somebody else has set its limit
ROUNDED_DOWN = 1 - 1e-9  # no sum of shares exceeds a budget by rounding

T = TypeVar("T")


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
            form = f"at least the {safe_w:.0f} W that the GPUs may draw now"
            advice = (
                "Lower the power limits of the GPUs first (nvidia-smi -pl), or raise the budget."
            )
            raise bad_value("budget", form, self.budget_w, advice)

    def share(
        self,
        drawn_w: Sequence[float],
        limits_w: Sequence[float],
        reserved_w: float = 0.0,
    ) -> list[float]:
        """Return the limits to aim for, by what each GPU draws under its present limit.

        Every GPU keeps its safe share. What remains, without ``reserved_w`` for GPUs that do not
        answer, goes to priorities in falling order. Within one, every GPU gets the same fraction
        of what it needs above its safe share."""
        needs_w = []
        for gpu, power_w, limit_w in zip(self.gpus, drawn_w, limits_w, strict=True):
            needs_w.append(self._find_need_w(gpu, power_w, limit_w))
        shares_w = [gpu.safe_w for gpu in self.gpus]
        remaining_w = ROUNDED_DOWN * self.budget_w - sum(shares_w) - reserved_w
        for priority in sorted({gpu.priority for gpu in self.gpus}, reverse=True):
            members = [i for i, gpu in enumerate(self.gpus) if gpu.priority == priority]
            need_w = sum(needs_w[i] for i in members)
            fraction = 0.0
            if need_w > 0:
                fraction = min(1.0, max(remaining_w, 0.0) / need_w)
            for i in members:
                shares_w[i] += fraction * needs_w[i]
            remaining_w -= fraction * need_w
        return shares_w

    def _find_need_w(
        self,
        gpu: SiteGpu,
        power_w: float,
        limit_w: float,
    ) -> float:
        """Return what a GPU needs above its safe share; a GPU at its limit needs more than that."""
        need_w = SITE.room * power_w
        if power_w >= SITE.held_down * limit_w:
            need_w = SITE.more * limit_w
        highest_w = min(gpu.most_w, limit_w + self.ramp_w_per_s * PERIOD_S)
        return min(max(need_w, gpu.safe_w), highest_w) - gpu.safe_w


class SiteCoordinator:
    """Lower limits first, and raise others by what was confirmed."""

    def __init__(
        self,
        plan: SitePlan,
        set_limit: Callable[[int, float], bool],
    ) -> None:
        """``set_limit(gpu, watts)`` tells whether the node has confirmed."""
        self._plan = plan
        self._set = set_limit
        self.promised_w = [gpu.safe_w for gpu in plan.gpus]  # the most that each may be at

    def change_budget(self, budget_w: float) -> None:
        """Share another budget from the next step on; safe shares have to keep to it."""
        self._plan = replace(self._plan, budget_w=budget_w)

    def reclaim(self, i: int) -> None:
        """Have a GPU that somebody gave back set to its safe share, whatever it has now.

        A node that was switched off comes back at the limit of its board, not at the one that its
        administrator had set. What the GPU was promised stays reserved until it confirms."""
        safe_w = self._plan.gpus[i].safe_w
        if self._set(i, safe_w):
            self.promised_w[i] = safe_w

    def step(
        self,
        drawn_w: Mapping[int, float],
        in_force_w: Mapping[int, float] | None = None,
    ) -> list[float]:
        """Take one second's readings (a GPU that does not answer is left out) and return the limits
        promised.

        ``in_force_w`` is the limit that a GPU reads. One above what it was promised was set by
        somebody else, and is lowered again first.
        """
        plan = self._plan
        for i, limit_w in (in_force_w or {}).items():
            if limit_w > self.promised_w[i] + STRAY_W:
                self._set(i, self.promised_w[i])
        before_w = list(self.promised_w)
        silent_w = [
            promised_w - gpu.safe_w
            for i, (promised_w, gpu) in enumerate(zip(before_w, plan.gpus, strict=True))
            if i not in drawn_w
        ]
        aims_w = plan.share(
            [drawn_w.get(i, 0.0) for i in range(len(before_w))],
            before_w,
            sum(silent_w),
        )

        # Lower limits first: what is confirmed is free for others.
        for i, aim_w in enumerate(aims_w):
            if i in drawn_w and aim_w < before_w[i] and self._set(i, aim_w):
                self.promised_w[i] = aim_w
        free_w = ROUNDED_DOWN * plan.budget_w - sum(self.promised_w)
        rising = [i for i, aim_w in enumerate(aims_w) if i in drawn_w and aim_w > before_w[i]]
        for i in sorted(rising, key=lambda i: -plan.gpus[i].priority):
            more_w = min(aims_w[i] - before_w[i], free_w)
            if more_w > 0:  # promised even where the answer is lost: the node may have set it
                self.promised_w[i] = before_w[i] + more_w
                free_w -= more_w
                self._set(i, self.promised_w[i])
        return self.promised_w


@dataclass(frozen=True)
class CardLook:
    """What the daemon tells of a GPU in one second; None where the card does not tell it."""

    power_w: float | None
    in_force_w: float | None  # the limit that the card reads
    was_given_back: bool  # since the last look


class SiteCard:
    """Hold one GPU through a connection of its own, in a thread of its own.

    A GPU that hangs, lies or is lost so makes no other one late. The thread is heard by the daemon
    whenever it has nothing else to ask."""

    def __init__(
        self,
        path: Path,
        uuid: str,
    ) -> None:
        self.uuid = uuid
        self._path = path
        self._link: DaemonLink | None = DaemonLink(path)
        self._was_given_back = False
        self._ask("claim")
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._latest: Future[Any] = Future()
        self._latest.set_result(None)
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the GPU back."""
        self._jobs.put(None)
        self._thread.join(PATIENCE_S)
        if self._link is not None:
            self._link.close()

    @property
    def is_busy(self) -> bool:
        """Whether an earlier question has no answer yet."""
        return not self._latest.done()

    def start_look(self) -> Future[CardLook]:
        """Ask what the GPU draws, and whether it was given back since it was asked last."""
        return self._start(self._look)

    def start_set(self, limit_w: float) -> Future[bool]:
        """Ask for a power limit; the answer is whether the daemon has confirmed it."""
        return self._start(lambda: self._ask("set", limit_w).ok)

    def _start(self, job: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        self._latest = answer
        self._jobs.put((answer, job))
        return answer

    def _work(self) -> None:
        while True:
            try:
                item = self._jobs.get(timeout=BEAT_S / 2)
            except Empty:
                with suppress(WattcastError):
                    self._keep()
                continue
            if item is None:
                return
            answer, job = item
            try:
                answer.set_result(job())
            except Exception as error:
                answer.set_exception(error)

    def _look(self) -> CardLook:
        self._keep()
        was_given_back = self._was_given_back
        self._was_given_back = False
        reply = self._ask("read")
        return CardLook(reply.power_w, reply.in_force_w, was_given_back)

    def _keep(self) -> None:
        """Hold on to the GPU; one that the daemon gave back is claimed anew, at its safe share."""
        try:
            self._ask("beat")
        except Refused:
            self._ask("claim")
            self._was_given_back = True

    def _ask(
        self,
        op: Literal["read", "beat", "claim", "set"],
        limit_w: float | None = None,
    ) -> Any:
        """Ask the daemon, through a new connection where the last one was lost."""
        try:
            if self._link is None:
                self._link = DaemonLink(self._path)
            return self._link.ask(DaemonRequest(op, self.uuid, limit_w=limit_w, lease="limit"))
        except SilentDaemon:
            if self._link is not None:
                self._link.close()
            self._link = None
            raise


class Site:
    """Keep the budget of all GPUs behind the sockets of several daemons.

    What a GPU was promised stays reserved until its daemon answers again."""

    def __init__(
        self,
        nodes: Sequence[Path],
        budget_w: float,
        priorities: Mapping[str, int],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._cards: list[SiteCard] = []
        gpus = []
        for path in nodes:
            with closing(DaemonLink(path)) as link:
                for card in link.status():
                    limits_w = link.ask(DaemonRequest("read", card.uuid)).limits_w
                    if limits_w is None:
                        why = "does not tell its power limit, so that it cannot share a budget"
                        raise Refused(f"{card.uuid} {why}.")
                    rank = priorities.get(card.uuid, 0)
                    gpus.append(SiteGpu(card.uuid, limits_w[0], limits_w[2], rank))
                    self._cards.append(SiteCard(path, card.uuid))
        self.plan = SitePlan(budget_w, tuple(gpus))
        self.coordinator = SiteCoordinator(self.plan, self._set_limit)

    def close(self) -> None:
        """Give all GPUs back."""
        for card in self._cards:
            card.close()

    def step(self) -> tuple[dict[int, float], list[float]]:
        """Take one second's readings; return what GPUs draw and the limits they are promised."""
        looks = {i: card.start_look() for i, card in enumerate(self._cards) if not card.is_busy}
        wait(looks.values(), PATIENCE_S)
        drawn_w: dict[int, float] = {}
        in_force_w: dict[int, float] = {}
        for i, pending in looks.items():
            try:
                look = pending.result(0.0)
            except (WattcastError, TimeoutError) as error:
                self._report(i, error)
                continue
            if look.was_given_back:
                self.coordinator.reclaim(i)
            if look.in_force_w is not None:
                in_force_w[i] = look.in_force_w
            if look.power_w is not None:
                drawn_w[i] = look.power_w
        return drawn_w, self.coordinator.step(drawn_w, in_force_w)

    def _set_limit(
        self,
        i: int,
        watts: float,
    ) -> bool:
        try:
            return self._cards[i].start_set(watts).result(PATIENCE_S)
        except (WattcastError, TimeoutError) as error:
            self._report(i, error)
            return False

    def _report(
        self,
        i: int,
        error: Exception,
    ) -> None:
        why = str(error) or f"the daemon has not answered for {PATIENCE_S:.0f} s."
        self._say(f"{self._cards[i].uuid}: {why}")


class BudgetNotice:
    """Follow a file that says how many watts a site may draw now, such as ``2.4kW``.

    A file that is gone means the budget of the command. One that says no power, or less than the
    safe shares need, changes nothing and is reported once."""

    def __init__(
        self,
        path: Path | None,
        usual_w: float,
        say: Callable[[str], None],
    ) -> None:
        self._path = path
        self._usual_w = usual_w
        self._budget_w = usual_w
        self._say = say
        self._complaint = ""

    def follow(self, coordinator: SiteCoordinator) -> float:
        """Give the coordinator the budget of this second, and return it."""
        try:
            budget_w = self._read_budget_w()
            if budget_w != self._budget_w:
                coordinator.change_budget(budget_w)
                self._say(f"the budget is {budget_w:.0f} W from now on")
                self._budget_w = budget_w
            self._complaint = ""
        except (WattcastError, OSError, UnicodeDecodeError) as error:
            if str(error) != self._complaint:
                self._say(f"{self._path}: {error} The budget stays {self._budget_w:.0f} W.")
            self._complaint = str(error)
        return self._budget_w

    def _read_budget_w(self) -> float:
        if self._path is None or not self._path.exists():
            return self._usual_w
        text = self._path.read_text(encoding="utf-8")[:LONGEST_NOTICE].strip()
        return units.parse_amount(text, "W", "budget", inclusive=False)


def coordinate_site(
    nodes: Sequence[Path],
    budget_w: float,
    priorities: Mapping[str, int],
    say: Callable[[str], None],
    alive: Callable[[], bool],
    budget_file: Path | None = None,
) -> None:
    """Share a budget among the GPUs behind the sockets of several daemons until ``alive`` ends.

    Sockets of other nodes are forwarded (``ssh -L /run/site/b.sock:/run/wattcast/socket b``).
    What ``budget_file`` says goes before ``budget_w`` from the next second on."""
    with closing(Site(nodes, budget_w, priorities, say)) as site:
        earlier_limits = ""
        notice = BudgetNotice(budget_file, budget_w, say)
        while alive():
            time.sleep(PERIOD_S)
            budget_w = notice.follow(site.coordinator)
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
