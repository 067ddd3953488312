"""Intervals and support: how sure a prediction is, and when it is outside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.energy import mean_w
from wattcast.fitted import Bundle
from wattcast.fitted.bundle import Seen
from wattcast.fitted.cards import NORMAL_P90
from wattcast.fitted.forms import form_of
from wattcast.fitted.widening import OUTWARD, Why
from wattcast.flow import Detail, Totals
from wattcast.provenance import Status
from wattcast.timeline import Timeline
from wattcast.workload.graph import Operator

TRIFLE = 0.02  # share of the time in kernels nobody measured that leaves a prediction inside
MANY_FORMS = 8  # of operators that ran as one kind of kernel, to speak for one that was not measured
_ENDS_OF = [0, 0, 1, 1]  # low and high end of latency, and of power
_MARGIN = 0.5  # in log2 of a size, beyond the smallest and the largest measured


@dataclass(frozen=True)
class Interval:
    """Low and high ends around a prediction, each ``(*sweep, 2)``."""

    level: float
    latency_s: Array
    power_w: Array
    energy_j: Array


@dataclass(frozen=True)
class Support:
    """Whether the bundle has seen anything like this, and if not, why not."""

    inside: bool
    reason: str


@dataclass(frozen=True)
class Strange:
    """Why a kernel is outside what was measured, and that in words."""

    why: Why
    said: str


Reasons = Sequence[Strange | None]  # of each kernel; None: it is inside


def interval(
    timeline: Timeline, totals: Totals, detail: Detail, bundle: Bundle, reasons: Reasons | None = None
) -> Interval:
    """Interval of the whole from the residuals of its kernels' families.

    Each family's residual (measured over predicted) is weighted by its share of time, in logs: as if
    all kernels of a workload erred together. That is wider than independent errors would be. The
    energy interval multiplies the two, for the same reason. The ends of a kernel follow its distance from measured
    ones; those of one outside what was measured are moved out by what it cost to leave such out of a fit, and those
    of the latency of several kernels by what they cost one another (:mod:`wattcast.fitted.widening`). Residuals are
    of the card that was measured; the ends are moved out by how far another card of the kind may be, unless the
    bundle is told that it is this one (:meth:`~wattcast.fitted.bundle.Bundle.for_this_card`). ``reasons``: what
    :func:`outside` said, if it was asked.
    """
    share = mean_w(detail.kernel_s * timeline.calls, totals.busy_s[..., np.newaxis])
    reasons = outside(timeline, bundle) if reasons is None else reasons
    logs = share @ kernel_ends(timeline, bundle, reasons)  # (*sweep, 4)
    by: Array | float = NORMAL_P90 * bundle.cards.latency  # residuals are of 90 % as well
    among = bundle.widening.among
    if among is not None and len(timeline.calls) > 1:
        runs = float(timeline.calls @ timeline.kernels.work.launches)
        mixed = 1.0 - (share * share).sum(axis=-1)
        by = np.hypot(by, among.logs(runs, totals.busy_s, mixed))
    latency = np.exp(logs_moved_out(logs[..., :2], by))
    power = np.exp(logs_moved_out(logs[..., 2:], NORMAL_P90 * bundle.cards.power))
    latency_s = totals.latency_s[..., np.newaxis] * latency
    power_w = totals.power_w[..., np.newaxis] * power
    return Interval(bundle.interval_level, latency_s, power_w, totals.energy_j[..., np.newaxis] * latency * power)


def kernel_ends(timeline: Timeline, bundle: Bundle, reasons: Reasons) -> Array:
    """Logs of the ends of each kernel, ``(kernel, 4)``: low and high of latency, low and high of power."""
    of_kernel = timeline.kernels.family
    families = {name: i for i, name in enumerate(dict.fromkeys(of_kernel))}
    known = np.log([(*bundle.residuals[name].latency, *bundle.residuals[name].power) for name in families])
    ends = known.take([families[name] for name in of_kernel], axis=0)
    if not bundle.seen:
        return ends
    scale = bundle.widening.scale(timeline.near)
    if scale is not None:
        ends *= scale.T.take(_ENDS_OF, axis=1)
    strange = [(i, bundle.widening.apart[reason.why]) for i, reason in enumerate(reasons) if reason is not None]
    if strange:
        rows = [i for i, _ in strange]
        by = np.array([(apart.latency, apart.latency, apart.power, apart.power) for _, apart in strange])
        ends[rows] = logs_moved_out(ends[rows].reshape(-1, 2), by.reshape(-1, 2)).reshape(-1, 4)
    return ends


def logs_moved_out(logs: Array, by: Array | float) -> Array:
    """Logs of low and high ends ``(..., 2)`` with a further spread ``by``, as :func:`moved_out`."""
    middle = np.minimum(np.maximum(0.0, logs[..., :1]), logs[..., 1:])  # the prediction, where it lies inside
    return np.asarray(middle + np.hypot(logs - middle, by) * OUTWARD)


def moved_out(ends: Array, by: float) -> Array:
    """Low and high factors ``(..., 2)`` with a further log-spread ``by``, in quadrature, each side by itself.

    >>> moved_out(np.exp([-0.3, 0.3]), 0.4).round(3).tolist()
    [0.607, 1.649]
    """
    if by == 0.0:
        return ends
    return np.asarray(np.exp(logs_moved_out(np.log(ends), by)))


def support(timeline: Timeline, detail: Detail, bundle: Bundle, reasons: Reasons | None = None) -> Support:
    """Inside when kernels like ones measured on this device and tested on held-out rows take nearly all the time.

    ``reasons`` are what :func:`outside` said, if it was asked.
    """
    if bundle.status is Status.PROVISIONAL:
        return Support(False, f"no measurements of {bundle.gpu} were fitted; coefficients are provisional")
    if bundle.status is Status.INHERITED and not bundle.provenance.device:
        return Support(False, f"a forecast: nothing was measured on the {bundle.gpu}")
    reasons = outside(timeline, bundle) if reasons is None else reasons
    if not any(reasons):
        return Support(True, f"kernels like those measured on {bundle.provenance.device or bundle.gpu}")
    strange = np.array([reason is not None for reason in reasons])
    spent_s = detail.kernel_s * timeline.calls
    share = float(np.max(mean_w(spent_s @ strange.astype(float), spent_s.sum(axis=-1))))
    longest = np.argsort(-spent_s.reshape(-1, len(reasons)).sum(axis=0), kind="stable")
    named = list(dict.fromkeys(reason.said for i in longest if (reason := reasons[i]) is not None))
    if share > TRIFLE:
        more = f" (and {len(named) - 1} more kinds, {share:.0%} of the time in all)" if len(named) > 1 else ""
        return Support(False, named[0] + more)
    rest = f"; all but {share:.1%} of the time" if named and share >= 5e-4 else ""
    return Support(True, f"kernels like those measured on {bundle.provenance.device or bundle.gpu}{rest}")


def outside(timeline: Timeline, bundle: Bundle) -> list[Strange | None]:
    """Of each kernel, why it is outside what was measured; None where it is inside."""
    kernels = timeline.kernels
    reasons: list[Strange | None] = [None] * len(kernels.ops)
    to_size: dict[str, list[int]] = {}
    unheld = {family for family, residual in bundle.residuals.items() if residual.rows == 0}
    for i, (op, family, group, learner) in enumerate(
        zip(kernels.ops, kernels.family, kernels.work.group, kernels.work.learner, strict=True)
    ):
        seen = bundle.seen.get(learner)
        if family in unheld:
            reasons[i] = Strange(Why.KIND, f"no held-out rows for {family}")
        elif seen is None:
            continue
        elif op.dtype not in seen.dtypes:
            said = f"{op}: {family} was measured in {', '.join(seen.dtypes)}, not in {op.dtype}"
            reasons[i] = Strange(Why.DTYPE, said)
        elif group not in seen.every_group:
            reasons[i] = Strange(Why.KIND, f"{op}: no kernel of the kind {group} was measured")
        elif seen.forms is not None and (form := form_of(op)) not in seen.every_form:
            reasons[i] = _form_outside(op, form, seen.forms.get(group, ()), group)
        elif learner in to_size:
            to_size[learner].append(i)
        else:
            to_size[learner] = [i]
    for learner, rows in to_size.items():
        for row, why in _sizes_outside(timeline, bundle.seen[learner], rows).items():
            reasons[row] = Strange(Why.SIZE, f"{kernels.ops[row]}: {why}")
    return reasons


def _form_outside(op: Operator, form: str, alike: tuple[str, ...], group: str) -> Strange:
    """Why a form that was not measured is outside, and which ran as the same kernel.

    Where many forms did, as plain functions of an element do, another is much like them. Where few did, as in
    reductions, sorting may be called the same kernel for want of a better name.
    """
    why = Why.FORM if len(alike) >= MANY_FORMS else Why.KIND
    return Strange(why, f"{op}: {form} was never measured, only {_few(alike)} that run as {group}")


def _few(names: tuple[str, ...]) -> str:
    shown = names[:3]
    rest = len(names) - len(shown)
    return (", ".join(shown) or "others") + (f" and {rest} more" if rest > 0 else "")


def _sizes_outside(timeline: Timeline, seen: Seen, rows: list[int]) -> dict[int, str]:
    """Which of these kernels have a size beyond those measured, and the first such size in words."""
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
