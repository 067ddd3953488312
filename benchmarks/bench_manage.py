"""One decision of the controller, with and without a power cap, and ten thousand iterations.

As asv tracks it, or as a table: ``python -m benchmarks.bench_manage``. A decision is a pure
function, so each is made again in passes some time apart and its shortest time counts; garbage
collection is off, and how often a decision took over 50 µs as it came is shown beside (collection
on, stalls of the machine and all). Units are plain Python work done in between, a hundred entries
put into a dictionary, which slows down as much as the machine does."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from wattcast.control import hd7970
from wattcast.control.plants import Observation, TablePlant, play_application
from wattcast.control.policies import (
    ControllerState,
    Harmonia,
    PolicyName,
    PolicySetup,
    make_controller,
    score_tables,
)
from wattcast.control.search_problem import Objective
from wattcast.control.sensitivity_model import load_shipped_model

ITERATIONS = 10_000
PASSES = 8
MOST_US = 50.0
CAPS_W = (None, 150.0, 180.0)
POLICIES = (
    PolicyName.HARMONIA,
    PolicyName.COARSE,
    PolicyName.CORE_CLOCK,
)  # those that decide while a program runs


@dataclass(frozen=True)
class Cost:
    """Decisions of one controller, in µs."""

    mean_us: float
    p99_us: float
    worst_us: float
    unit_us: float
    over_as_it_came: float  # share


def moments(controller: Harmonia) -> Iterator[tuple[ControllerState, Observation]]:
    """Every state and observation of all applications of the simulated card, searching and settled."""
    tables = hd7970.load_tables()
    for application in tables.applications:
        run, state = TablePlant(tables, application), controller.start()
        while (kernel := run.next_kernel()) is not None:
            observation = run.run(controller.settings(state, kernel))
            yield state, observation
            state, _ = controller.step(state, observation)


def plain_work() -> None:
    """The unit of cost."""
    found = {}
    for i in range(100):
        found[i] = i * 1.5


def cost(controller: Harmonia) -> Cost:
    """What its decisions take."""
    made = list(moments(controller))
    came = np.array([_us(lambda s=s, o=o: controller.step(s, o)) for s, o in made])
    shortest, unit = np.full(len(made), np.inf), np.full(len(made), np.inf)
    gc.disable()
    for _ in range(PASSES):
        for i, (s, o) in enumerate(made):
            shortest[i] = min(shortest[i], _us(lambda s=s, o=o: controller.step(s, o)))
            unit[i] = min(unit[i], _us(plain_work))
    gc.enable()
    p99 = float(np.quantile(shortest, 0.99))
    return Cost(
        shortest.mean(), p99, shortest.max(), float(np.median(unit)), float((came > MOST_US).mean())
    )


def _us(work) -> float:
    begin = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - begin)


def controller(cap_w: float | None, policy: PolicyName = PolicyName.HARMONIA) -> Harmonia:
    setup = PolicySetup(
        objective=Objective(cap_w=cap_w), model=load_shipped_model("hd7970_simulated")
    )
    found = make_controller(hd7970.load_tables(), policy, setup)
    assert found is not None
    return found


class Manage:
    """The controller on the simulated HD 7970."""

    params = CAPS_W
    param_names = ("cap_w",)

    def setup(self, cap_w: float | None) -> None:
        tables = hd7970.load_tables()
        order = np.resize(tables.applications["CoMD"], ITERATIONS)
        self.tables = replace(tables, applications={"long": order})
        self.controller = controller(cap_w)

    def time_ten_thousand_iterations(self, cap_w: float | None) -> None:
        play_application(self.tables, "long", self.controller)

    def track_decision_us(self, cap_w: float | None) -> float:
        return cost(self.controller).mean_us

    def track_p99_decision_us(self, cap_w: float | None) -> float:
        return cost(self.controller).p99_us

    def track_iterations_per_oracle_sweep(self, cap_w: float | None) -> float:
        """How many controlled iterations take as long as the oracle over 448 settings of 32 phases."""
        begin = time.perf_counter()
        score_tables(self.tables, Objective()).argmin(axis=-1)
        sweep_s = time.perf_counter() - begin
        begin = time.perf_counter()
        play_application(self.tables, "long", self.controller)
        return sweep_s / ((time.perf_counter() - begin) / ITERATIONS)


if __name__ == "__main__":
    print("policy, cap: mean / 99 % / worst in µs; the same in units; over 50 µs as they came")
    for name in POLICIES:
        for watts in CAPS_W:
            c = cost(controller(watts, name))
            us = [c.mean_us, c.p99_us, c.worst_us]
            units = " / ".join(f"{v / c.unit_us:.1f}" for v in us)
            shown = " / ".join(f"{v:.0f}" for v in us)
            held = f"{watts:.0f} W" if watts else "no cap"
            print(
                f"{name:16s} {held:7s} {shown:16s} {units:20s} unit {c.unit_us:.1f} µs, {c.over_as_it_came:.1%}"
            )
