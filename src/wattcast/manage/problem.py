"""What a controller searches: knobs, where it starts, what it minimises; with tables worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from wattcast.manage import cap
from wattcast.manage.knobs import Lattice, Role, Settings
from wattcast.manage.ledger import Ledger, LogLevels
from wattcast.manage.objective import Objective
from wattcast.manage.tuning import Tuning

Levels = tuple[tuple[int, ...], ...]  # [knob][level]


# Largest log change of board power per log change of a knob worth reckoning with: V² f on the share of
# board power that is switched.
POWER_ELASTICITY = {Role.COMPUTE_UNITS: 0.5, Role.CORE_CLOCK: 1.3, Role.MEMORY_CLOCK: 0.3}


@dataclass(frozen=True)
class Problem:
    """Fixed while a controller runs."""

    lattice: Lattice
    default: Settings
    start: Settings  # of a kernel's first run
    objective: Objective
    tuning: Tuning
    free: tuple[bool, ...]  # knobs the search may turn

    def prepare(self) -> None:
        """Work all tables out now."""
        for name, value in vars(type(self)).items():
            if isinstance(value, cached_property):
                getattr(self, name)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """Knobs the search may turn."""
        return tuple(i for i, free in enumerate(self.free) if free)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        return tuple(knob.role for knob in self.lattice.knobs)

    @cached_property
    def elastic(self) -> tuple[float, ...]:
        """Largest power elasticity of each knob."""
        return tuple(POWER_ELASTICITY[role] for role in self.roles)

    @cached_property
    def time_weight(self) -> float:
        return self.objective.time_weight

    @cached_property
    def safe(self) -> tuple[tuple[int, ...], ...]:
        """The lowest level of each knob that no risk is run with, from each of its levels."""
        most, levels = self.tuning.risky_ratio, [knob.levels for knob in self.lattice.knobs]
        return tuple(
            tuple(next(i for i, low in enumerate(row) if high / low <= most) for high in row) for row in levels
        )

    @cached_property
    def tables(self) -> cap.Tables:
        return cap.tables(self.lattice)

    @cached_property
    def log_levels(self) -> LogLevels:
        return self.tables.log_levels

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

    @cached_property
    def reckoned_along(self) -> LogLevels | None:
        """Log levels along which the ledger keeps how power rises: under a cap."""
        return None if self.objective.cap_w is None else self.log_levels

    def reckoned(self, ledger: Ledger) -> cap.Reckoned | None:
        """Power reckoned with under a cap; None where there is none."""
        return None if self.objective.cap_w is None else cap.Reckoned(self.tables, ledger, self.objective.log_cap)
