"""How errors grow away from measured rows, from rows held out.

A row held out is predicted from the others; its nearness to them is exp(-r) of the nearest in the coordinates of the
learned factor of time, or of energy (:mod:`wattcast.timeline.kriging`). The 90th percentile of
|log(measured / predicted)|, over the median of its family, is taken as t·(1 + c·(1 - near)) by quantile regression
[Koenker1978]: the c of the least pinball loss, each with its best t. Then a + b·(1 - near) with b/a = c, scaled so
that the middle held-out row has 1. The nearest twentieth of the held-out rows count as equally near: what lies closer
to a measured row than they do was not held out, so nothing narrower was seen to hold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.fit.kernels_split import HeldOut
from wattcast.fitted.widening import UNSCALED, Line

LEAST_ROWS = 300  # with a nearness, to learn from
NEAREST = 0.95  # of the held-out rows are not nearer than what counts as beside a measured one
_LEVEL = 0.9
_SLOPES = np.concatenate([[0.0], np.geomspace(0.25, 40.0, 45)])

Names = npt.NDArray[np.str_]


def fit_near(log_ratio: Array, family: Names, near: Array) -> Line:
    """a, b and c of :class:`~wattcast.fitted.widening.Widening`; of too few rows those that do nothing."""
    known = np.isfinite(near) & np.isfinite(log_ratio)
    if known.sum() < LEAST_ROWS:
        return UNSCALED
    nearest = float(np.quantile(near[known], NEAREST))
    size, away, of = np.abs(log_ratio[known]), 1.0 - np.minimum(near[known], nearest), family[known]
    for name in np.unique(of):
        size[of == name] /= max(float(np.median(size[of == name])), 1e-6)
    slope = min(_SLOPES, key=lambda c: _loss(size, 1.0 + c * away))
    middle = float(np.median(1.0 + slope * away))
    return round(1.0 / middle, 6), round(float(slope) / middle, 6), round(nearest, 6)


def _loss(size: Array, spread: Array) -> float:
    """Pinball loss of ``size`` against t·``spread`` for the t that is best: a weighted quantile of their ratio."""
    t = weighted_quantile(size / spread, spread, _LEVEL)
    over = size - t * spread
    return float(np.mean(np.maximum(_LEVEL * over, (_LEVEL - 1.0) * over)))


def weighted_quantile(values: Array, weight: Array, level: float) -> float:
    """The least value that a share ``level`` of the weight does not exceed.

    >>> weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0]), 0.75)
    2.0
    """
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    at = int(np.searchsorted(below, level * below[-1] * (1.0 - 1e-12)))
    return float(values[order][min(at, values.size - 1)])


def near_of(held: HeldOut) -> tuple[Line, Line]:
    """The lines of latency, from held-out bursts, and of power, from held-out sustained rows, on random data."""
    family, random = np.array(held.family), np.array(held.data) == "random"
    burst = np.array([kind == "burst" for kind in held.kind])
    latency, power = np.log(held.latency_s / held.predicted_latency_s), np.log(held.power_w / held.predicted_power_w)
    of_latency, of_power = random & burst, random & ~burst
    return (
        fit_near(latency[of_latency], family[of_latency], held.near[of_latency]),
        fit_near(power[of_power], family[of_power], held.near_power[of_power]),
    )
