"""Depthwise convolutions, for which cuDNN and PyTorch have kernels of their own.

They have no product in them and run on CUDA cores.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.kernels.kernel_table import SM_BLOCKS, WARP_THREADS
from wattcast.workload.operator_types import Conv2d


class DepthwiseCoefficients(Coefficients):
    """How depthwise convolutions are cut into blocks, and what these cost."""

    plain_elements: float  # of a result that a block of PyTorch's kernels works on
    special_elements: float  # the same of cuDNN's
    back_elements: float  # of an image's gradient, the same
    reduce_steps: float  # loads that a sum over a block takes as long as
    direct_steps: float  # of a filter of one tap, whose pixels lie in lines far apart
    start_steps: float  # of a warp that begins with an image of a filter's gradient
    taps_of_pass: float  # of a result that pass L2 once more in kernels that load every tap
    plain_crossings: float  # how often a tap of a byte of the image crosses shared memory
    special_crossings: float  # the same of cuDNN's kernels
    tap_crossings: float  # the same of kernels that load every tap
    wide_filter_taps: int  # beyond which an SM holds fewer blocks
    wide_filter_slots: float  # blocks of such filters that an SM holds
    special_slots: float  # blocks of cuDNN's kernels that an SM holds
    plain_slots: float  # blocks of PyTorch's kernels that an SM holds
    tap_slots: float  # blocks of kernels that load every tap
    tile_width: float  # pixels of a tile of cuDNN's kernel in fp16, channels first
    tile_height: float  # the same, down
    block_tiles: float  # of a block of that kernel
    tiled_slots: float  # blocks of that kernel that an SM holds
    filter_warps: float  # of a block of a filter's gradient at most
    few_images: int  # below which cuDNN's special kernel is not taken
    direct_channels: int  # up to which filters of one tap run without a product
    small_filter_taps: int  # up to which fp16 runs in tiles, channels first


DEPTHWISE = load_coefficients("depthwise", DepthwiseCoefficients)

_SM_WARPS = 64.0  # that an SM holds at most
_VECTOR_CHANNELS = 4  # that a thread loads at once

# One kernel, which loads every tap; it is slower in half precision, which it widens.
_TAP_KERNELS = ("last.plain", "last.wide")


class DepthwiseWork(NamedTuple):
    """What a depthwise convolution takes."""

    units: float
    unit_flop: float
    slots: float  # blocks that an SM holds
    steps: float  # dependent ones
    shared_byte: float
    reread_byte: float  # that pass L2 once more
    launches: float  # further kernels


def depthwise_kind(op: Conv2d) -> str:
    """Return the kernel that cuDNN or PyTorch has for a depthwise convolution."""
    layout = "last" if op.channels_last else "first"
    if op.direction == "wgrad":
        return f"{layout}.filter"
    if op.direction == "dgrad":
        return f"{layout}.back"
    if not op.channels_last:
        is_small = op.r * op.s <= DEPTHWISE.small_filter_taps and op.stride == 1
        return "first.tiled" if is_small and op.dtype is Dtype.FP16 else "first.plain"
    if op.r * op.s == 1 and (op.stride > 1 or op.c <= DEPTHWISE.direct_channels):
        return "last.direct"
    if op.dtype.byte > 2:
        return "last.wide"
    return (
        "last.special"
        if op.n >= DEPTHWISE.few_images and op.c % _VECTOR_CHANNELS == 0
        else "last.plain"
    )


def depthwise_work(op: Conv2d, kind: str) -> DepthwiseWork:
    """Return what a depthwise convolution takes, by its kernel."""
    width = op.dtype.byte
    taps = op.r * op.s
    image_byte, _, out_byte = op.tensors_byte
    work = _plain_work(op, taps)
    if kind == "first.tiled":
        tiles = ceil(op.q / DEPTHWISE.tile_width) * ceil(op.p / DEPTHWISE.tile_height)
        units = op.n * op.c * tiles / DEPTHWISE.block_tiles
        work = work._replace(units=units, slots=DEPTHWISE.tiled_slots)
    elif kind == "first.back":
        work = work._replace(units=image_byte / width / DEPTHWISE.plain_elements)
    elif kind == "first.filter":
        work = _filter_work(op, work)
    elif kind == "last.special":
        units = out_byte / width / DEPTHWISE.special_elements
        work = work._replace(
            units=units,
            slots=_wide_slots(taps),
            shared_byte=DEPTHWISE.special_crossings,
        )
    elif kind == "last.back":
        units = image_byte / width / DEPTHWISE.back_elements
        work = work._replace(units=units, slots=_wide_slots(taps))
    elif kind in _TAP_KERNELS:
        # A part of the taps of each result passes L2 again.
        work = work._replace(
            slots=DEPTHWISE.tap_slots,
            shared_byte=DEPTHWISE.tap_crossings,
            reread_byte=taps / DEPTHWISE.taps_of_pass * out_byte,
        )
    elif kind == "last.direct":
        # Elements of a pixel lie in lines far apart: as long as forty taps, whatever its filter.
        work = work._replace(steps=DEPTHWISE.direct_steps)
    elif kind == "last.filter":
        work = work._replace(launches=1.0)  # of parts and of their sum

    units = max(ceil(work.units), 1.0)
    # Strides leave no pixel out of an image's gradient.
    results_byte = image_byte if op.direction == "dgrad" else out_byte
    return work._replace(
        units=units,
        unit_flop=2.0 * taps * results_byte / width / units,
        shared_byte=work.shared_byte * taps * image_byte,
    )


def _plain_work(op: Conv2d, taps: int) -> DepthwiseWork:
    """Return the work of the plain kernel; ``shared_byte`` is that of a tap and a byte of image."""
    _, _, out_byte = op.tensors_byte
    return DepthwiseWork(
        units=out_byte / op.dtype.byte / DEPTHWISE.plain_elements,
        unit_flop=0.0,
        slots=DEPTHWISE.plain_slots,
        steps=taps + DEPTHWISE.reduce_steps,
        shared_byte=DEPTHWISE.plain_crossings,
        reread_byte=0.0,
        launches=0.0,
    )


def _wide_slots(taps: int) -> float:
    is_wide = taps > DEPTHWISE.wide_filter_taps
    return DEPTHWISE.wide_filter_slots if is_wide else DEPTHWISE.special_slots


def _filter_work(op: Conv2d, plain: DepthwiseWork) -> DepthwiseWork:
    """Return the work of a filter's gradient, channels first: a block for each weight.

    Up to eight warps walk over images, and to begin with one is as long as four steps: eleven
    launches of the H200 database. It loads all operands for each weight.
    """
    taps = op.r * op.s
    image_byte, _, out_byte = op.tensors_byte
    image_steps = ceil(op.p * op.q / WARP_THREADS) + DEPTHWISE.start_steps
    return plain._replace(
        units=float(op.groups * taps),
        slots=min(_SM_WARPS / min(op.n, DEPTHWISE.filter_warps), SM_BLOCKS),
        steps=ceil(op.n / DEPTHWISE.filter_warps) * image_steps + DEPTHWISE.reduce_steps,
        reread_byte=(taps - 1.0) * (image_byte + out_byte),
    )
