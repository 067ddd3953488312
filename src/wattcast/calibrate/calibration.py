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
the numbers of a bundle with those factors (a test compares the two) at a fraction of the cost.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import (
    dataclass,
    field,
    replace,
)
from typing import Any

import numpy as np

from wattcast.calibrate.scoring import lowers_error, percent_errors
from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array, map_distinct
from wattcast.core.strict_files import FitStatus, Provenance
from wattcast.core.user_results import UserResult
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.predictor.bundle.bundle_file import (
    FAMILIES,
    Bundle,
    ResidualEnds,
)
from wattcast.predictor.bundle.calibrated import (
    IDLE_OFFSET,
    PRODUCT_FAMILIES,
    apply_factors,
)
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
    measured: Sequence[MeasuredModel],
    gpu: Gpu,
    bundle: Bundle,
) -> list[AnalysedModel]:
    """Analyse every measured workload once."""
    graphs = {id(m.graph): m.graph for m in measured}
    timelines = {key: analyse_graph(graph, gpu, bundle) for key, graph in graphs.items()}
    return [AnalysedModel(m, timelines[id(m.graph)]) for m in measured]


def predict_models(
    rows: Sequence[AnalysedModel],
    factors: Mapping[str, float],
    gpu: Gpu,
    bundle: Bundle,
) -> tuple[Array, Array]:
    """Predict latency and mean power of every row, ``(row,)``, with factors applied."""
    energy_names = [name for name in factors if name == IDLE_OFFSET or name.endswith("energy")]
    priced = apply_factors(bundle, {name: factors[name] for name in energy_names})
    latency_s = np.empty(len(rows))
    power_w = np.empty(len(rows))
    for place, row in enumerate(rows):
        m = row.measured
        timeline = scale_timeline(row.timeline, factors)
        at = OperatingPoint(m.clock_hz, m.power_limit_w, m.temperature_c)
        if m.clock_hz is None or m.power_limit_w is not None:
            _, totals, _ = run_governed(timeline, gpu, at, priced)
        else:
            totals = total_at_clock(timeline, at, priced)
        latency_s[place] = float(np.squeeze(totals.latency_s))
        power_w[place] = float(np.squeeze(totals.power_w))
    return latency_s, power_w


def scale_timeline(timeline: Timeline, factors: Mapping[str, float]) -> Timeline:
    """Apply the factors on time to a timeline."""
    products = map_distinct(PRODUCT_FAMILIES.__contains__, timeline.kernels.family)
    on_chip = factors.get("compute", 1.0) * np.where(products, factors.get("products", 1.0), 1.0)
    memory = np.asarray(factors.get("memory", 1.0))
    phases = []
    for phase in timeline.phases:
        if phase.name not in ("fixed", "start"):
            phase = phase.change(on_chip.__mul__, memory.__mul__)
        phases.append(phase)
    return replace(timeline, phases=tuple(phases)).scale_host(factors.get("launch", 1.0))


class CalibrationCoefficients(Coefficients):
    """How far forecasts, rows and hosts may be off, in logs, and what a fit must gain."""

    launch_spread: float
    compute_spread: float
    products_spread: float
    memory_spread: float
    energy_spread: float
    idle_spread: float  # a share of idle power
    latency_row_spread: float  # of a row: what the model itself misses, and repeats of short runs
    power_row_spread: float
    host_scatter: float  # of the host's cost of one run
    huber_limit: float
    least_errors: float  # standard errors by which the error of rows left out must fall
    least_gain: float  # by which a larger set must lower the loss of rows left out
    prior_rows: float  # that the forecast's own interval counts for


CALIBRATION = load_coefficients("calibration", CalibrationCoefficients)
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
    "launch": CALIBRATION.launch_spread,
    "compute": CALIBRATION.compute_spread,
    "products": CALIBRATION.products_spread,
    "memory": CALIBRATION.memory_spread,
    "energy": CALIBRATION.energy_spread,
    "dram_energy": CALIBRATION.energy_spread,
    "tensor_energy": CALIBRATION.energy_spread,
    IDLE_OFFSET: CALIBRATION.idle_spread,
}
STEPS = 8
DIFFERENCE = 0.02  # of a logarithm, by which slopes are taken
_LARGEST_STEP = 0.7  # of a logarithm


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


@dataclass(frozen=True, repr=False)
class Calibration(UserResult):
    """What was learned, how sure it is, and the bundle made of it."""

    drawn_by = "wattcast.report.result_figures:draw_calibration"
    rows_in = "learned"

    bundle: Bundle
    learned: tuple[CalibratedFactor, ...]
    unsupported: tuple[str, ...]  # factors that the rows do not support
    latency: CalibrationErrors
    power: CalibrationErrors
    rows: int
    notes: tuple[str, ...]

    @property
    def summary_line(self) -> str:
        """The answer in a line."""
        learned = ", ".join(f"{item.name} {item.value:.3g}" for item in self.learned)
        return f"{self.bundle.gpu} from {self.rows} rows: {learned or 'nothing moved'}"

    def to_dict(self) -> dict[str, Any]:
        """Return what was learned and how far off it is, as ``calibrate --json`` prints it."""
        return {
            "gpu": self.bundle.gpu,
            "rows": self.rows,
            "learned": [vars(item) for item in self.learned],
            "not_supported": list(self.unsupported),
            "latency_error_percent": vars(self.latency),
            "power_error_percent": vars(self.power),
            "notes": list(self.notes),
        }

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
    fits = _ModelFits(rows, gpu, bundle)
    time, energy = fits.choose_both()
    idle_w = fits.idle_w
    learned = (*time.learned(idle_w), *energy.learned(idle_w))
    factors = {item.name: item.value for item in learned}
    names = ("compute", "launch", "memory", "energy", IDLE_OFFSET)
    unsupported = tuple(name for name in names if name not in factors)

    words = ", ".join(f"{item.name} {item.value:.3g}" for item in learned) or "nothing"
    plural = "s" if len(rows) > 1 else ""
    provenance = Provenance(
        source=f"wattcast calibrate {source}",
        date=bundle.provenance.date,
        device=f"{bundle.gpu} ({source})",
        note=f"calibrated on {len(rows)} whole-model row{plural}: {words}",
    )
    count = len(fits.powered)
    left_out = dict.fromkeys(FAMILIES, (time.left_out, energy.left_out[:count]))
    return Calibration(
        bundle=describe_moved(apply_factors(bundle, factors), bundle, provenance, left_out),
        learned=learned,
        unsupported=unsupported,
        latency=time.errors(len(rows)),
        power=energy.errors(count),
        rows=len(rows),
        notes=notes,
    )


class _ModelFits:
    """Fits of factors on time and on energy to the same rows, and the choice among them."""

    def __init__(
        self,
        rows: Sequence[AnalysedModel],
        gpu: Gpu,
        bundle: Bundle,
    ) -> None:
        self._rows = rows
        self._gpu = gpu
        self._bundle = bundle
        self.idle_w = 1.0
        if hasattr(bundle.power, "idle"):
            self.idle_w = float(np.max(bundle.power.idle.power_w))
        self.powered = [row for row in rows if row.measured.power_w is not None]
        self._has_power = np.array([row.measured.power_w is not None for row in rows], dtype=bool)

    def choose_both(self) -> tuple[FactorFit, FactorFit]:
        """Return the factors on time and on energy that the rows support.

        Factors on time without any on energy must not raise the error of energy.
        """
        forecast = fit_factors((), self._time_problem(), ())  # the forecast itself as a fit
        time = self._choose_time(forecast)
        energy = self._choose_energy(time, forecast)
        if energy is None and time.chosen:
            energy = self._choose_energy(forecast, forecast)
            time_alone = self._left_out_joules(time, self._fit_no_energy(time))
            _, forecast_joules = self._forecast_residuals(forecast)
            is_worse = percent_errors(time_alone).mean() > percent_errors(forecast_joules).mean()
            if energy is not None or is_worse:
                time = forecast
        return time, energy or self._fit_no_energy(time)

    def _time_problem(self) -> FactorProblem:
        def log_seconds(factors: Mapping[str, float]) -> Array:
            latency_s, _ = predict_models(self._rows, factors, self._gpu, self._bundle)
            return np.log(latency_s)

        return FactorProblem(
            rows=self._rows,
            target=np.log([row.measured.latency_s for row in self._rows]),
            noise=CALIBRATION.latency_row_spread,
            idle_w=self.idle_w,
            model=_remember_factors(log_seconds),
            scatter={"launch": CALIBRATION.host_scatter},
        )

    def _energy_problem(self, time: FactorFit) -> FactorProblem:
        """Return the problem of power and energy of the rows, with factors on time as fitted."""

        def log_figures(factors: Mapping[str, float]) -> Array:
            every_factor = {**time.factors, **factors}
            latency_s, power_w = predict_models(self.powered, every_factor, self._gpu, self._bundle)
            return np.concatenate([np.log(power_w), np.log(latency_s * power_w)])

        watts = np.log([float(row.measured.power_w or np.nan) for row in self.powered])
        joules = watts + np.log([row.measured.latency_s for row in self.powered])
        return FactorProblem(
            rows=self.powered,
            target=np.concatenate([watts, joules]),
            noise=CALIBRATION.power_row_spread * np.sqrt(2.0),
            idle_w=self.idle_w,
            model=_remember_factors(log_figures),
        )

    def _fit_no_energy(self, time: FactorFit) -> FactorFit:
        return fit_factors((), self._energy_problem(time), ())

    def _choose_time(self, forecast: FactorFit) -> FactorFit:
        def is_supported(fit: FactorFit) -> bool:
            if not fit.chosen:
                return True
            return lowers_error(forecast.start, fit.left_out, CALIBRATION.least_errors)

        time = _best_set(TIME_SETS, self._time_problem(), is_supported)
        assert time is not None, "the forecast is one of the sets"
        return time

    def _choose_energy(
        self,
        time: FactorFit,
        forecast: FactorFit,
    ) -> FactorFit | None:
        """Return the factors on energy that lower the errors of power and of energy; None where
        none do.
        """
        forecast_watts, forecast_joules = self._forecast_residuals(forecast)
        count = len(self.powered)

        def is_supported(fit: FactorFit) -> bool:
            least = CALIBRATION.least_errors
            joules = self._left_out_joules(time, fit)
            lowers_watts = lowers_error(forecast_watts, fit.left_out[:count], least)
            return lowers_watts and lowers_error(forecast_joules, joules, least)

        return _best_set(ENERGY_SETS, self._energy_problem(time), is_supported)

    def _forecast_residuals(self, forecast: FactorFit) -> tuple[Array, Array]:
        """Return the residuals of power and of energy that the forecast has."""
        residuals = self._fit_no_energy(forecast).start
        count = len(self.powered)
        return residuals[:count], residuals[count:]

    def _left_out_joules(
        self,
        time: FactorFit,
        energy: FactorFit,
    ) -> Array:
        """Return the residuals of energy where a row is left out of both fits."""
        change = (time.left_out - time.residual)[self._has_power]
        return np.asarray(energy.left_out[len(self.powered) :] + change)


@dataclass(frozen=True)
class FactorProblem:
    """What factors are fitted to: logarithms of rows, their noise, and the model of them."""

    rows: Sequence[AnalysedModel]
    target: Array
    noise: float
    idle_w: float
    model: Callable[[Mapping[str, float]], Array]
    # spreads of factors that count as noise
    scatter: Mapping[str, float] = field(default_factory=dict)

    def value(
        self,
        chosen: tuple[str, ...],
        theta: Array,
    ) -> Array:
        """Return the modelled logarithms where the chosen factors are at ``theta``."""
        if not len(self.rows):
            return np.zeros(0)
        return self.model(_exponentiate_factors(chosen, theta, self.idle_w))


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
        limit = CALIBRATION.huber_limit
        loss = np.where(off < limit, off**2, limit * (2.0 * off - limit))
        return float(np.sum(loss))

    def errors(self, count: int) -> CalibrationErrors:
        """Return the errors of the first ``count`` rows in percent."""
        if not count:
            return CalibrationErrors(None, None, None)

        def mean_error(residual: Array) -> float:
            return float(percent_errors(residual[:count]).mean())

        left_out = mean_error(self.left_out) if count > 1 else None
        return CalibrationErrors(mean_error(self.start), mean_error(self.residual), left_out)

    def learned(self, idle_w: float) -> tuple[CalibratedFactor, ...]:
        """Return the factors with their 90 % intervals."""
        learned = []
        for name, theta, deviation in zip(self.chosen, self.theta, self.deviation, strict=True):

            def to_factor(theta: float, name: str = name) -> float:
                return float(theta * idle_w if name == IDLE_OFFSET else np.exp(theta))

            learned.append(
                CalibratedFactor(
                    name=name,
                    value=to_factor(theta),
                    low=to_factor(theta - _NORMAL_P90 * deviation),
                    high=to_factor(theta + _NORMAL_P90 * deviation),
                    sure=float(1.0 - deviation / PRIOR_SPREAD[name]),
                )
            )
        return tuple(learned)


_NORMAL_P90 = 1.645  # of |x|, x standard normal
_SETTLED = 1e-4  # step of a logarithm that ends a fit
_LEAST_LEFT = 0.05  # of a row's residual that its own leverage may leave
_FEW_ROWS = 3  # below which no set is chosen by rows left out


def _best_set(
    sets: Sequence[tuple[str, ...]],
    problem: FactorProblem,
    is_supported: Callable[[FactorFit], bool],
) -> FactorFit | None:
    """Choose the set of factors that the rows support; None where they support none."""
    count = len(problem.rows)
    small_sets = [names for names in sets if len(names) <= count] or [()]
    if count < _FEW_ROWS:
        every_name = tuple(dict.fromkeys(name for names in sets for name in names))
        fits = [fit_factors(names, problem, every_name) for names in small_sets]
        return max(fits, key=lambda fit: fit.reach)
    best: FactorFit | None = None
    for names in small_sets:  # sets grow: a later one has to earn its factors
        fit = fit_factors(names, problem, ())
        if not is_supported(fit):
            continue
        if best is None or best.score() - fit.score() > CALIBRATION.least_gain:
            best = fit
    return best


def fit_factors(
    chosen: tuple[str, ...],
    problem: FactorProblem,
    every_name: tuple[str, ...],
) -> FactorFit:
    """Fit the chosen factors; those of ``every_name`` that are not chosen count as noise."""
    spread = _spread_of_rows(chosen, problem, every_name)
    prior = np.array([PRIOR_SPREAD[name] for name in chosen])
    precision = np.diag(1.0 / prior**2)

    def value(theta: Array) -> Array:
        return problem.value(chosen, theta)

    # Gauss and Newton, with Huber's weights
    theta = np.zeros(len(chosen))
    start = problem.target - value(theta)
    residual = start
    weight = np.ones(len(start))
    jacobian = np.zeros((len(start), len(chosen)))
    for _ in range(STEPS if chosen and len(problem.rows) else 0):
        jacobian = _differentiate_factors(value, theta, problem.target - residual)
        off = np.maximum(np.abs(residual), 1e-12)
        weight = np.minimum(1.0, CALIBRATION.huber_limit * spread / off)
        scaled = (weight / spread**2)[:, np.newaxis] * jacobian
        slope = scaled.T @ residual - precision @ theta
        step = np.linalg.solve(jacobian.T @ scaled + precision, slope)
        theta = theta + np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)
        residual = problem.target - value(theta)
        if np.abs(step).max() < _SETTLED:
            break

    # residuals left out, of the linearised problem
    hessian = jacobian.T @ ((weight / spread**2)[:, np.newaxis] * jacobian) + precision
    covariance = np.linalg.inv(hessian) if chosen else np.zeros((0, 0))
    leverage = np.einsum("ij,jk,ik->i", jacobian, covariance, jacobian) * weight / spread**2
    return FactorFit(
        chosen=chosen,
        theta=theta,
        deviation=np.sqrt(np.diag(covariance)) if chosen else np.zeros(0),
        start=start,
        residual=residual,
        left_out=residual / np.maximum(1.0 - leverage, _LEAST_LEFT),
        spread=spread,
        reach=float(np.sum((jacobian * prior) ** 2)),
    )


def _spread_of_rows(
    chosen: tuple[str, ...],
    problem: FactorProblem,
    every_name: tuple[str, ...],
) -> Array:
    """Return the deviation of each entry: its own, and what factors outside the set may add."""
    spreads = dict(problem.scatter)
    for name in every_name:
        if name not in chosen:
            spreads[name] = PRIOR_SPREAD[name]
    variance = np.full(len(problem.target), problem.noise**2)
    if spreads and len(problem.rows):
        names = tuple(spreads)

        def value(theta: Array) -> Array:
            return problem.value(names, theta)

        slopes = _differentiate_factors(value, np.zeros(len(names)), problem.model({}))
        variance += (slopes**2) @ np.array(list(spreads.values())) ** 2
    return np.asarray(np.sqrt(variance))


def _differentiate_factors(
    value: Callable[[Array], Array],
    theta: Array,
    here: Array,
) -> Array:
    """Return the slopes of ``value``, which is ``here`` at ``theta``, ``(row, factor)``."""
    moved_points = theta + DIFFERENCE * np.eye(len(theta))
    slopes = [(value(point) - here) / DIFFERENCE for point in moved_points]
    return np.stack(slopes, axis=-1)


def _remember_factors(
    model: Callable[[Mapping[str, float]], Array],
) -> Callable[[Mapping[str, float]], Array]:
    """Return ``model`` that computes each choice of factors once: sets of factors share many.

    A factor that changes nothing is none, so that all sets begin at the same point.
    """
    results: dict[frozenset[tuple[str, float]], Array] = {}

    def recall(factors: Mapping[str, float]) -> Array:
        moved = {
            name: value
            for name, value in factors.items()
            if value != (0.0 if name == IDLE_OFFSET else 1.0)
        }
        key = frozenset(moved.items())
        if key not in results:
            results[key] = model(moved)
        return results[key]

    return recall


def _exponentiate_factors(
    chosen: tuple[str, ...],
    theta: Array,
    idle_w: float,
) -> dict[str, float]:
    factors = {}
    for name, value in zip(chosen, theta, strict=True):
        factors[name] = float(value * idle_w if name == IDLE_OFFSET else np.exp(value))
    return factors


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
        ends = forecast.residuals[family]
        residuals[family] = ResidualEnds(
            shrink_ends(ends.latency, latency), shrink_ends(ends.power, power), ends.rows
        )
    assumptions = [note for note in forecast.assumptions if not note.startswith("forecast:")]
    assumptions.append(provenance.note)
    return replace(
        bundle,
        status=FitStatus.CALIBRATED,
        provenance=provenance,
        residuals=residuals,
        assumptions=tuple(assumptions),
    )


def shrink_ends(forecast: tuple[float, float], left_out: Array) -> tuple[float, float]:
    """Average the variances of rows left out and of the forecast's interval, weighted by the number
    of rows.
    """
    if left_out.size < _FEW_ROWS:
        left_out = np.zeros(0)
    prior_rows = CALIBRATION.prior_rows
    row_variance = np.sum((_NORMAL_P90 * left_out) ** 2)
    ends = []
    for end in forecast:
        log_end = np.log(end)
        variance = (prior_rows * log_end**2 + row_variance) / (prior_rows + left_out.size)
        ends.append(float(np.exp(np.sign(log_end) * np.sqrt(variance))))
    return ends[0], ends[1]
