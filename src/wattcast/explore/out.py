"""Explorations as plain mappings, for JSON; fields may be added, never renamed or removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wattcast import __version__
from wattcast.errors import BadInput, unknown_name
from wattcast.explore.choices import Choice
from wattcast.explore.dvfs import Clocks, Objective
from wattcast.explore.fields import find
from wattcast.explore.money import Prices
from wattcast.explore.space import Method
from wattcast.explore.store import rows
from wattcast.explore.sweep import BEST, Swept
from wattcast.explore.where import RESULTS


def swept_out(done: Swept) -> dict[str, Any]:
    """The front, the best points and what was asked."""
    study, summary = done.study, done.summary
    sampled = study.space.method is not Method.GRID
    return {
        "wattcast": __version__,
        "workload": study.graph.name,
        "gpu": study.gpu.name,
        "points": done.points,
        "kept": summary.kept,
        "space": {
            "method": str(study.space.method),
            "seed": study.space.seed if sampled else None,
            "axes": [
                {
                    "field": axis.field.name,
                    "column": axis.field.column,
                    "low": float(axis.values.min()),
                    "high": float(axis.values.max()),
                    "values": None if axis.continuous else int(axis.values.size),
                }
                for axis in study.space.axes
            ],
        },
        "where": [str(where) for where in study.where],
        "objectives": list(done.objectives),
        "best": dict(zip(BEST, rows(summary.best), strict=True)),
        "front": rows(summary.front),
        "status": str(study.bundle.status),
        "notes": list(done.notes),
        "assumptions": list(dict.fromkeys([*study.graph.assumptions, *study.bundle.assumptions])),
    }


def column(done: Swept, name: str) -> str:
    """The column a person means by a field's name or the column's own."""
    known = [*done.study.space.columns, *RESULTS]
    if name in known:
        return name
    try:
        found = find(name, done.study.gpu).column
    except BadInput:
        found = ""
    if found not in known:
        raise unknown_name("column", name, known, f"Known here: {', '.join(known)}.")
    return found


def objective(name: str) -> Objective:
    """The objective a person means."""
    if name not in list(Objective):
        raise unknown_name("objective", name, list(Objective), f"Known: {', '.join(Objective)}.")
    return Objective(name)


def clocks_out(found: Clocks, least: Objective) -> dict[str, Any]:
    """Every clock, and the best by each objective."""
    points = rows(found.columns)
    study = found.study
    return {
        "wattcast": __version__,
        "workload": study.graph.name,
        "gpu": study.gpu.name,
        "bound": found.bound,
        "objective": str(least),
        "best": {str(objective): points[row] for objective, row in found.best.items()},
        "points": points,
        "status": str(study.bundle.status),
        "assumptions": list(dict.fromkeys([*study.graph.assumptions, *study.bundle.assumptions])),
    }


def choices_out(found: Sequence[Choice], prices: Prices) -> dict[str, Any]:
    """Choices side by side; one that cannot be run has a reason and no numbers."""
    return {
        "wattcast": __version__,
        "currency": prices.currency or None,
        "choices": [choice.row for choice in found],
        "assumptions": list(dict.fromkeys([note for choice in found for note in choice.notes] + list(prices.notes))),
    }
