"""What each policy brought, against the vendor's default and the oracle; per application and in the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.manage.knobs import Settings
from wattcast.manage.objective import Goal, Objective
from wattcast.manage.plant import Tables
from wattcast.manage.policies import Name, Run, Setup, run
from wattcast.manage.simulate import charged

MEANS = (
    "ed2_gain_over_default",
    "ed2_gain_over_default_with_probing",
    "ed2_over_oracle",
    "ed2_over_oracle_with_probing",
    "objective_over_oracle",
    "objective_over_oracle_with_probing",
    "slowdown",
    "slowdown_with_probing",
    "power_saving",
    "power_saving_with_probing",
    "energy_saving",
    "energy_saving_with_probing",
)


@dataclass(frozen=True)
class Outcome:
    """One policy on one application, as shares: 0.02 is two percent.

    Plain fields are of the settings a policy has converged to; ``_with_probing`` is the whole run, probes and
    all. Gains and savings are 1 - ratio; ``over_oracle`` and ``slowdown`` are ratio - 1.
    """

    policy: Name
    application: str
    settings: Settings | None  # where one setting serves all phases
    runs: int
    ed2_gain_over_default: float
    ed2_gain_over_default_with_probing: float
    ed2_over_oracle: float
    ed2_over_oracle_with_probing: float
    objective_over_oracle: float
    objective_over_oracle_with_probing: float
    slowdown: float
    slowdown_with_probing: float
    power_saving: float
    power_saving_with_probing: float
    energy_saving: float
    energy_saving_with_probing: float


@dataclass(frozen=True)
class Comparison:
    """All policies on all applications of some plants."""

    outcomes: tuple[Outcome, ...]
    runs: Mapping[tuple[Name, str], Run]

    def of(self, policy: Name) -> list[Outcome]:
        return [o for o in self.outcomes if o.policy is policy]

    def mean(self, policy: Name) -> dict[str, float]:
        """Arithmetic means over applications of every field."""
        rows = self.of(policy)
        return {name: float(np.mean([getattr(o, name) for o in rows])) for name in MEANS}


@dataclass(frozen=True)
class _Cost:
    time_s: float
    energy_j: float

    @property
    def power_w(self) -> float:
        return self.energy_j / self.time_s

    def total(self, objective: Objective) -> float:
        return float(objective.total(np.asarray(self.time_s), np.asarray(self.energy_j)))


def compare(plants: Sequence[Tables], setup: Setup, policies: Sequence[Name] = tuple(Name)) -> Comparison:
    """Every application of every plant under every policy it allows."""
    outcomes: list[Outcome] = []
    runs: dict[tuple[Name, str], Run] = {}
    for tables in plants:
        for application in tables.applications:
            needed = {*policies, Name.DEFAULT, Name.ORACLE}
            found = {p: run(tables, application, p, setup) for p in Name if p in needed}
            done = {p: r for p, r in found.items() if r is not None}
            runs |= {(p, application): r for p, r in done.items()}
            outcomes += [
                _outcome(tables, application, r, done[Name.DEFAULT], done[Name.ORACLE], setup.objective)
                for p, r in done.items()
                if p in policies
            ]
    return Comparison(tuple(outcomes), runs)


def _outcome(tables: Tables, application: str, run: Run, default: Run, oracle: Run, objective: Objective) -> Outcome:
    base, best = _whole(default), _whole(oracle)
    whole = _whole(run)
    settled = charged(tables, application, run.converged[tables.order(application)])
    end = _Cost(settled.total_s, settled.total_j + run.idle_j)
    ed2 = Objective(Goal.ED2)
    used = np.unique(run.converged[np.unique(tables.order(application))])
    return Outcome(
        policy=run.policy,
        application=application,
        settings=tables.lattice.unflat(int(used[0])) if len(used) == 1 else None,
        runs=len(run.played.chosen),
        ed2_gain_over_default=1 - end.total(ed2) / base.total(ed2),
        ed2_gain_over_default_with_probing=1 - whole.total(ed2) / base.total(ed2),
        ed2_over_oracle=end.total(ed2) / best.total(ed2) - 1,
        ed2_over_oracle_with_probing=whole.total(ed2) / best.total(ed2) - 1,
        objective_over_oracle=end.total(objective) / best.total(objective) - 1,
        objective_over_oracle_with_probing=whole.total(objective) / best.total(objective) - 1,
        slowdown=end.time_s / base.time_s - 1,
        slowdown_with_probing=whole.time_s / base.time_s - 1,
        power_saving=1 - end.power_w / base.power_w,
        power_saving_with_probing=1 - whole.power_w / base.power_w,
        energy_saving=1 - end.energy_j / base.energy_j,
        energy_saving_with_probing=1 - whole.energy_j / base.energy_j,
    )


def _whole(run: Run) -> _Cost:
    return _Cost(run.played.total_s, run.played.total_j + run.idle_j)


def geometric_mean_gain(outcomes: Sequence[Outcome], without: Sequence[str] = ()) -> float:
    """The paper's mean: geometric over applications, of the ED² ratio of whole runs; as a gain.

    ``without`` leaves applications out, as the second mean of its figures leaves out the stress benchmarks.
    """
    ratios = [1 - o.ed2_gain_over_default_with_probing for o in outcomes if o.application not in without]
    return 1.0 - float(np.exp(np.mean(np.log(ratios))))


def worse_off(plants: Sequence[Tables], setup: Setup, repeats: int, by: float = 0.01) -> dict[str, float]:
    """Share of noisy runs of the controller that end, or are in all, worse than the default by more than ``by``."""
    rows: list[Outcome] = []
    for seed in range(repeats):
        rows += compare(plants, replace(setup, seed=setup.seed + seed), [Name.HARMONIA]).outcomes
    return {
        "runs": float(len(rows)),
        "share_over_1_percent_worse": float(np.mean([o.ed2_gain_over_default < -by for o in rows])),
        "share_over_1_percent_worse_with_probing": float(
            np.mean([o.ed2_gain_over_default_with_probing < -by for o in rows])
        ),
        "ed2_over_oracle": float(np.mean([o.ed2_over_oracle for o in rows])),
        "ed2_over_oracle_with_probing": float(np.mean([o.ed2_over_oracle_with_probing for o in rows])),
    }
