"""Say how sure a prediction is: its interval, and whether it lies inside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.core.arrays import Array, Sweepable, sweep_values
from wattcast.core.strict_files import FitStatus
from wattcast.power.power_model import mean_power_w
from wattcast.predictor.bundle.bundle_file import Bundle, MeasuredRange
from wattcast.predictor.bundle.support_widening import NORMAL_P90, OUTWARD, OutsideReason
from wattcast.predictor.pipeline import KernelDetail, WorkloadTotals
from wattcast.predictor.timeline import Timeline

NEGLIGIBLE_SHARE = 0.02  # of the time: unmeasured kernels below this share do not count as unsupported
GOVERNED = 1.02  # of a power limit: the most that a board averages over a second
MANY_FORMS = 8  # of operators that ran as one kind of kernel, to speak for one that was not measured
_ENDS_OF = [0, 0, 1, 1]  # low and high end of latency, and of power
_MARGIN = 0.5  # in log2 of a size, beyond the smallest and the largest measured


@dataclass(frozen=True)
class PredictionInterval:
    """Low and high ends around a prediction, each ``(*sweep, 2)``."""

    level: float
    latency_s: Array
    power_w: Array
    energy_j: Array


@dataclass(frozen=True)
class Support:
    """Whether anything like a workload was measured, and if not, why not."""

    inside: bool
    reason: str


@dataclass(frozen=True)
class UnmeasuredKernel:
    """A kernel outside what was measured: the reason, and a sentence for people."""

    reason: OutsideReason
    description: str


UnmeasuredKernels = Sequence[UnmeasuredKernel | None]  # of each kernel; None: it is inside


def compute_interval(
    timeline: Timeline,
    totals: WorkloadTotals,
    detail: KernelDetail,
    bundle: Bundle,
    limit_w: Sweepable,
    reasons: UnmeasuredKernels | None = None,
) -> PredictionInterval:
    """Compute the interval of a workload from the residuals (measured over predicted) of its kernels' families.

    Log-residuals are weighted by each kernel's share of the time, as if all kernels of a workload erred together.
    That is wider than independent errors would be. The energy interval multiplies those of latency and power, for
    the same reason. The ends of a kernel widen with its distance from measured rows and where it is outside of them;
    those of a workload widen for the effect of kernels on one another (``support_widening``). Residuals belong to the
    card that was measured, so the ends also move out by the spread of cards, unless the bundle is for this very card
    (``Bundle.for_this_card``). No board averages more than ``GOVERNED`` of its limit, where a clock can meet it, so
    power ends there. ``reasons`` is the result of ``find_unmeasured``, if it is at hand.
    """
    share = mean_power_w(detail.kernel_s * timeline.calls, totals.busy_s[..., np.newaxis])
    reasons = find_unmeasured(timeline, bundle) if reasons is None else reasons
    logs = share @ kernel_log_ends(timeline, bundle, reasons)  # (*sweep, 4)
    by: Array | float = NORMAL_P90 * bundle.cards.latency  # residuals are of 90 % as well
    among = bundle.widening.among
    if among is not None and len(timeline.calls) > 1:
        runs = float(timeline.calls @ timeline.kernels.work.launches)
        mixed = 1.0 - (share * share).sum(axis=-1)
        by = np.hypot(by, among.log_ends(runs, totals.busy_s, mixed))
    latency = np.exp(widen_log_ends(logs[..., :2], by))
    power = np.exp(widen_log_ends(logs[..., 2:], NORMAL_P90 * bundle.cards.power))
    latency_s = totals.latency_s[..., np.newaxis] * latency
    mean_w = totals.power_w[..., np.newaxis]
    most_w = np.maximum(GOVERNED * sweep_values(limit_w)[..., np.newaxis], mean_w)
    power_w = np.minimum(mean_w * power, most_w)
    return PredictionInterval(bundle.interval_level, latency_s, power_w, latency_s * power_w)


def kernel_log_ends(timeline: Timeline, bundle: Bundle, reasons: UnmeasuredKernels) -> Array:
    """Return logs of the ends of each kernel, ``(kernel, 4)``: low and high of latency, low and high of power."""
    kernels = timeline.kernels
    of_kernel = [  # kernels of an engine have ends of their own where they were measured
        learner if learner.startswith("engine_") and learner in bundle.residuals else family
        for family, learner in zip(kernels.family, kernels.work.root_family, strict=True)
    ]
    families = {name: i for i, name in enumerate(dict.fromkeys(of_kernel))}
    known = np.log([(*bundle.residuals[name].latency, *bundle.residuals[name].power) for name in families])
    ends = known.take([families[name] for name in of_kernel], axis=0)
    if not bundle.seen:
        return ends
    scale = bundle.widening.scale(timeline.near)
    if scale is not None:
        ends *= scale.T.take(_ENDS_OF, axis=1)
    strange = [(i, bundle.widening.apart[reason.reason]) for i, reason in enumerate(reasons) if reason is not None]
    if strange:
        rows = [i for i, _ in strange]
        by = np.array([(apart.latency, apart.latency, apart.power, apart.power) for _, apart in strange])
        ends[rows] = widen_log_ends(ends[rows].reshape(-1, 2), by.reshape(-1, 2)).reshape(-1, 4)
    return ends


def widen_log_ends(logs: Array, by: Array | float) -> Array:
    """Widen logs of low and high ends ``(..., 2)`` by a further spread ``by``, as ``widen_ends`` does."""
    middle = np.minimum(np.maximum(0.0, logs[..., :1]), logs[..., 1:])  # the prediction, where it lies inside
    return np.asarray(middle + np.hypot(logs - middle, by) * OUTWARD)


def widen_ends(ends: Array, by: float) -> Array:
    """Widen low and high factors ``(..., 2)`` by a further log-spread ``by``, in quadrature, each side separately.

    >>> widen_ends(np.exp([-0.3, 0.3]), 0.4).round(3).tolist()
    [0.607, 1.649]
    """
    if by == 0.0:
        return ends
    return np.asarray(np.exp(widen_log_ends(np.log(ends), by)))


def judge_support(
    timeline: Timeline, detail: KernelDetail, bundle: Bundle, reasons: UnmeasuredKernels | None = None
) -> Support:
    """Judge whether kernels like those measured on this device take nearly all the time of a workload.

    ``reasons`` is the result of ``find_unmeasured``, if it is at hand.
    """
    if bundle.status is FitStatus.FORECAST:
        return Support(False, f"a forecast: nothing was measured on the {bundle.gpu}")
    reasons = find_unmeasured(timeline, bundle) if reasons is None else reasons
    if not any(reasons):
        return Support(True, f"kernels like those measured on {bundle.provenance.device or bundle.gpu}")
    strange = np.array([reason is not None for reason in reasons])
    spent_s = detail.kernel_s * timeline.calls
    share = float(np.max(mean_power_w(spent_s @ strange.astype(float), spent_s.sum(axis=-1))))
    longest = np.argsort(-spent_s.reshape(-1, len(reasons)).sum(axis=0), kind="stable")
    named = list(dict.fromkeys(reason.description for i in longest if (reason := reasons[i]) is not None))
    if share > NEGLIGIBLE_SHARE:
        more = f" (and {len(named) - 1} more kinds, {share:.0%} of the time in all)" if len(named) > 1 else ""
        return Support(False, named[0] + more)
    rest = f"; all but {share:.1%} of the time" if named and share >= 5e-4 else ""
    return Support(True, f"kernels like those measured on {bundle.provenance.device or bundle.gpu}{rest}")


def find_unmeasured(timeline: Timeline, bundle: Bundle) -> list[UnmeasuredKernel | None]:
    """Find the kernels outside what was measured; None for each kernel inside."""
    kernels = timeline.kernels
    reasons: list[UnmeasuredKernel | None] = [None] * len(kernels.ops)
    to_size: dict[str, list[int]] = {}
    unheld = {family for family, residual in bundle.residuals.items() if residual.rows == 0}
    for i, (op, family, group, learner) in enumerate(
        zip(kernels.ops, kernels.family, kernels.work.kernel_family, kernels.work.root_family, strict=True)
    ):
        seen = bundle.seen.get(learner)
        if family in unheld:
            reasons[i] = UnmeasuredKernel(OutsideReason.KIND, f"no held-out rows for {family}")
        elif seen is None:
            continue
        elif op.dtype not in seen.dtypes:
            said = f"{op}: {family} was measured in {', '.join(seen.dtypes)}, not in {op.dtype}"
            reasons[i] = UnmeasuredKernel(OutsideReason.DTYPE, said)
        elif group not in seen.every_group:
            reasons[i] = UnmeasuredKernel(OutsideReason.KIND, f"{op}: no kernel of the kind {group} was measured")
        elif seen.forms is not None and (form := op.form) not in seen.every_form:
            alike = seen.forms.get(group, ())
            few = ", ".join(alike[:3]) or "others"
            few += f" and {len(alike) - 3} more" if len(alike) > 3 else ""
            # Where many forms ran as one kernel, as plain functions of an element do, another is much like them.
            # Where few did, as in reductions, different code may share the name of a kernel.
            reason = OutsideReason.FORM if len(alike) >= MANY_FORMS else OutsideReason.KIND
            reasons[i] = UnmeasuredKernel(reason, f"{op}: {form} was never measured, only {few} that run as {group}")
        else:
            to_size.setdefault(learner, []).append(i)
    for learner, rows in to_size.items():
        for row, why in _sizes_outside(timeline, bundle.seen[learner], rows).items():
            reasons[row] = UnmeasuredKernel(OutsideReason.SIZE, f"{kernels.ops[row]}: {why}")
    return reasons


def _sizes_outside(timeline: Timeline, seen: MeasuredRange, rows: list[int]) -> dict[int, str]:
    """Describe the first size beyond those measured of each of these kernels that has one."""
    features = timeline.kernels.work.features
    known, low, high = seen.bounds
    kept = [i for i, name in enumerate(known) if name in features]
    if not kept:
        return {}
    if len(kept) < len(known):
        low, high = low[kept], high[kept]
    values = np.array([features[known[i]] for i in kept]).take(rows, axis=1)
    inside = (low - _MARGIN <= values) & (values <= high + _MARGIN)
    if inside.all():
        return {}
    found = {}
    for at in np.flatnonzero(~inside.all(axis=0)):
        first = int(np.argmin(inside[:, at]))
        name, value = known[kept[first]], float(values[first, at])
        least, most = seen.sizes[name]
        found[rows[at]] = (
            f"{name.removeprefix('log_')} of {2**value:.3g}, measured from {2**least:.3g} to {2**most:.3g}"
        )
    return found
