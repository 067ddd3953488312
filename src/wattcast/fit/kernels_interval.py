"""Ends of intervals from held-out rows, by family.

Split conformal [Lei2018]: order statistics of measured over predicted. Families of few rows are taken together after
each ratio's logarithm was divided by the spread of its own family (the same paper, section 5.2, with one spread a
family), and the spread of a family is drawn to that of all of them by as many rows as :data:`PRIOR_ROWS`. Logarithms
are divided by what the distance from other rows makes of them (:mod:`wattcast.fit.nearness`): ends are of a row at a
typical distance.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.fit.kernels_split import HeldOut
from wattcast.fitted.bundle import Residual
from wattcast.fitted.widening import UNSCALED, Line, scale_of

LEVEL = 0.9
POOL = ("softmax", "layernorm", "rmsnorm")  # whose power has few rows each, and whose kernels are alike
PRIOR_ROWS = 4.0


def quantiles(
    held: HeldOut, level: float = LEVEL, near: tuple[Line, Line] = (UNSCALED, UNSCALED)
) -> dict[str, Residual]:
    """Ends of each family: latency from its bursts, power from its sustained rows and those of its pool.

    ``near``: what :func:`~wattcast.fit.nearness.near_of` found of them.
    """
    families, is_random = np.array(held.family), np.array([d == "random" for d in held.data])
    burst = np.array([k == "burst" for k in held.kind])
    power = scaled(held.power_w / held.predicted_power_w, held.near_power, near[1])
    known = is_random & ~burst & np.isfinite(power)
    latency = scaled(held.latency_s / held.predicted_latency_s, held.near, near[0])
    found = {}
    for family in dict.fromkeys(held.family):
        time = latency[(families == family) & is_random & burst]
        ends = power_ends(power[known], families[known], family, level)
        found[family] = Residual(conformal(time, level), ends, len(time))
    return found


def scaled(ratio: Array, near: Array, line: Line) -> Array:
    """Ratios as a typical row would have them: logarithms over what the distance from other rows makes of them."""
    return np.asarray(ratio ** (1.0 / scale_of(near, line)))


def power_ends(ratio: Array, family: npt.NDArray[np.str_], name: str, level: float = LEVEL) -> tuple[float, float]:
    """Ends of one family's measured over predicted power."""
    if name not in POOL:
        return conformal(ratio[family == name], level)
    inside = np.isin(family, POOL)
    logs, of = np.log(ratio[inside]), family[inside]
    if logs.size == 0:
        return conformal(ratio[inside], level)
    spread = {other: _spread(logs, of == other) for other in POOL}
    scaled = logs / np.array([spread[str(other)] for other in of])
    low, high = conformal(np.exp(scaled), level)
    return float(low ** spread[name]), float(high ** spread[name])


def _spread(logs: Array, own: npt.NDArray[np.bool_]) -> float:
    """Mean size of a family's residuals, drawn to that of all."""
    size = np.abs(logs)
    return float(max((size[own].sum() + PRIOR_ROWS * size.mean()) / (own.sum() + PRIOR_ROWS), 1e-6))


def conformal(ratio: Array, level: float = LEVEL) -> tuple[float, float]:
    """Ends between which a new ratio falls with at least ``level``, a tail of (1 - level)/2 at each side."""
    if ratio.size == 0:
        return (0.5, 2.0)
    ordered, tail = np.sort(ratio), (1.0 - level) / 2.0
    low = int(np.clip(np.floor(tail * (ratio.size + 1)) - 1, 0, ratio.size - 1))
    high = int(np.clip(np.ceil((1.0 - tail) * (ratio.size + 1)) - 1, 0, ratio.size - 1))
    return float(ordered[low]), float(ordered[high])
