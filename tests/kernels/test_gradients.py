"""Gradients of layers and convolutions: the products they are, alike in a campaign and in a model."""

from __future__ import annotations

import numpy as np
import pytest

from wattcast.core.units import Dtype
from wattcast.hardware import load_gpu
from wattcast.kernels import Kernels, RunCondition, build_kernels, reference_chip
from wattcast.kernels.kernel_labels import KernelLabel, find_label
from wattcast.kernels.kernel_table import USUAL_CONDITION
from wattcast.lab.campaigns.kernel_plan import spec_from_operator
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import Bmm, Conv2d, Linear
from wattcast.workload.readers.from_json import operator_to_plain

GPU = load_gpu("h200")
REFERENCE = reference_chip(GPU)


def lowered(op: Operator, condition: RunCondition | None = None) -> Kernels:
    return build_kernels((op,), (condition or RunCondition(),), GPU, REFERENCE, ())


def sides(op: Operator) -> list[float]:
    features = lowered(op).work.features
    return [round(2.0 ** float(features[name][0])) for name in ("log_b", "log_m", "log_n", "log_k")]


@pytest.mark.parametrize(
    ("op", "layout"),
    [
        (Linear(768, 3072, 4096, turned=True), "tn"),
        (Bmm(48, 512, 512, 64), "nn"),
        (Bmm(48, 512, 512, 64, turned=True), "tn"),
    ],
)
def test_a_product_of_activations_is_the_same_in_a_campaign_and_in_a_model(
    op: Operator, layout: str
) -> None:
    """Whether weights were warm was once asked of products without weights too, and answered yes by
    every campaign and no by every model: models met a condition that no row had."""
    spec = spec_from_operator(operator_to_plain(op))
    assert spec is not None
    assert spec.layout == layout
    campaign, model = lowered(op, RunCondition(layout, "none")).work, lowered(op).work
    assert campaign.features["warm"][0] == model.features["warm"][0] == 0.0
    assert campaign.dram_read_byte[0] == model.dram_read_byte[0]


def test_the_gradient_of_a_weight_is_told_from_a_layer_of_its_size() -> None:
    """Like sizes, other operands: one's error once moved the other's prediction by a quarter."""
    layer, gradient = (
        lowered(Linear(1024, 1024, 1024, turned=turned)).work for turned in (False, True)
    )
    assert (layer.features["left_turned"][0], gradient.features["left_turned"][0]) == (0.0, 1.0)
    assert gradient.dram_read_byte[0] < layer.dram_read_byte[0]  # both operands stay in L2


@pytest.mark.parametrize(
    ("last", "direction", "product"),
    [
        (True, "forward", [1, 8 * 28 * 28, 512, 128]),
        (True, "dgrad", [1, 8 * 28 * 28, 128, 512]),
        (True, "wgrad", [1, 512, 128, 8 * 28 * 28]),
        (False, "forward", [8, 512, 28 * 28, 128]),
        (False, "dgrad", [8, 128, 28 * 28, 512]),
        (False, "wgrad", [8, 512, 128, 28 * 28]),
    ],
)
def test_a_point_convolution_and_its_gradients_are_products(
    last: bool, direction: str, product: list[int]
) -> None:
    op = Conv2d(8, 128, 512, 28, 28, 1, 1, channels_last=last, direction=direction)
    assert lowered(op).work.kernel_family[0].startswith("gemm")
    assert sides(op) == product


def test_a_filters_gradient_of_several_images_is_summed_up() -> None:
    one, many = (lowered(Conv2d(n, 128, 512, 28, 28, 1, 1, direction="wgrad")).work for n in (1, 8))
    assert one.between_byte[0] == 0.0
    assert many.between_byte[0] == 2 * 4 * 8 * 128 * 512  # written and read, in fp32
    assert many.launches[0] > one.launches[0]


def test_sums_larger_than_the_images_make_it_an_implicit_product() -> None:
    op = Conv2d(128, 1024, 512, 14, 14, 1, 1, direction="wgrad")
    assert lowered(op).work.kernel_family[0].startswith("conv2d")


@pytest.mark.parametrize(
    ("direction", "product"),
    [
        ("forward", [1, 4 * 28 * 28, 256, 128 * 9]),
        ("dgrad", [1, 4 * 56 * 56, 128, 256 * 9 // 4]),  # a quarter of the taps meets a pixel
        ("wgrad", [1, 256, 128 * 9, 4 * 28 * 28]),
    ],
)
def test_implicit_products_of_a_strided_convolution(direction: str, product: list[int]) -> None:
    op = Conv2d(
        4, 128, 256, 56, 56, 3, 3, stride=2, padding=1, channels_last=True, direction=direction
    )
    assert sides(op) == product
    assert np.prod(product) * 2 == pytest.approx(op.flop)


@pytest.mark.parametrize(
    ("last", "direction", "kind"),
    [
        (False, "dgrad", "first.back"),
        (False, "wgrad", "first.filter"),
        (True, "dgrad", "last.back"),
        (True, "wgrad", "last.filter"),
    ],
)
def test_gradients_of_depthwise_convolutions_have_kernels_of_their_own(
    last: bool, direction: str, kind: str
) -> None:
    op = Conv2d(
        8, 96, 96, 28, 28, 3, 3, padding=1, groups=96, channels_last=last, direction=direction
    )
    assert lowered(op).work.kernel_family == (f"conv2d.depthwise.{kind}",)


def test_a_depthwise_filters_gradient_has_a_block_for_each_weight() -> None:
    op = Conv2d(8, 96, 96, 28, 28, 3, 3, padding=1, groups=96, direction="wgrad", dtype=Dtype.BF16)
    assert lowered(op).work.units[0] == 96 * 9


def test_names_of_gradients_kernels() -> None:
    helper = "void xmma__5x_cudnn::implicit_gemm::strided_dgrad_indexed::kernel_helper_stage_0<xmma__5x_cudnn::x>(P)"
    main = "sm80_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x32x32_stage4_warp"
    assert find_label([helper, main]) == KernelLabel("ampere", 32, 256, False)
    mangled = (
        "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22"
        "ImplicitGemmMultistageINS_4gemm9GemmShapeILi64ELi128ELi32EEENS4_52Conv2dWgradOutputGradientTile"
    )
    assert find_label([mangled]) == KernelLabel("ampere", 128, 64, False)


@pytest.mark.parametrize(("images", "is_shared"), [(25, False), (36, True)])
def test_a_filters_gradient_over_thousands_of_pixels_is_shared_among_sms(
    images: int, is_shared: bool
) -> None:
    """A filter of 64 x 64 x 3 x 3 would keep a third of an A100 busy: pixels are divided too.

    From some 6,000 pixels on, which 31 images of 14 x 14 have, this pays for the sums.
    """
    gpu = load_gpu("a100-sxm-80gb")
    op = Conv2d(images, 64, 64, 14, 14, 3, 3, padding=1, direction="wgrad")
    work = build_kernels((op,), (USUAL_CONDITION,), gpu, reference_chip(gpu), ()).work
    assert bool(work.units[0] > 0.5 * 108) is is_shared
