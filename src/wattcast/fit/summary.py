"""A counter fit as plain mappings (for JSON) and as a model to save."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np

from wattcast import __version__
from wattcast.arrays import Array
from wattcast.fit.advise import enough
from wattcast.fit.counters import CounterFit, FittedKind
from wattcast.fit.gpmtool import Applications, Scaling, activity
from wattcast.fit.heldout import HeldOut
from wattcast.fit.score import Score, error_plane
from wattcast.fit.terms import Model
from wattcast.power.saved import SavedModel
from wattcast.provenance import Provenance

MOST_CANDIDATES = 5


def summary(result: CounterFit) -> dict[str, Any]:
    """Everything a fit says, as plain mappings; numbers are SI, errors in percent."""
    table, main = result.table, main_kind(result)
    return {
        "wattcast": __version__,
        "table": {
            "name": table.name,
            "rows": table.rows,
            "benchmarks": table.benchmarks,
            "groups": int(np.unique(table.group).size),
            "clusters": result.clusters,
            "core_clocks": int(np.unique(table.clock_hz).size),
            "memory_clocks": int(np.unique(table.memory_clock_hz).size),
            "predictors": [{"event": p.event, "column": p.column, "rail": p.rail} for p in table.predictors],
        },
        "models": [_kind(kind) | {"plane": _plane(result, kind)} for kind in result.kinds.values()],
        "coefficients": [vars(c) for c in main.diagnosis.coefficients],
        "condition": main.diagnosis.condition,
        "voltage": [
            {
                "rail": rail.rail,
                "clock_hz": rail.clock_hz.tolist(),
                "relative": rail.relative.tolist(),
                "standard_error": rail.standard_error.tolist(),
                "identifiable": rail.identifiable,
                "reason": rail.reason,
            }
            for rail in result.rails
        ],
        "voltage_by_memory_clock": _by_memory_clock(main),
        "training_clocks": _clocks(result),
        "next_benchmark": [vars(candidate) for candidate in result.candidates[:MOST_CANDIDATES]],
        "warnings": list(result.warnings),
        "assumptions": list(table.notes),
    }


def main_kind(result: CounterFit) -> FittedKind:
    """The model a fit is about: the hybrid, or the last kind asked for."""
    return result.kinds.get(Model.HYBRID) or list(result.kinds.values())[-1]


def saved_model(result: CounterFit, name: str, device: str = "") -> SavedModel:
    """The main model with its held-out errors, ready to be written."""
    main, table = main_kind(result), result.table
    errors = {f"held out by {by}": held.score.mape for by, held in main.held_out.items()}
    known = main.held_out["benchmark"].anchored
    if known is not None:
        errors["held out by benchmark, power at the default clocks known"] = known.mape
    source = f"wattcast fit counters {__version__}, {table.name}: {table.rows} rows of {table.benchmarks} benchmarks"
    when = datetime.now(tz=UTC).date().isoformat()
    notes = (*table.notes, *result.warnings)
    return SavedModel(name, main.power, Provenance(source, when, device), errors, notes, table.scaling)


def application_power(result: CounterFit, work: Applications) -> list[dict[str, Any]]:
    """Power of applications known by their utilisations at the default clocks, over the measured clock plane."""
    scaling = Scaling.from_numbers(result.table.scaling)
    core_hz, memory_hz = np.unique(result.table.clock_hz), np.unique(result.table.memory_clock_hz)
    core, memory = (axis.ravel() for axis in np.meshgrid(core_hz, memory_hz, indexing="ij"))
    total_w = main_kind(result).power.power(activity(work, scaling, core, memory)).total_w[..., 0]
    return [
        {
            "name": name,
            "core_hz": core_hz.tolist(),
            "memory_hz": memory_hz.tolist(),
            "power_w": row.reshape(core_hz.size, memory_hz.size).tolist(),
        }
        for name, row in zip(work.names, total_w, strict=True)
    ]


def _kind(kind: FittedKind) -> dict[str, Any]:
    return {
        "kind": str(kind.model),
        "in_sample": _score(kind.in_sample),
        "held_out": {by: _held(held) for by, held in kind.held_out.items()},
        "settings": vars(kind.settings),
    }


def _plane(result: CounterFit, kind: FittedKind) -> dict[str, Any]:
    """Where a model fails: error on unseen benchmarks by core and memory clock; null where nothing was measured."""
    predicted_w = kind.held_out["benchmark"].predicted_w
    core_hz, memory_hz, absolute = error_plane(result.table, predicted_w)
    signed = error_plane(result.table, predicted_w, signed=True)[2]

    def plain(plane: Array) -> list[list[float | None]]:
        return [[float(v) if np.isfinite(v) else None for v in row] for row in plane]

    return {
        "core_hz": core_hz.tolist(),
        "memory_hz": memory_hz.tolist(),
        "mape": plain(absolute),
        "bias": plain(signed),
    }


def _held(held: HeldOut) -> dict[str, Any]:
    return _score(held.score) | {"default_known": _score(held.anchored) if held.anchored else None}


def _score(score: Score) -> dict[str, Any]:
    return dict(vars(score))


def _by_memory_clock(main: FittedKind) -> list[dict[str, Any]]:
    """Core voltage over the core clock at each memory clock, where the model tells them apart."""
    how = main.fit.how
    if main.model is not Model.HYBRID or not how.core:
        return []
    return [
        {
            "memory_clock_hz": float(clock_hz),
            "clock_hz": how.core_hz.tolist(),
            "relative": [
                float(v) for v in main.fit.how.curves(main.fit.inferred.theta)[0].at(how.core_hz, float(clock_hz))
            ],
        }
        for clock_hz in how.memory_hz
    ]


def _clocks(result: CounterFit) -> dict[str, Any] | None:
    if not result.training_clocks:
        return None
    subsets = [
        {
            "points": s.points,
            "core_hz": list(s.core_hz),
            "memory_hz": list(s.memory_hz),
            "mape": s.mape,
            "default_known": s.anchored_mape,
        }
        for s in result.training_clocks
    ]
    return {"subsets": subsets, "enough": enough(list(result.training_clocks)).points}
