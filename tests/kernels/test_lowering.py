"""How operators become units, traffic and groups of kernels."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import RunCondition, build_kernels, reference_chip
from wattcast.kernels.kernel_table import WORK_COLUMNS, log2_alignment, resident_share, wave_fill
from wattcast.predictor.bundle import forecast_bundle
from wattcast.workload.operator_base import Operator, registered_operators
from wattcast.workload.operator_types import (
    Attention,
    Bmm,
    Conv2d,
    Elementwise,
    LayerNorm,
    Layout,
    Linear,
    RmsNorm,
    Softmax,
)

GPU = load_gpu("h200")
REFERENCE = reference_chip(GPU)


def lowered(*ops: Operator, condition: RunCondition | None = None):
    return build_kernels(ops, (condition or RunCondition(),) * len(ops), GPU, REFERENCE, ())


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 4096, 4096), (100, 1000, 777), (4096, 4096, 4096), (16384, 50257, 768)]
)
def test_units_of_a_product_do_at_least_its_arithmetic(m: int, n: int, k: int) -> None:
    kernels = lowered(Linear(m, n, k))
    padded = kernels.work.units * kernels.work.unit_flop
    assert padded[0] >= kernels.flop[0]


def test_large_products_waste_little_on_padding() -> None:
    kernels = lowered(Linear(8192, 8192, 8192))
    assert kernels.work.units[0] * kernels.work.unit_flop[0] <= 1.01 * kernels.flop[0]


@pytest.mark.parametrize(
    ("op", "group"),
    [
        (Linear(512, 1024, 1024), "gemm.tensor"),
        (Linear(8, 1024, 1024), "gemm.row"),
        (Linear(512, 50257, 768), "gemm.turing"),
        (Linear(512, 1026, 768), "gemm.ampere"),
        (Linear(1, 50257, 768), "gemm.vector"),
        (Linear(50257, 768, 8192), "gemm.tensor"),
        (Linear(50257, 768, 8192, turned=True), "gemm.turing"),
        (Linear(768, 1024, 1023, turned=True), "gemm.tensor"),
        (Linear(512, 1024, 1024, dtype=Dtype.FP8), "gemm.fp8"),
        (Linear(512, 1024, 1024, dtype=Dtype.FP32), "gemm.simt"),
        (Bmm(16, 128, 128, 64), "gemm.tensor"),
        (Bmm(128, 1536, 2048, 12), "gemm.ampere"),
        (Bmm(128, 1536, 2048, 12, turned=True), "gemm.tensor"),
        (Conv2d(8, 64, 64, 56, 56, 1, 1, channels_last=True), "gemm.tensor"),
        (Conv2d(8, 64, 64, 56, 56, 3, 3, padding=1, channels_last=True), "conv2d.hopper"),
        (Conv2d(8, 64, 64, 56, 56, 3, 3, padding=1), "conv2d.hopper"),
        (Conv2d(8, 64, 64, 56, 56, 3, 3, padding=1, groups=64), "conv2d.depthwise.first.plain"),
        (Attention(1, 32, 8, 1, 4096, 128), "attention.decode"),
        (Attention(1, 32, 8, 4096, 4096, 128, causal=True), "attention.prefill"),
        (Softmax(100, 128), "softmax.warp"),
        (Softmax(100, 50257), "softmax.loop"),
        (LayerNorm(100, 1023), "layernorm.scalar"),
        (Elementwise("add", 1 << 20, layout=Layout.TRANSPOSED), "elementwise.indexed"),
        (Elementwise("cast", 1 << 20, out_dtype=Dtype.FP32), "elementwise.unrolled"),
        (Elementwise("gelu", 1 << 20), "elementwise.vector"),
        (Elementwise("cat", 1 << 20), "elementwise.vector.cat"),
        (
            Elementwise("cat", 1 << 20, layout=Layout.STRIDED, rows=64, run=64),
            "elementwise.cat.append",
        ),
        (
            Elementwise("cat", 1 << 20, layout=Layout.STRIDED, rows=64, run=1 << 13),
            "elementwise.cat",
        ),
        (
            Elementwise("sum", 1 << 20, layout=Layout.TRANSPOSED, write=1 << 11),
            "elementwise.reduce.columns",
        ),
        (Elementwise("batchnorm", 1 << 20, rows=64, run=1024), "elementwise.batchnorm"),
        (Elementwise("adamw", 1 << 20), "elementwise.optimizer"),
        (Elementwise("dropout", 1 << 20), "elementwise.vector.dropout"),
        (LayerNorm(100, 1024, backward=True), "layernorm.backward"),
        (Softmax(100, 128, backward=True), "softmax.backward"),
        (Attention(1, 32, 8, 4096, 4096, 128, backward=True), "attention.backward"),
        (Attention(1, 32, 8, 4096, 4096, 128, dropout=True), "attention.prefill.dropout"),
        (Elementwise("cat", 1 << 20, layout=Layout.STRIDED), "elementwise.cat"),
        (Elementwise("sum", 1 << 20, read=1 << 21, write=1 << 11), "elementwise.reduce"),
    ],
)
def test_operators_find_their_kind_of_kernel(op: Operator, group: str) -> None:
    assert lowered(op).work.kernel_family == (group,)


def test_weights_come_from_device_memory_and_small_activations_do_not() -> None:
    op = Linear(64, 1024, 1024)
    cold, warm = lowered(op), lowered(op, condition=RunCondition(rotated="none"))
    assert cold.work.dram_read_byte[0] == pytest.approx(2 * 1024 * 1024)
    assert warm.work.dram_read_byte[0] < 1e4


def test_a_depthwise_convolution_runs_on_cuda_cores() -> None:
    kernels = lowered(Conv2d(8, 64, 64, 56, 56, 3, 3, padding=1, groups=64))
    assert kernels.pipe_event == ("cuda_fp32_flop",)


def test_a_batch_of_operators_equals_its_members() -> None:
    ops = (
        Linear(100, 1000, 768),
        Bmm(7, 33, 65, 129),
        Softmax(512, 3000),
        Attention(2, 8, 2, 256, 256, 64),
    )
    together = lowered(*ops).work
    for i, op in enumerate(ops):
        alone = lowered(op).work
        assert alone.units[0] == together.units[i]
        assert alone.l2_byte[0] == together.l2_byte[i]
        assert alone.dram_read_byte[0] == together.dram_read_byte[i]


def test_helpers() -> None:
    assert wave_fill(np.array(132.0), 132.0) == 1.0
    assert wave_fill(np.array(133.0), 132.0) == pytest.approx(133 / 264)
    assert resident_share(np.array([0.0, 1e6]), 1e6).tolist() == [1.0, 0.0]
    assert log2_alignment([1, 6, 8, 96]).tolist() == [0.0, 1.0, 3.0, 4.0]


def test_a_plain_transpose_moves_more_through_l2_than_one_of_runs() -> None:
    op = Elementwise("copy", 1 << 22, layout=Layout.TRANSPOSED)
    plain = lowered(op, condition=RunCondition(rows=2048, run=1))
    runs = lowered(op, condition=RunCondition(rows=2048, run=64))
    assert plain.work.kernel_family == ("elementwise.transposed",)
    assert plain.work.l2_byte[0] > 5 * runs.work.l2_byte[0]


@pytest.mark.parametrize(
    ("rows", "columns", "blocks"),
    [(512, 16384, 512), (8192, 64, 512), (64, 3072, 4), (8, 8192, 8), (14, 15858, 14)],
)
def test_a_reduction_launches_the_blocks_that_were_seen(
    rows: int, columns: int, blocks: int
) -> None:
    """Grids of PyTorch's reduction in the H200 database."""
    op = Elementwise("mean", rows * columns, read=2 * rows * columns, write=2 * rows)
    assert lowered(op).work.units[0] == blocks


def test_a_sum_of_one_long_row_is_cut_among_all_sms() -> None:
    """A sum over 25 million elements was predicted to take 2.3 ms, in one block; its rows alone
    would take 45 us.
    """
    whole = lowered(
        Elementwise("sum", 25_000_000, dtype=Dtype.FP32, read=100_000_000, write=4)
    ).work
    assert (whole.units[0], whole.launches[0]) == (4 * 132, 2)
    short = lowered(Elementwise("sum", 130_000, dtype=Dtype.FP32, read=520_000, write=4)).work
    assert (short.units[0], short.launches[0]) == (1, 1)


def test_an_image_is_turned_in_blocks_of_32() -> None:
    """An image of 7 by 7 pixels costs a layout kernel as much as one of 64; layout kernels start
    fast.
    """
    small = lowered(Conv2d(8, 64, 64, 7, 7, 3, 3, padding=1)).work
    last = lowered(Conv2d(8, 64, 64, 7, 7, 3, 3, padding=1, channels_last=True)).work
    images, filters = 2 * 8 * 64 * 64, 64 * 32 * 64
    assert small.turn_element[0] == images + filters
    assert small.between_byte[0] == 2 * 2 * (2 * 8 * 49 * 64 + 64 * 64 * 9)
    assert last.between_byte[0] == last.turn_element[0] == 0.0
    assert last.launches[0] == 1.0
    assert 1.5 < small.launches[0] < 3.0


def test_strides_beyond_the_filter_leave_pixels_unread() -> None:
    """A filter of one tap and stride 2 reads a quarter of the image."""
    whole = Conv2d(256, 256, 512, 56, 56, 1, 1, channels_last=True)
    sparse = Conv2d(256, 256, 512, 56, 56, 1, 1, stride=2, channels_last=True)
    image = 2 * 256 * 256 * 56 * 56
    assert lowered(sparse).work.dram_read_byte[0] == pytest.approx(
        image / 4 + 2 * 256 * 512, rel=1e-3
    )
    assert lowered(whole).work.dram_read_byte[0] > image


def test_images_of_odd_size_and_many_channels_are_turned() -> None:
    """cuDNN does not read 7 by 7 images an element at a time where channels are many; of one image
    it does.
    """
    assert lowered(Conv2d(32, 2048, 512, 7, 7, 1, 1)).work.turn_element[0] > 0
    assert lowered(Conv2d(1, 2048, 512, 7, 7, 1, 1)).work.turn_element[0] == 0.0
    assert lowered(Conv2d(32, 1024, 256, 14, 14, 1, 1)).work.turn_element[0] == 0.0


def test_a_kernel_on_cuda_cores_takes_as_long_whatever_the_format() -> None:
    """A bf16 product that the library gives to CUDA cores is not done at the tensor cores' rate."""
    name = "void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, 1024, 5, 5, 3, 3, 3, 1, false>(int)"
    ran = RunCondition(kernels=(name,))
    op = Conv2d(5, 248, 96, 80, 80, 7, 7, padding=3)
    slow, fast = lowered(op, condition=ran), lowered(op)
    assert slow.work.kernel_family == ("conv2d.plain",)
    assert slow.work.turn_element[0] == 0.0
    rates = np.asarray(slow.pipe_per_cycle) / REFERENCE.per_cycle["cuda_fp32_flop"]
    assert slow.work.units[0] * slow.work.unit_flop[0] > rates[0] * slow.flop[0]
    assert fast.work.units[0] * fast.work.unit_flop[0] < 3 * fast.flop[0]


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (
            Conv2d(24, 96, 96, 152, 152, 1, 1, stride=2, groups=96, channels_last=True),
            "last.direct",
        ),
        (Conv2d(256, 56, 56, 51, 51, 1, 1, groups=56, channels_last=True), "last.special"),
        (Conv2d(4, 99, 99, 89, 89, 1, 1, groups=99, channels_last=True), "last.plain"),
        (
            Conv2d(
                8, 96, 96, 56, 56, 3, 3, padding=1, groups=96, channels_last=True, dtype=Dtype.TF32
            ),
            "last.wide",
        ),
    ],
)
def test_depthwise_kernels_as_names_in_the_database_have_them(op: Conv2d, kind: str) -> None:
    assert lowered(op).work.kernel_family == (f"conv2d.depthwise.{kind}",)


def test_a_profiler_finds_operands_in_device_memory_and_results_in_l2() -> None:
    op = Elementwise("add", 1 << 20)
    counted = lowered(op, condition=RunCondition(rotated="counted")).work
    assert counted.dram_read_byte[0] == op.read_byte
    assert counted.dram_write_byte[0] == 0.0


def test_a_pool_that_writes_more_than_it_counts_is_finite() -> None:
    """A pool's ``n`` counts what it reads once; its result and indices may be larger. Rows longer
    than the operand once had no alignment, and a prediction of ResNet-50 was not a number."""
    work = lowered(Elementwise("pool", 1000, read=2000, write=8000)).work
    assert np.isfinite([values[0] for values in work.features.values()]).all()
    assert work.units[0] >= 1


def test_a_reduction_over_rows_is_cut_as_pytorch_cuts_it() -> None:
    """The gradient of a bias, [8192, 768] in bf16: six blocks wide, each cut in 128, two kernels."""
    kernels = lowered(Elementwise("sum", 8192 * 768, layout=Layout.TRANSPOSED, write=2 * 768))
    assert kernels.work.units[0] == 6 * 128
    assert kernels.work.launches[0] == 2
    short = lowered(Elementwise("sum", 128 * 4096, layout=Layout.TRANSPOSED, write=2 * 4096))
    assert (short.work.units[0], short.work.launches[0]) == (32, 1)


def test_a_cache_comes_from_device_memory_and_one_part_carries_the_work() -> None:
    halves = Elementwise("cat", 1 << 20, layout=Layout.STRIDED, rows=64, run=1 << 13)
    cache = Elementwise("cat", 1 << 20, layout=Layout.STRIDED, rows=64, run=64)
    of_halves, of_cache = lowered(halves).work, lowered(cache).work
    assert of_cache.steps[0] == pytest.approx(2 * of_halves.steps[0])
    assert of_cache.dram_read_byte[0] == cache.read_byte > of_halves.dram_read_byte[0]
    warm = lowered(cache, condition=RunCondition(rotated="none"))
    assert warm.work.dram_read_byte[0] == of_halves.dram_read_byte[0]


def test_the_gradient_of_a_norm_reads_twice() -> None:
    forward, backward = (lowered(LayerNorm(65536, 4096, backward=b)).work for b in (False, True))
    assert backward.launches[0] == 2
    assert backward.dram_read_byte[0] == pytest.approx(4 * forward.dram_read_byte[0])


def test_shapes_a_workload_says_are_those_a_measured_row_says() -> None:
    """Rows of the database hold their two-dimensional shape beside the operator, workloads in it."""
    said = Elementwise("copy", 1 << 20, layout=Layout.TRANSPOSED, rows=4096, run=128)
    beside = Elementwise("copy", 1 << 20, layout=Layout.TRANSPOSED)
    a, b = lowered(said), lowered(beside, condition=RunCondition(rows=4096, run=128))
    assert a.work.features["extent_rows"] == b.work.features["extent_rows"] == 12
    assert a.work.features["run"] == b.work.features["run"]
    assert a.work.units == b.work.units


def test_many_operators_of_a_form_are_counted_as_one_by_one() -> None:
    """Their sizes are arrays, in every class that says its arithmetic takes them."""
    mixed = [
        form
        for i in range(70)
        for form in (
            Linear(1 + i, 64 + i, 128 + 3 * i, bias=True),
            Linear(8 + 2 * i, 768, 2048, turned=True, out_dtype=Dtype.FP32),
            Linear(1 + i, 4096, 1024 + 2 * i, weight_dtype=Dtype.INT8),
            Bmm(1 + i, 128, 96 + 4 * i, 64),
            Attention(1 + i % 3, 32, 8, 1 + i, 40 + i, 128),
            Attention(1, 32, 8, 1 + 2 * i, 64 + i, 64, causal=True),
            Attention(2, 16, 16, 64 + i, 64 + i, 64, causal=True, backward=True, dropout=True),
            Softmax(1 + i, 64 + 128 * i),
            LayerNorm(8 + i, 1024 + i, backward=True),
            RmsNorm(8 + i, 1024 + i, out_dtype=Dtype.FP32),
            Elementwise("gelu", 1000 + i),
            Elementwise("add", 1 << (10 + i % 9), rows=1 + i),
        )
    ]
    ops = tuple(dict.fromkeys(mixed))
    assert {op.kind for op in ops} == {
        kind for kind, cls in registered_operators().items() if cls.stacks
    }
    together = lowered(*ops)
    for i in range(0, len(ops), 17):
        alone = lowered(ops[i])
        for name in ("flop", "sfu_op", "pipe_per_cycle"):
            assert getattr(together, name)[i] == pytest.approx(getattr(alone, name)[0], rel=1e-12)
        assert together.family[i] == alone.family[0]
        assert together.work.kernel_family[i] == alone.work.kernel_family[0]
        for name in WORK_COLUMNS:
            assert getattr(together.work, name)[i] == pytest.approx(
                getattr(alone.work, name)[0], rel=1e-12
            )
        for name, values in alone.work.features.items():
            assert together.work.features[name][i] == pytest.approx(values[0], rel=1e-12, abs=1e-12)


def test_products_before_hopper_run_in_large_tiles() -> None:
    """192 tiles of 256 x 128 for the 108 SMs of an A100; with 128 x 128 the work would be cut as
    well.
    """
    op = Linear(1024, 6144, 2048, dtype=Dtype.BF16)
    chip = load_gpu("a100-sxm-80gb")
    work = build_kernels((op,), (RunCondition(),), chip, forecast_bundle(chip).reference, ()).work
    assert work.features["tile_n"][0] * work.features["tile_m"][0] == 256 * 128
    assert work.unit_flop[0] * work.units[0] == pytest.approx(op.flop), (
        "a larger tile is no faster than 128 x 128"
    )


def count_convolution(gpu_name: str, **sizes: object) -> tuple[float, float, float]:
    """Return units times arithmetic, arithmetic that draws power, and the operator's own."""
    gpu = load_gpu(gpu_name)
    op = Conv2d(64, 128, 128, 28, 28, padding=1, **sizes)  # type: ignore[arg-type]
    kernels = build_kernels((op,), (RunCondition(),), gpu, reference_chip(gpu), ())
    work = kernels.work
    tiled = work.units[0] * work.unit_flop[0]
    return float(tiled), float(kernels.flop[0] + work.padded_flop[0]), float(kernels.flop[0])


def test_winograd_multiplies_less_where_no_tensor_core_takes_fp32() -> None:
    """cuDNN's 3 x 3 convolutions in fp32 on a V100 took twice as long as measured: profiles show
    Winograd's kernels, which need 2.25 times fewer multiplications or fewer.
    """
    square = {"r": 3, "s": 3, "dtype": Dtype.FP32}
    for direction in ("forward", "dgrad", "wgrad"):
        tiled, counted, direct = count_convolution("v100-sxm", direction=direction, **square)
        assert direct / 2.25 <= counted <= direct / 1.6
        strided = count_convolution("v100-sxm", direction=direction, stride=2, **square)
        assert strided[1] == strided[2]
        assert tiled < strided[0] * 4.0 / 1.6
    _, counted, direct = count_convolution("v100-sxm", r=5, s=5, dtype=Dtype.FP32)
    assert counted == direct
    for other in ({"dtype": Dtype.FP16}, {"dtype": Dtype.FP32}):
        _, counted, direct = count_convolution("h200", r=3, s=3, **other)
        assert counted == direct
