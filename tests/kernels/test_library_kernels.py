"""Kernels that libraries launch for one operator, beside the names of those kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import Kernels, RunCondition, build_kernels, reference_chip
from wattcast.kernels.families.depthwise_convolutions import depthwise_work
from wattcast.kernels.families.special_grids import batch_norm, special_kernel
from wattcast.kernels.kernel_labels import VECTOR_KIND, TileConstants, tile_constants
from wattcast.workload.adapter_operators import AdapterProduct
from wattcast.workload.engine_operators import (
    FusedExperts,
    PagedAttention,
    WeightOnlyProduct,
)
from wattcast.workload.engine_row_operators import AlignTokens, Route
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Conv2d,
    Elementwise,
    Layout,
    Linear,
    Softmax,
)
from wattcast.workload.scan_operators import StateScan

# vLLM's names of the kernels of one operator
CHUNK_SCAN = ("chunk_cumsum", "chunk_state", "state_passing", "bmm_chunk", "chunk_scan")
DELTA_SCAN = ("cumsum", "scaled_dot_kkt", "solve_tril", "recompute_w_u", "delta_h", "fwd_o")
ADAPTERS = ("zeros", "lora_shrink", "lora_expand")


def lowered(op: Operator, chip: str = "h200") -> Kernels:
    gpu = load_gpu(chip)
    return build_kernels((op,), (RunCondition("", "", ""),), gpu, reference_chip(gpu), ())


def count_launches(op: Operator) -> float:
    return float(lowered(op).work.launches[0])


@pytest.mark.parametrize(("rule", "names"), [("mamba2", CHUNK_SCAN), ("delta", DELTA_SCAN)])
def test_a_scan_by_chunks_launches_a_kernel_for_each_of_its_stages(
    rule: str, names: tuple[str, ...]
) -> None:
    scan = StateScan(1, 4096, 64, 8, 64, 64, 256, rule=rule, dtype=Dtype.BF16)
    assert count_launches(scan) == len(names)


def test_adapters_clear_their_sums_shrink_and_expand() -> None:
    assert count_launches(AdapterProduct(16, 4096, 4096, 16)) == len(ADAPTERS)


def test_one_block_sorts_the_choices_of_sixty_experts_and_not_of_seventy_two() -> None:
    """``moe_align_block_size`` of vLLM has a kernel for Qwen1.5's 60 experts, and not for 72."""
    few, many = (AlignTokens(16, 4, experts=experts, top_k=4) for experts in (60, 72))
    assert count_launches(few) == 1.0
    assert count_launches(many) == 2.0


def test_machete_launches_a_second_kernel_where_a_tile_has_more_than_half_a_thousand_inputs() -> (
    None
):
    """A tile of 640 inputs has ten steps of 64, of which two blocks take a part each; 448 have
    seven, which one block takes.
    """
    deep, flat = (WeightOnlyProduct(16, 4096, k) for k in (640, 448))
    assert count_launches(deep) > count_launches(flat)


def test_marlins_tiles_are_those_of_half_as_many_outputs_as_of_openais() -> None:
    op = FusedExperts(64, 32, 4, 2880, 2880, weights="fp4", scales="mx")
    units = [float(lowered(replace(op, kernel=name)).work.units[0]) for name in ("marlin", "oai")]
    assert 1.8 < units[0] / units[1] < 2.4


def name_family(op: Operator, chip: str = "h200") -> str:
    return str(lowered(op, chip).work.kernel_family[0])


def test_heads_that_share_keys_beyond_tensorrts_largest_tile_run_on_a_kernel_of_their_own() -> None:
    """XQA's largest tile packs 32 query heads of a key head: models have 24 of them, or 40."""
    few, many = (PagedAttention(heads, 1, 128, ((8, 1, 4096),)) for heads in (24, 40))
    assert not name_family(few, "b200").endswith("ungrouped")
    assert name_family(many, "b200").endswith("ungrouped")


def test_the_gradient_of_log_softmax_reads_one_of_its_two_operands_twice() -> None:
    rows, dim = 65536, 4096
    op = Softmax(rows, dim, dtype=Dtype.BF16, backward=True, log=True)
    tensor_byte = 2.0 * rows * dim
    assert lowered(op).work.l2_byte[0] == pytest.approx(4.0 * tensor_byte)


def test_a_sum_over_few_pixels_does_not_meet_in_memory() -> None:
    """Channels last, six parts of 256 pixels are one block of 32 channels, and ten are ten."""
    blocks = []
    for pixels in (6 * 256, 10 * 256):
        op = Elementwise(
            "batchnorm_train",
            pixels * 64,
            dtype=Dtype.BF16,
            layout=Layout.TRANSPOSED,
            rows=64,
            run=pixels,
        )
        grid = batch_norm(op, 132.0, 0.0)
        assert grid is not None
        blocks.append(grid.units)
    assert blocks == [2.0, 20.0]


def test_a_product_of_eighteen_tokens_fills_more_than_a_slim_tile() -> None:
    slim, wider = (name_family(Linear(m, 8192, 8192)) for m in (14, 18))
    assert slim != wider


def test_blocks_of_128_threads_fill_an_sm() -> None:
    """An SM of a Hopper holds 2,048 threads; PyTorch's pointwise kernels have blocks of 128."""
    slots = float(lowered(Elementwise("add", 1 << 24, dtype=Dtype.BF16)).work.slots[0])
    assert slots * 128 == 2048


def test_filters_of_seven_by_seven_leave_an_sm_fewer_blocks_than_five_by_five() -> None:
    slots = []
    for side in (3, 5, 7):
        op = Conv2d(
            16, 64, 64, 56, 56, side, side, padding=side // 2, groups=64, channels_last=True
        )
        slots.append(depthwise_work(op, "last.special").slots)
    assert slots[0] == slots[1] > slots[2]


def test_gradients_of_tables_are_sorted_from_some_three_thousand_indices_on() -> None:
    """A batch of 2,500 tokens has one kernel, one of 3,500 sorts them first."""
    names = []
    for indices in (2500, 3500):
        n = indices * 1024
        op = Elementwise("scatter_add", n, dtype=Dtype.BF16, read=4 * n + 8 * indices, write=2 * n)
        names.append(special_kernel(op))
    assert names == ["scatter", "scatter.sorted"]


def test_blocks_of_four_warps_fill_an_sm_in_products_without_a_tile_and_in_routing() -> None:
    """cuBLAS's gemv and vLLM's ``topkGating`` have blocks of 128 threads; an SM holds 2,048."""
    vector = tile_constants(np.array([VECTOR_KIND]), np.array([64.0]), np.array([8.0]))
    assert float(TileConstants(*vector).slots[0]) * 128 == 2048
    route = Route(4096, 128, experts=128, top_k=8)
    assert float(lowered(route).work.slots[0]) * 128 == 2048
