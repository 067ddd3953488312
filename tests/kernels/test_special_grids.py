"""Grids of batch norm, pools, caches, the optimiser, softmax and attention, against kernels an H200
ran.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wattcast.core.units import Dtype
from wattcast.hardware import OperatingPoint, load_gpu
from wattcast.kernels import Kernels, RunCondition, build_kernels, reference_chip
from wattcast.kernels.families.attention import cudnn_parts, flash_parts
from wattcast.kernels.families.elementwise_sizes import load_function_costs
from wattcast.kernels.families.row_reductions import RowWalk, group_alike, row_walk
from wattcast.kernels.families.special_grids import (
    appends_to_cache,
    batch_norm,
    special_grid,
    special_kernel,
)
from wattcast.kernels.kernel_table import USUAL_CONDITION, WORK, LaunchGrid, streamed_share
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.prediction import predict_graph
from wattcast.workload.graph import Block, Graph
from wattcast.workload.operator_base import Operator, load_functions
from wattcast.workload.operator_types import (
    Attention,
    Elementwise,
    Layout,
    RmsNorm,
    RowReduction,
    Softmax,
)

SMS = 132.0


def lowered(op: Operator, condition: RunCondition = USUAL_CONDITION) -> Kernels:
    gpu = load_gpu("h200")
    return build_kernels((op,), (condition,), gpu, reference_chip(gpu), ())


def predict_us(op: Operator) -> float:
    """The time of an operator among others on an H200 at its top clock."""
    gpu = load_gpu("h200")
    bundle = bundle_for(gpu)
    bundle = replace(bundle, launch=replace(bundle.launch, host_s_per_operator=0.0))
    many = Graph("many", (Block((op,), 200),))
    return (
        1e6 / 200 * float(predict_graph(many, gpu, OperatingPoint(1.98e9, 1e9), bundle).latency_s)
    )


def _norm(
    function: str, pictures: int, channels: int, pixels: int, dtype: Dtype = Dtype.BF16
) -> Elementwise:
    return Elementwise(
        function, pictures * channels * pixels, dtype=dtype, rows=channels, run=pixels
    )


@pytest.mark.parametrize(
    ("pictures", "channels", "pixels", "blocks"),
    [
        (4, 2048, 49, 2048 * 4),
        (16, 192, 784, 192 * 16),
        (64, 256, 3136, 256 * 64),
        (256, 144, 3136, 144 * 256),
    ],
)
def test_batch_norm_is_a_block_a_channel_and_picture(
    pictures: int, channels: int, pixels: int, blocks: int
) -> None:
    grid = batch_norm(_norm("batchnorm", pictures, channels, pixels), SMS, 0.0)
    assert grid is not None
    assert (grid.units, grid.launches) == (blocks, 3.0)
    alone = batch_norm(_norm("batchnorm", pictures, channels, pixels, Dtype.FP32), SMS, 0.0)
    assert alone is not None
    assert alone.launches == 1.0  # cuDNN's


@pytest.mark.parametrize(
    ("n", "channels", "pixels", "blocks"), [(102760448, 512, 784, 2048), (802816, 512, 49, 112)]
)
def test_channels_last_batch_norm_has_128_parts_at_most(
    n: int, channels: int, pixels: int, blocks: int
) -> None:
    op = Elementwise("batchnorm", n, layout=Layout.TRANSPOSED, rows=channels, run=pixels)
    grid = batch_norm(op, SMS, 0.0)
    assert grid is not None
    assert grid.units == blocks


def test_statistics_of_few_channels_leave_the_chip_idle() -> None:
    """As many values in an eighth of the channels: an eighth of the blocks, each eight times as
    long.
    """
    few, many = (
        batch_norm(_norm("batchnorm_grad", 16, channels, pixels), SMS, 0.0)
        for channels, pixels in ((32, 16384), (256, 2048))
    )
    assert few is not None
    assert many is not None
    assert (few.units, many.units) == (32, 256)
    assert few.steps > 6 * many.steps


def test_an_sm_walks_three_long_channels_at_a_time_in_cudnn() -> None:
    """40 registers for each of 512 threads: an SM holds three blocks. With two, ResNet-50 in TF32 on
    an A100 was half of 17 % too slow, as 256 channels took a second round.
    """
    long_channel = batch_norm(_norm("batchnorm_train", 360, 256, 3136, Dtype.FP32), SMS, 1.0)
    short_channel = batch_norm(_norm("batchnorm_train", 4, 256, 3136, Dtype.FP32), SMS, 1.0)
    assert long_channel is not None
    assert short_channel is not None
    registers = 65536.0 / (40.0 * 512.0)
    assert long_channel.slots == np.floor(registers)
    assert short_channel.slots == 2.0


def test_operands_in_device_memory_take_longer_steps() -> None:
    op = _norm("batchnorm_train", 32, 64, 3136)
    warm, cold = (batch_norm(op, SMS, missing) for missing in (0.0, 1.0))
    assert warm is not None
    assert cold is not None
    assert cold.steps > 1.5 * warm.steps
    assert batch_norm(Elementwise("batchnorm", 1 << 20), SMS, 0.0) is None  # no shape: as others


def _grid(op: Elementwise) -> LaunchGrid:
    grid = special_grid(special_kernel(op), op, SMS, 0.0)
    assert grid is not None
    return grid


def test_a_pool_costs_by_its_results_and_its_gradient_by_its_planes() -> None:
    half, double = (
        _grid(Elementwise("pool", n, write=n // 4 * 10, rows=n // 3136))
        for n in (25690112, 2 * 25690112)
    )
    assert double.sm_cycle == pytest.approx(2 * half.sm_cycle)
    few, many = (
        _grid(Elementwise("pool_grad", planes * 196, rows=planes)) for planes in (32768, 65536)
    )
    assert few.launches == 2
    assert few.units == 32768
    assert many.units == 65535
    assert many.sm_cycle > 1.9 * few.sm_cycle


def test_a_list_of_parameters_is_cut_into_chunks_of_one_tensor() -> None:
    """Grids of 16 tensors on an H200: 16 blocks of 31,603 parameters, 256 in one kernel, 688 in
    three.
    """
    assert [
        (_grid(Elementwise("adamw", n)).units, _grid(Elementwise("adamw", n)).launches)
        for n in (505650, 16632367)
    ] == [
        (16, 1),
        (256, 1),
    ]
    large = _grid(Elementwise("adamw", 44107262))
    assert (large.units, large.launches) == (688, 3)
    even, odd = _grid(Elementwise("adamw", 1 << 24)), _grid(Elementwise("adamw", (1 << 24) + 16))
    assert odd.sm_cycle == pytest.approx(
        2 * even.sm_cycle, rel=1e-3
    )  # four do not divide 2**20 + 1


def test_the_gradient_of_a_table_is_sorted_beyond_some_rows() -> None:
    few, many = (
        Elementwise(
            "scatter_add", rows * 1024, read=4 * rows * 1024 + 8 * rows, write=2 * rows * 1024
        )
        for rows in (256, 8192)
    )
    assert (special_kernel(few), special_kernel(many)) == ("scatter", "scatter.sorted")
    assert _grid(few).launches == 2
    assert _grid(many).launches > 20


def test_a_cache_of_one_batch_measured_as_strided_is_copied_whole() -> None:
    """A slice behind a cache of one batch has no holes, and PyTorch copies sixteen bytes at a time."""
    op = Elementwise("cat", 64 * 131136, layout=Layout.STRIDED, rows=64, run=64)
    assert lowered(op, RunCondition(rows=64)).work.kernel_family == ("elementwise.vector.cat",)
    assert lowered(op).work.kernel_family == ("elementwise.cat.append",)
    more = Elementwise("cat", 80 * 131136, layout=Layout.STRIDED, rows=80, run=64)
    assert lowered(more, RunCondition(rows=80)).work.kernel_family == ("elementwise.cat.append",)


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "dim", "measured_us"),
    [
        (8, 12, 512, 64, 22.4),
        (4, 32, 512, 64, 28.9),
        (1, 12, 4096, 64, 22.3),
        (8, 8, 1024, 128, 54.4),
    ],
)
def test_a_prompts_cache_is_copied_an_element_at_a_time(
    batch: int, heads: int, tokens: int, dim: int, measured_us: float
) -> None:
    """Hugging Face puts keys behind an empty tensor; times of ``torch.cat`` on an H200, whole or
    turned alike.
    """
    rows, run = batch * heads, tokens * dim
    op = Elementwise("cat", rows * run, layout=Layout.STRIDED, rows=rows, run=run)
    assert predict_us(op) == pytest.approx(measured_us, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "dim", "dtype", "measured"),
    [
        (49152, 512, Dtype.BF16, (40.3, 56.2)),
        (98304, 1024, Dtype.BF16, (153.0, 213.1)),
        (32768, 256, Dtype.BF16, (16.5, 21.6)),
        (49152, 512, Dtype.FP32, (52.5, 59.1)),
    ],
)
def test_masked_scores_take_the_slow_way_through_a_division(
    rows: int, dim: int, dtype: Dtype, measured: tuple[float, float]
) -> None:
    """Times of ``torch.softmax`` on an H200, without and with a causal mask."""
    predicted = [
        predict_us(Softmax(rows, dim, dtype=dtype, masked=masked)) for masked in (0.0, 0.5)
    ]
    assert predicted == pytest.approx(measured, rel=0.1)
    assert walk_warm(Softmax(rows, dim, masked=0.5, backward=True)) == walk_warm(
        Softmax(rows, dim, backward=True)
    )


def test_every_cost_is_that_of_a_known_function() -> None:
    costs = load_function_costs()
    assert set(costs) <= set(load_functions())
    assert {"gelu", "silu", "tanh", "dropout"} <= set(costs)
    issue = [costs[name][0] for name in ("gelu_grad", "gelu", "tanh")]
    assert issue == sorted(issue, reverse=True)
    assert costs["gelu"] == (37.0, costs["gelu"][1])
    assert issue[-1] > 7.0, "that of an addition"


def test_stores_bound_what_computes_little() -> None:
    """An SM stores 16 bytes a cycle: twice as wide a result takes twice as long, a gelu of halves
    longer still.
    """
    half, wide, costly = (
        lowered(op).work
        for op in (
            Elementwise("scale", 1 << 22),
            Elementwise("scale", 1 << 22, dtype=Dtype.FP32),
            Elementwise("gelu", 1 << 22),
        )
    )
    assert wide.unit_flop[0] == pytest.approx(2 * half.unit_flop[0])
    assert costly.unit_flop[0] > 2 * half.unit_flop[0]


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        (Softmax(64, 2048), "warp"),
        (Softmax(64, 9216), "block"),
        (Softmax(64, 9219), "loop"),
        (Softmax(64, 4750, dtype=Dtype.FP16, out_dtype=Dtype.FP32), "loop"),
        (Softmax(64, 1559, dtype=Dtype.FP16, out_dtype=Dtype.FP32), "loop"),
        (Softmax(64, 2048, backward=True), "loop"),
        (Softmax(64, 1024, backward=True), "warp"),
    ],
)
def test_the_kernel_of_a_softmax(op: Softmax, kernel: str) -> None:
    ((_, alike),) = group_alike([op])
    assert alike.kernel == kernel


def walk_warm(op: RowReduction) -> RowWalk:
    """How long blocks walk over the rows of one operator whose operands lie in L2."""
    ((_, alike),) = group_alike([op])
    return row_walk(alike, SMS, np.zeros(1))


def test_one_block_an_sm_takes_longer_than_two() -> None:
    """Rows of seven thousand elements need 34 registers a thread, and an SM holds one block instead
    of two.
    """
    two, one = (walk_warm(Softmax(13200, dim)).sm_cycle / dim for dim in (6144, 7168))
    assert one > 1.2 * two


def test_the_gradient_of_a_norm_walks_over_all_rows() -> None:
    short, tall = (walk_warm(RmsNorm(rows, 768, backward=True)) for rows in (1024, 32768))
    assert tall.steps > 15 * short.steps
    assert walk_warm(RmsNorm(1 << 18, 64)).sm_cycle == pytest.approx(
        (1 << 18) / SMS * WORK.block_cycles
    )


def test_parts_of_a_cache_are_those_that_ran() -> None:
    ran = {
        (2, 8192): 64,
        (8, 4096): 32,
        (16, 16384): 16,
        (24, 8192): 8,
        (64, 1025): 4,
        (96, 8192): 1,
        (2, 777): 4,
    }
    assert {key: cudnn_parts(*key, SMS) for key in ran} == ran
    flash = {
        (4, 333, 96): 3,
        (32, 1050, 96): 5,
        (12, 1300, 64): 6,
        (48, 8192, 64): 5,
        (128, 8192, 128): 2,
    }
    assert {key: flash_parts(*key, SMS) for key in flash} == flash


def _attention(**more: object) -> Attention:
    shape = {"batch": 8, "heads": 16, "kv_heads": 16, "q_len": 256, "kv_len": 256, "head_dim": 64}
    return Attention(**{**shape, **more})  # type: ignore[arg-type]


def test_attention_pays_for_dropped_scores_padded_heads_and_shared_keys() -> None:
    plain, dropped = (lowered(_attention(dropout=d)).work for d in (False, True))
    assert dropped.unit_flop[0] > 2 * plain.unit_flop[0]
    padded = lowered(_attention(head_dim=60)).work
    assert padded.kernel_family == ("attention.prefill.flash",)
    assert padded.launches[0] == 7
    own, shared = (lowered(_attention(backward=True, kv_heads=heads)).work for heads in (16, 4))
    assert shared.launches[0] == own.launches[0] + 2
    assert shared.between_byte[0] > own.between_byte[0]


def test_blocks_on_a_causal_diagonal_count_whole() -> None:
    """Two blocks of queries over two of keys: three of the four are walked over, not half."""
    causal, full = (lowered(_attention(causal=c)).work for c in (True, False))
    assert causal.unit_flop[0] == pytest.approx(0.75 * full.unit_flop[0])


def test_streams_leave_l2_before_it_is_full() -> None:
    byte = np.array([1e6, 25e6, 40e6, 49e6])
    share = streamed_share(byte, 62.9e6)
    assert share[0] == 1.0
    assert share[-1] == 0.0
    assert (np.diff(share) < 0).all()


@pytest.mark.parametrize(("share", "is_appended"), [(0.05, True), (0.2, True), (0.3, False)])
def test_what_is_put_behind_a_cache_is_a_small_part_of_it(share: float, is_appended: bool) -> None:
    """A token behind a cache is one part of thousands; two halves of a row are no cache."""
    rows, row = 32, 100_000
    op = Elementwise("cat", rows * row, layout=Layout.STRIDED, rows=rows, run=round(share * row))
    assert appends_to_cache(op) is is_appended
