"""Grids of pointwise functions that libraries cut in a way of their own.

These are batch norm, pooling, sums over columns, concatenation behind a cache, the optimiser and
the gradient of a lookup table. Threads and grids are those of PyTorch 2 and cuDNN, checked against
kernels that an H200 ran.

Batch norm in half precision runs on PyTorch's kernels (``Normalization.cuh``), in fp32 on cuDNN's,
and so does batch norm in fp16 whose weights are in fp32, as in mixed precision
(``_select_batch_norm_backend`` in PyTorch's ``Normalization.cpp``).
With channels first, statistics are a block for each channel that walks over all its pixels, one
load after another, so that few channels leave most of the chip idle; the normalisation is a block
for each channel and picture. With channels last, blocks take 32 channels and a part of the pixels,
at most 128 parts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import NamedTuple, TypeAlias

from wattcast.coefficients import Coefficients, load_coefficients
from wattcast.core import Dtype
from wattcast.kernels.kernel_table import (
    MOVED_SUM_BYTE,
    SM_BLOCKS,
    SM_THREADS,
    WARP_THREADS,
    WORK,
    LaunchGrid,
    steps_with_misses,
)
from wattcast.workload.operator_types import Elementwise, Layout
from wattcast.workload.workload_coefficients import WORKLOADS


class SpecialGridCoefficients(Coefficients):
    """What kernels with a grid of their own cost; cycles are those of an SM."""

    scale_cycles: float  # of a warp's step of batch norm's scaling, channels first
    last_scale_cycles: float  # the same, channels last
    cudnn_last_scale_cycles: float  # the same in cuDNN
    memory_slowdown: float  # share by which these grow where operands come from device memory
    cudnn_kept_steps: float  # share of the loads of a channel that cuDNN keeps on its SM
    cudnn_last_steps: float  # the same, channels last
    cudnn_slots: float  # blocks of 512 threads that an SM holds where a channel is walked
    cudnn_reduce_steps: float  # loads that a sum over a block takes as long as in cuDNN
    reduce_steps: float  # the same in PyTorch
    column_cycles: float  # of an element of a sum over rows
    parameter_cycles: float  # of a parameter of an optimiser where sizes are even
    sorted_cycles: float  # of an element in the sums of a sorted gradient of a table
    sorted_launches: float  # kernels of such a gradient
    pool_cycles: float  # of a result of pooling
    pool_gradient_cycles: float  # of a warp of pixels in its gradient
    small_part: float  # of a row: below, one part's blocks carry the work of a concatenation
    most_norm_blocks: float  # of a normalisation
    statistics_threads: float  # of a block that sums over a channel
    statistics_slots: float  # of these blocks that an SM holds
    last_parts: float  # of the pixels at most, channels last
    last_channels: float  # of a block, channels last
    last_threads: float  # of a channel in a block, channels last
    fewest_parts: float  # of sums that meet in memory
    last_values: float  # of a thread at least, channels last
    last_loads: float  # that a thread has in flight, channels last
    scale_vector: float  # pixels for which a block of scaling has a thread
    least_scale_threads: float  # of a block of scaling, if pixels are so many
    cudnn_kept_values: float  # of a channel up to which cuDNN keeps it on its SM
    cudnn_last_blocks: float  # of cuDNN an SM, channels last
    append_blocks: float  # an SM for each part of a concatenation
    cat_threads: float  # of a block of a concatenation
    chunk_threads: float  # of a block for a chunk of a list of tensors
    chunk_vector: float  # parameters that a thread takes at once
    list_tensors: int  # that an optimiser's list is taken to have
    few_indices: float  # up to which the gradient of a table is one kernel
    sorted_elements: float  # of a block in the sums of a sorted gradient
    pool_threads: float  # of a block of pooling
    most_planes: float  # of pooling's gradient that have a block of their own
    later_planes: float  # of a block that load as fast as one
    pool_steps: float  # dependent ones of pooling
    reduce_threads: float  # of a block of a reduction
    reduce_vector: float  # values that a thread of a reduction loads at once
    shared_row_values: float  # of a thread, with which rows of a block share their results
    shared_values: float  # of a thread, with which blocks share a result
    statistics_launches: float  # of PyTorch's kernels of a batch norm


GRIDS = load_coefficients("special_grids", SpecialGridCoefficients)

_VECTOR_VALUES = 4  # of fp32, that a thread loads at once


def special_kernel(op: Elementwise) -> str:
    """Return the kernel family below ``elementwise`` of a function with a grid of its own.

    Empty: it has none.
    """
    name = op.function
    if name in ("sum", "mean", "max"):
        return "reduce.columns" if op.layout is Layout.TRANSPOSED else ""
    if name == "cat" and op.layout is Layout.CONTIGUOUS:
        return "vector.cat"
    if name == "cat":
        return "cat.append" if appends_to_cache(op) or _fills_cache(op) else ""
    if name == "scatter_add" and _index_count(op) > GRIDS.few_indices:
        return "scatter.sorted"
    return _BY_FUNCTION.get(name, "")


_BY_FUNCTION = {
    "dropout": "vector.dropout",
    "batchnorm": "batchnorm",
    "batchnorm_train": "batchnorm.train",
    "batchnorm_grad": "batchnorm.backward",
    "batchnorm_train_wide": "batchnorm.train",
    "batchnorm_grad_wide": "batchnorm.backward",
    "pool": "pool",
    "pool_grad": "pool.backward",
    "adamw": "optimizer",
    "scatter_add": "scatter",
}
SPECIAL_FUNCTIONS = frozenset({*_BY_FUNCTION, "sum", "mean", "max", "cat"})


def appends_to_cache(op: Elementwise) -> bool:
    """Return whether a little is put behind a lot: a cache, which no earlier kernel has touched."""
    if op.function != "cat" or not op.rows or not op.run:
        return False
    return op.run < GRIDS.small_part * op.n / op.rows


def _fills_cache(op: Elementwise) -> bool:
    """Return whether one part is all of a cache: the keys of a prompt."""
    return bool(op.rows and op.run and op.rows * op.run == op.n)


def special_grid(
    kernel: str,
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid | None:
    """Return how the work of ``op`` is cut into blocks.

    None: it is cut as any kernel that streams. ``missing`` is the share of its bytes that L2 does
    not hold.
    """
    if kernel not in _GRID_OF_KERNEL:
        return None
    return _GRID_OF_KERNEL[kernel](op, sm_count, missing)


class _ImageShape(NamedTuple):
    channels: float
    pixels: float
    pictures: float
    channels_last: bool
    is_cudnn: bool

    @property
    def channel_values(self) -> float:
        """Values of a channel in all pictures."""
        return self.pixels * self.pictures


def batch_norm(
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid | None:
    """Return the grid of batch norm; cuDNN has one kernel for statistics and what follows from
    them.

    By running statistics it is one pass, led in halves by two small kernels. In training the
    batch's own statistics come before it. The gradient sums over input and gradient first: blocks
    walk twice.
    """
    is_plain = op.layout in (Layout.CONTIGUOUS, Layout.TRANSPOSED)
    if not is_plain or not op.rows or not op.run:
        return None
    channels = float(op.rows)
    pixels = float(op.run)
    shape = _ImageShape(
        channels,
        pixels,
        pictures=max(op.n / (channels * pixels), 1.0),
        channels_last=op.layout is Layout.TRANSPOSED,
        is_cudnn=op.dtype is Dtype.FP32 or op.function.endswith("_wide"),
    )
    if op.function == "batchnorm":
        scaling = _scale_images(shape, sm_count, missing)
        return LaunchGrid(
            scaling.blocks,
            steps_with_misses(scaling.steps, missing),
            scaling.slots,
            launches=1.0 if shape.is_cudnn else GRIDS.statistics_launches,
            sm_cycle=scaling.sm_cycle,
            once=True,
        )
    sums = _sum_channels(shape, sm_count)
    if shape.is_cudnn:
        return _cudnn_statistics(shape, sums, missing)
    steps = steps_with_misses(sums.steps, missing)
    if op.function == "batchnorm_train":
        scaling = _scale_images(shape, sm_count, missing)
        meets_in_memory = sums.blocks > ceil(shape.channels / GRIDS.last_channels)
        return LaunchGrid(
            sums.blocks,
            steps + scaling.steps,
            sums.slots,
            launches=GRIDS.statistics_launches + (shape.channels_last and meets_in_memory),
            sm_cycle=scaling.sm_cycle,
        )
    if shape.channels_last:  # several loads in flight
        return LaunchGrid(sums.blocks, steps, sums.slots, launches=GRIDS.statistics_launches)
    return LaunchGrid(sums.blocks, steps_with_misses(2.0 * sums.steps, 2.0 * missing), sums.slots)


class _Pass(NamedTuple):
    """A pass of batch norm over its operands."""

    blocks: float
    steps: float
    slots: float
    sm_cycle: float = 0.0


def _cudnn_statistics(
    shape: _ImageShape,
    sums: _Pass,
    missing: float,
) -> LaunchGrid:
    """Return the grid of cuDNN's kernel, which loads several values at once."""
    loads = sums.steps - GRIDS.reduce_steps
    if shape.channels_last:
        steps = steps_with_misses(GRIDS.cudnn_last_steps * loads, missing)
        return LaunchGrid(sums.blocks, steps, sums.slots, launches=2.0)
    is_kept = shape.channel_values <= GRIDS.cudnn_kept_values
    share = GRIDS.cudnn_kept_steps if is_kept else 1.0
    slots = sums.slots if is_kept else GRIDS.cudnn_slots
    steps = GRIDS.cudnn_reduce_steps + steps_with_misses(share * loads, missing)
    return LaunchGrid(sums.blocks, steps, slots)


def _scale_images(
    shape: _ImageShape,
    sm_count: float,
    missing: float,
) -> _Pass:
    """Return the pass that scales."""
    if shape.channels_last:
        return _scale_channels_last(shape, sm_count)
    least_threads = min(_block_threads(shape.pixels), GRIDS.least_scale_threads)
    threads = max(_block_threads(shape.pixels / GRIDS.scale_vector), least_threads)
    block_pictures = max(GRIDS.least_scale_threads // threads, 1.0)
    groups_of_channel = min(
        GRIDS.most_norm_blocks // shape.channels, ceil(shape.pictures / block_pictures)
    )
    groups = max(1.0, groups_of_channel)
    loops = max(shape.pictures / (block_pictures * groups), 1.0)
    steps = ceil(shape.pixels / threads) * loops
    blocks = shape.channels * groups

    block_threads = threads * block_pictures
    warp_steps = block_threads / WARP_THREADS * steps
    step_cycles = GRIDS.scale_cycles * (1.0 + GRIDS.memory_slowdown * missing)
    block_cycles = max(warp_steps * step_cycles, WORK.block_cycles)
    slots = min(SM_THREADS / block_threads, SM_BLOCKS)
    return _Pass(blocks, steps, slots, max(blocks / sm_count, 1.0) * block_cycles)


def _scale_channels_last(shape: _ImageShape, sm_count: float) -> _Pass:
    blocks, values = _cut_channels_last(shape, sm_count)
    warps = GRIDS.last_channels * GRIDS.last_threads / WARP_THREADS
    value_cycles = GRIDS.cudnn_last_scale_cycles if shape.is_cudnn else GRIDS.last_scale_cycles
    sm_cycle = blocks / sm_count * max(warps * values * value_cycles, WORK.block_cycles)
    return _Pass(
        blocks, ceil(values / GRIDS.last_loads), SM_THREADS / (warps * WARP_THREADS), sm_cycle
    )


def _sum_channels(shape: _ImageShape, sm_count: float) -> _Pass:
    """Return the pass that sums over each channel."""
    if shape.channels_last:
        blocks, values = _cut_channels_last(shape, sm_count, GRIDS.fewest_parts)
        return _Pass(blocks, GRIDS.reduce_steps + values, GRIDS.statistics_slots)
    threads = _block_threads(shape.pixels)
    block_pictures = GRIDS.statistics_threads / threads
    loads = ceil(shape.pixels / threads) * ceil(shape.pictures / block_pictures)
    return _Pass(shape.channels, GRIDS.reduce_steps + loads, GRIDS.statistics_slots)


def _cut_channels_last(
    shape: _ImageShape,
    sm_count: float,
    fewest: float = 1.0,
) -> tuple[float, float]:
    """Return blocks, and values of a thread, with channels last.

    Fewer parts than ``fewest`` are one.
    """
    across = ceil(shape.channels / GRIDS.last_channels)
    if shape.is_cudnn:
        blocks = GRIDS.cudnn_last_blocks * sm_count
    else:
        # Sixteen values a thread or more, but no more than so many parts
        least_values = GRIDS.last_threads * GRIDS.last_values
        parts = min(GRIDS.last_parts, ceil(shape.channel_values / least_values))
        blocks = across * (parts if parts >= fewest else 1.0)
    threads = blocks * GRIDS.last_channels * GRIDS.last_threads
    return blocks, shape.channel_values * shape.channels / threads


_BLOCK_THREADS = (32.0, 64.0, 128.0, 256.0, 512.0)


def _block_threads(size: float) -> float:
    """Return the least of 32, 64, ... 512 that reaches a size, or 512."""
    for threads in _BLOCK_THREADS:
        if size <= threads:
            return threads
    return _BLOCK_THREADS[-1]


def _sum_columns(
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid:
    """Cut PyTorch's reduction where neighbours belong to different results (``setReduceConfig``).

    A thread takes up to four results side by side; 32 threads lie along the results and the others
    along what is added up. With 256 values or more left to a thread, blocks share a result and meet
    in memory.
    """
    results = op.write_byte / (op.out_dtype or op.dtype).byte
    length = max(op.n / results, 1.0)

    # Threads of a block: along the results, and along what is added up
    vector = _result_vector(results)
    most_threads = GRIDS.reduce_threads / vector
    along = power_of_two(results / vector, most_threads)
    height = min(power_of_two(length, most_threads), most_threads / min(along, WARP_THREADS))
    width = min(along, most_threads / height)

    # Threads of a column share what is added up where there is enough of it.
    shares_column = length >= GRIDS.shared_row_values * height or length >= GRIDS.shared_values
    values = length / height if shares_column else length
    column_results = vector * width * (1.0 if shares_column else height)
    blocks = ceil(results / column_results)
    slots = SM_THREADS / (width * height)
    parts = 1.0
    if shares_column and values >= GRIDS.shared_values and blocks <= sm_count * slots:
        filling = min(ceil(sm_count * slots / blocks), ceil(values / GRIDS.shared_row_values))
        parts = max(filling, ceil(values / GRIDS.shared_values))

    has_parts = parts > 1
    steps = 2.0 + steps_with_misses(ceil(values / parts / GRIDS.reduce_vector), missing)
    steps += has_parts * ceil(parts / height)
    sm_cycle = (GRIDS.column_cycles * op.n + WORK.block_cycles * blocks * parts) / sm_count
    return LaunchGrid(
        blocks * parts,
        steps,
        slots,
        launches=1.0 + has_parts,
        between_byte=has_parts * MOVED_SUM_BYTE * results * parts,
        sm_cycle=sm_cycle,
    )


def _result_vector(results: float) -> float:
    """Return the results that a thread takes side by side."""
    for vector in (GRIDS.reduce_vector, 2.0):
        if results % vector == 0:
            return vector
    return 1.0


def power_of_two(size: float, most: float) -> float:
    """Return the largest power of two within a size and ``most``, at least 1."""
    return float(2.0 ** int(log2(min(max(size, 1.0), most))))


def _append_part(
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid:
    """Take two blocks an SM for each part, an element at a time.

    Those of the small part have nothing to do.
    """
    blocks = GRIDS.append_blocks * sm_count
    steps = max(op.n / (blocks * GRIDS.cat_threads), 1.0)
    return LaunchGrid(blocks, steps, SM_THREADS / GRIDS.cat_threads)


def _pool_windows(
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid:
    """Take a thread for each result (with its place, an int64), which walks over its window."""
    results = max(op.write_byte / (op.dtype.byte + Dtype.INT64.byte), 1.0)
    return LaunchGrid(
        ceil(results / GRIDS.pool_threads),
        steps=GRIDS.pool_steps,
        slots=SM_THREADS / GRIDS.pool_threads,
        sm_cycle=GRIDS.pool_cycles * max(results / sm_count, GRIDS.pool_threads),
        once=True,
    )


def _pool_gradient(
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid:
    """Write zeros, then take a block for 256 pixels of a plane, whose threads walk over windows."""
    planes = float(op.rows or 1)
    pixels = op.n / planes
    across = ceil(pixels / GRIDS.pool_threads)
    blocks = min(planes, GRIDS.most_planes) * across
    # Further planes of a block load while it computes.
    planes_of_block = 1.0 + (max(planes / GRIDS.most_planes, 1.0) - 1.0) / GRIDS.later_planes
    plane_cycles = GRIDS.pool_gradient_cycles * ceil(pixels / WARP_THREADS) / across
    block_cycles = planes_of_block * max(plane_cycles, 2.0 * WORK.block_cycles)
    return LaunchGrid(
        blocks,
        steps=GRIDS.pool_steps,
        slots=SM_THREADS / GRIDS.pool_threads,
        launches=2.0,
        sm_cycle=block_cycles * max(blocks / sm_count, 1.0),
        once=True,
    )


def _step_optimizer(
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid:
    """Take a block for each chunk of 65,536 parameters of a tensor, four at a time a thread.

    A kernel takes 320 chunks. Tensors whose size four does not divide are loaded an element at a
    time, at twice the cost.
    """
    size = max(op.n // GRIDS.list_tensors, 1)
    chunks = ceil((op.n / GRIDS.list_tensors) / WORKLOADS.chunk)
    blocks = float(min(GRIDS.list_tensors, op.n) * chunks)

    # Some tensors are longer by one.
    longer = op.n % GRIDS.list_tensors
    odd_tensors = longer * bool((size + 1) % _VECTOR_VALUES) + (GRIDS.list_tensors - longer) * bool(
        size % _VECTOR_VALUES
    )
    odd_share = odd_tensors / GRIDS.list_tensors
    return LaunchGrid(
        blocks,
        steps=ceil(min(size, WORKLOADS.chunk) / (GRIDS.chunk_threads * GRIDS.chunk_vector)),
        slots=SM_THREADS / GRIDS.chunk_threads,
        launches=ceil(blocks / WORKLOADS.most_chunks),
        sm_cycle=GRIDS.parameter_cycles * (1.0 + odd_share) * op.n / sm_count,
    )


def _scatter_rows(
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid | None:
    """Take zeros and one kernel for few rows: a block for 32 columns walks over all indices."""
    indices = _index_count(op)
    if indices < 1.0:
        return None
    columns = op.n / indices
    return LaunchGrid(
        ceil(columns / WARP_THREADS),
        steps=1.0 + ceil(indices / WARP_THREADS),
        slots=2.0,
        launches=2.0,
    )


def _sorted_scatter(
    op: Elementwise,
    sm_count: float,
    missing: float,
) -> LaunchGrid:
    """Sort the indices of many rows, then take a thread a column of each run of like indices."""
    return LaunchGrid(
        ceil(op.n / GRIDS.sorted_elements),
        steps=1.0,
        slots=2.0,
        launches=GRIDS.sorted_launches,
        sm_cycle=GRIDS.sorted_cycles * op.n / sm_count,
        once=True,
    )


def _index_count(op: Elementwise) -> float:
    """Return the rows that a gradient of a table adds up; 0 where its bytes do not tell."""
    indices = (op.read_byte - 2.0 * op.n * op.dtype.byte) / Dtype.INT64.byte
    return indices if 1.0 <= indices <= op.n else 0.0


_Grid: TypeAlias = Callable[[Elementwise, float, float], LaunchGrid | None]
_GRID_OF_KERNEL: dict[str, _Grid] = {
    "reduce.columns": _sum_columns,
    "cat.append": _append_part,
    "batchnorm": batch_norm,
    "batchnorm.train": batch_norm,
    "batchnorm.backward": batch_norm,
    "pool": _pool_windows,
    "pool.backward": _pool_gradient,
    "optimizer": _step_optimizer,
    "scatter": _scatter_rows,
    "scatter.sorted": _sorted_scatter,
}
