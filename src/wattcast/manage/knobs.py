"""Describe what can be set on a card while it runs: knobs with levels, and the lattice of all settings.

A setting is a tuple of level indices, one per knob, 0 being the lowest level. The lattice converts such tuples into
SI values and into positions in flat tables. Sweeps over all settings are therefore array expressions, while the
controller handles plain tuples.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from wattcast.core import units
from wattcast.core.arrays import Array
from wattcast.core.errors import bad_value

Settings = tuple[int, ...]  # level of each knob, 0 is the lowest


class KnobRole(StrEnum):
    """Name what a knob changes. Compute throughput is compute units times core clock."""

    COMPUTE_UNITS = "compute_units"
    CORE_CLOCK = "core_clock"
    MEMORY_CLOCK = "memory_clock"
    POWER_LIMIT = "power_limit"  # of the board; the governor lowers the core clock to keep to it

    @property
    def is_compute(self) -> bool:
        """Tell compute knobs from the memory clock."""
        return self is not KnobRole.MEMORY_CLOCK


@dataclass(frozen=True)
class Knob:
    """Hold the levels of one knob in ascending order: Hz for clocks, a count for compute units, W for limits."""

    role: KnobRole
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.levels or any(b <= a for a, b in pairwise(self.levels)) or self.levels[0] <= 0:
            raise bad_value(f"knob {self.role}", "positive levels, each above the one before", self.levels)


class LatticeLine(NamedTuple):
    """List the settings that differ from a given one in a single knob."""

    others: Settings  # levels of all other knobs
    along: tuple[Settings, ...]  # by level of the knob


@dataclass(frozen=True)
class Lattice:
    """Hold the knobs of a card; its settings are the product of their levels."""

    knobs: tuple[Knob, ...]

    def __post_init__(self) -> None:
        roles = [knob.role for knob in self.knobs]
        if not roles or len(set(roles)) != len(roles):
            raise bad_value("knobs", "one or more, of different roles", ", ".join(roles) or "none")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Count the levels of each knob."""
        return tuple(len(knob.levels) for knob in self.knobs)

    @cached_property
    def count(self) -> int:
        """Count all settings."""
        return int(np.prod(self.shape))

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))

    @cached_property
    def top(self) -> Settings:
        """Return the setting with every knob at its highest level."""
        return tuple(n - 1 for n in self.shape)

    @cached_property
    def bottom(self) -> Settings:
        """Return the setting with every knob at its lowest level."""
        return (0,) * len(self.shape)

    def flat_index(self, settings: Settings) -> int:
        """Return the position of a setting in flat tables, where the last knob varies fastest."""
        return sum(level * stride for level, stride in zip(settings, self._strides, strict=True))

    def settings_at(self, index: int) -> Settings:
        """Return the setting at a position of flat tables."""
        return tuple(int(level) for level in np.unravel_index(index, self.shape))

    @cached_property
    def _lines(self) -> dict[Settings, tuple[LatticeLine, ...]]:
        return {}

    def lines_through(self, settings: Settings) -> tuple[LatticeLine, ...]:
        """Return the lines through a setting, one per knob. They are kept, as every decision asks for them."""
        found = self._lines.get(settings)
        if found is None:
            lines = []
            for knob, count in enumerate(self.shape):
                ahead, behind = settings[:knob], settings[knob + 1 :]
                along = tuple((*ahead, level, *behind) for level in range(count))
                lines.append(LatticeLine(ahead + behind, along))
            found = self._lines[settings] = tuple(lines)
        return found

    def contains(self, settings: Settings) -> bool:
        """Tell whether a setting exists."""
        return len(settings) == len(self.shape) and all(
            0 <= level < n for level, n in zip(settings, self.shape, strict=True)
        )

    def level_values(self, settings: Settings) -> tuple[float, ...]:
        """Return the SI values of a setting."""
        return tuple(knob.levels[level] for knob, level in zip(self.knobs, settings, strict=True))

    def nearest_settings(self, *values: float) -> Settings:
        """Return the setting whose values are closest, knob by knob."""
        return tuple(
            int(np.argmin(np.abs(np.asarray(knob.levels) - value)))
            for knob, value in zip(self.knobs, values, strict=True)
        )

    def find_knob(self, role: KnobRole) -> int | None:
        """Return the position of the knob with this role, or None where the card lacks it."""
        return next((i for i, knob in enumerate(self.knobs) if knob.role is role), None)

    def knob_values(self, role: KnobRole, missing: float = 1.0) -> Array:
        """Return the SI value of a knob at every setting, ``(setting,)``; ``missing`` where the card lacks it."""
        which = self.find_knob(role)
        if which is None:
            return np.full(self.count, missing)
        levels = np.asarray(self.knobs[which].levels)
        return np.asarray(levels[np.indices(self.shape)[which].ravel()], dtype=np.float64)

    def describe(self, settings: Settings) -> str:
        """Write a setting for people: ``32 units, 1 GHz core, 1.375 GHz memory``."""
        words = {
            KnobRole.COMPUTE_UNITS: ("", " units"),
            KnobRole.CORE_CLOCK: ("Hz", " core"),
            KnobRole.MEMORY_CLOCK: ("Hz", " memory"),
            KnobRole.POWER_LIMIT: ("W", " limit"),
        }
        said = []
        for knob, value in zip(self.knobs, self.level_values(settings), strict=True):
            unit, word = words[knob.role]
            said.append(units.show(value, unit) + word)
        return ", ".join(said)


def move_knob(settings: Settings, knob: int, level: int) -> Settings:
    """Return the same settings with one knob at another level."""
    return (*settings[:knob], level, *settings[knob + 1 :])
