"""Row reductions -> columns of work: bytes first, arithmetic second.

Softmax, layer norm and RMS norm give each row to a block, or several short rows to one. Work that fits
L2 stays there from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattcast.arrays import Array
from wattcast.dtypes import Dtype
from wattcast.kernels.work import Columns, Condition, Reference, alignment, fill, log2, resident
from wattcast.workload.graph import RowReduction

_LANES = 32.0
_THREADS = 2048.0  # of an SM
_WARP_ROW = 2048.0  # longest row PyTorch's softmax gives to one warp
_REGISTER_ROW = 10240.0  # longest row it keeps in registers; beyond, it reads the row three times
# How often a byte crosses the banks of shared memory and L1, from profiler counters on an H200: once filled and once
# read where a kernel streams; more where a row is walked several times.
_SOFTMAX_CROSSINGS, _VECTOR_CROSSINGS, _SCALAR_CROSSINGS = 2.7, 3.7, 12.0
_SCALAR_PASSES = 3.0  # of a norm that loads single elements, through L2
_REDUCE_STEPS = 4.0  # a reduction over a block takes about as long as four loads


def row_reductions(
    ops: Sequence[RowReduction], conditions: Sequence[Condition], rate: Array, reference: Reference
) -> tuple[list[str], Columns, Columns]:
    """Groups, work columns and features of softmax and norms."""
    rows, dim = np.array([float(op.rows) for op in ops]), np.array([float(op.dim) for op in ops])
    read, write = np.array([op.read_byte for op in ops]), np.array([op.write_byte for op in ops])
    width = np.array([float(op.dtype.byte) for op in ops])
    out = np.array([float((op.out_dtype or op.dtype).byte) for op in ops])
    softmax = np.array([op.kind == "softmax" for op in ops])
    warp = softmax & (dim <= _WARP_ROW)  # a warp takes a row, a block four
    per_unit = np.where(warp, 4.0, 1.0)
    units = np.ceil(rows / per_unit)
    padded = np.where(warp, 2.0 ** np.ceil(np.log2(dim)), np.ceil(dim / _LANES) * _LANES)
    vector = ~softmax & (dim % 4 == 0)
    threads = np.where(vector | warp, 128.0, np.where(softmax, np.clip(dim / 8.0, 128.0, 1024.0), 512.0))
    sweep = np.where(vector, 512.0, np.where(warp, 32.0 * 32.0, threads))  # elements a block loads at a time
    flop = np.array([op.flop for op in ops]) / (rows * dim)
    crossings = np.where(
        softmax, np.where(warp, 2.0, _SOFTMAX_CROSSINGS), np.where(vector, _VECTOR_CROSSINGS, _SCALAR_CROSSINGS)
    )
    layer = np.array([op.kind == "layernorm" for op in ops])
    # a long row of a layer norm is not met again in L1; its scalar kernels load weights with every row
    again = np.where(layer, np.clip((dim * width - 6e3) / 8e3, 0.0, 1.0), 0.1)
    passes = np.where(softmax, 1.0, np.where(vector, 1.0 + again, np.where(layer, 1.0, 0.0) + _SCALAR_PASSES))
    looped = softmax & (dim > _REGISTER_ROW)
    between = np.where([_casts(op) for op in ops], 8.0 * rows * dim, 0.0)  # fp32 written and read again
    share, cold = _missing(read + write + between, conditions, reference)
    # the gradient of a norm reads gradient and input once for the input's and once more for the weights'
    twice = np.where([op.backward and op.kind != "softmax" for op in ops], 2.0, 1.0)
    work = {
        "units": units,
        "unit_flop": per_unit * padded * flop,
        "steps": _REDUCE_STEPS + np.ceil(dim / sweep),
        "launches": np.array([_row_launches(op) for op in ops]),
        "l2_byte": read * np.where(looped, 2.0, passes) * twice + write,
        "between_byte": between,
        "shared_byte": (read + write) * crossings + 2.0 * between,
        "dram_read_byte": read * share * twice,
        "dram_write_byte": write * share,
        "slots": np.floor(_THREADS / threads),
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
    """A norm of odd rows is two kernels, as is every norm's gradient; another output format adds a cast."""
    pair = op.kind != "softmax" and (op.dim % 4 != 0 or op.backward)
    return 1.0 + pair + _casts(op)


def _casts(op: RowReduction) -> bool:
    """Whether another output format is a kernel of its own: PyTorch fuses it into softmax for fp16 alone."""
    other = op.out_dtype is not None and op.out_dtype is not op.dtype
    return other and not (op.kind == "softmax" and op.dtype is Dtype.FP16)


def _row_group(op: RowReduction) -> str:
    """PyTorch's softmax has one kernel for short rows and others beyond; its norms load four at a time or one."""
    if op.backward:
        return f"{op.kind}.backward"
    if op.kind == "softmax":
        return (
            "softmax.warp"
            if op.dim <= _WARP_ROW
            else ("softmax.block" if op.dim <= _REGISTER_ROW else "softmax.loop")
        )
    return f"{op.kind}.vector" if op.dim % 4 == 0 else f"{op.kind}.scalar"


def _missing(byte: Array, conditions: Sequence[Condition], reference: Reference) -> tuple[Array, Array]:
    """Share of the bytes that DRAM must move, and whether the operands were made cold on purpose."""
    cold = np.array([float(c.rotated == "all") for c in conditions])
    return np.where(cold > 0, 1.0, 1.0 - resident(byte, reference.l2_byte)), cold
