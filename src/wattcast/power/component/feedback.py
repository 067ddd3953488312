"""Power while a simulation runs, and a say in what happens next [GPUWattch manual, section 1.3].

A simulator written in Python hands each sample's counters to a :class:`PowerMeter`. Every listener sees the
sample's power and may answer with a new setting; the simulator takes the setting that comes back for the
samples that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from wattcast.activity import Activity, Source, events
from wattcast.activity.simulated import Dialect, counters
from wattcast.arrays import Array
from wattcast.errors import bad_value, unknown_name
from wattcast.hardware import OperatingPoint
from wattcast.power.component.model import ComponentPower


@dataclass(frozen=True)
class Setting:
    """What a listener can ask for."""

    clock_hz: float
    voltage_v: float | None = None  # None: the model's reference, or its curve

    def __post_init__(self) -> None:
        if not self.clock_hz > 0 or (self.voltage_v is not None and not self.voltage_v > 0):
            raise bad_value("setting", "a clock and a voltage above zero", f"{self.clock_hz} Hz, {self.voltage_v} V")


@dataclass(frozen=True)
class SamplePower:
    """One sample's power, at the setting it ran at."""

    index: int
    duration_s: float
    power_w: float
    part_w: Mapping[str, float]
    setting: Setting


Listener = Callable[[SamplePower], Setting | None]


@dataclass
class PowerMeter:
    """Turns samples into power one at a time and asks the listeners what to run at next.

    ``dialect`` lets counters be named as its simulator does; without one they are Wattcast events.
    """

    model: ComponentPower
    setting: Setting
    dialect: Dialect | None = None
    listeners: tuple[Listener, ...] = ()
    scaling: Mapping[str, float] = field(default_factory=dict)  # for counters handed over already scaled
    energy_j: float = 0.0
    time_s: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        known = counters(self.dialect) if self.dialect is not None else ()
        self._event_of = {c.column: (c.event, c.prescaled, c.scaling) for c in known if c.event}

    def sample(self, counts: Mapping[str, float], cycles: float) -> Setting:
        """One sample of ``cycles`` core cycles at the present setting; the answer is the next setting."""
        if not (np.isfinite(cycles) and cycles > 0):
            raise bad_value(f"sample {self.samples}", "cycles above zero", cycles)
        duration_s = cycles / self.setting.clock_hz
        power = self.model.power(self._activity(counts, duration_s))
        watts = power.part_w[0].tolist()
        seen = SamplePower(
            self.samples, duration_s, sum(watts), dict(zip(power.parts, watts, strict=True)), self.setting
        )
        self.samples += 1
        self.time_s += duration_s
        self.energy_j += seen.power_w * duration_s
        for listener in self.listeners:
            self.setting = listener(seen) or self.setting
        return self.setting

    def _activity(self, counts: Mapping[str, float], duration_s: float) -> Activity:
        values: dict[str, float] = {}
        for name, count in counts.items():
            event, prescaled, factor = self._event_of.get(name, (name, False, ""))
            if event not in events():
                raise unknown_name("counter", name, [*self._event_of, *events()])
            if not (np.isfinite(count) and count >= 0):
                raise bad_value(f"sample {self.samples}: {name}", "a count, zero or more", count)
            values[event] = count / (self.scaling.get(factor, 1.0) or 1.0) if prescaled else count
        if self.setting.voltage_v is not None:
            values["core_voltage"] = self.setting.voltage_v
        value: Array = np.array([list(values.values())], dtype=np.float64)
        at = OperatingPoint(clock_hz=self.setting.clock_hz)
        return Activity(np.array([duration_s]), value, tuple(values), at, Source.SIMULATED)
