"""How kernels of pointwise functions, reductions, gathers and concatenations are cut into blocks.

The busiest SM takes as long as it issues instructions or stores results. A first result waits for
its function and, where L2 does not hold the operands, for device memory.
``elementwise_kernels.csv`` has, for each kernel, the elements of a block, those of a block whose
elements are wide and not cast, whether the function counts among the instructions of an element,
the kernel's own instructions, and those of each operand's address.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.strict_files import read_shipped_table
from wattcast.kernels.families.elementwise_sizes import (
    CAT,
    ELEMENTWISE,
    FEW_GATHER,
    GATHER,
    KERNELS,
    REDUCE,
    ElementwiseSizes,
)
from wattcast.kernels.families.special_grids import GRIDS, power_of_two
from wattcast.kernels.kernel_table import (
    SM_THREADS,
    WARP_THREADS,
    WORK,
    LaunchGrid,
    as_columns,
)

ISSUE_PER_CYCLE = 128.0  # instructions of threads that an SM issues: four warps
_VECTOR_BYTE = 16.0  # that a thread loads at once
_SM_CYCLE = LaunchGrid._fields.index("sm_cycle")


@cache
def _kernel_issues() -> Array:
    """Read what kernels cost, ``(column, kernel)``."""
    rows = read_shipped_table("wattcast.kernels.families", "elementwise_kernels.csv")
    by_kernel = {row.pop("kernel"): [float(value) for value in row.values()] for row in rows}
    return np.array([by_kernel[kernel] for kernel in KERNELS]).T.copy()


def make_streaming_grids(
    sizes: ElementwiseSizes,
    missing: Array,
    sm_count: float,
) -> tuple[Array, Array]:
    """Return instructions for an element, and grids of kernels that stream through all elements.

    A grid is a column of the second array, whose rows are the fields of ``LaunchGrid``.
    """
    narrow, wide, function, kernel, operand = _kernel_issues().take(sizes.kernel, axis=1)
    issue = function * sizes.form.issue + kernel + operand * sizes.operands

    grid = np.repeat(_STREAMING_GRID, len(sizes.n), axis=1)
    units = np.ceil(sizes.n / np.where(sizes.form.is_wide > 0, wide, narrow), out=grid[0])
    start_steps = sizes.form.start_cycle / ELEMENTWISE.start_step_cycles
    np.add(start_steps + 1.0, missing, out=grid[1])
    issue_cycles = sizes.n * issue / ISSUE_PER_CYCLE
    store_cycles = sizes.write / ELEMENTWISE.store_byte_per_cycle
    busy_cycles = np.maximum(issue_cycles, store_cycles)
    np.divide(busy_cycles, np.minimum(units, sm_count), out=grid[_SM_CYCLE])
    return issue, grid


_STREAMING_GRID = np.array(
    LaunchGrid(0.0, 0.0, ELEMENTWISE.most_blocks, once=True), dtype=np.float64
)
_STREAMING_GRID = _STREAMING_GRID[:, np.newaxis]


def replace_grids(grid: Array, grids: Mapping[int, LaunchGrid]) -> None:
    """Put in the grids of some rows; cycles that these do not state stay as they are."""
    if not grids:
        return
    table = as_columns(list(grids.values()))
    rows = list(grids)
    table[_SM_CYCLE] = np.where(table[_SM_CYCLE] > 0, table[_SM_CYCLE], grid[_SM_CYCLE, rows])
    grid[:, rows] = table


def replace_row_grids(
    grid: Array,
    sizes: ElementwiseSizes,
    issue: Array,
    missing: Array,
    sm_count: float,
) -> None:
    """Put in the grids of kernels that are cut by rows, of which a workload has a few."""
    places = (sizes.kernel >= CAT).nonzero()[0]
    if not places.size:
        return
    table = np.array(
        [
            sizes.n,
            sizes.rows,
            sizes.columns,
            sizes.form.width,
            issue,
            sizes.write,
            sizes.form.start_cycle,
            missing,
        ]
    )
    rows = table.take(places, axis=1).T.tolist()
    kernels = sizes.kernel[places].tolist()
    grids = {}
    for place, kernel, row in zip(places.tolist(), kernels, rows, strict=True):
        grids[place] = _GRID_OF_KERNEL[kernel](_RowSizes(*row), sm_count)
    replace_grids(grid, grids)


class _RowSizes(NamedTuple):
    """The sizes of one operator whose kernel is cut by rows."""

    n: float
    rows: float
    columns: float
    width: float
    issue: float
    write: float
    start_cycle: float
    missing: float

    @property
    def start_steps(self) -> float:
        """Steps until a first result, beyond those of an addition."""
        return self.start_cycle / ELEMENTWISE.start_step_cycles

    @property
    def first_load_steps(self) -> float:
        return 1.0 + self.missing

    @property
    def issue_cycles(self) -> float:
        return self.n * self.issue / ISSUE_PER_CYCLE

    def busy_cycles(
        self,
        units: float,
        sm_count: float,
    ) -> float:
        """Return the cycles of the busiest SM, which issues or stores."""
        store_cycles = self.write / ELEMENTWISE.store_byte_per_cycle
        return max(self.issue_cycles, store_cycles) / min(units, sm_count)


def _reduce_rows(sizes: _RowSizes, sm_count: float) -> LaunchGrid:
    """Cut a reduction; the last block of a row adds up the sums of all.

    It finds out by a counter that a kernel clears before.
    """
    units, loads, parts = _reduction_blocks(sizes.rows, sizes.columns, sizes.width, sm_count)
    block_cycles = max(units / sm_count, 1.0) * ELEMENTWISE.reduce_block_cycles
    busy_cycles = sizes.issue_cycles / min(units, sm_count) + block_cycles
    is_shared = float(parts > 1)
    steps = (2.0 + loads + sizes.start_steps) * sizes.first_load_steps + 2.0 * is_shared
    return LaunchGrid(
        units,
        steps,
        SM_THREADS / GRIDS.reduce_threads,
        launches=1.0 + is_shared,
        sm_cycle=busy_cycles,
    )


def _gather_rows(sizes: _RowSizes, sm_count: float) -> LaunchGrid:
    """Cut a gather of many rows into blocks of a row, a thread for 16 bytes of it."""
    chunks = ceil(sizes.columns * sizes.width / _VECTOR_BYTE)
    units = sizes.rows * ceil(chunks / ELEMENTWISE.gather_threads)
    threads = min(ceil(chunks / WARP_THREADS) * WARP_THREADS, ELEMENTWISE.gather_threads)
    slots = min(SM_THREADS // threads, ELEMENTWISE.most_blocks)
    least_cycles = max(units / sm_count, 1.0) * WORK.block_cycles
    busy_cycles = max(sizes.busy_cycles(units, sm_count), least_cycles)
    steps = sizes.start_steps + sizes.first_load_steps
    return LaunchGrid(
        units,
        steps,
        slots,
        sm_cycle=busy_cycles,
        once=True,
    )


def _gather_few_rows(sizes: _RowSizes, sm_count: float) -> LaunchGrid:
    """Cut a gather of few rows by columns; each thread loops over the rows."""
    units = ceil(sizes.columns / ELEMENTWISE.few_gather_threads)
    steps = sizes.rows + sizes.start_steps + sizes.first_load_steps
    busy_cycles = sizes.busy_cycles(units, sm_count)
    return LaunchGrid(
        units,
        steps,
        ELEMENTWISE.most_blocks,
        sm_cycle=busy_cycles,
        once=True,
    )


def _concatenate(sizes: _RowSizes, sm_count: float) -> LaunchGrid:
    """Cut a concatenation into always as many blocks, whose threads take elements in turn."""
    loops = max(sizes.n / (ELEMENTWISE.cat_blocks * GRIDS.cat_threads), 1.0)
    steps = loops + sizes.start_steps + sizes.missing
    busy_cycles = sizes.busy_cycles(ELEMENTWISE.cat_blocks, sm_count)
    slots = SM_THREADS / GRIDS.cat_threads
    return LaunchGrid(
        ELEMENTWISE.cat_blocks,
        steps,
        slots,
        sm_cycle=busy_cycles,
        once=True,
    )


_GRID_OF_KERNEL = {
    CAT: _concatenate,
    GATHER: _gather_rows,
    FEW_GATHER: _gather_few_rows,
    REDUCE: _reduce_rows,
}


def _reduction_blocks(
    rows: float,
    columns: float,
    width: float,
    sm_count: float,
) -> tuple[float, float, int]:
    """Return the blocks of PyTorch's reduction over rows, loads of a thread in turn, and parts.

    A block is 512 threads, 32 along the row where there are 16 rows or more; a row that leaves a
    thread 256 values, or 16 for each row of the block, has a block of its own. Few rows that leave
    a thread of such a block 256 values are cut into parts, as many as the SMs hold blocks, down to
    16 values a thread.
    """
    vector = _VECTOR_BYTE / width if columns >= ELEMENTWISE.vector_columns else 1.0
    threads_along = power_of_two(columns / vector, GRIDS.reduce_threads)
    block_rows = min(
        power_of_two(rows, GRIDS.reduce_threads),
        GRIDS.reduce_threads / min(threads_along, WARP_THREADS),
    )
    values = columns / min(threads_along, GRIDS.reduce_threads / block_rows)
    has_own_block = values >= GRIDS.shared_row_values * block_rows or values >= GRIDS.shared_values
    if not has_own_block:
        return ceil(rows / block_rows), ceil(values / GRIDS.reduce_vector), 1

    values = values / block_rows
    slots = sm_count * SM_THREADS / GRIDS.reduce_threads
    parts = 1
    if values >= GRIDS.shared_values and rows <= slots:
        parts = max(
            min(ceil(slots / rows), ceil(values / GRIDS.shared_row_values)),
            ceil(values / GRIDS.shared_values),
        )
    return rows * parts, ceil(values / parts / GRIDS.reduce_vector), parts
