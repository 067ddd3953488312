"""Comparisons as plain mappings: the JSON of ``wattcast manage simulate`` and ``replay``.

Shares throughout: 0.02 is two percent. Fields may be added, never renamed or removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wattcast import __version__
from wattcast.manage.objective import Objective
from wattcast.manage.outcome import MEANS, Comparison, Outcome, geometric_mean_gain
from wattcast.manage.plant import Tables
from wattcast.manage.policies import Name


def comparison_out(
    comparison: Comparison,
    plants: Sequence[Tables],
    objective: Objective,
    notes: Sequence[str] = (),
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """One comparison, per application and in the mean."""
    lattices = {app: tables for tables in plants for app in tables.applications}
    applications = list(dict.fromkeys(o.application for o in comparison.outcomes))
    return {
        "wattcast": __version__,
        "objective": _objective(objective),
        "plants": [_plant(tables) for tables in plants],
        "applications": [
            {
                "name": application,
                "policies": {
                    str(o.policy): _outcome(o, lattices[application])
                    for o in comparison.outcomes
                    if o.application == application
                },
            }
            for application in applications
        ],
        "mean": {str(p): _mean(comparison, p, without) for p in Name if comparison.of(p)},
        "notes": list(notes),
    }


def _objective(objective: Objective) -> dict[str, Any]:
    bounds = {"slowdown": objective.slowdown, "latency_s": objective.latency_s, "cap_w": objective.cap_w}
    return {"goal": str(objective.goal), **{k: v for k, v in bounds.items() if v is not None}}


def _plant(tables: Tables) -> dict[str, Any]:
    return {
        "name": tables.name,
        "source": tables.source,
        "settings": tables.lattice.count,
        "knobs": {str(k.role): list(k.levels) for k in tables.lattice.knobs},
        "default": _settings(tables, tables.default),
        "applications": len(tables.applications),
        "iterations": max(len(order) for order in tables.applications.values()),
    }


def _settings(tables: Tables, at: tuple[int, ...]) -> dict[str, float]:
    return {str(k.role): v for k, v in zip(tables.lattice.knobs, tables.lattice.values(at), strict=True)}


def _outcome(outcome: Outcome, tables: Tables) -> dict[str, Any]:
    at = outcome.settings
    values = {name: _round(getattr(outcome, name)) for name in MEANS}
    return {**values, "settings": None if at is None else _settings(tables, at)}


def _mean(comparison: Comparison, policy: Name, without: Sequence[str]) -> dict[str, Any]:
    rows = comparison.of(policy)
    means: dict[str, Any] = {name: _round(value) for name, value in comparison.mean(policy).items()}
    means["applications"] = len(rows)
    means["worst_ed2_gain_over_default"] = _round(min(o.ed2_gain_over_default for o in rows))
    means["worst_slowdown"] = _round(max(o.slowdown for o in rows))
    means["ed2_gain_geometric_mean_with_probing"] = _round(geometric_mean_gain(rows))
    if without:
        means["ed2_gain_geometric_mean_2_with_probing"] = _round(geometric_mean_gain(rows, without))
    return means


def _round(value: float) -> float:
    assert np.isfinite(value), "a comparison is not a finite number: this is a bug in Wattcast"
    return float(np.round(value, 9))


def sweep_out(distances: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Median, 10th and 90th percentile over perturbed plants."""
    return {
        name: {
            "median": _round(float(np.median(values))),
            "p10": _round(float(np.percentile(values, 10))),
            "p90": _round(float(np.percentile(values, 90))),
            "plants": len(values),
        }
        for name, values in distances.items()
    }
