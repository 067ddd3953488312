"""Knobs: what can be set on a card while it runs, as a lattice of levels.

A setting is a tuple of level indices, one per knob, lowest level first. The lattice knows how to turn
such tuples into SI values and into positions in flat tables, so that sweeps over all settings are
arrays and the controller handles plain tuples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from wattcast import units
from wattcast.arrays import Array
from wattcast.errors import bad_value

Settings = tuple[int, ...]  # level of each knob, 0 is the lowest


class Role(StrEnum):
    """What a knob turns. Compute throughput is compute units times core clock."""

    COMPUTE_UNITS = "compute_units"
    CORE_CLOCK = "core_clock"
    MEMORY_CLOCK = "memory_clock"

    @property
    def is_compute(self) -> bool:
        return self is not Role.MEMORY_CLOCK


@dataclass(frozen=True)
class Knob:
    """One tunable: levels ascending, in Hz for clocks and as a count for units."""

    role: Role
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.levels or any(b <= a for a, b in pairwise(self.levels)) or self.levels[0] <= 0:
            raise bad_value(f"knob {self.role}", "positive levels, each above the one before", self.levels)

    @property
    def unit(self) -> str:
        return "" if self.role is Role.COMPUTE_UNITS else "Hz"

    def show(self, level: int) -> str:
        """A level for people."""
        return units.show(self.levels[level], self.unit)


class Line(NamedTuple):
    """The settings that differ from one in a single knob."""

    others: Settings  # levels of all other knobs
    along: tuple[Settings, ...]  # by level of the knob


@dataclass(frozen=True)
class Lattice:
    """All settings of a card: the product of its knobs' levels."""

    knobs: tuple[Knob, ...]

    def __post_init__(self) -> None:
        roles = [knob.role for knob in self.knobs]
        if not roles or len(set(roles)) != len(roles):
            raise bad_value("knobs", "one or more, of different roles", ", ".join(roles) or "none")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(knob.levels) for knob in self.knobs)

    @cached_property
    def count(self) -> int:
        """How many settings there are."""
        return int(np.prod(self.shape))

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))

    @cached_property
    def top(self) -> Settings:
        return tuple(n - 1 for n in self.shape)

    @cached_property
    def bottom(self) -> Settings:
        return (0,) * len(self.shape)

    def all(self) -> Iterable[Settings]:
        """Every setting, in the order of :meth:`flat`."""
        return product(*(range(n) for n in self.shape))

    def flat(self, at: Settings) -> int:
        """Position of a setting in flat tables."""
        return sum(level * stride for level, stride in zip(at, self._strides, strict=True))

    def unflat(self, index: int) -> Settings:
        """The setting at a position of flat tables."""
        return tuple(int(level) for level in np.unravel_index(index, self.shape))

    @cached_property
    def _lines(self) -> dict[Settings, tuple[Line, ...]]:
        return {}

    def lines(self, at: Settings) -> tuple[Line, ...]:
        """The lines through a setting, by knob; made when a setting is first asked for, and kept."""
        found = self._lines.get(at)
        if found is None:
            found = self._lines[at] = tuple(self._line(at, which) for which in range(len(at)))
        return found

    def _line(self, at: Settings, which: int) -> Line:
        ahead, behind = at[:which], at[which + 1 :]
        return Line(ahead + behind, tuple((*ahead, level, *behind) for level in range(self.shape[which])))

    def inside(self, at: Settings) -> bool:
        return len(at) == len(self.shape) and all(0 <= level < n for level, n in zip(at, self.shape, strict=True))

    def clamp(self, at: Iterable[int]) -> Settings:
        """The nearest setting that exists."""
        return tuple(min(max(level, 0), n - 1) for level, n in zip(at, self.shape, strict=True))

    def values(self, at: Settings) -> tuple[float, ...]:
        """The SI values of a setting."""
        return tuple(knob.levels[level] for knob, level in zip(self.knobs, at, strict=True))

    def nearest(self, *values: float) -> Settings:
        """The setting whose values are closest, knob by knob."""
        return tuple(
            int(np.argmin(np.abs(np.asarray(knob.levels) - value)))
            for knob, value in zip(self.knobs, values, strict=True)
        )

    def index(self, role: Role) -> int | None:
        """Which knob has this role, or None."""
        return next((i for i, knob in enumerate(self.knobs) if knob.role is role), None)

    def table(self, role: Role, missing: float = 1.0) -> Array:
        """The value of a knob at every setting, ``(settings,)``; ``missing`` where the card lacks it."""
        which = self.index(role)
        if which is None:
            return np.full(self.count, missing)
        levels = np.asarray(self.knobs[which].levels)
        return np.asarray(levels[np.indices(self.shape)[which].ravel()], dtype=np.float64)

    def show(self, at: Settings) -> str:
        """A setting for people: ``32 units, 1 GHz core, 1.375 GHz memory``."""
        words = {Role.COMPUTE_UNITS: " units", Role.CORE_CLOCK: " core", Role.MEMORY_CLOCK: " memory"}
        return ", ".join(k.show(level) + words[k.role] for k, level in zip(self.knobs, at, strict=True))
