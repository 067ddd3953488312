"""Move the forecast of a card by the rows of that card, as far as they support it.

With 50 rows there are six per family: too few to fit corrections and energies from nothing. So the
card's forecast (carried over from a card that was measured well) is the prior mean, and its rows
move it at three levels, each drawn to the one above: the card, a family, a group of kernels. Near
the forecast, y = log(measured / forecast) is linear,

    y = J·θ + ε,   θ_j ~ N(0, τ_level(j)²),   ε_i ~ N(0, (σ·s_family(i))²)

with J the slopes of log time by the corrections of cycles, device memory and fixed time (of log
power by the energies of modules). The spreads τ and σ are those that make the rows likeliest, with
weak priors [Rasmussen2006, 5.4.1], so that rows without information leave the forecast as it is.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from wattcast.calibrate.kernel_rows import (
    KernelRows,
    assign_folds,
    on_random_data,
    settled_figures,
)
from wattcast.calibrate.row_prediction import (
    measure_parts,
    predict_bursts_s,
    predict_with_bundle,
)
from wattcast.calibrate.scoring import lowers_error, percent_errors
from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array
from wattcast.core.strict_files import FitStatus
from wattcast.hardware import Gpu
from wattcast.kernels import build_kernels
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.kernel_phases import Correction, find_correction

NEWTON_STEPS = 6
_NORMAL_P90 = 1.645  # of |x|, x standard normal
_SETTLED = 1e-3  # step of a log that ends a fit
_NO_EVIDENCE = 1e10  # cost of spreads whose covariance is singular
_LOG_SPREADS = (-7.0, 2.0)  # between which the search for spreads stays
_FARTHEST = 0.7  # of one step, in logs
_SLOPE_STEP = 0.02  # of a log, by which slopes are taken
MOVED_PHASES = ("cycles", "memory", "fixed")
_WIDTH = len(MOVED_PHASES)
TIME_LEVELS: tuple[tuple[str, ...], ...] = (
    (),
    ("card",),
    ("card", "family"),
    ("card", "family", "group"),
)
ENERGY_LEVELS: tuple[tuple[str, ...], ...] = ((), ("card",), ("card", "module"))
LEVEL_FOLDS = 5
LEAST_MOVING_ROWS = 5  # of a kind, to move anything


class ForecastShiftCoefficients(Coefficients):
    """How far a forecast may be off, in logs, where the search for it starts, and what must be
    gained.
    """

    card_time: float
    family_time: float
    group_time: float
    card_energy: float
    module_energy: float
    least_deviation: float  # of a family's own rows
    level_spread: float  # of the prior on each spread around where it starts
    student_freedom: float  # of Student's t, whose weights let odd rows count less [Lange1989]
    gain_errors: float  # standard errors by which a further level must lower the held-out error


SHIFT = load_coefficients("forecast_shift", ForecastShiftCoefficients)


@dataclass(frozen=True)
class ShrinkageLevel:
    """Columns of J that share a spread τ, and τ where the search starts."""

    columns: Sequence[int]
    spread: float


def shrink_towards_forecast(
    residual: Callable[[Array], Array],
    slopes: Callable[[Array], Array],
    levels: Sequence[ShrinkageLevel],
    scale: Array,
) -> Array:
    """Find the θ of highest posterior density by Gauss and Newton, with spreads by marginal
    likelihood at each step.

    ``residual(θ)`` is log(measured / model) ``(row,)``, ``slopes(θ)`` is J ``(row, coefficient)``,
    ``scale`` the families' own deviations ``(row,)``.
    """
    count = 1 + max(column for level in levels for column in level.columns)
    theta = np.zeros(count)
    weight = np.ones(len(scale))
    hyper = np.log([*(level.spread for level in levels), 1.0])
    start = hyper.copy()
    here = residual(theta)
    for _ in range(NEWTON_STEPS):
        jacobian = slopes(theta)
        target = here + jacobian @ theta  # residual of the linearised model at θ = 0
        noise = scale / np.sqrt(weight)
        hyper = _fit_spreads(
            hyper,
            start,
            jacobian,
            target,
            levels,
            noise,
        )
        prior = np.zeros(count)
        for level, log_spread in zip(levels, hyper[:-1], strict=True):
            prior[list(level.columns)] = np.exp(2.0 * log_spread)
        row_variance = np.exp(2.0 * hyper[-1]) * noise**2
        covariance = (jacobian * prior) @ jacobian.T + np.diag(row_variance)
        optimum = np.linalg.solve(covariance, jacobian * prior).T @ target
        step = np.clip(optimum - theta, -_FARTHEST, _FARTHEST)
        theta = theta + step
        here = residual(theta)
        squared = (here / (np.exp(hyper[-1]) * scale)) ** 2
        weight = (SHIFT.student_freedom + 1.0) / (SHIFT.student_freedom + squared)
        if np.abs(step).max() < _SETTLED:
            break
    return theta


def _fit_spreads(
    hyper: Array,
    start: Array,
    jacobian: Array,
    target: Array,
    levels: Sequence[ShrinkageLevel],
    noise: Array,
) -> Array:
    """Fit log τ and log σ by maximum marginal likelihood [Rasmussen2006, Eq. 5.8]."""
    from scipy.linalg import (
        LinAlgError,
        cho_factor,
        cho_solve,
    )
    from scipy.optimize import minimize

    blocks = [jacobian[:, list(level.columns)] for level in levels]
    grams = [block @ block.T for block in blocks]

    def negative_evidence(value: Array) -> float:
        covariance = np.diag(np.exp(2.0 * value[-1]) * noise**2)
        for gram, log_spread in zip(grams, value[:-1], strict=True):
            covariance = covariance + np.exp(2.0 * log_spread) * gram
        try:
            factor = cho_factor(covariance, lower=True)
        except LinAlgError:
            return _NO_EVIDENCE
        misfit = target @ cho_solve(factor, target)
        pull = ((value - start) / SHIFT.level_spread) ** 2
        return float(0.5 * misfit + np.log(np.diag(factor[0])).sum() + 0.5 * pull.sum())

    bounds = [_LOG_SPREADS] * len(hyper)
    return np.asarray(minimize(negative_evidence, hyper, method="L-BFGS-B", bounds=bounds).x)


@dataclass(frozen=True)
class MovedQuantity:
    """The levels that moved one quantity, and how far held-out rows were off."""

    levels: tuple[str, ...]  # empty: the forecast stands
    forecast: float  # mean absolute error in percent, of the forecast
    held_out: float  # and of what was chosen, held out


@dataclass(frozen=True)
class InheritedFit:
    """A forecast moved by rows."""

    bundle: Bundle
    latency: MovedQuantity
    power: MovedQuantity


IdleRows = list[tuple[float, float, float]]  # clock (Hz), power (W), temperature (C)


def move_forecast(
    rows: KernelRows,
    gpu: Gpu,
    forecast: Bundle,
    idle: IdleRows,
) -> InheritedFit:
    """Move the forecast of ``gpu`` by ``rows`` (and idle rows) of the card as far as they
    support.
    """
    mover = _Mover(TIME_LEVELS, shift_latency, _latency_log_ratio)
    latency, bundle = _best_levels(take_bursts(rows), gpu, scale_idle(forecast, idle), mover)
    power, bundle = shift_energies(rows, gpu, bundle)
    return InheritedFit(bundle, latency, power)


@dataclass(frozen=True)
class _Mover:
    """Sets of levels to try, and how rows move one quantity of a bundle."""

    sets: Sequence[tuple[str, ...]]
    move: Callable[[KernelRows, Gpu, Bundle, tuple[str, ...]], Bundle]
    log_ratio: Callable[[KernelRows, Gpu, Bundle], Array]  # log(measured / predicted)


def shift_energies(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
) -> tuple[MovedQuantity, Bundle]:
    """Move the energies of a bundle by sustained rows as far as they support.

    A bundle fitted to other cards of this name moves at all levels: they differ, and no error falls
    at the limit.
    """
    least = -np.inf if bundle.status is FitStatus.MEASURED else SHIFT.gain_errors
    mover = _Mover(ENERGY_LEVELS, shift_power, _power_log_ratio)
    return _best_levels(
        take_sustained(rows),
        gpu,
        bundle,
        mover,
        least,
    )


def take_bursts(rows: KernelRows) -> KernelRows:
    """Return the bursts on random data that have a latency and no flag."""
    usable = on_random_data(rows) & rows.fit & np.isfinite(rows.column("latency_s"))
    return rows.select_rows(rows.is_kind("burst") & usable)


def take_sustained(rows: KernelRows) -> KernelRows:
    """Return the sustained rows on random data that have watts and a clock and no flag."""
    power_w, clock_hz, _ = settled_figures(rows)
    usable = on_random_data(rows) & rows.fit & np.isfinite(power_w) & np.isfinite(clock_hz)
    return rows.select_rows(rows.is_kind("sustained") & usable)


def _best_levels(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
    mover: _Mover,
    least: float = SHIFT.gain_errors,
) -> tuple[MovedQuantity, Bundle]:
    """Choose levels that lower the held-out error, each further level by some standard errors
    [Breiman1984].
    """
    fold = np.zeros(0, dtype=np.int64)
    if len(rows):
        fold = assign_folds(rows, min(LEVEL_FOLDS, len(rows)))
    sets = mover.sets if len(rows) >= LEAST_MOVING_ROWS else mover.sets[:1]
    best: tuple[str, ...] = ()
    log_ratios: dict[tuple[str, ...], Array] = {}  # held out
    for levels in sets:
        log_ratio = np.full(len(rows), np.nan)
        for number in np.unique(fold):
            held_out = fold == number
            moved = mover.move(rows.select_rows(~held_out), gpu, bundle, levels)
            log_ratio[held_out] = mover.log_ratio(rows.select_rows(held_out), gpu, moved)
        log_ratios[levels] = log_ratio
        if levels and lowers_error(log_ratios[best], log_ratio, least):
            best = levels

    def mean_error(levels: tuple[str, ...]) -> float:
        log_ratio = log_ratios[levels]
        return float(percent_errors(log_ratio).mean()) if log_ratio.size else float("nan")

    quantity = MovedQuantity(best, forecast=mean_error(()), held_out=mean_error(best))
    return quantity, mover.move(rows, gpu, bundle, best)


def scale_idle(bundle: Bundle, rows: IdleRows) -> Bundle:
    """Scale the idle curve of a bundle to idle rows (clock, power, temperature), where there are
    any.
    """
    power = bundle.power
    if not rows or not power.scalable_parts:
        return bundle
    ratios = [watts / power.idle_power_w(hertz, degrees) for hertz, watts, degrees in rows]
    factor = float(np.median(ratios))
    return replace(bundle, power=power.scale_energy({}, idle_factor=factor))


def _latency_log_ratio(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
) -> Array:
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        bundle.reference,
        (),
    )
    return np.log(rows.column("latency_s")) - np.log(predict_bursts_s(kernels, gpu, bundle))


def shift_latency(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
    levels: tuple[str, ...],
) -> Bundle:
    """Move the corrections of a bundle by bursts, at these levels."""
    if not levels:
        return bundle
    kernels = build_kernels(
        rows.ops,
        rows.conditions,
        gpu,
        bundle.reference,
        (),
    )
    row_groups = list(kernels.work.kernel_family) if "group" in levels else []
    row_families: list[str] = []
    if "family" in levels:
        row_families = [group.partition(".")[0] for group in kernels.work.kernel_family]
    families = list(dict.fromkeys(row_families))
    groups = list(dict.fromkeys(row_groups))
    of_family = _mark_names(row_families, families, len(rows))
    of_group = _mark_names(row_groups, groups, len(rows))
    log_measured = np.log(rows.column("latency_s"))

    def moved(theta: Array) -> Bundle:
        corrections = move_corrections(bundle.corrections, theta, families, groups)
        return replace(bundle, corrections=corrections)

    @lru_cache(maxsize=1)  # slopes are taken where a residual was just found
    def log_s_of(theta: tuple[float, ...]) -> Array:
        return np.log(predict_bursts_s(kernels, gpu, moved(np.array(theta))))

    def log_s(theta: Array) -> Array:
        return log_s_of(tuple(theta.tolist()))

    def residual(theta: Array) -> Array:
        return np.asarray(log_measured - log_s(theta))

    def slopes(theta: Array) -> Array:
        here = log_s(theta)
        aside = theta + _SLOPE_STEP * np.eye(len(theta))[:_WIDTH]
        columns = [(log_s(point) - here) / _SLOPE_STEP for point in aside]
        by_phase = np.stack(columns, axis=-1)  # (row, phase)
        by_family = (of_family[:, :, None] * by_phase[:, None, :]).reshape(len(here), -1)
        return np.concatenate([by_phase, by_family, of_group], axis=-1)

    widths = (_WIDTH, _WIDTH * len(families), len(groups))
    spreads = (SHIFT.card_time, SHIFT.family_time, SHIFT.group_time)
    shrinkage = []
    first = 0
    for width, spread in zip(widths, spreads, strict=True):
        if width:
            shrinkage.append(ShrinkageLevel(range(first, first + width), spread))
        first += width
    scale = np.array([forecast_deviation(bundle, family, "latency") for family in rows.family])
    return moved(shrink_towards_forecast(residual, slopes, shrinkage, scale))


def _mark_names(
    row_names: Sequence[str],
    names: Sequence[str],
    row_count: int,
) -> Array:
    """Return 1 where a row belongs to a name, else 0, ``(row, name)``."""
    marks = np.zeros((row_count, len(names)))
    for row, name in enumerate(row_names):
        marks[row, names.index(name)] = 1.0
    return marks


def forecast_deviation(
    bundle: Bundle,
    family: str,
    quantity: str,
) -> float:
    """Return the standard deviation in logs of a family by the forecast's own interval."""
    low, high = getattr(bundle.residuals[family], quantity)
    return max(float(np.log(high / low)) / (2 * _NORMAL_P90), SHIFT.least_deviation)


def move_corrections(
    corrections: Mapping[str, Correction],
    theta: Array,
    families: list[str],
    groups: list[str],
) -> dict[str, Correction]:
    """Move corrections by card, family and group; a group that the forecast lacks gets its own."""
    of_family = theta[_WIDTH : _WIDTH * (1 + len(families))].reshape(len(families), _WIDTH)
    of_group = theta[_WIDTH * (1 + len(families)) :]
    moved = {}
    for name in dict.fromkeys((*corrections, *groups)):
        family = name.partition(".")[0]
        shift = theta[:_WIDTH].copy()
        if family in families:
            shift += of_family[families.index(family)]
        if name in groups:
            shift += of_group[groups.index(name)]
        cycles, memory, fixed = np.exp(shift).tolist()
        c = find_correction(name, corrections)
        moved[name] = Correction(
            compute=c.compute * cycles,
            memory=c.memory * memory,
            fixed_s=c.fixed_s * fixed,
            l2=c.l2 * cycles,
            serial_cycle=c.serial_cycle * cycles,
        )
    return moved


def _power_log_ratio(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
) -> Array:
    measured_w, _, _ = settled_figures(rows)
    predicted_w = predict_with_bundle(bundle, rows, gpu)[:, 1]
    return np.asarray(np.log(measured_w / predicted_w))


def shift_power(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
    levels: tuple[str, ...],
) -> Bundle:
    """Move the energies of a bundle by sustained rows, at these levels."""
    power = bundle.power
    if not levels or not power.scalable_parts:
        return bundle
    measured_w, _, _ = settled_figures(rows)
    part_w = measure_parts(rows, gpu, bundle)
    modules = [part for part in power.parts if part in power.scalable_parts]
    is_scalable = np.isin(power.parts, modules)
    still_w = part_w[:, ~is_scalable].sum(axis=-1)
    dynamic_w = part_w[:, is_scalable]
    by_module = "module" in levels
    module_count = len(modules) if by_module else 0

    def factors(theta: Array) -> Array:
        """Return the factor of each module."""
        shift = theta[1:] if by_module else np.zeros(len(modules))
        return np.asarray(np.exp(theta[0] + shift))

    def residual(theta: Array) -> Array:
        total_w = still_w + (dynamic_w * factors(theta)).sum(axis=-1)
        return np.asarray(np.log(measured_w) - np.log(total_w))

    def slopes(theta: Array) -> Array:
        scaled_w = dynamic_w * factors(theta)
        share = scaled_w / (still_w + scaled_w.sum(axis=-1))[:, None]
        of_card = share.sum(axis=-1, keepdims=True)
        return np.concatenate([of_card, share[:, :module_count]], axis=-1)

    shrinkage = [ShrinkageLevel(range(1), SHIFT.card_energy)]
    if by_module:
        shrinkage.append(ShrinkageLevel(range(1, 1 + module_count), SHIFT.module_energy))
    scale = np.array([forecast_deviation(bundle, family, "power") for family in rows.family])
    theta = shrink_towards_forecast(residual, slopes, shrinkage, scale)
    energy_factors = dict(zip(modules, factors(theta).tolist(), strict=True))
    return replace(bundle, power=power.scale_energy(energy_factors))
