"""Plants: what a controller acts on. A plant applies settings and gives observations back.

Simulated cards, predicted GPUs and replayed measurements are all tables over the lattice of settings
(:class:`Tables`), filled at once as arrays; :class:`TableRun` plays one application from them. A real
card is in ``measure/device_plant.py`` and has the same two methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import bad_value, unknown_name
from wattcast.manage.knobs import Lattice, Settings
from wattcast.manage.observation import Observation


class Plant(Protocol):
    """A card under control."""

    @property
    def lattice(self) -> Lattice: ...

    @property
    def default(self) -> Settings: ...

    def next_kernel(self) -> str | None:
        """The kernel about to run, or None when the application has ended."""
        ...

    def run(self, at: Settings) -> Observation:
        """Run that kernel once (or one period) at these settings, and say what was seen."""
        ...


@dataclass(frozen=True)
class Tables:
    """Time, power and counters of every phase of every kernel at every setting.

    A *phase* is one behaviour of one kernel: rows ``(phase, setting)``. An application is the order in
    which phases run.
    """

    name: str
    lattice: Lattice
    default: Settings
    kernels: tuple[str, ...]  # of each phase
    time_s: Array  # (phase, setting)
    power_w: Array  # (phase, setting)
    applications: Mapping[str, npt.NDArray[np.int64]]  # name -> phases in the order they run
    work: Array | None = None  # (phase,) instructions, relative; None: every run of a kernel is alike
    counters: Mapping[str, Array] = field(default_factory=dict)  # name -> (phase, setting)
    memory_w: Array | None = None  # (phase, setting) part of power_w drawn by memory
    board_w: float | None = None  # constant part of power_w
    idle_w: float | None = None
    clock_hz: Array | None = None  # (phase, setting) core clock the governor allows; None: not told
    source: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.kernels), self.lattice.count)
        told = {} if self.clock_hz is None else {"clock": self.clock_hz}
        for what, table in {"time": self.time_s, "power": self.power_w, **told, **self.counters}.items():
            if table.shape != shape:
                raise bad_value(f"{self.name}: {what}", f"a table of {shape}", table.shape)
        for what, table in {"time": self.time_s, "power": self.power_w}.items():
            if not (np.isfinite(table) & (table > 0)).all():
                raise bad_value(f"{self.name}: {what}", "finite numbers above zero", "others")
        if not self.lattice.inside(self.default):
            raise bad_value(f"{self.name}: default", "a setting of the card", self.default)

    @property
    def energy_j(self) -> Array:
        """``(phase, setting)``"""
        return self.time_s * self.power_w

    @cached_property
    def rows(self) -> Rows:
        """The same as lists, which one lookup at a time reads faster."""
        names = tuple(self.counters)
        stacked = np.stack([self.counters[n] for n in names], axis=-1).tolist() if names else None
        work = self.work.tolist() if self.work is not None else [1.0] * len(self.kernels)
        clock = None if self.clock_hz is None else self.clock_hz.tolist()
        return Rows(self.time_s.tolist(), self.power_w.tolist(), work, names, stacked, clock)

    def order(self, application: str) -> npt.NDArray[np.int64]:
        """Phases of an application in the order they run."""
        if application not in self.applications:
            raise unknown_name("application", application, self.applications)
        return self.applications[application]


@dataclass(frozen=True)
class Rows:
    """Tables as nested lists: ``[phase][setting]``."""

    time_s: list[list[float]]
    power_w: list[list[float]]
    work: list[float]
    names: tuple[str, ...]
    counters: list[list[list[float]]] | None  # [phase][setting][name]
    clock_hz: list[list[float]] | None


@dataclass(frozen=True)
class Noise:
    """Multiplicative measurement noise, one standard deviation."""

    time: float = 0.0
    power: float = 0.0


class TableRun:
    """One application played from tables; what was spent is kept apart from what was observed."""

    def __init__(self, tables: Tables, application: str, noise: Noise | None = None, seed: int = 0) -> None:
        self._tables = tables
        self._order: list[int] = tables.order(application).tolist()
        self._position = 0
        count = len(self._order)
        rng = np.random.default_rng(seed)
        noise = noise or Noise()
        self._time_factor = np.exp(noise.time * rng.standard_normal(count)).tolist()
        self._power_factor = np.exp(noise.power * rng.standard_normal(count)).tolist()
        self.settings: list[int] = []  # flat index of each iteration so far

    @property
    def lattice(self) -> Lattice:
        return self._tables.lattice

    @property
    def default(self) -> Settings:
        return self._tables.default

    def next_kernel(self) -> str | None:
        if self._position >= len(self._order):
            return None
        return self._tables.kernels[self._order[self._position]]

    def run(self, at: Settings) -> Observation:
        position, self._position = self._position, self._position + 1
        phase, index = self._order[position], self._tables.lattice.flat(at)
        self.settings.append(index)
        rows = self._tables.rows
        counters = None
        if rows.counters is not None:
            counters = dict(zip(rows.names, rows.counters[phase][index], strict=True))
        return Observation(
            kernel=self._tables.kernels[phase],
            settings=at,
            duration_s=rows.time_s[phase][index] * self._time_factor[position],
            power_w=rows.power_w[phase][index] * self._power_factor[position],
            work=rows.work[phase],
            counters=counters,
            core_hz=math.nan if rows.clock_hz is None else rows.clock_hz[phase][index],
        )
