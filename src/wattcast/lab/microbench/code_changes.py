"""What removing a bottleneck of a kernel changes in the work of its units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wattcast.lab.microbench.unit_work import UnitWork


@dataclass(frozen=True)
class CodeChange:
    """What removing a bottleneck does: factors of units' time and energy, work added, and a factor
    of waiting.
    """

    bottleneck: str
    seen: str
    factor: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    added: Mapping[str, UnitWork] = field(default_factory=dict)
    wait: float = 1.0
    unsure: bool = False  # nothing may be gained, as far as the profile tells

    def apply(self, work: Mapping[str, UnitWork]) -> dict[str, UnitWork]:
        """Return the work of all units after the change."""
        after = {unit: w.scaled(*self.factor.get(unit, (1.0, 1.0))) for unit, w in work.items()}
        for unit, more in self.added.items():
            there = after.get(unit, UnitWork(0.0, 0.0))
            after[unit] = UnitWork(there.seconds + more.seconds, there.joules + more.joules)
        return after
