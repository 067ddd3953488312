"""Elementwise operators, copies, gathers and reductions -> columns of work, as PyTorch launches them.

Which kernel runs follows from how the operands lie: whole vectors where everything is contiguous; one element at a
time with its address computed ("indexed") where an operand is strided, broadcast or turned; tables of their own for
concatenation, gathering and reducing. Blocks and threads of each are PyTorch's own (checked against the grids in the
H200 database). Work that fits L2 stays there from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.function_cost import ISSUE_PER_CYCLE, STORE_BYTE_PER_CYCLE, cost_of
from wattcast.kernels.grid import BLOCK_CYCLE
from wattcast.kernels.grids import grid_of, joins_cache, special
from wattcast.kernels.work import Columns, Condition, Reference, alignment, fill, kept, log2
from wattcast.workload.graph import Elementwise, Layout

_VECTOR_BLOCK, _CAST_BLOCK = 1024.0, 512.0  # elements of a block of 128 threads
_THREADS = 2048.0  # of an SM
_MOST_BLOCKS = 16.0  # of an SM in flight: the chip starts small blocks no faster
# Instructions of an address, of each operand's, of a cast that loads single elements
_INDEX_ISSUE, _OPERAND_ISSUE, _CAST_ISSUE = 65.0, 7.5, 55.0
_SUM_ISSUE, _MAX_ISSUE = 8.0, 24.0  # of an element of a reduction: a maximum looks for NaN
_REDUCE_BLOCK_CYCLE = 900.0  # of an SM for a block of a reduction, beside its elements
_START_STEP = 400.0  # cycles of a function's start that count as a step
_CAT_BLOCKS, _CAT_THREADS = 528.0, 512.0
_ONE_BATCH = 64  # rows of a cache measured as of one batch: what is new lies together, however it was sliced
_FEW_ROWS = 16.0  # up to here a gather loops over its rows
_USUAL_RUN, _USUAL_COLUMNS = 64.0, 4096.0  # of a turned operand (a head), and of a row, where nothing else is said
_SECTOR_BYTE = 30.0  # that L2 moves for each element of a transposing walk: most of a sector, from profiler counters
_LAYOUT = {layout: float(i) for i, layout in enumerate(Layout)}
_REDUCING = ("sum", "mean", "max", "topk", "pool", "cumsum")
_MOVING = ("gather", "cat", "copy", "cast", "scatter_add")
_KINDS = ("vector", "unrolled", "copy", "indexed", "transposed", "cat", "gather", "gather.few", "reduce")
_VECTOR, _UNROLLED, _COPY, _INDEXED, _TRANSPOSED, _CAT, _GATHER, _FEW, _REDUCE = range(len(_KINDS))
_MASKED = ("masked_fill", "where")
_TWICE = {"batchnorm_train": 1.0, "batchnorm_grad": 2.0}  # operands that are read a second time


def elementwise(
    ops: Sequence[Elementwise], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of elementwise operators and plain data movement."""
    ops = [_as_it_lies(op, c) for op, c in zip(ops, conditions, strict=True)]
    s = _Sizes(*np.array([_row(op, c) for op, c in zip(ops, conditions, strict=True)], dtype=np.float64).T)
    n, read, write, width, rows, kind = s.n, s.read, s.write, s.width, s.rows, s.kind.astype(np.intp)
    columns, both, sms = n / rows, read + write, reference.sm_count
    share = np.where(s.cold > 0, 1.0, 1.0 - kept(both - s.again, reference.l2_byte))
    launch = _launch(kind, n, rows, columns, width, s.cast > 0)
    issue = _issue(kind, s, both / (n * width))
    launch["sm_cycle"] = _sm_cycles(kind, n, write, issue, launch["units"], sms)
    launch["steps"] += s.start_cycle / _START_STEP
    launch["steps"] += share * np.where(kind == _REDUCE, launch["steps"], 1.0)
    launch["once"] = (kind != _REDUCE).astype(float)
    named = [special(op) for op in ops]
    _own_grids(launch, named, ops, sms, share)
    moved = both + np.where(kind == _TRANSPOSED, (_sector_byte(columns, both / (n * width)) - width) * n, 0.0)
    held = launch["slots"] * sms
    rounds = launch["units"] / held
    work = {
        "units": launch["units"],
        "slots": launch["slots"],
        # a masked fill is made in a copy, which is a kernel of its own
        "launches": launch["launches"] + s.filled,
        "between_byte": launch["between_byte"] + s.filled * 2.0 * width * n,
        "steps": np.where(launch["once"] > 0, launch["steps"] / np.maximum(rounds, 1.0), launch["steps"]),
        "unit_flop": rate * launch["sm_cycle"] / np.maximum(launch["units"] / sms, 1.0),
        "l2_byte": moved,
        "shared_byte": moved + both,
        "dram_read_byte": read * share,
        "dram_write_byte": write * share,
    }
    features = {
        "log_n": log2(n),
        "log_read": log2(read),
        "log_write": log2(write),
        "log_byte": log2(both),
        "read_per_write": np.log2(np.maximum(read, 1.0) / np.maximum(write, 1.0)),
        "byte_per_element": both / n,
        "width": width,
        "out_width": s.out_width,
        "flop_per_element": issue,
        "sfu_per_element": s.start_cycle,
        "layout": s.layout,
        "align_n": alignment(n),
        "moving": s.moving,
        "reducing": s.reducing,
        "widest": s.widest,
        "masked": s.masked,
        "cold": s.cold,
        "fill": fill(launch["units"], held),
        "rounds": np.log2(rounds),
        "extent_rows": log2(rows),
        "extent_columns": log2(columns),
        "align_columns": alignment(columns),
        "run": np.minimum(s.run, 64.0),
    }
    return [f"elementwise.{own or _KINDS[k]}" for own, k in zip(named, kind.tolist(), strict=True)], work, features


@dataclass(frozen=True)
class _Sizes:
    """Arrays ``(row,)``, as :func:`_row` has them."""

    n: Array
    read: Array  # bytes
    write: Array
    width: Array  # bytes of an element
    out_width: Array
    rows: Array
    run: Array
    kind: Array  # position in _KINDS
    cold: Array  # 1: operands come from device memory
    layout: Array
    again: Array  # bytes read a second time
    issue: Array  # instructions an element
    start_cycle: Array  # until a first result, beyond those of an addition
    moving: Array
    reducing: Array
    widest: Array
    masked: Array
    filled: Array
    cast: Array


def _row(op: Elementwise, condition: Condition) -> tuple[float, ...]:
    """What the columns need to know of one operator."""
    name, n, width = op.function, float(op.n), float(op.dtype.byte)
    read, write = op.read_byte, op.write_byte
    out_width = width if op.out_dtype is None else float(op.out_dtype.byte)
    rows = min(max(_rows(op, condition, read, write / out_width), 1.0), n)
    run = _run(op, condition)
    twice, *rest = _of_function(name)
    return (
        n,
        read,
        write,
        width,
        out_width,
        rows,
        run,
        _kind(op, rows, run, read),
        _cold(op, condition),
        _LAYOUT[op.layout],
        min(twice * n * width, read / 2.0),
        *rest,
    )


@cache
def _of_function(name: str) -> tuple[float, ...]:
    """What follows from the function alone: operands read twice, and the columns from ``issue`` to ``cast``."""
    cost = cost_of(name)
    return (
        _TWICE.get(name, 0.0),
        cost.issue,
        cost.start_cycle,
        _MOVING.index(name) + 1.0 if name in _MOVING else 0.0,
        name in _REDUCING,
        name == "max",
        name in _MASKED,
        name == "masked_fill",
        name == "cast",
    )


def _cold(op: Elementwise, condition: Condition) -> bool:
    """Whether operands come from device memory: made so on purpose, or a cache."""
    return condition.rotated == "all" or (condition.rotated != "none" and joins_cache(op))


def _sector_byte(columns: Array, operands: Array) -> Array:
    """Bytes that L2 moves for each element of a transposing walk: short rows of one operand meet a sector again."""
    met = np.clip(0.48 + 0.11 * np.log2(np.maximum(columns, 1.0) / 32.0), 0.48, 1.0)
    return _SECTOR_BYTE * np.where(operands < 3.0, met, 1.0)


def _as_it_lies(op: Elementwise, condition: Condition) -> Elementwise:
    """The operator as the campaign ran it: the slice behind a cache of one batch has no holes."""
    whole = condition.rows and condition.rows <= _ONE_BATCH and op.layout is Layout.STRIDED and joins_cache(op)
    return replace(op, layout=Layout.CONTIGUOUS) if whole else op


def _issue(kind: npt.NDArray[np.intp], s: _Sizes, operands: Array) -> Array:
    """Instructions an element."""
    addressed = (kind >= _INDEXED) & (kind <= _CAT)
    found = np.where(addressed, s.issue + _INDEX_ISSUE + _OPERAND_ISSUE * operands, s.issue)
    found = np.where(kind == _UNROLLED, _CAST_ISSUE, found)
    return np.where(kind == _REDUCE, np.where(s.widest > 0, _MAX_ISSUE, _SUM_ISSUE), found)


def _sm_cycles(
    kind: npt.NDArray[np.intp], n: Array, write: Array, issue: Array, units: Array, sm_count: float
) -> Array:
    """Cycles of the busiest SM: to issue, to store, or to take a block after another."""
    spread = np.minimum(units, sm_count)
    issued, stored = n * issue / ISSUE_PER_CYCLE / spread, write / STORE_BYTE_PER_CYCLE / spread
    blocks = np.maximum(units / sm_count, 1.0)
    found = np.where(kind == _REDUCE, issued + blocks * _REDUCE_BLOCK_CYCLE, np.maximum(issued, stored))
    return np.where(kind == _GATHER, np.maximum(found, blocks * BLOCK_CYCLE), found)


def _own_grids(
    launch: Columns, named: Sequence[str], ops: Sequence[Elementwise], sm_count: float, missing: Array
) -> None:
    """Put in the grids of kinds that have one of their own."""
    for i, (name, op) in enumerate(zip(named, ops, strict=True)):
        grid = grid_of(name, op, sm_count, float(missing[i])) if name else None
        if grid is not None:
            for column in _GRID:
                launch[column][i] = getattr(grid, column)
            if grid.sm_cycle:
                launch["sm_cycle"][i] = grid.sm_cycle


_GRID = ("units", "steps", "slots", "launches", "between_byte", "once")


def _rows(op: Elementwise, condition: Condition, read: float, results: float) -> float:
    """Rows of the operand: as said, as the bytes say (an index or a result each), or as usual."""
    if condition.rows:
        return float(condition.rows)
    if op.function in _REDUCING:
        return results
    if op.function == "gather" and (indices := (read - op.n * op.dtype.byte) / 8.0) >= 1.0:
        return indices
    return float(op.rows) if op.rows else op.n / _USUAL_COLUMNS


def _run(op: Elementwise, condition: Condition) -> float:
    """Elements of a turned operand that stay together."""
    turned = op.layout is Layout.TRANSPOSED and op.run
    return float(condition.run or turned or _USUAL_RUN)


def _kind(op: Elementwise, rows: float, run: float, read: float) -> int:
    """The kernel PyTorch has for it."""
    if op.function in _REDUCING:
        return _REDUCE
    if op.function == "gather":
        return _GATHER if rows > _FEW_ROWS else _FEW
    if op.function == "cat":  # parts without holes are copied sixteen bytes at a time
        return _VECTOR if op.layout is Layout.CONTIGUOUS else _CAT
    alike = rows <= 1 and (op.layout is not Layout.BROADCAST or read >= 2 * op.n * op.dtype.byte)
    turned = op.layout is Layout.TRANSPOSED
    whole = op.layout is Layout.CONTIGUOUS or alike or (turned and rows <= run)
    if whole and op.function == "copy":
        return _COPY
    if whole:
        return _UNROLLED if op.function == "cast" and op.dtype is not Dtype.FP32 else _VECTOR
    return _TRANSPOSED if turned and run <= 1 else _INDEXED


def _launch(
    kind: npt.NDArray[np.intp], n: Array, rows: Array, columns: Array, width: Array, cast: npt.NDArray[np.bool_]
) -> Columns:
    """Blocks, dependent steps of one, and blocks an SM holds at a time: those of the usual kind, then of the rest."""
    units = np.ceil(n / np.where(kind == _UNROLLED, _CAST_BLOCK, _VECTOR_BLOCK))
    threads, steps = np.full(len(n), 128.0), np.ones(len(n))
    at = np.flatnonzero((kind == _INDEXED) | (kind == _TRANSPOSED))
    if at.size:
        per_thread = np.where((width[at] >= 4) & ~cast[at], 2.0, 4.0)
        units[at] = np.ceil(n[at] / (128.0 * per_thread))
    at = np.flatnonzero(kind == _REDUCE)
    if at.size:
        units[at], loads = _reduction(rows[at], columns[at], width[at])
        threads[at], steps[at] = 512.0, 2.0 + loads
    at = np.flatnonzero(kind == _GATHER)
    if at.size:
        chunks = np.ceil(columns[at] * width[at] / 16.0)  # 16-byte pieces of a gathered row
        units[at] = rows[at] * np.ceil(chunks / 256.0)
        threads[at] = np.clip(np.ceil(chunks / 32.0) * 32.0, 32.0, 256.0)
    at = np.flatnonzero(kind == _FEW)
    if at.size:
        units[at], steps[at] = np.ceil(columns[at] / 128.0), 1.0 + rows[at]
    at = np.flatnonzero(kind == _CAT)
    if at.size:
        units[at], threads[at] = _CAT_BLOCKS, _CAT_THREADS
        steps[at] = np.maximum(n[at] / (_CAT_BLOCKS * _CAT_THREADS), 1.0)
    slots = np.minimum(np.floor(_THREADS / threads), _MOST_BLOCKS)
    return {
        "units": units,
        "steps": steps,
        "slots": slots,
        "launches": np.ones(len(n)),
        "between_byte": np.zeros(len(n)),
    }


def _reduction(rows: Array, columns: Array, width: Array) -> tuple[Array, Array]:
    """Blocks, and loads each thread makes one after another, of PyTorch's reduction over the last dimension.

    A block is 512 threads, 32 along the row where there are 16 rows or more; a row that leaves a thread 256 values,
    or 16 for each row of the block, has a block of its own.
    """
    vector = np.where(columns >= 128, 16.0 / width, 1.0)
    along = _power(columns / vector)
    high = np.minimum(_power(rows), 512.0 / np.minimum(along, 32.0))
    wide = np.minimum(along, 512.0 / high)
    values = columns / wide
    whole = (values >= 16.0 * high) | (values >= 256.0)
    blocks = np.where(whole, rows, np.ceil(rows / high))
    return blocks, np.ceil(values / np.where(whole, high, 1.0) / 4.0)


def _power(size: Array) -> Array:
    """The largest power of two within a size, up to 512."""
    return np.asarray(2.0 ** np.floor(np.log2(np.clip(size, 1.0, 512.0))))
