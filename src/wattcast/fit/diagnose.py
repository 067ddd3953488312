"""What a fit knows and does not know: standard errors, intervals, collinearity, and warnings in words.

Rows of one benchmark share what the model misses, so errors are clustered by benchmark
(sandwich covariance [White1980, Liang1986]); plain least-squares errors would be several times too
small on a clock plane. Voltages are free parameters here too, so their uncertainty reaches the costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.fit.choose import Fit
from wattcast.fit.gram import Mask
from wattcast.fit.solve import check_rank
from wattcast.fit.table import CounterTable
from wattcast.fit.voltage import factors, jacobian, projected

HIGH_VIF = 10.0
HIGH_CONDITION = 30.0  # of unit columns [Belsley1980]
LEVEL = 0.95
UNCERTAIN_VOLTAGE = 0.05  # standard error of a relative voltage beyond which it says little


@dataclass(frozen=True)
class Coefficient:
    """One cost, as fitted."""

    name: str
    value: float  # in the unit of the model: W, J, farad
    standard_error: float | None  # None: held at its bound
    low: float
    high: float
    largest_w: float  # watts at the largest value in the table, at relative voltage 1
    vif: float | None


@dataclass(frozen=True)
class Diagnosis:
    """Coefficients, conditioning, voltage errors, and what to beware of."""

    coefficients: tuple[Coefficient, ...]
    condition: float
    voltage_error: Array  # (point, 2), standard errors of the relative voltages
    warnings: tuple[str, ...]


def diagnose(fit: Fit, table: CounterTable, train: Mask) -> Diagnosis:
    """Errors and warnings of a fit to the benchmarks of ``train``; refuses a singular design."""
    felt, _ = factors(fit.grams, fit.inferred.voltage)
    gram = fit.grams.summed(train)
    total = (gram[:, :-1, :-1] * felt[:, :, np.newaxis] * felt[:, np.newaxis, :]).sum(axis=0)
    check_rank(total, fit.design.names, table.name)
    covariance, free = _covariance(fit, train)
    width = fit.grams.width
    error = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    factor = t_factor(int(train.sum()) - 1)
    vif = inflation(total)
    coefficients = tuple(
        _coefficient(fit, j, float(error[j]) if free[j] else None, factor, vif[j]) for j in range(width)
    )
    _, slope = fit.how.at(fit.inferred.theta)
    voltage_error = np.sqrt(np.maximum(np.einsum("pri,ij,prj->pr", slope, covariance[width:, width:], slope), 0.0))
    number = condition(total)
    words = _words(fit, coefficients, number)
    return Diagnosis(coefficients, number, voltage_error, tuple(words))


def _covariance(fit: Fit, train: Mask) -> tuple[Array, Mask]:
    """Clustered covariance of coefficients and voltage rises; zero for coefficients held at their bound."""
    columns = jacobian(fit.grams, fit.how, fit.inferred.theta, fit.inferred.coefficient)
    width = fit.grams.width
    free = np.ones(columns.shape[-1] - 1, dtype=bool)
    bound = np.array([not signed for signed in fit.signed])
    free[:width] = ~(bound & (fit.inferred.coefficient <= 0))
    moved = np.diag(projected(fit.grams.summed(train), columns))[:-1] > 0
    free &= moved
    felt, _ = factors(fit.grams, fit.inferred.voltage)
    miss = np.concatenate([-felt * fit.inferred.coefficient, np.ones((felt.shape[0], 1))], axis=1)
    cells = fit.grams.cell[train]
    score = np.einsum("pij,bpi->bj", columns[:, :, :-1], np.einsum("bpij,pj->bpi", cells, miss))
    bread = projected(fit.grams.summed(train), columns)[:-1, :-1]
    if fit.penalty is not None:
        bread[:width, :width] += fit.penalty
    index = np.flatnonzero(free)
    unit = np.sqrt(np.diag(bread))[index]
    inner = np.linalg.inv(bread[np.ix_(index, index)] / unit / unit[:, np.newaxis] + 1e-10 * np.eye(index.size))
    half = inner @ (score[:, index] / unit).T
    count = int(train.sum())
    out = np.zeros((free.size, free.size))
    out[np.ix_(index, index)] = (half @ half.T) / unit / unit[:, np.newaxis] * count / max(count - 1, 1)
    return out, free


def _coefficient(fit: Fit, j: int, error: float | None, factor: float, vif: float | None) -> Coefficient:
    scale = float(fit.grams.scale[j])
    scaled = float(fit.inferred.coefficient[j])
    spread = factor * error if error is not None else 0.0
    low = scaled - spread if fit.signed[j] else max(scaled - spread, 0.0)
    return Coefficient(
        fit.design.names[j],
        scaled / scale,
        error / scale if error is not None else None,
        low / scale,
        (scaled + spread) / scale,
        scaled,
        vif,
    )


def inflation(total: Array) -> list[float | None]:
    """Variance inflation of each column given the others; the base, which is the first, has none."""
    base = total[0]
    rest = (total - np.outer(base, base) / total[0, 0])[1:, 1:]
    size = np.sqrt(np.maximum(np.diag(rest), 0.0))
    seen = size > 1e-9 * np.sqrt(np.diag(total))[1:]
    out: list[float | None] = [None] * total.shape[0]
    index = np.flatnonzero(seen)
    if index.size:
        correlation = rest[np.ix_(index, index)] / size[index] / size[index][:, np.newaxis]
        for at, value in zip(index, np.diag(np.linalg.inv(correlation + 1e-12 * np.eye(index.size))), strict=True):
            out[int(at) + 1] = float(value)
    return out


def condition(total: Array) -> float:
    size = np.sqrt(np.diag(total))
    value = np.linalg.eigvalsh(total / size / size[:, np.newaxis])
    return float(np.sqrt(value[-1] / max(value[0], 1e-300)))


def _words(fit: Fit, coefficients: tuple[Coefficient, ...], condition: float) -> list[str]:
    words = []
    if condition > HIGH_CONDITION:
        words.append(
            f"Condition number {condition:.0f} (over {HIGH_CONDITION:.0f}): some costs can be traded for others. "
            "Trust totals more than single coefficients."
        )
    high = [c for c in coefficients if c.vif is not None and c.vif > HIGH_VIF]
    if high:
        listed = ", ".join(f"{c.name} ({c.vif:.0f})" for c in sorted(high, key=lambda c: -(c.vif or 0.0)))
        words.append(f"Variance inflation over {HIGH_VIF:.0f}: {listed}. These move together over the benchmarks.")
    at_zero = [c.name for c in coefficients if c.standard_error is None]
    if at_zero:
        words.append(
            f"Held at zero, where least squares would go negative or the data say nothing: {', '.join(at_zero)}."
        )
    negative = [c for c in coefficients if c.value < 0 and "offset" not in c.name]
    if negative:
        listed = ", ".join(f"{c.name} ({c.largest_w:.3g} W at the most)" for c in negative)
        words.append(
            f"Negative, which no circuit is: {listed}. Use the non-negative estimator, or better benchmarks."
        )
    unsure = [c.name for c in coefficients if c.standard_error and c.low <= 0.0 <= c.high and "offset" not in c.name]
    if unsure:
        words.append(f"Not distinguishable from zero at {LEVEL:.0%}: {', '.join(unsure)}.")
    if not fit.inferred.converged:
        words.append("The voltage fit did not converge; treat voltages and costs with care.")
    return words


def t_factor(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + LEVEL / 2.0, max(freedom, 1)))
