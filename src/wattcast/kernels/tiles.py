"""Kinds of kernels for products, and what follows from a kind and the sides of its tile, whatever the product."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array

KINDS = ("hopper", "ampere", "turing", "wmma", "direct", "simt", "plain", "vector")
HOPPER, VECTOR_KIND = KINDS.index("hopper"), KINDS.index("vector")
SIDE = 128.0
_BY_KIND = np.array(
    [
        # bytes of K that a block takes at a time
        [128.0, 64.0, 64.0, 128.0, 32.0, 32.0, 32.0, 0.0],
        # blocks on an SM that a split of K aims at; from grids
        [1.0, 1.0, 2.5, 2.5, 2.5, 2.0, 2.0, 2.5],
        # parts of a split K at least; 0: by its length
        [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        # on CUDA cores, whatever the format
        [float(kind in ("simt", "plain", "vector")) for kind in KINDS],
        # how the share of the pipe's rate that a tile feeds falls with its area: (128²/area)^x; measured on an H200
        [0.0, 0.38, 0.38, 0.38, 0.38, 0.3, 0.3, 0.0],
        # how often a loaded byte crosses shared memory over what a Hopper kernel of the same tile does (warps before
        # Hopper load operands each for themselves; from profiler counters)
        [1.0, 2.2, 2.2, 2.2, 2.2, 3.5, 3.5, 1.0],
    ]
)
# Blocks of kernels before Hopper that registers and shared memory of an SM hold, by elements of their tile.
_AREAS, _HELD = np.array([2048.0, 4096.0, 8192.0, 32768.0]), np.array([12.0, 9.0, 4.0, 2.0, 1.0])
_HELD_VECTORS = 16.0
Flags = npt.NDArray[np.bool_]
TILE_CONSTANTS = 7


def tile_constants(kind: npt.NDArray[np.int64], tile_n: Array, tile_m: Array) -> Array:
    """``TILE_CONSTANTS`` rows: the first four of ``_BY_KIND``, tiles that an SM holds, arithmetic over what a tile
    that feeds the pipe takes, and bytes through shared memory over those loaded."""
    step_byte, blocks, fewest, cuda, feed, crossings = _BY_KIND[:, kind]
    area = tile_n * tile_m
    slots = np.where(kind == VECTOR_KIND, _HELD_VECTORS, slots_of(kind == HOPPER, area))
    # written once; each m64 warpgroup then reads its own rows and the columns of the tile, most of them
    shared = (1.0 + 0.6 * np.maximum(tile_n, tile_m) / 64.0) * crossings
    return np.array([step_byte, blocks, fewest, cuda, slots, (SIDE**2 / area) ** feed, shared])


def slots_of(hopper: Flags, area: Array) -> Array:
    """Tiles an SM works on at a time: one of Hopper's, which fill it; more of smaller ones before."""
    return np.where(hopper, 1.0, _HELD[np.searchsorted(_AREAS, area, side="right")])
