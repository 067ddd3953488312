"""Power around the limit: a governor holds the mean of a second, not every tenth of one.

Two things are seen on a card at its limit. Tenths of a second differ from the mean, and what one
draws too much the next draws too little. After a pause the card draws more than the limit for
almost a second, then less, until the mean of that second is within the limit again.

Both move energy in time and leave its sum: a stretch at the limit keeps its joules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core.arrays import Array, Mask
from wattcast.timeseries.power_curve import PowerCurve

_SEED = 700


class RippleCoefficients(Coefficients):
    """How the power of a card moves while its governor holds the limit."""

    interval_s: float  # within which power is one number
    spread: float  # standard deviation of an interval, over the mean
    correction: float  # share of what an interval draws too much that the next one draws less
    boost: float  # power after a pause, over the power that is held
    boosted_s: float  # how long
    pause_s: float  # the shortest pause that an overshoot follows
    pause_share: float  # of the power held, below which a card pauses
    at_limit: float  # of the power that is held, above which the governor lowers the clock


RIPPLE = load_coefficients("governor_ripple", RippleCoefficients)


def add_ripple(
    curve: PowerCurve,
    held_w: float,
    unlimited_w: float = float("inf"),
) -> PowerCurve:
    """Return a curve whose stretches at the limit draw what a card draws from tenth to tenth.

    ``held_w`` is the power that the governor holds a GPU at, ``unlimited_w`` what the work would
    draw without a limit. Ripples of several GPUs are independent, and a curve is their mean. A
    curve that is run through several times has the same ripple in every turn.
    """
    edges_s = _list_edges(float(curve.moments_s[-1]))
    lengths_s = np.diff(edges_s)
    if not len(lengths_s):
        return curve
    whole_j = np.interp(edges_s, curve.moments_s, curve.joules.sum(axis=-1))
    watts = np.diff(whole_j) / lengths_s
    is_held = watts >= RIPPLE.at_limit * held_w
    paused_s = _count_pause_s(lengths_s, watts <= RIPPLE.pause_share * held_w)

    random = np.random.default_rng(_SEED)
    spread = RIPPLE.spread / np.sqrt(curve.gpus)
    moved_j = np.zeros(len(edges_s))
    for first, last in _list_stretches(is_held):
        stretch_s = lengths_s[first:last]
        factors = _draw_factors(random, last - first, spread)
        follows_pause = first == 0 or paused_s[first - 1] >= RIPPLE.pause_s
        if follows_pause:
            factors += _draw_overshoot(stretch_s, unlimited_w / held_w)
        moved_j[first + 1 : last + 1] = held_w * _sum_moved(factors, stretch_s)
    return _move_energy(curve, edges_s, moved_j)


def overshoot_after_pause_j(
    since_s: Array,
    held_w: float,
    unlimited_w: float,
) -> Array:
    """Return the joules that a card has drawn beyond ``held_w`` so long after a pause."""
    more_w = min(RIPPLE.boost * held_w, unlimited_w) - held_w
    most_j = max(more_w, 0.0) * RIPPLE.boosted_s
    repaid_s = RIPPLE.boosted_s + RIPPLE.interval_s
    return np.asarray(np.interp(since_s, [0.0, RIPPLE.boosted_s, repaid_s], [0.0, most_j, 0.0]))


def _list_edges(length_s: float) -> Array:
    """Return the edges of the intervals of a curve; the last one may be shorter."""
    count = int(np.ceil(length_s / RIPPLE.interval_s - 1e-9))
    edges_s = RIPPLE.interval_s * np.arange(count + 1)
    edges_s[-1] = length_s
    return np.asarray(edges_s)


def _list_stretches(is_held: Mask) -> Iterator[tuple[int, int]]:
    """Yield the first interval of each run at the limit, and the first one after it.

    >>> list(_list_stretches(np.array([False, True, True, False, True])))
    [(1, 3), (4, 5)]
    """
    padded = np.concatenate([[0], is_held.astype(np.int8), [0]])
    changes = np.diff(padded)
    begins = np.flatnonzero(changes == 1).tolist()
    ends = np.flatnonzero(changes == -1).tolist()
    yield from zip(begins, ends, strict=True)


def _count_pause_s(lengths_s: Array, is_pause: Mask) -> Array:
    """Return how long the pause is that each interval ends; nothing where it is no pause.

    >>> _count_pause_s(np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, True, False, True])).tolist()
    [1.0, 3.0, 0.0, 4.0]
    """
    so_far_s = np.cumsum(lengths_s)
    last_work_s = np.maximum.accumulate(np.where(is_pause, 0.0, so_far_s))
    return np.asarray(so_far_s - last_work_s)


def _draw_factors(
    random: np.random.Generator,
    count: int,
    spread: float,
) -> Array:
    """Draw what intervals draw beyond the mean, over the mean.

    x_k = spread (z_k - b z_(k-1)) / sqrt(1 + b^2), with z standard normal and b = ``correction``.
    """
    normal = random.standard_normal(count + 1)
    raw = normal[1:] - RIPPLE.correction * normal[:-1]
    return np.asarray(spread * raw / np.sqrt(1.0 + RIPPLE.correction**2))


def _draw_overshoot(lengths_s: Array, unlimited: float) -> Array:
    """Return what the intervals after a pause draw beyond the held power, over that power."""
    since_s = np.concatenate([[0.0], np.cumsum(lengths_s)])
    beyond_j = overshoot_after_pause_j(since_s, 1.0, unlimited)
    return np.asarray(np.diff(beyond_j) / lengths_s)


def _sum_moved(factors: Array, lengths_s: Array) -> Array:
    """Return the sum of factors up to the end of each interval; all together are nothing."""
    mean = float(factors @ lengths_s) / float(lengths_s.sum())
    moved = np.cumsum((factors - mean) * lengths_s)
    moved[-1] = 0.0
    return np.asarray(moved)


def _move_energy(
    curve: PowerCurve,
    edges_s: Array,
    moved_j: Array,
) -> PowerCurve:
    """Return the curve with joules more or less up to each edge; parts keep their shares.

    What is drawn beyond an interval's energy is spread over the interval as its energy is.
    """
    changes = np.diff(moved_j) != 0.0
    ends_change = np.concatenate([[False], changes]) | np.concatenate([changes, [False]])
    moments_s = np.union1d(curve.moments_s, edges_s[ends_change])
    joules = [np.interp(moments_s, curve.moments_s, part_j) for part_j in curve.joules.T]
    piece_j = np.diff(np.stack(joules, axis=-1), axis=0)

    edge_j = np.interp(edges_s, curve.moments_s, curve.joules.sum(axis=-1))
    factors = 1.0 + np.diff(moved_j) / np.maximum(np.diff(edge_j), 1e-300)
    interval = np.searchsorted(edges_s, moments_s[:-1], side="right") - 1
    piece_j *= factors[interval][:, np.newaxis]

    so_far_j = np.concatenate([np.zeros((1, piece_j.shape[1])), np.cumsum(piece_j, axis=0)])
    piece = np.searchsorted(curve.moments_s, moments_s[:-1], side="right") - 1
    return replace(
        curve,
        moments_s=moments_s,
        joules=so_far_j,
        states=curve.states[piece],
    )
