"""Elementwise operators, copies, gathers and reductions -> columns of work, as PyTorch launches them.

Which kernel runs follows from how the operands lie: whole vectors where everything is contiguous; one element at a
time with its address computed ("indexed") where an operand is strided, broadcast or turned; tables of their own for
concatenation, gathering and reducing. Blocks and threads of each are PyTorch's own (checked against the grids in the
H200 database). Work that fits L2 stays there from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.function_cost import ISSUE_PER_CYCLE, STORE_BYTE_PER_CYCLE, cost_of
from wattcast.kernels.grid import BLOCK_CYCLE
from wattcast.kernels.grids import SPECIAL, grid_of, joins_cache, special
from wattcast.kernels.work import Columns, Constants, Reference, Told, alignments, fill, kept, logs
from wattcast.workload.graph import Elementwise, Layout

_THREADS = 2048.0  # of an SM
_MOST_BLOCKS = 16.0  # of an SM in flight: the chip starts small blocks no faster
_MAX_ISSUE = 24.0  # instructions of an element of a maximum, which looks for NaN
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
# Of each kind: elements of a block, and of one whose elements are wide and not cast; blocks an SM holds; whether the
# function counts among the instructions of an element, those beside it, and those of each operand's address.
_BY_KIND = np.array(
    [
        [1024.0, 1024.0, 16.0, 1.0, 0.0, 0.0],
        [512.0, 512.0, 16.0, 0.0, 55.0, 0.0],  # a cast loads single elements
        [1024.0, 1024.0, 16.0, 1.0, 0.0, 0.0],
        [512.0, 256.0, 16.0, 1.0, 65.0, 7.5],
        [512.0, 256.0, 16.0, 1.0, 65.0, 7.5],
        [1024.0, 1024.0, 4.0, 1.0, 65.0, 7.5],
        [1024.0, 1024.0, 16.0, 1.0, 0.0, 0.0],
        [1024.0, 1024.0, 16.0, 1.0, 0.0, 0.0],
        [1024.0, 1024.0, 4.0, 0.0, 8.0, 0.0],
    ]
).T.copy()
_Kinds = npt.NDArray[np.intp]


def elementwise(
    ops: Sequence[Elementwise], told: Told, rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of elementwise operators and plain data movement."""
    ops = ops if told.usual else _as_they_lie(ops, told)
    s = _sizes(ops, told)
    n, read, write, width, rows, kind = s.n, s.read, s.write, s.width, s.rows, s.kind
    columns, both, sms = n / rows, read + write, reference.sm_count
    operands = both / (n * width)
    share = 1.0 - kept(both - s.again, reference.l2_byte)
    if s.cold.any():
        share[s.cold] = 1.0
    launch, issue = _launch(s, columns, operands)
    launch["sm_cycle"] = _sm_cycles(kind, n, write, issue, launch["units"], sms)
    launch["steps"] += s.start_cycle / _START_STEP
    launch["steps"] += share * np.where(s.reducing > 0, launch["steps"], 1.0)
    launch["once"] = 1.0 - s.reducing
    named = [special(op) if op.function in SPECIAL else "" for op in ops]
    _own_grids(launch, named, ops, sms, share)
    moved = both
    if (turned := (kind == _TRANSPOSED).nonzero()[0]).size:
        moved = both.copy()
        sector = _sector_byte(columns[turned], operands[turned])
        moved[turned] += (sector - width[turned]) * n[turned]
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
    large = {"log_n": n, "log_read": read, "log_write": write, "log_byte": both}
    ratio, filled = np.log2(np.array([np.maximum(read, 1.0) / np.maximum(write, 1.0), rounds]))
    features = (
        logs(large | {"extent_rows": rows, "extent_columns": columns})
        | alignments({"align_n": n, "align_columns": columns})
        | {
            "read_per_write": ratio,
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
            "fill": fill(launch["units"], held),
            "rounds": filled,
            "run": np.minimum(s.run, 64.0),
        }
    )
    return [f"elementwise.{own or _KINDS[k]}" for own, k in zip(named, kind.tolist(), strict=True)], work, features


@dataclass(frozen=True)
class _Sizes:
    """Arrays ``(row,)``."""

    n: Array
    read: Array  # bytes
    write: Array
    rows: Array
    run: Array
    kind: _Kinds  # position in _KINDS
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


_Form = tuple[str, Layout, Dtype, Dtype | None]
_form: Callable[[Elementwise], _Form] = attrgetter("function", "layout", "dtype", "out_dtype")


def _of_form(form: _Form) -> tuple[float, ...]:
    """What follows from the form alone: operands read twice, the kernel (of several, that of operands which do not
    lie whole), that of operands which do, whether a layout leaves it open; then columns of sizes, from ``width``."""
    name, layout, dtype, out_dtype = form
    cost = cost_of(name)
    whole, open_ = _COPY if name == "copy" else _VECTOR, layout is not Layout.CONTIGUOUS
    if name == "cast" and dtype is not Dtype.FP32:
        whole = _UNROLLED
    kind = _INDEXED if open_ else whole
    if name in _REDUCING:
        kind, open_ = _REDUCE, False
    elif name == "gather":
        kind, open_ = _GATHER, False
    elif name == "cat":  # parts without holes are copied sixteen bytes at a time
        kind, open_ = _CAT if open_ else _VECTOR, False
    return (
        _TWICE.get(name, 0.0),
        kind,
        whole,
        open_,
        dtype.byte,
        (out_dtype or dtype).byte,
        _LAYOUT[layout],
        cost.issue,
        cost.start_cycle,
        _MOVING.index(name) + 1.0 if name in _MOVING else 0.0,
        name in _REDUCING,
        name == "max",
        name in _MASKED,
        name == "masked_fill",
        dtype.byte >= 4 and name != "cast",
    )


_FORMS = Constants(_of_form)


def _sizes(ops: Sequence[Elementwise], told: Told) -> _Sizes:
    """Sizes of all rows; ``rows`` and ``run`` as conditions say, as bytes say (an index or a result each), as the
    operator says, or as usual."""
    twice, kinds, whole, open_, *form = _FORMS.rows([_form(op) for op in ops])
    width, out_width, layout, reducing = form[0], form[1], form[2], form[6]
    n, read, write, rows, run = np.array(
        [(op.n, op.read_byte, op.write_byte, op.rows, op.run) for op in ops], dtype=np.float64
    ).T.copy()  # not a number: not known
    turned = layout == _LAYOUT[Layout.TRANSPOSED]
    run = np.where(turned & (run > 0), run, _USUAL_RUN)
    rows = np.where(rows > 0, rows, n / _USUAL_COLUMNS)
    if reducing.any():
        rows = np.where(reducing > 0, write / out_width, rows)
    kind = kinds.astype(np.intp)
    gathers = (kind == _GATHER).nonzero()[0]
    if gathers.size:
        indices = (read - n * width)[gathers] / 8.0
        rows[gathers] = np.where(indices >= 1.0, indices, rows[gathers])
    if not told.usual:
        rows, run = np.where(told.rows > 0, told.rows, rows), np.where(told.run > 0, told.run, run)
    rows = np.minimum(np.maximum(rows, 1.0), n)
    if gathers.size:
        kind[gathers[rows[gathers] <= _FEW_ROWS]] = _FEW
    if open_.any():
        # an operand of one row lies whole, as does a turned one that stays together; one that is spread over all
        # rows does only beside another as large
        alike = (rows <= 1.0) & ((layout != _LAYOUT[Layout.BROADCAST]) | (read >= 2.0 * n * width))
        kind = np.where((open_ > 0) & turned & (run <= 1.0), _TRANSPOSED, kind)
        kind = np.where((open_ > 0) & (alike | (turned & (rows <= run))), whole.astype(np.intp), kind)
    again = np.minimum(twice * n * width, read / 2.0)
    return _Sizes(n, read, write, rows, run, kind, _cold(ops, told), again, *form)


def _cold(ops: Sequence[Elementwise], told: Told) -> npt.NDArray[np.bool_]:
    """Whether operands come from device memory: made so on purpose, or a cache."""
    cold = told.cold.copy()
    for i, op in enumerate(ops):
        if op.function == "cat" and joins_cache(op):
            cold[i] |= not told.warm[i]
    return cold


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


def _sm_cycles(kind: _Kinds, n: Array, write: Array, issue: Array, units: Array, sm_count: float) -> Array:
    """Cycles of the busiest SM: to issue, to store, or to take a block after another."""
    spread = np.minimum(units, sm_count)
    issued, stored = n * issue / ISSUE_PER_CYCLE / spread, write / STORE_BYTE_PER_CYCLE / spread
    found = np.maximum(issued, stored)
    if kind.max() >= _GATHER:
        blocks = np.maximum(units / sm_count, 1.0)
        found = np.where(kind == _REDUCE, issued + blocks * _REDUCE_BLOCK_CYCLE, found)
        found = np.where(kind == _GATHER, np.maximum(found, blocks * BLOCK_CYCLE), found)
    return found


def _own_grids(
    launch: Columns, named: Sequence[str], ops: Sequence[Elementwise], sm_count: float, missing: Array
) -> None:
    """Put in the grids of kinds that have one of their own."""
    rows, grids = [], []
    for i, name in enumerate(named):
        grid = grid_of(name, ops[i], sm_count, float(missing[i])) if name else None
        if grid is not None:
            rows.append(i)
            grids.append(_grid(grid))
    if rows:
        *values, sm_cycle = np.array(grids).T
        for column, value in zip(_GRID, values, strict=True):
            launch[column][rows] = value
        launch["sm_cycle"][rows] = np.where(sm_cycle > 0, sm_cycle, launch["sm_cycle"][rows])


_GRID = ("units", "steps", "slots", "launches", "between_byte", "once")
_grid = attrgetter(*_GRID, "sm_cycle")


def _launch(s: _Sizes, columns: Array, operands: Array) -> tuple[Columns, Array]:
    """Blocks, dependent steps of one, and blocks an SM holds at a time; and instructions an element."""
    n, kind = s.n, s.kind
    narrow, wide, slots, own, beside, each = _BY_KIND.take(kind, axis=1)
    units = np.ceil(n / np.where(s.wide > 0, wide, narrow))
    issue = own * s.issue + beside + each * operands
    steps = np.ones(len(n))
    if kind.max() >= _CAT:
        _launch_others(s, columns, units, steps, slots)
        issue = np.where(s.widest > 0, _MAX_ISSUE, issue)
    launch = {"units": units, "steps": steps, "slots": slots}
    return launch | {"launches": np.ones(len(n)), "between_byte": np.zeros(len(n))}, issue


def _launch_others(s: _Sizes, columns: Array, units: Array, steps: Array, slots: Array) -> None:
    """Put in what kernels do that are not a thread for so many elements."""
    n, rows, width, kind = s.n, s.rows, s.width, s.kind
    at = (kind == _REDUCE).nonzero()[0]
    if at.size:
        units[at], loads = _reduction(rows[at], columns[at], width[at])
        steps[at] = 2.0 + loads
    at = (kind == _GATHER).nonzero()[0]
    if at.size:
        chunks = np.ceil(columns[at] * width[at] / 16.0)  # 16-byte pieces of a gathered row
        units[at] = rows[at] * np.ceil(chunks / 256.0)
        threads = np.clip(np.ceil(chunks / 32.0) * 32.0, 32.0, 256.0)
        slots[at] = np.minimum(np.floor(_THREADS / threads), _MOST_BLOCKS)
    at = (kind == _FEW).nonzero()[0]
    if at.size:
        units[at], steps[at] = np.ceil(columns[at] / 128.0), 1.0 + rows[at]
    at = (kind == _CAT).nonzero()[0]
    if at.size:
        units[at] = _CAT_BLOCKS
        steps[at] = np.maximum(n[at] / (_CAT_BLOCKS * _CAT_THREADS), 1.0)


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
