"""Grids of pointwise functions that libraries cut in a way of their own.

These are batch norm, pooling, sums over columns, concatenation behind a cache, the optimiser and
the gradient of a lookup table. Threads and grids are those of PyTorch 2 and cuDNN, checked against
kernels that an H200 ran.

Batch norm in half precision runs on PyTorch's kernels (``Normalization.cuh``), in fp32 on cuDNN's.
With channels first, statistics are a block for each channel that walks over all its pixels, one
load after another, so that few channels leave most of the chip idle; the normalisation is a block
for each channel and picture. With channels last, blocks take 32 channels and a part of the pixels,
at most 128 parts."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import NamedTuple

from wattcast.core import Dtype
from wattcast.kernels.kernel_table import BLOCK_CYCLE, SM_THREADS, LaunchGrid, steps_with_misses
from wattcast.workload.operator_types import Elementwise, Layout

_WARP = 32.0
# SM cycles of a warp's step, from times of the kernels on an H200: normalising channels first,
# channels last
_STEP_CYCLE = 12.2
_LAST_STEP_CYCLE = 11.7
_CUDNN_LAST_CYCLE = 24.0
_FROM_MEMORY = 0.33  # more of them where operands come from device memory
_MOST_BLOCKS = 262144.0  # of a normalisation
_STATISTICS_THREADS = 512.0
_STATISTICS_SLOTS = 2.0
_REDUCE_STEPS = 6.0  # a sum over a block takes about as long as six loads
# channels last: parts, and a block's channels and rows
_PARTS = 128.0
_LAST_CHANNELS = 32.0
_LAST_THREADS = 16.0
_FEWEST_PARTS = 8.0  # of sums that meet in memory
_LAST_LOADS = 4.0  # a thread has in flight
# cuDNN keeps a channel of up to so many values on its SM and loads it at once; loads against those
# of single values
_CUDNN_KEPT = 32768.0
_CUDNN_STEPS = 0.25
_CUDNN_LAST_STEPS = 0.4
_CUDNN_REDUCE_STEPS = 8.0
_CUDNN_LAST_BLOCKS = 2.0  # an SM, channels last
# for each part
_CAT_BLOCKS_PER_SM = 2.0
_CAT_THREADS = 512.0
_SMALL_PART = 0.25  # of a row: below, one part's blocks carry the work
_COLUMN_CYCLE = 0.08  # of an SM for an element of a sum over rows: ten instructions
# of a tensor list
_CHUNK = 65536.0
_CHUNK_THREADS = 512.0
_CHUNK_VECTOR = 4.0
_MOST_CHUNKS = 320.0  # of one kernel
_TENSORS = 16  # that a list is taken to have
_PARAMETER_CYCLE = 0.6  # of an SM for a parameter where sizes are even, from times on an H200
_FEW_INDICES = 3072.0  # up to here the gradient of a table is one kernel
_SORTED_LAUNCHES = 31.0  # beyond, indices are sorted: eight passes, their set-up, and the sums
_SORTED_CYCLE = 2.85  # of an SM for an element in those sums: 5.7 ns a block of 1024 threads, twice
_POOL_THREADS = 256.0
_MOST_PLANES = 65535.0
# of an SM for a result, and for a warp of pixels in the gradient
_POOL_CYCLE = 3.9
_POOL_WARP_CYCLE = 92.0


def special_kernel(op: Elementwise) -> str:
    """Return the kernel family below ``elementwise`` of a function with a grid of its own, or
    nothing.
    """
    name = op.function
    if name in ("sum", "mean", "max"):
        return "reduce.columns" if op.layout is Layout.TRANSPOSED else ""
    if name == "cat" and op.layout is Layout.CONTIGUOUS:
        return "vector.cat"
    if name == "cat":
        fills_cache = (
            op.rows and op.run and op.rows * op.run == op.n
        )  # one part is all of it: a prompt's keys
        return "cat.append" if appends_to_cache(op) or fills_cache else ""
    if name == "scatter_add" and _index_count(op) > _FEW_INDICES:
        return "scatter.sorted"
    return _BY_FUNCTION.get(name, "")


_BY_FUNCTION = {
    "dropout": "vector.dropout",
    "batchnorm": "batchnorm",
    "batchnorm_train": "batchnorm.train",
    "batchnorm_grad": "batchnorm.backward",
    "pool": "pool",
    "pool_grad": "pool.backward",
    "adamw": "optimizer",
    "scatter_add": "scatter",
}
SPECIAL_FUNCTIONS = frozenset({*_BY_FUNCTION, "sum", "mean", "max", "cat"})


def appends_to_cache(op: Elementwise) -> bool:
    """Return whether a little is put behind a lot: a cache, which no earlier kernel of this pass
    has touched.
    """
    return op.function == "cat" and bool(
        op.rows and op.run and op.run < _SMALL_PART * op.n / op.rows
    )


def special_grid(
    kernel: str, op: Elementwise, sm_count: float, missing: float
) -> LaunchGrid | None:
    """Return how the work of ``op`` is cut into blocks; None where it is cut as any kernel that
    streams.

    ``missing`` is the share of its bytes that L2 does not hold.
    """
    return _GRIDS[kernel](op, sm_count, missing) if kernel in _GRIDS else None


class _ImageShape(NamedTuple):
    channels: float
    pixels: float
    pictures: float
    last: bool
    cudnn: bool


def batch_norm(op: Elementwise, sm_count: float, missing: float) -> LaunchGrid | None:
    """Return the grid of batch norm; cuDNN has one kernel for statistics and what follows from
    them.

    By running statistics it is one pass, led in halves by two small kernels. In training the
    batch's own statistics come before it. The gradient sums over input and gradient first: blocks
    walk twice."""
    if op.layout not in (Layout.CONTIGUOUS, Layout.TRANSPOSED) or not op.rows or not op.run:
        return None
    channels = float(op.rows)
    pixels = float(op.run)
    pictures = max(op.n / (channels * pixels), 1.0)
    shape = _ImageShape(
        channels, pixels, pictures, op.layout is Layout.TRANSPOSED, op.dtype is Dtype.FP32
    )
    if op.function == "batchnorm":
        blocks, steps, slots, cycle = _scale_images(shape, sm_count, missing)
        launches = 1.0 if shape.cudnn else 3.0
        return LaunchGrid(
            blocks, steps_with_misses(steps, missing), slots, launches, 0.0, cycle, True
        )
    blocks, steps, slots = _sum_channels(shape, sm_count)
    walk = steps - _REDUCE_STEPS
    if shape.cudnn and shape.last:
        return LaunchGrid(blocks, steps_with_misses(_CUDNN_LAST_STEPS * walk, missing), slots, 2.0)
    if shape.cudnn:
        share = _CUDNN_STEPS if shape.pixels * shape.pictures <= _CUDNN_KEPT else 1.0
        return LaunchGrid(
            blocks, _CUDNN_REDUCE_STEPS + steps_with_misses(share * walk, missing), slots
        )
    if op.function == "batchnorm_train":
        _, after, _, cycle = _scale_images(shape, sm_count, missing)
        launches = 3.0 + (shape.last and blocks > ceil(shape.channels / _LAST_CHANNELS))
        return LaunchGrid(
            blocks, steps_with_misses(steps, missing) + after, slots, launches, sm_cycle=cycle
        )
    if shape.last:  # several loads in flight
        return LaunchGrid(blocks, steps_with_misses(steps, missing), slots, 3.0)
    return LaunchGrid(blocks, steps_with_misses(2.0 * steps, 2.0 * missing), slots)


def _scale_images(
    shape: _ImageShape, sm_count: float, missing: float
) -> tuple[float, float, float, float]:
    """Return blocks, steps, slots and SM cycles of the pass that scales."""
    if shape.last:
        blocks, values = _channels_last(shape, sm_count)
        warps = _LAST_CHANNELS * _LAST_THREADS / _WARP
        each = _CUDNN_LAST_CYCLE if shape.cudnn else _LAST_STEP_CYCLE
        cycle = blocks / sm_count * max(warps * values * each, BLOCK_CYCLE)
        return blocks, ceil(values / _LAST_LOADS), SM_THREADS / (warps * _WARP), cycle
    threads = max(_block_threads(shape.pixels / 4.0), min(_block_threads(shape.pixels), 64.0))
    high = max(64.0 // threads, 1.0)
    groups = max(1.0, min(_MOST_BLOCKS // shape.channels, ceil(shape.pictures / high)))
    steps = ceil(shape.pixels / threads) * max(shape.pictures / (high * groups), 1.0)
    blocks = shape.channels * groups
    each = max(
        threads * high / _WARP * steps * _STEP_CYCLE * (1.0 + _FROM_MEMORY * missing), BLOCK_CYCLE
    )
    return (
        blocks,
        steps,
        min(SM_THREADS / (threads * high), 32.0),
        max(blocks / sm_count, 1.0) * each,
    )


def _sum_channels(shape: _ImageShape, sm_count: float) -> tuple[float, float, float]:
    """Return blocks, steps and slots of a sum over each channel."""
    if shape.last:
        blocks, values = _channels_last(shape, sm_count, _FEWEST_PARTS)
        return blocks, _REDUCE_STEPS + values, _STATISTICS_SLOTS
    wide = _block_threads(shape.pixels)
    high = _STATISTICS_THREADS / wide
    walk = ceil(shape.pixels / wide) * ceil(shape.pictures / high)
    return shape.channels, _REDUCE_STEPS + walk, _STATISTICS_SLOTS


def _channels_last(shape: _ImageShape, sm_count: float, fewest: float = 1.0) -> tuple[float, float]:
    """Return blocks, and values of a thread, with channels last; fewer parts than ``fewest`` are
    one.
    """
    pixels = shape.pixels * shape.pictures
    across = ceil(shape.channels / _LAST_CHANNELS)
    if shape.cudnn:
        blocks = _CUDNN_LAST_BLOCKS * sm_count
    else:  # sixteen values a thread or more, but no more than so many parts
        parts = min(_PARTS, ceil(pixels / (_LAST_THREADS * 16.0)))
        blocks = across * (parts if parts >= fewest else 1.0)
    return blocks, pixels * shape.channels / (blocks * _LAST_CHANNELS * _LAST_THREADS)


def _block_threads(size: float) -> float:
    """Return the least of 32, 64, ... 512 that reaches a size, or 512."""
    return next((threads for threads in (32.0, 64.0, 128.0, 256.0) if size <= threads), 512.0)


def _sum_columns(op: Elementwise, sm_count: float, missing: float) -> LaunchGrid:
    """Cut PyTorch's reduction where neighbours belong to different results (``setReduceConfig``).

    A thread takes up to four results side by side; 32 threads lie along the results and the others
    along what is added up. With 256 values or more left to a thread, blocks share a result and meet
    in memory."""
    results = op.write_byte / (op.out_dtype or op.dtype).byte
    length = max(op.n / results, 1.0)
    vector = next(v for v in (4.0, 2.0, 1.0) if results % v == 0 or v == 1.0)
    most = 512.0 / vector
    along = power_of_two(results / vector, most)
    high = min(power_of_two(length, most), most / min(along, 32.0))
    wide = min(along, most / high)
    shared = length >= 16.0 * high or length >= 256.0
    blocks = ceil(results / (vector * wide * (1.0 if shared else high)))
    values = length / high if shared else length
    slots = SM_THREADS / (wide * high)
    parts = 1.0
    if shared and values >= 256.0 and blocks <= sm_count * slots:
        parts = max(min(ceil(sm_count * slots / blocks), ceil(values / 16.0)), ceil(values / 256.0))
    steps = 2.0 + steps_with_misses(ceil(values / parts / 4.0), missing)
    met = parts > 1
    steps += met * ceil(parts / high)
    cycle = (_COLUMN_CYCLE * op.n + BLOCK_CYCLE * blocks * parts) / sm_count
    return LaunchGrid(blocks * parts, steps, slots, 1.0 + met, met * 8.0 * results * parts, cycle)


def power_of_two(size: float, most: float) -> float:
    """Return the largest power of two within a size and ``most``, at least 1."""
    return float(2.0 ** int(log2(min(max(size, 1.0), most))))


def _append_part(op: Elementwise, sm_count: float, missing: float) -> LaunchGrid:
    """Take two blocks an SM for each part, an element at a time: those of the small part have
    nothing to do.
    """
    blocks = _CAT_BLOCKS_PER_SM * sm_count
    return LaunchGrid(blocks, max(op.n / (blocks * _CAT_THREADS), 1.0), SM_THREADS / _CAT_THREADS)


def _pool_windows(op: Elementwise, sm_count: float, missing: float) -> LaunchGrid:
    """Take a thread for each result (with its place, an int64), which walks over its window."""
    results = max(op.write_byte / (op.dtype.byte + 8.0), 1.0)
    cycle = _POOL_CYCLE * max(results / sm_count, _POOL_THREADS)
    return LaunchGrid(
        ceil(results / _POOL_THREADS), 4.0, SM_THREADS / _POOL_THREADS, 1.0, 0.0, cycle, True
    )


def _pool_grad(op: Elementwise, sm_count: float, missing: float) -> LaunchGrid:
    """Write zeros first, then take a block for 256 pixels of a plane, whose threads walk over their
    windows.
    """
    planes = float(op.rows or 1)
    pixels = op.n / planes
    across = ceil(pixels / _POOL_THREADS)
    blocks = min(planes, _MOST_PLANES) * across
    again = (
        1.0 + (max(planes / _MOST_PLANES, 1.0) - 1.0) / 3.0
    )  # a block's further planes load while it computes
    each = again * max(_POOL_WARP_CYCLE * ceil(pixels / 32.0) / across, 2.0 * BLOCK_CYCLE)
    return LaunchGrid(
        blocks, 4.0, SM_THREADS / _POOL_THREADS, 2.0, 0.0, each * max(blocks / sm_count, 1.0), True
    )


def _step_optimizer(op: Elementwise, sm_count: float, missing: float) -> LaunchGrid:
    """Take a block for each chunk of 65,536 parameters of a tensor, four at a time a thread; 320
    chunks a kernel.

    Tensors whose size four does not divide are loaded an element at a time, at twice the cost.
    """
    size = max(op.n // _TENSORS, 1)
    chunks = ceil((op.n / _TENSORS) / _CHUNK)
    blocks = float(min(_TENSORS, op.n) * chunks)
    longer = op.n % _TENSORS
    odd = (
        sum(count for count, n in ((longer, size + 1), (_TENSORS - longer, size)) if n % 4)
        / _TENSORS
    )
    steps = ceil(min(size, _CHUNK) / (_CHUNK_THREADS * _CHUNK_VECTOR))
    cycle = _PARAMETER_CYCLE * (1.0 + odd) * op.n / sm_count
    return LaunchGrid(
        blocks, steps, SM_THREADS / _CHUNK_THREADS, ceil(blocks / _MOST_CHUNKS), sm_cycle=cycle
    )


def _scatter_rows(op: Elementwise, sm_count: float, missing: float) -> LaunchGrid | None:
    """Take zeros and one kernel for few rows, a block for 32 columns, that walks over all indices."""
    indices = _index_count(op)
    if indices < 1.0:
        return None
    return LaunchGrid(ceil(op.n / indices / 32.0), 1.0 + ceil(indices / 32.0), 2.0, 2.0)


def _sorted_scatter(op: Elementwise, sm_count: float, missing: float) -> LaunchGrid:
    """Sort the indices of many rows, then take a thread a column of each run of like indices, and
    one a row.
    """
    cycle = _SORTED_CYCLE * op.n / sm_count
    return LaunchGrid(ceil(op.n / 1024.0), 1.0, 2.0, _SORTED_LAUNCHES, 0.0, cycle, True)


def _index_count(op: Elementwise) -> float:
    """Return the rows that a gradient of a table adds up, from its bytes; 0 where these do not say."""
    indices = (op.read_byte - 2.0 * op.n * op.dtype.byte) / 8.0
    return indices if 1.0 <= indices <= op.n else 0.0


_GRIDS: dict[str, Callable[[Elementwise, float, float], LaunchGrid | None]] = {
    "reduce.columns": _sum_columns,
    "cat.append": _append_part,
    **dict.fromkeys(("batchnorm", "batchnorm.train", "batchnorm.backward"), batch_norm),
    "pool": _pool_windows,
    "pool.backward": _pool_grad,
    "optimizer": _step_optimizer,
    "scatter": _scatter_rows,
    "scatter.sorted": _sorted_scatter,
}
