"""Softmax and the gradients of norms: how PyTorch's kernels walk over rows, and what that costs an SM.

Cycles are from bursts on an H200 whose times they bound; registers, threads and which kernel runs are those that a
profiler saw. A row of softmax of up to 2,048 elements is a warp's; up to 9,216 it stays in the registers of a block
of 1,024 threads, of which an SM holds two up to six elements a thread and one beyond; longer rows are walked three
times. The gradient of a norm is a kernel for the input, a block a row, and one for the weights: a block for 32
columns that walks over all rows, 32 at a time.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from wattcast.dtypes import Dtype
from wattcast.kernels.grid import BLOCK_CYCLE, waits
from wattcast.workload.graph import RowReduction

WARP_ROW, WARP_ROW_ELSE = 2048, 1024  # longest rows given to one warp; of a gradient, or where it casts by itself
REGISTER_ROW = 9216  # longest row kept in registers
_BLOCK = 1024.0
_TWO_BLOCKS = 6.0  # elements a thread may hold for an SM to take two blocks
# SM cycles of a warp's row: each lane's place in it, each element, the row; the same of 2,048 places, which take so
# many registers that fewer warps fit
_WARP_CYCLES, _WIDEST_CYCLES = (0.25, 0.12, 6.0), (0.2, 0.33, 6.0)
# SM cycles: of a thousand elements in registers (two blocks, one), of a row walked thrice, of its elements, of an
# element cast beforehand
_HELD_CYCLE, _HELD_ALONE_CYCLE, _WALK_ROW_CYCLE, _WALK_CYCLE, _CAST_CYCLE = 750.0, 1000.0, 2000.0, 0.41, 0.7
_SOFTMAX_BACKWARD_CYCLE = 0.47  # of an element
# SM cycles of an element of a norm's gradient: at all, a byte of it, and a byte that L1 does not hold until it is met
# again
_BACKWARD_CYCLES = (0.2, 0.11, 0.12)
# SM cycles of a row of a norm, of its bytes, and of a row more in fp32; four elements at a time
_NORM_CYCLES = {"layernorm": (215.0, 0.16, 100.0), "rmsnorm": (110.0, 0.075, 25.0)}
_SCALAR_CYCLE, _SCALAR_SLOTS = 0.03, 2.0  # of an element where each is loaded alone, and blocks an SM holds
_REDUCE_STEPS = 4.0  # a reduction over a block takes about as long as four loads
_GRADIENT_ROWS = 32.0  # that a block of the weights' gradient takes at a time
_RMS_SHARE = 0.75  # of a step of it without a mean


class Walk(NamedTuple):
    """Steps one after another in all, and cycles of the busiest SM."""

    steps: float
    sm_cycle: float


def walk_of(op: RowReduction, sm_count: float, missing: float) -> Walk:
    """How the operator walks, ``missing`` being the share of its bytes that L2 does not hold."""
    if op.backward:
        return _softmax_gradient(op, sm_count, missing) if op.kind == "softmax" else _gradient(op, sm_count, missing)
    if op.kind != "softmax":
        return _norm(op, sm_count, missing)
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
    fused = op.out_dtype is not None and op.out_dtype is not op.dtype and not casts(op)
    if op.dim <= (WARP_ROW_ELSE if op.backward or fused else WARP_ROW):
        return "warp"
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
        place, element, row = _WIDEST_CYCLES if held >= WARP_ROW else _WARP_CYCLES
        cycle = max(op.rows / sm_count, 1.0) * (place * held + element * op.dim + row)
        return Walk(waits(steps, 0.5 * missing), cycle)
    each = ceil(op.dim / _BLOCK)
    if kernel == "block":
        two = each <= _TWO_BLOCKS
        cycle = each * (_HELD_CYCLE if two else _HELD_ALONE_CYCLE)
        return Walk(4.0 + waits(4.0 * each, missing), _in_rounds(op.rows, sm_count, 2.0 if two else 1.0) * cycle)
    return Walk(
        12.0 + waits(2.0 * each, 0.3 * missing),
        _in_rounds(op.rows, sm_count, 2.0) * (_WALK_ROW_CYCLE + _WALK_CYCLE * op.dim),
    )


def _in_rounds(rows: float, sm_count: float, blocks: float) -> float:
    """Blocks of the busiest SM: whole rounds once there is more than one; a block alone takes its steps' time."""
    at_once = sm_count * blocks
    if rows > at_once:
        return blocks * ceil(rows / at_once)
    return rows / sm_count if rows > sm_count else 0.0


def _softmax_gradient(op: RowReduction, sm_count: float, missing: float) -> Walk:
    each = max(padded(op.dim) / 32.0, 1.0) if softmax_kernel(op) == "warp" else 12.0 + 2.0 * ceil(op.dim / _BLOCK)
    return Walk(waits(each, 0.5 * missing), _SOFTMAX_BACKWARD_CYCLE * op.elements / sm_count)


def _norm(op: RowReduction, sm_count: float, missing: float) -> Walk:
    loads = ceil(op.dim / 512.0)
    if op.dim % 4:  # single elements, in blocks of 512 threads that wait for one another's sums
        rounds = max(op.rows / (_SCALAR_SLOTS * sm_count), 1.0)
        return Walk((_REDUCE_STEPS + loads) * rounds + loads * missing, op.rows / sm_count * _SCALAR_CYCLE * op.dim)
    row, byte, wide = _NORM_CYCLES[op.kind]
    cycle = max(row + byte * op.dim * op.dtype.byte, BLOCK_CYCLE) + (wide if op.dtype is Dtype.FP32 else 0.0)
    return Walk(_REDUCE_STEPS + waits(loads, missing), op.rows / sm_count * cycle)


def _gradient(op: RowReduction, sm_count: float, missing: float) -> Walk:
    share = _RMS_SHARE if op.kind == "rmsnorm" else 1.0
    crowd = max(ceil(op.dim / 32.0) / sm_count, 1.0)
    weights = ceil(op.rows / _GRADIENT_ROWS) * share * crowd
    own = 8.0 + (ceil(op.dim / 512.0) if op.dim % 4 == 0 else ceil(op.dim / 64.0))
    always, byte, again = _BACKWARD_CYCLES
    each = always + op.dtype.byte * (byte + again * met_again(op.dim * op.dtype.byte))
    return Walk(own + waits(weights, 0.3 * missing), each * op.elements / sm_count)


def met_again(row_byte: float) -> float:
    """Share of a row that L1 no longer holds when a norm comes back to it.

    >>> met_again(4096.0), met_again(16384.0)
    (0.0, 1.0)
    """
    return min(max((row_byte - 6e3) / 8e3, 0.0), 1.0)
