"""Forecast what each knob of a card saves on a workload, in one table.

Clocks and SMs follow the laws of ``predict`` (``clock_forecast.build_predicted_plant``): the best
of their settings that keeps a bound of the slowdown. What firmware does by a power profile is not
published; NVIDIA says of Max-Q that applications keep at least 97 % of their performance
(``PROFILE_BOUNDS``), so that the best clocks and limit within that bound stand for it. Power
smoothing saves nothing: its floor costs energy wherever the card would idle.

Nobody has measured any of it: every row is marked so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.control.clock_forecast import build_predicted_plant
from wattcast.control.plants import KnobRole, PlantTables
from wattcast.control.rehearsal_coefficients import REHEARSAL
from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.hardware import Gpu
from wattcast.predictor import api
from wattcast.predictor.bundle import bundle_for

MARK = "forecast, unmeasured"
# Longest slowdown that NVIDIA says a profile costs: "performance levels above 97%" of the B200
# (developer.nvidia.com/blog, "Optimize data center efficiency for AI and HPC workloads with power
# profiles").
MAX_Q_SLOWDOWN = 0.03
PROFILE_BOUNDS = {
    "max-q": MAX_Q_SLOWDOWN,
    "llm-inference": 0.0,
    "llm-training": 0.0,
}
LIMIT_STEPS = 25  # of the power limit, from half of it to all
FLOOR_SHARE = REHEARSAL.smoothing_floor
ROLES = {
    "core clock": (KnobRole.CORE_CLOCK,),
    "memory clock": (KnobRole.MEMORY_CLOCK,),
    "SM share": (KnobRole.COMPUTE_UNITS,),
}
_CLOCKS = (KnobRole.CORE_CLOCK, KnobRole.MEMORY_CLOCK)


@dataclass(frozen=True)
class KnobForecast:
    """What one knob saves by forecast, relative to the card as it is."""

    knob: str
    setting: str
    slowdown: float
    power_saving: float
    energy_saving: float
    rests_on: str
    set_by: str  # command that sets it
    mark: str = MARK


def forecast_knobs(
    workload: str,
    gpu: Gpu,
    options: Mapping[str, Any],
    slowdown: float,
    pause_share: float = 0.0,
) -> list[KnobForecast]:
    """Return what each knob saves on a workload, none slower than ``slowdown``.

    ``pause_share`` is the share of time in which the program lets the card idle."""
    rows = []
    for name, roles in ROLES.items():
        plant = _build_plant(workload, gpu, options, roles)
        if plant is None:
            rows.append(_nothing(name, "the catalogue has one level of it"))
        else:
            rows.append(_choose_setting(name, plant, slowdown))
    rows.append(_forecast_limit(workload, gpu, options, slowdown))
    both = _build_plant(workload, gpu, options, _CLOCKS)
    for profile, bound in PROFILE_BOUNDS.items():
        limit = _forecast_limit(workload, gpu, options, bound)
        rows.append(_forecast_profile(profile, both, limit, bound))
    rows.append(_forecast_smoothing(workload, gpu, options, pause_share))
    return rows


def _build_plant(
    workload: str,
    gpu: Gpu,
    options: Mapping[str, Any],
    roles: Sequence[KnobRole],
) -> PlantTables | None:
    """Return times and powers over some knobs; None where the card has one level of each."""
    if len(gpu.clocks.memory_hz or ()) < 2:
        roles = [role for role in roles if role is not KnobRole.MEMORY_CLOCK]
    if not roles:
        return None
    plant = build_predicted_plant(
        {workload: workload},
        gpu,
        options,
        iterations=1,
        roles=roles,
    )
    return plant if plant.lattice.count > 1 else None


def _nothing(knob: str, why: str) -> KnobForecast:
    return KnobForecast(
        knob,
        "as it is",
        0.0,
        0.0,
        0.0,
        why,
        "",
    )


def _choose_setting(
    name: str,
    plant: PlantTables,
    slowdown: float,
) -> KnobForecast:
    """Return the setting of least energy that keeps the bound."""
    time_s, power_w = plant.time_s.sum(axis=0), _mean_power_w(plant)
    default = plant.lattice.flat_index(plant.default)
    best = _find_best(time_s, power_w, default, slowdown)
    settings = plant.lattice.settings_at(best)
    return KnobForecast(
        knob=name,
        setting="as it is" if best == default else plant.lattice.describe(settings),
        **_compare(time_s, power_w, default, best),
        rests_on="time and power as predicted at each level",
        set_by=_COMMANDS[name],
    )


_COMMANDS = {
    "core clock": "manage run, manage serve, manage hold --core-clock",
    "memory clock": "manage run, manage hold --memory-clock",
    "SM share": "manage run --sm-percent, --units",
}


def _mean_power_w(plant: PlantTables) -> Array:
    energy_j = (plant.time_s * plant.power_w).sum(axis=0)
    return np.asarray(energy_j / plant.time_s.sum(axis=0))


def _find_best(
    time_s: Array,
    power_w: Array,
    default: int,
    slowdown: float,
) -> int:
    """Return the place of least energy among those that keep the bound."""
    is_kept: npt.NDArray[np.bool_] = time_s <= (1.0 + slowdown) * time_s[default] * (1.0 + 1e-9)
    return int(np.argmin(np.where(is_kept, time_s * power_w, np.inf)))


def _compare(
    time_s: Array,
    power_w: Array,
    default: int,
    best: int,
) -> dict[str, Any]:
    """Return how one place differs from another."""
    time_ratio = float(time_s[best] / time_s[default])
    power_ratio = float(power_w[best] / power_w[default])
    return {
        "slowdown": time_ratio - 1.0,
        "power_saving": 1.0 - power_ratio,
        "energy_saving": 1.0 - power_ratio * time_ratio,
    }


def _forecast_limit(
    workload: str,
    gpu: Gpu,
    options: Mapping[str, Any],
    slowdown: float,
) -> KnobForecast:
    """Return the power limit of least energy."""
    highest_w = float(np.max(gpu.power.limit_w))
    limits_w = np.linspace(0.5, 1.0, LIMIT_STEPS) * highest_w
    predicted = api.predict(
        workload,
        gpu,
        power_limit=limits_w,
        force=True,
        **options,
    )
    time_s = np.broadcast_to(np.asarray(predicted.latency_s), limits_w.shape)
    power_w = np.broadcast_to(np.asarray(predicted.power_w), limits_w.shape)
    last = LIMIT_STEPS - 1
    best = _find_best(time_s, power_w, last, slowdown)
    is_same = bool(np.isclose(power_w[best], power_w[last]))
    return KnobForecast(
        knob="power limit",
        setting="as it is" if is_same else units.show(float(limits_w[best]), "W", 3),
        **_compare(time_s, power_w, last, last if is_same else best),
        rests_on="the clock at which the predicted power meets the limit",
        set_by="manage site, manage run --turn-limit, manage hold --power-limit",
    )


def _forecast_profile(
    profile: str,
    plant: PlantTables | None,
    limit: KnobForecast,
    bound: float,
) -> KnobForecast:
    """Return what clocks and a limit within the bound of a profile save, the better of both."""
    clocks = _nothing(profile, "") if plant is None else _choose_setting("core clock", plant, bound)
    best = clocks
    if limit.energy_saving > clocks.energy_saving:
        best = limit
    return KnobForecast(
        knob=f"power profile {profile}",
        setting=f"stands for it: {best.setting}",
        slowdown=best.slowdown,
        power_saving=best.power_saving,
        energy_saving=best.energy_saving,
        rests_on=f"what it sets is not published; clocks and limit at most {bound:.0%} slower",
        set_by=f"manage hold --profile {profile}",
    )


def _forecast_smoothing(
    workload: str,
    gpu: Gpu,
    options: Mapping[str, Any],
    pause_share: float,
) -> KnobForecast:
    """Return what the floor of power smoothing costs in the pauses of a program."""
    predicted = api.predict(workload, gpu, **options)
    busy_w = float(np.max(np.asarray(predicted.power_w)))
    idle_w = float(bundle_for(gpu).power.idle_power_w(float(np.max(gpu.clocks.max_hz))))
    floor_w = FLOOR_SHARE * float(np.max(gpu.power.limit_w))
    usual_w = (1.0 - pause_share) * busy_w + pause_share * idle_w
    smooth_w = (1.0 - pause_share) * busy_w + pause_share * max(floor_w, idle_w)
    saving = 1.0 - smooth_w / usual_w
    return KnobForecast(
        knob="power smoothing",
        setting=f"floor of {units.show(floor_w, 'W', 3)}, {pause_share:.0%} pauses",
        slowdown=0.0,
        power_saving=saving,
        energy_saving=saving,
        rests_on=f"the floor in place of {units.show(idle_w, 'W', 3)} idle, in pauses alone",
        set_by="manage hold --smoothing on",
    )


def print_forecasts(console: Any, rows: Sequence[KnobForecast]) -> None:
    """Print the table for people."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("knob", "setting", "time", "power", "energy", "", "set by"):
        table.add_column(name, justify="right" if name in ("time", "power", "energy") else "left")
    for row in rows:
        table.add_row(
            row.knob,
            row.setting,
            f"{row.slowdown:+.1%}",
            f"{-row.power_saving:+.1%}",
            f"{-row.energy_saving:+.1%}",
            row.mark,
            row.set_by,
        )
    console.print(table)
    for row in rows:
        console.print(f"{row.knob}: {row.rests_on}")
