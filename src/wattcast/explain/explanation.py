"""Two sides -> what caused the difference in latency, energy and mean power; contributions add up exactly.

Time is calls x cycles of a call / clock, summed over parts, plus gaps. Energy is time x power while
running, plus the energy of gaps. Mean power is share of time x power while running, plus gaps. Products are
split by :func:`~wattcast.explain.split.split`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from wattcast.explain.side import Part, Side, by_family
from wattcast.explain.split import split

CALLS, WORK, CLOCK, POWER = "calls", "cycles of a call", "clock", "power while running"
SHARE, GAPS, ONLY, ALL = "share of time", "idle gaps", "operators on one side only", "all kernels and gaps"
RULE = (
    "sums term by term; products by the logarithmic mean (LMDI): each factor gets (b - a) / ln(b / a) x ln of its "
    "own ratio, so that contributions add up to the difference with nothing left over"
)


@dataclass(frozen=True)
class Pair:
    """The same work on both sides, or work that one side lacks; its values and its contributions by term."""

    name: str
    family: str
    a: Part | None
    b: Part | None
    latency_s: dict[str, float]
    energy_j: dict[str, float]
    power_w: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.latency_s.values())

    @property
    def total_j(self) -> float:
        return sum(self.energy_j.values())

    @property
    def total_w(self) -> float:
        return sum(self.power_w.values())


@dataclass(frozen=True)
class Explanation:
    """Contributions to B - A. ``operators``, with the terms of gaps, add up; so do ``modules``."""

    a: Side
    b: Side
    operators: tuple[Pair, ...]
    latency_s: dict[str, float]  # by term
    energy_j: dict[str, float]
    power_w: dict[str, float]
    module_j: dict[str, float]  # by module; empty where a side does not know its modules
    module_w: dict[str, float]
    notes: tuple[str, ...]
    rule: str = RULE


def explain(a: Side, b: Side) -> Explanation:
    """What turned ``a`` into ``b``."""
    notes = [*a.notes, *b.notes]
    if not (a.parts and b.parts):
        return _totals(a, b, notes)
    if a.measured or b.measured:
        a, b = by_family(a), by_family(b)
        notes.append("a measured side knows families of kernels, not operators: both are added up by family")
    energy = a.has_energy and b.has_energy
    pairs = tuple(_pair(a, b, left, right, energy) for left, right in _matched(a.parts, b.parts))
    if not energy:
        notes.append("no energy of kernels was measured: energy and power are split as a whole")
    gaps_w = b.gap_j / b.latency_s - a.gap_j / a.latency_s
    latency = _summed([pair.latency_s for pair in pairs]) | {GAPS: b.gap_s - a.gap_s}
    joules, watts = _whole_energy(a, b), {POWER: b.power_w - a.power_w}
    if energy:
        joules = _summed([pair.energy_j for pair in pairs]) | {GAPS: b.gap_j - a.gap_j}
        watts = _summed([pair.power_w for pair in pairs]) | {GAPS: gaps_w}
    return Explanation(a, b, pairs, latency, joules, watts, *_modules(a, b), tuple(notes))


def _summed(terms: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in terms for name in each)
    return {name: math.fsum(each.get(name, 0.0) for each in terms) for name in names}


def _totals(a: Side, b: Side, notes: list[str]) -> Explanation:
    """Nothing is known below the totals of a side: clock, cycles and power of the whole."""
    which = " and ".join(dict.fromkeys(side.name for side in (a, b) if not side.parts))
    notes.append(f"{which}: totals alone, so operators and gaps cannot be told apart")
    ratios = _paced(a, b)
    latency = split(a.latency_s, b.latency_s, {ALL if k == WORK else k: v for k, v in ratios.items()})
    watts = {POWER: b.power_w - a.power_w}
    return Explanation(a, b, (), latency, _whole_energy(a, b), watts, *_modules(a, b), tuple(notes))


def _whole_energy(a: Side, b: Side) -> dict[str, float]:
    ratios = {ALL if k == WORK else k: v for k, v in _paced(a, b).items()}
    return split(a.energy_j, b.energy_j, {**ratios, POWER: b.power_w / a.power_w})


def _paced(a: Side, b: Side) -> dict[str, float]:
    """Ratio of latencies as clock and cycles; as cycles alone where a clock is not known."""
    both = a.effective_hz and b.effective_hz
    pace_a, pace_b = (a.effective_hz, b.effective_hz) if both else (a.clock_hz, b.clock_hz)
    if not (pace_a and pace_b):
        return {WORK: b.latency_s / a.latency_s}
    return {CLOCK: pace_a / pace_b, WORK: b.latency_s * pace_b / (a.latency_s * pace_a)}


def _matched(a: tuple[Part, ...], b: tuple[Part, ...]) -> list[tuple[Part | None, Part | None]]:
    """The same operators at the same place, in order, where both sides have as many of them; then, of the rest,
    equal work, and what is most alike at the same place. What is left stands alone."""
    pairs: list[tuple[Part | None, Part | None]] = []
    left, right = list(a), list(b)
    for whole, likeness in _LIKENESS:
        mine, theirs = _groups(left, likeness), _groups(right, likeness)
        for name, members in mine.items():
            others = theirs.get(name, [])
            if not whole or len(members) == len(others):
                pairs += zip(members, others, strict=False)
        taken = {id(part) for pair in pairs for part in pair}
        left, right = ([part for part in side if id(part) not in taken] for side in (left, right))
    return pairs + [(part, None) for part in left] + [(None, part) for part in right]


def _groups(parts: list[Part], likeness: Callable[[Part], Hashable]) -> dict[Hashable, list[Part]]:
    found: dict[Hashable, list[Part]] = {}
    for part in parts:
        found.setdefault(likeness(part), []).append(part)
    return found


# whether a group must be as large on both sides, and what makes two parts alike
_LIKENESS: tuple[tuple[bool, Callable[[Part], Hashable]], ...] = (
    (True, lambda part: (part.place, part.words)),
    (False, lambda part: part.key),
    (False, lambda part: (part.place, part.words, part.calls)),
    (False, lambda part: (part.place, part.words)),
    (False, lambda part: part.place),
)


def _pair(a: Side, b: Side, left: Part | None, right: Part | None, energy: bool) -> Pair:
    if left is None or right is None or left.seconds <= 0.0 or right.seconds <= 0.0:
        return _alone(a, b, left, right, energy)
    # the reported clock: the mean effective one would move with the mix of operators
    paced = {CLOCK: a.clock_hz / b.clock_hz} if a.clock_hz and b.clock_hz else {}
    calls = right.calls / left.calls
    each = right.seconds / left.seconds / calls / paced.get(CLOCK, 1.0)
    ratios = {CALLS: calls, WORK: each, **paced}
    name = left.name if left.key == right.key else f"{left.name} -> {right.name}"
    latency = split(left.seconds, right.seconds, ratios)
    if not (energy and left.joules and right.joules):
        return Pair(name, left.family, left, right, latency, {}, {})
    running = (right.joules / right.seconds) / (left.joules / left.seconds)
    joules = split(left.joules, right.joules, {**ratios, POWER: running})
    share = (right.seconds / b.latency_s) / (left.seconds / a.latency_s)
    watts = split(left.joules / a.latency_s, right.joules / b.latency_s, {SHARE: share, POWER: running})
    return Pair(name, left.family, left, right, latency, joules, watts)


def _alone(a: Side, b: Side, left: Part | None, right: Part | None, known: bool) -> Pair:
    """Work that one side does not have: all of it is the difference."""
    part = left or right
    assert part is not None
    seconds = (right.seconds if right else 0.0) - (left.seconds if left else 0.0)
    joules = (right.joules or 0.0 if right else 0.0) - (left.joules or 0.0 if left else 0.0)
    watts = (right.joules or 0.0 if right else 0.0) / b.latency_s - (
        left.joules or 0.0 if left else 0.0
    ) / a.latency_s
    mark = "only in A" if right is None else "only in B"
    energy, power = ({ONLY: joules}, {ONLY: watts}) if known else ({}, {})
    return Pair(f"{part.name} ({mark})", part.family, left, right, {ONLY: seconds}, energy, power)


def _modules(a: Side, b: Side) -> tuple[dict[str, float], dict[str, float]]:
    """Joules and mean watts of each module, B - A."""
    if not (a.module_j and b.module_j):
        return {}, {}
    names = dict.fromkeys([*a.module_j, *b.module_j])
    joules = {n: b.module_j.get(n, 0.0) - a.module_j.get(n, 0.0) for n in names}
    watts = {n: b.module_j.get(n, 0.0) / b.latency_s - a.module_j.get(n, 0.0) / a.latency_s for n in names}
    return joules, watts
