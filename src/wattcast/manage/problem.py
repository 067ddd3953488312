"""What a controller searches: knobs, where it starts, what it minimises; with tables worked out once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from wattcast.manage import cap
from wattcast.manage.knobs import Lattice, Role, Settings
from wattcast.manage.ledger import Ledger
from wattcast.manage.objective import Objective
from wattcast.manage.tuning import Tuning

Levels = tuple[tuple[int, ...], ...]  # [knob][level]


@dataclass(frozen=True)
class Problem:
    """Fixed while a controller runs."""

    lattice: Lattice
    default: Settings
    start: Settings  # of a kernel's first run
    objective: Objective
    tuning: Tuning
    free: tuple[bool, ...]  # knobs the search may turn

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """Knobs the search may turn."""
        return tuple(i for i, free in enumerate(self.free) if free)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return tuple(knob.role for knob in self.lattice.knobs)

    @cached_property
    def log_levels(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(math.log(v) for v in knob.levels) for knob in self.lattice.knobs)

    @cached_property
    def stride_down(self) -> Levels:
        """Levels of a fine step downwards, from each level of each knob."""
        return tuple(tuple(self.tuning.stride(k, i, True) for i in range(len(k.levels))) for k in self.lattice.knobs)

    @cached_property
    def stride_up(self) -> Levels:
        return tuple(tuple(self.tuning.stride(k, i, False) for i in range(len(k.levels))) for k in self.lattice.knobs)

    @cached_property
    def finest_down(self) -> Levels:
        """Levels of the smallest step worth telling apart."""
        return tuple(tuple(self.tuning.finest(k, i, True) for i in range(len(k.levels))) for k in self.lattice.knobs)

    @cached_property
    def finest_up(self) -> Levels:
        return tuple(tuple(self.tuning.finest(k, i, False) for i in range(len(k.levels))) for k in self.lattice.knobs)

    @cached_property
    def memory(self) -> int | None:
        """The memory clock, where the search may turn it."""
        which = self.lattice.index(Role.MEMORY_CLOCK)
        return which if which is not None and self.free[which] else None

    @cached_property
    def has_units(self) -> bool:
        return self.lattice.index(Role.COMPUTE_UNITS) is not None

    @cached_property
    def core(self) -> int | None:
        """The core clock, where there is one."""
        return self.lattice.index(Role.CORE_CLOCK)

    @cached_property
    def _sensing(self) -> dict[Settings, tuple[Settings, float] | None]:
        return {}

    def sensing(self, start: Settings) -> tuple[Settings, float] | None:
        """The sensing step from a setting, one step of the core clock down, and its log ratio."""
        if start not in self._sensing:
            self._sensing[start] = self._sense(start)
        return self._sensing[start]

    def _sense(self, start: Settings) -> tuple[Settings, float] | None:
        which = self.core
        if which is None or not self.free[which] or start[which] == 0:
            return None
        here = start[which]
        to = here - self.tuning.sense(self.lattice.knobs[which], here)
        ratio = self.log_levels[which][here] - self.log_levels[which][to]
        return (*start[:which], to, *start[which + 1 :]), ratio

    def reckoned(self, ledger: Ledger) -> cap.Reckoned | None:
        """Power reckoned with under a cap; None where there is none."""
        cap_w = self.objective.cap_w
        return None if cap_w is None else cap.Reckoned(self.lattice, self.log_levels, ledger, cap_w)
