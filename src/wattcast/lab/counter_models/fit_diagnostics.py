"""Diagnose a fit (standard errors, intervals, collinearity, warnings) and say how many training
clocks are enough.

Rows of one benchmark share the model's error, so standard errors are clustered by benchmark
(sandwich covariance [White1980, Liang1986]); plain least-squares errors would be several times too
small on a clock plane. Voltages are free parameters as well, so their uncertainty reaches the
costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.lab.counter_models import rail_terms
from wattcast.lab.counter_models.counter_table import CounterTable
from wattcast.lab.counter_models.model_selection import (
    INNER_FOLDS,
    FitSettings,
    FitWorkbench,
    TermsFit,
    deal_folds,
    mean_absolute_error_percent,
)

HIGH_VIF = 10.0
HIGH_CONDITION = 30.0  # of unit columns [Belsley1980]
CONFIDENCE_LEVEL = 0.95
UNCERTAIN_VOLTAGE = 0.05  # standard error of a relative voltage beyond which it says little
ENOUGH_RATIO = 1.05  # times the error with all clocks
CLOCK_COUNTS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class FittedCost:
    """One fitted cost with its uncertainty."""

    name: str
    value: float  # in the unit of the model: W, J, farad
    standard_error: float | None  # None: held at its bound
    low: float
    high: float
    largest_w: float  # watts at the largest value in the table, at relative voltage 1
    vif: float | None

    @property
    def may_be_zero(self) -> bool:
        """Whether the interval includes zero."""
        return self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class FitDiagnosis:
    """Costs, conditioning and voltage errors of a fit, and warnings in words."""

    coefficients: tuple[FittedCost, ...]
    condition: float
    voltage_error: Array  # (point, 2), standard errors of the relative voltages
    warnings: tuple[str, ...]


def diagnose_fit(
    fit: TermsFit,
    table: CounterTable,
    train: Mask,
) -> FitDiagnosis:
    """Diagnose a fit to the benchmarks of ``train``; a singular design is refused."""
    total = fit.sum_grams(train)
    rail_terms.check_rank(total, fit.terms.names, table.name)
    covariance, free = _estimate_covariance(fit, train)
    width = fit.grams.scale.size
    error = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    factor = interval_factor(int(train.sum()) - 1)
    vif = variance_inflation(total)
    costs = []
    for term, name in enumerate(fit.terms.names):
        scale = float(fit.grams.scale[term])
        scaled_cost = float(fit.inferred.coefficient[term])  # watts at the largest value
        half_width = factor * float(error[term])
        low = scaled_cost - half_width
        if not fit.signed[term]:
            low = max(low, 0.0)
        costs.append(
            FittedCost(
                name=name,
                value=scaled_cost / scale,
                standard_error=float(error[term]) / scale if free[term] else None,
                low=low / scale,
                high=(scaled_cost + half_width) / scale,
                largest_w=scaled_cost,
                vif=vif[term],
            )
        )
    _, slope = fit.how.voltages(fit.inferred.theta)
    variance = np.einsum("pri,ij,prj->pr", slope, covariance[width:, width:], slope)
    voltage_error = np.sqrt(np.maximum(variance, 0.0))
    number = condition_number(total)
    words = warn_about_costs(costs, number)
    if not fit.inferred.converged:
        words.append("The voltage fit did not converge; treat voltages and costs with care.")
    return FitDiagnosis(tuple(costs), number, voltage_error, tuple(words))


def _estimate_covariance(fit: TermsFit, train: Mask) -> tuple[Array, Mask]:
    """Return the clustered covariance of costs and voltage rises, and which of them are free.

    Σ = n/(n-1) · B⁻¹·(Σ_b s_b·s_bᵀ)·B⁻¹ with the bread B = JᵀJ + penalty and the score s_b of
    benchmark b; zero for costs held at their bound."""
    columns = rail_terms.fit_jacobian(
        fit.terms, fit.how, fit.inferred.theta, fit.inferred.coefficient
    )
    width = fit.grams.scale.size
    free = np.ones(columns.shape[-1] - 1, dtype=bool)
    free[:width] = np.array(fit.signed) | (fit.inferred.coefficient > 0)
    bread = rail_terms.project_grams(fit.grams.summed(train), columns)[:-1, :-1]
    free &= np.diag(bread) > 0
    if fit.penalty is not None:
        bread[:width, :width] += fit.penalty

    index = np.flatnonzero(free)
    unit = np.sqrt(np.diag(bread))[index]
    correlation = bread[np.ix_(index, index)] / unit / unit[:, np.newaxis]
    inverse = np.linalg.inv(correlation + 1e-10 * np.eye(index.size))
    score = _score_benchmarks(fit, train, columns)
    half = inverse @ (score[:, index] / unit).T
    count = int(train.sum())
    covariance = np.zeros((free.size, free.size))
    covariance[np.ix_(index, index)] = (
        (half @ half.T) / unit / unit[:, np.newaxis] * count / max(count - 1, 1)
    )
    return covariance, free


def _score_benchmarks(
    fit: TermsFit,
    train: Mask,
    columns: Array,
) -> Array:
    """Return the score s_b of each benchmark, its gradient of the squares, ``(benchmark,
    parameter)``.
    """
    felt, _ = fit.terms.voltage_factors(fit.inferred.voltage)
    target = np.ones((felt.shape[0], 1))
    miss = np.concatenate([-felt * fit.inferred.coefficient, target], axis=1)
    missed = np.einsum("bpij,pj->bpi", fit.grams.cell[train], miss)
    return np.asarray(np.einsum("pij,bpi->bj", columns[:, :, :-1], missed))


def variance_inflation(total: Array) -> list[float | None]:
    """Return the variance inflation 1/(1-R²) of each column given the others; the first, the base,
    has none.
    """
    base = total[0]
    residual = (total - np.outer(base, base) / total[0, 0])[1:, 1:]
    size = np.sqrt(np.maximum(np.diag(residual), 0.0))
    varies = size > 1e-9 * np.sqrt(np.diag(total))[1:]
    inflation: list[float | None] = [None] * total.shape[0]
    index = np.flatnonzero(varies)
    if index.size:
        unit = size[index]
        correlation = residual[np.ix_(index, index)] / unit / unit[:, np.newaxis]
        inverse = np.linalg.inv(correlation + 1e-12 * np.eye(index.size))
        for column, value in zip(index.tolist(), np.diag(inverse).tolist(), strict=True):
            inflation[column + 1] = value
    return inflation


def condition_number(total: Array) -> float:
    """Return the condition number of a design from the Gram of its columns, scaled to unit length
    [Belsley1980].
    """
    size = np.sqrt(np.diag(total))
    value = np.linalg.eigvalsh(total / size / size[:, np.newaxis])
    return float(np.sqrt(value[-1] / max(value[0], 1e-300)))


def warn_about_costs(coefficients: list[FittedCost], condition: float) -> list[str]:
    """Return sentences on costs that the benchmarks determine badly."""
    words = []
    if condition > HIGH_CONDITION:
        words.append(
            f"Condition number {condition:.0f} (over {HIGH_CONDITION:.0f}): some costs can "
            "be traded for others. Trust totals more than single coefficients."
        )
    words += _warn_about_inflation(coefficients)
    at_zero = [cost.name for cost in coefficients if cost.standard_error is None]
    if at_zero:
        why = "where least squares would go negative or the data say nothing"
        words.append(f"Held at zero, {why}: {', '.join(at_zero)}.")
    # an offset of the memory clock may have either sign
    circuits = [cost for cost in coefficients if "offset" not in cost.name]
    negative = [cost for cost in circuits if cost.value < 0]
    if negative:
        listed = ", ".join(f"{cost.name} ({cost.largest_w:.3g} W at the most)" for cost in negative)
        words.append(
            f"Negative, which no circuit is: {listed}. Use the non-negative estimator, or "
            "better benchmarks."
        )
    unsure = [cost.name for cost in circuits if cost.standard_error and cost.may_be_zero]
    if unsure:
        words.append(
            f"Not distinguishable from zero at {CONFIDENCE_LEVEL:.0%}: {', '.join(unsure)}."
        )
    return words


def _warn_about_inflation(coefficients: list[FittedCost]) -> list[str]:
    """Return a sentence on costs with a high variance inflation, the highest first."""
    inflation = {cost.name: cost.vif for cost in coefficients if cost.vif is not None}
    high = {name: vif for name, vif in inflation.items() if vif > HIGH_VIF}
    if not high:
        return []
    ranked = sorted(high, key=lambda name: -high[name])
    listed = ", ".join(f"{name} ({high[name]:.0f})" for name in ranked)
    return [
        f"Variance inflation over {HIGH_VIF:.0f}: {listed}. These move together over "
        "the benchmarks."
    ]


def interval_factor(freedom: int) -> float:
    """Return the quantile of Student's t that turns a standard error into half a 95 % interval."""
    from scipy.special import stdtrit  # what scipy.stats calls, which takes a second to import

    return float(stdtrit(max(freedom, 1), 0.5 + CONFIDENCE_LEVEL / 2.0))


@dataclass(frozen=True)
class ClockSubset:
    """The error over the whole clock plane after training on only some of its clocks."""

    core_hz: tuple[float, ...]
    memory_hz: tuple[float, ...]
    points: int
    mape: float
    default_known: float | None  # with the power at the default clocks known


def try_training_clocks(
    bench: FitWorkbench,
    model: rail_terms.CounterModelKind,
    settings: FitSettings,
) -> list[ClockSubset]:
    """Return the held-out error for several numbers of training clocks, evenly spread, the
    reference among them.

    Benchmarks are held out in a few folds with fixed settings, so that only the clocks differ;
    costs and voltages are fitted at the training clocks, and voltages between them lie on straight
    lines."""
    table = bench.table
    core_reference_hz, memory_reference_hz = bench.reference_hz
    core_subsets = _choose_clock_subsets(bench.clock_hz, core_reference_hz, CLOCK_COUNTS)
    memory_subsets = _choose_clock_subsets(bench.memory_clock_hz, memory_reference_hz, (1, 2))
    subsets = []
    for core_hz, memory_hz in product(core_subsets, memory_subsets):
        clocks = np.isin(bench.clock_hz, core_hz) & np.isin(bench.memory_clock_hz, memory_hz)
        plain_w, anchored_w = _predict_from_clocks(bench, model, settings, clocks)
        anchored_error = None
        if bench.anchor is not None:
            anchored_error = mean_absolute_error_percent(anchored_w, table.power_w)
        subsets.append(
            ClockSubset(
                core_hz=core_hz,
                memory_hz=memory_hz,
                points=int(clocks.sum()),
                mape=mean_absolute_error_percent(plain_w, table.power_w),
                default_known=anchored_error,
            )
        )
    return sorted(subsets, key=lambda subset: subset.points)


def _choose_clock_subsets(
    clocks_hz: Array,
    reference_hz: float,
    counts: tuple[int, ...],
) -> list[tuple[float, ...]]:
    """Return distinct sets of a rail's clocks: so many of them as ``counts`` say, and all."""
    distinct_hz = np.unique(clocks_hz)
    sizes = [size for size in (*counts, distinct_hz.size) if size <= distinct_hz.size]
    subsets = [_spread_clocks(distinct_hz, size, reference_hz) for size in sizes]
    return list(dict.fromkeys(subsets))


def _predict_from_clocks(
    bench: FitWorkbench,
    model: rail_terms.CounterModelKind,
    settings: FitSettings,
    clocks: Mask,
) -> tuple[Array, Array]:
    """Return the watts of all rows, fitted to other benchmarks at some operating points, without
    and with the power at the default clocks known.
    """
    table = bench.table
    plain_w, anchored_w = np.zeros((2, table.rows))
    for fold in deal_folds(np.arange(table.benchmarks), INNER_FOLDS):
        fit = bench.fit(model, settings, ~fold, clocks)
        rows = fold[table.benchmark]
        plain_w[rows] = bench.predict(fit)[rows]
        if bench.anchor is not None:
            anchored_w[rows] = bench.anchored(fit)[rows]
    return plain_w, anchored_w


def smallest_sufficient_clocks(subsets: list[ClockSubset]) -> ClockSubset:
    """Return the smallest set of training clocks whose error is within 5 % of that with all
    clocks.
    """
    whole = max(subsets, key=lambda subset: subset.points)
    close = [subset for subset in subsets if subset.mape <= ENOUGH_RATIO * whole.mape]
    return min(close, key=lambda subset: (subset.points, subset.mape))


def _spread_clocks(
    clocks: Array,
    count: int,
    reference: float,
) -> tuple[float, ...]:
    """Choose ``count`` clocks: the reference, the farthest extreme, the others evenly between."""
    at = int(np.abs(clocks - reference).argmin())
    if count == 1:
        return (float(clocks[at]),)
    if count == 2:
        far = int(np.abs(clocks - clocks[at]).argmax())
        return tuple(sorted((float(clocks[at]), float(clocks[far]))))
    index = np.round(np.linspace(0, clocks.size - 1, count)).astype(int)
    if at not in index:
        index[1 + np.abs(index[1:-1] - at).argmin()] = at
    return tuple(clocks[np.unique(index)].tolist())
