"""Counter models of a card that measures its memory by itself: two rails, each fitted to its own power.

P = P_base + C_clk·V²·f + V²·Σ C_i·ρ_i (all but memory) + P_mem + Σ E_d·ρ_d (memory)   [Stokke2016, Eq. 8 to 10,
leakage within the base, V relative]. Three steps, all non-negative and on relative errors:

1. memory power against DRAM traffic, outliers weighted down (the sensor is a one-second average);
2. power of the idle device over the clock: a base and a clock tree;
3. what remains of the *total* (which is the better sensor) against counted events.

Step 3 leans upwards. Operands that repeat switch less than random ones, and no counter sees it: a microbenchmark
can only be cheaper than real work of the same counts, not dearer. So a row that the model misses from below weighs
τ and one that it misses from above 1 - τ (expectiles [Newey1987]; τ = 0.5 is least squares). τ is the one that
predicts a group of benchmarks best (mixes of several units) when that group is not trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.fit.build import measured_curve
from wattcast.fit.choose import HUBER
from wattcast.fit.table import CounterTable
from wattcast.power.rail import RailVoltage

LEANINGS = (0.5, 0.6, 0.7, 0.8, 0.9)
STEPS = 25  # of reweighting
SAME_VOLTAGE = 1e-3  # a point of V(f) this close to the line between its neighbours is not kept
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Design:
    """Columns of both rails, by row; what a fit multiplies with costs."""

    static: Array  # (row, 2): 1 and V²·f
    core: Array  # (row, event) occurrence times V²
    memory: Array  # (row, 1 + event): 1 and occurrence
    core_events: tuple[str, ...]
    memory_events: tuple[str, ...]
    voltage: RailVoltage
    power_w: Array
    memory_w: Array
    idle: Mask


@dataclass(frozen=True)
class Costs:
    """Coefficients of the three steps."""

    static: Array
    core: Array
    memory: Array

    def memory_power_w(self, design: Design) -> Array:
        """Of the memory rail, ``(row,)``."""
        return np.asarray(design.memory @ self.memory)

    def total_w(self, design: Design) -> Array:
        """Of the card, ``(row,)``."""
        return np.asarray(design.static @ self.static + design.core @ self.core + self.memory_power_w(design))


def masks(table: CounterTable) -> tuple[Mask, Mask]:
    """Rows to train on and rows to test on; those left out with a reason are in neither."""
    group = np.array(table.group_names)[table.group][table.benchmark]
    name = np.array(table.benchmark_names)[table.benchmark]
    unknown = [test for test in table.test if test not in table.group_names]
    if unknown:
        raise bad_value(f"{table.name}: test", f"groups of the table ({', '.join(table.group_names)})", unknown[0])
    test = np.isin(group, table.test)
    return ~test & ~np.isin(name, list(table.left_out)), test


def design_of(table: CounterTable) -> Design:
    """Columns of both rails from a table with measured memory power and known relative voltage."""
    if "memory" not in table.rail_w:
        raise bad_value(table.name, "power of the memory rail (rails: memory)", "none")
    on = {rail: [i for i, p in enumerate(table.predictors) if p.rail == rail] for rail in ("core", "memory")}
    if not (on["core"] and on["memory"]):
        raise bad_value(table.name, "events on the core rail and on the memory rail", "none on one of them")
    voltage = _thinned(measured_curve(table.clock_hz, table.voltage_v.get("core", np.ones(table.rows))))
    square = voltage.at(table.clock_hz) ** 2
    ones = np.ones((table.rows, 1))
    return Design(
        static=np.stack([np.ones(table.rows), square * table.clock_hz], axis=1),
        core=table.occurrence[:, on["core"]] * square[:, np.newaxis],
        memory=np.concatenate([ones, table.occurrence[:, on["memory"]]], axis=1),
        core_events=tuple(table.predictors[i].event for i in on["core"]),
        memory_events=tuple(table.predictors[i].event for i in on["memory"]),
        voltage=voltage,
        power_w=table.power_w,
        memory_w=table.rail_w["memory"],
        idle=table.busy() == 0.0,
    )


def leaning_errors(table: CounterTable, design: Design, train: Mask) -> dict[float, float]:
    """Error of each leaning on the group it is chosen by, not trained on; rows at the default clocks only.

    Rows that met the power cap are not used: their clock swings, and its mean says little about V² and rates.
    """
    group = np.array(table.group_names)[table.group][table.benchmark]
    held = (group == table.choose_on) & train & table.at_default()
    if not held.any():
        raise bad_value(
            f"{table.name}: choose_on", "a group with rows at the default clocks", table.choose_on or "none"
        )
    rest = train & (group != table.choose_on)
    out = {}
    for leaning in LEANINGS:
        found_w = solve_rails(design, rest, leaning).total_w(design)
        out[leaning] = float(100.0 * np.abs(found_w[held] / table.power_w[held] - 1.0).mean())
    return out


def solve_rails(design: Design, train: Mask, leaning: float) -> Costs:
    """Costs of the three steps from the rows of ``train``."""
    still = train & design.idle
    if not still.any() or not (train & ~design.idle).any():
        raise bad_value("fit", "rows of an idle and of a busy device", "one kind only")
    memory = _robust(design.memory[train], design.memory_w[train])
    rest_w = design.power_w - design.memory @ memory
    static = _nnls(design.static[still], rest_w[still], 1.0 / design.power_w[still])
    busy = train & ~design.idle
    core = _leaning(design.core[busy], (rest_w - design.static @ static)[busy], 1.0 / design.power_w[busy], leaning)
    return Costs(static, core, memory)


def _nnls(columns: Array, target: Array, weight: Array) -> Array:
    from scipy.optimize import nnls

    scale = np.abs(columns).max(axis=0)
    scale[scale == 0.0] = 1.0
    found, _ = nnls(columns / scale * weight[:, np.newaxis], target * weight, maxiter=100 * scale.size)
    return np.asarray(found / scale)


def _robust(columns: Array, target: Array) -> Array:
    """Non-negative, relative errors, outliers weighted down as Huber does."""
    weight = np.ones(target.size)
    for _ in range(STEPS):
        found = _nnls(columns, target, np.sqrt(weight) / target)
        error = columns @ found / target - 1.0
        spread = 1.4826 * float(np.median(np.abs(error - np.median(error)))) + 1e-12
        weight = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(error), 1e-12))
    return found


def _leaning(columns: Array, target: Array, weight: Array, leaning: float) -> Array:
    """Non-negative least asymmetrically weighted squares."""
    side = np.ones(target.size)
    for _ in range(STEPS):
        found = _nnls(columns, target, weight * np.sqrt(side))
        side, before = np.where(target > columns @ found, leaning, 1.0 - leaning), side
        if (side == before).all():
            break
    return found


def _thinned(curve: RailVoltage) -> RailVoltage:
    """The same curve with few points: those off the line between the ones kept."""
    kept = [0]
    last = curve.clock_hz.size - 1
    while kept[-1] < last:
        start, end = kept[-1], last
        while end > start + 1:
            inner = slice(start + 1, end)
            line = np.interp(curve.clock_hz[inner], curve.clock_hz[[start, end]], curve.level[[start, end]])
            if np.abs(line - curve.level[inner]).max() <= SAME_VOLTAGE:
                break
            end -= 1
        kept.append(end)
    return RailVoltage(curve.clock_hz[kept], curve.level[kept])
