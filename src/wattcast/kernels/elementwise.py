"""Elementwise operators, copies, gathers and reductions -> columns of work, as PyTorch launches them.

Which kernel runs follows from how the operands lie: whole vectors where everything is contiguous; one element at a
time with its address computed ("indexed") where an operand is strided, broadcast or turned; tables of their own for
concatenation, gathering and reducing. Blocks and threads of each are PyTorch's own (checked against the grids in the
H200 database). Work that fits L2 stays there from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, log2
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.kernels.elementwise_forms import CAT, FEW, GATHER, KINDS, REDUCE, TRANSPOSED, Forms, Kinds, forms_of
from wattcast.kernels.function_cost import ISSUE_PER_CYCLE, STORE_BYTE_PER_CYCLE
from wattcast.kernels.grid import BLOCK_CYCLE, Grid
from wattcast.kernels.grids import grid_of, joins_cache, special
from wattcast.kernels.work import Part, Reference, Told, columns_of, kept
from wattcast.workload.graph import Elementwise, Layout

_THREADS = 2048.0  # of an SM
_MOST_BLOCKS = 16.0  # of an SM in flight: the chip starts small blocks no faster
_REDUCE_BLOCK_CYCLE = 900.0  # of an SM for a block of a reduction, beside its elements
_START_STEP = 400.0  # cycles of a function's start that count as a step
_CAT_BLOCKS, _CAT_THREADS = 528.0, 512.0
_ONE_BATCH = 64  # rows of a cache measured as of one batch: what is new lies together, however it was sliced
_FEW_ROWS = 16.0  # up to here a gather loops over its rows
_USUAL_RUN, _USUAL_COLUMNS = 64.0, 4096.0  # of a turned operand (a head), and of a row, where nothing else is said
_SECTOR_BYTE = 30.0  # that L2 moves for each element of a transposing walk: most of a sector, from profiler counters
# Of each kind that is a thread for so many elements: elements of a block, and of one whose elements are wide and not
# cast; whether the function counts among the instructions of an element, those beside it, and those of each operand's
# address. Of the others, what they issue.
_BY_KIND = np.array(
    [
        [1024.0, 1024.0, 1.0, 0.0, 0.0],
        [512.0, 512.0, 0.0, 55.0, 0.0],  # a cast loads single elements
        [1024.0, 1024.0, 1.0, 0.0, 0.0],
        [512.0, 256.0, 1.0, 65.0, 7.5],
        [512.0, 256.0, 1.0, 65.0, 7.5],
        [1024.0, 1024.0, 1.0, 65.0, 7.5],
        [1024.0, 1024.0, 1.0, 0.0, 0.0],
        [1024.0, 1024.0, 1.0, 0.0, 0.0],
        [1024.0, 1024.0, 1.0, 0.0, 0.0],
    ]
).T.copy()
_GROUPS = tuple(f"elementwise.{kind}" for kind in KINDS)


def elementwise(ops: Sequence[Elementwise], told: Told, rate: Array, reference: Reference) -> Part:
    """Groups, work columns and features of elementwise operators and plain data movement."""
    ops = ops if told.usual else _as_they_lie(ops, told)
    of = forms_of(ops)
    s = _sizes(ops, of, told)
    n, read, write, width, rows, kind = s.n, s.read, s.write, s.width, s.rows, s.kind
    columns, both, sms = n / rows, read + write, reference.sm_count
    operands = both / (n * width)
    share = 1.0 - kept(both - s.again, reference.l2_byte)
    if s.cold.any():
        share[s.cold] = 1.0
    issue, launch = _launch(s, operands, share, sms)
    named = {i: name for i in of.special if (name := special(ops[i]))}
    _own_grids(launch, _by_rows(s, columns, issue, share, sms))
    _own_grids(launch, _by_name(named, ops, share, sms))
    units, steps, slots, launches, between, sm_cycle, once = launch
    moved = both
    if (turned := (kind == TRANSPOSED).nonzero()[0]).size:
        moved = both.copy()
        sector = _sector_byte(columns[turned], operands[turned])
        moved[turned] += (sector - width[turned]) * n[turned]
    rounds, waves = units / (slots * sms), units / sms
    work = {
        "units": units,
        "slots": slots,
        # a masked fill is made in a copy, which is a kernel of its own
        "launches": launches + s.filled,
        "between_byte": between + s.filled * 2.0 * width * n,
        "steps": np.where(once > 0, steps / np.maximum(rounds, 1.0), steps),
        "unit_flop": rate * sm_cycle / np.maximum(waves, 1.0),
        "l2_byte": moved,
        "shared_byte": moved + both,
        "dram_read_byte": read * share,
        "dram_write_byte": write * share,
    }
    plain = {
        "read_per_write": np.log2(np.maximum(read, 1.0) / np.maximum(write, 1.0)),
        "byte_per_element": both / n,
        "width": width,
        "out_width": s.out_width,
        "flop_per_element": issue,
        "sfu_per_element": s.start_cycle,
        "layout": s.layout,
        "moving": s.moving,
        "reducing": s.reducing,
        "widest": s.widest,
        "masked": s.masked,
        "cold": s.cold.astype(np.float64),
        "fill": rounds / np.maximum(np.ceil(rounds), 1.0),
        "rounds": np.log2(rounds),
        "run": np.minimum(s.run, 64.0),
    }
    logs = {"log_n": n, "log_read": read, "log_write": write, "log_byte": both}
    logs |= {"extent_rows": rows, "extent_columns": columns}
    groups = [_GROUPS[k] for k in kind.tolist()]
    for i, name in named.items():
        groups[i] = f"elementwise.{name}"
    return Part(groups, work, plain, logs, {"align_n": n, "align_columns": columns})


class _Sizes(NamedTuple):
    """Arrays ``(row,)``."""

    n: Array
    read: Array  # bytes
    write: Array
    rows: Array
    run: Array
    kind: Kinds  # position in KINDS
    cold: npt.NDArray[np.bool_]  # operands come from device memory
    again: Array  # bytes read a second time
    width: Array  # bytes of an element
    out_width: Array
    layout: Array
    issue: Array  # instructions an element
    start_cycle: Array  # until a first result, beyond those of an addition
    moving: Array
    reducing: Array
    widest: Array
    masked: Array
    filled: Array
    wide: Array  # 1: elements of four bytes or more that are not cast


_given: Callable[[Elementwise], tuple[int | None, ...]] = attrgetter("n", "read", "write", "rows", "run")


def _sizes(ops: Sequence[Elementwise], of: Forms, told: Told) -> _Sizes:
    """Sizes of all rows; ``rows`` and ``run`` as conditions say, as bytes say (an index or a result each), as the
    operator says, or as usual."""
    width, out_width = of.columns[0], of.columns[1]
    # not a number: not given
    n, read, write, rows, run = np.array([_given(op) for op in ops], dtype=np.float64).T.copy()
    read = np.where(np.isnan(read), of.inputs * n, read)
    write = np.where(np.isnan(write), n * out_width, write)
    run = np.where(of.turned & (run > 0), run, _USUAL_RUN)
    rows = np.where(rows > 0, rows, n / _USUAL_COLUMNS)
    if of.reduces.size:
        rows[of.reduces] = (write / out_width)[of.reduces]
    if of.gathers.size:
        indices = (read - n * width)[of.gathers] / 8.0
        rows[of.gathers] = np.where(indices >= 1.0, indices, rows[of.gathers])
    if not told.usual:
        rows, run = np.where(told.rows > 0, told.rows, rows), np.where(told.run > 0, told.run, run)
    rows = np.minimum(np.maximum(rows, 1.0), n)
    # an operand of one row lies whole, as does a turned one that stays together; one that is spread over all rows
    # does only beside another as large
    alike = (rows <= 1.0) & (~of.spread | (read >= 2.0 * n * width))
    whole = of.open & (alike | (of.turned & (rows <= run)))
    kind = np.where(whole, of.whole, of.kind)
    kind[of.open & of.turned & (run <= 1.0) & ~whole] = TRANSPOSED
    if of.gathers.size:
        kind[of.gathers[rows[of.gathers] <= _FEW_ROWS]] = FEW
    cold = told.cold
    if of.joins:  # made so on purpose, or a cache
        cold = cold.copy()
        cold[[i for i in of.joins if joins_cache(ops[i]) and not told.warm[i]]] = True
    return _Sizes(n, read, write, rows, run, kind, cold, np.minimum(of.twice * n, read / 2.0), *of.columns)


def _sector_byte(columns: Array, operands: Array) -> Array:
    """Bytes that L2 moves for each element of a transposing walk: short rows of one operand meet a sector again."""
    met = np.clip(0.48 + 0.11 * np.log2(np.maximum(columns, 1.0) / 32.0), 0.48, 1.0)
    return _SECTOR_BYTE * np.where(operands < 3.0, met, 1.0)


def _as_they_lie(ops: Sequence[Elementwise], told: Told) -> list[Elementwise]:
    """Operators as the campaign ran them: the slice behind a cache of one batch has no holes."""
    return [
        replace(op, layout=Layout.CONTIGUOUS)
        if 0 < rows <= _ONE_BATCH and op.layout is Layout.STRIDED and joins_cache(op)
        else op
        for op, rows in zip(ops, told.rows.tolist(), strict=True)
    ]


def _launch(s: _Sizes, operands: Array, share: Array, sm_count: float) -> tuple[Array, Array]:
    """Instructions an element, and grids ``(column, row)`` of kernels that are a thread for so many elements.

    The busiest SM takes as long as it issues or stores; a first result waits for its function, and for device memory.
    """
    narrow, wide, own, beside, each = _BY_KIND.take(s.kind, axis=1)
    issue = own * s.issue + beside + each * operands
    launch = np.repeat(_USUAL_GRID, len(s.n), axis=1)
    units = np.ceil(s.n / np.where(s.wide > 0, wide, narrow), out=launch[0])
    np.add(s.start_cycle / _START_STEP + 1.0, share, out=launch[1])
    work = np.maximum(s.n * issue / ISSUE_PER_CYCLE, s.write / STORE_BYTE_PER_CYCLE)
    np.divide(work, np.minimum(units, sm_count), out=launch[_SM_CYCLE])
    return issue, launch


_USUAL_GRID = np.array(Grid(0.0, 0.0, _MOST_BLOCKS, once=True), dtype=np.float64)[:, np.newaxis]
_SM_CYCLE = Grid._fields.index("sm_cycle")


def _own_grids(launch: Array, grids: Mapping[int, Grid]) -> None:
    """Put in the grids of rows that have one of their own; cycles that it does not say stay as they are."""
    if grids:
        table, rows = columns_of(list(grids.values())), list(grids)
        table[_SM_CYCLE] = np.where(table[_SM_CYCLE] > 0, table[_SM_CYCLE], launch[_SM_CYCLE, rows])
        launch[:, rows] = table


def _by_name(named: Mapping[int, str], ops: Sequence[Elementwise], share: Array, sm_count: float) -> dict[int, Grid]:
    """Grids of kinds that have one of their own."""
    found = {i: grid_of(name, ops[i], sm_count, float(share[i])) for i, name in named.items()}
    return {i: grid for i, grid in found.items() if grid is not None}


def _by_rows(s: _Sizes, columns: Array, issue: Array, share: Array, sm_count: float) -> dict[int, Grid]:
    """Grids of kernels that are cut by rows, of which a workload has a few."""
    at = (s.kind >= CAT).nonzero()[0]
    if not at.size:
        return {}
    table = np.array([s.n, s.rows, columns, s.width, issue, s.write, s.start_cycle, share]).take(at, axis=1)
    rows = zip(at.tolist(), s.kind[at].tolist(), table.T.tolist(), strict=True)
    return {i: _cut(kind, sizes, sm_count) for i, kind, sizes in rows}


def _cut(kind: int, sizes: Sequence[float], sm_count: float) -> Grid:
    """One of them: a reduction, a gather of many rows or of few, a concatenation."""
    n, rows, columns, width, issue, write, start_cycle, missing = sizes
    start, once = start_cycle / _START_STEP, 1.0 + missing
    issued, stored = n * issue / ISSUE_PER_CYCLE, write / STORE_BYTE_PER_CYCLE

    def cycle(units: float) -> float:
        return max(issued, stored) / min(units, sm_count)

    if kind == REDUCE:
        units, loads = _reduction(rows, columns, width)
        block_cycle = max(units / sm_count, 1.0) * _REDUCE_BLOCK_CYCLE
        steps = (2.0 + loads + start) * once
        return Grid(units, steps, _THREADS / 512.0, sm_cycle=issued / min(units, sm_count) + block_cycle)
    if kind == GATHER:
        chunks = ceil(columns * width / 16.0)  # 16-byte pieces of a gathered row
        units = rows * ceil(chunks / 256.0)
        slots = min(_THREADS // min(ceil(chunks / 32.0) * 32.0, 256.0), _MOST_BLOCKS)
        least = max(units / sm_count, 1.0) * BLOCK_CYCLE
        return Grid(units, start + once, slots, sm_cycle=max(cycle(units), least), once=True)
    if kind == FEW:
        units = ceil(columns / 128.0)
        return Grid(units, rows + start + once, _MOST_BLOCKS, sm_cycle=cycle(units), once=True)
    steps = max(n / (_CAT_BLOCKS * _CAT_THREADS), 1.0) + start + missing
    return Grid(_CAT_BLOCKS, steps, _THREADS / _CAT_THREADS, sm_cycle=cycle(_CAT_BLOCKS), once=True)


def _reduction(rows: float, columns: float, width: float) -> tuple[float, float]:
    """Blocks, and loads each thread makes one after another, of PyTorch's reduction over the last dimension.

    A block is 512 threads, 32 along the row where there are 16 rows or more; a row that leaves a thread 256 values,
    or 16 for each row of the block, has a block of its own.
    """
    along = _power(columns / (16.0 / width if columns >= 128 else 1.0))
    high = min(_power(rows), 512.0 / min(along, 32.0))
    values = columns / min(along, 512.0 / high)
    if values >= 16.0 * high or values >= 256.0:
        return rows, ceil(values / high / 4.0)
    return ceil(rows / high), ceil(values / 4.0)


def _power(size: float) -> float:
    """The largest power of two within a size, up to 512."""
    return float(2.0 ** floor(log2(min(max(size, 1.0), 512.0))))
