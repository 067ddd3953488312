"""Shapes of matrix products, as the choice of kernels and the learned residual see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wattcast.core import Dtype
from wattcast.core.arrays import Array
from wattcast.kernels.kernel_choice import TF32_CODE, ProductSizes
from wattcast.kernels.kernel_labels import TILES
from wattcast.kernels.kernel_table import (
    MOVED_SUM_BYTE,
    SUM_BYTE,
    Columns,
    ReferenceChip,
    count_columns,
)
from wattcast.workload.operator_base import Operator
from wattcast.workload.operator_types import (
    Bmm,
    Conv2d,
    Linear,
)

# A row must be a multiple of this for the fast kernels: a 16-byte access on every row.
FAST_BYTE = 16
_HALF_VECTOR = 4  # elements: rows of fewer cannot be loaded eight bytes at a time
CUDA_CORE_FORMATS = (Dtype.FP32, Dtype.FP64)
PRODUCT_CHOICE_COLUMNS = (
    "b",
    "m",
    "n",
    "k",
    "small_m",
    "small_out",
    "linear",
    "straight",
    "left_turned",
    "odd",
    "half",
    "bias",
    "dtype",
)


class ProductShapes(NamedTuple):
    """Products ``b`` times ``[m, k] @ [k, n]``, arrays ``(row,)``."""

    b: Array
    m: Array
    n: Array
    k: Array
    width: Array  # bytes of an element of the left operand
    weight_width: Array
    out_width: Array
    shares_left: Array  # 1: all products share the left operand, a filter
    linear: Array  # 1: the right operand is a weight
    bias_byte: Array
    left_turned: Array  # 1: the left operand lies with k outermost, so that its rows are m long
    straight: Array  # 1: so does the right one, its rows n long, as far as its form says
    # of one sum for each image, written and read again: a filter's gradient, channels first
    parts_byte: Array
    odd: Array  # 1: two does not divide the rows of both operands as they lie
    half: Array  # 1: nor does four
    aligned: Array  # 1: rows of both operands in whole fast accesses, and so is k
    code: Array  # of the number format

    @property
    def sizes(self) -> ProductSizes:
        return self.b, self.m, self.n, self.k


def collect_shapes(ops: Sequence[Operator]) -> ProductShapes:
    """Return the shapes of all products."""
    return ProductShapes(*count_columns(ops, _fill_row))


class _Form(NamedTuple):
    """The fields of ``ProductShapes`` that do not follow from others, of one product."""

    b: Any
    m: Any
    n: Any
    k: Any
    width: Any
    weight_width: Any
    out_width: Any
    shares_left: Any = 0
    linear: Any = 0
    bias_byte: Any = 0
    left_turned: Any = 0
    straight: Any = 0
    parts_byte: Any = 0


def _fill_row(op: Operator) -> tuple[Any, ...]:
    """Return the columns of one product."""
    form = _describe_form(op)
    # Rows of both operands; where operands lie with k outermost, k must be long enough too.
    width = op.dtype.byte
    left_row = form.m if form.left_turned else form.k
    has_fast_rows = left_row * width % FAST_BYTE + form.n * width % FAST_BYTE == 0
    aligned = has_fast_rows & (form.k * width >= FAST_BYTE)
    odd = (left_row % 2 + form.n % 2) > 0
    half = (left_row % _HALF_VECTOR + form.n % _HALF_VECTOR) > 0
    return *form, odd, half, aligned, pipe_code(op.dtype)


def _describe_form(op: Operator) -> _Form:
    if isinstance(op, Conv2d):
        return _describe_point_convolution(op)
    assert isinstance(op, (Linear, Bmm))
    width = op.dtype.byte
    weight_width = width if op.weight_dtype is None else op.weight_dtype.byte
    out_width = width if op.out_dtype is None else op.out_dtype.byte
    if isinstance(op, Bmm):
        return _Form(
            b=op.b,
            m=op.m,
            n=op.n,
            k=op.k,
            width=width,
            weight_width=weight_width,
            out_width=out_width,
            left_turned=op.turned,
            straight=op.turned,
        )
    return _Form(
        b=1,
        m=op.m,
        n=op.n,
        k=op.k,
        width=width,
        weight_width=weight_width,
        out_width=out_width,
        # The gradient of a weight is a product of activations: nothing of it comes from device
        # memory as weights do.
        linear=not op.turned,
        bias_byte=width * op.n * op.bias,
        left_turned=op.turned,
        straight=op.turned,
    )


def _describe_point_convolution(op: Conv2d) -> _Form:
    """Return the product of a point convolution or of one of its gradients.

    Channels last: pixels by channels. Channels first: a product for each image, which all share the
    filter; its gradient is a sum over images, each in fp32.
    """
    width = op.dtype.byte
    pixels = op.p * op.q
    if op.direction == "wgrad":
        return _describe_filter_gradient(op, pixels)
    is_backward = op.direction == "dgrad"
    outputs = op.c if is_backward else op.k
    inputs = op.k if is_backward else op.c
    if op.channels_last:
        return _Form(
            b=1,
            m=op.n * pixels,
            n=outputs,
            k=inputs,
            width=width,
            weight_width=width,
            out_width=width,
            linear=1,
            straight=is_backward,
        )
    return _Form(
        b=op.n,
        m=outputs,
        n=pixels,
        k=inputs,
        width=width,
        weight_width=width,
        out_width=width,
        shares_left=1,
        left_turned=is_backward,
        straight=1,
    )


def _describe_filter_gradient(op: Conv2d, pixels: int) -> _Form:
    """Return the product of the gradient of a point convolution's filter."""
    width = op.dtype.byte
    if op.channels_last:
        return _Form(
            b=1,
            m=op.k,
            n=op.c,
            k=op.n * pixels,
            width=width,
            weight_width=width,
            out_width=width,
            left_turned=1,
            straight=1,
        )
    sums_images = op.n > 1
    return _Form(
        b=op.n,
        m=op.k,
        n=op.c,
        k=pixels,
        width=width,
        weight_width=width,
        out_width=Dtype.FP32.byte if sums_images else width,
        parts_byte=MOVED_SUM_BYTE * op.n * op.k * op.c if sums_images else 0,
    )


def is_point_convolution(op: Operator) -> bool:
    """Return whether an operator is a convolution that libraries run as a plain product."""
    if not isinstance(op, Conv2d) or not _is_dense_point(op):
        return False
    if op.dtype in CUDA_CORE_FORMATS:
        return False
    if op.channels_last or op.n == 1:
        return True
    if op.h * op.w % 2 and op.c * op.k >= TILES.odd_image_channels:
        return False  # images of odd size would be read an element at a time: cuDNN turns them
    # Sums for each image that outgrow the images: cuDNN turns these instead.
    return (
        op.direction != "wgrad" or SUM_BYTE * op.n * op.k * op.c <= TILES.most_parts * op.read_byte
    )


def _is_dense_point(op: Conv2d) -> bool:
    """Return whether each pixel of the result is made of one pixel of all channels."""
    has_one_tap = op.r == 1 and op.s == 1
    has_no_stride = op.stride == 1 and (op.stride_w or 1) == 1
    has_no_padding = not (op.padding or op.padding_w)
    return has_one_tap and has_no_stride and has_no_padding and op.groups <= 1


def choice_columns(
    b: Array,
    m: Array,
    n: Array,
    k: Array,
) -> Columns:
    """Return sizes as the kernel choice sees them, in log2."""
    log_b, log_m, log_n, log_k, log_out = np.log2(np.array([b, m, n, k, b * m * n]))
    return {
        "b": log_b,
        "m": log_m,
        "n": log_n,
        "k": log_k,
        "small_m": np.minimum(log_m, TILES.most_log_tokens),
        "small_out": np.minimum(log_out, TILES.most_log_outputs),
    }


def product_features(
    sizes: ProductSizes,
    tile: Columns,
    reference: ReferenceChip,
) -> tuple[Columns, Columns, Columns]:
    """Return features of a shape for the learned residual: plain, in logs, and by alignment."""
    b, m, n, k = sizes
    standard_tiles = b * np.ceil(n / TILES.standard_side) * np.ceil(m / TILES.standard_side)
    rounds = tile["units"] / tile["slots"] / reference.sm_count
    standard_waves = standard_tiles / reference.sm_count
    log_rounds, log_standard_waves = np.log2(np.array([rounds, standard_waves]))
    plain = {
        "tile_n": tile["tile_n"],
        "tile_m": tile["tile_m"],
        "fill": tile["fill"],
        "rounds": log_rounds,
        "fill_128x128": standard_waves / np.maximum(np.ceil(standard_waves), 1.0),
        "waves_128x128": log_standard_waves,
    }
    logs = {
        "log_b": b,
        "log_m": m,
        "log_n": n,
        "log_k": k,
        "split": tile["split"],
        "log_units": tile["units"],
    }
    return (
        plain,
        logs,
        {
            "align_m": m,
            "align_n": n,
            "align_k": k,
        },
    )


def pipe_code(dtype: Dtype) -> float:
    """Return a number for the pipe of a format, for trees to cut between."""
    return _PIPE_CODES.get(dtype, _OTHER_PIPE)


_OTHER_PIPE = 5.0
_PIPE_CODES = {
    Dtype.FP8: 0.0,
    Dtype.INT8: 0.0,
    Dtype.BF16: 1.0,
    Dtype.FP16: 2.0,
    Dtype.TF32: TF32_CODE,
    Dtype.FP32: 4.0,
}
