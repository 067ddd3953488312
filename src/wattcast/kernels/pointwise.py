"""Row reductions -> columns of work: bytes first, arithmetic second.

Softmax, layer norm and RMS norm give each row to a block, or several short rows to one. Work that fits
L2 stays there from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattcast.arrays import Array
from wattcast.kernels.row_grids import casts, met_again, rows_of_warp, softmax_kernel, walk_of
from wattcast.kernels.work import Columns, Condition, Reference, alignment, fill, kept, log2, resident
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
    ops: Sequence[RowReduction], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of softmax and norms."""
    rows, dim = np.array([float(op.rows) for op in ops]), np.array([float(op.dim) for op in ops])
    read, write = np.array([op.read_byte for op in ops]), np.array([op.write_byte for op in ops])
    width = np.array([float(op.dtype.byte) for op in ops])
    out = np.array([float((op.out_dtype or op.dtype).byte) for op in ops])
    softmax = np.array([op.kind == "softmax" for op in ops])
    backward = np.array([op.backward for op in ops])
    kernel = np.array([softmax_kernel(op) if op.kind == "softmax" else "" for op in ops])
    warp, looped = kernel == "warp", kernel == "loop"  # a warp takes a row or two, a block four warps
    per_unit = np.where(warp, [4.0 * rows_of_warp(op.dim) for op in ops], 1.0)
    units = np.ceil(rows / per_unit)
    vector = ~softmax & (dim % 4 == 0)
    threads = np.where(vector | warp | backward, 128.0, np.where(softmax, 1024.0, 512.0))
    crossings = np.where(softmax, np.where(warp, 2.0, _SOFTMAX_CROSSINGS), _VECTOR_CROSSINGS)
    crossed = np.where(
        softmax | vector | backward,
        (read + write) * crossings,
        rows * (_SCALAR_ROW + dim * (_SCALAR_ELEMENT + _SCALAR_BYTE * width)),
    )
    layer = np.array([op.kind == "layernorm" for op in ops])
    # a long row of a layer norm is not met again in L1; its scalar kernels load weights with every row
    long = np.clip(dim * width / 2e4 - 0.5, 0.1, 1.0)
    again = np.where(layer, [met_again(op.dim * op.dtype.byte) for op in ops], long)
    scalar = np.where(backward, 1.0, np.where(layer, 1.0, 0.0) + _SCALAR_PASSES)
    passes = np.where(softmax, 1.0, np.where(vector, 1.0 + again, scalar))
    between = np.where([casts(op) for op in ops], 8.0 * rows * dim, 0.0)  # fp32 written and read again
    # the gradient of softmax multiplies first: a product written, and read again beside the result
    between = between + np.where(softmax & backward, 3.0 * rows * dim * width, 0.0)
    share, cold = _missing(read + write + between, conditions, reference)
    # rows in flight are read again from L2, or from device memory where they do not fit together
    slots = np.floor(_THREADS / threads)
    flown = np.minimum(rows, slots * reference.sm_count) * dim * width
    rereads = np.where(softmax, np.where(looped & ~backward, 2.0, 0.0), np.where(vector, again, 1.0))
    rereads = rereads * (1.0 - resident(flown, reference.l2_byte)) * (share > 0)
    # the gradient of a norm reads gradient and input once for the input's and once more for the weights'
    twice = np.where(~softmax & backward, 2.0, 1.0)
    rounds = np.maximum(units / (slots * reference.sm_count), 1.0)
    walks = [walk_of(op, reference.sm_count, float(missing)) for op, missing in zip(ops, share, strict=True)]
    cycles = np.array([walk.sm_cycle for walk in walks])
    work = {
        "units": units,
        "unit_flop": rate * cycles / np.maximum(units / reference.sm_count, 1.0),
        "steps": np.array([walk.steps for walk in walks]) / rounds,
        "launches": np.array([_row_launches(op) for op in ops]),
        "l2_byte": read * np.where(looped & ~backward, 3.0, passes) * twice + write,
        "between_byte": between,
        "shared_byte": crossed + 2.0 * between,
        "dram_read_byte": read * share * (twice + rereads),
        "dram_write_byte": write * share,
        "slots": slots,
    }
    features = {
        "log_rows": log2(rows),
        "log_dim": log2(dim),
        "align_dim": alignment(dim),
        "pow2_dim": dim / 2.0 ** np.ceil(np.log2(dim)),
        "width": width,
        "out_width": out,
        "cold": cold,
        "log_byte": log2(read + write),
        "fill": fill(units, 2.0 * reference.sm_count),
        "waves": np.log2(units / reference.sm_count),
        "kind": np.array([float(("softmax", "layernorm", "rmsnorm").index(op.kind)) for op in ops]),
        "backward": np.array([float(op.backward) for op in ops]),
    }
    group = [_row_group(op) for op in ops]
    return group, work, features


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


def _missing(byte: Array, conditions: Sequence[Condition], reference: Reference) -> tuple[Array, Array]:
    """Share of the bytes that DRAM must move, and whether the operands were made cold on purpose."""
    cold = np.array([float(c.rotated == "all") for c in conditions])
    return np.where(cold > 0, 1.0, 1.0 - kept(byte, reference.l2_byte)), cold
