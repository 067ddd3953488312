"""Products as tiles: which tile a library takes, how many there are, and what they move.

A tile of ``tile_n`` outputs (weight rows) by ``tile_m`` tokens walks through K in steps; the library
is taken to pick the tile and split of K that is fastest under the plain scaffold [Lee2026, IV-A]:

    cycles = waves·tile_n·tile_m·2·K/split / (rate·ε) + split·(reduction)

with ε the share of the pipe's rate a tile of that size can feed. Loads of all tiles pass L2; DRAM
gives every operand once, and again when the panel that is in flight exceeds L2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels.work import Columns, Reference, Style, alignment, fill, log2, resident

# Sides of the tiles that cuBLAS's Hopper and Ampere kernels come in, along outputs and tokens.
_SIDE_N = np.array([64, 128, 192, 256, 64, 128, 64, 128, 64, 64, 128, 256, 192, 128, 8, 16, 32, 32], dtype=np.float64)
_SIDE_M = np.array([8, 8, 16, 16, 16, 32, 32, 64, 64, 128, 128, 128, 192, 256, 64, 64, 64, 32], dtype=np.float64)
_SPLIT = np.array([1, 2, 4, 8, 16], dtype=np.float64)
STEP_K = 64.0
_MULTICAST = {Style.HOPPER: 0.5, Style.AMPERE: 1.0}  # blocks of a cluster of two share what L2 sends
_AMPERE_AREA = 256.0 * 128.0  # outputs of the largest tile that registers hold before Hopper
_REDUCE_CYCLES = 1500.0  # of a split: another pass through L2
_STEP_CYCLES = 60.0  # a step of K costs no less than its latency over the stages in flight


def product(
    b: Array,
    m: Array,
    n: Array,
    k: Array,
    width: Array,
    out_width: Array,
    rate: Array,
    slim: npt.NDArray[np.bool_],
    whole: npt.NDArray[np.bool_],
    reference: Reference,
) -> Columns:
    """Tile, units and traffic of ``b`` products ``[m, k] @ [k, n]``; ``rate`` is FLOP per cycle and SM.

    ``slim`` says where tiles a few tokens wide exist: in Hopper's library, for aligned tensor formats.
    ``whole`` says where K is never split: on CUDA cores and in convolutions.
    """
    one = (slice(None), None)
    split = np.repeat(_SPLIT, len(_SIDE_N))
    side_n, side_m = np.tile(_SIDE_N, len(_SPLIT)), np.tile(_SIDE_M, len(_SPLIT))
    tiles = b[one] * np.ceil(n[one] / side_n) * np.ceil(m[one] / side_m)
    steps = np.ceil(k[one] / split / STEP_K)
    feed = np.minimum(1.0, 0.12 + 0.88 * np.sqrt(side_n * side_m / (128.0 * 128.0)))
    waves = np.ceil(tiles * split / reference.sm_count)
    compute = waves * steps * np.maximum(2.0 * side_n * side_m * STEP_K / (rate[one] * feed), _STEP_CYCLES)
    l2 = _MULTICAST[reference.style] * tiles * (side_n + side_m) * k[one] * width[one] / reference.l2_byte_per_cycle
    reduce = np.where(split > 1, _REDUCE_CYCLES + 8.0 * split * (b * m * n)[one] / reference.l2_byte_per_cycle, 0.0)
    over = np.where((split > 1) & (steps < 4), np.inf, 0.0)
    hopper = reference.style is Style.HOPPER
    over = over + np.where(~(slim[one] & hopper) & (np.minimum(side_n, side_m) < 32), np.inf, 0.0)
    over = over + np.where(not hopper and side_n * side_m > _AMPERE_AREA, np.inf, 0.0)
    over = over + np.where(whole[one] & (split > 1), np.inf, 0.0)
    best = np.argmin(np.maximum(compute, l2) + reduce + over, axis=-1)
    rows = np.arange(len(m))
    chosen_n, chosen_m, chosen_split = side_n[best], side_m[best], split[best]
    units = tiles[rows, best] * chosen_split
    load = tiles[rows, best] * (chosen_n + chosen_m) * k * width
    return {
        "tile_n": chosen_n,
        "tile_m": chosen_m,
        "split": chosen_split,
        "units": units,
        "steps": steps[rows, best],
        "unit_flop": 2.0 * chosen_n * chosen_m * steps[rows, best] * STEP_K,
        "load_byte": load,
        "shared_byte": load * (1.0 + _reads(chosen_n, chosen_m, reference.style)),
        "fill": fill(units, reference.sm_count),
        "out_byte": b * m * n * out_width,
    }


def _reads(tile_n: Array, tile_m: Array, style: Style) -> Array:
    """How often a byte that was written to shared memory is read again.

    On Hopper each m64 warpgroup reads its own rows and the columns of the tile, most of them. Before, a tile is cut
    into warp tiles of up to 64 x 64 (a quarter of a smaller tile), and each warp loads both of its operands
    [Lee2026, IV-A]: area/w² warps of 2·w columns over the tile's own rows and columns.
    """
    if style is Style.HOPPER:
        return np.asarray(0.6 * np.maximum(tile_n, tile_m) / 64.0)
    area = tile_n * tile_m
    return np.asarray(2.0 * area / (np.minimum(64.0, np.sqrt(area / 4.0)) * (tile_n + tile_m)))


def panel_reread(b: Array, m: Array, n: Array, k: Array, width: Array, tile: Columns, reference: Reference) -> Array:
    """Bytes DRAM gives again because tiles in flight outgrow L2.

    One wave of tiles is a square panel of √SMs by √SMs tiles; it keeps its rows in L2 while it walks
    over the columns. When both operands of a product exceed L2, each further panel reads the
    other operand again.
    """
    side = np.sqrt(reference.sm_count)
    stripe_m = tile["tile_m"] * side
    right, left = n * k * width, m * k * width
    exceeds = 1.0 - resident(right + np.minimum(stripe_m, m) * k * width, reference.l2_byte)
    passes = np.maximum(np.ceil(m / stripe_m) - 1.0, 0.0)
    return np.asarray(b * np.where(left > 0, exceeds * passes * right * 0.3, 0.0))


def features(b: Array, m: Array, n: Array, k: Array, tile: Columns, reference: Reference) -> Columns:
    """Shape-only features of a product, for the kernel choice and the learned residual."""
    found = {
        "log_b": log2(b),
        "log_m": log2(m),
        "log_n": log2(n),
        "log_k": log2(k),
        "align_m": alignment(m),
        "align_n": alignment(n),
        "align_k": alignment(k),
        "tile_n": tile["tile_n"],
        "tile_m": tile["tile_m"],
        "split": tile["split"],
        "fill": tile["fill"],
        "log_units": log2(tile["units"]),
    }
    for side_n, side_m in ((128.0, 128.0), (64.0, 64.0), (256.0, 128.0), (64.0, 8.0)):
        units = b * np.ceil(n / side_n) * np.ceil(m / side_m)
        found[f"fill_{side_n:.0f}x{side_m:.0f}"] = fill(units, reference.sm_count)
        found[f"waves_{side_n:.0f}x{side_m:.0f}"] = np.log2(units / reference.sm_count)
    return found
