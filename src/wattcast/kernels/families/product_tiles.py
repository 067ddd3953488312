"""Matrix products as tiles: how many there are, what they move, and which tile a library takes.

A tile of ``tile_n`` outputs (weight rows) by ``tile_m`` tokens walks through K in steps. Where no
choice was fitted, the library is taken to pick the tile and split of K that is fastest under a
plain model [Lee2026, IV-A]:

    cycles = waves·tile_n·tile_m·2·K/split / (rate·ε) + split·(reduction)

with ε the share of the pipe's rate that a tile of that size can feed. Loads of all tiles pass L2;
device memory gives every operand once, and again where the operands of tiles in flight exceed L2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from wattcast.core.arrays import Array, Mask
from wattcast.core.strict_files import read_shipped_table
from wattcast.kernels.families.product_shapes import ProductShapes
from wattcast.kernels.kernel_choice import CHOICE, ProductSizes
from wattcast.kernels.kernel_labels import (
    NOT_RUN,
    SIMT_KIND,
    TILES,
    VECTOR_KIND,
    KernelLabel,
    TileConstants,
    feed_share,
    kind_columns,
)
from wattcast.kernels.kernel_picks import KernelPicks, picks_of_labels
from wattcast.kernels.kernel_table import (
    MOVED_SUM_BYTE,
    Columns,
    LibraryStyle,
    ReferenceChip,
    wave_fill,
)

_LIBRARY_TILES = read_shipped_table("wattcast.kernels", "library_tiles.csv")
_SIDE_N = np.array([float(tile["tile_n"]) for tile in _LIBRARY_TILES])
_SIDE_M = np.array([float(tile["tile_m"]) for tile in _LIBRARY_TILES])
_SPLITS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
# Every tile that is tried: its sides and the parts of K, ``(tile,)``
_TRIED_N = np.tile(_SIDE_N, len(_SPLITS))
_TRIED_M = np.tile(_SIDE_M, len(_SPLITS))
_TRIED_SPLIT = np.repeat(_SPLITS, len(_SIDE_N))
# Blocks of a Hopper cluster of two share what L2 sends.
_LOADS_OF_BLOCK = {LibraryStyle.HOPPER: TILES.cluster_loads, LibraryStyle.AMPERE: 1.0}
_FEED_EXPONENT_COLUMN = 4  # of ``kernel_kinds.csv``


class _TileColumns(NamedTuple):
    """What kernels do with products, ``(row, pick)``."""

    tile_n: Array
    tile_m: Array
    split: Array  # parts of K
    units: Array
    steps: Array
    slots: Array
    unit_flop: Array
    load_byte: Array
    shared_byte: Array
    fill: Array


class _Products(NamedTuple):
    """Products and the bytes of an element, ``(row, 1)`` or ``(row, pick)``."""

    b: Array
    m: Array
    n: Array
    k: Array
    width: Array


def tile_columns(
    sizes: ProductSizes,
    width: Array,
    out_width: Array,
    rate: Array,
    picks: KernelPicks,
    reference: ReferenceChip,
    least_feed: float = 0.0,
) -> Columns:
    """Return units, steps and traffic of ``b`` products ``[m, k] @ [k, n]``.

    They are averaged in logs over likely kernels. ``rate`` is FLOP per cycle and SM of the format's
    own pipe. The arithmetic of kernels on CUDA cores is counted as more by as much as those are
    slower, so that arithmetic over ``rate`` is right for both. ``k`` may be ``(row,)`` or ``(row,
    pick)``, where kernels pad it each in its own way. ``least_feed`` is the least that a tile's
    arithmetic counts over that of one of 128 x 128.
    """
    products = _Products(*(_spread_over_picks(size) for size in (*sizes, width)))
    constants = TileConstants(*picks.constants)
    tiled = _count_tiles(
        products,
        picks,
        constants,
        reference,
        least_feed,
    )
    if not constants.step_byte.all():
        tiled = _without_tiles(tiled, products, picks, reference)
    if constants.on_cuda_cores.any():
        slower = _cuda_arithmetic(constants, rate, reference, least_feed)
        tiled = tiled._replace(unit_flop=tiled.unit_flop * slower)
    columns = _average_picks(tiled, picks)
    columns["out_byte"] = (products.b * products.m * products.n)[:, 0] * out_width
    return columns


def _spread_over_picks(size: Array) -> Array:
    return size[:, np.newaxis] if size.ndim == 1 else size


def _count_tiles(
    products: _Products,
    picks: KernelPicks,
    constants: TileConstants,
    reference: ReferenceChip,
    least_feed: float,
) -> _TileColumns:
    """Return what kernels do as tiles; kernels without one are taken to load a vector at a time."""
    b, m, n, k, width = products
    tile_n = picks.tile_n
    tile_m = picks.tile_m
    tiles = b * np.ceil(n / tile_n) * np.ceil(m / tile_m)
    step = constants.step_byte / width
    if not constants.step_byte.all():
        step = np.where(picks.kind == VECTOR_KIND, TILES.vector_step, step)
    parts = picks.split
    if not parts.all():
        filling = np.floor(reference.sm_count * constants.split_blocks / tiles)
        parts = np.where(parts > 0, parts, _split_parts(k, step, filling, constants))
    units = tiles * parts
    steps = np.ceil(k / parts / step)
    load_byte = tiles * (tile_n + tile_m) * k * width
    arithmetic = np.maximum(constants.feed, least_feed)
    return _TileColumns(
        tile_n=tile_n,
        tile_m=tile_m,
        split=parts,
        units=units,
        steps=steps,
        slots=constants.slots,
        unit_flop=2.0 * tile_n * tile_m * steps * step * arithmetic,
        load_byte=load_byte,
        shared_byte=load_byte * constants.crossings,
        fill=wave_fill(units, reference.sm_count),
    )


def _split_parts(
    k: Array,
    step: Array,
    filling: Array,
    constants: TileConstants,
) -> Array:
    """Return the parts of K that fill the chip.

    Hopper's kernels make two or more, others as many as the length of K asks for.
    """
    most = np.maximum(np.floor(k / (TILES.least_steps * step)), 1.0)
    by_length = np.ceil(k / TILES.split_k)
    least = np.where(constants.least_parts > 0, constants.least_parts, by_length)
    wanted_parts = np.maximum(filling, least)
    return np.minimum(np.maximum(wanted_parts, np.minimum(2.0, most)), most)


def _without_tiles(
    tiled: _TileColumns,
    products: _Products,
    picks: KernelPicks,
    reference: ReferenceChip,
) -> _TileColumns:
    """Put in what kernels without a tile do: a block takes some outputs of all rows."""
    b, m, n, k, width = products
    is_vector = picks.kind == VECTOR_KIND
    units = np.where(is_vector, b * np.ceil(n / TILES.vector_outputs), tiled.units)
    load_byte = np.where(is_vector, b * n * k * width, tiled.load_byte)
    crossings = TileConstants(*picks.constants).crossings
    return tiled._replace(
        units=units,
        fill=wave_fill(units, reference.sm_count),
        unit_flop=np.where(is_vector, 2.0 * TILES.vector_outputs * m * k, tiled.unit_flop),
        load_byte=load_byte,
        shared_byte=load_byte * crossings,
    )


def _cuda_arithmetic(
    constants: TileConstants,
    rate: Array,
    reference: ReferenceChip,
    least_feed: float,
) -> Array:
    """Return by how much arithmetic on CUDA cores counts as more, ``(row, pick)``."""
    feed = np.maximum(constants.feed, least_feed)
    crowding = feed ** (_crowd_slots(reference) - 1.0)
    core_rate = reference.per_cycle.get("cuda_fp32_flop", 0.0)
    slower = np.ones((len(rate), 1))
    if core_rate > 0:
        slower = np.maximum(rate[:, np.newaxis] / core_rate, 1.0)
    return np.where(constants.on_cuda_cores > 0, crowding * slower, 1.0)


def _average_picks(tiled: _TileColumns, picks: KernelPicks) -> Columns:
    """Return columns ``(row,)`` from columns ``(row, pick)``, averaged in logs by likelihood.

    A row that is sure of its kernel stays as it is: a logarithm and back would turn 132 units into
    a little more.
    """
    if picks.share.shape[1] == 1:
        return {name: values[:, 0] for name, values in zip(tiled._fields, tiled, strict=True)}
    table = np.array(tiled)
    mean = np.exp((np.log(table) * picks.share).sum(axis=-1))
    columns = np.where(picks.sure, table[..., 0], mean)
    return dict(zip(tiled._fields, columns, strict=True))


def count_label(
    shapes: ProductShapes,
    label: KernelLabel,
    rate: float,
    reference: ReferenceChip,
) -> dict[str, float]:
    """Return what one product does as tiles of a kernel: units, steps, loads, bytes of a stage."""
    picks = picks_of_labels({0: label}, [NOT_RUN])
    least_feed = 1.0 if reference.style is LibraryStyle.AMPERE else 0.0
    columns = tile_columns(
        shapes.sizes,
        shapes.width,
        shapes.out_width,
        np.array([rate]),
        picks,
        reference,
        least_feed,
    )
    numbers = {name: float(values[0]) for name, values in columns.items()}
    step_byte = float(TileConstants(*picks.constants).step_byte[0, 0])
    numbers["stage_byte"] = (label.tile_n + label.tile_m) * step_byte
    return numbers


class LibraryRules(NamedTuple):
    """Which tiles a library has for each product; masks are ``(row,)``."""

    slim: Mask  # tiles a few tokens wide exist: in Hopper's, for aligned tensor formats
    whole: Mask  # K is never split: on CUDA cores and in convolutions
    cuda: Mask | None = None  # products on CUDA cores; None: the format's own pipe is fed alike
    reduce_cycles: Array | float = TILES.reduce_cycles  # of a split of K
    large_tiles: float = 0.0  # exponent of the area by which tiles beyond 128 x 128 seem faster


class FastestTile(NamedTuple):
    """The sides of the fastest tile of each product, and parts of K, ``(row,)``."""

    n: Array
    m: Array
    split: Array


def fastest_tile(
    sizes: ProductSizes,
    width: Array,
    rate: Array,
    rules: LibraryRules,
    reference: ReferenceChip,
) -> FastestTile:
    """Return the tile and the split of K that are fastest under the plain model above."""
    b, m, n, k = (size[:, np.newaxis] for size in sizes)
    area = _TRIED_N * _TRIED_M

    # Compute: waves of tiles, each of so many steps
    tiles = b * np.ceil(n / _TRIED_N) * np.ceil(m / _TRIED_M)
    steps = np.ceil(k / _TRIED_SPLIT / CHOICE.step_k)
    waves = np.ceil(tiles * _TRIED_SPLIT / reference.sm_count)
    feed = _feed(area / TILES.standard_side**2, rules, reference)
    step_cycles = 2.0 * area * CHOICE.step_k / (rate[:, np.newaxis] * feed)
    compute_cycles = waves * steps * np.maximum(step_cycles, TILES.step_cycles)

    # Loads, and sums of a split, through L2
    load_share = _LOADS_OF_BLOCK[reference.style]
    load_byte = load_share * tiles * (_TRIED_N + _TRIED_M) * k * width[:, np.newaxis]
    load_cycles = load_byte / reference.l2_byte_per_cycle
    sum_cycles = MOVED_SUM_BYTE * _TRIED_SPLIT * b * m * n / reference.l2_byte_per_cycle
    reduce_cycles = np.broadcast_to(rules.reduce_cycles, len(width))[:, np.newaxis] + sum_cycles
    cycles = np.maximum(compute_cycles, load_cycles)
    cycles += np.where(_TRIED_SPLIT > 1, reduce_cycles, 0.0)

    is_missing = _find_missing_tiles(steps, rules, reference)
    best = np.argmin(np.where(is_missing, np.inf, cycles), axis=-1)
    return FastestTile(_TRIED_N[best], _TRIED_M[best], _TRIED_SPLIT[best])


def _find_missing_tiles(
    steps: Array,
    rules: LibraryRules,
    reference: ReferenceChip,
) -> Mask:
    """Return the tried tiles that the library does not have, ``(row, tile)``."""
    is_hopper = reference.style is LibraryStyle.HOPPER
    never_splits = rules.whole[:, np.newaxis] | (steps < TILES.least_steps)
    is_missing = (_TRIED_SPLIT > 1) & never_splits
    if not is_hopper:
        is_missing |= TILES.largest_ampere_area < _TRIED_N * _TRIED_M
    has_slim = rules.slim[:, np.newaxis] & is_hopper
    is_missing |= ~has_slim & (np.minimum(_TRIED_N, _TRIED_M) < TILES.slim_side)
    return np.asarray(is_missing)


def _feed(
    area: Array,
    rules: LibraryRules,
    reference: ReferenceChip,
) -> Array:
    """Return the share of its pipe's rate that each tile can feed, ``(tile,)`` or ``(row,
    tile)``.
    """
    feed = feed_share(area) * np.maximum(area, 1.0) ** rules.large_tiles
    if rules.cuda is None:
        return feed
    return np.where(rules.cuda[:, np.newaxis], _feed_cuda_cores(area, reference), feed)


_FEW_LANES = 64.0  # of fp32, that leave every other slot of the schedulers free


def _crowd_slots(reference: ReferenceChip) -> float:
    """Return how far multiply-adds crowd other instructions out, from 0 to 1.

    It is 0 of an SM of 64 fp32 lanes and 1 of one of 128. The four schedulers of an SM issue 128
    lanes' worth of instructions a cycle. With 128 lanes multiply-adds take every slot, and each
    load of operands costs one of them; with 64 they take every other, and loads fit in between.
    """
    lanes = reference.per_cycle.get("cuda_fp32_flop", 0.0) / 2.0
    return float(np.clip(lanes / _FEW_LANES - 1.0, 0.0, 1.0))


def _feed_cuda_cores(area: Array, reference: ReferenceChip) -> Array:
    """Return the share of the CUDA cores' rate that a tile reaches, by its area over 128².

    A thread of a tile of 64 x 64 or more computes 8 x 8 results, one of a smaller tile fewer, so
    that it loads more for each multiply-add. On SMs of 128 lanes the share falls with the area from
    128 x 128 on (measured on an H200: 0.76 of the peak with tiles of 128 x 128, 0.65 with 128 x 64,
    0.55 with 64 x 64; the median of 9, 5 and 12 products). With 64 lanes smaller tiles are as fast,
    and libraries still prefer the larger one where the SMs are as full.
    """
    exponent = kind_columns()[_FEED_EXPONENT_COLUMN, SIMT_KIND]
    small_area = np.minimum(1.0, area)
    large_threads = np.minimum(1.0, area / TILES.cuda_thread_area)
    free = large_threads**exponent * small_area**TILES.large_cuda_tiles
    crowded = small_area**exponent
    share = _crowd_slots(reference)
    return np.asarray(free ** (1.0 - share) * crowded**share)


def reread_byte(
    m: Array,
    n: Array,
    operand_byte: Array,
    resident: Array,
    tile: Mapping[str, Array],
) -> Array:
    """Return the bytes that device memory gives again because tiles in flight outgrow L2.

    None where all of a product stays in L2 (``resident`` is the share that does); else the more,
    the more tiles share an operand on its shorter side, up to a limit.
    """
    shorter = np.minimum(np.ceil(n / tile["tile_n"]), np.ceil(m / tile["tile_m"]))
    reread_share = 1.0 - np.exp(-(shorter - 1.0) / TILES.reread_tiles)
    return np.asarray(TILES.reread_limit * reread_share * operand_byte * (1.0 - resident))
