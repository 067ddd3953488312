"""What each candidate kernel would do with a product: padding, waves, the cost of the plain scaffold.

The terms x_c of :mod:`wattcast.kernels.choose`, as a fit needs them, one by one. A choice already fitted adds them
up in :mod:`wattcast.kernels.score`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wattcast.arrays import Array
from wattcast.kernels.tiles import Flags, slots_of

STEP_K = 64.0
LOADS = 5500.0  # elements of both operands that the scaffold loads in a cycle
SPLIT_CYCLES = 1500.0  # of a split of K: another pass through L2
LONGEST = 4096.0  # side of a product beyond which its ratio to the other tells no more


def candidate_terms(
    b: Array, m: Array, n: Array, k: Array, kind: Any, tile_n: Array, tile_m: Array, split: Flags, sms: float
) -> Array:
    """What each candidate would do with each product, ``(row, candidate, term)``."""
    held, step_cycles = scaffold(kind, tile_n, tile_m)
    b, m, n, k = (size[:, np.newaxis] for size in (b, m, n, k))
    across, down = np.ceil(n / tile_n), np.ceil(m / tile_m)
    tiles = b * across * down
    parts = np.where(split, np.maximum(np.floor(sms * held / tiles), 2.0), 1.0)
    full = tiles * parts / (sms * held)
    waves = np.ceil(full)
    compute = waves * held * np.ceil(k / parts / STEP_K) * step_cycles
    loads = tiles * (tile_n + tile_m) * k / LOADS
    cost = np.log(np.maximum(compute, loads) + np.where(split, SPLIT_CYCLES, 0.0))
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
    sides = np.log(np.minimum(n, LONGEST) / tile_n) - np.log(np.minimum(m, LONGEST) / tile_m)
    np.abs(sides, out=found[8])
    found[9] = across == n
    found[10] = down == m
    found[11] = waves <= 1
    found[12] = waves <= 2
    found[13] = np.maximum(m, 8.0) <= tile_m
    found[14] = split * np.log(k)
    found[15] = split * np.log(tiles)
    found[16] = split & (tiles <= sms / 2.0)
    return np.moveaxis(found, 0, -1)


def scaffold(kind: Any, tile_n: Array, tile_m: Array) -> tuple[Array, Array]:
    """Of each candidate, tiles that an SM works on at a time, and cycles of a step of K of one of them."""
    area = tile_n * tile_m
    feed = np.minimum(1.0, 0.12 + 0.88 * np.sqrt(area / 128.0**2))
    return slots_of(kind == "hopper", area), np.maximum(2.0 * area * STEP_K / (4096.0 * feed), 60.0)
