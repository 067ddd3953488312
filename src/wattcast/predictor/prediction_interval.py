"""Compute the interval of a prediction from the residuals of its kernels and its distances.

With half-widths x_k of kernels, in logs, and their shares s_k of the time (of the energy, for
power), the workload has

    x² = ρ·(Σ s_k·x_k)² + (1 - ρ)·Σ (s_k·x_k)² + Σ_d x_d²

where ρ is how far the errors of kernels go together (learned from layers of operators that were
measured both alone and together) and x_d what every ``SupportDistance`` adds. Residuals (measured
over predicted) belong to the card that was measured, so the ends also move out by the spread of
cards, unless the bundle is for this very card (``Bundle.for_this_card``).
docs/method/confidence.md says how well that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.core.arrays import (
    Array,
    CodedColumn,
    map_distinct,
)
from wattcast.core.strict_files import FitStatus
from wattcast.kernels.kernel_table import group_forms, root_family
from wattcast.predictor.bundle.bundle_file import Bundle, ResidualEnds
from wattcast.predictor.bundle.support_widening import (
    NORMAL_P90,
    OUTWARD,
    ForecastEnds,
    LatencySpread,
    LearnedPair,
    learned_distances,
)
from wattcast.predictor.pipeline import WorkloadTotals
from wattcast.predictor.prediction_basis import PredictionBasis
from wattcast.predictor.support_distances import SupportDistance
from wattcast.predictor.timeline import Timeline, compute_latency_s
from wattcast.predictor.unmeasured_kernels import UnmeasuredKernels
from wattcast.workload.model_options import SoftwareStack


class UncertaintyCoefficients(Coefficients):
    """What a board averages over a second where the power limit lowers its clock, over the
    limit.
    """

    governed_low: float
    governed_high: float


UNCERTAINTY = load_coefficients("uncertainty", UncertaintyCoefficients)
# low and high end of power under a power limit, over the limit
GOVERNED = (UNCERTAINTY.governed_low, UNCERTAINTY.governed_high)
_WIDE_FORMATS = (Dtype.FP32, Dtype.TF32)
_ENDS_OF_PAIR = [0, 0, 1, 1]  # low and high end of latency, and of power


@dataclass(frozen=True)
class PredictionInterval:
    """Low and high ends around a prediction, each ``(*sweep, 2)``."""

    level: float
    latency_s: Array
    power_w: Array
    energy_j: Array


def compute_interval(
    basis: PredictionBasis,
    distances: Sequence[SupportDistance],
    residuals: Mapping[str, ResidualEnds] | None = None,
    steps: LearnedPair | None = None,
    wide: LatencySpread | None = None,
) -> PredictionInterval:
    """Compute the interval of a workload from the residuals of its kernels' families.

    Power errs at the clock asked for. Where it then exceeds the limit, the governor holds it within
    ``GOVERNED`` of that. Where the host holds a run up, kernels that take longer hide behind it,
    and an idle GPU draws a part of the energy, in which kernels do not err. The energy interval
    adds those of latency and power in quadrature of logs: their errors have
    opposite signs if any correlation. ``residuals``, ``steps`` and ``wide`` stand for those that
    ship; ``residuals`` alone also for the spread of wide formats.

    Steps of the very engine that was measured were measured as a whole: their own spread stands for
    that of their kernels, of which only those that were never measured add to it. The time of
    products in fp32 or TF32 is in no table: the spread of whole models stands for that of a
    forecast's kernels.
    """
    bundle = basis.bundle
    if residuals is not None:
        bundle = replace(bundle, residuals=residuals)
    is_step = is_measured_engine(basis)
    kernel_ends = kernel_log_ends(basis.timeline, bundle, basis.reasons, is_step=is_step)

    # what the whole adds to the ends of its kernels: other cards, the engine's steps, distances
    pair = np.array([NORMAL_P90 * bundle.cards.latency, NORMAL_P90 * bundle.cards.power])
    if is_step:
        step_pair = steps or learned_distances().steps[find_step_kind(basis)]
        pair = np.hypot(pair, [step_pair.latency, step_pair.power])
    squares = np.square(pair.take(_ENDS_OF_PAIR))
    for distance in distances:
        squares = squares + np.square(distance.ends)
    spread = np.sqrt(squares)

    together = learned_distances().together
    time_ends = combine_log_ends(basis.time_shares, kernel_ends[:, :2], together.latency)
    if residuals is None or wide is not None:
        time_ends = _replace_wide_ends(basis, time_ends, wide)
    time_ends = time_ends * _scale_time_ends(basis, bundle)[..., np.newaxis]
    latency_ends = widen_log_ends(_hide_behind_host(basis, time_ends), spread[..., :2])
    latency = np.exp(latency_ends)
    power_ends = combine_log_ends(basis.energy_shares, kernel_ends[:, 2:], together.power)
    power_ends = power_ends * basis.working_share[..., np.newaxis]
    power = np.exp(widen_log_ends(power_ends, spread[..., 2:]))

    totals = basis.totals
    power_w = _bound_power_w(basis, power)
    power_log = np.log(power_w / totals.power_w[..., np.newaxis])
    energy_log = np.hypot(np.log(latency), power_log) * OUTWARD
    return PredictionInterval(
        level=bundle.interval_level,
        latency_s=totals.latency_s[..., np.newaxis] * latency,
        power_w=power_w,
        energy_j=totals.energy_j[..., np.newaxis] * np.exp(energy_log),
    )


def _replace_wide_ends(
    basis: PredictionBasis,
    time_ends: Array,
    wide: LatencySpread | None,
) -> Array:
    """Replace the ends of a forecast by those of whole models where its products are wide."""
    share = find_wide_share(basis)[..., np.newaxis]
    if not np.any(share > 0.0):
        return time_ends
    spread = wide or find_wide_spread(basis)
    return widen_log_ends((1.0 - share) * time_ends, share * spread.latency)


def _hide_behind_host(basis: PredictionBasis, time_ends: Array) -> Array:
    """Return log-ends of the latency from those of the time in kernels.

    Where the host holds a run up, kernels that take longer hide behind it.
    """
    if not basis.timeline.has_host:
        return time_ends
    kernel_s = basis.detail.kernel_s
    factors = np.exp(time_ends)[..., np.newaxis]
    low_s = compute_latency_s(basis.timeline, kernel_s * factors[..., 0, :])
    high_s = compute_latency_s(basis.timeline, kernel_s * factors[..., 1, :])
    latency_s = basis.totals.latency_s[..., np.newaxis]
    return np.asarray(np.log(np.stack([low_s, high_s], axis=-1) / latency_s))


def _bound_power_w(basis: PredictionBasis, factors: Array) -> Array:
    """Return low and high end of power, ``(*sweep, 2)``; of stretches, the means over the time."""
    limit_w = basis.limit_w[..., np.newaxis]
    in_burst = basis.at.duration_s is not None

    def bound_stretch_w(totals: WorkloadTotals, asked_w: Array) -> Array:
        mean_w = totals.power_w[..., np.newaxis]
        ungoverned_w = mean_w if in_burst else asked_w[..., np.newaxis]
        return govern_ends(mean_w, ungoverned_w, factors, limit_w)

    return basis.average_stretches(bound_stretch_w)


def _scale_time_ends(basis: PredictionBasis, bundle: Bundle) -> Array:
    """Return the factor on the ends of the time, ``(*sweep,)``; of stretches, the mean over the
    time.
    """
    limit_w = basis.limit_w
    return basis.average_stretches(lambda _, asked_w: scale_capped_ends(bundle, asked_w, limit_w))


def scale_capped_ends(
    bundle: Bundle,
    asked_w: Array,
    limit_w: Array | float,
) -> Array:
    """Return the factor on the ends of latency: below 1 where the limit holds a measured GPU."""
    capped = (asked_w > limit_w) & (bundle.status is FitStatus.MEASURED)
    return np.where(capped, learned_distances().capped.latency, 1.0)


def govern_ends(
    mean_w: Array,
    asked_w: Array,
    factors: Array,
    limit_w: Array | float,
) -> Array:
    """Return low and high end of power, ``(..., 2)``, from ``factors`` on power at the clock asked
    for.

    Where that exceeds the limit, the governor holds power within ``GOVERNED`` of it, unless no
    clock can.

    >>> govern_ends(np.array([693.0]), np.array([900.0]), np.array([0.9, 1.1]), 700.0).tolist()
    [686.0, 714.0]
    """
    governed_w = np.asarray(limit_w) * np.array(GOVERNED)
    is_free = mean_w > governed_w[..., 1:]
    ends_w = np.where(is_free, mean_w * factors, np.minimum(asked_w * factors, governed_w))
    low_w = np.minimum(ends_w[..., 0], mean_w[..., 0])
    high_w = np.maximum(ends_w[..., 1], mean_w[..., 0])
    return np.stack([low_w, high_w], axis=-1)


def combine_log_ends(
    share: Array,
    ends: Array,
    together: float,
) -> Array:
    """Combine log-ends of kernels ``(kernel, 2)`` by their shares ``(*sweep, kernel)`` to those of
    a workload.

    ``together`` is the correlation ρ between errors of two kernels, 0 to 1.

    >>> ends = np.array([[-0.2, 0.2], [-0.2, 0.2]])
    >>> [combine_log_ends(np.array([0.5, 0.5]), ends, rho).round(3).tolist() for rho in (0.0, 1.0)]
    [[-0.141, 0.141], [-0.2, 0.2]]
    """
    middle = _middle_of_ends(ends)
    half_width = np.abs(ends - middle)
    correlated = np.square(share @ half_width)
    independent = np.square(share) @ np.square(half_width)
    square = together * correlated + (1.0 - together) * independent
    return np.asarray(share @ middle + np.sqrt(square) * OUTWARD)


def widen_log_ends(logs: Array, by: Array | float) -> Array:
    """Widen logs of low and high ends ``(..., 2)`` by a further spread ``by``, in quadrature, each
    side separately.

    >>> widen_log_ends(np.array([-0.3, 0.3]), 0.4).round(3).tolist()
    [-0.5, 0.5]
    """
    middle = _middle_of_ends(logs)
    return np.asarray(middle + np.hypot(logs - middle, by) * OUTWARD)


def _middle_of_ends(logs: Array) -> Array:
    """Return 0, which is the prediction, where it lies between the ends, else the nearer end."""
    return np.minimum(np.maximum(0.0, logs[..., :1]), logs[..., 1:])


def kernel_log_ends(
    timeline: Timeline,
    bundle: Bundle,
    reasons: UnmeasuredKernels,
    engines: Mapping[str, ForecastEnds] | None = None,
    is_step: bool = False,
) -> Array:
    """Return logs of the ends of each kernel, ``(kernel, 4)``: low and high of latency, low and
    high of power.

    Ends are those of the kernel's kind where it has any, else of its family. Where the bundle's own
    rows gave them, they go by the distance from these rows. Kernels of an engine differ more from
    version to version than from row to row of one, so that they take the ends of other versions
    (``engines``, else those learned). In a step of the very engine that was measured (``is_step``)
    only kernels outside what was measured have any.
    """
    ends = _read_residual_ends(timeline, bundle)
    if not bundle.seen:
        return ends
    scale = bundle.widening.scale(timeline.near)
    if scale is not None:
        ends *= scale.T.take(_ENDS_OF_PAIR, axis=1)

    # kinds whose ends of latency already hold what was never measured
    groups = timeline.kernels.work.kernel_family
    covered: list[int] = []
    if is_step:
        ends[:] = 0.0
    elif bundle.status is FitStatus.MEASURED:
        engines = learned_distances().engines if engines is None else engines
        covered = np.flatnonzero(map_distinct(engines.__contains__, groups)).tolist()
        for row in covered:
            # rows of other versions, at every distance, of kinds never measured here as well
            ends[row, :2] = np.log(engines[groups[row]].latency)
    else:
        # tables of other chips gave these kinds their ends, whether the measured card ran them or
        # not
        tabled = {name for name in groups.values if ".engine." in name and name in bundle.residuals}
        covered = np.flatnonzero(map_distinct(tabled.__contains__, groups)).tolist()

    if reasons:
        rows = list(reasons)
        widths = []
        for outside in reasons.values():
            widening = bundle.widening.apart[outside.reason]
            widths.append((widening.latency, widening.power))
        by = np.array(widths).take(_ENDS_OF_PAIR, axis=1)
        by[np.isin(rows, covered), :2] = 0.0
        wider = widen_log_ends(ends[rows].reshape(-1, 2), by.reshape(-1, 2))
        ends[rows] = wider.reshape(-1, 4)
    return ends


def _read_residual_ends(timeline: Timeline, bundle: Bundle) -> Array:
    """Return logs of the ends that a bundle has for the kind or family of each kernel, ``(kernel,
    4)``.
    """
    groups = timeline.kernels.work.kernel_family
    families = timeline.kernels.family
    codes = groups.place * len(families.values) + families.place
    kinds = CodedColumn(list(product(groups.values, families.values)), codes)
    ends = []
    for group, family in kinds.values:
        name = find_ends_name(group, root_family(group), family, bundle)
        residual = bundle.residuals[name]
        ends.append((*residual.latency, *residual.power))
    return np.log(ends).take(kinds.place, axis=0)


def find_ends_name(
    group: str,
    learner: str,
    family: str,
    bundle: Bundle,
) -> str:
    """Find the name under which a bundle has ends for a kernel: its kind, a wider kind, its learner
    or its family.
    """
    if not learner.startswith("engine_"):
        return family
    parts = group.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 1, -1)]
    names.append(learner)
    return next((name for name in names if name in bundle.residuals), family)


def is_measured_engine(basis: PredictionBasis) -> bool:
    """Tell whether a workload is a step of an engine whose kernels and steps were measured on this
    GPU.
    """
    bundle = basis.bundle
    measured = bundle.status is FitStatus.MEASURED and bundle.has_engine_kernels
    return measured and basis.graph.stack == SoftwareStack.ENGINE


def find_step_kind(basis: PredictionBasis) -> str:
    """Find whether a step is one of a model with ``experts`` or of a ``dense`` one, and whether the
    user said which board of the GPU it is.
    """
    families = basis.timeline.kernels.work.kernel_family.values
    kind = "experts" if any(".experts" in family for family in families) else "dense"
    return f"{kind}, board told" if basis.gpu.board else kind


def find_wide_share(basis: PredictionBasis) -> Array:
    """Find the share of fp32 and TF32 in the time of the products of a forecast, ``(*sweep,)``."""
    none = np.zeros(basis.totals.latency_s.shape)
    if basis.bundle.status is not FitStatus.FORECAST:
        return none
    ops = basis.timeline.kernels.ops
    is_product = np.zeros(len(ops))
    is_wide = np.zeros(len(ops))
    for rows in group_forms(ops):
        op = ops[int(rows[0])]
        is_product[rows] = op.is_product
        is_wide[rows] = op.is_product and op.dtype in _WIDE_FORMATS
    if not is_wide.any():
        return none
    product_share = (basis.time_shares * is_product).sum(axis=-1)
    wide_share = (basis.time_shares * is_wide).sum(axis=-1)
    return np.asarray(np.divide(wide_share, product_share, out=none, where=product_share > 0.0))


def find_wide_spread(basis: PredictionBasis) -> LatencySpread:
    """Find the spread of models in fp32 or TF32 on the GPU of a forecast."""
    learned = learned_distances().wide
    return learned.get(basis.gpu.name, learned["other"])
