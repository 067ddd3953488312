"""Which bottlenecks of a profiled kernel matter on this device, and what removing each would change (paper 001).

For each kernel the profile's counts say how long each unit must have worked at the rates microbenchmarks
reached, and how many joules above idle that cost. A kernel's time is set by its busiest unit; what it took
beyond that stays in proportion. Removing a bottleneck shortens one unit's work, or lowers its energy, by
the ratio of two measured points of a curve; time, power and energy follow:

    t' = t · max_u(w'_u) / max_u(w_u),   E' = E · (P_idle · t' + Σ_u e'_u) / (P_idle · t + Σ_u e_u)

with w the unit's seconds and e its joules above idle (tune_work.py; the bottlenecks: tune_judges.py). It is a
first-order answer: units that wait for each other, and caches that a change would relieve, are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattcast.activity.profiled import ncu_metrics
from wattcast.errors import BadInput, bad_value
from wattcast.explore.microbench import Result
from wattcast.explore.tune_judges import JUDGES, Advice
from wattcast.explore.tune_work import TIME, UNITS, Profile, profile_of, usable_units


@dataclass(frozen=True)
class Tuning:
    """Advice for all kernels of a profile, most joules first, and what could not be judged."""

    profiles: tuple[Profile, ...]
    advice: tuple[Advice, ...]
    missing: Mapping[str, tuple[str, ...]]  # bottleneck -> metrics the profile lacks


def tune(path: Path, results: Sequence[Result]) -> Tuning:
    """Read an Nsight Compute export and judge every kernel on the device of ``results``."""
    names, metrics = ncu_metrics(path)
    if TIME not in metrics:
        raise bad_value(path.name, f"the metric {TIME}", "an export without it", "Collect it with ncu --metrics.")
    idle_w = idle_power_w(results)
    if not usable_units(results, metrics):
        wanted = ", ".join(dict.fromkeys(name for _, names, _ in UNITS.values() for name in names))
        raise BadInput(f"{path.name}: no unit's work can be counted. Collect with ncu --metrics {TIME},{wanted}")
    profiles = []
    for i, name in enumerate(names):
        values = {metric: float(column[i]) for metric, column in metrics.items() if np.isfinite(column[i])}
        profiles.append(profile_of(name, values, results, idle_w))
    missing = {name: tuple(m for m in judge.needs if m not in metrics) for name, judge in JUDGES.items()}
    advice = ranked(profiles, results)
    return Tuning(tuple(profiles), advice, {name: lacks for name, lacks in missing.items() if lacks})


def ranked(profiles: Sequence[Profile], results: Sequence[Result]) -> tuple[Advice, ...]:
    """Advice that matters on all of ``profiles``, most joules first."""
    advice = [found for p in profiles for judge in JUDGES.values() if (found := judge.advise(p, results)) is not None]
    return tuple(sorted((a for a in advice if a.matters), key=lambda a: -abs(a.joules)))


def counted_profile(name: str, counters: Mapping[str, float], results: Sequence[Result]) -> Profile:
    """A kernel from a row of ``microbench_counters.jsonl``, whose units are ncu's (nanoseconds, percent)."""
    values = {metric: value / 100.0 if ".pct" in metric else value for metric, value in counters.items()}
    return profile_of(name, values | {TIME: counters[TIME] * 1e-9}, results, idle_power_w(results))


def idle_power_w(results: Sequence[Result]) -> float:
    """With a context and no work: the median of what stands beside the rows, or idle rows."""
    known = [r.idle_power_w for r in results if r.idle_power_w]
    known = known or [r.power_w for r in results if r.group == "idle" and r.power_w]
    if not known:
        raise BadInput("the microbenchmark results hold no idle power; measure again with an idle row.")
    return float(np.median(known))
