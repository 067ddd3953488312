"""Policies beside the controller: what it is measured against.

Those that know the tables (oracle, static best, vendor default, race to idle, a forecast) are array
expressions; the controller and its reduced forms are played run by run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.fit.sensitivity import SensitivityModel
from wattcast.manage.harmonia import Harmonia, State
from wattcast.manage.knobs import Role, Settings
from wattcast.manage.objective import WALL, Objective
from wattcast.manage.plant import Noise, Tables
from wattcast.manage.simulate import Played, charged, play_table
from wattcast.manage.tuning import Tuning

Indices = npt.NDArray[np.int64]


class Name(StrEnum):
    """Policies by name, in the order they are shown."""

    DEFAULT = "default"
    RACE_TO_IDLE = "race_to_idle"
    CORE_CLOCK = "core_clock_only"
    COARSE = "coarse_only"
    STATIC = "static_best"
    PREDICTIVE = "model_predictive"
    GUIDED = "predictive_then_fine"
    HARMONIA = "harmonia"
    ORACLE = "oracle"


@dataclass(frozen=True)
class Setup:
    """What the policies of one comparison share."""

    objective: Objective = field(default_factory=Objective)
    model: SensitivityModel | None = None
    tuning: Tuning = field(default_factory=Tuning)
    forecast: Mapping[str, Settings] = field(default_factory=dict)  # application -> settings chosen beforehand
    noise: Noise | None = None
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One application under one policy: all its runs, and what the policy holds to at the end."""

    policy: Name
    played: Played
    converged: Indices  # (phase,) settings at the end, for every phase of the tables
    idle_j: float = 0.0  # spent waiting, where the policy does
    idle_s: float = 0.0


def scores(tables: Tables, objective: Objective) -> Array:
    """The objective of every phase at every setting, per unit of work, in logs; ``(phase, setting)``."""
    work = tables.work[:, np.newaxis] if tables.work is not None else 1.0
    time_s = tables.time_s / work
    reference = time_s[:, [tables.lattice.flat(tables.default)]]
    return objective.scores(time_s, tables.power_w, reference)


def oracle(tables: Tables, objective: Objective) -> Indices:
    """The best setting of each phase: the whole table at once."""
    return np.asarray(scores(tables, objective).argmin(axis=-1), dtype=np.int64)


def static_best(tables: Tables, application: str, objective: Objective) -> int:
    """The one setting for the whole application that serves it best; a slowdown bounds its total time."""
    counts = np.bincount(tables.order(application), minlength=len(tables.kernels)).astype(np.float64)
    time_s, energy_j = counts @ tables.time_s, counts @ tables.energy_j
    each = replace(objective, slowdown=None)  # latency and cap hold for every run
    walls = (scores(tables, each) - scores(tables, Objective(objective.goal)))[counts > 0].max(axis=0)
    if objective.slowdown is not None:
        limit_s = time_s[tables.lattice.flat(tables.default)] * (1 + objective.slowdown)
        walls = walls + np.where(time_s > limit_s * (1 + 1e-9), WALL, 0.0)
    return int((np.log(objective.total(time_s, energy_j)) + walls).argmin())


def run(tables: Tables, application: str, policy: Name, setup: Setup) -> Run | None:
    """One application under one policy; None where the plant does not give what the policy needs."""
    if policy in (Name.HARMONIA, Name.COARSE, Name.CORE_CLOCK, Name.GUIDED):
        return _controlled(tables, application, policy, setup)
    if policy is Name.RACE_TO_IDLE:
        return _race(tables, application, setup)
    chosen = _fixed(tables, application, policy, setup)
    if chosen is None:
        return None
    return Run(policy, charged(tables, application, chosen[tables.order(application)]), chosen)


def _fixed(tables: Tables, application: str, policy: Name, setup: Setup) -> Indices | None:
    """Settings of each phase that a policy fixes beforehand."""
    everywhere = np.ones(len(tables.kernels), dtype=np.int64)
    if policy is Name.ORACLE:
        return oracle(tables, setup.objective)
    if policy is Name.STATIC:
        return everywhere * static_best(tables, application, setup.objective)
    if policy is Name.PREDICTIVE:
        if application not in setup.forecast:
            return None
        return everywhere * tables.lattice.flat(setup.forecast[application])
    return everywhere * tables.lattice.flat(tables.default)


def _race(tables: Tables, application: str, setup: Setup) -> Run | None:
    """Run at the highest settings, then idle until the objective's deadline; needs to know idle power."""
    top = np.full(len(tables.kernels), tables.lattice.flat(tables.lattice.top), dtype=np.int64)
    played = charged(tables, application, top[tables.order(application)])
    deadline_s = _deadline_s(tables, played, setup.objective)
    idle_s = max(deadline_s - played.total_s, 0.0)
    if idle_s > 0 and tables.idle_w is None:
        return None
    return Run(Name.RACE_TO_IDLE, played, top, idle_s * (tables.idle_w or 0.0), idle_s)


def _deadline_s(tables: Tables, played: Played, objective: Objective) -> float:
    if objective.latency_s is not None:
        return objective.latency_s * len(played.chosen)
    at = tables.lattice.flat(tables.default)
    usual_s = float(tables.time_s[played.phase, at].sum())
    return usual_s * (1.0 + objective.slowdown) if objective.slowdown is not None else 0.0


def _controlled(tables: Tables, application: str, policy: Name, setup: Setup) -> Run | None:
    if policy is Name.GUIDED and application not in setup.forecast:
        return None
    controller = controller_for(tables, policy, setup)
    if controller is None:
        return None
    if policy is Name.GUIDED:
        hint = setup.forecast[application]
        controller = replace(controller, hint={tables.kernels[p]: hint for p in tables.order(application)})
    played, state = play_table(tables, application, controller, setup.noise, setup.seed)
    return Run(policy, played, _converged(tables, controller, state, played))


def controller_for(tables: Tables, policy: Name, setup: Setup) -> Harmonia | None:
    """The controller, or one of its reduced forms."""
    model = setup.model if tables.counters else None
    free = None
    if policy is Name.CORE_CLOCK:
        free = tuple(knob.role is Role.CORE_CLOCK for knob in tables.lattice.knobs)
        if not any(free):
            return None
    return Harmonia(
        tables.lattice,
        tables.default,
        setup.objective,
        model,
        setup.tuning,
        free,
        fine=policy is not Name.COARSE,
    )


def _converged(tables: Tables, controller: Harmonia, state: State, played: Played) -> Indices:
    """Settings held to at the end: of the memory that a phase ends in, where it settled; else its last run."""
    last = np.full(len(tables.kernels), tables.lattice.flat(tables.default), dtype=np.int64)
    last[played.phase] = played.chosen  # later runs overwrite earlier ones
    for phase in np.unique(played.phase):
        memory = state.kernels.get(tables.kernels[phase])
        alone = tables.kernels.count(tables.kernels[phase]) == 1
        if alone and memory is not None and memory.settled:
            last[phase] = tables.lattice.flat(memory.at)
    return last
