"""Row reductions -> columns of work: bytes first, arithmetic second.

Softmax, layer norm and RMS norm give each row to a block, or several short rows to one. Work that fits
L2 stays there from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from wattcast.arrays import Array
from wattcast.kernels.row_grids import casts, met_again, rows_of_warp, softmax_kernel, walk_of
from wattcast.kernels.work import Part, Reference, Told, columns_of, fill, kept_share, resident_share
from wattcast.workload.graph import RowReduction

_THREADS = 2048.0  # of an SM
# How often a byte crosses the banks of shared memory and L1, from profiler counters on an H200: once filled and once
# read where a kernel streams; more where a row is walked several times.
_SOFTMAX_CROSSINGS, _VECTOR_CROSSINGS = 2.7, 3.7
# A norm that loads single elements: bytes of a row, where 512 threads add up moments, of an element, of a byte of it
# (eight counted norms of 31 to 38,717 elements).
_SCALAR_ROW, _SCALAR_ELEMENT, _SCALAR_BYTE = 46.5e3, 5.0, 6.25
_SCALAR_PASSES = 3.0  # of a norm that loads single elements, through L2


def row_reductions(ops: Sequence[RowReduction], told: Told, rate: Array, reference: Reference) -> Part:
    """Groups, work columns and features of softmax and norms."""
    rows = [_row(*of, reference) for of in zip(ops, told.cold.tolist(), strict=True)]
    dim, units, cycles, slots, *rest = columns_of(rows)
    waves = units / reference.sm_count
    work = {"units": units, "slots": slots, "unit_flop": rate * cycles / np.maximum(waves, 1.0)}
    work |= zip(_WORK, rest, strict=False)
    plain = dict(zip(_PLAIN, rest[len(_WORK) :], strict=False)) | {
        "pow2_dim": dim / 2.0 ** np.ceil(np.log2(dim)),
        "fill": fill(units, 2.0 * reference.sm_count),
        "waves": np.log2(waves),
    }
    logs = {"log_rows": rest[-2], "log_dim": dim, "log_byte": rest[-1]}
    return Part([_row_group(op) for op in ops], work, plain, logs, {"align_dim": dim})


_WORK = ("steps", "launches", "l2_byte", "between_byte", "shared_byte", "dram_read_byte", "dram_write_byte")
_PLAIN = ("width", "out_width", "cold", "kind", "backward")


def _row(op: RowReduction, cold: bool, reference: Reference) -> tuple[float, ...]:
    """The columns of one operator: a workload has a few, for which plain numbers are faster than arrays."""
    elements, softmax, width = op.elements, op.kind == "softmax", op.dtype.byte
    read, write, sms = op.read_byte, op.write_byte, reference.sm_count
    both = read + write
    between = 8.0 * elements if casts(op) else 0.0  # fp32 written and read again
    if softmax and op.backward:  # it multiplies first: a product written, and read again beside the result
        between += 3.0 * elements * width
    missing = 1.0 if cold else 1.0 - kept_share(both + between, reference.l2_byte)
    units, slots, crossed, passes, rereads, twice = _softmax(op, both) if softmax else _norm(op, both)
    if rereads:  # rows in flight, from L2, or from device memory where they do not fit together
        flown = min(op.rows, slots * sms) * op.dim * width
        rereads = rereads * (1.0 - resident_share(flown, reference.l2_byte)) if missing > 0 else 0.0
    steps, sm_cycle = walk_of(op, sms, missing)
    return (
        *(op.dim, units, sm_cycle, slots),
        *(steps / max(units / (slots * sms), 1.0), _row_launches(op), read * passes * twice + write, between),
        *(crossed + 2.0 * between, read * missing * (twice + rereads), write * missing),
        *(width, (op.out_dtype or op.dtype).byte, cold, _PLACE[op.kind], op.backward, op.rows, both),
    )


_PLACE = {"softmax": 0.0, "layernorm": 1.0, "rmsnorm": 2.0}


def _softmax(op: RowReduction, byte: float) -> tuple[float, ...]:
    """Blocks, blocks an SM holds, bytes that cross shared memory, passes through L2, how often a row in flight is
    read again, and how often the operands are."""
    kernel = softmax_kernel(op)
    if kernel == "warp":  # it takes a row or two, a block four warps
        return ceil(op.rows / (4.0 * rows_of_warp(op.dim))), _THREADS / 128.0, byte * 2.0, 1.0, 0.0, 1.0
    slots = _THREADS / (128.0 if op.backward else 1024.0)
    looped = kernel == "loop" and not op.backward
    return op.rows, slots, byte * _SOFTMAX_CROSSINGS, 3.0 if looped else 1.0, 2.0 if looped else 0.0, 1.0


def _norm(op: RowReduction, byte: float) -> tuple[float, ...]:
    """The same of a norm; its gradient reads gradient and input for the input's and once more for the weights'."""
    width, layer, twice = op.dtype.byte, op.kind == "layernorm", 2.0 if op.backward else 1.0
    if op.dim % 4 == 0:
        # a long row of a layer norm is not met again in L1
        again = met_again(op.dim * width) if layer else min(max(op.dim * width / 2e4 - 0.5, 0.1), 1.0)
        return op.rows, _THREADS / 128.0, byte * _VECTOR_CROSSINGS, 1.0 + again, again, twice
    if op.backward:
        return op.rows, _THREADS / 128.0, byte * _VECTOR_CROSSINGS, 1.0, 1.0, twice
    crossed = op.rows * (_SCALAR_ROW + op.dim * (_SCALAR_ELEMENT + _SCALAR_BYTE * width))
    return op.rows, _THREADS / 512.0, crossed, layer + _SCALAR_PASSES, 1.0, twice  # a layer norm's load weights too


def _row_launches(op: RowReduction) -> float:
    """A norm of odd rows is two kernels, as is every gradient; another output format adds a cast."""
    pair = op.backward or (op.kind != "softmax" and op.dim % 4 != 0)
    return 1.0 + pair + casts(op)


def _row_group(op: RowReduction) -> str:
    """PyTorch's softmax has one kernel for short rows and others beyond; its norms load four at a time or one."""
    if op.backward:
        return f"{op.kind}.backward"
    if op.kind == "softmax":
        return f"softmax.{softmax_kernel(op)}"
    return f"{op.kind}.vector" if op.dim % 4 == 0 else f"{op.kind}.scalar"
