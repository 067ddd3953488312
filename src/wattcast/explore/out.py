"""Explorations as plain mappings, for JSON; fields may be added, never renamed or removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

from wattcast import __version__
from wattcast.errors import BadInput, bad_value, unknown_name
from wattcast.explore.choices import Choice
from wattcast.explore.dvfs import Clocks, Objective
from wattcast.explore.fields import find
from wattcast.explore.fleet import Assignment, Fleet
from wattcast.explore.money import Prices
from wattcast.explore.published import GPU, Curve, Format
from wattcast.explore.serving import MOST_BATCH, Plan, Service
from wattcast.explore.space import Method
from wattcast.explore.store import rows
from wattcast.explore.sweep import BEST, Swept
from wattcast.explore.where import RESULTS
from wattcast.fitted import bundle_for
from wattcast.hardware import load
from wattcast.units import parse, show


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


def whole_numbers(text: str | None, where: str) -> tuple[int, ...]:
    """``1,2,4`` -> numbers; None -> none."""
    if text is None:
        return ()
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isascii() and piece.isdigit() and 1 <= int(piece) <= 1024 for piece in pieces):
        raise bad_value(where, "whole numbers from 1 to 1024 with commas", text)
    return tuple(int(piece) for piece in pieces)


def plans_out(asked: Service, found: Sequence[Plan], prices: Prices) -> dict[str, Any]:
    """Plans, best first; a GPU that cannot serve has what binds and no numbers."""
    return {
        "wattcast": __version__,
        "model": asked.model.name,
        "rate_per_s": asked.rate_per_s,
        "prompt": asked.prompt,
        "output": asked.output,
        "ttft_s": asked.ttft_s if isfinite(asked.ttft_s) else None,
        "tpot_s": asked.tpot_s if isfinite(asked.tpot_s) else None,
        "headroom": asked.headroom,
        "currency": prices.currency or None,
        "plans": [{"gpu": plan.gpu, **plan.row, "served": bool(plan.row), "binds": plan.binds} for plan in found],
        "assumptions": plan_notes(asked, found, prices),
    }


def plan_notes(asked: Service, found: Sequence[Plan], prices: Prices) -> list[str]:
    """What a plan assumes, beginning with its own model."""
    own = [
        "steady state: requests come evenly, no queues; add --headroom for bursts",
        f"prefills one at a time between decode steps; decode at the mean context, "
        f"{asked.prompt + asked.steps // 2} tokens",
        "idle GPUs keep their clock; energy per token counts prefill and idle, over output tokens",
        f"host: {show(asked.host_s, 's')} to issue an operator{' (CUDA graphs)' if asked.host_s == 0 else ''}",
        f"a replica has the fewest GPUs that can serve; batches tried up to {MOST_BATCH}",
    ]
    return list(dict.fromkeys([*own, *(note for plan in found for note in plan.notes), *prices.notes]))


def with_power(fleet: Fleet, power: str | None) -> Fleet:
    """The fleet with another power budget, where one is given."""
    if power is None:
        return fleet
    power_w = parse(power, "W", "power")
    if power_w <= 0:
        raise bad_value("power", "above zero", power)
    return replace(fleet, power_w=power_w)


def assignment_out(found: Assignment) -> dict[str, Any]:
    """Who runs what."""
    return {
        "wattcast": __version__,
        "aim": str(found.aim),
        "served_share": found.factor,
        "power_w": found.power_w,
        "peak_power_w": found.peak_w,
        "binds": found.binds,
        "assignment": found.rows,
        "workloads": found.served,
        "idle_gpus": found.idle_gpus,
        "assumptions": list(found.notes),
    }


def published_out(curves: Sequence[Curve], formats: Sequence[Format], forecasts: Sequence[Choice]) -> dict[str, Any]:
    """The published explorations: errors, and predictions beside measurements."""
    return {
        "wattcast": __version__,
        "gpu": GPU,
        "status": str(bundle_for(load(GPU)).status),
        "dvfs": [
            {"workload": c.name, "n": len(c.clock_hz), **{f"{k}_mape": v for k, v in c.mape().items()}}
            for c in curves
        ],
        "formats": [asdict(row) for row in formats],
        "forecasts": [choice.row for choice in forecasts],
    }
