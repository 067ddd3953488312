"""What single coefficients of libraries' kernels mean: each test fails with its number a third
off.
"""

from __future__ import annotations

import math

import numpy as np

from wattcast.calibrate.kernel_rows import parse_operators, read_plain_rows
from wattcast.hardware import load_gpu
from wattcast.kernels import reference_chip
from wattcast.kernels.families import product_tiles
from wattcast.kernels.families.attention import fill_with_parts, flash_parts
from wattcast.kernels.kernel_labels import find_label


def split_as_flash_attention(tiles: int, sm_count: int, blocks: int) -> int:
    """Return what ``num_splits_heuristic`` of FlashAttention 2.5 (``flash_api.cpp``) returns."""
    if tiles >= 0.8 * sm_count:
        return 1
    most = min(128, sm_count, blocks)  # the caller passes ``max_splits`` of 128
    efficiency = {}
    for splits in range(1, most + 1):
        if splits > 1 and math.ceil(blocks / splits) == math.ceil(blocks / (splits - 1)):
            continue
        waves = tiles * splits / sm_count
        efficiency[splits] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(splits for splits, share in efficiency.items() if share >= 0.85 * best)


def test_caches_are_cut_into_the_parts_that_flash_attention_cuts_them_into() -> None:
    cases = [(1, 264, 4096), (2, 264, 4096), (3, 216, 500), (8, 264, 64), (32, 264, 100)]
    parts = [fill_with_parts(float(tiles), blocks, slots) for tiles, slots, blocks in cases]
    assert parts == [split_as_flash_attention(*case) for case in cases]
    assert max(parts) > 100  # some of them reach for the most parts


def test_blocks_of_keys_are_shorter_for_wider_heads() -> None:
    """One head on many SMs: a cache is cut into as many parts as it has blocks of keys."""
    flash_parts.cache_clear()
    parts = {dim: flash_parts(1.0, 4096, dim, 108.0) for dim in (64, 72, 128, 136)}
    flash_parts.cache_clear()
    assert parts[64] < parts[72] == parts[128] < parts[136]


def test_threads_of_a_tile_of_64_x_64_on_cuda_cores_compute_as_much_as_those_of_larger_ones() -> (
    None
):
    """From 128 x 128 over 128 x 64 to 64 x 64 each halving costs the same; the next one costs more,
    since a thread then has fewer than 8 x 8 results.
    """
    chip = reference_chip(load_gpu("a100-sxm-80gb"))  # whose SMs have 64 lanes
    area = np.array([128 * 128, 128 * 64, 64 * 64, 64 * 32]) / 128**2
    share = product_tiles._feed_cuda_cores(area, chip)
    halved = share[1:] / share[:-1]
    assert np.isclose(halved[1], halved[0], rtol=1e-9)
    assert halved[2] < 0.9 * halved[1]


def test_the_largest_tile_that_is_tried_on_ampere_is_the_largest_that_its_kernels_have() -> None:
    """Kernels of Ampere that the H200 ran are those of an A100, by their names."""
    named = {
        tuple(row["kernel_names"])
        for row in read_plain_rows("h200")
        if row["family"] in ("linear", "bmm") and row.get("kernel_names")
    }
    labels = [find_label(names) for names in named]
    areas = [label.tile_n * label.tile_m for label in labels if label and label.kind == "ampere"]
    tried = product_tiles._TRIED_N * product_tiles._TRIED_M
    assert tried[tried <= product_tiles.TILES.largest_ampere_area].max() == max(areas)


def test_tiles_with_a_side_below_32_are_for_products_of_a_few_hundred_rows() -> None:
    """None of the larger products that an H200 ran took such a tile."""
    rows = {
        f"{row['operator']} {row['layout']} {row['detail']}": row
        for row in read_plain_rows("h200")
        if row["family"] in ("linear", "bmm") and row.get("kernel_names") and not row["error"]
    }
    ops = parse_operators([row["operator"] for row in rows.values()], "h200")
    sides = []
    for op, row in zip(ops, rows.values(), strict=True):
        label = find_label(row["kernel_names"])
        has_tile = label is not None and label.kind in ("hopper", "ampere", "turing")
        if has_tile and min(op.m, op.n) > 320:
            sides.append(min(label.tile_n, label.tile_m))
    assert len(sides) > 1000
    assert min(sides) >= product_tiles.TILES.slim_side
