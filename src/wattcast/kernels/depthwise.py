"""Depthwise convolutions: kernels of cuDNN and PyTorch without a product to speak of."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.work import Columns, columns_of
from wattcast.workload.graph import Conv2d

Rows = npt.NDArray[np.intp]
_TAPS = ("last.plain", "last.wide")  # one kernel, which loads every tap; slower in half precision, which it widens


def put_depthwise(work: Columns, names: list[str], ops: Sequence[Conv2d], rows: Rows, both: Array) -> None:
    """Put in the work of rows that are depthwise, and their kinds; ``both`` are bytes read and written."""
    found = []
    for i in rows.tolist():
        names[i] = _depthwise_kind(ops[i])
        found.append(_depthwise(ops[i], names[i]))
    units, flop, held, steps, shared, again, launches = columns_of(found)
    work["units"][rows], work["unit_flop"][rows] = units, flop
    work["slots"][rows], work["steps"][rows], work["shared_byte"][rows] = held, steps, shared
    work["l2_byte"][rows], work["store_byte"][rows] = both[rows] + again, 0.0
    work["launches"][rows] += launches


def _depthwise_kind(op: Conv2d) -> str:
    """The kernel that cuDNN and PyTorch have for a depthwise convolution."""
    half = op.dtype.byte <= 2
    if op.direction != "forward":
        return f"{'last' if op.channels_last else 'first'}.{'filter' if op.direction == 'wgrad' else 'back'}"
    if not op.channels_last:
        tiled_ = op.dtype is Dtype.FP16 and op.r * op.s <= 9 and op.stride == 1
        return "first.tiled" if tiled_ else "first.plain"
    if op.r * op.s == 1 and (op.stride > 1 or op.c <= 16):
        return "last.direct"
    if not half:
        return "last.wide"
    return "last.special" if op.n >= 8 and op.c % 4 == 0 else "last.plain"


def _depthwise(op: Conv2d, kind: str) -> tuple[float, ...]:
    """Blocks, arithmetic of one, blocks an SM holds, dependent steps, bytes through shared memory and again through
    L2, and kernels more of a depthwise convolution."""
    width, taps, (image, _, out) = op.dtype.byte, op.r * op.s, op._tensors_byte
    pixels, held, steps, shared, again, launches = out / width, 2.0, taps + 5.0, 1.2, 0.0, 0.0
    units = pixels / 1024.0
    if kind == "first.tiled":
        units, held = op.n * ceil(op.q / 40.0) * op.c * ceil(op.p / 10.0) / 8.0, 4.0
    elif kind == "first.back":
        units = image / width / 1024.0
    elif kind == "first.filter":
        # A block for each weight; up to eight warps walk over images, and to begin with one is as long as four steps:
        # eleven launches of the H200 database. It loads all operands for each weight.
        units, held = op.groups * taps, min(64.0 / min(op.n, 8.0), 32.0)
        steps = ceil(op.n / 8.0) * (ceil(op.p * op.q / 32.0) + 4.0) + 5.0
        again = (taps - 1.0) * (image + out)
    elif kind in ("last.special", "last.back"):
        units = pixels / 5000.0 if kind == "last.special" else image / width / 4096.0
        held, shared = 2.0 if taps > 25 else 6.0, 0.6 if kind == "last.special" else 1.2
    elif kind in _TAPS:
        held, shared, again = 12.0, 1.1, taps / 5.0 * out  # a part of the taps of each result
    elif kind == "last.direct":
        steps = 40.0  # elements of a pixel lie in lines far apart: as long as forty taps, whatever its filter
    elif kind == "last.filter":
        launches = 1.0  # of parts and of their sum
    units = max(ceil(units), 1.0)
    # strides leave none out of an image's gradient
    flop = 2.0 * taps * (image if op.direction == "dgrad" else out) / width / units
    return units, flop, held, steps, shared * taps * image, again, launches
