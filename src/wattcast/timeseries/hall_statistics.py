"""What a planner asks of a series of power: peaks by window, ramps, load duration, and headroom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from wattcast.core.arrays import Array

_MINUTE_S = 60.0
_MOST_POINTS = 100_000
PERCENTS = (50.0, 95.0, 99.0, 99.9)
WINDOWS_S = (1.0, 60.0, 900.0)
DURATION_POINTS = 201


@dataclass(frozen=True)
class LevelFigures:
    """Power of a card, node, rack, row or hall: percentiles by window, and its largest ramps."""

    mean_w: float
    peaks_w: dict[str, dict[str, float]]  # window -> percentile -> watts
    ramp_w_per_min: float  # largest change of minute means from one minute to the next
    step_w: float  # largest change from one second to the next


def window_means_w(
    bin_j: Array,
    bin_s: float,
    window_s: float,
) -> Array:
    """Return the mean power of whole windows one after another; a rest at the end is left out.

    >>> window_means_w(np.array([1.0, 3.0, 5.0]), 1.0, 2.0).tolist()
    [2.0]
    """
    bins = max(round(window_s / bin_s), 1)
    count = bin_j.shape[-1] // bins
    whole = bin_j[..., : count * bins]
    shaped = whole.reshape(*bin_j.shape[:-1], count, bins)
    return np.asarray(shaped.sum(axis=-1) / (bins * bin_s))


def list_windows(bin_s: float, seconds: float) -> list[float]:
    """Return the windows of peaks: the bin, a second, a minute and a quarter of an hour."""
    windows_s = sorted({bin_s, *WINDOWS_S})
    return [window_s for window_s in windows_s if bin_s <= window_s <= seconds]


def describe_level(series_j: Sequence[Array], bin_s: float) -> LevelFigures:
    """Return the figures of a level, over all its members together."""
    seconds = len(series_j[0]) * bin_s
    peaks_w: dict[str, dict[str, float]] = {}
    for window_s in list_windows(bin_s, seconds):
        means_w = np.concatenate([window_means_w(j, bin_s, window_s) for j in series_j])
        values = np.percentile(means_w, [*PERCENTS, 100.0])
        names = [f"p{percent:g}" for percent in PERCENTS] + ["max"]
        peaks_w[f"{window_s:g}s"] = dict(zip(names, values.tolist(), strict=True))
    return LevelFigures(
        mean_w=sum(math.fsum(j.tolist()) for j in series_j) / (seconds * len(series_j)),
        peaks_w=peaks_w,
        ramp_w_per_min=max(_largest_change(j, bin_s, _MINUTE_S) for j in series_j),
        step_w=max(_largest_change(j, bin_s, 1.0) for j in series_j),
    )


def _largest_change(
    bin_j: Array,
    bin_s: float,
    window_s: float,
) -> float:
    """Return the largest change of the mean between neighbouring windows, wherever they begin."""
    bins = max(round(window_s / bin_s), 1)
    if bin_j.shape[-1] < 2 * bins:
        return 0.0
    so_far = np.concatenate([[0.0], np.cumsum(bin_j)])
    means_w = (so_far[bins:] - so_far[:-bins]) / (bins * bin_s)
    return float(np.abs(means_w[bins:] - means_w[:-bins]).max())


def load_duration_w(power_w: Array) -> tuple[Array, Array]:
    """Return shares of the time, and the power that is exceeded for each of them."""
    shares = np.linspace(0.0, 1.0, DURATION_POINTS)
    return shares, np.quantile(power_w, 1.0 - shares)


@dataclass(frozen=True)
class RackStatistics:
    """Power of the racks of a group over time: their mean, and their variance between them."""

    mean_w: Array
    variance_w2: Array


def racks_that_fit(
    hall_w: Array,
    limit_w: float,
    racks: RackStatistics,
    chance: float,
    most: int = _MOST_POINTS,
) -> int:
    """Return how many more racks a limit holds, so that it is passed with this chance at most.

    At a moment t the hall with n more racks draws H(t) + n m(t) + N(0, n v(t)), where m and v are
    mean and variance of a rack of the group; the chance of passing the limit L is the mean over t
    of Q((L - H - n m) / sqrt(n v)).
    """
    low = 0
    if _chance_of_passing(hall_w, limit_w, racks, 0) > chance:
        return 0
    high = 1
    while high < most and _chance_of_passing(hall_w, limit_w, racks, high) <= chance:
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _chance_of_passing(hall_w, limit_w, racks, middle) <= chance:
            low = middle
        else:
            high = middle
    return low


_SCORES = np.linspace(-8.0, 8.0, 3201)
_TAILS = np.array([1.0 - NormalDist().cdf(score) for score in _SCORES.tolist()])


def _chance_of_passing(
    hall_w: Array,
    limit_w: float,
    racks: RackStatistics,
    count: int,
) -> float:
    margin_w = limit_w - hall_w - count * racks.mean_w
    spread_w = np.sqrt(np.maximum(count * racks.variance_w2, 1e-12))
    return float(np.interp(margin_w / spread_w, _SCORES, _TAILS).mean())
