"""Play a policy on a plant, and add up what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.manage.knobs import Settings
from wattcast.manage.observation import Observation
from wattcast.manage.plant import Noise, Plant, TableRun, Tables


class Policy(Protocol):
    """A controller: a pure state machine over observations."""

    def start(self) -> Any: ...

    def settings(self, state: Any, kernel: str) -> Settings: ...

    def step(self, state: Any, observation: Observation) -> tuple[Any, Settings]: ...


@dataclass(frozen=True)
class Played:
    """What a policy chose for an application, and what that truly costs; arrays over iterations."""

    application: str
    chosen: npt.NDArray[np.int64]  # flat index of the settings of each run
    phase: npt.NDArray[np.int64]
    time_s: Array
    energy_j: Array

    @property
    def total_s(self) -> float:
        return float(self.time_s.sum())

    @property
    def total_j(self) -> float:
        return float(self.energy_j.sum())


def play(plant: Plant, policy: Policy) -> Any:
    """Run the plant's application to its end under a policy; returns the policy's last state."""
    state = policy.start()
    while (kernel := plant.next_kernel()) is not None:
        observation = plant.run(policy.settings(state, kernel))
        state, _ = policy.step(state, observation)
    return state


def play_table(
    tables: Tables, application: str, policy: Policy, noise: Noise | None = None, seed: int = 0
) -> tuple[Played, Any]:
    """One application of a table under a policy, with what it truly cost and the last state."""
    run = TableRun(tables, application, noise, seed)
    state = play(run, policy)
    return charged(tables, application, np.asarray(run.settings, dtype=np.int64)), state


def charged(tables: Tables, application: str, chosen: npt.NDArray[np.int64]) -> Played:
    """What a sequence of settings costs, read from the tables at once."""
    phase = tables.order(application)[: len(chosen)]
    time_s = tables.time_s[phase, chosen]
    return Played(application, chosen, phase, time_s, time_s * tables.power_w[phase, chosen])


def residency(tables: Tables, played: Played) -> Mapping[str, dict[float, float]]:
    """Share of time at each level of each knob."""
    found: dict[str, dict[float, float]] = {}
    for knob in tables.lattice.knobs:
        values = tables.lattice.table(knob.role)[played.chosen]
        shares = {level: float(played.time_s[values == level].sum() / played.total_s) for level in knob.levels}
        found[str(knob.role)] = shares
    return found
