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
from dataclasses import dataclass, field
from operator import add, itemgetter, le

from wattcast.manage.beliefs import Beliefs
from wattcast.manage.knobs import Lattice, Role, Settings
from wattcast.manage.ledger import Lane, Ledger, LogLevels, Seen

# Exponents of board power over a knob before anything was measured: what to reckon with going up, and what to
# count on going down. HD 7970, Titan X and A100 tables lie between, but for the A100's top clocks.
UP = {Role.COMPUTE_UNITS: 0.8, Role.CORE_CLOCK: 1.4, Role.MEMORY_CLOCK: 0.5}
DOWN = {Role.COMPUTE_UNITS: 0.15, Role.CORE_CLOCK: 0.4, Role.MEMORY_CLOCK: 0.08}
GROWTH, FLOOR = 1.1, 0.02  # the next rise may be this much steeper than the steepest seen
CREDIT = 0.9  # of the flattest fall seen, for a knob that goes down to make room for another
OVERSHOOT = 1.1  # going down, aim this much below the cap, in logs
PARTS = 16
ROUNDING = 1e-9
FAR = 1e300  # more than any share, less than infinity


@dataclass(frozen=True)
class Tables:
    """What is reckoned along, worked out once."""

    lattice: Lattice
    log_levels: LogLevels
    gaps: tuple[tuple[tuple[float, ...], ...], ...]  # [knob][to][from], of log levels
    _shares: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)

    def share_row(self, which: int, to: int, top: int) -> list[float]:
        """By level of a knob, how far ``to`` lies between it and ``top``; infinite from levels above ``to``."""
        found = self._shares.get((which, to, top))
        if found is None:
            levels = self.lattice.knobs[which].levels
            below = [(levels[to] - low) / (levels[top] - low) for low in levels[:to]]
            found = self._shares[which, to, top] = [*below, 0.0, *[math.inf] * (len(levels) - to - 1)]
        return found


def tables(lattice: Lattice) -> Tables:
    """The tables of a lattice."""
    logs = tuple(tuple(math.log(v) for v in knob.levels) for knob in lattice.knobs)
    return Tables(lattice, logs, tuple(tuple(tuple(to - x for x in row) for to in row) for row in logs))


class Reckoned:
    """Power reckoned with at settings that were not run yet, from every setting that was.

    A *column* has an entry for every run setting, in the ledger's order: what one level of one knob adds to it. Each
    is worked out once, when first needed; a setting is judged by adding one column per knob.
    """

    __slots__ = (
        "_columns", "_exponents", "_lanes", "_levels", "_limits", "_log_cap", "_log_powers", "_seen", "_shares",
        "_tables", "_top", "_unknown", "_watts",
    )  # fmt: skip

    def __init__(self, tables: Tables, ledger: Ledger, log_cap: float) -> None:
        self._tables, self._lanes, self._seen, self._log_cap = tables, ledger.lanes, ledger.seen, log_cap
        self._log_powers: list[float] = []
        self._levels: list[Settings] = []  # by knob, columns
        self._exponents: list[tuple[float, float]] = []  # by knob: going up, going down
        self._columns: dict[tuple[int, int], list[float]] = {}  # by knob and level: change of log power
        self._unknown = False  # whether some knob was never changed alone
        self._top: Settings = ()  # the setting of the most power
        self._watts: list[tuple[float, float]] = []  # power, and what is missing to the most
        self._limits: list[float] = []  # of shares, beyond which the cap is surely broken
        self._shares: dict[tuple[int, int], list[float]] = {}  # by knob and level: how far it lies towards the top

    def permits(self, to: Settings) -> bool:
        """Whether a setting keeps to the cap: it was run and did, or is reckoned to from any run there was."""
        known = self._seen.get(to)
        if known is not None:
            return known.log_power <= self._log_cap
        columns, reckoned = self._columns, iter(self._log_powers or self._prepare())
        for key in enumerate(to):
            reckoned = map(add, reckoned, columns.get(key) or self._column(key))
        return min(reckoned) <= self._log_cap or (self._unknown and self._keeps_in_watts(to))

    def highest(self, at: Settings, which: int) -> int:
        """The highest level of one knob that is reckoned to keep to the cap, from a setting that was run."""
        if not self._exponents:
            self._prepare()
        logs, (up, _) = self._tables.log_levels[which], self._exponents[which]
        return bisect_right(logs, logs[at[which]] + (self._log_cap - self._seen[at].log_power) / up) - 1

    def _prepare(self) -> list[float]:
        self._levels = list(zip(*self._seen, strict=True))
        self._exponents = [self._exponent(i, lane) for i, lane in enumerate(self._lanes)]
        self._log_powers = list(map(itemgetter(2), self._seen.values()))
        return self._log_powers

    def _exponent(self, which: int, lane: Lane) -> tuple[float, float]:
        if lane.slopes:
            return GROWTH * max(lane.steepest, 0.0) + FLOOR, CREDIT * max(lane.flattest, 0.0)
        self._unknown = True
        return UP[self._tables.lattice.knobs[which].role], 0.0

    def _column(self, key: tuple[int, int]) -> list[float]:
        """Change of log power on the way from the level of each run setting to this one."""
        which, to = key
        gaps, (up, down) = self._tables.gaps[which][to], self._exponents[which]
        found = self._columns[key] = [(up if level < to else down) * gaps[level] for level in self._levels[which]]
        return found

    def _keeps_in_watts(self, to: Settings) -> bool:
        """The same from the best run below, where several knobs rose at once and no exponent is known yet.

        Power falls with no knob that rises, and rises with a knob the faster the higher it is (units in
        proportion, clocks with V² f). So between two runs, one above the other in every knob, no knob adds more
        watts per level than if all the difference were its own and even.
        """
        if not self._limits:
            self._prepare_watts()
        if not all(map(le, to, self._top)):
            return False
        shares, added = self._shares, [0.0] * len(self._limits)
        for key in enumerate(to):
            added = list(map(add, added, shares.get(key) or self._share(key)))
        if not any(map(le, added, self._limits)):
            return False
        each = zip(self._watts, added, strict=True)
        return any(math.log(w + share * more) <= self._log_cap for (w, more), share in each if share < math.inf)

    def _prepare_watts(self) -> None:
        highest = max(self._log_powers)
        self._top = list(self._seen)[self._log_powers.index(highest)]
        most_w, cap_w = math.exp(highest), math.exp(self._log_cap) * (1.0 + ROUNDING)
        watts = list(map(math.exp, self._log_powers))
        self._watts = [(w, most_w - w) for w in watts]
        at_most = FAR if most_w <= cap_w else -1.0
        self._limits = [(cap_w - w) / (most_w - w) if w < most_w else at_most for w in watts]

    def _share(self, key: tuple[int, int]) -> list[float]:
        """How far a level lies from that of each run setting towards the top's; infinite where it is below."""
        which, to = key
        row = self._tables.share_row(which, to, self._top[which])
        found = self._shares[key] = list(map(row.__getitem__, self._levels[which]))
        return found


def descend(
    lattice: Lattice, seen: Mapping[Settings, Seen], beliefs: Beliefs | None, log_cap: float
) -> Settings | None:
    """The next try when every setting so far broke the cap; None when one keeps to it or nothing is left."""
    at = min(seen, key=lambda s: seen[s].log_power)
    missing = seen[at].log_power - log_cap
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
