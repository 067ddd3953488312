"""Intervals and support: how sure a prediction is, and when it is outside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wattcast.arrays import Array
from wattcast.energy import mean_w
from wattcast.fitted import Bundle
from wattcast.fitted.cards import NORMAL_P90
from wattcast.flow import Detail, Totals
from wattcast.provenance import Status
from wattcast.timeline import Timeline

OUTSIDE_WIDENS = 2.0  # log-width of the residual of a kernel outside what was measured
TRIFLE = 0.02  # share of the time in kernels nobody measured that leaves a prediction inside
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


def interval(
    timeline: Timeline, totals: Totals, detail: Detail, bundle: Bundle, reasons: Sequence[str] | None = None
) -> Interval:
    """Interval of the whole from the residuals of its kernels' families.

    Each family's residual (measured over predicted) is weighted by its share of time, in logs: as if
    all kernels of a workload erred together. That is wider than independent errors would be. The
    energy interval multiplies the two, for the same reason. A kernel outside what was measured counts
    with twice its family's width. Residuals are of the card that was measured; the ends are moved out by how far
    another card of the kind may be, unless the bundle is told that it is this one
    (:meth:`~wattcast.fitted.bundle.Bundle.for_this_card`). ``reasons``: what :func:`outside` said, if it was asked.
    """
    share = mean_w(detail.kernel_s * timeline.calls, totals.busy_s[..., np.newaxis])
    reasons = outside(timeline, bundle) if reasons is None else reasons
    families = list(dict.fromkeys(timeline.kernels.family))
    ends = np.log([(*bundle.residuals[name].latency, *bundle.residuals[name].power) for name in families])
    wider = np.array([OUTSIDE_WIDENS if bundle.seen and reason else 1.0 for reason in reasons])
    of = [families.index(name) for name in timeline.kernels.family]
    both = np.exp(share @ (wider[:, np.newaxis] * ends[of]))  # (*sweep, 4)
    latency, power = both[..., :2], both[..., 2:]
    latency, power = (
        moved_out(ends, NORMAL_P90 * spread)  # residuals are of 90 % as well
        for ends, spread in ((latency, bundle.cards.latency), (power, bundle.cards.power))
    )
    latency_s = totals.latency_s[..., np.newaxis] * latency
    power_w = totals.power_w[..., np.newaxis] * power
    return Interval(bundle.interval_level, latency_s, power_w, totals.energy_j[..., np.newaxis] * latency * power)


def moved_out(ends: Array, by: float) -> Array:
    """Low and high factors ``(..., 2)`` with a further log-spread ``by``, in quadrature, each side by itself.

    >>> moved_out(np.exp([-0.3, 0.3]), 0.4).round(3).tolist()
    [0.607, 1.649]
    """
    if by == 0.0:
        return ends
    logs = np.log(ends)
    middle = np.clip(0.0, logs[..., :1], logs[..., 1:])  # the prediction, where it lies inside
    return np.asarray(np.exp(middle + np.hypot(logs - middle, by) * np.array([-1.0, 1.0])))


def support(timeline: Timeline, detail: Detail, bundle: Bundle, reasons: Sequence[str] | None = None) -> Support:
    """Inside when kernels like ones measured on this device and tested on held-out rows take nearly all the time.

    ``reasons`` are what :func:`outside` said, if it was asked.
    """
    if bundle.status is Status.PROVISIONAL:
        return Support(False, f"no measurements of {bundle.gpu} were fitted; coefficients are provisional")
    if bundle.status is Status.INHERITED and not bundle.provenance.device:
        return Support(False, f"a forecast: nothing was measured on the {bundle.gpu}")
    reasons = outside(timeline, bundle) if reasons is None else reasons
    strange = np.array([bool(reason) for reason in reasons])
    spent_s = detail.kernel_s * timeline.calls
    share = float(np.max(mean_w(spent_s @ strange.astype(float), spent_s.sum(axis=-1))))
    longest = np.argsort(-spent_s.reshape(-1, len(reasons)).sum(axis=0), kind="stable")
    named = list(dict.fromkeys(reasons[i] for i in longest if reasons[i]))
    if share > TRIFLE:
        more = f" (and {len(named) - 1} more kinds, {share:.0%} of the time in all)" if len(named) > 1 else ""
        return Support(False, named[0] + more)
    rest = f"; all but {share:.1%} of the time" if named and share >= 5e-4 else ""
    return Support(True, f"kernels like those measured on {bundle.provenance.device or bundle.gpu}{rest}")


def outside(timeline: Timeline, bundle: Bundle) -> list[str]:
    """Of each kernel, why it is outside what was measured; empty where it is inside."""
    kernels = timeline.kernels
    reasons = [""] * len(kernels.ops)
    to_size: dict[str, list[int]] = {}
    for i, (op, family, learner) in enumerate(zip(kernels.ops, kernels.family, kernels.work.learner, strict=True)):
        seen = bundle.seen.get(learner)
        if bundle.residuals[family].rows == 0:
            reasons[i] = f"no held-out rows for {family}"
        elif seen is None:
            continue
        elif op.dtype not in seen.dtypes:
            reasons[i] = f"{op}: {family} was measured in {', '.join(seen.dtypes)}, not in {op.dtype}"
        elif kernels.work.group[i] not in seen.groups:
            reasons[i] = f"{op}: no kernel of the kind {kernels.work.group[i]} was measured"
        else:
            to_size.setdefault(learner, []).append(i)
    for learner, rows in to_size.items():
        for row, why in _sizes_outside(timeline, bundle.seen[learner].sizes, rows).items():
            reasons[row] = f"{kernels.ops[row]}: {why}"
    return reasons


def _sizes_outside(timeline: Timeline, sizes: Mapping[str, tuple[float, float]], rows: list[int]) -> dict[int, str]:
    """Which of these kernels have a size beyond those measured, and the first such size in words."""
    features = timeline.kernels.work.features
    names = [name for name in sizes if name in features]
    if not names:
        return {}
    values = np.array([features[name] for name in names])[:, rows]
    low, high = np.array([sizes[name] for name in names]).T[:, :, np.newaxis]
    strange = ~((low - _MARGIN <= values) & (values <= high + _MARGIN))
    found = {}
    for at in np.flatnonzero(strange.any(axis=0)):
        first = int(np.argmax(strange[:, at]))
        name, value = names[first], float(values[first, at])
        least, most = sizes[name]
        found[rows[at]] = (
            f"{name.removeprefix('log_')} of {2**value:.3g}, measured from {2**least:.3g} to {2**most:.3g}"
        )
    return found
