"""What each candidate kernel would do with a product: padding, waves, the cost of the plain scaffold.

The terms x_c of :mod:`wattcast.kernels.choose`. What depends on the candidates alone is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array

STEP_K = 64.0
# Blocks of kernels before Hopper that registers and shared memory of an SM hold, by elements of their tile.
_AREAS, _HELD = np.array([2048.0, 4096.0, 8192.0, 32768.0]), np.array([12.0, 9.0, 4.0, 2.0, 1.0])
Flags = npt.NDArray[np.bool_]


def slots_of(hopper: Flags, area: Array) -> Array:
    """Tiles an SM works on at a time: one of Hopper's, which fill it; more of smaller ones before."""
    return np.where(hopper, 1.0, _HELD[np.searchsorted(_AREAS, area, side="right")])


def candidate_terms(
    b: Array, m: Array, n: Array, k: Array, kind: Any, tile_n: Array, tile_m: Array, split: Flags, sms: float
) -> Array:
    """What each candidate would do with each product, ``(row, candidate, term)``."""
    return np.moveaxis(terms_first(b, m, n, k, Candidates.of(kind, tile_n, tile_m, split), sms), 0, -1)


@dataclass(frozen=True)
class Candidates:
    """What does not depend on the product, ``(candidate,)``."""

    tile_n: Array
    tile_m: Array
    split: Flags
    held: Array  # tiles on an SM at a time
    step_cycles: Array  # of a step of K of all of them
    split_cycles: Array

    @classmethod
    def of(cls, kind: Any, tile_n: Array, tile_m: Array, split: Flags) -> Candidates:
        """From the kinds and tiles alone."""
        area = tile_n * tile_m
        held = slots_of(kind == "hopper", area)
        feed = np.minimum(1.0, 0.12 + 0.88 * np.sqrt(area / 128.0**2))
        cycles = np.maximum(2.0 * area * STEP_K / (4096.0 * feed), 60.0)
        return cls(tile_n, tile_m, split, held, cycles, np.where(split, 1500.0, 0.0))


def terms_first(b: Array, m: Array, n: Array, k: Array, of: Candidates, sms: float) -> Array:
    """The same as :func:`candidate_terms` with terms first, ``(term, row, candidate)``."""
    b, m, n, k = (size[:, np.newaxis] for size in (b, m, n, k))
    tile_n, tile_m, split, held = of.tile_n, of.tile_m, of.split, of.held
    across, down = np.ceil(n / tile_n), np.ceil(m / tile_m)
    tiles = b * across * down
    parts = np.where(split, np.maximum(np.floor(sms * held / tiles), 2.0), 1.0)
    full = tiles * parts / (sms * held)
    waves = np.ceil(full)
    compute = waves * held * np.ceil(k / parts / STEP_K) * of.step_cycles
    loads = tiles * (tile_n + tile_m) * k / 5500.0
    cost = np.log(np.maximum(compute, loads) + of.split_cycles)
    log_compute, log_loads, log_full = np.log(compute), np.log(loads), np.log(full)
    across *= tile_n
    down *= tile_m
    found = np.empty((17, *tiles.shape))
    np.subtract(cost, cost.min(axis=1, keepdims=True), out=found[0])
    np.log(across / n, out=found[1])
    np.log(down / m, out=found[2])
    np.log(waves / full, out=found[3])
    np.maximum(-log_full, 0.0, out=found[4])
    np.maximum(log_full, 0.0, out=found[5])
    np.subtract(log_compute, log_compute.min(axis=1, keepdims=True), out=found[6])
    np.subtract(log_loads, log_loads.min(axis=1, keepdims=True), out=found[7])
    sides = np.log(np.minimum(n, 4096.0) / tile_n) - np.log(np.minimum(m, 4096.0) / tile_m)
    np.abs(sides, out=found[8])
    found[9] = across == n
    found[10] = down == m
    found[11] = waves <= 1
    found[12] = waves <= 2
    found[13] = np.maximum(m, 8.0) <= tile_m
    found[14] = split * np.log(k)
    found[15] = split * np.log(tiles)
    found[16] = split & (tiles <= sms / 2.0)
    return found
