"""Softmax and the gradients of norms: how PyTorch's kernels walk over rows, and what that costs an SM.

Cycles are from bursts on an H200 whose times they bound; registers, threads and which kernel runs are those that a
profiler saw. A row of softmax of up to 2,048 elements is a warp's; up to 9,216 it stays in the registers of a block
of 1,024 threads, of which an SM holds two up to six elements a thread and one beyond; longer rows are walked three
times. The gradient of a norm is a kernel for the input, a block a row, and one for the weights: a block for 32 columns
that walks over all rows, 32 at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from wattcast.dtypes import Dtype
from wattcast.kernels.grid import waits
from wattcast.workload.graph import RowReduction

WARP_ROW, WARP_ROW_BACKWARD = 2048, 1024  # longest rows given to one warp
REGISTER_ROW = 9216  # longest row kept in registers
_BLOCK = 1024.0
_TWO_BLOCKS = 6.0  # elements a thread may hold for an SM to take two blocks
# SM cycles: of an element of a warp's row, of such a row, of a thousand elements in registers (two blocks, one), of a
# row walked thrice, of its elements, of an element cast beforehand
_WARP_CYCLE, _WARP_ROW_CYCLE, _HELD_CYCLE, _HELD_ALONE_CYCLE = 0.372, 6.0, 750.0, 1000.0
_WALK_ROW_CYCLE, _WALK_CYCLE, _CAST_CYCLE = 2000.0, 0.41, 0.7
_BACKWARD_CYCLE = 0.47  # of an element of a gradient
_GRADIENT_ROWS = 32.0  # that a block of the weights' gradient takes at a time
_RMS_SHARE = 0.75  # of a step of it without a mean


@dataclass(frozen=True)
class Walk:
    """Steps one after another in all, and cycles of the busiest SM."""

    steps: float
    sm_cycle: float


def walk_of(op: RowReduction, sm_count: float, missing: float) -> Walk | None:
    """How the operator walks, ``missing`` being the share of its bytes that L2 does not hold; None: as others."""
    if op.backward:
        return _softmax_gradient(op, sm_count, missing) if op.kind == "softmax" else _gradient(op, sm_count, missing)
    if op.kind != "softmax":
        return None
    found = _softmax(op, sm_count, missing)
    if not casts(op):
        return found
    return Walk(found.steps + 2.0, found.sm_cycle + _CAST_CYCLE * op.elements / sm_count)


def casts(op: RowReduction) -> bool:
    """Whether another output format is a kernel of its own: PyTorch fuses it into softmax for fp16 alone."""
    other = op.out_dtype is not None and op.out_dtype is not op.dtype
    return other and not (op.kind == "softmax" and op.dtype is Dtype.FP16)


def softmax_kernel(op: RowReduction) -> str:
    """``warp``, ``block`` (in registers; not where it casts by itself) or ``loop``."""
    if op.dim <= (WARP_ROW_BACKWARD if op.backward else WARP_ROW):
        return "warp"
    fused = op.out_dtype is not None and op.out_dtype is not op.dtype and not casts(op)
    return "block" if op.dim <= REGISTER_ROW and not fused and not op.backward else "loop"


def padded(dim: int) -> float:
    """Elements that a warp's lanes hold of a row: a power of two.

    >>> padded(1500)
    2048.0
    """
    return float(2.0 ** ceil(log2(dim)))


def rows_of_warp(dim: int) -> float:
    """Rows that a warp takes side by side."""
    return 2.0 if padded(dim) <= 128 else 1.0


def _softmax(op: RowReduction, sm_count: float, missing: float) -> Walk:
    kernel = softmax_kernel(op)
    if kernel == "warp":
        held = padded(op.dim)
        steps = max(held / 32.0, 1.0) * rows_of_warp(op.dim)
        cycle = max(op.rows / sm_count, 1.0) * (_WARP_CYCLE * held + _WARP_ROW_CYCLE)
        return Walk(waits(steps, 0.5 * missing), cycle)
    each = ceil(op.dim / _BLOCK)
    if kernel == "block":
        two = each <= _TWO_BLOCKS
        cycle = each * (_HELD_CYCLE if two else _HELD_ALONE_CYCLE)
        return Walk(4.0 + waits(4.0 * each, missing), _in_rounds(op.rows, sm_count, 2.0 if two else 1.0) * cycle)
    return Walk(
        12.0 + waits(2.0 * each, missing),
        _in_rounds(op.rows, sm_count, 2.0) * (_WALK_ROW_CYCLE + _WALK_CYCLE * op.dim),
    )


def _in_rounds(rows: float, sm_count: float, blocks: float) -> float:
    """Blocks of the busiest SM: whole rounds once there is more than one."""
    at_once = sm_count * blocks
    return blocks * ceil(rows / at_once) if rows > at_once else rows / sm_count


def _softmax_gradient(op: RowReduction, sm_count: float, missing: float) -> Walk:
    each = max(padded(op.dim) / 32.0, 1.0) if softmax_kernel(op) == "warp" else 12.0 + 2.0 * ceil(op.dim / _BLOCK)
    return Walk(waits(each, 0.5 * missing), _BACKWARD_CYCLE * op.elements / sm_count)


def _gradient(op: RowReduction, sm_count: float, missing: float) -> Walk:
    share = _RMS_SHARE if op.kind == "rmsnorm" else 1.0
    crowd = max(ceil(op.dim / 32.0) / sm_count, 1.0)
    weights = ceil(op.rows / _GRADIENT_ROWS) * share * crowd
    own = 8.0 + ceil(op.dim / 512.0)
    return Walk(own + waits(weights, 0.3 * missing), _BACKWARD_CYCLE * op.elements / sm_count)
