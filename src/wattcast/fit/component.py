"""Fitting the component model to measured power: scaling factors, and energies such as DRAM's.

Both are bounded least squares on relative error,

    min_x  Σ_k ( (a_k·x − p_k) / p_k )² + w·Σ_j (x_j − x0_j)² / s_j²   with  l ≤ x ≤ u,  x_i ≤ r·x_j,

with p_k the measured watts of kernel k, a_k its components' watts (x: factors, x0 = 1) or its event rates (x:
joules per event). The orderings say what physics says: a multiplication costs no less than an addition. Without
orderings this is scipy's ``lsq_linear``; with them a quadratic program for Clarabel. GPUWattch's manual
(section 2.3) drops kernels shorter than 0.5 ms, whose power is still rising.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.errors import MissingTool, bad_value, unknown_name

SHORTEST_S = 0.5e-3  # manual, section 2.3
DEFAULT_BOUNDS = (0.5, 2.0)  # a factor of two either way
PRIOR_WEIGHT = 1e-3  # a factor wrong by 1 weighs as much as one kernel wrong by 3 %
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Order:
    """``smaller`` ≤ ``ratio`` · ``larger``; the ratio carries over from energies to factors."""

    smaller: str
    larger: str
    ratio: float = 1.0

    @classmethod
    def read(cls, text: str) -> Order:
        """``"SP_ACC<=FPU_ACC"`` or ``"SP_ACC<=1.5*FPU_ACC"``."""
        match = re.fullmatch(r"\s*(\w+)\s*<=\s*(?:([\d.eE+-]+)\s*\*\s*)?(\w+)\s*", text)
        if match is None:
            raise bad_value("ordering", "'A<=B' or 'A<=1.5*B'", text)
        return cls(match[1], match[3], float(match[2] or 1.0))


@dataclass(frozen=True)
class Constraints:
    """Bounds declared before the fit, and orderings."""

    bounds: tuple[float, float] = DEFAULT_BOUNDS
    special: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # bounds of single names
    orders: tuple[Order, ...] = ()
    prior_weight: float = PRIOR_WEIGHT

    def limits(self, names: Sequence[str]) -> tuple[Array, Array]:
        """Lower and upper bound of each name."""
        for name in self.special:
            if name not in names:
                raise unknown_name("component to bound", name, names)
        pairs = np.array([self.special.get(name, self.bounds) for name in names], dtype=np.float64)
        if not (pairs[:, 0] <= pairs[:, 1]).all() or not (pairs[:, 0] >= 0).all():
            raise bad_value("bounds", "a lower bound of zero or more and an upper one above it", pairs.tolist())
        return pairs[:, 0], pairs[:, 1]

    def rows(self, names: Sequence[str]) -> Array:
        """Orderings as rows G of G·x ≤ 0."""
        rows = np.zeros((len(self.orders), len(names)))
        for row, order in zip(rows, self.orders, strict=True):
            for name in (order.smaller, order.larger):
                if name not in names:
                    raise unknown_name("component to order", name, names)
            row[names.index(order.smaller)] = 1.0
            row[names.index(order.larger)] = -order.ratio
        return rows


SCALING = Constraints()
ENERGIES = Constraints(bounds=(0.0, np.inf), prior_weight=1e-9)  # only to keep undriven energies at zero


@dataclass(frozen=True)
class Score:
    """Mean absolute percentage errors of a fit, the honest ones beside the flattering one."""

    start: float  # before fitting
    in_sample: float
    leave_one_out: float
    leave_application_out: float
    constant: float  # the mean power of the other kernels, for every kernel


@dataclass(frozen=True)
class Fit:
    """Fitted values with their score."""

    names: tuple[str, ...]
    value: Array
    score: Score
    kernels: int
    dropped: tuple[str, ...]  # kernels too short
    at_bound: tuple[str, ...]
    determined: tuple[str, ...]  # names the kernels drive at all

    def to_plain(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return {
            "values": dict(zip(self.names, self.value.tolist(), strict=True)),
            "mape": vars(self.score).copy(),
            "kernels": self.kernels,
            "dropped": list(self.dropped),
            "at_bound": list(self.at_bound),
            "not_driven": [name for name in self.names if name not in self.determined],
        }


@dataclass(frozen=True)
class Runs:
    """Kernels with what drives their power and what was measured."""

    kernels: tuple[str, ...]
    applications: tuple[str, ...]
    names: tuple[str, ...]
    drive: Array  # (kernel, name): watts of components, or events per second
    measured_w: Array
    duration_s: Array | None = None  # None: not known, nothing is dropped
    offset_w: Array | float = 0.0  # watts that are not fitted

    def __post_init__(self) -> None:
        if self.drive.shape != (len(self.kernels), len(self.names)) or len(self.kernels) < 2:
            raise bad_value("runs", "at least two kernels, each with every column", self.drive.shape)
        if not ((self.measured_w > 0).all() and np.isfinite(self.drive).all() and (self.drive >= 0).all()):
            raise bad_value("runs", "measured watts above zero and drives of zero or more", "others")

    def long_enough(self, shortest_s: float) -> Mask:
        """Kernels of at least ``shortest_s``."""
        if self.duration_s is None:
            return np.ones(len(self.kernels), dtype=np.bool_)
        return np.asarray(self.duration_s >= shortest_s)


def fit_scaling(runs: Runs, constraints: Constraints = SCALING, shortest_s: float = SHORTEST_S) -> Fit:
    """Factors of components' watts: 1 is the model as it stands."""
    return _fit(runs, constraints, shortest_s, np.ones(len(runs.names)))


def fit_energies(runs: Runs, constraints: Constraints = ENERGIES, shortest_s: float = SHORTEST_S) -> Fit:
    """Joules per event from rates: DRAM's precharge, read and write, as in the manual's section 2.2.8."""
    return _fit(runs, constraints, shortest_s, np.zeros(len(runs.names)))


def mape(predicted: Array, measured: Array) -> float:
    """Mean absolute percentage error, in percent."""
    return float(np.mean(np.abs(predicted / measured - 1.0)) * 100.0)


def _fit(runs: Runs, constraints: Constraints, shortest_s: float, start: Array) -> Fit:
    kept = runs.long_enough(shortest_s)
    if kept.sum() < 2:
        raise bad_value("runs", f"at least two kernels of {shortest_s * 1e3:g} ms or more", int(kept.sum()))
    drive, measured = runs.drive[kept], runs.measured_w[kept]
    offset = np.broadcast_to(np.asarray(runs.offset_w, dtype=np.float64), kept.shape)[kept]
    problem = _Problem(drive, measured, offset, start, constraints, runs.names)
    value = problem.solve(np.ones(len(measured), dtype=np.bool_))
    applications = [a for a, k in zip(runs.applications, kept, strict=True) if k]
    score = Score(
        mape(drive @ start + offset, measured) if (drive @ start + offset).any() else 100.0,
        mape(drive @ value + offset, measured),
        mape(problem.held_out([str(i) for i in range(len(measured))]), measured),
        mape(problem.held_out(applications), measured),
        mape((measured.sum() - measured) / (len(measured) - 1), measured),
    )
    lower, upper = constraints.limits(runs.names)
    close = np.isclose(value, lower, rtol=1e-6) | np.isclose(value, upper, rtol=1e-6)
    return Fit(
        runs.names,
        value,
        score,
        int(kept.sum()),
        tuple(name for name, k in zip(runs.kernels, kept, strict=True) if not k),
        tuple(name for name, c, lo, hi in zip(runs.names, close, lower, upper, strict=True) if c and lo < hi),
        tuple(name for name, column in zip(runs.names, drive.T, strict=True) if column.any()),
    )


@dataclass(frozen=True)
class _Problem:
    drive: Array
    measured: Array
    offset: Array
    start: Array
    constraints: Constraints
    names: tuple[str, ...]

    def solve(self, rows: Mask) -> Array:
        """Best values for some of the kernels."""
        measured = self.measured[rows][:, np.newaxis]
        scale = np.where(self.drive.max(axis=0) > 0, self._size(), 1.0)
        a = self.drive[rows] * scale / measured
        b = 1.0 - (self.offset[rows] / self.measured[rows])
        weight = np.sqrt(self.constraints.prior_weight)
        a = np.vstack([a, weight * np.eye(len(self.names))])
        b = np.concatenate([b, weight * self.start / scale])
        lower, upper = self.constraints.limits(self.names)
        orders = self.constraints.rows(self.names) * scale
        return scale * _bounded(a, b, lower / scale, upper / scale, orders)

    def held_out(self, groups: Sequence[str]) -> Array:
        """Each kernel predicted by a fit that never saw its group."""
        labels = np.array(groups)
        if len(set(groups)) < 2:
            return np.full(len(self.measured), np.nan)
        predicted = np.empty(len(self.measured))
        for label in dict.fromkeys(groups):
            out = labels == label
            predicted[out] = self.drive[out] @ self.solve(~out) + self.offset[out]
        return predicted

    def _size(self) -> Array:
        """Natural size of each value: 1 for factors; for energies what would explain all the power."""
        if (self.start > 0).all():
            return np.ones(len(self.names))
        return np.asarray(self.measured.mean() / np.maximum(self.drive.max(axis=0), 1e-300))


def _bounded(a: Array, b: Array, lower: Array, upper: Array, orders: Array) -> Array:
    if not len(orders):
        from scipy.optimize import lsq_linear

        free = upper > lower  # scipy wants room between bounds
        fixed = np.where(free, 0.0, lower)
        found = fixed.copy()
        if free.any():
            rest = b - a @ fixed
            found[free] = lsq_linear(a[:, free], rest, bounds=(lower[free], upper[free]), tol=1e-12).x
        return np.asarray(found)
    return _quadratic(a, b, lower, upper, orders)


def _quadratic(a: Array, b: Array, lower: Array, upper: Array, orders: Array) -> Array:
    """min |a·x − b|² with bounds and orderings, by an interior-point solver."""
    try:
        clarabel: Any = importlib.import_module("clarabel")
    except ImportError:
        raise MissingTool("orderings need clarabel. Install it: pip install clarabel") from None
    from scipy import sparse

    count = a.shape[1]
    finite = np.isfinite(upper)
    rows = [orders, np.eye(count)[finite], -np.eye(count)]
    limits = [np.zeros(len(orders)), upper[finite], -lower]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    stacked = np.vstack(rows)
    solver = clarabel.DefaultSolver(
        sparse.csc_matrix(np.triu(2.0 * a.T @ a)),
        -2.0 * a.T @ b,
        sparse.csc_matrix(stacked),
        np.concatenate(limits),
        [clarabel.NonnegativeConeT(len(stacked))],
        settings,
    )
    solution = solver.solve()
    if str(solution.status) not in ("Solved", "AlmostSolved"):
        do = "Do the orderings contradict the bounds?"
        raise bad_value("fit", "bounds and orderings that can all hold", str(solution.status), do)
    found: Array = np.clip(np.array(solution.x, dtype=np.float64), lower, upper)
    return found
