"""Define plants, the cards that a policy controls, and play a policy on a plant.

A plant runs one kernel (or one period) at given settings and reports what a controller may observe.
``PlantTables`` holds time, power and counters of every kernel at every setting, whether simulated,
predicted or measured; ``TablePlant`` plays one application from them. ``control/live_plant.py``
has the plant that is a real card.

A setting is a tuple of level indices, one per knob, 0 being the lowest level. The lattice of all
settings converts such tuples into SI values and into positions in flat tables. Sweeps over all
settings are therefore array expressions, while the controller handles plain tuples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import (
    Any,
    NamedTuple,
    Protocol,
)

import numpy as np
import numpy.typing as npt

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import (
    MissingTool,
    bad_value,
    check_names,
    units,
)
from wattcast.core.arrays import Array
from wattcast.core.regular_files import read_shipped_table


class CardLevelCoefficients(Coefficients):
    """Which levels of a card's knobs a controller may choose."""

    core_clocks: int  # levels of the core clock at most
    power_limits: int  # levels of the power limit
    lowest_share: float  # of the highest core clock or power limit that a level has at least


CARD_LEVELS = load_coefficients("card_levels", CardLevelCoefficients)


Settings = tuple[int, ...]  # level of each knob, 0 is the lowest
# SMs: green contexts on compute capability 9.0 and later come in multiples of it (CUDA driver API).
SM_GRAIN = 8
SM_SHARES = (0.5, 0.625, 0.75, 0.875)


class KnobRole(StrEnum):
    """Name what a knob changes. Compute throughput is compute units times core clock."""

    COMPUTE_UNITS = "compute_units"
    CORE_CLOCK = "core_clock"
    MEMORY_CLOCK = "memory_clock"
    POWER_LIMIT = "power_limit"  # of the board; the governor lowers the core clock to keep to it
    # Lowest share of a job's clock for cards that wait for others (slack_clocks.py).
    SLACK_CLOCK = "slack_clock"

    @property
    def is_compute(self) -> bool:
        """Tell compute knobs from the memory clock and from what slows nobody."""
        return self not in (KnobRole.MEMORY_CLOCK, KnobRole.SLACK_CLOCK)


# How a knob is written, and what is expected of it before anything was measured (run_memory.py,
# search_problem.py).
KNOB_FACTS = {
    KnobRole(row["role"]): row
    for row in read_shipped_table("wattcast.control", "data", "knobs.csv")
}


def read_knob_facts(name: str) -> dict[KnobRole, float]:
    """Return one column of numbers of ``data/knobs.csv``."""
    return {role: float(fact[name]) for role, fact in KNOB_FACTS.items()}


@dataclass(frozen=True)
class Knob:
    """Hold the levels of one knob in ascending order: Hz for clocks, a count for compute units, W
    for limits.
    """

    role: KnobRole
    levels: tuple[float, ...]

    def __post_init__(self) -> None:
        is_rising = all(low < high for low, high in pairwise(self.levels))
        if not self.levels or not is_rising or self.levels[0] <= 0:
            form = "positive levels, each above the one before"
            raise bad_value(f"knob {self.role}", form, self.levels)


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
    def top(self) -> Settings:
        """Return the setting with every knob at its highest level."""
        return tuple(count - 1 for count in self.shape)

    @cached_property
    def bottom(self) -> Settings:
        """Return the setting with every knob at its lowest level."""
        return (0,) * len(self.shape)

    @cached_property
    def log_levels(self) -> tuple[tuple[float, ...], ...]:
        """Return the logarithms of the levels, by knob."""
        return tuple(tuple(map(math.log, knob.levels)) for knob in self.knobs)

    def flat_index(self, settings: Settings) -> int:
        """Return the position of a setting in flat tables, where the last knob varies fastest."""
        return int(np.ravel_multi_index(settings, self.shape))

    def settings_at(self, index: int) -> Settings:
        """Return the setting at a position of flat tables."""
        return tuple(int(level) for level in np.unravel_index(index, self.shape))

    @cached_property
    def _lines(self) -> dict[Settings, tuple[LatticeLine, ...]]:
        return {}

    def lines_through(self, settings: Settings) -> tuple[LatticeLine, ...]:
        """Return the lines through a setting, one per knob. They are remembered, as every decision
        asks for them.
        """
        if settings not in self._lines:
            lines = []
            for knob, count in enumerate(self.shape):
                ahead = settings[:knob]
                behind = settings[knob + 1 :]
                along = tuple([(*ahead, level, *behind) for level in range(count)])
                lines.append(LatticeLine(ahead + behind, along))
            self._lines[settings] = tuple(lines)
        return self._lines[settings]

    def contains(self, settings: Settings) -> bool:
        """Tell whether a setting exists."""
        if len(settings) != len(self.shape):
            return False
        levels = zip(settings, self.shape, strict=True)
        return all(0 <= level < count for level, count in levels)

    def level_values(self, settings: Settings) -> tuple[float, ...]:
        """Return the SI values of a setting."""
        return tuple(knob.levels[level] for knob, level in zip(self.knobs, settings, strict=True))

    def nearest_settings(self, *values: float) -> Settings:
        """Return the setting whose values are closest, knob by knob."""
        settings = []
        for knob, value in zip(self.knobs, values, strict=True):
            distance = np.abs(np.asarray(knob.levels) - value)
            settings.append(int(np.argmin(distance)))
        return tuple(settings)

    def find_knob(self, role: KnobRole) -> int | None:
        """Return the position of the knob with this role, or None where the card lacks it."""
        for place, knob in enumerate(self.knobs):
            if knob.role is role:
                return place
        return None

    def knob_values(self, role: KnobRole) -> Array:
        """Return the SI value of a knob at every setting, ``(setting,)``; 1 where the card lacks
        it.
        """
        which = self.find_knob(role)
        if which is None:
            return np.ones(self.count)
        levels = np.asarray(self.knobs[which].levels, dtype=np.float64)
        level_of_setting = np.indices(self.shape)[which].ravel()
        return np.asarray(levels[level_of_setting], dtype=np.float64)

    def describe(self, settings: Settings) -> str:
        """Write a setting for people: ``32 units, 1 GHz core, 1.375 GHz memory``."""
        words = []
        for knob, value in zip(self.knobs, self.level_values(settings), strict=True):
            facts = KNOB_FACTS[knob.role]
            words.append(f"{units.show(value, facts['unit'])} {facts['word']}")
        return ", ".join(words)


def list_sm_counts(total: int) -> tuple[float, ...]:
    """List how many SMs a green context can have: about eighths of the card down to a half, and all
    of it.
    """
    counts = {total}
    for share in SM_SHARES:
        count = SM_GRAIN * round(share * total / SM_GRAIN)
        if count < total:
            counts.add(count)
    return tuple(map(float, sorted(counts)))


def build_card_lattice(
    core_hz: tuple[float, ...],
    memory_hz: tuple[float, ...],
    units: tuple[float, ...] = (),
    limits_w: tuple[float, float, float] | None = None,
    slack_shares: tuple[float, ...] = (),
) -> Lattice:
    """Return the knobs of a card: up to 16 core clocks of its upper half, and what else has several
    levels.

    ``limits_w`` is the power limit in force and the range it can be set in; levels run from half of
    it to all of it."""
    lowest_share = CARD_LEVELS.lowest_share
    usable_hz = [clock_hz for clock_hz in core_hz if clock_hz >= lowest_share * core_hz[-1]]
    if not usable_hz:
        raise MissingTool("the card names no core clock that could be locked.")
    stride = max(1, math.ceil((len(usable_hz) - 1) / (CARD_LEVELS.core_clocks - 1)))
    from_highest_hz = usable_hz[::-1][::stride]
    knobs = [Knob(KnobRole.CORE_CLOCK, tuple(sorted(from_highest_hz)))]
    if len(memory_hz) > 1:
        knobs.append(Knob(KnobRole.MEMORY_CLOCK, tuple(sorted(memory_hz))))
    if limits_w is not None:
        now_w, lowest_w, _ = limits_w
        if lowest_w < now_w:
            start_w = max(lowest_w, lowest_share * now_w)
            even_w = np.linspace(start_w, now_w, CARD_LEVELS.power_limits)
            knobs.append(Knob(KnobRole.POWER_LIMIT, tuple(np.round(even_w, 3).tolist())))
    if len(units) > 1:
        knobs.append(Knob(KnobRole.COMPUTE_UNITS, units))
    if len(slack_shares) > 1:
        knobs.append(Knob(KnobRole.SLACK_CLOCK, slack_shares))
    return Lattice(tuple(knobs))


def move_knob(
    settings: Settings,
    knob: int,
    level: int,
) -> Settings:
    """Return the same settings with one knob at another level."""
    return (*settings[:knob], level, *settings[knob + 1 :])


@dataclass(frozen=True, slots=True)
class Observation:
    """Report one kernel run, or one period of a card, at known settings.

    ``work`` says how much was done, in any unit that stays the same for a kernel: 1 where every run
    is alike, instructions where a counter counts them, iterations where the program reports them.
    ``stale`` marks values that the sensor had given before. ``core_hz`` is the core clock the card
    reports for the run, NaN where it does not."""

    kernel: str
    settings: Settings
    duration_s: float
    power_w: float  # mean; NaN where there is no sensor
    work: float = 1.0
    counters: Mapping[str, float] | None = None
    stale: bool = False
    core_hz: float = math.nan

    @property
    def usable(self) -> bool:
        """Tell whether time, power and work are new, finite and above zero. A NaN makes an
        observation unusable.
        """
        most = math.inf
        return (
            not self.stale
            and 0.0 < self.duration_s < most
            and 0.0 < self.power_w < most
            and 0.0 < self.work < most
        )

    @property
    def usable_counters(self) -> Mapping[str, float] | None:
        """Return the counters, or None when there are none or one of them is not finite."""
        counters = self.counters
        if counters is None or not all(map(math.isfinite, counters.values())):
            return None
        return counters


class Plant(Protocol):
    """Run kernels at settings that a policy chooses."""

    def next_kernel(self) -> str | None:
        """Return the kernel about to run, or None when the application has ended."""
        ...

    def run(self, settings: Settings) -> Observation:
        """Run that kernel once, or one period, at these settings."""
        ...


class Policy(Protocol):
    """Choose settings as a pure state machine over observations."""

    def start(self) -> Any: ...

    def settings(
        self,
        state: Any,
        kernel: str,
    ) -> Settings: ...

    def step(
        self,
        state: Any,
        observation: Observation,
    ) -> tuple[Any, Settings]: ...


@dataclass(frozen=True)
class PlantTables:
    """Hold time, power and counters of every phase of every kernel at every setting.

    A *phase* is one behaviour of one kernel and a row of the tables, ``(phase, setting)``. An
    application is the order in which phases run."""

    name: str
    lattice: Lattice
    default: Settings
    kernels: tuple[str, ...]  # of each phase
    time_s: Array  # (phase, setting)
    power_w: Array  # (phase, setting)
    applications: Mapping[str, npt.NDArray[np.int64]]  # name -> phases in the order they run
    # (phase,) instructions, relative; None: every run of a kernel is alike.
    work: Array | None = None
    counters: Mapping[str, Array] = field(default_factory=dict)  # name -> (phase, setting)
    memory_w: Array | None = None  # (phase, setting) part of power_w drawn by memory
    board_w: float | None = None  # constant part of power_w
    idle_w: float | None = None
    limit_w: float | None = None  # what the board draws at most, by its maker
    # (phase, setting) core clock the governor allows; None: not known.
    clock_hz: Array | None = None
    source: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.kernels), self.lattice.count)
        tables = {
            "time": self.time_s,
            "power": self.power_w,
            **self.counters,
        }
        if self.clock_hz is not None:
            tables["clock"] = self.clock_hz
        for what, table in tables.items():
            if table.shape != shape:
                raise bad_value(f"{self.name}: {what}", f"a table of {shape}", table.shape)
        for what in ("time", "power"):
            table = tables[what]
            if not (np.isfinite(table) & (table > 0)).all():
                raise bad_value(f"{self.name}: {what}", "finite numbers above zero", "others")
        if not self.lattice.contains(self.default):
            raise bad_value(f"{self.name}: default", "a setting of the card", self.default)

    @property
    def energy_j(self) -> Array:
        """Return energy, ``(phase, setting)``."""
        return self.time_s * self.power_w

    def order(self, application: str) -> npt.NDArray[np.int64]:
        """Return the phases of an application in the order they run."""
        check_names("application", application, self.applications, "")
        return self.applications[application]


@dataclass(frozen=True)
class MeasurementNoise:
    """Give the standard deviation of multiplicative measurement noise."""

    time: float = 0.0
    power: float = 0.0


class TablePlant:
    """Play one application from tables. Observations are noisy; ``settings`` records what was
    really run.
    """

    def __init__(
        self,
        tables: PlantTables,
        application: str,
        noise: MeasurementNoise | None = None,
        seed: int = 0,
    ) -> None:
        self._tables = tables
        self._order: list[int] = tables.order(application).tolist()
        noise = noise or MeasurementNoise()
        deviations = np.random.default_rng(seed).standard_normal((2, len(self._order)))
        self._time_factor = np.exp(noise.time * deviations[0])
        self._power_factor = np.exp(noise.power * deviations[1])
        self.settings: list[int] = []  # flat index of each iteration so far

    def next_kernel(self) -> str | None:
        position = len(self.settings)
        if position >= len(self._order):
            return None
        return self._tables.kernels[self._order[position]]

    def run(self, settings: Settings) -> Observation:
        tables = self._tables
        position = len(self.settings)
        phase = self._order[position]
        index = tables.lattice.flat_index(settings)
        self.settings.append(index)
        counters = {name: float(table[phase, index]) for name, table in tables.counters.items()}
        return Observation(
            kernel=tables.kernels[phase],
            settings=settings,
            duration_s=float(tables.time_s[phase, index] * self._time_factor[position]),
            power_w=float(tables.power_w[phase, index] * self._power_factor[position]),
            work=1.0 if tables.work is None else float(tables.work[phase]),
            counters=counters or None,
            core_hz=math.nan if tables.clock_hz is None else float(tables.clock_hz[phase, index]),
        )


@dataclass(frozen=True)
class PlayedRun:
    """Hold what a policy chose for an application and what that truly cost, as arrays over
    iterations.
    """

    application: str
    chosen: npt.NDArray[np.int64]  # flat index of the settings of each run
    phase: npt.NDArray[np.int64]
    time_s: Array
    energy_j: Array

    @property
    def total_s(self) -> float:
        return float(self.time_s.sum())

    @property
    def total_j(self) -> float:
        return float(self.energy_j.sum())


def play_plant(plant: Plant, policy: Policy) -> Any:
    """Run the plant's application to its end under a policy and return the policy's last state."""
    state = policy.start()
    while (kernel := plant.next_kernel()) is not None:
        observation = plant.run(policy.settings(state, kernel))
        state, _ = policy.step(state, observation)
    return state


def play_application(
    tables: PlantTables,
    application: str,
    policy: Policy,
    noise: MeasurementNoise | None = None,
    seed: int = 0,
) -> tuple[PlayedRun, Any]:
    """Play one application of the tables under a policy; return its true cost and the policy's last
    state.
    """
    plant = TablePlant(tables, application, noise, seed)
    state = play_plant(plant, policy)
    return run_at_settings(tables, application, np.asarray(plant.settings, dtype=np.int64)), state


def run_at_settings(
    tables: PlantTables,
    application: str,
    chosen: npt.NDArray[np.int64],
) -> PlayedRun:
    """Look up what an application costs at a given sequence of settings (flat indices)."""
    phase = tables.order(application)[: len(chosen)]
    time_s = tables.time_s[phase, chosen]
    return PlayedRun(
        application,
        chosen,
        phase,
        time_s,
        time_s * tables.power_w[phase, chosen],
    )
