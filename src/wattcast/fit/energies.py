"""Energies per event, relative voltage and toggling, from sustained and duty-cycled rows.

Measured latency and clock go in, so that errors of the latency model do not leak into energies:

    P - P_idle(f) = V²(f)·Σ_m E_m·n_m·τ/t + Σ_d E_d·n_d·τ/t

is bilinear in (V², E). Alternate [Guerreiro2018]: non-negative energies by least squares on the
relative error of P at given V, then V² at a few clocks, never falling, at given energies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.power.module import OWN_RAIL, STEADY, ModulePower
from wattcast.power.static import IdlePower, VoltageCurve

KNOTS_HZ = np.array([1.35e9, 1.5e9, 1.65e9, 1.8e9, 1.98e9])
_ROUNDS = 8


@dataclass(frozen=True)
class PowerRows:
    """What the power fit sees of each row, ``(row,)`` or ``(row, event)``."""

    rate: Array  # (row, event) events per second
    events: tuple[str, ...]
    modules: tuple[str, ...]  # of each event
    clock_hz: Array
    power_w: Array
    data: Sequence[str]

    def where(self, mask: npt.NDArray[np.bool_]) -> PowerRows:
        """The rows of a mask."""
        data = [d for d, keep in zip(self.data, mask, strict=True) if keep]
        return PowerRows(self.rate[mask], self.events, self.modules, self.clock_hz[mask], self.power_w[mask], data)


def fit_power(
    rows: PowerRows, idle: IdlePower, temperature_c: float, weight: Array | None = None
) -> tuple[ModulePower, dict[str, float]]:
    """The power model on random data, and the dynamic energy of other data relative to it."""
    idle_w = idle.at(rows.clock_hz, temperature_c)
    random = np.array([d == "random" for d in rows.data])
    volts = np.ones(len(KNOTS_HZ))
    toggling = {"random": 1.0}
    own = np.array([m in OWN_RAIL for m in rows.modules])
    steady = np.array([m in STEADY for m in rows.modules])
    energy = np.zeros(len(rows.events))
    for _ in range(_ROUNDS):
        squared = np.interp(rows.clock_hz, KNOTS_HZ, volts) ** 2
        factor = np.array([toggling.get(d, 1.0) for d in rows.data])
        energy = _energies(rows, idle_w, squared, factor, own, steady, weight)
        core = (rows.rate * energy * np.where(steady, 1.0, factor[:, None]))[:, ~own].sum(axis=1)
        apart = (rows.rate * energy * factor[:, None])[:, own].sum(axis=1)
        volts = _voltage(rows, idle_w, core, apart)
        squared = np.interp(rows.clock_hz, KNOTS_HZ, volts) ** 2
        moving = rows.rate * energy * np.where(own, 1.0, squared[:, None])
        toggling = _toggling(rows, idle_w, moving, steady)
    assert random.any(), "rows on random data"
    energies = {name: float(e) for name, e in zip(rows.events, energy, strict=True)}
    return ModulePower(energies, idle, VoltageCurve(KNOTS_HZ, volts)), toggling


def _energies(
    rows: PowerRows,
    idle_w: Array,
    squared: Array,
    factor: Array,
    own: npt.NDArray[np.bool_],
    steady: npt.NDArray[np.bool_],
    weight: Array | None,
) -> Array:
    from scipy.optimize import nnls

    scaled = rows.rate * np.where(own, 1.0, squared[:, None]) * np.where(steady, 1.0, factor[:, None])
    over = 1.0 / rows.power_w if weight is None else weight / rows.power_w
    matrix, target = scaled * over[:, None], (rows.power_w - idle_w) * over
    size = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    # a whisper of ridge: events that always come together share what they cost
    ridge = 1e-3 * np.sqrt(len(target)) * np.eye(matrix.shape[1])
    found, _ = nnls(np.vstack([matrix / size, ridge]), np.concatenate([target, np.zeros(matrix.shape[1])]))
    return np.asarray(found / size)


def _voltage(rows: PowerRows, idle_w: Array, core: Array, apart: Array) -> Array:
    """V at the knots from rows below the top clock, never falling, one at the top."""
    from scipy.optimize import lsq_linear

    hats = np.stack([np.interp(rows.clock_hz, KNOTS_HZ, np.eye(len(KNOTS_HZ))[i]) for i in range(len(KNOTS_HZ))], -1)
    steps = np.tril(np.ones((len(KNOTS_HZ), len(KNOTS_HZ))))  # squared = steps @ rises
    matrix = (hats @ steps) * (core / rows.power_w)[:, None]
    target = (rows.power_w - idle_w - apart) / rows.power_w
    top = 1e3 * steps[-1]
    limits = np.r_[0.2, np.zeros(4)], np.inf  # few unknowns: an exact method, which no degenerate set of rows upsets
    done = lsq_linear(np.vstack([matrix, top]), np.append(target, 1e3), bounds=limits, method="bvls")
    return np.asarray(np.minimum(np.sqrt(steps @ done.x), 1.0))


def _toggling(rows: PowerRows, idle_w: Array, moving: Array, steady: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Dynamic energy of each kind of data over random data's, least squares on relative error."""
    found: dict[str, float] = {"random": 1.0}
    kinds: Mapping[str, list[int]] = {d: [] for d in rows.data}
    for i, d in enumerate(rows.data):
        kinds[d].append(i)
    for name, at in kinds.items():
        if name == "random":
            continue
        part = moving[at][:, ~steady].sum(axis=1) / rows.power_w[at]
        rest = (rows.power_w[at] - idle_w[at] - moving[at][:, steady].sum(axis=1)) / rows.power_w[at]
        found[name] = float(np.clip((part @ rest) / max(part @ part, 1e-30), 0.05, 1.2))
    return found
