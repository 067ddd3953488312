"""Softmax, layer norm and RMS norm over rows, and their gradients, as PyTorch 2 runs them on CUDA cores.

PyTorch gives short softmax rows to a warp each, keeps longer ones in the registers of a block, and walks the longest
three times. Norms load four elements at a time where four divides the row, else one. Constants without another source
come from times of these kernels on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

import numpy as np

from wattcast.core.arrays import Array
from wattcast.core.units import Dtype
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.kernel_table import (
    BLOCK_CYCLE,
    SM_THREADS,
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    as_columns,
    resident_share,
    steps_with_misses,
    streamed_share,
    wave_fill,
)
from wattcast.workload.operator_types import LayerNorm, RmsNorm, RowReduction, Softmax

_WARP_ROW, _WARP_ROW_ELSE = 2048, 1024  # longest rows given to one warp; of a gradient or a fused cast
_REGISTER_ROW = 9216  # longest row kept in registers
_BLOCK = 1024.0
_TWO_BLOCKS = 6.0  # elements a thread may hold for an SM to take two blocks
# SM cycles of a warp's row: each lane's place in it, each element, the row; then those of 2,048 places, which take so
# many registers that fewer warps fit
_WARP_CYCLES, _WIDEST_CYCLES = (0.25, 0.12, 6.0), (0.2, 0.33, 6.0)
# SM cycles: of a thousand elements in registers (two blocks, one), of a row walked thrice, of its elements, of an
# element cast beforehand
_HELD_CYCLE, _HELD_ALONE_CYCLE, _WALK_ROW_CYCLE, _WALK_CYCLE, _CAST_CYCLE = 750.0, 1000.0, 2000.0, 0.41, 0.7
_SOFTMAX_BACKWARD_CYCLE = 0.47  # of an element
# SM cycles of an element of a norm's gradient: always, per byte, and per byte that L1 has lost when it is read again
_BACKWARD_CYCLES = (0.2, 0.11, 0.12)
# SM cycles of a row of a norm, of its bytes, and of a row more in fp32; four elements at a time
_NORM_CYCLES = {"layernorm": (215.0, 0.16, 100.0), "rmsnorm": (110.0, 0.075, 25.0)}
_SCALAR_CYCLE, _SCALAR_SLOTS = 0.03, 2.0  # of an element where each is loaded alone, and blocks an SM holds
_REDUCE_STEPS = 4.0  # a reduction over a block takes about as long as four loads
_GRADIENT_ROWS = 32.0  # that a block of the weights' gradient takes at a time
_RMS_SHARE = 0.75  # of a step of it without a mean
# How often a byte crosses the banks of shared memory and L1, from profiler counters on an H200: once filled and once
# read where a kernel streams; more where a row is walked several times.
_SOFTMAX_CROSSINGS, _VECTOR_CROSSINGS = 2.7, 3.7
# Bytes that cross shared memory in a norm that loads single elements: of a row, where 512 threads add up moments, of
# an element, and of a byte of it (eight counted norms of 31 to 38,717 elements)
_SCALAR_ROW, _SCALAR_ELEMENT, _SCALAR_BYTE = 46.5e3, 5.0, 6.25
_SCALAR_PASSES = 3.0  # of a norm that loads single elements, through L2


def row_reduction_work(
    ops: Sequence[RowReduction], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return kernel families, work columns and features of softmax and norms."""
    rows = [_count_work(*of, reference) for of in zip(ops, told.cold.tolist(), strict=True)]
    dim, units, cycles, slots, *rest = as_columns(rows)
    waves = units / reference.sm_count
    work = {"units": units, "slots": slots, "unit_flop": rate * cycles / np.maximum(waves, 1.0)}
    work |= zip(_WORK, rest, strict=False)
    plain = dict(zip(_PLAIN, rest[len(_WORK) :], strict=False)) | {
        "pow2_dim": dim / 2.0 ** np.ceil(np.log2(dim)),
        "fill": wave_fill(units, 2.0 * reference.sm_count),
        "waves": np.log2(waves),
    }
    logs = {"log_rows": rest[-2], "log_dim": dim, "log_byte": rest[-1]}
    return FamilyColumns([_kernel_family(op) for op in ops], work, plain, logs, {"align_dim": dim})


_WORK = ("steps", "launches", "l2_byte", "between_byte", "shared_byte", "dram_read_byte", "dram_write_byte")
_PLAIN = ("width", "out_width", "cold", "kind", "backward")
_KIND_CODE = {"softmax": 0.0, "layernorm": 1.0, "rmsnorm": 2.0}


def _kernel_family(op: RowReduction) -> str:
    if op.backward:
        return f"{op.kind}.backward"
    if op.kind == "softmax":
        return f"softmax.{softmax_kernel(op)}"
    return f"{op.kind}.vector" if op.dim % 4 == 0 else f"{op.kind}.scalar"


def _count_work(op: RowReduction, cold: bool, reference: ReferenceChip) -> tuple[float, ...]:
    """Return the columns of one operator; a workload has a few, for which plain numbers are faster than arrays."""
    elements, softmax, width = op.elements, op.kind == "softmax", op.dtype.byte
    read, write, sms = op.read_byte, op.write_byte, reference.sm_count
    both = read + write
    between = 8.0 * elements if _casts_apart(op) else 0.0  # fp32 written and read again
    multiplied = softmax and op.backward and not _is_log(op)
    if multiplied:  # PyTorch multiplies first: a product is written, and read again with the result
        between += 3.0 * elements * width
    missing = 1.0 if cold else 1.0 - float(streamed_share(both + between, reference.l2_byte))
    cut = _cut_softmax(op, both) if softmax else _cut_norm(op, both)
    again = cut.rereads
    if again:  # rows in flight come again from L2, or from device memory where they do not fit together
        flown = min(op.rows, cut.slots * sms) * op.dim * width
        again = again * (1.0 - float(resident_share(flown, reference.l2_byte))) if missing > 0 else 0.0
    steps, sm_cycle = row_walk(op, sms, missing)
    pair = multiplied or (not softmax and (op.backward or op.dim % 4 != 0))  # two kernels
    launches = 1.0 + pair + _casts_apart(op)
    return (
        *(op.dim, cut.units, sm_cycle, cut.slots),
        *(steps / max(cut.units / (cut.slots * sms), 1.0), launches, read * cut.passes * cut.reads + write, between),
        *(cut.crossed_byte + 2.0 * between, read * missing * (cut.reads + again), write * missing),
        *(width, (op.out_dtype or op.dtype).byte, cold, _KIND_CODE[op.kind], op.backward, op.rows, both),
    )


class _Cut(NamedTuple):
    """How the rows of an operator are cut into blocks, and what these move."""

    units: float  # blocks
    slots: float  # blocks an SM holds
    crossed_byte: float  # through shared memory
    passes: float = 1.0  # of the operands through L2
    rereads: float = 0.0  # how often a row in flight is read again
    reads: float = 1.0  # how often the operands are read by different kernels


def _cut_softmax(op: RowReduction, byte: float) -> _Cut:
    kernel = softmax_kernel(op)
    if kernel == "warp":  # a warp takes a row or two, a block four warps
        return _Cut(ceil(op.rows / (4.0 * _rows_per_warp(op.dim))), SM_THREADS / 128.0, byte * 2.0)
    slots = SM_THREADS / (128.0 if op.backward else 1024.0)
    looped = kernel == "loop" and not op.backward
    if op.backward and _is_log(op):  # of two operands, the gradient is read again
        return _Cut(op.rows, slots, byte * _SOFTMAX_CROSSINGS, 1.5, 0.5)
    return _Cut(op.rows, slots, byte * _SOFTMAX_CROSSINGS, *((3.0, 2.0) if looped else (1.0, 0.0)))


def _is_log(op: RowReduction) -> bool:
    return isinstance(op, Softmax) and op.log


def _cut_norm(op: RowReduction, byte: float) -> _Cut:
    """Cut a norm; its gradient reads both operands for the gradient of the input, and again for the weights'."""
    width, layer, reads = op.dtype.byte, op.kind == "layernorm", 2.0 if op.backward else 1.0
    if op.dim % 4 == 0:
        # a long row of a layer norm is no longer in L1 when it is read again
        again = _l1_miss_share(op.dim * width) if layer else min(max(op.dim * width / 2e4 - 0.5, 0.1), 1.0)
        return _Cut(op.rows, SM_THREADS / 128.0, byte * _VECTOR_CROSSINGS, 1.0 + again, again, reads)
    if op.backward:
        return _Cut(op.rows, SM_THREADS / 128.0, byte * _VECTOR_CROSSINGS, 1.0, 1.0, reads)
    crossed = op.rows * (_SCALAR_ROW + op.dim * (_SCALAR_ELEMENT + _SCALAR_BYTE * width))
    passes = layer + _SCALAR_PASSES  # a layer norm loads weights too
    return _Cut(op.rows, SM_THREADS / 512.0, crossed, passes, 1.0, reads)


class RowWalk(NamedTuple):
    """Dependent steps of all rounds of blocks together, and cycles of the busiest SM."""

    steps: float
    sm_cycle: float


def row_walk(op: RowReduction, sm_count: float, missing: float) -> RowWalk:
    """Return how long blocks walk over their rows; ``missing`` is the share of the bytes that L2 does not hold."""
    if op.backward:
        walk = _walk_softmax_gradient if op.kind == "softmax" else _walk_norm_gradient
        return walk(op, sm_count, missing)
    if op.kind != "softmax":
        return _walk_norm(op, sm_count, missing)
    found = _walk_softmax(op, sm_count, missing)
    if not _casts_apart(op):
        return found
    return RowWalk(found.steps + 2.0, found.sm_cycle + _CAST_CYCLE * op.elements / sm_count)


def _casts_apart(op: RowReduction) -> bool:
    """Return whether another output format is a kernel of its own: PyTorch fuses it into softmax for fp16 alone."""
    other = op.out_dtype is not None and op.out_dtype is not op.dtype
    return other and not (op.kind == "softmax" and op.dtype is Dtype.FP16)


def softmax_kernel(op: RowReduction) -> str:
    """Return PyTorch's kernel for a softmax: ``warp``, ``block`` (a row in registers) or ``loop``."""
    fused = op.out_dtype is not None and op.out_dtype is not op.dtype and not _casts_apart(op)
    if op.dim <= (_WARP_ROW_ELSE if op.backward or fused else _WARP_ROW):
        return "warp"
    return "block" if op.dim <= _REGISTER_ROW and not fused and not op.backward else "loop"


def _warp_places(dim: int) -> float:
    """Return the elements that the lanes of a warp have room for in a row: a power of two.

    >>> _warp_places(1500)
    2048.0
    """
    return float(2.0 ** ceil(log2(dim)))


def _rows_per_warp(dim: int) -> float:
    return 2.0 if _warp_places(dim) <= 128 else 1.0


def _walk_softmax(op: RowReduction, sm_count: float, missing: float) -> RowWalk:
    kernel = softmax_kernel(op)
    if kernel == "warp":
        held = _warp_places(op.dim)
        steps = max(held / 32.0, 1.0) * _rows_per_warp(op.dim)
        place, element, row = _WIDEST_CYCLES if held >= _WARP_ROW else _WARP_CYCLES
        cycle = max(op.rows / sm_count, 1.0) * (place * held + element * op.dim + row)
        return RowWalk(steps_with_misses(steps, 0.5 * missing), cycle)
    each = ceil(op.dim / _BLOCK)
    if kernel == "block":
        two = each <= _TWO_BLOCKS
        cycle = each * (_HELD_CYCLE if two else _HELD_ALONE_CYCLE)
        blocks = _busiest_sm_blocks(op.rows, sm_count, 2.0 if two else 1.0)
        return RowWalk(4.0 + steps_with_misses(4.0 * each, missing), blocks * cycle)
    cycle = _busiest_sm_blocks(op.rows, sm_count, 2.0) * (_WALK_ROW_CYCLE + _WALK_CYCLE * op.dim)
    return RowWalk(12.0 + steps_with_misses(2.0 * each, 0.3 * missing), cycle)


def _busiest_sm_blocks(rows: float, sm_count: float, blocks: float) -> float:
    """Return the blocks of the busiest SM: whole rounds once there is more than one; a single block takes no longer
    than its steps."""
    at_once = sm_count * blocks
    if rows > at_once:
        return blocks * ceil(rows / at_once)
    return rows / sm_count if rows > sm_count else 0.0


def _walk_softmax_gradient(op: RowReduction, sm_count: float, missing: float) -> RowWalk:
    warp = softmax_kernel(op) == "warp"
    each = max(_warp_places(op.dim) / 32.0, 1.0) if warp else 12.0 + 2.0 * ceil(op.dim / _BLOCK)
    return RowWalk(steps_with_misses(each, 0.5 * missing), _SOFTMAX_BACKWARD_CYCLE * op.elements / sm_count)


def _walk_norm(op: RowReduction, sm_count: float, missing: float) -> RowWalk:
    loads = ceil(op.dim / 512.0)
    if op.dim % 4:  # single elements, in blocks of 512 threads that wait for one another's sums
        rounds = max(op.rows / (_SCALAR_SLOTS * sm_count), 1.0)
        steps = (_REDUCE_STEPS + loads) * rounds + loads * missing
        return RowWalk(steps, op.rows / sm_count * _SCALAR_CYCLE * op.dim)
    row, byte, wide = _NORM_CYCLES[op.kind]
    cycle = max(row + byte * op.dim * op.dtype.byte, BLOCK_CYCLE) + (wide if op.dtype is Dtype.FP32 else 0.0)
    return RowWalk(_REDUCE_STEPS + steps_with_misses(loads, missing), op.rows / sm_count * cycle)


def _walk_norm_gradient(op: RowReduction, sm_count: float, missing: float) -> RowWalk:
    share = _RMS_SHARE if op.kind == "rmsnorm" else 1.0
    crowd = max(ceil(op.dim / 32.0) / sm_count, 1.0)
    weights = ceil(op.rows / _GRADIENT_ROWS) * share * crowd
    own = 8.0 + (ceil(op.dim / 512.0) if op.dim % 4 == 0 else ceil(op.dim / 64.0))
    always, byte, again = _BACKWARD_CYCLES
    each = always + op.dtype.byte * (byte + again * _l1_miss_share(op.dim * op.dtype.byte))
    return RowWalk(own + steps_with_misses(weights, 0.3 * missing), each * op.elements / sm_count)


def _l1_miss_share(row_byte: float) -> float:
    """Return the share of a row that L1 no longer holds when a norm reads it again.

    >>> _l1_miss_share(4096.0), _l1_miss_share(16384.0)
    (0.0, 1.0)
    """
    return min(max((row_byte - 6e3) / 8e3, 0.0), 1.0)


register_kernels(Softmax, LayerNorm, RmsNorm, mapping=KernelMapping(row_reduction_work))
