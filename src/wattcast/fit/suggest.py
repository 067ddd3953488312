"""Which rows would help most: operators of real models that take time and are unlike anything measured.

A candidate's uncertainty is the width of its family's interval times how new it is; newness follows from its
distance, in doublings of its sizes, to the nearest measured row of its kind. Its worth is uncertainty times
the share of time it takes in real models (a small equal share for rows of the plan, which spread evenly). Rows
are picked one by one; each makes those like it less new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.kernels_data import Rows
from wattcast.fitted import Bundle
from wattcast.hardware import Gpu
from wattcast.kernels import Kernels, kernels_of
from wattcast.kernels.work import Condition
from wattcast.workload import from_json
from wattcast.workload.graph import Operator

_REACH = 1.0  # doublings within which a measured row tells about another
_KNOWN = 0.15  # uncertainty that stays beside a measured neighbour, as a share
PLAN_SHARE = 0.3  # of the suggestions, from the plan's random shapes


@dataclass(frozen=True)
class Candidate:
    """An operator that can be measured, as a workload file writes it, and the share of time it takes."""

    operator: dict[str, Any]
    condition: Condition
    share: float  # of the time of real models; 0: a row of the plan
    source: str


@dataclass(frozen=True)
class Suggestion:
    """A candidate with what it is worth."""

    candidate: Candidate
    score: float
    distance: float  # doublings to the nearest measured row of its kind; infinite: none was measured
    width: float  # log-width of its family's interval


def suggest(
    candidates: Sequence[Candidate], count: int, rows: Rows, gpu: Gpu, bundle: Bundle, plan_share: float = PLAN_SHARE
) -> list[Suggestion]:
    """The ``count`` rows worth most: ``1 - plan_share`` of them from real models, then the rest from the plan."""
    if not candidates:
        return []
    ops = operators_of([c.operator for c in candidates])
    kernels = kernels_of(ops, [c.condition for c in candidates], gpu, bundle.reference, ())
    known = kernels_of(rows.ops, rows.conditions, gpu, bundle.reference, ())
    distance = _distances(kernels, known)
    width = np.array([np.log(np.divide(*bundle.residuals[family].latency[::-1])) for family in kernels.family])
    real = np.array([c.share > 0 for c in candidates])
    share = np.array([c.share for c in candidates])
    share = np.where(real, share / max(share.sum(), 1e-30), 1.0 / max((~real).sum(), 1))
    from_plan = min(round(plan_share * count), int((~real).sum()))
    picked = _greedy(kernels, distance, width * share, real, count - from_plan)
    picked += _greedy(kernels, distance, width * share, ~real, from_plan)
    scores = [(i, float(width[i] * share[i] * _newness(distance[i]))) for i in picked]
    return [Suggestion(candidates[i], score, float(distance[i]), float(width[i])) for i, score in scores]


def operators_of(entries: Sequence[dict[str, Any]]) -> tuple[Operator, ...]:
    """Operators through the workload reader, one an entry."""
    import json

    graph = from_json.parse(json.dumps({"name": "candidates", "ops": list(entries)}).encode(), "candidates")
    return tuple(op for block in graph.blocks for op in block.ops)


def _newness(distance: Array | float) -> Array:
    return np.asarray(_KNOWN + (1.0 - _KNOWN) * (1.0 - np.exp(-0.5 * (np.asarray(distance) / _REACH) ** 2)))


def _greedy(kernels: Kernels, distance: Array, worth: Array, allowed: Array, count: int) -> list[int]:
    """Pick by worth x newness; what was picked counts as measured for the next."""
    places, now = _sizes(kernels), distance.copy()
    groups = np.array(kernels.work.group)
    left = allowed.copy()
    picked: list[int] = []
    for _ in range(min(count, int(allowed.sum()))):
        best = int(np.argmax(np.where(left, worth * _newness(now), -1.0)))
        picked.append(best)
        left[best] = False
        alike = groups == groups[best]
        now[alike] = np.minimum(now[alike], np.linalg.norm(places[alike] - places[best], axis=1))
    return picked


def _distances(kernels: Kernels, known: Kernels) -> Array:
    """Doublings from each kernel to the nearest known one of its group."""
    names = sorted(n for n in kernels.work.features if n.startswith("log_") and n in known.work.features)
    mine, theirs = _sizes(kernels, names), _sizes(known, names)
    group, other = np.array(kernels.work.group), np.array(known.work.group)
    found = np.full(len(group), np.inf)
    for name in set(group.tolist()):
        here, there = np.flatnonzero(group == name), np.flatnonzero(other == name)
        if len(there):
            apart = np.linalg.norm(mine[here][:, None, :] - theirs[there][None, :, :], axis=-1)
            found[here] = apart.min(axis=1)
    return found


def _sizes(kernels: Kernels, names: Sequence[str] = ()) -> Array:
    """Log2 sizes of each kernel, ``(kernel, size)``."""
    used = names or sorted(name for name in kernels.work.features if name.startswith("log_"))
    return np.column_stack([kernels.work.features[name] for name in used])
