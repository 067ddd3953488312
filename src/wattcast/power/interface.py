"""Activity -> Power: the one interface of every power model, and the table of models.

A power model is frozen coefficients and one pure method. Fitting builds it elsewhere. Parts always
sum to the total.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from wattcast.activity import Activity
from wattcast.arrays import Array
from wattcast.errors import unknown_name


@dataclass(frozen=True)
class Power:
    """Watts by part in each interval. The total is the sum of the parts, by construction."""

    part_w: Array  # (*sweep, interval, part)
    parts: tuple[str, ...]

    @property
    def total_w(self) -> Array:
        """Board power, ``(*sweep, interval)``."""
        total: Array = self.part_w.sum(axis=-1)
        return total

    def of(self, part: str) -> Array:
        """Watts of one part, ``(*sweep, interval)``."""
        return self.part_w[..., self.parts.index(part)]


@runtime_checkable
class PowerModel(Protocol):
    """Frozen coefficients and one pure method."""

    @property
    def required_events(self) -> tuple[str, ...]:
        """Events without which this model cannot speak."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts it reports, in order."""
        ...

    def power(self, activity: Activity) -> Power:
        """Watts by part in each interval of ``activity``."""
        ...

    def to_plain(self) -> dict[str, Any]:
        """Coefficients as plain mappings, lists and numbers, for YAML."""
        ...


@dataclass(frozen=True)
class Kind:
    """A registered kind of power model: how to read it back, and an example for the contract tests."""

    name: str
    from_plain: Callable[[Mapping[str, Any]], PowerModel]
    example: Callable[[], PowerModel]


# kind -> module that defines it as KIND. A new model is one file and one line here.
_HOMES = {
    "module": "wattcast.power.module",
    "rate": "wattcast.power.rate",
    "switched_capacitance": "wattcast.power.switched_capacitance",
    "hybrid_rail": "wattcast.power.hybrid_rail",
    "component": "wattcast.power.component.model",
}


def kinds() -> dict[str, Kind]:
    """Every registered kind of power model."""
    return {name: kind_of(name) for name in _HOMES}


def kind_of(name: str) -> Kind:
    """The kind called ``name``, or an error with the nearest names; only its own module is imported."""
    if name not in _HOMES:
        raise unknown_name("power model", name, _HOMES, f"Known: {', '.join(_HOMES)}.")
    kind: Kind = import_module(_HOMES[name]).KIND
    assert kind.name == name, f"{_HOMES[name]} defines {kind.name}, registered as {name}"
    return kind
