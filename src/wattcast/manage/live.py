"""A real card as a plant: fixed periods instead of kernels, progress told by the program or by the card.

The same controller runs here as on simulated plants. One period is one observation: energy from the card's
counter, work from what the program reports (one byte appended to a file per unit of work) or, where the card
tells, from how busy its pipes were. Without either, performance is not visible and nothing is tuned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from wattcast.errors import MissingTool, Refused, bad_value
from wattcast.manage.knobs import Knob, Lattice, Role, Settings
from wattcast.manage.observation import Observation
from wattcast.manage.sm_share import Units

LEVELS = 16
LOWEST = 0.5  # of the highest core clock; below, no objective here is ever served
BUSY = 0.5  # share of time with a kernel running, from which the reported clock is that of the work
BLIND_PERIODS = 5  # without visible work, after which that is said
KERNEL = "program"


class Readable(Protocol):
    """What a card says of itself now."""

    @property
    def at_s(self) -> float: ...
    @property
    def energy_j(self) -> float: ...
    @property
    def power_w(self) -> float: ...
    @property
    def core_hz(self) -> float: ...
    @property
    def memory_hz(self) -> float: ...
    @property
    def busy(self) -> float: ...
    @property
    def memory_busy(self) -> float: ...
    @property
    def work_per_s(self) -> float: ...


class ControlledCard(Protocol):
    """A card that can be read and, if asked to, set."""

    name: str
    uuid: str

    def clocks_hz(self) -> tuple[tuple[float, ...], tuple[float, ...]]: ...
    def read(self) -> Any: ...
    def lock(self, core_hz: float, memory_hz: float | None = None) -> None: ...
    def reset(self, memory: bool = True) -> None: ...


def lattice_of(core_hz: tuple[float, ...], memory_hz: tuple[float, ...], units: tuple[float, ...] = ()) -> Lattice:
    """Knobs of a card: up to 16 core clocks of its upper half, memory clocks and SM counts where several are."""
    usable = [c for c in core_hz if c >= LOWEST * core_hz[-1]] if core_hz else []
    if not usable:
        raise MissingTool("the card names no core clock that could be locked.")
    step = max(1, math.ceil((len(usable) - 1) / (LEVELS - 1)))
    knobs = [Knob(Role.CORE_CLOCK, tuple(sorted(usable[::-1][::step])))]
    if len(memory_hz) > 1:
        knobs.append(Knob(Role.MEMORY_CLOCK, tuple(sorted(memory_hz))))
    if len(units) > 1:
        knobs.append(Knob(Role.COMPUTE_UNITS, units))
    return Lattice(tuple(knobs))


class Progress:
    """Units of work done so far: the size of a file the program appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self) -> float:
        try:
            return float(os.stat(self._path).st_size)
        except FileNotFoundError:
            return 0.0
        except OSError as error:
            raise bad_value(str(self._path), "a file the program appends to", error.strerror or "none") from None


class LivePlant:
    """A card and a running program, seen in periods. ``dry`` never sets anything."""

    def __init__(
        self,
        card: ControlledCard,
        lattice: Lattice,
        period_s: float,
        alive: Callable[[], bool],
        wait: Callable[[float], None],
        progress: Progress | None = None,
        dry: bool = True,
        log: Callable[[Settings, str], None] | None = None,
        units: Units | None = None,
    ) -> None:
        self._card, self._lattice, self._period_s = card, lattice, period_s
        self._alive, self._wait, self._progress, self._dry = alive, wait, progress, dry
        self._log = log or (lambda settings, why: None)
        self._units = units
        self._now: Settings | None = None
        self.controlled = not dry
        self.reported = False  # whether the program has told any progress
        self.last: Any = None  # the latest reading
        self._blind = 0  # periods in a row without visible work

    @property
    def lattice(self) -> Lattice:
        return self._lattice

    @property
    def default(self) -> Settings:
        return self._lattice.top

    def next_kernel(self) -> str | None:
        return KERNEL if self._alive() else None

    def run(self, at: Settings) -> Observation:
        """One period. Settings the card will not take end control, not the program."""
        if self.controlled and at != self._now:
            self.set(at)
        begin, done = self._read(), self._count()
        self._wait(self._period_s)
        end, more = self._read(), self._count()
        self.last = end
        return self._observed(at if self.controlled else self._nearest(end), begin, end, more - done)

    def set(self, at: Settings) -> None:
        """Lock the clocks of a setting, and ask for its SMs; clocks at their default are the driver's own choice."""
        values = {knob.role: v for knob, v in zip(self._lattice.knobs, self._lattice.values(at), strict=True)}
        count = values.pop(Role.COMPUTE_UNITS, None)
        try:
            if self._units is not None and count is not None:
                self._units.set(count)
            if all(level == top for level, top, knob in self._levels(at) if knob.role in values):
                self._card.reset()
            else:
                self._card.lock(values[Role.CORE_CLOCK], values.get(Role.MEMORY_CLOCK))
        except (Refused, MissingTool) as error:
            self._end(at, f"not set, control ends: {error}")
            return
        self._now = at
        self._log(at, "left to the driver" if at == self.default else "set")

    def _levels(self, at: Settings) -> list[tuple[int, int, Knob]]:
        return list(zip(at, self.default, self._lattice.knobs, strict=True))

    def _end(self, at: Settings, why: str) -> None:
        """Stop steering: the driver gets its clocks back, the program runs on."""
        self.controlled = False
        self._log(at, why)
        if self._units is not None:
            self._units.reset()
        with suppress(Refused, MissingTool):
            self._card.reset()

    def _read(self) -> Any:
        try:
            return self._card.read()
        except MissingTool as error:
            if self.controlled:
                self._end(self._now or self.default, f"control ends: {error}")
            return None

    def _count(self) -> float:
        return math.nan if self._progress is None else self._progress.count()

    def _observed(self, at: Settings, begin: Any, end: Any, done: float) -> Observation:
        if begin is None or end is None:
            return Observation(KERNEL, at, math.nan, math.nan, stale=True)
        seconds = end.at_s - begin.at_s
        joules = end.energy_j - begin.energy_j
        power_w = joules / seconds if math.isfinite(joules) and joules > 0 else end.power_w
        stale = math.isfinite(joules) and joules <= 0  # the counter stood still, or was reset
        self.reported = self.reported or done > 0
        work = done if self.reported else end.work_per_s * seconds
        self._blind = 0 if work > 0 else self._blind + 1  # NaN counts as none
        if self._blind == BLIND_PERIODS and self.controlled:
            self._log(
                at, "no work seen, so nothing is tuned; have the program append to WATTCAST_PROGRESS (--progress)"
            )
        return Observation(KERNEL, at, seconds, power_w, work, None, stale, self._held_hz(end))

    def _held_hz(self, reading: Any) -> float:
        """The clock a governor holds the card at; NaN when idle or unknown, as an idle card's clock says nothing."""
        lowest_hz = self._lattice.values(self._lattice.bottom)[0]
        held = reading.busy >= BUSY and reading.core_hz >= lowest_hz  # False for NaN
        return float(reading.core_hz) if held else math.nan

    def _nearest(self, reading: Any) -> Settings:
        """The setting closest to what the card runs at, for a plant that is only watched."""
        if reading is None or not math.isfinite(reading.core_hz):
            return self.default
        values = {
            Role.CORE_CLOCK: reading.core_hz,
            Role.MEMORY_CLOCK: reading.memory_hz,
            Role.COMPUTE_UNITS: math.inf,
        }
        return self._lattice.nearest(*(values[knob.role] for knob in self._lattice.knobs))
