"""Elementwise operators, copies, gathers and reductions -> columns of work, as PyTorch launches them.

Which kernel runs follows from how the operands lie: whole vectors where everything is contiguous; one element at a
time with its address computed ("indexed") where an operand is strided, broadcast or turned; tables of their own for
concatenation, gathering and reducing. Blocks and threads of each are PyTorch's own (checked against the grids in the
H200 database). Work that fits L2 stays there from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
Names = npt.NDArray[np.str_]


def elementwise(
    ops: Sequence[Elementwise], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of elementwise operators and plain data movement."""
    ops = [_as_it_lies(op, c) for op, c in zip(ops, conditions, strict=True)]
    n = np.array([float(op.n) for op in ops])
    read, write = np.array([op.read_byte for op in ops]), np.array([op.write_byte for op in ops])
    width = np.array([float(op.dtype.byte) for op in ops])
    rows = np.clip([_rows(op, c) for op, c in zip(ops, conditions, strict=True)], 1.0, n)
    columns = n / rows
    run = np.array([_run(op, c) for op, c in zip(ops, conditions, strict=True)])
    kind = np.array([_kind(op, r, r_) for op, r, r_ in zip(ops, rows, run, strict=True)])
    cold = np.array([float(_cold(op, c)) for op, c in zip(ops, conditions, strict=True)])
    share = np.where(cold > 0, 1.0, 1.0 - kept(read + write - _again(ops), reference.l2_byte))
    launch = _launch(kind, n, rows, columns, width, np.array([op.dtype is not Dtype.FP32 for op in ops]), ops)
    cost = [cost_of(op.function) for op in ops]
    issue = _issue(kind, ops, np.array([c.issue for c in cost]), (read + write) / (n * width))
    launch["sm_cycle"] = _sm_cycles(kind, n, write, issue, launch["units"], reference.sm_count)
    launch["steps"] = launch["steps"] + np.array([c.start_cycle for c in cost]) / _START_STEP
    launch["steps"] = launch["steps"] + share * np.where(kind == "reduce", launch["steps"], 1.0)
    launch["once"] = (kind != "reduce").astype(float)
    named = [special(op) for op in ops]
    _own_grids(launch, named, ops, reference.sm_count, share)
    filled = np.array([op.function == "masked_fill" for op in ops])  # in a copy, which is a kernel of its own
    launch["launches"] = launch["launches"] + filled
    launch["between_byte"] = launch["between_byte"] + np.where(filled, 2.0 * width * n, 0.0)
    moved = read + write + np.where(kind == "transposed", (_SECTOR_BYTE - width) * n, 0.0)
    each = np.maximum(launch["units"] / reference.sm_count, 1.0)
    rounds = launch["units"] / (launch["slots"] * reference.sm_count)
    work = {
        "units": launch["units"],
        "slots": launch["slots"],
        "launches": launch["launches"],
        "between_byte": launch["between_byte"],
        "steps": np.where(launch["once"] > 0, launch["steps"] / np.maximum(rounds, 1.0), launch["steps"]),
        "unit_flop": rate * launch["sm_cycle"] / each,
        "l2_byte": moved,
        "shared_byte": moved + read + write,
        "dram_read_byte": read * share,
        "dram_write_byte": write * share,
    }
    features = {
        "log_n": log2(n),
        "log_read": log2(read),
        "log_write": log2(write),
        "log_byte": log2(read + write),
        "read_per_write": np.log2(np.maximum(read, 1.0) / np.maximum(write, 1.0)),
        "byte_per_element": (read + write) / n,
        "width": width,
        "out_width": np.array([float((op.out_dtype or op.dtype).byte) for op in ops]),
        "flop_per_element": issue,
        "sfu_per_element": np.array([c.start_cycle for c in cost]),
        "layout": np.array([_LAYOUT[op.layout] for op in ops]),
        "align_n": alignment(n),
        "moving": np.array([float(_MOVING.index(op.function) + 1 if op.function in _MOVING else 0) for op in ops]),
        "reducing": np.array([float(op.function in _REDUCING) for op in ops]),
        "widest": np.array([float(op.function == "max") for op in ops]),
        "masked": np.array([float(op.function in ("masked_fill", "where")) for op in ops]),
        "cold": cold,
        "fill": fill(launch["units"], launch["slots"] * reference.sm_count),
        "rounds": np.log2(rounds),
        "extent_rows": log2(rows),
        "extent_columns": log2(columns),
        "align_columns": alignment(columns),
        "run": np.minimum(run, 64.0),
    }
    return [f"elementwise.{own or name}" for own, name in zip(named, kind, strict=True)], work, features


def _cold(op: Elementwise, condition: Condition) -> bool:
    """Whether operands come from device memory: made so on purpose, or a cache."""
    return condition.rotated == "all" or (condition.rotated != "none" and joins_cache(op))


def _again(ops: Sequence[Elementwise]) -> Array:
    """Bytes that an operator reads a second time."""
    twice = {"batchnorm_train": 1.0, "batchnorm_grad": 2.0}
    again = np.array([twice.get(op.function, 0.0) * op.n * op.dtype.byte for op in ops])
    return np.asarray(np.minimum(again, [op.read_byte / 2.0 for op in ops]))


def _as_it_lies(op: Elementwise, condition: Condition) -> Elementwise:
    """The operator as the campaign ran it: the slice behind a cache of one batch has no holes."""
    whole = condition.rows and condition.rows <= _ONE_BATCH and op.layout is Layout.STRIDED and joins_cache(op)
    return replace(op, layout=Layout.CONTIGUOUS) if whole else op


def _issue(kind: Names, ops: Sequence[Elementwise], issue: Array, operands: Array) -> Array:
    """Instructions an element."""
    addressed = np.isin(kind, ("indexed", "transposed", "cat"))
    found = np.where(addressed, issue + _INDEX_ISSUE + _OPERAND_ISSUE * operands, issue)
    found = np.where(kind == "unrolled", _CAST_ISSUE, found)
    widest = np.array([op.function == "max" for op in ops])
    return np.where(kind == "reduce", np.where(widest, _MAX_ISSUE, _SUM_ISSUE), found)


def _sm_cycles(kind: Names, n: Array, write: Array, issue: Array, units: Array, sm_count: float) -> Array:
    """Cycles of the busiest SM: to issue, to store, or to take a block after another."""
    spread = np.minimum(units, sm_count)
    issued, stored = n * issue / ISSUE_PER_CYCLE / spread, write / STORE_BYTE_PER_CYCLE / spread
    blocks = np.maximum(units / sm_count, 1.0)
    found = np.where(kind == "reduce", issued + blocks * _REDUCE_BLOCK_CYCLE, np.maximum(issued, stored))
    return np.where(kind == "gather", np.maximum(found, blocks * BLOCK_CYCLE), found)


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


def _rows(op: Elementwise, condition: Condition) -> float:
    """Rows of the operand: as said, as the bytes say (an index or a result each), or as usual."""
    if condition.rows:
        return float(condition.rows)
    if op.function in _REDUCING:
        return op.write_byte / (op.out_dtype or op.dtype).byte
    indices = (op.read_byte - op.n * op.dtype.byte) / 8.0
    if op.function == "gather" and indices >= 1.0:
        return indices
    return float(op.rows) if op.rows else op.n / _USUAL_COLUMNS


def _run(op: Elementwise, condition: Condition) -> float:
    """Elements of a turned operand that stay together."""
    turned = op.layout is Layout.TRANSPOSED and op.run
    return float(condition.run or turned or _USUAL_RUN)


def _kind(op: Elementwise, rows: float, run: float) -> str:
    """The kernel PyTorch has for it."""
    if op.function in _REDUCING:
        return "reduce"
    if op.function == "gather":
        return "gather" if rows > _FEW_ROWS else "gather.few"
    if op.function == "cat":  # parts without holes are copied sixteen bytes at a time
        return "vector" if op.layout is Layout.CONTIGUOUS else "cat"
    alike = rows <= 1 and (op.layout is not Layout.BROADCAST or op.read_byte >= 2 * op.n * op.dtype.byte)
    turned = op.layout is Layout.TRANSPOSED
    whole = op.layout is Layout.CONTIGUOUS or alike or (turned and rows <= run)
    if whole and op.function == "copy":
        return "copy"
    if whole:
        return "unrolled" if op.function == "cast" and op.dtype is not Dtype.FP32 else "vector"
    return "transposed" if turned and run <= 1 else "indexed"


def _launch(
    kind: Names,
    n: Array,
    rows: Array,
    columns: Array,
    width: Array,
    narrow: npt.NDArray[np.bool_],
    ops: Sequence[Elementwise],
) -> Columns:
    """Blocks, dependent steps of one, and blocks an SM holds at a time."""
    cast = np.array([op.function == "cast" for op in ops])
    per_thread = np.where((width >= 4) & ~cast, 2.0, 4.0)  # of an indexed kernel
    chunks = np.ceil(columns * width / 16.0)  # 16-byte pieces of a gathered row
    gather_threads = np.clip(np.ceil(chunks / 32.0) * 32.0, 32.0, 256.0)
    reduce_blocks, reduce_steps = _reduction(rows, columns, width)
    few = kind == "gather.few"
    units = np.select(
        [kind == "reduce", few, kind == "gather", kind == "cat", np.isin(kind, ("indexed", "transposed"))],
        [
            reduce_blocks,
            np.ceil(columns / 128.0),
            rows * np.ceil(chunks / 256.0),
            np.full(len(n), _CAT_BLOCKS),
            np.ceil(n / (128.0 * per_thread)),
        ],
        np.ceil(n / np.where(kind == "unrolled", _CAST_BLOCK, _VECTOR_BLOCK)),
    )
    threads = np.select(
        [kind == "reduce", kind == "gather", kind == "cat"],
        [np.full(len(n), 512.0), gather_threads, _CAT_THREADS],
        128.0,
    )
    steps = np.select(
        [kind == "reduce", few, kind == "cat"],
        [2.0 + reduce_steps, 1.0 + rows, np.maximum(n / (_CAT_BLOCKS * _CAT_THREADS), 1.0)],
        1.0,
    )
    slots = np.minimum(np.floor(_THREADS / threads), _MOST_BLOCKS)
    one = np.ones(len(n))
    return {"units": units, "steps": steps * one, "slots": slots, "launches": one, "between_byte": 0.0 * one}


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
