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
from wattcast.kernels.work import Columns, Reference, Told, alignment, fill, kept, logs, resident
from wattcast.workload.graph import RowReduction

_THREADS = 2048.0  # of an SM
# How often a byte crosses the banks of shared memory and L1, from profiler counters on an H200: once filled and once
# read where a kernel streams; more where a row is walked several times.
_SOFTMAX_CROSSINGS, _VECTOR_CROSSINGS = 2.7, 3.7
# A norm that loads single elements: bytes of a row, where 512 threads add up moments, of an element, of a byte of it
# (eight counted norms of 31 to 38,717 elements).
_SCALAR_ROW, _SCALAR_ELEMENT, _SCALAR_BYTE = 46.5e3, 5.0, 6.25
_SCALAR_PASSES = 3.0  # of a norm that loads single elements, through L2


def row_reductions(
    ops: Sequence[RowReduction], told: Told, rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of softmax and norms."""
    table = np.array([_row(op) for op in ops], dtype=np.float64).T.copy()
    rows, dim, width, out, read, write, between, kind, backward, launches = table[:10]
    units, slots, crossed, passes, rereads, twice = table[10:]
    sms = reference.sm_count
    share = np.where(told.cold, 1.0, 1.0 - kept(read + write + between, reference.l2_byte))
    # rows in flight are read again from L2, or from device memory where they do not fit together
    flown = np.minimum(rows, slots * sms) * dim * width
    rereads = rereads * (1.0 - resident(flown, reference.l2_byte)) * (share > 0)
    steps, cycles = np.array([walk_of(op, sms, missing) for op, missing in zip(ops, share.tolist(), strict=True)]).T
    waves = units / sms
    work = {
        "units": units,
        "unit_flop": rate * cycles / np.maximum(waves, 1.0),
        "steps": steps / np.maximum(units / (slots * sms), 1.0),
        "launches": launches,
        "l2_byte": read * passes * twice + write,
        "between_byte": between,
        "shared_byte": crossed + 2.0 * between,
        "dram_read_byte": read * share * (twice + rereads),
        "dram_write_byte": write * share,
        "slots": slots,
    }
    features = logs({"log_rows": rows, "log_dim": dim, "log_byte": read + write})
    features |= {
        "align_dim": alignment(dim),
        "pow2_dim": dim / 2.0 ** np.ceil(features["log_dim"]),
        "width": width,
        "out_width": out,
        "cold": told.cold.astype(np.float64),
        "fill": fill(units, 2.0 * sms),
        "waves": np.log2(waves),
        "kind": kind,
        "backward": backward,
    }
    return [_row_group(op) for op in ops], work, features


def _row(op: RowReduction) -> tuple[float, ...]:
    """What the columns need to know of one operator, of which a workload has a few."""
    elements, softmax = op.elements, op.kind == "softmax"
    read, write = op.read_byte, op.write_byte
    between = 8.0 * elements if casts(op) else 0.0  # fp32 written and read again
    if softmax and op.backward:  # it multiplies first: a product written, and read again beside the result
        between += 3.0 * elements * op.dtype.byte
    return (
        *(op.rows, op.dim, op.dtype.byte, (op.out_dtype or op.dtype).byte, read, write, between),
        *(_PLACE[op.kind], op.backward, _row_launches(op)),
        *(_softmax(op, read + write) if softmax else _norm(op, read + write)),
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
