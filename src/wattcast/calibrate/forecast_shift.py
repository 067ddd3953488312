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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.calibrate.kernel_rows import KernelRows, assign_folds, on_random_data, settled_figures
from wattcast.calibrate.row_prediction import analyse_row, predict_bursts_s, predict_with_bundle
from wattcast.calibrate.scoring import lowers_error, percent_errors
from wattcast.core.arrays import Array
from wattcast.core.strict_files import FitStatus
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import build_kernels
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.kernel_phases import Correction, find_correction
from wattcast.predictor.pipeline import kernel_activity
from wattcast.predictor.timeline import compute_effective_hz

NEWTON_STEPS = 6


STUDENT_FREEDOM = 4.0  # of Student's t, whose weights let odd rows count less [Lange1989]


_LEVEL_SPREAD = 1.0  # log-spread of the prior on each τ and on σ around where they start


_FARTHEST = 0.7  # of one step, in logs


ShrinkageLevel = tuple[
    Sequence[int], float
]  # columns of J that share a spread τ, and τ where the search starts


def shrink_towards_forecast(
    residual: Callable[[Array], Array],
    slopes: Callable[[Array], Array],
    levels: Sequence[ShrinkageLevel],
    scale: Array,
) -> Array:
    """Find the θ of highest posterior density by Gauss and Newton, with spreads by marginal
    likelihood at each step.

    ``residual(θ)`` is log(measured / model) ``(row,)``, ``slopes(θ)`` is J ``(row, coefficient)``,
    ``scale`` the families' own deviations ``(row,)``."""
    count = 1 + max(j for columns, _ in levels for j in columns)
    theta = np.zeros(count)
    weight = np.ones(len(scale))
    hyper = np.log([*(spread for _, spread in levels), 1.0])
    start = hyper.copy()
    here = residual(theta)
    for _ in range(NEWTON_STEPS):
        jacobian = slopes(theta)
        target = here + jacobian @ theta  # residual of the linearised model at θ = 0
        noise = scale / np.sqrt(weight)
        hyper = _fit_spreads(hyper, start, jacobian, target, levels, noise)
        prior = np.zeros(count)
        for (columns, _), log_spread in zip(levels, hyper[:-1], strict=True):
            prior[list(columns)] = np.exp(2.0 * log_spread)
        covariance = (jacobian * prior) @ jacobian.T + np.diag(np.exp(2.0 * hyper[-1]) * noise**2)
        found = np.linalg.solve(covariance, jacobian * prior).T @ target
        step = np.clip(found - theta, -_FARTHEST, _FARTHEST)
        theta = theta + step
        here = residual(theta)
        sigma = np.exp(hyper[-1]) * scale
        weight = (STUDENT_FREEDOM + 1.0) / (STUDENT_FREEDOM + (here / sigma) ** 2)
        if np.abs(step).max() < 1e-3:
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
    from scipy.linalg import LinAlgError, cho_factor, cho_solve
    from scipy.optimize import minimize

    blocks = [jacobian[:, list(columns)] for columns, _ in levels]
    grams = [block @ block.T for block in blocks]

    def worse(value: Array) -> float:
        covariance = np.diag(np.exp(2.0 * value[-1]) * noise**2)
        for gram, log_spread in zip(grams, value[:-1], strict=True):
            covariance = covariance + np.exp(2.0 * log_spread) * gram
        try:
            factor = cho_factor(covariance, lower=True)
        except LinAlgError:
            return 1e10
        misfit = target @ cho_solve(factor, target)
        pull = ((value - start) / _LEVEL_SPREAD) ** 2
        return float(0.5 * misfit + np.log(np.diag(factor[0])).sum() + 0.5 * pull.sum())

    return np.asarray(
        minimize(worse, hyper, method="L-BFGS-B", bounds=[(-7.0, 2.0)] * len(hyper)).x
    )


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


GAIN_ERRORS = 1.5  # standard errors by which a further level must lower the held-out error


LEAST_MOVING_ROWS = 5  # of a kind, to move anything


# how far a forecast may be off, in logs, where the search for it starts
_TIME = {"card": 0.15, "family": 0.10, "group": 0.07}


_ENERGY = {"card": 0.15, "module": 0.12}


_LEAST_DEVIATION = 0.03


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


def move_forecast(rows: KernelRows, gpu: Gpu, forecast: Bundle, idle: IdleRows) -> InheritedFit:
    """Move the forecast of ``gpu`` by ``rows`` (and idle rows) of the card as far as they support."""
    time = (shift_latency, _latency_log_ratio)
    latency, bundle = _best_levels(
        take_bursts(rows), gpu, scale_idle(forecast, idle), TIME_LEVELS, *time
    )
    power, bundle = shift_energies(rows, gpu, bundle)
    return InheritedFit(bundle, latency, power)


def shift_energies(rows: KernelRows, gpu: Gpu, bundle: Bundle) -> tuple[MovedQuantity, Bundle]:
    """Move the energies of a bundle by sustained rows as far as they support.

    A bundle fitted to other cards of this name moves at all levels: they differ, and no error falls
    at the limit."""
    least = -np.inf if bundle.status is FitStatus.MEASURED else GAIN_ERRORS
    return _best_levels(
        take_sustained(rows), gpu, bundle, ENERGY_LEVELS, shift_power, _power_log_ratio, least
    )


def take_bursts(rows: KernelRows) -> KernelRows:
    usable = on_random_data(rows) & rows.fit & np.isfinite(rows.column("latency_s"))
    return rows.select_rows(rows.is_kind("burst") & usable)


def take_sustained(rows: KernelRows) -> KernelRows:
    power_w, clock_hz, _ = settled_figures(rows)
    usable = on_random_data(rows) & rows.fit & np.isfinite(power_w) & np.isfinite(clock_hz)
    return rows.select_rows(rows.is_kind("sustained") & usable)


def _best_levels(
    rows: KernelRows,
    gpu: Gpu,
    bundle: Bundle,
    sets: Sequence[tuple[str, ...]],
    move: Callable[[KernelRows, Gpu, Bundle, tuple[str, ...]], Bundle],
    log_ratio: Callable[[KernelRows, Gpu, Bundle], Array],
    least: float = GAIN_ERRORS,
) -> tuple[MovedQuantity, Bundle]:
    """Choose levels that lower the held-out error, each further level by some standard errors
    [Breiman1984].
    """
    fold = (
        assign_folds(rows, min(LEVEL_FOLDS, len(rows)))
        if len(rows)
        else np.zeros(0, dtype=np.int64)
    )
    best: tuple[str, ...] = ()
    tried: dict[tuple[str, ...], Array] = {}
    for levels in sets if len(rows) >= LEAST_MOVING_ROWS else sets[:1]:
        tried[levels] = np.full(len(rows), np.nan)
        for k in np.unique(fold):
            made = move(rows.select_rows(fold != k), gpu, bundle, levels)
            tried[levels][fold == k] = log_ratio(rows.select_rows(fold == k), gpu, made)
        if levels and lowers_error(tried[best], tried[levels], least):
            best = levels
    means = (
        float(percent_errors(r).mean()) if r.size else float("nan")
        for r in (tried[()], tried[best])
    )
    return MovedQuantity(best, *means), move(rows, gpu, bundle, best)


def scale_idle(bundle: Bundle, rows: IdleRows) -> Bundle:
    """Scale the idle curve of a bundle to idle rows (clock, power, temperature), where there are
    any.
    """
    power = bundle.power
    if not rows or not power.scalable_parts:
        return bundle
    ratio = float(
        np.median([watts / power.idle_power_w(hertz, degrees) for hertz, watts, degrees in rows])
    )
    return replace(bundle, power=power.scale_energy({}, idle_factor=ratio))


def _latency_log_ratio(rows: KernelRows, gpu: Gpu, bundle: Bundle) -> Array:
    kernels = build_kernels(rows.ops, rows.conditions, gpu, bundle.reference, ())
    return np.log(rows.column("latency_s")) - np.log(predict_bursts_s(kernels, gpu, bundle))


def shift_latency(rows: KernelRows, gpu: Gpu, bundle: Bundle, wanted: tuple[str, ...]) -> Bundle:
    if not wanted:
        return bundle
    kernels = build_kernels(rows.ops, rows.conditions, gpu, bundle.reference, ())
    groups = kernels.work.kernel_family if "group" in wanted else ()
    families = (
        [g.partition(".")[0] for g in kernels.work.kernel_family] if "family" in wanted else ()
    )
    names = list(dict.fromkeys(families)), list(dict.fromkeys(groups))
    # 1 where a row belongs to a name, else 0, (row, name)
    of_family, of_group = (
        np.array([[own == name for name in each] for own in of], dtype=np.float64).reshape(
            len(rows), len(each)
        )
        for of, each in zip((families, groups), names, strict=True)
    )
    log_measured = np.log(rows.column("latency_s"))

    def moved(theta: Array) -> Bundle:
        return replace(bundle, corrections=move_corrections(bundle.corrections, theta, *names))

    def log_s(theta: Array) -> Array:
        return np.log(predict_bursts_s(kernels, gpu, moved(theta)))

    def slopes(theta: Array) -> Array:
        here = log_s(theta)
        step = 0.02
        aside = theta + step * np.eye(len(theta))[:_WIDTH]
        by_phase = np.stack(
            [(log_s(other) - here) / step for other in aside], axis=-1
        )  # (row, phase)
        by_family = (of_family[:, :, None] * by_phase[:, None, :]).reshape(len(here), -1)
        return np.concatenate([by_phase, by_family, of_group], axis=-1)

    ends = np.cumsum([0, _WIDTH, _WIDTH * len(names[0]), len(names[1])])
    parts = zip(_TIME.values(), ends[:-1], ends[1:], strict=True)
    levels = [(range(low, high), spread) for spread, low, high in parts if high > low]
    scale = np.array([forecast_deviation(bundle, f, "latency") for f in rows.family])
    return moved(
        shrink_towards_forecast(lambda theta: log_measured - log_s(theta), slopes, levels, scale)
    )


def forecast_deviation(bundle: Bundle, family: str, quantity: str) -> float:
    """Return the standard deviation in logs of a family by the forecast's own interval."""
    low, high = getattr(bundle.residuals[family], quantity)
    return max(float(np.log(high / low)) / (2 * 1.645), _LEAST_DEVIATION)


def move_corrections(
    corrections: Mapping[str, Correction], theta: Array, families: list[str], groups: list[str]
) -> dict[str, Correction]:
    """Move corrections by card, family and group; a group that the forecast lacks gets its own."""
    of_family = theta[_WIDTH : _WIDTH * (1 + len(families))].reshape(len(families), _WIDTH)
    of_group = theta[_WIDTH * (1 + len(families)) :]
    found = {}
    for name in dict.fromkeys((*corrections, *groups)):
        family = name.partition(".")[0]
        shift = theta[:_WIDTH].copy()
        if family in families:
            shift += of_family[families.index(family)]
        if name in groups:
            shift += of_group[groups.index(name)]
        cycles, memory, fixed = np.exp(shift)
        c = find_correction(name, corrections)
        moved = (
            c.compute * cycles,
            c.memory * memory,
            c.fixed_s * fixed,
            c.l2 * cycles,
            c.serial_cycle * cycles,
        )
        found[name] = Correction(*map(float, moved))
    return found


def _power_log_ratio(rows: KernelRows, gpu: Gpu, bundle: Bundle) -> Array:
    return np.asarray(
        np.log(settled_figures(rows)[0] / predict_with_bundle(bundle, rows, gpu)[:, 1])
    )


def shift_power(rows: KernelRows, gpu: Gpu, bundle: Bundle, wanted: tuple[str, ...]) -> Bundle:
    power = bundle.power
    if not wanted or not power.scalable_parts:
        return bundle
    power_w, clock_hz, latency_s = settled_figures(rows)
    # watts of each row and part at its measured clock and latency, so that errors of time stay out
    found = []
    for i in range(len(rows)):
        timeline = analyse_row(rows, i, gpu, bundle)
        each_s = latency_s[i : i + 1]
        set_hz = clock_hz[i : i + 1]
        running_hz = compute_effective_hz(timeline, set_hz, bundle.clock_law)
        at = OperatingPoint(clock_hz=set_hz)
        activity = kernel_activity(timeline, each_s, running_hz, np.zeros(()), at, priced=True)
        found.append(power.power(activity).part_w[0])
    parts_w = np.array(found)
    modules = [p for p in power.parts if p in power.scalable_parts]
    still = ~np.isin(power.parts, modules)
    still_w = parts_w[:, still].sum(axis=-1)
    dynamic_w = parts_w[:, ~still]
    own = 1 if "module" in wanted else 0

    def scaled(theta: Array) -> Array:
        return np.asarray(dynamic_w * np.exp(theta[0] + (theta[1:] if own else 0.0)))

    def slopes(theta: Array) -> Array:
        each = scaled(theta)
        share = each / (still_w + each.sum(axis=-1))[:, None]
        return np.concatenate(
            [share.sum(axis=-1, keepdims=True), share[:, : own * len(modules)]], axis=-1
        )

    def residual(theta: Array) -> Array:
        return np.asarray(np.log(power_w) - np.log(still_w + scaled(theta).sum(axis=-1)))

    levels = [(range(1), _ENERGY["card"]), (range(1, 1 + len(modules)), _ENERGY["module"])][
        : 1 + own
    ]
    scale = np.array([forecast_deviation(bundle, f, "power") for f in rows.family])
    theta = shrink_towards_forecast(residual, slopes, levels, scale)
    factor = np.exp(theta[0] + (theta[1:] if own else np.zeros(len(modules))))
    return replace(
        bundle, power=power.scale_energy(dict(zip(modules, factor.tolist(), strict=True)))
    )
