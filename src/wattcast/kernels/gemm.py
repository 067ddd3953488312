"""Products as tiles: how many there are, what they move, and the fastest tile where no library's choice is known.

A tile of ``tile_n`` outputs (weight rows) by ``tile_m`` tokens walks through K in steps. Without a fitted choice the
library is taken to pick the tile and split of K that is fastest under the plain scaffold [Lee2026, IV-A]:

    cycles = waves·tile_n·tile_m·2·K/split / (rate·ε) + split·(reduction)

with ε the share of the pipe's rate a tile of that size can feed. Loads of all tiles pass L2; DRAM
gives every operand once, and again when the panel that is in flight exceeds L2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels.candidates import STEP_K
from wattcast.kernels.picks import Picks
from wattcast.kernels.tiles import SIDE, VECTOR_KIND
from wattcast.kernels.work import Columns, Reference, Style, fill

# Sides of the tiles that cuBLAS's Hopper and Ampere kernels come in, along outputs and tokens.
_SIDE_N = np.array([64, 128, 192, 256, 64, 128, 64, 128, 64, 64, 128, 256, 192, 128, 8, 16, 32, 32], dtype=np.float64)
_SIDE_M = np.array([8, 8, 16, 16, 16, 32, 32, 64, 64, 128, 128, 128, 192, 256, 64, 64, 64, 32], dtype=np.float64)
_SPLIT = np.array([1, 2, 4, 8, 16], dtype=np.float64)
_MULTICAST = {Style.HOPPER: 0.5, Style.AMPERE: 1.0}  # blocks of a cluster of two share what L2 sends
_AMPERE_AREA = 256.0 * 128.0  # outputs of the largest tile that registers hold before Hopper
_REDUCE_CYCLES = 1500.0  # of a split: another pass through L2
_STEP_CYCLES = 60.0  # a step of K costs no less than its latency over the stages in flight
_LEAST_STEPS = 4.0  # of one part of a split K
_ROW_OUTPUTS, _ROW_STEP = 8.0, 512.0  # of a block of the kernels without a tile, and elements of K it loads at a time
_SPLIT_K = 1500.0  # the most of K that a split leaves to a block; from grids


def tiled(
    b: Array,
    m: Array,
    n: Array,
    k: Array,
    width: Array,
    out_width: Array,
    rate: Array,
    picks: Picks,
    reference: Reference,
) -> Columns:
    """Units, steps and traffic of ``b`` products ``[m, k] @ [k, n]``: of each pick, averaged in logs by likelihood.

    ``rate`` is FLOP per cycle and SM of the format's own pipe; kernels on CUDA cores take the longer by as much as
    those are slower, so that arithmetic over ``rate`` is right for both.

    ``k`` may be ``(row,)`` or ``(row, pick)``, where kernels pad it each in its own way.
    """
    tile_n, tile_m, parts = picks.tile_n, picks.tile_m, picks.split
    step_byte, blocks, fewest, cuda, slots, feed, crossings = picks.constants
    b, m, n, width = (size[:, np.newaxis] for size in (b, m, n, width))
    k = k[:, np.newaxis] if k.ndim == 1 else k
    tiles = b * np.ceil(n / tile_n) * np.ceil(m / tile_m)
    step, vector = step_byte / width, None
    if not step_byte.all():  # kernels without a tile: a block takes some outputs of all rows
        vector = picks.kind == VECTOR_KIND
        step = np.where(vector, _ROW_STEP, step)
    if not parts.all():
        parts = np.where(parts > 0, parts, _parts(k, step, tiles, reference.sm_count * blocks, fewest))
    units, steps = tiles * parts, np.ceil(k / parts / step)
    load = tiles * (tile_n + tile_m) * k * width
    unit_flop = 2.0 * tile_n * tile_m * steps * step * feed
    if vector is not None:
        units = np.where(vector, b * np.ceil(n / _ROW_OUTPUTS), units)
        load = np.where(vector, b * n * k * width, load)
        unit_flop = np.where(vector, 2.0 * _ROW_OUTPUTS * m * k, unit_flop)
    if cuda.any():
        cores = reference.per_cycle.get("cuda_fp32_flop", 0.0)
        slower = rate[:, np.newaxis] / cores if cores > 0 else np.ones((len(rate), 1))
        unit_flop = unit_flop * np.where(cuda > 0, np.maximum(slower, 1.0), 1.0)
    shared = load * crossings
    each = (tile_n, tile_m, parts, units, steps, slots, unit_flop, load, shared, fill(units, reference.sm_count))
    return dict(zip(_TILED, _averaged(each, picks), strict=True)) | {"out_byte": (b * m * n)[:, 0] * out_width}


_TILED = (
    *("tile_n", "tile_m", "split", "units", "steps", "slots"),
    *("unit_flop", "load_byte", "shared_byte", "fill"),
)


def _parts(k: Array, step: Array, tiles: Array, blocks: Array, fewest: Array) -> Array:
    """Parts that K is cut into to fill the chip; Hopper's kernels make two or more, others by the length of K."""
    most = np.maximum(np.floor(k / (_LEAST_STEPS * step)), 1.0)
    filling = np.maximum(np.floor(blocks / tiles), np.where(fewest > 0, fewest, np.ceil(k / _SPLIT_K)))
    return np.minimum(np.maximum(filling, np.minimum(2.0, most)), most)


def _averaged(each: Sequence[Array], picks: Picks) -> Sequence[Array]:
    """Columns ``(row,)`` of columns ``(row, pick)``: averaged in logs by likelihood.

    A row that is sure of its kernel is as it is: a logarithm and back would turn 132 units into a little more.
    """
    if picks.share.shape[1] == 1:
        return [values[:, 0] for values in each]
    table = np.array(each)
    mean = np.exp((np.log(table) * picks.share).sum(axis=-1))
    return list(np.where(picks.sure, table[..., 0], mean))


def fastest(
    b: Array,
    m: Array,
    n: Array,
    k: Array,
    width: Array,
    rate: Array,
    slim: npt.NDArray[np.bool_],
    whole: npt.NDArray[np.bool_],
    reference: Reference,
) -> tuple[Array, Array, Array]:
    """Sides of the tile along outputs and tokens, and parts of K; ``rate`` is FLOP per cycle and SM.

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
    over = np.where((split > 1) & (steps < _LEAST_STEPS), np.inf, 0.0)
    hopper = reference.style is Style.HOPPER
    over = over + np.where(~(slim[one] & hopper) & (np.minimum(side_n, side_m) < 32), np.inf, 0.0)
    over = over + np.where(not hopper and side_n * side_m > _AMPERE_AREA, np.inf, 0.0)
    over = over + np.where(whole[one] & (split > 1), np.inf, 0.0)
    best = np.argmin(np.maximum(compute, l2) + reduce + over, axis=-1)
    return side_n[best], side_m[best], split[best]


def reread(m: Array, n: Array, operand_byte: Array, in_l2: Array, tile: Columns) -> Array:
    """Bytes of the operands that DRAM gives again because tiles in flight outgrow L2.

    None where all of a product stays in L2 (``in_l2``, the share that does); else more the more tiles share an
    operand on its shorter side, up to once and a half again: profiler counters of 25 products on an H200.
    """
    shorter = np.minimum(np.ceil(n / tile["tile_n"]), np.ceil(m / tile["tile_m"]))
    again = _MOST_AGAIN * (1.0 - np.exp(-(shorter - 1.0) / _TILES_AGAIN))
    return np.asarray(again * operand_byte * (1.0 - in_l2))


_MOST_AGAIN, _TILES_AGAIN = 1.4, 9.0


def features(b: Array, m: Array, n: Array, k: Array, tile: Columns, reference: Reference) -> tuple[Columns, ...]:
    """Shape-only features of a product, for the learned residual: plain, in logs, and by alignment."""
    units = b * np.ceil(n / SIDE) * np.ceil(m / SIDE)
    waves = np.array([tile["units"] / tile["slots"], units]) / reference.sm_count
    rounds, waves_128 = np.log2(waves)
    plain = {
        "tile_n": tile["tile_n"],
        "tile_m": tile["tile_m"],
        "fill": tile["fill"],
        "rounds": rounds,
        "fill_128x128": waves[1] / np.maximum(np.ceil(waves[1]), 1.0),
        "waves_128x128": waves_128,
    }
    logs = {"log_b": b, "log_m": m, "log_n": n, "log_k": k, "split": tile["split"], "log_units": tile["units"]}
    return plain, logs, {"align_m": m, "align_n": n, "align_k": k}
