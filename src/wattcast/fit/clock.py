"""The effective-clock law from spin kernels beside the load.

Ratio of effective to reported clock against x = tensor activity · (f / f_top)², for random data: a
falling piecewise line by non-negative least squares on its steps down. The square of the clock
stands for voltage squared times frequency relative to the clock itself: what the slowing follows
is the load on the supply, and capped kernels at 1450 MHz slow less than the same ones at 1980.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.timeline.clock import ClockLaw

KNOTS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])


def fit_clock_law(
    activity: Array,
    clock_hz: Array,
    effective_hz: Array,
    tensor: npt.NDArray[np.bool_],
    top_hz: float,
    power: float = 2.0,
) -> ClockLaw:
    """Law from rows with both clocks; ``tensor`` says which issue tensor instructions at all."""
    from scipy.optimize import nnls

    ratio = np.clip(effective_hz / clock_hz, 0.5, 1.0)
    plain, rows = ratio[~tensor], tensor
    load = np.clip(activity[rows] * (clock_hz[rows] / top_hz) ** power, 0.0, 1.0)
    hats = np.stack([np.interp(load, KNOTS, np.eye(len(KNOTS))[i]) for i in range(len(KNOTS))], axis=-1)
    # ratio = start - Σ_{j<=i} step_j: one column for the start, the others for the steps down
    steps = -np.stack([hats[:, j:].sum(axis=1) for j in range(1, len(KNOTS))], axis=-1)
    found, _ = nnls(np.column_stack([hats.sum(axis=1), steps]), ratio[rows])
    line = np.minimum(found[0] - np.concatenate([[0.0], np.cumsum(found[1:])]), 1.0)
    return ClockLaw(
        without=float(np.median(plain)) if plain.size else 1.0,
        activity=KNOTS.copy(),
        ratio=np.maximum(line, 0.3),
        clock_power=power,
        top_hz=top_hz,
    )
