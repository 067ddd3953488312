"""Batch norm: by running statistics, by those of the batch, and its gradient; blocks as PyTorch 2 and cuDNN cut them.

Halves run on PyTorch's own kernels, fp32 on cuDNN's. Channels first, statistics are a block a channel that walks over
all its pixels, a load after another, so that few channels leave most of the chip idle; the normalisation is a block a
channel and picture. Channels last, blocks take 32 channels and a part of the pixels, at most 128 parts. Threads and
grids are those of ``Normalization.cuh``; all were checked against kernels an H200 ran.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from wattcast.dtypes import Dtype
from wattcast.kernels.grid import BLOCK_CYCLE, SM_THREADS, Grid, waits
from wattcast.workload.graph import Elementwise, Layout

_WARP = 32.0
# SM cycles of a warp's step, from times of the kernels on an H200: normalising channels first, channels last
_STEP_CYCLE, _LAST_STEP_CYCLE, _CUDNN_LAST_CYCLE = 12.2, 11.7, 24.0
_FROM_MEMORY = 0.33  # more of them where operands come from device memory
_MOST_BLOCKS = 262144.0  # of a normalisation
_STATISTICS_THREADS, _STATISTICS_SLOTS = 512.0, 2.0
_REDUCE_STEPS = 6.0  # a sum over a block takes about as long as six loads
_PARTS, _LAST_CHANNELS, _LAST_THREADS = 128.0, 32.0, 16.0  # channels last: parts, and a block's channels and rows
_FEWEST_PARTS = 8.0  # of sums that meet in memory
_LAST_LOADS = 4.0  # a thread has in flight
# cuDNN keeps a channel of up to so many values on its SM and loads it at once; loads against those of single values
_CUDNN_KEPT, _CUDNN_STEPS, _CUDNN_LAST_STEPS, _CUDNN_REDUCE_STEPS = 32768.0, 0.25, 0.4, 8.0
_CUDNN_LAST_BLOCKS = 2.0  # an SM, channels last


class _Shape(NamedTuple):
    channels: float
    pixels: float
    pictures: float
    last: bool
    cudnn: bool


def batch_norm(op: Elementwise, sm_count: float, missing: float) -> Grid | None:
    """Running statistics: one pass; halves are led by two small kernels over the channels."""
    shape = _shape(op)
    if shape is None:
        return None
    blocks, steps, slots, cycle = _normalise(shape, sm_count, missing)
    return Grid(blocks, waits(steps, missing), slots, 1.0 if shape.cudnn else 3.0, 0.0, cycle, True)


def batch_norm_train(op: Elementwise, sm_count: float, missing: float) -> Grid | None:
    """The batch's own statistics, then the normalisation; in one kernel where cuDNN does it."""
    shape = _shape(op)
    if shape is None:
        return None
    if shape.cudnn:
        return _cudnn(shape, sm_count, missing)
    blocks, steps, slots = _statistics(shape, sm_count)
    _, after, _, cycle = _normalise(shape, sm_count, missing)
    launches = 3.0 + (shape.last and blocks > ceil(shape.channels / _LAST_CHANNELS))
    return Grid(blocks, waits(steps, missing) + after, slots, launches, sm_cycle=cycle)


def batch_norm_grad(op: Elementwise, sm_count: float, missing: float) -> Grid | None:
    """Sums over input and gradient, then the gradient of the input: the same blocks walk twice."""
    shape = _shape(op)
    if shape is None:
        return None
    if shape.cudnn:
        return _cudnn(shape, sm_count, missing)
    blocks, steps, slots = _statistics(shape, sm_count)
    if shape.last:  # several loads in flight
        return Grid(blocks, waits(steps, missing), slots, 3.0)
    return Grid(blocks, waits(2.0 * steps, 2.0 * missing), slots)


def _cudnn(shape: _Shape, sm_count: float, missing: float) -> Grid:
    """One kernel for sums and results."""
    blocks, steps, slots = _statistics(shape, sm_count)
    walk = steps - _REDUCE_STEPS
    if shape.last:
        return Grid(blocks, waits(_CUDNN_LAST_STEPS * walk, missing), slots, 2.0)
    share = _CUDNN_STEPS if shape.pixels * shape.pictures <= _CUDNN_KEPT else 1.0
    return Grid(blocks, _CUDNN_REDUCE_STEPS + waits(share * walk, missing), slots)


def _shape(op: Elementwise) -> _Shape | None:
    if op.layout not in (Layout.CONTIGUOUS, Layout.TRANSPOSED) or not op.rows or not op.run:
        return None
    channels, pixels = float(op.rows), float(op.run)
    pictures = max(op.n / (channels * pixels), 1.0)
    return _Shape(channels, pixels, pictures, op.layout is Layout.TRANSPOSED, op.dtype is Dtype.FP32)


def _normalise(shape: _Shape, sm_count: float, missing: float) -> tuple[float, float, float, float]:
    """Blocks, steps, slots and SM cycles of the pass that scales."""
    if shape.last:
        blocks, values = _last(shape, sm_count)
        warps = _LAST_CHANNELS * _LAST_THREADS / _WARP
        each = _CUDNN_LAST_CYCLE if shape.cudnn else _LAST_STEP_CYCLE
        cycle = blocks / sm_count * max(warps * values * each, BLOCK_CYCLE)
        return blocks, ceil(values / _LAST_LOADS), SM_THREADS / (warps * _WARP), cycle
    threads = max(_threads(shape.pixels / 4.0), min(_threads(shape.pixels), 64.0))
    high = max(64.0 // threads, 1.0)
    groups = max(1.0, min(_MOST_BLOCKS // shape.channels, ceil(shape.pictures / high)))
    steps = ceil(shape.pixels / threads) * max(shape.pictures / (high * groups), 1.0)
    blocks = shape.channels * groups
    each = max(threads * high / _WARP * steps * _STEP_CYCLE * (1.0 + _FROM_MEMORY * missing), BLOCK_CYCLE)
    return blocks, steps, min(SM_THREADS / (threads * high), 32.0), max(blocks / sm_count, 1.0) * each


def _statistics(shape: _Shape, sm_count: float) -> tuple[float, float, float]:
    """Blocks, steps and slots of a sum over each channel."""
    if shape.last:
        blocks, values = _last(shape, sm_count, _FEWEST_PARTS)
        return blocks, _REDUCE_STEPS + values, _STATISTICS_SLOTS
    wide = _threads(shape.pixels)
    high = _STATISTICS_THREADS / wide
    walk = ceil(shape.pixels / wide) * ceil(shape.pictures / high)
    return shape.channels, _REDUCE_STEPS + walk, _STATISTICS_SLOTS


def _last(shape: _Shape, sm_count: float, fewest: float = 1.0) -> tuple[float, float]:
    """Blocks, and values a thread, with channels last; fewer parts than ``fewest`` are one."""
    pixels = shape.pixels * shape.pictures
    across = ceil(shape.channels / _LAST_CHANNELS)
    if shape.cudnn:
        blocks = _CUDNN_LAST_BLOCKS * sm_count
    else:  # sixteen values a thread or more, but no more than so many parts
        parts = min(_PARTS, ceil(pixels / (_LAST_THREADS * 16.0)))
        blocks = across * (parts if parts >= fewest else 1.0)
    return blocks, pixels * shape.channels / (blocks * _LAST_CHANNELS * _LAST_THREADS)


def _threads(size: float) -> float:
    """The least of 32, 64, ... 512 that reaches a size, or 512."""
    if size > 64.0:
        return 128.0 if size <= 128.0 else 256.0 if size <= 256.0 else 512.0
    return 32.0 if size <= 32.0 else 64.0
