"""``wattcast fit kernels`` from few rows: the forecast's corrections and energies, moved by the card's own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wattcast.activity import events, predicted
from wattcast.arrays import Array, per_sweep
from wattcast.fit.inherit import Level, Shift, shrink
from wattcast.fit.kernels import random, settled
from wattcast.fit.kernels_data import Mask, Rows
from wattcast.fit.kernels_split import folds_of, predict_with
from wattcast.fitted.bundle import Bundle
from wattcast.flow import analyse_kernels
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.kernels import Kernels, kernels_of
from wattcast.kernels.table import Segment
from wattcast.power.module import CLOCK, STATIC, ModulePower
from wattcast.power.static import IdlePower
from wattcast.timeline import kernel_s
from wattcast.timeline.clock import effective_hz
from wattcast.timeline.phases import Correction, correction_of

PHASES = ("cycles", "memory", "fixed")
_WIDTH = len(PHASES)
TIME_LEVELS: tuple[tuple[str, ...], ...] = ((), ("card",), ("card", "family"), ("card", "family", "group"))
ENERGY_LEVELS: tuple[tuple[str, ...], ...] = ((), ("card",), ("card", "module"))
FOLDS = 5
ERRORS = 1.5  # standard errors by which a further level must lower the held-out error
LEAST_ROWS = 5  # of a kind, to move anything
# how far a forecast may be off, in logs, where the search for it starts
_TIME = {"card": 0.15, "family": 0.10, "group": 0.07}
_ENERGY = {"card": 0.15, "module": 0.12}
_LEAST_DEVIATION = 0.03


@dataclass(frozen=True)
class Moved:
    """What was learned of one quantity: levels that earned their place, and how far held-out rows were off."""

    levels: tuple[str, ...]  # empty: the forecast stands
    shift: Shift | None
    family: tuple[str, ...]  # of each row
    log_ratio: Array  # measured over predicted, held out, in logs
    forecast: float  # mean absolute error in percent, of the forecast
    held_out: float  # and of what was chosen, held out


@dataclass(frozen=True)
class Inherited:
    """The forecast moved by rows."""

    bundle: Bundle
    latency: Moved
    power: Moved


Idle = list[tuple[float, float, float]]  # clock (Hz), power (W), temperature (C)


def moved_by(
    rows: Rows, gpu: Gpu, forecast: Bundle, idle: Idle, time: tuple[str, ...], energy: tuple[str, ...]
) -> Bundle:
    """The forecast moved at the levels given, whatever they earn."""
    bundle = _latency(rows.where(_bursts(rows)), gpu, with_idle(forecast, idle), time)[1]
    return _power(rows.where(_sustained(rows)), gpu, bundle, energy)[1]


def inherit(rows: Rows, gpu: Gpu, forecast: Bundle, idle: Idle) -> Inherited:
    """The bundle of ``gpu``: its forecast, moved by ``rows`` (and idle rows) of the card as far as they support."""
    bundle = with_idle(forecast, idle)
    latency, bundle = _best(rows.where(_bursts(rows)), gpu, bundle, TIME_LEVELS, _latency)
    power, bundle = _best(rows.where(_sustained(rows)), gpu, bundle, ENERGY_LEVELS, _power)
    return Inherited(bundle, latency, power)


def _bursts(rows: Rows) -> Mask:
    return np.asarray(rows.is_kind("burst") & random(rows) & rows.fit & np.isfinite(rows.of("latency_s")))


def _sustained(rows: Rows) -> Mask:
    power_w, clock_hz, _ = settled(rows)
    return np.asarray(
        rows.is_kind("sustained") & random(rows) & rows.fit & np.isfinite(power_w) & np.isfinite(clock_hz)
    )


Mover = Callable[[Rows, Gpu, Bundle, tuple[str, ...]], tuple[Shift | None, Bundle, Callable[[Bundle, Rows], Array]]]


def _best(rows: Rows, gpu: Gpu, bundle: Bundle, sets: Sequence[tuple[str, ...]], move: Mover) -> tuple[Moved, Bundle]:
    """The levels that lower the held-out error; a larger set must do so by some standard errors [Breiman1984]."""
    fold = folds_of(rows, min(FOLDS, len(rows))) if len(rows) else np.zeros(0, dtype=np.int64)
    best: tuple[tuple[str, ...], Array] = (), np.zeros(0)
    start = np.zeros(0)
    for levels in sets if len(rows) >= LEAST_ROWS else sets[:1]:
        ratio = np.full(len(rows), np.nan)
        for k in np.unique(fold):
            _, made, ratio_of = move(rows.where(fold != k), gpu, bundle, levels)
            ratio[fold == k] = ratio_of(made, rows.where(fold == k))
        if not levels:
            best, start = (levels, ratio), ratio
            continue
        gain = _percent(best[1]) - _percent(ratio)
        if gain.mean() > ERRORS * gain.std(ddof=1) / np.sqrt(len(gain)):
            best = levels, ratio
    shift, made, _ = move(rows, gpu, bundle, best[0])
    means = (float(_percent(r).mean()) if r.size else float("nan") for r in (start, best[1]))
    return Moved(best[0], shift, rows.family, best[1], *means), made


def _percent(log_ratio: Array) -> Array:
    """Absolute error of the prediction in percent, from log(measured / predicted)."""
    return np.asarray(100.0 * np.abs(np.expm1(-log_ratio)))


def with_idle(bundle: Bundle, rows: Idle) -> Bundle:
    """The bundle with its idle curve scaled to idle rows (clock, power, temperature), where there are any."""
    if not rows or not isinstance(bundle.power, ModulePower):
        return bundle
    idle = bundle.power.idle
    ratio = float(np.median([watts / idle.at(hertz, degrees) for hertz, watts, degrees in rows]))
    scaled = IdlePower(idle.clock_hz, idle.power_w * ratio, idle.reference_c, idle.per_c)
    return replace(bundle, power=replace(bundle.power, idle=scaled))


def _latency(
    rows: Rows, gpu: Gpu, bundle: Bundle, wanted: tuple[str, ...]
) -> tuple[Shift | None, Bundle, Callable[[Bundle, Rows], Array]]:
    top_hz = np.asarray(float(per_sweep(gpu.clocks.max_hz)))

    def log_time(some: Bundle, kernels: Kernels) -> Array:
        timeline = analyse_kernels(kernels, gpu, some)
        return np.asarray(np.log(kernel_s(timeline, effective_hz(timeline, top_hz, some.clock_law))))

    def ratio(some: Bundle, other: Rows) -> Array:
        kernels = kernels_of(other.ops, other.conditions, gpu, some.reference, ())
        return np.asarray(np.log(other.of("latency_s")) - log_time(some, kernels))

    if not wanted:
        return None, bundle, ratio
    kernels = kernels_of(rows.ops, rows.conditions, gpu, bundle.reference, ())
    groups = kernels.work.group if "group" in wanted else ()
    families = [g.partition(".")[0] for g in kernels.work.group] if "family" in wanted else ()
    names = list(dict.fromkeys(families)), list(dict.fromkeys(groups))
    of_family, of_group = _members(families, names[0], len(rows)), _members(groups, names[1], len(rows))
    log_measured = np.log(rows.of("latency_s"))

    def moved(theta: Array) -> Bundle:
        return replace(bundle, corrections=_moved(bundle.corrections, theta, *names))

    def slopes(theta: Array) -> Array:
        here, step = log_time(moved(theta), kernels), 0.02
        aside = theta + step * np.eye(len(theta))[:_WIDTH]
        phase = [(log_time(moved(other), kernels) - here) / step for other in aside]
        by_phase = np.stack(phase, axis=-1)  # (row, phase)
        by_family = (of_family[:, :, None] * by_phase[:, None, :]).reshape(len(here), -1)
        return np.concatenate([by_phase, by_family, of_group], axis=-1)

    ends = np.cumsum([0, _WIDTH, _WIDTH * len(names[0]), len(names[1])])
    parts = zip(_TIME, ends[:-1], ends[1:], strict=True)
    levels = [Level(name, range(low, high), _TIME[name]) for name, low, high in parts if high > low]
    scale = np.array([deviation(bundle, f, "latency") for f in rows.family])
    found = shrink(lambda theta: log_measured - log_time(moved(theta), kernels), slopes, levels, scale)
    return found, moved(found.theta), ratio


def _members(of: Sequence[str], names: Sequence[str], count: int) -> Array:
    """Which rows belong to which name, ``(row, name)``."""
    return np.array([[own == name for name in names] for own in of], dtype=np.float64).reshape(count, len(names))


def deviation(bundle: Bundle, family: str, quantity: str) -> float:
    """Standard deviation in logs that the forecast's own interval says of a family."""
    low, high = getattr(bundle.residuals[family], quantity)
    return max(float(np.log(high / low)) / (2 * 1.645), _LEAST_DEVIATION)


def _moved(
    corrections: Mapping[str, Correction], theta: Array, families: list[str], groups: list[str]
) -> dict[str, Correction]:
    """Corrections moved by card, family and group; a group the rows have and the forecast has not gets its own."""
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
        c = correction_of(name, corrections)
        found[name] = Correction(
            float(c.compute * cycles),
            float(c.memory * memory),
            float(c.fixed_s * fixed),
            float(c.l2 * cycles),
            float(c.serial_cycle * cycles),
        )
    return found


def _power(
    rows: Rows, gpu: Gpu, bundle: Bundle, wanted: tuple[str, ...]
) -> tuple[Shift | None, Bundle, Callable[[Bundle, Rows], Array]]:
    power = bundle.power

    def ratio(some: Bundle, other: Rows) -> Array:
        return np.asarray(np.log(settled(other)[0] / predict_with(some, other, gpu)[:, 1]))  # as it is used

    if not wanted or not isinstance(power, ModulePower):
        return None, bundle, ratio
    parts_w, names = _parts(rows, gpu, bundle)
    still = np.array([name in (STATIC, CLOCK) for name in names])
    still_w, dynamic_w = parts_w[:, still].sum(axis=-1), parts_w[:, ~still]
    modules = [name for name in names if name not in (STATIC, CLOCK)]
    log_measured = np.log(settled(rows)[0])
    own = 1 if "module" in wanted else 0

    def scaled(theta: Array) -> Array:
        return np.asarray(dynamic_w * np.exp(theta[0] + (theta[1:] if own else 0.0)))

    def slopes(theta: Array) -> Array:
        each = scaled(theta)
        share = each / (still_w + each.sum(axis=-1))[:, None]
        return np.concatenate([share.sum(axis=-1, keepdims=True), share[:, : own * len(modules)]], axis=-1)

    def residual(theta: Array) -> Array:
        return np.asarray(log_measured - np.log(still_w + scaled(theta).sum(axis=-1)))

    levels = [Level("card", [0], _ENERGY["card"])]
    levels += [Level("module", range(1, 1 + len(modules)), _ENERGY["module"])] * own
    found = shrink(residual, slopes, levels, np.array([deviation(bundle, f, "power") for f in rows.family]))
    shift = dict(zip(modules, found.theta[1:] if own else np.zeros(len(modules)), strict=True))
    return found, replace(bundle, power=_energies(power, shift, float(found.theta[0]))), ratio


def _energies(power: ModulePower, shift: Mapping[str, float], card: float) -> ModulePower:
    known = events()
    factor = {module: float(np.exp(card + own)) for module, own in shift.items()}
    return replace(power, energy_j={e: j * factor.get(known[e].module, 1.0) for e, j in power.energy_j.items()})


def _parts(rows: Rows, gpu: Gpu, bundle: Bundle) -> tuple[Array, tuple[str, ...]]:
    """Watts by part of each row at its measured clock and latency: errors of time must not leak into energies."""
    _, clock_hz, latency_s = settled(rows)
    found: list[Array] = []
    names: tuple[str, ...] = ()
    for i in range(len(rows)):
        segment = Segment(np.array([0]), np.array([1.0]), 1)
        kernels = kernels_of((rows.ops[i],), (rows.conditions[i],), gpu, bundle.reference, (segment,))
        timeline = analyse_kernels(kernels, gpu, bundle)
        each_s, set_hz = np.array([latency_s[i]]), np.array([clock_hz[i]])
        at = OperatingPoint(clock_hz=set_hz)
        running_hz = effective_hz(timeline, set_hz, bundle.clock_law)
        drawn = bundle.power.power(predicted.priced(timeline, each_s, running_hz, each_s[..., 0], at))
        found.append(drawn.part_w[0])
        names = drawn.parts
    return np.array(found), names
