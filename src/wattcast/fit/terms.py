"""Model kinds as terms: P = Σ_j c_j·V_rail(j)^q_j·x_j, linear in c, and in V only through a power.

Every kind of counter model is a choice of terms x_j with the rail whose voltage they feel and the
power q_j they feel it with: 0 (base, offsets, and everything in a rate model), 1 (leakage) or
2 (clock and events).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.table import RAILS, Codes, CounterTable

NO_RAIL = -1
INFERABLE = ("core", "memory")  # rails whose voltage follows a clock of the operating point
ACTIVE = "active_cycle"


class Model(StrEnum):
    """The kinds that are fitted side by side."""

    RATE = "rate"  # Stokke2016, Eq. 1
    LINEAR = "linear_with_clocks"  # Eq. 1 with both clocks as predictors
    ALPHA_C = "switched_capacitance"  # Eq. 3
    HYBRID = "hybrid_rail"  # Eq. 9 and 10


@dataclass(frozen=True)
class Terms:
    """Columns of a design, each with its rail and its power of the voltage."""

    names: tuple[str, ...]
    value: Array  # (row, term)
    exponent: Codes  # (term,)
    rail: Codes  # (term,), index into RAILS or NO_RAIL
    signed: tuple[bool, ...]  # whether a coefficient may be negative
    members: tuple[tuple[int, ...], ...]  # predictors of the table whose occurrences a term adds up

    @property
    def feels_voltage(self) -> bool:
        """Whether any term depends on a voltage."""
        return bool((self.exponent > 0).any())


@dataclass
class _Builder:
    """Terms, one by one."""

    table: CounterTable

    def __post_init__(self) -> None:
        self.rows: list[tuple[str, Array, int, int, bool, tuple[int, ...]]] = []

    def add(
        self,
        name: str,
        value: Array,
        power: int = 0,
        rail: int = NO_RAIL,
        signed: bool = False,
        members: tuple[int, ...] = (),
    ) -> None:
        value = np.broadcast_to(value, (self.table.rows,))
        measured_v = self.table.voltage_v.get(RAILS[rail]) if rail != NO_RAIL else None
        if measured_v is not None:
            value, power = value * measured_v**power, 0
        if rail >= len(INFERABLE):
            power = 0
        self.rows.append((name, value, power, rail, signed, members))

    def events(self, power: int, tied: bool) -> None:
        predictors = self.table.predictors
        keys = [(p.rail, p.family if tied and p.family else p.event) for p in predictors]
        for key in dict.fromkeys(keys):
            members = tuple(i for i, other in enumerate(keys) if other == key)
            value = self.table.occurrence[:, list(members)].sum(axis=1)
            name = predictors[members[0]].event if len(members) == 1 else f"{key[1]} events"
            self.add(name, value, power, RAILS.index(key[0]), members=members)

    def build(self) -> Terms:
        names, value, power, rail, signed, members = zip(*self.rows, strict=True)
        return Terms(names, np.stack(value, axis=1), np.array(power), np.array(rail), tuple(signed), tuple(members))


def terms(model: Model, table: CounterTable, offset_hz: Iterable[float] = (), tied: bool = False) -> Terms:
    """The terms of one kind of model on a table; terms the table cannot tell apart are left out.

    Clock and leakage terms need clocks that vary, the cost of being active needs an idle benchmark,
    an offset needs memory clocks that vary. :func:`left_out` says in words what is missing. ``tied``
    gives all events of a family one coefficient.
    """
    build = _Builder(table)
    build.add("base", np.ones(1))
    if model in (Model.RATE, Model.LINEAR):
        if model is Model.LINEAR:
            for name, clock_hz in _clocks(table):
                build.add(f"{name} clock", clock_hz)
        build.events(0, tied)
        return build.build()
    for rail, name in enumerate(RAILS):
        if leaks(table, name):
            build.add(f"{name} leakage", np.ones(1), 1, rail)
        if name not in INFERABLE:
            continue
        clock_hz = table.clock_hz if name == "core" else table.memory_clock_hz
        if np.ptp(clock_hz) > 0:
            build.add(f"{name} clock", clock_hz, 2, rail)
            for named_hz in offset_hz if name == "memory" else ():
                build.add(offset_name(named_hz), (clock_hz == named_hz) * 1.0, signed=True)
        if model is Model.ALPHA_C and any(p.rail == name for p in table.predictors):
            build.add(f"{name} dynamic", table.share(name) * clock_hz, 2, rail)
    if model is Model.HYBRID:
        if has_idle(table):
            build.add(ACTIVE, table.busy() * table.clock_hz, 2, RAILS.index("core"))
        build.events(2, tied)
    return build.build()


def offset_name(clock_hz: float) -> str:
    """What the offset at a memory clock is called."""
    return f"memory offset {clock_hz / 1e6:g} MHz"


def left_out(table: CounterTable) -> list[str]:
    """What the table cannot show, in words."""
    words = []
    for name, clock_hz in _all_clocks(table):
        if np.ptp(clock_hz) == 0:
            words.append(
                f"The {name} clock is the same in every row: leakage, clock power and voltage of the {name} rail "
                "cannot be told from base power, and no voltage is inferred."
            )
    if not has_idle(table):
        words.append(
            "No row shows an idle device: what being active costs by itself cannot be told from clock power."
        )
    return words


def leaks(table: CounterTable, rail: str) -> bool:
    """Whether leakage of a rail can be told from base power: its voltage varies, or will be inferred.

    Only the core's is inferred: memory voltage hardly moves, as the paper says of its own board.
    """
    if rail in table.voltage_v:
        return bool(np.ptp(table.voltage_v[rail]) > 0)
    return rail == "core" and bool(np.ptp(table.clock_hz) > 0)


def has_idle(table: CounterTable) -> bool:
    """Whether some rows, but not all, show a device without work."""
    busy = table.busy()
    return bool(busy.min() == 0.0 and busy.max() == 1.0)


def _all_clocks(table: CounterTable) -> list[tuple[str, Array]]:
    return [("core", table.clock_hz), ("memory", table.memory_clock_hz)]


def _clocks(table: CounterTable) -> list[tuple[str, Array]]:
    return [(name, clock_hz) for name, clock_hz in _all_clocks(table) if np.ptp(clock_hz) > 0]
