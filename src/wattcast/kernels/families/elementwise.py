"""Pointwise functions, reductions over all or part of a tensor, and plain data movement, as PyTorch
2 runs them.

The busiest SM takes as long as it issues instructions or stores results. A first result waits for
its function and, where L2 does not hold the operands, for device memory.

``function_cost.csv`` lists the functions that cost more than moving their operands. ``issue`` is
the instructions of a thread for an element (slower pipes counted by the issue slots they block),
from bursts on an H200 that fit L2 and have 0.6 to 12 million elements. ``start_cycle`` is by how
much a kernel of up to 131,072 elements outlasts an addition. The instructions agree with those a
profiler counted: 16 (and 2 on the slow pipe, 8 slots each) for a division, 22 and 3 for SiLU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import ceil, nan
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.core import Dtype
from wattcast.core.arrays import Array, CodedColumn, Mask, map_distinct
from wattcast.core.strict_files import read_shipped_table
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.families.special_grids import (
    SPECIAL_FUNCTIONS,
    appends_to_cache,
    power_of_two,
    special_grid,
    special_kernel,
)
from wattcast.kernels.kernel_table import (
    BLOCK_CYCLE,
    SM_THREADS,
    ConditionColumns,
    FamilyColumns,
    LaunchGrid,
    ReferenceChip,
    as_columns,
    count_columns,
    streamed_share,
)
from wattcast.workload.operator_base import find_function, index_words
from wattcast.workload.operator_types import Elementwise, Layout

ISSUE_PER_CYCLE = 128.0  # instructions of threads that an SM issues: four warps
# Bytes that an SM stores in a cycle: 3.8 TB/s on 132 SMs at 1.85 GHz, whatever they read, as long
# as all stays in L2
_STORE_BYTE_PER_CYCLE = 16.0
# of an element of a reduction: a maximum looks for NaN
_SUM_ISSUE = 8.0
_MAX_ISSUE = 24.0
_MOST_BLOCKS = 16.0  # of an SM in flight: the chip starts small blocks no faster
_REDUCE_BLOCK_CYCLE = 900.0  # of an SM for a block of a reduction, on top of its elements
_START_STEP = 400.0  # cycles of a function's start that count as a step
_CAT_BLOCKS = 528.0
_CAT_THREADS = 512.0
_ONE_BATCH = (
    64  # rows of a cache measured as of one batch: what is new lies together, however it was sliced
)
_FEW_ROWS = 16.0  # up to here a gather loops over its rows
# of a turned operand (a head), and of a row, where nothing else is said
_USUAL_RUN = 64.0
_USUAL_COLUMNS = 4096.0
# that L2 moves for each element of a transposing walk: most of a sector, from profiler counters
_SECTOR_BYTE = 30.0
_LAYOUT = {layout: float(i) for i, layout in enumerate(Layout)}
_REDUCING = ("sum", "mean", "max", "topk", "pool", "cumsum")
_MOVING = ("gather", "cat", "copy", "cast", "scatter_add")
_MASKED = ("masked_fill", "where")
_TWICE = {"batchnorm_train": 1.0, "batchnorm_grad": 2.0}  # operands that are read a second time
# Kernels, and of each that is a thread for so many elements: elements of a block, and of one whose
# elements are wide and not cast; whether the function counts among the instructions of an element,
# those on top of it, and those of each operand's address. Of the others, what they issue.
_KERNELS = (
    "vector",
    "unrolled",
    "copy",
    "indexed",
    "transposed",
    "cat",
    "gather",
    "gather.few",
    "reduce",
)
_VECTOR, _UNROLLED, _COPY, _INDEXED, _TRANSPOSED, _CAT, _GATHER, _FEW, _REDUCE = range(
    len(_KERNELS)
)
_BY_KERNEL = np.array(
    [
        [1024.0, 1024.0, 1.0, 0.0, 0.0],
        [512.0, 512.0, 0.0, 55.0, 0.0],  # a cast loads single elements
        [1024.0, 1024.0, 1.0, 0.0, 0.0],
        [512.0, 256.0, 1.0, 65.0, 7.5],
        [512.0, 256.0, 1.0, 65.0, 7.5],
        [1024.0, 1024.0, 1.0, 65.0, 7.5],
        *[[1024.0, 1024.0, 1.0, 0.0, 0.0]] * 3,
    ]
).T.copy()
_KERNEL_FAMILIES = tuple(f"elementwise.{kernel}" for kernel in _KERNELS)
_KernelIndex = npt.NDArray[np.intp]  # positions in _KERNELS


_ADDITION = 7.0, 0.0


@cache
def load_function_costs() -> dict[str, tuple[float, float]]:
    """Return instructions for an element, and cycles until a first result beyond those of an
    addition, by function.

    A function that the table lacks costs as much as an addition.
    """
    rows = read_shipped_table("wattcast.kernels.families", "function_cost.csv")
    return {row["function"]: (float(row["issue"]), float(row["start_cycle"])) for row in rows}


def elementwise_work(
    ops: Sequence[Elementwise], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return kernel families, work columns and features of pointwise functions and plain data
    movement.
    """
    ops = ops if told.usual else _as_measured(ops, told)
    s = _read_sizes(ops, told)
    columns = s.n / s.rows
    both = s.read + s.write
    sms = reference.sm_count
    operands = both / (s.n * s.form.width)
    missing = 1.0 - streamed_share(both - s.again, reference.l2_byte)
    missing[s.cold] = 1.0
    issue, grid = _streaming_grids(s, operands, missing, sms)
    unusual = map_distinct(
        SPECIAL_FUNCTIONS.__contains__, index_words(ops, attrgetter("function"))
    ).nonzero()[0]
    special = {i: name for i in unusual.tolist() if (name := special_kernel(ops[i]))}
    if (
        at := (s.kernel >= _CAT).nonzero()[0]
    ).size:  # kernels that are cut by rows, of which a workload has a few
        sizes = np.array(
            [s.n, s.rows, columns, s.form.width, issue, s.write, s.form.start_cycle, missing]
        )
        rows = zip(
            at.tolist(), s.kernel[at].tolist(), sizes.take(at, axis=1).T.tolist(), strict=True
        )
        _replace_grids(grid, {i: _row_grid(kernel, row, sms) for i, kernel, row in rows})
    own = {i: special_grid(name, ops[i], sms, float(missing[i])) for i, name in special.items()}
    _replace_grids(grid, {i: found for i, found in own.items() if found is not None})
    units, steps, slots, launches, between, sm_cycle, once = grid
    moved = both
    if (turned := (s.kernel == _TRANSPOSED).nonzero()[0]).size:
        # L2 moves most of a sector for each element; short rows of one operand find it again
        met = np.clip(0.48 + 0.11 * np.log2(np.maximum(columns[turned], 1.0) / 32.0), 0.48, 1.0)
        sector = _SECTOR_BYTE * np.where(operands[turned] < 3.0, met, 1.0)
        moved = both.copy()
        moved[turned] += (sector - s.form.width[turned]) * s.n[turned]
    rounds = units / (slots * sms)
    waves = units / sms
    work = {
        "units": units,
        "slots": slots,
        # a masked fill is made in a copy, which is a kernel of its own
        "launches": launches + s.form.filled,
        "between_byte": between + s.form.filled * 2.0 * s.form.width * s.n,
        "steps": np.where(once > 0, steps / np.maximum(rounds, 1.0), steps),
        "unit_flop": rate * sm_cycle / np.maximum(waves, 1.0),
        "l2_byte": moved,
        "shared_byte": moved + both,
        "dram_read_byte": s.read * missing,
        "dram_write_byte": s.write * missing,
    }
    plain = {
        "read_per_write": np.log2(np.maximum(s.read, 1.0) / np.maximum(s.write, 1.0)),
        "byte_per_element": both / s.n,
        "width": s.form.width,
        "out_width": s.form.out_width,
        "flop_per_element": issue,
        "sfu_per_element": s.form.start_cycle,
        "layout": s.form.layout,
        "moving": s.form.moving,
        "reducing": s.form.reducing,
        "widest": s.form.widest,
        "masked": s.form.masked,
        "cold": s.cold.astype(np.float64),
        "fill": rounds / np.maximum(np.ceil(rounds), 1.0),
        "rounds": np.log2(rounds),
        "run": np.minimum(s.run, 64.0),
    }
    logs = {"log_n": s.n, "log_read": s.read, "log_write": s.write, "log_byte": both}
    logs |= {"extent_rows": s.rows, "extent_columns": columns}
    families = CodedColumn(_KERNEL_FAMILIES, s.kernel)
    if special:
        own_names = [f"elementwise.{name}" for name in special.values()]
        families = CodedColumn.from_parts(
            [(slice(None), families), (list(special), own_names)], len(ops)
        )
    return FamilyColumns(families, work, plain, logs, {"align_n": s.n, "align_columns": columns})


def _as_measured(ops: Sequence[Elementwise], told: ConditionColumns) -> list[Elementwise]:
    """Return operators as the campaign ran them: the slice behind a cache of one batch has no
    holes.
    """
    return [
        replace(op, layout=Layout.CONTIGUOUS)
        if 0 < rows <= _ONE_BATCH and op.layout is Layout.STRIDED and appends_to_cache(op)
        else op
        for op, rows in zip(ops, told.rows.tolist(), strict=True)
    ]


_Form = tuple[str, Layout, Dtype, Dtype | None]
_form: Callable[[Elementwise], _Form] = attrgetter("function", "layout", "dtype", "out_dtype")


def _read_given(op: Elementwise) -> tuple[float, ...]:
    """Return the sizes of an operator; not a number: not given."""
    return op.n, *(nan if size is None else size for size in (op.read, op.write, op.rows, op.run))


class _FormColumns(NamedTuple):
    """What follows from function, layout and number formats, whatever the sizes; a number or an
    array ``(row,)``.
    """

    inputs: Array  # operands
    twice: Array  # operands that are read twice
    kernel: Array  # position in _KERNELS; of several, that of operands which do not lie whole
    whole: Array  # that of operands which do
    open: Array  # 1: the layout leaves it open which
    width: Array  # bytes of an element
    out_width: Array
    layout: Array
    issue: Array  # instructions for an element
    start_cycle: Array  # until a first result, beyond those of an addition
    moving: Array
    reducing: Array
    widest: Array
    masked: Array
    filled: Array
    wide: Array  # 1: elements of four bytes or more that are not cast


@cache
def _describe_form(form: _Form) -> tuple[float, ...]:
    """Return one row of ``_FormColumns``."""
    name, layout, dtype, out_dtype = form
    (issue, start_cycle), reducing = load_function_costs().get(name, _ADDITION), name in _REDUCING
    whole = _COPY if name == "copy" else _VECTOR
    is_open = layout is not Layout.CONTIGUOUS
    if name == "cast" and dtype is not Dtype.FP32:
        whole = _UNROLLED
    kernel = _INDEXED if is_open else whole
    if reducing:
        kernel = _REDUCE
        is_open = False
    elif name == "gather":
        kernel = _GATHER
        is_open = False
    elif name == "cat":  # parts without holes are copied sixteen bytes at a time
        kernel = _CAT if is_open else _VECTOR
        is_open = False
    return (
        *(find_function(name).inputs, _TWICE.get(name, 0.0), kernel, whole, is_open),
        *(dtype.byte, (out_dtype or dtype).byte, _LAYOUT[layout]),
        (_MAX_ISSUE if name == "max" else _SUM_ISSUE) if reducing else issue,
        start_cycle,
        _MOVING.index(name) + 1.0 if name in _MOVING else 0.0,
        *(
            reducing,
            name == "max",
            name in _MASKED,
            name == "masked_fill",
            dtype.byte >= 4 and name != "cast",
        ),
    )


class _Sizes(NamedTuple):
    """Arrays ``(row,)``."""

    n: Array
    read: Array  # bytes
    write: Array
    rows: Array
    run: Array
    kernel: _KernelIndex
    cold: Mask  # operands come from device memory
    again: Array  # bytes read a second time
    form: _FormColumns


def _read_sizes(ops: Sequence[Elementwise], told: ConditionColumns) -> _Sizes:
    """Return the sizes of all rows.

    ``rows`` and ``run`` are as conditions say, else as bytes say (an index or a result each), else
    as the operator says, else as usual."""
    forms = index_words(ops, _form)
    form = _FormColumns(
        *as_columns([_describe_form(form) for form in forms.values]).take(forms.place, axis=1)
    )
    turned = form.layout == _LAYOUT[Layout.TRANSPOSED]
    spread = form.layout == _LAYOUT[Layout.BROADCAST]
    width = form.width
    out_width = form.out_width
    is_open = form.open > 0
    n, read, write, rows, run = count_columns(ops, _read_given)
    read = np.where(np.isnan(read), form.inputs * width * n, read)
    write = np.where(np.isnan(write), n * out_width, write)
    run = np.where(turned & (run > 0), run, _USUAL_RUN)
    rows = np.where(rows > 0, rows, n / _USUAL_COLUMNS)
    rows = np.where(form.kernel == _REDUCE, write / out_width, rows)
    gathers = form.kernel == _GATHER
    indices = (read - n * width) / 8.0
    rows = np.where(gathers & (indices >= 1.0), indices, rows)
    rows = np.where(told.rows > 0, told.rows, rows)
    run = np.where(told.run > 0, told.run, run)
    rows = np.minimum(np.maximum(rows, 1.0), n)
    # An operand of one row lies whole, as does a turned one whose rows stay together. One that is
    # spread over all rows does only next to another as large.
    alike = (rows <= 1.0) & (~spread | (read >= 2.0 * n * width))
    whole = is_open & (alike | (turned & (rows <= run)))
    kernel = np.where(whole, form.whole, form.kernel).astype(np.intp)
    kernel[is_open & turned & (run <= 1.0) & ~whole] = _TRANSPOSED
    kernel[gathers & (rows <= _FEW_ROWS)] = _FEW
    # made cold on purpose, or a cache
    appends = map_distinct("cat".__eq__, index_words(ops, attrgetter("function")))
    appends[appends] = [appends_to_cache(ops[i]) for i in np.flatnonzero(appends).tolist()]
    cold = told.cold | appends & ~told.warm
    again = np.minimum(form.twice * width * n, read / 2.0)
    return _Sizes(n, read, write, rows, run, kernel, cold, again, form)


def _streaming_grids(
    s: _Sizes, operands: Array, missing: Array, sm_count: float
) -> tuple[Array, Array]:
    """Return instructions for an element, and grids ``(column, row)`` of kernels that stream
    through all elements.
    """
    narrow, wide, own, on_top, each = _BY_KERNEL.take(s.kernel, axis=1)
    issue = own * s.form.issue + on_top + each * operands
    grid = np.repeat(_STREAMING_GRID, len(s.n), axis=1)
    units = np.ceil(s.n / np.where(s.form.wide > 0, wide, narrow), out=grid[0])
    np.add(s.form.start_cycle / _START_STEP + 1.0, missing, out=grid[1])
    work = np.maximum(s.n * issue / ISSUE_PER_CYCLE, s.write / _STORE_BYTE_PER_CYCLE)
    np.divide(work, np.minimum(units, sm_count), out=grid[_SM_CYCLE])
    return issue, grid


_STREAMING_GRID = np.array(LaunchGrid(0.0, 0.0, _MOST_BLOCKS, once=True), dtype=np.float64)[
    :, np.newaxis
]
_SM_CYCLE = LaunchGrid._fields.index("sm_cycle")


def _replace_grids(grid: Array, grids: Mapping[int, LaunchGrid]) -> None:
    """Put in the grids of rows that have one of their own; cycles that it does not say stay as they
    are.
    """
    if grids:
        table = as_columns(list(grids.values()))
        rows = list(grids)
        table[_SM_CYCLE] = np.where(table[_SM_CYCLE] > 0, table[_SM_CYCLE], grid[_SM_CYCLE, rows])
        grid[:, rows] = table


def _row_grid(kernel: int, sizes: Sequence[float], sm_count: float) -> LaunchGrid:
    """Return the grid of a reduction, a gather of many rows or of few, or a concatenation."""
    n, rows, columns, width, issue, write, start_cycle, missing = sizes
    start = start_cycle / _START_STEP
    once = 1.0 + missing
    issued = n * issue / ISSUE_PER_CYCLE
    stored = write / _STORE_BYTE_PER_CYCLE

    def cycle(units: float) -> float:
        return max(issued, stored) / min(units, sm_count)

    if kernel == _REDUCE:
        units, loads, parts = _reduction_blocks(rows, columns, width, sm_count)
        block_cycle = max(units / sm_count, 1.0) * _REDUCE_BLOCK_CYCLE
        busy_cycle = issued / min(units, sm_count) + block_cycle
        last = float(
            parts > 1
        )  # block of a row adds up the sums of all, by a counter that a kernel clears
        steps = (2.0 + loads + start) * once + 2.0 * last
        return LaunchGrid(
            units, steps, SM_THREADS / 512.0, launches=1.0 + last, sm_cycle=busy_cycle
        )
    if kernel == _GATHER:
        chunks = ceil(columns * width / 16.0)  # 16-byte pieces of a gathered row
        units = rows * ceil(chunks / 256.0)
        slots = min(SM_THREADS // min(ceil(chunks / 32.0) * 32.0, 256.0), _MOST_BLOCKS)
        least = max(units / sm_count, 1.0) * BLOCK_CYCLE
        return LaunchGrid(units, start + once, slots, sm_cycle=max(cycle(units), least), once=True)
    if kernel == _FEW:
        units = ceil(columns / 128.0)
        return LaunchGrid(
            units, rows + start + once, _MOST_BLOCKS, sm_cycle=cycle(units), once=True
        )
    steps = max(n / (_CAT_BLOCKS * _CAT_THREADS), 1.0) + start + missing
    return LaunchGrid(
        _CAT_BLOCKS, steps, SM_THREADS / _CAT_THREADS, sm_cycle=cycle(_CAT_BLOCKS), once=True
    )


def _reduction_blocks(
    rows: float, columns: float, width: float, sm_count: float
) -> tuple[float, float, int]:
    """Return blocks, loads a thread makes one after another, and blocks of a row, of PyTorch's
    reduction over rows.

    A block is 512 threads, 32 along the row where there are 16 rows or more; a row that leaves a
    thread 256 values, or 16 for each row of the block, has a block of its own. Few rows that leave
    a thread of such a block 256 values are cut among as many blocks as the SMs hold, down to 16
    values a thread."""
    along = power_of_two(columns / (16.0 / width if columns >= 128 else 1.0), 512.0)
    high = min(power_of_two(rows, 512.0), 512.0 / min(along, 32.0))
    values = columns / min(along, 512.0 / high)
    if values >= 16.0 * high or values >= 256.0:
        values = values / high
        held = sm_count * SM_THREADS / 512.0
        parts = 1
        if values >= 256.0 and rows <= held:
            parts = max(min(ceil(held / rows), ceil(values / 16.0)), ceil(values / 256.0))
        return rows * parts, ceil(values / parts / 4.0), parts
    return ceil(rows / high), ceil(values / 4.0), 1


register_kernels(Elementwise, mapping=KernelMapping(elementwise_work))
