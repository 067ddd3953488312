"""Calibrate a forecast with a few whole-model measurements: as many factors as they support, never
more.

Factors θ are logarithms (watts for the idle offset) with Gaussian priors around the forecast. First
those on time are fitted to the logarithm of latency, then those on energy to the logarithms of
power and of energy. Each minimises

    Σ_i w_i·((y_i - f_i(θ))/σ)² + Σ_j (θ_j/s_j)²

by Gauss and Newton, with w from Huber's loss ρ so that one odd row does not rule. The set of
factors is chosen by the loss of rows left out, Σ_i ρ(r_i/(1 - h_i)/σ_i) of the linearised problem
[Allen1974, PRESS]. A larger set must lower it by two standard deviations squared, and no set has
more factors than rows. With one or two rows, the set that may move them most by its priors is
taken. Factors that are not learned count as noise, σ_i² = σ² + Σ_j (∂f_i/∂θ_j · s_j)²: the host's
scatter always, with one or two rows all other factors.

From three rows on, nothing is adopted that rows left out do not support. Factors on time must lower
the error of their latency, factors on energy that of their power and that of their energy, each by
one standard error of the mean gain. Power alone misleads where time is off: a forecast that is a
tenth fast draws a tenth too much and takes the right joules. Factors on time without any on energy
must not raise the error of energy.

Whole-model rows are analysed once; factors then scale the clock-free timeline directly. That gives
the numbers of a bundle with those factors (a test holds the two together) at a fraction of the
cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wattcast.calibrate.scoring import lowers_error, percent_errors
from wattcast.core.arrays import Array, map_distinct
from wattcast.core.strict_files import FitStatus, Provenance
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import FAMILIES, Bundle, ResidualEnds
from wattcast.predictor.bundle.calibrated import IDLE_OFFSET, PRODUCT_FAMILIES, apply_factors
from wattcast.predictor.governor import run_governed
from wattcast.predictor.pipeline import analyse_graph, total_at_clock
from wattcast.predictor.timeline import Timeline
from wattcast.workload.graph import Graph


@dataclass(frozen=True)
class MeasuredModel:
    """One whole-model measurement; ``power_w`` is None where only time was measured."""

    name: str
    graph: Graph
    latency_s: float
    power_w: float | None
    clock_hz: float | None
    temperature_c: float
    power_limit_w: float | None = None


@dataclass(frozen=True)
class AnalysedModel:
    """A measurement and its timeline under the forecast."""

    measured: MeasuredModel
    timeline: Timeline


def analyse_models(
    measured: Sequence[MeasuredModel], gpu: Gpu, bundle: Bundle
) -> list[AnalysedModel]:
    """Analyse every measured workload once."""
    graphs = {id(m.graph): m.graph for m in measured}
    timelines = {key: analyse_graph(graph, gpu, bundle) for key, graph in graphs.items()}
    return [AnalysedModel(m, timelines[id(m.graph)]) for m in measured]


def predict_models(
    rows: Sequence[AnalysedModel], factors: Mapping[str, float], gpu: Gpu, bundle: Bundle
) -> tuple[Array, Array]:
    """Predict latency and mean power of every row, ``(row,)``, with factors applied."""
    priced = apply_factors(
        bundle, {k: v for k, v in factors.items() if k == IDLE_OFFSET or k.endswith("energy")}
    )
    found = []
    for row in rows:
        m = row.measured
        timeline = scale_timeline(row.timeline, factors)
        at = OperatingPoint(m.clock_hz, m.power_limit_w, m.temperature_c)
        if m.clock_hz is None or m.power_limit_w is not None:
            totals = run_governed(timeline, gpu, at, priced)[1]
        else:
            totals = total_at_clock(timeline, at, priced)
        found.append((float(np.squeeze(totals.latency_s)), float(np.squeeze(totals.power_w))))
    latency_s, power_w = np.array(found).reshape(-1, 2).T
    return latency_s, power_w


def scale_timeline(timeline: Timeline, factors: Mapping[str, float]) -> Timeline:
    """Apply the factors on time to a timeline."""
    products = map_distinct(PRODUCT_FAMILIES.__contains__, timeline.kernels.family)
    on_chip = factors.get("compute", 1.0) * np.where(products, factors.get("products", 1.0), 1.0)
    memory = np.asarray(factors.get("memory", 1.0))
    phases = tuple(
        phase if phase.name in ("fixed", "start") else phase.change(on_chip.__mul__, memory.__mul__)
        for phase in timeline.phases
    )
    return replace(timeline, phases=phases).scale_host(factors.get("launch", 1.0))


TIME_SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("compute",),
    ("launch",),
    ("compute", "launch"),
    ("compute", "launch", "memory"),
    ("compute", "launch", "products"),
    ("compute", "launch", "memory", "products"),
)
ENERGY_SETS: tuple[tuple[str, ...], ...] = (
    ("energy",),
    ("energy", IDLE_OFFSET),
    ("energy", "dram_energy"),
    ("energy", "dram_energy", IDLE_OFFSET),
    ("energy", "dram_energy", "tensor_energy", IDLE_OFFSET),
)
# How far a forecast may be off, as standard deviations of logs; of the idle offset, as a share of
# idle power.
PRIOR_SPREAD = {
    **{"launch": 0.4, "compute": 0.25, "products": 0.2, "memory": 0.15},
    **{"energy": 0.25, "dram_energy": 0.25, "tensor_energy": 0.25, IDLE_OFFSET: 0.10},
}
ROW_SPREAD = {
    "latency": 0.12,
    "power": 0.07,
}  # of a row: what the model itself misses, and repeats of short runs
# The host's cost of one run: weights of operators miss layers of five networks by 0.12
# (docs/method/other-gpus.md), and a run is found up to a quarter apart on another day.
HOST_SCATTER = {"launch": 0.17}
HUBER_LIMIT = 2.0
LEAST_ERRORS = 1.0  # standard errors by which what is adopted must lower the error of rows left out
# by which a larger set must lower the loss of rows left out: two standard deviations, squared
LEAST_GAIN = 4.0
STEPS = 8
DIFFERENCE = 0.02  # of a logarithm, by which slopes are taken


@dataclass(frozen=True)
class CalibratedFactor:
    """One calibrated factor; ``sure`` is the share by which its uncertainty shrank."""

    name: str
    value: float  # a factor; watts for the idle offset
    low: float
    high: float  # 90 % interval
    sure: float


@dataclass(frozen=True)
class CalibrationErrors:
    """Mean absolute percentage errors of the forecast, of the fit, and leave-one-out; None without
    rows.
    """

    forecast: float | None
    fitted: float | None
    left_out: float | None


@dataclass(frozen=True)
class Calibration:
    """What was learned, how sure it is, and the bundle made of it."""

    bundle: Bundle
    learned: tuple[CalibratedFactor, ...]
    left: tuple[str, ...]  # factors the rows do not support
    latency: CalibrationErrors
    power: CalibrationErrors
    rows: int
    notes: tuple[str, ...]

    @property
    def factors(self) -> dict[str, float]:
        """Factors by name."""
        return {item.name: item.value for item in self.learned}


def calibrate_bundle(
    rows: Sequence[AnalysedModel],
    gpu: Gpu,
    bundle: Bundle,
    source: str,
    notes: tuple[str, ...] = (),
) -> Calibration:
    """Adjust a bundle to measured whole models, which ``analyse_models`` has analysed under it."""
    idle_w = float(np.max(bundle.power.idle.power_w)) if hasattr(bundle.power, "idle") else 1.0
    seconds = np.log([r.measured.latency_s for r in rows])
    spread = ROW_SPREAD["latency"]
    scatter = HOST_SCATTER
    on_time = FactorProblem(
        rows,
        seconds,
        spread,
        idle_w,
        lambda f: np.log(predict_models(rows, f, gpu, bundle)[0]),
        scatter,
    )
    plain = _fit_factors((), on_time, ())  # the forecast itself as a fit
    time = _best_set(
        TIME_SETS,
        on_time,
        lambda fit: not fit.chosen or lowers_error(plain.start, fit.left_out, LEAST_ERRORS),
    )
    assert time is not None, "the forecast is one of the sets"
    powered = [r for r in rows if r.measured.power_w is not None]
    watts = np.log([r.measured.power_w for r in powered if r.measured.power_w is not None])
    joules = watts + np.log([r.measured.latency_s for r in powered])
    target = np.concatenate([watts, joules])
    noise = ROW_SPREAD["power"] * np.sqrt(2.0)

    def on_energy(known: FactorFit) -> FactorProblem:
        def logs(factors: Mapping[str, float]) -> Array:
            seconds, power_w = predict_models(powered, {**known.factors, **factors}, gpu, bundle)
            return np.concatenate([np.log(power_w), np.log(seconds * power_w)])

        return FactorProblem(powered, target, noise, idle_w, logs)

    count = len(powered)
    has_power = np.array([r.measured.power_w is not None for r in rows], dtype=bool)
    off_w, off_j = np.split(
        _fit_factors((), on_energy(plain), ()).start, [count]
    )  # of the forecast

    def left_out_joules(known: FactorFit, fit: FactorFit) -> Array:
        """Return the residuals of energy where a row is left out of both fits."""
        return np.asarray(fit.left_out[count:] + (known.left_out - known.residual)[has_power])

    def fit_energy(known: FactorFit) -> FactorFit | None:
        def is_supported(fit: FactorFit) -> bool:
            after = fit.left_out[:count], left_out_joules(known, fit)
            return all(
                lowers_error(b, a, LEAST_ERRORS) for b, a in zip((off_w, off_j), after, strict=True)
            )

        return _best_set(ENERGY_SETS, on_energy(known), is_supported)

    energy = fit_energy(time)
    if energy is None and time.chosen:
        energy = fit_energy(plain)
        alone = left_out_joules(time, _fit_factors((), on_energy(time), ()))
        if energy is not None or percent_errors(alone).mean() > percent_errors(off_j).mean():
            time = plain
    energy = energy or _fit_factors((), on_energy(time), ())
    learned = (*time.learned(idle_w), *energy.learned(idle_w))
    factors = {item.name: item.value for item in learned}
    left = tuple(
        n for n in ("compute", "launch", "memory", "energy", IDLE_OFFSET) if n not in factors
    )
    said = ", ".join(f"{item.name} {item.value:.3g}" for item in learned) or "nothing"
    note = f"calibrated on {len(rows)} whole-model row{'s' if len(rows) > 1 else ''}: {said}"
    origin = Provenance(
        f"wattcast calibrate {source}", bundle.provenance.date, f"{bundle.gpu} ({source})", note
    )
    left_out = dict.fromkeys(FAMILIES, (time.left_out, energy.left_out[:count]))
    made = describe_moved(apply_factors(bundle, factors), bundle, origin, left_out)
    return Calibration(
        made, learned, left, time.errors(len(rows)), energy.errors(count), len(rows), notes
    )


@dataclass(frozen=True)
class FactorProblem:
    """What factors are fitted to: logarithms of rows, their noise, and the model of them."""

    rows: Sequence[AnalysedModel]
    target: Array
    noise: float
    idle_w: float
    model: Callable[[Mapping[str, float]], Array]
    scatter: Mapping[str, float] = field(
        default_factory=dict
    )  # spreads of factors that count as noise

    def value(self, chosen: tuple[str, ...], theta: Array) -> Array:
        """Return the modelled logarithms where the chosen factors are at ``theta``."""
        return (
            self.model(_exponentiate_factors(chosen, theta, self.idle_w))
            if len(self.rows)
            else np.zeros(0)
        )


@dataclass(frozen=True)
class FactorFit:
    """A fit of one set of factors: their values and deviations, and residuals left out one at a
    time.
    """

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
        return _exponentiate_factors(self.chosen, self.theta, 1.0)

    def score(self) -> float:
        """Return Huber's loss of the rows left out, each over its own deviation."""
        off = np.abs(self.left_out) / self.spread
        return float(
            np.sum(np.where(off < HUBER_LIMIT, off**2, HUBER_LIMIT * (2.0 * off - HUBER_LIMIT)))
        )

    def errors(self, count: int) -> CalibrationErrors:
        """Return the errors of the first ``count`` rows in percent."""
        found = (percent_errors(x[:count]) for x in (self.start, self.residual, self.left_out))
        start, fitted, left_out = (float(error.mean()) if count else None for error in found)
        return CalibrationErrors(start, fitted, left_out if count > 1 else None)

    def learned(self, idle_w: float) -> tuple[CalibratedFactor, ...]:
        """Return the factors with their 90 % intervals."""
        found = []
        for name, at, sd in zip(self.chosen, self.theta, self.deviation, strict=True):
            ends = (at - 1.645 * sd, at, at + 1.645 * sd)
            low, value, high = (
                x * idle_w if name == IDLE_OFFSET else float(np.exp(x)) for x in ends
            )
            found.append(
                CalibratedFactor(
                    name,
                    float(value),
                    float(low),
                    float(high),
                    float(1.0 - sd / PRIOR_SPREAD[name]),
                )
            )
        return tuple(found)


def _best_set(
    sets: Sequence[tuple[str, ...]],
    problem: FactorProblem,
    is_supported: Callable[[FactorFit], bool],
) -> FactorFit | None:
    """Choose the set of factors that the rows support; None where they support none."""
    count = len(problem.rows)
    others = tuple(dict.fromkeys(name for s in sets for name in s)) if count < 3 else ()
    fits = [_fit_factors(s, problem, others) for s in [s for s in sets if len(s) <= count] or [()]]
    if count < 3:
        return max(fits, key=lambda f: f.reach)
    best: FactorFit | None = None
    for fit in filter(is_supported, fits):  # sets grow: a later one has to earn its factors
        if best is None or best.score() - fit.score() > LEAST_GAIN:
            best = fit
    return best


def _fit_factors(
    chosen: tuple[str, ...], problem: FactorProblem, others: tuple[str, ...]
) -> FactorFit:
    rows = problem.rows
    target = problem.target
    # the deviation of each entry: its own, and what factors outside the set may add
    apart = dict(problem.scatter) | {
        name: PRIOR_SPREAD[name] for name in others if name not in chosen
    }
    variance = np.full(len(target), problem.noise**2)
    if apart and len(rows):
        names = tuple(apart)
        moved = _differentiate_factors(
            lambda at: problem.value(names, at), np.zeros(len(names)), problem.model({})
        )
        variance += (moved**2) @ np.array(list(apart.values())) ** 2
    spread = np.sqrt(variance)
    prior = np.array([PRIOR_SPREAD[name] for name in chosen])
    theta = np.zeros(len(chosen))
    precision = np.diag(1.0 / prior**2)

    def value(at: Array) -> Array:
        return problem.value(chosen, at)

    start = target - value(theta)
    here = start
    weight = np.ones(len(target))
    jacobian = np.zeros((len(target), len(chosen)))
    for _ in range(STEPS if chosen and len(rows) else 0):
        jacobian = _differentiate_factors(value, theta, target - here)
        weight = np.minimum(1.0, HUBER_LIMIT * spread / np.maximum(np.abs(here), 1e-12))
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
    return FactorFit(
        chosen,
        theta,
        deviation,
        start,
        here,
        here / np.maximum(1.0 - leverage, 0.05),
        spread,
        reach,
    )


def _differentiate_factors(value: Callable[[Array], Array], theta: Array, here: Array) -> Array:
    moved = theta + DIFFERENCE * np.eye(len(theta))
    return np.stack([(value(at) - here) / DIFFERENCE for at in moved], axis=-1)


def _exponentiate_factors(chosen: tuple[str, ...], theta: Array, idle_w: float) -> dict[str, float]:
    return {
        n: float(x * idle_w if n == IDLE_OFFSET else np.exp(x))
        for n, x in zip(chosen, theta, strict=True)
    }


def describe_moved(
    bundle: Bundle,
    forecast: Bundle,
    provenance: Provenance,
    left_out: Mapping[str, tuple[Array, Array]],
) -> Bundle:
    """Return a forecast that rows have moved, as calibrated, with the intervals that rows left out
    give it.

    ``left_out`` has log(measured / predicted) of latency and power by family.
    """
    residuals = {}
    for family, (latency, power) in left_out.items():
        known = forecast.residuals[family]
        ends = shrink_ends(known.latency, latency), shrink_ends(known.power, power)
        residuals[family] = ResidualEnds(*ends, known.rows)
    said = (*(a for a in forecast.assumptions if not a.startswith("forecast:")), provenance.note)
    return replace(
        bundle,
        status=FitStatus.CALIBRATED,
        provenance=provenance,
        residuals=residuals,
        assumptions=said,
    )


PRIOR_ROWS = 4.0  # how many rows the forecast's own interval counts for


def shrink_ends(forecast: tuple[float, float], left_out: Array) -> tuple[float, float]:
    """Average the variances of rows left out and of the forecast's interval, weighted by the number
    of rows.
    """
    known = left_out if left_out.size > 2 else np.zeros(0)
    ends = []
    for end in forecast:
        variance = (PRIOR_ROWS * np.log(end) ** 2 + np.sum((1.645 * known) ** 2)) / (
            PRIOR_ROWS + known.size
        )
        ends.append(float(np.exp(np.sign(np.log(end)) * np.sqrt(variance))))
    return ends[0], ends[1]
