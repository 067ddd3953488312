"""A hard power cap, shared by compute and memory.

The first run of a kernel is at its start settings. If that breaks the cap, all knobs go down together, those
that matter least the farthest, until it is kept; from then on a setting is run only when its power is known or
reckoned to be below the cap. How fast power rises with a knob is reckoned from the steepest rise seen, with a
margin, or before any was seen from what cards do and what runs that differ in several knobs leave possible. Near
the cap one knob is traded against another.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from operator import le

from wattcast.manage.beliefs import Beliefs
from wattcast.manage.knobs import Lattice, Role, Settings
from wattcast.manage.ledger import Ledger, Seen

# Exponents of board power over a knob before anything was measured: what to reckon with going up, and what to
# count on going down. HD 7970, Titan X and A100 tables lie between, but for the A100's top clocks.
UP = {Role.COMPUTE_UNITS: 0.8, Role.CORE_CLOCK: 1.4, Role.MEMORY_CLOCK: 0.5}
DOWN = {Role.COMPUTE_UNITS: 0.15, Role.CORE_CLOCK: 0.4, Role.MEMORY_CLOCK: 0.08}
GROWTH, FLOOR = 1.1, 0.02  # the next rise may be this much steeper than the steepest seen
CREDIT = 0.9  # of the flattest fall seen, for a knob that goes down to make room for another
OVERSHOOT = 1.1  # going down, aim this much below the cap, in logs
PARTS = 16

LogLevels = tuple[tuple[float, ...], ...]  # [knob][level]


class Reckoned:
    """Power reckoned with at settings that were not run yet. What it takes is worked out once, when first needed."""

    def __init__(self, lattice: Lattice, log_levels: LogLevels, ledger: Ledger, cap_w: float) -> None:
        self._lattice, self._ledger = lattice, ledger
        self._seen, self._log_levels, self._log_cap = ledger.seen, log_levels, math.log(cap_w)
        self._exponents: list[tuple[float, float]] = []  # by knob: going up, going down
        self._rows: dict[tuple[int, int], list[float]] = {}
        self._unknown = False  # whether some knob was never changed alone

    def permits(self, to: Settings) -> bool:
        """Whether a setting keeps to the cap: it was run and did, or is reckoned to from any run there was."""
        known = self._seen.get(to)
        if known is not None:
            return known.log_power <= self._log_cap
        rows = [self._row(which, level) for which, level in enumerate(to)]
        for at, seen in self._seen.items():
            reckoned = seen.log_power
            for row, level in zip(rows, at):  # noqa: B905  (as long as each other, and hot)
                reckoned += row[level]
            if reckoned <= self._log_cap:
                return True
        return self._unknown and self._keeps_in_watts(to)

    def highest(self, at: Settings, which: int) -> int:
        """The highest level of one knob that is reckoned to keep to the cap, from a setting that was run."""
        logs, (up, _) = self._log_levels[which], self._known()[which]
        return bisect_right(logs, logs[at[which]] + (self._log_cap - self._seen[at].log_power) / up) - 1

    def _keeps_in_watts(self, to: Settings) -> bool:
        """The same from the best run below, where several knobs rose at once and no exponent is known yet.

        Power falls with no knob that rises, and rises with a knob the faster the higher it is (units in
        proportion, clocks with V² f). So between two runs, one above the other in every knob, no knob adds more
        watts per level than if all the difference were its own and even.
        """
        top = max(self._seen, key=lambda s: self._seen[s].log_power)
        high_w = math.exp(self._seen[top].log_power)
        for at, seen in self._seen.items():
            if all(map(le, at, to)) and all(map(le, to, top)):
                low_w = math.exp(seen.log_power)
                share = sum(self._share(which, *levels) for which, levels in enumerate(zip(at, to, top, strict=True)))
                if math.log(low_w + share * (high_w - low_w)) <= self._log_cap:
                    return True
        return False

    def _share(self, which: int, low: int, to: int, high: int) -> float:
        """How far a level lies between two others."""
        levels = self._lattice.knobs[which].levels
        return 0.0 if to == low else (levels[to] - levels[low]) / (levels[high] - levels[low])

    def _row(self, which: int, to: int) -> list[float]:
        """Change of log power on the way from each level of a knob to this one."""
        found = self._rows.get((which, to))
        if found is None:
            logs, (up, down) = self._log_levels[which], self._known()[which]
            end = logs[to]
            found = self._rows[which, to] = [(up if end > log else down) * (end - log) for log in logs]
        return found

    def _known(self) -> list[tuple[float, float]]:
        if not self._exponents:
            self._exponents = [self._exponent(i) for i in range(len(self._log_levels))]
        return self._exponents

    def _exponent(self, which: int) -> tuple[float, float]:
        slopes = _slopes(self._log_levels[which], self._ledger, which)
        if slopes:
            return GROWTH * max(*slopes, 0.0) + FLOOR, CREDIT * max(min(slopes), 0.0)
        self._unknown = True
        return UP[self._lattice.knobs[which].role], 0.0


def _slopes(logs: tuple[float, ...], ledger: Ledger, which: int) -> list[float]:
    """Exponents of power over one knob, between neighbours that differ in it alone."""
    found: list[float] = []
    for others, levels in ledger.lanes[which].pairs.items():
        ahead, behind = others[:which], others[which:]
        powers = [ledger.seen[(*ahead, level, *behind)].log_power for level in levels]
        found += [
            (powers[i] - powers[i - 1]) / (logs[levels[i]] - logs[levels[i - 1]]) for i in range(1, len(levels))
        ]
    return found


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
