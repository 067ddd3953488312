"""Shapes of convolutions, and of the implicit matrix products that they become.

The product of a forward convolution has pixels as rows, filters as columns, and channels times
filter taps as K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wattcast.core.arrays import Array
from wattcast.kernels.families.product_shapes import (
    CUDA_CORE_FORMATS,
    FAST_BYTE,
    choice_columns,
    pipe_code,
)
from wattcast.kernels.kernel_choice import ProductSizes
from wattcast.kernels.kernel_table import (
    Columns,
    as_columns,
    log2_alignment,
    log2_size,
)
from wattcast.workload.operator_types import Conv2d

CONVOLUTION_CHOICE_COLUMNS = (
    "m",
    "n",
    "k",
    "small_m",
    "small_out",
    "dtype",
    "log_c",
    "log_rs",
    "stride",
    "channels_last",
    "align_c",
    "align_k",
    "log_batch",
    "log_side",
    "dgrad",
    "wgrad",
)


class ConvolutionShapes(NamedTuple):
    """Arrays ``(row,)``."""

    outputs: Array  # channels of a group
    inputs: Array  # channels of a group
    taps: Array  # of a filter
    product_m: Array  # sides of the implicit product of a group
    product_n: Array
    product_c: Array  # channels of a tap that it walks over; pixels, for the gradient of a filter
    product_taps: Array  # taps that it walks over
    groups: Array
    width: Array  # bytes of an element
    image_byte: Array
    weight_byte: Array
    out_byte: Array
    channels_last: Array  # 1: channels lie last
    simt: Array  # 1: a format for CUDA cores
    depthwise: Array  # 1: a channel a group
    batch: Array
    pixels: Array  # of an image
    out_pixels: Array
    height: Array
    stride: Array
    # share of the image's pixels under any filter: strides beyond the filter leave pixels out
    touched_share: Array
    code: Array  # of the number format
    dgrad: Array  # 1: the gradient of the image
    wgrad: Array  # 1: the gradient of the filter
    read_byte: Array
    write_byte: Array

    @property
    def product(self) -> ProductSizes:
        """The implicit products: how many, M, N and K."""
        return self.groups, self.product_m, self.product_n, self.product_c * self.product_taps

    @property
    def fast_step(self) -> Array:
        """Channels of a fast access."""
        return FAST_BYTE / self.width


def collect_shapes(ops: Sequence[Conv2d]) -> ConvolutionShapes:
    """Return the shapes of all convolutions."""
    return ConvolutionShapes(*as_columns([_fill_row(op) for op in ops]))


def describe_shapes(shapes: ConvolutionShapes) -> Columns:
    """Return shapes as the choice of kernels sees them."""
    plain, logs, aligned = shape_features(shapes)
    columns = choice_columns(*shapes.product) | plain
    columns |= zip(logs, log2_size(list(logs.values())), strict=True)
    columns |= zip(aligned, log2_alignment(list(aligned.values())), strict=True)
    return columns


def shape_features(shapes: ConvolutionShapes) -> tuple[Columns, Columns, Columns]:
    """Return sizes that the choice and the residual see: plain, in logs, and by alignment."""
    plain = {
        "stride": shapes.stride,
        "channels_last": shapes.channels_last,
        "dtype": shapes.code,
        "dgrad": shapes.dgrad,
        "wgrad": shapes.wgrad,
    }
    logs = {
        "log_c": shapes.inputs,
        "log_rs": shapes.taps,
        "log_side": shapes.height,
        "log_batch": shapes.batch,
    }
    return plain, logs, {"align_c": shapes.inputs, "align_k": shapes.outputs}


class _Product(NamedTuple):
    """The implicit product of a convolution, and the bytes that it reads and writes."""

    m: float
    n: float
    c: float
    taps: float
    read_byte: float
    write_byte: float


def _fill_row(op: Conv2d) -> tuple[float, ...]:
    """Return the columns of one convolution."""
    dtype = op.dtype
    direction = op.direction
    tensors_byte = op.tensors_byte
    image_byte, weight_byte, out_byte = tensors_byte
    inputs = op.c // op.groups
    touched_rows = min(op.r / op.stride, 1.0)
    touched_columns = min(op.s / (op.stride_w or op.stride), 1.0)
    product = _describe_product(op, tensors_byte)
    columns = {
        "outputs": op.k // op.groups,
        "inputs": inputs,
        "taps": op.r * op.s,
        "product_m": product.m,
        "product_n": product.n,
        "product_c": product.c,
        "product_taps": product.taps,
        "groups": op.groups,
        "width": dtype.byte,
        "image_byte": image_byte,
        "weight_byte": weight_byte,
        "out_byte": out_byte,
        "channels_last": op.channels_last,
        "simt": dtype in CUDA_CORE_FORMATS,
        "depthwise": op.groups > 1 and inputs == 1,
        "batch": op.n,
        "pixels": op.h * op.w,
        "out_pixels": op.p * op.q,
        "height": op.h,
        "stride": op.stride,
        "touched_share": touched_rows * touched_columns,
        "code": pipe_code(dtype),
        "dgrad": direction == "dgrad",
        "wgrad": direction == "wgrad",
        "read_byte": product.read_byte,
        "write_byte": product.write_byte,
    }
    return tuple(columns[name] for name in ConvolutionShapes._fields)


def _describe_product(op: Conv2d, tensors_byte: tuple[float, float, float]) -> _Product:
    """Return the implicit product of a convolution or of one of its gradients."""
    image_byte, weight_byte, out_byte = tensors_byte
    inputs = op.c // op.groups
    outputs = op.k // op.groups
    taps = op.r * op.s
    out_pixels = op.n * op.p * op.q
    if op.direction == "wgrad":
        # Channels of an image are padded to fast accesses.
        step = max(FAST_BYTE // op.dtype.byte, 1)
        padded_inputs = -(-inputs // step) * step
        columns = padded_inputs * taps
        return _Product(
            outputs,
            columns,
            out_pixels,
            1,
            image_byte + out_byte,
            weight_byte,
        )
    if op.direction == "dgrad":
        image_pixels = op.n * op.h * op.w
        met_taps = taps * min(out_pixels / image_pixels, 1.0)
        read_byte = out_byte + weight_byte
        return _Product(
            image_pixels,
            inputs,
            outputs,
            met_taps,
            read_byte,
            image_byte,
        )
    return _Product(
        out_pixels,
        outputs,
        inputs,
        taps,
        image_byte + weight_byte,
        out_byte,
    )
