"""Voltage inference: relative V(f) of each rail together with the capacitances, where no voltage is reported.

P = Σ_j c_j·V^q_j·x_j is linear in c for a given V and nearly so in V for a given c, so the two are
fitted in turn [after Guerreiro2018]: a Gauss-Newton step finds V (monotone in the clock, 1 at the
reference clock) with c free to follow, then c is solved exactly at that V. The core voltage may also
have a floor that the memory clock sets: V = max(V(f), floor(m)).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.gram import Grams
from wattcast.fit.solve import solve
from wattcast.fit.table import Codes
from wattcast.power.rail import RailVoltage

MOST_STEPS = 30
CONVERGED = 1e-6  # relative fall of the sum of squares
SHARES = (1.0, 0.4, 0.1)  # of a step, tried in turn until the sum of squares falls
FIRST_DROP = 0.15  # of the voltage at the lowest clock, to start from
FIRST_RISE = 0.10


@dataclass(frozen=True)
class VoltagePlan:
    """Which voltages are unknown. Parameters are rises between neighbouring clocks, all non-negative."""

    core_hz: Array  # distinct clocks, rising
    memory_hz: Array
    core_at: Codes  # (point,)
    memory_at: Codes
    core_reference: int
    memory_reference: int
    core: bool  # infer the core voltage
    floored: bool
    memory: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of rises of the core curve, of the floor, and of the memory curve."""
        core = self.core_hz.size - 1 if self.core else 0
        return (
            core,
            self.memory_hz.size - 1 if self.floored and core else 0,
            self.memory_hz.size - 1 if self.memory else 0,
        )

    def start(self) -> Array:
        """A plain straight line to begin with."""
        core, floor, memory = self.sizes
        theta = np.zeros(core + floor + memory)
        below = self.core_reference
        theta[:below] = FIRST_DROP / max(below, 1)
        theta[below:core] = FIRST_RISE / max(core - below, 1)
        theta[core : core + floor] = FIRST_DROP / 4 / max(floor, 1)
        return theta

    def at(self, theta: Array) -> tuple[Array, Array]:
        """Voltage of both rails at each point, ``(point, 2)``, and its derivative, ``(point, 2, parameter)``."""
        core, floor, memory = self.sizes
        slope = np.zeros((self.core_at.size, 2, theta.size))
        if core:
            slope[:, 0, :core] = _steps(self.core_hz.size, self.core_reference)[self.core_at]
        if floor:
            drops = _floors(floor)[self.memory_at]
            higher = drops @ theta[core : core + floor] > slope[:, 0, :core] @ theta[:core]
            held = (self.core_at < self.core_reference) & (self.memory_at > 0) & higher
            slope[held, 0, :core] = 0.0
            slope[held, 0, core : core + floor] = drops[held]
        if memory:
            slope[:, 1, core + floor :] = _steps(self.memory_hz.size, self.memory_reference)[self.memory_at]
        return 1.0 + slope @ theta, slope

    def curves(self, theta: Array) -> tuple[RailVoltage, RailVoltage]:
        """Voltage of the core and the memory rail as curves over their clocks."""
        core, floor, memory = self.sizes
        core_level = 1.0 + _steps(self.core_hz.size, self.core_reference) @ theta[:core] if core else None
        memory_level = (
            1.0 + _steps(self.memory_hz.size, self.memory_reference) @ theta[core + floor :] if memory else None
        )
        flat = RailVoltage.constant()
        of_memory = RailVoltage(self.memory_hz, memory_level) if memory_level is not None else flat
        if core_level is None:
            return flat, of_memory
        if not floor:
            return RailVoltage(self.core_hz, core_level), of_memory
        held = np.maximum(1.0 + _floors(floor) @ theta[core : core + floor], core_level[0])
        held[0] = core_level[0]
        return RailVoltage(self.core_hz, core_level, self.memory_hz, held), of_memory


@dataclass(frozen=True)
class Inferred:
    """Coefficients (of the scaled columns) and voltages that fit together."""

    coefficient: Array  # (term,)
    theta: Array
    voltage: Array  # (point, 2)
    squares: float
    steps: int
    converged: bool


def plan(grams: Grams, core_reference_hz: float, memory_reference_hz: float, floored: bool) -> VoltagePlan:
    """What can be inferred at all: a rail's voltage needs terms that feel it and at least two clocks."""
    core_hz, core_at = np.unique(grams.clock_hz, return_inverse=True)
    memory_hz, memory_at = np.unique(grams.memory_clock_hz, return_inverse=True)
    feels = [bool(((grams.terms.rail == rail) & (grams.terms.exponent > 0)).any()) for rail in (0, 1)]
    return VoltagePlan(
        core_hz,
        memory_hz,
        np.asarray(core_at, dtype=np.int64).reshape(-1),
        np.asarray(memory_at, dtype=np.int64).reshape(-1),
        int(np.abs(core_hz - core_reference_hz).argmin()),
        int(np.abs(memory_hz - memory_reference_hz).argmin()),
        core=feels[0] and core_hz.size > 1,
        floored=floored and memory_hz.size > 1,
        memory=feels[1] and memory_hz.size > 1,
    )


def infer(grams: Grams, gram: Array, how: VoltagePlan, signed: tuple[bool, ...], penalty: Array | None) -> Inferred:
    """Fit coefficients and voltages to the summed Gram of each point, ``(point, term + 1, term + 1)``."""
    theta = how.start()
    voltage, _ = how.at(theta)
    coefficient, squares = _coefficients(grams, gram, voltage, signed, penalty)
    if theta.size == 0:
        return Inferred(coefficient, theta, voltage, squares, 0, True)
    for step in range(1, MOST_STEPS + 1):
        aim = _step(grams, gram, how, theta, coefficient, signed, penalty)
        for share in SHARES:
            trial = theta + share * (aim - theta)
            voltage, _ = how.at(trial)
            if voltage.min() <= 0.05:
                continue
            tried, fallen = _coefficients(grams, gram, voltage, signed, penalty)
            if fallen < squares:
                break
        else:
            return Inferred(coefficient, theta, how.at(theta)[0], squares, step, True)
        gain = (squares - fallen) / max(squares, 1e-300)
        theta, coefficient, squares = trial, tried, fallen
        if gain < CONVERGED:
            return Inferred(coefficient, theta, voltage, squares, step, True)
    return Inferred(coefficient, theta, voltage, squares, MOST_STEPS, False)


def factors(grams: Grams, voltage: Array) -> tuple[Array, Array]:
    """V^q of each term at each point, ``(point, term)``, and its derivative with respect to V."""
    rail, exponent = grams.terms.rail, grams.terms.exponent
    feels = exponent > 0
    level = voltage[:, np.where(feels, rail, 0)]
    felt = np.where(feels, level**exponent, 1.0)
    slope = np.where(feels, exponent * level ** np.maximum(exponent - 1, 0), 0.0)
    return felt, slope


def jacobian(grams: Grams, how: VoltagePlan, theta: Array, coefficient: Array) -> Array:
    """Columns of the fit in terms of the raw columns, ``(point, term + 1, term + parameter + 1)``.

    The last column is the linearised target P + J_θ·θ.
    """
    voltage, slope = how.at(theta)
    felt, derivative = factors(grams, voltage)
    width = coefficient.size
    rail = np.where(grams.terms.exponent > 0, grams.terms.rail, 0)
    by_theta = (coefficient * derivative)[:, :, np.newaxis] * slope[:, rail, :]  # (point, term, parameter)
    columns = np.zeros((felt.shape[0], width + 1, width + theta.size + 1))
    index = np.arange(width)
    columns[:, index, index] = felt
    columns[:, :width, width:-1] = by_theta
    columns[:, :width, -1] = by_theta @ theta
    columns[:, width, -1] = 1.0
    return columns


def projected(gram: Array, columns: Array) -> Array:
    """Σ_p Mᵀ_p·G_p·M_p."""
    wide = (gram @ columns).reshape(-1, columns.shape[-1])
    total: Array = columns.reshape(-1, columns.shape[-1]).T @ wide
    return total


def _coefficients(
    grams: Grams, gram: Array, voltage: Array, signed: tuple[bool, ...], penalty: Array | None
) -> tuple[Array, float]:
    felt, _ = factors(grams, voltage)
    width = felt.shape[1]
    whole = np.concatenate([felt, np.ones((felt.shape[0], 1))], axis=1)
    total = (gram * whole[:, :, np.newaxis] * whole[:, np.newaxis, :]).sum(axis=0)
    coefficient = solve(total[:width, :width], total[:width, width], signed, penalty)
    error = np.append(-coefficient, 1.0)
    squares = float(error @ total @ error)
    return coefficient, squares + (float(coefficient @ penalty @ coefficient) if penalty is not None else 0.0)


def _step(
    grams: Grams,
    gram: Array,
    how: VoltagePlan,
    theta: Array,
    coefficient: Array,
    signed: tuple[bool, ...],
    penalty: Array | None,
) -> Array:
    total = projected(gram, jacobian(grams, how, theta, coefficient))
    wide = None
    if penalty is not None:
        wide = np.zeros((total.shape[0] - 1, total.shape[0] - 1))
        wide[: coefficient.size, : coefficient.size] = penalty
    flags = (*signed, *(False,) * theta.size)
    return solve(total[:-1, :-1], total[:-1, -1], flags, wide)[coefficient.size :]


@cache
def _floors(count: int) -> Array:
    """Matrix from rises of the floor to the floor at each memory clock, ``(memory clock, rise)``.

    The floor never falls as memory speeds up; at the slowest memory clock there is none, since the
    curve itself says where the voltage stops falling.
    """
    return np.concatenate([np.zeros((1, count)), -np.triu(np.ones((count, count)))])


@cache
def _steps(count: int, reference: int) -> Array:
    """Matrix from rises between neighbours to the level relative to the reference, ``(clock, rise)``."""
    clock, rise = np.arange(count)[:, np.newaxis], np.arange(count - 1)[np.newaxis, :]
    above = (rise >= reference) & (clock > rise)
    below = (rise < reference) & (clock <= rise)
    return above * 1.0 - below * 1.0
