"""A hard power cap, shared by compute and memory.

The first run of a kernel is at its start settings. If that breaks the cap, all knobs go down together, those
that matter least the farthest, until it is kept; from then on a setting is run only when its power is known or
reckoned to be below the cap. How fast power rises with a knob is reckoned from the steepest rise seen, with a
margin, or before any was seen from what cards do. Near the cap one knob is traded against another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from wattcast.manage.beliefs import Beliefs
from wattcast.manage.knobs import Lattice, Role, Settings
from wattcast.manage.ledger import Seen

# Exponents of board power over a knob before anything was measured: what to reckon with going up, and what to
# count on going down. HD 7970, Titan X and A100 tables lie between, but for the A100's top clocks.
UP = {Role.COMPUTE_UNITS: 0.8, Role.CORE_CLOCK: 1.4, Role.MEMORY_CLOCK: 0.5}
DOWN = {Role.COMPUTE_UNITS: 0.15, Role.CORE_CLOCK: 0.4, Role.MEMORY_CLOCK: 0.08}
GROWTH, FLOOR = 1.1, 0.02  # the next rise may be this much steeper than the steepest seen
CREDIT = 0.9  # of the flattest fall seen, for a knob that goes down to make room for another
OVERSHOOT = 1.1  # going down, aim this much below the cap, in logs
PARTS = 16


def within(lattice: Lattice, seen: Mapping[Settings, Seen], to: Settings, cap_w: float) -> bool:
    """Whether a setting keeps to the cap: it was run and did, or is reckoned to."""
    known = seen.get(to)
    return (known.log_power if known else reckoned_log_w(lattice, seen, to)) <= math.log(cap_w)


def reckoned_log_w(lattice: Lattice, seen: Mapping[Settings, Seen], to: Settings) -> float:
    """The log power reckoned with at ``to``: the lowest that any run allows; infinite when nothing was run."""
    slopes = [_slopes(lattice, seen, i) for i in range(len(lattice.knobs))]
    up = [steepest(knob.role, found) for knob, found in zip(lattice.knobs, slopes, strict=True)]
    down = [CREDIT * max(min(found), 0.0) if found else 0.0 for found in slopes]

    def change(start: Settings) -> float:
        return sum(
            (up[i] if b > a else down[i]) * math.log(knob.levels[b] / knob.levels[a])
            for i, (knob, a, b) in enumerate(zip(lattice.knobs, start, to, strict=True))
            if a != b
        )

    return min((x.log_power + change(s) for s, x in seen.items()), default=math.inf)


def steepest(role: Role, slopes: list[float]) -> float:
    """The exponent to reckon with for a knob going up, given those seen."""
    return GROWTH * max(*slopes, 0.0) + FLOOR if slopes else UP[role]


def _slopes(lattice: Lattice, seen: Mapping[Settings, Seen], which: int) -> list[float]:
    """Exponents of power over one knob, between neighbours that differ in it alone."""
    levels = lattice.knobs[which].levels
    lines: dict[Settings, list[tuple[int, float]]] = {}
    for s, x in seen.items():
        lines.setdefault(s[:which] + s[which + 1 :], []).append((s[which], x.log_power))
    return [
        (b[1] - a[1]) / math.log(levels[b[0]] / levels[a[0]])
        for line in lines.values()
        for a, b in pairwise(sorted(line))
    ]


def descend(
    lattice: Lattice, seen: Mapping[Settings, Seen], beliefs: Beliefs | None, cap_w: float
) -> Settings | None:
    """The next try when every setting so far broke the cap; None when one keeps to it or nothing is left."""
    at = min(seen, key=lambda s: seen[s].log_power)
    missing = seen[at].log_power - math.log(cap_w)
    if missing <= 0 or at == lattice.bottom:
        return None
    weights = _weights(lattice, beliefs)
    to = at
    for part in range(1, PARTS + 1):
        to = tuple(level - math.ceil(level * w * part / PARTS) for level, w in zip(at, weights, strict=True))
        if _fall(lattice, at, to) >= OVERSHOOT * missing and to != at:
            return to
    return to if to != at else lattice.bottom


def _weights(lattice: Lattice, beliefs: Beliefs | None) -> list[float]:
    """How far each knob goes down relative to the others: the less it matters, the farther."""
    known = [beliefs.of(knob.role) if beliefs else None for knob in lattice.knobs]
    loose = [1.1 - (0.5 if s is None else s) for s in known]
    return [w / max(loose) for w in loose]


def _fall(lattice: Lattice, high: Settings, low: Settings) -> float:
    return sum(
        DOWN[knob.role] * math.log(knob.levels[a] / knob.levels[b])
        for knob, a, b in zip(lattice.knobs, high, low, strict=True)
    )
