"""A site's budget holds in every second, whatever is late or lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from wattcast.control import site_budget
from wattcast.control.card_daemon import SILENT_S, CardStatus, DaemonReply, DaemonRequest
from wattcast.control.card_settings import CardSettings
from wattcast.control.daemon_client import SilentDaemon
from wattcast.control.site_budget import (
    BudgetNotice,
    Site,
    SiteCoordinator,
    SiteGpu,
    SitePlan,
    rehearse_site,
)
from wattcast.core.errors import BadInput, Refused

DAY_S = 86_400


def make_site(count: int = 6, budget_w: float = 2700.0) -> SitePlan:
    """Build two nodes of GPUs between 300 W, safe, and 700 W; the first GPU of each goes first."""
    gpus = [
        SiteGpu(f"{'ab'[i % 2]}{i // 2}", 300.0, 700.0, priority=int(i < 2)) for i in range(count)
    ]
    return SitePlan(budget_w, tuple(gpus))


def draw_demand(count: int, seconds: int, seed: int) -> np.ndarray:
    """Draw a day of traffic: a slow swing, and jobs that come and go from one second to the next."""
    draw = np.random.default_rng(seed)
    swing = 0.5 + 0.4 * np.sin(2 * np.pi * (np.arange(seconds) / DAY_S - 0.3))
    busy = draw.random((count, seconds // 60)) < swing[::60][np.newaxis]
    jobs = np.repeat(busy, 60, axis=1)[:, :seconds]
    return np.where(jobs, 450.0 + 250.0 * draw.random((count, seconds)), 90.0)


def replay_losses(plan: SitePlan, demand_w: np.ndarray, lost: np.ndarray, coordinated: np.ndarray):
    """Replay a day; return the sums, ``(second,)``, of what GPUs draw and of their limits in force.

    ``lost`` marks seconds in which a node does not answer, ``(gpu, second)``; ``coordinated`` those
    in which the coordinator lives, ``(second,)``. A GPU that hears nothing for ``SILENT_S`` goes
    back to its safe share."""
    count, seconds = demand_w.shape
    limits, heard, now = [gpu.safe_w for gpu in plan.gpus], [0] * count, 0

    def set_limit(i: int, watts: float) -> bool:
        if lost[i, now]:
            return False
        limits[i], heard[i] = watts, now
        return True

    coordinator, down_since = SiteCoordinator(plan, set_limit), None
    drawn_w, limits_w = np.zeros(seconds), np.zeros(seconds)
    for now in range(seconds):
        draws = [min(float(demand_w[i, now]), limits[i]) for i in range(count)]
        drawn_w[now], limits_w[now] = sum(draws), sum(limits)
        if not coordinated[now]:
            down_since = now if down_since is None else down_since
        else:
            if (
                down_since is not None
            ):  # a new coordinator begins with the safe shares, once they are in force
                if now - down_since <= SILENT_S + 1:
                    continue
                coordinator, down_since = SiteCoordinator(plan, set_limit), None
            answers = {i: draws[i] for i in range(count) if not lost[i, now]}
            for i in answers:
                heard[i] = now
            coordinator.step(answers)
        for i, gpu in enumerate(plan.gpus):
            if now - heard[i] >= SILENT_S:
                limits[i] = gpu.safe_w
    return drawn_w, limits_w


def test_a_budget_below_the_safe_shares_is_refused() -> None:
    with pytest.raises(BadInput, match="1800 W"):
        make_site(budget_w=1500.0)


def test_need_and_priority_decide_and_everybody_keeps_the_safe_share() -> None:
    plan = make_site()
    shares = plan.share([700.0] * 6, [700.0] * 6)
    assert shares[:2] == [700.0, 700.0]
    assert shares[2:] == pytest.approx([325.0] * 4)  # what is left of 2700 W, in equal parts
    assert sum(shares) <= 2700.0
    idle = plan.share(
        [90.0, 90.0, 690.0, 690.0, 90.0, 90.0], [300.0, 300.0, 690.0, 690.0, 300.0, 300.0]
    )
    assert idle[2] == idle[3] == pytest.approx(700.0)
    assert idle[0] == 300.0


def test_limits_rise_by_the_ramp_and_only_after_others_were_lowered() -> None:
    plan, order = make_site(2, 1000.0), list[tuple[int, float]]()
    refused: set[int] = set()

    def set_limit(gpu: int, watts: float) -> bool:
        order.append((gpu, watts))
        return gpu not in refused

    coordinator = SiteCoordinator(plan, set_limit)
    assert coordinator.step({0: 300.0, 1: 90.0}) == [350.0, 300.0]
    for _ in range(20):
        coordinator.step({0: coordinator.promised_w[0], 1: 90.0})
    assert coordinator.promised_w == pytest.approx([700.0, 300.0])
    order.clear()
    refused.add(0)  # the node of GPU 0 does not confirm: what it has stays reserved
    for _ in range(5):
        coordinator.step({0: 90.0, 1: 300.0})
        assert sum(coordinator.promised_w) <= 1000.0
    assert coordinator.promised_w == pytest.approx([700.0, 300.0])
    refused.clear()
    order.clear()
    coordinator.step({0: 90.0, 1: 300.0})
    assert order[0][0] == 0  # lowered first


@pytest.mark.parametrize("seed", range(3))
def test_no_second_exceeds_the_budget_with_lost_nodes_and_coordinators(seed: int) -> None:
    seconds, plan, draw = 7200, make_site(), np.random.default_rng(100 + seed)
    lost = np.repeat(draw.random((6, seconds // 20)) < 0.05, 20, axis=1)
    coordinated = np.repeat(draw.random(seconds // 40) > 0.05, 40)
    drawn_w, limits_w = replay_losses(plan, draw_demand(6, seconds, seed), lost, coordinated)
    assert limits_w.max() <= 2700.0 + 1e-6
    assert drawn_w.max() <= 2700.0 + 1e-6


@pytest.mark.slow
def test_no_second_of_a_day_exceeds_the_budget() -> None:
    plan, demand = make_site(), draw_demand(6, DAY_S, 7)
    fixed = np.minimum(demand, 2700.0 / 6).sum() / demand.sum()
    drawn_w, shares = rehearse_site(plan, demand)
    served = (shares * demand.sum(axis=1)).sum() / demand.sum()
    print(
        f"most drawn {drawn_w.max():.1f} W of 2700; served {served:.1%}, equal shares {fixed:.1%}, {shares}"
    )
    assert drawn_w.max() <= 2700.0
    assert served > fixed
    assert shares[:2].min() > shares[2:].max()


class SiteDaemon:
    """The daemon of a node in this process."""

    def __init__(self, count: int) -> None:
        self.limits_w = {f"GPU-{i}": 300.0 for i in range(count)}
        self.holder: dict[str, SiteLink] = {}
        self.lost: set[str] = set()
        self.hanging: set[str] = set()
        self.goes_on = threading.Event()
        self.is_down = False
        self.connections = 0

    def link(self, path: Path) -> SiteLink:
        if self.is_down:
            raise SilentDaemon(f"the daemon at {path} accepts nobody.")
        self.connections += 1
        return SiteLink(self)

    def give_back(self, uuid: str) -> None:
        self.holder.pop(uuid, None)
        self.limits_w[uuid] = 300.0

    def go_down(self) -> None:
        """End, and give back all cards."""
        self.is_down = True
        for uuid in list(self.holder):
            self.give_back(uuid)


class SiteLink:
    """A connection to that daemon, which gives back what it holds when it is closed."""

    def __init__(self, daemon: SiteDaemon) -> None:
        self.daemon = daemon

    def close(self) -> None:
        for uuid, holder in list(self.daemon.holder.items()):
            if holder is self:
                self.daemon.give_back(uuid)

    def status(self) -> list[CardStatus]:
        return [CardStatus(uuid, "", "", CardSettings(), None) for uuid in self.daemon.limits_w]

    def ask(self, request: DaemonRequest) -> DaemonReply:
        daemon = self.daemon
        uuid = request.gpu
        if uuid in daemon.hanging:
            daemon.goes_on.wait(60.0)
        if daemon.is_down:
            raise SilentDaemon("the daemon has ended.")
        if request.op in ("read", "set") and uuid in daemon.lost:
            raise Refused(f"the card {uuid} is lost.")
        if request.op == "claim":
            daemon.holder[uuid] = self
        elif request.op != "read" and daemon.holder.get(uuid) is not self:
            raise Refused(f"{uuid} is not held by you.")
        if request.limit_w is not None:
            daemon.limits_w[uuid] = request.limit_w
        limit_w = daemon.limits_w[uuid]
        return DaemonReply(
            True,
            power_w=limit_w,
            limits_w=(limit_w, 200.0, 700.0),
            in_force_w=limit_w,
        )


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> SiteDaemon:
    made = SiteDaemon(4)
    monkeypatch.setattr(site_budget, "DaemonLink", made.link)
    monkeypatch.setattr(site_budget, "PATIENCE_S", 30.0)  # on a machine that is busy
    return made


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def site(daemon: SiteDaemon, said: list[str]) -> Iterator[Site]:
    """A site of four cards, each of which has its share of what is left."""
    with closing(Site([Path("socket")], 1600.0, {}, said.append)) as made:
        for _ in range(10):
            made.step()
        assert daemon.limits_w == pytest.approx({f"GPU-{i}": 400.0 for i in range(4)})
        assert daemon.connections == 5
        yield made


def test_a_lost_card_leaves_the_others_their_shares(
    site: Site, daemon: SiteDaemon, said: list[str]
) -> None:
    """Each second that a card of a node was lost, all others went back to their safe shares."""
    daemon.lost.add("GPU-2")
    for _ in range(5):
        site.step()
        others = [watts for uuid, watts in daemon.limits_w.items() if uuid != "GPU-2"]
        assert min(others) == pytest.approx(400.0)
    assert daemon.connections == 5
    assert said == ["GPU-2: the card GPU-2 is lost."] * 5


def test_a_card_that_hangs_makes_no_other_late(
    site: Site, daemon: SiteDaemon, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others were not heard while the coordinator waited for one, and lost their shares."""
    daemon.hanging.add("GPU-2")
    monkeypatch.setattr(site_budget, "PATIENCE_S", 0.2)
    drawn_w, limits_w = site.step()
    assert 2 not in drawn_w
    assert limits_w == pytest.approx([400.0] * 4)  # reserved
    assert said[0].startswith("GPU-2: the daemon has not answered")
    monkeypatch.setattr(site_budget, "PATIENCE_S", 30.0)
    drawn_w, _ = site.step()  # does not wait for it
    assert set(drawn_w) == {0, 1, 3}
    daemon.goes_on.set()
    while 2 not in drawn_w:
        drawn_w, limits_w = site.step()
    assert limits_w == pytest.approx([400.0] * 4)


def test_a_card_that_was_given_back_is_claimed_again_from_its_safe_share(
    site: Site, daemon: SiteDaemon, said: list[str]
) -> None:
    daemon.give_back("GPU-1")
    _, limits_w = site.step()
    assert 300.0 < limits_w[1] <= 350.0  # by the ramp, from the safe share
    assert min(limits_w[i] for i in (0, 2, 3)) >= 399.9
    assert sum(limits_w) <= 1600.0
    assert daemon.connections == 5
    assert said == []


def test_an_idle_card_is_heard_without_a_question(site: Site, daemon: SiteDaemon) -> None:
    """Beats came once a round, however long the round was."""
    daemon.give_back("GPU-1")
    end_s = time.monotonic() + 60.0
    while "GPU-1" not in daemon.holder:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_node_that_is_lost_is_reached_again(site: Site, daemon: SiteDaemon) -> None:
    daemon.go_down()
    for _ in range(3):
        _, limits_w = site.step()
        assert limits_w == pytest.approx([400.0] * 4)  # reserved: nobody knows
    daemon.is_down = False
    _, limits_w = site.step()
    assert daemon.connections == 9
    assert limits_w == pytest.approx([350.0] * 4)
    assert daemon.limits_w == pytest.approx({f"GPU-{i}": 350.0 for i in range(4)})
    for _ in range(5):
        site.step()
    assert min(daemon.limits_w.values()) == pytest.approx(400.0)


def test_a_card_that_came_back_at_its_boards_limit_is_lowered_first(
    site: Site, daemon: SiteDaemon
) -> None:
    """A node that was switched off came back at 700 W and was believed to have its safe share."""
    daemon.give_back("GPU-1")
    daemon.limits_w["GPU-1"] = 700.0
    site.step()
    assert daemon.limits_w["GPU-1"] <= 350.0
    assert sum(daemon.limits_w.values()) <= 1600.0


def test_a_limit_that_somebody_raised_by_hand_is_lowered_again(
    site: Site, daemon: SiteDaemon
) -> None:
    daemon.limits_w["GPU-2"] = 700.0
    site.step()
    assert daemon.limits_w["GPU-2"] == pytest.approx(400.0)


def test_a_budget_in_a_file_holds_as_long_as_the_file(
    site: Site, daemon: SiteDaemon, tmp_path: Path, said: list[str]
) -> None:
    path = tmp_path / "budget"
    notice = BudgetNotice(path, 1600.0, said.append)
    assert notice.follow(site.coordinator) == 1600.0
    path.write_text("1.4kW\n")
    assert notice.follow(site.coordinator) == 1400.0
    site.step()
    assert sum(daemon.limits_w.values()) == pytest.approx(1400.0)
    for text in ("1kW", "much", "-1kW"):  # less than the safe shares, and no power at all
        path.write_text(text)
        assert notice.follow(site.coordinator) == notice.follow(site.coordinator) == 1400.0
    assert len(said) == 4
    assert "safe" in said[1] or "1200 W" in said[1]
    path.unlink()
    assert notice.follow(site.coordinator) == 1600.0
    for _ in range(5):
        site.step()
    assert sum(daemon.limits_w.values()) == pytest.approx(1600.0)
