"""Module power: energy per event, times how often it happens, times the square of the voltage.

    P = P_idle(f, T) + V²(f)·Σ_m E_m·n_m/t + Σ_d E_d·n_d/t

with on-chip modules m on the core rail and device memory and links d on rails of their own. It is
Eq. 5 of [Lee2026] with α·C·f written as energy per event times rate. E is in J per event at
relative voltage 1 and for random data, n counts events in an interval of t seconds, V is the
relative core voltage at the set clock f, and P_idle is the idle curve at die temperature T.
``toggling`` scales the modules whose energy depends on the data. A byte of device memory also
crosses controllers and wires of the chip: ``memory_on_core`` is the share of its energy that is
spent there and follows the core voltage. The model is linear in counts, so it knows no energy of
two modules working at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import (
    dataclass,
    field,
    replace,
)
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from wattcast.core import bad_value, check_names
from wattcast.core.arrays import (
    Array,
    Sweepable,
    sweep_values,
)
from wattcast.hardware import DEFAULT_TEMPERATURE_C, OperatingPoint
from wattcast.power.activity import Activity, known_events
from wattcast.power.power_model import (
    NOT_SAVED,
    DesignEnergies,
    IdlePower,
    MeanPower,
    Power,
    PowerModel,
    VoltageCurve,
    mean_power_w,
)

STATIC = "static"
CLOCK = "clock"
OWN_RAIL = ("dram", "link")  # modules that do not see the core voltage
MOST_EVENT_J = 1e-3  # of one event; the costliest that ships, a cycle of an SM, takes 3e-9 J
_CORE_SHARES = {"link": 0.0}  # of the energy that follows the core voltage; of others all
STEADY = ("sm", "clock")  # modules whose energy does not depend on the data


@dataclass(frozen=True)
class ModulePower(PowerModel):
    """Energies by event, an idle curve and a relative voltage curve."""

    kind: ClassVar[str] = "module"
    energy_j: Mapping[str, float]  # event -> J at relative voltage 1
    idle: IdlePower
    voltage: VoltageCurve
    toggling: float = 1.0  # dynamic energy relative to random data
    memory_on_core: float = 0.0  # share of device memory's energy that follows the core voltage
    design: DesignEnergies | None = field(default=None, metadata=NOT_SAVED)

    def __post_init__(self) -> None:
        for name, energy in self.energy_j.items():
            check_names("event", name, known_events(), "")
            if not 0.0 <= energy <= MOST_EVENT_J:
                expected = f"joules, from zero to {MOST_EVENT_J:g}"
                raise bad_value(f"energy of {name}", expected, energy)
        if not 0.0 <= self.toggling <= 2.0:
            raise bad_value("toggling", "a factor between 0 and 2", self.toggling)
        if not 0.0 <= self.memory_on_core <= 1.0:
            raise bad_value("memory_on_core", "a share between 0 and 1", self.memory_on_core)

    @cached_property
    def required_events(self) -> tuple[str, ...]:
        """Events with an energy, in the order of ``events.csv``."""
        return tuple(name for name in known_events() if name in self.energy_j)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Modules with an energy, in the order of ``events.csv``."""
        events = known_events()
        return tuple(dict.fromkeys(events[name].module for name in self.required_events))

    @property
    def parts(self) -> tuple[str, ...]:
        return (STATIC, CLOCK, *self.modules)

    def power(self, activity: Activity) -> Power:
        """Return the watts of static power, clock power and each module in every interval."""
        activity.require(self.required_events, "module power")
        at = activity.at
        clock_hz = _set_clock(at)
        static_w, clock_w = self._split_idle(clock_hz, at.temperature_c)

        # Joules of each module, over the interval's length
        rail_j = self._event_rail_j(activity.events)
        core_j, other_j = (activity.value @ joules for joules in rail_j)
        if self.design is not None:
            core_factor, other_factor = self._design_factors(self.design)
            core_j = core_j * core_factor[..., np.newaxis, :]
            other_j = other_j * other_factor[..., np.newaxis, :]
        volts_squared = self.voltage.level_at(clock_hz)[..., np.newaxis] ** 2
        joules = volts_squared * core_j + other_j
        duration_s = activity.duration_s[..., np.newaxis]
        nothing_w = np.zeros(np.broadcast(joules, duration_s).shape)
        dynamic_w = np.divide(joules, duration_s, out=nothing_w, where=duration_s > 0)

        shape = np.broadcast_shapes(dynamic_w.shape[:-1], static_w.shape, clock_w.shape)
        part_w = np.empty((*shape, len(self.parts)))
        part_w[..., 0] = static_w
        part_w[..., 1] = clock_w
        part_w[..., 2:] = dynamic_w
        return Power(part_w, self.parts)

    def prepare_mean_power(
        self,
        events: tuple[str, ...],
        counts: Array,
    ) -> MeanPower:
        """Prepare the mean power of a workload; its fixed counts become joules on each rail once.

        A governor asks for the mean power of a workload at several clocks, and a sweep at a
        million: there is no need to look at modules one by one.
        """
        if not set(self.required_events) <= set(events):
            return super().prepare_mean_power(events, counts)
        fixed_j, last_j = self._workload_rail_j(events, counts)
        fixed_core_j, fixed_other_j = fixed_j
        last_core_j, last_other_j = last_j

        def mean_power(
            last_count: Array,
            duration_s: Array,
            at: OperatingPoint,
        ) -> Array:
            clock_hz = _set_clock(at)
            volts_squared = sweep_values(self.voltage.level_at(clock_hz)) ** 2
            core_j = fixed_core_j + last_core_j * last_count
            other_j = fixed_other_j + last_other_j * last_count
            dynamic_w = mean_power_w(volts_squared * core_j + other_j, duration_s)
            idle_w = self.idle_power_w(clock_hz, at.temperature_c)
            return np.asarray(sweep_values(idle_w) + dynamic_w)

        return mean_power

    def idle_power_w(
        self,
        clock_hz: Sweepable,
        temperature_c: Sweepable = DEFAULT_TEMPERATURE_C,
    ) -> Array:
        if self.design is None:
            return self.idle.power_at(clock_hz, temperature_c)
        static_w, clock_w = self._split_idle(clock_hz, temperature_c)
        return np.asarray(static_w + clock_w)

    def relative_voltage(self, clock_hz: Sweepable) -> Array:
        return self.voltage.level_at(clock_hz)

    @property
    def scalable_parts(self) -> tuple[str, ...]:
        return self.modules

    def scale_energy(
        self,
        part_factor: Mapping[str, float],
        idle_factor: float = 1.0,
        idle_offset_w: float = 0.0,
    ) -> ModulePower:
        energy_j = {}
        for event, joules in self.energy_j.items():
            module = known_events()[event].module
            energy_j[event] = joules * part_factor.get(module, 1.0)
        idle_w = self.idle.power_w * idle_factor + idle_offset_w
        if (idle_w <= 0).any():
            least_w = (self.idle.power_w * idle_factor).min()
            expected = f"less than the idle power of {least_w:.0f} W taken away"
            raise bad_value("idle_offset", expected, idle_offset_w)
        return replace(self, energy_j=energy_j, idle=replace(self.idle, power_w=idle_w))

    def with_data_factor(self, factor: float) -> ModulePower:
        return replace(self, toggling=factor)

    def with_voltage_factor(self, factor: Sweepable) -> ModulePower:
        return replace(self, voltage=replace(self.voltage, factor=factor))

    def with_voltage_beyond(self, top_hz: float) -> ModulePower:
        return replace(self, voltage=self.voltage.carried_to(top_hz))

    def for_design(self, energies: DesignEnergies) -> ModulePower:
        energy_j = dict(self.energy_j)
        if energies.link_j_per_byte is not None:
            energy_j.setdefault("link_byte", energies.link_j_per_byte)
        return replace(self, energy_j=energy_j, design=energies)

    def _split_idle(
        self,
        clock_hz: Sweepable,
        temperature_c: Sweepable,
    ) -> tuple[Array, Array]:
        """Return the static and the clock part of the idle power."""
        idle_w = self.idle.power_at(clock_hz, temperature_c)
        static_w = np.minimum(idle_w, self.idle.static_w(temperature_c))
        clock_w = idle_w - static_w
        if self.design is None:
            return static_w, clock_w
        return np.asarray(static_w * self.design.static), np.asarray(clock_w * self.design.clock)

    def _design_factors(self, energies: DesignEnergies) -> tuple[Array, Array]:
        """Return the factors of the modules on the core rail and on others, ``(*sweep,
        module)``."""
        rails = []
        for factors in (energies.core, energies.other):
            values = [sweep_values(factors.get(module, 1.0)) for module in self.modules]
            rails.append(np.stack(np.broadcast_arrays(*values), axis=-1))
        return rails[0], rails[1]

    def _workload_rail_j(
        self,
        events: tuple[str, ...],
        counts: Array,
    ) -> tuple[Sequence[Sweepable], Sequence[Sweepable]]:
        """Return the joules of a workload's fixed counts and of one last event, by rail.

        They are numbers, or ``(*sweep,)`` where a design or a sweep of counts makes them so.
        """
        rail_j = self._event_rail_j(events)
        if self.design is None and counts.ndim == 1:
            core_j, other_j = rail_j.sum(axis=-1)
            plain_j = [float(core_j[:-1] @ counts), float(other_j[:-1] @ counts)]
            return plain_j, [float(core_j[-1]), float(other_j[-1])]
        design = self.design or DesignEnergies()
        fixed_sums: list[Sweepable] = []
        last_sums: list[Sweepable] = []
        for event_j, factors in zip(rail_j, (design.core, design.other), strict=True):
            fixed_j, last_j = self._sum_modules(counts, event_j, factors)
            fixed_sums.append(fixed_j)
            last_sums.append(last_j)
        return fixed_sums, last_sums

    def _sum_modules(
        self,
        counts: Array,
        event_j: Array,
        factors: Mapping[str, Sweepable],
    ) -> tuple[Sweepable, Sweepable]:
        """Return the joules of fixed counts and of the last event on one rail, ``(*sweep,)``.

        Modules that no design changes are summed at once: a sweep has a million points.
        """
        is_plain = np.array([module not in factors for module in self.modules])
        plain_j = event_j[:, is_plain].sum(axis=1)
        fixed_j: Sweepable = counts @ plain_j[:-1]
        last_j: Sweepable = plain_j[-1]
        for place in np.flatnonzero(~is_plain).tolist():
            factor = sweep_values(factors[self.modules[place]])
            fixed_j = fixed_j + factor * (counts @ event_j[:-1, place])
            last_j = last_j + factor * event_j[-1, place]
        return fixed_j, last_j

    def _event_rail_j(self, names: tuple[str, ...]) -> npt.NDArray[np.float64]:
        """Return the joules of one event of each name in each module, ``(2, event, module)``.

        First those on the core rail at relative voltage 1, then those on others. Events without an
        energy are free.
        """
        modules = self.modules
        rail_j = np.zeros((2, len(names), len(modules)))
        for event in self.required_events:
            module = known_events()[event].module
            core_share = _CORE_SHARES.get(module, 1.0)
            if module == "dram":
                core_share = self.memory_on_core
            joules = self.energy_j[event] * (1.0 if module in STEADY else self.toggling)
            place = (names.index(event), modules.index(module))
            rail_j[0][place] = joules * core_share
            rail_j[1][place] = joules * (1.0 - core_share)
        return rail_j


def _set_clock(at: OperatingPoint) -> Array:
    if at.clock_hz is None:
        raise bad_value("activity.at.clock_hz", "the set clock of each interval", None)
    return np.asarray(at.clock_hz, dtype=np.float64)


def as_module_power(model: PowerModel) -> ModulePower:
    """Return a model as energies by event, an idle curve and a voltage curve.

    Forecasts carry these over to other cards.
    """
    if isinstance(model, ModulePower):
        return model
    expected = "energies by event, an idle curve and a voltage curve"
    raise bad_value("power model", expected, f"a {model.kind} model")
