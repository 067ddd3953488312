"""A small component model fitted straight to measured power, where no simulator's energies are at hand.

P = W_const + W_sm·(active SMs) + W_pipe·duty·(f/f0) + Σ_c E_c·rate_c, by bounded least squares on relative error.
Few coefficients for few kernels: each component's events share one energy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from wattcast.activity import Activity
from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.fit.component import ENERGIES, Constraints, Fit, Runs, fit_energies
from wattcast.fit.component_runs import application
from wattcast.power.component.leakage import Leakage
from wattcast.power.component.model import ComponentPower, Drive, Part, Term

PIPE, SM, CONST = "PIPEP", "active_sm", "CONSTP"
OWN_RAIL = ("DRAMP",)  # components that do not see the core voltage


def fit_counters(
    kernels: Sequence[str],
    activity: Activity,
    measured_w: Array,
    groups: Mapping[str, Sequence[str]],
    sm_count: float,
    constraints: Constraints = ENERGIES,
) -> tuple[ComponentPower, Fit]:
    """Energies of ``groups`` (component -> events), watts of pipelines, of an active SM, and a constant."""
    if activity.at.clock_hz is None or np.ndim(activity.at.clock_hz):
        raise bad_value("activity", "one core clock for all kernels", activity.at.clock_hz)
    activity.require([e for events in groups.values() for e in events] + ["pipe_duty", "idle_sm"], "counter fit")
    rates = {name: sum(activity.rate(event) for event in events) for name, events in groups.items()}
    others = {
        PIPE: activity.of("pipe_duty"),
        SM: sm_count - activity.of("idle_sm"),
        CONST: np.ones(len(kernels)),
    }
    names = (*groups, *others)
    drive = np.stack([np.asarray(column) for column in (*rates.values(), *others.values())], axis=-1)
    runs = Runs(tuple(kernels), tuple(application(k) for k in kernels), names, drive, measured_w)
    found = fit_energies(runs, constraints)
    value = dict(zip(names, found.value.tolist(), strict=True))
    terms = [Term(e, name, value[name], Drive.COUNT) for name, events in groups.items() for e in events]
    model = ComponentPower(
        (*terms, Term("pipe_duty", PIPE, value[PIPE], Drive.DUTY)),
        (*(Part(name, 0 if name in OWN_RAIL else 2) for name in groups), Part(PIPE, 2), Part(CONST, 0, value[CONST])),
        float(activity.at.clock_hz),
        leakage=Leakage(value[SM] * sm_count, 0.0, sm_count, gated=True),
    )
    return model, found
