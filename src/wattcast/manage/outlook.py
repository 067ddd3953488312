"""What a step of one knob might do to the score, before trying it.

With time elasticity s (the sensitivity) and power elasticity e, lowering a knob by the log ratio x changes
the score of E · D^k by (w·s - e)·x, w = k + 1. Where the neighbouring step was measured, s and e are read
off; elsewhere s comes from counters or from what was measured of the other domain, and e is bounded by what
cards do. The outlook is optimistic: it says whether a step is worth a try, not what it will bring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from wattcast.manage.knobs import Lattice, Role, Settings
from wattcast.manage.ledger import Seen
from wattcast.manage.objective import Objective

# Largest log change of board power per log change of a knob worth reckoning with: V² f on the share of
# board power that is switched; on HD 7970, Titan X and A100 tables the clock's stays under 1.4.
POWER_ELASTICITY = {Role.COMPUTE_UNITS: 0.5, Role.CORE_CLOCK: 1.3, Role.MEMORY_CLOCK: 0.3}


@dataclass(frozen=True, slots=True)
class Beliefs:
    """Sensitivities the controller believes in, and how far they may be off."""

    compute: float | None
    bandwidth: float | None
    margin: float

    def bounds(self, role: Role, has_units: bool) -> tuple[float, float]:
        """Lowest and highest sensitivity to a knob that the beliefs allow.

        Compute sensitivity is the mean of that to units and that to the clock. A kernel follows the clock at
        least as much as the units (what runs on all units runs on the clock), so the clock's lies between
        the mean and 1, and the units' between 2·mean - 1 and the mean.
        """
        mean = self.bandwidth if role is Role.MEMORY_CLOCK else self.compute
        if mean is None:
            return 0.0, 1.0
        low = high = mean
        if role is Role.COMPUTE_UNITS:
            low = 2.0 * mean - 1.0
        elif role is Role.CORE_CLOCK and has_units:
            high = 2.0 * mean
        return max(low - self.margin, 0.0), min(high + self.margin, 1.0)


def elasticities(low: Seen, high: Seen, log_ratio: float) -> tuple[float, float]:
    """Sensitivity of time and of power to a knob between two settings that differ in it alone."""
    return (low.log_time - high.log_time) / log_ratio, (high.log_power - low.log_power) / log_ratio


def outlook(
    lattice: Lattice,
    objective: Objective,
    seen: Mapping[Settings, Seen],
    beliefs: Beliefs,
    best: Settings,
    which: int,
    to: int,
) -> float:
    """The best change of score that moving knob ``which`` from ``best`` to level ``to`` could bring."""
    knob = lattice.knobs[which]
    here = best[which]
    log_ratio = abs(math.log(knob.levels[here] / knob.levels[to]))
    behind = neighbour(seen, best, which, up=to < here)  # the measured side opposite to the move
    if behind is not None:
        s, e = _measured(lattice, seen, best, which, behind)
    else:
        has_units = lattice.index(Role.COMPUTE_UNITS) is not None
        low, high = beliefs.bounds(knob.role, has_units)
        s, e = (low, POWER_ELASTICITY[knob.role]) if to < here else (high, 0.05)
    gain = objective.time_weight * s - e
    return gain * log_ratio if to < here else -gain * log_ratio


def neighbour(seen: Mapping[Settings, Seen], at: Settings, which: int, up: bool) -> int | None:
    """The nearest level on one side that was tried with all other knobs as they are."""
    found = None
    for other in seen:
        level = other[which]
        if (level > at[which]) is up and level != at[which] and _same_line(other, at, which):
            if found is None or abs(level - at[which]) < abs(found - at[which]):
                found = level
    return found


def moved(at: Settings, which: int, to: int) -> Settings:
    """The same settings with one knob at another level."""
    return (*at[:which], to, *at[which + 1 :])


def _same_line(other: Settings, at: Settings, which: int) -> bool:
    return other[:which] == at[:which] and other[which + 1 :] == at[which + 1 :]


def _measured(
    lattice: Lattice, seen: Mapping[Settings, Seen], best: Settings, which: int, behind: int
) -> tuple[float, float]:
    levels = lattice.knobs[which].levels
    low, high = sorted((best[which], behind))
    return elasticities(
        seen[moved(best, which, low)], seen[moved(best, which, high)], math.log(levels[high] / levels[low])
    )
