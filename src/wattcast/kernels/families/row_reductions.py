"""Softmax, layer norm and RMS norm over rows, and their gradients, as PyTorch 2 runs them on CUDA
cores.

PyTorch gives short softmax rows to a warp each, keeps longer ones in the registers of a block, and
walks the longest three times. Norms load four elements at a time where four divides the row, else
one. Constants without another source come from times of these kernels on an H200."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wattcast.core import Dtype
from wattcast.core.arrays import Array, CodedColumn, Mask
from wattcast.kernels.families import KernelMapping, register_kernels
from wattcast.kernels.kernel_table import (
    BLOCK_CYCLE,
    SM_THREADS,
    ConditionColumns,
    FamilyColumns,
    ReferenceChip,
    count_columns,
    resident_share,
    steps_with_misses,
    streamed_share,
    wave_fill,
)
from wattcast.workload.operator_base import index_words
from wattcast.workload.operator_types import LayerNorm, RmsNorm, RowReduction, Softmax

# longest rows given to one warp; of a gradient or a fused cast
_WARP_ROW = 2048
_WARP_ROW_ELSE = 1024
_REGISTER_ROW = 9216  # longest row kept in registers
_BLOCK = 1024.0
_TWO_BLOCKS = 6.0  # elements a thread may hold for an SM to take two blocks
# SM cycles of a warp's row: each lane's place in it, each element, the row; then those of 2,048
# places, which take so many registers that fewer warps fit
_WARP_CYCLES = (0.25, 0.12, 6.0)
_WIDEST_CYCLES = (0.2, 0.33, 6.0)
# SM cycles: of a thousand elements in registers (two blocks, one), of a row walked thrice, of its
# elements, of an element cast beforehand
_HELD_CYCLE = 750.0
_HELD_ALONE_CYCLE = 1000.0
_WALK_ROW_CYCLE = 2000.0
_WALK_CYCLE = 0.41
_CAST_CYCLE = 0.7
_SOFTMAX_BACKWARD_CYCLE = 0.47  # of an element
# SM cycles of an element whose exponential is zero: the division by the sum takes its slow way.
# From rows of 128 to 1,024 elements on an H200, with and without a causal mask, which takes up to
# 1.4 times as long
_MASKED_CYCLE = 0.33
# SM cycles of an element of a norm's gradient: always, per byte, and per byte that L1 has lost when
# it is read again
_BACKWARD_CYCLES = (0.2, 0.11, 0.12)
# SM cycles of a row of a norm, of its bytes, and of a row more in fp32; four elements at a time
_NORM_CYCLES = {"layernorm": (215.0, 0.16, 100.0), "rmsnorm": (110.0, 0.075, 25.0)}
# of an element where each is loaded alone, and blocks an SM holds
_SCALAR_CYCLE = 0.03
_SCALAR_SLOTS = 2.0
_REDUCE_STEPS = 4.0  # a reduction over a block takes about as long as four loads
_GRADIENT_ROWS = 32.0  # that a block of the weights' gradient takes at a time
_RMS_SHARE = 0.75  # of a step of it without a mean
# How often a byte crosses the banks of shared memory and L1, from profiler counters on an H200:
# once filled and once read where a kernel streams; more where a row is walked several times.
_SOFTMAX_CROSSINGS = 2.7
_VECTOR_CROSSINGS = 3.7
# Bytes that cross shared memory in a norm that loads single elements: of a row, where 512 threads
# add up moments, of an element, and of a byte of it (eight counted norms of 31 to 38,717 elements)
_SCALAR_ROW = 46.5e3
_SCALAR_ELEMENT = 5.0
_SCALAR_BYTE = 6.25
_SCALAR_PASSES = 3.0  # of a norm that loads single elements, through L2


def row_reduction_work(
    ops: Sequence[RowReduction], told: ConditionColumns, rate: Array, reference: ReferenceChip
) -> FamilyColumns:
    """Return kernel families, work columns and features of softmax and norms."""
    groups = list(group_alike(ops))
    families = CodedColumn.from_parts(
        ((at, [alike.kernel_family] * len(at)) for at, alike in groups), len(ops)
    )
    table = np.empty((len(_COLUMNS), len(ops)))
    for at, alike in groups:
        columns = _count_work(alike, told.cold[at], reference)
        table[:, at] = np.array(np.broadcast_arrays(*columns), dtype=np.float64)
    dim, units, cycles, slots, *rest = table
    waves = units / reference.sm_count
    work = {"units": units, "slots": slots, "unit_flop": rate * cycles / np.maximum(waves, 1.0)}
    work |= zip(_WORK, rest, strict=False)
    plain = dict(zip(_PLAIN, rest[len(_WORK) :], strict=False)) | {
        "pow2_dim": dim / _warp_places(dim),
        "fill": wave_fill(units, 2.0 * reference.sm_count),
        "waves": np.log2(waves),
    }
    logs = {"log_rows": rest[-2], "log_dim": dim, "log_byte": rest[-1]}
    return FamilyColumns(families, work, plain, logs, {"align_dim": dim})


_WORK = (
    "steps",
    "launches",
    "l2_byte",
    "between_byte",
    "shared_byte",
    "dram_read_byte",
    "dram_write_byte",
)
_PLAIN = ("width", "out_width", "cold", "kind", "backward")
_COLUMNS = ("dim", "units", "cycles", "slots", *_WORK, *_PLAIN, "rows", "byte")
_KIND_CODE = {"softmax": 0.0, "layernorm": 1.0, "rmsnorm": 2.0}


class AlikeRows(NamedTuple):
    """Operators that one kernel runs in the same formats; sizes are arrays ``(row,)``."""

    kernel: str  # of a softmax warp, block (a row in registers) or loop; of a norm vector or scalar
    kind: str
    dtype: Dtype
    out_dtype: Dtype
    backward: bool
    log: bool
    rows: Array
    dim: Array
    read_byte: Array
    write_byte: Array
    masked: Array  # share of the elements

    @property
    def elements(self) -> Array:
        """Elements read once by the forward pass."""
        return self.rows * self.dim

    @property
    def kernel_family(self) -> str:
        """The family whose corrections they share."""
        return f"{self.kind}.{'backward' if self.backward else self.kernel}"

    @property
    def casts_apart(self) -> bool:
        """Whether another output format is a kernel of its own: PyTorch fuses it into softmax for
        fp16 alone.
        """
        return self.out_dtype is not self.dtype and not (
            self.kind == "softmax" and self.dtype is Dtype.FP16
        )


def group_alike(ops: Sequence[RowReduction]) -> Iterator[tuple[npt.NDArray[np.intp], AlikeRows]]:
    """Yield operators that one kernel runs in the same formats, with their places among ``ops``."""
    forms = index_words(ops, _read_form)
    columns = count_columns(ops, _read_sizes)
    for which, form in enumerate(forms.values):
        some = np.flatnonzero(forms.place == which)
        sizes = columns[:, some]
        dim = sizes[1]
        kind, dtype, out_dtype, backward, _ = form
        if kind == "softmax":
            fused = out_dtype is not dtype and dtype is Dtype.FP16
            longest = _WARP_ROW_ELSE if backward or fused else _WARP_ROW
            held = (dim <= _REGISTER_ROW) & (not fused) & (not backward)
            kernels = np.where(dim <= longest, "warp", np.where(held, "block", "loop"))
        else:
            kernels = np.where(dim % 4 == 0, "vector", "scalar")
        for kernel in np.unique(kernels).tolist():
            own = (kernels == kernel).nonzero()[0]
            yield some[own], AlikeRows(kernel, *form, *sizes[:, own])


def _read_sizes(op: RowReduction) -> tuple[float, ...]:
    return (
        op.rows,
        op.dim,
        op.read_byte,
        op.write_byte,
        op.masked if isinstance(op, Softmax) else 0.0,
    )


def _read_form(op: RowReduction) -> tuple[str, Dtype, Dtype, bool, bool]:
    return (
        op.kind,
        op.dtype,
        op.out_dtype or op.dtype,
        op.backward,
        isinstance(op, Softmax) and op.log,
    )


def _count_work(
    of: AlikeRows, cold: Mask, reference: ReferenceChip
) -> tuple[Array | Mask | float, ...]:
    """Return the columns of operators that one kernel runs; numbers are those of all of them."""
    softmax = of.kind == "softmax"
    width = of.dtype.byte
    sms = reference.sm_count
    read = of.read_byte
    write = of.write_byte
    both = of.read_byte + of.write_byte
    between = (8.0 if of.casts_apart else 0.0) * of.elements  # fp32 written and read again
    multiplied = softmax and of.backward and not of.log
    if multiplied:  # PyTorch multiplies first: a product is written, and read again with the result
        between = between + 3.0 * of.elements * width
    missing = np.where(cold, 1.0, 1.0 - streamed_share(both + between, reference.l2_byte))
    cut = _cut_softmax(of, both) if softmax else _cut_norm(of, both)
    # rows in flight come again from L2, or from device memory where they do not fit together
    flown = np.minimum(of.rows, cut.slots * sms) * of.dim * width
    again = np.where(
        missing > 0, cut.rereads * (1.0 - resident_share(flown, reference.l2_byte)), 0.0
    )
    steps, sm_cycle = row_walk(of, sms, missing)
    pair = multiplied or (not softmax and (of.backward or of.kernel == "scalar"))  # two kernels
    return (
        *(of.dim, cut.units, sm_cycle, cut.slots),
        *(steps / np.maximum(cut.units / (cut.slots * sms), 1.0), 1.0 + pair + of.casts_apart),
        *(read * cut.passes * cut.reads + write, between),
        *(cut.crossed_byte + 2.0 * between, read * missing * (cut.reads + again), write * missing),
        *(width, of.out_dtype.byte, cold, _KIND_CODE[of.kind], of.backward, of.rows, both),
    )


class _Cut(NamedTuple):
    """How the rows of operators are cut into blocks, and what these move."""

    units: Array  # blocks
    slots: float  # blocks an SM holds
    crossed_byte: Array  # through shared memory
    passes: Array | float = 1.0  # of the operands through L2
    rereads: Array | float = 0.0  # how often a row in flight is read again
    reads: float = 1.0  # how often the operands are read by different kernels


def _cut_softmax(of: AlikeRows, byte: Array) -> _Cut:
    if of.kernel == "warp":  # a warp takes a row or two, a block four warps
        return _Cut(
            np.ceil(of.rows / (4.0 * _rows_per_warp(of.dim))), SM_THREADS / 128.0, byte * 2.0
        )
    slots = SM_THREADS / (128.0 if of.backward else 1024.0)
    passes = 3.0 if of.kernel == "loop" and not of.backward else 1.0
    passes = (
        1.5 if of.backward and of.log else passes
    )  # of two operands, the gradient is read again
    return _Cut(of.rows, slots, byte * _SOFTMAX_CROSSINGS, passes, passes - 1.0)


def _cut_norm(of: AlikeRows, byte: Array) -> _Cut:
    """Cut a norm; its gradient reads both operands for the gradient of the input, and again for the
    weights'.
    """
    width = of.dtype.byte
    layer = of.kind == "layernorm"
    reads = 2.0 if of.backward else 1.0
    if of.kernel == "vector":
        # a long row of a layer norm is no longer in L1 when it is read again
        again = (
            _l1_miss_share(of.dim * width)
            if layer
            else np.clip(of.dim * width / 2e4 - 0.5, 0.1, 1.0)
        )
        return _Cut(
            of.rows, SM_THREADS / 128.0, byte * _VECTOR_CROSSINGS, 1.0 + again, again, reads
        )
    if of.backward:
        return _Cut(of.rows, SM_THREADS / 128.0, byte * _VECTOR_CROSSINGS, 1.0, 1.0, reads)
    crossed = of.rows * (_SCALAR_ROW + of.dim * (_SCALAR_ELEMENT + _SCALAR_BYTE * width))
    passes = layer + _SCALAR_PASSES  # a layer norm loads weights too
    return _Cut(of.rows, SM_THREADS / 512.0, crossed, passes, 1.0, reads)


class RowWalk(NamedTuple):
    """Dependent steps of all rounds of blocks together, and cycles of the busiest SM."""

    steps: Array
    sm_cycle: Array


def row_walk(of: AlikeRows, sm_count: float, missing: Array) -> RowWalk:
    """Return how long blocks walk over their rows; ``missing`` is the share of the bytes that L2
    does not hold.
    """
    each_sm = of.elements / sm_count
    if of.backward and of.kind == "softmax":
        warp = of.kernel == "warp"
        each = (
            np.maximum(_warp_places(of.dim) / 32.0, 1.0)
            if warp
            else 12.0 + 2.0 * np.ceil(of.dim / _BLOCK)
        )
        return RowWalk(steps_with_misses(each, 0.5 * missing), _SOFTMAX_BACKWARD_CYCLE * each_sm)
    if of.backward:
        share = _RMS_SHARE if of.kind == "rmsnorm" else 1.0
        crowd = np.maximum(np.ceil(of.dim / 32.0) / sm_count, 1.0)
        weights = np.ceil(of.rows / _GRADIENT_ROWS) * share * crowd
        own = 8.0 + np.ceil(of.dim / (512.0 if of.kernel == "vector" else 64.0))
        always, byte, again = _BACKWARD_CYCLES
        cycle = always + of.dtype.byte * (byte + again * _l1_miss_share(of.dim * of.dtype.byte))
        return RowWalk(own + steps_with_misses(weights, 0.3 * missing), cycle * each_sm)
    if of.kind == "softmax":
        steps, cycle = _walk_softmax(of, sm_count, missing)
        cycle = cycle + (_MASKED_CYCLE * of.masked + _CAST_CYCLE * of.casts_apart) * each_sm
        return RowWalk(steps + 2.0 * of.casts_apart, cycle)
    loads = np.ceil(of.dim / 512.0)
    if (
        of.kernel == "scalar"
    ):  # single elements, in blocks of 512 threads that wait for one another's sums
        rounds = np.maximum(of.rows / (_SCALAR_SLOTS * sm_count), 1.0)
        steps = (_REDUCE_STEPS + loads) * rounds + loads * missing
        return RowWalk(steps, of.rows / sm_count * _SCALAR_CYCLE * of.dim)
    row, byte, wide = _NORM_CYCLES[of.kind]
    cycle = np.maximum(row + byte * of.dim * of.dtype.byte, BLOCK_CYCLE) + (
        wide if of.dtype is Dtype.FP32 else 0.0
    )
    return RowWalk(_REDUCE_STEPS + steps_with_misses(loads, missing), of.rows / sm_count * cycle)


def _warp_places(dim: Array) -> Array:
    """Return the elements that the lanes of a warp have room for in a row: a power of two.

    >>> float(_warp_places(np.array(1500.0)))
    2048.0
    """
    return np.asarray(2.0 ** np.ceil(np.log2(dim)))


def _rows_per_warp(dim: Array) -> Array:
    return np.where(dim <= 128, 2.0, 1.0)


def _walk_softmax(of: AlikeRows, sm_count: float, missing: Array) -> RowWalk:
    if of.kernel == "warp":
        held = _warp_places(of.dim)
        steps = np.maximum(held / 32.0, 1.0) * _rows_per_warp(of.dim)
        widest = (held >= _WARP_ROW)[..., np.newaxis]
        place, element, row = np.where(widest, _WIDEST_CYCLES, _WARP_CYCLES).T
        cycle = np.maximum(of.rows / sm_count, 1.0) * (place * held + element * of.dim + row)
        return RowWalk(steps_with_misses(steps, 0.5 * missing), cycle)
    each = np.ceil(of.dim / _BLOCK)
    if of.kernel == "block":
        two = each <= _TWO_BLOCKS
        cycle = each * np.where(two, _HELD_CYCLE, _HELD_ALONE_CYCLE)
        blocks = _busiest_sm_blocks(of.rows, sm_count, np.where(two, 2.0, 1.0))
        return RowWalk(4.0 + steps_with_misses(4.0 * each, missing), blocks * cycle)
    cycle = _busiest_sm_blocks(of.rows, sm_count, 2.0) * (_WALK_ROW_CYCLE + _WALK_CYCLE * of.dim)
    return RowWalk(12.0 + steps_with_misses(2.0 * each, 0.3 * missing), cycle)


def _busiest_sm_blocks(rows: Array, sm_count: float, blocks: Array | float) -> Array:
    """Return the blocks of the busiest SM: whole rounds once there is more than one; a single block
    takes no longer
    than its steps."""
    at_once = sm_count * blocks
    few = np.where(rows > sm_count, rows / sm_count, 0.0)
    return np.where(rows > at_once, blocks * np.ceil(rows / at_once), few)


def _l1_miss_share(row_byte: Array) -> Array:
    """Return the share of a row that L1 no longer holds when a norm reads it again.

    >>> _l1_miss_share(np.array([4096.0, 16384.0])).tolist()
    [0.0, 1.0]
    """
    return np.clip((row_byte - 6e3) / 8e3, 0.0, 1.0)


register_kernels(Softmax, LayerNorm, RmsNorm, mapping=KernelMapping(row_reduction_work))
