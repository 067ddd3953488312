"""What libraries of engines do, as their sources say: sizes of tiles, parts of k, and kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattcast.core import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import reference_chip
from wattcast.kernels.families.engine import (
    fused_experts,
    latent_attention,
    narrow_products,
    paged_attention,
)
from wattcast.kernels.families.engine.engine_counts import OperatorRun
from wattcast.kernels.tile_rules import RuleTile
from wattcast.workload.engine_operators import (
    FusedExperts,
    LatentAttention,
    PagedAttention,
    ScaledProduct,
    WeightOnlyProduct,
)

A100 = reference_chip(load_gpu("a100-sxm-80gb"))
H200 = reference_chip(load_gpu("h200"))
ON_A100 = OperatorRun(True, False, 1024.0, A100)
ON_H200 = OperatorRun(True, False, 4096.0, H200)


def choose_widening_tile(m: int, n: int, k: int) -> narrow_products._Tile:
    op = WeightOnlyProduct(m, n, k, kernel="cutlass")
    return narrow_products._choose_widening_tile(op, ON_A100)


def test_a_few_tokens_take_the_smallest_tile_that_widens_weights() -> None:
    tile = choose_widening_tile(1, 8192, 8192)
    assert (tile.m, tile.n, tile.k) == (16.0, 128.0, 64.0)
    assert choose_widening_tile(4096, 8192, 8192).m == 128.0


def test_k_of_a_product_with_widened_weights_is_cut_into_seven_parts_at_most() -> None:
    assert choose_widening_tile(1, 128, 65536).split == 7


def test_products_with_widened_weights_are_cut_until_two_tiles_fill_each_sm() -> None:
    """31 tiles on 108 SMs: six parts of each run at once, and a seventh does not."""
    assert choose_widening_tile(1, 31 * 128, 16384).split == 6


def count_clusters(m: int) -> float:
    op = ScaledProduct(m, 4096, 4096, dtype=Dtype.FP8)
    counted = narrow_products.count_narrow_product(op, ON_H200)
    return counted.logs["log_units"] / (4096 / counted.plain["tile_n"])


def test_tiles_of_more_than_64_tokens_run_in_pairs() -> None:
    rows = {m: count_clusters(m) for m in (60, 64, 65, 70)}
    assert rows[60] == rows[64] == 1
    assert rows[65] == rows[70] == 2


def count_marlin_kernels(m: int, n: int) -> float:
    op = WeightOnlyProduct(m, n, 4096, kernel="marlin")
    return narrow_products._share_by_marlin(op, 64, 32, 1.0, 132.0).launches


def test_marlin_starts_a_kernel_for_every_thousand_rows() -> None:
    """It takes 16 tiles of 64 rows, or 128 where outputs are few, and then what fills no tile."""
    assert [count_marlin_kernels(m, 4224) for m in (1024, 1088, 1089)] == [1, 2, 3]
    assert [count_marlin_kernels(m, 4096) for m in (8192, 8256, 8257)] == [1, 2, 3]
    assert count_marlin_kernels(48, 4096) == 1


def make_attention(heads: int, kv_heads: int, keys: int, batch: int = 1) -> PagedAttention:
    return PagedAttention(heads, kv_heads, 128, ((batch, 1, keys),))


def test_a_long_sequence_of_xqa_is_cut_into_parts_of_128_keys() -> None:
    parts = [paged_attention._count_xqa_parts(keys) for keys in (200, 256, 383, 384, 1024)]
    assert parts == [1, 2, 2, 3, 8]


def test_parts_of_xqa_grow_as_the_root_of_eight_times_the_blocks() -> None:
    """So that adding them up stays short."""
    assert paged_attention._count_xqa_parts(128 * 200) == 40


XQA = paged_attention._Library(
    **{name: name == "is_xqa" for name in paged_attention._Library._fields}
)


@pytest.mark.parametrize(("heads", "rows"), [(8, 16), (16, 16), (17, 32)])
def test_query_heads_of_xqa_are_padded_to_sixteen(heads: int, rows: int) -> None:
    assert paged_attention._choose_tile(make_attention(heads, 1, 4096), XQA).rows == rows


def test_a_sequence_of_xqa_is_cut_into_eight_waves_of_parts_at_most() -> None:
    """100 sequences of 8 key heads on 132 SMs: 1,056 parts are eight waves."""
    op = make_attention(64, 8, 32768, batch=100)
    tile = paged_attention._choose_tile(op, XQA)
    walks = paged_attention._walk_sequences(op, XQA, tile)
    assert paged_attention._split_sequences(op, XQA, tile, walks, H200).most == 1
    op = make_attention(64, 8, 32768, batch=26)
    walks = paged_attention._walk_sequences(op, XQA, tile)
    assert paged_attention._split_sequences(op, XQA, tile, walks, H200).most == 5


@pytest.mark.parametrize(("blocks", "is_cut"), [(3, False), (4, False), (5, True)])
def test_four_blocks_of_keys_are_not_cut_by_flash_attention_3(blocks: int, is_cut: bool) -> None:
    tile = RuleTile(64.0, 128.0, 128.0)
    op = make_attention(8, 1, round(blocks * tile.outputs))
    assert (paged_attention._most_parts(op, tile, 132.0) > 1) is is_cut


def test_latent_decode_takes_two_kernels_and_flashmla_one_more() -> None:
    op = LatentAttention(8, 16, 1, 4096)
    assert latent_attention._count_launches(op) == 2
    assert latent_attention._count_launches(replace(op, kernel="flashmla")) == 3


def test_room_of_padded_experts_grows_by_a_tile_for_each() -> None:
    """A few visits to 64 experts of DeepGEMM take up to 64 tiles of 128 rows."""
    op = FusedExperts(8, 64, 2, 2048, 1024, weights="fp8", scales="block", kernel="", all_picks=16)
    counted = fused_experts._count_padded_experts(op, ON_H200)
    tiles = 2 * 1024 / 128 + 2048 / 128
    assert counted.work.units / tiles == pytest.approx(64)
