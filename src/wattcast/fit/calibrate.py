"""A forecast adjusted to a few whole-model measurements of the card: as many factors as they support, never more.

Factors θ are logarithms (watts for the idle offset) with Gaussian priors around the forecast. First those on time, on
the logarithm of latency, then those on energy, on the logarithm of power. Each step minimises

    Σ_i w_i·((y_i - f_i(θ))/σ)² + Σ_j (θ_j/s_j)²

by Gauss and Newton, w from Huber's loss ρ so that one odd row does not rule. Which factors: by the loss of rows left
out, Σ_i ρ(r_i/(1 - h_i)/σ_i) of the linearised problem [Allen1974, PRESS]; a larger set must lower it by two standard
deviations squared, and no set has more factors than rows. The smallest has no factor on time, and the energy scale:
one number of a process for all operations is what a forecast knows least, and its prior holds it back. One or two
rows: the set that may have moved them most, by its priors. What is not learned counts as noise,
σ_i² = σ² + Σ_j (∂f_i/∂θ_j · s_j)²: the host's scatter always, with one or two rows all other factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.calibrate_model import Measured, Row, predict, rows_of
from wattcast.fitted import Bundle
from wattcast.fitted.bundle import FAMILIES, Residual
from wattcast.fitted.factors import IDLE, with_factors
from wattcast.hardware import Gpu
from wattcast.provenance import Provenance, Status

TIME_SETS = ((), ("compute",), ("launch",), ("compute", "launch"), ("compute", "launch", "memory"),
             ("compute", "launch", "products"), ("compute", "launch", "memory", "products"))  # fmt: skip
ENERGY_SETS = (("energy",), ("energy", IDLE), ("energy", "dram_energy"), ("energy", "dram_energy", IDLE),
               ("energy", "dram_energy", "tensor_energy", IDLE))  # fmt: skip
# How far a forecast may be off, as standard deviations of logs; of the idle offset, as a share of idle power.
PRIOR = {"launch": 0.4, "compute": 0.25, "products": 0.2, "memory": 0.15, "energy": 0.25, "dram_energy": 0.25,
         "tensor_energy": 0.25, IDLE: 0.10}  # fmt: skip
NOISE = {"latency": 0.12, "power": 0.07}  # of a row: what the model itself misses, and repeats of short runs
# The host's cost of one run: weights of operators miss layers of five networks by 0.12 (docs/method/other-gpus.md),
# and a run is found up to a quarter apart on another day.
SCATTER = {"launch": 0.17}
HUBER = 2.0
EVIDENCE = 4.0  # by which a larger set must lower the loss of rows left out: two standard deviations, squared
STEPS = 8


@dataclass(frozen=True)
class Learned:
    """One factor: what the rows say of it. ``sure`` is the share by which its uncertainty shrank."""

    name: str
    value: float  # a factor; watts for the idle offset
    low: float
    high: float  # 90 % interval
    sure: float


@dataclass(frozen=True)
class Errors:
    """Mean absolute percentage errors of the forecast, of the fit, and leave-one-out; None of no rows."""

    forecast: float | None
    fitted: float | None
    left_out: float | None


@dataclass(frozen=True)
class Calibration:
    """What was learned, how sure it is, and the bundle made of it."""

    bundle: Bundle
    learned: tuple[Learned, ...]
    left: tuple[str, ...]  # factors the rows do not support
    latency: Errors
    power: Errors
    rows: int
    notes: tuple[str, ...]

    @property
    def factors(self) -> dict[str, float]:
        """Factors by name."""
        return {item.name: item.value for item in self.learned}


def calibrate(
    measured: Sequence[Measured], gpu: Gpu, bundle: Bundle, source: str, notes: tuple[str, ...] = ()
) -> Calibration:
    """The bundle adjusted to the measured rows."""
    return calibrate_rows(rows_of(measured, gpu, bundle), gpu, bundle, source, notes)


def calibrate_rows(
    rows: Sequence[Row], gpu: Gpu, bundle: Bundle, source: str, notes: tuple[str, ...] = ()
) -> Calibration:
    """The same, of rows that were analysed already."""
    idle_w = float(np.max(bundle.power.idle.power_w)) if hasattr(bundle.power, "idle") else 1.0
    seconds = np.log([r.measured.latency_s for r in rows])
    time = _best(
        TIME_SETS,
        rows,
        seconds,
        NOISE["latency"],
        idle_w,
        lambda some, f: np.log(predict(some, f, gpu, bundle)[0]),
        SCATTER,
    )
    powered = [r for r in rows if r.measured.power_w is not None]
    watts = np.log([r.measured.power_w for r in powered if r.measured.power_w is not None])
    energy = _best(
        ENERGY_SETS,
        powered,
        watts,
        NOISE["power"],
        idle_w,
        lambda some, f: np.log(predict(some, {**time.factors, **f}, gpu, bundle)[1]),
        {},
    )
    learned = (*time.learned(idle_w), *energy.learned(idle_w))
    factors = {item.name: item.value for item in learned}
    left = tuple(n for n in ("compute", "launch", "memory", "energy", IDLE) if n not in factors)
    done = Calibration(bundle, learned, left, time.errors, energy.errors, len(rows), notes)
    return replace(done, bundle=_bundle(bundle, done, time, energy, source))


@dataclass(frozen=True)
class Fit:
    """One set of factors fitted: position, spread, and residuals left out one at a time."""

    chosen: tuple[str, ...]
    theta: Array
    deviation: Array
    start: Array  # residuals of the forecast
    residual: Array
    left_out: Array
    spread: Array  # of each row
    reach: float  # Σ (∂f/∂θ·s)²: what the factors may do to the rows

    @property
    def factors(self) -> dict[str, float]:
        """Factors by name; the idle offset still as a share of idle power."""
        return _factors(self.chosen, self.theta, 1.0)

    @property
    def score(self) -> float:
        """Huber's loss of the rows left out, each over its own deviation."""
        off = np.abs(self.left_out) / self.spread
        return float(np.sum(np.where(off < HUBER, off**2, HUBER * (2.0 * off - HUBER))))

    @property
    def errors(self) -> Errors:
        """Errors in percent."""

        def percent(residual: Array) -> float | None:
            return float(100 * np.mean(np.abs(np.expm1(-residual)))) if residual.size else None

        return Errors(
            percent(self.start), percent(self.residual), percent(self.left_out) if self.residual.size > 1 else None
        )

    def learned(self, idle_w: float) -> tuple[Learned, ...]:
        """The factors in words a report prints."""
        found = []
        for name, at, sd in zip(self.chosen, self.theta, self.deviation, strict=True):
            ends = (at - 1.645 * sd, at, at + 1.645 * sd)
            low, value, high = (x * idle_w if name == IDLE else float(np.exp(x)) for x in ends)
            found.append(Learned(name, float(value), float(low), float(high), float(1.0 - sd / PRIOR[name])))
        return tuple(found)


def _best(
    sets: Sequence[tuple[str, ...]],
    rows: Sequence[Row],
    target: Array,
    noise: float,
    idle_w: float,
    model: Callable[[Sequence[Row], Mapping[str, float]], Array],
    scatter: Mapping[str, float],
) -> Fit:
    """The set of factors the rows support."""
    others = tuple(dict.fromkeys(name for s in sets for name in s)) if len(rows) < 3 else ()
    able = [s for s in sets if len(s) <= len(rows)] or [()]
    fits = [_fit(s, rows, target, noise, idle_w, model, others, scatter) for s in able]
    if len(rows) < 3:
        return max(fits, key=lambda f: f.reach)
    best = fits[0]
    for fit in fits[1:]:  # sets grow: a later one has to earn its factors
        if best.score - fit.score > EVIDENCE:
            best = fit
    return best


def _fit(
    chosen: tuple[str, ...],
    rows: Sequence[Row],
    target: Array,
    noise: float,
    idle_w: float,
    model: Callable[[Sequence[Row], Mapping[str, float]], Array],
    others: tuple[str, ...],
    scatter: Mapping[str, float],
) -> Fit:
    spread = _noise(chosen, rows, noise, idle_w, model, others, scatter)
    prior = np.array([PRIOR[name] for name in chosen])
    theta = np.zeros(len(chosen))
    precision = np.diag(1.0 / prior**2)

    def value(at: Array) -> Array:
        return model(rows, _factors(chosen, at, idle_w)) if len(rows) else np.zeros(0)

    start = target - value(theta)
    here, weight = start, np.ones(len(rows))
    jacobian = np.zeros((len(rows), len(chosen)))
    for _ in range(STEPS if chosen and len(rows) else 0):
        jacobian = _jacobian(value, theta, target - here)
        weight = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(here), 1e-12))
        scaled = (weight / spread**2)[:, np.newaxis] * jacobian
        step = np.linalg.solve(jacobian.T @ scaled + precision, scaled.T @ here - precision @ theta)
        theta = theta + np.clip(step, -0.7, 0.7)
        here = target - value(theta)
        if np.abs(step).max() < 1e-4:
            break
    hessian = jacobian.T @ ((weight / spread**2)[:, np.newaxis] * jacobian) + precision
    covariance = np.linalg.inv(hessian) if chosen else np.zeros((0, 0))
    leverage = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian) * weight / spread**2
    reach = float(np.sum((jacobian * prior) ** 2))
    deviation = np.sqrt(np.diag(covariance)) if chosen else np.zeros(0)
    return Fit(chosen, theta, deviation, start, here, here / np.maximum(1.0 - leverage, 0.05), spread, reach)


def _noise(
    chosen: tuple[str, ...],
    rows: Sequence[Row],
    noise: float,
    idle_w: float,
    model: Callable[[Sequence[Row], Mapping[str, float]], Array],
    others: tuple[str, ...],
    scatter: Mapping[str, float],
) -> Array:
    """Deviation of each row: its own, and what factors outside the set may do to it."""
    apart = dict(scatter) | {name: PRIOR[name] for name in others if name not in chosen}
    variance = np.full(len(rows), noise**2)
    if apart and len(rows):
        names, base = tuple(apart), model(rows, {})
        moved = _jacobian(lambda at: model(rows, _factors(names, at, idle_w)), np.zeros(len(names)), base)
        variance += (moved**2) @ np.array(list(apart.values())) ** 2
    return np.asarray(np.sqrt(variance))


def _jacobian(value: Callable[[Array], Array], theta: Array, here: Array, step: float = 0.02) -> Array:
    columns = []
    for j in range(len(theta)):
        moved = theta.copy()
        moved[j] += step
        columns.append((value(moved) - here) / step)
    return np.stack(columns, axis=-1)


def _factors(chosen: tuple[str, ...], theta: Array, idle_w: float) -> dict[str, float]:
    return {n: float(x * idle_w if n == IDLE else np.exp(x)) for n, x in zip(chosen, theta, strict=True)}


def _bundle(forecast: Bundle, done: Calibration, time: Fit, energy: Fit, source: str) -> Bundle:
    """The forecast with factors applied; intervals from what was left out, shrunk towards the forecast's."""
    made = with_factors(forecast, done.factors)
    said = ", ".join(f"{item.name} {item.value:.3g}" for item in done.learned) or "nothing"
    note = f"calibrated on {done.rows} whole-model row{'s' if done.rows > 1 else ''}: {said}"
    residuals = {
        family: Residual(
            _ends(forecast.residuals[family].latency, time.left_out),
            _ends(forecast.residuals[family].power, energy.left_out),
            forecast.residuals[family].rows,
        )
        for family in FAMILIES
    }
    return replace(
        made,
        status=Status.INHERITED,
        provenance=Provenance(
            f"wattcast calibrate {source}", forecast.provenance.date, f"{forecast.gpu} ({source})", note
        ),
        residuals=residuals,
        assumptions=(*(a for a in forecast.assumptions if not a.startswith("forecast:")), note),
    )


PRIOR_ROWS = 4.0  # how many rows the forecast's own interval counts for


def _ends(forecast: tuple[float, float], left_out: Array) -> tuple[float, float]:
    """Interval ends: variance of rows left out and of the forecast, weighted by the number of rows."""
    known = left_out if left_out.size > 2 else np.zeros(0)
    ends = []
    for end in forecast:
        variance = (PRIOR_ROWS * np.log(end) ** 2 + np.sum((1.645 * known) ** 2)) / (PRIOR_ROWS + known.size)
        ends.append(float(np.exp(np.sign(np.log(end)) * np.sqrt(variance))))
    return ends[0], ends[1]
