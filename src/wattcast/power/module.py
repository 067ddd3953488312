"""Module power: energy per event, times how often it happens, times the square of the voltage.

P = P_idle(f) + V²(f)·Σ_m E_m·n_m/t + Σ_d E_d·n_d/t   [Lee2026, Eq. 5; the same statement with
α·C·f written as energy per event times rate], with on-chip modules m on the core rail and device
memory d on a rail of its own. E is per event at relative voltage 1 and for random data; ``toggling``
scales the data-dependent modules for other data. A byte of device memory also crosses controllers and wires of
the chip; ``memory_on_core`` is the share of its energy that is spent there and follows the core voltage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.activity import Activity, events
from wattcast.arrays import Array, Scalar, per_sweep
from wattcast.errors import bad_value, unknown_name
from wattcast.power.interface import Kind, Power
from wattcast.power.static import IdlePower, VoltageCurve

STATIC, CLOCK = "static", "clock"
OWN_RAIL = ("dram", "link")  # modules that do not see the core voltage
STEADY = ("sm", "clock")  # modules whose energy does not depend on the data


@dataclass(frozen=True)
class Priced:
    """Joules of known counts, and of one more event: on the core rail at relative voltage 1, and on others."""

    core_j: float
    rest_j: float
    core_j_each: float
    rest_j_each: float


@dataclass(frozen=True)
class ModulePower:
    """Energies by event, an idle curve and a relative voltage curve."""

    energy_j: Mapping[str, float]  # event -> J at relative voltage 1
    idle: IdlePower
    voltage: VoltageCurve
    toggling: float = 1.0  # dynamic energy relative to random data
    memory_on_core: float = 0.0  # share of device memory's energy that follows the core voltage

    def __post_init__(self) -> None:
        known = events()
        for name, energy in self.energy_j.items():
            if name not in known:
                raise unknown_name("event", name, known)
            if not (np.isfinite(energy) and energy >= 0):
                raise bad_value(f"energy of {name}", "joules, zero or more", energy)
        if not 0.0 <= self.toggling <= 2.0:
            raise bad_value("toggling", "a factor between 0 and 2", self.toggling)
        if not 0.0 <= self.memory_on_core <= 1.0:
            raise bad_value("memory_on_core", "a share between 0 and 1", self.memory_on_core)

    @cached_property
    def required_events(self) -> tuple[str, ...]:
        return tuple(name for name in events() if name in self.energy_j)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Modules with an energy, in the order of ``events.csv``."""
        known = events()
        return tuple(dict.fromkeys(known[name].module for name in known if name in self.energy_j))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return (STATIC, CLOCK, *self.modules)

    def power(self, activity: Activity) -> Power:
        """Watts of static, clock and each module in every interval."""
        activity.require(self.required_events, "module power")
        clock_hz, at = _clock(activity), activity.at
        idle_w = self.idle.at(clock_hz, at.temperature_c)
        static_w = np.minimum(idle_w, self.idle.static_w(at.temperature_c))
        volts_squared = self.voltage.at(clock_hz)[..., np.newaxis] ** 2
        volts_squared = self._on_core * volts_squared + (1.0 - self._on_core)
        scale = np.where(self._steady, 1.0, self.toggling) * volts_squared
        columns = self._columns(activity.events)
        duration_s = activity.duration_s[..., np.newaxis]
        joules = scale * (activity.value.take(columns, axis=-1) @ self._energies)
        dynamic_w = np.divide(
            joules, duration_s, out=np.zeros(np.broadcast(joules, duration_s).shape), where=duration_s > 0
        )
        shape = np.broadcast_shapes(dynamic_w.shape[:-1], static_w.shape)
        part_w = np.empty((*shape, len(self.parts)))
        part_w[..., 0], part_w[..., 1], part_w[..., 2:] = static_w, idle_w - static_w, dynamic_w
        return Power(part_w, self.parts)

    def priced(self, names: tuple[str, ...], counts: Array) -> Priced | None:
        """What ``counts`` of the events ``names`` cost, and one more of ``names[-1]``, which has no count yet.

        None where an event it needs is not among them.
        """
        if names not in self._prices:
            if not set(self.required_events) <= set(names):
                return None
            self._prices[names] = self._price_each(names)
        core, rest = self._prices[names]
        return Priced(float(core[:-1] @ counts), float(rest[:-1] @ counts), float(core[-1]), float(rest[-1]))

    def _price_each(self, names: tuple[str, ...]) -> Array:
        """Joules of one event of each name, ``(2, event)``: on the core rail at relative voltage 1, and on others."""
        scale = np.where(self._steady, 1.0, self.toggling)
        found = np.zeros((2, len(names)))
        found[:, self._columns(names)] = scale * np.array([self._on_core, 1.0 - self._on_core]) @ self._energies.T
        return found

    @cached_property
    def _prices(self) -> dict[tuple[str, ...], Array]:
        """Of the names asked for before: there are hardly two."""
        return {}

    def mean_w(self, cost: Priced, more: Array, duration_s: Array, clock_hz: Array, temperature_c: Scalar) -> Array:
        """Total power, ``(*sweep,)``, of priced counts and ``more`` of the last event within ``duration_s``.

        The parts of :meth:`power` added up, without looking at them one by one. The clock is ``(*sweep, 1)``.
        """
        one = not duration_s.ndim and not more.ndim and clock_hz.size == 1 and clock_hz.ndim <= 1
        if one and isinstance(temperature_c, float) and self._plain_curves:
            return np.asarray(
                self._mean_w_of_one(cost, float(more), float(duration_s), clock_hz.item(), temperature_c)
            )
        volts_squared = per_sweep(self.voltage.at(clock_hz)) ** 2
        joules = volts_squared * (cost.core_j + cost.core_j_each * more) + (cost.rest_j + cost.rest_j_each * more)
        dynamic_w = np.where(duration_s > 0, joules / np.where(duration_s > 0, duration_s, 1.0), 0.0)
        return np.asarray(per_sweep(self.idle.at(clock_hz, temperature_c)) + dynamic_w)

    def _mean_w_of_one(
        self, cost: Priced, more: float, duration_s: float, clock_hz: float, temperature_c: float
    ) -> float:
        """The same of a single design, which arrays would only slow down."""
        volts_squared = self.voltage.at_one(clock_hz) ** 2
        joules = volts_squared * (cost.core_j + cost.core_j_each * more) + (cost.rest_j + cost.rest_j_each * more)
        return self.idle.at_one(clock_hz, temperature_c) + (joules / duration_s if duration_s > 0 else 0.0)

    def _columns(self, names: tuple[str, ...]) -> npt.NDArray[np.intp]:
        """Where the events it needs stand among ``names``."""
        return np.array([names.index(name) for name in self.required_events], dtype=np.intp)

    @cached_property
    def _plain_curves(self) -> bool:
        """Whether idle power and voltage are curves by clock and nothing else; a sweep may scale them."""
        return type(self.idle) is IdlePower and type(self.voltage) is VoltageCurve

    @cached_property
    def _energies(self) -> Array:
        """J per event at relative voltage 1, ``(event, module)``: each event counts for one module."""
        known, modules = events(), self.modules
        matrix = np.zeros((len(self.required_events), len(modules)))
        for row, name in enumerate(self.required_events):
            matrix[row, modules.index(known[name].module)] = self.energy_j[name]
        return matrix

    @cached_property
    def _on_core(self) -> Array:
        """Share of each module's energy that follows the core voltage."""
        shares = dict.fromkeys(OWN_RAIL, 0.0) | {"dram": self.memory_on_core}
        return np.array([shares.get(module, 1.0) for module in self.modules])

    @cached_property
    def _steady(self) -> npt.NDArray[np.bool_]:
        return np.array([module in STEADY for module in self.modules])

    def to_plain(self) -> dict[str, Any]:
        """For YAML."""
        return {
            "energy_j": dict(self.energy_j),
            "idle": self.idle.to_plain(),
            "voltage": self.voltage.to_plain(),
            "toggling": self.toggling,
            "memory_on_core": self.memory_on_core,
        }


def _clock(activity: Activity) -> Array:
    if activity.at.clock_hz is None:
        raise bad_value("activity.at.clock_hz", "the set clock of each interval", None)
    return np.asarray(activity.at.clock_hz, dtype=np.float64)


def _from_plain(plain: Mapping[str, Any]) -> ModulePower:
    return ModulePower(
        dict(plain["energy_j"]),
        IdlePower(**_arrays(plain["idle"])),
        VoltageCurve(**_arrays(plain["voltage"])),
        float(plain.get("toggling", 1.0)),
        float(plain.get("memory_on_core", 0.0)),
    )


def _arrays(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {k: np.array(v, dtype=np.float64) if isinstance(v, list) else v for k, v in plain.items()}


def _example() -> ModulePower:
    clock_hz = np.array([0.5e9, 1.0e9, 2.0e9])
    return ModulePower(
        {name: 1e-12 * (i + 1) for i, name in enumerate(events()) if not events()[name].is_mean},
        IdlePower(clock_hz, np.array([50.0, 60.0, 90.0]), reference_c=45.0, per_c=0.01),
        VoltageCurve(clock_hz, np.array([0.7, 0.75, 1.0])),
    )


KIND = Kind("module", _from_plain, _example)
